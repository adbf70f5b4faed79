"""A receiver and a leader in this process, of either kind: embedded, or attached to daemons that run beside.

Between the tests of this folder and the client API. The daemons of one deployment serve all tests of a session in turn.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from pp1q_transport import open_leader, open_receiver
from pp1q_transport.client import AttachedLeader, AttachedReceiver, Leader, Proposal, Receiver, Step, Ticket
from pp1q_transport.errors import PeerFault
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.toy.sidecar import Deployment, Shape
from pp1q_transport.verify import QRow, verify_chain

VOCAB = 128
DEPTH = 3
SLOTS = 4
SHAPE = Shape(vocab_size=VOCAB, depth=DEPTH, support=16, requests=2, ranks=1)
PROMPT = (1, 2)
WATCHDOG_S = 15.0
LONG_US = 20_000_000
KINDS = ("embedded", "attached")
SMALL: dict[str, Any] = {
    "vocab_size": VOCAB,
    "depth": DEPTH,
    "support": 16,
    "max_slots": SLOTS,
    "batch_requests": 2,
    "batches_in_flight": 2,
}
MODELS = ToyModels.of(7, VOCAB)

_ids = itertools.count(1)

AnyLeader = Leader | AttachedLeader
AnyReceiver = Receiver | AttachedReceiver


@contextmanager
def daemons(shape: Shape = SHAPE) -> Iterator[Deployment]:
    """A leader daemon and the receiver daemons, without the toy processes."""
    for last in (False, False, True):
        with Deployment(shape) as deployment:
            try:
                for name in deployment.daemons:
                    deployment.start(name)
                for name in deployment.daemons:
                    deployment.wait_for_daemon(name)
            except PeerFault:  # its ports were free when they were chosen; another program may have been quicker
                if last:
                    raise
                continue
            yield deployment
            return


@dataclass
class Pair:
    """One receiver, one leader, both of this process."""

    receiver: AnyReceiver
    leader: AnyLeader

    def serve(self) -> None:
        self.leader.poll()
        self.receiver.poll()

    def until(self, condition: Callable[[], object], within_s: float = WATCHDOG_S) -> None:
        """Serves both until the condition holds: a watchdog, no assertion about speed."""
        stop = time.monotonic() + within_s
        while not condition():
            assert time.monotonic() < stop, f"nothing within {within_s} s"
            self.serve()
            time.sleep(0.0002)

    def connect(self) -> Pair:
        self.until(lambda: self.leader.up and self.receiver.up)
        return self

    def next_step(self) -> Step:
        found: list[Step] = []

        def look() -> bool:
            step = self.leader.take_step()
            if step is not None:
                found.append(step)
            return bool(found)

        self.until(look)
        return found[0]

    def ready(self, request: Request, **options: Any) -> Ticket:
        """A ticket whose proposal the receiver has."""
        ticket = self.receiver.enqueue(request, **{"budget_us": LONG_US, **options})
        draft(self.next_step())
        self.until(lambda: ticket.known)
        return ticket

    def close(self) -> None:
        self.leader.close()
        self.receiver.close()


@contextmanager
def pair(kind: str, deployment: Callable[[], Deployment]) -> Iterator[Pair]:
    """A connected pair of that kind."""
    made: Pair
    if kind in ("embedded", "shm"):
        options = SMALL | {"link": "shm" if kind == "shm" else "tcp"}
        receiver: AnyReceiver = open_receiver(listen="tcp://127.0.0.1:0", **options)
        assert isinstance(receiver, Receiver)
        made = Pair(receiver, open_leader(connect=receiver.endpoint, **options))
    else:
        running = deployment()
        made = Pair(AttachedReceiver(running.socket("receiver0")), AttachedLeader(running.socket("leader")))
    try:
        yield made.connect()
    finally:
        made.close()


def new_id() -> int:
    """A request ID that no test before has used: the daemons outlive tests, and never draw one request's noise twice."""
    return next(_ids)


def weights_of(context: list[int]) -> np.ndarray[Any, np.dtype[np.float64]]:
    return MODELS.draft.weights(context)


def draft(step: Step) -> list[int]:
    """Puts all rows of a STEP; stops where the proposal is dead."""
    chain = step.tail(2).tolist()
    for position in step.positions:
        token = step.put(position, weights=weights_of(chain))
        if token is None:
            break
        chain.append(token)
    return chain[2:]


def verify(request: Request, proposal: Proposal) -> list[int]:
    """Verifies by rejection sampling and commits; the tokens committed."""
    drafted = proposal.tokens.tolist()
    known = request.tokens[-2:].tolist()
    rows = [proposal.q(index) for index in range(proposal.depth)]
    verdict = verify_chain(
        drafted,
        [QRow(row.values, row.ids) for row in rows],
        lambda index: MODELS.target.weights(known + drafted[:index]),
        request.seed,
        proposal.generation,
        proposal.round,
        proposal.first_position,
    )
    proposal.commit(verdict.accepted_drafts, verdict.committed_tokens)
    return list(verdict.committed_tokens)
