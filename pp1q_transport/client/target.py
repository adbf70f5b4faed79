"""The target side: steps, ready proposals as read-only views, commits and releases.

Between a target model's loop and the engine, which runs inside these calls and never in a thread of its own: a process that
computes for long between calls answers late, but nothing is lost by that. Owns the slot memory. SPEC sections 4 and 9.
"""

from __future__ import annotations

import os
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
from .endpoint import Endpoint

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from ..session.terms import SessionTerms

DEFAULT_BUDGET_US: Final = 1_000_000
_DENSE_POLICY: Final = 0


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
        if self._slot.generation != self.slot_generation or not self._slot.consumers:
            raise LocalMisuse("this proposal is released already")
        if not 0 <= index < self.depth:
            raise LocalMisuse(f"index {index} is outside 0..{self.depth - 1}")
        views = self._receiver.views
        if self.sparse:
            ids, values = views.sparse(self.slot, index, int(self._entries[index]))
            return Q(values, ids)
        return Q(views.dense(self.slot, index), None)

    def commit(self, accepted: int, tokens: Iterable[int]) -> None:
        """Commits what verification gave: `accepted` drafts, and all tokens (drafts plus correction or bonus). Releases."""
        committed = list(tokens)
        if not 0 <= accepted <= self.depth or len(committed) != accepted + 1:
            raise LocalMisuse(f"{accepted} accepted drafts commit {accepted + 1} tokens, not {len(committed)}")
        if committed[:accepted] != self.tokens[:accepted].tolist():
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
        self.round = slot.round
        self.slot = slot.index
        self.key = (session, slot.index, slot.generation)

    @property
    def settled(self) -> bool:
        """Whether `wait` would return at once."""
        slot = self._slot
        return slot.generation != self._generation or slot.state not in (st.GRANTED, st.LANDING)

    def wait(self) -> Proposal:
        """Serves the engine until the proposal is ready. The budget of the STEP bounds the wait."""
        slot = self._slot
        while slot.state == st.GRANTED or slot.state == st.LANDING:
            if slot.generation != self._generation:
                break
            self._receiver.serve(slot.deadline_ns)
        if slot.generation == self._generation and slot.state == st.READY:
            return Proposal(self._receiver, self._request, slot, self._session)
        reason = Reason.from_code(slot.reason) if slot.reason else Reason.CANCELLED
        raise ProposalDiscarded(reason, self._request.request, self.round)


class Receiver(Endpoint):
    """The target side of a session (rank 0 of a group of one)."""

    def __init__(self, config: EngineConfig) -> None:
        self.requests = RequestTable()
        self.session: ReceiverSession | None = None
        self._table: SlotTable | None = None
        self._region: Region | None = None
        self._views: SlotViews | None = None
        self.ready = 0
        self.bytes_ready = 0
        super().__init__(Engine(config, self._make_session, self._on_up, self._on_down))

    @property
    def views(self) -> SlotViews:
        """Views of the slot memory; there are none before the first session."""
        if self._views is None:
            raise LocalMisuse("no session was formed yet: call wait_for_peer")
        return self._views

    def _make_session(self, terms: SessionTerms) -> ReceiverSession:
        geometry = terms.geometry()
        if self._table is None or self._table.geometry.total_bytes != geometry.total_bytes:
            if self._table is not None and self._table.not_free():
                raise PeerFault(Reason.LIMITS_MISMATCH, "slots of the last session are still in use")
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
        for request in self.requests.requests.values():
            session.open(request)

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        session.lost(Reason.PEER_LOST if reason in (Reason.PEER_LOST, Reason.CANCELLED) else Reason.LINK_ERROR)
        self.ready += session.ready
        self.bytes_ready += session.bytes_ready
        for request in self.requests.requests.values():
            request.discard()
        self.session = None

    def open_request(
        self, request: int, tokens: Iterable[int], seed: int | None = None, max_position: int = wire.U32_MAX
    ) -> Request:
        """Opens a request with its committed tokens (prompt included). `seed`: u64, from the OS when None."""
        if seed is None:
            seed = int.from_bytes(os.urandom(8), "little")
        if not 0 <= request < 1 << 64 or not 0 <= seed < 1 << 64:
            raise LocalMisuse("request ID and seed must be u64")
        opened = Request(request, seed, tokens, max_position, self.requests.fresh_generation(request))
        self.requests.add(opened)
        if self.session is not None:
            self.session.open(opened)
        return opened

    def close_request(self, request: Request) -> None:
        """Ends a request; a proposal under way is cancelled."""
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

        Raises `ProposalDiscarded(peer_lost)` when no session runs, `LocalMisuse` when no slot is free.
        """
        session = self.session
        if session is None:
            raise ProposalDiscarded(Reason.PEER_LOST, request.request, request.round)
        representation = wire.DENSE if support is None else wire.SPARSE
        slot = session.step(
            request,
            kernels.monotonic_ns(),
            depth or session.terms.depth,
            temperature,
            support or _DENSE_POLICY,
            representation,
            target_context,
            budget_us,
            trace_id,
        )
        if slot is None:
            raise LocalMisuse("no free slot: release proposals, or negotiate more slots")
        self.engine.flush()
        return Ticket(self, request, slot, session.terms.session)

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
        session.settled.clear()
        if session.fences:
            for index in session.fences:
                session.fenced(index, link.fence(index))
            session.fences.clear()

    def release(self, slot: Slot, generation: int) -> None:
        """Gives a READY slot back; stale or repeated calls change nothing."""
        if self._table is not None:
            self._table.release(slot, generation, 0, 0)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens; without a session they are kept and travel with the next OPEN."""
        if self.requests.get(request.request) is not request:
            raise LocalMisuse(f"request {request.request} is closed")
        if self.session is None:
            request.extend(tokens)
            request.in_flight = False
        else:
            self.session.commit(request, round, source, accepted, tokens)

    def commit_target_only(self, request: Request, round: int, tokens: Iterable[int]) -> None:
        """Commits what the target sampled by itself after a discard."""
        self.commit(request, round, wire.TARGET_ONLY, 0, tokens)

    def totals(self) -> dict[str, int]:
        """Proposals and bytes that became ready, over all sessions, and what the slots hold now."""
        live = self.session
        return {
            "ready": self.ready + (live.ready if live else 0),
            "bytes_ready": self.bytes_ready + (live.bytes_ready if live else 0),
            "discarded": self.counters.get("discarded"),
            "slots_not_free": self._table.not_free() if self._table else 0,
        }
