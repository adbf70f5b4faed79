"""The control plane's golden messages, and the proofs that follow from the HELLO and the HELLO-ACK among them.

Between `encoder` and `make_golden`. The receiver connects and says HELLO; the leader listens and answers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from . import encoder as enc
from .encoder import Frame
from .story import V64, Vector

SECRET = bytes(range(0x40, 0x60))
RECEIVER_LINK_NONCE = bytes(range(0xC0, 0xD0))
LEADER_LINK_NONCE = bytes(range(0xE0, 0xF0))
DATA = "tcp://127.0.0.1:47110"


@dataclass(frozen=True)
class Message:
    """One control message: its bytes, who gets it, and what must come of it."""

    name: str
    summary: str
    to: str  # listener | connector | engine
    data: bytes
    message: Mapping[str, Any] | None  # None: the bytes are no message
    effect: str = ""
    reason: str = ""
    field: str = ""  # the field that the refusal names
    free: Mapping[str, Any] = dataclasses.field(
        default_factory=dict
    )  # texts and nonces any value of which is acceptable


def id_map_hash(vocab: int) -> str:
    """SHA-256 of the int32 IDs 0..vocab-1."""
    return hashlib.sha256(struct.pack(f"<{vocab}i", *range(vocab))).hexdigest()


def hello_map(role: str) -> dict[str, Any]:
    """What each side of session v64 states, in the order in which it travels."""
    receiver = role == "receiver"
    row = V64.dense_row_bytes
    return {
        "role": role,
        "boot_nonce": V64.receiver_nonce if receiver else V64.leader_nonce,
        "link_nonce": RECEIVER_LINK_NONCE if receiver else LEADER_LINK_NONCE,
        "wire_version": 2,
        "semantic_id": "dyadic24-standard-v1",
        "verifier_id": "standard-rejection-v1",
        "rng_abi": "philox4x32-10-pp1q-1",
        "precision": "fp32-le",
        "digest": "xxh3-64",
        "draw_proof": True,
        "representations": ["dense", "sparse"],
        "link_kinds": ["tcp"],
        "vocab_size": V64.vocab_size,
        "id_map_hash": id_map_hash(V64.vocab_size),
        "draft_identity": "toy-draft sha256:00",
        "draft_kind": "native",
        "target_identity": "toy-target sha256:01",
        "max_slots": V64.max_slots,
        "depth": V64.depth,
        "support": V64.support,
        "batch_requests": 2,
        "batches_in_flight": 2,
        "max_context_tokens": V64.max_context_tokens,
        "slot_part_bytes": {
            "tokens": 4 * V64.depth,
            "dense_row": row,
            "dense_request": V64.depth * row,
            "sparse_row": 8 * V64.support,
            "sparse_request": V64.depth * 8 * V64.support,
        },
        "group_size": 1,
        "group_mode": "replicate",
        "rank": 0,
    }


def _hello(**changes: Any) -> dict[str, Any]:
    return {"kind": "hello", "hello": {**hello_map("receiver"), **changes}}


def _ack(hello: Mapping[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    ack = {
        "kind": "hello_ack", "hello": {**hello_map("leader"), **(hello or {})}, "session": V64.session,
        "secret": SECRET, "data": DATA,
    }  # fmt: skip
    return ack | changes


def _valid() -> list[Message]:
    hello, ack = _hello(), _ack()
    refuse = {
        "kind": "refuse", "reason": "limits_mismatch", "field": "vocab_size", "ours": "64", "theirs": "128",
    }  # fmt: skip
    body = {"rounds": 3, "latency_us": {"p50": 12.5}, "reasons": {}}
    free = {"boot_nonce": V64.receiver_nonce, "link_nonce": RECEIVER_LINK_NONCE}
    ack_free = {
        "boot_nonce": V64.leader_nonce, "link_nonce": LEADER_LINK_NONCE, "session": V64.session, "secret": SECRET,
        "data": DATA[len("tcp://") :],
    }  # fmt: skip

    def valid(name: str, to: str, message: Mapping[str, Any], effect: str, summary: str, **free: Any) -> Message:
        return Message(name, summary, to, enc.msgpack(message), message, effect, free=free)

    return [
        valid("hello", "listener", hello, "agreed", "The receiver of session v64 says HELLO.", **free),
        valid("hello_ack", "connector", ack, "agreed", "The leader of session v64 answers it.", **ack_free),
        valid("refuse", "connector", refuse, "refused:limits_mismatch", "The HELLO is refused: two vocabularies."),
        valid("goodbye", "engine", {"kind": "goodbye", "reason": "cancelled"}, "goodbye", "An orderly end.",
              reason="cancelled"),
        valid("keepalive", "engine", {"kind": "keepalive"}, "keepalive", "Nothing but life."),
        valid("options", "engine", {"kind": "options", "body": {"rounds": 100}}, "options",
              "What a benchmark's proposer wants measured.", body=None),
        valid("report", "engine", {"kind": "report", "body": body}, "report", "A measurement.", body=None),
    ]  # fmt: skip


def _malformed() -> list[Message]:
    whole = enc.msgpack(_hello())
    keepalive = enc.msgpack({"kind": "keepalive"})
    empty = enc.msgpack({"kind": "report", "body": None})
    assert empty.endswith(b"\xc0")

    def report(body: bytes) -> bytes:
        """A REPORT, right in itself, whose body is these bytes."""
        return empty[:-1] + body

    cases = (
        ("empty", "No byte at all.", b""),
        ("cut", "A HELLO without its last byte.", whole[:-1]),
        ("trailing", "A byte after the map.", keepalive + b"\x00"),
        ("not_a_map", "A list.", b"\x91" + keepalive),
        ("integer_key", "A key that is an integer.", report(b"\x81\x01\xa1a")),
        ("bytes_key", "A key that is a byte string.", report(b"\x81\xc4\x01a\x01")),
        ("key_twice", "A key twice.", b"\x82" + 2 * keepalive[1:]),
        ("extension", "An extension type.", report(b"\xd4\x01\x00")),
        ("timestamp", "The timestamp extension.", report(b"\xd6\xff\x00\x00\x00\x00")),
        ("text_not_utf8", "A text that is not UTF-8.", report(b"\xa2\xff\xfe")),
        ("not_a_number", "A float that is NaN.", report(b"\xcb\x7f\xf8" + bytes(6))),
        ("infinite", "A float32 that is infinite.", report(b"\xca\x7f\x80\x00\x00")),
        ("too_deep", "A map at depth 5.", enc.msgpack({"kind": "report", "body": {"a": {"b": {"c": {}}}}})),
        ("claims_much", "A list that claims 2^32-1 items.", report(b"\xdd\xff\xff\xff\xff")),
        ("long_list", "A list of 1,025 items.", report(b"\xdc\x04\x01" + bytes(1025))),
        ("reserved_code", "The byte 0xc1, which msgpack never uses.", report(b"\xc1")),
    )
    return [
        Message(f"malformed_{name}", summary, "engine", data, None, reason="malformed") for name, summary, data in cases
    ]


def _bad_hellos() -> list[Message]:
    def bad(name: str, reason: str, field: str, summary: str, **changes: Any) -> Message:
        message = _hello(**changes)
        return Message(f"hello_{name}", summary, "listener", enc.msgpack(message), message, reason=reason, field=field)

    def odd(name: str, reason: str, field: str, summary: str, message: dict[str, Any]) -> Message:
        return Message(f"hello_{name}", summary, "listener", enc.msgpack(message), message, reason=reason, field=field)

    without = _hello()
    del without["hello"]["rank"]
    parts = {**hello_map("receiver")["slot_part_bytes"], "dense_row": 260}
    version = "wire_version"
    return [
        odd("version_1", "bad_version", version, "A version 1 peer, whose HELLO has other keys.",
            {"kind": "hello", version: 1, "greedy": True}),
        bad("version_1_nested", "bad_version", version, "Version 1 in the place of version 2.", wire_version=1),
        odd("no_version", "bad_version", version, "No version stated.", {"kind": "hello", "hello": {}}),
        odd("missing_field", "malformed", "rank", "A field is missing.", without),
        bad("unknown_field", "malformed", "colour", "A field that version 2 does not have.", colour="blue"),
        odd("extra_key", "malformed", "", "A key beside `kind` and `hello`.", {**_hello(), "more": 1}),
        bad("wrong_type", "malformed", "depth", "A text where an integer must be.", depth="3"),
        bad("long_identity", "malformed", "draft_identity", "An identity of 257 characters.", draft_identity="x" * 257),
        bad("short_nonce", "malformed", "link_nonce", "A link nonce of 15 bytes.", link_nonce=bytes(15)),
        bad("representation_order", "malformed", "representations", "Representations in another order.",
            representations=["sparse", "dense"]),
        bad("no_boot_nonce", "limits_mismatch", "boot_nonce", "A boot nonce of 0.", boot_nonce=0),
        bad("lists_as_text", "malformed", "representations", "A text where a list must be.", representations="dense"),
        bad("link_kind_twice", "malformed", "link_kinds", "A link kind twice.", link_kinds=["tcp", "tcp"]),
        bad("draw_proof_1", "malformed", "draw_proof", "The integer 1 where true must be.", draw_proof=1),
        bad("id_map_upper", "malformed", "id_map_hash", "Upper-case digits.",
            id_map_hash=id_map_hash(V64.vocab_size).upper()),
        bad("no_parts", "malformed", "slot_part_bytes", "No parts.", slot_part_bytes={}),
        bad("part_as_text", "malformed", "slot_part_bytes", "A part whose size is a text.",
            slot_part_bytes={"tokens": "12"}),
        bad("part_of_0", "limits_mismatch", "slot_part_bytes", "A part of 0 bytes.", slot_part_bytes={"tokens": 0}),
        odd("not_a_map", "bad_version", version, "No map, so no version.", {"kind": "hello", "hello": 2}),
        bad("few_slots", "limits_mismatch", "max_slots", "Fewer slots than requests in flight.", max_slots=3),
        bad("same_role", "semantic_mismatch", "role", "Two leaders.", role="leader"),
        bad("same_boot_nonce", "boot_nonce", "boot_nonce", "Our own boot nonce.", boot_nonce=V64.leader_nonce),
        bad("same_link_nonce", "auth_failed", "link_nonce", "Our own link nonce.", link_nonce=LEADER_LINK_NONCE),
        bad("semantic_id", "semantic_mismatch", "semantic_id", "Another meaning of q.",
            semantic_id="dyadic24-other-v1"),
        bad("rng_abi", "semantic_mismatch", "rng_abi", "Another RNG.", rng_abi="philox4x32-7"),
        bad("draw_proof", "semantic_mismatch", "draw_proof", "Without draw proof.", draw_proof=False),
        bad("link_kinds", "semantic_mismatch", "link_kinds", "No common link kind.", link_kinds=["rdma"]),
        bad("draft_identity", "identity_mismatch", "draft_identity", "Another draft.",
            draft_identity="toy-draft sha256:ff"),
        bad("draft_kind", "identity_mismatch", "draft_kind", "An adapted draft.", draft_kind="adapted"),
        bad("id_map", "identity_mismatch", "id_map_hash", "Another map of global IDs.", id_map_hash="0" * 64),
        bad("vocab_size", "limits_mismatch", "vocab_size", "Another vocabulary.", vocab_size=128),
        bad("context", "limits_mismatch", "max_context_tokens", "A longer context.", max_context_tokens=65),
        bad("slot_parts", "limits_mismatch", "slot_part_bytes", "Another row length.", slot_part_bytes=parts),
        bad("rank", "limits_mismatch", "rank", "A rank beyond its group.", rank=1),
        odd("is_keepalive", "unexpected_kind", "", "A KEEPALIVE where a HELLO must come.", {"kind": "keepalive"}),
    ]  # fmt: skip


def _bad_answers() -> list[Message]:
    def bad(
        name: str, reason: str, field: str, summary: str, message: dict[str, Any], to: str = "connector"
    ) -> Message:
        return Message(name, summary, to, enc.msgpack(message), message, reason=reason, field=field)

    refuse = {"kind": "refuse", "reason": "not_a_reason", "field": "x", "ours": "a", "theirs": "b"}
    return [
        bad("ack_version_1", "bad_version", "wire_version", "An answer of version 1.", _ack({"wire_version": 1})),
        bad("ack_session_0", "malformed", "", "Session 0.", _ack(session=0)),
        bad("ack_secret", "malformed", "", "A secret of 31 bytes.", _ack(secret=SECRET[:31])),
        bad("ack_data", "malformed", "", "A data endpoint that is none.", _ack(data="127.0.0.1:47110")),
        bad("ack_link_kind", "semantic_mismatch", "link_kinds", "An endpoint of a kind nobody stated.",
            _ack(data="rdma://127.0.0.1:47110")),
        bad("ack_depth", "limits_mismatch", "depth", "Another depth.", _ack({"depth": 2})),
        bad("ack_hello_not_a_map", "malformed", "", "No HELLO in it.", {**_ack(), "hello": 2}),
        bad("ack_extra_key", "malformed", "", "A key too many.", _ack(colour="blue")),
        bad("refuse_number", "malformed", "", "A number where a text must be.",
            {**refuse, "reason": "mass", "ours": 1}),
        bad("refuse_long", "malformed", "", "A text of 257 characters.",
            {**refuse, "reason": "mass", "theirs": "x" * 257}),
        bad("refuse_unknown", "malformed", "", "A reason that is none.", refuse),
        bad("connector_gets_hello", "unexpected_kind", "", "A HELLO where its answer must come.", _hello()),
        bad("goodbye_extra_key", "malformed", "", "A key too many.", {"kind": "goodbye", "reason": "cancelled", "x": 1},
            "engine"),
        bad("message_unknown", "malformed", "", "A kind that is none.", {"kind": "howdy"}, "engine"),
        bad("message_without_kind", "malformed", "", "No kind.", {"reason": "cancelled"}, "engine"),
    ]  # fmt: skip


def messages() -> list[Message]:
    """Every control message, valid ones first."""
    return [*_valid(), *_malformed(), *_bad_hellos(), *_bad_answers()]


# -- proofs of a link --------------------------------------------------------------------------------------------------


def _proof(role: str) -> Frame:
    script = enc.transcript(enc.msgpack(_hello()), enc.msgpack(_ack()))
    payload = enc.link_proof(SECRET, role, 0, V64.session, LEADER_LINK_NONCE, RECEIVER_LINK_NONCE, script)
    nonce, code = (V64.leader_nonce, 1) if role == "leader" else (V64.receiver_nonce, 2)
    fields = {"boot_nonce": nonce, "session": V64.session, "shard": 0, "subject": code}
    return Frame("PROOF", V64.leader_nonce, fields, payload)


def proofs() -> list[Vector]:
    """PROOF frames, valid and invalid."""
    ours, theirs = _proof("receiver"), _proof("leader")
    at_port = "listener_port"

    def bad(name: str, reason: str, summary: str, frame: Frame) -> Vector:
        return Vector(name, summary, V64, at_port, frame, reason=reason, cost="link")

    forged = bytes([ours.payload[0] ^ 1]) + ours.payload[1:]
    status = Frame("STATUS", V64.leader_nonce, {"boot_nonce": V64.receiver_nonce, "session": V64.session, "status": 42})
    return [
        Vector("proof_receiver", "The receiver, which connected, proves itself first.", V64, at_port, ours, (),
               "proven", {"hmac": ours.payload.hex()}),
        Vector("proof_leader", "The leader's answer.", V64, "connector_link", theirs, (), "proven",
               {"hmac": theirs.payload.hex()}),
        bad("proof_forged", "auth_failed", "One bit of the HMAC is wrong; the digest over it is right.",
            replace(ours, payload=forged)),
        bad("proof_digest", "payload_digest", "The payload's digest is off by one bit.",
            replace(ours, payload_digest=ours.digest_of_payload() ^ 1)),
        bad("proof_role", "auth_failed", "The receiver says it is the leader.", ours.but(subject=1)),
        bad("proof_rank", "auth_failed", "Another rank.", ours.but(shard=1)),
        bad("proof_reflected", "boot_nonce", "Our own proof comes back.", theirs),
        bad("proof_session", "session_mismatch", "A session nobody agreed on.", ours.but(session=V64.session ^ 1)),
        bad("proof_short", "length_bounds", "A proof of 16 bytes.", replace(ours, payload=ours.payload[:16])),
        bad("proof_is_status", "unexpected_kind", "A STATUS before the proof.", status),
        bad("proof_magic", "bad_magic", "Another protocol on the data port.", ours.but(magic=b"GET ")),
    ]  # fmt: skip
