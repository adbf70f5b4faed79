"""docs/operations.md is kept true: its tables of reasons and metrics are whole, its numbers are the code's."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from deploy_metrics import METRICS

from pp1q_transport.errors import Reason
from pp1q_transport.session.terms import SessionTerms

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
FAULTS = {"peer", "network", "host", "draft", "target", "settings", "stranger", "nobody"}


def section(title: str) -> str:
    """The text under a heading, up to the next of its level."""
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE, re.M | re.S)
    assert found, f"no section {title!r}"
    return found[1]


def test_every_reason_has_one_row_in_the_order_of_the_reasons_page() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \| (.+?) \|$", section("Every reason"), re.M)
    assert [row[0] for row in rows] == [reason.value for reason in Reason]
    other = (ROOT / "docs" / "reasons.md").read_text(encoding="utf-8")
    assert [row[0] for row in rows] == re.findall(r"^\| `(\w+)` \|", other, re.M)
    for name, means, fault, action in rows:
        assert means, name
        assert action, name
        assert set(fault.split(", ")) <= FAULTS, f"{name}: {fault}"


def test_every_metric_has_one_row() -> None:
    rows = re.findall(r"^\| `(pp1q_\w+)", section("Metrics"), re.M)
    assert sorted(rows) == sorted(METRICS)


def number(text: str) -> int:
    return int(text.replace(",", ""))


@pytest.mark.parametrize(
    ("row", "vocab", "depth", "slots", "dense"),
    (
        ("dense, 129,280, depth 5, 8 slots", 129280, 5, 8, True),
        ("dense, 129,280, depth 5, 32 slots", 129280, 5, 32, True),
        ("dense, 49,152, depth 5, 8 slots", 49152, 5, 8, True),
        ("sparse alone, support 32, depth 5, 8 slots", 129280, 5, 8, False),
    ),
)
def test_the_slot_memory_is_what_the_code_takes(row: str, vocab: int, depth: int, slots: int, dense: bool) -> None:
    found = re.search(rf"^\| {re.escape(row)} \| ([\d,]+) \|", section("Sizing"), re.M)
    assert found, row
    assert number(found[1]) == SessionTerms(1, 1, 2, vocab, depth, 32, slots, dense=dense).geometry().total_bytes


def test_the_spec_s_payload_sizes_are_there() -> None:
    for size in ("2,585,600", "10,342,400", "20,684,800", "1,280"):
        assert size in section("Sizing"), size


def test_the_files_and_commands_it_names_exist() -> None:
    for name in re.findall(r"`((?:deploy|docs|scripts|proto)/[\w./@-]*)`", PAGE):
        assert (ROOT / name).exists(), name
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`", PAGE):
        assert re.search(rf"^{target}:", makefile, re.M), target
