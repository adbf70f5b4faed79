"""A sample of `kill_world`: kill -9 of every process of a deployment at seeded points of a round."""

from __future__ import annotations

import pytest
from journal_check import histories
from kill_world import KillWorld, markdown

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KILLS = 3  # of every process


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
@pytest.mark.parametrize("ranks", (1, 2))
def test_a_deployment_survives_every_death(ranks: int, support: int | None, capsys: pytest.CaptureFixture[str]) -> None:
    with KillWorld(ranks, seed=21, support=support) as world:
        world.start()
        order = world.victims * KILLS
        world.random.shuffle(order)
        for victim in order:
            world.kill(victim)
        assert world.finish() > 100
        with capsys.disabled():
            print(f"\n{markdown(world.table())}")


@pytest.mark.parametrize("mode", ("vocabulary", "request-owner"))
def test_ranks_with_links_of_their_own_survive_every_death(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with KillWorld(2, seed=22, support=16, mode=mode) as world:
        world.start()
        order = world.victims * KILLS
        world.random.shuffle(order)
        for victim in order:
            world.kill(victim)
        assert world.finish() > 100
        with capsys.disabled():
            print(f"\n{mode}\n{markdown(world.table())}")


@pytest.mark.parametrize("mode", ("replicate", "vocabulary"))
def test_ranks_of_a_draft_survive_every_death(mode: str, capsys: pytest.CaptureFixture[str]) -> None:
    with KillWorld(1 + (mode == "vocabulary"), seed=23, support=16, mode=mode, draft_ranks=2) as world:
        world.start()
        order = world.victims * KILLS
        world.random.shuffle(order)
        for victim in order:
            world.kill(victim)
        assert world.finish() > 100
        with capsys.disabled():
            print(f"\ndraft of two, {mode}\n{markdown(world.table())}")


def test_the_check_of_journals_would_see_a_lost_or_doubled_round() -> None:
    rounds = [
        {"request": 1, "at": 2, "tokens": [5, 6], "drafted": 0, "number": 0},
        {"request": 1, "at": 4, "tokens": [7], "drafted": None, "number": 1},
        {"request": 1, "at": 5, "tokens": [8], "drafted": 1, "number": 2},
    ]
    assert histories(rounds) == {1: [1, 2, 5, 6, 7, 8]}
    with pytest.raises(AssertionError, match="4 tokens were committed"):
        histories([rounds[0], rounds[2]])
    with pytest.raises(AssertionError, match="drawn twice"):
        histories([rounds[0], {**rounds[0], "at": 4}])
