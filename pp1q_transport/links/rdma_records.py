"""The bytes of an rdma link that are no frames: what both ends say to make a queue pair, and the head of every message.

Between `rdma_connection` and `rdma`, which decide what they mean, and the wire. Records travel over the proven data connection,
heads in front of what a SEND carries. Everything is bounded before memory is taken and judged before it is believed. Does no I/O.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Final

from ..errors import PeerFault, Reason
from .rdma_window import MAX_ROWS, MAX_SLOTS, LandingShape

VERSION: Final = 1
JOIN: Final = 1
READY: Final = 2
_ENVELOPE: Final = struct.Struct("<HHI")  # kind, version, length of the body
_JOIN: Final = struct.Struct("<III16sHBBBBHIIIIHHI")
_PLACE: Final = struct.Struct("<QI")
_READY: Final = struct.Struct("<I")
JOIN_BYTES_AT_MOST: Final = _JOIN.size + MAX_SLOTS * _PLACE.size
STRIDE_AT_MOST: Final = 1 << 28
_U24: Final = 0xFFFFFF

HEAD: Final = struct.Struct("<IIHHI")  # number, taken, keys, flags, zero
HEAD_BYTES: Final = HEAD.size
KEY: Final = struct.Struct("<HHI")  # slot, zero, key
KEYS_AT_MOST: Final = 32
COUNTED: Final = 1  # has a number and takes credit; what has not is an acknowledgement and carries nothing
ASKS: Final = 2  # wants a report


@dataclass(frozen=True, slots=True)
class Join:
    """One end of a queue pair. `life` counts the queue pairs of a link from 0; `taken`: messages taken of the last one; `mtu`: an
    IBV_MTU number; `places`: (address, key) of every landing slot."""

    life: int
    number: int  # of the queue pair
    psn: int
    gid: bytes
    lid: int
    mtu: int
    ethernet: bool
    roce_version: int  # 2, 1, or 0 on InfiniBand
    family: int  # 4 or 6: of the address that the GID stands for; 0 on InfiniBand
    queue_depth: int
    receive_bytes: int
    taken: int
    shape: LandingShape
    places: tuple[tuple[int, int], ...]


def encode_join(join: Join) -> bytes:
    """The record of one end."""
    shape = join.shape
    body = _JOIN.pack(
        join.life, join.number, join.psn, join.gid, join.lid, join.mtu, int(join.ethernet), join.roce_version, join.family, 0,
        join.queue_depth, join.receive_bytes, join.taken, 0, shape.slots, shape.rows, shape.stride,
    )  # fmt: skip
    body += b"".join(_PLACE.pack(address, key) for address, key in join.places)
    return _ENVELOPE.pack(JOIN, VERSION, len(body)) + body


def encode_ready(life: int) -> bytes:
    """The word that this end's queue pair of `life` can receive."""
    return _ENVELOPE.pack(READY, VERSION, _READY.size) + _READY.pack(life)


def _decode_join(body: bytes) -> Join:
    if len(body) < _JOIN.size:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"a JOIN of {len(body)} bytes")
    (life, number, psn, gid, lid, mtu, ethernet, version, family, zero, depth, receive, taken, none, slots, rows, stride) = (
        _JOIN.unpack_from(body)
    )
    if len(body) != _JOIN.size + slots * _PLACE.size:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"a JOIN of {len(body)} bytes for {slots} slots")
    if zero or none:
        raise PeerFault(Reason.RESERVED_BITS, "a JOIN with reserved fields that are not zero")
    for name, value, least, most in (
        ("queue pair", number, 1, _U24), ("PSN", psn, 0, _U24), ("MTU", mtu, 1, 5), ("link layer", ethernet, 0, 1),
        ("RoCE version", version, 0, 2), ("address family", family, 0, 6), ("queue depth", depth, 8, 4096),
        ("receive size", receive, 4608, 65536), ("slots", slots, 0, MAX_SLOTS), ("rows", rows, 0, MAX_ROWS),
        ("row", stride, 0, STRIDE_AT_MOST),
    ):  # fmt: skip
        if not least <= value <= most:
            raise PeerFault(Reason.LENGTH_BOUNDS, f"a JOIN with {name} {value}, outside {least}..{most}")
    if bool(slots) != bool(rows) or bool(rows) != bool(stride) or stride % 64:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"a JOIN with landing memory of {slots} slots, {rows} rows, {stride} bytes")
    shape = LandingShape(slots, rows, stride)
    places = tuple(_PLACE.iter_unpack(body[_JOIN.size :]))
    if any(address > (1 << 64) - 1 - shape.slot_bytes for address, _key in places):
        raise PeerFault(Reason.LENGTH_BOUNDS, "a JOIN with landing memory beyond the end of memory")
    return Join(life, number, psn, gid, lid, mtu, bool(ethernet), version, family, depth, receive, taken, shape, places)


class RecordReader:
    """Bytes of the data connection in, records out. What is no record raises `PeerFault`; holds one record's bytes at most."""

    def __init__(self) -> None:
        self._bytes = bytearray()

    @property
    def missing(self) -> int:
        """How many more bytes to read at most: never past the record that is coming in."""
        if len(self._bytes) < _ENVELOPE.size:
            return _ENVELOPE.size - len(self._bytes)
        length: int = _ENVELOPE.unpack_from(self._bytes)[2]
        return _ENVELOPE.size + length - len(self._bytes)

    def take(self, data: bytes) -> Join | int | None:
        """Up to `missing` bytes: a `Join`, the life that a READY names, or None while one is under way."""
        self._bytes += data
        if len(self._bytes) < _ENVELOPE.size:
            return None
        kind, version, length = _ENVELOPE.unpack_from(self._bytes)
        if version != VERSION:
            raise PeerFault(Reason.BAD_VERSION, f"version {version} of an rdma record")
        if kind not in (JOIN, READY):
            raise PeerFault(Reason.UNKNOWN_KIND, f"kind {kind} of an rdma record")
        if length > (JOIN_BYTES_AT_MOST if kind == JOIN else _READY.size) or (kind == READY and length != _READY.size):
            raise PeerFault(Reason.LENGTH_BOUNDS, f"an rdma record of {length} bytes")
        if len(self._bytes) < _ENVELOPE.size + length:
            return None
        body = bytes(self._bytes[_ENVELOPE.size :])
        self._bytes.clear()
        if kind == READY:
            life: int = _READY.unpack(body)[0]
            return life
        return _decode_join(body)


@dataclass(slots=True)
class Head:
    """The head of a received SEND. `start`: where the stream's bytes begin."""

    number: int
    taken: int
    counted: bool
    asks: bool
    keys: list[tuple[int, int]]
    start: int


def encode_head(number: int, taken: int, counted: bool, asks: bool, keys: list[tuple[int, int]]) -> bytes:
    """A head with its key records: (slot, new key). At most `KEYS_AT_MOST` of them."""
    flags = (COUNTED if counted else 0) | (ASKS if asks else 0)
    head = HEAD.pack(number & 0xFFFFFFFF, taken, len(keys), flags, 0)
    return head + b"".join(KEY.pack(slot, 0, key) for slot, key in keys) if keys else head


def decode_head(data: bytes | bytearray | memoryview) -> Head:
    """The head of a message that was copied out already. Raises `PeerFault` for what no honest peer sends."""
    if len(data) < HEAD_BYTES:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"a message of {len(data)} bytes")
    number, taken, count, flags, zero = HEAD.unpack_from(data)
    if flags & ~(COUNTED | ASKS):
        raise PeerFault(Reason.UNKNOWN_FLAG, f"flags {flags:#x} of an rdma message")
    if zero:
        raise PeerFault(Reason.RESERVED_BITS, "a reserved field of an rdma message")
    start = HEAD_BYTES + count * KEY.size
    if count > KEYS_AT_MOST or start > len(data):
        raise PeerFault(Reason.LENGTH_BOUNDS, f"{count} keys in a message of {len(data)} bytes")
    counted = bool(flags & COUNTED)
    if not counted and (flags != 0 or count or len(data) != HEAD_BYTES or number):
        raise PeerFault(Reason.LENGTH_BOUNDS, "an acknowledgement that carries more than its report")
    keys = []
    for index in range(count):
        slot, nothing, key = KEY.unpack_from(data, HEAD_BYTES + index * KEY.size)
        if nothing:
            raise PeerFault(Reason.RESERVED_BITS, "a reserved field of a key record")
        keys.append((slot, key))
    return Head(number, taken, counted, bool(flags & ASKS), keys, start)
