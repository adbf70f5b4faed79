"""What the tests of the local package share: children, a daemon's door, and looks at what a process holds."""

from __future__ import annotations

import gc
import os
import select
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

from local_child import geometry

from pp1q_transport.counters import Counters
from pp1q_transport.local.attach import Attached, AttachServer, Pending
from pp1q_transport.staging import Region

HERE = Path(__file__).parent


class Child:
    """One run of local_child.py."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "local_child.py"), *arguments], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def line(self) -> str:
        """What it says when its act is done."""
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(30)

    def end(self) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.kill()
        self.process.wait(30)
        self.process.stdout.close()


class Door:
    """A daemon's side in this process, with one sealed region of slots."""

    def __init__(self, path: str, uids: frozenset[int]) -> None:
        self.path = path
        self.counters = Counters()
        self.server = AttachServer(path, uids, self.counters)
        self.region = Region(geometry().slots().total_bytes)
        self.region.seal_for_readers()
        self.children: list[Child] = []
        self.attached: list[Attached] = []

    def child(self, act: str, *arguments: str) -> Child:
        self.children.append(Child(act, self.path, *arguments))
        return self.children[-1]

    def arrival(self) -> Pending:
        """The next process that says who it is."""
        give_up = time.monotonic() + 30
        while time.monotonic() < give_up:
            arrived = self.server.poll(time.monotonic_ns())
            if arrived:
                assert len(arrived) == 1
                return arrived[0]
            select.select([self.server], [], [], 0.2)
        raise AssertionError("nobody came")

    def accept(self, **changes: int) -> Attached:
        self.attached.append(self.server.accept(self.arrival(), geometry(**changes), [(self.region.fd, self.region.size)]))
        return self.attached[-1]

    def connect(self) -> socket.socket:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        sock.settimeout(20)
        sock.connect(self.path)
        return sock

    def close(self) -> None:
        for attached in self.attached:
            attached.close()
        for child in self.children:
            child.end()
        self.server.close()
        self.region.close()


def descriptors() -> set[int]:
    """What this process holds open, less what only garbage of earlier tests does (tracebacks keep maps alive)."""
    gc.collect()
    return {int(name) for name in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{name}")}


def receive(attached: Attached, seconds: float = 20) -> tuple[int, bytes]:
    give_up = time.monotonic() + seconds
    while (got := attached.channel.receive()) is None:
        assert time.monotonic() < give_up, "no record"
        assert not attached.gone()
        attached.channel.wait("block", 100_000_000, attached.sock.fileno())
    return got[0], bytes(got[1])


def await_gone(attached: Attached) -> None:
    give_up = time.monotonic() + 20
    while not attached.gone():
        assert time.monotonic() < give_up, "the death was not noticed"
        select.select([attached.sock], [], [], 0.2)
