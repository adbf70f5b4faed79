"""Faults as data: what goes wrong in a run, at which round, and where. A list of them can be cut down and played again.

Between a seed, which makes the list, and `injecting`, which does what it says. Knows no session and no frame.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Collection

US: Final = 1_000
MS: Final = 1_000_000


class FaultKind(str, Enum):
    """What can go wrong."""

    DROP = "drop"  # a frame is lost; the stream goes on, until its owner gives it up
    DUPLICATE = "duplicate"  # a frame comes twice
    REORDER = "reorder"  # a frame comes after the next one
    DELAY = "delay"  # a frame, and all behind it, come milliseconds later
    STALE = "stale"  # an old frame comes again, of this session or of an earlier one
    TRUNCATE = "truncate"  # the end of a frame is missing; what follows joins it
    FLIP = "flip"  # one bit of a frame is another
    LATE_WRITE = "late-write"  # a peer writes into landing memory with a key it got for an earlier grant
    LATE_FENCE = "late-fence"  # a fence that the link confirms milliseconds later
    CUT = "cut"  # a link is cut
    CRASH_LEADER = "crash-leader"  # the leader's daemon dies, and comes back with another boot nonce
    CRASH_RANK = "crash-rank"  # a rank's daemon does
    TARGET_DIES = "target-dies"  # a rank's target process dies
    CLOCK = "clock"  # a process's clock jumps
    STALL = "stall"  # the draft never answers a STEP
    BAD_ROW = "bad-row"  # the draft sends a row that is no q, or not the q of its token
    OVERDUE = "overdue"  # a target keeps a ready slot too long
    UNEQUAL = "unequal"  # a rank answers with its committed state before it was mended


# How often each kind comes, per STEP.
RATES: Final[dict[FaultKind, float]] = {
    FaultKind.DROP: 0.008,
    FaultKind.DUPLICATE: 0.008,
    FaultKind.REORDER: 0.008,
    FaultKind.DELAY: 0.008,
    FaultKind.STALE: 0.006,
    FaultKind.TRUNCATE: 0.005,
    FaultKind.FLIP: 0.012,
    FaultKind.LATE_WRITE: 0.015,
    FaultKind.LATE_FENCE: 0.015,
    FaultKind.CUT: 0.004,
    FaultKind.CRASH_LEADER: 0.002,
    FaultKind.CRASH_RANK: 0.004,
    FaultKind.TARGET_DIES: 0.003,
    FaultKind.CLOCK: 0.005,
    FaultKind.STALL: 0.01,
    FaultKind.BAD_ROW: 0.012,
    FaultKind.OVERDUE: 0.006,
    FaultKind.UNEQUAL: 0.004,
}
ALL_KINDS: Final = frozenset(FaultKind)
ON_A_LANE: Final = frozenset(
    {
        FaultKind.DROP,
        FaultKind.DUPLICATE,
        FaultKind.REORDER,
        FaultKind.DELAY,
        FaultKind.STALE,
        FaultKind.TRUNCATE,
        FaultKind.FLIP,
    }
)
NEVER_HARMLESS: Final = frozenset({FaultKind.FLIP, FaultKind.STALL, FaultKind.BAD_ROW})
PICKS: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: it happens once the STEP of number `round` (from 0) is granted, `delay_ns` later where that means something.
    `pick` chooses the victim and `place` where in it, both 0..2^30-1."""

    number: int
    kind: FaultKind
    round: int
    pick: int
    place: int
    delay_ns: int

    def __str__(self) -> str:
        where = f"pick {self.pick}, place {self.place}, after {self.delay_ns} ns"
        return f"fault {self.number}: {self.kind.value} at round {self.round}, {where}"


def parse_kinds(text: str) -> frozenset[FaultKind]:
    """From "all", "none" or "drop,flip"; raises `ConfigError` naming what is wrong."""
    if text == "all":
        return ALL_KINDS
    if text == "none":
        return frozenset()
    kinds = set()
    for name in text.split(","):
        try:
            kinds.add(FaultKind(name.strip()))
        except ValueError:
            known = ", ".join(kind.value for kind in FaultKind)
            raise ConfigError(f"faults: {name.strip()!r} is none of all, none, {known}") from None
    return frozenset(kinds)


def plan(seed: int, rounds: int, kinds: Collection[FaultKind] = ALL_KINDS, factor: float = 1.0) -> tuple[Fault, ...]:
    """The faults of a run. Every kind has its own draws, so that a run with fewer kinds has the others where they were.
    `factor` multiplies every rate."""
    faults: list[tuple[int, FaultKind, int, int, int]] = []
    for kind in FaultKind:
        if kind not in kinds:
            continue
        source = random.Random(f"{seed} {kind.value}")
        rate = min(1.0, RATES[kind] * factor)
        for round_number in range(rounds):
            if source.random() < rate:
                where = (source.randrange(PICKS), source.randrange(PICKS), source.randrange(2 * MS))
                faults.append((round_number, kind, *where))
    faults.sort(key=lambda fault: fault[0])
    return tuple(
        Fault(number, kind, round_number, pick, place, delay_ns)
        for number, (round_number, kind, pick, place, delay_ns) in enumerate(faults)
    )
