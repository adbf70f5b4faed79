"""Draft rank 0's links in one process with what follows them: reports, requests told in order, and what a rank may say."""

from __future__ import annotations

import time
from array import array
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.daemon.drafting import DraftRanks
from pp1q_transport.daemon.following import FollowedTarget
from pp1q_transport.daemon.leading import DraftPort
from pp1q_transport.engine import EngineConfig
from pp1q_transport.errors import Reason
from pp1q_transport.forming import Formed
from pp1q_transport.local import messages as m
from pp1q_transport.seating import Seats
from pp1q_transport.session.hello import Role, make_hello
from pp1q_transport.session.leader import DRAFTING, Grant, LeaderSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.terms import SessionTerms

pytestmark = pytest.mark.timeout(60)
R = Reason
WATCHDOG_S = 20.0
SIZES = {"vocab_size": 64, "support": 8, "depth": 3, "batch_requests": 1, "batches_in_flight": 2, "max_slots": 2}
TARGETS = ("a", "b")


class World:
    """Draft rank 0 for two targets, and rank 1."""

    def __init__(self) -> None:
        self.counters = Counters()
        self.lost: list[tuple[int, int, Reason]] = []
        self.leaders = []
        for _name in TARGETS:
            terms = SessionTerms(1, 2, 3, 64, 3, 8, 2)
            requests = RequestTable()
            self.leaders.append(SimpleNamespace(requests=requests, session=LeaderSession(terms, requests, Counters())))
        configs = [self.config(Role.DRAFT_LEADER, 1, name, listen="tcp://127.0.0.1:0") for name in TARGETS]
        self.ranks = DraftRanks(
            configs,
            self.leaders,  # type: ignore[arg-type]  # what is needed of them
            self.counters,
            lambda target, grant, reason: self.lost.append((target, grant.generation, reason)),
        )
        self.followers: list[FollowedTarget] = []

    @staticmethod
    def config(role: Role, nonce: int, target: str, **where: str) -> EngineConfig:
        rank = int(role is Role.DRAFT_PEER)
        hello = make_hello(role, nonce, group_size=2, rank=rank, target_identity=f"t at {target}", **SIZES)
        return EngineConfig(hello, stubborn=True, **where)  # type: ignore[arg-type]

    def follow(self, *names: str, attached: bool = True) -> None:
        for name in names:
            config = self.config(Role.DRAFT_PEER, 9, name, connect=self.ranks.endpoint)
            target = FollowedTarget(config, len(self.followers), name, None)
            target.attached = attached
            self.followers.append(target)

    def until(self, found: Callable[[], object], what: str) -> None:
        stop = time.monotonic() + WATCHDOG_S
        while not found():
            assert time.monotonic() < stop, what
            self.turn()

    def turn(self) -> None:
        for link in self.ranks.links:
            link.serve()
        self.ranks.flush()
        for target in self.followers:
            target.serve()
            target.flush()

    def open(self, number: int, tokens: list[int], target: int = 0) -> Request:
        request = Request(number, 7, tokens)
        self.leaders[target].requests.add(request)
        self.ranks.targets[target].opened(number, array("i", tokens))
        return request

    def grant(self, request: int, target: int = 0, generation: int = 1) -> Grant:
        """A STEP of a target, as its leader holds it."""
        grant: Grant = self.leaders[target].session.grants[0]
        grant.state, grant.generation, grant.request, grant.depth = DRAFTING, generation, request, 3
        known = self.ranks.targets[target].requests.get(request)
        grant.anchor = known.anchor if known is not None else 0
        grant.representation, grant.budget_us = wire.DENSE, 1000
        return grant

    def ready(self) -> None:
        self.until(lambda: all(link.ready for link in self.ranks.links), "both links")

    def close(self) -> None:
        for target in self.followers:
            target.close()
        self.ranks.close()


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.close()


def test_each_target_has_its_own_link_whatever_comes_first(world: World) -> None:
    world.follow("b", "a")
    world.ready()
    world.open(1, [5, 6])
    world.open(1, [8], target=1)
    b, a = world.followers
    world.until(lambda: a.session and b.session and a.session.stream and b.session.stream, "the requests")
    assert a.session is not None
    assert b.session is not None
    assert a.session.requests.get(1).tokens.tolist() == [5, 6]  # type: ignore[union-attr]
    assert b.session.requests.get(1).tokens.tolist() == [8]  # type: ignore[union-attr]


def test_a_rank_of_a_target_that_is_not_there_is_refused_and_the_others_go_on(world: World) -> None:
    world.follow("a", "c", "b")
    world.ready()
    world.until(lambda: world.counters.of(R.IDENTITY_MISMATCH), "the refusal")
    assert world.followers[1].session is None


def test_no_step_before_the_rank_says_that_it_can_follow(world: World) -> None:
    world.follow("a", "b", attached=False)
    world.until(lambda: all(link.session is not None for link in world.ranks.links), "links")
    world.open(1, [5])
    targets = world.ranks.targets
    assert targets[0].may_step(world.grant(1)) is R.PEER_LOST
    world.followers[0].attached = True
    world.until(lambda: targets[0].links[0].ready, "its word")
    assert targets[0].may_step(world.grant(1)) is None
    assert targets[1].may_step(world.grant(1, 1)) is R.PEER_LOST
    assert targets[0].step(world.grant(1))
    world.followers[0].attached = False
    world.until(lambda: world.lost, "the loss")
    assert world.lost == [(0, 1, R.PEER_LOST)]


def test_requests_are_told_as_of_their_place_in_the_stream(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    request = world.open(1, [5])
    world.turn()
    for tokens in ([6], [7, 8], [9]):  # all in one breath; the leader's own table has them all already
        request.extend(tokens)
    ranks = world.ranks.targets[0]
    for tokens in ([6], [7, 8]):
        ranks.committed(1, array("i", tokens))
    assert ranks.step(world.grant(1))
    ranks.committed(1, array("i", [9]))
    ranks.closed(1)
    follower = world.followers[0]
    world.until(lambda: follower.session and follower.session.stream and follower.session.stream[-1].kind == "close", "all")
    assert follower.session is not None
    assert [told.kind for told in follower.session.stream] == ["open", "commit", "commit", "step", "commit", "close"]
    assert (follower.session.stream[3].detail.anchor, world.counters.reasons) == (3, {})  # type: ignore[attr-defined]


def test_long_histories_of_many_requests_are_opened_little_by_little(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    numbers = range(1, 400)
    for number in numbers:
        world.open(number, [number % 64] * 9000)
    ranks = world.ranks.targets[0]
    grant = world.grant(numbers[-1])
    assert ranks.may_step(grant) is R.OVERLOAD, "its OPEN waits"
    ranks.committed(numbers[-1], array("i", [3]))  # travels with it
    ranks.closed(numbers[-2])  # nothing to close
    follower = world.followers[0]
    world.until(lambda: ranks.may_step(grant) is None, "all of them")
    world.until(lambda: follower.session and follower.session.requests.get(numbers[-1]), "the last one")
    assert follower.session is not None
    assert follower.session.requests.get(numbers[-1]).tokens[-2:].tolist() == [numbers[-1] % 64, 3]  # type: ignore[union-attr]
    assert follower.session.requests.get(numbers[-2]) is None
    assert world.ranks.links[0].engine.ended == 0


@pytest.mark.parametrize(
    "body",
    ({"ready": 1}, {"ready": True, "more": 1}, {}, {"rady": True}, {"busy": True}, {"ready": True, "busy": 1}),
    ids=str,
)
def test_a_report_that_is_none_costs_the_link(world: World, body: dict[str, object]) -> None:
    world.follow("a", "b")
    world.ready()
    world.followers[0].engine.send_control("report", body)
    world.until(lambda: world.ranks.links[0].engine.ended == 1, "the end")
    assert world.counters.of(R.MALFORMED) == 1
    assert world.ranks.links[1].engine.ended == 0


@pytest.mark.parametrize(
    "body",
    (
        {}, {"draining": 1}, {"ready": True}, {"draining": [], "more": 1}, {"draining": [[2, 1]]}, {"draining": [[-1, 1]]},
        {"draining": [[0]]}, {"draining": [[0, True]]}, {"draining": [0]}, {"draining": [[0, 1]] * 513},
    ),
    ids=lambda body: str(body)[:40],
)  # fmt: skip
def test_a_report_of_rank_0_that_is_none_costs_the_link(world: World, body: dict[str, object]) -> None:
    world.follow("a", "b")
    world.ready()
    world.ranks.links[0].engine.send_control("report", body)
    world.until(lambda: world.followers[0].engine.ended == 1, "the end")
    assert world.followers[0].counters.of(R.MALFORMED) == 1
    assert world.followers[1].engine.ended == 0


def test_a_drain_waits_for_a_rank_until_it_is_through_with_all_that_it_was_told_of(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    assert not world.ranks.busy
    grants = [world.grant(world.open(1, [5]).request), world.grant(world.open(1, [5], 1).request, 1)]
    for target, grant in enumerate(grants):
        assert world.ranks.targets[target].step(grant)
    world.ranks.drain()
    first, second = world.ranks.links
    assert first.busy
    assert second.busy, "it has not answered yet"
    for index in range(grants[0].depth):
        world.ranks.targets[0].token(grants[0], grants[0].anchor + 1 + index, 3)
    world.until(lambda: not first.busy, "the rank that has all tokens")
    assert second.busy
    world.ranks.targets[1].refused(0, 1, R.CANCELLED)
    world.until(lambda: not second.busy, "the other one")
    assert not world.ranks.busy


def test_a_rank_says_that_it_is_busy_until_it_has_heard_of_every_step(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    link, follower = world.ranks.links[0], world.followers[0]
    promised = Grant(1, 3)
    promised.generation = 4
    link.drain([promised])
    world.until(lambda: follower._said.get("busy"), "its word")
    for _ in range(20):
        world.turn()
    assert link.busy, "the control plane may be faster than the STEP"
    assert follower.session is not None
    follower.session.grants[1].generation = 4
    world.until(lambda: not link.busy, "its next word")
    link.drain([promised])
    follower.close()
    world.until(lambda: link.session is None, "the end of the link")
    assert not link.busy, "there is nobody to wait for"
    world.followers.remove(follower)


def test_the_port_of_rank_0_asks_the_ranks_and_waits_for_them() -> None:
    asked: list[str] = []
    port = DraftPort([], Counters())
    port.ranks = SimpleNamespace(busy=True, drain=lambda: asked.append("drain"))  # type: ignore[assignment]
    port.drain(1000, 0)
    assert (asked, port.busy) == (["drain"], True)
    port.ranks.busy = False  # type: ignore[misc, union-attr]
    assert not port.busy


def test_a_refusal_ends_the_proposal_of_that_generation_alone(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    world.open(1, [5])
    ranks, follower = world.ranks.targets[0], world.followers[0]
    assert ranks.step(world.grant(1, generation=4))
    ranks.refused(0, 3, R.CANCELLED)
    ranks.refused(1, 4, R.CANCELLED)
    assert world.lost == []
    world.until(lambda: follower.session and follower.session.grants[0].generation == 4, "the STEP")
    assert follower.session is not None
    follower.fail(follower.session.grants[0], 4, R.COPY_FAILED)
    world.until(lambda: world.lost, "the refusal")
    assert world.lost == [(0, 4, R.COPY_FAILED)]


def test_the_links_end_with_the_targets_session_since_slots_may_count_anew(world: World) -> None:
    world.follow("a", "b")
    world.ready()
    world.open(1, [5])
    ranks, follower = world.ranks.targets[0], world.followers[0]
    assert ranks.step(world.grant(1, generation=9))
    world.until(lambda: follower.session and follower.session.grants[0].generation == 9, "the STEP")
    world.leaders[0].requests.end_session()
    ranks.ended()
    assert world.lost == [], "the target itself gave it up"
    world.until(lambda: ranks.links[0].engine.formed == 2 and ranks.links[0].ready, "a new link")
    world.open(1, [5])
    assert ranks.step(world.grant(1, generation=1))
    world.until(lambda: follower.session and follower.session.grants[0].generation == 1, "the STEP of the next life")
    assert world.ranks.links[1].engine.ended == 0


@pytest.mark.parametrize(
    ("position", "token", "order"),
    ((11, 5, ["token", "flush", "row"]), (12, 5, ["row"]), (11, 64, ["row"]), (11, -1, ["row"])),
)
def test_a_token_is_on_its_way_before_its_row_and_only_if_it_can_be_one(position: int, token: int, order: list[str]) -> None:
    seen: list[str] = []
    grant = Grant(0, 3)
    grant.state, grant.generation, grant.anchor, grant.depth = DRAFTING, 1, 10, 3

    def nothing(*_anything: object) -> None:
        """A part that this test does not look at."""

    def put_row(*_row: object) -> bool:
        seen.append("row")  # which a real session judges
        return True

    leader = SimpleNamespace(
        target=0,
        session=SimpleNamespace(grants=[grant], terms=SimpleNamespace(vocab_size=64, session=9), put_row=put_row),
        region=SimpleNamespace(memory=bytearray(64)),
        row_place=lambda _slot, _row: (bytearray(4096), 0),
        on_open=nothing, on_commit=nothing, on_reset=nothing, on_close=nothing,
    )  # fmt: skip
    port = DraftPort([leader], Counters())  # type: ignore[list-item]
    port.ranks = SimpleNamespace(  # type: ignore[assignment]
        targets=[SimpleNamespace(token=lambda *_told: seen.append("token"))], flush=lambda: seen.append("flush")
    )
    port.take(m.PUT, (9, 0, 0, 1, position, token, 1, 8, 0), memoryview(b""), 0)
    assert seen == order


def test_a_seat_that_was_just_given_is_taken_in_the_eyes_of_the_others() -> None:
    """What its peer says before its engine's next look is for it, and no other peer gets the seat."""
    busy: list[set[int]] = []
    events = [[Formed(SimpleNamespace(), SimpleNamespace(seat=1))], [], [], []]  # type: ignore[arg-type]

    def poll(_now_ns: int, taken: set[int]) -> list[Formed]:
        busy.append(set(taken))
        return events[len(busy) - 1]

    forming = SimpleNamespace(poll=poll, seat_for=lambda agreement: agreement.seat)
    seats = Seats(forming, (1, 2))  # type: ignore[arg-type]
    assert len(seats.poll(1, 0, busy=False)) == 1
    seats.poll(2, 0, busy=False)
    seats.poll(1, 0, busy=False)  # its engine could not make a session of it
    assert busy == [set(), {1}, set()]
