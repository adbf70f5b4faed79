"""Where rows land and are judged: the half that every rank's session has, whoever its rows come from.

Between `receiver` (rank 0, whose rows the leader sends) or `member` (whose rows rank 0 sends on), which say what a whole
proposal, a failure and a decision mean, and the slots. Does no I/O and never hands out memory. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import DenseCursor, draw_u24, validate_sparse_row, xxh3_64
from ..errors import Reason
from ..wire import Header
from . import slots as st
from .assembler import Landing
from .machine import SessionMachine
from .slots import GROUP_CONSUMER, Slot, SlotTable
from .terms import SessionTerms
from .watchdog import Watchdog

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import Memory
    from .requests import RequestTable

NO_PROOF: Final = 0xFFFFFFFF
_NO_PROOF: Final = NO_PROOF  # a C integer in the compiled build
_GROUP_BIT: Final = 1 << GROUP_CONSUMER
_VOTED: Final = st.VOTED

_SLOT_BOUNDS: Final = Reason.SLOT_BOUNDS.code
_SLOT_STATE: Final = Reason.SLOT_STATE.code
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_REQUEST_MISMATCH: Final = Reason.REQUEST_MISMATCH.code
_GENERATION_STALE: Final = Reason.GENERATION_STALE.code
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


class LandingSession(SessionMachine):
    """State of one session at one rank's landing end. `memory` is the slot region (uint8, `table.geometry.total_bytes`).

    The caller reads `settled` (slots whose proposal became READY or void since it last looked), `fences` (slot indexes whose
    landing must be fenced, then reported by `fenced`) and `news` (rare events for the log).
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
        self.relays: bool = False
        """Whether `row_done` is to be told of every row."""
        self._slot: Slot = table.slots[0]
        self._row: int = 0

    # ---- what differs between ranks -----------------------------------------------------------------------------

    def row_done(self, slot: Slot, row: int, header: Header) -> None:
        """Row `row` of the slot is in place and passed every check."""
        raise NotImplementedError

    def completed(self, slot: Slot, now_ns: int) -> None:
        """All rows and the COMPLETION passed: this rank has nothing against the proposal."""
        raise NotImplementedError

    def discard(self, slot: Slot, code: int, tell: bool = True) -> None:
        """A failure met at this rank: nothing of the live generation may land any more. `tell`: the peer does not know yet."""
        raise NotImplementedError

    # ---- slots --------------------------------------------------------------------------------------------------

    def make_ready(self, slot: Slot, now_ns: int) -> None:
        """The decision is READY: the sampler may look."""
        slot.move(2)
        slot.decided = True
        slot.ready_ns = now_ns
        self.watchdog.disarm(slot.index)
        self.ready += 1
        self.bytes_ready += slot.reply_bytes
        self.settled.append(slot)

    def invalidate(self, slot: Slot, code: int) -> None:
        """A live generation dies: it goes to QUARANTINE, and its landing to `fences`. The rest of the group may hold it still."""
        slot.move(st.INVALIDATE)
        slot.reason = code
        slot.consumers &= _GROUP_BIT
        self.watchdog.disarm(slot.index)
        self.fences.append(slot.index)

    def settle_void(self, slot: Slot, code: int, count: bool = True) -> None:
        """The proposal is void for this reason: counted (the reason too, unless it was before), logged, and told to who waits."""
        reason = Reason.from_code(code)
        slot.reason = code
        self.counters.discard(reason, count)
        self.news.append(("discarded", reason, slot.index, slot.generation))
        self.settled.append(slot)

    def release(self, slot: Slot, generation: int, rank: int, consumer: int) -> bool:
        """See `SlotTable.release`."""
        return self.table.release(slot, generation, rank, consumer)

    def overdue(self, slot: Slot) -> None:
        """A consumer kept a READY slot too long: QUARANTINE until it releases after all (SPEC section 4, Release)."""
        slot.move(st.OVERDUE)
        self.counters.add("overdue")
        self.bound_quarantine()

    def held_since(self, ready_before_ns: int) -> list[Slot]:
        """The slots that became READY before that time and are still held."""
        return [slot for slot in self.table.slots if slot.state == st.READY and slot.ready_ns < ready_before_ns]

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
            slot.fenced = True
            if slot.consumers == 0:
                slot.move(st.FENCED)

    def lost(self, reason: Reason) -> None:
        """The link is gone (so nothing can land): every live generation is void."""
        for slot in self.table.slots:
            if slot.state in st.LIVE:
                self.discard(slot, reason.code)
        for slot in self.table.slots:
            self.fenced(slot.index, False)
        self.fences.clear()

    def fences_due(self) -> int:
        """How many slots the owner fences as soon as this look is over."""
        return len(self.fences)

    def bound_quarantine(self) -> None:
        """Past the bound of slots that nobody confirms, those aside that are fenced when this look is over, the session ends
        (`overload`)."""
        if self.table.unconfirmed() - self.fences_due() > self.quarantine_bound:
            self.broken = _OVERLOAD

    # ---- rows ---------------------------------------------------------------------------------------------------

    def accept_row(self, header: Header, landing: Landing) -> int:
        """`FrameSink.accept` of a REPLY or COMPLETION. The slot first, then what the row claims (SPEC 4)."""
        if header.slot >= self.terms.max_slots:
            return -_SLOT_BOUNDS
        slot = self.table.slots[header.slot]
        if slot.generation != header.slot_generation or slot.state < 1 or slot.state > 2:
            return self._not_landing(slot, header)
        self._slot = slot
        code = self._check_identity(slot, header)
        if code == 0 and header.kind == 4:
            code = self._check_row(slot, header)
        if code:
            self.discard(slot, code)
            return 1
        if header.kind == 5:
            return 0
        return self._land(slot, header, landing)

    def _not_landing(self, slot: Slot, header: Header) -> int:
        """A frame for a generation that is not landing: late ones drain and disturb nobody; a future one ends the link."""
        if header.slot_generation > slot.generation:
            return -_SLOT_STATE
        if header.slot_generation == slot.generation and (slot.decided or slot.state == _VOTED):
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
        if header.shard != self.terms.shard:
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
        if header.first_id != self.terms.first_id or header.end_id != self.terms.end_id:
            return _ID_RANGE
        if not self.terms.sharded:
            if header.shard_mass != 16777216 or header.mass_before != 0:
                return _MASS
        elif header.mass_before > 16777216 or header.shard_mass > 16777216 - header.mass_before:
            return _MASS
        if header.draw_counter != 0:
            return _DRAW_MISMATCH
        if header.representation == 1:
            if header.entry_count != self.terms.shard_entries:
                return _SUPPORT_BOUNDS
            if header.payload_length != self.terms.dense_row_bytes:
                return _LENGTH_BOUNDS
        else:
            if header.entry_count > slot.support or (header.entry_count < 1 and not self.terms.sharded):
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

    def finish_row(self, header: Header, now_ns: int) -> None:
        """`FrameSink.finish` of a REPLY."""
        slot = self._slot
        if slot.state != 2 or slot.generation != header.slot_generation:
            self.counters.refuse(Reason.GENERATION_STALE)  # invalidated while it landed, and not fenced yet
            return
        at = slot.rows_at + self._row * slot.row_bytes
        u24 = _NO_PROOF
        if self.terms.draw_proof:
            u24 = draw_u24(slot.seed, 1, slot.request_generation, slot.round, header.position)
        if self.terms.sharded:
            code = self._judge_shard(header, at, u24)
        else:
            code = self._judge_values(header, at, header.token, u24)
        if code:
            self.discard(slot, code)
            return
        wire._put32(self.memory, slot.meta_at + self._row * 4, header.token)
        wire._put32(self.memory, slot.meta_at + (slot.depth + self._row) * 4, header.entry_count)
        wire.put_digest_entry(slot.digests, self._row, header.position, header.payload_length, header.payload_digest)
        if self.terms.sharded:
            wire._put32(slot.masses, self._row * 8, header.shard_mass)
            wire._put32(slot.masses, self._row * 8 + 4, header.mass_before)
        bit = 1  # a 64-bit local in the compiled build: a C int would overflow at row 31
        slot.rows_done |= bit << self._row
        slot.last_row_ns = now_ns
        slot.reply_bytes += header.payload_length
        self.rows += 1
        if self.relays:
            self.row_done(slot, self._row, header)

    def _judge_values(self, header: Header, at: int, token: int, u24: int) -> int:
        """The payload at `at`: its digest, then its values. `token`: -1 for one of another shard; `u24` counts from the mass
        before this one."""
        if header.representation == 1:
            index = token if token < 0 else token - self.terms.first_id
            return self.cursor.finish(header.payload_digest, header.shard_mass, index, u24)
        seed = header.payload_seed(self.terms.leader_nonce)
        if xxh3_64(self.memory, at, header.payload_length, seed) != header.payload_digest:
            return _PAYLOAD_DIGEST
        return validate_sparse_row(
            self.memory,
            at,
            at + header.entry_count * 4,
            header.entry_count,
            self.terms.first_id,
            self.terms.end_id,
            header.shard_mass,
            token,
            u24,
        )

    def _judge_shard(self, header: Header, at: int, u24: int) -> int:
        """`_judge_values` of a vocabulary shard: the token lies in it exactly when u24 falls into its mass (SPEC section 4)."""
        inside = header.token >= self.terms.first_id and header.token < self.terms.end_id
        token = header.token if inside else -1
        if u24 == _NO_PROOF:
            return self._judge_values(header, at, token, u24)
        drawn = u24 >= header.mass_before and u24 - header.mass_before < header.shard_mass
        code = self._judge_values(header, at, token, u24 - header.mass_before if inside and drawn else _NO_PROOF)
        if code == 0 and inside != drawn:
            return _DRAW_MISMATCH
        return code

    def finish_proposal(self, header: Header, now_ns: int) -> None:
        """`FrameSink.finish` of a COMPLETION."""
        slot = self._slot
        code = self._judge_completion(slot, header)
        if code:
            self.discard(slot, code)
        else:
            self.completed(slot, now_ns)

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
