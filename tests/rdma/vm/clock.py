"""The machine's clock: the time stamp counter, which an emulated machine reads for a hundredth of what its other clocks cost.

Between `machine.py` and the processor. Linux inside would measure the counter's frequency at boot, and wrong by a factor when
this host is busy then; so it is measured here, where nothing but the counter and the host's own clock is read, and told.
"""

from __future__ import annotations

import ctypes
import mmap
import time
from collections.abc import Callable

READ_TSC = bytes.fromhex("0f31 48c1e220 4809d0 c3")  # rdtsc; shl rdx, 32; or rax, rdx; ret
OVER_S = 0.2
TRIES = 50
HZ = 250  # of Debian's kernels


def measure_tsc_kHz() -> int | None:
    """The counter's frequency; None where it can't be read like this, or runs at no steady pace."""
    try:
        code = mmap.mmap(-1, mmap.PAGESIZE, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
    except OSError:  # no memory is ever writable and executable here
        return None
    code.write(READ_TSC)
    place = ctypes.c_char.from_buffer(code)
    read = ctypes.CFUNCTYPE(ctypes.c_uint64)(ctypes.addressof(place))
    marks = [_mark(read)]
    for _ in range(2):
        time.sleep(OVER_S)
        marks.append(_mark(read))
    first, second, both = _kHz(*marks[:2]), _kHz(*marks[1:]), _kHz(marks[0], marks[2])
    return round(both) if abs(first - second) < both / 1000 else None


def _mark(read: Callable[[], int]) -> tuple[int, int]:
    """The counter and the nanosecond it was read at: of many readings the one that nothing came between."""
    found = []
    for _ in range(TRIES):
        before_ns = time.monotonic_ns()
        ticks = read()
        after_ns = time.monotonic_ns()
        found.append((after_ns - before_ns, ticks, (before_ns + after_ns) // 2))
    _, ticks, at_ns = min(found)
    return ticks, at_ns


def _kHz(one: tuple[int, int], other: tuple[int, int]) -> float:
    return (other[0] - one[0]) * 1e6 / (other[1] - one[1])


def clock_options(tsc_kHz: int | None) -> str:
    """Kernel options. Inside, the frequency is measured once more, and taken if it is within a hundredth of this."""
    if tsc_kHz is None:
        return "clocksource=hpet"
    return f"clocksource=tsc tsc=reliable tsc_early_khz={tsc_kHz} lpj={tsc_kHz * 1000 // HZ}"
