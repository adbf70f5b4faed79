"""What a daemon's log says of all it refused (discarded proposals too) at level info: a line a second at most, counts by reason.

Between the counters and the log. One line a proposal is level debug, where each is refused: a draft that is late every time must
not fill a disk. Counts nothing itself. SPEC section 9.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

EVERY_NS: Final = 1_000_000_000


class DiscardLines:
    """`reasons` gives the totals by reason of this moment; `log` is the daemon's logger."""

    def __init__(self, log: Any, reasons: Callable[[], Mapping[str, int]]) -> None:
        self._log = log
        self._reasons = reasons
        self._told: Mapping[str, int] = {}
        self._due_ns = 0

    def look(self, now_ns: int) -> None:
        """Says what came since the last line, unless that was less than a second ago. Cheap: may be called all the time."""
        if now_ns >= self._due_ns:
            self._due_ns = now_ns + EVERY_NS
            self.say()

    def say(self) -> None:
        """Says it now. Nothing new is no line."""
        reasons = dict(self._reasons())
        new = {name: count - self._told.get(name, 0) for name, count in reasons.items() if count > self._told.get(name, 0)}
        self._told = reasons
        if new:
            self._log.info("refusals", **new)
