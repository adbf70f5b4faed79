"""The pump: polls one side from an asyncio event loop, and wakes the tasks that wait for what comes of it.

Between the event loop, which sees one descriptor and one timer, and a side (embedded or attached), which it polls whenever one of
its descriptors is ready. No thread, no busy polling. Knows neither proposals nor STEPs (`aio` does). For one event loop.
"""

from __future__ import annotations

import asyncio
import select
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, Generic, Protocol, TypeVar

from ..errors import LocalMisuse

if TYPE_CHECKING:
    from collections.abc import Callable, Set

DRAIN_S: Final = 1.0
NS: Final = 1e9

T = TypeVar("T")


class Pumped(Protocol):
    """What a side must have to be pumped; all of `Endpoint` and `AttachedSide`."""

    @property
    def closed(self) -> bool:
        """Whether this side has ended for good."""

    @property
    def flushed(self) -> bool:
        """Whether nothing waits to be sent."""

    def may_wait(self) -> None:
        """Raises `LocalMisuse` when waiting for the peer would be in vain: the caller has left something undone."""

    def settle_epoch(self) -> None:
        """Does what the group's epoch wants of this process, if there is one."""

    def poll(self) -> int:
        """Serves it once, without waiting. Returns how much that moved."""

    def before_sleep(self) -> tuple[object, ...] | None:
        """Prepares for the owner's own sleep. None: do not sleep, poll; otherwise what `descriptors_to_watch` depends on."""

    def descriptors_to_watch(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) of everything that may wake this side."""

    def after_sleep(self, ready: Set[int]) -> None:
        """Ends the sleep; `ready` are the descriptors that ended it. Then poll."""

    def look_within_ns(self) -> int:
        """How long the owner may sleep at most, in ns."""

    def close(self) -> None:
        """Ends this side."""


class SideClosed(Exception):
    """The side is closed: what a task waited for will not come. Private to this package; `aio` says it in its own words."""


def _keep(_result: object) -> None:
    """Nothing to undo."""


class _Waiter(Generic[T]):
    def __init__(self, attempt: Callable[[], T | None], undo: Callable[[T], None], future: asyncio.Future[T]) -> None:
        self.attempt = attempt
        self.undo = undo
        self.future = future

    def look(self) -> None:
        """Tries once. What the attempt raises is this waiter's alone."""
        if self.future.done():
            return
        try:
            got = self.attempt()
        except Exception as error:  # noqa: BLE001 - it goes to the task that waits
            self.fail(error)
            return
        if got is None:
            return
        if self.future.done():  # the attempt itself had its task cancelled
            self.undo(got)
        else:
            self.future.set_result(got)

    def fail(self, error: BaseException) -> None:
        """Ends the wait with an error."""
        if not self.future.done():
            self.future.set_exception(error)


class Pump:
    """Polls `side` for the tasks of one event loop. `chore` is called after each poll."""

    def __init__(self, side: Pumped, chore: Callable[[], None]) -> None:
        self.side = side
        self.turns = 0
        self.soonest_ns: Callable[[], int | None] = lambda: None
        """How soon the owner wants another turn whatever happens, in ns; None for no wish."""
        self._chore = chore
        self._loop: asyncio.AbstractEventLoop | None = None
        # An epoll of our own: the event loop sees one descriptor, whatever the side closes and opens anew under the same number.
        self._epoll: select.epoll | None = None
        self._watched: list[int] = []
        self._state: tuple[object, ...] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._asked = False
        self._waiters: dict[int, _Waiter[Any]] = {}  # in the order they came
        self._next = 0
        self._kept: Exception | None = None  # a fault that nobody waited for
        self._ended = False

    # ---- its life -----------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Begins to pump, in the running event loop; harmless once begun. Raises `LocalMisuse` in another event loop than before,
        `SideClosed` after `stop`."""
        loop = asyncio.get_running_loop()
        if self._ended:
            raise SideClosed
        if self._loop is None:
            self._loop = loop
            self._epoll = select.epoll()
            loop.add_reader(self._epoll.fileno(), self._turn)
            self.kick()
        elif self._loop is not loop:
            raise LocalMisuse("this side belongs to another event loop")

    async def drain(self) -> None:
        """Pumps until everything is sent, for a second at most (a peer that reads nothing is not waited for)."""
        with suppress(TimeoutError, SideClosed):
            async with asyncio.timeout(DRAIN_S):
                await self.obtain(lambda: self.side.flushed or None)

    def stop(self) -> None:
        """Pumps no more; whoever waits gets `SideClosed`. Safe to repeat."""
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._loop is not None and self._epoll is not None:
            self._loop.remove_reader(self._epoll.fileno())
            self._epoll.close()
            self._epoll = None
        self._fail(SideClosed())

    # ---- tasks --------------------------------------------------------------------------------------------------

    async def obtain(self, attempt: Callable[[], T | None], undo: Callable[[T], None] = _keep) -> T:
        """Waits until `attempt`, called after each poll, gives something that is not None. Those who came first are tried first.

        Raises what the attempt raises, what the side's `poll` raises, or `SideClosed`. A task that is cancelled after its
        attempt succeeded hands the result to `undo`; nobody else notices.
        """
        self.start()
        assert self._loop is not None
        kept, self._kept = self._kept, None
        if kept is not None:
            raise kept
        future: asyncio.Future[T] = self._loop.create_future()
        number, self._next = self._next, self._next + 1
        self._waiters[number] = _Waiter(attempt, undo, future)
        self.kick()
        try:
            return await future
        except asyncio.CancelledError:
            if future.done() and not future.cancelled() and future.exception() is None:
                undo(future.result())
            raise
        finally:
            del self._waiters[number]

    def kick(self) -> None:
        """Asks for a turn as soon as the event loop comes round: something changed that no descriptor tells of."""
        if not self._asked and self._loop is not None and not self._ended and not self._loop.is_closed():
            self._asked = True
            self._loop.call_soon(self._turn)

    # ---- one turn -----------------------------------------------------------------------------------------------

    def _turn(self) -> None:
        if self._ended:
            return
        self._asked = False
        self.turns += 1
        fault: Exception | None = None
        try:
            self.side.after_sleep(self._ready())
            self.side.poll()
        except Exception as error:  # noqa: BLE001 - the peer's fault, or of a callback of the owner's: a task must hear of it
            fault = error
        self._look()  # first: what is settled is settled, whatever else went wrong
        if fault is not None and not self._fail(fault):
            self._kept = fault
        if self.side.closed:
            self._fail(SideClosed())
        if not self._ended:
            self._sleep()

    def _ready(self) -> set[int]:
        assert self._epoll is not None
        return {descriptor for descriptor, _events in self._epoll.poll(0)}

    def _look(self) -> None:
        self._chore()
        for waiter in list(self._waiters.values()):
            waiter.look()

    def _fail(self, error: Exception) -> bool:
        """Whether somebody heard of it."""
        waiting = [waiter for waiter in self._waiters.values() if not waiter.future.done()]
        for waiter in waiting:
            waiter.fail(error)
        return bool(waiting)

    def _sleep(self) -> None:
        assert self._loop is not None
        state = self.side.before_sleep()
        if state is None:
            self.kick()
            return
        if state != self._state:
            self._state = state
            self._watch()
        wait_ns, wish_ns = self.side.look_within_ns(), self.soonest_ns()
        if self._timer is not None:
            self._timer.cancel()
        self._timer = self._loop.call_later((wait_ns if wish_ns is None else min(wait_ns, wish_ns)) / NS, self._turn)

    def _watch(self) -> None:
        assert self._epoll is not None
        for descriptor in self._watched:
            with suppress(OSError):  # it was closed, and maybe came back as something that is not ours
                self._epoll.unregister(descriptor)
        wanted = dict(self.side.descriptors_to_watch())
        for descriptor, events in wanted.items():
            self._epoll.register(descriptor, events)
        self._watched = list(wanted)


__all__ = ["Pump", "Pumped", "SideClosed"]
