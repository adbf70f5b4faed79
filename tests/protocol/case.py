"""What a numbered case is and how it is run: one bent frame in the life of a request, or a script.

Between the tables (`cases_*.py`) and the world. A case states the exact reason, what it costs and who counts it how often;
that a request in flight beside it is undisturbed, and that every slot is FREE at the end, is checked for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum

from pp1q_transport import wire
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st

from .frames import Bend, Frame, Sent
from .world import BUDGET_NS, Flight, World

VICTIM = 1
BYSTANDER = 2
FROM_RECEIVER = frozenset({wire.OPEN, wire.CLOSE, wire.STEP, wire.COMMIT, wire.RESET})


class Cost(Enum):
    """What a fault costs."""

    NOTHING = "nothing"
    PROPOSAL = "proposal"
    LINK = "link"


@dataclass(frozen=True, kw_only=True)
class Case:
    """A numbered case. `spec` is the SPEC section that demands it; `reason` the one it must reach, None for a valid thing."""

    number: str
    spec: str
    title: str
    reason: Reason | None

    def run(self, seed: int, largest: int) -> None:
        """Plays the case; raises AssertionError when anything differs. `seed` and `largest` split the streams."""
        raise NotImplementedError


@dataclass(frozen=True, kw_only=True)
class Life(Case):
    """The life of request 1 (OPEN, STEP, rows, COMPLETION, COMMIT, CLOSE) with its `nth` frame of kind `on` bent.

    `counts` is how often (receiver, leader) count the reason, None for what the cost implies; `outcome` the reason of the
    proposal's discard when it is not `reason`; `step` and `world` are options of the STEP and of the world.
    """

    on: int
    bend: Bend
    cost: Cost
    nth: int = 0
    counts: tuple[int, int] | None = None
    told: bool = True  # False when the bent frame is the leader's own word that the generation is dead
    outcome: Reason | None = None
    step: Mapping[str, object] = field(default_factory=dict)
    world: Mapping[str, object] = field(default_factory=dict)

    @property
    def judge(self) -> str:
        """The side that meets the bent frame."""
        return "leader" if self.on in FROM_RECEIVER else "receiver"

    def run(self, seed: int, largest: int) -> None:
        world = World(seed=seed, largest=largest, **self.world)  # type: ignore[arg-type]
        other = world.open(BYSTANDER)
        beside = world.step(
            other, wire.DENSE if world.terms.dense else wire.SPARSE, budget_us=1_000_000 if world.terms.dense else 2_000_000
        )
        world.put(beside, 1)
        bent = self._install(world)
        flight, ready = self._live(world)
        assert bent[0] > self.nth, "the bent frame never came"
        if self.cost is Cost.LINK:
            self._check_link(world, beside)
        else:
            self._check_proposal(world, flight, ready, beside)
        release_all(world)
        assert_all_free(world)

    def _install(self, world: World) -> list[int]:
        seen = [0]

        def hook(frame: Frame, inner: World) -> list[Sent] | None:
            if frame.header.kind != self.on or frame.header.request != VICTIM:
                return None
            seen[0] += 1
            if seen[0] != self.nth + 1:
                return None
            out = self.bend(frame, inner)
            return None if out is None else list(out)

        source = "receiver" if self.judge == "leader" else "leader"
        world.taps[source].hook = hook
        return seen

    def _live(self, world: World) -> tuple[Flight | None, bool]:
        request = world.open(VICTIM)
        if world.ended:
            return None, False
        flight = world.step(request, **self.step)  # type: ignore[arg-type]
        if not world.ended and flight.landing:
            world.put(flight)
        if not world.ended and flight.landing:
            world.at(BUDGET_NS)
        ready = flight.ready
        if ready:
            assert world.tokens(flight) == world.honest_tokens(flight)
        world.commit(flight, [3])
        if not world.ended:
            world.receiver.close(request)
            world.run()
        return flight, ready

    def _check_link(self, world: World, beside: Flight) -> None:
        assert self.reason is not None
        other = "receiver" if self.judge == "leader" else "leader"
        assert world.ended == {self.judge: self.reason, other: Reason.PEER_LOST}
        self._check_counts(world, (0, 1) if self.judge == "leader" else (1, 0))
        lost = Reason.PEER_LOST if self.judge == "leader" else Reason.LINK_ERROR
        assert beside.reason is lost, "a lost link voids what was under way"

    def _check_proposal(self, world: World, flight: Flight | None, ready: bool, beside: Flight) -> None:
        assert world.ended == {}
        assert flight is not None
        if self.cost is Cost.NOTHING:
            assert ready, f"the proposal was discarded: {flight.reason}"
            default = (1, 0) if self.judge == "receiver" else (0, 1)
        else:
            assert not ready, "the proposal became ready"
            assert flight.reason is (self.outcome or self.reason)
            default = (1, 1)
            assert world.counts["receiver"].get("discarded") == 1
            knows = world.counts["leader"].get("reset") + len(world.counts["leader"].reasons)
            assert (knows >= 1) is self.told, "the leader is told, unless it said so itself"
            assert flight.request.generation == 1, "the request's generation rises at a discard"
        self._check_counts(world, default)
        world.put(beside)
        assert beside.ready, "the bystander was disturbed"
        assert world.tokens(beside) == world.honest_tokens(beside)

    def _check_counts(self, world: World, default: tuple[int, int]) -> None:
        if self.reason is None:
            assert world.counts["receiver"].reasons == {}
            assert world.counts["leader"].reasons == {}
            return
        counted = (world.counts["receiver"].of(self.reason), world.counts["leader"].of(self.reason))
        assert counted == (default if self.counts is None else self.counts)


@dataclass(frozen=True, kw_only=True)
class Script(Case):
    """A case that plays its own course in a fresh world; its reason must have been counted at one side at least."""

    act: Callable[[World], None]
    world: Mapping[str, object] = field(default_factory=dict)
    ends: Mapping[str, Reason] = field(default_factory=dict)  # side -> why its link ended

    def run(self, seed: int, largest: int) -> None:
        world = World(seed=seed, largest=largest, **self.world)  # type: ignore[arg-type]
        self.act(world)
        assert world.ended == dict(self.ends)
        if self.reason is not None:
            assert sum(counters.of(self.reason) for counters in world.counts.values()) > 0, "the reason was not counted"
        release_all(world)
        assert_all_free(world)


@dataclass(frozen=True, kw_only=True)
class Plain(Case):
    """A case outside a session (handshake, proofs, numbers): `act` returns the reason it met."""

    act: Callable[[], Reason | None]

    def run(self, seed: int, largest: int) -> None:
        assert self.act() is self.reason


def release_all(world: World) -> None:
    """Every consumer gives back what it holds; what is still under way runs out of budget."""
    for slot in world.table.slots:
        world.table.release(slot, slot.generation, 0, 0)
    if "receiver" not in world.ended and any(slot.state != st.FREE for slot in world.table.slots):
        world.at(1 << 60)


def assert_all_free(world: World) -> None:
    """No slot may stay behind, whatever happened."""
    assert world.table.by_state()["FREE"] == world.table.count, world.table.by_state()
    assert world.receiver.fences == []
