"""SPEC 2: HELLO, its refusals, and the proof of a link; SPEC 3 and 5: numbers at the edge. Outside any session."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pytest

from pp1q_transport import dyadic, rng, wire
from pp1q_transport.control_codec import encode_message
from pp1q_transport.errors import InvalidQ, LocalMisuse, PeerFault, Reason, Refused
from pp1q_transport.session.hello import identity_map_hash
from pp1q_transport.session.negotiate import Agreement, Connector, Listener, Role, make_hello
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, ProofReader, proof_frame

from .case import Case, Plain
from .frames import Bend, Frame, bits, both, fields, resized, signed_as
from .world import World

R = Reason
SMALL: Final[dict[str, object]] = {
    "vocab_size": 64, "depth": 3, "support": 8, "max_slots": 4, "batch_requests": 2, "batches_in_flight": 2,
    "max_context_tokens": 128, "draft_identity": "draft-a", "target_identity": "target-a",
}  # fmt: skip
HANDSHAKE_NS: Final = 5_000_000


class _Entropy:
    """Bytes that differ with every call and repeat with every case."""

    def __init__(self, first: int) -> None:
        self._next = first

    def __call__(self, count: int) -> bytes:
        self._next += 1
        return bytes((self._next * 31 + i) & 0xFF for i in range(count))


def _sides(**other: object) -> tuple[Connector, Listener]:
    """A leader that says HELLO with `other`'s options to a receiver that listens."""
    ours = make_hello(Role.RECEIVER, 7, **SMALL)
    theirs = make_hello(Role.LEADER, 9, **(SMALL | other))
    return (
        Connector(theirs, encode_message, _Entropy(1)),
        Listener(ours, "tcp://127.0.0.1:4711", encode_message, _Entropy(100)),
    )


def _refused(message: dict[str, object], listener: Listener, field: str) -> Reason:
    """The reason of a refusal, after checking that the answer names the field and both values."""
    answer, result = listener.receive(message, HANDSHAKE_NS)
    assert isinstance(result, Refused), "the HELLO was taken"
    assert answer["kind"] == "refuse"
    assert (answer["reason"], answer["field"]) == (result.reason.value, field)
    assert answer["ours"]
    assert answer["theirs"]
    assert answer["ours"] != answer["theirs"] or field in ("role", "boot_nonce", "link_nonce")
    return result.reason


def _stating(field: str, **other: object) -> Callable[[], Reason]:
    """A HELLO that is valid in itself and states something else than we do."""

    def act() -> Reason:
        connector, listener = _sides(**other)
        return _refused(connector.start(0), listener, field)

    return act


def _raw(field: str, change: Callable[[dict[str, object]], object]) -> Callable[[], Reason]:
    """A HELLO map changed by hand."""

    def act() -> Reason:
        connector, listener = _sides()
        message = connector.start(0)
        body = message["hello"]
        assert isinstance(body, dict)
        change(body)
        return _refused(message, listener, field)

    return act


def _not_a_map() -> Reason:
    connector, listener = _sides()
    connector.start(0)
    _, result = listener.receive({"kind": "hello", "hello": {"wire_version": 2}, "extra": 1}, 0)
    assert isinstance(result, PeerFault)
    return result.reason


def _reflected() -> Reason:
    """Our own HELLO comes back to us."""
    connector, _ = _sides()
    message = connector.start(0)
    listener = Listener(connector.ours, "tcp://127.0.0.1:1", encode_message, _Entropy(5))
    return _refused(message, listener, "role")


def _goodbye_first() -> Reason:
    _, listener = _sides()
    _, result = listener.receive({"kind": "goodbye", "reason": "cancelled"}, 0)
    assert isinstance(result, PeerFault)
    return result.reason


def _no_answer() -> Reason:
    connector, _ = _sides()
    connector.start(0)
    connector.tick(4_999_999_999)
    with pytest.raises(PeerFault) as raised:
        connector.tick(5_000_000_000)
    return raised.value.reason


def _bad_ack(**change: object) -> Callable[[], Reason]:
    def act() -> Reason:
        connector, listener = _sides()
        answer, _ = listener.receive(connector.start(0), 0)
        with pytest.raises(PeerFault) as raised:
            connector.receive(answer | change, 0)
        with pytest.raises(PeerFault):
            connector.receive(answer, 0)
        return raised.value.reason

    return act


def _agreed() -> tuple[Agreement, Agreement]:
    """(the leader's, the receiver's) agreement of one handshake."""
    connector, listener = _sides()
    answer, theirs = listener.receive(connector.start(0), 0)
    assert isinstance(theirs, Agreement)
    return connector.receive(answer, 0), theirs


def _handshake_works() -> None:
    leader, receiver = _agreed()
    assert leader.session == receiver.session
    assert leader.secret == receiver.secret
    assert leader.transcript == receiver.transcript


def _state(name: str, value: object) -> Callable[[dict[str, object]], object]:
    return lambda body: body.update({name: value})


HELLOS: Final = (
    ("2.301", "HELLO of wire version 1", R.BAD_VERSION, _raw("wire_version", _state("wire_version", 1))),
    ("2.302", "HELLO of wire version 3 with other fields", R.BAD_VERSION,
     _raw("wire_version", lambda body: (body.clear(), body.update({"wire_version": 3, "new": 1})))),
    ("2.303", "HELLO without a wire version", R.BAD_VERSION, _raw("wire_version", lambda b: b.pop("wire_version"))),
    ("2.304", "HELLO of wire version true", R.BAD_VERSION, _raw("wire_version", _state("wire_version", True))),
    ("2.305", "HELLO of another q semantic", R.SEMANTIC_MISMATCH, _stating("semantic_id", semantic_id="dyadic23")),
    ("2.306", "HELLO of another RNG", R.SEMANTIC_MISMATCH, _stating("rng_abi", rng_abi="philox2x64")),
    ("2.307", "HELLO without the draw proof", R.SEMANTIC_MISMATCH, _stating("draw_proof", draw_proof=False)),
    ("2.308", "HELLO of one representation less", R.SEMANTIC_MISMATCH,
     _stating("representations", representations=("sparse",))),
    ("2.309", "HELLO over shared memory only", R.SEMANTIC_MISMATCH, _stating("link_kinds", link_kinds=("shm",))),
    ("2.310", "HELLO of another draft", R.IDENTITY_MISMATCH, _stating("draft_identity", draft_identity="draft-b")),
    ("2.311", "HELLO of another target", R.IDENTITY_MISMATCH, _stating("target_identity", target_identity="target-b")),
    ("2.312", "HELLO of an adapted draft", R.IDENTITY_MISMATCH, _stating("draft_kind", draft_kind="adapted")),
    ("2.313", "HELLO of another ID map", R.IDENTITY_MISMATCH,
     _stating("id_map_hash", id_map_hash=identity_map_hash(65))),
    ("2.314", "HELLO of a larger vocabulary", R.LIMITS_MISMATCH, _stating("vocab_size", vocab_size=65)),
    ("2.315", "HELLO of another depth", R.LIMITS_MISMATCH, _stating("depth", depth=4)),
    ("2.316", "HELLO of another support", R.LIMITS_MISMATCH, _stating("support", support=9)),
    ("2.317", "HELLO of more slots", R.LIMITS_MISMATCH, _stating("max_slots", max_slots=5)),
    ("2.318", "HELLO of other slot bytes", R.LIMITS_MISMATCH,
     _raw("slot_part_bytes", lambda b: b["slot_part_bytes"].update(dense_row=255))),  # type: ignore[attr-defined]
    ("2.319", "HELLO of rank 1 of one", R.LIMITS_MISMATCH, _stating("rank", rank=1)),
    ("2.320", "HELLO with an unknown field", R.MALFORMED, _raw("turbo", _state("turbo", 1))),
    ("2.321", "HELLO without its depth", R.MALFORMED, _raw("depth", lambda body: body.pop("depth"))),
    ("2.322", "HELLO whose depth is a text", R.MALFORMED, _raw("depth", _state("depth", "3"))),
    ("2.323", "HELLO of depth 33", R.LIMITS_MISMATCH, _raw("depth", _state("depth", 33))),
    ("2.324", "HELLO of boot nonce 0", R.LIMITS_MISMATCH, _raw("boot_nonce", _state("boot_nonce", 0))),
    ("2.325", "HELLO of a short link nonce", R.MALFORMED, _raw("link_nonce", _state("link_nonce", bytes(15)))),
    ("2.326", "HELLO with our own boot nonce", R.BOOT_NONCE, _raw("boot_nonce", _state("boot_nonce", 7))),
    ("2.327", "HELLO of our own role", R.SEMANTIC_MISMATCH, _reflected),
    ("2.328", "HELLO with a key too many", R.MALFORMED, _not_a_map),
    ("2.329", "goodbye before any HELLO", R.UNEXPECTED_KIND, _goodbye_first),
    ("2.330", "HELLO that nobody answers", R.TIMEOUT, _no_answer),
    ("2.331", "HELLO-ACK of session 0", R.MALFORMED, _bad_ack(session=0)),
    ("2.332", "HELLO-ACK of a short secret", R.MALFORMED, _bad_ack(secret=bytes(31))),
    ("2.333", "HELLO-ACK whose data port is of no agreed kind", R.SEMANTIC_MISMATCH, _bad_ack(data="rdma://1")),
    ("2.334", "HELLO-ACK without a data port", R.MALFORMED, _bad_ack(data="")),
    ("2.335", "an honest handshake", None, _handshake_works),
)  # fmt: skip


# --- the proof of a link ----------------------------------------------------------------------------------------------


def _judge(raw: bytes, agreement: Agreement, step: int = PROOF_FRAME_BYTES) -> Reason | None:
    """What a port says to `raw`, received `step` bytes at a time."""
    reader = ProofReader(lambda session: agreement if session == agreement.session else None)
    reason = None
    for at in range(0, len(raw), step):
        reason = reader.take(raw[at : at + step])
        if reason is not None:
            break
    assert (reader.agreement is not None) == (reason is None and len(raw) >= PROOF_FRAME_BYTES)
    return reason


def _proof(bend: Bend | None = None, author: str = "leader") -> Callable[[], Reason | None]:
    """The leader's proof as the receiver's port meets it, bent; the link is split at every place."""

    def act() -> Reason | None:
        leader, receiver = _agreed()
        raw = proof_frame(leader if author == "leader" else receiver)
        if bend is not None:
            world = World()
            world.terms.leader_nonce = leader.ours.boot_nonce
            frame = Frame.decode(raw)
            bend(frame, world)
            raw = frame.encode(leader.ours.boot_nonce)
        verdicts = {_judge(raw, receiver, step) for step in (PROOF_FRAME_BYTES, 1, 7, 128)}
        assert len(verdicts) == 1, "the verdict depends on how the bytes were split"
        return verdicts.pop()

    return act


def _replayed() -> Reason | None:
    """A proof that was good in an earlier handshake of the same two lives, with its header renewed for this session."""
    leader, _ = _agreed()
    connector, listener = _sides()
    connector = Connector(connector.ours, encode_message, _Entropy(50))
    answer, receiver = listener.receive(connector.start(0), 0)
    again = connector.receive(answer, 0)
    assert isinstance(receiver, Agreement)
    old = proof_frame(leader)
    frame = Frame.decode(proof_frame(again))
    frame.payload[:] = old[wire.HEADER_BYTES :]
    return _judge(frame.encode(again.ours.boot_nonce), receiver)


def _reflected_proof() -> Reason | None:
    """The receiver's own proof sent back to it."""
    _, receiver = _agreed()
    return _judge(proof_frame(receiver), receiver)


def _truncated() -> None:
    """Not judged before it is whole: nothing is proven, nothing refused."""
    leader, receiver = _agreed()
    assert _judge(proof_frame(leader)[:-1], receiver) is None


def _first_byte() -> Reason | None:
    """A stranger is known by its first byte."""
    _, receiver = _agreed()
    return _judge(b"G", receiver)


def _text(message: bytes) -> Callable[[], Reason | None]:
    return lambda: _judge(message.ljust(PROOF_FRAME_BYTES, b"\n"), _agreed()[1])


def _mac(at: int, xor: int) -> Bend:
    def bend(frame: Frame, _world: World) -> None:
        frame.payload[at] ^= xor

    return bend


PROOFS: Final = (
    ("2.401", "proof with the first MAC bit wrong", R.AUTH_FAILED, _proof(_mac(0, 1))),
    ("2.402", "proof with the last MAC bit wrong", R.AUTH_FAILED, _proof(_mac(31, 0x80))),
    ("2.403", "proof of zeros", R.AUTH_FAILED, _proof(lambda f, w: f.payload.__setitem__(slice(None), bytes(32)))),
    ("2.404", "proof of the other role", R.AUTH_FAILED, _proof(fields(subject=2))),
    ("2.405", "proof of no role", R.AUTH_FAILED, _proof(fields(subject=0))),
    ("2.406", "proof of another rank", R.AUTH_FAILED, _proof(fields(shard=1))),
    ("2.407", "proof for another session", R.SESSION_MISMATCH, _proof(fields(session=lambda h: h.session ^ 1))),
    ("2.408", "proof of an earlier life", R.BOOT_NONCE, _proof(fields(boot_nonce=8))),
    ("2.409", "proof replayed from an earlier handshake", R.AUTH_FAILED, _replayed),
    ("2.410", "our own proof sent back to us", R.BOOT_NONCE, _reflected_proof),
    ("2.411", "proof without its last byte", None, _truncated),
    ("2.412", "proof whose payload digest is of another session", R.PAYLOAD_DIGEST, _proof(signed_as(session=1))),
    ("2.413", "proof with a flag", R.UNKNOWN_FLAG, _proof(fields(flags=1))),
    ("2.414", "proof with a reserved byte", R.RESERVED_BITS, _proof(bits(64, 1))),
    ("2.415", "proof with a broken header digest", R.HEADER_DIGEST, _proof(bits(16, 1, sign=False))),
    ("2.416", "proof of 31 bytes", R.LENGTH_BOUNDS, _proof(resized(-1))),
    ("2.417", "a STEP instead of a proof", R.UNEXPECTED_KIND, _proof(both(fields(kind=wire.STEP), resized(-32),
                                                                              fields(payload_digest=0)))),
    ("2.418", "a web browser on the data port", R.BAD_MAGIC, _text(b"GET / HTTP/1.1\r\nHost: pp1q\r\n\r\n")),
    ("2.419", "a stranger's first byte", R.BAD_MAGIC, _first_byte),
    ("2.420", "a version 1 peer on the data port", R.BAD_VERSION, _text(b"PP1Q\x01\x01")),
    ("2.421", "an honest proof", None, _proof()),
)  # fmt: skip


# --- numbers ----------------------------------------------------------------------------------------------------------


def _weights(*weights: float) -> Callable[[], Reason]:
    def act() -> Reason:
        with pytest.raises(InvalidQ) as raised:
            dyadic.allocate(np.array(weights))
        return raised.value.reason

    return act


def _logits(*logits: float) -> Callable[[], Reason]:
    def act() -> Reason:
        with pytest.raises(InvalidQ) as raised:
            dyadic.weights_from_logits(np.array(logits))
        return raised.value.reason

    return act


def _q(*q: float) -> Callable[[], Reason]:
    def act() -> Reason:
        with pytest.raises(InvalidQ) as raised:
            dyadic.to_counts(np.array(q, np.float32))
        return raised.value.reason

    return act


def _ties() -> None:
    """Three equal weights: the one ticket that is left goes to the lowest ID."""
    assert dyadic.allocate(np.ones(3)).tolist() == [5592406, 5592405, 5592405]


def _one_hot() -> None:
    assert dyadic.allocate(np.array([0.0, 5e-324, 0.0])).tolist() == [0, dyadic.MASS, 0]


def _edges_of_a_draw() -> None:
    """u24 at both edges of every count: the token is the first whose cumulative count exceeds it."""
    counts = np.array([1, 0, dyadic.MASS - 3, 0, 2], np.uint32)
    drawn = [dyadic.draw(counts, u) for u in (0, 1, dyadic.MASS - 3, dyadic.MASS - 2, dyadic.MASS - 1)]
    assert drawn == [0, 2, 2, 4, 4]


def _domains_differ() -> None:
    words = {rng.draw24(1, domain, 2, 3, 4) for domain in rng.Domain}
    assert len(words) == 3


def _counter_is_zero() -> None:
    with pytest.raises(LocalMisuse):
        rng.draw24(1, rng.Domain.PROPOSAL, 0, 0, 0, counter=1)


def _equal_seeds() -> None:
    """Equal seeds give equal noise, whatever the request: the request ID is no part of the key."""
    world = World()
    flights = [world.step(world.open(request, seed=77)) for request in (1, 2)]
    for flight in flights:
        world.put(flight)
    assert world.tokens(flights[0]) == world.tokens(flights[1])


NUMBERS: Final = (
    ("3.01", "weights with NaN", R.INVALID_WEIGHTS, _weights(1.0, float("nan"))),
    ("3.02", "weights with +inf", R.INVALID_WEIGHTS, _weights(float("inf"), 1.0)),
    ("3.03", "weights with a negative", R.INVALID_WEIGHTS, _weights(1.0, -1e-300)),
    ("3.04", "weights with -0.0", R.INVALID_WEIGHTS, _weights(1.0, -0.0)),
    ("3.05", "weights of no mass", R.INVALID_WEIGHTS, _weights(0.0, 0.0)),
    ("3.06", "weights whose sum overflows", R.INVALID_WEIGHTS, _weights(1.7e308, 1.7e308)),
    ("3.07", "logits with NaN", R.INVALID_WEIGHTS, _logits(0.0, float("nan"))),
    ("3.08", "logits with +inf", R.INVALID_WEIGHTS, _logits(0.0, float("inf"))),
    ("3.09", "logits of -inf alone", R.INVALID_WEIGHTS, _logits(float("-inf"), float("-inf"))),
    ("3.10", "q with NaN", R.NONFINITE, _q(0.5, float("nan"))),
    ("3.11", "q with -0.0", R.NEGATIVE, _q(-0.0)),
    ("3.12", "q with 2^-25", R.NONDYADIC, _q(2.0**-25)),
    ("3.13", "q above 1", R.NONDYADIC, _q(1.0000001)),
    ("3.14", "the ticket that is left goes to the lowest ID", None, _ties),
    ("3.15", "one denormal weight takes all", None, _one_hot),
    ("3.16", "a draw at both edges of every count", None, _edges_of_a_draw),
    ("5.11", "domains of one key differ", None, _domains_differ),
    ("5.12", "a draw counter other than 0 is refused", None, _counter_is_zero),
    ("5.13", "equal seeds of two requests give equal noise", None, _equal_seeds),
)

CASES: Final[tuple[Case, ...]] = tuple(
    Plain(number=number, spec=number[0], title=title, reason=reason, act=act)
    for number, title, reason, act in (*HELLOS, *PROOFS, *NUMBERS)
)
