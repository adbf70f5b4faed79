"""A world in which every rank has a link of its own from the leader: group modes "vocabulary" and "request-owner".

Between a numbered case and the real machinery. It plays the daemons as `own_link`, `hub` and `leader_group` tell them to: target
processes ask on every rank as soon as they are told to, fences are made on the leader's links.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np

from pp1q_transport import dyadic, rng, wire
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links.sim import SimLink, sim_pair
from pp1q_transport.session import slots as st
from pp1q_transport.session.group_member import Member
from pp1q_transport.session.hub import HubSession, RankGroup
from pp1q_transport.session.leader import LeaderSession
from pp1q_transport.session.leader_group import LeaderGroup
from pp1q_transport.session.machine import SessionMachine
from pp1q_transport.session.own_link import Joint, OwnLinkSession, OwnMemberSession
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.shards import VOCABULARY, range_of
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

from .case import Case
from .frames import Bend, Tap

LEADER_NONCE = 0x1111_2222_3333_4444
RANK_NONCE = 0x5555_6666_7777_0000
PROMPT = (5, 6, 7)
STATE = (11, 22)
LONG_US = 1_000_000


class Link:
    """One link: two sessions, a tap each way. Sides are "up" (leader or hub) and "down" (rank)."""

    def __init__(self, terms: SessionTerms, up: SessionMachine, down: SessionMachine, splits: tuple[int, int]) -> None:
        self.terms = terms
        self.sessions = {"up": up, "down": down}
        self.taps = {side: Tap(session.outbox, self) for side, session in self.sessions.items()}  # type: ignore[arg-type]
        left, right = sim_pair(up, self.taps["up"].outbox, down, self.taps["down"].outbox, *splits)
        self.ends: dict[str, SimLink] = {"up": left, "down": right}
        self.ended: dict[str, Reason] = {}
        self.over: dict[str, Callable[[Reason], None]] = {}

    def pump(self, now: int) -> int:
        """One pass of both ends."""
        moved = 0
        for side, session in self.sessions.items():
            if side in self.ended:
                continue
            try:
                self.taps[side].pump()
                got = self.ends[side].pump(now)
            except PeerFault as fault:
                self.down(side, fault.reason)
                continue
            code = -got if got < 0 else session.broken
            if code:
                self.down(side, Reason.from_code(code))
            moved += max(got, 1 if code else 0)
        return moved

    def down(self, side: str, reason: Reason) -> None:
        """One end is over."""
        self.ended[side] = reason
        self.ends[side].close()
        self.sessions[side].counters.refuse(reason)
        self.over[side](reason)

    def bend(self, side: str, kind: int, bend: Bend) -> None:
        """Bends every frame of that kind that `side` sends."""
        self.taps[side].hook = lambda frame, world: bend(frame, world) if frame.header.kind == kind else None


class Rank:
    """One rank's daemon: slots, the sessions of its links, and what its process has asked for."""

    def __init__(self, world: OwnWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        first, end = range_of(world.mode, world.vocab, world.size, rank)
        shard = rank if world.mode == VOCABULARY else 0
        self.nonce = RANK_NONCE + rank
        self.terms = SessionTerms(100 + rank, LEADER_NONCE, self.nonce, *world.negotiated, shard, first, end)
        geometry = self.terms.geometry()
        self.table = SlotTable(geometry, rank)
        self.memory = bytearray(geometry.total_bytes)
        self.counts = Counters()
        self.requests = RequestTable()
        self.asks: dict[int, dict[str, object]] = {}  # request -> what its process wants instead of what rank 0's does
        self.silent: set[int] = set()  # requests that its process does not ask for
        if rank:
            self.joint = Joint(world.mode)
            self.member = Member(rank, world.size)
        self.join_leader()

    def join_leader(self) -> None:
        """A session of its own link."""
        world = self.world
        self.leader_counts = Counters()
        self.leader = LeaderSession(self.terms, RequestTable(), self.leader_counts)
        if self.rank:
            self.session: ReceiverSession = OwnLinkSession(
                self.terms, self.table, self.memory, self.requests, self.counts, self.joint
            )
        else:
            self.session = ReceiverSession(
                self.terms, self.table, self.memory, self.requests, self.counts, group=world.group
            )
        self.link = Link(self.terms, self.leader, self.session, world.splits)
        self.link.over = {"up": self._leader_over, "down": self._own_over}
        if world.joined is not None:
            world.joined.join(self.rank, self.leader)

    def _leader_over(self, reason: Reason) -> None:
        self.leader.lost()
        if self.world.joined is not None:
            self.world.joined.part(self.rank)

    def _own_over(self, reason: Reason) -> None:
        self.session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)

    def join_group(self) -> None:
        """The group link of a rank above 0."""
        world = self.world
        terms = SessionTerms(200 + self.rank, RANK_NONCE, self.nonce, *world.negotiated)
        self.hub_counts = Counters()
        self.hub = HubSession(terms, world.group, self.rank, self.hub_counts)
        self.group = OwnMemberSession(terms, self.member, self.table, self.memory, self.counts, self.joint)
        self.group_link = Link(terms, self.hub, self.group, world.splits)
        self.group_link.over = {"up": lambda _why: self.hub.lost(Reason.PEER_LOST), "down": self._group_over}
        self.group.up()
        self.hub.up()

    def _group_over(self, reason: Reason) -> None:
        self.group.lost(Reason.PEER_LOST)

    def pump(self) -> int:
        """One pass of its links, then what a daemon does after that."""
        moved = self.link.pump(self.world.now)
        if self.rank:
            moved += self.group_link.pump(self.world.now)
            if self.joint.group is not None:
                if self.group.asking and not self.table.not_free():
                    self.group.agree(*STATE)
                moved += self._ask()
        self.settle()
        return moved

    def _ask(self) -> int:
        asked = 0
        for request, slot in list(self.group.pending.items()):
            known = self.requests.get(request)
            if request in self.silent:
                continue
            asked += 1
            if self.joint.leader is None:
                self.group.refuse_granted(slot, Reason.PEER_LOST)
            elif known is None:
                self.group.refuse_granted(slot, Reason.REQUEST_UNKNOWN)
            else:
                options = self.world.options | self.asks.get(request, {})
                assert isinstance(self.session, OwnLinkSession)
                self.session.step_granted(slot, known, **options)  # type: ignore[arg-type]
        return asked

    def settle(self) -> None:
        """Fences, on the leader's link."""
        sessions = [self.session] if "down" not in self.link.ended else []
        if self.rank and self.joint.group is not None:
            sessions.append(self.group)  # type: ignore[arg-type]
        for session in sessions:
            session.settled.clear()
            fences, session.fences = session.fences, []
            for index in fences:
                up = "down" not in self.link.ended
                session.fenced(index, self.link.ends["down"].fence(index) if up else False)

    def release(self, slot: Slot) -> bool:
        """Its one consumer is done."""
        if self.rank and self.joint.group is not None:
            return self.group.release(slot, slot.generation, self.rank, 0)
        return self.table.release(slot, slot.generation, self.rank, 0)


@dataclass
class OwnFlight:
    """One STEP of the group."""

    request: int
    slot: int
    generation: int
    depth: int
    owner: int


class OwnWorld:
    """`size` ranks, the leader's end of each link, the group links; the first epoch is open."""

    def __init__(
        self, size: int = 3, mode: str = VOCABULARY, *, vocab: int = 100, depth: int = 3, support: int = 8, slots: int = 2,
        draw_proof: bool = True, seed: int = 0, largest: int = 0,
    ) -> None:  # fmt: skip
        self.size, self.mode, self.vocab = size, mode, vocab
        self.negotiated = (vocab, depth, support, slots, True, True, draw_proof, 128)
        self.splits = (seed, largest)
        self.now = 0
        self.whole = SessionTerms(1, LEADER_NONCE, 2, *self.negotiated)
        self.group_counts = Counters()
        self.group = RankGroup(size, self.group_counts, mode=mode)
        self.joined = LeaderGroup(self.whole, size, self.group_counts) if mode == VOCABULARY else None
        self.staging = bytearray(self.whole.geometry().total_bytes)
        self.options: dict[str, object] = {}
        self.ranks = [Rank(self, rank) for rank in range(size)]
        for rank in self.ranks[1:]:
            rank.join_group()
        self.run()
        assert self.group.open

    # ---- delivery -----------------------------------------------------------------------------------------------

    def run(self) -> None:
        """Until nothing moves."""
        for _ in range(600):
            if self.group.asking:
                self.group.agree(*STATE)
            moved = sum(rank.pump() for rank in self.ranks)
            if self.joined is not None:
                self.joined.look()
            if not moved:
                return
        raise AssertionError("the world does not come to rest")

    def at(self, now: int) -> None:
        """Moves the clock; rank 0's watchdog looks."""
        self.now = now
        self.ranks[0].session.tick(now)
        self.run()

    # ---- processes ----------------------------------------------------------------------------------------------

    def open(self, request: int = 1, owner: int = 0, seeds: Iterable[int] = ()) -> None:
        """Every rank's process opens the request."""
        given = list(seeds)
        for rank in self.ranks:
            opened = Request(request, given[rank.rank] if given else 1000 + request, PROMPT)
            opened.owner = owner
            rank.requests.add(opened)
            rank.session.open(opened)
        self.run()

    def step(self, request: int = 1, representation: int = wire.DENSE, budget_us: int = LONG_US) -> OwnFlight:
        """Every rank's process asks for the next proposal."""
        zero = self.ranks[0]
        asked = zero.requests.get(request)
        assert asked is not None
        support = self.whole.support if representation == wire.SPARSE else 0
        self.options = {
            "depth": self.whole.depth, "temperature": 1.0, "support": support, "representation": representation,
            "target_context": 9, "trace_id": 5,
        }  # fmt: skip
        slot = zero.session.step(
            asked, self.now, self.whole.depth, 1.0, support, representation, 9, budget_us, 5
        )
        assert slot is not None
        self.run()
        return OwnFlight(request, slot.index, slot.generation, self.whole.depth, asked.owner)

    def slot(self, flight: OwnFlight, rank: int) -> Slot:
        """A rank's slot of a flight."""
        return self.ranks[rank].table.slots[flight.slot]

    def commit(self, flight: OwnFlight, tokens: list[int]) -> None:
        """Every rank's process commits and gives its slot back."""
        for rank in self.ranks:
            request = rank.requests.get(flight.request)
            assert request is not None
            slot = rank.table.slots[flight.slot]
            rank.release(slot)
            rank.session.commit(request, slot.round, wire.VERIFIED, len(tokens) - 1, tokens)
        self.run()

    # ---- the draft ----------------------------------------------------------------------------------------------

    def counts(self, position: int) -> np.ndarray:
        """The whole row of a position."""
        return dyadic.allocate(np.array([(7 * i + 13 * position + i * i) % 11 for i in range(self.vocab)], np.float64))

    def row(self, flight: OwnFlight, position: int) -> tuple[bytes, int, int]:
        """(payload, entries, token) of the honest whole row."""
        slot = self.slot(flight, 0)
        u24 = rng.draw24(1000 + flight.request, rng.Domain.PROPOSAL, slot.request_generation, slot.round, position)
        if slot.representation == wire.DENSE:
            counts = self.counts(position)
            return dyadic.to_q(counts).tobytes().ljust(self.whole.dense_row_bytes, b"\0"), self.vocab, dyadic.draw(counts, u24)
        weights = np.array([(5 * i + 3 * position) % 7 * (i < 40) for i in range(self.vocab)], np.float64)
        ids, counts = dyadic.allocate_top_k(weights, slot.support)
        return dyadic.to_q(counts).tobytes() + ids.tobytes(), len(ids), dyadic.draw_sparse(ids, counts, u24)

    def put(self, flight: OwnFlight, rows: int | None = None) -> None:
        """The draft puts the next rows, all that are left when None."""
        side = self.joined if self.joined is not None else self.ranks[flight.owner].leader
        grant = side.grants[flight.slot]
        for _ in range(grant.depth - grant.rows if rows is None else rows):
            if not grant.alive(flight.generation):
                break
            position = grant.anchor + 1 + grant.rows
            payload, entries, token = self.row(flight, position)
            at = self.whole.geometry().row_offset(flight.slot, grant.rows)
            self.staging[at : at + len(payload)] = payload
            side.put_row(grant, flight.generation, position, token, entries, self.staging, at, len(payload))
        self.run()

    def honest_tokens(self, flight: OwnFlight) -> list[int]:
        """What the proposal must hold."""
        first = self.slot(flight, 0).anchor + 1
        return [self.row(flight, first + i)[2] for i in range(flight.depth)]

    def fates(self, flight: OwnFlight) -> list[Reason | None]:
        """What each rank holds: None for READY, the reason for void."""
        found: list[Reason | None] = []
        for rank in self.ranks:
            slot = rank.table.slots[flight.slot]
            assert slot.generation == flight.generation, "another generation"
            assert slot.state not in st.LIVE, f"rank {rank.rank} is not settled: {st.STATE_NAMES[slot.state]}"
            found.append(Reason.from_code(slot.reason) if slot.reason else None)
        return found

    def tokens(self, flight: OwnFlight, rank: int) -> list[int]:
        """The tokens as that rank's process reads them."""
        at = self.slot(flight, rank).meta_at
        return np.frombuffer(self.ranks[rank].memory, np.int32, flight.depth, at).tolist()

    def held(self, flight: OwnFlight, rank: int, row: int) -> bytes:
        """The bytes of a row at a rank."""
        slot = self.slot(flight, rank)
        at = slot.rows_at + row * slot.row_bytes
        return bytes(self.ranks[rank].memory[at : at + slot.row_bytes])


@dataclass(frozen=True, kw_only=True)
class OwnCase(Case):
    """A case with links of their own. `ends`: (rank, "leader" | "group") -> {side: why}; `"group"` for a group link."""

    act: Callable[[OwnWorld], None]
    world: dict[str, object] = field(default_factory=dict)
    ends: dict[tuple[int, str], dict[str, Reason]] = field(default_factory=dict)

    def run(self, seed: int, largest: int) -> None:
        world = OwnWorld(seed=seed, largest=largest, **self.world)  # type: ignore[arg-type]
        self.act(world)
        world.run()
        ended = {(rank.rank, "leader"): rank.link.ended for rank in world.ranks if rank.link.ended}
        ended |= {(rank.rank, "group"): rank.group_link.ended for rank in world.ranks[1:] if rank.group_link.ended}
        assert ended == self.ends
        if self.reason is not None:
            counters = [world.group_counts]
            for rank in world.ranks:
                counters += [rank.counts, rank.leader_counts, *([rank.hub_counts] if rank.rank else [])]
            assert sum(each.of(self.reason) for each in counters) > 0, "the reason was not counted"
        for rank in world.ranks:
            for slot in rank.table.slots:
                if slot.state in (st.READY, st.QUARANTINE):
                    rank.release(slot)
        world.run()
        world.at(1 << 60)
        for rank in world.ranks:
            assert rank.table.not_free() == 0, (rank.rank, rank.table.by_state())
