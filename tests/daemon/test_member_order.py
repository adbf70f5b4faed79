"""The order in which a member's process hears what became of its rounds."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

from pp1q_transport.daemon.membership import MemberRank
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.member import MemberSession


def test_a_round_that_was_refused_comes_before_the_granted_one_after_it_when_both_came_in_one_look() -> None:
    """The leader was away for a round and is back: a member that was slow finds the refusal and the next outcome together."""
    rank = MemberRank.__new__(MemberRank)
    rank.outcomes = []
    slot = SimpleNamespace(state=st.READY, reason=0, request=1, request_generation=4, index=2, generation=9, round=6)
    session = SimpleNamespace(settled=[slot], refusals=[(1, 4, 5, Reason.PEER_LOST), (2, 4, 7, Reason.CANCELLED)])
    rank._collect(cast("MemberSession", session))
    assert [(request, outcome.round, outcome.reason) for request, outcome in rank.outcomes] == [
        (1, 5, Reason.PEER_LOST),
        (1, 6, None),
        (2, 7, Reason.CANCELLED),
    ]
    assert (session.settled, session.refusals) == ([], [])
