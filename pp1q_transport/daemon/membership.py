"""The daemon of a rank above 0: a member of its group, and the target process beside it.

Between the channel of an attached target, which is not trusted, and the group link to rank 0, which grants, sends rows on and
decides. A STEP of this process asks nothing of anybody: it waits for the grant that rank 0's own process causes, and takes its
outcome. The Nth STEP of a request meets the Nth outcome of it within an epoch. SPEC sections 4 and 9.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from ..engine import Engine, EngineConfig, terms_ahead
from ..errors import PeerFault, Reason
from ..local import messages as m
from ..session import slots as st
from ..session.group import READY
from ..session.group_member import Member
from ..session.member import MemberSession
from ..session.slots import SlotTable
from ..staging import Region
from .clients import ClientPort
from .exchanging import take_part, tell_parts

if TYPE_CHECKING:
    from ..counters import Counters
    from ..session.slots import Slot
    from ..session.terms import SessionTerms

U32_MAX: Final = (1 << 32) - 1
EARLY_MOST: Final = 1024  # outcomes of one request that its process has not asked for yet
REQUESTS_MOST: Final = 4096  # as many as may be open at once (`RequestTable`)


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one round of a request: a READY slot and its generation, or a reason."""

    reason: Reason | None
    slot: int
    slot_generation: int
    generation: int
    round: int


class MemberRank:
    """A rank's slots and its group link, over all sessions of it. `engine` is driven by the daemon's loop through `serve`."""

    def __init__(self, config: EngineConfig, counters: Counters, terms: SessionTerms | None = None) -> None:
        """`terms` are those of the link where the rows come from; the group link's own when None."""
        hello = config.hello
        terms = terms or terms_ahead(hello)
        self.counters = counters
        self.member = Member(hello.rank, hello.group_size)
        self.geometry = terms.geometry()
        self.table = SlotTable(self.geometry, hello.rank)
        self.region = Region(self.geometry.total_bytes)
        self.session: MemberSession | None = None
        self.outcomes: list[tuple[int, Outcome]] = []  # (request, what became of it), in order
        self.rows_before = 0
        self.ready_before = 0
        self.bytes_before = 0
        self.engine = Engine(config, self._make_session, self._on_up, self._on_down, counters)

    @property
    def up(self) -> bool:
        """Whether the group link runs."""
        return self.session is not None

    def _make_session(self, terms: SessionTerms) -> MemberSession:
        geometry = terms.geometry()
        if (geometry.max_slots, geometry.row_bytes, geometry.depth) != (
            self.geometry.max_slots,
            self.geometry.row_bytes,
            self.geometry.depth,
        ):
            raise PeerFault(Reason.LIMITS_MISMATCH, "rank 0 has slots of other sizes")
        self.session = MemberSession(terms, self.member, self.table, self.region.memory, self.counters)
        return self.session

    def _on_up(self) -> None:
        assert self.session is not None
        self.session.up()

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        session.lost(Reason.PEER_LOST)
        self._collect(session)
        self.rows_before += session.rows
        self.ready_before += session.ready
        self.bytes_before += session.bytes_ready
        self.session = None

    def rows_done(self) -> int:
        """Rows that passed every check, over all sessions."""
        return self.totals()["rows"]

    def has_rows(self, slot: Slot) -> bool:
        """Whether the rows of the slot's proposal came here."""
        return True

    def slots_by_state(self) -> dict[str, int]:
        """How many slots stand in each state, by name."""
        return self.table.by_state()

    @property
    def endpoint(self) -> str:
        """Where rank 0 listens."""
        return self.engine.endpoint

    def serve(self) -> int:
        """One pass of the engine without waiting: frames, fences, outcomes. Returns the bytes moved."""
        moved = self.engine.poll()
        session, link = self.session, self.engine.link
        if session is None or link is None:
            return moved
        if session.fences:
            for index in session.fences:
                session.fenced(index, link.fence(index))
            session.fences.clear()
        if not session.outbox.empty():
            self.engine.flush()
        return moved

    def collect(self) -> None:
        """Brings `outcomes` up to what came in so far: whatever sends may have taken in frames as well."""
        if self.session is not None:
            self._collect(self.session)

    def _collect(self, session: MemberSession) -> None:
        for end in session.ends:
            reason = None if end.code == READY else Reason.from_code(end.code)
            # The noise of a granted round that is void is spent; a refused one's generation is what the ranks go on with.
            generation = end.request_generation + (reason is not None and end.slot_generation > 0)
            self.outcomes.append((end.request, Outcome(reason, end.slot, end.slot_generation, generation, end.round)))
        session.ends.clear()
        session.settled.clear()

    def release(self, slot: Slot, generation: int) -> None:
        """Gives a READY slot back; rank 0 hears of it."""
        if self.session is not None:
            self.session.release(slot, generation, self.member.rank, 0)
        else:
            self.table.release(slot, generation, self.member.rank, 0)

    def quarantine_overdue(self, ready_before_ns: int) -> None:
        """See `Receiver.quarantine_overdue`. Rank 0 grants the slot to nobody before this rank gave it back."""
        session = self.session
        for slot in session.held_since(ready_before_ns) if session is not None else ():
            assert session is not None
            self.engine.log.warning("overdue", slot=slot.index, generation=slot.generation, request=slot.request)
            session.overdue(slot)

    def release_all(self) -> None:
        """The consumer is gone."""
        for slot in self.table.slots:
            if slot.consumers & 1 and slot.decided:
                self.release(slot, slot.generation)

    def leave(self, reason: Reason) -> None:
        """The target process is gone: so is this rank, until the next one has agreed."""
        if self.session is not None:
            self.session.leave(reason)
            self._collect(self.session)

    def totals(self) -> dict[str, int]:
        """Proposals, rows and bytes that became ready, over all sessions."""
        live = self.session
        return {
            "ready": self.ready_before + (live.ready if live else 0),
            "rows": self.rows_before + (live.rows if live else 0),
            "bytes_ready": self.bytes_before + (live.bytes_ready if live else 0),
        }

    def close(self) -> None:
        """Leaves the group and frees the memory."""
        self.engine.close()
        self.region.close()


class MemberPort(ClientPort):
    """Serves the target process of a rank above 0."""

    hears = m.TARGET

    def __init__(self, rank: MemberRank, counters: Counters) -> None:
        super().__init__("receiver", counters)
        self.rank = rank
        self._waiting: dict[int, tuple[int, int, int]] = {}  # request -> (ticket, round, generation): waits for its next outcome
        self._early: dict[int, deque[Outcome]] = {}  # request -> outcomes that no ticket waits for yet
        self._owed: dict[int, int] = {}  # request -> how many outcomes are to come of STEPs made before its process closed it
        self._told_epoch: tuple[int, int, int] = (0, 0, 0)
        self._agreed: tuple[int, int, int] | None = None  # (epoch, low, high): handed on as soon as every slot is FREE

    # ---- clients ------------------------------------------------------------------------------------------------

    def welcome(self, now_ns: int) -> None:
        """A target hears how its group stands."""
        self._told_epoch = (0, 0, 0)
        self._tell_epoch()

    def give_back(self) -> None:
        """Its slots come back, and its rank is gone."""
        self._agreed = None
        self._forget()
        self.rank.leave(Reason.PEER_LOST)
        self.rank.outcomes.clear()
        self.rank.release_all()
        self.after_records()

    def _forget(self) -> None:
        """The epoch is over: what waits for an outcome has it, what came early is given back."""
        for request, (ticket, round_number, generation) in self._waiting.items():
            self.send(m.DISCARDED, request, ticket, Reason.PEER_LOST.code, round_number, generation, 0)
        self._waiting.clear()
        self._owed.clear()
        for outcomes in self._early.values():
            for outcome in outcomes:
                self._give(outcome)
        self._early.clear()

    def owes(self, request: int) -> bool:
        """Whether the next outcome of the request is of a STEP made before its process closed it."""
        return request in self._owed

    def _give(self, outcome: Outcome) -> None:
        if outcome.reason is None:
            self.rank.release(self.rank.table.slots[outcome.slot], outcome.slot_generation)

    def after_records(self) -> None:
        """Votes and releases wait to be sent."""
        if self.rank.up:
            self.rank.engine.flush()

    # ---- records in ---------------------------------------------------------------------------------------------

    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """See `ClientPort.take`."""
        if kind == m.STEP:
            self._step(fields[0], fields[1], fields[6], fields[5])
        elif kind == m.COMMIT:
            self._commit(fields[0], fields[1], fields[2], fields[3], fields[7])
        elif kind == m.RELEASE:
            self._release(fields[0], fields[1])
        elif kind == m.CLOSE:
            self._close(fields[0])
        elif kind == m.EXCHANGE:
            session = self.rank.session
            if session is not None and self.rank.member.open and fields[1] == self.rank.member.epoch:
                take_part(fields, payload, self.rank.member.rank, session.exchange)
        elif kind == m.AGREE:
            self._agreed = (fields[0], fields[2], fields[3])
            self._agree()

    def _close(self, request: int) -> None:
        """What its STEP is still to hear is for nobody, above all not for a request that gets the same ID next."""
        if self._waiting.pop(request, None) is not None:
            if len(self._owed) >= REQUESTS_MOST:
                raise PeerFault(Reason.OVERLOAD, f"{len(self._owed)} requests were closed before their outcome")
            self._owed[request] = self._owed.get(request, 0) + 1
        for outcome in self._early.pop(request, ()):
            self._give(outcome)

    def _step(self, request: int, ticket: int, round_number: int, generation: int) -> None:
        if not self.rank.member.open:
            self.send(m.DISCARDED, request, ticket, Reason.PEER_LOST.code, round_number, generation, 0)
            return
        if request in self._waiting:
            raise PeerFault(Reason.REQUEST_DUPLICATE, f"request {request} waits for an outcome already")
        early = self._early.get(request)
        if early:
            self._deliver(request, ticket, early.popleft())
        else:
            self._waiting[request] = ticket, round_number, generation

    def _commit(self, request: int, slot: int, slot_generation: int, round_number: int, epoch: int) -> bool:
        if slot_generation:  # a verified one; what the target sampled by itself needs an open epoch alone
            may = self.rank.member.may_commit(epoch, slot, slot_generation)
            self._release(slot, slot_generation)
        else:
            may = self.rank.member.open
        if may:
            self.send(m.COMMITTED, request, round_number, epoch)
        else:
            self.counters.add("commits_refused")
            self.counters.refuse(Reason.PEER_LOST)
            self.send(m.DISCARDED, request, 0, Reason.PEER_LOST.code, round_number, 0, 0)
        return may

    def _release(self, slot: int, generation: int) -> None:
        if slot >= self.rank.table.count:
            raise PeerFault(Reason.SLOT_BOUNDS, f"release of slot {slot}")
        self.rank.release(self.rank.table.slots[slot], generation)

    def _agree(self) -> None:
        if self._agreed is None:
            return
        epoch, low, high = self._agreed
        session = self.rank.session
        if session is None or epoch != self.rank.member.epoch or not session.asking:
            self._agreed = None
        elif session.agree(low, high):
            self._agreed = None
            self.after_records()

    # ---- records out --------------------------------------------------------------------------------------------

    def report(self, now_ns: int) -> None:
        """See `ClientPort.report`."""
        rank = self.rank
        if self._agreed is not None:
            self._agree()
        late_ns = self.late_ns(now_ns)
        if late_ns:
            rank.quarantine_overdue(late_ns)
        # Last, and nothing is sent after it: what is told is all that came in, and grants are of rounds after that.
        rank.collect()
        while rank.outcomes:  # a rank that leaves by one of them has more of them
            outcomes = rank.outcomes[:]
            rank.outcomes.clear()
            for request, outcome in outcomes:
                self._settle(request, outcome)
        self._tell_epoch()
        if rank.session is not None:
            tell_parts(self.send, rank.member.epoch, rank.session.exchanged)

    def _settle(self, request: int, outcome: Outcome) -> None:
        owed = self._owed.pop(request, 0)
        if owed:
            self._give(outcome)
            if owed > 1:
                self._owed[request] = owed - 1
            return
        waiting = self._waiting.pop(request, None)
        if waiting is not None:
            self._deliver(request, waiting[0], outcome)
            return
        if self.attached is None or not self.rank.member.open:
            # Of an epoch that is over, and crossed our leaving it: kept, the next epoch's first STEP would meet it, and every
            # later one another round than rank 0's.
            self._give(outcome)
            return
        early = self._early.setdefault(request, deque())
        early.append(outcome)
        if len(early) > EARLY_MOST or len(self._early) > REQUESTS_MOST:
            # One outcome left out, and every later one would meet another round than rank 0's: this rank begins anew.
            self.log.warning("rank_too_far_behind", reason=Reason.OVERLOAD.value, request=request, outcomes=len(early))
            self.rank.leave(Reason.OVERLOAD)

    def _deliver(self, request: int, ticket: int, outcome: Outcome) -> None:
        if outcome.reason is not None:
            self.send(m.DISCARDED, request, ticket, outcome.reason.code, outcome.round, outcome.generation, 0)
            return
        slot = self.rank.table.slots[outcome.slot]
        latency_ns = max(0, slot.ready_ns - slot.enqueued_ns)
        self.latency.add(latency_ns)
        self.tail.add(max(0, slot.ready_ns - slot.last_row_ns))
        self.send(
            m.READY,
            request,
            ticket,
            latency_ns,
            slot.index,
            slot.generation,
            slot.request_generation,
            slot.round,
            slot.anchor,
            slot.depth,
            slot.representation if self.rank.has_rows(slot) else 0,
            slot.epoch,
        )

    def _tell_epoch(self) -> None:
        member = self.rank.member
        state = m.EPOCH_OPEN if member.open else m.EPOCH_AGREE if member.asked else m.EPOCH_ENDED
        now = (member.coordinator, member.epoch, state)
        if now == self._told_epoch:
            return
        if self._told_epoch[2] == m.EPOCH_OPEN:
            self._forget()
        self._told_epoch = now
        self.send(m.EPOCH, member.epoch, state, Reason.PEER_LOST.code, member.coordinator & U32_MAX)

    # ---- what the loop asks -------------------------------------------------------------------------------------

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: proposals under way or held."""
        return any(slot.state not in (st.FREE, st.QUARANTINE) for slot in self.rank.table.slots)
