"""Many runs, one after the other, and what they came to together.

Between `World`, which plays one run, and the command, the tests and the document's table. Stops at the first violation.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .faults import ALL_KINDS, plan
from .journal import NOT_REACHED, Violation
from .shrink import Failure
from .world import Setup, World

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from .faults import Fault, FaultKind
    from .world import Machines, Report

ROUNDS_A_RUN: Final = 250
SLOW: Final = 0.01


@dataclass(frozen=True)
class Campaign:
    """`rounds` STEPs in runs of at most `rounds_a_run`, with seeds from `seed` on; `ranks` take turns. `factor` multiplies the
    faults' rates; `only`: the numbers of the faults to keep; `even`: nothing takes long
    by itself."""

    seed: int = 1
    rounds: int = 20_000
    ranks: tuple[int, ...] = (1, 2, 3, 4)
    targets: int = 2
    kinds: frozenset[FaultKind] = ALL_KINDS
    factor: float = 1.0
    only: frozenset[int] | None = None
    even: bool = False
    rounds_a_run: int = ROUNDS_A_RUN

    def setups(self) -> Iterator[Setup]:
        """The runs."""
        for index, first in enumerate(range(0, self.rounds, self.rounds_a_run)):
            rounds = min(self.rounds_a_run, self.rounds - first)
            ranks = self.ranks[index % len(self.ranks)]
            yield Setup(self.seed + index, rounds, ranks, self.targets, SLOW if self.kinds and not self.even else 0.0)

    def faults(self, setup: Setup) -> tuple[Fault, ...]:
        """Those of one run."""
        faults = plan(setup.seed, setup.rounds, self.kinds, self.factor)
        return faults if self.only is None else tuple(fault for fault in faults if fault.number in self.only)


@dataclass
class Totals:
    """Sums over runs. `digest` is that of the runs' event logs, in order."""

    runs: int = 0
    rounds: int = 0
    commits: int = 0
    alone: int = 0
    epochs: int = 0
    disagreements: int = 0
    sessions: int = 0
    events: int = 0
    digest: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)

    def add(self, report: Report) -> None:
        """One run more."""
        self.runs += 1
        for name in ("rounds", "commits", "alone", "epochs", "disagreements", "sessions", "events"):
            setattr(self, name, getattr(self, name) + getattr(report, name))
        self.ends += report.ends
        self.faults += report.faults
        self.digest = hashlib.blake2b(f"{self.digest} {report.digest}".encode(), digest_size=16).hexdigest()

    @property
    def injected(self) -> int:
        """How many faults happened."""
        return sum(count for (_kind, outcome), count in self.faults.items() if outcome != NOT_REACHED)

    def outcomes(self) -> dict[str, dict[str, int]]:
        """Outcomes by kind of fault, both in order of their names."""
        table: dict[str, dict[str, int]] = {}
        for (kind, outcome), count in sorted(self.faults.items()):
            table.setdefault(kind, {})[outcome] = count
        return table


def run(
    campaign: Campaign, machines: Machines | None = None, progress: Callable[[int], None] | None = None
) -> tuple[Totals, Failure | None]:
    """All runs, or those up to the first that breaks a rule. `progress` is told how many rounds are done, after each run."""
    totals = Totals()
    for setup in campaign.setups():
        faults = campaign.faults(setup)
        world = World(setup, faults, machines)
        try:
            report = world.play()
        except Violation as violation:
            return totals, Failure(setup, faults, violation.rule, str(violation), world.report.rounds)
        totals.add(report)
        if progress is not None:
            progress(totals.rounds)
    return totals, None
