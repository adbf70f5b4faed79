"""The breaker: when it opens, what a probe does, what never counts, and that it can't stay shut for ever."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.session.breaker import (
    LINK_LOST,
    NOBODYS_FAULT,
    TRANSITIONS,
    Breaker,
    BreakerEvent,
    BreakerState,
    diagram,
)

S = 1_000_000_000
CLOSED, OPEN, PROBING = BreakerState.CLOSED, BreakerState.OPEN, BreakerState.PROBING


def make(discards: int = 3, seed: int = 1, window_ns: int = 0) -> Breaker:
    return Breaker(discards, S, 8 * S, seed, window_ns)


def opened(discards: int = 3, seed: int = 1) -> Breaker:
    breaker = make(discards, seed)
    for _ in range(discards):
        breaker.discarded(Reason.TIMEOUT, S, breaker.may_step(S))
    assert breaker.state is OPEN
    return breaker


def first_admitted_ns(breaker: Breaker, from_ns: int, step_ns: int = S // 1000) -> int:
    now_ns = from_ns
    while not breaker.may_step(now_ns):
        now_ns += step_ns
    return now_ns


def test_opens_at_exactly_that_many_in_a_row() -> None:
    breaker = make(3)
    for _ in range(2):
        breaker.discarded(Reason.TIMEOUT, 1, breaker.may_step(1))
    assert breaker.state is CLOSED
    breaker.ready(breaker.may_step(1))
    for _ in range(2):
        breaker.discarded(Reason.TIMEOUT, 1, breaker.may_step(1))
        assert breaker.may_step(1)
    breaker.discarded(Reason.PAYLOAD_DIGEST, 1, breaker.may_step(1))
    assert breaker.state is OPEN
    assert not breaker.may_step(2)
    assert (breaker.opened, breaker.refused) == (1, 1)


@pytest.mark.parametrize("reason", sorted(NOBODYS_FAULT | LINK_LOST))
def test_what_says_nothing_about_the_peer_never_opens_it(reason: Reason) -> None:
    breaker = make(2)
    for _ in range(20):
        breaker.discarded(reason, 1, breaker.may_step(1))
    assert breaker.state is CLOSED
    breaker.discarded(Reason.TIMEOUT, 1)
    breaker.discarded(reason, 1)  # and does not break a row of discards either
    breaker.discarded(Reason.TIMEOUT, 1)
    assert breaker.state is OPEN


def test_every_other_reason_counts() -> None:
    for reason in set(Reason) - NOBODYS_FAULT - LINK_LOST:
        breaker = make(1)
        breaker.discarded(reason, 1, breaker.may_step(1))
        assert breaker.state is OPEN, reason


def test_discards_that_lie_too_far_apart_do_not_count_together() -> None:
    breaker = make(3, window_ns=10 * S)
    for now_ns in (0, 6 * S, 12 * S, 18 * S):
        breaker.discarded(Reason.TIMEOUT, now_ns, breaker.may_step(now_ns))
    assert breaker.state is CLOSED
    breaker.discarded(Reason.TIMEOUT, 22 * S, breaker.may_step(22 * S))
    assert breaker.state is OPEN  # 12, 18 and 22


def test_one_probe_passes_and_its_success_closes() -> None:
    breaker = opened()
    at_ns = first_admitted_ns(breaker, S)
    assert S + S // 2 <= at_ns <= 2 * S + S // 1000
    assert breaker.state is PROBING
    assert not breaker.may_step(at_ns + 1)
    breaker.ready(breaker.turn)
    assert breaker.state is CLOSED
    assert breaker.may_step(at_ns + 2)


def test_failed_probes_double_the_wait_up_to_the_most() -> None:
    breaker = opened()
    now_ns = S
    for whole_s in (1, 2, 4, 8, 8, 8):
        at_ns = first_admitted_ns(breaker, now_ns)
        assert whole_s * S // 2 <= at_ns - now_ns <= whole_s * S + S // 1000
        now_ns = at_ns
        breaker.discarded(Reason.TIMEOUT, now_ns, breaker.turn)
        assert breaker.state is OPEN
    assert breaker.opened == 1
    now_ns = first_admitted_ns(breaker, now_ns)
    breaker.ready(breaker.turn)
    for _ in range(3):
        breaker.discarded(Reason.TIMEOUT, now_ns, breaker.may_step(now_ns))
    assert first_admitted_ns(breaker, now_ns) - now_ns <= S + S // 1000  # a success starts small again


@pytest.mark.parametrize("reason", sorted(LINK_LOST))
def test_a_link_lost_under_a_probe_fails_it(reason: Reason) -> None:
    breaker = opened()
    now_ns = first_admitted_ns(breaker, S)
    breaker.discarded(reason, now_ns, breaker.turn)
    assert breaker.state is OPEN
    assert not breaker.may_step(now_ns)


def test_a_withdrawn_probe_is_followed_by_another_at_once() -> None:
    breaker = opened()
    now_ns = first_admitted_ns(breaker, S)
    breaker.discarded(Reason.CANCELLED, now_ns, breaker.turn)
    assert breaker.state is OPEN
    assert breaker.may_step(now_ns)
    assert breaker.state is PROBING


def test_what_was_sent_before_it_opened_says_nothing_about_the_probe() -> None:
    breaker = make(2)
    early = [breaker.may_step(1) for _ in range(5)]
    for turn in early[:2]:
        breaker.discarded(Reason.TIMEOUT, 1, turn)
    assert breaker.state is OPEN
    breaker.ready(early[2])
    breaker.discarded(Reason.TIMEOUT, 1, early[3])
    assert breaker.state is OPEN
    first_admitted_ns(breaker, 1)
    breaker.ready(early[4])
    assert breaker.state is PROBING
    breaker.ready(breaker.turn)
    assert breaker.state is CLOSED
    breaker.discarded(Reason.TIMEOUT, 9 * S, early[4])
    breaker.discarded(Reason.TIMEOUT, 9 * S, early[4])
    assert breaker.state is CLOSED


def test_a_probe_nothing_is_heard_of_is_followed_by_another() -> None:
    breaker = opened()
    now_ns = first_admitted_ns(breaker, S)
    lost = breaker.turn
    now_ns = first_admitted_ns(breaker, now_ns)
    assert breaker.state is PROBING
    breaker.ready(lost)
    assert breaker.state is PROBING
    breaker.ready(breaker.turn)
    assert breaker.state is CLOSED


def test_breakers_of_other_seeds_do_not_probe_in_step() -> None:
    waits = {first_admitted_ns(opened(seed=seed), S) for seed in range(20)}
    assert len(waits) > 10
    assert first_admitted_ns(opened(seed=5), S) == first_admitted_ns(opened(seed=5), S)


@pytest.mark.parametrize("limits", ((0, 1, 1), (1, 0, 1), (1, 2, 1), (1, 1, 1, 1, -1)))
def test_impossible_limits_are_misuse(limits: tuple[int, ...]) -> None:
    with pytest.raises(LocalMisuse):
        Breaker(*limits, *([1] if len(limits) == 3 else []))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(("step", "ready", "discard", "late")),
            st.integers(0, 3 * S),
            st.sampled_from((Reason.TIMEOUT, Reason.CANCELLED, Reason.PEER_LOST)),
        ),
        max_size=200,
    )
)
def test_whatever_happens_a_step_passes_within_the_most(events: list[tuple[str, int, Reason]]) -> None:
    breaker, now_ns, turns = make(2), 0, [1]
    for what, later_ns, reason in events:
        now_ns += later_ns
        if what == "step":
            turn = breaker.may_step(now_ns)
            turns += [turn] if turn else []
            assert turn in (0, breaker.turn)
        elif what == "ready":
            breaker.ready(turns[-1])
        else:
            breaker.discarded(reason, now_ns, turns[0 if what == "late" else -1])
    assert breaker.may_step(now_ns + 8 * S)


def test_the_table_is_whole() -> None:
    """Every state can be entered and left, and no event is dead."""
    assert {start for start, _ in TRANSITIONS} == set(BreakerState)
    assert set(TRANSITIONS.values()) == set(BreakerState)
    assert {event for _, event in TRANSITIONS} == set(BreakerEvent)


def test_the_documented_diagram_is_the_table() -> None:
    text = (Path(__file__).parents[2] / "docs" / "breaker.md").read_text(encoding="utf-8")
    drawn = re.search(r"```mermaid\n(.*?)\n```", text, re.DOTALL)
    assert drawn is not None
    assert drawn[1] == diagram()


def test_a_late_outcome_of_an_earlier_probe_does_not_count() -> None:
    breaker = opened()
    now_ns = first_admitted_ns(breaker, S)
    first = breaker.turn
    breaker.discarded(Reason.TIMEOUT, now_ns, first)
    now_ns = first_admitted_ns(breaker, now_ns)
    breaker.ready(first)
    breaker.discarded(Reason.TIMEOUT, now_ns, first)
    assert breaker.state is PROBING
    breaker.ready(breaker.turn)
    for _ in range(3):
        breaker.discarded(Reason.TIMEOUT, now_ns, first)
    assert breaker.state is CLOSED
