"""What strangers may throw at both ports of a receiver whose session is busy: cut off, counted, and no proposal lost."""

from __future__ import annotations

import os
import random
import resource
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from typing import Any

import msgpack
import pytest
import zmq
from system_rig import PROMPT, SMALL, Rig, consume, eventually

from pp1q_transport import wire
from pp1q_transport.client import Role, make_hello
from pp1q_transport.control import ControlConnector
from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.keys import KeyConfig, new_pair
from pp1q_transport.links.tcp_port import HALF_OPEN
from pp1q_transport.session.negotiate import Connector, Listener, goodbye_message, to_map
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, proof_frame
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(90)

SERVER, CLIENT, STRANGER = new_pair(), new_pair(), new_pair()
SERVER_KEYS = KeyConfig(SERVER.public, SERVER.secret, allow=frozenset({CLIENT.public}))
CLIENT_KEYS = KeyConfig(CLIENT.public, CLIENT.secret, server_public=SERVER.public)

HTTP = b"GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: curl/8.5.0\r\nAccept: */*\r\n\r\n"
# A TLS 1.2 record with a minimal ClientHello: version, random, no session, one suite, null compression.
CLIENT_HELLO = bytes.fromhex("160301002f0100002b0303") + bytes(range(32)) + bytes.fromhex("000002130101000000")
SSH = b"SSH-2.0-OpenSSH_9.6\r\n"
NOISE = random.Random(20260)


class Live:
    """A receiver with a running session: one thread drafts, one verifies, round after round, until `stop`."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        self.counters = rig.receiver.counters
        self.rounds = 0
        self.lost: list[BaseException] = []
        self._ending, self._drafted = threading.Event(), threading.Event()
        rig.connect()
        session = rig.receiver.session
        assert session is not None
        self.session = session.terms.session
        self._threads = [threading.Thread(target=run, daemon=True) for run in (self._verify, self._draft)]
        for thread in self._threads:
            thread.start()

    def _draft(self) -> None:
        self._guard(self._draft_all)

    def _draft_all(self) -> None:
        while not self._drafted.is_set():
            step = self.rig.leader.next_step(1_000_000)
            if step is not None:
                self.rig.draft(step)

    def _verify(self) -> None:
        self._guard(self._verify_all)

    def _verify_all(self) -> None:
        receiver = self.rig.receiver
        requests = [receiver.open_request(one, PROMPT, seed=one) for one in (1, 2)]
        while not self._ending.is_set():
            tickets = [receiver.enqueue(request, support=16, budget_us=60_000_000) for request in requests]
            for request, ticket in zip(requests, tickets, strict=True):
                with ticket.wait() as proposal:
                    consume(self.rig.models, receiver, request, proposal)
                self.rounds += 1

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as fault:  # noqa: BLE001 - shown by `check`
            self.lost.append(fault)

    def port_of(self, plane: str) -> tuple[str, int]:
        forming = self.rig.receiver.engine._forming
        assert forming._port is not None
        endpoint = forming._port.endpoint if plane == "data" else self.rig.receiver.endpoint
        host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
        return host, int(port)

    def more_rounds(self, count: int = 20) -> None:
        """So many more rounds pass."""
        goal = self.rounds + count
        self.until(lambda: self.rounds >= goal)

    def until(self, condition: Callable[[], object]) -> None:
        eventually(lambda: self.lost or condition(), lambda: time.sleep(0.001), 30.0)
        assert not self.lost, self.lost[0]

    def stop(self) -> None:
        for event, thread in zip((self._ending, self._drafted), self._threads, strict=True):
            event.set()
            thread.join(30)

    def check(self) -> None:
        """Nobody noticed: one session, the same one, every proposal ready, every slot free."""
        self.more_rounds()
        self.stop()
        assert not self.lost, self.lost[0]
        receiver = self.rig.receiver
        assert receiver.session is not None
        assert receiver.session.terms.session == self.session
        assert self.counters.get("sessions") == self.rig.leader.counters.get("sessions") == 1
        assert self.counters.get("discarded") == 0
        assert receiver.totals()["ready"] == self.rounds
        assert self.rig.all_free()


@contextmanager
def running(**options: Any) -> Iterator[Live]:
    with Rig(**options) as rig:
        live = Live(rig)
        try:
            yield live
            live.check()
        finally:
            live.stop()


@pytest.fixture
def live() -> Iterator[Live]:
    """A busy session that must not have noticed anything by the end of the test."""
    with running() as busy:
        yield busy


@pytest.fixture
def guarded() -> Iterator[Live]:
    """The same behind CURVE with an allow-list."""
    with running(receiver={"keys": SERVER_KEYS}, leader={"keys": CLIENT_KEYS}) as busy:
        yield busy


def throw(address: tuple[str, int], data: bytes, linger_s: float = 20.0) -> bytes:
    """Sends `data`, waits until the other side hangs up, returns what it said."""
    said = b""
    with socket.create_connection(address) as sock:
        sock.settimeout(linger_s)
        with suppress(ConnectionError):
            sock.sendall(data)
            while more := sock.recv(4096):
                said += more
    return said


# ---- the data port ----------------------------------------------------------------------------------------------------


def header_of(kind: int, **fields: int) -> bytes:
    header = Header()
    header.clear()
    header.kind = kind
    for name, value in ({"session": 5, "boot_nonce": 9} | fields).items():
        setattr(header, name, value)
    frame = bytearray(wire.HEADER_BYTES)
    header.encode(frame, 0)
    return bytes(frame)


PROOF_HEADER = header_of(wire.PROOF, payload_length=wire.PROOF_BYTES, payload_digest=1, subject=1)


def flipped(data: bytes, bit: int) -> bytes:
    changed = bytearray(data)
    changed[bit // 8] ^= 1 << bit % 8
    return bytes(changed)


DATA_STRANGERS: dict[str, tuple[bytes, str]] = {
    "http": (HTTP, "bad_magic"),
    "tls": (CLIENT_HELLO, "bad_magic"),
    "ssh": (SSH, "bad_magic"),
    "zmtp greeting": (b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(48), "bad_magic"),
    "msgpack hello": (msgpack.packb({"kind": "hello", "wire_version": 1}), "bad_magic"),
    "magic in the wrong case": (b"pp1q" + bytes(156), "bad_magic"),
    "magic and zeros": (wire.MAGIC + bytes(156), "bad_version"),
    "version 1": (wire.MAGIC + b"\x01" + PROOF_HEADER[5:] + bytes(32), "bad_version"),
    "bad digest": (flipped(PROOF_HEADER, 8 * 127) + bytes(32), "header_digest"),
    "flip in the session": (flipped(PROOF_HEADER, 8 * 20) + bytes(32), "header_digest"),
    "unknown kind": (header_of(99) + bytes(32), "unknown_kind"),
    "a STEP before the proof": (header_of(wire.STEP) + bytes(32), "unexpected_kind"),
    "a STATUS before the proof": (header_of(wire.STATUS, status=3) + bytes(32), "unexpected_kind"),
    "a proof of another length": (
        header_of(wire.PROOF, payload_length=64, payload_digest=1, subject=1) + bytes(64),
        "length_bounds",
    ),
    "a proof of no session": (PROOF_HEADER + bytes(32), "session_mismatch"),
    "half a magic, then gone": (b"", "peer_lost"),
}


@pytest.mark.parametrize("name", DATA_STRANGERS)
def test_a_stranger_on_the_data_port_is_cut_off_with_a_reason(live: Live, name: str) -> None:
    data, reason = DATA_STRANGERS[name]
    if reason == "peer_lost":
        with socket.create_connection(live.port_of("data")) as sock:
            sock.sendall(wire.MAGIC[:2])
    else:
        assert throw(live.port_of("data"), data) == b"", "strangers are told nothing"
    live.until(lambda: live.counters.reasons.get(reason))
    live.until(lambda: live.counters.get("links_cut_off") == 1)
    assert set(live.counters.reasons) == {reason}


@pytest.mark.parametrize("size", (1, 2, 3, 4, 5, 127, 128, 129, 159, 160, 161, 4096, 1 << 20))
def test_random_bytes_on_the_data_port(live: Live, size: int) -> None:
    data = NOISE.randbytes(size)
    data = bytes([data[0] | 0x80]) + data[1:]  # never the first byte of the magic
    throw(live.port_of("data"), data)
    live.until(lambda: live.counters.of(Reason.BAD_MAGIC) == 1)


@pytest.mark.parametrize("size", (1, 60, 123, 124, 155, 156, 4096))
def test_random_bytes_behind_the_right_magic(live: Live, size: int) -> None:
    """Fewer than a header: the second decides. More: the header does."""
    throw(live.port_of("data"), wire.MAGIC + b"\x02" + NOISE.randbytes(size))
    live.until(lambda: live.counters.get("links_cut_off") == 1)
    (reason,) = live.counters.reasons
    assert reason in ("timeout", "unknown_kind", "header_digest", "bad_version")


def test_proofs_of_other_sessions_replays_and_reflections(live: Live) -> None:
    """All valid once, in their place."""
    mine, theirs = live.rig.leader.engine.agreement, live.rig.receiver.engine.agreement
    assert mine is not None
    assert theirs is not None
    assert mine.session == live.session
    connector = Connector(make_hello(Role.LEADER, 12, **SMALL), encode_message, os.urandom)
    listener = Listener(make_hello(Role.RECEIVER, 11, **SMALL), "tcp://127.0.0.1:9", encode_message, os.urandom)
    foreign = connector.receive(listener.receive(connector.start(0), 0)[0], 0)
    for count, agreement in enumerate((mine, mine, theirs, foreign), 1):
        assert throw(live.port_of("data"), proof_frame(agreement)) == b""
        live.until(lambda count=count: live.counters.of(Reason.SESSION_MISMATCH) == count)


def test_a_wrong_secret_for_a_session_that_waits_for_its_link() -> None:
    """The one session ID that the port listens for, and everything right but the secret."""
    with Rig() as rig:
        port, pending = rig.receiver.engine._forming._port, rig.receiver.engine._forming._pending
        assert port is not None
        connector = Connector(make_hello(Role.LEADER, 12, **SMALL), encode_message, os.urandom)
        listener = Listener(make_hello(Role.RECEIVER, 11, **SMALL), port.endpoint, encode_message, os.urandom)
        now_ns = time.monotonic_ns()
        answer, ours = listener.receive(connector.start(now_ns), now_ns)
        theirs = connector.receive(answer, now_ns)
        pending[theirs.session] = (b"peer", replace(ours, prove_by_ns=now_ns + 60_000_000_000))  # type: ignore[type-var, arg-type]
        host, number = port.endpoint.removeprefix("tcp://").rsplit(":", 1)
        guess = replace(theirs, secret=bytes(32))
        with socket.create_connection((host, int(number))) as sock:
            sock.sendall(proof_frame(guess))
            eventually(lambda: rig.receiver.counters.of(Reason.AUTH_FAILED), rig.receiver.poll)
        assert not rig.receiver.up
        # Every single flip of the right proof fails for a named reason, and the right one still joins.
        right = proof_frame(theirs)
        for bit in NOISE.sample(range(8 * len(right)), 40):
            before = rig.receiver.counters.get("links_cut_off")
            with socket.create_connection((host, int(number))) as sock:
                sock.sendall(flipped(right, bit))
                eventually(lambda before=before: rig.receiver.counters.get("links_cut_off") > before, rig.receiver.poll)
            assert not rig.receiver.up
        with socket.create_connection((host, int(number))) as sock:
            sock.sendall(right)
            eventually(lambda: rig.receiver.up, rig.receiver.poll)


def test_a_slow_loris_on_the_data_port_has_one_second(live: Live) -> None:
    """A byte every so often, each a right one."""
    frame = PROOF_HEADER + bytes(32)
    sent = 0
    with socket.create_connection(live.port_of("data")) as sock:
        for byte in frame:
            try:
                sock.sendall(bytes([byte]))
            except ConnectionError:
                break
            sent += 1
            if live.counters.get("links_cut_off"):
                break
            time.sleep(0.1)
    assert sent < len(frame)
    live.until(lambda: live.counters.of(Reason.TIMEOUT) == 1)


@pytest.fixture
def descriptors() -> Iterator[int]:
    """Room for thousands of sockets, ours and the attacker's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if wanted < 2600:
        pytest.skip(f"RLIMIT_NOFILE allows {hard} descriptors; a thousand connections to each port need 2600")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def server_side(port: int) -> int:
    """How many established connections this process holds on a listening port of its own (IPv4)."""
    with open("/proc/net/tcp") as table:
        rows = [line.split() for line in table.readlines()[1:]]
    return sum(1 for row in rows if int(row[1].split(":")[1], 16) == port and row[3] == "01" and row[9] != "0")


def crowd(address: tuple[str, int], count: int, stack: ExitStack) -> Sequence[socket.socket]:
    """So many connections that say nothing; a full backlog is waited for."""
    socks = []
    for _ in range(count):
        socks.append(stack.enter_context(socket.create_connection(address, timeout=30)))
    return socks


def test_a_thousand_half_open_links_are_bounded(live: Live, descriptors: int) -> None:
    most = thrown = 0
    data_port = live.rig.receiver.engine._forming._port
    assert data_port is not None
    with ExitStack() as stack:
        _, port = live.port_of("data")
        for _ in range(20):
            crowd(live.port_of("data"), 50, stack)
            thrown += 50
            most = max(most, data_port.half_open)
            # A full backlog makes clients wait a second for their next SYN: that is no defence, only slow to test.
            live.until(lambda thrown=thrown: live.counters.get("links_cut_off") + data_port.half_open >= thrown)
        live.more_rounds()
        live.until(lambda: live.counters.get("links_cut_off") == 1000)
        assert server_side(port) == 1, "the session's own link is left"
    assert most <= HALF_OPEN
    assert set(live.counters.reasons) <= {"overload", "timeout", "peer_lost"}
    assert sum(live.counters.reasons.values()) == 1000


@pytest.mark.slow
def test_a_thousand_half_open_control_connections_are_ended(live: Live, descriptors: int) -> None:
    with ExitStack() as stack:
        crowd(live.port_of("control"), 1000, stack)
        live.more_rounds()
        live.until(lambda: live.counters.get("control_handshake_failed") == 1000)
        _, port = live.port_of("control")
        live.until(lambda: server_side(port) == 1)


def test_running_out_of_descriptors_disturbs_nobody(live: Live) -> None:
    """The port can't accept: it sheds what is half-open and goes on; the session never notices."""
    with ExitStack() as stack:
        socks = crowd(live.port_of("data"), 20, stack)
        live.until(lambda: live.rig.receiver.engine._forming._port.half_open)  # type: ignore[union-attr]
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        late = [socket.socket() for _ in range(10)]
        used = max(int(name) for name in os.listdir("/proc/self/fd"))
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (used, hard))
            with suppress(OSError):
                while True:
                    stack.enter_context(open(os.devnull))
            for sock in late:
                sock.connect(live.port_of("data"))
            live.until(lambda: live.counters.get("accept_failed"))
            live.more_rounds()
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for sock in [*socks, *late]:
            sock.close()


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
    peer = live.rig.receiver.engine._forming._peer
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


def test_frames_of_the_tables_are_what_they_say() -> None:
    """The attacks above fail for the reason named, not for a mistake in their making."""
    assert len(PROOF_HEADER) == wire.HEADER_BYTES
    assert len(PROOF_HEADER + bytes(32)) == PROOF_FRAME_BYTES
    header = Header()
    assert header.decode(PROOF_HEADER, 0) == 0
    assert PROOF_HEADER.startswith(wire.MAGIC)
    record = struct.unpack_from(">BHH", CLIENT_HELLO)
    assert record == (0x16, 0x0301, len(CLIENT_HELLO) - 5)
