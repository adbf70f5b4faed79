"""The embedded target side: the engine runs inside these calls, in the caller's own thread.

Between a target model's loop and the engine: a process that computes for long between calls answers late, but nothing is lost by
that. Owns the slot memory. SPEC sections 4 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from .._native import kernels
from ..engine import Engine, EngineConfig
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from ..session import slots as st
from ..session.receiver import ReceiverSession
from ..session.slots import Slot, SlotTable
from ..staging import Region, SlotViews
from .endpoint import Endpoint, same_slots
from .proposal import Proposal, ProposalFacts, Q
from .target_side import DEFAULT_BUDGET_US, TargetSide, check_numbers, check_step, refuse_unsettled

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    from ..session.hub import RankGroup
    from ..session.requests import Request
    from ..session.terms import SessionTerms
    from .copying import RowsUp

OPENS_QUEUED_BYTES: Final = 1 << 16  # past this the link must take some before another OPEN is queued
OPEN_WAIT_NS: Final = 1_000_000_000
_DENSE_POLICY: Final = 0


class SlotTicket:
    """A STEP under way in this process's own session (see `proposal.Ticket`)."""

    def __init__(self, receiver: Receiver, request: Request, slot: Slot, session: int, trace_id: int = 0) -> None:
        self._receiver = receiver
        self.request = request
        self._slot = slot
        self._session = session
        self._generation = slot.generation
        self._next_generation = min(slot.request_generation + 1, wire.U32_MAX)
        self._reason = 0
        self.trace_id = trace_id
        self._enqueued_ns = slot.enqueued_ns
        self._deadline_ns = slot.deadline_ns
        self._rows_up: RowsUp | None = None
        self.round = slot.round
        self.slot = slot.index
        self.key = (session, slot.index, slot.generation)

    @property
    def known(self) -> bool:
        """See `proposal.Ticket.known`."""
        slot = self._slot
        if slot.generation == self._generation and slot.state in st.LIVE:
            return False
        rows = self._rows_up or self._begin_copies()
        return rows is None or self._receiver.copies.settled(rows)

    def _begin_copies(self) -> RowsUp | None:
        """Begins to bring a ready proposal to the device; None when there is nothing to bring, or nowhere."""
        slot = self._slot
        if self._receiver.copies.stage is not None and slot.generation == self._generation and slot.state == st.READY:
            proposal = Proposal(self._receiver, self.request, self.facts())
            self._rows_up = self._receiver.copies.begin(proposal, self.request, self._enqueued_ns, self._deadline_ns)
        return self._rows_up

    @property
    def settled(self) -> bool:
        """See `proposal.Ticket.settled`."""
        return self.known

    def wait(self) -> Proposal:
        """Serves the engine until the proposal is ready. The budget of the STEP bounds the wait."""
        while not self.known:
            if self._rows_up is None:
                self._receiver.serve(self._deadline_ns)
            else:
                self._receiver.await_copies(self._rows_up)
        if self._rows_up is not None:
            return self._rows_up.result()
        return Proposal(self._receiver, self.request, self.facts())

    def facts(self) -> ProposalFacts:
        """What became of it, once settled: the facts of a ready proposal, or `ProposalDiscarded`."""
        slot = self.ready_slot()
        if slot is None:
            raise self.discarded()
        return ProposalFacts(
            session=self._session,
            slot=slot.index,
            slot_generation=slot.generation,
            request_generation=slot.request_generation,
            round=slot.round,
            anchor=slot.anchor,
            depth=slot.depth,
            representation=slot.representation,
            latency_ns=self.latency_ns(),
            trace_id=self.trace_id,
        )

    def ready_slot(self) -> Slot | None:
        """The slot while it holds this proposal, ready; None once the proposal is discarded."""
        slot = self._slot
        return slot if slot.generation == self._generation and slot.state == st.READY else None

    def discarded(self) -> ProposalDiscarded:
        """Why there is nothing ready."""
        reason = Reason.from_code(self._reason) if self._reason else Reason.CANCELLED
        return ProposalDiscarded(reason, self.request.request, self.round, self._next_generation)

    def latency_ns(self) -> int:
        """From the STEP's enqueuing to q-ready, in ns."""
        return self._slot.ready_ns - self._slot.enqueued_ns

    def tail_ns(self) -> int:
        """From the last row's last byte to q-ready, in ns."""
        return max(0, self._slot.ready_ns - self._slot.last_row_ns)

    def settle(self, slot: Slot) -> None:
        """Keeps the outcome: the slot may be another proposal's before `wait` is called."""
        if slot.generation == self._generation:
            self._reason = slot.reason
            if self._rows_up is None:
                self._begin_copies()


class Receiver(Endpoint, TargetSide):
    """The target side of a session (rank 0 of a group of one)."""

    ticket_class: type[SlotTicket] = SlotTicket
    group: RankGroup | None = None  # rank 0 of a group of several: set before the first session

    def __init__(self, config: EngineConfig) -> None:
        TargetSide.__init__(self)
        self.session: ReceiverSession | None = None
        self._table: SlotTable | None = None
        self._region: Region | None = None
        self._views: SlotViews | None = None
        self._tickets: dict[int, SlotTicket] = {}  # by slot: the latest of each
        self.ready = 0
        self.bytes_ready = 0
        Endpoint.__init__(self, Engine(config, self._make_session, self._on_up, self._on_down))

    @property
    def views(self) -> SlotViews:
        """Views of the slot memory; there are none before the first session and after `close`."""
        if self._views is None:
            raise LocalMisuse("no session was formed yet (call wait_for_peer), or this receiver is closed")
        return self._views

    @property
    def region(self) -> Region:
        """The slot memory; there is none before the first session (or `prepare`) and after `close`."""
        if self._region is None:
            raise LocalMisuse("no slot memory: no session was formed yet, or this receiver is closed")
        return self._region

    def prepare(self, terms: SessionTerms) -> None:
        """Gets the slot memory for sessions of these terms. Raises `PeerFault(limits_mismatch)` while slots of other sizes
        are still read."""
        geometry = terms.geometry()
        if self._table is None or self._region is None or not same_slots(self._views, geometry, terms.shard_entries):
            if self._table is not None and self._table.not_free():
                raise PeerFault(Reason.LIMITS_MISMATCH, "slots of the last session are still in use")
            if self._region is not None:
                self._region.close()
            self._region = Region(geometry.total_bytes)
            self._table = SlotTable(geometry)
            self._views = SlotViews(self._region, geometry, terms.shard_entries, first_id=terms.first_id)
            self._map([self._region])
            self.engine.log.info("slots", bytes=geometry.total_bytes, prefault_ms=round(self._region.prefault_ms, 2))

    def _make_session(self, terms: SessionTerms) -> ReceiverSession:
        self.prepare(terms)
        assert self._region is not None
        assert self._table is not None
        self.session = ReceiverSession(
            terms, self._table, self._region.memory, self.requests, self.counters, group=self.group
        )
        return self.session

    def _on_up(self) -> None:
        session = self.session
        assert session is not None
        for request in list(self.requests.requests.values()):
            try:
                self._send_open(session, request)
            except LocalMisuse as error:  # beyond what this session allows: it must not keep the others from being opened
                self.counters.add("requests_not_opened")
                self.engine.log.warning("request_not_opened", request=request.request, error=str(error))

    def _send_open(self, session: ReceiverSession, request: Request) -> None:
        """OPENs of many requests exceed the outbox together: lets the link take some first, for a second at most."""
        engine, outbox = self.engine, session.outbox
        stop_ns = kernels.monotonic_ns() + OPEN_WAIT_NS
        while outbox.bytes_queued > OPENS_QUEUED_BYTES and kernels.monotonic_ns() < stop_ns:
            engine.flush()
            if engine.link is None:
                return
            if outbox.bytes_queued > OPENS_QUEUED_BYTES:
                engine.link.wait(OPEN_WAIT_NS // 100, -1)
        if self.session is session:
            session.open(request)

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)
        self._keep_outcomes(session)
        self.ready += session.ready
        self.bytes_ready += session.bytes_ready
        for request in self.requests.requests.values():
            request.discard()
        self.session = None

    def announce(self, request: Request) -> None:
        """See `TargetSide.announce`."""
        if self.session is not None:
            self._send_open(self.session, request)

    def limit(self, name: str) -> int:
        """A number of the session's terms, or of our own HELLO while there is none."""
        known = self.session is not None and name != "group_size"
        source = self.session.terms if self.session is not None and known else self.engine.config.hello
        return int(getattr(source, name))

    def retire(self, request: Request) -> None:
        """See `TargetSide.retire`."""
        if self.session is not None:
            self.session.close(request)
            self._settle()

    def enqueue(
        self,
        request: Request,
        *,
        depth: int | None = None,
        temperature: float = 1.0,
        support: int | None = None,
        budget_us: int = DEFAULT_BUDGET_US,
        target_context: int = 0,
        trace_id: int = 0,
    ) -> SlotTicket:
        """Queues a STEP and returns at once. `support` None asks for dense q, k for the top-k.

        Raises `ProposalDiscarded(peer_lost)` when no session runs, `LocalMisuse` when no slot is free or the session's
        terms do not allow what is asked.
        """
        self._check_open(request)
        if self.session is None:
            self.poll()  # a loop that does nothing but step must still hear of the peer's return
        session = self.session
        if session is None:
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, request.round, detail=f"no session at {self.endpoint}")
        if self.copies:
            self.copies.look()
        terms = session.terms
        check_step(terms.depth, terms.support, terms.dense, terms.sparse, depth, temperature, support)
        check_numbers(budget_us, target_context, trace_id)
        if request.in_flight:
            refuse_unsettled(request, any(ticket.request is request for ticket in self._tickets.values()))
        drafted = terms.depth if depth is None else depth
        return self._ask(session, request, drafted, temperature, support or _DENSE_POLICY, target_context, budget_us, trace_id)

    def _ask(
        self,
        session: ReceiverSession,
        request: Request,
        depth: int,
        temperature: float,
        support: int,
        target_context: int,
        budget_us: int,
        trace_id: int,
    ) -> SlotTicket:
        """`enqueue` of numbers that fit the frame; the session judges them. `support` 0 asks for dense q."""
        representation = wire.SPARSE if support else wire.DENSE
        now_ns = kernels.monotonic_ns()
        try:
            slot = session.step(
                request, now_ns, depth, temperature, support, representation, target_context, budget_us, trace_id
            )
        except PeerFault as fault:  # a peer that does not read, or a counter that ran out: the session is over
            self.engine.fail(fault.reason)
            raise ProposalDiscarded(fault.reason, request.request, request.round) from fault
        if slot is None:
            raise LocalMisuse("no free slot: release proposals, or negotiate more slots")
        ticket = self._tickets[slot.index] = self.ticket_class(self, request, slot, session.terms.session, trace_id)
        self.engine.flush()
        self._settle()
        return ticket

    def serve(self, until_ns: int) -> None:
        """One pass of the engine, idling until `until_ns` at most (monotonic ns)."""
        engine = self.engine
        session = self.session
        if engine.poll() == 0 and engine.link is not None and (session is None or not session.settled):
            left_ns = until_ns - kernels.monotonic_ns()
            if left_ns > 0:
                engine.wait(left_ns)
        if session is not None and session is self.session:
            session.tick(kernels.monotonic_ns())
            self._settle()
        if self.copies:
            self.copies.look()

    def poll(self) -> int:
        """Serves the engine once, without waiting, and runs the watchdog. Returns how many bytes moved."""
        moved = self.engine.poll()
        if self.session is not None:
            self.session.tick(kernels.monotonic_ns())
            self._settle()
        if self.copies:
            self.copies.look()
        return moved

    def look_within_ns(self) -> int:
        """See `Endpoint.look_within_ns`: not past the next budget's end."""
        at_most_ns = super().look_within_ns()
        if self.session is None:
            return at_most_ns
        return max(0, min(at_most_ns, self.session.watchdog.next_ns - kernels.monotonic_ns()))

    def _settle(self) -> None:
        """Fences what was invalidated, so that its slot can be granted again."""
        session, link = self.session, self.engine.link
        if session is None or link is None:
            return
        if session.settled:
            self._keep_outcomes(session)
        if session.fences:
            for index in session.fences:
                session.fenced(index, link.fence(index))
            session.fences.clear()

    def _keep_outcomes(self, session: ReceiverSession) -> None:
        for slot in session.settled:
            if slot.state in st.LIVE:
                continue  # became ready, was released and granted again since: the ticket is the new proposal's
            ticket = self._tickets.pop(slot.index, None)
            if ticket is not None:
                ticket.settle(slot)
        session.settled.clear()

    def release(self, slot: Slot, generation: int) -> None:
        """Gives a READY slot back; stale or repeated calls change nothing."""
        if self._table is not None:
            self._table.release(slot, generation, 0, 0)

    def release_slot(self, index: int, generation: int) -> None:
        """`release` by the slot's index; one that does not exist is `LocalMisuse`."""
        if self._table is None or not 0 <= index < self._table.count:
            raise LocalMisuse(f"no slot {index}")
        self.release(self._table.slots[index], generation)

    def check_held(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.check_held`."""
        table = self._table
        if table is not None and facts.slot < table.count:  # or slots of another session's size by now
            slot = table.slots[facts.slot]
            if slot.generation == facts.slot_generation and slot.consumers:
                return
        raise LocalMisuse("this proposal is released already")

    def let_go(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.let_go`."""
        if self._table is not None and facts.slot < self._table.count:
            self.release(self._table.slots[facts.slot], facts.slot_generation)
            self.nudge()

    def tell_void(self, facts: ProposalFacts, reason: Reason) -> None:
        """See `TargetSide.tell_void`."""
        session, table = self.session, self._table
        if session is not None and table is not None and session.terms.session == facts.session:
            try:
                session.void(table.slots[facts.slot], reason)
            except PeerFault as fault:  # a peer that does not read: the session is over
                self.engine.fail(fault.reason)

    def commit_verified(self, request: Request, facts: ProposalFacts, accepted: int, tokens: array[int]) -> None:
        """See `ProposalHolder.commit_verified`."""
        self.let_go(facts)
        self.commit(request, facts.round, wire.VERIFIED, accepted, tokens)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens; without a session they are kept and travel with the next OPEN."""
        if self.session is None:
            if self.group is not None and source == wire.VERIFIED:
                self.group.check_commit(request.request, round)
            request.extend(tokens)
            request.in_flight = False
            return
        try:
            self.session.commit(request, round, source, accepted, tokens)
        except PeerFault as fault:  # the tokens are committed here, and travel with the next session's OPEN
            self.engine.fail(fault.reason)
        self.nudge()

    def check_idle(self, request: Request) -> None:
        """Raises `LocalMisuse` while a proposal of the request lands: it would become ready for a prefix that is no longer."""
        for slot in self._table.slots if self._table is not None else ():
            if slot.request == request.request and slot.state in st.LIVE:
                raise LocalMisuse(f"request {request.request} has a proposal in flight: wait for it, or close the request")

    def release_all(self) -> int:
        """The consumer is gone: gives back every slot it held (SPEC section 4, Release). Returns how many."""
        held = [slot for slot in (self._table.slots if self._table is not None else ()) if slot.consumers and slot.decided]
        for slot in held:
            self.release(slot, slot.generation)
        return len(held)

    def quarantine_overdue(self, ready_before_ns: int) -> int:
        """Slots that became ready before that time and are still held go to QUARANTINE until they are released after all (SPEC
        section 4). Returns how many."""
        session = self.session
        late = session.held_since(ready_before_ns) if session is not None else []
        for slot in late:
            self.engine.log.warning("overdue", slot=slot.index, generation=slot.generation, request=slot.request)
            assert session is not None
            session.overdue(slot)
        return len(late)

    @property
    def free_slots(self) -> int:
        """See `TargetSide.free_slots`."""
        return self._table.count - self._table.not_free() if self._table is not None else 0

    def slots_by_state(self) -> dict[str, int]:
        """How many slots stand in each state, by name."""
        return self._table.by_state() if self._table is not None else {}

    def close(self) -> None:
        """See `Endpoint.close`. The slot memory goes too, unless a proposal is still held: then with its last view."""
        self._close_copies()
        super().close()
        self._region = None
        if self._table is not None and not self._table.not_free():
            self._views = None

    def totals(self) -> dict[str, int]:
        """Proposals and bytes that became ready, over all sessions, and what the slots hold now."""
        live = self.session
        return {
            "ready": self.ready + (live.ready if live else 0),
            "bytes_ready": self.bytes_ready + (live.bytes_ready if live else 0),
            "discarded": self.counters.get("discarded"),
            "slots_not_free": self._table.not_free() if self._table else 0,
        }


__all__ = ["DEFAULT_BUDGET_US", "Proposal", "Q", "Receiver", "SlotTicket"]
