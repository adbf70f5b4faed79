"""The memory that a side has mapped, for who registers it with a device: told of each region, now and whenever one is new.

Between the sides, whose memory changes with a session's sizes or with their daemon, and hooks such as `tensors.pin`. Maps nothing
itself. SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..staging import Region


class Mapped:
    """What both sides of both kinds are: owners of regions."""

    def __init__(self) -> None:
        self.regions: list[Region] = []
        """The slot memory (target), or the staging memory of each target (draft); none before the first session."""
        self._on_memory: list[Callable[[Region], object]] = []

    def on_memory(self, callback: Callable[[Region], object]) -> None:
        """Calls `callback(region)` for each region that is mapped now, and for each that will be."""
        self._on_memory.append(callback)
        for region in self.regions:
            callback(region)

    def _map(self, regions: Sequence[Region]) -> None:
        """These are mapped from now on, in place of those that were."""
        self.regions = list(regions)
        for region in self.regions:
            for callback in self._on_memory:
                callback(region)

    def _unmap(self, touched: bool) -> None:
        """They are of no use any more. `touched`: a device still copies from or to them, and they must stay as they are."""
        for region in self.regions:
            if touched:
                region.at_close.clear()
            region.close()
        self.regions = []
