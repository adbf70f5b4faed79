# cython: nonecheck=False
"""Frames to bytes and back: the 128-byte header of the data plane, its digest, and the digest seed of a payload.

Between the sessions, which decide what a frame means, and the links, which move its bytes. Does no I/O, holds no session
state, never looks at a payload. The authoritative layout is `proto/pp1q_v2.ksy`; prose in `proto/spec.md`. SPEC section 2.

`wire.pxd` beside this file gives the C types of the compiled build; the same source runs uncompiled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from ._native.kernels import f32_from_bits, f32_to_bits, xxh3_64
from .errors import Reason

if TYPE_CHECKING:
    from .memory import Memory, ReadMemory

WIRE_VERSION: Final = 2
MAGIC: Final = b"PP1Q"
HEADER_BYTES: Final = 128
PROOF_BYTES: Final = 32
U32_MAX: Final = 0xFFFFFFFF

OPEN: Final = 1
CLOSE: Final = 2
STEP: Final = 3
REPLY: Final = 4
COMPLETION: Final = 5
COMMIT: Final = 6
RESET: Final = 7
CANCEL: Final = 8
TOKEN: Final = 9
STATUS: Final = 10
PROOF: Final = 11
# Those of a group link, between rank 0 of a group of receivers and a member.
GRANT: Final = 12
VOTE: Final = 13
DECIDE: Final = 14
RELEASED: Final = 15
EPOCH: Final = 16
AGREE: Final = 17
LEAVE: Final = 18
EXCHANGE: Final = 19  # either way

_NAMES = "OPEN CLOSE STEP REPLY COMPLETION COMMIT RESET CANCEL TOKEN STATUS PROOF "
_NAMES += "GRANT VOTE DECIDE RELEASED EPOCH AGREE LEAVE EXCHANGE"
KIND_NAMES: Final[dict[int, str]] = dict(enumerate(_NAMES.split(), 1))

DENSE: Final = 1
SPARSE: Final = 2
REPRESENTATION_NAMES: Final = {DENSE: "dense", SPARSE: "sparse"}

OWNER_ALL: Final = 0xFFFFFFFF  # a GRANT whose rows go to every rank, whole or each its range

VERIFIED: Final = 1
TARGET_ONLY: Final = 2

# Which optional common fields a kind may carry; every other one must be zero (canonical form: one byte string a frame).
_F_REQUEST: Final = 1
_F_SLOT: Final = 2  # slot and slot_generation
_F_ROUND: Final = 4
_F_POSITION: Final = 8
_F_SHARD: Final = 16
_F_DEPTH: Final = 32
_F_REPRESENTATION: Final = 64
_F_PAYLOAD: Final = 128  # payload_length and payload_digest
_F_ENTRIES: Final = 256
_F_PLACE: Final = _F_REQUEST | _F_SLOT | _F_ROUND | _F_POSITION | _F_SHARD

ALLOWED_FIELDS: Final = {
    OPEN: _F_REQUEST | _F_POSITION | _F_PAYLOAD,
    CLOSE: _F_REQUEST,
    STEP: _F_REQUEST | _F_SLOT | _F_ROUND | _F_POSITION | _F_DEPTH | _F_REPRESENTATION,
    REPLY: _F_PLACE | _F_DEPTH | _F_REPRESENTATION | _F_PAYLOAD | _F_ENTRIES,
    COMPLETION: _F_PLACE | _F_DEPTH,
    COMMIT: _F_REQUEST | _F_ROUND | _F_POSITION | _F_PAYLOAD,
    RESET: _F_REQUEST | _F_SLOT | _F_ROUND,
    CANCEL: _F_REQUEST | _F_SLOT | _F_ROUND,
    TOKEN: _F_PLACE,
    STATUS: _F_PLACE,
    PROOF: _F_SHARD | _F_PAYLOAD,
    GRANT: _F_REQUEST | _F_SLOT | _F_ROUND | _F_POSITION | _F_DEPTH | _F_REPRESENTATION,
    **dict.fromkeys((VOTE, DECIDE), _F_SLOT | _F_PAYLOAD),
    **{RELEASED: _F_SLOT, EPOCH: 0, AGREE: 0, LEAVE: 0},
    EXCHANGE: _F_REQUEST | _F_ROUND | _F_POSITION | _F_SHARD | _F_PAYLOAD | _F_ENTRIES,
}
_ALLOWED_LIST: Final = [ALLOWED_FIELDS.get(kind, 0) for kind in range(20)]

# Typed in wire.pxd: a literal beyond 31 bits would make the compiled build compute with Python integers.
_M32: Final = 0xFFFFFFFF
_SIGN: Final = 0x80000000
_WRAP: Final = 0x100000000

_BAD_MAGIC: Final = Reason.BAD_MAGIC.code
_BAD_VERSION: Final = Reason.BAD_VERSION.code
_UNKNOWN_KIND: Final = Reason.UNKNOWN_KIND.code
_UNKNOWN_FLAG: Final = Reason.UNKNOWN_FLAG.code
_RESERVED_BITS: Final = Reason.RESERVED_BITS.code
_HEADER_DIGEST: Final = Reason.HEADER_DIGEST.code


def _u16(b: ReadMemory, o: int) -> int:
    return b[o] | (b[o + 1] << 8)


def _u32(b: ReadMemory, o: int) -> int:
    return b[o] | (b[o + 1] << 8) | (b[o + 2] << 16) | (b[o + 3] << 24)


def _u64(b: ReadMemory, o: int) -> int:
    low = _u32(b, o)
    high = _u32(b, o + 4)
    return low | (high << 32)


def _put16(b: Memory, o: int, v: int) -> None:
    b[o] = v & 0xFF
    b[o + 1] = (v >> 8) & 0xFF


def _put32(b: Memory, o: int, v: int) -> None:
    b[o] = v & 0xFF
    b[o + 1] = (v >> 8) & 0xFF
    b[o + 2] = (v >> 16) & 0xFF
    b[o + 3] = (v >> 24) & 0xFF


def _put64(b: Memory, o: int, v: int) -> None:
    low = v & _M32
    high = (v >> 32) & _M32
    _put32(b, o, low)
    _put32(b, o + 4, high)


class Header:
    """One frame header, decoded in place and reused; every field an unsigned integer but `token` (int32) and `temperature`.

    The argument area (48 bytes at offset 64) is a union by kind; a field that a kind does not have keeps an old value, so
    only the fields of the current `kind` mean anything.
    """

    def __init__(self) -> None:
        self.version: int = WIRE_VERSION
        self.kind: int = 0
        self.flags: int = 0
        self.boot_nonce: int = 0
        self.session: int = 0
        self.request: int = 0
        self.slot_generation: int = 0
        self.request_generation: int = 0
        self.round: int = 0
        self.position: int = 0
        self.slot: int = 0
        self.shard: int = 0
        self.depth: int = 0
        self.representation: int = 0
        self.payload_length: int = 0
        self.entry_count: int = 0
        self.payload_digest: int = 0
        self.header_digest: int = 0
        # union by kind
        self.prefix_low: int = 0
        self.prefix_high: int = 0
        self.target_context: int = 0
        self.trace_id: int = 0
        self.temperature: float = 0.0
        self.support_policy: int = 0
        self.budget_us: int = 0
        self.token: int = 0
        self.draw_counter: int = 0
        self.context: int = 0
        self.first_id: int = 0
        self.end_id: int = 0
        self.shard_mass: int = 0
        self.mass_before: int = 0
        self.reply_size: int = 0
        self.reply_digest: int = 0
        self.positions: int = 0
        self.status: int = 0
        self.seed: int = 0
        self.token_count: int = 0
        self.max_position: int = 0
        self.accepted: int = 0
        self.source: int = 0
        self.subject: int = 0
        self.epoch: int = 0
        self.owner: int = 0
        self.state_low: int = 0
        self.state_high: int = 0
        self.floor: int = 0
        self.phase: int = 0
        self.sequence: int = 0
        self.purpose: int = 0
        self._scratch: Memory = bytearray(48)

    def clear(self) -> None:
        """Sets the fields that belong to no argument union to zero, ready to build a frame."""
        self.version = WIRE_VERSION
        self.flags = 0
        self.request = self.slot_generation = self.request_generation = self.round = self.position = 0
        self.slot = self.shard = self.depth = self.representation = 0
        self.payload_length = self.entry_count = self.payload_digest = 0

    def decode(self, buf: ReadMemory, offset: int) -> int:
        """Reads 128 bytes at `offset`; returns 0 or the code of the `Reason` that makes the link unusable.

        Checks magic, version, kind, digest, flags and reserved bits in this order. `ValueError` when the bytes don't exist.
        """
        if offset < 0 or offset + 128 > len(buf):
            raise ValueError("no 128 bytes there to decode a header from")
        if buf[offset] != 0x50 or buf[offset + 1] != 0x50 or buf[offset + 2] != 0x31 or buf[offset + 3] != 0x51:
            return _BAD_MAGIC
        self.version = buf[offset + 4]
        if self.version != 2:
            return _BAD_VERSION
        self.kind = buf[offset + 5]
        if self.kind < 1 or self.kind > 19:
            return _UNKNOWN_KIND
        self.header_digest = _u64(buf, offset + 120)
        if xxh3_64(buf, offset, 120, 0) != self.header_digest:
            return _HEADER_DIGEST
        self.flags = _u16(buf, offset + 6)
        if self.flags != 0:
            return _UNKNOWN_FLAG
        self.boot_nonce = _u64(buf, offset + 8)
        self.session = _u64(buf, offset + 16)
        self.request = _u64(buf, offset + 24)
        self.slot_generation = _u32(buf, offset + 32)
        self.request_generation = _u32(buf, offset + 36)
        self.round = _u32(buf, offset + 40)
        self.position = _u32(buf, offset + 44)
        self.slot = _u16(buf, offset + 48)
        self.shard = _u16(buf, offset + 50)
        self.depth = buf[offset + 52]
        self.representation = buf[offset + 53]
        self.payload_length = _u32(buf, offset + 56)
        self.entry_count = _u32(buf, offset + 60)
        self.payload_digest = _u64(buf, offset + 112)
        if _u16(buf, offset + 54) != 0 or self._stray_fields() != 0 or self._decode_args(buf, offset) != 0:
            return _RESERVED_BITS
        return 0

    def _stray_fields(self) -> int:
        """1 when a common field is set that this kind never carries."""
        allowed = _ALLOWED_LIST[self.kind]
        stray = 0
        if not allowed & 1:
            stray |= self.request | self.request_generation
        if not allowed & 2:
            stray |= self.slot | self.slot_generation
        if not allowed & 4:
            stray |= self.round
        if not allowed & 8:
            stray |= self.position
        if not allowed & 16:
            stray |= self.shard
        if not allowed & 32:
            stray |= self.depth
        if not allowed & 64:
            stray |= self.representation
        if not allowed & 128:
            stray |= self.payload_length | self.payload_digest
        if not allowed & 256:
            stray |= self.entry_count
        return 1 if stray else 0

    def _decode_args(self, buf: ReadMemory, offset: int) -> int:
        """Reads the union of `kind`; returns the OR of its reserved bytes (0 is right)."""
        kind = self.kind
        a0 = _u64(buf, offset + 64)
        a1 = _u64(buf, offset + 72)
        a2 = _u64(buf, offset + 80)
        a3 = _u64(buf, offset + 88)
        a4 = _u64(buf, offset + 96)
        a5 = _u64(buf, offset + 104)
        if kind == 4:  # REPLY
            self._set_token(a0)
            self.context = a1
            self.first_id = a2 & _M32
            self.end_id = a2 >> 32
            self.shard_mass = a3 & _M32
            self.mass_before = a3 >> 32
            return 1 if a4 | a5 else 0
        if kind == 5:  # COMPLETION
            self.reply_size = a0
            self.context = a1
            self.reply_digest = a2
            self.positions = a3 & _M32
            self.status = (a3 >> 32) & 0xFFFF
            return 1 if (a3 >> 48) | a4 | a5 else 0
        if kind == 3:  # STEP
            self.prefix_low = a0
            self.prefix_high = a1
            self.target_context = a2
            self.trace_id = a3
            self.temperature = f32_from_bits(a4 & _M32)
            self.support_policy = a4 >> 32
            self.budget_us = a5 & _M32
            return 1 if a5 >> 32 else 0
        if kind == 6:  # COMMIT
            self.prefix_low = a0
            self.prefix_high = a1
            self.token_count = a2 & _M32
            self.accepted = a2 >> 32
            self.source = a3 & _M32
            return 1 if (a3 >> 32) | a4 | a5 else 0
        if kind == 1:  # OPEN
            self.prefix_low = a0
            self.prefix_high = a1
            self.seed = a2
            self.token_count = a3 & _M32
            self.max_position = a3 >> 32
            return 1 if a4 | a5 else 0
        if kind == 9:  # TOKEN
            self._set_token(a0)
            self.context = a1
            return 1 if a2 | a3 | a4 | a5 else 0
        if kind > 11:
            return self._decode_group(a0, a1, a2, a3, a4, a5)
        # CLOSE, RESET, CANCEL, STATUS: subject and status; PROOF: role in subject
        self.subject = a3 & _M32
        self.status = (a3 >> 32) & 0xFFFF
        return 1 if a0 | a1 | a2 | (a3 >> 48) | a4 | a5 else 0

    def _decode_group(self, a0: int, a1: int, a2: int, a3: int, a4: int, a5: int) -> int:
        """The unions of the kinds of a group link, as `_decode_args`."""
        kind = self.kind
        if kind == 12:  # GRANT
            self.seed = a0
            self.context = a1
            self.target_context = a2
            self.trace_id = a3
            self.support_policy = a4 & _M32
            self.budget_us = a4 >> 32
            self.epoch = a5 & _M32
            self.owner = a5 >> 32
            return 0
        self.epoch = a2 & _M32
        if kind == 17:  # AGREE
            self.state_low = a0
            self.state_high = a1
            self.floor = a2 >> 32
            return 1 if a3 | a4 | a5 else 0
        if kind == 19:  # EXCHANGE
            self.sequence = a0 & _M32
            self.purpose = a0 >> 32
            self.first_id = a1 & _M32
            self.end_id = a1 >> 32
            return 1 if (a2 >> 32) | a3 | a4 | a5 else 0
        stray = a0 | a1 | (a2 >> 32) | a4 | a5
        if kind == 16:  # EPOCH
            self.phase = a3 & _M32
            return 1 if stray | (a3 >> 32) else 0
        self.status = (a3 >> 32) & 0xFFFF  # VOTE, DECIDE, RELEASED, LEAVE
        return 1 if stray | (a3 & _M32) | (a3 >> 48) else 0

    def _set_token(self, a0: int) -> None:
        low = a0 & _M32
        self.token = low - _WRAP if low >= _SIGN else low
        self.draw_counter = a0 >> 32

    def encode(self, buf: Memory, offset: int) -> None:
        """Writes 128 bytes at `offset`, the header digest included. `ValueError` when there is no room."""
        if offset < 0 or offset + 128 > len(buf):
            raise ValueError("no room for the 128 bytes of a header")
        _put32(buf, offset, 0x51315050)  # the magic
        buf[offset + 4] = self.version
        buf[offset + 5] = self.kind
        _put16(buf, offset + 6, self.flags)
        _put64(buf, offset + 8, self.boot_nonce)
        _put64(buf, offset + 16, self.session)
        _put64(buf, offset + 24, self.request)
        _put32(buf, offset + 32, self.slot_generation)
        _put32(buf, offset + 36, self.request_generation)
        _put32(buf, offset + 40, self.round)
        _put32(buf, offset + 44, self.position)
        _put16(buf, offset + 48, self.slot)
        _put16(buf, offset + 50, self.shard)
        buf[offset + 52] = self.depth
        buf[offset + 53] = self.representation
        _put16(buf, offset + 54, 0)
        _put32(buf, offset + 56, self.payload_length)
        _put32(buf, offset + 60, self.entry_count)
        self._encode_args(buf, offset)
        _put64(buf, offset + 112, self.payload_digest)
        self.header_digest = xxh3_64(buf, offset, 120, 0)
        _put64(buf, offset + 120, self.header_digest)

    def _encode_args(self, buf: Memory, offset: int) -> None:
        kind = self.kind
        a0 = a1 = a2 = a3 = a4 = a5 = 0
        if kind == 4 or kind == 9:
            a0 = _pair(self.token & _M32, self.draw_counter)
            a1 = self.context
            if kind == 4:
                a2 = _pair(self.first_id, self.end_id)
                a3 = _pair(self.shard_mass, self.mass_before)
        elif kind == 5:
            a0 = self.reply_size
            a1 = self.context
            a2 = self.reply_digest
            a3 = _pair(self.positions, self.status)
        elif kind == 3:
            a0 = self.prefix_low
            a1 = self.prefix_high
            a2 = self.target_context
            a3 = self.trace_id
            a4 = _pair(f32_to_bits(self.temperature), self.support_policy)
            a5 = self.budget_us
        elif kind == 6:
            a0 = self.prefix_low
            a1 = self.prefix_high
            a2 = _pair(self.token_count, self.accepted)
            a3 = self.source
        elif kind == 1:
            a0 = self.prefix_low
            a1 = self.prefix_high
            a2 = self.seed
            a3 = _pair(self.token_count, self.max_position)
        elif kind == 12:
            a0 = self.seed
            a1 = self.context
            a2 = self.target_context
            a3 = self.trace_id
            a4 = _pair(self.support_policy, self.budget_us)
            a5 = _pair(self.epoch, self.owner)
        elif kind == 17:
            a0 = self.state_low
            a1 = self.state_high
            a2 = _pair(self.epoch, self.floor)
        elif kind == 16:
            a2 = self.epoch
            a3 = self.phase
        elif kind == 19:
            a0 = _pair(self.sequence, self.purpose)
            a1 = _pair(self.first_id, self.end_id)
            a2 = self.epoch
        elif kind > 12:
            a2 = self.epoch
            a3 = _pair(0, self.status)
        else:
            a3 = _pair(self.subject, self.status)
        _put64(buf, offset + 64, a0)
        _put64(buf, offset + 72, a1)
        _put64(buf, offset + 80, a2)
        _put64(buf, offset + 88, a3)
        _put64(buf, offset + 96, a4)
        _put64(buf, offset + 104, a5)

    def payload_seed(self, leader_nonce: int) -> int:
        """The XXH3-64 seed of this frame's payload digest: the frame's whole identity (SPEC section 2).

        Packed little-endian without padding: kind u8, leader boot nonce u64, session u64, request u64, shard u16, slot u16,
        slot_generation u32, request_generation u32, round u32, position u32.
        """
        b = self._scratch
        b[0] = self.kind
        _put64(b, 1, leader_nonce)
        _put64(b, 9, self.session)
        _put64(b, 17, self.request)
        _put16(b, 25, self.shard)
        _put16(b, 27, self.slot)
        _put32(b, 29, self.slot_generation)
        _put32(b, 33, self.request_generation)
        _put32(b, 37, self.round)
        _put32(b, 41, self.position)
        return xxh3_64(b, 0, 45, 0)

    def step_context(self) -> int:
        """XXH3-64 of everything the rows of this STEP are conditioned on; a REPLY of another context is refused.

        Packed little-endian without padding: prefix digest 16 bytes, target context u64, temperature f32, support policy u32,
        representation u8. The reason is `context_mismatch`.
        """
        b = self._scratch
        _put64(b, 0, self.prefix_low)
        _put64(b, 8, self.prefix_high)
        _put64(b, 16, self.target_context)
        _put32(b, 24, f32_to_bits(self.temperature))
        _put32(b, 28, self.support_policy)
        b[32] = self.representation
        return xxh3_64(b, 0, 33, 0)


def _pair(low: int, high: int) -> int:
    return low | (high << 32)


def put_digest_entry(buf: Memory, index: int, position: int, size: int, digest: int) -> None:
    """Writes entry `index` (16 bytes: position u32, size u32, payload digest u64) of what COMPLETION's digest covers."""
    offset = index * 16
    if index < 0 or offset + 16 > len(buf):
        raise ValueError("no room for a digest entry")
    _put32(buf, offset, position)
    _put32(buf, offset + 4, size)
    _put64(buf, offset + 8, digest)
