"""What a packet of a capture holds: 16 bytes of its own, then a frame, or a JSON text that says where a session stands.

Between `recorder`, which writes packets, and `reading`, which reads them. The dissector `proto/pp1q.lua` knows the same layout.

| Offset | Bytes | Field | Meaning |
|---:|---:|---|---|
| 0 | 1 | `layout` | 1 |
| 1 | 1 | `what` | 0 a frame, 1 a state, 2 an end (both JSON) |
| 2 | 1 | `direction` | 1 came in, 2 went out, as the capturing process saw it |
| 3 | 1 | `flags` | 1 redacted, 2 cut (the rest never came, or could not be told from it), 4 more pieces follow |
| 4 | 4 | `offset` | Where this piece begins in the whole |
| 8 | 8 | `began_ns` | How long before the packet's time the header was whole (in) or the budget began (out) |

All little-endian. What is larger than `PIECE` bytes comes in several packets, one after another, since Wireshark takes none
larger than 256 KiB.
"""

from __future__ import annotations

import json
import struct
from typing import Final, NamedTuple

from .pcapng import CaptureError

LAYOUT: Final = 1
FRAME: Final = 0
STATE: Final = 1
END: Final = 2
REDACTED: Final = 1
CUT: Final = 2
MORE: Final = 4
PIECE: Final = 1 << 17
JSON_MOST: Final = 1 << 24
FRAME_MOST: Final = (1 << 26) + 4096  # the largest negotiable row

PREFIX: Final = struct.Struct("<BBBBIQ")


class Piece(NamedTuple):
    """One packet's own head and what follows it."""

    what: int
    direction: int
    flags: int
    offset: int
    began_ns: int
    data: bytes


def pieces(what: int, direction: int, flags: int, began_ns: int, data: bytes, original: int) -> list[tuple[bytes, int]]:
    """(packet data, its length before anything was cut) of all packets that `data` takes. `original`: bytes of the whole."""
    if len(data) <= PIECE:
        return [(PREFIX.pack(LAYOUT, what, direction, flags, 0, began_ns) + data, PREFIX.size + original)]
    made = []
    for at in range(0, len(data), PIECE):
        last = at + PIECE >= len(data)
        part = data[at : at + PIECE]
        head = PREFIX.pack(LAYOUT, what, direction, flags | (0 if last else MORE), at, began_ns)
        made.append((head + part, PREFIX.size + (original - at if last else len(part))))
    return made


def parse(data: bytes) -> Piece:
    """The head of a packet. Raises `CaptureError`."""
    if len(data) < PREFIX.size:
        raise CaptureError(f"a packet of {len(data)} bytes, which no capture of PP1Q has")
    layout, what, direction, flags, offset, began_ns = PREFIX.unpack_from(data)
    if layout != LAYOUT or what > END or direction not in (1, 2) or flags > 7 or began_ns >= 1 << 62:
        raise CaptureError("a packet that begins as no packet of a PP1Q capture does")
    return Piece(what, direction, flags, offset, began_ns, data[PREFIX.size :])


def pack_json(body: dict[str, object]) -> bytes:
    """A state or end as its text."""
    return json.dumps(body, separators=(",", ":")).encode()


def parse_json(data: bytes) -> dict[str, object]:
    """The map that a state or end says. Raises `CaptureError`."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError):
        raise CaptureError("a state of the capture that is no JSON") from None
    if not isinstance(body, dict):
        raise CaptureError("a state of the capture that is no JSON object")
    return body
