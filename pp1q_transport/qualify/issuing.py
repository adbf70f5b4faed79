"""The receiver's measured loops: STEPs out, proposals in, each taken as ready only when the session says so.

Between `measuring`, which walks the stages, and the session and link of one `Receiver`. Creates no numpy view inside a measured
interval (that is an application's own cost) and spends no time on checks there: what landed is compared with what must have
been sent in the warm-up and after the last round of every stage. SPEC section 9.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from .. import wire
from .._native import kernels
from .._native.kernels import monotonic_ns
from ..errors import PeerFault, Reason
from ..session import slots as st
from .motion import advance_of, live_link, look_around, lost_link
from .plan import BATCHES_IN_FLIGHT, BUDGET_US, PROMPT, Plan, Stage, StageKind, first_row, request_base, stage_requests
from .stats import CpuTimes, Nanoseconds, cpu_s_per_GB

if TYPE_CHECKING:
    from ..client import Receiver
    from ..session.requests import Request
    from ..session.slots import Slot

PAUSE_NS: Final = 40_000  # between two proposals, so that the leader has taken the COMMIT and idles again
BONUS: Final = 0
READY: Final = st.READY


@dataclass(slots=True)
class Block:
    """What one stage gave: ready times and STEP times in ns (uint64 [n], 0 for a discarded one), or a goodput."""

    stage: Stage
    enqueued_ns: Nanoseconds = field(default_factory=lambda: np.empty(0, np.uint64))
    ready_ns: Nanoseconds = field(default_factory=lambda: np.empty(0, np.uint64))
    elapsed_ns: int = 0
    payload_bytes: int = 0
    rows: int = 0
    cpu_s: float = 0.0


class Issuer:
    """Runs transport stages. `expected` is (length, XXH3-64) of every source row. `close` frees every slot and request."""

    def __init__(self, receiver: Receiver, plan: Plan, expected: list[tuple[int, int]]) -> None:
        self.receiver = receiver
        self.plan = plan
        self.rows_compared = 0
        self.reasons: dict[str, int] = {}
        self.ready = 0
        self.discarded = 0
        self._expected = expected
        self._open: list[Request] = []
        self._indexes: dict[int, int] = {}
        self._granted: dict[int, Slot] = {}

    def run(self, stage: Stage) -> Block:
        """One transport stage, with requests of its own. Raises `PeerFault`."""
        session = self.receiver.session
        base = request_base(session.terms.session) if session is not None else 0
        self._open = [
            self.receiver.open_request(base + number, PROMPT, seed=seed)
            for _, number, seed, _ in stage_requests(self.plan, stage)
        ]
        self._indexes = {request.request: index for index, request in enumerate(self._open)}
        live_link(self.receiver).pump(monotonic_ns())
        try:
            return self._goodput(stage) if stage.kind is StageKind.GOODPUT else self._one_by_one(stage)
        finally:
            self.close()

    def close(self) -> None:
        """Gives every slot back and closes every request of the stage."""
        for slot in self._granted.values():
            self.receiver.release(slot, slot.generation)
        self._granted.clear()
        while self._open:
            self.receiver.close_request(self._open.pop())
        if self.receiver.up:
            self.receiver.engine.flush()

    # ---- one proposal at a time ---------------------------------------------------------------------------------

    def _one_by_one(self, stage: Stage) -> Block:
        plan, receiver, request = self.plan, self.receiver, self._open[0]
        session, link = receiver.session, live_link(receiver)
        assert session is not None
        total = stage.warmup + stage.count
        enqueued, ready = np.full(total, 0, np.uint64), np.full(total, 0, np.uint64)
        advance, step, pump, clock = advance_of(link, plan.idle), session.step, link.pump, monotonic_ns
        depth, policy, code = plan.depth, plan.policy, plan.representation_code
        for index in range(total):
            start_ns = clock()
            slot = step(request, start_ns, depth, 1.0, policy, code, 0, BUDGET_US, index)
            assert slot is not None  # one of many slots, and all are free
            pump(start_ns)
            while slot.state < READY:
                moved = advance()
                if moved <= 0:
                    self._stalled(moved)
            end_ns = clock()  # not the session's own time, which is that of the receive that began the last bytes
            if slot.state == READY:
                enqueued[index], ready[index] = start_ns, end_ns
            self._granted[slot.index] = slot
            self._take(request, slot, index < stage.warmup or index + 1 == total)
            self._pause()
        return Block(stage, enqueued[stage.warmup :], ready[stage.warmup :])

    def _pause(self) -> None:
        self._send_queued()
        if self.plan.idle == "block":
            time.sleep(PAUSE_NS / 1e9)
            return
        until_ns = monotonic_ns() + PAUSE_NS
        while monotonic_ns() < until_ns:
            pass

    def _send_queued(self) -> None:
        """By the engine's own pass, which also answers the control plane now and then, as it does for an application."""
        self.receiver.engine.poll()
        live_link(self.receiver)

    def _stalled(self, moved: int) -> None:
        """Nothing moved for a while, or the link is lost: the watchdog, the control plane, or the end."""
        if moved < 0:
            raise lost_link(self.receiver, moved)
        look_around(self.receiver)
        self.receiver.poll()
        live_link(self.receiver)

    # ---- batches ------------------------------------------------------------------------------------------------

    def _goodput(self, stage: Stage) -> Block:
        self._batches(stage, 0, stage.warmup, True)
        block = Block(stage)
        session = self.receiver.session
        assert session is not None
        bytes_before, rows_before, cpu = session.bytes_ready, session.rows, CpuTimes.now()
        began_ns = monotonic_ns()
        block.elapsed_ns = self._batches(stage, stage.warmup, stage.count, False) - began_ns
        block.cpu_s = CpuTimes.now().total_s - cpu.total_s
        block.payload_bytes, block.rows = session.bytes_ready - bytes_before, session.rows - rows_before
        return block

    def _batches(self, stage: Stage, first: int, count: int, compare: bool) -> int:
        """`count` batches from number `first` on, two in flight; batch i uses request set i modulo 2.

        Returns when the last of them was ready (monotonic ns). The last one's rows are compared, after that, or all (`compare`).
        """
        each = self.plan.requests
        advance = advance_of(live_link(self.receiver), self.plan.idle)
        sets = [self._open[each * index : each * (index + 1)] for index in range(BATCHES_IN_FLIGHT)]
        flying: list[list[tuple[Request, Slot]]] = []
        finished_ns, issued = 0, first
        while issued < min(first + BATCHES_IN_FLIGHT, first + count):
            flying.append(self._issue(sets[issued % BATCHES_IN_FLIGHT]))
            issued += 1
            self._send_queued()
        for number in range(first, first + count):
            batch = flying.pop(0)
            for _request, slot in batch:
                while slot.state < READY:
                    moved = advance()
                    if moved <= 0:
                        self._stalled(moved)
            finished_ns = monotonic_ns()
            for request, slot in batch:
                self._take(request, slot, compare or number + 1 == first + count)
            if issued < first + count:
                flying.append(self._issue(sets[issued % BATCHES_IN_FLIGHT]))
                issued += 1
            self._send_queued()
        return finished_ns

    def _issue(self, requests: list[Request]) -> list[tuple[Request, Slot]]:
        session, plan = self.receiver.session, self.plan
        assert session is not None
        now_ns, batch = monotonic_ns(), []
        depth, policy, code = plan.depth, plan.policy, plan.representation_code
        for request in requests:
            slot = session.step(request, now_ns, depth, 1.0, policy, code, 0, BUDGET_US, 0)
            assert slot is not None  # there are slots for two batches
            self._granted[slot.index] = slot
            batch.append((request, slot))
        return batch

    # ---- what became of a proposal ------------------------------------------------------------------------------

    def _take(self, request: Request, slot: Slot, compare: bool) -> None:
        """Consumes a settled proposal: commits as if every draft were accepted, plus one token more."""
        session = self.receiver.session
        assert session is not None
        session.settled.clear()
        depth = self.plan.depth
        if slot.state == READY:
            self.ready += 1
            if compare:
                self._compare(request, slot)
            tokens = self.receiver.views.tokens(slot.index, depth).tolist()
            tokens.append(BONUS)
            session.release(slot, slot.generation, 0, 0)
            session.commit(request, slot.round, wire.VERIFIED, depth, tokens)
        else:
            self.discarded += 1
            reason = Reason.from_code(slot.reason).value
            self.reasons[reason] = self.reasons.get(reason, 0) + 1
            self.receiver.poll()
            live_link(self.receiver)
            session.commit(request, slot.round, wire.TARGET_ONLY, 0, [BONUS] * (depth + 1))
        self._granted.pop(slot.index, None)

    def _compare(self, request: Request, slot: Slot) -> None:
        """Slot bytes against the rows that the plan says were sent. Raises `PeerFault(payload_digest)`."""
        memory = self.receiver.session.memory if self.receiver.session is not None else b""
        first = first_row(self.plan, self._indexes[request.request], slot.round)
        for row in range(self.plan.depth):
            length, digest = self._expected[first + row]
            at = slot.rows_at + row * slot.row_bytes
            if kernels.xxh3_64(memory, at, length, 0) != digest:
                raise PeerFault(Reason.PAYLOAD_DIGEST, f"slot {slot.index}, row {row}: ready, but not the row that was sent")
            self.rows_compared += 1


def cpu_of(blocks: list[Block], leader_cpu_s: float) -> float | None:
    """CPU seconds of both ends for each 10^9 bytes that became ready in these goodput blocks; None for no bytes."""
    total = sum(block.payload_bytes for block in blocks)
    if not total:
        return None
    spent = CpuTimes(sum(block.cpu_s for block in blocks), leader_cpu_s)
    return cpu_s_per_GB(CpuTimes(0.0, 0.0), spent, total)
