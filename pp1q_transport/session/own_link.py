"""A rank above 0 whose rows come over its own link from the leader: that link's session, and the group link's beside it.

Between the leader (`OwnLinkSession`: it asks for what rank 0 granted, rows land and are judged) and rank 0
(`OwnMemberSession`: it is granted slots, votes, is told the decision). Both work on one slot table;
`Joint` is how they know of each other. For the modes "vocabulary" and "request-owner" of a rank group;
`member` is the mode in which rank 0 sends its rows on. SPEC section 4.

What the owner (a daemon) does besides what `member` and `landing` tell it to:

- makes one `Joint` in its life and gives it to every session of both links;
- for each request in `pending` of the group link's session, as soon as its target process has asked for that round too: calls
  `step_granted` of the leader link's session (`refuse_granted` while there is none);
- reports the fences of both sessions after it fenced the *leader's* link, through the session that asked for them.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import xxh3_64
from ..errors import PeerFault, Reason
from . import slots as st
from .claims import claim_of, put_tokens
from .group import READY
from .member import MemberSession
from .outbox import NO_KEY
from .receiver import ReceiverSession
from .shards import REQUEST_OWNER, VOCABULARY

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import Memory
    from ..wire import Header
    from .assembler import Landing
    from .group_member import Member
    from .requests import Request, RequestTable
    from .slots import Slot, SlotTable
    from .terms import SessionTerms

_LANDING: Final = (st.GRANTED, st.LANDING)  # of this rank's own affair still: not voted on


class Joint:
    """The two sessions of one rank, as far as they run."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.leader: OwnLinkSession | None = None
        self.group: OwnMemberSession | None = None


class OwnLinkSession(ReceiverSession):
    """State of one session with the leader at a rank above 0. It grants nothing and decides nothing."""

    def __init__(
        self,
        terms: SessionTerms,
        table: SlotTable,
        memory: Memory,
        requests: RequestTable,
        counters: Counters,
        joint: Joint,
        quarantine_bound: int = 0,
    ) -> None:
        super().__init__(terms, table, memory, requests, counters, quarantine_bound)
        self.joint = joint
        self._asked: dict[int, int] = {}  # slot -> the generation that the leader was asked for
        if joint.mode == REQUEST_OWNER:
            self.opened = set()
        joint.leader = self

    @property
    def asked(self) -> dict[int, int]:
        """By slot: the generation whose rows the leader was asked for, as it stands."""
        return self._asked

    # ---- what the owner asks for --------------------------------------------------------------------------------

    def step_granted(
        self,
        slot: Slot,
        request: Request,
        depth: int,
        temperature: float,
        support: int,
        representation: int,
        target_context: int,
        trace_id: int,
    ) -> int:
        """Queues the STEP of a slot that rank 0 granted, with what this rank's own process asks for. 0, or the code of the reason
        why the two do not go together: then the slot is voted void."""
        if self.joint.group is not None:
            self.joint.group.forget(slot)
        if request.seed != slot.seed:
            return self._disagree(slot, Reason.RANK_DISAGREE)
        if depth != slot.depth:
            return self._disagree(slot, Reason.DEPTH_MISMATCH)
        if request.anchor != slot.anchor:
            return self._disagree(slot, Reason.CONTEXT_MISMATCH)
        self.ask_first(request)
        h = self.blank(wire.STEP)
        h.request = slot.request
        h.request_generation = slot.request_generation
        h.round = slot.round
        h.position = slot.anchor
        h.slot = slot.index
        h.slot_generation = slot.generation
        h.depth = depth
        h.representation = representation
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.target_context = target_context
        h.trace_id = trace_id
        h.temperature = temperature
        h.support_policy = support
        h.budget_us = max(1, (slot.deadline_ns - slot.enqueued_ns) // 1000)
        if h.step_context() != slot.context:
            return self._disagree(slot, Reason.CONTEXT_MISMATCH)
        request.generation = max(request.generation, slot.request_generation)
        request.in_flight = True
        self._asked[slot.index] = slot.generation
        self.outbox.frame(h, None, 0, 0, NO_KEY)
        return 0

    def _disagree(self, slot: Slot, reason: Reason) -> int:
        self.discard(slot, reason.code)
        return reason.code

    def abandon(self, slot: Slot, code: int) -> None:
        """The group says that a live generation is void: its landing is to be fenced, the leader is told."""
        self.invalidate(slot, code)
        self._give_up(slot, code, True)

    def cancel_request(self, request: Request, reason: Reason) -> None:
        """See `ReceiverSession.cancel_request`; what this rank voted ready waits for the decision."""
        for slot in self.table.slots:
            if slot.request == request.request and slot.state in _LANDING:
                self.discard(slot, reason.code)

    def lost(self, reason: Reason) -> None:
        """The link is gone: what was landing is voted void; what was voted ready is whole, and waits for the decision."""
        self.joint.leader = None
        for slot in self.table.slots:
            if slot.state in _LANDING:
                self.discard(slot, reason.code, False)
        self.fences.clear()
        for slot in self.table.slots:
            self.fenced(slot.index, False)
        for request in self.requests.requests.values():
            request.in_flight = False

    # ---- what this rank finds -----------------------------------------------------------------------------------

    def completed(self, slot: Slot, now_ns: int) -> None:
        """See `LandingSession.completed`: we vote ready, with what our rows claim."""
        slot.move(st.VOTE)
        if self.joint.group is not None:
            self.joint.group.vote(slot, READY, claim_of(slot, self.memory, self.terms).pack())

    def discard(self, slot: Slot, code: int, tell: bool = True) -> None:
        """See `LandingSession.discard`: we vote the reason. What we voted ready already stays so."""
        if slot.state not in _LANDING:
            return
        self.invalidate(slot, code)
        self.counters.refuse(Reason.from_code(code))
        self.news.append(("refused", Reason.from_code(code), slot.index, slot.generation))
        self._give_up(slot, code, tell)
        if self.joint.group is not None:
            self.joint.group.forget(slot)
            self.joint.group.vote(slot, code)

    def _give_up(self, slot: Slot, code: int, tell: bool) -> None:
        try:
            self._raise_generation(slot)
            if tell and self._asked.get(slot.index) == slot.generation:
                self._tell_reset(slot, code)
        except PeerFault as fault:  # a full outbox or the last generation: this link ends, the slot is settled all the same
            self.broken = fault.reason.code

    def fenced(self, index: int, was_landing: bool) -> None:
        """See `LandingSession.fenced`; rank 0 hears of a slot that is FREE by it."""
        super().fenced(index, was_landing)
        if self.joint.group is not None:
            self.joint.group.give_back(self.table.slots[index])


class OwnMemberSession(MemberSession):
    """State of one session of the group link at a rank whose rows come from elsewhere."""

    def __init__(
        self,
        terms: SessionTerms,
        member: Member,
        table: SlotTable,
        memory: Memory,
        counters: Counters,
        joint: Joint,
        quarantine_bound: int = 0,
    ) -> None:
        super().__init__(terms, member, table, memory, counters, quarantine_bound)
        self.joint = joint
        self.pending: dict[int, Slot] = {}
        """By request: granted slots whose rows this rank has not asked the leader for yet."""
        self._owners: dict[int, int] = {}  # by slot
        self._tokens = bytearray(4 * terms.depth)
        self.decision_bytes = len(self._tokens) if joint.mode == REQUEST_OWNER else 0
        joint.group = self

    @property
    def owners(self) -> dict[int, int]:
        """By slot: the rank that its grant named, as it stands."""
        return self._owners

    # ---- what the owner and the leader link ask for -------------------------------------------------------------

    def refuse_granted(self, slot: Slot, reason: Reason) -> None:
        """No STEP can be sent for a slot in `pending`: it is voted void."""
        self.forget(slot)
        MemberSession.discard(self, slot, reason.code)

    def forget(self, slot: Slot) -> None:
        """Nobody needs to ask for the slot's rows any more."""
        if self.pending.get(slot.request) is slot:
            del self.pending[slot.request]

    def vote(self, slot: Slot, code: int, claim: bytes = b"") -> None:
        """VOTE, with what the rows of a ready one claim."""
        epoch = self.member.vote(slot.index, slot.generation, code)
        if not epoch:
            return
        h = self._about(wire.VOTE, slot.index, slot.generation, epoch)
        h.status = code
        h.payload_length = len(claim)
        h.payload_digest = xxh3_64(claim, 0, len(claim), h.payload_seed(self.terms.leader_nonce)) if claim else 0
        try:
            self.outbox.frame(h, claim, 0, len(claim), NO_KEY)
        except PeerFault as fault:  # rank 0 does not read: the link ends, and every slot is settled by that
            self.broken = fault.reason.code

    def give_back(self, slot: Slot) -> None:
        """Tells rank 0 of a slot that is FREE, once."""
        self._give_back(slot)

    def lost(self, reason: Reason) -> None:
        """See `MemberSession.lost`. Rows may go on landing from the leader until that link is fenced."""
        self._end_exchanges()
        for paper in self.member.link_down():
            self._void(paper, reason.code)
        self.pending.clear()
        self.joint.group = None
        if self.joint.leader is None:
            for index in self.fences:
                self.fenced(index, False)
        self.fences.clear()

    def invalidate(self, slot: Slot, code: int) -> None:
        """See `LandingSession.invalidate`: through the link where the rows land, if there is one."""
        self.forget(slot)
        if self.joint.leader is not None:
            self.joint.leader.abandon(slot, code)
        else:
            super().invalidate(slot, code)

    def fences_due(self) -> int:
        """See `LandingSession.fences_due`: those that the leader's link has been asked for as well."""
        return len(self.fences) + (len(self.joint.leader.fences) if self.joint.leader is not None else 0)

    # ---- what rank 0 says ---------------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`."""
        kind = header.kind
        if kind == wire.REPLY or kind == wire.COMPLETION:
            return -(self.check_peer(header) or Reason.UNEXPECTED_KIND.code)
        code = super().accept(header, landing, now_ns)
        if code == 0 and header.payload_length and kind != wire.EXCHANGE:
            landing.memory = self._tokens
        return code

    def _judge_owner(self, header: Header) -> None:
        everyone = header.owner == wire.OWNER_ALL
        if everyone != (self.joint.mode == VOCABULARY) or (not everyone and header.owner >= self.member.size):
            raise PeerFault(Reason.SEMANTIC_MISMATCH, f"rows for rank {header.owner} in mode {self.joint.mode}")

    def _grant(self, header: Header, now_ns: int) -> int:
        code = super()._grant(header, now_ns)
        slot = self.table.slots[header.slot]
        self._owners[slot.index] = header.owner
        if slot.state == st.GRANTED:
            if self._has_rows(slot):
                self.pending[slot.request] = slot
            else:
                slot.move(st.LAND)
                slot.move(st.VOTE)
                self.vote(slot, READY)
        return code

    def _has_rows(self, slot: Slot) -> bool:
        return self._owners[slot.index] in (wire.OWNER_ALL, self.member.rank)

    def _decide(self, header: Header, now_ns: int) -> int:
        """Where another rank has the rows, the decision says the tokens: this rank's slot takes them."""
        slot = self.table.slots[header.slot]
        wanted = 0
        if header.status == READY and self.joint.mode == REQUEST_OWNER and slot.generation == header.slot_generation:
            wanted = 4 * slot.depth
        if header.payload_length != wanted:
            return -Reason.LENGTH_BOUNDS.code
        if wanted and slot.state == st.VOTED:
            seed = header.payload_seed(self.terms.leader_nonce)
            if xxh3_64(self._tokens, 0, wanted, seed) != header.payload_digest:
                return -Reason.PAYLOAD_DIGEST.code
            tokens = struct.unpack_from(f"<{slot.depth}i", self._tokens)
            if not self._has_rows(slot):
                if any(not 0 <= token < self.terms.vocab_size for token in tokens):
                    return -Reason.ID_RANGE.code
                put_tokens(slot, self.memory, tokens)
            elif tokens != claim_of(slot, self.memory, self.terms).tokens:
                return -Reason.RANK_DISAGREE.code
        return super()._decide(header, now_ns)
