"""A draft of three ranks over TCP: HELLO, proof and link of the draft roles, tokens at every peer before the next is drawn."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.engine import Engine, EngineConfig
from pp1q_transport.forming import Forming
from pp1q_transport.seating import Seats
from pp1q_transport.session.draft_peer import DraftLeaderSession, DraftPeerSession
from pp1q_transport.session.hello import Role, make_hello
from pp1q_transport.session.leader import DRAFTING, SENT, Grant
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.terms import SessionTerms

pytestmark = pytest.mark.timeout(60)
WATCHDOG_S = 20.0
SIZES = {"vocab_size": 64, "support": 8, "depth": 3, "batch_requests": 1, "batches_in_flight": 2, "max_slots": 2}


class Rank:
    """One end of one draft link."""

    def __init__(self, config: EngineConfig, requests: RequestTable, seat: object = None) -> None:
        self.requests = requests
        self.kind = DraftLeaderSession if config.hello.role is Role.DRAFT_LEADER else DraftPeerSession
        self.session: DraftLeaderSession | DraftPeerSession | None = None
        self.engine = Engine(config, self._make, lambda: None, self._down, Counters(), forming=seat)  # type: ignore[arg-type]

    def _make(self, terms: SessionTerms) -> DraftLeaderSession | DraftPeerSession:
        self.session = self.kind(terms, self.requests, self.engine.counters)
        return self.session

    def _down(self, _reason: object) -> None:
        self.session = None


class Draft:
    """The leader's end of each link and the peers, all in this process."""

    def __init__(self) -> None:
        config = EngineConfig(
            make_hello(Role.DRAFT_LEADER, 1, group_size=3, **SIZES), listen="tcp://127.0.0.1:0", stubborn=True
        )
        self.requests = RequestTable()
        forming = Forming(config.hello, config.listen, None, None, Counters(), False, True, None, stubborn=True)
        self.seats = Seats(forming, (1, 2))
        self.leaders = [Rank(config, self.requests, self.seats.seat(rank)) for rank in (1, 2)]
        self.peers = [
            Rank(
                EngineConfig(
                    make_hello(Role.DRAFT_PEER, 1 + rank, group_size=3, rank=rank, **SIZES),
                    connect=forming.endpoint,
                    stubborn=True,
                ),
                RequestTable(),
            )
            for rank in (1, 2)
        ]

    def until(self, found: object, what: str) -> None:
        stop = time.monotonic() + WATCHDOG_S
        while not found():  # type: ignore[operator]
            assert time.monotonic() < stop, what
            for rank in (*self.leaders, *self.peers):
                rank.engine.poll()

    def close(self) -> None:
        for rank in (*self.peers, *self.leaders):
            rank.engine.close()
        self.seats.close()


@pytest.fixture
def draft() -> Iterator[Draft]:
    made = Draft()
    yield made
    made.close()


def test_tokens_reach_every_peer(draft: Draft) -> None:
    draft.until(lambda: all(rank.session is not None for rank in (*draft.leaders, *draft.peers)), "links")
    links = [rank.session for rank in draft.leaders]
    peers = [rank.session for rank in draft.peers]
    request = Request(1, 77, (5, 6, 7))
    draft.requests.add(request)
    grant = Grant(0, 3)
    grant.state, grant.generation, grant.request, grant.anchor, grant.depth = DRAFTING, 1, 1, 2, 3
    grant.representation, grant.budget_us, grant.seed = wire.DENSE, 1000, 77
    header = wire.Header()
    header.prefix_low, header.prefix_high = request.prefix_low, request.prefix_high
    header.target_context, header.temperature, header.support_policy = 0, 1.0, 0
    header.representation = wire.DENSE
    grant.context = header.step_context()
    for link in links:
        assert isinstance(link, DraftLeaderSession)
        link.open(request)
        link.step(grant)
    for position, token in ((3, 11), (4, 12), (5, 13)):
        for link in links:
            assert isinstance(link, DraftLeaderSession)
            link.token(grant, position, token)
        draft.until(
            lambda p=position: all(
                peer.stream and peer.stream[-1].kind == "token" and peer.stream[-1].detail[2] == p  # type: ignore[union-attr,index]
                for peer in peers
            ),
            "the token at every peer",
        )
    for peer in peers:
        assert isinstance(peer, DraftPeerSession)
        assert [one.detail[3] for one in peer.stream if one.kind == "token"] == [11, 12, 13]  # type: ignore[index]
        assert (peer.grants[0].state, peer.grants[0].seed) == (SENT, 77)
