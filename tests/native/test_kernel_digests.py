"""XXH3 against the xxhash package, the prefix digest, random numbers, and the reason codes of the C enum."""

from __future__ import annotations

import random
import struct
import time

import numpy as np
import pytest
import xxhash
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pp1q_transport._native import kernels, oracle
from pp1q_transport.errors import Reason

SEEDS = (0, 1, 0xFFFFFFFFFFFFFFFF, 0x9E3779B97F4A7C15, 1 << 63, 12345)
DATA = random.Random(1).randbytes(1 << 20)


def test_every_reason_has_the_code_of_its_name() -> None:
    codes = kernels.reason_codes()
    assert {name: Reason[name].code for name in codes} == codes
    assert list(codes.values()) == list(range(1, len(codes) + 1))
    assert len(codes) == len(Reason)


@pytest.mark.parametrize("seed", SEEDS)
def test_xxh3_64_of_every_length(level: str, seed: int) -> None:
    for length in range(1101):
        assert kernels.xxh3_64(DATA, length % 7, length, seed) == oracle.xxh3_64(
            DATA[length % 7 : length % 7 + length], seed
        )


@pytest.mark.parametrize("length", (4095, 4096, 4097, 65536, 517120, 1 << 20))
def test_xxh3_of_large_data(level: str, length: int) -> None:
    for seed in SEEDS:
        assert kernels.xxh3_64(DATA, 0, length, seed) == xxhash.xxh3_64_intdigest(DATA[:length], seed)
    assert kernels.xxh3_128(DATA, 0, length) == oracle.xxh3_128(DATA[:length])


def test_xxh3_128_of_every_length(level: str) -> None:
    for length in range(1101):
        assert kernels.xxh3_128(DATA, 3, length) == oracle.xxh3_128(DATA[3 : 3 + length])


@pytest.mark.parametrize("seed", SEEDS)
def test_streaming_digest_at_random_splits(level: str, seed: int) -> None:
    rng = random.Random(seed)
    cursor = kernels.DenseCursor()
    for length in (*range(0, 1101, 9), 16384, 40000, 300001):
        cursor.begin(DATA, 5, length // 4, length, seed)
        for landed in sorted(rng.choices(range(length + 1), k=rng.randrange(8))):
            cursor.advance(landed)
        cursor.advance(length)
        cursor.finish(0, 0, -1, kernels.NO_DRAW)
        assert cursor.digest == oracle.xxh3_64(DATA[5 : 5 + length], seed), length


def test_prefix_digest_is_a_chain(level: str) -> None:
    rng = random.Random(6)
    tokens = [rng.randrange(-(2**31), 2**31) for _ in range(300)]
    whole = kernels.prefix_digest(0, 0, np.array(tokens, np.int32))
    assert whole == oracle.prefix_digest(0, 0, tokens)
    low, high = 0, 0
    while tokens:
        part, tokens = tokens[:17], tokens[17:]
        low, high = kernels.prefix_digest(low, high, np.array(part, np.int32))
    assert (low, high) == whole
    assert kernels.prefix_digest(low, high, np.empty(0, np.int32)) == (low, high)


def test_prefix_digest_bytes_are_the_contract_s() -> None:
    """d(n-1) as 16 little-endian bytes, low then high, then the token: built here by hand."""
    first = xxhash.xxh3_128_intdigest(bytes(16) + struct.pack("<i", 11))
    raw = first.to_bytes(16, "little") + struct.pack("<i", -2)
    second = xxhash.xxh3_128_intdigest(raw)
    assert kernels.prefix_digest(0, 0, np.array([11, -2], np.int32)) == (second & oracle.U64, second >> 64)


U32 = st.integers(0, 2**32 - 1)
U64 = st.integers(0, 2**64 - 1)


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(counter=st.tuples(U32, U32, U32, U32), key=st.tuples(U32, U32))
def test_philox_equals_oracle(counter: tuple[int, int, int, int], key: tuple[int, int]) -> None:
    assert kernels.philox4x32(*counter, *key) == oracle.philox4x32(counter, key)


@settings(max_examples=200, deadline=None)
@given(seed=U64, domain=st.integers(0, 255), generation=U32, round=U32, position=U32)
def test_draws_equal_oracle(seed: int, domain: int, generation: int, round: int, position: int) -> None:
    place = (seed, domain, generation, round, position)
    assert kernels.draw_u24(*place) == oracle.draw_u24(*place)
    assert kernels.draw_u64(*place) == oracle.draw_u64(*place)


def test_a_domain_may_not_spill_out_of_its_byte() -> None:
    with pytest.raises(ValueError, match="domain 256"):
        kernels.draw_u24(1, 256, 0, 0, 0)
    with pytest.raises(ValueError, match="domain 256"):
        kernels.draw_u64(1, 256, 0, 0, 0)


def test_the_clock_is_the_monotonic_one() -> None:
    before = time.monotonic_ns()
    now = kernels.monotonic_ns()
    assert before <= now <= time.monotonic_ns()
