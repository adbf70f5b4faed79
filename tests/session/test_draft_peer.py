"""A draft of several ranks over simulated links: peers follow the leader token by token, and draw nothing."""

from __future__ import annotations

from array import array
from collections.abc import Callable

import pytest

from pp1q_transport import wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.counters import Counters
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.links.sim import SimLink, sim_pair
from pp1q_transport.session.draft_peer import DraftLeaderSession, DraftPeerSession
from pp1q_transport.session.leader import DRAFTING, SENT, Grant
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.terms import SessionTerms
from pp1q_transport.wire import Header

R = Reason
PEER, LEADER = 0x1111, 0x2222
PROMPT = (5, 6, 7)


class Pair:
    """The leader's end and one peer."""

    def __init__(self, rank: int, requests: RequestTable, seed: int = 0, largest: int = 0) -> None:
        self.terms = SessionTerms(50 + rank, PEER + rank, LEADER, 64, 3, 8, 2)
        self.counts = Counters()
        self.leader = DraftLeaderSession(self.terms, requests, Counters())
        self.peer = DraftPeerSession(self.terms, RequestTable(), self.counts)
        self.links: tuple[SimLink, SimLink] = sim_pair(
            self.leader, self.leader.outbox, self.peer, self.peer.outbox, seed, largest
        )
        self.ended: Reason | None = None

    def run(self) -> None:
        while self.ended is None:
            moved = 0
            for link in self.links:
                got = link.pump(0)
                if got < 0:
                    self.ended = Reason.from_code(-got)
                    return
                moved += got
            if not moved:
                return

    def send(self, header: Header, payload: bytes = b"") -> None:
        """A frame made by hand from the leader."""
        header.boot_nonce = self.terms.receiver_nonce
        header.session = self.terms.session
        header.payload_length = len(payload)
        if payload:
            header.payload_digest = xxh3_64(payload, 0, len(payload), header.payload_seed(self.terms.leader_nonce))
        self.leader.outbox.frame(header, payload, 0, len(payload), -1)
        self.run()


def steps_of(peer: DraftPeerSession) -> list[Grant]:
    """Those it was told and not asked about yet."""
    return [one.detail for one in peer.stream if isinstance(one.detail, Grant)]


def tokens_of(peer: DraftPeerSession) -> list[tuple[int, ...]]:
    """(generation, position, token) of each that it was told."""
    return [one.detail[1:] for one in peer.stream if one.kind == "token"]  # type: ignore[index]


class Draft:
    """A leader that drafts for one target, with two peers. The grant is what its `LeaderSession` would have."""

    def __init__(self, seed: int = 0, largest: int = 0) -> None:
        self.requests = RequestTable()
        self.pairs = [Pair(rank, self.requests, seed, largest) for rank in (1, 2)]
        self.request = Request(1, 77, PROMPT)
        self.requests.add(self.request)
        self.each(lambda leader: leader.open(self.request))

    def each(self, act: Callable[[DraftLeaderSession], None]) -> None:
        for pair in self.pairs:
            act(pair.leader)
            pair.run()

    def grant(self, generation: int = 1, round_number: int = 0) -> Grant:
        grant = Grant(0, 3)
        grant.state = DRAFTING
        grant.generation, grant.request, grant.round, grant.depth, grant.seed = generation, 1, round_number, 3, 77
        grant.anchor = self.request.anchor
        grant.request_generation = self.request.generation
        grant.representation, grant.budget_us, grant.temperature = wire.DENSE, 1000, 0.5
        h = Header()
        h.prefix_low, h.prefix_high = self.request.prefix_low, self.request.prefix_high
        h.target_context, h.temperature, h.support_policy, h.representation = 0, 0.5, 0, wire.DENSE
        grant.context = h.step_context()
        self.each(lambda leader: leader.step(grant))
        return grant


@pytest.mark.parametrize(("seed", "largest"), ((0, 0), (5, 37)))
def test_peers_have_each_token_before_the_next_row(seed: int, largest: int) -> None:
    draft = Draft(seed, largest)
    for round_number in range(4):
        grant = draft.grant(1 + round_number, round_number)
        drawn = []
        for position in range(grant.anchor + 1, grant.anchor + 4):
            token = (position * 7) % 64
            drawn.append(token)
            draft.each(lambda leader, g=grant, p=position, t=token: leader.token(g, p, t))  # type: ignore[misc]
            for pair in draft.pairs:
                assert [one[2] for one in tokens_of(pair.peer)] == drawn, "known before the next row is computed"
        for pair in draft.pairs:
            (step,) = steps_of(pair.peer)
            assert (step.anchor, step.depth, step.temperature, step.context) == (grant.anchor, 3, 0.5, grant.context)
            assert pair.peer.grants[0].state == SENT
            assert {one[0] for one in tokens_of(pair.peer)} == {step.generation} == {1 + round_number}
            pair.peer.stream.clear()
        fresh = array("i", [*drawn[:2], 9])
        draft.request.extend(fresh)
        draft.each(lambda leader, t=fresh: leader.commit(draft.request, t))  # type: ignore[misc]
    for pair in draft.pairs:
        theirs = pair.peer.requests.get(1)
        assert theirs is not None
        assert theirs.tokens == draft.request.tokens
        assert (pair.ended, pair.counts.reasons) == (None, {})


def test_a_peer_hears_everything_in_its_order() -> None:
    draft = Draft()
    pair = draft.pairs[0]
    first = draft.grant()
    for position in (3, 4, 5):
        pair.leader.token(first, position, position)
    draft.request.extend([3, 9])
    pair.leader.commit(draft.request, array("i", [3, 9]))
    draft.grant(2, 1)
    pair.leader.reset(draft.grant(3, 2), R.TIMEOUT)
    pair.leader.close(1)
    pair.run()
    kinds = [one.kind for one in pair.peer.stream]
    assert kinds == ["open", "step", "token", "token", "token", "commit", "step", "step", "reset", "close"]
    assert [(step.generation, step.anchor) for step in steps_of(pair.peer)] == [(1, 2), (2, 4), (3, 4)]


def test_a_peer_never_draws() -> None:
    draft = Draft()
    grant = draft.grant()
    peer = draft.pairs[0].peer
    own = peer.grants[0]
    with pytest.raises(LocalMisuse, match="its leader does"):
        peer.put_row(own, 1, grant.anchor + 1, 0, 64, bytearray(256), 0, 256)
    assert peer.outbox.empty()


def test_a_reset_ends_what_a_peer_follows_and_late_tokens_are_dropped() -> None:
    draft = Draft()
    grant = draft.grant()
    draft.each(lambda leader: leader.token(grant, 3, 4))
    draft.each(lambda leader: leader.reset(grant, R.TIMEOUT))
    draft.each(lambda leader: leader.token(grant, 4, 4))
    draft.request.discard()
    after = draft.grant(2, 1)
    draft.each(lambda leader: leader.token(grant, 4, 4))
    draft.each(lambda leader: leader.token(after, 3, 8))
    for pair in draft.pairs:
        assert tokens_of(pair.peer) == [(1, 3, 4), (2, 3, 8)]
        assert pair.counts.of(R.GENERATION_STALE) == 2
        assert ("reset", 1, (0, 1, R.TIMEOUT)) in pair.peer.stream
        assert pair.ended is None


def test_a_peer_that_can_not_follow_says_so() -> None:
    draft = Draft()
    draft.grant()
    pair = draft.pairs[1]
    pair.peer.fail(pair.peer.grants[0], 1, R.CANCELLED)
    pair.peer.fail(pair.peer.grants[0], 1, R.CANCELLED)
    pair.run()
    assert pair.leader.refused == [(0, 1, R.CANCELLED)]


def test_a_peer_with_another_prefix_refuses_the_step() -> None:
    draft = Draft()
    theirs = draft.pairs[0].peer.requests.get(1)
    assert theirs is not None
    theirs.extend([9])
    draft.request.extend([8])
    draft.grant()
    assert draft.pairs[0].leader.refused == [(0, 1, R.CONTEXT_MISMATCH)]


@pytest.mark.parametrize(
    ("change", "reason"),
    (
        ({"slot": 2}, R.SLOT_BOUNDS),
        ({"slot_generation": 2}, R.SLOT_STATE),
        ({"request": 2}, R.REQUEST_MISMATCH),
        ({"request_generation": 1}, R.GENERATION_STALE),
        ({"round": 1}, R.ROUND_MISMATCH),
        ({"context": 1}, R.CONTEXT_MISMATCH),
        ({"position": 2}, R.POSITION_BOUNDS),
        ({"position": 4}, R.POSITION_BOUNDS),
        ({"draw_counter": 1}, R.DRAW_MISMATCH),
        ({"token": -1}, R.ID_RANGE),
        ({"token": 64}, R.ID_RANGE),
        ({"shard": 1}, R.ID_RANGE),
    ),
    ids=str,
)
def test_a_token_that_is_wrong_costs_the_link(change: dict[str, int], reason: Reason) -> None:
    draft = Draft()
    grant = draft.grant()
    h = Header()
    h.clear()
    h.kind = wire.TOKEN
    h.request, h.slot, h.slot_generation, h.position, h.token = 1, 0, 1, 3, 5
    h.draw_counter, h.context = 0, grant.context
    for name, value in change.items():
        setattr(h, name, value)
    pair = draft.pairs[0]
    pair.send(h)
    assert (pair.ended, tokens_of(pair.peer)) == (reason, [])


@pytest.mark.parametrize("kind", (wire.REPLY, wire.COMPLETION, wire.GRANT, wire.PROOF))
def test_no_other_kind_reaches_a_peer(kind: int) -> None:
    draft = Draft()
    h = Header()
    h.clear()
    h.kind = kind
    draft.pairs[0].send(h)
    assert draft.pairs[0].ended is R.UNEXPECTED_KIND


def test_a_peer_sends_the_leader_a_status_or_nothing() -> None:
    wrong = ((wire.REPLY, 1, R.UNEXPECTED_KIND), (wire.STATUS, 0, R.RESERVED_BITS), (wire.STATUS, 999, R.RESERVED_BITS))
    for kind, status, reason in wrong:
        pair = Draft().pairs[0]
        h = pair.peer.blank(kind)
        h.subject, h.status, h.first_id, h.end_id, h.shard_mass, h.mass_before = 0, status, 0, 0, 0, 0
        pair.peer.outbox.frame(h, None, 0, 0, -1)
        pair.run()
        assert pair.ended is reason


def test_a_step_of_a_request_that_is_not_open_is_misuse() -> None:
    draft = Draft()
    draft.requests.remove(1)
    with pytest.raises(LocalMisuse, match="not open"):
        draft.pairs[0].leader.step(Grant(0, 3))


def test_engines_take_the_places_of_a_draft_group() -> None:
    from pp1q_transport.engine import EngineConfig
    from pp1q_transport.session.hello import Role, check, make_hello

    leader = make_hello(Role.DRAFT_LEADER, 1, group_size=3)
    EngineConfig(leader, listen="tcp://127.0.0.1:0")
    for rank in (1, 2):
        peer = make_hello(Role.DRAFT_PEER, 2, group_size=3, rank=rank, link_nonce=bytes([rank] * 16))
        EngineConfig(peer, connect="tcp://127.0.0.1:1")
        check(leader, peer)
    with pytest.raises(ConfigError, match="rank 0 of a draft_peer"):
        EngineConfig(make_hello(Role.DRAFT_PEER, 2, group_size=3), connect="tcp://127.0.0.1:1")
    with pytest.raises(PeerFault):
        check(leader, make_hello(Role.DRAFT_PEER, 2, group_size=3, link_nonce=bytes([1] * 16)))
    with pytest.raises(ConfigError, match="group_size of 2"):
        EngineConfig(make_hello(Role.DRAFT_LEADER, 2), listen="tcp://127.0.0.1:0")
