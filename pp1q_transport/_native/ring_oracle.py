"""The ring in plain Python, slow and obvious: what tests compare `ring.Ring` with.

Same calls, same answers, same bytes in shared memory, in one thread: it has no fences. Nothing but tests imports it.
"""

from __future__ import annotations

import struct

from ..memory import Memory, ReadMemory

HEADER_BYTES = 256
HEAD, TAIL, SLEEPING, WAITING = 0, 64, 128, 192
_U64 = 1 << 64
_INDEX = struct.Struct("<Q")
_FLAG = struct.Struct("<I")


class Ring:
    """See `ring.Ring`; the end it plays is not checked."""

    def __init__(self, memory: Memory, offset: int, capacity: int, start: int = 0) -> None:
        self.memory = memory
        self.offset = offset
        self.capacity = capacity
        self.index = start
        self.seen = start
        self.broken = False

    def _raise_or_lower(self, flag: int, value: int) -> None:
        _FLAG.pack_into(self.memory, self.offset + flag, value)

    def _take(self, flag: int) -> bool:
        (raised,) = _FLAG.unpack_from(self.memory, self.offset + flag)
        self._raise_or_lower(flag, 0)
        return bool(raised)

    def _look(self, at: int, most: int) -> bool:
        """Loads the other's index: it moved on by at most `most` bytes since it was last seen."""
        (index,) = _INDEX.unpack_from(self.memory, self.offset + at)
        if self.broken or (index - self.seen) % _U64 > most:
            self.broken = True
            return False
        self.seen = index
        return True

    def _byte(self, index: int) -> int:
        return self.offset + HEADER_BYTES + index % self.capacity

    def writable(self) -> int:
        if not self._look(TAIL, (self.index - self.seen) % _U64):
            return -1
        return self.capacity - (self.index - self.seen) % _U64

    def readable(self) -> int:
        if not self._look(HEAD, (self.index + self.capacity - self.seen) % _U64):
            return -1
        return (self.seen - self.index) % _U64

    def poll(self, looks: int) -> int:
        return self.readable() if looks > 0 else 0

    def _put(self, data: bytes) -> None:
        for place, byte in enumerate(data):
            self.memory[self._byte(self.index + place)] = byte
        self.index = (self.index + len(data)) % _U64
        _INDEX.pack_into(self.memory, self.offset + HEAD, self.index)

    def _room(self, wanted: int) -> int:
        room = self.capacity - (self.index - self.seen) % _U64
        return room if not self.broken and room >= wanted else self.writable()

    def write(self, source: ReadMemory, offset: int, length: int) -> int:
        room = self._room(length)
        if room <= 0:
            return room
        took = min(room, length)
        self._put(bytes(source[offset : offset + took]))
        return took

    def write_all(self, source: ReadMemory, offset: int, length: int) -> int:
        return self.write_two(source, offset, length, b"", 0, 0)

    def write_two(self, mem_a: ReadMemory, off_a: int, len_a: int, mem_b: ReadMemory, off_b: int, len_b: int) -> int:
        room = self._room(len_a + len_b)
        if room < len_a + len_b:
            return min(room, 0)
        self._put(bytes(mem_a[off_a : off_a + len_a]) + bytes(mem_b[off_b : off_b + len_b]))
        return len_a + len_b

    def read_into(self, target: Memory, offset: int, length: int) -> int:
        ready = (self.seen - self.index) % _U64
        if self.broken or ready < length:
            ready = self.readable()
        if ready <= 0:
            return ready
        took = min(ready, length)
        for place in range(took):
            target[offset + place] = self.memory[self._byte(self.index + place)]
        self.index = (self.index + took) % _U64
        _INDEX.pack_into(self.memory, self.offset + TAIL, self.index)
        return took

    def wait_space(self, wanted: int = 1) -> bool:
        self._raise_or_lower(WAITING, 1)
        if 0 <= self.writable() < wanted:
            return True
        self._raise_or_lower(WAITING, 0)
        return False

    def end_wait_space(self) -> int:
        self._raise_or_lower(WAITING, 0)
        return 0

    def wake_needed(self) -> bool:
        return self._take(SLEEPING)

    def sleep(self) -> bool:
        self._raise_or_lower(SLEEPING, 1)
        if self.readable() == 0:
            return True
        self._raise_or_lower(SLEEPING, 0)
        return False

    def awake(self) -> int:
        self._raise_or_lower(SLEEPING, 0)
        return 0

    def space_needed(self) -> bool:
        return self._take(WAITING)
