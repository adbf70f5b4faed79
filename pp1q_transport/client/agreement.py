"""What the ranks of a group agree on before an epoch: committed tokens made equal, and 128 bits that say so.

Between the engine's hook, which has the collective, and `attached_target`, which tells the daemon. Sends nothing. SPEC section 4.
"""

from __future__ import annotations

import struct
from array import array
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Final

import xxhash

from ..errors import LocalMisuse

if TYPE_CHECKING:
    from ..session.requests import Request

AgreeHook = Callable[[int, "dict[int, array[int]]"], "Mapping[int, Iterable[int]]"]
"""`hook(epoch, committed)`: this rank's committed tokens by request; returns those that all ranks agreed on."""
_STATE: Final = struct.Struct("<QQQQ")
_M64: Final = (1 << 64) - 1


def adopt(requests: Mapping[int, Request], agreed: Mapping[int, Iterable[int]], vocab_size: int) -> list[Request]:
    """Gives every request the tokens that were agreed on; returns those that changed. Raises `LocalMisuse`, and changes nothing,
    when the agreement leaves one out or holds what can't be a token."""
    for number in agreed:
        if number not in requests:
            raise LocalMisuse(f"the ranks agreed on request {number}, which is not open here: open it before wait_for_peer()")
    fresh: dict[int, array[int]] = {}
    for number in requests:
        if number not in agreed:
            raise LocalMisuse(f"the ranks' agreement leaves request {number} out")
        try:
            tokens = array("i", agreed[number])
        except (OverflowError, TypeError) as error:
            raise LocalMisuse(f"the ranks' agreement on request {number} must be int32 tokens: {error}") from error
        if not tokens or not 0 <= min(tokens) <= max(tokens) < vocab_size:
            raise LocalMisuse(f"the ranks' agreement on request {number} is empty or outside the vocabulary of {vocab_size}")
        fresh[number] = tokens
    changed = [request for number, request in requests.items() if request.tokens != fresh[number]]
    for request in changed:
        request.rewrite(fresh[request.request])
    return changed


def state_digest(requests: Mapping[int, Request]) -> tuple[int, int]:
    """128 bits (low, high) of everything that is committed: XXH3-128 over (request, tokens, prefix digest) in order of
    requests."""
    ordered = [requests[number] for number in sorted(requests)]
    packed = b"".join(_STATE.pack(each.request, len(each.tokens), each.prefix_low, each.prefix_high) for each in ordered)
    digest = xxhash.xxh3_128_intdigest(packed)
    return digest & _M64, digest >> 64
