"""EXCHANGE frames of a group link: a part to a frame, a header to a verdict, a landed frame to a part.

Between `hub` and `member`, which have links and epochs, and `parts`, which knows what a part may say. Both ends write and read
the same frame; keeps no state. SPEC sections 2 and 7, `proto/spec.md`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import wire
from .._native.kernels import xxh3_64
from ..errors import PeerFault, Reason
from .outbox import NO_KEY
from .parts import PART_BYTES_MOST, PURPOSES, Part, values_of

if TYPE_CHECKING:
    from ..memory import ReadMemory
    from ..wire import Header
    from .machine import SessionMachine


def send_part(session: SessionMachine, epoch: int, part: Part) -> None:
    """Queues one rank's part. A peer that does not read loses its link: `broken` is set, and the epoch ends by that."""
    if session.broken:
        return
    payload = part.values.tobytes()
    h = session.blank(wire.EXCHANGE)
    h.request, h.request_generation, h.round, h.position = part.place
    h.shard = part.rank
    h.sequence = part.sequence
    h.purpose = part.purpose
    h.first_id = part.first_id
    h.end_id = part.end_id
    h.epoch = epoch
    h.entry_count = len(part.values)
    h.payload_length = len(payload)
    h.payload_digest = xxh3_64(payload, 0, len(payload), h.payload_seed(session.terms.leader_nonce)) if payload else 0
    try:
        session.outbox.frame(h, payload, 0, len(payload), NO_KEY)
    except PeerFault as fault:
        session.broken = fault.reason.code


def judge_header(header: Header) -> int:
    """0, or the code of the reason that costs the link: purpose and sizes, before a payload byte is read."""
    purpose = PURPOSES.get(header.purpose)
    if purpose is None:
        return Reason.SEMANTIC_MISMATCH.code
    size = header.entry_count * purpose.dtype.itemsize
    if header.payload_length != size or size > PART_BYTES_MOST or not purpose.least <= header.entry_count <= purpose.most:
        return Reason.LENGTH_BOUNDS.code
    return Reason.RESERVED_BITS.code if header.payload_digest and not size else 0


def part_of(header: Header, memory: ReadMemory, leader_nonce: int) -> Part:
    """The part in a landed frame whose header was judged. Raises `PeerFault`."""
    payload = bytes(memoryview(memory)[: header.payload_length])
    if payload and xxh3_64(payload, 0, len(payload), header.payload_seed(leader_nonce)) != header.payload_digest:
        raise PeerFault(Reason.PAYLOAD_DIGEST, f"a part of rank {header.shard}")
    return Part(
        header.shard,
        header.sequence,
        header.request,
        header.request_generation,
        header.round,
        header.position,
        header.purpose,
        header.first_id,
        header.end_id,
        values_of(header.purpose, payload, header.entry_count),
    )
