"""A rank group under a seeded scheduler: a leader, rank 0 and its members, real machines over links that delay, break, corrupt.

Between the sessions (sans-IO, so that one process holds them all) and `test_group_sim`. It plays engines, daemons, target
processes and their all-reduce; time is virtual. After every frame it asserts what must always hold; `Broken` says what did not.

    PYTHONPATH=.:tests python tests/session/group_world.py --seeds 100 --rounds 1000 --ranks 2,3,4

One seed is one run: the same seed, rounds and ranks give the same events.
"""

from __future__ import annotations

import argparse
import heapq
import random
import struct
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from functools import partial
from typing import Any

from pp1q_transport import wire
from pp1q_transport._native.kernels import copy_bytes, draw_u24
from pp1q_transport.counters import Counters
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.assembler import Assembler
from pp1q_transport.session.group import Coordinator
from pp1q_transport.session.group_member import Member, Standing
from pp1q_transport.session.hub import HubSession, RankGroup
from pp1q_transport.session.landing import LandingSession
from pp1q_transport.session.leader import Grant, LeaderSession
from pp1q_transport.session.member import MemberSession
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

US = 1_000
MS = 1_000_000
DEPTH = 2
SLOTS = 3
REQUESTS = 2
BUDGET_US = 4_000
POLL_NS = 400 * US
HALF = 1 << 23
TOKENS = (3, 7)
ROW = struct.pack("<2f2i", 0.5, 0.5, *TOKENS)
BAD_ROW = struct.pack("<2f2i", 0.5, 0.25, *TOKENS)
CONTEXT_TOKENS = 64

Key = tuple[int, int, int, int]  # coordinator's nonce, epoch, slot, generation


class Broken(AssertionError):
    """Something that must always hold did not."""


def require(holds: object, what: str) -> None:
    if not holds:
        raise Broken(what)


@dataclass(frozen=True)
class Rates:
    """How often each fault comes, per STEP."""

    cut_group: float = 0.004
    cut_leader: float = 0.004
    crash_member: float = 0.002
    crash_rank_0: float = 0.002
    crash_leader: float = 0.002
    target_dies: float = 0.004
    bad_row: float = 0.02
    bad_relay: float = 0.02
    stall: float = 0.02
    slow: float = 0.01  # a chunk that takes milliseconds
    late_fence: float = 0.1  # a fence that the link confirms only after a while
    raw_digest: float = 0.3  # a rank answers with its state as it is, before the all-reduce repaired it


QUIET = Rates(**{item.name: 0.0 for item in fields(Rates)})


@dataclass
class Machines:
    """What the world is built of; a mutant replaces one."""

    coordinator: type[Coordinator] = Coordinator
    group: type[RankGroup] = RankGroup
    member: type[Member] = Member
    member_session: type[MemberSession] = MemberSession


def drain(outbox: Any) -> bytes:
    sent = bytearray()
    while (piece := outbox.front()) is not None:
        sent += memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
        sent += memoryview(piece.memory)[piece.offset : piece.offset + piece.length]
        outbox.sent(piece.head_length + piece.length)
    return bytes(sent)


def frames_of(data: bytes) -> list[bytes]:
    found = []
    at = 0
    while at < len(data):
        end = at + wire.HEADER_BYTES + int.from_bytes(data[at + 56 : at + 60], "little")
        found.append(data[at:end])
        at = end
    return found


class End:
    """One end of a link: a session, its assembler, and whether it lives."""

    def __init__(self, owner: Process, session: Any, name: str) -> None:
        self.owner = owner
        self.session = session
        self.assembler = Assembler(session)
        self.name = name
        self.alive = True
        self.cut = False  # what is sent from here on gets nowhere
        self.peer: End
        self.last_due = 0


class Process:
    """Something that can crash: the leader's daemon, rank 0's or a member's."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.nonce = 0
        self.ends: dict[str, End] = {}
        self.start()

    def start(self) -> None:
        """A new life."""
        self.nonce = self.world.random.getrandbits(63) | 1
        self.counters = Counters()
        self.alive = True

    def crash(self) -> None:
        if not self.alive:
            return
        for end in list(self.ends.values()):
            end.alive = False
            self.world.cut(end.peer, and_peer=False)
        self.ends.clear()
        self.alive = False
        self.world.after(self.world.random.randint(200 * US, 4 * MS), self.restart)

    def restart(self) -> None:
        if not self.alive:
            self.start()

    def down(self, end: End, reason: Reason) -> None:
        """The link ends for us."""
        end.alive = False
        if self.ends.get(end.name) is end:
            del self.ends[end.name]
        end.session.lost(reason) if end.name != "lead" or self is not self.world.leader else end.session.lost()

    def settle(self) -> None:
        """What an owner does after every frame."""

    def poll(self) -> None:
        """What an owner does from time to time."""

    def flush(self) -> None:
        for end in list(self.ends.values()):
            self.world.send(end)


class Leader(Process):
    """Drafts: two rows a STEP, each after a while."""

    def start(self) -> None:
        super().start()
        self.requests = RequestTable()

    def settle(self) -> None:
        end = self.ends.get("lead")
        if end is None:
            return
        session: LeaderSession = end.session
        for grant in session.steps:
            if self.world.chance("stall"):
                continue
            delay = self.world.random.randint(5 * US, 300 * US)
            self.world.after(delay, partial(self.row, end, grant, grant.generation, 0))
        session.steps.clear()
        session.events.clear()
        session.news.clear()

    def row(self, end: End, grant: Grant, generation: int, row: int) -> None:
        if not end.alive or not grant.alive(generation):
            return
        position = grant.anchor + 1 + row
        u24 = draw_u24(grant.seed, 1, grant.request_generation, grant.round, position)
        payload = BAD_ROW if self.world.chance("bad_row") else ROW
        end.session.put_row(grant, generation, position, TOKENS[u24 >= HALF], 2, payload, 0, len(payload))
        if row + 1 < grant.depth:
            self.world.after(self.world.random.randint(0, 200 * US), lambda: self.row(end, grant, generation, row + 1))
        self.flush()


class Rank(Process):
    """A daemon of one rank and its target process: a state (an order-free digest of what it committed) and the slots it reads."""

    table: SlotTable

    def __init__(self, world: World, rank: int) -> None:
        self.rank = rank
        self.target_alive = True
        self.state: int | None = 0  # None: a target that has just started
        super().__init__(world, f"rank{rank}")

    def start(self) -> None:
        super().start()
        self.table = SlotTable(self.world.geometry, self.rank)
        self.memory = bytearray(self.world.geometry.total_bytes)
        self.held: dict[int, int] = {}  # slot -> generation that our target reads
        self.raw_tries = 0

    # ---- the target process ----

    def got(self, session: LandingSession) -> None:
        """Takes over what was settled."""
        for slot in session.settled:
            if slot.state == st.READY and self.held.get(slot.index) != slot.generation:
                self.world.saw_ready(self, slot)
                self.held[slot.index] = slot.generation
                if not self.target_alive:
                    self.too_late(slot)
                    self.give_back(slot, slot.generation)
                    continue
                delay = self.world.random.randint(10 * US, 500 * US)
                self.world.after(delay, partial(self.consume, slot, slot.generation, self.key(slot)))
            elif slot.reason:
                self.world.saw_void(self, slot)
        session.settled.clear()

    def consume(self, slot: Slot, generation: int, key: Key) -> None:
        """The target verified: commits if it may, then releases."""
        if not self.alive or self.held.get(slot.index) != generation or self.table.slots[slot.index] is not slot:
            return
        if self.may_commit(slot, generation):
            self.world.commits(self, key)
            assert self.state is not None
            self.state ^= hash(key)
            self.committed(slot)
        else:
            self.too_late(slot)
        self.give_back(slot, generation)
        self.settle()
        self.flush()

    def give_back(self, slot: Slot, generation: int) -> None:
        self.held.pop(slot.index, None)
        self.release(slot, generation)

    def target_dies(self) -> None:
        if not self.target_alive or not self.alive:
            return
        self.target_alive = False
        self.state = None
        self.leave()
        for index, generation in list(self.held.items()):
            self.too_late(self.table.slots[index])
            self.give_back(self.table.slots[index], generation)
        self.settle()
        self.flush()
        self.world.after(self.world.random.randint(200 * US, 3 * MS), self.target_returns)

    def target_returns(self) -> None:
        self.target_alive = True

    def digest(self) -> tuple[int, int]:
        """What the engine's hook gives: all ranks' states made one by an all-reduce; or, now and then, the raw one."""
        if self.state is None or not self.world.chance("raw_digest"):
            self.state = self.world.reference()
        return self.state & (1 << 64) - 1, self.rank * 0

    def key(self, slot: Slot) -> Key:
        raise NotImplementedError

    def may_commit(self, slot: Slot, generation: int) -> bool:
        raise NotImplementedError

    def committed(self, slot: Slot) -> None:
        """Further consequences of a commit."""

    def too_late(self, slot: Slot) -> None:
        """Those of one that may not be made."""

    def release(self, slot: Slot, generation: int) -> None:
        raise NotImplementedError

    def leave(self) -> None:
        raise NotImplementedError

    def fence(self, end: End) -> None:
        session: LandingSession = end.session
        fences, session.fences = session.fences, []
        for index in fences:
            if self.world.chance("late_fence"):
                self.world.after(self.world.random.randint(0, 2 * MS), partial(self.fence_late, end, index))
            else:
                session.fenced(index, end.assembler.landing.abandon(index))

    def fence_late(self, end: End, index: int) -> None:
        if end.alive:
            end.session.fenced(index, end.assembler.landing.abandon(index))
            self.flush()


class RankZero(Rank):
    """Rank 0: faces the leader, and holds the group."""

    def start(self) -> None:
        super().start()
        self.requests = RequestTable()
        machines = self.world.machines
        self.group = machines.group(self.world.size, self.counters, machines.coordinator(self.world.size))
        self.waiting: dict[int, tuple[Slot, int]] = {}  # request -> its proposal under way

    def key(self, slot: Slot) -> Key:
        return (self.nonce, slot.epoch, slot.index, slot.generation)

    @property
    def receiver(self) -> ReceiverSession | None:
        end = self.ends.get("lead")
        return None if end is None else end.session

    def may_commit(self, slot: Slot, generation: int) -> bool:
        return self.group.may_commit(slot.index, generation, slot.epoch)

    def committed(self, slot: Slot) -> None:
        request = self.requests.get(slot.request)
        if request is None:
            return
        tokens = struct.unpack_from(f"<{DEPTH}i", self.memory, slot.meta_at)
        if self.receiver is None:
            self.group.check_commit(request.request, slot.round)
            request.extend(tokens)
        else:
            self.receiver.commit(request, slot.round, wire.VERIFIED, DEPTH, tokens)

    def too_late(self, slot: Slot) -> None:
        """The target goes on alone; a commit of what is void must fail and change nothing."""
        request = self.requests.get(slot.request)
        if request is None:
            return
        if self.receiver is None:
            request.extend((1,))
            request.in_flight = False
            return
        before = len(request.tokens)
        try:
            self.receiver.commit(request, slot.round, wire.VERIFIED, DEPTH, [TOKENS[0]] * DEPTH)
        except ProposalDiscarded as discarded:
            require(discarded.reason is Reason.PEER_LOST, "a late commit fails for another reason than peer_lost")
        else:
            raise Broken("rank 0's session commits across the end of an epoch")
        require(len(request.tokens) == before, "a commit that failed left tokens behind")
        self.receiver.commit(request, slot.round, wire.TARGET_ONLY, 0, [1])

    def release(self, slot: Slot, generation: int) -> None:
        self.table.release(slot, generation, 0, 0)

    def leave(self) -> None:
        self.group.leave(Reason.PEER_LOST)

    def settle(self) -> None:
        end = self.ends.get("lead")
        if end is not None:
            self.got(end.session)
            self.fence(end)
            end.session.news.clear()
        self.group.news.clear()
        for hub in self.group.hubs.values():
            hub.news.clear()
            require(not hub.broken, "a hub's outbox is full")
        self.world.watch_epoch(self)

    def down(self, end: End, reason: Reason) -> None:
        super().down(end, reason)
        if end.name == "lead":
            self.got(end.session)
            for request in self.requests.requests.values():
                request.discard()

    def poll(self) -> None:
        receiver = self.receiver
        if receiver is not None:
            receiver.tick(self.world.now)
        if self.group.asking and self.target_alive:
            self.group.agree(*self.digest())
        if receiver is not None and self.target_alive and not receiver.broken:
            self.rounds(receiver)
        self.settle()
        self.flush()

    def busy(self, request: Request) -> bool:
        """Whether its last proposal is still under way, or read."""
        slot, generation = self.waiting.get(request.request, (None, 0))
        if slot is None or slot.generation != generation:
            return False
        return slot.state in st.LIVE or self.held.get(slot.index) == generation

    def rounds(self, receiver: ReceiverSession) -> None:
        """Keeps every request busy: one STEP as soon as its last proposal is decided and given back."""
        for request in list(self.requests.requests.values()):
            if self.busy(request):
                continue
            if len(request.tokens) + DEPTH > CONTEXT_TOKENS:
                receiver.close(request)
                self.requests.remove(request.request)
                self.waiting.pop(request.request, None)
                continue
            if not self.world.more():
                continue
            try:
                granted = receiver.step(request, self.world.now, DEPTH, 1.0, 2, wire.SPARSE, 0, BUDGET_US, 0)
            except ProposalDiscarded:
                require(not self.group.open, "a STEP was refused in an open epoch")
                return
            if granted is not None:
                self.waiting[request.request] = (granted, granted.generation)
                self.world.stepped()
        while len(self.requests.requests) < REQUESTS:
            number = self.world.next_request()
            opened = Request(number, number * 77, (1, 2))
            self.requests.add(opened)
            receiver.open(opened)


class RankN(Rank):
    """A member's rank."""

    def start(self) -> None:
        super().start()
        self.member = self.world.machines.member(self.rank, self.world.size)

    def key(self, slot: Slot) -> Key:
        return (self.member.coordinator, slot.epoch, slot.index, slot.generation)

    @property
    def session(self) -> MemberSession | None:
        end = self.ends.get(self.name)
        return None if end is None else end.session

    def may_commit(self, slot: Slot, generation: int) -> bool:
        return self.member.may_commit(slot.epoch, slot.index, generation)

    def release(self, slot: Slot, generation: int) -> None:
        if self.session is None:
            self.table.release(slot, generation, self.rank, 0)
        else:
            self.session.release(slot, generation, self.rank, 0)

    def leave(self) -> None:
        if self.session is not None:
            self.session.leave(Reason.PEER_LOST)

    def settle(self) -> None:
        end = self.ends.get(self.name)
        if end is not None:
            self.got(end.session)
            self.fence(end)
            end.session.news.clear()
            require(not end.session.broken, "a member's session broke")

    def down(self, end: End, reason: Reason) -> None:
        super().down(end, reason)
        self.got(end.session)

    def poll(self) -> None:
        session = self.session
        if session is None:
            return
        session.tick(self.world.now)
        if session.asking and self.target_alive and not self.table.not_free():
            require(session.agree(*self.digest()), "a member that is asked and holds nothing can't agree")
        self.settle()
        self.flush()


@dataclass
class Report:
    """What one run came to."""

    rounds: int = 0
    ready: int = 0
    void: int = 0
    commits: int = 0
    epochs: int = 0
    disagreements: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    events: int = 0


class World:
    """One run. `play` brings `rounds` STEPs under faults, then peace, and checks that all comes to rest and works."""

    def __init__(self, seed: int, size: int, rates: Rates | None = None, machines: Machines | None = None) -> None:
        self.random = random.Random(seed)
        self.size = size
        self.rates = rates or Rates()
        self.machines = machines or Machines()
        self.now = 0
        self.report = Report()
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._left = 0
        self._request = 0
        self._session = 0
        self.geometry = self.terms(1, 1).geometry()
        self.decisions: dict[Key, int] = {}
        self.votes: dict[Key, set[int]] = {}
        self._recent: deque[Key] = deque()
        self.current: tuple[int, int] = (0, 0)  # the epoch that opened last, anywhere
        self._retry: dict[str, int] = {}
        self._disagreed = 0
        self.leader = Leader(self, "leader")
        self.zero = RankZero(self, 0)
        self.members = [RankN(self, rank) for rank in range(1, size)]
        self.ranks: list[Rank] = [self.zero, *self.members]

    def terms(self, sender: int, taker: int) -> SessionTerms:
        self._session += 1
        return SessionTerms(self._session, sender, taker, 64, DEPTH, 2, SLOTS, dense=False, max_context_tokens=CONTEXT_TOKENS)

    # ---- time -------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        self._serial += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._serial, call))

    def run(self, until_ns: int, done: Callable[[], bool]) -> bool:
        while self._heap and self._heap[0][0] <= until_ns:
            if done():
                return True
            self.now, _, call = heapq.heappop(self._heap)
            self.report.events += 1
            call()
        self.now = max(self.now, until_ns)
        return done()

    def tick(self) -> None:
        """Every owner's poll, and the forming of what is down."""
        self.form()
        for process in (self.leader, *self.ranks):
            if process.alive:
                process.poll()
        self.after(POLL_NS, self.tick)

    # ---- faults -----------------------------------------------------------------------------------------------------

    def chance(self, name: str) -> bool:
        rate: float = getattr(self.rates, name)
        return rate > 0 and self.random.random() < rate

    def more(self) -> bool:
        return self._left > 0

    def next_request(self) -> int:
        self._request += 1
        return self._request

    def stepped(self) -> None:
        """A STEP was granted: a round, and a chance for each fault."""
        self._left -= 1
        self.report.rounds += 1
        soon = self.random.randint(0, 2 * MS)
        if self.chance("cut_group"):
            self.after(soon, partial(self.cut_named, self.random.choice(self.members).name))
        if self.chance("cut_leader"):
            self.after(soon, partial(self.cut_named, "lead"))
        if self.chance("crash_member"):
            self.after(soon, self.random.choice(self.members).crash)
        if self.chance("crash_rank_0"):
            self.after(soon, self.zero.crash)
        if self.chance("crash_leader"):
            self.after(soon, self.leader.crash)
        if self.chance("target_dies"):
            self.after(soon, self.random.choice(self.ranks).target_dies)

    def cut_named(self, name: str) -> None:
        end = self.zero.ends.get(name)
        if end is not None:
            self.cut(end)

    def cut(self, end: End, and_peer: bool = True) -> None:
        """The link is cut: nothing more gets through, and each end learns of it after a while."""
        for side in (end, end.peer) if and_peer else (end,):
            side.cut = True
            side.peer.cut = True
            self.after(self.random.randint(0, 600 * US), partial(self.ended, side))

    def ended(self, end: End) -> None:
        if end.alive:
            end.owner.down(end, Reason.PEER_LOST)
            end.owner.settle()
            end.owner.flush()

    # ---- links ------------------------------------------------------------------------------------------------------

    def form(self) -> None:
        """Joins again what is down at both ends, each link after a delay of its own."""
        for name, left, right in [("lead", self.leader, self.zero), *((m.name, self.zero, m) for m in self.members)]:
            if not (left.alive and right.alive) or name in left.ends or name in right.ends:
                self._retry[name] = self.now + self.random.randint(0, 2 * MS)
            elif self.now >= self._retry.get(name, 0):
                self.join(name, left, right)

    def join(self, name: str, left: Any, right: Any) -> None:
        terms = self.terms(left.nonce, right.nonce)
        if name == "lead":
            one: Any = LeaderSession(terms, left.requests, left.counters)
            two: Any = ReceiverSession(terms, right.table, right.memory, right.requests, right.counters, SLOTS, right.group)
        else:
            one = HubSession(terms, left.group, right.rank, left.counters)
            two = self.machines.member_session(terms, right.member, right.table, right.memory, right.counters, SLOTS)
        ends = End(left, one, name), End(right, two, name)
        ends[0].peer, ends[1].peer = ends[1], ends[0]
        left.ends[name], right.ends[name] = ends
        if name == "lead":
            for request in right.requests.requests.values():
                two.open(request)
        else:
            two.up()
            one.up()
        left.flush()
        right.flush()

    def send(self, end: End) -> None:
        data = drain(end.session.outbox)
        if not data:
            return
        self.saw_sent(end, data)
        if end.cut or not end.peer.alive:
            return
        if end.owner is self.zero and end.name != "lead" and self.chance("bad_relay"):
            data = corrupted(data)
        delay = self.random.randint(10 * US, 150 * US)
        if self.chance("slow"):
            delay += self.random.randint(0, 5 * MS)
        end.last_due = max(end.last_due, self.now + delay)
        self.after(end.last_due - self.now, lambda: self.deliver(end.peer, data))

    def deliver(self, end: End, data: bytes) -> None:
        for frame in frames_of(data):
            if not end.alive or not end.owner.alive:
                return
            at = 0
            while at < len(frame):
                end.assembler.want()
                count = min(end.assembler.length, len(frame) - at)
                copy_bytes(end.assembler.memory, end.assembler.offset, frame, at, count)
                at += count
                code = end.assembler.received(count, self.now)
                if code:
                    kind = wire.KIND_NAMES[frame[5]]
                    raise Broken(f"{end.owner.name} refuses a {kind} of an honest peer: {Reason.from_code(code)}")
            end.owner.settle()
        end.owner.flush()

    # ---- what must always hold ----------------------------------------------------------------------------------------

    def saw_sent(self, end: End, data: bytes) -> None:
        if isinstance(end.owner, RankN):
            header = wire.Header()
            for frame in frames_of(data):
                if frame[5] == wire.VOTE:
                    require(header.decode(frame, 0) == 0, "a frame that does not decode")
                    if header.status == 0:
                        key = (end.session.terms.leader_nonce, header.epoch, header.slot, header.slot_generation)
                        self.votes.setdefault(key, set()).add(end.owner.rank)
                        self._recent.append(key)
        while len(self._recent) > 4096:
            old = self._recent.popleft()
            self.votes.pop(old, None)
            self.decisions.pop(old, None)

    def saw_ready(self, rank: Rank, slot: Slot) -> None:
        key = rank.key(slot)
        missing = set(range(1, self.size)) - self.votes.get(key, set())
        require(not missing, f"{rank.name} is READY without the vote of {missing}: {key}")
        require(slot.rows_done == (1 << DEPTH) - 1, f"{rank.name} is READY without its rows: {key}")
        self.decided(rank, key, 0)
        if rank is self.zero:
            self.report.ready += 1

    def saw_void(self, rank: Rank, slot: Slot) -> None:
        """A void proposal: by decision, unless its epoch is over for the rank."""
        if isinstance(rank, RankZero):
            self.report.void += 1
            self.report.reasons[Reason.from_code(slot.reason).value] += 1
            if rank.group.epoch == slot.epoch:
                self.decided(rank, rank.key(slot), slot.reason)
        elif isinstance(rank, RankN) and rank.member.standing is Standing.OPEN and rank.member.epoch == slot.epoch:
            self.decided(rank, rank.key(slot), slot.reason)

    def decided(self, rank: Rank, key: Key, code: int) -> None:
        known = self.decisions.setdefault(key, code)
        require(known == code, f"{rank.name} holds decision {code} on {key}, another rank {known}")

    def commits(self, rank: Rank, key: Key) -> None:
        self.report.commits += 1
        require(self.decisions.get(key) == 0, f"{rank.name} commits {key}, which was not decided READY")
        require(key[:2] == self.current, f"{rank.name} commits {key} across the end of its epoch: {self.current} is open")
        if isinstance(rank, RankZero):
            require(rank.group.coordinator.open and rank.group.epoch == key[1], f"rank 0 commits {key} in {rank.group.epoch}")
        elif isinstance(rank, RankN):
            require(rank.member.epoch == key[1] and rank.member.standing is Standing.OPEN, f"{rank.name} commits {key} too late")

    def watch_epoch(self, zero: RankZero) -> None:
        coordinator = zero.group.coordinator
        if coordinator.open and self.current != (zero.nonce, coordinator.epoch):
            self.current = (zero.nonce, coordinator.epoch)
            self.report.epochs += 1
            states = {rank.name: rank.state for rank in self.ranks if rank.target_alive and rank.alive and rank.state is not None}
            require(len(set(states.values())) == 1, f"an epoch opened over different states: {states}")
        if coordinator.disagreements != self._disagreed:
            self.report.disagreements += max(0, coordinator.disagreements - self._disagreed)
            self._disagreed = coordinator.disagreements

    def reference(self) -> int:
        """The state that the ranks' all-reduce settles on: that of the first rank that has one."""
        known = (rank.state for rank in self.ranks if rank.target_alive and rank.state is not None)
        return next(known, 0)

    # ---- the play -----------------------------------------------------------------------------------------------------

    def play(self, rounds: int) -> Report:
        self._left = rounds
        self.tick()
        limit = self.now + rounds * 200 * MS + 1000 * MS
        require(self.run(limit, lambda: self._left <= 0), f"{self._left} of {rounds} rounds were not reached")
        self.rates = QUIET
        self.run(self.now + 20 * MS, lambda: False)  # faults that are on their way still come
        require(self.run(self.now + 2000 * MS, self.at_rest), f"no rest: {self.unrest()}")
        self._left = 4
        before = self.report.commits
        require(self.run(self.now + 2000 * MS, lambda: self._left <= 0), "the group does not open again")
        require(self.run(self.now + 2000 * MS, self.at_rest), f"no rest in the end: {self.unrest()}")
        require(self.report.commits == before + 4 * self.size, "four rounds in peace were not committed by every rank")
        return self.report

    def at_rest(self) -> bool:
        return self.zero.group.open and self.zero.receiver is not None and not self.unrest()

    def unrest(self) -> dict[str, object]:
        """The slots that are not FREE, by rank; and who is down."""
        busy: dict[str, object] = {
            rank.name: {i: st.STATE_NAMES[s.state] for i, s in enumerate(rank.table.slots) if s.state} for rank in self.ranks
        }
        busy |= {rank.name + " down": True for rank in self.ranks if not rank.alive or not rank.target_alive}
        busy |= {m.name + " closed": m.member.standing for m in self.members if not m.member.open}
        return {name: value for name, value in busy.items() if value}


def corrupted(data: bytes) -> bytes:
    """The first row in `data` with one bit of its payload flipped."""
    at = 0
    for frame in frames_of(data):
        if frame[5] == wire.REPLY:
            bad = bytearray(data)
            bad[at + wire.HEADER_BYTES] ^= 1
            return bytes(bad)
        at += len(frame)
    return data


def main() -> int:
    """Command line; exit status 1 names the seed of the first run that broke."""
    parser = argparse.ArgumentParser(description="Plays rank groups under seeded faults and checks their invariants.")
    parser.add_argument("--seeds", type=int, default=25, help="how many runs a group size")
    parser.add_argument("--first", type=int, default=1, help="the first seed")
    parser.add_argument("--rounds", type=int, default=1000, help="STEPs a run")
    parser.add_argument("--ranks", default="2,3,4", help="group sizes, comma-separated")
    options = parser.parse_args()
    began = time.monotonic()
    total, reasons = Report(), Counter[str]()
    for size in map(int, options.ranks.split(",")):
        for seed in range(options.first, options.first + options.seeds):
            try:
                report = World(seed, size).play(options.rounds)
            except Exception as error:
                print(f"seed {seed}, {size} ranks: {type(error).__name__}: {error}")
                raise
            reasons += report.reasons
            for name in ("rounds", "ready", "void", "commits", "epochs", "disagreements", "events"):
                setattr(total, name, getattr(total, name) + getattr(report, name))
    total.reasons = reasons
    print(f"{total}\n{time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
