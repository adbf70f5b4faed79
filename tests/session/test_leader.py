"""The leader session: rows go only where they were asked for, in order, and stop when their generation is dead."""

from __future__ import annotations

import pytest
from protocol.world import BUDGET_NS, Flight, World

from pp1q_transport import wire
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.session.leader import DEAD, DRAFTING, SENT


def put(world: World, flight: Flight, **wrong: object) -> bool:
    """One honest row of the first position, with what a case makes wrong of it."""
    position = flight.slot.anchor + 1
    row = world.row(flight.request, flight.slot, position)
    honest: dict[str, object] = {
        "grant": world.grant(flight), "generation": flight.generation, "position": position, "token": row.token,
        "entries": row.entries, "memory": row.payload, "offset": 0, "length": len(row.payload),
    }  # fmt: skip
    return world.leader.put_row(*(honest | wrong).values())  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "wrong",
    (
        {"position": 4}, {"position": 2}, {"token": -1}, {"token": 64}, {"token": 1 << 40}, {"entries": 63},
        {"length": 252}, {"length": 0},
    ),
    ids=str,
)  # fmt: skip
def test_a_row_that_is_not_asked_for_is_misuse_and_changes_nothing(wrong: dict[str, object]) -> None:
    world = World()
    flight = world.step(world.open(1))
    with pytest.raises(LocalMisuse):
        put(world, flight, **wrong)
    assert world.leader.outbox.empty()
    world.put(flight)
    assert flight.ready


@pytest.mark.parametrize("wrong", ({"entries": 0, "length": 0}, {"entries": 9, "length": 72}, {"length": 63}), ids=str)
def test_a_sparse_row_that_does_not_fit_is_misuse(wrong: dict[str, object]) -> None:
    world = World()
    flight = world.step(world.open(1), wire.SPARSE)
    with pytest.raises(LocalMisuse):
        put(world, flight, **wrong)
    world.put(flight)
    assert flight.ready


def test_rows_of_another_generation_are_dropped() -> None:
    world = World()
    flight = world.step(world.open(1))
    assert put(world, flight, generation=flight.generation + 1) is False
    assert put(world, flight, generation=0) is False
    assert world.leader.outbox.empty()


def test_a_row_too_many_is_misuse() -> None:
    world = World()
    flight = world.step(world.open(1))
    world.put(flight)
    assert world.grant(flight).state == SENT
    assert not world.grant(flight).alive(flight.generation)
    with pytest.raises(LocalMisuse):
        put(world, flight, position=flight.slot.anchor + 4)


def test_a_grant_that_was_never_made_takes_nothing() -> None:
    world = World()
    flight = world.step(world.open(1))
    assert put(world, flight, grant=world.leader.grants[3], generation=0) is False


def test_steps_and_events_come_in_stream_order() -> None:
    world = World()
    flight = world.step(world.open(1, tokens=(1, 2)))
    assert world.leader.steps == [world.grant(flight)]
    grant = world.grant(flight)
    assert (grant.state, grant.request, grant.anchor, grant.depth, grant.seed) == (DRAFTING, 1, 1, 3, 1001)
    assert grant.received_ns == 0
    world.put(flight)
    world.commit(flight, [4, 5])
    world.receiver.close(flight.request)
    world.run()
    events = [(kind, request, list(detail) if kind in ("open", "commit") else detail)  # type: ignore[call-overload]
              for kind, request, detail in world.leader.events]  # fmt: skip
    assert events == [("open", 1, [1, 2]), ("commit", 1, [4, 5]), ("close", 1, None)]
    assert world.leader_requests.get(1) is None


def test_a_reset_withdraws_large_rows_that_have_not_left() -> None:
    """Rows of 4 kB stay in staging until sent: after a RESET nothing more of them goes out."""
    world = World(vocab=1024)
    flight = world.step(world.open(1))
    for i in range(2):
        position = flight.slot.anchor + 1 + i
        row = world.row(flight.request, flight.slot, position)
        put(world, flight, position=position, token=row.token, memory=row.payload)
    queued = world.leader.outbox.bytes_queued
    assert queued == 2 * (128 + 4096)
    world.taps["leader"].hold = True
    world.at(BUDGET_NS)
    assert world.leader.outbox.bytes_queued == 0
    assert world.grant(flight).state == DEAD
    assert world.leader.events[-1] == ("reset", 1, Reason.TIMEOUT)
    assert put(world, flight) is False


def test_a_new_step_of_the_slot_withdraws_the_rows_of_the_old() -> None:
    """A STEP that overtakes its RESET (which was lost with an older link's bytes) frees the slot's rows all the same."""
    world = World(vocab=1024, slots=1)
    flight = world.step(world.open(1))
    put(world, flight)
    world.taps["leader"].hold = True
    world.taps["receiver"].hook = lambda frame, _world: [] if frame.header.kind == wire.RESET else None
    world.at(BUDGET_NS)
    assert world.leader.outbox.bytes_queued == 128 + 4096
    again = world.step(world.open(2))
    assert again.slot is flight.slot
    assert world.leader.outbox.bytes_queued == 0
    world.taps["leader"].hold = False
    world.put(again)
    assert again.ready


def test_a_failed_draft_tells_its_reason_once() -> None:
    world = World()
    flight = world.step(world.open(1))
    grant = world.grant(flight)
    for _ in range(2):
        world.leader.fail(grant, flight.generation, Reason.OVERLOAD)
    assert world.leader.completions == 1
    assert world.counts["leader"].of(Reason.OVERLOAD) == 1
    world.run()
    assert flight.reason is Reason.OVERLOAD


def test_a_lost_link_ends_every_draft() -> None:
    world = World()
    flights = [world.step(world.open(i)) for i in (1, 2)]
    world.down("receiver", Reason.LINK_ERROR)
    world.run()
    assert [world.put(flight) for flight in flights] == [False, False]
    assert world.leader_requests.requests == {}


def test_totals_count_rows_and_completions() -> None:
    world = World()
    for i in (1, 2):
        world.put(world.step(world.open(i)))
    assert (world.leader.rows, world.leader.completions) == (6, 2)
    assert world.receiver.rows == 6
