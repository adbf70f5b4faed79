"""Drafts that attach to a leader's daemon and break every rule: no proposal of theirs becomes ready, and no target loses its
session by it (must-show 6 of the sidecar)."""

from __future__ import annotations

import itertools
import mmap
import os
import random
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import daemon_rig
import pytest
from daemon_rig import PROMPT, VOCAB, WATCHDOG_S, Bed, Draft, Target, drafting, two_targets
from hostile import EDGES, Raw, header_noise, odd_record, scribble

from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.local.handshake import Role

pytestmark = pytest.mark.timeout(180)

MAX = (1 << 32) - 1
FRESH = itertools.count(1 << 40)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """One set of daemons for all attacks: what one leaves behind must not matter to the next."""
    with two_targets() as made:
        for name in ("receiver0", "receiverb"):
            made.edit(name, lambda text: text + "\n[breaker]\nenabled = false\n")
        yield made.up()


@contextmanager
def hostile_draft(bed: Bed) -> Iterator[Raw]:
    raw = Raw(bed.socket("leader"), Role.LEADER_DRAFT)
    try:
        yield raw
    finally:
        raw.close()
        bed.until(lambda: not bed.status("leader")["clients"], "the leader is rid of it")


def seen_by(raw: Raw) -> list[tuple[int, ...]]:
    """The STEPs that the daemon gave to this draft."""
    steps = []
    while (record := raw.channel.receive()) is not None:
        if record[0] == m.STEP_FOR_DRAFT:
            steps.append(m.unpack(*record)[0])
        elif record[0] == m.TARGET_UP:
            target, _, session = m.unpack(*record)[0]
            raw.sessions[target] = session
    return steps


def step_of(raw: Raw) -> dict[str, int]:
    """The next STEP that comes, by names of fields, and the session it belongs to."""
    stop = time.monotonic() + WATCHDOG_S
    while time.monotonic() < stop:
        steps = seen_by(raw)
        if steps:
            fields = dict(zip(m.TABLE[m.STEP_FOR_DRAFT].fields, steps[-1], strict=True))
            return fields | {"session": raw.sessions[fields["target"]]}
    raise AssertionError("no STEP came")


@pytest.mark.parametrize("act", (scribble, header_noise, None), ids=("scribbles", "noise", "odd records"))
def test_a_hostile_draft_makes_no_proposal_ready_and_hurts_no_target(
    bed: Bed, act: Callable[[Raw, random.Random], None] | None
) -> None:
    seeded = random.Random(41)
    pids = {name: bed.pid(name) for name in bed.daemons}
    formed = {name: bed.status(name)["sessions"][0]["formed"] for name in ("receiver0", "receiverb")}
    with bed.receiver() as first, bed.receiver("receiverb") as second:
        targets = [Target(bed, first), Target(bed, second)]
        requests = []
        for receiver in (first, second):
            receiver.wait_for_peer()
            requests.append(receiver.open_request(next(FRESH), PROMPT, seed=8))
        for _ in range(30):
            with hostile_draft(bed) as raw:
                tickets = []
                for target, request in zip(targets, requests, strict=True):
                    tickets.append(target.receiver.enqueue(request, support=16, budget_us=30_000))
                bed.status("leader")
                steps = seen_by(raw)
                if act is not None:
                    act(raw, seeded)
                else:
                    odd_puts(raw, seeded, steps)
                for ticket in tickets:
                    with pytest.raises(ProposalDiscarded):
                        ticket.wait()
        for target, request in zip(targets, requests, strict=True):
            target.receiver.commit_target_only(request, request.round - 1, [3])
        with drafting(bed):
            for target, request in zip(targets, requests, strict=True):
                target.until_ready(request)
        assert {name: bed.status(name)["sessions"][0]["formed"] for name in formed} == formed, "no session was lost by it"
    assert {name: bed.pid(name) for name in bed.daemons} == pids
    totals = bed.counters("leader")
    assert totals["clients_cut_off"] >= 5


def odd_puts(raw: Raw, seeded: random.Random, steps: list[tuple[int, ...]]) -> None:
    """Rows and refusals for the slots that were really granted, with values that are wrong in one place or in all."""
    for region, size in zip(raw.regions, raw.sizes, strict=True):
        os.pwrite(region, seeded.randbytes(min(size, 4096)), 0)
    for _ in range(40):
        if raw.cut:
            return
        known: dict[str, tuple[int, ...]] = {"reason": (0, 1, 2, 200, MAX), "target": (0, 1)}
        if steps:
            fields = dict(zip(m.TABLE[m.STEP_FOR_DRAFT].fields, seeded.choice(steps), strict=True))
            known |= {name: (fields[name],) for name in ("target", "slot", "slot_generation")}
            known["session"] = (raw.sessions[fields["target"]],)
            anchor = fields["anchor"]
            known |= {"position": (anchor + 1, anchor + 1, anchor + 2, anchor, anchor + 4), "entries": (1, 2, 16, 17, 0)}
            known |= {"length": (8, 16, 128, 0, MAX)}
        raw.body(*odd_record(seeded, known))


def test_a_draft_may_write_its_staging_but_not_shrink_it(bed: Bed) -> None:
    with hostile_draft(bed) as raw:
        assert len(raw.regions) == 2, "one for each target"
        for fd in (*raw.regions, raw.channel_fd):
            assert os.pwrite(fd, b"x", 4096 if fd == raw.channel_fd else 0) == 1
            with pytest.raises(OSError, match="Operation not permitted"):
                os.ftruncate(fd, 0)


def test_a_draft_that_rewrites_a_row_after_it_put_it_spoils_only_that(bed: Bed) -> None:
    """The payload is read where the draft can write: the digest in the header no longer fits, or the row it fits is whole."""
    with bed.receiver() as receiver:
        receiver.wait_for_peer()
        request = receiver.open_request(next(FRESH), PROMPT, seed=8)
        with hostile_draft(bed) as raw:
            memory = mmap.mmap(raw.regions[0], raw.sizes[0])
            for number in range(20):
                ticket = receiver.enqueue(request, support=16, budget_us=30_000)
                fields = step_of(raw)
                at = raw.geometry.slots().row_offset(fields["slot"], 0)
                memory[at : at + 128] = bytes(128)
                row = (fields["slot"], fields["slot_generation"], fields["anchor"] + 1)
                raw.send(m.PUT, fields["session"], fields["target"], *row, number % VOCAB, 16, 128, 0)
                for spoil in EDGES:
                    memory[at : at + 4] = spoil.to_bytes(8, "little")[:4]
                with pytest.raises(ProposalDiscarded):
                    ticket.wait()
            memory.close()
    assert bed.status("leader")["sessions"][0]["up"]


def test_a_row_or_a_refusal_that_names_a_session_that_is_over_is_nobodys(bed: Bed) -> None:
    """A draft that stood still while a receiver died and came back: the new session's slots and generations look the same."""
    with hostile_draft(bed) as raw, bed.receiver() as receiver:
        seen = []
        for life in range(3):
            formed = bed.status("leader")["sessions"][0]["formed"]
            receiver.wait_for_peer(WATCHDOG_S)
            request = receiver.open_request(next(FRESH), PROMPT, seed=8)
            receiver.enqueue(request, support=16, budget_us=20_000_000)
            seen.append(step_of(raw))
            if life < 2:
                bed.kill("receiver0")
                bed.start("receiver0")
                bed.until(lambda was=formed: bed.status("leader")["sessions"][0]["formed"] > was, "the receiver's next life")
        first, second = seen[1:]
        assert [first[name] for name in ("slot", "slot_generation")] == [second[name] for name in ("slot", "slot_generation")]
        assert first["session"] != second["session"]
        place = (second["target"], second["slot"], second["slot_generation"])
        rows = bed.status("leader")["rows"]
        refused = bed.counters("leader").get("peer_status", 0)
        raw.send(m.PUT, first["session"], *place, second["anchor"] + 1, 1, 16, 128, 0)
        raw.send(m.FAIL, first["session"], *place, Reason.CANCELLED.code)
        raw.send(m.PUT, second["session"], *place, second["anchor"] + 1, 1, 16, 128, 0)
        bed.until(lambda: bed.status("leader")["rows"] > rows, "the row of the session that lives")
        assert bed.status("leader")["rows"] == rows + 1
        assert bed.counters("leader").get("peer_status", 0) == refused


def test_a_draft_that_is_stopped_costs_budgets_and_nothing_else(bed: Bed) -> None:
    draft = Draft(bed.socket("leader"), daemon_rig.ToyModels.of(bed.shape.seed, bed.shape.vocab_size))
    draft.stop(close=False)  # it is attached and does nothing, as under SIGSTOP
    with bed.receiver() as receiver:
        receiver.wait_for_peer()
        target = Target(bed, receiver)
        request = receiver.open_request(next(FRESH), PROMPT, seed=8)
        for _ in range(3):
            assert not target.round(request, 30_000)
        assert set(target.reasons) == {Reason.TIMEOUT}
        draft.leader.close()
        with drafting(bed):
            target.until_ready(request)
