"""Control messages to bytes and back: bounded msgpack maps, and nothing that a peer could make grow.

Between `control` (which moves the bytes) and `session.negotiate` (which knows what messages mean). Knows no kind of
message. Decoding raises one error, `PeerFault(malformed)`, whatever the bytes. SPEC section 2.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Final

import msgpack

from .errors import LocalMisuse, PeerFault, Reason

MESSAGE_LIMIT: Final = 64 << 10  # bytes of one message, judged before it is decoded
REPORT_LIMIT: Final = 1 << 20  # for the two ends of a benchmark, whose reports hold histograms
MAX_DEPTH: Final = 4  # the message itself is depth 1
MAX_ITEMS: Final = 1024  # of one list or map; the decoder allocates what a header claims, so this bounds that too
MAX_TEXT_BYTES: Final = 16 << 10
INT_MIN: Final = -(1 << 63)
INT_MAX: Final = (1 << 64) - 1


def encode_message(message: Mapping[str, object], limit: int = MESSAGE_LIMIT) -> bytes:
    """The bytes of a message. Raises `LocalMisuse` for one that the other side would have to refuse."""
    try:
        if not isinstance(message, Mapping):
            raise ValueError("a message is a map")  # noqa: TRY301, TRY004 - one path to the one error
        _judge(dict(message), 1)
        data: bytes = msgpack.packb(dict(message), use_bin_type=True)
    except (ValueError, OverflowError) as fault:
        raise LocalMisuse(f"not a control message: {fault}") from None
    if len(data) > limit:
        raise LocalMisuse(f"a control message of {len(data)} bytes; at most {limit}")
    return data


def decode_message(data: bytes, limit: int = MESSAGE_LIMIT) -> dict[str, object]:
    """The map in `data`: str keys, no key twice; values None, bool, int within -2^63..2^64-1, finite float, str, bytes,
    list or map; nothing after it. Raises `PeerFault(malformed)` for anything else."""
    if len(data) > limit:
        raise PeerFault(Reason.MALFORMED, f"a control message of {len(data)} bytes; at most {limit}")
    try:
        message = msgpack.unpackb(
            data, raw=False, use_list=True, strict_map_key=True, object_pairs_hook=_unique, ext_hook=_no_extension,
            max_str_len=MAX_TEXT_BYTES, max_bin_len=MAX_TEXT_BYTES, max_array_len=MAX_ITEMS, max_map_len=MAX_ITEMS,
            max_ext_len=0,
        )  # fmt: skip
        if type(message) is not dict:
            raise ValueError("not a map")  # noqa: TRY301 - one path to the one error
        _judge(message, 1)
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException) as fault:
        raise PeerFault(Reason.MALFORMED, f"not a control message: {str(fault)[:120]}") from None
    return message


def _unique(pairs: list[tuple[object, object]]) -> dict[object, object]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key twice in one map")
    return table


def _no_extension(code: int, data: bytes) -> object:
    raise ValueError(f"extension type {code}")


def _judge(value: object, depth: int) -> None:
    """Raises `ValueError` unless `value` is what a message may hold at this depth."""
    kind = type(value)
    if value is None or kind is bool:
        return
    if kind is int:
        if not INT_MIN <= value <= INT_MAX:  # type: ignore[operator]  # an int, by the line above
            raise ValueError("an integer beyond 64 bits")
    elif kind is float:
        if not math.isfinite(value):  # type: ignore[arg-type]  # a float, by the line above
            raise ValueError("a float that is not finite")
    elif isinstance(value, (str, bytes)) and kind in (str, bytes):
        if len(value.encode() if isinstance(value, str) else value) > MAX_TEXT_BYTES:
            raise ValueError(f"a text or byte string longer than {MAX_TEXT_BYTES} bytes")
    elif isinstance(value, (list, tuple, dict)):
        _judge_collection(value, depth)
    else:
        raise ValueError(f"a value of type {kind.__name__}")


def _judge_collection(value: list[object] | tuple[object, ...] | dict[object, object], depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ValueError(f"nested deeper than {MAX_DEPTH}")
    if len(value) > MAX_ITEMS:
        raise ValueError(f"more than {MAX_ITEMS} items in one collection")
    if isinstance(value, dict):
        if not all(type(key) is str for key in value):
            raise ValueError("a key that is not a string")
        for key in value:
            _judge(key, depth)
    for item in value.values() if isinstance(value, dict) else value:
        _judge(item, depth + 1)
