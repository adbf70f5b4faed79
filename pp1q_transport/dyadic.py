"""Dyadic categorical q: counts over M = 2^24 that are built, carried as FP32, checked and drawn from exactly.

Between numpy arrays of a caller and the native kernels, which do all the arithmetic. Knows no frames, sessions or
shards, keeps no state and never renormalises: what is not exactly a q is refused by name. SPEC section 3.
"""

from __future__ import annotations

import operator
from typing import Final, SupportsIndex

import numpy as np
import numpy.typing as npt

from ._native import kernels
from .errors import InvalidQ, LocalMisuse, Reason

MASS: Final = 1 << 24
SEMANTIC_ID: Final = "dyadic24-standard-v1"
_NO_TOKEN: Final = -1
_NO_DRAW: Final = 0xFFFFFFFF


def _judge(code: int, detail: str) -> None:
    if code:
        raise InvalidQ(Reason.from_code(code), detail)


def _integer(value: SupportsIndex, name: str, low: int, high: int) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise LocalMisuse(f"{name} must be an integer, not {type(value).__name__}") from None
    if not low <= number <= high:
        raise LocalMisuse(f"{name} must be within {low}..{high}, not {number}")
    return number


def _reals(values: npt.ArrayLike, name: str) -> npt.NDArray[np.float64]:
    array = np.asarray(values)
    if array.ndim != 1 or array.dtype.kind not in "fiu" or not np.can_cast(array.dtype, np.float64):
        raise LocalMisuse(f"{name} must be a one-dimensional real array, not {array.dtype} of shape {array.shape}")
    return np.ascontiguousarray(array, dtype=np.float64)


def _counts(counts: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    array = np.asarray(counts)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise LocalMisuse(f"counts must be a one-dimensional integer array, not {array.dtype} of shape {array.shape}")
    if array.dtype != np.uint32 and array.size and not (array.min() >= 0 and array.max() <= MASS):
        raise LocalMisuse("counts must lie within 0..2^24")
    return np.ascontiguousarray(array, dtype=np.uint32)


def _exactly(array: npt.ArrayLike, dtype: npt.DTypeLike, name: str) -> npt.NDArray[np.uint8]:
    """The bytes of a one-dimensional array that must have `dtype` already: what is carried is never converted."""
    given = np.asarray(array)
    if given.ndim != 1 or given.dtype != np.dtype(dtype):
        raise LocalMisuse(f"{name} must be one-dimensional {np.dtype(dtype)}, not {given.dtype} of shape {given.shape}")
    return np.ascontiguousarray(given).view(np.uint8)


def allocate(weights: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Counts uint32 [V] of exact sum 2^24 for real weights [V]: floors, then largest remainders, ties to the lowest ID.

    Raises `InvalidQ(invalid_weights)` for NaN, +inf, a negative weight (-0.0 too), no mass, or an allocation that does
    not come out consistent; `LocalMisuse` for another shape or type.
    """
    given = _reals(weights, "weights")
    counts = np.empty(given.size, np.uint32)
    _judge(kernels.allocate(given, counts), "weights cannot be allocated")
    return counts


def allocate_top_k(weights: npt.ArrayLike, k: int) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    """The k largest positive weights of [V] (ties to the lowest ID) with 2^24 allocated among them alone.

    Returns (ids int32 [n] ascending, counts uint32 [n], none zero), 1 <= n <= k. Raises as `allocate`.
    """
    given = _reals(weights, "weights")
    wanted = min(_integer(k, "k", 1, 2**31 - 1), max(given.size, 1))
    ids = np.empty(wanted, np.int32)
    n = kernels.top_k(given, wanted, ids)
    if n < 0:
        _judge(-n, "weights cannot be allocated")
    ids = ids[:n]
    counts = allocate(given[ids])
    kept = counts != 0
    return ids[kept], counts[kept]


def scores_of(
    logits: npt.ArrayLike, temperature: float = 1.0, bias: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """(logits + bias)/temperature as float64 [V], logits + bias at temperature 0; judges no value.

    Raises `LocalMisuse` for shapes that differ or a temperature that is negative or not finite.
    """
    if not (np.isfinite(temperature) and temperature >= 0):
        raise LocalMisuse(f"temperature must be finite and not negative, not {temperature}")
    scores = _reals(logits, "logits")
    if bias is not None:
        added = _reals(bias, "bias")
        if added.shape != scores.shape:
            raise LocalMisuse(f"bias of shape {added.shape} does not fit logits of shape {scores.shape}")
        with np.errstate(invalid="ignore", over="ignore"):
            scores = scores + added
    if temperature != 0:
        with np.errstate(over="ignore"):
            scores = scores / temperature
    return scores


def weights_from_logits(
    logits: npt.ArrayLike, temperature: float = 1.0, bias: npt.ArrayLike | None = None
) -> npt.NDArray[np.float64]:
    """Weights float64 [V] = exp((logits + bias)/temperature - their maximum); temperature 0 is one-hot, lowest ID.

    -inf logits get weight 0. Raises `InvalidQ(invalid_weights)` for NaN, +inf or nothing but -inf; `LocalMisuse` for
    shapes that differ or a temperature that is negative or not finite.
    """
    scores = scores_of(logits, temperature, bias)
    highest = scores.max(initial=-np.inf)
    if not np.isfinite(highest):  # a NaN anywhere is the maximum
        raise InvalidQ(Reason.INVALID_WEIGHTS, f"the largest logit is {highest}")
    if temperature == 0:
        weights = np.zeros(scores.size)
        weights[int(scores.argmax())] = 1.0
        return weights
    with np.errstate(under="ignore"):
        return np.asarray(np.exp(scores - highest), dtype=np.float64)


def to_q(counts: npt.ArrayLike) -> npt.NDArray[np.float32]:
    """float32 [n] = counts/2^24, exact. Raises `LocalMisuse` for a count outside 0..2^24. Does not check the sum."""
    given = _counts(counts)
    q = np.empty(given.size, np.float32)
    try:
        kernels.counts_to_q(given, q.view(np.uint8), 0)
    except ValueError:
        raise LocalMisuse("counts must lie within 0..2^24") from None
    return q


def to_counts(q: npt.ArrayLike) -> npt.NDArray[np.uint32]:
    """Counts uint32 [n] of float32 q [n]. Raises `InvalidQ` with the reason of the first value that is not k/2^24 in
    [0, 1] (nonfinite, negative or nondyadic). Does not check the sum: see `validate_dense` and `validate_sparse`."""
    raw = _exactly(q, np.float32, "q")
    counts = np.empty(raw.size // 4, np.uint32)
    _judge(kernels.q_to_counts(raw, 0, counts.size, counts), "q holds a value that is no dyadic probability")
    return counts


def _token(token: SupportsIndex | None, vocab_size: int) -> int:
    if token is None:
        return _NO_TOKEN
    number = _integer(token, "token", -(2**63), 2**63 - 1)
    if not 0 <= number < vocab_size:
        raise InvalidQ(Reason.ID_RANGE, f"token {number} is not in 0..{vocab_size - 1}")
    return number


def validate_dense(q: npt.ArrayLike, vocab_size: int, token: SupportsIndex | None) -> None:
    """Checks a dense row float32 [n >= vocab_size], zero beyond the vocabulary, from which `token` was drawn.

    Raises `InvalidQ` with the first failure of: values in order (nonfinite, negative, nondyadic), padding_nonzero,
    mass, id_range (the token), zero_q_token. `token` None checks the row alone. `LocalMisuse`: another type or shape.
    """
    raw = _exactly(q, np.float32, "q")
    entries = _integer(vocab_size, "vocab_size", 1, 2**31 - 1)
    if raw.size < 4 * entries:
        raise LocalMisuse(f"q has {raw.size // 4} values, fewer than the vocabulary's {entries}")
    _judge(
        kernels.validate_dense_row(raw, 0, entries, raw.size, MASS, _NO_TOKEN, _NO_DRAW), "the row is no dyadic q"
    )
    number = _token(token, entries)
    if number != _NO_TOKEN and not raw[4 * number : 4 * number + 4].any():
        raise InvalidQ(Reason.ZERO_Q_TOKEN, f"token {number} has q = 0")


def validate_sparse(ids: npt.ArrayLike, q: npt.ArrayLike, vocab_size: int, token: SupportsIndex | None) -> None:
    """Checks a sparse row: ids int32 [n] strictly ascending in 0..vocab_size-1 and float32 q [n] without zeros.

    Raises `InvalidQ`: support_bounds if empty, else the first failure of each entry (id_range, id_duplicate, id_order,
    nonfinite, negative, nondyadic, zero_entry), mass, id_range (the token), zero_q_token (not in the support too).
    `token` None checks the row alone. `LocalMisuse` for another type or shape.
    """
    id_bytes = _exactly(ids, np.int32, "ids")
    q_bytes = _exactly(q, np.float32, "q")
    entries = _integer(vocab_size, "vocab_size", 1, 2**31 - 1)
    if id_bytes.size != q_bytes.size:
        raise LocalMisuse(f"{id_bytes.size // 4} ids do not fit {q_bytes.size // 4} values")
    n = q_bytes.size // 4
    if n == 0:
        raise InvalidQ(Reason.SUPPORT_BOUNDS, "the support is empty")
    row = np.concatenate((q_bytes, id_bytes))
    _judge(
        kernels.validate_sparse_row(row, 0, 4 * n, n, 0, entries, MASS, _NO_TOKEN, _NO_DRAW), "the row is no sparse q"
    )
    number = _token(token, entries)
    if number != _NO_TOKEN:
        _judge(
            kernels.validate_sparse_row(row, 0, 4 * n, n, 0, entries, MASS, number, _NO_DRAW),
            f"token {number} is not in the support",
        )


def draw(counts: npt.ArrayLike, u24: SupportsIndex) -> int:
    """The first index of counts [n] whose cumulative count exceeds `u24` (0..2^24-1).

    Raises `LocalMisuse` if u24 is outside that range or the counts sum to no more than it.
    """
    given = _counts(counts)
    number = _integer(u24, "u24", 0, MASS - 1)
    try:
        return kernels.draw(given, number)
    except ValueError as error:
        raise LocalMisuse(str(error)) from None


def draw_sparse(ids: npt.ArrayLike, counts: npt.ArrayLike, u24: SupportsIndex) -> int:
    """The token of ids [n] that `draw` chooses from counts [n]. Raises as `draw`, and if the lengths differ."""
    tokens = np.asarray(ids)
    given = _counts(counts)
    if tokens.shape != given.shape or tokens.dtype.kind not in "iu":
        raise LocalMisuse(f"ids {tokens.dtype} of shape {tokens.shape} do not fit counts of shape {given.shape}")
    return int(tokens[draw(given, u24)])
