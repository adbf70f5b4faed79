"""Requests: int32 tokens, the prefix digest, u32 ends, and the guard that no RNG key is used twice."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport._native import oracle
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.session.requests import U32_MAX, Request, RequestTable

INT32 = st.integers(-(1 << 31), (1 << 31) - 1)


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(INT32, max_size=8), min_size=1, max_size=6))
def test_the_prefix_digest_is_the_chain_over_all_tokens(parts: list[list[int]]) -> None:
    first = [*parts[0], 1]
    request = Request(1, 2, first)
    for part in parts[1:]:
        request.extend(part)
    tokens = first + [token for part in parts[1:] for token in part]
    assert list(request.tokens) == tokens
    assert (request.prefix_low, request.prefix_high) == oracle.prefix_digest(0, 0, tokens)
    assert request.anchor == len(tokens) - 1


@pytest.mark.parametrize("wrong", ([1 << 31], [-(1 << 31) - 1], [1, 1 << 40], [1.5], ["a"], [None]), ids=str)
def test_tokens_that_are_no_int32_change_nothing(wrong: list[int]) -> None:
    request = Request(1, 2, [3])
    before = (list(request.tokens), request.prefix_low, request.prefix_high)
    with pytest.raises(LocalMisuse):
        request.extend(wrong)
    assert (list(request.tokens), request.prefix_low, request.prefix_high) == before


def test_a_request_needs_a_prompt() -> None:
    with pytest.raises(LocalMisuse):
        Request(1, 2, [])
    assert Request(1, 2, [-(1 << 31), (1 << 31) - 1]).anchor == 1


def test_rounds_end_at_u32() -> None:
    request = Request(1, 2, [3])
    request.round = U32_MAX - 1
    assert request.next_round() == U32_MAX - 1
    for _ in range(2):
        with pytest.raises(PeerFault) as raised:
            request.next_round()
        assert raised.value.reason is Reason.GENERATION_EXHAUSTED
        assert request.round == U32_MAX


def test_generations_end_at_u32() -> None:
    request = Request(1, 2, [3], generation=U32_MAX - 1)
    request.discard()
    assert request.generation == U32_MAX
    with pytest.raises(PeerFault) as raised:
        request.discard()
    assert raised.value.reason is Reason.GENERATION_EXHAUSTED
    assert request.generation == U32_MAX


def test_a_discard_ends_the_flight() -> None:
    request = Request(1, 2, [3])
    request.in_flight = True
    request.discard()
    assert (request.generation, request.in_flight) == (1, False)


U32S = st.sampled_from((0, 1, 2, 3, U32_MAX - 1, U32_MAX))


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(U32S, U32S), max_size=30))
def test_the_key_guard_takes_no_key_twice_and_only_rising_ones(keys: list[tuple[int, int]]) -> None:
    request, used = Request(1, 2, [3]), list[tuple[int, int]]()
    for key in keys:
        allowed = request.may_draw(*key)
        assert allowed == (not used or key > used[-1])
        if allowed:
            request.mark_drawn(*key)
            used.append(key)
    assert len(set(used)) == len(used)


def test_the_table_is_bounded_and_knows_its_own() -> None:
    table = RequestTable(limit=2)
    table.add(Request(1, 0, [1]))
    with pytest.raises(LocalMisuse):
        table.add(Request(1, 0, [1]))
    table.add(Request(2, 0, [1]))
    assert table.full()
    with pytest.raises(LocalMisuse):
        table.add(Request(3, 0, [1]))
    assert table.get(3) is None
    assert table.remove(3) is None
    assert table.remove(1) is not None
    assert not table.full()
    assert table.get(1) is None


def test_spent_keys_outlive_a_close() -> None:
    """The same ID again, after a close: the leader's guard goes on, and the receiver's generation is a fresh one."""
    table = RequestTable()
    request = Request(5, 0, [1], generation=4)
    table.add(request)
    request.mark_drawn(4, 9)
    table.remove(5)
    assert table.fresh_generation(5) == 5
    assert table.fresh_generation(6) == 0
    again = Request(5, 0, [1])
    table.add(again)
    assert not again.may_draw(4, 9)
    assert not again.may_draw(3, 10)
    assert again.may_draw(4, 10)
    assert again.may_draw(5, 0)


def test_a_lost_session_closes_what_the_leader_held_and_keeps_its_keys() -> None:
    table = RequestTable()
    for number in range(3):
        request = Request(number, 0, [1])
        request.mark_drawn(0, number)
        table.add(request)
    table.end_session()
    assert table.requests == {}
    back = Request(2, 0, [1])
    table.add(back)
    assert not back.may_draw(0, 2)


def test_spent_keys_are_remembered_for_so_many_requests_only() -> None:
    table = RequestTable(remembered=2)
    for number in range(3):
        table.add(Request(number, 0, [1], generation=7))
        table.remove(number)
    assert [table.fresh_generation(number) for number in range(3)] == [0, 8, 8]


def test_no_generation_is_left_for_an_id_at_the_end_of_u32() -> None:
    table = RequestTable()
    table.add(Request(1, 0, [1], generation=U32_MAX))
    table.remove(1)
    with pytest.raises(PeerFault) as raised:
        table.fresh_generation(1)
    assert raised.value.reason is Reason.GENERATION_EXHAUSTED
