"""A daemon's status as Prometheus text: every metric's name, type and labels in one place.

Between `status` and `metrics`, which serves the text. Reads a snapshot on every scrape and keeps none; labels come from closed
lists (reasons, slot states, outcomes, roles) and from the configuration (peers), never from a request. What they
mean is in docs/operations.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from typing import Final

from prometheus_client.exposition import generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector, CollectorRegistry

from ..counters import HistogramSnapshot
from .status import Status

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
_NS: Final = 1_000_000_000
_BREAKER_STATES: Final = {"closed": 0, "probing": 1, "open": 2}


class StatusCollector(Collector):
    """Yields the metrics of what `status` returns at the moment of the scrape."""

    def __init__(self, status: Callable[[], Status]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """The metric families, in the order of the documentation."""
        status = self._status()
        yield from _proposals(status)
        yield from _sessions(status)
        yield from _process(status)


def make_registry(status: Callable[[], Status]) -> CollectorRegistry:
    """A registry of its own that holds nothing but the status: no process or interpreter metrics of another program part."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(StatusCollector(status))
    return registry


def render(registry: CollectorRegistry) -> bytes:
    """The text that Prometheus scrapes, of `CONTENT_TYPE`."""
    return generate_latest(registry)


def _proposals(status: Status) -> Iterator[Metric]:
    outcomes = {"ready": status["ready"], "discarded": status["discarded"]}
    yield _counter("pp1q_proposals_total", "Proposals by outcome.", "outcome", outcomes)
    yield _counter("pp1q_discards_total", "Discarded proposals by reason.", "reason", status.get("discards", {}))
    yield _counter("pp1q_refusals_total", "All that was refused, by reason, discards too.", "reason", status["reasons"])
    yield CounterMetricFamily("pp1q_rows", "Rows of q that became ready or were sent.", value=status["rows"])
    yield CounterMetricFamily("pp1q_payload_bytes", "Bytes of those rows, headers excluded.", value=status["bytes_ready"])
    yield _histogram("pp1q_step_latency_seconds", "From the STEP's enqueueing to q-ready.", status["latency"])
    yield _histogram("pp1q_tail_after_last_row_seconds", "From the last row's arrival to q-ready.", status["tail"])
    yield _gauge("pp1q_slots", "Slots by state.", "state", status["slots"])
    quarantined = status["slots"].get("QUARANTINE", 0)
    yield GaugeMetricFamily("pp1q_quarantined_slots", "Slots whose memory is not fenced yet.", value=quarantined)


def _sessions(status: Status) -> Iterator[Metric]:
    sessions = status["sessions"]
    up = {session["peer"]: int(session["up"]) for session in sessions}
    yield _gauge("pp1q_sessions_up", "1 while a session with the peer runs.", "peer", up)
    formed = {session["peer"]: session["formed"] for session in sessions}
    yield _counter("pp1q_sessions_total", "Sessions formed with the peer.", "peer", formed)
    breakers = {breaker["peer"]: _BREAKER_STATES.get(breaker["state"], 2) for breaker in status["breakers"]}
    yield _gauge("pp1q_breaker_open", "0 closed, 1 probing, 2 open: STEPs are not sent.", "peer", breakers)
    group = status["group"]
    if group is not None:
        yield GaugeMetricFamily("pp1q_group_epoch", "The rank group's epoch.", value=group["epoch"])
        yield GaugeMetricFamily("pp1q_ranks_up", "Ranks of the group that are there.", value=group["ranks_up"])
        yield GaugeMetricFamily("pp1q_ranks", "Ranks the group has.", value=group["size"])
    clients: dict[str, int] = {}
    for client in status["clients"]:
        clients[client["role"]] = clients.get(client["role"], 0) + 1
    yield _gauge("pp1q_clients", "Attached processes.", "role", clients)


def _process(status: Status) -> Iterator[Metric]:
    yield CounterMetricFamily("pp1q_loops", "Turns of the daemon's loop.", value=status["loops"])
    yield GaugeMetricFamily("pp1q_draining", "1 while the daemon drains before it ends.", value=int(status["draining"]))
    started_s = time.time() - status["uptime_s"]
    yield GaugeMetricFamily("pp1q_process_start_time_seconds", "When the daemon started, in Unix time.", value=started_s)
    yield _gauge("pp1q_build_info", "The build that runs.", "version", {status["version"]: 1})


def _counter(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _gauge(name: str, text: str, label: str, values: Mapping[str, int]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def _histogram(name: str, text: str, snapshot: HistogramSnapshot) -> Metric:
    """Only the bounds 1, 2 and 5 of each decade: what a scrape keeps is paid for in every store."""
    buckets: list[tuple[str, float]] = []
    below = 0
    for bound_ns, count in zip(snapshot["bounds_ns"], snapshot["counts"], strict=False):
        below += count
        if f"{bound_ns}".rstrip("0") in ("1", "2", "5"):
            buckets.append((repr(bound_ns / _NS), below))
    buckets.append(("+Inf", sum(snapshot["counts"])))
    return HistogramMetricFamily(name, text, buckets=buckets, sum_value=snapshot["sum_ns"] / _NS)
