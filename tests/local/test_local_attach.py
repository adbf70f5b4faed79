"""The Unix handshake between real processes: who is let in, what they may touch, and what is left when either side dies."""

from __future__ import annotations

import os
import resource
import select
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path

import pytest
from local_child import geometry
from local_rig import Child, Door, await_gone, descriptors, receive

from pp1q_transport.errors import ConfigError, LocalMisuse, PeerFault, Reason
from pp1q_transport.local.attach import HALF_OPEN, SHORTAGE_NS, Role
from pp1q_transport.local.handshake import ATTACH, MAGIC, VERSION, Answer, parse_answer
from pp1q_transport.staging import Region

pytestmark = pytest.mark.timeout(60)

SECOND_NS = 1_000_000_000
NOBODY = 65534


# -- the honest way


def test_a_target_reads_what_the_daemon_writes_and_records_pass(door: Door) -> None:
    child = door.child("target")
    attached = door.accept()
    assert (attached.role, attached.rank, attached.uid) == (Role.RECEIVER_TARGET, 1, os.getuid())
    assert attached.pid == child.process.pid
    tokens = os.urandom(131_072 * 4)
    for record in ((1, tokens), (2, b""), (0xFFFF, b"last")):
        assert attached.channel.send(*record)
        attached.channel.flush_bell()
        assert receive(attached) == record
    door.region.memory[:4] = b"\xde\xad\xbe\xef"
    attached.channel.send(63, b"")
    attached.channel.flush_bell()
    assert child.line() == "ok deadbeef"
    assert not attached.gone()
    assert door.counters.get("clients_attached") == 1


def test_a_draft_writes_into_its_staging_memory(door: Door) -> None:
    staging = Region(geometry().slots().total_bytes)
    staging.seal_size()
    staging.seal_size()
    child = door.child("draft")
    pending = door.arrival()
    assert pending.role is Role.LEADER_DRAFT
    door.attached.append(door.server.accept(pending, geometry(), [(staging.fd, staging.size)]))
    assert receive(door.attached[0]) == (1, b"")
    assert child.line() == "ok"
    assert staging.memory[:4].tobytes() == b"\x01\x02\x03\x04"
    with pytest.raises(OSError, match="not permitted"):
        os.ftruncate(staging.fd, 0)
    staging.close()


# -- what a process may not do


def test_slot_memory_can_not_be_written_or_cut_by_a_target(door: Door) -> None:
    before = bytes(door.region.memory)
    child = door.child("pry")
    door.accept()
    eperm, eacces = "PermissionError:1", "PermissionError:13"
    expected = {
        "store": "TypeError", "flag": "ValueError", "mmap": eperm, "mprotect": eacces, "write": eperm, "truncate": eperm,
        "grow": eperm, "punch": eperm, "seal": eperm, "reopen": eperm,
    }
    line = child.line()
    assert dict(pair.split("=") for pair in line.removeprefix("ok ").split()) == expected
    assert bytes(door.region.memory) == before
    door.region.memory[0] = 7  # the daemon itself still can
    assert door.region.memory[0] == 7


@pytest.mark.parametrize("what", ("head", "length", "all"))
def test_a_client_that_scribbles_breaks_its_own_channel_only(door: Door, what: str) -> None:
    honest = door.child("target")
    good = door.accept()
    hostile = door.child("scribble", what)
    bad = door.accept()
    assert hostile.line() == "ok"
    with pytest.raises(PeerFault) as raised:
        bad.channel.receive()
    assert raised.value.reason is Reason.LENGTH_BOUNDS
    assert bad.channel.broken is Reason.LENGTH_BOUNDS
    good.channel.send(5, b"still here")
    good.channel.flush_bell()
    assert receive(good) == (5, b"still here")
    assert honest.process.poll() is None


def test_a_client_that_scribbles_over_its_read_index_breaks_the_channel_too(door: Door) -> None:
    hostile = door.child("scribble", "tail")
    bad = door.accept(ring_capacity=4096)
    assert hostile.line() == "ok"
    assert [bad.channel.send(1, bytes(992)) for _ in range(4)] == [True] * 4
    with pytest.raises(PeerFault):
        bad.channel.send(1, bytes(992))


def test_a_client_that_never_receives_fills_its_ring_and_no_more(door: Door) -> None:
    child = door.child("still")
    attached = door.accept(ring_capacity=4096)
    assert child.line() == "ok"
    sent = 0
    while attached.channel.send(1, bytes(92)):
        attached.channel.flush_bell()
        sent += 1
    assert sent == 40
    assert not attached.channel.send(1, bytes(92))
    attached.channel.wait("block", 1_000_000)


def test_another_uid_is_refused_before_it_is_heard(folder: Path) -> None:
    if os.getuid() != 0:
        pytest.skip("needs root to become another user")
    door = Door(str(folder / "daemon.sock"), frozenset((os.getuid(),)))
    try:
        os.chmod(door.path, 0o666)
        child = door.child("as_uid", str(NOBODY))
        give_up = time.monotonic() + 20
        while not door.counters.get("clients_refused"):
            assert time.monotonic() < give_up
            assert door.server.poll(time.monotonic_ns()) == []
            select.select([door.server], [], [], 0.2)
        line = child.line()
        assert line.startswith("PeerFault: auth_failed: ")
        assert f"uid {NOBODY} is not among those that may attach" in line
        assert door.counters.of(Reason.AUTH_FAILED) == 1
        assert door.server.half_open == 0
        os.chmod(door.path, 0o600)
        refused = Child("as_uid", door.path, str(NOBODY))
        assert refused.line().startswith(f"ConfigError: uid {NOBODY} may not connect to daemon.sock: run as")
        refused.end()
    finally:
        door.close()


def test_root_itself_is_refused_unless_allowed(folder: Path) -> None:
    """The list decides, not the rights of a user."""
    door = Door(str(folder / "daemon.sock"), frozenset((NOBODY,)))
    sock = door.connect()
    door.server.poll(0)
    answer = parse_answer(sock.recv(4096))
    assert answer.verdict is (Reason.AUTH_FAILED if os.getuid() != NOBODY else None)
    sock.close()
    door.close()


# -- connections that never become clients


def test_a_silent_connection_is_cut_off_after_a_second(door: Door) -> None:
    child = door.child("silent")
    assert child.line() == "ok"
    assert door.server.poll(SECOND_NS) == []
    assert door.server.half_open == 1
    assert door.server.poll(2 * SECOND_NS - 1) == []
    assert door.server.half_open == 1
    assert door.server.poll(2 * SECOND_NS) == []
    assert door.server.half_open == 0
    assert door.counters.get("clients_silent") == 1


def test_half_open_connections_are_bounded_and_the_oldest_gives_way(door: Door) -> None:
    socks = [door.connect() for _ in range(HALF_OPEN + 2)]
    door.server.poll(0)
    assert door.server.half_open == HALF_OPEN
    assert [sock.recv(1) for sock in socks[:2]] == [b"", b""]
    socks[2].send(ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0))
    (pending,) = door.server.poll(0)
    assert pending.role is Role.ADMIN
    door.server.refuse(pending, Reason.OVERLOAD, "words")
    assert parse_answer(socks[2].recv(4096)) == Answer(Reason.OVERLOAD, "words", None, ())
    for sock in socks:
        sock.close()
    door.server.poll(0)
    assert door.server.half_open == 0


ODD = (
    ("short", b"PP1A", Reason.LENGTH_BOUNDS),
    ("long", bytes(17), Reason.LENGTH_BOUNDS),
    ("far too long", bytes(5000), Reason.LENGTH_BOUNDS),
    ("magic", ATTACH.pack(b"PP1Q", 1, 1, 0, 0), Reason.BAD_MAGIC),
    ("version", ATTACH.pack(MAGIC, 2, 1, 0, 0), Reason.BAD_VERSION),
    ("role 0", ATTACH.pack(MAGIC, 1, 0, 0, 0), Reason.MALFORMED),
    ("role 4", ATTACH.pack(MAGIC, 1, 4, 0, 0), Reason.MALFORMED),
    ("reserved", ATTACH.pack(MAGIC, 1, 1, 0, 1), Reason.RESERVED_BITS),
)


@pytest.mark.parametrize(("name", "data", "reason"), ODD, ids=[name for name, _, _ in ODD])
def test_an_odd_attach_is_refused_by_name(door: Door, name: str, data: bytes, reason: Reason) -> None:
    before = descriptors()
    sock = door.connect()
    sock.send(data)
    assert door.server.poll(0) == []
    answer = parse_answer(sock.recv(4096))
    assert answer.verdict is reason
    assert answer.text
    assert door.counters.of(reason) == 1
    assert door.counters.get("clients_refused") == 1
    sock.close()
    assert descriptors() == before


def test_descriptors_that_a_client_sends_are_not_kept(door: Door) -> None:
    before = descriptors()
    sock = door.connect()
    socket.send_fds(sock, [ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0)], [0, 1, 2])
    (pending,) = door.server.poll(0)
    sock.close()
    door.server.refuse(pending, Reason.OVERLOAD, "")
    assert descriptors() == before


# -- what is left behind


def test_nothing_leaks_on_any_way_out(door: Door) -> None:
    before = descriptors()
    hello = ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0)
    for way in ("accepted", "refused", "left before the answer", "left without a word", "odd geometry", "too many regions"):
        sock = door.connect()
        if way == "left without a word":
            sock.close()
            assert door.server.poll(0) == []
            continue
        sock.send(hello)
        (pending,) = door.server.poll(0)
        if way == "accepted":
            attached = door.server.accept(pending, geometry(), [])
            assert descriptors() - before
            attached.close()
            attached.close()
            del attached
        elif way == "refused":
            door.server.refuse(pending, Reason.LIMITS_MISMATCH, "no")
        elif way == "left before the answer":
            sock.close()
            with pytest.raises(PeerFault) as raised:
                door.server.accept(pending, geometry(), [])
            assert raised.value.reason is Reason.PEER_LOST
            del raised
        else:
            changed = geometry(rank=9) if way == "odd geometry" else geometry()
            with pytest.raises(LocalMisuse, match="can't announce"):
                door.server.accept(pending, changed, [(door.region.fd, door.region.size)] * 17)
        sock.close()
    assert descriptors() == before
    assert door.counters.get("clients_lost") == 1
    assert door.counters.get("clients_silent") == 1


def test_no_descriptor_is_inherited_by_a_program_that_is_started(door: Door) -> None:
    before = descriptors()
    sock = door.connect()
    sock.send(ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0))
    (pending,) = door.server.poll(0)
    attached = door.server.accept(pending, geometry(), [(door.region.fd, door.region.size)])
    new = descriptors() - before
    assert new
    assert not any(os.get_inheritable(fd) for fd in new)
    sock.close()
    attached.close()


def test_running_out_of_descriptors_disturbs_nobody_who_is_attached(door: Door) -> None:
    child = door.child("target")
    attached = door.accept()
    waiting, hello = door.connect(), ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0)
    waiting.send(hello)
    late = door.connect()
    (pending,) = door.server.poll(0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    also_late = door.connect()
    filler: list[int] = []
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(descriptors()) + 4, hard))
        with suppress(OSError):
            while True:
                filler.append(os.dup(0))
        assert door.server.poll(0) == []
        with pytest.raises(ConfigError, match="no memory or descriptors"):
            door.server.accept(pending, geometry(), [])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in filler:
            os.close(fd)
    assert door.counters.get("accept_failed") == 1
    assert waiting.recv(1) == b""
    assert not select.select([door.server], [], [], 0)[0], "who waits in the queue must not keep the loop running"
    assert door.server.poll(SHORTAGE_NS - 1) == []
    assert door.server.half_open == 0
    assert door.server.poll(SHORTAGE_NS) == []
    assert door.server.half_open == 1
    attached.channel.send(5, b"x")
    attached.channel.flush_bell()
    assert receive(attached) == (5, b"x")
    assert child.process.poll() is None
    for sock in (waiting, late, also_late):
        sock.close()


@pytest.mark.parametrize("how", (signal.SIGKILL, signal.SIGTERM))
def test_a_client_that_dies_is_seen(door: Door, how: int) -> None:
    child = door.child("target")
    attached = door.accept()
    attached.channel.send(1, b"x")
    attached.channel.flush_bell()
    receive(attached)
    assert not attached.gone()
    child.process.send_signal(how)
    child.process.wait(20)
    await_gone(attached)
    attached.channel.send(1, b"into the void")
    attached.channel.flush_bell()


def test_a_client_that_speaks_where_nothing_may_be_said_is_gone(door: Door) -> None:
    sock = door.connect()
    sock.send(ATTACH.pack(MAGIC, VERSION, Role.ADMIN, 0, 0))
    (pending,) = door.server.poll(0)
    attached = door.server.accept(pending, geometry(), [])
    assert not attached.gone()
    sock.send(b"psst")
    assert attached.gone()
    attached.close()
    assert attached.gone()
    sock.close()
