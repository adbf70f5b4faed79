"""The engine: the one loop that joins a session, a link, the control plane and a clock, and re-forms what was lost.

Between the client API, which drives it from the caller's own thread, and the sans-IO machines below, which decide everything.
It starts no threads. When the link goes, the session ends; a new one is formed by HELLO, with jittered backoff. SPEC 2, 4.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass, replace
from enum import Enum
from typing import TYPE_CHECKING, Final, Protocol

import structlog

from . import wire
from ._native.kernels import monotonic_ns
from ._native.net import POLLIN, wait_io
from .control import ControlConnector, ControlListener
from .control_codec import encode_message
from .counters import Counters
from .errors import ConfigError, PeerFault, Reason, Refused
from .links.tcp import TcpLink
from .links.tcp_port import TcpDialer, TcpPort
from .session.negotiate import Agreement, Connector, Listener, Role, goodbye_message, message_kind, refuse_message
from .session.terms import SessionTerms

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Mapping

    from .keys import KeyConfig
    from .session.assembler import FrameSink
    from .session.hello import Hello
    from .session.outbox import Outbox

CONTROL_EVERY_NS: Final = 20_000_000
SPIN_TRIES: Final = 2_000
BLOCK_AT_MOST_NS: Final = 50_000_000
BACKOFF_FIRST_NS: Final = 20_000_000
BACKOFF_MOST_NS: Final = 1_000_000_000
PENDING_AT_MOST: Final = 16


class Idle(str, Enum):
    """What a waiting engine does: burn its core, or sleep in the kernel."""

    SPIN = "spin"
    BLOCK = "block"


class Phase(str, Enum):
    """Where the engine stands between no peer and a running session."""

    DOWN = "down"
    HELLO = "hello"
    LINKING = "linking"
    UP = "up"
    CLOSED = "closed"


class Session(Protocol):
    """What the engine needs of either session machine."""

    terms: SessionTerms
    outbox: Outbox
    news: list[tuple[str, Reason, int, int]]
    broken: int
    peer_status: int  # the code of the reason with which the peer said it ends the link


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How one engine reaches its peer. Exactly one of `listen` and `connect` names the control endpoint."""

    hello: Hello
    listen: str | None = None
    connect: str | None = None
    keys: KeyConfig | None = None
    idle: Idle = Idle.BLOCK
    takes_options: bool = False  # a listener that adopts the proposer's sizes within its own maxima
    wait_for_peer: bool = True  # after a loss: wait for a new session, or raise `PeerFault`
    backoff_seed: int | None = None
    wrap_outbox: Callable[[Outbox], OutboxFilter] | None = None  # a fault injector between session and link

    def __post_init__(self) -> None:
        if (self.listen is None) == (self.connect is None):
            raise ConfigError("give exactly one of listen and connect")


class OutboxFilter(Protocol):
    """Something that takes frames out of a session's outbox and puts bytes into its own `outbox` for the link."""

    outbox: Outbox

    def pump(self, now_ns: int) -> int | None:
        """Moves what may move now; returns the time in ns at which more will be due, or None."""


def new_boot_nonce() -> int:
    """A random non-zero u64 that names this process life."""
    return int.from_bytes(os.urandom(8), "little") or 1


class Engine:
    """One side of one session at a time. `make_session` builds the role's state machine from the terms of a new session;
    `on_up` and `on_down` let the owner react. All methods are for one thread."""

    def __init__(
        self,
        config: EngineConfig,
        make_session: Callable[[SessionTerms], FrameSink],
        on_up: Callable[[], None],
        on_down: Callable[[Reason], None],
        counters: Counters | None = None,
    ) -> None:
        self.config = config
        self.counters = counters or Counters()
        self.phase = Phase.DOWN
        self.session: Session | None = None
        self.sink: FrameSink | None = None
        self.link: TcpLink | None = None
        self.agreement: Agreement | None = None
        self.inbox: list[tuple[str, object]] = []  # control messages for the owner: (kind, body)
        self.log = structlog.get_logger("pp1q").bind(role=config.hello.role.value)
        self._make_session = make_session
        self._on_up = on_up
        self._on_down = on_down
        self._filter: OutboxFilter | None = None
        self._filter_due_ns: int | None = None
        self._pending: dict[int, tuple[bytes, Agreement]] = {}
        self._peer: bytes = b""
        self._gone_peer: bytes = b""
        self._connector: Connector | None = None
        self._dialer: TcpDialer | None = None
        self._random = random.Random(config.backoff_seed)
        self._backoff_ns = BACKOFF_FIRST_NS
        self._retry_ns = 0
        self._control_ns = 0
        self._control: ControlListener | ControlConnector
        self._port: TcpPort | None = None
        self._open_control()

    def _open_control(self) -> None:
        config = self.config
        if config.listen is not None:
            self._control = ControlListener(config.listen, config.keys, counters=self.counters)
            address = self._control.address
            host = address.host if address.scheme == "tcp" else "127.0.0.1"
            self._port = TcpPort(host, 0, self._find_pending, self.counters)
            self._listener = Listener(
                config.hello, self._port.endpoint, encode_message, os.urandom, takes_options=config.takes_options
            )
        else:
            self._control = self._dial_control()

    def _dial_control(self) -> ControlConnector:
        """A control connection that ended is over; the next attempt needs a new one."""
        assert self.config.connect is not None
        return ControlConnector(self.config.connect, self.config.keys, counters=self.counters)

    @property
    def endpoint(self) -> str:
        """The control endpoint in use; a listener's actual port where port 0 was asked for."""
        return self._control.endpoint

    @property
    def closed(self) -> bool:
        """Whether the engine has ended for good."""
        return self.phase is Phase.CLOSED

    # ---- the loop -----------------------------------------------------------------------------------------------

    def poll(self) -> int:
        """One pass without sleeping: link, budget, control. Returns how many bytes the link moved."""
        if self.closed:
            return 0
        now_ns = monotonic_ns()
        moved = 0
        if self.link is not None:
            moved = self._pump(now_ns)
        if now_ns >= self._control_ns and not self.closed:
            self._control_ns = now_ns + (CONTROL_EVERY_NS if self.phase is Phase.UP else 1_000_000)
            self._poll_control(now_ns)
        return moved

    def wait(self, timeout_ns: int = BLOCK_AT_MOST_NS) -> None:
        """Idles until something may have happened, by the configured strategy, for at most `timeout_ns`."""
        if self.phase is Phase.CLOSED:
            return
        if self.link is None:
            self._wait_unlinked(min(timeout_ns, 5_000_000))
            return
        if self.config.idle is Idle.SPIN:
            if self._filter is None:
                moved = self.link.pump_until(SPIN_TRIES)
                if moved < 0:
                    self._down(Reason.from_code(-moved))
            return
        if self._filter_due_ns is not None:
            timeout_ns = max(0, min(timeout_ns, self._filter_due_ns - monotonic_ns()))
        self.link.wait(min(timeout_ns, CONTROL_EVERY_NS), -1)

    def _wait_unlinked(self, timeout_ns: int) -> None:
        wait_io(self._control.fileno(), POLLIN, self._data_fd(), POLLIN, timeout_ns)
        self._control_ns = 0

    def _data_fd(self) -> int:
        if self._dialer is not None:
            return self._dialer.fileno()
        return self._port.fileno() if self._port is not None else -1

    def flush(self) -> None:
        """Sends what is queued, as far as the kernel takes it now."""
        if self.link is not None:
            self._pump(monotonic_ns())

    def _pump(self, now_ns: int) -> int:
        link, session = self.link, self.session
        assert link is not None
        assert session is not None
        if self._filter is not None:
            self._filter_due_ns = self._filter.pump(now_ns)
        try:
            moved = link.pump(now_ns)
        except PeerFault as fault:
            self._down(fault.reason)
            return 0
        if moved < 0:
            self._down(Reason.from_code(-moved))
            return 0
        if session.broken:
            self._down(Reason.from_code(session.broken))
            return moved
        if session.news:
            self._report_news(session)
        return moved

    def _report_news(self, session: Session) -> None:
        for event, reason, slot, generation in session.news:
            self.log.info(event, reason=reason.value, slot=slot, generation=generation)
        session.news.clear()

    # ---- control plane ------------------------------------------------------------------------------------------

    def _poll_control(self, now_ns: int) -> None:
        for peer, message in self._receive_control(now_ns):
            try:
                self._handle(peer, message, now_ns)
            except Refused as refusal:
                self._refused(peer, refusal, now_ns)
            except PeerFault as fault:
                self.counters.refuse(fault.reason)
                self.log.warning("control_refused", reason=fault.reason.value, detail=fault.detail)
        if self._port is not None:
            self._expire_pending(now_ns)
            for sock, agreement in self._port.poll(now_ns):
                self._link_proven(sock, agreement)
        elif self.phase is not Phase.UP:
            self._connect(now_ns)

    def _receive_control(self, now_ns: int) -> list[tuple[bytes, dict[str, object]]]:
        """Messages of the control plane; notices when the session's peer, or a connector's listener, is gone from it."""
        try:
            messages = self._control.receive()
        except PeerFault as fault:
            self._pump_rest()
            self._down(Reason.PEER_LOST)
            self._no_session(fault, now_ns)
            return []
        if isinstance(self._control, ControlListener) and self._peer in self._control.lost():
            self._gone_peer = self._peer
        if self._gone_peer and not messages:
            self._gone_peer = b""
            self._pump_rest()
            self._down(Reason.PEER_LOST)
        return messages

    def _no_session(self, fault: PeerFault, now_ns: int) -> None:
        """A connector's attempt failed: try again later, or raise what trying again can't mend."""
        if self._dialer is not None:
            self._dialer.close()
        self._dialer = None
        self._connector = None
        self.phase = Phase.DOWN
        self.log.warning("no_session", reason=fault.reason.value, detail=fault.detail)
        if not self.config.wait_for_peer or fault.reason is Reason.AUTH_FAILED:
            raise fault
        self._control.close()
        self._control = self._dial_control()
        self._back_off(now_ns)

    def _handle(self, peer: bytes, message: Mapping[str, object], now_ns: int) -> None:
        kind = message.get("kind")
        if self._port is not None and kind not in ("goodbye", "keepalive", "report", "options"):
            self._answer_hello(peer, message, now_ns)
        elif self._connector is not None and kind in ("hello_ack", "refuse"):
            self.agreement = self._connector.receive(message, now_ns)
            self._connector = None
            self._dialer = TcpDialer(self.agreement, now_ns)
            self.phase = Phase.LINKING
        else:
            kind = message_kind(message)
            if kind == "goodbye" and self.phase is not Phase.UP:
                return  # its link said so already
            if peer != self._peer or self.phase is not Phase.UP:
                raise PeerFault(Reason.UNEXPECTED_KIND, f"{kind} from a peer without a session")
            if kind == "goodbye":
                self._pump_rest()
                self._down(Reason.PEER_LOST, goodbye=True)
            elif kind in ("report", "options"):
                self.inbox.append((kind, message["body"]))

    def _pump_rest(self) -> None:
        """Takes in what the peer sent before its goodbye."""
        while self.link is not None and self._pump(monotonic_ns()) > 0:
            pass

    def _answer_hello(self, peer: bytes, message: Mapping[str, object], now_ns: int) -> None:
        if self.link is not None:
            self._pump(now_ns)  # a peer that comes back may be the one whose end we have not read yet
        if self.phase is Phase.UP and message.get("kind") == "hello":
            busy = Refused(Reason.OVERLOAD, "session", "one peer at a time, and it is here", "a further HELLO")
            self.counters.refuse(Reason.OVERLOAD)
            self._control.send(peer, refuse_message(busy))
            return
        answer, result = self._listener.receive(message, now_ns)
        self._control.send(peer, answer)
        if isinstance(result, PeerFault):
            self.counters.refuse(result.reason)
            self.log.warning("hello_refused", reason=result.reason.value, detail=result.detail)
            return
        while len(self._pending) >= PENDING_AT_MOST:
            self._pending.pop(next(iter(self._pending)))
        self._pending[result.session] = (peer, result)

    def _refused(self, peer: bytes, refusal: Refused, now_ns: int) -> None:
        """A HELLO of ours was refused, or we refuse theirs: only an overloaded listener is worth trying again."""
        self.counters.refuse(refusal.reason)
        self._connector = None
        self.phase = Phase.DOWN
        if refusal.reason is Reason.OVERLOAD and self.config.wait_for_peer:
            self._back_off(now_ns)
            return
        self._control.send(peer, refuse_message(refusal))
        raise refusal

    def _find_pending(self, session: int) -> Agreement | None:
        entry = self._pending.get(session)
        return entry[1] if entry is not None else None

    def _expire_pending(self, now_ns: int) -> None:
        late = [session for session, (_, agreement) in self._pending.items() if now_ns >= agreement.prove_by_ns]
        for session in late:
            del self._pending[session]
            self.counters.add("links_never_proven")

    def _connect(self, now_ns: int) -> None:
        """The connector's next move: say HELLO when the backoff is over, watch the answer, dial the data port."""
        try:
            if self._dialer is not None:
                sock = self._dialer.poll(now_ns)
                if sock is not None:
                    self._dialer = None
                    assert self.agreement is not None
                    self._up(sock, self.agreement)
            elif self._connector is not None:
                self._connector.tick(now_ns)
            elif now_ns >= self._retry_ns:
                self._connector = Connector(self.config.hello, encode_message, os.urandom)
                self._control.send(b"", self._connector.start(now_ns))
                self.phase = Phase.HELLO
        except PeerFault as fault:
            self.counters.refuse(fault.reason)
            self._no_session(fault, now_ns)

    def _back_off(self, now_ns: int) -> None:
        self._retry_ns = now_ns + int(self._backoff_ns * self._random.uniform(0.5, 1.5))
        self._backoff_ns = min(self._backoff_ns * 2, BACKOFF_MOST_NS)

    # ---- sessions -----------------------------------------------------------------------------------------------

    def _link_proven(self, sock: socket.socket, agreement: Agreement) -> None:
        peer, _ = self._pending.pop(agreement.session)
        if self.phase is Phase.UP:
            sock.close()
            self.counters.refuse(Reason.OVERLOAD)
            return
        self._peer = peer
        self._up(sock, agreement)

    def _up(self, sock: socket.socket, agreement: Agreement) -> None:
        self.agreement = agreement
        terms = terms_of(agreement)
        self.sink = self._make_session(terms)
        self.session = self.sink  # type: ignore[assignment]
        assert self.session is not None
        outbox = self.session.outbox
        if self.config.wrap_outbox is not None:
            self._filter = self.config.wrap_outbox(outbox)
            outbox = self._filter.outbox
        self.link = TcpLink(sock, self.sink, outbox)
        self.phase = Phase.UP
        self._backoff_ns = BACKOFF_FIRST_NS
        self.counters.add("sessions")
        self.log.info("session_up", session=terms.session, **self.link.describe())
        self._on_up()

    def _down(self, reason: Reason, goodbye: bool = False) -> None:
        """The session ends: its link is closed (so nothing can land any more) before its slots are settled."""
        link, session = self.link, self.session
        if link is None or session is None:
            return
        if reason is not Reason.PEER_LOST:
            self._tell(link, session, reason)
        elif session.peer_status == Reason.CANCELLED.code:
            goodbye = True
        link.close()
        self.link = None
        self._filter = None
        self._filter_due_ns = None
        self.phase = Phase.DOWN
        self.counters.refuse(reason)
        self.counters.add("sessions_ended")
        log = self.log.info if goodbye else self.log.warning
        said = Reason.from_code(session.peer_status).value if session.peer_status else None
        log("session_down", reason=reason.value, goodbye=goodbye, peer_said=said, error_number=link.error_number)
        self._on_down(reason)
        self._report_news(session)
        self.session = None
        self.sink = None
        self._back_off(monotonic_ns())
        if not self.config.wait_for_peer:
            if not goodbye:
                raise PeerFault(reason, "the link is gone")
            self.close()

    def _tell(self, link: TcpLink, session: Session, reason: Reason) -> None:
        """Best effort: a STATUS names the reason to the peer before the link closes."""
        header = wire.Header()
        header.clear()
        header.kind = wire.STATUS
        header.boot_nonce = self.config.hello.boot_nonce
        header.session = session.terms.session
        header.subject = 0
        header.status = reason.code
        frame = bytearray(wire.HEADER_BYTES)
        header.encode(frame, 0)
        if link.outbox.empty():
            try:
                link.sock.send(frame)
            except OSError as error:
                self.log.debug("status_not_sent", error=error.strerror)

    def end_session(self) -> None:
        """Ends the running session, if there is one, and stays ready for another."""
        if self.link is not None:
            self._control.send(self._peer, goodbye_message(Reason.CANCELLED))
            self._down(Reason.CANCELLED, goodbye=True)

    def send_control(self, kind: str, body: Mapping[str, object]) -> None:
        """Sends a `report` or `options` message to the session's peer."""
        self._control.send(self._peer, {"kind": kind, "body": dict(body)})

    def close(self) -> None:
        """Orderly end: goodbye, link closed, ports released. Safe to repeat."""
        if self.phase is Phase.CLOSED:
            return
        if self.link is not None:
            for _ in range(1000):
                if self.link.outbox.empty() or self._pump(monotonic_ns()) < 0 or self.link is None:
                    break
                self.link.wait(1_000_000, -1)
            if self.link is not None:
                self._control.send(self._peer, goodbye_message(Reason.CANCELLED))
                self.config = replace(self.config, wait_for_peer=True)
                self._down(Reason.CANCELLED, goodbye=True)
        self.phase = Phase.CLOSED
        if self._dialer is not None:
            self._dialer.close()
        if self._port is not None:
            self._port.close()
        self._control.close()


def terms_of(agreement: Agreement) -> SessionTerms:
    """The numbers of an agreement that both session machines run by."""
    ours, theirs = agreement.ours, agreement.theirs
    leader, receiver = (ours, theirs) if ours.role is Role.LEADER else (theirs, ours)
    return SessionTerms(
        session=agreement.session,
        leader_nonce=leader.boot_nonce,
        receiver_nonce=receiver.boot_nonce,
        vocab_size=ours.vocab_size,
        depth=ours.depth,
        support=ours.support,
        max_slots=ours.max_slots,
        dense="dense" in ours.representations,
        sparse="sparse" in ours.representations,
        draw_proof=ours.draw_proof,
        max_context_tokens=ours.max_context_tokens,
    )


__all__ = ["Engine", "EngineConfig", "Idle", "OutboxFilter", "Phase", "new_boot_nonce", "terms_of"]
