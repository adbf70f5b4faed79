"""The fast path against the integer kernel on the same integers, and against exact rationals of the floats it was given."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pp1q_transport._native import kernels
from pp1q_transport.dyadic import MASS, allocate, allocate_top_k, draw, to_q
from pp1q_transport.errors import InvalidQ, LocalMisuse, Reason
from pp1q_transport.rng import Domain, draw64
from pp1q_transport.verify import FastTarget, QRow, fast, target_only_fast, verify_chain_fast, wide
from pp1q_transport.verify.fast import rational_correction

END = 1 << 64
SIZES = (1, 2, 7, 31, 32, 33, 1000, 1023, 1024, 1025, 2048, 3001)
INVALID = Reason.INVALID_WEIGHTS.code


@pytest.fixture(params=kernels.levels(), autouse=True)
def level(request: pytest.FixtureRequest) -> object:
    before = kernels.level()
    kernels.select_level(request.param)
    yield request.param
    kernels.select_level(before)


def rows(seed: int, size: int, dtype: type, spread: float = 4.0) -> tuple[NDArray[np.floating], NDArray[np.uint32]]:
    """Weights of a target and counts of a draft that resembles it."""
    noise = np.random.default_rng(seed)
    logits = noise.normal(size=size) * spread
    scale = 2.0 ** int(noise.integers(-60, 60))
    weights = (np.exp(logits - logits.max()) * scale).astype(dtype)
    weights[noise.random(size) < 0.1] = 0
    weights[int(noise.integers(size))] = scale
    counts = allocate(np.exp(logits + noise.normal(size=size)))
    return weights, counts


def dense(counts: NDArray[np.uint32]) -> QRow:
    return QRow(to_q(counts))


def sparse(counts: NDArray[np.uint32], k: int) -> tuple[QRow, list[int]]:
    ids, few = allocate_top_k(counts, k)
    whole = np.zeros(len(counts), np.int64)
    whole[ids] = few
    return QRow(to_q(few), ids), whole.tolist()


def integers_of(weights: NDArray[np.floating], exponent: int) -> list[int]:
    """What the integer weights must be: the nearest to weight * 2^exponent, ties to even, by fractions."""
    factor = Fraction(2) ** exponent
    return [round(Fraction(float(weight)) * factor) for weight in weights]


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("size", SIZES)
def test_weights_become_the_nearest_integers(size: int, dtype: type) -> None:
    weights, _ = rows(size, size, dtype)
    target = FastTarget(weights)
    assert target.integers() == integers_of(weights, target.exponent)
    assert target.total == sum(target.integers())
    assert (1 << 50) - size <= target.total <= (1 << 51) + size


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("size", SIZES)
def test_everything_equals_the_integer_kernel(size: int, dtype: type) -> None:
    noise = random.Random(size)
    weights, counts = rows(size + 1, size, dtype)
    target = FastTarget(weights)
    ours, total = target.integers(), target.total
    few, few_counts = sparse(counts, max(1, size // 3))
    for q, theirs in ((dense(counts), counts.tolist()), (few, few_counts)):
        for token in {draw(np.array(theirs), noise.randrange(MASS)) for _ in range(8)}:
            kept = wide.acceptance_threshold(theirs[token], ours[token], total)
            for u64 in {0, kept - 1, kept, kept + 1, END - 1, noise.randrange(END)}:
                if 0 <= u64 < END:
                    assert target.accept(token, q, u64) == (u64 < kept)
        masses = wide.residual(ours, total, theirs)
        assert target.residual_mass(q) == sum(masses)
        if any(masses):
            for u64 in edges(wide.pick_lengths(masses), noise):
                assert target.correct(q, u64) == (wide.pick(masses, u64), True)
    for u64 in edges(wide.pick_lengths(ours), noise):
        assert target.pick(u64) == wide.pick(ours, u64)


def edges(lengths: list[int], noise: random.Random) -> set[int]:
    """Noise just before, at and just behind a few ends of intervals, and the ends of all noise."""
    starts = [0]
    for length in lengths:
        starts.append(starts[-1] + length)
    some = noise.sample(starts, min(len(starts), 6))
    return {u64 for start in (*some, 0, END) for u64 in (start - 1, start, start + 1) if 0 <= u64 < END}


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 90), st.sampled_from((np.float32, np.float64)), st.floats(0.1, 40))
def test_random_rows_equal_the_integer_kernel(seed: int, size: int, dtype: type, spread: float) -> None:
    noise = random.Random(seed)
    weights, counts = rows(seed, size, dtype, spread)
    target = FastTarget(weights)
    ours = integers_of(weights, target.exponent)
    assert target.total == sum(ours)
    masses = wide.residual(ours, sum(ours), counts.tolist())
    u64 = noise.randrange(END)
    if any(masses):
        assert target.correct(dense(counts), u64) == (wide.pick(masses, u64), True)
    few, few_counts = sparse(counts, noise.randrange(1, size + 1))
    masses = wide.residual(ours, sum(ours), few_counts)
    if any(masses):
        assert target.correct(few, u64) == (wide.pick(masses, u64), True)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.integers(2, 90), st.sampled_from((1e-15, 1e-13, 1e-11, 1e-9, 1e-7)))
def test_p_next_to_q(seed: int, size: int, spread: float) -> None:
    """Where p and q differ by next to nothing, the residual is decided in the lower part of W alone."""
    noise = np.random.default_rng(seed)
    counts = allocate(np.exp(noise.normal(size=size) * 2))
    weights = counts * (1 + noise.integers(-1, 2, size) * noise.random(size) * spread)
    target = FastTarget(weights)
    masses = wide.residual(target.integers(), target.total, counts.tolist())
    assert target.residual_mass(dense(counts)) == sum(masses)
    few, few_counts = sparse(counts, size)
    assert target.residual_mass(few) == sum(wide.residual(target.integers(), target.total, few_counts))
    if any(masses):
        for u64 in edges(wide.pick_lengths(masses), random.Random(seed)):
            assert target.correct(dense(counts), u64) == (wide.pick(masses, u64), True)


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
def test_rounding_stays_within_the_stated_bound(dtype: type) -> None:
    """TV(p', p) <= V/2 * 2^-50, and an acceptance threshold off by at most that over q: docs/verification.md."""
    for size in (1, 33, 700):
        weights, counts = rows(size + 2, size, dtype)
        target = FastTarget(weights)
        exact = wide.exact_weights(weights.tolist())
        off = sum(
            abs(Fraction(rounded, target.total) - Fraction(weight, sum(exact)))
            for rounded, weight in zip(target.integers(), exact, strict=True)
        )
        assert off / 2 <= Fraction(size, 2) / (1 << 50)
        for token in np.flatnonzero(counts)[:20].tolist():
            count = int(counts[token])
            here = wide.acceptance_threshold(count, target.weight(token), target.total)
            there = wide.acceptance_threshold(count, exact[token], sum(exact))
            bound = (Fraction(1, 2) + Fraction(exact[token], sum(exact)) * Fraction(size, 2)) / (1 << 50) * MASS / count
            assert abs(here - there) <= bound * END + 1


def test_every_address_will_do() -> None:
    weights, counts = rows(5, 1500, np.float64)
    raw = np.concatenate((np.zeros(1, np.uint8), weights.view(np.uint8)))
    q = np.concatenate((np.zeros(3, np.uint8), to_q(counts).view(np.uint8)))
    row = kernels.TargetRow()
    row.load(raw, 1, 1500, True)
    sums = np.empty(47)
    assert row.block_sums(sums) == 0
    direct = np.empty(47)
    assert kernels.block_sums(weights, direct) == 0
    assert sums.tobytes() == direct.tobytes()
    assert row.fix() == 0
    target = FastTarget(weights)
    assert (row.total, row.exponent) == (target.total, target.exponent)
    assert row.residual_dense(q, 3, row.total) == 0
    assert row.residual_mass() == target.residual_mass(dense(counts))


def test_float32_has_the_tree_of_its_float64() -> None:
    for size in SIZES:
        weights, _ = rows(size, size, np.float32)
        narrow, broad = np.empty((size + 31) // 32), np.empty((size + 31) // 32)
        row = kernels.TargetRow()
        row.load(weights.view(np.uint8), 0, size, False)
        assert row.block_sums(narrow) == 0
        assert kernels.block_sums(weights.astype(np.float64), broad) == 0
        assert narrow.tobytes() == broad.tobytes()


def test_inputs_are_read_only() -> None:
    """Rows of a slot are read-only views, and stay what they were: no division in place, no normalisation."""
    weights, counts = rows(9, 2000, np.float32)
    few, _ = sparse(counts, 30)
    for q in (dense(counts), few):
        arrays = [array for array in (weights, q.values, q.ids) if array is not None]
        before = [array.tobytes() for array in arrays]
        for array in arrays:
            array.flags.writeable = False
        target = FastTarget(weights)
        target.correct(q, END // 2)
        verify_chain_fast([int(counts.argmax())], [q], lambda i: weights, 1, 1, 1, 1)
        assert [array.tobytes() for array in arrays] == before


@pytest.mark.parametrize("dtype", (np.float32, np.float64))
@pytest.mark.parametrize("bad", (math.nan, math.inf, -math.inf, -1.0, -0.0))
@pytest.mark.parametrize("at", (0, 31, 40, 1500))
def test_bad_weights_are_refused(bad: float, at: int, dtype: type) -> None:
    weights = np.ones(1501, dtype)
    weights[at] = bad
    with pytest.raises(LocalMisuse, match="finite"):
        FastTarget(weights)


@pytest.mark.parametrize(
    "weights",
    (np.zeros(0), np.zeros(40), np.full(3, 2.0**-960), np.full(3, 2.0**950), np.full(40, 1e308)),
    ids=("none", "no mass", "tiny", "huge", "overflow"),
)
def test_weights_without_a_usable_sum_are_refused(weights: NDArray[np.float64]) -> None:
    with pytest.raises(LocalMisuse, match="mass"):
        FastTarget(weights)


def test_denormal_weights_count() -> None:
    smallest = np.float32(1e-45)
    target = FastTarget(np.array([smallest, 0, smallest], np.float32))
    assert target.weight(0) == target.weight(2) == target.total // 2 > 0
    assert target.weight(1) == 0
    assert [target.pick(0), target.pick(END - 1)] == [0, 2]


def test_a_zero_weight_is_never_drawn_nor_accepted() -> None:
    weights = np.array([0, 1, 0, 2, 0], np.float32)
    target = FastTarget(weights)
    q = dense(np.array([MASS // 2, 0, MASS // 2, 0, 0], np.uint32))
    for u64 in (0, 1, END // 3, END - 1):
        assert not target.accept(0, q, u64)  # p = 0 and u = 0: strictly less, so never
        assert target.pick(u64) in (1, 3)
        assert target.correct(q, u64)[0] in (1, 3)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    (
        (lambda t: FastTarget(np.ones(3, np.float16)), LocalMisuse, "float32 or float64"),
        (lambda t: FastTarget(np.ones((2, 2))), LocalMisuse, "one-dimensional"),
        (lambda t: t.accept(3, dense(np.array([MASS, 0, 0], np.uint32)), 0), LocalMisuse, "vocabulary"),
        (lambda t: t.accept(-1, dense(np.array([MASS, 0, 0], np.uint32)), 0), LocalMisuse, "vocabulary"),
        (lambda t: t.accept(0, dense(np.array([MASS, 0], np.uint32)), 0), LocalMisuse, "entries"),
        (lambda t: t.accept(1, dense(np.array([MASS, 0, 0], np.uint32)), 0), InvalidQ, "zero_q_token"),
        (lambda t: t.correct(dense(np.array([MASS - 1, 0, 0], np.uint32)), 0), InvalidQ, "mass"),
        (lambda t: t.correct(dense(np.array([MASS, 1, 0], np.uint32)), 0), InvalidQ, "mass"),
        (lambda t: t.correct(QRow(np.array([0.1, 0.9, 0], np.float32)), 0), InvalidQ, "nondyadic"),
        (lambda t: t.correct(QRow(np.array([0.5, -0.5, 1], np.float32)), 0), InvalidQ, "negative"),
        (lambda t: t.correct(QRow(np.array([math.nan, 0.5, 0.5], np.float32)), 0), InvalidQ, "nonfinite"),
        (lambda t: t.correct(QRow(np.array([0.5, 0.5], np.float32), np.array([1, 1], np.int32)), 0), InvalidQ, "id_dup"),
        (lambda t: t.correct(QRow(np.array([0.5, 0.5], np.float32), np.array([1, 0], np.int32)), 0), InvalidQ, "id_order"),
        (lambda t: t.correct(QRow(np.array([0.5, 0.5], np.float32), np.array([0, 3], np.int32)), 0), InvalidQ, "id_range"),
        (lambda t: t.correct(QRow(np.array([0.5, 0.5], np.float32), np.array([-1, 0], np.int32)), 0), InvalidQ, "id_range"),
        (lambda t: t.correct(QRow(np.array([0.5], np.float32), np.array([0], np.int32)), 0), InvalidQ, "mass"),
        (lambda t: t.correct(QRow(np.array([1.0], np.float64)), 0), LocalMisuse, "float32"),
        (lambda t: verify_chain_fast([], [], lambda i: t.weights, 1, 1, 1, 1), LocalMisuse, "target_only_fast"),
        (lambda t: verify_chain_fast([1], [], lambda i: t.weights, 1, 1, 1, 1), LocalMisuse, "rows of q"),
    ),
)
def test_misfits_are_refused(call: Callable[[FastTarget], object], error: type[Exception], text: str) -> None:
    target = FastTarget(np.array([1, 2, 3], np.float32))
    with pytest.raises(error, match=text):
        call(target)


def test_the_binding_refuses_calls_out_of_order() -> None:
    row = kernels.TargetRow()
    raw = np.ones(8).view(np.uint8)
    for call in (
        lambda: row.weight(0),
        lambda: row.pick(0),
        lambda: row.residual_dense(raw, 0, 1),
        lambda: row.load(raw, 0, 9, True),
        lambda: row.load(raw, 8, 8, True),
        lambda: row.load(raw, 0, -1, True),
        lambda: row.pick_residual(0, 0),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
    row.load(raw, 0, 8, True)
    assert row.fix() == 0
    q = np.ones(8, np.float32).view(np.uint8)
    for call in (
        lambda: row.weight(8),
        lambda: row.weight(-1),
        lambda: row.pick(row.total),
        lambda: row.pick_residual(0, 0),
        lambda: row.residual_dense(q, 4, row.total),
        lambda: row.residual_dense(q, 0, row.total - 1),
        lambda: row.residual_dense(q, 0, 1 << 53),
        lambda: row.residual_sparse(q, 0, raw, 0, 9, row.total),
        lambda: row.residual_sparse(q, 0, raw, 61, 1, row.total),
        lambda: row.fix_to(1000),
        lambda: kernels.accept(0, 0, 1, 2),
        lambda: kernels.accept(0, MASS + 1, 1, 2),
        lambda: kernels.accept(0, 1, 3, 2),
        lambda: kernels.accept(0, 1, 1, (1 << 52) + 1),
        lambda: kernels.target_exponent(0.0),
    ):
        with pytest.raises(ValueError, match=r"."):
            call()
    assert row.residual_dense(q, 0, row.total) == Reason.MASS.code
    with pytest.raises(ValueError, match="no residual"):
        row.pick_residual(0, 0)
    one = to_q(np.array([MASS, *[0] * 7], np.uint32)).view(np.uint8)
    assert row.residual_dense(one, 0, row.total) == 0
    assert row.pick_residual(0, 0) == 1
    row.fix_to(row.exponent - 1)  # other integers: that residual is not theirs
    with pytest.raises(ValueError, match="no residual"):
        row.pick_residual(0, 0)
    for exponent in (60, 999):
        with pytest.raises(ValueError, match="sum to more"):
            row.fix_to(exponent)
    with pytest.raises(ValueError, match="call fix"):
        row.weight(0)


def test_the_reason_of_bad_weights_is_this_one() -> None:
    row = kernels.TargetRow()
    row.load(np.full(3, math.nan).view(np.uint8), 0, 3, True)
    assert row.fix() == INVALID
    assert row.block_sums(np.empty(1)) == INVALID


def test_exponents() -> None:
    for total in (1.0, 1.5, math.nextafter(2.0, 0), 2.0, 1e-20, 3e20, 2.0**-900, 2.0**899):
        exponent = kernels.target_exponent(total)
        assert Fraction(2) ** 50 <= Fraction(total) * Fraction(2) ** exponent < Fraction(2) ** 51
    for total in (0.0, -1.0, math.inf, math.nan, 2.0**-902, 2.0**900, -0.0):
        with pytest.raises(ValueError, match="exponent"):
            kernels.target_exponent(total)


def test_chains_equal_layer_b() -> None:
    """Whole rounds: the tokens of `verify_chain_fast` are those of the integer kernel on its integers, at the same noise."""
    rejected = accepted = 0
    for seed in range(60):
        noise = random.Random(seed)
        size, depth = noise.choice((3, 40, 1100)), noise.randrange(1, 5)
        made = [rows(seed * 10 + i, size, noise.choice((np.float32, np.float64)), 1.0) for i in range(depth + 1)]
        qs, tokens = [], []
        for weights, counts in made[:depth]:
            near = allocate(weights.astype(np.float64)) if noise.random() < 0.6 else counts
            qs.append(dense(near))
            tokens.append(draw(near, noise.randrange(MASS)))
        got = verify_chain_fast(tokens, qs, lambda index, made=made: made[index][0], seed, 1, 2, 7)
        want: list[int] = []
        for index in range(depth + 1):
            target = FastTarget(made[index][0])
            ours = target.integers()
            correction = draw64(seed, Domain.CORRECTION, 1, 2, 7 + index)
            if index == depth:
                want.append(wide.pick(ours, correction))
                break
            counts = qs[index].counts().tolist()
            if wide.accept(draw64(seed, Domain.ACCEPT, 1, 2, 7 + index), counts[tokens[index]], ours[tokens[index]], sum(ours)):
                want.append(tokens[index])
                continue
            want.append(wide.pick(wide.residual(ours, sum(ours), counts), correction))
            break
        assert got.committed_tokens == want
        assert got.accepted_drafts == len(want) - 1
        rejected += got.accepted_drafts < depth
        accepted += got.accepted_drafts
    assert rejected > 10
    assert accepted > 20


def test_target_only_draws_from_the_correction_domain() -> None:
    weights = np.array([3, 0, 4, 5], np.float32)
    for position in range(20):
        want = FastTarget(weights).pick(draw64(9, Domain.CORRECTION, 1, 2, position))
        assert target_only_fast(weights, 9, 1, 2, position) == want


def test_no_residual_takes_the_rational_path_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Integers that rejected always leave one; a row that changes between the two calls need not."""
    weights = np.array([0, 3], np.float32)
    q = dense(np.array([0, MASS], np.uint32))
    assert FastTarget(weights).correct(q, 5) == (1, False)
    monkeypatch.setattr(fast.kernels, "accept", lambda *facts: False)
    verdict = verify_chain_fast([1], [q], lambda index: weights, 1, 1, 1, 1)
    assert (verdict.committed_tokens, verdict.no_residual) == ([1], 1)


def test_the_rational_correction_rounds_nothing() -> None:
    weights = np.array([0.1, 0.7, 0.2], np.float32)
    ids = np.array([1], np.int32)
    exact = wide.exact_weights(weights.tolist())
    assert Fraction(exact[0], exact[1]) == Fraction(float(weights[0])) / Fraction(float(weights[1]))
    masses = wide.residual(exact, sum(exact), [0, MASS, 0])
    for u64 in (0, END // 3 - 1, END // 3 + 1, END - 1):
        assert rational_correction(weights, QRow(np.ones(1, np.float32), ids), u64) == wide.pick(masses, u64)
    with pytest.raises(LocalMisuse, match="finite"):
        wide.exact_weights([1.0, math.inf])
