"""Makes the vectors that kernel_vectors.c reads: inputs from the tables of cases, answers from the oracle alone."""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from pathlib import Path

import kernel_cases as cases

from pp1q_transport._native import oracle
from pp1q_transport.errors import Reason

KERNELS = (
    "hash64", "hash128", "prefix", "dense", "cursor", "sparse", "draw_counts", "draw_q", "counts_to_q",
    "q_to_counts", "allocate", "inconsistent", "tree", "top_k", "philox", "draw_words",
)  # fmt: skip
U64 = (1 << 64) - 1
SEEDS = (0, 1, U64, 0x9E3779B97F4A7C15)


def record(kernel: str, params: list[int], *blobs: bytes) -> bytes:
    parts = [struct.pack("<IIII", KERNELS.index(kernel), len(params), len(blobs), 0)]
    parts.append(struct.pack(f"<{len(params)}Q", *(param & U64 for param in params)))
    for blob in blobs:
        parts += [struct.pack("<Q", len(blob)), blob, bytes(-len(blob) % 8)]
    return b"".join(parts)


def u32s(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}I", *values)


def i32s(values: list[int]) -> bytes:
    return struct.pack(f"<{len(values)}i", *values)


def f64s(values: list[float]) -> bytes:
    return struct.pack(f"<{len(values)}d", *values)


def digest_records(rng: random.Random) -> Iterator[bytes]:
    data = rng.randbytes(70000)
    for length in (*range(0, 300), 511, 512, 513, 1023, 1024, 1025, 1100, 4096, 65537):
        blob = data[:length]
        for seed in SEEDS:
            yield record("hash64", [seed, oracle.xxh3_64(blob, seed)], blob)
        yield record("hash128", list(oracle.xxh3_128(blob)), blob)
    for n in (0, 1, 2, 100):
        tokens = [rng.randrange(-(2**31), 2**31) for _ in range(n)]
        low, high = rng.getrandbits(64), rng.getrandbits(64)
        yield record("prefix", [low, high, *oracle.prefix_digest(low, high, tokens)], i32s(tokens))


def row_records(rng: random.Random) -> Iterator[bytes]:
    for row in cases.rows():
        expected = oracle.validate_dense_row(row.row, row.entries, row.mass, row.token, row.u24)
        digest = oracle.xxh3_64(row.row, row.seed)
        params = [row.entries, row.mass, row.token, row.u24, row.seed, digest, expected]
        yield record("dense", params, row.row)
        yield record("cursor", params, row.row)
    for sparse in cases.sparse_rows():
        judged = (sparse.first, sparse.end, sparse.mass, sparse.token, sparse.u24)
        code = oracle.validate_sparse_row(sparse.q, sparse.ids, *judged)
        yield record("sparse", [*judged, code], sparse.q, i32s(sparse.ids))
    for name, bits in {**cases.BITS, "zero": 0, "one": 0x3F800000, "half": 0x3F000000}.items():
        row_bytes = oracle.counts_to_q([3] * 90) + struct.pack("<I", bits)
        code, counts = oracle.q_to_counts(row_bytes, 91)
        yield record("q_to_counts", [code], row_bytes, u32s(counts))
        if code:
            assert name in cases.BITS
            yield record("draw_q", [oracle.MASS - 1, -2], row_bytes)


def count_records(rng: random.Random) -> Iterator[bytes]:
    for n in (1, 2, 33, 1000, 1024, 5000):
        counts = cases.random_counts(rng, n, positive=max(1, n // 2))
        q = oracle.counts_to_q(counts)
        yield record("counts_to_q", [], u32s(counts), q)
        yield record("q_to_counts", [0], q, u32s(counts))
        for u24 in (0, oracle.MASS - 1, oracle.MASS, *(rng.randrange(oracle.MASS) for _ in range(10))):
            index = oracle.draw(counts, u24)
            yield record("draw_counts", [u24, index], u32s(counts))
            yield record("draw_q", [u24, index], q)
    wide = [2**32 - 1] * 2000
    yield record("draw_counts", [2**32 - 1, oracle.draw(wide, 2**32 - 1)], u32s(wide))
    wraps = [2**31] * 2048  # every lane of a block sums to 0 modulo 2^32
    yield record("draw_counts", [5, oracle.draw(wraps, 5)], u32s(wraps))


def weight_records() -> Iterator[bytes]:
    for values in cases.weights().values():
        code, counts = oracle.allocate(values)
        yield record("allocate", [code], f64s(values), u32s(counts))
        code, sums = oracle.block_sums(values)
        root = struct.unpack("<Q", struct.pack("<d", oracle.tree_sum(sums)))[0]
        yield record("tree", [code, root], f64s(values), f64s(sums))
        for k in (1, 32, 500):
            code, ids = oracle.top_k(values, k)
            if values:
                yield record("top_k", [k, -code if code else len(ids)], f64s(values), i32s(ids))


def inconsistent_records() -> Iterator[bytes]:
    """Totals that are not the weights' own: floors beyond M, or more tickets than positive weights."""
    for weights, factor in (
        ([1.0] * 3 + [0.0] * 5, 1 + 5 / oracle.MASS),  # more tickets than positive weights, fewer than tokens
        ([1.0] * 3 + [0.0] * 50, 1 + 5 / oracle.MASS),
        ([1.0] * 8, 1 + 20 / oracle.MASS),  # more tickets than tokens
        ([1.0] * 8, 1 - 20 / oracle.MASS),
        ([1.0] * 100, 0.5),
        ([1.0] * 100, 2.0),
    ):
        bits = struct.unpack("<Q", struct.pack("<d", sum(weights) * factor))[0]
        yield record("inconsistent", [Reason.INVALID_WEIGHTS.code, bits], f64s(weights))


def random_records(rng: random.Random) -> Iterator[bytes]:
    for _ in range(100):
        words = [rng.choice((0, 2**32 - 1, rng.getrandbits(32))) for _ in range(6)]
        yield record("philox", [*words, *oracle.philox4x32(words[:4], words[4:])])
        place = (rng.getrandbits(64), rng.randrange(256), *(rng.getrandbits(32) for _ in range(3)))
        yield record("draw_words", [*place, *oracle.draw_words(*place)])


def write(path: Path) -> dict[str, int]:
    """Writes the file; returns how many records each kernel got."""
    rng = random.Random(99)
    records = [
        *digest_records(rng),
        *row_records(rng),
        *count_records(rng),
        *weight_records(),
        *inconsistent_records(),
        *random_records(rng),
    ]
    path.write_bytes(b"PP1QVEC1" + struct.pack("<Q", len(records)) + b"".join(records))
    counts = dict.fromkeys(KERNELS, 0)
    for made in records:
        counts[KERNELS[struct.unpack_from("<I", made)[0]]] += 1
    return counts
