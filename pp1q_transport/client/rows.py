"""What a draft hands in, judged before staging memory is touched: types, shapes, and the canonical form of a sparse row.

Between `draft` and its caller. Knows the representation rules of SPEC section 3 and nothing of sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from ..errors import InvalidQ, LocalMisuse, Reason

if TYPE_CHECKING:
    import numpy.typing as npt


def shaped(array: npt.NDArray[np.generic], dtype: type[np.generic], length: int | None, name: str) -> None:
    """Raises `LocalMisuse` unless `array` is a contiguous vector of `dtype`, of `length` unless that is None."""
    if not isinstance(array, np.ndarray):
        raise LocalMisuse(f"{name} must be a numpy array, not {type(array).__name__}")
    if array.dtype != dtype or array.ndim != 1 or not array.flags.c_contiguous or length not in (None, len(array)):
        size = "n" if length is None else length
        hint = f"; use .astype(np.{dtype.__name__})" if array.dtype != dtype and array.dtype.kind in "fiu" else ""
        raise LocalMisuse(f"{name} must be contiguous {dtype.__name__} [{size}], not {array.dtype} {array.shape}{hint}")


def valid(code: int) -> None:
    """Raises `InvalidQ` for a kernel's verdict on weights that is not 0."""
    if code:
        raise InvalidQ(Reason.from_code(code), "weights")


def sparse_part(
    ids: npt.NDArray[np.int32], counts: npt.NDArray[np.uint32], support: int, bounds: tuple[int, int]
) -> None:
    """As `sparse_valid` for one rank's part of a row: IDs within `bounds` [first, end), none at all perhaps, any mass."""
    shaped(ids, np.int32, None, "ids")
    shaped(counts, np.uint32, None, "counts")
    if len(ids) != len(counts) or len(ids) > support:
        raise InvalidQ(Reason.SUPPORT_BOUNDS, f"{len(ids)} ids, {len(counts)} counts, at most {support}")
    if np.any(ids[1:] <= ids[:-1]):
        raise InvalidQ(Reason.ID_ORDER, "ids must rise strictly")
    if len(ids) and (ids[0] < bounds[0] or ids[-1] >= bounds[1]):
        raise InvalidQ(Reason.ID_RANGE, f"ids must be within {bounds[0]}..{bounds[1] - 1}, this rank's range")
    if np.any(counts == 0):
        raise InvalidQ(Reason.ZERO_ENTRY, "drop zero counts")


def sparse_valid(ids: npt.NDArray[np.int32], counts: npt.NDArray[np.uint32], support: int, vocab_size: int) -> None:
    """Raises `LocalMisuse` for wrong types, `InvalidQ` for what is no canonical sparse row (SPEC section 3)."""
    shaped(ids, np.int32, None, "ids")
    shaped(counts, np.uint32, None, "counts")
    if len(ids) != len(counts) or not 1 <= len(ids) <= support:
        raise InvalidQ(Reason.SUPPORT_BOUNDS, f"{len(ids)} ids, {len(counts)} counts, at most {support}")
    if np.any(ids[1:] <= ids[:-1]):
        raise InvalidQ(Reason.ID_ORDER, "ids must rise strictly")
    if ids[0] < 0 or ids[-1] >= vocab_size:
        raise InvalidQ(Reason.ID_RANGE, f"ids must be within 0..{vocab_size - 1}")
    if np.any(counts == 0):
        raise InvalidQ(Reason.ZERO_ENTRY, "drop zero counts")
    if int(counts.sum(dtype=np.uint64)) != 1 << 24:
        raise InvalidQ(Reason.MASS, "counts must sum to 2^24")
