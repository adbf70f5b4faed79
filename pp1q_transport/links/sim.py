"""The sim link: two ends in one process, a byte stream between them, and a clock that is passed in.

Between two sessions under test. Splits what it carries at seeded places, so that every boundary a socket may produce is met; it
loses and corrupts nothing by itself (`faulty` does, in front of any link). No thread, no sleep, no wall clock.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from .._native.kernels import copy_bytes
from ..errors import Reason
from ..session.assembler import Assembler

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..session.assembler import FrameSink
    from ..session.outbox import Outbox


class SimStream:
    """One direction: bytes in flight, and whether the sender's end is closed."""

    def __init__(self) -> None:
        self.data = bytearray()
        self.closed = False


class SimLink:
    """One end of a simulated link; `sim_pair` makes two. `largest` bounds a single receive (0 = no bound)."""

    kind = "sim"

    def __init__(
        self, sink: FrameSink, outbox: Outbox, incoming: SimStream, outgoing: SimStream, seed: int, largest: int = 0
    ) -> None:
        self.assembler = Assembler(sink)
        self.outbox = outbox
        self.bytes_in = 0
        self.bytes_out = 0
        self.error_number = 0
        self.broken = 0
        self._incoming = incoming
        self._outgoing = outgoing
        self._random = random.Random(seed)
        self._largest = largest

    def pump(self, now_ns: int) -> int:
        """See `Link.pump`. Receives everything that is in flight, in pieces, and sends everything queued."""
        if self.broken:
            return -self.broken
        moved = self._receive(now_ns)
        if self.broken:
            return -self.broken
        sent = self._send()
        if moved == 0 and sent == 0 and self._incoming.closed and not self._incoming.data:
            self.broken = Reason.PEER_LOST.code
            return -self.broken
        return moved + sent

    def pump_until(self, tries: int) -> int:
        """See `Link.pump_until`; nothing changes between looks here, so one is enough."""
        return self.pump(0) if tries else 0

    def _receive(self, now_ns: int) -> int:
        total = 0
        data = self._incoming.data
        while data:
            self.assembler.want()
            most = min(self.assembler.length, len(data))
            if self._largest:
                most = min(most, self._random.randint(1, self._largest))
            copy_bytes(self.assembler.memory, self.assembler.offset, data, 0, most)
            del data[:most]
            total += most
            code = self.assembler.received(most, now_ns)
            if code:
                self.broken = code
                break
        self.bytes_in += total
        return total

    def _send(self) -> int:
        total = 0
        while (piece := self.outbox.front()) is not None:
            self._outgoing.data += memoryview(self.outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
            if piece.length:
                self._outgoing.data += memoryview(piece.memory)[piece.offset : piece.offset + piece.length]
            count = piece.head_length + piece.length
            self.outbox.sent(count)
            total += count
        self.bytes_out += total
        return total

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """See `Link.wait`: simulated time passes elsewhere."""

    def rest(self) -> int:
        """See `Link.rest`."""
        return 0

    def rise(self, ready: bool) -> None:
        """See `Link.rise`."""

    def watch(self) -> list[tuple[int, int]]:
        """See `Link.watch`: nothing of the operating system's."""
        return []

    def fence(self, slot: int) -> bool:
        """See `Link.fence`."""
        return self.assembler.landing.abandon(slot)

    def stage(self, memory: ReadMemory) -> None:
        """See `Link.stage`."""

    def say_last(self, frame: ReadMemory) -> bool:
        """See `Link.say_last`."""
        self._outgoing.data += memoryview(frame)
        return True

    def describe(self) -> dict[str, object]:
        """See `Link.describe`."""
        return {"link": "sim"}

    def close(self) -> None:
        """See `Link.close`."""
        self._outgoing.closed = True
        if not self.broken:
            self.broken = Reason.LINK_ERROR.code


def sim_pair(
    left: FrameSink, left_outbox: Outbox, right: FrameSink, right_outbox: Outbox, seed: int = 0, largest: int = 0
) -> tuple[SimLink, SimLink]:
    """Two joined ends. The same seed gives the same splits."""
    there, back = SimStream(), SimStream()
    return (
        SimLink(left, left_outbox, back, there, seed, largest),
        SimLink(right, right_outbox, there, back, seed + 1, largest),
    )
