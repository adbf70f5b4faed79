"""A byte ring in shared memory, one producer and one consumer (see ring.pyx and pp1q_ring.h for the layout)."""

from typing import Any, Final

import numpy.typing as npt
from typing_extensions import Buffer

Memory = Buffer | npt.NDArray[Any]  # numpy declares the buffer protocol only from Python 3.12 on

HEADER_BYTES: Final = 256
"""What lies before the data: `head`, `tail`, `consumer_sleeping` and `producer_waiting`, a cache line or more apart."""

class Ring:
    """One end of the ring at `memory[offset : offset + HEADER_BYTES + capacity]` (writable contiguous uint8).

    `capacity` is a power of two, in bytes. The first call decides whether this object is the producer's end or the
    consumer's. Keeps its own index privately and never reads it back; the other's is judged whenever it is loaded, and one
    that no honest peer could have stored makes this and every later call answer -1. `start` is the u64 index at which both
    ends begin (0 in fresh memory). Raises `ValueError` for a capacity or alignment that can't be, for a range
    outside its buffer, and for playing both ends. Not for two threads.
    """

    def __init__(self, memory: Memory, offset: int, capacity: int, start: int = 0) -> None: ...
    @property
    def capacity(self) -> int: ...
    @property
    def index(self) -> int:
        """Bytes ever written (producer) or read (consumer), modulo 2^64."""
    @property
    def broken(self) -> bool:
        """The other end stored an index that is impossible; for good."""
    # The producer's end.
    def write(self, source: Memory, offset: int, length: int) -> int:
        """Copies what fits of `source[offset : offset + length]`: bytes taken, 0 when full, -1 broken."""
    def write_all(self, source: Memory, offset: int, length: int) -> int:
        """All or nothing: `length`, 0 when it does not fit now, -1 broken."""
    def write_two(self, mem_a: Memory, off_a: int, len_a: int, mem_b: Memory, off_b: int, len_b: int) -> int:
        """Two pieces (a header and its payload), published together or not at all: `len_a + len_b`, 0 or -1."""
    def writable(self) -> int:
        """Bytes of room now; -1 broken."""
    def wait_space(self, wanted: int = 1) -> bool:
        """Announces a wait for `wanted` bytes of room; True when it is still missing: now it is safe to sleep.

        False (room, or broken) takes the announcement back. After a sleep call `end_wait_space`.
        """
    def end_wait_space(self) -> int:
        """Takes back what `wait_space` announced."""
    def wake_needed(self) -> bool:
        """After writing: True when the consumer had gone to sleep, so its doorbell must be rung. Says so once a sleep."""
    # The consumer's end.
    def read_into(self, target: Memory, offset: int, length: int) -> int:
        """Moves up to `length` bytes to `target[offset:]`: bytes moved, 0 when empty, -1 broken."""
    def readable(self) -> int:
        """Bytes to read now; -1 broken."""
    def poll(self, looks: int) -> int:
        """As `readable`, after up to `looks` looks (some 10 to 50 ns each) while there is nothing. Releases the GIL."""
    def sleep(self) -> bool:
        """Announces sleep; True when the ring is still empty: now it is safe to wait for the doorbell.

        False (something to read, or broken) takes the announcement back. After a sleep call `awake`.
        """
    def awake(self) -> int:
        """Takes back what `sleep` announced."""
    def space_needed(self) -> bool:
        """After reading: True when the producer waits for room, so its doorbell must be rung. Says so once a wait."""

def ring_bell(fd: int) -> int:
    """Rings a doorbell whose other end sleeps on it: 0 or -errno.

    `fd` is an eventfd or the writing end of a pipe, non-blocking. `-EAGAIN`: it rings already. `-EPIPE`: nobody is left.
    """

def drain_bell(fd: int) -> int:
    """Silences a doorbell: bytes taken, 0 at the end of a pipe, or -errno (`-EAGAIN` when it had not rung).

    Never blocks, whatever a peer that shares the descriptor did to its flags. `-EOPNOTSUPP`: a kernel before 5.8.
    """
