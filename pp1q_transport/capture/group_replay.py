"""What the replays of all ranks of a group have in common: slots that its links share, and words that must be those said live.

Between `link_replay` and `rank0_replay` and `member_replay`. A rank's frames are judged again by its own machines, which know of
each other as live. What it said itself tells what its owner asked for (a grant, an agreement, a process that left); its votes and
decisions must be those that the replay comes to. SPEC section 4.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

from .. import wire
from ..counters import Counters
from ..errors import LocalMisuse, PeerFault, Reason
from ..session import slots as st
from ..session.group import READY
from ..session.landing import LandingSession
from ..session.slots import SlotTable
from ..wire import Header
from . import priming
from .link_replay import OUTSIDE, OWN_REASONS, Feed, Link
from .pcapng import CaptureError
from .taps import Cutter

if TYPE_CHECKING:
    from ..memory import Memory
    from ..session.machine import SessionMachine
    from ..session.outbox import Piece
    from ..session.terms import SessionTerms
    from .link_replay import Outcome
    from .reading import Record

_SAID: Final = {wire.VOTE: "vote", wire.DECIDE: "decision"}
PEER_LOST: Final = Reason.PEER_LOST
# Counted by a daemon for its own target process as well, under the same reasons as for frames.
SHARED: Final = OWN_REASONS | OUTSIDE | {Reason.CONTEXT_MISMATCH, Reason.DEPTH_MISMATCH, Reason.REQUEST_UNKNOWN}

EXCHANGES: Final = "EXCHANGE frames between ranks: rank 0's own part is in none"

Word = tuple[str, int, int, int, int]  # what, slot, slot_generation, epoch, code


class GroupReplay:
    """One rank, with the slots that its links share."""

    def __init__(self, state: priming.State) -> None:
        ours = state.agreement.ours
        self.size = ours.group_size
        self.mode = ours.group_mode
        self.rank = 0
        self.table: SlotTable | None = None
        self.memory: Memory = memoryview(bytearray(0))
        self.links: list[Link] = []
        self.begun = False
        """Whether a frame was seen: from then on the slots are the replay's own, and no state of a later session changes them."""
        self._shape: tuple[int, ...] = ()

    def link(self, state: priming.State, counters: Counters, now_ns: int, outcome: Outcome, taken: int) -> Link:
        """A session of this rank begins, or the file does. Raises `CaptureError`."""
        terms = priming.terms_in(state)
        ours = state.agreement.ours
        shape = (self.size, terms.vocab_size, terms.max_slots, terms.depth, terms.support, terms.dense, terms.sparse)
        if self._shape not in ((), shape) or (ours.group_size, ours.group_mode) != (self.size, self.mode):
            raise CaptureError("sessions of one group that do not go together")
        self._shape = shape
        with can_have_been():
            link = self._make(state, terms, counters, outcome, now_ns, taken)
        self.links.append(link)
        self.settle()
        return link

    def _make(
        self, state: priming.State, terms: SessionTerms, counters: Counters, outcome: Outcome, now_ns: int, taken: int
    ) -> Link:
        raise NotImplementedError

    def slots(self, terms: SessionTerms, taken: int) -> SlotTable:
        """The rank's own slots, laid out by the first session that has any."""
        geometry = terms.geometry()
        if self.table is None:
            if taken + geometry.total_bytes > priming.MEMORY_MOST:
                raise CaptureError(f"slots of {taken + geometry.total_bytes} bytes; a replay takes {priming.MEMORY_MOST} at most")
            self.table = SlotTable(geometry, self.rank)
            self.memory = memoryview(bytearray(geometry.total_bytes))
        elif self.table.geometry.total_bytes != geometry.total_bytes:
            raise CaptureError("sessions of one rank with slots of other sizes")
        return self.table

    def prime(self, session: LandingSession, state: priming.State, now_ns: int) -> None:
        """Slots as the live ones stood. One that waited for its fence is fenced at once: nothing lands here behind our back."""
        if self.begun and session.table.highest():
            return
        priming.prime_slots(session, state, now_ns)
        for slot in session.table.slots:
            if slot.state == st.QUARANTINE and not slot.fenced and not slot.decided:
                session.fences.append(slot.index)

    def settle(self) -> None:
        """A frame on one link may have queued frames, and asked for fences, on all."""
        for link in self.links:
            link.feed.settle()

    def part(self, link: Link) -> None:
        """Its session is over."""
        if link in self.links:
            self.links.remove(link)


class WordFeed(Feed):
    """A feed that keeps the votes and decisions of its session."""

    def __init__(self, session: SessionMachine) -> None:
        super().__init__(session)
        self.words: Counter[Word] = Counter()
        self._cutter = Cutter()
        self._header = Header()

    def sends(self, piece: Piece) -> None:
        """See `Feed.sends`."""
        data = bytes(memoryview(self.session.outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length])
        data += bytes(memoryview(piece.memory)[piece.offset : piece.offset + piece.length])
        for frame, _began_ns in self._cutter.feed(data, 0):
            self._header.decode(frame, 0)
            note(self.words, self._header)


def note(words: Counter[Word], header: Header) -> None:
    """Counts a vote or a decision."""
    what = _SAID.get(header.kind)
    if what is not None:
        words[what, header.slot, header.slot_generation, header.epoch, header.status] += 1


class InGroup(Link):
    """What the links of one rank have in common."""

    group: GroupReplay

    def settle(self) -> None:
        """See `Link.settle`."""
        self.group.settle()

    def take(self, record: Record) -> None:
        """See `Link.take`."""
        self.group.begun = True
        with can_have_been():
            super().take(record)

    def end(self, body: dict[str, object], now_ns: int) -> None:
        """See `Link.end`."""
        with can_have_been():
            super().end(body, now_ns)


@contextmanager
def can_have_been() -> Iterator[None]:
    """A capture may come from anybody: what the machines of a rank never meet live is a fault of the file."""
    try:
        yield
    except (LocalMisuse, PeerFault, LookupError, AssertionError) as error:
        raise CaptureError(f"a group that can't have been: {str(error)[:200]}") from None


class GroupLink(InGroup):
    """A session of a group link, at either end."""

    def __init__(self, state: priming.State, counters: Counters, outcome: Outcome, feed: WordFeed, group: GroupReplay) -> None:
        super().__init__(state, counters, outcome, feed)
        self.words = feed.words
        self.group = group
        self.live: Counter[Word] = Counter()
        self._was_ready = state.counted[2]
        self._besides = SHARED

    def _of_before(self, frame: bytes) -> bool:
        """Exchanges decide no proposal, and rank 0's own part of one is in no frame: they are passed over, and said to be."""
        if len(frame) < wire.HEADER_BYTES or self._header.decode(frame, 0) or self._header.kind != wire.EXCHANGE:
            return False
        self._outcome.skipped[EXCHANGES] = self._outcome.skipped.get(EXCHANGES, 0) + 1
        self._besides = SHARED | {Reason.GENERATION_STALE}  # what one of an epoch that is over counts
        return True

    def over(self, reason: Reason, now_ns: int) -> None:
        """See `Link.over`."""
        self._ended_for(reason)
        self._same_words()
        self.lost()
        self.group.settle()
        self.group.part(self)

    def lost(self) -> None:
        """The session is told."""
        raise NotImplementedError

    def _same_words(self) -> None:
        for word in sorted((self.live - self.words) + (self.words - self.live)):
            what, slot, generation, _epoch, code = word
            name = Reason.from_code(code).value if 0 < code <= len(Reason) else "ready" if code == READY else str(code)
            self._outcome.differs.append(
                f"session {self.state.session:016x}: {what} {name} on slot {slot} generation {generation} "
                f"{self.live[word]} times live, {self.words[word]} in the replay"
            )

    def compare(self, reasons: dict[str, int], discards: dict[str, int], ready: int) -> None:
        """See `Link.compare`."""
        ours = (self.counters.reasons, self.counters.discards, {"ready": self.ready + self._was_ready})
        self._compare((reasons, discards, {"ready": ready}), ours, self._besides)
