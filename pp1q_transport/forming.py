"""How a session forms: HELLO over the control plane, the data port or the dial to it, and what the peer says besides.

Between the engine, which runs sessions and is told what happened (`Event`), and `control`, `negotiate` and the link's port. Knows
no frames and no slots. A connector whose attempt failed tries again with jittered backoff. SPEC section 2.
"""

from __future__ import annotations

import os
import random
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from ._native.net import POLLIN, wait_io
from .control import ControlConnector, ControlListener
from .control_codec import encode_message
from .errors import ConfigError, PeerFault, Reason, Refused
from .links.kinds import KINDS, Means
from .logs import named_logger
from .session.negotiate import (
    Agreement,
    Connector,
    Listener,
    goodbye_message,
    message_kind,
    parse_goodbye,
    parse_refuse,
    refuse_message,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence, Set

    from .counters import Counters
    from .keys import KeyConfig
    from .links.proving import Joined, ProvingDialer, ProvingPort
    from .links.rdma_config import RdmaConfig
    from .session.hello import Hello

BACKOFF_FIRST_NS: Final = 20_000_000
BACKOFF_MOST_NS: Final = 1_000_000_000
REFUSED_AGAIN_NS: Final = 30_000_000_000  # a peer that refused for what it is may have been set right by then
PENDING_AT_MOST: Final = 16


@dataclass(frozen=True, slots=True)
class Formed:
    """A proven connection, as the link of the agreed kind takes it, and what both sides agreed on."""

    joined: Joined
    agreement: Agreement


@dataclass(frozen=True, slots=True)
class Said:
    """A message of a session's peer: kind ("report", "options") and body, and in which seat it sits."""

    kind: str
    body: object
    seat: int = 0


@dataclass(frozen=True, slots=True)
class PeerGone:
    """The peer in a seat left the control plane, with a goodbye or without."""

    goodbye: bool
    seat: int = 0


Event = Formed | Said | PeerGone


class Forms(Protocol):
    """How an engine comes to its sessions: a `Forming` of its own, or a `seating.Seat` at one that several engines share."""

    @property
    def endpoint(self) -> str:
        """The control endpoint in use."""

    @property
    def descriptors_changed(self) -> tuple[int, int]:
        """Differs whenever `descriptors` does."""

    def descriptors(self) -> list[int]:
        """What to watch."""

    def poll(self, now_ns: int, busy: Set[int]) -> list[Event]:
        """See `Forming.poll`."""

    def wait(self, timeout_ns: int) -> None:
        """See `Forming.wait`."""

    def say(self, kind: str, body: Mapping[str, object]) -> None:
        """See `Forming.say`."""

    def goodbye(self) -> None:
        """See `Forming.goodbye`."""

    def back_off(self, now_ns: int) -> None:
        """See `Forming.back_off`."""

    def settled(self) -> None:
        """See `Forming.settled`."""

    def close(self) -> None:
        """See `Forming.close`."""


class Forming:
    """Forms sessions, listening (`listen`) or connecting (`connect`): one at a time, or, listening as the coordinator of a rank
    group or the leader of a draft, one for each other rank (its seat). For one thread."""

    def __init__(
        self,
        hello: Hello,
        listen: str | None,
        connect: str | None,
        keys: KeyConfig | None,
        counters: Counters,
        takes_options: bool,
        persistent: bool,
        backoff_seed: int | None,
        stubborn: bool = False,
        rdma: RdmaConfig | None = None,
        others: Sequence[Hello] = (),
        name: str = "",
    ) -> None:
        """`others`: HELLOs of further targets behind a draft leader's endpoint, told apart by target_identity. Their seats follow
        those of `hello`: that of a rank is its number plus group_size for each target before its own."""
        if (listen is None) == (connect is None):
            raise ConfigError("give exactly one of listen and connect")
        self.counters = counters
        self._hello = hello
        self._keys = keys
        self._connect_to = connect
        self._persistent = persistent
        self._stubborn = stubborn
        self._log = named_logger(hello.role.value, name)
        self._pending: dict[int, tuple[bytes, Agreement]] = {}
        # Who has which seat, also after its session; a connector has the listener in its only one.
        self._peers: dict[int, bytes] = {} if connect is None else {0: b""}
        self._gone: dict[int, bytes] = {}  # by seat, who left it; somebody else may have it by the time that is told
        self._seated = hello.role.seats_ranks
        self._first_seat = {each.target_identity: at * hello.group_size for at, each in enumerate((hello, *others))}
        self._connector: Connector | None = None
        self._kind = KINDS[hello.link_kinds[0]]
        self._means = Means(counters, self._kind.open_device(rdma))
        self._dialer: ProvingDialer[Joined] | None = None
        self._agreement: Agreement | None = None
        self._random = random.Random(backoff_seed)
        self._backoff_ns = BACKOFF_FIRST_NS
        self._retry_ns = 0
        self._complained: Reason | None = None
        self._port: ProvingPort[Joined] | None = None
        self._control: ControlListener | ControlConnector
        if listen is not None:
            self._control = self._listen_control(listen)
            address = self._control.address
            self._port = self._open_port(address.host if address.scheme == "tcp" else "127.0.0.1")
            self._listener = Listener(hello, self._port.endpoint, encode_message, os.urandom, takes_options, others)
        else:
            self._control = self._dial_control()

    def _open_port(self, host: str) -> ProvingPort[Joined]:
        try:
            return self._kind.open_port(host, self._find_pending, self._means)
        except ConfigError:
            self._control.close()
            self._means.close()
            raise

    def _listen_control(self, listen: str) -> ControlListener:
        try:
            return ControlListener(listen, self._keys, counters=self.counters)
        except ConfigError:
            self._means.close()
            raise

    def _dial_control(self) -> ControlConnector:
        """A control connection that ended is over; the next attempt needs a new one."""
        assert self._connect_to is not None
        return ControlConnector(self._connect_to, self._keys, counters=self.counters)

    @property
    def endpoint(self) -> str:
        """The control endpoint in use; a listener's actual port where port 0 was asked for."""
        return self._control.endpoint

    # ---- what the engine asks for -------------------------------------------------------------------------------

    def poll(self, now_ns: int, busy: Set[int]) -> list[Event]:
        """One pass without sleeping. `busy`: seats whose session runs, so that no other may form there (0 where nobody has a
        rank). Raises `Refused` when trying again can't help, and any `PeerFault` of an attempt when not persistent."""
        events: list[Event] = []
        for peer, message in self._receive(now_ns, busy, events):
            try:
                self._handle(peer, message, now_ns, busy, events)
            except Refused as refusal:
                self._refused(peer, refusal, now_ns)
            except PeerFault as fault:
                self.counters.refuse(fault.reason)
                self._log.warning("control_refused", reason=fault.reason.value, detail=fault.detail)
                if self._port is None and not busy and message.get("kind") in ("hello_ack", "refuse"):
                    self._failed(fault, now_ns)  # the answer that this attempt waited for: there will be no other
        if isinstance(self._control, ControlListener):
            for key, address in self._control.strangers().items():
                self._log.warning("key_refused", reason=Reason.AUTH_FAILED.value, public_key=key, address=address)
        if self._port is not None:
            self._expire_pending(now_ns)
            for joined, agreement in self._port.poll(now_ns):
                self._proven(joined, agreement, busy, events)
        elif not busy:
            self._attempt(now_ns, events)
        return events

    def wait(self, timeout_ns: int) -> None:
        """Sleeps until the control plane or a forming link has something, for at most `timeout_ns`."""
        other = -1
        if self._dialer is not None:
            other = self._dialer.fileno()
        elif self._port is not None:
            other = self._port.fileno()
        wait_io(self._control.fileno(), POLLIN, other, POLLIN, timeout_ns)

    @property
    def descriptors_changed(self) -> tuple[int, int]:
        """Differs whenever `descriptors` does: which control connection and which forming link there are."""
        return id(self._control), id(self._dialer)

    def descriptors(self) -> list[int]:
        """The file descriptors of the control plane and of a forming link: readable when `poll` has something to do."""
        waiting = [self._control.fileno()]
        if self._dialer is not None:
            waiting.append(self._dialer.fileno())
        if self._port is not None:
            waiting.append(self._port.fileno())
        return waiting

    def say(self, kind: str, body: Mapping[str, object], seat: int = 0) -> None:
        """Sends a "report" or "options" message to the peer in a seat."""
        self._control.send(self._peers.get(seat, b""), {"kind": kind, "body": dict(body)})

    def goodbye(self, seat: int = 0) -> None:
        """Tells the peer in a seat that this is an orderly end."""
        self._control.send(self._peers.get(seat, b""), goodbye_message(Reason.CANCELLED))

    def back_off(self, now_ns: int) -> None:
        """The next attempt waits, each time longer, with jitter: restarts don't come in step."""
        self._retry_ns = now_ns + int(self._backoff_ns * self._random.uniform(0.5, 1.5))
        self._backoff_ns = min(self._backoff_ns * 2, BACKOFF_MOST_NS)

    def settled(self) -> None:
        """A session runs: the next backoff starts small again."""
        self._complained = None
        self._backoff_ns = BACKOFF_FIRST_NS

    def close(self) -> None:
        """Closes every socket. Safe to repeat."""
        if self._dialer is not None:
            self._dialer.close()
            self._dialer = None
        if self._port is not None:
            self._port.close()
        self._control.close()
        self._means.close()

    # ---- messages -----------------------------------------------------------------------------------------------

    def _receive(self, now_ns: int, busy: Set[int], events: list[Event]) -> list[tuple[bytes, dict[str, object]]]:
        """Messages of the control plane; notices when a session's peer, or a connector's listener, is gone from it."""
        try:
            messages = self._control.receive()
        except PeerFault as fault:
            events.extend(PeerGone(goodbye=False, seat=seat) for seat in busy)
            self._failed(fault, now_ns)
            return []
        if isinstance(self._control, ControlListener):
            lost = self._control.lost()
            if lost:
                self._gone.update((seat, peer) for seat, peer in self._peers.items() if peer in lost)
        if self._gone and not messages:
            gone = [seat for seat, peer in self._gone.items() if seat in busy and self._peers[seat] == peer]
            events.extend(PeerGone(goodbye=False, seat=seat) for seat in gone)
            self._gone.clear()
        return messages

    def _seat_of(self, peer: bytes) -> int | None:
        return next((seat for seat, holder in self._peers.items() if holder == peer), None)

    def _handle(self, peer: bytes, message: Mapping[str, object], now_ns: int, busy: Set[int], events: list[Event]) -> None:
        kind = message.get("kind")
        if self._port is not None and kind == "refuse":
            self._log.info("refused_by_peer", detail=parse_refuse(message).detail)
        elif self._port is not None and kind not in ("goodbye", "keepalive", "report", "options"):
            self._answer_hello(peer, message, now_ns, busy)
        elif self._connector is not None and kind in ("hello_ack", "refuse"):
            self._agreement = self._connector.receive(message, now_ns)
            self._connector = None
            address = self._control.address
            host = address.host if address.scheme == "tcp" else "127.0.0.1"
            self._dialer = self._kind.dial(self._agreement, now_ns, host, self._means)
        else:
            kind = message_kind(message)
            seat = self._seat_of(peer)
            here = seat is not None and seat in busy
            left = not busy or (self._seated and seat is not None and not here)
            if kind == "keepalive" or (kind == "goodbye" and left):
                return  # the link of a peer that left said so already
            if seat is None or not here:
                raise PeerFault(Reason.UNEXPECTED_KIND, f"{kind} from a peer without a session")
            if kind == "goodbye":
                self._log.info("goodbye", reason=parse_goodbye(message).value)
                events.append(PeerGone(goodbye=True, seat=seat))
            else:
                events.append(Said(kind, message.get("body"), seat))

    def _answer_hello(self, peer: bytes, message: Mapping[str, object], now_ns: int, busy: Set[int]) -> None:
        answer, result = self._listener.receive(message, now_ns)
        if isinstance(result, Agreement) and self.seat_for(result) in busy:
            # Only one that would have been welcome is told to come again; another version or identity never will be.
            result = Refused(Reason.OVERLOAD, "session", "one peer at a time, and it is here", "a further HELLO")
            answer = refuse_message(result)
        self._control.send(peer, answer)
        if isinstance(result, PeerFault):
            self.counters.refuse(result.reason)
            self._log.warning("hello_refused", reason=result.reason.value, detail=result.detail)
            return
        while len(self._pending) >= PENDING_AT_MOST:
            self._pending.pop(next(iter(self._pending)))
        self._pending[result.session] = (peer, result)

    def _refused(self, peer: bytes, refusal: Refused, now_ns: int) -> None:
        """A HELLO of ours was refused, or we refuse theirs: only an overloaded listener is worth trying again."""
        self.counters.refuse(refusal.reason)
        self._connector = None
        if refusal.reason is Reason.OVERLOAD and self._persistent:
            self.back_off(now_ns)
            return
        self._control.send(peer, refuse_message(refusal))
        if self._stubborn:
            self._log.error("refused", reason=refusal.reason.value, detail=refusal.detail, again_s=REFUSED_AGAIN_NS // 10**9)
            self._retry_ns = now_ns + int(REFUSED_AGAIN_NS * self._random.uniform(0.5, 1.5))
            return
        raise refusal

    # ---- the listener's links -----------------------------------------------------------------------------------

    def _find_pending(self, session: int) -> Agreement | None:
        entry = self._pending.get(session)
        return entry[1] if entry is not None else None

    def _expire_pending(self, now_ns: int) -> None:
        assert self._port is not None
        late = [session for session, (_, agreement) in self._pending.items() if now_ns >= agreement.prove_by_ns]
        for session in late:
            if self._port.joins(session):
                continue
            del self._pending[session]
            self.counters.add("links_never_proven")

    def seat_for(self, agreement: Agreement) -> int:
        """The seat of a session: the rank of a group's member or draft's peer, see `others`; 0 where nobody has one."""
        return self._first_seat[agreement.ours.target_identity] + agreement.theirs.rank if self._seated else 0

    def _proven(self, joined: Joined, agreement: Agreement, busy: Set[int], events: list[Event]) -> None:
        """A proof came. One joins one link: a copy of it, found in the same look at the port, is cut off."""
        entry = self._pending.pop(agreement.session, None)
        seat = self.seat_for(agreement)
        formed = {self.seat_for(event.agreement) for event in events if isinstance(event, Formed)}
        if entry is None or seat in busy or seat in formed:
            joined.close()
            self.counters.add("links_cut_off")
            self.counters.refuse(Reason.SESSION_MISMATCH if entry is None else Reason.OVERLOAD)
            return
        self._peers[seat] = entry[0]
        events.append(Formed(joined, agreement))

    # ---- the connector's attempts -------------------------------------------------------------------------------

    def _attempt(self, now_ns: int, events: list[Event]) -> None:
        """The next move: say HELLO when the backoff is over, watch for the answer, dial the data port."""
        try:
            if self._dialer is not None:
                joined = self._dialer.poll(now_ns)
                if joined is not None:
                    self._dialer = None
                    assert self._agreement is not None
                    events.append(Formed(joined, self._agreement))
            elif self._connector is not None:
                self._connector.tick(now_ns)
            elif now_ns >= self._retry_ns:
                self._connector = Connector(self._hello, encode_message, os.urandom)
                self._control.send(b"", self._connector.start(now_ns))
        except PeerFault as fault:
            self.counters.refuse(fault.reason)
            self._failed(fault, now_ns)

    def _failed(self, fault: PeerFault, now_ns: int) -> None:
        """An attempt failed: try again later, or raise what trying again can't mend."""
        if self._dialer is not None:
            self._dialer.close()
        self._dialer = None
        self._connector = None
        # A peer that stays away is worth one line, not one every few seconds.
        log = self._log.debug if fault.reason is self._complained else self._log.warning
        log("no_session", reason=fault.reason.value, detail=fault.detail, endpoint=self.endpoint)
        self._complained = fault.reason
        if not self._persistent or (fault.reason is Reason.AUTH_FAILED and not self._stubborn):
            raise fault
        self._control.close()
        self._control = self._dial_control()
        self.back_off(now_ns)
