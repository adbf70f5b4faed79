"""Which events of one look still matter: a request that was opened and closed again in it was never there for anybody.

Between a leader's session, which collects events while it is not looked at, and those who hear of them with the facts of the
request table, which is as of now: an ID that is open again belongs to another request. Holds nothing. SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

Event = tuple[str, int, object]
"""("open" | "commit" | "reset" | "close", request ID, tokens or reason), as of a `LeaderSession`."""


def lasting(events: Sequence[Event]) -> list[Event]:
    """`events` without what lies between an OPEN and the CLOSE of the same request, both included; the order stays."""
    kept: list[Event | None] = list(events)
    since: dict[int, list[int]] = {}  # by request that was opened here: where its events are
    for index, (kind, request, _detail) in enumerate(events):
        if kind == "open":
            since[request] = [index]
        elif request in since:
            since[request].append(index)
            if kind == "close":
                for at in since.pop(request):
                    kept[at] = None
    return [event for event in kept if event is not None]
