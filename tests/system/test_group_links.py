"""A rank group over real engines and TCP: one embedded leader, rank 0, two members, each link by HELLO and proof."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from system_rig import ANYWHERE, SMALL, VOCAB, eventually

from pp1q_transport import wire
from pp1q_transport._native import kernels
from pp1q_transport.client import Leader, Role, configure, open_receiver
from pp1q_transport.counters import Counters
from pp1q_transport.engine import Engine, EngineConfig, Phase
from pp1q_transport.errors import ConfigError, ProposalDiscarded, Reason, Refused
from pp1q_transport.session import slots as st
from pp1q_transport.session.group_member import Member
from pp1q_transport.session.hello import make_hello
from pp1q_transport.session.hub import HubSession, RankGroup
from pp1q_transport.session.member import MemberSession
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

SIZE = 3
STATE = (5, 6)
WEIGHTS = np.array([1.0 + i % 3 for i in range(VOCAB)])


def options(**more: Any) -> dict[str, Any]:
    return SMALL | {"group_size": SIZE} | more


class Rank:
    """One daemon's rank: slots, memory, an engine, and what it fences."""

    session: Any = None

    def __init__(self, config: EngineConfig, rank: int) -> None:
        self.rank = rank
        self.table: SlotTable | None = None
        self.memory = bytearray()
        self.engine = Engine(config, self.make, self.on_up, self.on_down)

    def slots(self, terms: SessionTerms) -> SlotTable:
        if self.table is None:
            geometry = terms.geometry()
            self.table = SlotTable(geometry, self.rank)
            self.memory = bytearray(geometry.total_bytes)
        return self.table

    def make(self, terms: SessionTerms) -> Any:
        raise NotImplementedError

    def on_up(self) -> None:
        """The link runs."""

    def on_down(self, reason: Reason) -> None:
        session, self.session = self.session, None
        session.lost(reason)

    def serve(self) -> None:
        self.engine.poll()
        session, link = self.session, self.engine.link
        if session is None or link is None:
            return
        session.tick(kernels.monotonic_ns())
        session.settled.clear()
        fences, session.fences = session.fences, []
        for index in fences:
            session.fenced(index, link.fence(index))


class Zero(Rank):
    """Rank 0: the leader's link, and one engine more for each member."""

    def __init__(self) -> None:
        self.group = RankGroup(SIZE, Counters())
        self.requests = RequestTable()
        super().__init__(configure(Role.RECEIVER, listen=ANYWHERE, **options()), 0)
        self.hubs: dict[int, HubSession] = {}
        self.hub_engines = [self._hub_engine(rank) for rank in range(1, SIZE)]

    def _hub_engine(self, rank: int) -> Engine:
        def make(terms: SessionTerms) -> HubSession:
            self.hubs[rank] = HubSession(terms, self.group, rank, Counters())
            return self.hubs[rank]

        config = configure(Role.COORDINATOR, listen=ANYWHERE, **options())
        return Engine(config, make, lambda: self.hubs[rank].up(), lambda reason: self.hubs[rank].lost(reason))

    def make(self, terms: SessionTerms) -> ReceiverSession:
        self.session = ReceiverSession(
            terms, self.slots(terms), self.memory, self.requests, self.engine.counters, group=self.group
        )
        return self.session

    def on_up(self) -> None:
        for request in self.requests.requests.values():
            self.session.open(request)

    def serve(self) -> None:
        super().serve()
        for engine in self.hub_engines:
            engine.poll()
        self.group.agree(*STATE)


class One(Rank):
    """A member."""

    def __init__(self, rank: int, connect: str, **more: Any) -> None:
        self.member = Member(rank, SIZE)
        super().__init__(configure(Role.MEMBER, connect=connect, rank=rank, **options(**more)), rank)

    def make(self, terms: SessionTerms) -> MemberSession:
        self.session = MemberSession(terms, self.member, self.slots(terms), self.memory, self.engine.counters)
        return self.session

    def on_up(self) -> None:
        self.session.up()

    def serve(self) -> None:
        super().serve()
        if self.session is not None:
            self.session.agree(*STATE)


class GroupRig:
    """Everything in one thread."""

    def __init__(self) -> None:
        self.zero = Zero()
        self.members = [One(rank, self.zero.hub_engines[rank - 1].endpoint) for rank in range(1, SIZE)]
        self.leader = Leader(configure(Role.LEADER, connect=self.zero.engine.endpoint, **options()))

    def serve(self) -> None:
        self.leader.poll()
        while (step := self.leader.next_step(0)) is not None:
            for position in step.positions:
                if step.alive:
                    step.put(position, weights=WEIGHTS)
        for rank in (self.zero, *self.members):
            rank.serve()

    def until(self, condition: Callable[[], object]) -> None:
        eventually(condition, self.serve)

    def step(self, request: Request, representation: int = wire.DENSE) -> Slot:
        support = 16 if representation == wire.SPARSE else 0
        slot: Slot = self.zero.session.step(request, kernels.monotonic_ns(), 3, 1.0, support, representation, 0, 5_000_000, 0)
        return slot

    def release(self, slot: Slot) -> None:
        self.zero.session.release(slot, slot.generation, 0, 0)
        for rank in self.members:
            rank.session.release(rank.table.slots[slot.index], slot.generation, rank.rank, 0)

    def close(self) -> None:
        self.leader.close()
        for rank in (self.zero, *self.members):
            rank.engine.close()
        for engine in self.zero.hub_engines:
            engine.close()


@pytest.fixture
def rig() -> Iterator[GroupRig]:
    made = GroupRig()
    try:
        made.until(lambda: made.zero.session is not None and made.zero.group.open)
        yield made
    finally:
        made.close()


def everywhere(rig: GroupRig, slot: Slot, state: int) -> Callable[[], bool]:
    def holds() -> bool:
        return slot.state == state and all(rank.table.slots[slot.index].state == state for rank in rig.members)

    return holds


@pytest.mark.parametrize("representation", (wire.DENSE, wire.SPARSE))
def test_a_proposal_is_ready_on_every_rank(rig: GroupRig, representation: int) -> None:
    request = Request(1, 42, (1, 2))
    rig.zero.requests.add(request)
    rig.zero.session.open(request)
    for _ in range(5):
        slot = rig.step(request, representation)
        rig.until(everywhere(rig, slot, st.READY))
        at, size = slot.rows_at, rig.zero.table.geometry.slot_bytes
        for rank in rig.members:
            assert rank.memory[at : at + size] == rig.zero.memory[at : at + size]
        assert rig.zero.group.may_commit(slot.index, slot.generation, slot.epoch)
        rig.zero.session.commit(request, slot.round, wire.VERIFIED, 0, [3])
        rig.release(slot)
        rig.until(everywhere(rig, slot, st.FREE))


def test_a_member_that_goes_and_comes_back(rig: GroupRig) -> None:
    request = Request(1, 42, (1, 2))
    rig.zero.requests.add(request)
    rig.zero.session.open(request)
    slot = rig.step(request)
    rig.until(everywhere(rig, slot, st.READY))
    rig.members[1].engine.close()
    rig.until(lambda: not rig.zero.group.open)
    with pytest.raises(ProposalDiscarded, match="peer_lost"):
        rig.zero.session.commit(request, slot.round, wire.VERIFIED, 0, [3])
    rig.zero.session.commit(request, slot.round, wire.TARGET_ONLY, 0, [3])
    rig.zero.session.release(slot, slot.generation, 0, 0)
    rig.members[0].session.release(rig.members[0].table.slots[slot.index], slot.generation, 1, 0)
    rig.members[1] = One(2, rig.zero.hub_engines[1].endpoint)
    rig.until(lambda: rig.zero.group.open)
    assert rig.zero.group.epoch == 2
    again = rig.step(request)
    rig.until(everywhere(rig, again, st.READY))
    rig.release(again)
    rig.until(everywhere(rig, again, st.FREE))


def test_a_leader_that_goes_and_comes_back_ends_no_epoch(rig: GroupRig) -> None:
    rig.leader.close()
    rig.until(lambda: rig.zero.engine.phase is Phase.DOWN)
    rig.leader = Leader(configure(Role.LEADER, connect=rig.zero.engine.endpoint, **options()))
    rig.until(lambda: rig.zero.engine.phase is Phase.UP)
    assert (rig.zero.group.epoch, rig.zero.group.open) == (1, True)


def test_a_member_of_another_group_is_refused(rig: GroupRig) -> None:
    stranger = Engine(
        configure(Role.MEMBER, connect=rig.zero.hub_engines[0].endpoint, rank=1, **options(group_size=4)),
        lambda terms: pytest.fail("a session was formed"), lambda: None, lambda reason: None,
    )  # fmt: skip
    try:
        with pytest.raises(Refused, match="group_size"):
            eventually(lambda: False, lambda: (rig.serve(), stranger.poll()))
    finally:
        stranger.close()


PLACES = (
    (Role.LEADER, 1, 0, True), (Role.LEADER, 8, 0, True), (Role.LEADER, 9, 0, False),
    (Role.RECEIVER, 8, 0, True), (Role.RECEIVER, 2, 1, False),
    (Role.COORDINATOR, 1, 0, False), (Role.COORDINATOR, 2, 0, True), (Role.COORDINATOR, 2, 1, False),
    (Role.MEMBER, 2, 1, True), (Role.MEMBER, 2, 0, False), (Role.MEMBER, 2, 2, False), (Role.MEMBER, 1, 0, False),
    (Role.MEMBER, 8, 7, True),
)  # fmt: skip


@pytest.mark.parametrize(("role", "size", "rank", "fits"), PLACES)
def test_a_place_in_a_group_that_this_build_has(role: Role, size: int, rank: int, fits: bool) -> None:
    hello = make_hello(role, 1, group_size=size, rank=rank, **SMALL)
    if fits:
        EngineConfig(hello=hello)
    else:
        with pytest.raises(ConfigError):
            EngineConfig(hello=hello)


def test_an_embedded_receiver_is_a_group_of_one() -> None:
    with pytest.raises(ConfigError, match="group_size 2 needs a daemon"):
        open_receiver(listen=ANYWHERE, **options(group_size=2))
