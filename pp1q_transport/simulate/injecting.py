"""Does what a fault says: chooses the victim among what is there, and spoils, cuts, kills or arms it.

Between the plan (`faults`) and a world. What it can't do because nothing is there to do it to is superseded, or not reached.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from ..errors import Reason
from .faults import MS, ON_A_LANE, PICKS, FaultKind
from .journal import HARMLESS, SUPERSEDED

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..session.slots import Slot
    from .faults import Fault
    from .journal import Injection
    from .lanes import End
    from .parties import Process
    from .ranks import Rank, Target
    from .world import World

_JUMP_AHEAD_NS = 20 * MS
_JUMP_BACK_NS = 5 * MS
_FRAMES_TO_PASS = 6


def inject(world: World, fault: Fault, target: Target, slot: Slot) -> None:
    """The STEP of the fault's round was just granted in `slot`."""
    injection = world.outcomes.arm(fault)
    if fault.kind in ON_A_LANE:
        _arm_lane(target, injection)
    elif fault.kind is FaultKind.STALL:
        target.stalls[target.zero.nonce, slot.index, slot.generation] = injection
        _watch_slot(world, target, slot, injection)
    elif fault.kind is FaultKind.BAD_ROW:
        target.bad_rows[target.zero.nonce, slot.index, slot.generation] = injection
        _watch_slot(world, target, slot, injection)
    elif fault.kind in (FaultKind.LATE_FENCE, FaultKind.OVERDUE, FaultKind.UNEQUAL):
        _arm_rank(target, injection)
    else:
        world.after(fault.delay_ns, partial(_ACTS[fault.kind], world, target, injection))


def _watch_slot(world: World, target: Target, slot: Slot, injection: Injection) -> None:
    world.outcomes.watch(("proposal", target.number, target.zero.nonce, slot.index, slot.generation), injection)


def _arm_lane(target: Target, injection: Injection) -> None:
    """Half of them on the rows' own way, which has most of the frames."""
    zero, fault = target.zero, injection.fault
    lead = zero.ends.get("lead")
    lanes: list[End] = []
    for end in zero.ends.values():
        lanes += [end, end.peer]
    if lanes:
        end = lead.peer if lead is not None and fault.pick & 1 else lanes[fault.pick // 2 % len(lanes)]
        end.armed.append([fault.pick // 64 % _FRAMES_TO_PASS, injection])


def _arm_rank(target: Target, injection: Injection) -> None:
    fault = injection.fault
    ranks = target.ranks
    rank: Rank = ranks[fault.pick % len(ranks)]
    if fault.kind is FaultKind.UNEQUAL and target.size > 1:
        rank = ranks[1 + fault.pick % (target.size - 1)]
    if fault.kind is FaultKind.LATE_FENCE:
        rank.late_fences.append(injection)
    elif fault.kind is FaultKind.OVERDUE:
        rank.overdues.append(injection)
    elif rank.rank:
        rank.unequal.append(injection)


def _late_write(world: World, target: Target, injection: Injection) -> None:
    """Some landing row is written again, with the key that its last honest write had, or the one that is good now."""
    fault, outcomes = injection.fault, world.outcomes
    others = [each for each in world.targets if each is not target]
    first = next((each for each in (target, *others) if each.one_sided), target)
    ends = [end for rank in first.ranks if (end := rank.landing_end()) is not None and end.link.landing is not None]
    places = [(end, at) for end in ends for at in sorted(_landing_rows(end))]
    if not places:
        return
    end, at = places[fault.pick % len(places)]
    landing = end.link.landing
    assert landing is not None
    if fault.pick & 64:
        landing.ambushes.append(injection)
        return
    outcomes.begin(injection)
    key = landing.told[at[0]] if fault.place & 1 else max(1, landing.keys[at[0]] - 1)
    if landing.keys[at[0]] != key:
        world.journal.note(f"{world.now} a late write to slot {at[0]} is refused by its key")
        outcomes.end(injection, HARMLESS)
        return
    world.journal.note(f"{world.now} a late write changes landing row {at}")
    end.wire.excused = True
    earlier = landing.spoiled.get(at)
    if earlier is not None and earlier.outcome is None:
        outcomes.end(earlier, SUPERSEDED)
    landing.spoil(at, injection)
    outcomes.watch(("link", end.wire.number), injection)


def _landing_rows(end: End) -> dict[tuple[int, int], bytes]:
    assert end.link.landing is not None
    return end.link.landing.rows


def _cut(world: World, target: Target, injection: Injection) -> None:
    names = sorted(target.zero.ends)
    if not names:
        world.outcomes.end(injection, SUPERSEDED)
        return
    end = target.zero.ends[names[injection.fault.pick % len(names)]]
    _lose_link(world, end, injection)


def _lose_link(world: World, end: End, injection: Injection) -> None:
    if end.wire.over or end.cut:
        world.outcomes.end(injection, SUPERSEDED)
        return
    world.outcomes.begin(injection)
    world.outcomes.watch(("link", end.wire.number), injection)
    world.cut(end, Reason.PEER_LOST.value, by=injection)


def _crash(process: Process, world: World, injection: Injection) -> None:
    if not process.alive:
        world.outcomes.end(injection, SUPERSEDED)
        return
    world.outcomes.begin(injection)
    world.journal.note(f"{world.now} {process.name} crashes")
    process.crash(injection)


def _crash_leader(world: World, _target: Target, injection: Injection) -> None:
    _crash(world.leader, world, injection)


def _crash_rank(world: World, target: Target, injection: Injection) -> None:
    _crash(target.ranks[injection.fault.pick % target.size], world, injection)


def _target_dies(world: World, target: Target, injection: Injection) -> None:
    rank = target.ranks[injection.fault.pick % target.size]
    if not rank.alive or not rank.target_alive or rank.book is None:
        world.outcomes.end(injection, SUPERSEDED)
        return
    world.outcomes.begin(injection)
    world.journal.note(f"{world.now} the target process of {rank.name} dies")
    before = (target.current, dict(rank.counters.reasons), dict(target.zero.counters.totals))
    rank.dies()
    world.check(rank)
    ended = target.zero.counters.totals.get("epochs_ended", 0) != before[2].get("epochs_ended", 0)
    reason = next((name for name, count in rank.counters.reasons.items() if count > before[1].get(name, 0)), None)
    world.outcomes.end(injection, reason or (Reason.PEER_LOST.value if ended or rank.rank else HARMLESS))


def _clock(world: World, target: Target, injection: Injection) -> None:
    """Ahead mostly. What is overdue by the jump times out at once."""
    fault = injection.fault
    processes = [world.leader, *target.ranks]
    process = processes[fault.pick % len(processes)]
    if not process.alive:
        world.outcomes.end(injection, SUPERSEDED)
        return
    world.outcomes.begin(injection)
    ahead = fault.pick & 3
    jump = fault.place * _JUMP_AHEAD_NS // PICKS if ahead else -(fault.place * _JUMP_BACK_NS // PICKS)
    process.offset_ns += jump
    world.journal.note(f"{world.now} the clock of {process.name} jumps by {jump} ns")
    before = process.counters.of(Reason.TIMEOUT)
    process.poll()
    world.check(process)
    late = process.counters.of(Reason.TIMEOUT) > before
    world.outcomes.end(injection, Reason.TIMEOUT.value if late else HARMLESS)


_ACTS: dict[FaultKind, Callable[[World, Target, Injection], None]] = {
    FaultKind.LATE_WRITE: _late_write,
    FaultKind.CUT: _cut,
    FaultKind.CRASH_LEADER: _crash_leader,
    FaultKind.CRASH_RANK: _crash_rank,
    FaultKind.TARGET_DIES: _target_dies,
    FaultKind.CLOCK: _clock,
}
