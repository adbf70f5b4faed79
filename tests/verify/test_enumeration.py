"""Proof by enumeration: all proposals, each with the chance q gives it, through the rational kernel make p exactly.

At least 200 cases of (p, q, depth), dense and sparse, over chains of depth 1 to 3, with the real M = 2^24. The integer kernel is
then counted by interval lengths: how many of the 2^64 noise values lead to each outcome, against its bound of (V+1)/2^64 a
position.
"""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from fractions import Fraction

import numpy as np
import pytest

from pp1q_transport.dyadic import MASS, allocate, allocate_top_k, to_q
from pp1q_transport.verify import MAX_TOTAL, FastTarget, QRow, integer, rational, wide
from pp1q_transport.verify.rational import Law, Row, Tokens

END = 1 << 64
ZERO = Fraction(0)


@dataclass
class Case:
    """A target and a draft over a few tokens: integer weights and counts after every prefix that matters."""

    name: str
    vocabulary: int
    depth: int
    target: dict[Tokens, tuple[list[int], int]] = field(default_factory=dict)
    counts: dict[Tokens, list[int]] = field(default_factory=dict)

    def p_at(self, prefix: Tokens) -> Row:
        return self._row(self.target[prefix])

    def q_at(self, prefix: Tokens) -> Row:
        return self._row((self.counts[prefix], MASS))

    def _row(self, row: tuple[list[int], int]) -> Row:
        return rational.row_of(*row)


def split(noise: random.Random, parts: int, total: int, zeros: float) -> list[int]:
    """`parts` non-negative integers of sum `total`, some of them zero."""
    shares = [0.0 if noise.random() < zeros else noise.random() ** 3 for _ in range(parts)]
    shares[noise.randrange(parts)] += 0.1
    values = [int(total * share / sum(shares)) for share in shares]
    values[max(range(parts), key=values.__getitem__)] += total - sum(values)
    return values


Rows = Callable[[random.Random, int], tuple[list[int], int, list[int]]]


def _anything(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    total = noise.choice([MAX_TOTAL, 7, 10**9 + 7, MASS, noise.randrange(1, MAX_TOTAL)])
    return split(noise, size, total, 0.3), total, split(noise, size, MASS, 0.3)


def _sparse(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    """q on the largest k tokens of a draft, by the allocation that the leader uses."""
    total = noise.randrange(1, MAX_TOTAL)
    ids, few = allocate_top_k(np.array([noise.random() ** 2 for _ in range(size)]), noise.randrange(1, size))
    counts = np.zeros(size, np.int64)
    counts[ids] = few
    return split(noise, size, total, 0.2), total, counts.tolist()


def _dense(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    counts = allocate(np.array([noise.random() ** 4 for _ in range(size)])).tolist()
    return split(noise, size, MAX_TOTAL, 0.0), MAX_TOTAL, counts


def _equal(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    counts = split(noise, size, MASS, 0.3)
    return [3 * count for count in counts], 3 * MASS, counts


def _next_to_equal(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    """p and q apart by one count: the rarest rejection that there is, and a residual on one token."""
    weights = split(noise, size, MASS, 0.0)
    counts = list(weights)
    giver = max(range(size), key=counts.__getitem__)
    counts[giver] -= 1
    counts[(giver + 1) % size] += 1
    return weights, MASS, counts


def _apart(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    """Supports that share nothing: every draft is rejected."""
    here = noise.randrange(1, size)
    return split(noise, here, 1000, 0.0) + [0] * (size - here), 1000, [0] * here + split(noise, size - here, MASS, 0.2)


def _one_hot(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    token = noise.randrange(size)
    return split(noise, size, 12345, 0.2), 12345, [MASS if i == token else 0 for i in range(size)]


def _one_hot_target(noise: random.Random, size: int) -> tuple[list[int], int, list[int]]:
    token = noise.randrange(size)
    return [5 if i == token else 0 for i in range(size)], 5, split(noise, size, MASS, 0.1)


KINDS: dict[str, Rows] = {
    "anything": _anything,
    "sparse": _sparse,
    "dense": _dense,
    "equal": _equal,
    "next to equal": _next_to_equal,
    "apart": _apart,
    "one-hot draft": _one_hot,
    "one-hot target": _one_hot_target,
}
SHAPES = ((2, 1), (3, 1), (5, 1), (8, 1), (2, 2), (3, 2), (4, 2), (2, 3), (3, 3))


def cases() -> Iterator[Case]:
    for (name, rows), (vocabulary, depth), repeat in itertools.product(KINDS.items(), SHAPES, range(3)):
        noise = random.Random(f"{name} {vocabulary} {depth} {repeat}")
        case = Case(f"{name}, V={vocabulary}, depth {depth}, {repeat}", vocabulary, depth)
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocabulary), repeat=length):
                weights, total, counts = rows(noise, vocabulary)
                case.target[prefix] = weights, total
                case.counts[prefix] = counts
        yield case


CASES = tuple(cases())
BY_NAME = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


def test_there_are_enough_cases() -> None:
    assert len(CASES) >= 200
    sparse = [case for case in CASES if any(0 in counts for counts in case.counts.values())]
    assert len(sparse) >= 100
    assert len(CASES) - len(sparse) >= 30
    assert {case.depth for case in CASES} == {1, 2, 3}


@BY_NAME
def test_all_proposals_together_make_p(case: Case) -> None:
    law = rational.output_law(case.q_at, case.p_at, case.vocabulary, case.depth)
    assert sum(law.values()) == 1
    for length in range(1, case.depth + 2):
        got = rational.continued(law, case.p_at, case.vocabulary, length)
        assert {out: chance for out, chance in got.items() if chance} == rational.target_law(case.p_at, case.vocabulary, length)


def _integer_law(case: Case) -> Law:
    """The law of the integer kernel: 2^-64 a noise value, counted by the ends of each outcome's interval."""

    def one(proposal: Tokens, q_at: object, p_at: object) -> Law:
        law: Law = defaultdict(Fraction)
        reached = Fraction(1)
        for index, token in enumerate(proposal):
            prefix = proposal[:index]
            (weights, total), counts = case.target[prefix], case.counts[prefix]
            kept = wide.acceptance_threshold(counts[token], weights[token], total)
            if kept < END:
                masses = wide.residual(weights, total, counts)
                for corrected, length in enumerate(wide.pick_lengths(masses)):
                    law[*prefix, corrected] += reached * Fraction(END - kept, END) * Fraction(length, END)
            reached *= Fraction(kept, END)
        for bonus, length in enumerate(wide.pick_lengths(case.target[proposal][0])):
            law[*proposal, bonus] += reached * Fraction(length, END)
        return law

    return rational.output_law(case.q_at, case.p_at, case.vocabulary, case.depth, one)


@BY_NAME
def test_the_integer_kernel_is_within_its_bound(case: Case) -> None:
    law = _integer_law(case)
    assert sum(law.values()) == 1
    bound = Fraction(case.vocabulary + 1, END)
    for length in range(1, case.depth + 2):
        got = rational.continued(law, case.p_at, case.vocabulary, length)
        off = rational.distance(got, rational.target_law(case.p_at, case.vocabulary, length))
        assert off <= length * bound, float(off / bound)


@BY_NAME
def test_interval_ends_are_the_kernel_s(case: Case) -> None:
    """The lengths above are those of `integer`: its decisions turn exactly at the ends, dense and sparse."""
    prefix: Tokens = ()
    (weights, total), counts = case.target[prefix], case.counts[prefix]
    ours = np.array(weights, np.uint64)
    ids = np.flatnonzero(counts).astype(np.int32)
    rows = (
        QRow(to_q(np.array(counts, np.uint32))),
        QRow(to_q(np.array([counts[i] for i in ids], np.uint32)), ids),
    )
    for token in range(case.vocabulary):
        if counts[token]:
            kept = wide.acceptance_threshold(counts[token], weights[token], total)
            for u64 in {0, kept - 1, kept, kept + 1, END - 1}:
                if 0 <= u64 < END:
                    assert integer.accept(u64, counts[token], weights[token], total) == (u64 < kept)
                    assert wide.accept(u64, counts[token], weights[token], total) == (u64 < kept)
    for row in rows:
        masses = integer.residual(ours, total, row.counts(), row.ids)
        assert masses.tolist() == wide.residual(weights, total, counts)
        for drawn in (masses, ours):
            if not drawn.any():
                continue
            start = 0
            for index, length in enumerate(wide.pick_lengths(drawn.tolist())):
                for u64 in {start, start + length - 1} if length else ():
                    assert integer.pick(drawn, u64) == wide.pick(drawn.tolist(), u64) == index
                start += length
            assert start == END


@BY_NAME
def test_the_fast_path_turns_at_the_same_ends(case: Case) -> None:
    """Integer weights of up to 2^38 lose nothing in FP64: the native path decides on the very p of the case."""
    (weights, total), counts = case.target[()], case.counts[()]
    target = FastTarget(np.array(weights, np.float64))
    assert [Fraction(weight, target.total) for weight in target.integers()] == case.p_at(())
    q = QRow(to_q(np.array(counts, np.uint32)))
    for token in range(case.vocabulary):
        if counts[token]:
            kept = wide.acceptance_threshold(counts[token], weights[token], total)
            for u64 in {0, kept - 1, kept, kept + 1, END - 1}:
                if 0 <= u64 < END:
                    assert target.accept(token, q, u64) == (u64 < kept)
    masses = wide.residual(weights, total, counts)
    for drawn, pick in ((masses, lambda u64: target.correct(q, u64)[0]), (weights, target.pick)):
        if not any(drawn):
            continue
        start = 0
        for index, length in enumerate(wide.pick_lengths(drawn)):
            for u64 in {start, start + length - 1} if length else ():
                assert pick(u64) == index
            start += length


def _within_support(p: Row, q: Row) -> list[Fraction]:
    masses = [max(a - b, ZERO) if b else ZERO for a, b in zip(p, q, strict=True)]
    return [mass / sum(masses) for mass in masses] if any(masses) else list(p)


def _swapped(p: Fraction, q: Fraction) -> Fraction:
    return min(rational.ONE, q / p) if p else ZERO


def _unnormalised(p: Row, q: Row) -> list[Fraction]:
    return [max(ours - theirs, ZERO) for ours, theirs in zip(p, q, strict=True)]


WRONG: dict[str, tuple[str, Callable[..., object]]] = {
    "p and q swapped in the test": ("acceptance", _swapped),
    "accepted with chance p": ("acceptance", lambda p, q: p),
    "accepted always": ("acceptance", lambda p, q: rational.ONE),
    "correction from p": ("residual", lambda p, q: list(p)),
    "correction within the support": ("residual", _within_support),
    "correction from q": ("residual", lambda p, q: list(q)),
    "no normalisation": ("residual", _unnormalised),
}


@pytest.mark.parametrize("name", tuple(WRONG))
def test_a_wrong_rule_is_not_exact(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rational, *WRONG[name])
    wrong = 0
    for case in CASES:
        law = rational.output_law(case.q_at, case.p_at, case.vocabulary, case.depth)
        got = rational.continued(law, case.p_at, case.vocabulary, 1)
        wrong += {k: v for k, v in got.items() if v} != rational.target_law(case.p_at, case.vocabulary, 1)
    assert wrong >= len(CASES) // 4
