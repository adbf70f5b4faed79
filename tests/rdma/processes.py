"""Python processes as tests start them: forked by the machine's fork server (vm/warm.py) where there is one, else run anew.

Between the RDMA lanes and the operating system. An interpreter's start and imports cost an emulated machine half a minute, a fork
costs it a moment. What is a process of its own to a test stays one: arguments, environment, files, status and death are its own.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import Any

SERVER = "PP1Q_FORK_SERVER"  # where the fork server listens
ORDER_BYTES = 1 << 18  # at most; an order is the arguments and the environment


class Forked:
    """A process that the server forked, with what `subprocess.Popen` offers of one. It does not outlive its owner: the server
    kills it."""

    def __init__(self, connection: socket.socket, arguments: Sequence[str]) -> None:
        self.args = list(arguments)
        self.returncode: int | None = None
        self._connection = connection
        self._said = connection.makefile("r", encoding="utf-8")
        self.pid = int(self._answer()["pid"])

    def _answer(self) -> dict[str, Any]:
        line = self._said.readline()
        if not line:
            raise RuntimeError("the fork server is gone")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def poll(self) -> int | None:
        """Its status once it has ended, the negative number of the signal that killed it; None before."""
        if self.returncode is None and select.select([self._connection], [], [], 0)[0]:
            self.wait()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Until it has ended. Raises `subprocess.TimeoutExpired`."""
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            self.returncode = int(self._answer()["status"])
            self._said.close()
            self._connection.close()
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


Process = Forked | subprocess.Popen[bytes]


def start(
    arguments: Sequence[str],
    *,
    stdin: int = subprocess.DEVNULL,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    new_session: bool = False,
) -> Process:
    """Starts what `python ARGUMENTS...` starts: a script's path or -m and a module, then its own. Files are descriptors; None is
    ours."""
    environment = dict(os.environ if env is None else env)
    address = environment.get(SERVER)
    if address is None:
        command = [sys.executable, *arguments]
        return subprocess.Popen(
            command, stdin=stdin, stdout=stdout, stderr=stderr, env=environment, start_new_session=new_session
        )
    order = {"arguments": list(arguments), "environment": environment, "folder": os.getcwd(), "new_session": new_session}
    with open(os.devnull, "rb") as nothing:
        files = [nothing.fileno() if stdin == subprocess.DEVNULL else stdin, 1 if stdout is None else stdout]
        files.append({None: 2, subprocess.STDOUT: files[1]}.get(stderr, stderr))  # type: ignore[arg-type]
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        connection.connect(address)
        socket.send_fds(connection, [json.dumps(order).encode()], files)
    return Forked(connection, arguments)


def run(arguments: Sequence[str], check: bool = False) -> subprocess.CompletedProcess[str]:
    """Starts it and waits for its end; what it wrote is in the answer."""
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        status = start(arguments, stdout=output.fileno(), stderr=errors.fileno()).wait()
        texts = []
        for file in (output, errors):
            file.seek(0)
            texts.append(file.read())
    done = subprocess.CompletedProcess(list(arguments), status, *texts)
    if check:
        done.check_returncode()
    return done


class Conversation:
    """A process that is told things in lines of text, and answers in lines."""

    def __init__(self, arguments: Sequence[str], env: Mapping[str, str]) -> None:
        its_input, ours = os.pipe()
        theirs, its_output = os.pipe()
        self.process = start(arguments, stdin=its_input, stdout=its_output, env=env)
        os.close(its_input)
        os.close(its_output)
        self.input = os.fdopen(ours, "w", buffering=1, encoding="utf-8")
        self.output = os.fdopen(theirs, encoding="utf-8")

    def close(self) -> None:
        """Kills it."""
        self.process.kill()
        self.process.wait()
        self.input.close()
        self.output.close()
