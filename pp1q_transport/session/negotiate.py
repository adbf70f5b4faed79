"""The handshake: who says what until both sides hold one `Agreement`, and the proof that joins a link to it.

Between the control plane (which moves these messages) and the sessions (which start from an `Agreement`). Does no I/O,
reads no clock and draws no randomness: messages, `now_ns`, an encoder and an `entropy` callable come in, messages come
out. What a HELLO holds and how two must agree is `hello`'s. SPEC section 2.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Final

from ..errors import LocalMisuse, PeerFault, Reason, Refused
from .hello import (
    FIELDS,
    NONCE_BYTES,
    TEXT_CHARS,
    Hello,
    Message,
    Role,
    Rule,
    adopt,
    check,
    identity_map_hash,
    judge_version,
    make_hello,
    parse_hello,
    quote,
    slot_parts,
    to_map,
)

__all__ = [
    "FIELDS", "Hello", "Role", "Rule", "adopt", "check", "identity_map_hash", "make_hello", "parse_hello", "slot_parts",
    "to_map",
    "MESSAGES", "Agreement", "Connector", "Encode", "Entropy", "Event", "Listener", "Message", "State", "TRANSITIONS",
    "goodbye_message", "message_kind", "parse_goodbye", "parse_refuse", "proof", "refuse_message", "transcript", "verify_proof",
]  # fmt: skip

Encode = Callable[[Mapping[str, object]], bytes]  # must be the control plane's own: the transcript is over sent bytes
Entropy = Callable[[int], bytes]  # so many random bytes: os.urandom, or a seeded source in a test

SECRET_BYTES: Final = 32
HELLO_TIMEOUT_NS: Final = 5_000_000_000
LINK_PROOF_TIMEOUT_NS: Final = 1_000_000_000  # SPEC 2: a link proves itself within one second
_DATA_CHARS: Final = 200


# --- proof of a link -------------------------------------------------------------------------------------------------


def transcript(hello_bytes: bytes, ack_bytes: bytes) -> bytes:
    """SHA-256 (32 bytes) over the two messages as they travelled, each behind its u32 length."""
    lengths = (struct.pack("<I", len(part)) + part for part in (hello_bytes, ack_bytes))
    return hashlib.sha256(b"pp1q transcript 2" + b"".join(lengths)).digest()


def proof(secret: bytes, role: Role, rank: int, session: int, nonces: tuple[bytes, bytes], transcript: bytes) -> bytes:
    """The 32 bytes with which `role` joins a link to the session: HMAC-SHA256 under the session's secret. `nonces` are
    the leader's (coordinator's), then the receiver's (member's) link nonce; the role is inside, so no proof can be sent back to
    its author."""
    leader, receiver = nonces
    fixed = struct.pack("<17sBIQ16s16s32s", b"pp1q link proof 2", list(Role).index(role), rank, session,
                        leader, receiver, transcript)  # fmt: skip
    return hmac.digest(secret, fixed, "sha256")


def verify_proof(given: bytes, secret: bytes, role: Role, rank: int, session: int, nonces: tuple[bytes, bytes],
                 transcript: bytes) -> bool:  # fmt: skip
    """Whether `given` is `role`'s proof, in constant time."""
    return hmac.compare_digest(bytes(given), proof(secret, role, rank, session, nonces, transcript))


@dataclass(frozen=True, slots=True, kw_only=True)
class Agreement:
    """What a finished handshake hands to session and link; the same on both sides but for `ours` and `theirs`."""

    session: int  # u64, not 0
    secret: bytes = field(repr=False)  # 32 bytes; it travelled on the control plane only
    ours: Hello
    theirs: Hello
    data: str  # where the listener's link waits: "tcp://127.0.0.1:4711"
    transcript: bytes
    prove_by_ns: int  # a link that has not proven itself by then is cut off

    def proof_of(self, role: Role) -> bytes:
        """The 32 proof bytes that `role` sends on the link."""
        return proof(self.secret, role, self._rank(role), self.session, self._nonces(), self.transcript)

    def proves(self, role: Role, given: bytes) -> bool:
        """Whether `given` is the proof of `role`, in constant time."""
        return verify_proof(given, self.secret, role, self._rank(role), self.session, self._nonces(), self.transcript)

    def _of(self, role: Role) -> Hello:
        return self.ours if self.ours.role is role else self.theirs

    def _rank(self, role: Role) -> int:
        return self._of(role).rank

    def _nonces(self) -> tuple[bytes, bytes]:
        first, second = (self.ours, self.theirs) if self.ours.role.sends_rows else (self.theirs, self.ours)
        return first.link_nonce, second.link_nonce


# --- messages --------------------------------------------------------------------------------------------------------

# The exact keys of every control message, `kind` included.
MESSAGES: Final[dict[str, frozenset[str]]] = {
    "hello": frozenset({"kind", "hello"}),
    "hello_ack": frozenset({"kind", "hello", "session", "secret", "data"}),
    "refuse": frozenset({"kind", "reason", "field", "ours", "theirs"}),
    "goodbye": frozenset({"kind", "reason"}),
    "keepalive": frozenset({"kind"}),
    "options": frozenset({"kind", "body"}),  # the benchmark's proposer states what it wants measured
    "report": frozenset({"kind", "body"}),  # and gets the measurement back
}


def message_kind(message: Mapping[str, object]) -> str:
    """The kind of a control message whose keys are exactly right for it; raises `PeerFault(malformed)` otherwise."""
    kind = message.get("kind")
    if type(kind) is not str or kind not in MESSAGES:
        raise PeerFault(Reason.MALFORMED, f"unknown control message {quote(kind)!r}")
    if set(message) != MESSAGES[kind]:
        raise PeerFault(Reason.MALFORMED, f"a {kind} has other keys than {sorted(MESSAGES[kind])}")
    return kind


def refuse_message(fault: PeerFault) -> Message:
    """The REFUSE that tells the other side of `fault`; its values are printable text of at most 256 characters."""
    if isinstance(fault, Refused):
        name, ours, theirs = fault.field, quote(fault.ours), quote(fault.theirs)
    else:
        name, ours, theirs = "message", "a control message of wire version 2", quote(fault.detail)
    return {"kind": "refuse", "reason": fault.reason.value, "field": quote(name), "ours": ours, "theirs": theirs}


def parse_refuse(message: Mapping[str, object]) -> Refused:
    """The refusal in a REFUSE, seen from our side (their `ours` is our `theirs`); raises `PeerFault(malformed)`."""
    try:
        name, ours, theirs = (_refusal_text(message[key]) for key in ("field", "theirs", "ours"))
        return Refused(Reason(message["reason"]), name, ours, theirs)
    except (KeyError, ValueError, TypeError):
        raise PeerFault(Reason.MALFORMED, "a REFUSE without a known reason and short texts") from None


def _refusal_text(value: object) -> str:
    if type(value) is not str or len(value) > TEXT_CHARS:
        raise ValueError("not a short text")
    return quote(value)


def parse_goodbye(message: Mapping[str, object]) -> Reason:
    """The reason in a GOODBYE; raises `PeerFault(malformed)`."""
    try:
        return Reason(message["reason"])
    except (KeyError, ValueError, TypeError):
        raise PeerFault(Reason.MALFORMED, "a GOODBYE without a known reason") from None


def goodbye_message(reason: Reason) -> Message:
    """The last message of an orderly end."""
    return {"kind": "goodbye", "reason": reason.value}


# --- the two machines ------------------------------------------------------------------------------------------------


def _session_id(entropy: Entropy) -> int:
    return int.from_bytes(entropy(8), "little") or 1


class State(str, Enum):
    """Where a `Connector` stands."""

    IDLE = "idle"
    WAITING = "waiting"
    AGREED = "agreed"
    FAILED = "failed"


class Event(str, Enum):
    """What can happen to a `Connector`."""

    START = "start"
    ACK = "ack"  # an acknowledgement that passed every check
    FAULT = "fault"  # a REFUSE, an acknowledgement we refuse, or a malformed one
    DEADLINE = "deadline"


TRANSITIONS: Final[dict[tuple[State, Event], State]] = {
    (State.IDLE, Event.START): State.WAITING,
    (State.WAITING, Event.ACK): State.AGREED,
    (State.WAITING, Event.FAULT): State.FAILED,
    (State.WAITING, Event.DEADLINE): State.FAILED,
}


class Connector:
    """The side that says HELLO. One object is one attempt; an event its state has no transition for changes nothing."""

    def __init__(self, ours: Hello, encode: Encode, entropy: Entropy, timeout_ns: int = HELLO_TIMEOUT_NS) -> None:
        self.ours = replace(ours, link_nonce=entropy(NONCE_BYTES))
        self.state = State.IDLE
        self._encode = encode
        self._timeout_ns = timeout_ns
        self._deadline_ns = 0
        self._sent = b""

    def _step(self, event: Event) -> None:
        self.state = TRANSITIONS[self.state, event]

    def start(self, now_ns: int) -> Message:
        """The HELLO to send; raises `LocalMisuse` when it was asked for before."""
        if (self.state, Event.START) not in TRANSITIONS:
            raise LocalMisuse(f"a connector starts once; this one is {self.state.value}")
        message: Message = {"kind": "hello", "hello": to_map(self.ours)}
        self._sent = self._encode(message)
        self._deadline_ns = now_ns + self._timeout_ns
        self._step(Event.START)
        return message

    def tick(self, now_ns: int) -> None:
        """Raises `PeerFault(timeout)` once when no answer came in time."""
        if self.state is State.WAITING and now_ns >= self._deadline_ns:
            self._step(Event.DEADLINE)
            raise PeerFault(Reason.TIMEOUT, f"no answer to HELLO within {self._timeout_ns / 1e9:g} s: does anybody listen there?")

    def receive(self, message: Mapping[str, object], now_ns: int) -> Agreement:
        """The agreement that a HELLO-ACK completes. Raises `Refused` (theirs, or ours after checking their fields: send
        `refuse_message` then), or `PeerFault`: `timeout`, `malformed`, or `unexpected_kind` (the state stays)."""
        self.tick(now_ns)
        kind = message.get("kind")
        if self.state is not State.WAITING or kind not in ("hello_ack", "refuse"):
            raise PeerFault(Reason.UNEXPECTED_KIND, f"a {quote(kind)} while {self.state.value}")
        try:
            agreement = self._judge(message, now_ns)
        except PeerFault:
            self._step(Event.FAULT)
            raise
        self._step(Event.ACK)
        return agreement

    def _judge(self, message: Mapping[str, object], now_ns: int) -> Agreement:
        body = message.get("hello")
        if isinstance(body, Mapping):
            judge_version(body)
        if message_kind(message) == "refuse":
            raise parse_refuse(message)
        theirs = _hello_in(message)
        check(self.ours, theirs)
        session, secret, data = message["session"], message["secret"], message["data"]
        if type(session) is not int or not 1 <= session < 1 << 64:
            raise PeerFault(Reason.MALFORMED, "a HELLO-ACK whose session is not a u64 above 0")
        if type(secret) is not bytes or len(secret) != SECRET_BYTES:
            raise PeerFault(Reason.MALFORMED, f"a HELLO-ACK whose secret is not {SECRET_BYTES} bytes")
        _judge_data(data, self.ours, theirs)
        return Agreement(
            session=session, secret=secret, ours=self.ours, theirs=theirs, data=str(data),
            transcript=transcript(self._sent, self._encode(message)), prove_by_ns=now_ns + LINK_PROOF_TIMEOUT_NS,
        )  # fmt: skip


class Listener:
    """The side that answers HELLOs, each on its own: a refusal leaves nothing behind. With `takes_options`, `ours` are
    maxima (`adopt`). `others` are further HELLOs it answers with, each to those of its target_identity."""

    def __init__(
        self,
        ours: Hello,
        data: str,
        encode: Encode,
        entropy: Entropy,
        takes_options: bool = False,
        others: Iterable[Hello] = (),
    ) -> None:
        self.ours = ours
        self._by_target = {each.target_identity: each for each in others}
        self.data = data
        self._encode = encode
        self._entropy = entropy
        self._takes_options = takes_options

    def receive(self, message: Mapping[str, object], now_ns: int) -> tuple[Message, Agreement | PeerFault]:
        """The answer to send, and what became of the HELLO: an agreement, or the fault to count and log."""
        try:
            return self._accept(message, now_ns)
        except PeerFault as fault:
            return refuse_message(fault), fault

    def _accept(self, message: Mapping[str, object], now_ns: int) -> tuple[Message, Agreement]:
        if message.get("kind") != "hello":
            raise PeerFault(Reason.UNEXPECTED_KIND, f"a {quote(message.get('kind'))} where a HELLO must come")
        body = message.get("hello", message)
        judge_version(body if isinstance(body, Mapping) else {})  # before the keys: another version may have others
        message_kind(message)
        theirs = _hello_in(message)
        ours = self._by_target.get(theirs.target_identity, self.ours)
        ours = adopt(ours, theirs) if self._takes_options else ours
        ours = replace(ours, link_nonce=self._entropy(NONCE_BYTES))
        check(ours, theirs)
        _judge_data(self.data, ours, theirs)
        session, secret = _session_id(self._entropy), self._entropy(SECRET_BYTES)
        answer: Message = {
            "kind": "hello_ack", "hello": to_map(ours), "session": session, "secret": secret, "data": self.data
        }  # fmt: skip
        return answer, Agreement(
            session=session, secret=secret, ours=ours, theirs=theirs, data=self.data,
            transcript=transcript(self._encode(message), self._encode(answer)),
            prove_by_ns=now_ns + LINK_PROOF_TIMEOUT_NS,
        )  # fmt: skip


def _hello_in(message: Mapping[str, object]) -> Hello:
    body = message["hello"]
    if not isinstance(body, Mapping):
        raise PeerFault(Reason.MALFORMED, "a HELLO whose `hello` is not a map")
    return parse_hello(body)


def _judge_data(data: object, ours: Hello, theirs: Hello) -> None:
    """The data endpoint is `kind://address` of a link kind that both sides stated."""
    if type(data) is not str or len(data) > _DATA_CHARS or not data.isprintable() or "://" not in data:
        raise PeerFault(Reason.MALFORMED, f"a data endpoint {quote(data)!r}")
    if data.split("://")[0] not in set(ours.link_kinds) & set(theirs.link_kinds):
        raise Refused(Reason.SEMANTIC_MISMATCH, "link_kinds", ours.link_kinds, theirs.link_kinds)
