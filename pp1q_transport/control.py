"""The control plane: bounded messages between daemons over ZeroMQ, with CURVE and an allow-list of keys.

Between the engine (which polls, sends and receives maps) and libzmq. Knows no meaning of a message beyond refusing what
does not decode, keeps no session, never blocks but for a bounded linger at `close`, and starts no Python thread. What
libzmq hides (a failed handshake, a key refused, a peer gone, a message dropped) is read off its monitor and its return
codes, and counted. SPEC section 2.
"""

from __future__ import annotations

import errno
import os
import select
import struct
from types import TracebackType
from typing import Final, Self

import zmq
import zmq.utils.z85

from .control_codec import MESSAGE_LIMIT, REPORT_LIMIT, decode_message, encode_message
from .control_peers import (
    ACCEPTED,
    DISCONNECTED,
    FAILED,
    FAILED_AUTH,
    FAILED_PROTOCOL,
    SUCCEEDED,
    Connections,
)
from .counters import Counters
from .endpoints import Endpoint, parse_endpoint
from .errors import ConfigError, LocalMisuse, PeerFault, Reason
from .keys import KeyConfig, is_key
from .session.negotiate import Message, refuse_message

__all__ = [
    "ControlConnector", "ControlListener", "Endpoint", "MESSAGE_LIMIT", "PEER", "REPORT_LIMIT", "decode_message",
    "encode_message", "parse_endpoint",
]  # fmt: skip

PEER: Final = b""  # the one peer of a connector
MAX_PEERS: Final = 64
QUEUE_MESSAGES: Final = 64  # per peer and direction
BATCH: Final = 256  # messages, handshakes or events handled by one `receive`
BACKLOG: Final = 128
HANDSHAKE_MS: Final = 2_000
HEARTBEAT_MS: Final = 1_000
HEARTBEAT_TIMEOUT_MS: Final = 10_000  # for hosts that died, not for busy ones; a dead process is seen by its link at once
LINGER_MS: Final = 300
RECONNECT_MS: Final = 50
RECONNECT_MAX_MS: Final = 200  # a listener that restarts is found again at once; a try costs a SYN
FAILED_HANDSHAKES: Final = 3  # of an unexplained kind, until a connector gives up
_CURVE_OVERHEAD_BYTES: Final = 256
_MONITOR_EVENTS: Final = 1 << 16  # libzmq's only I/O thread blocks on a full monitor: leave it room while nobody polls
_ZAP_ENDPOINT: Final = "inproc://zeromq.zap.01"
_DOMAIN: Final = b"pp1q"
_STRANGERS_KEPT: Final = 8

_RETRIED: Final = int(zmq.EVENT_CONNECT_RETRIED)
_WATCHED: Final = ACCEPTED | DISCONNECTED | _RETRIED | SUCCEEDED | FAILED | FAILED_PROTOCOL | FAILED_AUTH


def _readable(socket: zmq.Socket[bytes]) -> bool:
    # A closed one: in a garbage collection a socket's own finalizer may come before ours.
    return not socket.closed and bool(int(socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN)


class _Context(zmq.Context[zmq.Socket[bytes]]):
    """A context that only `close` ends: pyzmq's own finalizer would wait for sockets that are in the same garbage."""

    def __del__(self) -> None:
        """Nothing: see the class."""


class _Plane:
    """What both ends share: a context of their own (so that no other socket's ZAP handler answers for us), the socket,
    its monitor, and one descriptor that says when `receive` has something to do."""

    def __init__(self, kind: int, endpoint: str, keys: KeyConfig | None, counters: Counters | None, limit: int) -> None:
        self.address = parse_endpoint(endpoint)
        given = [] if keys is None else [keys.own_public, keys.own_secret, keys.server_public or keys.own_public]
        if not all(map(is_key, given)):
            raise ConfigError("a CURVE key is not 40 characters of Z85: load it from a file of `pp1q keys new`")
        if keys is None and not self.address.loopback:
            raise ConfigError(
                f"{self.address} is not a loopback address and needs keys: make them with `pp1q keys new`, "
                "or use 127.0.0.1"
            )
        self.endpoint = str(self.address)
        self.counters = Counters() if counters is None else counters
        self.closed = False
        self._limit = limit
        self._context = _Context()
        self._socket = self._context.socket(kind)
        self._configure(keys)
        self._monitor = self._watch_socket()
        self._sockets = [self._socket, self._monitor]
        self._epoll = select.epoll()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._wake, select.EPOLLIN)
        for socket in self._sockets:
            self._epoll.register(int(socket.getsockopt(zmq.FD)), select.EPOLLIN)

    def _configure(self, keys: KeyConfig | None) -> None:
        options = {
            zmq.LINGER: LINGER_MS, zmq.SNDHWM: QUEUE_MESSAGES, zmq.RCVHWM: QUEUE_MESSAGES,
            zmq.MAXMSGSIZE: self._limit + _CURVE_OVERHEAD_BYTES, zmq.BACKLOG: BACKLOG,
            zmq.HANDSHAKE_IVL: HANDSHAKE_MS, zmq.HEARTBEAT_IVL: HEARTBEAT_MS,
            zmq.HEARTBEAT_TIMEOUT: HEARTBEAT_TIMEOUT_MS, zmq.HEARTBEAT_TTL: HEARTBEAT_TIMEOUT_MS,
            zmq.RECONNECT_IVL: RECONNECT_MS, zmq.RECONNECT_IVL_MAX: RECONNECT_MAX_MS,
            zmq.IPV6: int(":" in self.address.host and self.address.scheme == "tcp"),
        }  # fmt: skip
        for option, value in options.items():
            self._socket.setsockopt(option, value)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.own_public.encode("ascii"))
            self._socket.setsockopt(zmq.CURVE_SECRETKEY, keys.own_secret.encode("ascii"))

    def _watch_socket(self) -> zmq.Socket[bytes]:
        self._socket.monitor("inproc://pp1q.monitor", _WATCHED)
        monitor = self._context.socket(zmq.PAIR)
        monitor.setsockopt(zmq.LINGER, 0)
        monitor.setsockopt(zmq.RCVHWM, _MONITOR_EVENTS)
        monitor.connect("inproc://pp1q.monitor")
        return monitor

    def fileno(self) -> int:
        """A descriptor that polls readable when `receive` has work; it stays so until `receive` has done it."""
        return self._epoll.fileno()

    def _rouse(self) -> None:
        """ZeroMQ's descriptors are edges, and any call on a socket may swallow one: so look, and hold our own up."""
        if any(_readable(socket) for socket in self._sockets):
            os.eventfd_write(self._wake, 1)

    def _check_open(self) -> None:
        if self.closed:
            raise LocalMisuse("this control socket is closed")

    def _settle(self) -> None:
        self._check_open()
        try:
            os.eventfd_read(self._wake)
        except BlockingIOError:
            return  # nobody had to be roused

    def _events(self) -> list[tuple[int, int]]:
        """The monitor's new events, as (event, value)."""
        events: list[tuple[int, int]] = []
        while len(events) < _MONITOR_EVENTS and _readable(self._monitor):
            event, value = struct.unpack("=Hi", self._monitor.recv_multipart(zmq.NOBLOCK)[0])
            events.append((event, value))
        return events

    def _send(self, frames: tuple[bytes, ...]) -> bool:
        self._check_open()
        if self._socket.closed:
            self.counters.add("control_send_failed")
            return False
        try:
            self._socket.send_multipart(frames, zmq.NOBLOCK)
        except zmq.ZMQError as fault:
            if fault.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise PeerFault(Reason.LINK_ERROR, f"cannot send on {self.endpoint}: {fault.strerror}") from None
            self.counters.add("control_send_failed")
            return False
        finally:
            self._rouse()
        self.counters.add("control_sent")
        return True

    def close(self) -> None:
        """Sends what is queued for at most `LINGER_MS`, then frees everything. May be called twice."""
        if self.closed:
            return
        self.closed = True
        self._epoll.close()
        os.close(self._wake)
        while self._events():
            pass  # an I/O thread that waits for room in the monitor would never let the socket close
        if not self._socket.closed:
            self._socket.disable_monitor()
        for socket in self._sockets:
            socket.close()
        self._context.term()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class ControlListener(_Plane):
    """The listening end (ROUTER). `keys` turns CURVE on: only clients on `keys.allow` pass. Not for two threads.

    `endpoint` is the bound address (port 0 becomes the port chosen). Raises `ConfigError` for one that cannot be
    bound, or that other hosts can reach while `keys` is None. Totals: `control_handshake_failed`, `control_auth_failed`
    (also reason `auth_failed`), `control_malformed`, `control_overload`, `control_send_failed`, `control_sent`,
    `control_received`.
    """

    def __init__(self, endpoint: str, keys: KeyConfig | None = None, *, counters: Counters | None = None,
                 max_peers: int = MAX_PEERS, message_limit: int = MESSAGE_LIMIT) -> None:  # fmt: skip
        super().__init__(zmq.ROUTER, endpoint, keys, counters, message_limit)
        self._max_peers = max_peers
        self._allow = None if keys is None else keys.allow
        self._connections = Connections(self.counters)
        self._gone: list[bytes] = []
        self._strangers: dict[str, str] = {}  # key not on the allow-list -> from where, until `strangers` is asked
        # Without a handler libzmq lets any CURVE client in, unless a domain is set *and* enforced: then nobody. Under
        # NULL a domain makes it ask us too, and refuse ZMTP 1, which any bytes would pass for.
        self._zap = self._context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP_ENDPOINT)
        self._sockets.append(self._zap)
        self._epoll.register(int(self._zap.getsockopt(zmq.FD)), select.EPOLLIN)
        self._socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
        self._socket.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        self._socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)
        if keys is not None:
            self._socket.setsockopt(zmq.CURVE_SERVER, 1)
        try:
            self._socket.bind(str(self.address))
        except zmq.ZMQError as fault:
            self.close()
            raise ConfigError(f"cannot listen on {endpoint}: {_explain(fault)}") from None
        self.endpoint = str(self._socket.getsockopt_string(zmq.LAST_ENDPOINT)).rstrip("\0")

    def send(self, peer: bytes, message: Message) -> bool:
        """Queues `message` for `peer`; False (and `control_send_failed`) when it is gone or its queue is full."""
        return self._send((peer, encode_message(message, self._limit)))

    def receive(self) -> list[tuple[bytes, Message]]:
        """What arrived, as (peer, message), at most `BATCH`. Also answers handshakes, so it must be called whenever
        `fileno` polls readable. A message that does not decode is counted and answered with a REFUSE."""
        self._settle()
        self._watch()
        self._answer_handshakes()
        arrived: list[list[zmq.Frame]] = []
        while len(arrived) < BATCH and _readable(self._socket):
            arrived.append(self._socket.recv_multipart(zmq.NOBLOCK, copy=False))
        # Every event that precedes one of these messages is in the monitor by now: a descriptor's number means the
        # connection that sent it.
        self._watch()
        messages = []
        for frames in arrived:
            peer = frames[0].bytes
            if not self._connections.seen(peer, int(frames[-1].get(zmq.SRCFD)), self._max_peers):
                self._refuse(Reason.OVERLOAD, "control_overload")
                continue
            try:
                if len(frames) != 2:
                    raise PeerFault(Reason.MALFORMED, f"a control message of {len(frames) - 1} parts")  # noqa: TRY301
                messages.append((peer, decode_message(frames[1].bytes, self._limit)))
                self.counters.add("control_received")
            except PeerFault as fault:
                self._refuse(fault.reason, "control_malformed")
                self.send(peer, refuse_message(fault))
        if not _readable(self._socket):
            self._gone += self._connections.drained()
        self._rouse()
        return messages

    def lost(self) -> list[bytes]:
        """The peers whose connection ended since the last call; what they had sent was returned by `receive` before."""
        gone, self._gone = self._gone, []
        return gone

    def strangers(self) -> dict[str, str]:
        """Public keys that were refused since the last call because they are not on the allow-list, with their address."""
        seen, self._strangers = self._strangers, {}
        return seen

    def _refuse(self, reason: Reason, total: str) -> None:
        self.counters.refuse(reason)
        self.counters.add(total)

    def _watch(self) -> None:
        for event, value in self._events():
            self._connections.event(event, value)

    def _answer_handshakes(self) -> None:
        for _ in range(BATCH):
            if not _readable(self._zap):
                break
            frames = self._zap.recv_multipart(zmq.NOBLOCK)
            status, text, user = self._verdict(frames)
            self._zap.send_multipart((b"1.0", frames[1] if len(frames) > 1 else b"", status, text, user, b""))

    def _verdict(self, frames: list[bytes]) -> tuple[bytes, bytes, bytes]:
        """ZAP status, text and user ID (RFC 27) for one handshake: 200 in, 300 come again later, 400 never."""
        if len(frames) < 6 or frames[0] != b"1.0" or frames[2] != _DOMAIN:
            return b"500", b"not a request of ours", b""
        if len(self._connections) >= self._max_peers:
            self._refuse(Reason.OVERLOAD, "control_overload")
            return b"300", b"too many peers", b""
        mechanism = frames[5]
        if self._allow is None:
            return (b"200", b"OK", b"") if mechanism == b"NULL" else (b"400", b"no keys here", b"")
        if mechanism != b"CURVE" or len(frames) != 7 or len(frames[6]) != 32:
            return b"400", b"CURVE only", b""
        key = zmq.utils.z85.encode(frames[6])
        if key.decode("ascii") in self._allow:
            return b"200", b"OK", key
        if len(self._strangers) < _STRANGERS_KEPT:
            self._strangers[key.decode("ascii")] = frames[3].decode("ascii", "replace")[:64]
        return b"400", b"not on the allow-list", b""


def _explain(fault: zmq.ZMQError) -> str:
    """What to do about a bind that failed, in one line."""
    known = {
        errno.EADDRINUSE: "address in use; choose another port or stop the process that has it",
        errno.EADDRNOTAVAIL: "this host has no such address",
        errno.ENODEV: "this host has no such address; give an IP address",
        errno.EACCES: "permission denied; ports below 1024 need privileges",
    }
    return known.get(fault.errno or 0, str(fault.strerror))


def _afresh(fault: PeerFault) -> PeerFault:
    """The same without its traceback: kept or raised twice, that would hold on to all that its callers had in hand."""
    return PeerFault(fault.reason, fault.detail)


class ControlConnector(_Plane):
    """The connecting end (DEALER); its one peer is `PEER`. `keys` needs `server_public`. Not for use by two threads.

    It tries again until a listener is there (the deadline is `negotiate.Connector`'s), but a connection that
    was made and ended is over: no message can slip into the listener's next life. Raises `ConfigError` for an endpoint
    that cannot be used. `trouble` says in one line why there is no connection yet.
    """

    def __init__(self, endpoint: str, keys: KeyConfig | None = None, *, counters: Counters | None = None,
                 message_limit: int = MESSAGE_LIMIT) -> None:  # fmt: skip
        if keys is not None and keys.server_public is None:
            raise ConfigError(f"connecting to {endpoint} with keys needs the listener's public key")
        super().__init__(zmq.DEALER, endpoint, keys, counters, message_limit)
        self.connected = False
        self.trouble = f"nobody answers on {self.endpoint} yet"
        self._fault: PeerFault | None = None
        self._ended = False
        self._unexplained = 0  # handshakes that failed without a stated cause, in a row
        self._keys = keys
        if keys is not None and keys.server_public is not None:
            self._socket.setsockopt(zmq.CURVE_SERVERKEY, keys.server_public.encode("ascii"))
        try:
            if self.address.scheme == "tcp" and self.address.port == 0:
                raise ConfigError(f"cannot connect to {endpoint}: port 0 is for listening")  # noqa: TRY301
            self._socket.connect(self.endpoint)
        except zmq.ZMQError as fault:
            self.close()
            raise ConfigError(f"cannot connect to {endpoint}: {fault.strerror}") from None
        except ConfigError:
            self.close()
            raise

    def send(self, peer: bytes, message: Message) -> bool:
        """Queues `message` (`peer` is `PEER`), also before the connection is there; False (and `control_send_failed`)
        when the queue is full or the connection is over."""
        if peer != PEER:
            raise LocalMisuse("a connector has one peer, PEER")
        data = encode_message(message, self._limit)
        self._check_open()
        self._watch()
        if self._fault is not None:
            self.counters.add("control_send_failed")
            os.eventfd_write(self._wake, 1)  # the fault is `receive`'s to raise
            return False
        return self._send((data,))

    def receive(self) -> list[tuple[bytes, Message]]:
        """What arrived, as (`PEER`, message), at most `BATCH`. All handed out, raises `PeerFault`: `auth_failed`
        when the handshake was refused, `peer_lost` when the connection ended, `malformed` for what does not decode."""
        self._settle()
        self._watch()  # first: what was sent before the connection's end is then sure to be here
        messages: list[tuple[bytes, Message]] = []
        try:
            while len(messages) < BATCH and not self._ended and _readable(self._socket):
                frames = self._socket.recv_multipart(zmq.NOBLOCK)
                if len(frames) != 1:
                    raise PeerFault(Reason.MALFORMED, f"a control message of {len(frames)} parts")  # noqa: TRY301
                messages.append((PEER, decode_message(frames[0], self._limit)))
                self.counters.add("control_received")
        except PeerFault as fault:
            self.counters.add("control_malformed")
            self._fail(fault)
            self._end()
        if self._fault is not None and (self._ended or not _readable(self._socket)):
            self._end()
            if not messages:
                raise _afresh(self._fault)
            os.eventfd_write(self._wake, 1)  # there is still the fault to hand out
        self._rouse()
        return messages

    def _watch(self) -> None:
        for event, _ in self._events():
            self._judge(event)

    def _judge(self, event: int) -> None:
        if event == SUCCEEDED:
            self.connected, self._unexplained, self.trouble = True, 0, ""
        elif event == DISCONNECTED and self.connected:
            self._fail(PeerFault(Reason.PEER_LOST, f"{self.endpoint} closed the control connection"))
        elif event == _RETRIED and not self._unexplained:
            self.trouble = f"nobody answers on {self.endpoint} yet"
        elif event in (FAILED, FAILED_PROTOCOL, FAILED_AUTH):
            self.counters.add("control_handshake_failed")
            self._unexplained += event == FAILED
            self.trouble = self._why(event)
            if event != FAILED or self._unexplained >= FAILED_HANDSHAKES:
                self.counters.add("control_auth_failed")
                self._fail(PeerFault(Reason.AUTH_FAILED, self.trouble))

    def _why(self, event: int) -> str:
        if event == FAILED_AUTH:
            return f"key refused by {self.endpoint}: add this side's public key to its allow-list (`pp1q keys allow`)"
        if event == FAILED_PROTOCOL and self._keys is None:
            return f"{self.endpoint} refused the handshake: it asks for keys, and none were given"
        if event == FAILED_PROTOCOL:
            return f"{self.endpoint} refused the handshake: it does not use keys, or is no pp1q control endpoint"
        if self._keys is None:
            return f"{self.endpoint} ended the handshake: it asks for keys, has no room, or is no pp1q control endpoint"
        return f"{self.endpoint} ended the handshake: is its public key the one given here, and does it use keys?"

    def _fail(self, fault: PeerFault) -> None:
        """The first fault stays; `receive` raises it when everything that came before is handed out."""
        if self._fault is None:
            self._fault = _afresh(fault)
            self.connected = False
            self.counters.refuse(fault.reason)

    def _end(self) -> None:
        """Closes the socket, which drops what was not read yet, so this comes last. (After a mere disconnect libzmq
        goes on reconnecting until somebody calls into the socket again.)"""
        if not self._ended:
            self._ended = True
            self._epoll.unregister(int(self._socket.getsockopt(zmq.FD)))
            self._sockets.remove(self._socket)
            self._socket.disable_monitor()
            self._socket.close(linger=0)
