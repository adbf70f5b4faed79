"""Telling the service manager where the daemon stands: sd_notify's datagrams, the watchdog's among them.

Between the daemon's loop, which calls `beat`, and systemd, or whatever else set NOTIFY_SOCKET. Starts no thread and no timer: a
loop that stands still sends nothing, which is the point. Without NOTIFY_SOCKET every call does nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from typing import Final

from .._native.kernels import monotonic_ns
from ..counters import Counters
from ..errors import ConfigError
from ..logs import logger

SUN_PATH_BYTES: Final = 108
STATUS_CHARS: Final = 200


class Notifier:
    """The notify socket of this process, from the environment it was started with. Nothing here blocks or raises once it is
    made: a datagram that can't be sent is counted (`notify_failed`) and the first of them logged."""

    def __init__(self, environ: Mapping[str, str] | None = None, counters: Counters | None = None) -> None:
        environ = os.environ if environ is None else environ
        self.counters = Counters() if counters is None else counters
        self.beat_every_ns = 0  # 0: nobody watches
        self._beaten_ns: int | None = None
        self._complained = False
        self._socket: socket.socket | None = None
        self._address = _address(environ.get("NOTIFY_SOCKET", ""))
        interval_ns = _watchdog_ns(environ)  # judged also where nobody is to be told
        if self._address is not None:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
            self.beat_every_ns = interval_ns // 2

    def ready(self, status: str = "") -> None:
        """The daemon serves: started, or done with a reload."""
        self._send("READY=1", status)

    def reloading(self) -> None:
        """A reload begins; `ready` ends it."""
        self._send(f"RELOADING=1\nMONOTONIC_USEC={monotonic_ns() // 1000}")

    def stopping(self, status: str = "") -> None:
        """The daemon drains and ends."""
        self._send("STOPPING=1", status)

    def status(self, text: str) -> None:
        """One line for whoever asks how it is."""
        self._send("", text)

    def beat(self, now_ns: int) -> None:
        """Called by the loop on every turn; tells the watchdog so at most twice in its interval."""
        if not self.beat_every_ns or (self._beaten_ns is not None and now_ns - self._beaten_ns < self.beat_every_ns):
            return
        if self._send("WATCHDOG=1"):  # else on the next turn again
            self._beaten_ns = now_ns

    def close(self) -> None:
        """Frees the socket. Safe to repeat."""
        if self._socket is not None:
            self._socket.close()
        self._socket = None
        self.beat_every_ns = 0

    def _send(self, state: str, status: str = "") -> bool:
        if self._socket is None or self._address is None:
            return False
        line = "".join(char if char.isprintable() else " " for char in status[:STATUS_CHARS])
        text = "\n".join(part for part in (state, f"STATUS={line}" if line else "") if part)
        try:
            self._socket.sendto(text.encode(), self._address)
        except OSError as fault:
            self.counters.add("notify_failed")
            if not self._complained:
                self._complained = True
                logger().warning("the service manager can't be told", state=text, error=fault.strerror or str(fault))
            return False
        return True


def _address(path: str) -> bytes | None:
    if not path:
        return None
    name = os.fsencode(path)
    if path[0] not in "/@" or len(name) < 2 or len(name) >= SUN_PATH_BYTES:
        raise ConfigError(f"NOTIFY_SOCKET must be an absolute path or @NAME of at most {SUN_PATH_BYTES - 1} bytes, not {path!r}")
    return b"\0" + name[1:] if path[0] == "@" else name


def _watchdog_ns(environ: Mapping[str, str]) -> int:
    """The watchdog's interval in ns; 0 when there is none, or when it is meant for another process."""
    interval, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
    for name, text in (("WATCHDOG_USEC", interval), ("WATCHDOG_PID", pid)):
        if text and not (text.isascii() and text.isdigit() and len(text) <= 18 and int(text) > 0):
            raise ConfigError(f"{name} must be a positive integer, not {text!r}")
    if not interval or (pid and int(pid) != os.getpid()):
        return 0
    return int(interval) * 1000
