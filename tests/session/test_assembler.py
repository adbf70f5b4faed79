"""The assembler: whatever the splits of the stream, the same calls; failures stick; an abandoned payload lands nowhere."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport import wire
from pp1q_transport.errors import Reason
from pp1q_transport.session.assembler import DRAIN, LAND, LAND_AT_MOST, RING_BYTES, Assembler, FrameSink, Landing
from pp1q_transport.wire import Header

SLOT_BYTES = 40_000
SLOTS = 4


def frame(kind: int, number: int, payload: bytes = b"", slot: int = 0) -> bytes:
    """An encoded frame; `number` is its request."""
    header = Header()
    header.clear()
    header.kind = kind
    header.request = number
    header.slot = slot
    header.subject = header.status = 0
    for name in ("token", "draw_counter", "context", "first_id", "end_id", "shard_mass", "mass_before"):
        setattr(header, name, 0)
    header.payload_length = len(payload)
    raw = bytearray(wire.HEADER_BYTES)
    header.encode(raw, 0)
    return bytes(raw) + payload


class Recorder(FrameSink):
    """Lands REPLYs in `memory` by slot; drains those of slot 9; refuses CANCEL at its header and STATUS at its end."""

    def __init__(self) -> None:
        self.memory = bytearray(SLOTS * SLOT_BYTES)
        self.calls: list[tuple[object, ...]] = []
        self.landed = 0

    def accept(self, header: Header, landing: Landing, now_ns: int) -> int:
        self.calls.append(("accept", header.kind, header.request, header.payload_length))
        self.landed = 0
        if header.kind == wire.CANCEL:
            return -Reason.UNEXPECTED_KIND.code
        if header.slot == 9:
            return DRAIN
        if header.payload_length:
            landing.memory = self.memory
            landing.offset = header.slot * SLOT_BYTES
            landing.owner = header.slot
        return LAND

    def progress(self, header: Header, landed: int) -> None:
        assert self.landed <= landed <= header.payload_length, "progress must rise to the payload's length"
        assert landed - self.landed <= max(LAND_AT_MOST, RING_BYTES)
        self.landed = landed

    def finish(self, header: Header, now_ns: int) -> int:
        assert self.landed == header.payload_length
        at = header.slot * SLOT_BYTES
        self.calls.append(("finish", header.kind, header.request, bytes(self.memory[at : at + header.payload_length])))
        return -Reason.OVERLOAD.code if header.kind == wire.STATUS else 0


def feed(assembler: Assembler, data: bytes, sizes: list[int], start: int = 0) -> int:
    """Delivers `data` in receives of at most `sizes` bytes, in turn; the code of the first failure, or 0."""
    at, turn = 0, start
    while at < len(data):
        assembler.want()
        assert assembler.length > 0
        count = min(assembler.length, sizes[turn % len(sizes)], len(data) - at)
        memoryview(assembler.memory)[assembler.offset : assembler.offset + count] = data[at : at + count]
        at += count
        turn += 1
        code = assembler.received(count, 0)
        if code:
            return code
    return 0


def payload(number: int, length: int) -> bytes:
    return random.Random(number).randbytes(length)


MIXED = b"".join(
    (
        frame(wire.CLOSE, 1),
        frame(wire.REPLY, 2, payload(2, 1)),
        frame(wire.REPLY, 3, payload(3, 300), slot=1),
        frame(wire.CLOSE, 4),
        frame(wire.CLOSE, 5),
        frame(wire.REPLY, 6, payload(6, 777), slot=9),
        frame(wire.REPLY, 7, b"", slot=9),
        frame(wire.REPLY, 8, payload(8, 129), slot=3),
        frame(wire.REPLY, 9, b""),
    )
)
LONG = b"".join(frame(wire.REPLY, i, payload(i, size), slot=i % 4)
                for i, size in enumerate((0, RING_BYTES - 128, RING_BYTES, 127, 36_000, 5, 128, 39_999, 1)))  # fmt: skip


def calls_of(data: bytes, sizes: list[int]) -> list[tuple[object, ...]]:
    sink = Recorder()
    assembler = Assembler(sink)
    assert feed(assembler, data, sizes) == 0
    assert assembler.frames == sum(1 for call in sink.calls if call[0] == "accept")
    return sink.calls


def test_every_split_size_gives_the_same_calls() -> None:
    whole = calls_of(MIXED, [1 << 20])
    assert [call[2] for call in whole if call[0] == "finish"] == [1, 2, 3, 4, 5, 8, 9], "drained frames have no end"
    for size in range(1, len(MIXED) + 1):
        assert calls_of(MIXED, [size]) == whole, f"receives of {size} bytes"


@settings(max_examples=60, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 200), st.integers(1, 40_000)), min_size=1, max_size=12))
def test_random_splits_give_the_same_calls(sizes: list[int]) -> None:
    assert calls_of(MIXED, sizes) == calls_of(MIXED, [1 << 20])
    assert calls_of(LONG, [max(size, 30) for size in sizes]) == calls_of(LONG, [1 << 20])


@pytest.mark.parametrize(
    ("bad", "reason"),
    (
        (b"JUNK" + bytes(124), Reason.BAD_MAGIC),
        (frame(wire.CANCEL, 5), Reason.UNEXPECTED_KIND),
        (frame(wire.STATUS, 5), Reason.OVERLOAD),
        (frame(wire.CLOSE, 5)[:127] + b"\0", Reason.HEADER_DIGEST),
    ),
    ids=("format", "refused at the header", "refused at the end", "digest"),
)
@pytest.mark.parametrize("size", (1, 100, 1 << 20))
def test_a_failure_sticks(bad: bytes, reason: Reason, size: int) -> None:
    sink = Recorder()
    assembler = Assembler(sink)
    good = frame(wire.CLOSE, 1)
    assert feed(assembler, good + bad + good, [size]) == reason.code
    assert assembler.failed == reason.code
    calls = list(sink.calls)
    assert feed(assembler, good, [size]) == reason.code
    assert sink.calls == calls, "a failed assembler still calls its session"


@pytest.mark.parametrize("cut", (0, 1, 5000, 20_000, 29_999))
@pytest.mark.parametrize("size", (64, 4096, 1 << 20))
def test_an_abandoned_payload_lands_nowhere(cut: int, size: int) -> None:
    sink = Recorder()
    assembler = Assembler(sink)
    late = frame(wire.REPLY, 1, payload(1, 30_000), slot=2)
    assert feed(assembler, late[: 128 + cut], [size]) == 0
    assert not assembler.landing.abandon(1), "another slot is not landing"
    assert assembler.landing.abandon(2)
    assert not assembler.landing.abandon(2), "once is enough"
    held = bytes(sink.memory)
    assert feed(assembler, late[128 + cut :], [size]) == 0
    assert bytes(sink.memory) == held, "bytes landed behind the fence"
    assert assembler.drained_bytes == 30_000
    assert [call[0] for call in sink.calls] == ["accept"], "an abandoned frame has no end"
    after = frame(wire.REPLY, 2, payload(2, 500), slot=2)
    assert feed(assembler, after, [size]) == 0
    assert sink.calls[-1] == ("finish", wire.REPLY, 2, payload(2, 500))


def test_nothing_is_landing_between_frames() -> None:
    sink = Recorder()
    assembler = Assembler(sink)
    assert not assembler.landing.abandon(2)
    feed(assembler, frame(wire.REPLY, 1, payload(1, 300), slot=2), [77])
    assert not assembler.landing.abandon(2), "the frame is whole: nothing of it is under way"


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=400), st.integers(1, 130))
def test_arbitrary_bytes_end_in_one_reason_or_in_none(data: bytes, size: int) -> None:
    assembler = Assembler(Recorder())
    code = feed(assembler, data, [size])
    assert (code != 0) == (len(data) >= 128)
    if code:
        assert Reason.from_code(code) in (Reason.BAD_MAGIC, Reason.BAD_VERSION, Reason.UNKNOWN_KIND, Reason.HEADER_DIGEST)
