"""The receiver session against a hostile stream: no single changed bit gets through, and no bytes make it raise."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from protocol.case import assert_all_free, release_all
from protocol.frames import Frame
from protocol.world import BUDGET_NS, Flight, World

from pp1q_transport import wire
from pp1q_transport._native.kernels import copy_bytes
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots
from pp1q_transport.session.assembler import Landing

SMALL = {"vocab": 16, "depth": 1, "support": 4, "slots": 2}


def proposal(world: World, representation: int) -> tuple[Flight, bytes]:
    """A STEP under way and the honest bytes that answer it."""
    flight = world.step(world.open(1), representation)
    replies = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(flight.depth)]
    done = world.completion(flight, replies)
    nonce = world.terms.leader_nonce
    return flight, b"".join(reply.encode(nonce) for reply in replies) + done.encode(nonce)


@pytest.mark.parametrize("representation", (wire.DENSE, wire.SPARSE), ids=("dense", "sparse"))
def test_no_flipped_bit_of_a_proposal_gets_through(representation: int) -> None:
    """Every byte of the stream, one of its bits flipped: the proposal is never ready, whatever else happens."""
    length = len(proposal(World(**SMALL), representation)[1])  # type: ignore[arg-type]
    for at in range(length):
        world = World(**SMALL)  # type: ignore[arg-type]
        flight, raw = proposal(world, representation)
        bent = bytearray(raw)
        bent[at] ^= 1 << at % 8
        world.send("leader", bytes(bent))
        assert not flight.ready, f"bit {at % 8} of byte {at} changed and the proposal became ready"
        release_all(world)
        assert_all_free(world)


@pytest.mark.parametrize("representation", (wire.DENSE, wire.SPARSE), ids=("dense", "sparse"))
def test_no_truncated_proposal_gets_through(representation: int) -> None:
    length = len(proposal(World(**SMALL), representation)[1])  # type: ignore[arg-type]
    for keep in range(0, length, 7):
        world = World(**SMALL)  # type: ignore[arg-type]
        flight, raw = proposal(world, representation)
        world.send("leader", raw[:keep])
        world.links["leader"].close()
        world.ended["leader"] = Reason.CANCELLED
        world.run()
        assert not flight.ready
        assert world.ended["receiver"] is Reason.PEER_LOST
        assert_all_free(world)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 2**32))
def test_arbitrary_bytes_end_the_link_by_name_and_free_every_slot(data: bytes, seed: int) -> None:
    world = World(seed=seed, largest=50)
    flight = world.step(world.open(1))
    world.send("leader", data)
    world.send("receiver", data)
    assert not flight.ready
    release_all(world)
    assert_all_free(world)


FIELDS = ("slot", "slot_generation", "request", "request_generation", "round", "position", "depth", "representation",
          "entry_count", "context", "first_id", "end_id", "shard_mass", "mass_before", "token", "draw_counter", "shard",
          "boot_nonce", "session")  # fmt: skip


def changed(frame: Frame, world: World, rng: random.Random) -> Frame:
    """A copy with one field off by one, or set to an edge, validly signed."""
    copy = frame.copy(world.terms.leader_nonce)
    name = rng.choice(FIELDS)
    setattr(copy.header, name, max(0, getattr(copy.header, name) + rng.choice((-1, 1))))
    return copy


@pytest.mark.parametrize("seed", range(60))
def test_a_shuffled_stream_yields_whole_proposals_or_none(seed: int) -> None:
    """Frames of three proposals, interleaved, repeated, dropped, bent and late: what becomes ready is exactly right."""
    rng = random.Random(seed)
    world = World(seed=seed, largest=rng.choice((0, 33, 300)))
    flights = [
        world.step(world.open(i), rng.choice((wire.DENSE, wire.SPARSE)), budget_us=rng.randint(1, 3)) for i in (1, 2, 3)
    ]
    honest = {id(flight): world.honest_tokens(flight) for flight in flights}
    queues: list[list[Frame]] = []
    for flight in flights:
        replies = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(flight.depth)]
        queues.append([*replies, world.completion(flight, replies)])
    while any(queues) and not world.ended:
        queue = rng.choice([queue for queue in queues if queue])
        frame = queue.pop(0)
        event = rng.random()
        if event < 0.03:
            frame = changed(frame, world, rng)
        elif event < 0.06:
            world.send("leader", frame)
        elif event < 0.09:
            continue
        elif event < 0.15:
            world.at(world.now + 700)
        world.send("leader", frame)
    for flight in flights:
        if flight.ready:
            assert world.tokens(flight) == honest[id(flight)]
    world.at(BUDGET_NS)
    release_all(world)
    assert_all_free(world)


def test_a_ready_proposal_is_decided_once() -> None:
    world = World()
    flight = world.step(world.open(1))
    world.put(flight)
    assert (world.receiver.ready, world.receiver.bytes_ready) == (1, 3 * 256)
    world.send("leader", world.completion(flight, [world.reply(flight, 3 + i) for i in range(3)]))
    assert world.receiver.ready == 1
    assert world.counts["receiver"].of(Reason.GENERATION_DUPLICATE) == 1


def test_the_latency_runs_from_the_step_to_the_completion() -> None:
    world = World()
    request = world.open(1)
    world.now = 1234
    flight = world.step(request)
    world.now = 5678
    world.put(flight)
    assert (flight.slot.enqueued_ns, flight.slot.ready_ns, flight.slot.deadline_ns) == (1234, 5678, 1234 + BUDGET_NS)


def test_what_a_discard_tells() -> None:
    """Counted, in the news, in `settled`, told to the leader by a RESET that names the generation."""
    world = World()
    flight = world.step(world.open(1))
    world.receiver.news.clear()
    world.now = BUDGET_NS
    world.receiver.tick(world.now)
    assert world.receiver.settled == [flight.slot]
    assert world.receiver.fences == [flight.slot.index]
    assert world.receiver.news == [("discarded", Reason.TIMEOUT, flight.slot.index, flight.generation)]
    assert flight.slot.state == slots.QUARANTINE
    world.run()
    reset = world.taps["receiver"].last(wire.RESET, 1).header
    assert (reset.slot, reset.slot_generation, reset.request_generation) == (flight.slot.index, flight.generation, 0)
    assert (reset.status, reset.subject) == (Reason.TIMEOUT.code, wire.STEP)


def test_a_row_whose_generation_died_before_the_fence_is_not_taken() -> None:
    """A caller that pumps on before it fences: the row is late, it marks nothing and decides nothing."""
    world = World(**SMALL)  # type: ignore[arg-type]
    flight = world.step(world.open(1))
    reply = world.reply(flight, flight.slot.anchor + 1)
    header, landing = wire.Header(), Landing()
    assert header.decode(reply.encode(world.terms.leader_nonce), 0) == 0
    assert world.receiver.accept(header, landing, world.now) == 0
    world.receiver.tick(BUDGET_NS + world.now)  # no fence follows
    assert flight.slot.state == slots.QUARANTINE
    copy_bytes(world.memory, landing.offset, reply.payload, 0, len(reply.payload))
    world.receiver.progress(header, len(reply.payload))
    assert world.receiver.finish(header, world.now) == 0
    assert flight.slot.rows_done == 0
    assert flight.slot.state == slots.QUARANTINE
    assert world.counts["receiver"].of(Reason.GENERATION_STALE) == 1
    world.receiver.fences.clear()
    world.receiver.fenced(flight.slot.index, True)
    assert_all_free(world)
