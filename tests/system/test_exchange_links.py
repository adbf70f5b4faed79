"""Exchanges over real engines and TCP: three ranks compute together what one process would, bit for bit, or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from system_rig import VOCAB
from test_group_links import SIZE, GroupRig

from pp1q_transport import dyadic, greedy, sharding
from pp1q_transport.errors import InvalidQ
from pp1q_transport.session.exchange_run import ExchangeRun, Place
from pp1q_transport.session.parts import Part
from pp1q_transport.sharding import Shard, Steps, shards_of
from pp1q_transport.verify import QRow, verify_chain_fast

INF, NAN = float("inf"), float("nan")
EDGES = (0, 32, 32, VOCAB)  # the middle rank has no tokens, as when a vocabulary is padded to more shards than it fills
SHARDS = shards_of(EDGES)
WIDEST = max(shard.size for shard in SHARDS)
PLACE = Place(1, 0, 3, 7)


@pytest.fixture
def rig() -> Iterator[GroupRig]:
    made = GroupRig()
    try:
        made.until(lambda: made.zero.session is not None and made.zero.group.open and all(
            rank.session is not None and rank.session.exchanges.open for rank in made.members))  # fmt: skip
        yield made
    finally:
        made.close()


def boxes(rig: GroupRig) -> list[list[list[Part]]]:
    return [rig.zero.group.exchanges.done, *(rank.session.exchanged for rank in rig.members)]


def say(rig: GroupRig, rank: int, part: Part) -> None:
    if rank == 0:
        rig.zero.group.exchanges.own(part)
    else:
        rig.members[rank - 1].session.exchange(part)


def compute(rig: GroupRig, make: Callable[[Shard], Steps[Any]]) -> list[Any]:
    """Every rank's result; what all of them raise alike is raised."""
    runs = [ExchangeRun(make(s), s.rank, PLACE, s.first_id, s.end_id) for s in SHARDS]
    parts = [run.begin(rig.zero.group.exchanges.said(0)) for run in runs]
    while not all(run.done for run in runs):
        for rank, part in enumerate(parts):
            assert part is not None
            say(rig, rank, part)
        rig.until(lambda: all(len(box) == 1 for box in boxes(rig)))
        told = [box.pop() for box in boxes(rig)]
        errors = []
        for rank, run in enumerate(runs):
            try:
                parts[rank] = run.resume(told[rank], rig.zero.group.exchanges.said(0))
            except InvalidQ as error:
                errors.append(error)
        if errors:
            assert len(errors) == SIZE
            raise errors[0]
    return [run.result for run in runs]


def own_columns(logits: NDArray[Any], shard: Shard) -> NDArray[Any]:
    """A rank's logits, padded to the widest shard with what would win."""
    padded = np.full((len(logits), WIDEST), 6e4, logits.dtype)
    padded[:, : shard.size] = logits[:, shard.first_id : shard.end_id]
    return padded


def hard_rows(dtype: type, seed: int) -> NDArray[Any]:
    """Rows of ties within and across shards, of signed zeros, of -inf in most places, of one finite logit."""
    noise = np.random.default_rng(seed)
    rows = noise.integers(-2, 3, (6, VOCAB)).astype(dtype)
    rows[noise.random(rows.shape) < 0.5] = -np.inf
    rows[0] = 1.0
    rows[1] = np.where(np.arange(VOCAB) % 2, 0.0, -0.0)
    rows[2] = -np.inf
    rows[2, VOCAB - 1] = -7.5
    rows[3, [5, 40]] = 3.0
    return rows


@pytest.mark.parametrize("dtype", (np.float16, np.float32, np.float64))
@pytest.mark.parametrize("ids", (np.int32, np.int64))
def test_the_greedy_lane_commits_what_the_full_path_commits(rig: GroupRig, dtype: type, ids: type) -> None:
    noise = np.random.default_rng(1)
    for seed in range(8):
        logits = hard_rows(dtype, seed)
        want = [greedy.full_path_token(row) for row in logits]
        drafts = np.array([want[:5]], ids)
        drafts[0, noise.integers(5)] = noise.integers(VOCAB)
        got = compute(rig, lambda shard, logits=logits: sharding.greedy_tokens_sharded(shard, own_columns(logits, shard)))
        whole = greedy.commit(drafts, np.array([want], np.int64), VOCAB)
        for tokens in got:
            made = greedy.commit(drafts, np.array([tokens], ids), VOCAB)
            assert made.of(0) == whole.of(0)
            assert (made.tokens == whole.tokens).all()


@pytest.mark.parametrize(("value", "at"), ((NAN, 0), (NAN, VOCAB - 1), (INF, 40), (-INF, None)))
def test_a_row_that_the_full_path_refuses_is_refused_by_every_rank(rig: GroupRig, value: float, at: int | None) -> None:
    logits = hard_rows(np.float32, 3)
    logits[4, slice(None) if at is None else at] = value
    with pytest.raises(InvalidQ) as whole:
        greedy.full_path_token(logits[4])
    with pytest.raises(InvalidQ) as sharded:
        compute(rig, lambda shard: sharding.greedy_tokens_sharded(shard, own_columns(logits, shard)))
    assert sharded.value.reason is whole.value.reason
    assert rig.zero.group.open, "refused alike: the group goes on"


def test_verdicts_over_links_equal_those_of_one_process(rig: GroupRig) -> None:
    accepted = set()
    for seed in range(24):
        noise = np.random.default_rng(seed)
        p = np.exp(noise.normal(size=(3, VOCAB)) * 2).astype(np.float32)
        counts = [dyadic.allocate(row.astype(np.float64) * np.exp(noise.normal(size=VOCAB) * 0.4)) for row in p[:2]]
        tokens = [dyadic.draw(row, int(noise.integers(dyadic.MASS))) for row in counts]
        q = [dyadic.to_q(row) for row in counts]
        want = verify_chain_fast(tokens, [QRow(row) for row in q], lambda i, p=p: p[i], seed, 0, 3, 8)

        def make(s: Shard, p: Any = p, q: Any = q, tokens: Any = tokens, seed: int = seed) -> Steps[Any]:
            own = slice(s.first_id, s.end_id)
            rows = [QRow(row[own].copy()) for row in q]
            return sharding.verify_chain_sharded(s, tokens, rows, lambda i: p[i, own].copy(), seed, 0, 3, 8)

        assert compute(rig, make) == [want] * SIZE
        accepted.add(want.accepted_drafts)
    assert accepted == {0, 1, 2}


def test_a_rank_that_dies_in_the_middle_leaves_nobody_with_an_answer(rig: GroupRig) -> None:
    logits = hard_rows(np.float32, 0)
    runs = [
        ExchangeRun(sharding.greedy_tokens_sharded(s, own_columns(logits, s)), s.rank, PLACE, s.first_id, s.end_id)
        for s in SHARDS
    ]
    for rank in (0, 1):
        part = runs[rank].begin(0)
        assert part is not None
        say(rig, rank, part)
    rig.members[1].engine.close()
    rig.until(lambda: not rig.zero.group.open and not rig.members[0].member.open)
    assert rig.zero.group.exchanges.done == []
    assert rig.members[0].session.exchanged == []
