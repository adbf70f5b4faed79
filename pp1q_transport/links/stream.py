"""What every link over a byte stream is made of: an assembler for what comes, an outbox for what goes, and why it ended.

Between the engine, which holds links of any kind, and the kinds (`tcp`, `shm`), which move the bytes. Moves none itself.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._native.kernels import monotonic_ns
from ..session.assembler import Assembler, FrameSink
from ..session.outbox import Outbox

if TYPE_CHECKING:
    import socket

    from ..memory import ReadMemory


class StreamLink:
    """One proven connection of some `kind`. Owns `sock` (made non-blocking). Subclasses give `pump`, `wait`, `say_last`."""

    def __init__(self, kind: str, sock: socket.socket, sink: FrameSink, outbox: Outbox) -> None:
        sock.setblocking(False)
        self.kind = kind
        self.sock = sock
        self.fd: int = sock.fileno()
        self.assembler: Assembler = Assembler(sink)
        self.outbox: Outbox = outbox
        self.bytes_in: int = 0
        self.bytes_out: int = 0
        self.error_number: int = 0
        self.broken: int = 0

    def pump(self, now_ns: int) -> int:
        """See `Link.pump`."""
        raise NotImplementedError

    def pump_until(self, tries: int) -> int:
        """See `Link.pump_until`."""
        for _look in range(tries):
            moved = self.pump(monotonic_ns())
            if moved != 0:
                return moved
        return 0

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """See `Link.wait`."""
        raise NotImplementedError

    def rest(self) -> int:
        """See `Link.rest`."""
        raise NotImplementedError

    def rise(self, ready: bool) -> None:
        """See `Link.rise`."""
        raise NotImplementedError

    def watch(self) -> list[tuple[int, int]]:
        """See `Link.watch`."""
        raise NotImplementedError

    def fence(self, slot: int) -> bool:
        """See `Link.fence`. Every byte lands by a copy of this process, so a word to the assembler is all it takes."""
        return self.assembler.landing.abandon(slot)

    def stage(self, memory: ReadMemory) -> None:
        """See `Link.stage`. Most kinds send from any memory."""

    def say_last(self, frame: ReadMemory) -> bool:
        """See `Link.say_last`."""
        raise NotImplementedError

    def linger(self, timeout_ns: int) -> None:
        """See `Link.linger`. What a ring holds stays there: nothing to wait for."""

    def describe(self) -> dict[str, object]:
        """See `Link.describe`."""
        raise NotImplementedError

    def close(self) -> None:
        """See `Link.close`."""
        raise NotImplementedError
