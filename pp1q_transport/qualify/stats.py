"""The figures of the link benchmark: between what a run measured and the report that commands print.

Exact order statistics, CPU and memory of this process, pinning, and the report with its fixed JSON keys. Opens no
socket, runs no session and estimates nothing: a percentile is one of the samples. SPEC section 9.
"""

from __future__ import annotations

import json
import math
import os
import resource
import textwrap
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, TypedDict, cast

import numpy as np
import numpy.typing as npt

from ..errors import ConfigError, LocalMisuse, PeerFault, Reason

Nanoseconds = npt.NDArray[np.uint64]
GB: Final = 1_000_000_000


class SummaryUs(TypedDict):
    """Microseconds at exact ranks of `n` samples; `typical` is the median, as in perftest."""

    min: float
    typical: float
    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    n: int


def nearest_rank(n: int, per_mille: int) -> int:
    """Index into `n` ascending samples of the smallest one that at least `per_mille`/1000 of them do not exceed.

    Raises `LocalMisuse` for no samples or a `per_mille` outside 0..1000.
    """
    if n < 1 or not 0 <= per_mille <= 1000:
        raise LocalMisuse(f"no rank at {per_mille}/1000 of {n} samples")
    return max(0, (n * per_mille + 999) // 1000 - 1)


class Samples:
    """Durations in nanoseconds, uint64, in memory allocated and touched before the first of them is taken.

    The first `warmup` samples are dropped; after them `capacity` fit, one more raises `LocalMisuse`.
    """

    __slots__ = ("_kept", "_ns", "_to_drop")

    def __init__(self, capacity: int, warmup: int = 0) -> None:
        if capacity < 1 or warmup < 0:
            raise LocalMisuse(f"samples need a capacity >= 1 and a warm-up >= 0, not {capacity} and {warmup}")
        self._ns: Nanoseconds = np.empty(capacity, np.uint64)
        self._ns.fill(0)  # np.zeros would leave the page faults to the measurement
        self._kept = 0
        self._to_drop = warmup

    def add(self, duration_ns: int) -> None:
        """Takes one sample. Raises `LocalMisuse` when it is negative or there is no room."""
        if self._to_drop:
            self._to_drop -= 1
            return
        if self._kept == len(self._ns) or duration_ns < 0:
            raise LocalMisuse(f"sample {self._kept} of {duration_ns} ns: room for {len(self._ns)}, none negative")
        self._ns[self._kept] = duration_ns
        self._kept += 1

    def extend(self, durations_ns: Nanoseconds) -> None:
        """Takes samples [n] in order, warm-up ones included. Raises `LocalMisuse`, with none taken, without room."""
        dropped = min(self._to_drop, len(durations_ns))
        fresh = durations_ns[dropped:]
        if self._kept + len(fresh) > len(self._ns):
            raise LocalMisuse(f"{len(fresh)} samples after {self._kept}: room for {len(self._ns)}")
        self._to_drop -= dropped
        self._ns[self._kept : self._kept + len(fresh)] = fresh
        self._kept += len(fresh)

    def __len__(self) -> int:
        return self._kept

    def values_ns(self) -> Nanoseconds:
        """The kept samples in the order they were taken: uint64 [n], a view."""
        return self._ns[: self._kept]

    def summary_us(self) -> SummaryUs:
        """Order statistics in microseconds by nearest rank. Raises `LocalMisuse` when there is no sample."""
        ascending = np.sort(self.values_ns())
        n = len(ascending)

        def at(per_mille: int) -> float:
            return int(ascending[nearest_rank(n, per_mille)]) / 1000

        p50 = at(500)
        return {
            "min": at(0), "typical": p50, "p50": p50, "p90": at(900), "p99": at(990), "p999": at(999), "max": at(1000),
            "n": n,
        }  # fmt: skip

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes one kept sample a line, in microseconds with all three decimals. Raises `OSError`."""
        with Path(path).open("w", encoding="ascii") as out:
            out.writelines(f"{ns // 1000}.{ns % 1000:03d}\n" for ns in self.values_ns().tolist())


@dataclass(frozen=True, slots=True)
class CpuTimes:
    """CPU seconds (user and system) of this process with all its threads, and of the children it has waited for."""

    own_s: float
    children_s: float

    @classmethod
    def now(cls) -> CpuTimes:
        """The times up to this moment."""
        own = resource.getrusage(resource.RUSAGE_SELF)
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        return cls(own.ru_utime + own.ru_stime, children.ru_utime + children.ru_stime)

    @property
    def total_s(self) -> float:
        """Own and children's seconds together."""
        return self.own_s + self.children_s


def cpu_s_per_GB(start: CpuTimes, end: CpuTimes, payload_bytes: int) -> float:
    """CPU seconds spent between two moments for each 10^9 bytes of payload. Raises `LocalMisuse` for no bytes."""
    if payload_bytes <= 0:
        raise LocalMisuse("CPU seconds per GB need at least one byte moved")
    return (end.total_s - start.total_s) * GB / payload_bytes


@dataclass(frozen=True, slots=True)
class Rss:
    """Resident memory of this process in MiB: now, and the peak since the process began."""

    now_MiB: float
    peak_MiB: float


def rss_MiB() -> Rss:
    """Resident memory by /proc/self/status (VmRSS, VmHWM). Raises `OSError` where there is no such file."""
    kib: dict[str, int] = {}
    with Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            name, _, value = line.partition(":")
            if name in ("VmRSS", "VmHWM"):
                kib[name] = int(value.split()[0])
    return Rss(kib["VmRSS"] / 1024, kib["VmHWM"] / 1024)


class BaselineRss:
    """What the interpreter and its imports hold when this is created: before slots, after the floors' own buffers."""

    __slots__ = ("baseline_MiB",)

    def __init__(self) -> None:
        self.baseline_MiB = rss_MiB().now_MiB

    def grown_MiB(self) -> float:
        """How much more this process holds now than at the baseline (MiB; negative when memory went back)."""
        return rss_MiB().now_MiB - self.baseline_MiB


def pin(cpu: int) -> frozenset[int]:
    """Binds the calling thread, and every thread and process it starts from now on, to one CPU.

    Returns the CPUs it could use before, for `os.sched_setaffinity`. Raises `ConfigError` when this host (or the cpuset
    this process lives in) does not offer the CPU; that a parent was pinned elsewhere is no obstacle.
    """
    before = frozenset(os.sched_getaffinity(0))
    try:
        os.sched_setaffinity(0, {cpu})
    except (OSError, ValueError, OverflowError) as failure:
        known = f"this host has CPUs 0 to {(os.cpu_count() or 1) - 1}, this thread may use {sorted(before)}"
        raise ConfigError(f"cannot pin to CPU {cpu} ({failure}): {known}") from failure
    return before


class GoodputMeter:
    """Payload bytes and rows of proposals that became ready, over the time between `start` and `stop`."""

    __slots__ = ("_begin", "_end", "payload_bytes", "rows")

    def __init__(self) -> None:
        self.payload_bytes = 0
        self.rows = 0
        self._begin: tuple[int, CpuTimes] | None = None
        self._end: tuple[int, CpuTimes] | None = None

    def start(self, now_ns: int | None = None) -> None:
        """Starts the clock (monotonic ns, now by default) and forgets what was added before."""
        self.payload_bytes = self.rows = 0
        self._begin, self._end = (time.monotonic_ns() if now_ns is None else now_ns, CpuTimes.now()), None

    def add(self, payload_bytes: int, rows: int = 1) -> None:
        """Counts payload that became ready: headers and discarded proposals are not goodput."""
        self.payload_bytes += payload_bytes
        self.rows += rows

    def stop(self, now_ns: int | None = None) -> None:
        """Stops the clock. Raises `LocalMisuse` when it was never started."""
        if self._begin is None:
            raise LocalMisuse("a goodput meter was stopped before it was started")
        self._end = (time.monotonic_ns() if now_ns is None else now_ns, CpuTimes.now())

    @property
    def elapsed_s(self) -> float:
        """Seconds between start and stop. Raises `LocalMisuse` before both, or when no time passed."""
        if self._begin is None or self._end is None or self._end[0] <= self._begin[0]:
            raise LocalMisuse("a goodput meter gives figures only after start and, later, stop")
        return (self._end[0] - self._begin[0]) / 1e9

    @property
    def goodput_GBps(self) -> float:
        """10^9 bytes of ready payload a second."""
        return self.payload_bytes / GB / self.elapsed_s

    @property
    def rows_per_s(self) -> float:
        """Ready rows a second."""
        return self.rows / self.elapsed_s

    @property
    def cpu_s_per_GB(self) -> float:
        """CPU seconds of this process and its waited-for children for each 10^9 bytes; `LocalMisuse` for no bytes."""
        if self._begin is None or self._end is None:
            raise LocalMisuse("a goodput meter gives figures only after start and, later, stop")
        return cpu_s_per_GB(self._begin[1], self._end[1], self.payload_bytes)


@dataclass(frozen=True, slots=True)
class Floors:
    """What the same machine did in the same run with the same sizes; None where it was not measured."""

    memcpy_GBps: float | None = None
    socket_GBps: float | None = None
    socket_rtt_us: float | None = None
    zmq_rtt_us: float | None = None
    zmq_GBps: float | None = None


LATENCY_KEYS: Final = ("min", "p50", "p99", "p999", "max")
TAIL_KEYS: Final = ("p50", "p99")
FLOOR_KEYS: Final = ("memcpy_GBps", "socket_GBps", "socket_rtt_us", "zmq_rtt_us", "zmq_GBps")
SUMMARY_KEYS: Final = ("min", "typical", "p50", "p90", "p99", "p999", "max", "n")
WIDTH: Final = 80


def _chosen(summary: Mapping[str, object] | None, keys: Iterable[str]) -> dict[str, object]:
    return {key: None if summary is None else summary[key] for key in keys}


@dataclass(slots=True)
class Report:
    """One run of `pp1q-send` / `pp1q-recv`. Latencies are whole summaries or None when nothing became ready.

    `payload_bytes` is what one sample of `latency_us` carried; it and `extra` go under the JSON key "extra".
    """

    link: str
    representation: str
    requests: int
    depth: int
    rounds: int
    ready: int
    discarded: int
    reasons: dict[str, int]
    latency_us: SummaryUs | None
    tail_us: SummaryUs | None
    goodput_GBps: float
    rows_per_s: float
    cpu_s_per_GB: float | None
    rss_MiB: float
    floors: Floors
    payload_bytes: int
    extra: dict[str, object] = field(default_factory=dict)

    def as_dict(self) -> dict[str, object]:
        """The JSON object of SPEC section 9, its keys in that order, and "extra"."""
        return {
            "link": self.link,
            "representation": self.representation,
            "requests": self.requests,
            "depth": self.depth,
            "rounds": self.rounds,
            "ready": self.ready,
            "discarded": self.discarded,
            "reasons": dict(self.reasons),
            "latency_us": _chosen(self.latency_us, LATENCY_KEYS),
            "tail_us": _chosen(self.tail_us, TAIL_KEYS),
            "goodput_GBps": self.goodput_GBps,
            "rows_per_s": self.rows_per_s,
            "cpu_s_per_GB": self.cpu_s_per_GB,
            "rss_MiB": self.rss_MiB,
            "floors": {key: getattr(self.floors, key) for key in FLOOR_KEYS},
            "extra": {
                "payload_bytes": self.payload_bytes,
                "latency_summary_us": self.latency_us,
                "tail_summary_us": self.tail_us,
                **self.extra,
            },
        }

    def to_json(self, indent: int | None = None) -> str:
        """`as_dict` as JSON text. Raises `ValueError` for a figure that is not finite: JSON has no such number."""
        return json.dumps(self.as_dict(), indent=indent, allow_nan=False)

    @classmethod
    def from_dict(cls, data: object) -> Report:
        """The report the other side sent (`as_dict`, perhaps through JSON or msgpack).

        Raises `PeerFault(MALFORMED)` naming the first key that is missing, unknown or of another type.
        """
        fields = _checked(data, "report", _REPORT_TYPES)
        extra = dict(cast(dict[str, object], fields.pop("extra")))
        for key, keys in (("latency_us", LATENCY_KEYS), ("tail_us", TAIL_KEYS)):
            _checked(fields.pop(key), key, dict.fromkeys(keys, _FIGURE_OR_NONE))
        floors = _checked(fields.pop("floors"), "floors", dict.fromkeys(FLOOR_KEYS, _FIGURE_OR_NONE))
        reasons = cast(dict[str, object], fields.pop("reasons"))
        _checked(reasons, "reasons", dict.fromkeys(reasons.keys() & _REASONS, (int,)))
        summaries: dict[str, SummaryUs | None] = {}
        for key in ("latency", "tail"):
            summary = extra.pop(f"{key}_summary_us", None)
            if summary is not None:
                _checked(summary, f"{key}_summary_us", dict.fromkeys(SUMMARY_KEYS, (int, float)))
            summaries[f"{key}_us"] = cast("SummaryUs | None", summary)
        payload = _checked({"payload_bytes": extra.pop("payload_bytes", None)}, "extra", {"payload_bytes": (int,)})
        return cls(**fields, **payload, **summaries, reasons=reasons, floors=Floors(**floors), extra=extra)  # type: ignore[arg-type]


_REASONS: Final = frozenset(reason.value for reason in Reason)
_FIGURE_OR_NONE: Final = (int, float, type(None))
_REPORT_TYPES: Final[dict[str, tuple[type, ...]]] = {
    **dict.fromkeys(("link", "representation"), (str,)),
    **dict.fromkeys(("requests", "depth", "rounds", "ready", "discarded"), (int,)),
    **dict.fromkeys(("reasons", "latency_us", "tail_us", "floors", "extra"), (dict,)),
    **dict.fromkeys(("goodput_GBps", "rows_per_s", "rss_MiB"), (int, float)),
    "cpu_s_per_GB": _FIGURE_OR_NONE,
}


def _checked(data: object, name: str, types: Mapping[str, tuple[type, ...]]) -> dict[str, object]:
    """A copy of the map `data` if it has exactly these keys, each of one of its types (a bool is no number)."""
    if not isinstance(data, dict) or data.keys() != types.keys():
        found = sorted(map(str, data)) if isinstance(data, dict) else type(data).__name__
        raise PeerFault(Reason.MALFORMED, f"{name} should have the keys {sorted(types)}, not {found}")
    for key, allowed in types.items():
        value = data[key]
        if type(value) not in allowed:
            raise PeerFault(Reason.MALFORMED, f"{name}: {key} is of type {type(value).__name__}")
        # What a peer sent is printed on a terminal and written as JSON.
        if isinstance(value, float) and not math.isfinite(value):
            raise PeerFault(Reason.MALFORMED, f"{name}: {key} is {value}")
        if isinstance(value, str) and not (value.isprintable() and len(value) <= 64):
            raise PeerFault(Reason.MALFORMED, f"{name}: {key} is no short printable text")
    return dict(data)


def _fit(value: float | None, width: int) -> str:
    """`value` right-aligned, with two decimals (four below 1) or what leaves one blank before it; a dash for None."""
    if value is None:
        return "-".rjust(width)
    places = (4, 3, 2, 1) if abs(value) < 1 else (2, 1, 0)
    texts = (*(f"{value:.{decimals}f}" for decimals in places), f"{value:.0e}")
    return next((text for text in texts if len(text) < width), texts[-1]).rjust(width)


_COLUMNS: Final = (
    ("#bytes", 10), ("#iterations", 12), ("t_min[usec]", 12), ("t_typical[usec]", 16),
    ("t_p50", 7), ("t_p99", 7), ("t_p99.9", 8), ("t_max", 8),
)  # fmt: skip


def _latency_lines(report: Report) -> list[str]:
    heading = "".join(name.rjust(width) for name, width in _COLUMNS)
    summary, widths = report.latency_us, [width for _, width in _COLUMNS]
    if summary is None:
        row = f"{report.payload_bytes:>{widths[0]}}{0:>{widths[1]}}" + "".join("-".rjust(w) for w in widths[2:])
    else:
        figures = (summary[key] for key in ("min", "typical", "p50", "p99", "p999", "max"))
        row = f"{report.payload_bytes:>{widths[0]}}{summary['n']:>{widths[1]}}"
        row += "".join(_fit(figure, width) for figure, width in zip(figures, widths[2:], strict=True))
    return [heading, row]


def _floor_lines(report: Report) -> list[str]:
    p50, floors = None if report.latency_us is None else report.latency_us["p50"], report.floors
    rows = (
        ("memcpy, slot to slot", "GB/s", floors.memcpy_GBps, report.goodput_GBps, "goodput/memcpy"),
        ("socket, same window", "GB/s", floors.socket_GBps, report.goodput_GBps, "goodput/socket"),
        ("ZeroMQ, same window", "GB/s", floors.zmq_GBps, report.goodput_GBps, "goodput/zmq"),
        ("socket, round trip", "usec", floors.socket_rtt_us, p50, "p50/socket rtt"),
        ("ZeroMQ, round trip", "usec", floors.zmq_rtt_us, p50, "p50/zmq rtt"),
    )
    lines = [f" {'floor':<22}{'unit':<6}{'floor':>12}{'this link':>12}{'ratio':>9}"]
    for name, unit, floor, ours, ratio_name in rows:
        ratio = ours / floor if ours is not None and floor else None
        lines.append(f" {name:<22}{unit:<6}{_fit(floor, 12)}{_fit(ours, 12)}{_fit(ratio, 9)}  {ratio_name}")
    return lines


def render_table(report: Report) -> str:
    """The report as perftest would print it: aligned columns, at most 80 wide, floors and ratios below.

    Latency is STEP enqueued to q-ready (not half a round trip); a dash stands for what was not measured.
    """
    rule = "-" * WIDTH
    reasons = ", ".join(f"{name} {count}" for name, count in sorted(report.reasons.items())) or "none"
    tail = {key: None if report.tail_us is None else report.tail_us[key] for key in TAIL_KEYS}
    lines = [
        rule,
        "PP1Q link benchmark".center(WIDTH).rstrip(),
        f" Link: {report.link:<12} Representation: {report.representation:<12} "
        f"Requests: {report.requests:<5} Depth: {report.depth}",
        f" Rounds: {report.rounds:<10} Ready: {report.ready:<21} Discarded: {report.discarded}",
        *textwrap.wrap(f"Discard reasons: {reasons}", WIDTH, initial_indent=" ", subsequent_indent="   "),
        rule,
        *_latency_lines(report),
        rule,
        f" tail (last row staged to q-ready)[usec]   t_p50{_fit(tail['p50'], 10)}   t_p99{_fit(tail['p99'], 10)}",
        f" goodput[GB/s]{_fit(report.goodput_GBps, 8)}  rows/s{_fit(report.rows_per_s, 10)}"
        f"  CPU[s/GB]{_fit(report.cpu_s_per_GB, 8)}  RSS[MiB]{_fit(report.rss_MiB, 9)}",
        rule,
        *_floor_lines(report),
        rule,
    ]
    return "\n".join(lines) + "\n"
