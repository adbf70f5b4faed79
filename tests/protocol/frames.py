"""Frames that a test may bend: honest bytes taken apart, altered, signed again or not, and put back into the stream.

Between a session's outbox and a link, as the engine's fault injector stands there. Knows the layout, judges nothing.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from pp1q_transport import wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.wire import Header

if TYPE_CHECKING:
    from .world import World

DIGEST_AT = 120


class Frame:
    """A header and its payload. `encode` signs both unless told to keep what the header says.

    `patches` are (offset, XOR) on the encoded header; the header digest is renewed after them when `sign_header`.
    """

    def __init__(self, header: Header, payload: bytes = b"") -> None:
        self.header = header
        self.payload = bytearray(payload)
        self.resize = True
        self.sign_payload = True
        self.sign_header = True
        self.patches: list[tuple[int, int]] = []
        self.cut = 0  # bytes kept of the encoded frame, 0 for all

    @classmethod
    def decode(cls, raw: bytes) -> Frame:
        """The frame in `raw`, a copy."""
        header = Header()
        assert header.decode(raw, 0) == 0, "an honest session encodes valid headers"
        return cls(header, raw[wire.HEADER_BYTES : wire.HEADER_BYTES + header.payload_length])

    def copy(self, leader_nonce: int) -> Frame:
        """A frame of its own with the same bytes."""
        return Frame.decode(self.encode(leader_nonce))

    def encode(self, leader_nonce: int) -> bytes:
        """The bytes to send."""
        header = self.header
        if self.resize:
            header.payload_length = len(self.payload)
        if self.sign_payload and self.payload:
            seed = header.payload_seed(leader_nonce)
            header.payload_digest = xxh3_64(self.payload, 0, len(self.payload), seed)
        raw = bytearray(wire.HEADER_BYTES)
        header.encode(raw, 0)
        for at, bits in self.patches:
            raw[at] ^= bits
        if self.patches and self.sign_header:
            struct.pack_into("<Q", raw, DIGEST_AT, xxh3_64(raw, 0, DIGEST_AT, 0))
        whole = bytes(raw + self.payload)
        return whole[: self.cut] if self.cut else whole


Sent = Frame | bytes
Bend = Callable[[Frame, "World"], Sequence[Sent] | None]


class Tap:
    """Takes the frames of one session's outbox, lets `hook` bend them, and queues what comes out for the link."""

    def __init__(self, source: Outbox, world: World) -> None:
        self.outbox = Outbox()
        self.hook: Bend | None = None
        self.seen: list[Frame] = []
        self.hold = False
        self._source = source
        self._world = world

    def send(self, sent: Sent) -> None:
        """Puts a frame into the stream, unseen by the hook."""
        raw = sent if isinstance(sent, bytes) else sent.encode(self._world.terms.leader_nonce)
        self.outbox.raw(raw, 0, len(raw))

    def pump(self) -> None:
        """Moves every whole frame of the session on."""
        if self.hold:
            return
        taken = bytearray()
        source = self._source
        while (piece := source.front()) is not None:
            taken += memoryview(source.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
            if piece.length:
                taken += memoryview(piece.memory)[piece.offset : piece.offset + piece.length]
            source.sent(piece.head_length + piece.length)
        at = 0
        while at < len(taken):
            frame = Frame.decode(bytes(taken[at:]))
            at += wire.HEADER_BYTES + frame.header.payload_length
            self.seen.append(frame.copy(self._world.terms.leader_nonce))
            out = self.hook(frame, self._world) if self.hook else None
            for sent in [frame] if out is None else out:
                self.send(sent)

    def last(self, kind: int, request: int) -> Frame:
        """A copy of the latest frame of that kind and request that the session queued."""
        found = [frame for frame in self.seen if frame.header.kind == kind and frame.header.request == request]
        return found[-1].copy(self._world.terms.leader_nonce)


# --- bends: what a case does to one frame ---------------------------------------------------------------------------

Value = int | float | Callable[[Header], int | float]


def fields(**values: Value) -> Bend:
    """Sets header fields, to a value or to a function of the header; payload and header are signed for the new place."""

    def bend(frame: Frame, _world: World) -> None:
        for name, value in values.items():
            setattr(frame.header, name, value(frame.header) if callable(value) else value)

    return bend


def moved(**values: Value) -> Bend:
    """As `fields`, but the payload keeps the digest of where it belongs: a valid row in the wrong place."""
    inner = fields(**values)

    def bend(frame: Frame, world: World) -> None:
        frame.sign_payload = False
        inner(frame, world)

    return bend


def bits(at: int, xor: int, sign: bool = True) -> Bend:
    """Flips bits of one header byte; `sign` renews the header digest."""

    def bend(frame: Frame, _world: World) -> None:
        frame.patches.append((at, xor))
        frame.sign_header = sign

    return bend


def payload_bit(at: int, xor: int = 1) -> Bend:
    """Flips bits of one payload byte under the old digest."""

    def bend(frame: Frame, _world: World) -> None:
        frame.sign_payload = False
        frame.payload[at] ^= xor

    return bend


def resized(change: int) -> Bend:
    """Grows or shrinks the payload, signed again."""

    def bend(frame: Frame, _world: World) -> None:
        size = len(frame.payload) + change
        frame.payload = (frame.payload + bytes(max(change, 0)))[:size]

    return bend


def claimed(length: int) -> Bend:
    """Claims a payload length and sends no such payload."""

    def bend(frame: Frame, _world: World) -> None:
        frame.resize = False
        frame.header.payload_length = length

    return bend


def dropped(_frame: Frame, _world: World) -> list[Sent]:
    """The frame never leaves."""
    return []


def twice(frame: Frame, _world: World) -> list[Sent]:
    """The frame leaves twice."""
    return [frame, frame]


def then(make: Callable[[Frame, World], Sent]) -> Bend:
    """Another frame follows this one."""

    def bend(frame: Frame, world: World) -> list[Sent]:
        return [frame, make(frame, world)]

    return bend


def instead(make: Callable[[Frame, World], Sent]) -> Bend:
    """Another frame goes in place of this one."""

    def bend(frame: Frame, world: World) -> list[Sent]:
        return [make(frame, world)]

    return bend


def dense(index: int, bits32: int) -> Bend:
    """Sets the raw FP32 bits of one value of a dense row, padding included."""

    def bend(frame: Frame, _world: World) -> None:
        struct.pack_into("<I", frame.payload, 4 * index, bits32)

    return bend


Entries = list[tuple[int, int]]


def sparse(change: Callable[[Entries], Entries]) -> Bend:
    """Rewrites a sparse row's (ID, raw FP32 bits) pairs; entry count and length follow."""

    def bend(frame: Frame, _world: World) -> None:
        n = frame.header.entry_count
        words = struct.unpack(f"<{n}I{n}i", frame.payload)
        pairs = change(list(zip(words[n:], words[:n], strict=True)))
        frame.header.entry_count = len(pairs)
        frame.payload = bytearray(
            struct.pack(f"<{len(pairs)}I{len(pairs)}i", *(q for _, q in pairs), *(i for i, _ in pairs))
        )

    return bend


def both(*bends: Bend) -> Bend:
    """Several in-place bends, in order."""

    def bend(frame: Frame, world: World) -> None:
        for one in bends:
            assert one(frame, world) is None, "only in-place bends combine"

    return bend


def signed_as(nonce: int = 0, **values: Value) -> Bend:
    """The header stays right, but the payload's digest is the one it would have in another place (or under `nonce`)."""

    def bend(frame: Frame, world: World) -> None:
        elsewhere = frame.copy(world.terms.leader_nonce)
        fields(**values)(elsewhere, world)
        seed = elsewhere.header.payload_seed(nonce or world.terms.leader_nonce)
        frame.header.payload_digest = xxh3_64(frame.payload, 0, len(frame.payload), seed)
        frame.sign_payload = False

    return bend


def tokens(change: Callable[[list[int]], list[int]]) -> Bend:
    """Rewrites the int32 tokens of an OPEN or COMMIT; count and payload digest follow, the prefix digest does not."""

    def bend(frame: Frame, _world: World) -> None:
        given = struct.unpack(f"<{len(frame.payload) // 4}i", frame.payload)
        wanted = change(list(given))
        frame.payload = bytearray(struct.pack(f"<{len(wanted)}i", *wanted))
        frame.header.token_count = len(wanted)

    return bend


def _counts(frame: Frame) -> tuple[list[int], list[int]]:
    """(IDs, counts) of a row."""
    n = frame.header.entry_count
    values = struct.unpack_from(f"<{n}f", frame.payload)
    sparse_row = frame.header.representation == wire.SPARSE
    ids = struct.unpack_from(f"<{n}i", frame.payload, 4 * n) if sparse_row else range(n)
    return list(ids), [round(value * (1 << 24)) for value in values]


def heavier(change: int) -> Bend:
    """Adds `change` to the largest count of a row: still dyadic, but of another sum."""

    def bend(frame: Frame, _world: World) -> None:
        _, counts = _counts(frame)
        at = counts.index(max(counts))
        struct.pack_into("<f", frame.payload, 4 * at, (counts[at] + change) / (1 << 24))

    return bend


def token_of_weight(zero: bool) -> Bend:
    """Names a token of q = 0 (for sparse rows: outside the support), or another one of q > 0 than the one drawn."""

    def bend(frame: Frame, world: World) -> None:
        ids, counts = _counts(frame)
        q = dict(zip(ids, counts, strict=True))
        frame.header.token = next(
            i for i in range(world.terms.vocab_size) if i != frame.header.token and (q.get(i, 0) == 0) == zero
        )

    return bend
