"""Many draws against p, with error rates that are derived, and broken verifiers that must fail the very same test.

The test. N independent rounds give N first tokens (or pairs); f_v is the share of cell v, p_v its true chance, K the number of
cells. It fails when |f_v - p_v| > epsilon for any v.

False failures. Hoeffding bounds each cell by 2 exp(-2 N epsilon^2), so the right verifier fails with chance at most
2 K exp(-2 N epsilon^2). epsilon is solved from ALPHA / RUNS, so that all runs here that should pass do so together but for
ALPHA = 1e-6.

Power. A broken verifier has its own law, which is worked out below as exact fractions; some cell is off by delta. It passes only
if that cell's share comes back within epsilon of p_v, which has a chance of at most exp(-2 N (delta - epsilon)^2). N is so large
that this is at most BETA = 1e-6 for every broken verifier here, and that is asserted. (Seeds are fixed: rates are over seeds.)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from fractions import Fraction
from functools import partial

import numpy as np
import pytest

from pp1q_transport import dyadic
from pp1q_transport.dyadic import MASS
from pp1q_transport.rng import Domain, draw24, draw64
from pp1q_transport.verify import Draw, QRow, integer, rational, target_only, verify_chain, verify_chain_fast
from pp1q_transport.verify.rational import Law, Row, Tokens

ROUNDS = 8_000
ALPHA = BETA = 1e-6
RUNS = 6 + 15  # of right verifiers, and of broken ones against their own laws
SEED = 0x5EED
FIRST = 7  # the position of the first draft
ZERO = Fraction(0)

P = [5, 11, 7, 8, 1]  # of 32
TOTAL = 32
DRAFT = np.array([4.0, 2.0, 6.0, 2.0, 1.0])  # ranked otherwise
Q = dyadic.allocate(DRAFT)
SIZE = len(P)
TARGET = np.array(P, np.uint64)
P_ROW: Row = rational.row_of(P, TOTAL)
Q_ROW: Row = rational.row_of(Q.tolist(), MASS)


def epsilon(cells: int, rounds: int = ROUNDS) -> float:
    """How far a share may be off."""
    return math.sqrt(math.log(2 * cells * RUNS / ALPHA) / (2 * rounds))


def delta_needed(cells: int, rounds: int = ROUNDS) -> float:
    """How far off a broken law must be in some cell to be caught at 1 - BETA."""
    return epsilon(cells, rounds) + math.sqrt(math.log(1 / BETA) / (2 * rounds))


def passes(tokens: Iterator[Tokens], law: Law) -> bool:
    """The test of the docstring, over all cells of `law` (every other outcome is a failure by itself)."""
    counts = Counter(tokens)
    rounds = counts.total()
    if any(not law.get(cell) for cell in counts):
        return False
    return all(abs(counts[cell] / rounds - float(chance)) <= epsilon(len(law)) for cell, chance in law.items())


# -- right verifiers ---------------------------------------------------------------------------------------------------


def drawn(q: QRow, round_number: int, position: int = FIRST) -> int:
    """The leader's token."""
    u24 = draw24(SEED, Domain.PROPOSAL, 1, round_number, position)
    counts = q.counts()
    return dyadic.draw(counts, u24) if q.ids is None else dyadic.draw_sparse(q.ids, counts, u24)


DENSE = QRow(dyadic.to_q(Q))
IDS, FEW = dyadic.allocate_top_k(DRAFT, 3)
SPARSE = QRow(dyadic.to_q(FEW), IDS)
FLOATS = np.array(P, np.float32) / np.float32(TOTAL)


def one_round(r: int, q: QRow, fast: bool, draw: Draw | None = None) -> list[int]:
    token = drawn(q, r)
    if fast:
        return verify_chain_fast([token], [q], lambda i: FLOATS, SEED, 1, r, FIRST, draw=draw).committed_tokens
    return verify_chain([token], [q], lambda i: (TARGET, TOTAL), SEED, 1, r, FIRST, draw=draw).committed_tokens


@pytest.mark.parametrize("fast", (False, True))
@pytest.mark.parametrize("q", (DENSE, SPARSE), ids=("dense", "sparse"))
def test_the_right_verifiers_follow_p(q: QRow, fast: bool) -> None:
    law = {(token,): chance for token, chance in enumerate(P_ROW)}
    assert passes((tuple(one_round(r, q, fast)[:1]) for r in range(ROUNDS)), law)


@pytest.mark.parametrize("fast", (False, True))
def test_pairs_of_tokens_follow_p(fast: bool) -> None:
    """Depth 2 over three tokens, p and q depending on what came before: the law of the first two committed tokens."""
    targets = {(): [2, 5, 1], (0,): [1, 1, 6], (1,): [4, 2, 2], (2,): [3, 3, 2]}
    drafts = {(): [5.0, 1, 2], (0,): [3.0, 1, 1], (1,): [1.0, 1, 4], (2,): [1.0, 5, 1]}
    rows = {prefix: QRow(dyadic.to_q(dyadic.allocate(np.array(weights)))) for prefix, weights in drafts.items()}

    def row(prefix: Tokens) -> list[int]:
        return targets[prefix[-1:]]

    def play(r: int) -> Tokens:
        chain: Tokens = ()
        for index in range(2):
            chain += (drawn(rows[chain[-1:]], r, FIRST + index),)
        qs = [rows[()], rows[chain[:1]]]
        if fast:
            verdict = verify_chain_fast(chain, qs, lambda i: np.array(row(chain[:i]), np.float64), SEED, 1, r, FIRST)
        else:
            verdict = verify_chain(chain, qs, lambda i: (np.array(row(chain[:i]), np.uint64), 8), SEED, 1, r, FIRST)
        out = tuple(verdict.committed_tokens)
        while len(out) < 2:  # the next round of the request, target-only
            out += (target_only(np.array(row(out), np.uint64), SEED, 2, r, FIRST + len(out)),)
        return out[:2]

    law = rational.target_law(lambda prefix: rational.row_of(row(prefix), 8), 3, 2)
    assert passes((play(r) for r in range(ROUNDS)), law)


# -- broken ones -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken:
    """A wrong verifier: how it plays one round, and its exact law of the first token, found without playing."""

    play: Callable[[int], int]
    law: Row


def noise(domain: Domain, r: int) -> int:
    return draw64(SEED, domain, 1, r, FIRST)


def resolve(sampled: Row, kept: Callable[[int], Fraction], corrected: Callable[[int], Row]) -> Row:
    """The law of the first token: x from `sampled`, kept with chance kept(x), else from the law corrected(x)."""
    out = [ZERO] * len(sampled)
    for token, chance in enumerate(sampled):
        out[token] += chance * kept(token)
        for other, share in enumerate(corrected(token)):
            out[other] += chance * (1 - kept(token)) * share
    return out


def ratio(p: Row, q: Row, token: int) -> Fraction:
    return rational.acceptance(p[token], q[token]) if q[token] else Fraction(1)


def told(sampled: np.ndarray, claimed: np.ndarray) -> Broken:
    """Sampled from one q, verified against another: the family of most bugs of the field. Both are counts of sum M."""
    reported = QRow(dyadic.to_q(claimed))
    s, q = (rational.row_of(counts.tolist(), MASS) for counts in (sampled, claimed))

    def play(r: int) -> int:
        token = dyadic.draw(sampled, draw24(SEED, Domain.PROPOSAL, 1, r, FIRST))
        if int(claimed[token]) == 0:
            return token  # the ratio is infinite
        if integer.accept(noise(Domain.ACCEPT, r), int(claimed[token]), P[token], TOTAL):
            return token
        return integer.pick(integer.residual(TARGET, TOTAL, reported.counts()), noise(Domain.CORRECTION, r))

    residual = rational.residual(P_ROW, q)
    return Broken(play, resolve(s, lambda x: ratio(P_ROW, q, x), lambda x: residual))


def swapped() -> Broken:
    masses = integer.residual(Q.astype(np.uint64), MASS, (TARGET * np.uint64(MASS // TOTAL)).astype(np.uint32))

    def play(r: int) -> int:
        token = drawn(DENSE, r)
        if noise(Domain.ACCEPT, r) * P[token] * MASS < int(Q[token]) * TOTAL << 64:
            return token
        return integer.pick(masses, noise(Domain.CORRECTION, r))

    residual = rational.residual(Q_ROW, P_ROW)
    return Broken(play, resolve(Q_ROW, lambda x: ratio(Q_ROW, P_ROW, x), lambda x: residual))


def unnormalised() -> Broken:
    """The residual drawn from as if it summed to 1; what the noise has beyond it falls to the last token."""
    masses = integer.residual(TARGET, TOTAL, Q)

    def play(r: int) -> int:
        token = drawn(DENSE, r)
        if integer.accept(noise(Domain.ACCEPT, r), int(Q[token]), P[token], TOTAL):
            return token
        beyond = np.append(masses, np.uint64(MASS * TOTAL) - masses.sum())
        return min(integer.pick(beyond, noise(Domain.CORRECTION, r)), SIZE - 1)

    raw = [max(p - q, ZERO) for p, q in zip(P_ROW, Q_ROW, strict=True)]
    raw[-1] += 1 - sum(raw)
    return Broken(play, resolve(Q_ROW, lambda x: ratio(P_ROW, Q_ROW, x), lambda x: raw))


def overlap(low: Fraction, high: Fraction, row: Row) -> Row:
    """The law that uniform noise in [low, high) draws from `row` by cumulative sums."""
    shares, before = [], ZERO
    for chance in row:
        shares.append(max(min(high, before + chance) - max(low, before), ZERO) / (high - low) if high > low else ZERO)
        before += chance
    return shares


def shared_with_correction() -> Broken:
    """One uniform for acceptance and correction: after a rejection it is no longer uniform. The acceptance rate stays right."""

    def play(r: int) -> int:
        return one_round(r, DENSE, False, partial(_same_noise, Domain.ACCEPT))[0]

    residual = rational.residual(P_ROW, Q_ROW)
    return Broken(
        play,
        resolve(Q_ROW, lambda x: ratio(P_ROW, Q_ROW, x), lambda x: overlap(ratio(P_ROW, Q_ROW, x), Fraction(1), residual)),
    )


def _same_noise(domain: Domain, seed: int, _domain: int, generation: int, round: int, position: int) -> int:
    return draw64(seed, domain, generation, round, position)


def shared_with_proposal() -> Broken:
    """The noise that drew the token also judges it."""

    def play(r: int) -> int:
        def draw(seed: int, domain: int, generation: int, round: int, position: int) -> int:
            own = Domain.PROPOSAL if domain == Domain.ACCEPT else Domain(domain)
            return draw64(seed, own, generation, round, position)

        return one_round(r, DENSE, False, draw)[0]

    edges = [sum(Q_ROW[:token], ZERO) for token in range(SIZE + 1)]

    def kept(token: int) -> Fraction:
        low, high = edges[token], edges[token + 1]
        return min(max(ratio(P_ROW, Q_ROW, token) - low, ZERO), high - low) / (high - low)

    residual = rational.residual(P_ROW, Q_ROW)
    return Broken(play, resolve(Q_ROW, kept, lambda x: residual))


def judged(accepts: Callable[[int, int], bool], kept: Callable[[int], Fraction], masses: np.ndarray, corrected: Row) -> Broken:
    """Another acceptance, another correction."""

    def play(r: int) -> int:
        token = drawn(DENSE, r)
        return token if accepts(token, noise(Domain.ACCEPT, r)) else integer.pick(masses, noise(Domain.CORRECTION, r))

    return Broken(play, resolve(Q_ROW, kept, lambda x: corrected))


def selected(admitted: Callable[[int], bool]) -> Broken:
    """Drafts looked at before they are verified: those that are not `admitted` are dropped, and the target goes on alone."""

    def play(r: int) -> int:
        token = drawn(DENSE, r)
        if admitted(token):
            return one_round(r, DENSE, False)[0]
        return target_only(TARGET, SEED, 2, r, FIRST)

    residual = rational.residual(P_ROW, Q_ROW)

    def law_of(token: int) -> Row:
        if not admitted(token):
            return P_ROW
        kept = ratio(P_ROW, Q_ROW, token)
        return [(1 - kept) * share + (kept if other == token else 0) for other, share in enumerate(residual)]

    return Broken(play, resolve(Q_ROW, lambda x: ZERO, law_of))


def quarters(counts: np.ndarray) -> np.ndarray:
    """q rounded to quarters, and made to sum to M again at its largest."""
    rounded = np.round(counts / (MASS / 4)).astype(np.int64) * (MASS // 4)
    rounded[int(counts.argmax())] += MASS - int(rounded.sum())
    return rounded.astype(np.uint32)


def heated(temperature: float) -> np.ndarray:
    return dyadic.allocate(dyadic.weights_from_logits(np.log(Q / MASS), temperature))


ONE_HOT = np.array([MASS, 0, 0, 0, 0], np.uint32)
BROKEN: dict[str, Callable[[], Broken]] = {
    "p and q swapped": swapped,
    "residual not normalised": unnormalised,
    "noise shared between acceptance and correction": shared_with_correction,
    "noise shared between proposal and acceptance": shared_with_proposal,
    "temperature on the draft's side only": lambda: told(heated(0.3), Q),
    "temperature on the verifier's side only": lambda: told(Q, heated(0.3)),
    "q rounded after sampling": lambda: told(Q, quarters(Q)),
    "argmax drafts, softmax q": lambda: told(ONE_HOT, Q),
    "sampled drafts, one-hot q": lambda: told(Q, ONE_HOT),
    "q of another row": lambda: told(Q, np.roll(Q, 1)),
    "selective admission": lambda: selected(lambda token: token == 2),
    "token-dependent discards": lambda: selected(lambda token: token not in (0, 4)),
    "u fixed to 0: accepted always": lambda: judged(lambda x, u: True, lambda x: Fraction(1), TARGET, P_ROW),
    "q zeros: accepted with chance p": lambda: judged(
        lambda x, u: integer.accept(u, MASS, P[x], TOTAL),
        lambda x: P_ROW[x],
        integer.residual(TARGET, TOTAL, Q),
        rational.residual(P_ROW, Q_ROW),
    ),
    "correction from p": lambda: judged(
        lambda x, u: integer.accept(u, int(Q[x]), P[x], TOTAL), lambda x: ratio(P_ROW, Q_ROW, x), TARGET, P_ROW
    ),
}


@pytest.mark.parametrize("name", tuple(BROKEN))
def test_broken_verifiers_fail(name: str) -> None:
    broken = BROKEN[name]()
    assert sum(broken.law) == 1
    off = max(abs(float(got - want)) for got, want in zip(broken.law, P_ROW, strict=True))
    assert off >= delta_needed(SIZE), f"{name} is off by {off} only: {ROUNDS} rounds cannot promise to catch it"
    tokens = [broken.play(r) for r in range(ROUNDS)]
    assert not passes(((token,) for token in tokens), {(token,): chance for token, chance in enumerate(P_ROW)})
    # It fails for the reason worked out: its own law holds (at the same false-failure rate).
    assert passes(((token,) for token in tokens), {(token,): chance for token, chance in enumerate(broken.law)})


def test_the_acceptance_rate_would_not_have_told() -> None:
    """Shared noise accepts exactly as often as the right verifier: acceptance is no test of correctness."""
    kept = []
    for shared in (False, True):
        draw = partial(_same_noise, Domain.ACCEPT) if shared else None
        verdicts = [
            verify_chain([drawn(DENSE, r)], [DENSE], lambda i: (TARGET, TOTAL), SEED, 1, r, FIRST, draw=draw) for r in range(2000)
        ]
        kept.append([verdict.accepted_drafts for verdict in verdicts])
    assert kept[0] == kept[1]


def test_the_numbers_of_the_derivation() -> None:
    assert len(BROKEN) == RUNS - 6
    assert 2 * SIZE * math.exp(-2 * ROUNDS * epsilon(SIZE) ** 2) <= ALPHA / RUNS * (1 + 1e-9)
    gap = delta_needed(SIZE) - epsilon(SIZE)
    assert math.exp(-2 * ROUNDS * gap**2) <= BETA * (1 + 1e-9)
    assert delta_needed(SIZE) < 0.065
