"""The integer kernel on Python integers: no bound on the weights, and no hurry.

Between exact integer weights of any size and outcomes of 64-bit noise. What `integer` does within uint64, and `fast` in native
code on weights of up to 2^52, is held against this. Draws no noise itself. SPEC section 6, layer (b).
"""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise
from math import lcm

from ..dyadic import MASS
from ..errors import LocalMisuse


def exact_weights(weights: Sequence[float]) -> list[int]:
    """Integers in exactly the proportions of floating-point `weights` (any of NaN, infinite or negative: `LocalMisuse`)."""
    if not all(0 <= weight < float("inf") for weight in weights):
        raise LocalMisuse("weights must be finite and not negative")
    fractions = [Fraction(weight) for weight in weights]
    common = lcm(*(fraction.denominator for fraction in fractions))
    return [fraction.numerator * (common // fraction.denominator) for fraction in fractions]


def acceptance_threshold(count: int, weight: int, total: int) -> int:
    """How many of the 2^64 noise values accept a token of q = count/M and p = weight/total: those below this one."""
    return min(-(-(MASS * weight << 64) // (count * total)), 1 << 64)


def accept(u64: int, count: int, weight: int, total: int) -> bool:
    """u64 * c * W < 2^64 * M * w."""
    return u64 * count * total < (MASS * weight) << 64


def residual(weights: Sequence[int], total: int, counts: Sequence[int]) -> list[int]:
    """max(w*M - c*W, 0) of every token; `counts` covers the whole vocabulary."""
    return [max(weight * MASS - count * total, 0) for weight, count in zip(weights, counts, strict=True)]


def pick(masses: Sequence[int], u64: int) -> int:
    """The first index whose cumulative mass exceeds floor(u64 * total / 2^64); raises `LocalMisuse` without mass."""
    total = sum(masses)
    threshold = (u64 * total) >> 64
    for index, cumulative in enumerate(accumulate(masses)):
        if cumulative > threshold:
            return index
    raise LocalMisuse("nothing to pick from: no mass")


def pick_lengths(masses: Sequence[int]) -> list[int]:
    """How many of the 2^64 noise values pick each index: within one of mass/total * 2^64, none for no mass.

    u picks an index at or below i exactly when floor(u*T/2^64) < C_i, that is u < ceil(C_i * 2^64 / T).
    """
    total = sum(masses)
    if total <= 0:
        raise LocalMisuse("nothing to pick from: no mass")
    edges = [-(-(cumulative << 64) // total) for cumulative in accumulate(masses, initial=0)]
    return [end - start for start, end in pairwise(edges)]
