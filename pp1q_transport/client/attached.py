"""What both attached sides share: the way to a daemon, the waiting for it, its loss and its return.

Between a process and the Unix socket of its daemon (`local.attach`). Knows neither proposals nor rows. A daemon that dies costs
what was under way; it is found again, with jittered backoff, by whatever waits or steps next. SPEC sections 2 and 9.
"""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Final, Self

from .._native.kernels import monotonic_ns
from .._native.net import POLLIN, wait_io
from ..counters import Counters
from ..errors import ConfigError, LocalMisuse, PeerFault, Reason
from ..local import messages as m
from ..local.attach import Attachment, Role, attach
from ..logs import logger

if TYPE_CHECKING:
    from collections.abc import Set
    from pathlib import Path

BACKOFF_FIRST_NS: Final = 20_000_000
BACKOFF_MOST_NS: Final = 1_000_000_000  # after a refusal
ABSENT_MOST_NS: Final = 100_000_000  # while nobody listens: a look costs some microseconds of this host and disturbs nobody
LOOK_AT_MOST_NS: Final = 50_000_000
END_LOOK_NS: Final = 1_000_000  # polls between two looks at the socket cost no system call
SEND_AT_MOST_NS: Final = 2_000_000_000
FULL_PAUSE_NS: Final = 200_000
ATTACH_TIMEOUT_S: Final = 2.0
FIRST_ATTACH_TIMEOUT_S: Final = 10.0  # nothing is lost by patience yet, and giving up ends the caller


class AttachedSide(ABC):
    """One process's end of its daemon. A context manager; for one thread."""

    role: Role
    hears: int  # whose records: a direction of `messages`

    def __init__(self, path: str | Path, rank: int, idle: str, backoff_seed: int | None) -> None:
        if idle not in ("spin", "spin-then-block", "block"):
            raise ConfigError(f"idle must be one of spin, spin-then-block, block, not {idle!r}")
        self.path = str(path)
        self.rank = rank
        self.idle = idle
        self.counters = Counters()
        self.draining = False
        self.log = logger(role=type(self).__name__.lower(), daemon=self.path)
        self._random = random.Random(backoff_seed)
        self._backoff_ns = BACKOFF_FIRST_NS
        self._retry_ns = 0
        self._look_ns = 0  # when `poll` next asks whether the daemon is there still
        self._asked_for = 0  # the last ping, and the last one that was answered
        self._answered = 0
        self._closed = False
        self._attachment: Attachment | None = None
        self._join(FIRST_ATTACH_TIMEOUT_S)  # the first time a daemon that is not there is the caller's to hear of

    # ---- what a side adds ---------------------------------------------------------------------------------------

    @property
    @abstractmethod
    def up(self) -> bool:
        """Whether proposals can flow: the daemon is there and has what it needs."""

    def may_wait(self) -> None:  # noqa: B027 - only targets have epochs
        """Raises `LocalMisuse` when waiting for the peer would be in vain: the caller has left something undone."""

    def settle_epoch(self) -> None:  # noqa: B027 - only targets have epochs
        """Does what the group's epoch wants of this process, if there is one."""

    @abstractmethod
    def _joined(self, attachment: Attachment) -> None:
        """A daemon was found: maps are made, state of an earlier one is void."""

    @abstractmethod
    def _parted(self) -> None:
        """The daemon is gone, and with it everything under way."""

    @abstractmethod
    def _record(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        """One record of the daemon."""

    # ---- the daemon's coming and going --------------------------------------------------------------------------

    @property
    def closed(self) -> bool:
        """Whether this side has ended for good."""
        return self._closed

    @property
    def attached(self) -> bool:
        """Whether a daemon is there."""
        return self._attachment is not None

    def _join(self, timeout_s: float = ATTACH_TIMEOUT_S) -> None:
        attachment = attach(self.path, self.role, self.rank, timeout_s)
        try:
            self._joined(attachment)
        except (ConfigError, PeerFault):
            attachment.close()
            raise
        self._attachment = attachment
        self.draining = False
        self._backoff_ns = BACKOFF_FIRST_NS
        self.counters.add("attached")
        self._after_join()

    @abstractmethod
    def _after_join(self) -> None:
        """Says what a daemon must hear first."""

    def _lose(self, reason: Reason) -> None:
        attachment, self._attachment = self._attachment, None
        if attachment is None:
            return
        attachment.close()
        self.counters.add("daemon_lost")
        self.counters.refuse(reason)
        self.log.warning("daemon_lost", reason=reason.value)
        self._back_off()
        self._parted()

    def _back_off(self, most_ns: int = ABSENT_MOST_NS) -> None:
        self._retry_ns = monotonic_ns() + int(self._backoff_ns * self._random.uniform(0.5, 1.5))
        self._backoff_ns = min(self._backoff_ns * 2, most_ns)

    def _rejoin(self) -> None:
        """Looks for the daemon if it is time to. Its absence is nothing to raise: it may be restarting."""
        if self._closed or monotonic_ns() < self._retry_ns:
            return
        try:
            self._join()
        except (ConfigError, PeerFault) as fault:
            self.log.debug("no_daemon", detail=str(fault))
            self._back_off(ABSENT_MOST_NS if isinstance(fault, ConfigError) else BACKOFF_MOST_NS)

    # ---- records ------------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """Takes what the daemon has to say, without waiting; notices when it is gone. Returns how many records that were."""
        taken = self._take()
        if taken == 0 and monotonic_ns() >= self._look_ns:
            taken = self._look_for_end()
        return taken

    def _take(self) -> int:
        """`poll` without the look at the socket, for who looks anyway or is about to sleep on it."""
        if self._attachment is None:
            self._rejoin()
        taken = 0
        try:
            while self._attachment is not None and (record := self._attachment.channel.receive()) is not None:
                taken += 1
                kind, view = record
                fields, payload = m.unpack(kind, view, self.hears)
                if kind == m.DRAINING:
                    self.draining = True
                elif kind == m.PONG:
                    self._answered = fields[0]
                elif kind != m.BYE:
                    self._record(kind, fields, payload)
        except PeerFault as fault:
            self.log.warning("daemon_broke_rules", reason=fault.reason.value, detail=fault.detail)
            self._lose(fault.reason)
        return taken

    def _look_for_end(self) -> int:
        """Leaves a daemon that is gone. Returns how many records it had left."""
        attachment = self._attachment
        self._look_ns = monotonic_ns() + END_LOOK_NS
        if attachment is None or not attachment.gone():
            return 0
        taken = self._take()  # what it said before it went
        if self._attachment is attachment:
            self._lose(Reason.PEER_LOST)
        return taken

    def wait(self, timeout_ns: int = LOOK_AT_MOST_NS) -> None:
        """Idles until the daemon may have something to say, for at most `timeout_ns`; notices when it is gone."""
        attachment = self._attachment
        if attachment is None:
            pause_ns = min(timeout_ns, max(0, self._retry_ns - monotonic_ns()), LOOK_AT_MOST_NS)
            _sleep(pause_ns)
            return
        if timeout_ns > 0:
            attachment.channel.wait(self.idle, min(timeout_ns, LOOK_AT_MOST_NS), attachment.sock.fileno())
        if self._take() == 0 and self._attachment is attachment:
            self._look_for_end()

    def serve(self, until_ns: int) -> None:
        """One pass: what the daemon said, or a wait for it until `until_ns` (monotonic ns) at most."""
        if self._take() == 0:
            self.wait(until_ns - monotonic_ns())

    def send(self, kind: int, *fields: int | float, payload: bytes = b"") -> bool:
        """One record to the daemon. False when it is gone; a daemon that takes nothing any more counts as gone."""
        attachment = self._attachment
        if attachment is None:
            return False
        channel, fixed = attachment.channel, m.pack(kind, *fields)
        if channel.send(kind, fixed, payload):
            return True
        stop_ns = monotonic_ns() + SEND_AT_MOST_NS
        while monotonic_ns() < stop_ns and not attachment.gone():  # many long requests are opened anew at once
            channel.flush_bell()
            _sleep(FULL_PAUSE_NS)
            if channel.send(kind, fixed, payload):
                return True
        self._lose(Reason.PEER_LOST if attachment.gone() else Reason.OVERLOAD)
        return False

    def ring(self) -> None:
        """Wakes the daemon, if it sleeps, for what was sent."""
        if self._attachment is not None:
            self._attachment.channel.flush_bell()

    def ping(self, timeout_s: float = 1.0) -> int:
        """Asks the daemon for an empty answer: the time there and back, in ns. Raises `PeerFault(timeout)` when none comes."""
        started_ns = monotonic_ns()
        stop_ns = started_ns + int(timeout_s * 1e9)
        self._asked_for += 1
        self.send(m.PING, self._asked_for)
        self.ring()
        while self._answered != self._asked_for:
            if monotonic_ns() >= stop_ns or self._attachment is None:
                raise PeerFault(Reason.TIMEOUT, f"the daemon at {self.path} gives no answer within {timeout_s:g} s")
            self.serve(stop_ns)
        return monotonic_ns() - started_ns

    def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Waits until proposals can flow (in a group: until its ranks agree, for that does not hang on a leader); raises
        `PeerFault(timeout)` when they can't in time."""
        self.may_wait()
        self.serve(0)  # a loop that does nothing but this must still hear that its daemon, a session or an epoch is over
        deadline_ns = monotonic_ns() + int(timeout_s * 1e9)
        while not self.up:
            if self._closed:
                raise LocalMisuse("this side is closed")
            if monotonic_ns() >= deadline_ns:
                raise PeerFault(Reason.TIMEOUT, f"no peer within {timeout_s:g} s through the daemon at {self.path}")
            self.serve(min(deadline_ns, monotonic_ns() + LOOK_AT_MOST_NS))
            self.settle_epoch()

    # ---- for an owner who sleeps by himself (`pump`) ------------------------------------------------------------

    @property
    def flushed(self) -> bool:
        """Whether nothing waits to be sent: a record that `send` took is the daemon's already."""
        return True

    def before_sleep(self) -> tuple[object, ...] | None:
        """Prepares for the owner's own sleep. None: do not sleep, poll; otherwise what `descriptors_to_watch` depends on."""
        attachment = self._attachment
        if attachment is None:
            return ()
        try:
            return (attachment,) if attachment.channel.prepare_sleep() else None
        except PeerFault as fault:  # broken since the last poll
            self._lose(fault.reason)
            return None

    def descriptors_to_watch(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) of everything that may wake this side."""
        attachment = self._attachment
        return [] if attachment is None else [(attachment.channel.fileno(), POLLIN), (attachment.sock.fileno(), POLLIN)]

    def after_sleep(self, ready: Set[int]) -> None:
        """Ends the sleep; `ready` are the descriptors that ended it. Notices when the daemon is gone. Then poll."""
        attachment = self._attachment
        if attachment is None:
            return
        attachment.channel.after_sleep(attachment.channel.fileno() in ready)
        if attachment.sock.fileno() in ready:
            self._look_for_end()

    def look_within_ns(self) -> int:
        """How long the owner may sleep at most, in ns."""
        if self._attachment is not None:
            return LOOK_AT_MOST_NS
        return max(0, min(LOOK_AT_MOST_NS, self._retry_ns - monotonic_ns()))

    def close(self) -> None:
        """Leaves the daemon. Safe to repeat."""
        self._closed = True
        if self._attachment is not None:
            self.send(m.BYE, Reason.CANCELLED.code, 0)
            self.ring()
        attachment, self._attachment = self._attachment, None
        if attachment is not None:
            attachment.close()
            self._parted()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _sleep(pause_ns: int) -> None:
    if pause_ns > 0:
        wait_io(-1, 0, -1, 0, pause_ns)
