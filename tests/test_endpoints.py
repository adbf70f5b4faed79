"""Endpoints as text, what a control socket says of one it cannot use, and what it does when left to itself."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest

from pp1q_transport import control
from pp1q_transport.control import PEER, ControlConnector, ControlListener
from pp1q_transport.endpoints import parse_endpoint
from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault
from pp1q_transport.keys import KeyConfig, new_pair

LOOPBACK = "tcp://127.0.0.1:0"
SERVER, CLIENT = new_pair(), new_pair()
SERVER_KEYS = KeyConfig(SERVER.public, SERVER.secret, allow=frozenset({CLIENT.public}))
CLIENT_KEYS = KeyConfig(CLIENT.public, CLIENT.secret, SERVER.public)


@pytest.mark.parametrize(
    ("text", "parsed", "loopback"),
    (
        ("tcp://127.0.0.1:7411", "tcp://127.0.0.1:7411", True),
        ("tcp://127.8.9.1:0", "tcp://127.8.9.1:0", True),
        ("tcp://localhost:1", "tcp://127.0.0.1:1", True),
        ("tcp://[::1]:5", "tcp://[::1]:5", True),
        ("tcp://[0:0:0:0:0:0:0:1]:5", "tcp://[::1]:5", True),
        ("ipc:///run/x", "ipc:///run/x", True),
        ("tcp://*:5", "tcp://0.0.0.0:5", False),
        ("tcp://0.0.0.0:5", "tcp://0.0.0.0:5", False),
        ("tcp://[::]:5", "tcp://[::]:5", False),
        ("tcp://10.0.0.1:65535", "tcp://10.0.0.1:65535", False),
        ("tcp://127.0.0.1.example:5", "tcp://127.0.0.1.example:5", False),
        ("tcp://gpu-7.rack:5", "tcp://gpu-7.rack:5", False),
    ),
)
def test_endpoints(text: str, parsed: str, loopback: bool) -> None:
    endpoint = parse_endpoint(text)
    assert (str(endpoint), endpoint.loopback) == (parsed, loopback)
    assert parse_endpoint(str(endpoint)) == endpoint


@pytest.mark.parametrize(
    "text",
    (
        "", "127.0.0.1:5", "udp://127.0.0.1:5", "inproc://x", "tcp://", "tcp://127.0.0.1", "tcp://127.0.0.1:",
        "tcp://127.0.0.1:x", "tcp://127.0.0.1:65536", "tcp://127.0.0.1:-1", "tcp://127.0.0.1:+5", "tcp://::1:5",
        "tcp://[::1]", "tcp://[nonsense]:5", "tcp://[1:zz]:5", "tcp://300.0.0.1:5", "tcp://1.2.3:5", "tcp://:5",
        "tcp://a b:5", "tcp://eth0;127.0.0.1:5", "ipc://", "ipc://" + "x" * 101, "tcp://127.0.0.1:٣",
    ),
)  # fmt: skip
def test_a_bad_endpoint_is_one_clear_line(text: str) -> None:
    with pytest.raises(ConfigError, match="endpoint") as caught:
        parse_endpoint(text)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("endpoint", ("tcp://0.0.0.0:0", "tcp://*:0", "tcp://192.0.2.1:7", "tcp://host.example:7"))
def test_other_hosts_are_not_served_without_keys(endpoint: str) -> None:
    for end in (ControlListener, ControlConnector):
        with pytest.raises(ConfigError, match="pp1q keys new"):
            end(endpoint)


@pytest.mark.parametrize(
    ("make", "said"),
    (
        (lambda busy: ControlListener(busy), "address in use"),
        (lambda _: ControlListener("tcp://192.0.2.1:0", SERVER_KEYS), "no such address"),
        (lambda _: ControlConnector(LOOPBACK), "port 0"),
        (lambda busy: ControlConnector(busy, SERVER_KEYS), "needs the listener's public key"),
        (lambda busy: ControlConnector(busy, KeyConfig("x", "y", "z")), "not 40 characters of Z85"),
    ),
)
def test_an_unusable_endpoint_is_one_clear_line(make: Callable[[str], object], said: str) -> None:
    with ControlListener(LOOPBACK) as busy:
        with pytest.raises(ConfigError, match=said) as caught:
            make(busy.endpoint)
        assert "\n" not in str(caught.value)


def test_misuse_is_named() -> None:
    with ControlListener(LOOPBACK) as server, ControlConnector(server.endpoint) as client:
        with pytest.raises(LocalMisuse, match="one peer"):
            client.send(b"other", {"kind": "x"})
        with pytest.raises(LocalMisuse, match="type set"):
            server.send(b"peer", {"kind": {1, 2}})
        server.close()
        server.close()
        client.close()
        for end, peer in ((server, b"peer"), (client, PEER)):
            with pytest.raises(LocalMisuse, match="closed"):
                end.send(peer, {"kind": "x"})
            with pytest.raises(LocalMisuse, match="closed"):
                end.receive()


def test_a_refused_connector_does_not_try_for_ever() -> None:
    stranger_keys = KeyConfig(CLIENT.public, CLIENT.secret, new_pair().public)
    with ControlListener(LOOPBACK, SERVER_KEYS) as server, ControlConnector(server.endpoint, stranger_keys) as stranger:
        stop = time.monotonic() + 20
        refused = False
        while not refused:
            assert time.monotonic() < stop
            server.receive()
            try:
                stranger.receive()
            except PeerFault:
                refused = True
        time.sleep(0.1)
        server.receive()
        before = server.counters.get("control_handshake_failed")
        time.sleep(5 * control.RECONNECT_MS / 1000)
        server.receive()
        assert server.counters.get("control_handshake_failed") == before


def test_without_its_handler_a_listener_lets_in_nobody() -> None:
    """libzmq without a ZAP handler would admit every CURVE client; an enforced domain makes it fail closed."""
    with ControlListener(LOOPBACK, SERVER_KEYS) as server, ControlConnector(server.endpoint, CLIENT_KEYS) as client:
        server._sockets.remove(server._zap)
        server._zap.close()
        server._answer_handshakes = lambda: None  # type: ignore[method-assign]
        client.send(PEER, {"kind": "let me in"})
        stop = time.monotonic() + 1.0
        while time.monotonic() < stop:
            assert server.receive() == []
            time.sleep(0.02)
        assert not client.connected
