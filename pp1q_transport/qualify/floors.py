"""What this machine can do at best, measured in the same run, with the link's sizes, pinning and idle strategy.

Between the benchmark's two processes, which call the same tests in the same order over a control channel of their own.
Moves bytes that mean nothing: no frame, no digest, no check, so that every figure of the link can stand beside the
figure of a plain copy, a plain TCP socket in C, and ZeroMQ. Not authenticated beyond a token: for hosts under test,
not for an open network. SPEC section 9 (`floors`).
"""

from __future__ import annotations

import errno
import hmac
import os
import secrets
import socket
import struct
import time
from collections.abc import Callable
from types import TracebackType
from typing import Final

import numpy as np
import numpy.typing as npt
import zmq

from .._native import net
from ..errors import ConfigError, LocalMisuse, PeerFault, Reason
from .floor_plan import FloorAddress, FloorConfig, FloorPlan, FloorResult, FloorTest, Idle, Role
from .stats import CpuTimes, Nanoseconds

Bytes = npt.NDArray[np.uint8]

__all__ = [
    "FloorTest", "FloorPlan", "FloorResult", "FloorConfig", "FloorAddress", "FloorListener", "FloorPeer", "memcpy_GBps",
    "Role", "Idle",
]  # fmt: skip

ACK: Final = bytes(8)
TOKEN_BYTES: Final = 16
STRAY_S: Final = 1.0  # a connection that has not shown the token by then is not ours
SLICE_MS: Final = 100  # a blocked call comes back this often to look at the clock and the peer
POLLS_PER_CLOCK: Final = 256
MEMCPY_BYTES: Final = 256 << 20  # copied at least, so that one figure takes tens of milliseconds


def memcpy_GBps(size: int, slots: int, count: int | None = None) -> float:
    """Copies `size` bytes from one of `slots` areas to one of as many others, in turn; 10^9 bytes a second.

    Cache behaviour is that of the link when `size` and `slots` are. `count` copies, by default as many as move at least
    256 MiB; one untimed round warms up. Raises `LocalMisuse` for a number below 1.
    """
    if count is None:
        count = max(2 * slots, MEMCPY_BYTES // max(size, 1))
    plan = FloorPlan(FloorTest.HELLO, size, count, slots=slots)  # checks the numbers
    source, to = _touched(size * slots), _touched(size * slots)
    net.floor_memcpy(to, source, size, slots, slots)
    return plan.count * size / net.floor_memcpy(to, source, size, slots, plan.count)


def _touched(size: int) -> Bytes:
    """Memory whose pages exist: uint8 [size], not all zero, so that no page is the shared zero page."""
    area = np.empty(size, np.uint8)
    area.fill(0x5A)
    return area


def _context() -> zmq.Context[zmq.Socket[bytes]]:
    return zmq.Context(io_threads=1)


def _zmq_socket(context: zmq.Context[zmq.Socket[bytes]], config: FloorConfig) -> zmq.Socket[bytes]:
    dealer = context.socket(zmq.DEALER)
    dealer.setsockopt(zmq.LINGER, 0)
    for option in (zmq.SNDHWM, zmq.RCVHWM):
        dealer.setsockopt(option, 0)  # the window bounds what is under way
    for option in (zmq.RCVTIMEO, zmq.SNDTIMEO):
        dealer.setsockopt(option, SLICE_MS)
    if config.buffer_bytes is not None:
        dealer.setsockopt(zmq.SNDBUF, config.buffer_bytes)
        dealer.setsockopt(zmq.RCVBUF, config.buffer_bytes)
    return dealer


def _size_buffers(sock: socket.socket, config: FloorConfig) -> None:
    if config.buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, config.buffer_bytes)
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, config.buffer_bytes)


class FloorListener:
    """The end that waits: binds a TCP and a ZeroMQ port at once, so that `address` can be sent to the peer."""

    def __init__(self, config: FloorConfig, host: str = "127.0.0.1") -> None:
        """Raises `ConfigError` when `host` cannot be bound."""
        self.config = config
        self._context = _context()
        self._dealer = _zmq_socket(self._context, config)
        self._tcp = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            _size_buffers(self._tcp, config)  # before listen: the window scale is fixed in the handshake
            self._tcp.bind((host, 0))
            self._tcp.listen(8)
            self._dealer.setsockopt(zmq.IPV6, ":" in host)
            zmq_port = self._dealer.bind_to_random_port(f"tcp://[{host}]" if ":" in host else f"tcp://{host}")
        except (OSError, zmq.ZMQError) as failure:
            self.close()
            raise ConfigError(f"floors: cannot listen on {host}: {failure}") from failure
        self.address = FloorAddress(host, self._tcp.getsockname()[1], zmq_port, secrets.token_hex(TOKEN_BYTES))

    def accept(self) -> FloorPeer:
        """Waits for the peer that shows the token; others are cut off. Closes the listening port.

        Raises `PeerFault` (`TIMEOUT`, or what the greeting found).
        """
        expected = bytes.fromhex(self.address.token)
        deadline = time.monotonic() + self.config.timeout_s
        try:
            while (left := deadline - time.monotonic()) > 0:
                self._tcp.settimeout(left)
                try:
                    sock, _ = self._tcp.accept()
                except TimeoutError:
                    break
                if hmac.compare_digest(_first_bytes(sock, min(left, STRAY_S)), expected):
                    self._tcp.close()
                    return FloorPeer(self.config, sock, self._context, self._dealer, expected, listens=True)
                sock.close()
        except BaseException:
            self.close()
            raise
        self.close()
        raise PeerFault(Reason.TIMEOUT, f"floors: no peer connected within {self.config.timeout_s} s")

    def close(self) -> None:
        """Closes both ports."""
        self._tcp.close()
        self._context.destroy(linger=0)


def _first_bytes(sock: socket.socket, timeout_s: float) -> bytes:
    """The first TOKEN_BYTES of a connection, or fewer when they do not come in time."""
    seen, deadline = b"", time.monotonic() + timeout_s
    while len(seen) < TOKEN_BYTES and (left := deadline - time.monotonic()) > 0:
        sock.settimeout(left)
        try:
            piece = sock.recv(TOKEN_BYTES - len(seen))
        except OSError:  # a timeout or a reset: either way this is not the peer
            break
        if not piece:
            break
        seen += piece
    return seen


class FloorPeer:
    """One connected end: a TCP connection and a ZeroMQ DEALER pair that live for the whole run, idle between tests.

    Made by `FloorListener.accept` and `FloorPeer.connect`. After an error the two ends no longer agree about what is
    under way, so every later `run` raises `LocalMisuse`.
    """

    def __init__(
        self,
        config: FloorConfig,
        sock: socket.socket,
        context: zmq.Context[zmq.Socket[bytes]],
        dealer: zmq.Socket[bytes],
        token: bytes,
        listens: bool,
    ) -> None:
        self.config = config
        self._spin = config.idle == "spin"
        self._timeout_ns = int(config.timeout_s * 1e9)
        self._sock, self._context, self._dealer = sock, context, dealer
        self._area: Bytes = np.empty(0, np.uint8)
        self._broken = ""
        try:
            sock.settimeout(None)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("@ll", 0, SLICE_MS * 1000))
            self._greet(token, listens)
        except BaseException:
            self.close()
            raise

    @classmethod
    def connect(cls, config: FloorConfig, address: FloorAddress) -> FloorPeer:
        """Connects to a listening peer. Raises `ConfigError` for an unusable address, `PeerFault` otherwise."""
        host, tcp_port, zmq_port, token = address
        try:
            shown = bytes.fromhex(token)
        except ValueError as failure:
            raise ConfigError("floors: the token of the peer's address is not hexadecimal") from failure
        context = _context()
        dealer = _zmq_socket(context, config)
        sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        try:
            _size_buffers(sock, config)
            sock.settimeout(config.timeout_s)
            sock.connect((host, tcp_port))
            sock.sendall(shown)
            dealer.setsockopt(zmq.IPV6, ":" in host)
            dealer.connect(f"tcp://[{host}]:{zmq_port}" if ":" in host else f"tcp://{host}:{zmq_port}")
        except (OSError, zmq.ZMQError, OverflowError) as failure:
            sock.close()
            context.destroy(linger=0)
            raise PeerFault(Reason.LINK_ERROR, f"floors: cannot connect to {host}:{tcp_port}: {failure}") from failure
        return cls(config, sock, context, dealer, shown, listens=False)

    def _greet(self, token: bytes, listens: bool) -> None:
        """Both paths up, roles opposite, idle strategy equal, before anything is timed."""
        hello = FloorPlan(FloorTest.HELLO, size=1, count=1)
        self._agree(hello)
        if not listens:
            self._zmq_send(token, hello)
        if not hmac.compare_digest(bytes(self._zmq_receive(hello)), token):
            raise PeerFault(Reason.AUTH_FAILED, "floors: a stranger spoke on the ZeroMQ port")
        if listens:
            self._zmq_send(token, hello)

    def __enter__(self) -> FloorPeer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the connection and ZeroMQ's thread; nothing is left to linger."""
        self._broken = self._broken or "it is closed"
        self._sock.close()
        self._context.destroy(linger=0)

    @property
    def held_bytes(self) -> int:
        """Memory held for payload, to be told apart from the link's."""
        return int(self._area.nbytes)

    def prepare(self, size: int, slots: int) -> None:
        """Makes and touches the payload memory now: before a memory baseline, outside every measurement."""
        if size * slots > len(self._area):
            self._area = _touched(size * slots)

    def run(self, plan: FloorPlan) -> FloorResult:
        """Runs one test with the peer, which must run an equal plan at the same time.

        Raises `PeerFault` (`PEER_LOST`, `TIMEOUT`, `LINK_ERROR`, or `LIMITS_MISMATCH` when the peer runs another plan)
        and `LocalMisuse` after an earlier error.
        """
        if self._broken:
            raise LocalMisuse(f"floors: this end runs no more tests: {self._broken}")
        tests: dict[FloorTest, Callable[[FloorPlan], FloorResult]] = {
            FloorTest.SOCKET_RTT: self._socket_rtt,
            FloorTest.SOCKET_GBPS: self._socket_goodput,
            FloorTest.ZMQ_RTT: self._zmq_rtt,
            FloorTest.ZMQ_GBPS: self._zmq_goodput,
        }
        if plan.test not in tests:
            raise LocalMisuse(f"floors: {plan.test.name} is no test")
        self.prepare(plan.size, plan.slots)
        try:
            self._agree(plan)
            return tests[plan.test](plan)
        except BaseException as failure:
            self._broken = f"{plan.test.name.lower()} failed: {failure!r}"
            raise

    def _agree(self, plan: FloorPlan) -> None:
        """Both ends exchange what they are about to do: two different tests would only wait for each other."""
        values = (plan.size, plan.count, plan.window, plan.request_bytes, plan.slots)
        mine = struct.pack("<4s3B5I", b"PQFL", plan.test, self._spin, self.config.role == "leader", *values)
        theirs = bytearray(len(mine))
        self._moved(net.floor_write(self._sock.fileno(), self._spin, self._timeout_ns, mine), plan)
        self._moved(net.floor_read(self._sock.fileno(), self._spin, self._timeout_ns, theirs), plan)
        magic, test, spin, leads, *others = struct.unpack("<4s3B5I", theirs)
        if magic != b"PQFL" or test not in FloorTest.__members__.values():
            raise PeerFault(Reason.BAD_MAGIC, "floors: the other end of the connection is no floor peer")
        if spin != self._spin or leads == (self.config.role == "leader"):
            peer = f"{'leader' if leads else 'receiver'}, {'spin' if spin else 'block'}"
            ours = f"{self.config.role}, {self.config.idle}"
            raise PeerFault(
                Reason.LIMITS_MISMATCH, f"floors: roles must differ and idle agree: {ours} here, {peer} there"
            )
        if (test, *others) != (plan.test, *values):
            size, count, window, request_bytes, slots = others
            raise PeerFault(
                Reason.LIMITS_MISMATCH,
                f"floors: this end runs {plan}, the peer {FloorTest(test).name.lower()}(size={size}, count={count}, "
                f"window={window}, request_bytes={request_bytes}, slots={slots})",
            )

    def _moved(self, outcome: int, plan: FloorPlan) -> int:
        """A native floor's outcome, or the `PeerFault` it means."""
        if outcome >= 0:
            return outcome
        name = plan.test.name.lower()
        if outcome == -errno.ETIMEDOUT:
            hint = "is the peer running the same test, on another CPU?"
            raise PeerFault(Reason.TIMEOUT, f"floors: {name} moved no byte for {self.config.timeout_s} s; {hint}")
        if outcome in (-errno.ECONNRESET, -errno.EPIPE):
            raise PeerFault(Reason.PEER_LOST, f"floors: the peer closed the connection during {name}")
        raise PeerFault(Reason.LINK_ERROR, f"floors: {name}: {os.strerror(-outcome)}")

    def _socket_rtt(self, plan: FloorPlan) -> FloorResult:
        fd, request, start = self._sock.fileno(), _touched(plan.request_bytes), CpuTimes.now()
        common = (fd, self._spin, self._timeout_ns, self._area, plan.size, plan.slots, request)
        began_ns = time.monotonic_ns()
        samples: Nanoseconds | None = None
        if self.config.role == "receiver":
            samples = np.full(plan.count, 0, np.uint64)
            self._moved(net.floor_ask(*common, samples), plan)
        else:
            self._moved(net.floor_answer(*common, plan.count), plan)
        return _result(plan, time.monotonic_ns() - began_ns, start, samples)

    def _socket_goodput(self, plan: FloorPlan) -> FloorResult:
        fd, start = self._sock.fileno(), CpuTimes.now()
        common = (fd, self._spin, self._timeout_ns, self._area, plan.size, plan.slots)
        if self.config.role == "receiver":
            elapsed_ns = net.floor_receive(*common, plan.count)
        else:
            elapsed_ns = net.floor_send(*common, plan.window, plan.count)
        return _result(plan, self._moved(elapsed_ns, plan), start)

    def _zmq_send(self, data: memoryview | bytes, plan: FloorPlan) -> None:
        # copy=False is ZeroMQ's best for large messages. Without a high-water mark only a lost peer makes this wait.
        since_ns = 0
        while True:
            try:
                self._dealer.send(data, zmq.NOBLOCK if self._spin else 0, copy=False)
            except zmq.Again:
                since_ns = self._zmq_waited(plan, since_ns)
            else:
                return

    def _zmq_receive(self, plan: FloorPlan) -> memoryview:
        """The next message, still in ZeroMQ's memory. Raises `PeerFault` when none comes.

        An empty poll yields: ZeroMQ's own thread lives on the CPU this end is pinned to, and spinning it off that CPU
        made round trips of 1,280 bytes 83 us (p99 3.5 ms) instead of 62 us, and goodput half.
        """
        flags, mask = (zmq.NOBLOCK, POLLS_PER_CLOCK - 1) if self._spin else (0, 0)
        receive, polls, since_ns = self._dealer.recv, 0, 0
        while True:
            try:
                return receive(flags, copy=False).buffer
            except zmq.Again:
                polls += 1
            if mask:
                os.sched_yield()
            if polls & mask == 0:
                since_ns = self._zmq_waited(plan, since_ns)

    def _zmq_waited(self, plan: FloorPlan, since_ns: int) -> int:
        """After a call that moved nothing: when the wait began (`since_ns` or now), or the `PeerFault` that ends it."""
        now_ns = time.monotonic_ns()
        since_ns = since_ns or now_ns
        if now_ns - since_ns > self._timeout_ns:
            self._moved(-errno.ETIMEDOUT, plan)
        self._peer_alive(plan)
        return since_ns

    def _peer_alive(self, plan: FloorPlan) -> None:
        # ZeroMQ reports no lost peer; the idle TCP connection of the same two processes does.
        try:
            gone = self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b""
        except BlockingIOError:
            return
        except OSError as failure:
            self._moved(-(failure.errno or errno.EIO), plan)
        if gone:
            self._moved(-errno.ECONNRESET, plan)

    def _zmq_land(self, plan: FloorPlan, turn: int, size: int) -> None:
        """Lands one message where the link's would: a slot of ours, not memory of ZeroMQ's."""
        message = self._zmq_receive(plan)
        if len(message) != size:
            raise PeerFault(Reason.REPLY_SIZE, f"floors: a message of {len(message)} bytes came instead of {size}")
        at = turn % plan.slots * plan.size
        self._area.data[at : at + size] = message

    def _zmq_rtt(self, plan: FloorPlan) -> FloorResult:
        request, start = _touched(plan.request_bytes).tobytes(), CpuTimes.now()
        began_ns = time.monotonic_ns()
        samples: Nanoseconds | None = None
        if self.config.role == "receiver":
            samples = np.full(plan.count, 0, np.uint64)
            for turn in range(plan.count):
                asked_ns = time.monotonic_ns()
                self._zmq_send(request, plan)
                self._zmq_land(plan, turn, plan.size)
                samples[turn] = time.monotonic_ns() - asked_ns
        else:
            for turn in range(plan.count):
                self._zmq_receive(plan)
                self._zmq_send(self._slot(plan, turn), plan)
        return _result(plan, time.monotonic_ns() - began_ns, start, samples)

    def _zmq_goodput(self, plan: FloorPlan) -> FloorResult:
        start, began_ns = CpuTimes.now(), time.monotonic_ns()
        if self.config.role == "receiver":
            self._zmq_send(ACK, plan)
            finished_ns = began_ns
            for turn in range(plan.count):
                self._zmq_land(plan, turn, plan.size)
                finished_ns = time.monotonic_ns()
                self._zmq_send(ACK, plan)
            return _result(plan, finished_ns - began_ns, start)
        self._zmq_receive(plan)
        began_ns = time.monotonic_ns()
        for turn in range(plan.count):
            if turn >= plan.window:
                self._zmq_receive(plan)
            self._zmq_send(self._slot(plan, turn), plan)
        for _ in range(min(plan.window, plan.count)):
            self._zmq_receive(plan)
        return _result(plan, time.monotonic_ns() - began_ns, start)

    def _slot(self, plan: FloorPlan, turn: int) -> memoryview:
        at = turn % plan.slots * plan.size
        return self._area.data[at : at + plan.size]


def _result(plan: FloorPlan, elapsed_ns: int, start: CpuTimes, samples: Nanoseconds | None = None) -> FloorResult:
    return FloorResult(plan, elapsed_ns, CpuTimes.now().total_s - start.total_s, samples)
