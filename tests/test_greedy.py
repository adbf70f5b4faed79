"""The greedy lane: closed to what it does not know, and equal to the full path wherever it is open."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pp1q_transport._native import kernels, verify_oracle
from pp1q_transport.dyadic import MASS, to_q
from pp1q_transport.errors import InvalidQ, LocalMisuse, Reason
from pp1q_transport.greedy import NO_WINNER, GreedyLane, Ineligible, Winner, commit, full_path_token, merge, shard_winner, why_not
from pp1q_transport.verify import FastTarget, QRow, verify_chain_fast

NAN, INF = math.nan, math.inf

# -- eligibility -------------------------------------------------------------------------------------------------------

CASES: dict[Ineligible, tuple[dict[str, object], ...]] = {
    Ineligible.TEMPERATURE: ({}, {"temperature": None}, {"temperature": 1}, {"temperature": 1e-9}, {"temperature": NAN}),
    Ineligible.GRAMMAR: ({"grammar": "root ::= x"}, {"structured_outputs": object()}, {"guided_decoding": {}}),
    Ineligible.LOGPROBS: ({"logprobs": 1}, {"logprobs": 0}, {"prompt_logprobs": 5}),
    Ineligible.PENALTIES: ({"repetition_penalty": 1.1}, {"presence_penalty": -0.1}, {"frequency_penalty": NAN}),
    Ineligible.BIAS: ({"logit_bias": {5: 1.0}}, {"logit_bias": [1]}, {"allowed_token_ids": [1, 2]}, {"allowed_token_ids": []}),
    Ineligible.BAD_WORDS: ({"bad_words": ["x"]}, {"bad_words": "x"}),
    Ineligible.SYNTHETIC_REJECTION: ({"synthetic_rejection": 0.3}, {"synthetic_rejection": True}, {"synthetic_rejection": 0}),
    Ineligible.DRAFT_LOGITS: ({"draft_logits": True},),
    Ineligible.MIN_TOKENS: ({"min_tokens": 3},),
    Ineligible.PROCESSORS: ({"logits_processors": [print]}, {"logits_processors": np.zeros(0)}),
    Ineligible.UNKNOWN: ({"mirostat": 0}, {"repetition_penalti": 1.0}, {"": None}),
    Ineligible.MALFORMED: ({"temperature": "0"}, {"temperature": False}, {"temperature": [0]}),
}
ELIGIBLE: tuple[dict[str, object], ...] = (
    {"temperature": 0},
    {"temperature": 0.0, "top_p": 0.3, "top_k": 5, "min_p": 0.1, "seed": 7, "max_tokens": 9, "stop": ["x"], "n": 1},
    {"temperature": np.float32(0), "grammar": None, "logprobs": None, "repetition_penalty": 1.0, "presence_penalty": 0},
    {"temperature": -0.0, "logit_bias": {}, "bad_words": [], "logits_processors": [], "draft_logits": False, "min_tokens": 0},
)


@pytest.mark.parametrize(("reason", "options"), [(reason, options) for reason, table in CASES.items() for options in table])
def test_ineligible_requests_take_the_full_path_with_a_reason(reason: Ineligible, options: dict[str, object]) -> None:
    if reason not in (Ineligible.TEMPERATURE, Ineligible.MALFORMED):
        options = {"temperature": 0, **options}
    lane = GreedyLane(enabled=True)
    assert not lane.admits(options)
    assert lane.counters.totals == {"greedy_full_path": 1, f"greedy_{reason}": 1}


@pytest.mark.parametrize("options", ELIGIBLE)
def test_eligible_requests(options: dict[str, object]) -> None:
    lane = GreedyLane(enabled=True)
    assert lane.admits(options)
    assert lane.counters.totals == {"greedy_eligible": 1}
    assert why_not({**options, "something_new": None}) is Ineligible.UNKNOWN


def test_the_lane_is_off_unless_asked_for() -> None:
    lane = GreedyLane()
    assert not lane.admits({"temperature": 0})
    assert lane.counters.totals == {"greedy_full_path": 1, "greedy_off": 1}


def test_every_reason_has_a_case() -> None:
    assert set(CASES) | {Ineligible.OFF} == set(Ineligible)


# -- winners -----------------------------------------------------------------------------------------------------------


def token_of(row: NDArray[np.floating], edges: list[int], padding: float = 9e9) -> int:
    """The lane's token: each shard padded to a common shape with values that would win."""
    widest = max(end - start for start, end in pairwise(edges))
    winners = []
    for start, end in pairwise(edges):
        shard = np.full(widest, padding, row.dtype)
        shard[: end - start] = row[start:end]
        winners.append(shard_winner(shard, start, end - start))
    return merge(winners)


def outcome(call: Callable[[], int]) -> object:
    try:
        return call()
    except InvalidQ as error:
        return error.reason


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.sampled_from((-INF, -3.5, -0.0, 0.0, 1.0, 1.0, 2.5, 65504.0)), min_size=1, max_size=40),
    st.lists(st.integers(0, 40), max_size=7),
    st.sampled_from((np.float16, np.float32, np.float64)),
    st.one_of(st.none(), st.tuples(st.integers(0, 39), st.sampled_from((NAN, INF)))),
    st.sampled_from((NAN, INF, 9.0, -INF)),
)
def test_winners_equal_the_full_path(
    values: list[float], cuts: list[int], dtype: type, spoiled: tuple[int, float] | None, padding: float
) -> None:
    row = np.array(values, dtype)
    if spoiled is not None:
        row[spoiled[0] % len(row)] = spoiled[1]
    edges = [0, *sorted(min(cut, len(row)) for cut in cuts), len(row)]
    assert outcome(lambda: token_of(row, edges, padding)) == outcome(lambda: full_path_token(row))


@pytest.mark.parametrize(
    ("row", "want"),
    (
        ([1.0, 5.0, 5.0, 5.0], 1),  # ties to the lowest ID, across shards too
        ([-INF, -INF, -7.0, -INF], 2),
        ([-0.0, 0.0, -1.0, -1.0], 0),  # equal in value
        ([NAN, 5.0, 5.0, 5.0], Reason.INVALID_WEIGHTS),
        ([1.0, 5.0, 5.0, NAN], Reason.INVALID_WEIGHTS),
        ([1.0, INF, 5.0, 5.0], Reason.INVALID_WEIGHTS),
        ([-INF] * 4, Reason.INVALID_WEIGHTS),
    ),
)
@pytest.mark.parametrize("edges", ([0, 4], [0, 2, 4], [0, 1, 2, 3, 4], [0, 0, 4, 4]))
def test_ties_nan_and_infinities(row: list[float], want: object, edges: list[int]) -> None:
    logits = np.array(row, np.float32)
    assert outcome(lambda: token_of(logits, edges)) == want == outcome(lambda: full_path_token(logits))


def test_a_shard_without_a_logit_has_no_winner() -> None:
    assert shard_winner(np.full(4, 7.0), 10, 0) == NO_WINNER == shard_winner(np.full(4, -INF), 10)
    assert merge([NO_WINNER, Winner(-5.0, 3), NO_WINNER]) == 3
    with pytest.raises(InvalidQ):
        merge([NO_WINNER])
    with pytest.raises(InvalidQ):
        merge([])


@pytest.mark.parametrize(
    "call",
    (
        lambda: shard_winner(np.zeros((2, 2)), 0),
        lambda: shard_winner(np.zeros(4, np.int32), 0),  # type: ignore[arg-type]
        lambda: shard_winner(np.zeros(4), 0, 5),
        lambda: shard_winner(np.zeros(4), 0, -1),
        lambda: shard_winner(np.zeros(4), -1),
    ),
)
def test_what_is_no_shard_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LocalMisuse):
        call()


# -- the commit --------------------------------------------------------------------------------------------------------

DTYPES = (np.int32, np.int64)


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 2**32), st.integers(0, 6), st.integers(0, 8), st.sampled_from(DTYPES), st.sampled_from(DTYPES), st.booleans()
)
def test_commit_equals_the_oracle(seed: int, requests: int, depth: int, one: type, other: type, ragged: bool) -> None:
    noise = np.random.default_rng(seed)
    drafts = noise.integers(0, 3, (requests, depth)).astype(one)
    winners = noise.integers(0, 3, (requests, depth + 1)).astype(other)
    depths = noise.integers(0, depth + 1, requests).astype(np.int32) if ragged else None
    made = commit(drafts, winners, 3, depths)
    for request in range(requests):
        own = depth if depths is None else int(depths[request])
        want = verify_oracle.greedy_commit(drafts[request, :own].tolist(), winners[request].tolist())
        assert made.of(request) == want
        assert made.accepted[request] == len(want) - 1
        assert made.tokens[request, len(want) :].tolist() == [-1] * (depth + 1 - len(want))


def test_commit_equals_rejection_sampling_with_one_hot_rows() -> None:
    """At temperature 0 p and q are one-hot, and the full verifier commits the same tokens at any noise."""
    noise = np.random.default_rng(5)
    for seed in range(100):
        drafts = noise.integers(0, 2, (1, 4)).astype(np.int32)
        winners = noise.integers(0, 2, (1, 5)).astype(np.int64)
        rows = np.eye(2, dtype=np.float32)
        qs = [QRow(to_q(np.array([MASS, 0] if token == 0 else [0, MASS], np.uint32))) for token in drafts[0]]
        verdict = verify_chain_fast(
            drafts[0].tolist(), qs, lambda index, winners=winners, rows=rows: rows[winners[0, index]], seed, 1, 1, 1
        )
        assert commit(drafts, winners, 2).of(0) == verdict.committed_tokens
    assert FastTarget(rows[0]).total == 1 << 50


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("drafts", "winners", "depths"),
    (
        ([[1, -1]], [[1, 1, 1]], None),
        ([[1, -1]], [[1, -1, 1]], None),  # padding on both sides must not count as agreement
        ([[1, 5]], [[1, 1, 1]], None),
        ([[1, 1]], [[1, 1, -1]], None),
        ([[1, 1]], [[5, 1, 1]], None),
        ([[1, 1]], [[1, 1, 1]], [3]),
        ([[1, 1]], [[1, 1, 1]], [-1]),
    ),
)
def test_what_is_out_of_range_is_refused(
    drafts: list[list[int]], winners: list[list[int]], depths: list[int] | None, dtype: type
) -> None:
    own = None if depths is None else np.array(depths, np.int32)
    with pytest.raises(LocalMisuse, match="request 0"):
        commit(np.array(drafts, dtype), np.array(winners, dtype), 5, own)


def test_padding_behind_a_request_s_depth_is_not_looked_at() -> None:
    made = commit(np.array([[3, -1, -1]], np.int32), np.array([[3, 4, -7, 99]], np.int64), 5, np.array([1], np.int32))
    assert made.of(0) == [3, 4]


@pytest.mark.parametrize(
    "call",
    (
        lambda: commit(np.zeros((1, 2), np.int16), np.zeros((1, 3), np.int32), 5),  # type: ignore[arg-type]
        lambda: commit(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.uint64), 5),  # type: ignore[arg-type]
        lambda: commit(np.zeros((1, 2), np.int32), np.zeros((1, 2), np.int32), 5),
        lambda: commit(np.zeros(2, np.int32), np.zeros((1, 3), np.int32), 5),
        lambda: commit(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.int32), 5, np.zeros(2, np.int32)),
        lambda: commit(np.zeros((1, 2), np.int32), np.zeros((1, 3), np.int32), 5, np.zeros(1, np.int64)),  # type: ignore[arg-type]
    ),
)
def test_misfits_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LocalMisuse):
        call()


@pytest.mark.parametrize(
    "call",
    (
        (np.zeros(2, np.int32), np.zeros(3, np.int32), None, 2, np.zeros(2, np.int64), np.zeros(1, np.int32)),
        (np.zeros(1, np.int32), np.zeros(3, np.int32), None, 2, np.zeros(3, np.int64), np.zeros(1, np.int32)),
        (np.zeros(2, np.int32), np.zeros(4, np.int32), None, 2, np.zeros(3, np.int64), np.zeros(1, np.int32)),
        (np.zeros(2, np.float32), np.zeros(3, np.int32), None, 2, np.zeros(3, np.int64), np.zeros(1, np.int32)),
        (np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(2, np.int32), 2, np.zeros(3, np.int64), np.zeros(1, np.int32)),
        (np.zeros(2, np.int32), np.zeros(3, np.int32), None, -1, np.zeros(3, np.int64), np.zeros(1, np.int32)),
    ),
)
def test_the_binding_checks_every_length(call: tuple[Any, ...]) -> None:
    drafts, winners, depths, depth, tokens, accepted = call
    with pytest.raises(ValueError, match=r"."):
        kernels.greedy_commit(drafts, winners, depths, depth, 5, tokens, accepted)


def test_lists_are_no_arrays() -> None:
    tokens = np.zeros((1, 3), np.int32)
    for call in (
        lambda: shard_winner([1.0, 2.0], 0),  # type: ignore[arg-type]
        lambda: commit([[1, 2]], tokens, 10),  # type: ignore[arg-type]
        lambda: commit(tokens[:, :2], [[1, 2, 3]], 10),  # type: ignore[arg-type]
        lambda: commit(tokens[:, :2], tokens, 10, [1]),  # type: ignore[arg-type]
    ):
        with pytest.raises(LocalMisuse, match="NumPy array"):
            call()
