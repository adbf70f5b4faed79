"""The two machines of a rank group, each pair of state and input against its table, and what no table shows."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.session.group import (
    EPOCH_TRANSITIONS,
    MAX_RANKS,
    PROPOSAL_TRANSITIONS,
    READY,
    Announce,
    Coordinator,
    Decide,
    Disagreed,
    Event,
    Fate,
    Freed,
    Lost,
    Phase,
    Proposal,
    Turn,
)
from pp1q_transport.session.group_member import BALLOTS, STANDINGS, UNDECIDED, Ballot, Mark, Member, Paper, Sign, Standing

R = Reason
A = (1, 2)
B = (3, 4)
MASS = R.MASS.code
TIMEOUT = R.TIMEOUT.code
PEER_LOST = R.PEER_LOST.code


def opened(size: int = 3, floor: int = 0) -> Coordinator:
    """A coordinator in its first open epoch."""
    group = Coordinator(size)
    for rank in range(1, size):
        group.member_up(rank)
    for rank in range(size):
        group.agreed(rank, 1, A, floor if rank == size - 1 else 0)
    assert group.open
    return group


def joined(nonce: int = 9) -> Member:
    """Rank 1 of 3 in its first open epoch."""
    member = Member(1, 3)
    member.link_up(nonce)
    assert member.announced(1, Phase.ASKING) == []
    assert member.agree() == 1
    assert member.announced(1, Phase.OPEN) == []
    assert member.open
    return member


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pair", tuple(itertools.product(Fate, Event)), ids=str)
def test_every_proposal_event_moves_as_listed_or_raises(pair: tuple[Fate, Event]) -> None:
    proposal = Proposal(1, 0, 1, 0, fate=pair[0])
    if pair in PROPOSAL_TRANSITIONS:
        proposal.move(pair[1])
        assert proposal.fate is PROPOSAL_TRANSITIONS[pair]
    else:
        with pytest.raises(LocalMisuse):
            proposal.move(pair[1])
        assert proposal.fate is pair[0]


@pytest.mark.parametrize("pair", tuple(itertools.product(Ballot, Mark)), ids=str)
def test_every_mark_moves_as_listed_or_raises(pair: tuple[Ballot, Mark]) -> None:
    paper = Paper(1, 0, 1, ballot=pair[0])
    if pair in BALLOTS:
        paper.move(pair[1])
        assert paper.ballot is BALLOTS[pair]
    else:
        with pytest.raises(LocalMisuse):
            paper.move(pair[1])
        assert paper.ballot is pair[0]


def test_the_tables_say_what_the_contract_says() -> None:
    into_ready = {pair for pair, after in PROPOSAL_TRANSITIONS.items() if after is Fate.READY}
    assert into_ready == {(Fate.VOTING, Event.ALL_READY)}, "READY takes every vote"
    assert {pair[0] for pair in PROPOSAL_TRANSITIONS} == set(Fate) - {Fate.CLOSED}
    into_ready_here = {pair for pair, after in BALLOTS.items() if after is Ballot.READY}
    assert into_ready_here == {(Ballot.WAITING, Mark.DECIDED_READY)}, "no rank is ready without its own vote"
    out_of_waiting = {mark for ballot, mark in BALLOTS if ballot is Ballot.WAITING}
    assert out_of_waiting == {Mark.DECIDED_READY, Mark.DECIDED_NO, Mark.EPOCH_END}, "nothing else ends the wait"
    assert all((ballot, Mark.EPOCH_END) in BALLOTS for ballot in Ballot)
    into_open = {pair for pair, after in EPOCH_TRANSITIONS.items() if after[0] is Phase.OPEN}
    assert into_open == {(Phase.ASKING, Turn.ALL_EQUAL)}
    deaths = {phase: ends for (phase, turn), (_, ends) in EPOCH_TRANSITIONS.items() if turn is Turn.DEATH}
    assert deaths == {Phase.GATHERING: False, Phase.ASKING: True, Phase.OPEN: True}
    assert {pair for pair, after in STANDINGS.items() if after is Standing.OPEN} == {(Standing.AGREED, Sign.OPEN)}
    assert {Ballot.GRANTED, Ballot.WAITING, Ballot.REFUSED} == UNDECIDED


@pytest.mark.parametrize("size", (-1, 0, 1, MAX_RANKS + 1))
def test_impossible_groups_are_refused(size: int) -> None:
    with pytest.raises(LocalMisuse):
        Coordinator(size)
    with pytest.raises(LocalMisuse):
        Member(1, size)


@pytest.mark.parametrize("rank", (-1, 0, 3))
def test_impossible_members_are_refused(rank: int) -> None:
    with pytest.raises(LocalMisuse):
        Member(rank, 3)
    group = opened()
    with pytest.raises(LocalMisuse):
        group.member_up(rank)
    with pytest.raises(LocalMisuse):
        group.released(rank, 1, 0, 1)


# --- epochs at rank 0 -----------------------------------------------------------------------------------------------


def test_an_epoch_opens_when_all_are_up_and_equal() -> None:
    group = Coordinator(3)
    assert group.member_up(2) == []
    assert not group.asking
    assert group.member_up(1) == [Announce(1, Phase.ASKING)]
    assert group.asking
    assert group.agreed(0, 1, A) == []
    assert not group.asking
    assert group.agreed(2, 1, A, floor=7) == []
    assert group.agreed(2, 1, A, floor=7) == [], "repeated"
    assert group.floor == 0, "nothing is taken over before the epoch opens"
    assert group.agreed(1, 1, A, floor=3) == [Announce(1, Phase.OPEN)]
    assert (group.open, group.floor) == (True, 7)
    assert group.agreed(1, 1, A) == [], "repeated in the open epoch"


def test_unequal_states_are_counted_and_the_next_epoch_asks_again() -> None:
    group = Coordinator(2)
    group.member_up(1)
    group.agreed(1, 1, B)
    assert group.agreed(0, 1, A) == [Disagreed(1, (A, B)), Announce(2, Phase.ASKING)]
    assert (group.disagreements, group.epoch, group.open, group.asking) == (1, 2, False, True)
    assert group.agreed(1, 1, B) == [], "an answer to the last epoch"
    assert group.stale == 1
    group.agreed(1, 2, A)
    assert group.agreed(0, 2, A) == [Announce(2, Phase.OPEN)]


def test_a_death_ends_the_epoch_and_what_was_in_it() -> None:
    group = opened()
    for slot in range(3):
        group.granted(slot, 1)
    for rank in range(3):
        group.vote(rank, 1, 0, 1, READY)
        if rank < 2:
            group.vote(rank, 1, 1, 1, READY)
    assert group.may_commit(1, 0, 1)
    assert group.member_down(2) == [Lost(1, 1, 1), Lost(1, 2, 1), Announce(2, Phase.GATHERING)]
    assert not group.may_commit(1, 0, 1)
    assert [group.proposals[slot].fate for slot in range(3)] == [Fate.VOID, Fate.DISCARDED, Fate.DISCARDED]
    assert group.proposals[1].code == PEER_LOST
    assert group.vote(1, 1, 2, 1, READY) == [], "a vote that crossed the end"
    assert group.stale == 1
    with pytest.raises(LocalMisuse):
        group.granted(3, 1)
    assert group.member_up(2) == [Announce(2, Phase.ASKING)]
    for rank in range(3):
        group.agreed(rank, 2, B)
    assert group.open
    assert not group.may_commit(1, 0, 1), "its epoch is over for good"
    assert not group.may_commit(2, 0, 1)


def test_a_death_before_anything_began_ends_nothing() -> None:
    group = Coordinator(3)
    group.member_up(1)
    assert group.member_down(1) == []
    assert group.member_down(1) == []
    assert group.epoch == 1


def test_a_rank_that_comes_back_unnoticed_was_dead() -> None:
    group = opened()
    group.granted(0, 1)
    assert group.member_up(1) == [Lost(1, 0, 1), Announce(2, Phase.GATHERING), Announce(2, Phase.ASKING)]


@pytest.mark.parametrize("rank", (0, 1))
def test_a_rank_that_leaves_ends_the_epoch_but_gives_back_what_it_holds(rank: int) -> None:
    group = opened()
    group.granted(0, 1)
    assert group.left(rank, 1) == [Lost(1, 0, 1), Announce(2, Phase.ASKING)]
    assert group.left(rank, 1) == [], "repeated, from before the end"
    assert group.left(rank, 2) == [], "it has not agreed yet"
    assert group.released(1, 1, 0, 1) == []
    assert group.released(2, 1, 0, 1) == [Freed(0, 1)]
    group.agreed(rank, 2, A)
    assert group.left(rank, 2) == [Announce(3, Phase.ASKING)], "it had agreed"


def test_an_agreement_gives_back_what_an_ended_epoch_held() -> None:
    group = opened()
    group.granted(0, 1)
    group.left(1, 1)
    group.agreed(0, 2, A)
    assert group.waiting(1) == group.waiting(2) == 1
    assert group.agreed(1, 2, A) == []
    assert group.agreed(2, 2, A) == [Freed(0, 1), Announce(2, Phase.OPEN)]
    group.granted(0, 2)


EPOCH_FAULTS: tuple[tuple[str, Reason, Callable[[Coordinator], object]], ...] = (
    ("agree on a coming epoch", R.RANK_DISAGREE, lambda group: group.agreed(1, 2, A)),
    ("two states in one epoch", R.RANK_DISAGREE, lambda group: group.agreed(1, 1, B)),
    ("leave a coming epoch", R.RANK_DISAGREE, lambda group: group.left(1, 2)),
    ("vote in a coming epoch", R.RANK_DISAGREE, lambda group: group.vote(1, 2, 0, 1, READY)),
    ("vote on a slot never granted", R.SLOT_STATE, lambda group: group.vote(1, 1, 1, 1, READY)),
    ("vote on a coming generation", R.SLOT_STATE, lambda group: group.vote(1, 1, 0, 2, READY)),
    ("give back a slot never granted", R.SLOT_STATE, lambda group: group.released(1, 1, 1, 1)),
    ("give back a coming generation", R.SLOT_STATE, lambda group: group.released(1, 1, 0, 2)),
    ("give back what is not decided", R.SLOT_STATE, lambda group: group.released(1, 1, 0, 1)),
)


@pytest.mark.parametrize("case", EPOCH_FAULTS, ids=lambda case: case[0])
def test_what_a_member_may_never_say(case: tuple[str, Reason, Callable[[Coordinator], object]]) -> None:
    group = opened()
    group.granted(0, 1)
    with pytest.raises(PeerFault) as caught:
        case[2](group)
    assert caught.value.reason is case[1]
    assert (group.epoch, group.phase, group.stale) == (1, Phase.OPEN, 0)
    assert (group.proposals[0].fate, group.proposals[0].votes) == (Fate.VOTING, {})


@pytest.mark.parametrize("call", (lambda group: group.agreed(1, 1, A), lambda group: group.left(1, 1)), ids=("agree", "leave"))
def test_nothing_can_be_said_of_an_epoch_that_only_gathers(call: Callable[[Coordinator], object]) -> None:
    group = Coordinator(3)
    group.member_up(1)
    with pytest.raises(PeerFault, match="rank_disagree"):
        call(group)


# --- decisions at rank 0 --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("order", tuple(itertools.permutations(range(3))), ids=str)
def test_ready_takes_every_vote_in_any_order(order: tuple[int, ...]) -> None:
    group = opened()
    group.granted(5, 1)
    for rank in order[:-1]:
        assert group.vote(rank, 1, 5, 1, READY) == []
        assert not group.may_commit(1, 5, 1)
    assert group.vote(order[-1], 1, 5, 1, READY) == [Decide(1, 5, 1, READY)]
    assert group.may_commit(1, 5, 1)
    assert not group.may_commit(1, 5, 2)
    assert not group.may_commit(1, 4, 1)


@pytest.mark.parametrize("rank", range(3))
def test_the_first_failure_decides(rank: int) -> None:
    group = opened()
    group.granted(5, 1)
    assert group.vote(rank, 1, 5, 1, MASS) == [Decide(1, 5, 1, MASS)]
    other = (rank + 1) % 3
    assert group.vote(other, 1, 5, 1, TIMEOUT) == [], "decided already"
    assert group.vote((rank + 2) % 3, 1, 5, 1, READY) == [], "on its way when it was decided"
    assert group.fail(5, 1, TIMEOUT) == []
    assert group.proposals[5].code == MASS
    assert not group.may_commit(1, 5, 1)


def test_rank_0_may_fail_a_proposal_after_its_own_ready_vote() -> None:
    group = opened()
    group.granted(5, 1)
    group.vote(0, 1, 5, 1, READY)
    assert group.fail(5, 1, TIMEOUT) == [Decide(1, 5, 1, TIMEOUT)]
    assert group.vote(1, 1, 5, 1, READY) == []
    assert group.vote(2, 1, 5, 1, READY) == []
    assert group.proposals[5].fate is Fate.DISCARDED


def test_a_decision_of_ready_stands() -> None:
    group = opened(2)
    group.granted(0, 1)
    group.vote(0, 1, 0, 1, READY)
    group.vote(1, 1, 0, 1, READY)
    assert group.fail(0, 1, TIMEOUT) == []
    assert group.vote(1, 1, 0, 1, READY) == [], "repeated"
    assert group.may_commit(1, 0, 1)


@pytest.mark.parametrize("codes", ((READY, MASS), (MASS, READY), (MASS, TIMEOUT)), ids=str)
def test_a_rank_can_not_change_its_vote(codes: tuple[int, int]) -> None:
    group = opened()
    group.granted(0, 1)
    group.vote(1, 1, 0, 1, codes[0])
    with pytest.raises(PeerFault, match="rank_disagree"):
        group.vote(1, 1, 0, 1, codes[1])
    assert group.proposals[0].votes == {1: codes[0]}


def test_a_slot_is_granted_again_when_every_member_gave_it_back() -> None:
    group = opened()
    group.granted(0, 1)
    for rank in range(3):
        group.vote(rank, 1, 0, 1, READY)
    assert group.released(1, 1, 0, 1) == []
    assert group.released(1, 1, 0, 1) == [], "repeated"
    with pytest.raises(LocalMisuse):
        group.granted(0, 2)
    with pytest.raises(PeerFault, match="slot_state"):
        group.vote(1, 1, 0, 1, READY)
    assert group.released(2, 1, 0, 1) == [Freed(0, 1)]
    assert group.released(2, 1, 0, 1) == []
    assert group.may_commit(1, 0, 1), "rank 0 may commit behind the members"
    with pytest.raises(LocalMisuse):
        group.granted(0, 1)
    group.granted(0, 2)
    assert not group.may_commit(1, 0, 1)


def test_a_lost_member_holds_nothing() -> None:
    group = opened()
    group.granted(0, 1)
    group.vote(1, 1, 0, 1, MASS)
    group.released(1, 1, 0, 1)
    assert group.member_down(2) == [Freed(0, 1), Announce(2, Phase.GATHERING)]
    assert group.released(1, 1, 4, 9) == [], "of an epoch that is over"


def test_epochs_run_out() -> None:
    group = opened()
    group.epoch = 0xFFFFFFFF
    with pytest.raises(PeerFault, match="generation_exhausted"):
        group.member_down(1)


# --- a member -------------------------------------------------------------------------------------------------------


def test_a_member_goes_through_an_epoch() -> None:
    member = joined()
    assert member.granted(1, 0, 1)
    assert member.vote(0, 1, READY) == 1
    assert member.vote(0, 1, MASS) == 0, "one vote"
    assert not member.may_commit(1, 0, 1)
    assert member.decided(1, 0, 1, READY)
    assert not member.decided(1, 0, 1, READY), "repeated"
    assert member.may_commit(1, 0, 1)
    assert member.returns(0, 1) == 1
    assert member.returns(0, 1) == 0, "once"
    assert member.may_commit(1, 0, 1)
    assert member.granted(1, 0, 2)


def test_votes_on_what_is_not_there_are_not_sent() -> None:
    member = joined()
    assert member.vote(0, 1, READY) == 0
    member.granted(1, 0, 1)
    assert member.vote(0, 2, READY) == 0
    member.decided(1, 0, 1, TIMEOUT)
    assert member.vote(0, 1, READY) == 0, "decided meanwhile"
    assert member.returns(0, 2) == 0


def test_the_end_of_an_epoch_voids_what_is_undecided_and_what_is_ready() -> None:
    member = joined()
    for slot in range(4):
        member.granted(1, slot, 1)
    member.vote(1, 1, READY)
    member.vote(2, 1, MASS)
    member.vote(3, 1, READY)
    member.decided(1, 3, 1, READY)
    lost = member.announced(2, Phase.GATHERING)
    assert [paper.slot for paper in lost] == [0, 1, 2]
    assert not member.may_commit(1, 3, 1)
    assert {paper.ballot for paper in member.papers.values()} == {Ballot.LOST}
    assert member.returns(3, 1) == 1, "the link lives, so rank 0 hears of it"
    with pytest.raises(PeerFault, match="generation_stale"):
        member.decided(1, 0, 1, READY)
    with pytest.raises(PeerFault, match="slot_state"):
        member.granted(2, 4, 1)


def test_a_lost_link_ends_the_epoch_and_it_can_not_come_back() -> None:
    member = joined()
    member.granted(1, 0, 1)
    assert [paper.slot for paper in member.link_down()] == [0]
    assert member.returns(0, 1) == 0, "nobody would hear it"
    member.link_up(9)
    with pytest.raises(PeerFault, match="generation_stale"):
        member.announced(1, Phase.ASKING)
    member.announced(2, Phase.ASKING)
    assert member.asked


def test_another_life_of_rank_0_counts_anew() -> None:
    member = joined()
    member.link_down()
    member.link_up(10)
    member.announced(1, Phase.ASKING)
    assert member.epoch == 1
    with pytest.raises(LocalMisuse):
        member.link_up(11)


def test_an_epoch_that_only_gathered_may_come_again() -> None:
    member = joined()
    member.announced(2, Phase.GATHERING)
    member.link_down()
    member.link_up(9)
    member.announced(2, Phase.ASKING)
    member.agree()
    member.announced(3, Phase.ASKING)
    with pytest.raises(PeerFault, match="rank_disagree"):
        member.announced(3, Phase.OPEN)  # we have not agreed
    assert (member.standing, member.epoch) == (Standing.ASKED, 3)


def test_what_crosses_our_leave_is_void() -> None:
    member = joined()
    member.granted(1, 0, 1)
    lost = member.leave()
    assert lost is not None
    assert [paper.slot for paper in lost] == [0]
    assert member.leave() is None, "once"
    assert not member.granted(1, 1, 1)
    assert not member.decided(1, 0, 1, READY)
    assert not member.decided(1, 1, 1, READY)
    assert not member.may_commit(1, 0, 1)
    member.announced(2, Phase.ASKING)
    assert member.asked


def test_a_leave_that_crosses_the_opening() -> None:
    member = Member(1, 2)
    assert member.leave() is None
    member.link_up(1)
    member.announced(1, Phase.ASKING)
    assert member.leave() is None, "it only has to agree later"
    member.agree()
    assert member.leave() == []
    member.announced(1, Phase.OPEN)
    assert not member.open
    assert not member.granted(1, 0, 1)


@pytest.mark.parametrize("standing", [standing for standing in Standing if standing is not Standing.ASKED], ids=str)
def test_nobody_agrees_unasked(standing: Standing) -> None:
    member = Member(1, 2)
    member.standing = standing
    with pytest.raises(LocalMisuse):
        member.agree()


MEMBER_FAULTS: tuple[tuple[str, Reason, Callable[[Member], object]], ...] = (
    ("phase 0", R.RESERVED_BITS, lambda member: member.announced(2, 0)),
    ("phase 4", R.RESERVED_BITS, lambda member: member.announced(2, 4)),
    ("epoch 0", R.GENERATION_STALE, lambda member: member.announced(0, Phase.ASKING)),
    ("the open epoch gathers", R.RANK_DISAGREE, lambda member: member.announced(1, Phase.GATHERING)),
    ("the open epoch asks", R.RANK_DISAGREE, lambda member: member.announced(1, Phase.ASKING)),
    ("the open epoch opens", R.RANK_DISAGREE, lambda member: member.announced(1, Phase.OPEN)),
    ("an epoch opens unasked", R.RANK_DISAGREE, lambda member: member.announced(2, Phase.OPEN)),
    ("grant in the last epoch", R.GENERATION_STALE, lambda member: member.granted(0, 1, 1)),
    ("grant in a coming epoch", R.RANK_DISAGREE, lambda member: member.granted(2, 1, 1)),
    ("grant of a slot in use", R.SLOT_STATE, lambda member: member.granted(1, 0, 2)),
    ("grant of a decided slot in use", R.SLOT_STATE, lambda member: member.granted(1, 2, 2)),
    ("grant of an old generation", R.GENERATION_STALE, lambda member: member.granted(1, 3, 1)),
    ("decision in the last epoch", R.GENERATION_STALE, lambda member: member.decided(0, 0, 1, READY)),
    ("decision in a coming epoch", R.RANK_DISAGREE, lambda member: member.decided(2, 0, 1, READY)),
    ("decision on a slot never granted", R.SLOT_STATE, lambda member: member.decided(1, 9, 1, READY)),
    ("decision on a coming generation", R.SLOT_STATE, lambda member: member.decided(1, 0, 2, READY)),
    ("ready without our vote", R.RANK_DISAGREE, lambda member: member.decided(1, 0, 1, READY)),
    ("ready against our vote", R.RANK_DISAGREE, lambda member: member.decided(1, 1, 1, READY)),
    ("another decision", R.RANK_DISAGREE, lambda member: member.decided(1, 2, 1, READY)),
)


@pytest.mark.parametrize("case", MEMBER_FAULTS, ids=lambda case: case[0])
def test_what_rank_0_may_never_say(case: tuple[str, Reason, Callable[[Member], object]]) -> None:
    member = joined()
    for slot in range(4):
        member.granted(1, slot, 1)
    member.vote(1, 1, MASS)
    member.decided(1, 2, 1, TIMEOUT)
    member.decided(1, 3, 1, TIMEOUT)
    member.returns(3, 1)
    before = {slot: (paper.generation, paper.ballot) for slot, paper in member.papers.items()}
    with pytest.raises(PeerFault) as caught:
        case[2](member)
    assert caught.value.reason is case[1]
    assert (member.epoch, member.standing) == (1, Standing.OPEN)
    assert {slot: (paper.generation, paper.ballot) for slot, paper in member.papers.items()} == before
