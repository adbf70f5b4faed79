"""What of an outbox goes into the next message of an rdma link: one whole row, or a run of everything else.

Between an `Outbox`, whose bytes are a stream, and `rdma`, which posts messages. Whatever it decides, the peer gets the same bytes
in the same order: a row that it does not recognise as one only travels another way. Looks at kinds and lengths, judges nothing,
copies nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ..wire import HEADER_BYTES, MAGIC, REPLY

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..session.outbox import Piece
    from .rdma_window import LandingTargets

NO_SLOT: Final = -1


def frame_at(memory: ReadMemory, at: int, available: int) -> tuple[int, int]:
    """(slot, length) of the frame that begins here, its payload included whether it lies here or not; slot -1 for any but a
    REPLY, length 0 for no frame. Says nothing about whether the frame is a good one."""
    if available < HEADER_BYTES or bytes(memoryview(memory)[at : at + 4]) != MAGIC:
        return NO_SLOT, 0
    head = memoryview(memory)[at : at + HEADER_BYTES]
    length = HEADER_BYTES + int.from_bytes(head[56:60], "little")
    return (int.from_bytes(head[48:50], "little") if head[5] == REPLY else NO_SLOT), length


class Cutter:
    """Where one stream is cut into messages. Remembers how much of a frame is still to come whose beginning went by itself."""

    def __init__(self) -> None:
        self._rest = 0
        self._after = 0

    def cut(self, buffer: ReadMemory, piece: Piece, room: int, targets: LandingTargets) -> tuple[int, int]:
        """(slot, length): a row that lands in `slot`, or slot -1 and a run of at most `room` bytes. Call `gone` once a run is
        sent."""
        if piece.head_length:
            memory, at, here = buffer, piece.head_offset, piece.head_length
        else:
            memory, at, here = piece.memory, piece.offset, piece.length
        whole = piece.head_length + piece.length
        if self._rest:
            self._after = self._rest
            return NO_SLOT, min(self._rest, whole, room)
        run = 0
        while run < here:
            slot, length = frame_at(memory, at + run, here - run)
            if length == 0:  # no frame: it goes as it is
                self._after = 0
                return NO_SLOT, min(whole, room)
            is_row = slot >= 0 and run + length <= whole and targets.fits(slot, length)
            if is_row and run == 0:
                return slot, length
            if is_row or (run and run + length > room):
                break
            run += length
        self._after = run
        return NO_SLOT, min(run, whole, room)

    def gone(self, length: int) -> None:
        """The run went: `length` bytes."""
        self._rest = max(self._after - length, 0)
