"""Draft ranks, each beside its own daemon: each token is told, nothing is drawn that a rank can't follow; any may die."""

from __future__ import annotations

import dataclasses
import json
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from daemon_rig import PROMPT, SMALL, WATCHDOG_S, Bed, Target, drafting, free_port
from journal_check import check_tokens, rounds_of

from pp1q_transport.client import AttachedDraftPeer, AttachedLeader, PeerStep, attach_draft_peer, attach_leader
from pp1q_transport.errors import ConfigError, InvalidQ, LocalMisuse, PeerFault, ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.toy.draft_rank import Follower
from pp1q_transport.toy.models import ToyDraft
from pp1q_transport.toy.sidecar import Shape

pytestmark = pytest.mark.timeout(120)

R = Reason
TWO = dataclasses.replace(SMALL, draft_ranks=2)
SHARDS = dataclasses.replace(SMALL, rounds=30, vocab_size=1000, ranks=2, mode="vocabulary", draft_ranks=2)


class Peer:
    """The process of draft rank 1 in this one; `serve` follows what came, for as long as a test wants."""

    def __init__(self, bed: Bed, rank: int = 1) -> None:
        self.attached: AttachedDraftPeer = attach_draft_peer(bed.socket(f"leader{rank}"), rank)
        self.follower = Follower(self.attached, ToyDraft(bed.shape.seed, bed.shape.vocab_size))

    def step(self) -> PeerStep:
        """The next STEP."""
        stop = time.monotonic() + WATCHDOG_S
        while time.monotonic() < stop:
            found = self.attached.next_step(5_000_000)
            if found is not None:
                return found
        raise AssertionError("no STEP")


@contextmanager
def peer(bed: Bed) -> Iterator[Peer]:
    made = Peer(bed)
    try:
        yield made
    finally:
        made.attached.close()


def told_ready(bed: Bed) -> bool:
    """Whether rank 1's daemon has told rank 0's that its process is there: a HELLO and two reports."""
    return bed.counters("leader").get("control_received", 0) >= 4


def ready(bed: Bed) -> None:
    """Rank 0's STEPs are not refused any more for want of rank 1."""
    bed.sessions_up()
    bed.until(lambda: told_ready(bed), "the word of rank 1")


# ---- whole deployments ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "shape",
    (
        dataclasses.replace(TWO, rounds=30, support=None),
        SHARDS,
        pytest.param(dataclasses.replace(TWO, rounds=30, draft_ranks=3), marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(SHARDS, support=None), marks=pytest.mark.slow),
        pytest.param(dataclasses.replace(SHARDS, mode="request-owner"), marks=pytest.mark.slow),
    ),
    ids=("dense", "shards", "three", "dense-shards", "request-owner"),
)
def test_every_proposal_is_ready_and_every_rank_was_told_each_token(shape: Shape) -> None:
    with Bed(shape) as bed:
        bed.start_all()
        for rank in range(shape.ranks):
            assert bed.wait(f"target{rank}", WATCHDOG_S) == 0, bed.tail(f"target{rank}", 12)
        report = json.loads((bed.home / "target0.json").read_text(encoding="utf-8"))
        assert (report["ready"], report["discarded"]) == (shape.rounds, 0), report
        assert check_tokens(shape, rounds_of(bed.home / "target0.journal")) == report["committed"]
        for rank in range(1, shape.draft_ranks):
            name = f"draft{rank}"
            assert bed.parts[name].running, bed.tail(name, 12)  # it ends when a token is not the one that is due
            rows = bed.status(f"leader{rank}")["rows"]
            assert rows == (shape.rounds * shape.depth if shape.draft_shards else 0)
        ends = bed.stop()
        assert all(ends[name] == 0 for name in bed.daemons), ends


# ---- who may attach -------------------------------------------------------------------------------------------------


def test_each_daemon_takes_the_process_of_its_own_rank() -> None:
    with Bed(TWO) as bed:
        bed.up("leader", "leader1")
        with pytest.raises(PeerFault, match="this is the daemon of draft rank 1"):
            attach_leader(bed.socket("leader1"))
        with pytest.raises(PeerFault, match="this is the daemon of draft rank 0"):
            attach_draft_peer(bed.socket("leader"), 1)
        with pytest.raises(PeerFault, match="this is the daemon of draft rank 1"):
            attach_draft_peer(bed.socket("leader1"), 2)
        with pytest.raises(ConfigError, match="attach_leader"):
            attach_draft_peer(bed.socket("leader1"), 0)


def test_status_names_the_links_between_ranks() -> None:
    with Bed(TWO) as bed:
        bed.up()
        assert [each["peer"] for each in bed.status("leader")["sessions"]] == ["group-a", "draft1"]
        assert [each["peer"] for each in bed.status("leader1")["sessions"]] == ["draft0"]


def test_a_rank_that_follows_another_target_is_refused() -> None:
    with Bed(TWO) as bed:
        bed.edit("leader1", lambda text: text.replace('["group-a"]', '["group-b"]'))
        bed.up("leader", "leader1")
        bed.says("leader", "identity_mismatch")
        bed.says("leader", "target_identity")
        assert not bed.status("leader1")["sessions"][0]["up"]


def test_the_loop_in_the_document() -> None:
    document = Path(__file__).parents[2] / "docs" / "engines.md"
    section = document.read_text(encoding="utf-8").split("## A draft of several ranks\n")[1]
    code = section.split("```python\n")[1].split("```")[0]
    rows: list[list[int]] = []
    ended: list[tuple[int, Reason]] = []
    names: dict[str, Any] = {
        "my_part_of_the_row": lambda context, _temperature: rows.append(context[:]),
        "my_roll_back": lambda request, reason: ended.append((request, reason)),
    }
    exec(code, names)
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed), peer(bed) as one, bed.receiver() as receiver:
            thread = threading.Thread(target=names["follow"], args=(one.attached,), daemon=True)
            thread.start()
            ready(bed)
            receiver.wait_for_peer(WATCHDOG_S)
            target, request = Target(bed, receiver), receiver.open_request(1, PROMPT, 9)
            for _ in range(5):
                assert target.round(request), target.reasons
            one.attached._closed = True  # ends the loop, from another thread
            thread.join(WATCHDOG_S)
            assert not thread.is_alive()
    assert (len(rows), ended) == (5 * TWO.depth, [])


# ---- STEPs that a rank can't follow ---------------------------------------------------------------------------------


def test_nothing_is_drawn_before_every_rank_is_there() -> None:
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed) as draft, bed.receiver() as receiver:
            receiver.wait_for_peer(WATCHDOG_S)
            target, request = Target(bed, receiver), receiver.open_request(1, PROMPT, 9)
            assert not target.round(request)
            assert (target.reasons, draft.served) == ([R.PEER_LOST], [])
            assert bed.counters("leader")["steps_refused"] == 1
            with peer(bed) as one:
                bed.until(lambda: told_ready(bed), "rank 0 heard of it")
                ticket = receiver.enqueue(request, support=16, budget_us=20_000_000)
                assert one.follower.follow(one.step()), one.follower.discarded
                ticket.wait().release()
                assert bed.counters("leader")["steps_refused"] == 1


def test_a_link_that_is_down_refuses_steps_too() -> None:
    with Bed(TWO) as bed:
        bed.up("leader", "receiver0")
        with drafting(bed) as draft, bed.receiver() as receiver:
            receiver.wait_for_peer(WATCHDOG_S)
            target, request = Target(bed, receiver), receiver.open_request(1, PROMPT, 9)
            assert not target.round(request)
            assert (target.reasons, draft.served) == ([R.PEER_LOST], [])


def test_a_rank_that_gives_up_ends_the_proposal_everywhere() -> None:
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed) as draft, peer(bed) as one, bed.receiver() as receiver:
            draft.act = lambda _models, _step: None  # it never draws
            ready(bed)
            receiver.wait_for_peer(WATCHDOG_S)
            request = receiver.open_request(1, PROMPT, 9)
            for reason in (R.CANCELLED, R.COPY_FAILED):
                ticket = receiver.enqueue(request, support=16, budget_us=20_000_000)
                step = one.step()
                assert step.tokens.tolist() == list(PROMPT)
                step.fail(reason)
                with pytest.raises(ProposalDiscarded) as raised:
                    ticket.wait()
                assert raised.value.reason is reason
                with pytest.raises(ProposalDiscarded) as told:
                    step.token(step.anchor + 1)
                assert told.value.reason is reason
                request.next_round()
            bed.until(lambda: draft.leader.counters is not None and bed.counters("leader")["draft_ranks_lost"] == 2, "counted")


def test_what_the_target_gives_up_ends_at_every_rank() -> None:
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed) as draft, peer(bed) as one, bed.receiver() as receiver:
            draft.act = lambda _models, _step: None
            resets: list[tuple[int, Reason]] = []
            one.attached.on_reset(lambda request, reason: resets.append((request, reason)))
            ready(bed)
            receiver.wait_for_peer(WATCHDOG_S)
            request = receiver.open_request(1, PROMPT, 9)
            ticket = receiver.enqueue(request, support=16, budget_us=300_000)
            step = one.step()
            with pytest.raises(ProposalDiscarded) as raised:
                ticket.wait()
            assert raised.value.reason is R.TIMEOUT
            with pytest.raises(ProposalDiscarded) as told:
                step.token(step.anchor + 1)
            assert told.value.reason is R.TIMEOUT
            assert not step.alive
            assert (1, R.TIMEOUT) in resets


def test_a_rank_hears_of_requests_as_the_draft_does() -> None:
    with Bed(TWO) as bed:
        bed.up()
        heard: list[tuple[str, int, object]] = []
        with drafting(bed), bed.receiver() as receiver:
            receiver.wait_for_peer(WATCHDOG_S)
            early = receiver.open_request(1, PROMPT, 9)
            with peer(bed) as one:
                one.attached.on_open(lambda request, tokens: heard.append(("open", request, tokens)))
                one.attached.on_commit(lambda request, tokens: heard.append(("commit", request, tokens)))
                one.attached.on_close(lambda request: heard.append(("close", request, None)))

                def until(count: int) -> None:
                    bed.until(lambda: (one.attached.poll(), receiver.poll(), len(heard) >= count)[-1], f"{count} of {heard}")

                until(1)
                receiver.commit_target_only(early, early.next_round(), [7])
                until(2)
                receiver.close_request(early)
                receiver.open_request(2, [5], 9)
                until(4)
        assert heard == [("open", 1, list(PROMPT)), ("commit", 1, [7]), ("close", 1, None), ("open", 2, [5])]


def test_two_targets_have_a_link_each_behind_one_endpoint() -> None:
    with Bed(TWO) as bed:
        port = free_port()
        first = bed.config("receiver0").read_text(encoding="utf-8")
        bed.edit("leader", lambda text: f'{text}\n[[peer]]\nname = "group-b"\nlisten = "tcp://127.0.0.1:{port}"\n')
        bed.edit("leader1", lambda text: text.replace('["group-a"]', '["group-b", "group-a"]'))  # in any order
        bed._add("receiverb", [*bed.parts["receiver0"].command[:-1], str(bed.config("receiverb"))])
        here = "connect = " + json.dumps(f"tcp://127.0.0.1:{port}")
        lines = [here if line.startswith("connect") else line for line in first.splitlines()]
        bed.config("receiverb").write_text("\n".join(lines).replace("receiver0", "receiverb"), encoding="utf-8")
        bed.config("receiverb").chmod(0o600)
        bed.up()
        names = [each["peer"] for each in bed.status("leader")["sessions"]]
        assert names == ["group-a", "group-b", "draft1-group-a", "draft1-group-b"]
        bed.start("draft1")
        bed.wait_for_client("leader1")
        with drafting(bed), bed.receiver() as a, bed.receiver("receiverb") as b:
            for index, receiver in enumerate((a, b)):
                receiver.wait_for_peer(WATCHDOG_S)
                target = Target(bed, receiver)
                request = receiver.open_request(1, [*PROMPT, index], 9 + index)  # one ID, two targets
                target.until_ready(request)
                for _ in range(3):
                    assert target.round(request), target.reasons
        assert bed.parts["draft1"].running, bed.tail("draft1", 12)


# ---- what dies ------------------------------------------------------------------------------------------------------


LASTING = dataclasses.replace(SHARDS, rounds=1_000_000)
DEATHS = [(("draft1",), TWO), (("leader1",), TWO), (("draft1",), LASTING)]
MORE_DEATHS = [(("leader1",), LASTING)]
MORE_DEATHS += [(who, shape) for who in (("draft",), ("leader",), ("leader1", "draft1")) for shape in (TWO, LASTING)]


@pytest.mark.parametrize(
    ("victims", "shape"),
    (*DEATHS, *(pytest.param(*each, marks=pytest.mark.slow) for each in MORE_DEATHS)),
    ids=lambda value: value.mode if isinstance(value, Shape) else "-".join(value),
)
def test_a_rank_that_dies_costs_what_was_under_way_and_comes_back(victims: tuple[str, ...], shape: Shape) -> None:
    with Bed(shape) as bed:
        bed.start_all()

        def served() -> int:
            return min(bed.status(f"receiver{rank}")["ready"] for rank in range(shape.ranks))

        bed.until(lambda: served() >= 3, "proposals")
        pids = {name: bed.pid(name) for name in bed.parts if name not in victims}
        for victim in victims:
            bed.kill(victim)
        if "leader" in victims:
            bed.until(lambda: not bed.status("receiver0")["sessions"][0]["up"], "the loss of the session")
        else:
            discarded = bed.status("receiver0")["discarded"]
            bed.until(lambda: bed.status("receiver0")["discarded"] > discarded + 1, "proposals that end while a rank is away")
        for victim in victims:
            bed.start(victim)
            if victim.startswith("leader"):
                bed.wait_for_daemon(victim)
        before = served()
        bed.until(lambda: served() >= before + 3, "proposals again")
        bed.sessions_up()
        assert {name: bed.pid(name) for name in pids} == pids, "somebody else ended with it"
        reasons = set(bed.status("receiver0")["reasons"])
        allowed = {"peer_lost", "link_error", "cancelled", "timeout", "generation_stale"}
        assert reasons <= allowed, reasons
        for rank in range(shape.ranks):
            bed.kill(f"target{rank}")
        for rank in range(shape.ranks):
            name = f"receiver{rank}"
            bed.until(
                lambda name=name: all(n == 0 for s, n in bed.status(name)["slots"].items() if s != "FREE"), f"slots of {name}"
            )


def test_a_target_that_comes_back_is_followed_again() -> None:
    with Bed(TWO) as bed:
        bed.start_all()
        bed.until(lambda: bed.status("receiver0")["ready"] >= 3, "proposals")
        bed.kill("receiver0")
        bed.start("receiver0")
        bed.until(lambda: bed.wait_for_daemon("receiver0")["ready"] >= 3, "proposals again")
        assert bed.parts["draft1"].running, bed.tail("draft1", 12)


def test_sigterm_drains_a_rank() -> None:
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed) as draft, peer(bed) as one, bed.receiver() as receiver:
            ready(bed)
            receiver.wait_for_peer(WATCHDOG_S)
            request = receiver.open_request(1, PROMPT, 9)
            kept = draft.act
            draft.act = lambda models, step: (one.attached.draining or time.sleep(0.3), kept(models, step))[-1]  # type: ignore[func-returns-value]
            ticket = receiver.enqueue(request, support=16, budget_us=20_000_000)
            step = one.step()
            bed.signal("leader1", signal.SIGTERM)
            assert one.follower.follow(step), one.follower.discarded  # what was under way ends as ever
            with ticket.wait() as proposal:
                proposal.commit(0, [7])
            assert bed.wait("leader1", WATCHDOG_S) == 0
            assert one.attached.draining
            with pytest.raises(ProposalDiscarded) as raised:
                receiver.enqueue(request, support=16, budget_us=20_000_000).wait()
            assert raised.value.reason in (R.CANCELLED, R.PEER_LOST)


# ---- processes that break rules -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("record", "reason"),
    (
        ((m.PUT, 0, 0, 1, 3, 5, 1, 8, 0), "unexpected_kind"),
        ((m.PUT_SHARD, 0, 0, 1, 3, 1, 8, 5, 0), "unexpected_kind"),  # rank 0 sends whole rows here
        ((m.FAIL, 1, 0, 1, 1), "slot_bounds"),
        ((m.FAIL, 0, 999, 1, 1), "slot_bounds"),
        ((m.FAIL, 0, 0, 1, 1), None),  # of another session: nobody's
    ),
    ids=str,
)
def test_a_rank_that_breaks_a_rule_is_cut_off(record: tuple[int, ...], reason: str | None) -> None:
    with Bed(TWO) as bed:
        bed.up("leader", "leader1")
        bed.sessions_up_of("leader1")
        with peer(bed) as one:
            kind, *fields = record
            named = bed.status("leader1")["sessions"][0]["session"] if reason is not None else 1
            one.attached.send(kind, named, *fields)
            one.attached.ring()
            if reason is None:
                one.attached.poll()
                assert bed.status("leader1")["clients"], "it is not cut off"
                return
            bed.until(lambda: bed.counters("leader1").get("clients_cut_off") == 1, "cut off")
        assert bed.status("leader1")["reasons"].get(reason) == 1


def test_rank_0_puts_whole_rows_alone() -> None:
    with Bed(TWO) as bed:
        bed.up("leader")
        leader: AttachedLeader = attach_leader(bed.socket("leader"))
        leader.send(m.PUT_SHARD, 1, 0, 0, 1, 3, 1, 8, 5, 0)
        leader.ring()
        bed.until(lambda: bed.counters("leader").get("clients_cut_off") == 1, "cut off")
        leader.close()


def test_a_rank_without_a_range_can_put_none() -> None:
    with Bed(TWO) as bed:
        bed.up()
        with drafting(bed), peer(bed) as one, bed.receiver() as receiver:
            ready(bed)
            receiver.wait_for_peer(WATCHDOG_S)
            receiver.enqueue(receiver.open_request(1, PROMPT, 9), support=16, budget_us=20_000_000)
            step = one.step()
            step.token(step.anchor + 1)
            with pytest.raises(LocalMisuse, match="rank 0 sends whole rows"):
                step.put(step.anchor + 1, counts=np.zeros(VOCAB_HALF, np.uint32), mass_before=0)
            with pytest.raises(LocalMisuse, match="outside range"):
                step.token(step.anchor)
            with pytest.raises(LocalMisuse, match="no copy stage"):
                step.begin_copy(step.anchor + 1, object(), "weights")


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_a_range_is_judged_before_it_is_sent(support: int | None) -> None:
    shape = dataclasses.replace(SHARDS, support=support, rounds=2, requests=1)
    with Bed(shape) as bed:
        bed.up()
        bed.start("draft")
        bed.wait_for_client("leader")
        with peer(bed) as one:
            assert one.attached.splits_vocabulary
            first, end = one.attached.first_id, one.attached.end_id
            assert (first, end) == (512, 1000)
            for rank in range(2):
                bed.start(f"target{rank}")
            step = one.step()
            position = step.anchor + 1
            counts, ids = np.zeros(end - first, np.uint32), None
            if support is not None:
                counts, ids = np.ones(2, np.uint32), np.array([first, first + 1], np.int32)

            def put(**changes: object) -> bool:
                return step.put(**{"position": position, "counts": counts, "mass_before": 5, "ids": ids} | changes)  # type: ignore[arg-type]

            if step.alive and not one.attached.poll() and not step._followed.tokens:
                with pytest.raises(LocalMisuse, match="no token yet"):
                    put()
            step.token(position)
            with pytest.raises(LocalMisuse, match="out of order"):
                put(position=position + 1)
            with pytest.raises(LocalMisuse, match="ids belong"):
                put(ids=np.zeros(0, np.int32) if support is None else None)
            with pytest.raises(LocalMisuse, match="counts must be contiguous uint32"):
                put(counts=counts.astype(np.int64))
            with pytest.raises(InvalidQ, match="exceed"):
                put(mass_before=1 << 24 if support is not None else (1 << 24) + 1)
            with pytest.raises(InvalidQ, match="exceed"):
                put(mass_before=-1)
            if support is None:
                with pytest.raises(InvalidQ, match="exceeds"):
                    put(counts=np.full(end - first, (1 << 24) + 1, np.uint32))
            else:
                for wrong, words in (
                    ([first - 1, first], "this rank's range"),
                    ([first, end], "this rank's range"),
                    ([first + 1, first], "rise strictly"),
                ):
                    with pytest.raises(InvalidQ, match=words):
                        put(ids=np.array(wrong, np.int32))
                with pytest.raises(InvalidQ, match="zero counts"):
                    put(counts=np.zeros(2, np.uint32))
                with pytest.raises(InvalidQ, match="at most 16"):
                    put(counts=np.ones(17, np.uint32), ids=np.arange(first, first + 17, dtype=np.int32))
            assert one.follower.follow(step), "a range that was refused costs nothing: the right one goes out"
            bed.until(lambda: bed.status("receiver1")["ready"] >= 1, "the proposal")


VOCAB_HALF = SMALL.vocab_size // 2
