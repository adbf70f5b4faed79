"""A member's rank: rows come from rank 0, decisions too.

Between the world and `MemberSession`. Plays the member's daemon and its target process. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import Reason
from ..session.group_member import Standing
from .checks import FREE
from .journal import require
from .ranks import Rank

if TYPE_CHECKING:
    from ..session.member import MemberSession
    from ..session.slots import Slot
    from .lanes import End
    from .ranks import Key, Target
    from .world import World


class RankN(Rank):
    """Rank 1, 2 and so on."""

    def __init__(self, world: World, target: Target, rank: int) -> None:
        super().__init__(world, target, rank)

    def start(self) -> None:
        """See `Process.start`."""
        super().start()
        self.member = self.world.machines.member(self.rank, self.target.size)

    def key(self, slot: Slot) -> Key:
        """See `Rank.key`."""
        return (self.member.coordinator, slot.epoch, slot.index, slot.generation, self.target.number)

    @property
    def session(self) -> MemberSession | None:
        """The session with rank 0."""
        end = self.landing_end()
        return None if end is None else end.session

    def may_commit(self, slot: Slot, generation: int) -> bool:
        """See `Rank.may_commit`."""
        return self.member.may_commit(slot.epoch, slot.index, generation)

    def release(self, slot: Slot, generation: int) -> None:
        """See `Rank.release`."""
        if self.session is None:
            self.table.release(slot, generation, self.rank, 0)
        else:
            self.session.release(slot, generation, self.rank, 0)

    def before_death(self) -> None:
        """See `Rank.before_death`."""
        if self.session is not None:
            self.session.leave(Reason.PEER_LOST)

    def saw_void(self, slot: Slot) -> None:
        """See `Rank.saw_void`: by decision, unless its epoch is over for this rank."""
        if self.member.standing is Standing.OPEN and self.member.epoch == slot.epoch:
            self.world.watcher.decided(self, self.key(slot), slot.reason)

    def settle(self) -> None:
        """See `Process.settle`."""
        end = self.landing_end()
        if end is not None:
            self.got(end.session)
            self.fence(end)
            end.session.news.clear()

    def lose(self, end: End, reason: Reason) -> None:
        """See `Process.lose`."""
        super().lose(end, reason)
        self.got(end.session)

    def poll(self) -> None:
        """See `Process.poll`."""
        session = self.session
        if session is None:
            return
        session.tick(self.clock())
        if session.asking and self.target_alive and not self.table.not_free():
            require(session.agree(*self.agreed_state()), FREE, f"{self.name} is asked, holds nothing, and can't agree")
        self.settle()
        self.flush()
