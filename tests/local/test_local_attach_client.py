"""The client's side of the handshake: no daemon, a daemon that refuses, stops or dies, and one that passes what it should not."""

from __future__ import annotations

import fcntl
import mmap
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from local_child import geometry
from local_rig import Child, descriptors

from pp1q_transport.counters import Counters
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.local.attach import AttachServer, Role, attach
from pp1q_transport.local.channel import channel_bytes
from pp1q_transport.local.handshake import pack_refusal, pack_welcome
from pp1q_transport.staging import Region

pytestmark = pytest.mark.timeout(60)

SIZE = geometry().slots().total_bytes
CAPACITY = 4096
SEALED = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


@pytest.fixture
def path(tmp_path: Path) -> str:
    return str(tmp_path / "d.sock")


@pytest.fixture
def daemon(path: str) -> Iterator[Child]:
    child = Child("serve", path)
    assert child.line() == "ok listening"
    yield child
    child.end()


def test_one_line_says_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(str(tmp_path / "dead"))
    dead.close()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.bind(str(tmp_path / "stream"))
    stream.listen()
    full = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    full.bind(str(tmp_path / "full"))
    full.listen(0)
    waiting = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    waiting.connect(str(tmp_path / "full"))
    before = descriptors()
    for name, words in (
        ("none", "no daemon listens at .*none: start `pp1q daemon`"),
        ("dead", "any more: start `pp1q daemon` again"),
        ("file", "any more: start|is no socket"),
        ("stream", "another program's socket"),
        ("full", "takes nobody in for 0.05 s"),
        ("x" * 120, "choose a shorter one"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            attach(str(tmp_path / name), Role.ADMIN, timeout_s=0.05)
        assert "\n" not in str(raised.value)
        del raised
    assert descriptors() == before
    for sock in (stream, full, waiting):
        sock.close()
    with pytest.raises(LocalMisuse, match="rank"):
        attach(str(tmp_path / "none"), Role.ADMIN, rank=-1)
    with pytest.raises(ValueError, match="9"):
        attach(str(tmp_path / "none"), 9)  # type: ignore[arg-type]


def test_a_daemon_that_is_stopped_is_a_timeout(daemon: Child, path: str) -> None:
    os.kill(daemon.process.pid, signal.SIGSTOP)
    before = descriptors()
    with pytest.raises(PeerFault) as raised:
        attach(path, Role.RECEIVER_TARGET, timeout_s=0.1)
    assert raised.value.reason is Reason.TIMEOUT
    del raised
    assert descriptors() == before


def test_a_daemon_that_is_killed_is_seen_and_wakes_a_sleeper(daemon: Child, path: str) -> None:
    before = descriptors()
    attachment = attach(path, Role.RECEIVER_TARGET, 1)
    assert attachment.pid == daemon.process.pid
    assert attachment.geometry == geometry()
    assert not attachment.gone()
    assert attachment.regions[0].array.flags.writeable is False
    threading.Timer(0.1, daemon.process.kill).start()
    attachment.channel.wait("block", 600_000_000_000)
    give_up = time.monotonic() + 20
    while not attachment.gone():
        assert time.monotonic() < give_up
    attachment.channel.send(1, b"into the void")
    attachment.channel.flush_bell()
    attachment.channel.wait("block", 600_000_000_000)  # the bell's end never sleeps again
    attachment.close()
    attachment.close()
    assert attachment.gone()
    del attachment
    assert descriptors() == before


def test_a_refusal_is_told_in_the_daemons_words(path: str) -> None:
    server = AttachServer(path, frozenset((os.getuid(),)), Counters())
    raised: list[PeerFault] = []

    def client() -> None:
        try:
            attach(path, Role.RECEIVER_TARGET, 3)
        except PeerFault as fault:
            raised.append(fault)

    thread = threading.Thread(target=client)
    thread.start()
    while not (arrived := server.poll(time.monotonic_ns())):
        time.sleep(0.001)
    assert arrived[0].rank == 3
    server.refuse(arrived[0], Reason.IDENTITY_MISMATCH, "rank 3 is not mine")
    thread.join(20)
    assert raised[0].reason is Reason.IDENTITY_MISMATCH
    assert raised[0].detail == f"the daemon at {path} refuses: rank 3 is not mine"
    server.close()


def test_a_refusal_before_the_attach_was_read_is_heard(path: str) -> None:
    """The kernel reports the unread ATTACH as a reset, before the answer that lies in the queue."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()

    def daemon_side() -> None:
        sock, _ = listener.accept()
        sock.recv(1, socket.MSG_PEEK)
        sock.send(pack_refusal(Reason.AUTH_FAILED, "not you"))
        sock.close()

    thread = threading.Thread(target=daemon_side)
    thread.start()
    with pytest.raises(PeerFault) as raised:
        attach(path, Role.ADMIN)
    assert raised.value.reason is Reason.AUTH_FAILED
    thread.join(20)
    listener.close()


# -- a daemon that passes what it should not


def memfd(size: int, seals: int = SEALED) -> int:
    fd = os.memfd_create("given", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, size)
    fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    return fd


def channel_memfd() -> int:
    return memfd(channel_bytes(CAPACITY))


def bell() -> int:
    return os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)


def directory() -> int:
    return os.open("/", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)


WELCOME = pack_welcome(geometry(ring_capacity=CAPACITY), (SIZE,))
GIVEN: tuple[tuple[str, bytes, Sequence[Callable[[], int]], Reason | None], ...] = (
    ("in order", WELCOME, (channel_memfd, bell, bell, lambda: memfd(SIZE)), None),
    ("no descriptors", WELCOME, (), Reason.LENGTH_BOUNDS),
    ("one too few", WELCOME, (channel_memfd, bell, bell), Reason.LENGTH_BOUNDS),
    ("one too many", WELCOME, (channel_memfd, bell, bell, lambda: memfd(SIZE), bell), Reason.LENGTH_BOUNDS),
    ("far too many", WELCOME, (bell,) * 40, Reason.LENGTH_BOUNDS),
    ("with a refusal", pack_refusal(Reason.OVERLOAD, ""), (bell,), Reason.LENGTH_BOUNDS),
    ("nonsense", b"nonsense", (bell, bell), Reason.LENGTH_BOUNDS),
    ("too long", WELCOME + bytes(600), (bell,), Reason.LENGTH_BOUNDS),
    ("channel that can shrink", WELCOME, (lambda: memfd(channel_bytes(CAPACITY), 0), bell, bell, lambda: memfd(SIZE)),
     Reason.LIMITS_MISMATCH),
    ("channel too small", WELCOME, (lambda: memfd(4096), bell, bell, lambda: memfd(SIZE)), Reason.LIMITS_MISMATCH),
    ("channel that is none", WELCOME, (bell, bell, bell, lambda: memfd(SIZE)), Reason.LIMITS_MISMATCH),
    ("channel read-only", WELCOME,
     (lambda: memfd(channel_bytes(CAPACITY), SEALED | 0x10), bell, bell, lambda: memfd(SIZE)), Reason.LIMITS_MISMATCH),
    ("bell that is none", WELCOME, (channel_memfd, directory, bell, lambda: memfd(SIZE)), Reason.MALFORMED),
    ("region that can shrink", WELCOME,
     (channel_memfd, bell, bell, lambda: memfd(SIZE, fcntl.F_SEAL_GROW)), Reason.LIMITS_MISMATCH),
    ("region of another size", WELCOME, (channel_memfd, bell, bell, lambda: memfd(2 * SIZE)), Reason.LIMITS_MISMATCH),
    ("region that is none", WELCOME, (channel_memfd, bell, bell, bell), Reason.LIMITS_MISMATCH),
)


@pytest.mark.parametrize(("name", "answer", "makers", "reason"), GIVEN, ids=[name for name, *_ in GIVEN])
def test_what_a_daemon_passes_is_looked_at_first_and_never_kept(
    path: str, name: str, answer: bytes, makers: Sequence[Callable[[], int]], reason: Reason | None
) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    listener.bind(path)
    listener.listen()
    before = descriptors()

    def daemon_side() -> None:
        sock, _ = listener.accept()
        sock.recv(100)
        fds = [make() for make in makers]
        socket.send_fds(sock, [answer], fds)
        for fd in fds:
            os.close(fd)
        with suppress(OSError):
            sock.recv(1)
        sock.close()

    thread = threading.Thread(target=daemon_side)
    thread.start()
    if reason is None:
        attachment = attach(path, Role.RECEIVER_TARGET)
        assert not any(os.get_inheritable(fd) for fd in descriptors() - before)
        attachment.close()
        del attachment
    else:
        with pytest.raises(PeerFault) as raised:
            attach(path, Role.RECEIVER_TARGET)
        assert raised.value.reason is reason
        del raised
    thread.join(20)
    assert descriptors() == before
    listener.close()


# -- regions on their own


def test_an_attached_region_is_read_only_or_not_as_asked() -> None:
    region = Region(8192)
    region.seal_size()
    region.memory[:3] = b"abc"
    reader, writer = (Region.attach(os.dup(region.fd), 8192, writable) for writable in (False, True))
    assert reader.memory.readonly
    assert reader.array.flags.writeable is False
    assert bytes(reader.memory[:3]) == b"abc"
    writer.array[0] = 65
    assert bytes(reader.memory[:3]) == bytes(region.memory[:3]) == b"Abc"
    reader.close()
    region.close()


def test_a_region_sealed_for_readers_can_still_be_mapped_by_them_only() -> None:
    region = Region(8192)
    region.seal_for_readers()
    region.seal_for_readers()
    with pytest.raises(PeerFault) as raised:
        Region.attach(os.dup(region.fd), 8192, True)
    assert raised.value.reason is Reason.LIMITS_MISMATCH
    reader = Region.attach(os.dup(region.fd), 8192, False)
    region.memory[5] = 9
    assert reader.memory[5] == 9
    with pytest.raises(LocalMisuse, match="can't seal"):
        region.seal_size()
    with pytest.raises(PermissionError):
        mmap.mmap(region.fd, 8192)
    region.close()
    with pytest.raises(LocalMisuse, match="can't seal"):
        region.seal_for_readers()
