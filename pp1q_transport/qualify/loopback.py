"""The receiver process of `pp1q-send --loopback`: started by exec (never fork), told to end, and always waited for.

Between `pp1q-send` and an ordinary `pp1q-recv`. Learns the endpoint through a pipe and shows the child's last words only when
they explain a failure. SPEC section 9.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import tempfile
from types import TracebackType
from typing import TYPE_CHECKING, Final, Self

from ..errors import PeerFault, Reason
from .plan import Plan

if TYPE_CHECKING:
    from collections.abc import Sequence

START_S: Final = 30.0
END_S: Final = 10.0
_LAST_WORDS: Final = 4096


class LoopbackReceiver:
    """A `pp1q-recv --once` for `plan` on a loopback port of its own. A context manager: leaving it ends the process."""

    def __init__(
        self, plan: Plan, cpu: int | None = None, wait_s: float = START_S, link: str = "tcp",
        rdma: Sequence[str] = (),
    ) -> None:
        read_end, write_end = os.pipe()
        options = {
            "listen": "tcp://127.0.0.1:0", "link": link, "on-loss": "exit", "wait": f"{wait_s:g}", "ready-fd": write_end,
            "max-vocab": plan.vocab, "max-depth": plan.depth, "max-support": plan.support, "max-slots": plan.slots,
        }  # fmt: skip
        if cpu is not None:
            options["cpu"] = cpu
        command = [sys.executable, "-m", "pp1q_transport.cli.recv", "--once", "--quiet"]
        command += [f"--{name}={value}" for name, value in options.items()]
        command += [f"--rdma={setting}" for setting in rdma]
        self._words = tempfile.TemporaryFile()  # noqa: SIM115 - it lives as long as this object
        try:
            # A session of its own: Ctrl-C on the terminal is the sender's to handle.
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._words,
                pass_fds=(write_end,), start_new_session=True,
            )  # fmt: skip
        except BaseException:
            os.close(read_end)
            self._words.close()
            raise
        finally:
            os.close(write_end)
        try:
            self.endpoint = self._endpoint(read_end)
        except BaseException:
            self.close()
            raise
        finally:
            os.close(read_end)

    def _endpoint(self, read_end: int) -> str:
        """The line that the child writes once it listens."""
        said = b""
        while not said.endswith(b"\n"):
            readable, _, _ = select.select([read_end], [], [], START_S)
            piece = os.read(read_end, 256) if readable else b""
            if not piece:
                raise PeerFault(Reason.PEER_LOST, f"the receiver process did not start: {self.last_words()}")
            said += piece
        return said.decode("ascii").strip()

    def last_words(self) -> str:
        """The last line that the child wrote to stderr."""
        size = self._words.seek(0, os.SEEK_END)
        self._words.seek(max(0, size - _LAST_WORDS))
        lines = self._words.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1].strip() if lines else "it said nothing"

    def wait(self) -> int:
        """Its exit status, after a run that ended well; it is stopped when it does not end by itself."""
        try:
            return self.process.wait(END_S)
        except subprocess.TimeoutExpired:
            self.close()
            return self.process.returncode

    def close(self) -> None:
        """Ends the process if it is still there, politely first."""
        for number in (signal.SIGINT, signal.SIGKILL):
            if self.process.poll() is not None:
                break
            self.process.send_signal(number)
            try:
                self.process.wait(2.0)
            except subprocess.TimeoutExpired:
                continue
        self._words.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
