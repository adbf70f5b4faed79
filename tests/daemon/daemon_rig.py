"""Daemons of a deployment with the draft and the target in the test's own process, where the test can see and slow them.

Between the tests of this folder and `toy.sidecar.Deployment`, whose daemons run in processes of their own.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from pp1q_transport.client import AttachedLeader, AttachedReceiver, Step, attach_leader, attach_receiver
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.toy.sidecar import Deployment, Shape, free_ports
from pp1q_transport.verify import QRow, TargetRow, target_only, verify_chain

PROMPT = (1, 2)
WATCHDOG_S = 30.0
VOCAB = 128
SMALL = Shape(seed=7, rounds=1_000_000, depth=3, vocab_size=VOCAB, support=16, requests=2, ranks=1)
MODULE = [sys.executable, "-m", "pp1q_transport.cli"]


class Bed(Deployment):
    """A deployment of which a test starts what it wants. `tables` are more lines for the files of daemons, by name."""

    def __init__(self, shape: Shape = SMALL, tables: dict[str, str] | None = None) -> None:
        super().__init__(shape)
        for name, text in (tables or {}).items():
            self.edit(name, lambda old, text=text: old + text)

    def config(self, name: str) -> Path:
        """The configuration file of a daemon."""
        return self.home / f"{name}.toml"

    def edit(self, name: str, change: Callable[[str], str]) -> None:
        """Rewrites a daemon's file."""
        path = self.config(name)
        path.write_text(change(path.read_text(encoding="utf-8")), encoding="utf-8")

    def up(self, *names: str) -> Bed:
        """Starts daemons (all, if none is named) and waits until they answer and sessions run."""
        wanted = names or tuple(self.daemons)
        for name in wanted:
            self.start(name)
        for name in wanted:
            self.wait_for_daemon(name)
        if not names:
            self.sessions_up()
        return self

    def sessions_up(self) -> None:
        """Waits until every session of every daemon runs."""
        for name in self.daemons:
            self.sessions_up_of(name)

    def sessions_up_of(self, name: str) -> None:
        """Waits until every session of one daemon runs."""
        self.until(lambda: all(each["up"] for each in self.status(name)["sessions"]), f"sessions of {name}")

    def until(self, found: Callable[[], object], what: str, within_s: float = WATCHDOG_S) -> None:
        """Waits: a watchdog, not an assertion about speed."""
        stop = time.monotonic() + within_s
        while not found():
            if time.monotonic() >= stop:
                words = "\n".join(f"{name}: {self.tail(name, 8)}" for name in self.parts if self.parts[name].starts)
                raise AssertionError(f"{what}: not within {within_s:g} s\n{words}")
            time.sleep(0.002)

    def pid(self, name: str) -> int:
        """Of a process that runs."""
        process = self.parts[name].process
        assert process is not None
        assert process.poll() is None, self.tail(name)
        return process.pid

    def signal(self, name: str, number: signal.Signals) -> None:
        """Sends a signal to one process."""
        os.kill(self.pid(name), number)

    def says(self, name: str, words: str, times: int = 1) -> None:
        """Waits until a process's log has such a line so often."""
        log = self.parts[name].log
        self.until(lambda: log.read_text(encoding="utf-8", errors="replace").count(words) >= times, f"{words!r} of {name}")

    def counters(self, name: str) -> dict[str, int]:
        """The totals of a daemon."""
        return self.status(name)["totals"]

    def receiver(self, name: str = "receiver0") -> AttachedReceiver:
        """An attached target in this process."""
        return attach_receiver(self.socket(name))

    def __exit__(self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None) -> None:  # type: ignore[override]
        for part in self.parts.values():
            if part.running and part.process is not None:
                part.process.send_signal(signal.SIGCONT)
                part.process.kill()
        super().__exit__(kind, fault, trace)


def free_port() -> int:
    """A loopback port that nobody has."""
    return free_ports(1)[0]


def two_targets() -> Bed:
    """A leader daemon with two peers, each with a receiver daemon of its own, up."""
    bed = Bed(dataclasses.replace(SMALL, requests=8))
    port = free_port()
    first = bed.config("receiver0").read_text(encoding="utf-8")
    bed.edit("leader", lambda text: f'{text}\n[[peer]]\nname = "group-b"\nlisten = "tcp://127.0.0.1:{port}"\n')
    bed._add("receiverb", [*bed.parts["receiver0"].command[:-1], str(bed.config("receiverb"))])
    here = "connect = " + json.dumps(f"tcp://127.0.0.1:{port}")
    lines = [here if line.startswith("connect") else line for line in first.splitlines()]
    bed.config("receiverb").write_text("\n".join(lines).replace("receiver0", "receiverb"), encoding="utf-8")
    bed.config("receiverb").chmod(0o600)
    return bed


def command(*words: str, timeout_s: float = 60.0) -> subprocess.CompletedProcess[str]:
    """Runs one `pp1q` command to its end."""
    return subprocess.run(
        [*MODULE, *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s, check=False
    )


# ---- a draft in a thread, a target in the test ----------------------------------------------------------------------


def answer(models: ToyModels, step: Step) -> None:
    """Puts every row as the toy draft does; stops where the proposal is dead."""
    chain = step.tail(2).tolist()
    for position in step.positions:
        token = step.put(position, weights=models.draft.weights(chain, step.temperature))
        if token is None:
            break
        chain.append(token)


class Draft:
    """An attached draft that answers STEPs in a thread of its own; `act` may be swapped while it runs."""

    def __init__(self, socket_path: str, models: ToyModels) -> None:
        self.models = models
        self.act: Callable[[ToyModels, Step], None] = answer
        self.served: list[tuple[int, int, int]] = []  # (target, request, round)
        self.faults: list[BaseException] = []
        self.leader: AttachedLeader = attach_leader(socket_path)
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                step = self.leader.next_step(5_000_000)
                if step is not None:
                    self.served.append((step.target, step.request, step.round))
                    self.act(self.models, step)
        except BaseException as fault:  # noqa: BLE001 - the test sees it at the end
            self.faults.append(fault)

    def stop(self, close: bool = True) -> AttachedLeader:
        """Ends the thread; the leader's state may be looked at then."""
        self._ending.set()
        self._thread.join(WATCHDOG_S)
        assert not self._thread.is_alive()
        if close:
            self.leader.close()
        assert not self.faults, self.faults
        return self.leader


@contextmanager
def drafting(bed: Bed, name: str = "leader") -> Iterator[Draft]:
    """A draft beside a leader daemon for as long as the block runs."""
    draft = Draft(bed.socket(name), ToyModels.of(bed.shape.seed, bed.shape.vocab_size))
    try:
        yield draft
    finally:
        draft.stop()


class Target:
    """Rounds of an attached target, with the account that `journal_check` reads."""

    def __init__(self, bed: Bed, receiver: AttachedReceiver) -> None:
        self.models = ToyModels.of(bed.shape.seed, bed.shape.vocab_size)
        self.receiver = receiver
        self.shape = bed.shape
        self.reasons: list[Reason] = []
        self.ready = 0

    def round(self, request: Request, budget_us: int = 20_000_000) -> bool:
        """One round of a request, whatever comes. Whether its proposal was ready."""
        number = request.round
        try:
            ticket = self.receiver.enqueue(request, support=self.shape.support, budget_us=budget_us)
            proposal = ticket.wait()
        except ProposalDiscarded as discarded:
            self.reasons.append(discarded.reason)
            if request.round == number:
                request.next_round()
            weights, _ = self.models.target.weights(request.tokens[-2:].tolist())
            token = target_only(weights, request.seed, request.generation, number, request.anchor + 1)
            self.receiver.commit_target_only(request, number, [token])
            return False
        with proposal:
            drafted, known = proposal.tokens.tolist(), request.tokens[-2:].tolist()

            def target_at(index: int) -> TargetRow:
                return self.models.target.weights(known + drafted[:index])

            rows = [QRow(row.values, row.ids) for row in (proposal.q(index) for index in range(proposal.depth))]
            verdict = verify_chain(
                drafted, rows, target_at, request.seed, proposal.generation, proposal.round, proposal.first_position
            )
            proposal.commit(verdict.accepted_drafts, verdict.committed_tokens)
        self.ready += 1
        return True

    def until_ready(self, request: Request, within_s: float = WATCHDOG_S) -> None:
        """Rounds until a proposal is ready again."""
        stop = time.monotonic() + within_s
        while not self.round(request):
            assert time.monotonic() < stop, self.reasons[-8:]
            if not self.receiver.up:
                self.receiver.serve(time.monotonic_ns() + 20_000_000)
