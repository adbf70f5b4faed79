"""The memory of one shm link: a sealed memfd with a byte ring each way, made by the listener, judged by the dialer.

Between the shm link, which reads and writes the rings, and the operating system. Nothing has a name, so a kill -9 leaves nothing
behind; the seals keep the peer from cutting off pages that we have mapped. Looks at no byte of the rings. SPEC section 4.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .._native.ring import HEADER_BYTES
from ..errors import PeerFault, Reason

if TYPE_CHECKING:
    import socket

RING_BYTES: Final = 1 << 21  # each way; docs/measurements.md
LEAST_RING_BYTES: Final = 1 << 12
MOST_RING_BYTES: Final = 1 << 26
SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
LISTENER: Final = 0  # which ring an end writes; it reads the other
DIALER: Final = 1


@dataclass(frozen=True, slots=True)
class ShmEnds:
    """What an shm link is built from: the proven socket, the mapped rings, and which of the two this end writes."""

    sock: socket.socket
    memory: mmap.mmap
    writes: int

    def close(self) -> None:
        """Gives it up before a link has it."""
        self.sock.close()
        self.memory.close()


def memory_bytes(ring_bytes: int) -> int:
    """Size of a link's memory: two rings of `ring_bytes` each."""
    return 2 * (HEADER_BYTES + ring_bytes)


def ring_bytes_of(size: int) -> int:
    """The capacity of each ring in a memory of `size` bytes; raises `PeerFault(length_bounds)` for a size that no link has."""
    ring_bytes = size // 2 - HEADER_BYTES
    if (
        not LEAST_RING_BYTES <= ring_bytes <= MOST_RING_BYTES
        or ring_bytes & (ring_bytes - 1)
        or memory_bytes(ring_bytes) != size
    ):
        raise PeerFault(Reason.LENGTH_BOUNDS, f"{size} bytes of link memory are not two rings of a power of two")
    return ring_bytes


def create_memory(ring_bytes: int = RING_BYTES) -> int:
    """A new sealed memfd, all zero (so both rings are empty) and allocated. Raises `OSError`, leaving nothing open."""
    fd = os.memfd_create("pp1q-link", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.posix_fallocate(fd, 0, memory_bytes(ring_bytes))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def map_memory(fd: int) -> mmap.mmap:
    """The whole of `fd`, shared and faulted in. Raises `OSError`."""
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    return mmap.mmap(fd, os.fstat(fd).st_size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def judge_memory(fd: int) -> None:
    """Whether a descriptor from the peer is safe to map. Raises `PeerFault`: `link_error` for anything but ordinary memory with
    every seal, `length_bounds` for another size. Seals first: only they make the size a fact."""
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise PeerFault(Reason.LINK_ERROR, f"the peer's link memory is no memfd: {error.strerror}") from None
    if seals & SEALS != SEALS:
        raise PeerFault(Reason.LINK_ERROR, f"the peer's link memory has seals {seals:#x}, not {SEALS:#x}: it could be cut short")
    status = os.fstat(fd)
    if status.st_dev != _memory_device():
        # Huge pages can run out after the mapping, and touching one then ends the process.
        raise PeerFault(Reason.LINK_ERROR, "the peer's link memory is not made of ordinary pages")
    ring_bytes_of(status.st_size)


def _memory_device() -> int:
    """The device number that every ordinary memfd of this kernel has."""
    fd = os.memfd_create("pp1q-probe", os.MFD_CLOEXEC)
    try:
        return os.fstat(fd).st_dev
    finally:
        os.close(fd)
