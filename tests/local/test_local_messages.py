"""The records' layouts, byte for byte, and what `unpack` refuses."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.local import messages
from pp1q_transport.local.messages import TABLE, Message, pack, unpack

# kind: name, senders, bytes, and the bytes of ever-rising integers, -2, 0.75, a count of 2 and zeros where they must be.
GOLDEN: dict[int, tuple[str, int, int, str]] = {
    1: ("OPEN", 1, 32,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b02000000"),
    2: ("STEP", 1, 64,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f000000000000e83f303132333435363738393a3b3c3d3e3f"
         "4041424344454647"),
    3: ("COMMIT", 1, 40,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b020000002c2d2e2f30313233"),
    4: ("RELEASE", 1, 8,
         "1011121314151617"),
    5: ("CLOSE", 1, 8,
         "1011121314151617"),
    6: ("AGREE", 1, 24,
         "101112131415161718191a1b1c1d1e1f2021222324252627"),
    7: ("EXCHANGE", 1, 48,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b02000000"),
    16: ("UP", 4, 16,
         "101112131415161718191a1b00000000"),
    17: ("DOWN", 4, 8,
         "1011121314151617"),
    18: ("READY", 4, 56,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b3c3d3e3f4041424344454647"),
    19: ("DISCARDED", 4, 32,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b00000000"),
    20: ("COMMITTED", 4, 16,
         "101112131415161718191a1b1c1d1e1f"),
    21: ("REFUSED", 4, 24,
         "101112131415161718191a1b1c1d1e1f2021222302000000"),
    22: ("EPOCH", 4, 16,
         "101112131415161718191a1b1c1d1e1f"),
    23: ("DRAINING", 12, 8,
         "1011121300000000"),
    24: ("EXCHANGED", 4, 48,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f303132333435363738393a3b02000000"),
    32: ("TARGET_UP", 8, 16,
         "10111213000000001415161718191a1b"),
    33: ("TARGET_DOWN", 8, 8,
         "1011121314151617"),
    34: ("OPENED", 8, 32,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b02000000"),
    35: ("COMMITTED_TOKENS", 8, 24,
         "101112131415161718191a1b1c1d1e1f2021222302000000"),
    36: ("RESET", 8, 24,
         "101112131415161718191a1b1c1d1e1f2021222324252627"),
    37: ("CLOSED", 8, 16,
         "101112131415161718191a1b00000000"),
    38: ("STEP_FOR_DRAFT", 8, 88,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334353637000000000000e83f38393a3b3c3d3e3f"
         "404142434445464748494a4b4c4d4e4f505152535455565758595a5b5c5d5e5f"),
    39: ("TOKEN", 8, 24,
         "101112131415161718191a1b1c1d1e1ffeffffff00000000"),
    48: ("PUT", 2, 40,
         "101112131415161718191a1b1c1d1e1f2021222324252627feffffff28292a2b2c2d2e2f00000000"),
    49: ("FAIL", 2, 24,
         "101112131415161718191a1b1c1d1e1f2021222324252627"),
    50: ("PUT_SHARD", 2, 40,
         "101112131415161718191a1b1c1d1e1f202122232425262728292a2b2c2d2e2f3031323334353637"),
    61: ("PING", 3, 8,
         "1011121314151617"),
    62: ("PONG", 12, 8,
         "1011121314151617"),
    63: ("BYE", 15, 8,
         "1011121300000000"),
}
CONSTANTS = {
    name: value for name, value in vars(messages).items()
    if name.isupper() and type(value) is int and not name.startswith(("_", "EPOCH_", "MAX_", "DAEMON_TO", "TARGET", "DRAFT"))
} | {"TARGET_UP": messages.TARGET_UP, "TARGET_DOWN": messages.TARGET_DOWN}
ALL = pytest.mark.parametrize("kind", sorted(TABLE), ids=lambda kind: TABLE[kind].name)


def golden_values(message: Message) -> list[int | float]:
    """The values whose bytes GOLDEN holds: each integer's bytes go on rising where the last one's ended."""
    values: list[int | float] = []
    following = 0x10
    for index, (field, code) in enumerate(zip(message.fields, message.layout.format[1:], strict=True)):
        if field == "zero":
            values.append(0)
        elif index == message.counted:
            values.append(2)
        elif code in "di":
            values.append(0.75 if code == "d" else -2)
        else:
            width = struct.calcsize(code)
            values.append(int.from_bytes(bytes(range(following, following + width)), "little"))
            following += width
    return values


def body(kind: int) -> bytes:
    message = TABLE[kind]
    return bytes.fromhex(GOLDEN[kind][3]) + (bytes(2 * message.unit) if message.has_payload else b"")


def test_the_table_names_every_kind_once() -> None:
    assert {kind: message.name for kind, message in TABLE.items()} == {value: name for name, value in CONSTANTS.items()}
    assert set(TABLE) == set(GOLDEN)
    assert max(TABLE) < 64


@ALL
def test_golden_bytes(kind: int) -> None:
    message = TABLE[kind]
    name, direction, size, hexed = GOLDEN[kind]
    assert (message.name, message.direction, message.layout.size) == (name, direction, size)
    assert pack(kind, *golden_values(message)).hex() == hexed
    values, payload = unpack(kind, body(kind))
    assert list(values) == golden_values(message)
    assert len(payload) == (2 * message.unit if message.has_payload else 0)
    assert list(messages.named(kind, values)) == list(dict.fromkeys(message.fields))


@ALL
def test_fields_are_aligned_as_a_c_compiler_aligns_them(kind: int) -> None:
    codes = TABLE[kind].layout.format[1:]
    at = 0
    for code in codes:
        assert at % struct.calcsize(code) == 0
        at += struct.calcsize(code)
    assert at % max(struct.calcsize(code) for code in codes) == 0, "a C struct would have padding at its end"


@ALL
def test_another_length_is_refused(kind: int) -> None:
    whole = body(kind)
    for wrong in (whole[:-1], whole + b"\0", whole + bytes(TABLE[kind].unit), whole[: TABLE[kind].layout.size - 1], b""):
        with pytest.raises(PeerFault) as raised:
            unpack(kind, wrong)
        assert raised.value.reason is Reason.LENGTH_BOUNDS


@ALL
def test_a_zero_field_must_be_zero(kind: int) -> None:
    message = TABLE[kind]
    for index in message.zeros:
        values = golden_values(message)
        values[index] = 1
        with pytest.raises(PeerFault) as raised:
            unpack(kind, pack(kind, *values) + body(kind)[message.layout.size :])
        assert raised.value.reason is Reason.RESERVED_BITS
    assert len(message.zeros) == message.fields.count("zero")


@ALL
def test_only_its_sender_may_send_it(kind: int) -> None:
    for bit in (1, 2, 4, 8):
        if TABLE[kind].direction & bit:
            unpack(kind, body(kind), bit)
        else:
            with pytest.raises(PeerFault) as raised:
                unpack(kind, body(kind), bit)
            assert raised.value.reason is Reason.UNEXPECTED_KIND


@pytest.mark.parametrize("kind", (0, 8, 15, 25, 40, 51, 60, 64, 0xFFFF))
def test_an_unknown_kind_is_refused(kind: int) -> None:
    with pytest.raises(PeerFault) as raised:
        unpack(kind, bytes(64))
    assert raised.value.reason is Reason.UNKNOWN_KIND


def test_a_count_that_overflows_is_refused() -> None:
    """0x40000000 * 4 is 0 in 32 bits."""
    with pytest.raises(PeerFault) as raised:
        unpack(messages.OPEN, pack(messages.OPEN, 1, 2, 3, 4, 5, 0x40000000))
    assert raised.value.reason is Reason.LENGTH_BOUNDS


def test_a_text_is_bounded() -> None:
    words = "ä" * 400
    sent = messages.text_bytes(words)
    assert len(sent) <= messages.MAX_TEXT_BYTES
    values, payload = unpack(messages.REFUSED, pack(messages.REFUSED, 1, 2, 3, len(sent)) + sent)
    assert values == (1, 2, 3, len(sent))
    assert messages.text_of(payload) == words[:256]
    assert messages.text_bytes("ab" + words).decode() == "ab" + words[:255]
    long = bytes(messages.MAX_TEXT_BYTES + 1)
    with pytest.raises(PeerFault) as raised:
        unpack(messages.REFUSED, pack(messages.REFUSED, 1, 2, 3, len(long)) + long)
    assert raised.value.reason is Reason.LENGTH_BOUNDS
    with pytest.raises(PeerFault) as raised:
        messages.text_of(b"\xff")
    assert raised.value.reason is Reason.MALFORMED
    assert messages.text_bytes("\ud800") == b"?"


@given(st.integers(0, 70), st.binary(max_size=120))
def test_bytes_are_unpacked_or_refused_with_a_reason(kind: int, data: bytes) -> None:
    try:
        values, payload = unpack(kind, data)
    except PeerFault:
        return
    assert TABLE[kind].layout.pack(*values) + bytes(payload) == data or "d" in TABLE[kind].layout.format  # a NaN may change
