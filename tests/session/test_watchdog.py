"""The watchdog against a dictionary, and its edges: exactly on time, t = 0, nothing armed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.session.watchdog import NEVER, Watchdog

TIMES = st.integers(0, 50)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("arm"), st.integers(0, 3), TIMES),
        st.tuples(st.just("disarm"), st.integers(0, 3), st.just(0)),
        st.tuples(st.just("look"), st.just(0), TIMES),
    ),
    max_size=60,
)


@settings(max_examples=200, deadline=None)
@given(STEPS)
def test_it_agrees_with_a_dictionary(steps: list[tuple[str, int, int]]) -> None:
    watchdog, armed = Watchdog(4), dict[int, int]()
    for what, slot, time in steps:
        if what == "arm":
            watchdog.arm(slot, time)
            armed[slot] = time
        elif what == "disarm":
            watchdog.disarm(slot)
            armed.pop(slot, None)
        else:
            due = sorted(slot for slot, deadline in armed.items() if deadline <= time)
            assert watchdog.expired(time) == due
            for slot in due:
                del armed[slot]
        assert watchdog.next_ns == min(armed.values(), default=NEVER)


def test_exactly_on_time_and_not_one_ns_before() -> None:
    watchdog = Watchdog(1)
    watchdog.arm(0, 1000)
    assert watchdog.expired(999) == []
    assert watchdog.expired(1000) == [0]
    assert watchdog.expired(1000) == [], "it fires once"


def test_t_0_is_a_time_like_any_other() -> None:
    watchdog = Watchdog(2)
    assert watchdog.expired(0) == [], "what was never armed can't fire"
    watchdog.arm(1, 0)
    assert watchdog.expired(0) == [1]


def test_nothing_armed_never_fires() -> None:
    watchdog = Watchdog(2)
    assert watchdog.expired(NEVER - 1) == []
    watchdog.arm(0, 5)
    watchdog.disarm(0)
    watchdog.disarm(0)
    assert watchdog.expired(NEVER - 1) == []


def test_arming_again_replaces() -> None:
    watchdog = Watchdog(1)
    watchdog.arm(0, 5)
    watchdog.arm(0, 50)
    assert watchdog.expired(49) == []
    assert watchdog.expired(50) == [0]
