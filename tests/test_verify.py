"""The integer verifier against exact rationals: what it commits follows p to the last 2^-64, and each guard holds."""

from __future__ import annotations

import itertools
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pp1q_transport.dyadic import MASS, to_q
from pp1q_transport.errors import InvalidQ, LocalMisuse, Reason
from pp1q_transport.rng import Domain, draw64
from pp1q_transport.verify import (
    MAX_TOTAL,
    QRow,
    TargetRow,
    Verdict,
    accept,
    check_weights,
    correct,
    integer,
    pick,
    residual,
    target_only,
    verify_chain,
)

END = 1 << 64
Prefix = tuple[int, ...]
Law = dict[Prefix, Fraction]


def u64s(values: list[int]) -> NDArray[np.uint64]:
    return np.array(values, dtype=np.uint64)


def u32s(values: list[int]) -> NDArray[np.uint32]:
    return np.array(values, dtype=np.uint32)


def dense(counts: list[int]) -> QRow:
    return QRow(to_q(u32s(counts)))


def sparse(counts: list[int]) -> QRow:
    ids = np.array([token for token, count in enumerate(counts) if count], dtype=np.int32)
    return QRow(to_q(u32s([count for count in counts if count])), ids)


def composition(noise: random.Random, parts: int, total: int, zeros: float) -> list[int]:
    """`parts` non-negative integers of sum `total`, some of them zero."""
    shares = [0.0 if noise.random() < zeros else noise.random() ** 3 for _ in range(parts)]
    shares[noise.randrange(parts)] += 0.1
    values = [int(total * share / sum(shares)) for share in shares]
    values[max(range(parts), key=values.__getitem__)] += total - sum(values)
    return values


# ---- the law of the output, by interval lengths -------------------------------------------------------------------


def first_where(holds: Callable[[int], bool]) -> int:
    """The least u64 (or 2^64) at which the monotone `holds` turns true: an interval's length by bisection."""
    low, high = 0, END
    while low < high:
        middle = (low + high) // 2
        if holds(middle):
            high = middle
        else:
            low = middle + 1
    return low


def pick_intervals(masses: NDArray[np.uint64]) -> Iterator[tuple[int, int, int]]:
    """(index, first noise, length) of every index that any noise picks."""
    start = 0
    for index in range(len(masses)):
        end = first_where(lambda u64, index=index: integer.pick(masses, u64) > index)  # type: ignore[misc]
        if end > start:
            yield index, start, end - start
        start = end


class Chain:
    """A small model: p and q after every prefix, and the law of what `verify_chain` commits over all noise."""

    def __init__(self, seed: int, vocabulary: int, depth: int, row: Callable[[list[int]], QRow]) -> None:
        noise = random.Random(seed)
        self.vocabulary = vocabulary
        self.depth = depth
        self.target: dict[Prefix, TargetRow] = {}
        self.counts: dict[Prefix, list[int]] = {}
        self.q: dict[Prefix, QRow] = {}
        for length in range(depth + 1):
            for prefix in itertools.product(range(vocabulary), repeat=length):
                total = noise.choice([MAX_TOTAL, 7, MASS, noise.randrange(1, MAX_TOTAL)])
                self.target[prefix] = u64s(composition(noise, vocabulary, total, 0.3)), total
                self.counts[prefix] = composition(noise, vocabulary, MASS, 0.3)
                self.q[prefix] = row(self.counts[prefix])

    def p(self, tokens: Prefix) -> Fraction:
        chance = Fraction(1)
        for index, token in enumerate(tokens):
            weights, total = self.target[tokens[:index]]
            chance *= Fraction(int(weights[token]), total)
        return chance

    def run(self, proposal: Prefix, noise: dict[tuple[Domain, int], int], patch: pytest.MonkeyPatch) -> Verdict:
        def draw(seed: int, domain: Domain, generation: int, round: int, position: int) -> int:
            return noise[domain, position]

        patch.setattr(integer, "draw64", draw)
        rows = [self.q[proposal[:index]] for index in range(self.depth)]
        return verify_chain(proposal, rows, lambda index: self.target[proposal[:index]], 1, 0, 0, 0)

    def law(self, patch: pytest.MonkeyPatch) -> Law:
        """Exact chances of every committed sequence, each outcome taken from `verify_chain` itself at interval ends."""
        chances: Law = defaultdict(Fraction)
        for proposal in itertools.product(range(self.vocabulary), repeat=self.depth):
            chance = Fraction(1)
            for index, token in enumerate(proposal):
                chance *= Fraction(self.counts[proposal[:index]][token], MASS)
            if chance:
                self._follow(proposal, chance, chances, patch)
        return chances

    def _follow(self, proposal: Prefix, chance: Fraction, chances: Law, patch: pytest.MonkeyPatch) -> None:
        noise: dict[tuple[Domain, int], int] = {}
        for index, token in enumerate(proposal):
            prefix = proposal[:index]
            weights, total = self.target[prefix]
            facts = self.counts[prefix][token], int(weights[token]), total
            kept = first_where(lambda u64, facts=facts: not integer.accept(u64, *facts))  # type: ignore[misc]
            if kept < END:
                q = self.q[prefix]
                masses = integer.residual(weights, total, q.counts(), q.ids)
                noise[Domain.ACCEPT, index] = kept
                self._end(proposal, masses, noise, chance * Fraction(END - kept, END), chances, patch)
            if kept == 0:
                return
            noise[Domain.ACCEPT, index] = kept - 1
            chance *= Fraction(kept, END)
        self._end(proposal, self.target[proposal][0], noise, chance, chances, patch)

    def _end(
        self,
        proposal: Prefix,
        masses: NDArray[np.uint64],
        noise: dict[tuple[Domain, int], int],
        chance: Fraction,
        chances: Law,
        patch: pytest.MonkeyPatch,
    ) -> None:
        for _, first, length in pick_intervals(masses):
            for edge in (first, first + length - 1):
                every = noise | {(Domain.CORRECTION, position): edge for position in range(self.depth + 1)}
                verdict = self.run(proposal, every, patch)
                assert verdict.committed_tokens[:-1] == list(proposal[: verdict.accepted_drafts])
                assert verdict.no_residual == 0
                chances[tuple(verdict.committed_tokens)] += chance * Fraction(length, 2 * END)

    def distance(self, chances: Law, length: int) -> Fraction:
        """Total variation between the first `length` tokens and p; shorter outputs go on with p itself."""
        got: Law = defaultdict(Fraction)
        for out, chance in chances.items():
            got[out[:length]] += chance
        total = Fraction(0)
        for tokens in itertools.product(range(self.vocabulary), repeat=length):
            p = self.p(tokens)
            if p:
                ended = sum((got[tokens[:stop]] * p / self.p(tokens[:stop]) for stop in range(1, length)), Fraction(0))
                total += max(p - got[tokens] - ended, Fraction(0))  # both laws have mass 1: one side is the distance
        return total


@pytest.mark.parametrize("row", (dense, sparse))
@pytest.mark.parametrize(("vocabulary", "depth"), ((3, 1), (4, 1), (5, 1), (6, 1), (3, 2), (6, 2), (3, 3), (4, 3)))
def test_committed_tokens_follow_p(
    vocabulary: int, depth: int, row: Callable[[list[int]], QRow], monkeypatch: pytest.MonkeyPatch
) -> None:
    chain = Chain(1000 * vocabulary + depth, vocabulary, depth, row)
    law = chain.law(monkeypatch)
    assert sum(law.values()) == 1
    assert {len(out) for out in law} <= set(range(1, depth + 2))
    assert chain.distance(law, 1) <= Fraction(vocabulary + 1, END)
    for length in range(2, depth + 2):
        assert chain.distance(law, length) <= length * Fraction(vocabulary + 1, END)


def _inverse_residual(
    weights: NDArray[np.uint64], total: int, counts: NDArray[np.uint32], ids: NDArray[np.int32] | None = None
) -> NDArray[np.uint64]:
    ours = [int(weight) * MASS for weight in weights]
    theirs = [int(count) * total for count in counts]
    return u64s([max(q - p, 0) for p, q in zip(ours, theirs, strict=True)])


def _support_residual(
    weights: NDArray[np.uint64], total: int, counts: NDArray[np.uint32], ids: NDArray[np.int32] | None = None
) -> NDArray[np.uint64]:
    masses = residual(weights, total, counts, ids)
    outside = counts == 0
    if outside.all() or not masses[~outside].any():
        return masses
    masses[outside] = 0
    return masses


def _swapped(u64: int, count: int, weight: int, total: int) -> bool:
    return u64 * weight * MASS < (count * total) << 64


MUTANTS: dict[str, dict[str, Any]] = {
    "every draft accepted": {"accept": lambda u64, count, weight, total: True},
    "no draft accepted": {"accept": lambda u64, count, weight, total: False},
    "p and q swapped in the test": {"accept": _swapped},
    "accepted with chance p": {"accept": lambda u64, c, w, total: accept(u64, MASS, w, total)},
    "correction from p": {"residual": lambda weights, total, counts, ids=None: weights * np.uint64(MASS)},
    "correction from q - p": {"residual": _inverse_residual},
    "correction within the support of q": {"residual": _support_residual},
    "p and q swapped in both": {"accept": _swapped, "residual": _inverse_residual},
}


@pytest.mark.parametrize("name", tuple(MUTANTS))
def test_wrong_verifiers_do_not_follow_p(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for function, wrong in MUTANTS[name].items():
        monkeypatch.setattr(integer, function, wrong)
    # p = q after some prefixes of a random chain would hide a mutant; these two rows differ everywhere.
    chain = Chain(7, 4, 1, dense)
    chain.target[()] = u64s([1, 30, 40, 29]), 100
    chain.counts[()] = [MASS // 2, MASS // 4, MASS // 4, 0]
    chain.q[()] = dense(chain.counts[()])
    assert chain.distance(chain.law(monkeypatch), 1) > Fraction(1, 100)


def test_each_position_draws_from_its_own_key(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[int, Domain, int, int, int]] = []

    def draw(seed: int, domain: Domain, generation: int, round: int, position: int) -> int:
        asked.append((seed, domain, generation, round, position))
        return 0 if position != 42 else END - 1

    monkeypatch.setattr(integer, "draw64", draw)
    target = u64s([1, 1, 2]), 4
    half = MASS // 2
    rows = [dense([half, half, 0])] * 3
    # p(1)/q(1) = 1/2: position 40 and 41 are accepted with noise 0, position 42 is rejected with noise 2^64 - 1.
    verdict = verify_chain([1, 1, 1], rows, lambda index: target, 5, 6, 7, 40)
    assert verdict == Verdict(2, [1, 1, 2])
    assert asked == [(5, Domain.ACCEPT, 6, 7, position) for position in (40, 41, 42)] + [
        (5, Domain.CORRECTION, 6, 7, 42)
    ]
    asked.clear()
    assert verify_chain([1, 1], rows[:2], lambda index: target, 5, 6, 7, 40) == Verdict(2, [1, 1, 2])
    assert asked[2:] == [(5, Domain.CORRECTION, 6, 7, 42)]


def test_the_target_is_asked_no_further_than_the_chain_holds() -> None:
    asked: list[int] = []

    def target_at(index: int) -> TargetRow:
        asked.append(index)
        return (u64s([0, 5]), 5) if index == 1 else (u64s([5, 0]), 5)

    verdict = verify_chain([0, 0, 0], [dense([MASS, 0])] * 3, target_at, 1, 2, 3, 4)
    assert verdict == Verdict(1, [0, 1])
    assert asked == [0, 1]


# ---- each function against rationals ------------------------------------------------------------------------------

totals = st.one_of(st.just(MAX_TOTAL), st.integers(1, MAX_TOTAL))


@st.composite
def facts(draw: st.DrawFn) -> tuple[int, int, int]:
    total = draw(totals)
    return draw(st.integers(1, MASS)), draw(st.integers(0, total)), total


@given(facts(), st.integers(0, END - 1))
def test_accept_is_the_rational_test(fact: tuple[int, int, int], u64: int) -> None:
    count, weight, total = fact
    ratio = Fraction(weight, total) / Fraction(count, MASS)
    assert accept(u64, *fact) == (Fraction(u64, END) < ratio)
    threshold = min(-(-ratio.numerator * END // ratio.denominator), END)
    if threshold < END:
        assert not accept(threshold, *fact)
    if threshold > 0:
        assert accept(threshold - 1, *fact)


@pytest.mark.parametrize(
    ("u64", "fact", "kept"),
    (
        (END // 2 - 1, (MASS, 1, 2), True),
        (END // 2, (MASS, 1, 2), False),  # equality rejects: < and not <=
        (0, (1, 0, 1), False),  # p = 0 is never accepted
        (END - 1, (MASS, MAX_TOTAL, MAX_TOTAL), True),  # p = q always is
        (END - 1, (MASS // 4, MAX_TOTAL // 4, MAX_TOTAL), True),
    ),
)
def test_accept_at_its_edges(u64: int, fact: tuple[int, int, int], kept: bool) -> None:
    assert accept(u64, *fact) is kept


@given(st.integers(0, 2**32), st.integers(2, 9), totals)
def test_residual_is_exact_in_both_representations(seed: int, size: int, total: int) -> None:
    noise = random.Random(seed)
    weights, counts = composition(noise, size, total, 0.3), composition(noise, size, MASS, 0.5)
    want = [max(weight * MASS - count * total, 0) for weight, count in zip(weights, counts, strict=True)]
    rows = dense(counts), sparse(counts)
    assert [residual(u64s(weights), total, q.counts(), q.ids).tolist() for q in rows] == [want, want]
    for q in rows:
        assert [q.count_of(token) for token in range(size)] == counts


def test_residual_does_not_overflow_at_its_bound() -> None:
    weights = u64s([0, MAX_TOTAL])
    assert residual(weights, MAX_TOTAL, u32s([MASS, 0])).tolist() == [0, 1 << 62]
    assert residual(weights, MAX_TOTAL, u32s([MASS]), np.array([0], np.int32)).tolist() == [0, 1 << 62]
    assert weights.tolist() == [0, MAX_TOTAL]


@given(st.lists(st.one_of(st.just(0), st.integers(0, 2**60)), min_size=1, max_size=9), st.integers(0, END - 1))
def test_pick_gives_each_index_its_interval(masses: list[int], u64: int) -> None:
    total = sum(masses)
    if total == 0:
        with pytest.raises(LocalMisuse):
            pick(u64s(masses), u64)
        return
    cumulative = list(itertools.accumulate(masses))
    assert pick(u64s(masses), u64) == next(i for i, c in enumerate(cumulative) if c > u64 * total >> 64)


@settings(max_examples=20)
@given(st.integers(0, 2**32))
def test_pick_intervals_are_within_one_of_their_share(seed: int) -> None:
    masses = composition(random.Random(seed), 6, 1 << 62, 0.4)
    lengths = {index: length for index, _, length in pick_intervals(u64s(masses))}
    assert sum(lengths.values()) == END
    for index, mass in enumerate(masses):
        assert abs(lengths.get(index, 0) - Fraction(mass * END, 1 << 62)) < 1
        assert mass or index not in lengths


def test_target_only_draws_its_one_token_from_the_correction_domain() -> None:
    weights = u64s([3, 0, 4, 5])
    for position in range(20):
        want = pick(weights, draw64(9, Domain.CORRECTION, 1, 2, position))
        assert target_only(weights, 9, 1, 2, position) == want


def test_read_only_views_are_enough() -> None:
    raw = to_q(u32s([MASS // 2, 0, MASS // 2])).tobytes()
    row = QRow(np.frombuffer(raw, np.float32))
    assert not row.values.flags.writeable
    weights = u64s([0, 6, 0])
    weights.flags.writeable = False
    assert verify_chain([2], [row], lambda index: (weights, 6), 1, 1, 1, 1) == Verdict(0, [1])


# ---- a rejection that finds no residual ---------------------------------------------------------------------------


def test_an_empty_residual_falls_back_to_p() -> None:
    assert correct(u64s([0, 0, 1]), u64s([1, 0, 0]), 0) == (2, True)
    assert correct(u64s([0, 0, 0]), u64s([0, 7, 0]), 0) == (1, False)


def test_an_empty_residual_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(integer, "accept", lambda *facts: False)  # as rounding at the threshold would
    assert verify_chain([1], [dense([0, MASS])], lambda index: (u64s([0, 3]), 3), 1, 1, 1, 1) == Verdict(0, [1], 1)


# ---- guards -------------------------------------------------------------------------------------------------------

TWO = u64s([1, 1])
EVEN = dense([MASS // 2, MASS // 2])
IDS = np.array([0, 1], np.int32)


def run(tokens: list[int], rows: list[QRow], weights: NDArray[np.uint64] = TWO, total: int = 2) -> Verdict:
    return verify_chain(tokens, rows, lambda index: (weights, total), 1, 1, 1, 1)


@pytest.mark.parametrize(
    ("call", "text"),
    (
        (lambda: accept(0, 0, 1, 2), "count"),
        (lambda: accept(0, MASS + 1, 1, 2), "count"),
        (lambda: accept(0, 1, -1, 2), "no probability"),
        (lambda: accept(0, 1, 3, 2), "no probability"),
        (lambda: accept(0, 1, 0, 0), "no probability"),
        (lambda: accept(0, 1, 1, MAX_TOTAL + 1), "exceeds"),
        (lambda: accept(-1, 1, 1, 2), "64-bit"),
        (lambda: accept(END, 1, 1, 2), "64-bit"),
        (lambda: pick(TWO, -1), "64-bit"),
        (lambda: pick(TWO, END), "64-bit"),
        (lambda: pick(u64s([]), 0), "no mass"),
        (lambda: pick(u64s([0, 0]), 0), "no mass"),
        (lambda: pick(np.array([1, 1]), 0), "uint64"),
        (lambda: pick(u64s([1 << 63, 1 << 63]), 0), r"2\^64"),
        (lambda: pick(u64s([END - 1, 2]), 0), r"2\^64"),
        (lambda: check_weights(np.array([1, 1]), 2), "uint64"),
        (lambda: check_weights(TWO.reshape(1, 2), 2), "uint64"),
        (lambda: check_weights(u64s([]), 2), "uint64"),
        (lambda: check_weights(TWO, 3), "do not sum"),
        (lambda: check_weights(TWO, 0), "outside"),
        (lambda: check_weights(u64s([MAX_TOTAL, 1]), MAX_TOTAL + 1), "outside"),
        (lambda: check_weights(u64s([END - 1, 3]), 2), "do not sum"),  # the wrapped sum would be right
        (lambda: residual(TWO, 0, u32s([1, 1])), "outside"),
        (lambda: residual(TWO, MAX_TOTAL + 1, u32s([1, 1])), "outside"),
        (lambda: residual(TWO, 2, u32s([MASS])), "entries"),
        (lambda: residual(TWO, 2, u32s([MASS]), IDS), "IDs"),
        (lambda: residual(TWO, 2, u32s([1, 1]), np.array([1, 1], np.int32)), "ascend"),
        (lambda: residual(TWO, 2, u32s([1, 1]), np.array([1, 0], np.int32)), "ascend"),
        (lambda: residual(TWO, 2, u32s([1, 1]), np.array([-1, 0], np.int32)), "within"),
        (lambda: residual(TWO, 2, u32s([1, 1]), np.array([0, 2], np.int32)), "within"),
        (lambda: run([], []), "target_only"),
        (lambda: run([1, 1], [EVEN]), "rows of q"),
        (lambda: run([2], [EVEN]), "vocabulary"),
        (lambda: run([-1], [EVEN]), "vocabulary"),
        (lambda: run([1], [dense([0, MASS, 0])]), "entries"),
        (lambda: run([1], [QRow(EVEN.values[:1], IDS)]), "values"),
        (lambda: run([1], [EVEN], u64s([2, 0]), 3), "do not sum"),  # refused at the row that rejects, too
        (lambda: target_only(u64s([0, 0]), 1, 1, 1, 1), "outside"),
        (lambda: target_only(u64s([MAX_TOTAL, 1]), 1, 1, 1, 1), "outside"),
        (lambda: EVEN.count_of(2), "outside"),
        (lambda: EVEN.count_of(-1), "outside"),
    ),
)
def test_misuse_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises(LocalMisuse, match=text):
        call()


def test_the_bonus_row_is_checked_too() -> None:
    with pytest.raises(LocalMisuse, match="do not sum"):
        verify_chain([1], [dense([0, MASS])], lambda index: (u64s([0, 2]), 2 + index), 1, 1, 1, 1)


def q(*values: float) -> QRow:
    return QRow(np.array(values, np.float32))


@pytest.mark.parametrize(
    ("call", "reason"),
    (
        (lambda: run([1], [dense([MASS, 0])]), Reason.ZERO_Q_TOKEN),
        (lambda: run([1], [sparse([MASS, 0])]), Reason.ZERO_Q_TOKEN),
        (lambda: run([1], [q(0.5, 0.1)]), Reason.NONDYADIC),
        (lambda: run([1], [q(0.5, float("nan"))]), Reason.NONDYADIC),
        (lambda: run([1], [q(0.5, -0.5)]), Reason.NONDYADIC),
        (lambda: run([1], [q(0.0, 2.0)]), Reason.NONDYADIC),
        (lambda: run([1], [q(0.75, 0.75)], u64s([2, 0])), Reason.MASS),
        (lambda: run([1], [q(0.25, 0.5)], u64s([2, 0])), Reason.MASS),
        (lambda: run([1], [q(0.1, 0.5)], u64s([2, 0])), Reason.NONDYADIC),
    ),
)
def test_what_is_no_q_is_refused(call: Callable[[], object], reason: Reason) -> None:
    with pytest.raises(InvalidQ) as caught:
        call()
    assert caught.value.reason is reason
