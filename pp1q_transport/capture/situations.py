"""Situations: out of a capture, STEPs that were open together and the frames that answered them, for trials to corrupt.

Between `reading` and `trial`. Takes whole, honest proposals only: a trial's own corruption is to be the only one. Bounded in
memory.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from .. import wire
from ..session.hello import Role
from ..wire import Header
from . import byspec, priming, records
from .oracle import Asked, Oracle, Terms
from .pcapng import CaptureError

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .reading import Record

BYTES_MOST: Final = 512 << 20
TOGETHER: Final = 2
"""Proposals that are open at once in a trial."""


@dataclass(slots=True)
class Answered:
    """A STEP and, in order, the frames that answered it."""

    asked: Asked
    frames: list[bytes]


@dataclass(slots=True)
class SessionOf:
    """One session of the capture: its state, and its whole proposals in the order of their STEPs."""

    state: priming.State
    terms: Terms
    whole: list[Answered] = field(default_factory=list)
    _open: dict[int, tuple[Asked, list[bytes]]] = field(default_factory=dict)
    _seeds: dict[int, int] = field(default_factory=dict)
    _header: Header = field(default_factory=Header)

    def take(self, record: Record, to_receiver: bool) -> int:
        """A frame of the session. Returns the bytes that were kept by it."""
        header = self._header
        if record.cut or len(record.data) < wire.HEADER_BYTES or header.decode(record.data, 0):
            return 0
        if not to_receiver:
            self._said(header)
            return 0
        if header.kind not in (wire.REPLY, wire.COMPLETION):
            return 0
        asked, frames = self._open.get(header.slot, (None, []))
        if asked is None or header.slot_generation != asked.generation:
            return 0
        frames.append(record.data)
        if header.kind != wire.COMPLETION:
            return 0
        del self._open[header.slot]
        return self._judge(asked, frames)

    def _said(self, header: Header) -> None:
        if header.kind == wire.OPEN:
            self._seeds[header.request] = header.seed
        elif header.kind == wire.STEP:
            seed = self._seeds.get(header.request, self.state.known.get(header.request))
            if seed is not None and 1 <= header.depth <= 32:
                self._open[header.slot] = (_asked(header, seed), [])

    def _judge(self, asked: Asked, frames: list[bytes]) -> int:
        """Keeps a proposal that the oracle takes, as it must every honest one."""
        proposal = Oracle(self.terms).judge([asked], b"".join(frames))[asked.slot]
        if not proposal.ready or len(frames) != asked.depth + 1:
            return 0
        originals = {frame: byspec.number(frame, byspec.COMMON["position"]) for frame in frames[:-1]}
        originals[frames[-1]] = 0
        self.whole.append(Answered(asked._replace(originals=originals), frames))
        return sum(map(len, frames))

    def together(self) -> list[list[Answered]]:
        """Proposals in different slots, `TOGETHER` at a time, each the first of one."""
        found = []
        for index, first in enumerate(self.whole):
            group = [first]
            for other in self.whole[index + 1 : index + 8]:
                if len(group) < TOGETHER and other.asked.slot not in [one.asked.slot for one in group]:
                    group.append(other)
            found.append(group)
        return found


def _asked(h: Header, seed: int) -> Asked:
    return Asked(
        h.slot, h.slot_generation, h.request, h.request_generation, h.round, h.position, h.depth, h.representation,
        h.support_policy, h.step_context(), seed, {},
    )  # fmt: skip


def situations(taken: Iterable[Record]) -> list[SessionOf]:
    """The sessions of a capture that have whole proposals. Raises `CaptureError` when none has, or none can be judged."""
    sessions: dict[int, SessionOf | None] = {}
    kept = 0
    for record in taken:
        if record.what == records.STATE:
            sessions[record.link] = _session(priming.State(records.parse_json(record.data)))
        elif record.what == records.FRAME:
            session = sessions.get(record.link)
            if session is not None and kept < BYTES_MOST:
                kept += session.take(record, record.incoming == (session.state.side is Role.RECEIVER))
    found = [session for session in sessions.values() if session is not None and session.whole]
    if not found:
        raise CaptureError(
            "no whole proposal of whole rows on a leader's link in this capture, so nothing to corrupt (no ranges of rows, no "
            "links between ranks: take rank 0's file in mode replicate)"
        )
    return found


def _session(state: priming.State) -> SessionOf | None:
    if not state.replayable:
        return None
    terms = priming.terms_in(state)
    if terms.sharded:
        return None
    return SessionOf(
        state,
        Terms(
            terms.session, terms.leader_nonce, terms.vocab_size, terms.max_slots, -(-terms.vocab_size * 4 // 64) * 64,
            terms.max_payload, terms.draw_proof,
        ),
    )  # fmt: skip
