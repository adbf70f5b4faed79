"""The watchdog: which granted generation has spent its budget, on a clock that is passed in.

Between the receiver session, which arms and disarms, and nobody else. It decides nothing and sleeps nowhere; a timer that was
never armed can't fire, t = 0 included. SPEC section 2 (Time).
"""

from __future__ import annotations

from array import array
from typing import Final

NEVER: Final = (1 << 63) - 1
_NEVER: Final = NEVER  # a C integer in the compiled build


class Watchdog:
    """Deadlines in ns by slot index; `next_ns` is the earliest armed one, `NEVER` when none is."""

    def __init__(self, slots: int) -> None:
        self.count: int = slots
        self.deadlines = memoryview(array("q", [NEVER] * slots))
        self.next_ns: int = NEVER

    def arm(self, slot: int, deadline_ns: int) -> None:
        """Sets the slot's deadline, replacing an earlier one."""
        if not 0 <= slot < self.count:
            raise IndexError(f"no slot {slot}")
        self.deadlines[slot] = deadline_ns
        self._refresh()

    def disarm(self, slot: int) -> None:
        """Forgets the slot's deadline; harmless when none is set."""
        if self.deadlines[slot] != _NEVER:
            self.deadlines[slot] = _NEVER
            self._refresh()

    def _refresh(self) -> None:
        best = _NEVER
        for index in range(self.count):
            at = self.deadlines[index]
            if at < best:
                best = at
        self.next_ns = best

    def expired(self, now_ns: int) -> list[int]:
        """The armed slots whose deadline is at or before `now_ns`; they are disarmed by this call."""
        if now_ns < self.next_ns:
            return []
        due = [slot for slot in range(self.count) if self.deadlines[slot] <= now_ns]
        for slot in due:
            self.deadlines[slot] = NEVER
        self._refresh()
        return due
