"""Writes the golden vectors of `golden/`, or checks that they are what they were.

    python proto/make_golden.py            write every file anew
    python proto/make_golden.py --check    exit 1 and name the first files that differ, are missing or are too many

Between the frames of `golden_maker` and the files. Needs `xxhash` and nothing else; imports nothing of the transport.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from golden_maker import control, encoder, faults, group, owned, story
from golden_maker.encoder import ARGUMENTS, COMMON_FIELDS, WIDE

GOLDEN = Path(__file__).resolve().parent / "golden"


def _plain_fields(vector: story.Vector) -> dict[str, Any]:
    frame = vector.frame
    values = frame.all_fields()
    named: dict[str, Any] = {}
    for name in (*COMMON_FIELDS, *ARGUMENTS[frame.kind][1]):
        value = values[name]
        if name == "magic":
            named[name] = value.decode("ascii")
        elif name in WIDE:
            named[name] = f"0x{value:016x}"
        elif isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
            named[name] = str(value)
        else:
            named[name] = value
    if frame.kind_byte is not None:
        named["kind"] = frame.kind_byte
    header = frame.header()
    named["payload_digest"] = f"0x{int.from_bytes(header[112:120], 'little'):016x}"
    named["header_digest"] = f"0x{int.from_bytes(header[120:], 'little'):016x}"
    return named


def _frame_json(vector: story.Vector) -> dict[str, Any]:
    frame = vector.frame
    note: dict[str, Any] = {
        "name": vector.name,
        "plane": "data",
        "kind": frame.kind,
        "valid": not vector.reason,
        "summary": vector.summary,
        "session": vector.session.name,
        "to": vector.to,
        "before": list(vector.before),
        "now_us": vector.now_us,
    }
    if vector.reason:
        note |= {"expected_reason": vector.reason, "costs": vector.cost}
    else:
        note["effect"] = vector.effect
    note["fields"] = _plain_fields(vector)
    note["payload_bytes"] = len(frame.payload)
    if frame.payload:
        note["payload_seed"] = f"0x{frame.payload_seed():016x}"
    if frame.patch:
        note["patched"] = {str(offset): data.hex() for offset, data in frame.patch.items()}
    return note | {"payload": dict(vector.detail)} if vector.detail else note


def _message_value(value: Any) -> Any:
    """JSON that keeps apart what JSON mixes up: bytes, and integers beyond 2^53."""
    if isinstance(value, bytes):
        return {"bin": value.hex()}
    if isinstance(value, int) and not isinstance(value, bool) and value >= 1 << 53:
        return {"u64": f"0x{value:016x}"}
    if isinstance(value, Mapping):
        return {key: _message_value(item) for key, item in value.items()}
    return [_message_value(item) for item in value] if isinstance(value, (list, tuple)) else value


def _free_bytes(message: control.Message) -> dict[str, list[int]]:
    """[first, end) byte offsets of every value of which any content is acceptable."""
    ranges = {}
    assert message.message is not None
    for name, value in message.free.items():
        if value is None:
            value = message.message[name]
        coded = encoder.msgpack(value)
        if isinstance(value, str):
            coded = value.encode()
        elif isinstance(value, bytes):
            coded = value
        elif isinstance(value, int):
            coded = coded[1:]
        if message.data.count(coded) != 1:
            raise ValueError(f"{message.name}: {name} is not found once")
        start = message.data.index(coded)
        ranges[name] = [start, start + len(coded)]
    return ranges


def _message_json(message: control.Message) -> dict[str, Any]:
    note: dict[str, Any] = {
        "name": message.name,
        "plane": "control",
        "kind": "none" if message.message is None else message.message.get("kind", "none"),
        "valid": not message.reason,
        "summary": message.summary,
        "session": "v64",
        "to": message.to,
    }
    if message.reason:
        note |= {"expected_reason": message.reason, "expected_field": message.field}
    else:
        note |= {"effect": message.effect, "free_bytes": _free_bytes(message)}
    if message.message is not None:
        note["message"] = _message_value(message.message)
    return note


def _sessions_json() -> dict[str, Any]:
    sessions = {
        s.name: {
            "vocab_size": s.vocab_size,
            "depth": s.depth,
            "support": s.support,
            "max_slots": s.max_slots,
            "max_context_tokens": s.max_context_tokens,
            "dense": s.dense,
            "sparse": s.sparse,
            "session": f"0x{s.session:016x}",
            "leader_nonce": f"0x{s.leader_nonce:016x}",
            "receiver_nonce": f"0x{s.receiver_nonce:016x}",
            **({} if s.group_mode == "replicate" else {"group_mode": s.group_mode}),
        }
        for s in (*story.SESSIONS, group.G64, owned.O64)
    }
    link = {
        "secret": control.SECRET.hex(),
        "leader_link_nonce": control.LEADER_LINK_NONCE.hex(),
        "receiver_link_nonce": control.RECEIVER_LINK_NONCE.hex(),
        "data": control.DATA,
        "transcript": encoder.transcript(
            *(message.data for message in control.messages() if message.name in ("hello", "hello_ack"))
        ).hex(),
    }
    return {"sessions": sessions, "link": {"v64": link}}


def _text(note: Mapping[str, Any]) -> bytes:
    """JSON with one line a key, lists of scalars on their line."""
    lines = [f"  {json.dumps(key)}: {_inline(value)}" for key, value in note.items()]
    return ("{\n" + ",\n".join(lines) + "\n}\n").encode()


def _inline(value: Any) -> str:
    if isinstance(value, Mapping) and len(json.dumps(value)) > 100:
        return "{\n" + ",\n".join(f"    {json.dumps(k)}: {json.dumps(v)}" for k, v in value.items()) + "\n  }"
    return json.dumps(value, allow_nan=False)


def golden_files() -> dict[str, bytes]:
    """Every golden file by name."""
    valid = [*story.valid(), *group.valid(), *owned.valid()]
    files = {"sessions.json": _text(_sessions_json())}
    for vector in [*valid, *faults.invalid(valid, group.faults, owned.faults), *control.proofs()]:
        if f"{vector.name}.json" in files:
            raise ValueError(f"two vectors are named {vector.name}")
        files[f"{vector.name}.bin"] = vector.frame.encode() if vector.stored else vector.frame.header()
        files[f"{vector.name}.json"] = _text(_frame_json(vector))
    for message in control.messages():
        if f"{message.name}.json" in files:
            raise ValueError(f"two vectors are named {message.name}")
        files[f"{message.name}.bin"] = message.data
        files[f"{message.name}.json"] = _text(_message_json(message))
    return files


def differences(folder: Path) -> list[str]:
    """One line for every file of `folder` that is not what it should be."""
    files = golden_files()
    found = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    lines = [f"{name}: missing" for name in files if name not in found]
    lines += [f"{name}: no vector has this name" for name in found if name not in files]
    return sorted(lines + [f"{name}: differs" for name in files if name in found and found[name] != files[name]])


def main() -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description="Writes or checks the golden vectors of the PP1Q wire format.")
    parser.add_argument("--check", action="store_true", help="change nothing; exit 1 when a file differs")
    parser.add_argument("--folder", type=Path, default=GOLDEN, help="where the files are (default: proto/golden)")
    arguments = parser.parse_args()
    if arguments.check:
        lines = differences(arguments.folder)
        print("\n".join(lines[:20]) if lines else "the golden vectors are unchanged")
        return 1 if lines else 0
    arguments.folder.mkdir(parents=True, exist_ok=True)
    files = golden_files()
    for path in arguments.folder.iterdir():
        if path.name not in files and path.suffix in (".bin", ".json"):
            path.unlink()
    for name, data in files.items():
        (arguments.folder / name).write_bytes(data)
    print(f"{len(files)} files written to {arguments.folder}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
