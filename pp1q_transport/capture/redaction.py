"""Redaction: a frame without tokens and q, nor anything they could be computed from.

Between `recorder` and the file. A digest over a few tokens tells them to whoever tries all 129,280, so digests over tokens or q
go too, and the request's seed with them. What stays: who, where, when, how large, and why. SPEC section 2.
"""

from __future__ import annotations

import struct
from typing import Final

from .. import wire
from .._native.kernels import xxh3_64
from ..wire import Header

_U64: Final = struct.Struct("<Q")
# Arguments (offset, bytes) that say tokens, mass, or a digest of such.
_HIDDEN: Final[dict[int, tuple[tuple[int, int], ...]]] = {
    wire.OPEN: ((64, 24),),  # prefix, seed
    wire.STEP: ((64, 16),),  # prefix
    wire.REPLY: ((64, 4), (72, 8), (88, 8)),  # token, context, masses
    wire.COMPLETION: ((72, 16),),  # context, reply digest
    wire.COMMIT: ((64, 16),),
    wire.TOKEN: ((64, 4), (72, 8)),
    wire.GRANT: ((64, 16),),  # seed, context
    wire.AGREE: ((64, 16),),  # digest of committed state; an EXCHANGE says its values in the payload alone
}


class Redactor:
    """Turns frames into what may be kept of them."""

    def __init__(self) -> None:
        self._header = Header()

    def redact(self, frame: bytes) -> bytes:
        """The header alone, what it says of tokens and q zeroed, its digest made anew. Nothing of what is no frame."""
        if len(frame) < wire.HEADER_BYTES or self._header.decode(frame, 0):
            return b""
        kept = bytearray(frame[: wire.HEADER_BYTES])
        for at, size in _HIDDEN.get(self._header.kind, ()):
            kept[at : at + size] = bytes(size)
        kept[112:120] = bytes(8)
        _U64.pack_into(kept, 120, xxh3_64(kept, 0, 120, 0))
        return bytes(kept)
