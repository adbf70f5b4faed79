"""The whole speculative loop in one process: what a transported run must commit, token for token.

Between the toy models and the verifier, with nothing in between them: no frames, slots, clocks or daemons. It is the
oracle of the demo and of the tests: same seeds, same tokens. SPEC sections 3, 5 and 6.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from enum import Enum
from typing import Final, Protocol

import numpy as np
from numpy.typing import NDArray

from ..dyadic import allocate, allocate_top_k, draw, draw_sparse, to_q
from ..errors import LocalMisuse
from ..rng import Domain, draw24
from ..verify import QRow, TargetRow, Verdict, target_only, verify_chain
from .models import ToyModels

DEFAULT_PROMPT: Final = (1, 2)
DEFAULT_SUPPORT: Final = 32


class Mode(str, Enum):
    """The representation of q."""

    DENSE = "dense"
    SPARSE = "sparse"


class Verifier(Protocol):
    """Anything with the arguments of `verify.verify_chain`; tests put wrong ones here."""

    def __call__(
        self,
        proposal_tokens: Sequence[int],
        qs: Sequence[QRow],
        target_weights_at: Callable[[int], TargetRow],
        seed: int,
        generation: int,
        round: int,
        first_position: int,
    ) -> Verdict: ...


def propose(weights: NDArray[np.float64], mode: Mode, support: int, u24: int) -> tuple[int, QRow]:
    """One position as the leader does it: float64 [V] weights to counts, the token that `u24` draws, and its q."""
    if mode is Mode.DENSE:
        counts = allocate(weights)
        return int(draw(counts, u24)), QRow(to_q(counts))
    ids, counts = allocate_top_k(weights, support)
    return int(draw_sparse(ids, counts, u24)), QRow(to_q(counts), ids)


def run_reference(
    models: ToyModels,
    seed: int,
    rounds: int,
    depth: int,
    mode: Mode = Mode.DENSE,
    verifier: Verifier = verify_chain,
    *,
    prompt: Sequence[int] = DEFAULT_PROMPT,
    support: int = DEFAULT_SUPPORT,
    temperature: float = 1.0,
    discarded: Collection[int] = (),
) -> list[int]:
    """All tokens that one request commits after its prompt in `rounds` STEPs of `depth` drafts.

    `seed` is the request's. The prompt occupies positions 0..L-1, the anchor of a STEP is the last committed position,
    the first draft sits at anchor + 1 and the bonus at anchor + depth + 1. The round rises at each STEP, from 0. If it
    is in `discarded` its proposal is lost: the generation (from 0) rises, then one token is drawn target-only at
    anchor + 1, under the new generation and the lost round's number. Raises `LocalMisuse` without a prompt, rounds or
    depth.
    """
    if not prompt or rounds < 1 or depth < 1:
        raise LocalMisuse("a run needs a prompt of at least one token, one round and one draft a round")
    committed = list(prompt)
    generation = 0
    for round_number in range(rounds):
        first = len(committed)
        if round_number in discarded:
            generation += 1
            weights, _ = models.target.weights(committed)
            committed.append(target_only(weights, seed, generation, round_number, first))
            continue
        chain = list(committed[-2:])
        known = len(chain)
        qs: list[QRow] = []
        for position in range(first, first + depth):
            u24 = draw24(seed, Domain.PROPOSAL, generation, round_number, position)
            token, q = propose(models.draft.weights(chain, temperature), mode, support, u24)
            chain.append(token)
            qs.append(q)

        def target_at(index: int, chain: Sequence[int] = chain, known: int = known) -> TargetRow:
            return models.target.weights(chain[: known + index])

        verdict = verifier(chain[known:], qs, target_at, seed, generation, round_number, first)
        committed.extend(verdict.committed_tokens)
    return committed[len(prompt) :]
