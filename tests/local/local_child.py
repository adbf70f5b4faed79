"""A process that attaches, honestly or not, for the handshake's tests. Run as a script: `local_child.py ACT PATH [ARGUMENT]`.

Prints one line when its act is done (`ok ...` or what was raised), then waits for its standard input to close or to be killed.
"""

from __future__ import annotations

import contextlib
import ctypes
import ctypes.util
import fcntl
import mmap
import os
import socket
import struct
import sys
import time
from collections.abc import Callable

from pp1q_transport.counters import Counters
from pp1q_transport.errors import Pp1qError
from pp1q_transport.local.attach import AttachServer, Geometry, Role, attach
from pp1q_transport.local.channel import Channel
from pp1q_transport.staging import Region

PROT_READ, PROT_WRITE = 1, 2
SECOND_NS = 1_000_000_000


def geometry(**changes: int) -> Geometry:
    values = {
        "vocab_size": 1000, "depth": 2, "support": 4, "max_slots": 2, "row_bytes": 64, "dense_row_bytes": 4032, "group_size": 2,
        "rank": 1, "group_mode": 0, "flags": 7, "max_context_tokens": 131072, "targets": 1, "boot_nonce": 0xABCDEF0123456789,
    }
    return Geometry(**{**values, **changes})


def echo(path: str, role: Role) -> str:
    """Attaches, answers every record with the same until a record of kind 63."""
    attachment = attach(path, role, 1)
    keep.append(attachment)
    channel = attachment.channel
    while True:
        got = channel.receive()
        if got is None:
            if attachment.gone():
                return "ok the daemon is gone"
            channel.wait("block", 100_000_000, attachment.sock.fileno())
        elif got[0] == 63:
            return f"ok {attachment.regions[0].memory[:4].tobytes().hex()}"
        else:
            channel.send(got[0], bytes(got[1]))
            channel.flush_bell()


def target(path: str) -> str:
    return echo(path, Role.RECEIVER_TARGET)


def draft(path: str) -> str:
    """Writes into its staging region."""
    attachment = attach(path, Role.LEADER_DRAFT)
    attachment.regions[0].memory[:4] = b"\x01\x02\x03\x04"
    attachment.channel.send(1, b"")
    attachment.channel.flush_bell()
    keep.append(attachment)
    return "ok"


def refused(call: Callable[[], object]) -> str:
    try:
        call()
    except (OSError, TypeError) as error:
        return type(error).__name__ + (f":{error.errno}" if isinstance(error, OSError) else "")
    return "allowed"


def pry(path: str) -> str:
    """Tries everything a target may not do to slot memory; prints how each was refused."""
    fds: list[int] = []
    original = Region.attach.__func__  # type: ignore[attr-defined]

    def keeping(cls: type[Region], fd: int, size: int, writable: bool) -> Region:
        fds.append(os.dup(fd))
        return original(cls, fd, size, writable)  # type: ignore[no-any-return]

    Region.attach = classmethod(keeping)  # type: ignore[assignment,method-assign]
    attachment = attach(path, Role.RECEIVER_TARGET, 1)
    region, fd = attachment.regions[0], fds[0]
    libc = ctypes.CDLL(ctypes.util.find_library("c"), use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]

    def protect() -> None:
        address = libc.mmap(None, region.size, PROT_READ, mmap.MAP_SHARED, fd, 0)
        if libc.mprotect(address, region.size, PROT_READ | PROT_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")

    def store() -> None:
        region.memory[0] = 1

    tries: dict[str, Callable[[], object]] = {
        "store": store,
        "flag": lambda: setattr(region.array.flags, "writeable", True),
        "mmap": lambda: mmap.mmap(fd, region.size, prot=PROT_READ | PROT_WRITE),
        "mprotect": protect,
        "write": lambda: os.pwrite(fd, b"x", 0),
        "truncate": lambda: os.ftruncate(fd, 0),
        "grow": lambda: os.ftruncate(fd, 1 << 20),
        "punch": lambda: os.posix_fallocate(fd, 0, 1 << 20),
        "seal": lambda: fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        "reopen": lambda: mmap.mmap(os.open(f"/proc/self/fd/{fd}", os.O_RDWR), region.size, prot=PROT_READ | PROT_WRITE),
    }
    results = []
    for name, call in tries.items():
        try:
            results.append(f"{name}={refused(call)}")
        except ValueError:
            results.append(f"{name}=ValueError")
    return "ok " + " ".join(results)


def channel_memory(channel: Channel) -> memoryview:
    """The shared map of this process's channel, which `Channel` itself does not hand out."""
    with open("/proc/self/maps", encoding="utf-8") as lines:
        (line,) = (line for line in lines if "pp1q-channel" in line)
    start, end = (int(part, 16) for part in line.split()[0].split("-"))
    return memoryview((ctypes.c_uint8 * (end - start)).from_address(start)).cast("B")


def scribble(path: str, what: str) -> str:
    """Writes what no honest client writes into the shared memory."""
    attachment = attach(path, Role.RECEIVER_TARGET, 1)
    keep.append(attachment)
    memory = channel_memory(attachment.channel)
    if what == "head":
        struct.pack_into("<Q", memory, 0, 1 << 60)
    elif what == "length":
        struct.pack_into("<IHH", memory, 256, 0xFFFFFFF0, 1, 0)
        struct.pack_into("<Q", memory, 0, 8)
    elif what == "all":
        memory[:] = b"\xff" * len(memory)
    elif what == "tail":
        capacity = attachment.geometry.ring_capacity
        struct.pack_into("<Q", memory, 256 + capacity + 64, 1 << 60)
    return "ok"


def still(path: str) -> str:
    """Attaches and never receives."""
    keep.append(attach(path, Role.RECEIVER_TARGET, 1))
    return "ok"


def silent(path: str) -> str:
    """Connects and says nothing."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(path)
    keep.append(sock)
    return "ok"


def as_uid(path: str, uid: str) -> str:
    """Attaches as another user. Tried once before, since that user may not read the modules that come in on the way; from the
    socket's own folder, since it may not come there by the machine's root."""
    with contextlib.suppress(Pp1qError):
        target("/nonexistent/daemon.sock")
    os.chdir(os.path.dirname(path))
    os.setgroups([])
    os.setgid(int(uid))
    os.setuid(int(uid))
    return target(os.path.basename(path))


def serve(path: str) -> str:
    """A daemon with one region, which attaches whoever comes and sends what it gets back."""
    server = AttachServer(path, frozenset((os.getuid(),)), Counters())
    region = Region(geometry().slots().total_bytes)
    region.seal_for_readers()
    keep.extend((server, region))
    print("ok listening", flush=True)
    while True:
        for pending in server.poll(time.monotonic_ns()):
            keep.append(server.accept(pending, geometry(), [(region.fd, region.size)]))
        time.sleep(0.005)


keep: list[object] = []
ACTS = (target, draft, pry, scribble, still, silent, as_uid, serve)


def main() -> None:
    act = {function.__name__: function for function in ACTS}[sys.argv[1]]
    try:
        line = act(*sys.argv[2:])  # type: ignore[operator]
    except Pp1qError as error:
        line = f"{type(error).__name__}: {error}"
    print(line, flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
