"""Groups whose ranks have links of their own, under seeded faults: what one rank may hold and what all must."""

from __future__ import annotations

import random

import numpy as np
import pytest

from pp1q_transport import wire
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.own_link import OwnLinkSession
from pp1q_transport.session.requests import Request
from pp1q_transport.session.shards import REQUEST_OWNER, VOCABULARY, ranges

from .frames import Frame, payload_bit
from .own_rig import OwnFlight, OwnWorld, Rank

ROUNDS = 60
FAULTS = ("none", "none", "none", "leader link", "group link", "row", "step", "vote", "decide", "silent", "late", "close")


class Storm:
    """One world, its faults, and what became of its proposals."""

    def __init__(self, seed: int, size: int, mode: str) -> None:
        self.random = random.Random(seed)
        self.world = OwnWorld(size, mode, slots=3, seed=seed, largest=self.random.choice((0, 40, 200)))
        self.ready = self.void = self.split = 0
        self.committed: dict[int, list[int]] = {}
        self.request = 0

    def play(self, rounds: int) -> None:
        for _ in range(rounds):
            if not self.request or self.random.random() < 0.1:
                self.request += 1
                self.world.open(self.request, owner=self.random.randrange(self.world.size))
            self._round(self.random.choice(FAULTS))
            self._mend()
        for rank in self.world.ranks:
            assert rank.table.not_free() == 0, (rank.rank, rank.table.by_state())

    # ---- one round ----------------------------------------------------------------------------------------------

    def _round(self, fault: str) -> None:
        world, victim = self.world, self.random.choice(self.world.ranks)
        if fault == "silent":
            victim.silent.add(self.request)
        self._bend(fault, victim)
        try:
            flight = world.step(
                self.request, self.random.choice((wire.DENSE, wire.SPARSE)), 50 if fault in ("silent", "late") else 1_000_000
            )
        except ProposalDiscarded:
            return
        epoch = world.slot(flight, 0).epoch
        if fault != "late":
            world.put(flight, self.random.randrange(flight.depth + 1))
        if fault == "leader link":
            victim.link.down(self.random.choice(("up", "down")), Reason.LINK_ERROR)
        elif fault == "group link" and victim.rank:
            victim.group_link.down(self.random.choice(("up", "down")), Reason.LINK_ERROR)
        elif fault == "close" and victim.rank == 0:
            request = victim.requests.get(self.request)
            assert request is not None
            victim.session.cancel_request(request, Reason.CANCELLED)
        world.run()
        world.put(flight)
        for later_ns in (100_000, 2_000_000_000):  # the short budget of a late one, then any
            if any(self._state(flight, rank) in st.LIVE for rank in world.ranks):
                world.at(world.now + later_ns)
        self._judge(flight, epoch)

    def _bend(self, fault: str, victim: Rank) -> None:
        def bit(frame: Frame, world: object) -> list[Frame]:
            if frame.payload:
                payload_bit(1)(frame, world)  # type: ignore[arg-type]
            return [frame]

        if fault == "row":
            victim.link.bend("up", wire.REPLY, bit)
        elif fault == "step":
            victim.link.bend("down", wire.STEP, lambda frame, _world: [])
        elif fault == "vote" and victim.rank:
            victim.group_link.bend("down", wire.VOTE, bit)
        elif fault == "decide" and victim.rank:
            victim.group_link.bend("up", wire.DECIDE, bit)

    # ---- what must hold -----------------------------------------------------------------------------------------

    def _judge(self, flight: OwnFlight, epoch: int) -> None:
        world = self.world
        held = [rank for rank in world.ranks if self._state(flight, rank) == st.READY]
        for rank in world.ranks:
            assert self._state(flight, rank) not in st.LIVE, f"rank {rank.rank} waits still"
        over = not world.group.open or world.group.epoch != epoch
        if held and len(held) < world.size:
            assert over, "some ranks hold a proposal that others discarded, and the epoch goes on"
            self.split += 1
        if held:
            self._check_bytes(flight, held)
        if len(held) == world.size and not over:
            self._commit(flight)
        else:
            self.void += 1
            for rank in held:
                rank.release(rank.table.slots[flight.slot])
            assert not world.group.may_commit(flight.slot, flight.generation, epoch)
            for rank in world.ranks[1:]:
                assert not rank.member.may_commit(epoch, flight.slot, flight.generation)

    def _state(self, flight: OwnFlight, rank: Rank) -> int:
        slot = rank.table.slots[flight.slot]
        return slot.state if slot.generation == flight.generation else st.FREE

    def _check_bytes(self, flight: OwnFlight, held: list[Rank]) -> None:
        world = self.world
        tokens = world.honest_tokens(flight)
        for rank in held:
            assert world.tokens(flight, rank.rank) == tokens
        slot = world.ranks[held[0].rank].table.slots[flight.slot]
        if world.mode == VOCABULARY and slot.representation == wire.DENSE:
            bounds = ranges(world.vocab, world.size)
            for row in range(flight.depth):
                whole = np.frombuffer(world.row(flight, slot.anchor + 1 + row)[0], np.float32)
                for rank in held:
                    first, end = bounds[rank.rank]
                    own = np.frombuffer(world.held(flight, rank.rank, row), np.float32)
                    assert (own[: end - first] == whole[first:end]).all()

    def _commit(self, flight: OwnFlight) -> None:
        self.ready += 1
        tokens = [*self.world.tokens(flight, 0)[:2], 9]
        if any("down" in rank.link.ended for rank in self.world.ranks):
            for rank in self.world.ranks:
                rank.release(rank.table.slots[flight.slot])
            return
        for request in (rank.requests.get(self.request) for rank in self.world.ranks):
            assert request is not None
        self.world.commit(flight, tokens)

    # ---- mending ------------------------------------------------------------------------------------------------

    def _mend(self) -> None:
        """Links come back; every rank's process goes on from what rank 0's has, as the engines agree."""
        world = self.world
        for rank in world.ranks:
            rank.silent.clear()
            for tap in (*rank.link.taps.values(), *(rank.group_link.taps.values() if rank.rank else ())):
                tap.hook = None
        truth = world.ranks[0].requests.get(self.request)
        assert truth is not None
        truth.in_flight = False
        for rank in world.ranks:
            if rank.link.ended:
                if len(rank.link.ended) < 2:
                    world.run()
                rank.join_leader()
                self._reopen(rank, truth)
        world.run()
        for rank in world.ranks[1:]:
            if rank.group_link.ended:
                rank.join_group()
        world.run()
        if len(truth.tokens) > 90:
            self.request += 1
            world.open(self.request, owner=self.random.randrange(world.size))

    def _reopen(self, rank: Rank, truth: Request) -> None:
        assert rank.rank == 0 or isinstance(rank.session, OwnLinkSession)
        for request in rank.requests.requests.values():
            if rank.rank == 0:
                request.discard()
            rank.session.open(request)


@pytest.mark.timeout(120)
@pytest.mark.parametrize("mode", (VOCABULARY, REQUEST_OWNER))
@pytest.mark.parametrize("size", (2, 3))
@pytest.mark.parametrize("seed", range(2))
def test_one_decision_under_faults(seed: int, size: int, mode: str) -> None:
    storm = Storm(seed, size, mode)
    storm.play(ROUNDS)
    assert storm.ready > ROUNDS // 5
    assert storm.void > ROUNDS // 10


@pytest.mark.parametrize("mode", (VOCABULARY, REQUEST_OWNER))
def test_many_slots_voided_in_one_look_are_no_overload(mode: str) -> None:
    """Rank 0 voids what was under way, all at once (a leader that went away, a budget): every rank fences it at once."""
    world = OwnWorld(2, mode, slots=6)
    for request in range(1, 7):
        world.open(request, owner=1)
    flights = [world.step(request, budget_us=50) for request in range(1, 7)]
    assert all(world.slot(flight, 1).state in st.LIVE for flight in flights)
    world.at(100_000)
    assert [world.fates(flight) for flight in flights] == [[Reason.TIMEOUT] * 2] * 6
    assert all(rank.link.ended == {} for rank in world.ranks)
    assert world.ranks[1].group_link.ended == {}
    assert world.group.open


def test_a_refused_round_of_an_epoch_that_we_left_is_no_round_of_the_next() -> None:
    """Rank 0's word on it crosses our LEAVE, and may be read in one look with the opening of the next epoch."""
    world = OwnWorld(2)
    group = world.ranks[1].group
    world.group.refuse_step(1, 0, 4, Reason.CANCELLED)
    world.run()
    assert group.ends == [(1, 0, 4, Reason.CANCELLED.code, 0, 0)]
    group.ends.clear()
    epoch = group.member.epoch
    group.leave(Reason.PEER_LOST)
    world.group.refuse_step(1, 0, 5, Reason.CANCELLED)
    world.run()
    assert (group.member.epoch, group.open) == (epoch + 1, True)
    assert group.ends == []
    world.group.refuse_step(1, 0, 6, Reason.CANCELLED)
    world.run()
    assert group.ends == [(1, 0, 6, Reason.CANCELLED.code, 0, 0)]
