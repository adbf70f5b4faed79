"""What an attempt to break the rules of SPEC section 4 with real daemons found: one test for each finding."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import numpy as np
import pytest
from daemon_rig import PROMPT, SMALL, VOCAB, WATCHDOG_S, Bed, drafting

from pp1q_transport.client import AttachedLeader, AttachedReceiver, Step, attach_leader, attach_receiver
from pp1q_transport.errors import PeerFault, ProposalDiscarded, Reason
from pp1q_transport.session.breaker import Breaker, BreakerState

pytestmark = pytest.mark.timeout(120)

TWO = dataclasses.replace(SMALL, ranks=2)
SUPPORT = 16


@pytest.fixture(scope="module")
def pair() -> Iterator[Bed]:
    """Three daemons of a group of two ranks with a draft; tests attach targets of their own."""
    with Bed(TWO) as bed, drafting(bed.up()):
        yield bed


@contextmanager
def ranks(bed: Bed) -> Iterator[tuple[AttachedReceiver, AttachedReceiver]]:
    """Targets of both ranks in this thread, their epoch open."""
    with attach_receiver(bed.socket("receiver0"), 0) as first, attach_receiver(bed.socket("receiver1"), 1) as second:
        for each in (first, second):
            each.on_agree(lambda _epoch, committed: committed)
        form(first, second)
        yield first, second


def form(*receivers: AttachedReceiver) -> None:
    """Lets every rank agree, in turn."""
    until(lambda: sum(tried(each) for each in receivers) == len(receivers), (), "the epoch opens", 15.0)


def tried(receiver: AttachedReceiver) -> bool:
    try:
        receiver.wait_for_peer(0.005)
    except PeerFault as fault:
        if fault.reason is not Reason.TIMEOUT:
            raise
        return False
    return True


def until(found: Callable[[], object], receivers: tuple[AttachedReceiver, ...], what: str, within_s: float = WATCHDOG_S) -> None:
    """Serves the targets until something is so."""
    stop = time.monotonic() + within_s
    while not found():
        for each in receivers:
            each.serve(time.monotonic_ns() + 1_000_000)
        assert time.monotonic() < stop, what
        time.sleep(0.001)


def test_a_proposal_whose_commit_comes_after_the_epoch_gives_its_slot_back(pair: Bed) -> None:
    """Both ranks hold a ready proposal, know that the epoch is over, and commit all the same."""
    with ranks(pair) as (first, second):
        requests = [each.open_request(1, PROMPT, seed=5) for each in (first, second)]
        tickets = [each.enqueue(request, support=SUPPORT) for each, request in zip((first, second), requests, strict=True)]
        proposals = [ticket.wait() for ticket in tickets]
        second.close()
        with attach_receiver(pair.socket("receiver1"), 1) as third:
            third.on_agree(lambda _epoch, committed: committed)
            third.open_request(1, PROMPT, seed=5)
            until(lambda: not first.up, (first, third), "the epoch ends")
            with pytest.raises(ProposalDiscarded), proposals[0]:
                proposals[0].commit(0, [7])
            form(first, third)
            until(lambda: pair.status("receiver0")["slots"]["FREE"] == 4, (first, third), "every slot is free", 5.0)


def test_a_request_closed_by_one_rank_before_its_outcome_keeps_no_slot(pair: Bed) -> None:
    with ranks(pair) as (first, second):
        for number in range(1, 7):
            ahead = second.open_request(number, PROMPT, seed=number)
            second.enqueue(ahead, support=SUPPORT)
            second.close_request(ahead)
            second.ping()
            behind = first.open_request(number, PROMPT, seed=number)
            with first.step(behind, support=SUPPORT, budget_us=3_000_000):
                pass
            first.close_request(behind)


def test_a_request_opened_again_meets_no_outcome_of_its_earlier_life(pair: Bed) -> None:
    with ranks(pair) as (first, second):
        ahead = second.open_request(9, PROMPT, seed=9)
        second.enqueue(ahead, support=SUPPORT)
        second.close_request(ahead)
        ahead = second.open_request(9, PROMPT, seed=9)
        ticket = second.enqueue(ahead, support=SUPPORT)
        behind = first.open_request(9, PROMPT, seed=9)
        first.step(behind, support=SUPPORT).release()
        first.close_request(behind)
        behind = first.open_request(9, PROMPT, seed=9)
        with first.step(behind, support=SUPPORT) as theirs, ticket.wait() as ours:
            for name in ("slot_generation", "generation", "round"):
                assert getattr(ours, name) == getattr(theirs, name)


def test_a_target_that_cancels_what_waits_for_slots_is_not_cut_off(pair: Bed) -> None:
    with ranks(pair) as (first, _second):
        for number in range(1, 5):  # rank 1 has not asked for these: its slots are taken
            first.step(first.open_request(number, PROMPT, seed=number), support=SUPPORT).release()
        for number in range(10, 30):
            request = first.open_request(number, PROMPT, seed=number)
            first.enqueue(request, support=SUPPORT, budget_us=60_000_000)
            first.ping()
            first.close_request(request)
        first.ping()
        assert first.attached
        assert first.counters.get("daemon_lost") == 0


def test_a_step_that_rank_0_can_not_take_is_told_to_the_others(pair: Bed) -> None:
    with ranks(pair) as (first, second):
        requests = [each.open_request(999, PROMPT, seed=5, generation=0xFFFFFFFF) for each in (first, second)]
        ticket = second.enqueue(requests[1], support=SUPPORT)
        with pytest.raises(ProposalDiscarded) as theirs:
            first.step(requests[0], support=SUPPORT)
        until(lambda: ticket.known, (first, second), "rank 1 hears of it", 5.0)
        with pytest.raises(ProposalDiscarded) as ours:
            ticket.wait()
        for name in ("reason", "round", "generation"):
            assert getattr(ours.value, name) == getattr(theirs.value, name)
    # and a request whose generations ran out keeps nobody from leaving


def test_a_hook_that_raises_is_asked_again(pair: Bed) -> None:
    def bad(_epoch: int, _committed: object) -> dict[int, list[int]]:
        raise RuntimeError("the collective broke")

    with attach_receiver(pair.socket("receiver0"), 0) as first, attach_receiver(pair.socket("receiver1"), 1) as second:
        second.on_agree(lambda _epoch, committed: committed)
        first.on_agree(bad)
        with pytest.raises(RuntimeError):
            form(second, first)
        first.on_agree(lambda _epoch, committed: committed)
        form(first, second)


def test_ranks_count_the_rounds_of_rank_0_even_of_steps_that_were_not_sent() -> None:
    """No leader is there: every STEP is refused in generation 0, and rank 1 missed one before the epoch ended."""
    with Bed(TWO) as bed:
        bed.up("receiver0", "receiver1")
        with ranks(bed) as (first, second):
            requests = [each.open_request(1, PROMPT, seed=5) for each in (first, second)]
            with pytest.raises(ProposalDiscarded):
                first.step(requests[0], support=SUPPORT)
            bed.kill("receiver1")
            bed.start("receiver1")
            until(lambda: not tried(first), (), "its epoch ends")
            form(first, second)
            assert second.counters.get("daemon_lost") == 1, "a loop of waits noticed"
            rounds = []
            for each, request in zip((first, second), requests, strict=True):
                with pytest.raises(ProposalDiscarded) as discarded:
                    each.step(request, support=SUPPORT)
                rounds.append((discarded.value.round, discarded.value.generation or request.generation))
            assert rounds[0] == rounds[1]


def test_a_step_of_an_earlier_session_puts_nothing_into_a_later_one() -> None:
    """The receiver's daemon is restarted while the draft computes: its slots count their generations from 1 again."""
    with Bed() as bed, attach_leader(bed.up().socket("leader")) as leader, bed.receiver() as receiver:
        receiver.wait_for_peer()
        request = receiver.open_request(1, PROMPT, seed=5)
        ticket = receiver.enqueue(request, support=SUPPORT)
        old = taken(leader)
        bed.kill("receiver0")
        until(lambda: ticket.known, (receiver,), "its daemon is gone")
        receiver.commit_target_only(request, ticket.round, [3])
        bed.up("receiver0")
        receiver.wait_for_peer()
        ticket = receiver.enqueue(request, support=SUPPORT, budget_us=20_000_000)
        bed.until(lambda: bed.counters("leader").get("sessions") == 2, "the second session")
        time.sleep(0.2)  # its STEP waits in the draft's ring
        weights = np.ones(VOCAB)
        assert old.put(old.positions[0], weights=weights) is None
        new = taken(leader)
        assert (new.slot, new.slot_generation) == (old.slot, old.slot_generation), "or this tests nothing"
        for position in new.positions:
            assert new.put(position, weights=weights) is not None
        ticket.wait().release()
        assert leader.counters.get("daemon_lost") == 0


def taken(leader: AttachedLeader) -> Step:
    """The next STEP."""
    for _ in range(1000):
        step = leader.next_step(20_000_000)
        if step is not None:
            return step
    raise AssertionError("no STEP")


def test_a_rank_that_is_too_far_behind_leaves_instead_of_missing_an_outcome() -> None:
    with Bed(TWO) as bed:
        bed.up("receiver0", "receiver1")  # no leader: STEPs are refused at once
        with ranks(bed) as (first, second):
            requests = [each.open_request(1, PROMPT, seed=5) for each in (first, second)]
            for _ in range(20_000):
                with pytest.raises(ProposalDiscarded) as discarded:
                    first.step(requests[0], support=SUPPORT)
                if not first.up:
                    break
                with suppress(ProposalDiscarded):  # the epoch's end is heard of here as well
                    first.commit_target_only(requests[0], discarded.value.round, [3])
            assert not first.up, "rank 1 has not taken one outcome"
            assert requests[0].round > 1000
            for each in (first, second):
                each.on_agree(lambda _epoch, committed: {1: requests[0].tokens})
            form(first, second)
            for each, request in zip((first, second), requests, strict=True):
                with pytest.raises(ProposalDiscarded) as discarded_now:
                    each.step(request, support=SUPPORT)
                assert discarded_now.value.round == requests[0].round - 1


def test_ranks_that_never_agree_do_not_ask_each_other_without_end(pair: Bed) -> None:
    before = pair.counters("receiver0").get("epochs_ended", 0)
    with attach_receiver(pair.socket("receiver0"), 0) as first, attach_receiver(pair.socket("receiver1"), 1) as second:
        for rank, each in enumerate((first, second)):
            each.open_request(1, PROMPT, seed=5)
            each.on_agree(lambda _epoch, _committed, rank=rank: {1: [1, 2, rank]})
        stop = time.monotonic() + 1.0
        while time.monotonic() < stop:
            tried(first)
            tried(second)
        assert pair.status("receiver0")["reasons"]["rank_disagree"] > 1
        assert pair.counters("receiver0")["epochs_ended"] - before < 30
        for each in (first, second):
            each.on_agree(lambda _epoch, _committed: {1: [1, 2, 3]})
        form(first, second)


def test_a_commit_of_a_request_that_the_daemon_could_not_open_is_answered(pair: Bed) -> None:
    with ranks(pair) as (first, _second):
        earlier = first.open_request(77, PROMPT, seed=5, generation=0xFFFFFFFF)
        first.close_request(earlier)
        first.requests._spent.clear()  # as another process would not know
        request = first.open_request(77, PROMPT, seed=5)
        until(lambda: first.counters.get("refused_by_daemon"), (first,), "refused")
        first.commit_target_only(request, 0, [3])
        assert first.counters.get("daemon_lost") == 0


def test_a_budget_that_ends_in_the_queue_for_slots_is_noticed_behind_a_longer_one(pair: Bed) -> None:
    with ranks(pair) as (first, _second):
        for number in range(1, 5):  # rank 1 has not asked for these: its slots are taken
            first.step(first.open_request(number, PROMPT, seed=number), support=SUPPORT).release()
        first.enqueue(first.open_request(5, PROMPT, seed=5), support=SUPPORT, budget_us=60_000_000)
        with pytest.raises(ProposalDiscarded) as discarded:
            first.step(first.open_request(6, PROMPT, seed=6), support=SUPPORT, budget_us=50_000)
        assert discarded.value.reason is Reason.TIMEOUT
        assert first.attached
        assert first.counters.get("daemon_lost") == 0


def test_requests_that_came_back_with_spent_keys_do_not_open_the_breaker() -> None:
    breaker = Breaker(2, 1_000, 1_000, 1)
    for _ in range(8):
        breaker.discarded(Reason.KEY_REUSE, 1, breaker.may_step(1))
    assert breaker.state is BreakerState.CLOSED
