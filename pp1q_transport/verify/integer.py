"""The integer kernel: rejection sampling in exact integers, so that what is committed follows the target's p.

Between a proposal (tokens and the very q each was drawn from) with the target's own weights on one side, and the tokens
to commit on the other. Does no I/O, keeps no state, never rounds and never renormalises q. SPEC section 6, layer (b).

Everything compares cross products: p = w/W against q = c/M. With W <= 2^38 and M = 2^24 both w*M and c*W stay at or
below 2^62, so vocabulary-long work fits uint64; thresholds on 64-bit noise are Python integers.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..dyadic import MASS, to_counts
from ..errors import InvalidQ, LocalMisuse, Reason
from ..rng import Domain, draw64

Draw: TypeAlias = Callable[[int, Domain, int, int, int], int]
"""Noise of (seed, domain, generation, round, position): `rng.draw64`, or a `KeyGuard`'s, which lets no key be used twice."""

TargetRow: TypeAlias = tuple[NDArray[np.uint64], int]
"""The target's exact p after its own processors: weights uint64 [V] and their exact sum W <= `MAX_TOTAL`."""

MAX_TOTAL: Final = 1 << 38
_MAX_VOCABULARY: Final = 1 << 25  # V * 2^38 < 2^64: the check of a sum cannot itself wrap
_NOISE_BITS: Final = 64
_NOISE_END: Final = 1 << _NOISE_BITS


@dataclass(frozen=True, slots=True)
class QRow:
    """One position's q: `values` float32 [V] (dense), or float32 [n] beside ascending `ids` int32 [n] (sparse)."""

    values: NDArray[np.float32]
    ids: NDArray[np.int32] | None = None

    def count_of(self, token: int) -> int:
        """The count c = q(token) * M, 0 outside a sparse support.

        Raises `InvalidQ` (nondyadic) if it is no integer in 0..M, `LocalMisuse` if `token` is outside a dense row.
        """
        index = token
        if self.ids is not None:
            index = int(np.searchsorted(self.ids, token))
            if index == len(self.ids) or int(self.ids[index]) != token:
                return 0
        elif not 0 <= token < len(self.values):
            raise LocalMisuse(f"token {token} is outside a q of {len(self.values)} entries")
        scaled = float(self.values[index]) * MASS  # a power of two: exact
        if not 0 <= scaled <= MASS or not scaled.is_integer():
            raise InvalidQ(Reason.NONDYADIC, f"q({token}) * 2^24 is {scaled!r}")
        return int(scaled)

    def counts(self) -> NDArray[np.uint32]:
        """All counts, uint32, as long as `values`; raises `InvalidQ` unless they are dyadic with sum M."""
        counts = to_counts(self.values)
        mass = int(counts.sum(dtype=np.uint64))
        if mass != MASS:
            raise InvalidQ(Reason.MASS, f"counts sum to {mass}, not {MASS}")
        return counts


@dataclass(frozen=True, slots=True)
class Verdict:
    """What to commit: `accepted_drafts` proposal tokens, then one token of the target's (correction or bonus)."""

    accepted_drafts: int
    committed_tokens: list[int]
    no_residual: int = 0
    """Rejections that found max(p - q, 0) empty and drew from p instead. Exact integers never do: q > p at one token
    means p > q at another. A faster path that rounds shares this count."""


def check_weights(weights: NDArray[np.uint64], total: int) -> None:
    """Raises `LocalMisuse` unless `weights` is uint64 [V] whose exact sum is `total`, 1 <= total <= 2^38."""
    if weights.dtype != np.uint64 or weights.ndim != 1 or not 1 <= len(weights) < _MAX_VOCABULARY:
        raise LocalMisuse(f"target weights must be uint64 [V], not {weights.dtype} {list(weights.shape)}")
    if not 1 <= total <= MAX_TOTAL:
        raise LocalMisuse(f"the target's total weight {total} is outside 1..2^38; scale its weights")
    # The bound on each weight comes first: only with it is the sum below exact.
    if int(weights.max()) > total or int(weights.sum()) != total:
        raise LocalMisuse(f"target weights do not sum to the stated total {total}")


def accept(u64: int, count: int, weight: int, total: int) -> bool:
    """Whether a token with q = count/M and p = weight/total survives noise `u64`: u64/2^64 < p/q, exactly.

    Raises `LocalMisuse` if the token could not have been proposed (count outside 1..M) or `u64`, `weight`, `total` are
    out of range.
    """
    if not 1 <= count <= MASS:
        raise LocalMisuse(f"a proposed token has a count in 1..2^24, not {count}")
    if not 0 <= weight <= total <= MAX_TOTAL or total == 0:
        raise LocalMisuse(f"weight {weight} of total {total} is no probability, or the total exceeds 2^38")
    u64 = noise_in(u64)
    return u64 * count * total < (MASS * weight) << _NOISE_BITS


def residual(
    weights: NDArray[np.uint64], total: int, counts: NDArray[np.uint32], ids: NDArray[np.int32] | None = None
) -> NDArray[np.uint64]:
    """max(p - q, 0) over the full vocabulary, in units of 1/(M*W): uint64 [V], sum at most 2^62.

    `counts` is uint32 [V], or uint32 [n] beside ascending `ids` int32 [n] (q = 0 elsewhere). The caller has checked
    both sums (`check_weights`, `QRow.counts`). Raises `LocalMisuse` on lengths, a total or IDs that do not fit.
    """
    if not 1 <= total <= MAX_TOTAL:
        raise LocalMisuse(f"the target's total weight {total} is outside 1..2^38; scale its weights")
    target = weights * np.uint64(MASS)
    if ids is None:
        if len(counts) != len(weights):
            raise LocalMisuse(f"q has {len(counts)} entries and the target {len(weights)}")
        proposed = np.multiply(counts, np.uint64(total), dtype=np.uint64)
        np.minimum(proposed, target, out=proposed)
        target -= proposed
        return target
    if len(counts) != len(ids):
        raise LocalMisuse(f"a sparse q has {len(ids)} IDs and {len(counts)} counts")
    if len(ids) and (bool((ids[1:] <= ids[:-1]).any()) or int(ids[0]) < 0 or int(ids[-1]) >= len(weights)):
        raise LocalMisuse(f"the IDs of a sparse q must ascend strictly within 0..{len(weights) - 1}")
    target[ids] -= np.minimum(counts.astype(np.uint64) * np.uint64(total), target[ids])
    return target


def pick(masses: NDArray[np.uint64], u64: int) -> int:
    """The index that `u64` chooses: the first whose cumulative mass exceeds floor(u64 * total / 2^64).

    `masses` is uint64 [n]. Each index gets an interval of noise within one unit of mass/total * 2^64; a zero mass gets
    none. Raises `LocalMisuse` without mass, or if the total does not fit 64 bits.
    """
    u64 = noise_in(u64)
    if masses.dtype != np.uint64:
        raise LocalMisuse(f"masses must be uint64, not {masses.dtype}")
    cumulative = np.cumsum(masses)
    if bool((cumulative[1:] < cumulative[:-1]).any()):  # a sum that wraps steps down at least once
        raise LocalMisuse("masses sum to 2^64 or more")
    total = int(cumulative[-1]) if len(cumulative) else 0
    if total == 0:
        raise LocalMisuse("nothing to pick from: no mass")
    threshold = (u64 * total) >> _NOISE_BITS
    return int(np.searchsorted(cumulative, np.uint64(threshold), side="right"))


def correct(masses: NDArray[np.uint64], weights: NDArray[np.uint64], u64: int) -> tuple[int, bool]:
    """The correction drawn from residual `masses`, and True; if they hold no mass, a draw from p, and False."""
    if masses.any():
        return pick(masses, u64), True
    return pick(weights, u64), False


def target_only(
    weights: NDArray[np.uint64], seed: int, generation: int, round: int, position: int, *, draw: Draw | None = None
) -> int:
    """One token from p = `weights` (uint64 [V]) at the absolute `position`, from the CORRECTION domain."""
    check_weights(weights, int(weights.sum()))
    return pick(weights, (draw or draw64)(seed, Domain.CORRECTION, generation, round, position))


def verify_chain(
    proposal_tokens: Sequence[int],
    qs: Sequence[QRow],
    target_weights_at: Callable[[int], TargetRow],
    seed: int,
    generation: int,
    round: int,
    first_position: int,
    *,
    draw: Draw | None = None,
) -> Verdict:
    """Verifies one proposal whole: accepted drafts, then the correction of the first rejection or the bonus.

    `qs[i]` is the q that `proposal_tokens[i]`, at absolute position `first_position + i`, was drawn from.
    `target_weights_at(i)` gives the target's row after the committed prefix and the first `i` proposed tokens; it is
    asked for i = 0, 1, ... only as far as the chain is accepted, and for i = depth if all of it is. Noise: the ACCEPT
    domain at each tested position, the CORRECTION domain at the position of the one token that the target adds.
    `draw` stands for `rng.draw64`. SPEC sections 5 and 6. Raises `LocalMisuse` for inputs that do not fit each other,
    `InvalidQ` for a q that is none.
    """
    noise_of = draw or draw64
    if not proposal_tokens or len(proposal_tokens) != len(qs):
        raise LocalMisuse(f"{len(proposal_tokens)} tokens with {len(qs)} rows of q; with none at all use target_only")
    for index, (token, q) in enumerate(zip(proposal_tokens, qs, strict=True)):
        weights, total = target_weights_at(index)
        check_weights(weights, total)
        check_fit(token, q, len(weights))
        count = q.count_of(token)
        if count == 0:
            raise InvalidQ(Reason.ZERO_Q_TOKEN, f"token {token} at index {index}")
        position = first_position + index
        if accept(noise_of(seed, Domain.ACCEPT, generation, round, position), count, int(weights[token]), total):
            continue
        masses = residual(weights, total, q.counts(), q.ids)
        noise = noise_of(seed, Domain.CORRECTION, generation, round, position)
        correction, from_residual = correct(masses, weights, noise)
        return Verdict(index, [*proposal_tokens[:index], correction], no_residual=int(not from_residual))
    depth = len(proposal_tokens)
    weights, total = target_weights_at(depth)
    check_weights(weights, total)
    bonus = pick(weights, noise_of(seed, Domain.CORRECTION, generation, round, first_position + depth))
    return Verdict(depth, [*proposal_tokens, bonus])


def noise_in(u64: int) -> int:
    """Noise as a plain integer: NumPy's would wrap in a product. Raises `LocalMisuse` for any other (a uniform float's bits are
    none) or one outside 0..2^64-1."""
    try:
        plain = operator.index(u64)
    except TypeError:
        raise LocalMisuse(f"noise must be a 64-bit integer, not {u64!r}") from None
    if not 0 <= plain < _NOISE_END:
        raise LocalMisuse(f"noise must be a 64-bit integer, not {plain}")
    return plain


def check_fit(token: int, q: QRow, vocabulary: int) -> None:
    """Raises `LocalMisuse` unless `token` and a dense q's length fit `vocabulary`, a sparse q's values its IDs."""
    if not 0 <= token < vocabulary:
        raise LocalMisuse(f"token {token} is outside the target's vocabulary of {vocabulary}")
    if q.ids is None and len(q.values) != vocabulary:
        raise LocalMisuse(f"q has {len(q.values)} entries and the target {vocabulary}")
    if q.ids is not None and len(q.values) != len(q.ids):
        raise LocalMisuse(f"a sparse q has {len(q.ids)} IDs and {len(q.values)} values")
