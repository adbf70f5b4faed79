"""A receiver in this process and a hostile leader in another, over one real session; and what must never change, whatever comes.

Between the isolation tests and the product. `IsolationBroken` is raised for a byte that changed where none may: the mutant lanes
of tests/rdma/vm/lanes.py take one rule out of the product (`MUTANTS`) and require exactly that of every test.
"""

from __future__ import annotations

import atexit
import json
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from hashlib import sha1
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

from processes import Conversation
from system_rig import PROMPT, child_environment, eventually
from verbs_peer import ONE

from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.client import Proposal, Receiver, Role, Ticket, configure
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_connection import RdmaConnection
from pp1q_transport.session import slots as st
from pp1q_transport.session.requests import Request
from pp1q_transport.staging import SlotViews

WITHIN_S = 100.0
NEVER_US = 300_000_000
OPTIONS: dict[str, Any] = {
    "vocab_size": 4096,
    "depth": 3,
    "support": 16,
    "max_slots": 4,
    "batch_requests": 2,
    "batches_in_flight": 2,
}
HEADER = 128


class IsolationBroken(AssertionError):
    """Bytes changed that no peer may change."""


class Hostile(Conversation):
    """The leader's process: an order out, its answer in. One for all tests, with a session of its own for each."""

    def __init__(self) -> None:
        super().__init__([str(Path(__file__).with_name("hostile_writer.py"))], child_environment())

    def start(self, do: str, **order: Any) -> None:
        """Gives an order; `answer` must follow."""
        self.input.write(json.dumps({"do": do, **order}) + "\n")

    def answer(self) -> dict[str, Any]:
        """Waits for the answer, serving nothing."""
        line = self.output.readline()
        assert line, f"the hostile leader ended with status {self.process.wait()}"
        answered: dict[str, Any] = json.loads(line)
        return answered

    def do(self, do: str, **order: Any) -> dict[str, Any]:
        """An order and its answer, while the receiver serves nothing."""
        self.start(do, **order)
        return self.answer()


class World:
    """Both ends, joined."""

    def __init__(self, hostile: Hostile, settings: dict[str, Any] | None = None, **options: Any) -> None:
        self.options = {**OPTIONS, **options}
        # Few and short retries: a write that meets nothing is over soon.
        settings = {"timeout": 12, "retry_count": 3, **(settings or {})}
        config = configure(Role.RECEIVER, listen="tcp://127.0.0.1:0", link="rdma", **self.options)
        self.receiver = Receiver(replace(config, rdma=RdmaConfig(device=ONE, **settings)))
        self.hostile = hostile
        hostile.do("open", connect=self.receiver.endpoint, device=ONE, options=self.options, settings=settings)
        self.requests = 0
        self.held: list[tuple[Proposal, list[bytes]]] = []
        hostile.start("up")
        self.shape = self.served_answer()

    def close(self) -> None:
        if self.hostile.process.poll() is None:
            self.hostile.do("leave")
        self.receiver.close()

    # ---- driving ------------------------------------------------------------------------------------------------

    def serve(self) -> None:
        self.receiver.poll()

    def until(self, condition: Callable[[], object]) -> None:
        eventually(condition, self.serve, WITHIN_S)

    def served_answer(self) -> dict[str, Any]:
        """The hostile leader's answer, while the receiver serves."""
        self.until(lambda: select.select([self.hostile.output], [], [], 0)[0])
        return self.hostile.answer()

    def served(self, do: str, **order: Any) -> dict[str, Any]:
        """An order and its answer, while the receiver serves."""
        self.hostile.start(do, **order)
        return self.served_answer()

    def request(self) -> Request:
        self.requests += 1
        return self.receiver.open_request(self.requests, PROMPT, seed=self.requests)

    def ask(self, request: Request, budget_us: int = NEVER_US, support: int | None = None) -> tuple[Ticket, int]:
        """A STEP, and the slot that the hostile leader was granted by it."""
        if not self.receiver.up:
            self.served("up")
            self.until(lambda: self.receiver.up)
        ticket = self.receiver.enqueue(request, budget_us=budget_us, support=support)
        return ticket, self.served("next_step")["slot"]

    def ready(self, ticket: Ticket) -> Proposal:
        """The proposal, whose bytes are watched from now on."""
        self.until(lambda: ticket.settled)
        proposal = ticket.wait()
        self.held.append((proposal, self.bytes_of(proposal)))
        return proposal

    def honest(self, request: Request, **options: Any) -> Proposal:
        """One whole round."""
        ticket, _slot = self.ask(request, **options)
        self.served("draft")
        return self.ready(ticket)

    def time_out(self, ticket: Ticket, slot: int) -> None:
        """The budget of a STEP is over now, by the session's own clock, and its slot is FREE again."""
        session = self.receiver.engine.session
        assert session is not None
        session.tick(monotonic_ns() + 2 * NEVER_US * 1000)
        self.serve()
        assert self.discarded(ticket) is Reason.TIMEOUT
        self.until(lambda: self.state(slot) == "FREE")

    def discarded(self, ticket: Ticket) -> Reason:
        """Why a proposal was discarded, once it is."""
        self.serve()
        self.until(lambda: ticket.settled)
        with pytest.raises(ProposalDiscarded) as caught:
            ticket.wait()
        return caught.value.reason

    # ---- looking ------------------------------------------------------------------------------------------------

    @property
    def link(self) -> RdmaLink:
        link = self.receiver.engine.link
        assert isinstance(link, RdmaLink)
        return link

    def landing(self, slot: int) -> bytes:
        """A slot's landing memory, as it is now."""
        connection = self.link.connection
        at = connection.shape.offset(slot, 0)
        return bytes(connection.landing.view[at : at + connection.shape.slot_bytes])

    def state(self, slot: int) -> str:
        table = self.receiver._table
        assert table is not None
        return st.STATE_NAMES[table.slots[slot].state]

    @staticmethod
    def digests_of(proposal: Proposal) -> list[str]:
        """SHA-1 of each dense row."""
        return [sha1(proposal.q(index).values.tobytes()).hexdigest() for index in range(proposal.depth)]

    @staticmethod
    def bytes_of(proposal: Proposal) -> list[bytes]:
        """Everything that a sampler reads of a proposal."""
        rows = [proposal.q(index) for index in range(proposal.depth)]
        parts = [proposal.tokens.tobytes()]
        for row in rows:
            parts += [row.values.tobytes(), b"" if row.ids is None else row.ids.tobytes()]
        return parts

    def check_held(self) -> None:
        """Every proposal that is held still has the bytes it had when it became ready."""
        for proposal, before in self.held:
            if self.bytes_of(proposal) != before:
                raise IsolationBroken(f"the slot of a ready proposal changed (slot {proposal.slot})")

    def scribble(self) -> None:
        """The hostile leader writes over the landing memory of every slot that is held, with a key that is good."""
        for slot in {proposal.slot for proposal, _before in self.held}:
            length = self.shape["slot_bytes"]
            said = self.hostile.do("write", slot=slot, offset=0, length=length, fill=0xA5, imm=None, key="present")
            assert said["status"] == 0
            assert self.landing(slot) == b"\xa5" * length, "the control: landing memory is the peer's to write"
        self.check_held()

    def check_landing(self, slot: int, before: bytes) -> None:
        """Landing memory of a slot whose key was revoked is as it was."""
        now = self.landing(slot)
        if now != before:
            changed = sum(a != b for a, b in zip(now, before, strict=True))
            raise IsolationBroken(f"{changed} bytes of fenced landing memory changed (slot {slot})")


_hostile: list[Hostile] = []


def hostile() -> Hostile:
    """The process, a new one if the last one ended."""
    if not _hostile or _hostile[-1].process.poll() is not None:
        _hostile.append(Hostile())
        atexit.register(_hostile[-1].close)
    return _hostile[-1]


@contextmanager
def world(**options: Any) -> Iterator[World]:
    made = World(hostile(), **options)
    try:
        yield made
    finally:
        made.close()


# ---- the product with one rule taken out ------------------------------------------------------------------------------


def _without_a_fence(monkeypatch: pytest.MonkeyPatch) -> None:
    """The old key stays: nothing is deregistered."""
    monkeypatch.setattr(RdmaConnection, "fence", lambda self, slot: self._slots[slot].rkey)


def _in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are not copied out: what was validated, and what the sampler is handed, is landing memory itself."""
    links: list[RdmaLink] = []
    created = RdmaLink.__init__

    def remember(self: RdmaLink, *arguments: Any) -> None:
        created(self, *arguments)
        links.append(self)

    def dense(self: SlotViews, slot: int, row: int) -> NDArray[np.float32]:
        connection = links[-1].connection
        at = connection.shape.offset(slot, row) + HEADER
        return np.frombuffer(connection.landing.view, np.uint8)[at : at + 4 * self.vocab_size].view(np.float32)

    monkeypatch.setattr(RdmaLink, "__init__", remember)
    monkeypatch.setattr(SlotViews, "dense", dense)


MUTANTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {"no-fence": _without_a_fence, "in-place": _in_place}


def take_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """What PP1Q_RDMA_MUTANT names is taken out of the product for one test."""
    name = os.environ.get("PP1Q_RDMA_MUTANT", "")
    if name:
        MUTANTS[name](monkeypatch)
