"""Plain Python twin of `ShardedRow` (shards.pxi): what one rank sends while a sharded row is verified, word by word.

Between the tests and the contract, like `verify_oracle`. Fractions and Python integers; a message is a list of numbers. Imported
by tests and by the maker of the aarch64 vectors; never by the running transport. SPEC section 6.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from collections.abc import Sequence
from fractions import Fraction
from itertools import pairwise

from ..errors import Reason
from . import oracle, verify_oracle

WORD = (1 << 64) - 1
NO_RESIDUAL, WRONG_MASS = -1, -2


def choose(u64: int, masses: Sequence[int]) -> tuple[int, int]:
    """The first of `masses` whose cumulative sum exceeds floor(u64 * sum / 2^64), and the threshold within it; else (-1, 0)."""
    threshold = (u64 * sum(masses)) >> 64
    chosen = verify_oracle.pick(masses, threshold)
    return (chosen, threshold - sum(masses[:chosen])) if chosen >= 0 else (-1, 0)


def count_at(values: Sequence[float], ids: Sequence[int] | None, token: int) -> int | None:
    """q(token) * M, 0 where q has no entry for it, None if it is no count."""
    at = token if ids is None else bisect_left(ids, token)
    if at >= len(values) or (ids is not None and ids[at] != token):
        return 0
    if values[at] == 0:
        return 0
    try:
        return oracle.count_of(struct.pack("<f", values[at]))
    except oracle.Failure:
        return None


class ShardOracle:
    """One rank: what it sends at each step, from what it holds and what all ranks sent before."""

    def __init__(self, rank: int, edges: Sequence[int]) -> None:
        self.rank = rank
        self.edges = edges
        self.first, self.end = edges[rank], edges[rank + 1]
        self.blocks = [-(-edge // oracle.TREE) for edge in edges]
        self.covers = [verify_oracle.tree_nodes(low, high, self.blocks[-1]) for low, high in pairwise(self.blocks)]
        self.masses: list[int] = []
        self.weights: list[int] = []
        self.left: list[int] = []
        self.all_counts = 0

    def nodes(self, weights: Sequence[float]) -> list[float]:
        """Sums of the tree's nodes over this rank's blocks, filled with zeros to the longest; none for bad weights."""
        self.given = list(weights)
        most = max(map(len, self.covers))
        code, sums = oracle.block_sums(self.given)
        if code:
            return []
        before, blocks = self.blocks[self.rank], self.blocks[-1]
        own = [
            oracle.tree_sum(sums[(index << level) - before : min((index + 1) << level, blocks) - before])
            for level, index in self.covers[self.rank]
        ]
        return own + [0.0] * (most - len(own))

    def fix(self, nodes: Sequence[Sequence[float]]) -> int:
        """Integer weights under the exponent of the whole row; a reason's code."""
        if not all(map(len, nodes)):
            return Reason.INVALID_WEIGHTS.code
        held = [node for message, cover in zip(nodes, self.covers, strict=True) for node in message[: len(cover)]]
        exponent = verify_oracle.target_exponent(verify_oracle.tree_root(self.blocks, held))
        if exponent is None:
            return Reason.INVALID_WEIGHTS.code
        self.weights = [round(Fraction(weight) * Fraction(2) ** exponent) for weight in self.given]
        return 0

    def facts(self, token: int, values: Sequence[float], ids: Sequence[int] | None, u64: int | None) -> list[int]:
        """[mass, noise, weight, count, code]; the last three are of a token (-1: none) in this rank's range."""
        self.token = token
        own = [0, 0, 0]
        if self.first <= token < self.end:
            count = count_at(values, ids, token - self.first if ids is None else token)
            own = [self.weights[token - self.first], count or 0, Reason.NONDYADIC.code if count is None else 0]
        return [sum(self.weights), u64 or 0, *own]

    def verdict(self, facts: Sequence[Sequence[int]]) -> int:
        """1, 0, or minus the code of why the token cannot have been drawn."""
        self.masses = [message[0] for message in facts]
        owner = next(rank for rank, end in enumerate(self.edges[1:]) if self.token < end)
        _, _, weight, count, code = facts[owner]
        if code or not count:
            return -(code or Reason.ZERO_Q_TOKEN.code)
        return int(verify_oracle.accept(facts[0][1], count, weight, sum(self.masses)))

    def chosen(self, facts: Sequence[Sequence[int]]) -> int:
        """What this rank tells of a draw from p: the token, or 0."""
        self.masses = [message[0] for message in facts]
        rank, inside = choose(facts[0][1], self.masses)
        return self.first + verify_oracle.pick(self.weights, inside) if rank == self.rank else 0

    def residual(self, values: Sequence[float], ids: Sequence[int] | None, u64: int | None) -> list[int]:
        """[noise, code, counts, mass >> 64, mass]: what q leaves of this rank's weights. q must be in order."""
        counts = [0] * len(self.weights)
        for at, value in enumerate(values):
            counts[at if ids is None else ids[at] - self.first] = int(value * oracle.MASS)
        self.left = verify_oracle.residual(self.weights, sum(self.masses), counts)
        return [u64 or 0, 0, sum(counts), sum(self.left) >> 64, sum(self.left) & WORD]

    def chosen_residual(self, residuals: Sequence[Sequence[int]]) -> tuple[int, int]:
        """(0, what this rank tells of the correction), or (why there is none, 0)."""
        for message in residuals:
            if message[1]:
                return message[1], 0
        self.all_counts = sum(message[2] for message in residuals)
        if self.all_counts != oracle.MASS:
            return WRONG_MASS, 0
        rank, inside = choose(residuals[0][0], [(message[3] << 64) | message[4] for message in residuals])
        if rank < 0:
            return NO_RESIDUAL, 0
        return 0, self.first + verify_oracle.pick(self.left, inside) if rank == self.rank else 0
