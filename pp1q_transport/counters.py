"""Counts by name, kept by every part that can refuse something and read by reports and metrics.

Plain integers in one place; no locks, no export format, no logging. A counter exists from its first increment on.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from typing import Final, TypedDict

from .errors import Reason

# Ten steps a decade from 1 us to 10 s, so that a quantile is off by at most 28 %; 1, 2 and 5 of each decade are among them.
BOUNDS_NS: Final[tuple[int, ...]] = (
    *(step * 10**power for power in range(1, 8) for step in (100, 125, 160, 200, 250, 315, 400, 500, 630, 800)),
    10_000_000_000,
)


class HistogramSnapshot(TypedDict):
    """A histogram as it travels: `counts[i]` values were above `bounds_ns[i - 1]` and at most `bounds_ns[i]`; the last count, one
    more than there are bounds, is of those above all."""

    bounds_ns: list[int]
    counts: list[int]
    sum_ns: int


class Histogram:
    """Durations by size, in fixed buckets. For what happens once a proposal, not once a message. One writer."""

    __slots__ = ("counts", "sum_ns")

    def __init__(self) -> None:
        self.counts = [0] * (len(BOUNDS_NS) + 1)
        self.sum_ns = 0

    def add(self, duration_ns: int) -> None:
        """Counts one duration, in ns."""
        self.counts[bisect_left(BOUNDS_NS, duration_ns)] += 1
        self.sum_ns += duration_ns

    @property
    def count(self) -> int:
        """How many were added."""
        return sum(self.counts)

    def snapshot(self) -> HistogramSnapshot:
        """A copy for reports."""
        return {"bounds_ns": list(BOUNDS_NS), "counts": list(self.counts), "sum_ns": self.sum_ns}

    def quantile(self, q: float) -> float | None:
        """The duration in ns below which the share `q` (0..1) lies; see `quantile_ns`."""
        return quantile_ns(BOUNDS_NS, self.counts, q)


def quantile_ns(bounds_ns: Sequence[int], counts: Sequence[int], q: float) -> float | None:
    """The quantile `q` (0..1) of a histogram, in ns, taken as spread evenly within its bucket; None of an empty one. What lies
    above the last bound is reported as that bound."""
    rank = q * sum(counts)
    below = 0
    last: float | None = None
    for index, count in enumerate(counts):
        if not count:
            continue
        if index == len(bounds_ns):
            return float(bounds_ns[-1])
        low = bounds_ns[index - 1] if index else 0
        last = low + (bounds_ns[index] - low) * min(1.0, max(0.0, rank - below) / count)
        below += count
        if below >= rank:
            return last
    return last


class Counters:
    """Named totals plus totals by `Reason`. One writer; readers take a snapshot."""

    __slots__ = ("discards", "reasons", "totals")

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.reasons: dict[str, int] = {}
        self.discards: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the total `name`."""
        self.totals[name] = self.totals.get(name, 0) + amount

    def refuse(self, reason: Reason) -> None:
        """Counts one refusal under its reason."""
        self.reasons[reason.value] = self.reasons.get(reason.value, 0) + 1

    def discard(self, reason: Reason, refused: bool = True) -> None:
        """Counts one discarded proposal: in the total `discarded`, under its reason among discards, and under its reason (unless
        `refused` is False: it was counted there before)."""
        self.add("discarded")
        if refused:
            self.refuse(reason)
        self.discards[reason.value] = self.discards.get(reason.value, 0) + 1

    def get(self, name: str) -> int:
        """The total `name`, 0 if it never counted."""
        return self.totals.get(name, 0)

    def of(self, reason: Reason) -> int:
        """How often `reason` was counted."""
        return self.reasons.get(reason.value, 0)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """A copy for reports: `{"totals": {...}, "reasons": {...}}`."""
        return {"totals": dict(self.totals), "reasons": dict(self.reasons)}
