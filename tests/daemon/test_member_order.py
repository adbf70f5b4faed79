"""The order in which a member's process hears what became of its rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

import pytest

from pp1q_transport.counters import Counters
from pp1q_transport.daemon.membership import MemberPort, MemberRank, Outcome
from pp1q_transport.errors import Reason
from pp1q_transport.local import messages as m
from pp1q_transport.session.group import Phase
from pp1q_transport.session.group_member import Member

if TYPE_CHECKING:
    from pp1q_transport.local.attach import Attached
    from pp1q_transport.session.slots import SlotTable


class Port(MemberPort):
    """A member's port whose process is a list of what it was told, and whose rank is a real `Member` without links."""

    def __init__(self) -> None:
        rank = MemberRank.__new__(MemberRank)
        rank.outcomes, rank.session, rank.member = [], None, Member(1, 2)
        rank.table = cast("SlotTable", SimpleNamespace(slots=()))
        super().__init__(rank, Counters())
        self.told: list[tuple[object, ...]] = []
        self.attached = cast("Attached", object())

    def send(self, kind: int, *fields: object, payload: bytes = b"") -> bool:
        self.told.append((kind, *fields))
        return True

    def open_epoch(self, number: int) -> None:
        """Rank 0 asks, we agree, it opens; the daemon looks in between."""
        member = self.rank.member
        for phase in (Phase.GATHERING, Phase.ASKING):
            member.announced(number, phase)
            self.report(0)
        member.agree()
        member.announced(number, Phase.OPEN)
        self.report(0)

    def hear(self, round_number: int) -> None:
        """Rank 0 refused a round of request 1."""
        self.rank.outcomes.append((1, Outcome(Reason.PEER_LOST, 0, 0, 3, round_number)))
        self.report(0)


@pytest.mark.parametrize("detached", (False, True))
def test_what_crossed_our_leaving_meets_no_step_of_the_next_epoch(detached: bool) -> None:
    """The process left its daemon and was back at once, or the daemon left by itself; rank 0 did not know it yet and its words on
    the old epoch came after that. Kept for later, they made the ranks differ by one round for as long as the epoch lasted."""
    port = Port()
    member = port.rank.member
    member.link_up(77)
    port.open_epoch(1)
    member.leave()
    if detached:
        port.give_back()
        port.attached = cast("Attached", object())
        port.welcome(0)
    else:
        port.report(0)
    port.hear(5)  # of epoch 1
    port.open_epoch(2)
    port.told.clear()
    port.take(m.STEP, (1, 31, 0, 0, 1.0, 3, 6), memoryview(b""), 0)
    assert port.told == [], "the STEP waits for the first outcome of its own epoch"
    port.hear(6)
    assert port.told == [(m.DISCARDED, 1, 31, Reason.PEER_LOST.code, 6, 3, 0)]


def test_within_an_epoch_what_comes_before_its_step_waits_for_it() -> None:
    port = Port()
    port.rank.member.link_up(77)
    port.open_epoch(1)
    port.hear(5)
    port.told.clear()
    port.take(m.STEP, (1, 31, 0, 0, 1.0, 3, 5), memoryview(b""), 0)
    assert port.told == [(m.DISCARDED, 1, 31, Reason.PEER_LOST.code, 5, 3, 0)]


def test_a_round_that_rank_0_refused_while_the_ranks_agree_meets_no_step_of_the_epoch_they_open() -> None:
    """Rank 0's process was stalled when the epoch ended, and stepped before it heard of that: its daemon refuses the STEP and
    tells every rank, which by then is asked for its state."""
    port = Port()
    member = port.rank.member
    member.link_up(77)
    port.open_epoch(1)
    member.announced(2, Phase.ASKING)
    port.report(0)
    port.hear(5)
    member.agree()
    member.announced(2, Phase.OPEN)
    port.report(0)
    port.told.clear()
    port.take(m.STEP, (1, 31, 0, 0, 1.0, 3, 6), memoryview(b""), 0)
    assert port.told == []
