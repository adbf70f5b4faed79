"""What both session machines are made of: terms, an outbox, a header to build frames in, and the account of trouble.

Between `leader` and `receiver`, which add their roles, and the engine, which treats both alike. Decides nothing about proposals.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import xxh3_64
from ..errors import Reason
from ..wire import Header
from .assembler import FrameSink
from .outbox import NO_KEY, Outbox
from .terms import SessionTerms

if TYPE_CHECKING:
    from ..counters import Counters
    from .requests import Request, RequestTable

_BOOT_NONCE: Final = Reason.BOOT_NONCE.code
_SESSION_MISMATCH: Final = Reason.SESSION_MISMATCH.code


class SessionMachine(FrameSink):
    """The common half of a session. `broken` is the code of the reason that ends it from within, `peer_status` that of the
    peer's last word; `news` are rare events for the log: (event, reason, slot, slot_generation)."""

    def __init__(
        self, terms: SessionTerms, requests: RequestTable, counters: Counters, ours_nonce: int, theirs_nonce: int
    ) -> None:
        self.terms: SessionTerms = terms
        self.requests: RequestTable = requests
        self.counters: Counters = counters
        self.outbox: Outbox = Outbox()
        self.header: Header = Header()
        self.news: list[tuple[str, Reason, int, int]] = []
        self.broken: int = 0
        self.peer_status: int = 0
        self._ours_nonce: int = ours_nonce
        self._theirs_nonce: int = theirs_nonce

    def blank(self, kind: int) -> Header:
        """The session's own header, cleared and addressed; good until the next call."""
        h = self.header
        h.clear()
        h.kind = kind
        h.boot_nonce = self._ours_nonce
        h.session = self.terms.session
        return h

    def send_open(self, request: Request) -> None:
        """Queues OPEN of a request with all its committed tokens."""
        h = self.blank(wire.OPEN)
        h.request = request.request
        h.request_generation = request.generation
        h.position = request.anchor
        h.prefix_low = request.prefix_low
        h.prefix_high = request.prefix_high
        h.seed = request.seed
        h.max_position = request.max_position
        self.send_tokens(h, request.tokens.tobytes())

    def send_tokens(self, h: Header, payload: bytes) -> None:
        """Queues a frame that carries int32 tokens, `payload`."""
        h.token_count = len(payload) // 4
        h.payload_length = len(payload)
        h.payload_digest = xxh3_64(payload, 0, len(payload), h.payload_seed(self.terms.leader_nonce))
        self.outbox.frame(h, payload, 0, len(payload), NO_KEY)

    def notice(
        self, kind: int, request: int, request_generation: int, round: int, slot: int, slot_generation: int, code: int
    ) -> Header:
        """A RESET, CANCEL or STATUS about a STEP, with the code of its reason; slot and generation are 0 for one never sent."""
        h = self.blank(kind)
        h.request = request
        h.request_generation = request_generation
        h.round = round
        h.slot = slot
        h.slot_generation = slot_generation
        h.subject = wire.STEP
        h.status = code
        return h

    def check_peer(self, header: Header) -> int:
        """0, or the code of the reason why this frame is not of this session's peer in this life."""
        if header.boot_nonce != self._theirs_nonce:
            return _BOOT_NONCE
        if header.session != self.terms.session:
            return _SESSION_MISMATCH
        return 0

    def farewell(self, reason: Reason) -> bytes:
        """The STATUS frame that tells the peer why this side ends the link."""
        h = self.blank(wire.STATUS)
        h.subject = 0
        h.status = reason.code
        frame = bytearray(wire.HEADER_BYTES)
        h.encode(frame, 0)
        return bytes(frame)
