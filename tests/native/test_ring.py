"""The shared-memory ring: against its oracle, under indexes that no honest peer stores, and between two real processes."""

from __future__ import annotations

import mmap
import os
import random
import select
import struct
import subprocess
import sys
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport._native import ring, ring_oracle
from pp1q_transport._native.ring import HEADER_BYTES, Ring

CAPACITY = 64
HEAD, TAIL, SLEEPING, WAITING = 0, 64, 128, 192
LAST = (1 << 64) - 1


def fresh(capacity: int = CAPACITY, start: int = 0) -> bytearray:
    memory = bytearray(HEADER_BYTES + capacity)
    struct.pack_into("<Q", memory, HEAD, start)
    struct.pack_into("<Q", memory, TAIL, start)
    return memory


def pair(capacity: int = CAPACITY, start: int = 0) -> tuple[bytearray, Ring, Ring]:
    memory = fresh(capacity, start)
    return memory, Ring(memory, 0, capacity, start), Ring(memory, 0, capacity, start)


OPS = st.one_of(
    st.tuples(st.sampled_from(("write", "write_all")), st.integers(0, 80)),
    st.tuples(st.just("write_two"), st.integers(0, 40), st.integers(0, 40)),
    st.tuples(st.just("read_into"), st.integers(0, 80)),
    st.tuples(st.just("wait_space"), st.integers(1, CAPACITY)),
    st.tuples(st.just("poll"), st.integers(1, 3)),
    st.tuples(st.sampled_from(("writable", "readable", "sleep", "awake", "end_wait_space", "wake_needed", "space_needed"))),
    st.tuples(st.just("scribble"), st.sampled_from((HEAD, TAIL)), st.integers(-70, 70)),
)
PRODUCERS = frozenset(("write", "write_all", "write_two", "writable", "wait_space", "end_wait_space", "wake_needed"))


class Both:
    """The same calls on the compiled ring and on the oracle, each with memory of its own."""

    def __init__(self, kind: type, start: int) -> None:
        self.memory = fresh(start=start)
        self.producer = kind(self.memory, 0, CAPACITY, start)
        self.consumer = kind(self.memory, 0, CAPACITY, start)
        self.target = bytearray(96)

    def do(self, name: str, args: tuple[int, ...], data: bytes) -> object:
        if name == "scribble":
            (index,) = struct.unpack_from("<Q", self.memory, args[0])
            struct.pack_into("<Q", self.memory, args[0], (index + args[1]) & LAST)
            return None
        end = self.producer if name in PRODUCERS else self.consumer
        call = getattr(end, name)
        if name in ("write", "write_all"):
            return call(data, 3, args[0])
        if name == "write_two":
            return call(data, 1, args[0], data, 50, args[1])
        if name == "read_into":
            return call(self.target, 7, args[0])
        return call(*args)

    def state(self) -> tuple[object, ...]:
        ends = (self.producer, self.consumer)
        return (bytes(self.memory), bytes(self.target), *((end.broken, end.index) for end in ends))


@settings(max_examples=400, deadline=None)
@given(st.lists(OPS, max_size=60), st.sampled_from((0, 5, (1 << 64) - 40)), st.integers(0, 1 << 32))
def test_the_ring_does_what_the_oracle_does(ops: list[tuple[object, ...]], start: int, seed: int) -> None:
    """Every answer, every byte of shared memory and of the target, also with indexes scribbled over and past 2^64."""
    noise = random.Random(seed)
    real, plain = Both(ring.Ring, start), Both(ring_oracle.Ring, start)
    for name, *args in ops:
        data = noise.randbytes(100)
        assert real.do(str(name), tuple(args), data) == plain.do(str(name), tuple(args), data), (name, args)  # type: ignore[arg-type]
        assert real.state() == plain.state(), (name, args)


@pytest.mark.parametrize("start", (0, (1 << 64) - 100), ids=("zero", "wraps"))
def test_bytes_come_out_as_they_went_in(start: int) -> None:
    _, producer, consumer = pair(start=start)
    noise = random.Random(1)
    sent, got, target = bytearray(), bytearray(), bytearray(CAPACITY)
    while len(sent) < 5000:
        chunk = noise.randbytes(noise.randint(1, CAPACITY))
        sent += chunk[: producer.write(chunk, 0, len(chunk))]
        taken = consumer.read_into(target, 0, noise.randint(1, CAPACITY))
        got += target[:taken]
    while (taken := consumer.read_into(target, 0, CAPACITY)) > 0:
        got += target[:taken]
    assert got == sent


def test_all_or_nothing_leaves_a_full_ring_as_it_was() -> None:
    memory, producer, consumer = pair()
    assert producer.write_all(b"a" * 60, 0, 60) == 60
    before = bytes(memory)
    assert producer.write_all(b"b" * 5, 0, 5) == 0
    assert producer.write_two(b"b" * 2, 0, 2, b"c" * 3, 0, 3) == 0
    assert bytes(memory) == before
    assert consumer.read_into(bytearray(1), 0, 1) == 1
    assert producer.write_two(b"b" * 2, 0, 2, b"c" * 3, 0, 3) == 5
    assert producer.writable() == 0
    target = bytearray(64)
    assert consumer.read_into(target, 0, 64) == 64
    assert target == b"a" * 59 + b"bbccc"


def test_what_exceeds_the_ring_never_fits() -> None:
    memory, producer, _ = pair()
    assert producer.write_all(bytes(65), 0, 65) == 0
    assert producer.write(bytes(65), 0, 65) == 64
    assert len(memory) == HEADER_BYTES + CAPACITY


HEADS = (CAPACITY + 1, 1 << 32, 1 << 63, LAST, LAST - CAPACITY)


@pytest.mark.parametrize("head", HEADS)
def test_an_impossible_head_breaks_the_consumer_for_good(head: int) -> None:
    memory, _, consumer = pair()
    struct.pack_into("<Q", memory, HEAD, head)
    target = bytearray(256)
    assert consumer.read_into(target, 0, 256) == -1
    assert consumer.readable() == -1
    assert consumer.broken
    assert not consumer.sleep(), "a consumer that can't read must not sleep"
    assert struct.unpack_from("<I", memory, SLEEPING) == (0,)
    struct.pack_into("<Q", memory, HEAD, 0)
    assert consumer.read_into(target, 0, 1) == -1
    assert not any(target)


@pytest.mark.parametrize("tail", (1, 1 << 63, LAST, LAST - CAPACITY))
def test_an_impossible_tail_breaks_the_producer_for_good(tail: int) -> None:
    memory, producer, _ = pair()
    struct.pack_into("<Q", memory, TAIL, tail)
    assert producer.writable() == -1
    assert producer.write(b"x", 0, 1) == -1
    assert producer.write_all(b"x", 0, 1) == -1
    assert producer.write_two(b"x", 0, 1, b"", 0, 0) == -1
    assert not producer.wait_space(1)
    assert struct.unpack_from("<I", memory, WAITING) == (0,)
    struct.pack_into("<Q", memory, TAIL, 0)
    assert producer.write(b"x", 0, 1) == -1
    assert not any(memory[HEADER_BYTES:])


def test_an_index_that_goes_back_is_impossible() -> None:
    memory, producer, consumer = pair()
    producer.write(bytes(40), 0, 40)
    assert consumer.readable() == 40
    struct.pack_into("<Q", memory, HEAD, 39)
    assert consumer.readable() == -1
    assert producer.writable() == 24
    assert Ring(memory, 0, CAPACITY).read_into(bytearray(40), 0, 30) == 30
    assert producer.writable() == 54
    struct.pack_into("<Q", memory, TAIL, 29)
    assert producer.writable() == -1


def test_an_own_index_is_never_read_back() -> None:
    """A peer that scribbles over our index does not move us; the next write mends what it reads."""
    memory, producer, consumer = pair()
    producer.write(b"abcd", 0, 4)
    struct.pack_into("<Q", memory, HEAD, 1 << 40)
    producer.write(b"efgh", 0, 4)
    target = bytearray(8)
    assert consumer.read_into(target, 0, 8) == 8
    assert target == b"abcdefgh"
    struct.pack_into("<Q", memory, TAIL, 7)
    producer.write(b"i", 0, 1)
    assert consumer.read_into(target, 0, 1) == 1
    assert struct.unpack_from("<Q", memory, TAIL) == (9,)


def test_sleep_and_wake() -> None:
    memory, producer, consumer = pair()
    assert not producer.wake_needed()
    assert consumer.sleep()
    producer.write(b"x", 0, 1)
    assert producer.wake_needed()
    assert not producer.wake_needed(), "one bell a sleep"
    assert not consumer.sleep(), "there is something to read"
    assert struct.unpack_from("<I", memory, SLEEPING) == (0,)
    consumer.read_into(bytearray(1), 0, 1)
    assert consumer.sleep()
    consumer.awake()
    assert not producer.wake_needed()


def test_wait_for_room() -> None:
    memory, producer, consumer = pair()
    assert not producer.wait_space(CAPACITY)
    producer.write(bytes(60), 0, 60)
    assert not consumer.space_needed()
    assert not producer.wait_space(4)
    assert producer.wait_space(5)
    consumer.read_into(bytearray(1), 0, 1)
    assert consumer.space_needed()
    assert not consumer.space_needed()
    assert not producer.wait_space(5)
    assert producer.wait_space(6)
    producer.end_wait_space()
    assert struct.unpack_from("<I", memory, WAITING) == (0,)


MISUSE: tuple[tuple[str, Callable[[bytearray], object]], ...] = (
    ("capacity 0", lambda m: Ring(m, 0, 0)),
    ("capacity negative", lambda m: Ring(m, 0, -64)),
    ("capacity no power of two", lambda m: Ring(m, 0, 48)),
    ("capacity huge", lambda m: Ring(m, 0, 1 << 62)),
    ("beyond the memory", lambda m: Ring(m, 8, CAPACITY)),
    ("negative offset", lambda m: Ring(m, -8, CAPACITY)),
    ("unaligned", lambda m: Ring(m, 1, 32)),
    ("source too short", lambda m: Ring(m, 0, CAPACITY).write(b"abc", 1, 3)),
    ("source offset negative", lambda m: Ring(m, 0, CAPACITY).write(b"abc", -1, 1)),
    ("length negative", lambda m: Ring(m, 0, CAPACITY).write_all(b"abc", 0, -1)),
    ("source None", lambda m: Ring(m, 0, CAPACITY).write(None, 0, 1)),  # type: ignore[arg-type]
    ("second piece too short", lambda m: Ring(m, 0, CAPACITY).write_two(b"abc", 0, 3, b"abc", 2, 2)),
    ("target too short", lambda m: Ring(m, 0, CAPACITY).read_into(bytearray(4), 2, 3)),
    ("no looks", lambda m: Ring(m, 0, CAPACITY).poll(0)),
    ("room that can't be", lambda m: Ring(m, 0, CAPACITY).wait_space(CAPACITY + 1)),
    ("no room wanted", lambda m: Ring(m, 0, CAPACITY).wait_space(0)),
)


@pytest.mark.parametrize("call", [call for _, call in MISUSE], ids=[name for name, _ in MISUSE])
def test_misuse_raises_and_touches_nothing(call: Callable[[bytearray], object]) -> None:
    memory = fresh()
    with pytest.raises(ValueError, match=r"."):
        call(memory)
    assert not any(memory)


def read_one(end: Ring) -> int:
    return end.read_into(bytearray(1), 0, 1)


def write_one(end: Ring) -> int:
    return end.write(b"x", 0, 1)


def test_one_object_plays_one_end() -> None:
    _, producer, consumer = pair()
    producer.write(b"x", 0, 1)
    consumer.readable()
    for call in (producer.readable, producer.sleep, producer.awake, producer.space_needed, lambda: read_one(producer)):
        with pytest.raises(ValueError, match="producer's end or the consumer's"):
            call()
    theirs = (consumer.writable, consumer.wait_space, consumer.end_wait_space, consumer.wake_needed)
    for call in (*theirs, lambda: write_one(consumer)):
        with pytest.raises(ValueError, match="producer's end or the consumer's"):
            call()


def test_memory_that_may_not_be_written_is_refused() -> None:
    with pytest.raises((ValueError, BufferError)):
        Ring(bytes(HEADER_BYTES + CAPACITY), 0, CAPACITY)
    with pytest.raises(TypeError):
        Ring(None, 0, CAPACITY)  # type: ignore[arg-type]


CHILD = """
import mmap, os, select, sys
from pp1q_transport._native.ring import HEADER_BYTES, Ring
fd, bell, mine, capacity, total = map(int, sys.argv[1:])
ring = Ring(memoryview(mmap.mmap(fd, HEADER_BYTES + capacity)), 0, capacity)
source = bytes(range(256)) * 16
sent = 0
while sent < total:
    at = sent % 256
    took = ring.write(source, at, min(1 + sent % 900, total - sent))
    assert took >= 0
    sent += took
    if took and ring.wake_needed():
        os.eventfd_write(bell, 1)
    if not took and ring.wait_space():
        assert select.select([mine], [], [], 60)[0], "no word of room"
        os.eventfd_read(mine)
        ring.end_wait_space()
"""


@pytest.mark.timeout(90)
def test_two_processes_sleep_and_wake_without_losing_either() -> None:
    """A small ring, so that both ends sleep thousands of times: a lost wake-up hangs, a lost byte shows."""
    capacity, total = 1024, 3_000_000
    fd = os.memfd_create("ring", 0)
    os.ftruncate(fd, HEADER_BYTES + capacity)
    mine, theirs = os.eventfd(0), os.eventfd(0)
    arguments = [str(value) for value in (fd, mine, theirs, capacity, total)]
    child = subprocess.Popen([sys.executable, "-c", CHILD, *arguments], pass_fds=(fd, mine, theirs))
    try:
        consumer = Ring(memoryview(mmap.mmap(fd, HEADER_BYTES + capacity)), 0, capacity)
        target, pattern, got, sleeps = bytearray(700), bytes(range(256)) * 4, 0, 0
        while got < total:
            taken = consumer.read_into(target, 0, 700)
            assert taken >= 0
            assert target[:taken] == pattern[got % 256 : got % 256 + taken]
            got += taken
            if taken and consumer.space_needed():
                os.eventfd_write(theirs, 1)
            if not taken and consumer.sleep():
                sleeps += 1
                assert select.select([mine], [], [], 60)[0], f"no word after {got} bytes"
                os.eventfd_read(mine)
                consumer.awake()
        assert child.wait(30) == 0
        assert consumer.readable() == 0
        assert sleeps > 0
    finally:
        child.kill()
        child.wait(30)
        for each in (fd, mine, theirs):
            os.close(each)
