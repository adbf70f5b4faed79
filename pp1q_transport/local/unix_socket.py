"""A Unix socket by its path: listening where a kill -9 left a dead one, never where another daemon is alive; and connecting.

Between `attach` and the file system. Moves no bytes over the socket. A socket file outlives its process, so a restart must
replace it, and two daemons that start at once must not both win. A lock file held for life would be a second file left behind;
instead the folder itself is locked (flock, which the kernel drops with the process) while one of them probes the old socket,
binds under a temporary name and renames that over it: no moment without a socket, none when it is open too wide.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import stat
import struct
import time
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator

BACKLOG: Final = 32
LOCK_S: Final = 5.0
CREDENTIALS: Final = struct.Struct("iII")  # struct ucred: pid, uid, gid
_TEMPORARY: Final = ".new"
MAX_PATH_BYTES: Final = 107 - len(_TEMPORARY)  # sun_path holds 108 bytes, the last one zero

Identity = tuple[int, int]


def credentials(sock: socket.socket) -> tuple[int, int, int]:
    """(pid, uid, gid) of the process at the other end when it connected (or began to listen), by the kernel's word."""
    pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
    return pid, uid, gid


def check_path(path: str) -> None:
    """Raises `ConfigError` for a path that no Unix socket can have here."""
    if not path or "\0" in path or len(os.fsencode(path)) > MAX_PATH_BYTES:
        raise ConfigError(f"socket path {path!r} must have 1 to {MAX_PATH_BYTES} bytes: choose a shorter one")


def check_folder(path: str) -> None:
    """Raises `ConfigError` unless this user may make a socket at `path`: its folder is there and may be written to."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise ConfigError(f"the socket's folder {folder} does not exist: make it (a unit's RuntimeDirectory= does)")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise ConfigError(f"uid {os.geteuid()} may not write to the socket's folder {folder}: run as its owner")


@contextmanager
def _locked_folder(path: str) -> Iterator[None]:
    folder = os.path.dirname(path) or "."
    try:
        fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(f"can't use folder {folder!r} for a socket: {error.strerror}; choose another path") from error
    try:
        give_up = time.monotonic() + LOCK_S
        while True:
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() >= give_up:
                    raise ConfigError(f"folder {folder!r} stays locked: another program holds a flock on it") from None
                time.sleep(0.01)
        yield
    finally:
        os.close(fd)


def _refuse_the_living(path: str) -> None:
    """Raises `ConfigError` unless nothing is at `path` or a socket that nobody listens on."""
    try:
        if not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"{path} exists and is no socket: remove it or choose another path")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
        probe.setblocking(False)
        try:
            probe.connect(path)
        except (ConnectionRefusedError, FileNotFoundError):
            return
        except OSError as error:
            raise ConfigError(f"{path} belongs to another program ({error.strerror}): stop it or choose another path") from error
        pid = credentials(probe)[0]
        raise ConfigError(f"another daemon (pid {pid}) listens at {path}: stop it or choose another path")


def listen(path: str, mode: int) -> tuple[socket.socket, Identity]:
    """A non-blocking SOCK_SEQPACKET listener at `path` with file mode `mode`, and the file's identity for `remove`.

    Replaces a dead socket. Raises `ConfigError` for a live one, a file that is none, or a path that can't be used.
    """
    check_path(path)
    temporary = path + _TEMPORARY
    with _locked_folder(path):
        _refuse_the_living(path)
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            sock.bind(temporary)
            os.chmod(temporary, mode)
            sock.listen(BACKLOG)  # only now can anybody connect
            sock.setblocking(False)
            made = os.lstat(temporary)
            os.rename(temporary, path)
        except OSError as error:
            sock.close()
            raise ConfigError(f"can't listen at {path}: {error.strerror}") from error
    return sock, (made.st_dev, made.st_ino)


def remove(path: str, identity: Identity) -> None:
    """Removes the socket file if it is still the one `listen` made. Raises `ConfigError` when the folder stays locked."""
    with _locked_folder(path), suppress(FileNotFoundError):
        found = os.lstat(path)
        if (found.st_dev, found.st_ino) == identity:
            os.unlink(path)


_WHY: Final = {
    errno.ENOENT: "no daemon listens at {path}: start `pp1q daemon`, or correct the path",
    errno.ECONNREFUSED: "no daemon listens at {path} any more: start `pp1q daemon` again",
    errno.EACCES: "uid {uid} may not connect to {path}: run as the daemon's user, or let a group in (socket mode 660)",
    errno.EPROTOTYPE: "{path} is another program's socket: correct the path",
    errno.ENOTSOCK: "{path} is no socket: correct the path",
}


def connect(path: str, timeout_s: float) -> socket.socket:
    """A connected socket; waits up to `timeout_s` for room in the daemon's queue. Raises `ConfigError` with what to do."""
    check_path(path)
    give_up = time.monotonic() + timeout_s
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.setblocking(False)
    while True:
        try:
            sock.connect(path)
        except BlockingIOError:
            if time.monotonic() < give_up:
                time.sleep(0.005)
                continue
            sock.close()
            raise ConfigError(f"the daemon at {path} takes nobody in for {timeout_s} s: is it stopped?") from None
        except OSError as error:
            sock.close()
            words = _WHY.get(error.errno or 0, "can't connect to {path}: " + str(error.strerror))
            raise ConfigError(words.format(path=path, uid=os.geteuid())) from error
        return sock
