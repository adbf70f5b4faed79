"""Any split of a vocabulary into 1 to 8 shards against one process that holds it whole: the same bits, draws and refusals."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from pp1q_transport import dyadic, greedy, sharding
from pp1q_transport._native import kernels, verify_oracle
from pp1q_transport.dyadic import MASS
from pp1q_transport.errors import InvalidQ, LocalMisuse, Reason
from pp1q_transport.rng import Domain, draw64
from pp1q_transport.sharding import Exchange, Op, Shard, ShardRow, Steps, Traffic, emulate, shards_of
from pp1q_transport.sharding.exchange import block_edges, node_values, root
from pp1q_transport.verify import FastTarget, KeyGuard, QRow, verify_chain_fast

END = 1 << 64
QUICK = settings(max_examples=150, deadline=None)


@st.composite
def splits(draw: st.DrawFn, most: int = 40) -> tuple[Shard, ...]:
    """1 to 8 shards of a vocabulary of up to 32 * `most` tokens; some of them may be empty."""
    vocabulary = draw(st.integers(1, 32 * most))
    blocks = -(-vocabulary // 32)
    inner = sorted(draw(st.lists(st.integers(0, blocks), max_size=7)))
    return shards_of([0, *(min(32 * edge, vocabulary) for edge in inner), vocabulary])


KINDS: dict[str, Callable[[np.random.Generator, int], NDArray[np.float64]]] = {
    "spread": lambda noise, n: np.exp(noise.normal(size=n) * 4),
    "equal": lambda noise, n: np.ones(n),
    "few values": lambda noise, n: noise.integers(0, 3, n).astype(np.float64),
    "few positive": lambda noise, n: np.where(noise.random(n) < 0.03, noise.random(n), 0.0),
    "one-hot": lambda noise, n: np.eye(1, n, int(noise.integers(n)))[0],
    "tiny": lambda noise, n: noise.random(n) * 1e-310,
    "ties at a remainder": lambda noise, n: np.where(noise.random(n) < 0.5, 1.0, 1.0 / 3.0),
    "one shard's": lambda noise, n: np.where(np.arange(n) < 32, noise.random(n), 0.0),
}


@st.composite
def weights_and_split(draw: st.DrawFn) -> tuple[tuple[Shard, ...], NDArray[np.float64]]:
    shards = draw(splits())
    made = KINDS[draw(st.sampled_from(sorted(KINDS)))](np.random.default_rng(draw(st.integers(0, 2**32))), shards[-1].end_id)
    return shards, made


def parts(shards: tuple[Shard, ...], whole: NDArray[np.generic]) -> list[NDArray[np.generic]]:
    return [whole[shard.first_id : shard.end_id].copy() for shard in shards]


def outcome(call: Callable[[], object]) -> object:
    """What a call returns, or the reason it refuses with."""
    try:
        return call()
    except InvalidQ as error:
        return error.reason
    except LocalMisuse:
        return "misuse"


def on_all(steps: Callable[[Shard, NDArray[np.generic]], Steps[ShardRow]], shards: tuple[Shard, ...], whole: NDArray[np.generic]):
    return emulate([steps(shard, part) for shard, part in zip(shards, parts(shards, whole), strict=True)])


def joined(rows: list[ShardRow]) -> tuple[list[int], list[int]]:
    """(IDs, counts) of all shards; IDs empty when dense."""
    counts = [int(count) for row in rows for count in row.counts]
    return [int(token) for row in rows if row.ids is not None for token in row.ids], counts


# -- building q --------------------------------------------------------------------------------------------------------


@QUICK
@given(weights_and_split())
def test_counts_equal_the_unsharded_ones(given: tuple[tuple[Shard, ...], NDArray[np.float64]]) -> None:
    shards, whole = given
    want = outcome(lambda: dyadic.allocate(whole).tolist())
    got = outcome(lambda: joined(on_all(sharding.allocate_sharded, shards, whole))[1])
    assert got == want


@QUICK
@given(weights_and_split(), st.integers(1, 200))
def test_support_and_its_counts_equal_the_unsharded_ones(
    given: tuple[tuple[Shard, ...], NDArray[np.float64]], k: int
) -> None:
    shards, whole = given

    def unsharded() -> object:
        ids, counts = dyadic.allocate_top_k(whole, k)
        return ids.tolist(), counts.tolist()

    got = outcome(lambda: joined(on_all(lambda s, w: sharding.allocate_top_k_sharded(s, w, k), shards, whole)))
    assert got == outcome(unsharded)


@QUICK
@given(weights_and_split(), st.lists(st.integers(0, MASS - 1), max_size=5), st.booleans())
def test_draws_equal_the_unsharded_ones(
    given: tuple[tuple[Shard, ...], NDArray[np.float64]], noise: list[int], sparse: bool
) -> None:
    shards, whole = given
    if not whole.any():
        return
    if sparse:
        rows = on_all(lambda s, w: sharding.allocate_top_k_sharded(s, w, 20), shards, whole)
        ids, counts = dyadic.allocate_top_k(whole, 20)
    else:
        rows = on_all(sharding.allocate_sharded, shards, whole)
        ids, counts = np.arange(len(whole)), dyadic.allocate(whole)
    edges = [row.mass_before for row in rows if row.mass_before < MASS]
    for u24 in {0, MASS - 1, *noise, *edges, *(max(edge - 1, 0) for edge in edges)}:
        tokens = emulate([sharding.draw_sharded(row, u24) for row in rows])
        assert tokens == [dyadic.draw_sparse(ids, counts, u24)] * len(shards)
    for row in rows:
        assert row.mass == int(row.counts.sum(dtype=np.uint64))
        assert row.mass_before == sum(other.mass for other in rows[: row.shard.rank])


@QUICK
@given(splits(), st.integers(0, 2**32), st.sampled_from((0.0, 0.5, 1.0, 2.0)), st.booleans())
def test_weights_equal_the_unsharded_ones(shards: tuple[Shard, ...], seed: int, temperature: float, biased: bool) -> None:
    noise = np.random.default_rng(seed)
    size = shards[-1].end_id
    logits = noise.integers(-9, 3, size).astype(np.float32) if seed % 2 else noise.normal(size=size).astype(np.float32) * 9
    logits[noise.random(size) < 0.2] = -np.inf
    bias = noise.normal(size=size) if biased else None
    want = outcome(lambda: dyadic.weights_from_logits(logits, temperature, bias).tobytes())
    ranks = []
    for s in shards:
        own_bias = None if bias is None else bias[s.first_id : s.end_id]
        ranks.append(sharding.weights_sharded(s, logits[s.first_id : s.end_id], temperature, own_bias))
    assert outcome(lambda: b"".join(weights.tobytes() for weights in emulate(ranks))) == want


@pytest.mark.parametrize("temperature", (0.0, 1.0))
@pytest.mark.parametrize("bad", (math.nan, math.inf))
@pytest.mark.parametrize("at", (0, 40, 99))
def test_bad_logits_are_refused_on_every_rank(bad: float, at: int, temperature: float) -> None:
    shards = shards_of([0, 32, 64, 100])
    logits = np.zeros(100)
    logits[at] = bad
    with pytest.raises(InvalidQ) as caught:
        on_all(lambda s, part: sharding.weights_sharded(s, part, temperature), shards, logits)
    assert caught.value.reason is Reason.INVALID_WEIGHTS


@pytest.mark.parametrize("build", (sharding.allocate_sharded, lambda s, w: sharding.allocate_top_k_sharded(s, w, 3)))
@pytest.mark.parametrize("bad", (math.nan, math.inf, -1.0, -0.0))
@pytest.mark.parametrize("at", (0, 40, 99))
def test_bad_weights_are_refused_on_every_rank(bad: float, at: int, build: Callable[..., Steps[ShardRow]]) -> None:
    weights = np.ones(100)
    weights[at] = bad
    with pytest.raises(InvalidQ) as caught:
        on_all(build, shards_of([0, 32, 64, 100]), weights)
    assert caught.value.reason is Reason.INVALID_WEIGHTS


@pytest.mark.parametrize("weights", (np.zeros(100), np.full(100, 1.5e308), np.full(100, 1e302), np.zeros(100) + 5e-324))
def test_odd_sums_go_as_unsharded(weights: NDArray[np.float64]) -> None:
    want = outcome(lambda: dyadic.allocate(weights).tolist())
    assert outcome(lambda: joined(on_all(sharding.allocate_sharded, shards_of([0, 64, 100]), weights))[1]) == want


def test_local_normalisation_would_differ() -> None:
    """The bug that the global steps are there against: each shard allocating by itself."""
    whole = KINDS["spread"](np.random.default_rng(3), 320)
    shards = shards_of([0, 96, 320])
    local = [dyadic.allocate(part) for part in parts(shards, whole)]
    assert (np.concatenate(local) // 2).tolist() != dyadic.allocate(whole).tolist()
    assert joined(on_all(sharding.allocate_sharded, shards, whole))[1] == dyadic.allocate(whole).tolist()


# -- the tree ----------------------------------------------------------------------------------------------------------


@QUICK
@given(splits(200), st.integers(0, 2**32))
def test_the_root_is_the_tree_s(shards: tuple[Shard, ...], seed: int) -> None:
    edges = block_edges(shards[0].edges)
    sums = np.exp(np.random.default_rng(seed).normal(size=int(edges[-1])) * 20)
    own = [node_values(s, sums[edges[s.rank] : edges[s.rank + 1]]) for s in shards]
    nodes = np.concatenate(own).tolist()
    assert root(shards[0].edges, own) == kernels.tree_sum(sums) == verify_oracle.tree_root(edges.tolist(), nodes)
    assert len(nodes) <= 2 * len(shards) * len(sums).bit_length()
    for shard, values in zip(shards, own, strict=True):
        first, end = int(edges[shard.rank]), int(edges[shard.rank + 1])
        covered = verify_oracle.tree_nodes(first, end, len(sums))
        leaves = [sums[index << level : min((index + 1) << level, len(sums))] for level, index in covered]
        assert values.tolist() == [kernels.tree_sum(part) for part in leaves]


def test_nodes_cover_their_leaves_once() -> None:
    for blocks in range(1, 40):
        for first in range(blocks + 1):
            for end in range(first, blocks + 1):
                leaves = [
                    leaf
                    for level, index in verify_oracle.tree_nodes(first, end, blocks)
                    for leaf in range(index << level, min((index + 1) << level, blocks))
                ]
                assert leaves == list(range(first, end))
                out = np.empty(128)
                found = kernels.tree_nodes(np.ones(end - first), first, blocks, out)
                assert found == len(verify_oracle.tree_nodes(first, end, blocks))
                assert out[:found].sum() == end - first


@pytest.mark.parametrize(
    "call",
    (
        lambda: kernels.tree_nodes(np.ones(3), 0, 2, np.empty(128)),
        lambda: kernels.tree_nodes(np.ones(3), -1, 9, np.empty(128)),
        lambda: kernels.tree_nodes(np.ones(3), 7, 9, np.empty(128)),
        lambda: kernels.tree_nodes(np.ones(3), 0, 3, np.empty(127)),
        lambda: kernels.tree_root(np.array([0], np.uint32), np.empty(0)),
        lambda: kernels.tree_root(np.array([1, 2], np.uint32), np.empty(1)),
        lambda: kernels.tree_root(np.array([0, 2, 1], np.uint32), np.empty(1)),
        lambda: kernels.tree_root(np.array([0, 2], np.uint32), np.empty(2)),
        lambda: kernels.tree_root(np.array([0, 1 << 31], np.uint32), np.empty(1)),
    ),
)
def test_the_binding_checks_the_tree(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"."):
        call()


# -- verification ------------------------------------------------------------------------------------------------------


class World:
    """One target row and one q over a vocabulary, whole and in shards."""

    def __init__(self, shards: tuple[Shard, ...], seed: int, dtype: type, sparse: bool) -> None:
        noise = np.random.default_rng(seed)
        size = shards[-1].end_id
        logits = noise.normal(size=size) * 3
        self.weights = (np.exp(logits) * 2.0 ** int(noise.integers(-40, 40))).astype(dtype)
        for shard in shards:
            if noise.random() < 0.3:
                self.weights[shard.first_id : shard.end_id] = 0  # a shard without mass
        self.weights[int(noise.integers(size))] = self.weights.max() or 1
        draft = np.exp(logits + noise.normal(size=size))
        if sparse:
            ids, counts = dyadic.allocate_top_k(draft, 1 + int(noise.integers(40)))
            self.q = QRow(dyadic.to_q(counts), ids)
            self.token = dyadic.draw_sparse(ids, counts, int(noise.integers(MASS)))
        else:
            counts = dyadic.allocate(draft)
            self.q = QRow(dyadic.to_q(counts))
            self.token = dyadic.draw(counts, int(noise.integers(MASS)))
        self.shards = shards
        self.u64 = int(noise.integers(END, dtype=np.uint64))
        self.noise = [self.u64 if shard.rank == 0 else None for shard in shards]

    def own_q(self, shard: Shard) -> QRow:
        if self.q.ids is None:
            return QRow(self.q.values[shard.first_id : shard.end_id].copy())
        inside = (self.q.ids >= shard.first_id) & (self.q.ids < shard.end_id)
        return QRow(self.q.values[inside].copy(), self.q.ids[inside].copy())

    def targets(self) -> list[sharding.ShardTarget]:
        return on_all(sharding.target_sharded, self.shards, self.weights)  # type: ignore[return-value]


@QUICK
@given(splits(), st.integers(0, 2**32), st.sampled_from((np.float32, np.float64)), st.booleans())
def test_verdicts_equal_the_unsharded_ones(shards: tuple[Shard, ...], seed: int, dtype: type, sparse: bool) -> None:
    world = World(shards, seed, dtype, sparse)
    whole, targets = FastTarget(world.weights), world.targets()
    assert {target.total for target in targets} == {whole.total}
    assert {target.row.exponent for target in targets} == {whole.exponent}
    rows = [world.own_q(shard) for shard in shards]
    facts = list(zip(targets, rows, world.noise, strict=True))
    accepted = emulate([sharding.accept_sharded(target, world.token, q, u64) for target, q, u64 in facts])
    assert accepted == [whole.accept(world.token, world.q, world.u64)] * len(shards)
    assert emulate([sharding.pick_sharded(target, u64) for target, _, u64 in facts]) == [whole.pick(world.u64)] * len(shards)
    mass = whole.residual_mass(world.q)
    if mass:
        corrected = emulate([sharding.correct_sharded(target, q, u64) for target, q, u64 in facts])
        assert corrected == [whole.correct(world.q, world.u64)] * len(shards)
        token, _ = corrected[0]
        assert whole.weight(token) > 0
        assert sum(target.row.residual_mass() for target in targets) == mass


@settings(max_examples=60, deadline=None)
@given(splits(8), st.integers(0, 2**32), st.integers(1, 4), st.booleans())
def test_chains_equal_the_unsharded_ones(shards: tuple[Shard, ...], seed: int, depth: int, sparse: bool) -> None:
    worlds = [World(shards, seed * 5 + i, np.float32, sparse) for i in range(depth + 1)]
    for index in range(0, depth, 2):  # else hardly a chain is accepted
        worlds[index].weights = np.zeros(shards[-1].end_id, np.float32)
        worlds[index].weights[worlds[index].token] = 1
    tokens = [world.token for world in worlds[:depth]]
    want = verify_chain_fast(tokens, [w.q for w in worlds[:depth]], lambda i: worlds[i].weights, seed, 1, 2, 3)
    guard = KeyGuard(seed, (Domain.ACCEPT, Domain.CORRECTION))
    ranks = [
        sharding.verify_chain_sharded(
            shard,
            tokens,
            [world.own_q(shard) for world in worlds[:depth]],
            lambda i, shard=shard: worlds[i].weights[shard.first_id : shard.end_id].copy(),
            seed,
            1,
            2,
            3,
            draw=guard.draw64,  # were two ranks to draw, the second would reuse the key
        )
        for shard in shards
    ]
    assert emulate(ranks) == [want] * len(shards)


def test_a_shard_without_mass_is_never_chosen() -> None:
    shards = shards_of([0, 32, 64, 96, 128])
    weights = np.zeros(128, np.float32)
    weights[40], weights[100] = 1, 3
    counts = np.zeros(128, np.uint32)
    counts[3], counts[100] = MASS // 2, MASS // 2
    q = dyadic.to_q(counts)
    for u64 in (0, 1, END // 4 - 1, END // 4, END // 4 + 1, END - 1):
        targets = on_all(sharding.target_sharded, shards, weights)
        noise = [u64, None, None, None]
        picked = emulate([sharding.pick_sharded(t, u) for t, u in zip(targets, noise, strict=True)])
        assert picked == [40 if u64 < END // 4 else 100] * 4
        rows = [QRow(part) for part in parts(shards, q)]
        corrected = emulate([sharding.correct_sharded(t, r, u) for t, r, u in zip(targets, rows, noise, strict=True)])
        assert corrected[0] == FastTarget(weights).correct(QRow(q), u64)
        assert corrected[0][0] in (40, 100)
    rows_of_q = [ShardRow(s, part, (MASS // 2, 0, 0, MASS // 2)) for s, part in zip(shards, parts(shards, counts), strict=True)]
    for u24, token in ((0, 3), (MASS // 2 - 1, 3), (MASS // 2, 100), (MASS - 1, 100)):
        assert emulate([sharding.draw_sharded(row, u24) for row in rows_of_q]) == [token] * 4


@pytest.mark.parametrize(
    ("spoil", "reason"),
    (
        (lambda q: q.__setitem__(70, np.float32(0.1)), Reason.NONDYADIC),
        (lambda q: q.__setitem__(70, np.float32(math.nan)), Reason.NONFINITE),
        (lambda q: q.__setitem__(70, np.float32(-0.5)), Reason.NEGATIVE),
        (lambda q: q.__setitem__(70, np.float32(2**-24)), Reason.MASS),
        (lambda q: q.__setitem__(3, np.float32(0)), Reason.MASS),
        (lambda q: q.__setitem__(70, np.float32(1)), Reason.MASS),
    ),
)
def test_a_q_that_is_none_is_refused_on_every_rank(spoil: Callable[[NDArray[np.float32]], None], reason: Reason) -> None:
    shards = shards_of([0, 32, 64, 100])
    q = np.zeros(100, np.float32)
    q[3], q[50] = 0.5, 0.5
    spoil(q)
    targets = on_all(sharding.target_sharded, shards, np.ones(100, np.float32))
    rows = [QRow(part) for part in parts(shards, q)]
    noise = [7, None, None]
    with pytest.raises(InvalidQ) as caught:
        emulate([sharding.correct_sharded(t, r, u) for t, r, u in zip(targets, rows, noise, strict=True)])
    assert caught.value.reason is reason
    if reason in (Reason.NONDYADIC, Reason.NEGATIVE):
        with pytest.raises(InvalidQ) as caught:
            emulate([sharding.accept_sharded(t, 70, r, u) for t, r, u in zip(targets, rows, noise, strict=True)])
        assert caught.value.reason is Reason.NONDYADIC


@pytest.mark.parametrize("bad", (math.nan, math.inf, -1.0, -0.0))
def test_bad_target_weights_are_refused_on_every_rank(bad: float) -> None:
    weights = np.ones(100)
    weights[50] = bad
    with pytest.raises(LocalMisuse, match="finite"):
        on_all(sharding.target_sharded, shards_of([0, 32, 64, 100]), weights)
    with pytest.raises(LocalMisuse, match="mass"):
        on_all(sharding.target_sharded, shards_of([0, 32, 64, 100]), np.zeros(100))


# -- the greedy lane ---------------------------------------------------------------------------------------------------


@QUICK
@given(splits(), st.integers(0, 2**32), st.integers(1, 8), st.sampled_from((0.0, 0.02)))
def test_greedy_tokens_equal_the_full_path(shards: tuple[Shard, ...], seed: int, rows: int, spoiled: float) -> None:
    noise = np.random.default_rng(seed)
    size = shards[-1].end_id
    logits = noise.integers(-3, 4, (rows, size)).astype(np.float32)  # ties everywhere
    logits[noise.random((rows, size)) < 0.3] = -np.inf
    logits[noise.random((rows, size)) < spoiled / size] = np.nan
    widest = max(shard.size for shard in shards)
    padded = []
    for shard in shards:
        part = np.full((rows, widest), 99, np.float32)
        part[:, : shard.size] = logits[:, shard.first_id : shard.end_id]
        padded.append(part)
    traffic = Traffic()
    ranks = [sharding.greedy_tokens_sharded(shard, part) for shard, part in zip(shards, padded, strict=True)]
    got = outcome(lambda: emulate(ranks, traffic))
    want = outcome(lambda: [greedy.full_path_token(row) for row in logits])
    assert got == (want if isinstance(want, Reason) else [want] * len(shards))
    assert traffic.steps == [(Op.GATHER, "winners")]
    assert traffic.sent_bytes == [12 * rows] * len(shards)


# -- what is exchanged -------------------------------------------------------------------------------------------------


def test_what_is_exchanged_is_small_and_the_same_for_every_vocabulary() -> None:
    sent = []
    for vocabulary in (12800, 129280):
        shards = shards_of([0, vocabulary // 4 // 32 * 32, vocabulary // 2 // 32 * 32, vocabulary])
        traffic = Traffic()
        whole = KINDS["spread"](np.random.default_rng(1), vocabulary)
        rows = emulate([sharding.allocate_sharded(s, p) for s, p in zip(shards, parts(shards, whole), strict=True)], traffic)
        assert np.concatenate([row.counts for row in rows]).tolist() == dyadic.allocate(whole).tolist()
        assert traffic.steps[0] == (Op.GATHER, "tree nodes")
        assert traffic.steps[-1] == (Op.GATHER, "masses")
        sent.append(max(traffic.sent_bytes))
    assert max(sent) <= 20_000
    traffic = Traffic()
    emulate([sharding.allocate_top_k_sharded(s, p, 32) for s, p in zip(shards, parts(shards, whole), strict=True)], traffic)
    assert traffic.steps == [(Op.GATHER, "candidates of the support")]
    assert traffic.sent_bytes == [12 * 32] * 3  # k candidates a rank: 2k with two ranks


def one(exchange: Exchange) -> Steps[None]:
    yield exchange


@pytest.mark.parametrize(
    ("ranks", "text"),
    (
        ([one(Exchange(Op.MAX, "a", np.zeros(1))), one(Exchange(Op.MAX, "b", np.zeros(1)))], "different steps"),
        ([one(Exchange(Op.MAX, "a", np.zeros(1))), one(Exchange(Op.SUM, "a", np.zeros(1)))], "different steps"),
        ([one(Exchange(Op.SUM, "a", np.zeros(1)))], "depend on order"),
        ([one(Exchange(Op.MAX, "a", np.zeros(1, np.float32)))], "depend on order"),
        ([one(Exchange(Op.SUM, "a", np.zeros(1, np.int64))), one(Exchange(Op.SUM, "a", np.zeros(2, np.int64)))], "differ"),
        ([one(Exchange(Op.GATHER, "a", np.zeros((1, 1))))], "kinds"),
        ([one(Exchange(Op.GATHER, "a", np.zeros(1))), one(Exchange(Op.GATHER, "a", np.zeros(1, np.int64)))], "kinds"),
        ([one(Exchange(Op.GATHER, "a", np.zeros(1))), (x for x in ())], "ended differently"),
    ),
)
def test_the_emulator_refuses_ranks_out_of_step(ranks: list[Steps[None]], text: str) -> None:
    with pytest.raises(LocalMisuse, match=text):
        emulate(ranks)


@pytest.mark.parametrize("edges", ([0], [], [0, 0], [1, 64], [0, 33, 64], [0, 64, 32], [0, 96, 64, 100], [0, 16, 32]))
def test_edges_that_make_no_shards_are_refused(edges: list[int]) -> None:
    with pytest.raises(LocalMisuse):
        shards_of(edges)


def test_edges_of_the_protocol_s_shards_will_do() -> None:
    from pp1q_transport.session.shards import ranges

    for size in range(1, 9):
        split = ranges(129280, size)
        shards = shards_of([first for first, _ in split] + [129280])
        assert [(shard.first_id, shard.end_id) for shard in shards] == list(split)


SHARD = shards_of([0, 64, 100])[1]


@pytest.mark.parametrize(
    "call",
    (
        lambda: next(sharding.weights_sharded(SHARD, np.zeros(37))),
        lambda: next(sharding.allocate_sharded(SHARD, np.zeros(37))),
        lambda: next(sharding.allocate_top_k_sharded(SHARD, np.zeros(36), 0)),
        lambda: next(sharding.target_sharded(SHARD, np.ones(37, np.float32))),
        lambda: next(sharding.target_sharded(SHARD, np.ones(36, np.float16))),  # type: ignore[arg-type]
        lambda: next(sharding.greedy_tokens_sharded(SHARD, np.ones((2, 35), np.float32))),
        lambda: next(sharding.greedy_tokens_sharded(SHARD, np.ones(36, np.float32))),
        lambda: emulate([sharding.greedy_tokens_sharded(s, np.ones((s.rank + 1, 64))) for s in shards_of([0, 64, 100])]),
        lambda: next(sharding.draw_sharded(ShardRow(SHARD, np.zeros(36, np.uint32), (MASS, 0)), MASS)),
        lambda: next(sharding.draw_sharded(ShardRow(SHARD, np.zeros(36, np.uint32), (MASS, 0)), -1)),
        lambda: next(sharding.verify_chain_sharded(SHARD, [], [], lambda i: np.ones(36), 1, 1, 1, 1)),
    ),
)
def test_misuse_is_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LocalMisuse):
        call()


def test_noise_is_rank_zero_s_alone() -> None:
    targets = on_all(sharding.target_sharded, shards_of([0, 32, 64]), np.ones(64))
    q = QRow(np.full(32, 1 / 64, np.float32))
    for rank, u64 in ((0, None), (1, 5), (0, END), (0, -1)):
        for steps in (
            sharding.accept_sharded(targets[rank], 3, q, u64),
            sharding.pick_sharded(targets[rank], u64),
            sharding.correct_sharded(targets[rank], q, u64),
        ):
            with pytest.raises(LocalMisuse, match="noise"):
                next(steps)
    with pytest.raises(LocalMisuse, match="vocabulary"):
        next(sharding.accept_sharded(targets[0], 64, q, 5))
    assert draw64(1, Domain.ACCEPT, 1, 1, 1) < END


def test_no_residual_falls_back_to_p_and_says_so() -> None:
    counts = np.zeros(64, np.uint32)
    counts[3], counts[40] = MASS // 4, 3 * MASS // 4
    shards = shards_of([0, 32, 64])
    targets = on_all(sharding.target_sharded, shards, counts.astype(np.float64))
    rows = [QRow(part) for part in parts(shards, dyadic.to_q(counts))]
    for u64 in (0, END - 1, random.Random(1).randrange(END)):
        got = emulate([sharding.correct_sharded(t, r, u) for t, r, u in zip(targets, rows, (u64, None), strict=True)])
        assert got == [(FastTarget(counts.astype(np.float64)).pick(u64), False)] * 2


def test_lists_and_other_floats_are_named() -> None:
    shards = shards_of([0, 64, 128])
    for weights, said in (([1.0] * 64, "not list"), (np.ones(64, np.float16), "not float16")):
        with pytest.raises(LocalMisuse, match=said):
            emulate([sharding.target_sharded(shard, weights) for shard in shards])  # type: ignore[arg-type]
    with pytest.raises(LocalMisuse, match="NumPy array, not list"):
        emulate([sharding.greedy_tokens_sharded(shard, [[1.0] * 64]) for shard in shards])  # type: ignore[arg-type]
