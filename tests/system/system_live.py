"""A receiver whose session is busy, and what strangers throw at it: shared by the tests of both its ports."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

from system_rig import PROMPT, Rig, consume, eventually

from pp1q_transport import wire
from pp1q_transport.wire import Header

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"
# A TLS 1.2 record with a minimal ClientHello: version, random, no session, one suite, null compression.
CLIENT_HELLO = bytes.fromhex("160301002f0100002b0303") + bytes(range(32)) + bytes.fromhex("000002130101000000")
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"
NOISE = random.Random(20260)


class Live:
    """A receiver with a running session: one thread drafts, one verifies, round after round, until `stop`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.counters = rig.receiver.counters
        self.rounds = 0
        self.lost: list[BaseException] = []
        self._ending, self._drafted = threading.Event(), threading.Event()
        rig.connect()
        session = rig.receiver.session
        assert session is not None
        self.session = session.terms.session
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._verify, self._draft)]
        for thread in self._threads:
            thread.start()

    def _draft(self) -> None:
        self._guard(self._draft_all)

    def _draft_all(self) -> None:
        while not self._drafted.is_set():
            step = self.rig.leader.next_step(1_000_000)
            if step is not None:
                self.rig.draft(step)

    def _verify(self) -> None:
        self._guard(self._verify_all)

    def _verify_all(self) -> None:
        receiver = self.rig.receiver
        requests = [receiver.open_request(one, PROMPT, seed=one) for one in (1, 2)]
        while not self._ending.is_set():
            tickets = [receiver.enqueue(request, support=16, budget_us=60_000_000) for request in requests]
            for request, ticket in zip(requests, tickets, strict=True):
                with ticket.wait() as proposal:
                    consume(self.rig.models, receiver, request, proposal)
                self.rounds += 1

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001 - shown by `check`
            self.lost.append(fault)

    def port_of(self, plane: str) -> tuple[str, int]:
        forming = self.rig.receiver.engine._forming
        assert forming._port is not None
        endpoint = forming._port.endpoint if plane == "data" else self.rig.receiver.endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def more_rounds(self, count: int = 20) -> None:
        """So many more rounds pass."""
        goal = self.rounds + count
        self.until(lambda: self.rounds >= goal)

    def until(self, condition: Callable[[], object]) -> None:
        eventually(lambda: self.lost or condition(), lambda: time.sleep(0.001), 30.0)
        assert not self.lost, self.lost[0]

    def stop(self) -> None:
        for event, thread in zip((self._ending, self._drafted), self._threads, strict=True):
            event.set()
            thread.join(30)

    def check(self) -> None:
        """Nobody noticed: one session, the same one, every proposal ready, every slot free."""
        self.more_rounds()
        self.stop()
        assert not self.lost, self.lost[0]
        receiver = self.rig.receiver
        assert receiver.session is not None
        assert receiver.session.terms.session == self.session
        assert self.counters.get("sessions") == self.rig.leader.counters.get("sessions") == 1
        assert self.counters.get("discarded") == 0
        assert receiver.totals()["ready"] == self.rounds
        assert self.rig.all_free()


@contextmanager
def running(**options: Any) -> Iterator[Live]:
    with Rig(**options) as rig:
        live = Live(rig)
        try:
            yield live
            live.check()
        finally:
            live.stop()


def throw(address: tuple[str, int], data: bytes, linger_s: float = 20.0) -> bytes:
    """Sends `data`, waits until the other side hangs up, returns what it said."""
    said = b""
    with socket.create_connection(address) as sock:
        sock.settimeout(linger_s)
        with suppress(ConnectionError):
            sock.sendall(data)
            while more := sock.recv(4096):
                said += more
    return said


def header_of(kind: int, **fields: int) -> bytes:
    header = Header()
    header.clear()
    header.kind = kind
    for name, value in ({"session": 5, "boot_nonce": 9} | fields).items():
        setattr(header, name, value)
    frame = bytearray(wire.HEADER_BYTES)
    header.encode(frame, 0)
    return bytes(frame)


PROOF_HEADER = header_of(wire.PROOF, payload_length=wire.PROOF_BYTES, payload_digest=1, subject=1)


def server_side(port: int) -> int:
    """How many established connections this process holds on a listening port of its own (IPv4)."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(1 for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "01" and row[9] != "0")


def crowd(address: tuple[str, int], count: int, stack: ExitStack) -> Sequence[socket.socket]:
    """So many connections that say nothing; a full backlog is waited for."""
    socks = []
    for _ in range(count):
        socks.append(stack.enter_context(socket.create_connection(address, timeout=30)))
    return socks
