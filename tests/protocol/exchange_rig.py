"""Exchanges in a `GroupWorld`: what ranks say and hear, computations over the frames, and bent parts.

Between the numbered cases of `cases_exchange` and the real sessions.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from pp1q_transport import wire
from pp1q_transport.session.exchange_run import ExchangeRun, Place
from pp1q_transport.session.parts import BY_WHAT, Part
from pp1q_transport.sharding import Shard, Steps, shards_of
from pp1q_transport.sharding.exchange import ENTRY

from .frames import Bend, Frame
from .group_rig import GroupWorld
from .world import World

PLACE = Place(1, 0, 0, 1)


def shards(world: GroupWorld) -> tuple[Shard, ...]:
    """The vocabulary over the world's ranks, in blocks of 32; the last ranks may have no tokens."""
    vocab = world.terms.vocab_size
    blocks = -(-vocab // 32)
    each = -(-blocks // world.size)
    return shards_of([min(32 * each * rank, vocab) for rank in range(world.size)] + [vocab])


def part(world: GroupWorld, rank: int, what: str, values: Sequence[Any], sequence: int = 0, place: Place = PLACE) -> Part:
    """One rank's part, as an honest engine makes it."""
    purpose, own = BY_WHAT[what], shards(world)[rank]
    return Part(rank, sequence, *place, purpose.code, own.first_id, own.end_id, np.array(values, purpose.dtype))


def say(world: GroupWorld, said: Part) -> None:
    """A rank says its part, and everything is delivered."""
    assert world.group is not None
    if said.rank == 0:
        world.group.exchanges.own(said)
    else:
        world.members[said.rank - 1].session.exchange(said)
    world.run()


def heard(world: GroupWorld) -> list[list[list[Part]]]:
    """By rank: the complete exchanges since the last look."""
    assert world.group is not None
    boxes = [world.group.exchanges.done, *(rig.session.exchanged for rig in world.members)]
    taken = [box[:] for box in boxes]
    for box in boxes:
        box.clear()
    return taken


def winners(world: GroupWorld, rank: int, sequence: int = 0, rows: int = 1) -> Part:
    """A rank's part of an exchange of winners: of its own range, if that has tokens."""
    own = shards(world)[rank]
    row = (1.0 + rank, own.first_id) if own.size else (-np.inf, -1)
    return part(world, rank, "winners", [row] * rows, sequence)


def compute(world: GroupWorld, make: Callable[[Shard], Steps[Any]], place: Place = PLACE) -> list[Any]:
    """Runs the generators of all ranks over the frames; what each returned, or raised (alike, and then raised here)."""
    split = shards(world)
    runs = [ExchangeRun(make(s), s.rank, place, s.first_id, s.end_id) for s in split]
    told: list[list[Part] | None] = [None] * world.size
    while True:
        errors: list[Exception] = []
        for run, parts in zip(runs, told, strict=True):
            try:
                own = run.begin(sequence(world, run)) if parts is None else run.resume(parts, sequence(world, run))
            except (ValueError, RuntimeError) as error:
                errors.append(error)
                continue
            if own is not None:
                say(world, own)
        if errors:
            assert len(errors) == world.size
            assert len({str(error) for error in errors}) == 1
            raise errors[0]
        if all(run.done for run in runs):
            return [run.result for run in runs]
        assert not any(run.done for run in runs), "ranks end together"
        boxes = heard(world)
        ended = {rig.rank: rig.ended for rig in world.members}
        assert [len(box) for box in boxes] == [1] * world.size, f"one exchange, complete on every rank: {ended}"
        told = [box[0] for box in boxes]


def sequence(world: GroupWorld, run: ExchangeRun[Any]) -> int:
    """The number of a rank's next part."""
    assert world.group is not None
    rank = run._rank
    return world.group.exchanges.said(0) if rank == 0 else world.members[rank - 1].session.exchanges.said(rank)


def entry(at: int, **values: float) -> Bend:
    """Rewrites the value or token of one entry, signed again."""

    def bend(frame: Frame, _world: World) -> None:
        entries = np.frombuffer(bytes(frame.payload), ENTRY).copy()
        for name, value in values.items():
            entries[at][name] = value
        frame.payload[:] = entries.tobytes()

    return bend


def word(at: int, value: float) -> Bend:
    """Rewrites one element of 8 bytes (an integer, or the bits of a float), signed again."""

    def bend(frame: Frame, _world: World) -> None:
        struct.pack_into("<d" if isinstance(value, float) else "<q", frame.payload, 8 * at, value)

    return bend


def rows(count: int) -> Bend:
    """As many copies of the first entry as that, honestly counted and signed."""

    def bend(frame: Frame, _world: World) -> None:
        frame.payload = bytearray(bytes(frame.payload[:12]) * count)
        frame.header.entry_count = count

    return bend


KIND = wire.EXCHANGE
