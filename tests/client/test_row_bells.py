"""When a draft beside a daemon rings for a row: fast rows share a wake-up, slow ones and the last never wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pp1q_transport.client import attached_draft
from pp1q_transport.client.attached_draft import ROWS_APART_NS, ROWS_TOGETHER_BYTES, AttachedLeader
from pp1q_transport.session.leader import SENT, Grant

APART = ROWS_APART_NS
QUICK = ROWS_APART_NS // 5
SMALL, BIG = 256, ROWS_TOGETHER_BYTES


@pytest.mark.parametrize(
    ("gaps", "length", "rung"),
    (
        ((QUICK,) * 6, SMALL, "...!.!"),
        ((APART,) * 6, SMALL, "!!!!!!"),
        ((QUICK, APART, QUICK, QUICK, QUICK, QUICK), SMALL, ".!.!.!"),
        ((APART, QUICK, APART, QUICK, APART, QUICK), SMALL, "!.!!!!"),
        ((QUICK,) * 6, BIG, "!!!!!!"),
        ((QUICK,) * 6, BIG // 2, ".!.!.!"),
        ((QUICK,), SMALL, "!"),
        ((QUICK, QUICK), SMALL, ".!"),
        ((QUICK, QUICK, QUICK), SMALL, "!.!"),
    ),
    ids=("ready-made", "computed", "one slow", "slow ones", "big", "middling", "one row", "two rows", "three rows"),
)
def test_which_rows_ring(monkeypatch: pytest.MonkeyPatch, gaps: tuple[int, ...], length: int, rung: str) -> None:
    leader = AttachedLeader.__new__(AttachedLeader)
    bells: list[int] = []
    now = 10**9
    leader._targets = [SimpleNamespace(session=1)]  # type: ignore[list-item]
    leader._put_ns = now  # the STEP was taken up just now
    leader._unrung_bytes = 0
    monkeypatch.setattr(leader, "send", lambda *_fields: True)
    monkeypatch.setattr(leader, "_is_current", lambda _grant, _target: True)
    monkeypatch.setattr(attached_draft, "monotonic_ns", lambda: now)

    def ring() -> None:  # takes longer than rows may be apart
        nonlocal now
        bells.append(now)
        now += 2 * APART

    monkeypatch.setattr(leader, "ring", ring)
    depth = len(gaps)
    grant, step = Grant(0, depth), SimpleNamespace(target=0, slot_generation=1)
    grant.depth = depth
    told = ""
    for index, gap in enumerate(gaps):
        now += gap
        before = len(bells)
        assert leader.send_row(grant, step, index + 1, 7, 32, 0, length)  # type: ignore[arg-type]
        told += "!" if len(bells) > before else "."
    assert told == rung
    assert grant.state == SENT
