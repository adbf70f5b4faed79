"""The receiver session of one rank: grants slots by STEP, judges what comes back, and decides readiness.

Between a link (through the assembler: headers, landed bytes) and the engine (steps, commits, the clock). Does no I/O and never
hands out memory: a slot is READY only when every row, its completion and the group have agreed. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import DenseCursor, draw_u24, validate_sparse_row, xxh3_64
from ..errors import LocalMisuse, PeerFault, Reason
from ..wire import Header
from . import slots as st
from .assembler import Landing
from .machine import SessionMachine
from .outbox import NO_KEY
from .slots import Slot, SlotTable
from .terms import SessionTerms
from .watchdog import Watchdog

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..counters import Counters
    from ..memory import Memory
    from .requests import Request, RequestTable

MASS: Final = 1 << 24
NO_PROOF: Final = 0xFFFFFFFF
_NO_PROOF: Final = NO_PROOF  # a C integer in the compiled build
PROPOSAL_DOMAIN: Final = 1

_SLOT_BOUNDS: Final = Reason.SLOT_BOUNDS.code
_SLOT_STATE: Final = Reason.SLOT_STATE.code
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_UNEXPECTED_KIND: Final = Reason.UNEXPECTED_KIND.code
_REQUEST_MISMATCH: Final = Reason.REQUEST_MISMATCH.code
_GENERATION_STALE: Final = Reason.GENERATION_STALE.code
_GENERATION_DUPLICATE: Final = Reason.GENERATION_DUPLICATE.code
_ROUND_MISMATCH: Final = Reason.ROUND_MISMATCH.code
_DEPTH_MISMATCH: Final = Reason.DEPTH_MISMATCH.code
_POSITION_BOUNDS: Final = Reason.POSITION_BOUNDS.code
_POSITION_DUPLICATE: Final = Reason.POSITION_DUPLICATE.code
_CONTEXT_MISMATCH: Final = Reason.CONTEXT_MISMATCH.code
_REPRESENTATION: Final = Reason.REPRESENTATION.code
_SUPPORT_BOUNDS: Final = Reason.SUPPORT_BOUNDS.code
_PAYLOAD_DIGEST: Final = Reason.PAYLOAD_DIGEST.code
_ID_RANGE: Final = Reason.ID_RANGE.code
_MASS: Final = Reason.MASS.code
_DRAW_MISMATCH: Final = Reason.DRAW_MISMATCH.code
_REPLY_SIZE: Final = Reason.REPLY_SIZE.code
_INCOMPLETE: Final = Reason.INCOMPLETE.code
_OVERLOAD: Final = Reason.OVERLOAD.code
_TIMEOUT: Final = Reason.TIMEOUT.code


class ReceiverSession(SessionMachine):
    """State of one session at one receiver rank. `memory` is the slot region (uint8, `table.geometry.total_bytes`).

    The caller reads `settled` (slots that became READY or were invalidated since it last looked), `fences` (slot
    indexes whose landing must be fenced, then reported by `fenced`) and `news` (rare events for the log).
    """

    def __init__(
        self,
        terms: SessionTerms,
        table: SlotTable,
        memory: Memory,
        requests: RequestTable,
        counters: Counters,
        quarantine_bound: int = 0,
    ) -> None:
        super().__init__(terms, requests, counters, terms.receiver_nonce, terms.leader_nonce)
        self.table: SlotTable = table
        self.memory: Memory = memory
        self.watchdog: Watchdog = Watchdog(table.count)
        self.cursor: DenseCursor = DenseCursor()
        self.settled: list[Slot] = []
        self.fences: list[int] = []
        self.rows: int = 0
        self.ready: int = 0
        self.bytes_ready: int = 0
        self.quarantine_bound: int = quarantine_bound or max(1, table.count // 2)
        self._slot: Slot = table.slots[0]
        self._row: int = 0

    # ---- what the engine asks for -------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Tells the leader of a request and its committed tokens (OPEN)."""
        self.terms.judge_tokens(request.tokens, 0, request.max_position)
        h = self.blank(wire.OPEN)
        h.request = request.request
        h.request_generation = request.generation
        h.position = request.anchor
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.seed = request.seed
        h.max_position = request.max_position
        self._send_tokens(h, request.tokens.tobytes())

    def _send_tokens(self, h: Header, payload: bytes) -> None:
        h.token_count = len(payload) // 4
        h.payload_length = len(payload)
        h.payload_digest = xxh3_64(payload, 0, len(payload), h.payload_seed(self.terms.leader_nonce))
        self.outbox.frame(h, payload, 0, len(payload), NO_KEY)

    def step(
        self,
        request: Request,
        now_ns: int,
        depth: int,
        temperature: float,
        support: int,
        representation: int,
        target_context: int,
        budget_us: int,
        trace_id: int,
    ) -> Slot | None:
        """Grants a slot for one proposal and queues its STEP. None when no slot is free.

        `support` is 0 for the whole vocabulary (dense) or the k of a top-k. The budget runs from `now_ns`.
        """
        if request.in_flight:
            raise LocalMisuse(f"request {request.request} has a proposal in flight")
        self.terms.judge_step(depth, temperature, support, representation, budget_us)
        if request.anchor + depth > request.max_position:
            raise LocalMisuse(f"depth {depth} goes beyond the request's last position {request.max_position}")
        request.check_round()
        slot = self.table.take()
        if slot is None:
            if self.table.exhausted():
                raise PeerFault(Reason.GENERATION_EXHAUSTED, "slot_generation")
            return None
        h = self.blank(wire.STEP)
        h.request = request.request
        h.request_generation = request.generation
        h.round = request.next_round()
        h.position = request.anchor
        h.slot = slot.index
        h.slot_generation = slot.generation
        h.depth = depth
        h.representation = representation
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.target_context = target_context
        h.trace_id = trace_id
        h.temperature = temperature
        h.support_policy = support
        h.budget_us = budget_us
        slot.request = h.request
        slot.request_generation = h.request_generation
        slot.round = h.round
        slot.anchor = h.position
        slot.depth = depth
        slot.seed = request.seed
        slot.representation = representation
        slot.support = support
        slot.context = h.step_context()
        slot.enqueued_ns = now_ns
        slot.deadline_ns = now_ns + budget_us * 1000
        slot.consumers = 1
        self.watchdog.arm(slot.index, slot.deadline_ns)
        request.in_flight = True
        self.outbox.frame(h, None, 0, 0, NO_KEY)
        return slot

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens of a round (verified or target-only) and tells the leader (COMMIT)."""
        fresh = self.terms.judge_tokens(tokens, len(request.tokens), request.max_position)
        request.extend(fresh)
        request.in_flight = False
        h = self.blank(wire.COMMIT)
        h.request = request.request
        h.request_generation = request.generation
        h.round = round
        h.position = request.anchor
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.accepted = accepted
        h.source = source
        self._send_tokens(h, fresh.tobytes())

    def close(self, request: Request) -> None:
        """Tells the leader that a request ended (CLOSE); its live proposal, if any, is cancelled first."""
        self.cancel_request(request, Reason.CANCELLED)
        h = self.blank(wire.CLOSE)
        h.request = request.request
        h.request_generation = request.generation
        h.subject = 0
        h.status = 0
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def cancel_request(self, request: Request, reason: Reason) -> None:
        """Invalidates the request's proposal that is still landing, if there is one."""
        for slot in self.table.slots:
            if slot.request == request.request and slot.state in (st.GRANTED, st.LANDING):
                self.discard(slot, reason.code)

    def release(self, slot: Slot, generation: int, rank: int, consumer: int) -> bool:
        """See `SlotTable.release`."""
        return self.table.release(slot, generation, rank, consumer)

    def overdue(self, slot: Slot) -> None:
        """A consumer kept a READY slot too long: QUARANTINE until it releases after all (SPEC section 4, Release)."""
        slot.move(st.OVERDUE)
        self._bound_quarantine()

    def tick(self, now_ns: int) -> None:
        """Invalidates every generation whose budget is spent at `now_ns`."""
        if now_ns < self.watchdog.next_ns:
            return
        for index in self.watchdog.expired(now_ns):
            self.discard(self.table.slots[index], _TIMEOUT)

    def fenced(self, index: int, was_landing: bool) -> None:
        """The link reports that nothing can land in this slot any more; a cut row counts as late bytes."""
        slot = self.table.slots[index]
        if was_landing:
            self.counters.refuse(Reason.GENERATION_STALE)
        if slot.state == st.QUARANTINE and not slot.decided:
            slot.move(st.FENCED)

    def lost(self, reason: Reason) -> None:
        """The link is gone (so nothing can land): every landing generation is void."""
        for slot in self.table.slots:
            if slot.state in (st.GRANTED, st.LANDING):
                self.discard(slot, reason.code)
        for slot in self.table.slots:
            self.fenced(slot.index, False)
        self.fences.clear()
        for request in self.requests.requests.values():
            request.in_flight = False

    # ---- invalidation -------------------------------------------------------------------------------------------

    def discard(self, slot: Slot, code: int, tell: bool = True) -> None:
        """Invalidates a landing generation: counted, told to the leader (unless it told us), its request's generation rises."""
        reason = Reason.from_code(code)
        slot.move(st.INVALIDATE)
        slot.reason = code
        slot.consumers = 0
        self.watchdog.disarm(slot.index)
        self.counters.add("discarded")
        self.counters.refuse(reason)
        self.news.append(("discarded", reason, slot.index, slot.generation))
        self.fences.append(slot.index)
        self.settled.append(slot)
        try:
            self._raise_generation(slot)
            if tell:
                self._tell_reset(slot, code)
        except PeerFault as fault:  # a full outbox or the last generation: the session ends, but every slot is settled
            self.broken = fault.reason.code
        self._bound_quarantine()

    def _raise_generation(self, slot: Slot) -> None:
        request = self.requests.get(slot.request)
        if request is not None and request.generation == slot.request_generation:
            request.discard()

    def _tell_reset(self, slot: Slot, code: int) -> None:
        h = self.blank(wire.RESET)
        h.request = slot.request
        h.request_generation = slot.request_generation
        h.slot = slot.index
        h.slot_generation = slot.generation
        h.round = slot.round
        h.subject = wire.STEP
        h.status = code
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def _bound_quarantine(self) -> None:
        if self.table.quarantined() > self.quarantine_bound and len(self.fences) < self.table.quarantined():
            self.broken = _OVERLOAD

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`. Identity first, then bounds, then the slot, then what the row claims (SPEC 4)."""
        code = self.check_peer(header)
        if code:
            return -code
        if header.payload_length > self.terms.max_payload:
            return -_LENGTH_BOUNDS
        if now_ns >= self.watchdog.next_ns:
            self.tick(now_ns)
        kind = header.kind
        if kind == 4 or kind == 5:  # REPLY, COMPLETION
            if header.slot >= self.terms.max_slots:
                return -_SLOT_BOUNDS
            slot = self.table.slots[header.slot]
            if slot.generation != header.slot_generation or slot.state < 1 or slot.state > 2:
                return self._not_landing(slot, header)
            self._slot = slot
            code = self._check_identity(slot, header)
            if code == 0 and kind == 4:
                code = self._check_row(slot, header)
            if code:
                self.discard(slot, code)
                return 1
            if kind == 5:
                return 0
            return self._land(slot, header, landing)
        if kind == 7 or kind == 8 or kind == 10:  # RESET, CANCEL, STATUS
            return 0
        return -_UNEXPECTED_KIND

    def _not_landing(self, slot: Slot, header: Header) -> int:
        """A frame for a generation that is not landing: late ones drain and disturb nobody; a future one ends the link."""
        if header.slot_generation > slot.generation:
            return -_SLOT_STATE
        if header.slot_generation == slot.generation and slot.decided:
            self.counters.refuse(Reason.GENERATION_DUPLICATE)
        else:
            self.counters.refuse(Reason.GENERATION_STALE)
        return 1

    def _check_identity(self, slot: Slot, header: Header) -> int:
        if header.request != slot.request:
            return _REQUEST_MISMATCH
        if header.request_generation != slot.request_generation:
            return _GENERATION_STALE
        if header.round != slot.round:
            return _ROUND_MISMATCH
        if header.depth != slot.depth:
            return _DEPTH_MISMATCH
        if header.shard != 0:
            return _ID_RANGE
        if header.context != slot.context:
            return _CONTEXT_MISMATCH
        return 0

    def _check_row(self, slot: Slot, header: Header) -> int:
        if header.position <= slot.anchor or header.position > slot.anchor + slot.depth:
            return _POSITION_BOUNDS
        row = header.position - slot.anchor - 1
        if (slot.rows_done >> row) & 1:
            return _POSITION_DUPLICATE
        self._row = row
        if header.representation != slot.representation:
            return _REPRESENTATION
        if header.first_id != 0 or header.end_id != self.terms.vocab_size:
            return _ID_RANGE
        if header.shard_mass != 16777216 or header.mass_before != 0:
            return _MASS
        if header.draw_counter != 0:
            return _DRAW_MISMATCH
        if header.representation == 1:
            if header.entry_count != self.terms.vocab_size:
                return _SUPPORT_BOUNDS
            if header.payload_length != self.terms.dense_row_bytes:
                return _LENGTH_BOUNDS
        else:
            if header.entry_count < 1 or header.entry_count > slot.support:
                return _SUPPORT_BOUNDS
            if header.payload_length != header.entry_count * 8:
                return _LENGTH_BOUNDS
        if header.token < 0 or header.token >= self.terms.vocab_size:
            return _ID_RANGE
        return 0

    def _land(self, slot: Slot, header: Header, landing: Landing) -> int:
        slot.move(1)
        landing.memory = self.memory
        landing.offset = slot.rows_at + self._row * slot.row_bytes
        landing.owner = slot.index
        if header.representation == 1:
            self.cursor.begin(
                self.memory,
                landing.offset,
                header.entry_count,
                header.payload_length,
                header.payload_seed(self.terms.leader_nonce),
            )
        return 0

    def progress(self, header: Header, landed: int) -> None:
        """See `FrameSink.progress`: dense rows are digested and validated while they are hot."""
        if header.kind == 4 and header.representation == 1:
            self.cursor.advance(landed)

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        kind = header.kind
        if kind == 4:
            self._finish_row(header)
            return 0
        if kind == 5:
            self._finish_proposal(header, now_ns)
            return 0
        return self._notice(header)

    def _finish_row(self, header: Header) -> None:
        slot = self._slot
        if slot.state != 2 or slot.generation != header.slot_generation:
            self.counters.refuse(Reason.GENERATION_STALE)  # invalidated while it landed, and not fenced yet
            return
        at = slot.rows_at + self._row * slot.row_bytes
        u24 = _NO_PROOF
        if self.terms.draw_proof:
            u24 = draw_u24(slot.seed, 1, slot.request_generation, slot.round, header.position)
        if header.representation == 1:
            code = self.cursor.finish(header.payload_digest, 16777216, header.token, u24)
        else:
            seed = header.payload_seed(self.terms.leader_nonce)
            if xxh3_64(self.memory, at, header.payload_length, seed) != header.payload_digest:
                code = _PAYLOAD_DIGEST
            else:
                code = validate_sparse_row(
                    self.memory,
                    at,
                    at + header.entry_count * 4,
                    header.entry_count,
                    0,
                    self.terms.vocab_size,
                    16777216,
                    header.token,
                    u24,
                )
        if code:
            self.discard(slot, code)
            return
        wire._put32(self.memory, slot.meta_at + self._row * 4, header.token)
        wire._put32(self.memory, slot.meta_at + (slot.depth + self._row) * 4, header.entry_count)
        wire.put_digest_entry(slot.digests, self._row, header.position, header.payload_length, header.payload_digest)
        bit = 1  # a 64-bit local in the compiled build: a C int would overflow at row 31
        slot.rows_done |= bit << self._row
        slot.reply_bytes += header.payload_length
        self.rows += 1

    def _finish_proposal(self, header: Header, now_ns: int) -> None:
        slot = self._slot
        code = self._judge_completion(slot, header)
        if code:
            self.discard(slot, code)
            return
        slot.move(2)
        slot.decided = True
        slot.ready_ns = now_ns
        self.watchdog.disarm(slot.index)
        self.ready += 1
        self.bytes_ready += slot.reply_bytes
        self.settled.append(slot)

    def _judge_completion(self, slot: Slot, header: Header) -> int:
        if header.position != slot.anchor:
            return _POSITION_BOUNDS
        if header.status != 0:
            return header.status if header.status <= len(Reason) else _INCOMPLETE
        full = 1  # a 64-bit local in the compiled build, as in _finish_row
        full = (full << slot.depth) - 1
        if slot.rows_done != full or header.positions != slot.depth:
            return _INCOMPLETE
        if header.reply_size != slot.reply_bytes:
            return _REPLY_SIZE
        if xxh3_64(slot.digests, 0, slot.depth * 16, 0) != header.reply_digest:
            return _PAYLOAD_DIGEST
        return 0

    def _notice(self, header: Header) -> int:
        """RESET, CANCEL or STATUS of the leader: the generation they name dies. A STATUS that names none is the leader's last
        word on the link, which it closes itself."""
        code = header.status
        if code < 1 or code > len(Reason):
            return -Reason.RESERVED_BITS.code
        reason = Reason.from_code(code)
        self.news.append(("leader_status", reason, header.slot, header.slot_generation))
        if header.kind == wire.STATUS and header.slot_generation == 0:
            self.counters.add("peer_status")
            self.peer_status = code
            return 0
        if header.slot >= self.terms.max_slots:
            return -_SLOT_BOUNDS
        slot = self.table.slots[header.slot]
        if header.slot_generation > slot.generation:
            return -_SLOT_STATE
        if slot.generation == header.slot_generation and slot.state in (st.GRANTED, st.LANDING):
            if header.request != slot.request:
                self.discard(slot, _REQUEST_MISMATCH)
            else:
                self.discard(slot, code, tell=False)
        return 0
