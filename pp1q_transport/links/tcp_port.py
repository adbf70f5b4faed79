"""The tcp link's data port and the dial to it: sockets that notice a vanished host, of the address family that is asked for.

Between the operating system and `proving`, which cuts off whatever does not prove itself; a proven connection is a socket.
SPEC section 2.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError, PeerFault, Reason
from ..session.proof import proof_frame
from .proving import BACKLOG, HALF_OPEN, ProvingDialer, ProvingPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement

EVERY_ADDRESS: Final = ("0.0.0.0", "::")

__all__ = ["HALF_OPEN", "TcpDialer", "TcpPort", "dial_tcp", "listen_tcp", "prepare", "say_proof", "split_endpoint"]


def prepare(sock: socket.socket) -> None:
    """Kernel keep-alive finds a vanished host even while this process computes."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


def listen_tcp(host: str, port: int) -> tuple[socket.socket, str]:
    """A listening socket and where it listens, "host:port". Raises `ConfigError`."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise ConfigError(f"can't listen for data links on {host}:{port}: {error.strerror}") from error
    sock.setblocking(False)
    bound = sock.getsockname()
    return sock, f"[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"{bound[0]}:{bound[1]}"


def dial_tcp(endpoint: str, scheme: str, reached: str) -> tuple[socket.socket, tuple[str, int]]:
    """A socket and the address it must connect to. A listener on every address announces no host that means anything here: then
    it is `reached`, where its control end is. Raises `PeerFault` (`malformed`)."""
    host, port = split_endpoint(endpoint, scheme)
    if host in EVERY_ADDRESS:
        host = reached
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    prepare(sock)
    return sock, (host, port)


def say_proof(sock: socket.socket, agreement: Agreement) -> bool:
    """Whether our proof went whole."""
    proof = proof_frame(agreement)
    try:
        return sock.send(proof) == len(proof)
    except OSError:
        return False


class TcpPort(ProvingPort[socket.socket]):
    """A listening data port on `host`; `find` maps a session ID to the agreement that waits for its link."""

    def __init__(self, host: str, port: int, find: Callable[[int], Agreement | None], counters: Counters) -> None:
        sock, where = listen_tcp(host, port)
        super().__init__(sock, f"tcp://{where}", find, counters)

    def _admit(self, sock: socket.socket) -> Reason | None:
        prepare(sock)
        return None

    def _join(self, sock: socket.socket, agreement: Agreement) -> socket.socket | None:
        return sock if say_proof(sock, agreement) else None


class TcpDialer(ProvingDialer[socket.socket]):
    """Connects to a data port, proves itself, waits for the peer's proof. `poll` until it returns the socket or raises."""

    def __init__(self, agreement: Agreement, now_ns: int, reached: str = "127.0.0.1") -> None:
        sock, address = dial_tcp(agreement.data, "tcp", reached)
        super().__init__(agreement, now_ns, sock)
        self._connect(address)

    def _join(self) -> socket.socket:
        return self._sock


def split_endpoint(endpoint: str, scheme: str = "tcp") -> tuple[str, int]:
    """("host", port) of "tcp://host:port" (or another scheme); raises `PeerFault(malformed)`."""
    address = endpoint.removeprefix(f"{scheme}://")
    host, colon, port = address.rpartition(":")
    known = endpoint.startswith(f"{scheme}://") and colon and port.isascii() and port.isdigit()
    if not known or not 0 < int(port) < 65536:
        raise PeerFault(Reason.MALFORMED, f"{endpoint!r} is no {scheme}://host:port")
    return host.strip("[]"), int(port)
