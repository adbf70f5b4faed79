"""How a vocabulary is split, what the ranks' claims must add up to, and how the leader cuts whole rows apart."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from pp1q_transport import dyadic
from pp1q_transport.counters import Counters
from pp1q_transport.engine import EngineConfig, terms_ahead
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.session.hello import Role, check, make_hello
from pp1q_transport.session.leader_group import LeaderGroup
from pp1q_transport.session.shards import MASS, VOCABULARY, Claim, judge_claims, ranges
from pp1q_transport.session.terms import SessionTerms


@given(some.integers(1, 1 << 20), some.integers(1, 8))
def test_ranges_tile_the_vocabulary_at_multiples_of_32(vocab: int, size: int) -> None:
    if -(-vocab // 32) < size:
        with pytest.raises(LocalMisuse):
            ranges(vocab, size)
        return
    found = ranges(vocab, size)
    assert len(found) == size
    assert (found[0][0], found[-1][1]) == (0, vocab)
    assert all(end == first for (_, end), (first, _) in pairwise(found))
    assert all(first % 32 == 0 and first < end for first, end in found)
    blocks = [-(-(end - first) // 32) for first, end in found]
    assert max(blocks) - min(blocks) <= 1


def test_sizes_of_a_tensor_parallel_pair() -> None:
    """SPEC section 2: a TP2 dense shard of 64,640 tokens is 1,292,800 bytes a request."""
    for rank in range(2):
        hello = make_hello(Role.RECEIVER, 1, group_size=2, group_mode=VOCABULARY, rank=rank)
        terms = terms_ahead(hello)
        assert terms.shard_entries == 64640
        assert hello.slot_part_bytes["dense_request"] == 5 * terms.dense_row_bytes == 1_292_800
        assert (terms.shard, terms.first_id) == (rank, rank * 64640)
    assert make_hello(Role.COORDINATOR, 1, group_size=2, group_mode=VOCABULARY).slot_part_bytes["dense_request"] == 2_585_600


def test_a_leader_states_the_rank_it_faces() -> None:
    def pair(leader: int, receiver: int, mode: str) -> None:
        ours = make_hello(Role.LEADER, 1, group_size=2, group_mode=mode, rank=leader, link_nonce=bytes(16))
        check(ours, make_hello(Role.RECEIVER, 2, group_size=2, group_mode=mode, rank=receiver, link_nonce=bytes([1] * 16)))

    for mode in (VOCABULARY, "request-owner"):
        for rank in range(2):
            pair(rank, rank, mode)
        with pytest.raises(PeerFault) as refused:
            pair(0, 1, mode)
        assert refused.value.reason is Reason.LIMITS_MISMATCH
    with pytest.raises(PeerFault):
        pair(1, 1, "replicate")


def test_an_engine_takes_no_split_that_is_impossible() -> None:
    hello = make_hello(Role.RECEIVER, 1, group_size=8, group_mode=VOCABULARY, vocab_size=64, support=4)
    with pytest.raises(ConfigError, match="64 has no 8 ranges"):
        EngineConfig(hello, listen="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="mirror"):
        EngineConfig(make_hello(Role.RECEIVER, 1, group_mode="mirror"), listen="tcp://127.0.0.1:0")
    with pytest.raises(ConfigError, match="rank 0, not 1"):
        EngineConfig(make_hello(Role.RECEIVER, 1, group_size=2, rank=1), listen="tcp://127.0.0.1:0")


# --- claims -----------------------------------------------------------------------------------------------------------

GOOD = {
    0: Claim(0, 64, ((5, 1000, 0), (70, 0, 0))),
    1: Claim(64, 96, ((5, 24, 1000), (70, MASS, 0))),
    2: Claim(96, 100, ((5, MASS - 1024, 1024), (70, 0, MASS))),
}


def test_claims_that_go_together() -> None:
    assert judge_claims(GOOD, 100, 2) == 0
    for claim in GOOD.values():
        assert Claim.unpack(claim.pack(), len(claim.pack())) == claim


@pytest.mark.parametrize(
    ("rank", "claim", "reason"),
    (
        (0, Claim(32, 64, GOOD[0].rows), Reason.ID_RANGE),
        (1, Claim(64, 95, GOOD[1].rows), Reason.ID_RANGE),
        (1, Claim(63, 96, GOOD[1].rows), Reason.ID_RANGE),
        (2, Claim(96, 101, GOOD[2].rows), Reason.ID_RANGE),
        (2, Claim(96, 96, GOOD[2].rows), Reason.ID_RANGE),
        (1, Claim(64, 96, ((6, 24, 1000), (70, MASS, 0))), Reason.RANK_DISAGREE),
        (1, Claim(64, 96, GOOD[1].rows[:1]), Reason.RANK_DISAGREE),
        (0, Claim(0, 64, ((5, 999, 0), (70, 0, 0))), Reason.MASS),
        (0, Claim(0, 64, ((5, 1000, 1), (70, 0, 0))), Reason.MASS),
        (2, Claim(96, 100, ((5, MASS - 1023, 1024), (70, 0, MASS))), Reason.MASS),
        (2, Claim(96, 100, ((5, MASS - 1025, 1024), (70, 0, MASS))), Reason.MASS),
    ),
)
def test_claims_that_do_not(rank: int, claim: Claim, reason: Reason) -> None:
    assert judge_claims({**GOOD, rank: claim}, 100, 2) == reason.code


def test_all_claims_too_short() -> None:
    assert judge_claims({r: Claim(c.first_id, c.end_id, c.rows[:1]) for r, c in GOOD.items()}, 100, 2) == (
        Reason.RANK_DISAGREE.code
    )


@pytest.mark.parametrize("length", (0, 7, 9, 8 + 11, 8 + 13))
def test_a_claim_of_another_length_is_none(length: int) -> None:
    with pytest.raises(PeerFault) as refused:
        Claim.unpack(bytes(64), length)
    assert refused.value.reason is Reason.LENGTH_BOUNDS


# --- the leader's cuts --------------------------------------------------------------------------------------------------


def group(vocab: int = 100, size: int = 3) -> LeaderGroup:
    return LeaderGroup(SessionTerms(1, 2, 3, vocab, 2, 8, 1), size, Counters())


def test_masses_of_the_ranges_are_the_counts_sums() -> None:
    cut = group(1000)
    counts = dyadic.allocate(np.random.default_rng(3).random(1000))
    memory = bytearray(dyadic.to_q(counts).tobytes())
    assert cut._masses(memory, 0, cut.ranges) == [int(counts[first:end].sum()) for first, end in cut.ranges]


@pytest.mark.parametrize("bad", (np.nan, np.inf, -1.0, 0.5, 2.0**-25), ids=str)
def test_a_row_that_is_no_q_is_the_drafts_misuse(bad: float) -> None:
    cut = group()
    values = np.zeros(100, np.float32)
    values[3], values[70] = 1.0, bad
    with pytest.raises(LocalMisuse, match="does not sum to 1"):
        cut._masses(bytearray(values.tobytes()), 0, cut.ranges)


@given(some.lists(some.integers(-(1 << 31), (1 << 31) - 1), min_size=1, max_size=8))
def test_any_ids_are_cut_into_parts_that_follow_each_other(ids: list[int]) -> None:
    """Of a hostile draft's row too: no part has a negative length, none reaches outside the row."""
    memory = bytearray(4 * len(ids)) + bytearray(np.array(ids, np.int32).tobytes())
    cuts = group()._cuts(memory, 0, len(ids))
    assert [first for first, _ in cuts] == [0, *(end for _, end in cuts[:-1])]
    assert cuts[-1][1] == len(ids)
    assert all(0 <= first <= end for first, end in cuts)


def test_a_rank_joins_with_its_own_shard_alone() -> None:
    from pp1q_transport.session.leader import LeaderSession
    from pp1q_transport.session.requests import RequestTable

    cut = group()
    terms = SessionTerms(1, 2, 3, 100, 2, 8, 1, shard=1, first_id=64, end_id=96)
    session = LeaderSession(terms, RequestTable(), Counters())
    with pytest.raises(LocalMisuse, match="rank 0 has shard 1"):
        cut.join(0, session)
    cut.join(1, session)
    assert not cut.complete
    with pytest.raises(LocalMisuse, match="those of shard 1"):
        session.put_row(session.grants[0], 0, 0, 0, 0, bytearray(4), 0, 0)
