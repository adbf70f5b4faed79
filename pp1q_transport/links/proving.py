"""How a raw connection becomes a link's: it proves itself within a second, or is cut off and counted.

Between the operating system's sockets (of any family) and the ports and dialers of each link kind, which say how to connect, whom
to let in and what a proven connection is joined with. Touches no slot and no session; what a port holds at any moment is bounded:
`HALF_OPEN` sockets of 160 bytes each, the oldest giving way. SPEC section 2.
"""

from __future__ import annotations

import errno
import os
import select
import socket
from typing import TYPE_CHECKING, Final, Generic, NoReturn, Protocol, TypeVar

from ..errors import PeerFault, Reason
from ..session.negotiate import LINK_PROOF_TIMEOUT_NS
from ..session.proof import ProofReader, proof_frame

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement

HALF_OPEN: Final = 64
ACCEPTS_A_POLL: Final = 64
BACKLOG: Final = 128


class Joined(Protocol):
    """A proven connection with all that its link needs: what a port or dialer hands over."""

    def close(self) -> None:
        """Gives it up before a link has it."""


J = TypeVar("J", bound=Joined)


class _HalfOpen:
    def __init__(self, sock: socket.socket, deadline_ns: int, reader: ProofReader) -> None:
        self.sock = sock
        self.deadline_ns = deadline_ns
        self.reader = reader


class ProvingPort(Generic[J]):
    """A listening data port over `sock` (bound already); `find` maps a session ID to the agreement that waits for its link."""

    def __init__(self, sock: socket.socket, endpoint: str, find: Callable[[int], Agreement | None], counters: Counters) -> None:
        self.endpoint = endpoint
        self._sock = sock
        self._find = find
        self._counters = counters
        self._half_open: list[_HalfOpen] = []

    def _admit(self, sock: socket.socket) -> Reason | None:
        """Prepares a connection that was just accepted, or says why it may not even try to prove itself."""
        raise NotImplementedError

    def _join(self, sock: socket.socket, agreement: Agreement) -> J | None:
        """Sends our proof on a connection that has proven itself, and what else the peer needs. None when it did not go."""
        raise NotImplementedError

    def fileno(self) -> int:
        """The listening descriptor, for polling."""
        return self._sock.fileno()

    @property
    def half_open(self) -> int:
        """How many connections have not proven themselves yet."""
        return len(self._half_open)

    def poll(self, now_ns: int) -> list[tuple[J, Agreement]]:
        """Accepts, reads proofs and cuts off. Returns the connections that have just proven themselves (our proof is sent)."""
        self._accept(now_ns)
        proven: list[tuple[J, Agreement]] = []
        kept: list[_HalfOpen] = []
        for half in self._half_open:
            reason = self._read(half, now_ns)
            agreement = half.reader.agreement
            joined = self._join(half.sock, agreement) if agreement is not None else None
            if agreement is not None and joined is not None:
                proven.append((joined, agreement))
            elif agreement is None and reason is None:
                kept.append(half)
            else:
                self._cut(half.sock, reason or Reason.LINK_ERROR)
        self._half_open = kept
        return proven

    def joins(self, session: int) -> bool:
        """Whether this session's connection has proven itself, and is still being made a link's."""
        return False

    def _accept(self, now_ns: int) -> None:
        for _ in range(ACCEPTS_A_POLL):
            try:
                sock, _peer = self._sock.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # A connection that died in the queue, or no descriptors left: neither may disturb live sessions.
                self._counters.add("accept_failed")
                if error.errno in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                    self._shed()
                    return
                continue
            refused = self._admit(sock)
            if refused is not None:
                self._cut(sock, refused)
                continue
            if len(self._half_open) >= HALF_OPEN:
                self._shed()
            self._half_open.append(_HalfOpen(sock, now_ns + LINK_PROOF_TIMEOUT_NS, ProofReader(self._find)))

    def _shed(self) -> None:
        """The oldest half-open connection gives way: a peer that means it proves itself at once."""
        if self._half_open:
            self._cut(self._half_open.pop(0).sock, Reason.OVERLOAD)

    def _read(self, half: _HalfOpen, now_ns: int) -> Reason | None:
        late = Reason.TIMEOUT if now_ns >= half.deadline_ns else None
        try:
            data = half.sock.recv(half.reader.missing)
        except BlockingIOError:
            return late
        except OSError:
            return Reason.LINK_ERROR
        if not data:
            return Reason.PEER_LOST
        reason = half.reader.take(data)
        # A whole proof found late was in time, since we look late ourselves; bytes that trickle in buy no time.
        return reason if half.reader.agreement is not None else reason or late

    def _cut(self, sock: socket.socket, reason: Reason) -> None:
        self._counters.add("links_cut_off")
        self._counters.refuse(reason)
        sock.close()

    def close(self) -> None:
        """Closes the port and everything half-open."""
        for half in self._half_open:
            half.sock.close()
        self._half_open.clear()
        self._sock.close()


class ProvingDialer(Generic[J]):
    """Connects `sock` to a data port, proves itself, waits for the peer's proof: `poll` until that, or a fault."""

    hint = ""  # what else an operator should know when it can't connect

    def __init__(self, agreement: Agreement, now_ns: int, sock: socket.socket) -> None:
        self._agreement = agreement
        self._deadline_ns = now_ns + LINK_PROOF_TIMEOUT_NS
        self._reader = ProofReader(lambda session: agreement if session == agreement.session else None)
        self._sent = False
        self._sock = sock

    def _connect(self, address: object) -> None:
        """Starts to connect; raises `PeerFault(link_error)` for what can't even be tried."""
        try:
            code = self._sock.connect_ex(address)  # type: ignore[arg-type]  # of the socket's family
        except (OSError, TypeError, UnicodeError) as error:  # no such name, or none that could be one
            self._fail(Reason.LINK_ERROR, f"can't connect to {self._agreement.data}: {error}")
        if code not in (0, errno.EINPROGRESS):
            self._fail(Reason.LINK_ERROR, f"can't connect to {self._agreement.data}: {os.strerror(code)}{self.hint}")

    def _receive(self, most: int) -> bytes:
        """Up to `most` bytes of the peer's proof, with whatever travels beside them. Raises `OSError`."""
        return self._sock.recv(most)

    def _join(self) -> J:
        """The proven connection, as its link needs it. Raises `PeerFault`."""
        raise NotImplementedError

    def fileno(self) -> int:
        """The connecting socket, for polling."""
        return self._sock.fileno()

    def poll(self, now_ns: int) -> J | None:
        """The proven connection, None while under way; raises `PeerFault` (`timeout`, `link_error`, `auth_failed`...)."""
        if now_ns >= self._deadline_ns:
            self._fail(Reason.TIMEOUT, f"no link proof from {self._agreement.data} within a second")
        if not self._sent and not self._send_proof():
            return None
        try:
            data = self._receive(self._reader.missing)
        except BlockingIOError:
            return None
        except OSError as error:
            self._fail(Reason.LINK_ERROR, error.strerror or "receive failed")
        if not data:
            self._fail(Reason.PEER_LOST, "the peer closed the link before its proof")
        reason = self._reader.take(data)
        if reason is not None:
            self._fail(reason, "the peer's link proof")
        return self._join() if self._reader.agreement is not None else None

    def _send_proof(self) -> bool:
        _, writable, _ = select.select([], [self._sock], [], 0)
        if not writable:
            return False
        code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            self._fail(Reason.LINK_ERROR, f"can't connect to {self._agreement.data}: {os.strerror(code)}")
        frame = proof_frame(self._agreement)
        try:
            sent = self._sock.send(frame)
        except OSError as error:
            self._fail(Reason.LINK_ERROR, f"the link took no proof: {error.strerror}")
        if sent != len(frame):
            self._fail(Reason.LINK_ERROR, "the link took no proof")
        self._sent = True
        return True

    def _fail(self, reason: Reason, detail: str) -> NoReturn:
        self.close()
        raise PeerFault(reason, detail)

    def close(self) -> None:
        """Gives the attempt up."""
        self._sock.close()
