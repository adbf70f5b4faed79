#!/usr/bin/env python3
"""A sidecar deployment under steady load for a long time: nothing may grow, and nothing may slow down.

    make soak                       half an hour
    scripts/soak.py --seconds 180   what CI runs

Dense and sparse proposals of all depths, commits, discards by budgets that can't be met, thousands of requests opened and closed,
the target attached anew every 20 s, the draft started anew, each daemon restarted once. Every 5 s: memory, descriptors and maps
of every process, latency of the interval. Each life of a process is judged by itself, its warm-up left out. Exit status 1, and a
line that says what grew, when one of these fails between the first and the last third of a life:

    RSS           grew by no more than 4 MiB (means)
    descriptors   are not more (medians)
    memfd maps    are not more (medians)
    latency p50   at most 1.5 times as long (medians of the receiver daemon's intervals)
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import signal
import statistics
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass
from typing import Any

from pp1q_transport.client import AttachedReceiver, attach_receiver
from pp1q_transport.counters import HistogramSnapshot, quantile_ns
from pp1q_transport.errors import PeerFault, ProposalDiscarded
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.sidecar import Deployment, Shape

SHAPE = Shape(seed=1, rounds=0, depth=5, vocab_size=4096, support=32, requests=4, ranks=1)
IN_FLIGHT = 6
IDS = 4096  # request IDs come back: what daemons remember of closed ones is full soon, and stays so
ROUNDS_A_REQUEST = 12
SAMPLE_S = 5.0
REATTACH_S = 20.0
DRAFT_S = 45.0
RSS_MOST_MIB = 4.0
LATENCY_MOST = 1.5
WARM_UP_SHARE = 0.15
WARM_UP_MOST_S = 60.0
LIFE_SHARE = 0.25  # a shorter life says nothing about growth
SELF = "target"
EXPECTED = {"no session", "timeout", "peer_lost", "cancelled", "overload", "circuit_open", "request_unknown"}


@dataclass
class Sample:
    """One look at one process. Latencies are of the interval before it, None for any but the receiver's daemon."""

    at_s: float
    name: str
    pid: int
    rss_mib: float
    descriptors: int
    maps: int
    p50_us: float | None = None
    p99_us: float | None = None


@dataclass
class Verdict:
    """One figure of one life of one process, in its first and its last third."""

    name: str
    pid: int
    what: str
    first: float
    last: float
    good: bool


class Load:
    """The target: requests that come and go, proposals of every kind."""

    def __init__(self, socket: str, seed: int) -> None:
        self.random = random.Random(seed)
        self.socket = socket
        self.receiver: AttachedReceiver = attach_receiver(socket)
        self.reasons: Counter[str] = Counter()
        self.ready = self.opened = self.attached = 0
        self._rounds: dict[int, int] = {}
        self._held: list[Any] = []

    def reattach(self) -> None:
        """Leaves the daemon in the middle of it all and comes back, as a restarted process does."""
        self.receiver.close()
        self.receiver = attach_receiver(self.socket)
        self._rounds.clear()
        self.attached += 1

    def some_rounds(self) -> None:
        """One round for each of a handful of requests, in flight together."""
        receiver = self.receiver
        if not receiver.up:
            try:
                receiver.wait_for_peer(5.0)
            except PeerFault:
                self.reasons["no session"] += 1
                return
        while len(receiver.requests.requests) < IN_FLIGHT:
            self._open()
        tickets = []
        for request in list(receiver.requests.requests.values()):
            try:
                tickets.append(receiver.enqueue(request, **self._options()))
            except ProposalDiscarded as discarded:
                self._alone(request, discarded)
        for ticket in tickets:
            try:
                with ticket.wait() as proposal:
                    accepted = self.random.randrange(proposal.depth + 1)
                    assert int(proposal.q(proposal.depth - 1).values.size)
                    proposal.commit(accepted, [*proposal.tokens.tolist()[:accepted], 1])
                self.ready += 1
            except ProposalDiscarded as discarded:
                self._alone(ticket.request, discarded)
        for request in list(receiver.requests.requests.values()):
            left = self._rounds[request.request] = self._rounds.get(request.request, 1) - 1
            if left <= 0:
                receiver.close_request(request)

    def _open(self) -> None:
        number = self.random.randrange(1, IDS)
        if self.receiver.requests.get(number) is None:
            length = self.random.choice((1, 10, 1000, 5000))
            self.receiver.open_request(number, [1] * length, seed=number, generation=self.attached << 20)
            self._rounds[number] = self.random.randrange(1, 2 * ROUNDS_A_REQUEST)
            self.opened += 1

    def _options(self) -> dict[str, Any]:
        chance = self.random
        hopeless = chance.random() < 0.05
        return {
            "depth": chance.randrange(1, SHAPE.depth + 1),
            "support": None if chance.random() < 0.5 else chance.randrange(1, 33),
            "temperature": chance.choice((0.0, 0.7, 1.0)),
            "budget_us": chance.randrange(20, 300) if hopeless else 2_000_000,
        }

    def _alone(self, request: Request, discarded: ProposalDiscarded) -> None:
        self.reasons[discarded.reason.value] += 1
        if self.receiver.requests.get(request.request) is request:
            self.receiver.commit_target_only(request, request.round, [2])


# ---- looking ------------------------------------------------------------------------------------------------------------


def look(name: str, pid: int, at_s: float) -> Sample:
    """What /proc says of a process."""
    with open(f"/proc/{pid}/statm", encoding="ascii") as statm:
        pages = int(statm.read().split()[1])
    with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as maps:
        named = sum("memfd:pp1q" in line for line in maps)
    return Sample(at_s, name, pid, pages * os.sysconf("SC_PAGE_SIZE") / 2**20, len(os.listdir(f"/proc/{pid}/fd")), named)


class Watch:
    """Samples of all processes, and the receiver daemon's latencies between them."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment = deployment
        self.samples: list[Sample] = []
        self._before: tuple[int, HistogramSnapshot] | None = None
        self._started = time.monotonic()

    def sample(self) -> list[Sample]:
        """One look at everybody."""
        at_s = time.monotonic() - self._started
        gc.collect()  # of ours: receivers that were left hang together with their tickets
        fresh = [look(SELF, os.getpid(), at_s)]
        for name, part in self.deployment.parts.items():
            if part.running and part.process is not None:
                fresh.append(look(name, part.process.pid, at_s))
        for each in fresh:
            if each.name == "receiver0":
                each.p50_us, each.p99_us = self._latency(each.pid)
        self.samples += fresh
        return fresh

    def _latency(self, pid: int) -> tuple[float | None, float | None]:
        now = self.deployment.status("receiver0")["latency"]
        before, self._before = self._before, (pid, now)
        if before is None or before[0] != pid:
            return None, None
        counts = [late - early for late, early in zip(now["counts"], before[1]["counts"], strict=True)]
        p50, p99 = (quantile_ns(now["bounds_ns"], counts, share) for share in (0.5, 0.99))
        return (None, None) if p50 is None or p99 is None else (p50 / 1000, p99 / 1000)


def judge(samples: list[Sample], seconds: float) -> list[Verdict]:
    """Every life that was long enough, its first third against its last."""
    lives: dict[tuple[str, int], list[Sample]] = defaultdict(list)
    for sample in samples:
        lives[sample.name, sample.pid].append(sample)
    verdicts = []
    for (name, pid), life in lives.items():
        if life[-1].at_s - life[0].at_s < LIFE_SHARE * seconds:
            continue
        warm_s = life[0].at_s + min(WARM_UP_MOST_S, WARM_UP_SHARE * seconds)
        warm = [sample for sample in life if sample.at_s >= warm_s]
        third = len(warm) // 3
        if third:
            verdicts += _judge_life(name, pid, warm[:third], warm[-third:])
    return verdicts


def _judge_life(name: str, pid: int, first: list[Sample], last: list[Sample]) -> list[Verdict]:
    def figure(part: list[Sample], what: str) -> list[float]:
        return [value for sample in part if (value := getattr(sample, what)) is not None]

    rss = [statistics.mean(figure(part, "rss_mib")) for part in (first, last)]
    verdicts = [Verdict(name, pid, "RSS MiB", *rss, rss[1] <= rss[0] + RSS_MOST_MIB)]
    for what in ("descriptors", "maps"):
        counts = [statistics.median(figure(part, what)) for part in (first, last)]
        verdicts.append(Verdict(name, pid, what, *counts, counts[1] <= counts[0]))
    for what in ("p50_us", "p99_us"):
        parts = [figure(part, what) for part in (first, last)]
        if all(parts):
            times = [statistics.median(part) for part in parts]
            verdicts.append(Verdict(name, pid, what, *times, what != "p50_us" or times[1] <= LATENCY_MOST * times[0]))
    return verdicts


# ---- the run ------------------------------------------------------------------------------------------------------------


class Soak:
    """The deployment, the load on it, and what happens to both in the course of time."""

    def __init__(self, deployment: Deployment, seconds: float, quiet: bool) -> None:
        self.deployment = deployment
        self.seconds = seconds
        self.quiet = quiet
        self.restarts: Counter[str] = Counter()
        for name in deployment.daemons:
            deployment.start(name)
        for name in deployment.daemons:
            deployment.wait_for_daemon(name)
        deployment.start("draft")
        deployment.wait_for_client("leader")
        self.load = Load(deployment.socket("receiver0"), SHAPE.seed)
        self.watch = Watch(deployment)

    def run(self) -> None:
        """Until the time is over."""
        started = time.monotonic()
        due = {"sample": SAMPLE_S, "reattach": REATTACH_S, "draft": DRAFT_S}
        plan = {"leader": 0.35 * self.seconds, "receiver0": 0.65 * self.seconds}
        while (now_s := time.monotonic() - started) < self.seconds:
            self.load.some_rounds()
            if now_s >= due["sample"]:
                due["sample"] += SAMPLE_S
                self._show(self.watch.sample(), now_s)
            if now_s >= due["reattach"]:
                due["reattach"] += REATTACH_S
                self.load.reattach()
            if now_s >= due["draft"]:
                due["draft"] += DRAFT_S
                self._restart("draft")
            for name in [name for name, at_s in plan.items() if now_s >= at_s]:
                del plan[name]
                self._restart(name)

    def _restart(self, name: str) -> None:
        process = self.deployment.parts[name].process
        assert process is not None
        process.send_signal(signal.SIGTERM)
        while process.poll() is None:
            self.load.some_rounds()
        self.deployment.start(name)
        self.restarts[name] += 1
        if name in self.deployment.daemons:
            self.deployment.wait_for_daemon(name)

    def _show(self, fresh: list[Sample], now_s: float) -> None:
        if self.quiet:
            return
        parts = [f"{each.name} {each.rss_mib:.1f} MiB {each.descriptors} fds {each.maps} maps" for each in fresh]
        times = [f"p50 {each.p50_us:.0f} us p99 {each.p99_us:.0f} us" for each in fresh if each.p50_us is not None]
        print(f"{now_s:7.0f} s  " + "  ".join([*parts, *times]), file=sys.stderr, flush=True)

    def end(self) -> list[str]:
        """Stops everything; what is wrong at the end."""
        load = self.load
        load.receiver.close()
        wrong = []
        stop = time.monotonic() + 10.0
        while True:
            slots = self.deployment.status("receiver0")["slots"]
            if slots["FREE"] == sum(slots.values()) or time.monotonic() >= stop:
                break
            time.sleep(0.01)
        if slots["FREE"] != sum(slots.values()):
            wrong.append(f"slots are not FREE: {slots}")
        ends = self.deployment.stop()
        wrong += [f"{name} ended with status {ends[name]}" for name in self.deployment.daemons if ends[name]]
        odd = set(load.reasons) - EXPECTED
        if odd:
            wrong.append(f"discards for other reasons than were provoked: { {reason: load.reasons[reason] for reason in odd} }")
        if not load.ready:
            wrong.append("no proposal was ready")
        return wrong


def main() -> None:
    """Runs, prints, exits 1 when something grew or slowed down."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=float(os.environ.get("SOAK_S", "1800")))
    parser.add_argument("--json", action="store_true", help="one JSON object with every sample")
    given = parser.parse_args()
    if given.seconds < 60:
        parser.error("--seconds must be at least 60: less shows nothing")
    with Deployment(SHAPE) as deployment:
        soak = Soak(deployment, given.seconds, given.json or not sys.stderr.isatty())
        soak.run()
        wrong = soak.end()
    verdicts = judge(soak.watch.samples, given.seconds)
    wrong += [f"{v.name} ({v.pid}): {v.what} {v.first:.1f} -> {v.last:.1f}" for v in verdicts if not v.good]
    load = soak.load
    account = {
        "seconds": given.seconds, "ready": load.ready, "discarded": dict(load.reasons), "requests": load.opened,
        "attached": load.attached, "restarts": dict(soak.restarts), "wrong": wrong,
    }  # fmt: skip
    if given.json:
        samples = [asdict(sample) for sample in soak.watch.samples]
        print(json.dumps(account | {"verdicts": [asdict(verdict) for verdict in verdicts], "samples": samples}))
    else:
        report(verdicts, account)
    sys.exit(1 if wrong else 0)


def report(verdicts: list[Verdict], account: dict[str, Any]) -> None:
    """The table and the account in words."""
    print("| process | pid | figure | first third | last third | |\n|---|---:|---|---:|---:|---|")
    for verdict in verdicts:
        mark = "" if verdict.good else "GREW"
        print(f"| {verdict.name} | {verdict.pid} | {verdict.what} | {verdict.first:.1f} | {verdict.last:.1f} | {mark} |")
    print(
        f"\n{account['ready']} proposals ready, discards {account['discarded']}, {account['requests']} requests, attached anew "
        f"{account['attached']} times, restarts {account['restarts']} in {account['seconds']:.0f} s"
    )
    for line in account["wrong"]:
        print(f"FAILED: {line}")


if __name__ == "__main__":
    main()
