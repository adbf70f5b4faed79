"""Control messages as bytes: what passes, what is refused, and that decoding raises one error whatever it is given."""

from __future__ import annotations

import random
import tracemalloc

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.control_codec import MAX_DEPTH, MAX_ITEMS, MAX_TEXT_BYTES, decode_message, encode_message
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 63), (1 << 64) - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20)
    | st.binary(max_size=20)
)
LEVEL_4 = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=3)
LEVEL_3 = LEVEL_4 | st.lists(LEVEL_4, max_size=3) | st.dictionaries(st.text(max_size=5), LEVEL_4, max_size=3)
LEVEL_2 = LEVEL_3 | st.lists(LEVEL_3, max_size=3) | st.dictionaries(st.text(max_size=5), LEVEL_3, max_size=3)
MESSAGES = st.dictionaries(st.text(max_size=8), LEVEL_2, max_size=4)


@settings(max_examples=150, deadline=None)
@given(MESSAGES)
def test_what_is_encoded_decodes_to_itself(message: dict[str, object]) -> None:
    data = encode_message(message)
    assert decode_message(data) == message
    assert encode_message(decode_message(data)) == data  # a handshake's transcript relies on it


def nest(depth: int) -> object:
    value: object = 1
    for _ in range(depth):
        value = [value]
    return value


BAD: dict[str, bytes] = {
    "nothing": b"",
    "never used byte": b"\xc1",
    "not a map": msgpack.packb([1]),
    "a scalar": msgpack.packb(1),
    "trailing byte": msgpack.packb({"a": 1}) + b"\0",
    "cut short": msgpack.packb({"a": "text"})[:-1],
    "integer key": msgpack.packb({1: 1}),
    "bytes key": msgpack.packb({b"a": 1}),
    "list key": b"\x81\x91\x01\x01",
    "the same key twice": b"\x82\xa1a\x01\xa1a\x02",
    "the same key twice, inside": b"\x81\xa1b\x82\xa1a\x01\xa1a\x02",
    "extension": msgpack.packb({"a": msgpack.ExtType(5, b"x")}),
    "empty extension": b"\x81\xa1a\xc7\x00\x05",
    "timestamp": msgpack.packb({"a": msgpack.Timestamp(1, 1)}),
    "timestamp of a wrong length": b"\x81\xa1a\xd4\xff\x00",
    "not UTF-8": b"\x81\xa1a\xa2\xff\xfe",
    "not UTF-8 key": b"\x81\xa2\xff\xfe\x01",
    "nan": msgpack.packb({"a": float("nan")}),
    "infinity": msgpack.packb({"a": float("-inf")}),
    "too deep": msgpack.packb({"a": nest(MAX_DEPTH)}),
    "a nesting bomb": b"\x81\xa1a" * 10_000 + b"\xc0",
    "a list bomb": b"\x81\xa1a" + b"\xdc\x04\x00" * 20_000,
    "a list that claims 2^32-1 items": b"\x81\xa1a\xdd\xff\xff\xff\xff",
    "a map that claims 2^32-1 items": b"\xdf\xff\xff\xff\xff",
    "a text that claims 2^32-1 bytes": b"\x81\xa1a\xdb\xff\xff\xff\xff",
    "too many items": msgpack.packb({"a": [0] * (MAX_ITEMS + 1)}),
    "too many keys": msgpack.packb({str(n): 0 for n in range(MAX_ITEMS + 1)}),
    "too long a text": msgpack.packb({"a": "x" * (MAX_TEXT_BYTES + 1)}),
    "too long a byte string": msgpack.packb({"a": b"x" * (MAX_TEXT_BYTES + 1)}),
    "too long a key": msgpack.packb({"k" * (MAX_TEXT_BYTES + 1): 0}),
    "too large": msgpack.packb({"a": [b"x" * 16_000] * 5}),
}


@pytest.mark.parametrize("name", BAD)
def test_a_message_beyond_the_bounds_is_malformed(name: str) -> None:
    with pytest.raises(PeerFault) as caught:
        decode_message(BAD[name])
    assert caught.value.reason is Reason.MALFORMED


def test_at_the_bounds_it_passes() -> None:
    message = {"a": nest(MAX_DEPTH - 1), "b": [0] * MAX_ITEMS, "c": "x" * MAX_TEXT_BYTES, "d": (1 << 64) - 1}
    assert decode_message(encode_message(message)) == message
    assert decode_message(encode_message({"d": -(1 << 63)})) == {"d": -(1 << 63)}


def test_a_claim_of_many_items_allocates_little() -> None:
    bomb = b"\x81\xa1a" + b"\xdc\xea\x60" * 20_000  # lists in lists, each of which says it holds 60,000 items
    tracemalloc.start()
    try:
        with pytest.raises(PeerFault):
            decode_message(bomb)
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_size_is_judged_before_decoding() -> None:
    with pytest.raises(PeerFault, match="of 101 bytes; at most 100"):
        decode_message(b"\xc1" * 101, limit=100)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_random_bytes_raise_one_error(data: bytes) -> None:
    try:
        message = decode_message(data)
    except PeerFault as fault:
        assert fault.reason is Reason.MALFORMED  # noqa: PT017
    else:
        encode_message(message)


def test_mutated_messages_raise_one_error() -> None:
    source = random.Random(7)
    good = encode_message({"kind": "hello", "hello": {"v": 2, "list": ["a", 1.5, b"x" * 40], "deep": {"x": None}}})
    refused = 0
    for _ in range(20_000):
        data = bytearray(good)
        for _ in range(source.randint(1, 3)):
            data[source.randrange(len(data))] = source.randrange(256)
        data = data[: source.randint(1, len(data))] if source.random() < 0.2 else data
        try:
            decode_message(bytes(data))
        except PeerFault:
            refused += 1
    assert refused > 1000


@pytest.mark.parametrize(
    "message",
    (
        {"a": nest(MAX_DEPTH)},
        {"a": 1 << 64},
        {"a": -(1 << 63) - 1},
        {"a": float("inf")},
        {"a": object()},
        {"a": bytearray(b"x")},
        {1: 2},
        {"a": [0] * (MAX_ITEMS + 1)},
        {"a": "x" * (MAX_TEXT_BYTES + 1)},
        {"a": "\ud800"},
        {"a": [b"x" * 16_000] * 5},
        [1],
    ),
)
def test_what_would_be_refused_is_not_sent(message: dict[str, object]) -> None:
    with pytest.raises(LocalMisuse):
        encode_message(message)
