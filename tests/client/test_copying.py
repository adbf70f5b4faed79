"""Copy stages: nothing is ready before it is on the device, nothing is published before it is off it; and no memory is granted,
reused or unmapped while a device may touch it."""

from __future__ import annotations

import asyncio
import gc
import threading
from typing import Any

import numpy as np
import pytest
from client_rig import DEPTH, LONG_US, MODELS, PROMPT, SLOTS, VOCAB, Pair, draft, new_id, verify, weights_of
from fake_device import FakeCopy, FakeDevice, ThreadedDevice
from numpy.testing import assert_array_equal
from test_aio import timer_off

from pp1q_transport.client import AttachedLeader, AttachedReceiver, Leader, Receiver, Step, Ticket, copying
from pp1q_transport.client.aio import AsyncLeader, AsyncReceiver
from pp1q_transport.client.copying import BUFFERS_AT_MOST, RowPart
from pp1q_transport.dyadic import allocate
from pp1q_transport.errors import InvalidQ, LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.toy.reference import Mode, run_reference

pytestmark = pytest.mark.timeout(60)


# ---- target side: host to device ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
@pytest.mark.parametrize("make", (FakeDevice, ThreadedDevice))
def test_a_proposal_is_ready_once_its_rows_are_up(sides: Pair, make: type[FakeDevice], support: int | None) -> None:
    device = make()
    sides.receiver.use_copy_stage(device)
    request = sides.receiver.open_request(new_id(), PROMPT, seed=5)
    for _round in range(4):
        device.copies.clear()
        ticket = sides.receiver.enqueue(request, support=support, budget_us=LONG_US)
        draft(sides.next_step())
        proposal = ticket.wait()
        assert not device.running, "ready, and the device lacks a row"
        parts = [(proposal.slot, row, part) for row in range(DEPTH) for part in (("ids", "values") if support else ("values",))]
        assert sorted(tuple(copy.what) for copy in device.copies) == sorted(parts)
        assert all(isinstance(copy.what, RowPart) and not copy.view.flags.writeable for copy in device.copies)
        assert proposal.device_rows is not None
        for index, row in enumerate(proposal.device_rows):
            q = proposal.q(index)
            assert_array_equal(row.values.data, q.values)
            assert (row.ids is None) == (q.ids is None)
            if q.ids is not None:
                assert_array_equal(row.ids.data, q.ids)
        verify(request, proposal)
    mode = Mode.DENSE if support is None else Mode.SPARSE
    assert request.tokens.tolist()[2:] == run_reference(MODELS, 5, 4, DEPTH, mode, support=support or 1)
    assert sides.receiver.free_slots == SLOTS


def test_ready_never_precedes_the_last_copy(sides: Pair) -> None:
    """The proposal has landed; the device has not said that it is done: the ticket does not know, whoever asks how often."""
    device = FakeDevice(after=None)
    sides.receiver.use_copy_stage(device)
    ticket = landed(sides, device)
    for copy in device.copies:
        for _ in range(20):
            sides.serve()
            assert not ticket.known
            assert not ticket.settled
        copy.happen()
    assert ticket.known
    proposal = ticket.wait()
    assert proposal.latency_ns >= device.copies[-1].ended_ns - proposal_enqueued(ticket)
    proposal.release()


def landed(sides: Pair, device: FakeDevice, **options: Any) -> Ticket:
    """A ticket whose rows are all on their way to the device."""
    options = {"budget_us": LONG_US} | options
    before = len(device.copies)
    ticket = sides.receiver.enqueue(sides.receiver.open_request(new_id(), PROMPT), **options)
    draft(sides.next_step())
    sides.until(lambda: len(device.copies) == before + DEPTH)
    return ticket


def proposal_enqueued(ticket: Any) -> int:
    return int(getattr(ticket, "enqueued_ns", 0) or ticket._enqueued_ns)


def test_copies_of_several_proposals_overlap(sides: Pair) -> None:
    """They begin when a proposal lands, not when somebody waits for it."""
    device = FakeDevice(after=None)
    sides.receiver.use_copy_stage(device)
    tickets = [landed(sides, device) for _ in range(3)]
    assert len(device.running) == 3 * DEPTH
    device.finish()
    for ticket in reversed(tickets):
        ticket.wait().release()


def test_a_copy_that_is_not_over_in_time(sides: Pair) -> None:
    """The proposal is discarded at the end of the budget; its slot is not granted again while the device may read it."""
    receiver = sides.receiver
    device = FakeDevice(after=None)
    receiver.use_copy_stage(device)
    resets: list[int] = []
    sides.leader.on_reset(lambda request, reason: resets.append(request))
    request = receiver.open_request(new_id(), PROMPT)
    ticket = receiver.enqueue(request, budget_us=100_000)
    draft(sides.next_step())
    slot = taken_slot(sides, device)
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert (caught.value.reason, caught.value.request, caught.value.round) == (Reason.TIMEOUT, request.request, 0)
    assert (receiver.counters.get("discarded"), receiver.counters.of(Reason.TIMEOUT)) == (1, 1)
    assert request.generation == 1
    receiver.use_copy_stage(None)
    receiver.commit_target_only(request, caught.value.round, [5])
    for _ in range(2 * SLOTS):  # as many proposals as would come round to every slot twice
        assert receiver.free_slots == SLOTS - 1
        with sides.ready(request).wait() as proposal:
            assert proposal.slot != slot
            verify(request, proposal)
    device.finish()
    sides.until(lambda: receiver.free_slots == SLOTS)
    seen = set()
    for _ in range(SLOTS):
        with sides.ready(request).wait() as proposal:
            seen.add(proposal.slot)
            verify(request, proposal)
    assert slot in seen
    if isinstance(receiver, Receiver):
        assert resets == [request.request], "the draft is told to forget what it speculated"


def taken_slot(sides: Pair, device: FakeDevice) -> int:
    sides.until(lambda: device.copies)
    slot: int = device.copies[0].what.slot
    return slot


@pytest.mark.parametrize("fails", ("start", "done", "wait"))
def test_a_copy_that_fails(sides: Pair, fails: str) -> None:
    """Its proposal goes, with the stage's own error as the cause; the slot stays until the other copies are over."""
    receiver = sides.receiver
    device = FakeDevice(after=None, fails=fails)
    receiver.use_copy_stage(device)
    request = receiver.open_request(new_id(), PROMPT)
    ticket = receiver.enqueue(request, budget_us=LONG_US)
    draft(sides.next_step())
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.COPY_FAILED
    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert receiver.counters.of(Reason.COPY_FAILED) == 1
    assert receiver.free_slots == SLOTS - 1
    with pytest.raises(ProposalDiscarded):
        ticket.wait()
    device.fails = ""
    device.finish()
    sides.until(lambda: receiver.free_slots == SLOTS)
    device.after = 1
    receiver.commit_target_only(request, caught.value.round, [5])
    with sides.ready(request).wait() as proposal:
        verify(request, proposal)


def test_nobody_waits_and_the_budget_ends(sides: Pair) -> None:
    device = FakeDevice(after=None)
    sides.receiver.use_copy_stage(device)
    ticket = sides.receiver.enqueue(sides.receiver.open_request(new_id(), PROMPT), budget_us=100_000)
    draft(sides.next_step())
    sides.until(lambda: sides.receiver.counters.of(Reason.TIMEOUT))
    device.finish()
    with pytest.raises(ProposalDiscarded):
        ticket.wait()
    sides.until(lambda: sides.receiver.free_slots == SLOTS)


def test_a_request_that_is_closed_while_its_rows_go_up(sides: Pair) -> None:
    """The proposal is ready on every rank already: it stays its holder's, who releases it."""
    device = FakeDevice(after=None)
    sides.receiver.use_copy_stage(device)
    ticket = landed(sides, device)
    request = ticket.request  # type: ignore[attr-defined]
    sides.receiver.close_request(request)
    device.finish()
    ticket.wait().release()
    sides.until(lambda: sides.receiver.free_slots == SLOTS)


def test_memory_stays_mapped_for_a_copy_that_never_ends(sides: Pair) -> None:
    """Both sides are closed and dropped: what the device reads is still there (a fault here would end this process)."""
    device = FakeDevice(after=None)
    sides.receiver.use_copy_stage(device)
    landed(sides, device)
    kept = device.copies[0].view.copy()
    assert kept.any()
    sides.close()
    assert sides.receiver.counters.get("copies_left_running") == 1
    views = [copy.view.ctypes.data for copy in device.copies]
    for copy in device.copies:
        copy.view = None  # type: ignore[assignment]
    gc.collect()
    with open("/proc/self/maps", encoding="ascii") as maps:
        ranges = [tuple(int(end, 16) for end in line.split()[0].split("-")) for line in maps]
    for address in views:
        assert any(low <= address < high for low, high in ranges)
    for copy in device.copies:
        copy.over.set()
    assert [rows.look() for rows in copying._left_running][-1]


def test_a_daemon_that_goes_while_rows_go_up(attached: Pair) -> None:
    """The wait ends with its loss at once; the copies run on over memory that stays mapped."""
    receiver = attached.receiver
    assert isinstance(receiver, AttachedReceiver)
    device = FakeDevice(after=None)
    receiver.use_copy_stage(device)
    ticket = landed(attached, device)
    receiver._lose(Reason.PEER_LOST)
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.PEER_LOST
    assert device.copies[0].view.sum() > 0.99
    device.finish()
    attached.until(lambda: receiver.up and not receiver.copies)
    assert receiver.free_slots == SLOTS


def test_a_rank_of_a_group_leaves_rather_than_decide_alone(attached: Pair) -> None:
    """The other ranks may use what they hold; leaving ends the epoch, so that nobody can commit it."""
    receiver = attached.receiver
    assert isinstance(receiver, AttachedReceiver)
    receiver._grouped = receiver._open = True
    device = FakeDevice(after=None, fails="done")
    receiver.use_copy_stage(device)
    ticket = receiver.enqueue(receiver.open_request(new_id(), PROMPT, seed=5), budget_us=LONG_US)
    draft(attached.next_step())
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.COPY_FAILED
    assert receiver.counters.get("daemon_lost") == 1
    device.finish()


def test_tasks_wait_for_their_copies(sides: Pair) -> None:
    """Under asyncio: nothing is ready before its copies, several run at once, and a late one costs its own task only."""
    device = ThreadedDevice(delay_s=0.02)

    async def main() -> None:
        sides.receiver.use_copy_stage(device)
        async with AsyncReceiver(sides.receiver) as receiver, AsyncLeader(sides.leader) as leader:
            await receiver.wait_for_peer()
            drafting = asyncio.create_task(draft_all(leader))

            async def one() -> None:
                request = receiver.open_request(new_id(), PROMPT, seed=6)
                for _ in range(3):
                    with await receiver.step(request, budget_us=LONG_US) as proposal:
                        assert proposal.device_rows is not None
                        assert all(row.values.over.is_set() for row in proposal.device_rows)
                        verify(request, proposal)

            async def late() -> None:
                with pytest.raises(ProposalDiscarded) as caught:
                    await receiver.step(receiver.open_request(new_id(), PROMPT, seed=7), budget_us=15_000)
                assert caught.value.reason is Reason.TIMEOUT

            async with asyncio.timeout(30):
                await asyncio.gather(*(one() for _ in range(6)), late())
                while receiver.side.free_slots < SLOTS:
                    await asyncio.sleep(0.001)
            drafting.cancel()

    asyncio.run(main())
    device.join()


async def draft_all(leader: AsyncLeader, down: bool = False) -> None:
    async for step in leader:
        chain = step.tail(2).tolist()
        for position in step.positions:
            token = await step.put(position, **{"device" if down else "weights": weights_of(chain)})
            if token is None:
                break
            chain.append(token)


# ---- draft side: device to host -------------------------------------------------------------------------------------------


def published(sides: Pair) -> int:
    """How many rows have left the draft's hands: frames queued (embedded), records written (attached)."""
    leader = sides.leader
    if isinstance(leader, AttachedLeader):
        assert leader._attachment is not None
        return leader._attachment.channel.records_out
    assert isinstance(leader, Leader)
    assert leader.session is not None
    return leader.session.rows


@pytest.mark.parametrize("holds", ("weights", "counts"))
@pytest.mark.parametrize("make", (FakeDevice, ThreadedDevice))
def test_a_row_is_published_once_it_is_down(sides: Pair, make: type[FakeDevice], holds: str) -> None:
    """At every look at a copy that is not over, no more rows have left than were over before; what arrives is what the device
    held, not what lay in the host's memory."""
    device = make(up=False)
    sides.leader.use_copy_stage(device)
    request = sides.receiver.open_request(new_id(), PROMPT, seed=9)
    looks: list[tuple[int, int]] = []

    def look(copy: FakeCopy) -> None:
        if not copy.over.is_set():
            looks.append((published(sides) - before, device.copies.index(copy)))

    device.at_look = look
    ticket = sides.receiver.enqueue(request, budget_us=LONG_US)
    step = sides.next_step()
    before = published(sides)
    chain, held = step.tail(2).tolist(), []
    for position in step.positions:
        weights = weights_of(chain)
        held.append(weights if holds == "weights" else allocate(weights))
        token = step.put(position, device=held[-1], holds=holds)
        assert token is not None
        chain.append(token)
    assert looks or make is ThreadedDevice, "a device that counts looks had some; a thread may be quicker than the first"
    assert all(left <= index for left, index in looks), "a REPLY left before its copy was over"
    sides.until(lambda: ticket.known)
    with ticket.wait() as proposal:
        for index, row in enumerate(held):
            counts = allocate(row) if holds == "weights" else row
            assert_array_equal(proposal.q(index).values, counts / np.float64(1 << 24))
        verify(request, proposal)
    assert request.tokens.tolist()[2:] == run_reference(MODELS, 9, 1, DEPTH, Mode.DENSE)
    assert len({copy.view.ctypes.data for copy in device.copies}) == 1, "one host row serves one row after the other"
    assert device.copies[0].view.ctypes.data % 4096 == 0


def test_sparse_rows_come_down_as_weights(sides: Pair) -> None:
    device = FakeDevice(up=False)
    sides.leader.use_copy_stage(device)
    request = sides.receiver.open_request(new_id(), PROMPT, seed=9)
    ticket = sides.receiver.enqueue(request, support=16, budget_us=LONG_US)
    step = sides.next_step()
    chain = step.tail(2).tolist()
    for position in step.positions:
        token = step.put(position, device=weights_of(chain))
        assert token is not None
        chain.append(token)
    sides.until(lambda: ticket.known)
    with ticket.wait() as proposal:
        verify(request, proposal)
    assert request.tokens.tolist()[2:] == run_reference(MODELS, 9, 1, DEPTH, Mode.SPARSE, support=16)


def a_step(sides: Pair, **options: Any) -> tuple[Ticket, Step]:
    options = {"budget_us": LONG_US} | options
    ticket = sides.receiver.enqueue(sides.receiver.open_request(new_id(), PROMPT), **options)
    return ticket, sides.next_step()


@pytest.mark.parametrize("fails", ("start", "done", "wait"))
def test_a_copy_from_the_device_that_fails(sides: Pair, fails: str) -> None:
    """The STEP is given up with its reason, and the draft hears its own error."""
    device = FakeDevice(after=None, up=False, fails=fails)
    sides.leader.use_copy_stage(device)
    ticket, step = a_step(sides)
    if fails == "start":
        device.copies.append(FakeCopy(0, np.zeros(1), True))
    with pytest.raises(ZeroDivisionError, match=fails):
        step.put(step.positions[0], device=np.ones(VOCAB))
    assert not step.alive
    sides.until(lambda: ticket.known)
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.COPY_FAILED
    assert sides.leader.counters.of(Reason.COPY_FAILED) >= 1


def test_a_proposal_that_dies_while_its_row_comes_down(sides: Pair) -> None:
    """The put ends; the host memory is not used again while the device may write it."""
    device = FakeDevice(after=None, up=False)
    sides.leader.use_copy_stage(device)
    ticket, step = a_step(sides, budget_us=50_000)
    ended = threading.Event()

    def serve() -> None:
        while not ended.wait(0.001):
            sides.receiver.poll()

    serving = threading.Thread(target=serve)
    serving.start()
    try:
        assert step.put(step.positions[0], device=np.ones(VOCAB)) is None
    finally:
        ended.set()
        serving.join()
    device.after = 1
    ticket, step = a_step(sides)
    put_all(step)
    assert device.copies[1].view.ctypes.data != device.copies[0].view.ctypes.data
    device.copies[0].happen()
    sides.until(lambda: ticket.known)
    ticket.wait().release()
    ticket, step = a_step(sides)
    put_all(step)
    assert device.copies[0].view.ctypes.data in {copy.view.ctypes.data for copy in device.copies[DEPTH + 1 :]}
    sides.until(lambda: ticket.known)
    ticket.wait().release()


def put_all(step: Step) -> None:
    for position in step.positions:
        assert step.put(position, device=np.ones(VOCAB)) is not None


def test_a_row_can_not_be_ended_before_its_copy(sides: Pair) -> None:
    sides.leader.use_copy_stage(FakeDevice(after=None, up=False))
    _ticket, step = a_step(sides)
    row = step.begin_copy(step.positions[0], np.ones(VOCAB), "weights")
    assert row is not None
    assert not step.copy_over(row)
    before = published(sides)
    with pytest.raises(LocalMisuse, match="copy_over"):
        step.end_copy(row)
    assert published(sides) == before


def test_copies_that_never_end_are_bounded(sides: Pair) -> None:
    device = FakeDevice(after=None, up=False)
    leader = sides.leader
    leader.use_copy_stage(device)
    _ticket, step = a_step(sides)
    rows = [step.begin_copy(step.positions[0], np.ones(VOCAB), "weights") for _ in range(BUFFERS_AT_MOST)]
    step.fail()
    for row in rows:
        assert row is not None
        assert step.end_copy(row) is None
    _ticket, step = a_step(sides)
    with pytest.raises(LocalMisuse, match="given up and still run"):
        step.put(step.positions[0], device=np.ones(VOCAB))
    device.finish()
    device.after = 1
    assert step.put(step.positions[0], device=np.ones(VOCAB)) is not None
    leader.close()
    assert leader.counters.get("copies_left_running") == 0


MISUSES: tuple[tuple[str, dict[str, Any], str], ...] = (
    ("both", {"device": 1, "weights": np.ones(VOCAB)}, "either device or"),
    ("ids", {"device": 1, "ids": np.zeros(1, np.int32)}, "either device or"),
    ("holds", {"device": 1, "holds": "logits"}, "holds must be one of"),
)


@pytest.mark.parametrize(("options", "text"), [case[1:] for case in MISUSES], ids=[case[0] for case in MISUSES])
def test_misuse_is_told(embedded: Pair, options: dict[str, Any], text: str) -> None:
    embedded.leader.use_copy_stage(FakeDevice(up=False))
    _ticket, step = a_step(embedded)
    with pytest.raises(LocalMisuse, match=text):
        step.put(step.positions[0], **options)


def test_more_misuse_is_told(embedded: Pair) -> None:
    _ticket, step = a_step(embedded)
    with pytest.raises(LocalMisuse, match="use_copy_stage"):
        step.put(step.positions[0], device=1)
    device = FakeDevice(after=1, up=False)
    embedded.leader.use_copy_stage(device)
    with pytest.raises(LocalMisuse, match="out of order"):
        step.put(step.positions[1], device=1)
    assert not device.copies, "nothing was begun"
    _ticket, sparse = a_step(embedded, support=4)
    with pytest.raises(LocalMisuse, match="need their ids"):
        sparse.put(sparse.positions[0], device=1, holds="counts")
    with pytest.raises(InvalidQ):
        step.put(step.positions[0], device=np.zeros(VOCAB))
    assert step.put(step.positions[0], device=np.ones(VOCAB)) is not None
    assert len({copy.view.ctypes.data for copy in device.copies}) == 1, "the host row came back after the refusal"


def test_tasks_draft_from_the_device(sides: Pair) -> None:
    """Under asyncio: other tasks run while a row comes down; a draft that is cancelled leaves its host row to the device."""
    device = ThreadedDevice(up=False, delay_s=0.01)

    async def main() -> None:
        sides.leader.use_copy_stage(device)
        async with AsyncReceiver(sides.receiver) as receiver, AsyncLeader(sides.leader) as leader:
            await receiver.wait_for_peer()
            ticking = 0

            async def tick() -> None:
                nonlocal ticking
                while True:
                    ticking += 1
                    await asyncio.sleep(0.001)

            async def one(seed: int) -> None:
                request = receiver.open_request(new_id(), PROMPT, seed=seed)
                with await receiver.step(request, budget_us=LONG_US) as proposal:
                    verify(request, proposal)
                assert request.tokens.tolist()[2:] == run_reference(MODELS, seed, 1, DEPTH, Mode.DENSE)

            async def draft_from_device() -> None:
                async for step in leader:
                    chain = step.tail(2).tolist()
                    for position in step.positions:
                        token = await step.put(position, device=weights_of(chain))
                        assert token is not None
                        chain.append(token)

            ticks = asyncio.create_task(tick())
            drafting = [asyncio.create_task(draft_from_device()) for _ in range(2)]
            async with asyncio.timeout(30):
                await asyncio.gather(*(one(seed) for seed in range(4)))
            assert ticking > 10
            waiting = asyncio.create_task(receiver.step(receiver.open_request(new_id(), PROMPT), budget_us=300_000))
            begun = len(device.copies)
            while len(device.copies) == begun:
                await asyncio.sleep(0.001)
            for task in (ticks, *drafting):
                task.cancel()
            await asyncio.gather(ticks, *drafting, return_exceptions=True)
            with pytest.raises(ProposalDiscarded):
                await waiting
            copies = sides.leader.copies
            assert sum(len(free) for free in copies._free.values()) + len(copies._given_up) == copies._made, "a host row is lost"

    asyncio.run(main())
    device.join()


def test_a_row_that_comes_down_while_its_leader_is_closed(sides: Pair) -> None:
    """The draft's task ends without a token; the host memory is kept for as long as the device writes it."""
    device = FakeDevice(after=None, up=False)
    before = len(copying._left_running)

    async def main() -> None:
        sides.leader.use_copy_stage(device)
        async with AsyncReceiver(sides.receiver) as receiver, AsyncLeader(sides.leader) as leader:
            waiting = asyncio.create_task(receiver.step(receiver.open_request(new_id(), PROMPT), budget_us=LONG_US))
            step = await anext(leader)
            putting = asyncio.create_task(step.put(step.positions[0], device=np.ones(VOCAB)))
            while not device.copies:
                await asyncio.sleep(0.001)
            await leader.aclose()
            assert await putting is None
            with pytest.raises(ProposalDiscarded):
                await waiting

    asyncio.run(main())
    assert len(copying._left_running) == before + 1
    device.finish()


def test_copies_are_looked_at_without_the_timer(sides: Pair) -> None:
    """What waits for a device has the pump look more often than it would for its peer."""

    async def main() -> None:
        for side, up in ((sides.receiver, True), (sides.leader, False)):
            side.use_copy_stage(FakeDevice(after=5, up=up))
            timer_off(side)
        async with AsyncReceiver(sides.receiver) as receiver, AsyncLeader(sides.leader) as leader:
            drafting = asyncio.create_task(draft_all(leader, down=True))
            async with asyncio.timeout(20):
                for _ in range(3):
                    (await receiver.step(receiver.open_request(new_id(), PROMPT), budget_us=LONG_US)).release()
            drafting.cancel()

    asyncio.run(main())
