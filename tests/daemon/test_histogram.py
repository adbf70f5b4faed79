"""The histogram: bounds belong to their bucket, quantiles lie where they must, snapshots are copies."""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.counters import BOUNDS_NS, Counters, Histogram, quantile_ns
from pp1q_transport.errors import Reason


def test_bounds_rise_by_at_most_28_percent_and_hold_1_2_5() -> None:
    for low, high in itertools.pairwise(BOUNDS_NS):
        assert 1 < high / low <= 1.28
    assert (BOUNDS_NS[0], BOUNDS_NS[-1]) == (1_000, 10_000_000_000)
    assert {step * 10**power for step in (1, 2, 5) for power in range(3, 10)} <= set(BOUNDS_NS)


@pytest.mark.parametrize("index", (0, 1, 35, len(BOUNDS_NS) - 1))
def test_a_bound_belongs_to_the_bucket_it_ends(index: int) -> None:
    histogram = Histogram()
    histogram.add(BOUNDS_NS[index])
    histogram.add(BOUNDS_NS[index] + 1)
    assert histogram.counts[index] == 1
    assert histogram.counts[index + 1] == 1
    assert histogram.sum_ns == 2 * BOUNDS_NS[index] + 1


def test_quantiles_of_nothing_and_of_the_unbounded() -> None:
    histogram = Histogram()
    assert histogram.quantile(0.5) is None
    histogram.add(10**12)
    assert histogram.quantile(0.5) == BOUNDS_NS[-1]
    assert histogram.quantile(0.0) == BOUNDS_NS[-1]


def test_a_quantile_is_spread_within_its_bucket() -> None:
    assert quantile_ns((100, 200), (0, 4, 0), 0.5) == 150
    assert quantile_ns((100, 200), (0, 4, 0), 1.0) == 200
    assert quantile_ns((100, 200), (1, 1, 0), 0.5) == 100
    assert quantile_ns((100, 200), (1, 1, 0), 0.75) == 150


@given(st.lists(st.integers(1_000, 10**10), min_size=1, max_size=300), st.floats(0, 1))
def test_a_quantile_is_in_the_bucket_of_the_value_it_stands_for(values: list[int], q: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    assert histogram.count == len(values)
    found = histogram.quantile(q)
    assert found is not None
    exact = sorted(values)[max(1, math.ceil(q * len(values))) - 1]
    index = bisect_left(BOUNDS_NS, exact)
    assert (BOUNDS_NS[index - 1] if index else 0) <= found <= BOUNDS_NS[index]


def test_a_snapshot_is_a_copy() -> None:
    histogram = Histogram()
    before = histogram.snapshot()
    histogram.add(5_000)
    assert sum(before["counts"]) == 0
    assert before["bounds_ns"] == list(BOUNDS_NS)
    assert len(before["counts"]) == len(BOUNDS_NS) + 1
    assert sum(histogram.snapshot()["counts"]) == 1


def test_a_discard_counts_three_ways() -> None:
    counters = Counters()
    counters.refuse(Reason.TIMEOUT)
    counters.discard(Reason.TIMEOUT)
    assert counters.get("discarded") == 1
    assert counters.of(Reason.TIMEOUT) == 2
    assert counters.discards == {"timeout": 1}
