"""The benchmark's leader: proposes the plan, answers STEPs with rows that are staged and drawn already, serves the floors.

Between `pp1q-send` and the client's `Leader`, whose session and link the measured loop drives directly. Measures nothing but
its own CPU time and when it staged the last row of a proposal; the figures come from the receiver. SPEC section 9.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import PeerFault, Reason
from . import messages
from .answering import Answerer
from .floors import FloorConfig, FloorPeer
from .motion import advance_of, await_message, live_link, look_around, lost_link
from .plan import (
    ROW_GAP_NS,
    Plan,
    Stage,
    StageKind,
    boot_id,
    floor_plans,
    request_base,
    stage_steps,
    stages,
    transport_stage,
)
from .source import Source
from .stats import CpuTimes, Nanoseconds, Report, pin

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client import Leader
    from .floor_plan import FloorAddress

REPORT_S: Final = 60.0


class LeaderRun:
    """One run at the leader, over a session that is up. `host` is where the receiver's floors can be reached."""

    def __init__(
        self, leader: Leader, plan: Plan, host: str, cpu: int | None, progress: Callable[[str, int, int], None]
    ) -> None:
        self.leader = leader
        self.plan = plan
        self._host = host
        self._cpu = cpu
        self._progress = progress
        self._floors: FloorPeer | None = None
        self._address: FloorAddress | None = None
        self._source: Source | None = None

    def run(self) -> Report:
        """Proposes, serves every stage, and returns the receiver's report. Raises `PeerFault`; the affinity is as before."""
        before = os.sched_getaffinity(0)
        try:
            self._propose()
            done = stages(self.plan)
            with messages.quiet_gc():
                for number, stage in enumerate(done):
                    self._progress(stage.kind.value, number, len(done))
                    self._run_stage(stage)
            return Report.from_dict(self._receive("report", REPORT_S))
        finally:
            if self._floors is not None:
                self._floors.close()
            os.sched_setaffinity(0, before)

    def samples_ns(self, count: int) -> Nanoseconds:
        """The `count` latency samples of the run: uint64 [count]. Raises `PeerFault` when they do not come."""
        pieces: list[bytes] = []
        taken = 0
        while taken < count:
            self.leader.send_message("options", {"samples_from": taken})
            body = messages.checked(self._receive("report", messages.ANSWER_S), messages.SAMPLES, "samples")
            piece = body["ns"]
            assert isinstance(piece, bytes)
            if body["from"] != taken or not piece or len(piece) % 8 or len(piece) // 8 > count - taken:
                raise PeerFault(Reason.MALFORMED, f"samples: {len(piece)} bytes from {body['from']}, wanted {taken} on")
            pieces.append(piece)
            taken += len(piece) // 8
        return np.frombuffer(b"".join(pieces), np.dtype("<u8"))

    def _receive(self, kind: str, timeout_s: float) -> object:
        body = await_message(self.leader, kind, timeout_s)
        if isinstance(body, dict) and body.keys() == {"error"}:
            messages.checked(body, {}, kind)
        return body

    def _propose(self) -> None:
        own = boot_id()
        self._progress("preparing rows", 0, 1)
        self.leader.send_message("options", {"plan": self.plan.to_map(), "boot_id": own, "cpu": self._stated_cpu})
        self._source = Source(self.plan)
        answer = messages.checked(self._receive("report", messages.ANSWER_S), messages.ACCEPTED, "answer to the options")
        self._address = messages.floor_address(answer["floors"])
        if (self._address is None) == self.plan.floors:
            raise PeerFault(Reason.MALFORMED, "answer to the options: floors asked for and offered differ")
        if self._cpu is None and own and answer["boot_id"] == own:
            self._cpu = second_cpu(answer["cpu"])
        if self._cpu is not None:
            pin(self._cpu)
        self.leader.send_message("options", {"begin": True, "cpu": self._stated_cpu})

    @property
    def _stated_cpu(self) -> int:
        return messages.NOT_PINNED if self._cpu is None else self._cpu

    # ---- stages -------------------------------------------------------------------------------------------------

    def _run_stage(self, stage: Stage) -> None:
        if transport_stage(stage):
            self._serve(stage)
        elif stage.kind is StageKind.OPEN_FLOORS:
            assert self._address is not None
            config = FloorConfig("leader", self.plan.idle)  # type: ignore[arg-type]  # the plan has checked it
            self._floors = FloorPeer.connect(config, self._address._replace(host=self._host))
            self._floors.prepare(self.plan.batch_bytes, 2)
        elif stage.kind is not StageKind.MEMCPY:
            assert self._floors is not None
            for test in floor_plans(self.plan, stage):
                self._floors.run(test)

    def _serve(self, stage: Stage) -> None:
        """Answers every STEP of a stage, then says what that took."""
        session, link = self.leader.session, live_link(self.leader)
        assert session is not None
        assert self._source is not None
        answer = Answerer(self._source, session, link, request_base(session.terms.session)).answer
        advance = advance_of(link, self.plan.idle)
        warmup, total = stage_steps(self.plan, stage)
        staged = np.full(total if stage.kind is StageKind.TAIL else 1, 0, np.uint64)
        gap_ns = ROW_GAP_NS if stage.kind is StageKind.TAIL else 0
        steps, events = session.steps, session.events
        start = CpuTimes.now()
        for answered in range(total):
            if answered == warmup:
                start = CpuTimes.now()
            while not steps:
                moved = advance()
                if moved < 0:
                    raise lost_link(self.leader, moved)
                if moved == 0:
                    look_around(self.leader)
            last_ns = answer(steps.pop(0), gap_ns)
            if gap_ns:
                staged[answered] = last_ns
            events.clear()
        while not session.outbox.empty():
            moved = advance()
            if moved < 0:
                raise lost_link(self.leader, moved)
        events.clear()
        spent = CpuTimes.now().total_s - start.total_s
        body = {"stage": stage.number, "cpu_s": spent, "staged_ns": staged[warmup:].tobytes() if gap_ns else b""}
        self.leader.send_message("report", body)


def second_cpu(taken: object) -> int | None:
    """Another CPU of this host than the one the receiver took; None when there is none."""
    others = sorted(os.sched_getaffinity(0) - {taken})
    if not isinstance(taken, int) or taken < 0 or not others:
        return None
    return others[0]


__all__ = ["LeaderRun", "second_cpu"]
