"""The metrics port: /metrics, /healthz and /readyz over a small HTTP/1.1, served by the daemon's own loop.

Between the loop, which polls one descriptor, and Prometheus, an orchestrator or curl. No thread, nothing that blocks: requests,
connections and the time of each are bounded, and every answer ends its connection. It only reads the status.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Final

from ..counters import Counters
from ..errors import ConfigError
from ..logs import logger
from .exposition import CONTENT_TYPE, make_registry, render
from .status import Status

REQUEST_BYTES: Final = 8192
CONNECTIONS: Final = 8  # more wait in the kernel's backlog
BACKLOG: Final = 16
LIMIT_NS: Final = 1_000_000_000  # for a whole connection
RETRY_ACCEPT_NS: Final = 1_000_000_000  # after an accept that failed for want of descriptors
HEALTHY_LOOP_S: Final = 5.0
DRAIN_READS: Final = 4
_PLAIN: Final = "text/plain; charset=utf-8"


@dataclass(slots=True)
class _Connection:
    """One request and its answer. `answer` is empty until the request is whole; `sent` once all of it went out."""

    sock: socket.socket
    deadline_ns: int
    request: bytearray = field(default_factory=bytearray)
    answer: memoryview = field(default_factory=lambda: memoryview(b""))
    sent: bool = False


class MetricsPort:
    """Listens at an IP address (port 0: any, see `port`). The loop polls `fileno()` for reading and calls `poll` when it is
    ready and at `due_ns`. Raises `ConfigError` when the address can't be had."""

    def __init__(self, host: str, port: int, status: Callable[[], Status], counters: Counters | None = None) -> None:
        self.counters = Counters() if counters is None else counters
        self._status = status
        self._registry = make_registry(status)
        self._connections: dict[int, _Connection] = {}
        self._accepting = True
        self._accept_again_ns = 0
        self._listener = _listen(host, port)
        self.host, self.port = self._listener.getsockname()[:2]
        self._epoll = select.epoll()
        self._epoll.register(self._listener, select.EPOLLIN)

    def fileno(self) -> int:
        """One descriptor that is readable when `poll` has something to do."""
        return self._epoll.fileno()

    @property
    def due_ns(self) -> int | None:
        """When `poll` is due though nothing arrived: a connection's time is up then. None: never."""
        times = [connection.deadline_ns for connection in self._connections.values()]
        if not self._accepting and len(times) < CONNECTIONS:
            times.append(self._accept_again_ns)
        return min(times, default=None)

    def poll(self, now_ns: int) -> None:
        """Serves what is there, without waiting, and ends connections whose time is up."""
        for descriptor, _events in self._epoll.poll(0):
            if descriptor == self._listener.fileno():
                self._accept(now_ns)
            elif descriptor in self._connections:
                self._serve(self._connections[descriptor])
        for connection in [item for item in self._connections.values() if now_ns >= item.deadline_ns]:
            self.counters.add("metrics_connections_timed_out", int(not connection.sent))
            self._end(connection)
        self._accept_or_not(now_ns)

    def close(self) -> None:
        """Ends every connection and the port. Safe to repeat."""
        for connection in list(self._connections.values()):
            self._end(connection)
        self._listener.close()
        self._epoll.close()

    def _accept(self, now_ns: int) -> None:
        while len(self._connections) < CONNECTIONS:
            try:
                sock, _address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as fault:  # out of descriptors or memory: the listener would stay readable, and the loop would spin
                self.counters.add("metrics_accept_failed")
                logger().warning("a metrics connection can't be taken", error=fault.strerror or str(fault))
                self._accept_again_ns = now_ns + RETRY_ACCEPT_NS
                return
            sock.setblocking(False)
            self._connections[sock.fileno()] = _Connection(sock, now_ns + LIMIT_NS)
            self._epoll.register(sock, select.EPOLLIN)

    def _accept_or_not(self, now_ns: int) -> None:
        """The listener is watched only while a connection could be taken."""
        wanted = len(self._connections) < CONNECTIONS and now_ns >= self._accept_again_ns
        if wanted != self._accepting:
            self._accepting = wanted
            self._epoll.modify(self._listener, select.EPOLLIN if wanted else 0)

    def _serve(self, connection: _Connection) -> None:
        try:
            if connection.sent:
                done = _drained(connection.sock)
            elif connection.answer:
                done = self._send(connection)
            else:
                done = self._receive(connection)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            self.counters.add("metrics_connections_lost")
            done = True
        if done:
            self._end(connection)

    def _receive(self, connection: _Connection) -> bool:
        data = connection.sock.recv(REQUEST_BYTES)
        if not data:
            return True
        connection.request += data
        whole = b"\r\n\r\n" in connection.request or b"\n\n" in connection.request
        if not whole and len(connection.request) < REQUEST_BYTES:
            return False
        connection.answer = memoryview(self._answer(bytes(connection.request) if whole else b""))
        self._epoll.modify(connection.sock, select.EPOLLOUT)
        return self._send(connection)

    def _send(self, connection: _Connection) -> bool:
        """Sends what goes now. A client that is still sending would lose the answer to a reset, so it is read out first."""
        connection.answer = connection.answer[connection.sock.send(connection.answer) :]
        if connection.answer:
            return False
        connection.sent = True
        connection.sock.shutdown(socket.SHUT_WR)
        self._epoll.modify(connection.sock, select.EPOLLIN)
        return _drained(connection.sock)

    def _end(self, connection: _Connection) -> None:
        self._connections.pop(connection.sock.fileno(), None)
        connection.sock.close()  # which takes it out of the epoll

    # ---- answers ----------------------------------------------------------------------------------------------------

    def _answer(self, request: bytes) -> bytes:
        """The whole answer to a request's head (empty: it was too long)."""
        words = request.split(b"\n", 1)[0].rstrip(b"\r").split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            return _http(HTTPStatus.BAD_REQUEST, "no HTTP/1.1 request of at most 8 KiB\n")
        make = {b"/metrics": self._metrics, b"/healthz": self._health, b"/readyz": self._readiness}.get(words[1].split(b"?")[0])
        if make is None:
            return _http(HTTPStatus.NOT_FOUND, "there are /metrics, /healthz and /readyz\n")
        if words[0] not in (b"GET", b"HEAD"):
            return _http(HTTPStatus.METHOD_NOT_ALLOWED, "only GET and HEAD\n")
        status, body, content_type = make()
        return _http(status, body, content_type, words[0] == b"HEAD")

    def _metrics(self) -> tuple[HTTPStatus, bytes | str, str]:
        return HTTPStatus.OK, render(self._registry), CONTENT_TYPE

    def _health(self) -> tuple[HTTPStatus, bytes | str, str]:
        age_s = self._status()["last_loop_age_s"]
        if age_s > HEALTHY_LOOP_S:
            return HTTPStatus.SERVICE_UNAVAILABLE, f"the loop last turned {age_s:.1f} s ago\n", _PLAIN
        return HTTPStatus.OK, "ok\n", _PLAIN

    def _readiness(self) -> tuple[HTTPStatus, bytes | str, str]:
        status = self._status()
        if status["draining"]:
            return HTTPStatus.SERVICE_UNAVAILABLE, "draining\n", _PLAIN
        if not any(session["up"] for session in status["sessions"]):
            return HTTPStatus.SERVICE_UNAVAILABLE, "no session is up\n", _PLAIN
        return HTTPStatus.OK, "ok\n", _PLAIN


def _listen(host: str, port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(BACKLOG)
        listener.setblocking(False)
    except OSError as fault:
        listener.close()
        raise ConfigError(f"[daemon] metrics: cannot listen on {host} port {port}: {fault.strerror or fault}") from None
    return listener


def _drained(sock: socket.socket) -> bool:
    """Whether the client has closed; takes what it still sends, a little at a time. Its deadline bounds the rest."""
    with contextlib.suppress(BlockingIOError):
        for _ in range(DRAIN_READS):
            if not sock.recv(REQUEST_BYTES):
                return True
    return False


def _http(status: HTTPStatus, body: bytes | str, content_type: str = _PLAIN, head: bool = False) -> bytes:
    data = body.encode() if isinstance(body, str) else body
    allow = "Allow: GET, HEAD\r\n" if status is HTTPStatus.METHOD_NOT_ALLOWED else ""
    lines = (
        f"HTTP/1.1 {status.value} {status.phrase}\r\nContent-Type: {content_type}\r\nContent-Length: {len(data)}\r\n"
        f"{allow}Cache-Control: no-store\r\nConnection: close\r\n\r\n"
    )
    return lines.encode() + (b"" if head else data)
