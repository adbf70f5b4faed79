"""The toy models, the statistic that judges a run, and the loop that says what a transported run must commit."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from numpy.typing import NDArray
from scipy.stats import chi2

from pp1q_transport import verify
from pp1q_transport.dyadic import MASS, allocate, allocate_top_k
from pp1q_transport.errors import LocalMisuse
from pp1q_transport.rng import Domain, draw24, draw64
from pp1q_transport.toy import (
    DEFAULT_VOCABULARY,
    Mode,
    PitTest,
    ToyDraft,
    ToyModels,
    ToyTarget,
    Verifier,
    chi_square_tail,
    propose,
    run_reference,
)
from pp1q_transport.toy.models import BANK_ROWS, row_of, splitmix64
from pp1q_transport.toy.pit import BINS, MIN_TOKENS, Pit, shuffled_order
from pp1q_transport.toy.reference import DEFAULT_PROMPT
from pp1q_transport.verify import MAX_TOTAL, QRow, TargetRow, Verdict, check_weights

N = 1000


@cache
def models(vocabulary: int = DEFAULT_VOCABULARY) -> ToyModels:
    return ToyModels.of(11, vocabulary)


@cache
def context_of_row(row: int) -> tuple[int, int]:
    return next((1, last) for last in range(10_000) if row_of(11, (1, last)) == row)


# ---- models -------------------------------------------------------------------------------------------------------


def test_the_row_hash_is_fixed() -> None:
    # Published first outputs of splitmix64 for states 0 and 1234567.
    assert splitmix64(0) == 0xE220A8397B1DCDAF
    assert splitmix64(1234567) == 6457827717110365317
    assert [row_of(1, tail) for tail in ((), (5,), (5, 6), (6, 5), (4, 5, 6))] == [14, 9, 12, 12, 12]
    assert {row_of(1, (3, last)) for last in range(300)} == set(range(BANK_ROWS))


@pytest.mark.parametrize("vocabulary", (64, 65, 1000, DEFAULT_VOCABULARY))
def test_target_rows_are_exact_and_read_only(vocabulary: int) -> None:
    target = models(vocabulary).target
    rows = set()
    for row in range(BANK_ROWS):
        weights, total = target.weights(context_of_row(row))
        check_weights(weights, total)
        assert MAX_TOTAL // 2 < total <= MAX_TOTAL
        assert int((weights == 0).sum()) == vocabulary // 16  # tokens that p forbids
        assert not weights.flags.writeable
        rows.add(weights.tobytes())
    assert len(rows) == BANK_ROWS


@pytest.mark.parametrize("vocabulary", (64, 1000, DEFAULT_VOCABULARY))
@pytest.mark.parametrize("mode", tuple(Mode))
def test_draft_and_target_differ_by_a_known_distance(vocabulary: int, mode: Mode) -> None:
    least = 0.40 if vocabulary > 64 else 0.25  # in a small vocabulary the two rows of a mixture overlap
    for row in range(BANK_ROWS):
        context = context_of_row(row)
        weights, total = models(vocabulary).target.weights(context)
        q = np.zeros(vocabulary)
        drafted = models(vocabulary).draft.weights(context)
        if mode is Mode.DENSE:
            q[:] = allocate(drafted)
        else:
            ids, counts = allocate_top_k(drafted, 32)
            q[ids] = counts
        assert least < float(np.abs(weights / total - q / MASS).sum()) / 2 < 0.48


def test_models_are_functions_of_seed_and_last_two_tokens() -> None:
    again, other = ToyModels.of(11, 1000), ToyModels.of(12, 1000)
    tail = (3, 4)
    assert models(1000).target.weights((9, *tail))[0].tobytes() == again.target.weights(tail)[0].tobytes()
    assert models(1000).draft.weights((9, *tail)).tobytes() == again.draft.weights(tail).tobytes()
    assert other.target.weights(tail)[0].tobytes() != again.target.weights(tail)[0].tobytes()
    assert other.draft.weights(tail).tobytes() != again.draft.weights(tail).tobytes()


@pytest.mark.parametrize("temperature", (0.25, 0.6, 1.0, 1.5, 1e-300))
def test_draft_temperature_is_a_power(temperature: float) -> None:
    draft = models(1000).draft
    plain, tempered = draft.weights((1, 2)), draft.weights((1, 2), temperature)
    assert not tempered.flags.writeable
    assert draft.weights((1, 2), temperature) is tempered or temperature == 1.0
    with np.errstate(under="ignore"):
        want = (plain / plain.max()) ** (1 / temperature)
    np.testing.assert_allclose(tempered / tempered.max(), want, rtol=1e-12)
    allocate(tempered)


def test_draft_at_temperature_zero_is_one_hot_at_the_lowest_id() -> None:
    draft = ToyDraft(11, 64)
    tied = draft._bank.copy()
    tied[:, [20, 40]] = 9.0
    draft._bank = tied
    weights = draft.weights((1, 2), 0.0)
    assert weights.nonzero()[0].tolist() == [20]
    assert weights[20] == 1.0


def test_tempered_rows_are_bounded() -> None:
    draft = ToyDraft(11, 64)
    for step in range(200):
        draft.weights((1, step), 0.5 + step / 100)
    assert len(draft._tempered) <= 32


@pytest.mark.parametrize("temperature", (-1.0, math.nan, math.inf))
def test_unusable_temperatures_are_refused(temperature: float) -> None:
    with pytest.raises(LocalMisuse, match="temperature"):
        models(64).draft.weights((1, 2), temperature)


@pytest.mark.parametrize("model", (ToyDraft, ToyTarget))
@pytest.mark.parametrize("vocabulary", (-1, 63, (1 << 20) + 1))
def test_unusable_vocabularies_are_refused(model: type[ToyDraft | ToyTarget], vocabulary: int) -> None:
    with pytest.raises(LocalMisuse, match="vocabulary"):
        model(1, vocabulary)


# ---- the statistic ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dof", (1, 2, 3, 4, 10, 63, 64, 255))
@pytest.mark.parametrize("statistic", (0.0, 1e-300, 1e-9, 0.1, 1.0, 5.0, 40.0, 63.0, 90.0, 150.0, 300.0, 900.0, 1400.0))
def test_chi_square_tail_agrees_with_scipy(statistic: float, dof: int) -> None:
    want = float(chi2.sf(statistic, dof))
    assert chi_square_tail(statistic, dof) == pytest.approx(want, rel=1e-11, abs=1e-300)


def test_chi_square_tail_at_its_ends() -> None:
    assert chi_square_tail(0.0, 63) == 1.0
    assert chi_square_tail(math.inf, 63) == 0.0
    assert chi_square_tail(1e9, 63) == 0.0


@pytest.mark.parametrize(("statistic", "dof"), ((-1.0, 63), (math.nan, 63), (1.0, 0)))
def test_chi_square_tail_refuses(statistic: float, dof: int) -> None:
    with pytest.raises(LocalMisuse, match="chi-square"):
        chi_square_tail(statistic, dof)


def test_the_order_is_a_fixed_permutation() -> None:
    order = shuffled_order(1000)
    assert sorted(order.tolist()) == list(range(1000))
    assert order[:5].tolist() == [934, 340, 37, 401, 94]


def test_u_tiles_the_unit_interval() -> None:
    """One token after another in the test's order, with the least and the greatest v each: bins only rise, 0 to 63."""
    target = models(64).target
    weights, _ = target.weights((1, 2))
    possible = [int(token) for token in shuffled_order(64) if weights[token]]
    pit = PitTest(target, MIN_TOKENS, 1)
    seen = []
    for index, token in enumerate(possible):
        for step, noise in ((2 * index, 0), (2 * index + 1, (1 << 64) - 1)):
            pit._noise[step] = noise
            before = list(pit._bins)
            pit.add((1, 2), token)
            seen.append(next(i for i in range(BINS) if pit._bins[i] != before[i]))
    assert seen == sorted(seen)
    assert (seen[0], seen[-1]) == (0, BINS - 1)
    # v = max of one token and v = 0 of the next touch: no gap between their intervals.
    assert all(later - earlier <= 1 for earlier, later in zip(seen[1::2], seen[2::2], strict=False))


def test_only_the_first_n_tokens_count() -> None:
    target = models(64).target
    pit = PitTest(target, MIN_TOKENS, 1)
    assert (pit.result().n, pit.result().p_value, pit.result().enough) == (0, 1.0, False)
    for index in range(MIN_TOKENS):
        assert not pit.result().enough
        weights, _ = target.weights((0, index))
        assert pit.add((0, index), verify.pick(weights, draw64(1, Domain.CORRECTION, 0, 0, index)))
    result = pit.result()
    assert result.enough
    assert result.n == MIN_TOKENS
    assert not pit.add((0, 1), 5)
    assert pit.result() == result


def test_a_token_that_p_forbids_is_proof() -> None:
    target = models(64).target
    weights, _ = target.weights((1, 2))
    pit = PitTest(target, MIN_TOKENS, 1)
    pit.add((1, 2), int(np.flatnonzero(weights == 0)[0]))
    result = pit.result()
    assert (result.impossible, result.p_value) == (1, 0.0)


def test_u_of_a_given_row_runs_from_its_likeliest_token() -> None:
    """Each token by itself, with the least and the greatest v: its bins are those of its place by weight, ties by ID."""
    weights = np.array([3, 0, 20, 3, 38], np.uint64)  # 64 together: a bin a unit
    places = {4: (0, 37), 2: (38, 57), 0: (58, 60), 3: (61, 63)}
    for token, (first, last) in places.items():
        for noise, due in ((0, first), ((1 << 64) - 1, last)):
            pit = Pit(5, MIN_TOKENS, 1)
            pit._noise[0] = noise
            assert pit.add_row(weights, token)
            assert pit._bins.index(1) == due
    pit = Pit(5, MIN_TOKENS, 1)
    pit.add_row(weights, 1)
    assert pit.result().p_value == 0
    with pytest.raises(LocalMisuse, match="vocabulary"):
        pit.add_row(weights, 5)


def test_the_noise_of_the_statistic_is_its_own() -> None:
    tokens = run_reference(models(64), 5, 400, 3)
    results = [judge(models(64), tokens, noise_seed=noise_seed, n=320) for noise_seed in (1, 1, 2)]
    assert results[0] == results[1] != results[2]


@pytest.mark.parametrize("token", (-1, 64))
def test_tokens_outside_the_vocabulary_are_refused(token: int) -> None:
    with pytest.raises(LocalMisuse, match="vocabulary"):
        PitTest(models(64).target, MIN_TOKENS, 1).add((1, 2), token)


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(LocalMisuse, match="at least 320"):
        PitTest(models(64).target, MIN_TOKENS - 1, 1)


# ---- right and wrong verifiers under the statistic ----------------------------------------------------------------


def judge(pair: ToyModels, tokens: Sequence[int], noise_seed: int = 77, n: int = N) -> tuple[float, float]:
    """(p-value, p-value of the statistic alone, forbidden tokens left out of account); asserts there were N tokens."""
    pit = PitTest(pair.target, n, noise_seed)
    history = list(DEFAULT_PROMPT)
    for token in tokens:
        pit.add(history[-2:], token)
        history.append(token)
    result = pit.result()
    assert result.enough
    return result.p_value, chi_square_tail(result.statistic, BINS - 1)


def wrong_verifier(
    keeps: Callable[[int, int, int, int], bool], masses: Callable[[NDArray[np.uint64], int, QRow], NDArray[np.uint64]]
) -> Verifier:
    def verifier(
        proposal_tokens: Sequence[int],
        qs: Sequence[QRow],
        target_weights_at: Callable[[int], TargetRow],
        seed: int,
        generation: int,
        round: int,
        first_position: int,
    ) -> Verdict:
        for index, (token, q) in enumerate(zip(proposal_tokens, qs, strict=True)):
            weights, total = target_weights_at(index)
            key = seed, Domain.ACCEPT, generation, round, first_position + index
            if not keeps(draw64(*key), q.count_of(token), int(weights[token]), total):
                noise = draw64(seed, Domain.CORRECTION, generation, round, first_position + index)
                return Verdict(index, [*proposal_tokens[:index], verify.pick(masses(weights, total, q), noise)])
        depth = len(proposal_tokens)
        noise = draw64(seed, Domain.CORRECTION, generation, round, first_position + depth)
        return Verdict(depth, [*proposal_tokens, verify.pick(target_weights_at(depth)[0], noise)])

    return verifier


def q_minus_p(weights: NDArray[np.uint64], total: int, q: QRow) -> NDArray[np.uint64]:
    proposed = np.zeros_like(weights)
    proposed[slice(None) if q.ids is None else q.ids] = q.counts()
    proposed *= np.uint64(total)
    np.subtract(proposed, np.minimum(proposed, weights * np.uint64(MASS)), out=proposed)
    return proposed


def p_minus_q(weights: NDArray[np.uint64], total: int, q: QRow) -> NDArray[np.uint64]:
    return verify.residual(weights, total, q.counts(), q.ids)


def swapped(u64: int, count: int, weight: int, total: int) -> bool:
    return u64 * weight * MASS < (count * total) << 64


WRONG: dict[str, Verifier] = {
    "always accepts": wrong_verifier(lambda *facts: True, p_minus_q),
    "p and q swapped": wrong_verifier(swapped, q_minus_p),
    "p and q swapped in the test alone": wrong_verifier(swapped, p_minus_q),
}


@pytest.mark.parametrize(
    ("seed", "mode"), ((1, Mode.DENSE), (2, Mode.DENSE), (1, Mode.SPARSE), (2, Mode.SPARSE), (3, Mode.SPARSE))
)
def test_the_right_verifier_passes(seed: int, mode: Mode) -> None:
    tokens = run_reference(models(), seed, 540, 5, mode)
    assert judge(models(), tokens)[0] > 1e-3


@pytest.mark.parametrize("mode", tuple(Mode))
@pytest.mark.parametrize("name", tuple(WRONG))
def test_wrong_verifiers_fail(name: str, mode: Mode) -> None:
    """Worst of six seeds each: 1e-55 (always accepts), 1e-200 (swapped), 1e-72 (swapped test)."""
    tokens = run_reference(models(), 1, 320, 5, mode, WRONG[name])
    p_value, by_statistic = judge(models(), tokens)
    assert p_value == 0.0  # some token was one that p forbids
    assert by_statistic < 1e-9


def test_a_target_of_another_seed_fails() -> None:
    tokens = run_reference(models(1000), 1, 560, 5)
    assert judge(ToyModels.of(12, 1000), tokens)[1] < 1e-9


# ---- the loop -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", tuple(Mode))
def test_same_seeds_same_tokens(mode: Mode) -> None:
    tokens = run_reference(models(1000), 3, 40, 5, mode)
    assert tokens == run_reference(ToyModels.of(11, 1000), 3, 40, 5, mode)
    assert tokens != run_reference(models(1000), 4, 40, 5, mode)
    shorter = run_reference(models(1000), 3, 20, 5, mode)
    assert tokens[: len(shorter)] == shorter


def test_the_committed_sequence_is_known() -> None:
    """Golden: a change of the models, the RNG, the allocation or the verifier shows here first."""
    assert run_reference(models(1000), 3, 4, 5)[:8] == [624, 402, 810, 390, 153, 103, 365, 670]
    assert run_reference(models(1000), 3, 4, 5, Mode.SPARSE)[:8] == [624, 402, 810, 389, 103, 103, 693, 810]


@pytest.mark.parametrize("mode", tuple(Mode))
def test_rounds_generations_and_positions(mode: Mode) -> None:
    """The loop written out a second time, a round at a time, with rounds 1 and 2 lost."""
    pair, prompt, seed, temperature = models(1000), (7, 8, 9), 21, 0.8
    calls: list[tuple[int, int, int, int]] = []

    def spy(
        proposal_tokens: Sequence[int],
        qs: Sequence[QRow],
        target_weights_at: Callable[[int], TargetRow],
        seed: int,
        generation: int,
        round: int,
        first_position: int,
    ) -> Verdict:
        calls.append((seed, generation, round, first_position))
        history = [*prompt, *done]
        for index, token in enumerate(proposal_tokens):
            u24 = draw24(seed, Domain.PROPOSAL, generation, round, first_position + index)
            again, q = propose(pair.draft.weights(history, temperature), mode, 8, u24)
            assert again == token
            assert q.values.tobytes() == qs[index].values.tobytes()
            assert target_weights_at(index)[0].tobytes() == pair.target.weights(history)[0].tobytes()
            history.append(token)
        assert target_weights_at(len(qs))[0].tobytes() == pair.target.weights(history)[0].tobytes()
        verdict = verify.verify_chain(proposal_tokens, qs, target_weights_at, seed, generation, round, first_position)
        done.extend(verdict.committed_tokens)
        if round == 0:
            for lost in (1, 2):
                weights, _ = pair.target.weights([*prompt, *done])
                done.append(verify.target_only(weights, seed, lost, lost, len(prompt) + len(done)))
        return verdict

    done: list[int] = []
    got = run_reference(
        pair, seed, 5, 3, mode, spy, prompt=prompt, support=8, temperature=temperature, discarded={1, 2}
    )
    assert got == done
    assert [call[:3] for call in calls] == [(seed, 0, 0), (seed, 2, 3), (seed, 2, 4)]
    assert calls[0][3] == len(prompt)


@pytest.mark.parametrize(("prompt", "rounds", "depth"), (((), 1, 1), ((1,), 0, 1), ((1,), 1, 0)))
def test_empty_runs_are_refused(prompt: tuple[int, ...], rounds: int, depth: int) -> None:
    with pytest.raises(LocalMisuse, match="a run needs"):
        run_reference(models(64), 1, rounds, depth, prompt=prompt)
