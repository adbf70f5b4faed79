"""The randomised probability integral transform: do committed tokens follow the target's p, context by context?

Between committed tokens with their contexts and one p-value. Draws no protocol noise: what it randomises with has a
generator, a seed and a stream of its own, so it can't lean on the numbers it judges.

For a token t after a context with exact p, u = F(before t) + v * p(t), where F runs over the IDs in an order that does
not depend on t and v is uniform. If every token follows its own p, all u are independent and uniform, whatever the contexts are.
The first N (fixed beforehand) fall into 64 equal bins; chi-square with 63 degrees of freedom judges them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalMisuse
from .models import ToyTarget

BINS: Final = 64
MIN_TOKENS: Final = 5 * BINS  # fewer than five expected in a bin, and chi-square is no longer a good approximation
_ORDER_KEY: Final = np.uint64(0x5DEECE66D1CE4E5B)  # fixed, and unrelated to any model's seed


@dataclass(frozen=True, slots=True)
class PitResult:
    """`n` tokens judged, the chi-square `statistic` (63 degrees of freedom) and its `p_value`.

    `enough` is False while fewer than N were added: such a result proves nothing. `impossible` counts tokens that p
    forbids; one of them is proof by itself and makes the p-value 0, whatever the statistic says.
    """

    n: int
    statistic: float
    p_value: float
    enough: bool
    impossible: int


class Pit:
    """Collects the first `n` tokens of a run, each with the row of p it should follow; `noise_seed` 0..2^64-1 seeds v alone.

    F runs over each row from its likeliest ID to its least likely one (ties: the lower first): in contexts that never come
    again, as a language model's, this sees a law that draws likely IDs too often or too rarely. One that is wrong in each
    context in a way of its own evens out in any order; only many draws in one context show it. Raises `LocalMisuse` if `n` is
    below 320 (five expected in each bin).
    """

    def __init__(self, vocabulary: int, n: int, noise_seed: int) -> None:
        if n < MIN_TOKENS:
            raise LocalMisuse(f"the test needs at least {MIN_TOKENS} tokens, not {n}")
        self.vocabulary = vocabulary
        self._planned = n
        self._noise = np.random.Philox(key=noise_seed).random_raw(n)
        self._bins = [0] * BINS
        self._added = 0
        self._impossible = 0

    def add_row(self, weights: NDArray[np.uint64], token: int) -> bool:
        """Counts `token`, committed where p was `weights` (uint64 [V]) over their sum, below 2^63; False (and no effect) once N
        are in. Raises `LocalMisuse` if the token is outside the vocabulary."""
        self._check(token)
        weight = weights[token]
        before = int(weights[weights > weight].sum()) + int(weight) * int(np.count_nonzero(weights[:token] == weight))
        return self._add(before, int(weight), int(weights.sum()))

    def _check(self, token: int) -> None:
        if not 0 <= token < self.vocabulary:
            raise LocalMisuse(f"token {token} is outside the vocabulary of {self.vocabulary}")

    def _add(self, before: int, weight: int, total: int) -> bool:
        if self._added == self._planned:
            return False
        if weight == 0:
            self._impossible += 1
        # u * 64 in exact integers: u < 1 holds without a clamp, but for a token that p forbids.
        at = BINS * ((before << 64) + int(self._noise[self._added]) * weight) // (total << 64)
        self._bins[min(at, BINS - 1)] += 1
        self._added += 1
        return True

    def result(self) -> PitResult:
        """The verdict on what was added so far."""
        enough = self._added == self._planned
        if self._added == 0:
            return PitResult(0, 0.0, 1.0, enough, 0)
        expected = self._added / BINS
        statistic = math.fsum((count - expected) ** 2 for count in self._bins) / expected
        p_value = 0.0 if self._impossible else chi_square_tail(statistic, BINS - 1)
        return PitResult(self._added, statistic, p_value, enough, self._impossible)


class PitTest(Pit):
    """The same of runs against the toy `target`, whose few rows come again and again: F runs in a fixed shuffled order."""

    def __init__(self, target: ToyTarget, n: int, noise_seed: int) -> None:
        super().__init__(target.vocabulary, n, noise_seed)
        self._target = target
        self._order = shuffled_order(target.vocabulary)
        self._place = np.empty(target.vocabulary, dtype=np.int64)
        self._place[self._order] = np.arange(target.vocabulary)
        self._cumulative: dict[int, NDArray[np.uint64]] = {}

    def add(self, context_tail: Sequence[int], token: int) -> bool:
        """Counts `token`, committed after `context_tail`; False (and no effect) once N are in. Raises as `add_row`."""
        self._check(token)
        weights, total = self._target.weights(context_tail)
        row = self._target.row_of(context_tail)
        if row not in self._cumulative:
            self._cumulative[row] = np.cumsum(weights[self._order])
        weight = int(weights[token])
        return self._add(int(self._cumulative[row][self._place[token]]) - weight, weight, total)


def shuffled_order(vocabulary: int) -> NDArray[np.int64]:
    """The IDs in the test's fixed order, int64 [V]: sorted by splitmix64's finaliser of (ID + a constant)."""
    z = np.arange(vocabulary, dtype=np.uint64) + _ORDER_KEY
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return np.argsort(z ^ (z >> np.uint64(31)), kind="stable")


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(chi-square with `dof` >= 1 degrees of freedom >= `statistic`): the regularised gamma Q(dof/2, statistic/2).

    For integer degrees of freedom it is a finite sum of positive terms (plus erfc for odd ones), so nothing cancels and
    tiny tails keep their relative precision down to underflow. Raises `LocalMisuse` for other arguments (NaN too).
    """
    if dof < 1 or not statistic >= 0:
        raise LocalMisuse(f"no chi-square tail of {statistic} with {dof} degrees of freedom")
    half = statistic / 2
    if half == 0:
        return 1.0
    if math.isinf(half):
        return 0.0
    odd = dof % 2
    log_half = math.log(half)
    start = math.erfc(math.sqrt(half)) if odd else 0.0
    exponents = (step + odd / 2 for step in range(dof // 2))
    tail = start + math.fsum(math.exp(power * log_half - half - math.lgamma(power + 1)) for power in exponents)
    return min(tail, 1.0)
