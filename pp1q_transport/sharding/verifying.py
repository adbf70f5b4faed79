"""Verification over a sharded vocabulary: every rank ends with the verdict that one process would have reached.

Between a rank's own target weights and its own part of q (dense range, or the entries of a sparse row that fall in it) and
tokens to commit. The target's weights become the integers of `verify.fast` under one global exponent; after that only integers
are exchanged. Noise is rank 0's alone and travels with what is exchanged anyway. SPEC section 6; `verify.fast` is the unsharded
twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .._native import kernels
from ..dyadic import MASS
from ..errors import InvalidQ, LocalMisuse, Reason
from ..greedy import Winner, merge, shard_winner
from ..rng import Domain, draw64
from ..verify import QRow, Verdict
from ..verify.fast import Weights, bytes_of
from .build import chosen_shard, told_by, tree_total
from .exchange import ENTRY, Shard, Steps, all_gather, all_sum

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..verify import Draw

NOISE_OWNER: Final = 0
_U64: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class ShardTarget:
    """One rank's part of a target's row as integers; `masses` are the sums of every shard, in order."""

    shard: Shard
    row: kernels.TargetRow
    masses: tuple[int, ...]

    @property
    def total(self) -> int:
        """W: the exact sum of the integer weights of all shards."""
        return sum(self.masses)


def target_sharded(shard: Shard, weights: Weights) -> Steps[ShardTarget]:
    """Float32 or float64 weights [shard.size] to integers, under the exponent that the whole row has. Two GATHERs.

    Raises `LocalMisuse` on every rank alike for what `FastTarget` refuses.
    """
    raw = bytes_of(weights, (np.float32, np.float64), "target weights")
    if len(weights) != shard.size:
        raise LocalMisuse(f"{len(weights)} weights do not fit a shard of {shard.size} tokens")
    row = kernels.TargetRow()
    row.load(raw, 0, shard.size, weights.dtype == np.float64)
    sums = np.empty((shard.size + 31) // 32)
    code = row.block_sums(sums) if shard.size else 0
    try:
        total, _ = yield from tree_total(shard, code, sums, 0.0)
        row.fix_to(kernels.target_exponent(total))
    except ValueError:  # InvalidQ is one; every rank comes here, for all of them judged the same numbers
        raise LocalMisuse("target weights must be finite, not negative, and have a mass") from None
    gathered = yield from all_gather("target masses", np.array([row.total], np.uint64))
    return ShardTarget(shard, row, tuple(int(part[0]) for part in gathered))


def _noise(shard: Shard, u64: int | None) -> int:
    if (u64 is None) != (shard.rank != NOISE_OWNER) or not 0 <= (u64 or 0) <= _U64:
        raise LocalMisuse(f"noise is rank {NOISE_OWNER}'s alone: rank {shard.rank} has {u64}")
    return u64 or 0


def accept_sharded(target: ShardTarget, token: int, q: QRow, u64: int | None) -> Steps[bool]:
    """Whether `token` (a global ID) survives. `q` is this rank's part (IDs global); `u64` is None but on rank 0. One SUM."""
    shard = target.shard
    if not 0 <= token < shard.edges[-1]:
        raise LocalMisuse(f"token {token} is outside the target's vocabulary of {shard.edges[-1]}")
    facts = np.array([_noise(shard, u64), 0, 0, 0], np.uint64)
    if shard.holds(token):
        try:
            count, code = q.count_of(token if q.ids is not None else token - shard.first_id), 0
        except InvalidQ as error:  # told to all, and raised by all
            count, code = 0, error.reason.code
        facts[1:] = target.row.weight(token - shard.first_id), count, code
    noise, weight, count, code = (yield from all_sum("noise, weight and count", facts)).tolist()
    if count == 0:
        raise InvalidQ(Reason.from_code(code) if code else Reason.ZERO_Q_TOKEN, f"token {token}")
    return kernels.accept(noise, count, weight, target.total)


def pick_sharded(target: ShardTarget, u64: int | None) -> Steps[int]:
    """A token from p, the bonus: the shard by its exact mass, then the token inside it. Two SUMs."""
    noise = yield from all_sum("noise", np.array([_noise(target.shard, u64)], np.uint64))
    threshold = (int(noise[0]) * target.total) >> 64
    rank, before = chosen_shard(target.masses, threshold)
    token = target.shard.first_id + target.row.pick(threshold - before) if rank == target.shard.rank else 0
    return (yield from told_by(target.shard, rank, token))


def _residual(target: ShardTarget, q: QRow) -> int:
    """This rank's residual against its part of q; the reason's code."""
    values = bytes_of(q.values, (np.float32,), "q")
    if q.ids is None:
        if len(q.values) != target.shard.size:
            raise LocalMisuse(f"q has {len(q.values)} entries and the shard {target.shard.size}")
        if target.shard.size == 0:
            return target.row.residual_sparse(values, 0, values, 0, 0, target.total)
        return target.row.residual_dense(values, 0, target.total)
    bytes_of(q.ids, (np.int32,), "the IDs of q")
    own = np.ascontiguousarray(q.ids - np.int32(target.shard.first_id))
    return target.row.residual_sparse(values, 0, own.view(np.uint8), 0, len(own), target.total)


def correct_sharded(target: ShardTarget, q: QRow, u64: int | None) -> Steps[tuple[int, bool]]:
    """The correction from max(p - q, 0) over all shards, and True; a token of p and False if there is no residual.

    One GATHER of masses, one SUM of the token. Raises `InvalidQ` on every rank alike for a q that is none.
    """
    code = _residual(target, q)
    mass = target.row.residual_mass()
    own = np.array([_noise(target.shard, u64), code, target.row.counts, mass >> 64, mass & _U64], np.uint64)
    gathered = yield from all_gather("noise and residual masses", own)
    rows = [part.tolist() for part in gathered]
    for row in rows:
        if row[1]:
            raise InvalidQ(Reason.from_code(row[1]), "q at the rejected position")
    counts = sum(row[2] for row in rows)
    if counts != MASS:
        raise InvalidQ(Reason.MASS, f"counts sum to {counts}, not {MASS}")
    masses = tuple((row[3] << 64) | row[4] for row in rows)
    noise = rows[NOISE_OWNER][0]
    if not sum(masses):  # exact integers never do; p is what the rational path gives
        return (yield from pick_sharded(target, u64)), False
    threshold = (noise * sum(masses)) >> 64
    rank, before = chosen_shard(masses, threshold)
    token = 0
    if rank == target.shard.rank:
        inside = threshold - before
        token = target.shard.first_id + target.row.pick_residual(inside >> 64, inside & _U64)
    return (yield from told_by(target.shard, rank, token)), True


def verify_chain_sharded(
    shard: Shard,
    proposal_tokens: Sequence[int],
    qs: Sequence[QRow],
    target_weights_at: Callable[[int], Weights],
    seed: int,
    generation: int,
    round: int,
    first_position: int,
    *,
    draw: Draw | None = None,
) -> Steps[Verdict]:
    """`verify_chain_fast` over shards: `qs[i]` and `target_weights_at(i)` are this rank's parts, everything else is global.

    Only rank 0 draws (its `draw` may be a guard's); the others never ask for noise.
    """
    if not proposal_tokens or len(proposal_tokens) != len(qs):
        raise LocalMisuse(f"{len(proposal_tokens)} tokens with {len(qs)} rows of q")

    def noise_of(domain: Domain, position: int) -> int | None:
        return (draw or draw64)(seed, domain, generation, round, position) if shard.rank == NOISE_OWNER else None

    for index, (token, q) in enumerate(zip(proposal_tokens, qs, strict=True)):
        target = yield from target_sharded(shard, target_weights_at(index))
        position = first_position + index
        if (yield from accept_sharded(target, token, q, noise_of(Domain.ACCEPT, position))):
            continue
        correction, from_residual = yield from correct_sharded(target, q, noise_of(Domain.CORRECTION, position))
        return Verdict(index, [*proposal_tokens[:index], correction], no_residual=int(not from_residual))
    depth = len(proposal_tokens)
    target = yield from target_sharded(shard, target_weights_at(depth))
    bonus = yield from pick_sharded(target, noise_of(Domain.CORRECTION, first_position + depth))
    return Verdict(depth, [*proposal_tokens, bonus])


def greedy_tokens_sharded(
    shard: Shard, logits: NDArray[np.float16] | NDArray[np.float32] | NDArray[np.float64]
) -> Steps[list[int]]:
    """The token of every row at temperature 0, from this rank's logits [rows, shard.size or more: padding is not looked at].

    One GATHER of (value, global ID) for all rows: the greedy lane's only exchange. `greedy.commit` takes it from there. Raises
    `InvalidQ(invalid_weights)` on every rank alike for a row that the full path refuses. SPEC section 7.
    """
    if logits.ndim != 2 or logits.shape[1] < shard.size:
        raise LocalMisuse(f"logits of shape {list(logits.shape)} do not fit [rows, {shard.size}]")
    own = [shard_winner(row, shard.first_id, shard.size) for row in logits]
    packed = np.array([(winner.value, winner.token) for winner in own], ENTRY)
    gathered = yield from all_gather("winners", packed)
    if any(len(part) != len(packed) for part in gathered):
        raise LocalMisuse("ranks have different numbers of rows")
    by_rank = [part.tolist() for part in gathered]
    return [merge([Winner(value, token) for value, token in row]) for row in zip(*by_rank, strict=True)]
