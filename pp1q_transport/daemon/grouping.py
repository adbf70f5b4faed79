"""Rank 0's links to the other ranks of its group: one engine for each, behind one listening endpoint.

Between the daemon's loop, which drives them around its receiver, and `session.hub`, which decides and relays. Serves no client.
SPEC section 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ..engine import Engine, EngineConfig
from ..errors import Reason
from ..forming import Forming
from ..logs import logger
from ..seating import Seats
from ..session.hub import HubSession, RankGroup

if TYPE_CHECKING:
    from ..counters import Counters
    from ..session.terms import SessionTerms


class RankLink:
    """The group link to one rank."""

    def __init__(self, config: EngineConfig, seats: Seats, group: RankGroup, rank: int, counters: Counters) -> None:
        self.rank = rank
        self._group = group
        self._counters = counters
        self._session: HubSession | None = None
        named = replace(config, name=f"rank{rank}")
        self.engine = Engine(named, self._make_session, self._on_up, self._on_down, counters, forming=seats.seat(rank))

    def _make_session(self, terms: SessionTerms) -> HubSession:
        self._session = HubSession(terms, self._group, self.rank, self._counters)
        return self._session

    def _on_up(self) -> None:
        assert self._session is not None
        self._session.up()

    def _on_down(self, reason: Reason) -> None:
        session, self._session = self._session, None
        assert session is not None
        session.lost(Reason.PEER_LOST)


class GroupLinks:
    """All of them. `group` is what rank 0's receiver joins."""

    def __init__(self, config: EngineConfig, counters: Counters) -> None:
        size = config.hello.group_size
        self.group = RankGroup(size, counters, mode=config.hello.group_mode)
        self._log: Any = logger(part="group")
        forming = Forming(config.hello, config.listen, None, config.keys, counters, False, True, None, stubborn=True)
        self._seats = Seats(forming, range(1, size))
        self.links = [RankLink(config, self._seats, self.group, rank, counters) for rank in range(1, size)]

    @property
    def endpoint(self) -> str:
        """Where the other ranks connect to."""
        return self._seats.forming.endpoint

    @property
    def ranks_up(self) -> int:
        """How many ranks are up, this one included."""
        return 1 + len(self.group.hubs)

    def serve(self) -> int:
        """One pass over every link: votes and releases come in. Returns the bytes moved."""
        moved = 0
        for link in self.links:
            moved += link.engine.poll()
        if self.group.news:
            for event, reason, epoch, count in self.group.news:
                log = self._log.info if event in ("epoch_open", "epoch_asking") else self._log.warning
                log(event, epoch=epoch, count=count, **({} if reason is None else {"reason": reason.value}))
            self.group.news.clear()
        return moved

    def flush(self) -> None:
        """Sends what the receiver's turn left for the other ranks: rows, grants, decisions."""
        for link in self.links:
            session = link.engine.session
            if session is not None and not session.outbox.empty():
                link.engine.flush()

    def close(self) -> None:
        """Says goodbye to every rank and closes the endpoint."""
        for link in self.links:
            link.engine.close()
        self._seats.close()
