"""Ranks that verify together through real daemons, each with its own range of q over its own link: what one process would draw,
accept and correct, bit for bit, distributed as the target; and what ends it."""

from __future__ import annotations

import dataclasses
import json
import re
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_rig import MODULE, WATCHDOG_S, Bed

from pp1q_transport import dyadic, greedy, sharding
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.cli.demo import P_VALUE_LEAST
from pp1q_transport.client import AttachedReceiver, Proposal, attach_receiver
from pp1q_transport.errors import InvalidQ, LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.rng import Domain, draw24
from pp1q_transport.toy.models import ToyTarget
from pp1q_transport.toy.sidecar import Shape
from pp1q_transport.verify import QRow, Verdict, verify_chain, verify_chain_fast

pytestmark = pytest.mark.timeout(240)

VOCAB = 1000
PATIENT_US = 60_000_000
PROMPT = [1, 2]
LOOK_NS = 20_000_000
SEED = 5
SHAPE = Shape(seed=7, depth=3, vocab_size=VOCAB, support=None, requests=2, ranks=2, mode="vocabulary", budget_us=PATIENT_US)
RANKS = (2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow))


def on_every_rank(bed: Bed, act: Callable[[AttachedReceiver, threading.Barrier], None]) -> None:
    """Runs `act` beside the daemon of each rank, in threads of this process; the first real fault is raised."""
    faults: list[BaseException] = []
    ranks = bed.shape.ranks
    barrier = threading.Barrier(ranks)

    def run(rank: int) -> None:
        try:
            with attach_receiver(bed.socket(f"receiver{rank}"), rank) as receiver:
                receiver.on_agree(lambda _epoch, committed: committed)
                receiver.wait_for_peer(WATCHDOG_S)
                act(receiver, barrier)
                barrier.wait(WATCHDOG_S)
        except BaseException as fault:  # noqa: BLE001 - told below
            faults.append(fault)
            barrier.abort()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(4 * WATCHDOG_S)
    real = [fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)]
    if faults:
        raise (real or faults)[0]


class Held:
    """What one rank saw of a round: its own rows, and the verdict that the ranks reached together."""

    def __init__(self, proposal: Proposal, context: list[int]) -> None:
        self.context = context
        self.place = proposal.generation, proposal.round, proposal.first_position
        self.tokens = proposal.tokens.tolist()
        rows = [proposal.q(index) for index in range(proposal.depth)]
        self.range = rows[0].first_id, rows[0].end_id
        self.values = [row.values.copy() for row in rows]
        self.ids = [None if row.ids is None else row.ids.copy() for row in rows]
        self.verdict: Verdict | None = None


def verify(receiver: AttachedReceiver, request: Any, proposal: Proposal, held: Held, target: ToyTarget) -> Verdict:
    """This rank's side of the verification of a proposal: its own rows of q, its own columns of p."""
    own = slice(*held.range)
    steps = sharding.verify_chain_sharded(
        receiver.shard(),
        held.tokens,
        [QRow(values, ids) for values, ids in zip(held.values, held.ids, strict=True)],
        lambda i: target.weights((held.context + held.tokens[:i])[-2:])[0][own].astype(np.float64),
        request.seed,
        *held.place,
    )
    return receiver.run_sharded(steps, request, proposal.round, generation=proposal.generation)


@pytest.mark.parametrize("support", (None, pytest.param(16, marks=pytest.mark.slow)), ids=("dense", "sparse"))
@pytest.mark.parametrize("ranks", RANKS)
def test_ranks_draw_accept_and_correct_as_one_process_would(ranks: int, support: int | None) -> None:
    shape = dataclasses.replace(SHAPE, ranks=ranks, support=support)
    target, rounds = ToyTarget(shape.seed, VOCAB), 12
    held: dict[int, list[Held]] = {rank: [] for rank in range(ranks)}

    def act(receiver: AttachedReceiver, _barrier: threading.Barrier) -> None:
        request = receiver.open_request(1, PROMPT, seed=SEED)
        for _ in range(rounds):
            with receiver.step(request, support=support, budget_us=PATIENT_US) as proposal:
                seen = Held(proposal, request.tokens.tolist())
                held[receiver.rank].append(seen)
                seen.verdict = verify(receiver, request, proposal, seen, target)
                proposal.commit(seen.verdict.accepted_drafts, seen.verdict.committed_tokens)

    with Bed(shape) as bed:
        bed.up()
        bed.start("draft")
        bed.wait_for_client("leader")
        on_every_rank(bed, act)
        assert bed.counters("receiver0")["exchanges"] > 0
    accepted = [judge_round([held[rank][number] for rank in range(ranks)], target) for number in range(rounds)]
    assert min(accepted) < max(accepted), "rejections and acceptances were met"


def judge_round(ranks: list[Held], target: ToyTarget) -> int:
    """One round on the q that the ranks' ranges make together, by the verifiers that know no shards. Returns the drafts kept."""
    first = ranks[0]
    assert [seen.range[0] for seen in ranks] == [0, *(seen.range[1] for seen in ranks[:-1])]
    assert ranks[-1].range[1] == VOCAB
    assert all(seen.tokens == first.tokens and seen.place == first.place for seen in ranks)
    generation, round_number, position = first.place
    rows = []
    for i, token in enumerate(first.tokens):
        values = np.concatenate([seen.values[i] for seen in ranks])
        counts = dyadic.to_counts(values)
        u24 = draw24(SEED, Domain.PROPOSAL, generation, round_number, position + i)
        if first.ids[i] is None:
            assert token == dyadic.draw(counts, u24)
            rows.append(QRow(values))
        else:
            ids = np.concatenate([seen.ids[i] for seen in ranks if seen.ids[i] is not None])
            assert token == dyadic.draw_sparse(ids, counts, u24)
            rows.append(QRow(values, ids))

    def weights(i: int) -> tuple[np.ndarray, int]:
        return target.weights((first.context + first.tokens[:i])[-2:])

    whole = verify_chain(first.tokens, rows, weights, SEED, *first.place)
    fast = verify_chain_fast(first.tokens, rows, lambda i: weights(i)[0].astype(np.float64), SEED, *first.place)
    assert whole == fast
    assert [seen.verdict for seen in ranks] == [whole] * len(ranks)
    return whole.accepted_drafts


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "support"), ((2, None), (3, 16), (4, None)))
def test_the_command_that_shows_it(ranks: int, support: int | None) -> None:
    """`pp1q demo-sidecar --mode vocabulary`: its targets verify together; the test of distribution fails wrongly at 1e-6."""
    command = [*MODULE, "demo-sidecar", "--mode", "vocabulary", "--ranks", str(ranks), "--rounds", "330", "--vocab", str(VOCAB)]
    command += ["--json"] if support is None else ["--json", "--sparse", str(support)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    report = json.loads(done.stdout)
    assert P_VALUE_LEAST <= 1e-6
    assert report["p_value"] > P_VALUE_LEAST
    assert report["ready"] == [330] * ranks
    assert report["ranks_agree"]
    assert report["exchanges"] >= 330 * 4, "each row took some"
    assert report["committed"] == report["embedded"]["committed"], "the tokens of one process with all of q"


@pytest.mark.parametrize("dtype", (np.float16, np.float32))
def test_the_greedy_lane_through_daemons(dtype: type) -> None:
    """Winners of each rank's padded logits, ties and all, for drafts and for a round without any; then what must be refused."""
    noise = np.random.default_rng(2)
    logits = noise.integers(-2, 3, (40, 4, VOCAB)).astype(dtype)
    logits[noise.random(logits.shape) < 0.3] = -np.inf
    spoiled = logits[0].copy()
    spoiled[2, VOCAB - 3] = np.nan
    found: dict[int, list[list[int]]] = {0: [], 1: []}

    def act(receiver: AttachedReceiver, _barrier: threading.Barrier) -> None:
        shard = receiver.shard()
        lane = greedy.GreedyLane(enabled=True)
        assert lane.admits({"temperature": 0})
        request = receiver.open_request(1, PROMPT, seed=SEED)

        def own(rows: np.ndarray) -> np.ndarray:
            padded = np.full((len(rows), VOCAB), 6e4, dtype)
            padded[:, : shard.size] = rows[:, shard.first_id : shard.end_id]
            return padded

        for number, rows in enumerate(logits):
            steps = sharding.greedy_tokens_sharded(shard, own(rows))
            winners = receiver.run_sharded(steps, request, number)
            found[receiver.rank].append(winners)
            drafts = np.array([[winners[0], (winners[1] + number % 2) % VOCAB, winners[2]]], np.int32 if number % 3 else np.int64)
            made = greedy.commit(drafts, np.array([winners], np.int64), VOCAB)
            assert made.accepted[0] == (1 if number % 2 else 3)
            receiver.commit_target_only(request, request.next_round(), made.of(0))
        with pytest.raises(InvalidQ):
            receiver.run_sharded(sharding.greedy_tokens_sharded(shard, own(spoiled)), request, 99)
        assert receiver.up, "every rank refused it alike"
        weights = np.random.default_rng(3).random(VOCAB)
        mine = weights[shard.first_id : shard.end_id].copy()
        row = receiver.run_sharded(sharding.allocate_top_k_sharded(shard, mine, 600), request, 98)  # parts of 6,144 bytes
        ids, counts = dyadic.allocate_top_k(weights, 600)
        inside = (ids >= shard.first_id) & (ids < shard.end_id)
        assert row.ids is not None
        assert (row.ids.tolist(), row.counts.tolist()) == (ids[inside].tolist(), counts[inside].tolist())

    with Bed(dataclasses.replace(SHAPE, mode="replicate")) as bed:
        bed.up()
        on_every_rank(bed, act)
    assert found[0] == found[1] == [[greedy.full_path_token(row) for row in rows] for rows in logits]


def test_the_page_for_engines_is_true() -> None:
    """The functions of docs/engines.md, as they stand there, beside daemons: the same proposals verified and decoded greedily."""
    text = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
    section = text.split("## Logits that no rank holds whole")[1].split("\n## ")[0]
    names: dict[str, Any] = {}
    for block in re.findall(r"```python\n(.*?)```", section, re.DOTALL):
        exec(block, names)
    target = ToyTarget(SHAPE.seed, VOCAB)
    tokens: dict[int, list[int]] = {}

    def act(receiver: AttachedReceiver, _barrier: threading.Barrier) -> None:
        request = receiver.open_request(1, PROMPT, seed=SEED)
        shard = receiver.shard()
        own = slice(shard.first_id, shard.end_id)
        for number in range(8):
            context = request.tokens.tolist()
            with receiver.step(request, budget_us=PATIENT_US) as proposal:
                chain = proposal.tokens.tolist()
                p = [target.weights((context + chain[:i])[-2:])[0][own].astype(np.float64) for i in range(len(chain) + 1)]
                if number % 2:
                    names["verify_together"](receiver, request, proposal, lambda i, p=p: p[i])
                else:
                    with np.errstate(divide="ignore"):
                        names["greedy_together"](receiver, request, proposal, np.log(np.array(p)))
                    made = request.tokens.tolist()[len(context) :]
                    for i, token in enumerate(made):
                        assert token == int(target.weights((context + made[:i])[-2:])[0].argmax())
        tokens[receiver.rank] = request.tokens.tolist()

    with Bed(SHAPE) as bed:
        bed.up()
        bed.start("draft")
        bed.wait_for_client("leader")
        on_every_rank(bed, act)
    assert tokens[0] == tokens[1]
    assert len(tokens[0]) > len(PROMPT) + 8


def test_what_ends_an_exchange_ends_it_for_all() -> None:
    """A rank that is in another round, one that fails by itself, one that leaves: nobody has an answer, and all agree anew."""

    def winners(receiver: AttachedReceiver, request: Any, number: int) -> list[int]:
        shard = receiver.shard()
        logits = np.zeros((1, shard.size), np.float32)
        return receiver.run_sharded(sharding.greedy_tokens_sharded(shard, logits), request, number)

    def fails(receiver: AttachedReceiver, request: Any) -> None:
        def steps() -> sharding.Steps[None]:
            yield from sharding.exchange.all_max("largest score", 1.0)
            raise ValueError("an engine of its own mistake")

        receiver.run_sharded(steps() if receiver.rank else two_steps(), request, 2)

    def two_steps() -> sharding.Steps[None]:
        yield from sharding.exchange.all_max("largest score", 1.0)
        yield from sharding.exchange.all_max("largest score", 1.0)

    spoken = [threading.Event(), threading.Event()]

    def speak(first: int, rank: int) -> None:
        """The other rank lets `first` go ahead. Most often its part is there first then; nothing asserted hangs on that."""
        if rank == first:
            spoken[first].set()
        else:
            assert spoken[first].wait(WATCHDOG_S)
            time.sleep(0.2)

    def act(receiver: AttachedReceiver, barrier: threading.Barrier) -> None:
        request = receiver.open_request(1, PROMPT, seed=SEED)
        assert winners(receiver, request, 1) == [0]
        for first in (0, 1):  # whoever speaks last finds the difference, and is not the one that is cut off for it
            speak(first, receiver.rank)
            with pytest.raises(ProposalDiscarded) as over:
                winners(receiver, request, 5 + receiver.rank)
            assert (over.value.reason, over.value.epoch_over) == (Reason.PEER_LOST, True)
            receiver.wait_for_peer(WATCHDOG_S)
        assert winners(receiver, request, 1) == [0]
        with pytest.raises((ProposalDiscarded, ValueError)) as failed:
            fails(receiver, request)
        assert isinstance(failed.value, ValueError if receiver.rank else ProposalDiscarded)
        receiver.wait_for_peer(WATCHDOG_S)
        barrier.wait(WATCHDOG_S)  # or rank 1 ends this epoch before rank 0 has heard of it
        with pytest.raises(LocalMisuse if receiver.rank else ProposalDiscarded):
            receiver.run_sharded(unknown_step() if receiver.rank else two_steps(), request, 3)
        receiver.wait_for_peer(WATCHDOG_S)
        barrier.wait(WATCHDOG_S)
        if receiver.rank:
            receiver._lose(Reason.PEER_LOST)
        else:
            with pytest.raises(ProposalDiscarded):
                winners(receiver, request, 4)
        receiver.wait_for_peer(WATCHDOG_S)
        assert winners(receiver, request, 4) == [0]

    def unknown_step() -> sharding.Steps[None]:
        yield sharding.Exchange(sharding.Op.GATHER, "nothing that a frame carries", np.zeros(1))

    with Bed(dataclasses.replace(SHAPE, mode="replicate")) as bed:
        bed.up()
        on_every_rank(bed, act)
        assert bed.status("receiver0")["reasons"].get("round_mismatch", 0) == 2
        assert [bed.counters(f"receiver{rank}").get("clients_cut_off", 0) for rank in range(2)] == [0, 0]


@pytest.mark.parametrize("numbers_left", (True, False))
def test_ranks_compute_again_after_rank_0_s_process_parted(numbers_left: bool) -> None:
    """Its request has another generation then than that of the other ranks. An epoch of 2^32 exchanges parts every process."""

    def winners(receiver: AttachedReceiver, request: Any) -> list[int]:
        shard = receiver.shard()
        return receiver.run_sharded(sharding.greedy_tokens_sharded(shard, np.ones((1, shard.size))), request, 1)

    def act(receiver: AttachedReceiver, barrier: threading.Barrier) -> None:
        request = receiver.open_request(1, PROMPT, seed=SEED)
        barrier.wait(WATCHDOG_S)
        if not numbers_left:
            receiver._said = 1 << 32
        elif receiver.rank == 0:
            receiver._lose(Reason.PEER_LOST)
        if receiver.rank or not numbers_left:
            with pytest.raises(ProposalDiscarded) as over:
                winners(receiver, request)
            assert (over.value.reason, over.value.epoch_over) == (Reason.PEER_LOST, True)
        receiver.wait_for_peer(WATCHDOG_S)
        assert request.generation == (0 if receiver.rank else 1)
        assert winners(receiver, request) == [0]

    with Bed(dataclasses.replace(SHAPE, mode="replicate")) as bed:
        bed.up()
        on_every_rank(bed, act)


BAD: tuple[tuple[str, Reason, dict[str, int], bytes], ...] = (
    ("another rank's part", Reason.RANK_DISAGREE, {"rank": 0}, bytes(8)),
    ("out of turn", Reason.RANK_DISAGREE, {"sequence": 3}, bytes(8)),
    ("no purpose", Reason.SEMANTIC_MISMATCH, {"purpose": 77}, bytes(8)),
    ("half an element", Reason.LENGTH_BOUNDS, {}, bytes(4)),
    ("NaN", Reason.NONFINITE, {}, b"\0\0\0\0\0\0\xf8\x7f"),
    ("a range beyond the vocabulary", Reason.ID_RANGE, {"end_id": VOCAB + 1}, bytes(8)),
)


def test_a_process_that_says_what_no_rank_may_is_cut_off() -> None:
    def act(receiver: AttachedReceiver, barrier: threading.Barrier) -> None:
        for _title, reason, fields, payload in BAD:
            epoch = receiver.epoch
            if receiver.rank:
                before = bed.counters("receiver1").get("clients_cut_off", 0)
                said = {"request": 1, "epoch": receiver.epoch & 0xFFFFFFFF, "sequence": 0, "generation": 0, "round": 0,
                        "position": 1, "purpose": 2, "first_id": 512, "end_id": VOCAB, "rank": 1}  # fmt: skip
                said |= {"count": len(payload) // 4}
                receiver.send(m.EXCHANGE, *(said | fields).values(), payload=payload)
                receiver.ring()
                bed.until(lambda before=before: bed.counters("receiver1").get("clients_cut_off", 0) == before + 1, "cut off")
                assert bed.status("receiver1")["reasons"].get(reason.value, 0) >= 1
            while receiver.epoch == epoch:  # this rank may not have heard yet that it is over
                receiver.serve(monotonic_ns() + LOOK_NS)
                receiver.wait_for_peer(WATCHDOG_S)
            barrier.wait(WATCHDOG_S)
        request = receiver.open_request(1, PROMPT, seed=SEED)
        shard = receiver.shard()
        found = receiver.run_sharded(sharding.greedy_tokens_sharded(shard, np.ones((1, shard.size))), request, 1)
        assert found == [0]

    with Bed(dataclasses.replace(SHAPE, mode="replicate")) as bed:
        bed.up()
        on_every_rank(bed, act)


def test_a_group_of_one_computes_alone() -> None:
    noise = np.random.default_rng(1)
    weights = np.exp(noise.normal(size=VOCAB))
    with Bed(dataclasses.replace(SHAPE, ranks=1, mode="replicate")) as bed:
        bed.up()
        with attach_receiver(bed.socket("receiver0"), 0) as receiver:
            receiver.wait_for_peer(WATCHDOG_S)
            request = receiver.open_request(1, PROMPT, seed=SEED)
            row = receiver.run_sharded(sharding.allocate_sharded(receiver.shard(), weights), request, 1)
    assert row.counts.tolist() == dyadic.allocate(weights).tolist()
