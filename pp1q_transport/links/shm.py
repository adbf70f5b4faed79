"""The shm link: two byte rings in memory that both processes write, and a socket that wakes a sleeper and tells of a death.

Between an engine and one proven peer on this host (`shm_port` makes the connection). The rings are landing memory: the peer may
write there at any time, so nothing is judged or read in place. Bytes are copied out to where the assembler wants them, and
that copy, which no peer can reach, is what is digested and validated, while it is hot. SPEC 4, DESIGN decision 5.
"""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from .._native.net import recv_into, send_from, wait_io
from .._native.ring import HEADER_BYTES, Ring
from ..errors import Reason
from ..session.assembler import FrameSink
from ..session.outbox import Outbox, Piece
from .shm_memory import LISTENER, ring_bytes_of
from .shm_port import peer_of
from .stream import StreamLink

if TYPE_CHECKING:
    from ..memory import Memory, ReadMemory
    from .shm_memory import ShmEnds

READS_A_PUMP: Final = 64
WRITE_AT_MOST: Final = 1 << 16  # published piece by piece, so that the peer copies out one while we copy in the next
READ_AT_MOST: Final = 1 << 15  # validated while it is still in the first-level cache, or nearly
HEADERS_AT_MOST: Final = 1 << 12  # what a read takes beyond a header is copied twice
LOOK_EVERY_NS: Final = 1_000_000  # while nothing moves and nobody sleeps, the peer's life costs a system call this often
# The hot paths' own copies, C integers in the compiled build.
_READS: Final = READS_A_PUMP
_WRITE_AT_MOST: Final = WRITE_AT_MOST
_READ_AT_MOST: Final = READ_AT_MOST
_HEADERS_AT_MOST: Final = HEADERS_AT_MOST
_HEADER_ROOM: Final = 1 << 14  # the most that the assembler asks for outside a large payload
_LOOK_EVERY_NS: Final = LOOK_EVERY_NS
_BELLS: Final = 256
_AGAIN: Final = -errno.EAGAIN
_BAD_INDEX: Final = errno.EPROTO
_PEER_LOST: Final = Reason.PEER_LOST.code
_LINK_ERROR: Final = Reason.LINK_ERROR.code


class ShmLink(StreamLink):
    """One proven peer of this host. Owns the socket and the mapping of `ends`."""

    def __init__(self, ends: ShmEnds, sink: FrameSink, outbox: Outbox) -> None:
        super().__init__("shm", ends.sock, sink, outbox)
        self.ring_bytes: int = ring_bytes_of(len(ends.memory))
        listeners = Ring(ends.memory, 0, self.ring_bytes)
        dialers = Ring(ends.memory, HEADER_BYTES + self.ring_bytes, self.ring_bytes)
        ours = ends.writes == LISTENER
        self._outgoing: Ring = listeners if ours else dialers
        self._incoming: Ring = dialers if ours else listeners
        self._bells: Memory = bytearray(_BELLS)
        self._looked_ns: int = monotonic_ns()
        self._gone: bool = False
        self._waits: bool = False  # for room, during the owner's sleep
        self._left: int = 0  # bytes that a peer which is gone had written: the last there will be

    def pump(self, now_ns: int) -> int:
        """See `Link.pump`. Received bytes carry the time of their own copy, not that of the pump (`now_ns`)."""
        if self.broken:
            return -self.broken
        moved = self._receive()
        if moved < 0:
            return moved
        if not self._gone and not self.outbox.empty():
            sent = self._send()
            if sent < 0:
                return sent
            moved += sent
        if moved == 0:
            return self._idle(now_ns)
        return moved

    def _receive(self) -> int:
        total = 0
        assembler = self.assembler
        ring = self._incoming
        for _look in range(_READS):
            assembler.want()
            asked = min(assembler.length, _READ_AT_MOST)
            if asked <= _HEADER_ROOM:
                asked = min(asked, _HEADERS_AT_MOST)
            if self._gone:
                if self._left == 0:
                    break
                asked = min(asked, self._left)
            got = ring.read_into(assembler.memory, assembler.offset, asked)
            if got <= 0:
                if got < 0:
                    return self._break(_LINK_ERROR, _BAD_INDEX)
                break
            if ring.space_needed():
                self._wake_peer()
            if self._gone:
                self._left -= got
            total += got
            code = assembler.received(got, monotonic_ns())  # the time of these bytes, not of the pump that began before them
            if code:
                self.broken = code
                return -code
            if got < asked:
                break
        self.bytes_in += total
        return total

    def _send(self) -> int:
        total = 0
        ring = self._outgoing
        while True:
            piece = self.outbox.front()
            if piece is None:
                break
            got = self._write_piece(ring, piece)
            if got <= 0:
                if got < 0:
                    return self._break(_LINK_ERROR, _BAD_INDEX)
                break
            self.outbox.sent(got)
            total += got
            if ring.wake_needed():
                self._wake_peer()
        self.bytes_out += total
        return total

    def _write_piece(self, ring: Ring, piece: Piece) -> int:
        if piece.head_length:
            return ring.write(self.outbox.buffer, piece.head_offset, piece.head_length)
        return ring.write(piece.memory, piece.offset, min(piece.length, _WRITE_AT_MOST))

    def _break(self, code: int, error_number: int) -> int:
        self.error_number = error_number
        self.broken = code
        return -code

    # ---- the socket: doorbell and word of a death ---------------------------------------------------------------

    def _wake_peer(self) -> None:
        """One byte. A full socket wakes as well, and a peer that is gone is found by the next look."""
        send_from(self.fd, self._bells, 0, 1, False)

    def _idle(self, now_ns: int) -> int:
        """Nothing moved: 0, or the end of a peer that is gone and has been heard out."""
        if not self._gone:
            # A caller whose clock stands before the last look has one of its own: then every idle pump looks.
            if self._looked_ns <= now_ns < self._looked_ns + _LOOK_EVERY_NS:
                return 0
            self._look()
        if self._gone and self._left == 0:
            return self._break(_PEER_LOST, self.error_number)
        return 0

    def _look(self) -> None:
        """Takes the doorbell's bytes away, whatever they are, and sees whether the peer lives."""
        self._looked_ns = monotonic_ns()
        got = recv_into(self.fd, self._bells, 0, _BELLS)
        if got > 0 or got == _AGAIN:
            return
        # Nothing that it wrote can come after the end of its socket. What a peer that feigns its death writes later is not read.
        self.error_number = -got
        self._gone = True
        self._left = max(self._incoming.readable(), 0)

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """See `Link.wait`."""
        if self.broken:
            return
        if self._incoming.sleep():
            if self.outbox.empty():
                self._sleep(timeout_ns, other_fd)
            elif self._outgoing.wait_space():
                self._sleep(timeout_ns, other_fd)
                self._outgoing.end_wait_space()
            self._incoming.awake()

    def rest(self) -> int:
        """See `Link.rest`."""
        if self._gone or self.broken:
            return -1
        if not self._incoming.sleep():
            self._incoming.awake()
            return -1
        if not self.outbox.empty():
            if not self._outgoing.wait_space():
                self._outgoing.end_wait_space()
                self._incoming.awake()
                return -1
            self._waits = True
        return 1

    def rise(self, ready: bool) -> None:
        """See `Link.rise`."""
        self._incoming.awake()
        if self._waits:
            self._waits = False
            self._outgoing.end_wait_space()
        if ready and not self._gone and not self.broken:
            self._look()

    def watch(self) -> list[tuple[int, int]]:
        """See `Link.watch`."""
        return [(self.fd, 1)]

    def _sleep(self, timeout_ns: int, other_fd: int) -> None:
        if wait_io(self.fd, 1, other_fd, 1, timeout_ns) & 1:  # an error has that bit as well, or is seen by the look
            self._look()

    def say_last(self, frame: ReadMemory) -> bool:
        """See `Link.say_last`."""
        if self.broken == 0 and not self._gone and self._outgoing.write_all(frame, 0, len(frame)) > 0:
            if self._outgoing.wake_needed():
                self._wake_peer()
            return True
        return False

    def describe(self) -> dict[str, object]:
        """See `Link.describe`."""
        pid, user = peer_of(self.sock)
        return {"link": "shm", "peer": f"process {pid} of user {user}", "ring_bytes": self.ring_bytes}

    def close(self) -> None:
        """See `Link.close`. The mapping goes with the rings, whose last users these are."""
        if not self.broken:
            self.broken = _LINK_ERROR
        if self.fd >= 0:
            self.fd = -1
            self.sock.close()
            self._gone = True
            self._drop_rings()

    def _drop_rings(self) -> None:
        """Rings over memory of nobody else's take the place of the link's."""
        nothing = bytearray(HEADER_BYTES + 1)
        self._outgoing = Ring(nothing, 0, 1)
        self._incoming = Ring(nothing, 0, 1)
