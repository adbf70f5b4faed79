"""Guards taken out, one at a time: what the simulator must notice, or its silence would mean nothing.

Between `pp1q simulate --plant` and the tests. Each plant puts a weaker part into a run and names the rules that may catch it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from .._native.kernels import xxh3_64
from ..errors import ConfigError
from ..session import slots as st
from ..session.group import Coordinator
from ..session.group_member import Member
from ..session.hub import RankGroup
from ..session.member import MemberSession
from ..session.receiver import ReceiverSession
from ..session.requests import RequestTable
from .checks import CHECKED, EPOCHS, FENCE, FREE, ONE_DECISION, ONE_KEY, UNAFFECTED
from .members import RankN
from .parties import LeaderParty
from .world import Machines
from .zero import RankZero

if TYPE_CHECKING:
    from ..session.group import Action
    from ..session.slots import Slot
    from ..wire import Header
    from .lanes import End

_LOST_EVERY: Final = 20


class UnfencedZero(RankZero):
    """Says that it fenced, and does not."""

    def confirm(self, end: End, index: int) -> None:
        """See `Rank.confirm`."""
        end.session.fenced(index, False)


class UnfencedMember(RankN):
    """The same at a member."""

    def confirm(self, end: End, index: int) -> None:
        """See `Rank.confirm`."""
        end.session.fenced(index, False)


class LoneSession(MemberSession):
    """A member that takes its own ready vote for the decision."""

    def completed(self, slot: Slot, now_ns: int) -> None:
        """See `LandingSession.completed`."""
        super().completed(slot, now_ns)
        self.make_ready(slot, now_ns)


class StubbornSession(MemberSession):
    """A member that keeps to its own mind when the decision is against it."""

    def _void(self, paper: object, code: int) -> None:
        slot = self.table.slots[paper.slot]  # type: ignore[attr-defined]
        if slot.state == st.VOTED:
            self.make_ready(slot, 0)
        else:
            super()._void(paper, code)  # type: ignore[arg-type]


class CredulousSession(ReceiverSession):
    """Takes whatever digest there is for the right one."""

    def finish_row(self, header: Header, now_ns: int) -> None:
        """See `LandingSession.finish_row`."""
        slot = self.table.slots[header.slot]
        at = slot.rows_at + (header.position - slot.anchor - 1) * slot.row_bytes
        seed = header.payload_seed(self.terms.leader_nonce)
        header.payload_digest = xxh3_64(self.memory, at, header.payload_length, seed)
        super().finish_row(header, now_ns)

    def finish_proposal(self, header: Header, now_ns: int) -> None:
        """See `LandingSession.finish_proposal`."""
        slot = self.table.slots[header.slot]
        header.reply_digest = xxh3_64(slot.digests, 0, slot.depth * 16, 0)
        super().finish_proposal(header, now_ns)


class HastySession(ReceiverSession):
    """Takes a proposal for whole when its last row but one is there."""

    def finish_row(self, header: Header, now_ns: int) -> None:
        """See `LandingSession.finish_row`."""
        super().finish_row(header, now_ns)
        slot = self.table.slots[header.slot]
        if slot.state == st.LANDING and slot.depth > 1 and slot.rows_done == (1 << slot.depth - 1) - 1:
            self.completed(slot, now_ns)


class ForgetfulLeader(LeaderParty):
    """Forgets with every request which keys it has used."""

    def table(self, target: int) -> RequestTable:
        """See `LeaderParty.table`."""
        return self.tables.setdefault(target, RequestTable(remembered=0))


class KeepingZero(RankZero):
    """Forgets now and then to give a slot back."""

    def release(self, slot: Slot, generation: int) -> None:
        """See `Rank.release`."""
        if generation % _LOST_EVERY:
            super().release(slot, generation)


class ScribblingZero(RankZero):
    """Its peers can write where its sampler reads."""

    def saw_ready(self, slot: Slot) -> None:
        """See `Rank.saw_ready`."""
        super().saw_ready(slot)
        if slot.generation % _LOST_EVERY == 0:
            at = slot.rows_at
            self.world.after(5_000, lambda: self.memory.__setitem__(at, self.memory[at] ^ 1))


class SilentZero(RankZero):
    """Tells no other rank what its target sampled alone."""

    def _go_alone(self, receiver: ReceiverSession, request: object) -> None:
        others = [(member, member.book) for member in self.target.members]
        for member, _book in others:
            member.book = None
        super()._go_alone(receiver, request)  # type: ignore[arg-type]
        for member, book in others:
            member.book = book


class BlindCoordinator(Coordinator):
    """Opens an epoch whatever the ranks' states are."""

    def agreed(self, rank: int, epoch: int, digest: tuple[int, int], floor: int = 0) -> list[Action]:
        """See `Coordinator.agreed`."""
        return super().agreed(rank, epoch, (0, 0), floor)


class LateMember(Member):
    """Commits what was READY, whatever became of its epoch."""

    def may_commit(self, epoch: int, slot: int, generation: int) -> bool:
        """See `Member.may_commit`."""
        return True


class LateGroup(RankGroup):
    """The same at rank 0."""

    def may_commit(self, slot: int, generation: int, epoch: int) -> bool:
        """See `RankGroup.may_commit`."""
        return True

    def check_commit(self, request: int, round: int) -> None:
        """Never refuses."""


@dataclass(frozen=True)
class Plant:
    """What is put in, and the rules that may notice it first."""

    what: str
    machines: Machines
    rules: tuple[str, ...]


PLANTS: Final[dict[str, Plant]] = {
    "no-fence": Plant("fences are confirmed, not done", Machines(zero=UnfencedZero, rank=UnfencedMember), (FENCE,)),
    "ranks-alone": Plant("a member decides by its own vote", Machines(member_session=LoneSession), (CHECKED, ONE_DECISION)),
    "deaf-member": Plant("a member ignores a decision", Machines(member_session=StubbornSession), (ONE_DECISION, CHECKED)),
    "no-digest": Plant("payload digests are not looked at", Machines(receiver_session=CredulousSession), (CHECKED,)),
    "early-ready": Plant("ready before the last row", Machines(receiver_session=HastySession), (CHECKED,)),
    "scribbled": Plant("a peer can write what is ready", Machines(zero=ScribblingZero), (CHECKED, UNAFFECTED)),
    "key-reuse": Plant(
        "a target starts requests again under old keys", Machines(leader=ForgetfulLeader, remembers=False), (ONE_KEY,)
    ),
    "kept-slot": Plant("a slot is not given back", Machines(zero=KeepingZero), (FREE,)),
    "silent-rank-0": Plant("ranks don't go on in step", Machines(zero=SilentZero), (UNAFFECTED,)),
    "blind-epoch": Plant("epochs open over unequal states", Machines(coordinator=BlindCoordinator), (UNAFFECTED,)),
    "late-commit": Plant("commits across an epoch's end", Machines(member=LateMember, group=LateGroup), (EPOCHS, ONE_DECISION)),
}


def plant(name: str) -> Plant:
    """The plant of that name; raises `ConfigError` for another."""
    if name not in PLANTS:
        raise ConfigError(f"plant {name!r} is none of {', '.join(PLANTS)}")
    return PLANTS[name]
