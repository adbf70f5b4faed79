"""The link from a draft's leader to one of its tensor-parallel peers: what the leader is told, and each token once it is drawn.

Between the leader's own session, whose STEPs and events the owner passes on (`DraftLeaderSession`), and a peer that computes its
part of each row (`DraftPeerSession`). Peers never draw, put no rows and answer nothing but a STATUS. SPEC section 2 (TOKEN).

On such a link the draft's leader stands where a receiver does towards a leader: it opens requests, grants and resets, so the peer
judges all that as a leader would, the prefix digest included. One link serves one target. What the owner does at the leader:

- hands on what its `LeaderSession` says, in order: `open`, `commit`, `close`, `reset` for its events, `step` for each new grant;
- calls `token` for every drawn token before the next row is computed, and before or after `put_row` of its own row;
- reads `refused`: (slot, generation, reason) of STEPs that a peer can't follow, and gives those proposals up.

A peer's owner reads `stream`, in the order in which the leader said it: a process that follows must see a STEP before its tokens,
and a commit between two STEPs where it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from .. import wire
from ..errors import LocalMisuse, Reason
from .leader import DEAD, DRAFTING, SENT, Grant, LeaderSession
from .machine import SessionMachine
from .outbox import NO_KEY

if TYPE_CHECKING:
    from array import array

    from ..counters import Counters
    from ..memory import ReadMemory
    from ..wire import Header
    from .assembler import Landing
    from .requests import Request, RequestTable
    from .terms import SessionTerms


class Told(NamedTuple):
    """One thing that the leader said. `kind` and `detail`: "open" and "commit" with tokens (array of int32), "close" with None,
    "step" with a `Grant` that stays as it is, "reset" with (slot, slot_generation, reason), "token" with (slot, slot_generation,
    position, token)."""

    kind: str
    request: int
    detail: object


_COPIED = (
    "state", "generation", "request", "request_generation", "round", "anchor", "depth", "seed", "context", "representation",
    "support", "temperature", "target_context", "budget_us", "trace_id", "received_ns", "rows",
)  # fmt: skip


def copy_of(grant: Grant) -> Grant:
    """A grant as it is now: a session's own is its slot's, and becomes the slot's next one."""
    copy = Grant(grant.slot, 0)
    for name in _COPIED:
        setattr(copy, name, getattr(grant, name))
    return copy


class DraftLeaderSession(SessionMachine):
    """State of one session at the draft's leader, towards one peer. `requests` is what the peer was told, as of now: a request's
    tokens are those of the OPENs and COMMITs that went into this session, or will in the same breath."""

    def __init__(self, terms: SessionTerms, requests: RequestTable, counters: Counters) -> None:
        super().__init__(terms, requests, counters, terms.receiver_nonce, terms.leader_nonce)
        self.refused: list[tuple[int, int, Reason]] = []

    # ---- what the owner passes on -------------------------------------------------------------------------------

    def open(self, request: Request) -> None:
        """OPEN of a request with all its committed tokens."""
        self.send_open(request)

    def commit(self, request: Request, tokens: array[int]) -> None:
        """COMMIT of the last `tokens` of a request, which has them already."""
        h = self.blank(wire.COMMIT)
        h.request = request.request
        h.request_generation = request.generation
        h.position = request.anchor
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.accepted = len(tokens) - 1
        h.source = wire.VERIFIED
        self.send_tokens(h, tokens.tobytes())

    def close(self, request: int) -> None:
        """CLOSE."""
        h = self.blank(wire.CLOSE)
        h.request = request
        h.subject = 0
        h.status = 0
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def step(self, grant: Grant) -> None:
        """STEP of a grant that the leader drafts for now. Raises `LocalMisuse` when its request is not open."""
        request = self.requests.get(grant.request)
        if request is None:
            raise LocalMisuse(f"request {grant.request} is not open")
        h = self._about(wire.STEP, grant)
        h.depth = grant.depth
        h.position = grant.anchor
        h.representation = grant.representation
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.target_context = grant.target_context
        h.trace_id = grant.trace_id
        h.temperature = grant.temperature
        h.support_policy = grant.support
        h.budget_us = grant.budget_us
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def token(self, grant: Grant, position: int, token: int) -> None:
        """TOKEN: what the leader drew for `position` of a grant."""
        h = self._about(wire.TOKEN, grant)
        h.position = position
        h.token = token
        h.draw_counter = 0
        h.context = grant.context
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def reset(self, grant: Grant, reason: Reason) -> None:
        """RESET: the grant's generation is dead."""
        of, slot = grant, (grant.slot, grant.generation)
        h = self.notice(wire.RESET, of.request, of.request_generation, of.round, *slot, reason.code)
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def _about(self, kind: int, grant: Grant) -> Header:
        h = self.blank(kind)
        h.request = grant.request
        h.request_generation = grant.request_generation
        h.slot = grant.slot
        h.slot_generation = grant.generation
        h.round = grant.round
        return h

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`: a peer sends a STATUS or nothing."""
        code = self.check_peer(header)
        if code:
            return -code
        return 0 if header.kind == wire.STATUS else -Reason.UNEXPECTED_KIND.code

    def progress(self, header: Header, landed: int) -> None:
        """See `FrameSink.progress`."""

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        if not 1 <= header.status <= len(Reason):
            return -Reason.RESERVED_BITS.code
        reason = Reason.from_code(header.status)
        self.counters.refuse(reason)
        self.news.append(("peer_status", reason, header.slot, header.slot_generation))
        if header.slot_generation:
            self.refused.append((header.slot, header.slot_generation, reason))
        else:
            self.peer_status = header.status
        return 0


class DraftPeerSession(LeaderSession):
    """State of one session at a peer. `terms`' leader is this peer: it stands where a leader does."""

    def __init__(self, terms: SessionTerms, requests: RequestTable, counters: Counters) -> None:
        super().__init__(terms, requests, counters)
        self.stream: list[Told] = []

    def put_shard(
        self,
        grant: Grant,
        generation: int,
        position: int,
        token: int,
        entries: int,
        memory: ReadMemory,
        offset: int,
        length: int,
        shard_mass: int,
        mass_before: int,
    ) -> bool:
        """Raises `LocalMisuse`: the leader alone draws, and sends rows."""
        raise LocalMisuse("a draft peer sends no rows and draws no tokens: its leader does")

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """This peer can't follow a STEP: the leader is told, and gives the proposal up."""
        if not grant.alive(generation):
            return
        grant.state = DEAD
        self.counters.refuse(reason)
        of, slot = grant, (grant.slot, grant.generation)
        h = self.notice(wire.STATUS, of.request, of.request_generation, of.round, *slot, reason.code)
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`."""
        if header.kind != wire.TOKEN:
            return super().accept(header, landing, now_ns)
        code = self.check_peer(header)
        if code:
            return -code
        return 0 if header.slot < self.terms.max_slots else -Reason.SLOT_BOUNDS.code

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        if header.kind != wire.TOKEN:
            code = super().finish(header, now_ns)
            self._order(header)
            return code
        grant = self.grants[header.slot]
        if header.slot_generation > grant.generation:
            return -Reason.SLOT_STATE.code
        if header.slot_generation < grant.generation or grant.state != DRAFTING:
            self.counters.refuse(Reason.GENERATION_STALE)
            return 0
        code = self._judge_token(grant, header)
        if code:
            return -code
        grant.rows += 1
        if grant.rows == grant.depth:
            grant.state = SENT
        self.stream.append(Told("token", grant.request, (grant.slot, grant.generation, header.position, header.token)))
        return 0

    def _order(self, header: Header) -> None:
        """What this frame said goes behind everything said before it."""
        for kind, request, detail in self.events:
            if kind == "reset":
                detail = (header.slot, header.slot_generation, detail)
            self.stream.append(Told(kind, request, detail))
        self.events.clear()
        self.stream.extend(Told("step", step.request, copy_of(step)) for step in self.steps)
        self.steps.clear()

    def _judge_token(self, grant: Grant, header: Header) -> int:
        if header.request != grant.request:
            return Reason.REQUEST_MISMATCH.code
        if header.request_generation != grant.request_generation:
            return Reason.GENERATION_STALE.code
        if header.round != grant.round:
            return Reason.ROUND_MISMATCH.code
        if header.context != grant.context:
            return Reason.CONTEXT_MISMATCH.code
        if header.position != grant.anchor + 1 + grant.rows:
            return Reason.POSITION_BOUNDS.code
        if header.draw_counter:
            return Reason.DRAW_MISMATCH.code
        if header.shard or not 0 <= header.token < self.terms.vocab_size:
            return Reason.ID_RANGE.code
        return 0
