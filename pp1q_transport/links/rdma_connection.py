"""One rdma connection: the proven socket, the memory, and the queue pair that both ends make, and make again after an error.

Between `rdma_port`, which makes it from a proven connection, `rdma`, which moves frames through it, and the device. What the ends
must tell each other to join queue pairs (`rdma_records`) goes over the socket, which also tells of a death. Looks at no frame.
"""

from __future__ import annotations

import select
import socket
from enum import Enum
from typing import TYPE_CHECKING, Final

import numpy as np

from .._native.kernels import monotonic_ns
from ..errors import ConfigError, PeerFault, Reason
from .rdma_config import MTUS
from .rdma_device import roce_of
from .rdma_records import Join, RecordReader, encode_join, encode_ready
from .rdma_verbs import SharedMemory
from .rdma_window import ACKNOWLEDGEMENTS, LandingShape

if TYPE_CHECKING:
    from ..counters import Counters
    from ..memory import ReadMemory
    from .rdma_device import Device, MemoryRegion, QueuePair

JOIN_WITHIN_NS: Final = 5_000_000_000
STAGED_AT_MOST: Final = 8  # regions of payload memory registered at a time: a session has one
HEADS_BYTES: Final = 16  # an acknowledgement
NO_LANDING: Final = LandingShape(0, 0, 0)


class Phase(Enum):
    """Where the present queue pair stands."""

    JOINING = "joining"  # ours is told, the peer's is not here
    CONNECTED = "connected"  # ours is joined with the peer's, which has not said so of its own
    UP = "up"
    FAILED = "failed"  # what was posted is coming back; then the next one is made


class RdmaConnection:
    """Owns `sock`, a protection domain and what is registered in it. `shape`: the landing memory that we offer the peer.

    Two memories that no peer can write: `work` (receive buffers first, then a send buffer for every message on the way, then
    acknowledgements), and whatever payload memory `staged` is asked for. One that it can: `landing`, with a key for each slot.
    """

    def __init__(self, sock: socket.socket, device: Device, shape: LandingShape, counters: Counters) -> None:
        sock.setblocking(False)
        config = device.config
        self.sock = sock
        self.device = device
        self.shape = shape
        self.counters = counters
        self.phase = Phase.JOINING
        self.gone = False
        self.life = -1
        self.limit = config.queue_depth
        self.buffer_bytes = config.receive_bytes
        self.receives = config.queue_depth + ACKNOWLEDGEMENTS
        self.peer: Join | None = None
        self._first_peer: Join | None = None
        self._next_peer: Join | None = None
        self._ours: Join | None = None
        self._pair: QueuePair | None = None
        self._reader = RecordReader()
        self._unsent = bytearray()
        self._staged: dict[tuple[int, int], tuple[MemoryRegion, int]] = {}
        self._deadline_ns = 0
        self._poller: select.epoll | None = None
        self.domain = device.domain()
        try:
            self.gid = device.gid(_host_of(sock))
            self._map()
            self._poller = select.epoll()
            self._poller.register(sock.fileno(), select.EPOLLIN)
            self._poller.register(self.domain.fd, select.EPOLLIN)
        except (ConfigError, OSError):
            self.close()
            raise

    def _map(self) -> None:
        domain, size, started_ns = self.domain, self.buffer_bytes, monotonic_ns()
        self.sends_at = self.receives * size
        self.heads_at = self.sends_at + self.limit * size
        self.work = SharedMemory(self.heads_at + ACKNOWLEDGEMENTS * HEADS_BYTES)
        self.work_key = domain.register(self.work.address, self.work.size, self.work, writable=True).lkey
        self.landing = SharedMemory(self.shape.total_bytes)
        self._slots = [self._register_slot(slot) for slot in range(self.shape.slots)]
        self.register_ms = (monotonic_ns() - started_ns) / 1e6

    def _register_slot(self, slot: int) -> MemoryRegion:
        address = self.landing.address + self.shape.offset(slot, 0)
        return self.domain.register(address, self.shape.slot_bytes, self.landing, writable=True, remote=True)

    @property
    def pair(self) -> QueuePair:
        """The present queue pair."""
        assert self._pair is not None
        return self._pair

    @property
    def up(self) -> bool:
        """Whether frames can move."""
        return self.phase is Phase.UP

    def fileno(self) -> int:
        """Readable when the socket or the queue pair has something."""
        return self._poller.fileno() if self._poller is not None else -1

    # ---- making a queue pair ------------------------------------------------------------------------------------

    def begin(self, taken: int) -> None:
        """Makes the next queue pair, with its receives posted, and tells the peer. `taken`: messages taken so far (u32)."""
        if self._pair is not None:
            self._pair.close()
        self.life += 1
        self._pair = pair = self.domain.queue_pair(
            self.receives, 2 * (self.limit + ACKNOWLEDGEMENTS), self.shape.slots > 0
        )
        for number in range(self.receives):
            self.post_receive(number)
        version, family = roce_of(self.gid, self.device.port.ethernet)
        self._ours = Join(
            self.life, pair.number, pair.psn, self.gid.raw, self.device.port.lid, MTUS.index(self.device.mtu) + 1,
            self.device.port.ethernet, version, family, self.limit, self.buffer_bytes, taken, self.shape,
            tuple((region.address, region.rkey) for region in self._slots),
        )  # fmt: skip
        self.phase = Phase.JOINING
        self._deadline_ns = monotonic_ns() + JOIN_WITHIN_NS
        self._say(encode_join(self._ours))
        if self._next_peer is not None:
            theirs, self._next_peer = self._next_peer, None
            self._connect(theirs)

    def post_receive(self, number: int) -> None:
        """Receive buffer `number` is free again."""
        size = self.buffer_bytes
        self.pair.post_receive(number, self.work.address + number * size, size, self.work_key)

    def _connect(self, theirs: Join) -> None:
        ours = self._ours
        assert ours is not None
        self._judge(theirs, ours)
        self.pair.connect(ours, theirs, self.gid.index)
        self.peer = theirs
        self._first_peer = self._first_peer or theirs
        self.phase = Phase.CONNECTED
        self._say(encode_ready(self.life))

    def _judge(self, theirs: Join, ours: Join) -> None:
        """What two ends must have in common, and what a peer may not change from one queue pair to the next."""
        if theirs.life != self.life:
            raise PeerFault(Reason.LINK_ERROR, f"the peer's queue pair is number {theirs.life}, ours {self.life}")
        for what in ("ethernet", "roce_version", "family"):
            if getattr(theirs, what) != getattr(ours, what):
                raise PeerFault(
                    Reason.LINK_ERROR,
                    f"the ports can't reach each other: {what} {getattr(ours, what)} here, {getattr(theirs, what)} there; "
                    "set gid_index on both",
                )
        first = self._first_peer
        if first is None:
            return
        if (first.shape, first.gid, first.receive_bytes) != (theirs.shape, theirs.gid, theirs.receive_bytes):
            raise PeerFault(Reason.LINK_ERROR, "the peer's landing memory changed within a link")

    def poll(self, now_ns: int) -> None:
        """Says and hears what the socket has. Raises `PeerFault`: `timeout` for a peer that does not join, `peer_lost` for one
        that leaves while it should."""
        self._flush()
        self._read()
        if self.phase in (Phase.JOINING, Phase.CONNECTED):
            if self.gone:
                raise PeerFault(Reason.PEER_LOST, "the peer left before the queue pairs were joined")
            if now_ns >= self._deadline_ns:
                seconds = JOIN_WITHIN_NS // 10**9
                raise PeerFault(Reason.TIMEOUT, f"no queue pair from the peer in {seconds} s ({self.phase.value})")

    def _read(self) -> None:
        while not self.gone:
            try:
                data = self.sock.recv(self._reader.missing)
            except BlockingIOError:
                return
            except OSError:  # reset: the same to us as an end
                data = b""
            if not data:
                self.gone = True
                return
            record = self._reader.take(data)
            if isinstance(record, Join):
                self._joins(record)
            elif record is not None:
                self._is_ready(record)

    def _joins(self, theirs: Join) -> None:
        if self.phase is Phase.JOINING:
            self._connect(theirs)
        elif self.phase is Phase.CONNECTED or self._next_peer is not None:
            raise PeerFault(Reason.LINK_ERROR, f"a second queue pair of number {theirs.life}")
        else:  # it met an error: ours is over as well
            self._next_peer = theirs
            self.fail()

    def _is_ready(self, life: int) -> None:
        if self.phase is not Phase.CONNECTED or life != self.life:
            raise PeerFault(Reason.LINK_ERROR, f"ready with queue pair {life}, while ours, {self.life}, is {self.phase.value}")
        self.phase = Phase.UP

    def fail(self) -> None:
        """The present queue pair is over: stops it, so that all its receives come back. `begin` makes the next one."""
        if self.phase is not Phase.FAILED:
            self.phase = Phase.FAILED
            self._deadline_ns = monotonic_ns() + JOIN_WITHIN_NS
            self.pair.fail()

    def overdue(self, now_ns: int) -> bool:
        """Whether the present step of making a queue pair takes too long."""
        return now_ns >= self._deadline_ns

    def _say(self, data: bytes) -> None:
        self._unsent += data
        self._flush()

    def _flush(self) -> None:
        while self._unsent and not self.gone:
            try:
                sent = self.sock.send(self._unsent)
            except BlockingIOError:
                return
            except OSError:
                self.gone = True
                return
            del self._unsent[:sent]

    # ---- memory -------------------------------------------------------------------------------------------------

    def fence(self, slot: int) -> int:
        """Revokes the key of a landing slot, and returns its new one. Raises `PeerFault` when the old one may still work; then
        the queue pair is stopped, through which alone it could be used."""
        try:
            self.domain.revoke(self._slots[slot])
            self._slots[slot] = self._register_slot(slot)
        except (PeerFault, ConfigError) as error:
            self.fail()
            raise PeerFault(Reason.LINK_ERROR, f"landing slot {slot} could not be fenced: {error}") from None
        self.counters.add("landing_fenced")
        return self._slots[slot].rkey

    def staged(self, memory: ReadMemory, number: int, taken: int) -> MemoryRegion | None:
        """The registration of a payload's whole memory, made when it is first seen. `number`: the message that will use it, which
        keeps it until the peer has taken that. None while all `STAGED_AT_MOST` are in use."""
        bytes_of = np.frombuffer(memory, np.uint8)
        place = (bytes_of.__array_interface__["data"][0], bytes_of.nbytes)
        held = self._staged.get(place)
        if held is None:
            if len(self._staged) >= STAGED_AT_MOST and not self._unstage(taken):
                return None
            started_ns = monotonic_ns()
            held = (self.domain.register(place[0], place[1], bytes_of), number)
            self.register_ms += (monotonic_ns() - started_ns) / 1e6
        self._staged[place] = (held[0], number)
        return held[0]

    def _unstage(self, taken: int) -> bool:
        for place, (region, number) in list(self._staged.items()):
            if number < taken:
                self.domain.revoke(region)
                del self._staged[place]
                return True
        return False

    # ---- the end ------------------------------------------------------------------------------------------------

    def describe(self) -> dict[str, object]:
        """What runs, as logs and reports print it."""
        config, peer = self.device.config, self.peer
        mtu = min(peer.mtu if peer is not None else 5, MTUS.index(self.device.mtu) + 1)
        return {
            **self.device.describe(),
            "gid": self.gid.gid,
            "gid_index": self.gid.index,
            "gid_kind": self.gid.kind,
            "mtu": MTUS[mtu - 1],
            "peer_gid": peer.gid.hex(":", 2) if peer is not None else "",
            "queue_pair": self._pair.number if self._pair is not None else 0,
            "peer_queue_pair": peer.number if peer is not None else 0,
            "queue_pairs_made": self.life + 1,
            "queue_depth": min(self.limit, peer.queue_depth) if peer is not None else self.limit,
            "message_bytes": min(self.buffer_bytes, peer.receive_bytes) if peer is not None else self.buffer_bytes,
            "inline_bytes": self._pair.inline_bytes if self._pair is not None else 0,
            "timeout": config.timeout,
            "retry_count": config.retry_count,
            "rnr_retry": config.rnr_retry,
            "traffic_class": config.traffic_class,
            "landing_slots": self.shape.slots,
            "landing_bytes": self.shape.total_bytes,
            "staged_bytes": sum(region.length for region, _number in self._staged.values()),
            "register_ms": round(self.register_ms, 3),
        }

    def close(self) -> None:
        """Frees everything, the queue pair first, so that nothing can land any more. Safe to repeat."""
        if self._pair is not None:
            self._pair.close()
        self.domain.close()
        if self._poller is not None:
            self._poller.close()
            self._poller = None
        self.sock.close()


def open_connection(sock: socket.socket, device: Device, shape: LandingShape, counters: Counters) -> RdmaConnection:
    """A connection over a proven socket whose first queue pair is told to the peer. Raises `ConfigError` or `OSError` and leaves
    nothing open."""
    connection = RdmaConnection(sock, device, shape, counters)
    try:
        connection.begin(0)
    except (ConfigError, OSError):
        connection.close()
        raise
    return connection


def _host_of(sock: socket.socket) -> str:
    """Our own address on a connection; "" where it has none (a Unix socket, or one that was reset)."""
    try:
        name = sock.getsockname()
    except OSError:
        return ""
    return str(name[0]) if isinstance(name, tuple) else ""
