"""kill -9 of either process at 50 seeded points: the other says `peer_lost` within a second, frees its slots and goes on.

The survivor lives in this process through all kills of a test; the victim is started anew (by exec) after each.
"""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import system_rig as rig_module
from system_rig import ANYWHERE, PROMPT, SMALL, child_environment, eventually, expected, go_on_alone, open_descriptors

from pp1q_transport.client import Leader, Receiver, Role, Ticket, configure
from pp1q_transport.errors import PeerFault, ProposalDiscarded, Reason
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.models import ToyModels

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]

KILLS = 25
WITHIN_S = 1.0  # the issue's own limit for saying peer_lost
CHILD = Path(__file__).with_name("system_child.py")


@contextmanager
def victim(role: str, endpoint: str, *options: str, listens: bool = False) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, str(CHILD), role, "--listen" if listens else "--connect", endpoint, *options],
        env=child_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def shared_memory() -> set[str]:
    return set(os.listdir("/dev/shm"))


class Survivor:
    """A receiver that keeps two requests going, whatever happens to the leader."""

    def __init__(self, receiver: Receiver, models: ToyModels) -> None:
        self.receiver = receiver
        self.models = models
        self.requests = [receiver.open_request(i, PROMPT, seed=100 + i) for i in (1, 2)]
        self.journals: dict[int, list[tuple[int, int, bool]]] = {1: [], 2: []}
        self.tickets: dict[int, tuple[Ticket, int]] = {}

    def issue(self, support: int | None) -> None:
        for request in self.requests:
            if request.request not in self.tickets:
                self.tickets[request.request] = (self.receiver.enqueue(request, support=support), request.round - 1)

    def settle(self, request: Request) -> Reason | None:
        """Finishes the request's round; the reason if its proposal was discarded."""
        ticket, round_number = self.tickets.pop(request.request)
        try:
            with ticket.wait() as proposal:
                self.journals[request.request].append((round_number, proposal.generation, True))
                rig_module.consume(self.models, self.receiver, request, proposal)
        except ProposalDiscarded as discarded:
            go_on_alone(self.models, self.receiver, request, round_number)
            self.journals[request.request].append((round_number, request.generation, False))
            return discarded.reason
        return None


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_the_receiver_survives_every_death_of_the_leader(support: int | None) -> None:
    before, seeded = shared_memory(), random.Random(11)
    slowest_s = 0.0
    models = ToyModels.of(7, SMALL["vocab_size"])
    with Receiver(configure(Role.RECEIVER, listen=ANYWHERE, **SMALL)) as receiver:
        survivor: Survivor | None = None
        descriptors = 0
        for kill in range(KILLS // 2 + 1):
            with victim("lead", receiver.endpoint, "--wait") as leader:
                receiver.wait_for_peer(30)
                survivor = survivor or Survivor(receiver, models)
                for _ in range(seeded.randrange(4)):
                    survivor.issue(support)
                    for request in survivor.requests:
                        survivor.settle(request)
                survivor.issue(support)
                for _ in range(seeded.choice((0, 1, 5, 20, 200))):
                    receiver.poll()
                leader.send_signal(signal.SIGKILL)
                killed_s = time.monotonic()
                eventually(lambda: not receiver.up, receiver.poll)
                slowest_s = max(slowest_s, time.monotonic() - killed_s)
            reasons = {survivor.settle(request) for request in survivor.requests}
            assert reasons <= {None, Reason.PEER_LOST}
            assert receiver.totals()["slots_not_free"] == 0
            assert receiver.counters.of(Reason.PEER_LOST) >= 1
            assert all(request.generation >= kill + 1 for request in survivor.requests), "a generation rises with each life"
            if kill == 0:
                descriptors = open_descriptors()
        eventually(lambda: open_descriptors() <= descriptors, receiver.poll)  # libzmq closes in its own time
        assert survivor is not None
        for request in survivor.requests:
            journal = survivor.journals[request.request]
            assert request.tokens.tolist()[len(PROMPT) :] == expected(
                models, request.seed, journal, depth=SMALL["depth"], support=support
            ), "the committed tokens are what these rounds give without any transport"
    print(f"slowest peer_lost after a kill: {slowest_s * 1000:.1f} ms")
    assert slowest_s <= WITHIN_S
    assert shared_memory() == before


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_the_leader_survives_every_death_of_the_receiver(support: int | None) -> None:
    before, seeded = shared_memory(), random.Random(12)
    slowest_s = 0.0
    models = ToyModels.of(7, SMALL["vocab_size"])
    options = [] if support is None else ["--support", str(support)]
    with Leader(configure(Role.LEADER, listen=ANYWHERE, **SMALL)) as leader:
        resets: list[Reason] = []
        leader.on_reset(lambda _request, reason: resets.append(reason))
        descriptors = 0
        for kill in range(KILLS // 2 + 1):
            generation = ["--generation", str(1000 * (kill + 1))]
            with victim("receive", leader.endpoint, *generation, *options) as receiver:
                leader.wait_for_peer(30)
                serve_rows(leader, models, seeded.randrange(1, 40))
                resets.clear()
                receiver.send_signal(signal.SIGKILL)
                killed_s = time.monotonic()
                eventually(lambda: not leader.up, lambda: leader.serve(1_000_000))
                slowest_s = max(slowest_s, time.monotonic() - killed_s)
            assert set(resets) <= {Reason.PEER_LOST}
            assert leader.next_step(0) is None, "nothing is drafted for a receiver that is gone"
            assert leader.requests.requests == {}
            if kill == 0:
                descriptors = open_descriptors()
        eventually(lambda: open_descriptors() <= descriptors, leader.poll)
        with victim("receive", leader.endpoint, "--generation", "900000", "--rounds", "4", *options) as receiver:
            leader.wait_for_peer(30)
            while receiver.poll() is None:
                step = leader.next_step(1_000_000)
                if step is not None:
                    rig_module.draft(models, step)
            output = receiver.communicate(timeout=20)[0]
        assert receiver.returncode == 0
        for name, (journal, tokens) in json.loads(output).items():
            assert all(ready for _round, _generation, ready in journal)
            assert tokens[len(PROMPT) :] == expected(models, 100 + int(name), journal, depth=SMALL["depth"], support=support)
    print(f"slowest peer_lost after a kill: {slowest_s * 1000:.1f} ms")
    assert slowest_s <= WITHIN_S
    assert shared_memory() == before


def serve_rows(leader: Leader, models: ToyModels, rows: int) -> None:
    """Drafts until so many rows are put, stopping in the middle of a proposal where they end."""
    while rows > 0:
        step = leader.next_step(1_000_000)
        if step is None:
            assert leader.up, "the receiver ended by itself"
            continue
        rows -= len(rig_module.draft(models, step, min(rows, step.depth)))


def free_port() -> str:
    """An endpoint that nobody listens on, and that every life of a victim can have."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.mark.parametrize("role", ("receive", "lead"))
def test_one_who_connects_survives_every_death_of_the_listener(role: str) -> None:
    """The kill may come at any time: before the victim listens, within HELLO or the link's proof, in the middle of a round."""
    endpoint, seeded, models = free_port(), random.Random(13), ToyModels.of(7, SMALL["vocab_size"])
    slowest_s, met_up = 0.0, 0
    survivor: Leader | Receiver
    if role == "receive":
        survivor = Leader(configure(Role.LEADER, connect=endpoint, **SMALL))
    else:
        survivor = Receiver(configure(Role.RECEIVER, connect=endpoint, **SMALL))
        kept = Survivor(survivor, models)
    with survivor:
        descriptors = 0
        for kill in range(12):
            generation = ["--generation", str(1000 * (kill + 1))] if role == "receive" else ["--wait"]
            with victim(role, endpoint, *generation, listens=True) as listener:
                # Half of the points lie around the forming (a start takes some 0.3 s), the others up to 0.1 s into the session.
                if kill % 2:
                    eventually(lambda: survivor.up, lambda: turn(survivor, models), 30.0)
                stop = time.monotonic() + (seeded.choice((0.0, 0.001, 0.01, 0.1)) if kill % 2 else seeded.uniform(0.2, 0.5))
                while time.monotonic() < stop:
                    turn(survivor, models)
                was_up = survivor.up
                met_up += was_up
                listener.send_signal(signal.SIGKILL)
                killed_s = time.monotonic()
                eventually(lambda: not survivor.up, lambda: turn(survivor, models))
                if was_up:
                    slowest_s = max(slowest_s, time.monotonic() - killed_s)
            if role == "lead":
                assert kept.receiver.totals()["slots_not_free"] == 0
            else:
                assert not survivor.requests.requests
            if kill == 2:
                descriptors = open_descriptors()
        eventually(lambda: open_descriptors() <= descriptors, lambda: turn(survivor, models))
        last = ["--generation", "900000", "--rounds", "3"] if role == "receive" else ["--wait"]
        with victim(role, endpoint, *last, listens=True) as listener:
            eventually(lambda: survivor.up, lambda: turn(survivor, models), 30.0)
            if role == "lead":
                kept.issue(None)
                assert {kept.settle(request) for request in kept.requests} == {None}
            else:
                eventually(lambda: listener.poll() is not None, lambda: turn(survivor, models), 30.0)
                assert listener.returncode == 0
    assert met_up >= 6
    print(f"slowest peer_lost after a kill: {slowest_s * 1000:.1f} ms")
    assert slowest_s <= WITHIN_S


def turn(survivor: Leader | Receiver, models: ToyModels) -> None:
    """What a process does all day; a receiver has nothing under way here."""
    if isinstance(survivor, Receiver):
        survivor.poll()
        return
    step = survivor.next_step(100_000)
    if step is not None:
        rig_module.draft(models, step)


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_a_restarted_receiver_goes_on_from_what_it_kept(support: int | None) -> None:
    """Its requests keep their IDs, seeds and committed tokens, under generations beyond all they had: the leader, which lived
    through it, must find no key used twice, and the tokens must be those of these rounds without any transport."""
    models, seeded = ToyModels.of(7, SMALL["vocab_size"]), random.Random(14)
    options = [] if support is None else ["--support", str(support)]
    kept: dict[str, tuple[int, list[int]]] = {}
    journals: dict[str, list[tuple[int, int, bool]]] = {"1": [], "2": []}
    with Leader(configure(Role.LEADER, listen=ANYWHERE, **SMALL)) as leader:
        for life in range(8):
            with victim("receive", leader.endpoint, "--generation", "0", "--resume", json.dumps(kept), *options) as receiver:
                leader.wait_for_peer(30)
                serve_rows(leader, models, seeded.randrange(4, 40))
                receiver.send_signal(signal.SIGKILL)
                eventually(lambda: not leader.up, lambda: leader.serve(1_000_000))
                assert receiver.stdout is not None
                for line in receiver.stdout.read().splitlines(keepends=True):
                    if line.endswith("\n"):
                        state = json.loads(line)
                        kept |= state["kept"]
                        ((name, _),) = state["kept"].items()
                        journals[name].append(tuple(state["entry"]))
            if life:
                assert all(generation >= 1 for generation, _ in kept.values())
    assert leader.counters.of(Reason.KEY_REUSE) == 0
    assert len({entry[1] for entry in journals["1"]}) > 3, "several lives committed something"
    for name, (_generation, tokens) in kept.items():
        want = expected(models, 100 + int(name), journals[name], depth=SMALL["depth"], support=support)
        assert tokens[len(PROMPT) :] == want


@pytest.mark.parametrize("connects", ("survivor", "victim"))
@pytest.mark.parametrize("role", ("lead", "receive"))
def test_a_survivor_that_does_not_wait_raises_peer_lost(role: str, connects: str) -> None:
    endpoint = free_port()
    mine = {"connect" if connects == "survivor" else "listen": endpoint}
    survivor: Leader | Receiver
    with victim(role, endpoint, listens=connects == "survivor") as dying:
        if role == "lead":
            survivor = Receiver(configure(Role.RECEIVER, wait_for_peer=False, **mine, **SMALL))
        else:
            survivor = Leader(configure(Role.LEADER, wait_for_peer=False, **mine, **SMALL))
        with survivor:
            survivor.wait_for_peer(30)
            dying.send_signal(signal.SIGKILL)
            with pytest.raises(PeerFault) as raised:
                eventually(lambda: False, survivor.poll)
            assert raised.value.reason is Reason.PEER_LOST
            if isinstance(survivor, Receiver):
                assert survivor.totals()["slots_not_free"] == 0


def test_no_process_and_no_descriptor_is_left_behind() -> None:
    """Nothing that this module started still runs, and no child holds what it should not."""
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children", encoding="ascii") as children:
        assert children.read().split() == []
