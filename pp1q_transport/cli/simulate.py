"""`pp1q simulate`: a leader, its targets and their ranks in one process on a virtual clock, under seeded faults.

Between a shell and `simulate.running`. Prints what the runs came to; for one that breaks a rule a run as small as can be found
that breaks it too, with its event log. SPEC section 9, docs/simulation.md.
"""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import ConfigError
from ._common import FiniteRange, StageLine, command_errors

if TYPE_CHECKING:
    from ..simulate.running import Campaign, Totals
    from ..simulate.shrink import Failure
    from ..simulate.world import Machines

LOG_LINES: Final = 200


@click.command(context_settings={"show_default": True})
@click.option("--seed", type=click.IntRange(0, (1 << 62) - 1), default=1, help="The first run's; each run takes the next one.")
@click.option("--rounds", type=click.IntRange(1, 100_000_000), default=20_000, help="STEPs in all, in runs of 250.")
@click.option("--ranks", default="1,2,3,4", metavar="LIST", help="Ranks of a target (1 to 8); runs of 250 take turns.")
@click.option("--targets", type=click.IntRange(1, 8), default=2, help="Targets that the one leader serves.")
@click.option("--faults", default="all", metavar="KINDS", help="all, none, or names such as drop,flip,cut.")
@click.option("--intensity", type=FiniteRange(0.0, 100.0), default=1.0, help="Multiplies how often each fault comes.")
@click.option("--only", default="", metavar="LIST", help="Of the faults only these, by number: what a shrunk run says.")
@click.option("--even", is_flag=True, help="Nothing takes long on its way by itself.")
@click.option("--plant", "plant_name", default="", metavar="NAME", help="Take a guard out, to see that it is missed.")
@click.option("--log", "log_path", type=click.Path(dir_okay=False), help="Write the whole event log of a violation here.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@command_errors
def simulate(
    seed: int,
    rounds: int,
    ranks: str,
    targets: int,
    faults: str,
    intensity: float,
    only: str,
    even: bool,
    plant_name: str,
    log_path: str | None,
    as_json: bool,
) -> None:
    """Plays STEPs against drops, duplicates, reordering, delays, cuts, flips, late writes, crashes and clock jumps, and checks
    what must always hold after every event.

    Exit status 0 means that no rule was broken. One seed is one run: the same options print the same digest.

    Example: pp1q simulate --seed 1 --rounds 20000
    """
    from ..simulate.faults import parse_kinds
    from ..simulate.plants import plant
    from ..simulate.running import Campaign, run

    machines = plant(plant_name).machines if plant_name else None
    kept = frozenset(_numbers("only", only, 0, 1 << 30) if only != "none" else ()) if only else None
    sizes = _numbers("ranks", ranks, 1, 8)
    campaign = Campaign(seed, rounds, sizes, targets, parse_kinds(faults), intensity, kept, even)
    line = StageLine(not as_json)
    started = time.monotonic()
    totals, failure = run(campaign, machines, lambda done: line("rounds", done - 1, rounds))
    line.clear()
    seconds = time.monotonic() - started
    found = None if failure is None else _shrunk(failure, machines, campaign, plant_name, faults, log_path)
    if as_json:
        click.echo(json.dumps(_as_json(totals, found, seconds)))
    else:
        click.echo(_report(totals, seconds))
        if found is not None:
            click.echo(_violation(found))
        elif plant_name:
            click.echo(f"plant {plant_name}: not noticed; more rounds or faults may be needed (docs/simulation.md)")
    if found is not None:
        sys.exit(1)


def _numbers(name: str, text: str, least: int, most: int) -> tuple[int, ...]:
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        raise ConfigError(f"--{name}: {text!r} is no list of numbers such as 1,2") from None
    if not all(least <= number <= most for number in numbers):
        raise ConfigError(f"--{name}: {text!r} has a number outside {least}..{most}")
    return numbers


def _shrunk(
    failure: Failure, machines: Machines | None, campaign: Campaign, plant_name: str, faults: str, log_path: str | None
) -> dict[str, Any]:
    """What is said of a violation: the smallest run found, the command that repeats it, its events."""
    from ..simulate.shrink import event_log, shrink

    best = shrink(failure, machines)
    setup = best.setup
    words = [f"pp1q simulate --seed {setup.seed} --rounds {setup.rounds} --ranks {setup.ranks} --targets {setup.targets}"]
    if not setup.slow and not best.faults:
        words.append("--faults none")
    else:
        words.append(f"--faults {faults} --only " + (",".join(str(fault.number) for fault in best.faults) or "none"))
        if campaign.factor != 1.0:
            words.append(f"--intensity {campaign.factor}")
        if not setup.slow:
            words.append("--even")
    if plant_name:
        words.append(f"--plant {plant_name}")
    events = event_log(best, machines)
    if log_path is not None:
        try:
            with open(log_path, "w", encoding="ascii") as sink:
                sink.writelines(f"{event}\n" for event in events)
        except OSError as error:  # the violation is worth more than its log
            click.echo(f"pp1q: can't write the log to {log_path}: {error.strerror}", err=True)
    return {
        "rule": best.rule,
        "what": best.what,
        "seed": setup.seed,
        "ranks": setup.ranks,
        "faults_before": len(failure.faults),
        "rounds_before": failure.setup.rounds,
        "rounds": setup.rounds,
        "faults": [str(fault) for fault in best.faults],
        "repeat": " ".join(words),
        "events": events[-LOG_LINES:],
    }


def _as_json(totals: Totals, found: dict[str, Any] | None, seconds: float) -> dict[str, Any]:
    return {
        "runs": totals.runs,
        "rounds": totals.rounds,
        "committed": totals.ends["committed"],
        "discarded": {name: count for name, count in sorted(totals.ends.items()) if name != "committed"},
        "faults_injected": totals.injected,
        "outcomes": totals.outcomes(),
        "epochs": totals.epochs,
        "sessions": totals.sessions,
        "events": totals.events,
        "seconds": round(seconds, 3),
        "digest": totals.digest,
        "violation": found,
    }


def _report(totals: Totals, seconds: float) -> str:
    rate = totals.rounds / seconds * 60 if seconds else 0.0
    lines = [
        f"{totals.rounds:,} rounds in {totals.runs:,} runs, {seconds:.1f} s ({rate:,.0f} a minute); {totals.sessions:,} "
        f"sessions, {totals.epochs:,} epochs, {totals.events:,} events",
        f"committed {totals.ends['committed']:,}; discarded {totals.rounds - totals.ends['committed']:,}, by reason:",
    ]
    discarded = sorted(((count, name) for name, count in totals.ends.items() if name != "committed"), reverse=True)
    lines += [f"  {name:<22}{count:>9,}" for count, name in discarded]
    lines.append(f"faults injected {totals.injected:,}, each with one outcome:")
    for kind, outcomes in totals.outcomes().items():
        lines.append(f"  {kind:<14}" + ", ".join(f"{name} {count:,}" for name, count in outcomes.items()))
    lines.append(f"digest of the event logs {totals.digest or 'of nothing'}")
    return "\n".join(lines)


def _violation(found: dict[str, Any]) -> str:
    shown = found["events"]
    return "\n".join(
        [
            "",
            f"VIOLATION of: {found['rule']}",
            f"  {found['what']}",
            f"shrunk from {found['rounds_before']} rounds with {found['faults_before']} faults to {found['rounds']} rounds with "
            f"{len(found['faults'])}:",
            *(f"  {fault}" for fault in found["faults"]),
            f"repeat it: {found['repeat']}",
            f"its last {len(shown)} events (ns):",
            *(f"  {event}" for event in shown),
        ]
    )
