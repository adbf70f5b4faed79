"""A second encoder of the PP1Q wire format, written from `spec.md` with `struct` alone.

Between the golden vectors' maker and nothing: it shares no line with the transport, so that equal bytes prove
something. Builds frames, rows, proofs and control messages, also impossible ones; decodes nothing.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import xxhash

MASS = 1 << 24
KINDS = {
    "OPEN": 1, "CLOSE": 2, "STEP": 3, "REPLY": 4, "COMPLETION": 5, "COMMIT": 6,
    "RESET": 7, "CANCEL": 8, "TOKEN": 9, "STATUS": 10, "PROOF": 11,
    "GRANT": 12, "VOTE": 13, "DECIDE": 14, "RELEASED": 15, "EPOCH": 16, "AGREE": 17, "LEAVE": 18, "EXCHANGE": 19,
}  # fmt: skip

COMMON = struct.Struct("<4sBBHQQQIIIIHHBBHII")
COMMON_FIELDS = (
    "magic", "version", "kind", "flags", "boot_nonce", "session", "request", "slot_generation", "request_generation",
    "round", "position", "slot", "shard", "depth", "representation", "reserved", "payload_length", "entry_count",
)  # fmt: skip
_BALLOT = ("<16xI8xH18x", ("epoch", "status"))
_NOTICE = ("<24xIH18x", ("subject", "status"))
ARGUMENTS: dict[str, tuple[str, tuple[str, ...]]] = {
    "OPEN": ("<QQQII16x", ("prefix_low", "prefix_high", "seed", "token_count", "max_position")),
    "STEP": (
        "<QQQQfII4x",
        ("prefix_low", "prefix_high", "target_context", "trace_id", "temperature", "support_policy", "budget_us"),
    ),
    "REPLY": (
        "<iIQIIII16x",
        ("token", "draw_counter", "context", "first_id", "end_id", "shard_mass", "mass_before"),
    ),
    "COMPLETION": ("<QQQIH18x", ("reply_size", "context", "reply_digest", "positions", "status")),
    "COMMIT": ("<QQIII20x", ("prefix_low", "prefix_high", "token_count", "accepted", "source")),
    "TOKEN": ("<iIQ32x", ("token", "draw_counter", "context")),
    "CLOSE": _NOTICE,
    "RESET": _NOTICE,
    "CANCEL": _NOTICE,
    "STATUS": _NOTICE,
    "PROOF": _NOTICE,
    "GRANT": (
        "<QQQQIIII",
        ("seed", "context", "target_context", "trace_id", "support_policy", "budget_us", "epoch", "owner"),
    ),
    "VOTE": _BALLOT,
    "DECIDE": _BALLOT,
    "RELEASED": _BALLOT,
    "EPOCH": ("<16xI4xI20x", ("epoch", "phase")),
    "AGREE": ("<QQII24x", ("state_low", "state_high", "epoch", "floor")),
    "LEAVE": _BALLOT,
    "EXCHANGE": ("<IIIII28x", ("sequence", "purpose", "first_id", "end_id", "epoch")),
}
WIDE = frozenset({
    "boot_nonce", "session", "request", "prefix_low", "prefix_high", "seed", "target_context", "trace_id", "context",
    "reply_digest", "state_low", "state_high",
})  # fmt: skip


# -- digests and random numbers ----------------------------------------------------------------------------------------


def xxh3(data: bytes, seed: int = 0) -> int:
    """XXH3-64."""
    return int(xxhash.xxh3_64_intdigest(data, seed))


def prefix_digest(tokens: Sequence[int]) -> tuple[int, int]:
    """(low, high) words of the 128-bit digest of a committed prefix."""
    low = high = 0
    for token in tokens:
        digest = int(xxhash.xxh3_128_intdigest(struct.pack("<QQi", low, high, token)))
        low, high = digest & (2**64 - 1), digest >> 64
    return low, high


def context_digest(step: Mapping[str, Any]) -> int:
    """The digest of all that the rows of a STEP are conditioned on."""
    return xxh3(
        struct.pack(
            "<QQQfIB", step["prefix_low"], step["prefix_high"], step["target_context"], step["temperature"],
            step["support_policy"], step["representation"],
        )
    )  # fmt: skip


def philox_word(counter: tuple[int, int, int, int], key: tuple[int, int]) -> int:
    """Output word 0 of Philox4x32-10."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        even, odd = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (odd >> 32) ^ c1 ^ k0, odd & 0xFFFFFFFF, (even >> 32) ^ c3 ^ k1, even & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0


def proposal_u24(seed: int, request_generation: int, round_: int, position: int) -> int:
    """The uniform 24-bit integer that draws the token of a position (domain PROPOSAL, draw counter 0)."""
    return philox_word((1 << 24, position, round_, request_generation), (seed & 0xFFFFFFFF, seed >> 32)) >> 8


def draw(counts: Sequence[int], u24: int) -> int:
    """The first index whose cumulative count exceeds u24."""
    total = 0
    for index, count in enumerate(counts):
        total += count
        if total > u24:
            return index
    raise ValueError("the counts do not reach u24")


# -- rows --------------------------------------------------------------------------------------------------------------


def fp32(counts: Sequence[int]) -> bytes:
    """q = count / 2^24, little-endian FP32, exact."""
    return struct.pack(f"<{len(counts)}f", *(count / MASS for count in counts))


def dense_payload(counts: Sequence[int]) -> bytes:
    """A dense row: q of every token, then zeros up to a multiple of 64 bytes."""
    row = fp32(counts)
    return row + bytes(-len(row) % 64)


def sparse_payload(ids: Sequence[int], counts: Sequence[int]) -> bytes:
    """A sparse row: q of every entry, then the int32 IDs in the same order."""
    return fp32(counts) + struct.pack(f"<{len(ids)}i", *ids)


def tokens_payload(tokens: Sequence[int]) -> bytes:
    """int32 tokens of OPEN and COMMIT."""
    return struct.pack(f"<{len(tokens)}i", *tokens)


def counts_to_mass(weights: Sequence[int]) -> list[int]:
    """Integer weights scaled to counts that sum to 2^24; what the floors leave over goes to the first positive one."""
    total = sum(weights)
    counts = [weight * MASS // total for weight in weights]
    first = next(index for index, weight in enumerate(weights) if weight)
    counts[first] += MASS - sum(counts)
    return counts


# -- frames ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Frame:
    """One frame to be encoded. What is not given in `fields` is zero; digests are right unless given.

    `patch` maps byte offsets of the header to replacement bytes, put in before the header digest is taken.
    """

    kind: str
    leader_nonce: int
    fields: Mapping[str, Any]
    payload: bytes = b""
    payload_digest: int | None = None
    header_digest: int | None = None
    kind_byte: int | None = None
    patch: Mapping[int, bytes] = field(default_factory=dict)

    def but(self, **changes: Any) -> Frame:
        """A copy with other `fields` entries."""
        return replace(self, fields={**self.fields, **changes})

    def all_fields(self) -> dict[str, Any]:
        """Every common field and argument by name."""
        values: dict[str, Any] = dict.fromkeys(COMMON_FIELDS, 0) | dict.fromkeys(ARGUMENTS[self.kind][1], 0)
        values |= {"magic": b"PP1Q", "version": 2, "kind": KINDS[self.kind], "payload_length": len(self.payload)}
        return values | dict(self.fields)

    def payload_seed(self) -> int:
        """XXH3-64 of the frame's identity, the seed of its payload digest."""
        v = self.all_fields()
        return xxh3(
            struct.pack(
                "<BQQQHHIIII", v["kind"], self.leader_nonce, v["session"], v["request"], v["shard"], v["slot"],
                v["slot_generation"], v["request_generation"], v["round"], v["position"],
            )
        )  # fmt: skip

    def digest_of_payload(self) -> int:
        """What the header states; 0 for a frame without a payload."""
        if self.payload_digest is not None:
            return self.payload_digest
        return xxh3(self.payload, self.payload_seed()) if self.payload else 0

    def header(self) -> bytes:
        """The 128 bytes."""
        values = self.all_fields()
        if self.kind_byte is not None:
            values["kind"] = self.kind_byte
        layout, names = ARGUMENTS[self.kind]
        head = bytearray(COMMON.pack(*(values[name] for name in COMMON_FIELDS)))
        head += struct.pack(layout, *(values[name] for name in names))
        head += struct.pack("<Q", self.digest_of_payload())
        for offset, replacement in self.patch.items():
            head[offset : offset + len(replacement)] = replacement
        digest = xxh3(bytes(head)) if self.header_digest is None else self.header_digest
        return bytes(head) + struct.pack("<Q", digest)

    def encode(self) -> bytes:
        """Header and payload."""
        return self.header() + self.payload


# -- control messages --------------------------------------------------------------------------------------------------


def msgpack(value: object) -> bytes:
    """The shortest msgpack form of a value, map keys in the order given."""
    if value is None or isinstance(value, bool):
        return {None: b"\xc0", False: b"\xc2", True: b"\xc3"}[value]
    if isinstance(value, int):
        return _msgpack_int(value)
    if isinstance(value, float):
        return b"\xcb" + struct.pack(">d", value)
    if isinstance(value, str):
        data = value.encode()
        return (bytes([0xA0 | len(data)]) if len(data) < 32 else _sized(len(data), 0xD9)) + data
    if isinstance(value, bytes):
        return _sized(len(value), 0xC4) + value
    if isinstance(value, Mapping):
        body = b"".join(msgpack(key) + msgpack(item) for key, item in value.items())
        return (bytes([0x80 | len(value)]) if len(value) < 16 else b"\xde" + struct.pack(">H", len(value))) + body
    if isinstance(value, (list, tuple)):
        body = b"".join(msgpack(item) for item in value)
        return (bytes([0x90 | len(value)]) if len(value) < 16 else b"\xdc" + struct.pack(">H", len(value))) + body
    raise TypeError(f"no control message holds a {type(value).__name__}")


def _msgpack_int(value: int) -> bytes:
    if value < 0:
        raise ValueError("no golden message holds a negative integer")
    if value < 0x80:
        return bytes([value])
    for code, layout, bits in ((0xCC, ">B", 8), (0xCD, ">H", 16), (0xCE, ">I", 32), (0xCF, ">Q", 64)):
        if value < 1 << bits:
            return bytes([code]) + struct.pack(layout, value)
    raise ValueError("an integer beyond 64 bits")


def _sized(length: int, first_code: int) -> bytes:
    return bytes([first_code, length]) if length < 256 else bytes([first_code + 1]) + struct.pack(">H", length)


def transcript(hello: bytes, ack: bytes) -> bytes:
    """SHA-256 over the two messages as they travelled."""
    parts = b"".join(struct.pack("<I", len(part)) + part for part in (hello, ack))
    return hashlib.sha256(b"pp1q transcript 2" + parts).digest()


def link_proof(
    secret: bytes,
    role: str,
    rank: int,
    session: int,
    leader_link_nonce: bytes,
    receiver_link_nonce: bytes,
    script: bytes,
) -> bytes:
    """The 32 payload bytes of a PROOF frame."""
    fixed = b"pp1q link proof 2" + struct.pack("<BIQ", {"leader": 0, "receiver": 1}[role], rank, session)
    return hmac.new(secret, fixed + leader_link_nonce + receiver_link_nonce + script, hashlib.sha256).digest()
