"""The data port: accepts raw TCP connections, cuts off whatever does not prove itself within a second, hands over the rest.

Between the operating system and the engine, which knows the agreements. Touches no slot and no session; what it holds at any
moment is bounded: `HALF_OPEN` sockets of 160 bytes each, the oldest giving way. SPEC section 2.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import TYPE_CHECKING, Final, NoReturn

from ..errors import ConfigError, PeerFault, Reason
from ..session.negotiate import LINK_PROOF_TIMEOUT_NS
from ..session.proof import ProofReader, proof_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement

HALF_OPEN: Final = 64
ACCEPTS_A_POLL: Final = 64
BACKLOG: Final = 128
EVERY_ADDRESS: Final = ("0.0.0.0", "::")


def _prepare(sock: socket.socket) -> None:
    """Kernel keep-alive finds a vanished host even while this process computes."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class _HalfOpen:
    def __init__(self, sock: socket.socket, deadline_ns: int, reader: ProofReader) -> None:
        self.sock = sock
        self.deadline_ns = deadline_ns
        self.reader = reader


class TcpPort:
    """A listening data port on `host`; `find` maps a session ID to the agreement that waits for its link."""

    def __init__(self, host: str, port: int, find: Callable[[int], Agreement | None], counters: Counters) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        self._find = find
        self._counters = counters
        self._half_open: list[_HalfOpen] = []
        try:
            self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._sock.bind((host, port))
            self._sock.listen(BACKLOG)
        except OSError as error:
            self._sock.close()
            raise ConfigError(f"can't listen for data links on {host}:{port}: {error.strerror}") from error
        self._sock.setblocking(False)
        bound = self._sock.getsockname()
        self.endpoint = f"tcp://[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"tcp://{bound[0]}:{bound[1]}"

    def fileno(self) -> int:
        """The listening descriptor, for polling."""
        return self._sock.fileno()

    @property
    def half_open(self) -> int:
        """How many connections have not proven themselves yet."""
        return len(self._half_open)

    def poll(self, now_ns: int) -> list[tuple[socket.socket, Agreement]]:
        """Accepts, reads proofs and cuts off. Returns the connections that have just proven themselves (our proof is sent)."""
        self._accept(now_ns)
        proven: list[tuple[socket.socket, Agreement]] = []
        kept: list[_HalfOpen] = []
        for half in self._half_open:
            reason = self._read(half, now_ns)
            agreement = half.reader.agreement
            if agreement is not None and self._answer(half, agreement):
                proven.append((half.sock, agreement))
            elif agreement is None and reason is None:
                kept.append(half)
            else:
                self._cut(half, reason or Reason.LINK_ERROR)
        self._half_open = kept
        return proven

    def _accept(self, now_ns: int) -> None:
        for _ in range(ACCEPTS_A_POLL):
            try:
                sock, _peer = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A connection that died in the queue, or no descriptors left: neither may disturb live sessions.
                self._counters.add("accept_failed")
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._shed()
                    return
                continue
            _prepare(sock)
            if len(self._half_open) >= HALF_OPEN:
                self._shed()
            self._half_open.append(_HalfOpen(sock, now_ns + LINK_PROOF_TIMEOUT_NS, ProofReader(self._find)))

    def _shed(self) -> None:
        """The oldest half-open connection gives way: a peer that means it proves itself at once."""
        if self._half_open:
            self._cut(self._half_open.pop(0), Reason.OVERLOAD)

    def _read(self, half: _HalfOpen, now_ns: int) -> Reason | None:
        late = Reason.TIMEOUT if now_ns >= half.deadline_ns else None
        try:
            data = half.sock.recv(half.reader.missing)
        except BlockingIOError:
            return late
        except OSError:
            return Reason.LINK_ERROR
        if not data:
            return Reason.PEER_LOST
        reason = half.reader.take(data)
        # A whole proof found late was in time, since we look late ourselves; bytes that trickle in buy no time.
        return reason if half.reader.agreement is not None else reason or late

    @staticmethod
    def _answer(half: _HalfOpen, agreement: Agreement) -> bool:
        frame = proof_frame(agreement)
        try:
            return half.sock.send(frame) == len(frame)
        except OSError:
            return False

    def _cut(self, half: _HalfOpen, reason: Reason) -> None:
        self._counters.add("links_cut_off")
        self._counters.refuse(reason)
        half.sock.close()

    def close(self) -> None:
        """Closes the port and everything half-open."""
        for half in self._half_open:
            half.sock.close()
        self._half_open.clear()
        self._sock.close()


class TcpDialer:
    """Connects to a data port, proves itself, waits for the peer's proof. `poll` until it returns the socket or raises.

    A listener on every address announces no host that means anything here: then it is `reached`, where its control end is.
    """

    def __init__(self, agreement: Agreement, now_ns: int, reached: str = "127.0.0.1") -> None:
        self._agreement = agreement
        self._deadline_ns = now_ns + LINK_PROOF_TIMEOUT_NS
        self._reader = ProofReader(lambda session: agreement if session == agreement.session else None)
        self._sent = False
        host, port = split_endpoint(agreement.data)
        if host in EVERY_ADDRESS:
            host = reached
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self._sock = socket.socket(family, socket.SOCK_STREAM)
        _prepare(self._sock)
        try:
            code = self._sock.connect_ex((host, port))
        except (OSError, TypeError, UnicodeError) as error:  # no such name, or none that could be one
            self._fail(Reason.LINK_ERROR, f"can't connect to {agreement.data}: {error}")
        if code not in (0, errno.EINPROGRESS):
            self._fail(Reason.LINK_ERROR, os.strerror(code))

    def fileno(self) -> int:
        """The connecting socket, for polling."""
        return self._sock.fileno()

    def poll(self, now_ns: int) -> socket.socket | None:
        """The proven socket, None while under way; raises `PeerFault` (`timeout`, `link_error`, `auth_failed`...)."""
        if now_ns >= self._deadline_ns:
            self._fail(Reason.TIMEOUT, f"no link proof from {self._agreement.data} within a second")
        if not self._sent and not self._send_proof():
            return None
        try:
            data = self._sock.recv(self._reader.missing)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(Reason.LINK_ERROR, error.strerror or "receive failed")
        if not data:
            self._fail(Reason.PEER_LOST, "the peer closed the link before its proof")
        reason = self._reader.take(data)
        if reason is not None:
            self._fail(reason, "the peer's link proof")
        return self._sock if self._reader.agreement is not None else None

    def _send_proof(self) -> bool:
        _, writable, _ = select.select([], [self._sock], [], 0)
        if not writable:
            return False
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(Reason.LINK_ERROR, f"can't connect to {self._agreement.data}: {os.strerror(code)}")
        frame = proof_frame(self._agreement)
        try:
            sent = self._sock.send(frame)
        except OSError as error:
            self._fail(Reason.LINK_ERROR, f"the link took no proof: {error.strerror}")
        if sent != len(frame):
            self._fail(Reason.LINK_ERROR, "the link took no proof")
        self._sent = True
        return True

    def _fail(self, reason: Reason, detail: str) -> NoReturn:
        self._sock.close()
        raise PeerFault(reason, detail)

    def close(self) -> None:
        """Gives the attempt up."""
        self._sock.close()


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """("host", port) of "tcp://host:port"; raises `PeerFault(malformed)`."""
    address = endpoint.removeprefix("tcp://")
    host, colon, port = address.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise PeerFault(Reason.MALFORMED, f"{endpoint!r} is no tcp://host:port")
    return host.strip("[]"), int(port)
