#!/usr/bin/env python3
"""The machine's fork server: imports what lanes, tests and commands need, once, and forks a child for each order.

`warm.py ADDRESS` listens on that Unix socket; tests/rdma/processes.py gives the orders and lanes.py starts this. A child is to
its program what a new interpreter would be: main module, arguments, environment, files and folder are its own, and it ends as
one does. No verbs object, thread or event loop exists here, so there is none that a child could have a copy of.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import ORDER_BYTES

PR_SET_PDEATHSIG = 1
# What the lanes' processes import, found by asking them. What is missing here is imported later, as in any process.
MODULES = (
    "pytest", "_pytest.config", "pdb", "xml.etree.ElementTree", "encodings.idna", "numpy", "numpy.random", "zmq", "msgpack",
    "xxhash", "structlog", "structlog.testing", "click", "pp1q_transport.cli.doctor", "pp1q_transport.cli.keys",
    "pp1q_transport.client.draft", "pp1q_transport.client.target", "pp1q_transport.engine", "pp1q_transport.forming",
    "pp1q_transport.links.rdma", "pp1q_transport.links.rdma_port", "pp1q_transport.links.rdma_status", "pp1q_transport.links.shm",
    "pp1q_transport.links.sim", "pp1q_transport.links.tcp", "pp1q_transport.qualify.leading", "pp1q_transport.staging",
    "pp1q_transport.toy.models", "pp1q_transport.toy.reference", "pp1q_transport.verify",
)  # fmt: skip


@dataclass
class Child:
    """A forked process: who asked for it, and what tells of its death."""

    pid: int
    connection: socket.socket
    pidfd: int


def import_all() -> None:
    """Everything that a child would import. Raises `ImportError` or `ConfigError` for what is not there."""
    for name in MODULES:
        importlib.import_module(name)
    for plugin in importlib.import_module("_pytest.config").default_plugins:
        importlib.import_module(f"_pytest.{plugin}")
    verbs = importlib.import_module("pp1q_transport.links.rdma_verbs")
    verbs.load()
    assert not any(verbs.alive.values()), "a verbs object before the first fork"


class Server:
    """Takes orders until its input ends. In a child, `serve` returns the order that the child is there for."""

    def __init__(self, address: str) -> None:
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(address)
        self.listener.listen(16)
        self.poller = select.poll()
        self.poller.register(self.listener, select.POLLIN)
        self.poller.register(sys.stdin.fileno(), select.POLLIN)
        self.children: dict[int, Child] = {}  # by both descriptors

    def serve(self) -> dict[str, Any] | None:
        while True:
            descriptor, _events = self.poller.poll()[0]  # one at a time: what it closes, the next may have anew
            if descriptor == sys.stdin.fileno():
                return None
            if descriptor != self.listener.fileno():
                self._look_at(self.children[descriptor], descriptor)
            elif (order := self._take()) is not None:
                return order

    def _take(self) -> dict[str, Any] | None:
        """One order: None here, and in the child the order."""
        connection, _ = self.listener.accept()
        data, files, _, _ = socket.recv_fds(connection, ORDER_BYTES, 3)
        assert threading.active_count() == 1, "a fork beside threads"
        pid = os.fork()
        if pid == 0:
            connection.close()
            self._leave_to(files)
            order: dict[str, Any] = json.loads(data)
            return order
        for file in files:
            os.close(file)
        child = Child(pid, connection, os.pidfd_open(pid))
        for descriptor in (child.pidfd, connection.fileno()):
            self.children[descriptor] = child
            self.poller.register(descriptor, select.POLLIN)
        connection.send(json.dumps({"pid": pid}).encode() + b"\n")
        return None

    def _leave_to(self, files: list[int]) -> None:
        """In a child: nothing of the server stays open, its files become the child's."""
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        self.listener.close()
        for descriptor, child in self.children.items():
            if descriptor == child.pidfd:
                os.close(descriptor)
            else:
                child.connection.close()
        for target, file in enumerate(files):
            os.dup2(file, target)
        for file in files:
            os.close(file)

    def _look_at(self, child: Child, descriptor: int) -> None:
        """It has ended, or whoever asked for it has: then it does not outlive them."""
        abandoned = descriptor != child.pidfd
        if abandoned:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        _, status = os.waitpid(child.pid, 0)
        for each in (child.pidfd, child.connection.fileno()):
            self.poller.unregister(each)
            del self.children[each]
        os.close(child.pidfd)
        if not abandoned:
            with contextlib.suppress(BrokenPipeError):  # asked for by one who is gone, too
                child.connection.send(json.dumps({"status": os.waitstatus_to_exitcode(status)}).encode() + b"\n")
        child.connection.close()


def become(order: dict[str, Any]) -> None:
    """The order's program, in this process."""
    if order["new_session"]:
        os.setsid()
    os.chdir(order["folder"])
    os.environ.clear()
    os.environ.update(order["environment"])
    first, *rest = order["arguments"]
    if first == "-m":
        sys.path[0] = order["folder"]
        sys.argv = rest
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.path[0] = str(Path(first).resolve().parent)
        sys.argv = [first, *rest]
        runpy.run_path(first, run_name="__main__")


def main() -> None:
    import_all()
    gc.collect()
    gc.freeze()  # a child's first collection would copy every page otherwise
    server = Server(sys.argv[1])
    print("ready", flush=True)
    order = server.serve()
    if order is not None:
        become(order)


if __name__ == "__main__":
    main()
