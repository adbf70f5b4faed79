"""A leader and a receiver over the real transport, for tests: small HELLOs, drafting on demand, and what must come out.

Between the tests of this folder and the client API. Both ends live in this process and are pumped by one thread, unless a
test asks for a drafting thread; children in processes of their own are `system_child`'s.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import structlog
from numpy.typing import NDArray

import pp1q_transport
from pp1q_transport.client import EngineConfig, Leader, Proposal, Receiver, Role, Step, Ticket, configure
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.rng import Domain, draw24
from pp1q_transport.session import slots as st
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.toy.reference import Mode, propose
from pp1q_transport.verify import QRow, TargetRow, target_only, verify_chain

ANYWHERE = "tcp://127.0.0.1:0"
VOCAB = 128
PROMPT = (1, 2)
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "depth": 3,
    "support": 16,
    "max_slots": 4,
    "batch_requests": 2,
    "batches_in_flight": 2,
}
WATCHDOG_S = 15.0


def eventually(condition: Callable[[], object], serve: Callable[[], object], within_s: float = WATCHDOG_S) -> None:
    """Serves until the condition holds; a generous watchdog, not an assertion about speed."""
    stop = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < stop, f"nothing within {within_s} s"
        serve()
        time.sleep(0.0002)


def open_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def child_environment() -> dict[str, str]:
    """The environment of a child that must import this very package."""
    here = str(Path(pp1q_transport.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))}


class Rig:
    """One leader, one receiver, one of them listening. `receiver` and `leader` options go to `configure`."""

    def __init__(
        self,
        *,
        listens: str = "receiver",
        receiver: dict[str, Any] | None = None,
        leader: dict[str, Any] | None = None,
        change_leader: Callable[[EngineConfig], EngineConfig] = lambda config: config,
        models: ToyModels | None = None,
        **shared: Any,
    ) -> None:
        options = {"wait_for_peer": True} | SMALL | shared
        self.models = models or ToyModels.of(7, options["vocab_size"])
        self._ends: list[Leader | Receiver] = []
        mine = {"receiver": options | (receiver or {}), "leader": options | (leader or {})}
        if listens == "receiver":
            self.receiver = self._receiver(listen=ANYWHERE, **mine["receiver"])
            self.leader = self._leader(change_leader, connect=self.receiver.endpoint, **mine["leader"])
        else:
            self.leader = self._leader(change_leader, listen=ANYWHERE, **mine["leader"])
            self.receiver = self._receiver(connect=self.leader.endpoint, **mine["receiver"])

    def _receiver(self, **options: Any) -> Receiver:
        end = Receiver(configure(Role.RECEIVER, **options))
        self._ends.append(end)
        return end

    def _leader(self, change: Callable[[EngineConfig], EngineConfig], **options: Any) -> Leader:
        end = Leader(change(configure(Role.LEADER, **options)))
        self._ends.append(end)
        return end

    def close(self) -> None:
        for end in self._ends:
            end.close()

    def __enter__(self) -> Rig:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- pumping both ends from one thread ----------------------------------------------------------------------

    def serve(self) -> None:
        self.leader.poll()
        self.receiver.poll()

    def until(self, condition: Callable[[], object], within_s: float = WATCHDOG_S) -> None:
        eventually(condition, self.serve, within_s)

    def connect(self) -> Rig:
        self.until(lambda: self.leader.up and self.receiver.up)
        return self

    def next_step(self) -> Step:
        """The next STEP at the leader."""
        found: list[Step] = []

        def look() -> None:
            self.receiver.poll()
            step = self.leader.next_step(0)
            if step is not None:
                found.append(step)

        eventually(lambda: found, look)
        return found[0]

    def draft(self, step: Step, rows: int | None = None) -> list[int]:
        """Puts the first `rows` rows of a STEP (all of them if None); the tokens drawn."""
        return draft(self.models, step, rows)

    def finish(self, ticket: Ticket) -> Proposal:
        """The proposal of a ticket whose rows are put."""
        self.until(lambda: ticket.settled)
        return ticket.wait()

    def round(self, request: Request, **options: Any) -> Proposal:
        """One whole proposal."""
        ticket = self.receiver.enqueue(request, **options)
        self.draft(self.next_step())
        return self.finish(ticket)

    def states(self) -> list[str]:
        """The names of all slots' states at the receiver."""
        table = self.receiver._table
        return [st.STATE_NAMES[slot.state] for slot in table.slots] if table is not None else []

    def all_free(self) -> bool:
        return set(self.states()) == {"FREE"}

    # ---- a drafting thread --------------------------------------------------------------------------------------

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """The leader drafts in a thread of its own: after this the test may block in the receiver."""
        ending = threading.Event()
        faults: list[BaseException] = []

        def run() -> None:
            try:
                while not ending.is_set() and not self.leader.engine.closed:
                    step = self.leader.next_step(1_000_000)
                    if step is not None:
                        draft(self.models, step)
            except BaseException as fault:  # noqa: BLE001 - the test's own thread sees it below
                faults.append(fault)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        try:
            self.receiver.wait_for_peer(WATCHDOG_S)
            yield
        finally:
            ending.set()
            thread.join(WATCHDOG_S)
            assert not thread.is_alive()
        assert not faults, faults[0]


@contextmanager
def captured() -> Iterator[list[Any]]:
    """The log of everything within, as a list of events."""
    with structlog.testing.capture_logs() as log:
        yield log


class MakeRig(Protocol):
    """The fixture `make_rig`: a pair of the given options, closed when the test is over."""

    def __call__(self, **options: Any) -> Rig: ...


def draft(models: ToyModels, step: Step, rows: int | None = None) -> list[int]:
    """Puts rows as the toy draft does; stops where the proposal is dead."""
    chain = step.tokens[-2:].tolist()
    drawn: list[int] = []
    for position in step.positions[:rows]:
        token = step.put(position, weights=models.draft.weights(chain, step.temperature))
        if token is None:
            break
        chain.append(token)
        drawn.append(token)
    return drawn


def consume(models: ToyModels, receiver: Receiver, request: Request, proposal: Proposal) -> list[int]:
    """Verifies a proposal by rejection sampling and commits it; the tokens committed."""
    drafted = proposal.tokens.tolist()
    known = request.tokens[-2:].tolist()

    def target_at(index: int) -> TargetRow:
        return models.target.weights(known + drafted[:index])

    rows = [proposal.q(index) for index in range(proposal.depth)]
    verdict = verify_chain(
        drafted,
        [QRow(row.values, row.ids) for row in rows],
        target_at,
        request.seed,
        proposal.generation,
        proposal.round,
        proposal.first_position,
    )
    proposal.commit(verdict.accepted_drafts, verdict.committed_tokens)
    return list(verdict.committed_tokens)


def go_on_alone(models: ToyModels, receiver: Receiver, request: Request, round_number: int) -> list[int]:
    """The round after a discard: one token of the target's own."""
    weights, _ = models.target.weights(request.tokens[-2:].tolist())
    token = target_only(weights, request.seed, request.generation, round_number, request.anchor + 1)
    receiver.commit_target_only(request, round_number, [token])
    return [token]


def one_round(
    models: ToyModels, receiver: Receiver, request: Request, **options: Any
) -> tuple[int, int, bool, Reason | None]:
    """A round whatever comes: (round, generation it was committed under, ready, reason of the discard)."""
    round_number = request.round
    try:
        proposal = receiver.step(request, **options)
    except ProposalDiscarded as discarded:
        if request.round == round_number:
            request.next_round()
        go_on_alone(models, receiver, request, round_number)
        return round_number, request.generation, False, discarded.reason
    with proposal:
        generation = proposal.generation
        consume(models, receiver, request, proposal)
    return round_number, generation, True, None


def expected(
    models: ToyModels,
    seed: int,
    journal: Sequence[tuple[int, int, bool]],
    *,
    depth: int,
    support: int | None,
    prompt: Sequence[int] = PROMPT,
) -> list[int]:
    """What a request must have committed after its prompt, from (round, generation, ready) of each round: no transport."""
    committed = list(prompt)
    mode = Mode.DENSE if support is None else Mode.SPARSE
    for round_number, generation, ready in journal:
        first = len(committed)
        known = committed[-2:]
        if not ready:
            weights, _ = models.target.weights(known)
            committed.append(target_only(weights, seed, generation, round_number, first))
            continue
        chain = list(known)
        rows: list[QRow] = []
        for position in range(first, first + depth):
            u24 = draw24(seed, Domain.PROPOSAL, generation, round_number, position)
            token, row = propose(models.draft.weights(chain), mode, support or 1, u24)
            chain.append(token)
            rows.append(row)

        def target_at(index: int, chain: Sequence[int] = chain, known: Sequence[int] = known) -> TargetRow:
            return models.target.weights(chain[: len(known) + index])

        verdict = verify_chain(chain[len(known) :], rows, target_at, seed, generation, round_number, first)
        committed.extend(verdict.committed_tokens)
    return committed[len(prompt) :]


def uniform(vocab: int = VOCAB) -> NDArray[np.float64]:
    """Weights of a vocabulary where every token is as likely."""
    return np.ones(vocab, np.float64)


def with_hello(config: EngineConfig, **fields: Any) -> EngineConfig:
    """The same configuration with other HELLO fields, unchecked: what another build might say."""
    return replace(config, hello=replace(config.hello, **fields))


@contextmanager
def closing(*ends: Leader | Receiver) -> Iterator[None]:
    """Closes both ends whatever happened."""
    try:
        yield
    finally:
        for end in ends:
            with suppress(Exception):
                end.close()
