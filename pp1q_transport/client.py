"""What draft and target processes call: `open_leader` and `open_receiver`, the engine embedded in the caller's process.

Between a model's own loop and the engine, which runs inside these calls and never in a thread of its own: a process that computes
for long between calls answers late, but nothing is lost by that. Owns the slot memory. SPEC section 9.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from . import wire
from ._native import kernels
from .engine import Engine, EngineConfig, Phase
from .errors import ConfigError, InvalidQ, LocalMisuse, PeerFault, ProposalDiscarded, Reason
from .session import slots as st
from .session.leader import Grant, LeaderSession
from .session.receiver import ReceiverSession
from .session.requests import Request, RequestTable
from .session.slots import Slot, SlotTable
from .staging import Region, SlotViews

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    import numpy.typing as npt

    from .session.terms import SessionTerms

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


class Endpoint:
    """What both roles share: an engine, its waiting, its end. A context manager."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counters = engine.counters

    @property
    def endpoint(self) -> str:
        """The control endpoint in use."""
        return self.engine.endpoint

    @property
    def up(self) -> bool:
        """Whether a session is running."""
        return self.engine.phase is Phase.UP

    def poll(self) -> None:
        """Serves the engine once, without waiting."""
        self.engine.poll()

    def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Waits for a session; raises `PeerFault(timeout)` when none formed in time."""
        deadline_ns = kernels.monotonic_ns() + int(timeout_s * 1e9)
        while not self.up:
            self.engine.poll()
            if self.up:
                return
            if kernels.monotonic_ns() >= deadline_ns:
                raise PeerFault(Reason.TIMEOUT, f"no peer within {timeout_s:g} s at {self.endpoint}")
            self.engine.wait()

    def wait_for_message(self, kind: str, timeout_s: float = 30.0) -> object:
        """The body of the next control message of `kind` ("report", "options") from the session's peer."""
        deadline_ns = kernels.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            for index, (got, body) in enumerate(self.engine.inbox):
                if got == kind:
                    del self.engine.inbox[index]
                    return body
            if kernels.monotonic_ns() >= deadline_ns:
                raise PeerFault(Reason.TIMEOUT, f"no {kind} within {timeout_s:g} s")
            self.engine.poll()
            self.engine.wait(5_000_000)

    def send_message(self, kind: str, body: Mapping[str, object]) -> None:
        """Sends a "report" or "options" message to the session's peer over the control plane."""
        self.engine.send_control(kind, body)

    def close(self) -> None:
        """Says goodbye and frees everything. Safe to repeat."""
        self.engine.close()

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


# ---- target side ----------------------------------------------------------------------------------------------------


class Proposal:
    """A ready proposal: tokens and the q of each, read-only views of the slot. Release it (or leave its `with` block)."""

    def __init__(self, receiver: Receiver, request: Request, slot: Slot) -> None:
        self._receiver = receiver
        self._request = request
        self._slot = slot
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

    def __init__(self, receiver: Receiver, request: Request, slot: Slot) -> None:
        self._receiver = receiver
        self._request = request
        self._slot = slot
        self._generation = slot.generation
        self.round = slot.round
        self.slot = slot.index

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
            return Proposal(self._receiver, self._request, slot)
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
        self.session = ReceiverSession(terms, self._table, self._region.array, self.requests, self.counters)
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
            seed = int.from_bytes(np.random.SeedSequence().generate_state(2, np.uint32).tobytes(), "little")
        if not 0 <= request < 1 << 64 or not 0 <= seed < 1 << 64:
            raise LocalMisuse("request ID and seed must be u64")
        opened = Request(request, seed, tokens, max_position)
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
        return Ticket(self, request, slot)

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
        if slot.generation == generation and slot.consumers and slot.state == st.READY:
            slot.consumers = 0
            slot.move(st.RELEASE_LAST)

    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens; without a session they are kept and travel with the next OPEN."""
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


# ---- draft side -----------------------------------------------------------------------------------------------------


class Step:
    """One STEP at the draft: put a row for each position in order, each conditioned on the tokens drawn before it."""

    def __init__(self, leader: Leader, grant: Grant, tokens: npt.NDArray[np.int32]) -> None:
        self._leader = leader
        self._grant = grant
        self.slot = grant.slot
        self.slot_generation = grant.generation
        self.request = grant.request
        self.generation = grant.request_generation
        self.round = grant.round
        self.anchor = grant.anchor
        self.depth = grant.depth
        self.temperature = grant.temperature
        self.support = grant.support if grant.representation == wire.SPARSE else None
        self.target_context = grant.target_context
        self.budget_us = grant.budget_us
        self.trace_id = grant.trace_id
        self.seed = grant.seed
        self.tokens = tokens
        self.received_ns = grant.received_ns

    @property
    def positions(self) -> range:
        """The absolute positions to draft, in order."""
        return range(self.anchor + 1, self.anchor + 1 + self.depth)

    @property
    def alive(self) -> bool:
        """False once the receiver gave this proposal up: further drafting is wasted."""
        return self._grant.generation == self.slot_generation and self._leader.drafting(self._grant)

    def put(
        self,
        position: int,
        *,
        weights: npt.NDArray[np.float64] | None = None,
        counts: npt.NDArray[np.uint32] | None = None,
        ids: npt.NDArray[np.int32] | None = None,
    ) -> int | None:
        """Allocates (from `weights`, float64 [V]) or takes (`counts`, uint32 [V], or [n] with `ids` int32 [n]) the row of
        `position`, draws its token by the owned RNG, and sends the row. Returns the token; None when the proposal is dead.

        Raises `InvalidQ` for weights or counts that make no q (SPEC section 3).
        """
        return self._leader.put(self, self._grant, position, weights, counts, ids)

    def fail(self, reason: Reason = Reason.CANCELLED) -> None:
        """Gives the STEP up: the receiver discards the proposal with this reason at once."""
        self._leader.fail(self._grant, self.slot_generation, reason)


class Leader(Endpoint):
    """The draft side of a session. Iterate over it for STEPs."""

    def __init__(self, config: EngineConfig) -> None:
        self.requests = RequestTable()
        self.session: LeaderSession | None = None
        self._steps: deque[Grant] = deque()
        self._region: Region | None = None
        self._views: SlotViews | None = None
        self._on_open: list[Callable[[int, list[int]], None]] = []
        self._on_commit: list[Callable[[int, list[int]], None]] = []
        self._on_reset: list[Callable[[int, Reason], None]] = []
        self._on_close: list[Callable[[int], None]] = []
        super().__init__(Engine(config, self._make_session, self._on_up, self._on_down))
        vocab = config.hello.vocab_size
        self._counts: npt.NDArray[np.uint32] = np.zeros(vocab, np.uint32)

    def _make_session(self, terms: SessionTerms) -> LeaderSession:
        geometry = terms.geometry()
        if self._region is None or self._region.size != geometry.total_bytes:
            self._region = Region(geometry.total_bytes, "pp1q-staging")
            self._views = SlotViews(self._region, geometry, terms.vocab_size, writable=True)
        if len(self._counts) != terms.vocab_size:
            self._counts = np.zeros(terms.vocab_size, np.uint32)
        self.session = LeaderSession(terms, self.requests, self.counters)
        return self.session

    def _on_up(self) -> None:
        self._steps.clear()

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        session.lost()
        self._steps.clear()
        self._dispatch(session)
        for request in self.requests.requests:
            for callback in self._on_reset:
                callback(request, reason)
        self.session = None

    def on_open(self, callback: Callable[[int, list[int]], None]) -> None:
        """Calls `callback(request, tokens)` for each OPEN: all committed tokens so far. Again after a reconnect."""
        self._on_open.append(callback)

    def on_commit(self, callback: Callable[[int, list[int]], None]) -> None:
        """Calls `callback(request, new tokens)` for each COMMIT."""
        self._on_commit.append(callback)

    def on_reset(self, callback: Callable[[int, Reason], None]) -> None:
        """Calls `callback(request, reason)` when speculative state of a request is void (RESET, CANCEL, a lost session)."""
        self._on_reset.append(callback)

    def on_close(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(request)` when a request ended."""
        self._on_close.append(callback)

    def __iter__(self) -> Iterator[Step]:
        """STEPs as they come, across reconnects; ends when the engine is closed."""
        while self.engine.phase is not Phase.CLOSED:
            step = self.next_step()
            if step is not None:
                yield step

    def next_step(self, timeout_ns: int = 50_000_000) -> Step | None:
        """The next live STEP, waiting at most `timeout_ns`."""
        if not self._steps:
            self.serve(timeout_ns)
        while self._steps:
            grant = self._steps.popleft()
            request = self.requests.get(grant.request)
            if self.drafting(grant) and request is not None:
                return Step(self, grant, np.frombuffer(request.tokens.tobytes(), np.int32))
        return None

    def serve(self, timeout_ns: int) -> None:
        """One pass of the engine, idling for at most `timeout_ns`; dispatches what arrived to the callbacks."""
        if self.engine.poll() == 0:
            self.engine.wait(timeout_ns)
        self.collect()

    def poll(self) -> None:
        """Serves the engine once, without waiting."""
        self.engine.poll()
        self.collect()

    def collect(self) -> None:
        """Takes new STEPs and events from the session."""
        session = self.session
        if session is None:
            return
        if session.steps:
            self._steps.extend(session.steps)
            session.steps.clear()
        if session.events:
            self._dispatch(session)

    def _dispatch(self, session: LeaderSession) -> None:
        events, session.events = session.events, []
        for kind, request, detail in events:
            if kind == "open":
                for opened in self._on_open:
                    opened(request, list(detail))  # type: ignore[call-overload]
            elif kind == "commit":
                for committed in self._on_commit:
                    committed(request, list(detail))  # type: ignore[call-overload]
            elif kind == "reset":
                for reset in self._on_reset:
                    reset(request, detail)  # type: ignore[arg-type]
            else:
                for closed in self._on_close:
                    closed(request)

    def drafting(self, grant: Grant) -> bool:
        """Whether rows for this grant still reach a live generation."""
        return self.session is not None and grant.alive(grant.generation)

    def put(
        self,
        step: Step,
        grant: Grant,
        position: int,
        weights: npt.NDArray[np.float64] | None,
        counts: npt.NDArray[np.uint32] | None,
        ids: npt.NDArray[np.int32] | None,
    ) -> int | None:
        """See `Step.put`."""
        session = self.session
        if session is None or not grant.alive(step.slot_generation):
            return None
        if (weights is None) == (counts is None):
            raise LocalMisuse("give exactly one of weights and counts")
        if step.support is None:
            token, entries, at, length = self._stage_dense(step, position, weights, counts)
        else:
            token, entries, at, length = self._stage_sparse(step, position, weights, counts, ids)
        assert self._region is not None
        sent = session.put_row(
            grant, step.slot_generation, position, token, entries, self._region.array, at, length
        )
        self.engine.flush()
        self.collect()
        return token if sent else None

    def _row(self, step: Step, position: int) -> int:
        row = position - step.anchor - 1
        if not 0 <= row < step.depth:
            raise LocalMisuse(f"position {position} is outside {step.positions}")
        return row

    def _draw_u24(self, step: Step, position: int) -> int:
        return kernels.draw_u24(step.seed, 1, step.generation, step.round, position)

    def _stage_dense(
        self, step: Step, position: int, weights: npt.NDArray[np.float64] | None, counts: npt.NDArray[np.uint32] | None
    ) -> tuple[int, int, int, int]:
        assert self._region is not None
        assert self._views is not None
        assert self.session is not None
        terms = self.session.terms
        if counts is None:
            assert weights is not None
            _shaped(weights, np.float64, terms.vocab_size, "weights")
            counts = self._counts
            _valid(kernels.allocate(weights, counts))
        else:
            _shaped(counts, np.uint32, terms.vocab_size, "counts")
            if int(counts.sum(dtype=np.uint64)) != 1 << 24:
                raise InvalidQ(Reason.MASS, "counts must sum to 2^24")
        at = self._views.geometry.row_offset(step.slot, self._row(step, position))
        token = kernels.draw(counts, self._draw_u24(step, position))
        kernels.counts_to_q(counts, self._region.array, at)
        return token, terms.vocab_size, at, terms.dense_row_bytes

    def _stage_sparse(
        self,
        step: Step,
        position: int,
        weights: npt.NDArray[np.float64] | None,
        counts: npt.NDArray[np.uint32] | None,
        ids: npt.NDArray[np.int32] | None,
    ) -> tuple[int, int, int, int]:
        assert self._views is not None
        assert self.session is not None
        assert step.support is not None
        if counts is None:
            assert weights is not None
            _shaped(weights, np.float64, self.session.terms.vocab_size, "weights")
            ids, counts = _allocate_top_k(weights, step.support)
        elif ids is None:
            raise LocalMisuse("sparse counts need their ids")
        _sparse_valid(ids, counts, step.support)
        entries = len(ids)
        row = self._row(step, position)
        view_ids, view_q = self._views.sparse(step.slot, row, entries)
        view_ids[:] = ids
        view_q[:] = counts / np.float64(1 << 24)
        token = int(ids[kernels.draw(counts, self._draw_u24(step, position))])
        return token, entries, self._views.geometry.row_offset(step.slot, row), entries * 8

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """See `Step.fail`."""
        if self.session is not None:
            self.session.fail(grant, generation, reason)
            self.engine.flush()


def _allocate_top_k(
    weights: npt.NDArray[np.float64], k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    ids = np.empty(k, np.int32)
    found = kernels.top_k(weights, k, ids)
    ids = ids[:found]
    counts = np.empty(found, np.uint32)
    _valid(kernels.allocate(weights[ids], counts))
    kept = counts > 0
    return ids[kept], counts[kept]


def _shaped(array: npt.NDArray[np.generic], dtype: type[np.generic], length: int, name: str) -> None:
    if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
        raise LocalMisuse(f"{name} must be contiguous {dtype.__name__} [{length}], not {array.dtype} {array.shape}")


def _valid(code: int) -> None:
    if code:
        raise InvalidQ(Reason.from_code(code), "weights")


def _sparse_valid(ids: npt.NDArray[np.int32], counts: npt.NDArray[np.uint32], support: int) -> None:
    if len(ids) != len(counts) or not 1 <= len(ids) <= support:
        raise InvalidQ(Reason.SUPPORT_BOUNDS, f"{len(ids)} ids, {len(counts)} counts, at most {support}")
    if np.any(ids[1:] <= ids[:-1]):
        raise InvalidQ(Reason.ID_ORDER, "ids must rise strictly")
    if np.any(counts == 0):
        raise InvalidQ(Reason.ZERO_ENTRY, "drop zero counts")
    if int(counts.sum(dtype=np.uint64)) != 1 << 24:
        raise InvalidQ(Reason.MASS, "counts must sum to 2^24")


def open_leader(config: EngineConfig) -> Leader:
    """The draft side, embedded in this process. `config.hello` must be a leader's."""
    if config.hello.role.value != "leader":
        raise ConfigError("open_leader needs a leader's HELLO")
    return Leader(config)


def open_receiver(config: EngineConfig) -> Receiver:
    """The target side, embedded in this process. `config.hello` must be a receiver's."""
    if config.hello.role.value != "receiver":
        raise ConfigError("open_receiver needs a receiver's HELLO")
    return Receiver(config)
