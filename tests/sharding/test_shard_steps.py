"""The native steps of sharded verification against their plain Python twin, message by message, and what they refuse."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pp1q_transport import dyadic
from pp1q_transport._native import kernels, shards_oracle
from pp1q_transport.dyadic import MASS
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.sharding import (
    Exchange,
    ShardTarget,
    accept_sharded,
    correct_sharded,
    emulate,
    pick_sharded,
    shards_of,
    target_sharded,
)
from pp1q_transport.sharding.exchange import combine
from pp1q_transport.verify import FastTarget, QRow
from pp1q_transport.verify import integer as verify

END = 1 << 64


@st.composite
def edges_of(draw: st.DrawFn) -> tuple[int, ...]:
    """1 to 8 shards of up to 1,500 tokens; some may be empty."""
    vocabulary = draw(st.integers(1, 1500))
    inner = sorted(draw(st.lists(st.integers(0, -(-vocabulary // 32)), max_size=7)))
    return (0, *(min(32 * edge, vocabulary) for edge in inner), vocabulary)


class Rank:
    """One rank, natively and in plain Python, with its own part of the weights and of q."""

    def __init__(self, number: int, edges: tuple[int, ...], weights: NDArray[np.floating], q: QRow) -> None:
        self.target = ShardTarget(shards_of(edges)[number])
        self.row = self.target.row
        self.twin = shards_oracle.ShardOracle(number, edges)
        first, end = edges[number], edges[number + 1]
        self.weights = weights[first:end].copy()
        self.ids = None
        if q.ids is None:
            self.values = q.values[first:end].copy()
        else:
            inside = (q.ids >= first) & (q.ids < end)
            self.values, self.ids = q.values[inside].copy(), q.ids[inside].copy()
        self.id_list = None if self.ids is None else self.ids.tolist()


def sent(ranks: list[Rank], name: str) -> list[NDArray[np.generic]]:
    """What all ranks put into one of their messages, as a collective gives it to each."""
    exchanges: list[Exchange] = [getattr(rank.target, name) for rank in ranks]
    return combine(exchanges)


def same(ranks: list[Rank], name: str, twins: list[list[int]] | list[list[float]]) -> list[NDArray[np.generic]]:
    answer = sent(ranks, name)
    assert [message.tolist() for message in answer] == twins, name
    return answer


def told(ranks: list[Rank], twins: list[int]) -> int:
    """The token that all ranks hear of, natively and by the twins."""
    answer = sent(ranks, "told")
    tokens = {rank.row.token_told(answer) for rank in ranks}
    assert tokens == {sum(twins)}
    return tokens.pop()


@settings(max_examples=120, deadline=None)
@given(edges_of(), st.integers(0, 2**32), st.sampled_from((np.float32, np.float64)), st.sampled_from((None, 1, 40)))
def test_every_message_is_the_twin_s(edges: tuple[int, ...], seed: int, dtype: type, support: int | None) -> None:
    noise = np.random.default_rng(seed)
    size = edges[-1]
    logits = noise.normal(size=size) * 4
    weights = (np.exp(logits) * (noise.random(size) < 0.7)).astype(dtype)
    weights[int(noise.integers(size))] = 3
    draft = np.exp(logits + noise.normal(size=size))
    if support is None:
        counts = dyadic.allocate(draft)
        q, token = QRow(dyadic.to_q(counts)), dyadic.draw(counts, int(noise.integers(MASS)))
    else:
        ids, counts = dyadic.allocate_top_k(draft, support)
        q, token = QRow(dyadic.to_q(counts), ids), dyadic.draw_sparse(ids, counts, int(noise.integers(MASS)))
    ranks = [Rank(number, edges, weights, q) for number in range(len(edges) - 1)]
    for u64 in (0, END - 1, int(noise.integers(END, dtype=np.uint64))):
        own = [u64 if number == 0 else None for number in range(len(ranks))]
        for rank in ranks:
            rank.row.begin(rank.weights)
        nodes = same(ranks, "nodes", twins := [rank.twin.nodes(rank.weights.tolist()) for rank in ranks])
        assert {rank.row.fix_by(nodes) for rank in ranks} == {rank.twin.fix(twins) for rank in ranks} == {0}
        for wanted in (-1, token):  # first a draw from p, as the bonus is
            for rank, noise_of in zip(ranks, own, strict=True):
                rank.row.put_facts(wanted, rank.values, rank.ids, noise_of)
            facts = [r.twin.facts(wanted, r.values.tolist(), r.id_list, n) for r, n in zip(ranks, own, strict=True)]
            answer = same(ranks, "facts", facts)
            if wanted < 0:
                for rank in ranks:
                    rank.row.choose(answer)
                assert weights[told(ranks, [rank.twin.chosen(facts) for rank in ranks])] > 0
            else:
                assert {rank.row.verdict(answer) for rank in ranks} == {rank.twin.verdict(facts) for rank in ranks}
        assert {rank.row.shard_masses() for rank in ranks} == {tuple(ranks[0].twin.masses)}
        for rank, noise_of in zip(ranks, own, strict=True):
            rank.row.put_residual(rank.values, rank.ids, noise_of)
        left = [r.twin.residual(r.values.tolist(), r.id_list, n) for r, n in zip(ranks, own, strict=True)]
        answer = same(ranks, "residual", left)
        made = [rank.twin.chosen_residual(left) for rank in ranks]
        assert [rank.row.choose_residual(answer) for rank in ranks] == [code for code, _ in made]
        if made[0][0] == 0:
            assert weights[told(ranks, [token for _, token in made])] > 0


def settled(weights: NDArray[np.floating] | None = None) -> list[ShardTarget]:
    """Two ranks of 64 tokens that know all masses."""
    whole = np.arange(64, dtype=np.float32) if weights is None else weights
    return emulate([target_sharded(shard, whole[shard.first_id : shard.end_id]) for shard in shards_of([0, 32, 64])])


@pytest.mark.parametrize(
    "bits", (0, 0x80000000, 1, 0x33800000, 0x3F800000, 0x3F800001, 0x40000000, 0x7F800000, 0x7FC00000, 0xBF000000)
)
def test_a_count_that_is_none_is_told_as_such(bits: int) -> None:
    (value,) = struct.unpack("<f", struct.pack("<I", bits))
    values = np.zeros(32, np.float32)
    values.view(np.uint32)[5] = bits
    for q in ((values, None), (values[5:6], np.array([5], np.int32))):
        target = settled()[0]
        target.row.put_facts(5, *q, 7)
        twin = shards_oracle.count_at([value], [5], 5)
        assert target.facts.value.tolist()[3:] == [twin or 0, Reason.NONDYADIC.code if twin is None else 0]
        if twin is not None:
            assert twin == QRow(values).count_of(5)


def test_a_target_is_used_again() -> None:
    shards = shards_of([0, 32, 64])
    kept = [ShardTarget(shard) for shard in shards]
    q = QRow(np.full(32, 1 / 64, np.float32))
    for round_ in range(3):
        weights = np.random.default_rng(round_).random(64)
        own = [weights[shard.first_id : shard.end_id] for shard in shards]
        used = emulate([target_sharded(s, part, into) for s, part, into in zip(shards, own, kept, strict=True)])
        assert used == kept
        fresh = settled(weights)
        for u64 in (0, 1 << 63, END - 1):
            noise = (u64, None)
            ours = [(pick_sharded(t, u), correct_sharded(t, q, u)) for t, u in zip(kept, noise, strict=True)]
            theirs = [(pick_sharded(t, u), correct_sharded(t, q, u)) for t, u in zip(fresh, noise, strict=True)]
            assert emulate([pick for pick, _ in ours]) == emulate([pick for pick, _ in theirs])
            assert emulate([correct for _, correct in ours]) == emulate([correct for _, correct in theirs])


def begun() -> kernels.ShardedRow:
    row = ShardTarget(shards_of([0, 32, 64])[0]).row
    row.begin(np.ones(32, np.float32))
    return row


def begun_badly() -> kernels.ShardedRow:
    """What was held before is let go; nothing may read it."""
    row = begun()
    with pytest.raises(ValueError, match="31 weights"):
        row.begin(np.ones(31, np.float32))
    return row


def begun_bad() -> kernels.ShardedRow:
    """Weights that are none."""
    row = begun()
    assert row.begin(np.full(32, math.nan, np.float32)) == Reason.INVALID_WEIGHTS.code
    return row


def reloaded() -> kernels.ShardedRow:
    """Fewer weights than the shard has, by the methods of the row that is no shard's."""
    row = begun()
    row.load(np.ones(16, np.float32).view(np.uint8), 0, 16, False)
    assert row.fix() == 0
    return row


def answered(words: int, **changes: int) -> list[NDArray[np.uint64]]:
    """An answer as two ranks that hold 2^49 each might give it, rank 0's noise being 7, with words changed."""
    parts = [np.zeros(words, np.uint64) for _ in range(2)]
    parts[0][:2], parts[1][0] = (1 << 49, 7), 1 << 49
    for at, value in changes.items():
        parts[int(at[1])][int(at[3])] = value
    return parts


def with_facts() -> kernels.ShardedRow:
    """Rank 0 of two, which has sent what it knows of token 40."""
    target = settled(np.ones(64, np.float32))[0]
    target.row.put_facts(40, None, None, 7)
    return target.row


F32, WORDS = np.zeros(32, np.float32), np.zeros(5, np.uint64)


@pytest.mark.parametrize(
    ("call", "text"),
    (
        (lambda: kernels.ShardedRow(2, [0, 32, 64]), "rank 2 of 2"),
        (lambda: kernels.ShardedRow(-1, [0, 64]), "rank -1"),
        (lambda: kernels.ShardedRow(0, [0]), "0 shards"),
        (lambda: kernels.ShardedRow(0, range(0, 32 * 66, 32)), "65 shards"),
        (lambda: kernels.ShardedRow(0, [32, 64]), "begin at 0"),
        (lambda: kernels.ShardedRow(0, [0, 64, 32]), "never fall"),
        (lambda: kernels.ShardedRow(0, [0, 0]), "size"),
        (lambda: kernels.ShardedRow(0, [0, 1 << 31]), "size"),
        (lambda: kernels.ShardedRow(0, [0, 33, 64]), "multiples of 32"),
        (lambda: kernels.ShardedRow(0, [0, 64]).begin(F32), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).choose_residual(answered(5)), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).put_facts(-1, None, None, 7), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).settle(answered(5)), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).choose(answered(5)), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).verdict(answered(5)), "no messages are bound"),
        (lambda: kernels.ShardedRow(0, [0, 64]).bind(np.zeros(2), WORDS, WORDS, np.zeros(1, np.int64)), "1 nodes"),
        (lambda: kernels.ShardedRow(0, [0, 64]).bind(np.zeros(1), WORDS[1:], WORDS, np.zeros(1, np.int64)), "5 words"),
        (lambda: begun().begin(np.ones(31, np.float32)), "31 weights"),
        (lambda: begun().begin(np.ones((2, 16), np.float32)), "one-dimensional"),
        (lambda: begun().begin(np.ones(64, np.float32)[::2]), "contiguous"),
        (lambda: begun().begin(np.ones(32, np.int32)), "float32 or float64"),
        (lambda: begun().put_facts(-1, None, None, 7), "no integers yet"),
        (lambda: begun().settle(answered(5)), "no integers yet"),
        (lambda: begun().put_residual(F32, None, 7), "not known"),
        (lambda: begun().shard_masses(), "not known"),
        (lambda: begun().fix_by([np.ones(1)]), "1 ranks, not 2"),
        (lambda: begun().fix_by([np.ones(1), np.ones(2)]), "rank 1 sent"),
        (lambda: begun().fix_by([np.ones(1), np.ones(2, np.float32)]), "rank 1 sent"),
        (lambda: begun().fix_by([np.full(1, 31.0), np.full(1, 32.0)]), "order of ranks"),
        (lambda: begun_bad().fix_by([np.ones(1), np.ones(1)]), "sent none"),
        (lambda: settled()[0].row.fix_by([np.ones(1), np.ones(1)]), "call begin first"),
        (lambda: settled()[0].row.put_facts(64, F32, None, 7), "outside the target's vocabulary"),
        (lambda: settled()[0].row.put_facts(-2, F32, None, 7), "outside the target's vocabulary"),
        (lambda: settled()[0].row.put_facts(3, F32, None, None), "noise is rank 0's alone"),
        (lambda: settled()[0].row.put_facts(3, F32, None, END), "noise is rank 0's alone"),
        (lambda: settled()[1].row.put_facts(3, F32, None, 7), "noise is rank 0's alone"),
        (lambda: settled()[0].row.put_facts(3, F32[1:], None, 7), "31 entries"),
        (lambda: settled()[0].row.put_facts(3, F32.astype(np.float64), None, 7), "q must be float32"),
        (lambda: settled()[0].row.put_facts(3, F32[:2], np.zeros(3, np.int32), 7), "3 IDs and 2 values"),
        (lambda: settled()[0].row.put_facts(3, F32[:2], np.zeros(2, np.int64), 7), "int32"),
        (lambda: settled()[0].row.put_residual(F32, None, None), "noise is rank 0's alone"),
        (lambda: settled()[0].row.verdict([t.facts.value for t in settled()]), "no token"),
        (lambda: with_facts().verdict(answered(5, r0w0=(1 << 49) + 1)), "order of ranks"),
        (lambda: with_facts().verdict(answered(5, r1w0=(1 << 52) + 1)), "more than 2\\^52"),
        (lambda: with_facts().verdict(answered(5, r1w0=1 << 52)), "more than 2\\^52"),
        (lambda: with_facts().verdict(answered(5, r1w2=1, r1w3=MASS + 1)), "no probabilities"),
        (lambda: with_facts().verdict(answered(5, r1w2=(1 << 50) + 1, r1w3=1)), "no probabilities"),
        (lambda: with_facts().verdict(answered(5, r1w4=99)), "reason 99"),
        (lambda: with_facts().verdict(answered(5, r1w4=1 << 40)), "reason"),
        (lambda: reloaded().put_facts(30, F32[:16], None, 7), "beyond the 16 weights"),
        (lambda: begun_badly().block_sums(np.zeros(1)), "0 weights"),
        (lambda: begun().token_told([np.array([64])]), "no token of the vocabulary"),
        (lambda: begun().token_told([np.array([-1])]), "no token of the vocabulary"),
        (lambda: begun().token_told([np.array([1]), np.array([1])]), "one array"),
    ),
)  # fmt: skip
def test_what_does_not_fit_is_refused(call: Callable[[], object], text: str) -> None:
    with pytest.raises((ValueError, BufferError), match=text):
        call()


@pytest.mark.parametrize("bad", (math.nan, math.inf, -1.0, -0.0))
def test_bad_weights_are_told_by_sending_nothing(bad: float) -> None:
    edges = (0, 32, 64)
    weights = np.ones(64, np.float32)
    weights[40] = bad
    ranks = [Rank(number, edges, weights, QRow(np.full(64, 1 / 64, np.float32))) for number in range(2)]
    sent_by = [shards_oracle.ShardOracle(number, edges).nodes(rank.weights.tolist()) for number, rank in enumerate(ranks)]
    assert sent_by == [[32.0], []]
    assert [rank.row.begin(rank.weights) for rank in ranks] == [0, Reason.INVALID_WEIGHTS.code]
    assert {rank.row.fix_by([np.array(part) for part in sent_by]) for rank in ranks} == {Reason.INVALID_WEIGHTS.code}
    assert {rank.twin.fix(sent_by) for rank in ranks} == {Reason.INVALID_WEIGHTS.code}


def test_a_residual_that_is_none_is_not_drawn_from() -> None:
    target = settled(np.ones(64, np.float32))[0]
    target.row.put_residual(np.full(32, math.nan, np.float32), None, 7)
    assert target.residual.value[1] == Reason.NONFINITE.code
    with pytest.raises(ValueError, match="no residual"):
        target.row.pick_residual(0, 0)
    target.row.put_residual(np.full(32, 1 / 64, np.float32), None, 7)
    target.row.put_facts(3, np.zeros(32, np.float32), None, 7)  # another q is held now
    with pytest.raises(ValueError, match="no residual"):
        target.row.pick_residual(0, 0)


def test_the_generators_say_it_as_misuse() -> None:
    with pytest.raises(LocalMisuse, match="31 entries"):
        next(correct_sharded(settled()[0], QRow(F32[1:]), 7))
    with pytest.raises(LocalMisuse, match="contiguous"):
        next(target_sharded(shards_of([0, 32, 64])[0], np.ones(64, np.float32)[::2]))


# -- what a caller may hand over by mistake, sharded and not ------------------------------------------------------------

ODD_WEIGHTS = np.random.default_rng(4).random(64)
HALVES = np.zeros(64, np.float32)
HALVES[[3, 40]] = 0.5


def one_shard() -> ShardTarget:
    """A rank that has everything, and the masses of all."""
    return emulate([target_sharded(shards_of([0, 64])[0], ODD_WEIGHTS)])[0]


@pytest.mark.parametrize("u64", (0, 5, 1 << 63, END - 1))
def test_noise_is_the_same_number_in_any_integer_type(u64: int) -> None:
    """A product with NumPy's 64 bits would wrap, and the token be another."""
    q, target = QRow(HALVES), FastTarget(ODD_WEIGHTS)
    expected = target.accept(3, q, u64), target.pick(u64), target.correct(q, u64)
    weights, counts = np.array(target.integers(), np.uint64) >> np.uint64(16), 1 << 23
    total = int(weights.sum())
    exact = verify.accept(u64, counts, int(weights[3]), total), verify.pick(weights, u64)
    for same in (np.uint64(u64), np.array(u64, np.uint64)[()]):
        assert (target.accept(3, q, same), target.pick(same), target.correct(q, same)) == expected
        assert (verify.accept(same, counts, int(weights[3]), total), verify.pick(weights, same)) == exact
        sharded = [emulate([step])[0] for step in (accept_sharded(one_shard(), 3, q, same), pick_sharded(one_shard(), same))]
        assert (*sharded, emulate([correct_sharded(one_shard(), q, same)])[0]) == expected


@pytest.mark.parametrize("u64", (0.37, 1.0, np.float32(0.5), -1, END, None, "1"))
def test_noise_that_is_no_64_bit_integer_is_refused(u64: Any) -> None:
    """A uniform float, as engines draw it, would be 0 as an integer: everything would be accepted."""
    q, target = QRow(HALVES), FastTarget(ODD_WEIGHTS)
    calls: tuple[Callable[[], object], ...] = (
        lambda: target.accept(3, q, u64),
        lambda: target.pick(u64),
        lambda: target.correct(q, u64),
        lambda: verify.accept(u64, 1, 1, 2),
        lambda: verify.pick(np.ones(2, np.uint64), u64),
        lambda: emulate([accept_sharded(one_shard(), 3, q, u64)]),
        lambda: emulate([pick_sharded(one_shard(), u64)]),
        lambda: emulate([correct_sharded(one_shard(), q, u64)]),
    )
    for call in calls:
        with pytest.raises(LocalMisuse, match="noise"):
            call()


@pytest.mark.parametrize("token", (1 << 63, 1 << 70, -(1 << 70), 64, -2, 3.0, None, "3"))
def test_a_token_that_is_none_is_refused_by_name(token: Any) -> None:
    with pytest.raises(LocalMisuse, match="outside the target's vocabulary of 64"):
        emulate([accept_sharded(one_shard(), token, QRow(HALVES), 7)])


@pytest.mark.parametrize("q", (([0.5, 0.5], None), (HALVES[[3, 40]], [3, 40]), (None, None)))
def test_a_q_that_is_no_array_is_refused_by_name(q: Any) -> None:
    for steps in (accept_sharded(one_shard(), 3, QRow(*q), 7), correct_sharded(one_shard(), QRow(*q), 7)):
        with pytest.raises(LocalMisuse, match="must be an array, not"):
            emulate([steps])
