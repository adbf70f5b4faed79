"""The exhaustive search over short lives of a rank group, and rules whose breach it must find."""

from __future__ import annotations

import pytest
from group_model import Broken, Budget, search
from test_group_sim import (
    DeafCoordinator,
    GreedyCoordinator,
    HastyCoordinator,
    LateMember,
    TrustingMember,
)

from pp1q_transport.errors import Reason
from pp1q_transport.session.group import Action, Coordinator, Decide, Fate, Lost, Proposal
from pp1q_transport.session.group_member import Member, Paper


@pytest.mark.timeout(60)
@pytest.mark.parametrize(
    ("members", "budget"),
    (
        (1, Budget(grants=2, cuts=1, leaves=0, fails=1, noes=1)),
        (1, Budget(grants=1, cuts=1, leaves=1, fails=1, noes=0)),
        (1, Budget(grants=1, cuts=2, leaves=0, fails=1, noes=0)),
        (2, Budget(grants=2, cuts=0, leaves=0, fails=1, noes=1)),
        (2, Budget(grants=1, cuts=1, leaves=0, fails=0, noes=0)),
    ),
    ids=str,
)
def test_no_short_life_breaks_a_rule(members: int, budget: Budget) -> None:
    assert search(members, budget) > 500


class SilentCoordinator(Coordinator):
    """Ends an epoch without a word: nothing is void, and what was READY can still be committed."""

    def _death(self, rank: int | None) -> list[Action]:
        ready = [proposal for proposal in self.proposals.values() if proposal.fate is Fate.READY]
        actions = super()._death(rank)
        for proposal in ready:
            proposal.fate, proposal.epoch = Fate.READY, self.epoch
        return [action for action in actions if not isinstance(action, Lost)]


class LateCoordinator(Coordinator):
    """Commits whatever was READY."""

    def may_commit(self, epoch: int, slot: int, generation: int) -> bool:
        return self.proposals[slot].code == 0 and self.proposals[slot].fate is not Fate.VOTING


class GuessingMember(Member):
    """Takes its own ready vote for the decision once the link is lost."""

    def link_down(self) -> list[Paper]:
        waiting = [paper for paper in self.papers.values() if paper.ballot.value == "waiting"]
        lost = super().link_down()
        return [paper for paper in lost if paper not in waiting]


class EagerCoordinator(Coordinator):
    """Lets a late ready vote overrule a failure."""

    def _decide_if_all_ready(self, proposal: Proposal) -> list[Action]:
        if proposal.fate is Fate.DISCARDED and len(proposal.votes) == self.size:
            proposal.fate = Fate.VOTING
            proposal.votes = dict.fromkeys(proposal.votes, 0)
        return super()._decide_if_all_ready(proposal)


class WaveringCoordinator(Coordinator):
    """Thinks better of a decision."""

    def vote(self, rank: int, epoch: int, slot: int, generation: int, code: int) -> list[Action]:
        actions = super().vote(rank, epoch, slot, generation, code)
        if any(isinstance(action, Decide) and action.code == 0 for action in actions):
            actions.append(Decide(epoch, slot, generation, Reason.TIMEOUT.code))
        return actions


MUTANTS: tuple[tuple[str, type[Coordinator], type[Member], Budget], ...] = (
    ("ready without one vote", HastyCoordinator, TrustingMember, Budget(1, 0, 0, 0, 0)),
    ("a member that commits after the end", Coordinator, LateMember, Budget(1, 1, 0, 0, 0)),
    ("rank 0 commits after the end", LateCoordinator, Member, Budget(1, 1, 0, 0, 0)),
    ("a death that voids nothing", DeafCoordinator, Member, Budget(1, 1, 0, 0, 0)),
    ("an end without a word", SilentCoordinator, Member, Budget(1, 1, 0, 0, 0)),
    ("a slot granted while a member reads it", GreedyCoordinator, Member, Budget(2, 0, 0, 0, 0)),
    ("two decisions", WaveringCoordinator, Member, Budget(1, 0, 0, 0, 0)),
    ("a late vote that overrules a failure", EagerCoordinator, Member, Budget(1, 0, 0, 1, 0)),
    ("a member that guesses", Coordinator, GuessingMember, Budget(1, 1, 0, 0, 0)),
)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("coordinator", "member", "budget"), [row[1:] for row in MUTANTS], ids=[row[0] for row in MUTANTS])
def test_the_search_finds(coordinator: type[Coordinator], member: type[Member], budget: Budget) -> None:
    with pytest.raises(Broken, match="after: "):  # the way there is told
        _search_both(coordinator, member, budget)


def _search_both(coordinator: type[Coordinator], member: type[Member], budget: Budget) -> None:
    for members in (1, 2):
        search(members, budget, coordinator, member)
