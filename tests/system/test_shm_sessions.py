"""Sessions over the shm link: both ends in one process, then in two, with a peer that scribbles and one that is killed."""

from __future__ import annotations

import json
import mmap
import signal
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from system_live import running
from system_rig import (
    ANYWHERE,
    PROMPT,
    SMALL,
    MakeRig,
    Rig,
    captured,
    child_environment,
    consume,
    draft,
    eventually,
    expected,
    go_on_alone,
    one_round,
)
from test_demo import OUTCOMES, report

from pp1q_transport._native.ring import HEADER_BYTES
from pp1q_transport.client import Leader, Receiver, Role, configure
from pp1q_transport.errors import ConfigError, ProposalDiscarded, Reason, Refused
from pp1q_transport.links import shm_port
from pp1q_transport.links.shm_memory import RING_BYTES
from pp1q_transport.toy.models import ToyModels

pytestmark = pytest.mark.timeout(90)
CHILD = Path(__file__).with_name("system_child.py")


@pytest.fixture
def memories(monkeypatch: pytest.MonkeyPatch) -> list[mmap.mmap]:
    """A further mapping of every link memory that is made: what a hostile peer has."""
    found: list[mmap.mmap] = []
    real = shm_port.map_memory

    def mapped(fd: int) -> mmap.mmap:
        found.append(real(fd))
        return real(fd)

    monkeypatch.setattr(shm_port, "map_memory", mapped)
    return found


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
@pytest.mark.parametrize("listens", ("receiver", "leader"))
def test_rounds_over_shm_commit_what_they_would_without_any_transport(
    make_rig: MakeRig, listens: str, support: int | None
) -> None:
    rig = make_rig(listens=listens, link="shm").connect()
    for end in (rig.leader, rig.receiver):
        assert end.engine.link is not None
        assert end.engine.link.kind == end.engine.link.describe()["link"] == "shm"
        assert end.engine.config.link == "shm"
    request = rig.receiver.open_request(1, PROMPT, seed=21)
    journal = []
    for number in range(8):
        with rig.round(request, support=support) as proposal:
            journal.append((number, proposal.generation, True))
            consume(rig.models, rig.receiver, request, proposal)
    assert request.tokens.tolist()[2:] == expected(rig.models, 21, journal, depth=3, support=support)
    assert rig.all_free()


@pytest.mark.parametrize(("receives", "leads"), (("tcp", "shm"), ("shm", "tcp")))
def test_another_kind_is_refused_by_name_and_nothing_falls_back(make_rig: MakeRig, receives: str, leads: str) -> None:
    rig = make_rig(receiver={"link": receives}, leader={"link": leads})
    with captured() as log, pytest.raises(Refused) as caught:
        rig.connect()
    assert (caught.value.reason, caught.value.field) == (Reason.SEMANTIC_MISMATCH, "link_kinds")
    assert leads in str(caught.value)
    assert receives in str(caught.value)
    assert not rig.receiver.up
    assert any(event["event"] == "hello_refused" and "link_kinds" in event["detail"] for event in log)


@pytest.mark.parametrize("kinds", (("tcp", "shm"), ("roce",), ("shared memory",)))
def test_an_engine_has_one_kind_that_this_build_has(kinds: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError, match="link_kinds"):
        configure(Role.LEADER, connect=ANYWHERE, **SMALL, link_kinds=kinds)
    with pytest.raises(ConfigError, match="link_kinds"):
        configure(Role.LEADER, connect=ANYWHERE, **SMALL, link=kinds[-1] if len(kinds) == 1 else "")


def test_a_busy_session_in_two_threads_notices_nothing() -> None:
    with running(link="shm") as live:
        live.more_rounds(100)


# ---- a peer that scribbles --------------------------------------------------------------------------------------------


def test_what_is_ready_stays_what_was_validated(make_rig: MakeRig, memories: list[mmap.mmap]) -> None:
    """The peer overwrites every byte it can reach once a proposal is ready."""
    rig = make_rig(link="shm").connect()
    request = rig.receiver.open_request(1, PROMPT, seed=3)
    with rig.round(request) as proposal:
        before = [proposal.q(index).values.copy() for index in range(proposal.depth)]
        for ring in (0, 1):
            at = ring * (HEADER_BYTES + RING_BYTES) + HEADER_BYTES
            memories[0][at : at + RING_BYTES] = b"\xee" * RING_BYTES
        rig.serve()
        for index, values in enumerate(before):
            assert (proposal.q(index).values == values).all()
        consume(rig.models, rig.receiver, request, proposal)
    rig.round(request).release()


@pytest.mark.parametrize("bit", (0, 22, 31))
def test_a_row_that_changes_in_the_landing_memory_is_discarded(make_rig: MakeRig, memories: list[mmap.mmap], bit: int) -> None:
    """Between the leader's writing and our copy: the digest is of the copy, so it tells. The session goes on."""
    rig = make_rig(link="shm").connect()
    request = rig.receiver.open_request(1, PROMPT, seed=3)
    rig.round(request).release()
    go_on_alone(rig.models, rig.receiver, request, request.round - 1)
    session = rig.receiver.session
    ticket = rig.receiver.enqueue(request)
    step = rig.next_step()
    link = rig.leader.engine.link
    assert link is not None
    start = link.bytes_out
    rig.draft(step)
    rig.leader.engine.flush()
    assert link.bytes_out - start >= 3 * 4 * SMALL["vocab_size"]
    # The leader dialed, so it writes the second ring; its second row's payload lies behind a row and two headers.
    at = HEADER_BYTES + RING_BYTES + HEADER_BYTES + start + 128 + 512 + 128 + 40
    memories[0][at + bit // 8] ^= 1 << bit % 8
    rig.until(lambda: ticket.settled)
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.PAYLOAD_DIGEST
    assert rig.all_free()
    assert rig.receiver.session is session
    go_on_alone(rig.models, rig.receiver, request, ticket.round)
    rig.round(request).release()


def test_impossible_indexes_end_the_session_and_the_next_one_has_memory_of_its_own(
    make_rig: MakeRig, memories: list[mmap.mmap]
) -> None:
    rig = make_rig(link="shm").connect()
    request = rig.receiver.open_request(1, PROMPT, seed=3)
    rig.round(request).release()
    go_on_alone(rig.models, rig.receiver, request, request.round - 1)
    session = rig.receiver.session
    at = HEADER_BYTES + RING_BYTES  # the head of the ring that the receiver reads
    memories[0][at : at + 8] = b"\xff" * 8
    rig.until(lambda: rig.receiver.counters.of(Reason.LINK_ERROR))
    rig.until(lambda: rig.receiver.up and rig.leader.up and rig.receiver.session is not session)
    assert request.generation == 1
    rig.round(request).release()


# ---- death ------------------------------------------------------------------------------------------------------------


@contextmanager
def leading(endpoint: str) -> Any:
    command = [sys.executable, str(CHILD), "lead", "--connect", endpoint, "--link", "shm", "--wait"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment())
    try:
        yield process
    finally:
        process.kill()
        process.wait(20)


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_kill_9_of_the_leader_is_peer_lost_and_requests_go_on(support: int | None) -> None:
    """Three lives; the receiver sleeps in the kernel while the leader dies, and nothing ready is lost."""
    toy = ToyModels.of(7, SMALL["vocab_size"])
    with Receiver(configure(Role.RECEIVER, listen=ANYWHERE, link="shm", **SMALL)) as receiver:
        request = receiver.open_request(1, PROMPT, seed=21)
        journal = []
        for life in range(3):
            with leading(receiver.endpoint) as leader:
                receiver.wait_for_peer(30)
                journal += [one_round(toy, receiver, request, support=support)[:3] for _ in range(4)]
                leader.send_signal(signal.SIGKILL)
                while receiver.up:
                    receiver.poll()
                    receiver.engine.wait()
            assert receiver.counters.of(Reason.PEER_LOST) == life + 1
            assert receiver.totals()["slots_not_free"] == 0
        assert all(ready for _round, _generation, ready in journal)
        assert request.tokens.tolist()[2:] == expected(toy, 21, journal, depth=3, support=support)


def test_kill_9_of_the_receiver_is_peer_lost_to_the_leader() -> None:
    toy = ToyModels.of(7, SMALL["vocab_size"])
    with Leader(configure(Role.LEADER, listen=ANYWHERE, link="shm", **SMALL)) as leader:
        command = [sys.executable, str(CHILD), "receive", "--connect", leader.endpoint, "--link", "shm"]
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=child_environment())
        try:
            leader.wait_for_peer(30)
            for _ in range(20):
                while (step := leader.next_step(1_000_000)) is None:
                    pass
                draft(toy, step)
        finally:
            process.kill()
            process.wait(20)
        eventually(lambda: not leader.up, lambda: leader.serve(1_000_000))
        assert leader.counters.of(Reason.PEER_LOST) == 1
        assert leader.requests.requests == {}


# ---- the commands -----------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("q", (("--sparse", "32"), ("--vocab", "4096")), ids=("sparse", "dense"))
def test_the_demo_over_shm_bears_every_fault(q: tuple[str, ...]) -> None:
    got = report("--link", "shm", "--rounds", "800", "--faults", "corrupt=0.05,late=0.05,drop=0.05", *q)
    assert got["link"] == "shm"
    assert got["ready"] + got["discarded"] == got["rounds"] == 800
    assert got["p_value"] > 1e-6
    assert (got["slots_not_free"], got["faults_that_passed"]) == (0, 0)
    assert set(got["faults_injected"]) == set(OUTCOMES), "every kind was met"
    for kind, outcomes in got["fault_outcomes"].items():
        assert set(outcomes) <= OUTCOMES[kind]
    assert got["sessions"] > 1, "header faults cost the link, which formed again"


def test_the_demo_says_which_link_ran() -> None:
    for link in ("tcp", "shm"):
        got = report("--link", link, "--rounds", "8", "--vocab", "512", "--tokens")
        assert (got["link"], got["ready"]) == (link, 8)


@pytest.mark.parametrize("idle", ("spin", "block"))
def test_the_benchmark_reports_the_link_that_ran(idle: str) -> None:
    command = [
        sys.executable, "-m", "pp1q_transport.cli.send", "--loopback", "--link", "shm", "--dense", "--vocab", "4096",
        "--rounds", "10", "--warmup", "2", "--idle", idle, "--no-floors", "--json",
    ]  # fmt: skip
    done = subprocess.run(command, env=child_environment(), capture_output=True, text=True, timeout=80, check=False)
    assert done.returncode == 0, done.stderr
    got = json.loads(done.stdout)
    assert (got["link"], got["extra"]["link"]["link"]) == ("shm", "shm")
    assert got["discarded"] == 0


def test_without_asking_for_it_the_link_is_tcp(rig: Rig) -> None:
    assert rig.receiver.engine.config.link == "tcp"
    assert rig.receiver.engine.link is not None
    assert rig.receiver.engine.link.kind == "tcp"
