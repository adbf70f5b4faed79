"""The group's decision protocol in the simulated world: invariants under seeded faults, and mutants that the world must catch."""

from __future__ import annotations

import pytest

from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.group import Action, Coordinator, Decide, Event, Fate, Freed, Proposal
from pp1q_transport.session.group_member import Ballot, Member
from pp1q_transport.session.member import MemberSession
from pp1q_transport.simulate.faults import FaultKind, plan
from pp1q_transport.simulate.journal import Violation
from pp1q_transport.simulate.plants import BlindCoordinator, LateGroup, LateMember, LoneSession
from pp1q_transport.simulate.world import ROUNDS_IN_PEACE, Machines, Report, Setup, World

ROUNDS = 330
HARD = frozenset(
    {
        FaultKind.CUT,
        FaultKind.CRASH_LEADER,
        FaultKind.CRASH_RANK,
        FaultKind.TARGET_DIES,
        FaultKind.BAD_ROW,
        FaultKind.STALL,
        FaultKind.FLIP,
        FaultKind.LATE_FENCE,
        FaultKind.UNEQUAL,
    }
)


def play(seed: int, size: int, rounds: int, factor: float = 1.5, machines: Machines | None = None) -> Report:
    return World(Setup(seed, rounds, size, 1, slow=0.01 if factor else 0.0), plan(seed, rounds, HARD, factor), machines).play()


@pytest.mark.parametrize("size", (2, 3, 4))
@pytest.mark.parametrize("seed", (1, 2, 3))
def test_the_invariants_hold_under_faults(seed: int, size: int) -> None:
    report = play(seed, size, ROUNDS)
    assert ROUNDS + ROUNDS_IN_PEACE <= report.rounds <= ROUNDS + ROUNDS_IN_PEACE + 2
    assert report.ends["committed"] > ROUNDS // 2


def test_eight_ranks() -> None:
    assert play(4, 8, 60).ends["committed"] > 20


def test_peace_loses_nothing() -> None:
    report = play(5, 3, 100, factor=0.0)
    assert (report.ends["committed"], report.epochs, report.disagreements) == (report.rounds, 1, 0)


def test_unequal_states_are_met_and_mended() -> None:
    """Ranks that answer with their states as they are disagree, are counted, and agree in a later epoch."""
    kinds = {FaultKind.CUT, FaultKind.UNEQUAL}
    world = World(Setup(8, 300, 3, targets=1), plan(8, 300, kinds, 40.0))
    report = world.play()
    assert report.disagreements > 0
    assert world.targets[0].zero.counters.of(Reason.RANK_DISAGREE) == report.disagreements


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
    with pytest.raises(Violation):
        _play_all(machines)


def _play_all(machines: Machines) -> None:
    for seed in range(1, 13):
        play(seed, 3, 400, 2.0, machines)
