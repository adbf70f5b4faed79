"""Exchanges at rank 0: it hears the part of every rank, and once all are in and fit, tells every rank.

Between `hub` (epochs and group links) and `exchanges`, the machine that judges. Does no I/O: frames go into outboxes. SPEC
sections 4, 6 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..errors import LocalMisuse, PeerFault, Reason
from .exchange_frames import send_part
from .exchanges import Exchanges

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..counters import Counters
    from ..wire import Header
    from .machine import SessionMachine
    from .parts import Part


class GroupLinks(Protocol):
    """What a `RankGroup` is to its exchanges."""

    counters: Counters

    @property
    def epoch(self) -> int:
        """The number of the present epoch."""

    @property
    def links(self) -> Mapping[int, SessionMachine]:
        """The group links that are up, by rank."""


class GroupExchanges:
    """All exchanges of one rank group, over its epochs. `done`: complete ones (the parts of all ranks, in order), for the owner
    to take. Counted: `exchanges`."""

    def __init__(self, group: GroupLinks, size: int) -> None:
        self.done: list[list[Part]] = []
        self._group = group
        self._size = size
        self._machine: Exchanges | None = None  # once a member's link says how large the vocabulary is

    def said(self, rank: int) -> int:
        """How many parts of `rank` are in: the number of its next one."""
        return self._machine.said(rank) if self._machine is not None else 0

    def begin(self) -> None:
        """An epoch opens."""
        vocab_size = next(iter(self._group.links.values())).terms.vocab_size
        self._machine = Exchanges(self._size, 0, vocab_size)
        self._machine.begin()

    def end(self) -> None:
        """The epoch is over: what is complete and was not taken is for nobody."""
        self.done.clear()
        if self._machine is not None:
            self._machine.end()

    def own(self, part: Part) -> None:
        """Rank 0's own part. Raises `LocalMisuse` outside an open epoch and out of turn, `PeerFault` for one that doesn't fit."""
        if self._machine is None:
            raise LocalMisuse("no exchange before every rank is up")
        self._complete(self._machine.own(part))

    def heard(self, rank: int, link: SessionMachine, header: Header, part: Part) -> None:
        """The part of the rank behind `link`; one of an epoch that is over is dropped and counted. Raises `PeerFault`."""
        group = self._group
        if header.epoch < group.epoch:
            group.counters.refuse(Reason.GENERATION_STALE)
            return
        if header.epoch > group.epoch or group.links.get(rank) is not link:
            raise PeerFault(Reason.RANK_DISAGREE, f"rank {rank} exchanges in epoch {header.epoch}, this is {group.epoch}")
        if self._machine is None:
            raise PeerFault(Reason.SLOT_STATE, f"an exchange of rank {rank} before any epoch was open")
        self._complete(self._machine.heard(part))

    def _complete(self, parts: list[Part]) -> None:
        if not parts:
            return
        for rank, link in self._group.links.items():
            for part in parts:
                if part.rank != rank:
                    send_part(link, self._group.epoch, part)
        self._group.counters.add("exchanges")
        self.done.append(parts)
