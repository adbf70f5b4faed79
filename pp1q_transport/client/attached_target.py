"""The target side beside a daemon: steps and commits as records, q read in place from the daemon's slots.

Between a target model's loop and the channel of its receiver daemon. The slots are mapped read-only; no payload byte passes
through here. This process's requests are the truth about committed tokens: a daemon that comes back hears them anew. SPEC 4 and
9.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import monotonic_ns
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from ..local import messages as m
from ..local.attach import Flag, Role
from ..session.shards import GROUP_MODES, REPLICATE, range_of
from ..staging import SlotViews
from .agreement import AgreeHook, adopt, state_digest
from .attached import AttachedSide
from .attached_ticket import GRACE_NS, LOOK_NS, Patience, RecordTicket
from .exchanging import Exchanging
from .proposal import Proposal, ProposalFacts
from .target_side import DEFAULT_BUDGET_US, TargetSide, check_numbers, check_step, refuse_unsettled

if TYPE_CHECKING:
    from pathlib import Path

    from ..local.attach import Attachment
    from ..session.requests import Request

AGREE_PAUSE_NS: Final = 5_000_000  # before the next answer, unless the epoch opened; doubled each time
AGREE_PAUSE_MOST_NS: Final = 500_000_000


class AttachedReceiver(Exchanging, TargetSide):
    """The target side of one rank, beside its daemon."""

    role = Role.RECEIVER_TARGET
    hears = m.DAEMON_TO_TARGET

    def __init__(self, path: str | Path, rank: int = 0, idle: str = "block", backoff_seed: int | None = None) -> None:
        TargetSide.__init__(self)
        Exchanging.__init__(self)
        self._views: SlotViews | None = None
        self._limits: dict[str, int] = {}
        self._dense = self._sparse = True
        self.leader_session = 0
        """The daemon's session with a leader's, 0 for none: a group's STEP meets `peer_lost` while rank 0's daemon has none."""
        self.epoch = 0
        """The group's epoch, as (the low half of its coordinator's boot nonce) << 32 | number; 0 in a group of one."""
        self._life = 0
        self.group_mode = REPLICATE
        """How the ranks of the group share the rows: "replicate", "vocabulary" or "request-owner"."""
        self._grouped = False
        self._open = False
        self._asked = 0  # the epoch that wants to know our committed state
        self._agree: AgreeHook | None = None
        self._agree_from_ns = 0  # ranks that differ are asked again at once: they are not to do nothing else
        self._agree_pause_ns = 0
        self._answer: dict[int, Reason | None] = {}  # request -> what became of its commit, while we wait for that
        self._late_ns = 0  # since when a STEP has had no word past its budget
        self._next_ticket = 1
        self._tickets: dict[int, RecordTicket] = {}
        self._held: dict[int, int] = {}  # slot -> the generation this process reads
        AttachedSide.__init__(self, path, rank, idle, backoff_seed)

    # ---- the daemon's coming and going --------------------------------------------------------------------------

    @property
    def up(self) -> bool:
        """See `AttachedSide.up`."""
        return self._open if self._grouped else self.leader_session != 0

    @property
    def between_epochs(self) -> bool:
        """Whether this is a rank of a group whose ranks must agree before anything goes on (`wait_for_peer`)."""
        return self._grouped and not self._open

    @property
    def missing(self) -> str:
        """What is not there while this side is not `up`, in words."""
        if not self.attached:
            return f"no daemon at {self.path}"
        return "the ranks of the group have not agreed yet" if self._grouped else f"no session through the daemon at {self.path}"

    @property
    def views(self) -> SlotViews:
        """See `ProposalHolder.views`."""
        if self._views is None:
            raise LocalMisuse("this receiver is closed")
        return self._views

    def _joined(self, attachment: Attachment) -> None:
        shape = attachment.geometry
        geometry = shape.slots()
        try:
            self.group_mode = GROUP_MODES[shape.group_mode]
            first, end = range_of(self.group_mode, shape.vocab_size, shape.group_size, shape.rank)
        except (IndexError, LocalMisuse) as error:
            raise PeerFault(Reason.LIMITS_MISMATCH, f"a group of mode {shape.group_mode}: {error}") from None
        self._views = SlotViews(attachment.regions[0], geometry, end - first, first_id=first)
        self._limits = {
            name: getattr(shape, name)
            for name in ("vocab_size", "depth", "support", "max_slots", "max_context_tokens", "group_size")
        }
        self._grouped = shape.group_size > 1
        self._dense, self._sparse = bool(shape.flags & Flag.DENSE), bool(shape.flags & Flag.SPARSE)
        self._map(attachment.regions)

    def _after_join(self) -> None:
        for request in self.requests.requests.values():
            self.announce(request)
        self.ring()

    def _parted(self) -> None:
        self._unmap(touched=self.copies.running)
        self.leader_session = 0
        self._open = False
        self.forget_exchanges()
        self._asked = 0
        self._life += 1
        self._held.clear()
        tickets = list(self._tickets.values())
        self._tickets.clear()
        for ticket in tickets:
            ticket.reason = Reason.PEER_LOST
        self._discard_all()  # whatever was drawn for them is dead, known to us or not

    def give_up_daemon(self) -> None:
        """A daemon that let a STEP's budget pass without a word hangs: it is left, and looked for anew."""
        self._lose(Reason.TIMEOUT)

    def before_sleep(self) -> tuple[object, ...] | None:
        """See `AttachedSide.before_sleep`."""
        now_ns = monotonic_ns()
        if self.rank or all(ticket.deadline_ns > now_ns for ticket in self._tickets.values()):
            self._late_ns = 0
        elif not self._late_ns:
            self._late_ns = now_ns  # seen for the first time: a pause of our own may be all there is to it (`Patience`)
        elif now_ns - self._late_ns >= LOOK_NS:
            self.give_up_daemon()
            return None
        return super().before_sleep()

    # ---- records ------------------------------------------------------------------------------------------------

    def _record(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        if kind == m.READY:
            self._ready(fields)
        elif kind == m.DISCARDED:
            request, number, reason, round_number, generation, _zero = fields
            self._raise_generation(request, generation)
            self._settle(number, Reason.from_code(reason), round_number, generation)
            if not number and request in self._answer:
                self._answer[request] = Reason.from_code(reason)
        elif kind == m.UP:
            self.leader_session = fields[0]
        elif kind == m.DOWN:
            self.leader_session = 0
            self._discard_all()
        elif kind == m.COMMITTED:
            self._answer.pop(fields[0], None)
        elif kind == m.EXCHANGED:
            self.exchanged(fields, payload)
        elif kind == m.EPOCH:
            self._turn_epoch(fields[3] << 32 | fields[0], fields[1])
        elif kind == m.REFUSED:
            text = bytes(payload).decode("utf-8", "replace")
            self.counters.add("refused_by_daemon")
            self.log.error("refused_by_daemon", request=fields[0], reason=Reason.from_code(fields[2]).value, detail=text)
            self._settle(fields[1], Reason.from_code(fields[2]))

    def _discard_all(self) -> None:
        for request in self.requests.requests.values():
            if self.rank == 0 and request.generation < wire.U32_MAX:  # rank 0 counts the generations
                request.discard()
            request.in_flight = False  # nothing is drawn any more for one whose generations ran out: its STEPs are refused

    def _raise_generation(self, number: int, generation: int) -> None:
        request = self.requests.get(number)
        if request is not None:
            request.generation = max(request.generation, generation)

    def _settle(self, number: int, reason: Reason, round_number: int | None = None, generation: int = 0) -> None:
        ticket = self._tickets.pop(number, None)
        if ticket is not None:
            ticket.reason = reason
            ticket.generation = generation
            if self.rank and round_number is not None:
                self._as_rank_0_counts(ticket, round_number, generation)
            ticket.request.in_flight = False

    def _as_rank_0_counts(self, ticket: RecordTicket, round_number: int, generation: int) -> None:
        """Every rank samples by the same noise: rounds and generations are those of rank 0, be they less than what we had."""
        ticket.round = round_number
        ticket.request.round = round_number + 1
        ticket.request.generation = generation

    def _ready(self, fields: tuple[int, ...]) -> None:
        _request, number, _latency_ns, slot, slot_generation, generation, round_number, anchor, depth, form, epoch = fields
        ticket = self._tickets.pop(number, None)
        if ticket is None:  # nobody waits for it any more (its request was closed): the slot goes back at once
            self.send(m.RELEASE, slot, slot_generation)
            self.ring()
            return
        ticket.request.generation = max(ticket.request.generation, generation)
        if self.rank:
            if anchor != ticket.request.anchor:
                self._disagree(ticket, anchor)
                return
            self._as_rank_0_counts(ticket, round_number, generation)
        ticket.facts = ProposalFacts(
            session=self.leader_session,
            slot=slot,
            slot_generation=slot_generation,
            request_generation=generation,
            round=round_number,
            anchor=anchor,
            depth=depth,
            representation=form,
            latency_ns=monotonic_ns() - ticket.enqueued_ns,
            epoch=epoch,
            trace_id=ticket.trace_id,
            life=self._life,
            owner=ticket.request.owner,
        )
        self._held[slot] = slot_generation
        if self.copies.stage is not None:
            begins_ns = monotonic_ns() if self.rank else ticket.enqueued_ns  # the budget is rank 0's, which may be behind us
            proposal = Proposal(self, ticket.request, ticket.facts)
            ticket.rows_up = self.copies.begin(proposal, ticket.request, ticket.enqueued_ns, begins_ns + ticket.budget_ns)

    def _disagree(self, ticket: RecordTicket, anchor: int) -> None:
        """Rank 0 has other committed tokens than we, or we count its rounds differently: this rank leaves, which ends the epoch,
        and all agree anew. Rounds alone say nothing: rank 0's are adopted, whatever ours were."""
        request, ours = ticket.request.request, ticket.request.anchor
        self.log.error("rank_disagree", reason=Reason.RANK_DISAGREE.value, request=request, anchor=anchor, ours=ours)
        ticket.reason = Reason.RANK_DISAGREE
        self._lose(Reason.RANK_DISAGREE)

    def _take(self) -> int:
        """See `AttachedSide._take`. Copies under way are looked at with it."""
        taken = super()._take()
        if self.copies:
            self.copies.look()
        return taken

    # ---- what the target asks for -------------------------------------------------------------------------------

    def limit(self, name: str) -> int:
        """See `TargetSide.limit`."""
        return self._limits[name]

    @property
    def free_slots(self) -> int:
        """See `TargetSide.free_slots`."""
        return max(0, self._limits["max_slots"] - len(self._tickets) - len(self._held))

    def fresh_seed(self) -> int:
        """See `TargetSide.fresh_seed`. Ranks that drew their own would verify with different noise."""
        if self._grouped:
            raise LocalMisuse("in a group of several ranks open_request needs a seed, the same on every rank")
        return super().fresh_seed()

    def announce(self, request: Request) -> None:
        """See `TargetSide.announce`."""
        fixed = request.request, request.seed, request.max_position, request.generation, request.round, len(request.tokens)
        self.send(m.OPEN, *fixed, payload=request.tokens.tobytes())
        self.ring()

    def retire(self, request: Request) -> None:
        """See `TargetSide.retire`."""
        for number in [number for number, ticket in self._tickets.items() if ticket.request is request]:
            self._settle(number, Reason.CANCELLED)
        self.send(m.CLOSE, request.request)
        self.ring()

    def enqueue(
        self,
        request: Request,
        *,
        depth: int | None = None,
        temperature: float = 1.0,
        support: int | None = None,
        budget_us: int = DEFAULT_BUDGET_US,
        target_context: int = 0,
        trace_id: int = 0,
    ) -> RecordTicket:
        """Queues a STEP and returns at once. `support` None asks for dense q, k for the top-k.

        Raises `ProposalDiscarded(peer_lost)` when no session runs (`cancelled` while the daemon drains), `LocalMisuse` when
        no slot is free or what is asked is outside the session's terms.
        """
        self._check_open(request)
        if not self.up or self.draining:
            self.serve(0)  # a loop that does nothing but step must still hear of the daemon's end and return
        if not self.up:
            raise ProposalDiscarded(
                Reason.PEER_LOST, request.request, request.round, epoch_over=self.between_epochs, detail=self.missing
            )
        if self.draining and not self._grouped:  # in a group rank 0's daemon says so, to every rank
            raise ProposalDiscarded(Reason.CANCELLED, request.request, request.round)
        limits = self._limits
        check_step(limits["depth"], limits["support"], self._dense, self._sparse, depth, temperature, support)
        check_numbers(budget_us, target_context, trace_id)
        if request.in_flight:
            refuse_unsettled(request, any(ticket.request is request for ticket in self._tickets.values()))
        if not self.free_slots:
            raise LocalMisuse("no free slot: release proposals, or negotiate more slots")
        drafted = self._limits["depth"] if depth is None else depth
        if request.anchor + drafted > request.max_position:
            raise LocalMisuse(f"depth {drafted} goes beyond the request's last position {request.max_position}")
        ticket = RecordTicket(self, request, self._next_ticket, trace_id, budget_us)
        self._next_ticket += 1
        round_number = request.next_round()
        self._tickets[ticket.number] = ticket
        request.in_flight = True
        self.send(
            m.STEP,
            request.request,
            ticket.number,
            target_context,
            trace_id,
            temperature,
            request.generation,
            round_number,
            drafted,
            support or 0,
            budget_us,
            request.owner,
        )
        self.ring()
        return ticket

    def check_idle(self, request: Request) -> None:
        """See `TargetSide.check_idle`."""
        if any(ticket.request is request for ticket in self._tickets.values()):
            raise LocalMisuse(f"request {request.request} has a proposal in flight: wait for it, or close the request")

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """See `TargetSide.commit`."""
        self._commit(request, round, source, accepted, tokens, 0, 0, 0)

    def commit_verified(self, request: Request, facts: ProposalFacts, accepted: int, tokens: array[int]) -> None:
        """See `ProposalHolder.commit_verified`."""
        if self._grouped and not self._open:  # the daemon, which would say so too, would give the slot back
            self.let_go(facts)
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, facts.round, epoch_over=self.between_epochs)
        self._held.pop(facts.slot, None)
        self._commit(
            request, facts.round, wire.VERIFIED, accepted, tokens, facts.slot, facts.slot_generation, facts.epoch
        )

    def _commit(
        self,
        request: Request,
        round: int,
        source: int,
        accepted: int,
        tokens: Iterable[int],
        slot: int,
        generation: int,
        epoch: int,
    ) -> None:
        fresh = array("i", tokens)
        self._check_room(request, len(fresh))
        if self._grouped:
            self._may_commit(request, round)
        else:
            request.extend(fresh)
            request.in_flight = False
        self.send(
            m.COMMIT,
            request.request,
            slot,
            generation,
            round,
            source,
            accepted,
            len(fresh),
            epoch,
            request.generation,
            payload=fresh.tobytes(),
        )
        self.ring()
        try:
            if self._grouped:
                self._hear_commit(request, round)
                request.extend(fresh)
                request.in_flight = False
        finally:
            self.nudge()

    def _may_commit(self, request: Request, round: int) -> None:
        if not self._open:
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, round, epoch_over=True)
        self._answer[request.request] = None

    def _hear_commit(self, request: Request, round: int) -> None:
        """In a group the daemon knows best whether the epoch still stands: waits for its word."""
        patience = Patience(self, GRACE_NS)
        answer = self._answer
        life = self._life
        while request.request in answer and answer[request.request] is None and self._life == life:
            if not patience.serve() and answer.get(request.request, self) is None:
                self.give_up_daemon()
        refused = answer.pop(request.request, None)
        if refused is not None or self._life != life:
            raise ProposalDiscarded(refused or Reason.PEER_LOST, request.request, round, epoch_over=True)

    def holds(self, facts: ProposalFacts) -> bool:
        """Whether the daemon that said a proposal is ready is still the one there is."""
        return facts.life == self._life

    def check_held(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.check_held`."""
        if not self.holds(facts):
            raise ProposalDiscarded(Reason.PEER_LOST, round=facts.round, epoch_over=self.between_epochs)
        if self._held.get(facts.slot) != facts.slot_generation:
            raise LocalMisuse("this proposal is released already")

    def let_go(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.let_go`."""
        if facts.life == self._life and self._held.get(facts.slot) == facts.slot_generation:
            del self._held[facts.slot]
            self.send(m.RELEASE, facts.slot, facts.slot_generation)
            self.ring()
            self.nudge()

    def tell_void(self, facts: ProposalFacts, reason: Reason) -> None:
        """See `TargetSide.tell_void`. The next COMMIT carries the risen generation. In a group of ranks the others may use what
        they hold: this rank leaves, which ends the epoch (SPEC section 4)."""
        if self._grouped:
            self._lose(reason)

    def close(self) -> None:
        """See `AttachedSide.close`."""
        self._close_copies()
        super().close()

    # ---- a rank group ------------------------------------------------------------------------------------------

    def on_agree(self, hook: AgreeHook) -> None:
        """What a group of several ranks needs: after the death of any rank, and at the start, all ranks must hold the same
        committed tokens before another STEP. `hook(epoch, committed)` is called inside `wait_for_peer` on every rank, with the
        tokens (int32 arrays by request) that this rank committed; it returns those that all ranks agreed on, by whatever
        collective the engine has (an all-reduce, a broadcast of rank 0's). Raise `PeerFault` when the collective fails: it is
        called again. `epoch` is of one life of rank 0's daemon: its low 32 bits are the number that `pp1q top` shows. SPEC
        section 4, One decision."""
        self._agree = hook

    def _turn_epoch(self, epoch: int, state: int) -> None:
        self._open = state == m.EPOCH_OPEN
        self._asked = epoch if state == m.EPOCH_AGREE else 0
        self.forget_exchanges()
        if self._open:
            self.epoch = epoch
            self._agree_from_ns = self._agree_pause_ns = 0
        else:  # what was ready can't be committed any more
            waiting = {ticket.request.request for ticket in self._tickets.values()}
            for request in self.requests.requests.values():
                request.in_flight = request.request in waiting

    def may_wait(self) -> None:
        """See `AttachedSide.may_wait`. In a group this is where ranks agree (`on_agree`): release every proposal before."""
        if self._grouped and self._agree is None:
            raise LocalMisuse("a group of several ranks needs `on_agree`: how this engine's ranks agree on committed tokens")

    def settle_epoch(self) -> None:
        """Asks the engine's hook what the ranks agree on, if the daemon wants to know and nothing is held any more."""
        epoch = self._asked
        if not epoch or self._tickets or self._held or self._agree is None or monotonic_ns() < self._agree_from_ns:
            return
        requests = self.requests.requests
        try:
            agreed = self._agree(epoch, {number: request.tokens[:] for number, request in requests.items()})
        except PeerFault as fault:
            self.counters.refuse(fault.reason)
            self.log.warning("no_agreement", epoch=epoch & wire.U32_MAX, reason=fault.reason.value, detail=fault.detail)
            self.poll()  # a later epoch may be asked for by now
            return
        if self._asked != epoch:
            return  # that epoch ended while the ranks talked
        for request in adopt(requests, agreed, self.limit("vocab_size")):
            self.send(m.CLOSE, request.request)
            self.announce(request)
        self._asked = 0  # not before: a hook that raised is called again
        self._agree_pause_ns = min(max(2 * self._agree_pause_ns, AGREE_PAUSE_NS), AGREE_PAUSE_MOST_NS)
        self._agree_from_ns = monotonic_ns() + self._agree_pause_ns
        self.send(m.AGREE, epoch & wire.U32_MAX, len(requests), *state_digest(requests))
        self.ring()

    def totals(self) -> dict[str, int]:
        """What this process knows of its proposals; the daemon's status has the rest."""
        return {"in_flight": len(self._tickets), "held": len(self._held)}
