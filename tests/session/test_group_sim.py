"""The group's decision protocol in the simulated world: invariants under seeded faults, and mutants that the world must catch."""

from __future__ import annotations

import pytest
from group_world import QUIET, Machines, Rates, World

from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.group import Action, Coordinator, Decide, Event, Fate, Freed, Proposal
from pp1q_transport.session.group_member import Ballot, Member
from pp1q_transport.session.hub import RankGroup
from pp1q_transport.session.member import MemberSession

ROUNDS = 330


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_the_invariants_hold_under_faults(seed: int, size: int) -> None:
    report = World(seed, size).play(ROUNDS)
    assert report.rounds == ROUNDS + 4
    assert report.ready > ROUNDS // 2


def test_eight_ranks() -> None:
    report = World(4, 8).play(60)
    assert report.ready > 20


def test_peace_loses_nothing() -> None:
    report = World(5, 3, QUIET).play(100)
    assert (report.ready, report.void, report.epochs, report.disagreements) == (104, 0, 1, 0)
    assert report.commits == 3 * 104


def test_a_seed_is_one_run() -> None:
    first, second, other = (World(seed, 3).play(100) for seed in (6, 6, 7))
    assert first == second
    assert first != other


def test_unequal_states_are_met_and_mended() -> None:
    """Ranks that answer with their states as they are disagree, are counted, and agree in a later epoch."""
    rates = Rates(cut_group=0.05, target_dies=0.0, crash_rank_0=0.0, crash_leader=0.0, raw_digest=0.8)
    world = World(8, 3, rates)
    report = world.play(300)
    assert report.disagreements > 0
    assert world.zero.counters.of(Reason.RANK_DISAGREE) == report.disagreements


# --- mutants: each breaks one rule, and the world must say so -------------------------------------------------------------


class HastyCoordinator(Coordinator):
    """Decides READY without the vote of its last rank."""

    def _decide_if_all_ready(self, proposal: Proposal) -> list[Action]:
        if proposal.fate is not Fate.VOTING or any(proposal.votes.get(rank) != 0 for rank in range(self.size - 1)):
            return []
        proposal.move(Event.ALL_READY)
        return [Decide(proposal.epoch, proposal.slot, proposal.generation, 0)]


class TrustingMember(Member):
    """Takes a READY that it did not vote for, so that the hasty coordinator gets that far."""

    def decided(self, epoch: int, slot: int, generation: int, code: int) -> bool:
        paper = self.papers.get(slot)
        if paper is not None and paper.ballot is Ballot.GRANTED and code == 0:
            return False
        return super().decided(epoch, slot, generation, code)


class ImpatientSession(MemberSession):
    """A member that gives up by its own clock after it voted ready."""

    def tick(self, now_ns: int) -> None:
        for slot in self.table.slots:
            if slot.state == st.VOTED and now_ns >= slot.enqueued_ns + 200_000:
                self._void(self.member.papers[slot.index], Reason.TIMEOUT.code)


class LoneSession(MemberSession):
    """A member that takes its own ready vote for the decision."""

    def completed(self, slot: st.Slot, now_ns: int) -> None:
        super().completed(slot, now_ns)
        self.make_ready(slot, now_ns)


class LateMember(Member):
    """Commits what was READY, whatever became of its epoch."""

    def may_commit(self, epoch: int, slot: int, generation: int) -> bool:
        return True


class LateGroup(RankGroup):
    """The same at rank 0."""

    def may_commit(self, slot: int, generation: int, epoch: int) -> bool:
        return True

    def check_commit(self, request: int, round: int) -> None:
        """Never refuses."""


class DeafCoordinator(Coordinator):
    """A death does not end the epoch's proposals."""

    def _death(self, rank: int | None) -> list[Action]:
        kept = self.proposals
        self.proposals = {}
        actions = super()._death(rank)
        self.proposals = kept
        return actions


class GreedyCoordinator(Coordinator):
    """Takes a slot for free when one member gave it back."""

    def _release(self, proposal: Proposal, rank: int) -> list[Action]:
        if proposal.fate is Fate.CLOSED:
            return []
        proposal.move(Event.ALL_RELEASED)
        return [Freed(proposal.slot, proposal.generation)]


class TwoFacedCoordinator(Coordinator):
    """Lets a failure change a decision that was READY."""

    def fail(self, slot: int, generation: int, code: int) -> list[Action]:
        proposal = self.proposals[slot]
        if proposal.fate is Fate.READY:
            return [Decide(proposal.epoch, slot, generation, code)]
        return super().fail(slot, generation, code)

    def vote(self, rank: int, epoch: int, slot: int, generation: int, code: int) -> list[Action]:
        actions = super().vote(rank, epoch, slot, generation, code)
        if actions and isinstance(actions[-1], Decide) and actions[-1].code == 0 and generation % 5 == 0:
            actions += self.fail(slot, generation, Reason.TIMEOUT.code)
        return actions


class BlindCoordinator(Coordinator):
    """Opens an epoch whatever the digests say."""

    def agreed(self, rank: int, epoch: int, digest: tuple[int, int], floor: int = 0) -> list[Action]:
        return super().agreed(rank, epoch, (0, 0), floor)


class ForgetfulCoordinator(Coordinator):
    """Forgets what generations the ranks have seen: a new life of rank 0 grants old ones again."""

    def agreed(self, rank: int, epoch: int, digest: tuple[int, int], floor: int = 0) -> list[Action]:
        return super().agreed(rank, epoch, digest, 0)


MUTANTS = (
    ("ready without one vote", Machines(coordinator=HastyCoordinator, member=TrustingMember)),
    ("ready without one vote, by an honest member", Machines(coordinator=HastyCoordinator)),
    ("a member that gives up by its own clock", Machines(member_session=ImpatientSession)),
    ("a member that decides by itself", Machines(member_session=LoneSession)),
    ("a member that commits after the end", Machines(member=LateMember)),
    ("rank 0 commits after the end", Machines(group=LateGroup)),
    ("a death that voids nothing", Machines(coordinator=DeafCoordinator)),
    ("a slot granted while a member reads it", Machines(coordinator=GreedyCoordinator)),
    ("two decisions", Machines(coordinator=TwoFacedCoordinator)),
    ("an epoch over different states", Machines(coordinator=BlindCoordinator)),
    ("generations that come again", Machines(coordinator=ForgetfulCoordinator)),
)


@pytest.mark.parametrize("machines", [mutant[1] for mutant in MUTANTS], ids=[mutant[0] for mutant in MUTANTS])
def test_the_world_catches(machines: Machines) -> None:
    with pytest.raises(AssertionError):
        _play_all(machines)


def _play_all(machines: Machines) -> None:
    for seed in range(1, 9):
        World(seed, 3, machines=machines).play(400)
