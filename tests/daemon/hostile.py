"""Clients of a daemon that break every rule: raw access to what an attached process shares with its daemon, and child processes.

Run as a script: `hostile.py ACT PATH [ARGUMENT]`, prints one line when its act is done and then waits to be killed.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import random
import struct
import sys
import time

from pp1q_transport._native.ring import HEADER_BYTES
from pp1q_transport.client import attach_receiver
from pp1q_transport.errors import Pp1qError
from pp1q_transport.local import attach, unix_socket
from pp1q_transport.local import messages as m
from pp1q_transport.local.channel import CLIENT, Channel, channel_bytes
from pp1q_transport.local.handshake import FIRST_REGION, Role, pack_attach

EDGES = (0, 1, 2, 3, 5, 31, 32, 33, 127, 128, 255, 65535, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 2, (1 << 32) - 1)
LONG_EDGES = (*EDGES, 1 << 32, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
FLOATS = (0.0, 1.0, -1.0, float("nan"), float("inf"), -float("inf"), 1e-300, 1e6, 1e300)


class Raw:
    """An attached process without manners: the shared memory, descriptors and socket themselves."""

    def __init__(self, path: str, role: Role, rank: int = 0) -> None:
        self.sock = unix_socket.connect(path, 5.0)
        fds: list[int] = []
        answer = attach._ask(self.sock, pack_attach(role, rank), fds, time.monotonic() + 5.0)
        assert answer.verdict is None, answer
        assert answer.geometry is not None
        self.role = role
        self.sessions: dict[int, int] = {}  # by target, as far as its test read them
        self.geometry = answer.geometry
        self.sizes = answer.sizes
        self.channel_fd, self.sleeps, self.bell = fds[:FIRST_REGION]
        self.regions = fds[FIRST_REGION:]
        self.capacity = answer.geometry.ring_capacity
        self.memory = mmap.mmap(self.channel_fd, channel_bytes(self.capacity))
        self.channel = Channel(memoryview(self.memory), CLIENT, os.dup(self.sleeps), os.dup(self.bell), self.capacity)
        self.sock.setblocking(False)

    def ring(self) -> None:
        """Wakes the daemon."""
        os.eventfd_write(self.bell, 1)

    def send(self, kind: int, *fields: int | float, payload: bytes = b"") -> None:
        """One well-formed record."""
        self.channel.send(kind, m.pack(kind, *fields), payload)
        self.channel.flush_bell()

    def body(self, kind: int, body: bytes) -> None:
        """One record of any body."""
        self.channel.send(kind, body)
        self.channel.flush_bell()

    @property
    def cut(self) -> bool:
        """Whether the daemon cut us off."""
        try:
            return self.sock.recv(1) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True

    def poke(self, offset: int, data: bytes) -> None:
        """Writes into the shared memory."""
        self.memory[offset : offset + len(data)] = data

    def close(self) -> None:
        """Leaves without a word. The maps go with their last view."""
        self.sock.close()
        self.channel.close()
        for fd in (self.channel_fd, self.sleeps, self.bell, *self.regions):
            os.close(fd)


# ---- what to write ----------------------------------------------------------------------------------------------------


def scribble(raw: Raw, seeded: random.Random) -> None:
    """Indexes, flags and records of both rings, at random; values near the true ones are worse than wild ones."""
    for _ in range(seeded.randrange(1, 6)):
        ring = seeded.randrange(2) * (HEADER_BYTES + raw.capacity)
        word = seeded.choice((0, 64, 128, 192, 8, 100))
        (now,) = struct.unpack_from("<Q", raw.memory, ring + word)
        near = (now + seeded.choice((-9, -1, 1, 7, 8, 40, raw.capacity, raw.capacity + 1, -raw.capacity))) % (1 << 64)
        value = seeded.choice((near, near, seeded.choice(LONG_EDGES), seeded.randrange(1 << 64)))
        raw.poke(ring + word, struct.pack("<Q", value))
        if seeded.random() < 0.5:
            at = ring + HEADER_BYTES + seeded.randrange(256)
            raw.poke(at, seeded.randbytes(seeded.randrange(1, 64)))
        raw.ring()


def header_noise(raw: Raw, seeded: random.Random) -> None:
    """A record header of any length, kind and zero field, written by hand behind the true index."""
    (head,) = struct.unpack_from("<Q", raw.memory, 0)
    total = seeded.choice((0, 1, 7, 8, 9, 40, raw.capacity, raw.capacity + 1, (1 << 32) - 1, seeded.randrange(1 << 16)))
    noise = struct.pack("<IHH", total, seeded.choice((0, 1, 2, 48, 63, 64, 65535)), seeded.choice((0, 0, 1, 65535)))
    noise += seeded.randbytes(64)
    start = head % raw.capacity
    for index, byte in enumerate(noise):
        raw.memory[HEADER_BYTES + (start + index) % raw.capacity] = byte
    raw.poke(0, struct.pack("<Q", (head + seeded.choice((8, len(noise), min(total, raw.capacity)))) % (1 << 64)))
    raw.ring()


def odd_record(seeded: random.Random, known: dict[str, tuple[int, ...]]) -> tuple[int, bytes]:
    """A record of a true kind and length whose fields are edges, or what `known` gives for their names."""
    kind = seeded.choice([*m.TABLE, m.STEP, m.COMMIT, m.OPEN, m.RELEASE, m.CLOSE, m.PUT, m.FAIL])
    message = m.TABLE[kind]
    values: list[int | float] = []
    for name, code in zip(message.fields, message.layout.format.removeprefix("<"), strict=True):
        if name in known and seeded.random() < 0.8:
            values.append(seeded.choice(known[name]))
        elif code == "d":
            values.append(seeded.choice(FLOATS))
        elif code == "i":
            values.append(seeded.choice((0, 1, 5, 127, 128, -1, (1 << 31) - 1, -(1 << 31))))
        else:
            values.append(seeded.choice(LONG_EDGES if code == "Q" else EDGES))
    payload = b""
    if message.has_payload:
        count = seeded.choice((0, 1, 2, 3, 9))
        values[message.counted] = count
        tokens = (0, 1, 5, 127, 128, -1, (1 << 31) - 1)
        payload = b"".join(struct.pack("<i", seeded.choice(tokens)) for _ in range(count))
        payload = payload[: count * message.unit]
    for index in message.zeros:
        values[index] = 0 if seeded.random() < 0.9 else 1
    body = message.layout.pack(*values) + payload
    if seeded.random() < 0.03:
        body = body[: seeded.randrange(len(body))] if body else b"x"
    return kind, body


# ---- as a process -----------------------------------------------------------------------------------------------------


def hold(path: str) -> str:
    """Attaches, gets a proposal and keeps it."""
    receiver = attach_receiver(path)
    receiver.wait_for_peer(30.0)
    keep.append((receiver, receiver.step(receiver.open_request(os.getpid(), [1, 2], seed=1), support=16)))
    return "ok"


def stranger(path: str) -> str:
    """Tries to attach as another user. The socket lets it in; the daemon must not. Tried once before, since that user may not
    read the modules that come in on the way; from the socket's own folder, since it may not come there by the machine's root."""
    with contextlib.suppress(Pp1qError):
        attach_receiver("/nonexistent/daemon.sock")
    os.chdir(os.path.dirname(path))
    os.setgid(65534)
    os.setuid(65534)
    keep.append(attach_receiver(os.path.basename(path)))
    return "ok"


keep: list[object] = []
ACTS = {"hold": hold, "stranger": stranger}


def main() -> None:
    act, path = sys.argv[1:3]
    try:
        line = ACTS[act](path)
    except Pp1qError as fault:
        reason = getattr(fault, "reason", None)
        line = f"{reason.value if reason else 'config'}: {fault}"
    print(line, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
