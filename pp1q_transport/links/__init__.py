"""Links move the bytes of one session between two hosts. One interface, one conformance suite for every kind.

Between an engine, which pumps them, and the operating system. A link decides nothing about frames: it asks its assembler where
bytes go and its outbox what to send.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..session.outbox import Outbox


class Link(Protocol):
    """What the engine needs of a link. Codes are those of `Reason`."""

    kind: str
    outbox: Outbox
    bytes_in: int
    bytes_out: int
    error_number: int  # the errno that ended the link, 0 when none did

    def pump(self, now_ns: int) -> int:
        """Moves what can be moved now. Bytes moved (0 = nothing to do), or -code when the link is unusable."""

    def pump_until(self, tries: int) -> int:
        """Pumps until something moved or `tries` idle looks are over; the same results as `pump`."""

    def wait(self, timeout_ns: int, other_fd: int) -> None:
        """Sleeps until the link or `other_fd` can go on, or `timeout_ns` is over."""

    def rest(self) -> int:
        """Prepares for the owner's own sleep, which `rise` must follow. -1: there is something to do, don't sleep; else a number
        that changes whenever the answer of `watch` does."""

    def rise(self, ready: bool) -> None:
        """The owner's sleep is over; `ready`: a descriptor of this link's woke it."""

    def watch(self) -> list[tuple[int, int]]:
        """(descriptor, poll events) of everything that may wake this link."""

    def fence(self, slot: int) -> bool:
        """After this, no byte can land in `slot`. True when a payload was landing there."""

    def stage(self, memory: ReadMemory) -> None:
        """Payloads will come from `memory`, for as long as the link lives. Raises `PeerFault` (`link_error`) when it can't send
        from there."""

    def say_last(self, frame: ReadMemory) -> bool:
        """A frame past an empty outbox, as a farewell before `close`. False when it was not taken whole at once."""

    def linger(self, timeout_ns: int) -> None:
        """After the last word of an orderly end: gives the peer up to `timeout_ns` to hear it and to end too."""

    def describe(self) -> dict[str, object]:
        """What runs: kind, addresses, options, as logs and reports print it."""

    def close(self) -> None:
        """Ends the link; safe to repeat."""
