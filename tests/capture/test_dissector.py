"""`proto/pp1q.lua` in tshark: every field as the transport has it, digests checked, what is wrong flagged.

Without tshark these are skipped by name; with PP1Q_EXPECT_TSHARK=1 they fail instead. scripts/check-dissector.sh installs it.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from capture_rig import FAULTS, demo, recorded, run_live

from pp1q_transport import wire
from pp1q_transport.capture import byspec, pcapng, records
from pp1q_transport.errors import Reason
from pp1q_transport.links.faulty import FaultRates
from pp1q_transport.toy.demo import DemoOptions
from pp1q_transport.wire import Header

ROOT = Path(__file__).resolve().parents[2]
GOLDEN = ROOT / "proto" / "golden"
LUA = ROOT / "proto" / "pp1q.lua"
TEXT = LUA.read_text(encoding="utf-8")
TSHARK = shutil.which("tshark")
if TSHARK is None and os.environ.get("PP1Q_EXPECT_TSHARK"):
    raise RuntimeError("tshark is not installed (PP1Q_EXPECT_TSHARK)")
needs_tshark = pytest.mark.skipif(TSHARK is None, reason="tshark is not installed: scripts/check-dissector.sh installs it")
pytestmark = pytest.mark.timeout(120)
SESSION = 0x1122334455667788
LEADER = 0xA1B2C3D4E5F60718


def dissected(path: Path) -> list[dict[str, list[str]]]:
    """The fields of every packet by name, as tshark prints them."""
    assert TSHARK is not None
    command = [TSHARK, "-n", "-r", str(path), "-X", f"lua_script:{LUA}", "-T", "ek"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    assert "Lua" not in done.stderr, done.stderr
    packets = []
    for line in done.stdout.splitlines():
        layers = json.loads(line).get("layers")
        if layers is not None:
            found: dict[str, list[str]] = {}
            gather(layers, found)
            packets.append(found)
    return packets


def gather(layer: Any, found: dict[str, list[str]], name: str = "") -> None:
    if isinstance(layer, dict):
        for key, value in layer.items():
            gather(value, found, key)
    elif isinstance(layer, list):
        for value in layer:
            gather(value, found, name)
    else:
        found.setdefault(name, []).append(str(layer))


def field(packet: dict[str, list[str]], name: str) -> list[str]:
    return packet.get(f"pp1q_pp1q_{name}", [])


def experts(packet: dict[str, list[str]]) -> list[str]:
    """The names of what the dissector found wrong."""
    return sorted(key.removeprefix("pp1q_pp1q_expert_") for key in packet if key.startswith("pp1q_pp1q_expert_"))


def written(path: Path, frames: Iterable[bytes], nonce: int = LEADER, session: int = SESSION) -> Path:
    """A capture file of these frames, its state naming the leader's nonce."""
    state = records.pack_json({"dissect": {"session": f"{session:016x}", "leader_nonce": f"{nonce:016x}"}})
    blocks = [pcapng.section("test"), pcapng.interface("test")]
    for number, (what, data) in enumerate([(records.STATE, state), *((records.FRAME, frame) for frame in frames)]):
        for body, original in records.pieces(what, pcapng.IN, 0, 0, data, len(data)):
            blocks.append(pcapng.packet(0, 1000 + number, pcapng.IN, 0, body, original))
    path.write_bytes(b"".join(blocks))
    return path


def frame_of(payload: bytes, **fields: Any) -> bytes:
    header = Header()
    header.clear()
    header.kind, header.boot_nonce, header.session = wire.OPEN, 5, SESSION
    header.token_count, header.max_position, header.payload_length = len(payload) // 4, 7, len(payload)
    for name, value in fields.items():
        setattr(header, name, value)
    header.payload_digest = byspec.xxh(payload, header.payload_seed(LEADER)) if payload else 0
    frame = bytearray(wire.HEADER_BYTES)
    header.encode(frame, 0)
    return bytes(frame) + payload


@needs_tshark
def test_a_demos_frames_have_every_field_as_the_transport_reads_it(tmp_path: Path) -> None:
    data = demo(rounds=30).files[0]
    path = tmp_path / "x.pcapng"
    path.write_bytes(data)
    taken, packets = recorded(data), dissected(path)
    assert len(taken) == len(packets)
    header, compared = Header(), 0
    for record, packet in zip(taken, packets, strict=True):
        assert field(packet, "direction") == ["1" if record.incoming else "2"]
        if record.what != records.FRAME:
            continue
        assert header.decode(record.data, 0) == 0
        kind = wire.KIND_NAMES[header.kind]
        for name, at, _size in [*lua_places("HEADER"), *lua_places(kind)]:
            (said,) = field(packet, name)
            expected = getattr(header, name)
            assert float(said) == expected if name == "temperature" else int(said, 0) == expected, (kind, name, at)
            compared += 1
        assert field(packet, "header_digest_good") == ["True"]
        assert field(packet, "payload_digest_good") == (["True"] if header.payload_length else [])
        assert [name for name in experts(packet) if name != "given_up"] == []
        if kind == "REPLY":
            q = [float(value) for value in field(packet, "q")]
            assert len(q) == header.entry_count == len(field(packet, "id"))
            assert sum(q) == pytest.approx(1, abs=1e-6)
    assert compared > 4500


@needs_tshark
def test_a_frame_that_was_corrupted_on_purpose_is_flagged_and_no_other(tmp_path: Path) -> None:
    """What the demo's own faults did to its frames, told by the digests in tshark alone."""
    live = demo(faults=FAULTS, rounds=200)
    path = tmp_path / "x.pcapng"
    path.write_bytes(live.files[0])
    packets = dissected(path)
    header = [packet for packet in packets if "header_digest" in experts(packet) or "magic" in experts(packet)]
    payload = [packet for packet in packets if "payload_digest" in experts(packet)]
    broken = sum(live.reasons.get(reason, 0) for reason in ("header_digest", "bad_magic", "bad_version", "unknown_kind"))
    assert len(header) == broken > 0
    assert len(payload) >= live.reasons["payload_digest"] > 0
    given_up = [packet for packet in packets if "given_up" in experts(packet)]
    assert len(given_up) >= live.reasons["timeout"]
    frames = [frame_of(b"\1\0\0\0" * 9), frame_of(b"\1\0\0\0" * 9), frame_of(b"\1\0\0\0" * 9)]
    head, body = bytearray(frames[0]), bytearray(frames[1])
    head[44] ^= 1
    body[140] ^= 1
    flagged = [experts(packet) for packet in dissected(written(tmp_path / "y.pcapng", [bytes(head), bytes(body), frames[2]]))]
    assert flagged == [[], ["header_digest"], ["payload_digest"], []]


LENGTHS = sorted({0, *range(4, 24, 4), 28, 32, 36, 64, 68, 96, 100, 124, 128, 132, 136, 144, 240, 244, 256, 1020, 1024, 1028,
                  1088, 2048, 2052, 4096, 5000, 20_000})  # fmt: skip


@needs_tshark
def test_digests_of_every_length_are_right_and_one_flipped_bit_is_not(tmp_path: Path) -> None:
    noise = random.Random(6)
    good = [frame_of(noise.randbytes(length), request=noise.getrandbits(64), slot_generation=0) for length in LENGTHS]
    bad = []
    for frame in good:
        spoiled = bytearray(frame)
        if len(frame) > wire.HEADER_BYTES:
            spoiled[noise.randrange(wire.HEADER_BYTES, len(frame))] ^= 1 << noise.randrange(8)
            bad.append(bytes(spoiled))
    packets = dissected(written(tmp_path / "x.pcapng", [*good, *bad]))[1:]
    assert [field(packet, "payload_digest_good") for packet in packets[: len(good)]] == [
        ["True"] if length else [] for length in LENGTHS
    ]
    assert all(experts(packet) == ["payload_digest"] for packet in packets[len(good) :])


def signed(frame: bytes, at: int, value: bytes) -> bytes:
    changed = bytearray(frame)
    changed[at : at + len(value)] = value
    byspec.sign(changed, LEADER, payload=False)
    return bytes(changed)


@needs_tshark
def test_each_rule_of_the_header_has_its_expert(tmp_path: Path) -> None:
    plain = frame_of(b"")
    frames = {
        "version": signed(plain, 4, b"\3"),
        "kind": signed(plain, 5, b"\x63"),
        "flags": signed(plain, 6, b"\1"),
        "reserved": signed(plain, 54, b"\1"),
        "stray": signed(plain, 60, b"\1"),
        "magic": b"GET / HTTP/1.1\r\n" * 8,
    }
    arguments = signed(plain, 100, b"\1")
    packets = dissected(written(tmp_path / "x.pcapng", [*frames.values(), arguments]))[1:]
    assert [experts(packet) for packet in packets] == [*([name] for name in frames), ["reserved"]]


@needs_tshark
def test_packets_of_anybody_are_flagged_and_stop_nothing(tmp_path: Path) -> None:
    noise = random.Random(1)
    blocks = [pcapng.section("test"), pcapng.interface("test")]
    frame = frame_of(b"\1\0\0\0" * 4)
    for number in range(400):
        data = bytearray(records.PREFIX.pack(1, 0, 1, 0, 0, 0) + frame)
        for _ in range(noise.choice((1, 8))):
            data[noise.randrange(len(data))] = noise.randrange(256)
        del data[noise.randrange(len(data) + 1) :]
        blocks.append(pcapng.packet(0, number, 1, 0, bytes(data), len(data)))
    path = tmp_path / "x.pcapng"
    path.write_bytes(b"".join(blocks))
    packets = dissected(path)
    assert len(packets) == 400
    assert {"layout", "header_digest"} <= {name for packet in packets for name in experts(packet)}
    assert not any("_ws_lua" in key and "fake" not in key for packet in packets for key in packet), "a Lua error while dissecting"


@needs_tshark
def test_rows_larger_than_a_packet_come_in_pieces(tmp_path: Path) -> None:
    live = run_live(tmp_path, DemoOptions(rounds=1, vocab_size=129_280, requests=1))
    path = tmp_path / "demo.pcapng"
    packets = dissected(path)
    assert len(packets) > len(recorded(live.files[0]))
    replies = [packet for packet in packets if field(packet, "kind") == ["4"]]
    assert [field(packet, "entry_count") for packet in replies] == [["129280"]] * 5
    assert all(experts(packet) == ["unchecked"] for packet in replies)
    assert sum(bool(field(packet, "piece")) for packet in packets) == 5 * 3


@needs_tshark
def test_a_redacted_capture_says_so_and_is_not_called_corrupt(tmp_path: Path) -> None:
    options = DemoOptions(rounds=10, vocab_size=256, support=8)
    run_live(tmp_path, replace(options, faults=FaultRates()), redact=True)
    packets = dissected(tmp_path / "demo.pcapng")
    frames = [packet for packet in packets if field(packet, "what") == ["0"]]
    assert frames
    assert all(experts(packet) == ["redacted"] and field(packet, "header_digest_good") == ["True"] for packet in frames)
    assert not any(field(packet, "q") or field(packet, "payload_tokens") for packet in packets)


HEADER_EXPERTS = {
    "bad_magic": "magic", "bad_version": "header_digest version", "unknown_kind": "kind", "unknown_flag": "flags",
    "reserved_bits": "reserved stray", "header_digest": "header_digest",
}  # fmt: skip


@needs_tshark
def test_the_golden_frames_are_right_and_wrong_as_their_notes_say(tmp_path: Path) -> None:
    golden = [note for path in sorted(GOLDEN.glob("*.json")) if (note := json.loads(path.read_text())).get("plane") == "data"]
    nonces = json.loads((GOLDEN / "sessions.json").read_text())["sessions"]
    for session in sorted({note["session"] for note in golden if note["session"] in nonces}):
        notes = [note for note in golden if note["session"] == session and "recipe" not in note.get("payload", {})]
        frames = [(GOLDEN / f"{note['name']}.bin").read_bytes() for note in notes]
        leader, number = (int(str(nonces[session][key]), 0) for key in ("leader_nonce", "session"))
        packets = dissected(written(tmp_path / f"{session}.pcapng", frames, leader, number))[1:]
        for note, packet in zip(notes, packets, strict=True):
            found = set(experts(packet)) - {"given_up", "unchecked"}
            if note["valid"]:
                assert found == set(), note["name"]
            elif note["expected_reason"] in HEADER_EXPERTS and note["costs"] == "link" and "status" not in note["name"]:
                met = found & set(HEADER_EXPERTS[note["expected_reason"]].split())
                assert met or note["expected_reason"] == "reserved_bits", note["name"]


# -- the tables in the file --------------------------------------------------------------------------------------------


def lua_places(name: str) -> list[tuple[str, int, int]]:
    """(field, offset, bytes) of a table of the dissector."""
    found = re.search(rf"\b{name} = (NOTICE|BALLOT|\{{\{{[^\n]*\}}\}}|\{{\n.*?\n *\}})", TEXT, re.S)
    assert found is not None, name
    if found[1] in ("NOTICE", "BALLOT"):
        return lua_places(found[1])
    return [(field, int(at), int(size)) for field, at, size in re.findall(r'\{"(\w+)", (\d+), (\d+)\}', found[1])]


def words(name: str) -> list[str]:
    found = re.search(rf"local {name} = \{{(.*?)\n\}}", TEXT, re.S)
    assert found is not None
    return re.findall(r'"(\w+)"', found[1])


def test_its_names_are_those_of_the_transport() -> None:
    assert words("KINDS") == list(wire.KIND_NAMES.values())
    assert words("REASONS") == ["none", *(reason.value for reason in Reason)]


def test_its_places_are_those_of_the_format() -> None:
    for name, at, size in lua_places("HEADER"):
        assert byspec.COMMON[name] == (at, size)
    assert set(byspec.COMMON) - {name for name, _, _ in lua_places("HEADER")} == {
        "magic", "version", "kind", "flags", "reserved", "payload_digest", "header_digest",
    }  # fmt: skip
    for kind, places in byspec.ARGUMENTS.items():
        known = {name: place for name, place in places.items() if name != "reserved_arguments"}
        assert {name: (at, size) for name, at, size in lua_places(wire.KIND_NAMES[kind])} == known


def test_every_kind_carries_what_the_transport_lets_it_carry() -> None:
    bits = {"request": 1, "slot": 2, "round": 4, "position": 8, "shard": 16, "depth": 32, "representation": 64, "payload": 128,
            "entry_count": 256}  # fmt: skip
    table = TEXT.partition("local CARRIES = {")[2].partition("\n}")[0]
    told = {kind: sum(bits[word] for word in carried.split()) for kind, carried in re.findall(r'(\w+) = "([a-z_ ]*)"', table)}
    assert told == {wire.KIND_NAMES[kind]: allowed for kind, allowed in wire.ALLOWED_FIELDS.items()}


def test_it_is_for_the_link_type_that_captures_have() -> None:
    assert "wtap.USER0" in TEXT
    assert pcapng.LINK_TYPE == 147
    assert sys.maxsize > 2**53
