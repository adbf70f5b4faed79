"""The tcp link's data port and the dial to it: sockets that notice a vanished host, of the address family that is asked for.

Between the operating system and `proving`, which cuts off whatever does not prove itself; a proven connection is a socket.
SPEC section 2.
"""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError, PeerFault, Reason
from .proving import BACKLOG, HALF_OPEN, ProvingDialer, ProvingPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement

EVERY_ADDRESS: Final = ("0.0.0.0", "::")

__all__ = ["HALF_OPEN", "TcpDialer", "TcpPort", "split_endpoint"]


def _prepare(sock: socket.socket) -> None:
    """Kernel keep-alive finds a vanished host even while this process computes."""
    sock.setblocking(False)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)


class TcpPort(ProvingPort[socket.socket]):
    """A listening data port on `host`; `find` maps a session ID to the agreement that waits for its link."""

    def __init__(self, host: str, port: int, find: Callable[[int], Agreement | None], counters: Counters) -> None:
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
        endpoint = f"tcp://[{bound[0]}]:{bound[1]}" if ":" in bound[0] else f"tcp://{bound[0]}:{bound[1]}"
        super().__init__(sock, endpoint, find, counters)

    def _admit(self, sock: socket.socket) -> Reason | None:
        _prepare(sock)
        return None

    def _join(self, sock: socket.socket, proof: bytes) -> socket.socket | None:
        try:
            return sock if sock.send(proof) == len(proof) else None
        except OSError:
            return None


class TcpDialer(ProvingDialer[socket.socket]):
    """Connects to a data port, proves itself, waits for the peer's proof. `poll` until it returns the socket or raises.

    A listener on every address announces no host that means anything here: then it is `reached`, where its control end is.
    """

    def __init__(self, agreement: Agreement, now_ns: int, reached: str = "127.0.0.1") -> None:
        host, port = split_endpoint(agreement.data)
        if host in EVERY_ADDRESS:
            host = reached
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        super().__init__(agreement, now_ns, socket.socket(family, socket.SOCK_STREAM))
        _prepare(self._sock)
        self._connect((host, port))

    def _join(self) -> socket.socket:
        return self._sock


def split_endpoint(endpoint: str) -> tuple[str, int]:
    """("host", port) of "tcp://host:port"; raises `PeerFault(malformed)`."""
    address = endpoint.removeprefix("tcp://")
    host, colon, port = address.rpartition(":")
    if not endpoint.startswith("tcp://") or not colon or not (port.isascii() and port.isdigit()) or not 0 < int(port) < 65536:
        raise PeerFault(Reason.MALFORMED, f"{endpoint!r} is no tcp://host:port")
    return host.strip("[]"), int(port)
