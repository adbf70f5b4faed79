"""The leader's links to the ranks of a "vocabulary" group as one session: a draft puts whole rows, each rank gets its range.

Between the `LeaderSession` of every rank's link and the draft, which sees one target. Does no I/O. A STEP is offered once every
rank has sent it; rank 0's budget bounds that wait, and what differs between ranks fails on all. SPEC section 4.

What the owner does: `join` and `part` as links come and go, `look` after every pass over them; then it reads `steps` and
`events` as of a `LeaderSession`. A rank whose link takes no more frames has `broken` set, as ever.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import pairwise
from typing import TYPE_CHECKING, Final

import numpy as np

from ..errors import LocalMisuse, PeerFault, Reason
from .leader import DEAD, DRAFTING, IDLE, SENT, Grant, LeaderSession
from .requests import RequestTable
from .shards import MASS, ranges

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..counters import Counters
    from ..memory import Memory, ReadMemory
    from .terms import SessionTerms

# What all STEPs of one slot generation must have in common, and the reason when they do not.
COMMON: Final = (
    ("request", Reason.REQUEST_MISMATCH),
    ("request_generation", Reason.GENERATION_STALE),
    ("round", Reason.ROUND_MISMATCH),
    ("depth", Reason.DEPTH_MISMATCH),
    ("anchor", Reason.CONTEXT_MISMATCH),
    ("context", Reason.CONTEXT_MISMATCH),
    ("representation", Reason.REPRESENTATION),
    ("support", Reason.SUPPORT_BOUNDS),
    ("seed", Reason.RANK_DISAGREE),
    ("temperature", Reason.CONTEXT_MISMATCH),
)


class Joined(Grant):
    """One slot of the whole group: as a `Grant`, once the STEPs of all ranks are here. `arrived` has a bit for each that is."""

    def __init__(self, slot: int, depth: int) -> None:
        super().__init__(slot, depth)
        self.arrived = 0
        self.failed = 0  # the code of the reason for which this generation can't be offered


class LeaderGroup:
    """The links of one group. `terms` are those of whole rows (no shard); `requests` is rank 0's table, whose word counts."""

    def __init__(self, terms: SessionTerms, size: int, counters: Counters, here: Sequence[int] | None = None) -> None:
        """`here`: the ranks whose links are this process's, rank 0 among them; the ranges of the others are sent by other ranks
        of a tensor-parallel draft."""
        self.terms = terms
        self.size = size
        self.here = tuple(range(size)) if here is None else tuple(here)
        self._all_here = sum(1 << rank for rank in self.here)
        self.ranges = ranges(terms.vocab_size, size)
        self.counters = counters
        self.sessions: dict[int, LeaderSession] = {}
        self.grants = [Joined(slot, terms.depth) for slot in range(terms.max_slots)]
        self.steps: list[Grant] = []
        self.events: list[tuple[str, int, object]] = []
        self.rows = 0
        self._empty = RequestTable()
        self._cut: dict[int, Memory] = {}  # by slot: sparse rows cut apart, until they are sent

    @property
    def complete(self) -> bool:
        """Whether the link of every rank that is here runs."""
        return len(self.sessions) == len(self.here)

    @property
    def requests(self) -> RequestTable:
        """The open requests, as rank 0 states them."""
        first = self.sessions.get(0)
        return first.requests if first is not None else self._empty

    # ---- links --------------------------------------------------------------------------------------------------

    def join(self, rank: int, session: LeaderSession) -> None:
        """A rank's link runs. Raises `LocalMisuse` for one whose shard is not that rank's range."""
        terms = session.terms
        if (terms.shard, terms.first_id, terms.end_id) != (rank, *self.ranges[rank]):
            raise LocalMisuse(f"rank {rank} has shard {terms.shard} of [{terms.first_id}, {terms.end_id})")
        self.sessions[rank] = session

    def part(self, rank: int) -> None:
        """A rank's link is gone: what was under way fails on the others."""
        self.sessions.pop(rank, None)
        for grant in self.grants:
            self._fail(grant, Reason.PEER_LOST)
            if rank == 0:
                grant.generation = 0  # rank 0's next session may be another life of it, whose generations start anew
        self.steps.clear()
        self.events.clear()

    # ---- what came ----------------------------------------------------------------------------------------------

    def look(self) -> None:
        """Takes new STEPs and events from every link."""
        for rank in list(self.sessions):
            session = self.sessions[rank]
            if session.events:
                events = session.events[:]
                session.events.clear()
                for kind, request, detail in events:
                    self._event(rank, kind, request, detail)
            if session.steps:
                steps = session.steps[:]
                session.steps.clear()
                for step in steps:
                    if step.state == DRAFTING:
                        self._arrived(rank, session, step)

    def _event(self, rank: int, kind: str, request: int, detail: object) -> None:
        """What rank 0 says goes to the draft; a reset of any rank ends what its request has under way."""
        told = rank == 0
        if kind in ("reset", "close"):
            for grant in self.grants:
                if grant.request == request and self._dead_somewhere(grant):
                    told = told or grant.state == DRAFTING
                    self._fail(grant, detail if isinstance(detail, Reason) else Reason.CANCELLED)
        if told and (rank == 0 or kind == "reset"):
            self.events.append((kind, request, detail))

    def _dead_somewhere(self, grant: Joined) -> bool:
        """Whether a rank that asked for this generation has given it up."""
        for rank, session in self.sessions.items():
            own = session.grants[grant.slot]
            if grant.arrived >> rank & 1 and own.generation == grant.generation and own.state == DEAD:
                return True
        return False

    def _arrived(self, rank: int, session: LeaderSession, step: Grant) -> None:
        joint = self.grants[step.slot]
        if step.generation < joint.generation:
            session.fail(step, step.generation, Reason.GENERATION_STALE)
            return
        if step.generation > joint.generation:
            self._fail(joint, Reason.GENERATION_STALE)
            self._begin(joint, step)
        elif joint.failed:
            session.fail(step, step.generation, Reason.from_code(joint.failed))
            return
        joint.arrived |= 1 << rank
        for name, reason in COMMON:
            if getattr(joint, name) != getattr(step, name):
                self.counters.refuse(reason)
                self._fail(joint, reason)
                return
        if joint.arrived == self._all_here:
            joint.state = DRAFTING
            self.steps.append(joint)

    def _begin(self, joint: Joined, step: Grant) -> None:
        for name, _reason in COMMON:
            setattr(joint, name, getattr(step, name))
        joint.generation = step.generation
        joint.target_context = step.target_context
        joint.budget_us = step.budget_us
        joint.trace_id = step.trace_id
        joint.received_ns = step.received_ns
        joint.state = IDLE
        joint.arrived = 0
        joint.failed = 0
        joint.rows = 0

    def _fail(self, joint: Joined, reason: Reason) -> None:
        """The generation is over on every link that has it still."""
        if joint.state == SENT or joint.failed or not joint.generation:
            return
        joint.state = DEAD
        joint.failed = reason.code
        for rank, session in self.sessions.items():
            own = session.grants[joint.slot]
            if joint.arrived >> rank & 1 and own.alive(joint.generation):
                self._guarded(session, own, reason)

    def _guarded(self, session: LeaderSession, own: Grant, reason: Reason) -> None:
        try:
            session.fail(own, own.generation, reason)
        except PeerFault as fault:  # it does not read: its link ends
            session.broken = fault.reason.code

    # ---- what the draft gives -----------------------------------------------------------------------------------

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """See `LeaderSession.fail`, on every rank."""
        if grant.alive(generation):
            self._fail(self.grants[grant.slot], reason)

    def put_row(
        self, grant: Grant, generation: int, position: int, token: int, entries: int, memory: Memory, offset: int, length: int
    ) -> bool:
        """See `LeaderSession.put_row`: a whole row, of which each rank is sent its range."""
        if grant.state in (DEAD, IDLE) or grant.generation != generation:
            return False
        if grant.state == SENT:
            raise LocalMisuse(f"slot {grant.slot}: all {grant.depth} rows are put already")
        if position != grant.anchor + 1 + grant.rows:
            raise LocalMisuse(f"position {position} out of order: the next one is {grant.anchor + 1 + grant.rows}")
        if grant.representation == 1:
            if entries != self.terms.vocab_size or length != self.terms.dense_row_bytes:
                raise LocalMisuse(f"a dense row is {self.terms.vocab_size} entries in {self.terms.dense_row_bytes} bytes")
            masses = self._masses(memory, offset, self.ranges)
            parts = self._dense_parts(offset, length)
        else:
            if not 1 <= entries <= grant.support or length != entries * 8:
                raise LocalMisuse(f"a sparse row is 1..{grant.support} entries of 8 bytes")
            cuts = self._cuts(memory, offset, entries)
            masses = self._masses(memory, offset, cuts)
            memory, parts = self._sparse_parts(grant, memory, offset, entries, cuts)
        self._send(self.grants[grant.slot], position, token, memory, parts, masses)
        return grant.state != DEAD

    def _send(
        self,
        joint: Joined,
        position: int,
        token: int,
        memory: ReadMemory,
        parts: Sequence[tuple[int, int, int]],
        masses: Sequence[int],
    ) -> None:
        before = 0
        for rank, (entries, offset, length) in enumerate(parts):
            if rank not in self.here:
                before += masses[rank]
                continue
            session = self.sessions[rank]
            own = session.grants[joint.slot]
            try:
                sent = session.put_shard(
                    own, joint.generation, position, token, entries, memory, offset, length, masses[rank], before
                )
            except PeerFault as fault:
                session.broken = fault.reason.code
                sent = False
            if not sent:
                self._fail(joint, Reason.PEER_LOST)
                return
            before += masses[rank]
        joint.rows += 1
        self.rows += 1
        if joint.rows == joint.depth:
            joint.state = SENT

    def _masses(self, memory: Memory, offset: int, cuts: Sequence[tuple[int, int]]) -> list[int]:
        """The sum of counts in each [first, end) of the values at `offset`. Raises `LocalMisuse` unless they are whole and 2^24
        in all: exact in FP64, since no partial sum of such values needs more than 25 bits."""
        values = np.frombuffer(memory, np.float32, cuts[-1][1], offset)
        sums = [float(values[first:end].sum(dtype=np.float64)) * MASS for first, end in cuts]
        if not all(0 <= each <= MASS and each.is_integer() for each in sums) or sum(sums) != MASS:
            raise LocalMisuse("the row's q does not sum to 1 in counts of 2^-24")
        return [int(each) for each in sums]

    def _dense_parts(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """(entries, offset, bytes) of every rank's range of a staged row. Edges are multiples of 128 bytes: none is copied."""
        ends = [4 * end for _first, end in self.ranges[:-1]] + [length]
        return [
            (end - first, offset + 4 * first, ends[rank] - 4 * first) for rank, (first, end) in enumerate(self.ranges)
        ]

    def _cuts(self, memory: Memory, offset: int, entries: int) -> list[tuple[int, int]]:
        """[first, end) of every rank's entries of a staged sparse row. (Of IDs that do not rise too: the ranks refuse those.)"""
        ids = memoryview(memory)[offset + 4 * entries : offset + 8 * entries].cast("B").cast("i")
        edges = [0, *(bisect_left(ids, end) for _first, end in self.ranges[:-1]), entries]
        return list(pairwise(edges))

    def _sparse_parts(
        self, grant: Grant, memory: Memory, offset: int, entries: int, cuts: Sequence[tuple[int, int]]
    ) -> tuple[Memory, list[tuple[int, int, int]]]:
        """Values and IDs of each rank side by side, in memory that stays until the slot's next generation."""
        room = self._cut.get(grant.slot)
        if room is None:
            room = self._cut[grant.slot] = bytearray(self.terms.depth * self.terms.support * 8)
        at = grant.rows * self.terms.support * 8
        source = memoryview(memory)
        parts = []
        for first, end in cuts:
            count = end - first
            room[at : at + 4 * count] = source[offset + 4 * first : offset + 4 * end]
            ids_at = offset + 4 * (entries + first)
            room[at + 4 * count : at + 8 * count] = source[ids_at : ids_at + 4 * count]
            parts.append((count, at, 8 * count))
            at += 8 * count
        return room, parts
