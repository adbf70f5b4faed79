"""One session of a capture, its frames judged again: how a link is fed, and the link between a leader and a receiver.

Between `reading` and `replay`, which puts the sessions of a file together; `group_replay` has the links of a rank group. What
came from the leader is fed to the sans-IO receiver session through an assembler, as a link would; what the receiver sent says
what its engine and target had asked for. Only the link proof is skipped. SPEC sections 2 and 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import PeerFault, Reason
from ..session import slots as st
from ..session.assembler import Assembler
from ..session.hello import Role
from ..session.landing import LandingSession
from ..wire import Header
from . import priming
from .pcapng import CaptureError

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import ReadMemory
    from ..session.machine import SessionMachine
    from ..session.outbox import Piece
    from ..session.receiver import ReceiverSession
    from ..session.slots import Slot
    from .reading import Record

Counts = tuple[dict[str, int], dict[str, int], dict[str, int]]  # reasons, discards, and what became ready

# Reasons for which a receiver gives a proposal up that no frame of the leader's brings about.
OWN_REASONS: Final = frozenset(
    {Reason.TIMEOUT, Reason.CANCELLED, Reason.PEER_LOST, Reason.LINK_ERROR, Reason.OVERLOAD, Reason.RANK_DISAGREE}
)
# What peers are refused for before a link is theirs, and what a process meets by itself: counted live, and no frame's doing.
OUTSIDE: Final = frozenset(
    {Reason.AUTH_FAILED, Reason.IDENTITY_MISMATCH, Reason.SEMANTIC_MISMATCH, Reason.LIMITS_MISMATCH, Reason.MALFORMED,
     Reason.CIRCUIT_OPEN, Reason.COPY_FAILED}
)  # fmt: skip
# The control plane counts the loss of its own connection too.
_CONTROL: Final = frozenset({Reason.PEER_LOST})
_HEAD: Final = wire.HEADER_BYTES


@dataclass(slots=True)
class Outcome:
    """What a replay saw. `differs` says, a line each, where it came to another result than the live run; `compared` sessions
    could be held against what that had counted."""

    frames: int = 0
    accepted: int = 0
    refused: int = 0
    ready: int = 0
    discarded: int = 0
    reasons: dict[str, int] = field(default_factory=dict)
    discards: dict[str, int] = field(default_factory=dict)
    sessions: int = 0
    compared: int = 0
    skipped: dict[str, int] = field(default_factory=dict)
    differs: list[str] = field(default_factory=list)
    torn: bool = False


class Feed:
    """A session behind an assembler, given bytes and times as a link would give them."""

    def __init__(self, session: SessionMachine) -> None:
        self.session = session
        self.assembler = Assembler(session)

    def put(self, data: ReadMemory, now_ns: int) -> int:
        """All of `data` at `now_ns`. 0, or the code of the reason that ended the link."""
        assembler = self.assembler
        at, size = 0, len(data)
        while at < size:
            assembler.want()
            piece = min(assembler.length, size - at)
            memoryview(assembler.memory)[assembler.offset : assembler.offset + piece] = data[at : at + piece]
            at += piece
            code = assembler.received(piece, now_ns)
            if code:
                return code
        return 0

    def settle(self) -> None:
        """What an engine does after each look: fences what died, sends what is queued."""
        session = self.session
        if isinstance(session, LandingSession):
            for index in session.fences:
                session.fenced(index, self.assembler.landing.abandon(index))
            session.fences.clear()
            session.settled.clear()
        while (piece := session.outbox.front()) is not None:
            self.sends(piece)
            session.outbox.sent(piece.head_length + piece.length)
        session.news.clear()

    def sends(self, piece: Piece) -> None:
        """What the session says itself."""


class Link:
    """One session of a capture, and the one that is given its frames. `counters` are shared with the sessions that shared theirs
    live. What the live end said itself tells what its owner asked for."""

    def __init__(self, state: priming.State, counters: Counters, outcome: Outcome, feed: Feed) -> None:
        self.state = state
        self.counters = counters
        self.feed = feed
        self.failed = 0
        self._outcome = outcome
        self._header = Header()

    @property
    def slot_bytes(self) -> int:
        """The memory that its slots take."""
        session = self.feed.session
        return session.table.geometry.total_bytes if isinstance(session, LandingSession) else 0

    @property
    def ready(self) -> int:
        """How many proposals became ready in it, since it or the file began."""
        session = self.feed.session
        return session.ready if isinstance(session, LandingSession) else 0

    def take(self, record: Record) -> None:
        """A frame of this link. Raises `CaptureError`."""
        if self._hears(record):
            self.hear(record)
        elif not record.cut:
            if self._header.decode(record.data, 0) if len(record.data) >= _HEAD else True:
                raise CaptureError(f"a frame of the {self.state.side.value}'s own that is none")
            if self._header.session != self.state.session:
                raise CaptureError(f"a frame of the {self.state.side.value}'s own of another session")
            self.said(self._header, record)
        self.settle()

    def settle(self) -> None:
        """What the owner does after each frame."""
        self.feed.settle()

    def _hears(self, record: Record) -> bool:
        return record.incoming

    def _of_before(self, frame: bytes) -> bool:
        return False

    def said(self, header: Header, record: Record) -> None:
        """A frame of this end's own. Raises `CaptureError`."""
        raise NotImplementedError

    def hear(self, record: Record) -> None:
        """A frame to this end."""
        if self.failed or self._of_before(record.data):
            return
        before = sum(self.counters.reasons.values())
        self._outcome.frames += 1
        self.failed = self.feed.put(record.data[:_HEAD], record.began_ns)
        if not self.failed:
            self.failed = self.feed.put(record.data[_HEAD:], record.time_ns)
        if not self.failed and not record.cut and sum(self.counters.reasons.values()) == before:
            self._outcome.accepted += 1

    def end(self, body: dict[str, object], now_ns: int) -> None:
        """The session's end (or that of its file), and the comparison of what was counted. Raises `CaptureError`."""
        said = body.get("end")
        if said is not None:
            try:
                reason = Reason(said)
            except ValueError:
                raise CaptureError(f"a session that ended for {str(said)[:40]!r}") from None
            self.over(reason, now_ns)
            self.settle()
        self.compare(*priming.parse_counted(body))

    def over(self, reason: Reason, now_ns: int) -> None:
        """The session has ended."""
        raise NotImplementedError

    def _ended_for(self, reason: Reason) -> None:
        """Counts why, and says if the replay knows better."""
        if self.failed and self.failed != reason.code:
            self._outcome.differs.append(f"the link ended live for {reason}, in the replay for {Reason.from_code(self.failed)}")
        self.counters.refuse(reason)

    def compare(self, reasons: dict[str, int], discards: dict[str, int], ready: int) -> None:
        """Both runs must have counted alike, where that can be said."""

    def _compare(self, live: Counts, replayed: Counts, least: frozenset[Reason] = frozenset()) -> None:
        """`least`: refusals that the live process may have counted besides, for no frame's sake."""
        self._outcome.compared += 1
        whats: tuple[tuple[str, frozenset[Reason]], ...] = (("", least), ("discarded as ", frozenset()), ("", frozenset()))
        for (what, besides), theirs, ours in zip(whats, live, replayed, strict=True):
            for name in sorted({*theirs, *ours}):
                more = theirs.get(name, 0) - ours.get(name, 0)
                if more and name not in OUTSIDE and not (more > 0 and name in besides):
                    self._outcome.differs.append(
                        f"session {self.state.session:016x}: {what}{name} {theirs.get(name, 0)} times live, "
                        f"{ours.get(name, 0)} in the replay"
                    )


class LinkReplay(Link):
    """A session between a leader and a receiver: what the receiver was sent is judged, whichever end it was captured at."""

    def __init__(self, state: priming.State, counters: Counters, outcome: Outcome, session: ReceiverSession) -> None:
        super().__init__(state, counters, outcome, Feed(session))
        self.session = session
        self.seeds = state.known
        self._was_ready = state.counted[2]
        # At the leader's end the capture can't say what became of proposals that were open when it began.
        self._unknown = {(whole["index"], whole["generation"]) for whole in state.slots if isinstance(whole, dict)}

    def _hears(self, record: Record) -> bool:
        return record.incoming == (self.state.side is Role.RECEIVER)

    def _of_before(self, frame: bytes) -> bool:
        if self.state.side is Role.RECEIVER or not self._unknown or len(frame) < _HEAD or self._header.decode(frame, 0):
            return False
        return (self._header.slot, self._header.slot_generation) in self._unknown

    def said(self, header: Header, record: Record) -> None:
        """A frame of the receiver's: what its owner asked for, by the time it was asked."""
        self.session.tick(record.began_ns)
        if header.kind == wire.OPEN:
            self.seeds[header.request] = header.seed
        elif header.kind == wire.CLOSE:
            self.seeds.pop(header.request, None)
        elif header.kind == wire.STEP:
            self.stepped(header, record.began_ns)
        elif header.kind in (wire.RESET, wire.CANCEL):
            self._given_up(header)

    def slot_of(self, header: Header) -> Slot:
        """The slot that is asked for. Raises `CaptureError` when there is none, or none of such a depth."""
        session = self.session
        if header.slot >= session.terms.max_slots or not 1 <= header.depth <= session.terms.depth:
            raise CaptureError(f"a STEP for slot {header.slot} of depth {header.depth}, which was not negotiated")
        return session.table.slots[header.slot]

    def stepped(self, header: Header, now_ns: int) -> None:
        """A STEP. Raises `CaptureError`."""
        slot = self.slot_of(header)
        if slot.generation == header.slot_generation and slot.state in st.LIVE:
            return  # it was granted in the state the file began with
        self.grant(slot, header, self.seeds.get(header.request, 0), header.step_context(), now_ns)

    def grant(self, slot: Slot, header: Header, seed: int, context: int, now_ns: int) -> None:
        """A slot is granted by what a header says. Raises `CaptureError`."""
        session = self.session
        self.settle()
        if slot.state == st.READY:
            session.table.release(slot, slot.generation, session.table.rank, 0)
        elif slot.state == st.QUARANTINE:  # released late: it was FREE, or there would be no STEP
            slot.state = st.FREE
        try:
            session.table.adopt(header.slot, header.slot_generation)
        except PeerFault as fault:
            raise CaptureError(f"a STEP that no receiver sends: {fault}") from None
        slot.request = header.request
        slot.request_generation = header.request_generation
        slot.round = header.round
        slot.anchor = header.position
        slot.depth = header.depth
        slot.seed = seed
        slot.representation = header.representation
        slot.support = header.support_policy
        slot.context = context
        slot.enqueued_ns = now_ns
        priming.grant(session, slot, now_ns + header.budget_us * 1000)

    def _given_up(self, header: Header) -> None:
        """The live receiver gave a proposal up: for a reason of its own, or one that we must have met as well."""
        if header.slot >= self.session.terms.max_slots or not 1 <= header.status <= len(Reason):
            raise CaptureError("a RESET that no receiver sends")
        slot = self.session.table.slots[header.slot]
        reason = Reason.from_code(header.status)
        if slot.generation == header.slot_generation and slot.state == st.READY:
            self.counters.discard(reason)  # ready, but the target's own device could not have it
            return
        if slot.generation != header.slot_generation or slot.state not in st.LIVE:
            return
        self.given_up(slot, reason)

    def given_up(self, slot: Slot, reason: Reason) -> None:
        """The live receiver gave up a proposal that is live here."""
        if reason not in OWN_REASONS:
            self._outcome.differs.append(
                f"slot {slot.index} generation {slot.generation}: refused live as {reason}, not in the replay"
            )
        self.session.discard(slot, reason.code)

    def over(self, reason: Reason, now_ns: int) -> None:
        """See `Link.over`."""
        self.session.tick(now_ns)
        self.settle()
        if self.state.side is Role.RECEIVER:
            self._ended_for(reason)
        else:
            self.counters.refuse(reason)
        self.session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)

    def compare(self, reasons: dict[str, int], discards: dict[str, int], ready: int) -> None:
        """See `Link.compare`: at the receiver's end, where all that decides is in the file."""
        if self.state.side is Role.RECEIVER and (self.state.group_size == 1 or self.state.group is not None):
            ours = (self.counters.reasons, self.counters.discards, {"ready": self.ready + self._was_ready})
            self._compare((reasons, discards, {"ready": ready}), ours, _CONTROL)
