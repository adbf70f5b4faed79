"""The control plane on loopback: who gets in, what is refused, and that nobody disturbs a live peer."""

from __future__ import annotations

import gc
import os
import select
import socket
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, suppress

import pytest
import zmq

from pp1q_transport import control
from pp1q_transport.control import (
    PEER,
    ControlConnector,
    ControlListener,
    decode_message,
    encode_message,
)
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.keys import KeyConfig, KeyPair, new_pair
from pp1q_transport.session.negotiate import Agreement, Connector, Listener, Message, Role, make_hello

pytestmark = pytest.mark.timeout(60)

LOOPBACK = "tcp://127.0.0.1:0"
SERVER, CLIENT, STRANGER = new_pair(), new_pair(), new_pair()
SERVER_KEYS = KeyConfig(SERVER.public, SERVER.secret, allow=frozenset({CLIENT.public}))

End = ControlListener | ControlConnector
Inbox = dict[End, list[tuple[bytes, Message]]]


def client_keys(pair: KeyPair = CLIENT, server: str = SERVER.public) -> KeyConfig:
    return KeyConfig(pair.public, pair.secret, server)


def port_of(listener: ControlListener) -> int:
    return int(listener.endpoint.rsplit(":", 1)[1])


def pump(ends: list[End], until: Callable[[Inbox], bool], within_s: float = 20.0) -> Inbox:
    """Polls and drains as an engine does, until `until` holds. Only descriptors wake it: a lost wake-up fails here."""
    inbox: Inbox = {end: [] for end in ends}
    poller = select.poll()
    for end in ends:
        poller.register(end.fileno(), select.POLLIN)
    stop = time.monotonic() + within_s
    for end in ends:
        inbox[end] += end.receive()
    while not until(inbox):
        assert time.monotonic() < stop, f"nothing within {within_s} s: {[end.counters.snapshot() for end in ends]}"
        ready = {descriptor for descriptor, _ in poller.poll(1000)}
        for end in ends:
            if end.fileno() in ready:
                inbox[end] += end.receive()
    return inbox


def wait_for_loss(ends: list[End], listener: ControlListener) -> tuple[list[bytes], Inbox]:
    """Pumps until the listener reports peers lost; returns them, and what arrived meanwhile."""
    lost: list[bytes] = []

    def gone(_: Inbox) -> bool:
        lost.extend(listener.lost())
        return bool(lost)

    inbox = pump(ends, gone)
    return lost, inbox


def fault_of(listener: ControlListener, connector: ControlConnector) -> PeerFault:
    with pytest.raises(PeerFault) as caught:
        pump([listener, connector], lambda _: False)
    return caught.value


class Pair:
    """A listener with one live peer, which `exchange` proves to be undisturbed."""

    def __init__(self, keys: bool = False, max_peers: int = control.MAX_PEERS) -> None:
        self.listener = ControlListener(LOOPBACK, SERVER_KEYS if keys else None, max_peers=max_peers)
        self.connector = ControlConnector(self.listener.endpoint, client_keys() if keys else None)
        self.peer = b""
        self.sent = 0
        self.exchange()

    def exchange(self) -> None:
        self.sent += 1
        assert self.connector.send(PEER, {"kind": "ping", "n": self.sent})
        inbox = pump([self.listener], lambda box: any(m.get("n") == self.sent for _, m in box[self.listener]))
        self.peer = next(peer for peer, message in inbox[self.listener] if message.get("n") == self.sent)
        assert self.listener.send(self.peer, {"kind": "pong", "n": self.sent})
        inbox = pump([self.connector], lambda box: bool(box[self.connector]))
        assert inbox[self.connector] == [(PEER, {"kind": "pong", "n": self.sent})]

    def count(self, name: str) -> int:
        return self.listener.counters.get(name)

    def close(self) -> None:
        self.connector.close()
        self.listener.close()


@pytest.fixture(params=[False, True], ids=["null", "curve"])
def pair(request: pytest.FixtureRequest) -> Iterator[Pair]:
    with closing(Pair(keys=request.param)) as made:
        yield made


@pytest.fixture
def raw() -> Iterator[Callable[[ControlListener], zmq.Socket[bytes]]]:
    """Bare DEALERs, which send what our own classes would not."""
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()

    def connect(listener: ControlListener) -> zmq.Socket[bytes]:
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, 0)
        dealer.connect(listener.endpoint)
        return dealer

    yield connect
    context.destroy(linger=0)


# --- exchange --------------------------------------------------------------------------------------------------------


def test_messages_pass_both_ways(pair: Pair) -> None:
    for _ in range(20):
        pair.exchange()
    assert pair.count("control_received") == 21
    assert pair.count("control_sent") == 21
    assert pair.listener.counters.reasons == {}


def test_a_handshake_over_curve_ends_in_one_agreement() -> None:
    with ControlListener(LOOPBACK, SERVER_KEYS) as server, ControlConnector(server.endpoint, client_keys()) as client:
        leads = Connector(make_hello(Role.LEADER, 1), encode_message, os.urandom)
        answers = Listener(make_hello(Role.RECEIVER, 2), "tcp://127.0.0.1:9", encode_message, os.urandom)
        client.send(PEER, leads.start(0))
        ((peer, hello),) = pump([server], lambda box: bool(box[server]))[server]
        answer, theirs = answers.receive(hello, 0)
        server.send(peer, answer)
        ((_, acknowledgement),) = pump([client], lambda box: bool(box[client]))[client]
        ours = leads.receive(acknowledgement, 0)
        assert isinstance(theirs, Agreement)
        assert theirs.proves(Role.LEADER, ours.proof_of(Role.LEADER))
        assert ours.proves(Role.RECEIVER, theirs.proof_of(Role.RECEIVER))


def test_a_message_sent_before_anybody_listens_arrives() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        endpoint = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    with ControlConnector(endpoint) as client:
        assert client.send(PEER, {"kind": "early"})
        assert "nobody answers" in client.trouble
        with ControlListener(endpoint) as server:
            inbox = pump([server, client], lambda box: bool(box[server]) and client.connected)
            assert inbox[server][0][1] == {"kind": "early"}
            assert client.trouble == ""


def test_ipc_and_ipv6_loopback(tmp_path: os.PathLike[str]) -> None:
    endpoints = [f"ipc://{tmp_path}/control"]
    with suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        endpoints.append("tcp://[::1]:0")  # this host has IPv6
    for endpoint in endpoints:
        with ControlListener(endpoint) as server, ControlConnector(server.endpoint) as client:
            client.send(PEER, {"kind": "here"})
            assert pump([server], lambda box: bool(box[server]))[server][0][1] == {"kind": "here"}


def test_sending_does_not_swallow_the_wake_up(pair: Pair) -> None:
    """ZeroMQ's descriptor is an edge that `send` may consume; ours must still poll readable."""
    for _ in range(50):
        pair.connector.send(PEER, {"kind": "ping"})
        time.sleep(0.003)  # libzmq looks at its mailbox in `send` only when some time has passed
        pair.listener.send(pair.peer, {"kind": "pong"})
        arrived: list[tuple[bytes, Message]] = []
        while not arrived:
            assert select.select([pair.listener.fileno()], [], [], 10)[0], "a message is there, but nothing says so"
            arrived += pair.listener.receive()
        pump([pair.connector], lambda box: bool(box[pair.connector]))


def test_a_drained_end_does_not_poll_readable(pair: Pair) -> None:
    for end in (pair.listener, pair.connector):
        quiet = 0
        for _ in range(200):
            if not select.select([end.fileno()], [], [], 0.01)[0]:
                quiet += 1
                break
            end.receive()
        assert quiet


def test_a_batch_is_bounded_and_the_rest_still_wakes(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BATCH", 4)
    for number in range(40):
        assert pair.connector.send(PEER, {"kind": "many", "n": number})
        assert pair.listener.send(pair.peer, {"kind": "many", "n": number})
    for end in (pair.listener, pair.connector):
        numbers: list[object] = []
        while len(numbers) < 40:
            assert select.select([end.fileno()], [], [], 10)[0]
            batch = end.receive()
            assert len(batch) <= 4
            numbers += [message["n"] for _, message in batch]
        assert numbers == list(range(40))


# --- the end of a peer -----------------------------------------------------------------------------------------------


def test_a_peer_that_goes_is_reported_after_its_last_message(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "BATCH", 2)
    for number in range(9):
        pair.connector.send(PEER, {"kind": "last", "n": number})
    pair.connector.close()
    lost: list[bytes] = []
    got = 0
    stop = time.monotonic() + 20
    while not lost and time.monotonic() < stop:
        got += len(pair.listener.receive())
        lost += pair.listener.lost()
    assert (got, lost) == (9, [pair.peer])
    assert not pair.listener.send(pair.peer, {"kind": "late"})
    assert pair.count("control_send_failed") == 1
    assert pair.listener.lost() == []


def test_a_listener_that_goes_is_reported_after_its_last_message(pair: Pair) -> None:
    for number in range(5):
        pair.listener.send(pair.peer, {"kind": "last", "n": number})
    pair.listener.close()
    time.sleep(0.05)
    inbox = pump([pair.connector], lambda box: len(box[pair.connector]) == 5)
    assert [message["n"] for _, message in inbox[pair.connector]] == list(range(5))
    assert select.select([pair.connector.fileno()], [], [], 10)[0]  # there is still the fault to hand out
    for _ in range(2):  # and it stays that way
        with pytest.raises(PeerFault) as caught:
            pair.connector.receive()
        assert caught.value.reason is Reason.PEER_LOST
    assert not pair.connector.send(PEER, {"kind": "late"})
    assert pair.connector.counters.of(Reason.PEER_LOST) == 1


def test_a_fault_that_stays_holds_on_to_nothing_of_its_callers(pair: Pair) -> None:
    """A caller's frame hangs on its traceback, and in the frame whatever it had: a dead client's memory, in a daemon."""

    class Held:
        pass

    def call() -> weakref.ref[Held]:
        held = Held()
        with pytest.raises(PeerFault):
            pump([pair.connector], lambda _box: False)
        return weakref.ref(held)

    pair.listener.close()
    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def test_nothing_slips_into_the_listener_s_next_life() -> None:
    made = Pair()
    endpoint = made.listener.endpoint
    made.listener.close()
    time.sleep(0.1)
    assert not made.connector.send(PEER, {"kind": "of the old session"})  # before anybody called `receive`
    with ControlListener(endpoint) as second, closing(made.connector) as client:
        with pytest.raises(PeerFault, match="peer_lost"):
            pump([client, second], lambda _: False)
        client.send(PEER, {"kind": "of the old session"})
        with ControlConnector(endpoint) as fresh:
            fresh.send(PEER, {"kind": "new"})
            inbox = pump([second], lambda box: bool(box[second]))
        assert [message["kind"] for _, message in inbox[second]] == ["new"]


READY = bytes.fromhex("041c") + b"\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"
GREETING = b"\xff" + bytes(8) + b"\x7f\x03\x01" + b"NULL".ljust(20, b"\0") + bytes(32)


def test_a_peer_that_falls_silent_is_lost_by_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hand-made ZMTP peer that says one thing and then answers no ping."""
    monkeypatch.setattr(control, "HEARTBEAT_MS", 100)
    monkeypatch.setattr(control, "HEARTBEAT_TIMEOUT_MS", 300)
    with closing(Pair()) as made, socket.create_connection(("127.0.0.1", port_of(made.listener))) as silent:
        body = encode_message({"kind": "mute"})
        silent.sendall(GREETING + READY)
        silent.setblocking(False)
        said = b""
        while b"READY" not in said:
            made.listener.receive()
            if select.select([silent], [], [], 0.01)[0]:
                said += silent.recv(4096)
        silent.sendall(b"\0" + bytes([len(body)]) + body)
        ((peer, _),) = pump([made.listener], lambda box: bool(box[made.listener]))[made.listener]
        lost, _ = wait_for_loss([made.listener, made.connector], made.listener)
        assert lost == [peer]
        made.exchange()


# --- strangers -------------------------------------------------------------------------------------------------------

TLS_HELLO = bytes.fromhex("16030100c8010000c40303") + bytes(range(193))
STRANGERS = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "tls": TLS_HELLO,
    "random": bytes((n * 7919 + 13) % 251 for n in range(4096)),
    "greeting then random": GREETING + bytes((n * 7919 + 13) % 251 for n in range(512)),
    "zmtp 1": b"\x01\x00" + b"\x05\x00helo" * 3,
    "zmtp 2": b"\xff" + bytes(8) + b"\x7f\x01\x05\x00\x00" + b"\x00\x04helo",
    "hang-up": b"",
}


@pytest.mark.parametrize("name", STRANGERS)
def test_anything_else_on_the_port_is_cut_off_and_counted(pair: Pair, name: str) -> None:
    with socket.create_connection(("127.0.0.1", port_of(pair.listener))) as stranger:
        stranger.sendall(STRANGERS[name])
        if name == "hang-up":
            stranger.shutdown(socket.SHUT_RDWR)
        inbox = pump([pair.listener], lambda _: pair.count("control_handshake_failed") == 1)
        assert inbox[pair.listener] == []
    pair.exchange()
    assert pair.listener.lost() == []
    assert pair.count("control_handshake_failed") == 1


def test_a_thousand_half_open_or_random_connections_disturb_nobody(pair: Pair) -> None:
    before = resident_bytes()
    address = ("127.0.0.1", port_of(pair.listener))
    strangers = []
    for number in range(1000):
        stranger = socket.create_connection(address)
        strangers.append(stranger)
        if number % 2:
            stranger.sendall(STRANGERS["random"] if number % 4 == 1 else STRANGERS["http"])
        if number % 100 == 0:
            pair.exchange()
    for _ in range(50):
        pair.exchange()
    assert resident_bytes() - before < 64 << 20
    inbox = pump([pair.listener, pair.connector], lambda _: pair.count("control_handshake_failed") == 1000)
    assert inbox[pair.listener] == []
    for stranger in strangers:
        stranger.close()
    pair.exchange()
    assert pair.count("control_handshake_failed") == 1000
    assert pair.listener.lost() == []


def resident_bytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


# --- messages that are none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("frames", "said"),
    (
        ([b"\xc1 not msgpack"], "not a control message"),
        ([b""], "not a control message"),
        ([b"\x91" * 100 + b"\xc0"], "not a control message"),
        ([b"\x80", b"\x80"], "2 parts"),
        ([b"", b"\x80"], "2 parts"),
    ),
)
def test_a_malformed_message_is_answered_with_a_refuse(
    raw: Callable[[ControlListener], zmq.Socket[bytes]], frames: list[bytes], said: str
) -> None:
    with closing(Pair()) as made:
        dealer = raw(made.listener)
        dealer.send_multipart(frames)
        pump([made.listener], lambda _: made.count("control_malformed") == 1)
        assert dealer.poll(10_000)
        answer = decode_message(dealer.recv())
        assert (answer["kind"], answer["reason"]) == ("refuse", "malformed")
        assert said in str(answer["theirs"])
        made.exchange()
        assert made.listener.counters.of(Reason.MALFORMED) == 1
        dealer.send(b"\x80")  # the peer that was refused may go on
        pump([made.listener], lambda box: bool(box[made.listener]))


def test_an_oversize_message_ends_its_connection_alone(
    raw: Callable[[ControlListener], zmq.Socket[bytes]],
) -> None:
    with closing(Pair()) as made:
        dealer = raw(made.listener)
        dealer.send(b"\x80")
        ((peer, _),) = pump([made.listener], lambda box: bool(box[made.listener]))[made.listener]
        dealer.send(bytes(control.MESSAGE_LIMIT + 1024))
        lost, inbox = wait_for_loss([made.listener], made.listener)
        assert lost == [peer]
        assert inbox[made.listener] == []
        made.exchange()


def test_a_malformed_message_from_the_listener_ends_the_connector() -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.bind("tcp://127.0.0.1:*")
    with ControlConnector(str(router.getsockopt_string(zmq.LAST_ENDPOINT))) as client:
        client.send(PEER, {"kind": "hello"})
        assert router.poll(10_000)
        router.send_multipart((router.recv_multipart()[0], b"\xc1"))
        with pytest.raises(PeerFault) as caught:
            pump([client], lambda _: False)
        assert caught.value.reason is Reason.MALFORMED
        assert client.counters.get("control_malformed") == 1
    context.destroy(linger=0)


def test_reports_pass_where_both_ends_allow_them() -> None:
    report: Message = {"kind": "report", "body": {f"h{n}": "x" * 1000 for n in range(500)}}
    with (
        ControlListener(LOOPBACK, message_limit=control.REPORT_LIMIT) as server,
        ControlConnector(server.endpoint, message_limit=control.REPORT_LIMIT) as client,
    ):
        client.send(PEER, report)
        assert pump([server], lambda box: bool(box[server]))[server][0][1] == report
    with ControlListener(LOOPBACK) as server, pytest.raises(LocalMisuse, match="at most 65536"):
        server.send(b"", report)


# --- bounds ----------------------------------------------------------------------------------------------------------


def test_a_peer_that_never_reads_costs_a_bounded_queue_and_never_blocks(
    raw: Callable[[ControlListener], zmq.Socket[bytes]],
) -> None:
    with closing(Pair()) as made:
        dealer = raw(made.listener)
        dealer.setsockopt(zmq.RCVHWM, 1)
        dealer.send(b"\x80")
        ((peer, _),) = pump([made.listener], lambda box: bool(box[made.listener]))[made.listener]
        big: Message = {"kind": "big", "body": [b"x" * 16_000] * 4}
        sent = 0
        while made.listener.send(peer, big):
            sent += 1
            assert sent < 10_000, "no bound"
        assert made.count("control_send_failed") == 1
        made.exchange()


def test_peers_are_bounded_and_a_place_becomes_free_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "HANDSHAKE_MS", 300)  # libzmq lets one that must come again later run into it
    with closing(Pair(max_peers=2)) as made:
        second = ControlConnector(made.listener.endpoint)
        second.send(PEER, {"kind": "second"})
        pump([made.listener], lambda box: bool(box[made.listener]))
        with ControlConnector(made.listener.endpoint) as third:
            third.send(PEER, {"kind": "third"})
            fault = fault_of(made.listener, third)
            assert fault.reason is Reason.AUTH_FAILED
            assert "has no room" in fault.detail
        assert made.listener.counters.of(Reason.OVERLOAD) >= 1
        made.exchange()
        second.close()
        wait_for_loss([made.listener], made.listener)
        with ControlConnector(made.listener.endpoint) as fourth:
            fourth.send(PEER, {"kind": "fourth"})
            inbox = pump([made.listener, fourth], lambda box: bool(box[made.listener]))
            assert inbox[made.listener][0][1] == {"kind": "fourth"}


# --- keys ------------------------------------------------------------------------------------------------------------


def mismatched() -> KeyConfig:
    """A listed public key with another secret."""
    return KeyConfig(CLIENT.public, STRANGER.secret, SERVER.public)


@pytest.mark.parametrize(
    ("keys", "said", "auth_failed"),
    (
        (client_keys(STRANGER), "add this side's public key to its allow-list", 1),
        (client_keys(server=STRANGER.public), "is its public key the one given here", 0),
        (mismatched(), "is its public key the one given here", 0),
        (None, "it asks for keys", 0),
    ),
    ids=["not on the allow-list", "wrong server key", "wrong client key", "no key"],
)
def test_a_key_that_does_not_fit_is_told_from_no_network(keys: KeyConfig | None, said: str, auth_failed: int) -> None:
    with closing(Pair(keys=True)) as made, ControlConnector(made.listener.endpoint, keys) as stranger:
        stranger.send(PEER, {"kind": "let me in"})
        fault = fault_of(made.listener, stranger)
        assert fault.reason is Reason.AUTH_FAILED
        assert said in fault.detail
        assert "\n" not in str(fault)
        pump([made.listener], lambda _: made.count("control_handshake_failed") > 0)
        assert made.listener.counters.of(Reason.AUTH_FAILED) == auth_failed
        assert made.count("control_auth_failed") == auth_failed
        assert stranger.counters.of(Reason.AUTH_FAILED) == 1
        assert made.count("control_received") == 1  # the live peer's
        made.exchange()


def test_a_connector_with_keys_does_not_talk_to_a_listener_without() -> None:
    with ControlListener(LOOPBACK) as server, ControlConnector(server.endpoint, client_keys()) as client:
        client.send(PEER, {"kind": "secret"})
        assert fault_of(server, client).reason is Reason.AUTH_FAILED
        assert server.counters.get("control_received") == 0
