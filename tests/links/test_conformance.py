"""What every link must do, whatever moves its bytes. One suite, instantiated for each kind.

A kind joins by one more factory in `FACTORIES`: a function that returns a `Pair` of joined, proven ends. Nothing here knows how
a link works, only what `links.Link` promises.
"""

from __future__ import annotations

import mmap
import os
import random
import socket
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from played_verbs import PlayedDevice

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.errors import ConfigError, Reason
from pp1q_transport.links import Link
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.links.rdma_config import AUTO, RdmaConfig
from pp1q_transport.links.rdma_connection import RdmaConnection
from pp1q_transport.links.rdma_device import Device
from pp1q_transport.links.rdma_verbs import device_names
from pp1q_transport.links.rdma_window import shape_for
from pp1q_transport.links.shm import ShmLink
from pp1q_transport.links.shm_memory import DIALER, LISTENER, ShmEnds, create_memory, map_memory
from pp1q_transport.links.sim import sim_pair
from pp1q_transport.links.tcp import TcpLink
from pp1q_transport.session.assembler import DRAIN, LAND, FrameSink, Landing
from pp1q_transport.session.outbox import NO_KEY, Outbox
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(60)

SLOT_BYTES = 1 << 22
SLOTS = 2


class Sink(FrameSink):
    """Lands payloads by slot, keeps (request, payload) of whole frames, refuses CANCELs, drains what `dead` names."""

    def __init__(self) -> None:
        self.memory = memoryview(mmap.mmap(-1, SLOTS * SLOT_BYTES))  # a page costs nothing before it is used
        self.frames: list[tuple[int, bytes]] = []
        self.accepted = 0
        self.dead: set[int] = set()

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        self.accepted += 1
        if header.kind == wire.CANCEL:
            return -Reason.UNEXPECTED_KIND.code
        if header.request in self.dead:
            return DRAIN
        if header.payload_length:
            landing.memory = self.memory
            landing.offset = header.slot * SLOT_BYTES
            landing.owner = header.slot
        return LAND

    def progress(self, header: Header, landed: int) -> None:
        assert landed <= header.payload_length

    def finish(self, header: Header, now_ns: int) -> int:
        at = header.slot * SLOT_BYTES
        self.frames.append((header.request, bytes(self.memory[at : at + header.payload_length])))
        return 0


@dataclass
class End:
    """One end: a link with its sink and outbox."""

    link: Link
    sink: Any
    outbox: Outbox

    def frame(self, number: int, payload: bytes = b"", slot: int = 0, kind: int = wire.REPLY) -> bytes:
        """Queues a frame; returns its bytes."""
        header, raw = encoded(number, payload, slot, kind)
        self.outbox.frame(header, payload, 0, len(payload), NO_KEY)
        return raw

    def raw(self, data: bytes) -> None:
        """Queues bytes as they are."""
        if data:
            self.outbox.raw(data, 0, len(data))


def encoded(number: int, payload: bytes, slot: int = 0, kind: int = wire.REPLY) -> tuple[Header, bytes]:
    """A header and the whole frame's bytes; `number` is its request."""
    header = Header()
    header.clear()
    header.kind = kind
    header.request = number
    header.slot = slot
    header.subject = header.status = 0
    header.payload_length = len(payload)
    raw = bytearray(wire.HEADER_BYTES)
    header.encode(raw, 0)
    return header, bytes(raw) + payload


@dataclass
class Pair:
    """Two joined ends. `bounded`: a link whose sender is held up by a reader that does not read."""

    left: End
    right: End
    bounded: bool


def make_sim(right_sink: FrameSink | None = None) -> Pair:
    sinks, boxes = (Sink(), right_sink or Sink()), (Outbox(), Outbox())
    left, right = sim_pair(sinks[0], boxes[0], sinks[1], boxes[1], seed=3, largest=50_000)
    return Pair(End(left, sinks[0], boxes[0]), End(right, sinks[1], boxes[1]), bounded=False)


def make_tcp(right_sink: FrameSink | None = None) -> Pair:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        near = socket.socket()
        near.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    sinks, boxes = (Sink(), right_sink or Sink()), (Outbox(), Outbox())
    left, right = TcpLink(near, sinks[0], boxes[0]), TcpLink(far, sinks[1], boxes[1])
    return Pair(End(left, sinks[0], boxes[0]), End(right, sinks[1], boxes[1]), bounded=True)


def make_shm(right_sink: FrameSink | None = None, ring_bytes: int = 1 << 16) -> Pair:
    near, far = socket.socketpair()
    fd = create_memory(ring_bytes)
    sinks, boxes = (Sink(), right_sink or Sink()), (Outbox(), Outbox())
    left = ShmLink(ShmEnds(near, map_memory(fd), LISTENER), sinks[0], boxes[0])
    right = ShmLink(ShmEnds(far, map_memory(fd), DIALER), sinks[1], boxes[1])
    os.close(fd)
    return Pair(End(left, sinks[0], boxes[0]), End(right, sinks[1], boxes[1]), bounded=True)


def make_rdma(right_sink: FrameSink | None = None) -> Pair:
    """Both ends in this process, over the first device."""
    try:
        device = Device(RdmaConfig(device=next(iter(device_names()), AUTO), queue_depth=16))
    except ConfigError as error:
        pytest.skip(f"no rdma here: {error}")
    return join_over(device, right_sink)


def make_played(right_sink: FrameSink | None = None) -> Pair:
    """The rdma link over verbs that are played: its own logic, where there is no device. No proof that a real one works."""
    return join_over(PlayedDevice(queue_depth=16), right_sink)


def join_over(device: Any, right_sink: FrameSink | None = None, right_device: Any = None) -> Pair:
    """Two rdma links over one device; two rows a slot, so that senders meet rows that are still in use."""
    near, far = socket.socketpair()
    shape = shape_for(SLOTS, 2, 1 << 17)  # what is larger goes in parts
    ends = [RdmaConnection(near, device, shape, Counters()), RdmaConnection(far, right_device or device, shape, Counters())]
    for end in ends:
        end.begin(0)
    while not all(end.up for end in ends):
        for end in ends:
            if not end.up:
                end.poll(time.monotonic_ns())
    sinks, boxes = (Sink(), right_sink or Sink()), (Outbox(), Outbox())
    left, right = (RdmaLink(end, sink, box) for end, sink, box in zip(ends, sinks, boxes, strict=True))
    return Pair(End(left, sinks[0], boxes[0]), End(right, sinks[1], boxes[1]), bounded=True)


# Each takes the sink of its right end, a `Sink` of this file by default.
FACTORIES: dict[str, Callable[..., Pair]] = {
    "sim": make_sim, "tcp": make_tcp, "shm": make_shm, "rdma": make_rdma, "rdma played": make_played
}  # fmt: skip


@pytest.fixture(params=tuple(FACTORIES))
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    made = FACTORIES[request.param]()
    assert made.left.link.kind == made.right.link.kind == request.param.split()[0]
    yield made
    made.left.link.close()
    made.right.link.close()


def until(done: Callable[[], bool], *ends: End) -> None:
    """Pumps `ends` in turn until `done`; every pump must go well. The test's own timeout bounds it."""
    while not done():
        moved = 0
        for end in ends:
            result = end.link.pump(0)
            assert result >= 0, Reason.from_code(-result)
            moved += result
        if not moved and not done():
            time.sleep(0.0002)


def grant(pair: Pair) -> None:
    """The right end says something and the left one hears it, as a STEP comes before any row for a slot that was fenced."""
    heard = len(pair.left.sink.frames)
    pair.right.frame(900 + heard, kind=wire.CLOSE)
    until(lambda: len(pair.left.sink.frames) > heard, pair.right, pair.left)


def ending(end: End) -> Reason:
    """Pumps until the link has ended, and says why."""
    while (result := end.link.pump(0)) >= 0:
        if not result:
            time.sleep(0.0002)
    return Reason.from_code(-result)


def noise(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


SIZES = (0, 1, 127, 128, 4095, 4096, 4097, 16_384, 65_536, 262_145, 1_000_003, SLOT_BYTES, 0, 3)


def test_a_mixed_stream_arrives_whole_and_in_order_both_ways(pair: Pair) -> None:
    sent: dict[str, list[tuple[int, bytes]]] = {"left": [], "right": []}
    for number, size in enumerate(SIZES):
        for name, end in (("left", pair.left), ("right", pair.right)):
            payload = noise(number, size)
            end.frame(number, payload, slot=number % SLOTS)
            sent[name].append((number, payload))
            if number % 3 == 0:
                end.frame(1000 + number, kind=wire.CLOSE)
                sent[name].append((1000 + number, b""))
    until(lambda: len(pair.right.sink.frames) == len(sent["left"]) and len(pair.left.sink.frames) == len(sent["right"]),
          pair.left, pair.right)  # fmt: skip
    assert pair.right.sink.frames == sent["left"]
    assert pair.left.sink.frames == sent["right"]
    assert pair.left.outbox.empty()
    assert pair.right.outbox.empty()


@pytest.mark.parametrize("size", (0, 64, 4096, 1 << 20))
def test_a_thousand_bytes_or_a_megabyte_round_trips(pair: Pair, size: int) -> None:
    for number in range(10):
        payload = noise(number, size)
        pair.left.frame(number, payload)
        until(lambda n=number: len(pair.right.sink.frames) == n + 1, pair.left, pair.right)  # type: ignore[misc]
        pair.right.frame(number, payload[::-1])
        until(lambda n=number: len(pair.left.sink.frames) == n + 1, pair.left, pair.right)  # type: ignore[misc]
        assert pair.right.sink.frames[-1] == (number, payload)
        assert pair.left.sink.frames[-1] == (number, payload[::-1])


def test_a_closed_peer_is_lost_after_all_it_sent(pair: Pair) -> None:
    payload = noise(1, 20_000)
    pair.left.frame(1, payload)
    pair.left.frame(2, kind=wire.CLOSE)
    until(pair.left.outbox.empty, pair.left)
    pair.left.link.close()
    assert ending(pair.right) is Reason.PEER_LOST
    assert pair.right.sink.frames == [(1, payload), (2, b"")]
    assert pair.right.link.pump(0) == -Reason.PEER_LOST.code, "and stays lost"


def test_a_peer_that_dies_within_a_payload_is_lost_and_the_frame_never_ends(pair: Pair) -> None:
    raw = encoded(1, noise(1, 20_000))[1]
    pair.left.raw(raw[:9000])
    until(pair.left.outbox.empty, pair.left)
    pair.left.link.close()
    assert ending(pair.right) is Reason.PEER_LOST
    assert pair.right.sink.frames == []
    assert pair.right.sink.accepted == 1


def test_a_peer_that_closes_without_reading_is_lost(pair: Pair) -> None:
    """Unread bytes at the closing end: the other end must learn of it as a lost peer, sending or receiving."""
    pair.right.frame(1, noise(1, 5000))
    until(pair.right.outbox.empty, pair.right)
    pair.left.link.close()
    pair.right.frame(2, noise(2, 1 << 20))
    assert ending(pair.right) is Reason.PEER_LOST


@pytest.mark.parametrize("cut", (128, 129, 5000, 99_999))
def test_nothing_lands_behind_a_fence(pair: Pair, cut: int) -> None:
    """The fence comes with part of a payload landed and part of it on the way; what follows is undisturbed."""
    raw = encoded(1, noise(1, 200_000), slot=1)[1]
    pair.left.raw(raw[:cut])
    until(lambda: pair.right.sink.accepted == 1, pair.left, pair.right)
    for _ in range(50):
        pair.right.link.pump(0)
    assert pair.right.link.fence(0) is False, "another slot is not landing"
    assert pair.right.link.fence(1) is True
    assert pair.right.link.fence(1) is False, "once is enough"
    held = bytes(pair.right.sink.memory)
    grant(pair)
    pair.left.raw(raw[cut:])
    pair.left.frame(2, noise(2, 3000))
    until(lambda: len(pair.right.sink.frames) == 1, pair.left, pair.right)
    assert pair.right.sink.frames == [(2, noise(2, 3000))], "the fenced frame must not end"
    slot = slice(SLOT_BYTES, 2 * SLOT_BYTES)
    assert pair.right.sink.memory[slot] == held[slot], "bytes landed behind the fence"


def test_a_fence_without_anything_landing_is_harmless(pair: Pair) -> None:
    assert pair.right.link.fence(0) is False
    grant(pair)
    pair.left.frame(1, noise(1, 5000))
    until(lambda: len(pair.right.sink.frames) == 1, pair.left, pair.right)
    assert pair.right.link.fence(0) is False
    grant(pair)
    pair.left.frame(2, noise(2, 5000))
    until(lambda: len(pair.right.sink.frames) == 2, pair.left, pair.right)


def test_a_drained_payload_lands_nowhere(pair: Pair) -> None:
    pair.right.sink.dead = {1}
    pair.left.frame(1, noise(1, 300_000))
    pair.left.frame(2, kind=wire.CLOSE)
    until(lambda: pair.right.sink.frames == [(2, b"")], pair.left, pair.right)
    assert not any(pair.right.sink.memory)


@pytest.mark.parametrize(
    ("bad", "reason"),
    ((b"GET / HTTP/1.1\r\n".ljust(128), Reason.BAD_MAGIC), (encoded(7, b"", 0, wire.CANCEL)[1], Reason.UNEXPECTED_KIND)),
    ids=("garbage", "refused frame"),
)
def test_a_fatal_code_sticks(pair: Pair, bad: bytes, reason: Reason) -> None:
    pair.left.frame(1, kind=wire.CLOSE)
    pair.left.raw(bad)
    pair.left.frame(2, kind=wire.CLOSE)
    until(pair.left.outbox.empty, pair.left)
    assert ending(pair.right) is reason
    for _ in range(3):
        assert pair.right.link.pump(0) == -reason.code
    assert pair.right.sink.frames == [(1, b"")], "a frame behind the fault was taken"


def test_a_slow_reader_loses_nothing(pair: Pair) -> None:
    """More than any buffer holds, and nobody reads for a while: the sender is held up, not broken."""
    sent = [(number, noise(number, 1 << 20)) for number in range(12)]
    for number, payload in sent:
        pair.left.frame(number, payload)
    for _ in range(200):
        assert pair.left.link.pump(0) >= 0
    if pair.bounded:
        assert not pair.left.outbox.empty(), "the kernel took 12 MiB that nobody read"
    pair.right.frame(99, kind=wire.CLOSE)
    until(lambda: len(pair.right.sink.frames) == len(sent) and len(pair.left.sink.frames) == 1, pair.right, pair.left)
    assert pair.right.sink.frames == sent
    assert pair.left.outbox.empty()


def test_both_ends_may_flood_at_once(pair: Pair) -> None:
    for number in range(6):
        pair.left.frame(number, noise(number, 1 << 20))
        pair.right.frame(number, noise(number + 50, 1 << 20))
    until(lambda: len(pair.right.sink.frames) == 6 and len(pair.left.sink.frames) == 6, pair.left, pair.right)
    assert pair.right.sink.frames == [(n, noise(n, 1 << 20)) for n in range(6)]
    assert pair.left.sink.frames == [(n, noise(n + 50, 1 << 20)) for n in range(6)]


def test_idle_links_move_nothing_and_waits_return(pair: Pair) -> None:
    assert pair.left.link.pump(0) == 0
    assert pair.left.link.pump_until(3) == 0
    pair.left.link.wait(0, -1)
    pair.left.link.wait(1_000_000, -1)
    pair.right.frame(1, kind=wire.CLOSE)
    until(pair.right.outbox.empty, pair.right)
    pair.left.link.wait(10_000_000_000, -1)
    until(lambda: pair.left.sink.frames == [(1, b"")], pair.left)


def test_pump_until_stops_at_the_first_bytes(pair: Pair) -> None:
    pair.right.frame(1, kind=wire.CLOSE)
    until(pair.right.outbox.empty, pair.right)
    moved = 0
    while moved == 0:
        moved = pair.left.link.pump_until(1000)
    assert moved == 128


def test_close_is_idempotent_and_final(pair: Pair) -> None:
    pair.left.link.close()
    pair.left.link.close()
    code = pair.left.link.pump(0)
    assert code < 0
    pair.left.link.close()
    assert pair.left.link.pump(0) == code
    assert ending(pair.right) is Reason.PEER_LOST
    pair.right.link.close()
    assert pair.right.link.pump(0) == -Reason.PEER_LOST.code, "a close does not rewrite why the link ended"


def test_a_link_says_what_it_is(pair: Pair) -> None:
    for end in (pair.left, pair.right):
        assert end.link.describe()["link"] == end.link.kind
