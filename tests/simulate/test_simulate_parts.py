"""The simulator's parts by themselves: plans of faults, the account of outcomes, landing memory, the run without transport."""

from __future__ import annotations

import pytest

from pp1q_transport import wire
from pp1q_transport.errors import ConfigError
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.simulate.faults import ALL_KINDS, MS, PICKS, Fault, FaultKind, parse_kinds, plan
from pp1q_transport.simulate.journal import HARMLESS, NOT_REACHED, SUPERSEDED, Journal, Outcomes, Violation
from pp1q_transport.simulate.lanes import LandingMemory, flipped, frames_of
from pp1q_transport.simulate.models import PROMPT, Book, Models


def fault(number: int = 0, kind: FaultKind = FaultKind.DROP) -> Fault:
    return Fault(number, kind, 1, 2, 3, 4)


# --- plans ---


def test_a_plan_is_its_seed() -> None:
    assert plan(1, 400) == plan(1, 400)
    assert plan(1, 400) != plan(2, 400)


def test_a_shorter_plan_is_a_longer_ones_beginning() -> None:
    """So that the numbers of a shrunk run's faults name the same faults."""
    whole = plan(5, 400)
    assert plan(5, 150) == tuple(each for each in whole if each.round < 150)


def test_fewer_kinds_leave_the_others_where_they_were() -> None:
    kinds = {FaultKind.DROP, FaultKind.CUT}
    fields = [(each.kind, each.round, each.pick, each.place, each.delay_ns) for each in plan(6, 500, kinds, 3.0)]
    whole = plan(6, 500, ALL_KINDS, 3.0)
    assert fields == [(each.kind, each.round, each.pick, each.place, each.delay_ns) for each in whole if each.kind in kinds]


def test_a_plan_stays_in_its_bounds() -> None:
    for each in plan(7, 300, factor=5.0):
        assert 0 <= each.round < 300
        assert 0 <= each.pick < PICKS
        assert 0 <= each.place < PICKS
        assert 0 <= each.delay_ns < 2 * MS


def test_kinds_by_name() -> None:
    assert parse_kinds("all") == ALL_KINDS
    assert parse_kinds("none") == frozenset()
    assert parse_kinds("drop, late-write") == {FaultKind.DROP, FaultKind.LATE_WRITE}
    with pytest.raises(ConfigError, match="rain"):
        parse_kinds("drop,rain")


# --- outcomes ---


def test_a_fault_has_one_outcome() -> None:
    outcomes = Outcomes(Journal())
    injection = outcomes.arm(fault())
    outcomes.end(injection, "timeout")
    with pytest.raises(Violation, match="exactly one outcome"):
        outcomes.end(injection, HARMLESS)


def test_a_fault_happens_once() -> None:
    outcomes = Outcomes(Journal())
    injection = outcomes.arm(fault())
    outcomes.begin(injection)
    with pytest.raises(Violation, match="exactly one outcome"):
        outcomes.begin(injection)


def test_the_first_end_of_what_is_watched_counts() -> None:
    outcomes = Outcomes(Journal())
    injection = outcomes.arm(fault())
    outcomes.begin(injection)
    outcomes.watch("proposal", injection)
    outcomes.watch("link", injection)
    outcomes.over("proposal", "mass")
    outcomes.over("link", "peer_lost")
    assert injection.outcome == "mass"


def test_another_faults_doing_supersedes() -> None:
    outcomes = Outcomes(Journal())
    mine, other = outcomes.arm(fault(0, FaultKind.CUT)), outcomes.arm(fault(1, FaultKind.DELAY))
    for injection in (mine, other):
        outcomes.begin(injection)
        outcomes.watch("link", injection)
    outcomes.over("link", "peer_lost", frozenset({FaultKind.CUT}))
    assert (mine.outcome, other.outcome) == ("peer_lost", SUPERSEDED)


def test_what_nothing_came_of_is_harmless_and_what_never_came_is_no_fault() -> None:
    outcomes = Outcomes(Journal())
    outcomes.begin(outcomes.arm(fault(0)))
    outcomes.arm(fault(1))
    assert outcomes.close() == {("drop", HARMLESS): 1, ("drop", NOT_REACHED): 1}


def test_a_flip_of_which_nothing_comes_is_a_violation() -> None:
    outcomes = Outcomes(Journal())
    outcomes.begin(outcomes.arm(fault(0, FaultKind.FLIP)))
    with pytest.raises(Violation, match="nothing has come of"):
        outcomes.close()


def test_the_journal_digests_what_it_does_not_keep() -> None:
    kept, lost = Journal(keep=True), Journal()
    for journal in (kept, lost):
        for number in range(2000):
            journal.note(f"event {number}")
    assert kept.digest() == lost.digest()
    assert kept.kept == [f"event {number}" for number in range(2000)]
    lost.note("one more")
    assert kept.digest() != lost.digest()


# --- landing memory and frames ---


def test_landing_memory_refuses_an_old_key() -> None:
    landing = LandingMemory(2)
    assert landing.write(1, 0, 1, b"first")
    landing.keys[1] += 1
    assert not landing.write(1, 0, 1, b"late")
    assert landing.rows[1, 0] == b"first"
    assert landing.write(1, 0, 2, b"second")


def test_frames_are_cut_where_they_end_and_one_bit_flips() -> None:
    outbox, header = Outbox(), wire.Header()
    for length in (0, 4, 40):
        header.clear()
        header.kind = wire.OPEN
        header.payload_length = length
        outbox.frame(header, bytes(length) if length else None, 0, length, -1)
    piece = outbox.front()
    assert piece is not None
    frames = frames_of(bytes(memoryview(outbox.buffer)[: piece.head_length]))
    assert [len(frame) for frame in frames] == [128, 132, 168]
    for place in (0, 1, PICKS // 2, PICKS - 1):
        changed = flipped(frames[2], place)
        bits = sum((one ^ two).bit_count() for one, two in zip(changed, frames[2], strict=True))
        assert bits == 1


# --- the run without transport ---


@pytest.mark.parametrize("representation", (wire.DENSE, wire.SPARSE))
def test_a_book_replays(representation: int) -> None:
    models, book = Models(), Book(77, representation)
    for round_number in range(12):
        if round_number % 4 == 3:
            book.add(wire.TARGET_ONLY, 1, round_number, 0, [models.alone(book, 1, round_number)])
        else:
            book.add(wire.VERIFIED, 0, round_number, 3, models.without_transport(book, 0, round_number, 3))
    assert models.replay(book) == book.tokens
    book.tokens[len(PROMPT) + 2] ^= 1
    assert models.replay(book) != book.tokens
