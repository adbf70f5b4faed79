"""The daemon of a draft's rank above 0: what rank 0 says of each target, for the process beside it; in mode "vocabulary" also its
range of every row, over a link of its own.

Between the channel of an attached draft rank, which is not trusted, and the links to draft rank 0 (`session.draft_peer`). The
process draws nothing: it is told each token. A STEP that it can't follow is refused to rank 0 at once, which gives the proposal
up for all ranks. SPEC sections 2 (TOKEN), 4 and 9.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any, cast

from ..counters import Counters
from ..engine import Engine, EngineConfig
from ..errors import LocalMisuse, PeerFault, Reason
from ..local import messages as m
from ..session.draft_peer import DraftPeerSession, Told
from ..session.leader import DRAFTING, Grant
from ..session.requests import RequestTable
from .clients import ClientPort, reason_given, step_fields
from .drafting import BUSY, DRAINING, READY, TOLD_AT_MOST

if TYPE_CHECKING:
    from ..local.attach import Attached
    from ..session.terms import SessionTerms
    from ..staging import Region
    from .sharing import OwnShare


class FollowedTarget:
    """One target of draft rank 0. `share` is this rank's own link to it, where there is one. `target` is its index here."""

    def __init__(self, config: EngineConfig, target: int, name: str, share: OwnShare | None) -> None:
        self.target = target
        self.name = name
        self.share = share
        self.counters = Counters()
        self.session: DraftPeerSession | None = None
        self.attached = False
        self.edges: list[tuple[int, int]] = []  # (session, 0) came up, (0, reason code) went down
        self.tokens: dict[int, list[int]] = {}  # by slot, of its present generation
        self._said: dict[str, bool] = {}
        self._asked: list[tuple[int, int]] | None = None  # (slot, slot_generation) that rank 0 told of before it ends
        self.engine = Engine(config, self._make_session, self._on_up, self._on_down, self.counters)
        if share is not None:
            share.on_lost = self.give_up
            share.on_refused = self.fail

    @property
    def engines(self) -> list[Engine]:
        """To draft rank 0; and to the target, where this rank has a link to it."""
        return [self.engine] if self.share is None else [self.engine, self.share.engine]

    @property
    def region(self) -> Region | None:
        """The staging memory of this rank's ranges of rows."""
        return None if self.share is None else self.share.region

    def rows_done(self) -> int:
        """Ranges of rows sent, over all sessions."""
        return 0 if self.share is None else self.share.rows_done()

    # A peer draws nothing, so there is no key to guard beyond a session: its table is the session's own.
    def _make_session(self, terms: SessionTerms) -> DraftPeerSession:
        self.session = DraftPeerSession(terms, RequestTable(), self.counters)
        return self.session

    def _on_up(self) -> None:
        assert self.session is not None
        self.edges.append((self.session.terms.session, 0))
        self._said = {}
        self._asked = None
        self.say_ready()

    def _on_down(self, reason: Reason) -> None:
        session, self.session = self.session, None
        assert session is not None
        session.lost()
        if self.share is not None:
            self.share.forget(Reason.PEER_LOST)
        self.tokens.clear()
        self.edges.append((0, reason.code))

    def serve(self) -> int:
        """One pass of both engines. Returns the bytes moved."""
        moved = self.engine.poll()
        if self.share is not None:
            moved += self.share.serve()
        if self.engine.inbox:
            said = self.engine.inbox[:]
            self.engine.inbox.clear()
            for kind, body in said:
                self._hear(kind, body)
        self.say_ready()
        return moved

    def say_ready(self) -> None:
        """Tells rank 0 whether this rank can follow STEPs, whenever that changes; and, once asked, whether it is through."""
        if self.session is None:
            return
        now = {READY: self.attached and (self.share is None or self.share.session is not None)}
        if self._asked is not None:
            grants = self.session.grants
            now[BUSY] = self.busy or any(grants[slot].generation < generation for slot, generation in self._asked)
        if now != self._said:
            self._said = now
            self.engine.send_control("report", now)

    def _hear(self, kind: str, body: object) -> None:
        asked = body.get(DRAINING) if kind == "report" and isinstance(body, dict) and len(body) == 1 else None
        most = 0 if self.session is None else len(self.session.grants)
        if not isinstance(asked, list) or len(asked) > TOLD_AT_MOST or not all(_names_step(one, most) for one in asked):
            self.engine.fail(Reason.MALFORMED)
            return
        self._asked = [(slot, generation) for slot, generation in asked]

    @property
    def busy(self) -> bool:
        """Whether this rank is not through: STEPs that it follows, or ranges of rows that are not sent."""
        following = self.session is not None and any(grant.state == DRAFTING for grant in self.session.grants)
        return following or (self.share is not None and self.share.busy)

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """This rank can't follow a STEP."""
        if self.session is None or self.session.grants[grant.slot].generation != generation:
            return
        if self.share is not None:  # also where every token was told and rows are missing
            self.share.reset(grant.slot, generation, reason)
        try:
            self.session.fail(self.session.grants[grant.slot], generation, reason)
        except PeerFault as fault:  # rank 0 does not read
            self.engine.fail(fault.reason)

    def give_up(self, reason: Reason) -> None:
        """This rank can't go on with anything that is under way."""
        if self.session is not None:
            for grant in list(self.session.grants):
                self.fail(grant, grant.generation, reason)
        if self.share is not None:
            self.share.give_up(reason)

    def flush(self) -> None:
        """Sends what waits."""
        for engine in self.engines:
            if engine.session is not None and not engine.session.outbox.empty():
                engine.flush()

    def close(self) -> None:
        """Says goodbye."""
        self.engine.close()
        if self.share is not None:
            self.share.close()


class FollowPort(ClientPort):
    """Serves the process of this draft rank, for all targets."""

    hears = m.DRAFT

    def __init__(self, targets: list[FollowedTarget], counters: Counters) -> None:
        super().__init__("draft_peer", counters)
        self.targets = targets

    # ---- clients ------------------------------------------------------------------------------------------------

    def attach(self, attached: Attached, now_ns: int) -> None:
        """See `ClientPort.attach`."""
        self.report(now_ns)  # what is not told yet is part of the state that the process hears now; STEPs are refused
        super().attach(attached, now_ns)

    def welcome(self, now_ns: int) -> None:
        """The process hears of every link to rank 0 and every open request with all its tokens."""
        for target in self.targets:
            session = target.session
            if session is not None:
                self.send(m.TARGET_UP, target.target, 0, session.terms.session)
                for request in list(session.requests.requests.values()):
                    tokens = request.tokens.tobytes()
                    fields = (request.request, request.seed, target.target, request.max_position, request.generation)
                    self.send(m.OPENED, *fields, len(tokens) // 4, payload=tokens)
            target.attached = True
            target.say_ready()

    def give_back(self) -> None:
        """What the process followed ends at rank 0, at once."""
        for target in self.targets:
            target.attached = False
            target.say_ready()
            target.give_up(Reason.PEER_LOST)
            target.flush()

    def after_records(self) -> None:
        """Refusals and ranges of rows wait to be sent."""
        for target in self.targets:
            target.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """A STEP that the process gives up, or its range of a row."""
        if kind == m.PUT:
            raise PeerFault(Reason.UNEXPECTED_KIND, "a whole row from a draft rank above 0")
        named, number, slot, generation = fields[:4]
        if number >= len(self.targets):
            raise PeerFault(Reason.SLOT_BOUNDS, f"target {number}")
        target = self.targets[number]
        session = target.session
        if session is None or session.terms.session != named:
            return  # lost meanwhile: the process hears of it. The next one's slots and generations look the same
        if slot >= len(session.grants):
            raise PeerFault(Reason.SLOT_BOUNDS, f"slot {slot} of target {number}")
        grant = session.grants[slot]
        if kind == m.FAIL:
            target.fail(grant, generation, reason_given(fields[4]))
        elif target.share is None:
            raise PeerFault(Reason.UNEXPECTED_KIND, "a range of a row, where draft rank 0 sends whole ones")
        elif grant.generation == generation:
            try:
                target.share.put(grant, target.tokens.get(slot, []), *fields[4:])
            except LocalMisuse as error:
                target.give_up(Reason.CANCELLED)
                raise PeerFault(Reason.LENGTH_BOUNDS, str(error)) from error

    # ---- records out --------------------------------------------------------------------------------------------

    def report(self, now_ns: int) -> None:
        """What rank 0 said, in its order."""
        for target in self.targets:
            session = target.session
            if target.edges:
                self._tell_edges(target)
            if session is not None and session.stream:
                stream = session.stream[:]
                session.stream.clear()
                for told in stream:
                    self._tell(target, told)
            target.flush()

    def _tell_edges(self, target: FollowedTarget) -> None:
        edges = target.edges[:]
        target.edges.clear()
        for number, code in edges:
            if number:
                self.send(m.TARGET_UP, target.target, 0, number)
            else:
                self.send(m.TARGET_DOWN, target.target, code)

    def _tell(self, target: FollowedTarget, told: Told) -> None:
        index, request, detail = target.target, told.request, cast("Any", told.detail)
        if told.kind == "step":
            self._tell_step(target, detail)
        elif told.kind == "token":
            slot, generation, position, token = detail
            target.tokens.setdefault(slot, []).append(token)
            self.send(m.TOKEN, index, slot, generation, position, token, 0)
        elif told.kind == "reset":
            slot, generation, reason = detail
            if target.share is not None:
                target.share.reset(slot, generation, reason)
            self.send(m.RESET, request, index, reason.code, slot, generation)
        elif told.kind == "close":
            self.send(m.CLOSED, request, index, 0)
        elif told.kind == "commit":
            self.send(m.COMMITTED_TOKENS, request, index, 0, 0, len(detail), payload=array("i", detail).tobytes())
        else:
            self._tell_open(target, request, array("i", detail))

    def _tell_open(self, target: FollowedTarget, number: int, tokens: array[int]) -> None:
        session = target.session
        request = None if session is None else session.requests.get(number)
        if request is not None:  # or it was closed in the same breath
            fields = (number, request.seed, target.target, request.max_position, request.generation, len(tokens))
            self.send(m.OPENED, *fields, payload=tokens.tobytes())

    def _tell_step(self, target: FollowedTarget, grant: Grant) -> None:
        target.tokens[grant.slot] = []
        reason = self._refusal(target, grant)
        if reason is not None:
            self.counters.add("steps_refused")
            target.fail(grant, grant.generation, reason)
            return
        self.send(m.STEP_FOR_DRAFT, *step_fields(grant, target.target))

    def _refusal(self, target: FollowedTarget, grant: Grant) -> Reason | None:
        if self.draining:
            return Reason.CANCELLED
        if self.attached is None:
            return Reason.PEER_LOST
        return None if target.share is None else target.share.begin(grant)

    # ---- what the loop asks -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: STEPs that this rank follows, or ranges of rows that are not sent."""
        return any(target.busy for target in self.targets)


def _names_step(named: object, slots: int) -> bool:
    """Whether a part of rank 0's report is [slot, slot_generation] of a session with so many slots."""
    return isinstance(named, list) and len(named) == 2 and all(type(one) is int for one in named) and 0 <= named[0] < slots
