"""Slots: the table of transitions as a whole, and a random life of a slot table against a model."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from pp1q_transport.errors import LocalMisuse, PeerFault
from pp1q_transport.session import slots
from pp1q_transport.session.slots import EVENT_NAMES, STATE_NAMES, TRANSITIONS, Slot, SlotGeometry, SlotTable

GEOMETRY = SlotGeometry(3, 2, 128)
PAIRS = tuple(itertools.product(range(len(STATE_NAMES)), range(len(EVENT_NAMES))))


@pytest.mark.parametrize("pair", PAIRS, ids=lambda pair: f"{STATE_NAMES[pair[0]]}-{EVENT_NAMES[pair[1]]}")
def test_every_pair_moves_as_listed_or_raises_and_changes_nothing(pair: tuple[int, int]) -> None:
    slot = Slot(0, GEOMETRY)
    slot.state, event = pair
    slot.generation, slot.consumers = 7, 1
    if pair in TRANSITIONS:
        slot.move(event)
        assert slot.state == TRANSITIONS[pair]
    else:
        with pytest.raises(LocalMisuse):
            slot.move(event)
        assert slot.state == pair[0]
    assert (slot.generation, slot.consumers) == (7, 1)


def test_the_table_keeps_what_the_contract_says() -> None:
    into_free = {pair for pair, after in TRANSITIONS.items() if after == slots.FREE}
    assert into_free == {(slots.READY, slots.RELEASE_LAST), (slots.QUARANTINE, slots.FENCED)}
    into_granted = {pair for pair, after in TRANSITIONS.items() if after == slots.GRANTED}
    assert into_granted == {(slots.FREE, slots.GRANT)}, "only a FREE slot is granted"
    into_ready = {pair for pair, after in TRANSITIONS.items() if after == slots.READY}
    assert into_ready == {(slots.LANDING, slots.DECIDE_READY), (slots.VOTED, slots.DECIDE_READY)}
    assert {pair[0] for pair in TRANSITIONS} == set(range(len(STATE_NAMES))), "no state is a dead end"
    assert {pair[1] for pair in TRANSITIONS} == set(range(len(EVENT_NAMES))), "no event is unused"


@pytest.mark.parametrize(
    "sizes", ((0, 1, 64), (1, 0, 64), (1, 1, 0), (1, 1, 63), (1, 1, 65), (-1, 1, 64)), ids=lambda sizes: str(sizes)
)
def test_impossible_geometry_is_refused(sizes: tuple[int, int, int]) -> None:
    with pytest.raises(LocalMisuse):
        SlotGeometry(*sizes)


@pytest.mark.parametrize("depth", (1, 5, 8, 9, 32))
def test_parts_of_slots_never_overlap(depth: int) -> None:
    geometry = SlotGeometry(4, depth, 192)
    parts = [(geometry.row_offset(slot, row), 192) for slot in range(4) for row in range(depth)]
    parts += [(geometry.meta_offset(slot), depth * 8) for slot in range(4)]
    parts.sort()
    for (at, size), (following, _) in itertools.pairwise(parts):
        assert at + size <= following
        assert at % 64 == 0
    assert parts[-1][0] + parts[-1][1] <= geometry.total_bytes


def test_the_documented_sizes_come_out() -> None:
    geometry = SlotGeometry(8, 5, 129280 * 4)
    assert geometry.slot_bytes == 2_585_600
    assert 4 * geometry.slot_bytes == 10_342_400
    assert geometry.rows_bytes == 20_684_800


@pytest.mark.parametrize("state", (slots.READY, slots.QUARANTINE), ids=("ready", "overdue"))
def test_a_slot_is_free_after_its_last_consumer_and_no_earlier(state: int) -> None:
    table = SlotTable(GEOMETRY)
    slot = table.take()
    assert slot is not None
    slot.state, slot.decided, slot.consumers = state, True, 0b101
    for repeat in (True, False):
        assert table.release(slot, slot.generation, 0, 0) is repeat
        assert (slot.state, slot.consumers) == (state, 0b100), "another consumer reads it still"
    assert not table.release(slot, slot.generation, 1, 2), "another rank's word"
    assert not table.release(slot, slot.generation - 1, 0, 2), "another generation's"
    assert table.release(slot, slot.generation, 0, 2)
    assert (slot.state, slot.consumers) == (slots.FREE, 0)


def test_slots_are_taken_round_robin_and_end_at_the_last_generation() -> None:
    table = SlotTable(GEOMETRY)
    taken = []
    for _ in range(5):
        slot = table.take()
        assert slot is not None
        taken.append(slot.index)
        slot.move(slots.INVALIDATE)
        slot.move(slots.FENCED)
    assert taken == [0, 1, 2, 0, 1]
    for slot in table.slots:
        slot.generation = 0xFFFFFFFF
    assert table.take() is None
    assert table.exhausted()
    assert [slot.state for slot in table.slots] == [slots.FREE] * 3


class SlotLife(RuleBasedStateMachine):
    """Random legal and illegal events on a table of three slots; `held` is who may still write or read a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.table = SlotTable(GEOMETRY)
        self.granted = [0, 0, 0]  # generations as granted, by slot
        self.held: set[int] = set()  # slots that a writer (unfenced) or a reader may still touch

    pick = st.integers(0, 2)

    @rule()
    def take(self) -> None:
        slot = self.table.take()
        if slot is None:
            assert len(self.held) == 3, "a free slot was not granted"
            return
        assert slot.index not in self.held, "granted again before fence and release"
        assert slot.generation == self.granted[slot.index] + 1
        assert (slot.rows_done, slot.reply_bytes, slot.reason, slot.decided, slot.consumers) == (0, 0, 0, False, 0)
        self.granted[slot.index] = slot.generation
        self.held.add(slot.index)

    @rule(index=pick)
    def land(self, index: int) -> None:
        slot = self.table.slots[index]
        if slot.state in (slots.GRANTED, slots.LANDING):
            slot.move(slots.LAND)
            slot.rows_done |= 1
            slot.reply_bytes += 64

    @rule(index=pick, consumers=st.integers(1, 3))
    def ready(self, index: int, consumers: int) -> None:
        slot = self.table.slots[index]
        if slot.state == slots.LANDING:
            slot.move(slots.DECIDE_READY)
            slot.decided = True
            slot.consumers = consumers

    @rule(index=pick)
    def invalidate(self, index: int) -> None:
        slot = self.table.slots[index]
        if slot.state in (slots.GRANTED, slots.LANDING):
            slot.move(slots.INVALIDATE)

    @rule(index=pick)
    def fenced(self, index: int) -> None:
        slot = self.table.slots[index]
        if slot.state == slots.QUARANTINE and not slot.decided:
            slot.move(slots.FENCED)
            self.held.discard(index)

    @rule(index=pick)
    def overdue(self, index: int) -> None:
        slot = self.table.slots[index]
        if slot.state == slots.READY:
            slot.move(slots.OVERDUE)

    @rule(index=pick, back=st.integers(0, 2), rank=st.integers(0, 1), consumer=st.integers(0, 2))
    def release(self, index: int, back: int, rank: int, consumer: int) -> None:
        slot = self.table.slots[index]
        before = (slot.state, slot.consumers)
        generation = max(0, slot.generation - back)
        mine = rank == 0 and generation == slot.generation and slot.decided and bool(slot.consumers & (1 << consumer))
        done = self.table.release(slot, generation, rank, consumer)
        assert done == mine
        if not done:
            assert (slot.state, slot.consumers) == before
        elif slot.consumers == 0:
            assert slot.state == slots.FREE
            self.held.discard(index)

    @precondition(lambda self: any(slot.state == slots.FREE for slot in self.table.slots))
    @rule(event=st.sampled_from([e for e in range(len(EVENT_NAMES)) if e != slots.GRANT]))
    def nothing_happens_to_a_free_slot(self, event: int) -> None:
        slot = next(slot for slot in self.table.slots if slot.state == slots.FREE)
        with pytest.raises(LocalMisuse):
            slot.move(event)

    @invariant()
    def free_is_what_nobody_holds(self) -> None:
        free = {slot.index for slot in self.table.slots if slot.state == slots.FREE}
        assert free == {0, 1, 2} - self.held
        assert self.table.not_free() == len(self.held)
        assert sum(self.table.by_state().values()) == 3
        assert [slot.generation for slot in self.table.slots] == self.granted


SlotLife.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
test_slot_life = SlotLife.TestCase


# --- slots of a rank in a group --------------------------------------------------------------------------------------------


def test_a_slot_is_adopted_with_a_risen_generation_only() -> None:
    table = SlotTable(GEOMETRY, rank=2)
    slot = table.adopt(1, 5)
    assert (slot.index, slot.generation, slot.state, table.highest()) == (1, 5, slots.GRANTED, 5)
    with pytest.raises(PeerFault, match="slot_state"):
        table.adopt(1, 6)
    slot.move(slots.INVALIDATE)
    slot.move(slots.FENCED)
    for generation in (5, 4, 0):
        with pytest.raises(PeerFault, match="generation_stale"):
            table.adopt(1, generation)
    assert (slot.generation, slot.state) == (5, slots.FREE)
    assert table.adopt(1, 6) is slot
    for index in (-1, 3):
        with pytest.raises(LocalMisuse):
            table.adopt(index, 9)


def test_an_adopted_slot_begins_with_a_clean_slate() -> None:
    table = SlotTable(GEOMETRY, rank=1)
    slot = table.adopt(0, 1)
    slot.move(slots.INVALIDATE)
    slot.rows_done, slot.reply_bytes, slot.consumers, slot.reason, slot.fenced, slot.epoch = 3, 9, 1, 4, True, 7
    slot.move(slots.FENCED)
    table.adopt(0, 2)
    assert (slot.rows_done, slot.reply_bytes, slot.consumers, slot.reason, slot.fenced, slot.epoch) == (0, 0, 0, 0, False, 0)


def test_grants_lie_above_the_floor() -> None:
    table = SlotTable(GEOMETRY)
    table.floor = 40
    first = table.take()
    assert first is not None
    assert first.generation == 41
    table.floor = 0xFFFFFFFF
    assert table.take() is None
    assert table.exhausted()


@pytest.mark.parametrize("first", ("fence", "group"))
def test_an_invalidated_slot_waits_for_its_fence_and_for_the_group(first: str) -> None:
    table = SlotTable(GEOMETRY)
    slot = table.take()
    assert slot is not None
    slot.move(slots.INVALIDATE)
    slot.consumers = 1 << slots.GROUP_CONSUMER
    if first == "fence":
        slot.fenced = True
        assert table.unconfirmed() == 0, "the group is not this rank's to confirm"
    else:
        assert table.release(slot, 1, 0, slots.GROUP_CONSUMER)
        assert slot.state == slots.QUARANTINE
        assert table.unconfirmed() == 1
        return
    assert not table.release(slot, 1, 0, 0), "no consumer ever saw it"
    assert table.release(slot, 1, 0, slots.GROUP_CONSUMER)
    assert slot.state == slots.FREE
    assert not table.release(slot, 1, 0, slots.GROUP_CONSUMER)


@pytest.mark.parametrize(("rank", "consumer"), ((0, 0), (2, 0), (1, -1), (1, 31), (1, 64)))
def test_a_release_of_nobody_changes_nothing(rank: int, consumer: int) -> None:
    table = SlotTable(GEOMETRY, rank=1)
    slot = table.adopt(0, 1)
    slot.move(slots.LAND)
    slot.move(slots.VOTE)
    slot.move(slots.DECIDE_READY)
    slot.consumers = 1
    assert not table.release(slot, 1, rank, consumer)
    assert (slot.state, slot.consumers) == (slots.READY, 1)
    assert table.release(slot, 1, 1, 0)
    assert slot.state == slots.FREE
