"""The assembler: a byte stream in, judged headers and landed payloads out, without copying a large payload.

Between a stream link, which asks where the next bytes go, and a session (a `FrameSink`), which judges each header before its
payload is read and validates bytes as they land. Parsing is sticky and ordered: a byte is looked at once. Does no I/O.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._native.kernels import copy_bytes
from ..wire import Header

if TYPE_CHECKING:
    from ..memory import Memory

RING_BYTES: Final = 16384
LAND_AT_MOST: Final = 1 << 18  # a receive stays small enough that its bytes are still in L2 when they are validated
SCRATCH_BYTES: Final = 1 << 16
# The hot paths' own copies, C integers in the compiled build.
_RING: Final = RING_BYTES
_LAND: Final = LAND_AT_MOST
_SCRATCH: Final = SCRATCH_BYTES
DRAIN: Final = 1
LAND: Final = 0


class Landing:
    """Where the payload of the current frame goes. `owner` is the slot index that may be fenced, -1 for none."""

    def __init__(self) -> None:
        self.memory: Memory | None = None
        self.offset: int = 0
        self.owner: int = -1
        self.drain: bool = False

    def abandon(self, owner: int) -> bool:
        """Sends what is still to come for `owner` to scratch. True when it was landing there: after this it no longer is."""
        if self.owner != owner or self.drain:
            return False
        self.drain = True
        self.memory = None
        return True


class FrameSink:
    """What a session is to an assembler. All calls come in stream order."""

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """Judges a header before its payload: `LAND` (0) with `landing` filled, `DRAIN` (1), or -code of the reason that
        costs the link."""
        raise NotImplementedError

    def progress(self, header: Header, landed: int) -> None:
        """`landed` bytes of the current payload are in place."""
        raise NotImplementedError

    def finish(self, header: Header, now_ns: int) -> int:
        """The payload is whole. 0, or -code of the reason that costs the link."""
        raise NotImplementedError


class Assembler:
    """Turns received bytes into calls on a `FrameSink`. After a fatal code it stays failed and refuses more bytes."""

    def __init__(self, sink: FrameSink) -> None:
        self.sink: FrameSink = sink
        self.header: Header = Header()
        self.landing: Landing = Landing()
        self.failed: int = 0
        self.frames: int = 0
        self.drained_bytes: int = 0
        self._ring: Memory = bytearray(RING_BYTES)
        self._scratch: Memory = bytearray(SCRATCH_BYTES)
        self._start: int = 0
        self._end: int = 0
        self._length: int = 0
        self._landed: int = 0
        self._in_payload: bool = False
        self.memory: Memory = self._ring
        self.offset: int = 0
        self.length: int = RING_BYTES

    def want(self) -> None:
        """Sets `memory`, `offset`, `length`: where the link must put the next received bytes (length is never 0)."""
        rest = self._length - self._landed
        if self._in_payload and self._start == self._end and rest > 0:
            if self.landing.drain:
                self.memory = self._scratch
                self.offset = 0
                self.length = min(rest, _SCRATCH)
            else:
                assert self.landing.memory is not None
                self.memory = self.landing.memory
                self.offset = self.landing.offset + self._landed
                self.length = min(rest, _LAND)
            return
        if self._start == self._end:
            self._start = 0
            self._end = 0
        elif self._start > 0 and self._end > _RING - 4096:
            self._compact()
        self.memory = self._ring
        self.offset = self._end
        self.length = _RING - self._end

    def _compact(self) -> None:
        keep = self._end - self._start
        for index in range(keep):  # fewer than 128 bytes: a partial header
            self._ring[index] = self._ring[self._start + index]
        self._start = 0
        self._end = keep

    def received(self, count: int, now_ns: int) -> int:
        """`count` bytes are where `want` asked for them. Returns 0, or the code of the reason that ends the link."""
        if self.failed:
            return self.failed
        if self._in_payload and self._start == self._end:
            self._landed += count
            return self._step_payload(now_ns)
        self._end += count
        return self._parse(now_ns)

    def _parse(self, now_ns: int) -> int:
        while True:
            if self._in_payload:
                code = self._take_from_ring(now_ns)
                if code:
                    return code
                if self._in_payload:
                    return 0
            if self._end - self._start < 128:
                return 0
            code = self.header.decode(self._ring, self._start)
            if code:
                return self._fail(code)
            self._start += 128
            self.frames += 1
            code = self._begin(now_ns)
            if code:
                return code

    def _begin(self, now_ns: int) -> int:
        self.landing.drain = False
        self.landing.owner = -1
        self.landing.memory = None
        self.landing.offset = 0
        code = self.sink.accept(self.header, self.landing, now_ns)
        if code < 0:
            return self._fail(-code)
        if code == 1:
            self.landing.drain = True
        self._length = self.header.payload_length
        self._landed = 0
        self._in_payload = True
        if self._length == 0:
            return self._step_payload(now_ns)
        return 0

    def _take_from_ring(self, now_ns: int) -> int:
        take = min(self._end - self._start, self._length - self._landed)
        if take <= 0:
            return 0
        if not self.landing.drain:
            assert self.landing.memory is not None
            copy_bytes(self.landing.memory, self.landing.offset + self._landed, self._ring, self._start, take)
        self._start += take
        self._landed += take
        return self._step_payload(now_ns)

    def _step_payload(self, now_ns: int) -> int:
        if self.landing.drain:
            if self._landed >= self._length:
                self.drained_bytes += self._length
                self._in_payload = False
            return 0
        if self._length:
            self.sink.progress(self.header, self._landed)
        if self._landed < self._length:
            return 0
        self._in_payload = False
        code = self.sink.finish(self.header, now_ns)
        self.landing.owner = -1
        if code < 0:
            return self._fail(-code)
        return 0

    def _fail(self, code: int) -> int:
        self.failed = code
        self._in_payload = False
        return code
