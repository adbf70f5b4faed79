"""Cuts a failing run down: fewer targets, fewer faults, then fewer rounds, as long as it breaks the same rule.

Between a violation and who must understand it. Runs are deterministic, so every try is a proof.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

from .journal import Violation
from .world import World

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .faults import Fault
    from .world import Machines, Setup

TRIES: Final = 400


@dataclass(frozen=True)
class Failure:
    """A run that breaks a rule."""

    setup: Setup
    faults: tuple[Fault, ...]
    rule: str
    what: str
    round: int  # how many STEPs were granted by then


def attempt(setup: Setup, faults: Sequence[Fault], machines: Machines | None = None) -> Failure | None:
    """Plays the run; None when it keeps every rule."""
    world = World(setup, faults, machines)
    try:
        world.play()
    except Violation as violation:
        return Failure(setup, tuple(faults), violation.rule, str(violation), world.report.rounds)
    return None


def event_log(failure: Failure, machines: Machines | None = None) -> list[str]:
    """Every event of the run, up to where it breaks the rule."""
    world = World(failure.setup, failure.faults, machines, keep=True)
    try:
        world.play()
    except Violation as violation:
        world.journal.digest()
        assert world.journal.kept is not None
        return [*world.journal.kept, f"{world.now} VIOLATION {violation}"]
    raise AssertionError("a run that failed does not fail again: it is not deterministic")


class _Shrinker:
    def __init__(self, failure: Failure, machines: Machines | None, tries: int) -> None:
        self.best = failure
        self.machines = machines
        self.left = tries

    def breaks(self, setup: Setup, faults: Sequence[Fault]) -> bool:
        """Whether this smaller run breaks the same rule; then it is the best one."""
        if self.left <= 0:
            return False
        self.left -= 1
        failure = attempt(setup, faults, self.machines)
        if failure is None or failure.rule != self.best.rule:
            return False
        self.best = failure
        return True

    def within(self, rounds: int) -> bool:
        """Whether it breaks with so many rounds only."""
        faults = [fault for fault in self.best.faults if fault.round < rounds]
        return self.breaks(replace(self.best.setup, rounds=rounds), faults)

    def fewer_faults(self) -> None:
        """Takes out runs of faults, then shorter ones, until each single one is needed (delta debugging)."""
        parts = 2
        while self.left > 0 and self.best.faults:
            faults = self.best.faults
            size = max(1, len(faults) // parts)
            cuts = [faults[:at] + faults[at + size :] for at in range(0, len(faults), size)]
            if any(self.breaks(self.best.setup, cut) for cut in cuts):
                parts = max(2, parts - 1)
            elif size == 1:
                return
            else:
                parts *= 2

    def fewer_rounds(self) -> None:
        """Half, three quarters and so on, then one by one."""
        step = max(1, self.best.setup.rounds // 2)
        while step and self.left > 0:
            if self.best.setup.rounds - step < 1 or not self.within(self.best.setup.rounds - step):
                step //= 2


def shrink(failure: Failure, machines: Machines | None = None, tries: int = TRIES) -> Failure:
    """A run as small as `tries` tries get it that breaks the same rule."""
    shrinker = _Shrinker(failure, machines, tries)
    if failure.round < failure.setup.rounds:
        shrinker.within(max(1, failure.round))
    if failure.setup.slow:
        shrinker.breaks(replace(shrinker.best.setup, slow=0.0), shrinker.best.faults)
    if failure.setup.targets > 1:
        shrinker.breaks(replace(shrinker.best.setup, targets=1), shrinker.best.faults)
    shrinker.fewer_faults()
    shrinker.fewer_rounds()
    shrinker.fewer_faults()
    return shrinker.best
