"""The oracle: what a receiver may accept of a stream of frames, said from the captured originals and the contract alone.

Between `trial`, which asks, and `byspec`. It knows the STEPs that were granted and the frames that honestly answered them. A
frame that is such an answer, byte for byte, is right; any other is judged by proto/spec.md, read anew here and without the
sessions' code. Whatever the transport accepts and the oracle does not is a finding. SPEC section 4.
"""

from __future__ import annotations

import struct
from typing import Final, NamedTuple

import numpy as np

from . import byspec
from .byspec import COMPLETION, DENSE, HEADER, MASS, REASONS, REPLY, SPARSE

_NOTICES: Final = (byspec.RESET, byspec.CANCEL, byspec.STATUS)
_IDENTITY: Final = struct.Struct("<4sBBHQQQIIIIHHBBHII")
_REPLY: Final = struct.Struct("<iIQIIIIQQ")
_COMPLETION: Final = struct.Struct("<QQQIHHQQ")
_NOTICE: Final = struct.Struct("<QQQIHHQQ")


class Terms(NamedTuple):
    """What HELLO agreed on, as far as rows go. Of a session with whole rows."""

    session: int
    leader_nonce: int
    vocab_size: int
    max_slots: int
    dense_bytes: int
    payload_most: int
    draw_proof: bool


class Asked(NamedTuple):
    """One STEP, and its honest answer: `originals` maps each frame of it to its position (0: the COMPLETION)."""

    slot: int
    generation: int
    request: int
    request_generation: int
    round: int
    anchor: int
    depth: int
    representation: int
    support: int
    context: int
    seed: int
    originals: dict[bytes, int]


class Row(NamedTuple):
    """A row that may be accepted."""

    token: int
    entries: int
    digest: int
    payload: bytes


class Proposal:
    """What may stand in one slot: its rows by position, and whether it may be ready, or must be dead."""

    def __init__(self, asked: Asked) -> None:
        self.asked = asked
        self.rows: dict[int, Row] = {}
        self.ready = False
        self.dead = False


class Header(NamedTuple):
    """The fields that every frame has, in order."""

    magic: bytes
    version: int
    kind: int
    flags: int
    boot_nonce: int
    session: int
    request: int
    slot_generation: int
    request_generation: int
    round: int
    position: int
    slot: int
    shard: int
    depth: int
    representation: int
    reserved: int
    payload_length: int
    entry_count: int


class Oracle:
    """Judges streams from the leader within one session."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self._draws: dict[tuple[int, int, int, int], int] = {}

    def judge(self, asked: list[Asked], stream: bytes) -> dict[int, Proposal]:
        """What may be accepted of `stream`, by slot, if these STEPs were granted and nothing else was."""
        slots = {one.slot: Proposal(one) for one in asked}
        at = 0
        while len(stream) - at >= HEADER:
            taken = self._frame(slots, stream, at)
            if taken < 0:
                break
            at += taken
        return slots

    def _frame(self, slots: dict[int, Proposal], stream: bytes, at: int) -> int:
        """One frame: how long it is, or -1 when the link is over with it."""
        head = stream[at : at + HEADER]
        h = Header(*_IDENTITY.unpack_from(head))
        if not self._header_stands(h, head):
            return -1
        size = HEADER + h.payload_length
        if h.kind not in (REPLY, COMPLETION):
            return size if self._notice_stands(slots, h, head) else -1
        if h.slot >= self.terms.max_slots:
            return -1
        proposal = slots.get(h.slot)
        granted = proposal.asked.generation if proposal is not None else 0
        if h.slot_generation > granted:
            return -1
        if proposal is None or h.slot_generation != granted or proposal.dead or proposal.ready:
            return size  # late, or of nobody: it lands nowhere
        frame = stream[at : at + size]
        position = proposal.asked.originals.get(frame)
        if position and position not in proposal.rows:
            proposal.rows[position] = _row(h, frame)
        elif position is None or position:
            self._other(proposal, h, head, frame, size)
        elif not self._complete(proposal, h, head):
            proposal.dead = True
        else:
            proposal.ready = True
        return size

    def _other(self, proposal: Proposal, h: Header, head: bytes, frame: bytes, size: int) -> None:
        """A frame that is no original, or one that came before."""
        if not self._place_stands(proposal.asked, h, head):
            proposal.dead = True
        elif h.kind == COMPLETION:
            proposal.ready = self._complete(proposal, h, head)
            proposal.dead = not proposal.ready
        elif not self._claims_stand(proposal, h, head):
            proposal.dead = True
        elif len(frame) == size:  # else its rest never comes, and it is no row
            if self._values_stand(proposal.asked, h, frame):
                proposal.rows[h.position] = _row(h, frame)
            else:
                proposal.dead = True

    # ---- spec.md, "Order of checks", 1 to 3 and 8 ---------------------------------------------------------------

    def _header_stands(self, h: Header, head: bytes) -> bool:
        if h.magic != b"PP1Q" or h.version != 2 or not 1 <= h.kind <= 19:
            return False
        if byspec.xxh(head[:120]) != int.from_bytes(head[120:], "little") or h.flags or h.reserved:
            return False
        if h.boot_nonce != self.terms.leader_nonce or h.session != self.terms.session:
            return False
        if h.payload_length > self.terms.payload_most:
            return False
        if h.kind == REPLY:
            return head[96:112] == bytes(16)
        no_payload = h.payload_length == 0 and h.entry_count == 0 and h.representation == 0 and head[112:120] == bytes(8)
        if h.kind == COMPLETION:
            return no_payload and head[94:112] == bytes(18)
        if h.kind not in _NOTICES:
            return False  # no leader sends it
        placed = h.kind == byspec.STATUS
        stray = h.depth or (not placed and (h.position or h.shard))
        return no_payload and not stray and head[64:88] == bytes(24) and head[94:112] == bytes(18)

    def _notice_stands(self, slots: dict[int, Proposal], h: Header, head: bytes) -> bool:
        """RESET, CANCEL, STATUS: nothing becomes accepted by one, but a proposal may die."""
        status = _NOTICE.unpack_from(head, 64)[4]
        if not 1 <= status <= REASONS:
            return False
        if h.kind == byspec.STATUS and h.slot_generation == 0:
            return True
        if h.slot >= self.terms.max_slots:
            return False
        proposal = slots.get(h.slot)
        granted = proposal.asked.generation if proposal is not None else 0
        if h.slot_generation > granted:
            return False
        if proposal is not None and h.slot_generation == granted and not proposal.ready:
            proposal.dead = True
        return True

    def _place_stands(self, asked: Asked, h: Header, head: bytes) -> bool:
        context = int.from_bytes(head[72:80], "little")
        return (
            (h.request, h.request_generation, h.round, h.depth, h.shard, context)
            == (asked.request, asked.request_generation, asked.round, asked.depth, 0, asked.context)
        )  # fmt: skip

    def _claims_stand(self, proposal: Proposal, h: Header, head: bytes) -> bool:
        """What a REPLY's header says of its row."""
        asked = proposal.asked
        token, counter, _context, first_id, end_id, mass, before, _, _ = _REPLY.unpack_from(head, 64)
        if not asked.anchor < h.position <= asked.anchor + asked.depth or h.position in proposal.rows:
            return False
        if h.representation != asked.representation or (first_id, end_id) != (0, self.terms.vocab_size):
            return False
        if (mass, before, counter) != (MASS, 0, 0) or not 0 <= token < self.terms.vocab_size:
            return False
        if h.representation == DENSE:
            return h.entry_count == self.terms.vocab_size and h.payload_length == self.terms.dense_bytes
        return h.representation == SPARSE and 1 <= h.entry_count <= asked.support and h.payload_length == 8 * h.entry_count

    # ---- 4 and 5 ------------------------------------------------------------------------------------------------

    def _values_stand(self, asked: Asked, h: Header, frame: bytes) -> bool:
        """A REPLY's payload: its digest, a dyadic q in canonical form, and the token that the request's noise draws from it."""
        payload = memoryview(frame)[HEADER:]
        seed = byspec.payload_seed(frame, self.terms.leader_nonce)
        if byspec.xxh(payload, seed) != int.from_bytes(frame[112:120], "little"):
            return False
        bits = np.frombuffer(payload, "<u4", h.entry_count)
        scaled = bits.view("<f4").astype(np.float64) * MASS
        if (bits >> 31).any() or not np.isfinite(scaled).all() or (scaled != np.floor(scaled)).any() or scaled.max() > MASS:
            return False
        counts = scaled.astype(np.int64)
        if int(counts.sum()) != MASS:
            return False
        if h.representation == DENSE:
            ids = None
            if any(payload[4 * h.entry_count :]):
                return False
        else:
            ids = np.frombuffer(payload, "<i4", h.entry_count, 4 * h.entry_count).astype(np.int64)
            if ids[0] < 0 or ids[-1] >= self.terms.vocab_size or (np.diff(ids) <= 0).any() or not counts.all():
                return False
        token = int.from_bytes(frame[64:68], "little")
        if not self.terms.draw_proof:
            where = token if ids is None else int(np.searchsorted(ids, token))
            return (ids is None or (where < len(ids) and int(ids[where]) == token)) and int(counts[where]) > 0
        u24 = self._draw(asked, h.position)
        index = int(np.searchsorted(np.cumsum(counts), u24, side="right"))
        return token == (index if ids is None else int(ids[index]))

    def _draw(self, asked: Asked, position: int) -> int:
        key = (asked.seed, asked.request_generation, asked.round, position)
        drawn = self._draws.get(key)
        if drawn is None:
            drawn = self._draws[key] = byspec.draw_u24(*key)
        return drawn

    def _complete(self, proposal: Proposal, h: Header, head: bytes) -> bool:
        """A COMPLETION of the right place: every row is there, and the whole is of this size and digest."""
        asked, rows = proposal.asked, proposal.rows
        size, _context, digest, positions, status, _, _, _ = _COMPLETION.unpack_from(head, 64)
        if h.position != asked.anchor or status or positions != asked.depth or len(rows) != asked.depth:
            return False
        ordered = [(position, len(row.payload), row.digest) for position, row in sorted(rows.items())]
        return bool(size == sum(row[1] for row in ordered) and digest == byspec.reply_digest(ordered))


def _row(h: Header, frame: bytes) -> Row:
    return Row(
        int.from_bytes(frame[64:68], "little"), h.entry_count, int.from_bytes(frame[112:120], "little"), frame[HEADER:]
    )
