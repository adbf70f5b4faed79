"""Speed of verification on one core: the fast path on whole rows and on shards, its sparse form, and the greedy commit.

Between the public functions and a table; measures calls as Python makes them, judges nothing and asserts no duration. A row has
129,280 tokens; "of target" is the time over what the project set out to reach (0.15 ms a dense row; 1.2 times the whole row's
own time for four shards; 10 us a greedy commit of depth 7). Run: python bench/verify.py [--json] [--level NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from pp1q_transport import dyadic, greedy, sharding
from pp1q_transport._native import kernels
from pp1q_transport.sharding.exchange import Steps, combine
from pp1q_transport.verify import FastTarget, QRow, residual, verify_chain_fast

VOCAB = 129_280
SHARDS = 4
SUPPORT = 32
U64 = (1 << 63) + 12345
ROW_US, SHARDED_RATIO, COMMIT_US = 150.0, 1.2, 10.0


@dataclass
class Line:
    """One line of the table; `target_us` is None where none was set."""

    name: str
    us: float
    target_us: float | None = None


def microseconds(call: Callable[[], object], rounds: int, batch: int = 1) -> float:
    """Median time of one call."""
    times = []
    call()
    for _ in range(rounds):
        start = kernels.monotonic_ns()
        for _ in range(batch):
            call()
        times.append((kernels.monotonic_ns() - start) / batch / 1e3)
    return statistics.median(times)


@dataclass
class World:
    """A target like a language model's (FP32 and FP64), and a draft near it, dense and sparse."""

    narrow: NDArray[np.float32]
    wide: NDArray[np.float64]
    dense: QRow
    sparse: QRow
    token: int

    @classmethod
    def make(cls) -> World:
        noise = np.random.default_rng(1)
        logits = noise.normal(size=VOCAB) * 3
        wide = np.exp(logits - logits.max())
        wide /= wide.sum()
        draft = np.exp(logits + noise.normal(size=VOCAB) / 2)
        counts = dyadic.allocate(draft)
        ids, few = dyadic.allocate_top_k(draft, SUPPORT)
        sparse = QRow(dyadic.to_q(few), ids)
        return cls(wide.astype(np.float32), wide, QRow(dyadic.to_q(counts)), sparse, int(ids[0]))


def row_lines(world: World, rounds: int) -> list[Line]:
    """One row in one process."""
    lines = []
    for name, weights in (("FP32", world.narrow), ("FP64", world.wide)):
        target = FastTarget(weights)

        def test(weights: Any = weights) -> bool:
            return FastTarget(weights).accept(world.token, world.dense, U64)

        def reject(weights: Any = weights) -> tuple[int, bool]:
            fresh = FastTarget(weights)
            fresh.accept(world.token, world.dense, U64)
            return fresh.correct(world.dense, U64)

        lines += [
            Line(f"dense {name}: accept test", microseconds(test, rounds), ROW_US),
            Line(
                f"dense {name}: residual and correction",
                microseconds(lambda target=target: target.correct(world.dense, U64), rounds),  # type: ignore[misc]
                ROW_US,
            ),
            Line(f"dense {name}: all of a rejected row", microseconds(reject, rounds), ROW_US),
            Line(f"{name}: bonus", microseconds(lambda target=target: target.pick(U64), rounds)),  # type: ignore[misc]
        ]
    target = FastTarget(world.narrow)
    sparse = microseconds(lambda: target.correct(world.sparse, U64), rounds)
    lines.append(Line(f"sparse {SUPPORT} FP32: residual and correction", sparse))
    tokens, qs = [world.token] * 5, [world.dense] * 5
    chain = microseconds(lambda: verify_chain_fast(tokens, qs, lambda i: world.narrow, 1, 1, 1, 1), rounds // 4 + 1)
    lines.append(Line("chain of 5, dense FP32, as far as it is kept", chain))
    ours = np.array(target.integers(), np.uint64) >> np.uint64(14)  # W <= 2^38, the integer kernel's bound
    counts, total = world.dense.counts(), int(ours.sum())
    plain = microseconds(lambda: residual(ours, total, counts), rounds // 4 + 1)
    return [*lines, Line("for comparison: numpy's uint64 residual alone", plain)]


def own_work(ranks: Sequence[Steps[Any]]) -> tuple[list[Any], int]:
    """What the ranks return, and the ns that they themselves took: not the collective between them."""
    answers: list[Any] = [None] * len(ranks)
    spent = 0
    while True:
        parts, results = [], []
        for steps, answer in zip(ranks, answers, strict=True):
            start = kernels.monotonic_ns()
            try:
                parts.append(steps.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
            spent += kernels.monotonic_ns() - start
        if results:
            return results, spent
        answers = [combine(parts)] * len(ranks)


def in_step(ranks: Sequence[Steps[Any]]) -> Any:
    """What the first rank returns: all ranks in one process, with no clock read in between."""
    answer: Any = None
    while True:
        parts, results = [], []
        for steps in ranks:
            try:
                parts.append(steps.send(answer))
            except StopIteration as stop:
                results.append(stop.value)
        if results:
            return results[0]
        answer = combine(parts)


@dataclass
class Ranks:
    """Four ranks that each keep what they need from row to row, as ranks of an engine would."""

    targets: list[sharding.ShardTarget]
    parts: list[NDArray[np.float32]]
    qs: list[QRow]
    noise: list[int | None]
    token: int

    @classmethod
    def of(cls, world: World) -> Ranks:
        edges = [VOCAB // 32 * rank // SHARDS * 32 for rank in range(SHARDS)] + [VOCAB]
        shards = sharding.shards_of(edges)
        parts = [world.narrow[s.first_id : s.end_id] for s in shards]  # the whole row's memory: caches favour neither
        qs = [QRow(world.dense.values[s.first_id : s.end_id]) for s in shards]
        return cls([sharding.ShardTarget(s) for s in shards], parts, qs, [U64, *[None] * (SHARDS - 1)], world.token)

    def row(self) -> list[Steps[bool]]:
        """A new row of the target, and the drafted token's test."""
        facts = zip(self.targets, self.parts, self.qs, self.noise, strict=True)
        return [sharding.verify_row_sharded(t, part, self.token, q, u) for t, part, q, u in facts]

    def correction(self) -> list[Steps[tuple[int, bool]]]:
        """The residual and a draw from it."""
        return [sharding.correct_sharded(t, q, u) for t, q, u in zip(self.targets, self.qs, self.noise, strict=True)]


def sharded_lines(world: World, rounds: int) -> list[Line]:
    """A rejected row over four shards, in total work of all of them, beside the same row in one process: each round measures
    both, so that what else the machine does falls on both."""
    ranks = Ranks.of(world)
    want = FastTarget(world.narrow).correct(world.dense, U64)
    whole, own, everything = [], [], []
    for _ in range(rounds):
        start = kernels.monotonic_ns()
        target = FastTarget(world.narrow)
        target.accept(world.token, world.dense, U64)
        target.correct(world.dense, U64)
        whole.append(kernels.monotonic_ns() - start)
        _, first = own_work(ranks.row())
        got, second = own_work(ranks.correction())
        own.append(first + second)
        start = kernels.monotonic_ns()
        in_step(ranks.row())
        again = in_step(ranks.correction())
        everything.append(kernels.monotonic_ns() - start)
        if got != [want] * SHARDS or again != want:
            raise RuntimeError(f"shards came to {got} and {again}, one process to {want}")
    whole_us, own_us, all_us = (statistics.median(times) / 1e3 for times in (whole, own, everything))
    goal = SHARDED_RATIO * whole_us
    return [
        Line("the rejected row again, in turn with shards", whole_us),
        Line(f"{SHARDS} shards FP32, a rejected row: all ranks' own work", own_us, goal),
        Line(f"{SHARDS} shards FP32: the same and the emulated collective", all_us, goal),
    ]


def commit_lines(rounds: int) -> list[Line]:
    """The greedy commit of depth 7."""
    lines = []
    for requests in (1, 64):
        drafts = np.tile(np.arange(7, dtype=np.int32), (requests, 1))
        winners = np.tile(np.arange(8, dtype=np.int64), (requests, 1))
        call = lambda drafts=drafts, winners=winners: greedy.commit(drafts, winners, VOCAB)  # noqa: E731
        lines.append(Line(f"greedy commit, depth 7, {requests} requests", microseconds(call, rounds, 50), COMMIT_US))
    drafts, winners = np.arange(7, dtype=np.int32), np.arange(8, dtype=np.int64)
    tokens, accepted = np.empty(8, np.int64), np.empty(1, np.int32)
    native = microseconds(lambda: kernels.greedy_commit(drafts, winners, None, 7, VOCAB, tokens, accepted), rounds, 50)
    return [*lines, Line("greedy commit, depth 7: the native call", native, COMMIT_US)]


def measure_all(rounds: int) -> list[Line]:
    world = World.make()
    return [*row_lines(world, rounds), *sharded_lines(world, rounds), *commit_lines(rounds)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--level", choices=kernels.levels(), default=kernels.level(), help="instruction-set level")
    parser.add_argument("--rounds", type=int, default=400, help="measurements a line (default 400)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    kernels.select_level(options.level)
    lines = measure_all(options.rounds)
    results = [
        {"case": line.name, "us": round(line.us, 2)}
        | ({} if line.target_us is None else {"target_us": round(line.target_us, 2), "of_target": round(line.us /
        line.target_us, 3)}) for line in lines
    ]
    if not options.json:
        print(f"{'verification':56}{'us':>10}{'target us':>12}{'of target':>12}", file=sys.stderr)
        for result in results:
            goal, share = result.get("target_us", ""), result.get("of_target", "")
            print(f"{result['case']:56}{result['us']:>10}{goal:>12}{share:>12}", file=sys.stderr)
    print(json.dumps({"level": options.level, "rounds": options.rounds, "vocab": VOCAB, "verify": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
