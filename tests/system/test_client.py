"""The client API over the real transport: what comes out, that it is a view, and what a wrong call does (nothing)."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from conftest import MakeRig
from numpy.testing import assert_array_equal
from system_rig import PROMPT, SMALL, VOCAB, Rig, consume, expected, go_on_alone, one_round, open_descriptors, uniform

from pp1q_transport.client import Leader, Proposal, Receiver, Step
from pp1q_transport.dyadic import MASS, allocate, allocate_top_k, draw, draw_sparse, to_q
from pp1q_transport.errors import ConfigError, InvalidQ, LocalMisuse, PeerFault, ProposalDiscarded, Reason
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


# ---- misuse changes nothing -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("accepted", "tokens"),
    (
        (-1, []),
        (4, [0, 0, 0, 0, 0]),
        (0, []),
        (0, [1, 2]),
        (2, [1]),
        (2, ["x", "y", 3]),
        (1, [-5, 3]),
        (0, [VOCAB]),
        (0, [-1]),
        (0, [1 << 40]),
        (0, [1.5]),
    ),
)
def test_a_wrong_commit_is_refused_and_changes_nothing(rig: Rig, accepted: int, tokens: list[Any]) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    with pytest.raises(LocalMisuse):
        proposal.commit(accepted, tokens)
    assert request.tokens.tolist() == list(PROMPT)
    proposal.q(0)
    consume(rig.models, rig.receiver, request, proposal)
    assert rig.round(request).depth == 3, "the session goes on"


def test_a_dense_row_after_a_longer_sparse_one_has_zero_padding(make_rig: MakeRig) -> None:
    """100 values are 400 bytes in a row of 448; 64 sparse entries are 512: they stand in what is padding next."""
    rig = make_rig(vocab_size=100, support=64).connect()
    request = rig.receiver.open_request(1, PROMPT)
    for support in (64, None, 64, None):
        for _ in range(SMALL["max_slots"]):
            ticket = rig.receiver.enqueue(request, support=support)
            step = rig.next_step()
            for position in step.positions:
                assert step.put(position, weights=uniform(100)) is not None
            proposal = rig.finish(ticket)
            proposal.commit(1, proposal.tokens[:1].tolist())


def test_a_text_may_end_within_its_drafts(rig: Rig) -> None:
    """The last draft ended the text: neither correction nor bonus follows, and the leader agrees."""
    request = rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    drafts = proposal.tokens[:2].tolist()
    proposal.commit(2, drafts)
    assert request.tokens.tolist() == [*PROMPT, *drafts]
    assert rig.round(request).first_position == len(PROMPT) + 2


def test_a_proposal_commits_once(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    consume(rig.models, rig.receiver, request, proposal)
    committed = request.tokens.tolist()
    with pytest.raises(LocalMisuse, match="released"):
        proposal.commit(0, [1])
    released = rig.round(request)
    released.release()
    with pytest.raises(LocalMisuse, match="released"):
        released.commit(0, [1])
    assert request.tokens.tolist() == committed
    go_on_alone(rig.models, rig.receiver, request, released.round)
    rig.round(request).release()


def test_a_proposal_commits_only_where_it_was_drafted(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    rig.receiver.commit_target_only(request, proposal.round, [9])
    with pytest.raises(LocalMisuse, match="position"):
        proposal.commit(0, [1])
    assert request.tokens.tolist() == [*PROMPT, 9]
    proposal.release()
    assert rig.all_free()


def test_no_commit_under_a_proposal_that_is_landing(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request)
    with pytest.raises(LocalMisuse, match="in flight"):
        rig.receiver.commit_target_only(request, 0, [9])
    rig.draft(rig.next_step())
    with rig.finish(ticket) as proposal:
        consume(rig.models, rig.receiver, request, proposal)


@pytest.mark.parametrize(
    "options",
    (
        {"depth": 0},
        {"depth": 4},
        {"depth": -1},
        {"support": 0},
        {"support": 17},
        {"support": -1},
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"temperature": float("inf")},
        {"temperature": 2e6},
        {"budget_us": 0},
        {"budget_us": -1},
        {"budget_us": 1 << 32},
        {"target_context": -1},
        {"target_context": 1 << 64},
        {"trace_id": 1 << 64},
    ),
    ids=str,
)
def test_an_impossible_step_is_refused_here_and_takes_no_slot(rig: Rig, options: dict[str, Any]) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    with pytest.raises(LocalMisuse):
        rig.receiver.enqueue(request, **options)
    assert request.round == 0
    assert rig.all_free()
    rig.round(request).release()


def test_steps_are_refused_while_one_is_in_flight_or_no_slot_is_free(rig: Rig) -> None:
    requests = [rig.receiver.open_request(one, PROMPT) for one in range(1, 6)]
    tickets = [rig.receiver.enqueue(request) for request in requests[:4]]
    with pytest.raises(LocalMisuse, match="in flight"):
        rig.receiver.enqueue(requests[0])
    with pytest.raises(LocalMisuse, match="no free slot"):
        rig.receiver.enqueue(requests[4])
    for _ in tickets:
        rig.draft(rig.next_step())
    for ticket in tickets:
        rig.finish(ticket).release()
    rig.round(requests[4]).release()


@pytest.mark.parametrize(
    ("request_id", "tokens", "seed"),
    (
        (-1, PROMPT, 1),
        (1 << 64, PROMPT, 1),
        (1, PROMPT, -1),
        (1, PROMPT, 1 << 64),
        (1, (), 1),
        (1, (VOCAB,), 1),
        (1, (-1,), 1),
        (1, (1 << 31,), 1),
        (1, (0.5,), 1),
        (1, [1] * 300, 1),
    ),
)
def test_an_impossible_request_leaves_no_trace(make_rig: MakeRig, request_id: int, tokens: Any, seed: int) -> None:
    rig = make_rig(max_context_tokens=256).connect()
    with pytest.raises(LocalMisuse):
        rig.receiver.open_request(request_id, tokens, seed=seed)
    request = rig.receiver.open_request(1, PROMPT, seed=1)
    rig.round(request).release()
    assert rig.leader.counters.get("sessions") == 1


def test_a_request_opens_once_and_a_closed_one_is_over(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    with pytest.raises(LocalMisuse, match="open already"):
        rig.receiver.open_request(1, PROMPT)
    proposal = rig.round(request)
    rig.receiver.close_request(request)
    rig.receiver.close_request(request)
    for call in (
        lambda: rig.receiver.enqueue(request),
        lambda: proposal.commit(0, [1]),
        lambda: rig.receiver.commit_target_only(request, 0, [1]),
    ):
        with pytest.raises(LocalMisuse, match="not open"):
            call()
    proposal.release()
    other = rig.receiver.open_request(2, PROMPT)
    rig.round(other).release()
    assert rig.leader.counters.get("sessions") == 1, "nothing of that reached the leader"


def test_target_only_commits_need_tokens_of_the_vocabulary(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    for tokens in ([], [VOCAB], [-1], ["a"]):
        with pytest.raises(LocalMisuse):
            rig.receiver.commit_target_only(request, 0, tokens)  # type: ignore[arg-type]
    assert request.tokens.tolist() == list(PROMPT)
    rig.round(request).release()


def test_closing_a_request_cancels_what_is_under_way(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request)
    step = rig.next_step()
    rig.draft(step, 1)
    rig.receiver.close_request(request)
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.CANCELLED
    assert rig.all_free()
    rig.until(lambda: not step.alive)
    assert step.put(3, weights=uniform()) is None


# ---- the draft's side -------------------------------------------------------------------------------------------------


def _counts(*pairs: tuple[int, int], dtype: Any = np.uint32, length: int = VOCAB) -> Any:
    counts = np.zeros(length, dtype)
    for token, count in pairs:
        counts[token] = count
    return counts


WHOLE = _counts((3, MASS))
IDS = np.array([3, 90], np.int32)
HALVES = np.array([MASS // 2, MASS // 2], np.uint32)
DENSE_PUTS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "nothing": ({}, LocalMisuse),
    "both": ({"weights": uniform(), "counts": WHOLE}, LocalMisuse),
    "ids with weights": ({"weights": uniform(), "ids": IDS}, LocalMisuse),
    "ids with dense counts": ({"counts": WHOLE, "ids": IDS}, LocalMisuse),
    "float32 weights": ({"weights": uniform().astype(np.float32)}, LocalMisuse),
    "short weights": ({"weights": uniform(VOCAB - 1)}, LocalMisuse),
    "two-dimensional weights": ({"weights": uniform().reshape(2, -1)}, LocalMisuse),
    "strided weights": ({"weights": uniform(2 * VOCAB)[::2]}, LocalMisuse),
    "a list": ({"weights": [1.0] * VOCAB}, LocalMisuse),
    "int64 counts": ({"counts": WHOLE.astype(np.int64)}, LocalMisuse),
    "long counts": ({"counts": _counts((3, MASS), length=VOCAB + 1)}, LocalMisuse),
    "counts short of mass": ({"counts": _counts((3, MASS - 1))}, InvalidQ),
    "counts beyond mass": ({"counts": _counts((3, MASS), (4, 1))}, InvalidQ),
    "nan": ({"weights": np.full(VOCAB, np.nan)}, InvalidQ),
    "infinite": ({"weights": np.where(np.arange(VOCAB) == 3, np.inf, 1.0)}, InvalidQ),
    "negative": ({"weights": np.where(np.arange(VOCAB) == 3, -1.0, 1.0)}, InvalidQ),
    "minus zero": ({"weights": np.where(np.arange(VOCAB) == 3, -0.0, 1.0)}, InvalidQ),
    "no mass": ({"weights": np.zeros(VOCAB)}, InvalidQ),
}
SPARSE_PUTS: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    name: (put, error)
    for name, (put, error) in DENSE_PUTS.items()
    if "counts" not in put and "ids" not in put
} | {
    "ids with weights": ({"weights": uniform(), "ids": IDS}, LocalMisuse),
    "no ids": ({"counts": HALVES}, LocalMisuse),
    "int64 ids": ({"counts": HALVES, "ids": IDS.astype(np.int64)}, LocalMisuse),
    "float ids": ({"counts": HALVES, "ids": IDS.astype(np.float32)}, LocalMisuse),
    "int64 counts": ({"counts": HALVES.astype(np.int64), "ids": IDS}, LocalMisuse),
    "a list": ({"counts": HALVES.tolist(), "ids": IDS.tolist()}, LocalMisuse),
    "two-dimensional": ({"counts": HALVES.reshape(1, 2), "ids": IDS.reshape(1, 2)}, LocalMisuse),
    "lengths differ": ({"counts": HALVES, "ids": IDS[:1]}, InvalidQ),
    "empty": ({"counts": HALVES[:0], "ids": IDS[:0]}, InvalidQ),
    "too many": ({"counts": np.full(65, 1, np.uint32), "ids": np.arange(65, dtype=np.int32)}, InvalidQ),
    "descending": ({"counts": HALVES, "ids": IDS[::-1].copy()}, InvalidQ),
    "twice": ({"counts": HALVES, "ids": np.array([3, 3], np.int32)}, InvalidQ),
    "beyond the vocabulary": ({"counts": HALVES, "ids": np.array([3, VOCAB], np.int32)}, InvalidQ),
    "negative id": ({"counts": HALVES, "ids": np.array([-1, 3], np.int32)}, InvalidQ),
    "zero count": ({"counts": np.array([MASS, 0], np.uint32), "ids": IDS}, InvalidQ),
    "short of mass": ({"counts": HALVES - 1, "ids": IDS}, InvalidQ),
}


def _wrong_put(rig: Rig, support: int | None, put: dict[str, Any], error: type[Exception]) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request, support=support)
    step = rig.next_step()
    region = rig.leader._region
    assert region is not None
    before = region.array.copy()
    with pytest.raises(error):
        step.put(2, **put)
    assert_array_equal(region.array, before)
    rig.draft(step)
    rig.finish(ticket).release()


@pytest.mark.parametrize("case", DENSE_PUTS)
def test_a_wrong_dense_row_is_refused_and_the_right_one_still_goes(rig: Rig, case: str) -> None:
    _wrong_put(rig, None, *DENSE_PUTS[case])


@pytest.mark.parametrize("case", SPARSE_PUTS)
def test_a_wrong_sparse_row_is_refused_and_the_right_one_still_goes(make_rig: MakeRig, case: str) -> None:
    """A support of 64: more than there are reasons, so that no code can pass for a number of entries."""
    _wrong_put(make_rig(support=64).connect(), 64, *SPARSE_PUTS[case])


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_rows_come_in_order_and_once(rig: Rig, support: int | None) -> None:
    """A refused row must not touch the bytes of one that waits to be sent."""
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request, support=support)
    step = rig.next_step()
    region = rig.leader._region
    assert region is not None

    def refused(position: int) -> None:
        before = region.array.copy()
        with pytest.raises(LocalMisuse):
            step.put(position, weights=uniform())
        assert_array_equal(region.array, before)

    for early in (1, 3, 4, 5, -1):
        refused(early)
    rig.draft(step, 1)
    refused(2)
    refused(4)
    chain = [*PROMPT, 0]
    for position in (3, 4):
        step.put(position, weights=rig.models.draft.weights(chain))
    with rig.finish(ticket) as proposal:
        assert proposal.depth == 3
    with pytest.raises(LocalMisuse, match="all 3 rows"):
        step.put(4, weights=uniform())


def test_a_failed_step_is_discarded_at_once_with_its_reason(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request, budget_us=60_000_000)
    step = rig.next_step()
    rig.draft(step, 1)
    step.fail(Reason.OVERLOAD)
    assert not step.alive
    assert step.put(3, weights=uniform()) is None
    with pytest.raises(ProposalDiscarded) as caught:
        rig.finish(ticket)
    assert caught.value.reason is Reason.OVERLOAD
    assert (caught.value.request, caught.value.round) == (1, 0)
    go_on_alone(rig.models, rig.receiver, request, 0)
    assert rig.round(request).generation == 1


def test_callbacks_tell_the_whole_story_in_order(rig: Rig) -> None:
    story: list[tuple[Any, ...]] = []
    rig.leader.on_open(lambda request, tokens: story.append(("open", request, tokens)))
    rig.leader.on_commit(lambda request, tokens: story.append(("commit", request, tokens)))
    rig.leader.on_reset(lambda request, reason: story.append(("reset", request, reason)))
    rig.leader.on_close(lambda request: story.append(("close", request)))
    request = rig.receiver.open_request(5, PROMPT)
    proposal = rig.round(request)
    committed = consume(rig.models, rig.receiver, request, proposal)
    ticket = rig.receiver.enqueue(request, budget_us=1)
    rig.until(lambda: ticket.settled)
    with pytest.raises(ProposalDiscarded, match="timeout"):
        ticket.wait()
    alone = go_on_alone(rig.models, rig.receiver, request, ticket.round)
    rig.receiver.close_request(request)
    rig.until(lambda: story and story[-1][0] == "close")
    assert story == [
        ("open", 5, list(PROMPT)),
        ("commit", 5, committed),
        ("reset", 5, Reason.TIMEOUT),
        ("commit", 5, alone),
        ("close", 5),
    ]


def test_an_engine_with_no_peer_resets_and_reopens(make_rig: MakeRig) -> None:
    """A lost session voids speculative state; the next one opens the request with all that was committed since."""
    rig = make_rig().connect()
    story: list[tuple[Any, ...]] = []
    rig.leader.on_reset(lambda request, reason: story.append(("reset", request, reason)))
    request = rig.receiver.open_request(5, PROMPT)
    with rig.round(request) as proposal:
        consume(rig.models, rig.receiver, request, proposal)
    link = rig.leader.engine.link
    assert link is not None
    link.sock.shutdown(2)
    rig.until(lambda: not rig.receiver.up)
    rig.receiver.commit_target_only(request, request.round, [7])
    rig.leader.on_open(lambda request, tokens: story.append(("open", request, tokens)))
    rig.connect()
    rig.until(lambda: story and story[-1][0] == "open")
    assert story[0] == ("reset", 5, Reason.PEER_LOST)
    assert story[-1] == ("open", 5, request.tokens.tolist())
    with rig.round(request) as proposal:
        assert proposal.generation > 0


def test_steps_are_handed_out_once_each(make_rig: MakeRig) -> None:
    """A leader that was away finds several generations of one slot: only the last lives, and it is one STEP."""
    rig = make_rig(max_slots=1, batch_requests=1, batches_in_flight=1).connect()
    request = rig.receiver.open_request(1, PROMPT)
    for _ in range(3):
        ticket = rig.receiver.enqueue(request, budget_us=1)
        while not ticket.settled:
            rig.receiver.poll()
        go_on_alone(rig.models, rig.receiver, request, ticket.round)
    ticket = rig.receiver.enqueue(request)
    steps = [rig.next_step()]
    for _ in range(20):
        steps += filter(None, [rig.leader.next_step(0)])
    assert len(steps) == 1
    rig.draft(steps[0])
    rig.finish(ticket).release()


def test_a_ticket_keeps_its_own_reason(make_rig: MakeRig) -> None:
    """Its slot may be another proposal's by the time it is asked."""
    rig = make_rig(max_slots=1, batch_requests=1, batches_in_flight=1).connect()
    first, second = (rig.receiver.open_request(one, PROMPT) for one in (1, 2))
    lost = rig.receiver.enqueue(first, budget_us=1)
    while not lost.settled:
        rig.receiver.poll()
    ticket = rig.receiver.enqueue(second)
    rig.draft(rig.next_step())
    proposal = rig.finish(ticket)
    with pytest.raises(ProposalDiscarded) as caught:
        lost.wait()
    assert caught.value.reason is Reason.TIMEOUT
    with pytest.raises(ProposalDiscarded) as again:
        lost.wait()
    assert again.value.reason is Reason.TIMEOUT
    proposal.release()


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
