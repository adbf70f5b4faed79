"""The records that pass between a daemon and its processes: their kinds, layouts and exact lengths.

Between `channel`, which moves bodies without knowing them, and whoever acts on them. Judges shape alone (kind, sender, lengths,
zero fields), never a value's meaning. Little-endian, every fixed part naturally aligned, so that a plain C struct matches without
packing (include/pp1q_sidecar.h). No payload of a proposal passes here: rows lie in shared slots.
"""

from __future__ import annotations

from struct import Struct
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from ..errors import PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..memory import ReadMemory

# Who may send a record.
TARGET: Final = 1
DRAFT: Final = 2
DAEMON_TO_TARGET: Final = 4
DAEMON_TO_DRAFT: Final = 8

# target -> daemon
OPEN: Final = 1
STEP: Final = 2
COMMIT: Final = 3
RELEASE: Final = 4
CLOSE: Final = 5
AGREE: Final = 6
EXCHANGE: Final = 7
# daemon -> target
UP: Final = 16
DOWN: Final = 17
READY: Final = 18
DISCARDED: Final = 19
COMMITTED: Final = 20
REFUSED: Final = 21
EPOCH: Final = 22
DRAINING: Final = 23
EXCHANGED: Final = 24
# daemon -> draft
TARGET_UP: Final = 32
TARGET_DOWN: Final = 33
OPENED: Final = 34
COMMITTED_TOKENS: Final = 35
RESET: Final = 36
CLOSED: Final = 37
STEP_FOR_DRAFT: Final = 38
TOKEN: Final = 39
# draft -> daemon
PUT: Final = 48
FAIL: Final = 49
PUT_SHARD: Final = 50
# everyone
PING: Final = 61
PONG: Final = 62
BYE: Final = 63

EPOCH_ENDED: Final = 1
EPOCH_AGREE: Final = 2
EPOCH_OPEN: Final = 3

MAX_TEXT_BYTES: Final = 512

Value = int | float
_NOTHING: Final = memoryview(b"")


class Message(NamedTuple):
    """One kind. `layout` is its fixed part; `has_payload` says whether bytes follow it, as many as its last-named count
    says: `count` int32 tokens or `length` bytes of UTF-8. `direction` is a set of sender bits. `zeros` index the
    fields that must be zero."""

    name: str
    layout: Struct
    has_payload: bool
    direction: int
    fields: tuple[str, ...]
    counted: int  # index of the field that counts the payload's units, -1 without payload
    unit: int  # bytes each
    zeros: tuple[int, ...]


_TYPES: Final = {"u64": "Q", "u32": "I", "i32": "i", "f64": "d"}


def _message(name: str, direction: int, text: str) -> Message:
    """A `Message` from its fields as "type name ...", with a last word `tokens` or `utf8` for what follows them."""
    words = text.split()
    payload = words.pop() if words[-1] in ("tokens", "utf8") else ""
    types, fields = words[::2], tuple(words[1::2])
    counted = fields.index("count" if payload == "tokens" else "length") if payload else -1
    zeros = tuple(index for index, field in enumerate(fields) if field == "zero")
    layout = Struct("<" + "".join(_TYPES[each] for each in types))
    return Message(name, layout, bool(payload), direction, fields, counted, 4 if payload == "tokens" else 1, zeros)


# One rank's part of an exchange between target ranks (`session.parts`); `count` words of 4 bytes follow.
_PART: Final = (
    "u64 request u32 epoch u32 sequence u32 generation u32 round u32 position u32 purpose u32 first_id u32 end_id u32 rank "
    "u32 count tokens"
)
_BOTH: Final = TARGET | DRAFT | DAEMON_TO_TARGET | DAEMON_TO_DRAFT
TABLE: Final[dict[int, Message]] = {
    OPEN: _message("OPEN", TARGET, "u64 request u64 seed u32 max_position u32 generation u32 round u32 count tokens"),
    STEP: _message(
        "STEP", TARGET,
        "u64 request u64 ticket u64 target_context u64 trace_id f64 temperature u32 generation u32 round u32 depth "
        "u32 support u32 budget_us u32 owner",
    ),
    COMMIT: _message(
        "COMMIT", TARGET,
        "u64 request u32 slot u32 slot_generation u32 round u32 source u32 accepted u32 count u32 epoch u32 generation tokens",
    ),
    RELEASE: _message("RELEASE", TARGET, "u32 slot u32 slot_generation"),
    CLOSE: _message("CLOSE", TARGET, "u64 request"),
    AGREE: _message("AGREE", TARGET, "u32 epoch u32 count u64 digest_low u64 digest_high"),
    EXCHANGE: _message("EXCHANGE", TARGET, _PART),
    EXCHANGED: _message("EXCHANGED", DAEMON_TO_TARGET, _PART),
    UP: _message("UP", DAEMON_TO_TARGET, "u64 session u32 epoch u32 zero"),
    DOWN: _message("DOWN", DAEMON_TO_TARGET, "u32 reason u32 goodbye"),
    READY: _message(
        "READY", DAEMON_TO_TARGET,
        "u64 request u64 ticket u64 latency_ns u32 slot u32 slot_generation u32 request_generation u32 round u32 anchor "
        "u32 depth u32 representation u32 epoch",
    ),
    DISCARDED: _message(
        "DISCARDED", DAEMON_TO_TARGET, "u64 request u64 ticket u32 reason u32 round u32 generation u32 zero"
    ),
    COMMITTED: _message("COMMITTED", DAEMON_TO_TARGET, "u64 request u32 round u32 epoch"),
    REFUSED: _message("REFUSED", DAEMON_TO_TARGET, "u64 request u64 ticket u32 reason u32 length utf8"),
    EPOCH: _message("EPOCH", DAEMON_TO_TARGET, "u32 epoch u32 state u32 reason u32 life"),
    DRAINING: _message("DRAINING", DAEMON_TO_TARGET | DAEMON_TO_DRAFT, "u32 deadline_ms u32 zero"),
    TARGET_UP: _message("TARGET_UP", DAEMON_TO_DRAFT, "u32 target u32 zero u64 session"),
    TARGET_DOWN: _message("TARGET_DOWN", DAEMON_TO_DRAFT, "u32 target u32 reason"),
    OPENED: _message(
        "OPENED", DAEMON_TO_DRAFT, "u64 request u64 seed u32 target u32 max_position u32 generation u32 count tokens"
    ),
    COMMITTED_TOKENS: _message(
        "COMMITTED_TOKENS", DAEMON_TO_DRAFT, "u64 request u32 target u32 source u32 accepted u32 count tokens"
    ),
    RESET: _message("RESET", DAEMON_TO_DRAFT, "u64 request u32 target u32 reason u32 slot u32 slot_generation"),
    CLOSED: _message("CLOSED", DAEMON_TO_DRAFT, "u64 request u32 target u32 zero"),
    STEP_FOR_DRAFT: _message(
        "STEP_FOR_DRAFT", DAEMON_TO_DRAFT,
        "u64 request u64 seed u64 target_context u64 trace_id u64 received_ns f64 temperature u32 target u32 slot "
        "u32 slot_generation u32 request_generation u32 round u32 anchor u32 depth u32 representation u32 support u32 budget_us",
    ),
    TOKEN: _message("TOKEN", DAEMON_TO_DRAFT, "u32 target u32 slot u32 slot_generation u32 position i32 token u32 zero"),
    PUT: _message(
        "PUT", DRAFT,
        "u64 session u32 target u32 slot u32 slot_generation u32 position i32 token u32 entries u32 length u32 zero",
    ),
    FAIL: _message("FAIL", DRAFT, "u64 session u32 target u32 slot u32 slot_generation u32 reason"),
    PUT_SHARD: _message(
        "PUT_SHARD", DRAFT,
        "u64 session u32 target u32 slot u32 slot_generation u32 position u32 entries u32 length u32 shard_mass u32 mass_before",
    ),
    PING: _message("PING", TARGET | DRAFT, "u64 token"),
    PONG: _message("PONG", DAEMON_TO_TARGET | DAEMON_TO_DRAFT, "u64 token"),
    BYE: _message("BYE", _BOTH, "u32 reason u32 zero"),
}


def unpack(kind: int, view: ReadMemory, direction: int = _BOTH) -> tuple[tuple[Any, ...], memoryview]:
    """The fields of a record's fixed part, in order, and its payload (an empty view where the kind has none).

    `view` is the body that `Channel.receive` gave, `direction` who may have sent it (the constants above). Raises
    `PeerFault`: `unknown_kind`, `unexpected_kind` (another side's record), `length_bounds` (not the exact length, or a text
    beyond `MAX_TEXT_BYTES`), `reserved_bits` (a field that must be zero is not).
    """
    message = TABLE.get(kind)
    if message is None:
        raise PeerFault(Reason.UNKNOWN_KIND, f"record kind {kind}")
    if not message.direction & direction:
        raise PeerFault(Reason.UNEXPECTED_KIND, f"a {message.name} record from the wrong side")
    size = message.layout.size
    extra = len(view) - size
    if extra < 0 or (extra > 0 and not message.has_payload):
        raise PeerFault(Reason.LENGTH_BOUNDS, f"a {message.name} record of {len(view)} bytes, its fixed part has {size}")
    values = message.layout.unpack_from(view)
    if message.has_payload:
        count = values[message.counted]
        if count * message.unit != extra or (message.unit == 1 and count > MAX_TEXT_BYTES):
            raise PeerFault(Reason.LENGTH_BOUNDS, f"a {message.name} record counts {count} and carries {extra} bytes")
    for index in message.zeros:
        if values[index]:
            raise PeerFault(Reason.RESERVED_BITS, f"a {message.name} record's zero field holds {values[index]}")
    return values, memoryview(view)[size:] if message.has_payload else _NOTHING


def pack(kind: int, *values: Value) -> bytes:
    """The fixed part of a record of `kind`. Raises `struct.error` for values that do not fit their fields."""
    return TABLE[kind].layout.pack(*values)


def named(kind: int, values: Iterable[Value]) -> dict[str, Value]:
    """The fields of a record by name, for logs and tests."""
    return dict(zip(TABLE[kind].fields, values, strict=True))


def text_of(payload: ReadMemory) -> str:
    """The words of a REFUSED record; raises `PeerFault` (`malformed`) when they are no UTF-8."""
    try:
        return bytes(payload).decode()
    except UnicodeDecodeError as error:
        raise PeerFault(Reason.MALFORMED, "a text that is no UTF-8") from error


def text_bytes(text: str) -> bytes:
    """`text` as UTF-8, cut at a character's end to `MAX_TEXT_BYTES`."""
    return text.encode(errors="replace")[:MAX_TEXT_BYTES].decode(errors="ignore").encode()
