"""Documents that must not drift from the code: the reasons' page has every reason, in order, once."""

from __future__ import annotations

import re
from pathlib import Path

from pp1q_transport.errors import Reason

ROOT = Path(__file__).resolve().parent.parent
COSTS = {"link", "proposal", "step", "frame", "session", "call"}


def test_every_reason_has_its_row() -> None:
    text = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| (\d+) \| (.+?) \| (.+?) \| (.+?) \|$", text, re.M)
    assert [(row[0], int(row[1])) for row in rows] == [(reason.value, reason.code) for reason in Reason]
    for _name, _code, means, costs, action in rows:
        assert means
        assert action
        assert set(costs.split(", ")) <= COSTS
