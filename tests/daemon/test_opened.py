"""OPEN, CLOSE, OPEN of one ID in one look: who hears of it hears of one request, with its own facts."""

from __future__ import annotations

from array import array

import pytest

from pp1q_transport.counters import Counters
from pp1q_transport.daemon.leading import DraftPort, ServedLeader
from pp1q_transport.daemon.leading_group import ServedGroup
from pp1q_transport.daemon.opened import lasting
from pp1q_transport.engine import EngineConfig
from pp1q_transport.errors import Reason
from pp1q_transport.local import messages as m
from pp1q_transport.session.hello import Role, make_hello
from pp1q_transport.session.leader import LeaderSession
from pp1q_transport.session.requests import Request
from pp1q_transport.session.terms import SessionTerms

SIZES = {"vocab_size": 128, "support": 8, "depth": 3, "batch_requests": 1, "batches_in_flight": 2, "max_slots": 2}
LONG, SHORT = array("i", range(1, 21)), array("i", [1, 2])


@pytest.mark.parametrize(
    ("events", "kept"),
    (
        ("", ""),
        ("o1 c1", ""),
        ("c1 o1", "c1 o1"),
        ("c1 o1 c1 o1", "c1 o1"),
        ("o1 k1 r1 c1 o1 k1", "o1 k1"),
        ("o1 o2 k1 c1 k2", "o2 k2"),
        ("k1 c1", "k1 c1"),
        ("o1 c1 c1", "c1"),
    ),
)
def test_what_lasts(events: str, kept: str) -> None:
    kinds = {"o": "open", "c": "close", "k": "commit", "r": "reset"}
    seen = lasting([(kinds[one[0]], int(one[1]), None) for one in events.split()])
    assert " ".join(next(key for key, name in kinds.items() if name == kind) + str(request) for kind, request, _ in seen) == kept


def served(grouped: bool) -> tuple[ServedLeader | ServedGroup, LeaderSession]:
    config = EngineConfig(make_hello(Role.LEADER, 1, **SIZES), listen="tcp://127.0.0.1:0", stubborn=True)  # type: ignore[arg-type]
    leader: ServedLeader | ServedGroup
    if grouped:
        hello = make_hello(Role.LEADER, 1, group_size=2, group_mode="vocabulary", **SIZES)  # type: ignore[arg-type]
        config = EngineConfig(hello, listen="tcp://127.0.0.1:0", stubborn=True)
        group = ServedGroup([config], ["a"], 0)
        session = LeaderSession(SessionTerms(9, 1, 2, 128, 3, 8, 2, shard=0, first_id=0, end_id=64), group.requests, Counters())
        group.came(0, session)
        leader = group
    else:
        leader = ServedLeader(config, 0, "a")
        session = LeaderSession(SessionTerms(9, 1, 2, 128, 3, 8, 2), leader.requests, Counters())
        leader.session = session
    return leader, session


@pytest.mark.parametrize("grouped", (False, True))
def test_an_id_that_was_opened_twice_in_one_look_has_the_second_ones_tokens(grouped: bool) -> None:
    leader, session = served(grouped)
    port = DraftPort([leader], Counters())
    sent: list[tuple[int, tuple[object, ...], bytes]] = []
    port.send = lambda kind, *fields, payload=b"": sent.append((kind, fields, payload))  # type: ignore[method-assign]
    session.requests.add(Request(1, 10, SHORT, 12, 0))
    session.events += [
        ("open", 1, LONG), ("reset", 1, Reason.CANCELLED), ("commit", 1, SHORT), ("close", 1, None), ("open", 1, SHORT),
    ]  # fmt: skip
    leader.collect()
    assert sent == [(m.OPENED, (1, 10, 0, 12, 0, 2), SHORT.tobytes())]
    if isinstance(leader, ServedLeader):
        leader.session = None  # which no engine made
    leader.close()
