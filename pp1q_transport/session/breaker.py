"""The circuit breaker: whether a STEP to a peer is worth sending, judged from earlier proposals alone.

Between a daemon that is asked for STEPs and the receiver session that would send them. It is asked before anything is drawn,
so that no refusal depends on a drawn token (SPEC 4, selection bias). Sends nothing, sleeps nowhere and reads no clock.

States and events are `TRANSITIONS`; docs/breaker.md shows them. Every STEP that is let through gets the number of the breaker's
turn, which its outcome states again: what was sent before the breaker opened says nothing about the probe.
"""

from __future__ import annotations

from collections import deque
from enum import Enum
from typing import Final

from ..errors import LocalMisuse, Reason
from ..rng import philox4x32

# The caller withdrew it, it was never sent, or its request came back behind keys it had spent: that says nothing about the peer.
NOBODYS_FAULT: Final = frozenset({Reason.CANCELLED, Reason.CIRCUIT_OPEN, Reason.KEY_REUSE})
# A lost link is one event however many proposals it took along, and its own backoff paces the next one. Only a probe's counts.
LINK_LOST: Final = frozenset({Reason.PEER_LOST, Reason.LINK_ERROR})

_MOST_DOUBLINGS: Final = 62


class BreakerState(str, Enum):
    """What the breaker does with a STEP: let it through, refuse it, or wait for what becomes of the one probe."""

    CLOSED = "closed"
    OPEN = "open"
    PROBING = "probing"

    def __str__(self) -> str:
        return self.value


class BreakerEvent(str, Enum):
    """What a breaker is told, or finds on its clock."""

    READY = "ready"  # a proposal became ready
    DISCARDED = "discarded"  # one was discarded, the limit is not reached
    LIMIT = "limit"  # one was discarded, and that many in a row are enough
    WITHDRAWN = "withdrawn"  # the probe ended by nobody's fault: it has shown nothing
    PROBE_DUE = "probe due"  # a STEP is asked for and the wait is over

    def __str__(self) -> str:
        return self.value


_S, _E = BreakerState, BreakerEvent
TRANSITIONS: Final[dict[tuple[BreakerState, BreakerEvent], BreakerState]] = {
    (_S.CLOSED, _E.READY): _S.CLOSED,
    (_S.CLOSED, _E.DISCARDED): _S.CLOSED,
    (_S.CLOSED, _E.LIMIT): _S.OPEN,
    (_S.OPEN, _E.PROBE_DUE): _S.PROBING,
    (_S.PROBING, _E.READY): _S.CLOSED,
    (_S.PROBING, _E.DISCARDED): _S.OPEN,
    (_S.PROBING, _E.WITHDRAWN): _S.OPEN,
    (_S.PROBING, _E.PROBE_DUE): _S.PROBING,  # nothing was heard of the probe: it was never sent, or its caller died
}


class Breaker:
    """Opens after `discards` proposals in a row were discarded within `window_ns` (0: however long that took). Then one probe
    STEP passes after `probe_after_ns`, doubled by each failed probe up to `probe_most_ns` and shortened by up to half at random
    (`seed`, so that a fleet does not probe in step). Times are of one monotonic clock, in ns. Raises `LocalMisuse` for limits
    below 1. Not for several threads."""

    __slots__ = (
        "_discards", "_failed_probes", "_key", "_now_ns", "_probe_after_ns", "_probe_at_ns", "_probe_most_ns", "_times_ns",
        "_waits", "_window_ns", "opened", "refused", "state", "turn",
    )  # fmt: skip

    def __init__(self, discards: int, probe_after_ns: int, probe_most_ns: int, seed: int, window_ns: int = 0) -> None:
        if discards < 1 or probe_after_ns < 1 or probe_most_ns < probe_after_ns or window_ns < 0:
            raise LocalMisuse("a breaker needs discards >= 1 and 1 <= probe_after_ns <= probe_most_ns")
        self.state = BreakerState.CLOSED
        self.opened = 0  # how often it opened, failed probes not counted
        self.refused = 0
        self.turn = 1  # rises with every probe: the outcome of no earlier STEP matters any more
        self._discards = discards
        self._probe_after_ns = probe_after_ns
        self._probe_most_ns = probe_most_ns
        self._window_ns = window_ns
        self._key = (seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF)
        self._failed_probes = 0
        self._waits = 0
        self._now_ns = 0
        self._probe_at_ns = 0
        self._times_ns: deque[int] = deque(maxlen=discards)

    def may_step(self, now_ns: int) -> int:
        """Asked before each STEP. 0: do not send it (`Reason.CIRCUIT_OPEN`); else the turn to give to `ready` or `discarded`."""
        self._now_ns = max(self._now_ns, now_ns)
        if self.state is BreakerState.CLOSED:
            return self.turn
        if self._now_ns < self._probe_at_ns:
            self.refused += 1
            return 0
        self._go(BreakerEvent.PROBE_DUE)
        self.turn += 1
        self._probe_at_ns = self._now_ns + self._wait_ns()
        return self.turn

    def ready(self, turn: int = 0) -> None:
        """A proposal that was let through in `turn` (0: the present one) became ready."""
        if turn not in (0, self.turn) or self.state is BreakerState.OPEN:
            return
        self._times_ns.clear()
        self._failed_probes = 0
        self._go(BreakerEvent.READY)

    def discarded(self, reason: Reason, now_ns: int = 0, turn: int = 0) -> None:
        """A proposal that was let through in `turn` (0: the present one) was discarded at `now_ns` (0: the time that `may_step`
        was told last). Those of `NOBODYS_FAULT` never count, those of `LINK_LOST` only for a probe: a leader without a draft
        answers at once, and its draft must be found again as soon as it is back."""
        self._now_ns = max(self._now_ns, now_ns)
        if turn not in (0, self.turn) or self.state is BreakerState.OPEN:
            return
        if self.state is BreakerState.PROBING:
            self._probe_over(reason)
        elif reason not in NOBODYS_FAULT and reason not in LINK_LOST:
            self._count()

    def _count(self) -> None:
        times = self._times_ns
        times.append(self._now_ns)
        within = not self._window_ns or self._now_ns - times[0] <= self._window_ns
        if len(times) < self._discards or not within:
            self._go(BreakerEvent.DISCARDED)
            return
        self._go(BreakerEvent.LIMIT)
        self.opened += 1
        self._probe_at_ns = self._now_ns + self._wait_ns()

    def _probe_over(self, reason: Reason) -> None:
        if reason in NOBODYS_FAULT:
            self._go(BreakerEvent.WITHDRAWN)
            self._probe_at_ns = self._now_ns  # the next STEP probes in its place
            return
        self._go(BreakerEvent.DISCARDED)
        self._failed_probes += 1
        self._probe_at_ns = self._now_ns + self._wait_ns()

    def _wait_ns(self) -> int:
        whole = min(self._probe_after_ns << min(self._failed_probes, _MOST_DOUBLINGS), self._probe_most_ns)
        self._waits += 1
        random32 = philox4x32((self._waits & 0xFFFFFFFF, 0, 0, 0), self._key)[0]
        return whole - (whole * random32 >> 33)  # between half and all of it

    def _go(self, event: BreakerEvent) -> None:
        self.state = TRANSITIONS[self.state, event]


def diagram() -> str:
    """`TRANSITIONS` as a Mermaid state diagram, for the documentation."""
    lines = [f"    {start} --> {end}: {event}" for (start, event), end in TRANSITIONS.items()]
    return "\n".join(["stateDiagram-v2", f"    [*] --> {BreakerState.CLOSED}", *lines])
