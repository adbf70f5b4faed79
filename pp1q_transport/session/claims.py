"""What a rank's slot says of the rows that landed in it, as its vote states it; and tokens written where no rows landed.

Between slot memory and `shards.Claim`, at rank 0 (`hub`) and at the others (`own_link`). Judges nothing. SPEC section 4.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from .shards import MASS, Claim

if TYPE_CHECKING:
    from ..memory import Memory
    from .slots import Slot
    from .terms import SessionTerms


@dataclass(slots=True)
class Claims:
    """What the ranks have said of one proposal so far, by rank. `owner`: the only one that has anything to say, or
    `wire.OWNER_ALL`."""

    generation: int
    owner: int
    depth: int
    rows: dict[int, Claim] = field(default_factory=dict)


def claim_of(slot: Slot, memory: Memory, terms: SessionTerms) -> Claim:
    """The claim of a slot whose rows all passed; `memory` is the slot region."""
    tokens = struct.unpack_from(f"<{slot.depth}i", memory, slot.meta_at)
    if terms.sharded:
        masses = struct.unpack_from(f"<{2 * slot.depth}I", slot.masses)
    else:
        masses = (MASS, 0) * slot.depth
    rows = zip(tokens, masses[::2], masses[1::2], strict=True)
    return Claim(terms.first_id, terms.end_id, tuple(rows))


def put_tokens(slot: Slot, memory: Memory, tokens: tuple[int, ...]) -> None:
    """Writes the tokens of a proposal whose rows another rank has, and an entry count of 0 for each."""
    struct.pack_into(f"<{slot.depth}i", memory, slot.meta_at, *tokens)
    struct.pack_into(f"<{slot.depth}I", memory, slot.meta_at + 4 * slot.depth, *(0,) * slot.depth)
