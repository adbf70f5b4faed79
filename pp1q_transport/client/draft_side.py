"""What every draft side does: STEPs to iterate over, rows staged and drawn, and callbacks for what the target does.

Between the draft's loop and the two leaders that share it: embedded (`draft`) and beside a daemon (`attached_draft`). The token
of each row is drawn here, by the one RNG that owns proposals. Moves no frames. SPEC sections 3, 5 and 9.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dyadic, wire
from .._native import kernels
from ..errors import InvalidQ, LocalMisuse, Reason
from ..session.leader import DRAFTING, SENT, Grant
from . import rows
from .copying import HOLDS, LOOK_NS, CopiesDown
from .events import Events
from .mapped import Mapped

if TYPE_CHECKING:
    from collections.abc import Iterator

    import numpy.typing as npt

    from ..counters import Counters
    from ..session.requests import Request
    from ..staging import Region, SlotViews
    from .copying import CopyStage, RowDown


class Step:
    """One STEP at the draft: put a row for each position in order, each conditioned on the tokens drawn before it.

    `target` is the index of the target that asked (0 for a leader that serves one).
    """

    def __init__(self, leader: DraftSide, grant: Grant, request: Request, target: int = 0) -> None:
        self._leader = leader
        self._grant = grant
        self.target = target
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
        return self._grant.generation == self.slot_generation and self._leader.drafting(self._grant, self.target)

    def put(
        self,
        position: int,
        *,
        weights: npt.NDArray[np.float64] | None = None,
        counts: npt.NDArray[np.uint32] | None = None,
        ids: npt.NDArray[np.int32] | None = None,
        device: object = None,
        holds: str = "weights",
    ) -> int | None:
        """Allocates (from `weights`, float64 [V]) or takes (`counts`, uint32 [V], or [n] with `ids` int32 [n]) the row of
        `position`, draws its token by the owned RNG, and sends the row. Returns the token; None when the proposal is dead.

        `device` is a handle that the leader's copy stage brings to the host first; it `holds` "weights" or "counts", as above.
        Raises `InvalidQ` for weights or counts that make no q (SPEC section 3), and what a copy stage raises, after the STEP
        was given up (`copy_failed`).
        """
        if device is None:
            return self._leader.put_row_of(self, self._grant, position, weights, counts, ids)
        if weights is not None or counts is not None or ids is not None:
            raise LocalMisuse("give either device or weights or counts")
        row = self.begin_copy(position, device, holds)
        if row is None:
            return None
        while not self.copy_over(row):
            self._leader.poll()
            row.idle(LOOK_NS)
        return self.end_copy(row)

    def begin_copy(self, position: int, device: object, holds: str) -> RowDown | None:
        """The first part of `put(device=...)`: begins the copy. None when the proposal is dead. `end_copy` must follow."""
        return self._leader.begin_row(self, self._grant, position, device, holds)

    def copy_over(self, row: RowDown) -> bool:
        """Whether `end_copy` may be called: the copy is over, or failed, or the proposal is dead. Serves nothing."""
        return row.look() or row.failed is not None or not self.alive

    def end_copy(self, row: RowDown) -> int | None:
        """The last part of `put(device=...)`: sends the row, unless the proposal is dead; gives its host memory back."""
        return self._leader.end_row(self, self._grant, row)

    def fail(self, reason: Reason = Reason.CANCELLED) -> None:
        """Gives the STEP up: the receiver discards the proposal with this reason at once. (A daemon passes on reasons that a
        draft can have; `bad_magic`, say, is none, and becomes `cancelled`.)"""
        self._leader.fail(self._grant, self.slot_generation, reason, self.target)


class Staging:
    """The staging memory of one target's slots and the rows written into it in place."""

    def __init__(self, region: Region, views: SlotViews, dense_row_bytes: int) -> None:
        self.region = region
        self.views = views
        self.dense_row_bytes = dense_row_bytes
        self._counts: npt.NDArray[np.uint32] = np.zeros(views.vocab_size, np.uint32)

    def dense(
        self, step: Step, position: int, weights: npt.NDArray[np.float64] | None, counts: npt.NDArray[np.uint32] | None
    ) -> tuple[int, int, int, int]:
        """Writes q of a dense row. Returns (token, entries, offset, bytes)."""
        vocab_size = self.views.vocab_size
        if counts is None:
            assert weights is not None
            rows.shaped(weights, np.float64, vocab_size, "weights")
            counts = self._counts
            rows.valid(kernels.allocate(weights, counts))
        else:
            rows.shaped(counts, np.uint32, vocab_size, "counts")
            if int(counts.sum(dtype=np.uint64)) != 1 << 24:
                raise InvalidQ(Reason.MASS, "counts must sum to 2^24")
        at = self.views.geometry.row_offset(step.slot, position - step.anchor - 1)
        token = kernels.draw(counts, draw_u24(step, position))
        kernels.counts_to_q(counts, self.region.memory, at)
        # A sparse row that stood here before may have reached into what is padding now.
        self.region.array[at + 4 * vocab_size : at + self.dense_row_bytes] = 0
        return token, vocab_size, at, self.dense_row_bytes

    def sparse(
        self,
        step: Step,
        position: int,
        weights: npt.NDArray[np.float64] | None,
        counts: npt.NDArray[np.uint32] | None,
        ids: npt.NDArray[np.int32] | None,
    ) -> tuple[int, int, int, int]:
        """Writes q and IDs of a sparse row. Returns (token, entries, offset, bytes)."""
        assert step.support is not None
        if counts is None:
            assert weights is not None
            rows.shaped(weights, np.float64, self.views.vocab_size, "weights")
            ids, counts = dyadic.allocate_top_k(weights, step.support)
        elif ids is None:
            raise LocalMisuse("sparse counts need their ids")
        rows.sparse_valid(ids, counts, step.support, self.views.vocab_size)
        entries = len(ids)
        row = position - step.anchor - 1
        view_ids, view_q = self.views.sparse(step.slot, row, entries)
        view_ids[:] = ids
        view_q[:] = counts / np.float64(1 << 24)
        token = int(ids[kernels.draw(counts, draw_u24(step, position))])
        return token, entries, self.views.geometry.row_offset(step.slot, row), entries * 8


def draw_u24(step: Step, position: int) -> int:
    """The 24 bits that choose the token of `position`: the proposal domain, owned by this side alone (SPEC section 5)."""
    return kernels.draw_u24(step.seed, 1, step.generation, step.round, position)


class DraftSide(Events, Mapped, ABC):
    """What both leaders are: an iterator of STEPs, callbacks, and the way of a row."""

    counters: Counters
    log: Any

    def __init__(self) -> None:
        Events.__init__(self)
        Mapped.__init__(self)
        self.copies = CopiesDown()

    # ---- what a leader adds -------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def over(self) -> bool:
        """Whether there will be no further STEP: this side was closed."""

    @abstractmethod
    def poll(self) -> int:
        """Serves what moves the frames once, without waiting. Returns how much that moved."""

    @abstractmethod
    def next_step(self, timeout_ns: int = 50_000_000) -> Step | None:
        """The next live STEP, waiting at most `timeout_ns`."""

    @abstractmethod
    def take_step(self) -> Step | None:
        """The next live STEP of those that came already. Serves nothing."""

    @abstractmethod
    def drafting(self, grant: Grant, target: int = 0) -> bool:
        """Whether rows for this grant still reach a live generation."""

    @abstractmethod
    def staging_of(self, target: int) -> Staging | None:
        """The staging memory of a target's slots; None when its session is gone."""

    @abstractmethod
    def send_row(self, grant: Grant, step: Step, position: int, token: int, entries: int, offset: int, length: int) -> bool:
        """Sends a row that is staged. False when the proposal is dead."""

    @abstractmethod
    def fail(self, grant: Grant, generation: int, reason: Reason, target: int = 0) -> None:
        """See `Step.fail`."""

    # ---- what they share ----------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Step]:
        """STEPs as they come, across reconnects; ends when this side is closed."""
        while not self.over:
            step = self.next_step()
            if step is not None:
                yield step

    def put_row_of(
        self,
        step: Step,
        grant: Grant,
        position: int,
        weights: npt.NDArray[np.float64] | None,
        counts: npt.NDArray[np.uint32] | None,
        ids: npt.NDArray[np.int32] | None,
    ) -> int | None:
        """See `Step.put`."""
        staging = self.staging_of(step.target)
        if staging is None or grant.generation != step.slot_generation or grant.state not in (DRAFTING, SENT):
            return None
        if (weights is None) == (counts is None):
            raise LocalMisuse("give exactly one of weights and counts")
        if ids is not None and (counts is None or step.support is None):
            raise LocalMisuse("ids belong to the counts of a sparse row alone")
        self._judge_place(step, grant, position)
        if step.support is None:
            token, entries, at, length = staging.dense(step, position, weights, counts)
        else:
            token, entries, at, length = staging.sparse(step, position, weights, counts, ids)
        return token if self.send_row(grant, step, position, token, entries, at, length) else None

    def _judge_place(self, step: Step, grant: Grant, position: int) -> None:
        """Judged before staging memory is touched: a row that waits there to be sent must stay as it was digested."""
        if grant.state == SENT:
            raise LocalMisuse(f"all {step.depth} rows of this step are put already")
        if position != step.anchor + 1 + grant.rows:
            raise LocalMisuse(f"position {position} out of order: the next one is {step.anchor + 1 + grant.rows}")

    # ---- copies from a device (`copying`) -----------------------------------------------------------------------

    def use_copy_stage(self, stage: CopyStage | None) -> None:
        """From now on `put(device=...)` has rows brought to the host by `stage`; a row is published only once it is there."""
        self.copies.stage = stage

    def begin_row(self, step: Step, grant: Grant, position: int, device: object, holds: str) -> RowDown | None:
        """See `Step.begin_copy`."""
        if holds not in HOLDS:
            raise LocalMisuse(f"holds must be one of {', '.join(HOLDS)}, not {holds!r}")
        if holds == "counts" and step.support is not None:
            raise LocalMisuse("the counts of a sparse row need their ids: bring both to the host, or give weights")
        staging = self.staging_of(step.target)
        if staging is None or grant.generation != step.slot_generation or grant.state not in (DRAFTING, SENT):
            return None
        self._judge_place(step, grant, position)
        return self.copies.begin(step, position, device, holds, staging.views.vocab_size)

    def end_row(self, step: Step, grant: Grant, row: RowDown) -> int | None:
        """See `Step.end_copy`."""
        try:
            if row.failed is not None:
                self.counters.refuse(Reason.COPY_FAILED)
                self.log.warning("copy_failed", detail=repr(row.failed), request=step.request, round=step.round)
                step.fail(Reason.COPY_FAILED)
                raise row.failed
            if row.running:
                if step.alive:
                    raise LocalMisuse("end_copy before copy_over said that it may be called")
                return None
            given = {"weights" if row.buffer.dtype == np.float64 else "counts": row.buffer}
            return self.put_row_of(step, grant, row.position, given.get("weights"), given.get("counts"), None)
        finally:
            self.copies.give_back(row)

    def _close_copies(self) -> None:
        left = self.copies.close()
        if left:
            self.counters.add("copies_left_running", left)
            self.log.warning("copies_left_running", rows=left)
