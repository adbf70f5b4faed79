"""The embedded draft side: the engine runs inside these calls; rows go out while the next one is drafted.

Between a draft model's loop and the engine. Owns the staging memory. SPEC sections 3, 5 and 9.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from ..engine import Engine, EngineConfig, Phase
from ..errors import LocalMisuse
from ..session.leader import Grant, LeaderSession
from ..session.requests import RequestTable
from ..staging import Region, SlotViews
from .draft_side import DraftSide, Staging, Step
from .endpoint import Endpoint, same_slots

if TYPE_CHECKING:
    from ..errors import Reason
    from ..session.terms import SessionTerms


class Leader(Endpoint, DraftSide):
    """The draft side of a session. Iterate over it for STEPs."""

    def __init__(self, config: EngineConfig) -> None:
        self.requests = RequestTable()
        self.session: LeaderSession | None = None
        self._steps: deque[Grant] = deque()
        self._handed: dict[int, int] = {}  # slot -> the generation that was handed out last
        self._region: Region | None = None
        self._staging: Staging | None = None
        DraftSide.__init__(self)
        Endpoint.__init__(self, Engine(config, self._make_session, self._on_up, self._on_down))

    @property
    def region(self) -> Region:
        """The staging memory; there is none before the first session (or `prepare`) and after `close`."""
        if self._region is None:
            raise LocalMisuse("no staging memory: no session was formed yet, or this leader is closed")
        return self._region

    def prepare(self, terms: SessionTerms) -> None:
        """Gets the staging memory for sessions of these terms."""
        geometry = terms.geometry()
        views = self._staging.views if self._staging is not None else None
        if self._region is None or not same_slots(views, geometry, terms.vocab_size):
            if self._region is not None:
                self._region.close()
            self._region = Region(geometry.total_bytes, "pp1q-staging")
            views = SlotViews(self._region, geometry, terms.vocab_size, writable=True)
            self._staging = Staging(self._region, views, terms.dense_row_bytes)
            self._map([self._region])

    def _make_session(self, terms: SessionTerms) -> LeaderSession:
        self.prepare(terms)
        self.session = LeaderSession(terms, self.requests, self.counters)
        return self.session

    def _on_up(self) -> None:
        self._steps.clear()
        self._handed.clear()
        assert self.engine.link is not None
        self.engine.link.stage(self.region.memory)

    def _on_down(self, reason: Reason) -> None:
        session = self.session
        assert session is not None
        self._steps.clear()
        live = list(self.requests.requests)
        session.lost()  # first, since a callback may raise
        self.session = None
        self._dispatch(session)
        for request in live:
            self.tell("reset", request, reason)

    @property
    def over(self) -> bool:
        """See `DraftSide.over`."""
        return self.engine.phase is Phase.CLOSED

    def take_grants(self) -> list[Grant]:
        """The STEPs that came since the last call and still live, for an owner that drafts elsewhere. Each is given once."""
        self.collect()
        fresh = []
        while self._steps:
            grant = self._steps.popleft()
            if self.drafting(grant) and self._handed.get(grant.slot) != grant.generation:
                self._handed[grant.slot] = grant.generation
                fresh.append(grant)
        return fresh

    def next_step(self, timeout_ns: int = 50_000_000) -> Step | None:
        """The next live STEP, waiting at most `timeout_ns`."""
        if not self._steps:
            self.serve(timeout_ns)
        return self.take_step()

    def take_step(self) -> Step | None:
        """See `DraftSide.take_step`."""
        while self._steps:
            grant = self._steps.popleft()
            request = self.requests.get(grant.request)
            # A grant is its slot's: it is queued once for each generation, and only the last of them lives.
            if self.drafting(grant) and request is not None and self._handed.get(grant.slot) != grant.generation:
                self._handed[grant.slot] = grant.generation
                return Step(self, grant, request)
        return None

    def serve(self, timeout_ns: int) -> None:
        """One pass of the engine, idling for at most `timeout_ns`; dispatches what arrived to the callbacks."""
        if self.engine.poll() == 0:
            self.engine.wait(timeout_ns)
        self.collect()

    def poll(self) -> int:
        """Serves the engine once, without waiting. Returns how many bytes moved."""
        moved = self.engine.poll()
        self.collect()
        return moved

    def collect(self) -> None:
        """Takes new STEPs and events from the session."""
        session = self.session
        if session is None:
            return
        if session.steps:
            self._steps.extend(session.steps)
            session.steps.clear()
        if session.events:
            self._dispatch(session)

    def _dispatch(self, session: LeaderSession) -> None:
        while session.events:  # one by one: what is behind a callback that raises stays for the next look
            kind, request, detail = session.events.pop(0)
            self.tell(kind, request, detail)

    def drafting(self, grant: Grant, target: int = 0) -> bool:
        """See `DraftSide.drafting`."""
        return self.session is not None and grant.alive(grant.generation)

    def staging_of(self, target: int) -> Staging | None:
        """See `DraftSide.staging_of`."""
        return self._staging if self.session is not None else None

    def send_row(self, grant: Grant, step: Step, position: int, token: int, entries: int, offset: int, length: int) -> bool:
        """See `DraftSide.send_row`."""
        session, region = self.session, self._region
        assert session is not None
        assert region is not None
        sent = session.put_row(grant, step.slot_generation, position, token, entries, region.memory, offset, length)
        self.engine.flush()
        self.collect()
        return sent

    def close(self) -> None:
        """See `Endpoint.close`; frees the staging memory too."""
        self._close_copies()
        super().close()
        self._unmap(touched=False)
        self._region = None
        self._staging = None

    def fail(self, grant: Grant, generation: int, reason: Reason, target: int = 0) -> None:
        """See `Step.fail`."""
        if self.session is not None:
            self.session.fail(grant, generation, reason)
            self.engine.flush()


__all__ = ["Leader", "Step"]
