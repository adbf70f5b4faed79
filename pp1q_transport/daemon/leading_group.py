"""The leader daemon's end of a group whose ranks each have a link of their own (mode "vocabulary"): one target to the draft.

Between `leading.DraftPort`, which treats it as it does a `ServedLeader`, and one engine for each rank; `session.leader_group`
joins their sessions. Owns the staging memory of whole rows. SPEC sections 2 and 4.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from ..counters import Counters
from ..engine import Engine, EngineConfig, terms_ahead
from ..errors import Reason
from ..session.leader import DRAFTING, Grant, LeaderSession
from ..session.leader_group import LeaderGroup
from ..session.requests import RequestTable
from ..session.shards import REPLICATE
from ..staging import Region
from .opened import lasting

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..memory import Memory
    from ..session.terms import SessionTerms


class ShardLink:
    """The link to one rank."""

    def __init__(self, config: EngineConfig, name: str, owner: ServedGroup) -> None:
        self.name = name
        self.rank = config.hello.rank
        self.session: LeaderSession | None = None
        self._owner = owner
        self._requests = RequestTable()
        self.engine = Engine(config, self._make_session, self._on_up, self._on_down, owner.counters)

    def _make_session(self, terms: SessionTerms) -> LeaderSession:
        self.session = LeaderSession(terms, self._requests, self._owner.counters)
        return self.session

    def _on_up(self) -> None:
        assert self.session is not None
        assert self.engine.link is not None
        self.engine.link.stage(self._owner.region.memory)
        self._owner.came(self.rank, self.session)

    def _on_down(self, reason: Reason) -> None:
        session, self.session = self.session, None
        assert session is not None
        session.lost()
        self._owner.went(self.rank, reason)


class ServedGroup:
    """One target of several ranks. `target` is its index among the daemon's targets. The draft hears that it is up when every
    rank's link runs, and that it is down as soon as one does not."""

    def __init__(self, configs: list[EngineConfig], names: list[str], target: int) -> None:
        self.target = target
        self.counters = Counters()
        whole = terms_ahead(replace(configs[0].hello, group_mode=REPLICATE, rank=0))
        here = [config.hello.rank for config in configs]
        self.group = LeaderGroup(whole, configs[0].hello.group_size, self.counters, here)
        self.geometry = whole.geometry()
        self.region = Region(self.geometry.total_bytes, "pp1q-staging")
        self.on_edge: Callable[[int, int], None] | None = None  # (session, 0) came up, (0, reason code) went down
        self._tell: dict[str, Callable[..., None]] = {}
        self._handed: dict[int, int] = {}  # slot -> the generation that was handed out last
        self.links = [ShardLink(config, name, self) for config, name in zip(configs, names, strict=True)]

    # ---- as a `ServedLeader` ------------------------------------------------------------------------------------

    @property
    def engine(self) -> Engine:
        """Rank 0's."""
        return self.links[0].engine

    @property
    def engines(self) -> list[Engine]:
        """Of every rank's link, in order."""
        return [link.engine for link in self.links]

    @property
    def session(self) -> LeaderGroup | None:
        """All links as one session; None while one of them does not run."""
        return self.group if self.group.complete else None

    @property
    def requests(self) -> RequestTable:
        """The open requests, as rank 0 states them."""
        return self.group.requests

    def row_place(self, slot: int, row: int) -> tuple[Memory, int]:
        """The staging memory, and where a whole row lies in it."""
        return self.region.memory, self.geometry.row_offset(slot, row)

    def rows_done(self) -> int:
        """Whole rows sent, over all sessions."""
        return self.group.rows

    def on_open(self, callback: Callable[[int, list[int]], None]) -> None:
        """See `DraftSide.on_open`; one callback."""
        self._tell["open"] = callback

    def on_commit(self, callback: Callable[[int, list[int]], None]) -> None:
        """See `DraftSide.on_commit`; one callback."""
        self._tell["commit"] = callback

    def on_reset(self, callback: Callable[[int, Reason], None]) -> None:
        """See `DraftSide.on_reset`; one callback."""
        self._tell["reset"] = callback

    def on_close(self, callback: Callable[[int], None]) -> None:
        """See `DraftSide.on_close`; one callback."""
        self._tell["close"] = callback

    def collect(self) -> None:
        """Takes what came over all links; tells the events while the group is up."""
        self.group.look()
        events = lasting(self.group.events)
        self.group.events.clear()
        if not self.group.complete:
            return  # the draft hears how things stand when it is
        for kind, request, detail in events:
            if kind == "close":
                self._tell[kind](request)
            elif kind == "reset":
                self._tell[kind](request, detail)
            else:
                self._tell[kind](request, list(detail))  # type: ignore[call-overload]

    def take_grants(self) -> list[Grant]:
        """See `Leader.take_grants`."""
        self.collect()
        steps = self.group.steps[:]
        self.group.steps.clear()
        fresh = []
        for grant in steps:
            if grant.state == DRAFTING and self._handed.get(grant.slot) != grant.generation:
                self._handed[grant.slot] = grant.generation
                fresh.append(grant)
        return fresh

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """See `Step.fail`, on every rank."""
        self.group.fail(grant, generation, reason)
        self.flush()

    def flush(self) -> None:
        """Sends what waits on every link."""
        for engine in self.engines:
            engine.flush()

    def unsent(self) -> bool:
        """Whether frames wait to be sent."""
        return any(link.session is not None and not link.session.outbox.empty() for link in self.links)

    def give_up(self, reason: Reason) -> None:
        """Ends the sessions of every rank."""
        for engine in self.engines:
            engine.fail(reason)

    def close(self) -> None:
        """Says goodbye to every rank and frees the memory."""
        for engine in self.engines:
            engine.close()
        self.region.close()

    # ---- links that come and go ---------------------------------------------------------------------------------

    def came(self, rank: int, session: LeaderSession) -> None:
        """A rank's link runs. With the last one the draft hears of the target and all its open requests."""
        self.group.join(rank, session)
        if not self.group.complete:
            return
        self.group.look()
        self.group.events.clear()
        self._handed.clear()
        self.group.terms.session = self.group.sessions[0].terms.session
        if self.on_edge is not None:
            self.on_edge(self.group.terms.session, 0)
        for request in list(self.requests.requests.values()):
            self._tell["open"](request.request, request.tokens.tolist())

    def went(self, rank: int, reason: Reason) -> None:
        """A rank's link is gone."""
        was_up = self.group.complete
        self.group.part(rank)
        if was_up and self.on_edge is not None:
            self.on_edge(0, reason.code)
