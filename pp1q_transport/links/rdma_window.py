"""Who may have how much on the way over an rdma link: credit for messages, and which landing row the next row goes to.

Between `rdma`, which posts and takes messages, and nothing: plain counting, no verbs, no memory. The rules keep a receive queue
from ever running dry: a sender has at most as many messages on the way as the peer has said it keeps receives for, and a report
of what was taken (an *acknowledgement*) needs no credit, because at most `ACKNOWLEDGEMENTS` can be on the way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from ..errors import PeerFault, Reason

ACKNOWLEDGEMENTS: Final = 4  # receives kept beyond the credit: two for half-window reports, one for an answer, one to spare
MAX_SLOTS: Final = 4096
MAX_ROWS: Final = 32
_U32: Final = 1 << 32

# The 32 immediate bits of a row: its slot, its landing row, and the low bits of the message's number.
_ROW_BITS: Final = 5
_SLOT_BITS: Final = 12
NUMBER_BITS: Final = 15
_NUMBER_MASK: Final = (1 << NUMBER_BITS) - 1


def pack_immediate(slot: int, row: int, number: int) -> int:
    """The immediate of message `number`, a row written to landing row `row` of `slot`."""
    return (slot << _ROW_BITS | row) << NUMBER_BITS | (number & _NUMBER_MASK)


def unpack_immediate(value: int) -> tuple[int, int, int]:
    """(slot, row, low bits of the number) of an immediate. Any u32 unpacks; what it says is judged by the link."""
    place = value >> NUMBER_BITS
    return place >> _ROW_BITS & ((1 << _SLOT_BITS) - 1), place & (MAX_ROWS - 1), value & _NUMBER_MASK


class SendWindow:
    """Messages sent and taken in one direction, as their sender counts them. `limit`: how many may be on the way."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.sent = 0
        self.taken = 0
        self._asked = -1

    @property
    def room(self) -> int:
        """How many more messages may go now."""
        return self.limit - (self.sent - self.taken)

    def next(self) -> int:
        """The number of the message that goes now."""
        assert self.room > 0, "a message without credit"
        self.sent += 1
        return self.sent - 1

    def report(self, taken: int) -> int:
        """The peer says how many it has taken, modulo 2^32; returns how many that is more than known. Raises `PeerFault`
        (`link_error`) when it says more than were sent."""
        fresh = (taken - self.taken) % _U32
        if fresh > self.sent - self.taken:
            raise PeerFault(Reason.LINK_ERROR, f"{taken} messages taken of {self.sent % _U32} sent")
        self.taken += fresh
        return fresh

    def may_ask(self) -> bool:
        """Whether the peer may be asked for a report: not while an earlier question may be on its way."""
        return self.taken > self._asked and self.room > 0

    def ask(self, number: int) -> None:
        """Message `number` asks."""
        self._asked = number

    def restart(self, taken: int, limit: int) -> None:
        """A new queue pair: the peer took `taken` (modulo 2^32) of the old one's messages, the others are gone. Raises
        `PeerFault`."""
        self.report(taken)
        self.sent = self.taken
        self.limit = limit
        self._asked = -1


@dataclass(slots=True)
class Sent:
    """A message on the way: its number, and where its stream bytes lie in its send buffer (a row has none to send again)."""

    number: int
    is_row: bool
    offset: int
    length: int


class ReceiveAccount:
    """Messages taken in one direction, as their receiver counts them, and when to report. `limit`: how many the peer may have on
    the way, the smaller queue depth of both: a report that waited for half of more than that would come too late."""

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.taken = 0
        self._reported = 0
        self._asked = False

    def take(self, asks: bool) -> None:
        """One message is taken and its receive is posted again; it may ask for a report."""
        self.taken += 1
        self._asked = self._asked or asks

    @property
    def due(self) -> bool:
        """Whether a report must go now, with nothing to go along with."""
        return self._asked or self.taken - self._reported >= self.limit // 2

    def report(self) -> int:
        """The report that goes with whatever is sent now (u32)."""
        self._reported = self.taken
        self._asked = False
        return self.taken % _U32

    def restart(self, limit: int) -> None:
        """A new queue pair: what was taken travels with its making."""
        self.limit = limit
        self._reported = self.taken
        self._asked = False


@dataclass(frozen=True, slots=True)
class LandingShape:
    """Landing memory as its owner has it: `rows` rows of `stride` bytes a slot. A slot's part is whole pages."""

    slots: int
    rows: int
    stride: int

    @property
    def slot_bytes(self) -> int:
        """Bytes of one slot's part, which is one memory region."""
        return -(-self.rows * self.stride // 4096) * 4096

    @property
    def total_bytes(self) -> int:
        """Bytes of all of it."""
        return self.slots * self.slot_bytes

    def offset(self, slot: int, row: int) -> int:
        """Where a row lies in the whole."""
        return slot * self.slot_bytes + row * self.stride


def shape_for(slots: int, depth: int, row_bytes: int, header_bytes: int = 128) -> LandingShape:
    """The landing memory of `slots` slots of `depth` rows, each with its frame header before it. Sizes in bytes."""
    return LandingShape(slots, depth, -(-(row_bytes + header_bytes) // 64) * 64)


@dataclass(slots=True)
class _Target:
    address: int
    key: int
    next_row: int = 0
    busy: list[int] = field(default_factory=list)  # by row: the message that was written there last, -1 for none


class LandingTargets:
    """A peer's landing memory as the sender of rows knows it: keys, and which row is free. A row is free once the peer has taken
    the message that was written there last, so no honest sender overwrites what has not been copied out."""

    def __init__(self, shape: LandingShape, places: list[tuple[int, int]]) -> None:
        """`places`: (address, key) of every slot."""
        self.shape = shape
        self._targets = [_Target(address, key, 0, [-1] * shape.rows) for address, key in places]

    def fits(self, slot: int, length: int) -> bool:
        """Whether a frame of `length` bytes can land in this slot at all."""
        return slot < self.shape.slots and length <= self.shape.stride

    def free_row(self, slot: int, taken: int) -> int:
        """The row that the next frame for `slot` goes to, -1 while it is not free."""
        target = self._targets[slot]
        return target.next_row if target.busy[target.next_row] < taken else -1

    def use(self, slot: int, row: int, number: int) -> tuple[int, int]:
        """Message `number` goes to this row: (remote address, key)."""
        target = self._targets[slot]
        target.busy[row] = number
        target.next_row = (row + 1) % self.shape.rows
        return target.address + row * self.shape.stride, target.key

    def rekey(self, slot: int, key: int) -> None:
        """The owner fenced the slot. Raises `PeerFault` (`slot_bounds`)."""
        if slot >= self.shape.slots:
            raise PeerFault(Reason.SLOT_BOUNDS, f"a new key for landing slot {slot} of {self.shape.slots}")
        self._targets[slot].key = key

    def restart(self, places: list[tuple[int, int]]) -> None:
        """A new queue pair: keys anew, and every row is free, since nothing is on the way."""
        self._targets = [_Target(address, key, 0, [-1] * self.shape.rows) for address, key in places]
