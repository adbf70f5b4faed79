"""The proof frames that join a link to a session: 160 bytes each way, judged before anything else may be said.

Between the port that accepted a raw connection and the handshake's `Agreement`. Sans-IO: bytes in, a verdict out; the caller
keeps the clock (one second) and the bound on half-open links. SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from .._native.kernels import xxh3_64
from ..errors import Reason
from ..wire import Header
from .negotiate import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..memory import ReadMemory
    from .negotiate import Agreement

PROOF_FRAME_BYTES: Final = wire.HEADER_BYTES + wire.PROOF_BYTES
_ROLE_CODES: Final = {role: code for code, role in enumerate(Role, 1)}


def leader_nonce(agreement: Agreement) -> int:
    """The boot nonce of an agreement's leader (on a group link: coordinator), whichever side we are."""
    hello = agreement.ours if agreement.ours.role.sends_rows else agreement.theirs
    return hello.boot_nonce


def proof_frame(agreement: Agreement) -> bytes:
    """Our PROOF frame: header and 32 bytes of HMAC-SHA256."""
    ours = agreement.ours
    payload = agreement.proof_of(ours.role)
    header = Header()
    header.clear()
    header.kind = wire.PROOF
    header.boot_nonce = ours.boot_nonce
    header.session = agreement.session
    header.shard = ours.rank
    header.subject = _ROLE_CODES[ours.role]
    header.status = 0
    header.payload_length = wire.PROOF_BYTES
    header.payload_digest = xxh3_64(payload, 0, len(payload), header.payload_seed(leader_nonce(agreement)))
    frame = bytearray(PROOF_FRAME_BYTES)
    header.encode(frame, 0)
    frame[wire.HEADER_BYTES :] = payload
    return bytes(frame)


class ProofReader:
    """Collects one PROOF frame and judges it. `find` gives the agreement of a session ID, or None.

    `take` returns the reason of the first failing check; `agreement` is set once the peer has proven itself.
    """

    def __init__(self, find: Callable[[int], Agreement | None]) -> None:
        self._find = find
        self._buffer = bytearray()
        self._header = Header()
        self.agreement: Agreement | None = None

    @property
    def missing(self) -> int:
        """How many bytes the proof still needs: read no more than that."""
        return PROOF_FRAME_BYTES - len(self._buffer)

    def take(self, data: ReadMemory) -> Reason | None:
        """Adds received bytes; None while all is well so far."""
        self._buffer += data
        have = len(self._buffer)
        if bytes(self._buffer[: min(have, 4)]) != wire.MAGIC[: min(have, 4)]:
            return Reason.BAD_MAGIC
        if have >= wire.HEADER_BYTES:
            reason = self._judge_header()
            if reason is not None:
                return reason
        if have < PROOF_FRAME_BYTES:
            return None
        return self._judge_proof()

    def _judge_header(self) -> Reason | None:
        header = self._header
        code = header.decode(self._buffer, 0)
        if code:
            return Reason.from_code(code)
        if header.kind != wire.PROOF:
            return Reason.UNEXPECTED_KIND
        if header.payload_length != wire.PROOF_BYTES:
            return Reason.LENGTH_BOUNDS
        if header.status != 0:
            return Reason.RESERVED_BITS
        return None

    def _judge_proof(self) -> Reason | None:
        header = self._header
        agreement = self._find(header.session)
        if agreement is None:
            return Reason.SESSION_MISMATCH
        theirs = agreement.theirs
        if header.boot_nonce != theirs.boot_nonce:
            return Reason.BOOT_NONCE
        if header.subject != _ROLE_CODES[theirs.role] or header.shard != theirs.rank:
            return Reason.AUTH_FAILED
        seed = header.payload_seed(leader_nonce(agreement))
        if xxh3_64(self._buffer, wire.HEADER_BYTES, wire.PROOF_BYTES, seed) != header.payload_digest:
            return Reason.PAYLOAD_DIGEST
        if not agreement.proves(theirs.role, bytes(self._buffer[wire.HEADER_BYTES :])):
            return Reason.AUTH_FAILED
        self.agreement = agreement
        return None
