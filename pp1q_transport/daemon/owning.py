"""The daemon of a rank above 0 that has a link of its own to the leader (group modes "vocabulary" and "request-owner").

Between the channel of an attached target, which is not trusted, the group link to rank 0, which grants and decides, and the
leader's link, over which the rows come. A grant meets the STEP of this rank's own process, and then goes to the leader.
Requests and their tokens are those that the process states; generations and rounds are rank 0's. SPEC sections 4 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .. import wire
from ..engine import EngineConfig, terms_ahead
from ..errors import LocalMisuse, PeerFault, Reason
from ..local import messages as m
from ..session.own_link import Joint, OwnLinkSession, OwnMemberSession
from ..session.requests import Request
from ..session.shards import REQUEST_OWNER
from .membership import MemberPort, MemberRank
from .served import ServedReceiver

if TYPE_CHECKING:
    from ..counters import Counters
    from ..session.slots import Slot
    from ..session.terms import SessionTerms


class OwnLinkReceiver(ServedReceiver):
    """The link to the leader of a rank above 0: its slots are the rank's, and it grants none."""

    def __init__(self, config: EngineConfig, rank: MemberRank, joint: Joint) -> None:
        self._rank = rank
        self._joint = joint
        super().__init__(config)
        self._table = rank.table
        self._region = rank.region

    def prepare(self, terms: SessionTerms) -> None:
        """See `Receiver.prepare`: the memory is there."""
        ours, theirs = self._rank.geometry, terms.geometry()
        if (ours.max_slots, ours.depth, ours.row_bytes) != (theirs.max_slots, theirs.depth, theirs.row_bytes):
            raise PeerFault(Reason.LIMITS_MISMATCH, "the leader has slots of other sizes")

    def _make_session(self, terms: SessionTerms) -> OwnLinkSession:
        self.prepare(terms)
        rank = self._rank
        session = OwnLinkSession(terms, rank.table, rank.region.memory, self.requests, self.counters, self._joint)
        self.session = session
        return session

    def _on_up(self) -> None:
        super()._on_up()
        self.edges.clear()

    def _on_down(self, reason: Reason) -> None:
        """See `Receiver._on_down`; generations are rank 0's to count."""
        session = self.session
        assert session is not None
        self._unopened.clear()
        self._rows_before = self.rows_done()
        session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)
        self.session = None

    def knows(self, request: int) -> bool:
        """Whether the leader was told of the request, or its first STEP will do so."""
        return self.requests.get(request) is not None and request not in self._unopened


class OwnRank(MemberRank):
    """A rank's slots, its group link and its link to the leader."""

    def __init__(self, config: EngineConfig, leader: EngineConfig, counters: Counters) -> None:
        self.joint = Joint(config.hello.group_mode)
        super().__init__(config, counters, terms_ahead(leader.hello))
        self.own = OwnLinkReceiver(leader, self, self.joint)

    def _make_session(self, terms: SessionTerms) -> OwnMemberSession:
        if (terms.max_slots, terms.depth) != (self.geometry.max_slots, self.geometry.depth):
            raise PeerFault(Reason.LIMITS_MISMATCH, "rank 0 has other slots")
        session = OwnMemberSession(terms, self.member, self.table, self.region.memory, self.counters, self.joint)
        self.session = session
        return session

    def serve(self) -> int:
        """See `MemberRank.serve`: rows first, then the group."""
        return self.own.serve_once() + super().serve()

    def flush(self) -> None:
        """Sends what waits on both links."""
        self.own.engine.flush()
        self.engine.flush()

    def rows_done(self) -> int:
        """Rows that passed every check, over all sessions."""
        return self.own.rows_done()

    def totals(self) -> dict[str, int]:
        """See `MemberRank.totals`."""
        return super().totals() | {"rows": self.own.rows_done()}

    def has_rows(self, slot: Slot) -> bool:
        """Whether this rank asked for the rows of the slot's proposal."""
        return slot.reply_bytes > 0 or self.joint.mode != REQUEST_OWNER

    def close(self) -> None:
        """Leaves the leader and the group and frees the memory."""
        self.own.engine.close()
        super().close()


class OwnMemberPort(MemberPort):
    """Serves the target process of such a rank."""

    def __init__(self, rank: OwnRank, counters: Counters) -> None:
        super().__init__(rank, counters)
        self.own_rank = rank
        self._asked: dict[int, tuple[Any, ...]] = {}  # request -> the fields of its process's latest STEP

    def give_back(self) -> None:
        """See `MemberPort.give_back`; its requests are closed at the leader."""
        own = self.own_rank.own
        self._asked.clear()
        super().give_back()
        for request in list(own.requests.requests.values()):
            own.close_request(request)
        self.after_records()

    def after_records(self) -> None:
        """STEPs, commits, votes and releases wait to be sent."""
        self.own_rank.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """See `ClientPort.take`."""
        if kind == m.OPEN:
            self._open(fields, payload)
            return
        if kind == m.STEP:
            if self.own_rank.own.requests.get(fields[0]) is not None:
                self._asked[fields[0]] = fields
        elif kind == m.COMMIT:
            if self._commit(fields[0], fields[1], fields[2], fields[3], fields[7]):
                self._commit_tokens(fields, payload)
            return
        elif kind == m.CLOSE:
            self._asked.pop(fields[0], None)
        super().take(kind, fields, payload, now_ns)
        if kind == m.CLOSE:
            request = self.own_rank.own.requests.get(fields[0])
            if request is not None:
                self.own_rank.own.close_request(request)

    def _open(self, fields: tuple[Any, ...], payload: memoryview) -> None:
        """Its generation is what rank 0 grants: a higher one stated here would make the leader refuse that as stale."""
        number, seed, max_position, _generation, _round, _count = fields
        own = self.own_rank.own
        try:
            request = Request(number, seed, payload.cast("i"), max_position)
            own.requests.add(request)
            own.announce(request)
        except LocalMisuse as error:
            own.requests.remove(number)
            self.counters.add("client_misuse")
            self.log.warning("client_misuse", request=number, error=str(error))
            text = m.text_bytes(str(error))
            self.send(m.REFUSED, number, 0, Reason.LIMITS_MISMATCH.code, len(text), payload=text)

    def _commit_tokens(self, fields: tuple[Any, ...], payload: memoryview) -> None:
        own = self.own_rank.own
        request = own.requests.get(fields[0])
        if request is None:
            return
        try:
            own.commit(request, fields[3], fields[4], fields[5], own.check_tokens(request, payload.cast("i")))
        except LocalMisuse as error:
            raise PeerFault(Reason.CONTEXT_MISMATCH, f"request {fields[0]}: {error}") from error

    # ---- grants that meet their STEP ----------------------------------------------------------------------------

    def report(self, now_ns: int) -> None:
        """See `ClientPort.report`."""
        super().report(now_ns)
        while self._ask():
            super().report(now_ns)

    def _ask(self) -> bool:
        """Whether grants met the STEPs that asked for them. A STEP that waits asks for the round after those of which its process
        was told what became of them, so all that came in must be told before: sending takes in more."""
        group = self.own_rank.joint.group
        if group is None or not group.pending:
            return False
        void = [slot for request, slot in group.pending.items() if self.owes(request)]
        for slot in void:
            group.refuse_granted(slot, Reason.CANCELLED)
        met = [slot for request, slot in group.pending.items() if request in self._waiting]
        for slot in met:
            if self.own_rank.member.open:  # else one of them made us leave, and the rest is void by that
                self._meet(group, slot)
        if met or void:
            self.after_records()
        return bool(met or void)

    def _disagree(self, request: Request, slot: Slot) -> None:
        """Rank 0 has other committed tokens than our process, and would for ever: this rank leaves, so that all agree anew. Here
        and not at the process (`AttachedReceiver`), which hears of no round that is void."""
        self.counters.refuse(Reason.RANK_DISAGREE)
        self.log.error(
            "rank_disagree",
            reason=Reason.RANK_DISAGREE.value,
            request=request.request,
            anchor=slot.anchor,
            ours=request.anchor,
        )
        self.rank.leave(Reason.RANK_DISAGREE)

    def _meet(self, group: OwnMemberSession, slot: Slot) -> None:
        own = self.own_rank.own
        request, asked = own.requests.get(slot.request), self._asked.get(slot.request)
        if request is None or asked is None or not own.knows(slot.request):
            group.refuse_granted(slot, Reason.REQUEST_UNKNOWN)
            return
        if request.anchor != slot.anchor:
            self._disagree(request, slot)
            return
        _request, _ticket, context, trace_id, temperature, _generation, _round, depth, support, _budget, owner = asked
        session = own.session
        if self.own_rank.joint.mode == REQUEST_OWNER and owner != self.own_rank.member.rank:
            group.refuse_granted(slot, Reason.RANK_DISAGREE)
        elif not isinstance(session, OwnLinkSession):
            group.refuse_granted(slot, Reason.PEER_LOST)
        else:
            form = wire.SPARSE if support else wire.DENSE
            try:
                session.step_granted(slot, request, depth, temperature, support, form, context, trace_id)
            except PeerFault as fault:  # a leader that does not read
                own.engine.fail(fault.reason)
