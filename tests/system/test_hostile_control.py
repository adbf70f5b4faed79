"""What strangers may throw at the control port of a receiver whose session is busy: cut off, counted, and no proposal lost."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import msgpack
import pytest
import zmq
from system_live import CLIENT_HELLO, HTTP, NOISE, PROOF_HEADER, SSH, Live, crowd, running, server_side, throw
from system_rig import SMALL, Rig

from pp1q_transport.client import Role, make_hello
from pp1q_transport.control import ControlConnector
from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.keys import KeyConfig, new_pair
from pp1q_transport.session.negotiate import goodbye_message, to_map

pytestmark = pytest.mark.timeout(90)

SERVER, CLIENT, STRANGER = new_pair(), new_pair(), new_pair()
SERVER_KEYS = KeyConfig(SERVER.public, SERVER.secret, allow=frozenset({CLIENT.public}))
CLIENT_KEYS = KeyConfig(CLIENT.public, CLIENT.secret, server_public=SERVER.public)


@pytest.fixture
def guarded() -> Iterator[Live]:
    """The same behind CURVE with an allow-list."""
    with running(receiver={"keys": SERVER_KEYS}, leader={"keys": CLIENT_KEYS}) as busy:
        yield busy


# ---- the control port -------------------------------------------------------------------------------------------------


CONTROL_STRANGERS: dict[str, bytes] = {
    "http": HTTP,
    "tls": CLIENT_HELLO,
    "ssh": SSH,
    "a proof": PROOF_HEADER + bytes(32),
    "zmtp 1": b"\x01\x00" + b"\x05\x00hello",
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00",
    "zmtp 3 with a foreign mechanism": b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"GSSAPI".ljust(20, b"\0") + bytes(32),
}


@pytest.mark.parametrize("name", CONTROL_STRANGERS)
def test_a_stranger_on_the_control_port_is_cut_off(live: Live, name: str) -> None:
    throw(live.port_of("control"), CONTROL_STRANGERS[name])
    live.until(lambda: live.counters.get("control_handshake_failed") == 1)


@pytest.mark.parametrize("size", (1, 9, 10, 11, 64, 65, 4096, 1 << 20))
def test_random_bytes_on_the_control_port(live: Live, size: int) -> None:
    throw(live.port_of("control"), NOISE.randbytes(size))
    live.until(lambda: live.counters.get("control_handshake_failed") == 1)


@pytest.mark.slow
def test_a_slow_loris_on_the_control_port(live: Live) -> None:
    greeting = b"\xff" + bytes(8) + b"\x7f\x03\x00" + b"NULL".ljust(20, b"\0") + bytes(32)
    with socket.create_connection(live.port_of("control")) as sock:
        for byte in greeting:
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            if live.counters.get("control_handshake_failed"):
                break
            time.sleep(0.2)
    live.until(lambda: live.counters.get("control_handshake_failed") == 1)


@contextmanager
def dealer(endpoint: str, **options: Any) -> Iterator[zmq.Socket[bytes]]:
    """A ZeroMQ client of anybody's making."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    sock.setsockopt(zmq.LINGER, 0)
    sock.setsockopt(zmq.RCVTIMEO, 20_000)
    for name, value in options.items():
        sock.setsockopt(getattr(zmq, name), value)
    sock.connect(endpoint)
    try:
        yield sock
    finally:
        sock.close()
        context.term()


def hello(**changes: Any) -> dict[str, Any]:
    return to_map(make_hello(Role.LEADER, 77, **SMALL)) | changes


MESSAGES: dict[str, tuple[list[bytes], str, str | None]] = {
    "v1 hello": (
        [msgpack.packb({"kind": "hello", "wire_version": 1, "vocab": 32000, "greedy": True})],
        "bad_version",
        "wire_version",
    ),
    "v1 hello, nested": (
        [msgpack.packb({"kind": "hello", "hello": {"wire_version": 1}})],
        "bad_version",
        "wire_version",
    ),
    "version 3": ([msgpack.packb({"kind": "hello", "hello": hello(wire_version=3)})], "bad_version", "wire_version"),
    "no version": ([msgpack.packb({"kind": "hello", "hello": {}})], "bad_version", "wire_version"),
    "foreign kind": ([msgpack.packb({"kind": "subscribe"})], "unexpected_kind", "message"),
    "no kind": ([msgpack.packb({})], "unexpected_kind", "message"),
    "a goodbye for somebody": ([encode_message(goodbye_message(Reason.CANCELLED))], "unexpected_kind", None),
    "a report": ([encode_message({"kind": "report", "body": {}})], "unexpected_kind", None),
    "options with odd keys": ([msgpack.packb({"kind": "options", "body": 1, "more": 2})], "malformed", None),
    "not msgpack": ([b"\xc1"], "malformed", "message"),
    "a list": ([msgpack.packb([1, 2])], "malformed", "message"),
    "deep": ([msgpack.packb({"kind": {"a": {"b": {"c": {"d": {"e": 1}}}}}})], "malformed", "message"),
    "huge claim": ([b"\xdf\xff\xff\xff\xff"], "malformed", "message"),
    "three parts": ([b"a", b"b", b"c"], "malformed", "message"),
    "empty": ([b""], "malformed", "message"),
}


@pytest.mark.parametrize("name", MESSAGES)
def test_a_foreign_message_is_answered_counted_and_forgotten(live: Live, name: str) -> None:
    frames, reason, field = MESSAGES[name]
    with dealer(live.rig.receiver.endpoint) as sock:
        sock.send_multipart(frames)
        if field is not None:
            answer = decode_message(sock.recv())
            assert (answer["kind"], answer["reason"], answer["field"]) == ("refuse", reason, field)
            if reason == "bad_version":
                assert answer["ours"] == "2"
                assert answer["theirs"] in ("1", "3", "none stated")
        live.until(lambda: live.counters.reasons.get(reason) == 1)
    live.more_rounds()
    assert set(live.counters.reasons) == {reason}


def test_a_message_beyond_the_bound_ends_that_connection_alone(live: Live) -> None:
    with dealer(live.rig.receiver.endpoint) as sock:
        sock.send(bytes(1 << 20))
        live.more_rounds()
        sock.send(msgpack.packb([1]))
        live.more_rounds()


def test_a_flood_of_messages_disturbs_nobody(live: Live) -> None:
    """As fast as a client can, for a while: HELLOs, garbage, goodbyes."""
    junk = [
        encode_message({"kind": "hello", "hello": hello()}),
        encode_message(goodbye_message(Reason.CANCELLED)),
        NOISE.randbytes(500),
    ]
    with dealer(live.rig.receiver.endpoint, SNDHWM=10) as sock:
        for index in range(3000):
            sock.send(junk[index % 3])
        live.more_rounds(50)
        live.until(lambda: live.counters.of(Reason.OVERLOAD) == 1000)
    assert live.counters.of(Reason.UNEXPECTED_KIND) == 1000


def test_nobody_may_pass_for_the_peer_of_the_session(live: Live) -> None:
    """A client that claims the peer's own routing ID gets nowhere."""
    peer = live.rig.receiver.engine._forming._peers[0]
    with dealer(live.rig.receiver.endpoint, ROUTING_ID=b"stranger") as sock:
        sock.send(encode_message(goodbye_message(Reason.CANCELLED)))
        live.until(lambda: live.counters.of(Reason.UNEXPECTED_KIND) == 1)
    with dealer(live.rig.receiver.endpoint, ROUTING_ID=peer) as sock:
        sock.send(encode_message(goodbye_message(Reason.CANCELLED)))
        live.more_rounds()


def test_many_peers_that_only_sit_there_are_bounded(live: Live) -> None:
    """More well-behaved strangers than the listener has room for."""
    with ExitStack() as stack:
        for _ in range(80):
            sock = stack.enter_context(dealer(live.rig.receiver.endpoint))
            sock.send(encode_message({"kind": "keepalive"}))
        live.until(lambda: live.counters.get("control_overload") >= 10)
        live.more_rounds()


@pytest.mark.slow
def test_a_thousand_half_open_control_connections_are_ended(live: Live, descriptors: int) -> None:
    with ExitStack() as stack:
        crowd(live.port_of("control"), 1000, stack)
        live.more_rounds()
        live.until(lambda: live.counters.get("control_handshake_failed") == 1000)
        _, port = live.port_of("control")
        live.until(lambda: server_side(port) == 1)


# ---- CURVE ------------------------------------------------------------------------------------------------------------


def curve(public: str, secret: str, server: str) -> dict[str, Any]:
    return {
        "CURVE_PUBLICKEY": public.encode(),
        "CURVE_SECRETKEY": secret.encode(),
        "CURVE_SERVERKEY": server.encode(),
        "HANDSHAKE_IVL": 2000,
    }


CURVE_STRANGERS: dict[str, dict[str, Any]] = {
    "plaintext": {},
    "plain with a password": {"PLAIN_USERNAME": b"root", "PLAIN_PASSWORD": b"root"},
    "not on the allow-list": curve(STRANGER.public, STRANGER.secret, SERVER.public),
    "the wrong server key": curve(CLIENT.public, CLIENT.secret, STRANGER.public),
    "an allowed key without its secret": curve(CLIENT.public, STRANGER.secret, SERVER.public),
}


@pytest.mark.parametrize("name", CURVE_STRANGERS)
def test_without_the_right_keys_nothing_gets_in(guarded: Live, name: str) -> None:
    with dealer(guarded.rig.receiver.endpoint, **CURVE_STRANGERS[name]) as sock:
        sock.send(encode_message({"kind": "hello", "hello": hello()}))
        guarded.until(lambda: guarded.counters.get("control_handshake_failed") >= 1)
        guarded.more_rounds()
    assert guarded.counters.of(Reason.OVERLOAD) == 0, "its HELLO was never read"
    if name == "not on the allow-list":
        assert guarded.counters.of(Reason.AUTH_FAILED) >= 1


@pytest.mark.parametrize("name", (*CONTROL_STRANGERS, "random"))
def test_strangers_before_curve(guarded: Live, name: str) -> None:
    throw(guarded.port_of("control"), CONTROL_STRANGERS.get(name, NOISE.randbytes(300)))
    guarded.until(lambda: guarded.counters.get("control_handshake_failed") == 1)


def test_a_refused_key_is_told_so_and_does_not_try_for_ever() -> None:
    keys = KeyConfig(STRANGER.public, STRANGER.secret, server_public=SERVER.public)
    with Rig(receiver={"keys": SERVER_KEYS}, leader={"keys": keys}) as rig:
        with pytest.raises(PeerFault) as caught:
            rig.connect()
        assert caught.value.reason is Reason.AUTH_FAILED
        assert "allow-list" in caught.value.detail
        assert not rig.receiver.up


def test_the_allowed_key_gets_in_after_all_that(guarded: Live) -> None:
    """The session's peer is there; a second allowed one is refused for that reason alone."""
    connector = ControlConnector(guarded.rig.receiver.endpoint, CLIENT_KEYS)
    try:
        connector.send(b"", {"kind": "hello", "hello": hello()})
        answers: list[Any] = []
        guarded.until(lambda: answers.extend(connector.receive()) or answers)
        assert answers[0][1]["reason"] == "overload"
    finally:
        connector.close()


def test_the_data_port_is_no_way_around_the_keys(guarded: Live) -> None:
    throw(guarded.port_of("data"), PROOF_HEADER + bytes(32))
    guarded.until(lambda: guarded.counters.of(Reason.SESSION_MISMATCH) == 1)
