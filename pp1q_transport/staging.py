"""Host memory for slots: one memfd-backed region, prefaulted, with the slot geometry laid over it.

Between the sessions, which think in offsets, and the client, which wants numpy views. Registers nothing with a device and shares
nothing by itself (the descriptor is there for a daemon to pass on). A kill -9 leaves nothing behind: a memfd has no name.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import time
from typing import TYPE_CHECKING, Final

import numpy as np

from .errors import ConfigError, LocalMisuse, PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy.typing as npt

    from .session.slots import SlotGeometry

_SEAL_SIZE: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
_SEAL_FUTURE_WRITE: Final = 0x10  # F_SEAL_FUTURE_WRITE (Linux 5.1), which `fcntl` does not name


class Region:
    """`size` bytes of zeroed, prefaulted memory; `array` is the writable uint8 view, `prefault_ms` what faulting it cost."""

    def __init__(self, size: int, name: str = "pp1q-slots") -> None:
        if size < 1:
            raise ConfigError(f"a region of {size} bytes is impossible")
        available = available_bytes()
        if size > available:
            # Faulting it in would not fail but call the kernel's out-of-memory killer.
            raise ConfigError(
                f"slot memory of {size / 1e6:.0f} MB is wanted, {available / 1e6:.0f} MB are available: lower slots or depth"
            )
        self.size = size
        self.at_close: list[Callable[[], None]] = []
        """Called by `close`, once: what was done to this memory elsewhere (registered with a device) is undone."""
        started = time.monotonic_ns()
        self.fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.posix_fallocate(self.fd, 0, size)
            flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            self.map = mmap.mmap(self.fd, size, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)
        except OSError as error:
            os.close(self.fd)
            raise ConfigError(f"can't get {size} bytes of slot memory: {error.strerror}; lower slots or depth") from error
        self.array: npt.NDArray[np.uint8] = np.frombuffer(self.map, dtype=np.uint8)
        self.memory = memoryview(self.map)
        self.prefault_ms = (time.monotonic_ns() - started) / 1e6

    @classmethod
    def attach(cls, fd: int, size: int, writable: bool) -> Region:
        """Maps a region that another process made and passed on; takes `fd` over, also when it raises.

        Believes nothing: raises `PeerFault` (`limits_mismatch`) unless `fd` is a memfd of exactly `size` bytes whose size is
        sealed, since touching a page that was cut off afterwards would kill this process. Not `writable`: the map and its
        views are read-only.
        """
        region = cls.__new__(cls)
        region.at_close = []
        started = time.monotonic_ns()
        try:
            seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
            actual = os.fstat(fd).st_size
            if actual != size or size < 1 or seals & _SEAL_SIZE != _SEAL_SIZE:
                raise PeerFault(
                    Reason.LIMITS_MISMATCH, f"a region of {actual} bytes with seals {seals:#x}, not of {size} with a sealed size"
                )
            prot = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
            region.map = mmap.mmap(fd, size, flags=mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0), prot=prot)
        except OSError as error:
            raise PeerFault(Reason.LIMITS_MISMATCH, f"a region of {size} bytes can't be mapped: {error.strerror}") from error
        finally:
            os.close(fd)
        region.size = size
        region.fd = -1
        region.array = np.frombuffer(region.map, dtype=np.uint8)
        region.memory = memoryview(region.map)
        region.prefault_ms = (time.monotonic_ns() - started) / 1e6
        return region

    def seal_for_readers(self) -> None:
        """From now on whoever gets the descriptor can read only, and nobody can change the size. This map stays writable."""
        _seal(self.fd, _SEAL_SIZE | _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SEAL)

    def seal_size(self) -> None:
        """From now on nobody can change the size; whoever gets the descriptor can write."""
        _seal(self.fd, _SEAL_SIZE | fcntl.F_SEAL_SEAL)

    def close(self) -> None:
        """Closes the descriptor; the mapping lives until the last view of it is gone."""
        while self.at_close:
            self.at_close.pop()()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def _seal(fd: int, seals: int) -> None:
    """Adds seals to a memfd; once more is no error. Raises `LocalMisuse` for a descriptor that can't have them."""
    try:
        if fcntl.fcntl(fd, fcntl.F_GET_SEALS) != seals:
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, seals)
    except (OSError, ValueError) as error:
        raise LocalMisuse(f"can't seal descriptor {fd}: {error}") from error


def available_bytes() -> int:
    """MemAvailable of this host, in bytes."""
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            name, value = line.split(":", 1)
            if name == "MemAvailable":
                return int(value.split()[0]) * 1024
    raise ConfigError("/proc/meminfo does not say how much memory is available")


class SlotViews:
    """numpy views of a slot region by (slot, row), without a copy. `writable` is for the staging side only."""

    def __init__(
        self, region: Region, geometry: SlotGeometry, vocab_size: int, writable: bool = False, first_id: int = 0
    ) -> None:
        """`vocab_size` tokens are in a dense row, from global ID `first_id` on: a shard's where the vocabulary is split."""
        self.geometry = geometry
        self.vocab_size = vocab_size
        self.first_id = first_id
        # Not by numpy's own flag, which a caller could set back.
        self._array = region.array if writable else np.frombuffer(region.memory.toreadonly(), np.uint8)

    def dense(self, slot: int, row: int) -> npt.NDArray[np.float32]:
        """float32 [V]: the dense q of a row."""
        at = self.geometry.row_offset(slot, row)
        return self._array[at : at + 4 * self.vocab_size].view(np.float32)

    def sparse(self, slot: int, row: int, entries: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float32]]:
        """(ids int32 [n], q float32 [n]) of a sparse row; on the wire and in memory q comes first."""
        at = self.geometry.row_offset(slot, row)
        q = self._array[at : at + 4 * entries].view(np.float32)
        ids = self._array[at + 4 * entries : at + 8 * entries].view(np.int32)
        return ids, q

    def tokens(self, slot: int, depth: int) -> npt.NDArray[np.int32]:
        """int32 [depth]: the proposed tokens."""
        at = self.geometry.meta_offset(slot)
        return self._array[at : at + 4 * depth].view(np.int32)

    def entries(self, slot: int, depth: int) -> npt.NDArray[np.uint32]:
        """uint32 [depth]: the entry count of each row."""
        at = self.geometry.meta_offset(slot) + 4 * depth
        return self._array[at : at + 4 * depth].view(np.uint32)
