"""Credit and landing rows: no receive queue runs dry, nobody waits for ever, no row is written before the last one was taken."""

from __future__ import annotations

import itertools
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links.rdma_window import (
    ACKNOWLEDGEMENTS,
    MAX_ROWS,
    MAX_SLOTS,
    NUMBER_BITS,
    LandingShape,
    LandingTargets,
    ReceiveAccount,
    SendWindow,
    pack_immediate,
    shape_for,
    unpack_immediate,
)


@given(st.integers(0, MAX_SLOTS - 1), st.integers(0, MAX_ROWS - 1), st.integers(0, 1 << 40))
def test_an_immediate_says_slot_row_and_number(slot: int, row: int, number: int) -> None:
    value = pack_immediate(slot, row, number)
    assert 0 <= value < 1 << 32
    assert unpack_immediate(value) == (slot, row, number % (1 << NUMBER_BITS))


@given(st.integers(0, (1 << 32) - 1))
def test_any_immediate_unpacks_within_bounds(value: int) -> None:
    slot, row, number = unpack_immediate(value)
    assert slot < MAX_SLOTS
    assert row < MAX_ROWS
    assert pack_immediate(slot, row, number) == value


def test_rows_lie_apart_and_slots_on_pages_of_their_own() -> None:
    shape = shape_for(8, 5, 517_120)
    assert shape.stride == 517_248 == 517_120 + 128
    assert shape.slot_bytes % 4096 == 0
    assert shape.total_bytes == 8 * shape.slot_bytes
    places = [shape.offset(slot, row) for slot in range(8) for row in range(5)]
    assert all(later - earlier >= shape.stride for earlier, later in itertools.pairwise(places))
    assert places[-1] + shape.stride <= shape.total_bytes
    assert all(shape.offset(slot, 0) % 4096 == 0 for slot in range(8))
    assert shape_for(1, 1, 256).stride == 384


def test_a_window_counts_past_32_bits_and_believes_no_more_than_was_sent() -> None:
    window = SendWindow(4)
    window.sent = window.taken = (1 << 32) - 2
    for _ in range(4):
        window.next()
    assert window.room == 0
    assert window.report(1) == 3  # (1 << 32) + 1
    assert window.room == 3
    with pytest.raises(PeerFault) as caught:
        window.report(3)
    assert caught.value.reason is Reason.LINK_ERROR
    with pytest.raises(PeerFault):
        window.report(0)  # fewer than before
    assert window.report(2) == 1
    assert window.room == 4


def test_a_message_without_credit_is_never_numbered() -> None:
    window = SendWindow(1)
    window.next()
    with pytest.raises(AssertionError):
        window.next()


def test_one_question_at_a_time() -> None:
    window = SendWindow(4)
    assert window.may_ask()
    window.ask(window.next())
    assert not window.may_ask()
    window.report(1)
    assert window.may_ask()
    window.ask(window.next())
    for _ in range(3):
        window.next()
    window.report(2)
    assert window.may_ask()


def test_a_row_is_free_again_once_its_message_was_taken() -> None:
    targets = LandingTargets(LandingShape(2, 2, 64), [(1000, 1), (9000, 2)])
    assert targets.free_row(0, 0) == 0
    assert targets.use(0, 0, 0) == (1000, 1)
    assert targets.use(0, targets.free_row(0, 0), 1) == (1064, 1)
    assert targets.free_row(0, 0) == -1
    assert targets.free_row(1, 0) == 0, "another slot's rows are its own"
    assert targets.free_row(0, 1) == 0
    targets.rekey(0, 77)
    assert targets.use(0, 0, 2) == (1000, 77)
    with pytest.raises(PeerFault) as caught:
        targets.rekey(2, 5)
    assert caught.value.reason is Reason.SLOT_BOUNDS
    assert not targets.fits(2, 1)
    assert targets.fits(1, 64)
    assert not targets.fits(1, 65)


class Side:
    """One end of a simulated link: what it has to send, and what is in its receive queue."""

    def __init__(self, limit: int, todo: int) -> None:
        self.window = SendWindow(limit)
        self.account = ReceiveAccount(limit)
        self.queue: deque[tuple[int, int, bool]] = deque()  # (number or -1, report, asks), in order
        self.todo = todo
        self.limit = limit

    def send(self, other: Side, waits: bool) -> bool:
        """What a pump does: messages while there is credit, a question when the sender waits for a row, a due report."""
        before = len(other.queue)
        while self.todo and self.window.room > 0 and not waits:
            self.todo -= 1
            other.queue.append((self.window.next(), self.account.report(), False))
        if waits and self.todo and self.window.may_ask():
            number = self.window.next()
            self.window.ask(number)
            other.queue.append((number, self.account.report(), True))
        if self.account.due:
            other.queue.append((-1, self.account.report(), False))
        assert len(other.queue) <= other.limit + ACKNOWLEDGEMENTS, "a receive queue ran dry"
        return len(other.queue) > before

    def take(self) -> bool:
        """One message off the receive queue."""
        if not self.queue:
            return False
        number, report, asks = self.queue.popleft()
        self.window.report(report)
        if number >= 0:
            assert number == self.account.taken
            self.account.take(asks)
        return True


@settings(max_examples=60)
@given(st.integers(8, 64), st.integers(0, 300), st.integers(0, 300), st.integers(0, 1 << 30), st.floats(0, 1), st.booleans())
def test_no_queue_runs_dry_and_nobody_waits_for_ever(
    limit: int, left: int, right: int, seed: int, lean: float, ask: bool
) -> None:
    chance = random.Random(seed)
    sides = [Side(limit, left), Side(limit, right)]
    while sides[0].todo or sides[1].todo or sides[0].queue or sides[1].queue:
        index = chance.random() < lean
        side, other = sides[index], sides[not index]
        waits = ask and chance.random() < 0.5
        if chance.random() < 0.5:
            side.send(other, waits)
        else:
            side.take()
        if lean in (0.0, 1.0) or chance.random() < 0.05:  # everybody gets a turn
            moved = False
            for one, two in (sides, sides[::-1]):
                moved |= one.take()
                moved |= one.send(two, False)
            assert moved or not (sides[0].todo or sides[1].todo or sides[0].queue or sides[1].queue), "stuck"


def test_a_new_queue_pair_starts_from_what_was_taken() -> None:
    window = SendWindow(8)
    for _ in range(6):
        window.next()
    window.report(2)
    window.restart(4, 5)
    assert (window.taken, window.sent, window.room) == (4, 4, 5)
    assert window.next() == 4
    with pytest.raises(PeerFault):
        window.restart(6, 5)
    targets = LandingTargets(LandingShape(1, 1, 64), [(0, 1)])
    targets.use(0, 0, 3)
    assert targets.free_row(0, 3) == -1
    targets.restart([(0, 9)])
    assert targets.free_row(0, 3) == 0
    assert targets.use(0, 0, 4) == (0, 9)
    account = ReceiveAccount(8)
    for _ in range(5):
        account.take(True)
    assert account.due
    account.restart(4)
    assert not account.due
    assert account.taken == 5
    account.take(False)
    account.take(False)
    assert account.due
