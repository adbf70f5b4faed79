"""Allocation, the fixed summation tree and top-k against the oracle."""

from __future__ import annotations

import ctypes
import math
import platform
import random

import kernel_cases as cases
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from pp1q_transport._native import kernels, oracle
from pp1q_transport.errors import Reason

MASS = oracle.MASS
INVALID = Reason.INVALID_WEIGHTS.code
WEIGHTS = cases.weights()
EXPECTED = {name: oracle.allocate(values) for name, values in WEIGHTS.items()}


def allocate(values: npt.ArrayLike) -> tuple[int, list[int]]:
    weights = np.array(values, np.float64)
    counts = np.full(weights.size, 0xDEADBEEF, np.uint32)
    code = kernels.allocate(weights, counts)
    return code, counts.tolist() if code == 0 else []


def test_allocate_equals_oracle(level: str) -> None:
    for name, values in WEIGHTS.items():
        assert allocate(values) == EXPECTED[name], name


def test_the_table_has_refusals_and_every_sum_is_exact() -> None:
    codes = {code for code, _ in EXPECTED.values()}
    assert codes == {0, INVALID}
    assert all(sum(counts) == MASS for code, counts in EXPECTED.values() if code == 0)


def test_block_sums_and_tree_equal_oracle(level: str) -> None:
    for name, values in WEIGHTS.items():
        sums = np.empty((len(values) + 31) // 32)
        code, expected = oracle.block_sums(values)
        assert kernels.block_sums(np.array(values, np.float64), sums) == code, name
        if code == 0:
            assert sums.tobytes() == np.array(expected, np.float64).tobytes(), name
            root = kernels.tree_sum(sums)
            assert math.isinf(root) or root == oracle.tree_sum(expected), name
            assert sums.tolist() == expected, "tree_sum may not touch its input"


@pytest.mark.parametrize("n", range(1, 70))
def test_tree_sum_of_every_shape(n: int) -> None:
    rng = random.Random(n)
    sums = [math.exp(rng.gauss(0, 20)) for _ in range(n)]
    assert kernels.tree_sum(np.array(sums)) == oracle.tree_sum(sums)


def test_the_tree_is_the_same_sharded(level: str) -> None:
    rng = np.random.default_rng(4)
    weights = np.exp(rng.normal(size=64640) * 3)
    whole = np.empty(2020)
    kernels.block_sums(weights, whole)
    parts = []
    for first, end in ((0, 32), (32, 32), (32, 32320), (32320, 64640)):
        part = np.empty((end - first) // 32)
        kernels.block_sums(weights[first:end], part)
        parts.append(part)
    assert np.concatenate(parts).tobytes() == whole.tobytes()


def test_ties_go_to_the_lowest_id(level: str) -> None:
    for n in (3, 33, 1000, 5000):
        code, counts = allocate([0.7] * n)
        low, extra = divmod(MASS, n)
        assert (code, counts) == (0, [low + 1] * extra + [low] * (n - extra))


def test_tickets_go_to_positive_weights_only(level: str) -> None:
    values = [0.0] * 4000
    for i in range(1, 4000, 3):
        values[i] = 1.0
    _, counts = allocate(values)
    assert all((count > 0) == (value > 0) for count, value in zip(counts, values, strict=True))


@pytest.mark.parametrize("k", (1, 2, 3, 31, 32, 33, 100, 400, 5000))
def test_top_k_equals_oracle(level: str, k: int) -> None:
    for name, values in WEIGHTS.items():
        ids = np.full(k, -7, np.int32)
        n = kernels.top_k(np.array(values, np.float64), k, ids)
        code, expected = oracle.top_k(values, k)
        assert (n, ids[: max(n, 0)].tolist()) == ((-code, []) if code else (len(expected), expected)), name
        assert (ids[max(n, 0) :] == -7).all(), "nothing is written beyond what is returned"


VALUES = st.one_of(
    st.sampled_from([0.0, 1.0, 0.5, 5e-324, 1e-310, 0.1, 0.2, 1e300]),
    st.floats(0, 1e6, width=64),
    st.floats(0, width=64, allow_infinity=False),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(values=st.lists(VALUES, min_size=1, max_size=150), repeat=st.integers(1, 12), k=st.integers(1, 60))
def test_any_weights_are_treated_as_the_oracle_does(
    each_level: list[str], values: list[float], repeat: int, k: int
) -> None:
    values = values * repeat
    assume(not any(math.copysign(1, v) < 0 for v in values))
    expected = oracle.allocate(values)
    _, chosen = oracle.top_k(values, k)
    for name in each_level:
        kernels.select_level(name)
        assert allocate(values) == expected
        ids = np.empty(k, np.int32)
        n = kernels.top_k(np.array(values), k, ids)
        assert ids[:n].tolist() == chosen


@pytest.mark.parametrize("n", (129280, 300_001))
def test_levels_agree_at_full_size(each_level: list[str], n: int) -> None:
    rng = np.random.default_rng(9)
    for scale in (0.0, 0.5, 3.0, 12.0, 40.0):
        weights = np.exp(rng.normal(size=n) * scale - 10)
        results = []
        for name in each_level:
            kernels.select_level(name)
            counts = np.empty(n, np.uint32)
            assert kernels.allocate(weights, counts) == 0
            assert int(counts.sum(dtype=np.uint64)) == MASS
            results.append(counts.tobytes())
        assert len(set(results)) == 1
        assert np.array_equal(counts, by_sorting(weights))


def by_sorting(weights: npt.NDArray[np.float64]) -> npt.NDArray[np.int64]:
    """The allocation with whole arrays and a full sort; the sum alone comes from the kernel's tree."""
    sums = np.empty((weights.size + 31) // 32)
    kernels.block_sums(weights, sums)
    scaled = weights * MASS / kernels.tree_sum(sums)
    counts = np.floor(scaled).astype(np.int64)
    order = np.lexsort((np.arange(weights.size), counts - scaled))
    counts[order[: MASS - int(counts.sum())]] += 1
    return counts


def test_a_tree_sum_that_rounds_low_is_refused_or_exact(level: str) -> None:
    """Weights whose scaled values are whole up to rounding: the sum of floors may not pass 2^24 unnoticed."""
    for n in (3, 7, 10, 1000, 4096):
        for base in (0.1, 1 / 3, 0.7):
            values = [base * (1 + i % 3) for i in range(n)]
            assert allocate(values) == oracle.allocate(values)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="sets the mode through the x86-64 layout of fenv_t")
def test_flush_to_zero_of_the_host_process_changes_nothing(level: str) -> None:
    """A library loaded beside us may have set flush-to-zero; denormal weights must count all the same."""
    libm = ctypes.CDLL("libm.so.6")
    environment = (ctypes.c_ubyte * 32)()
    libm.fegetenv(environment)
    saved = bytes(environment)
    try:
        mxcsr = int.from_bytes(saved[28:32], "little") | 0x8040
        environment[28:32] = list(mxcsr.to_bytes(4, "little"))
        libm.fesetenv(environment)
        flushed = np.array([5e-324]) * 1.0
        counts = np.zeros(100, np.uint32)
        code = kernels.allocate(DENORMALS, counts)
        libm.fegetenv(environment)
    finally:
        kept = bytes(environment)[28:32]
        environment[:] = list(saved)
        libm.fesetenv(environment)
    assert flushed[0] == 0.0, "the test did not set flush-to-zero"
    assert int.from_bytes(kept, "little") & 0x8040 == 0x8040, "the caller's mode was not put back"
    assert (code, counts.tolist()) == oracle.allocate(DENORMALS.tolist())


DENORMALS = np.array([(1 + i % 5) * 5e-324 for i in range(100)])
