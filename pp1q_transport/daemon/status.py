"""What a daemon says of itself, as JSON over its Unix socket: the shape, and how to ask for it.

Between a daemon's loop, which fills a `Status`, and whatever shows it: `pp1q top`, the metrics port, a script. Asking disturbs no
session: a status connection attaches nothing. SPEC section 2 (admin is on a Unix socket only).
"""

from __future__ import annotations

import json
import math
import os
import socket
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Final, TypedDict, cast, get_args, get_origin, get_type_hints

from ..counters import HistogramSnapshot
from ..errors import PeerFault, Reason
from ..session.hello import quote

MAGIC: Final = b"PP1A"
ATTACH_VERSION: Final = 1
STATUS_ROLE: Final = 3
ATTACH: Final = struct.Struct("<4sHHII")  # magic, version, role, rank, zero
ANSWER: Final = struct.Struct("<4sHHI")  # how a refusal starts: magic, version, verdict (a reason's code), bytes of its text
STATUS_BYTES_AT_MOST: Final = 256 << 10
SUN_PATH_BYTES: Final = 108


class SessionStatus(TypedDict):
    """One peer: `formed` and `ended` sessions so far, `since_s` in the present state."""

    peer: str
    up: bool
    session: int
    link: str
    endpoint: str
    since_s: float
    formed: int
    ended: int


class ClientStatus(TypedDict):
    """One attached process."""

    role: str
    rank: int
    pid: int
    uid: int
    since_s: float


class GroupStatus(TypedDict):
    """The rank group as this rank sees it."""

    size: int
    rank: int
    mode: str
    epoch: int
    open: bool
    ranks_up: int


class BreakerStatus(TypedDict):
    """One peer's circuit breaker: `state` closed, open or probing; `opened` so often."""

    peer: str
    state: str
    opened: int


class _Optional(TypedDict, total=False):
    discards: dict[str, int]  # discarded proposals by reason (`Counters.discards`); a leader has none


class Status(_Optional):
    """A daemon at one moment. Totals count from its start. Times in s, histograms in ns."""

    role: str
    name: str
    version: str
    pid: int
    uptime_s: float
    draining: bool
    sessions: list[SessionStatus]
    slots: dict[str, int]
    clients: list[ClientStatus]
    group: GroupStatus | None
    breakers: list[BreakerStatus]
    totals: dict[str, int]
    reasons: dict[str, int]  # every refusal by reason, those that discarded a proposal included
    ready: int
    discarded: int
    rows: int
    bytes_ready: int
    latency: HistogramSnapshot
    tail: HistogramSnapshot
    loops: int
    last_loop_age_s: float


def encode_status(status: Status) -> bytes:
    """The datagram for a status; raises `ValueError` for one that would be cut off at `STATUS_BYTES_AT_MOST`."""
    data = json.dumps(status, separators=(",", ":"), allow_nan=False).encode()
    if len(data) > STATUS_BYTES_AT_MOST:
        raise ValueError(f"a status of {len(data)} bytes; {STATUS_BYTES_AT_MOST} are allowed")
    return data


def parse_status(data: bytes) -> Status:
    """The status in a datagram. Raises `PeerFault(malformed)` for anything that is not one, in shape or type."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError):
        raise PeerFault(Reason.MALFORMED, "the status is not JSON") from None
    where = next(_misfits(value, Status, "status"), None)
    if where is not None:
        raise PeerFault(Reason.MALFORMED, f"{where} is not as this version knows it: is the daemon of another release?")
    return cast("Status", value)


def _misfits(value: object, shape: object, where: str) -> Iterator[str]:
    """Where `value` differs from the type `shape`. Knows what `Status` is made of and nothing else. Keys that it does not know
    are let pass: a later release may say more."""
    origin, parts = get_origin(shape), get_args(shape)
    if isinstance(shape, type) and hasattr(shape, "__required_keys__"):
        yield from _record_misfits(value, shape, where)
    elif origin is list and isinstance(value, list):
        for number, item in enumerate(value):
            yield from _misfits(item, parts[0], f"{where}[{number}]")
    elif origin is dict and isinstance(value, dict):
        for key, item in value.items():
            yield from _misfits(item, parts[1], f"{where}.{key}")
    elif parts and origin not in (list, dict):  # X | None
        if value is not None:
            yield from _misfits(value, parts[0], where)
    elif shape is float:
        if type(value) not in (int, float) or not math.isfinite(cast("float", value)):
            yield where
    elif type(value) is not shape:
        yield where


def _record_misfits(value: object, shape: type, where: str) -> Iterator[str]:
    if not isinstance(value, dict):
        yield where
        return
    for key, inner in get_type_hints(shape).items():
        if key in value:
            yield from _misfits(value[key], inner, f"{where}.{key}")
        elif key in shape.__required_keys__:  # type: ignore[attr-defined]  # a TypedDict
            yield f"{where}.{key}"
    if shape is HistogramSnapshot and not _is_histogram(value):
        yield where


def _is_histogram(value: dict[str, object]) -> bool:
    bounds, counts = value.get("bounds_ns"), value.get("counts")
    if not isinstance(bounds, list) or not isinstance(counts, list) or not {type(item) for item in [*bounds, *counts]} <= {int}:
        return False
    return bool(bounds) and bounds == sorted(set(bounds)) and len(counts) == len(bounds) + 1 and min(counts) >= 0


def fetch_status(path: str | os.PathLike[str], timeout_s: float = 2.0) -> Status:
    """Asks the daemon at the Unix socket `path` how it is. Raises `PeerFault`: `peer_lost` when nobody is there or it goes
    unanswered, `timeout` when nothing comes in `timeout_s`, the daemon's own reason when it refuses, `malformed` for any
    other answer."""
    name = os.fsencode(path)
    if not 1 <= len(name) < SUN_PATH_BYTES or b"\0" in name:
        raise PeerFault(Reason.PEER_LOST, f"no socket can have the path {os.fspath(path)!r}")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as link:
        link.settimeout(timeout_s)
        try:
            link.connect(name)
            with suppress(BrokenPipeError):  # refused for who we are, before it read a byte: its answer is there all the same
                link.sendall(ATTACH.pack(MAGIC, ATTACH_VERSION, STATUS_ROLE, 0, 0))
            try:
                data, _, flags, _ = link.recvmsg(STATUS_BYTES_AT_MOST)
            except ConnectionResetError:  # it closed without reading ours; said once, before what it had sent
                data, _, flags, _ = link.recvmsg(STATUS_BYTES_AT_MOST)
        except TimeoutError:
            raise PeerFault(Reason.TIMEOUT, f"the daemon at {os.fspath(path)} did not answer within {timeout_s:g} s") from None
        except OSError as fault:
            raise PeerFault(Reason.PEER_LOST, f"no daemon at {os.fspath(path)}: {fault.strerror or fault}") from None
    return _answer(data, flags)


def _answer(data: bytes, flags: int) -> Status:
    if not data:
        raise PeerFault(Reason.PEER_LOST, "the daemon ended the connection without an answer")
    if flags & socket.MSG_TRUNC:
        raise PeerFault(Reason.MALFORMED, f"the status is larger than {STATUS_BYTES_AT_MOST} bytes")
    if data.startswith(MAGIC):
        raise _refusal(data)
    return parse_status(data)


def _refusal(data: bytes) -> PeerFault:
    if len(data) < ANSWER.size:
        return PeerFault(Reason.MALFORMED, "the daemon's answer is cut short")
    _magic, version, verdict, length = ANSWER.unpack_from(data)
    if version != ATTACH_VERSION:
        return PeerFault(Reason.BAD_VERSION, f"the daemon attaches by version {version}, this program by {ATTACH_VERSION}")
    try:
        reason = Reason.from_code(verdict)
    except ValueError:
        return PeerFault(Reason.MALFORMED, f"the daemon answers with verdict {verdict}, which is no refusal")
    text = data[-length:].decode(errors="replace") if 0 < length <= len(data) - ANSWER.size else ""
    return PeerFault(reason, f"the daemon refuses to tell: {quote(text)}")
