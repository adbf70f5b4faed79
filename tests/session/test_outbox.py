"""The outbox's ring against a plain list of frames: what goes out is what was queued, in order, less what was withdrawn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport import wire
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.session.outbox import COPY_BELOW, NO_KEY, Outbox
from pp1q_transport.wire import HEADER_BYTES, Header

CAPACITY = 2048


class Oracle:
    """Frames as they must leave: [bytes, key, may be withdrawn]."""

    def __init__(self) -> None:
        self.frames: list[tuple[bytes, int, bool]] = []
        self.sent_of_first = 0

    def take(self, count: int) -> bytes:
        """The next `count` bytes of the stream."""
        out = b""
        while count:
            first = self.frames[0][0]
            part = first[self.sent_of_first : self.sent_of_first + count]
            out += part
            count -= len(part)
            self.sent_of_first += len(part)
            if self.sent_of_first == len(first):
                self.frames.pop(0)
                self.sent_of_first = 0
        return out

    def withdraw(self, key: int) -> int:
        kept = [f for i, f in enumerate(self.frames) if f[1] != key or not f[2] or (i == 0 and self.sent_of_first)]
        gone = len(self.frames) - len(kept)
        self.frames = kept
        return gone

    @property
    def size(self) -> int:
        """Bytes that are still to go."""
        return sum(len(frame[0]) for frame in self.frames) - self.sent_of_first


def front_bytes(outbox: Outbox, count: int) -> bytes:
    """The first `count` bytes of the front piece, as a link would send them."""
    piece = outbox.front()
    assert piece is not None
    head = bytes(memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length])
    rest = bytes(memoryview(piece.memory)[piece.offset : piece.offset + piece.length])
    return (head + rest)[:count]


def header_for(number: int, length: int) -> tuple[Header, bytes]:
    """A REPLY header of that many payload bytes, and its encoding."""
    header = Header()
    header.clear()
    header.kind = wire.REPLY
    header.request = number
    header.payload_length = length
    raw = bytearray(HEADER_BYTES)
    header.encode(raw, 0)
    return header, bytes(raw)


OPERATIONS = st.lists(
    st.one_of(
        st.tuples(st.just("frame"), st.sampled_from((0, 1, 60, 300, 900, COPY_BELOW - 1)), st.integers(-1, 2)),
        st.tuples(st.just("frame"), st.sampled_from((COPY_BELOW, COPY_BELOW + 1, 9000)), st.integers(-1, 2)),
        st.tuples(st.just("raw"), st.sampled_from((1, 130, 700, COPY_BELOW, COPY_BELOW + 1)), st.just(0)),
        st.tuples(st.just("sent"), st.integers(1, 4000), st.just(0)),
        st.tuples(st.just("drain"), st.just(0), st.just(0)),
        st.tuples(st.just("withdraw"), st.just(0), st.integers(0, 2)),
    ),
    max_size=80,
)


def send(outbox: Outbox, oracle: Oracle, most: int) -> int:
    """Sends up to `most` bytes of the front piece at both."""
    piece = outbox.front()
    if piece is None:
        assert oracle.size == 0
        return 0
    count = min(most, piece.head_length + piece.length)
    data = front_bytes(outbox, count)
    assert data == oracle.take(count)
    outbox.sent(count)
    return count


def queue(outbox: Outbox, oracle: Oracle, what: str, number: int, length: int, key: int) -> None:
    """Queues one frame at both, or neither when the ring is full."""
    before = (outbox.bytes_queued, len(outbox.pieces) - outbox.first)
    payload = bytes((number + i) & 0xFF for i in range(length))
    header, raw = header_for(number, length)
    refused: Reason | None = None
    try:
        if what == "raw":
            outbox.raw(payload, 0, length)
        else:
            outbox.frame(header, payload, 0, length, key)
    except PeerFault as fault:
        refused = fault.reason
    if refused is None:
        oracle.frames.append((payload, NO_KEY, False) if what == "raw" else (raw + payload, key, length >= COPY_BELOW))
        return
    assert refused is Reason.OVERLOAD
    assert (outbox.bytes_queued, len(outbox.pieces) - outbox.first) == before, "a refused frame left something behind"
    copied = HEADER_BYTES + (length if length < COPY_BELOW else 0) if what == "frame" else length
    assert not outbox.empty() or copied > CAPACITY, "an empty outbox refused what fits"


@settings(max_examples=150, deadline=None)
@given(OPERATIONS)
def test_what_goes_out_is_what_was_queued(operations: list[tuple[str, int, int]]) -> None:
    outbox, oracle = Outbox(CAPACITY), Oracle()
    for number, (what, size, key) in enumerate(operations):
        if what == "sent":
            send(outbox, oracle, size)
        elif what == "drain":
            while send(outbox, oracle, 1 << 20):
                pass
        elif what == "withdraw":
            assert outbox.withdraw(key) == oracle.withdraw(key)
        else:
            queue(outbox, oracle, what, number, size, key)
        assert outbox.bytes_queued == oracle.size
        assert outbox.empty() == (oracle.size == 0)
    while send(outbox, oracle, 1 << 20):
        pass
    assert oracle.frames == []


def test_the_ring_wraps_many_times() -> None:
    outbox, oracle = Outbox(CAPACITY), Oracle()
    for number in range(400):
        queue(outbox, oracle, "frame", number, (number * 37) % 300, NO_KEY)
        queue(outbox, oracle, "frame", number, 0, NO_KEY)
        send(outbox, oracle, 131)
        while oracle.size > CAPACITY // 2:
            send(outbox, oracle, 977)
    assert outbox.frames == 800, "nothing overflowed"


def test_overflow_is_the_peers_overload_and_the_stream_stays_whole() -> None:
    outbox, oracle = Outbox(CAPACITY), Oracle()
    for number in range(CAPACITY // HEADER_BYTES):
        queue(outbox, oracle, "frame", number, 0, NO_KEY)
    with pytest.raises(PeerFault) as raised:
        outbox.frame(header_for(99, 0)[0], None, 0, 0, NO_KEY)
    assert raised.value.reason is Reason.OVERLOAD
    while send(outbox, oracle, 500):
        pass
    queue(outbox, oracle, "frame", 7, 100, NO_KEY)
    assert not outbox.empty()


def test_a_started_frame_goes_out_whole() -> None:
    outbox, oracle = Outbox(CAPACITY), Oracle()
    for number in range(3):
        queue(outbox, oracle, "frame", number, COPY_BELOW, 5)
    send(outbox, oracle, 1)
    assert outbox.withdraw(5) == 2
    assert oracle.withdraw(5) == 2
    while send(outbox, oracle, 1000):
        pass
    assert oracle.frames == []
    assert outbox.withdraw(5) == 0


def test_a_large_payload_stays_where_it_is() -> None:
    outbox = Outbox(CAPACITY)
    payload = bytearray(COPY_BELOW)
    outbox.frame(header_for(1, len(payload))[0], payload, 0, len(payload), 1)
    payload[7] = 9
    assert front_bytes(outbox, 1 << 20)[HEADER_BYTES + 7] == 9, "it was copied"
    small = bytearray(64)
    other = Outbox(CAPACITY)
    other.frame(header_for(1, 64)[0], small, 0, 64, 1)
    small[7] = 9
    assert front_bytes(other, 1 << 20)[HEADER_BYTES + 7] == 0, "it was not copied"
