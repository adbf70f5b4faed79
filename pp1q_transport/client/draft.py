"""The draft side: STEPs to iterate over, rows to put, and what the target committed or reset.

Between a draft model's loop and the engine, which runs inside these calls. The token of each row is drawn here, by the one
RNG that owns proposals; rows go out while the next one is drafted. SPEC sections 3, 5 and 9.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

import numpy as np

from .. import dyadic, wire
from .._native import kernels
from ..engine import Engine, EngineConfig, Phase
from ..errors import InvalidQ, LocalMisuse, Reason
from ..session.leader import DRAFTING, SENT, Grant, LeaderSession
from ..session.requests import Request, RequestTable
from ..staging import Region, SlotViews
from . import rows
from .endpoint import Endpoint, same_slots

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    import numpy.typing as npt

    from ..session.terms import SessionTerms


class Step:
    """One STEP at the draft: put a row for each position in order, each conditioned on the tokens drawn before it."""

    def __init__(self, leader: Leader, grant: Grant, request: Request) -> None:
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
        self._request = request
        self.received_ns = grant.received_ns

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """int32 [anchor + 1]: a copy of all committed tokens, prompt included."""
        return self.tail(self.anchor + 1)

    def tail(self, count: int) -> npt.NDArray[np.int32]:
        """int32 [<= count]: a copy of the last committed tokens before the first drafted position."""
        end = self.anchor + 1
        return np.array(self._request.tokens[max(0, end - count) : end], np.int32)

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
        self._handed: dict[int, int] = {}  # slot -> the generation that was handed out last
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
        if self._region is None or not same_slots(self._views, geometry, terms.vocab_size):
            if self._region is not None:
                self._region.close()
            self._region = Region(geometry.total_bytes, "pp1q-staging")
            self._views = SlotViews(self._region, geometry, terms.vocab_size, writable=True)
        if len(self._counts) != terms.vocab_size:
            self._counts = np.zeros(terms.vocab_size, np.uint32)
        self.session = LeaderSession(terms, self.requests, self.counters)
        return self.session

    def _on_up(self) -> None:
        self._steps.clear()
        self._handed.clear()

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        self._steps.clear()
        live = list(self.requests.requests)
        session.lost()  # first, since a callback may raise
        self.session = None
        self._dispatch(session)
        for request in live:
            for callback in self._on_reset:
                callback(request, reason)

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
            # A grant is its slot's: it is queued once for each generation, and only the last of them lives.
            if self.drafting(grant) and request is not None and self._handed.get(grant.slot) != grant.generation:
                self._handed[grant.slot] = grant.generation
                return Step(self, grant, request)
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
        while session.events:  # one by one: what is behind a callback that raises stays for the next look
            kind, request, detail = session.events.pop(0)
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
        if session is None or grant.generation != step.slot_generation or grant.state not in (DRAFTING, SENT):
            return None
        if (weights is None) == (counts is None):
            raise LocalMisuse("give exactly one of weights and counts")
        if ids is not None and (counts is None or step.support is None):
            raise LocalMisuse("ids belong to the counts of a sparse row alone")
        # Judged before staging memory is touched: a row that waits there to be sent must stay as it was digested.
        if grant.state == SENT:
            raise LocalMisuse(f"all {step.depth} rows of this step are put already")
        if position != step.anchor + 1 + grant.rows:
            raise LocalMisuse(f"position {position} out of order: the next one is {step.anchor + 1 + grant.rows}")
        if step.support is None:
            token, entries, at, length = self._stage_dense(step, position, weights, counts)
        else:
            token, entries, at, length = self._stage_sparse(step, position, weights, counts, ids)
        assert self._region is not None
        sent = session.put_row(
            grant, step.slot_generation, position, token, entries, self._region.memory, at, length
        )
        self.engine.flush()
        self.collect()
        return token if sent else None

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
            rows.shaped(weights, np.float64, terms.vocab_size, "weights")
            counts = self._counts
            rows.valid(kernels.allocate(weights, counts))
        else:
            rows.shaped(counts, np.uint32, terms.vocab_size, "counts")
            if int(counts.sum(dtype=np.uint64)) != 1 << 24:
                raise InvalidQ(Reason.MASS, "counts must sum to 2^24")
        at = self._views.geometry.row_offset(step.slot, position - step.anchor - 1)
        token = kernels.draw(counts, self._draw_u24(step, position))
        kernels.counts_to_q(counts, self._region.memory, at)
        # A sparse row that stood here before may have reached into what is padding now.
        self._region.array[at + 4 * terms.vocab_size : at + terms.dense_row_bytes] = 0
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
            rows.shaped(weights, np.float64, self.session.terms.vocab_size, "weights")
            ids, counts = dyadic.allocate_top_k(weights, step.support)
        elif ids is None:
            raise LocalMisuse("sparse counts need their ids")
        rows.sparse_valid(ids, counts, step.support, self.session.terms.vocab_size)
        entries = len(ids)
        row = position - step.anchor - 1
        view_ids, view_q = self._views.sparse(step.slot, row, entries)
        view_ids[:] = ids
        view_q[:] = counts / np.float64(1 << 24)
        token = int(ids[kernels.draw(counts, self._draw_u24(step, position))])
        return token, entries, self._views.geometry.row_offset(step.slot, row), entries * 8

    def close(self) -> None:
        """See `Endpoint.close`; frees the staging memory too."""
        super().close()
        if self._region is not None:
            self._region.close()
        self._region = None
        self._views = None

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """See `Step.fail`."""
        if self.session is not None:
            self.session.fail(grant, generation, reason)
            self.engine.flush()
