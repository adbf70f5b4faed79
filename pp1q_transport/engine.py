"""The engine: the one loop that joins a session, a link and a clock, and has what was lost formed anew.

Between the client API, which drives it from the caller's own thread, and the sans-IO machines below, which decide everything.
It starts no threads. When the link goes, the session ends; a new one is formed by HELLO, with jittered backoff. SPEC 2, 4.
"""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

from ._native.kernels import monotonic_ns
from ._native.net import POLLIN
from .counters import Counters
from .errors import ConfigError, LocalMisuse, PeerFault, Reason
from .forming import Formed, Forming, Forms, Said
from .links.kinds import KINDS
from .logs import named_logger
from .session import hello as hello_fields
from .session.agreed import terms_ahead, terms_of
from .session.group import MAX_RANKS
from .session.machine import SessionMachine
from .session.negotiate import Agreement, Role
from .session.shards import GROUP_MODES, REPLICATE
from .session.terms import SessionTerms

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Set

    from .capture.recorder import Capture, Tap
    from .keys import KeyConfig
    from .links.proving import Joined
    from .links.rdma_config import RdmaConfig
    from .links.stream import StreamLink
    from .session.hello import Hello
    from .session.outbox import Outbox

CONTROL_EVERY_NS: Final = 20_000_000
SPIN_TRIES: Final = 2_000
BLOCK_AT_MOST_NS: Final = 50_000_000
LINGER_NS: Final = 50_000_000
PUMPS_AFTER_THE_END: Final = 256
INBOX_AT_MOST: Final = 256  # control messages nobody has asked for yet; more are dropped and counted
# News that come once a proposal: level debug. Whoever runs an engine counts them by reason (`Counters`).
ONE_A_PROPOSAL: Final = frozenset({"discarded", "reset", "refused", "step_refused"})
_BUSY: Final = frozenset({0})
_FREE: Final[frozenset[int]] = frozenset()


# What this build can do of what HELLO can state: two peers may agree on more, but neither would keep its word.
IMPLEMENTED: Final[dict[str, object]] = {
    "semantic_id": hello_fields.SEMANTIC_ID,
    "verifier_id": hello_fields.VERIFIER_ID,
    "rng_abi": hello_fields.RNG_ABI,
    "precision": "fp32-le",
    "digest": "xxh3-64",
}


class Idle(str, Enum):
    """What a waiting engine does: burn its core, or sleep in the kernel."""

    SPIN = "spin"
    BLOCK = "block"


class Phase(str, Enum):
    """Where the engine stands between no peer and a running session."""

    DOWN = "down"
    UP = "up"
    CLOSED = "closed"


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine reaches its peer. Exactly one of `listen` and `connect` names the control endpoint."""

    hello: Hello
    listen: str | None = None
    connect: str | None = None
    keys: KeyConfig | None = None
    idle: Idle = Idle.BLOCK
    takes_options: bool = False  # a listener that adopts the proposer's sizes within its own maxima
    wait_for_peer: bool = True  # after a loss: wait for a new session, or raise `PeerFault`
    backoff_seed: int | None = None
    stubborn: bool = False  # a daemon: what trying again at once can't mend is logged and tried again much later, never raised
    wrap_outbox: Callable[[Outbox], OutboxFilter] | None = None  # a fault injector between session and link
    name: str = ""  # of the peer, in the log
    rdma: RdmaConfig | None = None  # of link "rdma": its settings, the usual ones when None
    capture: Capture | None = None  # where the frames of every session are written to

    def __post_init__(self) -> None:
        for name, value in IMPLEMENTED.items():
            if getattr(self.hello, name) != value:
                raise ConfigError(f"{name} {getattr(self.hello, name)!r} is not part of this build, which has {value!r}")
        if len(self.hello.link_kinds) != 1 or self.link not in KINDS:
            # One kind, which both sides state: nothing falls back to another.
            raise ConfigError(f"link_kinds {self.hello.link_kinds!r}: one engine has one kind of link, {' or '.join(KINDS)}")
        if self.rdma is not None and self.link != "rdma":
            raise ConfigError(f"rdma settings are of no use to a {self.link} link")
        _judge_group(self.hello)

    @property
    def link(self) -> str:
        """The kind of link, as HELLO states it: "tcp", "shm" or "rdma"."""
        return self.hello.link_kinds[0]


def _judge_group(hello: Hello) -> None:
    """The place in a rank group that this build can take: rank 0 faces the leader, every other rank has its link to rank 0."""
    if hello.group_size > MAX_RANKS:
        raise ConfigError(f"group_size {hello.group_size} is not part of this build, which has groups of 1..{MAX_RANKS}")
    on_a_group_link = hello.role.seats_ranks or hello.role.sits_with_rank_0
    if on_a_group_link and hello.group_size < 2:
        raise ConfigError(f"a {hello.role} needs a group_size of 2..{MAX_RANKS}: a group of one has no group link")
    if hello.role.sits_with_rank_0 and not 1 <= hello.rank < hello.group_size:
        raise ConfigError(f"rank {hello.rank} of a {hello.role} is outside 1..{hello.group_size - 1}")
    if hello.group_mode not in GROUP_MODES:
        raise ConfigError(f"group_mode {hello.group_mode!r} is not part of this build, which has {', '.join(GROUP_MODES)}")
    own_links = hello.group_mode != REPLICATE and hello.role in (Role.LEADER, Role.RECEIVER)
    if not hello.role.sits_with_rank_0 and hello.rank and not (own_links and hello.rank < hello.group_size):
        raise ConfigError(f"a {hello.role} is rank 0, not {hello.rank}: the other ranks are members")
    try:
        hello_fields.held_range(hello)
    except LocalMisuse as error:
        raise ConfigError(str(error)) from None


class OutboxFilter(Protocol):
    """Something that takes frames out of a session's outbox and puts bytes into its own `outbox` for the link."""

    outbox: Outbox

    def pump(self, now_ns: int) -> int | None:
        """Moves what may move now; returns the time in ns at which more will be due, or None."""


def new_boot_nonce() -> int:
    """A random non-zero u64 that names this process life."""
    return int.from_bytes(os.urandom(8), "little") or 1


class Engine:
    """One side of one session at a time. `make_session` builds the role's state machine from the terms of a new session;
    `on_up` and `on_down` let the owner react. All methods are for one thread; but `close` may come from another one (or from
    the garbage collector there): it waits until that thread's `poll` or `wait` is over."""

    def __init__(
        self,
        config: EngineConfig,
        make_session: Callable[[SessionTerms], SessionMachine],
        on_up: Callable[[], None],
        on_down: Callable[[Reason], None],
        counters: Counters | None = None,
        forming: Forms | None = None,
    ) -> None:
        self.config = config
        self.counters = counters or Counters()
        self.phase = Phase.DOWN
        self.changed_ns = monotonic_ns()  # when it came up or went down last
        self.formed = 0
        self.ended = 0
        self.session: SessionMachine | None = None
        self.link: StreamLink | None = None
        self.agreement: Agreement | None = None
        self.inbox: list[tuple[str, object]] = []  # control messages for the owner: (kind, body)
        self.parted = False  # the last session ended with the peer's goodbye
        self.log = named_logger(config.hello.role.value, config.name)
        self._make_session = make_session
        self._on_up = on_up
        self._on_down = on_down
        self._tap: Tap | None = None
        self._filter: OutboxFilter | None = None
        self._filter_due_ns: int | None = None
        self._came_in_flush = False  # frames that the owner has not looked at since
        self._forming_ns = 0
        self._forming_fds: list[int] = []
        self._settling = False  # the owner hears of a session's end: what it calls from there must not form the next one
        self._ending = False  # somebody wants to close: no further poll or wait begins
        self._inside = threading.RLock()
        self._pid = os.getpid()
        self._wait_for_peer = config.wait_for_peer
        self._forming: Forms = forming or Forming(
            config.hello,
            config.listen,
            config.connect,
            config.keys,
            self.counters,
            config.takes_options,
            config.wait_for_peer,
            config.backoff_seed,
            config.stubborn,
            config.rdma,
            name=config.name,
        )

    @property
    def endpoint(self) -> str:
        """The control endpoint in use; a listener's actual port where port 0 was asked for."""
        return self._forming.endpoint

    @property
    def closed(self) -> bool:
        """Whether the engine has ended for good."""
        return self.phase is Phase.CLOSED

    # ---- the loop -----------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """One pass without sleeping: link, budget, control. Returns how many bytes the link moved."""
        if self._ending:
            return 0
        with self._inside:
            return self._poll()

    def _poll(self) -> int:
        self._came_in_flush = False
        if self.closed or self._settling:
            return 0
        now_ns = monotonic_ns()
        moved = 0
        if self.link is not None:
            moved = self._pump(now_ns)
        if now_ns >= self._forming_ns and not self.closed:
            self._forming_ns = now_ns + (CONTROL_EVERY_NS if self.phase is Phase.UP else 1_000_000)
            self._poll_forming(now_ns)
        return moved

    def wait(self, timeout_ns: int = BLOCK_AT_MOST_NS) -> None:
        """Idles until something may have happened, by the configured strategy, for at most `timeout_ns`."""
        if self._ending:
            return
        with self._inside:
            self._wait(timeout_ns)

    def _wait(self, timeout_ns: int) -> None:
        if self.phase is Phase.CLOSED:
            return
        if self.link is None:
            self._forming.wait(min(timeout_ns, 5_000_000))
            self._forming_ns = 0
            return
        if self.config.idle is Idle.SPIN:
            if self._filter is None:
                self._spin(self.link)
            return
        if self._filter_due_ns is not None:
            timeout_ns = max(0, min(timeout_ns, self._filter_due_ns - monotonic_ns()))
        self.link.wait(min(timeout_ns, CONTROL_EVERY_NS), -1)

    def _spin(self, link: StreamLink) -> None:
        try:
            moved = link.pump_until(SPIN_TRIES)
        except PeerFault as fault:
            self._down(fault.reason)
            return
        if moved < 0:
            self._down(Reason.from_code(-moved))

    def watch(self) -> list[tuple[int, int]]:
        """What an owner that waits for several things at once must watch: (descriptor, poll events). Ask again before each
        sleep, and call `woke` after it."""
        self._forming_fds = self._forming.descriptors()
        watched = [(fd, POLLIN) for fd in self._forming_fds]
        if self.link is not None:
            watched.extend(self.link.watch())
        return watched

    def rest(self) -> tuple[object, ...] | None:
        """Prepares for the owner's sleep, which `woke` must follow. None: there is something to do, don't sleep; else what
        `watch` depends on: while this stays equal, so does its answer."""
        if self._came_in_flush:
            return None
        link = self.link
        if link is None:
            return tuple(self._forming.descriptors())
        how = link.rest()
        return None if how < 0 else (link, how, self._forming.descriptors_changed)

    def woke(self, ready: Set[int]) -> None:
        """The owner's sleep is over, by these descriptors: what the control plane has is looked at in the next `poll`."""
        link = self.link
        if link is not None:
            link.rise(link.fd in ready)
        if link is None or not ready.isdisjoint(self._forming_fds):
            self._forming_ns = 0

    def flush(self) -> None:
        """Sends what is queued, as far as the kernel takes it now. Frames that came are taken in as well, so that `poll` must
        follow before the owner sleeps (`rest`)."""
        with self._inside:
            link = self.link
            if link is not None:
                before = link.bytes_in
                self._pump(monotonic_ns())
                self._came_in_flush |= link.bytes_in != before or link is not self.link

    def _pump(self, now_ns: int) -> int:
        link, session = self.link, self.session
        assert link is not None
        assert session is not None
        if self._filter is not None:
            self._filter_due_ns = self._filter.pump(now_ns)
        try:
            moved = link.pump(now_ns)
        except PeerFault as fault:
            self._down(fault.reason)
            return 0
        if moved < 0:
            self._down(Reason.from_code(-moved))
            return 0
        if session.broken:
            self._down(Reason.from_code(session.broken))
            return moved
        if session.news:
            self._report_news(session)
        return moved

    def _report_news(self, session: SessionMachine) -> None:
        for event, reason, slot, generation in session.news:
            log = self.log.debug if event in ONE_A_PROPOSAL else self.log.info
            log(event, reason=reason.value, slot=slot, generation=generation)
        session.news.clear()

    # ---- forming ------------------------------------------------------------------------------------------------

    def _poll_forming(self, now_ns: int) -> None:
        try:
            events = self._forming.poll(now_ns, _BUSY if self.phase is Phase.UP else _FREE)
        except PeerFault:
            # The control plane is over, and with it the session: its slots are settled before anybody hears of it.
            self._pump_rest()
            self._down(Reason.PEER_LOST)
            if self.closed:
                return  # the last the peer said was goodbye
            raise
        for event in events:
            if isinstance(event, Formed):
                self._up(event.joined, event.agreement)
            elif isinstance(event, Said):
                if len(self.inbox) < INBOX_AT_MOST:
                    self.inbox.append((event.kind, event.body))
                else:
                    self.counters.add("control_dropped")
                    self.counters.refuse(Reason.OVERLOAD)
            else:
                self._pump_rest()
                self._down(Reason.PEER_LOST, goodbye=event.goodbye)

    def _pump_rest(self) -> None:
        """Takes in what the peer sent before it left: all of it, or as much as an honest one can have on the way."""
        for _ in range(PUMPS_AFTER_THE_END):
            if self.link is None or self._pump(monotonic_ns()) <= 0:
                return

    # ---- sessions -----------------------------------------------------------------------------------------------

    def _up(self, joined: Joined, agreement: Agreement) -> None:
        self.agreement = agreement
        terms = terms_of(agreement)
        try:
            self.session = self._make_session(terms)
        except PeerFault as fault:  # a session of other sizes, while slots of the last one are still read
            joined.close()
            self.counters.refuse(fault.reason)
            self.log.warning("no_session", reason=fault.reason.value, detail=fault.detail)
            self._forming.back_off(monotonic_ns())
            return
        if self.config.capture is not None:
            self._tap = self.config.capture.tap(agreement, self.session, self.counters)
        outbox = self.session.outbox
        if self.config.wrap_outbox is not None:
            self._filter = self.config.wrap_outbox(outbox)
            outbox = self._filter.outbox
        if self._tap is not None:
            outbox = self._tap.outgoing(self._filter or self.session)
        self.link = KINDS[self.config.link].link(joined, self.session, outbox)
        if self._tap is not None:
            self._tap.incoming(self.link)
        self.phase = Phase.UP
        self.changed_ns = monotonic_ns()
        self.parted = False
        self._forming.settled()
        self.formed += 1
        self.counters.add("sessions")
        self.log.info("session_up", session=terms.session, **self.link.describe())
        try:
            self._on_up()
        except PeerFault as fault:
            self._down(fault.reason)

    def _down(self, reason: Reason, goodbye: bool = False) -> None:
        """The session ends: its link is closed (so nothing can land any more) before its slots are settled."""
        link, session = self.link, self.session
        if link is None or session is None:
            return
        if reason is not Reason.PEER_LOST:
            self._tell(link, session, reason)
            if goodbye:
                link.linger(LINGER_NS)
        elif session.peer_status == Reason.CANCELLED.code:
            goodbye = True
        self.parted = goodbye
        tap, self._tap = self._tap, None
        if tap is not None:
            tap.stop()
        link.close()
        self.link = None
        self._filter = None
        self._filter_due_ns = None
        self.phase = Phase.DOWN
        self.changed_ns = monotonic_ns()
        self.counters.refuse(reason)
        self.ended += 1
        self.counters.add("sessions_ended")
        log = self.log.info if goodbye else self.log.warning
        said = Reason.from_code(session.peer_status).value if session.peer_status else None
        log("session_down", reason=reason.value, goodbye=goodbye, peer_said=said, error_number=link.error_number)
        self._settling = True
        try:
            self._on_down(reason)
            self._report_news(session)
        finally:  # a callback of the owner's may raise: the next session is formed all the same
            if tap is not None:
                tap.ended(reason, goodbye)
            self._settling = False
            self.session = None
            self._forming.back_off(monotonic_ns())
        if not self._wait_for_peer:
            if not goodbye:
                raise PeerFault(reason, "the link is gone")
            self.close()

    def _tell(self, link: StreamLink, session: SessionMachine, reason: Reason) -> None:
        """Best effort: a STATUS names the reason to the peer before the link closes."""
        frame = session.farewell(reason)
        if link.outbox.empty() and not link.say_last(frame):
            self.log.debug("status_not_sent", reason=reason.value)

    def fail(self, reason: Reason) -> None:
        """Ends the session because this side can't go on with it (a full outbox, a counter that ran out)."""
        with self._inside:
            self._down(reason)

    def end_session(self) -> None:
        """Ends the running session, if there is one, and stays ready for another."""
        with self._inside:
            if self.link is not None:
                self._forming.goodbye()
                self._down(Reason.CANCELLED, goodbye=True)

    def send_control(self, kind: str, body: Mapping[str, object]) -> None:
        """Sends a `report` or `options` message to the session's peer."""
        with self._inside:
            self._forming.say(kind, body)

    def close(self) -> None:
        """Orderly end: goodbye, link closed, ports released. Safe to repeat, and from another thread than the one that polls."""
        self._ending = True
        if os.getpid() != self._pid:
            self.phase = Phase.CLOSED  # a forked child: the link and ZeroMQ's sockets are the parent's, and stay as they are
            return
        with self._inside:
            self._close()

    def _close(self) -> None:
        if self.phase is Phase.CLOSED:
            return
        self._wait_for_peer = True  # a peer that is lost from here on is nobody's fault
        try:
            for _ in range(1000):
                if self.link is None or self.link.outbox.empty() or self._pump(monotonic_ns()) < 0 or self.link is None:
                    break
                self.link.wait(1_000_000, -1)
            if self.link is not None:
                self._forming.goodbye()
                self._down(Reason.CANCELLED, goodbye=True)
        finally:
            self.phase = Phase.CLOSED
            self._forming.close()


__all__ = ["Engine", "EngineConfig", "Idle", "OutboxFilter", "Phase", "new_boot_nonce", "terms_ahead", "terms_of"]
