"""Counts by name, kept by every part that can refuse something and read by reports and metrics.

Plain integers in one place; no locks, no export format, no logging. A counter exists from its first increment on.
"""

from __future__ import annotations

from .errors import Reason


class Counters:
    """Named totals plus totals by `Reason`. One writer; readers take a snapshot."""

    __slots__ = ("reasons", "totals")

    def __init__(self) -> None:
        self.totals: dict[str, int] = {}
        self.reasons: dict[str, int] = {}

    def add(self, name: str, amount: int = 1) -> None:
        """Adds `amount` to the total `name`."""
        self.totals[name] = self.totals.get(name, 0) + amount

    def refuse(self, reason: Reason) -> None:
        """Counts one refusal under its reason."""
        self.reasons[reason.value] = self.reasons.get(reason.value, 0) + 1

    def get(self, name: str) -> int:
        """The total `name`, 0 if it never counted."""
        return self.totals.get(name, 0)

    def of(self, reason: Reason) -> int:
        """How often `reason` was counted."""
        return self.reasons.get(reason.value, 0)

    def snapshot(self) -> dict[str, dict[str, int]]:
        """A copy for reports: `{"totals": {...}, "reasons": {...}}`."""
        return {"totals": dict(self.totals), "reasons": dict(self.reasons)}
