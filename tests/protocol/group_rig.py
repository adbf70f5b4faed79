"""A world with members: the leader and rank 0 of `world`, a group link to every other rank, a tap on each direction.

Between a numbered case of a rank group and the real machinery. It plays the daemons as `hub` and `member` tell them to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links.sim import sim_pair
from pp1q_transport.session import slots as st
from pp1q_transport.session.group import MAX_RANKS
from pp1q_transport.session.group_member import Member
from pp1q_transport.session.hub import HubSession, RankGroup
from pp1q_transport.session.member import MemberSession
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

from .case import Case
from .frames import Bend, Frame, Tap
from .world import RECEIVER_NONCE, Flight, World

GROUP_SESSION = 0x6701_0000_0000_0000
MEMBER_NONCE = 0x7777_0000_0000_0000
STATE = (11, 22)


class MemberRig:
    """One member: its own slots, and the group link to rank 0. Sides are "hub" and "member"."""

    def __init__(self, world: GroupWorld, rank: int) -> None:
        self.world = world
        self.rank = rank
        self.member = Member(rank, world.size)
        geometry = world.terms.geometry()
        self.table = SlotTable(geometry, rank)
        self.memory = bytearray(geometry.total_bytes)
        self.counts = {"hub": Counters(), "member": Counters()}
        self.state = STATE
        self.lives = 0
        self.join()

    def join(self) -> None:
        """A new session of the group link."""
        self.lives += 1
        self.terms = SessionTerms(
            GROUP_SESSION + self.rank * 256 + self.lives, RECEIVER_NONCE, MEMBER_NONCE + self.rank, *self.world.negotiated
        )
        group = self.world.group
        assert group is not None
        self.hub = HubSession(self.terms, group, self.rank, self.counts["hub"])
        self.session = MemberSession(self.terms, self.member, self.table, self.memory, self.counts["member"])
        self.taps = {"hub": Tap(self.hub.outbox, self), "member": Tap(self.session.outbox, self)}
        left, right = sim_pair(self.hub, self.taps["hub"].outbox, self.session, self.taps["member"].outbox, *self.world.splits)
        self.links = {"hub": left, "member": right}
        self.ended: dict[str, Reason] = {}
        self.session.up()
        self.hub.up()

    def pump(self) -> int:
        """One pass of both ends."""
        if "member" not in self.ended and self.session.asking and not self.table.not_free():
            self.session.agree(*self.state)
        return self._pump("hub") + self._pump("member")

    def _pump(self, side: str) -> int:
        if side in self.ended:
            return 0
        session = self.hub if side == "hub" else self.session
        try:
            self.taps[side].pump()
            moved = self.links[side].pump(self.world.now)
        except PeerFault as fault:
            self.down(side, fault.reason)
            return 1
        code = -moved if moved < 0 else session.broken
        if code:
            self.down(side, Reason.from_code(code))
            return 1
        self.settle()
        return moved

    def settle(self) -> None:
        """Fences, as the engine does after each pass."""
        self.session.settled.clear()
        fences, self.session.fences = self.session.fences, []
        for index in fences:
            self.session.fenced(index, self.links["member"].fence(index))

    def down(self, side: str, reason: Reason) -> None:
        """One end of the link is over."""
        self.ended[side] = reason
        self.links[side].close()
        self.counts[side].refuse(reason)
        session = self.hub if side == "hub" else self.session
        session.lost(Reason.PEER_LOST if reason is Reason.CANCELLED else reason)

    def frame(self, side: str, kind: int, payload: bytes = b"", **values: int) -> Frame:
        """A frame made by hand as if `side` had sent it."""
        header = wire.Header()
        header.clear()
        header.kind = kind
        header.boot_nonce = self.terms.leader_nonce if side == "hub" else self.terms.receiver_nonce
        header.session = self.terms.session
        for name in ("epoch", "status", "phase", "floor", "state_low", "state_high", "subject"):
            setattr(header, name, 0)
        for name, value in values.items():
            setattr(header, name, value)
        return Frame(header, payload)

    def send(self, side: str, *frames: Frame) -> None:
        """Puts frames into the stream that `side` sends, and delivers."""
        for frame in frames:
            self.taps[side].send(frame)
        self.world.run()

    def bend(self, side: str, kind: int, bend: Bend) -> None:
        """Bends every frame of that kind that `side` sends."""
        self.taps[side].hook = lambda frame, world: bend(frame, world) if frame.header.kind == kind else None

    def slot(self, flight: Flight) -> Slot:
        """The member's own slot of a flight."""
        return self.table.slots[flight.slot.index]

    def release(self, flight: Flight) -> bool:
        """Its one consumer is done."""
        return self.session.release(self.slot(flight), flight.generation, self.rank, 0)


class GroupWorld(World):
    """Rank 0 and `size` - 1 members; the first epoch is open unless `agree` is False."""

    def __init__(self, size: int = 3, agree: bool = True, **options: object) -> None:
        assert 2 <= size <= MAX_RANKS
        self.size = size
        self.group_counts = Counters()
        self.group = RankGroup(size, self.group_counts)
        self.members: list[MemberRig] = []
        self.rank_0_agrees = agree
        super().__init__(**options)  # type: ignore[arg-type]
        self.members += [MemberRig(self, rank) for rank in range(1, size)]
        self.run()

    @property
    def negotiated(self) -> tuple[int, int, int, int, bool, bool, bool, int]:
        return self._negotiated

    @property
    def splits(self) -> tuple[int, int]:
        return self._splits

    def _pump(self, side: str) -> int:
        """The members' links are pumped along with the leader's end."""
        moved = super()._pump(side)
        if side == "leader":
            assert self.group is not None
            if self.group.asking and self.rank_0_agrees:
                self.group.agree(*STATE)
            moved += sum(rig.pump() for rig in self.members)
        return moved

    def tables(self) -> list[SlotTable]:
        """Every rank's slots, rank 0 first."""
        return [self.table, *(rig.table for rig in self.members)]

    def fates(self, flight: Flight) -> list[Reason | None]:
        """What each rank holds: None for READY, the reason for void."""
        found: list[Reason | None] = []
        for table in self.tables():
            slot = table.slots[flight.slot.index]
            assert slot.generation == flight.generation, "another generation"
            assert slot.state not in st.LIVE, f"not settled: {st.STATE_NAMES[slot.state]}"
            found.append(Reason.from_code(slot.reason) if slot.reason else None)
        return found

    def release_everywhere(self, flight: Flight) -> None:
        """Every rank's consumer is done."""
        self.release(flight)
        for rig in self.members:
            if "member" in rig.ended:
                rig.table.release(rig.slot(flight), flight.generation, rig.rank, 0)
            else:
                rig.release(flight)
        self.run()


Act = Callable[[GroupWorld], None]


@dataclass(frozen=True, kw_only=True)
class GroupCase(Case):
    """A case that plays its own course with a group. `ends`: rank -> {side: why its link ended}."""

    act: Act
    world: dict[str, object] = field(default_factory=dict)
    ends: dict[int, dict[str, Reason]] = field(default_factory=dict)
    leader_ends: dict[str, Reason] = field(default_factory=dict)

    def run(self, seed: int, largest: int) -> None:
        world = GroupWorld(seed=seed, largest=largest, **self.world)  # type: ignore[arg-type]
        self.act(world)
        world.run()
        assert world.ended == self.leader_ends
        assert {rig.rank: rig.ended for rig in world.members if rig.ended} == self.ends
        if self.reason is not None:
            counters = [world.group_counts, *world.counts.values(), *(c for rig in world.members for c in rig.counts.values())]
            assert sum(counter.of(self.reason) for counter in counters) > 0, "the reason was not counted"
        self._rest(world)

    def _rest(self, world: GroupWorld) -> None:
        """Every consumer gives back what it holds, budgets run out: then every slot is FREE at every rank."""
        for table in world.tables():
            for slot in table.slots:
                if slot.state in (st.READY, st.QUARANTINE):
                    rig = next((rig for rig in world.members if rig.table is table), None)
                    owner = table if rig is None or "member" in rig.ended else rig.session
                    owner.release(slot, slot.generation, table.rank, 0)
        world.run()
        if "receiver" not in world.ended:
            world.at(1 << 60)
        for table in world.tables():
            assert table.not_free() == 0, (table.rank, table.by_state())
