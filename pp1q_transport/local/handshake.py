"""The two messages of the Unix handshake as bytes: ATTACH from a process, ANSWER from its daemon.

Between `attach`, which moves them with descriptors, and bytes. Judges all that a peer sends; opens, maps and passes nothing.
Both are plain C structs, little-endian (include/pp1q_sidecar.h).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from struct import Struct
from typing import Final

from ..errors import LocalMisuse, PeerFault, Reason
from ..session.slots import SlotGeometry
from .channel import RING_CAPACITY
from .messages import MAX_TEXT_BYTES, text_bytes

MAGIC: Final = b"PP1A"
VERSION: Final = 1
MAX_REGIONS: Final = 16
MIN_RING: Final = 4096
MAX_RING: Final = 1 << 26
MAX_REGION_BYTES: Final = 1 << 42

ATTACH: Final = Struct("<4sHHII")
"""magic, u16 version, u16 role, u32 rank, u32 zero."""

ANSWER: Final = Struct("<4sHHII13IIQ16Q")
"""magic, u16 version, u16 verdict (0, or a `Reason` code), u32 length of the text that follows, u32 regions, thirteen u32 of
geometry (`GEOMETRY_FIELDS`), u32 zero, u64 boot_nonce, u64 bytes of each region [16]. The descriptors that come with a verdict
of 0, in this order: the channel's memory, the bell the client sleeps on, the bell the client rings, one for each region."""

GEOMETRY_FIELDS: Final = (
    "vocab_size", "depth", "support", "max_slots", "row_bytes", "dense_row_bytes", "group_size", "rank", "group_mode", "flags",
    "max_context_tokens", "ring_capacity", "targets",
)
MAX_ANSWER_BYTES: Final = ANSWER.size + MAX_TEXT_BYTES
FIRST_REGION: Final = 3
"""Descriptors before the regions'."""


class Role(IntEnum):
    """What a process is to its daemon."""

    LEADER_DRAFT = 1
    RECEIVER_TARGET = 2
    ADMIN = 3


class Flag(IntEnum):
    """Bits of a geometry's `flags`."""

    DENSE = 1
    SPARSE = 2
    DRAW_PROOF = 4


@dataclass(frozen=True, slots=True)
class Geometry:
    """What a daemon tells its process of the slots it maps. Bytes, tokens and counts; all u32 but `boot_nonce` (u64).

    `group_mode` is the daemon's code for it, `flags` of `Flag`; `targets` counts a leader's targets (one region each).
    """

    vocab_size: int
    depth: int
    support: int
    max_slots: int
    row_bytes: int
    dense_row_bytes: int
    group_size: int
    rank: int
    group_mode: int
    flags: int
    max_context_tokens: int
    targets: int
    boot_nonce: int
    ring_capacity: int = RING_CAPACITY

    def slots(self) -> SlotGeometry:
        """Where slots lie in a region."""
        return SlotGeometry(self.max_slots, self.depth, self.row_bytes)

    def trouble(self) -> str:
        """Why this can't be, in words; empty when it can."""
        for name in (*GEOMETRY_FIELDS, "boot_nonce"):
            value, top = getattr(self, name), (1 << (64 if name == "boot_nonce" else 32)) - 1
            least = 1 if name in ("vocab_size", "depth", "max_slots", "row_bytes", "group_size", "max_context_tokens") else 0
            if not least <= value <= top:
                return f"{name} is {value}, not {least}..{top}"
        capacity = self.ring_capacity
        if not MIN_RING <= capacity <= MAX_RING or capacity & (capacity - 1):
            return f"ring_capacity is {capacity}, no power of two in {MIN_RING}..{MAX_RING}"
        if self.row_bytes % 64:
            return f"row_bytes is {self.row_bytes}, no multiple of 64"
        if self.max_slots * self.depth * (self.row_bytes + 8) > MAX_REGION_BYTES:
            return f"{self.max_slots} slots of {self.depth} rows of {self.row_bytes} bytes exceed {MAX_REGION_BYTES} bytes"
        if self.rank >= self.group_size:
            return f"rank {self.rank} in a group of {self.group_size}"
        if self.flags & ~sum(Flag):
            return f"flags {self.flags:#x} has bits that are not defined"
        return ""


@dataclass(frozen=True, slots=True)
class Answer:
    """A parsed ANSWER: `verdict` is None for a welcome; `sizes` are the regions' bytes."""

    verdict: Reason | None
    text: str
    geometry: Geometry | None
    sizes: tuple[int, ...]


def pack_attach(role: Role, rank: int) -> bytes:
    """An ATTACH; raises `LocalMisuse` for a rank that is no u32."""
    if not 0 <= rank < 1 << 32:
        raise LocalMisuse(f"rank {rank} is impossible")
    return ATTACH.pack(MAGIC, VERSION, role, rank, 0)


def parse_attach(data: bytes) -> tuple[Role, int]:
    """(role, rank). Raises `PeerFault`: `length_bounds`, `bad_magic`, `bad_version`, `reserved_bits`, `malformed` (the role)."""
    if len(data) != ATTACH.size:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"an ATTACH of {len(data)} bytes, not {ATTACH.size}")
    magic, version, role, rank, zero = ATTACH.unpack(data)
    if magic != MAGIC:
        raise PeerFault(Reason.BAD_MAGIC, "this is no ATTACH of a PP1Q process")
    if version != VERSION:
        raise PeerFault(Reason.BAD_VERSION, f"the process attaches by version {version}, this daemon by {VERSION}")
    if zero:
        raise PeerFault(Reason.RESERVED_BITS, "ATTACH has bits set that must be zero")
    if role not in tuple(Role):
        raise PeerFault(Reason.MALFORMED, f"ATTACH names role {role}, which does not exist")
    return Role(role), rank


def pack_welcome(geometry: Geometry, sizes: tuple[int, ...]) -> bytes:
    """An ANSWER of verdict 0. Raises `LocalMisuse` for what `parse_answer` would refuse."""
    trouble = geometry.trouble() or _size_trouble(geometry, sizes)
    if trouble:
        raise LocalMisuse(f"can't announce this geometry: {trouble}")
    values = (getattr(geometry, name) for name in GEOMETRY_FIELDS)
    padded = sizes + (0,) * (MAX_REGIONS - len(sizes))
    return ANSWER.pack(MAGIC, VERSION, 0, 0, len(sizes), *values, 0, geometry.boot_nonce, *padded)


def pack_refusal(reason: Reason, text: str) -> bytes:
    """An ANSWER that refuses, with one line of words (cut to `MAX_TEXT_BYTES`)."""
    words = text_bytes(text)
    return ANSWER.pack(MAGIC, VERSION, reason.code, len(words), 0, *(0,) * 15, *(0,) * MAX_REGIONS) + words


def _size_trouble(geometry: Geometry, sizes: tuple[int, ...]) -> str:
    if len(sizes) > MAX_REGIONS:
        return f"{len(sizes)} regions, at most {MAX_REGIONS} can be passed"
    needed = geometry.slots().total_bytes
    for index, size in enumerate(sizes):
        if size < needed:
            return f"region {index} has {size} bytes, its slots need {needed}"
    return ""


def parse_answer(data: bytes) -> Answer:
    """Raises `PeerFault` as `parse_attach` does, and `limits_mismatch` for a geometry that can't be."""
    if not ANSWER.size <= len(data) <= MAX_ANSWER_BYTES:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"an ANSWER of {len(data)} bytes")
    magic, version, verdict, text_length, regions, *rest = ANSWER.unpack_from(data)
    if magic != MAGIC:
        raise PeerFault(Reason.BAD_MAGIC, "this is no ANSWER of a PP1Q daemon")
    if version != VERSION:
        raise PeerFault(Reason.BAD_VERSION, f"the daemon attaches by version {version}, this process by {VERSION}")
    values, (zero, boot_nonce), sizes = rest[:13], rest[13:15], tuple(rest[15:])
    if text_length != len(data) - ANSWER.size or regions > MAX_REGIONS:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"an ANSWER of {len(data)} bytes with {text_length} of text and {regions} regions")
    if zero or any(sizes[regions:]):
        raise PeerFault(Reason.RESERVED_BITS, "ANSWER has bits set that must be zero")
    text = data[ANSWER.size :].decode(errors="replace")
    if verdict:
        try:
            return Answer(Reason.from_code(verdict), text, None, ())
        except ValueError as error:
            raise PeerFault(Reason.MALFORMED, f"ANSWER refuses with code {verdict}, which this version does not know") from error
    geometry = Geometry(**dict(zip(GEOMETRY_FIELDS, values, strict=True)), boot_nonce=boot_nonce)
    trouble = geometry.trouble() or _size_trouble(geometry, sizes[:regions])
    if trouble:
        raise PeerFault(Reason.LIMITS_MISMATCH, f"the daemon announces a geometry that can't be: {trouble}")
    return Answer(None, text, geometry, sizes[:regions])
