"""Wrong calls of the client API: each is refused where it was made, nothing reaches the peer, and the right call still works."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.testing import assert_array_equal
from system_rig import PROMPT, SMALL, VOCAB, MakeRig, Rig, consume, go_on_alone, uniform

from pp1q_transport.dyadic import MASS
from pp1q_transport.errors import InvalidQ, LocalMisuse, ProposalDiscarded, Reason

pytestmark = pytest.mark.timeout(60)


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
