"""The shm link's data port and the dial to it: a Unix socket without a file, for one user; memory is passed with the proof.

Between the operating system and `proving`, which cuts off whatever does not prove itself. The memory exists only once the peer
has proven itself; the socket stays the link's doorbell and its word that the peer lives. SPEC sections 2 and 4.
"""

from __future__ import annotations

import os
import re
import secrets
import socket
import struct
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError, PeerFault, Reason
from ..session.proof import proof_frame
from .proving import BACKLOG, ProvingDialer, ProvingPort
from .shm_memory import DIALER, LISTENER, RING_BYTES, ShmEnds, create_memory, judge_memory, map_memory

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement

NAME_BYTES: Final = 16
_NAME: Final = re.compile(r"pp1q-[0-9a-f]{32}")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid (unix(7), SO_PEERCRED)
_DESCRIPTOR: Final = struct.Struct("i")


def peer_of(sock: socket.socket) -> tuple[int, int]:
    """(process ID, user ID) of the other end of a Unix socket, as the kernel noted them when it connected or listened."""
    pid, uid, _gid = _CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return pid, uid


class ShmPort(ProvingPort[ShmEnds]):
    """A listening data port of this host. `users` may connect (by default whom this process runs as)."""

    def __init__(
        self,
        find: Callable[[int], Agreement | None],
        counters: Counters,
        users: frozenset[int] | None = None,
        ring_bytes: int = RING_BYTES,
    ) -> None:
        self._users = frozenset({os.geteuid()}) if users is None else users
        self._ring_bytes = ring_bytes
        name = f"pp1q-{secrets.token_hex(NAME_BYTES)}"
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            sock.bind(b"\0" + name.encode("ascii"))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            raise ConfigError(f"can't listen for data links on shm://{name}: {error.strerror}") from error
        sock.setblocking(False)
        super().__init__(sock, f"shm://{name}", find, counters)

    def _admit(self, sock: socket.socket) -> Reason | None:
        sock.setblocking(False)
        return None if peer_of(sock)[1] in self._users else Reason.AUTH_FAILED

    def _join(self, sock: socket.socket, agreement: Agreement) -> ShmEnds | None:
        proof = proof_frame(agreement)
        try:
            fd = create_memory(self._ring_bytes)
            try:
                memory = map_memory(fd)
                carried = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, _DESCRIPTOR.pack(fd))]
                if sock.sendmsg([proof], carried) == len(proof):
                    return ShmEnds(sock, memory, LISTENER)
                memory.close()
            finally:
                os.close(fd)
        except OSError:  # no memory, no descriptors, or nobody there any more
            self._counters.add("link_memory_failed")
        return None


class ShmDialer(ProvingDialer[ShmEnds]):
    """Connects to a data port of this host, proves itself, takes the memory that comes with the peer's proof and judges it."""

    hint = " (an shm link needs both processes on one host and in one network namespace)"

    def __init__(self, agreement: Agreement, now_ns: int, users: frozenset[int] | None = None) -> None:
        name = shm_name(agreement.data)
        self._fds: list[int] = []
        super().__init__(agreement, now_ns, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        self._sock.setblocking(False)
        self._connect(b"\0" + name.encode("ascii"))
        if peer_of(self._sock)[1] not in (frozenset({os.geteuid()}) if users is None else users):
            self._fail(Reason.AUTH_FAILED, f"{agreement.data} belongs to user {peer_of(self._sock)[1]}")

    def _receive(self, most: int) -> bytes:
        # Room for exactly one descriptor: the kernel closes what is beyond it and says so (MSG_CTRUNC).
        data, carried, flags, _address = self._sock.recvmsg(most, socket.CMSG_LEN(_DESCRIPTOR.size))
        for level, kind, body in carried:
            if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
                usable = len(body) - len(body) % _DESCRIPTOR.size
                self._fds += [fd for (fd,) in _DESCRIPTOR.iter_unpack(body[:usable])]
        if flags & socket.MSG_CTRUNC:
            self._fail(Reason.MALFORMED, "more than one descriptor came with the peer's link proof")
        return data

    def _join(self) -> ShmEnds:
        if len(self._fds) != 1:
            self._fail(Reason.MALFORMED, f"{len(self._fds)} descriptors came with the peer's link proof, not one")
        try:
            judge_memory(self._fds[0])
            memory = map_memory(self._fds[0])
        except PeerFault as fault:
            self._fail(fault.reason, fault.detail)
        except OSError as error:
            self._fail(Reason.LINK_ERROR, f"can't map the link's memory: {error.strerror}")
        self._drop_descriptors()
        return ShmEnds(self._sock, memory, DIALER)

    def _drop_descriptors(self) -> None:
        while self._fds:
            os.close(self._fds.pop())

    def close(self) -> None:
        """See `ProvingDialer.close`; closes what the peer sent as well."""
        self._drop_descriptors()
        super().close()


def shm_name(endpoint: str) -> str:
    """The socket's name in "shm://pp1q-..."; raises `PeerFault(malformed)`."""
    name = endpoint.removeprefix("shm://")
    if not endpoint.startswith("shm://") or not _NAME.fullmatch(name):
        raise PeerFault(Reason.MALFORMED, f"{endpoint!r} is no shm://pp1q-NAME")
    return name
