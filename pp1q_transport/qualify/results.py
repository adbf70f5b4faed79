"""What the stages of a run gave, put together into the one report. Between `measuring`, which fills it, and `stats`.

Estimates nothing: latencies are all samples of all repetitions, rates are medians of the repetitions. SPEC section 9.
"""

from __future__ import annotations

from statistics import median
from typing import TYPE_CHECKING, Final

import numpy as np

from .._native import kernels
from ..errors import PeerFault, Reason
from .issuing import Block, Issuer, cpu_of
from .motion import live_link
from .plan import Plan, StageKind
from .stats import BaselineRss, Floors, Nanoseconds, Report, Samples, SummaryUs

if TYPE_CHECKING:
    from ..client import Receiver
    from .floors import FloorResult

MEMORY_LIMIT_MiB: Final = 64


class Results:
    """Filled stage by stage. `cpus` are (leader's, receiver's), -1 for not pinned."""

    def __init__(
        self, plan: Plan, receiver: Receiver, baseline: BaselineRss, same_host: bool, cpus: tuple[object, int]
    ) -> None:
        self.plan = plan
        self.latency = Samples(plan.rounds)
        self.tail = Samples(plan.rounds)
        self.memory_MiB = 0.0
        self.memcpy_GBps: list[float] = []
        self._receiver = receiver
        self._link = live_link(receiver).kind
        self._baseline = baseline
        self._same_host = same_host
        self._cpus = cpus
        self._latency_p50s: list[float] = []
        self._goodputs: list[Block] = []
        self._leader_cpu_s = 0.0
        self._rtts: dict[StageKind, list[Nanoseconds]] = {StageKind.SOCKET_RTT: [], StageKind.ZMQ_RTT: []}
        self._rates: dict[StageKind, list[float]] = {StageKind.SOCKET_GBPS: [], StageKind.ZMQ_GBPS: []}

    def add(self, block: Block, served: dict[str, object]) -> None:
        """One measured transport stage, and what the leader said at its end. Raises `PeerFault(malformed)`."""
        kind = block.stage.kind
        if kind is StageKind.GOODPUT:
            self._goodputs.append(block)
            spent = served["cpu_s"]
            assert isinstance(spent, (int, float))
            self._leader_cpu_s += spent
            return
        ready = block.ready_ns > 0
        if kind is StageKind.LATENCY:
            fresh = block.ready_ns[ready] - block.enqueued_ns[ready]
            self.latency.extend(fresh)
            if len(fresh):
                self._latency_p50s.append(float(np.median(fresh)) / 1000)
        elif self._same_host:
            self.tail.extend(_tails(block, ready, served["staged_ns"]))

    def add_floor(self, kind: StageKind, outcome: FloorResult) -> None:
        """One floor's outcome."""
        if kind in self._rates:
            self._rates[kind].append(outcome.goodput_GBps)
        else:
            assert outcome.samples_ns is not None
            self._rtts[kind].append(outcome.samples_ns)

    def _rtt_us(self, kind: StageKind) -> float | None:
        pieces = self._rtts[kind]
        return float(np.median(np.concatenate(pieces))) / 1000 if pieces else None

    def _rate(self, kind: StageKind) -> float | None:
        return median(self._rates[kind]) if self._rates[kind] else None

    def floors(self) -> Floors:
        """Medians; None for what was not asked for."""
        return Floors(
            memcpy_GBps=median(self.memcpy_GBps) if self.memcpy_GBps else None,
            socket_GBps=self._rate(StageKind.SOCKET_GBPS),
            socket_rtt_us=self._rtt_us(StageKind.SOCKET_RTT),
            zmq_rtt_us=self._rtt_us(StageKind.ZMQ_RTT),
            zmq_GBps=self._rate(StageKind.ZMQ_GBPS),
        )

    def report(self, issuer: Issuer) -> Report:
        """The whole report."""
        plan, floors = self.plan, self.floors()
        goodputs = [block.payload_bytes / block.elapsed_ns for block in self._goodputs]
        rows = [block.rows * 1e9 / block.elapsed_ns for block in self._goodputs]
        latency = _summary(self.latency)
        goodput = median(goodputs)
        return Report(
            link=self._link,
            representation=plan.representation,
            requests=plan.requests,
            depth=plan.depth,
            rounds=plan.rounds,
            ready=issuer.ready,
            discarded=issuer.discarded,
            reasons=dict(issuer.reasons),
            latency_us=latency,
            tail_us=_summary(self.tail),
            goodput_GBps=goodput,
            rows_per_s=median(rows),
            cpu_s_per_GB=cpu_of(self._goodputs, self._leader_cpu_s),
            rss_MiB=self.memory_MiB,
            floors=floors,
            payload_bytes=plan.request_bytes,
            extra=self._extra(issuer, floors, latency, goodput, goodputs),
        )

    def _extra(
        self, issuer: Issuer, floors: Floors, latency: SummaryUs | None, goodput: float, goodputs: list[float]
    ) -> dict[str, object]:
        plan = self.plan
        link = self._receiver.engine.link
        return {
            **{name: getattr(plan, name) for name in ("idle", "warmup", "vocab", "support", "seed")},
            "ratios": _ratios(floors, latency, goodput),
            "ratios_each": self._ratios_each(goodputs),
            "goodput_GBps_each": goodputs,
            "socket_GBps_each": self._rates[StageKind.SOCKET_GBPS],
            "memory": self._memory(),
            "cpus": {"leader": self._cpus[0], "receiver": self._cpus[1]},
            "tail_clock": "CLOCK_MONOTONIC of the one host" if self._same_host else "none: two hosts, so no tail",
            "rows_compared": issuer.rows_compared,
            "kernels": kernels.level(),
            "link": link.describe() if link is not None else {},
        }

    def _ratios_each(self, goodputs: list[float]) -> dict[str, object]:
        """Median over the repetitions of each one's ratio: what drifts during a run weighs on both sides alike."""
        rates = self._rates[StageKind.SOCKET_GBPS]
        rtts = [float(np.median(piece)) / 1000 for piece in self._rtts[StageKind.SOCKET_RTT]]
        return {
            "goodput_socket": _median_ratio(goodputs, rates),
            "p50_socket_rtt": _median_ratio(self._latency_p50s, rtts),
        }

    def _memory(self) -> dict[str, object]:
        """MiB: steady state of this process before the floors got memory of their own."""
        views = self._receiver.views
        slots = views.geometry.total_bytes / (1 << 20)
        return {
            "baseline_MiB": self._baseline.baseline_MiB,
            "slots_MiB": slots,
            "over_MiB": self.memory_MiB - self._baseline.baseline_MiB - slots,
            "limit_MiB": MEMORY_LIMIT_MiB,
        }


def _tails(block: Block, ready: np.ndarray[tuple[int], np.dtype[np.bool_]], staged: object) -> Nanoseconds:
    """Last row staged to q-ready, where the leader's clock is ours. Raises `PeerFault(malformed)`."""
    assert isinstance(staged, bytes)
    if len(staged) != 8 * len(block.ready_ns):
        raise PeerFault(Reason.MALFORMED, f"{len(staged)} bytes of staging times for {len(block.ready_ns)} proposals")
    times = np.frombuffer(staged, "<u8")[ready]
    ends = block.ready_ns[ready]
    if np.any(times < block.enqueued_ns[ready]) or np.any(times > ends):
        raise PeerFault(Reason.MALFORMED, "staging times that do not lie between STEP and ready")
    tails: Nanoseconds = ends - times
    return tails


def _summary(samples: Samples) -> SummaryUs | None:
    return samples.summary_us() if len(samples) else None


def _ratio(ours: float | None, floor: float | None) -> float | None:
    return ours / floor if ours is not None and floor else None


def _median_ratio(ours: list[float], floors: list[float]) -> float | None:
    pairs = [one / floor for one, floor in zip(ours, floors, strict=False) if floor]
    return median(pairs) if pairs else None


def _ratios(floors: Floors, latency: SummaryUs | None, goodput: float) -> dict[str, object]:
    p50 = None if latency is None else latency["p50"]
    return {
        "goodput_socket": _ratio(goodput, floors.socket_GBps),
        "goodput_zmq": _ratio(goodput, floors.zmq_GBps),
        "goodput_memcpy": _ratio(goodput, floors.memcpy_GBps),
        "p50_socket_rtt": _ratio(p50, floors.socket_rtt_us),
        "p50_zmq_rtt": _ratio(p50, floors.zmq_rtt_us),
    }
