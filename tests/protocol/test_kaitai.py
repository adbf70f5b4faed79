"""`proto/pp1q_v2.ksy`, compiled, as a second decoder: it reads every golden frame and many random ones as the transport does.

The compiler is an npm package and comes to .cache/kaitai; without npm (or the registry) these are skipped by name, or fail with
PP1Q_EXPECT_NPM=1 (scripts/check-kaitai.sh installs npm). What it can't state, digests and which kind
carries which common field, is the transport's alone.
"""

from __future__ import annotations

import importlib.util
import io
import json
import math
import os
import random
import shutil
import struct
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import pytest
import yaml

from pp1q_transport import wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.errors import Reason
from pp1q_transport.wire import Header

from . import golden as gold
from .golden import Golden, chosen
from .test_layout_documents import arguments_type, layout

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
COMPILER = "kaitai-struct-compiler@0.11.0"
CACHE = gold.PROTO.parent / ".cache" / "kaitai"
RANDOM_FRAMES = 20_000
# What a layout alone sees wrong: the magic, the version, flags, and reserved bytes. Its `contents` and `valid` raise.
SEEN = {"bad_magic", "bad_version", "unknown_flag", "reserved_bits"}


def missing(what: str) -> NoReturn:
    if os.environ.get("PP1Q_EXPECT_NPM"):
        pytest.fail(f"{what} (PP1Q_EXPECT_NPM)")
    pytest.skip(what)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    """The generated parser, loaded."""
    npm, node = shutil.which("npm"), shutil.which("node")
    if npm is None or node is None:
        missing("npm is not installed: scripts/check-kaitai.sh installs it")
    if not (CACHE / "node_modules" / "kaitai-struct-compiler").is_dir():
        CACHE.mkdir(parents=True, exist_ok=True)
        install = [npm, "install", "--silent", "--no-audit", "--no-fund", "--prefix", str(CACHE), COMPILER]
        done = subprocess.run(install, capture_output=True, text=True, timeout=300, check=False)
        if done.returncode:
            missing(f"npm can't install {COMPILER}: {done.stderr.strip()[:200]}")
    described = json.dumps(yaml.safe_load((gold.PROTO / "pp1q_v2.ksy").read_text(encoding="utf-8")))
    script = Path(__file__).with_name("kaitai_compile.js")
    made = subprocess.run(
        [node, str(script)], input=described, capture_output=True, text=True, timeout=120, cwd=CACHE, check=False
    )
    assert made.returncode == 0, made.stderr
    path = tmp_path_factory.mktemp("kaitai") / "pp1q_v2.py"
    path.write_text(json.loads(made.stdout)["pp1q_v2.py"], encoding="utf-8")
    spec = importlib.util.spec_from_file_location("pp1q_v2", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parsed(decoder: ModuleType, data: bytes) -> Any:
    """Its frames, or None when the description does not allow these bytes."""
    from kaitaistruct import KaitaiStream, KaitaiStructError

    try:
        return decoder.Pp1qV2(KaitaiStream(io.BytesIO(data))).frames
    except (KaitaiStructError, EOFError):
        return None


def number(value: Any) -> Any:
    return value.value if hasattr(value, "value") else value


def same(left: Any, right: Any) -> bool:
    if isinstance(left, float):
        return left == float(right) or (math.isnan(left) and math.isnan(float(right)))
    return bool(left == right)


def fields_of(frame: Any, kind: str) -> dict[str, Any]:
    """Every field of a parsed frame's header, by the names of the layout."""
    found = {name: number(getattr(frame.header, name)) for name in layout("header") if name not in ("magic", "arguments")}
    for name in layout(arguments_type(kind)):
        if not name.startswith("reserved"):
            found[name] = number(getattr(frame.header.arguments, name))
    return found


def payload_of(frame: Any, kind: str) -> bytes:
    """The payload's bytes, put together from what was parsed of it."""
    payload = frame.payload
    if kind == "REPLY":
        ids = getattr(payload, "ids", [])  # absent where the description's `if` says so
        return struct.pack(f"<{len(payload.q)}f", *payload.q) + struct.pack(f"<{len(ids)}i", *ids) + payload.padding
    if kind in ("OPEN", "COMMIT", "DECIDE"):
        return struct.pack(f"<{len(payload.tokens)}i", *payload.tokens)
    if kind == "PROOF":
        return bytes(payload.hmac)
    if kind == "EXCHANGE":
        entries = b"".join(struct.pack("<Qi", entry.value, entry.token) for entry in getattr(payload, "entries", []))
        words = getattr(payload, "words", [])
        return entries + struct.pack(f"<{len(words)}Q", *words)
    if kind == "VOTE":
        if not frame.header.payload_length:
            return b""
        claim = payload.claim
        rows = [struct.pack("<iII", row.token, row.shard_mass, row.mass_before) for row in claim.rows]
        return struct.pack("<II", claim.first_id, claim.end_id) + b"".join(rows)
    return bytes(payload)


def test_it_reads_every_valid_golden_frame_as_its_notes_say(decoder: ModuleType) -> None:
    for vector in chosen("data", True):
        frames = parsed(decoder, vector.data)
        assert frames is not None, vector.name
        (frame,) = frames
        found = fields_of(frame, vector.kind)
        for name, value in vector.fields.items():
            if name not in ("magic", "reserved"):
                assert same(found[name], value), f"{vector.name}: {name}"
        if vector.data[128:]:
            assert payload_of(frame, vector.kind) == vector.data[128:], vector.name


def test_it_refuses_of_the_invalid_ones_what_a_layout_can_see_and_reads_the_rest(decoder: ModuleType) -> None:
    refused, read = [], 0
    for vector in chosen("data", False):
        frames = parsed(decoder, vector.data)
        if frames is None:
            refused.append(vector)
            continue
        read += 1
        if vector.kind in wire.KIND_NAMES.values() and vector.fields["kind"] in wire.KIND_NAMES:
            found = fields_of(frames[0], wire.KIND_NAMES[vector.fields["kind"]])
            assert all(same(found[name], value) for name, value in vector.fields.items() if name in found), vector.name
    assert read > 100
    for vector in refused:
        assert vector.note["expected_reason"] in SEEN or not whole(vector), vector.name
    met = {vector.note["expected_reason"] for vector in refused}
    assert met >= SEEN


def whole(vector: Golden) -> bool:
    """Whether its payload is what its header says, and so can be parsed to its end."""
    f, size = vector.fields, len(vector.data) - 128
    wanted = {"REPLY": f.get("entry_count", 0) * (8 if f["representation"] == wire.SPARSE else 4), "PROOF": 32}
    fits = {"OPEN": 4, "COMMIT": 4, "DECIDE": 4}
    if vector.kind == "EXCHANGE":
        return size == f["payload_length"] and (size == 12 * f["entry_count"] or size >= 8 * f["entry_count"])
    if vector.kind == "VOTE":
        return size == f["payload_length"] and (size == 0 or (size >= 8 and size % 12 == 8))
    return size == f["payload_length"] and size >= wanted.get(vector.kind, 0) and size % fits.get(vector.kind, 1) == 0


def random_frame(noise: random.Random) -> bytes:
    """A frame that the transport's own encoder writes: any kind, any values, a payload of its kind's form."""
    header = Header()
    header.clear()
    header.kind = noise.choice(list(wire.KIND_NAMES))
    kind = wire.KIND_NAMES[header.kind]
    named = [*layout("header").items(), *layout(arguments_type(kind)).items()]
    for name, (_at, width, item) in named:
        if name in ("magic", "version", "kind", "flags", "arguments", "header_digest") or name.startswith("reserved"):
            continue
        top = (1 << 8 * width) - 1
        value: float = noise.choice((0, 1, top, noise.randint(0, top)))
        if item.get("type") == "s4":
            value = noise.randint(-(1 << 31), (1 << 31) - 1)
        elif item.get("type") == "f4":
            value = struct.unpack("<f", struct.pack("<f", noise.uniform(0, 1e6)))[0]
        setattr(header, name, value)
    header.representation = noise.choice((0, 1, 2))
    entries = header.entry_count = noise.choice((0, 1, 3, 32)) if kind in ("REPLY", "EXCHANGE") else 0
    sizes = {"REPLY": entries * (8 if header.representation == 2 else 4) + noise.choice((0, 0, 12)), "PROOF": 32,
             "VOTE": noise.choice((0, 8, 20, 68)), "EXCHANGE": entries * noise.choice((8, 12))}  # fmt: skip
    size = sizes.get(kind, 4 * noise.randint(0, 9) if kind in ("OPEN", "COMMIT", "DECIDE") else 0)
    # Floats that Python carries unchanged: no signalling NaN, which it would make quiet.
    payload = b"".join(struct.pack("<I", noise.getrandbits(30)) for _ in range(size // 4))
    header.payload_length = len(payload)
    frame = bytearray(128)
    header.encode(frame, 0)
    return bytes(frame) + payload


def test_random_frames_are_read_as_the_transport_reads_them(decoder: ModuleType) -> None:
    noise = random.Random(20261201)
    seen = set()
    for _ in range(RANDOM_FRAMES):
        data = random_frame(noise)
        kind = wire.KIND_NAMES[data[5]]
        seen.add(kind)
        header = Header()
        code = header.decode(data, 0)
        assert code in (0, Reason.RESERVED_BITS.code)  # a common field that the kind does not carry is no matter of layout
        frames = parsed(decoder, data)
        assert frames is not None, data.hex()
        (frame,) = frames
        found = fields_of(frame, kind)
        for name, value in found.items():
            if name != "reserved" and (code == 0 or name not in layout(arguments_type(kind))):
                assert same(getattr(header, name), value), (kind, name)
        assert payload_of(frame, kind) == data[128:]
    assert seen == set(wire.KIND_NAMES.values())


def test_frames_that_were_made_wrong_are_refused_by_both_or_by_what_only_one_can_state(decoder: ModuleType) -> None:
    """Random bytes of a signed header: what the layout refuses the transport refuses as well, for a reason of the layout's."""
    noise = random.Random(7)
    met: dict[str, int] = {}
    for _ in range(RANDOM_FRAMES):
        data = bytearray(random_frame(noise))
        at = noise.choice((noise.randrange(120), noise.randrange(64, 112), 4, 5, 6, 54))
        data[at] ^= 1 << noise.randrange(8)
        struct.pack_into("<Q", data, 120, xxh3_64(data, 0, 120, 0))
        if int.from_bytes(data[56:60], "little") != len(data) - 128 or int.from_bytes(data[60:64], "little") > 64:
            continue  # another length: not this frame any more
        code = Header().decode(bytes(data), 0)
        reason = Reason.from_code(code).value if code else "none"
        refused = parsed(decoder, bytes(data)) is None
        if refused:
            assert reason in SEEN or unfit(data), (reason, bytes(data).hex())
        elif reason in SEEN:
            assert reason == "reserved_bits", "only a stray common field is no matter of layout"
        met[f"{reason} {refused}"] = met.get(f"{reason} {refused}", 0) + 1
    assert {"none False", "bad_version True", "bad_magic True", "unknown_flag True", "reserved_bits True"} <= set(met)
    assert met.get("unknown_kind False", 0) > 0


def unfit(data: bytes | bytearray) -> bool:
    """Whether the payload does not have the form of its kind (which is a receiver's to judge, not a header's)."""
    kind, size = wire.KIND_NAMES.get(data[5], ""), len(data) - 128
    entries, width = int.from_bytes(data[60:64], "little"), 8 if data[53] == wire.SPARSE else 4
    if kind == "REPLY":
        return size < entries * width
    if kind == "EXCHANGE":
        return size != 12 * entries and size < 8 * entries
    if kind == "VOTE":
        return size != 0 and (size < 8 or size % 12 != 8)
    return (kind == "PROOF" and size < 32) or (kind in ("OPEN", "COMMIT", "DECIDE") and size % 4 != 0)
