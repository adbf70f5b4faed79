"""The binding's guards: whatever offset or length is asked for, memory outside the buffer is never touched."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pp1q_transport._native import kernels

BIG = 2**63 - 1
MEM = bytes(64)
NO = kernels.NO_DRAW
OUTSIDE = ((-1, 4), (0, -1), (61, 4), (65, 0), (0, 65), (BIG, 4), (4, BIG), (BIG, BIG), (-BIG, BIG))
CALLS: dict[str, Callable[[int, int], object]] = {
    "xxh3_64": lambda offset, length: kernels.xxh3_64(MEM, offset, length, 0),
    "xxh3_128": lambda offset, length: kernels.xxh3_128(MEM, offset, length),
    "copy source": lambda offset, length: kernels.copy_bytes(bytearray(99), 0, MEM, offset, length),
    "copy destination": lambda offset, length: kernels.copy_bytes(bytearray(64), offset, bytes(99), 0, length),
    "begin": lambda offset, length: kernels.DenseCursor().begin(MEM, offset, 0, length, 0),
    "dense": lambda offset, length: kernels.validate_dense_row(MEM, offset, 0, length, 0, -1, NO),
}
VALUES_OUTSIDE = ((-1, 1), (0, -1), (61, 1), (64, 1), (0, 17), (BIG, 1), (0, BIG), (0, 2**61), (4, 2**62))
VALUE_CALLS: dict[str, Callable[[int, int], object]] = {
    "dense entries": lambda offset, n: kernels.validate_dense_row(MEM, 0, n if offset == 0 else -1, 64, 0, -1, NO),
    "begin entries": lambda offset, n: kernels.DenseCursor().begin(MEM, 0, n if offset == 0 else -1, 64, 0),
    "sparse q": lambda offset, n: kernels.validate_sparse_row(MEM, offset, 0, n, 0, 9, 0, -1, NO),
    "sparse ids": lambda offset, n: kernels.validate_sparse_row(MEM, 0, offset, n, 0, 9, 0, -1, NO),
    "draw_q": lambda offset, n: kernels.draw_q(MEM, offset, n, 0),
    "q_to_counts": lambda offset, n: kernels.q_to_counts(MEM, offset, n, np.zeros(32, np.uint32)),
    "counts_to_q": lambda offset, n: kernels.counts_to_q(
        np.zeros(n if 0 <= n < 99 else 17, np.uint32), bytearray(64), offset if n >= 0 else -1
    ),
}


@pytest.mark.parametrize(("offset", "length"), OUTSIDE)
@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_bytes_outside_are_refused(call: Callable[[int, int], object], offset: int, length: int) -> None:
    with pytest.raises(ValueError, match="outside a buffer"):
        call(offset, length)


@pytest.mark.parametrize(("offset", "n"), VALUES_OUTSIDE)
@pytest.mark.parametrize("call", VALUE_CALLS.values(), ids=VALUE_CALLS.keys())
def test_values_outside_are_refused(call: Callable[[int, int], object], offset: int, n: int) -> None:
    with pytest.raises(ValueError, match=r"outside a buffer|do not fit"):
        call(offset, n)


def test_the_whole_buffer_is_inside() -> None:
    assert kernels.validate_dense_row(MEM, 0, 16, 64, 0, -1, NO) == 0
    assert kernels.validate_dense_row(MEM, 64, 0, 0, 0, -1, NO) == 0
    target = bytearray(64)
    assert kernels.copy_bytes(target, 63, b"\7", 0, 1) == 0
    assert target[63] == 7


def test_overlapping_copies_move() -> None:
    target = bytearray(range(100))
    kernels.copy_bytes(target, 10, target, 0, 80)
    assert target[10:90] == bytes(range(80))


@pytest.mark.parametrize(
    "call",
    (
        lambda: kernels.allocate(np.zeros(5), np.zeros(4, np.uint32)),
        lambda: kernels.block_sums(np.zeros(33), np.zeros(1)),
        lambda: kernels.top_k(np.ones(5), 0, np.zeros(5, np.int32)),
        lambda: kernels.top_k(np.ones(5), -1, np.zeros(5, np.int32)),
        lambda: kernels.top_k(np.ones(5), 4, np.zeros(3, np.int32)),
        lambda: kernels.q_to_counts(MEM, 0, 16, np.zeros(15, np.uint32)),
        lambda: kernels.select_level("sse9"),
    ),
)
def test_arrays_that_do_not_fit_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"need|have|choose|fit|no level"):
        call()


@pytest.mark.parametrize(
    "call",
    (
        lambda: kernels.counts_to_q(np.zeros(4, np.uint32), bytes(16), 0),
        lambda: kernels.copy_bytes(bytes(4), 0, MEM, 0, 4),
    ),
)
def test_read_only_memory_is_never_written(call: Callable[[], object]) -> None:
    with pytest.raises((BufferError, ValueError)):
        call()


@pytest.mark.parametrize(
    "call",
    (
        lambda: kernels.xxh3_64(None, 0, 1, 0),  # type: ignore[arg-type]
        lambda: kernels.draw(None, 0),  # type: ignore[arg-type]
        lambda: kernels.validate_dense_row(None, 0, 1, 4, 0, -1, NO),  # type: ignore[arg-type]
        lambda: kernels.DenseCursor().begin(None, 0, 1, 4, 0),  # type: ignore[arg-type]
    ),
)
def test_none_is_no_memory(call: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"outside|fit|end before"):
        call()


class TestCursorOrder:
    """The cursor's calls in the wrong order, or with totals that cannot be."""

    def test_nothing_before_begin(self) -> None:
        cursor = kernels.DenseCursor()
        with pytest.raises(ValueError, match="begin first"):
            cursor.advance(0)
        with pytest.raises(ValueError, match="begin first"):
            cursor.finish(0, 0, -1, NO)

    @pytest.mark.parametrize("landed", (-1, 7, 65, BIG))
    def test_landed_is_monotone_and_bounded(self, landed: int) -> None:
        cursor = kernels.DenseCursor()
        cursor.begin(MEM, 0, 16, 64, 0)
        cursor.advance(8)
        with pytest.raises(ValueError, match="landed went from 8"):
            cursor.advance(landed)
        cursor.advance(64)

    def test_no_finish_before_all_landed(self) -> None:
        cursor = kernels.DenseCursor()
        cursor.begin(MEM, 0, 16, 64, 0)
        cursor.advance(63)
        with pytest.raises(ValueError, match="only 63 of 64"):
            cursor.finish(0, 0, -1, NO)

    def test_finish_and_abandon_close_and_let_go(self) -> None:
        cursor = kernels.DenseCursor()
        for close in (lambda: cursor.finish(0, 0, -1, NO), cursor.abandon):
            mem = bytearray(64)
            cursor.begin(mem, 0, 16, 64, 0)
            cursor.advance(64)
            with pytest.raises(BufferError):
                mem.append(0)
            close()
            mem.append(0)
            with pytest.raises(ValueError, match="begin first"):
                cursor.advance(64)

    def test_a_row_leaves_nothing_to_the_next(self) -> None:
        """A failed, half-landed row of another size may not colour the row after it."""
        cursor = kernels.DenseCursor()
        cursor.begin(b"\xff" * 9000, 0, 2000, 9000, 3)
        cursor.advance(9000)
        digest = kernels.xxh3_64(MEM, 0, 64, 0)
        for _ in range(2):
            cursor.begin(MEM, 0, 10, 64, 0)
            cursor.advance(64)
            assert cursor.finish(digest, 0, -1, NO) == 0

    def test_begin_that_is_refused_leaves_the_row_open(self) -> None:
        cursor = kernels.DenseCursor()
        cursor.begin(MEM, 0, 16, 64, 0)
        with pytest.raises(ValueError, match="outside"):
            cursor.begin(MEM, 1, 16, 64, 0)
        cursor.advance(64)
        assert cursor.finish(kernels.xxh3_64(MEM, 0, 64, 0), 0, -1, NO) == 0
