"""A draft rank's own link to the target: the target's STEP and rank 0's word of it, in either order, and what does not fit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.daemon.sharing import OwnShare
from pp1q_transport.engine import EngineConfig
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.session.hello import Role, make_hello
from pp1q_transport.session.leader import DEAD, DRAFTING, SENT, Grant, LeaderSession
from pp1q_transport.session.requests import RequestTable
from pp1q_transport.session.terms import SessionTerms

R = Reason
DEPTH = 3
TOKENS = [5, 70, 9]
SIZES = {"vocab_size": 128, "support": 8, "depth": DEPTH, "batch_requests": 1, "batches_in_flight": 2, "max_slots": 2}
FIELDS = {
    "request": 1, "request_generation": 2, "round": 3, "depth": DEPTH, "anchor": 10, "context": 77, "seed": 8,
    "representation": wire.SPARSE, "support": 8, "temperature": 0.5,
}  # fmt: skip


class World:
    """One share with a session that a test plays the target of."""

    def __init__(self) -> None:
        hello = make_hello(Role.LEADER, 1, group_size=2, group_mode="vocabulary", rank=1, **SIZES)
        self.share = OwnShare(EngineConfig(hello, listen="tcp://127.0.0.1:0", stubborn=True), "a")
        terms = SessionTerms(5, 1, 2, 128, DEPTH, 8, 2, shard=1, first_id=64, end_id=128)
        self.session = LeaderSession(terms, RequestTable(), Counters())
        self.share.session = self.session
        self.refused: list[tuple[int, Reason]] = []
        self.share.on_refused = lambda _grant, generation, reason: self.refused.append((generation, reason))

    def own_step(self, generation: int = 1, noticed: bool = True, **changes: object) -> Grant:
        """The target's STEP came in; `noticed`: the share has had its turn since."""
        own = self.session.grants[0]
        fill(own, generation, changes)
        self.session.steps.append(own)
        if noticed:
            self.share.serve()
        return own

    def word(self, generation: int = 1, **changes: object) -> tuple[Grant, Reason | None]:
        """Rank 0's word of a STEP."""
        grant = Grant(0, 0)
        fill(grant, generation, changes)
        return grant, self.share.begin(grant)

    def put(self, grant: Grant, *indexes: int) -> None:
        for index in indexes:
            self.share.put(grant, TOKENS, 11 + index, 1, 8, 1000, 500)


def fill(grant: Grant, generation: int, changes: dict[str, object]) -> None:
    for name, value in (FIELDS | changes).items():
        setattr(grant, name, value)
    grant.generation, grant.state, grant.rows = generation, DRAFTING, 0


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    yield made
    made.share.session = None
    made.share.close()


def test_the_targets_step_first(world: World) -> None:
    own = world.own_step()
    grant, reason = world.word()
    assert reason is None
    world.put(grant, 0, 1)
    assert (own.rows, own.state, world.share.whole_sent) == (2, DRAFTING, 0)
    world.put(grant, 2)
    assert (own.state, world.share.whole_sent, world.share.bytes_sent, world.share.rows_done()) == (SENT, 1, 24, 3)


def test_rank_0s_word_first_and_rows_wait(world: World) -> None:
    grant, reason = world.word()
    assert reason is None
    world.put(grant, 0, 1, 2)
    assert world.session.rows == 0
    own = world.own_step()
    assert (own.state, world.session.rows, world.refused) == (SENT, 3, [])


def test_a_step_that_came_in_unnoticed_does_not_let_a_row_overtake_another(world: World) -> None:
    grant, _reason = world.word()
    world.put(grant, 0)
    own = world.own_step(noticed=False)
    world.put(grant, 1, 2)
    assert own.state == SENT
    world.share.serve()
    assert world.refused == []


@pytest.mark.parametrize("first", (True, False), ids=("step first", "word first"))
@pytest.mark.parametrize(
    ("change", "reason"),
    (
        ({"request": 2}, R.REQUEST_MISMATCH),
        ({"request_generation": 3}, R.GENERATION_STALE),
        ({"round": 4}, R.ROUND_MISMATCH),
        ({"depth": 2}, R.DEPTH_MISMATCH),
        ({"anchor": 9}, R.CONTEXT_MISMATCH),
        ({"context": 78}, R.CONTEXT_MISMATCH),
        ({"representation": wire.DENSE}, R.REPRESENTATION),
        ({"support": 7}, R.SUPPORT_BOUNDS),
        ({"seed": 9}, R.RANK_DISAGREE),
        ({"temperature": 1.0}, R.CONTEXT_MISMATCH),
    ),
    ids=str,
)
def test_two_words_that_differ_end_it(world: World, change: dict[str, object], reason: Reason, first: bool) -> None:
    if first:
        own = world.own_step(**change)
        assert world.word()[1] is reason
    else:
        assert world.word()[1] is None
        own = world.own_step(**change)
        assert world.refused == [(1, reason)]
    assert own.state == DEAD


def test_what_rank_0_ended_is_answered_at_once_whenever_it_comes(world: World) -> None:
    grant, _reason = world.word()
    world.put(grant, 0)
    world.share.reset(0, 1, R.COPY_FAILED)
    own = world.own_step()
    assert (own.state, world.session.rows, world.session.counters.of(R.COPY_FAILED)) == (DEAD, 0, 1)
    world.put(grant, 1)  # of a proposal that is over: dropped
    grant, reason = world.word(2)
    own = world.own_step(2)
    world.put(grant, 0, 1, 2)
    assert (reason, own.state) == (None, SENT)


def test_a_lost_link_to_rank_0_ends_what_is_under_way_and_nothing_later(world: World) -> None:
    own = world.own_step(7)
    world.word(7)
    world.share.reset(1, 50, R.TIMEOUT)
    world.share.forget(R.PEER_LOST)
    assert own.state == DEAD
    own = world.own_step(1)  # the target's next life counts anew
    assert own.state == DRAFTING


def test_what_this_rank_can_not_follow(world: World) -> None:
    world.own_step(3)
    assert world.word(2)[1] is R.GENERATION_STALE
    world.session.grants[0].state = DEAD
    assert world.word(3)[1] is R.CANCELLED
    world.share.session = None
    assert world.word(4)[1] is R.PEER_LOST
    world.share.session = world.session


def test_rows_missing_after_the_last_token_are_given_up_too(world: World) -> None:
    own = world.own_step()
    grant, _reason = world.word()
    world.put(grant, 0)
    world.share.give_up(R.PEER_LOST)
    assert (own.state, world.session.counters.of(R.PEER_LOST)) == (DEAD, 1)
    world.put(grant, 1)
    assert world.session.rows == 1


@pytest.mark.parametrize("there", (True, False), ids=("step there", "step to come"))
def test_what_no_honest_process_puts(world: World, there: bool) -> None:
    if there:
        world.own_step()
    grant, _reason = world.word()
    with pytest.raises(LocalMisuse, match="out of order"):
        world.put(grant, 1)
    with pytest.raises(LocalMisuse, match="no token yet"):
        world.share.put(grant, TOKENS[:1], 12, 1, 8, 1000, 500)
    with pytest.raises(LocalMisuse, match="no token yet"):
        world.put(grant, -1)
    with pytest.raises(LocalMisuse, match="exceed 2"):
        world.share.put(grant, TOKENS, 11, 1, 8, 1 << 24, 1)
    for entries, length in ((9, 72), (1, 16), (3, 999)):
        with pytest.raises(LocalMisuse, match="sparse row"):
            world.share.put(grant, TOKENS, 11, entries, length, 1000, 500)


@pytest.mark.parametrize(("entries", "length"), ((63, 256), (64, 999), (8, 64)))
def test_a_dense_row_of_another_size_is_refused_before_the_targets_step_came(world: World, entries: int, length: int) -> None:
    grant, _reason = world.word(representation=wire.DENSE)
    with pytest.raises(LocalMisuse, match="dense row is 64 entries"):
        world.share.put(grant, TOKENS, 11, entries, length, 1000, 500)
    world.share.put(grant, TOKENS, 11, 64, world.session.terms.dense_row_bytes, 1000, 500)
    world.own_step(representation=wire.DENSE)
    assert world.session.rows == 1


def test_a_row_that_turns_out_to_be_none_ends_its_proposal_and_not_the_daemon(world: World) -> None:
    grant, _reason = world.word()
    world.share.put(grant, [200], 11, 1, 8, 1000, 500)  # a token outside the vocabulary, as nobody can say: the session judges it
    own = world.own_step()
    assert (own.state, world.refused, world.share.counters.of(R.LENGTH_BOUNDS)) == (DEAD, [(1, R.CANCELLED)], 1)


def test_a_row_of_a_generation_that_moved_on_is_dropped(world: World) -> None:
    old, _reason = world.word(1)
    world.word(2)
    world.put(old, 0)
    world.own_step(2)
    assert world.session.rows == 0


def test_a_row_of_a_step_that_the_target_gave_up_is_dropped_before_rank_0_says_so(world: World) -> None:
    world.own_step(1)
    grant, _reason = world.word(1)
    world.put(grant, 0)
    own = world.own_step(2)
    world.put(grant, 1, 2)
    grant, reason = world.word(2)
    world.put(grant, 0, 1, 2)
    assert (reason, own.state, world.session.rows) == (None, SENT, 4)


def test_busy_from_rank_0s_word_until_the_last_row_went_out(world: World) -> None:
    assert not world.share.busy
    grant, _reason = world.word()
    assert world.share.busy, "the target's own STEP is still to come"
    world.put(grant, 0, 1)
    own = world.own_step()
    assert (own.state, world.share.busy) == (DRAFTING, True)
