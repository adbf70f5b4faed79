"""A hundred faults over a cable between two devices, and after them nothing is held that was not held before: no memory region,
queue pair, completion queue or domain, in this process or in the kernel, and no slot.

Each cycle: a proposal is under way when the fault comes, whatever becomes of it; the fault is mended; proposals are ready again.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

from processes import Conversation
from resources import kernel_counts, own_counts
from system_rig import ANYWHERE, PROMPT, SMALL, Rig, child_environment, draft, eventually
from verbs_peer import A, B

from pp1q_transport.client import EngineConfig, Leader, Receiver, Role, configure
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.toy.models import ToyModels

pytestmark = pytest.mark.timeout(600)
WITHIN_S = 200.0
SETTINGS = {"timeout": 12, "retry_count": 3}
# 100 cycles in all.
QUEUE_PAIR_ERRORS, LINK_DOWNS, BLACKOUTS, LOSSES, KILLS = 40, 16, 16, 8, 10
VOCAB = 4096  # rows larger than a message: written from where they lie
# What a discard may be for when its link broke, or the time ran out meanwhile.
BROKEN = {Reason.PEER_LOST, Reason.LINK_ERROR, Reason.TIMEOUT, Reason.INCOMPLETE, Reason.OVERLOAD, Reason.CANCELLED}


def broken(reason: Reason) -> None:
    """A discard is for the broken link or for time, and nothing else."""
    assert reason in BROKEN


class Shell:
    """One shell for all lines, with devices.sh at hand: starting programs is what is slow in an emulated machine."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            ["bash"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1, cwd=Path(__file__).parents[2]
        )
        self.run(". tests/rdma/vm/devices.sh")

    def run(self, text: str) -> None:
        """A line that must go well."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{text} && echo well || echo $?\n")
        said = self.process.stdout.readline().strip()
        assert said == "well", f"{text}: {said}"


_shells: list[Shell] = []


def sh(text: str) -> None:
    """A shell line that must go well: commands joined by &&."""
    if not _shells:
        _shells.append(Shell())
    _shells[0].run(text)


class CableRig(Rig):
    """Leader and receiver in this process, each with a device of its own."""

    def _receiver(self, **options: Any) -> Receiver:
        config = configure(Role.RECEIVER, link="rdma", **options)
        end = Receiver(replace(config, rdma=RdmaConfig(device=B, **SETTINGS)))
        self._ends.append(end)
        return end

    def _leader(self, change: Callable[[EngineConfig], EngineConfig], **options: Any) -> Leader:
        config = configure(Role.LEADER, link="rdma", **options)
        end = Leader(change(replace(config, rdma=RdmaConfig(device=A, **SETTINGS))))
        self._ends.append(end)
        return end

    def until(self, condition: Callable[[], object], within_s: float = WITHIN_S) -> None:
        super().until(condition, within_s)

    # ---- cycles -------------------------------------------------------------------------------------------------

    number = 0

    def attempt(self, budget_us: int = 20_000_000, meanwhile: Callable[[], None] | None = None) -> bool:
        """One STEP of a request of its own, drafted as soon as it is here; whether it became ready."""
        self.until(lambda: self.receiver.up and self.leader.up)
        self.number += 1
        request = self.receiver.open_request(self.number, PROMPT, seed=self.number)
        try:
            ticket = self.receiver.enqueue(request, budget_us=budget_us)
        except ProposalDiscarded as discarded:  # the link is gone already, and nobody looked
            broken(discarded.reason)
            self.receiver.close_request(request)
            return False
        if meanwhile is not None:
            meanwhile()

        def serve() -> None:
            self.receiver.poll()
            self.leader.poll()
            step = self.leader.next_step(0)
            if step is not None:
                draft(self.models, step)

        eventually(lambda: ticket.settled, serve, WITHIN_S)
        try:
            ticket.wait().release()
        except ProposalDiscarded as discarded:
            broken(discarded.reason)
            return False
        finally:
            self.receiver.close_request(request)
        return True

    def settle(self) -> None:
        """Until proposals are ready again and all slots are free."""
        for _ in range(100):
            if self.attempt():
                break
        else:
            pytest.fail("no proposal became ready again")
        self.until(self.all_free)


@contextmanager
def counted(what: Callable[[], dict[str, int]]) -> Iterator[None]:
    before = what()
    yield
    assert what() == before


@pytest.fixture
def rig() -> Iterator[CableRig]:
    with CableRig(vocab_size=VOCAB, models=ToyModels.of(7, VOCAB)) as pair:
        pair.connect()
        for _ in range(10):  # every slot's staging memory has been met
            assert pair.attempt()
        yield pair


def held_by(rig: CableRig) -> dict[str, int]:
    """Everything that is counted, once both ends are at rest."""
    for _ in range(10):
        rig.settle()
    return {f"kernel {kind}": count for kind, count in kernel_counts(A, B).items()} | own_counts()


def run_cycles(rig: CableRig, count: int, fault: Callable[[int], None], mend: Callable[[int], None]) -> int:
    """So many faults, each in the middle of a proposal; how many cost one."""
    cost = 0
    with counted(lambda: held_by(rig)):
        for cycle in range(count):
            ready = True
            try:
                ready = rig.attempt(2_000_000, lambda cycle=cycle: fault(cycle))  # type: ignore[misc]
            finally:
                mend(cycle)
            cost += not ready
            rig.settle()
    assert rig.all_free()
    return cost


def nothing(cycle: int) -> None:
    return None


def test_queue_pairs_forced_into_error(rig: CableRig) -> None:
    def fail(cycle: int) -> None:
        link = (rig.leader, rig.receiver)[cycle % 2].engine.link
        assert isinstance(link, RdmaLink)
        link.connection.pair.fail()

    run_cycles(rig, QUEUE_PAIR_ERRORS, fail, nothing)


def test_the_link_goes_down_and_up(rig: CableRig) -> None:
    def down(cycle: int) -> None:
        sh(f"ip link set {('$CABLE_A', '$CABLE_B')[cycle % 2]} down")

    cost = run_cycles(rig, LINK_DOWNS, down, lambda cycle: sh("wire"))
    assert cost, "a link that is down cost no proposal"


def test_everything_is_lost_for_a_while(rig: CableRig) -> None:
    cost = run_cycles(
        rig,
        BLACKOUTS,
        lambda cycle: sh(f"tc qdisc add dev {('$CABLE_A', '$CABLE_B')[cycle % 2]} root netem loss 100%"),
        lambda cycle: sh(f"tc qdisc del dev {('$CABLE_A', '$CABLE_B')[cycle % 2]} root"),
    )
    assert cost, "a cable that loses everything cost no proposal"


def test_some_packets_are_lost(rig: CableRig) -> None:
    run_cycles(
        rig,
        LOSSES,
        lambda cycle: sh("tc qdisc add dev $CABLE_A root netem loss 20%"),
        lambda cycle: sh("tc qdisc del dev $CABLE_A root"),
    )


class ForkServer(Conversation):
    """Children that are there to be killed."""

    def __init__(self) -> None:
        super().__init__([str(Path(__file__).with_name("fork_server.py"))], child_environment())

    def start(self, role: str, device: str, **options: Any) -> int:
        """The pid of a new child."""
        order = {"role": role, "options": options, "settings": {"device": device, **SETTINGS}}
        self.input.write(json.dumps(order) + "\n")
        return int(self.output.readline())


@pytest.fixture
def children() -> Iterator[ForkServer]:
    server = ForkServer()
    yield server
    server.close()


def gone(pid: int) -> bool:
    return not Path(f"/proc/{pid}").exists()


OPTIONS = SMALL | {"vocab_size": VOCAB}


def test_the_peer_is_killed(children: ForkServer) -> None:
    """kill -9 of the leader with a proposal under way; the receiver in this process lives through it."""
    config = configure(Role.RECEIVER, listen=ANYWHERE, link="rdma", **OPTIONS)
    with Receiver(replace(config, rdma=RdmaConfig(device=B, **SETTINGS))) as receiver:
        number = 0

        def ready_once() -> None:
            nonlocal number
            while True:
                eventually(lambda: receiver.up, receiver.poll, WITHIN_S)
                number += 1
                request = receiver.open_request(number, PROMPT, seed=number)
                try:
                    receiver.step(request, budget_us=60_000_000).release()
                except ProposalDiscarded as discarded:
                    broken(discarded.reason)
                    continue
                finally:
                    receiver.close_request(request)
                return

        def held() -> dict[str, int]:
            eventually(lambda: receiver.slots_by_state()["FREE"] == OPTIONS["max_slots"], receiver.poll, WITHIN_S)
            return own_counts() | {f"slots {state}": n for state, n in receiver.slots_by_state().items()}

        pid = children.start("leader", A, connect=receiver.endpoint, **OPTIONS)
        ready_once()
        kernel = kernel_counts(A, B)
        with counted(held):
            for _ in range(KILLS):
                number += 1
                request = receiver.open_request(number, PROMPT, seed=number)
                ticket = receiver.enqueue(request, budget_us=60_000_000)
                os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: gone(pid), receiver.poll, WITHIN_S)  # type: ignore[misc]
                eventually(lambda ticket=ticket: ticket.settled, receiver.poll, WITHIN_S)  # type: ignore[misc]
                eventually(lambda: not receiver.up, receiver.poll, WITHIN_S)
                receiver.close_request(request)
                pid = children.start("leader", A, connect=receiver.endpoint, **OPTIONS)
                ready_once()
        assert kernel_counts(A, B) == kernel


def test_the_receiver_is_killed(children: ForkServer) -> None:
    """kill -9 of the receiver while it asks and is answered; the leader in this process lives through it."""
    models = ToyModels.of(7, VOCAB)
    config = configure(Role.LEADER, listen=ANYWHERE, link="rdma", **OPTIONS)
    with Leader(replace(config, rdma=RdmaConfig(device=A, **SETTINGS))) as leader:
        answered = 0

        def serve() -> None:
            nonlocal answered
            leader.poll()
            step = leader.next_step(0)
            if step is not None:
                answered += len(draft(models, step)) == OPTIONS["depth"]

        def some_rounds() -> None:
            enough = answered + 12  # every slot's staging memory has been met
            eventually(lambda: answered >= enough, serve, WITHIN_S)

        pid = children.start("receiver", B, connect=leader.endpoint, **OPTIONS)
        some_rounds()
        kernel = kernel_counts(A, B)
        with counted(own_counts):
            for _ in range(KILLS):
                os.kill(pid, signal.SIGKILL)
                eventually(lambda pid=pid: gone(pid), serve, WITHIN_S)  # type: ignore[misc]
                eventually(lambda: not leader.up, serve, WITHIN_S)
                pid = children.start("receiver", B, connect=leader.endpoint, **OPTIONS)
                eventually(lambda: leader.up, serve, WITHIN_S)
                some_rounds()
        assert kernel_counts(A, B) == kernel
