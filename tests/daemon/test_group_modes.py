"""Deployments of two ranks that each have a link of their own to the leader: vocabulary shards, and owners of requests."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from daemon_rig import WATCHDOG_S, Bed
from journal_check import agree, check_tokens, histories, rounds_of, rounds_of_all

from pp1q_transport import dyadic
from pp1q_transport.client import AttachedReceiver, Proposal, attach_receiver
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.toy.models import ToyDraft
from pp1q_transport.toy.sidecar import Shape

pytestmark = pytest.mark.timeout(120)

VOCAB = 1000
PATIENT_US = 30_000_000
TWO = Shape(seed=7, rounds=30, depth=3, vocab_size=VOCAB, support=None, requests=3, ranks=2, budget_us=PATIENT_US)
PROMPT = [1, 2]


def run_all(shape: Shape) -> list[dict[str, Any]]:
    """A whole deployment to its end; the reports of its targets."""
    with Bed(shape) as deployment:
        deployment.start_all()
        for rank in range(shape.ranks):
            assert deployment.wait(f"target{rank}", WATCHDOG_S) == 0, deployment.tail(f"target{rank}", 12)
        reports = [
            json.loads((deployment.home / f"target{rank}.json").read_text(encoding="utf-8")) for rank in range(shape.ranks)
        ]
        assert check_tokens(shape, rounds_of(deployment.home / "target0.journal")) == reports[0]["committed"]
        for rank in range(shape.ranks):
            name = f"receiver{rank}"
            deployment.until(
                lambda name=name: all(n == 0 for s, n in deployment.status(name)["slots"].items() if s != "FREE"), "slots"
            )
            assert deployment.status(name)["discarded"] == 0, deployment.status(name)["discards"]
        deployment.kill("draft")
        ends = deployment.stop()
        assert ends["leader"] == ends["receiver0"] == ends["receiver1"] == 0
    return reports


def tokens_of(shape: Shape) -> dict[str, list[int]]:
    """What both ranks committed; every proposal was ready on both."""
    reports = run_all(shape)
    assert [report["ready"] for report in reports] == [shape.rounds] * 2, reports
    assert reports[0]["tokens"] == reports[1]["tokens"]
    tokens: dict[str, list[int]] = reports[0]["tokens"]
    return tokens


@pytest.mark.parametrize(("mode", "support"), (("vocabulary", None), ("vocabulary", 16), ("request-owner", 16)))
def test_every_proposal_is_ready_and_every_token_right(mode: str, support: int | None) -> None:
    tokens_of(dataclasses.replace(TWO, mode=mode, support=support))


@pytest.mark.slow
@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_all_modes_commit_the_same_tokens(support: int | None) -> None:
    found = [
        tokens_of(dataclasses.replace(TWO, mode=mode, support=support)) for mode in ("replicate", "vocabulary", "request-owner")
    ]
    assert found[0] == found[1] == found[2]


def both(bed: Bed, act: Callable[[AttachedReceiver], None]) -> None:
    """Runs `act` beside the daemon of each rank, in threads of this process."""
    faults: list[BaseException] = []

    def run(rank: int) -> None:
        try:
            with attach_receiver(bed.socket(f"receiver{rank}"), rank) as receiver:
                receiver.on_agree(lambda _epoch, committed: committed)
                receiver.wait_for_peer(WATCHDOG_S)
                act(receiver)
                barrier.wait(WATCHDOG_S)
        except BaseException as fault:  # noqa: BLE001 - told below
            faults.append(fault)
            barrier.abort()

    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WATCHDOG_S)
    real = [fault for fault in faults if not isinstance(fault, threading.BrokenBarrierError)]
    if real or faults:
        raise (real or faults)[0]


def draft_beside(bed: Bed) -> None:
    bed.start("draft")
    bed.wait_for_client("leader")


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_shards_make_the_row_that_one_process_would_allocate_bit_for_bit(support: int | None) -> None:
    shape = dataclasses.replace(TWO, mode="vocabulary", support=support)
    held: dict[tuple[int, int, int], tuple[list[int], np.ndarray]] = {}
    tokens: dict[int, list[list[int]]] = {0: [], 1: []}

    def keep(rank: int, round_number: int, proposal: Proposal) -> None:
        tokens[rank].append(proposal.tokens.tolist())
        for index in range(proposal.depth):
            row = proposal.q(index)
            ids = list(range(row.first_id, row.end_id)) if row.ids is None else row.ids.tolist()
            assert all(row.first_id <= token < row.end_id for token in ids)
            held[rank, round_number, index] = (ids, dyadic.to_counts(row.values.copy()))
            with pytest.raises(LocalMisuse, match="outside this rank's range"):
                row.of(0 if rank else VOCAB - 1)

    def act(receiver: AttachedReceiver) -> None:
        request = receiver.open_request(1, PROMPT, seed=5)
        for round_number in range(5):
            with receiver.step(request, support=support, budget_us=PATIENT_US) as proposal:
                keep(receiver.rank, round_number, proposal)
                drafted = proposal.tokens.tolist()
                proposal.commit(len(drafted), drafted)

    with Bed(shape) as bed:
        bed.up()
        draft_beside(bed)
        both(bed, act)
        sent = bed.status("receiver1")["bytes_ready"]
    assert tokens[0] == tokens[1]
    draft, chain = ToyDraft(shape.seed, VOCAB), list(PROMPT)
    for round_number, drafted in enumerate(tokens[0]):
        for index, token in enumerate(drafted):
            weights = draft.weights(chain[-2:])
            ids = held[0, round_number, index][0] + held[1, round_number, index][0]
            counts = np.concatenate([held[rank, round_number, index][1] for rank in range(2)])
            if support is None:
                assert ids == list(range(VOCAB))
                assert (counts == dyadic.allocate(weights)).all()
            else:
                expected = dyadic.allocate_top_k(weights, support)
                assert ids == expected[0].tolist()
                assert counts.tolist() == expected[1].tolist()
            chain.append(token)
    if support is None:
        assert sent == 5 * 3 * (((VOCAB - 512) * 4 + 63) // 64 * 64), "each rank is sent its own range alone"


def slots_held(bed: Bed, name: str) -> int:
    return sum(count for state, count in bed.status(name)["slots"].items() if state != "FREE")


@pytest.mark.parametrize("mode", ("replicate", "vocabulary"))
def test_a_rank_that_holds_a_proposal_too_long_quarantines_it_at_itself_and_at_rank_0(mode: str) -> None:
    shape = dataclasses.replace(TWO, mode=mode, support=16)
    watch = "\n[watch]\nrelease_after_s = 0.3\n"

    def act(receiver: AttachedReceiver) -> None:
        request = receiver.open_request(1, PROMPT, seed=5)
        proposal = receiver.step(request, support=16, budget_us=PATIENT_US)
        if receiver.rank:
            for name in ("receiver1", "receiver0"):
                bed.until(lambda name=name: bed.status(name)["slots"]["QUARANTINE"] == 1, f"overdue at {name}")
            assert bed.counters("receiver1")["overdue"] == 1
            assert proposal.q(0).values.size, "quarantine takes nothing from who still reads"
        proposal.release()
        for name in ("receiver1", "receiver0"):
            bed.until(lambda name=name: slots_held(bed, name) == 0, f"free again at {name}")

    with Bed(shape, tables={"receiver0": watch, "receiver1": watch}) as bed:
        bed.up()
        draft_beside(bed)
        both(bed, act)


def test_only_the_owner_can_read_q() -> None:
    def act(receiver: AttachedReceiver) -> None:
        for owner, request in enumerate([receiver.open_request(10 + i, PROMPT, seed=5 + i, owner=i) for i in range(2)]):
            for _ in range(3):
                with receiver.step(request, budget_us=PATIENT_US) as proposal:
                    if owner == receiver.rank:
                        assert int(dyadic.to_counts(proposal.q(0).values.copy()).sum()) == dyadic.MASS
                    else:
                        with pytest.raises(LocalMisuse, match=f"at rank {owner}"):
                            proposal.q(0)
                    drafted = proposal.tokens.tolist()
                    proposal.commit(1, [*drafted[:1], 3])

    with Bed(dataclasses.replace(TWO, mode="request-owner")) as bed:
        bed.up()
        draft_beside(bed)
        both(bed, act)
        assert bed.status("receiver0")["rows"] == bed.status("receiver1")["rows"] == 9


@pytest.mark.parametrize("mode", ("vocabulary", "request-owner"))
def test_a_rank_whose_process_asks_for_something_else_discards_on_all(mode: str) -> None:
    def act(receiver: AttachedReceiver) -> None:
        request = receiver.open_request(1, PROMPT, seed=5)
        ticket = receiver.enqueue(request, target_context=receiver.rank, budget_us=PATIENT_US)
        with pytest.raises(Exception) as raised:  # noqa: PT011 - the same on both
            ticket.wait()
        assert getattr(raised.value, "reason", None) is Reason.CONTEXT_MISMATCH
        receiver.commit_target_only(request, ticket.round, [4])
        with receiver.step(request, budget_us=PATIENT_US) as proposal:
            proposal.commit(1, [int(proposal.tokens[0]), 3])

    with Bed(dataclasses.replace(TWO, mode=mode)) as bed:
        bed.up()
        draft_beside(bed)
        both(bed, act)
        reasons = [bed.status(f"receiver{rank}")["reasons"] for rank in range(2)]
        assert [each.get("context_mismatch") for each in reasons] == [1, 1], "found at rank 1, decided for both"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ("vocabulary", "request-owner"))
@pytest.mark.parametrize("victim", ("leader", "receiver1", "receiver0"))
def test_a_daemon_that_dies_is_survived(mode: str, victim: str) -> None:
    shape = dataclasses.replace(TWO, mode=mode, rounds=1_000_000, vocab_size=256, support=16)
    with Bed(shape) as bed:
        bed.start_all()
        journals = [bed.home / f"target{rank}.journal" for rank in range(2)]

        def ready(journal: Any) -> int:
            return sum(entry.get("drafted") is not None for entry in rounds_of(journal))

        bed.until(lambda: all(journal.exists() and ready(journal) > 5 for journal in journals), "some rounds")
        bed.kill(victim)
        bed.start(victim)
        bed.wait_for_daemon(victim)
        before = [ready(journal) for journal in journals]
        bed.until(lambda: all(ready(j) > n + 5 for j, n in zip(journals, before, strict=True)), "rounds after the kill")
        for rank in range(2):
            bed.kill(f"target{rank}")
        entries = [rounds_of(journal) for journal in journals]
        agree([histories(each) for each in entries])
        assert check_tokens(shape, rounds_of_all(entries)) > 10
