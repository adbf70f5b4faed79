"""Counter-based random numbers: every draw is a pure function of seed, domain, generation, round and position.

Between whoever owns a domain (see `Domain`) and the native Philox4x32-10. Keeps no state, makes no seeds and does not
notice a key used twice: that is the session's work. SPEC section 5.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from enum import IntEnum
from typing import Final, SupportsIndex

from ._native import kernels
from .errors import LocalMisuse

RNG_ABI: Final = "philox4x32-10-pp1q-1"


class Domain(IntEnum):
    """What a draw is for. Each domain has one owner; equal draws of two domains are independent."""

    PROPOSAL = 1  # the leader alone
    ACCEPT = 2  # the receiver's rank 0
    CORRECTION = 3  # the receiver's rank 0


def _unsigned(value: SupportsIndex, bits: int, name: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        raise LocalMisuse(f"{name} must be an integer, not {type(value).__name__}") from None
    if not 0 <= number < 1 << bits:
        raise LocalMisuse(f"{name} must be within 0..2^{bits}-1, not {number}")
    return number


def philox4x32(counter: Sequence[int], key: Sequence[int]) -> tuple[int, int, int, int]:
    """The four 32-bit output words of Philox4x32-10. `counter` has four u32 words, `key` two; else `LocalMisuse`."""
    if len(counter) != 4 or len(key) != 2:
        raise LocalMisuse(f"Philox4x32 takes 4 counter and 2 key words, not {len(counter)} and {len(key)}")
    c0, c1, c2, c3 = (_unsigned(word, 32, "a counter word") for word in counter)
    k0, k1 = (_unsigned(word, 32, "a key word") for word in key)
    return kernels.philox4x32(c0, c1, c2, c3, k0, k1)


def _place(
    seed: int, domain: int, generation: int, round: int, position: int, counter: int
) -> tuple[int, int, int, int, int]:
    if counter != 0:
        raise LocalMisuse(f"the draw counter is 0 in {RNG_ABI}, not {counter}")
    try:
        owner = Domain(domain)
    except ValueError:
        raise LocalMisuse(f"{domain!r} is no domain of {RNG_ABI}") from None
    return (
        _unsigned(seed, 64, "seed"),
        owner,
        _unsigned(generation, 32, "generation"),
        _unsigned(round, 32, "round"),
        _unsigned(position, 32, "position"),
    )


def draw24(seed: int, domain: int, generation: int, round: int, position: int, counter: int = 0) -> int:
    """A 24-bit draw, 0 <= u < 2^24: output word 0 >> 8.

    `seed` is the request's u64; `generation` its request_generation, `round` and `position` (absolute, predicted) are
    u32; `domain` a `Domain`. Raises `LocalMisuse` for anything outside, and for a counter other than 0.
    """
    return kernels.draw_u24(*_place(seed, domain, generation, round, position, counter))


def draw64(seed: int, domain: int, generation: int, round: int, position: int, counter: int = 0) -> int:
    """A 64-bit draw: output word 0 << 32 | word 1. Arguments and errors as `draw24`."""
    return kernels.draw_u64(*_place(seed, domain, generation, round, position, counter))
