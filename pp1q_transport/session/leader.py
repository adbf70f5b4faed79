"""The leader session: takes STEPs from one receiver, streams one REPLY a position, closes each with a COMPLETION.

Between a link (through the assembler) and the engine, which hands over rows that are drawn already. Does no I/O, draws nothing
and allocates no counts; it guards that no RNG key is used twice and that a row goes only where it was asked. SPEC 2, 4, 5.
"""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import prefix_digest, xxh3_64
from ..errors import LocalMisuse, Reason
from ..wire import Header
from .assembler import Landing
from .machine import SessionMachine
from .outbox import NO_KEY
from .requests import Request
from .terms import SessionTerms

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import Memory, ReadMemory
    from .requests import RequestTable

IDLE: Final = 0
DRAFTING: Final = 1
SENT: Final = 2
DEAD: Final = 3
# The hot paths' own copies, C integers in the compiled build.
_IDLE: Final = IDLE
_DRAFTING: Final = DRAFTING
_SENT: Final = SENT
_DEAD: Final = DEAD
_POSITIONS: Final = 0xFFFFFFFF

_SLOT_BOUNDS: Final = Reason.SLOT_BOUNDS.code
_LENGTH_BOUNDS: Final = Reason.LENGTH_BOUNDS.code
_UNEXPECTED_KIND: Final = Reason.UNEXPECTED_KIND.code
_PAYLOAD_DIGEST: Final = Reason.PAYLOAD_DIGEST.code
_CONTEXT_MISMATCH: Final = Reason.CONTEXT_MISMATCH.code
_POSITION_BOUNDS: Final = Reason.POSITION_BOUNDS.code
_REQUEST_DUPLICATE: Final = Reason.REQUEST_DUPLICATE.code
_REQUEST_UNKNOWN: Final = Reason.REQUEST_UNKNOWN.code
_GENERATION_STALE: Final = Reason.GENERATION_STALE.code
_GENERATION_DUPLICATE: Final = Reason.GENERATION_DUPLICATE.code
_DEPTH_MISMATCH: Final = Reason.DEPTH_MISMATCH.code
_REPRESENTATION: Final = Reason.REPRESENTATION.code
_SUPPORT_BOUNDS: Final = Reason.SUPPORT_BOUNDS.code
_LIMITS_MISMATCH: Final = Reason.LIMITS_MISMATCH.code
_KEY_REUSE: Final = Reason.KEY_REUSE.code
_ID_RANGE: Final = Reason.ID_RANGE.code
_OVERLOAD: Final = Reason.OVERLOAD.code


class Grant:
    """One STEP as the leader holds it: the slot it may answer into, and how far the answer is. Fields are the session's."""

    def __init__(self, slot: int, depth: int) -> None:
        self.slot: int = slot
        self.state: int = IDLE
        self.generation: int = 0
        self.request: int = 0
        self.request_generation: int = 0
        self.round: int = 0
        self.anchor: int = 0
        self.depth: int = 0
        self.seed: int = 0
        self.context: int = 0
        self.representation: int = 0
        self.support: int = 0
        self.temperature: float = 1.0
        self.target_context: int = 0
        self.budget_us: int = 0
        self.trace_id: int = 0
        self.received_ns: int = 0
        self.rows: int = 0
        self.reply_bytes: int = 0
        self.digests: Memory = bytearray(16 * depth)

    def alive(self, generation: int) -> bool:
        """Whether rows put for this generation still reach the receiver; the object is reused for the slot's next one."""
        return self.state == DRAFTING and self.generation == generation


class LeaderSession(SessionMachine):
    """State of one session at the leader. The caller reads `steps` (new grants), `news` (rare events for the log) and
    `events`: ("open" | "commit" | "reset" | "close", request ID, tokens or reason) in stream order."""

    def __init__(self, terms: SessionTerms, requests: RequestTable, counters: Counters) -> None:
        super().__init__(terms, requests, counters, terms.leader_nonce, terms.receiver_nonce)
        self.grants: list[Grant] = [Grant(slot, terms.depth) for slot in range(terms.max_slots)]
        self.steps: list[Grant] = []
        self.events: list[tuple[str, int, object]] = []
        self.rows: int = 0
        self.completions: int = 0
        self._tokens: Memory = bytearray(terms.max_context_tokens * 4)

    # ---- what the engine asks for -------------------------------------------------------------------------------

    def put_row(
        self,
        grant: Grant,
        generation: int,
        position: int,
        token: int,
        entries: int,
        memory: ReadMemory,
        offset: int,
        length: int,
    ) -> bool:
        """Queues the REPLY of `position`; after the last one the COMPLETION follows by itself. For a session of whole rows.

        `generation` is the slot generation the caller drafted for. False when it is dead (the row is dropped). Rows come in
        order, since each is conditioned on the tokens before it. The payload is `length` bytes at `memory[offset:]`; leave them
        alone until they are sent.
        """
        if self.terms.sharded:
            raise LocalMisuse(f"the rows of this session are those of shard {self.terms.shard}")
        return self.put_shard(grant, generation, position, token, entries, memory, offset, length, 16777216, 0)

    def put_shard(
        self,
        grant: Grant,
        generation: int,
        position: int,
        token: int,
        entries: int,
        memory: ReadMemory,
        offset: int,
        length: int,
        shard_mass: int,
        mass_before: int,
    ) -> bool:
        """`put_row` of this session's shard of the vocabulary: `entries` of it with `shard_mass` in all, behind `mass_before`."""
        if grant.state == _DEAD or grant.state == _IDLE or grant.generation != generation:
            return False
        if grant.state != _DRAFTING:
            raise LocalMisuse(f"slot {grant.slot}: all {grant.depth} rows are put already")
        if position != grant.anchor + 1 + grant.rows:
            raise LocalMisuse(f"position {position} out of order: the next one is {grant.anchor + 1 + grant.rows}")
        if token < 0 or token >= self.terms.vocab_size:
            raise LocalMisuse(f"token {token} is outside the vocabulary of {self.terms.vocab_size}")
        self._check_payload(grant, entries, length)
        h = self._answer(4, grant)  # REPLY
        h.position = position
        h.representation = grant.representation
        h.entry_count = entries
        h.payload_length = length
        h.token = token
        h.draw_counter = 0
        h.context = grant.context
        h.first_id = self.terms.first_id
        h.end_id = self.terms.end_id
        h.shard_mass = shard_mass
        h.mass_before = mass_before
        h.payload_digest = xxh3_64(memory, offset, length, h.payload_seed(self.terms.leader_nonce))
        self.outbox.frame(h, memory, offset, length, grant.slot)
        wire.put_digest_entry(grant.digests, grant.rows, position, length, h.payload_digest)
        grant.rows += 1
        grant.reply_bytes += length
        self.rows += 1
        if grant.rows == grant.depth:
            self._complete(grant, 0)
        return True

    def _check_payload(self, grant: Grant, entries: int, length: int) -> int:
        if grant.representation == 1:
            if entries != self.terms.shard_entries or length != self.terms.dense_row_bytes:
                raise LocalMisuse(f"a dense row is {self.terms.shard_entries} entries in {self.terms.dense_row_bytes} bytes")
        elif (entries < 1 and not self.terms.sharded) or entries > grant.support or length != entries * 8:
            raise LocalMisuse(f"a sparse row is 1..{grant.support} entries of 8 bytes")
        return 0

    def fail(self, grant: Grant, generation: int, reason: Reason) -> None:
        """The draft can't answer this STEP: a COMPLETION with the reason as its status discards it at the receiver."""
        if grant.alive(generation):
            self.counters.refuse(reason)
            self._complete(grant, reason.code)

    def _complete(self, grant: Grant, status: int) -> int:
        h = self._answer(wire.COMPLETION, grant)
        h.position = grant.anchor
        h.context = grant.context
        h.positions = grant.rows
        h.status = status
        h.reply_size = grant.reply_bytes
        h.reply_digest = xxh3_64(grant.digests, 0, grant.rows * 16, 0)
        self.outbox.frame(h, None, 0, 0, NO_KEY)
        grant.state = _SENT if status == 0 else _DEAD
        self.completions += 1
        return 0

    def lost(self) -> None:
        """The link is gone: every grant of this session is dead, its requests are closed."""
        self.requests.end_session()
        for grant in self.grants:
            if grant.state == DRAFTING:
                grant.state = DEAD

    def _answer(self, kind: int, grant: Grant) -> Header:
        h = self.blank(kind)
        h.request = grant.request
        h.request_generation = grant.request_generation
        h.slot = grant.slot
        h.slot_generation = grant.generation
        h.round = grant.round
        h.depth = grant.depth
        h.shard = self.terms.shard
        return h

    # ---- what the assembler tells -------------------------------------------------------------------------------

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        """See `FrameSink.accept`."""
        code = self.check_peer(header)
        if code:
            return -code
        kind = header.kind
        if kind == 3 or kind == 7 or kind == 8:  # STEP, RESET, CANCEL
            if header.slot >= self.terms.max_slots:
                return -_SLOT_BOUNDS
            return 0
        if kind == 1 or kind == 6:  # OPEN, COMMIT
            if header.payload_length > self.terms.max_context_tokens * 4:
                return -_LENGTH_BOUNDS
            # Divided, not multiplied: a hostile token_count must not wrap to the right length.
            if header.token_count < 1 or header.payload_length & 3 or header.payload_length >> 2 != header.token_count:
                return -_LENGTH_BOUNDS
            landing.memory = self._tokens
            return 0
        if kind == 2 or kind == 10:  # CLOSE, STATUS
            return 0
        return -_UNEXPECTED_KIND

    def progress(self, header: Header, landed: int) -> None:
        """See `FrameSink.progress`: tokens are checked once they are whole."""

    def finish(self, header: Header, now_ns: int) -> int:
        """See `FrameSink.finish`."""
        kind = header.kind
        if kind == 3:
            return self._step(header, now_ns)
        if kind == 1:
            return self._open(header)
        if kind == 6:
            return self._commit(header)
        if kind == 2:
            return self._close(header)
        return self._notice(header)

    def _step(self, header: Header, now_ns: int) -> int:
        grant = self.grants[header.slot]
        code = self._judge_step(grant, header)
        if code:
            self._refuse(header, code)
            return 0
        if grant.generation:
            self.outbox.withdraw(grant.slot)
        request = self.requests.get(header.request)
        assert request is not None
        request.mark_drawn(header.request_generation, header.round)
        grant.state = _DRAFTING
        grant.generation = header.slot_generation
        grant.request = header.request
        grant.request_generation = header.request_generation
        grant.round = header.round
        grant.anchor = header.position
        grant.depth = header.depth
        grant.seed = request.seed
        grant.representation = header.representation
        grant.support = header.support_policy
        grant.temperature = header.temperature
        grant.target_context = header.target_context
        grant.budget_us = header.budget_us
        grant.trace_id = header.trace_id
        grant.received_ns = now_ns
        grant.rows = 0
        grant.reply_bytes = 0
        grant.context = header.step_context()
        self.steps.append(grant)
        return 0

    def _judge_step(self, grant: Grant, header: Header) -> int:
        if header.slot_generation == grant.generation:
            return _GENERATION_DUPLICATE
        if header.slot_generation < grant.generation:
            return _GENERATION_STALE
        request = self.requests.get(header.request)
        if request is None:
            return _REQUEST_UNKNOWN
        if not request.may_draw(header.request_generation, header.round):
            return _KEY_REUSE
        if header.request_generation < request.generation:
            return _GENERATION_STALE
        if header.depth < 1 or header.depth > self.terms.depth:
            return _DEPTH_MISMATCH
        if header.position != request.anchor or header.position >= _POSITIONS - header.depth:
            return _POSITION_BOUNDS
        if header.position + header.depth > request.max_position:
            return _POSITION_BOUNDS
        if header.prefix_low != request.prefix_low or header.prefix_high != request.prefix_high:
            return _CONTEXT_MISMATCH
        return self._judge_policy(header)

    def _judge_policy(self, header: Header) -> int:
        if not 0.0 <= header.temperature <= 1e6:
            return _LIMITS_MISMATCH
        if header.budget_us < 1:
            return _LIMITS_MISMATCH
        if header.representation == 1:
            if not self.terms.dense:
                return _REPRESENTATION
            return 0 if header.support_policy <= self.terms.vocab_size else _SUPPORT_BOUNDS
        if header.representation == 2:
            if not self.terms.sparse:
                return _REPRESENTATION
            return 0 if 1 <= header.support_policy <= self.terms.support else _SUPPORT_BOUNDS
        return _REPRESENTATION

    def _refuse(self, header: Header, code: int) -> None:
        """A STEP that can't be drafted: counted here and told to the receiver, which discards its proposal."""
        reason = Reason.from_code(code)
        self.counters.refuse(reason)
        self.news.append(("step_refused", reason, header.slot, header.slot_generation))
        of, slot = header, (header.slot, header.slot_generation)
        h = self.notice(wire.STATUS, of.request, of.request_generation, of.round, *slot, code)
        self.outbox.frame(h, None, 0, 0, NO_KEY)

    def _landed_tokens(self, header: Header) -> tuple[int, array[int]]:
        """(0, tokens), or the code of the first check that fails."""
        seed = header.payload_seed(self.terms.leader_nonce)
        if xxh3_64(self._tokens, 0, header.payload_length, seed) != header.payload_digest:
            return _PAYLOAD_DIGEST, array("i")
        tokens = array("i", bytes(memoryview(self._tokens)[: header.payload_length]))
        if min(tokens) < 0 or max(tokens) >= self.terms.vocab_size:
            return _ID_RANGE, tokens
        return 0, tokens

    def _open(self, header: Header) -> int:
        code, tokens = self._landed_tokens(header)
        if code:
            return -code
        low, high = prefix_digest(0, 0, tokens)
        if low != header.prefix_low or high != header.prefix_high:
            return -_CONTEXT_MISMATCH
        if header.position != header.token_count - 1 or header.position > header.max_position:
            return -_POSITION_BOUNDS
        if self.requests.get(header.request) is not None:
            return -_REQUEST_DUPLICATE
        if self.requests.full():
            return -_OVERLOAD
        self.requests.add(Request(header.request, header.seed, tokens, header.max_position, header.request_generation))
        self.events.append(("open", header.request, tokens))
        return 0

    def _commit(self, header: Header) -> int:
        code, tokens = self._landed_tokens(header)
        if code:
            return -code
        request = self.requests.get(header.request)
        if request is None:
            return -_REQUEST_UNKNOWN
        if header.source != wire.VERIFIED and header.source != wire.TARGET_ONLY:
            return -Reason.RESERVED_BITS.code
        if header.position != request.anchor + header.token_count or header.position > request.max_position:
            return -_POSITION_BOUNDS
        if header.position >= self.terms.max_context_tokens or not self._accepted_fits(header):
            return -_LENGTH_BOUNDS
        request.extend(tokens)
        if request.prefix_low != header.prefix_low or request.prefix_high != header.prefix_high:
            return -_CONTEXT_MISMATCH
        request.generation = max(request.generation, header.request_generation)
        self.events.append(("commit", header.request, tokens))
        return 0

    def _accepted_fits(self, header: Header) -> bool:
        """Whether the committed tokens are the accepted drafts and at most one more; none was drafted in a target-only round."""
        if header.source == wire.TARGET_ONLY:
            return header.accepted == 0
        return header.accepted <= header.token_count <= header.accepted + 1

    def _close(self, header: Header) -> int:
        if header.subject or header.status:
            return -Reason.RESERVED_BITS.code
        if self.requests.remove(header.request) is None:
            return -_REQUEST_UNKNOWN
        for grant in self.grants:
            if grant.request == header.request and grant.state == DRAFTING:
                grant.state = DEAD
        self.events.append(("close", header.request, None))
        return 0

    def _notice(self, header: Header) -> int:
        """RESET, CANCEL or STATUS of the receiver: the generation they name is dead, its unsent rows are withdrawn."""
        code = header.status
        if code < 1 or code > len(Reason):
            return -Reason.RESERVED_BITS.code
        reason = Reason.from_code(code)
        if header.kind == wire.STATUS:
            self.counters.add("peer_status")
            self.peer_status = code
            self.news.append(("receiver_status", reason, header.slot, header.slot_generation))
            return 0
        self.counters.add("reset")
        self.news.append(("reset", reason, header.slot, header.slot_generation))
        grant = self.grants[header.slot]
        if grant.generation != header.slot_generation or grant.state != DEAD:
            self.counters.refuse(reason)  # else it answers our own word, which was counted
        if grant.generation == header.slot_generation:
            grant.state = DEAD
            self.outbox.withdraw(grant.slot)
        request = self.requests.get(header.request)
        if request is not None and header.request_generation >= request.generation:
            # No +1 at the end of u32: it would wrap in the compiled build.
            last = header.request_generation == 0xFFFFFFFF
            request.generation = header.request_generation if last else header.request_generation + 1
        self.events.append(("reset", header.request, reason))
        return 0
