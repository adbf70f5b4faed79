"""A toy draft and a toy target: pure functions of (model seed, last two tokens) that give weights over the vocabulary.

Between a seed and rows of weights. Learns nothing, reads nothing, and holds its whole state in a bank of 16 rows, so a
row is looked up and not computed. Draft and target of one seed belong together: each draft row distorts a target row.

A row gives every token ID a rank, (a * ID + b) mod V with a and b from the seed. The target's integer weight is
2^37 / (rank+1)^2, and 0 where rank mod 16 is 15 (a token that p forbids though q may propose it). The draft's weight
mixes a flatter law of the same ranks, (rank+1)^-1.5, with the target of the next row: total variation 0.45 between p
and q (0.42 with the 32 largest only). Only correctly rounded operations are used (no pow, no log) at temperature 1, so
rows are the same bits on every host.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalMisuse

DEFAULT_VOCABULARY: Final = 129_280
BANK_ROWS: Final = 16
_MIN_VOCABULARY: Final = 64
_MAX_VOCABULARY: Final = 1 << 20
_U64: Final = (1 << 64) - 1
_SCALE: Final = 1 << 37  # times zeta(2) = 1.64 stays below the verifier's bound of 2^38
_FORBIDDEN_EVERY: Final = 16
_ZETA_TWO: Final = 1.6449340668482264
_ZETA_THREE_HALVES: Final = 2.6123753486854883
_MIX: Final = 0.35  # share of the other row in q: total variation from p about 0.45
_TEMPERED_ROWS: Final = 32


def splitmix64(x: int) -> int:
    """The splitmix64 output for state `x`: a fixed 64-bit hash on Python ints."""
    z = (x + 0x9E3779B97F4A7C15) & _U64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _U64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _U64
    return z ^ (z >> 31)


def row_of(seed: int, context_tail: Sequence[int]) -> int:
    """Which of the 16 rows follows `context_tail`: splitmix64 chained over the seed and the last two tokens.

    A token that is missing (a context shorter than two) counts as 2^64 - 1.
    """
    last = context_tail[-1] if len(context_tail) >= 1 else _U64
    before = context_tail[-2] if len(context_tail) >= 2 else _U64
    return splitmix64(splitmix64(splitmix64(seed & _U64) ^ before) ^ last) % BANK_ROWS


class ToyTarget:
    """The target: exact integer weights after a context. `seed` any int, `vocabulary` 64..2^20."""

    def __init__(self, seed: int, vocabulary: int = DEFAULT_VOCABULARY) -> None:
        _check_vocabulary(vocabulary)
        self.seed = seed
        self.vocabulary = vocabulary
        shape = _target_shape(vocabulary)
        self._total = int(shape.sum())
        self._bank = np.empty((BANK_ROWS, vocabulary), dtype=np.uint64)
        for row in range(BANK_ROWS):
            self._bank[row] = shape[_ranks(seed, row, vocabulary)]
        self._bank.flags.writeable = False

    def row_of(self, context_tail: Sequence[int]) -> int:
        """The bank row after `context_tail`, 0..15: contexts of one row share one p."""
        return row_of(self.seed, context_tail)

    def weights(self, context_tail: Sequence[int]) -> tuple[NDArray[np.uint64], int]:
        """p after `context_tail` (only its last two tokens count): read-only uint64 [V] and its exact sum <= 2^38."""
        bank_row: NDArray[np.uint64] = self._bank[row_of(self.seed, context_tail)]
        return bank_row, self._total


class ToyDraft:
    """The draft of the target with the same seed: float64 weights after a context, at a temperature."""

    def __init__(self, seed: int, vocabulary: int = DEFAULT_VOCABULARY) -> None:
        _check_vocabulary(vocabulary)
        self.seed = seed
        self.vocabulary = vocabulary
        own, other = _draft_shapes(vocabulary)
        self._bank = np.empty((BANK_ROWS, vocabulary), dtype=np.float64)
        ranks = _ranks(seed, 0, vocabulary)
        for row in range(BANK_ROWS):
            next_ranks = _ranks(seed, (row + 1) % BANK_ROWS, vocabulary)
            np.add(own[ranks], other[next_ranks], out=self._bank[row])
            ranks = next_ranks
        self._bank.flags.writeable = False
        self._tempered: OrderedDict[tuple[int, float], NDArray[np.float64]] = OrderedDict()

    def weights(self, context_tail: Sequence[int], temperature: float = 1.0) -> NDArray[np.float64]:
        """Unnormalised q after `context_tail`: read-only float64 [V], weights ** (1/T).

        At T = 0 it is one-hot: the largest weight, ties to the lowest ID. Raises `LocalMisuse` unless the temperature
        is finite and not negative.
        """
        row = row_of(self.seed, context_tail)
        if temperature == 1.0:
            plain: NDArray[np.float64] = self._bank[row]
            return plain
        if not (math.isfinite(temperature) and temperature >= 0):
            raise LocalMisuse(f"temperature must be finite and at least 0, not {temperature}")
        key = (row, temperature)
        if key not in self._tempered:
            self._tempered[key] = _temper(self._bank[row], temperature)
            if len(self._tempered) > _TEMPERED_ROWS:
                self._tempered.popitem(last=False)
        self._tempered.move_to_end(key)
        return self._tempered[key]


class ToyModels(NamedTuple):
    """A draft and the target it belongs to."""

    draft: ToyDraft
    target: ToyTarget

    @classmethod
    def of(cls, seed: int, vocabulary: int = DEFAULT_VOCABULARY) -> ToyModels:
        """Both models of one seed."""
        return cls(ToyDraft(seed, vocabulary), ToyTarget(seed, vocabulary))


def _check_vocabulary(vocabulary: int) -> None:
    if not _MIN_VOCABULARY <= vocabulary <= _MAX_VOCABULARY:
        raise LocalMisuse(f"a toy vocabulary is {_MIN_VOCABULARY}..{_MAX_VOCABULARY} tokens, not {vocabulary}")


def _ranks(seed: int, row: int, vocabulary: int) -> NDArray[np.int64]:
    """The rank of every ID in `row`: a bijection of 0..V-1, int64 [V]."""
    state = splitmix64(splitmix64(seed & _U64) + row)
    factor = 1 + state % (vocabulary - 1)
    while math.gcd(factor, vocabulary) != 1:
        state = splitmix64(state)
        factor = 1 + state % (vocabulary - 1)
    offset = splitmix64(state) % vocabulary
    ranks: NDArray[np.int64] = (np.arange(vocabulary, dtype=np.int64) * factor + offset) % vocabulary
    return ranks


def _target_shape(vocabulary: int) -> NDArray[np.uint64]:
    """The target's weight by rank: uint64 [V], sum below 2^38."""
    ranks = np.arange(vocabulary, dtype=np.uint64)
    shape = np.uint64(_SCALE) // ((ranks + np.uint64(1)) ** 2)
    shape[ranks % np.uint64(_FORBIDDEN_EVERY) == _FORBIDDEN_EVERY - 1] = 0
    return shape


def _draft_shapes(vocabulary: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The draft's weight by its own rank and by the next row's rank: two float64 [V]."""
    places = np.arange(1, vocabulary + 1, dtype=np.float64)
    own = (1.0 - _MIX) / _ZETA_THREE_HALVES / (places * np.sqrt(places))
    other = _target_shape(vocabulary).astype(np.float64) * (_MIX / _ZETA_TWO / _SCALE)
    return own, other


def _temper(weights: NDArray[np.float64], temperature: float) -> NDArray[np.float64]:
    if temperature == 0:
        tempered = np.zeros_like(weights)
        tempered[int(np.argmax(weights))] = 1.0  # argmax gives the lowest ID among equals
    else:
        # Scaled to a maximum of 1, so that no temperature can overflow or lose the whole mass.
        tempered = (weights / weights.max()) ** (1.0 / temperature)
    tempered.flags.writeable = False
    return tempered
