"""Every bent frame of the numbered cases, against a live daemon: the reason is met and counted, nothing bent becomes ready, what
was in flight beside it is undisturbed (or void with the link), and the daemon serves an honest peer afterwards."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import evil_peer as e
import pytest
from daemon_rig import Bed, drafting
from protocol.case import Cost, Life
from protocol.test_cases import CASES

from pp1q_transport.client import AttachedReceiver, Leader, Receiver, Role, Step
from pp1q_transport.errors import ProposalDiscarded, Reason

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

LIVES = [case for case in CASES if isinstance(case, Life)]


class Beds:
    """One deployment for each world and judge, all of its cases' attacks on the same daemon."""

    def __init__(self, stack: ExitStack) -> None:
        self._stack = stack
        self._made: dict[str, Bed] = {}

    def of(self, case: Life) -> Bed:
        """The one a case wants, running; a leader has its honest draft."""
        world, key = e.world_of(case), json.dumps([case.judge, sorted(e.world_of(case).items())])
        if key not in self._made:
            bed = self._stack.enter_context(e.bed_for(world, case.judge))
            bed.up("leader" if case.judge == "leader" else "receiver0")
            if case.judge == "leader":
                self._stack.enter_context(drafting(bed))
            self._made[key] = bed
        return self._made[key]


@pytest.fixture(scope="module")
def beds() -> Iterator[Beds]:
    with ExitStack() as stack:
        yield Beds(stack)


class Attack:
    """One case: the evil end, what the daemon had counted, and what is expected of it."""

    def __init__(self, case: Life, bed: Bed) -> None:
        self.case, self.bed = case, bed
        self.world = e.world_of(case)
        self.name = "leader" if case.judge == "leader" else "receiver0"
        self.pid = bed.pid(self.name)
        role = Role.RECEIVER if case.judge == "leader" else Role.LEADER
        self.peer, self.bender = e.evil(bed, self.world, role)
        e.until(lambda: self.peer.up, self.peer.poll, "the evil peer's own session")
        bed.sessions_up_of(self.name)
        self.before = e.Before(bed.status(self.name))  # type: ignore[arg-type]
        self.victim, self.beside = next(e.FRESH), next(e.FRESH)

    def expected(self) -> int:
        """How often the daemon counts the reason."""
        if self.case.reason is None:
            return 0
        at_receiver, at_leader = self.case.counts or (
            ((1, 1) if self.case.cost is Cost.PROPOSAL else (1, 0)) if self.case.judge == "receiver"
            else ((1, 1) if self.case.cost is Cost.PROPOSAL else (0, 1))
        )  # fmt: skip
        return at_leader if self.case.judge == "leader" else at_receiver

    def judge(self) -> None:
        """What the daemon counted: the reason, exactly so often, and a session only where the fault costs the link."""
        e.until(lambda: self.bender.bent, self.peer.poll, "the bent frame never left")
        link = self.case.cost is Cost.LINK

        def met() -> bool:
            self.peer.poll()
            now: Any = self.bed.status(self.name)
            counted = self.case.reason is None or self.before.reasons(now, self.case.reason) >= self.expected()
            return counted and self.before.ended(now) >= link

        self.bed.until(met, f"{self.case.reason} x {self.expected()}, link ended: {link}")
        now: Any = self.bed.status(self.name)
        assert self.before.ended(now) == link
        if self.case.reason is not None:
            assert self.before.reasons(now, self.case.reason) == self.expected()
        else:
            assert now["reasons"] == self.before.status["reasons"]

    def outcome(self, reason: Reason | None) -> None:
        """What became of the victim's proposal (None: ready)."""
        if self.case.cost is Cost.NOTHING:
            assert reason is None, f"discarded: {reason}"
        elif self.case.cost is Cost.PROPOSAL:
            assert reason is (self.case.outcome or self.case.reason)

    def free(self) -> None:
        """Every slot came back, in the same process."""
        if self.name == "receiver0":
            self.bed.until(lambda: set(_taken(self.bed.status(self.name)["slots"])) == {"FREE"}, "slots")
        assert self.bed.pid(self.name) == self.pid


def _taken(slots: dict[str, int]) -> list[str]:
    return [state for state, count in slots.items() if count]


@pytest.mark.parametrize("case", [c for c in LIVES if c.judge == "receiver"], ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_leader(beds: Beds, case: Life) -> None:
    bed = beds.of(case)
    attack = Attack(case, bed)
    assert isinstance(attack.peer, Leader)
    try:
        with bed.receiver() as target:
            _attack_receiver(attack, attack.peer, target)
            attack.peer.close()
            attack.peer, _ = e.evil(bed, attack.world, Role.LEADER)  # and bends nothing
            _honest_leader(attack, attack.peer, target)
        attack.free()
    finally:
        attack.peer.close()


def _attack_receiver(attack: Attack, leader: Leader, target: AttachedReceiver) -> None:
    case, world = attack.case, attack.world
    target.wait_for_peer()
    options = e.step_options(case, world)
    victim = target.open_request(attack.victim, e.PROMPT, seed=1)
    beside = target.open_request(attack.beside, e.PROMPT, seed=2)
    plain = {"support": None if world["dense"] else world["support"], "budget_us": e.LONG_US}
    waiting = target.enqueue(beside, **plain)
    steps: dict[int, Step] = {}

    def serve() -> None:
        step = leader.next_step(0)
        if step is not None:
            steps[step.request] = step
        target.poll()

    e.until(lambda: attack.beside in steps, serve, "the bystander's STEP")
    other = steps[attack.beside]
    e.put_rows(other, world["vocab"], other.positions[:1])
    attack.bender.arm(case, attack.victim)
    ticket = target.enqueue(victim, **options)
    e.until(lambda: attack.victim in steps, serve, "the victim's STEP")
    e.put_rows(steps[attack.victim], world["vocab"])
    e.until(lambda: ticket.settled, serve, "the victim's outcome")
    attack.outcome(_outcome(ticket))
    attack.judge()
    if case.cost is Cost.LINK:
        e.until(lambda: waiting.settled, serve, "the bystander's outcome")
        assert _outcome(waiting) is Reason.LINK_ERROR, "a lost link voids what was under way"
    else:
        e.put_rows(other, world["vocab"], other.positions[1:])
        e.until(lambda: waiting.settled, serve, "the bystander's outcome")
        assert _outcome(waiting) is None, "the bystander was disturbed"
    for request in (victim, beside):
        target.close_request(request)


def _outcome(ticket: Any) -> Reason | None:
    try:
        ticket.wait().release()
    except ProposalDiscarded as discarded:
        return discarded.reason
    return None


def _honest_leader(attack: Attack, leader: Leader, target: AttachedReceiver) -> None:
    e.until(lambda: leader.up and target.up, lambda: (leader.poll(), target.poll()), "an honest session")
    request = target.open_request(next(e.FRESH), e.PROMPT, seed=3)
    ticket = target.enqueue(request, support=None if attack.world["dense"] else attack.world["support"], budget_us=e.LONG_US)

    def serve() -> None:
        step = leader.next_step(0)
        if step is not None:
            e.put_rows(step, attack.world["vocab"])
        target.poll()

    e.until(lambda: ticket.settled, serve, "an honest proposal")
    assert _outcome(ticket) is None
    target.close_request(request)


@pytest.mark.parametrize("case", [c for c in LIVES if c.judge == "leader"], ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_receiver(beds: Beds, case: Life) -> None:
    bed = beds.of(case)
    attack = Attack(case, bed)
    assert isinstance(attack.peer, Receiver)
    try:
        _attack_leader(attack, attack.peer)
        attack.peer.close()
        attack.peer, _ = e.evil(bed, attack.world, Role.RECEIVER)
        _honest_receiver(attack, attack.peer)
        attack.free()
    finally:
        attack.peer.close()


def _attack_leader(attack: Attack, receiver: Receiver) -> None:
    case = attack.case
    attack.bender.arm(case, attack.victim)
    request = receiver.open_request(attack.victim, e.PROMPT, seed=1)
    reason: Reason | None = None
    number = request.round
    try:
        ticket = receiver.enqueue(request, **e.step_options(case, attack.world))
        with ticket.wait() as proposal:
            proposal.commit(0, [3])
    except ProposalDiscarded as discarded:
        reason = discarded.reason
        if receiver.up:
            if request.round == number:
                request.next_round()
            receiver.commit_target_only(request, number, [3])
    for _ in range(3):
        receiver.poll()
    if receiver.up:
        receiver.close_request(request)
    attack.outcome(reason)
    attack.judge()


def _honest_receiver(attack: Attack, receiver: Receiver) -> None:
    e.until(lambda: receiver.up, receiver.poll, "an honest session")
    request = receiver.open_request(next(e.FRESH), e.PROMPT, seed=3)
    support = None if attack.world["dense"] else attack.world["support"]
    with receiver.enqueue(request, support=support, budget_us=e.LONG_US).wait() as proposal:
        assert proposal.depth == attack.world["depth"]
        proposal.commit(0, [3])
    receiver.close_request(request)
