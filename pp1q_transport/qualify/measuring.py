"""The benchmark's receiver: takes the plan, issues the STEPs, measures, checks what landed, and sends the report back.

Between `pp1q-recv` and the client's `Receiver`, whose session and link the measured loops (`issuing`) drive directly. The floors
run in the same two processes, in turns with the transport's own stages, while the engine is quiet. SPEC section 9.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Final

import numpy as np

from .._native import kernels
from ..errors import ConfigError, LocalMisuse, PeerFault, Reason
from . import messages
from .floors import FloorConfig, FloorListener, FloorPeer, memcpy_GBps
from .issuing import Issuer
from .motion import await_message
from .plan import Plan, Stage, StageKind, boot_id, floor_plans, stages, transport_stage
from .results import Results
from .source import row_digests
from .stats import BaselineRss, Nanoseconds, Report, pin, rss_MiB

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..client import Receiver

OPTIONS_S: Final = 10.0
FAREWELL_S: Final = 3.0
LINGER_S: Final = 30.0  # for a leader that still wants samples


class ReceiverRun:
    """One run at the receiver, over a session that is up. `idle` and `cpu` are this end's own wishes (None: the leader's).

    `baseline` was taken when the interpreter had its imports and nothing else. `host` is where the floors listen.
    """

    def __init__(
        self,
        receiver: Receiver,
        baseline: BaselineRss,
        host: str,
        idle: str | None,
        cpu: int | None,
        progress: Callable[[str, int, int], None],
    ) -> None:
        self.receiver = receiver
        self._baseline = baseline
        self._host = host
        self._idle = idle
        self._cpu = cpu
        self._progress = progress
        self._listener: FloorListener | None = None
        self._floors: FloorPeer | None = None
        self.latency_ns: Nanoseconds = np.empty(0, np.uint64)

    def run(self) -> Report:
        """Takes the options, measures every stage and sends the report. Raises `PeerFault`; the affinity is as before."""
        before = os.sched_getaffinity(0)
        try:
            try:
                return self._run()
            except (LocalMisuse, PeerFault) as fault:
                self._tell(fault)
                raise
        finally:
            if self._floors is not None:
                self._floors.close()
            elif self._listener is not None:
                self._listener.close()
            os.sched_setaffinity(0, before)

    def _tell(self, fault: Exception) -> None:
        """Tells the leader why, and gives it the time to read that before the link closes."""
        if not self.receiver.up:
            return
        self.receiver.send_message("report", {"error": str(fault)[:300]})
        deadline_ns = kernels.monotonic_ns() + int(FAREWELL_S * 1e9)
        while self.receiver.up and kernels.monotonic_ns() < deadline_ns:
            self.receiver.poll()
            self.receiver.engine.wait(5_000_000)

    def _run(self) -> Report:
        options = messages.checked(await_message(self.receiver, "options", OPTIONS_S), messages.OPTIONS, "options")
        plan = self._take_plan(options["plan"])
        own = boot_id()
        same_host = bool(own) and own == options["boot_id"]
        self._pin(same_host, options["cpu"])
        if plan.floors:
            self._listener = FloorListener(self._floor_config(plan), self._host)
        address = list(self._listener.address) if self._listener is not None else []
        cpu = messages.NOT_PINNED if self._cpu is None else self._cpu
        self.receiver.send_message("report", {"boot_id": own, "cpu": cpu, "floors": address})
        self._progress("preparing", 0, 1)
        expected = row_digests(plan)
        begin = messages.checked(
            await_message(self.receiver, "options", messages.ANSWER_S), messages.BEGIN, "begin"
        )
        results = Results(plan, self.receiver, self._baseline, same_host, (begin["cpu"], cpu))
        issuer = Issuer(self.receiver, plan, expected)
        done = stages(plan)
        try:
            with messages.quiet_gc():
                for number, stage in enumerate(done):
                    self._progress(stage.kind.value, number, len(done))
                    self._run_stage(plan, stage, issuer, results)
        finally:
            issuer.close()
        self.latency_ns = results.latency.values_ns()
        report = results.report(issuer)
        self.receiver.send_message("report", report.as_dict())
        return report

    def _take_plan(self, stated: object) -> Plan:
        """The leader's plan, within what this end allows and equal to what HELLO stated. Raises `ConfigError`."""
        plan = Plan.from_map(stated)
        if self._idle is not None and plan.idle != self._idle:
            raise ConfigError(f"idle: this receiver runs {self._idle!r}, the leader asks for {plan.idle!r}")
        agreement = self.receiver.engine.agreement
        assert agreement is not None
        for name, value in plan.hello_options().items():
            if getattr(agreement.theirs, name) != value:
                raise ConfigError(f"options: they need {name} = {value!r}, HELLO said {getattr(agreement.theirs, name)!r}")
        return plan

    def _pin(self, same_host: bool, leader_cpu: object) -> None:
        """On one host each end gets a CPU of its own, unless it was told which."""
        others = sorted(os.sched_getaffinity(0) - {leader_cpu})
        if self._cpu is None and same_host and others and len(os.sched_getaffinity(0)) > 1:
            self._cpu = others[0]
        if self._cpu is not None:
            pin(self._cpu)

    @staticmethod
    def _floor_config(plan: Plan) -> FloorConfig:
        return FloorConfig("receiver", plan.idle)  # type: ignore[arg-type]  # the plan has checked it

    # ---- stages -------------------------------------------------------------------------------------------------

    def _run_stage(self, plan: Plan, stage: Stage, issuer: Issuer, results: Results) -> None:
        if transport_stage(stage):
            block = issuer.run(stage)
            served = messages.checked(
                await_message(self.receiver, "report", messages.ANSWER_S), messages.SERVED, "end of a stage"
            )
            if served["stage"] != stage.number:
                raise PeerFault(Reason.MALFORMED, f"the leader ended stage {served['stage']}, not {stage.number}")
            results.memory_MiB = max(results.memory_MiB, rss_MiB().now_MiB) if self._floors is None else results.memory_MiB
            if stage.measured:
                results.add(block, served)
        elif stage.kind is StageKind.OPEN_FLOORS:
            assert self._listener is not None
            self._floors = self._listener.accept()
            self._floors.prepare(plan.batch_bytes, 2)
        elif stage.kind is StageKind.MEMCPY:
            results.memcpy_GBps.append(memcpy_GBps(plan.batch_bytes, 2))
        else:
            assert self._floors is not None
            outcomes = [self._floors.run(test) for test in floor_plans(plan, stage)]
            results.add_floor(stage.kind, outcomes[-1])

    def serve_samples(self) -> None:
        """Hands out latency samples until the leader leaves."""
        deadline_ns = kernels.monotonic_ns() + int(LINGER_S * 1e9)
        receiver = self.receiver
        while receiver.up and kernels.monotonic_ns() < deadline_ns:
            receiver.poll()
            if not receiver.engine.inbox:
                receiver.engine.wait(5_000_000)
                continue
            _kind, body = receiver.engine.inbox.pop(0)
            start = messages.checked(body, messages.WANT, "options after the report")["samples_from"]
            assert isinstance(start, int)
            if not 0 <= start < len(self.latency_ns):
                raise PeerFault(Reason.MALFORMED, f"samples from {start} of {len(self.latency_ns)} asked for")
            piece = self.latency_ns[start : start + messages.SAMPLES_A_MESSAGE].astype("<u8").tobytes()
            receiver.send_message("report", {"from": start, "ns": piece})
