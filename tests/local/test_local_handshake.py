"""ATTACH and ANSWER byte for byte, and what is refused of them."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st
from local_child import geometry

from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.local.handshake import (
    ANSWER,
    MAX_ANSWER_BYTES,
    MAX_RING,
    Answer,
    Role,
    pack_attach,
    pack_refusal,
    pack_welcome,
    parse_answer,
    parse_attach,
)

SIZE = geometry().slots().total_bytes
# magic, version, verdict, text length, regions; thirteen u32; zero; nonce; sixteen sizes
WELCOME = (
    "50503141" "0100" "0000" "00000000" "02000000"
    "e8030000" "02000000" "04000000" "02000000" "40000000" "c00f0000" "02000000" "01000000" "00000000" "07000000" "00000200"
    "00002000" "01000000" "00000000" "8967452301efcdab" "8001000000000000" "8101000000000000" + 14 * "0000000000000000"
)
REFUSAL = "50503141" "0100" "0800" "03000000" "00000000" + 60 * "00" + 8 * "00" + 124 * "00" + "6e6f21"


def test_golden_bytes() -> None:
    assert pack_attach(Role.RECEIVER_TARGET, 3).hex() == "50503141" "0100" "0200" "03000000" "00000000"
    assert SIZE == 0x180
    assert pack_welcome(geometry(), (SIZE, SIZE + 1)).hex() == WELCOME
    assert ANSWER.size == 208
    assert pack_refusal(Reason.AUTH_FAILED, "no!").hex() == REFUSAL


def test_both_come_back_as_they_were() -> None:
    assert parse_attach(pack_attach(Role.LEADER_DRAFT, 0xFFFFFFFF)) == (Role.LEADER_DRAFT, 0xFFFFFFFF)
    assert parse_answer(bytes.fromhex(WELCOME)) == Answer(None, "", geometry(), (SIZE, SIZE + 1))
    assert parse_answer(pack_welcome(geometry(), ())) == Answer(None, "", geometry(), ())
    long = parse_answer(pack_refusal(Reason.OVERLOAD, "é" * 600))
    assert long == Answer(Reason.OVERLOAD, "é" * 256, None, ())
    with pytest.raises(LocalMisuse, match="rank -1"):
        pack_attach(Role.ADMIN, -1)


FIELDS = (
    "vocab_size depth support max_slots row_bytes dense_row_bytes group_size rank group_mode flags max_context_tokens "
    "ring_capacity targets"
)
ODD_GEOMETRY = (
    {"vocab_size": 0}, {"depth": 0}, {"max_slots": 0}, {"row_bytes": 0}, {"row_bytes": 96}, {"group_size": 0}, {"rank": 2},
    {"flags": 8}, {"max_context_tokens": 0}, {"ring_capacity": 2048}, {"ring_capacity": 5000}, {"ring_capacity": 2 * MAX_RING},
    {"max_slots": 1 << 31, "depth": 1 << 31, "row_bytes": 64}, {"vocab_size": 1 << 32}, {"boot_nonce": 1 << 64}, {"support": -1},
)


@pytest.mark.parametrize("changes", ODD_GEOMETRY, ids=str)
def test_a_geometry_that_can_not_be_is_refused_by_both_sides(changes: dict[str, int]) -> None:
    with pytest.raises(LocalMisuse, match="can't announce this geometry: "):
        pack_welcome(geometry(**changes), ())
    name, value = next(iter(changes.items()))
    if len(changes) > 1 or not 0 <= value < 1 << 32:
        return
    at = 16 + 4 * FIELDS.split().index(name)
    data = bytearray(pack_welcome(geometry(), ()))
    struct.pack_into("<I", data, at, value)
    with pytest.raises(PeerFault) as raised:
        parse_answer(bytes(data))
    assert raised.value.reason is Reason.LIMITS_MISMATCH


def changed(at: int, code: str, value: int, whole: str = WELCOME) -> bytes:
    data = bytearray.fromhex(whole)
    struct.pack_into("<" + code, data, at, value)
    return bytes(data)


ODD_ANSWERS = (
    ("empty", b"", Reason.LENGTH_BOUNDS),
    ("short", bytes.fromhex(WELCOME)[:-1], Reason.LENGTH_BOUNDS),
    ("long", bytes.fromhex(WELCOME) + b"x", Reason.LENGTH_BOUNDS),
    ("beyond any", bytes(MAX_ANSWER_BYTES + 1), Reason.LENGTH_BOUNDS),
    ("magic", changed(0, "B", 0x51), Reason.BAD_MAGIC),
    ("version", changed(4, "H", 2), Reason.BAD_VERSION),
    ("verdict", changed(6, "H", 999, REFUSAL), Reason.MALFORMED),
    ("text length", changed(8, "I", 4, REFUSAL), Reason.LENGTH_BOUNDS),
    ("text length of all ones", changed(8, "I", 0xFFFFFFFF), Reason.LENGTH_BOUNDS),
    ("regions", changed(12, "I", 17), Reason.LENGTH_BOUNDS),
    ("a size too many", changed(12, "I", 1), Reason.RESERVED_BITS),
    ("zero", changed(68, "I", 1), Reason.RESERVED_BITS),
    ("a region too small for its slots", changed(80, "Q", SIZE - 1), Reason.LIMITS_MISMATCH),
    ("a region of nothing", changed(12, "I", 3), Reason.LIMITS_MISMATCH),
)


@pytest.mark.parametrize(("name", "data", "reason"), ODD_ANSWERS, ids=[name for name, _, _ in ODD_ANSWERS])
def test_an_odd_answer_is_refused_by_name(name: str, data: bytes, reason: Reason) -> None:
    with pytest.raises(PeerFault) as raised:
        parse_answer(data)
    assert raised.value.reason is reason


@given(st.binary(max_size=MAX_ANSWER_BYTES + 8), st.integers(0, 207), st.integers(0, 255))
def test_noise_is_parsed_or_refused_with_a_reason(noise: bytes, at: int, byte: int) -> None:
    near = bytearray.fromhex(WELCOME)
    near[at] = byte
    for data in (noise, b"PP1A\x01\0" + noise, bytes(near)):
        for parse in (parse_attach, parse_answer):
            try:
                parse(data)
            except PeerFault:
                continue
