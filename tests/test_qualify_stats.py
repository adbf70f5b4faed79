"""The benchmark's figures: exact ranks, exact keys, and errors instead of figures where nothing was measured."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.qualify import stats
from pp1q_transport.qualify.stats import CpuTimes, Floors, GoodputMeter, Report, Samples, render_table

pytestmark = pytest.mark.timeout(60)
HEADINGS = ["#bytes", "#iterations", "t_min[usec]", "t_typical[usec]", "t_p50", "t_p99", "t_p99.9", "t_max"]
RANKS = {"min": 0, "typical": 500, "p50": 500, "p90": 900, "p99": 990, "p999": 999, "max": 1000}


def naive(samples: list[int], per_mille: int) -> int:
    """The smallest sample that at least that share of all samples do not exceed, by counting."""
    return min(
        candidate
        for candidate in samples
        if Fraction(sum(sample <= candidate for sample in samples), len(samples)) >= Fraction(per_mille, 1000)
    )


def filled(*values: int) -> Samples:
    samples = Samples(len(values))
    samples.extend(np.array(values, np.uint64))
    return samples


@given(st.lists(st.integers(0, 2**50), min_size=1, max_size=60), st.integers(0, 5))
def test_every_figure_is_the_naive_order_statistic(values: list[int], warmup: int) -> None:
    samples = Samples(len(values), warmup)
    for value in [2**63] * warmup + values:
        samples.add(value)
    summary = samples.summary_us()
    assert summary["n"] == len(samples) == len(values)
    assert {key: summary[key] for key in RANKS} == {k: naive(values, rank) / 1000 for k, rank in RANKS.items()}


@pytest.mark.parametrize(
    ("n", "per_mille", "index"),
    ((1, 0, 0), (1, 500, 0), (1, 1000, 0), (2, 500, 0), (3, 500, 1), (1000, 999, 998), (1001, 999, 999),
     (999, 999, 998), (100, 990, 98), (10, 900, 8), (10, 901, 9), (5, 1000, 4)),
)  # fmt: skip
def test_nearest_rank_by_hand(n: int, per_mille: int, index: int) -> None:
    assert stats.nearest_rank(n, per_mille) == index


@given(st.lists(st.integers(0, 2**63), max_size=30), st.integers(0, 8), st.data())
def test_adding_in_pieces_equals_adding_one_by_one(values: list[int], warmup: int, data: st.DataObject) -> None:
    one_by_one, in_pieces = Samples(40, warmup), Samples(40, warmup)
    for value in values:
        one_by_one.add(value)
    cut = data.draw(st.integers(0, len(values)))
    for piece in (values[:cut], values[cut:]):
        in_pieces.extend(np.array(piece, np.uint64))
    assert one_by_one.values_ns().tolist() == in_pieces.values_ns().tolist() == values[warmup:]


def test_samples_refuse_what_they_cannot_hold() -> None:
    for capacity, warmup in ((0, 0), (-1, 0), (1, -1)):
        with pytest.raises(LocalMisuse, match="capacity"):
            Samples(capacity, warmup)
    samples = filled(1, 2)
    with pytest.raises(LocalMisuse, match="room for 2"):
        samples.add(3)
    with pytest.raises(LocalMisuse, match="room for 2"):
        samples.extend(np.array([3], np.uint64))
    assert samples.values_ns().tolist() == [1, 2]
    with pytest.raises(LocalMisuse, match="none negative"):
        Samples(1).add(-1)
    with pytest.raises(LocalMisuse, match="0 samples"):
        Samples(1).summary_us()
    for per_mille in (-1, 1001):
        with pytest.raises(LocalMisuse, match="no rank"):
            stats.nearest_rank(5, per_mille)


def test_a_refused_extend_keeps_its_warm_up() -> None:
    samples = Samples(1, warmup=1)
    with pytest.raises(LocalMisuse, match="room for 1"):
        samples.extend(np.array([7, 8, 9], np.uint64))
    samples.extend(np.array([7, 8], np.uint64))
    assert samples.values_ns().tolist() == [8]


def test_written_samples_are_exact_and_in_order(tmp_path: Path) -> None:
    values = (1, 999, 1000, 123_456_789, 2**63, 42)
    filled(*values).write(tmp_path / "samples.txt")
    lines = (tmp_path / "samples.txt").read_text().splitlines()
    assert lines[:4] == ["0.001", "0.999", "1.000", "123456.789"]
    assert [int(line.replace(".", "")) for line in lines] == list(values)


def test_cpu_seconds_count_this_process_and_its_finished_children() -> None:
    start = CpuTimes.now()
    while CpuTimes.now().own_s - start.own_s < 0.02:
        sum(range(1000))
    own = CpuTimes.now()
    burn = "import time\nwhile time.process_time() < 0.05: pass"
    subprocess.run([sys.executable, "-S", "-c", burn], check=True, timeout=30)
    end = CpuTimes.now()
    assert own.children_s == start.children_s
    assert end.children_s - start.children_s >= 0.05
    assert stats.cpu_s_per_GB(start, end, 10**9) == pytest.approx(end.total_s - start.total_s)
    assert stats.cpu_s_per_GB(start, end, 5 * 10**8) == pytest.approx(2 * (end.total_s - start.total_s))
    with pytest.raises(LocalMisuse, match="at least one byte"):
        stats.cpu_s_per_GB(start, end, 0)


GROWS = """
import numpy as np
from pp1q_transport.qualify import stats
baseline = stats.BaselineRss()
touched = np.full(64 << 20, 7, np.uint8)
now = stats.rss_MiB()
assert 60 <= baseline.grown_MiB() <= 80
assert baseline.baseline_MiB + 60 <= now.now_MiB <= now.peak_MiB + 1
del touched
assert baseline.grown_MiB() < 20
assert stats.rss_MiB().peak_MiB >= now.now_MiB - 1  # the kernel counts pages in batches
"""


def test_resident_memory_grows_by_what_was_touched() -> None:
    """In a process of its own: a kernel may take idle pages from one that has many, meanwhile."""
    subprocess.run([sys.executable, "-c", GROWS], check=True, timeout=60)


def test_pinning_binds_and_names_what_there_is() -> None:
    allowed = os.sched_getaffinity(0)
    try:
        assert stats.pin(min(allowed)) == allowed
        assert os.sched_getaffinity(0) == {min(allowed)}
        assert stats.pin(max(allowed)) == {min(allowed)}  # a pin is no prison
    finally:
        os.sched_setaffinity(0, allowed)
    for cpu in (1023, -1, 2**40):
        with pytest.raises(ConfigError, match=rf"cannot pin to CPU {cpu} .*this host has CPUs 0 to \d+"):
            stats.pin(cpu)
    assert os.sched_getaffinity(0) == allowed


def test_goodput_counts_ready_payload_between_start_and_stop() -> None:
    meter = GoodputMeter()
    for figure in (lambda: meter.elapsed_s, lambda: meter.cpu_s_per_GB, meter.stop):
        with pytest.raises(LocalMisuse, match="start"):
            figure()
    meter.add(999)
    meter.start(now_ns=1_000)
    meter.add(1_500_000_000, 5)
    meter.add(500_000_000)
    with pytest.raises(LocalMisuse, match="stop"):
        _ = meter.goodput_GBps
    meter.stop(now_ns=500_001_000)
    assert (meter.elapsed_s, meter.goodput_GBps, meter.rows_per_s) == (0.5, 4.0, 12.0)
    assert meter.cpu_s_per_GB >= 0
    meter.start(now_ns=7)
    meter.stop(now_ns=7)
    with pytest.raises(LocalMisuse, match="later"):
        _ = meter.rows_per_s


def report() -> Report:
    return Report(
        link="tcp", representation="sparse", requests=4, depth=5, rounds=1000, ready=3998, discarded=2,
        reasons={"timeout": 1, "payload_digest": 1}, latency_us=filled(*range(7_000, 27_000, 10)).summary_us(),
        tail_us=filled(5_000, 6_000).summary_us(), goodput_GBps=4.25, rows_per_s=123456.0, cpu_s_per_GB=0.5,
        rss_MiB=61.5, floors=Floors(11.5, 4.5, 7.8, 109.0, 2.7), payload_bytes=5120, extra={"idle": "spin"},
    )  # fmt: skip


def test_report_keys_are_the_contract() -> None:
    data = json.loads(report().to_json())
    assert list(data) == [
        "link", "representation", "requests", "depth", "rounds", "ready", "discarded", "reasons", "latency_us",
        "tail_us", "goodput_GBps", "rows_per_s", "cpu_s_per_GB", "rss_MiB", "floors", "extra",
    ]  # fmt: skip
    assert list(data["latency_us"]) == ["min", "p50", "p99", "p999", "max"]
    assert list(data["tail_us"]) == ["p50", "p99"]
    assert list(data["floors"]) == ["memcpy_GBps", "socket_GBps", "socket_rtt_us", "zmq_rtt_us", "zmq_GBps"]
    assert data["latency_us"] == {"min": 7.0, "p50": 16.99, "p99": 26.79, "p999": 26.97, "max": 26.99}
    assert data["extra"]["payload_bytes"] == 5120
    assert data["extra"]["idle"] == "spin"


def test_what_was_not_measured_is_null_under_the_same_keys() -> None:
    data = replace(report(), latency_us=None, tail_us=None, floors=Floors(), cpu_s_per_GB=None).as_dict()
    assert set(data["latency_us"].values()) == set(data["tail_us"].values()) == set(data["floors"].values()) == {None}
    with pytest.raises(ValueError, match="JSON"):
        replace(report(), goodput_GBps=math.nan).to_json()


@pytest.mark.parametrize("latency", (True, False), ids=["ready", "nothing_ready"])
def test_a_report_survives_the_way_to_the_other_side(latency: bool) -> None:
    sent = report() if latency else replace(report(), latency_us=None, tail_us=None, floors=Floors(), ready=0)
    assert Report.from_dict(json.loads(sent.to_json())) == sent


BAD_REPORTS = {
    "no_map": lambda data: [data],
    "missing": lambda data: data.pop("ready") and data,
    "unknown": lambda data: data | {"more": 1},
    "text_for_number": lambda data: data | {"rounds": "1000"},
    "bool_for_number": lambda data: data | {"depth": True},
    "not_finite": lambda data: data | {"goodput_GBps": math.inf},
    "terminal_escape": lambda data: data | {"link": "\x1b[2J"},
    "long_text": lambda data: data | {"link": "x" * 65},
    "unknown_reason": lambda data: data | {"reasons": {"bad luck": 1}},
    "reason_without_count": lambda data: data | {"reasons": {"timeout": "1"}},
    "floor_missing": lambda data: data | {"floors": {}},
    "latency_key": lambda data: data | {"latency_us": {"p50": 1.0}},
    "no_payload": lambda data: data | {"extra": {}},
    "half_a_summary": lambda data: data | {"extra": data["extra"] | {"latency_summary_us": {"min": 1.0}}},
}


@pytest.mark.parametrize("spoil", BAD_REPORTS.values(), ids=BAD_REPORTS.keys())
def test_a_report_that_is_none_is_refused_by_name(spoil) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(PeerFault) as caught:
        Report.from_dict(spoil(report().as_dict()))
    assert caught.value.reason is Reason.MALFORMED


def test_the_table_is_aligned_within_eighty_columns() -> None:
    text = render_table(report())
    lines = text.splitlines()
    assert max(map(len, lines)) == 80
    head = next(i for i, line in enumerate(lines) if line.lstrip().startswith("#bytes"))
    assert lines[head].split() == HEADINGS
    assert lines[head + 1].split() == ["5120", "2000", "7.00", "16.99", "16.99", "26.79", "26.97", "26.99"]
    ends = [lines[head].index(name) + len(name) for name in lines[head].split()]
    assert all(lines[head + 1][end - 1].isdigit() and lines[head + 1][end : end + 1] in ("", " ") for end in ends)
    ratios = {line.split("  ")[-1].strip(): line.split()[-3 if "rtt" in line else -2] for line in lines if "/" in line}
    assert ratios["goodput/socket"] == "0.9444"
    assert ratios["p50/socket rtt"] == "2.18"
    assert "payload_digest 1, timeout 1" in text


@given(
    st.floats(0, 1e12),
    st.integers(1, 10**9),
    st.dictionaries(st.sampled_from([reason.value for reason in Reason]), st.integers(1, 10**6)),
)
def test_no_figure_breaks_the_width(figure: float, ns: int, reasons: dict[str, int]) -> None:
    summary = filled(ns, ns * 1000).summary_us()
    wide = replace(
        report(), latency_us=summary, tail_us=summary, goodput_GBps=figure, rows_per_s=figure, cpu_s_per_GB=figure,
        rss_MiB=figure, floors=Floors(*[figure] * 5), reasons=reasons,
    )  # fmt: skip
    assert max(map(len, render_table(wide).splitlines())) == 80


def test_the_table_marks_what_was_not_measured() -> None:
    text = render_table(replace(report(), latency_us=None, tail_us=None, floors=Floors(), reasons={}))
    assert "Discard reasons: none" in text
    assert text.count(" - ") >= 15
    assert max(map(len, text.splitlines())) == 80
