"""A listener's account of its connections, from event sequences alone: peers, failures, losses, reused descriptors."""

from __future__ import annotations

import pytest

from pp1q_transport.control_peers import ACCEPTED, DISCONNECTED, FAILED, FAILED_AUTH, SUCCEEDED, Connections
from pp1q_transport.counters import Counters

# What libzmq reports, and the peers, failures and losses that follow from it. A tuple (peer, descriptor) is a message.
ACCOUNTS: list[tuple[str, list[object], int, int, list[bytes]]] = [
    ("half-open", [(ACCEPTED, 5), (FAILED, 0), (DISCONNECTED, 5)], 0, 1, []),
    ("rubbish has no event of its own", [(ACCEPTED, 5), (DISCONNECTED, 5)], 0, 1, []),
    ("key refused", [(ACCEPTED, 5), (FAILED_AUTH, 400), (DISCONNECTED, 5)], 0, 1, []),
    ("silent peer", [(ACCEPTED, 5), (SUCCEEDED, 0)], 1, 0, []),
    ("silent peer goes", [(ACCEPTED, 5), (SUCCEEDED, 0), (DISCONNECTED, 5)], 0, 0, []),
    ("peer", [(ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5)], 1, 0, []),
    ("peer goes", [(ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5), (DISCONNECTED, 5)], 0, 0, [b"a"]),
    ("spoke and went before we looked", [(ACCEPTED, 5), (SUCCEEDED, 0), (DISCONNECTED, 5), (b"a", 5)], 0, 0, [b"a"]),
    (
        "spoke and went beside a silent peer",
        [(ACCEPTED, 6), (SUCCEEDED, 0), (ACCEPTED, 5), (SUCCEEDED, 0), (DISCONNECTED, 5), (b"a", 5), (b"b", 6)],
        1, 0, [b"a"],
    ),
    (
        "two spoke on one number before we looked",
        [(ACCEPTED, 5), (SUCCEEDED, 0), (DISCONNECTED, 5), (ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5), (b"b", 5)],
        1, 0, [b"a"],
    ),
    (
        "the descriptor's number is used again",
        [(ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5), (DISCONNECTED, 5), (ACCEPTED, 5), (SUCCEEDED, 0), (b"b", 5)],
        1, 0, [b"a"],
    ),
    (
        "the number is used again, and its second user is gone before we looked",
        [(ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5), (DISCONNECTED, 5), (ACCEPTED, 5), (SUCCEEDED, 0), (DISCONNECTED, 5),
         (b"b", 5)],
        0, 0, [b"a", b"b"],
    ),
    (
        "a failure while another peer is still silent",
        [(ACCEPTED, 5), (SUCCEEDED, 0), (ACCEPTED, 6), (DISCONNECTED, 6), (b"a", 5)],
        1, 1, [],
    ),
    (
        "a reported failure and a peer's end in between",
        [(ACCEPTED, 5), (SUCCEEDED, 0), (b"a", 5), (ACCEPTED, 6), (FAILED_AUTH, 400), (DISCONNECTED, 5),
         (DISCONNECTED, 6)],
        0, 1, [b"a"],
    ),
]  # fmt: skip


@pytest.mark.parametrize(("name", "events", "peers", "failed", "lost"), ACCOUNTS, ids=[case[0] for case in ACCOUNTS])
def test_connections_are_accounted_for(
    name: str, events: list[tuple[int | bytes, int]], peers: int, failed: int, lost: list[bytes]
) -> None:
    counters = Counters()
    connections = Connections(counters)
    for what, value in events:
        if isinstance(what, bytes):
            assert connections.seen(what, value, 8)
        else:
            connections.event(what, value)
    assert connections.drained() == lost
    assert len(connections) == peers
    assert counters.get("control_handshake_failed") == failed


def test_a_peer_beyond_the_bound_is_not_taken() -> None:
    connections = Connections(Counters())
    for descriptor, peer in ((5, b"a"), (6, b"b")):
        connections.event(ACCEPTED, descriptor)
        connections.event(SUCCEEDED, 0)
        assert connections.seen(peer, descriptor, 1) is (peer == b"a")
    assert connections.seen(b"a", 5, 1)
    connections.event(DISCONNECTED, 5)
    assert connections.drained() == [b"a"]
    assert connections.seen(b"b", 6, 1)
