"""Replay: the frames of a capture, judged again by fresh receivers, on the capture's own clock.

Between `reading` and `pp1q replay`. What came from the leader is fed to the sans-IO receiver session through an assembler, as a
link would; what the receiver sent says what its engine and target had asked for. Only the link proof is skipped. SPEC sections 2
and 4.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .. import wire
from ..counters import Counters
from ..errors import PeerFault, Reason
from ..session import slots as st
from ..session.assembler import Assembler
from ..session.hello import Role
from ..wire import Header
from . import priming, records
from .pcapng import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..memory import ReadMemory
    from ..session.receiver import ReceiverSession
    from .reading import Record

# Reasons for which a receiver gives a proposal up that no frame of the leader's brings about.
OWN_REASONS: Final = frozenset(
    {Reason.TIMEOUT, Reason.CANCELLED, Reason.PEER_LOST, Reason.LINK_ERROR, Reason.OVERLOAD, Reason.RANK_DISAGREE}
)
# What peers are refused for before a link is theirs, and what a process meets by itself: counted live, and no frame's doing.
OUTSIDE: Final = frozenset(
    {Reason.AUTH_FAILED, Reason.IDENTITY_MISMATCH, Reason.SEMANTIC_MISMATCH, Reason.LIMITS_MISMATCH, Reason.MALFORMED,
     Reason.CIRCUIT_OPEN, Reason.COPY_FAILED}
)  # fmt: skip
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
    """A receiver session behind an assembler, given bytes and times as a link would give them."""

    def __init__(self, session: ReceiverSession) -> None:
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
        if session.fences:
            for index in session.fences:
                session.fenced(index, self.assembler.landing.abandon(index))
            session.fences.clear()
        while (piece := session.outbox.front()) is not None:
            session.outbox.sent(piece.head_length + piece.length)
        session.settled.clear()
        session.news.clear()


class LinkReplay:
    """One session of a capture. `counters` are shared with the sessions that shared theirs live."""

    def __init__(self, state: priming.State, counters: Counters, now_ns: int, outcome: Outcome) -> None:
        self.state = state
        self.counters = counters
        self.session = priming.fresh_receiver(state, counters, now_ns)
        self.seeds = state.known
        self.failed = 0
        self._feed = Feed(self.session)
        self._outcome = outcome
        self._header = Header()
        self._was_ready = state.counted[2]
        # At the leader's end the capture can't say what became of proposals that were open when it began.
        self._unknown = {(whole["index"], whole["generation"]) for whole in state.slots if isinstance(whole, dict)}

    def take(self, record: Record) -> None:
        """A frame of this link. Raises `CaptureError`."""
        if (record.incoming) == (self.state.side is Role.RECEIVER):
            self.hear(record)
        else:
            self.said(record)
        self._feed.settle()

    def hear(self, record: Record) -> None:
        """A frame to the receiver."""
        if self.failed or self._of_before(record.data):
            return
        before = sum(self.counters.reasons.values())
        self._outcome.frames += 1
        self.failed = self._feed.put(record.data[:_HEAD], record.began_ns)
        if not self.failed:
            self.failed = self._feed.put(record.data[_HEAD:], record.time_ns)
        if not self.failed and not record.cut and sum(self.counters.reasons.values()) == before:
            self._outcome.accepted += 1

    def _of_before(self, frame: bytes) -> bool:
        if self.state.side is Role.RECEIVER or not self._unknown or len(frame) < _HEAD or self._header.decode(frame, 0):
            return False
        return (self._header.slot, self._header.slot_generation) in self._unknown

    def said(self, record: Record) -> None:
        """A frame of the receiver's: what its owner asked for, by the time it was asked."""
        header = self._header
        if record.cut:
            return
        if header.decode(record.data, 0) if len(record.data) >= _HEAD else True:
            raise CaptureError("a frame of the receiver's own that is none")
        if header.session != self.state.session:
            raise CaptureError("a frame of the receiver's own of another session")
        self.session.tick(record.began_ns)
        if header.kind == wire.OPEN:
            self.seeds[header.request] = header.seed
        elif header.kind == wire.CLOSE:
            self.seeds.pop(header.request, None)
        elif header.kind == wire.STEP:
            self._step(header, record.began_ns)
        elif header.kind in (wire.RESET, wire.CANCEL):
            self._given_up(header)

    def _step(self, header: Header, now_ns: int) -> None:
        session = self.session
        if header.slot >= session.terms.max_slots or not 1 <= header.depth <= session.terms.depth:
            raise CaptureError(f"a STEP for slot {header.slot} of depth {header.depth}, which was not negotiated")
        slot = session.table.slots[header.slot]
        if slot.generation == header.slot_generation and slot.state in st.LIVE:
            return  # it was granted in the state the file began with
        self._feed.settle()
        if slot.state == st.READY:
            session.table.release(slot, slot.generation, session.table.rank, 0)
        elif slot.state == st.QUARANTINE:  # released late, or granted by a group: it was FREE, or there would be no STEP
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
        slot.seed = self.seeds.get(header.request, 0)
        slot.representation = header.representation
        slot.support = header.support_policy
        slot.context = header.step_context()
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
        if reason not in OWN_REASONS:
            self._outcome.differs.append(
                f"slot {header.slot} generation {header.slot_generation}: refused live as {reason}, not in the replay"
            )
        self.session.discard(slot, header.status)

    def end(self, body: dict[str, object], now_ns: int) -> None:
        """The session's end (or that of its file), and the comparison of what was counted. Raises `CaptureError`."""
        said = body.get("end")
        if said is not None:
            try:
                reason = Reason(said)
            except ValueError:
                raise CaptureError(f"a session that ended for {str(said)[:40]!r}") from None
            self.session.tick(now_ns)
            self._feed.settle()
            self._end(reason)
        self._compare(body)

    def _end(self, reason: Reason) -> None:
        if self.state.side is Role.RECEIVER and self.failed and self.failed != reason.code:
            self._outcome.differs.append(f"the link ended live for {reason}, in the replay for {Reason.from_code(self.failed)}")
        self.counters.refuse(reason)
        self.session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)
        self._feed.settle()

    def _compare(self, body: dict[str, object]) -> None:
        """At the receiver's end, with nobody else in its group: both runs must have counted alike."""
        reasons, discards, ready = priming.parse_counted(body)
        if self.state.side is not Role.RECEIVER or self.state.group_size > 1:
            return
        self._outcome.compared += 1
        ours = (self.counters.reasons, self.counters.discards, {"ready": self.session.ready + self._was_ready})
        for what, live, replayed in zip(("", "discarded as ", ""), (reasons, discards, {"ready": ready}), ours, strict=True):
            for name in sorted({*live, *replayed}):
                if live.get(name, 0) != replayed.get(name, 0) and name not in OUTSIDE:
                    self._outcome.differs.append(
                        f"session {self.state.session:016x}: {what}{name} {live.get(name, 0)} times live, "
                        f"{replayed.get(name, 0)} in the replay"
                    )


class Replay:
    """A whole capture."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._links: dict[int, LinkReplay | None] = {}
        self._accounts: dict[int, Counters] = {}
        self._start: dict[int, tuple[dict[str, int], dict[str, int]]] = {}

    def run(self, taken: Iterable[Record]) -> Outcome:
        """Replays records in order. Raises `CaptureError`."""
        for record in taken:
            if record.what == records.STATE:
                self._begin(record)
                continue
            if record.link not in self._links:
                raise CaptureError("a frame before the state of its session")
            link = self._links[record.link]
            if link is None:
                continue
            if record.what == records.FRAME:
                link.take(record)
            else:
                link.end(records.parse_json(record.data), record.time_ns)
                self._done(record.link, link)
        for number, link in list(self._links.items()):
            if link is not None:
                self._done(number, link)
        return self._account()

    def _begin(self, record: Record) -> None:
        if record.link in self._links:
            raise CaptureError("two states of one session")
        state = priming.State(records.parse_json(record.data))
        if not state.replayable:
            self._links[record.link] = None
            name = f"{state.side.value} with {state.peer.value}"
            self.outcome.skipped[name] = self.outcome.skipped.get(name, 0) + 1
            return
        counters = self._accounts.setdefault(state.account, Counters())
        if not any(link is not None and link.counters is counters for link in self._links.values()):
            # What was counted while no session of this account ran, or before the file began, is no frame's.
            start = self._start.setdefault(state.account, ({}, {}))
            for before, ours, live in zip(start, (counters.reasons, counters.discards), state.counted[:2], strict=True):
                for name, count in live.items():
                    before[name] = before.get(name, 0) + count - ours.get(name, 0)
                    ours[name] = count
        self.outcome.sessions += 1
        self._links[record.link] = LinkReplay(state, counters, record.time_ns, self.outcome)

    def _done(self, number: int, link: LinkReplay) -> None:
        self.outcome.ready += link.session.ready
        self._links[number] = None

    def _account(self) -> Outcome:
        outcome = self.outcome
        for account, counters in self._accounts.items():
            totals = (outcome.reasons, outcome.discards)
            for total, now, before in zip(totals, (counters.reasons, counters.discards), self._start[account], strict=True):
                for name, count in now.items():
                    if count > before.get(name, 0):
                        total[name] = total.get(name, 0) + count - before.get(name, 0)
        outcome.refused = sum(outcome.reasons.values())
        outcome.discarded = sum(outcome.discards.values())
        return outcome
