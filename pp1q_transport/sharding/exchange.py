"""What ranks send each other, as data: the collectives that sharded mathematics needs, and an emulator of all ranks.

Between the generators of `build` and `verifying`, which say what their rank contributes, and whoever moves bytes. Maxima are of
FP64 and sums of integers only, so that the order in which a collective combines ranks cannot matter. Moves no bytes between
processes.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import lru_cache
from itertools import pairwise
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from .._native import kernels
from ..errors import LocalMisuse

BLOCK: Final = 32
ENTRY: Final = np.dtype([("value", "<f8"), ("token", "<i4")])
"""A logit or weight and its global ID, 12 bytes packed."""
T = TypeVar("T")
Array: TypeAlias = NDArray[Any]


class Op(str, Enum):
    """What is done with the arrays of all ranks. Every rank gets the same answer."""

    MAX = "max"  # element by element, float64
    SUM = "sum"  # element by element, int64 or uint64
    GATHER = "gather"  # all arrays in the order of ranks; their lengths may differ


class Exchange(NamedTuple):
    """One rank's part in one collective: `value` is one-dimensional; `what` names the step, the same on every rank.

    `value` is the rank's own until it is resumed, and may be overwritten after that: whoever needs it longer copies it.
    """

    op: Op
    what: str
    value: Array


Steps: TypeAlias = Generator[Exchange, list[Array], T]
"""A rank's side of a computation: resume it with the collective's answer, a list of one array (MAX, SUM) or one a rank
(GATHER)."""


@dataclass(frozen=True, slots=True)
class Shard:
    """One rank's range [first_id, end_id) of a vocabulary whose shards begin at `edges[:-1]`; `edges[-1]` is its size."""

    rank: int
    edges: tuple[int, ...]

    @property
    def first_id(self) -> int:
        """The first global ID of the range."""
        return self.edges[self.rank]

    @property
    def end_id(self) -> int:
        """One behind the last global ID of the range."""
        return self.edges[self.rank + 1]

    @property
    def size(self) -> int:
        """How many tokens the range has; it may be 0."""
        return self.end_id - self.first_id

    def holds(self, token: int) -> bool:
        """Whether a global ID is in the range."""
        return self.first_id <= token < self.end_id


def shards_of(edges: Sequence[int]) -> tuple[Shard, ...]:
    """The shards between `edges`, which start at 0, never fall, and lie on multiples of 32 except the last, the vocabulary's
    size.

    Raises `LocalMisuse` for edges that would cut a block of the fixed summation tree, or make no shard.
    """
    given = tuple(int(edge) for edge in edges)
    if len(given) < 2 or given[0] != 0 or given[-1] < 1 or any(low > high for low, high in pairwise(given)):
        raise LocalMisuse(f"shards must tile a vocabulary from 0: {given}")
    if any(edge % BLOCK and edge != given[-1] for edge in given):
        raise LocalMisuse(f"edges between shards must be multiples of {BLOCK}: {given}")
    return all_shards(given)


def all_max(what: str, value: float) -> Steps[float]:
    """The largest value of all ranks; a NaN must not get here (collectives differ on what a maximum with NaN is)."""
    (answer,) = yield Exchange(Op.MAX, what, np.array([value], np.float64))
    return float(answer[0])


def all_sum(what: str, values: Array) -> Steps[Array]:
    """Sums of int64 or uint64 arrays of one length, element by element."""
    (answer,) = yield Exchange(Op.SUM, what, values)
    return answer


def all_gather(what: str, values: Array) -> Steps[list[Array]]:
    """The arrays of all ranks, in the order of ranks."""
    return (yield Exchange(Op.GATHER, what, values))


# -- the fixed summation tree across ranks -----------------------------------------------------------------------------


def node_values(shard: Shard, sums: NDArray[np.float64], before: Sequence[float] = ()) -> NDArray[np.float64]:
    """Sums of the fewest whole nodes of the tree that make up the shard's blocks, from the sums of those, behind `before`: at
    most two a level, so a few dozen in all whatever the size of the shard."""
    edges = block_edges(shard.edges)
    values = np.empty(len(before) + 128)
    values[: len(before)] = before
    found = kernels.tree_nodes(sums, int(edges[shard.rank]), int(edges[-1]), values[len(before) :])
    return values[: len(before) + found]


def root(edges: tuple[int, ...], values: Sequence[NDArray[np.float64]]) -> float:
    """The sum over all shards, added in the order of the tree: the very bits that one process gets."""
    return kernels.tree_root(block_edges(edges), np.concatenate(values))


@lru_cache(maxsize=64)
def block_edges(edges: tuple[int, ...]) -> NDArray[np.uint32]:
    """Where the shards begin, in blocks of the tree, and how many blocks there are."""
    found = np.array([-(-edge // BLOCK) for edge in edges], np.uint32)
    found.flags.writeable = False
    return found


@lru_cache(maxsize=64)
def all_shards(edges: tuple[int, ...]) -> tuple[Shard, ...]:
    """The shards of all ranks."""
    return tuple(Shard(rank, edges) for rank in range(len(edges) - 1))


# -- all ranks in one process ------------------------------------------------------------------------------------------


@dataclass
class Traffic:
    """What was exchanged: the steps in order, as (op, what), and the bytes each rank sent."""

    steps: list[tuple[Op, str]] = field(default_factory=list)
    sent_bytes: list[int] = field(default_factory=list)


def combine(parts: Sequence[Exchange]) -> list[Array]:
    """The answer to one collective. Raises `LocalMisuse` when ranks are not at the same step, or their arrays do not fit."""
    op, what, first = parts[0]
    values = [first]
    same_length = True
    for other_op, other_what, value in parts[1:]:
        if other_op is not op or other_what != what:
            raise LocalMisuse(f"ranks are at different steps: {sorted({part.what for part in parts})}")
        if value.dtype != first.dtype or value.ndim != 1:
            raise LocalMisuse(f"{what}: arrays of different kinds")
        same_length = same_length and len(value) == len(first)
        values.append(value)
    if first.ndim != 1:
        raise LocalMisuse(f"{what}: arrays of different kinds")
    if op is Op.GATHER:
        return [value.copy() for value in values]
    kinds = (np.float64,) if op is Op.MAX else (np.int64, np.uint64)
    if first.dtype not in kinds or not same_length:
        raise LocalMisuse(f"{what}: {op.value} of {first.dtype} arrays that differ or may depend on order")
    combined = first.copy()
    for value in values[1:]:
        (np.maximum if op is Op.MAX else np.add)(combined, value, out=combined)
    return [combined]


def emulate(ranks: Sequence[Steps[T]], traffic: Traffic | None = None) -> list[T]:
    """Runs the generators of all ranks in lock-step, in the order of ranks; returns what each of them returned.

    An error is raised once every rank has raised the same one: ranks that do not end alike raise `LocalMisuse`.
    """
    answers: list[list[Array] | None] = [None] * len(ranks)
    while True:
        parts: list[Exchange] = []
        results: list[T] = []
        errors: list[Exception] = []
        for steps, answer in zip(ranks, answers, strict=True):
            try:
                parts.append(next(steps) if answer is None else steps.send([part.copy() for part in answer]))
            except StopIteration as stop:
                results.append(stop.value)
            except (LocalMisuse, ValueError) as error:
                errors.append(error)
        if len(errors) == len(ranks) and len({(type(error), str(error)) for error in errors}) == 1:
            raise errors[0]
        if len(results) == len(ranks):
            return results
        if len(parts) != len(ranks):
            raise LocalMisuse(f"ranks ended differently: {len(results)} returned, {errors or 'none'} raised, {len(parts)} go on")
        if traffic is not None:
            traffic.steps.append((parts[0].op, parts[0].what))
            traffic.sent_bytes = [
                before + part.value.nbytes for before, part in zip(traffic.sent_bytes or [0] * len(parts), parts, strict=True)
            ]
        answer_to_all = combine(parts)
        answers = [answer_to_all] * len(ranks)
