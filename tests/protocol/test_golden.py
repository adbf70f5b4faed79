"""The golden vectors against the real machines: equal bytes, exact reasons, and no cut or flipped frame that passes."""

from __future__ import annotations

import math
import struct
import subprocess
import sys
from typing import Any

import pytest

from pp1q_transport import wire
from pp1q_transport._native import kernels
from pp1q_transport.control_codec import MESSAGE_LIMIT, REPORT_LIMIT, decode_message, encode_message
from pp1q_transport.engine import terms_of
from pp1q_transport.errors import Reason
from pp1q_transport.session.negotiate import Role
from pp1q_transport.session.parts import values_of
from pp1q_transport.session.proof import proof_frame
from pp1q_transport.session.shards import REQUEST_OWNER, Claim

from . import golden as gold
from .golden import Golden, Outcome, bench_for, chosen, flips, judge_message, number, vectors

VALID = chosen("data", True)
INVALID = chosen("data", False)
MESSAGES = chosen("control", True)
BAD_MESSAGES = chosen("control", False)

# Reasons that no frame can meet, and why.
NO_FRAME_MEETS = {
    Reason.CANCELLED: "a caller's or a peer's wish, see the valid cancel_to_receiver",
    Reason.PEER_LOST: "the end of a link, see the truncations",
    Reason.LINK_ERROR: "the operating system's word on a link, see the valid reset_to_receiver",
    Reason.GENERATION_EXHAUSTED: "2^32 rounds or generations; a session of that age is tested where it counts",
    Reason.INVALID_WEIGHTS: "weights never travel",
    Reason.CIRCUIT_OPEN: "a daemon's word to its own target: no STEP was sent",
    Reason.COPY_FAILED: "this process's own device",
}


def ids(goldens: list[Golden]) -> list[str]:
    return [g.name for g in goldens]


def each(goldens: list[Golden]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("vector", goldens, ids=ids(goldens))


def same(left: object, right: object) -> bool:
    return left == right or (isinstance(left, float) and math.isnan(left) and math.isnan(float(str(right))))


# -- the files ---------------------------------------------------------------------------------------------------------


@pytest.mark.timeout(60)
def test_the_maker_still_makes_these_files() -> None:
    done = subprocess.run(
        [sys.executable, str(gold.PROTO / "make_golden.py"), "--check"], capture_output=True, text=True, timeout=50
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.timeout(60)
def test_the_check_sees_a_changed_a_missing_and_a_foreign_file(tmp_path: Any) -> None:
    script = [sys.executable, str(gold.PROTO / "make_golden.py"), "--folder", str(tmp_path)]
    subprocess.run(script, check=True, capture_output=True, timeout=25)
    changed = bytearray((tmp_path / "open.bin").read_bytes())
    changed[140] ^= 1
    (tmp_path / "open.bin").write_bytes(changed)
    (tmp_path / "close.json").unlink()
    (tmp_path / "more.bin").write_bytes(b"")
    done = subprocess.run([*script, "--check"], capture_output=True, text=True, timeout=25)
    assert done.returncode == 1
    assert done.stdout.split("\n")[:3] == [
        "close.json: missing",
        "more.bin: no vector has this name",
        "open.bin: differs",
    ]


def test_every_kind_has_a_valid_vector_and_every_reason_an_invalid_one() -> None:
    assert {g.kind for g in VALID} == set(wire.KIND_NAMES.values())
    assert {g.fields["representation"] for g in VALID if g.kind == "REPLY"} == set(wire.REPRESENTATION_NAMES)
    met = {Reason(g.note["expected_reason"]) for g in INVALID + BAD_MESSAGES}
    assert set(Reason) - met == set(NO_FRAME_MEETS)


# -- equal bytes -------------------------------------------------------------------------------------------------------


def header_of(vector: Golden) -> wire.Header:
    header = wire.Header()
    header.clear()
    for name, value in vector.fields.items():
        if name not in ("magic", "reserved", "header_digest"):
            setattr(header, name, float(value) if name == "temperature" else value)
    return header


@each(VALID)
def test_a_valid_frame_decodes_to_its_notes_and_encodes_to_its_bytes(vector: Golden) -> None:
    header = wire.Header()
    assert header.decode(vector.stored, 0) == 0
    for name, value in vector.fields.items():
        if name not in ("magic", "reserved"):
            assert same(getattr(header, name), value), name
    assert wire.KIND_NAMES[header.kind] == vector.kind
    assert len(vector.data) == wire.HEADER_BYTES + header.payload_length
    again, built = bytearray(128), bytearray(128)
    header.encode(again, 0)
    header_of(vector).encode(built, 0)
    assert bytes(again) == bytes(built) == vector.stored[:128]


def writable(vector: Golden) -> bool:
    """Whether the transport's encoder could write this fault at all."""
    f = vector.fields
    return f["magic"] == "PP1Q" and not f["reserved"] and f["kind"] in wire.KIND_NAMES and "patched" not in vector.note


@each([g for g in INVALID if writable(g)])
def test_an_invalid_frame_holds_what_its_notes_say(vector: Golden) -> None:
    """The header rebuilt from the notes by the transport's own encoder is the stored one, but for the stated fault."""
    built = bytearray(128)
    header_of(vector).encode(built, 0)
    assert bytes(built[:120]) == vector.stored[:120]
    assert (bytes(built) == vector.stored[:128]) is (vector.name != "header_digest")


@each([g for g in VALID if "payload" in g.note])
def test_a_payload_holds_what_its_notes_say(vector: Golden) -> None:
    note, f = vector.note["payload"], vector.fields
    payload = vector.data[128:]
    if vector.kind == "COMPLETION":
        entries = bytearray(16 * len(note["entries"]))
        for index, entry in enumerate(note["entries"]):
            wire.put_digest_entry(entries, index, entry["position"], entry["size"], number(entry["payload_digest"]))
        assert kernels.xxh3_64(entries, 0, len(entries), 0) == f["reply_digest"]
        assert sum(entry["size"] for entry in note["entries"]) == f["reply_size"]
    elif vector.kind in ("OPEN", "COMMIT", "DECIDE"):
        assert payload == struct.pack(f"<{f.get('token_count', len(note['tokens']))}i", *note["tokens"])
    elif vector.kind == "VOTE":
        rows = tuple(tuple(row) for row in note["rows"])
        assert Claim.unpack(payload, len(payload)) == Claim(note["first_id"], note["end_id"], rows)
    elif vector.kind == "EXCHANGE":
        said = values_of(f["purpose"], payload, f["entry_count"]).tolist()
        rows = [(float(value), token) for value, token in note.get("winners", [])]
        assert said == (rows or [type(said[0])(value) for value in note["values"]])
    elif vector.kind == "PROOF":
        assert payload.hex() == note["hmac"]
    else:
        check_row(vector, note, payload)


def check_row(vector: Golden, note: dict[str, Any], payload: bytes) -> None:
    f = vector.fields
    step = next(vectors()[name] for name in reversed(vector.note["before"]) if vectors()[name].kind in ("STEP", "GRANT"))
    header = wire.Header()
    assert header.decode(step.data, 0) == 0
    if step.kind == "GRANT":
        assert f["context"] == header.context
        seed = step.fields["seed"]
    else:
        assert f["context"] == header.step_context()
        seed = next(vectors()[name] for name in vector.note["before"] if vectors()[name].kind == "OPEN").fields["seed"]
    u24 = kernels.draw_u24(seed, 1, f["request_generation"], f["round"], f["position"])
    assert u24 == note["u24"]
    if "recipe" in note:
        assert payload == gold.recipe_payload(note["recipe"], f["entry_count"])
        assert kernels.validate_dense_row(payload, 0, f["entry_count"], len(payload), 1 << 24, f["token"], u24) == 0
        return
    q = b"".join(struct.pack("<f", count / (1 << 24)) for count in note["counts"])
    if "ids" in note:
        assert payload == q + struct.pack(f"<{len(note['ids'])}i", *note["ids"])
    else:
        assert payload == q + bytes(note["padding_bytes"])


@each([g for g in VALID if g.note["payload_bytes"]])
def test_a_payload_digest_is_taken_under_the_frames_identity(vector: Golden) -> None:
    header = wire.Header()
    assert header.decode(vector.stored, 0) == 0
    leader_nonce = gold.terms(vector.note["session"]).leader_nonce
    assert header.payload_seed(leader_nonce) == number(vector.note["payload_seed"])
    seed = header.payload_seed(leader_nonce)
    assert kernels.xxh3_64(vector.data, 128, header.payload_length, seed) == header.payload_digest


# -- driven ------------------------------------------------------------------------------------------------------------


@each(VALID)
def test_a_valid_frame_is_accepted_in_its_state(vector: Golden) -> None:
    assert bench_for(vector).feed(vector.data) == Outcome("", "", vector.note["effect"])


@each([g for g in VALID if g.name != "reply_full"])
def test_a_valid_frame_is_accepted_byte_by_byte(vector: Golden) -> None:
    bench = bench_for(vector)
    for at in range(len(vector.data) - 1):
        assert bench.feed(vector.data[at : at + 1]) == Outcome("", "", "")
    assert bench.feed(vector.data[-1:]) == Outcome("", "", vector.note["effect"])


@each(INVALID)
def test_an_invalid_frame_meets_its_reason(vector: Golden) -> None:
    outcome = bench_for(vector).feed(vector.data, gold.START_NS + vector.note["now_us"] * 1000)
    assert outcome == Outcome(vector.note["costs"], vector.note["expected_reason"], "")


@each([g for g in INVALID if g.note["costs"] in ("proposal", "frame")])
def test_a_refused_row_leaves_the_stream_in_step(vector: Golden) -> None:
    """What costs a proposal costs no more: the frame after it is still read as a frame."""
    bench = bench_for(vector)
    bench.feed(vector.data, gold.START_NS + vector.note["now_us"] * 1000)
    status = f"status_link_to_{'leader' if vector.note['to'] == 'draft_peer' else 'receiver'}"
    if vector.note["session"] == "v64":
        assert bench.feed(vectors()[status].data) == Outcome("", "", "noted")


CHUNKS = (1, 3, 64, 127, 128, 129, 255, 4096)


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("session", ("dense", "sparse", "v100", "full", "thin"))
def test_a_whole_proposal_becomes_ready_however_the_stream_is_cut(session: str, chunk: int) -> None:
    """Rows and completion in one stream: ends of chunks and ends of frames have nothing to do with each other."""
    done = vectors()[f"completion_{session}"]
    names = done.note["before"]
    step = next(index for index in reversed(range(len(names))) if vectors()[names[index]].kind == "STEP")
    bench = gold.ReceiverBench(done.note["session"])
    bench.prepare(names[: step + 1])
    stream = b"".join(vectors()[name].data for name in names[step + 1 :]) + done.data
    if session == "full" and chunk < 64:
        chunk = 4097 + chunk
    ready, frames = bench.session.ready, bench.assembler.frames
    assert gold.fill(bench.assembler, stream, gold.START_NS, chunk) == 0
    assert bench.session.ready == ready + 1
    assert bench.assembler.frames == frames + done.fields["positions"] + 1


def test_each_end_makes_the_golden_proof() -> None:
    for role, agreement in gold.agreements().items():
        assert proof_frame(agreement) == vectors()[f"proof_{role.value}"].data


def test_a_closing_receiver_sends_the_golden_close() -> None:
    bench = gold.ReceiverBench("v64")
    bench.prepare(["open"])
    bench.session.close(bench.requests.requests[vectors()["open"].fields["request"]])
    assert gold.drain(bench.session.outbox) == vectors()["close"].data


@pytest.mark.parametrize("prefix", range(0, 129, 8))
def test_a_wrong_magic_is_seen_with_its_first_byte(prefix: int) -> None:
    """A proof reader does not wait for 160 bytes of another protocol."""
    bench = gold.ProofBench("listener_port")
    stray = b"GET / HTTP/1.1\r\n" * 10
    expected = Outcome("link", "bad_magic", "") if prefix else Outcome("", "", "")
    assert bench.feed(stray[:prefix]) == expected


# -- cut and flipped ---------------------------------------------------------------------------------------------------


def header_reason(vector: Golden, bit: int) -> str:
    """What one toggled header bit must meet."""
    byte = bit >> 3
    if byte < 4:
        return "bad_magic"
    if byte == 4:
        return "bad_version"
    if byte == 5 and vector.data[5] ^ (1 << (bit & 7)) not in wire.KIND_NAMES:
        return "unknown_kind"
    return "header_digest"


def payload_cost(vector: Golden) -> str:
    return "proposal" if vector.kind == "REPLY" else "link"


def payload_bits(vector: Golden) -> range:
    """Every bit of a small payload; of the 129,280-token row, one in each of 101 places."""
    step = 1 if len(vector.data) < 4096 else 8 * 5171 + 3
    return range(1024, 8 * len(vector.data), step)


@each(VALID)
def test_every_flipped_header_bit_costs_the_link(vector: Golden) -> None:
    head = vector.data[:128] if len(vector.data) > 4096 else vector.data
    for bit, flipped in flips(head, range(1024)):
        outcome = bench_for(vector).feed(flipped)
        assert outcome == Outcome("link", header_reason(vector, bit), ""), f"bit {bit}"


@each([g for g in VALID if g.note["payload_bytes"]])
def test_every_flipped_payload_bit_is_seen_by_the_digest(vector: Golden) -> None:
    expected = Outcome(payload_cost(vector), "payload_digest", "")
    for bit, flipped in flips(vector.data, payload_bits(vector)):
        assert bench_for(vector).feed(flipped) == expected, f"bit {bit}"


def prefixes(vector: Golden) -> list[int]:
    size = len(vector.data)
    return list(range(size)) if size < 4096 else [*range(129), *range(129, size, 40961), size - 1]


@each(VALID)
def test_every_cut_frame_leaves_nothing_behind_but_peer_lost(vector: Golden) -> None:
    for size in prefixes(vector):
        bench = bench_for(vector)
        assert bench.feed(vector.data[:size]) == Outcome("", "", ""), f"{size} bytes"
        assert bench.cut() == "", f"{size} bytes"


@each(INVALID)
def test_no_flip_or_cut_makes_an_invalid_frame_pass(vector: Golden) -> None:
    """One bit of every third byte, and every seventh length: a refused frame does not become an accepted one."""
    now_ns = gold.START_NS + vector.note["now_us"] * 1000
    right = {g.data for g in VALID}
    for bit, flipped in flips(vector.data, range(vector.data[119] % 8, 8 * len(vector.data), 25)):
        if flipped not in right:
            assert bench_for(vector).feed(flipped, now_ns).refused, f"bit {bit}"
    for size in range(0, len(vector.data), 7):
        bench = bench_for(vector)
        outcome = bench.feed(vector.data[:size], now_ns)
        assert outcome.effect == "", f"{size} bytes"
        if outcome.costs != "link":
            assert bench.cut() == "", f"{size} bytes"


@each([g for g in VALID if g.kind == "REPLY" and g.name != "reply_full"])
def test_every_flip_of_q_is_seen_under_a_right_digest(vector: Golden) -> None:
    """A sender that digests what it corrupted: every bit of q and of the padding is still noticed, by its value."""
    seed, f = number(vector.note["payload_seed"]), vector.fields
    q_bytes = f["payload_length"] if f["representation"] == wire.DENSE else 4 * f["entry_count"]
    expected = {"nonfinite", "negative", "nondyadic", "mass", "padding_nonzero", "zero_entry"}
    for bit, flipped in flips(vector.data, range(1024, 1024 + 8 * q_bytes)):
        frame = bytearray(flipped)
        struct.pack_into("<Q", frame, 112, kernels.xxh3_64(frame, 128, len(frame) - 128, seed))
        outcome = bench_for(vector).feed(seal(frame))
        assert outcome.costs == "proposal", f"bit {bit}"
        assert outcome.reason in expected, f"bit {bit}"


# A sealed flip: one bit of the header changed and the header digest taken anew, as a faulty or hostile sender would.
# These fields may say something else, and the frame is then another acceptable one; every other field must be refused.
# In CLOSE, COMMIT and PROOF they are fields that no check looks at.
_NOTICE = ("subject", "status", "request", "request_generation", "slot", "slot_generation", "round")
MAY_SAY_OTHERWISE = {
    "OPEN": ("seed", "max_position"),
    "STEP": ("slot", "slot_generation", "request_generation", "round", "depth", "temperature", "support_policy",
             "budget_us", "target_context", "trace_id"),
    "COMMIT": ("accepted",),
    "CLOSE": ("subject", "status", "request_generation"),
    "RESET": _NOTICE,
    "CANCEL": _NOTICE,
    "STATUS": (*_NOTICE, "position", "shard"),
    "PROOF": ("status",),
    "REPLY": (),
    "COMPLETION": (),
    "TOKEN": ("token",),
    "GRANT": ("request", "slot", "slot_generation", "request_generation", "round", "position", "depth", "support_policy",
              "seed", "context", "target_context", "trace_id", "budget_us"),
    "VOTE": ("status",),
    "DECIDE": ("status",),
    "RELEASED": (),
    "EPOCH": ("epoch",),
    "AGREE": ("state_low", "state_high", "floor"),
    "LEAVE": ("status",),
    "EXCHANGE": ("request", "request_generation", "round", "position", "first_id", "end_id", "purpose"),
}  # fmt: skip
KIND_BITS = range(40, 48)


def seal(frame: bytearray) -> bytes:
    struct.pack_into("<Q", frame, 120, kernels.xxh3_64(frame, 0, 120, 0))
    return bytes(frame)


def free_bits(vector: Golden) -> set[int]:
    """Header bits of the fields that may say otherwise, found by what the encoder writes where."""
    bits: set[int] = set()
    names = MAY_SAY_OTHERWISE[vector.kind]
    if vector.kind == "GRANT" and gold.group_mode(vector.note["session"]) == REQUEST_OWNER:
        names = (*names, "owner")
    for name in names:
        blank, marked = bytearray(128), bytearray(128)
        header = header_of(vector)
        size = {"slot": 2, "shard": 2, "depth": 1, "status": 2}.get(name, 8 if name in WIDE else 4)
        for value, buffer in ((0, blank), (-1 if name == "token" else (1 << 8 * size) - 1, marked)):
            if name == "temperature":
                header.temperature = 0.0 if value == 0 else -1.0
            else:
                setattr(header, name, value)
            header.encode(buffer, 0)
        first = next(index for index in range(120) if blank[index] != marked[index]) if name != "temperature" else 96
        bits.update(range(8 * first, 8 * (first + size)))
    return bits


WIDE = ("seed", "request", "target_context", "trace_id", "context", "state_low", "state_high")


@each([g for g in VALID if g.name != "reply_full"])
def test_every_sealed_flip_is_refused_unless_the_field_may_say_otherwise(vector: Golden) -> None:
    free = free_bits(vector)
    for bit, flipped in flips(vector.data, range(960)):
        frame = seal(bytearray(flipped))
        missing = wire.HEADER_BYTES + int.from_bytes(frame[56:60], "little") - len(frame)
        outcome = bench_for(vector).feed(frame + bytes(max(0, missing)) if missing < 4096 else frame)
        if bit not in free and bit not in KIND_BITS:
            assert outcome.refused or outcome.effect == "", f"bit {bit}: {outcome}"
            assert outcome.refused, f"bit {bit} changed nothing, silently"
        elif bit in KIND_BITS:
            assert outcome.refused or vector.kind in ("RESET", "CANCEL", "STATUS", "CLOSE"), f"bit {bit}: {outcome}"


# -- control messages --------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """A message's JSON with its bytes and large integers back in place."""
    if isinstance(value, dict):
        if set(value) == {"bin"}:
            return bytes.fromhex(value["bin"])
        if set(value) == {"u64"}:
            return int(value["u64"], 16)
        return {key: plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, list) else value


@each([g for g in MESSAGES + BAD_MESSAGES if "message" in g.note and g.name != "malformed_too_deep"])
def test_a_message_decodes_to_its_notes_and_encodes_to_its_bytes(vector: Golden) -> None:
    assert decode_message(vector.data) == plain(vector.note["message"])
    assert encode_message(plain(vector.note["message"])) == vector.data


@each(MESSAGES)
def test_a_valid_message_has_its_effect(vector: Golden) -> None:
    outcome, _, _ = judge_message(vector.note["to"], vector.data)
    effect = vector.note["effect"]
    if effect.startswith("refused:"):
        assert outcome == Outcome("session", effect.removeprefix("refused:"), "")
    else:
        assert outcome == Outcome("", "", effect)


@each(BAD_MESSAGES)
def test_an_invalid_message_meets_its_reason(vector: Golden) -> None:
    outcome, field, agreement = judge_message(vector.note["to"], vector.data)
    assert outcome == Outcome("session", vector.note["expected_reason"], "")
    assert field == vector.note["expected_field"]
    assert agreement is None


def test_the_handshake_gives_the_golden_answer_terms_and_transcript() -> None:
    answer, _ = gold.listener().receive(decode_message(vectors()["hello"].data), gold.START_NS)
    assert encode_message(answer) == vectors()["hello_ack"].data
    for agreement in gold.agreements().values():
        assert agreement.transcript.hex() == gold.sessions()["link"]["v64"]["transcript"]
        terms = terms_of(agreement)
        for name, value in gold.sessions()["sessions"]["v64"].items():
            assert getattr(terms, name) == number(value), name


@each(MESSAGES)
def test_every_flipped_message_is_refused_but_in_nonces_and_free_text(vector: Golden) -> None:
    free = [range(8 * start, 8 * end) for start, end in vector.note["free_bytes"].values()]
    peer = Role.RECEIVER if vector.note["to"] == "listener" else Role.LEADER
    proof = vectors()["proof_receiver" if peer is Role.RECEIVER else "proof_leader"].data[128:]
    for bit, flipped in flips(vector.data, range(8 * len(vector.data))):
        outcome, _, agreement = judge_message(vector.note["to"], flipped)
        if not any(bit in values for values in free):
            assert outcome.refused, f"bit {bit}"
        if agreement is not None:  # a nonce may be anything, but then the transcript differs and no link joins
            assert not agreement.proves(peer, proof), f"bit {bit}"


def test_a_message_beyond_its_bound_is_malformed_whatever_it_holds() -> None:
    data = encode_message({"kind": "report", "body": ["x" * 16_000] * 5}, REPORT_LIMIT)
    assert len(data) > MESSAGE_LIMIT
    outcome, _, _ = judge_message("engine", data)
    assert outcome == Outcome("session", "malformed", "")
    assert decode_message(data, REPORT_LIMIT)["kind"] == "report"


@each(MESSAGES)
def test_every_cut_message_is_malformed(vector: Golden) -> None:
    for size in range(len(vector.data)):
        outcome, _, _ = judge_message(vector.note["to"], vector.data[:size])
        assert outcome == Outcome("session", "malformed", ""), f"{size} bytes"
