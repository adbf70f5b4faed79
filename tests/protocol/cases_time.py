"""SPEC 2, 4 and 5 in time: budgets, late bytes, generations, fences, releases, lost links. Scripts on the virtual clock."""

from __future__ import annotations

from typing import Final

import pytest

from pp1q_transport import wire
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.session import slots as st

from .case import Case, Script
from .frames import Frame, Sent
from .world import BUDGET_NS, Flight, World

R = Reason
U32_MAX: Final = 0xFFFFFFFF
LONG_US: Final = 1_000_000


def _beside(world: World) -> Flight:
    """A bystander: request 2, one of its rows landed, with time to spare."""
    flight = world.step(world.open(2), budget_us=LONG_US)
    world.put(flight, 1)
    return flight


def _assert_undisturbed(world: World, flight: Flight) -> None:
    world.put(flight)
    assert flight.ready
    assert world.tokens(flight) == world.honest_tokens(flight)


def _assert_discarded(flight: Flight, reason: Reason) -> None:
    assert not flight.ready
    assert flight.reason is reason


# --- budgets --------------------------------------------------------------------------------------------------------


def just_in_time(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight, 2)
    world.at(BUDGET_NS - 1)
    assert flight.landing
    world.put(flight)
    assert flight.ready


def exactly_at_the_deadline(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1))
    world.put(flight, 2)
    world.at(BUDGET_NS)
    _assert_discarded(flight, R.TIMEOUT)
    _assert_undisturbed(world, beside)


def completion_at_the_deadline(world: World) -> None:
    """No tick comes before the frame: the frame's own arrival must notice that time is up."""
    beside = _beside(world)
    flight = world.step(world.open(1))
    world.taps["leader"].hold = True
    world.put(flight)
    world.now = BUDGET_NS
    world.taps["leader"].hold = False
    world.run()
    _assert_discarded(flight, R.TIMEOUT)
    assert world.counts["receiver"].of(R.GENERATION_STALE) == 4, "three rows and the completion are late"
    _assert_undisturbed(world, beside)


def completion_one_ns_early(world: World) -> None:
    flight = world.step(world.open(1))
    world.taps["leader"].hold = True
    world.put(flight)
    world.now = BUDGET_NS - 1
    world.taps["leader"].hold = False
    world.run()
    assert flight.ready
    assert flight.slot.ready_ns == BUDGET_NS - 1


def clock_at_zero(world: World) -> None:
    """A budget of 1 us that starts at t = 0; a slot that was never armed can't run out at any time."""
    assert world.now == 0
    flight = world.step(world.open(1), budget_us=1)
    world.at(0)
    world.at(999)
    assert flight.landing
    world.at(1000)
    _assert_discarded(flight, R.TIMEOUT)


def nothing_armed(world: World) -> None:
    world.open(1)
    world.at(0)
    world.at((1 << 63) - 2)
    assert world.counts["receiver"].of(R.TIMEOUT) == 0


def ready_has_no_budget(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight)
    world.at(10 * BUDGET_NS)
    assert flight.ready


def budgets_run_out_one_by_one(world: World) -> None:
    flights = [world.step(world.open(i), budget_us=100 * i) for i in (3, 1, 2)]
    for due, flight in ((100_000, flights[1]), (200_000, flights[2]), (300_000, flights[0])):
        assert flight.landing
        world.at(due)
        _assert_discarded(flight, R.TIMEOUT)


# --- late bytes -----------------------------------------------------------------------------------------------------


def late_rows_land_nowhere(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1))
    late = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(flight, late)
    world.at(BUDGET_NS)
    before = world.slot_bytes(flight.slot)
    world.send("leader", *late, done)
    assert world.slot_bytes(flight.slot) == before
    assert world.counts["receiver"].of(R.GENERATION_STALE) == 4
    _assert_undisturbed(world, beside)


def late_rows_of_a_reused_slot(world: World) -> None:
    """One slot only: the old generation's rows come while the new one lands, and after it is ready."""
    first = world.step(world.open(1))
    late = [world.reply(first, first.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(first, late)
    world.at(BUDGET_NS)
    second = world.step(world.open(2))
    assert second.slot is first.slot
    assert second.generation == first.generation + 1
    world.put(second, 1)
    world.send("leader", late[0], late[1])
    world.put(second)
    assert second.ready
    world.send("leader", late[2], done)
    assert second.ready
    assert world.tokens(second) == world.honest_tokens(second)
    assert world.counts["receiver"].of(R.GENERATION_STALE) == 4


def cut_in_mid_payload(world: World) -> None:
    """Half a row has landed when time is up: the fence points the rest at scratch, and the slot goes on to its next use."""
    beside = _beside(world)
    flight = world.step(world.open(1))
    raw = world.reply(flight, flight.slot.anchor + 1).encode(world.terms.leader_nonce)
    world.send("leader", raw[:200])
    assert flight.slot.state == st.LANDING
    world.at(BUDGET_NS)
    _assert_discarded(flight, R.TIMEOUT)
    assert flight.slot.state == st.FREE
    before = world.slot_bytes(flight.slot)
    world.send("leader", raw[200:])
    assert world.slot_bytes(flight.slot) == before
    assert world.counts["receiver"].of(R.GENERATION_STALE) == 1
    _assert_undisturbed(world, beside)


def cancelled_in_mid_payload_and_regranted(world: World) -> None:
    """The same slot is granted again while the old row's rest is still on the wire: not one byte of it may land."""
    flight = world.step(world.open(1))
    raw = world.reply(flight, flight.slot.anchor + 1).encode(world.terms.leader_nonce)
    world.send("leader", raw[:130])
    world.receiver.cancel_request(flight.request, R.CANCELLED)
    world.run()
    again = world.step(flight.request)
    assert again.slot is flight.slot
    before = world.slot_bytes(again.slot)
    world.send("leader", raw[130:])
    assert world.slot_bytes(again.slot) == before
    world.put(again)
    assert again.ready
    assert again.request.generation == 1


def rows_out_of_order(world: World) -> None:
    flight = world.step(world.open(1))
    rows = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(flight, rows)
    world.send("leader", rows[2], rows[0], rows[1], done)
    assert flight.ready
    assert world.tokens(flight) == world.honest_tokens(flight)


def completion_before_the_last_row(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1))
    rows = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(flight, rows)
    world.send("leader", rows[0], rows[1], done, rows[2])
    _assert_discarded(flight, R.INCOMPLETE)
    assert world.counts["receiver"].of(R.GENERATION_STALE) == 1, "the last row is late then"
    _assert_undisturbed(world, beside)


def completion_without_rows(world: World) -> None:
    flight = world.step(world.open(1))
    world.send("leader", world.completion(flight, []))
    _assert_discarded(flight, R.INCOMPLETE)


def completion_of_rows_in_another_order(world: World) -> None:
    """The digest is over the ordered positions: another order is another digest."""
    flight = world.step(world.open(1))
    rows = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    world.send("leader", *rows, world.completion(flight, rows[::-1]))
    _assert_discarded(flight, R.PAYLOAD_DIGEST)


def row_after_ready(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight)
    held = world.slot_bytes(flight.slot)
    world.send("leader", world.reply(flight, flight.slot.anchor + 1, token=0))
    assert flight.ready
    assert world.slot_bytes(flight.slot) == held


def row_after_release(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight)
    world.release(flight)
    before = world.slot_bytes(flight.slot)
    world.send("leader", world.reply(flight, flight.slot.anchor + 1))
    assert world.slot_bytes(flight.slot) == before


def other_token_without_draw_proof(world: World) -> None:
    """Without the draw proof any token of q > 0 passes: that is what the proof is for."""
    flight = world.step(world.open(1))
    rows = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    values = memoryview(bytes(rows[0].payload)).cast("f")
    other = next(i for i, q in enumerate(values) if q > 0 and i != rows[0].header.token)
    rows[0].header.token = other
    world.send("leader", *rows, world.completion(flight, rows))
    assert flight.ready
    assert world.tokens(flight)[0] == other


def row_into_a_neighbours_slot(world: World) -> None:
    """A valid row under the neighbour's slot and generation: the neighbour's proposal is void, and so is the one it left."""
    beside = _beside(world)
    flight = world.step(world.open(1))
    third = world.step(world.open(3), budget_us=LONG_US)
    rows = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(flight, rows)
    rows[1].header.slot = third.slot.index
    rows[1].header.slot_generation = third.generation
    world.send("leader", *rows, done)
    _assert_discarded(third, R.REQUEST_MISMATCH)
    _assert_discarded(flight, R.INCOMPLETE)
    _assert_undisturbed(world, beside)


def step_rewritten_to_a_free_slot(world: World) -> None:
    """The leader answers into a slot that this receiver never granted: the link is not to be trusted."""

    def hook(frame: Frame, _world: World) -> list[Sent] | None:
        if frame.header.kind == wire.STEP:
            frame.header.slot = 3
        return None

    world.taps["receiver"].hook = hook
    flight = world.step(world.open(1))
    row = world.row(flight.request, flight.slot, flight.slot.anchor + 1)
    world.leader.put_row(
        world.leader.grants[3], 1, flight.slot.anchor + 1, row.token, row.entries, row.payload, 0, len(row.payload)
    )
    world.run()
    assert flight.reason is R.LINK_ERROR


# --- cancel, close, reset -------------------------------------------------------------------------------------------


def cancel_stops_the_leader(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1))
    world.put(flight, 1)
    world.receiver.cancel_request(flight.request, R.CANCELLED)
    world.run()
    _assert_discarded(flight, R.CANCELLED)
    assert world.put(flight) is False, "the leader still drafts"
    _assert_undisturbed(world, beside)


def close_in_flight(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight, 1)
    world.receiver.close(flight.request)
    world.run()
    _assert_discarded(flight, R.CANCELLED)
    assert world.put(flight) is False


def close_alone_stops_the_leader(world: World) -> None:
    """A CLOSE without the RESET that usually comes before it."""
    flight = world.step(world.open(1))
    world.put(flight, 1)
    world.send("receiver", world.frame("receiver", wire.CLOSE, request=1, subject=0, status=0))
    assert world.put(flight) is False, "the leader still drafts for a closed request"
    world.at(BUDGET_NS)
    _assert_discarded(flight, R.TIMEOUT)


def timeout_after_a_ready_generation(world: World) -> None:
    """What the slot's last generation was must not be held against the next: it is fenced and granted again."""
    first = world.step(world.open(1))
    world.put(first)
    world.release(first)
    second = world.step(world.open(2))
    assert second.slot is first.slot
    world.at(BUDGET_NS)
    _assert_discarded(second, R.TIMEOUT)
    assert second.slot.state == st.FREE
    _assert_undisturbed(world, world.step(world.open(3)))


def close_while_ready(world: World) -> None:
    """A proposal that is ready stays readable until its consumer is done, whatever becomes of the request."""
    flight = world.step(world.open(1))
    world.put(flight)
    world.receiver.close(flight.request)
    world.run()
    assert flight.ready


def draft_fails(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1))
    world.put(flight, 1)
    world.leader.fail(world.grant(flight), flight.generation, R.INVALID_WEIGHTS)
    world.run()
    _assert_discarded(flight, R.INVALID_WEIGHTS)
    _assert_undisturbed(world, beside)


def risen_generation_after_a_discard(world: World) -> None:
    """After a discard the round goes on under a new request generation, and its rows pass the draw proof again."""
    flight = world.step(world.open(1))
    world.at(BUDGET_NS)
    world.commit(flight, [9])
    again = world.step(flight.request)
    assert (again.slot.request_generation, again.slot.round) == (1, 1)
    world.put(again)
    assert again.ready
    assert world.tokens(again) == world.honest_tokens(again)


# --- generations and keys -------------------------------------------------------------------------------------------


def stale_step(world: World) -> None:
    """A STEP of the slot's last generation comes again after the next one."""
    first = world.step(world.open(1))
    world.put(first)
    world.commit(first, [3])
    old = world.taps["receiver"].last(wire.STEP, 1)
    second = world.step(first.request)
    assert second.slot is first.slot
    world.send("receiver", old)
    assert world.counts["leader"].of(R.GENERATION_STALE) == 1
    _assert_undisturbed(world, second)


def stale_request_generation(world: World) -> None:
    """A STEP below the generation of its OPEN, before any key was used."""

    def hook(frame: Frame, _world: World) -> list[Sent] | None:
        if frame.header.kind == wire.STEP:
            frame.header.request_generation = 4
        return None

    request = world.open(1, generation=5)
    world.taps["receiver"].hook = hook
    flight = world.step(request)
    _assert_discarded(flight, R.GENERATION_STALE)


def _second_round(world: World, **bent: int) -> Flight:
    """A round that is committed, then another one whose STEP is bent."""
    first = world.step(world.open(1))
    world.put(first)
    world.commit(first, [3])

    def hook(frame: Frame, _world: World) -> list[Sent] | None:
        if frame.header.kind == wire.STEP:
            for name, value in bent.items():
                setattr(frame.header, name, value)
        return None

    world.taps["receiver"].hook = hook
    return world.step(first.request)


def key_of_the_last_round(world: World) -> None:
    beside = _beside(world)
    _assert_discarded(_second_round(world, round=0), R.KEY_REUSE)
    _assert_undisturbed(world, beside)


def key_after_reset_of_the_same_round(world: World) -> None:
    """The generation rose, so the same round is another key: nothing is refused."""
    first = world.step(world.open(1))
    world.at(BUDGET_NS)
    first.request.round = 0
    again = world.step(first.request)
    assert (again.slot.request_generation, again.slot.round) == (1, 0)
    _assert_undisturbed(world, again)


def key_of_an_earlier_generation(world: World) -> None:
    flight = world.step(world.open(1, generation=3))
    world.at(BUDGET_NS)
    flight.request.generation = 3
    _assert_discarded(world.step(flight.request), R.GENERATION_STALE)


def key_after_reconnect(world: World) -> None:
    """A receiver that forgot to raise the generation would draw the same noise in a new session."""
    flight = world.step(world.open(1))
    world.put(flight)
    world.release(flight)
    world.reconnect(discard=False)
    flight.request.round = 0
    flight.request.in_flight = False
    _assert_discarded(world.step(flight.request), R.KEY_REUSE)


def reconnect_goes_on(world: World) -> None:
    flight = world.step(world.open(1))
    world.put(flight, 1)
    world.reconnect()
    assert flight.reason is R.PEER_LOST
    again = world.step(flight.request)
    _assert_undisturbed(world, again)
    assert again.slot.request_generation == 2


def old_session_in_the_new_link(world: World) -> None:
    """A REPLY that was signed for the lost session comes over the new link."""
    flight = world.step(world.open(1))
    old = world.reply(flight, flight.slot.anchor + 1).encode(world.terms.leader_nonce)
    world.reconnect()
    world.step(flight.request)
    world.send("leader", old)


def reset_at_the_last_request_generation(world: World) -> None:
    """A RESET that names the last generation there is must not wrap the leader's memory of it to 0."""
    flight = world.step(world.open(1))
    world.send("receiver", world.frame("receiver", wire.RESET, request=1, request_generation=U32_MAX, slot=3,
                                       slot_generation=9, subject=wire.STEP, status=R.CANCELLED.code))  # fmt: skip
    known = world.leader_requests.get(1)
    assert known is not None
    assert known.generation == U32_MAX
    world.at(BUDGET_NS)
    _assert_discarded(world.step(flight.request), R.GENERATION_STALE)


def _expect_exhausted(world: World, flight: Flight | None = None) -> None:
    with pytest.raises(PeerFault) as raised:
        world.step(flight.request if flight else world.requests.requests[1])
    assert raised.value.reason is R.GENERATION_EXHAUSTED
    world.down("receiver", raised.value.reason)
    world.run()


def last_slot_generation(world: World) -> None:
    world.open(1)
    for slot in world.table.slots:
        slot.generation = U32_MAX - 1
    flight = world.step(world.requests.requests[1])
    assert flight.generation == U32_MAX
    world.put(flight)
    assert flight.ready, "the last generation is as good as any"
    world.release(flight)
    flight.request.in_flight = False
    for slot in world.table.slots:
        slot.generation = U32_MAX
    _expect_exhausted(world)


def last_round(world: World) -> None:
    request = world.open(1)
    request.round = U32_MAX
    free = world.table.by_state()["FREE"]
    with pytest.raises(PeerFault) as raised:
        world.step(request)
    assert raised.value.reason is R.GENERATION_EXHAUSTED
    assert world.table.by_state()["FREE"] == free, "a slot was taken for a STEP that can't be"
    world.down("receiver", raised.value.reason)
    world.run()


def last_request_generation(world: World) -> None:
    """The generation can't rise past u32: the session ends, and no slot stays behind."""
    beside = _beside(world)
    flight = world.step(world.open(1, generation=U32_MAX))
    world.at(BUDGET_NS)
    world.run()
    _assert_discarded(flight, R.TIMEOUT)
    assert beside.reason is R.LINK_ERROR


def last_request_generation_at_a_lost_link(world: World) -> None:
    beside = _beside(world)
    flight = world.step(world.open(1, generation=U32_MAX))
    world.down("leader", R.LINK_ERROR)
    world.run()
    _assert_discarded(flight, R.PEER_LOST)
    _assert_discarded(beside, R.PEER_LOST)


# --- slots: fences, quarantine, releases ----------------------------------------------------------------------------


def all_slots_taken(world: World) -> None:
    for i in range(4):
        world.step(world.open(i))
    request = world.open(9)
    assert world.receiver.step(request, 0, 3, 1.0, 0, wire.DENSE, 0, 1000, 0) is None
    assert request.round == 0, "a STEP that was not sent takes no round"
    assert not request.in_flight


def unfenced_slots_are_not_granted(world: World) -> None:
    world.fencing = False
    flight = world.step(world.open(1))
    world.at(BUDGET_NS)
    assert flight.slot.state == st.QUARANTINE
    granted = [world.step(world.open(i)).slot for i in (2, 3, 4)]
    assert flight.slot not in granted
    request = world.open(5)
    assert world.receiver.step(request, 0, 3, 1.0, 0, wire.DENSE, 0, 1000, 0) is None
    for index in world.unconfirmed:
        world.receiver.fenced(index, False)
    world.fencing = True
    assert world.step(request).slot is flight.slot


def quarantine_is_bounded(world: World) -> None:
    """Fences that are never confirmed: past the bound the session ends, and with its link nothing can land."""
    world.fencing = False
    flights = [world.step(world.open(i), budget_us=i) for i in (1, 2, 3)]
    world.at(1000)
    world.at(2000)
    assert world.ended == {}
    world.at(3000)
    for flight in flights:
        _assert_discarded(flight, R.TIMEOUT)


def overdue_consumer(world: World) -> None:
    """A consumer that keeps a proposal too long: quarantined, readable by nobody else, FREE only when it lets go."""
    flight = world.step(world.open(1))
    world.put(flight)
    world.receiver.overdue(flight.slot)
    assert flight.slot.state == st.QUARANTINE
    world.receiver.fenced(flight.slot.index, False)
    assert flight.slot.state == st.QUARANTINE, "a fence of the link does not speak for the consumer"
    assert world.release(flight)
    assert flight.slot.state == st.FREE
    assert not world.release(flight)


def overdue_consumers_past_the_bound(world: World) -> None:
    flights = [world.step(world.open(i)) for i in (1, 2, 3)]
    for flight in flights:
        world.put(flight)
        world.receiver.overdue(flight.slot)
    world.run()
    assert [flight.slot.state for flight in flights] == [st.QUARANTINE] * 3, "a lost link does not free what is still read"
    for flight in flights:
        assert world.release(flight)


def overdue_before_ready(world: World) -> None:
    flight = world.step(world.open(1))
    with pytest.raises(LocalMisuse):
        world.receiver.overdue(flight.slot)
    assert flight.slot.state == st.GRANTED


def release_is_idempotent(world: World) -> None:
    flight = world.step(world.open(1))
    assert not world.release(flight), "nothing is ready yet"
    world.put(flight)
    table, slot, generation = world.table, flight.slot, flight.generation
    assert not table.release(slot, generation - 1, 0, 0)
    assert not table.release(slot, generation + 1, 0, 0)
    assert not table.release(slot, generation, 1, 0)
    assert not table.release(slot, generation, 0, 1)
    assert flight.ready
    assert table.release(slot, generation, 0, 0)
    assert slot.state == st.FREE
    assert not table.release(slot, generation, 0, 0)
    flight.request.in_flight = False
    again = world.step(flight.request)
    while again.slot is not slot:
        again = world.step(world.open(100 + again.slot.index))
    world.put(again)
    assert not table.release(slot, generation, 0, 0), "an old consumer released the new generation"
    assert again.ready


def two_consumers(world: World) -> None:
    flight = world.step(world.open(1))
    flight.slot.consumers = 3
    world.put(flight)
    assert world.table.release(flight.slot, flight.generation, 0, 1)
    assert flight.ready, "one of two consumers still reads"
    assert world.table.release(flight.slot, flight.generation, 0, 0)
    assert flight.slot.state == st.FREE


# --- lost links, full outboxes, local misuse ------------------------------------------------------------------------


def leader_dies(world: World) -> None:
    beside = _beside(world)
    ready = world.step(world.open(1))
    world.put(ready)
    world.links["leader"].close()
    world.ended["leader"] = R.CANCELLED
    world.run()
    _assert_discarded(beside, R.PEER_LOST)
    assert ready.ready, "its bytes stay until the consumer is done"


def receiver_dies(world: World) -> None:
    beside = _beside(world)
    world.down("receiver", R.LINK_ERROR)
    world.run()
    assert beside.reason is R.LINK_ERROR
    assert world.put(beside) is False


def leader_does_not_read(world: World) -> None:
    """The receiver's outbox is full: the session ends with overload, and every slot comes back all the same."""
    flights = [world.step(world.open(i)) for i in (1, 2)]
    request = world.open(3)
    world.taps["receiver"].hold = True
    while world.receiver.outbox.bytes_queued + 132 < world.receiver.outbox.capacity:
        world.receiver.commit(request, 0, wire.TARGET_ONLY, 0, [1])
    with pytest.raises(PeerFault) as raised:
        world.receiver.commit(request, 0, wire.TARGET_ONLY, 0, [1])
    assert raised.value.reason is R.OVERLOAD
    world.down("receiver", raised.value.reason)
    world.run()
    for flight in flights:
        _assert_discarded(flight, R.LINK_ERROR)


def open_flood(world: World) -> None:
    """More open requests than a leader takes: the peer's fault, not the leader's misuse."""
    world.leader_requests.limit = 8
    for i in range(9):
        world.open(i)


def local_misuse_changes_nothing(world: World) -> None:
    """A step that can't be asked for takes no slot, no round and no place in the stream."""
    request = world.open(1)
    options: dict[str, object] = {
        "depth": 3, "temperature": 1.0, "support": 0, "representation": wire.DENSE, "target_context": 0, "budget_us": 1000,
        "trace_id": 0,
    }  # fmt: skip
    for wrong in (
        {"depth": 0}, {"depth": 4}, {"budget_us": 0}, {"budget_us": -1}, {"budget_us": 1 << 32}, {"temperature": -1.0},
        {"temperature": float("nan")}, {"temperature": float("inf")}, {"temperature": 1e39}, {"representation": 0},
        {"representation": 3}, {"support": 65}, {"representation": wire.SPARSE}, {"representation": wire.SPARSE, "support": 9},
    ):  # fmt: skip
        with pytest.raises(LocalMisuse):
            world.receiver.step(request, 0, *(options | wrong).values())  # type: ignore[arg-type]
        assert world.table.by_state()["FREE"] == 4, wrong
        assert (request.round, request.in_flight) == (0, False), wrong
        assert world.receiver.outbox.empty(), wrong


def commit_misuse_changes_nothing(world: World) -> None:
    request = world.open(1)
    before = list(request.tokens)
    for wrong in ([], [64], [-1], [1 << 40], [1, 64], [1] * 129):
        with pytest.raises(LocalMisuse):
            world.receiver.commit(request, 0, wire.TARGET_ONLY, 0, wrong)
        assert list(request.tokens) == before
        assert world.receiver.outbox.empty()


def step_while_in_flight(world: World) -> None:
    flight = world.step(world.open(1))
    with pytest.raises(LocalMisuse):
        world.step(flight.request)
    _assert_undisturbed(world, flight)


def _case(number: str, title: str, reason: Reason | None, act: object, **more: object) -> Script:
    return Script(number=number, spec=number[0], title=title, reason=reason, act=act, **more)  # type: ignore[arg-type]


ENDED_BY_RECEIVER: Final = {"leader": R.PEER_LOST}
QUARANTINE: Final = {"quarantine": 2}

CASES: Final[tuple[Case, ...]] = (
    _case("2.201", "completion one ns before the deadline, row by row", None, just_in_time),
    _case("2.202", "timeout at exactly the deadline", R.TIMEOUT, exactly_at_the_deadline),
    _case("2.203", "completion that arrives at the deadline", R.TIMEOUT, completion_at_the_deadline),
    _case("2.204", "completion that arrives one ns before the deadline", None, completion_one_ns_early),
    _case("2.205", "budget that starts at t = 0", R.TIMEOUT, clock_at_zero),
    _case("2.206", "nothing armed never times out", None, nothing_armed),
    _case("2.207", "a ready proposal has no budget any more", None, ready_has_no_budget),
    _case("2.208", "three budgets run out one by one", R.TIMEOUT, budgets_run_out_one_by_one),
    _case("2.209", "STEP of the slot's last generation comes again", R.GENERATION_STALE, stale_step,
          world={"slots": 1}),
    _case("2.210", "STEP below the generation of its OPEN", R.GENERATION_STALE, stale_request_generation),
    _case("2.211", "a discard raises the generation and the request goes on", R.TIMEOUT, risen_generation_after_a_discard),
    _case("2.212", "reconnect: requests re-opened under a risen generation", R.PEER_LOST, reconnect_goes_on),
    _case("2.213", "REPLY of the lost session over the new link", R.SESSION_MISMATCH, old_session_in_the_new_link,
          ends={"receiver": R.SESSION_MISMATCH, "leader": R.PEER_LOST}),
    _case("2.214", "RESET that names the last request generation", R.GENERATION_STALE, reset_at_the_last_request_generation),
    _case("2.215", "slot generations run out", R.GENERATION_EXHAUSTED, last_slot_generation,
          ends={"receiver": R.GENERATION_EXHAUSTED, "leader": R.PEER_LOST}),
    _case("2.216", "rounds run out", R.GENERATION_EXHAUSTED, last_round,
          ends={"receiver": R.GENERATION_EXHAUSTED, "leader": R.PEER_LOST}),
    _case("2.217", "request generations run out at a timeout", R.GENERATION_EXHAUSTED, last_request_generation,
          ends={"receiver": R.GENERATION_EXHAUSTED, "leader": R.PEER_LOST}),
    _case("2.218", "request generations run out at a lost link", R.PEER_LOST, last_request_generation_at_a_lost_link,
          ends={"leader": R.LINK_ERROR, "receiver": R.PEER_LOST}),
    _case("2.219", "leader that does not read", R.OVERLOAD, leader_does_not_read, world={"context_tokens": 4096},
          ends={"receiver": R.OVERLOAD, "leader": R.PEER_LOST}),
    _case("2.220", "more OPENs than a leader takes", R.OVERLOAD, open_flood,
          ends={"leader": R.OVERLOAD, "receiver": R.PEER_LOST}),
    _case("2.221", "a step that can't be asked for changes nothing", None, local_misuse_changes_nothing),
    _case("2.222", "a commit that can't be changes nothing", None, commit_misuse_changes_nothing),
    _case("2.223", "one proposal in flight for each request", None, step_while_in_flight),
    _case("2.224", "STEP whose slot changed on the way: nobody granted that one", R.SLOT_STATE, step_rewritten_to_a_free_slot,
          ends={"receiver": R.SLOT_STATE, "leader": R.PEER_LOST}),
    _case("4.201", "late rows land nowhere", R.GENERATION_STALE, late_rows_land_nowhere),
    _case("4.202", "late rows of a slot that is granted again", R.GENERATION_STALE, late_rows_of_a_reused_slot,
          world={"slots": 1}),
    _case("4.203", "time is up in the middle of a payload", R.GENERATION_STALE, cut_in_mid_payload),
    _case("4.204", "cancelled in the middle of a payload, slot granted again", R.GENERATION_STALE,
          cancelled_in_mid_payload_and_regranted, world={"slots": 1}),
    _case("4.205", "rows out of order", None, rows_out_of_order),
    _case("4.206", "completion before the last row", R.INCOMPLETE, completion_before_the_last_row),
    _case("4.207", "completion without any row", R.INCOMPLETE, completion_without_rows),
    _case("4.208", "completion over the rows in another order", R.PAYLOAD_DIGEST, completion_of_rows_in_another_order),
    _case("4.209", "row for a generation that is ready", R.GENERATION_DUPLICATE, row_after_ready),
    _case("4.210", "row for a generation that was released", R.GENERATION_DUPLICATE, row_after_release),
    _case("4.211", "another token of q > 0 without the draw proof", None, other_token_without_draw_proof,
          world={"draw_proof": False}),
    _case("4.212", "valid row in a neighbour's slot", R.REQUEST_MISMATCH, row_into_a_neighbours_slot),
    _case("4.213", "cancel stops the leader", R.CANCELLED, cancel_stops_the_leader),
    _case("4.214", "close of a request in flight", R.CANCELLED, close_in_flight),
    _case("4.215", "close of a request whose proposal is read", None, close_while_ready),
    _case("4.216", "the draft can't answer", R.INVALID_WEIGHTS, draft_fails),
    _case("4.217", "all slots taken", None, all_slots_taken),
    _case("4.218", "a slot is not granted before its fence", R.TIMEOUT, unfenced_slots_are_not_granted),
    _case("4.219", "more unconfirmed fences than the bound", R.OVERLOAD, quarantine_is_bounded, world=QUARANTINE,
          ends={"receiver": R.OVERLOAD, "leader": R.PEER_LOST}),
    _case("4.220", "overdue consumer", None, overdue_consumer),
    _case("4.221", "more overdue consumers than the bound", R.OVERLOAD, overdue_consumers_past_the_bound, world=QUARANTINE,
          ends={"receiver": R.OVERLOAD, "leader": R.PEER_LOST}),
    _case("4.222", "overdue before it is ready", None, overdue_before_ready),
    _case("4.223", "release is idempotent", None, release_is_idempotent),
    _case("4.224", "two consumers of one proposal", None, two_consumers),
    _case("4.225", "the leader dies", R.PEER_LOST, leader_dies, ends={"leader": R.CANCELLED, "receiver": R.PEER_LOST}),
    _case("4.226", "the receiver's link fails", R.LINK_ERROR, receiver_dies,
          ends={"receiver": R.LINK_ERROR, "leader": R.PEER_LOST}),
    _case("4.227", "close alone stops the leader", R.TIMEOUT, close_alone_stops_the_leader),
    _case("4.228", "timeout of a slot whose last generation was ready", R.TIMEOUT, timeout_after_a_ready_generation,
          world={"slots": 1}),
    _case("5.01", "key of the round before", R.KEY_REUSE, key_of_the_last_round),
    _case("5.02", "the same round after a reset is another key", R.TIMEOUT, key_after_reset_of_the_same_round),
    _case("5.03", "STEP below the generation that was reset", R.GENERATION_STALE, key_of_an_earlier_generation),
    _case("5.04", "key of the session before", R.KEY_REUSE, key_after_reconnect),
)  # fmt: skip
