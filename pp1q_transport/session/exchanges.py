"""The exchanges of one epoch at one rank: whose part is in, what must come next, and when one is complete. A pure state machine.

Between `hub` (rank 0, which hears every rank and passes complete exchanges on) or `member` (which says its own part and hears the
others'), and `parts`, which judges what is said. No frames, no clock, no memory of what is over. SPEC sections 4, 6 and 7.

**Order.** Ranks run the same exchanges in the same order, as collectives are run: exchange n of an epoch is about one (request,
generation, round, position) and one purpose, the same at every rank, and each rank says its part of n before that of n + 1. At
most `WINDOW` are under way.

**One decision or none.** An exchange is complete at rank 0 when all parts are in and fit; only then is any of it told. What does
not fit raises `PeerFault`, costs the link it came over and so the epoch: then no rank can commit what it computed, and all agree
anew. Nothing is repeated and nothing is given up singly.
"""

from __future__ import annotations

from collections import deque
from typing import Final

from ..errors import LocalMisuse, PeerFault, Reason
from ..wire import U32_MAX
from .parts import Part, RanksDiffer, judge, judge_all

WINDOW: Final = 64


class Exchanges:
    """The machine of rank `rank` of `size`. Closed until the epoch opens."""

    def __init__(self, size: int, rank: int, vocab_size: int) -> None:
        self.size = size
        self.rank = rank
        self.vocab_size = vocab_size
        self.open = False
        self.completed = 0
        """How many exchanges of this epoch all ranks have said their part of."""
        self._next = [0] * size  # by rank: the exchange that its next part belongs to
        self._under_way: deque[dict[int, Part]] = deque()  # from exchange `completed` on: parts by rank

    def begin(self) -> None:
        """The epoch is open."""
        self.end()
        self.open = True

    def end(self) -> None:
        """The epoch is over: nothing of it is kept."""
        self.open = False
        self.completed = 0
        self._next = [0] * self.size
        self._under_way.clear()

    def said(self, rank: int) -> int:
        """How many parts of `rank` are in: the number of its next one."""
        return self._next[rank]

    def own(self, part: Part) -> list[Part]:
        """This rank's own part. The parts of all, when it was the last. Raises `LocalMisuse` outside an open epoch and for a
        number that is not the next, `PeerFault` for what rank 0 would refuse (`RanksDiffer`: it may be another's fault)."""
        if not self.open or part.rank != self.rank or part.sequence != self._next[self.rank]:
            raise LocalMisuse(f"exchange {part.sequence} of rank {part.rank}: {self._next[self.rank]} is next, open: {self.open}")
        return self._add(part)

    def heard(self, part: Part) -> list[Part]:
        """Another rank's part. The parts of all, in order, when it was the last. Raises `PeerFault`, and then nothing changed."""
        if not self.open:
            raise PeerFault(Reason.SLOT_STATE, f"an exchange of rank {part.rank} while none may be")
        if not 0 <= part.rank < self.size or part.rank == self.rank:
            raise PeerFault(Reason.RANK_DISAGREE, f"a part of rank {part.rank} at rank {self.rank} of {self.size}")
        if self.rank and part.sequence >= self._next[self.rank]:
            raise PeerFault(Reason.RANK_DISAGREE, f"exchange {part.sequence} is complete without our part")
        return self._add(part)

    def _add(self, part: Part) -> list[Part]:
        due = self._next[part.rank]
        if part.sequence != due:
            reason = Reason.GENERATION_DUPLICATE if part.sequence < due else Reason.RANK_DISAGREE
            raise PeerFault(reason, f"rank {part.rank} is in exchange {part.sequence}, {due} was next")
        if due > U32_MAX:  # no frame has a number for it
            raise PeerFault(Reason.GENERATION_EXHAUSTED, "exchanges of one epoch")
        at = due - self.completed
        if at >= WINDOW:
            raise PeerFault(Reason.OVERLOAD, f"rank {part.rank} is {at} exchanges ahead")
        judge(part, self.vocab_size)
        parts = self._under_way[at] if at < len(self._under_way) else {}
        if parts:
            _compare(part, next(iter(parts.values())))
        ordered = [{**parts, part.rank: part}[rank] for rank in range(self.size)] if len(parts) == self.size - 1 else []
        if ordered:
            judge_all(ordered, self.vocab_size)
        if at == len(self._under_way):
            self._under_way.append(parts)
        parts[part.rank] = part
        self._next[part.rank] = due + 1
        if ordered:  # the first under way: no rank says its part of another before it said this one
            self._under_way.popleft()
            self.completed += 1
        return ordered


def _compare(part: Part, other: Part) -> None:
    """Two ranks' parts of one exchange are about the same thing."""
    pairs = (
        (part.request, other.request, Reason.REQUEST_MISMATCH, "request"),
        (part.generation, other.generation, Reason.RANK_DISAGREE, "generation"),
        (part.round, other.round, Reason.ROUND_MISMATCH, "round"),
        (part.position, other.position, Reason.CONTEXT_MISMATCH, "position"),
        (part.purpose, other.purpose, Reason.SEMANTIC_MISMATCH, "purpose"),
    )
    for ours, theirs, reason, name in pairs:
        if ours != theirs:
            raise RanksDiffer(reason, f"exchange {part.sequence}: {name} {ours} at rank {part.rank}, {theirs} at {other.rank}")
