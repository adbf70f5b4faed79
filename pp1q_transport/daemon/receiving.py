"""The receiver daemon's half of the target process that faces the leader: its records become calls on a receiver, outcomes
records.

Between the channel of an attached target, which is not trusted, and the embedded `Receiver` that this daemon runs, alone or as
rank 0 of a group. Reads no q: the target maps the slots and reads them itself. Every record is judged before it counts; a client
that breaks a rule is cut off, and its slots and requests come back. SPEC sections 4 and 9.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any

from .. import wire
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from ..local import messages as m
from ..session import slots as st
from ..session.parts import RanksDiffer
from ..session.shards import REQUEST_OWNER
from .clients import ClientPort
from .exchanging import take_part, tell_parts
from .served import NO_TICKET, U32_MAX, ServedReceiver, ServedTicket

if TYPE_CHECKING:
    from ..counters import Counters
    from ..session.breaker import Breaker
    from ..session.hub import RankGroup


class TargetPort(ClientPort):
    """Serves the target process of rank 0, or of a group of one."""

    hears = m.TARGET

    def __init__(
        self, receiver: ServedReceiver, counters: Counters, breaker: Breaker | None, group: RankGroup | None = None
    ) -> None:
        super().__init__("receiver", counters)
        self.receiver = receiver
        self.breaker = breaker
        self.group = group
        self._told_epoch: tuple[int, int] = (0, 0)
        self._live: dict[int, ServedTicket] = {}
        self._queued: deque[tuple[int, tuple[Any, ...]]] = deque()  # STEPs that wait for slots which other ranks still read

    # ---- clients ------------------------------------------------------------------------------------------------

    def welcome(self, now_ns: int) -> None:
        """A target hears at once whether a session runs, and how its group stands."""
        if self.receiver.session is not None:
            self.send(m.UP, self.receiver.session.terms.session, 0, 0)
        self._told_epoch = (0, 0)
        self._tell_epoch()

    def give_back(self) -> None:
        """Its slots and requests come back, and nothing of it is kept."""
        self._live.clear()
        self._queued.clear()
        for request in list(self.receiver.requests.requests.values()):
            self.receiver.close_request(request)
        self.receiver.release_all()
        self.receiver.outcomes.clear()
        self.receiver.edges.clear()
        if self.group is not None:
            self.group.leave(Reason.PEER_LOST)
        self.after_records()

    def after_records(self) -> None:
        """STEPs and commits wait to be sent."""
        session = self.receiver.session
        if session is not None and not session.outbox.empty():  # what was queued last is most often sent already
            self.receiver.engine.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """See `ClientPort.take`."""
        if kind == m.STEP:
            self._queue_or_step(fields, now_ns)
        elif kind == m.COMMIT:
            self._commit(fields, payload)
        elif kind == m.RELEASE:
            self._release(fields[0], fields[1])
        elif kind == m.OPEN:
            self._open(fields, payload)
        elif kind == m.CLOSE:
            self._close(fields[0])
        elif self.group is None:
            pass  # it has nobody to agree with
        elif kind == m.EXCHANGE:
            self._exchange(self.group, fields, payload)
        elif fields[0] == self.group.epoch:
            self.group.agree(fields[2], fields[3])

    def _exchange(self, group: RankGroup, fields: tuple[Any, ...], payload: memoryview) -> None:
        if not group.open or fields[1] != group.epoch:
            return  # it crossed the end of its epoch
        try:
            take_part(fields, payload, 0, group.exchanges.own)
        except RanksDiffer as fault:  # another process may be the wrong one: all agree anew, and this one stays
            self.counters.refuse(fault.reason)
            self.log.warning("ranks_differ", reason=fault.reason.value, detail=fault.detail)
            group.leave(fault.reason)

    def _open(self, fields: tuple[Any, ...], payload: memoryview) -> None:
        request, seed, max_position, generation, round_number, _count = fields
        try:
            opened = self.receiver.open_request(
                request, payload.cast("i"), seed=seed, max_position=max_position, generation=generation
            )
        except LocalMisuse as error:
            self._refuse(request, NO_TICKET, Reason.LIMITS_MISMATCH, error)
            return
        except PeerFault as fault:  # an earlier process used this ID's last generation
            self._refuse(request, NO_TICKET, fault.reason, fault)
            return
        opened.round = round_number

    def _close(self, number: int) -> None:
        for queued in [queued for queued in self._queued if queued[1][0] == number]:
            self._queued.remove(queued)  # it would take the place of one that is still wanted
            self._discarded(queued[1], Reason.CANCELLED)
        request = self.receiver.requests.get(number)
        if request is not None:
            self.receiver.close_request(request)

    def _queue_or_step(self, fields: tuple[Any, ...], now_ns: int) -> None:
        """In a group a slot is FREE only when every rank has released it: a process that is ahead of the others waits for
        that."""
        if self.group is None or not self.group.open or not (self._queued or self._slots_taken()):
            self._step(fields, now_ns)
        elif len(self._queued) < self.receiver.limit("max_slots"):
            self._queued.append((now_ns, fields))
        else:
            raise PeerFault(Reason.OVERLOAD, f"more than {len(self._queued)} STEPs wait for slots")

    def _slots_taken(self) -> bool:
        return self.receiver.slots_by_state()["FREE"] == 0

    def _step_queued(self, now_ns: int) -> None:
        """STEPs whose time has come: a slot is free, their epoch is over, or their budget is spent."""
        for queued in list(self._queued):  # not only the first: another's budget may be shorter
            if _budget_left_us(queued, now_ns) <= 0:
                self._queued.remove(queued)
                self._discarded(queued[1], Reason.TIMEOUT)
        while self._queued and self.group is not None and not (self.group.open and self._slots_taken()):
            queued = self._queued.popleft()
            fields = queued[1]
            self._step((*fields[:9], _budget_left_us(queued, now_ns), *fields[10:]), now_ns)

    def _step(self, fields: tuple[Any, ...], now_ns: int) -> None:
        number, context, trace_id, temperature, generation, round_number, depth, support, budget_us, owner = fields[1:]
        receiver = self.receiver
        request = receiver.requests.get(fields[0])
        if request is None:
            self._discarded(fields, Reason.REQUEST_UNKNOWN)
            return
        if number in self._live:
            raise PeerFault(Reason.REQUEST_DUPLICATE, f"STEP {number} is under way already")
        if round_number >= U32_MAX or max(request.generation, generation) >= U32_MAX:
            self._refuse_step(fields, Reason.GENERATION_EXHAUSTED, LocalMisuse("rounds or generations ran out"))
            return
        # The target counts rounds; generations rise on both sides, and the higher one is the one that nobody has used.
        request.round = round_number
        request.generation = max(request.generation, generation)
        if self.group is not None and self.group.mode == REQUEST_OWNER:
            if owner >= self.group.coordinator.size:
                raise PeerFault(Reason.SLOT_BOUNDS, f"rank {owner} owns request {fields[0]}")
            request.owner = owner
        turn, refused = self._let_through(now_ns)
        if refused is not None:
            self._discarded(fields, refused)
            return
        try:
            ticket = receiver.ask(request, depth, temperature, support, context, budget_us, trace_id)
        except (ProposalDiscarded, LocalMisuse) as error:
            if self.breaker is not None:
                self.breaker.discarded(Reason.CANCELLED, now_ns, turn)  # never sent: a probe in its place may go at once
            if isinstance(error, ProposalDiscarded):
                self._discarded(fields, error.reason)
            else:
                self._refuse_step(fields, Reason.OVERLOAD, error)
            return
        assert isinstance(ticket, ServedTicket)
        ticket.number, ticket.turn = number, turn
        self._live[number] = ticket

    def _let_through(self, now_ns: int) -> tuple[int, Reason | None]:
        """The breaker's turn, and why no STEP may go out. Decided before anything is drawn, so it can't depend on drawn tokens
        (SPEC section 4, selection bias)."""
        if self.draining:
            return 0, Reason.CANCELLED
        if self.breaker is None or not self.receiver.up:
            return 0, None
        turn = self.breaker.may_step(now_ns)
        return turn, None if turn else Reason.CIRCUIT_OPEN

    def _discarded(self, fields: tuple[Any, ...], reason: Reason) -> None:
        """A STEP that was not sent: its process hears why, and so do the other ranks, which wait for nothing else. All hear of
        one generation, by whose noise they go on; also of a request that is open elsewhere only."""
        number, ticket, generation, round_number = fields[0], fields[1], fields[5], fields[6]
        request = self.receiver.requests.get(number)
        if request is not None:
            generation = max(request.generation, generation)
        self.counters.add("steps_refused")
        self.counters.refuse(reason)
        if self.group is not None:
            self.group.refuse_step(number, generation, round_number, reason)
        self.send(m.DISCARDED, number, ticket, reason.code, round_number, generation, 0)

    def _refuse_step(self, fields: tuple[Any, ...], reason: Reason, error: LocalMisuse) -> None:
        self._discarded(fields, reason)
        self._refuse(fields[0], NO_TICKET, reason, error)

    def _commit(self, fields: tuple[Any, ...], payload: memoryview) -> None:
        number, slot, slot_generation, round_number, source, accepted, _count, _epoch, generation = fields
        if slot_generation:
            self._release(slot, slot_generation)
        request = self.receiver.requests.get(number)
        if request is None:  # closed meanwhile, or one that could not be opened here: the target's tokens are its own affair
            self._answer_commit(number, round_number)
            return
        try:
            request.generation = max(request.generation, generation)
            tokens = self.receiver.check_tokens(request, payload.cast("i"))
            self.receiver.check_idle(request)
            most = {wire.VERIFIED: accepted + 1, wire.TARGET_ONLY: len(tokens)}.get(source, 0)
            if not accepted <= len(tokens) <= most or (source == wire.TARGET_ONLY and accepted):
                raise LocalMisuse(f"a commit of source {source} with {accepted} accepted drafts and {len(tokens)} tokens")  # noqa: TRY301
            if self.group is not None and not self.group.open:
                raise ProposalDiscarded(Reason.PEER_LOST, number, round_number)  # noqa: TRY301
            self.receiver.commit(request, round_number, source, accepted, tokens)
        except LocalMisuse as error:
            # Its committed tokens are not what we know any more: it must come anew and say what they are.
            raise PeerFault(Reason.CONTEXT_MISMATCH, f"request {number}: {error}") from error
        except ProposalDiscarded as discarded:  # the epoch ended: nothing is committed across that
            self.counters.add("commits_refused")
            self.counters.refuse(discarded.reason)
            self.send(m.DISCARDED, number, NO_TICKET, discarded.reason.code, round_number, request.generation, 0)
            return
        self._answer_commit(number, round_number)

    def _answer_commit(self, number: int, round_number: int) -> None:
        """In a group the target waits for a word."""
        if self.group is None:
            return
        if self.group.open:
            self.send(m.COMMITTED, number, round_number, self.group.epoch)
        else:
            self.send(m.DISCARDED, number, NO_TICKET, Reason.PEER_LOST.code, round_number, 0, 0)

    def _release(self, slot: int, generation: int) -> None:
        if slot >= self.receiver.limit("max_slots"):
            raise PeerFault(Reason.SLOT_BOUNDS, f"release of slot {slot}")
        self.receiver.release_slot(slot, generation)

    # ---- records out --------------------------------------------------------------------------------------------

    def report(self, now_ns: int) -> None:
        """See `ClientPort.report`."""
        receiver = self.receiver
        if self._queued:
            self._step_queued(now_ns)
            self.after_records()
        if receiver.outcomes:
            outcomes = receiver.outcomes[:]
            receiver.outcomes.clear()
            ready = [ticket for ticket in outcomes if self._outcome(ticket, now_ns)]
            self.flush(now_ns)  # before the books are kept: the target waits for nothing else
            for ticket in ready:
                self._count_ready(ticket)
        if receiver.edges:
            for session, code in receiver.edges:
                if session:
                    self.send(m.UP, session, 0, 0)
                else:
                    self.send(m.DOWN, code, 0)
            receiver.edges.clear()
        if self.group is not None:
            self._tell_epoch()
            tell_parts(self.send, self.group.epoch, self.group.exchanges.done)
        late_ns = self.late_ns(now_ns)
        if late_ns:
            receiver.quarantine_overdue(late_ns)

    def _tell_epoch(self) -> None:
        group = self.group
        if group is None:
            return
        state = m.EPOCH_OPEN if group.open else m.EPOCH_AGREE if group.asking else m.EPOCH_ENDED
        if (group.epoch, state) != self._told_epoch:
            self._told_epoch = (group.epoch, state)
            self.send(m.EPOCH, group.epoch, state, Reason.PEER_LOST.code, self.receiver.engine.config.hello.boot_nonce & U32_MAX)

    def _outcome(self, ticket: ServedTicket, now_ns: int) -> bool:
        """Tells the target what became of a STEP. Returns whether it is ready."""
        if self._live.get(ticket.number) is not ticket:
            return False  # of a target that is gone
        del self._live[ticket.number]
        request, slot = ticket.request, ticket.ready_slot()
        if slot is None:
            self._tell_discarded(ticket, now_ns)
            return False
        self.send(
            m.READY,
            request.request,
            ticket.number,
            slot.ready_ns - slot.enqueued_ns,
            slot.index,
            slot.generation,
            slot.request_generation,
            slot.round,
            slot.anchor,
            slot.depth,
            slot.representation if self.group is None or self.group.is_ours(request.owner) else 0,
            0,
        )
        return True

    def _tell_discarded(self, ticket: ServedTicket, now_ns: int) -> None:
        discarded, request = ticket.discarded(), ticket.request.request
        reason = discarded.reason
        if self.breaker is not None:
            self.breaker.discarded(reason, now_ns, ticket.turn)
        self.log.debug(
            "discarded",
            reason=reason.value,
            request=request,
            round=discarded.round,
            slot=ticket.slot,
            trace_id=ticket.trace_id,
        )
        self.send(m.DISCARDED, request, ticket.number, reason.code, discarded.round, discarded.generation, 0)

    def _count_ready(self, ticket: ServedTicket) -> None:
        if self.breaker is not None:
            self.breaker.ready(ticket.turn)
        self.latency.add(ticket.latency_ns())
        self.tail.add(ticket.tail_ns())

    def _refuse(self, request: int, number: int, reason: Reason, error: LocalMisuse | PeerFault) -> None:
        self.counters.add("client_misuse")
        self.log.warning("client_misuse", request=request, error=str(error))
        text = m.text_bytes(str(error))
        self.send(m.REFUSED, request, number, reason.code, len(text), payload=text)

    # ---- what the loop asks -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: proposals under way or held."""
        states = self.receiver.slots_by_state()
        return any(states.get(st.STATE_NAMES[state], 0) for state in (st.GRANTED, st.LANDING, st.VOTED, st.READY))


def _budget_left_us(queued: tuple[int, tuple[Any, ...]], now_ns: int) -> int:
    """Of a STEP that waits since the time it is queued with."""
    since_ns, fields = queued
    return int(fields[9]) - (now_ns - since_ns) // 1000
