"""Processes that attach to a daemon and break every rule: each is refused or contained and counted, the daemon lives, and the
other target of the same leader does not notice (must-show 6 of the sidecar)."""

from __future__ import annotations

import ctypes
import fcntl
import itertools
import mmap
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from daemon_rig import PROMPT, VOCAB, WATCHDOG_S, Bed, Target, drafting, two_targets
from hostile import Raw, header_noise, odd_record, scribble

from pp1q_transport.client import Proposal, attach_receiver
from pp1q_transport.errors import PeerFault, ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.local.handshake import Role
from pp1q_transport.session.requests import Request

pytestmark = pytest.mark.timeout(180)

CHILD = Path(__file__).with_name("hostile.py")
MAX = (1 << 32) - 1
FRESH = itertools.count(1 << 40)


class World:
    """A leader daemon with two targets: one is attacked at `receiver0` (or the draft is), one must not notice at `receiverb`."""

    def __init__(self, bed: Bed) -> None:
        self.bed = bed
        self.pids = {name: bed.pid(name) for name in bed.daemons}
        self.other = bed.receiver("receiverb")
        self.other.wait_for_peer()
        self.account = Target(bed, self.other)
        self.request: Request = self.other.open_request(next(FRESH), PROMPT, seed=5)

    def alive(self) -> None:
        """Every daemon is the same process and answers."""
        for name, pid in self.pids.items():
            assert self.bed.pid(name) == pid
            self.bed.status(name)

    def undisturbed(self) -> None:
        """The other target's proposal is ready, in the session it always had."""
        assert self.account.round(self.request), self.account.reasons
        assert self.bed.status("receiverb")["sessions"][0]["formed"] == 1

    def gone(self, name: str) -> None:
        """Nobody is attached to a daemon any more."""
        self.bed.until(lambda: not self.bed.status(name)["clients"], f"{name} is rid of its client")

    def well_again(self) -> None:
        """After the attacker: an honest target at `receiver0` gets a proposal, all slots are FREE after it."""
        self.gone("receiver0")
        self.bed.sessions_up()
        with self.bed.receiver() as honest:
            honest.wait_for_peer()
            target = Target(self.bed, honest)
            request = honest.open_request(next(FRESH), PROMPT, seed=6)  # an attacker may have spent the IDs it used
            target.until_ready(request)
        self.gone("receiver0")
        slots = self.bed.status("receiver0")["slots"]
        assert sum(slots.values()) == slots["FREE"], slots


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    """One set of daemons for all attacks: what one leaves behind must not matter to the next."""
    with two_targets() as made:
        made.edit("receiver0", lambda text: text + "\n[watch]\nrelease_after_s = 0.3\n\n[breaker]\nenabled = false\n")
        made.edit("receiverb", lambda text: text + "\n[breaker]\nenabled = false\n")
        yield made.up()


@pytest.fixture
def world(bed: Bed) -> Iterator[World]:
    """An honest draft, and an honest target at the other daemon."""
    bed.sessions_up()
    with drafting(bed):
        made = World(bed)
        made.request = made.request
        before = made.bed.status("receiverb")["sessions"][0]["formed"]
        assert before == 1, "an earlier attack was noticed"
        yield made
        made.undisturbed()
        made.other.close()


@contextmanager
def child(act: str, path: str) -> Iterator[subprocess.Popen[str]]:
    """A hostile process; its first line was printed when the block begins."""
    process = subprocess.Popen(
        [sys.executable, str(CHILD), act, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ}
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate(timeout=20)


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline()


# ---- a target that breaks rules -----------------------------------------------------------------------------------------


def attacks(world: World, seed: int, count: int, act: Callable[[Raw, random.Random], object]) -> int:
    """`count` attached attackers in turn, each doing `act`; how many of them were cut off."""
    cut = 0
    seeded = random.Random(seed)
    for _ in range(count):
        raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
        try:
            act(raw, seeded)
            world.bed.status("receiver0")  # the daemon has looked at it by now, or at the next turn
            world.bed.status("receiver0")
            cut += raw.cut
        finally:
            raw.close()
        world.gone("receiver0")
        world.undisturbed()
    return cut


def test_scribbling_over_indexes_and_records(world: World) -> None:
    before = world.bed.counters("receiver0").get("clients_cut_off", 0)
    cut = attacks(world, 31, 60, scribble)
    assert cut >= 10
    assert world.bed.counters("receiver0")["clients_cut_off"] - before >= cut
    assert world.bed.status("receiver0")["reasons"]["length_bounds"] >= 10
    world.alive()
    world.well_again()


def test_noise_for_record_headers(world: World) -> None:
    assert attacks(world, 32, 40, header_noise) >= 20
    world.alive()
    world.well_again()


def test_true_records_with_impossible_values(world: World) -> None:
    """Thousands of them, in and out of place, against a daemon that has a session, slots and open requests."""
    refused_before = world.bed.status("receiver0")["totals"].get("client_misuse", 0)

    def act(raw: Raw, seeded: random.Random) -> None:
        raw.send(m.OPEN, 1, 9, MAX, 0, 0, 2, payload=b"\x01\0\0\0\x02\0\0\0")
        raw.send(m.STEP, 1, 1, 0, 0, 1.0, 0, 0, 3, 16, 5_000_000, 0)
        names: dict[str, tuple[int, ...]] = {
            "request": (1, 1, 1, 2), "depth": (1, 3), "support": (0, 16), "budget_us": (1, 1000, 10_000_000), "source": (1, 2),
            "generation": (0, 1, 2, MAX - 1, MAX), "round": (0, 1, 2, 3, MAX - 1, MAX), "slot": tuple(range(16)),
            "slot_generation": (1, 2, 3, 4, 5), "accepted": (0, 1, 2), "max_position": (MAX, MAX, 2, 100),
        }  # fmt: skip
        for number in range(60):
            known = names | {"ticket": (number + 10,)}
            raw.body(*odd_record(seeded, known))
            if raw.cut:
                return

    attacks(world, 33, 80, act)
    assert world.bed.status("receiver0")["totals"]["client_misuse"] > refused_before
    world.alive()
    world.well_again()


HOSTILE_RECORDS: dict[str, tuple[list[tuple[int, tuple[int | float, ...], bytes]], Reason | None]] = {
    "a token beyond the vocabulary": ([(m.OPEN, (1, 9, MAX, 0, 0, 1), VOCAB.to_bytes(4, "little"))], None),
    "a negative token": ([(m.OPEN, (1, 9, MAX, 0, 0, 1), b"\xff\xff\xff\xff")], None),
    "no tokens": ([(m.OPEN, (1, 9, MAX, 0, 0, 0), b"")], None),
    "the last generation": (
        [(m.OPEN, (1, 9, MAX, MAX, 0, 1), b"\1\0\0\0"), (m.STEP, (1, 1, 0, 0, 1.0, MAX, 0, 3, 16, 1000, 0), b"")],
        None,
    ),
    "the last round": (
        [(m.OPEN, (1, 9, MAX, 0, MAX, 1), b"\1\0\0\0"), (m.STEP, (1, 1, 0, 0, 1.0, 0, MAX, 3, 16, 1000, 0), b"")],
        None,
    ),
    "an unknown request": ([(m.STEP, (77, 1, 0, 0, 1.0, 0, 0, 3, 16, 1000, 0), b""), (m.CLOSE, (78,), b"")], None),
    "a slot that is none": ([(m.RELEASE, (16, 1), b"")], Reason.SLOT_BOUNDS),
    "a slot far away": ([(m.RELEASE, (MAX, MAX), b"")], Reason.SLOT_BOUNDS),
    "a release of nothing": ([(m.RELEASE, (3, MAX), b"")], None),
    "a ticket twice": (
        [
            (m.OPEN, (1, 9, MAX, 0, 0, 1), b"\1\0\0\0"),
            *((m.STEP, (1, 4, 0, 0, 1.0, 0, number, 3, 16, 9_000_000, 0), b"") for number in (0, 1)),
        ],
        Reason.REQUEST_DUPLICATE,
    ),
    "more accepted than committed": (
        [(m.OPEN, (1, 9, MAX, 0, 0, 1), b"\1\0\0\0"), (m.COMMIT, (1, 0, 0, 0, 1, 5, 1, 0, 0), b"\1\0\0\0")],
        Reason.CONTEXT_MISMATCH,
    ),
    "accepted by itself": (
        [(m.OPEN, (1, 9, MAX, 0, 0, 1), b"\1\0\0\0"), (m.COMMIT, (1, 0, 0, 0, 2, 1, 1, 0, 0), b"\1\0\0\0")],
        Reason.CONTEXT_MISMATCH,
    ),
    "a source that is none": (
        [(m.OPEN, (1, 9, MAX, 0, 0, 1), b"\1\0\0\0"), (m.COMMIT, (1, 0, 0, 0, 7, 0, 1, 0, 0), b"\1\0\0\0")],
        Reason.CONTEXT_MISMATCH,
    ),
    "tokens beyond the last position": (
        [(m.OPEN, (1, 9, 1, 0, 0, 1), b"\1\0\0\0"), (m.COMMIT, (1, 0, 0, 0, 2, 0, 2, 0, 0), b"\1\0\0\0\1\0\0\0")],
        Reason.CONTEXT_MISMATCH,
    ),
    "a draft's record": ([(m.PUT, (0, 0, 0, 1, 1, 1, 1, 8, 0), b"")], Reason.UNEXPECTED_KIND),
    "a daemon's record": ([(m.UP, (1, 0, 0), b"")], Reason.UNEXPECTED_KIND),
}


@pytest.mark.parametrize("name", HOSTILE_RECORDS)
def test_each_impossible_value_is_refused_by_name(world: World, name: str) -> None:
    """A wrong value costs a REFUSED record and a count; what lets the two sides differ, or no honest one says, the channel."""
    records, reason = HOSTILE_RECORDS[name]
    before = world.bed.status("receiver0")
    raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
    request = next(FRESH)
    for kind, fields, payload in records:
        theirs = (request, *fields[1:]) if kind in (m.OPEN, m.STEP, m.COMMIT) and fields[0] == 1 else fields
        raw.channel.send(kind, m.pack(kind, *theirs), payload)
    raw.channel.flush_bell()
    if reason is not None:
        world.bed.until(lambda: raw.cut, "cut off")
        now = world.bed.status("receiver0")
        assert now["reasons"].get(reason.value, 0) == before["reasons"].get(reason.value, 0) + 1
        assert now["totals"]["clients_cut_off"] == before["totals"].get("clients_cut_off", 0) + 1
    else:
        world.bed.status("receiver0")
        world.bed.status("receiver0")
        assert not raw.cut
    raw.close()
    assert world.bed.status("receiver0")["sessions"][0]["formed"] == before["sessions"][0]["formed"], "no session was lost by it"
    world.well_again()


def test_a_last_generation_does_not_outlive_its_session() -> None:
    """The session's end would raise it beyond u32: the request goes, the daemon does not."""
    with Bed() as bed:
        bed.up()
        pid = bed.pid("receiver0")
        raw = Raw(bed.socket("receiver0"), Role.RECEIVER_TARGET)
        raw.send(m.OPEN, 1, 9, MAX, MAX, 0, 1, payload=b"\1\0\0\0")
        bed.until(lambda: bed.status("receiver0")["loops"] > 2, "heard")
        bed.kill("leader")
        bed.until(lambda: bed.counters("receiver0").get("requests_exhausted"), "the request is gone")
        assert bed.pid("receiver0") == pid
        raw.send(m.OPEN, 1, 9, MAX, 0, 0, 1, payload=b"\1\0\0\0")
        bed.until(lambda: bed.counters("receiver0").get("client_misuse"), "its ID is spent, which is said and costs nothing else")
        assert not raw.cut
        raw.close()


def test_memory_can_be_neither_shrunk_nor_written(world: World) -> None:
    raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    region, size = raw.regions[0], raw.sizes[0]
    again = os.open(f"/proc/self/fd/{region}", os.O_RDWR)

    def protect() -> None:
        address = libc.mmap(None, size, mmap.PROT_READ, mmap.MAP_SHARED, region, 0)
        if libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_WRITE):
            raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))

    tries: list[Callable[[], object]] = [
        *(lambda fd=fd, size=size: os.ftruncate(fd, size) for fd in (raw.channel_fd, region, again) for size in (0, 1 << 30)),
        lambda: mmap.mmap(region, size, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: mmap.mmap(again, size, prot=mmap.PROT_READ | mmap.PROT_WRITE),
        lambda: os.pwrite(region, b"x", 0),
        lambda: os.pwrite(again, b"x", 0),
        lambda: fcntl.fcntl(region, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        lambda: fcntl.fcntl(raw.channel_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE),
        protect,
    ]
    for number, attempt in enumerate(tries):
        with pytest.raises(OSError, match=r"Operation not permitted|Permission denied"):
            print(number, attempt())
    os.close(again)
    raw.close()
    world.well_again()


def test_bells_that_are_abused(world: World) -> None:
    """An eventfd is shared with its flags: one that blocks, rings for ever or is drained must not stop the daemon."""
    raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
    flags = fcntl.fcntl(raw.bell, fcntl.F_GETFL)
    fcntl.fcntl(raw.bell, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
    for _ in range(50):
        os.eventfd_write(raw.bell, (1 << 63) if _ == 0 else 1)
        world.bed.status("receiver0")
    for _ in range(50):
        raw.send(m.STEP, 5, 1, 0, 0, 1.0, 0, 0, 3, 16, 1000, 0)
        try:
            fcntl.fcntl(raw.bell, fcntl.F_SETFL, flags | os.O_NONBLOCK)
            os.eventfd_read(raw.bell)
        except BlockingIOError:
            pass
        fcntl.fcntl(raw.bell, fcntl.F_SETFL, flags & ~os.O_NONBLOCK)
        world.bed.status("receiver0")
    nothing = os.open("/dev/null", os.O_RDONLY)
    for fd in (raw.sleeps, raw.channel.fileno()):  # what the daemon rings has nobody at its end now
        os.dup2(nothing, fd)
    os.close(nothing)
    for _ in range(20):
        raw.send(m.STEP, 5, 1, 0, 0, 1.0, 0, 0, 3, 16, 1000, 0)
        world.bed.status("receiver0")
    world.undisturbed()
    raw.close()
    world.alive()
    world.well_again()


def test_a_word_on_the_socket_ends_the_client(world: World) -> None:
    raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
    raw.sock.send(b"hello")
    world.bed.until(lambda: raw.cut, "cut off")
    raw.close()
    world.well_again()


# ---- clients that do nothing -------------------------------------------------------------------------------------------


def test_those_who_never_say_who_they_are_are_bounded_and_cut(world: World) -> None:
    before = world.bed.counters("receiver0").get("clients_silent", 0)
    socks = [socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(30)]
    for sock in socks:
        sock.connect(world.bed.socket("receiver0"))
    with world.bed.receiver() as honest:
        honest.wait_for_peer()
        target = Target(world.bed, honest)
        assert target.round(honest.open_request(next(FRESH), PROMPT, seed=3))
        world.bed.until(lambda: world.bed.counters("receiver0")["clients_silent"] >= before + 30, "all of them cut")
    for sock in socks:
        sock.close()


@pytest.mark.slow
def test_one_that_never_reads_is_cut_off(world: World) -> None:
    """Every STEP for an unknown request owes it a DISCARDED. The ring fills, then what is kept, then its time is over."""
    raw = Raw(world.bed.socket("receiver0"), Role.RECEIVER_TARGET)
    body = m.pack(m.STEP, 5, 1, 0, 0, 1.0, 0, 0, 3, 16, 1000, 0)
    stop = time.monotonic() + WATCHDOG_S
    while not raw.cut:
        assert time.monotonic() < stop
        for _ in range(2000):
            if not raw.channel.send(m.STEP, body):
                break
        raw.channel.flush_bell()
        world.undisturbed()
    assert "it takes nothing and is owed" in world.bed.parts["receiver0"].log.read_text(encoding="utf-8")
    raw.close()
    world.well_again()


def test_one_that_never_releases_loses_its_slots_when_it_is_gone(world: World) -> None:
    receiver = world.bed.receiver()
    receiver.wait_for_peer()
    held: list[Proposal] = []
    with suppress(ProposalDiscarded):  # quarantine is bounded: past that the session ends
        for number in range(1, 17):
            held.append(receiver.step(receiver.open_request(next(FRESH), PROMPT, seed=number), support=16))
            world.undisturbed()
    assert len(held) >= 8
    world.bed.until(lambda: world.bed.status("receiver0")["slots"]["QUARANTINE"] >= 8, "overdue")
    assert world.bed.counters("receiver0")["overdue"] >= 8
    world.undisturbed()
    receiver._attachment.sock.close()  # type: ignore[union-attr]  # as a process that dies
    world.well_again()


def test_one_that_is_stopped_holds_nobody_else_and_its_death_frees_its_slots(world: World) -> None:
    with child("hold", world.bed.socket("receiver0")) as process:
        assert line_of(process) == "ok\n"
        process.send_signal(signal.SIGSTOP)
        with pytest.raises(PeerFault) as refused:
            attach_receiver(world.bed.socket("receiver0"))
        assert refused.value.reason is Reason.OVERLOAD
        world.bed.until(lambda: world.bed.status("receiver0")["slots"]["QUARANTINE"] == 1, "its proposal is overdue")
        for _ in range(5):
            world.undisturbed()
    world.well_again()


def test_another_user_is_refused_by_the_kernels_word(world: World) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can become another user: run as root to see it refused")
    path, home = world.bed.socket("receiver0"), world.bed.home
    home.chmod(0o755)
    try:
        with child("stranger", path) as process:
            assert "may not connect" in line_of(process)
        os.chmod(path, 0o666)  # a careless administrator: the daemon must not rely on the file's mode
        before = world.bed.status("receiver0")["reasons"].get("auth_failed", 0)
        with child("stranger", path) as process:
            assert line_of(process).startswith("auth_failed: ")
        assert world.bed.status("receiver0")["reasons"]["auth_failed"] == before + 1
    finally:
        os.chmod(path, 0o600)
        home.chmod(0o700)
