"""What a formed session agreed on, as plain numbers both session machines read on every frame.

Made from the negotiated HELLOs once per session; never changes afterwards. Holds no secrets. SPEC section 2.
"""

from __future__ import annotations

from typing import Final

from ..errors import LocalMisuse
from .slots import SlotGeometry

MAX_DEPTH: Final = 32  # one bit a row in a slot's mark


class SessionTerms:
    """The negotiated bounds and identities of one session (all integers; sizes in bytes)."""

    def __init__(
        self,
        session: int,
        leader_nonce: int,
        receiver_nonce: int,
        vocab_size: int,
        depth: int,
        support: int,
        max_slots: int,
        dense: bool = True,
        sparse: bool = True,
        draw_proof: bool = True,
        max_context_tokens: int = 131072,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise LocalMisuse(f"depth {depth} is outside 1..{MAX_DEPTH}")
        self.session: int = session
        self.leader_nonce: int = leader_nonce
        self.receiver_nonce: int = receiver_nonce
        self.vocab_size: int = vocab_size
        self.depth: int = depth
        self.support: int = support
        self.max_slots: int = max_slots
        self.dense: bool = dense
        self.sparse: bool = sparse
        self.draw_proof: bool = draw_proof
        self.max_context_tokens: int = max_context_tokens
        self.dense_row_bytes: int = (vocab_size * 4 + 63) // 64 * 64
        self.max_payload: int = max(self.dense_row_bytes, support * 8, max_context_tokens * 4)

    def geometry(self) -> SlotGeometry:
        """The slot geometry that both ends must have (rows big enough for every negotiated representation)."""
        row = self.dense_row_bytes if self.dense else 0
        if self.sparse:
            row = max(row, (self.support * 8 + 63) // 64 * 64)
        return SlotGeometry(self.max_slots, self.depth, row)
