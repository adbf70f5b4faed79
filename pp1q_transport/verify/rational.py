"""The rational kernel: the law of what rejection sampling commits, as fractions and without any noise.

Between p and q as exact rationals and the chances of every outcome. It draws nothing and is made for small vocabularies: its sum
over all proposals is the proof that the rule is exact, and the layers below are held against it. SPEC section 6, layer (a).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import TypeAlias

from ..errors import LocalMisuse

Tokens: TypeAlias = tuple[int, ...]
Row: TypeAlias = Sequence[Fraction]
Law: TypeAlias = dict[Tokens, Fraction]
RowAt: TypeAlias = Callable[[Tokens], Row]
"""A model: the row after the given tokens of the chain (the committed prefix is understood)."""

ONE = Fraction(1)


def row_of(weights: Sequence[int], total: int) -> list[Fraction]:
    """w/W (or c/M) as fractions; raises `LocalMisuse` unless the weights are non-negative and sum to `total` > 0."""
    if total <= 0 or min(weights) < 0 or sum(weights) != total:
        raise LocalMisuse(f"weights do not sum to {total}")
    return [Fraction(weight, total) for weight in weights]


def acceptance(p: Fraction, q: Fraction) -> Fraction:
    """min(1, p/q) of a proposed token; raises `LocalMisuse` when q is 0, for it cannot have been proposed."""
    if q <= 0:
        raise LocalMisuse("a token with q = 0 cannot have been proposed")
    return min(ONE, p / q)


def residual(p: Row, q: Row) -> list[Fraction]:
    """max(p - q, 0), normalised over the whole vocabulary; p itself when nothing is left (which no rejection ever meets)."""
    masses = [max(ours - theirs, Fraction(0)) for ours, theirs in zip(p, q, strict=True)]
    total = sum(masses)
    return [mass / total for mass in masses] if total else list(p)


def chain_law(proposal: Tokens, q_at: RowAt, p_at: RowAt) -> Law:
    """The chances of every committed sequence, given one proposal: accepted drafts, then the correction or the bonus."""
    law: Law = defaultdict(Fraction)
    reached = ONE
    for index, token in enumerate(proposal):
        prefix = proposal[:index]
        p, q = p_at(prefix), q_at(prefix)
        kept = acceptance(p[token], q[token])
        if kept < 1:
            for corrected, chance in enumerate(residual(p, q)):
                if chance:
                    law[*prefix, corrected] += reached * (1 - kept) * chance
        reached *= kept
        if not reached:
            return law
    for bonus, chance in enumerate(p_at(proposal)):
        if chance:
            law[*proposal, bonus] += reached * chance
    return law


def output_law(q_at: RowAt, p_at: RowAt, vocabulary: int, depth: int, one: Callable[..., Law] = chain_law) -> Law:
    """The law of the committed sequence: `one` summed over all proposals of `depth`, each with the chance q gives it."""
    law: Law = defaultdict(Fraction)
    for proposal in itertools.product(range(vocabulary), repeat=depth):
        chance = ONE
        for index, token in enumerate(proposal):
            chance *= q_at(proposal[:index])[token]
            if not chance:
                break
        if chance:
            for out, share in one(proposal, q_at, p_at).items():
                law[out] += chance * share
    return law


def continued(law: Mapping[Tokens, Fraction], p_at: RowAt, vocabulary: int, length: int) -> Law:
    """The law of the first `length` tokens when every shorter outcome goes on with the target's own p."""
    grown: Law = defaultdict(Fraction)
    for out, chance in law.items():
        if len(out) >= length:
            grown[out[:length]] += chance
            continue
        for tail in itertools.product(range(vocabulary), repeat=length - len(out)):
            share = chance
            for index, token in enumerate(tail):
                share *= p_at(out + tail[:index])[token]
                if not share:
                    break
            if share:
                grown[out + tail] += share
    return grown


def target_law(p_at: RowAt, vocabulary: int, length: int) -> Law:
    """What must come out: the target's own law of its next `length` tokens."""
    return continued({(): ONE}, p_at, vocabulary, length)


def distance(one: Mapping[Tokens, Fraction], other: Mapping[Tokens, Fraction]) -> Fraction:
    """Total variation: half the sum of absolute differences."""
    keys = set(one) | set(other)
    return sum((abs(one.get(key, Fraction(0)) - other.get(key, Fraction(0))) for key in keys), Fraction(0)) / 2
