"""The bytes of an rdma link that are no frames: what goes in comes out, and whatever else comes in is refused by name."""

from __future__ import annotations

import contextlib
import struct
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links.rdma_records import (
    HEAD_BYTES,
    JOIN_BYTES_AT_MOST,
    KEYS_AT_MOST,
    Join,
    RecordReader,
    decode_head,
    encode_head,
    encode_join,
    encode_ready,
)
from pp1q_transport.links.rdma_window import MAX_ROWS, MAX_SLOTS, LandingShape

PLAIN = Join(
    life=0, number=17, psn=0xFFFFFF, gid=bytes(range(16)), lid=0, mtu=3, ethernet=True, roce_version=2, family=4, queue_depth=64,
    receive_bytes=8192, taken=0xFFFFFFFF, shape=LandingShape(2, 5, 1472), places=((1 << 40, 7), (1 << 41, 0xFFFFFFFF)),
)  # fmt: skip


def read(data: bytes, piece: int = 1 << 20) -> list[Join | int]:
    """All records of some bytes, never taking more than the reader asks for."""
    reader, found, at = RecordReader(), [], 0
    while at < len(data):
        most = min(reader.missing, piece)
        assert most > 0
        record = reader.take(data[at : at + most])
        at += most
        if record is not None:
            found.append(record)
    return found


@pytest.mark.parametrize("piece", (1, 7, 1 << 20))
def test_records_come_out_as_they_went_in(piece: int) -> None:
    second = replace(PLAIN, life=1, ethernet=False, roce_version=0, family=0, shape=LandingShape(0, 0, 0), places=())
    data = encode_join(PLAIN) + encode_ready(0) + encode_join(second) + encode_ready(0xFFFFFFFF)
    assert read(data, piece) == [PLAIN, 0, second, 0xFFFFFFFF]


def test_the_largest_join_fits_its_bound() -> None:
    join = replace(PLAIN, shape=LandingShape(MAX_SLOTS, MAX_ROWS, 64), places=((4096, 1),) * MAX_SLOTS)
    data = encode_join(join)
    assert len(data) == 8 + JOIN_BYTES_AT_MOST
    assert read(data) == [join]


@pytest.mark.parametrize(
    ("changes", "named"),
    (
        ({"number": 0}, "queue pair"),
        ({"number": 1 << 24}, "queue pair"),
        ({"psn": 1 << 24}, "PSN"),
        ({"mtu": 0}, "MTU"),
        ({"mtu": 6}, "MTU"),
        ({"roce_version": 3}, "RoCE"),
        ({"family": 7}, "family"),
        ({"queue_depth": 7}, "depth"),
        ({"queue_depth": 4097}, "depth"),
        ({"receive_bytes": 4607}, "receive"),
        ({"receive_bytes": 65537}, "receive"),
        ({"shape": LandingShape(2, 33, 64)}, "rows"),
        ({"shape": LandingShape(2, 5, 65)}, "landing"),
        ({"shape": LandingShape(2, 0, 64)}, "landing"),
        ({"shape": LandingShape(2, 5, 0)}, "landing"),
        ({"shape": LandingShape(2, 5, (1 << 28) + 64)}, "row"),
        ({"shape": LandingShape(1, 5, 64)}, "1 slots"),
        ({"shape": LandingShape(3, 5, 64)}, "3 slots"),
        ({"places": ((0, 1), ((1 << 64) - 4096, 1))}, "end of memory"),
    ),
)
def test_a_join_beyond_its_bounds_is_refused(changes: dict[str, object], named: str) -> None:
    with pytest.raises(PeerFault, match=named) as caught:
        read(encode_join(replace(PLAIN, **changes)))  # type: ignore[arg-type]
    assert caught.value.reason is Reason.LENGTH_BOUNDS


@pytest.mark.parametrize(
    ("data", "reason"),
    (
        (struct.pack("<HHI", 1, 2, 4), Reason.BAD_VERSION),
        (struct.pack("<HHI", 3, 1, 4), Reason.UNKNOWN_KIND),
        (struct.pack("<HHI", 0, 1, 4), Reason.UNKNOWN_KIND),
        (struct.pack("<HHI", 1, 1, JOIN_BYTES_AT_MOST + 1), Reason.LENGTH_BOUNDS),
        (struct.pack("<HHI", 1, 1, 0xFFFFFFFF), Reason.LENGTH_BOUNDS),
        (struct.pack("<HHI", 2, 1, 3) + b"abc", Reason.LENGTH_BOUNDS),
        (struct.pack("<HHI", 2, 1, 5), Reason.LENGTH_BOUNDS),
        (struct.pack("<HHI", 1, 1, 8) + bytes(8), Reason.LENGTH_BOUNDS),
        (struct.pack("<HHI", 1, 1, 0), Reason.LENGTH_BOUNDS),
    ),
)
def test_what_is_no_record_is_refused_by_its_envelope(data: bytes, reason: Reason) -> None:
    with pytest.raises(PeerFault) as caught:
        read(data)
    assert caught.value.reason is reason


def test_reserved_fields_of_a_join_are_checked() -> None:
    data = bytearray(encode_join(PLAIN))
    for at in [index for index in range(8, 8 + 60) if data[index] == 0]:
        spoiled = data.copy()
        spoiled[at] = 1
        try:
            found = read(bytes(spoiled))
        except PeerFault:
            continue
        assert found != [PLAIN], f"byte {at} means nothing"


@given(st.binary(max_size=400))
def test_any_bytes_are_records_or_a_fault_and_nothing_else(data: bytes) -> None:
    with contextlib.suppress(PeerFault):
        read(data)


@given(st.integers(0, len(encode_join(PLAIN)) - 1), st.integers(0, 255))
def test_one_wrong_byte_of_a_join_raises_nothing_else(at: int, value: int) -> None:
    data = bytearray(encode_join(PLAIN))
    data[at] = value
    with contextlib.suppress(PeerFault):
        read(bytes(data))


KEYS = st.lists(st.tuples(st.integers(0, 0xFFFF), st.integers(0, 0xFFFFFFFF)), max_size=KEYS_AT_MOST)


@given(st.integers(0, 0xFFFFFFFF), st.integers(0, 0xFFFFFFFF), st.booleans(), KEYS, st.binary(max_size=64))
def test_heads_come_out_as_they_went_in(number: int, taken: int, asks: bool, keys: list[tuple[int, int]], rest: bytes) -> None:
    data = encode_head(number, taken, True, asks, keys) + rest
    head = decode_head(data)
    assert (head.number, head.taken, head.counted, head.asks, head.keys) == (number, taken, True, asks, keys)
    assert data[head.start :] == rest


def test_an_acknowledgement_carries_its_report_and_nothing_else() -> None:
    plain = encode_head(0, 9, False, False, [])
    assert len(plain) == HEAD_BYTES
    head = decode_head(plain)
    assert (head.taken, head.counted) == (9, False)
    for wrong in (plain + b"x", encode_head(1, 9, False, False, []), encode_head(0, 9, False, True, []),
                  encode_head(0, 9, False, False, [(1, 1)])):  # fmt: skip
        with pytest.raises(PeerFault):
            decode_head(wrong)


@pytest.mark.parametrize(
    ("data", "reason"),
    (
        (b"", Reason.LENGTH_BOUNDS),
        (bytes(HEAD_BYTES - 1), Reason.LENGTH_BOUNDS),
        (struct.pack("<IIHHI", 0, 0, 0, 4, 0), Reason.UNKNOWN_FLAG),
        (struct.pack("<IIHHI", 0, 0, 0, 1, 1), Reason.RESERVED_BITS),
        (struct.pack("<IIHHI", 0, 0, 1, 1, 0), Reason.LENGTH_BOUNDS),
        (struct.pack("<IIHHI", 0, 0, KEYS_AT_MOST + 1, 1, 0) + bytes(8 * 64), Reason.LENGTH_BOUNDS),
        (struct.pack("<IIHHI", 0, 0, 0xFFFF, 1, 0) + bytes(8 * 64), Reason.LENGTH_BOUNDS),
        (struct.pack("<IIHHI", 0, 0, 1, 1, 0) + struct.pack("<HHI", 0, 1, 5), Reason.RESERVED_BITS),
    ),
)
def test_what_is_no_head_is_refused(data: bytes, reason: Reason) -> None:
    with pytest.raises(PeerFault) as caught:
        decode_head(data)
    assert caught.value.reason is reason


@given(st.binary(max_size=200))
def test_any_bytes_are_a_head_or_a_fault_and_nothing_else(data: bytes) -> None:
    try:
        head = decode_head(data)
    except PeerFault:
        return
    assert HEAD_BYTES <= head.start <= len(data)
    assert len(head.keys) <= KEYS_AT_MOST
