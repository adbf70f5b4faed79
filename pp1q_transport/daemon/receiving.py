"""The receiver daemon's half of one target process: its records become calls on a receiver, outcomes become records.

Between the channel of an attached target, which is not trusted, and the embedded `Receiver` that this daemon runs. Reads no q:
the target maps the slots and reads them itself. Every record is judged before it counts; a client that breaks a rule is cut
off, and its slots and requests come back. SPEC sections 4 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from .. import wire
from .._native.kernels import monotonic_ns
from ..client.target import OPENS_QUEUED_BYTES, Receiver, SlotTicket
from ..counters import Histogram
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from ..local import messages as m
from ..logs import logger
from ..session import slots as st
from .outgoing import Outgoing

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..counters import Counters
    from ..engine import EngineConfig
    from ..local.attach import Attached
    from ..session.breaker import Breaker
    from ..session.receiver import ReceiverSession
    from ..session.requests import Request
    from ..session.slots import Slot

NO_TICKET: Final = 0
RECORDS_A_LOOK: Final = 256  # of one client before everybody else is served again
BYTES_A_LOOK: Final = 1 << 20
OVERDUE_LOOK_NS: Final = 100_000_000
OPENS_A_LOOK: Final = 256
U32_MAX: Final = (1 << 32) - 1


class ServedTicket(SlotTicket):
    """A STEP of an attached target. Its outcome is queued at its receiver the moment it is known."""

    number = NO_TICKET
    turn = 0  # the breaker's, when the STEP was let through

    def settle(self, slot: Slot) -> None:
        """See `SlotTicket.settle`."""
        super().settle(slot)
        served = self._receiver
        assert isinstance(served, ServedReceiver)
        served.outcomes.append(self)


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

    def enqueue(self, request: Request, **options: Any) -> SlotTicket:
        """See `Receiver.enqueue`; also raises `ProposalDiscarded(overload)` for a request that the leader has not heard of."""
        if request.request in self._unopened:
            raise ProposalDiscarded(Reason.OVERLOAD, request.request, request.round)
        return super().enqueue(request, **options)

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


class TargetPort:
    """Serves one target process at a time. `poll` takes what it asks for, `tell` gives it what came of it."""

    def __init__(self, receiver: ServedReceiver, counters: Counters, breaker: Breaker | None) -> None:
        self.receiver = receiver
        self.attached: Attached | None = None
        self._outgoing: Outgoing | None = None
        self._said_bye = False
        self.breaker = breaker
        self.draining = False
        self.release_after_ns = 0  # how long a ready proposal may be held; 0: for ever
        self.latency = Histogram()
        self.tail = Histogram()
        self._counters = counters
        self._log = logger(role="receiver")
        self._overdue_look_ns = 0
        self._live: dict[int, ServedTicket] = {}

    # ---- clients ------------------------------------------------------------------------------------------------

    def attach(self, attached: Attached, now_ns: int) -> None:
        """A target came: it hears at once whether a session runs."""
        self.attached = attached
        self._outgoing = Outgoing(attached)
        self._said_bye = False
        if self.receiver.session is not None:
            self._send(m.UP, self.receiver.session.terms.session, 0, 0)
        self._flush(now_ns)

    def detach(self, reason: Reason) -> None:
        """The target is gone or cut off: its slots and requests come back, and nothing of it is kept."""
        attached, self.attached, self._outgoing = self.attached, None, None
        if attached is None:
            return
        attached.close()
        self._live.clear()
        for request in list(self.receiver.requests.requests.values()):
            self.receiver.close_request(request)
        released = self.receiver.release_all()
        self.receiver.outcomes.clear()
        self.receiver.edges.clear()
        self._counters.add("clients_gone")
        if self._said_bye and reason is Reason.PEER_LOST:
            reason = Reason.CANCELLED  # it left in order
        else:
            self._counters.refuse(reason)
        log = self._log.info if reason is Reason.CANCELLED else self._log.warning
        log("client_gone", reason=reason.value, pid=attached.pid, slots_released=released)
        if self.receiver.up:
            self.receiver.engine.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def poll(self, now_ns: int) -> int:
        """Takes what the target asks for. Returns how many records that were."""
        attached = self.attached
        if attached is None:
            return 0
        taken = 0
        channel = attached.channel
        bytes_most = channel.bytes_in + BYTES_A_LOOK
        try:
            while taken < RECORDS_A_LOOK and channel.bytes_in < bytes_most:
                record = channel.receive()
                if record is None:
                    break
                taken += 1
                self._take(record[0], record[1], now_ns)
        except PeerFault as fault:
            self._counters.add("clients_cut_off")
            self._log.warning("client_cut_off", reason=fault.reason.value, detail=fault.detail, pid=attached.pid)
            self.detach(fault.reason)
        return taken

    def _take(self, kind: int, view: memoryview, now_ns: int) -> None:
        fields, payload = m.unpack(kind, view, m.TARGET)
        if kind == m.STEP:
            self._step(fields, now_ns)
        elif kind == m.COMMIT:
            self._commit(fields, payload)
        elif kind == m.RELEASE:
            self._release(fields[0], fields[1])
        elif kind == m.OPEN:
            self._open(fields, payload)
        elif kind == m.CLOSE:
            request = self.receiver.requests.get(fields[0])
            if request is not None:
                self.receiver.close_request(request)
                self.receiver.engine.flush()
        elif kind == m.BYE:
            self._said_bye = True
        else:
            raise PeerFault(Reason.UNEXPECTED_KIND, f"record kind {kind} from a target")

    def _open(self, fields: tuple[int, ...], payload: memoryview) -> None:
        request, seed, max_position, generation, round_number, _count = fields
        try:
            opened = self.receiver.open_request(
                request, payload.cast("i"), seed=seed, max_position=max_position, generation=generation
            )
        except LocalMisuse as error:
            self._refuse(request, NO_TICKET, Reason.LIMITS_MISMATCH, error)
            return
        opened.round = round_number
        self.receiver.engine.flush()

    def _step(self, fields: tuple[int, ...], now_ns: int) -> None:
        number, context, trace_id, temperature, generation, round_number, depth, support, budget_us, _owner = fields[1:]
        receiver = self.receiver
        request = receiver.requests.get(fields[0])
        if request is None:
            self._send(m.DISCARDED, fields[0], number, Reason.REQUEST_UNKNOWN.code, round_number, generation, 0)
            return
        if number in self._live:
            raise PeerFault(Reason.REQUEST_DUPLICATE, f"STEP {number} is under way already")
        if round_number >= U32_MAX or max(request.generation, generation) >= U32_MAX:
            self._refuse(fields[0], number, Reason.GENERATION_EXHAUSTED, LocalMisuse("rounds or generations ran out"))
            return
        # The target counts rounds; generations rise on both sides, and the higher one is the one that nobody has used.
        request.round = round_number
        request.generation = max(request.generation, generation)
        # Decided before anything is drawn, so it can't depend on drawn tokens (SPEC section 4, selection bias).
        turn = 0
        if self.breaker is not None and receiver.up and not self.draining:
            turn = self.breaker.may_step(now_ns)
            if not turn:
                self._discarded(fields[0], number, Reason.CIRCUIT_OPEN, round_number)
                return
        if self.draining:
            self._discarded(fields[0], number, Reason.CANCELLED, round_number)
            return
        try:
            ticket = receiver.enqueue(
                request,
                depth=depth,
                temperature=temperature,
                support=support or None,
                budget_us=budget_us,
                target_context=context,
                trace_id=trace_id,
            )
        except (ProposalDiscarded, LocalMisuse) as error:
            if self.breaker is not None:
                self.breaker.discarded(Reason.CANCELLED, now_ns, turn)  # never sent: a probe in its place may go at once
            if isinstance(error, ProposalDiscarded):
                self._discarded(fields[0], number, error.reason, round_number)
            else:
                self._refuse(fields[0], number, Reason.OVERLOAD, error)
            return
        assert isinstance(ticket, ServedTicket)
        ticket.number, ticket.turn = number, turn
        self._live[number] = ticket

    def _discarded(self, request: int, number: int, reason: Reason, round_number: int) -> None:
        known = self.receiver.requests.get(request)
        self._counters.add("steps_refused")
        self._counters.refuse(reason)
        generation = known.generation if known is not None else 0
        self._send(m.DISCARDED, request, number, reason.code, round_number, generation, 0)

    def _commit(self, fields: tuple[int, ...], payload: memoryview) -> None:
        number, slot, slot_generation, round_number, source, accepted, _count, _epoch, generation = fields
        if slot_generation:
            self._release(slot, slot_generation)
        request = self.receiver.requests.get(number)
        if request is None:
            return  # closed meanwhile
        try:
            request.generation = max(request.generation, generation)
            tokens = self.receiver.check_tokens(request, payload.cast("i"))
            self.receiver.check_idle(request)
            most = {wire.VERIFIED: accepted + 1, wire.TARGET_ONLY: len(tokens)}.get(source, 0)
            if not accepted <= len(tokens) <= most or (source == wire.TARGET_ONLY and accepted):
                raise LocalMisuse(f"a commit of source {source} with {accepted} accepted drafts and {len(tokens)} tokens")  # noqa: TRY301
            self.receiver.commit(request, round_number, source, accepted, tokens)
        except LocalMisuse as error:
            # Its committed tokens are not what we know any more: it must come anew and say what they are.
            raise PeerFault(Reason.CONTEXT_MISMATCH, f"request {number}: {error}") from error
        if self.receiver.up:
            self.receiver.engine.flush()

    def _release(self, slot: int, generation: int) -> None:
        if slot >= self.receiver.limit("max_slots"):
            raise PeerFault(Reason.SLOT_BOUNDS, f"release of slot {slot}")
        self.receiver.release_slot(slot, generation)

    # ---- records out --------------------------------------------------------------------------------------------

    def tell(self, now_ns: int) -> None:
        """Gives the target what happened since the last call, in order, and rings its doorbell once if it sleeps."""
        receiver = self.receiver
        if receiver.outcomes:
            outcomes = receiver.outcomes[:]
            receiver.outcomes.clear()
            for ticket in outcomes:
                self._outcome(ticket, now_ns)
        if receiver.edges:
            for session, code in receiver.edges:
                if session:
                    self._send(m.UP, session, 0, 0)
                else:
                    self._send(m.DOWN, code, 0)
            receiver.edges.clear()
        if self.release_after_ns and now_ns >= self._overdue_look_ns:
            self._overdue_look_ns = now_ns + OVERDUE_LOOK_NS
            receiver.quarantine_overdue(now_ns - self.release_after_ns)
        self._flush(now_ns)

    def _outcome(self, ticket: ServedTicket, now_ns: int) -> None:
        if self._live.get(ticket.number) is not ticket:
            return  # of a target that is gone
        del self._live[ticket.number]
        request = ticket.request
        try:
            facts = ticket.facts()
        except ProposalDiscarded as discarded:
            if self.breaker is not None:
                self.breaker.discarded(discarded.reason, now_ns, ticket.turn)
            self._send(
                m.DISCARDED, request.request, ticket.number, discarded.reason.code, discarded.round, request.generation, 0
            )
            return
        if self.breaker is not None:
            self.breaker.ready(ticket.turn)
        self.latency.add(facts.latency_ns)
        self.tail.add(ticket.tail_ns())
        self._send(
            m.READY,
            request.request,
            ticket.number,
            facts.latency_ns,
            facts.slot,
            facts.slot_generation,
            facts.request_generation,
            facts.round,
            facts.anchor,
            facts.depth,
            facts.representation,
            facts.epoch,
        )

    def _refuse(self, request: int, number: int, reason: Reason, error: LocalMisuse) -> None:
        self._counters.add("client_misuse")
        self._log.warning("client_misuse", request=request, error=str(error))
        text = m.text_bytes(str(error))
        self._send(m.REFUSED, request, number, reason.code, len(text), payload=text)

    def _send(self, kind: int, *fields: int, payload: bytes = b"") -> None:
        if self._outgoing is not None:
            self._outgoing.send(kind, *fields, payload=payload)

    def _flush(self, now_ns: int) -> None:
        outgoing = self._outgoing
        if outgoing is None:
            return
        try:
            stuck = not outgoing.flush(now_ns)
        except PeerFault as fault:
            self._log.warning("client_cut_off", reason=fault.reason.value, detail=fault.detail)
            self._counters.add("clients_cut_off")
            self.detach(fault.reason)
            return
        if stuck:
            self._log.warning("client_reads_nothing", owed_bytes=outgoing.owed_bytes)
            self._counters.add("clients_cut_off")
            self.detach(Reason.OVERLOAD)

    # ---- what the loop asks -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: proposals under way or held."""
        states = self.receiver.slots_by_state()
        return any(states.get(st.STATE_NAMES[state], 0) for state in (st.GRANTED, st.LANDING, st.READY))

    def drain(self, deadline_ms: int, now_ns: int) -> None:
        """No further STEP; the target is told."""
        self.draining = True
        self._send(m.DRAINING, deadline_ms, 0)
        self._flush(now_ns)

    def part(self, now_ns: int) -> None:
        """The daemon ends: the target is told."""
        self._send(m.BYE, Reason.CANCELLED.code, 0)
        self._flush(now_ns)
        if self.attached is not None:
            self.attached.close()
            self.attached = self._outgoing = None
