"""What is fuzzed: each target takes bytes, and may raise the errors that it names and nothing else.

Between `fuzz_run.py` (or a test, which plays seeds) and the decoders. Seeds are made from the golden vectors and the tables of
records; what a fuzzer found lies in `corpus/TARGET`. `AssertionError` is a finding too: something was taken that must not be.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import os
import struct
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

import fuzz_streams  # noqa: E402
from protocol import golden  # noqa: E402

from pp1q_transport import dyadic, keys, wire  # noqa: E402
from pp1q_transport.capture import pcapng, records  # noqa: E402
from pp1q_transport.capture.pcapng import CaptureError  # noqa: E402
from pp1q_transport.capture.reading import Recording  # noqa: E402
from pp1q_transport.capture.replay import Replay  # noqa: E402
from pp1q_transport.capture.snapshot import counted, session_state  # noqa: E402
from pp1q_transport.control_codec import REPORT_LIMIT, decode_message, encode_message  # noqa: E402
from pp1q_transport.counters import Counters  # noqa: E402
from pp1q_transport.daemon.config import parse  # noqa: E402
from pp1q_transport.errors import ConfigError, InvalidQ, LocalMisuse, PeerFault, Reason  # noqa: E402
from pp1q_transport.local import handshake  # noqa: E402
from pp1q_transport.local import messages as m  # noqa: E402
from pp1q_transport.local.channel import CLIENT, DAEMON, Channel, channel_bytes  # noqa: E402
from pp1q_transport.session.machine import SessionMachine  # noqa: E402
from pp1q_transport.session.negotiate import Agreement, Role, message_kind, parse_goodbye, parse_refuse  # noqa: E402

ROOT = HERE.parents[1]


class Target(NamedTuple):
    """`one` plays one input, `seeds` are those to begin with, `named` the errors that are in order."""

    one: Callable[[bytes], object]
    seeds: Callable[[], Iterator[bytes]]
    named: tuple[type[Exception], ...]


# ---- headers and payloads ---------------------------------------------------------------------------------------------


def header(data: bytes) -> None:
    """What decodes is a frame's only form: encoded again it is the same bytes."""
    if len(data) < wire.HEADER_BYTES:
        return
    head = bytearray(data[: wire.HEADER_BYTES])
    found, again = wire.Header(), bytearray(wire.HEADER_BYTES)
    for signed in (False, True):
        if signed:
            struct.pack_into("<Q", head, 120, fuzz_streams.xxh3_64(head, 0, 120, 0))
        code = found.decode(head, 0)
        if code:
            assert Reason.from_code(code)
            continue
        found.encode(again, 0)
        assert again == head, "a header that has two forms"


def headers() -> Iterator[bytes]:
    for vector in golden.vectors().values():
        if vector.note["plane"] != "control":
            yield vector.data[: wire.HEADER_BYTES]


def payload(data: bytes) -> None:
    """A row: a byte for the form, u16 token, then its values (and IDs). What passes sums to one and holds the token."""
    if len(data) < 3:
        return
    form, token = data[0], int.from_bytes(data[1:3], "little")
    words = np.frombuffer(data[3 : 3 + (len(data) - 3) // 4 * 4], "<u4")
    if form & 1:
        half = len(words) // 2
        q, ids = words[:half].view("<f4"), words[half : 2 * half].view("<i4")
        dyadic.validate_sparse(ids, q, 100, token)
        counts = dyadic.to_counts(q)
        assert np.all(np.diff(ids) > 0)
        assert token in ids
        drawn = dyadic.draw_sparse(ids, counts, token << 8)
        assert drawn in ids
    else:
        entries = max(1, len(words) - (form >> 4))
        q = words.view("<f4")
        dyadic.validate_dense(q, entries, token)
        counts = dyadic.to_counts(q)
        assert counts[token]
    assert int(counts.sum(dtype=np.uint64)) == dyadic.MASS
    assert dyadic.to_q(counts).tobytes() == q.tobytes()


def payloads() -> Iterator[bytes]:
    for vector in golden.chosen("data", True) + golden.chosen("data", False):
        if vector.kind == "REPLY" and vector.note["session"] != "full":
            form = 1 if vector.fields["representation"] == wire.SPARSE else 0
            yield bytes((form,)) + (vector.fields["token"] & 0xFFFF).to_bytes(2, "little") + vector.data[wire.HEADER_BYTES :]


# ---- the control plane ------------------------------------------------------------------------------------------------


def control(data: bytes) -> None:
    """A message, at each end of the handshake; what decodes is what it is when written again."""
    for limit in (1 << 16, REPORT_LIMIT):
        message = decode_message(data, limit)
        assert decode_message(encode_message(message, limit), limit) == message
    for to in ("listener", "connector"):
        outcome, _, _ = golden.judge_message(to, data)
        assert outcome.refused or outcome.effect
    kind = message_kind(message)
    if kind == "refuse":
        parse_refuse(message)
    elif kind == "goodbye":
        parse_goodbye(message)


def messages() -> Iterator[bytes]:
    for vector in golden.vectors().values():
        if vector.note["plane"] == "control":
            yield vector.data


# ---- local channels ---------------------------------------------------------------------------------------------------

CAPACITY = 4096


@functools.cache
def _bells() -> tuple[int, int]:
    return os.eventfd(0, os.EFD_NONBLOCK), os.eventfd(0, os.EFD_NONBLOCK)


def local(data: bytes) -> None:
    """A byte for the part: an ATTACH, an ANSWER, one record, or the shared memory of a channel as its peer left it."""
    if len(data) < 2:
        return
    part, body = data[0] % 4, data[1:]
    if part == 0:
        handshake.parse_attach(body)
    elif part == 1:
        handshake.parse_answer(body)
    elif part == 2:
        _record(body[0], memoryview(body)[1:])
    else:
        memory = bytearray(channel_bytes(CAPACITY))
        channel = Channel(memoryview(memory), DAEMON, *_bells(), CAPACITY)
        memory[: len(body)] = body[: len(memory)]
        while (record := channel.receive()) is not None:
            _record(*record)
            channel.send(m.PONG, m.pack(m.PONG, 1))
            channel.prepare_sleep()


def _record(kind: int, body: memoryview) -> None:
    direction = m.TARGET if kind & 1 else m.DRAFT
    values, rest = m.unpack(kind, body, direction)
    m.named(kind, values)
    assert m.pack(kind, *values) + bytes(rest) == bytes(body)
    if m.TABLE[kind].has_payload and m.TABLE[kind].unit == 1:
        m.text_of(rest)


def locals_() -> Iterator[bytes]:
    yield b"\0" + handshake.pack_attach(handshake.Role.RECEIVER_TARGET, 0)
    yield b"\1" + handshake.pack_refusal(Reason.OVERLOAD, "no room")
    yield b"\1" + handshake.ANSWER.pack(handshake.MAGIC, handshake.VERSION, *(0,) * 18, *(0,) * handshake.MAX_REGIONS)
    memory = bytearray(channel_bytes(CAPACITY))
    channel = Channel(memoryview(memory), CLIENT, *_bells(), CAPACITY)
    for kind, message in m.TABLE.items():
        values: list[int | float] = [3] * len(message.fields)
        for index in message.zeros:
            values[index] = 0
        rest = bytes(3 * message.unit) if message.has_payload else b""
        yield bytes((2, kind)) + m.pack(kind, *values) + rest
        channel.send(kind, m.pack(kind, *values), rest)
        if kind % 8 == 0:
            yield b"\3" + bytes(memory[: CAPACITY // 2])


# ---- configuration ----------------------------------------------------------------------------------------------------


def config(data: bytes) -> None:
    """A daemon's file, and what it would state to its peers; the same bytes as an allow-list."""
    text = data.decode("utf-8", "replace")
    with_peers = parse(text, "pp1q.toml")
    for peer in with_peers.peers:
        with_peers.hello(peer, 7)


def allow_list(data: bytes) -> None:
    keys.parse_allow_list(data.decode("utf-8", "replace"))


def configs() -> Iterator[bytes]:
    for path in sorted((ROOT / "deploy" / "examples").glob("*.toml")):
        yield path.read_bytes()


def allow_lists() -> Iterator[bytes]:
    key = keys.new_pair().public
    yield f"# who may\n{key}  # a draft\n\n{key} b\n".encode()


# ---- captures ---------------------------------------------------------------------------------------------------------


def _file(stream: bytes) -> bytes:
    """A capture of records that are told one after another: what (and 16 for the second of two sessions), direction, flags, u16
    length, data."""
    made, at = [pcapng.section("fuzz", "{}"), pcapng.interface("a"), pcapng.interface("b")], 0
    for number in range(256):
        if at + 5 > len(stream):
            break
        what, direction, flags, length = struct.unpack_from("<BBBH", stream, at)
        data = stream[at + 5 : at + 5 + length]
        at += 5 + length
        for packet, original in records.pieces(what & 15, direction & 3, flags, 0, data, len(data)):
            made.append(pcapng.packet(what >> 4 & 1, (number + 1) * 1_000_000, direction & 3, 0, packet, original))
    return b"".join(made)


def capture(data: bytes) -> None:
    """A file as it is, or (first byte 1) records that are put into one; read, and replayed."""
    if data:
        file = _file(data[1:]) if data[0] == 1 else data
        recording = Recording(io.BytesIO(file))
        outcome = Replay().run(recording)
        assert all(Reason(name) for name in outcome.reasons)


def captures() -> Iterator[bytes]:
    for before in (["open", "step_dense"], ["open", "step_dense", "reply_dense_0"]):
        bench = golden.ReceiverBench("v64")
        bench.prepare(before)
        state = session_state(golden.agreements()[Role.RECEIVER], bench.session, golden.START_NS, redact=False)
        rest = ["reply_dense_0", "reply_dense_1", "reply_dense_2", "completion_dense"][len(before) - 2 :]
        told = [(records.STATE, 1, records.pack_json(state | {"account": 1, "counted": counted(bench.counters, 0)}))]
        told += [(records.FRAME, 1, golden.vectors()[name].data) for name in rest]
        stream = b"".join(struct.pack("<BBBH", what, way, 0, len(data)) + data for what, way, data in told)
        yield b"\1" + stream
        yield _file(stream)


def group_captures() -> Iterator[bytes]:
    """Of the two ends of a group link in every mode, rank 0's with its session with the leader beside it."""
    for name, vector in golden.vectors().items():
        if vector.note["to"] in ("member", "coordinator"):
            yield b"\1" + _group_capture(name)


def _group_capture(name: str) -> bytes:
    note = golden.vectors()[name].note
    mode = golden.group_mode(note["session"])
    bench = golden.MemberBench(note["session"]) if note["to"] == "member" else golden.HubBench(note["session"])
    sides = [(bench.session, Role.MEMBER if note["to"] == "member" else Role.COORDINATOR)]
    if note["to"] == "coordinator":
        sides.insert(0, (bench.receiver, Role.RECEIVER))
    told = []
    for link, (session, role) in enumerate(sides):
        body = session_state(_agreement(session, role, mode), session, golden.START_NS, redact=False)
        body |= {"account": link, "counted": counted(Counters(), 0)}
        told.append((records.STATE | link << 4, 1, records.pack_json(body)))
    group_link = len(sides) - 1
    for each in [*note["before"], name]:
        vector = golden.vectors()[each]
        if group_link and vector.kind == "GRANT":
            told.append((records.FRAME, 2, _step_of(vector.data)))
        ours = vector.by_receiver is bench.sends_receiver_frames
        told.append((records.FRAME | group_link << 4, 2 if ours else 1, vector.data))
    return b"".join(struct.pack("<BBBH", what, way, 0, len(data)) + data for what, way, data in told)


def _step_of(grant: bytes) -> bytes:
    """The STEP that goes to the leader with a GRANT."""
    granted, step = wire.Header(), wire.Header()
    granted.decode(grant, 0)
    step.decode(golden.vectors()["step_dense"].data, 0)
    for name in (
        "session", "request", "request_generation", "round", "position", "slot", "slot_generation", "depth", "representation",
        "support_policy", "budget_us",
    ):  # fmt: skip
        setattr(step, name, getattr(granted, name))
    frame = bytearray(wire.HEADER_BYTES)
    step.encode(frame, 0)
    return bytes(frame)


def _agreement(session: SessionMachine, role: Role, mode: str) -> Agreement:
    """What two ends of those roles would have agreed on, for the session's own terms."""
    terms = session.terms
    known = golden.agreements()[Role.RECEIVER]
    rank = int(role is Role.MEMBER)
    nonces = (terms.leader_nonce, terms.receiver_nonce)
    ours, theirs = nonces if role.sends_rows else nonces[::-1]
    whole = {"group_size": 2, "group_mode": mode}
    far = int(role is Role.COORDINATOR)
    return replace(
        known,
        session=terms.session,
        ours=replace(known.ours, role=role, boot_nonce=ours, rank=rank, **whole),
        theirs=replace(known.theirs, role=role.partner, boot_nonce=theirs, rank=far, **whole),
    )


# ---- all of them ------------------------------------------------------------------------------------------------------

RECEIVER_SIDE = ("receiver", "connector_link")
LEADER_SIDE = ("leader", "listener_port", "draft_peer")
RANKS = ("member", "coordinator")


def _stream(parties: tuple[str, ...]) -> Target:
    return Target(
        functools.partial(fuzz_streams.run, parties=parties), functools.partial(fuzz_streams.seeds, parties), (PeerFault,)
    )


TARGETS: dict[str, Target] = {
    "header": Target(header, headers, ()),
    "payload": Target(payload, payloads, (InvalidQ, LocalMisuse)),
    "receiver": _stream(RECEIVER_SIDE),
    "leader": _stream(LEADER_SIDE),
    "ranks": _stream(RANKS),
    "control": Target(control, messages, (PeerFault,)),
    "local": Target(local, locals_, (PeerFault,)),
    "config": Target(config, configs, (ConfigError,)),
    "allow-list": Target(allow_list, allow_lists, (ConfigError,)),
    "capture": Target(capture, lambda: itertools.chain(captures(), group_captures()), (CaptureError,)),
}


def kernels() -> Iterator[bytes]:
    """Seeds of `fuzz_kernels.c`, whose first byte is the kernel: golden rows, and weights of several spreads."""
    whole_mass, no_draw = b"\1", b"\0"
    for row in payloads():
        token = row[1:3] + bytes(2)
        if row[0] & 1:
            yield b"\1" + whole_mass + no_draw + token + bytes(2) + b"\x64\0" + row[3:]
        else:
            yield b"\0" + whole_mass + no_draw + token + b"\0\0\x10\0" + row[3:]
        yield b"\4\0\0\x80" + row[3:]
    for plain in range(4):
        values = np.arange(48, dtype=np.float64).tobytes() if plain == 0 else bytes(range(100))
        yield bytes((2, plain)) + values
        yield bytes((3, 7, plain)) + values
    yield b"\5" + bytes(range(200))
    yield b"\6\1" + np.arange(1, 33, dtype=np.float64).tobytes() + np.full(32, 1 / 32, np.float32).tobytes()
    yield b"\7\0\2" + bytes(60)


def play(target: Target, data: bytes) -> None:
    """One input; an error that the target names is in order."""
    with contextlib.suppress(*target.named):
        target.one(data)


def corpus(name: str) -> Iterator[bytes]:
    """The seeds of a target, and what was found and kept."""
    yield from kernels() if name == "kernels" else TARGETS[name].seeds()
    for path in sorted((HERE / "corpus" / name).glob("*")):
        yield path.read_bytes()
