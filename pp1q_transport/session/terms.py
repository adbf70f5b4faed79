"""What a formed session agreed on, as plain numbers both session machines read on every frame.

Made from the negotiated HELLOs once per session; never changes afterwards. Holds no secrets. SPEC section 2.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from ..errors import LocalMisuse
from .slots import SlotGeometry

if TYPE_CHECKING:
    from collections.abc import Iterable

MAX_DEPTH: Final = 32  # one bit a row in a slot's mark


class SessionTerms:
    """The negotiated bounds and identities of one session (all integers; sizes in bytes). `shard` is the number of the vocabulary
    shard whose rows travel here, [`first_id`, `end_id`) its range; `end_id` 0 stands for the whole vocabulary."""

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
        shard: int = 0,
        first_id: int = 0,
        end_id: int = 0,
    ) -> None:
        if not 1 <= depth <= MAX_DEPTH:
            raise LocalMisuse(f"depth {depth} is outside 1..{MAX_DEPTH}")
        end_id = end_id or vocab_size
        if not 0 <= first_id < end_id <= vocab_size:
            raise LocalMisuse(f"a shard of [{first_id}, {end_id}) in a vocabulary of {vocab_size}")
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
        self.shard: int = shard
        self.first_id: int = first_id
        self.end_id: int = end_id
        self.shard_entries: int = end_id - first_id
        self.sharded: bool = self.shard_entries < vocab_size
        self.dense_row_bytes: int = (self.shard_entries * 4 + 63) // 64 * 64
        self.max_payload: int = max(self.dense_row_bytes, support * 8, max_context_tokens * 4)

    def geometry(self) -> SlotGeometry:
        """The slot geometry that both ends must have (rows big enough for every negotiated representation)."""
        row = self.dense_row_bytes if self.dense else 0
        if self.sparse:
            row = max(row, (self.support * 8 + 63) // 64 * 64)
        return SlotGeometry(self.max_slots, self.depth, row)

    def judge_step(
        self, depth: int, temperature: float, support: int, representation: int, budget_us: int
    ) -> int:
        """0 for a STEP that the leader will not refuse for its options; raises `LocalMisuse` naming what is wrong."""
        if not 1 <= depth <= self.depth:
            raise LocalMisuse(f"depth {depth} is outside 1..{self.depth}")
        if not 0.0 <= temperature <= 1e6:
            raise LocalMisuse(f"temperature {temperature} is outside 0..1e6")
        if not 1 <= budget_us <= 0xFFFFFFFF:
            raise LocalMisuse(f"budget_us {budget_us} is outside 1..{0xFFFFFFFF}")
        if representation == 1:
            if not self.dense or not 0 <= support <= self.vocab_size:
                raise LocalMisuse(f"a dense STEP of support {support} is outside what was negotiated")
        elif representation != 2 or not self.sparse or not 1 <= support <= self.support:
            raise LocalMisuse(f"representation {representation} of support {support} is outside what was negotiated")
        return 0

    def judge_tokens(self, tokens: Iterable[int], before: int = 0, max_position: int = 0xFFFFFFFF) -> array[int]:
        """The tokens of an OPEN or COMMIT behind `before` others: in the vocabulary, and with them within
        max_context_tokens and the request's last position; raises `LocalMisuse`."""
        try:
            fresh = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise LocalMisuse(f"committed tokens must be int32: {error}") from error
        total = before + len(fresh)
        if not fresh or total > self.max_context_tokens:
            raise LocalMisuse(f"{total} committed tokens are outside 1..{self.max_context_tokens}, as negotiated")
        if total - 1 > max_position:
            raise LocalMisuse(f"position {total - 1} is beyond the request's last, {max_position}")
        if min(fresh) < 0 or max(fresh) >= self.vocab_size:
            raise LocalMisuse(f"a committed token is outside the vocabulary of {self.vocab_size}")
        return fresh
