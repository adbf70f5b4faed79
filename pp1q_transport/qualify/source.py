"""The rows that the benchmark sends, made from its seed by the real allocation, and the tokens drawn from them.

Between the plan and the leader, which only digests and frames them when a STEP comes; the receiver makes the same rows, one
at a time, to know what must have arrived. Opens nothing, sends nothing. SPEC sections 3 and 5.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from .. import dyadic
from .._native import kernels
from ..rng import Domain
from .plan import PROMPT, Plan, first_row, stage_requests, stages, transport_stage

ALIGN: Final = 64
_PROPOSAL: Final = int(Domain.PROPOSAL)


@dataclass(frozen=True, slots=True)
class Row:
    """One row as it travels: `payload` uint8 [n]; `cumulative` uint32 [entries]; `ids` int32 [entries] if it is sparse."""

    payload: npt.NDArray[np.uint8]
    cumulative: npt.NDArray[np.uint32]
    ids: npt.NDArray[np.int32] | None

    @property
    def entries(self) -> int:
        """How many values it holds."""
        return len(self.cumulative)


def make_row(plan: Plan, index: int) -> Row:
    """Source row `index` (0 .. slots x depth - 1): skewed random weights, allocated as SPEC section 3 says."""
    weights = np.random.default_rng([plan.seed, index]).random(plan.vocab)
    weights *= weights
    weights *= weights
    if plan.sparse:
        ids, counts = dyadic.allocate_top_k(weights, plan.support)
        payload = np.concatenate((dyadic.to_q(counts).view(np.uint8), ids.view(np.uint8)))
        return Row(payload, np.cumsum(counts, dtype=np.uint32), ids)
    counts = dyadic.allocate(weights)
    payload = np.zeros(plan.row_bytes, np.uint8)
    payload[: 4 * plan.vocab] = dyadic.to_q(counts).view(np.uint8)
    return Row(payload, np.cumsum(counts, dtype=np.uint32), None)


def row_digests(plan: Plan) -> list[tuple[int, int]]:
    """(length in bytes, XXH3-64) of every source row, holding one row at a time."""
    digests = []
    for index in range(plan.slots * plan.depth):
        payload = make_row(plan, index).payload
        digests.append((len(payload), kernels.xxh3_64(payload, 0, len(payload), 0)))
    return digests


class Source:
    """All source rows in one piece of memory, and every token of the run.

    `memory` uint8 with row r at `offsets[r]`, of `lengths[r]` bytes and `entries[r]` values (int64 each). The request of local
    number n has the index `indexes[n]` in its stage (-1: there is no such request) and its tokens, `depth` int32 a round, at
    `tokens[starts[n]:starts[n + 1]]`. They are drawn for request generation 0: `draw_all` gives those of a later one.
    """

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        made = [make_row(plan, index) for index in range(plan.slots * plan.depth)]
        stride = (plan.row_bytes + ALIGN - 1) // ALIGN * ALIGN
        self.entries = memoryview(array("q", [row.entries for row in made]))
        self.lengths = memoryview(array("q", [len(row.payload) for row in made]))
        self.offsets = memoryview(array("q", [index * stride for index in range(len(made))]))
        memory = np.zeros(len(made) * stride, np.uint8)
        for offset, row in zip(self.offsets, made, strict=True):
            memory[offset : offset + len(row.payload)] = row.payload
        self.memory = memoryview(memory.data)
        self._ids = [row.ids for row in made]
        tokens, starts, indexes = array("i"), array("q"), array("q")
        for stage in filter(transport_stage, stages(plan)):
            for index, number, seed, rounds in stage_requests(plan, stage):
                gap = number - len(indexes)
                indexes.extend([-1] * gap + [index])
                starts.extend([len(tokens)] * (gap + 1))
                tokens.frombytes(self._predraw(made, index, seed, rounds).tobytes())
        starts.append(len(tokens))
        self.tokens, self.starts, self.indexes = memoryview(tokens), memoryview(starts), memoryview(indexes)

    def _predraw(self, made: list[Row], index: int, seed: int, rounds: int) -> npt.NDArray[np.int32]:
        """int32 [rounds, depth]: the tokens of one request, whose anchor moves on by depth + 1 a round."""
        depth, draw_u24 = self.plan.depth, kernels.draw_u24
        first = len(PROMPT)
        draws = np.fromiter(
            (
                draw_u24(seed, _PROPOSAL, 0, round_, first + round_ * (depth + 1) + row)
                for round_ in range(rounds)
                for row in range(depth)
            ),
            np.uint32,
            rounds * depth,
        ).reshape(rounds, depth)
        tokens = np.zeros((rounds, depth), np.int32)
        groups = self.plan.slots
        for start in range(min(groups, rounds)):
            at = first_row(self.plan, index, start)
            for row in range(depth):
                source = made[at + row]
                drawn = np.searchsorted(source.cumulative, draws[start::groups, row], side="right")
                tokens[start::groups, row] = drawn if source.ids is None else source.ids[drawn]
        return tokens

    def draw_all(self, row: int, seed: int, generation: int, round_: int, first: int) -> memoryview[int]:
        """int32 [depth]: the tokens of positions `first` on, whose rows are `row` on, drawn now."""
        drawn = array("i")
        for here in range(row, row + self.plan.depth):
            u24 = kernels.draw_u24(seed, _PROPOSAL, generation, round_, first + here - row)
            at = kernels.draw_q(self.memory, self.offsets[here], self.entries[here], u24)
            ids = self._ids[here]
            drawn.append(at if ids is None else int(ids[at]))
        return memoryview(drawn)
