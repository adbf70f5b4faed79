"""q over a sharded vocabulary: weights, counts, top-k support and the draw, equal to those of one process bit for bit.

Between a rank's own logits or weights and its part of one global allocation of M = 2^24. Nothing is normalised within a shard,
and what is wrong at one rank is told to all before any raises. SPEC section 3; `dyadic` is the unsharded twin of every function
here.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.typing import NDArray

from .._native import kernels
from ..dyadic import MASS, allocate, draw, scores_of, to_q
from ..errors import InvalidQ, LocalMisuse, Reason
from .exchange import ENTRY, Shard, Steps, all_gather, all_max, all_shards, all_sum, node_values, root

_DIGITS: Final = range(56, -8, -8)


@dataclass(frozen=True, slots=True)
class ShardRow:
    """One rank's part of a global q: `counts` uint32 [shard.size], or [n] beside ascending global `ids` int32 [n].

    `masses` are the sums of counts of every shard, in order; together they are 2^24. A shard may have no mass, and then no token.
    """

    shard: Shard
    counts: NDArray[np.uint32]
    masses: tuple[int, ...]
    ids: NDArray[np.int32] | None = None

    @property
    def mass(self) -> int:
        """What this shard's counts sum to."""
        return self.masses[self.shard.rank]

    @property
    def mass_before(self) -> int:
        """What the shards before this one sum to."""
        return sum(self.masses[: self.shard.rank])

    def q(self) -> NDArray[np.float32]:
        """The FP32 values that are carried."""
        return to_q(self.counts)


def _refuse(detail: str) -> InvalidQ:
    return InvalidQ(Reason.INVALID_WEIGHTS, detail)


def _own(shard: Shard, values: npt.ArrayLike, name: str) -> NDArray[np.float64]:
    array = np.ascontiguousarray(values, dtype=np.float64)
    if array.shape != (shard.size,):
        raise LocalMisuse(f"{name} of shape {array.shape} do not fit a shard of {shard.size} tokens")
    return array


def weights_sharded(
    shard: Shard, logits: npt.ArrayLike, temperature: float = 1.0, bias: npt.ArrayLike | None = None
) -> Steps[NDArray[np.float64]]:
    """`dyadic.weights_from_logits` of this rank's logits [shard.size]: exp(scores - global maximum). One MAX; at temperature 0 a
    GATHER of the winners instead, ties to the lowest global ID. Raises as the unsharded one, on every rank alike."""
    scores = scores_of(logits, temperature, bias)
    if scores.shape != (shard.size,):
        raise LocalMisuse(f"logits of shape {scores.shape} do not fit a shard of {shard.size} tokens")
    highest = float(scores.max(initial=-np.inf))
    if np.isnan(highest):
        highest = np.inf  # refused alike, and safe in any maximum
    if temperature == 0:
        return (yield from _one_hot(shard, scores, highest))
    highest = yield from all_max("largest score", highest)
    if not np.isfinite(highest):
        raise _refuse(f"the largest logit is {highest}")
    with np.errstate(under="ignore"):
        return np.asarray(np.exp(scores - highest), dtype=np.float64)


def _one_hot(shard: Shard, scores: NDArray[np.float64], highest: float) -> Steps[NDArray[np.float64]]:
    winners = yield from all_gather("largest score of each shard", np.array([highest], np.float64))
    values = [float(winner[0]) for winner in winners]
    if not np.isfinite(max(values)):
        raise _refuse(f"the largest logit is {max(values)}")
    weights = np.zeros(shard.size)
    if values.index(max(values)) == shard.rank:  # the first shard that has it has the lowest ID
        weights[int(scores.argmax())] = 1.0
    return weights


def tree_total(
    shard: Shard, code: int, sums: NDArray[np.float64], largest: float
) -> Steps[tuple[float, list[NDArray[np.float64]]]]:
    """The tree's total over all shards, and what was gathered for it: each rank's `largest`, then its nodes. One GATHER.

    Raises `InvalidQ(invalid_weights)` if any rank's `code` says so: that rank sends nothing.
    """
    gathered = yield from all_gather("tree nodes", np.empty(0) if code else node_values(shard, sums, (largest,)))
    if not all(map(len, gathered)):
        raise _refuse("a weight is NaN, infinite or negative")
    return root(shard.edges, [part[1:] for part in gathered]), gathered


def allocate_sharded(shard: Shard, weights: npt.ArrayLike) -> Steps[ShardRow]:
    """`dyadic.allocate` of weights [V], of which this rank has [shard.size].

    Exchanged: tree nodes, sums of floors, up to eight histograms of 256 remainders, ties, masses: about 20 KB a rank and row
    whatever the vocabulary is. Raises `InvalidQ(invalid_weights)` as the unsharded one, on every rank alike.
    """
    own = _own(shard, weights, "weights")
    sums = np.empty((own.size + 31) // 32)
    code = kernels.block_sums(own, sums) if own.size else 0
    total, gathered = yield from tree_total(shard, code, sums, float(own.max(initial=0.0)) if not code else 0.0)
    largest = max(float(part[0]) for part in gathered)
    if total == 0.0 or np.isinf(total) or np.isinf(largest * MASS):
        raise _refuse("the weights have no mass, or overflow")
    scaled = own * float(MASS) / total
    floors = np.floor(scaled)
    remainders = scaled - floors
    counts = floors.astype(np.uint32)
    positive = own > 0
    known = yield from all_sum(
        "floors and positive weights", np.array([counts.sum(dtype=np.int64), np.count_nonzero(positive)], np.int64)
    )
    remaining = MASS - int(known[0])
    if not 0 <= remaining <= int(known[1]):
        raise _refuse(f"{remaining} tickets for {int(known[1])} positive weights")
    if remaining:
        yield from _hand_out(shard, counts, remainders.view(np.uint64), positive, remaining)
    masses = yield from _masses(int(counts.sum(dtype=np.uint64)))
    return ShardRow(shard, counts, masses)


def _hand_out(
    shard: Shard, counts: NDArray[np.uint32], keys: NDArray[np.uint64], positive: NDArray[np.bool_], remaining: int
) -> Steps[None]:
    """One ticket to each of the `remaining` largest remainders of all shards, ties to the lowest global ID. Keys are the bits of
    remainders, which order as they do."""
    held = keys[positive]
    prefix = 0
    wanted = remaining
    low = 0
    for shift in _DIGITS:
        digits = ((held >> np.uint64(shift)) & np.uint64(255)).astype(np.int64)
        histogram = yield from all_sum(f"remainders, bits {shift} up", np.bincount(digits, minlength=256).astype(np.int64))
        from_above = np.cumsum(histogram[::-1])
        digit = 255 - int(np.searchsorted(from_above, wanted))
        wanted -= int(from_above[255 - digit] - histogram[digit])
        prefix |= digit << shift
        held = held[digits == digit]
        low = shift
        if wanted == histogram[digit]:
            break  # all that is left gets one: what lies below need not be looked at
    threshold = np.uint64(prefix)
    if low:
        counts[positive & (keys >= threshold)] += 1
        return
    counts[positive & (keys > threshold)] += 1
    ties = np.flatnonzero(positive & (keys == threshold))
    gathered = yield from all_gather("ties", np.array([len(ties)], np.int64))
    before = sum(int(part[0]) for part in gathered[: shard.rank])
    counts[ties[: max(0, wanted - before)]] += 1


def _masses(own: int) -> Steps[tuple[int, ...]]:
    gathered = yield from all_gather("masses", np.array([own], np.uint64))
    masses = tuple(int(part[0]) for part in gathered)
    if sum(masses) != MASS:
        raise InvalidQ(Reason.MASS, f"shards sum to {sum(masses)}, not {MASS}")
    return masses


def allocate_top_k_sharded(shard: Shard, weights: npt.ArrayLike, k: int) -> Steps[ShardRow]:
    """`dyadic.allocate_top_k` of weights [V], of which this rank has [shard.size]: one GATHER of at most k candidates a rank.

    The k largest of all are among the k largest of each shard; ties go to the lowest global ID. Raises as the unsharded one.
    """
    if k < 1:
        raise LocalMisuse(f"k must be at least 1, not {k}")
    own = _own(shard, weights, "weights")
    ids = np.empty(max(min(k, own.size), 1), np.int32)
    found = kernels.top_k(own, min(k, max(own.size, 1)), ids) if own.size else 0
    ids = ids[: max(found, 0)]
    packed = np.empty(len(ids), ENTRY)
    packed["value"], packed["token"] = own[ids], ids + shard.first_id
    if found < 0:  # told to all, and refused by all
        packed = np.array([(np.nan, -1)], ENTRY)
    entries = np.concatenate((yield from all_gather("candidates of the support", packed)))
    if (entries["token"] < 0).any():
        raise _refuse("weights cannot be allocated")
    values, global_ids = entries["value"].copy(), entries["token"].copy()
    chosen = np.sort(np.lexsort((global_ids, -values))[:k])  # candidates come in ascending order of ID
    counts = allocate(values[chosen])
    support, counts = global_ids[chosen][counts != 0], counts[counts != 0]
    masses = []
    for other in all_shards(shard.edges):
        start, end = np.searchsorted(support, (other.first_id, other.end_id))
        masses.append(int(counts[start:end].sum(dtype=np.uint64)))
        if other.rank == shard.rank:
            mine = slice(int(start), int(end))
    return ShardRow(shard, counts[mine].copy(), tuple(masses), support[mine].copy())


def chosen_shard(masses: tuple[int, ...], threshold: int) -> tuple[int, int]:
    """The first shard whose cumulative mass exceeds `threshold`, and the mass before it: one without mass is never it."""
    for rank, end in enumerate(accumulate(masses)):
        if end > threshold:
            return rank, end - masses[rank]
    raise LocalMisuse(f"threshold {threshold} is beyond the mass of all shards")


def told_by(shard: Shard, rank: int, token: int) -> Steps[int]:
    """The global ID that `rank` alone knows: a SUM to which the others add nothing."""
    told = yield from all_sum("token", np.array([token if shard.rank == rank else 0], np.int64))
    return int(told[0])


def draw_sharded(row: ShardRow, u24: int) -> Steps[int]:
    """The token that `dyadic.draw` yields for `u24` (0..2^24-1): the shard by its exact mass, then the token inside it."""
    if not 0 <= u24 < MASS:
        raise LocalMisuse(f"u24 must be within 0..2^24-1, not {u24}")
    rank, before = chosen_shard(row.masses, u24)
    token = 0
    if rank == row.shard.rank:
        index = draw(row.counts, u24 - before)
        token = int(row.ids[index]) if row.ids is not None else row.shard.first_id + index
    return (yield from told_by(row.shard, rank, token))
