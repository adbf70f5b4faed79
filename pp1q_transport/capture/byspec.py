"""The wire format once more, from proto/spec.md and the xxHash library alone: what the oracle and the mutations know of frames.

Between `oracle` and `mutation` and the bytes. Imports nothing of `wire`, `session` or the native kernels, on purpose: what is
wrong there must not be wrong here as well.
"""

from __future__ import annotations

import struct
from typing import Final

import xxhash

HEADER: Final = 128
MASS: Final = 1 << 24
REPLY: Final = 4
COMPLETION: Final = 5
RESET: Final = 7
CANCEL: Final = 8
STATUS: Final = 10
DENSE: Final = 1
SPARSE: Final = 2
REASONS: Final = 54

# Every field of a header by (offset, bytes): the common ones, then the arguments of REPLY, COMPLETION and of notices.
COMMON: Final[dict[str, tuple[int, int]]] = {
    "magic": (0, 4), "version": (4, 1), "kind": (5, 1), "flags": (6, 2), "boot_nonce": (8, 8), "session": (16, 8),
    "request": (24, 8), "slot_generation": (32, 4), "request_generation": (36, 4), "round": (40, 4), "position": (44, 4),
    "slot": (48, 2), "shard": (50, 2), "depth": (52, 1), "representation": (53, 1), "reserved": (54, 2),
    "payload_length": (56, 4), "entry_count": (60, 4), "payload_digest": (112, 8), "header_digest": (120, 8),
}  # fmt: skip
ARGUMENTS: Final[dict[int, dict[str, tuple[int, int]]]] = {
    REPLY: {
        "token": (64, 4), "draw_counter": (68, 4), "context": (72, 8), "first_id": (80, 4), "end_id": (84, 4),
        "shard_mass": (88, 4), "mass_before": (92, 4), "reserved_arguments": (96, 8),
    },
    COMPLETION: {
        "reply_size": (64, 8), "context": (72, 8), "reply_digest": (80, 8), "positions": (88, 4), "status": (92, 2),
        "reserved_arguments": (94, 8),
    },
}  # fmt: skip

_SEED: Final = struct.Struct("<BQQQHHIIII")
_ENTRY: Final = struct.Struct("<IIQ")
_U64: Final = struct.Struct("<Q")


def xxh(data: bytes | bytearray | memoryview, seed: int = 0) -> int:
    """XXH3-64."""
    return xxhash.xxh3_64_intdigest(data, seed)


def number(frame: bytes | bytearray, place: tuple[int, int]) -> int:
    """The field at `place` (offset, bytes)."""
    return int.from_bytes(frame[place[0] : place[0] + place[1]], "little")


def payload_seed(frame: bytes | bytearray, leader_nonce: int) -> int:
    """The seed of the frame's payload digest (spec.md, Digests)."""
    session, request, generation, request_generation, round_, position, slot, shard = struct.unpack_from("<QQIIIIHH", frame, 16)
    return xxh(
        _SEED.pack(frame[5], leader_nonce, session, request, shard, slot, generation, request_generation, round_, position)
    )


def reply_digest(rows: list[tuple[int, int, int]]) -> int:
    """COMPLETION's digest over (position, payload length, payload digest) of every row, in order."""
    return xxh(b"".join(_ENTRY.pack(*row) for row in rows))


def sign(frame: bytearray, leader_nonce: int, payload: bool) -> None:
    """Writes the right digests into a frame: of its `payload` (if it is whole and wanted), then of its header."""
    if payload and len(frame) > HEADER:
        _U64.pack_into(frame, 112, xxh(memoryview(frame)[HEADER:], payload_seed(frame, leader_nonce)))
    _U64.pack_into(frame, 120, xxh(memoryview(frame)[:120]))


def draw_u24(seed: int, generation: int, round_: int, position: int) -> int:
    """The 24 bits of the PROPOSAL domain: Philox4x32-10, word 0 >> 8 (SPEC section 5)."""
    words = [1 << 24, position, round_, generation]
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        first, second = words[0] * 0xD2511F53, words[2] * 0xCD9E8D57
        words = [
            (second >> 32) ^ words[1] ^ low,
            second & 0xFFFFFFFF,
            (first >> 32) ^ words[3] ^ high,
            first & 0xFFFFFFFF,
        ]
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return words[0] >> 8


def frame_kind(frame: bytes | bytearray) -> int:
    """The kind of what may be no whole frame; 0 when it is too short to say."""
    return frame[5] if len(frame) >= HEADER else 0
