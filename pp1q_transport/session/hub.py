"""Rank 0's end of a rank group: the `RankGroup` that joins its parts, and one `HubSession` a group link.

Between rank 0's `ReceiverSession` (slots, rows, the leader), the `Coordinator` (which decides) and the group links. Does no I/O:
frames go into outboxes. Judges no row. SPEC section 4. By mode of the group: "replicate" relays each row that rank 0 has
validated, digested anew for the link; in "vocabulary" every rank has rows of its own and votes with what they claim, which must
go together; in "request-owner" one rank has the rows of a request, and its vote carries the tokens that the decision tells all.

What the owner (a daemon) does, all in one thread:

- makes one `RankGroup` in its life, and gives it to every `ReceiverSession` (`group=`); table and memory outlive sessions;
- makes a `HubSession` for each session of a group link (HELLO roles coordinator and member), calls `up()` once its link
  runs and `lost(reason)` when it is gone, and ends the link when `broken` is set, as for every session;
- pumps every link after every input: one frame on one link may queue frames on all of them;
- while `asking`, asks its target process for the digest of its committed state and hands it to `agree`; holds commits back then
  until `open`; an unequal answer (rank_disagree) asks again, and the owner paces how fast it answers;
- calls `leave(reason)` when rank 0's own target process is gone: the epoch ends, and `asking` comes back;
- asks `may_commit` before its target process commits and before it releases; `ReceiverSession.commit` refuses by itself
  what can't be committed any more; with no session to the leader, `check_commit` does. What is refused goes on target-only;
- expects `ProposalDiscarded(peer_lost)` from `ReceiverSession.step` while the group is not `open`.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import xxh3_64
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from . import slots as st
from .assembler import Landing
from .claims import Claims, claim_of, put_tokens
from .exchange_frames import judge_header, part_of
from .group import READY, Action, Announce, Coordinator, Decide, Disagreed, Freed, Lost, Phase
from .group_exchanges import GroupExchanges
from .machine import SessionMachine
from .outbox import NO_KEY
from .parts import PART_BYTES_MOST
from .requests import RequestTable
from .shards import CLAIM_BYTES_MOST, REPLICATE, REQUEST_OWNER, Claim, judge_claims
from .slots import GROUP_CONSUMER

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..counters import Counters
    from ..memory import Memory
    from ..wire import Header
    from .receiver import ReceiverSession
    from .slots import Slot, SlotTable
    from .terms import SessionTerms

_GROUP_BIT: Final = 1 << GROUP_CONSUMER
_FROM_MEMBERS: Final = frozenset({wire.VOTE, wire.RELEASED, wire.AGREE, wire.LEAVE, wire.STATUS, wire.EXCHANGE})
_ABOUT_SLOTS: Final = frozenset({wire.VOTE, wire.RELEASED})
_WITHOUT_REASON: Final = frozenset({wire.RELEASED, wire.AGREE})
_WITH_REASON: Final = frozenset({wire.LEAVE, wire.STATUS})


class RankGroup:
    """A group of `size` ranks (2..8) as rank 0 sees it. `news` are rare events that the owner logs: (event, reason or
    None, epoch, rank or number of ranks). Counted in `counters`: epochs_opened, epochs_ended, rank_disagree, generation_stale."""

    def __init__(
        self, size: int, counters: Counters, coordinator: Coordinator | None = None, mode: str = REPLICATE
    ) -> None:
        self.coordinator = coordinator or Coordinator(size)
        self.mode = mode
        if mode != REPLICATE:
            self.coordinator.verdict = self._verdict
        self.counters = counters
        self.hubs: dict[int, HubSession] = {}
        self.session: ReceiverSession | None = None
        self.table: SlotTable | None = None
        self.news: list[tuple[str, Reason | None, int, int]] = []
        self.exchanges = GroupExchanges(self, size)
        self._last_epoch = self.coordinator.epoch
        self.claims: dict[int, Claims] = {}  # by slot: what the ranks say of the rows they judged, as it stands
        self._commitable: dict[int, tuple[int, int]] = {}  # request -> (round, epoch) of its latest READY proposal

    # ---- what the owner asks ------------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """The number of the present epoch."""
        return self.coordinator.epoch

    @property
    def links(self) -> Mapping[int, SessionMachine]:
        """The group links that are up, by rank."""
        return self.hubs

    @property
    def open(self) -> bool:
        """Whether STEPs may be sent."""
        return self.coordinator.open

    @property
    def asking(self) -> bool:
        """Whether rank 0's own committed state is asked for (`agree`)."""
        return self.coordinator.asking

    def agree(self, state_low: int, state_high: int) -> bool:
        """Rank 0's own committed state (128 bits). False when nobody asks."""
        if not self.coordinator.asking:
            return False
        floor = self.table.highest() if self.table is not None else 0
        self._perform(self.coordinator.agreed(0, self.coordinator.epoch, (state_low, state_high), floor), 0)
        return True

    def leave(self, reason: Reason) -> None:
        """Rank 0's own target process is gone: the epoch ends (no-op while none is under way)."""
        if self.coordinator.phase is not Phase.GATHERING:
            self.news.append(("rank_left", reason, self.epoch, 0))
            self._perform(self.coordinator.left(0, self.coordinator.epoch), 0)

    def may_commit(self, slot: int, generation: int, epoch: int) -> bool:
        """Whether this READY proposal may be committed now. Ask before it is released."""
        return self.coordinator.may_commit(epoch, slot, generation)

    # ---- what rank 0's session tells ----------------------------------------------------------------------------

    def join(self, session: ReceiverSession) -> None:
        """A session with the leader begins."""
        if self.session is not None:
            raise LocalMisuse("the last session with the leader has not ended")
        floor = self.coordinator.floor
        if self.table is not None:  # another table, of other sizes, goes on where the last one stood
            floor = max(floor, self.table.floor, self.table.highest())
        self.session = session
        self.table = session.table
        if self.table.floor < floor:
            self.table.floor = floor

    def part(self, session: ReceiverSession) -> None:
        """It has ended; its live proposals are discarded already."""
        if self.session is session:
            self.session = None

    def check_open(self, request: int, round: int) -> None:
        """Raises `ProposalDiscarded(peer_lost)` while not every rank is up and agreed."""
        if not self.coordinator.open:
            raise ProposalDiscarded(Reason.PEER_LOST, request, round)

    def check_commit(self, request: int, round: int) -> None:
        """Raises `ProposalDiscarded(peer_lost)` unless the request's proposal of this round became READY in the open epoch."""
        if self._commitable.get(request) != (round, self.coordinator.epoch) or not self.coordinator.open:
            raise ProposalDiscarded(Reason.PEER_LOST, request, round)
        del self._commitable[request]

    def refuse_step(self, request: int, generation: int, round: int, reason: Reason) -> None:
        """Rank 0 sends no STEP for this round of a request (no session, a breaker, a drain): every rank is told, so that none
        waits for a grant that never comes."""
        for hub in self.hubs.values():
            hub.refuse_step(request, generation, round, reason)

    def forget(self, request: int) -> None:
        """The request is closed."""
        self._commitable.pop(request, None)

    @property
    def relays(self) -> bool:
        """Whether rank 0's rows go on to the members."""
        return self.mode == REPLICATE

    def is_ours(self, owner: int) -> bool:
        """Whether rank 0 itself asks the leader for the rows of a request of that owner."""
        return self.mode != REQUEST_OWNER or owner == 0

    def granted(self, slot: Slot, step: Header, owner: int = 0) -> None:
        """The slot is granted by `step`: every member is granted it too. `owner`: the rank whose request it is, where that counts
        (mode "request-owner")."""
        self.coordinator.granted(slot.index, slot.generation)
        slot.epoch = self.coordinator.epoch
        slot.consumers |= _GROUP_BIT
        stated = owner if self.mode == REQUEST_OWNER else wire.OWNER_ALL
        if self.mode != REPLICATE:
            self.claims[slot.index] = Claims(slot.generation, stated, slot.depth)
        for hub in self.hubs.values():
            hub.grant(slot, step, stated)

    def unasked(self, slot: Slot, now_ns: int) -> None:
        """Another rank owns the request: rank 0 has nothing against its proposal."""
        slot.move(st.LAND)
        slot.move(st.VOTE)
        self._perform(self.coordinator.vote(0, slot.epoch, slot.index, slot.generation, READY), now_ns)

    def row(self, slot: Slot, row: int, header: Header) -> None:
        """A row that passed every check goes on to the members."""
        assert self.session is not None
        for hub in self.hubs.values():
            hub.row(slot, row, header, self.session.memory)

    def completed(self, slot: Slot, now_ns: int) -> None:
        """Rank 0 has nothing against the proposal: the members get the COMPLETION, and rank 0 votes."""
        if self.relays:
            for hub in self.hubs.values():
                hub.complete(slot)
        else:
            assert self.session is not None
            self.claims[slot.index].rows[0] = claim_of(slot, self.session.memory, self.session.terms)
        self._perform(self.coordinator.vote(0, slot.epoch, slot.index, slot.generation, READY), now_ns)

    def failed(self, slot: Slot, code: int) -> None:
        """Rank 0 discarded the generation. It decides for all, unless it is decided already."""
        self._perform(self.coordinator.fail(slot.index, slot.generation, code), 0)

    # ---- what the group links tell ------------------------------------------------------------------------------

    def hub_up(self, hub: HubSession) -> None:
        """A member's link is up."""
        self.hubs[hub.rank] = hub
        self._perform(self.coordinator.member_up(hub.rank), 0)

    def hub_down(self, hub: HubSession, reason: Reason) -> None:
        """A member's link is lost: the epoch ends."""
        if self.hubs.get(hub.rank) is not hub:
            return
        del self.hubs[hub.rank]
        self.news.append(("rank_lost", reason, self.epoch, hub.rank))
        self._perform(self.coordinator.member_down(hub.rank), 0)

    def heard(self, hub: HubSession, header: Header, now_ns: int, claim: Claim | None = None) -> None:
        """A member's frame, its header judged; `claim` is what a vote says of its rows. Raises `PeerFault` for one that it should
        never have sent."""
        coordinator, rank, epoch = self.coordinator, hub.rank, header.epoch
        if self.hubs.get(rank) is not hub:
            raise PeerFault(Reason.SESSION_MISMATCH, f"rank {rank} has another link by now")
        stale = coordinator.stale
        if header.kind == wire.VOTE:
            if self.session is not None:
                self.session.tick(now_ns)  # a budget that is spent goes before a vote that arrives after it
            self._note_claim(rank, header, claim)
            actions = coordinator.vote(rank, epoch, header.slot, header.slot_generation, header.status)
        elif header.kind == wire.RELEASED:
            actions = coordinator.released(rank, epoch, header.slot, header.slot_generation)
        elif header.kind == wire.AGREE:
            actions = coordinator.agreed(rank, epoch, (header.state_low, header.state_high), header.floor)
        else:
            actions = coordinator.left(rank, epoch)
            self.news.append(("rank_left", Reason.from_code(header.status), epoch, rank))
        if coordinator.stale != stale:
            self.counters.refuse(Reason.GENERATION_STALE)
        self._perform(actions, now_ns)

    # ---- what ranks claim of their rows -------------------------------------------------------------------------

    def _note_claim(self, rank: int, header: Header, claim: Claim | None) -> None:
        """Keeps what a ready vote says; raises `PeerFault(length_bounds)` for one that says nothing, or may not say anything."""
        claims = self.claims.get(header.slot)
        if claims is None or claims.generation != header.slot_generation:
            expected = False if self.mode == REPLICATE else claim is not None  # the coordinator judges the rest
        else:
            expected = header.status == READY and claims.owner in (wire.OWNER_ALL, rank)
            if expected and claim is not None:
                claims.rows.setdefault(rank, claim)
        if expected != (claim is not None):
            raise PeerFault(Reason.LENGTH_BOUNDS, f"rank {rank} votes {'with' if claim else 'without'} a claim")

    def _verdict(self, slot: int, generation: int) -> int:
        """Whether the rows that all ranks judged go together (see `Coordinator.verdict`)."""
        claims = self.claims[slot]
        assert claims.generation == generation
        assert self.session is not None
        vocab_size = self.session.terms.vocab_size
        code = judge_claims(claims.rows, vocab_size, claims.depth)
        if code == 0 and any(not 0 <= token < vocab_size for claim in claims.rows.values() for token in claim.tokens):
            return Reason.ID_RANGE.code
        return code

    def _tokens(self, slot: int) -> tuple[int, ...]:
        """What a READY decision tells ranks that have no rows."""
        claims = self.claims[slot]
        return claims.rows[claims.owner].tokens

    # ---- what follows -------------------------------------------------------------------------------------------

    def _perform(self, actions: list[Action], now_ns: int) -> None:
        for action in actions:
            if isinstance(action, Decide):
                self._decide(action, now_ns)
            elif isinstance(action, Lost):
                self._withdraw(action.slot)
                self._settle(action.slot, action.generation, Reason.PEER_LOST.code, now_ns)
            elif isinstance(action, Announce):
                self._announce(action)
            elif isinstance(action, Freed):
                assert self.table is not None
                self.table.release(self.table.slots[action.slot], action.generation, 0, GROUP_CONSUMER)
            else:
                self._disagreed(action)

    def _decide(self, decision: Decide, now_ns: int) -> None:
        if decision.code != READY:
            self._withdraw(decision.slot)
        tokens = self._tokens(decision.slot) if self.mode == REQUEST_OWNER and decision.code == READY else ()
        for hub in self.hubs.values():
            hub.decide(decision, tokens)
        if tokens and self.session is not None and not self.is_ours(self.claims[decision.slot].owner):
            put_tokens(self.session.table.slots[decision.slot], self.session.memory, tokens)
        self._settle(decision.slot, decision.generation, decision.code, now_ns)

    def _settle(self, index: int, generation: int, code: int, now_ns: int) -> None:
        if self.session is None:
            return
        slot = self.session.table.slots[index]
        assert slot.generation == generation
        if code == READY:
            self._commitable[slot.request] = (slot.round, slot.epoch)
        self.session.decide(slot, code, now_ns)

    def _withdraw(self, slot: int) -> None:
        for hub in self.hubs.values():
            hub.outbox.withdraw(slot)

    def _announce(self, action: Announce) -> None:
        if action.phase is Phase.OPEN:
            self.counters.add("epochs_opened")
            self.exchanges.begin()
            if self.table is not None:
                self.table.floor = max(self.table.floor, self.coordinator.floor)
        else:
            self._commitable.clear()
            self.exchanges.end()
            if self.session is not None:  # what was ready can't be committed any more: its request may go on
                for request in self.session.requests.requests.values():
                    request.in_flight = False
        if action.epoch != self._last_epoch:
            self._last_epoch = action.epoch
            self.counters.add("epochs_ended")
        self.news.append(("epoch_" + action.phase.name.lower(), None, action.epoch, 1 + len(self.hubs)))
        for hub in self.hubs.values():
            hub.announce(action)

    def _disagreed(self, action: Disagreed) -> None:
        self.counters.refuse(Reason.RANK_DISAGREE)
        self.news.append(("rank_disagree", Reason.RANK_DISAGREE, action.epoch, len(set(action.digests))))


class HubSession(SessionMachine):
    """Rank 0's end of the group link to `rank`. `terms` are the group link's own: its leader is the coordinator."""

    def __init__(self, terms: SessionTerms, group: RankGroup, rank: int, counters: Counters) -> None:
        super().__init__(terms, RequestTable(), counters, terms.leader_nonce, terms.receiver_nonce)
        self.group = group
        self.rank = rank
        self._digests = [bytearray(16 * terms.depth) for _ in range(terms.max_slots)]
        self._ballot = bytearray(max(CLAIM_BYTES_MOST, PART_BYTES_MOST))

    def up(self) -> None:
        """The link runs: the rank is up."""
        self.group.hub_up(self)

    def lost(self, reason: Reason) -> None:
        """The link is gone, and with it the rank."""
        self.group.hub_down(self, reason)

    # ---- frames to the member -----------------------------------------------------------------------------------

    def grant(self, slot: Slot, step: Header, owner: int) -> None:
        """GRANT of what `step` grants."""
        h = self._about(wire.GRANT, slot)
        h.position = slot.anchor
        h.representation = slot.representation
        h.seed = slot.seed
        h.context = slot.context
        h.target_context = step.target_context
        h.trace_id = step.trace_id
        h.support_policy = slot.support
        h.budget_us = step.budget_us
        h.epoch = slot.epoch
        h.owner = owner
        self._send(h)

    def row(self, slot: Slot, row: int, header: Header, memory: Memory) -> None:
        """REPLY with the row in the slot of `memory`, the slot region; it stays there until the member gave its slot back."""
        h = self._about(wire.REPLY, slot)
        h.position = header.position
        h.representation = header.representation
        h.entry_count = header.entry_count
        h.payload_length = header.payload_length
        h.token = header.token
        h.draw_counter = header.draw_counter
        h.context = header.context
        h.first_id = header.first_id
        h.end_id = header.end_id
        h.shard_mass = header.shard_mass
        h.mass_before = header.mass_before
        at = slot.rows_at + row * slot.row_bytes
        h.payload_digest = xxh3_64(memory, at, h.payload_length, h.payload_seed(self.terms.leader_nonce))
        wire.put_digest_entry(self._digests[slot.index], row, h.position, h.payload_length, h.payload_digest)
        self._send(h, memory, at, h.payload_length, slot.index)

    def complete(self, slot: Slot) -> None:
        """COMPLETION of the rows sent on."""
        h = self._about(wire.COMPLETION, slot)
        h.position = slot.anchor
        h.context = slot.context
        h.positions = slot.depth
        h.status = 0
        h.reply_size = slot.reply_bytes
        h.reply_digest = xxh3_64(self._digests[slot.index], 0, slot.depth * 16, 0)
        self._send(h)

    def decide(self, decision: Decide, tokens: tuple[int, ...] = ()) -> None:
        """DECIDE, with the proposal's tokens for a rank that has no rows."""
        h = self.blank(wire.DECIDE)
        h.slot = decision.slot
        h.slot_generation = decision.generation
        h.epoch = decision.epoch
        h.status = decision.code
        if not tokens:
            self._send(h)
            return
        payload = array("i", tokens).tobytes()
        h.payload_length = len(payload)
        h.payload_digest = xxh3_64(payload, 0, len(payload), h.payload_seed(self.terms.leader_nonce))
        self._send(h, bytearray(payload), 0, len(payload))

    def refuse_step(self, request: int, generation: int, round: int, reason: Reason) -> None:
        """STATUS about a STEP that was not sent."""
        self._send(self.notice(wire.STATUS, request, generation, round, 0, 0, reason.code))

    def announce(self, action: Announce) -> None:
        """EPOCH."""
        h = self.blank(wire.EPOCH)
        h.epoch = action.epoch
        h.phase = int(action.phase)
        self._send(h)

    def _about(self, kind: int, slot: Slot) -> Header:
        h = self.blank(kind)
        h.request = slot.request
        h.request_generation = slot.request_generation
        h.slot = slot.index
        h.slot_generation = slot.generation
        h.round = slot.round
        h.depth = slot.depth
        return h

    def _send(self, h: Header, memory: Memory | None = None, offset: int = 0, length: int = 0, key: int = NO_KEY) -> None:
        """A member that does not read loses its link: after a frame that had no room none follows, so it can't vote ready."""
        if self.broken:
            return
        try:
            self.outbox.frame(h, memory, offset, length, key)
        except PeerFault as fault:
            self.broken = fault.reason.code

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`. No frame of a member has a payload but a vote that says what its rows claim."""
        code = self.check_peer(header)
        if code:
            return -code
        landing.memory = self._ballot
        if header.kind == wire.EXCHANGE:
            return -(Reason.RANK_DISAGREE.code if header.shard != self.rank else judge_header(header))
        if header.payload_length > (8 + 12 * self.terms.depth if self.group.mode != REPLICATE else 0):
            return -Reason.LENGTH_BOUNDS.code
        if header.kind not in _FROM_MEMBERS:
            return -Reason.UNEXPECTED_KIND.code
        if header.kind in _ABOUT_SLOTS and header.slot >= self.terms.max_slots:
            return -Reason.SLOT_BOUNDS.code
        if header.payload_digest and not header.payload_length:
            return -Reason.RESERVED_BITS.code
        status = 0 if header.kind == wire.AGREE else header.status
        unfit = status if header.kind in _WITHOUT_REASON else not status if header.kind in _WITH_REASON else False
        if status > len(Reason) or unfit:
            return -Reason.RESERVED_BITS.code
        return 0

    def progress(self, header: Header, landed: int) -> None:
        """See `FrameSink.progress`."""

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        if header.kind == wire.STATUS:
            self.counters.add("peer_status")
            self.peer_status = header.status
            self.news.append(("member_status", Reason.from_code(header.status), header.slot, header.slot_generation))
            return 0
        try:
            if header.kind == wire.EXCHANGE:
                part = part_of(header, self._ballot, self.terms.leader_nonce)
                self.group.exchanges.heard(self.rank, self, header, part)
                return 0
            self.group.heard(self, header, now_ns, self._claim(header) if header.payload_length else None)
        except PeerFault as fault:
            self.news.append(("member_fault", fault.reason, header.slot, header.slot_generation))
            return -fault.reason.code
        return 0

    def _claim(self, header: Header) -> Claim:
        """The payload of a vote. Raises `PeerFault`."""
        seed = header.payload_seed(self.terms.leader_nonce)
        if xxh3_64(self._ballot, 0, header.payload_length, seed) != header.payload_digest:
            raise PeerFault(Reason.PAYLOAD_DIGEST, f"a vote of rank {self.rank}")
        return Claim.unpack(self._ballot, header.payload_length)
