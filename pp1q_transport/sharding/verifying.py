"""Verification over a sharded vocabulary: every rank ends with the verdict that one process would have reached.

Between a rank's own target weights and its own part of q (dense range, or the entries of a sparse row that fall in it) and
tokens to commit. The target's weights become the integers of `verify.fast` under one global exponent; after that only integers
are exchanged. What a rank sends is written by native code into arrays that a `ShardTarget` keeps: here is only the order of
steps. Noise is rank 0's alone and travels with what is exchanged anyway. SPEC section 6; `verify.fast` is the unsharded twin.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Final, NoReturn

import numpy as np

from .._native import kernels
from ..dyadic import MASS
from ..errors import InvalidQ, LocalMisuse, Reason
from ..greedy import Winner, merge, shard_winner
from ..rng import Domain, draw64
from ..verify import QRow, Verdict
from ..verify.fast import Weights
from .exchange import ENTRY, Exchange, Op, Shard, Steps, all_gather

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from ..verify import Draw

NOISE_OWNER: Final = 0
NO_NODES: Final = Exchange(Op.GATHER, "tree nodes", np.empty(0))
"""What a rank sends whose weights are none: every rank refuses the row then."""


class ShardTarget:
    """One rank's part of a target's row, and the messages of its steps. Keep one for each row that is verified at a time, and use
    it again for the next: the arrays that it sends are overwritten by the next step, so an answer may not be the array itself."""

    __slots__ = ("facts", "nodes", "residual", "row", "shard", "told")

    def __init__(self, shard: Shard) -> None:
        self.shard = shard
        self.row = kernels.ShardedRow(shard.rank, shard.edges)
        nodes, told = np.zeros(self.row.most_nodes), np.zeros(1, np.int64)
        facts, residual = np.zeros(kernels.FACT_WORDS, np.uint64), np.zeros(kernels.RESIDUAL_WORDS, np.uint64)
        self.row.bind(nodes, facts, residual, told)
        self.nodes = Exchange(Op.GATHER, "tree nodes", nodes)
        self.facts = Exchange(Op.GATHER, "masses, noise and the drafted token", facts)
        self.residual = Exchange(Op.GATHER, "noise and residual masses", residual)
        self.told = Exchange(Op.SUM, "token", told)

    @property
    def masses(self) -> tuple[int, ...]:
        """The sums of integer weights of every shard, in order."""
        return self.row.shard_masses()

    @property
    def total(self) -> int:
        """W: the exact sum of the integer weights of all shards."""
        return self.row.all_total


def target_sharded(shard: Shard, weights: Weights, into: ShardTarget | None = None) -> Steps[ShardTarget]:
    """Contiguous float32 or float64 weights [shard.size] to integers, under the exponent that the whole row has. Two GATHERs.

    `into` is a target of this shard to use again. Raises `LocalMisuse` on every rank alike for what `FastTarget` refuses.
    """
    if not isinstance(weights, np.ndarray) or weights.dtype not in (np.float32, np.float64):
        raise LocalMisuse(f"target weights must be float32 or float64, not {getattr(weights, 'dtype', type(weights).__name__)}")
    target = into or ShardTarget(shard)
    row = target.row
    try:
        code = row.fix_by((yield (NO_NODES if row.begin(weights) else target.nodes)))
        if not code:
            row.put_facts(-1, None, None, 0 if shard.rank == NOISE_OWNER else None)
            row.settle((yield target.facts))
    except ValueError as error:
        raise LocalMisuse(str(error)) from None
    if code:
        _refuse_weights()
    return target


def verify_row_sharded(target: ShardTarget, weights: Weights, token: int, q: QRow, u64: int | None) -> Steps[bool]:
    """`target_sharded` into `target` and `accept_sharded` in one: still two GATHERs."""
    row = target.row
    try:
        code = row.fix_by((yield (NO_NODES if row.begin(weights) else target.nodes)))
        if not code:
            row.put_facts(token, q.values, q.ids, u64)
            verdict = row.verdict((yield target.facts))
    except ValueError as error:
        raise LocalMisuse(str(error)) from None
    if code:
        _refuse_weights()
    return _accepted(verdict, token)


def accept_sharded(target: ShardTarget, token: int, q: QRow, u64: int | None) -> Steps[bool]:
    """Whether `token` (a global ID) survives. `q` is this rank's part (IDs global); `u64` is None but on rank 0. One GATHER."""
    try:
        target.row.put_facts(token, q.values, q.ids, u64)
        verdict = target.row.verdict((yield target.facts))
    except ValueError as error:
        raise LocalMisuse(str(error)) from None
    return _accepted(verdict, token)


def _refuse_weights() -> NoReturn:
    raise LocalMisuse("target weights must be finite, not negative, and have a mass")


def _accepted(verdict: int, token: int) -> bool:
    if verdict < 0:
        raise InvalidQ(Reason.from_code(-verdict), f"token {token}")
    return verdict == 1


def pick_sharded(target: ShardTarget, u64: int | None) -> Steps[int]:
    """A token from p: the shard by its exact mass, then the token inside it. One GATHER, one SUM."""
    try:
        target.row.put_facts(-1, None, None, u64)
        target.row.choose((yield target.facts))
        return target.row.token_told((yield target.told))
    except ValueError as error:
        raise LocalMisuse(str(error)) from None


def bonus_sharded(target: ShardTarget, weights: Weights, u64: int | None) -> Steps[int]:
    """`target_sharded` into `target` and `pick_sharded` in one. Two GATHERs, one SUM."""
    row = target.row
    try:
        code = row.fix_by((yield (NO_NODES if row.begin(weights) else target.nodes)))
        if not code:
            row.put_facts(-1, None, None, u64)
            row.choose((yield target.facts))
            return row.token_told((yield target.told))
    except ValueError as error:
        raise LocalMisuse(str(error)) from None
    _refuse_weights()


def correct_sharded(target: ShardTarget, q: QRow, u64: int | None) -> Steps[tuple[int, bool]]:
    """The correction from max(p - q, 0) over all shards, and True; a token of p and False if there is no residual.

    One GATHER of masses, one SUM of the token. Raises `InvalidQ` on every rank alike for a q that is none.
    """
    row = target.row
    try:
        row.put_residual(q.values, q.ids, u64)
        code = row.choose_residual((yield target.residual))
        if not code:
            return row.token_told((yield target.told)), True
    except ValueError as error:
        raise LocalMisuse(str(error)) from None
    if code == kernels.NO_RESIDUAL:  # exact integers never come here; p is what the rational path gives
        return (yield from pick_sharded(target, u64)), False
    if code == kernels.WRONG_MASS:
        raise InvalidQ(Reason.MASS, f"counts sum to {row.all_counts}, not {MASS}")
    raise InvalidQ(Reason.from_code(code), "q at the rejected position")


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
    into: ShardTarget | None = None,
) -> Steps[Verdict]:
    """`verify_chain_fast` over shards: `qs[i]` and `target_weights_at(i)` are this rank's parts, everything else is global.

    Only rank 0 draws (its `draw` may be a guard's); the others never ask for noise. Two GATHERs a kept draft; two more exchanges
    for a correction, three for the bonus. `into` is a target of this shard to use again.
    """
    if not proposal_tokens or len(proposal_tokens) != len(qs):
        raise LocalMisuse(f"{len(proposal_tokens)} tokens with {len(qs)} rows of q")

    def noise_of(domain: Domain, position: int) -> int | None:
        return (draw or draw64)(seed, domain, generation, round, position) if shard.rank == NOISE_OWNER else None

    target = into or ShardTarget(shard)
    for index, (token, q) in enumerate(zip(proposal_tokens, qs, strict=True)):
        position = first_position + index
        if (yield from verify_row_sharded(target, target_weights_at(index), token, q, noise_of(Domain.ACCEPT, position))):
            continue
        correction, from_residual = yield from correct_sharded(target, q, noise_of(Domain.CORRECTION, position))
        return Verdict(index, [*proposal_tokens[:index], correction], no_residual=int(not from_residual))
    depth = len(proposal_tokens)
    noise = noise_of(Domain.CORRECTION, first_position + depth)
    return Verdict(depth, [*proposal_tokens, (yield from bonus_sharded(target, target_weights_at(depth), noise))])


def greedy_tokens_sharded(
    shard: Shard, logits: NDArray[np.float16] | NDArray[np.float32] | NDArray[np.float64]
) -> Steps[list[int]]:
    """The token of every row at temperature 0, from this rank's logits [rows, shard.size or more: padding is not looked at].

    One GATHER of (value, global ID) for all rows: the greedy lane's only exchange. `greedy.commit` takes it from there. Raises
    `InvalidQ(invalid_weights)` on every rank alike for a row that the full path refuses. SPEC section 7.
    """
    if not isinstance(logits, np.ndarray):
        raise LocalMisuse(f"logits must be a NumPy array, not {type(logits).__name__}")
    if logits.ndim != 2 or logits.shape[1] < shard.size:
        raise LocalMisuse(f"logits of shape {list(logits.shape)} do not fit [rows, {shard.size}]")
    own = [shard_winner(row, shard.first_id, shard.size) for row in logits]
    packed = np.array([(winner.value, winner.token) for winner in own], ENTRY)
    gathered = yield from all_gather("winners", packed)
    if any(len(part) != len(packed) for part in gathered):
        raise LocalMisuse("ranks have different numbers of rows")
    by_rank = [part.tolist() for part in gathered]
    return [merge([Winner(value, token) for value, token in row]) for row in zip(*by_rank, strict=True)]
