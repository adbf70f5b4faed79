"""When a draft beside a daemon rings for a row: fast rows share a wake-up, slow ones and the last never wait."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pp1q_transport.client import attached_draft
from pp1q_transport.client.attached_draft import ROWS_APART_NS, AttachedLeader
from pp1q_transport.session.leader import SENT, Grant

APART = ROWS_APART_NS
QUICK = ROWS_APART_NS // 5


@pytest.mark.parametrize(
    ("gaps", "rung"),
    (
        ((QUICK, QUICK, QUICK), (False, False, True)),
        ((APART, APART, APART), (True, True, True)),
        ((QUICK, APART, QUICK), (False, True, True)),
        ((APART, QUICK, APART), (True, False, True)),
    ),
    ids=("ready-made", "computed", "one slow", "one quick"),
)
def test_which_rows_ring(monkeypatch: pytest.MonkeyPatch, gaps: tuple[int, ...], rung: tuple[bool, ...]) -> None:
    leader = AttachedLeader.__new__(AttachedLeader)
    bells: list[int] = []
    now = 10**9
    leader._targets = [SimpleNamespace(session=1)]  # type: ignore[list-item]
    leader._put_ns = now  # the STEP was taken up just now
    monkeypatch.setattr(leader, "ring", lambda: bells.append(now))
    monkeypatch.setattr(leader, "send", lambda *_fields: True)
    monkeypatch.setattr(leader, "_is_current", lambda _grant, _target: True)
    monkeypatch.setattr(attached_draft, "monotonic_ns", lambda: now)
    grant, step = Grant(0, 3), SimpleNamespace(target=0, slot_generation=1)
    grant.depth = 3
    for index, gap in enumerate(gaps):
        now += gap
        before = len(bells)
        assert leader.send_row(grant, step, index + 1, 7, 32, 0, 256)  # type: ignore[arg-type]
        assert (len(bells) > before) is rung[index], index
    assert grant.state == SENT
