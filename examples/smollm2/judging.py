"""Is what came out distributed as the target? Two tests, and the rows of p that they need, computed anew.

Between texts or first tokens and p-values. Uses the statistic of `pp1q demo` (`toy.pit`); draws no protocol noise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from generating import Task, generate
from numpy.typing import NDArray

from pp1q_transport import dyadic
from pp1q_transport.toy.pit import Pit, chi_square_tail

if TYPE_CHECKING:
    from logits import Logits

    from pp1q_transport import TargetSide

P_VALUE_LEAST = 1e-6
PIT_NOISE = 0x9E3779B97F4A7C15
UNITS = 1 << 50
EXPECTED_LEAST = 10  # a token that is expected less often is counted with the others
REQUESTS_FROM = 1000


def replayed(model: Logits, prompt: Sequence[int], tokens: Sequence[int], at_once: int) -> Iterator[NDArray[np.float32]]:
    """The logits each of `tokens` was to be drawn from, `at_once` in a forward: no draft, no rollback, another grouping."""
    whole = [*prompt, *tokens]
    at = len(prompt)
    while at < len(whole):
        rows = min(at_once, len(whole) - at)
        yield from model.after(whole[: at + rows - 1], rows)
        at += rows


def integer_weights(logits: NDArray[np.float32], temperature: float) -> NDArray[np.uint64]:
    """p in units of 2^-50, as the statistic takes it."""
    weights = dyadic.weights_from_logits(logits, temperature)
    return np.rint(weights / weights.sum() * UNITS).astype(np.uint64)


def judge_texts(model: Logits, texts: Sequence[tuple[Sequence[int], Sequence[int]]], temperature: float, at_once: int) -> float:
    """The p-value of the randomised PIT over all tokens of (prompt, tokens), at least 320 together."""
    total = sum(len(tokens) for _, tokens in texts)
    pit: Pit | None = None
    for prompt, tokens in texts:
        for token, logits in zip(tokens, replayed(model, prompt, tokens, at_once), strict=True):
            pit = pit or Pit(len(logits), total, PIT_NOISE)
            pit.add_row(integer_weights(logits, temperature), token)
    assert pit is not None
    return pit.result().p_value


def first_tokens(receiver: TargetSide, model: Logits, task: Task, seeds: Sequence[int]) -> Counter[int]:
    """The first token committed after one prompt, under each of `seeds`, through the transport."""
    counted: Counter[int] = Counter()
    for number, seed in enumerate(seeds, REQUESTS_FROM):
        one = replace(task, request=number, seed=seed, tokens=1, depth=1)
        counted[generate(receiver, model, one, lambda _tokens, _accepted: None).tokens[0]] += 1
    return counted


def judge_first(logits: NDArray[np.float32], counted: Counter[int], temperature: float) -> tuple[float, int]:
    """Chi-square of first tokens against p, each likely token a cell and all others one more: (p-value, cells)."""
    weights = dyadic.weights_from_logits(logits, temperature)
    drawn = sum(counted.values())
    expected = weights / weights.sum() * drawn
    likely = np.flatnonzero(expected >= EXPECTED_LEAST).tolist()
    rest = drawn - float(expected[likely].sum())
    cells = [(counted[token], float(expected[token])) for token in likely]
    others = drawn - sum(count for count, _ in cells)
    if rest >= EXPECTED_LEAST or not cells:
        cells.append((others, rest))
    elif others or rest:  # too few for a cell of their own: together with the least likely one
        count, least = cells.pop()
        cells.append((count + others, least + rest))
    statistic = sum((count - due) ** 2 / due for count, due in cells)
    return (chi_square_tail(statistic, len(cells) - 1) if len(cells) > 1 else 1.0), len(cells)
