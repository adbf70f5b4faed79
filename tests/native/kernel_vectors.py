"""Makes the vectors that kernel_vectors.c reads: inputs from the tables of cases, answers from the oracle alone."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import kernel_cases as cases

from pp1q_transport._native import oracle, shards_oracle, verify_oracle
from pp1q_transport.errors import Reason

KERNELS = (
    "hash64", "hash128", "prefix", "dense", "cursor", "sparse", "draw_counts", "draw_q", "counts_to_q",
    "q_to_counts", "allocate", "inconsistent", "tree", "top_k", "philox", "draw_words", "target", "residual", "accept",
    "choose", "count", "commit",
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


def _narrowed(values: list[float]) -> list[float]:
    """The values as FP32, where they fit."""
    return [struct.unpack("<f", struct.pack("<f", value))[0] for value in values]


def _tables_of_weights() -> Iterator[tuple[bool, list[float], bytes]]:
    for values in cases.weights().values():
        yield True, values, f64s(values)
        if all(not math.isfinite(value) or abs(value) < 3e38 for value in values):
            narrow = _narrowed(values)
            yield False, narrow, struct.pack(f"<{len(narrow)}f", *narrow)


    denormal = [struct.unpack("<f", struct.pack("<I", bits))[0] for bits in (1, 0, 3, 0x7FFFFF, 2, 0)]
    yield False, denormal, struct.pack("<6f", *denormal)


def _next_to_equal(rng: random.Random) -> Iterator[bytes]:
    """p and q apart by less than the upper part of W can tell: max(p - q, 0) is decided by the lower one."""
    for n in (2, 40, 1100):
        counts = cases.random_counts(rng, n)
        for spread in (1e-15, 1e-11, 1e-8):
            values = [count * (1 + rng.choice((-1, 0, 1)) * spread * rng.random()) for count in counts]
            code, exponent, fixed = verify_oracle.fixed_weights(values)
            assert code == 0
            masses = verify_oracle.residual(fixed, sum(fixed), counts)
            mass = sum(masses)
            threshold = rng.randrange(mass or 1)
            index = verify_oracle.pick(masses, threshold)
            judged = [0, oracle.MASS, mass >> 64, mass, threshold >> 64, threshold, index]
            yield record("residual", [1, exponent, 0, n, *judged], f64s(values), oracle.counts_to_q(counts))


def target_records(rng: random.Random) -> Iterator[bytes]:
    yield from _next_to_equal(rng)
    for wide, values, blob in _tables_of_weights():
        code, exponent, fixed = verify_oracle.fixed_weights(values)
        total = sum(fixed)
        threshold = rng.randrange(total) if total else 0
        index = verify_oracle.pick(fixed, threshold)
        yield record("target", [wide, code, exponent, total, threshold, index], blob, struct.pack(f"<{len(fixed)}Q", *fixed))
        if code or len(values) < 2:
            continue
        for positive in (1, 7, len(values)):
            counts = cases.random_counts(rng, len(values), positive=positive)
            masses = verify_oracle.residual(fixed, total, counts)
            mass = sum(masses)
            for threshold in {0, mass - 1, rng.randrange(mass)} if mass else ():
                index = verify_oracle.pick(masses, threshold)
                judged = [0, oracle.MASS, mass >> 64, mass, threshold >> 64, threshold, index]
                yield record("residual", [wide, exponent, 0, len(values), *judged], blob, oracle.counts_to_q(counts))
                ids = [token for token, count in enumerate(counts) if count]
                q = oracle.counts_to_q([counts[token] for token in ids]) + i32s(ids)
                yield record("residual", [wide, exponent, len(ids), len(values), *judged], blob, q)
        for bits in (cases.BITS["third"], cases.BITS["nan"], cases.BITS["minus_quarter"], 0x3F800000):
            q = struct.pack("<I", bits) * len(values)
            code = Reason.MASS.code if bits == 0x3F800000 else oracle.q_to_counts(q, 1)[0]
            yield record("residual", [wide, exponent, 0, len(values), code, *[0] * 6], blob, q)
        for ids, code in (([1, 1], Reason.ID_DUPLICATE), ([1, 0], Reason.ID_ORDER), ([0, len(values)], Reason.ID_RANGE)):
            q = oracle.counts_to_q([oracle.MASS // 2] * 2) + i32s(ids)
            yield record("residual", [wide, exponent, 2, len(values), code.code, *[0] * 6], blob, q)


def judging_records(rng: random.Random) -> Iterator[bytes]:
    for _ in range(300):
        total = rng.randrange(1, rng.choice((9, 1 << 38, 1 << 52)))
        weight, count = rng.randrange(total + 1), rng.randrange(1, rng.choice((5, oracle.MASS)) + 1)
        edge = -(-(oracle.MASS * weight << 64) // (count * total))
        for u64 in (0, edge - 1, edge, edge + 1, U64, rng.getrandbits(64)):
            if 0 <= u64 <= U64:
                yield record("accept", [u64, count, weight, total, verify_oracle.accept(u64, count, weight, total)])
    for _ in range(200):
        depth, wide_drafts, wide_winners = rng.randrange(8), rng.randrange(2), rng.randrange(2)
        drafts = [rng.randrange(2) for _ in range(depth)]
        winners = [rng.randrange(2) for _ in range(depth + 1)]
        out = verify_oracle.greedy_commit(drafts, winners)
        bad = rng.random() < 0.2
        if bad:
            rng.choice([winners, drafts or winners])[0] = rng.choice((-1, 2, 2**31 - 1, -(2**31)))
        params = [wide_drafts, wide_winners, depth, 2, int(bad), len(out) - 1, *out, *[-1] * (depth + 1 - len(out))]
        both = ((drafts, wide_drafts), (winners, wide_winners))
        packed = (struct.pack(f"<{len(tokens)}{'iq'[wide]}", *tokens) for tokens, wide in both)
        yield record("commit", params, *packed)


def shard_records(rng: random.Random) -> Iterator[bytes]:
    for n in (1, 2, 4, 8, 9):
        for _ in range(40):
            masses = [rng.randrange(rng.choice((1, 3, 1 << 40, 1 << 77))) for _ in range(n)]
            total = sum(masses)
            edges = [-(-(sum(masses[:i]) << 64) // total) for i in range(n)] if total else [0]
            for u64 in {0, U64, rng.getrandbits(64), *(edge + d for edge in edges for d in (-1, 0) if 0 <= edge + d <= U64)}:
                chosen, inside = shards_oracle.choose(u64, masses)
                blob = b"".join(struct.pack("<QQ", mass & U64, mass >> 64) for mass in masses)
                yield record("choose", [u64, chosen, inside >> 64, inside & U64], blob)
    raws = [struct.pack("<I", bits) for bits in (0, 0x80000000, 1, 0x33800000, 0x3F800000, 0x3F800001, 0x7F800000, 0xBF000000)]
    values = [struct.unpack("<f", raw)[0] for raw in raws]
    ids = sorted(rng.sample(range(100), len(values)))
    for given in (None, ids):
        for token in range(102 if given else len(values) + 2):
            count = shards_oracle.count_at(values, given, token)
            if count is None:
                count = -_reason_of(raws[token if given is None else ids.index(token)])
            yield record("count", [given is not None, token, count], b"".join(raws), i32s(ids))


def _reason_of(raw: bytes) -> int:
    try:
        oracle.count_of(raw)
    except oracle.Failure as failure:
        return failure.code
    raise AssertionError("a count after all")


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
        *target_records(rng),
        *judging_records(rng),
        *shard_records(rng),
    ]
    path.write_bytes(b"PP1QVEC1" + struct.pack("<Q", len(records)) + b"".join(records))
    counts = dict.fromkeys(KERNELS, 0)
    for made in records:
        counts[KERNELS[struct.unpack_from("<I", made)[0]]] += 1
    return counts
