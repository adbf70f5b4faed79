"""The handshake without sockets: every field's mismatch by name, hostile maps, the proof, and both machines."""

from __future__ import annotations

import hmac
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason, Refused
from pp1q_transport.session.negotiate import (
    MESSAGES,
    TRANSITIONS,
    Agreement,
    Connector,
    Event,
    Hello,
    Listener,
    Message,
    Role,
    State,
    goodbye_message,
    make_hello,
    message_kind,
    parse_refuse,
    proof,
    refuse_message,
    to_map,
    transcript,
    verify_proof,
)

DATA = "tcp://127.0.0.1:4711"
LEADER = replace(make_hello(Role.LEADER, 11), link_nonce=b"l" * 16)
RECEIVER = replace(make_hello(Role.RECEIVER, 22), link_nonce=b"r" * 16)


def entropy(seed: int) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def travel(message: Message) -> Message:
    """As the control plane delivers it."""
    return decode_message(encode_message(message))


def connector(ours: Hello = LEADER) -> Connector:
    return Connector(ours, encode_message, entropy(1))


def listener(ours: Hello = RECEIVER, **options: bool) -> Listener:
    return Listener(ours, DATA, encode_message, entropy(2), **options)


def shake(ours: Hello = LEADER, theirs: Hello = RECEIVER) -> tuple[Agreement, Agreement]:
    one, other = connector(ours), listener(theirs)
    answer, outcome = other.receive(travel(one.start(0)), 0)
    assert isinstance(outcome, Agreement), outcome
    return one.receive(travel(answer), 5), outcome


# --- other versions --------------------------------------------------------------------------------------------------

FOREIGN: list[tuple[Message, object]] = [
    ({"kind": "hello", "hello": {"wire_version": 1, "vocab": 129280}}, "1"),
    ({"kind": "hello", "wire_version": 1, "mode": "greedy", "vocab": 129280}, "1"),  # v1 as a flat map
    ({"kind": "hello", "hello": {"wire_version": 3, "role": [["new"]]}, "padding": b"x"}, "3"),
    ({"kind": "hello", "hello": {"wire_version": "2"}}, "2"),
    ({"kind": "hello", "hello": {"wire_version": True}}, "True"),
    ({"kind": "hello"}, "none stated"),
    ({"kind": "hello", "hello": 7}, "none stated"),
]


@pytest.mark.parametrize(("message", "stated"), FOREIGN)
def test_a_peer_of_another_version_gets_a_refuse_naming_both(message: Message, stated: object) -> None:
    answer, outcome = listener().receive(travel(message), 0)
    assert answer == {
        "kind": "refuse", "reason": "bad_version", "field": "wire_version", "ours": "2", "theirs": stated
    }  # fmt: skip
    assert isinstance(outcome, Refused)
    assert outcome.reason is Reason.BAD_VERSION


def test_an_acknowledgement_of_another_version_is_refused_before_its_other_keys_are_read() -> None:
    one = connector()
    one.start(0)
    with pytest.raises(Refused) as caught:
        one.receive({"kind": "hello_ack", "hello": {"wire_version": 1}, "port": 9}, 1)
    assert (caught.value.reason, caught.value.ours, caught.value.theirs) == (Reason.BAD_VERSION, 2, 1)


# --- proof -----------------------------------------------------------------------------------------------------------

PROVEN: dict[str, object] = {
    "secret": b"s" * 32, "role": Role.LEADER, "rank": 1, "session": 7, "nonces": (b"a" * 16, b"b" * 16),
    "transcript": b"t" * 32,
}  # fmt: skip


def test_the_proof_is_an_hmac_over_the_packed_parts() -> None:
    packed = b"pp1q link proof 2" + b"\0" + bytes([1, 0, 0, 0]) + bytes([7]) + bytes(7)
    packed += b"a" * 16 + b"b" * 16 + b"t" * 32
    assert proof(**PROVEN) == hmac.new(b"s" * 32, packed, "sha256").digest()  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("secret", b"S" * 32),
        ("role", Role.RECEIVER),
        ("rank", 0),
        ("session", 8),
        ("nonces", (b"b" * 16, b"a" * 16)),
        ("nonces", (b"a" * 16, b"c" * 16)),
        ("transcript", b"u" * 32),
    ),
)
def test_the_proof_covers_every_part(name: str, value: object) -> None:
    given_proof = proof(**PROVEN)  # type: ignore[arg-type]
    assert verify_proof(given_proof, **PROVEN)  # type: ignore[arg-type]
    assert not verify_proof(given_proof, **(PROVEN | {name: value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", (b"", b"\0" * 32, b"\0" * 31))
def test_a_proof_of_the_wrong_length_or_value_is_none(bad: bytes) -> None:
    assert not verify_proof(bad, **PROVEN)  # type: ignore[arg-type]


def test_the_transcript_tells_where_one_message_ends() -> None:
    assert transcript(b"ab", b"c") != transcript(b"a", b"bc")


def test_both_sides_hold_one_agreement_and_prove_it_to_each_other() -> None:
    mine, other = shake()
    assert (mine.session, mine.secret, mine.data, mine.transcript) == (
        other.session, other.secret, other.data, other.transcript
    )  # fmt: skip
    assert (mine.ours, mine.theirs) == (other.theirs, other.ours)
    assert mine.proves(Role.RECEIVER, other.proof_of(Role.RECEIVER))
    assert other.proves(Role.LEADER, mine.proof_of(Role.LEADER))
    assert not mine.proves(Role.RECEIVER, mine.proof_of(Role.LEADER))  # a reflected proof
    assert mine.secret.hex() not in repr(mine)
    assert str(mine.secret) not in repr(mine)
    assert (mine.prove_by_ns, other.prove_by_ns) == (5 + 10**9, 10**9)


def test_either_side_may_listen() -> None:
    mine, other = shake(RECEIVER, LEADER)
    assert mine.ours.role is Role.RECEIVER
    assert other.proves(Role.RECEIVER, mine.proof_of(Role.RECEIVER))
    assert mine.proves(Role.LEADER, other.proof_of(Role.LEADER))


def test_each_handshake_has_its_own_session_secret_and_nonces() -> None:
    one = listener()
    found = []
    for seed in (1, 2):
        _, outcome = one.receive(travel(Connector(LEADER, encode_message, entropy(seed)).start(0)), 0)
        assert isinstance(outcome, Agreement)
        found.append(outcome)
    first, second = found
    assert first.session != second.session
    assert first.secret != second.secret
    assert first.ours.link_nonce != second.ours.link_nonce
    assert not second.proves(Role.LEADER, first.proof_of(Role.LEADER))


def test_a_listener_that_takes_options_agrees_on_the_proposer_s_sizes() -> None:
    sizes = {"vocab_size": 1000, "depth": 3, "support": 8, "batch_requests": 2, "batches_in_flight": 1, "max_slots": 2}
    proposer = make_hello(Role.LEADER, 5, representations=("sparse",), **sizes)
    one = connector(proposer)
    answer, outcome = listener(takes_options=True).receive(travel(one.start(0)), 0)
    assert isinstance(outcome, Agreement)
    assert outcome.ours.slot_part_bytes == proposer.slot_part_bytes
    assert one.receive(travel(answer), 1).theirs == outcome.ours


def test_a_changed_acknowledgement_breaks_the_proof() -> None:
    one = connector()
    answer, outcome = listener().receive(travel(one.start(0)), 0)
    assert isinstance(outcome, Agreement)
    answer["data"] = "tcp://10.0.0.9:1"
    assert not outcome.proves(Role.LEADER, one.receive(travel(answer), 1).proof_of(Role.LEADER))


# --- the machines ----------------------------------------------------------------------------------------------------


def put(connection: Connector, state: State) -> Message:
    """Brings a connector to `state`; returns an acknowledgement it would have taken."""
    if state is State.IDLE:
        return {"kind": "hello_ack"}
    answer, _ = listener().receive(travel(connection.start(0)), 0)
    if state is State.AGREED:
        connection.receive(travel(answer), 1)
    elif state is State.FAILED:
        with pytest.raises(PeerFault):
            connection.receive({"kind": "refuse"}, 1)
    return answer


@pytest.mark.parametrize("state", [state for state in State if state is not State.WAITING])
def test_an_answer_out_of_place_changes_nothing(state: State) -> None:
    one = connector()
    answer = put(one, state)
    with pytest.raises(PeerFault) as caught:
        one.receive(answer, 2)
    assert caught.value.reason is Reason.UNEXPECTED_KIND
    assert one.state is state


def test_only_the_table_s_transitions_exist() -> None:
    starts = {state for state, event in TRANSITIONS if event is Event.START}
    assert starts == {State.IDLE}
    assert {state for state, _ in TRANSITIONS} == {State.IDLE, State.WAITING}
    one = connector()
    one.start(0)
    with pytest.raises(LocalMisuse, match="starts once"):
        one.start(1)
    assert one.state is State.WAITING


def test_other_kinds_while_waiting_leave_the_handshake_alone() -> None:
    one = connector()
    answer, _ = listener().receive(travel(one.start(0)), 0)
    with pytest.raises(PeerFault, match="unexpected_kind"):
        one.receive({"kind": "keepalive"}, 1)
    assert isinstance(one.receive(travel(answer), 2), Agreement)


def test_silence_ends_at_the_deadline_also_for_a_late_answer() -> None:
    one = connector()
    answer, _ = listener().receive(travel(one.start(1_000)), 0)
    one.tick(5_000_000_999)
    with pytest.raises(PeerFault) as caught:
        one.receive(travel(answer), 5_000_001_000)
    assert (caught.value.reason, one.state) == (Reason.TIMEOUT, State.FAILED)
    one.tick(9_000_000_000)  # it is told once


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("session", 0),
        ("session", 1 << 64),
        ("session", "1"),
        ("secret", b"short"),
        ("secret", "s" * 32),
        ("data", "shm://segment"),
        ("data", "127.0.0.1:9"),
        ("data", "tcp://" + "h" * 300),
        ("data", None),
        ("hello", None),
        ("extra", 1),
    ),
)
def test_a_malformed_acknowledgement_fails_the_handshake(name: str, value: object) -> None:
    one = connector()
    answer, _ = listener().receive(travel(one.start(0)), 0)
    with pytest.raises(PeerFault) as caught:
        one.receive(answer | {name: value}, 1)
    assert caught.value.reason in (Reason.MALFORMED, Reason.SEMANTIC_MISMATCH)
    assert one.state is State.FAILED


def test_a_listener_refuses_a_link_kind_the_other_side_does_not_state() -> None:
    ours = replace(RECEIVER, link_kinds=("tcp", "shm"))
    answer, outcome = listener(ours).receive(travel(connector(replace(LEADER, link_kinds=("shm",))).start(0)), 0)
    assert answer["field"] == "link_kinds"
    assert isinstance(outcome, Refused)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=20) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=200, deadline=None)
@given(st.dictionaries(st.sampled_from(["kind", "hello", "session", "data", "x"]), VALUES, max_size=5))
def test_a_listener_answers_anything_with_a_refuse(message: dict[str, object]) -> None:
    answer, outcome = listener().receive(message, 0)
    assert message_kind(answer) == "refuse"
    assert isinstance(outcome, PeerFault)
    encode_message(answer)


# --- messages --------------------------------------------------------------------------------------------------------


def test_a_refuse_is_short_and_printable_whatever_the_peer_stated() -> None:
    body = to_map(LEADER) | {"draft_identity": "\x1b]0;x" * 5000}
    answer, _ = listener().receive({"kind": "hello", "hello": body}, 0)
    assert answer["field"] == "draft_identity"
    assert len(str(answer["theirs"])) <= 256
    assert str(answer["theirs"]).isprintable()


def test_a_refusal_is_read_from_the_other_side() -> None:
    fault = parse_refuse(refuse_message(Refused(Reason.LIMITS_MISMATCH, "depth", 5, 4)))
    assert (fault.reason, fault.field, fault.ours, fault.theirs) == (Reason.LIMITS_MISMATCH, "depth", "4", "5")


@pytest.mark.parametrize(
    ("name", "value"), (("reason", "because"), ("reason", [1]), ("field", 3), ("ours", "x" * 257), ("theirs", None))
)
def test_a_malformed_refuse_is_named_so(name: str, value: object) -> None:
    message = refuse_message(Refused(Reason.LIMITS_MISMATCH, "depth", 5, 4)) | {name: value}
    with pytest.raises(PeerFault) as caught:
        parse_refuse(message)
    assert caught.value.reason is Reason.MALFORMED


@pytest.mark.parametrize("kind", MESSAGES)
def test_every_kind_has_exactly_its_keys(kind: str) -> None:
    message: Message = {**dict.fromkeys(MESSAGES[kind], "x"), "kind": kind}
    assert message_kind(message) == kind
    for wrong in (message | {"more": 1}, {"kind": kind, "other": 1}, message | {"kind": "helo"}, {}):
        with pytest.raises(PeerFault) as caught:
            message_kind(wrong)
        assert caught.value.reason is Reason.MALFORMED


def test_a_goodbye_names_its_reason() -> None:
    assert message_kind(goodbye_message(Reason.CANCELLED)) == "goodbye"
