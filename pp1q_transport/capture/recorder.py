"""The recorder: one capture file at a time, written by a thread of its own, rotated and bounded; and the ears of its sessions.

Between engines, which tell of sessions that begin and end, the taps, which tell of frames, and the file. An engine never waits
for the disk: what the thread can't write in time is dropped, and the file says so. Without a capture nothing of this is loaded.
"""

from __future__ import annotations

import fcntl
import os
import queue
import stat
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, Final, Protocol

from .._native.kernels import monotonic_ns
from ..errors import ConfigError
from ..logs import named_logger
from ..session.draft_peer import DraftPeerSession
from ..session.hub import HubSession
from ..session.landing import LandingSession
from . import pcapng, records
from .redaction import Redactor
from .snapshot import counted, ready_of, session_state
from .taps import HubTap, InTap, QueueTap, WireTap, WordTap

if TYPE_CHECKING:
    from ..counters import Counters
    from ..errors import Reason
    from ..links.stream import StreamLink
    from ..session.machine import SessionMachine
    from ..session.negotiate import Agreement
    from ..session.outbox import Outbox

FILE_BYTES: Final = 256 << 20
FILES: Final = 4
FILE_BYTES_LEAST: Final = 1 << 20
QUEUE_BYTES: Final = 64 << 20
CLOSE_S: Final = 30.0
_REDACTED: Final = "redacted: no tokens, no q, no digest of either; it can't be replayed"


class HasOutbox(Protocol):
    """A session, or the fault injector behind one."""

    outbox: Outbox


class Capture:
    """Writes what its sessions' links carry to `path` (mode 0600). Past `file_bytes` the file becomes `path`.1, an earlier one
    `path`.2 and so on, `files` of them in all; each begins with the state of every session that runs. Raises `ConfigError`.

    One thread may use it besides its own: that of the engine, or of all engines of a daemon.
    """

    def __init__(
        self, path: str | os.PathLike[str], file_bytes: int = FILE_BYTES, files: int = FILES, redact: bool = False
    ) -> None:
        if file_bytes < FILE_BYTES_LEAST or files < 1:
            raise ConfigError(f"a capture has at least 1 file of {FILE_BYTES_LEAST} bytes, not {files} of {file_bytes}")
        self.path = Path(path)
        self.files = files
        self.redact = redact
        self.dropped = 0  # packets, in all
        self.failed = ""
        self.written = 0  # bytes of this file so far, those queued included
        self._most = file_bytes
        self._redactor = Redactor() if redact else None
        self._log = named_logger("capture", str(self.path))
        self._taps: list[Tap] = []
        self._accounts: list[Counters] = []
        self._interfaces = 0
        self._unsaid = 0  # packets dropped since the last one that was not
        self._queued = 0
        self._lock = threading.Lock()
        self._wall_ns = time.time_ns() - monotonic_ns()
        self._queue: queue.SimpleQueue[bytes | tuple[()] | None] = queue.SimpleQueue()
        self._file = _create(self.path)
        self._thread = threading.Thread(target=self._write, name="pp1q-capture", daemon=True)
        self._thread.start()
        self._begin_file()

    # ---- what an engine tells -----------------------------------------------------------------------------------

    def tap(self, agreement: Agreement, session: SessionMachine, counters: Counters) -> Tap:
        """A session begins: its state is written. Its frames are seen once the tap's `outgoing` and `incoming` were called."""
        if not any(known is counters for known in self._accounts):
            self._accounts.append(counters)
        account = next(index for index, known in enumerate(self._accounts) if known is counters)
        tap = Tap(self, agreement, session, counters, account)
        self._taps.append(tap)
        tap.begin(self._number(tap))
        return tap

    def forget(self, tap: Tap) -> None:
        """The session is over."""
        self._taps.remove(tap)

    def close(self) -> None:
        """Writes what is queued and closes the file. Safe to repeat."""
        if self._thread.is_alive():
            self._queue.put(None)
            self._thread.join(CLOSE_S)

    # ---- packets ------------------------------------------------------------------------------------------------

    def rotate_if_due(self) -> None:
        """Begins another file when this one is full. For a moment at which no session is in the middle of anything."""
        if self.written < self._most or any(tap.inside for tap in self._taps):
            return
        for tap in self._taps:
            tap.part()
        self._queue.put(())
        self._begin_file()
        for tap in self._taps:
            tap.begin(self._number(tap))

    def put(self, number: int, what: int, direction: int, flags: int, times: tuple[int, int], data: bytes) -> None:
        """One record of interface `number`; `times` are when it began and when it was whole (monotonic ns)."""
        original = len(data)
        if self._redactor is not None and what == records.FRAME:
            data = self._redactor.redact(data)
            flags |= records.REDACTED
        began_ns, now_ns = times
        for body, length in records.pieces(what, direction, flags, max(0, now_ns - began_ns), data, original):
            self._packet(number, now_ns + self._wall_ns, direction, body, length)

    def _packet(self, number: int, time_ns: int, direction: int, body: bytes, original: int) -> None:
        if self._queued > QUEUE_BYTES or self.failed:
            self.dropped += 1
            self._unsaid += 1
            return
        self._block(pcapng.packet(number, time_ns, direction, self._unsaid, body, original))
        self._unsaid = 0

    def _block(self, block: bytes) -> None:
        self.written += len(block)
        with self._lock:
            self._queued += len(block)
        self._queue.put(block)

    def _begin_file(self) -> None:
        self.written = 0
        self._interfaces = 0
        self._block(pcapng.section("pp1q-transport", _REDACTED if self.redact else ""))

    def _number(self, tap: Tap) -> int:
        self._block(pcapng.interface(tap.name))
        self._interfaces += 1
        return self._interfaces - 1

    # ---- the thread ---------------------------------------------------------------------------------------------

    def _write(self) -> None:
        while (item := self._queue.get()) is not None:
            try:
                if item == ():
                    self._next_file()
                    continue
                assert isinstance(item, bytes)
                if not self.failed:
                    self._file.write(item)
                    if self._queue.empty():
                        self._file.flush()
            except OSError as error:  # a full disk: the sessions go on, the capture does not
                self.failed = error.strerror or str(error)
                self._log.warning("capture_failed", error=self.failed)
            with self._lock:
                self._queued -= len(item)
        try:
            self._file.close()
        except OSError as error:
            self.failed = error.strerror or str(error)
            self._log.warning("capture_failed", error=self.failed)

    def _next_file(self) -> None:
        self._file.close()
        for number in range(self.files - 1, 0, -1):
            older = self.path if number == 1 else self._numbered(number - 1)
            if older.exists():
                older.replace(self._numbered(number))
        try:
            self._file = _create(self.path)
        except ConfigError as error:
            self.failed = str(error)
            self._log.warning("capture_failed", error=self.failed)

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")


class Tap:
    """The ear at one session's link (see `taps.Ear`)."""

    def __init__(self, capture: Capture, agreement: Agreement, session: SessionMachine, counters: Counters, account: int) -> None:
        self.name = f"{agreement.ours.role.value} {agreement.session:016x}"
        self._capture = capture
        self._agreement = agreement
        self._session = session
        self._counters = counters
        self._account = account
        self._number = 0
        self._over = False
        self._incoming: InTap | None = None
        if isinstance(session, LandingSession):
            assert session.outbox.empty()
            session.outbox = QueueTap(self, session)

    @property
    def inside(self) -> bool:
        """Whether the session is in the middle of what came in."""
        return self._incoming is not None and self._incoming.inside

    def outgoing(self, owner: HasOutbox) -> Outbox:
        """The outbox for the session's link: `owner`'s, the session's or that of the fault injector behind it. At an end that
        sends rows another one takes its place."""
        if not isinstance(self._session, LandingSession):
            assert owner.outbox.empty()
            owner.outbox = self._out_tap()
        return owner.outbox

    def _out_tap(self) -> Outbox:
        if isinstance(self._session, HubSession):
            return HubTap(self, self._session)
        return WordTap(self) if isinstance(self._session, DraftPeerSession) else WireTap(self)

    def incoming(self, link: StreamLink) -> None:
        """Takes the place of the link's assembler."""
        self._incoming = link.assembler = InTap(self._session, self)

    def stop(self) -> None:
        """The link is about to be closed: what is queued from now on goes nowhere."""
        if self._incoming is not None:
            self._incoming.stop(monotonic_ns())
        self._over = True

    def ended(self, reason: Reason, goodbye: bool) -> None:
        """The session is over and settled."""
        self._say(records.END, {"end": reason.value, "goodbye": goodbye, **self._counted()})
        self._capture.forget(self)

    # ---- of the recorder ----------------------------------------------------------------------------------------

    def begin(self, number: int) -> None:
        """A file begins, or the session does: writes its state, as interface `number`."""
        self._number = number
        state = session_state(self._agreement, self._session, monotonic_ns(), self._capture.redact)
        self._say(records.STATE, state | self._counted())

    def part(self) -> None:
        """The file ends, the session does not."""
        self._say(records.END, {"end": None, "goodbye": False, **self._counted()})

    def _counted(self) -> dict[str, object]:
        return {"account": self._account, "counted": counted(self._counters, ready_of(self._session))}

    def _say(self, what: int, body: dict[str, object]) -> None:
        now_ns = monotonic_ns()
        self._capture.put(self._number, what, pcapng.OUT, 0, (now_ns, now_ns), records.pack_json(body))

    # ---- of the taps --------------------------------------------------------------------------------------------

    def before(self) -> None:
        """See `taps.Ear`."""
        self._capture.rotate_if_due()

    def came_in(self, frame: bytes, began_ns: int, now_ns: int, cut: bool) -> None:
        """See `taps.Ear`."""
        if not self._over:
            flags = records.CUT if cut else 0
            self._capture.put(self._number, records.FRAME, pcapng.IN, flags, (began_ns, now_ns), frame)

    def went_out(self, frame: bytes, began_ns: int, now_ns: int) -> None:
        """See `taps.Ear`."""
        if not self._over:
            self._capture.put(self._number, records.FRAME, pcapng.OUT, 0, (began_ns, now_ns), frame)


def _create(path: Path) -> BinaryIO:
    """A new file that only its owner reads, whatever stood there. Raises `ConfigError`."""
    try:
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
    except OSError as error:
        raise ConfigError(f"can't write a capture to {path}: {error.strerror}") from None
    try:
        regular = stat.S_ISREG(os.fstat(fd).st_mode)
        if regular:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until it is closed: two captures would spoil each other
            os.fchmod(fd, 0o600)
            os.ftruncate(fd, 0)
    except BlockingIOError:
        os.close(fd)
        raise ConfigError(f"can't write a capture to {path}: another process writes its capture there") from None
    except OSError as error:
        os.close(fd)
        raise ConfigError(f"can't write a capture to {path}: {error.strerror}") from None
    if not regular:
        os.close(fd)
        raise ConfigError(f"can't write a capture to {path}: it is no regular file")
    return os.fdopen(fd, "wb", buffering=1 << 20)
