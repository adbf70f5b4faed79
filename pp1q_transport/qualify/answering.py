"""The leader's hot loop: all rows of one STEP, staged and drawn beforehand, digested, framed and handed to the link.

Between `leading`, which waits for STEPs, and the session and link of one run. Chooses no row and draws no token that the plan
foresaw; for a STEP of a later generation (after a discard) it asks the source to draw now. SPEC section 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..errors import PeerFault, Reason
from ..links.stream import StreamLink
from ..session.leader import Grant, LeaderSession

if TYPE_CHECKING:
    from .source import Source

ALONE_FROM_BYTES: Final = 4096  # a smaller row costs more in a send of its own than behind the others
_ALONE_FROM_BYTES: Final = ALONE_FROM_BYTES  # a C integer in the compiled build


class Answerer:
    """Puts the rows of `source` for the STEPs of one session; `base` is where the run's request IDs begin."""

    def __init__(self, source: Source, session: LeaderSession, link: StreamLink, base: int) -> None:
        self.source = source
        self.session: LeaderSession = session
        self.link: StreamLink = link
        self.base: int = base
        self.slots: int = source.plan.slots
        self.depth: int = source.plan.depth
        self.representation: int = source.plan.representation_code
        self.memory = source.memory
        self.offsets = source.offsets
        self.lengths = source.lengths
        self.entries = source.entries
        self.tokens = source.tokens
        self.starts = source.starts
        self.indexes = source.indexes
        self.requests: int = len(source.indexes)

    def answer(self, grant: Grant, gap_ns: int) -> int:
        """Puts every row of a STEP, `gap_ns` apart, and pumps; returns when the last one was staged (ns; 0 without a gap).

        Raises `PeerFault(request_unknown)` for a STEP that is not of this plan.
        """
        number = grant.request - self.base
        if number < 0 or number >= self.requests or self.indexes[number] < 0:
            raise PeerFault(Reason.REQUEST_UNKNOWN, f"a STEP of request {grant.request}, which is not of this plan")
        at = self.starts[number] + grant.round * self.depth
        if grant.depth != self.depth or grant.representation != self.representation:
            raise PeerFault(Reason.DEPTH_MISMATCH, f"a STEP of depth {grant.depth} that is not of this plan")
        row = (self.indexes[number] + grant.round) % self.slots * self.depth
        if grant.request_generation or at + self.depth > self.starts[number + 1]:
            return self._put(grant, row, self._draw_now(grant, row), 0, gap_ns)
        return self._put(grant, row, self.tokens, at, gap_ns)

    def _put(self, grant: Grant, row: int, tokens: memoryview[int], at: int, gap_ns: int) -> int:
        generation = grant.generation
        first = grant.anchor + 1
        start_ns = monotonic_ns() if gap_ns else 0
        now_ns = start_ns
        for position in range(self.depth):
            while gap_ns and now_ns < start_ns + position * gap_ns:
                self.link.pump(now_ns)
                now_ns = monotonic_ns()
            here = row + position
            self.session.put_row(
                grant, generation, first + position, tokens[at + position], self.entries[here], self.memory,
                self.offsets[here], self.lengths[here],
            )  # fmt: skip
            if gap_ns or self.lengths[here] >= _ALONE_FROM_BYTES:
                self.link.pump(now_ns)
        self.link.pump(now_ns)
        return now_ns

    def _draw_now(self, grant: Grant, row: int) -> memoryview[int]:
        return self.source.draw_all(row, grant.seed, grant.request_generation, grant.round, grant.anchor + 1)
