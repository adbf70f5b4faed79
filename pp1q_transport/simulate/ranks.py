"""A target and its ranks: daemons with their target processes, which verify what they read and commit it in step.

Between the world and the landing sessions: rank 0 faces the leader and holds the group, a member has its link to rank 0. The
engine's own collective is played here: an all-reduce that makes committed states one, ranks that go on together. SPEC section 4.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from functools import partial
from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import Reason
from ..session import slots as st
from ..session.slots import SlotTable
from .checks import UNAFFECTED
from .faults import MS, US
from .journal import HARMLESS, require
from .models import Book
from .parties import Process

if TYPE_CHECKING:
    from ..session.landing import LandingSession
    from ..session.slots import Slot, SlotGeometry
    from .journal import Injection
    from .lanes import End, LandingMemory
    from .members import RankN
    from .world import World
    from .zero import RankZero

Key = tuple[int, int, int, int, int]  # coordinator's nonce, epoch, slot, generation, and the target's number
OVERDUE_NS: Final = 1 * MS
_TOO_LONG_NS: Final = 3 * MS


class Target:
    """One target of the leader: its ranks, and what their engine knows by means of its own."""

    zero: RankZero
    members: list[RankN]

    def __init__(self, world: World, number: int, size: int, geometry: SlotGeometry, one_sided: bool) -> None:
        self.world = world
        self.number = number
        self.size = size
        self.geometry = geometry
        self.one_sided = one_sided
        self.asked: dict[Key, tuple[int, int, int, int, int]] = {}
        self.current: tuple[int, int] = (0, 0)  # the epoch that opened last: rank 0's nonce, number
        self.archive: dict[int, Book] = {}  # what the user has seen: for when every target process is gone
        self.stalls: dict[tuple[int, int, int], Injection] = {}  # by (rank 0's nonce, slot, generation)
        self.bad_rows: dict[tuple[int, int, int], Injection] = {}

    @property
    def ranks(self) -> list[Rank]:
        """All of them, in order."""
        return [self.zero, *self.members]

    def reference(self) -> dict[int, Book]:
        """The state that an all-reduce settles on: rank 0's, or that of the first rank that has one."""
        known = (rank.book for rank in self.ranks if rank.target_alive and rank.book is not None)
        return next(known, self.archive)


class Rank(Process):
    """A daemon of one rank and its target process: `book` is what that has committed, None for one that has just started."""

    target: Target

    def __init__(self, world: World, target: Target, rank: int) -> None:
        self.target = target
        self.rank = rank
        self.target_alive = True
        self.book: dict[int, Book] | None = {}
        self.late_fences: list[Injection] = []
        self.overdues: list[Injection] = []
        self.unequal: list[Injection] = []
        super().__init__(world, f"target{target.number}.rank{rank}")

    def start(self) -> None:
        """See `Process.start`."""
        super().start()
        self.table = SlotTable(self.target.geometry, self.rank)
        self.memory = bytearray(self.target.geometry.total_bytes)
        self.held: dict[int, int] = {}  # slot -> generation that our target reads
        self.world.watcher.restarted(self)

    def landing_end(self) -> End | None:
        """The end that rows land at."""
        return self.ends.get("lead" if self.rank == 0 else f"rank{self.rank}")

    def bytes_of(self, slot: Slot) -> bytes:
        """Rows and metadata of a slot, as a sampler may read them."""
        geometry = self.target.geometry
        rows = self.memory[slot.rows_at : slot.rows_at + geometry.slot_bytes]
        return bytes(rows + self.memory[slot.meta_at : slot.meta_at + geometry.meta_bytes])

    # ---- the target process -------------------------------------------------------------------------------------

    def got(self, session: LandingSession) -> None:
        """Takes over what was settled."""
        settled, session.settled = session.settled, []
        for slot in settled:
            if slot.state == st.READY and self.held.get(slot.index) != slot.generation:
                self._take(slot)
            elif slot.reason:
                why = Reason.from_code(slot.reason).value
                self.world.journal.note(f"{self.world.now} {self.name} slot {slot.index}.{slot.generation} is void: {why}")
                self.world.watcher.voided(self, slot)
                self.saw_void(slot)

    def _take(self, slot: Slot) -> None:
        world, key = self.world, self.key(slot)
        world.journal.note(f"{world.now} {self.name} slot {slot.index}.{slot.generation} is ready")
        world.watcher.became_ready(self, slot, key)
        self.saw_ready(slot)
        self.held[slot.index] = slot.generation
        if not self.target_alive:
            self.too_late(slot)
            self.give_back(slot, slot.generation)
            return
        delay = world.random.randint(10 * US, 500 * US)
        if self.overdues:
            overdue = self.overdues.pop()
            world.outcomes.begin(overdue)
            world.after(OVERDUE_NS, partial(self._overdue, slot, slot.generation, overdue))
            delay = _TOO_LONG_NS
        world.after(delay, partial(self.consume, slot, slot.generation, key))

    def _overdue(self, slot: Slot, generation: int, injection: Injection) -> None:
        end = self.landing_end()
        if end is not None and self.held.get(slot.index) == generation and slot.state == st.READY:
            end.session.overdue(slot)
        if end is not None and end.session.broken:
            self.world.outcomes.end(injection, Reason.from_code(end.session.broken).value)
            self.world.check(self)
        else:
            self.world.outcomes.end(injection, HARMLESS)

    def consume(self, slot: Slot, generation: int, key: Key) -> None:
        """The target verified: commits if it may, then releases."""
        if not self.alive or self.held.get(slot.index) != generation or self.table.slots[slot.index] is not slot:
            return
        if self.holds_back():
            self.world.after(100 * US, partial(self.consume, slot, generation, key))
            return
        if self.book is not None and self.may_commit(slot, generation):
            self.world.watcher.commits(self, slot, key)
            self.commit(slot)
        else:
            self.too_late(slot)
        self.give_back(slot, generation)
        self.settle()
        self.flush()

    def commit(self, slot: Slot) -> None:
        """Verifies what the slot holds and commits it: as a run without any transport does."""
        assert self.book is not None
        book = self.book[slot.request]
        generation, round_number = slot.request_generation, slot.round
        stands = len(book.tokens)
        require(stands == slot.anchor + 1, UNAFFECTED, f"{self.name} commits at {slot.anchor + 1} of {stands}")
        models = self.world.models
        size = 4 if slot.representation == wire.DENSE else 8
        tokens, rows = [], []
        view = memoryview(self.memory)
        words = view[slot.meta_at : slot.meta_at + 8 * slot.depth].cast("i")
        for row in range(slot.depth):
            at = slot.rows_at + row * slot.row_bytes
            tokens.append(words[row])
            rows.append(bytes(view[at : at + words[slot.depth + row] * size]))
        committed = models.verdict(tuple(tokens), tuple(rows), book, generation, round_number)
        expected = models.without_transport(book, generation, round_number, slot.depth)
        if committed != expected:
            what = f"{self.name} request {slot.request} round {round_number}: {committed}, without transport {expected}"
            require(False, UNAFFECTED, what)
        self.world.journal.note(f"{self.world.now} {self.name} commits request {slot.request} round {round_number}: {committed}")
        self.committed(slot, committed)
        book.add(wire.VERIFIED, generation, round_number, slot.depth, committed)

    def give_back(self, slot: Slot, generation: int) -> None:
        """The target is done with a slot."""
        self.held.pop(slot.index, None)
        self.release(slot, generation)

    def dies(self) -> bool:
        """The target process dies; a new one comes after a while. Whether there was one."""
        if not self.target_alive or not self.alive:
            return False
        self.before_death()
        self.target_alive = False
        self.book = None
        for index, generation in list(self.held.items()):
            self.too_late(self.table.slots[index])
            self.give_back(self.table.slots[index], generation)
        self.settle()
        self.flush()
        self.world.after(self.world.random.randint(200 * US, 3 * MS), self.returns)
        return True

    def returns(self) -> None:
        """There is a target process again."""
        self.target_alive = True

    def state(self) -> int:
        """A digest of everything committed."""
        assert self.book is not None
        text = ";".join(f"{number}:{self.book[number].tokens}" for number in sorted(self.book))
        return zlib.crc32(text.encode())

    def agreed_state(self) -> tuple[int, int]:
        """What the engine's hook answers with: all ranks' states made one; or, by a fault, our own as it is."""
        own = self.unequal.pop() if self.unequal and self.book is not None else None
        if own is None:
            reference = self.target.reference()
            if self.book is not reference:
                self.book = {number: book.copy() for number, book in reference.items()}
            return self.state(), 0
        self.world.outcomes.begin(own)
        self.world.outcomes.watch(("agreement", self.target.number), own)
        return self.state(), 0

    # ---- what differs -------------------------------------------------------------------------------------------

    @abstractmethod
    def key(self, slot: Slot) -> Key:
        """The proposal's identity in the group."""

    @abstractmethod
    def may_commit(self, slot: Slot, generation: int) -> bool:
        """Whether the group allows it still."""

    @abstractmethod
    def release(self, slot: Slot, generation: int) -> None:
        """Tells the session, or the table."""

    @abstractmethod
    def before_death(self) -> None:
        """What the daemon does when it loses its target process."""

    def holds_back(self) -> bool:
        """Whether commits wait for an epoch to open."""
        return False

    def committed(self, slot: Slot, tokens: list[int]) -> None:
        """Further consequences of a commit."""

    def too_late(self, slot: Slot) -> None:
        """Those of one that may not be made."""

    def saw_ready(self, slot: Slot) -> None:
        """The proposal is ready here."""

    def saw_void(self, slot: Slot) -> None:
        """It is void here."""

    # ---- fences -------------------------------------------------------------------------------------------------

    def fence(self, end: End) -> None:
        """Fences what the session asks for, at once or late."""
        fences, end.session.fences = end.session.fences, []
        for index in fences:
            if self.late_fences:
                late = self.late_fences.pop()
                self.world.outcomes.begin(late)
                self.world.outcomes.watch(("link", end.wire.number), late)
                self.world.after(self.world.random.randint(0, 2 * MS), partial(self._fence_late, end, index, late))
            else:
                self.confirm(end, index)

    def _fence_late(self, end: End, index: int, late: Injection) -> None:
        if end.alive:
            self.confirm(end, index)
            self.flush()
        if late.outcome is None:
            self.world.outcomes.end(late, HARMLESS)

    def confirm(self, end: End, index: int) -> None:
        """The link fences, then the session hears of it; a new key travels before anything that is sent from now on."""
        end.session.fenced(index, end.link.fence(index))
        landing = end.link.landing
        if landing is not None:
            due = max(self.world.now + 10 * US, end.last_due)
            self.world.after(due - self.world.now, partial(_tell_key, landing, index, landing.keys[index]))


def _tell_key(landing: LandingMemory, index: int, key: int) -> None:
    landing.told[index] = max(landing.told[index], key)
