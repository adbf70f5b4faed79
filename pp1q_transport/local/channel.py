"""A channel: whole records each way between a daemon and its process, over two rings in one shared map and two doorbells.

Between the owner, who knows what records mean, and `_native.ring`. A record is copied out of shared memory before it is
judged, so the peer can't change it afterwards; what no honest peer writes breaks the channel for good. Creates no memory
(`attach` does), knows no kind (`messages` does). A record: u32 length (these 8 bytes included), u16 kind, u16 zero, its body.
"""

from __future__ import annotations

import errno
import os
from typing import Final, NoReturn

from .._native.net import wait_io
from .._native.ring import HEADER_BYTES, Ring, drain_bell, ring_bell
from ..errors import LocalMisuse, PeerFault, Reason
from ..memory import Memory, ReadMemory

CLIENT: Final = 0
DAEMON: Final = 1
RING_CAPACITY: Final = 2 << 20  # bytes each way: the tokens of a full context (524,288 bytes) fit with room to spare
RECORD_HEADER_BYTES: Final = 8
IDLES: Final = ("spin", "spin-then-block", "block")

_HEADER: Final = RECORD_HEADER_BYTES
_FIRST_BUFFER: Final = 4096
# One look is 10 to 50 ns. Spinning hands back to the owner's loop, which has other things to look at; spinning before a
# sleep lasts about as long as a wake-up across cores costs, the point where sleeping at once would have been as good.
_SPIN_LOOKS: Final = 2_000
_LOOKS_BEFORE_SLEEP: Final = 1_000
_POLLIN: Final = 1
_CLOSED: Final = -1
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_RESERVED_BITS: Final = Reason.RESERVED_BITS.code


def channel_bytes(capacity: int = RING_CAPACITY) -> int:
    """Bytes of a channel's memory: ring A (client to daemon), then ring B (daemon to client), `capacity` bytes each."""
    return 2 * (HEADER_BYTES + capacity)


class Channel:
    """One end. `side` is `CLIENT` or `DAEMON`, `memory` the shared map (writable uint8, at least `channel_bytes(capacity)`).

    Sleeps on `my_bell`, rings `peer_bell`; owns both descriptors. `records_in`, `records_out`, `bytes_in`, `bytes_out`
    and `bells` (doorbells rung) only grow. Not for two threads.
    """

    def __init__(self, memory: Memory, side: int, my_bell: int, peer_bell: int, capacity: int = RING_CAPACITY) -> None:
        ring_a = Ring(memory, 0, capacity)
        ring_b = Ring(memory, HEADER_BYTES + capacity, capacity)
        self._incoming: Ring = ring_a if side == DAEMON else ring_b
        self._outgoing: Ring = ring_b if side == DAEMON else ring_a
        self._my_bell: int = my_bell
        self._peer_bell: int = peer_bell
        self.capacity: int = capacity
        self._state: int = 0  # 0 in use, the code of the reason that broke it, or _CLOSED
        self._head: Memory = bytearray(_HEADER)
        self._buffer: Memory = bytearray(_FIRST_BUFFER)
        self._view: memoryview = memoryview(self._buffer).toreadonly()
        self._wanted: int = 0  # the room that the last record would have needed
        self._sent: bool = False  # since the last look at the peer's flags
        self._took: bool = False
        self.records_in: int = 0
        self.records_out: int = 0
        self.bytes_in: int = 0
        self.bytes_out: int = 0
        self.bells: int = 0
        self._silence()  # a kernel that can't do it without blocking (before 5.8) is found out here, not when it matters

    def send(self, kind: int, fixed: bytes, payload: ReadMemory = b"") -> bool:
        """Appends one record and rings no bell (`flush_bell` does, once for several). False: no room now, nothing written.

        `payload` is bytes, or a uint8 view of bytes. Raises `LocalMisuse` for a record that can never fit or a kind that is no
        u16, `PeerFault` when the channel is broken.
        """
        if self._state:
            self._unusable()
        body = fixed if len(payload) == 0 else fixed + payload
        total = _HEADER + len(body)
        if total > self.capacity or kind < 1 or kind > 0xFFFF:
            raise LocalMisuse(f"a record of kind {kind} and {total} bytes can't pass a channel of {self.capacity} bytes each way")
        head = self._head
        head[0] = total & 0xFF
        head[1] = total >> 8 & 0xFF
        head[2] = total >> 16 & 0xFF
        head[3] = total >> 24
        head[4] = kind & 0xFF
        head[5] = kind >> 8
        wrote = self._outgoing.write_two(head, 0, _HEADER, body, 0, total - _HEADER)
        if wrote == 0:
            self._wanted = total
            return False
        if wrote < 0:
            self._break(_LENGTH_BOUNDS, "the peer wrote an impossible index over our outgoing ring")
        self._wanted = 0
        self._sent = True
        self.records_out += 1
        self.bytes_out += total
        return True

    def flush_bell(self) -> None:
        """Wakes the peer if it sleeps and was sent something, or waits for room and was relieved of something."""
        if self._state:
            self._unusable()
        wake = False
        if self._sent:
            self._sent = False
            wake = self._outgoing.wake_needed()
        if self._took:
            self._took = False
            wake = self._incoming.space_needed() or wake
        if wake:
            failed = ring_bell(self._peer_bell)
            # EAGAIN: it rings already. EPIPE: the peer is gone, which its socket says better.
            if failed not in (0, -errno.EAGAIN, -errno.EPIPE):
                raise LocalMisuse(f"can't ring the doorbell on descriptor {self._peer_bell}: {os.strerror(-failed)}")
            self.bells += 1

    def receive(self) -> tuple[int, memoryview] | None:
        """The next record as (kind, body: read-only bytes, good until the next `receive`), or None.

        Raises `PeerFault` (`length_bounds`, `reserved_bits`) for what no honest peer writes; from then on always.
        """
        if self._state:
            self._unusable()
        got = self._incoming.read_into(self._buffer, 0, _HEADER)
        if got == 0:
            return None
        if got != _HEADER:
            self._break(_LENGTH_BOUNDS, "the peer's index is impossible, or a record's header is cut short")
        head = self._buffer
        top = head[3]
        total = head[0] | head[1] << 8 | head[2] << 16 | top << 24
        kind = head[4] | head[5] << 8
        zero = head[6] | head[7]
        if total < _HEADER or total > self.capacity:
            self._break(_LENGTH_BOUNDS, f"a record claims {total} bytes of {_HEADER}..{self.capacity}")
        if zero:
            self._break(_RESERVED_BITS, "a record's header has bits set that must be zero")
        if total > len(self._view):
            self._grow(total)
        if total > _HEADER:
            got = self._incoming.read_into(self._buffer, _HEADER, total - _HEADER)
            if got != total - _HEADER:
                self._break(_LENGTH_BOUNDS, f"a record of {total} bytes is not there as a whole")
        self._took = True
        self.records_in += 1
        self.bytes_in += total
        return kind, self._view[_HEADER:total]

    def _grow(self, total: int) -> None:
        # A new one: views that a caller kept of the old one stay what they are.
        self._buffer = bytearray(1 << (total - 1).bit_length())
        self._view = memoryview(self._buffer).toreadonly()

    def prepare_sleep(self) -> bool:
        """For an owner who waits on `fileno()` himself. True: sleep, the peer will ring; afterwards call `after_sleep`.

        False: there is something to receive (or a fault to hear of), or room for the record that `send` last had none for.
        Rings the peer's bell first if need be.
        """
        self.flush_bell()
        if self._wanted and not self._outgoing.wait_space(self._wanted):
            self._wanted = 0
            return False
        if self._incoming.sleep():
            return True
        if self._wanted:
            self._outgoing.end_wait_space()
        return False

    def after_sleep(self, rung: bool = True) -> None:
        """Ends what `prepare_sleep` began; silences the bell when `rung`. Harmless without one."""
        if self._state == _CLOSED:
            return
        self._incoming.awake()
        if self._wanted:
            self._outgoing.end_wait_space()
        if rung:
            self._silence()

    def _silence(self) -> None:
        failed = drain_bell(self._my_bell)
        if failed < 0 and failed != -errno.EAGAIN:
            raise LocalMisuse(f"can't read the doorbell on descriptor {self._my_bell}: {os.strerror(-failed)}")

    def wait(self, idle: str, timeout_ns: int, other_fd: int = -1) -> None:
        """Idles until a record may be there, by strategy (`IDLES`), or until `other_fd` (negative: none) is readable, at
        most `timeout_ns`. "spin" looks a bounded number of times, sleeps never and does not look at `other_fd`.

        Returning says nothing; look. Raises `LocalMisuse` for another strategy or a descriptor that is closed.
        """
        if idle not in IDLES:
            raise LocalMisuse(f"idle must be one of {', '.join(IDLES)}, not {idle!r}")
        self.flush_bell()
        if idle != "block" and (self._incoming.poll(_SPIN_LOOKS if idle == "spin" else _LOOKS_BEFORE_SLEEP) or idle == "spin"):
            return
        if not self.prepare_sleep():
            return
        ready = 0
        try:
            ready = wait_io(self._my_bell, _POLLIN, other_fd, _POLLIN, timeout_ns)
        finally:
            self.after_sleep((ready & 1) != 0)
        if ready < 0 and ready != -errno.EINTR:
            raise LocalMisuse(f"can't wait on descriptors {self._my_bell} and {other_fd}: {os.strerror(-ready)}")

    def fileno(self) -> int:
        """My doorbell: readable after the peer rang. -1 once closed."""
        return self._my_bell

    @property
    def broken(self) -> Reason | None:
        """Why the channel is of no use any more, if it is not."""
        return Reason.from_code(self._state) if self._state > 0 else None

    def _break(self, code: int, detail: str) -> NoReturn:
        self._state = code
        raise PeerFault(Reason.from_code(code), detail)

    def _unusable(self) -> NoReturn:
        if self._state == _CLOSED:
            raise LocalMisuse("the channel is closed")
        raise PeerFault(Reason.from_code(self._state), "the channel broke earlier")

    def close(self) -> None:
        """Closes both doorbells. The map goes with the last reference to this object."""
        self._state = _CLOSED
        for bell in (self._my_bell, self._peer_bell):
            if bell >= 0:
                os.close(bell)
        self._my_bell = self._peer_bell = -1


__all__ = ["CLIENT", "DAEMON", "IDLES", "RECORD_HEADER_BYTES", "RING_CAPACITY", "Channel", "channel_bytes"]
