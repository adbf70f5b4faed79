"""Records on their way to one client: straight into its channel while there is room, kept in order behind it while there is none.

Between a port and the channel of its client. Bounded: a client that takes nothing for `STUCK_NS`, or is owed more than
`OWED_MOST_BYTES`, is one that never will. Knows no kinds.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from ..local import messages as m

if TYPE_CHECKING:
    from ..local.attach import Attached

STUCK_NS: Final = 5_000_000_000
OWED_MOST_BYTES: Final = 64 << 20


class Outgoing:
    """The way to one attached client."""

    def __init__(self, attached: Attached) -> None:
        self.attached = attached
        self.owed_bytes = 0
        self.owed_most = OWED_MOST_BYTES
        self._kept: deque[tuple[int, bytes, bytes]] = deque()
        self._since_ns = 0

    def send(self, kind: int, *fields: int | float, payload: bytes = b"") -> None:
        """One record, behind those that wait already."""
        fixed = m.pack(kind, *fields)
        if self._kept or not self.attached.channel.send(kind, fixed, payload):
            self._kept.append((kind, fixed, payload))
            self.owed_bytes += len(fixed) + len(payload)

    def flush(self, now_ns: int) -> bool:
        """Sends what waits, as far as there is room, and rings the client's doorbell if it sleeps. False: it is stuck."""
        channel = self.attached.channel
        moved = False
        while self._kept:
            kind, fixed, payload = self._kept[0]
            if not channel.send(kind, fixed, payload):
                break
            self._kept.popleft()
            self.owed_bytes -= len(fixed) + len(payload)
            moved = True
        channel.flush_bell()
        if not self._kept or moved or not self._since_ns:
            self._since_ns = now_ns if self._kept else 0
            return True
        return now_ns - self._since_ns < STUCK_NS and self.owed_bytes <= self.owed_most
