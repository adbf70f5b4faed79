"""What can go wrong, by name: the closed list of reasons and the errors that carry them.

Between every other module and its caller. Does no I/O, keeps no state, and imports nothing of this package.
Local misuse (our caller broke a rule) and peer faults (the other host did) are different types on purpose:
only the second may end a session, and only the first may be raised to a programmer as a bug. SPEC section 4.
"""

from __future__ import annotations

from enum import Enum
from typing import Final


class Reason(str, Enum):
    """Why a frame, row, proposal, link or session was refused. The order is the wire code (1-based) and is append-only."""

    BAD_MAGIC = "bad_magic"
    BAD_VERSION = "bad_version"
    UNKNOWN_KIND = "unknown_kind"
    UNKNOWN_FLAG = "unknown_flag"
    RESERVED_BITS = "reserved_bits"
    HEADER_DIGEST = "header_digest"
    LENGTH_BOUNDS = "length_bounds"
    AUTH_FAILED = "auth_failed"
    BOOT_NONCE = "boot_nonce"
    SESSION_MISMATCH = "session_mismatch"
    SLOT_BOUNDS = "slot_bounds"
    SLOT_STATE = "slot_state"
    GENERATION_STALE = "generation_stale"
    GENERATION_DUPLICATE = "generation_duplicate"
    ROUND_MISMATCH = "round_mismatch"
    DEPTH_MISMATCH = "depth_mismatch"
    POSITION_BOUNDS = "position_bounds"
    POSITION_DUPLICATE = "position_duplicate"
    CONTEXT_MISMATCH = "context_mismatch"
    REPRESENTATION = "representation"
    SUPPORT_BOUNDS = "support_bounds"
    PAYLOAD_DIGEST = "payload_digest"
    ID_RANGE = "id_range"
    ID_ORDER = "id_order"
    ID_DUPLICATE = "id_duplicate"
    NONFINITE = "nonfinite"
    NEGATIVE = "negative"
    NONDYADIC = "nondyadic"
    MASS = "mass"
    ZERO_ENTRY = "zero_entry"
    ZERO_Q_TOKEN = "zero_q_token"
    PADDING_NONZERO = "padding_nonzero"
    DRAW_MISMATCH = "draw_mismatch"
    REPLY_SIZE = "reply_size"
    INCOMPLETE = "incomplete"
    IDENTITY_MISMATCH = "identity_mismatch"
    SEMANTIC_MISMATCH = "semantic_mismatch"
    LIMITS_MISMATCH = "limits_mismatch"
    TIMEOUT = "timeout"
    CANCELLED = "cancelled"
    PEER_LOST = "peer_lost"
    LINK_ERROR = "link_error"
    RANK_DISAGREE = "rank_disagree"
    KEY_REUSE = "key_reuse"
    OVERLOAD = "overload"
    # Beyond the SPEC's minimum list:
    REQUEST_UNKNOWN = "request_unknown"  # a frame names a request that is not open
    REQUEST_DUPLICATE = "request_duplicate"  # OPEN of a request that is open already
    GENERATION_EXHAUSTED = "generation_exhausted"  # a u32 counter ran out: the session ends
    UNEXPECTED_KIND = "unexpected_kind"  # a known frame that this role never receives, or one before the proof
    MALFORMED = "malformed"  # a control message that is not the bounded msgpack map it must be
    INVALID_WEIGHTS = "invalid_weights"  # NaN, +inf, negative (-0.0 too) or no mass in the weights handed to allocate
    REQUEST_MISMATCH = "request_mismatch"  # a row names another request than the slot was granted for
    CIRCUIT_OPEN = "circuit_open"  # too many proposals in a row were discarded: this STEP was never sent
    COPY_FAILED = "copy_failed"  # the engine's copy stage could not bring a row to or from its device

    @property
    def code(self) -> int:
        """The u16 that stands for this reason on the wire (0 is "no reason")."""
        return _CODES[self]

    @classmethod
    def from_code(cls, code: int) -> Reason:
        """The reason of a wire code; raises `ValueError` for 0 and for codes this version does not know."""
        if not 1 <= code <= len(_BY_CODE):
            raise ValueError(f"no reason has code {code}")
        return _BY_CODE[code - 1]

    def __str__(self) -> str:
        return self.value


_BY_CODE: Final[tuple[Reason, ...]] = tuple(Reason)
_CODES: Final[dict[Reason, int]] = {reason: index + 1 for index, reason in enumerate(_BY_CODE)}


class Pp1qError(Exception):
    """Base of every error this package raises on purpose."""


class LocalMisuse(Pp1qError):
    """The caller in this process broke a rule; nothing was sent and no state changed."""


class ConfigError(LocalMisuse):
    """A setting is unusable; the one-line text names it and says what to do."""


class InvalidQ(Pp1qError, ValueError):
    """Values that are not a dyadic categorical q. `reason` says which check failed first (SPEC section 3)."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class PeerFault(Pp1qError):
    """The other side misbehaved or went away. `reason` is counted and logged; the link or session ends."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(f"{reason}: {detail}" if detail else str(reason))
        self.reason = reason
        self.detail = detail


class Refused(PeerFault):
    """A HELLO was refused: `field` differs, `ours` and `theirs` are both values (SPEC section 2)."""

    def __init__(self, reason: Reason, field: str, ours: object, theirs: object) -> None:
        super().__init__(reason, f"{field}: ours {ours!r}, theirs {theirs!r}")
        self.field = field
        self.ours = ours
        self.theirs = theirs


class ProposalDiscarded(Pp1qError):
    """The whole proposal of one request is void on every rank; run target-only from the committed prefix (SPEC section 4)."""

    def __init__(
        self,
        reason: Reason,
        request: int = 0,
        round: int = 0,
        generation: int = 0,
        epoch_over: bool = False,
        detail: str = "",
    ) -> None:
        super().__init__(f"{reason} (request {request}, round {round})" + (f": {detail}" if detail else ""))
        self.detail = detail
        """What this side knows beyond the reason; may be empty."""
        self.reason = reason
        self.request = request
        self.round = round
        self.epoch_over = epoch_over
        """The group's epoch ended: nothing can be committed, not even target-only, until its ranks have agreed."""
        self.generation = generation
        """The request_generation under which the round goes on target-only, the same on every rank (0: the request's own)."""


def shown(value: object) -> str:
    """A value that was given to us as an error quotes it: on one line and short."""
    try:
        text = ("true" if value else "false") if isinstance(value, bool) else repr(value)
    except ValueError:  # Python writes out no integer of more than 4300 digits
        text = "a number of thousands of digits"
    return text if len(text) <= 80 else text[:77] + "..."
