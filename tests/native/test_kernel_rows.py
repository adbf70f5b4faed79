"""Row kernels against the oracle: validation, cursor, draws, counts to q and back."""

from __future__ import annotations

import random
import struct

import kernel_cases as cases
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from kernel_cases import Row

from pp1q_transport._native import kernels, oracle
from pp1q_transport.errors import Reason

MASS = oracle.MASS
ROWS = cases.rows()
SPARSE_ROWS = cases.sparse_rows()
EXPECTED = [oracle.validate_dense_row(r.row, r.entries, r.mass, r.token, r.u24) for r in ROWS]
SPARSE_EXPECTED = [oracle.validate_sparse_row(r.q, r.ids, r.first, r.end, r.mass, r.token, r.u24) for r in SPARSE_ROWS]


def misplaced(data: bytes, offset: int) -> bytearray:
    """The bytes at an odd place among others: kernels may not assume alignment, nor read beyond the row."""
    return bytearray(b"\xff" * offset + data + b"\xff" * 9)


def run_cursor(cursor: kernels.DenseCursor, row: Row, pieces: list[int], digest: int, offset: int = 0) -> int:
    cursor.begin(misplaced(row.row, offset), offset, row.entries, len(row.row), row.seed)
    for landed in pieces:
        cursor.advance(landed)
    cursor.advance(len(row.row))
    return cursor.finish(digest, row.mass, row.token, row.u24)


def test_the_table_covers_every_dense_reason() -> None:
    names = {Reason.from_code(code).name for code in EXPECTED if code}
    assert names == {"NONFINITE", "NEGATIVE", "NONDYADIC", "PADDING_NONZERO", "MASS", "ID_RANGE", "ZERO_Q_TOKEN",
                     "DRAW_MISMATCH"}  # fmt: skip


def test_the_table_covers_every_sparse_reason() -> None:
    names = {Reason.from_code(code).name for code in SPARSE_EXPECTED if code}
    assert names == {"ID_RANGE", "ID_DUPLICATE", "ID_ORDER", "NONFINITE", "NEGATIVE", "NONDYADIC", "ZERO_ENTRY", "MASS",
                     "ZERO_Q_TOKEN", "DRAW_MISMATCH"}  # fmt: skip


@pytest.mark.parametrize("offset", (0, 1, 6))
def test_validate_dense_equals_oracle(level: str, offset: int) -> None:
    for row, expected in zip(ROWS, EXPECTED, strict=True):
        mem = misplaced(row.row, offset)
        got = kernels.validate_dense_row(mem, offset, row.entries, len(row.row), row.mass, row.token, row.u24)
        assert got == expected, row.name


def test_cursor_equals_oracle_at_any_split(level: str) -> None:
    rng = random.Random(5)
    cursor = kernels.DenseCursor()
    for row, expected in zip(ROWS, EXPECTED, strict=True):
        digest = oracle.xxh3_64(row.row, row.seed)
        splits = [[], sorted(rng.choices(range(len(row.row) + 1), k=5)), list(range(0, len(row.row), 1021))]
        for pieces in splits:
            assert run_cursor(cursor, row, pieces, digest, rng.choice((0, 3))) == expected, row.name
            assert cursor.digest == digest


def test_cursor_takes_single_bytes(level: str) -> None:
    cursor = kernels.DenseCursor()
    for row, expected in zip(ROWS, EXPECTED, strict=True):
        if len(row.row) <= 400:
            pieces = list(range(len(row.row)))
            assert run_cursor(cursor, row, pieces, oracle.xxh3_64(row.row, row.seed)) == expected, row.name


def test_cursor_judges_the_digest_first(level: str) -> None:
    cursor = kernels.DenseCursor()
    for row in ROWS:
        wrong = oracle.xxh3_64(row.row, row.seed) ^ 1
        assert run_cursor(cursor, row, [], wrong) == Reason.PAYLOAD_DIGEST.code, row.name


def test_any_flipped_bit_fails_the_digest(level: str) -> None:
    rng = random.Random(8)
    row = cases.drawn(rng, "flip", cases.random_counts(rng, 1500), bytes(100))
    digest = oracle.xxh3_64(row.row, row.seed)
    cursor = kernels.DenseCursor()
    for bit in rng.sample(range(8 * len(row.row)), 300):
        flipped = bytearray(row.row)
        flipped[bit // 8] ^= 1 << bit % 8
        spoilt = Row("flip", bytes(flipped), row.entries, row.mass, row.token, row.u24)
        assert run_cursor(cursor, spoilt, [], digest) == Reason.PAYLOAD_DIGEST.code


def test_cursor_at_full_size(level: str) -> None:
    rng = random.Random(3)
    counts = cases.random_counts(rng, 129280, positive=30000)
    u24 = rng.randrange(MASS)
    q = (np.array(counts) / MASS).astype("<f4").tobytes()
    row = Row("full", q, 129280, MASS, oracle.draw(counts, u24), u24)
    cursor = kernels.DenseCursor()
    pieces = list(range(0, len(row.row), 262144))
    assert run_cursor(cursor, row, pieces, oracle.xxh3_64(row.row, row.seed)) == 0
    for draw in (u24, 0, MASS - 1):
        assert kernels.draw_q(row.row, 0, row.entries, draw) == oracle.draw(counts, draw)
    row.u24 = u24 - counts[row.token]
    assert run_cursor(cursor, row, pieces, oracle.xxh3_64(row.row, row.seed)) == Reason.DRAW_MISMATCH.code


@pytest.mark.parametrize("pad", (0, 5))
def test_validate_sparse_equals_oracle(level: str, pad: int) -> None:
    for row, expected in zip(SPARSE_ROWS, SPARSE_EXPECTED, strict=True):
        n = len(row.ids)
        mem = misplaced(row.q + b"\xee" * pad + struct.pack(f"<{n}i", *row.ids), pad)
        got = kernels.validate_sparse_row(
            mem, pad, pad + 4 * n + pad, n, row.first, row.end, row.mass, row.token, row.u24
        )
        assert got == expected, row.name


WORDS = st.one_of(
    st.sampled_from(sorted(cases.BITS.values())),
    st.integers(0, 2**32 - 1),
    st.integers(0, MASS).map(lambda c: struct.unpack("<I", oracle.counts_to_q([c]))[0]),
)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(WORDS, max_size=200), token=st.integers(-1, 200), mass=st.integers(0, 2 * MASS))
def test_any_words_are_judged_as_the_oracle_does(
    each_level: list[str], words: list[int], token: int, mass: int
) -> None:
    row = struct.pack(f"<{len(words)}I", *words)
    n = len(words)
    code, counts = oracle.q_to_counts(row, n)
    mass = sum(counts) if mass % 2 and code == 0 else mass
    expected = oracle.validate_dense_row(row, n, mass, token, mass // 2)
    for name in each_level:
        kernels.select_level(name)
        assert kernels.validate_dense_row(row, 0, n, len(row), mass, token, mass // 2) == expected
        out = np.zeros(n, np.uint32)
        assert kernels.q_to_counts(row, 0, n, out) == code
        if code == 0:
            assert out.tolist() == counts


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    counts=st.lists(st.one_of(st.just(0), st.integers(0, 200), st.integers(0, 2**32 - 1)), min_size=1, max_size=3000),
    u24=st.one_of(st.integers(0, 1000), st.integers(0, 2**32 - 1)),
)
def test_draw_equals_oracle(each_level: list[str], counts: list[int], u24: int) -> None:
    expected = oracle.draw(counts, u24)
    given_counts = np.array(counts, np.uint32)
    for name in each_level:
        kernels.select_level(name)
        if expected < 0:
            with pytest.raises(ValueError, match="end before draw"):
                kernels.draw(given_counts, u24)
        else:
            assert kernels.draw(given_counts, u24) == expected


def test_draw_does_not_wrap(level: str) -> None:
    counts = np.full(4096, 2**32 - 1, np.uint32)
    assert kernels.draw(counts, 2**32 - 2) == 0
    assert kernels.draw(counts, 2**32 - 1) == 1
    counts[:] = 1 << 24
    assert kernels.draw(counts, 2**32 - 1) == 255
    counts[:] = 1 << 31  # every lane of a block sums to 0 modulo 2^32
    assert kernels.draw(counts, 5) == 0


def test_draw_q_equals_draw_on_every_edge(level: str) -> None:
    rng = random.Random(21)
    counts = cases.random_counts(rng, 3333, positive=900)
    row = oracle.counts_to_q(counts)
    edges = np.cumsum(counts)
    for token in rng.sample([i for i, c in enumerate(counts) if c], 200):
        first, last = int(edges[token]) - counts[token], int(edges[token]) - 1
        assert kernels.draw_q(row, 0, 3333, first) == kernels.draw_q(row, 0, 3333, last) == token
        assert kernels.draw(np.array(counts, np.uint32), last) == token
    with pytest.raises(ValueError, match="ends before draw"):
        kernels.draw_q(row, 0, 3333, MASS)


@pytest.mark.parametrize("bits", cases.BITS.values(), ids=cases.BITS.keys())
def test_draw_q_refuses_what_is_not_dyadic(level: str, bits: int) -> None:
    row = oracle.counts_to_q([0] * 40) + struct.pack("<I", bits) + oracle.counts_to_q([MASS])
    with pytest.raises(ValueError, match="not dyadic"):
        kernels.draw_q(row, 0, 42, 5)


def test_every_count_survives_q(level: str) -> None:
    counts = np.arange(MASS + 1, dtype=np.uint32)
    q = np.empty(counts.size, np.float32)
    kernels.counts_to_q(counts, q.view(np.uint8), 0)
    assert np.array_equal(q, counts.astype(np.float64) / MASS)
    back = np.zeros_like(counts)
    assert kernels.q_to_counts(q.view(np.uint8), 0, counts.size, back) == 0
    assert np.array_equal(back, counts)


@pytest.mark.parametrize("count", (MASS + 1, 2**25, 2**31, 2**32 - MASS, 2**32 - MASS + 1, 2**32 - 1))
@pytest.mark.parametrize("at", (0, 70, 99))
def test_counts_to_q_refuses_a_count_above_the_mass(level: str, count: int, at: int) -> None:
    counts = np.zeros(100, np.uint32)
    counts[at] = count
    with pytest.raises(ValueError, match="exceeds"):
        kernels.counts_to_q(counts, bytearray(400), 0)
