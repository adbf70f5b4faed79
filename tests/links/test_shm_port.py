"""The shm link's port: who may come in, what must come with the proof, and what is cut off before any memory exists."""

from __future__ import annotations

import fcntl
import mmap
import os
import socket
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest

from pp1q_transport import wire
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.control_codec import encode_message
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links import shm_memory, shm_port
from pp1q_transport.links.proving import HALF_OPEN
from pp1q_transport.links.shm_memory import DIALER, LISTENER, RING_BYTES, SEALS, ShmEnds, memory_bytes, ring_bytes_of
from pp1q_transport.links.shm_port import ShmDialer, ShmPort, shm_name
from pp1q_transport.session.negotiate import Agreement, Connector, Listener, Role, make_hello
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, proof_frame

pytestmark = pytest.mark.timeout(60)
SMALL: dict[str, Any] = {"vocab_size": 64, "depth": 2, "support": 8, "max_slots": 2, "batch_requests": 1, "link_kinds": ("shm",)}
NAME = "pp1q-" + "0123456789abcdef" * 2


def handshake(data: str) -> tuple[Agreement, Agreement]:
    """The two agreements of a finished handshake: the listening receiver's, the connecting leader's."""
    listener = Listener(make_hello(Role.RECEIVER, 11, **SMALL), data, encode_message, os.urandom)
    connector = Connector(make_hello(Role.LEADER, 12, **SMALL), encode_message, os.urandom)
    now_ns = monotonic_ns()
    answer, theirs = listener.receive(connector.start(now_ns), now_ns)
    assert isinstance(theirs, Agreement)
    return theirs, connector.receive(answer, now_ns)


class Port:
    """A port, its counters, and the agreements that wait for their link."""

    def __init__(self, **options: Any) -> None:
        self.agreements: dict[int, Agreement] = {}
        self.counters = Counters()
        self.port = ShmPort(self.agreements.get, self.counters, **options)

    def expect(self) -> tuple[Agreement, Agreement]:
        ours, theirs = handshake(self.port.endpoint)
        self.agreements[ours.session] = ours
        return ours, theirs

    def dial(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(b"\0" + shm_name(self.port.endpoint).encode())
        return sock


@pytest.fixture
def made() -> Iterator[Port]:
    port = Port()
    yield port
    port.port.close()


def eventually(condition: Callable[[], object], serve: Callable[[], object]) -> None:
    stop = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < stop
        serve()
        time.sleep(0.0002)


def meet(made: Port) -> tuple[ShmEnds, ShmEnds]:
    """Both ends of a link that formed."""
    _, theirs = made.expect()
    dialer = ShmDialer(theirs, monotonic_ns())
    ends: dict[str, ShmEnds] = {}

    def serve() -> None:
        for joined, _agreement in made.port.poll(monotonic_ns()):
            ends["listener"] = joined
        if "dialer" not in ends and (joined := dialer.poll(monotonic_ns())) is not None:
            ends["dialer"] = joined

    eventually(lambda: len(ends) == 2, serve)
    return ends["listener"], ends["dialer"]


def test_a_proof_each_way_and_one_memory(made: Port) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))
    ours, theirs = meet(made)
    assert (ours.writes, theirs.writes) == (LISTENER, DIALER)
    assert len(ours.memory) == len(theirs.memory) == memory_bytes(RING_BYTES)
    assert not any(ours.memory[:])
    ours.memory[1234] = 77
    assert theirs.memory[1234] == 77
    assert made.counters.get("links_cut_off") == 0
    ours.close()
    theirs.close()
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_the_memory_can_be_neither_cut_nor_grown(made: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    kept: list[int] = []
    judge = shm_memory.judge_memory
    monkeypatch.setattr(shm_port, "judge_memory", lambda fd: (judge(fd), kept.append(os.dup(fd))))
    for end in meet(made):
        end.close()
    (fd,) = kept
    for size in (0, memory_bytes(RING_BYTES) // 2, 2 * memory_bytes(RING_BYTES)):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size)
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)
    os.close(fd)


def test_nothing_is_left_in_the_file_system_and_the_name_goes_with_the_port() -> None:
    port = Port()
    name = shm_name(port.port.endpoint)
    assert "/" not in name
    with open("/proc/net/unix", encoding="ascii") as lines:
        assert any("@" + name in line for line in lines)
    other = Port()
    assert shm_name(other.port.endpoint) != name
    port.port.close()
    with pytest.raises(ConnectionRefusedError):
        port.dial()
    other.port.close()


# ---- who is let in ----------------------------------------------------------------------------------------------------


def test_another_user_is_cut_off_before_it_may_prove_anything() -> None:
    port = Port(users=frozenset({os.geteuid() + 1}))
    _, theirs = port.expect()
    with port.dial() as sock:
        sock.send(proof_frame(theirs))
        eventually(lambda: port.counters.of(Reason.AUTH_FAILED), lambda: port.port.poll(monotonic_ns()))
        assert port.port.half_open == 0
        with suppress(ConnectionResetError):  # it was hung up on with its proof unread
            assert sock.recv(1) == b"", "no proof for it"
    assert port.counters.get("links_cut_off") == 1
    port.port.close()


def test_a_listener_of_another_user_gets_no_proof(made: Port) -> None:
    _, theirs = made.expect()
    with pytest.raises(PeerFault) as caught:
        ShmDialer(theirs, monotonic_ns(), users=frozenset({os.geteuid() + 1}))
    assert caught.value.reason is Reason.AUTH_FAILED
    made.port.poll(monotonic_ns())
    eventually(lambda: made.counters.of(Reason.PEER_LOST), lambda: made.port.poll(monotonic_ns()))


STRANGERS = (
    (b"GET / HTTP/1.1\r\n\r\n", Reason.BAD_MAGIC),
    (wire.MAGIC + bytes(156), Reason.BAD_VERSION),
    (b"", Reason.TIMEOUT),
)


@pytest.mark.parametrize(("data", "reason"), STRANGERS, ids=[str(reason.value) for _, reason in STRANGERS])
def test_strangers_are_cut_off_and_cost_no_memory(
    made: Port, monkeypatch: pytest.MonkeyPatch, data: bytes, reason: Reason
) -> None:
    monkeypatch.setattr(shm_port, "create_memory", lambda *_: pytest.fail("memory for a stranger"))
    made.expect()
    with made.dial() as sock:
        sock.send(data)
        begin_ns = monotonic_ns()
        eventually(lambda: made.port.half_open or made.counters.reasons, lambda: made.port.poll(begin_ns))
        eventually(lambda: made.counters.of(reason), lambda: made.port.poll(begin_ns + 1_000_000_000))
    assert made.counters.reasons == {reason.value: 1}


def test_a_proof_under_another_secret_or_for_another_session_joins_nothing(made: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shm_port, "create_memory", lambda *_: pytest.fail("memory for a stranger"))
    ours, theirs = made.expect()
    wrong = (
        (replace(theirs, secret=bytes(32)), Reason.AUTH_FAILED),
        (handshake(made.port.endpoint)[1], Reason.SESSION_MISMATCH),
        (ours, Reason.BOOT_NONCE),  # the listener's own proof, reflected
    )
    for agreement, reason in wrong:
        with made.dial() as sock:
            sock.send(proof_frame(agreement))
            eventually(lambda: made.counters.of(reason), lambda: made.port.poll(monotonic_ns()))  # noqa: B023


def test_half_open_links_are_bounded_and_the_oldest_gives_way(made: Port) -> None:
    socks = []
    for _ in range(HALF_OPEN + 10):
        socks.append(made.dial())
        made.port.poll(0)
    assert made.port.half_open == HALF_OPEN
    assert made.counters.of(Reason.OVERLOAD) == 10
    for sock in socks:
        sock.close()


def test_a_link_that_gets_no_memory_is_cut_off_and_counted(made: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing_left(*_args: object) -> int:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(shm_port, "create_memory", nothing_left)
    _, theirs = made.expect()
    dialer = ShmDialer(theirs, monotonic_ns())
    with pytest.raises(PeerFault) as caught:
        eventually(lambda: False, lambda: (dialer.poll(monotonic_ns()), made.port.poll(monotonic_ns())))
    assert caught.value.reason is Reason.PEER_LOST
    assert made.counters.get("link_memory_failed") == 1
    assert made.counters.reasons == {"link_error": 1}


# ---- what a dialer takes ----------------------------------------------------------------------------------------------


def memfd(size: int, seals: int = SEALS, flags: int = 0) -> int:
    fd = os.memfd_create("test", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | flags)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def plain_file() -> int:
    with tempfile.TemporaryFile() as file:
        file.truncate(memory_bytes(RING_BYTES))
        return os.dup(file.fileno())


def read_only() -> int:
    fd = memfd(memory_bytes(RING_BYTES))
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY)
    os.close(fd)
    return again


def huge_pages() -> int:
    """Two rings that fill a huge page exactly don't exist; the device is judged before the size."""
    return memfd(1 << 21, flags=getattr(os, "MFD_HUGETLB", 4))


GOOD = memory_bytes(RING_BYTES)
BAD_MEMORIES: dict[str, tuple[Callable[[], int], Reason]] = {
    "not sealed at all": (lambda: memfd(GOOD, 0), Reason.LINK_ERROR),
    "may shrink": (lambda: memfd(GOOD, SEALS & ~fcntl.F_SEAL_SHRINK), Reason.LINK_ERROR),
    "may grow": (lambda: memfd(GOOD, SEALS & ~fcntl.F_SEAL_GROW), Reason.LINK_ERROR),
    "may be unsealed by more seals": (lambda: memfd(GOOD, SEALS & ~fcntl.F_SEAL_SEAL), Reason.LINK_ERROR),
    "never written by us": (lambda: memfd(GOOD, SEALS | fcntl.F_SEAL_WRITE), Reason.LINK_ERROR),
    "a file": (plain_file, Reason.LINK_ERROR),
    "a pipe": (lambda: os.pipe()[0], Reason.LINK_ERROR),
    "read only": (read_only, Reason.LINK_ERROR),
    "huge pages": (huge_pages, Reason.LINK_ERROR),
    "nothing in it": (lambda: memfd(0), Reason.LENGTH_BOUNDS),
    "a byte short": (lambda: memfd(GOOD - 1), Reason.LENGTH_BOUNDS),
    "a byte long": (lambda: memfd(GOOD + 1), Reason.LENGTH_BOUNDS),
    "no power of two": (lambda: memfd(memory_bytes(3 << 18)), Reason.LENGTH_BOUNDS),
    "rings too small": (lambda: memfd(memory_bytes(1 << 11)), Reason.LENGTH_BOUNDS),
    "rings too large": (lambda: memfd(memory_bytes(1 << 27)), Reason.LENGTH_BOUNDS),
}


def offered(fds: list[int], mapped: list[int], monkeypatch: pytest.MonkeyPatch) -> Reason | None:
    """What a dialer says to a listener that proves itself and passes these descriptors; None when it takes them."""
    real = shm_port.map_memory

    def noted(fd: int) -> mmap.mmap:
        mapped.append(fd)
        return real(fd)

    monkeypatch.setattr(shm_port, "map_memory", noted)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(b"\0" + NAME.encode())
        server.listen(1)
        ours, theirs = handshake("shm://" + NAME)
        dialer = ShmDialer(theirs, monotonic_ns())
        accepted, _ = server.accept()
        with accepted:
            socket.send_fds(accepted, [proof_frame(ours)], fds) if fds else accepted.send(proof_frame(ours))
            got: list[ShmEnds] = []

            def poll() -> None:
                joined = dialer.poll(monotonic_ns())
                if joined is not None:
                    got.append(joined)

            try:
                eventually(lambda: got, poll)
            except PeerFault as fault:
                return fault.reason
            assert len(accepted.recv(1000)) == PROOF_FRAME_BYTES
        got[0].close()
    return None


@pytest.mark.parametrize("name", BAD_MEMORIES)
def test_a_memory_that_is_not_what_it_must_be_is_refused_and_closed(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, reason = BAD_MEMORIES[name]
    fd, mapped = make(), list[int]()
    before = len(os.listdir("/proc/self/fd"))
    assert offered([fd], mapped, monkeypatch) is reason
    assert len(os.listdir("/proc/self/fd")) == before
    if name not in ("read only", "never written by us"):  # the kernel itself refuses to map these
        assert not mapped, "mapped before it was judged"
    os.close(fd)


def test_other_ring_sizes_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    fd = memfd(memory_bytes(1 << 14))
    assert offered([fd], [], monkeypatch) is None
    assert ring_bytes_of(memory_bytes(1 << 14)) == 1 << 14
    os.close(fd)


@pytest.mark.parametrize("count", (0, 2, 3, 10))
def test_one_descriptor_comes_with_the_proof_and_no_other_number(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    fds, mapped = [memfd(GOOD) for _ in range(count)], list[int]()
    before = len(os.listdir("/proc/self/fd"))
    assert offered(fds, mapped, monkeypatch) is Reason.MALFORMED
    assert len(os.listdir("/proc/self/fd")) == before, "every one of them is closed"
    assert not mapped
    for fd in fds:
        os.close(fd)


def test_descriptors_before_a_false_proof_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(b"\0" + NAME.encode())
        server.listen(1)
        ours, theirs = handshake("shm://" + NAME)
        dialer = ShmDialer(theirs, monotonic_ns())
        accepted, _ = server.accept()
        fd = memfd(GOOD)
        before = len(os.listdir("/proc/self/fd"))
        with accepted:
            socket.send_fds(accepted, [proof_frame(replace(ours, secret=bytes(32)))], [fd])
            with pytest.raises(PeerFault) as caught:
                eventually(lambda: False, lambda: dialer.poll(monotonic_ns()))
        assert caught.value.reason is Reason.AUTH_FAILED
        assert len(os.listdir("/proc/self/fd")) == before - 2  # the two ends of the connection
        os.close(fd)


def test_a_dialer_waits_a_second_and_no_longer() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(b"\0" + NAME.encode())
        server.listen(1)
        _, theirs = handshake("shm://" + NAME)
        begin_ns = monotonic_ns()
        dialer = ShmDialer(theirs, begin_ns)
        assert dialer.poll(begin_ns + 999_999_999) is None
        with pytest.raises(PeerFault) as caught:
            dialer.poll(begin_ns + 1_000_000_000)
    assert caught.value.reason is Reason.TIMEOUT


BAD_ENDPOINTS = (
    "shm://", "shm:///tmp/socket", "shm://" + NAME[:-1], "shm://" + NAME + "0", "shm://other" + NAME, "shm://" + NAME.upper(),
    "tcp://127.0.0.1:80", NAME, "shm://" + NAME[:-1] + "\x00", "shm://" + NAME + "\n",
)  # fmt: skip


@pytest.mark.parametrize("endpoint", BAD_ENDPOINTS)
def test_an_endpoint_that_is_none_of_ours_is_malformed(endpoint: str) -> None:
    with pytest.raises(PeerFault) as caught:
        shm_name(endpoint)
    assert caught.value.reason is Reason.MALFORMED


def test_a_name_that_nobody_holds_is_a_link_error() -> None:
    """Another network namespace, or a listener that is gone."""
    _, theirs = handshake("shm://" + NAME)
    with pytest.raises(PeerFault) as caught:
        ShmDialer(theirs, monotonic_ns())
    assert caught.value.reason is Reason.LINK_ERROR
    assert NAME in caught.value.detail
    assert "one network namespace" in caught.value.detail
