"""The document of evil peers is made from the cases, and their numbers are theirs alone."""

from __future__ import annotations

from pathlib import Path

import evil_table

from pp1q_transport.errors import Reason

ROOT = Path(__file__).resolve().parents[3]


def test_the_document_is_made_from_the_cases() -> None:
    text = (ROOT / "docs" / "evil-peer.md").read_text(encoding="utf-8")
    assert text == evil_table.page(), "run `python tests/daemon/evil/evil_table.py > docs/evil-peer.md`"


def test_numbers_are_unique_and_reasons_known() -> None:
    rows = list(evil_table.rows())
    assert len({row[0] for row in rows}) == len(rows)
    assert all(row[3] == "-" or Reason(row[3]) for row in rows)
    assert len(rows) >= 455
