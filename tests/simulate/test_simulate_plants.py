"""Guards taken out: for each the simulator breaks the rule it stands for, and finds a smaller run that breaks it too."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from pp1q_transport.errors import ConfigError
from pp1q_transport.session.slots import Slot
from pp1q_transport.simulate import checks
from pp1q_transport.simulate.faults import ALL_KINDS, FaultKind
from pp1q_transport.simulate.plants import PLANTS, plant
from pp1q_transport.simulate.running import Campaign, run
from pp1q_transport.simulate.shrink import Failure, attempt, event_log, shrink
from pp1q_transport.simulate.world import Machines
from pp1q_transport.simulate.zero import RankZero

# What a plant needs to be seen soon: sizes of groups, kinds of faults, how many times as many of them.
NEEDS: dict[str, tuple[tuple[int, ...], frozenset[FaultKind], float]] = {
    "no-digest": ((1, 3), frozenset({FaultKind.FLIP}), 25.0),
    "early-ready": ((1,), ALL_KINDS, 1.0),
    "key-reuse": ((1,), ALL_KINDS, 3.0),
    "blind-epoch": ((3,), frozenset({FaultKind.CUT, FaultKind.UNEQUAL}), 20.0),
    "late-commit": ((3,), frozenset({FaultKind.CUT, FaultKind.CRASH_RANK}), 5.0),
}


@cache
def failure_of(name: str) -> Failure:
    ranks, kinds, factor = NEEDS.get(name, ((3,), ALL_KINDS, 1.0))
    _totals, failure = run(Campaign(rounds=8000, ranks=ranks, kinds=kinds, factor=factor), plant(name).machines)
    assert failure is not None, f"{name} is not noticed"
    return failure


@pytest.mark.parametrize("name", sorted(PLANTS))
def test_a_plant_is_noticed_by_its_rule(name: str) -> None:
    assert failure_of(name).rule in PLANTS[name].rules


def test_every_rule_about_proposals_has_a_plant() -> None:
    planted = {rule for each in PLANTS.values() for rule in each.rules}
    # The others have tests of their own, in test_simulate_parts and below.
    assert set(checks.RULES) - planted == {checks.ONE_OUTCOME, checks.ONE_END, checks.HONEST, checks.NO_ERROR}


@pytest.mark.parametrize("name", ("no-fence", "silent-rank-0", "no-digest"))
def test_shrinking_keeps_the_rule_and_little_else(name: str) -> None:
    machines = PLANTS[name].machines
    failure = failure_of(name)
    best = shrink(failure, machines)
    assert best.rule == failure.rule
    assert 1 <= len(best.faults) <= 6 < len(failure.faults)
    assert best.setup.rounds < failure.setup.rounds
    assert attempt(best.setup, best.faults, machines) == best, "a run that was shrunk repeats"
    for left_out in range(len(best.faults)):
        fewer = best.faults[:left_out] + best.faults[left_out + 1 :]
        again = attempt(best.setup, fewer, machines)
        assert again is None or again.rule != best.rule, "one fault less still breaks it"
    events = event_log(best, machines)
    assert "VIOLATION" in events[-1]
    assert any(f"injected fault {best.faults[0].number}" in event for event in events)


def test_without_the_plant_the_shrunk_run_is_fine() -> None:
    best = shrink(failure_of("no-fence"), PLANTS["no-fence"].machines)
    assert attempt(best.setup, best.faults) is None


class RaisingZero(RankZero):
    """A machine that raises what nobody expects."""

    def saw_ready(self, slot: Slot) -> None:
        """Fails at its third proposal."""
        super().saw_ready(slot)
        if slot.generation == 3:
            raise LookupError("nobody expects this")


class ForgettingZero(RankZero):
    """Loses a round without an end."""

    def round_over(self, request: int, round_number: int, how: str) -> None:
        """Forgets one of them."""
        if round_number == 3:
            self.open_rounds.pop((request, round_number), None)
        else:
            super().round_over(request, round_number, how)


class LyingZero(RankZero):
    """Closes requests at the leader that were never opened there."""

    def _step(self, receiver: object, request: object) -> None:
        super()._step(receiver, request)  # type: ignore[arg-type]
        if self.world.report.rounds == 30:
            receiver.close(type(request)(9_999, 1, (1,)))  # type: ignore[attr-defined,call-arg]


@pytest.mark.parametrize(
    ("zero", "rule"),
    ((RaisingZero, checks.NO_ERROR), (ForgettingZero, checks.ONE_END), (LyingZero, checks.HONEST)),
    ids=lambda value: getattr(value, "__name__", value),
)
def test_what_the_machines_do_wrong_is_a_violation(zero: type[RankZero], rule: str) -> None:
    campaign = Campaign(rounds=100, ranks=(1,), kinds=frozenset())
    _totals, failure = run(campaign, replace(Machines(), zero=zero))
    assert failure is not None
    assert failure.rule == rule


def test_an_unknown_plant_is_refused() -> None:
    with pytest.raises(ConfigError, match="no-fence"):
        plant("roses")
