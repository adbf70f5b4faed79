"""The channel: records as they went in, one bell for several, no lost wake-up, a peer that scribbles over everything shared."""

from __future__ import annotations

import fcntl
import mmap
import os
import random
import select
import struct
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.local import channel as channel_module
from pp1q_transport.local.channel import CLIENT, DAEMON, IDLES, Channel, channel_bytes

pytestmark = pytest.mark.timeout(60)

CAPACITY = 1024
RING = 256 + CAPACITY
SECOND_NS = 1_000_000_000


class Rig:
    """Both ends of one channel, in one process."""

    def __init__(self, capacity: int = CAPACITY) -> None:
        self.memory = bytearray(channel_bytes(capacity))
        eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.client = Channel(self.memory, CLIENT, reads, os.dup(eventfd), capacity)
        self.daemon = Channel(self.memory, DAEMON, eventfd, writes, capacity)

    def close(self) -> None:
        self.client.close()
        self.daemon.close()


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.close()


def readable(fd: int) -> bool:
    return bool(select.select([fd], [], [], 0)[0])


def copied(got: tuple[int, memoryview] | None) -> tuple[int, bytes] | None:
    return None if got is None else (got[0], bytes(got[1]))


@pytest.mark.parametrize("way", ("to the daemon", "to the client"))
def test_records_come_out_as_they_went_in(rig: Rig, way: str) -> None:
    near, far = (rig.client, rig.daemon) if way == "to the daemon" else (rig.daemon, rig.client)
    assert far.receive() is None
    assert near.send(1, b"")
    assert near.send(0xFFFF, b"fixed", b"payload")
    assert near.send(7, b"fixed", memoryview(bytearray(b"view")))
    assert copied(far.receive()) == (1, b"")
    assert copied(far.receive()) == (0xFFFF, b"fixedpayload")
    assert copied(far.receive()) == (7, b"fixedview")
    assert far.receive() is None
    assert near.receive() is None, "the rings are not mixed up"
    assert (near.records_out, near.bytes_out, far.records_in, far.bytes_in) == (3, 8 + 20 + 17, 3, 8 + 20 + 17)
    assert (near.records_in, far.records_out) == (0, 0)


def test_the_layout_is_the_documented_one(rig: Rig) -> None:
    rig.client.send(0x0102, b"\x11\x12", b"\x13")
    rig.daemon.send(3, b"\x21")
    assert rig.memory[256:267].hex() == "0b000000" "0201" "0000" "111213"
    assert rig.memory[RING + 256 : RING + 265].hex() == "09000000" "0300" "0000" "21"
    assert struct.unpack_from("<Q", rig.memory, 0) == (11,)
    assert struct.unpack_from("<Q", rig.memory, RING) == (9,)


RECORDS = st.tuples(st.integers(1, 0xFFFF), st.integers(0, 300), st.integers(0, 700))


@settings(max_examples=60, deadline=None)
@given(st.lists(RECORDS, min_size=1, max_size=60), st.integers())
def test_records_of_every_size_across_the_wrap(records: list[tuple[int, int, int]], seed: int) -> None:
    rig, noise = Rig(), random.Random(seed)
    waiting: list[tuple[int, bytes]] = []
    for kind, fixed, payload in records:
        parts = noise.randbytes(fixed), noise.randbytes(payload)
        fits = sum(8 + len(body) for _, body in waiting) + 8 + fixed + payload <= CAPACITY
        if 8 + fixed + payload > CAPACITY:
            continue
        assert rig.client.send(kind, *parts) is fits
        if fits:
            waiting.append((kind, b"".join(parts)))
        while waiting and noise.random() < 0.4:
            assert copied(rig.daemon.receive()) == waiting.pop(0)
    for record in waiting:
        assert copied(rig.daemon.receive()) == record
    assert rig.daemon.receive() is None
    rig.close()


def test_a_full_channel_takes_nothing_and_says_so(rig: Rig) -> None:
    while rig.client.send(1, bytes(92)):
        pass
    assert rig.client.records_out == CAPACITY // 100
    before = bytes(rig.memory)
    assert not rig.client.send(1, bytes(92))
    assert bytes(rig.memory) == before
    rig.daemon.receive()
    assert rig.client.send(1, bytes(92))


@pytest.mark.parametrize(
    ("kind", "fixed", "payload"),
    ((1, bytes(CAPACITY - 7), b""), (1, bytes(17), bytes(CAPACITY)), (0, b"", b""), (0x10000, b"", b"")),
)
def test_what_can_never_pass_is_the_callers_error(rig: Rig, kind: int, fixed: bytes, payload: bytes) -> None:
    with pytest.raises(LocalMisuse):
        rig.client.send(kind, fixed, payload)
    assert not any(rig.memory)
    assert rig.client.send(1, bytes(CAPACITY - 8))


def test_a_full_context_fits_the_default_channel() -> None:
    rig = Rig(channel_module.RING_CAPACITY)
    tokens = random.Random(3).randbytes(131_072 * 4)
    for _turn in range(9):
        assert rig.client.send(1, bytes(32), tokens)
        got = rig.daemon.receive()
        assert got is not None
        assert got[1][32:] == tokens
    rig.close()


def test_a_view_is_read_only_and_good_until_the_next(rig: Rig) -> None:
    rig.client.send(1, b"first")
    rig.client.send(2, b"again")
    got = rig.daemon.receive()
    assert got is not None
    assert got[1].readonly
    rig.memory[256 + 8 : 256 + 13] = b"XXXXX"
    assert bytes(got[1]) == b"first", "what was judged is a private copy"
    rig.daemon.receive()
    assert bytes(got[1]) == b"again"
    big = Rig(1 << 14)
    big.client.send(1, bytes(10_000))
    got = big.daemon.receive()
    assert got is not None
    assert got[1].readonly
    big.close()


# -- bells


def test_several_records_cost_one_bell_and_only_a_sleeper_is_rung(rig: Rig) -> None:
    rig.client.send(1, b"x")
    rig.client.flush_bell()
    assert not readable(rig.daemon.fileno())
    rig.daemon.receive()
    assert rig.daemon.prepare_sleep()
    for _ in range(5):
        rig.client.send(1, b"x")
    assert not readable(rig.daemon.fileno()), "send rings nothing"
    rig.client.flush_bell()
    rig.client.flush_bell()
    assert rig.client.bells == 1
    assert readable(rig.daemon.fileno())
    rig.daemon.after_sleep()
    assert not readable(rig.daemon.fileno())
    assert not rig.daemon.prepare_sleep(), "there is something to receive"
    while rig.daemon.receive():
        pass
    assert rig.daemon.prepare_sleep()
    rig.daemon.after_sleep(False)
    rig.client.send(1, b"x")
    rig.client.flush_bell()
    assert rig.client.bells == 1, "who is awake is not rung"


def test_preparing_to_sleep_rings_what_is_owed(rig: Rig) -> None:
    assert rig.daemon.prepare_sleep()
    rig.client.send(1, b"x")
    assert rig.client.prepare_sleep()
    assert readable(rig.daemon.fileno())


def test_a_sender_without_room_is_woken_by_the_receiver(rig: Rig) -> None:
    while rig.daemon.send(1, bytes(92)):
        pass
    assert rig.daemon.prepare_sleep()
    rig.client.receive()
    rig.client.flush_bell()
    assert readable(rig.daemon.fileno())
    rig.daemon.after_sleep()
    assert not rig.daemon.prepare_sleep(), "there is room"
    assert rig.daemon.prepare_sleep(), "and that is said once"
    rig.daemon.after_sleep(False)
    assert rig.daemon.send(1, bytes(92))


def test_a_record_that_found_room_after_all_is_waited_for_no_more(rig: Rig) -> None:
    while rig.daemon.send(1, bytes(92)):
        pass
    rig.client.receive()
    assert rig.daemon.send(1, bytes(92))
    assert rig.daemon.prepare_sleep()
    assert struct.unpack_from("<I", rig.memory, RING + 192) == (0,)


def test_a_sleeper_with_something_to_receive_waits_for_no_room(rig: Rig) -> None:
    while rig.daemon.send(1, bytes(92)):
        pass
    rig.client.send(1, b"x")
    assert not rig.daemon.prepare_sleep()
    assert struct.unpack_from("<I", rig.memory, RING + 192) == (0,)


@pytest.mark.parametrize("idle", IDLES)
def test_wait_returns_for_a_record(rig: Rig, idle: str) -> None:
    def later() -> None:
        rig.client.send(1, b"x")
        rig.client.flush_bell()

    timer = threading.Timer(0.05, later)
    timer.start()
    while (got := rig.daemon.receive()) is None:
        rig.daemon.wait(idle, 30 * SECOND_NS)
    timer.join()
    assert got[0] == 1
    rig.daemon.wait(idle, 0)


def test_spinning_never_sleeps(rig: Rig) -> None:
    rig.daemon.wait("spin", 600 * SECOND_NS)


@pytest.mark.parametrize("idle", ("spin-then-block", "block"))
def test_wait_returns_for_another_descriptor_and_at_its_timeout(rig: Rig, idle: str) -> None:
    reads, writes = os.pipe()
    rig.daemon.wait(idle, 1_000_000, reads)
    os.write(writes, b"x")
    rig.daemon.wait(idle, 600 * SECOND_NS, reads)
    os.close(reads)
    with pytest.raises(LocalMisuse, match="can't wait"):
        rig.daemon.wait(idle, 1_000_000, reads)
    os.close(writes)
    with pytest.raises(LocalMisuse, match="idle must be one of spin"):
        rig.daemon.wait("sleep", 1)


def test_a_peer_that_is_gone_is_no_error_of_the_bell(rig: Rig) -> None:
    """Its socket says that it is gone; EPIPE from its doorbell must not be a second, different story."""
    rig.client.prepare_sleep()
    rig.client.close()
    rig.daemon.send(1, b"x")
    rig.daemon.flush_bell()


def test_a_bell_that_nobody_silences_does_not_block(rig: Rig) -> None:
    """A client may raise its flag for ever and never read its pipe: its daemon must neither block nor fail."""
    for _ in range(10_000):
        struct.pack_into("<I", rig.memory, RING + 128, 1)
        rig.daemon.send(1, b"")
        rig.daemon.flush_bell()
        rig.client.receive()
    assert rig.daemon.bells == 10_000


def test_a_peer_that_makes_the_shared_bell_blocking_blocks_nobody(rig: Rig) -> None:
    """The file behind an eventfd is shared with its flags; a plain read of it would sleep here for ever."""
    fcntl.fcntl(rig.daemon.fileno(), fcntl.F_SETFL, 0)
    assert os.get_blocking(rig.daemon.fileno())
    assert rig.daemon.prepare_sleep()
    rig.daemon.after_sleep()


@pytest.mark.parametrize("path", ("/proc/self/status", "/dev/null"))
def test_what_can_not_be_read_without_blocking_is_no_bell(path: str) -> None:
    """EOPNOTSUPP, which an eventfd too answers before Linux 5.8, is found out when the channel is made."""
    file = os.open(path, os.O_WRONLY if path == "/dev/null" else os.O_RDONLY)
    with pytest.raises(LocalMisuse, match="can't read the doorbell"):
        Channel(bytearray(channel_bytes(CAPACITY)), CLIENT, file, -1, CAPACITY)
    os.close(file)


# -- a hostile peer


def scribble(at: int, code: str, *values: int) -> Callable[[bytearray], None]:
    return lambda memory: struct.pack_into("<" + code, memory, at, *values)


# What was done, how, and the reason and the words it is refused with.
HOSTILE: tuple[tuple[str, tuple[Callable[[bytearray], None], ...], Reason, str], ...] = (
    ("head beyond the ring", (scribble(0, "Q", CAPACITY + 1),), Reason.LENGTH_BOUNDS, "index is impossible"),
    ("head of all ones", (scribble(0, "Q", (1 << 64) - 1),), Reason.LENGTH_BOUNDS, "index is impossible"),
    ("a header cut short", (scribble(0, "Q", 7),), Reason.LENGTH_BOUNDS, "cut short"),
    ("length 0", (scribble(256, "IHH", 0, 1, 0), scribble(0, "Q", 8)), Reason.LENGTH_BOUNDS, "claims 0"),
    ("length 7", (scribble(256, "IHH", 7, 1, 0), scribble(0, "Q", 8)), Reason.LENGTH_BOUNDS, "claims 7"),
    ("length beyond the ring", (scribble(256, "IHH", CAPACITY + 1, 1, 0), scribble(0, "Q", CAPACITY)),
     Reason.LENGTH_BOUNDS, "claims 1025"),
    ("length of all ones", (scribble(256, "IHH", 0xFFFFFFFF, 1, 0), scribble(0, "Q", CAPACITY)),
     Reason.LENGTH_BOUNDS, "claims 4294967295"),
    ("length with the sign bit", (scribble(256, "IHH", 0x80000008, 1, 0), scribble(0, "Q", CAPACITY)),
     Reason.LENGTH_BOUNDS, "claims 2147483656"),
    ("a body cut short", (scribble(256, "IHH", 100, 1, 0), scribble(0, "Q", 99)), Reason.LENGTH_BOUNDS, "not there as a whole"),
    ("no body at all", (scribble(256, "IHH", 100, 1, 0), scribble(0, "Q", 8)), Reason.LENGTH_BOUNDS, "not there as a whole"),
    ("a zero bit set", (scribble(256, "IHH", 8, 1, 1), scribble(0, "Q", 8)), Reason.RESERVED_BITS, "must be zero"),
    ("the last zero bit set", (scribble(256, "IHH", 8, 1, 0x8000), scribble(0, "Q", 8)), Reason.RESERVED_BITS, "must be zero"),
)


@pytest.mark.parametrize(("name", "acts", "reason", "words"), HOSTILE, ids=[name for name, *_ in HOSTILE])
def test_a_scribbled_ring_breaks_the_channel_for_good(
    rig: Rig, name: str, acts: tuple[Callable[[bytearray], None], ...], reason: Reason, words: str
) -> None:
    for act in acts:
        act(rig.memory)
    with pytest.raises(PeerFault, match=words) as raised:
        rig.daemon.receive()
    assert raised.value.reason is reason
    assert rig.daemon.broken is reason
    rig.memory[:] = bytes(len(rig.memory))
    for call in (rig.daemon.receive, rig.daemon.flush_bell, rig.daemon.prepare_sleep, lambda: rig.daemon.send(1, b"")):
        with pytest.raises(PeerFault) as raised:
            call()
        assert raised.value.reason is reason
    assert rig.daemon.records_in == 0


def test_a_scribbled_tail_is_the_senders_fault_to_hear(rig: Rig) -> None:
    while rig.daemon.send(1, bytes(92)):
        pass
    struct.pack_into("<Q", rig.memory, RING + 64, 1 << 50)
    with pytest.raises(PeerFault) as raised:
        rig.daemon.send(1, bytes(92))
    assert raised.value.reason is Reason.LENGTH_BOUNDS
    assert rig.daemon.broken is Reason.LENGTH_BOUNDS


def test_a_scribbled_head_keeps_nobody_asleep(rig: Rig) -> None:
    struct.pack_into("<Q", rig.memory, 0, 1 << 50)
    assert not rig.daemon.prepare_sleep()
    for idle in IDLES:
        rig.daemon.wait(idle, 600 * SECOND_NS)


@settings(max_examples=150, deadline=None)
@given(st.binary(min_size=RING, max_size=RING), st.integers(0, CAPACITY))
def test_noise_in_the_ring_is_received_or_refused(noise: bytes, head: int) -> None:
    rig = Rig()
    rig.memory[:RING] = noise
    struct.pack_into("<Q", rig.memory, 0, head)
    try:
        while rig.daemon.receive() is not None:
            pass
    except PeerFault:
        assert rig.daemon.broken in (Reason.LENGTH_BOUNDS, Reason.RESERVED_BITS)
    else:
        assert rig.daemon.bytes_in == head
    assert rig.daemon.bytes_in <= head
    rig.close()


def test_a_closed_channel_says_so() -> None:
    before = len(os.listdir("/proc/self/fd"))
    rig = Rig()
    rig.client.close()
    rig.client.close()
    assert rig.client.fileno() == -1
    for call in (rig.client.receive, rig.client.flush_bell, rig.client.prepare_sleep, lambda: rig.client.send(1, b"")):
        with pytest.raises(LocalMisuse, match="closed"):
            call()
    rig.client.after_sleep()
    rig.daemon.close()
    assert len(os.listdir("/proc/self/fd")) == before


# -- two processes

CHILD = """
import mmap, sys
from pp1q_transport.local.channel import CLIENT, Channel, channel_bytes
fd, bell, peer, capacity, count = map(int, sys.argv[2:])
channel = Channel(memoryview(mmap.mmap(fd, channel_bytes(capacity))), CLIENT, bell, peer, capacity)
for _ in range(count):
    while (got := channel.receive()) is None:
        channel.wait(sys.argv[1], 10**11)
    while not channel.send(got[0], bytes(got[1])):
        channel.wait(sys.argv[1], 10**11)
    if got[0] % 3 == 0:
        channel.flush_bell()
channel.flush_bell()
"""


@pytest.mark.parametrize("idle", IDLES)
@pytest.mark.timeout(100)
def test_two_processes_echo_with_full_rings(idle: str) -> None:
    """More is in flight than the rings hold, so that both ends sleep for records and for room."""
    count, noise = 4_000, random.Random(5)
    fd = os.memfd_create("channel", os.MFD_CLOEXEC)
    os.ftruncate(fd, channel_bytes(CAPACITY))
    eventfd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    reads, writes = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    arguments = [idle, *(str(value) for value in (fd, reads, eventfd, CAPACITY, count))]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=(fd, reads, eventfd))
    daemon = Channel(memoryview(mmap.mmap(fd, channel_bytes(CAPACITY))), DAEMON, eventfd, writes, CAPACITY)
    records = [(1 + index % 1000, noise.randbytes(noise.randint(0, 300))) for index in range(count)]
    sent = got = 0
    try:
        while got < count:
            moved = False
            while sent < count and daemon.send(*records[sent]):
                sent += 1
                moved = True
            while (record := daemon.receive()) is not None:
                assert copied(record) == records[got]
                got += 1
                moved = True
            if not moved:
                daemon.wait(idle, 30 * SECOND_NS)
        daemon.flush_bell()
        assert child.wait(30) == 0
    finally:
        child.kill()
        child.wait(30)
        daemon.close()
        os.close(reads)
        os.close(fd)
