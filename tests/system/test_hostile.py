"""What strangers may throw at the data port of a receiver whose session is busy: cut off, counted, and no proposal lost."""

from __future__ import annotations

import os
import resource
import socket
import struct
import time
from contextlib import ExitStack, suppress
from dataclasses import replace

import msgpack
import pytest
from system_live import CLIENT_HELLO, HTTP, NOISE, PROOF_HEADER, SSH, Live, crowd, header_of, server_side, throw
from system_rig import SMALL, Rig, eventually

from pp1q_transport import wire
from pp1q_transport.client import Role, make_hello
from pp1q_transport.control_codec import encode_message
from pp1q_transport.errors import Reason
from pp1q_transport.links.tcp_port import HALF_OPEN
from pp1q_transport.session.negotiate import Connector, Listener
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, proof_frame
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(90)

# ---- the data port ----------------------------------------------------------------------------------------------------


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


def test_frames_of_the_tables_are_what_they_say() -> None:
    """The attacks above fail for the reason named, not for a mistake in their making."""
    assert len(PROOF_HEADER) == wire.HEADER_BYTES
    assert len(PROOF_HEADER + bytes(32)) == PROOF_FRAME_BYTES
    header = Header()
    assert header.decode(PROOF_HEADER, 0) == 0
    assert PROOF_HEADER.startswith(wire.MAGIC)
    record = struct.unpack_from(">BHH", CLIENT_HELLO)
    assert record == (0x16, 0x0301, len(CLIENT_HELLO) - 5)
