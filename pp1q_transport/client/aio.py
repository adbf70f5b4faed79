"""Both sides for asyncio: many tasks share one receiver, or one leader, in the event loop's own thread.

Between the tasks of an engine and a side of either kind (embedded or attached), which one pump serves. Adds no thread and no
protocol: what is awaited here is what the plain side waits for. SPEC section 9.
"""

from __future__ import annotations

import asyncio
from collections import deque
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Protocol, Self

from ..errors import LocalMisuse, PeerFault, ProposalDiscarded, Reason
from .copying import LOOK_NS
from .pump import Pump, Pumped, SideClosed

if TYPE_CHECKING:
    from collections.abc import Iterable

    import numpy.typing as npt

    from ..session.requests import Request
    from .copying import RowDown
    from .draft_side import DraftSide, Step
    from .proposal import Proposal, Ticket
    from .target_side import TargetSide

CLOSED: Final = "this side is closed"


class PumpedTarget(Pumped, Protocol):
    """A receiver that can be pumped: `Receiver` and `AttachedReceiver`."""

    @property
    def up(self) -> bool:
        """Whether proposals can flow."""


class _AsyncSide:
    """What both share: a pump, the waiting for the peer, an orderly end. An asynchronous context manager."""

    def __init__(self, side: Any) -> None:
        self._pumped: PumpedTarget = side
        self._pump = Pump(side, self._chore)

    def _chore(self) -> None:
        """After each poll."""

    @property
    def up(self) -> bool:
        """Whether proposals can flow."""
        return self._pumped.up

    def start(self) -> None:
        """Begins to serve the side in the running event loop; whatever is awaited here does it as well. `LocalMisuse` after
        `aclose`, or in another event loop than before."""
        try:
            self._pump.start()
        except SideClosed:
            raise LocalMisuse(CLOSED) from None

    async def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Waits until proposals can flow; raises `PeerFault(timeout)` when they can't in time. In a group of ranks this is where
        they agree (`on_agree`), in the event loop's thread."""
        self.start()
        self._pumped.may_wait()
        try:
            async with asyncio.timeout(timeout_s):
                await self._pump.obtain(self._peer)
        except TimeoutError:
            raise PeerFault(Reason.TIMEOUT, f"no peer within {timeout_s:g} s") from None
        except SideClosed:
            raise PeerFault(Reason.PEER_LOST, "the session is over and this side is closed") from None

    def _peer(self) -> bool | None:
        if not self.up:
            self._pumped.settle_epoch()
        return self.up or None

    async def aclose(self) -> None:
        """Sends what is queued (for a second at most), then closes the side. Tasks that wait here end: see what they await. Safe
        to repeat."""
        try:
            with suppress(SideClosed):
                await self._pump.drain()
        finally:
            self._pump.stop()
            self._pumped.close()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *exc: object) -> None:
        await self.aclose()


class AsyncReceiver(_AsyncSide):
    """The target side for tasks of one event loop. `side` is the receiver it serves, embedded or attached; its `open_request`,
    `counters`, `totals` and so on stay where they are."""

    def __init__(self, side: TargetSide) -> None:
        super().__init__(side)
        self.side = side
        self._in_line = 0  # tasks that wait for a slot
        self._awaited: set[int] = set()  # tickets, by identity
        self._abandoned: list[Ticket] = []
        side.nudge = self._pump.kick
        self._pump.soonest_ns = lambda: LOOK_NS if side.copies.awaited else None

    def open_request(self, request: int, tokens: Iterable[int], **options: Any) -> Request:
        """See `TargetSide.open_request`."""
        opened = self.side.open_request(request, tokens, **options)
        self._pump.kick()
        return opened

    def close_request(self, request: Request) -> None:
        """See `TargetSide.close_request`; who waits for its proposal gets `ProposalDiscarded(cancelled)`."""
        self.side.close_request(request)
        self._pump.kick()

    def commit_target_only(self, request: Request, round: int, tokens: Iterable[int]) -> None:
        """See `TargetSide.commit_target_only`."""
        self.side.commit_target_only(request, round, tokens)
        self._pump.kick()

    def enqueue(self, request: Request, **options: Any) -> Ticket:
        """See `TargetSide.enqueue`: the STEP is queued at once, or it is `LocalMisuse` that no slot is free."""
        self.start()
        try:
            return self.side.enqueue(request, **options)
        finally:
            self._pump.kick()

    async def step(self, request: Request, **options: Any) -> Proposal:
        """A proposal of `request`; the options are those of `enqueue`. Waits for a free slot first, in turn with other tasks: the
        budget begins when there is one.

        Raises what `enqueue` and `wait` raise. A task that is cancelled meanwhile leaves nothing behind: see `wait`.
        """
        self.start()
        try:
            if self._in_line or not self.side.free_slots:
                ticket = await self._slot(request, options)
            else:
                ticket = self.enqueue(request, **options)
        except ProposalDiscarded:
            await asyncio.sleep(0)  # a task that does nothing but try again must not keep the others from running
            raise
        return await self.wait(ticket)

    async def _slot(self, request: Request, options: dict[str, Any]) -> Ticket:
        def attempt() -> Ticket | None:
            if self.side.up and not self.side.free_slots:
                return None
            return self.side.enqueue(request, **options)

        self._in_line += 1
        try:
            return await self._pump.obtain(attempt, self._abandon)
        except SideClosed:
            raise ProposalDiscarded(Reason.CANCELLED, request.request, request.round) from None
        finally:
            self._in_line -= 1

    async def wait(self, ticket: Ticket) -> Proposal:
        """The proposal of a ticket, or `ProposalDiscarded`: `cancelled` when this side is closed meanwhile.

        When the waiting task is cancelled, the STEP goes on and its proposal is released as soon as it arrives. Its request goes
        on as after any proposal that is not used, with `commit_target_only` (round `request.round - 1`), or it is closed, at any
        time. Two tasks can't wait for one ticket.
        """
        if id(ticket) in self._awaited:
            raise LocalMisuse("another task waits for this ticket")
        if not ticket.known:
            self._awaited.add(id(ticket))
            try:
                await self._pump.obtain(lambda: ticket.known or None)
            except asyncio.CancelledError:
                self._abandon(ticket)
                raise
            except SideClosed:
                raise ProposalDiscarded(Reason.CANCELLED, round=ticket.round) from None
            finally:
                self._awaited.discard(id(ticket))
        return ticket.wait()

    def _abandon(self, ticket: Ticket) -> None:
        self._abandoned.append(ticket)
        self._pump.kick()

    def _chore(self) -> None:
        for ticket in [ticket for ticket in self._abandoned if ticket.known]:
            self._abandoned.remove(ticket)
            with suppress(ProposalDiscarded):
                ticket.wait().release()

    async def aclose(self) -> None:
        """See `_AsyncSide.aclose`. Tasks in `step` or `wait` get `ProposalDiscarded(cancelled)`."""
        try:
            await super().aclose()
        finally:
            self.side.nudge = lambda: None


class AsyncStep:
    """One STEP at the draft: `put` is awaited, everything else is the plain `Step`'s (`positions`, `tokens`, `alive`...)."""

    def __init__(self, leader: AsyncLeader, step: Step) -> None:
        self._leader = leader
        self.step = step

    def __getattr__(self, name: str) -> Any:
        return getattr(self.step, name)

    async def put(
        self,
        position: int,
        *,
        weights: npt.NDArray[Any] | None = None,
        counts: npt.NDArray[Any] | None = None,
        ids: npt.NDArray[Any] | None = None,
        device: object = None,
        holds: str = "weights",
    ) -> int | None:
        """See `Step.put`. Other tasks run while a copy from the device is under way, and before it returns."""
        try:
            if device is None or not (weights is None and counts is None and ids is None):
                return self.step.put(position, weights=weights, counts=counts, ids=ids, device=device, holds=holds)
            row = self.step.begin_copy(position, device, holds)
            return None if row is None else await self._leader.copied(self.step, row)
        finally:
            await self._leader.breathe()

    def fail(self, reason: Reason = Reason.CANCELLED) -> None:
        """See `Step.fail`."""
        self.step.fail(reason)
        self._leader.kick()


class AsyncLeader(_AsyncSide):
    """The draft side for tasks of one event loop: `async for step in leader`. `side` is the leader it serves, embedded or
    attached; callbacks (`on_reset`...) are registered there. Several tasks may iterate; each STEP goes to one."""

    def __init__(self, side: DraftSide) -> None:
        super().__init__(side)
        self.side = side
        self._returned: deque[Step] = deque()  # of tasks that were cancelled with a STEP in hand
        self._copying = 0
        self._pump.soonest_ns = lambda: LOOK_NS if self._copying else None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> AsyncStep:
        """The next live STEP, across reconnects; the iteration ends when this side is closed. Raises what a callback raised."""
        try:
            return AsyncStep(self, await self._pump.obtain(self._take, self._returned.append))
        except SideClosed:
            raise StopAsyncIteration from None

    def _take(self) -> Step | None:
        while self._returned:
            step = self._returned.popleft()
            if step.alive:
                return step
        return self.side.take_step()

    async def copied(self, step: Step, row: RowDown) -> int | None:
        """The token of a row whose copy from the device was begun, once it is over and the row is sent. See `Step.put`."""
        self._copying += 1
        try:
            await self._pump.obtain(lambda: step.copy_over(row) or None)
        except SideClosed:
            self.side.copies.give_back(row)
            return None
        except BaseException:
            self.side.copies.give_back(row)
            raise
        finally:
            self._copying -= 1
        return step.end_copy(row)

    def kick(self) -> None:
        """Something was queued: the event loop is to look at what there is to send."""
        self._pump.kick()

    async def breathe(self) -> None:
        """Lets other tasks run, and what was queued be sent."""
        self._pump.kick()
        await asyncio.sleep(0)


__all__ = ["AsyncLeader", "AsyncReceiver", "AsyncStep"]
