"""A group of two ranks whose targets are tasks of one event loop: rounds, agreement, and a copy that fails on one rank alone."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace

import pytest
from client_rig import DEPTH, MODELS, PROMPT, SHAPE, WATCHDOG_S, daemons, new_id, verify
from fake_device import FakeDevice
from test_aio import PATIENT, drafting, run

from pp1q_transport.client import AttachedLeader, AttachedReceiver
from pp1q_transport.client.aio import AsyncLeader, AsyncReceiver
from pp1q_transport.errors import LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.session.requests import Request
from pp1q_transport.toy.reference import Mode, run_reference
from pp1q_transport.toy.sidecar import Deployment

pytestmark = pytest.mark.timeout(90)
RANKS = 2


@pytest.fixture(scope="module")
def group() -> Iterator[Deployment]:
    with daemons(replace(SHAPE, ranks=RANKS)) as deployment:
        yield deployment


@asynccontextmanager
async def ranks(group: Deployment) -> AsyncIterator[tuple[list[AsyncReceiver], AsyncLeader]]:
    """Both ranks and the leader, agreed; the collective is the memory that both share."""
    sides = [AttachedReceiver(group.socket(f"receiver{rank}"), rank) for rank in range(RANKS)]

    def agree(_epoch: int, _committed: dict[int, array[int]]) -> dict[int, list[int]]:
        both = [{number: each.tokens.tolist() for number, each in side.requests.requests.items()} for side in sides]
        return {number: max((tokens[number] for tokens in both), key=len) for number in both[0]}

    async with AsyncExitStack() as stack:
        receivers = [await stack.enter_async_context(AsyncReceiver(side)) for side in sides]
        leader = await stack.enter_async_context(AsyncLeader(AttachedLeader(group.socket("leader"))))
        with pytest.raises(LocalMisuse, match="on_agree"):
            await receivers[0].wait_for_peer()
        for side in sides:
            side.on_agree(agree)
        await asyncio.gather(*(receiver.wait_for_peer() for receiver in receivers), leader.wait_for_peer())
        async with asyncio.timeout(WATCHDOG_S):
            while not sides[0].leader_session:  # ranks agree without a leader; its rows are what these tests are about
                await asyncio.sleep(0.001)
        yield receivers, leader


def opened(receivers: list[AsyncReceiver], seed: int) -> list[Request]:
    number = new_id()
    return [receiver.open_request(number, PROMPT, seed=seed) for receiver in receivers]


async def one_round(receiver: AsyncReceiver, request: Request) -> None:
    with await receiver.step(request, **PATIENT) as proposal:
        verify(request, proposal)


async def one_round_or_alone(receiver: AsyncReceiver, request: Request) -> Reason | None:
    """A round whatever comes: after a discard every rank goes on with the same token."""
    try:
        await one_round(receiver, request)
    except ProposalDiscarded as discarded:
        receiver.commit_target_only(request, discarded.round, [5])
        return discarded.reason
    return None


def test_ranks_commit_the_same(group: Deployment) -> None:
    async def main() -> None:
        async with ranks(group) as (receivers, leader), drafting(leader):
            for seed in range(3):
                requests = opened(receivers, seed)
                for _ in range(5):
                    await asyncio.gather(*(one_round(*each) for each in zip(receivers, requests, strict=True)))
                want = run_reference(MODELS, seed, 5, DEPTH, Mode.DENSE)
                for request in requests:
                    assert request.tokens.tolist()[2:] == want

    run(main())


def test_a_copy_that_fails_on_one_rank_is_nobodys_commit(group: Deployment) -> None:
    """That rank discards; the other, whose copies are done, can't commit what it holds. Both agree again and go on."""

    async def main() -> None:
        async with ranks(group) as (receivers, leader), drafting(leader):
            requests = opened(receivers, 11)
            await asyncio.gather(*(one_round(*each) for each in zip(receivers, requests, strict=True)))
            before = [request.tokens.tolist() for request in requests]
            assert before[0] == before[1]
            receivers[1].side.use_copy_stage(FakeDevice(after=1, fails="done"))
            whole, broken = await asyncio.gather(
                *(receiver.step(request, **PATIENT) for receiver, request in zip(receivers, requests, strict=True)),
                return_exceptions=True,
            )
            assert isinstance(broken, ProposalDiscarded)
            assert broken.reason is Reason.COPY_FAILED
            async with asyncio.timeout(WATCHDOG_S):
                while receivers[0].up:
                    await asyncio.sleep(0.001)
            if isinstance(whole, ProposalDiscarded):  # the end of the epoch came first
                assert whole.reason is Reason.PEER_LOST
            else:
                assert not isinstance(whole, BaseException)
                with pytest.raises(ProposalDiscarded) as caught, whole:
                    verify(requests[0], whole)
                assert caught.value.reason is Reason.PEER_LOST
            assert [request.tokens.tolist() for request in requests] == before
            receivers[1].side.use_copy_stage(FakeDevice(after=2))
            await asyncio.gather(*(receiver.wait_for_peer() for receiver in receivers))
            outcomes = [
                await asyncio.gather(*(one_round_or_alone(*each) for each in zip(receivers, requests, strict=True)))
                for _ in range(4)
            ]
            assert all(mine is theirs for mine, theirs in outcomes), "ranks go on alike"
            assert outcomes[-1] == [None, None], outcomes
            assert requests[0].tokens == requests[1].tokens
            assert len(requests[0].tokens) > len(before[0])

    run(main())
