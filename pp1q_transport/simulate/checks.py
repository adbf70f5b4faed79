"""The rules of a run, checked after every event: what a slot may do, what a sampler may see, what ranks may hold and commit.

Between the played processes, which tell what they did, and `journal.Violation`. Looks at sessions and slots, changes nothing.
"""

from __future__ import annotations

import struct
from collections import deque
from typing import TYPE_CHECKING, Final

from .. import wire
from ..session import slots as st
from ..session.group_member import Standing
from .journal import ONE_OUTCOME, Violation, require
from .models import VOCABULARY

if TYPE_CHECKING:
    from ..session.leader import Grant
    from ..session.slots import Slot
    from .lanes import End
    from .members import RankN
    from .parties import Process
    from .ranks import Key, Rank, Target
    from .world import World
    from .zero import RankZero

FENCE: Final = "no reuse before fence"
CHECKED: Final = "no ready before all checks"
ONE_DECISION: Final = "no two ranks with different decisions"
FREE: Final = "every slot returns to FREE"
ONE_KEY: Final = "no RNG key used twice"
UNAFFECTED: Final = "committed tokens unaffected"
ONE_END: Final = "every round ends once"
EPOCHS: Final = "nothing commits across the end of an epoch"
HONEST: Final = "honest peers agree"
NO_ERROR: Final = "no error in the machines"
RULES: Final = (FENCE, CHECKED, ONE_DECISION, FREE, ONE_OUTCOME, ONE_KEY, UNAFFECTED, ONE_END, EPOCHS, HONEST, NO_ERROR)
_REMEMBERED: Final = 4096


class _Seen:
    """What was last seen of one slot: its generation, and the fences and the key of its link just before that was granted."""

    __slots__ = ("end", "fences", "generation", "key", "last_fences", "void")

    def __init__(self) -> None:
        self.generation = 0
        self.end: End | None = None
        self.fences = 0
        self.last_fences = 0  # when an event was over last: a grant and its death may be one event
        self.key = 0
        self.void = False


class Watcher:
    """All the rules of one world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.keys: set[tuple[int, int, int, int, int]] = set()
        self.noise: set[tuple[int, int, int, int, int]] = set()
        self.drawn: dict[tuple[int, int, int, int, int], tuple[int, bytes] | None] = {}
        self.decisions: dict[Key, int] = {}
        self.votes: dict[Key, set[int]] = {}
        self._order: deque[Key] = deque()
        self.ready: dict[tuple[str, int], tuple[int, bytes]] = {}  # (rank's name, slot) -> generation, bytes when it became READY
        self._seen: dict[str, list[_Seen]] = {}

    # ---- keys and rows ------------------------------------------------------------------------------------------

    def drew(self, target: int, grant: Grant, position: int) -> None:
        """The leader draws with the key of a position."""
        key = (target, grant.request, grant.request_generation, grant.round, position)
        if key in self.keys:
            raise Violation(ONE_KEY, f"request {key[1]} generation {key[2]} round {key[3]} position {key[4]} is drawn again")
        self.keys.add(key)

    def sampled(self, target: int, request: int, generation: int, round_number: int, position: int) -> None:
        """Rank 0's target draws with its own domains of a position."""
        key = (target, request, generation, round_number, position)
        if key in self.noise:
            raise Violation(ONE_KEY, f"request {request} generation {generation} round {round_number}: its noise is used again")
        self.noise.add(key)

    def sent_row(self, target: int, grant: Grant, position: int, row: tuple[int, bytes] | None) -> None:
        """The token and bytes that the draft's session was given; None for a row that is no q."""
        self.drawn[target, grant.request, grant.request_generation, grant.round, position] = row

    def forget_request(self, target: int, request: int) -> None:
        """It never comes back."""
        for keys in (self.keys, self.noise):
            keys.difference_update([key for key in keys if key[:2] == (target, request)])
        for key in [key for key in self.drawn if key[:2] == (target, request)]:
            del self.drawn[key]

    # ---- after every event --------------------------------------------------------------------------------------

    def look(self, process: Process) -> None:
        """Every slot of a rank that something happened at."""
        if process.target is None:
            return
        rank: Rank = process  # type: ignore[assignment]
        seen = self._seen.get(rank.name)
        if seen is None:
            seen = self._seen[rank.name] = [_Seen() for _ in rank.table.slots]
        end = rank.landing_end()
        for known, slot in zip(seen, rank.table.slots, strict=True):
            if slot.generation != known.generation:
                self._granted(rank, known, slot)
            elif slot.reason and not slot.decided:
                known.void = True
            known.last_fences = end.link.fences[slot.index] if end is not None else 0
            if slot.state == st.READY:
                self._unchanged(rank, slot)

    def voided(self, rank: Rank, slot: Slot) -> None:
        """A rank hears that a proposal is void; its slot may be granted again within the same event."""
        seen = self._seen.get(rank.name)
        if seen is not None and seen[slot.index].generation == slot.generation:
            seen[slot.index].void = True

    def restarted(self, rank: Rank) -> None:
        """Its slots are new ones."""
        self._seen.pop(rank.name, None)
        for key in [key for key in self.ready if key[0] == rank.name]:
            del self.ready[key]

    def _granted(self, rank: Rank, known: _Seen, slot: Slot) -> None:
        """A generation is granted: nothing of the last one may still be able to land."""
        if slot.generation <= known.generation:
            raise Violation(FENCE, f"{rank.name} slot {slot.index}: generation {slot.generation} after {known.generation}")
        end = rank.landing_end()
        if end is not None:
            landing, memory = end.link.assembler.landing, end.link.landing
            if landing.owner == slot.index and not landing.drain and landing.memory is not None:
                raise Violation(FENCE, f"{rank.name} slot {slot.index}: bytes of generation {known.generation} still land there")
            if known.void and known.end is end and known.fences == end.link.fences[slot.index]:
                raise Violation(FENCE, f"{rank.name} slot {slot.index}: generation {known.generation} died and was never fenced")
            if memory is not None and known.void and known.end is end and memory.keys[slot.index] == known.key:
                raise Violation(FENCE, f"{rank.name} slot {slot.index}: the key of generation {known.generation} is good still")
            same = known.end is end
            known.fences = known.last_fences if same else 0
            known.key = 1 + known.fences if memory is not None else 0
        known.generation, known.end, known.void = slot.generation, end, False

    def _unchanged(self, rank: Rank, slot: Slot) -> None:
        """What is ready stays as it was."""
        kept = self.ready.get((rank.name, slot.index))
        if kept is not None and kept[0] == slot.generation and kept[1] != rank.bytes_of(slot):
            raise Violation(CHECKED, f"{rank.name} slot {slot.index}: bytes changed after they were ready")

    # ---- proposals ----------------------------------------------------------------------------------------------

    def granted(self, rank: Rank, slot: Slot, key: Key) -> None:
        """Rank 0 granted a slot."""
        target = rank.target
        assert target is not None
        target.asked[key] = (slot.request, slot.request_generation, slot.round, slot.anchor, slot.depth)
        self._order.append(key)
        while len(self._order) > _REMEMBERED:
            old = self._order.popleft()
            self.votes.pop(old, None)
            self.decisions.pop(old, None)
            for each in self.world.targets:
                each.asked.pop(old, None)

    def became_ready(self, rank: Rank, slot: Slot, key: Key) -> None:
        """The sampler may look: it must find what was asked for and what was drawn, byte for byte, with every rank's vote."""
        target = rank.target
        assert target is not None
        self.decided(rank, key, 0)
        missing = set(range(1, target.size)) - self.votes.get(key, set())
        if missing:
            raise Violation(CHECKED, f"{rank.name} is READY without the vote of {sorted(missing)}: {key[2:]}")
        held = (slot.request, slot.request_generation, slot.round, slot.anchor, slot.depth)
        if target.asked.get(key) != held:
            raise Violation(CHECKED, f"{rank.name} slot {slot.index} holds {held}, asked was {target.asked.get(key)}")
        for row in range(slot.depth):
            self._check_row(rank, slot, row)
        self.ready[rank.name, slot.index] = (slot.generation, rank.bytes_of(slot))

    def _check_row(self, rank: Rank, slot: Slot, row: int) -> None:
        assert rank.target is not None
        position = slot.anchor + 1 + row
        where = f"{rank.name} slot {slot.index} request {slot.request} round {slot.round} position {position}"
        drawn = self.drawn.get((rank.target.number, slot.request, slot.request_generation, slot.round, position))
        if drawn is None:
            raise Violation(CHECKED, f"{where}: ready with a row that no draft drew")
        token, payload = drawn
        entries = len(payload) // (4 if slot.representation == wire.DENSE else 8)
        found = struct.unpack_from("<i", rank.memory, slot.meta_at + 4 * row)[0]
        count = struct.unpack_from("<I", rank.memory, slot.meta_at + 4 * (slot.depth + row))[0]
        at = slot.rows_at + row * slot.row_bytes
        if found != token or count != entries or rank.memory[at : at + len(payload)] != payload:
            raise Violation(CHECKED, f"{where}: token {found}, {count} entries; drawn were {token} and {entries}, or q differs")
        if slot.representation == wire.DENSE and entries != VOCABULARY:
            raise Violation(CHECKED, f"{where}: a dense row of {entries} entries")

    def decided(self, rank: Rank, key: Key, code: int) -> None:
        """A rank holds a decision."""
        known = self.decisions.setdefault(key, code)
        if known != code:
            raise Violation(ONE_DECISION, f"{rank.name} holds decision {code} on {key[1:]}, another rank {known}")

    def voted(self, key: Key, rank: int) -> None:
        """A member's ready vote goes out."""
        self.votes.setdefault(key, set()).add(rank)

    def commits(self, rank: Rank, slot: Slot, key: Key) -> None:
        """A rank commits what it reads."""
        target = rank.target
        assert target is not None
        self._unchanged(rank, slot)
        require(self.decisions.get(key) == 0, ONE_DECISION, f"{rank.name} commits {key[1:]}, which was not decided READY")
        if target.size == 1:
            return
        require(key[:2] == target.current, EPOCHS, f"{rank.name} commits {key[1:]}: epoch {target.current[1]} is open")
        zero: RankZero = target.zero
        if rank is zero:
            still = zero.group is not None and zero.group.coordinator.open and zero.group.epoch == key[1]
        else:
            member: RankN = rank  # type: ignore[assignment]
            still = member.member.epoch == key[1] and member.member.standing is Standing.OPEN
        require(still, EPOCHS, f"{rank.name} commits {key[1:]} too late")

    def opened(self, target: Target) -> None:
        """An epoch opened: every rank must have the same committed tokens."""
        digests = {rank.name: rank.state() for rank in target.ranks if rank.alive and rank.target_alive and rank.book is not None}
        require(len(set(digests.values())) <= 1, UNAFFECTED, f"an epoch opened over different states: {digests}")
