"""Runs every numbered case under several splits of the streams, and checks the tables themselves."""

from __future__ import annotations

import re

import pytest

from pp1q_transport.errors import Reason

from . import cases_exchange, cases_group, cases_handshake, cases_headers, cases_requests, cases_rows, cases_shards, cases_time
from .case import Case

TABLES = (cases_headers, cases_requests, cases_rows, cases_time, cases_handshake, cases_group, cases_shards, cases_exchange)
CASES: tuple[Case, ...] = tuple(case for table in TABLES for case in table.CASES)

# Members of the closed list that no case can meet in this build, each with its why.
UNREACHABLE = {
    Reason.CIRCUIT_OPEN: "the daemon answers its own target with it, before anything is sent",
    Reason.COPY_FAILED: "a copy to this process's own device failed, after the proposal was ready",
}


@pytest.mark.timeout(60)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number} {case.title}")
@pytest.mark.parametrize(("seed", "largest"), ((0, 0), (7, 61)), ids=("whole", "split"))
def test_case(case: Case, seed: int, largest: int) -> None:
    case.run(seed, largest)


def test_numbers_are_unique_and_name_their_section() -> None:
    numbers = [case.number for case in CASES]
    assert len(set(numbers)) == len(numbers)
    for case in CASES:
        assert re.fullmatch(r"[23457]\.\d{2,3}", case.number)
        assert case.number.split(".")[0] == case.spec


def test_there_are_enough_cases_and_no_title_twice() -> None:
    assert len(CASES) >= 150
    assert len({case.title for case in CASES}) == len(CASES)


def test_every_reason_is_reached_by_a_case() -> None:
    reached = {case.reason for case in CASES}
    assert set(Reason) - reached == set(UNREACHABLE)
