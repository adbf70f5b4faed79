"""The leader daemon's half of one draft process: STEPs of every target become its records, its rows go to their targets.

Between the channel of an attached draft, which is not trusted, and one embedded `Leader` for each target this daemon serves.
Draws nothing and writes no q: the draft does both, in the staging memory it maps. While no draft is attached every STEP is
answered at once with `peer_lost`, so that targets go on alone instead of waiting. SPEC sections 2, 4 and 9.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Any

from ..client.draft import Leader
from ..errors import LocalMisuse, PeerFault, Reason
from ..local import messages as m
from ..session import leader as states
from .clients import ClientPort, reason_given, step_fields
from .opened import lasting

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..engine import Engine, EngineConfig
    from ..local.attach import Attached
    from ..memory import Memory
    from ..session.leader import Grant, LeaderSession
    from .drafting import DraftRanks
    from .leading_group import ServedGroup


class ServedLeader(Leader):
    """The leader of one target, whose rows another process drafts. `target` is its index among the daemon's peers."""

    def __init__(self, config: EngineConfig, target: int, name: str) -> None:
        self.target = target
        self.name = name
        self._rows_before = 0
        self.on_edge: Callable[[int, int], None] | None = None  # (session, 0) came up, (0, reason code) went down
        super().__init__(config)

    def row_place(self, slot: int, row: int) -> tuple[Memory, int]:
        """The staging memory, and where a row lies in it."""
        staging = self._staging
        assert staging is not None
        return staging.region.memory, staging.views.geometry.row_offset(slot, row)

    @property
    def engines(self) -> list[Engine]:
        """The one it has."""
        return [self.engine]

    def flush(self) -> None:
        """Sends what waits."""
        self.engine.flush()

    def unsent(self) -> bool:
        """Whether frames wait to be sent."""
        return self.session is not None and not self.session.outbox.empty()

    def give_up(self, reason: Reason) -> None:
        """Ends the session."""
        self.engine.fail(reason)

    def rows_done(self) -> int:
        """Rows sent, over all sessions."""
        return self._rows_before + (self.session.rows if self.session is not None else 0)

    def _dispatch(self, session: LeaderSession) -> None:
        session.events[:] = lasting(session.events)
        super()._dispatch(session)

    def _on_up(self) -> None:
        super()._on_up()
        assert self.session is not None
        if self.on_edge is not None:
            self.on_edge(self.session.terms.session, 0)

    def fail(self, grant: Grant, generation: int, reason: Reason, target: int = 0) -> None:
        """See `Step.fail`. A target that takes no answers any more loses its session; the daemon goes on with the others."""
        if self.session is not None and grant.alive(generation):
            self.engine.log.debug(
                "step_failed",
                reason=reason.value,
                target=self.name,
                request=grant.request,
                round=grant.round,
                slot=grant.slot,
                trace_id=grant.trace_id,
            )
        try:
            super().fail(grant, generation, reason, target)
        except PeerFault as fault:
            self.engine.fail(fault.reason)

    def _on_down(self, reason: Reason) -> None:
        self._rows_before = self.rows_done()
        super()._on_down(reason)
        if self.on_edge is not None:
            self.on_edge(0, reason.code)


class DraftPort(ClientPort):
    """Serves one draft process at a time, on behalf of all targets."""

    hears = m.DRAFT

    def __init__(self, leaders: list[ServedLeader | ServedGroup], counters: Counters) -> None:
        super().__init__("leader", counters)
        self.bytes_sent = 0  # of rows
        self.whole_sent = 0  # proposals, all their rows
        self.leaders = leaders
        self.ranks: DraftRanks | None = None  # of a tensor-parallel draft
        for leader in leaders:
            self._listen(leader)

    def _listen(self, leader: ServedLeader | ServedGroup) -> None:
        """What a target does with its requests goes to the draft as it happens."""
        target = leader.target

        def opened(request: int, tokens: list[int]) -> None:
            if self.ranks is not None:
                self.ranks.targets[target].opened(request, array("i", tokens))
            self._opened(leader, request, _int32(tokens))

        def committed(request: int, tokens: list[int]) -> None:
            if self.ranks is not None:
                self.ranks.targets[target].committed(request, array("i", tokens))
            payload = _int32(tokens)
            self.send(m.COMMITTED_TOKENS, request, target, 0, 0, len(tokens), payload=payload)

        def reset(request: int, reason: Reason) -> None:
            if self.ranks is not None:
                self.ranks.targets[target].dead(request, reason)
            self.send(m.RESET, request, target, reason.code, 0, 0)

        def closed(request: int) -> None:
            if self.ranks is not None:
                self.ranks.targets[target].closed(request)
            self.send(m.CLOSED, request, target, 0)

        def edge(session: int, code: int) -> None:
            if session:
                self.send(m.TARGET_UP, target, 0, session)
                return
            if self.ranks is not None:
                self.ranks.targets[target].ended()
            self.send(m.TARGET_DOWN, target, code)

        leader.on_edge = edge
        leader.on_open(opened)
        leader.on_commit(committed)
        leader.on_reset(reset)
        leader.on_close(closed)

    def _opened(self, leader: ServedLeader | ServedGroup, number: int, tokens: bytes) -> None:
        """`tokens` are those it was opened with: what was committed since, perhaps in the same breath, is told by itself."""
        request = leader.requests.get(number)
        if request is not None:  # or it was closed in the same breath
            fields = (number, request.seed, leader.target, request.max_position, request.generation, len(tokens) // 4)
            self.send(m.OPENED, *fields, payload=tokens)

    # ---- clients ------------------------------------------------------------------------------------------------

    def attach(self, attached: Attached, now_ns: int) -> None:
        """See `ClientPort.attach`."""
        for leader in self.leaders:
            leader.collect()  # what is not told yet is part of the state that the draft hears now
        super().attach(attached, now_ns)

    def welcome(self, now_ns: int) -> None:
        """A draft hears of every session and every open request with all its tokens, then of new STEPs."""
        for leader in self.leaders:
            if leader.session is not None:
                self.send(m.TARGET_UP, leader.target, 0, leader.session.terms.session)
                for request in list(leader.requests.requests.values()):
                    self._opened(leader, request.request, request.tokens.tobytes())

    def give_back(self) -> None:
        """What the draft had under way ends with `peer_lost` at its targets, at once."""
        for leader in self.leaders:
            if leader.session is not None:
                for grant in leader.session.grants:
                    leader.fail(grant, grant.generation, Reason.PEER_LOST)
        self._sweep(Reason.PEER_LOST)

    def _sweep(self, reason: Reason) -> None:
        """The other ranks of the draft hear of proposals that were given up here."""
        if self.ranks is not None:
            for ranks in self.ranks.targets:
                ranks.sweep(reason)
            self.ranks.flush()

    def lost_rank(self, target: int, grant: Grant, reason: Reason) -> None:
        """Another rank of the draft does not follow this proposal."""
        request = grant.request
        self.leaders[target].fail(grant, grant.generation, reason)
        self.counters.add("draft_ranks_lost")
        self.send(m.RESET, request, target, reason.code, 0, 0)

    def after_records(self) -> None:
        """Tokens and rows wait to be sent, in this order."""
        if self.ranks is not None:
            self.ranks.flush()
        for leader in self.leaders:
            if leader.unsent():
                leader.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """A row that the draft staged, or a STEP that it gives up."""
        if kind == m.PUT:
            self._put(*fields[:8])
            return
        if kind != m.FAIL:
            raise PeerFault(Reason.UNEXPECTED_KIND, "a shard of a row from draft rank 0, which puts whole ones")
        named, target, slot, generation, code = fields
        leader, grant = self._grant_of(named, target, slot)
        if grant is not None:
            reason = reason_given(code)
            leader.fail(grant, generation, reason)
            self._sweep(reason)

    def _grant_of(self, named: int, target: int, slot: int) -> tuple[ServedLeader | ServedGroup, Grant | None]:
        """The target, and the grant of its slot; None when the session is not the one that was named."""
        if target >= len(self.leaders):
            raise PeerFault(Reason.SLOT_BOUNDS, f"target {target}")
        leader = self.leaders[target]
        session = leader.session
        if session is None or session.terms.session != named:
            return leader, None  # lost meanwhile: the draft hears of it. The next one's slots and generations look the same
        if slot >= len(session.grants):
            raise PeerFault(Reason.SLOT_BOUNDS, f"slot {slot} of target {target}")
        return leader, session.grants[slot]

    def _put(
        self, named: int, target: int, slot: int, generation: int, position: int, token: int, entries: int, length: int
    ) -> None:
        leader, grant = self._grant_of(named, target, slot)
        session = leader.session
        if grant is None or session is None or not grant.alive(generation):
            return  # a row of a dead proposal
        row = position - grant.anchor - 1
        if not 0 <= row < grant.depth:
            raise PeerFault(Reason.POSITION_BOUNDS, f"position {position} of slot {slot}")
        memory, at = leader.row_place(slot, row)
        if self.ranks is not None and row == grant.rows and 0 <= token < session.terms.vocab_size:
            self.ranks.targets[target].token(grant, position, token)
            self.ranks.flush()  # a rank needs it for its part of the next row, which is computed already
            if not grant.alive(generation):
                return
        try:
            if session.put_row(grant, generation, position, token, entries, memory, at, length):
                self.bytes_sent += length
                self.whole_sent += row + 1 == grant.depth
        except LocalMisuse as error:  # the draft's, and for us a peer's fault: its proposal ends, it is cut off
            leader.fail(grant, generation, Reason.CANCELLED)
            self._sweep(Reason.CANCELLED)
            raise PeerFault(Reason.LENGTH_BOUNDS, str(error)) from error
        except PeerFault as fault:  # the target's, who reads nothing: no fault of the draft's
            leader.give_up(fault.reason)

    # ---- records out --------------------------------------------------------------------------------------------

    def report(self, now_ns: int) -> None:
        """New STEPs go to the draft; those that there is none for are answered for it."""
        for leader in self.leaders:
            for grant in leader.take_grants():
                reason = self._refusal(leader, grant)
                if reason is not None:
                    leader.fail(grant, grant.generation, reason)
                    self.counters.add("steps_refused")
                elif grant.alive(grant.generation):
                    self._tell_step(leader, grant)
        self._sweep(Reason.CANCELLED)

    def _refusal(self, leader: ServedLeader | ServedGroup, grant: Grant) -> Reason | None:
        """None once the STEP is every other rank's too; else why nobody drafts for it, decided before anything is drawn."""
        if self.draining:
            return Reason.CANCELLED
        if self.attached is None:
            return Reason.PEER_LOST
        if self.ranks is None:
            return None
        ranks = self.ranks.targets[leader.target]
        reason = ranks.may_step(grant)
        if reason is None and not ranks.step(grant):
            reason = Reason.REQUEST_UNKNOWN
        return reason

    def _tell_step(self, leader: ServedLeader | ServedGroup, grant: Grant) -> None:
        self.send(m.STEP_FOR_DRAFT, *step_fields(grant, leader.target))

    # ---- what the loop asks -------------------------------------------------------------------------------------

    def drain(self, deadline_ms: int, now_ns: int) -> None:
        """See `ClientPort.drain`."""
        super().drain(deadline_ms, now_ns)
        if self.ranks is not None:
            self.ranks.drain()

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: STEPs that are being drafted, here or by another rank, or frames that are not sent."""
        if self.ranks is not None and self.ranks.busy:
            return True
        for leader in self.leaders:
            session = leader.session
            if session is None:
                continue
            if leader.unsent() or any(grant.state == states.DRAFTING for grant in session.grants):
                return True
        return False


def _int32(tokens: list[int]) -> bytes:
    return array("i", tokens).tobytes()
