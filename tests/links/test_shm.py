"""What only the shm link must bear: a peer that scribbles, feigns, floods the doorbell, or dies with a row half written."""

from __future__ import annotations

import gc
import mmap
import os
import select
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from test_conformance import End, Sink, encoded, ending, noise, until

import pp1q_transport
from pp1q_transport import wire
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport._native.ring import HEADER_BYTES, Ring
from pp1q_transport.errors import Reason
from pp1q_transport.links.shm import ShmLink
from pp1q_transport.links.shm_memory import DIALER, LISTENER, ShmEnds, create_memory, map_memory
from pp1q_transport.session.outbox import Outbox

pytestmark = pytest.mark.timeout(30)

RING = 1 << 16
HEAD, TAIL = 0, 64
MEBIBYTE = 1 << 20
FOREVER_NS = 500_000_000_000  # a wait that nothing ends outlasts the test, and fails it


@dataclass
class Hostile:
    """An honest link (`end`), and what its peer has in hand: the socket, and all of the memory."""

    end: End
    sock: socket.socket
    memory: mmap.mmap

    def index(self, ring: int, which: int, value: int) -> None:
        """Stores an index: of ring `LISTENER` (the honest end reads it) or `DIALER` (it writes it)."""
        struct.pack_into("<Q", self.memory, ring * (HEADER_BYTES + RING) + which, value % (1 << 64))

    def writer(self, start: int = 0) -> Ring:
        return Ring(self.memory, 0, RING, start)

    def reader(self) -> Ring:
        return Ring(self.memory, HEADER_BYTES + RING, RING)

    def scribble(self, value: int) -> None:
        """Over every byte of both rings, headers left alone."""
        for ring in (LISTENER, DIALER):
            at = ring * (HEADER_BYTES + RING) + HEADER_BYTES
            self.memory[at : at + RING] = bytes([value]) * RING


@pytest.fixture
def hostile() -> Iterator[Hostile]:
    ours, theirs = socket.socketpair()
    fd = create_memory(RING)
    sink, outbox = Sink(), Outbox()
    link = ShmLink(ShmEnds(ours, map_memory(fd), DIALER), sink, outbox)
    made = Hostile(End(link, sink, outbox), theirs, map_memory(fd))
    os.close(fd)
    yield made
    link.close()
    theirs.close()


# ---- landing memory is the peer's as well -----------------------------------------------------------------------------


def test_what_the_peer_writes_after_the_copy_changes_nothing(hostile: Hostile) -> None:
    """At every step of a row: what is in the slot by then stays what it is."""
    payload = noise(1, 200_000)
    raw = encoded(1, payload)[1]
    writer, sent = hostile.writer(), 0
    while not hostile.end.sink.frames:
        sent += writer.write(raw, sent, min(10_000, len(raw) - sent))
        assert hostile.end.link.pump(0) >= 0
        hostile.scribble(0xEE)
    assert hostile.end.sink.frames == [(1, payload)]
    hostile.scribble(0x55)
    assert bytes(hostile.end.sink.memory[: len(payload)]) == payload


def test_what_the_peer_writes_before_the_copy_is_what_lands(hostile: Hostile) -> None:
    """No byte is looked at twice: a change between writing and copying is simply the content, for the digest to judge."""
    raw = encoded(1, noise(1, 50_000))[1]
    assert hostile.writer().write(raw, 0, len(raw)) == len(raw)
    at = HEADER_BYTES + 128 + 40_000
    hostile.memory[at] ^= 1
    until(lambda: len(hostile.end.sink.frames) == 1, hostile.end)
    landed = hostile.end.sink.frames[0][1]
    assert [index for index in range(50_000) if landed[index] != raw[128 + index]] == [40_000]


IMPOSSIBLE_HEADS = (RING + 1, 1 << 32, -1, 1 << 63)
IMPOSSIBLE_TAILS = (1001, -1, 1 << 63)


@pytest.mark.parametrize("head", IMPOSSIBLE_HEADS)
def test_an_impossible_head_ends_the_link(hostile: Hostile, head: int) -> None:
    hostile.index(LISTENER, HEAD, head)
    hostile.end.link.wait(FOREVER_NS, -1)  # must not sleep on it either
    assert hostile.end.link.pump(0) == -Reason.LINK_ERROR.code
    hostile.index(LISTENER, HEAD, 0)
    assert hostile.end.link.pump(0) == -Reason.LINK_ERROR.code, "and stays so"
    assert hostile.end.sink.accepted == 0


def test_a_head_that_goes_back_ends_the_link(hostile: Hostile) -> None:
    raw = encoded(1, noise(1, 1000))[1]
    hostile.writer().write(raw, 0, len(raw))
    until(lambda: len(hostile.end.sink.frames) == 1, hostile.end)
    hostile.index(LISTENER, HEAD, len(raw) - 1)
    assert ending(hostile.end) is Reason.LINK_ERROR


@pytest.mark.parametrize("tail", IMPOSSIBLE_TAILS)
def test_an_impossible_tail_ends_the_link(hostile: Hostile, tail: int) -> None:
    hostile.end.raw(bytes(1000))
    until(hostile.end.outbox.empty, hostile.end)
    hostile.index(DIALER, TAIL, tail)
    hostile.end.raw(bytes(RING))
    assert ending(hostile.end) is Reason.LINK_ERROR


def test_our_own_indexes_are_not_read_back(hostile: Hostile) -> None:
    """The peer may write over what we store; nothing of ours follows from it."""
    first, second = encoded(1, noise(1, 1000))[1], encoded(2, noise(2, 1000))[1]
    writer = hostile.writer()
    writer.write(first, 0, len(first))
    until(lambda: len(hostile.end.sink.frames) == 1, hostile.end)
    hostile.index(LISTENER, TAIL, 0)
    hostile.index(DIALER, HEAD, 77)
    writer = hostile.writer(start=len(first))
    writer.write(second, 0, len(second))
    until(lambda: len(hostile.end.sink.frames) == 2, hostile.end)
    assert hostile.end.sink.frames[1] == (2, noise(2, 1000))


# ---- the socket -------------------------------------------------------------------------------------------------------


def test_a_flooded_doorbell_disturbs_nobody(hostile: Hostile) -> None:
    """Whatever comes through the socket is no data, and does not keep the link from sleeping for ever."""
    hostile.sock.setblocking(False)
    for _ in range(3):
        with suppress(BlockingIOError):
            while True:
                hostile.sock.send(b"\xff" * 4096)
        for _ in range(10):
            assert hostile.end.link.pump(0) == 0
    raw = encoded(1, noise(1, 5000))[1]
    hostile.writer().write(raw, 0, len(raw))
    until(lambda: len(hostile.end.sink.frames) == 1, hostile.end)
    assert hostile.end.sink.accepted == 1


def test_a_peer_that_never_empties_its_doorbell_does_not_block_us(hostile: Hostile) -> None:
    hostile.end.link.sock.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            hostile.end.link.sock.send(bytes(4096))
    reader, landed = hostile.reader(), bytearray(4096)
    for number in range(200):
        assert reader.sleep()  # so that each write wants to ring
        hostile.end.frame(number, bytes(100))
        assert hostile.end.link.pump(0) == 228
        assert reader.read_into(landed, 0, 4096) == 228
    assert hostile.end.link.pump(0) == 0


def test_a_peer_that_feigns_its_death_is_not_read_for_ever(hostile: Hostile) -> None:
    """It closes its socket and writes on: what is there when that is seen is taken, and no more."""
    raw = encoded(1, noise(1, 3000))[1]
    link, writer = hostile.end.link, hostile.writer()

    def end() -> None:
        writer.write(raw, 0, 2000)  # without the doorbell: the sleeper wakes for the end of the socket
        hostile.sock.close()

    ender = threading.Timer(0.05, end)
    ender.start()
    link.wait(FOREVER_NS, -1)
    ender.join()
    writer.write(raw, 2000, len(raw) - 2000)
    assert ending(hostile.end) is Reason.PEER_LOST
    assert link.bytes_in == 2000
    assert hostile.end.sink.accepted == 1
    assert hostile.end.sink.frames == []


def test_a_farewell_is_heard_before_the_loss(hostile: Hostile) -> None:
    assert hostile.end.link.say_last(encoded(9, b"")[1]) is True
    hostile.end.link.close()
    landed = bytearray(4096)
    assert hostile.reader().read_into(landed, 0, 4096) == 128
    assert hostile.sock.recv(64) == b"", "nobody slept, so nobody was woken; then the end"


def test_a_farewell_wakes_a_sleeper(hostile: Hostile) -> None:
    assert hostile.reader().sleep()
    assert hostile.end.link.say_last(encoded(9, b"")[1]) is True
    assert len(hostile.sock.recv(64)) == 1


def test_a_farewell_that_has_no_room_is_not_sent_in_part(hostile: Hostile) -> None:
    hostile.end.raw(bytes(RING - 100))
    until(hostile.end.outbox.empty, hostile.end)
    assert hostile.end.link.say_last(encoded(9, b"")[1]) is False
    hostile.end.link.close()
    assert hostile.end.link.say_last(encoded(9, b"")[1]) is False
    assert hostile.reader().readable() == RING - 100


def test_a_wait_ends_when_the_other_descriptor_can_go_on(hostile: Hostile) -> None:
    near, far = socket.socketpair()
    with near, far:
        far.send(b"x")
        hostile.end.link.wait(FOREVER_NS, near.fileno())
    assert hostile.end.link.pump(0) == 0


def test_a_bell_that_woke_us_does_not_wake_us_again(hostile: Hostile) -> None:
    hostile.sock.send(b"x")
    hostile.end.link.wait(FOREVER_NS, -1)
    began_ns = monotonic_ns()
    hostile.end.link.wait(20_000_000, -1)
    assert monotonic_ns() - began_ns >= 20_000_000


# ---- sleeping and waking ----------------------------------------------------------------------------------------------


def joined(ring_bytes: int) -> tuple[End, End]:
    near, far = socket.socketpair()
    fd = create_memory(ring_bytes)
    ends = []
    for sock, writes in ((near, LISTENER), (far, DIALER)):
        sink, outbox = Sink(), Outbox()
        ends.append(End(ShmLink(ShmEnds(sock, map_memory(fd), writes), sink, outbox), sink, outbox))
    os.close(fd)
    return ends[0], ends[1]


@pytest.mark.parametrize("ring_bytes", (1 << 12, 1 << 16))
def test_two_sleepers_that_flood_each_other_wake_each_other(ring_bytes: int) -> None:
    """Full rings both ways, and no end ever looks without having slept: one lost wake-up and this never ends."""
    ends = joined(ring_bytes)
    frames = 150
    faults: list[int] = []

    def run(end: End) -> None:
        for number in range(frames):
            end.frame(number, noise(number, 100 + number * 97 % 9000))
        while len(end.sink.frames) < frames or not end.outbox.empty():
            moved = end.link.pump(monotonic_ns())
            if moved < 0:
                faults.append(moved)
                return
            if moved == 0:
                end.link.wait(FOREVER_NS, -1)

    threads = [threading.Thread(target=run, args=(end,), daemon=True) for end in ends]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "an end sleeps for ever"
    assert not faults
    for end in ends:
        assert end.sink.frames == [(n, noise(n, 100 + n * 97 % 9000)) for n in range(frames)]
        end.link.close()


def test_a_reader_that_makes_room_wakes_the_writer_that_waits_for_it() -> None:
    """One way only: no data that comes back could wake the writer instead."""
    left, right = joined(1 << 12)
    payload = noise(1, MEBIBYTE // 4)
    left.frame(1, payload)

    def write() -> None:
        while not left.outbox.empty():
            if left.link.pump(monotonic_ns()) == 0:
                left.link.wait(FOREVER_NS, -1)

    writer = threading.Thread(target=write, daemon=True)
    writer.start()
    while not right.sink.frames:
        if right.link.pump(monotonic_ns()) == 0:
            right.link.wait(FOREVER_NS, -1)
    writer.join(10)
    assert right.sink.frames == [(1, payload)]
    left.link.close()
    right.link.close()


@dataclass
class Owner:
    """Sleeps as a daemon does: in a poll of its own over what the link says."""

    end: End

    def sleep(self, timeout_ms: int | None = None) -> bool:
        """False when the link would not have it. Wakes by `timeout_ms` at the latest (None: never)."""
        link = self.end.link
        slept = link.rest() >= 0
        ready: set[int] = set()
        if slept:
            poller = select.poll()
            for descriptor, events in link.watch():
                poller.register(descriptor, events)
            ready = {descriptor for descriptor, _ in poller.poll(timeout_ms)}
        link.rise(link.fd in ready)
        return slept


def test_owners_that_sleep_by_themselves_are_woken_for_bytes_and_for_room() -> None:
    """Flooding both ways first, then one way, so that either reason to wake is the only one at some time."""
    ends = joined(1 << 12)
    ends[0].frame(77, noise(77, MEBIBYTE // 4))
    for end in ends:
        for number in range(50):
            end.frame(number, noise(number, 100 + number * 97 % 9000))

    def run(end: End, frames: int) -> None:
        while len(end.sink.frames) < frames or not end.outbox.empty():
            if end.link.pump(monotonic_ns()) == 0:
                Owner(end).sleep()

    threads = [
        threading.Thread(target=run, args=(end, frames), daemon=True) for end, frames in zip(ends, (50, 51), strict=True)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive(), "an end sleeps for ever"
    assert [number for number, _payload in ends[1].sink.frames] == [77, *range(50)]
    for end in ends:
        end.link.close()


def test_an_owner_may_not_sleep_over_bytes_room_or_a_death(hostile: Hostile) -> None:
    owner, link = Owner(hostile.end), hostile.end.link
    assert owner.sleep(0) is True
    raw = encoded(1, noise(1, 1000))[1]
    hostile.writer().write(raw, 0, len(raw))
    assert owner.sleep() is False, "there are bytes"
    until(lambda: len(hostile.end.sink.frames) == 1, hostile.end)
    hostile.end.raw(bytes(RING))
    assert owner.sleep() is False, "there is room for what waits to be sent"
    until(hostile.end.outbox.empty, hostile.end)
    hostile.end.raw(bytes(10))
    assert link.pump(0) == 0
    assert owner.sleep(0) is True, "the ring is full"
    hostile.sock.close()
    owner.sleep()
    assert owner.sleep() is False, "the peer is gone"
    assert ending(hostile.end) is Reason.PEER_LOST
    assert owner.sleep() is False
    link.close()
    assert owner.sleep() is False


def test_an_owner_that_is_up_is_not_rung(hostile: Hostile) -> None:
    """Its sleep over, both announcements are taken back; and a bell that woke it is not heard twice."""
    hostile.end.raw(bytes(RING))
    until(hostile.end.outbox.empty, hostile.end)
    hostile.end.raw(bytes(10))
    hostile.sock.send(b"x")
    owner, writer, reader = Owner(hostile.end), hostile.writer(), hostile.reader()
    owner.sleep()
    assert hostile.end.link.rest() >= 0
    assert select.select([hostile.end.link.fd], [], [], 0)[0] == []
    hostile.end.link.rise(False)
    assert writer.write(b"x", 0, 1) == 1
    assert not writer.wake_needed()
    assert reader.read_into(bytearray(10), 0, 10) == 10
    assert not reader.space_needed()


# ---- death ------------------------------------------------------------------------------------------------------------

CHILD = """
import os, socket, sys, time
from pp1q_transport.links.shm import ShmLink
from pp1q_transport.links.shm_memory import DIALER, ShmEnds, map_memory
from pp1q_transport.session.assembler import FrameSink
from pp1q_transport.session.outbox import Outbox
sock, fd, count, then = int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
outbox = Outbox()
link = ShmLink(ShmEnds(socket.socket(fileno=sock), map_memory(fd), DIALER), FrameSink(), outbox)
data = sys.stdin.buffer.read(count)
if data:
    outbox.raw(data, 0, len(data))
while not outbox.empty():
    assert link.pump(0) >= 0
print("written", flush=True)
if then == "wait":
    link.wait(10**12, -1)
elif then == "spin":
    while True: link.pump_until(1000)
time.sleep(1000)
"""


@contextmanager
def child_with(written: bytes, then: str) -> Iterator[tuple[End, subprocess.Popen[bytes]]]:
    """An end here, and a process at the other one that has written so much and now waits, spins or sleeps."""
    ours, theirs = socket.socketpair()
    fd = create_memory(RING)
    sink, outbox = Sink(), Outbox()
    end = End(ShmLink(ShmEnds(ours, map_memory(fd), LISTENER), sink, outbox), sink, outbox)
    here = str(Path(pp1q_transport.__file__).parents[1])
    process = subprocess.Popen(
        [sys.executable, "-P", "-c", CHILD, str(theirs.fileno()), str(fd), str(len(written)), then],
        pass_fds=(theirs.fileno(), fd), stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))},
    )  # fmt: skip
    theirs.close()
    os.close(fd)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdin.write(written)
        process.stdin.flush()
        assert process.stdout.readline() == b"written\n"
        yield end, process
    finally:
        process.kill()
        process.communicate(timeout=20)
        end.link.close()


# Nothing, part of a header, a header, part of a row, a whole row; what the other end did at its death makes no difference.
DEATHS = [(cut, "wait") for cut in (0, 60, 128, 20_000, 40_128)]
DEATHS += [(cut, then) for cut in (0, 20_000) for then in ("spin", "sleep")]


@pytest.mark.parametrize(("cut", "then"), DEATHS)
def test_kill_9_is_seen_while_we_sleep_and_what_was_written_before_is_taken(cut: int, then: str) -> None:
    raw = encoded(1, noise(1, 40_000))[1]
    with child_with(raw[:cut], then) as (end, process):
        if cut == 0:
            killer = threading.Timer(0.05, process.kill)
            killer.start()
            assert end.link.pump(monotonic_ns()) == 0
            end.link.wait(FOREVER_NS, -1)  # asleep when it happens
            killer.join()
        process.kill()
        process.wait(20)
        assert ending(end) is Reason.PEER_LOST
        assert end.link.bytes_in == cut
        assert end.sink.accepted == (cut >= 128)
        assert end.sink.frames == ([(1, noise(1, 40_000))] if cut == len(raw) else [])


def test_kill_9_of_a_reader_wakes_a_sender_that_waits_for_room() -> None:
    with child_with(b"", "sleep") as (end, process):
        end.frame(1, noise(1, MEBIBYTE))
        while end.link.pump(monotonic_ns()) > 0:
            pass
        killer = threading.Timer(0.05, process.kill)
        killer.start()
        while (moved := end.link.pump(monotonic_ns())) == 0:
            end.link.wait(FOREVER_NS, -1)
        assert Reason.from_code(-moved) is Reason.PEER_LOST
        assert not end.outbox.empty()
        killer.join()


# ---- nothing is left --------------------------------------------------------------------------------------------------


def mappings() -> int:
    with open("/proc/self/maps", encoding="ascii") as lines:
        return sum("memfd:pp1q-link" in line for line in lines)


def test_a_hundred_lives_leave_no_descriptor_and_no_mapping() -> None:
    gc.collect()
    descriptors, mapped = len(os.listdir("/proc/self/fd")), mappings()
    for number in range(100):
        left, right = joined(1 << 14)
        left.frame(number, noise(number, 3000))
        until(lambda: len(right.sink.frames) == 1, left, right)  # noqa: B023
        assert mappings() == mapped + 2
        left.link.close()
        if number % 2:
            assert ending(right) is Reason.PEER_LOST
        right.link.close()
        assert mappings() == mapped, "closing unmaps at once, whoever still holds the link"
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_a_frame_of_a_closed_link_goes_nowhere() -> None:
    left, right = joined(1 << 14)
    left.link.close()
    left.frame(1, kind=wire.CLOSE)
    assert left.link.pump(0) == -Reason.LINK_ERROR.code
    left.link.wait(FOREVER_NS, -1)
    assert ending(right) is Reason.PEER_LOST
    right.link.close()
