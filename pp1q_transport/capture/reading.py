"""Reading a capture: a file in, sessions with their states, frames and ends out, in order and within bounds.

Between `pcapng` and whoever replays. Puts pieces together and checks what a record says of itself; what a state holds is
`priming`'s. Raises `CaptureError` for anything that no capture of this build would hold.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO, Final, NamedTuple

from . import records
from .pcapng import CaptureError, Packet, Reader

TIME_MOST: Final = 1 << 62


class Record(NamedTuple):
    """One whole record. `link` is the number of its session in the file; times in ns since 1970; `began_ns` see `records`."""

    link: int
    what: int
    incoming: bool
    cut: bool
    began_ns: int
    time_ns: int
    data: bytes


@dataclass(slots=True)
class _Half:
    """A record whose later pieces are to come."""

    data: bytearray = field(default_factory=bytearray)
    head: tuple[int, int, int] = (0, 0, 0)  # what, direction, began_ns


class Recording:
    """The records of one file. `torn`: the file ends in the middle of one. Raises `CaptureError` for a file that was redacted, or
    from which packets are missing: neither can be replayed."""

    def __init__(self, file: BinaryIO) -> None:
        self._reader = Reader(file)
        self._halves: dict[int, _Half] = {}

    @property
    def torn(self) -> bool:
        """Whether the file ended in the middle of a record."""
        return self._reader.torn or bool(self._halves)

    def __iter__(self) -> Iterator[Record]:
        for packet in self._reader:
            record = self._record(packet)
            if record is not None:
                yield record

    def _record(self, packet: Packet) -> Record | None:
        piece = records.parse(packet.data)
        if packet.dropped:
            raise CaptureError(f"{packet.dropped} packets are missing: the disk was too slow for them; this can't be replayed")
        if piece.flags & records.REDACTED:
            raise CaptureError("this capture is redacted (no tokens, no q): it can be looked at, not replayed")
        if packet.original != len(packet.data):
            raise CaptureError("a packet that was cut short by whoever wrote this file")
        if packet.time_ns >= TIME_MOST or piece.began_ns > packet.time_ns:
            raise CaptureError("a packet of a time that can't be")
        half = self._halves.get(packet.interface)
        if half is None:
            if piece.offset:
                raise CaptureError("a piece whose first ones are missing")
            half = self._halves[packet.interface] = _Half(head=(piece.what, piece.direction, piece.began_ns))
        elif piece.offset != len(half.data) or half.head != (piece.what, piece.direction, piece.began_ns):
            raise CaptureError("pieces that do not belong together")
        half.data += piece.data
        if len(half.data) > (records.FRAME_MOST if piece.what == records.FRAME else records.JSON_MOST):
            raise CaptureError(f"a record of more than {len(half.data)} bytes")
        if piece.flags & records.MORE:
            return None
        del self._halves[packet.interface]
        return Record(
            packet.interface,
            piece.what,
            piece.direction == 1,
            bool(piece.flags & records.CUT),
            packet.time_ns - piece.began_ns,
            packet.time_ns,
            bytes(half.data),
        )


def open_capture(path: str | Path) -> BinaryIO:
    """The file, open to be read. Raises `CaptureError`."""
    try:
        return Path(path).open("rb")
    except OSError as error:
        raise CaptureError(f"can't read {path}: {error.strerror}") from None
