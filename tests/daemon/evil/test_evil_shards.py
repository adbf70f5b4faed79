"""A leader that breaks one rule of a vocabulary in shards towards rank 1, against the live daemons of both ranks: rank 1 meets
the reason, the proposal is void on both, and the next one is whole."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import evil_peer as e
import evil_ranks as r
import pytest
from daemon_rig import WATCHDOG_S, Bed
from evil_ranks import RankFrame
from protocol.frames import Frame, fields, payload_bit
from test_evil_rank0 import SHAPE, VOCABULARY, counted

from pp1q_transport import rng, wire
from pp1q_transport.client import AttachedReceiver, attach_receiver
from pp1q_transport.errors import Reason

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

R = Reason
MASS = 1 << 24
SEED = 1


def shard(number: str, title: str, reason: Reason, bend: Any, nth: int = 0) -> RankFrame:
    return RankFrame(number, f"shard {title}", reason, wire.REPLY, bend, nth, VOCABULARY, cost="proposal")


def other_draw(frame: Frame, _world: object) -> list[Frame]:
    """The mass before the shard moved, so that the draw falls into it when it should not, or the other way round."""
    h = frame.header
    u24 = rng.draw24(SEED, rng.Domain.PROPOSAL, h.request_generation, h.round, h.position)
    inside = h.mass_before <= u24 < h.mass_before + h.shard_mass
    h.mass_before = (0 if u24 >= h.shard_mass else MASS - h.shard_mass) if inside else min(u24, MASS - h.shard_mass)
    return [frame]


SHARDS = (
    shard("4.731", "row of another shard", R.ID_RANGE, fields(shard=0)),
    shard("4.732", "row that starts a block early", R.ID_RANGE, fields(first_id=0)),
    shard("4.733", "row that ends a token early", R.ID_RANGE, fields(end_id=63)),
    shard("4.734", "mass beyond 2^24", R.MASS, fields(shard_mass=MASS + 1)),
    shard("4.735", "row with a mass before it beyond 2^24", R.MASS, fields(mass_before=MASS + 1)),
    shard("4.736", "mass and mass before beyond 2^24 together", R.MASS, fields(shard_mass=MASS, mass_before=1)),
    shard("4.737", "mass that is not its values' sum", R.MASS, fields(shard_mass=lambda h: h.shard_mass - 1)),
    shard("4.738", "row of one entry too few", R.SUPPORT_BOUNDS, fields(entry_count=31)),
    shard("4.739", "row of a whole row's entries", R.SUPPORT_BOUNDS, fields(entry_count=64)),
    shard("4.740", "row altered on the way", R.PAYLOAD_DIGEST, payload_bit(3)),
    shard("4.741", "whose mass before claims the draw for itself, or gives it away", R.DRAW_MISMATCH, other_draw),
    shard("4.742", "row of a token past the vocabulary", R.ID_RANGE, fields(token=64)),
    shard("4.743", "row of another context", R.CONTEXT_MISMATCH, fields(context=lambda h: h.context ^ 1)),
    shard("4.744", "row that comes twice", R.POSITION_DUPLICATE, lambda frame, _world: [frame, frame]),
    shard("4.745", "row that never comes", R.INCOMPLETE, lambda _frame, _world: [], 1),
)


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with Bed(dataclasses.replace(SHAPE, mode=VOCABULARY)) as bed:
        bed.edit("receiver0", lambda text: text + "\n[breaker]\nenabled = false\n")
        yield bed.up("receiver0", "receiver1")


class Pair:
    """Targets beside both daemons."""

    def __init__(self, bed: Bed, stack: ExitStack) -> None:
        self.targets = [stack.enter_context(attach_receiver(bed.socket(f"receiver{rank}"), rank)) for rank in range(2)]
        for target in self.targets:
            target.on_agree(lambda _epoch, committed: committed)
        waiting = threading.Thread(target=self.targets[1].wait_for_peer, args=(WATCHDOG_S,))
        waiting.start()
        self.targets[0].wait_for_peer(WATCHDOG_S)
        waiting.join(WATCHDOG_S)
        assert not waiting.is_alive()
        bed.sessions_up_of("receiver0")
        bed.sessions_up_of("receiver1")

    def round(self, number: int) -> list[Reason | None]:
        """One proposal of a request, and what became of it at each rank."""
        requests = [target.open_request(number, e.PROMPT, seed=SEED) for target in self.targets]
        tickets = [
            target.enqueue(request, budget_us=e.LONG_US) for target, request in zip(self.targets, requests, strict=True)
        ]
        e.until(lambda: all(ticket.settled for ticket in tickets), self.poll, "the outcome at both ranks")
        return [r.outcome_of(ticket) for ticket in tickets]

    def poll(self) -> None:
        for target in self.targets:
            assert isinstance(target, AttachedReceiver)
            target.poll()


@pytest.mark.parametrize("case", SHARDS, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_leader_of_shards(bed: Bed, case: RankFrame) -> None:
    pids = [bed.pid(f"receiver{rank}") for rank in range(2)]
    leader = r.EvilShardLeader(bed)
    try:
        with ExitStack() as stack:
            pair = Pair(bed, stack)
            before = counted(bed, "receiver1", case.reason)
            number = next(e.FRESH)
            leader.bender.arm(case, number)  # type: ignore[arg-type]
            assert pair.round(number) == [case.reason, case.reason]
            assert counted(bed, "receiver1", case.reason) == before + 1
            assert pair.round(next(e.FRESH)) == [None, None], "the same link goes on"
        assert [bed.pid(f"receiver{rank}") for rank in range(2)] == pids
    finally:
        leader.close()
