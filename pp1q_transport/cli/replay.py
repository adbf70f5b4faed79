"""`pp1q replay`: the frames of a capture judged again, as they were or corrupted on the way.

Between a shell and `capture.replay` and `capture.trial`. Exit status 0 means: the same was accepted and refused as live, and
(with --mutate) nothing passed that the oracle refuses. SPEC section 9.
"""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Final

import click

from ..errors import ConfigError
from ._common import StageLine, command_errors, setup_logging

if TYPE_CHECKING:
    from ..capture.link_replay import Outcome
    from ..capture.trial import Tally

KINDS: Final = ("flip", "truncate", "swap", "duplicate", "stale", "reorder", "field", "all")
PROGRESS_EVERY: Final = 5000


@click.command("replay", context_settings={"show_default": True})
@click.argument("path", metavar="FILE", type=click.Path())
@click.option("--mutate", type=click.Choice(KINDS), metavar="KIND", help=f"Corrupt frames on the way: {', '.join(KINDS)}.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=1, help="Of the mutations; same seed, same ones.")
@click.option("--count", type=click.IntRange(1, 1 << 40), default=10_000, help="How many mutated frames.")
@click.option("--resign", is_flag=True, help="Recompute every digest after a mutation, to test the checks behind them.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the report.")
@click.option("-v", "--verbose", count=True, help="Log what happens.")
@command_errors
def replay(path: str, mutate: str | None, seed: int, count: int, resign: bool, as_json: bool, verbose: int) -> None:
    """Primes fresh receivers from the start of a capture and feeds them its frames, on the capture's own clock; only the link
    proof is skipped. Prints what was accepted, and refused by reason; exit status 1 when that differs from what the live run
    counted.

    With --mutate, frames are corrupted on the way, and an independent oracle says what of them may be accepted; exit status 1
    when anything else is.

    Example: pp1q demo --rounds 200 --sparse 32 --capture demo.pcapng, then pp1q replay demo.pcapng --mutate all --resign
    """
    from ..capture.reading import Recording, open_capture
    from ..capture.replay import Replay

    setup_logging(verbose - 1)
    if mutate is None:
        if resign:
            raise ConfigError("--resign is for mutated frames: give --mutate KIND as well")
        with open_capture(path) as file:
            recording = Recording(file)
            outcome = Replay().run(recording)
            outcome.torn = recording.torn
        click.echo(json.dumps(_as_json(outcome)) if as_json else _report(outcome))
        sys.exit(1 if outcome.differs else 0)
    tally = _mutate(path, mutate, seed, count, resign, StageLine(not as_json))
    click.echo(json.dumps(_tally_json(tally)) if as_json else _tally_report(tally))
    sys.exit(1 if tally.undetected else 0)


def _mutate(path: str, kind: str, seed: int, count: int, resign: bool, line: StageLine) -> Tally:
    from ..capture.reading import Recording, open_capture
    from ..capture.situations import situations
    from ..capture.trial import Trials

    with open_capture(path) as file:
        found = situations(Recording(file))
    trials = Trials(found, kind, seed, resign)
    done = 0
    while done < count:
        line(f"{done} mutated frames of {count}, {trials.tally.undetected} undetected", 0, 1)
        part = min(PROGRESS_EVERY, count - done)
        trials.run(part)
        done += part
    line.clear()
    return trials.tally


def _as_json(outcome: Outcome) -> dict[str, object]:
    return {
        "frames": outcome.frames,
        "accepted": outcome.accepted,
        "refused": outcome.refused,
        "reasons": outcome.reasons,
        "mutated": 0,
        "undetected": 0,
        "ready": outcome.ready,
        "discarded": outcome.discarded,
        "discards": outcome.discards,
        "sessions": outcome.sessions,
        "compared": outcome.compared,
        "skipped": outcome.skipped,
        "differs": outcome.differs,
        "torn": outcome.torn,
    }


def _report(outcome: Outcome) -> str:
    lines = [
        f"{outcome.sessions} sessions, {outcome.frames} frames to the receiver: {outcome.accepted} accepted, "
        f"{outcome.refused} refusals",
        f"proposals: {outcome.ready} ready, {outcome.discarded} discarded",
        *_table("refused", outcome.reasons),
        *_table("discarded", outcome.discards),
        *(f"not replayed: {number} x {name}" for name, number in outcome.skipped.items()),
    ]
    if outcome.torn:
        lines.append("the file ends in the middle of a record")
    same = "the same as live"
    if not outcome.sessions:
        same = "nothing here that can be replayed"
    elif outcome.compared < outcome.sessions:
        same = f"the same as live in {outcome.compared} of {outcome.sessions} sessions: the others can't be compared"
    lines += [f"differs: {text}" for text in outcome.differs] or [same]
    return "\n".join(lines)


def _tally_json(tally: Tally) -> dict[str, object]:
    return {
        "frames": tally.frames,
        "accepted": tally.accepted,
        "refused": sum(tally.reasons.values()),
        "reasons": tally.reasons,
        "mutated": tally.mutated,
        "undetected": tally.undetected,
        "allowed": tally.allowed,
        "stricter": tally.stricter,
        "by_mutation": tally.by_mutation,
        "examples": tally.examples,
    }


def _tally_report(tally: Tally) -> str:
    lines = [
        f"{tally.mutated} mutated frames among {tally.frames}: {tally.undetected} undetected",
        f"proposals that became ready all the same: {tally.accepted} as they were, {tally.allowed} different and allowed so",
        *_table("refused", tally.reasons),
    ]
    if tally.stricter:
        lines.append(f"refused though the oracle allows it: {tally.stricter} proposals")
    for mutation, reasons in sorted(tally.by_mutation.items()):
        lines.append(f"{mutation}: {', '.join(f'{name} {number}' for name, number in _sorted(reasons))}")
    lines += [f"undetected: {text}" for text in tally.examples]
    return "\n".join(lines)


def _table(title: str, totals: dict[str, int]) -> list[str]:
    return [f"  {title} {name:<22}{number:>10}" for name, number in _sorted(totals)]


def _sorted(totals: dict[str, int]) -> list[tuple[str, int]]:
    return sorted(totals.items(), key=lambda item: (-item[1], item[0]))
