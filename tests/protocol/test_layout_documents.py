"""`pp1q_v2.ksy` and `spec.md` against the code: every offset, width, code, table and bound they state is the code's."""

from __future__ import annotations

import hashlib
import hmac
import re
import struct
from functools import cache
from typing import Any

import pytest
import yaml

from pp1q_transport import control_codec, wire
from pp1q_transport._native import kernels
from pp1q_transport.errors import Reason
from pp1q_transport.session import hello, negotiate, terms
from pp1q_transport.session.negotiate import Role

from . import golden as gold
from .golden import Golden, chosen

WIDTHS = {"u1": 1, "u2": 2, "u4": 4, "u8": 8, "s4": 4, "f4": 4}
SPEC = (gold.PROTO / "spec.md").read_text()
KINDS = {name: code for code, name in wire.KIND_NAMES.items()}
COMMON_UPTO = 64
NOTICES = ("CLOSE", "RESET", "CANCEL", "STATUS", "PROOF")
BALLOTS = ("VOTE", "DECIDE", "RELEASED", "LEAVE")


# -- pp1q_v2.ksy -------------------------------------------------------------------------------------------------------


@cache
def ksy() -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((gold.PROTO / "pp1q_v2.ksy").read_text())
    return loaded


def width(item: dict[str, Any]) -> int:
    """Bytes of one fixed-size attribute."""
    if "contents" in item:
        return len(item["contents"])
    return int(item["size"]) if "size" in item else WIDTHS[item["type"]]


def layout(type_name: str, start: int = 0) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """(offset, bytes, attribute) of every attribute of a fixed-size type."""
    placed = {}
    for item in ksy()["types"][type_name]["seq"]:
        placed[item["id"]] = (start, width(item), item)
        start += width(item)
    return placed


def arguments_type(kind: str) -> str:
    header = layout("header")
    return str(header["arguments"][2]["type"]["cases"][f"kind::{kind.lower()}"])


def all_fields(kind: str) -> dict[str, tuple[int, int, dict[str, Any]]]:
    """Common fields and arguments of a kind, by the ksy."""
    return layout("header") | layout(arguments_type(kind), 64)


def is_reserved(name: str, item: dict[str, Any]) -> bool:
    return (
        name.startswith("reserved") or name in ("magic", "version", "kind", "flags", "arguments") or "contents" in item
    )


def test_the_ksy_header_has_128_bytes_and_every_union_48() -> None:
    assert sum(size for _, size, _ in layout("header").values()) == wire.HEADER_BYTES
    cases = layout("header")["arguments"][2]["type"]["cases"]
    assert {case.removeprefix("kind::").upper() for case in cases} == set(KINDS)
    for type_name in cases.values():
        assert sum(size for _, size, _ in layout(type_name).values()) == 48, type_name
    fixed = layout("header")
    assert (fixed["magic"][2]["contents"], fixed["version"][2]["valid"]) == (wire.MAGIC.decode(), wire.WIRE_VERSION)
    assert ksy()["meta"]["endian"] == "le"


def test_the_ksy_enums_are_the_codes() -> None:
    enums = ksy()["enums"]
    assert {code: name.upper() for code, name in enums["kind"].items()} == wire.KIND_NAMES
    assert enums["representation"] == {0: "none"} | wire.REPRESENTATION_NAMES
    assert enums["source"] == {wire.VERIFIED: "verified", wire.TARGET_ONLY: "target_only"}
    assert enums["reason"] == {0: "none"} | {reason.code: reason.value for reason in Reason}
    assert list(enums["reason"]) == sorted(enums["reason"])


def encoded(kind: str, name: str, value: Any) -> bytes:
    header = wire.Header()
    header.clear()
    header.kind = KINDS[kind]
    setattr(header, name, value)
    data = bytearray(wire.HEADER_BYTES)
    header.encode(data, 0)
    return bytes(data)


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_encoder_writes_every_field_where_the_ksy_says(kind: str) -> None:
    for name, (offset, size, item) in all_fields(kind).items():
        if is_reserved(name, item) or name == "header_digest":
            continue
        blank = encoded(kind, name, 0)
        if item["type"] == "f4":
            value: Any = struct.unpack("<f", b"\x81\x82\x03\x3f")[0]
            raw = b"\x81\x82\x03\x3f"
        else:
            raw = bytes(range(0x71, 0x71 + size))
            value = int.from_bytes(raw, "little")
        data = encoded(kind, name, value)
        assert data[offset : offset + size] == raw, name
        assert data[:offset] == blank[:offset], name
        assert data[offset + size : 120] == blank[offset + size : 120], name
        assert data[120:] == struct.pack("<Q", kernels.xxh3_64(data, 0, 120, 0))


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_decoder_refuses_every_reserved_byte_of_the_ksy(kind: str) -> None:
    named = all_fields(kind)
    reserved = [o + i for name, (o, size, item) in named.items() if is_reserved(name, item) for i in range(size)
                if name not in ("magic", "version", "kind", "arguments")]  # fmt: skip
    for byte in reserved:
        data = bytearray(encoded(kind, "session", 1))
        data[byte] ^= 0x10
        struct.pack_into("<Q", data, 120, kernels.xxh3_64(data, 0, 120, 0))
        expected = Reason.UNKNOWN_FLAG if byte in (6, 7) else Reason.RESERVED_BITS
        assert wire.Header().decode(data, 0) == expected.code, byte


def read(data: bytes, type_name: str, at: int, into: dict[str, Any]) -> None:
    """A small interpreter of the fixed-size types, to hold the ksy itself against the golden bytes."""
    for name, (offset, size, item) in layout(type_name, at).items():
        raw = data[offset : offset + size]
        if "contents" in item:
            contents = item["contents"]
            assert raw == (contents.encode() if isinstance(contents, str) else bytes(contents)), name
        elif name == "arguments":
            kind = ksy()["enums"]["kind"][into["kind"]]
            read(data, item["type"]["cases"][f"kind::{kind}"], offset, into)
        elif item["type"] == "f4":
            into[name] = struct.unpack("<f", raw)[0]
        else:
            into[name] = int.from_bytes(raw, "little", signed=item["type"].startswith("s"))
            assert into[name] == item.get("valid", into[name]), name
            if "enum" in item:
                assert into[name] in ksy()["enums"][item["enum"]], name


@pytest.mark.parametrize("vector", chosen("data", True), ids=lambda g: g.name)
def test_the_ksy_reads_the_golden_frames(vector: Golden) -> None:
    found: dict[str, Any] = {}
    read(vector.data, "header", 0, found)
    assert found == {name: value for name, value in vector.fields.items() if name != "magic"}


# -- spec.md -----------------------------------------------------------------------------------------------------------


def section(title: str) -> str:
    """The text under a heading, up to the next heading of any level."""
    found = re.search(rf"^#+ {re.escape(title)}\n(.*?)(?=^#|\Z)", SPEC, re.DOTALL | re.MULTILINE)
    assert found, title
    return found.group(1)


def tables(text: str) -> list[list[dict[str, str]]]:
    """Every table of a text as rows of column name -> cell, backticks taken off."""
    found = []
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        lines = [[cell.strip() for cell in line.strip().strip("|").split("|")] for line in block.strip().split("\n")]
        found.append([dict(zip(lines[0], (cell.replace("`", "") for cell in row), strict=True)) for row in lines[2:]])
    return found


def table(title: str, index: int = 0) -> list[dict[str, str]]:
    return tables(section(title))[index]


def places(rows: list[dict[str, str]]) -> dict[str, tuple[int, int]]:
    return {row["Field"].split(":")[0]: (int(row["Offset"]), int(row["Bytes"])) for row in rows}


def test_the_header_table_is_the_ksy() -> None:
    assert places(table("Header")) == {name: (o, size) for name, (o, size, _) in layout("header").items()}


@pytest.mark.parametrize("kind", list(KINDS))
def test_the_argument_tables_are_the_ksy(kind: str) -> None:
    title = next((", ".join(shared) for shared in (NOTICES, BALLOTS) if kind in shared), kind)
    expected = {
        name: (offset, size)
        for name, (offset, size, item) in layout(arguments_type(kind), 64).items()
        if not is_reserved(name, item)
    }
    assert places(table(title)) == expected


def test_the_kinds_table_is_the_code() -> None:
    rows = table("Kinds")
    assert {int(row["Code"]): row["Kind"] for row in rows} == wire.KIND_NAMES
    for row in rows:
        carries = bool(wire.ALLOWED_FIELDS[int(row["Code"])] & wire._F_PAYLOAD)
        assert (row["Payload"] != "none") is carries, row


COLUMNS = {
    "request": wire._F_REQUEST, "slot": wire._F_SLOT, "round": wire._F_ROUND, "position": wire._F_POSITION,
    "shard": wire._F_SHARD, "depth": wire._F_DEPTH, "representation": wire._F_REPRESENTATION,
    "payload": wire._F_PAYLOAD, "entry_count": wire._F_ENTRIES,
}  # fmt: skip
BOTH = {"request": ("request", "request_generation"), "slot": ("slot", "slot_generation"),
        "payload": ("payload_length", "payload_digest")}  # fmt: skip


def test_the_table_of_common_fields_is_what_the_decoder_allows() -> None:
    rows = table("Common fields by kind")
    assert [row["Kind"] for row in rows] == list(KINDS)
    for row in rows:
        kind = row["Kind"]
        flags = 0
        for column, flag in COLUMNS.items():
            assert row[column] in ("x", "-")
            allowed = row[column] == "x"
            flags |= flag if allowed else 0
            for name in BOTH.get(column, (column,)):
                code = wire.Header().decode(encoded(kind, name, 1), 0)
                assert code == (0 if allowed else Reason.RESERVED_BITS.code), (kind, name)
        assert flags == wire.ALLOWED_FIELDS[KINDS[kind]], kind


def test_the_reasons_table_is_the_code_and_its_costs_are_the_golden_ones() -> None:
    rows = table("Reasons")
    assert {int(row["Code"]): row["Reason"] for row in rows} == {reason.code: reason.value for reason in Reason}
    costs: dict[str, set[str]] = {reason.value: set() for reason in Reason}
    for plane in ("data", "control"):
        for vector in chosen(plane, False):
            costs[vector.note["expected_reason"]].add(vector.note.get("costs", "session"))
    assert {row["Reason"]: row["Costs"] for row in rows} == {
        name: ", ".join(sorted(found)) or "-" for name, found in costs.items()
    }


def packed(rows: list[dict[str, str]], values: dict[str, bytes]) -> bytes:
    """Puts `values` where a table of offsets says; the table must be gapless and each value of its size."""
    data = b""
    for row in rows:
        name = row["Field"].split(":")[0]
        assert int(row["Offset"]) == len(data), name
        assert len(values[name]) == int(row["Bytes"]), name
        data += values[name]
    return data


def test_the_payload_seed_table_is_the_code() -> None:
    header = wire.Header()
    header.clear()
    header.kind = wire.REPLY
    values = {"kind": bytes([wire.REPLY]), "leader_boot_nonce": bytes(range(8, 16))}
    start = 0x20
    for name, size in (("session", 8), ("request", 8), ("shard", 2), ("slot", 2), ("slot_generation", 4),
                       ("request_generation", 4), ("round", 4), ("position", 4)):  # fmt: skip
        raw = bytes(range(start, start + size))
        start += size
        setattr(header, name, int.from_bytes(raw, "little"))
        values[name] = raw
    data = packed(table("Digests"), values)
    assert len(data) == 45
    nonce = int.from_bytes(values["leader_boot_nonce"], "little")
    assert header.payload_seed(nonce) == kernels.xxh3_64(data, 0, len(data), 0)


def test_the_proof_table_is_the_code() -> None:
    secret, script = bytes(range(32)), bytes(range(64, 96))
    leader, receiver = bytes(range(16)), bytes(range(16, 32))
    text = section("Joining a link to a session")
    for code, role in ((0, Role.LEADER), (1, Role.RECEIVER)):
        values = {
            "label": b"pp1q link proof 2", "role": bytes([code]), "rank": struct.pack("<I", 0x01020304),
            "session": struct.pack("<Q", 0x1112131415161718), "leader_link_nonce": leader,
            "receiver_link_nonce": receiver, "transcript": script,
        }  # fmt: skip
        data = packed(tables(text)[0], values)
        assert f"these {len(data)} bytes" in text.replace("\n", " ")
        expected = hmac.new(secret, data, hashlib.sha256).digest()
        assert negotiate.proof(secret, role, 0x01020304, 0x1112131415161718, (leader, receiver), script) == expected


def test_the_message_table_is_the_code() -> None:
    rows = table("Control messages")
    assert {row["Kind"]: frozenset(row["Keys"].split(", ")) for row in rows} == negotiate.MESSAGES
    for row in rows:
        for vector in chosen("control", True):
            if vector.kind == row["Kind"]:
                assert list(vector.note["message"]) == row["Keys"].split(", "), "the order in which they travel"


def test_the_hello_table_is_the_code() -> None:
    rows = table("HELLO fields")
    assert [row["Field"] for row in rows] == list(hello._NAMES)
    judged = sorted(rows, key=lambda row: int(row["Judged"]))
    assert [int(row["Judged"]) for row in judged] == list(range(1, len(rows) + 1))
    stated = [(row["Field"], row["Reason"], row["Rule"]) for row in judged]
    assert stated == [(name, reason.value, rule.value) for name, reason, rule in hello.FIELDS]
    integers = {
        row["Field"]: row["Bounds"] for row in rows if row["Type"] == "integer" and row["Field"] != "wire_version"
    }
    assert integers == {name: f"{low}..{high}" for name, (low, high) in hello._INTEGERS.items()}
    assert {row["Field"] for row in rows if row["Type"] == "text"} == {*hello._TEXTS, *hello._CHOICES, "id_map_hash"}
    assert {row["Field"] for row in rows if row["Type"] == "list of texts"} == set(hello._LISTS)
    by_name = {row["Field"]: row["Bounds"] for row in rows}
    assert by_name["link_nonce"] == str(hello.NONCE_BYTES)
    assert by_name["wire_version"] == str(hello.WIRE_VERSION) == str(wire.WIRE_VERSION)
    assert by_name["draft_kind"] == ", ".join(hello.DRAFT_KINDS)
    assert f"1..{hello.TEXT_CHARS} printable" in section("HELLO fields")


@pytest.mark.parametrize(
    ("title", "value"),
    (
        ("Control messages", f"{control_codec.MESSAGE_LIMIT:,} bytes"),
        ("Control messages", f"({control_codec.REPORT_LIMIT:,} between"),
        ("Control messages", f"{control_codec.MAX_DEPTH} levels deep"),
        ("Control messages", f"{control_codec.MAX_ITEMS:,} items"),
        ("Control messages", f"{control_codec.MAX_TEXT_BYTES:,} bytes a text"),
        ("Control messages", f"`secret` ({negotiate.SECRET_BYTES} bytes)"),
        ("Control messages", f"at most {negotiate._DATA_CHARS} printable"),
        ("Joining a link to a session", "(160 bytes)"),
        ("Header", f"1..{terms.MAX_DEPTH}"),
    ),
)
def test_a_bound_of_the_prose_is_the_codes(title: str, value: str) -> None:
    assert value in section(title).replace("\n  ", " ").replace("\n", " ")
