"""Many tasks over one side: proposals, cancellation, slots in turn, faults, ends; and that an idle event loop stays idle."""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Set
from contextlib import asynccontextmanager, suppress
from typing import Any

import numpy as np
import pytest
from client_rig import DEPTH, MODELS, PROMPT, SLOTS, SMALL, WATCHDOG_S, Pair, daemons, new_id, pair, verify, weights_of

from pp1q_transport import open_leader, open_receiver
from pp1q_transport.client import AttachedLeader, AttachedReceiver, Leader, Receiver
from pp1q_transport.client.aio import AsyncLeader, AsyncReceiver, AsyncStep
from pp1q_transport.client.endpoint import Endpoint
from pp1q_transport.client.pump import Pump
from pp1q_transport.errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.reference import Mode, run_reference
from pp1q_transport.toy.sidecar import Deployment

pytestmark = pytest.mark.timeout(60)
PATIENT: dict[str, Any] = {"budget_us": 20_000_000}  # of a STEP that a slow machine must not end


@pytest.fixture(params=("embedded", "shm", "attached"))
def sides(request: pytest.FixtureRequest, deployment: Callable[[], Deployment]) -> Iterator[Pair]:
    """A connected pair of each kind, over shared memory too: a pump rests and rises with the link."""
    with pair(request.param, deployment) as made:
        yield made


def run(main: Coroutine[Any, Any, None]) -> None:
    """Runs a test's coroutine under a watchdog."""

    async def guarded() -> None:
        async with asyncio.timeout(WATCHDOG_S * 2):
            await main

    asyncio.run(guarded())


async def draft(step: AsyncStep) -> None:
    chain = step.tail(2).tolist()
    for position in step.positions:
        token = await step.put(position, weights=weights_of(chain))
        if token is None:
            return
        chain.append(token)


async def draft_all(leader: AsyncLeader) -> None:
    async for step in leader:
        await draft(step)


@asynccontextmanager
async def drafting(leader: AsyncLeader) -> AsyncIterator[None]:
    """A task that drafts whatever is asked."""
    task = asyncio.create_task(draft_all(leader))
    try:
        yield
        assert not task.done(), task
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@asynccontextmanager
async def both(sides: Pair) -> AsyncIterator[tuple[AsyncReceiver, AsyncLeader]]:
    async with AsyncReceiver(sides.receiver) as receiver, AsyncLeader(sides.leader) as leader:
        await receiver.wait_for_peer()
        await leader.wait_for_peer()
        yield receiver, leader


async def rounds(receiver: AsyncReceiver, request: Request, count: int, support: int | None = None) -> None:
    for _ in range(count):
        with await receiver.step(request, support=support, **PATIENT) as proposal:
            verify(request, proposal)


async def eventually(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(WATCHDOG_S):
        while not condition():
            await asyncio.sleep(0.001)


def timer_off(side: Any) -> Callable[[], None]:
    """From now on this side's pump is woken by descriptors alone. Returns what undoes it."""
    side.look_within_ns = lambda: 3_600_000_000_000
    return lambda: delattr(side, "look_within_ns")


def free(receiver: AsyncReceiver) -> Callable[[], bool]:
    return lambda: receiver.side.free_slots == SLOTS


# ---- proposals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_many_tasks_get_what_a_lone_loop_gets(sides: Pair, support: int | None) -> None:
    """More tasks than slots, all at once: each request's tokens are those that no transport at all would give."""

    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            requests = [receiver.open_request(new_id(), PROMPT, seed=100 + number) for number in range(12)]
            await asyncio.gather(*(rounds(receiver, request, 6, support) for request in requests))
            await eventually(free(receiver))
            mode = Mode.DENSE if support is None else Mode.SPARSE
            for number, request in enumerate(requests):
                want = run_reference(MODELS, 100 + number, 6, DEPTH, mode, support=support or 1)
                assert request.tokens.tolist()[2:] == want

    run(main())


def test_a_ticket_is_waited_for_later(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            requests = [receiver.open_request(new_id(), PROMPT) for number in range(2)]
            tickets = [receiver.enqueue(request, **PATIENT) for request in requests]
            proposals = await asyncio.gather(*(receiver.wait(ticket) for ticket in tickets))
            assert [proposal.depth for proposal in proposals] == [DEPTH, DEPTH]
            for proposal in proposals:
                proposal.release()

    run(main())


def test_a_ticket_is_not_for_two_tasks(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            ticket = receiver.enqueue(receiver.open_request(new_id(), PROMPT), **PATIENT)
            first = asyncio.create_task(receiver.wait(ticket))
            await asyncio.sleep(0)
            with pytest.raises(LocalMisuse, match="another task"):
                await receiver.wait(ticket)
            async with drafting(leader):
                (await first).release()

    run(main())


def test_other_tasks_run_while_one_waits(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            waiting = asyncio.create_task(receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT))
            for _ in range(50):
                await asyncio.sleep(0.001)
            assert not waiting.done()
            async with drafting(leader):
                (await waiting).release()

    run(main())


@pytest.mark.parametrize("support", (None, 16), ids=["dense", "sparse"])
def test_descriptors_wake_it_and_not_the_timer(sides: Pair, support: int | None) -> None:
    """With a timer that never comes, rounds still end: every wake-up that they need is a descriptor's."""
    for side in (sides.receiver, sides.leader):
        timer_off(side)

    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            requests = [receiver.open_request(new_id(), PROMPT) for _ in range(6)]
            await asyncio.gather(*(rounds(receiver, request, 25, support) for request in requests))
            held = [await receiver.step(requests[index], **PATIENT) for index in range(SLOTS)]
            waiting = asyncio.create_task(receiver.step(requests[SLOTS], **PATIENT))
            await asyncio.sleep(0.01)
            held[0].release()
            (await waiting).release()
            for proposal in held:
                proposal.release()

    run(main())


def test_an_idle_event_loop_is_left_alone(sides: Pair) -> None:
    """Nothing to do: the pump looks as often as its timer says, not as often as it can."""

    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            await rounds(receiver, receiver.open_request(new_id(), PROMPT), 2)
            before = receiver._pump.turns, leader._pump.turns
            await asyncio.sleep(0.5)
            assert receiver._pump.turns - before[0] < 100
            assert leader._pump.turns - before[1] < 100

    run(main())


class Sleeper:
    """A side that has something to do the moment it is asked to sleep."""

    closed = False
    flushed = True

    def __init__(self) -> None:
        self.polls = 0

    def poll(self) -> int:
        self.polls += 1
        return 0

    def before_sleep(self) -> tuple[object, ...] | None:
        return None if self.polls < 5 else ()

    def descriptors_to_watch(self) -> list[tuple[int, int]]:
        return []

    def after_sleep(self, ready: Set[int]) -> None:
        assert not ready

    def look_within_ns(self) -> int:
        return 3_600_000_000_000

    def may_wait(self) -> None: ...

    def settle_epoch(self) -> None: ...

    def close(self) -> None: ...


def test_a_side_that_can_not_sleep_is_polled_again() -> None:
    async def main() -> None:
        side = Sleeper()
        pump = Pump(side, lambda: None)
        assert await pump.obtain(lambda: side.polls if side.polls >= 5 else None) == 5
        pump.stop()

    run(main())


# ---- cancellation -----------------------------------------------------------------------------------------------------


def test_a_cancelled_task_takes_nothing_with_it(sides: Pair) -> None:
    """One of several waiting tasks is cancelled: the others get theirs, and its proposal is released when it arrives."""

    async def main() -> None:
        async with both(sides) as (receiver, leader):
            requests = [receiver.open_request(new_id(), PROMPT, seed=number) for number in range(3)]
            tasks = [asyncio.create_task(receiver.step(request, **PATIENT)) for request in requests]
            await eventually(lambda: receiver.side.free_slots == SLOTS - 3)
            tasks[1].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[1]
            assert receiver.side.free_slots == SLOTS - 3, "its STEP is under way all the same"
            async with drafting(leader):
                for index in (0, 2):
                    with await tasks[index] as proposal:
                        verify(requests[index], proposal)
                await eventually(free(receiver))
                receiver.commit_target_only(requests[1], requests[1].round - 1, [5])
                await rounds(receiver, requests[1], 2)
                await eventually(free(receiver))

    run(main())


def test_a_task_cancelled_with_its_proposal_in_hand(sides: Pair) -> None:
    """Cancelled after the outcome is known and before the task has run again: the slot comes back."""

    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            request = receiver.open_request(new_id(), PROMPT)
            ticket = receiver.enqueue(request, **PATIENT)
            task = asyncio.create_task(receiver.wait(ticket))
            look = receiver._pump._look
            cancelled: list[bool] = []

            def look_and_cancel() -> None:
                look()
                if ticket.known and not cancelled:
                    cancelled.append(task.cancel())

            receiver._pump._look = look_and_cancel  # type: ignore[method-assign]
            with pytest.raises(asyncio.CancelledError):
                await task
            assert cancelled == [True]
            await eventually(free(receiver))

    run(main())


def test_a_task_cancelled_in_line_for_a_slot(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            requests = [receiver.open_request(new_id(), PROMPT) for number in range(SLOTS + 2)]
            tasks = [asyncio.create_task(receiver.step(request, **PATIENT)) for request in requests]
            await eventually(lambda: receiver.side.free_slots == 0)
            tasks[SLOTS].cancel()
            with pytest.raises(asyncio.CancelledError):
                await tasks[SLOTS]
            async with drafting(leader):
                for index in (*range(SLOTS), SLOTS + 1):
                    (await tasks[index]).release()
            assert not requests[SLOTS].in_flight

    run(main())


@pytest.mark.parametrize("at_once", (True, False), ids=["at once", "before it runs"])
def test_a_task_cancelled_with_its_slot_in_hand(sides: Pair, at_once: bool) -> None:
    """Its STEP went out on its behalf a moment before: the proposal is released when it arrives."""

    async def main() -> None:
        async with both(sides) as (receiver, leader):
            requests = [receiver.open_request(new_id(), PROMPT) for number in range(SLOTS + 1)]
            tasks = [asyncio.create_task(receiver.step(request, **PATIENT)) for request in requests]
            await eventually(lambda: receiver.side.free_slots == 0 and requests[SLOTS - 1].in_flight)
            enqueue = receiver.side.enqueue

            def enqueue_and_cancel(request: Request, **options: Any) -> Any:
                ticket = enqueue(request, **options)
                if at_once:
                    tasks[SLOTS].cancel()
                else:
                    asyncio.get_running_loop().call_soon(tasks[SLOTS].cancel)
                return ticket

            receiver.side.enqueue = enqueue_and_cancel  # type: ignore[assignment, method-assign]
            async with drafting(leader):
                for task in tasks[:SLOTS]:
                    (await task).release()
                with pytest.raises(asyncio.CancelledError):
                    await tasks[SLOTS]
                assert requests[SLOTS].round == 1, "the STEP was sent"
                await eventually(free(receiver))

    run(main())


def test_a_timeout_of_the_tasks_own(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            request = receiver.open_request(new_id(), PROMPT)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await receiver.step(request, **PATIENT)
            receiver.close_request(request)
            await eventually(free(receiver))
            async with drafting(leader):
                await rounds(receiver, receiver.open_request(new_id(), PROMPT), 2)

    run(main())


def test_a_cancelled_draft_gives_its_step_to_the_next(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            take = leader._take
            taken: list[bool] = []

            def take_and_cancel() -> Any:
                step = take()
                if step is not None and not taken:
                    taken.append(taking.cancel())
                return step

            leader._take = take_and_cancel  # type: ignore[method-assign]
            taking = asyncio.create_task(anext(leader))
            waiting = asyncio.create_task(receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT))
            with pytest.raises(asyncio.CancelledError):
                await taking
            assert taken == [True]
            async with drafting(leader):
                (await waiting).release()

    run(main())


# ---- slots ------------------------------------------------------------------------------------------------------------


def test_slots_are_given_in_turn(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader), drafting(leader):
            held = [await receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT) for number in range(SLOTS)]
            order: list[int] = []

            async def take(number: int) -> None:
                with await receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT):
                    order.append(number)

            tasks = [asyncio.create_task(take(number)) for number in range(8)]
            await asyncio.sleep(0.02)
            assert not order
            held[0].release()
            (await receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT)).release()
            assert order, "a task that came later took the slot that others wait for"
            await asyncio.gather(*tasks)
            assert order == sorted(order)
            held[0] = await receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT)
            with pytest.raises(LocalMisuse, match="no free slot"):
                receiver.enqueue(receiver.open_request(new_id(), PROMPT), **PATIENT)
            for proposal in held:
                proposal.release()

    run(main())


# ---- faults and ends --------------------------------------------------------------------------------------------------


def test_a_budget_that_ends(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            request = receiver.open_request(new_id(), PROMPT)
            with pytest.raises(ProposalDiscarded) as caught:
                await receiver.step(request, budget_us=20_000)
            assert caught.value.reason is Reason.TIMEOUT
            receiver.commit_target_only(request, caught.value.round, [5])
            async with drafting(leader):
                await rounds(receiver, request, 2)

    run(main())


def test_a_budget_ends_on_time_by_itself(embedded: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """However rarely the pump looks for other reasons."""
    monkeypatch.setattr(Endpoint, "look_within_ns", lambda _self: 3_600_000_000_000)

    async def main() -> None:
        async with both(embedded) as (receiver, _leader):
            with pytest.raises(ProposalDiscarded) as caught:
                await receiver.step(receiver.open_request(new_id(), PROMPT), budget_us=20_000)
            assert caught.value.reason is Reason.TIMEOUT

    run(main())


def test_a_draft_that_gives_up(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            waiting = asyncio.create_task(receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT))
            (await anext(leader)).fail()
            with pytest.raises(ProposalDiscarded) as caught:
                await waiting
            assert caught.value.reason is Reason.CANCELLED

    run(main())


def test_a_closed_request_ends_its_wait(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, _leader):
            request = receiver.open_request(new_id(), PROMPT)
            waiting = asyncio.create_task(receiver.step(request, **PATIENT))
            await eventually(lambda: request.in_flight)
            receiver.close_request(request)
            with pytest.raises(ProposalDiscarded) as caught:
                await waiting
            assert caught.value.reason is Reason.CANCELLED

    run(main())


def test_what_a_callback_raises_reaches_the_loop_that_drafts(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):

            def fail(_request: int, _tokens: list[int]) -> None:
                raise ZeroDivisionError("of the draft's own")

            leader.side.on_open(fail)
            taking = asyncio.create_task(anext(leader))
            await asyncio.sleep(0)
            receiver.open_request(new_id(), PROMPT)
            with pytest.raises(ZeroDivisionError):
                await taking
            # Nobody waits the second time: the next who does hears of it.
            receiver.open_request(new_id(), PROMPT)
            await eventually(lambda: leader._pump._kept is not None)
            with pytest.raises(ZeroDivisionError):
                await anext(leader)

    run(main())


def test_closing_ends_every_wait(sides: Pair) -> None:
    async def main() -> None:
        watched = selector_map()
        receiver, leader = AsyncReceiver(sides.receiver), AsyncLeader(sides.leader)
        iterating = asyncio.create_task(draft_nothing(leader))
        requests = [receiver.open_request(new_id(), PROMPT) for number in range(SLOTS + 1)]
        waiting = [asyncio.create_task(receiver.step(request, **PATIENT)) for request in requests]
        await eventually(lambda: receiver.side.free_slots == 0)
        await receiver.aclose()
        for task in waiting:
            with pytest.raises(ProposalDiscarded) as caught:
                await task
            assert caught.value.reason is Reason.CANCELLED
        with pytest.raises(LocalMisuse, match="closed"):
            await receiver.step(requests[0], **PATIENT)
        with pytest.raises(LocalMisuse, match="closed"):
            await receiver.wait_for_peer()
        await receiver.aclose()
        await leader.aclose()
        await iterating
        assert selector_map() == watched

    run(main())


def selector_map() -> list[int]:
    """The descriptors that the running event loop watches."""
    return sorted(asyncio.get_running_loop()._selector.get_map())  # type: ignore[attr-defined]


async def draft_nothing(leader: AsyncLeader) -> None:
    async for _step in leader:
        pass


def test_another_event_loop_is_refused(sides: Pair) -> None:
    receiver = AsyncReceiver(sides.receiver)

    async def main() -> None:
        receiver.start()

    run(main())
    with pytest.raises(LocalMisuse, match="another event loop"):
        run(main())
    # The side itself is as usable as before: its event loop is gone, and nobody is to be woken there.
    with sides.ready(sides.receiver.open_request(new_id(), PROMPT)).wait():
        pass


def test_no_peer_in_time() -> None:
    async def main() -> None:
        async with AsyncReceiver(open_receiver(listen="tcp://127.0.0.1:0", **SMALL)) as receiver:
            with pytest.raises(PeerFault) as caught:
                await receiver.wait_for_peer(0.05)
            assert caught.value.reason is Reason.TIMEOUT
            with pytest.raises(ProposalDiscarded) as discarded:
                await receiver.step(receiver.open_request(new_id(), PROMPT), **PATIENT)
            assert discarded.value.reason is Reason.PEER_LOST

    run(main())


def test_a_task_that_only_retries_lets_others_run(sides: Pair) -> None:
    async def main() -> None:
        async with both(sides) as (receiver, leader):
            request = receiver.open_request(new_id(), PROMPT)
            await leader.aclose()
            if isinstance(receiver.side, Receiver):
                await eventually(lambda: not receiver.up)
            else:
                receiver.side.draining = True

            async def retry() -> None:
                while True:
                    with suppress(ProposalDiscarded):
                        await receiver.step(request, **PATIENT)

            task = asyncio.create_task(retry())
            await asyncio.sleep(0.02)
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    run(main())


def test_a_lost_peer_and_the_next_one() -> None:
    """The leader goes, a later one comes: waits end with their reason, and the same receiver goes on. Sockets of the second
    session may have the numbers of the first's."""

    async def main() -> None:
        receiver = open_receiver(listen="tcp://127.0.0.1:0", **SMALL)
        async with AsyncReceiver(receiver) as pumped:
            request = pumped.open_request(new_id(), PROMPT)
            for _life in range(3):
                leader = AsyncLeader(open_leader(connect=receiver.endpoint, **SMALL))
                async with leader:
                    await asyncio.gather(pumped.wait_for_peer(), leader.wait_for_peer())
                    timers = [timer_off(receiver), timer_off(leader.side)]
                    async with drafting(leader):
                        await rounds(pumped, request, 3)
                    for on_again in timers:
                        on_again()
                    waiting = asyncio.create_task(pumped.step(request, **PATIENT))
                    await anext(leader)
                with pytest.raises(ProposalDiscarded) as caught:
                    await waiting
                assert caught.value.reason is Reason.PEER_LOST
                pumped.commit_target_only(request, caught.value.round, [5])
                await eventually(lambda: not pumped.up)

    run(main())


def test_a_link_that_may_not_be_lost() -> None:
    """`wait_for_peer=False`: the loss is raised where somebody waits, and the side is closed."""

    async def main() -> None:
        receiver = open_receiver(listen="tcp://127.0.0.1:0", **SMALL)
        leader = open_leader(connect=receiver.endpoint, wait_for_peer=False, **SMALL)
        async with AsyncReceiver(receiver) as target, AsyncLeader(leader) as draft_side:
            await asyncio.gather(target.wait_for_peer(), draft_side.wait_for_peer())
            iterating = asyncio.create_task(anext(draft_side))
            await asyncio.sleep(0)
            link = receiver.engine.link
            assert link is not None
            link.sock.close()
            link.fd = -1
            with pytest.raises((PeerFault, StopAsyncIteration)):
                await iterating

    run(main())


def test_a_draft_whose_target_left_in_order_is_done() -> None:
    """`wait_for_peer=False` and a goodbye: the side closes by itself, and the iteration ends."""

    async def main() -> None:
        receiver = open_receiver(listen="tcp://127.0.0.1:0", **SMALL)
        async with AsyncLeader(open_leader(connect=receiver.endpoint, wait_for_peer=False, **SMALL)) as leader:
            async with AsyncReceiver(receiver) as target:
                await asyncio.gather(target.wait_for_peer(), leader.wait_for_peer())
                iterating = asyncio.create_task(draft_nothing(leader))
                await asyncio.sleep(0)
            await iterating
            with pytest.raises(PeerFault) as caught:
                await leader.wait_for_peer()
            assert caught.value.reason is Reason.PEER_LOST

    run(main())


def test_a_link_too_narrow_for_what_is_put() -> None:
    """Rows that the kernel does not take at once are sent as it takes them, without the timer."""
    options = SMALL | {"vocab_size": 129280, "depth": 5}

    async def main() -> None:
        receiver: Receiver = open_receiver(listen="tcp://127.0.0.1:0", **options)
        leader: Leader = open_leader(connect=receiver.endpoint, **options)
        async with AsyncReceiver(receiver) as target, AsyncLeader(leader) as drafter:
            await asyncio.gather(target.wait_for_peer(), drafter.wait_for_peer())
            assert leader.engine.link is not None
            leader.engine.link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 65536)
            row = np.random.default_rng(1).random(129280)
            queued = 0

            arrived = asyncio.Event()

            async def answer() -> None:
                nonlocal queued
                async for step in drafter:
                    for position in step.positions:
                        await step.put(position, weights=row)
                        assert leader.engine.link is not None
                        queued = max(queued, leader.engine.link.outbox.bytes_queued)
                    await arrived.wait()  # nothing but what `put` asked for sends the rest
                    arrived.clear()

            timer_off(receiver)
            timer_off(leader)
            task = asyncio.create_task(answer())
            for _ in range(3):
                (await target.step(target.open_request(new_id(), PROMPT), budget_us=10_000_000)).release()
                arrived.set()
            task.cancel()
            assert queued > 0

    run(main())


@pytest.mark.slow
def test_a_daemon_that_is_killed_and_comes_back() -> None:
    """Both daemons in turn: what waits ends with its reason, and the same tasks go on once the daemon is there again."""

    async def main(deployment: Deployment) -> None:
        receiver_side, leader_side = AttachedReceiver(deployment.socket("receiver0")), AttachedLeader(deployment.socket("leader"))
        async with both(Pair(receiver_side, leader_side)) as (receiver, leader):
            request = receiver.open_request(1, PROMPT)
            for name in ("receiver0", "leader"):
                async with drafting(leader):
                    await rounds(receiver, request, 2)
                waiting = asyncio.create_task(receiver.step(request, **PATIENT))
                await anext(leader)
                deployment.kill(name)
                with pytest.raises(ProposalDiscarded) as caught:
                    await waiting
                assert caught.value.reason is Reason.PEER_LOST
                receiver.commit_target_only(request, caught.value.round, [5])
                deployment.start(name)
                await eventually(lambda: not receiver.up or leader.up)
                await asyncio.gather(receiver.wait_for_peer(), leader.wait_for_peer())
            async with drafting(leader):
                await rounds(receiver, request, 2)

    with daemons() as deployment:
        run(main(deployment))


@pytest.mark.slow
def test_a_daemon_that_hangs_is_given_up() -> None:
    """Stopped, not dead: once a STEP's budget and the grace are over, its wait ends, and the rest of the event loop ran on."""

    async def main(deployment: Deployment) -> None:
        async with both(
            Pair(AttachedReceiver(deployment.socket("receiver0")), AttachedLeader(deployment.socket("leader")))
        ) as (receiver, _leader):
            request = receiver.open_request(1, PROMPT)
            process = deployment.parts["receiver0"].process
            assert process is not None
            process.send_signal(signal.SIGSTOP)
            try:
                with pytest.raises(ProposalDiscarded) as caught:
                    await receiver.step(request, budget_us=50_000)
            finally:
                process.send_signal(signal.SIGCONT)
            assert caught.value.reason is Reason.PEER_LOST
            assert receiver.side.counters.get("daemon_lost") == 1
            await receiver.wait_for_peer()

    with daemons() as deployment:
        run(main(deployment))
