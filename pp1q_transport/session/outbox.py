"""The outbox: frames a session wants on the wire, in order, bounded, with large payloads referenced in place.

Between a session, which appends frames, and a link, which sends pieces and says how much went. Does no I/O. Small payloads
are copied behind their header; a large one stays in staging memory until it is sent, so its owner must leave it alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._native.kernels import copy_bytes
from ..errors import PeerFault, Reason
from ..wire import Header

if TYPE_CHECKING:
    from ..memory import Memory, ReadMemory

CAPACITY: Final = 1 << 18
COPY_BELOW: Final = 4096
NO_KEY: Final = -1
# The hot paths' own copies, C integers in the compiled build.
_COPY_BELOW: Final = COPY_BELOW
_NO_KEY: Final = NO_KEY


class Piece:
    """A run of bytes to send: `head_length` bytes of the outbox's own buffer, then `length` bytes of `memory`."""

    def __init__(self, head_offset: int, head_length: int, memory: ReadMemory, offset: int, length: int, key: int) -> None:
        self.head_offset: int = head_offset
        self.head_length: int = head_length
        self.head_end: int = head_offset + head_length
        self.memory: ReadMemory = memory
        self.offset: int = offset
        self.length: int = length
        self.key: int = key
        self.started: bool = False


class Outbox:
    """A bounded queue of pieces over a ring of `capacity` bytes. Overflow is `PeerFault(overload)`: the link ends."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.capacity: int = capacity
        self.buffer: Memory = bytearray(capacity)
        self.pieces: list[Piece] = []
        self.first: int = 0
        self.frames: int = 0
        self.bytes_queued: int = 0
        self._head: int = 0
        self._tail: int = 0
        self._held: int = 0
        self._nothing: ReadMemory = bytearray(0)

    def empty(self) -> bool:
        """Whether nothing waits to be sent."""
        return self.first >= len(self.pieces)

    def frame(self, header: Header, memory: ReadMemory | None, offset: int, length: int, key: int) -> None:
        """Appends one frame: the encoded header and `length` payload bytes at `memory[offset:]`.

        `key` names what may be withdrawn together while unsent (`withdraw`), `NO_KEY` for nothing.
        """
        large = length >= _COPY_BELOW
        need = 128 if large else 128 + length
        at = self._reserve(need)
        header.encode(self.buffer, at)
        self.frames += 1
        self.bytes_queued += 128 + length
        if large:
            assert memory is not None
            self._held += 1
            self.pieces.append(Piece(at, 128, memory, offset, length, key))
            return
        if length:
            assert memory is not None
            copy_bytes(self.buffer, at + 128, memory, offset, length)
        if self.first < len(self.pieces):
            last = self.pieces[len(self.pieces) - 1]
            if last.length == 0 and last.key == _NO_KEY and last.head_end == at:
                last.head_length += need
                last.head_end += need
                return
        self._held += 1
        self.pieces.append(Piece(at, need, self._nothing, 0, 0, _NO_KEY))

    def raw(self, memory: ReadMemory, offset: int, length: int) -> None:
        """Appends bytes that are frames already (a fault injector's output), copied when they are few."""
        if length <= _COPY_BELOW:
            at = self._reserve(length)
            copy_bytes(self.buffer, at, memory, offset, length)
            self._held += 1
            self.pieces.append(Piece(at, length, self._nothing, 0, 0, _NO_KEY))
        else:
            self.pieces.append(Piece(0, 0, memory, offset, length, _NO_KEY))
        self.bytes_queued += length

    def _reserve(self, need: int) -> int:
        if self._held == 0:
            self._head = 0
            self._tail = 0
        if self._tail >= self._head and not (self._held and self._tail == self._head):
            if self.capacity - self._tail < need:
                if self._head <= need:
                    raise PeerFault(Reason.OVERLOAD, "outbox full: the peer does not read")
                self._tail = 0
        elif self._head - self._tail <= need:
            raise PeerFault(Reason.OVERLOAD, "outbox full: the peer does not read")
        at = self._tail
        self._tail += need
        return at

    def front(self) -> Piece | None:
        """The piece to send next, or None."""
        if self.first >= len(self.pieces):
            return None
        return self.pieces[self.first]

    def sent(self, count: int) -> None:
        """`count` bytes of the front piece (its head first, then its payload) are with the kernel."""
        if self.first >= len(self.pieces):
            raise IndexError("nothing is being sent")
        piece = self.pieces[self.first]
        piece.started = True
        taken = min(count, piece.head_length)
        piece.head_offset += taken
        piece.head_length -= taken
        rest = count - taken
        piece.offset += rest
        piece.length -= rest
        self.bytes_queued -= count
        if piece.head_length and piece.head_end:
            self._head = piece.head_offset  # a piece that new frames keep joining gives its sent bytes back all the same
        if piece.head_length == 0 and piece.length == 0:
            self._drop_first()

    def _drop_first(self) -> None:
        piece = self.pieces[self.first]
        self.first += 1
        if piece.head_end:
            self._head = piece.head_end
            self._held -= 1
        if self.first >= len(self.pieces):
            self.pieces.clear()
            self.first = 0
        elif self.first >= 1024:
            del self.pieces[: self.first]
            self.first = 0

    def withdraw(self, key: int) -> int:
        """Removes the large frames of `key` that are not on their way yet; returns how many. A started one goes out whole, and
        small ones (below `COPY_BELOW`) stay: the peer drains them."""
        kept: list[Piece] = []
        gone = 0
        for index in range(self.first, len(self.pieces)):
            piece = self.pieces[index]
            if piece.key == key and not piece.started:
                gone += 1
                self.bytes_queued -= piece.head_length + piece.length
                self._held -= 1
            else:
                kept.append(piece)
        if gone:
            self.pieces = kept
            self.first = 0
        return gone
