"""Speed of the native kernels on one core, each beside a memcpy of the same bytes in the same run.

Between the compiled binding and a table; measures calls as Python makes them (the cost of an empty call is a line of
its own), judges nothing and asserts no duration. "hot" repeats one row; "cold" walks through rows that together exceed
the caches. Run: python bench/kernels.py [--json] [--level NAME] [--rounds N]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pp1q_transport._native import kernels

VOCAB = 129_280
ROW_BYTES = 4 * VOCAB
PIECE_BYTES = 256 * 1024
COLD_ROWS = 200  # 103 MB
SEED = 7


@dataclass
class Case:
    """One line: `run(i)` works on row i; `length` bytes are what its GB/s and its memcpy floor are reckoned by."""

    name: str
    length: int
    run: Callable[[int], object]
    cold: bool = False
    batch: int = 1


def make_rows(count: int) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.uint32], npt.NDArray[np.uint8]]:
    """Weights [V] shaped like a language model's, their counts, and `count` copies of the row back to back."""
    rng = np.random.default_rng(1)
    weights = np.exp(rng.normal(size=VOCAB) * 3.0)
    counts = np.empty(VOCAB, np.uint32)
    if kernels.allocate(weights, counts) != 0:
        raise RuntimeError("the benchmark's own weights were refused")
    row = np.empty(ROW_BYTES, np.uint8)
    kernels.counts_to_q(counts, row, 0)
    return weights, counts, np.tile(row, count)


def row_cases(rows: npt.NDArray[np.uint8], counts: npt.NDArray[np.uint32], cold: bool) -> list[Case]:
    """What is done to dense rows; row i of `rows` if cold, always row 0 otherwise."""
    target = np.empty(ROW_BYTES, np.uint8)
    cursor = kernels.DenseCursor()
    digest = kernels.xxh3_64(rows, 0, ROW_BYTES, SEED)
    u24 = kernels.MASS // 3
    token = kernels.draw(counts, u24)

    def at(i: int) -> int:
        return i % COLD_ROWS * ROW_BYTES if cold else 0

    def stream(i: int) -> None:
        cursor.begin(rows, at(i), VOCAB, ROW_BYTES, SEED)
        for landed in range(PIECE_BYTES, ROW_BYTES, PIECE_BYTES):
            cursor.advance(landed)
        cursor.advance(ROW_BYTES)
        if cursor.finish(digest, kernels.MASS, token, u24) != 0:
            raise RuntimeError("the benchmark's own row was refused")

    def validate(i: int) -> int:
        return kernels.validate_dense_row(rows, at(i), VOCAB, ROW_BYTES, kernels.MASS, token, u24)

    return [
        Case("memcpy", ROW_BYTES, lambda i: kernels.copy_bytes(target, 0, rows, at(i), ROW_BYTES), cold),
        Case("xxh3_64", ROW_BYTES, lambda i: kernels.xxh3_64(rows, at(i), ROW_BYTES, SEED), cold),
        Case("validate_dense_row", ROW_BYTES, validate, cold),
        Case("DenseCursor, 256 KiB pieces", ROW_BYTES, stream, cold),
        Case("draw_q, last token", ROW_BYTES, lambda i: kernels.draw_q(rows, at(i), VOCAB, kernels.MASS - 1), cold),
    ]


def other_cases(weights: npt.NDArray[np.float64], counts: npt.NDArray[np.uint32]) -> list[Case]:
    """Building and drawing of one row, and the sparse row."""
    out = np.empty(VOCAB, np.uint32)
    q = np.empty(ROW_BYTES, np.uint8)
    ids = np.empty(32, np.int32)
    kernels.top_k(weights, 32, ids)
    few = np.empty(32, np.uint32)
    kernels.allocate(weights[ids], few)
    sparse = np.empty(256, np.uint8)
    kernels.counts_to_q(few, sparse, 0)
    sparse[128:] = ids.view(np.uint8)
    token = int(ids[kernels.draw(few, 99)])

    def check(n: int) -> Callable[[int], object]:
        mass, drawn, u24 = (kernels.MASS, token, 99) if n else (0, -1, kernels.NO_DRAW)
        return lambda i: kernels.validate_sparse_row(sparse, 0, 128, n, 0, VOCAB, mass, drawn, u24)

    return [
        Case("allocate", 8 * VOCAB, lambda i: kernels.allocate(weights, out)),
        Case("top_k 32", 8 * VOCAB, lambda i: kernels.top_k(weights, 32, ids)),
        Case("draw, last token", ROW_BYTES, lambda i: kernels.draw(counts, kernels.MASS - 1)),
        Case("counts_to_q", ROW_BYTES, lambda i: kernels.counts_to_q(counts, q, 0)),
        Case("q_to_counts", ROW_BYTES, lambda i: kernels.q_to_counts(q, 0, VOCAB, out)),
        Case("validate_sparse_row n=32", 256, check(32), batch=200),
        Case("validate_sparse_row n=0 (the call)", 256, check(0), batch=200),
        Case("draw_u24", 16, lambda i: kernels.draw_u24(1, 1, 2, 3, 4), batch=200),
    ]


def measure(case: Case, rounds: int) -> float:
    """Median microseconds of one run."""
    times = []
    for i in range(rounds):
        start = kernels.monotonic_ns()
        for _ in range(case.batch):
            case.run(i)
        times.append((kernels.monotonic_ns() - start) / case.batch / 1e3)
    return statistics.median(times)


def measure_all(rounds: int) -> list[dict[str, object]]:
    weights, counts, rows = make_rows(COLD_ROWS)
    source, target = np.ones(8 * VOCAB, np.uint8), np.empty(8 * VOCAB, np.uint8)
    results: list[dict[str, object]] = []
    for case in [*row_cases(rows, counts, False), *row_cases(rows, counts, True), *other_cases(weights, counts)]:
        length = case.length

        def copy(i: int, case: Case = case, length: int = length) -> int:
            from_rows = case.cold and length == ROW_BYTES
            if from_rows:
                return kernels.copy_bytes(target, 0, rows, i % COLD_ROWS * ROW_BYTES, length)
            return kernels.copy_bytes(target, 0, source, 0, length)

        for run in range(3):  # warm up code, branch predictors and hot rows
            case.run(run)
        microseconds = measure(case, rounds)
        floor = measure(Case("memcpy", length, copy, case.cold, case.batch), rounds)
        results.append(
            {
                "kernel": case.name,
                "cache": "cold" if case.cold else "hot",
                "bytes": length,
                "us": round(microseconds, 3),
                "GBps": round(length / microseconds / 1e3, 2),
                "memcpy_us": round(floor, 3),
                "memcpy_GBps": round(length / floor / 1e3, 2),
            }
        )
    return results


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON only")
    parser.add_argument("--level", choices=kernels.levels(), default=kernels.level(), help="instruction-set level")
    parser.add_argument("--rounds", type=int, default=400, help="measurements a line (default 400)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error("--rounds must be at least 1")
    kernels.select_level(options.level)
    results = measure_all(options.rounds)
    if not options.json:
        print(f"{'kernel':36}{'cache':6}{'us':>10}{'GB/s':>9}{'memcpy us':>12}{'GB/s':>9}", file=sys.stderr)
        for line in results:
            print(
                f"{line['kernel']:36}{line['cache']:6}{line['us']:>10}{line['GBps']:>9}{line['memcpy_us']:>12}"
                f"{line['memcpy_GBps']:>9}",
                file=sys.stderr,
            )
    print(json.dumps({"level": options.level, "rounds": options.rounds, "kernels": results}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
