"""Taps: where a session's frames are seen as they come in and go out, without changing one.

Between a link and its assembler, and between a session and its outbox. A tap sits there only while a capture is on; otherwise
nothing of this module is loaded. What it sees goes to `recorder`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, Protocol

from .. import wire
from .._native.kernels import monotonic_ns
from ..session.assembler import Assembler, FrameSink
from ..session.landing import LandingSession
from ..session.outbox import Outbox

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..session.hub import HubSession
    from ..wire import Header

_KIND_AT: Final = 5
_WITH_ROWS: Final = frozenset({wire.REPLY, wire.COMPLETION})


class Ear(Protocol):
    """Who hears what a tap sees. Times are monotonic ns."""

    def before(self) -> None:
        """Nothing of any session is under way, as there is while one queues a frame: a moment to begin another file."""

    def came_in(self, frame: bytes, began_ns: int, now_ns: int, cut: bool) -> None:
        """A frame is whole, or (`cut`) will never be; its header was whole at `began_ns`."""

    def went_out(self, frame: bytes, began_ns: int, now_ns: int) -> None:
        """A frame was queued, or is with the kernel."""


class Cutter:
    """Cuts a stream into frames as the assembler does, judging nothing."""

    def __init__(self) -> None:
        self._held = bytearray()
        self._whole = 0
        self._began_ns = 0

    def feed(self, data: ReadMemory, now_ns: int) -> list[tuple[bytes, int]]:
        """(frame, when its header was whole) of every frame that `data` completes."""
        done = []
        at = 0
        while at < len(data):
            want = (self._whole or wire.HEADER_BYTES) - len(self._held)
            piece = data[at : at + want]
            self._held += piece
            at += len(piece)
            if len(piece) < want:
                break
            if not self._whole:
                self._began_ns = now_ns
                self._whole = wire.HEADER_BYTES + int.from_bytes(self._held[56:60], "little")
            if len(self._held) == self._whole:
                done.append((bytes(self._held), self._began_ns))
                self._held.clear()
                self._whole = 0
        return done

    def rest(self) -> tuple[bytes, int]:
        """What is left of the stream, no whole frame, and when it began; forgotten by this."""
        rest = bytes(self._held), self._began_ns if self._whole else monotonic_ns()
        self._held.clear()
        self._whole = 0
        return rest


class InTap(Assembler):
    """An assembler that tells of the bytes it is given, before it looks at them itself."""

    def __init__(self, sink: FrameSink, ear: Ear) -> None:
        Assembler.__init__(self, sink)
        self._ear = ear
        self._cutter = Cutter()
        self.inside = False

    def received(self, count: int, now_ns: int) -> int:
        """See `Assembler.received`."""
        if self.failed:
            return self.failed
        self._ear.before()
        self.inside = True
        data = bytes(memoryview(self.memory)[self.offset : self.offset + count])
        for frame, began_ns in self._cutter.feed(data, now_ns):
            self._ear.came_in(frame, began_ns, now_ns, cut=False)
        code = Assembler.received(self, count, now_ns)
        self.inside = False
        if code:
            self.stop(now_ns)
        return code

    def stop(self, now_ns: int) -> None:
        """Nothing more will come: tells of a frame that is not whole."""
        rest, began_ns = self._cutter.rest()
        if rest:
            self._ear.came_in(rest, began_ns, now_ns, cut=True)


class QueueTap(Outbox):
    """An outbox that tells of every frame when it is queued: at an end that lands rows, whose frames are small, the order of
    what it decided and what came in is what a replay needs."""

    def __init__(self, ear: Ear, session: LandingSession) -> None:
        Outbox.__init__(self)
        self._ear = ear
        self._table = session.table

    def frame(self, header: Header, memory: ReadMemory | None, offset: int, length: int, key: int) -> None:
        """See `Outbox.frame`."""
        Outbox.frame(self, header, memory, offset, length, key)
        now_ns = monotonic_ns()
        head = bytearray(wire.HEADER_BYTES)
        header.encode(head, 0)
        payload = b"" if memory is None else bytes(memoryview(memory)[offset : offset + length])
        began_ns = self._table.slots[header.slot].enqueued_ns if header.kind == wire.STEP else now_ns
        self._ear.went_out(bytes(head) + payload, began_ns, now_ns)


class WireTap(Outbox):
    """An outbox that tells of what the link took: at an end that sends rows, some of what is queued is withdrawn again."""

    def __init__(self, ear: Ear) -> None:
        Outbox.__init__(self)
        self._ear = ear
        self._cutter = Cutter()

    def sent(self, count: int) -> None:
        """See `Outbox.sent`."""
        piece = self.front()
        if piece is not None:
            head = min(count, piece.head_length)
            data = bytes(memoryview(self.buffer)[piece.head_offset : piece.head_offset + head])
            data += bytes(memoryview(piece.memory)[piece.offset : piece.offset + count - head])
            now_ns = monotonic_ns()
            self._ear.before()
            for frame, _began_ns in self._cutter.feed(data, now_ns):
                self.taken(frame, now_ns)
        Outbox.sent(self, count)

    def taken(self, frame: bytes, now_ns: int) -> None:
        """The link took a whole frame."""
        self._ear.went_out(frame, now_ns, now_ns)


class WordTap(WireTap):
    """A `WireTap` at an end that sends rows and has its own word on proposals too: that word is told of when it is said, since
    the order of what was decided is what a replay needs; rows, and the COMPLETION behind them, when the link took them."""

    def frame(self, header: Header, memory: ReadMemory | None, offset: int, length: int, key: int) -> None:
        """See `Outbox.frame`."""
        Outbox.frame(self, header, memory, offset, length, key)
        if header.kind in _WITH_ROWS:
            return
        now_ns = monotonic_ns()
        head = bytearray(wire.HEADER_BYTES)
        header.encode(head, 0)
        payload = b"" if memory is None else bytes(memoryview(memory)[offset : offset + length])
        self._ear.went_out(bytes(head) + payload, self.since(header, now_ns), now_ns)

    def since(self, header: Header, now_ns: int) -> int:
        """When what the frame says began."""
        return now_ns

    def taken(self, frame: bytes, now_ns: int) -> None:
        """See `WireTap.taken`."""
        if frame[_KIND_AT] in _WITH_ROWS:
            WireTap.taken(self, frame, now_ns)


class HubTap(WordTap):
    """That of rank 0's end of a group link."""

    def __init__(self, ear: Ear, session: HubSession) -> None:
        WordTap.__init__(self, ear)
        self._session = session

    def since(self, header: Header, now_ns: int) -> int:
        """See `WordTap.since`: a budget runs from the grant."""
        table = self._session.group.table
        return table.slots[header.slot].enqueued_ns if header.kind == wire.GRANT and table is not None else now_ns
