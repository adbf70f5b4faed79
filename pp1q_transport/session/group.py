"""The rank group's decisions and epochs at rank 0: the `Coordinator`, a pure state machine. Its other half is `group_member`.

Between `hub`, which turns its answers into frames and slot moves, and nothing else: no I/O, no clock, no memory, no frames.
Rank 0's process owns exactly one in its life; it outlives links and sessions. SPEC section 4, DESIGN 2.7.

**Identity.** An epoch is (coordinator's boot nonce, u32 counted from 1). A proposal is (epoch, slot, slot_generation). A decision
is a code: `READY` (0), or the code of the `Reason` for which the proposal is void on every rank.

**Epochs.** All ranks up -> the coordinator asks all (`Announce(ASKING)`); each rank answers with the digest of its committed
state; all equal -> `Announce(OPEN)`; unequal -> `RANK_DISAGREE` is counted and the next epoch asks anew. Any rank's death (link
lost, process gone) ends the epoch: what is undecided is void (`Lost`, peer_lost), what is READY can't be committed any more.
An agreement also says that its rank holds no slot of an earlier epoch, so nothing can commit once the next one is open.

**Decisions.** READY takes the vote of every rank; the first failure decides otherwise. Only the coordinator decides. A rank that
voted ready waits for the decision or the epoch's end, and for nothing else.

An input that a peer may never give raises `PeerFault` and changes nothing; a repeated one changes nothing; one that crossed
the end of its epoch on the way is dropped and counted in `stale`. Local misuse raises `LocalMisuse`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Final

from ..errors import LocalMisuse, PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Callable

MAX_RANKS: Final = 8
READY: Final = 0
U32_MAX: Final = 0xFFFFFFFF
_PEER_LOST: Final = Reason.PEER_LOST.code

Digest = tuple[int, int]  # 128 bits of a rank's committed state, (low, high); opaque here


class Phase(IntEnum):
    """Where an epoch stands at the coordinator; the numbers travel in EPOCH frames."""

    GATHERING = 1
    """Not every rank is up. Announced, it says that the epochs before it are over."""
    ASKING = 2
    """Every rank is up and is asked for the digest of its committed state."""
    OPEN = 3
    """All digests were equal: slots may be granted."""


class Turn(Enum):
    """What moves the coordinator's epoch."""

    ALL_UP = "all up"
    ALL_EQUAL = "all equal"
    DIFFERENT = "different"
    DEATH = "death"


# (phase, turn) -> (next phase, whether the epoch ends and its number rises). What is missing can't happen.
EPOCH_TRANSITIONS: Final[dict[tuple[Phase, Turn], tuple[Phase, bool]]] = {
    (Phase.GATHERING, Turn.ALL_UP): (Phase.ASKING, False),
    (Phase.GATHERING, Turn.DEATH): (Phase.GATHERING, False),  # nothing had begun
    (Phase.ASKING, Turn.ALL_EQUAL): (Phase.OPEN, False),
    (Phase.ASKING, Turn.DIFFERENT): (Phase.ASKING, True),
    (Phase.ASKING, Turn.DEATH): (Phase.GATHERING, True),
    (Phase.OPEN, Turn.DEATH): (Phase.GATHERING, True),
}


class Fate(Enum):
    """Where one proposal stands at the coordinator."""

    VOTING = "voting"
    READY = "ready"
    DISCARDED = "discarded"
    VOID = "void"  # READY, but its epoch ended: it can't be committed
    CLOSED = "closed"  # no rank holds its slot any more


class Event(Enum):
    """What moves a proposal at the coordinator."""

    ALL_READY = "all ready"
    FAILURE = "failure"
    EPOCH_END = "epoch end"
    ALL_RELEASED = "all released"


PROPOSAL_TRANSITIONS: Final[dict[tuple[Fate, Event], Fate]] = {
    (Fate.VOTING, Event.ALL_READY): Fate.READY,
    (Fate.VOTING, Event.FAILURE): Fate.DISCARDED,
    (Fate.VOTING, Event.EPOCH_END): Fate.DISCARDED,
    (Fate.READY, Event.EPOCH_END): Fate.VOID,
    (Fate.READY, Event.ALL_RELEASED): Fate.CLOSED,
    (Fate.VOID, Event.ALL_RELEASED): Fate.CLOSED,
    (Fate.DISCARDED, Event.ALL_RELEASED): Fate.CLOSED,
}


@dataclass(frozen=True, slots=True)
class Announce:
    """EPOCH to every rank that is up."""

    epoch: int
    phase: Phase


@dataclass(frozen=True, slots=True)
class Decide:
    """The decision of one proposal: DECIDE to every rank that is up, and to rank 0's own session."""

    epoch: int
    slot: int
    generation: int
    code: int


@dataclass(frozen=True, slots=True)
class Lost:
    """The epoch of an undecided proposal ended: rank 0's own session discards it (peer_lost). No frame: EPOCH says so."""

    epoch: int
    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Freed:
    """No member holds the slot any more."""

    slot: int
    generation: int


@dataclass(frozen=True, slots=True)
class Disagreed:
    """The ranks' committed states differ in this epoch, by rank: to be counted and logged (rank_disagree)."""

    epoch: int
    digests: tuple[Digest, ...]


Action = Announce | Decide | Lost | Freed | Disagreed


@dataclass(slots=True)
class Proposal:
    """One grant at the coordinator: votes by rank (code), and a bit for every member that holds the slot."""

    epoch: int
    slot: int
    generation: int
    holders: int
    fate: Fate = Fate.VOTING
    code: int = READY
    votes: dict[int, int] = field(default_factory=dict)

    def move(self, event: Event) -> None:
        """Applies one event of `PROPOSAL_TRANSITIONS`; an illegal one raises `LocalMisuse` and changes nothing."""
        after = PROPOSAL_TRANSITIONS.get((self.fate, event))
        if after is None:
            raise LocalMisuse(f"slot {self.slot}: {event.value} is illegal for a proposal that is {self.fate.value}")
        self.fate = after


def check_size(size: int) -> int:
    """`size`, when a group of so many ranks can be; raises `LocalMisuse`. A group of one needs no machine."""
    if not 2 <= size <= MAX_RANKS:
        raise LocalMisuse(f"a rank group has 2..{MAX_RANKS} ranks, not {size}")
    return size


class Coordinator:
    """Rank 0's machine: epochs, votes, the decision, and who still holds a slot. Every input returns the actions it causes,
    in the order in which they must be carried out."""

    def __init__(self, size: int) -> None:
        self.size = check_size(size)
        self.epoch = 1
        self.phase = Phase.GATHERING
        self.up: set[int] = {0}
        self.floor = 0
        """The highest slot_generation that any rank has seen; grants go beyond it. Rises only when an epoch opens."""
        self.stale = 0
        self.disagreements = 0
        self.proposals: dict[int, Proposal] = {}  # by slot: the latest of each
        self.verdict: Callable[[int, int], int] = lambda _slot, _generation: READY
        """Asked once every rank has voted ready: `READY`, or why their rows do not go together (vocabulary shards)."""
        self._digests: dict[int, Digest] = {}
        self._floors: dict[int, int] = {}

    @property
    def open(self) -> bool:
        """Whether slots may be granted."""
        return self.phase is Phase.OPEN

    @property
    def asking(self) -> bool:
        """Whether rank 0's own committed state is asked for (`agreed(0, ...)`)."""
        return self.phase is Phase.ASKING and 0 not in self._digests

    @property
    def answers(self) -> dict[int, tuple[Digest, int]]:
        """(committed state, floor) of the ranks that have answered in this epoch."""
        return {rank: (digest, self._floors[rank]) for rank, digest in self._digests.items()}

    # ---- epochs -------------------------------------------------------------------------------------------------

    def member_up(self, rank: int) -> list[Action]:
        """A member's link is up. A rank that was up already is taken for dead first."""
        self._check_member(rank)
        actions = self.member_down(rank) if rank in self.up else []
        self.up.add(rank)
        return actions + self._gather()

    def member_down(self, rank: int) -> list[Action]:
        """A member's link is lost: its epoch ends, and it holds nothing any more (its own memory is its own affair)."""
        self._check_member(rank)
        if rank not in self.up:
            return []
        self.up.discard(rank)
        return self._death(rank) + self._gather()

    def left(self, rank: int, epoch: int) -> list[Action]:
        """A rank (0 too) says that its target process is gone; its link is not. The next epoch asks it anew."""
        self._check_rank(rank)
        if epoch < self.epoch:
            self.stale += 1
            return []
        if epoch > self.epoch or self.phase is Phase.GATHERING:
            raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} left epoch {epoch}, which never was asked for")
        if self.phase is Phase.ASKING and rank not in self._digests:
            return []  # it had not agreed yet: we go on waiting for that
        return self._death(None) + self._gather()

    def agreed(self, rank: int, epoch: int, digest: Digest, floor: int = 0) -> list[Action]:
        """A rank's committed state. `floor`: the highest slot_generation it has seen. It holds no slot of an earlier epoch."""
        self._check_rank(rank)
        if epoch < self.epoch:
            self.stale += 1
            return []
        if epoch > self.epoch or self.phase is Phase.GATHERING:
            raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} agrees on epoch {epoch}, which never was asked for")
        known = self._digests.get(rank)
        if known is not None:
            if known != digest:
                raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} states two committed states in epoch {epoch}")
            return []
        self._digests[rank] = digest
        self._floors[rank] = floor
        actions = self._drop(rank)
        if len(self._digests) < self.size:
            return actions
        if len(set(self._digests.values())) == 1:
            self.floor = max(self.floor, *self._floors.values())
            self._turn(Turn.ALL_EQUAL)
            return [*actions, Announce(self.epoch, self.phase)]
        self.disagreements += 1
        actions.append(Disagreed(self.epoch, tuple(self._digests[at] for at in range(self.size))))
        self._turn(Turn.DIFFERENT)
        return [*actions, Announce(self.epoch, self.phase)]

    def _gather(self) -> list[Action]:
        if self.phase is not Phase.GATHERING or len(self.up) < self.size:
            return []
        self._turn(Turn.ALL_UP)
        return [Announce(self.epoch, self.phase)]

    def _death(self, rank: int | None) -> list[Action]:
        """Ends the epoch. `rank` lost its link; None: one whose link lives, so that it still gives its slots back."""
        before = self.epoch
        self._turn(Turn.DEATH)
        actions: list[Action] = []
        for proposal in self.proposals.values():
            if proposal.fate is Fate.VOTING:
                proposal.code = _PEER_LOST
                proposal.move(Event.EPOCH_END)
                actions.append(Lost(proposal.epoch, proposal.slot, proposal.generation))
            elif proposal.fate is Fate.READY:
                proposal.move(Event.EPOCH_END)
        if rank is not None:
            actions += self._drop(rank)
        if self.epoch != before and len(self.up) < self.size:
            actions.append(Announce(self.epoch, self.phase))
        return actions

    def _turn(self, turn: Turn) -> None:
        after, ends = EPOCH_TRANSITIONS[self.phase, turn]
        if ends:
            if self.epoch >= U32_MAX:
                raise PeerFault(Reason.GENERATION_EXHAUSTED, "epoch")
            self.epoch += 1
        self.phase = after
        if self.phase is not Phase.OPEN:
            self._digests.clear()
            self._floors.clear()

    # ---- proposals ----------------------------------------------------------------------------------------------

    def granted(self, slot: int, generation: int) -> None:
        """Rank 0 granted a slot. Raises `LocalMisuse` outside an open epoch, and for a slot that a rank still holds."""
        if not self.open:
            raise LocalMisuse(f"no grant in epoch {self.epoch}, which is {self.phase.name.lower()}")
        last = self.proposals.get(slot)
        if last is not None and (last.fate is not Fate.CLOSED or generation <= last.generation):
            raise LocalMisuse(f"slot {slot} generation {generation} while {last.generation} is {last.fate.value}")
        holders = sum(1 << rank for rank in range(1, self.size))
        self.proposals[slot] = Proposal(self.epoch, slot, generation, holders)

    def vote(self, rank: int, epoch: int, slot: int, generation: int, code: int) -> list[Action]:
        """A rank's word on one proposal: `READY`, or why it can't be. Rank 0 votes too."""
        self._check_rank(rank)
        if epoch < self.epoch:
            self.stale += 1
            return []
        if epoch > self.epoch:
            raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} votes in epoch {epoch}, this is {self.epoch}")
        proposal = self._known(slot, generation)
        if rank and not proposal.holders >> rank & 1:
            raise PeerFault(Reason.SLOT_STATE, f"rank {rank} votes on slot {slot}, which it gave back")
        if rank in proposal.votes:
            if proposal.votes[rank] != code:
                raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} votes twice on slot {slot} generation {generation}")
            return []
        proposal.votes[rank] = code
        if code != READY:
            return self.fail(slot, generation, code)
        return self._decide_if_all_ready(proposal)

    def _decide_if_all_ready(self, proposal: Proposal) -> list[Action]:
        if proposal.fate is not Fate.VOTING or any(proposal.votes.get(rank) != READY for rank in range(self.size)):
            return []
        code = self.verdict(proposal.slot, proposal.generation)
        if code != READY:
            return self.fail(proposal.slot, proposal.generation, code)
        proposal.move(Event.ALL_READY)
        return [Decide(proposal.epoch, proposal.slot, proposal.generation, READY)]

    def fail(self, slot: int, generation: int, code: int) -> list[Action]:
        """A failure seen at rank 0 (its own rows, the budget, a cancellation), after its own ready vote too. Decides, unless
        it is decided already."""
        proposal = self.proposals.get(slot)
        if proposal is None or proposal.generation != generation:
            raise LocalMisuse(f"slot {slot} generation {generation} was not granted")
        if proposal.fate is not Fate.VOTING:
            return []
        proposal.code = code
        proposal.move(Event.FAILURE)
        return [Decide(proposal.epoch, slot, generation, code)]

    def released(self, rank: int, epoch: int, slot: int, generation: int) -> list[Action]:
        """A member's slot is free again: its consumers are done and nothing lands there. Repeats change nothing."""
        self._check_member(rank)
        proposal = self.proposals.get(slot)
        if proposal is None or proposal.generation != generation or proposal.epoch != epoch:
            if epoch < self.epoch:
                self.stale += 1
                return []
            raise PeerFault(Reason.SLOT_STATE, f"rank {rank} gives back slot {slot} generation {generation}, never granted")
        if proposal.fate is Fate.VOTING:
            raise PeerFault(Reason.SLOT_STATE, f"rank {rank} gives back slot {slot}, which is not decided")
        return self._release(proposal, rank)

    def _release(self, proposal: Proposal, rank: int) -> list[Action]:
        if proposal.fate is Fate.CLOSED or not proposal.holders >> rank & 1:
            return []
        proposal.holders &= ~(1 << rank)
        if proposal.holders:
            return []
        proposal.move(Event.ALL_RELEASED)
        return [Freed(proposal.slot, proposal.generation)]

    def _drop(self, rank: int) -> list[Action]:
        """The rank holds nothing of an ended epoch any more."""
        freed: list[Action] = []
        for proposal in self.proposals.values():
            if proposal.fate is not Fate.VOTING:
                freed += self._release(proposal, rank)
        return freed

    def may_commit(self, epoch: int, slot: int, generation: int) -> bool:
        """Whether the proposal was decided READY in the epoch that is open now."""
        proposal = self.proposals.get(slot)
        return (
            self.open
            and proposal is not None
            and proposal.generation == generation
            and epoch == proposal.epoch == self.epoch
            and proposal.code == READY
            and proposal.fate in (Fate.READY, Fate.CLOSED)
        )

    def waiting(self, rank: int) -> int:
        """How many decided slots this member still holds: for the caller's patience with it, and its metrics."""
        decided = (proposal for proposal in self.proposals.values() if proposal.fate is not Fate.VOTING)
        return sum(proposal.holders >> rank & 1 for proposal in decided)

    def _known(self, slot: int, generation: int) -> Proposal:
        proposal = self.proposals.get(slot)
        if proposal is None or proposal.generation != generation or proposal.epoch != self.epoch:
            raise PeerFault(Reason.SLOT_STATE, f"slot {slot} generation {generation} was not granted in epoch {self.epoch}")
        return proposal

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.size:
            raise LocalMisuse(f"rank {rank} is outside 0..{self.size - 1}")

    def _check_member(self, rank: int) -> None:
        if not 1 <= rank < self.size:
            raise LocalMisuse(f"rank {rank} is outside 1..{self.size - 1}")
