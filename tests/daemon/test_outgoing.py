"""Records that wait for a client: kept in order, bounded by bytes and by time."""

from __future__ import annotations

from typing import cast

from pp1q_transport.daemon.outgoing import OWED_MOST_BYTES, STUCK_NS, Outgoing
from pp1q_transport.local import messages as m
from pp1q_transport.local.attach import Attached


class Shut:
    """A channel with room for so many records."""

    def __init__(self, room: int = 0) -> None:
        self.room = room
        self.sent: list[int] = []

    def send(self, kind: int, _fixed: bytes, _payload: bytes = b"") -> bool:
        if len(self.sent) >= self.room:
            return False
        self.sent.append(kind)
        return True

    def flush_bell(self) -> None:
        pass


class Client:
    def __init__(self, room: int = 0) -> None:
        self.channel = Shut(room)


def to(client: Client) -> Outgoing:
    return Outgoing(cast("Attached", client))


def test_records_wait_in_order() -> None:
    client = Client(1)
    outgoing = to(client)
    outgoing.send(m.UP, 1, 0, 0)
    outgoing.send(m.DOWN, 1, 0)
    client.channel.room = 2
    outgoing.send(m.BYE, 1, 0)
    assert client.channel.sent == [m.UP], "the later one does not overtake"
    assert outgoing.flush(1)
    assert client.channel.sent == [m.UP, m.DOWN]
    client.channel.room = 3
    assert outgoing.flush(2)
    assert (client.channel.sent, outgoing.owed_bytes) == ([m.UP, m.DOWN, m.BYE], 0)


def test_one_that_takes_nothing_is_stuck_after_its_time_and_not_before() -> None:
    client = Client()
    outgoing = to(client)
    outgoing.send(m.BYE, 1, 0)
    assert outgoing.flush(1)
    assert outgoing.flush(STUCK_NS)
    assert not outgoing.flush(STUCK_NS + 1)
    client.channel.room = 1
    assert outgoing.flush(STUCK_NS + 2)
    outgoing.send(m.BYE, 1, 0)
    assert outgoing.flush(2 * STUCK_NS + 2), "its time begins anew once it took something"


def test_what_is_owed_is_bounded_beyond_what_it_is_welcomed_with() -> None:
    outgoing = to(Client())
    tokens = bytes(4 << 20)

    def owe(bytes_more: int) -> None:
        for _ in range(bytes_more // len(tokens)):
            outgoing.send(m.COMMITTED_TOKENS, 1, 0, 0, 0, len(tokens) // 4, payload=tokens)

    owe(2 * OWED_MOST_BYTES)
    outgoing.owed_most += outgoing.owed_bytes  # as a port does after its welcome
    assert outgoing.flush(1)
    assert outgoing.flush(2)
    owe(OWED_MOST_BYTES // 2)
    assert outgoing.flush(3)
    owe(OWED_MOST_BYTES)
    assert not outgoing.flush(4)
