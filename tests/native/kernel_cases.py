"""Tables of rows and weights that have broken, or could break, a kernel. Shared by the differential tests and by the
maker of the vectors that the C driver reads (here and under emulation)."""

from __future__ import annotations

import math
import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from pp1q_transport._native import oracle
from pp1q_transport._native.oracle import MASS, NO_DRAW

BITS = {
    "nan": 0x7FC00000,
    "nan_payload": 0x7F800001,
    "negative_nan": 0xFFC12345,
    "inf": 0x7F800000,
    "minus_inf": 0xFF800000,
    "minus_zero": 0x80000000,
    "minus_quarter": 0xBE800000,
    "minus_unit": 0xB3800000,  # -2^-24
    "minus_denormal": 0x80000001,
    "denormal": 0x00000001,
    "largest_denormal": 0x007FFFFF,
    "smallest_normal": 0x00800000,
    "half_unit": 0x33000000,  # 2^-25
    "unit_and_more": 0x33800001,
    "third": 0x3EAAAAAB,
    "below_half": 0x3EFFFFFF,  # 25 significant bits: rounds up to 0.5 when 0.5 is added
    "above_one": 0x3F800001,
    "two": 0x40000000,
    "huge": 0x7F7FFFFF,
}


@dataclass
class Row:
    """One dense row and what it is judged against."""

    name: str
    row: bytes
    entries: int
    mass: int = MASS
    token: int = -1
    u24: int = NO_DRAW
    seed: int = field(default=0x9E3779B97F4A7C15)


def random_counts(rng: random.Random, n: int, mass: int = MASS, positive: int | None = None) -> list[int]:
    """Counts of exact sum `mass` over n entries, about `positive` of them non-zero, some of them large."""
    if n == 0:
        return []
    places = rng.sample(range(n), min(n, positive or n))
    shares = [rng.expovariate(1.0) ** 4 for _ in places]
    counts, total = [0] * n, sum(shares)
    for place, share in zip(places, shares, strict=True):
        counts[place] = int(share / total * mass)
    counts[rng.choice(places)] += mass - sum(counts)
    return counts


def one_hot(n: int, at: int, mass: int = MASS) -> list[int]:
    counts = [0] * n
    counts[at] = mass
    return counts


def _with(row: bytes, index: int, bits: int) -> bytes:
    return row[: 4 * index] + struct.pack("<I", bits) + row[4 * index + 4 :]


def drawn(rng: random.Random, name: str, counts: list[int], padding: bytes = b"") -> Row:
    """A valid row with a token drawn from it."""
    u24 = rng.randrange(sum(counts))
    row = oracle.counts_to_q(counts) + padding
    return Row(name, row, len(counts), sum(counts), oracle.draw(counts, u24), u24)


def _valid_rows(rng: random.Random) -> Iterator[Row]:
    for n in (1, 2, 3, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 1000, 1023, 1024, 1025, 2048, 2500, 4096, 5003):
        yield drawn(rng, f"random {n}", random_counts(rng, n))
        yield drawn(rng, f"random {n} padded", random_counts(rng, n), bytes(rng.choice((1, 3, 4, 12, 64, 700))))
        yield drawn(rng, f"few of {n}", random_counts(rng, n, positive=4))
        for at in {0, n // 2, n - 1}:
            yield drawn(rng, f"one-hot {at} of {n}", one_hot(n, at))
    yield drawn(rng, "two halves", [0] * 70 + [MASS // 2] + [0] * 1500 + [MASS // 2])
    yield drawn(rng, "just below half", [MASS // 2 - 1, 1, MASS // 2])
    yield drawn(rng, "just above half", [3] * 7 + [MASS // 2 + 1] + [0] * 500 + [MASS // 2 - 22])
    yield drawn(rng, "all equal", [1024] * 16384)
    yield drawn(rng, "shard of small mass", [1] * 5000)
    yield Row("empty shard", b"", 0, 0)
    yield Row("padding only", bytes(40), 0, 0)
    yield Row("shard of zero mass", bytes(4 * 4000), 4000, 0)
    yield Row("shard without the token", oracle.counts_to_q([5, 6, 7]), 3, 18, -1, 18)


def _bad_rows(rng: random.Random) -> Iterator[Row]:
    n = 3000
    good = oracle.counts_to_q(random_counts(rng, n))
    for name, bits in BITS.items():
        for index in (0, 1, 63, 64, 1023, 1024, 2047, 2990, n - 1):
            yield Row(f"{name} at {index}", _with(good, index, bits), n)
    for first, second in (("nan", "minus_zero"), ("third", "inf"), ("minus_quarter", "third")):
        yield Row(f"{first} before {second}", _with(_with(good, 5, BITS[first]), 2000, BITS[second]), n)
        yield Row(f"{second} before {first}", _with(_with(good, 70, BITS[second]), 71, BITS[first]), n)
    yield Row("value and padding", _with(good, 9, BITS["two"]) + b"\1", n)
    for length, at in ((1, 0), (5, 4), (64, 63), (64, 0)):
        padding = bytearray(length)
        padding[at] = 0x80
        yield Row(f"padding {at} of {length}", good + bytes(padding), n)
    yield Row("mass one less", oracle.counts_to_q([MASS - 1] + [0] * 5), 6)
    yield Row("mass one more", oracle.counts_to_q([MASS, 0, 0, 1]), 4)
    # Sums that wrap in 32 bits to exactly the mass that is expected.
    yield Row("wraps to 2^24", oracle.counts_to_q([MASS] * 257), 257)
    yield Row("wraps within a block", oracle.counts_to_q([MASS // 2 - 1] * 512 + [512 + MASS] + [0] * 9), 522)
    yield Row("wraps across blocks", oracle.counts_to_q(([MASS] * 64 + [0] * 960) * 4 + [MASS]), 4097)
    yield Row("all ones", oracle.counts_to_q([MASS] * 2048), 2048)


def _token_rows(rng: random.Random) -> Iterator[Row]:
    counts = random_counts(rng, 2600, positive=1200)
    row = oracle.counts_to_q(counts)
    zero = counts.index(0)
    yield Row("token without mass", row, 2600, MASS, zero)
    yield Row("token without mass, any draw", row, 2600, MASS, zero, 0)
    for token in (2600, 2**40, -2, -(2**63)):
        yield Row(f"token {token} out of range", row, 2600, MASS, token, 0)
    yield Row("token out of range, wrong mass", row, 2600, MASS - 1, 9999, 0)
    for u24 in (0, 1, MASS - 1, MASS, NO_DRAW - 1, *(rng.randrange(MASS) for _ in range(12))):
        token = oracle.draw(counts, u24)
        if token >= 0:
            yield Row(f"draw {u24}", row, 2600, MASS, token, u24)
        other = next(i for i in range(2599, 0, -1) if counts[i] and i != token)
        yield Row(f"draw {u24} of another", row, 2600, MASS, other, u24)
        yield Row(f"draw {u24} without a token", row, 2600, MASS, -1, u24)
    for token in rng.sample([i for i in range(2600) if counts[i]], 12):
        before = sum(counts[:token])
        for u24 in (before - 1, before, before + counts[token] - 1, before + counts[token]):
            if u24 >= 0:
                yield Row(f"edge {u24} of {token}", row, 2600, MASS, token, u24)


def rows() -> list[Row]:
    rng = random.Random(20240611)
    return [*_valid_rows(rng), *_bad_rows(rng), *_token_rows(rng)]


@dataclass
class SparseRow:
    name: str
    q: bytes
    ids: list[int]
    first: int = 0
    end: int = 129280
    mass: int = MASS
    token: int = -1
    u24: int = NO_DRAW


def sparse_rows() -> list[SparseRow]:
    rng = random.Random(77)
    made: list[SparseRow] = []
    for n in (1, 2, 31, 32, 33, 100):
        counts = [c + 1 for c in random_counts(rng, n, MASS - n)]
        ids = sorted(rng.sample(range(129280), n))
        q = oracle.counts_to_q(counts)
        made.append(SparseRow(f"valid {n}", q, ids))
        for u24 in (0, MASS - 1, *(rng.randrange(MASS) for _ in range(4))):
            token = ids[oracle.draw(counts, u24)]
            made.append(SparseRow(f"drawn {n}", q, ids, token=token, u24=u24))
            made.append(SparseRow(f"draw proof {n}", q, ids, token=ids[0], u24=u24))
        made.append(SparseRow(f"absent token {n}", q, ids, token=next(i for i in range(129280) if i not in ids)))
        for token in (129280, -2, 2**40):
            made.append(SparseRow(f"token {token} of {n}", q, ids, token=token))
        made.append(SparseRow(f"mass {n}", q, ids, mass=MASS - 1))
        made.append(SparseRow(f"id at end {n}", q, ids, end=ids[-1]))
        made.append(SparseRow(f"id before first {n}", q, ids, first=ids[0] + 1))
        made.append(SparseRow(f"negative id {n}", q, [-1, *ids[1:]], first=-5))
        made.append(SparseRow(f"negative id out of range {n}", q, [-(2**31), *ids[1:]]))
        for at in {0, n // 2, n - 1}:
            for name, bits in {**BITS, "zero": 0}.items():
                made.append(SparseRow(f"{name} at {at} of {n}", _with(q, at, bits), ids))
        if n > 1:
            made.append(SparseRow(f"duplicate {n}", q, [*ids[:-1], ids[-2]]))
            made.append(SparseRow(f"order {n}", q, [ids[1], ids[0], *ids[2:]]))
            made.append(SparseRow(f"order before value {n}", _with(q, 1, BITS["nan"]), [ids[1], ids[0], *ids[2:]]))
            made.append(SparseRow(f"value before order {n}", _with(q, 0, BITS["nan"]), [ids[1], ids[0], *ids[2:]]))
    made.append(SparseRow("empty shard", b"", [], 64, 128, 0))
    made.append(SparseRow("empty shard with mass", b"", [], 64, 128, 1))
    made.append(SparseRow("empty shard with token", b"", [], 64, 128, 0, 70))
    made.append(SparseRow("empty shard, draw beyond", b"", [], 64, 128, 0, -1, 5))
    made.append(SparseRow("whole", oracle.counts_to_q([MASS]), [2**31 - 1], 0, 2**31, MASS, 2**31 - 1, MASS - 1))
    return made


def weights() -> dict[str, list[float]]:
    """Weights by name, good and bad; every length class of the tree and every kind of tie."""
    rng = random.Random(4711)
    made: dict[str, list[float]] = {"none": [], "zero": [0.0], "zeros": [0.0] * 100, "one": [3.5]}
    for n in (2, 3, 16, 31, 32, 33, 63, 64, 65, 96, 100, 255, 1000, 1024, 3001):
        made[f"normal {n}"] = [math.exp(rng.gauss(0, 3)) for _ in range(n)]
        made[f"uniform {n}"] = [rng.random() for _ in range(n)]
        made[f"equal {n}"] = [0.1] * n
        made[f"ties {n}"] = [rng.choice((0.1, 0.2, 0.7)) for _ in range(n)]
        made[f"sparse {n}"] = [rng.random() if rng.random() < 0.1 else 0.0 for _ in range(n - 1)] + [1.0]
        made[f"one-hot {n}"] = [0.0] * (n - 1) + [0.25]
        made[f"denormal {n}"] = [rng.randrange(4) * 5e-324 for _ in range(n - 1)] + [5e-324]
        made[f"range {n}"] = [2.0 ** rng.uniform(-1000, 0) for _ in range(n)]
        made[f"ascending {n}"] = [float(i + 1) for i in range(n)]
        made[f"descending {n}"] = [float(n - i) for i in range(n)]
    made["tail of denormals"] = [1.0] + [5e-324] * 70
    made["remainders all zero"] = [1.0] * 8
    made["last bits"] = [1.0 + i * 2.0**-52 for i in range(500)]
    made["close remainders"] = [1.0 + (i % 7) * 2.0**-40 for i in range(3000)]
    made["large"] = [1e300, 1e299, 1e300]
    made["scaling overflows"] = [1.7e308, 1.0]
    made["sum overflows"] = [1.7e308, 1.7e308]
    made["large sum, small parts"] = [1.0e300] * 400
    made["many"] = [math.exp(rng.gauss(0, 4)) for _ in range(40000)]
    for name, bad in (("nan", math.nan), ("inf", math.inf), ("-inf", -math.inf), ("minus", -1e-9), ("-0.0", -0.0),
                      ("minus denormal", -5e-324), ("-nan", math.copysign(math.nan, -1.0))):  # fmt: skip
        for n, at in ((1, 0), (33, 0), (33, 31), (33, 32), (1000, 517), (64, 63)):
            spoilt = [rng.random() for _ in range(n)]
            spoilt[at] = bad
            made[f"{name} at {at} of {n}"] = spoilt
    return made
