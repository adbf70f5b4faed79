"""The receiver session of rank 0: grants slots by STEP, judges what comes back, and sees to the one decision.

Between a link (through the assembler: headers, landed bytes) and the engine (steps, commits, the clock). A slot is READY only
when every row, its completion and the group have agreed. Alone it decides at once; with a `hub.RankGroup` it votes and is told.
How rows land and are judged is `landing`'s. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import LocalMisuse, PeerFault, Reason
from ..wire import Header
from . import slots as st
from .assembler import Landing
from .landing import LandingSession
from .outbox import NO_KEY
from .shards import REQUEST_OWNER
from .slots import Slot, SlotTable
from .terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..counters import Counters
    from ..memory import Memory
    from .hub import RankGroup
    from .requests import Request, RequestTable

_SLOT_BOUNDS: Final = Reason.SLOT_BOUNDS.code
_SLOT_STATE: Final = Reason.SLOT_STATE.code
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_UNEXPECTED_KIND: Final = Reason.UNEXPECTED_KIND.code
_REQUEST_MISMATCH: Final = Reason.REQUEST_MISMATCH.code


class ReceiverSession(LandingSession):
    """State of one session at the rank that faces the leader. `group` None is a group of one; else `hub` tells what it asks for.

    What the caller reads: see `LandingSession`.
    """

    def __init__(
        self,
        terms: SessionTerms,
        table: SlotTable,
        memory: Memory,
        requests: RequestTable,
        counters: Counters,
        quarantine_bound: int = 0,
        group: RankGroup | None = None,
    ) -> None:
        super().__init__(terms, table, memory, requests, counters, quarantine_bound)
        self.group: RankGroup | None = group
        self.relays = group is not None and group.relays
        self.opened: set[int] | None = None
        """Not None: a request is told to the leader with its first STEP on this link, and these have been (mode "request-owner",
        where only the rank that owns a request asks for its rows)."""
        if group is not None:
            if group.mode == REQUEST_OWNER:
                self.opened = set()
            group.join(self)

    # ---- what the engine asks for -------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """Tells the leader of a request and its committed tokens (OPEN), unless its first STEP will do so (`opened`)."""
        if self.opened is None:
            self._send_open(request)

    def _send_open(self, request: Request) -> None:
        self.terms.judge_tokens(request.tokens, 0, request.max_position)
        self.send_open(request)

    def step(
        self,
        request: Request,
        now_ns: int,
        depth: int,
        temperature: float,
        support: int,
        representation: int,
        target_context: int,
        budget_us: int,
        trace_id: int,
    ) -> Slot | None:
        """Grants a slot for one proposal and queues its STEP. None when no slot is free.

        `support` is 0 for the whole vocabulary (dense) or the k of a top-k. The budget runs from `now_ns`. In a group whose epoch
        is not open: `ProposalDiscarded(peer_lost)`.
        """
        if request.in_flight:
            raise LocalMisuse(f"request {request.request} has a proposal in flight")
        self.terms.judge_step(depth, temperature, support, representation, budget_us)
        if request.anchor + depth > request.max_position:
            raise LocalMisuse(f"depth {depth} goes beyond the request's last position {request.max_position}")
        request.check_round()
        if self.group is not None:
            self.group.check_open(request.request, request.round)
        slot = self.table.take()
        if slot is None:
            if self.table.exhausted():
                raise PeerFault(Reason.GENERATION_EXHAUSTED, "slot_generation")
            return None
        if self.group is not None and self.group.is_ours(request.owner):
            self.ask_first(request)
        h = self.blank(wire.STEP)
        h.request = request.request
        h.request_generation = request.generation
        h.round = request.next_round()
        h.position = request.anchor
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
        h.budget_us = budget_us
        self._mark(slot, h, now_ns)
        slot.seed = request.seed
        request.in_flight = True
        self._grant(slot, h, request, now_ns)
        return slot

    def _grant(self, slot: Slot, h: Header, request: Request, now_ns: int) -> None:
        """Tells the group of the grant, and the leader (STEP) unless another rank asks for the rows."""
        if self.group is None:
            self.outbox.frame(h, None, 0, 0, NO_KEY)
            return
        self.group.granted(slot, h, request.owner)
        if not self.group.is_ours(request.owner):
            self.group.unasked(slot, now_ns)
            return
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def ask_first(self, request: Request) -> None:
        """The OPEN that goes before the first STEP of a request, where `opened` says so."""
        if self.opened is not None and request.request not in self.opened:
            self._send_open(request)
            self.opened.add(request.request)

    def _mark(self, slot: Slot, h: Header, now_ns: int) -> None:
        """Writes what the STEP grants into the slot, and arms its budget."""
        budget_us = h.budget_us  # a 64-bit local in the compiled build: a thousand times a u32 is none
        slot.request = h.request
        slot.request_generation = h.request_generation
        slot.round = h.round
        slot.anchor = h.position
        slot.depth = h.depth
        slot.representation = h.representation
        slot.support = h.support_policy
        slot.context = h.step_context()
        slot.enqueued_ns = now_ns
        slot.deadline_ns = now_ns + budget_us * 1000
        slot.consumers = 1
        self.watchdog.arm(slot.index, slot.deadline_ns)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens of a round (verified or target-only) and tells the leader (COMMIT). `ProposalDiscarded(peer_lost)`, and
        nothing is committed, for a proposal whose group's epoch has ended meanwhile."""
        fresh = self.terms.judge_tokens(tokens, len(request.tokens), request.max_position)
        if self.group is not None and source == wire.VERIFIED:
            self.group.check_commit(request.request, round)
        request.extend(fresh)
        request.in_flight = False
        if self.opened is not None and request.request not in self.opened:
            return
        h = self.blank(wire.COMMIT)
        h.request = request.request
        h.request_generation = request.generation
        h.round = round
        h.position = request.anchor
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.accepted = accepted
        h.source = source
        self.send_tokens(h, fresh.tobytes())

    def close(self, request: Request) -> None:
        """Tells the leader that a request ended (CLOSE); its live proposal, if any, is cancelled first."""
        self.cancel_request(request, Reason.CANCELLED)
        if self.group is not None:
            self.group.forget(request.request)
        if self.opened is not None:
            if request.request not in self.opened:
                return
            self.opened.discard(request.request)
        h = self.blank(wire.CLOSE)
        h.request = request.request
        h.request_generation = request.generation
        h.subject = 0
        h.status = 0
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def cancel_request(self, request: Request, reason: Reason) -> None:
        """Invalidates the request's proposal that is still landing, if there is one."""
        for slot in self.table.slots:
            if slot.request == request.request and slot.state in st.LIVE:
                self.discard(slot, reason.code)

    def lost(self, reason: Reason) -> None:
        """See `LandingSession.lost`. No rank is dead by this: a group decides the proposals as failed, its epoch goes on."""
        super().lost(reason)
        for request in self.requests.requests.values():
            request.in_flight = False
        if self.group is not None:
            self.group.part(self)

    # ---- decisions ----------------------------------------------------------------------------------------------

    def row_done(self, slot: Slot, row: int, header: Header) -> None:
        """See `LandingSession.row_done`: the row goes on to every member."""
        assert self.group is not None
        self.group.row(slot, row, header)

    def completed(self, slot: Slot, now_ns: int) -> None:
        """See `LandingSession.completed`."""
        if self.group is None:
            self.make_ready(slot, now_ns)
        else:
            slot.move(st.VOTE)
            self.group.completed(slot, now_ns)

    def decide(self, slot: Slot, code: int, now_ns: int) -> None:
        """The group's decision on a generation that it holds: 0 is READY. What is void here already stays as it is."""
        if code == 0:
            self.make_ready(slot, now_ns)
        elif slot.state in st.LIVE:
            self.discard(slot, code)

    def discard(self, slot: Slot, code: int, tell: bool = True) -> None:
        """Invalidates a live generation: counted, told to the leader (unless it told us) and to the group; the generation of its
        request rises."""
        self.invalidate(slot, code)
        self.settle_void(slot, code)
        try:
            self._raise_generation(slot)
            if tell:
                self._tell_reset(slot, code)
        except PeerFault as fault:  # a full outbox or the last generation: the session ends, but every slot is settled
            self.broken = fault.reason.code
        if self.group is not None:
            self.group.failed(slot, code)
        self.bound_quarantine()

    def _raise_generation(self, slot: Slot) -> None:
        request = self.requests.get(slot.request)
        if request is not None and request.generation == slot.request_generation:
            request.discard()

    def _tell_reset(self, slot: Slot, code: int) -> None:
        if self.opened is not None and slot.request not in self.opened:
            return
        h = self.notice(wire.RESET, slot.request, slot.request_generation, slot.round, slot.index, slot.generation, code)
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def void(self, slot: Slot, reason: Reason) -> None:
        """The target could not use a READY proposal after all: the leader drops what it speculated (RESET). The slot is held
        until its consumer releases it."""
        self._tell_reset(slot, reason.code)

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`. Identity first, then bounds, then the slot, then what the row claims (SPEC 4)."""
        code = self.check_peer(header)
        if code:
            return -code
        if header.payload_length > self.terms.max_payload:
            return -_LENGTH_BOUNDS
        if now_ns >= self.watchdog.next_ns:
            self.tick(now_ns)
        kind = header.kind
        if kind == 4 or kind == 5:  # REPLY, COMPLETION
            return self.accept_row(header, landing)
        if kind == 7 or kind == 8 or kind == 10:  # RESET, CANCEL, STATUS
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
        return self._notice(header)

    def _notice(self, header: Header) -> int:
        """RESET, CANCEL or STATUS of the leader: the generation they name dies. A STATUS that names none is the leader's last
        word on the link, which it closes itself."""
        code = header.status
        if code < 1 or code > len(Reason):
            return -Reason.RESERVED_BITS.code
        reason = Reason.from_code(code)
        self.news.append(("leader_status", reason, header.slot, header.slot_generation))
        if header.kind == wire.STATUS and header.slot_generation == 0:
            self.counters.add("peer_status")
            self.peer_status = code
            return 0
        if header.slot >= self.terms.max_slots:
            return -_SLOT_BOUNDS
        slot = self.table.slots[header.slot]
        if header.slot_generation > slot.generation:
            return -_SLOT_STATE
        if slot.generation == header.slot_generation and slot.state in st.LIVE:
            if header.request != slot.request:
                self.discard(slot, _REQUEST_MISMATCH)
            else:
                self.discard(slot, code, tell=False)
        return 0
