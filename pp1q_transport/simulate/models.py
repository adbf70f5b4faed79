"""What a run drafts and verifies: a toy draft, a toy target, and the same rounds without any transport.

Between `toy.models` and the played processes. Every function here is pure: a row depends on the last two committed tokens, what a
round commits on its prefix, seed, generation and round. SPEC sections 3, 5 and 6.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from .. import wire
from .._native.kernels import draw, draw_u24
from ..dyadic import allocate, allocate_top_k, to_q
from ..rng import Domain
from ..toy.models import ToyDraft, ToyTarget
from ..verify.integer import QRow, target_only, verify_chain

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

VOCABULARY: Final = 64
SUPPORT: Final = 8
PROMPT: Final = (1, 2)
_MODEL_SEED: Final = 7
_VERDICTS_KEPT: Final = 512


class Row(NamedTuple):
    """One position's q: as it travels, and as counts to draw from."""

    payload: bytes
    entries: int
    counts: NDArray[np.uint32]
    ids: NDArray[np.int32] | None


@dataclass(slots=True)
class Book:
    """One request as one rank has committed it. `entries`: (source, request_generation, round, depth, tokens committed)."""

    seed: int
    representation: int
    tokens: list[int] = field(default_factory=lambda: list(PROMPT))
    entries: list[tuple[int, int, int, int, int]] = field(default_factory=list)

    def copy(self) -> Book:
        """One that changes by itself."""
        return Book(self.seed, self.representation, list(self.tokens), list(self.entries))

    def add(self, source: int, generation: int, round_number: int, depth: int, tokens: Sequence[int]) -> None:
        """A round's tokens."""
        self.tokens += tokens
        self.entries.append((source, generation, round_number, depth, len(tokens)))


class Models:
    """Draft and target of all runs, with what was computed kept."""

    def __init__(self) -> None:
        self._draft = ToyDraft(_MODEL_SEED, VOCABULARY)
        self._target = ToyTarget(_MODEL_SEED, VOCABULARY)
        self._rows: dict[tuple[int, int, int], Row] = {}
        self._verdicts: dict[object, list[int]] = {}

    def row(self, tail: Sequence[int], representation: int) -> Row:
        """The draft's q after a chain that ends with `tail`."""
        key = (tail[-2], tail[-1], representation)
        known = self._rows.get(key)
        if known is not None:
            return known
        weights = self._draft.weights(tail[-2:])
        if representation == wire.DENSE:
            counts = allocate(weights)
            row = Row(to_q(counts).tobytes(), VOCABULARY, counts, None)
        else:
            ids, counts = allocate_top_k(weights, SUPPORT)
            row = Row(to_q(counts).tobytes() + ids.tobytes(), len(ids), counts, ids)
        self._rows[key] = row
        return row

    def token(self, row: Row, u24: int) -> int:
        """The token that `u24` draws from `row`."""
        index = draw(row.counts, u24)
        return index if row.ids is None else int(row.ids[index])

    def verdict(
        self, tokens: tuple[int, ...], rows: tuple[bytes, ...], book: Book, generation: int, round_number: int
    ) -> list[int]:
        """What the target commits on `book` after it verified a proposal from these very bytes."""
        tail = book.tokens[-2:]
        first = len(book.tokens)
        key = (tokens, rows, book.seed, generation, round_number, first, *tail)
        known = self._verdicts.get(key)
        if known is not None:
            return known
        chain = [*tail, *tokens]
        qs = [_q_of(row, book.representation) for row in rows]
        verdict = verify_chain(
            tokens, qs, lambda i: self._target.weights(chain[i : i + 2]), book.seed, generation, round_number, first
        )
        if len(self._verdicts) >= _VERDICTS_KEPT:
            self._verdicts.clear()
        self._verdicts[key] = verdict.committed_tokens
        return verdict.committed_tokens

    def alone(self, book: Book, generation: int, round_number: int) -> int:
        """The one token that the target samples by itself after a discard."""
        weights, _total = self._target.weights(book.tokens[-2:])
        return target_only(weights, book.seed, generation, round_number, len(book.tokens))

    def without_transport(self, book: Book, generation: int, round_number: int, depth: int) -> list[int]:
        """What a round commits on `book` when draft and target are one process."""
        chain = book.tokens[-2:]
        first = len(book.tokens)
        rows = []
        for position in range(first, first + depth):
            row = self.row(chain, book.representation)
            chain.append(self.token(row, draw_u24(book.seed, Domain.PROPOSAL, generation, round_number, position)))
            rows.append(row.payload)
        return self.verdict(tuple(chain[2:]), tuple(rows), book, generation, round_number)

    def replay(self, book: Book) -> list[int]:
        """All tokens of `book`, from its prompt and the order of its rounds alone."""
        fresh = Book(book.seed, book.representation)
        for source, generation, round_number, depth, _count in book.entries:
            if source == wire.VERIFIED:
                fresh.tokens += self.without_transport(fresh, generation, round_number, depth)
            else:
                fresh.tokens.append(self.alone(fresh, generation, round_number))
        return fresh.tokens


def _q_of(payload: bytes, representation: int) -> QRow:
    if representation == wire.DENSE:
        return QRow(np.frombuffer(payload, np.float32))
    half = len(payload) // 2
    return QRow(np.frombuffer(payload, np.float32, half // 4), np.frombuffer(payload, np.int32, half // 4, half))
