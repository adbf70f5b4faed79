"""A peer whose HELLO, control messages or proof break one rule, against a live leader's daemon: refused by name and counted, no
session formed, and an honest receiver is served afterwards."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import evil_peer as e
import msgpack
import pytest
import zmq
from daemon_rig import Bed, drafting

from pp1q_transport import wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.client import Role, make_hello
from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.errors import Reason
from pp1q_transport.session.negotiate import Agreement, Connector, to_map
from pp1q_transport.session.proof import proof_frame

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

R = Reason
Map = dict[str, Any]


class HelloCase(NamedTuple):
    """A rule of HELLO: `change` breaks it; the REFUSE names `field`."""

    number: str
    title: str
    reason: Reason
    field: str
    change: Callable[[Map], object]


def _set(**values: object) -> Callable[[Map], object]:
    return lambda hello: hello.update(values)


def _part(name: str, by: int) -> Callable[[Map], object]:
    return lambda hello: hello["slot_part_bytes"].__setitem__(name, hello["slot_part_bytes"][name] + by)


HELLOS = (
    HelloCase("2.601", "wire version 1", R.BAD_VERSION, "wire_version", _set(wire_version=1)),
    HelloCase("2.602", "wire version 3", R.BAD_VERSION, "wire_version", _set(wire_version=3)),
    HelloCase("2.603", "our own role", R.SEMANTIC_MISMATCH, "role", _set(role="leader")),
    HelloCase("2.604", "a role there is not", R.MALFORMED, "role", _set(role="oracle")),
    HelloCase("2.605", "boot nonce 0", R.LIMITS_MISMATCH, "boot_nonce", _set(boot_nonce=0)),
    HelloCase("2.606", "a link nonce of 15 bytes", R.MALFORMED, "link_nonce", _set(link_nonce=bytes(15))),
    HelloCase("2.607", "another q semantic", R.SEMANTIC_MISMATCH, "semantic_id", _set(semantic_id="softmax-fp32")),
    HelloCase("2.608", "another verifier", R.SEMANTIC_MISMATCH, "verifier_id", _set(verifier_id="typical-acceptance")),
    HelloCase("2.609", "another RNG", R.SEMANTIC_MISMATCH, "rng_abi", _set(rng_abi="mt19937")),
    HelloCase("2.610", "another precision", R.SEMANTIC_MISMATCH, "precision", _set(precision="bf16-le")),
    HelloCase("2.611", "another digest", R.SEMANTIC_MISMATCH, "digest", _set(digest="crc32c")),
    HelloCase("2.612", "without the draw proof", R.SEMANTIC_MISMATCH, "draw_proof", _set(draw_proof=False)),
    HelloCase("2.613", "one representation less", R.SEMANTIC_MISMATCH, "representations", _set(representations=["dense"])),
    HelloCase("2.614", "representations in another order", R.MALFORMED, "representations",
              _set(representations=["sparse", "dense"])),
    HelloCase("2.615", "no common link kind", R.SEMANTIC_MISMATCH, "link_kinds", _set(link_kinds=["shm"])),
    HelloCase("2.616", "another vocabulary", R.LIMITS_MISMATCH, "vocab_size", _set(vocab_size=65)),
    HelloCase("2.617", "a vocabulary past the bound", R.LIMITS_MISMATCH, "vocab_size", _set(vocab_size=(1 << 24) + 1)),
    HelloCase("2.618", "another ID map", R.IDENTITY_MISMATCH, "id_map_hash", _set(id_map_hash="0" * 64)),
    HelloCase("2.619", "another draft", R.IDENTITY_MISMATCH, "draft_identity", _set(draft_identity="another")),
    HelloCase("2.620", "an adapted draft", R.IDENTITY_MISMATCH, "draft_kind", _set(draft_kind="adapted")),
    HelloCase("2.621", "another target", R.IDENTITY_MISMATCH, "target_identity", _set(target_identity="another")),
    HelloCase("2.622", "more slots", R.LIMITS_MISMATCH, "max_slots", _set(max_slots=5)),
    HelloCase("2.623", "another depth", R.LIMITS_MISMATCH, "depth", _set(depth=2)),
    HelloCase("2.624", "depth 33", R.LIMITS_MISMATCH, "depth", _set(depth=33)),
    HelloCase("2.625", "another support", R.LIMITS_MISMATCH, "support", _set(support=7)),
    HelloCase("2.626", "fewer requests a batch", R.LIMITS_MISMATCH, "batch_requests", _set(batch_requests=1)),
    HelloCase("2.627", "fewer batches in flight", R.LIMITS_MISMATCH, "batches_in_flight", _set(batches_in_flight=1)),
    HelloCase("2.628", "another context", R.LIMITS_MISMATCH, "max_context_tokens", _set(max_context_tokens=127)),
    HelloCase("2.629", "a slot part of other bytes", R.LIMITS_MISMATCH, "slot_part_bytes", _part("dense_row", 64)),
    HelloCase("2.630", "another group", R.LIMITS_MISMATCH, "group_size", _set(group_size=2)),
    HelloCase("2.631", "another group mode", R.SEMANTIC_MISMATCH, "group_mode", _set(group_mode="vocabulary")),
    HelloCase("2.632", "rank 1 of one", R.LIMITS_MISMATCH, "rank", _set(rank=1)),
    HelloCase("2.633", "a field too many", R.MALFORMED, "colour", _set(colour="blue")),
    HelloCase("2.634", "a field missing", R.MALFORMED, "depth", lambda hello: hello.pop("depth")),
    HelloCase("2.635", "a depth that is a text", R.MALFORMED, "depth", _set(depth="3")),
    HelloCase("2.636", "a draw proof that is a number", R.MALFORMED, "draw_proof", _set(draw_proof=1)),
)  # fmt: skip


class MessageCase(NamedTuple):
    """A rule of the control plane: bytes that break it."""

    number: str
    title: str
    reason: Reason
    data: bytes


MESSAGES = (
    MessageCase("2.641", "no msgpack", R.MALFORMED, b"\xc1"),
    MessageCase("2.642", "a list in place of a map", R.MALFORMED, msgpack.packb([1])),
    MessageCase("2.643", "bytes behind the map", R.MALFORMED, msgpack.packb({"kind": "keepalive"}) + b"\0"),
    MessageCase("2.644", "a key twice", R.MALFORMED, b"\x82\xa4kind\xa9keepalive\xa4kind\xa9keepalive"),
    MessageCase("2.645", "a key that is a number", R.MALFORMED, msgpack.packb({1: 2})),
    MessageCase("2.646", "nested too deep", R.MALFORMED, msgpack.packb({"a": {"b": {"c": {"d": {"e": 1}}}}})),
    MessageCase("2.647", "a list of 1025", R.MALFORMED, msgpack.packb({"kind": [0] * 1025})),
    MessageCase("2.648", "a text of 16385 bytes", R.MALFORMED, msgpack.packb({"kind": "x" * 16385})),
    MessageCase("2.649", "a map that claims 2^32 - 1 keys", R.MALFORMED, b"\xdf\xff\xff\xff\xff"),
    MessageCase("2.650", "an extension type", R.MALFORMED, msgpack.packb({"kind": msgpack.ExtType(1, b"x")})),
    MessageCase("2.651", "a number that is not finite", R.MALFORMED, msgpack.packb({"kind": float("nan")})),
    MessageCase("2.652", "a text that is no UTF-8", R.MALFORMED, b"\x81\xa4kind\xa2\xff\xfe"),
    MessageCase("2.654", "a kind there is not", R.UNEXPECTED_KIND, msgpack.packb({"kind": "subscribe"})),
    MessageCase("2.655", "a report without a session", R.UNEXPECTED_KIND, encode_message({"kind": "report", "body": {}})),
    MessageCase("2.656", "a HELLO-ACK to a listener", R.UNEXPECTED_KIND, msgpack.packb({"kind": "hello_ack"})),
)  # fmt: skip

PAYLOAD, HEADER = 1, 2  # what is signed again
Forge = Callable[[bytearray], object]


class ProofCase(NamedTuple):
    """A rule of the link's proof: `forge` breaks it; `sign` says which digests are mended."""

    number: str
    title: str
    reason: Reason
    forge: Forge
    sign: int = PAYLOAD | HEADER


def _header(**values: int) -> Forge:
    def forge(frame: bytearray) -> None:
        header = wire.Header()
        assert header.decode(frame, 0) == 0
        for name, value in values.items():
            setattr(header, name, getattr(header, name) ^ value)
        header.encode(frame, 0)

    return forge


def _bit(at: int, xor: int) -> Forge:
    return lambda frame: frame.__setitem__(at, frame[at] ^ xor)


def _step(frame: bytearray) -> None:
    header = wire.Header()
    header.decode(frame, 0)
    session, nonce = header.session, header.boot_nonce
    header.clear()
    header.kind, header.session, header.boot_nonce = wire.STEP, session, nonce
    header.encode(frame, 0)


PROOFS = (
    ProofCase("2.661", "first MAC bit wrong", R.AUTH_FAILED, _bit(128, 1)),
    ProofCase("2.662", "last MAC bit wrong", R.AUTH_FAILED, _bit(159, 0x80)),
    ProofCase("2.663", "of the other role", R.AUTH_FAILED, _header(subject=3)),
    ProofCase("2.664", "of another rank", R.AUTH_FAILED, _header(shard=1)),
    ProofCase("2.665", "of another session", R.SESSION_MISMATCH, _header(session=1)),
    ProofCase("2.666", "of an earlier life", R.BOOT_NONCE, _header(boot_nonce=1 << 40)),
    ProofCase("2.667", "payload digest of nothing", R.PAYLOAD_DIGEST, _bit(112, 1), HEADER),
    ProofCase("2.668", "a flag", R.UNKNOWN_FLAG, _bit(6, 1)),
    ProofCase("2.669", "a reserved byte", R.RESERVED_BITS, _bit(54, 1)),
    ProofCase("2.670", "header digest off by a bit", R.HEADER_DIGEST, _bit(120, 1), 0),
    ProofCase("2.671", "version 1", R.BAD_VERSION, _bit(4, 3)),
    ProofCase("2.672", "another magic", R.BAD_MAGIC, _bit(0, 0x20)),
    ProofCase("2.673", "a STEP in place of the proof", R.UNEXPECTED_KIND, _step),
    ProofCase("2.674", "a payload of another length", R.LENGTH_BOUNDS, _header(payload_length=32 ^ 64)),
)  # fmt: skip


@pytest.fixture(scope="module")
def bed() -> Iterator[Bed]:
    with e.bed_for(e.WORLD, "leader") as made:
        made.up("leader")
        with drafting(made):
            yield made


class Dealer:
    """A ZeroMQ client of anybody's making."""

    def __init__(self, bed: Bed) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self.sock = self._context.socket(zmq.DEALER)
        self.sock.setsockopt(zmq.LINGER, 0)
        self.sock.setsockopt(zmq.RCVTIMEO, 20_000)
        self.sock.connect(e.endpoint_of(bed, "leader"))

    def __enter__(self) -> zmq.Socket[bytes]:
        return self.sock

    def __exit__(self, *_exc: object) -> None:
        self.sock.close()
        self._context.term()


def hello_of(bed: Bed) -> Any:
    return make_hello(Role.RECEIVER, int.from_bytes(os.urandom(7), "little") + 1, **e.options_of(bed, e.WORLD))


def counted(bed: Bed, reason: Reason) -> int:
    return bed.status("leader")["reasons"].get(reason.value, 0)


def serves_an_honest_peer(bed: Bed, formed: int, pid: int) -> None:
    """One session more, for an honest receiver, which gets a whole proposal."""
    peer, _ = e.evil(bed, e.WORLD, Role.RECEIVER)
    try:
        e.until(lambda: peer.up, peer.poll, "an honest session")
        request = peer.open_request(next(e.FRESH), e.PROMPT, seed=3)  # type: ignore[union-attr]
        with peer.enqueue(request, budget_us=e.LONG_US).wait() as proposal:  # type: ignore[union-attr]
            proposal.commit(0, [3])
        assert bed.status("leader")["sessions"][0]["formed"] == formed + 1
    finally:
        peer.close()
    assert bed.pid("leader") == pid
    bed.until(lambda: not bed.status("leader")["sessions"][0]["up"], "the honest peer left")


@pytest.mark.parametrize("case", HELLOS, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_hello(bed: Bed, case: HelloCase) -> None:
    before, formed, pid = counted(bed, case.reason), bed.status("leader")["sessions"][0]["formed"], bed.pid("leader")
    hello = to_map(hello_of(bed))
    case.change(hello)
    with Dealer(bed) as sock:
        sock.send(msgpack.packb({"kind": "hello", "hello": hello}))
        answer = decode_message(sock.recv())
    assert (answer["kind"], answer["reason"], answer["field"]) == ("refuse", case.reason.value, case.field)
    bed.until(lambda: counted(bed, case.reason) == before + 1, "counted")
    serves_an_honest_peer(bed, formed, pid)


@pytest.mark.parametrize("case", MESSAGES, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_message(bed: Bed, case: MessageCase) -> None:
    before, formed, pid = counted(bed, case.reason), bed.status("leader")["sessions"][0]["formed"], bed.pid("leader")
    with Dealer(bed) as sock:
        sock.send(case.data)
        bed.until(lambda: counted(bed, case.reason) == before + 1, "counted")
    serves_an_honest_peer(bed, formed, pid)


def agreed(bed: Bed, sock: zmq.Socket[bytes]) -> Agreement:
    """An honest handshake, of which the proof is due."""
    connector = Connector(hello_of(bed), encode_message, os.urandom)
    sock.send(encode_message(connector.start(time.monotonic_ns())))
    return connector.receive(decode_message(sock.recv()), time.monotonic_ns())


@pytest.mark.parametrize("case", PROOFS, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_proof(bed: Bed, case: ProofCase) -> None:
    before, formed, pid = counted(bed, case.reason), bed.status("leader")["sessions"][0]["formed"], bed.pid("leader")
    with Dealer(bed) as sock:
        agreement = agreed(bed, sock)
        frame = bytearray(proof_frame(agreement))
        case.forge(frame)
        sign(frame, case.sign, agreement.theirs.boot_nonce)
        host, _, port = agreement.data.removeprefix("tcp://").rpartition(":")
        with socket.create_connection((host, int(port))) as link:
            link.settimeout(20)
            link.sendall(frame)
            assert link.recv(1) == b"", "cut off, and told nothing"
        bed.until(lambda: counted(bed, case.reason) == before + 1, "counted")
    serves_an_honest_peer(bed, formed, pid)


def sign(frame: bytearray, what: int, leader_nonce: int) -> None:
    """Signs a forged frame again, so that the check behind the digests is the one that is met."""
    header = wire.Header()
    if what & HEADER:
        frame[120:128] = xxh3_64(frame, 0, 120, 0).to_bytes(8, "little")
    if what & PAYLOAD and header.decode(frame, 0) == 0 and header.kind == wire.PROOF:
        frame[112:120] = xxh3_64(frame, 128, 32, header.payload_seed(leader_nonce)).to_bytes(8, "little")
        frame[120:128] = xxh3_64(frame, 0, 120, 0).to_bytes(8, "little")
