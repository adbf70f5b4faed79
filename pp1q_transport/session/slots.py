"""Slots: who may write, who may read, and when a buffer may be granted again.

Between the receiver session, which drives transitions, and the memory of `staging`, which it never touches itself. The
transitions are one table; an event that a state does not list raises and leaves the slot as it was. SPEC section 4.
"""

from __future__ import annotations

from typing import Final

from ..errors import LocalMisuse, PeerFault, Reason

FREE: Final = 0
GRANTED: Final = 1
LANDING: Final = 2
READY: Final = 3
QUARANTINE: Final = 4
VOTED: Final = 5
STATE_NAMES: Final = ("FREE", "GRANTED", "LANDING", "READY", "QUARANTINE", "VOTED")
LIVE: Final = (GRANTED, LANDING, VOTED)
"""The states of a proposal that is neither ready nor void."""

GRANT: Final = 0
LAND: Final = 1
DECIDE_READY: Final = 2
RELEASE_LAST: Final = 3
INVALIDATE: Final = 4
FENCED: Final = 5
OVERDUE: Final = 6
VOTE: Final = 7
EVENT_NAMES: Final = ("GRANT", "LAND", "DECIDE_READY", "RELEASE_LAST", "INVALIDATE", "FENCED", "OVERDUE", "VOTE")

GROUP_CONSUMER: Final = 30
"""The consumer that stands for the rest of a rank group: at rank 0 the members that hold the slot, at a member the decision that
is still to come."""

TRANSITIONS: Final[dict[tuple[int, int], int]] = {
    (FREE, GRANT): GRANTED,
    (GRANTED, LAND): LANDING,
    (LANDING, LAND): LANDING,
    (LANDING, DECIDE_READY): READY,
    (LANDING, VOTE): VOTED,  # this rank has judged it whole; the group's decision is to come, nothing may land any more
    (VOTED, DECIDE_READY): READY,
    (VOTED, INVALIDATE): QUARANTINE,
    (READY, RELEASE_LAST): FREE,
    (GRANTED, INVALIDATE): QUARANTINE,
    (LANDING, INVALIDATE): QUARANTINE,
    (READY, OVERDUE): QUARANTINE,  # a consumer that does not release: never straight to FREE
    (QUARANTINE, FENCED): FREE,  # the link can no longer write here and no consumer reads here
}
# The hot paths' own copies, C integers in the compiled build.
_FREE: Final = FREE
_READY: Final = READY
_QUARANTINE: Final = QUARANTINE
_GRANT: Final = GRANT
_RELEASE_LAST: Final = RELEASE_LAST
_FENCED: Final = FENCED
_GENERATIONS: Final = 0xFFFFFFFF
_EVENTS: Final = 8
_CONSUMERS: Final = 31
_ILLEGAL: Final = 255
_NEXT: Final[bytes] = bytes(TRANSITIONS.get((state, event), _ILLEGAL) for state in range(6) for event in range(_EVENTS))

_GENERATION_EXHAUSTED: Final = Reason.GENERATION_EXHAUSTED.code


class SlotGeometry:
    """Where the parts of every slot lie in one region: all rows first, then all metadata (tokens, entry counts).

    `row_bytes` is a multiple of 64. Rows of slot i start at `i * depth * row_bytes`; its tokens (int32 [depth]) and entry
    counts (uint32 [depth]) lie in the metadata part. Sizes in bytes.
    """

    def __init__(self, max_slots: int, depth: int, row_bytes: int) -> None:
        if max_slots < 1 or depth < 1 or row_bytes < 64 or row_bytes % 64:
            raise LocalMisuse(f"impossible slot geometry: {max_slots} slots, depth {depth}, row {row_bytes} bytes")
        self.max_slots = max_slots
        self.depth = depth
        self.row_bytes = row_bytes
        self.slot_bytes = depth * row_bytes
        self.meta_bytes = (depth * 8 + 63) // 64 * 64
        self.rows_bytes = max_slots * self.slot_bytes
        self.total_bytes = self.rows_bytes + max_slots * self.meta_bytes

    def row_offset(self, slot: int, row: int) -> int:
        """Offset of a row in the region."""
        return slot * self.slot_bytes + row * self.row_bytes

    def meta_offset(self, slot: int) -> int:
        """Offset of the slot's tokens (int32 [depth]), which its entry counts (uint32 [depth]) follow."""
        return self.rows_bytes + slot * self.meta_bytes


class Slot:
    """One grantable buffer and the proposal that is landing or ready in it. Fields are the session's to write."""

    def __init__(self, index: int, geometry: SlotGeometry) -> None:
        self.index: int = index
        self.state: int = FREE
        self.generation: int = 0
        self.rows_at: int = geometry.row_offset(index, 0)
        self.row_bytes: int = geometry.row_bytes
        self.meta_at: int = geometry.meta_offset(index)
        self.request: int = 0
        self.request_generation: int = 0
        self.round: int = 0
        self.anchor: int = 0
        self.depth: int = 0
        self.seed: int = 0
        self.context: int = 0
        self.representation: int = 0
        self.support: int = 0
        self.rows_done: int = 0
        self.reply_bytes: int = 0
        self.deadline_ns: int = 0
        self.enqueued_ns: int = 0
        self.ready_ns: int = 0
        self.last_row_ns: int = 0
        self.consumers: int = 0
        self.reason: int = 0
        self.decided: bool = False
        self.fenced: bool = False
        """Of a slot in QUARANTINE that was not READY: nothing can land any more, only the group still holds it."""
        self.epoch: int = 0
        """The group's epoch that granted it; 0 in a group of one."""
        self.digests = bytearray(16 * geometry.depth)
        self.masses = bytearray(8 * geometry.depth)
        """Of a vocabulary shard's rows: u32 shard_mass and u32 mass_before of each."""

    def move(self, event: int) -> None:
        """Applies one event of `TRANSITIONS`; an illegal one raises `LocalMisuse` and changes nothing."""
        after = _NEXT[self.state * _EVENTS + event]
        if after == _ILLEGAL:
            raise LocalMisuse(f"slot {self.index}: {EVENT_NAMES[event]} is illegal in {STATE_NAMES[self.state]}")
        self.state = after


class SlotTable:
    """All slots of one receiver rank. Outlives sessions: generations only rise, a slot still read stays taken.

    Generations granted by `take` lie above `floor`: what other ranks of the group have seen (SPEC section 2, Generations).
    """

    def __init__(self, geometry: SlotGeometry, rank: int = 0) -> None:
        self.geometry = geometry
        self.rank: int = rank
        self.floor: int = 0
        self.slots: list[Slot] = [Slot(index, geometry) for index in range(geometry.max_slots)]
        self.count: int = geometry.max_slots
        self._next: int = 0

    def take(self) -> Slot | None:
        """A FREE slot with its generation already risen and its marks cleared, moved to GRANTED; None if all are taken.

        Round robin, so that a slot rests as long as possible before it is granted again.
        """
        for step in range(self.count):
            index = (self._next + step) % self.count
            slot = self.slots[index]
            if slot.state == _FREE:
                if slot.generation < self.floor:
                    slot.generation = self.floor
                if slot.generation >= _GENERATIONS:
                    continue
                self._next = index + 1
                self._begin(slot, slot.generation + 1)
                return slot
        return None

    def _begin(self, slot: Slot, generation: int) -> None:
        slot.move(_GRANT)
        slot.generation = generation
        slot.rows_done = 0
        slot.reply_bytes = 0
        slot.ready_ns = 0
        slot.consumers = 0
        slot.reason = 0
        slot.decided = False
        slot.fenced = False
        slot.epoch = 0

    def adopt(self, index: int, generation: int) -> Slot:
        """The slot that rank 0 granted, as `take` gives one. Raises `PeerFault` (and changes nothing) unless the slot is FREE
        (`slot_state`) and its generation rises (`generation_stale`), `LocalMisuse` when there is no such slot."""
        if not 0 <= index < self.count:
            raise LocalMisuse(f"no slot {index}")
        slot = self.slots[index]
        if slot.state != FREE:
            raise PeerFault(Reason.SLOT_STATE, f"slot {index} is granted while it is {STATE_NAMES[slot.state]}")
        if generation <= slot.generation:
            raise PeerFault(Reason.GENERATION_STALE, f"slot {index}: generation {generation} after {slot.generation}")
        self._begin(slot, generation)
        return slot

    def release(self, slot: Slot, generation: int, rank: int, consumer: int) -> bool:
        """A consumer (0..30) is done with a proposal. Idempotent: a stale or repeated release changes nothing. A slot in
        QUARANTINE that was never READY waits for its fence too."""
        if consumer < 0 or consumer >= _CONSUMERS:
            return False
        bit = 1 << consumer
        if rank != self.rank or slot.generation != generation or not slot.consumers & bit:
            return False
        if slot.state == _READY:
            slot.consumers &= ~bit
            if slot.consumers == 0:
                slot.move(_RELEASE_LAST)
            return True
        if slot.state == _QUARANTINE:
            slot.consumers &= ~bit
            if slot.consumers == 0 and (slot.decided or slot.fenced):
                slot.move(_FENCED)
            return True
        return False

    def exhausted(self) -> bool:
        """Whether some slot's u32 generation ran out, which ends the session (SPEC section 2)."""
        return self.floor >= _GENERATIONS or any(slot.generation >= _GENERATIONS for slot in self.slots)

    def highest(self) -> int:
        """The highest generation that any slot has seen."""
        return max(slot.generation for slot in self.slots)

    def by_state(self) -> dict[str, int]:
        """How many slots stand in each state, by name."""
        totals = dict.fromkeys(STATE_NAMES, 0)
        for slot in self.slots:
            totals[STATE_NAMES[slot.state]] += 1
        return totals

    def not_free(self) -> int:
        """How many slots are not FREE."""
        return sum(1 for slot in self.slots if slot.state != FREE)

    def quarantined(self) -> int:
        """How many slots wait for a fence, a late consumer, or the rest of the group."""
        return sum(1 for slot in self.slots if slot.state == QUARANTINE)

    def unconfirmed(self) -> int:
        """How many slots wait for a fence or a late consumer, both of which are this rank's own affair."""
        return sum(1 for slot in self.slots if slot.state == QUARANTINE and not slot.fenced)
