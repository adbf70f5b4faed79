"""The Unix handshake, both sides: how a process comes to share a channel and slot memory with its daemon.

Between the operating system (SOCK_SEQPACKET, SCM_RIGHTS, SO_PEERCRED, memfd seals) and the two owners. A peer is judged by the
uid that the kernel vouches for before a byte of it is read; nothing is said over the socket afterwards, its end tells of a
death. Decides nothing about roles and ranks, moves no record. What the daemon holds for a client is bounded, and nothing outlives
either process: memory and bells have no names, a socket file that a kill -9 left is replaced.
"""

from __future__ import annotations

import array
import errno
import fcntl
import itertools
import mmap
import os
import select
import socket
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING, Any, Final

from ..errors import ConfigError, LocalMisuse, PeerFault, Reason
from ..logs import logger
from ..staging import Region
from . import unix_socket
from .channel import CLIENT, DAEMON, Channel, channel_bytes
from .handshake import (
    ATTACH,
    FIRST_REGION,
    MAX_ANSWER_BYTES,
    MAX_REGIONS,
    Flag,
    Geometry,
    Role,
    pack_attach,
    pack_refusal,
    pack_welcome,
    parse_answer,
    parse_attach,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..counters import Counters
    from .handshake import Answer

ATTACH_TIMEOUT_NS: Final = 1_000_000_000
HALF_OPEN: Final = 16
ACCEPTS_A_POLL: Final = 32
_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
SHORTAGE_NS: Final = 200_000_000
_SHORT_OF: Final = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_QUIET: Final = socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL


def _ended(sock: socket.socket) -> bool:
    """Whether the peer closed its end, died, or said something where nothing may be said."""
    try:
        sock.recv(1, socket.MSG_DONTWAIT)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# Not socket.send_fds and recv_fds: those of Python 3.11 drop their flags, so that descriptors arrive inheritable.


def _send_fds(sock: socket.socket, data: bytes, fds: list[int]) -> None:
    sock.sendmsg([data], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))], _QUIET)


def _receive_fds(sock: socket.socket) -> tuple[bytes, list[int], int]:
    """(data, descriptors, flags) of one message; there is room for as many as an ANSWER may have."""
    room = socket.CMSG_SPACE((FIRST_REGION + MAX_REGIONS) * 4)
    data, ancillary, flags, _name = sock.recvmsg(MAX_ANSWER_BYTES + 1, room, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, passed in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(passed[: len(passed) - len(passed) % 4])
    return data, list(fds), flags


def _map_channel(fd: int, capacity: int, flags: int) -> memoryview:
    return memoryview(mmap.mmap(fd, channel_bytes(capacity), flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE))


def _make_channel(capacity: int, undo: ExitStack, passed: ExitStack) -> tuple[Channel, list[int]]:
    """The daemon's end of a new channel and the descriptors to pass on; `undo` closes the one, `passed` what is only theirs.

    The client sleeps on a pipe and the daemon on an eventfd: the file of an eventfd is shared with its flags, so a client could
    make a ring of it block for ever, but it can't touch the daemon's end of a pipe. The other way round the client would
    have to fear SIGPIPE, and need not fear its daemon.
    """
    try:
        fd = os.memfd_create("pp1q-channel", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        passed.callback(os.close, fd)
        # The pages are promised now, since running out at a touch is a SIGBUS. Zeroing and mapping them takes milliseconds, in
        # which no other client would be served: the client does that.
        os.posix_fallocate(fd, 0, channel_bytes(capacity))
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, _SEALS)
        memory = _map_channel(fd, capacity, mmap.MAP_SHARED)
        client_sleeps, client_bell = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        passed.callback(os.close, client_sleeps)
        with ExitStack() as bells:
            bells.callback(os.close, client_bell)
            daemon_bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
            bells.callback(os.close, daemon_bell)
            channel = Channel(memory, DAEMON, daemon_bell, client_bell, capacity)
            bells.pop_all()
    except OSError as error:
        raise ConfigError(f"no memory or descriptors for another client: {error.strerror}; raise the daemon's limits") from error
    undo.callback(channel.close)
    return channel, [fd, client_sleeps, daemon_bell]


class Pending:
    """A process that said who it is and waits for `accept` or `refuse`; one of the two must follow.

    `pid`, `uid` and `gid` are the kernel's word at the time it connected; `role` and `rank` are the process's own.
    """

    def __init__(self, sock: socket.socket, deadline_ns: int) -> None:
        self.sock = sock
        self.deadline_ns = deadline_ns
        self.pid, self.uid, self.gid = unix_socket.credentials(sock)
        self.role = Role.ADMIN
        self.rank = 0


class Attached:
    """A process that shares memory with this daemon. Wait on `sock` for its end, on `channel` for its records."""

    _count = itertools.count(1)

    def __init__(self, channel: Channel, pending: Pending) -> None:
        self.serial = next(self._count)  # tells it from all others without keeping its memory alive
        self.channel = channel
        self.sock = pending.sock
        self.pid: int = pending.pid
        self.uid: int = pending.uid
        self.role = pending.role
        self.rank = pending.rank

    def gone(self) -> bool:
        """Whether the process ended (also by kill -9), closed, or spoke on the socket, where nothing may be said."""
        return self.sock.fileno() < 0 or _ended(self.sock)

    def close(self) -> None:
        """Cuts the process off: it sees the end of its socket and of its bell."""
        self.channel.close()
        self.sock.close()


class AttachServer:
    """The daemon's door at `path`. `mode` is the socket file's (0o600, or 0o660 for a group); only `allow_uids` come in.

    Call `poll` whenever `fileno()` is readable and at least once a second. Counts `clients_attached`, `clients_refused`
    (with the reason), `clients_silent` (no ATTACH within a second, or pushed out by too many such), `clients_lost` and
    `accept_failed`. Raises `ConfigError` when another daemon listens there or the path can't be used.
    """

    def __init__(self, path: str, allow_uids: frozenset[int], counters: Counters, mode: int = 0o600) -> None:
        if mode not in (0o600, 0o660):
            raise ConfigError(f"socket mode {mode:o}: use 600, or 660 to let a group in")
        self.path = path
        self._allowed = allow_uids
        self._counters = counters
        self._log: Any = logger(part="attach", socket=path)
        self._half_open: list[Pending] = []
        self._sock, self._identity = unix_socket.listen(path, mode)
        # An epoll of its own, so that the owner has one descriptor to wait on, whatever is half-open.
        self._epoll = select.epoll()
        self._epoll.register(self._sock.fileno(), select.EPOLLIN)
        self._resume_ns: int | None = None

    def fileno(self) -> int:
        """Readable when `poll` has something to do."""
        return self._epoll.fileno()

    @property
    def half_open(self) -> int:
        """How many connections have not said who they are."""
        return len(self._half_open)

    def poll(self, now_ns: int) -> list[Pending]:
        """Takes in connections, judges them and cuts off the silent. Returns those to `accept` or `refuse` now."""
        self._take_in(now_ns)
        waiting, self._half_open = self._half_open, []
        return [pending for pending in waiting if self._hear(pending, now_ns)]

    def _take_in(self, now_ns: int) -> None:
        if self._resume_ns is not None:
            if now_ns < self._resume_ns:
                return
            self._resume_ns = None
            self._epoll.modify(self._sock.fileno(), select.EPOLLIN)
        for _ in range(ACCEPTS_A_POLL):
            try:
                sock, _name = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A connection that died in the queue, or no descriptors left: neither may disturb who is attached.
                self._counters.add("accept_failed")
                if error.errno in _SHORT_OF:
                    self._log.error("can't take a client in", why=error.strerror)
                    self._shed()
                    # Whoever waits in the queue would make us readable all the time.
                    self._resume_ns = now_ns + SHORTAGE_NS
                    self._epoll.modify(self._sock.fileno(), 0)
                    return
                continue
            sock.setblocking(False)
            pending = Pending(sock, now_ns + ATTACH_TIMEOUT_NS)
            if pending.uid not in self._allowed:
                self.refuse(pending, Reason.AUTH_FAILED, f"uid {pending.uid} is not among those that may attach")
                continue
            if len(self._half_open) >= HALF_OPEN:
                self._shed()
            self._half_open.append(pending)
            self._epoll.register(sock.fileno(), select.EPOLLIN)

    def _shed(self) -> None:
        """The oldest half-open connection gives way: a process that means it says who it is at once."""
        if self._half_open:
            self._cut(self._half_open.pop(0), "pushed out by later ones")

    def _hear(self, pending: Pending, now_ns: int) -> bool:
        """Whether it has said who it is just now. One that is still silent stays half-open, any other is out."""
        try:
            # One byte more than it may be. Descriptors that a client sends along are dropped by the kernel.
            data = pending.sock.recv(ATTACH.size + 1)
        except BlockingIOError:
            if now_ns < pending.deadline_ns:
                self._half_open.append(pending)
            else:
                self._cut(pending, "said nothing within a second")
            return False
        except OSError as error:
            self._cut(pending, str(error.strerror))
            return False
        if not data:
            self._cut(pending, "left without a word")
            return False
        self._epoll.unregister(pending.sock.fileno())
        try:
            pending.role, pending.rank = parse_attach(data)
        except PeerFault as fault:
            self.refuse(pending, fault.reason, fault.detail)
            return False
        return True

    def _cut(self, pending: Pending, why: str) -> None:
        self._counters.add("clients_silent")
        self._log.warning("client cut off", pid=pending.pid, uid=pending.uid, why=why)
        self._epoll.unregister(pending.sock.fileno())
        pending.sock.close()

    def refuse(self, pending: Pending, reason: Reason, text: str) -> None:
        """Answers `reason` with one line of words, counts, logs and closes."""
        self._counters.add("clients_refused")
        self._counters.refuse(reason)
        self._log.warning("client refused", pid=pending.pid, uid=pending.uid, reason=reason.value, why=text)
        try:
            pending.sock.send(pack_refusal(reason, text), _QUIET)
        except OSError as error:
            self._log.info("the refused client left before it was told", pid=pending.pid, why=error.strerror)
        pending.sock.close()

    def allow(self, uids: frozenset[int]) -> None:
        """From now on only these come in; who is attached stays."""
        self._allowed = uids

    def tell(self, pending: Pending, data: bytes) -> None:
        """Answers one datagram and closes: what an admin asked for."""
        try:
            pending.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2 * len(data) + 4096)
            pending.sock.send(data, _QUIET)
        except OSError as error:
            self._log.info("the admin left before it was told", pid=pending.pid, why=error.strerror)
        pending.sock.close()

    def accept(self, pending: Pending, geometry: Geometry, regions: Sequence[tuple[int, int]]) -> Attached:
        """Makes the channel and passes it on with `regions`, (descriptor, bytes) each: they stay the caller's, who sealed them.

        Raises `PeerFault` (`peer_lost`) when the process left meanwhile, `LocalMisuse` for a geometry that can't be,
        `ConfigError` when the system has no memory or descriptors for it; `pending` is closed then.
        """
        with ExitStack() as undo, ExitStack() as passed:
            undo.callback(pending.sock.close)
            answer = pack_welcome(geometry, tuple(size for _, size in regions))
            channel, fds = _make_channel(geometry.ring_capacity, undo, passed)
            try:
                _send_fds(pending.sock, answer, [*fds, *(fd for fd, _ in regions)])
            except OSError as error:
                self._counters.add("clients_lost")
                self._log.warning("client lost", pid=pending.pid, uid=pending.uid, why=error.strerror)
                raise PeerFault(Reason.PEER_LOST, f"process {pending.pid} can't be answered: {error.strerror}") from error
            undo.pop_all()
        self._counters.add("clients_attached")
        self._log.info("client attached", pid=pending.pid, uid=pending.uid, role=pending.role.name, rank=pending.rank)
        return Attached(channel, pending)

    def close(self) -> None:
        """Stops listening, drops the half-open, removes the socket file if it is still this daemon's. Harmless twice."""
        if self._sock.fileno() < 0:
            return
        for pending in self._half_open:
            pending.sock.close()
        self._half_open.clear()
        self._epoll.close()
        self._sock.close()
        try:
            unix_socket.remove(self.path, self._identity)
        except ConfigError as error:
            self._log.warning("the socket file stays behind", why=str(error))


class Attachment:
    """A process's share of its daemon: wait on `channel` for records and on `sock` for the daemon's end (its bell ends too).

    `regions` are mapped: writable for a leader's draft (one for each target), read-only for a receiver's target. `pid` and
    `uid` are the daemon's.
    """

    def __init__(self, channel: Channel, sock: socket.socket, geometry: Geometry, regions: list[Region], role: Role) -> None:
        self.channel = channel
        self.sock = sock
        self.geometry = geometry
        self.regions = regions
        self.role = role
        self.pid, self.uid, _gid = unix_socket.credentials(sock)

    def gone(self) -> bool:
        """Whether the daemon ended, also by kill -9, or cut us off."""
        return self.sock.fileno() < 0 or _ended(self.sock)

    def close(self) -> None:
        """Leaves. Maps go with the last view of them."""
        self.channel.close()
        self.sock.close()


def attach(path: str, role: Role, rank: int = 0, timeout_s: float = 5.0) -> Attachment:
    """Joins the daemon that listens at `path`.

    Raises `ConfigError` (nobody listens, not permitted; one line says what to do) and `PeerFault`: with the daemon's reason when
    it refuses, `timeout` when it says nothing within `timeout_s`, `peer_lost` when it ends meanwhile, or what is wrong with its
    answer.
    """
    role = Role(role)
    request = pack_attach(role, rank)
    give_up = time.monotonic() + timeout_s
    with ExitStack() as undo:
        sock = unix_socket.connect(path, timeout_s)
        undo.callback(sock.close)
        fds: list[int] = []
        undo.callback(_close_all, fds)  # what nobody took over
        answer = _ask(sock, request, fds, give_up)
        if answer.verdict is not None:
            raise PeerFault(answer.verdict, f"the daemon at {path} refuses: {answer.text}")
        attachment = _take_over(sock, role, answer, fds)
        undo.pop_all()
    return attachment


def _close_all(fds: list[int]) -> None:
    for fd in fds:
        os.close(fd)


def _ask(sock: socket.socket, request: bytes, fds: list[int], give_up: float) -> Answer:
    """Sends ATTACH and reads the ANSWER; the descriptors that come with it are added to `fds`, whatever becomes of it."""
    with suppress(BrokenPipeError):  # refused before it was heard: the answer lies there already
        sock.send(request, _QUIET)
    data, flags = b"", 0
    for _try in range(2):
        sock.settimeout(max(0.001, give_up - time.monotonic()))
        try:
            data, got, flags = _receive_fds(sock)
        except ConnectionResetError:
            continue  # a daemon that closed without reading our ATTACH: its answer comes after this error
        except TimeoutError:
            raise PeerFault(Reason.TIMEOUT, "the daemon does not answer: is it stopped or overloaded?") from None
        fds += got
        break
    if not data:
        raise PeerFault(Reason.PEER_LOST, "the daemon ended, or cut us off, without an answer")
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise PeerFault(Reason.LENGTH_BOUNDS, "the daemon's answer was cut short: is this process out of descriptors?")
    answer = parse_answer(data)
    expected = 0 if answer.verdict is not None else FIRST_REGION + len(answer.sizes)
    if len(fds) != expected:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"{len(fds)} descriptors came with the daemon's answer, not {expected}")
    return answer


def _take_over(sock: socket.socket, role: Role, answer: Answer, fds: list[int]) -> Attachment:
    """Maps what came, after a look at what it is; takes out of `fds` what it takes over."""
    geometry = answer.geometry
    assert geometry is not None
    memory = _their_channel(fds[0], geometry.ring_capacity)
    regions = [Region.attach(fds.pop(FIRST_REGION), size, role is Role.LEADER_DRAFT) for size in answer.sizes]
    try:
        channel = Channel(memory, CLIENT, fds[1], fds[2], geometry.ring_capacity)
    except LocalMisuse as error:
        raise PeerFault(Reason.MALFORMED, f"the daemon passed a doorbell that is none: {error}") from error
    os.close(fds[0])
    fds.clear()
    sock.setblocking(False)
    return Attachment(channel, sock, geometry, regions, role)


def _their_channel(fd: int, capacity: int) -> memoryview:
    """Memory that may shrink under us would kill this process at the next touch: its size must be right and sealed."""
    try:
        seals, size, wanted = fcntl.fcntl(fd, fcntl.F_GET_SEALS), os.fstat(fd).st_size, channel_bytes(capacity)
        if seals & _SEALS != _SEALS or size != wanted:
            raise PeerFault(Reason.LIMITS_MISMATCH, f"a channel of {size} bytes with seals {seals:#x}, not {wanted} sealed")
        return _map_channel(fd, capacity, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0))
    except OSError as error:
        raise PeerFault(Reason.LIMITS_MISMATCH, f"the channel's memory can't be mapped: {error.strerror}") from error


__all__ = ["Attached", "Attachment", "AttachServer", "Flag", "Geometry", "Pending", "Role", "attach"]
