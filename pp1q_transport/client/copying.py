"""Copy stages of engines with a device: rows go up before a proposal is ready, and come down before they are published.

Between a stage, which the engine brings and which alone knows the device, and both sides, which wait for it. Knows no device
itself. Memory that a copy may still read or write is neither granted, reused nor unmapped. SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

import numpy as np

from .._native.kernels import monotonic_ns
from ..errors import LocalMisuse, ProposalDiscarded, Reason
from ..wire import U32_MAX

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..session.requests import Request
    from .draft_side import Step
    from .proposal import Proposal, ProposalFacts

LOOK_NS: Final = 100_000  # how often what waits for a copy looks at it and at its peer
BUFFERS_AT_MOST: Final = 16  # host rows of a leader: those under way, and those given up whose copy still runs


class RowPart(NamedTuple):
    """Whose copy a stage is asked for on the target side: the slot, the row in it (0 is the first drafted position), and
    "values" (float32) or, of a sparse row, "ids" (int32)."""

    slot: int
    row: int
    part: str


class DeviceRow(NamedTuple):
    """What a stage made of one row: its tokens for the values and, of a sparse row, for the IDs (None of a dense one)."""

    values: Any
    ids: Any


class CopyStage(Protocol):
    """The engine's copies. All methods are called from the thread that serves the side, and none may block but `wait`.

    Whatever one of them raises fails that copy and with it the proposal (`copy_failed`); a copy whose `done` raised is over:
    it touches its memory no more.
    """

    def start(self, what: Any, view: npt.NDArray[Any]) -> Any:
        """Begins one copy and returns its token.

        Target: from `view` (read-only, in the slot's memory) to the device; `what` is a `RowPart`, the token is what
        `Proposal.device_rows` shows. Draft: from the device to `view` (writable host memory); `what` is the handle given to
        `Step.put(device=...)`.
        """

    def done(self, token: Any) -> bool:
        """Whether the copy is over: the data is where it belongs, and the view's memory is no longer touched."""

    def wait(self, token: Any, timeout_ns: int) -> None:
        """Idles until the copy is over or about `timeout_ns` have passed; may return early. Meanwhile nobody serves the peer."""


class Copies:
    """Some copies of one stage that belong together."""

    def __init__(self, stage: CopyStage) -> None:
        self.stage = stage
        self.failed: Exception | None = None
        self._pending: list[tuple[Any, npt.NDArray[Any]]] = []  # the views too: their memory stays mapped as long

    def start(self, what: Any, view: npt.NDArray[Any]) -> Any:
        """Begins one, unless an earlier one failed already. Returns its token."""
        if self.failed is not None:
            return None
        try:
            token = self.stage.start(what, view)
        except Exception as error:  # noqa: BLE001 - the engine's code: whatever it raises costs this proposal alone
            self.failed = error
            return None
        self._pending.append((token, view))
        return token

    @property
    def running(self) -> bool:
        """Whether some were not over at the last look."""
        return bool(self._pending)

    def look(self) -> bool:
        """Whether all are over, failed or not."""
        still = []
        for token, view in self._pending:
            try:
                if not self.stage.done(token):
                    still.append((token, view))
            except Exception as error:  # noqa: BLE001 - as above
                self.failed = self.failed or error
        self._pending = still
        return not still

    def idle(self, timeout_ns: int) -> None:
        """Idles by the stage's own means, for about `timeout_ns` at most."""
        if self._pending and timeout_ns > 0:
            try:
                self.stage.wait(self._pending[0][0], timeout_ns)
            except Exception as error:  # noqa: BLE001 - as above; whether the copy is over its `done` will say
                self.failed = self.failed or error


# ---- target side: host to device ------------------------------------------------------------------------------------------


class Receiving(Protocol):
    """What is needed of the receiver whose rows are copied."""

    def check_held(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.check_held`."""

    def let_go(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.let_go`."""

    def void(self, request: Request, facts: ProposalFacts, reason: Reason, detail: str) -> None:
        """See `TargetSide.void`."""


class RowsUp(Copies):
    """The copies of one ready proposal's rows. It is the target's only once all are over, within the budget of its STEP."""

    def __init__(self, stage: CopyStage, proposal: Proposal, request: Request, enqueued_ns: int, deadline_ns: int) -> None:
        super().__init__(stage)
        self.proposal = proposal
        self.request = request
        self.enqueued_ns = enqueued_ns
        self.deadline_ns = deadline_ns
        self.over: ProposalDiscarded | bool = False
        self.lost = False  # its daemon or epoch is over: no fault of a copy's
        here = range(proposal.depth) if proposal.facts.representation else ()  # or another rank has its rows
        self.device_rows = [self._start(proposal, index) for index in here]

    def _start(self, proposal: Proposal, index: int) -> DeviceRow:
        q = proposal.q(index)
        ids = None if q.ids is None else self.start(RowPart(proposal.slot, index, "ids"), q.ids)
        return DeviceRow(self.start(RowPart(proposal.slot, index, "values"), q.values), ids)

    def result(self) -> Proposal:
        """The proposal with its device rows, or `ProposalDiscarded`; only when over."""
        if isinstance(self.over, ProposalDiscarded):
            raise self.over from self.failed
        return self.proposal


class CopiesUp:
    """The copies of one receiver: of tickets that wait for them, and of proposals that were given up and are still read."""

    def __init__(self, receiver: Receiving) -> None:
        self.stage: CopyStage | None = None
        self._receiver = receiver
        self._running: list[RowsUp] = []

    def __len__(self) -> int:
        return len(self._running)

    def begin(self, proposal: Proposal, request: Request, enqueued_ns: int, deadline_ns: int) -> RowsUp | None:
        """Begins the copies of a proposal that became ready just now; None without a stage."""
        if self.stage is None:
            return None
        rows = RowsUp(self.stage, proposal, request, enqueued_ns, deadline_ns)
        self._running.append(rows)
        return rows

    def settled(self, rows: RowsUp) -> bool:
        """Whether the outcome is known. A failure or the end of the budget discards the proposal, at once and for good."""
        if rows.over:
            return True
        facts = rows.proposal.facts
        try:
            self._receiver.check_held(facts)
        except ProposalDiscarded as lost:  # its daemon or epoch is over
            rows.over, rows.lost = lost, True
            return True
        done = rows.look()
        now_ns = monotonic_ns()
        if rows.failed is not None:
            self._discard(rows, Reason.COPY_FAILED, repr(rows.failed))
        elif done:
            rows.over = True
            rows.proposal.device_rows = rows.device_rows
            rows.proposal.latency_ns = now_ns - rows.enqueued_ns
            self._running.remove(rows)
        elif now_ns >= rows.deadline_ns:
            self._discard(rows, Reason.TIMEOUT, "the copy to the device is not over")
        return bool(rows.over)

    def _discard(self, rows: RowsUp, reason: Reason, detail: str) -> None:
        facts = rows.proposal.facts
        rows.over = ProposalDiscarded(
            reason, rows.request.request, rows.proposal.round, min(facts.request_generation + 1, U32_MAX)
        )
        self._receiver.void(rows.request, facts, reason, detail)
        self._reap()

    def look(self) -> None:
        """Settles what can be settled, whoever waits for it or not."""
        for rows in self._running[:]:
            if not rows.over:
                self.settled(rows)
        self._reap()

    @property
    def running(self) -> bool:
        """Whether a device may read slots now."""
        return any(not rows.look() for rows in self._running)

    @property
    def awaited(self) -> bool:
        """Whether some proposal becomes ready once its copies are over."""
        return any(not rows.over for rows in self._running)

    def _reap(self) -> None:
        """Gives back the slots of proposals that were given up, as far as the device reads them no more."""
        for rows in [rows for rows in self._running if isinstance(rows.over, ProposalDiscarded)]:
            if rows.look():
                self._running.remove(rows)
                self._receiver.let_go(rows.proposal.facts)

    def close(self) -> int:
        """The receiver ends. Memory that is still read stays mapped until it is not. Returns how many proposals that are."""
        left = [rows for rows in self._running if not rows.look()]
        self._running.clear()
        _keep_mapped(left)
        return len(left)


_left_running: list[Copies] = []


def _keep_mapped(left: list[RowsUp]) -> None:
    _left_running[:] = [copies for copies in _left_running if not copies.look()]
    _left_running.extend(left)


# ---- draft side: device to host -------------------------------------------------------------------------------------------


class RowDown(Copies):
    """One row on its way from the device to `buffer` (float64 weights or uint32 counts, [V])."""

    def __init__(self, stage: CopyStage, step: Step, position: int, device: Any, buffer: npt.NDArray[Any]) -> None:
        super().__init__(stage)
        self.step = step
        self.position = position
        self.buffer = buffer
        self.start(device, buffer)


HOLDS: Final[dict[str, type[np.generic]]] = {"weights": np.float64, "counts": np.uint32}


class CopiesDown:
    """The host rows of one leader: reused once their copy is over, few, each at the start of a page."""

    def __init__(self) -> None:
        self.stage: CopyStage | None = None
        self._free: dict[tuple[str, int], list[npt.NDArray[Any]]] = {}
        self._given_up: list[RowDown] = []
        self._made = 0
        self._closed = False

    def begin(self, step: Step, position: int, device: Any, holds: str, vocab_size: int) -> RowDown:
        """Begins the copy of one row. Raises `LocalMisuse` when nothing more can be begun."""
        if self.stage is None:
            raise LocalMisuse("put(device=...) needs a copy stage: call use_copy_stage first")
        return RowDown(self.stage, step, position, device, self._buffer(holds, vocab_size))

    def _buffer(self, holds: str, vocab_size: int) -> npt.NDArray[Any]:
        for rows in self._given_up[:]:
            if rows.look():
                self._given_up.remove(rows)
                self.give_back(rows)
        free = self._free.setdefault((holds, vocab_size), [])
        if free:
            return free.pop()
        if self._made >= BUFFERS_AT_MOST:
            stuck = len(self._given_up)
            raise LocalMisuse(f"all {self._made} host rows are in use, {stuck} by copies that were given up and still run")
        self._made += 1
        return _page_aligned(vocab_size, HOLDS[holds])

    def give_back(self, row: RowDown) -> None:
        """The row is sent or given up: its buffer is reused as soon as its copy is over."""
        if row.running and not row.look():
            (_left_running if self._closed else self._given_up).append(row)
            return
        holds = "weights" if row.buffer.dtype == np.float64 else "counts"
        self._free.setdefault((holds, len(row.buffer)), []).append(row.buffer)

    def close(self) -> int:
        """The leader ends. Memory that is still written stays mapped until it is not. Returns how many rows that are."""
        self._closed = True  # a task that still waits for its row gives it up after this
        left = [row for row in self._given_up if not row.look()]
        self._given_up.clear()
        _left_running.extend(left)
        return len(left)


def _page_aligned(length: int, dtype: type[np.generic], page: int = 4096) -> npt.NDArray[Any]:
    """A zeroed vector that shares no page with anything else, so that a stage can register it with its device."""
    size = length * np.dtype(dtype).itemsize
    raw = np.zeros((size + page - 1) // page * page + page, np.uint8)
    start = -raw.ctypes.data % page
    return raw[start : start + size].view(dtype)


__all__ = ["LOOK_NS", "CopyStage", "DeviceRow", "RowPart"]
