"""The client API over the real transport: what comes out, that it is a view of the slot, and how it ends."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from system_rig import PROMPT, VOCAB, MakeRig, Rig, consume, expected, go_on_alone, one_round, open_descriptors

from pp1q_transport.client import Leader, Proposal, Receiver, Step
from pp1q_transport.dyadic import MASS, allocate, allocate_top_k, draw, draw_sparse, to_q
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, ProposalDiscarded, Reason
from pp1q_transport.rng import Domain, draw24
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.reference import Mode, run_reference

pytestmark = pytest.mark.timeout(60)


# ---- what comes out ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", ("receiver", "leader"))
@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_tokens_equal_the_reference_whoever_listens(make_rig: MakeRig, listens: str, support: int | None) -> None:
    rig = make_rig(listens=listens)
    with rig.drafting():
        request = rig.receiver.open_request(1, PROMPT, seed=11)
        for _ in range(30):
            assert one_round(rig.models, rig.receiver, request, support=support)[2]
    mode = Mode.DENSE if support is None else Mode.SPARSE
    assert request.tokens.tolist()[2:] == run_reference(rig.models, 11, 30, 3, mode, support=support or 1)
    assert rig.all_free()


def test_dense_and_sparse_and_ragged_depths_share_a_session(make_rig: MakeRig) -> None:
    rig = make_rig()
    shapes = {1: (None, 3), 2: (16, 1), 3: (1, 2), 4: (None, 1)}
    with rig.drafting():
        requests = {one: rig.receiver.open_request(one, PROMPT, seed=100 + one) for one in shapes}
        for _ in range(8):
            tickets = {
                one: rig.receiver.enqueue(requests[one], support=support, depth=depth)
                for one, (support, depth) in shapes.items()
            }
            for one, ticket in tickets.items():
                proposal = ticket.wait()
                assert (proposal.depth, proposal.sparse) == (shapes[one][1], shapes[one][0] is not None)
                with proposal:
                    consume(rig.models, rig.receiver, requests[one], proposal)
    for one, (support, depth) in shapes.items():
        journal = [(number, 0, True) for number in range(8)]
        want = expected(rig.models, 100 + one, journal, depth=depth, support=support)
        assert requests[one].tokens.tolist()[2:] == want
    assert rig.receiver.totals()["ready"] == 32
    assert rig.all_free()


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_q_is_the_distribution_that_was_drawn_from(rig: Rig, support: int | None) -> None:
    request = rig.receiver.open_request(1, PROMPT, seed=5)
    ticket = rig.receiver.enqueue(request, support=support, target_context=77, trace_id=99, temperature=0.5)
    step = rig.next_step()
    assert (step.request, step.round, step.generation, step.anchor, step.depth) == (1, 0, 0, 1, 3)
    assert (step.target_context, step.trace_id, step.temperature, step.support) == (77, 99, 0.5, support)
    assert step.tokens.tolist() == list(PROMPT)
    assert list(step.positions) == [2, 3, 4]
    weights = [np.random.default_rng(row).random(VOCAB) for row in range(3)]
    drawn = [step.put(position, weights=row) for position, row in zip(step.positions, weights, strict=True)]
    with rig.finish(ticket) as proposal:
        assert proposal.tokens.tolist() == drawn
        assert proposal.latency_ns > 0
        for index, row in enumerate(weights):
            u24 = draw24(5, Domain.PROPOSAL, 0, 0, 2 + index)
            q = proposal.q(index)
            if support is None:
                counts = allocate(row)
                assert q.ids is None
                assert_array_equal(q.values, to_q(counts))
                assert drawn[index] == draw(counts, u24)
                assert q.of(drawn[index]) == counts[drawn[index]] / MASS
            else:
                ids, counts = allocate_top_k(row, support)
                assert q.ids is not None
                assert_array_equal(q.ids, ids)
                assert_array_equal(q.values, to_q(counts))
                assert drawn[index] == draw_sparse(ids, counts, u24)
                outside = next(token for token in range(VOCAB) if token not in ids)
                assert q.of(outside) == 0.0
                assert q.of(int(ids[0])) == counts[0] / MASS


def test_temperature_zero_is_one_hot_and_greedy(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT, seed=5)
    with rig.round(request, temperature=0.0) as proposal:
        chain = list(PROMPT)
        for index, token in enumerate(proposal.tokens.tolist()):
            assert token == int(np.argmax(rig.models.draft.weights(chain)))
            assert proposal.q(index).of(token) == 1.0
            chain.append(token)


def test_ready_made_rows_need_no_weights(rig: Rig) -> None:
    """`counts`, alone or with `ids`, travel as they are."""
    request = rig.receiver.open_request(1, PROMPT, seed=5)
    dense = np.zeros(VOCAB, np.uint32)
    dense[[3, 90]] = MASS - 1, 1
    ticket = rig.receiver.enqueue(request, depth=1)
    assert rig.next_step().put(2, counts=dense) == 3
    with rig.finish(ticket) as proposal:
        assert_array_equal(proposal.q(0).values, to_q(dense))
        proposal.commit(1, [3, 4])
    ids, counts = np.array([3, 90], np.int32), np.array([MASS - 1, 1], np.uint32)
    ticket = rig.receiver.enqueue(request, depth=1, support=2)
    assert rig.next_step().put(4, ids=ids, counts=counts) == 3
    with rig.finish(ticket) as proposal:
        assert_array_equal(proposal.q(0).ids, ids)
        assert_array_equal(proposal.q(0).values, to_q(counts))


def test_draw_proof_off_lets_a_foreign_draw_pass_and_on_does_not(make_rig: MakeRig) -> None:
    """The leader is made to draw by another seed: only the proof can tell."""
    for proof, outcome in ((False, "ready"), (True, "draw_mismatch")):
        rig = make_rig(draw_proof=proof).connect()
        request = rig.receiver.open_request(1, PROMPT, seed=5)
        ticket = rig.receiver.enqueue(request)
        step = rig.next_step()
        step.seed = 6
        rig.draft(step)
        if outcome == "ready":
            rig.finish(ticket).release()
        else:
            with pytest.raises(ProposalDiscarded) as caught:
                rig.finish(ticket)
            assert caught.value.reason is Reason.DRAW_MISMATCH
        assert rig.all_free()


# ---- views, not copies ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_views_are_of_the_slot_itself_and_read_only(rig: Rig, support: int | None) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    region = rig.receiver._region
    assert region is not None
    with rig.round(request, support=support) as proposal:
        for index in range(proposal.depth):
            q = proposal.q(index)
            for view in (proposal.tokens, q.values, *(() if q.ids is None else (q.ids,))):
                assert np.shares_memory(view, region.array)
                assert not view.flags.writeable
                with pytest.raises(ValueError, match="read-only"):
                    view[0] = 0


def test_a_released_proposal_gives_no_more_views(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    proposal.q(0)
    proposal.release()
    proposal.release()
    assert rig.all_free()
    with pytest.raises(LocalMisuse, match="released"):
        proposal.q(0)


def test_a_held_proposal_keeps_its_bytes_whatever_comes_after(rig: Rig) -> None:
    """Four slots; three go round and round while one is held."""
    held = rig.round(rig.receiver.open_request(1, PROMPT, seed=1))
    before = [held.q(index).values.copy() for index in range(3)]
    request = rig.receiver.open_request(2, PROMPT, seed=2)
    for _ in range(9):
        with rig.round(request) as proposal:
            assert proposal.slot != held.slot
            consume(rig.models, rig.receiver, request, proposal)
    for index in range(3):
        assert_array_equal(held.q(index).values, before[index])
    assert rig.states().count("READY") == 1
    held.release()
    assert rig.all_free()


def test_a_stale_release_does_not_free_the_next_generation(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    first = rig.round(request)
    consume(rig.models, rig.receiver, request, first)
    later: list[Proposal] = []
    while not later or later[-1].slot != first.slot:
        for proposal in later:
            proposal.release()
        rig.receiver.commit_target_only(request, request.round, [1])
        later.append(rig.round(request))
    first.release()
    with pytest.raises(LocalMisuse, match="released"):
        first.q(0)
    later[-1].q(0)
    assert rig.states().count("READY") == 1


# ---- many requests, ends ----------------------------------------------------------------------------------------------


def test_many_long_requests_open_at_once_and_again_after_a_loss(make_rig: MakeRig) -> None:
    """Their OPENs together exceed the outbox (256 KiB)."""
    rig = make_rig().connect()
    prompt = [1] * 1000
    requests = [rig.receiver.open_request(one, prompt) for one in range(200)]
    rig.until(lambda: len(rig.leader.requests.requests) == 200)
    link = rig.receiver.engine.link
    assert link is not None
    link.sock.shutdown(2)
    rig.until(lambda: not rig.leader.up and not rig.receiver.up)
    rig.connect()
    rig.round(requests[-1]).release()
    assert rig.receiver.counters.of(Reason.OVERLOAD) == 0


def test_without_a_session_steps_are_discarded_and_the_target_goes_on(make_rig: MakeRig) -> None:
    rig = make_rig()
    request = rig.receiver.open_request(1, PROMPT, seed=3)
    with pytest.raises(ProposalDiscarded) as caught:
        rig.receiver.enqueue(request)
    assert caught.value.reason is Reason.PEER_LOST
    with pytest.raises(LocalMisuse, match="no session was formed yet"):
        _ = rig.receiver.views
    go_on_alone(rig.models, rig.receiver, request, request.next_round())
    rig.connect()
    with rig.round(request) as proposal:
        assert proposal.first_position == 3


@pytest.mark.parametrize("first", ("receiver", "leader"))
def test_close_is_idempotent_and_says_goodbye(make_rig: MakeRig, first: str) -> None:
    rig = make_rig(wait_for_peer=False).connect()
    ends: dict[str, Leader | Receiver] = {"receiver": rig.receiver, "leader": rig.leader}
    closing = ends.pop(first)
    (other,) = ends.values()
    closing.close()
    closing.close()
    rig.until(lambda: other.engine.closed)
    assert other.counters.of(Reason.PEER_LOST) >= 1
    assert other.parted
    assert other.counters.get("accept_failed") == 0
    other.close()
    with pytest.raises(PeerFault, match="over"):
        other.wait_for_peer(1.0)
    with pytest.raises(PeerFault) as caught:
        other.wait_for_message("report", 30.0)
    assert caught.value.reason is Reason.PEER_LOST


def test_iteration_ends_with_the_session(make_rig: MakeRig) -> None:
    rig = make_rig(wait_for_peer=False).connect()
    request = rig.receiver.open_request(1, PROMPT)
    rig.receiver.enqueue(request)
    steps: list[Step] = []
    for step in rig.leader:
        steps.append(step)
        rig.draft(step)
        rig.receiver.close()
    assert len(steps) == 1


def test_messages_pass_both_ways(rig: Rig) -> None:
    rig.leader.send_message("options", {"depth": 3})
    rig.receiver.send_message("report", {"rows": [1, 2]})
    rig.until(lambda: rig.leader.engine.inbox and rig.receiver.engine.inbox)
    assert rig.leader.wait_for_message("report", 1.0) == {"rows": [1, 2]}
    assert rig.receiver.wait_for_message("options", 1.0) == {"depth": 3}
    with pytest.raises(PeerFault) as caught:
        rig.receiver.wait_for_message("options", 0.01)
    assert caught.value.reason is Reason.TIMEOUT


def test_a_held_view_outlives_the_receiver(make_rig: MakeRig) -> None:
    rig = make_rig().connect()
    proposal = rig.round(rig.receiver.open_request(1, PROMPT))
    values = proposal.q(0).values
    copy = values.copy()
    rig.close()
    del rig.receiver, proposal
    gc.collect()
    assert_array_equal(values, copy)


def test_nothing_stays_open() -> None:
    def cycle() -> None:
        with Rig() as rig:
            rig.connect()
            rig.round(rig.receiver.open_request(1, PROMPT)).release()

    cycle()
    gc.collect()
    before = open_descriptors()
    for _ in range(20):
        cycle()
    gc.collect()
    assert open_descriptors() <= before


@pytest.mark.parametrize(
    "call",
    (
        lambda: Rig(listens="receiver", receiver={"listen": "udp://127.0.0.1:0"}),
        lambda: Rig(receiver={"connect": "tcp://127.0.0.1:1"}),
        lambda: Rig(idle="sleepy"),
        lambda: Rig(depth=0),
        lambda: Rig(max_slots=1),
        lambda: Rig(colour="red"),
    ),
)
def test_unusable_settings_are_named(call: Callable[[], Rig]) -> None:
    with pytest.raises((ConfigError, TypeError)):
        call().close()


@pytest.mark.parametrize("idle", ("spin", "block"))
def test_both_idle_strategies_work(make_rig: MakeRig, idle: str) -> None:
    rig = make_rig(idle=idle)
    with rig.drafting():
        request = rig.receiver.open_request(1, PROMPT, seed=4)
        for _ in range(10):
            assert one_round(rig.models, rig.receiver, request)[2]
    assert request.tokens.tolist()[2:] == run_reference(rig.models, 4, 10, 3)


def test_a_request_opens_with_the_generation_it_had(rig: Rig) -> None:
    """`request_generation` survives restarts of the target (SPEC 2): who kept it can hand it back."""
    request = rig.receiver.open_request(1, PROMPT, seed=4, generation=6)
    with rig.round(request) as proposal:
        assert proposal.generation == 6
    for generation in (-1, 1 << 32):
        with pytest.raises(LocalMisuse):
            rig.receiver.open_request(2, PROMPT, generation=generation)


def test_requests_are_numbered_from_one_table() -> None:
    """The fields that the draft sees are those of the STEP, whatever the order of calls."""
    with Rig() as rig:
        rig.connect()
        requests: list[Request] = [rig.receiver.open_request(one, PROMPT, seed=one) for one in (9, 4, 7)]
        tickets = [rig.receiver.enqueue(request) for request in requests]
        seen = []
        for ticket, request in zip(tickets, requests, strict=True):
            step = rig.next_step()
            seen.append((step.request, step.seed))
            rig.draft(step)
            rig.finish(ticket).release()
            assert ticket.key[1:] == (ticket.slot, step.slot_generation)
            assert request.in_flight
        assert seen == list(itertools.islice(((one, one) for one in (9, 4, 7)), 3))
