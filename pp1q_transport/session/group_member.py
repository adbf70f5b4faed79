"""A member's half of the rank group: the `Member`, a pure state machine that votes, is told, and never decides.

Between `member`, which turns frames into its inputs and its answers into frames, and nothing else: no I/O, no clock, no memory.
A process owns exactly one in its life; it outlives links, and so knows which epochs are over. The rules are told in `group`.

`PeerFault` from an input means that rank 0 broke them: nothing changed, the link ends (and with it the epoch).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Final

from ..errors import LocalMisuse, PeerFault, Reason
from .group import READY, Phase, check_size


class Standing(Enum):
    """Where a member stands in its epoch."""

    OUT = "out"  # no link, or not every rank is up
    ASKED = "asked"  # rank 0 asks for the digest of our committed state
    AGREED = "agreed"  # it has it
    OPEN = "open"  # slots may be granted and proposals committed
    LEFT = "left"  # our target process is gone: the epoch is over for us, rank 0 does not know yet


class Sign(Enum):
    """What moves a member's standing."""

    GATHERING = "gathering"  # EPOCH frames, by phase
    ASKING = "asking"
    OPEN = "open"
    AGREE = "agree"  # our own doing
    LEAVE = "leave"
    DOWN = "down"  # the link is lost


_SIGNS: Final = {Phase.GATHERING: Sign.GATHERING, Phase.ASKING: Sign.ASKING, Phase.OPEN: Sign.OPEN}

# What is missing is illegal: a fault of rank 0 for a frame, local misuse for our own doing.
STANDINGS: Final[dict[tuple[Standing, Sign], Standing]] = (
    {(standing, Sign.GATHERING): Standing.OUT for standing in Standing}
    | {(standing, Sign.ASKING): Standing.ASKED for standing in Standing}
    | {(standing, Sign.DOWN): Standing.OUT for standing in Standing}
    | {
        (Standing.ASKED, Sign.AGREE): Standing.AGREED,
        (Standing.AGREED, Sign.OPEN): Standing.OPEN,
        (Standing.AGREED, Sign.LEAVE): Standing.LEFT,
        (Standing.OPEN, Sign.LEAVE): Standing.LEFT,
        (Standing.LEFT, Sign.OPEN): Standing.LEFT,  # it crossed our LEAVE
    }
)


class Ballot(Enum):
    """Where one proposal stands at a member."""

    GRANTED = "granted"
    WAITING = "waiting"  # voted ready: nothing but the decision or the epoch's end is of any effect
    REFUSED = "refused"  # voted a reason
    READY = "ready"
    DISCARDED = "discarded"
    LOST = "lost"  # the epoch ended first, or after READY: it can't be committed


class Mark(Enum):
    """What moves a proposal at a member."""

    VOTE_READY = "vote ready"
    VOTE_NO = "vote no"
    DECIDED_READY = "decided ready"
    DECIDED_NO = "decided no"
    EPOCH_END = "epoch end"


BALLOTS: Final[dict[tuple[Ballot, Mark], Ballot]] = {
    (Ballot.GRANTED, Mark.VOTE_READY): Ballot.WAITING,
    (Ballot.GRANTED, Mark.VOTE_NO): Ballot.REFUSED,
    (Ballot.GRANTED, Mark.DECIDED_NO): Ballot.DISCARDED,
    (Ballot.GRANTED, Mark.EPOCH_END): Ballot.LOST,
    (Ballot.WAITING, Mark.DECIDED_READY): Ballot.READY,
    (Ballot.WAITING, Mark.DECIDED_NO): Ballot.DISCARDED,
    (Ballot.WAITING, Mark.EPOCH_END): Ballot.LOST,
    (Ballot.REFUSED, Mark.DECIDED_NO): Ballot.DISCARDED,
    (Ballot.REFUSED, Mark.EPOCH_END): Ballot.LOST,
    (Ballot.READY, Mark.EPOCH_END): Ballot.LOST,
    (Ballot.DISCARDED, Mark.EPOCH_END): Ballot.DISCARDED,
    (Ballot.LOST, Mark.EPOCH_END): Ballot.LOST,
}
UNDECIDED: Final = frozenset({Ballot.GRANTED, Ballot.WAITING, Ballot.REFUSED})


@dataclass(slots=True)
class Paper:
    """One grant as a member holds it. `returned`: RELEASED was sent, or needs not be (its link is gone)."""

    epoch: int
    slot: int
    generation: int
    ballot: Ballot = Ballot.GRANTED
    code: int = READY
    returned: bool = False

    def allows(self, mark: Mark) -> bool:
        """Whether the table lists `mark` here."""
        return (self.ballot, mark) in BALLOTS

    def move(self, mark: Mark) -> None:
        """Applies one event of `BALLOTS`; an illegal one raises `LocalMisuse` and changes nothing."""
        after = BALLOTS.get((self.ballot, mark))
        if after is None:
            raise LocalMisuse(f"slot {self.slot}: {mark.value} is illegal for a proposal that is {self.ballot.value}")
        self.ballot = after


class Member:
    """The machine of one rank 1..size-1. `epoch` is 0 before any was announced by the present life of rank 0."""

    def __init__(self, rank: int, size: int) -> None:
        check_size(size)
        if not 1 <= rank < size:
            raise LocalMisuse(f"rank {rank} is outside 1..{size - 1}")
        self.rank = rank
        self.size = size
        self.coordinator = 0
        self.epoch = 0
        self.least = 1
        """The lowest epoch that may still be announced: one that we lost the link in is over."""
        self.standing = Standing.OUT
        self.up = False
        self.papers: dict[int, Paper] = {}  # by slot: the latest of each

    @property
    def open(self) -> bool:
        """Whether the epoch is open for this rank."""
        return self.standing is Standing.OPEN

    @property
    def asked(self) -> bool:
        """Whether rank 0 waits for our digest."""
        return self.standing is Standing.ASKED

    # ---- links and epochs ---------------------------------------------------------------------------------------

    def link_up(self, coordinator: int) -> None:
        """A link to rank 0 is up. `coordinator`: its boot nonce; epochs of another life of rank 0 mean nothing any more."""
        if self.up:
            raise LocalMisuse("the last link to rank 0 is up still")
        if coordinator != self.coordinator:
            self.coordinator = coordinator
            self.epoch = 0
            self.least = 1
        self.up = True

    def link_down(self) -> list[Paper]:
        """The link is lost: the epoch is over. Returns the proposals that are void by this, to be discarded (peer_lost)."""
        self.up = False
        if self.standing is not Standing.OUT:
            self.least = self.epoch + 1
        self.standing = STANDINGS[self.standing, Sign.DOWN]
        lost = self._end_epoch()
        for paper in self.papers.values():
            paper.returned = True
        return lost

    def announced(self, epoch: int, phase: int) -> list[Paper]:
        """An EPOCH frame. Returns the proposals of the epoch that it ends, to be discarded (peer_lost)."""
        if not Phase.GATHERING <= phase <= Phase.OPEN:
            raise PeerFault(Reason.RESERVED_BITS, f"phase {phase} of an epoch")
        if epoch < max(self.least, self.epoch):
            raise PeerFault(Reason.GENERATION_STALE, f"epoch {epoch} is over, or was never")
        sign = _SIGNS[Phase(phase)]
        after = STANDINGS.get((self.standing, sign))
        # The same epoch once more: only forward, from gathering to asking to open.
        fresh = epoch > self.epoch
        if after is None or (fresh and sign is Sign.OPEN) or (not fresh and not self._goes_on(sign)):
            raise PeerFault(Reason.RANK_DISAGREE, f"epoch {epoch} is {sign.value}, we are {self.standing.value} in {self.epoch}")
        lost = self._end_epoch() if fresh else []
        self.epoch = epoch
        self.standing = after
        return lost

    def _goes_on(self, sign: Sign) -> bool:
        return sign is Sign.OPEN or (sign is Sign.ASKING and self.standing is Standing.OUT)

    def agree(self) -> int:
        """We answer with our digest; returns the epoch. `LocalMisuse` when nobody asks."""
        self._own(Sign.AGREE)
        return self.epoch

    def leave(self) -> list[Paper] | None:
        """Our target process is gone. None when rank 0 need not hear of it; else what is void by it, and LEAVE must be sent."""
        if (self.standing, Sign.LEAVE) not in STANDINGS:
            return None
        self._own(Sign.LEAVE)
        return self._end_epoch()

    def _own(self, sign: Sign) -> None:
        after = STANDINGS.get((self.standing, sign))
        if after is None:
            raise LocalMisuse(f"can't {sign.value} while {self.standing.value}")
        self.standing = after

    def _end_epoch(self) -> list[Paper]:
        lost = [paper for paper in self.papers.values() if paper.ballot in UNDECIDED]
        for paper in self.papers.values():
            paper.move(Mark.EPOCH_END)
        return lost

    # ---- proposals ----------------------------------------------------------------------------------------------

    def granted(self, epoch: int, slot: int, generation: int) -> bool:
        """A GRANT. False: it crossed our LEAVE, so the slot is to be taken and discarded at once."""
        if self.standing is not Standing.OPEN and self.standing is not Standing.LEFT:
            raise PeerFault(Reason.SLOT_STATE, f"a grant while {self.standing.value}")
        self._check_epoch(epoch)
        last = self.papers.get(slot)
        if last is not None and (last.ballot in UNDECIDED or not last.returned):
            raise PeerFault(Reason.SLOT_STATE, f"slot {slot} is granted while its generation {last.generation} is in use")
        if last is not None and generation <= last.generation:
            raise PeerFault(Reason.GENERATION_STALE, f"slot {slot}: generation {generation} after {last.generation}")
        paper = self.papers[slot] = Paper(epoch, slot, generation)
        if self.standing is Standing.LEFT:
            paper.move(Mark.EPOCH_END)
            return False
        return True

    def vote(self, slot: int, generation: int, code: int) -> int:
        """Our word on a proposal: `READY`, or why not. Returns the epoch to vote in; 0 when it is decided or voted on already."""
        paper = self.papers.get(slot)
        mark = Mark.VOTE_READY if code == READY else Mark.VOTE_NO
        if paper is None or paper.generation != generation or not paper.allows(mark):
            return 0
        paper.move(mark)
        return paper.epoch

    def decided(self, epoch: int, slot: int, generation: int, code: int) -> bool:
        """A DECIDE. True when it settles the proposal now; False for a repeat, or one that crossed our LEAVE."""
        self._check_epoch(epoch)
        paper = self.papers.get(slot)
        if paper is None or paper.generation != generation or paper.epoch != epoch:
            raise PeerFault(Reason.SLOT_STATE, f"a decision on slot {slot} generation {generation}, never granted")
        if paper.ballot is Ballot.LOST:
            return False
        if paper.ballot not in UNDECIDED:
            if paper.code != code:
                raise PeerFault(Reason.RANK_DISAGREE, f"two decisions on slot {slot} generation {generation}")
            return False
        mark = Mark.DECIDED_READY if code == READY else Mark.DECIDED_NO
        if not paper.allows(mark):
            raise PeerFault(Reason.RANK_DISAGREE, f"slot {slot} generation {generation} is ready without our vote")
        paper.move(mark)
        paper.code = code
        return True

    def returns(self, slot: int, generation: int) -> int:
        """Our slot is free again. Returns the epoch to state in RELEASED; 0 when rank 0 need not hear of it (again)."""
        paper = self.papers.get(slot)
        if paper is None or paper.generation != generation or paper.returned:
            return 0
        paper.returned = True
        return paper.epoch

    def may_commit(self, epoch: int, slot: int, generation: int) -> bool:
        """Whether the proposal was decided READY in the epoch that is open now."""
        paper = self.papers.get(slot)
        return (
            self.open
            and paper is not None
            and paper.generation == generation
            and epoch == paper.epoch == self.epoch
            and paper.ballot is Ballot.READY
        )

    def exchanges(self, epoch: int) -> bool:
        """An EXCHANGE. False: it crossed our LEAVE, and is for nobody."""
        self._check_epoch(epoch)
        if self.standing is not Standing.OPEN and self.standing is not Standing.LEFT:
            raise PeerFault(Reason.SLOT_STATE, f"an exchange while {self.standing.value}")
        return self.standing is Standing.OPEN

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise PeerFault(Reason.GENERATION_STALE, f"epoch {epoch} after {self.epoch}")
        if epoch > self.epoch:
            raise PeerFault(Reason.RANK_DISAGREE, f"epoch {epoch} before it was announced")
