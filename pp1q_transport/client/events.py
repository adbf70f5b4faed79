"""What a draft hears of its targets: OPEN, COMMIT, RESET and CLOSE of their requests as callbacks, and their STEPs' records.

Between the records or frames that a side takes and the draft model's own state of each request. Holds no request. SPEC section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..errors import Reason
    from ..session.leader import Grant


class Events:
    """Registered callbacks, called in the order of what they are about."""

    def __init__(self) -> None:
        self._on_open: list[Callable[[int, list[int]], None]] = []
        self._on_commit: list[Callable[[int, list[int]], None]] = []
        self._on_reset: list[Callable[[int, Reason], None]] = []
        self._on_close: list[Callable[[int], None]] = []
        self.event_target = 0
        """Inside a callback: the index of the target whose request it is about."""

    def on_open(self, callback: Callable[[int, list[int]], None]) -> None:
        """Calls `callback(request, tokens)` for each OPEN: all committed tokens so far. Again after a reconnect."""
        self._on_open.append(callback)

    def on_commit(self, callback: Callable[[int, list[int]], None]) -> None:
        """Calls `callback(request, new tokens)` for each COMMIT."""
        self._on_commit.append(callback)

    def on_reset(self, callback: Callable[[int, Reason], None]) -> None:
        """Calls `callback(request, reason)` when speculative state of a request is void (RESET, CANCEL, a lost session)."""
        self._on_reset.append(callback)

    def on_close(self, callback: Callable[[int], None]) -> None:
        """Calls `callback(request)` when a request ended."""
        self._on_close.append(callback)

    def tell(self, kind: str, request: int, detail: object, target: int = 0) -> None:
        """Calls the callbacks of one event: "open", "commit", "reset" or "close"."""
        self.event_target = target
        if kind == "open":
            for opened in self._on_open:
                opened(request, list(detail))  # type: ignore[call-overload]
        elif kind == "commit":
            for committed in self._on_commit:
                committed(request, list(detail))  # type: ignore[call-overload]
        elif kind == "reset":
            for reset in self._on_reset:
                reset(request, detail)  # type: ignore[arg-type]
        else:
            for closed in self._on_close:
                closed(request)


def fill_grant(grant: Grant, fields: tuple[int, ...]) -> None:
    """What a daemon's STEP_FOR_DRAFT record says of a grant; its target and slot are the caller's affair."""
    grant.request, grant.seed, grant.target_context, grant.trace_id, grant.received_ns = fields[:5]
    grant.temperature = fields[5]
    grant.generation, grant.request_generation, grant.round, grant.anchor, grant.depth = fields[8:13]
    grant.representation, grant.support, grant.budget_us = fields[13:16]
