"""How a stream is cut into messages: rows alone, the rest in runs of whole frames, and no byte lost or moved whatever it is."""

from __future__ import annotations

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport import wire
from pp1q_transport.links.rdma_cutting import NO_SLOT, Cutter, frame_at
from pp1q_transport.links.rdma_window import LandingShape, LandingTargets
from pp1q_transport.session.outbox import NO_KEY, Outbox, Piece
from pp1q_transport.wire import Header

ROOM = 4584
TARGETS = LandingTargets(LandingShape(2, 4, 128 + 20_032), [(0, 1), (1 << 20, 2)])


def header(kind: int, length: int, slot: int = 0) -> Header:
    head = Header()
    head.clear()
    head.kind = kind
    head.slot = slot
    head.subject = head.status = head.token_count = 0
    head.payload_length = length
    return head


def first(outbox: Outbox, piece: Piece, count: int) -> bytes:
    """The first bytes of a piece."""
    head = min(count, piece.head_length)
    data = bytes(memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + head])
    return data + bytes(memoryview(piece.memory)[piece.offset : piece.offset + count - head])


def cut(outbox: Outbox, room: int = ROOM) -> list[tuple[int, bytes]]:
    """Every message of an outbox: (slot or -1, bytes)."""
    cutter, messages = Cutter(), []
    while (piece := outbox.front()) is not None:
        slot, length = cutter.cut(outbox.buffer, piece, room, TARGETS)
        assert length > 0
        assert slot >= 0 or length <= room
        messages.append((slot, first(outbox, piece, length)))
        if slot < 0:
            cutter.gone(length)
        outbox.sent(length)
    return messages


def kinds(messages: list[tuple[int, bytes]]) -> list[tuple[int, int]]:
    return [(slot, len(data)) for slot, data in messages]


def test_a_row_is_a_message_and_what_is_around_it_another() -> None:
    outbox = Outbox()
    outbox.frame(header(wire.CLOSE, 0), None, 0, 0, NO_KEY)
    outbox.frame(header(wire.CLOSE, 0), None, 0, 0, NO_KEY)
    outbox.frame(header(wire.REPLY, 256, 1), bytes(256), 0, 256, 1)
    outbox.frame(header(wire.REPLY, 256, 0), bytes(256), 0, 256, 0)
    outbox.frame(header(wire.COMPLETION, 0), None, 0, 0, NO_KEY)
    outbox.frame(header(wire.REPLY, 20_032, 1), bytes(20_032), 0, 20_032, 1)
    outbox.frame(header(wire.CLOSE, 0), None, 0, 0, NO_KEY)
    assert kinds(cut(outbox)) == [(NO_SLOT, 256), (1, 384), (0, 384), (NO_SLOT, 128), (1, 20_160), (NO_SLOT, 128)]


def test_rows_that_fit_no_landing_row_go_as_the_rest_does() -> None:
    outbox = Outbox()
    outbox.frame(header(wire.REPLY, 20_033, 1), bytes(20_033), 0, 20_033, 1)
    outbox.frame(header(wire.REPLY, 64, 2), bytes(64), 0, 64, 2)
    messages = cut(outbox)
    assert {slot for slot, _ in messages} == {NO_SLOT}
    assert sum(len(data) for _, data in messages) == 128 + 20_033 + 128 + 64


def test_whole_frames_share_a_message_as_long_as_they_fit() -> None:
    outbox = Outbox()
    for _ in range(50):
        outbox.frame(header(wire.CLOSE, 0), None, 0, 0, NO_KEY)
    assert kinds(cut(outbox)) == [(NO_SLOT, 35 * 128), (NO_SLOT, 15 * 128)]


def test_a_large_frame_of_another_kind_goes_in_parts_and_hides_no_row() -> None:
    """What looks like a row inside another frame's payload is not one."""
    inner = bytearray(128)
    header(wire.REPLY, 0).encode(inner, 0)
    payload = bytes(inner) * 100
    outbox = Outbox()
    head = header(wire.OPEN, len(payload))
    head.token_count = len(payload) // 4
    outbox.frame(head, payload, 0, len(payload), NO_KEY)
    outbox.frame(header(wire.REPLY, 4, 1), bytes(4), 0, 4, 1)
    messages = cut(outbox)
    assert [slot for slot, _ in messages] == [NO_SLOT] * (len(messages) - 1) + [1]
    assert len(messages[0][1]) == ROOM


def test_what_is_no_frame_goes_as_it_is() -> None:
    outbox = Outbox()
    outbox.raw(b"GET / HTTP/1.1\r\n".ljust(128), 0, 128)
    outbox.raw(bytes(30_000), 0, 30_000)
    outbox.raw(b"PP1Q", 0, 4)
    messages = cut(outbox)
    assert b"".join(data for _, data in messages) == b"GET / HTTP/1.1\r\n".ljust(128) + bytes(30_000) + b"PP1Q"
    assert frame_at(b"PP1Q", 0, 4) == (NO_SLOT, 0)


def test_a_row_that_was_queued_as_bytes_is_a_row() -> None:
    raw = bytearray(128 + 9000)
    header(wire.REPLY, 9000, 1).encode(raw, 0)
    outbox = Outbox()
    outbox.raw(raw, 0, len(raw))
    outbox.raw(raw, 0, 5000)  # cut short: no whole row
    assert kinds(cut(outbox)) == [(1, 9128), (NO_SLOT, ROOM), (NO_SLOT, 5000 - ROOM)]


@settings(max_examples=80)
@given(st.integers(0, 1 << 30), st.integers(1, 40), st.sampled_from((4584, 300, 129)))
def test_the_bytes_are_the_streams_in_order_whatever_they_are(seed: int, count: int, room: int) -> None:
    chance = random.Random(seed)
    outbox, sent = Outbox(), bytearray()
    for _ in range(count):
        size = chance.choice((0, 1, 64, 4000, 4096, 9000, 20_032, 20_040))
        body = chance.randbytes(size)
        if chance.random() < 0.3:
            noise = chance.choice((b"PP1Q", b"", b"PP1Q\x02\x04")) + body
            if noise:
                outbox.raw(noise, 0, len(noise))
                sent += noise
            continue
        kind = chance.choice((wire.REPLY, wire.REPLY, wire.CLOSE))
        head = header(kind, size if kind == wire.REPLY else 0, chance.randrange(3))
        raw = bytearray(128)
        head.encode(raw, 0)
        sent += raw
        outbox.frame(head, body, 0, head.payload_length, NO_KEY)
        sent += body[: head.payload_length]
    assert b"".join(data for _, data in cut(outbox, room)) == bytes(sent)
