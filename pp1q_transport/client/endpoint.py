"""What both roles of the client share: an engine, the waiting for its peer, its end.

Between the engine and the role classes (`target`, `draft`). Knows neither proposals nor rows. SPEC section 9.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Self

from .._native import kernels
from ..engine import CONTROL_EVERY_NS, Engine, Phase
from ..errors import PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping, Set

    from ..session.slots import SlotGeometry
    from ..staging import SlotViews


def same_slots(views: SlotViews | None, geometry: SlotGeometry, vocab_size: int) -> bool:
    """Whether memory laid out for an earlier session serves one of this geometry: equal in every part, not only in size."""
    if views is None or views.vocab_size != vocab_size:
        return False
    before = views.geometry
    return (before.max_slots, before.depth, before.row_bytes) == (geometry.max_slots, geometry.depth, geometry.row_bytes)


class Endpoint:
    """What both roles share: an engine, its waiting, its end. A context manager."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.counters = engine.counters
        self.log = engine.log

    @property
    def endpoint(self) -> str:
        """The control endpoint in use."""
        return self.engine.endpoint

    @property
    def up(self) -> bool:
        """Whether a session is running."""
        return self.engine.phase is Phase.UP

    @property
    def parted(self) -> bool:
        """Whether the last session ended with a goodbye: nobody was lost, and nobody need be waited for."""
        return self.engine.parted

    @property
    def closed(self) -> bool:
        """Whether this side has ended for good."""
        return self.engine.closed

    def poll(self) -> int:
        """Serves the engine once, without waiting. Returns how many bytes moved."""
        return self.engine.poll()

    # ---- for an owner who sleeps by himself (`pump`) ------------------------------------------------------------

    def may_wait(self) -> None:
        """See `AttachedSide.may_wait`: an embedded side is a group of one, and can always wait."""

    def settle_epoch(self) -> None:
        """See `AttachedSide.settle_epoch`: an embedded side is a group of one, which agrees with itself."""

    @property
    def flushed(self) -> bool:
        """Whether nothing waits to be sent."""
        link = self.engine.link
        return link is None or link.outbox.empty()

    def before_sleep(self) -> tuple[object, ...] | None:
        """Prepares for the owner's own sleep. None: do not sleep, poll; otherwise what `descriptors_to_watch` depends on."""
        return () if self.closed else self.engine.rest()

    def descriptors_to_watch(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) of everything that may wake this side."""
        return [] if self.closed else self.engine.watch()

    def after_sleep(self, ready: Set[int]) -> None:
        """Ends the sleep; `ready` are the descriptors that ended it. Then poll."""
        self.engine.woke(ready)

    def look_within_ns(self) -> int:
        """How long the owner may sleep at most, in ns."""
        return CONTROL_EVERY_NS

    def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Waits for a session; raises `PeerFault(timeout)` when none formed in time."""
        deadline_ns = kernels.monotonic_ns() + int(timeout_s * 1e9)
        while not self.up:
            self.engine.poll()
            if self.up:
                return
            if self.engine.phase is Phase.CLOSED:
                raise PeerFault(Reason.PEER_LOST, "the session is over and this endpoint is closed")
            if kernels.monotonic_ns() >= deadline_ns:
                raise PeerFault(Reason.TIMEOUT, f"no peer within {timeout_s:g} s at {self.endpoint}")
            self.engine.wait()

    def wait_for_message(self, kind: str, timeout_s: float = 30.0) -> object:
        """The body of the next control message of `kind` ("report", "options") from the session's peer."""
        deadline_ns = kernels.monotonic_ns() + int(timeout_s * 1e9)
        while True:
            for index, (got, body) in enumerate(self.engine.inbox):
                if got == kind:
                    del self.engine.inbox[index]
                    return body
            if self.engine.phase is Phase.CLOSED:
                raise PeerFault(Reason.PEER_LOST, f"the session is over, and no {kind} came")
            if kernels.monotonic_ns() >= deadline_ns:
                raise PeerFault(Reason.TIMEOUT, f"no {kind} within {timeout_s:g} s")
            self.engine.poll()
            self.engine.wait(5_000_000)

    def send_message(self, kind: str, body: Mapping[str, object]) -> None:
        """Sends a "report" or "options" message to the session's peer over the control plane."""
        self.engine.send_control(kind, body)

    def close(self) -> None:
        """Says goodbye and frees everything. Safe to repeat."""
        self.engine.close()

    def __del__(self) -> None:
        """For an endpoint that was dropped and never closed: its ZeroMQ context's own finalizer would wait for ever."""
        engine = getattr(self, "engine", None)
        if engine is not None and not sys.is_finalizing():
            engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
