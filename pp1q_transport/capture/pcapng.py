"""pcapng blocks: a section, its interfaces, and packets; written, and read again within bounds.

Between a capture's records, which are the packets' data, and a file. Knows no PP1Q frame. Of the format
(draft-ietf-opsawg-pcapng) it writes three block types and reads these, skipping any other.
"""

from __future__ import annotations

import struct
from typing import BinaryIO, Final, NamedTuple

from ..errors import Pp1qError

LINK_TYPE: Final = 147  # LINKTYPE_USER0
IN: Final = 1
OUT: Final = 2
# Wireshark takes no packet larger than this; a reader takes no block larger than such a packet with its options.
PACKET_MOST: Final = 262_144
BLOCK_MOST: Final = PACKET_MOST + 4096
INTERFACES_MOST: Final = 65_536

_SECTION: Final = 0x0A0D0D0A
_INTERFACE: Final = 1
_PACKET: Final = 6
_MAGIC: Final = 0x1A2B3C4D
_NANOSECONDS: Final = 9

_HEAD: Final = struct.Struct("<II")
_TAIL: Final = struct.Struct("<I")
_SECTION_BODY: Final = struct.Struct("<IHHq")
_INTERFACE_BODY: Final = struct.Struct("<HHI")
_PACKET_BODY: Final = struct.Struct("<IIIII")
_OPTION: Final = struct.Struct("<HH")

_COMMENT: Final = 1
_APPLICATION: Final = 4
_NAME: Final = 2
_RESOLUTION: Final = 9
_FLAGS: Final = 2
_DROPPED: Final = 4


class CaptureError(Pp1qError):
    """A capture file that can't be written, read or replayed; the one-line text says why."""


class Packet(NamedTuple):
    """One packet: its interface, time (ns since 1970), direction (`IN`, `OUT` or 0), how many packets were lost before it, its
    data, and how long it was before anything was cut from it."""

    interface: int
    time_ns: int
    direction: int
    dropped: int
    data: bytes
    original: int


def _padded(data: bytes) -> bytes:
    return data + bytes(-len(data) % 4)


def _option(code: int, value: bytes) -> bytes:
    return _OPTION.pack(code, len(value)) + _padded(value)


def _block(kind: int, body: bytes) -> bytes:
    size = len(body) + 12
    return _HEAD.pack(kind, size) + body + _TAIL.pack(size)


def section(application: str, comment: str = "") -> bytes:
    """A section header block, with which a file begins."""
    options = _option(_COMMENT, comment.encode()) if comment else b""
    options += _option(_APPLICATION, application.encode()) + _option(0, b"")
    return _block(_SECTION, _SECTION_BODY.pack(_MAGIC, 1, 0, -1) + options)


def interface(name: str) -> bytes:
    """An interface description block; interfaces are numbered from 0 in the order of these. Times are nanoseconds."""
    options = _option(_NAME, name.encode()) + _option(_RESOLUTION, bytes((_NANOSECONDS,))) + _option(0, b"")
    return _block(_INTERFACE, _INTERFACE_BODY.pack(LINK_TYPE, 0, 0) + options)


def packet(number: int, time_ns: int, direction: int, dropped: int, data: bytes, original: int) -> bytes:
    """An enhanced packet block of interface `number`. See `Packet`."""
    options = _option(_FLAGS, _TAIL.pack(direction))
    if dropped:
        options += _option(_DROPPED, struct.pack("<Q", dropped))
    head = _PACKET_BODY.pack(number, time_ns >> 32, time_ns & 0xFFFFFFFF, len(data), original)
    return _block(_PACKET, head + _padded(data) + options + _option(0, b""))


class Reader:
    """Packets of one file, in order; `comment` and `interfaces` (their names) are known once a packet was read. Raises
    `CaptureError`.

    A file that ends inside a block, as that of a killed process may, ends with the block before it: `torn` says so.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.comment = ""
        self.interfaces: list[str] = []
        self.torn = False
        self._file = file
        self._began = False

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> Packet:
        while True:
            kind, body = self._next_block()
            if kind == _SECTION:
                self._section(body)
            elif not self._began:
                raise CaptureError("this is no pcapng file")
            elif kind == _INTERFACE:
                self._interface(body)
            elif kind == _PACKET:
                return self._packet(body)

    def _next_block(self) -> tuple[int, bytes]:
        head = self._file.read(_HEAD.size)
        if not head and self._began:
            raise StopIteration
        if len(head) < _HEAD.size:
            self._end_early("this is no pcapng file: it is empty or shorter than a block")
        kind, size = _HEAD.unpack(head)
        if not self._began and kind != _SECTION:
            raise CaptureError("this is no pcapng file")
        if size < 12 or size % 4 or size > BLOCK_MOST:
            raise CaptureError(f"a pcapng block of {size} bytes (a big-endian file, or a damaged one)")
        rest = self._file.read(size - _HEAD.size)
        if len(rest) < size - _HEAD.size:
            self._end_early("the file ends inside its first block")
        if _TAIL.unpack_from(rest, len(rest) - 4)[0] != size:
            raise CaptureError("a pcapng block whose two lengths differ")
        return kind, rest[:-4]

    def _end_early(self, otherwise: str) -> None:
        if not self._began:
            raise CaptureError(otherwise)
        self.torn = True
        raise StopIteration

    def _section(self, body: bytes) -> None:
        if self._began:
            raise CaptureError("more than one section: replay the files one by one")
        if len(body) < _SECTION_BODY.size:
            raise CaptureError("a section header that is too short")
        magic, major, _minor, _length = _SECTION_BODY.unpack_from(body)
        if magic != _MAGIC or major != 1:
            raise CaptureError("no little-endian pcapng file of version 1")
        self._began = True
        self.comment = _options(body, _SECTION_BODY.size).get(_COMMENT, b"").decode("utf-8", "replace")

    def _interface(self, body: bytes) -> None:
        if len(body) < _INTERFACE_BODY.size:
            raise CaptureError("an interface block that is too short")
        link_type = _INTERFACE_BODY.unpack_from(body)[0]
        options = _options(body, _INTERFACE_BODY.size)
        if link_type != LINK_TYPE:
            raise CaptureError(f"packets of link-layer type {link_type}, not of {LINK_TYPE}: this is no capture of PP1Q")
        if options.get(_RESOLUTION) != bytes((_NANOSECONDS,)):
            raise CaptureError("times that are not nanoseconds")
        if len(self.interfaces) >= INTERFACES_MOST:
            raise CaptureError(f"more than {INTERFACES_MOST} interfaces")
        self.interfaces.append(options.get(_NAME, b"").decode("utf-8", "replace"))

    def _packet(self, body: bytes) -> Packet:
        if len(body) < _PACKET_BODY.size:
            raise CaptureError("a packet block that is too short")
        number, high, low, held, original = _PACKET_BODY.unpack_from(body)
        end = _PACKET_BODY.size + held
        if end > len(body) or number >= len(self.interfaces):
            raise CaptureError("a packet that does not fit its block, or of an interface that was not described")
        options = _options(body, end + -held % 4)
        flags, dropped = options.get(_FLAGS, bytes(4)), options.get(_DROPPED, bytes(8))
        if len(flags) != 4 or len(dropped) != 8:
            raise CaptureError("a packet with an option of a wrong size")
        direction = _TAIL.unpack(flags)[0] & 3
        lost = int.from_bytes(dropped, "little")
        return Packet(number, high << 32 | low, direction, lost, body[_PACKET_BODY.size : end], original)


def _options(body: bytes, at: int) -> dict[int, bytes]:
    """The options from `at` on, the last of each code. Raises `CaptureError`."""
    found: dict[int, bytes] = {}
    while at + _OPTION.size <= len(body):
        code, size = _OPTION.unpack_from(body, at)
        at += _OPTION.size
        if code == 0:
            break
        if at + size > len(body):
            raise CaptureError("an option that does not fit its block")
        found[code] = body[at : at + size]
        at += size + -size % 4
    return found
