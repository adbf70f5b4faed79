"""The public mathematics of q: building, carrying, checking, drawing (SPEC section 3)."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pp1q_transport import dyadic
from pp1q_transport.dyadic import MASS
from pp1q_transport.errors import InvalidQ, LocalMisuse, Reason

NAN, INF = math.nan, math.inf


def q_of(*counts: int) -> npt.NDArray[np.float32]:
    return dyadic.to_q(np.array(counts, np.uint32))


def test_names_are_the_contract_s() -> None:
    assert dyadic.MASS == 2**24
    assert dyadic.SEMANTIC_ID == "dyadic24-standard-v1"


class TestWeightsFromLogits:
    def test_definition(self) -> None:
        logits = np.array([1.0, -2.0, 3.5])
        bias = np.array([0.5, 0.0, -1.0])
        scores = (logits + bias) / 0.7
        assert dyadic.weights_from_logits(logits, 0.7, bias).tolist() == np.exp(scores - scores.max()).tolist()

    @pytest.mark.parametrize("dtype", (np.float16, np.float32, np.float64, np.int32))
    def test_accepts_real_types_and_answers_in_float64(self, dtype: type) -> None:
        weights = dyadic.weights_from_logits(np.array([1, 2, 2], dtype))
        assert weights.dtype == np.float64
        assert weights[1] == weights[2] == 1.0

    def test_temperature_zero_is_one_hot_at_the_lowest_id(self) -> None:
        assert dyadic.weights_from_logits([1.0, 7.0, -INF, 7.0], 0).tolist() == [0, 1, 0, 0]
        assert dyadic.weights_from_logits([1.0, 7.0, 7.0], 0.0, [0.0, -1.0, 0.0]).tolist() == [0, 0, 1]

    def test_minus_infinity_has_no_weight(self) -> None:
        assert dyadic.weights_from_logits([-INF, 0.0, -INF]).tolist() == [0, 1, 0]

    @pytest.mark.parametrize("temperature", (0.0, 1.0))
    @pytest.mark.parametrize(
        ("logits", "bias"),
        (
            ([NAN, 1.0], None),
            ([1.0, NAN], None),
            ([INF, 1.0], None),
            ([-INF, -INF], None),
            ([], None),
            ([1.0, 2.0], [0.0, INF]),
            ([1.0, -INF], [0.0, INF]),
            ([1.0, 2.0], [NAN, 0.0]),
        ),
    )
    def test_refused_values(self, logits: list[float], bias: list[float] | None, temperature: float) -> None:
        with pytest.raises(InvalidQ) as caught:
            dyadic.weights_from_logits(np.array(logits), temperature, bias)
        assert caught.value.reason is Reason.INVALID_WEIGHTS

    def test_scores_that_overflow_are_refused(self) -> None:
        with pytest.raises(InvalidQ):
            dyadic.weights_from_logits([1e10, 0.0], 1e-300)

    @pytest.mark.parametrize("temperature", (-1.0, -1e-9, NAN, INF))
    def test_refused_temperatures(self, temperature: float) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.weights_from_logits([1.0], temperature)

    @pytest.mark.parametrize("bias", ([1.0], [1.0, 2.0, 3.0], [[1.0, 2.0]]))
    def test_refused_biases(self, bias: list[float]) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.weights_from_logits([1.0, 2.0], 1.0, bias)


class TestAllocate:
    @pytest.mark.parametrize(
        ("weights", "counts"),
        (
            ([1.0], [MASS]),
            ([0.0, 5.0, 0.0], [0, MASS, 0]),
            ([1.0, 1.0, 1.0], [5592406, 5592405, 5592405]),
            ([1.0, 3.0], [MASS // 4, 3 * MASS // 4]),
            ([3, 1], [3 * MASS // 4, MASS // 4]),
            ([1.0, 5e-324, 5e-324], [MASS, 0, 0]),
            ([5e-324, 5e-324], [MASS // 2, MASS // 2]),
        ),
    )
    def test_table(self, weights: list[float], counts: list[int]) -> None:
        got = dyadic.allocate(np.array(weights))
        assert got.dtype == np.uint32
        assert got.tolist() == counts

    @pytest.mark.parametrize("bad", (NAN, INF, -INF, -1.0, -5e-324, -0.0))
    @pytest.mark.parametrize("at", (0, 5, 31, 32, 39))
    def test_refused_weights(self, bad: float, at: int) -> None:
        weights = np.ones(40)
        weights[at] = bad
        for build in (dyadic.allocate, lambda w: dyadic.allocate_top_k(w, 3)):
            with pytest.raises(InvalidQ) as caught:
                build(weights)
            assert caught.value.reason is Reason.INVALID_WEIGHTS

    @pytest.mark.parametrize("weights", ([], [0.0], [0.0] * 50))
    def test_no_mass_is_refused(self, weights: list[float]) -> None:
        for build in (dyadic.allocate, lambda w: dyadic.allocate_top_k(w, 3)):
            with pytest.raises(InvalidQ) as caught:
                build(np.array(weights))
            assert caught.value.reason is Reason.INVALID_WEIGHTS

    @pytest.mark.parametrize("weights", (np.ones((2, 2)), np.ones(3, complex), np.array(["1"]), np.array(1.0),
                                         np.ones(2, np.longdouble), np.array([None])))  # fmt: skip
    def test_refused_arrays(self, weights: npt.NDArray[np.generic]) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.allocate(weights)

    def test_strided_and_read_only_arrays_are_fine(self) -> None:
        weights = np.arange(100, dtype=np.float64)[::-3]
        weights.flags.writeable = False
        assert dyadic.allocate(weights).tolist() == dyadic.allocate(weights.copy()).tolist()

    @settings(max_examples=100, deadline=None)
    @given(hnp.arrays(np.float64, st.integers(1, 300), elements=st.floats(0, 1e9).map(abs)))
    def test_properties(self, weights: npt.NDArray[np.float64]) -> None:
        total = sum(map(Fraction, weights.tolist()))
        if total == 0:
            return
        counts = dyadic.allocate(weights)
        assert int(counts.sum(dtype=np.uint64)) == MASS
        for weight, count in zip(weights.tolist(), counts.tolist(), strict=True):
            assert abs(Fraction(weight) * MASS / total - count) < 1 + Fraction(1, 1000)
            assert weight > 0 or count == 0


class TestAllocateTopK:
    def test_support_is_chosen_before_normalising(self) -> None:
        weights = np.array([1.0, 9.0, 3.0, 0.0, 9.0, 2.0])
        ids, counts = dyadic.allocate_top_k(weights, 3)
        assert ids.dtype == np.int32
        assert counts.dtype == np.uint32
        assert ids.tolist() == [1, 2, 4]
        assert counts.tolist() == dyadic.allocate(weights[[1, 2, 4]]).tolist()

    def test_ties_go_to_the_lowest_id(self) -> None:
        ids, counts = dyadic.allocate_top_k(np.ones(1000), 4)
        assert ids.tolist() == [0, 1, 2, 3]
        assert counts.tolist() == [MASS // 4] * 4

    def test_zero_counts_are_dropped(self) -> None:
        ids, counts = dyadic.allocate_top_k(np.array([1e-300, 1.0, 1e-300, 0.0]), 3)
        assert (ids.tolist(), counts.tolist()) == ([1], [MASS])

    def test_k_beyond_the_vocabulary(self) -> None:
        ids, counts = dyadic.allocate_top_k(np.array([1.0, 0.0, 1.0]), 2**31 - 1)
        assert (ids.tolist(), counts.tolist()) == ([0, 2], [MASS // 2] * 2)

    @pytest.mark.parametrize("k", (0, -1, 2**31, 1.5, "3", None))
    def test_refused_k(self, k: object) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.allocate_top_k(np.ones(3), k)  # type: ignore[arg-type]


class TestCarrying:
    def test_round_trip(self) -> None:
        counts = np.array([0, 1, 2, 3, MASS // 2 - 1, MASS // 2, MASS // 2 + 1, MASS - 1, MASS], np.uint32)
        q = dyadic.to_q(counts)
        assert q.dtype == np.float32
        assert q.tolist() == [c / MASS for c in counts.tolist()]
        back = dyadic.to_counts(q)
        assert back.dtype == np.uint32
        assert back.tolist() == counts.tolist()

    @pytest.mark.parametrize("counts", ([-1], [MASS + 1], [2**32], np.array([MASS + 1], np.uint32), [1.0], [[1]]))
    def test_refused_counts(self, counts: npt.ArrayLike) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.to_q(counts)

    @pytest.mark.parametrize(
        ("value", "reason"),
        (
            (NAN, Reason.NONFINITE),
            (INF, Reason.NONFINITE),
            (-INF, Reason.NONFINITE),
            (-0.0, Reason.NEGATIVE),
            (-0.25, Reason.NEGATIVE),
            (1 / 3, Reason.NONDYADIC),
            (2.0**-25, Reason.NONDYADIC),
            (1.0 + 2.0**-23, Reason.NONDYADIC),
            (2.0, Reason.NONDYADIC),
        ),
    )
    def test_refused_values(self, value: float, reason: Reason) -> None:
        q = np.array([0.25, value, NAN, -1.0], np.float32)
        for check in (dyadic.to_counts, lambda row: dyadic.validate_dense(row, 4, 0)):
            with pytest.raises(InvalidQ) as caught:
                check(q)
            assert caught.value.reason is reason

    @pytest.mark.parametrize("q", (np.zeros(3), np.zeros((1, 3), np.float32), np.zeros(3, ">f4"), [0.5, 0.5]))
    def test_refused_arrays(self, q: npt.NDArray[np.generic]) -> None:
        calls: tuple[Callable[[], object], ...] = (
            lambda: dyadic.to_counts(q),
            lambda: dyadic.validate_dense(q, 2, 0),
            lambda: dyadic.validate_sparse(np.arange(3, dtype=np.int32), q, 9, 0),
        )
        for call in calls:
            with pytest.raises(LocalMisuse):
                call()


class TestValidateDense:
    @pytest.mark.parametrize(
        ("q", "vocab_size", "token", "reason"),
        (
            (q_of(MASS), 1, 0, None),
            (q_of(1, MASS - 1), 2, 1, None),
            (q_of(1, MASS - 1), 2, None, None),
            (q_of(1, MASS - 1, 0, 0), 2, 1, None),
            (q_of(1, MASS - 1, 0, 1), 2, 1, Reason.PADDING_NONZERO),
            (np.array([1.0, -0.0], np.float32), 1, 0, Reason.PADDING_NONZERO),
            (np.array([1.0, -0.0], np.float32), 2, 0, Reason.NEGATIVE),
            (q_of(1, MASS - 2), 2, 0, Reason.MASS),
            (q_of(MASS, MASS), 2, 0, Reason.MASS),
            (q_of(0, MASS), 2, 0, Reason.ZERO_Q_TOKEN),
            (q_of(0, MASS), 2, 2, Reason.ID_RANGE),
            (q_of(0, MASS), 2, -1, Reason.ID_RANGE),
            (q_of(0, MASS, 0), 2, 2, Reason.ID_RANGE),
            (q_of(0, MASS - 1), 2, 5, Reason.MASS),
        ),
    )
    def test_table(
        self, q: npt.NDArray[np.float32], vocab_size: int, token: int | None, reason: Reason | None
    ) -> None:
        if reason is None:
            dyadic.validate_dense(q, vocab_size, token)
            return
        with pytest.raises(InvalidQ) as caught:
            dyadic.validate_dense(q, vocab_size, token)
        assert caught.value.reason is reason

    @pytest.mark.parametrize(("vocab_size", "token"), ((3, 0), (0, 0), (-1, 0), (1.0, 0), (2, 0.0), (2, "0")))
    def test_misuse(self, vocab_size: int, token: int) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.validate_dense(q_of(1, MASS - 1), vocab_size, token)


class TestValidateSparse:
    @pytest.mark.parametrize(
        ("ids", "counts", "token", "reason"),
        (
            ([4], [MASS], 4, None),
            ([0, 9], [1, MASS - 1], 0, None),
            ([0, 9], [1, MASS - 1], None, None),
            ([0, 10], [1, MASS - 1], 0, Reason.ID_RANGE),
            ([-1, 9], [1, MASS - 1], 9, Reason.ID_RANGE),
            ([9, 0], [1, MASS - 1], 0, Reason.ID_ORDER),
            ([3, 3], [1, MASS - 1], 3, Reason.ID_DUPLICATE),
            ([3, 4], [0, MASS], 4, Reason.ZERO_ENTRY),
            ([3, 4], [1, MASS], 4, Reason.MASS),
            ([3, 4], [1, MASS - 1], 5, Reason.ZERO_Q_TOKEN),
            ([3, 4], [1, MASS - 1], 10, Reason.ID_RANGE),
            ([3, 4], [1, MASS - 1], -1, Reason.ID_RANGE),
            ([], [], 0, Reason.SUPPORT_BOUNDS),
        ),
    )
    def test_table(self, ids: list[int], counts: list[int], token: int | None, reason: Reason | None) -> None:
        q = np.array(counts, np.float64) / MASS
        row = (np.array(ids, np.int32), q.astype(np.float32), 10, token)
        if reason is None:
            dyadic.validate_sparse(*row)
            return
        with pytest.raises(InvalidQ) as caught:
            dyadic.validate_sparse(*row)
        assert caught.value.reason is reason

    def test_misuse(self) -> None:
        ids = np.array([1, 2], np.int32)
        for bad_ids in (ids[:1], ids.astype(np.int64), ids.reshape(1, 2)):
            with pytest.raises(LocalMisuse):
                dyadic.validate_sparse(bad_ids, q_of(1, MASS - 1), 10, 1)


class TestDraw:
    def test_first_whose_cumulative_count_exceeds(self) -> None:
        counts = np.array([0, 3, 0, MASS - 3], np.uint32)
        drawn = [dyadic.draw(counts, u24) for u24 in (0, 1, 2, 3, 4, MASS - 1)]
        assert drawn == [1, 1, 1, 3, 3, 3]
        ids = np.array([7, 8, 11, 90], np.int32)
        assert [dyadic.draw_sparse(ids, counts, u24) for u24 in (2, 3)] == [8, 90]

    def test_each_token_owns_exactly_its_count(self) -> None:
        counts = dyadic.allocate(np.random.default_rng(0).random(50) ** 8)
        edges = np.cumsum(counts).tolist()
        for token, (edge, count) in enumerate(zip(edges, counts.tolist(), strict=True)):
            if count:
                assert dyadic.draw(counts, edge - 1) == dyadic.draw(counts, edge - count) == token

    @pytest.mark.parametrize("u24", (-1, MASS, 2**32, 0.5))
    def test_refused_draws(self, u24: int) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.draw(np.array([MASS], np.uint32), u24)

    def test_counts_that_end_too_soon(self) -> None:
        with pytest.raises(LocalMisuse):
            dyadic.draw(np.array([5, 5], np.uint32), 10)
        with pytest.raises(LocalMisuse):
            dyadic.draw_sparse([1], np.array([5, 5], np.uint32), 0)


@settings(max_examples=50, deadline=None)
@given(
    logits=hnp.arrays(np.float32, st.integers(1, 400), elements=st.floats(-50, 50, width=32)),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    k=st.integers(1, 64),
    u24=st.integers(0, MASS - 1),
)
def test_what_is_built_is_valid(logits: npt.NDArray[np.float32], temperature: float, k: int, u24: int) -> None:
    weights = dyadic.weights_from_logits(logits, temperature)
    counts = dyadic.allocate(weights)
    dyadic.validate_dense(dyadic.to_q(counts), logits.size, dyadic.draw(counts, u24))
    ids, counts = dyadic.allocate_top_k(weights, k)
    dyadic.validate_sparse(ids, dyadic.to_q(counts), logits.size, dyadic.draw_sparse(ids, counts, u24))
