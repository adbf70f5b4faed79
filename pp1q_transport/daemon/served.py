"""The receiver that a daemon runs for a process beside it: outcomes and edges of sessions are kept until that process is told.

Between the embedded `Receiver`, which it is, and the port that serves the process. A daemon waits for nobody: what the leader has
no room for now is opened later. Reads no records. SPEC sections 4 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..client.target import OPENS_QUEUED_BYTES, Receiver, SlotTicket
from ..client.target_side import refuse_unsettled
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..engine import EngineConfig
    from ..session.receiver import ReceiverSession
    from ..session.requests import Request
    from ..session.slots import Slot

NO_TICKET: Final = 0
OPENS_A_LOOK: Final = 256
U32_MAX: Final = (1 << 32) - 1


class ServedTicket(SlotTicket):
    """A STEP of an attached target. Its outcome is queued at its receiver the moment it is known."""

    number = NO_TICKET
    turn = 0  # the breaker's, when the STEP was let through

    def settle(self, slot: Slot) -> None:
        """See `SlotTicket.settle`. No copies begin: a daemon has no device."""
        if slot.generation == self._generation:
            self._reason = slot.reason
        self._receiver.outcomes.append(self)  # type: ignore[attr-defined]  # a `ServedReceiver`'s


class ServedReceiver(Receiver):
    """A receiver whose steps are asked for by another process: outcomes and edges of sessions are kept for its port."""

    ticket_class = ServedTicket

    def __init__(self, config: EngineConfig) -> None:
        self.outcomes: list[ServedTicket] = []
        self._rows_before = 0
        self.edges: list[tuple[int, int]] = []  # (session, 0) came up, (0, reason code) went down
        self._unopened: dict[int, Request] = {}  # whose OPEN waits until the leader takes more
        super().__init__(config)

    def serve_once(self) -> int:
        """One pass of the engine and the watchdog, without waiting. Returns the bytes moved."""
        moved = self.engine.poll()
        session = self.session
        if session is not None:
            session.tick(monotonic_ns())
            self._settle()
            if self._unopened:
                self._open_more()
        return moved

    # ---- a daemon waits for nobody: what the leader has no room for now is opened later -----------------------------

    def _send_open(self, session: ReceiverSession, request: Request) -> None:
        if session.outbox.bytes_queued > OPENS_QUEUED_BYTES:
            self.engine.flush()
        if self.session is not session:
            return
        if self._unopened or session.outbox.bytes_queued > OPENS_QUEUED_BYTES:
            self._unopened[request.request] = request
        else:
            session.open(request)

    def _open_more(self) -> None:
        for _ in range(OPENS_A_LOOK):
            session = self.session
            if session is None or not self._unopened or session.outbox.bytes_queued > OPENS_QUEUED_BYTES:
                return
            request = self._unopened.pop(next(iter(self._unopened)))
            try:
                session.open(request)
            except LocalMisuse as error:  # see `Receiver._on_up`
                self.counters.add("requests_not_opened")
                self.engine.log.warning("request_not_opened", request=request.request, error=str(error))
            self.engine.flush()

    def ask(
        self,
        request: Request,
        depth: int,
        temperature: float,
        support: int,
        target_context: int,
        budget_us: int,
        trace_id: int,
    ) -> SlotTicket:
        """See `Receiver.enqueue`, of an open request and numbers that a record held; `support` 0 asks for dense q. Also raises
        `ProposalDiscarded(overload)` for a request that the leader has not heard of."""
        session = self.session
        if request.request in self._unopened:
            raise ProposalDiscarded(Reason.OVERLOAD, request.request, request.round)
        if session is None:
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, request.round)
        if request.in_flight:
            refuse_unsettled(request, any(ticket.request is request for ticket in self._tickets.values()))
        return self._ask(session, request, depth, temperature, support, target_context, budget_us, trace_id)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """See `TargetSide.commit`."""
        if request.request in self._unopened:  # they travel with its OPEN
            request.extend(tokens)
            request.in_flight = False
        else:
            super().commit(request, round, source, accepted, tokens)

    def retire(self, request: Request) -> None:
        """See `TargetSide.retire`. A leader that takes nothing any more costs the session, not the daemon."""
        if self._unopened.pop(request.request, None) is not None:
            return
        try:
            super().retire(request)
        except PeerFault as fault:
            self.engine.fail(fault.reason)

    def rows_done(self) -> int:
        """Rows that passed every check, over all sessions."""
        return self._rows_before + (self.session.rows if self.session is not None else 0)

    def _on_up(self) -> None:
        self._unopened.clear()
        super()._on_up()
        assert self.session is not None
        self.edges.append((self.session.terms.session, 0))

    def _on_down(self, reason: Reason) -> None:
        self._unopened.clear()
        for request in [each for each in self.requests.requests.values() if each.generation >= U32_MAX]:
            self.requests.remove(request.request)  # its next generation can't be had: nothing can be drawn for it any more
            self.counters.add("requests_exhausted")
        self._rows_before = self.rows_done()
        super()._on_down(reason)
        self.edges.append((0, reason.code))
