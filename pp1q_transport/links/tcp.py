"""The tcp link: receives from a socket straight into a slot and sends header and payload in one call.

Between an engine and one connected, proven socket. It forms no connections (`tcp_port` does), judges no frames and owns no slot.
Every byte lands by a `recv` of this process, so a fence is only a word to the assembler. DESIGN decisions 3 and 5.
"""

from __future__ import annotations

import errno
import socket
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from .._native.net import quick_ack, recv_into, send_from, send_two, wait_io
from ..errors import Reason
from ..session.assembler import FrameSink
from ..session.outbox import Outbox, Piece
from .stream import StreamLink

if TYPE_CHECKING:
    from ..memory import ReadMemory

RECEIVES_A_PUMP: Final = 16
_RECEIVES: Final = RECEIVES_A_PUMP  # a C integer in the compiled build
_LINGER_BYTES: Final = 1 << 16
_ACK_BELOW: Final = 16384
_AGAIN: Final = -errno.EAGAIN
_GONE: Final = (errno.ECONNRESET, errno.EPIPE, errno.ETIMEDOUT, errno.ECONNABORTED, errno.EHOSTUNREACH, errno.ENETUNREACH)
_PEER_LOST: Final = Reason.PEER_LOST.code
_LINK_ERROR: Final = Reason.LINK_ERROR.code


class TcpLink(StreamLink):
    """One proven connection. Owns `sock` (non-blocking) and closes it."""

    def __init__(self, sock: socket.socket, sink: FrameSink, outbox: Outbox) -> None:
        super().__init__("tcp", sock, sink, outbox)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._owed: int = 0  # bytes taken since we last sent anything: the kernel may owe their acknowledgement

    def pump(self, now_ns: int) -> int:
        """See `Link.pump`. Received bytes carry the time of their own receive, not that of the pump (`now_ns`)."""
        if self.broken:
            return -self.broken
        moved = self._receive()
        if moved < 0:
            return moved
        if self.outbox.empty():
            return moved
        sent = self._send()
        if sent < 0:
            return sent
        return moved + sent

    def _receive(self) -> int:
        total = 0
        assembler = self.assembler
        for _look in range(_RECEIVES):
            assembler.want()
            asked = assembler.length
            got = recv_into(self.fd, assembler.memory, assembler.offset, asked)
            if got == _AGAIN:
                if total == 0 and self._owed and self.outbox.empty():
                    self._acknowledge()
                break
            if got <= 0:
                # What came before the end is handled already; the end itself is the next pump's answer too.
                return self._gone(got)
            total += got
            code = assembler.received(got, monotonic_ns())  # the time of these bytes, not of the pump that began before them
            if code:
                self.broken = code
                return -code
            if got < asked:
                break
        self.bytes_in += total
        self._owed += total
        return total

    def _acknowledge(self) -> None:
        """Nothing to take or send: the moment to acknowledge a small frame that got no answer (COMMIT, one row of several).

        Left to itself the kernel does it inside the receive of the next small frame, which is 3-4 us on the way of a STEP.
        A stream of large rows is acknowledged as it goes.
        """
        if self._owed < _ACK_BELOW:
            quick_ack(self.fd)
        self._owed = 0

    def _send(self) -> int:
        total = 0
        while True:
            piece = self.outbox.front()
            if piece is None:
                break
            want = piece.head_length + piece.length
            got = self._send_piece(piece)
            if got == _AGAIN:
                break
            if got < 0:
                return self._gone(got)
            self.outbox.sent(got)
            total += got
            if got < want:
                break
        self.bytes_out += total
        if total:
            self._owed = 0  # what we sent carried the acknowledgement
        return total

    def _send_piece(self, piece: Piece) -> int:
        if piece.length == 0:
            return send_from(self.fd, self.outbox.buffer, piece.head_offset, piece.head_length, False)
        if piece.head_length == 0:
            return send_from(self.fd, piece.memory, piece.offset, piece.length, False)
        return send_two(
            self.fd,
            self.outbox.buffer,
            piece.head_offset,
            piece.head_length,
            piece.memory,
            piece.offset,
            piece.length,
        )

    def _gone(self, result: int) -> int:
        self.error_number = -result
        self.broken = _PEER_LOST if result == 0 or -result in _GONE else _LINK_ERROR
        return -self.broken

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """See `Link.wait`."""
        if self._owed and self.outbox.empty():
            self._acknowledge()
        events = 1 if self.outbox.empty() else 5  # POLLIN, POLLIN | POLLOUT
        wait_io(self.fd, events, other_fd, 1, timeout_ns)

    def rest(self) -> int:
        """See `Link.rest`."""
        if self._owed and self.outbox.empty():
            self._acknowledge()
        return 1 if self.outbox.empty() else 5

    def rise(self, ready: bool) -> None:
        """See `Link.rise`: there was nothing to announce."""

    def watch(self) -> list[tuple[int, int]]:
        """See `Link.watch`."""
        return [(self.fd, 1 if self.outbox.empty() else 5)]

    def say_last(self, frame: ReadMemory) -> bool:
        """See `Link.say_last`."""
        return self.fd >= 0 and send_from(self.fd, frame, 0, len(frame), False) == len(frame)

    def linger(self, timeout_ns: int) -> None:
        """See `Link.linger`. A socket that is closed with bytes unread resets the connection, and a reset swallows what was said
        last on its way."""
        try:
            self.sock.shutdown(socket.SHUT_WR)
        except OSError:  # gone already: nobody to say anything to
            return
        scratch = bytearray(_LINGER_BYTES)
        stop_ns = monotonic_ns() + timeout_ns
        while monotonic_ns() < stop_ns:
            got = recv_into(self.fd, scratch, 0, len(scratch))
            if got == _AGAIN:
                wait_io(self.fd, 1, -1, 0, stop_ns - monotonic_ns())
            elif got <= 0:
                return

    def describe(self) -> dict[str, object]:
        """See `Link.describe`."""
        local = self.sock.getsockname()
        try:
            peer = self.sock.getpeername()
        except OSError:  # reset already, between its proof and now: the next pump says so
            peer = ("gone", 0)
        return {
            "link": "tcp",
            "local": f"{local[0]}:{local[1]}",
            "peer": f"{peer[0]}:{peer[1]}",
            "sndbuf": self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF),
            "rcvbuf": self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF),
        }

    def close(self) -> None:
        """See `Link.close`."""
        if not self.broken:
            self.broken = _LINK_ERROR
        if self.fd >= 0:
            self.fd = -1
            self.sock.close()
