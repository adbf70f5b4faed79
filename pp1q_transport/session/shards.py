"""How a vocabulary is split between the ranks of a group, and whether the rows of all shards make whole rows together.

Between the terms of a session, which hold one rank's range, and the group's decision, which judges what all ranks claim. Knows no
frames, no memory and no slots. SPEC sections 3 and 4 (vocabulary shards).
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from functools import lru_cache
from itertools import pairwise
from typing import TYPE_CHECKING, Final

from ..errors import LocalMisuse, PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ..memory import ReadMemory

MASS: Final = 1 << 24
BLOCK_TOKENS: Final = 32  # of the fixed summation tree: a shard's edge never cuts one
REPLICATE: Final = "replicate"
VOCABULARY: Final = "vocabulary"
REQUEST_OWNER: Final = "request-owner"
GROUP_MODES: Final = (REPLICATE, VOCABULARY, REQUEST_OWNER)
_RANGE: Final = struct.Struct("<II")
_ROW: Final = struct.Struct("<iII")
CLAIM_BYTES_MOST: Final = 8 + 12 * 32


@lru_cache(maxsize=64)
def ranges(vocab_size: int, size: int) -> tuple[tuple[int, int], ...]:
    """[first, end) of every rank, in order: they tile 0..vocab_size, edges are multiples of 32 (the last end may not be), and no
    two differ by more than one block of 32. Raises `LocalMisuse` when there are fewer blocks than ranks."""
    blocks = -(-vocab_size // BLOCK_TOKENS)
    if size < 1 or blocks < size:
        raise LocalMisuse(f"a vocabulary of {vocab_size} has no {size} ranges of at least {BLOCK_TOKENS} tokens")
    each, more = divmod(blocks, size)
    edges = [BLOCK_TOKENS * (each * rank + min(rank, more)) for rank in range(size)] + [vocab_size]
    return tuple(pairwise(edges))


def range_of(mode: str, vocab_size: int, size: int, rank: int) -> tuple[int, int]:
    """What `rank` of a group holds of every row: its own range in mode "vocabulary", the whole otherwise."""
    return ranges(vocab_size, size)[rank] if mode == VOCABULARY else (0, vocab_size)


@dataclass(frozen=True, slots=True)
class Claim:
    """What one rank says of the rows it has judged: its range, and (token, shard_mass, mass_before) of every position."""

    first_id: int
    end_id: int
    rows: tuple[tuple[int, int, int], ...]

    def pack(self) -> bytes:
        """The payload of a VOTE."""
        return _RANGE.pack(self.first_id, self.end_id) + b"".join(_ROW.pack(*row) for row in self.rows)

    @classmethod
    def unpack(cls, data: ReadMemory, length: int) -> Claim:
        """Of the first `length` bytes of such a payload. Raises `PeerFault(length_bounds)`."""
        if length < _RANGE.size or (length - _RANGE.size) % _ROW.size:
            raise PeerFault(Reason.LENGTH_BOUNDS, f"a vote of {length} bytes")
        first_id, end_id = _RANGE.unpack_from(data)
        rows = tuple(_ROW.unpack_from(data, at) for at in range(_RANGE.size, length, _ROW.size))
        return cls(first_id, end_id, rows)

    @property
    def tokens(self) -> tuple[int, ...]:
        """The proposed tokens, in order of positions."""
        return tuple(row[0] for row in self.rows)


def judge_claims(claims: Mapping[int, Claim], vocab_size: int, depth: int) -> int:
    """0 when the claims of all ranks (by rank) make whole rows: ranges tile 0..vocab_size (`id_range`), masses chain from 0 to
    2^24 (`mass`), and all hold the same tokens, one for each of `depth` positions (`rank_disagree`). Else the reason's code."""
    ordered = [claims[rank] for rank in sorted(claims)]
    edge = 0
    for claim in ordered:
        if claim.first_id != edge or claim.end_id <= edge:
            return Reason.ID_RANGE.code
        edge = claim.end_id
    if edge != vocab_size:
        return Reason.ID_RANGE.code
    tokens = ordered[0].tokens
    if len(tokens) != depth or any(claim.tokens != tokens for claim in ordered):
        return Reason.RANK_DISAGREE.code
    for position in range(depth):
        mass = 0
        for claim in ordered:
            _token, shard_mass, mass_before = claim.rows[position]
            if mass_before != mass:
                return Reason.MASS.code
            mass += shard_mass
        if mass != MASS:
            return Reason.MASS.code
    return 0
