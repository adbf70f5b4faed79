"""Runs of the simulator: one seed is one run, no rule breaks, every kind of fault happens and ends as it may."""

from __future__ import annotations

import pytest

from pp1q_transport.errors import Reason
from pp1q_transport.simulate.faults import ALL_KINDS, FaultKind, plan
from pp1q_transport.simulate.journal import HARMLESS, NOT_REACHED, SUPERSEDED
from pp1q_transport.simulate.running import Campaign, run
from pp1q_transport.simulate.world import ROUNDS_IN_PEACE, Setup, World

OUTCOMES = {HARMLESS, SUPERSEDED, NOT_REACHED} | {reason.value for reason in Reason}


def test_a_seed_is_one_run() -> None:
    campaign = Campaign(seed=11, rounds=800, rounds_a_run=200)
    first, second = run(campaign)[0], run(campaign)[0]
    assert first == second
    assert len(first.digest) == 32
    assert run(Campaign(seed=12, rounds=800, rounds_a_run=200))[0].digest != first.digest


def test_the_digest_is_of_every_event() -> None:
    """A fault more, and nothing else, is another digest."""
    setup = Setup(21, 60, 2, 1)
    faults = plan(21, 60, {FaultKind.STALL}, 8.0)
    assert len(faults) > 1
    assert World(setup, faults).play().digest != World(setup, faults[:-1]).play().digest


def test_peace_loses_nothing() -> None:
    totals, failure = run(Campaign(rounds=800, kinds=frozenset(), rounds_a_run=200))
    assert failure is None
    assert totals.ends == {"committed": totals.rounds}
    assert totals.injected == 0
    assert totals.epochs == 2 * 3  # two targets in each of the three runs with a group


def test_faults_of_every_kind_end_as_they_may() -> None:
    """Whatever happened has a reason, was superseded or harmless; what changes bytes is never harmless."""
    totals, failure = run(Campaign(seed=3, rounds=4000, factor=2.0))
    assert failure is None
    table = totals.outcomes()
    assert set(table) == {kind.value for kind in ALL_KINDS}
    for kind, outcomes in table.items():
        assert set(outcomes) <= OUTCOMES, kind
        assert sum(count for name, count in outcomes.items() if name != NOT_REACHED) > 0, kind
    assert HARMLESS not in table["flip"]
    assert HARMLESS not in table["bad-row"]
    assert HARMLESS not in table["stall"]
    assert table["late-write"]["payload_digest"] > 0
    assert table["stale"]["session_mismatch"] > 0
    assert table["bad-row"].keys() >= {"draw_mismatch", "mass", "negative", "nonfinite"}
    assert sum(totals.ends.values()) == totals.rounds


@pytest.mark.parametrize("ranks", (1, 2, 3, 4))
def test_each_size_of_group(ranks: int) -> None:
    totals, failure = run(Campaign(seed=40, rounds=500, ranks=(ranks,), targets=3))
    assert failure is None
    assert totals.rounds >= 500 + 2 * ROUNDS_IN_PEACE
    assert totals.ends["committed"] > 300


def test_a_flip_behind_a_truncated_frame_waits_for_the_end_of_its_link() -> None:
    """Its bytes are taken for those that are missing: nothing is refused yet, and nothing may be called unnoticed."""
    kept = frozenset({1, 3, 5, 9, 12, 14, 15, 16})
    totals, failure = run(Campaign(seed=10_018, rounds=107, ranks=(3,), only=kept))
    assert failure is None
    assert totals.faults["flip", SUPERSEDED] == 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", (10_000, 20_000, 30_000, 40_000))
def test_sixty_thousand_rounds(seed: int) -> None:
    totals, failure = run(Campaign(seed=seed, rounds=15_000))
    assert failure is None, failure
    assert totals.rounds >= 15_000
    assert totals.injected > 1_000
