"""The link of a draft's rank above 0 to the target's rank of the same number (mode "vocabulary"): its range of every row.

Between `following.FollowedTarget`, which says what draft rank 0 asked and drew, and a `LeaderSession` whose shard is this rank's.
The target's STEP here and rank 0's word of it meet by slot and generation; either may come first. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import wire
from ..counters import Counters
from ..engine import Engine, EngineConfig, terms_ahead
from ..errors import LocalMisuse, PeerFault, Reason
from ..session.leader import DRAFTING, SENT, LeaderSession
from ..session.leader_group import COMMON
from ..session.requests import RequestTable
from ..session.shards import MASS
from ..staging import Region

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from ..session.leader import Grant
    from ..session.terms import SessionTerms


class _Row(NamedTuple):
    """A range of a row that is staged."""

    position: int
    token: int
    entries: int
    length: int
    shard_mass: int
    mass_before: int


class OwnShare:
    """The link and its staging memory. `on_lost(reason)` is called when the link is gone, `on_refused(grant, generation, reason)`
    when the target's own STEP came after rank 0's word of it and does not fit."""

    def __init__(self, config: EngineConfig, name: str) -> None:
        self.name = name
        self.counters = Counters()
        self.session: LeaderSession | None = None
        self.on_lost: Callable[[Reason], None] = lambda _reason: None
        self.on_refused: Callable[[Grant, int, Reason], None] = lambda _grant, _generation, _reason: None
        self.bytes_sent = 0
        self.whole_sent = 0
        self.geometry = terms_ahead(config.hello).geometry()
        self.region = Region(self.geometry.total_bytes, "pp1q-staging")
        self._requests = RequestTable()
        self._rows_before = 0
        self._followed: dict[int, Grant] = {}  # by slot: rank 0's word of it, while it stands
        self._over: dict[int, tuple[int, Reason]] = {}  # by slot: the last generation that rank 0's word ended, and why
        self._waiting: dict[int, list[_Row]] = {}  # by slot: rows staged before the target's own STEP came
        self.engine = Engine(config, self._make_session, lambda: None, self._on_down, self.counters)

    def _make_session(self, terms: SessionTerms) -> LeaderSession:
        self.session = LeaderSession(terms, self._requests, self.counters)
        self._over.clear()
        return self.session

    def _on_down(self, _reason: Reason) -> None:
        session, self.session = self.session, None
        assert session is not None
        self._rows_before += session.rows
        session.lost()
        self._followed.clear()
        self._waiting.clear()
        self.on_lost(Reason.PEER_LOST)

    def rows_done(self) -> int:
        """Ranges of rows sent, over all sessions."""
        return self._rows_before + (self.session.rows if self.session is not None else 0)

    @property
    def busy(self) -> bool:
        """Whether something is under way, or waits to be sent or for the target's own STEP."""
        session = self.session
        if session is None:
            return False
        if any(session.grants[slot].generation < followed.generation for slot, followed in self._followed.items()):
            return True
        return not session.outbox.empty() or any(grant.state == DRAFTING for grant in session.grants)

    def serve(self) -> int:
        """One pass of the engine; the target's own STEPs meet rank 0's word of them. Returns the bytes moved."""
        moved = self.engine.poll()
        session = self.session
        if session is not None and (session.steps or session.events):
            session.events.clear()  # rank 0's word counts
            steps = session.steps[:]
            session.steps.clear()
            for own in steps:
                generation, reason = self._over.get(own.slot, (0, Reason.CANCELLED))
                if own.generation <= generation:
                    self._fail(own, reason)
                    continue
                followed = self._followed.get(own.slot)
                reason_against = None if followed is None else self._meet_late(followed, own)
                if followed is not None and reason_against is not None:
                    self.on_refused(followed, followed.generation, reason_against)
            self.engine.flush()
        return moved

    def _meet_late(self, followed: Grant, own: Grant) -> Reason | None:
        """`_meet` where nobody can be told that a row which waited is none: whoever put it has no record under way."""
        try:
            return self._meet(followed, own)
        except LocalMisuse:
            self.counters.refuse(Reason.LENGTH_BOUNDS)
            self._fail(own, Reason.CANCELLED)
            return Reason.CANCELLED

    # ---- rank 0's word ------------------------------------------------------------------------------------------

    def begin(self, grant: Grant) -> Reason | None:
        """Rank 0's word of a STEP came. None, or why this rank can't follow it."""
        session = self.session
        if session is None:
            return Reason.PEER_LOST
        own = session.grants[grant.slot]
        self._waiting.pop(grant.slot, None)
        if own.generation < grant.generation:
            session.outbox.withdraw(grant.slot)  # of a proposal that is over: its memory is about to be written again
        if own.generation > grant.generation:
            return Reason.GENERATION_STALE
        self._followed[grant.slot] = grant
        return self._meet(grant, own)

    def _meet(self, grant: Grant, own: Grant) -> Reason | None:
        """Whether the two are the same STEP, once both are there; rows that waited go out."""
        if own.generation != grant.generation or own.state == SENT:
            return None  # an earlier one; or a later one, which rank 0 will have a word about; or all of it is sent
        if own.state != DRAFTING:
            return Reason.CANCELLED  # the target's rank took it back already
        for name, reason in COMMON:
            if getattr(grant, name) != getattr(own, name):
                self.counters.refuse(reason)
                self._fail(own, reason)
                return reason
        for row in self._waiting.pop(grant.slot, ()):
            self._send(own, row)
        return None

    def reset(self, slot: int, generation: int, reason: Reason) -> None:
        """Rank 0's word of a STEP is that it is over."""
        followed = self._followed.get(slot)
        if followed is not None and followed.generation <= generation:
            del self._followed[slot]
            self._waiting.pop(slot, None)
        self._over[slot] = generation, reason
        if self.session is not None and self.session.grants[slot].alive(generation):
            self._fail(self.session.grants[slot], reason)

    def forget(self, reason: Reason) -> None:
        """The link to rank 0 is gone: there will be no further word of what is under way."""
        followed = list(self._followed.values())
        self._followed.clear()
        self._waiting.clear()
        self._over.clear()
        for grant in followed:
            if self.session is not None and self.session.grants[grant.slot].alive(grant.generation):
                self._fail(self.session.grants[grant.slot], reason)

    def give_up(self, reason: Reason) -> None:
        """This rank can't go on with anything that is under way, also where every token was told and rows are missing."""
        if self.session is not None:
            for own in list(self.session.grants):
                self._fail(own, reason)

    def _fail(self, own: Grant, reason: Reason) -> None:
        session = self.session
        if session is None:
            return
        try:
            session.fail(own, own.generation, reason)
        except PeerFault as fault:  # the target's rank does not read
            session.broken = fault.reason.code

    # ---- what the process gives ---------------------------------------------------------------------------------

    def put(
        self,
        grant: Grant,
        tokens: Sequence[int],
        position: int,
        entries: int,
        length: int,
        shard_mass: int,
        mass_before: int,
    ) -> None:
        """The range of `position`, staged, for the token that was told. Raises `LocalMisuse` for what no honest process does."""
        followed = self._followed.get(grant.slot)
        session = self.session
        if session is None or followed is None or followed.generation != grant.generation:
            return  # over meanwhile: the process hears of it
        index = position - followed.anchor - 1
        if not 0 <= index < len(tokens):
            raise LocalMisuse(f"position {position} has no token yet")
        if shard_mass + mass_before > MASS:
            raise LocalMisuse(f"masses {shard_mass} behind {mass_before} exceed 2^24")
        self._judge_payload(followed, session.terms, entries, length)
        own = session.grants[grant.slot]
        if own.generation > followed.generation:
            return  # the target gave it up: rank 0's word of that is on its way
        here = own.generation == followed.generation
        if here and own.state not in (DRAFTING, SENT):
            return
        waiting = self._waiting.setdefault(grant.slot, [])
        staged = len(waiting) + (own.rows if here else 0)
        if index != staged:
            raise LocalMisuse(f"position {position} out of order: {staged} rows of this proposal are staged")
        waiting.append(_Row(position, tokens[index], entries, length, shard_mass, mass_before))
        # The target's STEP may have come in unnoticed, while something was sent.
        reason = self._meet(followed, own)
        if reason is not None:
            self.on_refused(followed, followed.generation, reason)

    @staticmethod
    def _judge_payload(followed: Grant, terms: SessionTerms, entries: int, length: int) -> None:
        """As the session judges it: a row may wait for the target's own STEP, and is this process's fault only now."""
        if followed.representation == wire.DENSE:
            if (entries, length) != (terms.shard_entries, terms.dense_row_bytes):
                raise LocalMisuse(f"a dense row is {terms.shard_entries} entries in {terms.dense_row_bytes} bytes")
        elif entries > followed.support or length != entries * 8:
            raise LocalMisuse(f"a sparse row is 0..{followed.support} entries of 8 bytes")

    def _send(self, own: Grant, row: _Row) -> None:
        session = self.session
        assert session is not None
        at = self.geometry.row_offset(own.slot, own.rows)
        try:
            if session.put_shard(
                own,
                own.generation,
                row.position,
                row.token,
                row.entries,
                self.region.memory,
                at,
                row.length,
                row.shard_mass,
                row.mass_before,
            ):
                self.bytes_sent += row.length
                self.whole_sent += own.state != DRAFTING
        except PeerFault as fault:
            session.broken = fault.reason.code

    def close(self) -> None:
        """Says goodbye to the target and frees the memory."""
        self.engine.close()
        self.region.close()
