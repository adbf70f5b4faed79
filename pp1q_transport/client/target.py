"""The target side: steps, ready proposals as read-only views, commits and releases.

Between a target model's loop and the engine, which runs inside these calls and never in a thread of its own: a process that
computes for long between calls answers late, but nothing is lost by that. Owns the slot memory. SPEC sections 4 and 9.
"""

from __future__ import annotations

import os
from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from .. import wire
from .._native import kernels
from ..engine import Engine, EngineConfig
from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from ..session import slots as st
from ..session.receiver import ReceiverSession
from ..session.requests import Request, RequestTable
from ..session.slots import Slot, SlotTable
from ..staging import Region, SlotViews
from .endpoint import Endpoint, same_slots

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from ..session.terms import SessionTerms

DEFAULT_BUDGET_US: Final = 1_000_000
TEMPERATURE_MOST: Final = 1e6
OPENS_QUEUED_BYTES: Final = 1 << 16  # past this the link must take some before another OPEN is queued
OPEN_WAIT_NS: Final = 1_000_000_000
_DENSE_POLICY: Final = 0
_U64_MAX: Final = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Q:
    """The q one token was drawn from, as read-only views of the slot (no copy; valid until the proposal is released).

    Dense: `values` float32 [V], `ids` None. Sparse: `ids` int32 [n] ascending, `values` float32 [n]; q is 0 elsewhere.
    """

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32] | None

    def of(self, token: int) -> float:
        """q(token)."""
        if self.ids is None:
            return float(self.values[token])
        at = int(np.searchsorted(self.ids, token))
        return float(self.values[at]) if at < len(self.ids) and self.ids[at] == token else 0.0


class Proposal:
    """A ready proposal: tokens and the q of each, read-only views of the slot. Release it (or leave its `with` block)."""

    def __init__(self, receiver: Receiver, request: Request, slot: Slot, session: int) -> None:
        self._receiver = receiver
        self._request = request
        self._slot = slot
        self.key = (session, slot.index, slot.generation)
        self.slot = slot.index
        self.slot_generation = slot.generation
        self.generation = slot.request_generation
        self.round = slot.round
        self.first_position = slot.anchor + 1
        self.depth = slot.depth
        self.sparse = slot.representation == wire.SPARSE
        self.latency_ns = slot.ready_ns - slot.enqueued_ns
        self.tokens: npt.NDArray[np.int32] = receiver.views.tokens(slot.index, slot.depth)
        self._entries = receiver.views.entries(slot.index, slot.depth)

    def q(self, index: int) -> Q:
        """The q of the proposal's token `index` (0 is the first drafted)."""
        self._check_held()
        if not 0 <= index < self.depth:
            raise LocalMisuse(f"index {index} is outside 0..{self.depth - 1}")
        views = self._receiver.views
        if self.sparse:
            ids, values = views.sparse(self.slot, index, int(self._entries[index]))
            return Q(values, ids)
        return Q(views.dense(self.slot, index), None)

    def _check_held(self) -> None:
        if self._slot.generation != self.slot_generation or not self._slot.consumers:
            raise LocalMisuse("this proposal is released already")

    def commit(self, accepted: int, tokens: Iterable[int]) -> None:
        """Commits what verification gave: `accepted` drafts, and all tokens (the drafts, then the correction or bonus
        unless the text ended before it). Releases.

        Raises `LocalMisuse`, and commits nothing, when that can't be: wrong tokens, or a proposal that is released or
        whose request was closed, went on without it or has the next one in flight (after a reconnect).
        """
        self._check_held()
        committed = self._receiver.check_tokens(self._request, tokens)
        self._receiver.check_idle(self._request)
        if self._request.anchor + 1 != self.first_position:
            raise LocalMisuse(f"this proposal starts at position {self.first_position}, its request went on meanwhile")
        if not 0 <= accepted <= self.depth or not max(1, accepted) <= len(committed) <= accepted + 1:
            raise LocalMisuse(f"{accepted} accepted drafts commit themselves and at most one more, not {len(committed)} tokens")
        if committed[:accepted].tolist() != self.tokens[:accepted].tolist():
            raise LocalMisuse("the accepted drafts are not the proposal's tokens")
        self.release()
        self._receiver.commit(self._request, self.round, wire.VERIFIED, accepted, committed)

    def release(self) -> None:
        """Gives the slot back. Idempotent."""
        self._receiver.release(self._slot, self.slot_generation)

    def __enter__(self) -> Proposal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()


class Ticket:
    """A STEP under way. `wait` gives the proposal or raises `ProposalDiscarded`."""

    def __init__(self, receiver: Receiver, request: Request, slot: Slot, session: int) -> None:
        self._receiver = receiver
        self._request = request
        self._slot = slot
        self._session = session
        self._generation = slot.generation
        self._reason = 0
        self.round = slot.round
        self.slot = slot.index
        self.key = (session, slot.index, slot.generation)

    @property
    def settled(self) -> bool:
        """Whether `wait` would return at once."""
        slot = self._slot
        return slot.generation != self._generation or slot.state not in st.LIVE

    def wait(self) -> Proposal:
        """Serves the engine until the proposal is ready. The budget of the STEP bounds the wait."""
        slot = self._slot
        while slot.state == st.GRANTED or slot.state == st.LANDING:
            if slot.generation != self._generation:
                break
            self._receiver.serve(slot.deadline_ns)
        if slot.generation == self._generation and slot.state == st.READY:
            return Proposal(self._receiver, self._request, slot, self._session)
        reason = Reason.from_code(self._reason) if self._reason else Reason.CANCELLED
        raise ProposalDiscarded(reason, self._request.request, self.round)

    def settle(self, slot: Slot) -> None:
        """Keeps the outcome: the slot may be another proposal's before `wait` is called."""
        if slot.generation == self._generation:
            self._reason = slot.reason


class Receiver(Endpoint):
    """The target side of a session (rank 0 of a group of one)."""

    def __init__(self, config: EngineConfig) -> None:
        self.requests = RequestTable()
        self.session: ReceiverSession | None = None
        self._table: SlotTable | None = None
        self._region: Region | None = None
        self._views: SlotViews | None = None
        self._tickets: dict[int, Ticket] = {}  # by slot: the latest of each
        self.ready = 0
        self.bytes_ready = 0
        super().__init__(Engine(config, self._make_session, self._on_up, self._on_down))

    @property
    def views(self) -> SlotViews:
        """Views of the slot memory; there are none before the first session and after `close`."""
        if self._views is None:
            raise LocalMisuse("no session was formed yet (call wait_for_peer), or this receiver is closed")
        return self._views

    def _make_session(self, terms: SessionTerms) -> ReceiverSession:
        geometry = terms.geometry()
        if self._table is None or self._region is None or not same_slots(self._views, geometry, terms.vocab_size):
            if self._table is not None and self._table.not_free():
                raise PeerFault(Reason.LIMITS_MISMATCH, "slots of the last session are still in use")
            if self._region is not None:
                self._region.close()
            self._region = Region(geometry.total_bytes)
            self._table = SlotTable(geometry)
            self._views = SlotViews(self._region, geometry, terms.vocab_size)
            self.engine.log.info("slots", bytes=geometry.total_bytes, prefault_ms=round(self._region.prefault_ms, 2))
        assert self._region is not None
        self.session = ReceiverSession(terms, self._table, self._region.memory, self.requests, self.counters)
        return self.session

    def _on_up(self) -> None:
        session = self.session
        assert session is not None
        for request in list(self.requests.requests.values()):
            try:
                self._send_open(session, request)
            except LocalMisuse as error:  # beyond what this session allows: it must not keep the others from being opened
                self.counters.add("requests_not_opened")
                self.engine.log.warning("request_not_opened", request=request.request, error=str(error))

    def _send_open(self, session: ReceiverSession, request: Request) -> None:
        """OPENs of many requests exceed the outbox together: lets the link take some first, for a second at most."""
        engine, outbox = self.engine, session.outbox
        stop_ns = kernels.monotonic_ns() + OPEN_WAIT_NS
        while outbox.bytes_queued > OPENS_QUEUED_BYTES and kernels.monotonic_ns() < stop_ns:
            engine.flush()
            if engine.link is None:
                return
            if outbox.bytes_queued > OPENS_QUEUED_BYTES:
                engine.link.wait(OPEN_WAIT_NS // 100, -1)
        if self.session is session:
            session.open(request)

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)
        self._keep_outcomes(session)
        self.ready += session.ready
        self.bytes_ready += session.bytes_ready
        for request in self.requests.requests.values():
            request.discard()
        self.session = None

    def open_request(
        self,
        request: int,
        tokens: Iterable[int],
        seed: int | None = None,
        max_position: int = wire.U32_MAX,
        generation: int = 0,
    ) -> Request:
        """Opens a request with its committed tokens (prompt included). `seed`: u64, from the OS when None.

        `generation` continues a request of an earlier life of this process: more than any it had, so that no proposal
        noise can be drawn twice (SPEC sections 2 and 5).
        """
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        if not 0 <= request <= _U64_MAX or not 0 <= seed <= _U64_MAX:
            raise LocalMisuse("request ID and seed must be u64")
        if not 0 <= max_position <= wire.U32_MAX or not 0 <= generation <= wire.U32_MAX:
            raise LocalMisuse("max_position and generation must be u32")
        generation = max(generation, self.requests.fresh_generation(request))
        opened = Request(request, seed, self._int32(tokens), max_position, generation)
        self._check_room(opened, 0)
        self.requests.add(opened)
        if self.session is not None:
            self._send_open(self.session, opened)
        return opened

    def _terms_of(self, name: str) -> int:
        """A number of the session's terms, or of our own HELLO while there is none."""
        source = self.engine.config.hello if self.session is None else self.session.terms
        return int(getattr(source, name))

    def _int32(self, tokens: Iterable[int]) -> array[int]:
        try:
            fresh = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise LocalMisuse(f"tokens must be int32: {error}") from error
        vocab_size = self._terms_of("vocab_size")
        if fresh and not 0 <= min(fresh) <= max(fresh) < vocab_size:
            raise LocalMisuse(f"tokens must be within the vocabulary of {vocab_size}")
        return fresh

    def check_tokens(self, request: Request, tokens: Iterable[int]) -> array[int]:
        """The tokens of a commit as int32, if they can be committed: raises `LocalMisuse` otherwise."""
        self._check_open(request)
        fresh = self._int32(tokens)
        if not fresh:
            raise LocalMisuse("a commit needs at least one token")
        self._check_room(request, len(fresh))
        return fresh

    def _check_room(self, request: Request, more: int) -> None:
        """Raises `LocalMisuse` when `more` tokens would not fit: with a session or without, since the next OPEN carries them."""
        total, most = len(request.tokens) + more, self._terms_of("max_context_tokens")
        if total > most:
            raise LocalMisuse(f"{total} tokens exceed max_context_tokens {most}")
        if total - 1 > request.max_position:
            raise LocalMisuse(f"position {total - 1} is beyond the request's last, {request.max_position}")

    def _check_open(self, request: Request) -> None:
        if self.requests.get(request.request) is not request:
            raise LocalMisuse(f"request {request.request} is not open")

    def close_request(self, request: Request) -> None:
        """Ends a request; a proposal under way is cancelled. Safe to repeat."""
        if self.requests.get(request.request) is not request:
            return
        if self.session is not None:
            self.session.close(request)
            self._settle()
        self.requests.remove(request.request)

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
    ) -> Ticket:
        """Queues a STEP and returns at once. `support` None asks for dense q, k for the top-k.

        Raises `ProposalDiscarded(peer_lost)` when no session runs, `LocalMisuse` when no slot is free or the session's
        terms do not allow what is asked.
        """
        self._check_open(request)
        if self.session is None:
            self.poll()  # a loop that does nothing but step must still hear of the peer's return
        session = self.session
        if session is None:
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, request.round)
        _check_step(session.terms, depth, temperature, support)
        if not 1 <= budget_us <= wire.U32_MAX:
            raise LocalMisuse(f"budget_us {budget_us} is outside 1..{wire.U32_MAX}")
        if not 0 <= target_context <= _U64_MAX or not 0 <= trace_id <= _U64_MAX:
            raise LocalMisuse("target_context and trace_id must be u64")
        representation = wire.DENSE if support is None else wire.SPARSE
        try:
            slot = session.step(
                request,
                kernels.monotonic_ns(),
                session.terms.depth if depth is None else depth,
                temperature,
                support or _DENSE_POLICY,
                representation,
                target_context,
                budget_us,
                trace_id,
            )
        except PeerFault as fault:  # a peer that does not read, or a counter that ran out: the session is over
            self.engine.fail(fault.reason)
            raise ProposalDiscarded(fault.reason, request.request, request.round) from fault
        if slot is None:
            raise LocalMisuse("no free slot: release proposals, or negotiate more slots")
        ticket = self._tickets[slot.index] = Ticket(self, request, slot, session.terms.session)
        self.engine.flush()
        self._settle()
        return ticket

    def step(self, request: Request, **options: object) -> Proposal:
        """`enqueue` and `wait` in one; the same options."""
        return self.enqueue(request, **options).wait()  # type: ignore[arg-type]

    def serve(self, until_ns: int) -> None:
        """One pass of the engine, idling until `until_ns` at most (monotonic ns)."""
        engine = self.engine
        session = self.session
        if engine.poll() == 0 and engine.link is not None and (session is None or not session.settled):
            left_ns = until_ns - kernels.monotonic_ns()
            if left_ns > 0:
                engine.wait(left_ns)
        if session is not None and session is self.session:
            session.tick(kernels.monotonic_ns())
            self._settle()

    def poll(self) -> None:
        """Serves the engine once, without waiting, and runs the watchdog."""
        self.engine.poll()
        if self.session is not None:
            self.session.tick(kernels.monotonic_ns())
            self._settle()

    def _settle(self) -> None:
        """Fences what was invalidated, so that its slot can be granted again."""
        session, link = self.session, self.engine.link
        if session is None or link is None:
            return
        if session.settled:
            self._keep_outcomes(session)
        if session.fences:
            for index in session.fences:
                session.fenced(index, link.fence(index))
            session.fences.clear()

    def _keep_outcomes(self, session: ReceiverSession) -> None:
        for slot in session.settled:
            if slot.state in st.LIVE:
                continue  # became ready, was released and granted again since: the ticket is the new proposal's
            ticket = self._tickets.pop(slot.index, None)
            if ticket is not None:
                ticket.settle(slot)
        session.settled.clear()

    def release(self, slot: Slot, generation: int) -> None:
        """Gives a READY slot back; stale or repeated calls change nothing."""
        if self._table is not None:
            self._table.release(slot, generation, 0, 0)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens; without a session they are kept and travel with the next OPEN."""
        if self.session is None:
            request.extend(tokens)
            request.in_flight = False
            return
        try:
            self.session.commit(request, round, source, accepted, tokens)
        except PeerFault as fault:  # the tokens are committed here, and travel with the next session's OPEN
            self.engine.fail(fault.reason)

    def commit_target_only(self, request: Request, round: int, tokens: Iterable[int]) -> None:
        """Commits what the target sampled by itself after a discard. A proposal still in flight is `LocalMisuse`: it would
        be verified against a prefix it was not drafted for."""
        fresh = self.check_tokens(request, tokens)
        self.check_idle(request)
        self.commit(request, round, wire.TARGET_ONLY, 0, fresh)

    def check_idle(self, request: Request) -> None:
        """Raises `LocalMisuse` while a proposal of the request lands: it would become ready for a prefix that is no longer."""
        for slot in self._table.slots if self._table is not None else ():
            if slot.request == request.request and slot.state in st.LIVE:
                raise LocalMisuse(f"request {request.request} has a proposal in flight: wait for it, or close the request")

    def close(self) -> None:
        """See `Endpoint.close`. The slot memory goes too, unless a proposal is still held: then with its last view."""
        super().close()
        if self._region is not None:
            self._region.close()
        self._region = None
        if self._table is not None and not self._table.not_free():
            self._views = None

    def totals(self) -> dict[str, int]:
        """Proposals and bytes that became ready, over all sessions, and what the slots hold now."""
        live = self.session
        return {
            "ready": self.ready + (live.ready if live else 0),
            "bytes_ready": self.bytes_ready + (live.bytes_ready if live else 0),
            "discarded": self.counters.get("discarded"),
            "slots_not_free": self._table.not_free() if self._table else 0,
        }


def _check_step(terms: SessionTerms, depth: int | None, temperature: float, support: int | None) -> None:
    """Raises `LocalMisuse` for what the leader would have to refuse."""
    if depth is not None and not 1 <= depth <= terms.depth:
        raise LocalMisuse(f"depth {depth} is outside 1..{terms.depth}")
    if not 0.0 <= temperature <= TEMPERATURE_MOST:
        raise LocalMisuse(f"temperature {temperature} is outside 0..{TEMPERATURE_MOST:g}")
    if not (terms.dense if support is None else terms.sparse):
        raise LocalMisuse(f"{'dense' if support is None else 'sparse'} q was not negotiated")
    if support is not None and not 1 <= support <= terms.support:
        raise LocalMisuse(f"support {support} is outside 1..{terms.support}")
