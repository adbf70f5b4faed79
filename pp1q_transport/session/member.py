"""A member's end of its group link: rows land and are judged as at rank 0, but votes take the place of readiness.

Between the link (through the assembler), the `Member` machine, which knows epochs and ballots, and the rank's own slot table.
What rank 0 granted is granted here; nothing is decided here: READY and void are what DECIDE says, or the epoch's end. SPEC 4.

What the owner (a daemon) does, all in one thread:

- makes one `Member` and one `SlotTable(geometry, rank)` with its memory in its life, and a `MemberSession` for each session of
  the group link; calls `up()` once the link runs and `lost(reason)` when it is gone;
- reads `ends` (what became of each round, in rank 0's order) and clears them with `settled`; reads `fences` and `news`, and hands
  finished fences to `fenced`;
- gives slots back with `release` of the session (of the table while there is none), so that rank 0 hears of it;
- while `asking`, hands the digest of its target process's committed state to `agree`, which waits until every slot is FREE; holds
  commits back from then until `open`;
- calls `leave(reason)` when its target process is gone, and releases what that process held;
- asks `may_commit` before its target process commits a proposal: after the epoch's end the answer is no (`peer_lost`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

from .. import wire
from ..errors import LocalMisuse, PeerFault, Reason
from ..wire import Header
from . import slots as st
from .assembler import Landing
from .exchange_frames import judge_header, part_of, send_part
from .exchanges import Exchanges
from .group import READY
from .group_member import Member, Paper
from .landing import LandingSession
from .outbox import NO_KEY
from .parts import PART_BYTES_MOST, Part
from .requests import RequestTable
from .slots import GROUP_CONSUMER, Slot, SlotTable
from .terms import SessionTerms

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import Memory

_GROUP_BIT: Final = 1 << GROUP_CONSUMER
_PEER_LOST: Final = Reason.PEER_LOST.code
_POSITIONS: Final = 0xFFFFFFFF
_SLOT_BOUNDS: Final = Reason.SLOT_BOUNDS.code
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_UNEXPECTED_KIND: Final = Reason.UNEXPECTED_KIND.code
_RESERVED_BITS: Final = Reason.RESERVED_BITS.code


class End(NamedTuple):
    """What became of one round of a request, as of the moment it did: its slot may be granted again before the owner looks.
    `code`: `READY`, or that of the reason. Slot and generation are 0 for a round that rank 0 sent no STEP for."""

    request: int
    request_generation: int
    round: int
    code: int
    slot: int
    slot_generation: int


class MemberSession(LandingSession):
    """State of one session of a group link at the rank of `member`. `terms` are the link's own: its leader is the coordinator."""

    def __init__(
        self,
        terms: SessionTerms,
        member: Member,
        table: SlotTable,
        memory: Memory,
        counters: Counters,
        quarantine_bound: int = 0,
    ) -> None:
        super().__init__(terms, table, memory, RequestTable(), counters, quarantine_bound)
        if table.rank != member.rank:
            raise LocalMisuse(f"the slot table of rank {table.rank} at rank {member.rank}")
        self.member: Member = member
        self.decision_bytes: int = 0  # the most that a DECIDE may carry
        self.ends: list[End] = []
        self.exchanges: Exchanges = Exchanges(member.size, member.rank, terms.vocab_size)
        self.exchanged: list[list[Part]] = []
        """Complete exchanges, for the owner to take."""
        self._part = bytearray(PART_BYTES_MOST)

    # ---- what the owner asks ------------------------------------------------------------------------------------

    @property
    def open(self) -> bool:
        """Whether the epoch is open for this rank."""
        return self.member.open

    @property
    def asking(self) -> bool:
        """Whether rank 0 waits for our digest (`agree`)."""
        return self.member.asked

    def up(self) -> None:
        """The link runs."""
        self.member.link_up(self.terms.leader_nonce)

    def lost(self, reason: Reason) -> None:
        """The link is gone, and with it the epoch: every proposal that is not decided is void."""
        self._end_exchanges()
        for paper in self.member.link_down():
            self._void(paper, reason.code)
        super().lost(reason)

    def agree(self, state_low: int, state_high: int) -> bool:
        """Our committed state (128 bits) for the epoch that asks. False when nobody asks, or while a slot of ours is not FREE
        yet: then call again."""
        if not self.member.asked or self.table.not_free():
            return False
        h = self.blank(wire.AGREE)
        h.epoch = self.member.epoch
        h.state_low = state_low
        h.state_high = state_high
        h.floor = self.table.highest()
        self.outbox.frame(h, None, 0, 0, NO_KEY)
        self.member.agree()
        return True

    def leave(self, reason: Reason) -> None:
        """Our target process is gone: the epoch is over for this rank, and rank 0 is told (LEAVE) unless it need not know."""
        lost = self.member.leave()
        self._end_exchanges()
        if lost is None:
            return
        h = self.blank(wire.LEAVE)
        h.epoch = self.member.epoch
        h.status = reason.code
        self._send(h)
        for paper in lost:
            self._void(paper, _PEER_LOST)

    def may_commit(self, slot: int, generation: int, epoch: int) -> bool:
        """Whether this READY proposal may be committed now. Ask before it is released."""
        return self.member.may_commit(epoch, slot, generation)

    def exchange(self, part: Part) -> None:
        """Our own part of the next exchange (`exchanges.said(rank)`). Raises `LocalMisuse` while no epoch is open, `PeerFault`
        for a part that rank 0 would refuse."""
        if not self.exchanges.own(part):  # never complete by it: rank 0 tells us the others' once all are in
            send_part(self, self.member.epoch, part)

    def _end_exchanges(self) -> None:
        self.exchanges.end()
        self.exchanged.clear()

    def release(self, slot: Slot, generation: int, rank: int, consumer: int) -> bool:
        """See `SlotTable.release`; rank 0 hears of a slot that is FREE by it."""
        released = self.table.release(slot, generation, rank, consumer)
        if released:
            self._give_back(slot)
        return released

    def fenced(self, index: int, was_landing: bool) -> None:
        """See `LandingSession.fenced`."""
        super().fenced(index, was_landing)
        self._give_back(self.table.slots[index])

    # ---- what became of rounds ----------------------------------------------------------------------------------

    def make_ready(self, slot: Slot, now_ns: int) -> None:
        """See `LandingSession.make_ready`."""
        super().make_ready(slot, now_ns)
        self._end(slot, READY)

    def settle_void(self, slot: Slot, code: int, count: bool = True) -> None:
        """See `LandingSession.settle_void`."""
        super().settle_void(slot, code, count)
        self._end(slot, code)

    def _end(self, slot: Slot, code: int) -> None:
        self.ends.append(End(slot.request, slot.request_generation, slot.round, code, slot.index, slot.generation))

    # ---- what this rank finds -----------------------------------------------------------------------------------

    def completed(self, slot: Slot, now_ns: int) -> None:
        """See `LandingSession.completed`: we vote ready, and wait for the decision or the epoch's end."""
        slot.move(st.VOTE)
        self._vote(slot, READY)

    def discard(self, slot: Slot, code: int, tell: bool = True) -> None:
        """See `LandingSession.discard`: we vote the reason. The proposal is settled by the decision that follows."""
        self.invalidate(slot, code)
        self.counters.refuse(Reason.from_code(code))
        self.news.append(("refused", Reason.from_code(code), slot.index, slot.generation))
        self._vote(slot, code)

    def _vote(self, slot: Slot, code: int) -> None:
        epoch = self.member.vote(slot.index, slot.generation, code)
        if epoch:
            h = self._about(wire.VOTE, slot.index, slot.generation, epoch)
            h.status = code
            self._send(h)

    def _give_back(self, slot: Slot) -> None:
        if slot.state != st.FREE:
            return
        epoch = self.member.returns(slot.index, slot.generation)
        if epoch:
            h = self._about(wire.RELEASED, slot.index, slot.generation, epoch)
            h.status = 0
            self._send(h)

    def _about(self, kind: int, slot: int, generation: int, epoch: int) -> Header:
        h = self.blank(kind)
        h.slot = slot
        h.slot_generation = generation
        h.epoch = epoch
        return h

    def _send(self, h: Header) -> None:
        try:
            self.outbox.frame(h, None, 0, 0, NO_KEY)
        except PeerFault as fault:  # rank 0 does not read: the link ends, and every slot is settled by that
            self.broken = fault.reason.code

    # ---- what rank 0 says ---------------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`."""
        code = self.check_peer(header)
        if code:
            return -code
        kind = header.kind
        if kind == 19:  # EXCHANGE: its bounds are its own
            landing.memory = self._part
            return -judge_header(header)
        if header.payload_length > self.terms.max_payload:
            return -_LENGTH_BOUNDS
        if kind == 4 or kind == 5:  # REPLY, COMPLETION
            return self.accept_row(header, landing)
        if kind == 14 and header.payload_length > self.decision_bytes:
            return -_LENGTH_BOUNDS
        if kind == 14 and header.payload_digest and not header.payload_length:
            return -_RESERVED_BITS
        if kind == 12 or kind == 14:  # GRANT, DECIDE
            return -_SLOT_BOUNDS if header.slot >= self.terms.max_slots else 0
        if kind == 10 or kind == 16:  # STATUS, EPOCH
            return 0
        return -_UNEXPECTED_KIND

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        kind = header.kind
        if kind == 4:
            self.finish_row(header, now_ns)
            return 0
        if kind == 5:
            self.finish_proposal(header, now_ns)
            return 0
        try:
            return self._heard(header, now_ns)
        except PeerFault as fault:
            self.news.append(("coordinator_fault", fault.reason, header.slot, header.slot_generation))
            return -fault.reason.code

    def _heard(self, header: Header, now_ns: int) -> int:
        kind = header.kind
        if kind == wire.GRANT:
            return self._grant(header, now_ns)
        if kind == wire.DECIDE:
            return self._decide(header, now_ns)
        if kind == wire.EPOCH:
            for paper in self.member.announced(header.epoch, header.phase):
                self._void(paper, _PEER_LOST)
            if self.member.open:
                self.exchanges.begin()
            else:
                self._end_exchanges()
            return 0
        if kind == wire.EXCHANGE:
            return self._heard_part(header)
        if not 1 <= header.status <= len(Reason):
            return -_RESERVED_BITS
        if header.subject == wire.STEP:
            if self.member.open:  # else it is of an epoch that is over: no STEP of ours waits for it, nor is to meet it later
                self.ends.append(End(header.request, header.request_generation, header.round, header.status, 0, 0))
            return 0
        self.counters.add("peer_status")
        self.peer_status = header.status
        self.news.append(("coordinator_status", Reason.from_code(header.status), header.slot, header.slot_generation))
        return 0

    def _heard_part(self, header: Header) -> int:
        part = part_of(header, self._part, self.terms.leader_nonce)
        if self.member.exchanges(header.epoch):
            parts = self.exchanges.heard(part)
            if parts:
                self.exchanged.append(parts)
        return 0

    def _judge_grant(self, header: Header) -> int:
        """Raises `PeerFault` for a GRANT that no member of these terms can take."""
        terms = self.terms
        self._judge_owner(header)
        if header.budget_us < 1:
            raise PeerFault(Reason.LIMITS_MISMATCH, "a budget of 0")
        if header.depth < 1 or header.depth > terms.depth:
            raise PeerFault(Reason.DEPTH_MISMATCH, f"depth {header.depth}")
        if header.position >= _POSITIONS - header.depth:
            raise PeerFault(Reason.POSITION_BOUNDS, f"position {header.position}")
        if header.representation == wire.DENSE and terms.dense:
            fits = header.support_policy <= terms.vocab_size
        elif header.representation == wire.SPARSE and terms.sparse:
            fits = 1 <= header.support_policy <= terms.support
        else:
            raise PeerFault(Reason.REPRESENTATION, f"representation {header.representation}")
        if not fits:
            raise PeerFault(Reason.SUPPORT_BOUNDS, f"support {header.support_policy}")
        return 0

    def _judge_owner(self, header: Header) -> None:
        if header.owner != wire.OWNER_ALL:
            raise PeerFault(Reason.SEMANTIC_MISMATCH, f"rows for rank {header.owner} alone")

    def _grant(self, header: Header, now_ns: int) -> int:
        self._judge_grant(header)
        granted = self.member.granted(header.epoch, header.slot, header.slot_generation)
        slot = self.table.adopt(header.slot, header.slot_generation)
        slot.request = header.request
        slot.request_generation = header.request_generation
        slot.round = header.round
        slot.anchor = header.position
        slot.depth = header.depth
        slot.seed = header.seed
        slot.representation = header.representation
        slot.support = header.support_policy
        slot.context = header.context
        slot.epoch = header.epoch
        slot.enqueued_ns = now_ns
        slot.deadline_ns = now_ns + header.budget_us * 1000  # for the rank's own figures; the watchdog is not armed
        slot.consumers = 1 | _GROUP_BIT
        if not granted:
            self._void(self.member.papers[slot.index], _PEER_LOST)
        return 0

    def _decide(self, header: Header, now_ns: int) -> int:
        code = header.status
        if code > len(Reason):
            return -_RESERVED_BITS
        if not self.member.decided(header.epoch, header.slot, header.slot_generation, code):
            return 0
        slot = self.table.slots[header.slot]
        if code == READY:
            slot.consumers &= ~_GROUP_BIT
            self.make_ready(slot, now_ns)
        else:
            self._void(self.member.papers[header.slot], code)
        return 0

    def _void(self, paper: Paper, code: int) -> None:
        """The proposal is void by decision, or by the end of its epoch."""
        slot = self.table.slots[paper.slot]
        if slot.generation != paper.generation:
            return  # a grant that the table refused: its link ends
        live = slot.state in st.LIVE
        if live:
            self.invalidate(slot, code)
        self.settle_void(slot, code, live)
        self.table.release(slot, slot.generation, self.table.rank, GROUP_CONSUMER)
        self._give_back(slot)
        self.bound_quarantine()
