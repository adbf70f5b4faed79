"""The table of what an evil peer was tried with: `evil_table.py` prints docs/evil-peer.md, which a test compares.

Between the cases that are played against live daemons and whoever reads what a broken rule leads to. Plays nothing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[1])]

import test_evil_frames  # noqa: E402
import test_evil_handshake  # noqa: E402
import test_evil_member  # noqa: E402
import test_evil_rank0  # noqa: E402
import test_evil_shards  # noqa: E402
from protocol.case import Cost  # noqa: E402

INTRODUCTION = """# What a peer meets that breaks a rule

A peer that speaks the protocol honestly but for one rule, against a live daemon (`pytest tests/daemon/evil`). Each row is a
test. It asserts that the daemon names this reason and counts it exactly as often as the case says, that what was bent never
becomes ready, and that the same process then gives an honest peer a whole proposal. Beside an evil leader a second proposal is
under way: it becomes ready undisturbed, or is void where the link is lost, and every slot is FREE at the end.

The number's first digit is the section of the contract: 2 planes and frames, 4 validation and isolation, 5 random numbers.
Numbers from 2.6 and 4.6 on are of that folder alone; the others are the frame cases of `tests/protocol`, which are also played
there between two sessions of one process, under several splits of the stream. "-" is allowed, or harmless, and disturbs nobody.

An evil rank 0 meets the live daemon of rank 1, an evil member that of rank 0, with a live leader and draft beside both, in the
mode of the group that the row names (else "replicate"). What those daemons captured meanwhile must replay to the same counts.

Not here: strangers on either port (`tests/system/test_hostile*.py`), hostile local processes (`tests/daemon/test_hostile_*.py`),
and what is no single bent frame (`cases_time.py`, `cases_group.py` and `cases_shards.py` of `tests/protocol`, between sessions
of one process).
"""


def rows() -> Iterator[tuple[str, str, str, str, str]]:
    """(number, who is evil, what it does, reason, costs)."""
    for case in test_evil_frames.LIVES:
        who = "receiver" if case.judge == "leader" else "leader"
        cost = "nothing" if case.cost is Cost.NOTHING else case.cost.value
        yield case.number, who, case.title, case.reason.value if case.reason else "-", cost
    for hello in test_evil_handshake.HELLOS:
        yield hello.number, "receiver", f"HELLO: {hello.title}", hello.reason.value, "session"
    for message in test_evil_handshake.MESSAGES:
        yield message.number, "anybody", f"control message: {message.title}", message.reason.value, "session"
    for proof in test_evil_handshake.PROOFS:
        yield proof.number, "receiver", f"PROOF: {proof.title}", proof.reason.value, "link"
    for rank in test_evil_member.CASES:
        yield rank.number, "member", rank.title, rank.reason.value, "link, epoch"
    ranks = (("rank 0", test_evil_rank0.RANK_0), ("member", test_evil_rank0.VOTES), ("leader", test_evil_shards.SHARDS))
    for who, cases in ranks:
        for case in cases:
            where = "" if case.mode == "replicate" else f" ({case.mode})"
            yield case.number, who, case.title + where, case.reason.value, "link, epoch" if case.cost == "link" else case.cost


def page() -> str:
    """The document."""
    lines = [INTRODUCTION, "| Case | Evil | What it does | Reason | Costs |", "|---|---|---|---|---|"]
    for number, who, what, reason, cost in sorted(rows(), key=lambda row: [int(part) for part in row[0].split(".")]):
        lines.append(f"| {number} | {who} | {what} | {reason if reason == '-' else f'`{reason}`'} | {cost} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(page())
