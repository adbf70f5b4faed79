"""The fast path: verification in native code, on an engine's own FP32 or FP64 weights.

Between a target's row after its own processors (probabilities, or unnormalised weights) and accept, correct, bonus. Each weight
is rounded once, to the nearest multiple of about 2^-51 of their sum; from there on everything is the integer kernel, exactly:
no order of additions, instruction set or split into shards can change a token. SPEC section 6, layer (c); docs/verification.md
states the error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from .._native import kernels
from ..dyadic import MASS, to_counts
from ..errors import InvalidQ, LocalMisuse, Reason
from ..rng import Domain, draw64
from . import wide
from .integer import Draw, QRow, Verdict, check_fit, noise_in

Weights: TypeAlias = NDArray[np.float32] | NDArray[np.float64]
FIXED_BITS: Final = 51
_U64: Final = (1 << 64) - 1


def bytes_of(array: NDArray[Any], dtypes: tuple[Any, ...], name: str) -> NDArray[np.uint8]:
    """The bytes of a one-dimensional array that has one of `dtypes` already. Raises `LocalMisuse`: nothing is converted."""
    if array.ndim != 1 or array.dtype not in dtypes:
        raise LocalMisuse(f"{name} must be one-dimensional {' or '.join(np.dtype(t).name for t in dtypes)}, not {array.dtype}")
    return np.ascontiguousarray(array).view(np.uint8)


class FastTarget:
    """A target's row as integers: `weights` float32 or float64 [V], p(v) = weights[v] / their sum.

    Raises `LocalMisuse` for NaN, infinite or negative weights (-0.0 too), for no mass, and for a sum outside 2^-900 .. 2^900.
    The array is read, not copied: it may not change while this is used.
    """

    __slots__ = ("_row", "vocabulary", "weights")

    def __init__(self, weights: Weights) -> None:
        raw = bytes_of(weights, (np.float32, np.float64), "target weights")
        self.weights = weights
        self.vocabulary = len(weights)
        self._row = kernels.TargetRow()
        self._row.load(raw, 0, self.vocabulary, weights.dtype == np.float64)
        if self._row.fix():
            raise LocalMisuse("target weights must be finite, not negative, and have a mass")

    @property
    def total(self) -> int:
        """W: the exact sum of the integer weights, about 2^50 .. 2^51."""
        return self._row.total

    @property
    def exponent(self) -> int:
        """The integer weight of a token is the one nearest to weight * 2^exponent, ties to even."""
        return self._row.exponent

    def weight(self, token: int) -> int:
        """The integer weight of one token."""
        return self._row.weight(token)

    def integers(self) -> list[int]:
        """All integer weights, as the layers above take them."""
        return [self._row.weight(token) for token in range(self.vocabulary)]

    def accept(self, token: int, q: QRow, u64: int) -> bool:
        """Whether `token`, drawn from `q`, survives `u64`. Raises `LocalMisuse` on misfits, `InvalidQ` if q(token) is 0 or
        none."""
        check_fit(token, q, self.vocabulary)
        count = q.count_of(token)
        if count == 0:
            raise InvalidQ(Reason.ZERO_Q_TOKEN, f"token {token}")
        return kernels.accept(noise_in(u64), count, self._row.weight(token), self._row.total)

    def pick(self, u64: int) -> int:
        """A token from p: the bonus, or the token of a target alone."""
        return self._row.pick((noise_in(u64) * self._row.total) >> 64)

    def residual_mass(self, q: QRow) -> int:
        """What max(p - q, 0) sums to, in units of 1/(M*W); `correct` draws from it. Raises `InvalidQ` for a q that is none."""
        values = bytes_of(q.values, (np.float32,), "q")
        if q.ids is None:
            code = self._row.residual_dense(values, 0, self._row.total)
        else:
            ids = bytes_of(q.ids, (np.int32,), "the IDs of q")
            code = self._row.residual_sparse(values, 0, ids, 0, len(q.ids), self._row.total)
        if code:
            raise InvalidQ(Reason.from_code(code), "q at the rejected position")
        if self._row.counts != MASS:
            raise InvalidQ(Reason.MASS, f"counts sum to {self._row.counts}, not {MASS}")
        return self._row.residual_mass()

    def correct(self, q: QRow, u64: int) -> tuple[int, bool]:
        """The correction after a rejection, and True; or, from the rational path, a token and False if there was no residual."""
        u64 = noise_in(u64)
        mass = self.residual_mass(q)
        if mass == 0:
            return rational_correction(self.weights, q, u64), False
        threshold = (u64 * mass) >> 64
        return self._row.pick_residual(threshold >> 64, threshold & _U64), True


def rational_correction(weights: Weights, q: QRow, u64: int) -> int:
    """A correction with nothing rounded at all: from max(p - q, 0) of the floats as rationals, or from p if that is empty.

    Integers that rejected always leave a residual, so `FastTarget` never comes here by arithmetic; the way is kept, and counted,
    for a q or a target that someone changed in between.
    """
    ours = wide.exact_weights([float(weight) for weight in weights])
    counts = [0] * len(ours)
    for token, count in zip(range(len(ours)) if q.ids is None else q.ids, to_counts(q.values).tolist(), strict=True):
        counts[int(token)] = count
    masses = wide.residual(ours, sum(ours), counts)
    return wide.pick(masses if any(masses) else ours, u64)


def target_only_fast(
    weights: Weights, seed: int, generation: int, round: int, position: int, *, draw: Draw | None = None
) -> int:
    """One token from p at the absolute `position`, from the CORRECTION domain: `target_only` on floats."""
    return FastTarget(weights).pick((draw or draw64)(seed, Domain.CORRECTION, generation, round, position))


def verify_chain_fast(
    proposal_tokens: Sequence[int],
    qs: Sequence[QRow],
    target_weights_at: Callable[[int], Weights],
    seed: int,
    generation: int,
    round: int,
    first_position: int,
    *,
    draw: Draw | None = None,
) -> Verdict:
    """`verify_chain` on floats: `target_weights_at(i)` is float32 or float64 [V]. Same noise, same meaning, same errors."""
    if not proposal_tokens or len(proposal_tokens) != len(qs):
        raise LocalMisuse(f"{len(proposal_tokens)} tokens with {len(qs)} rows of q; with none at all use target_only_fast")
    noise_of = draw or draw64
    for index, (token, q) in enumerate(zip(proposal_tokens, qs, strict=True)):
        target = FastTarget(target_weights_at(index))
        position = first_position + index
        if target.accept(token, q, noise_of(seed, Domain.ACCEPT, generation, round, position)):
            continue
        correction, from_residual = target.correct(q, noise_of(seed, Domain.CORRECTION, generation, round, position))
        return Verdict(index, [*proposal_tokens[:index], correction], no_residual=int(not from_residual))
    depth = len(proposal_tokens)
    target = FastTarget(target_weights_at(depth))
    bonus = target.pick(noise_of(seed, Domain.CORRECTION, generation, round, first_position + depth))
    return Verdict(depth, [*proposal_tokens, bonus])
