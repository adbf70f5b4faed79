"""The floors: that both ends move what the plan says, and that a lost, silent or disagreeing peer is a named error."""

from __future__ import annotations

import errno
import multiprocessing
import os
import signal
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import pytest
import zmq

from pp1q_transport._native import net
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.qualify import floors
from pp1q_transport.qualify.floors import (
    FloorAddress,
    FloorConfig,
    FloorListener,
    FloorPeer,
    FloorPlan,
    FloorResult,
    FloorTest,
    Idle,
    memcpy_GBps,
)

pytestmark = pytest.mark.timeout(60)
TESTS = tuple(test for test in FloorTest if test is not FloorTest.HELLO)
PLANS = (
    *(FloorPlan(test, size=1280, count=20, window=3, request_bytes=128, slots=4) for test in TESTS),
    *(FloorPlan(test, size=3_000_001, count=3, window=2, slots=2) for test in TESTS),
    *(FloorPlan(test, size=1, count=1, window=7, request_bytes=1) for test in TESTS),
)


def lead(address: FloorAddress, idle: Idle) -> None:
    """The other process."""
    with FloorPeer.connect(FloorConfig("leader", idle, buffer_bytes=1 << 18), address) as peer:
        for plan in PLANS:
            peer.run(plan)


@contextmanager
def pair(idle: Idle = "block", timeout_s: float = 10.0) -> Iterator[tuple[FloorPeer, FloorPeer]]:
    """A receiver that listened and a leader that connected, in this process (the native loops release the GIL)."""
    listener = FloorListener(FloorConfig("receiver", idle, timeout_s=timeout_s))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(FloorPeer.connect, FloorConfig("leader", idle, timeout_s=timeout_s), listener.address)
        receiver = listener.accept()
        leader = connecting.result(20)
    with receiver, leader:
        yield receiver, leader


def both(receiver: FloorPeer, leader: FloorPeer, ours: FloorPlan, theirs: FloorPlan) -> list[Future[FloorResult]]:
    with ThreadPoolExecutor(2) as pool:
        return [pool.submit(receiver.run, ours), pool.submit(leader.run, theirs)]


@pytest.mark.parametrize("idle", ("spin", "block"))
def test_every_test_runs_between_two_processes(idle: Idle) -> None:
    listener = FloorListener(FloorConfig("receiver", idle, buffer_bytes=1 << 18))
    leader = multiprocessing.get_context("spawn").Process(target=lead, args=(listener.address, idle), daemon=True)
    leader.start()
    try:
        with listener.accept() as peer:
            results = [peer.run(plan) for plan in PLANS]
            assert peer.held_bytes == 6_000_002
        leader.join(30)
        assert leader.exitcode == 0
    finally:
        leader.kill()
    for plan, result in zip(PLANS, results, strict=True):
        assert result.plan == plan
        assert result.elapsed_ns > 0
        assert result.goodput_GBps == pytest.approx(plan.size * plan.count / result.elapsed_ns)
        assert result.cpu_s_per_GB >= 0
        if plan.test in (FloorTest.SOCKET_RTT, FloorTest.ZMQ_RTT):
            assert result.samples_ns is not None
            assert result.samples_ns.shape == (plan.count,)
            assert int(result.samples_ns.min()) > 0
            assert int(result.samples_ns.sum()) <= result.elapsed_ns
        else:
            assert result.samples_ns is None


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name.lower())
@pytest.mark.parametrize("idle", ("spin", "block"))
def test_every_slot_receives_the_leaders_bytes(idle: Idle, test: FloorTest) -> None:
    plan = FloorPlan(test, size=1000, count=3, window=2, slots=4)
    with pair(idle) as (receiver, leader):
        for peer in (receiver, leader):
            peer.prepare(plan.size, plan.slots)
        sent = np.random.default_rng(1).integers(0, 256, 4000, np.uint8)
        leader._area[:] = sent
        for future in both(receiver, leader, plan, plan):
            future.result()
        assert np.array_equal(receiver._area[:3000], sent[:3000])
        assert (receiver._area[3000:] == 0x5A).all()  # the fourth slot had no turn


@pytest.mark.parametrize("window", (1, 2, 5))
def test_the_window_is_kept(window: int) -> None:
    """A receiver that acknowledges nothing gets `window` messages and not one more."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(bytes(8))  # the go-ahead
        area = np.zeros(100, np.uint8)
        assert net.floor_send(ours.fileno(), True, 50_000_000, area, 100, 1, window, 10) == -errno.ETIMEDOUT
        assert len(theirs.recv(1 << 16)) == 100 * window


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name.lower())
@pytest.mark.parametrize("idle", ("spin", "block"))
@pytest.mark.parametrize("role", ("leader", "receiver"))
def test_a_peer_that_dies_in_a_test_is_lost(idle: Idle, test: FloorTest, role: str) -> None:
    plan = FloorPlan(test, size=50_000_000, count=10)
    with pair(idle) as (receiver, leader):
        dying, ours = (leader, receiver) if role == "receiver" else (receiver, leader)

        def die() -> None:
            dying._agree(plan)
            dying.close()

        with ThreadPoolExecutor(1) as pool:
            pool.submit(die)
            with pytest.raises(PeerFault, match=r"closed the connection|Broken pipe") as caught:
                ours.run(plan)
        assert caught.value.reason is Reason.PEER_LOST
        with pytest.raises(LocalMisuse, match=f"no more tests: {test.name.lower()} failed"):
            ours.run(plan)


@pytest.mark.parametrize("test", TESTS, ids=lambda test: test.name.lower())
@pytest.mark.parametrize("idle", ("spin", "block"))
def test_a_silent_peer_is_a_timeout(idle: Idle, test: FloorTest) -> None:
    plan = FloorPlan(test, size=100, count=10)
    with pair(idle) as (receiver, leader):
        receiver._timeout_ns = 10_000_000
        with ThreadPoolExecutor(1) as pool:
            pool.submit(leader._agree, plan)  # and then nothing
            with pytest.raises(PeerFault, match="moved no byte") as caught:
                receiver.run(plan)
        assert caught.value.reason is Reason.TIMEOUT


def test_a_peer_that_never_comes_to_the_test_is_a_timeout() -> None:
    with pair("spin") as (receiver, _):
        receiver._timeout_ns = 10_000_000
        with pytest.raises(PeerFault) as caught:
            receiver.run(PLANS[0])
        assert caught.value.reason is Reason.TIMEOUT


def test_a_message_of_another_size_lands_nowhere() -> None:
    plan = FloorPlan(FloorTest.ZMQ_RTT, size=100, count=1, slots=2)
    with pair() as (receiver, leader), ThreadPoolExecutor(1) as pool:
        leader._zmq_send(bytes(101), plan)
        pool.submit(leader._agree, plan)
        with pytest.raises(PeerFault, match="101 bytes came instead of 100") as caught:
            receiver.run(plan)
        assert caught.value.reason is Reason.REPLY_SIZE
        assert (receiver._area == 0x5A).all()


def test_bytes_that_are_no_plan_are_refused() -> None:
    with pair() as (receiver, leader):
        leader._sock.sendall(bytes(64))
        with pytest.raises(PeerFault, match="no floor peer") as caught:
            receiver.run(PLANS[0])
        assert caught.value.reason is Reason.BAD_MAGIC


def test_two_different_plans_are_refused_on_both_sides_with_both_named() -> None:
    ours, theirs = FloorPlan(FloorTest.SOCKET_RTT, 100, 5), FloorPlan(FloorTest.ZMQ_GBPS, 100, 5, window=2)
    with pair() as (receiver, leader):
        for future in both(receiver, leader, ours, theirs):
            failure = future.exception()
            assert isinstance(failure, PeerFault)
            assert failure.reason is Reason.LIMITS_MISMATCH
            assert "socket_rtt(size=100, count=5, window=1" in failure.detail
            assert "zmq_gbps(size=100, count=5, window=2" in failure.detail


@pytest.mark.parametrize(
    "theirs", (FloorConfig("receiver", "block"), FloorConfig("leader", "spin")), ids=["same_role", "other_idle"]
)
def test_ends_that_do_not_fit_refuse_each_other(theirs: FloorConfig) -> None:
    listener = FloorListener(FloorConfig("receiver", "block"))
    with ThreadPoolExecutor(1) as pool:
        connecting = pool.submit(FloorPeer.connect, theirs, listener.address)
        with pytest.raises(PeerFault, match="roles must differ and idle agree: receiver, block here") as caught:
            listener.accept()
        assert caught.value.reason is Reason.LIMITS_MISMATCH
        assert isinstance(connecting.exception(), PeerFault)


def test_strangers_are_cut_off_and_the_peer_still_gets_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(floors, "STRAY_S", 0.05)
    listener = FloorListener(FloorConfig("receiver", "block"))
    where = (listener.address.host, listener.address.tcp_port)
    with socket.create_connection(where) as silent, socket.create_connection(where) as wrong:
        wrong.sendall(bytes(16))
        socket.create_connection(where).close()
        with ThreadPoolExecutor(1) as pool:
            connecting = pool.submit(FloorPeer.connect, FloorConfig("leader", "block"), listener.address)
            with listener.accept(), connecting.result():
                for stray in (silent, wrong):
                    stray.settimeout(10)
                    assert stray.recv(1) == b""


def test_a_stranger_on_the_zmq_port_is_refused() -> None:
    listener = FloorListener(FloorConfig("receiver", "block"))
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with context, context.socket(zmq.DEALER) as stranger:
        stranger.setsockopt(zmq.LINGER, 0)
        stranger.connect(f"tcp://127.0.0.1:{listener.address.zmq_port}")
        stranger.send(b"let me in")
        assert listener._dealer.poll(10_000)  # queued before the peer's token is
        with ThreadPoolExecutor(1) as pool:
            pool.submit(FloorPeer.connect, FloorConfig("leader", "block", timeout_s=0.5), listener.address)
            with pytest.raises(PeerFault, match="stranger") as caught:
                listener.accept()
    assert caught.value.reason is Reason.AUTH_FAILED


def test_nobody_coming_and_nobody_there_are_named() -> None:
    listener = FloorListener(FloorConfig("receiver", timeout_s=0.05))
    with pytest.raises(PeerFault, match=r"no peer connected within 0\.05 s") as caught:
        listener.accept()
    assert caught.value.reason is Reason.TIMEOUT
    with pytest.raises(PeerFault, match=r"cannot connect to 127\.0\.0\.1") as caught:
        FloorPeer.connect(FloorConfig("leader"), listener.address)  # its port is closed now
    assert caught.value.reason is Reason.LINK_ERROR
    with pytest.raises(ConfigError, match="hexadecimal"):
        FloorPeer.connect(FloorConfig("leader"), listener.address._replace(token="xyz"))
    with pytest.raises(ConfigError, match="cannot listen on"):
        FloorListener(FloorConfig("receiver"), "203.0.113.7")  # documentation range: on no host


@pytest.mark.parametrize(
    "make",
    (
        lambda: FloorConfig("target"),  # type: ignore[arg-type]
        lambda: FloorConfig("leader", "sleep"),  # type: ignore[arg-type]
        lambda: FloorConfig("leader", buffer_bytes=0),
        lambda: FloorConfig("leader", timeout_s=0),
        lambda: FloorConfig("leader", timeout_s=float("nan")),
    ),
    ids=["role", "idle", "buffer", "timeout", "nan"],
)
def test_unusable_settings_are_named(make: Callable[[], FloorConfig]) -> None:
    with pytest.raises(ConfigError, match="floors: "):
        make()


@pytest.mark.parametrize("field", ("size", "count", "window", "request_bytes", "slots"))
@pytest.mark.parametrize("value", (0, -1, 1 << 31))
def test_unusable_plans_are_named(field: str, value: int) -> None:
    with pytest.raises(LocalMisuse, match=f"{field} must be"):
        FloorPlan(**{"test": FloorTest.SOCKET_RTT, "size": 1, "count": 1, field: value})


def test_hello_is_no_test() -> None:
    with pair() as (receiver, _), pytest.raises(LocalMisuse, match="HELLO is no test"):
        receiver.run(FloorPlan(FloorTest.HELLO, 1, 1))


def test_buffers_are_sized_or_left_to_the_kernel() -> None:
    with pair() as (receiver, _):
        untouched = receiver._sock.getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
    listener = FloorListener(FloorConfig("receiver", "block", buffer_bytes=50_000))
    with ThreadPoolExecutor(1) as pool:
        config = FloorConfig("leader", "block", buffer_bytes=50_000)
        connecting = pool.submit(FloorPeer.connect, config, listener.address)
        with listener.accept() as receiver, connecting.result() as leader:
            for peer in (receiver, leader):
                for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
                    assert peer._sock.getsockopt(socket.SOL_SOCKET, option) == 100_000  # Linux doubles it
                assert peer._sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
    assert untouched != 100_000


def test_memcpy_copies_every_slot() -> None:
    source, to = np.arange(40, dtype=np.uint8), np.zeros(40, np.uint8)
    assert net.floor_memcpy(to, source, 10, 4, 3) > 0
    assert to.tolist() == [*range(30)] + [0] * 10
    assert memcpy_GBps(1280, 8, count=100) > 0
    assert memcpy_GBps(1 << 20, 2) > 0
    for size, slots, count, name in ((0, 1, None, "size"), (1, 0, None, "slots"), (1, 1, 0, "count")):
        with pytest.raises(LocalMisuse, match=f"{name} must be"):
            memcpy_GBps(size, slots, count)


@pytest.mark.parametrize(("length", "slots"), ((11, 4), (41, 1), (0, 1), (1, 0), (-1, 2), (2**62, 4), (10, -4)))
def test_native_floors_refuse_areas_that_do_not_fit(length: int, slots: int) -> None:
    area, piece, samples = np.zeros(40, np.uint8), np.zeros(8, np.uint8), np.zeros(1, np.uint64)
    for call in (
        lambda: net.floor_memcpy(area, area, length, slots, 1),
        lambda: net.floor_ask(-1, True, 0, area, length, slots, piece, samples),
        lambda: net.floor_answer(-1, True, 0, area, length, slots, piece, 1),
        lambda: net.floor_receive(-1, True, 0, area, length, slots, 1),
        lambda: net.floor_send(-1, True, 0, area, length, slots, 1, 1),
    ):
        with pytest.raises(ValueError, match="do not fit a buffer of 40 bytes"):
            call()


def test_native_floors_refuse_counts_below_one() -> None:
    area = np.zeros(8, np.uint8)
    for call in (
        lambda: net.floor_memcpy(area, area, 8, 1, 0),
        lambda: net.floor_ask(-1, True, 0, area, 8, 1, area, np.zeros(0, np.uint64)),
        lambda: net.floor_ask(-1, True, 0, area, 8, 1, area[:0], np.zeros(1, np.uint64)),
        lambda: net.floor_answer(-1, True, 0, area, 8, 1, area, -1),
        lambda: net.floor_receive(-1, True, 0, area, 8, 1, 0),
        lambda: net.floor_send(-1, True, 0, area, 8, 1, 0, 1),
        lambda: net.floor_send(-1, True, 0, area, 8, 1, 1, 0),
        lambda: net.floor_read(-1, True, 0, area[:0]),
        lambda: net.floor_write(-1, True, 0, b""),
    ):
        with pytest.raises(ValueError, match="at least 1"):
            call()


@pytest.mark.parametrize("spin", (True, False), ids=["spin", "block"])
def test_signals_are_served_while_a_floor_waits(spin: bool) -> None:
    """A harmless handler runs and the floor goes on; one that raises ends it."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        ours.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 0, 20_000))
        handled = threading.Event()

        def note(number: int, frame: object) -> None:
            handled.set()
            theirs.send(b"late")

        before = signal.signal(signal.SIGALRM, note)
        try:
            landed = bytearray(4)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            assert net.floor_read(ours.fileno(), spin, 10**10, landed) == 0
            assert (handled.is_set(), landed) == (True, b"late")
            signal.signal(signal.SIGALRM, signal.default_int_handler)
            signal.setitimer(signal.ITIMER_REAL, 0.02)
            with pytest.raises(KeyboardInterrupt):
                net.floor_read(ours.fileno(), spin, 10**10, landed)
        finally:
            signal.signal(signal.SIGALRM, before)


def test_a_closed_descriptor_is_an_errno() -> None:
    fd = os.open("/dev/null", os.O_RDONLY)
    os.close(fd)
    assert net.floor_read(fd, True, 10**9, bytearray(4)) == -errno.EBADF
    assert net.floor_write(fd, False, 10**9, b"four") == -errno.EBADF
