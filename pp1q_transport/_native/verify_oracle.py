"""Plain Python twins of the verification kernels: what pp1q_verify.c must equal, bit for bit.

Between the tests and the contract, like `oracle`. Fractions and Python integers where C splits into limbs. Imported by tests
and by the maker of the aarch64 vectors; never by the running transport. SPEC sections 6 and 7.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from itertools import accumulate, pairwise

from ..errors import Reason
from . import oracle

FIXED_BITS = 51


def target_exponent(total: float) -> int | None:
    """The exponent for weights of tree sum `total`, None for one without."""
    if not 0 < total < math.inf:
        return None
    _, above = math.frexp(total)
    return FIXED_BITS - above if -900 <= above <= 900 else None


def fixed_weights(weights: Sequence[float]) -> tuple[int, int, list[int]]:
    """(reason code, exponent, integer weights; 0 and empty unless the code is 0)."""
    code, sums = oracle.block_sums(weights)
    exponent = None if code else target_exponent(oracle.tree_sum(sums))
    if exponent is None:
        return Reason.INVALID_WEIGHTS.code, 0, []
    return 0, exponent, [round(Fraction(weight) * Fraction(2) ** exponent) for weight in weights]


def accept(u64: int, count: int, weight: int, total: int) -> bool:
    return u64 * count * total < (oracle.MASS * weight) << 64


def residual(weights: Sequence[int], total: int, counts: Sequence[int]) -> list[int]:
    return [max(weight * oracle.MASS - count * total, 0) for weight, count in zip(weights, counts, strict=True)]


def pick(masses: Sequence[int], threshold: int) -> int:
    """First index whose cumulative mass exceeds the threshold, -1 if there is none."""
    return next((index for index, cumulative in enumerate(accumulate(masses)) if cumulative > threshold), -1)


def tree_nodes(first: int, end: int, blocks: int) -> list[tuple[int, int]]:
    """The fewest whole nodes (level, index) of the tree over `blocks` leaves that make up the leaves [first, end).

    Node (l, i) covers the leaves from i * 2^l up to (i + 1) * 2^l or the last: an odd one is carried up unchanged.
    """
    nodes = []
    while first < end:
        level = 0
        while first % (2 << level) == 0 and min(first + (2 << level), blocks) <= end and (1 << level) < blocks:
            level += 1
        nodes.append((level, first >> level))
        first = min(first + (1 << level), blocks)
    return nodes


def tree_root(edges: Sequence[int], nodes: Sequence[float]) -> float:
    """The root from the nodes of all shards in order; shard s has the leaves [edges[s], edges[s + 1])."""
    covers = [node for first, end in pairwise(edges) for node in tree_nodes(first, end, edges[-1])]
    known = dict(zip(covers, nodes, strict=True))

    def at(level: int, index: int) -> float:
        if (level, index) in known:
            return known[level, index]
        left, right = at(level - 1, 2 * index), 2 * index + 1
        return left + at(level - 1, right) if right << (level - 1) < edges[-1] else left

    return at((edges[-1] - 1).bit_length(), 0)


def greedy_commit(drafts: Sequence[int], winners: Sequence[int]) -> list[int]:
    """The drafts that agree with the target's winners, up to the first that does not, and the winner at that place."""
    kept = 0
    while kept < len(drafts) and drafts[kept] == winners[kept]:
        kept += 1
    return [*drafts[:kept], winners[kept]]
