"""Replay: the frames of a capture, judged again by fresh sessions, on the capture's own clock.

Between `reading` and `pp1q replay`. Puts the sessions of one file together; `link_replay` and `group_replay` say how each is fed.
SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..counters import Counters
from ..session.group import MAX_RANKS
from . import draft_replay, group_state, priming, records
from .link_replay import Link, LinkReplay, Outcome
from .member_replay import MemberReplay
from .pcapng import CaptureError
from .rank0_replay import Rank0Replay

if TYPE_CHECKING:
    from collections.abc import Iterable

    from .group_replay import GroupReplay
    from .reading import Record


class Replay:
    """A whole capture."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self._links: dict[int, Link | None] = {}
        self._groups: dict[tuple[str, int], GroupReplay] = {}
        self._accounts: dict[int, Counters] = {}
        self._start: dict[int, tuple[dict[str, int], dict[str, int]]] = {}

    def run(self, taken: Iterable[Record]) -> Outcome:
        """Replays records in order. Raises `CaptureError`."""
        for record in taken:
            if record.what == records.STATE:
                self._begin(record)
                continue
            if record.link not in self._links:
                raise CaptureError("a frame before the state of its session")
            link = self._links[record.link]
            if link is None:
                continue
            if record.what == records.FRAME:
                link.take(record)
            else:
                link.end(records.parse_json(record.data), record.time_ns)
                self._done(record.link, link)
        for number, link in list(self._links.items()):
            if link is not None:
                self._done(number, link)
        return self._account()

    def _begin(self, record: Record) -> None:
        if record.link in self._links:
            raise CaptureError("two states of one session")
        state = priming.State(records.parse_json(record.data))
        why = _why_not(state)
        if why:
            self._links[record.link] = None
            name = f"{state.side.value} with {state.peer.value}: {why}"
            self.outcome.skipped[name] = self.outcome.skipped.get(name, 0) + 1
            return
        counters = self._accounts.setdefault(state.account, Counters())
        if not any(link is not None and link.counters is counters for link in self._links.values()):
            # What was counted while no session of this account ran, or before the file began, is no frame's.
            start = self._start.setdefault(state.account, ({}, {}))
            for before, ours, live in zip(start, (counters.reasons, counters.discards), state.counted[:2], strict=True):
                for name, count in live.items():
                    before[name] = before.get(name, 0) + count - ours.get(name, 0)
                    ours[name] = count
        self.outcome.sessions += 1
        taken = sum(link.slot_bytes for link in self._links.values() if link is not None)
        self._links[record.link] = self._link(state, counters, record.time_ns, taken)

    def _link(self, state: priming.State, counters: Counters, now_ns: int, taken: int) -> Link:
        if state.replayable and state.group is None:
            session = priming.fresh_receiver(state, counters, now_ns, taken)
            return LinkReplay(state, counters, self.outcome, session)
        if state.group is None:
            return draft_replay.link(state, counters, self.outcome)
        group = _group_of(self._groups, state)
        return group.link(state, counters, now_ns, self.outcome, taken)

    def _done(self, number: int, link: Link) -> None:
        self.outcome.ready += link.ready
        self._links[number] = None

    def _account(self) -> Outcome:
        outcome = self.outcome
        for account, counters in self._accounts.items():
            totals = (outcome.reasons, outcome.discards)
            for total, now, before in zip(totals, (counters.reasons, counters.discards), self._start[account], strict=True):
                for name, count in now.items():
                    if count > before.get(name, 0):
                        total[name] = total.get(name, 0) + count - before.get(name, 0)
        outcome.refused = sum(outcome.reasons.values())
        outcome.discarded = sum(outcome.discards.values())
        return outcome


def _why_not(state: priming.State) -> str:
    """Why a session is not replayed; empty when it is."""
    if state.replayable:
        return ""
    if state.side in draft_replay.ROLES:
        return draft_replay.why_not(state)
    return "the file does not say where the group stood" if state.group is None else ""


def _group_of(known: dict[tuple[str, int], GroupReplay], state: priming.State) -> GroupReplay:
    """The group that the session belongs to, a new one with the first of its sessions. Raises `CaptureError`."""
    ours = state.agreement.ours
    assert state.group is not None
    at = state.group.get("at")
    if at not in (group_state.RANK_0, group_state.MEMBER) or not 2 <= ours.group_size <= MAX_RANKS:
        raise CaptureError("the state of a group that can't be")
    key = (at, ours.rank)
    if key not in known:
        known[key] = Rank0Replay(state) if at == group_state.RANK_0 else MemberReplay(state)
    return known[key]
