"""Plain Python twins of the C kernels: what every kernel must equal, bit for bit.

Between the tests and the contract. Slow on purpose: integers and fractions where C uses tricks, whole sorts where C
selects. Imported by tests and by the maker of the aarch64 vectors; never by the running transport. SPEC sections 2-5.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from fractions import Fraction

import xxhash

from ..errors import Reason

MASS = 1 << 24
NO_DRAW = 0xFFFFFFFF
TREE = 32
U64 = (1 << 64) - 1


class Failure(Exception):
    """A check that failed; `code` is its reason's wire code."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(str(reason))
        self.code = reason.code


def _code(check: Iterable[None]) -> int:
    """Runs a generator of checks to its end: 0, or the code of the first failure."""
    try:
        for _ in check:
            pass
    except Failure as failure:
        return failure.code
    return 0


# -- digests -------------------------------------------------------------------------------------------------------


def xxh3_64(data: bytes, seed: int) -> int:
    return int(xxhash.xxh3_64_intdigest(data, seed))


def xxh3_128(data: bytes) -> tuple[int, int]:
    digest = int(xxhash.xxh3_128_intdigest(data))
    return digest & U64, digest >> 64


def prefix_digest(low: int, high: int, tokens: Sequence[int]) -> tuple[int, int]:
    for token in tokens:
        low, high = xxh3_128(struct.pack("<QQi", low, high, token))
    return low, high


# -- rows ----------------------------------------------------------------------------------------------------------


def count_of(raw: bytes) -> int:
    """The count of one FP32 value given as its four bytes; raises `Failure`."""
    (value,) = struct.unpack("<f", raw)
    if not math.isfinite(value):
        raise Failure(Reason.NONFINITE)
    if math.copysign(1.0, value) < 0:
        raise Failure(Reason.NEGATIVE)
    scaled = value * MASS  # exact: an FP32 times a power of two, in FP64
    if not scaled.is_integer() or scaled > MASS:
        raise Failure(Reason.NONDYADIC)
    return int(scaled)


def values_of(row: bytes, n: int) -> list[bytes]:
    return [row[4 * i : 4 * i + 4] for i in range(n)]


def draw(counts: Sequence[int], u24: int) -> int:
    """First index whose cumulative count exceeds u24, -1 if there is none."""
    total = 0
    for index, count in enumerate(counts):
        total += count
        if total > u24:
            return index
    return -1


def _judge(counts: Sequence[int], expected_mass: int, index: int | None, in_range: bool, u24: int) -> None:
    """Mass, token range, q(token), draw proof. `index` is the token's among counts, -1 if absent, None for no token."""
    if sum(counts) != expected_mass:
        raise Failure(Reason.MASS)
    if index is None:
        if u24 != NO_DRAW and u24 < expected_mass:
            raise Failure(Reason.DRAW_MISMATCH)
        return
    if not in_range:
        raise Failure(Reason.ID_RANGE)
    if index == -1 or counts[index] == 0:
        raise Failure(Reason.ZERO_Q_TOKEN)
    if u24 != NO_DRAW and draw(counts, u24) != index:
        raise Failure(Reason.DRAW_MISMATCH)


def validate_dense_row(row: bytes, entries: int, expected_mass: int, token: int, u24: int) -> int:
    """`row` holds the values and the padding after them."""

    def checks() -> Iterable[None]:
        counts = [count_of(raw) for raw in values_of(row, entries)]
        yield
        if any(row[4 * entries :]):
            raise Failure(Reason.PADDING_NONZERO)
        index = None if token == -1 else token
        _judge(counts, expected_mass, index, 0 <= token < entries, u24)

    return _code(checks())


def dense_cursor(
    row: bytes, entries: int, seed: int, expected_digest: int, expected_mass: int, token: int, u24: int
) -> int:
    if xxh3_64(row, seed) != expected_digest:
        return Reason.PAYLOAD_DIGEST.code
    return validate_dense_row(row, entries, expected_mass, token, u24)


def validate_sparse_row(
    q: bytes, ids: Sequence[int], first_id: int, end_id: int, expected_mass: int, token: int, u24: int
) -> int:
    def checks() -> Iterable[None]:
        counts: list[int] = []
        for i, (raw, token_id) in enumerate(zip(values_of(q, len(ids)), ids, strict=True)):
            if not first_id <= token_id < end_id:
                raise Failure(Reason.ID_RANGE)
            if i > 0 and token_id == ids[i - 1]:
                raise Failure(Reason.ID_DUPLICATE)
            if i > 0 and token_id < ids[i - 1]:
                raise Failure(Reason.ID_ORDER)
            count = count_of(raw)
            if count == 0:
                raise Failure(Reason.ZERO_ENTRY)
            counts.append(count)
            yield
        index = None if token == -1 else list(ids).index(token) if token in ids else -1
        _judge(counts, expected_mass, index, first_id <= token < end_id, u24)

    return _code(checks())


def counts_to_q(counts: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(counts)}f", *(count / MASS for count in counts))


def q_to_counts(row: bytes, n: int) -> tuple[int, list[int]]:
    """(reason code, counts; empty unless the code is 0)."""
    try:
        return 0, [count_of(raw) for raw in values_of(row, n)]
    except Failure as failure:
        return failure.code, []


# -- allocation ----------------------------------------------------------------------------------------------------


def _usable(weight: float) -> bool:
    return math.isfinite(weight) and math.copysign(1.0, weight) > 0


def block_sum(block: Sequence[float]) -> float:
    """One leaf of the fixed tree: 32 lanes (zero-filled), halved until one is left."""
    lanes = [*block, *[0.0] * (TREE - len(block))]
    while len(lanes) > 1:
        half = len(lanes) // 2
        lanes = [lanes[i] + lanes[i + half] for i in range(half)]
    return lanes[0]


def block_sums(weights: Sequence[float]) -> tuple[int, list[float]]:
    """(reason code, sums; empty unless the code is 0)."""
    if not all(_usable(weight) for weight in weights):
        return Reason.INVALID_WEIGHTS.code, []
    return 0, [block_sum(weights[i : i + TREE]) for i in range(0, len(weights), TREE)]


def tree_sum(sums: Sequence[float]) -> float:
    """Pairs, level by level; an odd last one is carried up unchanged."""
    level = list(sums)
    while len(level) > 1:
        pairs = [level[i] + level[i + 1] for i in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    return level[0] if level else 0.0


def allocate(weights: Sequence[float]) -> tuple[int, list[int]]:
    """(reason code, counts; empty unless the code is 0)."""
    refused: tuple[int, list[int]] = (Reason.INVALID_WEIGHTS.code, [])
    code, sums = block_sums(weights)
    total = tree_sum(sums)
    if code or total == 0.0 or not math.isfinite(total):
        return refused
    scaled = [weight * float(MASS) / total for weight in weights]
    if not all(math.isfinite(x) for x in scaled):
        return refused
    counts = [math.floor(x) for x in scaled]
    remainders = [Fraction(x) - count for x, count in zip(scaled, counts, strict=True)]
    eligible = [i for i, weight in enumerate(weights) if weight > 0]
    remaining = MASS - sum(counts)
    if not 0 <= remaining <= len(eligible):
        return refused
    for i in sorted(eligible, key=lambda i: (-remainders[i], i))[:remaining]:
        counts[i] += 1
    return 0, counts


def top_k(weights: Sequence[float], k: int) -> tuple[int, list[int]]:
    """(reason code, ascending indexes; empty unless the code is 0)."""
    if not all(_usable(weight) for weight in weights):
        return Reason.INVALID_WEIGHTS.code, []
    positive = [i for i, weight in enumerate(weights) if weight > 0]
    return 0, sorted(sorted(positive, key=lambda i: (-weights[i], i))[:k])


# -- random numbers ------------------------------------------------------------------------------------------------


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def draw_words(seed: int, domain: int, generation: int, round: int, position: int) -> tuple[int, int, int, int]:
    return philox4x32((domain << 24, position, round, generation), (seed & 0xFFFFFFFF, seed >> 32))


def draw_u24(seed: int, domain: int, generation: int, round: int, position: int) -> int:
    return draw_words(seed, domain, generation, round, position)[0] >> 8


def draw_u64(seed: int, domain: int, generation: int, round: int, position: int) -> int:
    high, low, _, _ = draw_words(seed, domain, generation, round, position)
    return high << 32 | low
