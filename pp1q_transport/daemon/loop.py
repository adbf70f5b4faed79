"""The daemon's one loop: engines, the client's channel, its Unix socket, metrics, signals and the service manager.

Between the parts, each of which does its own work when polled, and the operating system, which wakes the loop for any of them. No
thread, no callback from outside. A turn takes what clients ask for, moves frames, tells clients what happened, and sleeps only
when nothing of that did anything. SPEC sections 2, 4 and 9.
"""

from __future__ import annotations

import select
import signal
from typing import TYPE_CHECKING, Final, Protocol

from .._native.kernels import monotonic_ns
from ..errors import Reason
from ..logs import logger

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..engine import Engine
    from ..local.attach import Attached, AttachServer, Pending
    from .metrics import MetricsPort
    from .notify import Notifier

SLEEP_AT_MOST_MS: Final = 20
SPIN_TURNS: Final = 2_000
LINKS_NS: Final = 1_000_000  # how often links are looked at when nothing but clients' bells ring (budgets, the control plane)
RARE_NS: Final = 10_000_000  # how often what is no hot path is looked at: new clients, metrics, the service manager


class Port(Protocol):
    """What the loop needs of the client's half: `TargetPort` and `DraftPort`."""

    attached: Attached | None

    def poll(self, now_ns: int) -> int:
        """Takes records; returns how many."""

    def tell(self, now_ns: int) -> None:
        """Gives the client what happened."""

    def detach(self, reason: Reason) -> None:
        """The client is gone."""

    @property
    def busy(self) -> bool:
        """Whether a drain must wait."""

    def drain(self, deadline_ms: int, now_ns: int) -> None:
        """Takes on nothing new from now on."""


class Loop:
    """Runs until told to stop. `lone`: what a client asks for concerns no other link than the one it is flushed to. `sides` are
    the engines with the function that serves each once (link, watchdog, forming)."""

    def __init__(
        self,
        port: Port,
        engines: list[tuple[Engine, Callable[[], int]]],
        server: AttachServer,
        welcome: Callable[[Pending, int], None],
        idle: str,
        drain_s: float,
        metrics: MetricsPort | None = None,
        notifier: Notifier | None = None,
        lone: bool = False,
    ) -> None:
        self.port = port
        self.engines = engines
        self.server = server
        self.idle = idle
        self.drain_s = drain_s
        self.turns = 0
        self.sleeps = 0
        self.last_turn_ns = monotonic_ns()
        self.on_reload: Callable[[], None] = lambda: None
        self.on_rare: Callable[[int], None] = lambda _now_ns: None
        self._welcome = welcome
        self._metrics = metrics
        self._notifier = notifier
        self._log = logger()
        self._poller = select.poll()
        self._watched_state: list[object] = []
        self._rare_fds: set[int] = set()
        self._rare_ns = 0
        self._records_wait = True
        self._bell_alone = False
        self._links_ns = 0
        self._lone = lone
        self._asked: set[int] = set()
        self._drain_until_ns = 0
        self._stop = False

    # ---- signals ------------------------------------------------------------------------------------------------

    def take_signals(self) -> None:
        """SIGTERM and SIGINT drain (twice: stop at once), SIGHUP reloads. For the main thread."""
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._signalled)

    def _signalled(self, number: int, _frame: object) -> None:
        if number in self._asked and number != signal.SIGHUP:
            self._stop = True
        self._asked.add(number)
        self._rare_ns = 0

    def stop(self) -> None:
        """Drains and then ends `run`, as SIGTERM does."""
        self._signalled(signal.SIGTERM, None)

    # ---- the loop -----------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Until SIGTERM and the end of its drain. Returns whether the drain ended by itself (False: it was cut short)."""
        if self._notifier is not None:
            self._notifier.ready()
        spin_turns = {"spin": -1, "spin-then-block": SPIN_TURNS}.get(self.idle, 0)
        idle_turns = spin_turns  # a daemon that nothing happens to sleeps through: only what moved is worth spinning after
        while not self._stop:
            moved = self.turn()
            if spin_turns:
                idle_turns = 0 if moved else idle_turns + 1
                if spin_turns < 0 or idle_turns < spin_turns:
                    continue
            self._sleep()  # which ends at once when something came meanwhile: no idle turn to find that out
        return not self.port.busy

    def turn(self) -> int:
        """One pass over everything without sleeping. Returns how much it moved: records and bytes."""
        now_ns = self.last_turn_ns = monotonic_ns()
        self.turns += 1
        # A client that wrote while we slept has rung; one that writes now is seen before the next sleep.
        moved = self.port.poll(now_ns) if self._records_wait else 0
        self._records_wait = True
        # What a client asked for was flushed with its records: its bell alone is no reason to look at every link.
        if not self._bell_alone or now_ns >= self._links_ns:
            self._links_ns = now_ns + LINKS_NS
            for _engine, serve in self.engines:
                moved += serve()
        self._bell_alone = False
        self.port.tell(now_ns)
        if now_ns >= self._rare_ns:
            self._rare_ns = now_ns + RARE_NS
            self._rare(now_ns)
        return moved

    def _rare(self, now_ns: int) -> None:
        attached = self.port.attached
        if attached is not None and attached.gone():
            # What it wrote before it went is taken first: a commit must not be lost with the process that made it.
            self.port.poll(now_ns)
            self.port.detach(Reason.PEER_LOST)
        for pending in self.server.poll(now_ns):
            self._welcome(pending, now_ns)
        if self._metrics is not None:
            self._metrics.poll(now_ns)
        if self._notifier is not None:
            self._notifier.beat(now_ns)
        self.on_rare(now_ns)
        if signal.SIGHUP in self._asked:
            self._asked.discard(signal.SIGHUP)
            self.on_reload()
        if self._asked - {signal.SIGHUP} and not self._drain_until_ns:  # one more SIGHUP may have come meanwhile
            self._begin_drain(now_ns)
        if self._drain_until_ns and (now_ns >= self._drain_until_ns or not self.port.busy):
            self._stop = True

    def _begin_drain(self, now_ns: int) -> None:
        self._drain_until_ns = now_ns + int(self.drain_s * 1e9)
        self._log.info("draining", at_most_s=self.drain_s, busy=self.port.busy)
        if self._notifier is not None:
            self._notifier.stopping()
        self.port.drain(int(self.drain_s * 1000), now_ns)

    # ---- sleeping -----------------------------------------------------------------------------------------------

    def _sleep(self) -> None:
        attached = self.port.attached
        channel = attached.channel if attached is not None else None
        events: list[tuple[int, int]] = []
        slept = False
        if (channel is None or channel.prepare_sleep()) and self._watch(attached):
            slept = True
            try:
                events = self._poller.poll(SLEEP_AT_MOST_MS)
            except InterruptedError:  # a signal whose handler raised nothing: the turn looks at what it asked for
                self._rare_ns = 0
            self.sleeps += 1
        ready = {descriptor for descriptor, _events in events}
        if channel is not None:
            rung = channel.fileno() in ready
            channel.after_sleep(rung)
            self._records_wait = rung or not slept
            self._bell_alone = self._lone and rung and len(ready) == 1
        for engine, _serve in self.engines:
            engine.woke(ready)
        if not self._rare_fds.isdisjoint(ready):
            self._rare_ns = 0

    def _watch(self, attached: Attached | None) -> bool:
        """Brings the list of what can wake us up to date; most often nothing changed. False: an engine has something to do.
        (poll, not epoll: a descriptor that was closed and came back as another would be missing from a kernel's list.)"""
        state: list[object] = [attached.serial if attached is not None else 0]
        busy = False
        for engine, _serve in self.engines:  # each must be asked, since each is told that the sleep is over
            how = engine.rest()
            busy = busy or how is None
            state.append(how)
        if busy or state == self._watched_state:
            return not busy
        self._watched_state = state
        rare = {self.server.fileno()}
        wanted: dict[int, int] = {}
        if attached is not None:
            wanted[attached.channel.fileno()] = select.POLLIN
            rare.add(attached.sock.fileno())
        for engine, _serve in self.engines:
            wanted.update(engine.watch())
        if self._metrics is not None:
            rare.add(self._metrics.fileno())
        wanted.update(dict.fromkeys(rare, select.POLLIN))
        self._poller = select.poll()
        for descriptor, events in wanted.items():
            self._poller.register(descriptor, events)
        self._rare_fds = rare
        return True
