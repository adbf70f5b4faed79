"""Rows at the draft: weights or counts in, q in staging memory and the drawn token out.

Between `draft` and the kernels. Knows the representation rules of SPEC section 3 and nothing of sessions.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .._native import kernels
from ..errors import InvalidQ, LocalMisuse, Reason

if TYPE_CHECKING:
    import numpy.typing as npt


def allocate_top_k(
    weights: npt.NDArray[np.float64], k: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.uint32]]:
    ids = np.empty(k, np.int32)
    found = kernels.top_k(weights, k, ids)
    ids = ids[:found]
    counts = np.empty(found, np.uint32)
    valid(kernels.allocate(weights[ids], counts))
    kept = counts > 0
    return ids[kept], counts[kept]


def shaped(array: npt.NDArray[np.generic], dtype: type[np.generic], length: int, name: str) -> None:
    if array.dtype != dtype or array.shape != (length,) or not array.flags.c_contiguous:
        raise LocalMisuse(f"{name} must be contiguous {dtype.__name__} [{length}], not {array.dtype} {array.shape}")


def valid(code: int) -> None:
    if code:
        raise InvalidQ(Reason.from_code(code), "weights")


def sparse_valid(ids: npt.NDArray[np.int32], counts: npt.NDArray[np.uint32], support: int) -> None:
    if len(ids) != len(counts) or not 1 <= len(ids) <= support:
        raise InvalidQ(Reason.SUPPORT_BOUNDS, f"{len(ids)} ids, {len(counts)} counts, at most {support}")
    if np.any(ids[1:] <= ids[:-1]):
        raise InvalidQ(Reason.ID_ORDER, "ids must rise strictly")
    if np.any(counts == 0):
        raise InvalidQ(Reason.ZERO_ENTRY, "drop zero counts")
    if int(counts.sum(dtype=np.uint64)) != 1 << 24:
        raise InvalidQ(Reason.MASS, "counts must sum to 2^24")
