"""The C header against the Python side: every struct's layout, records both ways, the example, a daemon that passes nonsense."""

from __future__ import annotations

import os
import random
import shutil
import socket
import struct
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from local_child import geometry
from local_rig import Door, await_gone, receive
from test_local_attach_client import CAPACITY, GIVEN, SIZE, WELCOME, bell, channel_memfd, memfd

from pp1q_transport.errors import Reason
from pp1q_transport.local import handshake, messages
from pp1q_transport.local.attach import Attached, Role
from pp1q_transport.local.messages import TABLE
from pp1q_transport.staging import SlotViews

pytestmark = pytest.mark.timeout(100)

ROOT = Path(__file__).parents[2]
FLAGS = ("-O2", "-Wall", "-Wextra", "-Werror", f"-I{ROOT / 'include'}")
SANITIZE = ("-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
CROSS = "aarch64-linux-gnu-gcc"
EMULATOR = shutil.which("qemu-aarch64") or shutil.which("qemu-aarch64-static")
C_BYTES = {"Q": 8, "d": 8, "I": 4, "i": 4, "H": 2}


def compile_c(out: Path, source: Path | str, *flags: str, compiler: str = "cc") -> Path:
    if isinstance(source, str):
        (out.parent / "source.c").write_text(source)
        source = out.parent / "source.c"
    command = [compiler, *FLAGS, *flags, str(source), "-o", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90)
    assert done.returncode == 0, done.stderr
    return out


def checks() -> Iterator[str]:
    """Assertions of the compiler itself: constants, sizes, and each field's place and size."""
    for kind, message in TABLE.items():
        name, at = f"struct pp1q_{message.name.lower()}", 0
        yield f"PP1Q_{message.name} == {kind}"
        yield f"sizeof({name}) == {message.layout.size}"
        for field, code in zip(message.fields, message.layout.format[1:], strict=True):
            yield f"offsetof({name}, {field}) == {at}"
            yield f"sizeof((({name} *)0)->{field}) == {C_BYTES[code]}"
            c_type = {"d": "double", "i": "int32_t", "I": "uint32_t", "Q": "uint64_t"}[code]
            yield f"_Generic((({name} *)0)->{field}, {c_type}: 1, default: 0)"
            at += C_BYTES[code]
    yield f"sizeof(struct pp1q_attach_request) == {handshake.ATTACH.size}"
    yield f"sizeof(struct pp1q_answer) == {handshake.ANSWER.size}"
    for index, field in enumerate((*handshake.GEOMETRY_FIELDS, "zero")):
        yield f"offsetof(struct pp1q_answer, {field}) == {16 + 4 * index}"
    for field, at in (("version", 4), ("verdict", 6), ("text_length", 8), ("regions", 12), ("boot_nonce", 72), ("size", 80)):
        yield f"offsetof(struct pp1q_answer, {field}) == {at}"
    for field, at in (("magic", 0), ("version", 4), ("role", 6), ("rank", 8), ("zero", 12)):
        yield f"offsetof(struct pp1q_attach_request, {field}) == {at}"
    for name, value in (
        ("PP1Q_LEADER_DRAFT", Role.LEADER_DRAFT), ("PP1Q_RECEIVER_TARGET", Role.RECEIVER_TARGET), ("PP1Q_ADMIN", Role.ADMIN),
        ("PP1Q_DENSE", 1), ("PP1Q_SPARSE", 2), ("PP1Q_DRAW_PROOF", 4), ("PP1Q_MAX_TEXT_BYTES", messages.MAX_TEXT_BYTES),
        ("PP1Q_ATTACH_VERSION", handshake.VERSION), ("PP1Q_MAX_REGIONS", handshake.MAX_REGIONS),
        ("PP1Q_FIRST_REGION", handshake.FIRST_REGION), ("PP1Q_EPOCH_ENDED", messages.EPOCH_ENDED),
        ("PP1Q_EPOCH_AGREE", messages.EPOCH_AGREE), ("PP1Q_EPOCH_OPEN", messages.EPOCH_OPEN),
        ("sizeof(struct pp1q_record)", 8), ("PP1Q_RING_HEADER_BYTES", 256),
    ):
        yield f"{name} == {value}"


def check_program() -> str:
    asserted = "\n".join(f'_Static_assert({each}, "{each}");' for each in checks())
    return f'#include "pp1q_sidecar.h"\n{asserted}\nint main(void) {{ return 0; }}\n'


@pytest.mark.parametrize("compiler", ("cc", CROSS))
def test_every_struct_is_what_python_packs(tmp_path: Path, compiler: str) -> None:
    if shutil.which(compiler) is None:
        pytest.skip(f"{compiler} is not installed")
    compile_c(tmp_path / "check", check_program(), "-std=c11", "-Wpedantic", compiler=compiler)
    compile_c(tmp_path / "example", ROOT / "examples" / "c" / "read_slot.c", "-std=c11", "-Wpedantic", compiler=compiler)


def test_a_struct_that_differs_is_noticed(tmp_path: Path) -> None:
    wrong = check_program().replace("offsetof(struct pp1q_ready, slot) == 24", "offsetof(struct pp1q_ready, slot) == 28")
    with pytest.raises(AssertionError, match="static assertion failed"):
        compile_c(tmp_path / "check", wrong)


@pytest.fixture(scope="module")
def programs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """The echo and the example as commands, with sanitizers; the echo for aarch64 too where that can run here."""
    folder = tmp_path_factory.mktemp("c")
    sources = {"echo": Path(__file__).parent / "sidecar_echo.c", "read_slot": ROOT / "examples" / "c" / "read_slot.c"}
    built = {name: [str(compile_c(folder / name, source, *SANITIZE))] for name, source in sources.items()}
    if EMULATOR is not None and shutil.which(CROSS) is not None:
        built["echo-aarch64"] = [EMULATOR, str(compile_c(folder / "arm", sources["echo"], "-static", compiler=CROSS))]
    return built


class Program:
    """A C process at a door."""

    def __init__(self, command: list[str], *arguments: str) -> None:
        self.process = subprocess.Popen([*command, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)

    def outcome(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(timeout=60)
        return self.process.returncode, out.strip(), err.strip()


@pytest.mark.parametrize("which", ("echo", "echo-aarch64"))
def test_records_pass_both_ways_across_the_wrap(door: Door, programs: dict[str, list[str]], which: str) -> None:
    if which not in programs:
        pytest.skip("aarch64 toolchain or qemu-user missing")
    door.region.close()
    door.region = type(door.region)(geometry().slots().total_bytes)
    door.region.seal_size()
    program = Program(programs[which], door.path)
    attached = door.accept(ring_capacity=4096)
    assert (attached.role, attached.rank, attached.pid) == (Role.LEADER_DRAFT, 5, program.process.pid)
    noise = random.Random(11)
    records = [(1 + index % 60, noise.randbytes(noise.choice((0, 1, 7, 8, 100, 1500, 4088)))) for index in range(800)]
    sent = got = 0
    while got < len(records):
        while sent < len(records) and attached.channel.send(*records[sent]):
            sent += 1
        attached.channel.flush_bell()
        assert receive(attached) == records[got]
        got += 1
    for _ in range(200):
        while not attached.channel.send(62, bytes(1000)):
            attached.channel.wait("block", 600_000_000_000)  # for ever, unless it says that there is room
    while not attached.channel.send(63, b""):
        attached.channel.wait("block", 600_000_000_000)
    attached.channel.flush_bell()
    assert program.outcome() == (0, "end 0 0", "")
    assert door.region.memory[0] == 0xA5
    await_gone(attached)


def pass_to(path: str, answer: bytes, fds: Sequence[int], program: Callable[[], Program]) -> tuple[int, str, str]:
    """Plays a daemon that answers one process with `answer` and `fds` and then only waits for its end."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(path)
        listener.listen()
        listener.settimeout(30)
        running = program()
        sock, _ = listener.accept()
        sock.settimeout(60)
        sock.recv(100)
        socket.send_fds(sock, [answer], list(fds))
        for fd in fds:
            os.close(fd)
        outcome = running.outcome()
        sock.close()
    return outcome


NONSENSE = (
    ("length 0", (0, 1, 0), 8),
    ("length 7", (7, 1, 0), 8),
    ("beyond the ring", (CAPACITY + 1, 1, 0), CAPACITY),
    ("all ones", (0xFFFFFFFF, 1, 0), 8),
    ("cut short", (100, 1, 0), 99),
    ("zero bits", (8, 1, 1), 8),
    ("impossible index", (8, 1, 0), 1 << 50),
    ("part of a header", (8, 1, 0), 5),
)


@pytest.mark.parametrize(("name", "header", "head"), NONSENSE, ids=[name for name, _, _ in NONSENSE])
def test_nonsense_in_the_ring_is_an_error_in_c_too(
    tmp_path: Path, programs: dict[str, list[str]], name: str, header: tuple[int, int, int], head: int
) -> None:
    path = str(tmp_path / "d.sock")
    channel = channel_memfd()
    os.pwrite(channel, struct.pack("<Q", head), 256 + CAPACITY)
    os.pwrite(channel, struct.pack("<IHH", *header), 256 + CAPACITY + 256)
    outcome = pass_to(path, WELCOME, (channel, bell(), bell(), memfd(SIZE)), lambda: Program(programs["echo"], path))
    assert outcome == (0, "end -71 0", "")  # EPROTO


# The echo covers the one in order; C learns of a bell that is none when it waits.
ODD = [given for given in GIVEN if given[0] not in ("in order", "bell that is none")]


@pytest.mark.parametrize(("name", "answer", "makers", "reason"), ODD, ids=[name for name, *_ in ODD])
def test_what_a_daemon_passes_is_looked_at_first(
    tmp_path: Path, programs: dict[str, list[str]], name: str, answer: bytes, makers: Sequence[Callable[[], int]], reason: Reason
) -> None:
    path = str(tmp_path / "d.sock")
    code, out, err = pass_to(path, answer, [make() for make in makers], lambda: Program(programs["echo"], path))
    expected = f"attach {Reason.OVERLOAD.code}" if name == "with a refusal" else "attach -71"
    assert (code, out, err) == (1, expected, "")


def test_a_refusal_is_told_in_words(door: Door, programs: dict[str, list[str]]) -> None:
    program = Program(programs["read_slot"], door.path, "3")
    pending = door.arrival()
    assert (pending.role, pending.rank) == (Role.RECEIVER_TARGET, 3)
    door.server.refuse(pending, Reason.IDENTITY_MISMATCH, "rank 3 is not mine")
    code, _, err = program.outcome()
    assert (code, err) == (1, f"read_slot: the daemon refuses (reason {Reason.IDENTITY_MISMATCH.code}): rank 3 is not mine")


def test_without_a_daemon_it_says_so(tmp_path: Path, programs: dict[str, list[str]]) -> None:
    for name, words in (("none", "No such file or directory"), ("x" * 200, "File name too long")):
        path = str(tmp_path / name)
        code, _, err = Program(programs["read_slot"], path).outcome()
        assert (code, err) == (1, f"read_slot: {path}: {words}")
    assert Program(programs["read_slot"]).outcome()[0] == 1


# -- the example against a daemon that is played here


def unpacked(attached: Attached, kind: int) -> tuple[dict[str, float], bytes]:
    got, body = receive(attached)
    assert got == kind, messages.TABLE[got].name
    values, payload = messages.unpack(got, body, messages.TARGET)
    return messages.named(got, values), bytes(payload)


def say(attached: Attached, kind: int, *values: float, payload: bytes = b"") -> None:
    assert attached.channel.send(kind, messages.pack(kind, *values), payload)
    attached.channel.flush_bell()


@pytest.mark.parametrize("representation", ("dense", "sparse"))
def test_the_example_reads_tokens_and_their_q(door: Door, programs: dict[str, list[str]], representation: str) -> None:
    sparse = representation == "sparse"
    facts = geometry(flags=2, row_bytes=64) if sparse else geometry(row_bytes=4032)
    region = type(door.region)(facts.slots().total_bytes)
    region.seal_for_readers()
    door.region.close()
    door.region = region
    program = Program(programs["read_slot"], door.path, "1", "11", "22", "33")
    attached = door.server.accept(door.arrival(), facts, [(region.fd, region.size)])
    door.attached.append(attached)
    say(attached, messages.UP, 99, 1, 0)
    opened, tokens = unpacked(attached, messages.OPEN)
    assert np.frombuffer(tokens, np.int32).tolist() == [11, 22, 33]
    assert (opened["max_position"], opened["seed"]) == (facts.max_context_tokens, 42)
    step, _ = unpacked(attached, messages.STEP)
    assert (step["ticket"], step["depth"], step["temperature"]) == (7, 2, 1.0)
    assert step["support"] == (facts.support if sparse else 0)
    views = SlotViews(region, facts.slots(), facts.vocab_size, writable=True)
    views.tokens(1, 2)[:] = (500, 7)
    for row, (token, q) in enumerate(((500, 0.25), (7, 0.75))):
        if sparse:
            views.entries(1, 2)[row] = 2
            ids, values = views.sparse(1, row, 2)
            ids[:], values[:] = (token, token + 1), (q, 1 - q)
        else:
            views.dense(1, row)[token] = q
    say(attached, messages.READY, 1, 7, 4321, 1, 5, 0, 3, 2, 2, 2 if sparse else 1, 1)
    assert unpacked(attached, messages.RELEASE)[0] == {"slot": 1, "slot_generation": 5}
    assert unpacked(attached, messages.CLOSE)[0] == {"request": 1}
    unpacked(attached, messages.BYE)
    code, out, err = program.outcome()
    lines = ["round 3 ready after 4321 ns: 2 tokens after position 2", "token 500 q 0.25", "token 7 q 0.75"]
    assert (code, out.splitlines(), err) == (0, lines, "")


def test_the_example_hears_a_discard_a_refusal_and_a_death(door: Door, programs: dict[str, list[str]]) -> None:
    for how, expected in (
        ("discard", (3, "read_slot: discarded, reason 39")),
        ("refusal", (1, "read_slot: refused: depth 9 is more than 2")),
        ("death", (1, "read_slot: no proposal came: Broken pipe")),
        ("nonsense", (1, "read_slot: a slot that does not exist: Protocol error")),
    ):
        program = Program(programs["read_slot"], door.path, "1")
        attached = door.accept()
        say(attached, messages.UP, 99, 1, 0)
        unpacked(attached, messages.OPEN)
        unpacked(attached, messages.STEP)
        if how == "discard":
            say(attached, messages.DISCARDED, 1, 7, Reason.TIMEOUT.code, 0, 0, 0)
        elif how == "refusal":
            words = b"depth 9 is more than 2"
            say(attached, messages.REFUSED, 1, 7, 0, len(words), payload=words)
        elif how == "nonsense":
            say(attached, messages.READY, 1, 7, 4321, 2, 5, 0, 3, 2, 2, 1, 1)
        else:
            attached.close()
        code, _, err = program.outcome()
        assert (code, err) == expected, how
