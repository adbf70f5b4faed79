"""The links between the ranks of a draft, their frames judged again: what a peer is told, and what it answers.

Between `replay` and the sessions of `session.draft_peer`. A peer holds the tokens of every request, and no capture keeps those of
requests that were open when its file began: such a session is not replayed. SPEC section 2 (TOKEN).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import Reason
from ..session.draft_peer import DraftLeaderSession, DraftPeerSession
from ..session.hello import Role
from ..session.requests import RequestTable
from . import priming
from .link_replay import OUTSIDE, OWN_REASONS, Feed, Link

if TYPE_CHECKING:
    from ..counters import Counters
    from ..wire import Header
    from .link_replay import Outcome
    from .reading import Record

ROLES: Final = (Role.DRAFT_LEADER, Role.DRAFT_PEER)


def why_not(state: priming.State) -> str:
    """Why this session can't be replayed; empty when it can."""
    if state.side is Role.DRAFT_PEER and (state.known or state.slots):
        return "it began before the file, which does not keep the tokens of its requests"
    return ""


def link(state: priming.State, counters: Counters, outcome: Outcome) -> Link:
    """A session between a draft's leader and a peer, as it is at its start. Raises `CaptureError`."""
    terms = priming.terms_in(state)
    if state.side is Role.DRAFT_PEER:
        return PeerLink(state, counters, outcome, DraftPeerSession(terms, RequestTable(), counters))
    session = DraftLeaderSession(terms, RequestTable(), counters)
    return DraftLink(state, counters, outcome, session)


class DraftLink(Link):
    """Such a session at the draft's leader, which hears nothing but STATUS."""

    def __init__(
        self, state: priming.State, counters: Counters, outcome: Outcome, session: DraftLeaderSession | DraftPeerSession
    ) -> None:
        super().__init__(state, counters, outcome, Feed(session))
        self._was_ready = state.counted[2]

    def said(self, header: Header, record: Record) -> None:
        """See `Link.said`: nothing that the leader says changes what it takes."""

    def over(self, reason: Reason, now_ns: int) -> None:
        """See `Link.over`."""
        self._ended_for(reason)

    def compare(self, reasons: dict[str, int], discards: dict[str, int], ready: int) -> None:
        """See `Link.compare`; the daemon counts what its own process meets as well."""
        ours = (self.counters.reasons, self.counters.discards, {"ready": self._was_ready})
        self._compare((reasons, discards, {"ready": ready}), ours, OWN_REASONS | OUTSIDE)


class PeerLink(DraftLink):
    """Such a session at the peer."""

    def __init__(self, state: priming.State, counters: Counters, outcome: Outcome, session: DraftPeerSession) -> None:
        super().__init__(state, counters, outcome, session)
        self.session = session

    def settle(self) -> None:
        """See `Link.settle`; nobody follows what it was told."""
        super().settle()
        self.session.stream.clear()

    def said(self, header: Header, record: Record) -> None:
        """See `Link.said`: a STATUS about a STEP that this peer could not follow."""
        if header.kind == wire.STATUS and 0 < header.status <= len(Reason) and header.slot < len(self.session.grants):
            self.session.fail(self.session.grants[header.slot], header.slot_generation, Reason.from_code(header.status))
