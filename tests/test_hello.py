"""What a HELLO states: its sizes, every field's mismatch by name, hostile maps, and adopting a proposer's options."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import fields, replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.errors import ConfigError, PeerFault, Reason, Refused
from pp1q_transport.session import hello as hello_module
from pp1q_transport.session.negotiate import (
    FIELDS,
    Connector,
    Hello,
    Listener,
    Message,
    Role,
    Rule,
    State,
    adopt,
    check,
    identity_map_hash,
    make_hello,
    parse_hello,
    slot_parts,
    to_map,
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


# --- sizes -----------------------------------------------------------------------------------------------------------


def test_sizes_are_the_contract_s() -> None:
    parts = slot_parts(129280, 5, 32)
    assert parts == {
        "tokens": 20, "dense_row": 517_120, "dense_request": 2_585_600, "sparse_row": 256, "sparse_request": 1_280
    }  # fmt: skip
    assert 4 * parts["dense_request"] == 10_342_400
    assert 2 * 4 * parts["dense_request"] == 20_684_800
    assert slot_parts(64_640, 5, 32)["dense_request"] == 1_292_800  # a TP2 shard


def test_dense_rows_are_padded_to_64_bytes_and_parts_follow_the_representations() -> None:
    assert slot_parts(17, 3, 4) == {
        "tokens": 12, "dense_row": 128, "dense_request": 384, "sparse_row": 32, "sparse_request": 96
    }  # fmt: skip
    assert set(slot_parts(17, 3, 4, ("sparse",))) == {"tokens", "sparse_row", "sparse_request"}
    assert set(slot_parts(17, 3, 4, ("dense",))) == {"tokens", "dense_row", "dense_request"}


def test_the_identity_map_s_hash_is_pinned() -> None:
    assert identity_map_hash(129280) == "286ac82bf1843903edb8b40e5ba1d47a11c0765d275087c32914f7c4a374298b"
    assert identity_map_hash(129279) != identity_map_hash(129280)


# --- every field -----------------------------------------------------------------------------------------------------

# What the receiver states instead, so that exactly this field fails its rule. For OVERLAP a disjoint value, for DIFFER
# the leader's own, for PARTNER no partner, for RANK one beyond the group.
WRONG: dict[str, object] = {
    "wire_version": 3,
    "role": Role.LEADER,
    "boot_nonce": LEADER.boot_nonce,
    "link_nonce": LEADER.link_nonce,
    "semantic_id": "dyadic24-standard-v0",
    "verifier_id": "typical-v1",
    "rng_abi": "philox4x32-7",
    "precision": "bf16-le",
    "digest": "blake2b-keyed",
    "draw_proof": False,
    "representations": ("dense",),
    "link_kinds": ("rdma", "shm"),
    "group_mode": "vocabulary",
    "draft_identity": "another-draft",
    "draft_kind": "adapted",
    "target_identity": "another-target",
    "vocab_size": 129281,
    "id_map_hash": "0" * 64,
    "max_slots": 16,
    "depth": 4,
    "support": 64,
    "batch_requests": 2,
    "batches_in_flight": 1,
    "max_context_tokens": 4096,
    "slot_part_bytes": {"tokens": 24, "dense_row": 517_120},
    "group_size": 2,
    "rank": 1,
}
REASONS: dict[str, Reason] = {name: reason for name, reason, _ in FIELDS}


def test_every_field_of_hello_has_its_row_and_its_case() -> None:
    names = {item.name for item in fields(Hello)}
    assert {name for name, _, _ in FIELDS} == names
    assert len(FIELDS) == len(names)
    assert set(WRONG) == names


def test_two_hellos_that_agree_pass() -> None:
    check(LEADER, RECEIVER)
    check(RECEIVER, LEADER)


@pytest.mark.parametrize("name", WRONG)
def test_a_mismatch_is_refused_by_field_with_reason_and_both_values(name: str) -> None:
    theirs = replace(RECEIVER, **{name: WRONG[name]})  # type: ignore[arg-type]
    with pytest.raises(Refused) as caught:
        check(LEADER, theirs)
    assert (caught.value.reason, caught.value.field) == (REASONS[name], name)
    assert (caught.value.ours, caught.value.theirs) == (getattr(LEADER, name), WRONG[name])


@pytest.mark.parametrize("name", sorted(set(WRONG) - {"link_nonce"}))
def test_a_mismatch_is_refused_on_the_wire_by_both_machines(name: str) -> None:
    theirs = replace(RECEIVER, **{name: WRONG[name]})  # type: ignore[arg-type]
    # The listener refuses (its own HELLO is the odd one) and the connector learns the field and both values.
    one = connector()
    answer, outcome = listener(theirs).receive(travel(one.start(0)), 0)
    assert isinstance(outcome, Refused)
    if name != "wire_version":  # a listener of our version always states its version: that case is below
        assert answer["kind"] == "refuse"
        assert answer["field"] == name
        with pytest.raises(Refused) as caught:
            one.receive(travel(answer), 1)
        assert (caught.value.reason, caught.value.field) == (REASONS[name], name)
        quoted = (hello_module.quote(getattr(LEADER, name)), hello_module.quote(WRONG[name]))
        assert (caught.value.ours, caught.value.theirs) == quoted
        assert one.state is State.FAILED
    # The connector refuses too when a listener acknowledges it all the same.
    one = connector()
    answer, _ = listener().receive(travel(one.start(0)), 0)
    answer["hello"] = to_map(theirs)
    with pytest.raises(Refused) as caught:
        one.receive(travel(answer), 1)
    assert (caught.value.reason, caught.value.field) == (REASONS[name], name)
    assert one.state is State.FAILED


def test_a_keyed_digest_passes_only_when_both_sides_state_it() -> None:
    with pytest.raises(Refused):
        check(replace(LEADER, digest="blake2b-keyed"), RECEIVER)
    check(replace(LEADER, digest="blake2b-keyed"), replace(RECEIVER, digest="blake2b-keyed"))


def test_ranks_and_link_kinds_need_not_be_equal() -> None:
    check(replace(LEADER, group_size=4), replace(RECEIVER, group_size=4, rank=3))
    check(replace(LEADER, link_kinds=("tcp", "shm")), replace(RECEIVER, link_kinds=("shm", "rdma")))
    with pytest.raises(Refused, match="rank"):
        check(replace(LEADER, group_size=4, rank=1), replace(RECEIVER, group_size=4))


ROLES_THAT_MEET = {("leader", "receiver"), ("receiver", "leader"), ("coordinator", "member"), ("member", "coordinator"),
                   ("draft_leader", "draft_peer"), ("draft_peer", "draft_leader")}  # fmt: skip


@pytest.mark.parametrize("ours", Role)
@pytest.mark.parametrize("theirs", Role)
def test_only_partners_meet(ours: Role, theirs: Role) -> None:
    ranks = {role: int(role.sits_with_rank_0) for role in Role}
    mine = replace(LEADER, role=ours, group_size=2, rank=ranks[ours])
    other = replace(RECEIVER, role=theirs, group_size=2, rank=ranks[theirs])
    if (ours.value, theirs.value) in ROLES_THAT_MEET:
        check(mine, other)
        assert (ours.partner, theirs.partner) == (theirs, ours)
        assert ours.sends_rows is not theirs.sends_rows
    else:
        with pytest.raises(Refused, match="role") as caught:
            check(mine, other)
        assert caught.value.reason is Reason.SEMANTIC_MISMATCH


@pytest.mark.parametrize(("rank", "size", "fits"), ((0, 2, False), (1, 2, True), (2, 2, False), (7, 8, True), (0, 1, False)))
def test_a_member_is_no_rank_0_and_below_its_group_s_size(rank: int, size: int, fits: bool) -> None:
    coordinator = replace(LEADER, role=Role.COORDINATOR, group_size=size)
    member = replace(RECEIVER, role=Role.MEMBER, group_size=size, rank=rank)
    if fits:
        check(coordinator, member)
    else:
        with pytest.raises(Refused, match="rank"):
            check(member, coordinator)
    with pytest.raises(Refused, match="rank"):
        check(replace(coordinator, rank=1), member)


@pytest.mark.parametrize(
    ("ours", "theirs", "size", "rank", "wanted"),
    (
        (Role.DRAFT_LEADER, Role.DRAFT_PEER, 2, 0, 1),
        (Role.DRAFT_LEADER, Role.DRAFT_PEER, 4, 0, "1..3"),
        (Role.COORDINATOR, Role.MEMBER, 8, 9, "1..7"),
        (Role.COORDINATOR, Role.MEMBER, 1, 0, "none in a group of 1"),
        (Role.MEMBER, Role.COORDINATOR, 2, 1, 0),
        (Role.LEADER, Role.RECEIVER, 2, 2, "0..1"),
    ),
)
def test_a_refused_rank_is_told_which_ones_there_are(ours: Role, theirs: Role, size: int, rank: int, wanted: object) -> None:
    mine = replace(LEADER, role=ours, group_size=size, rank=int(ours.sits_with_rank_0))
    with pytest.raises(Refused) as caught:
        check(mine, replace(RECEIVER, role=theirs, group_size=size, rank=rank))
    assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("rank", wanted, rank)


def test_every_rule_is_used() -> None:
    assert {rule for _, _, rule in FIELDS} == set(Rule)


# --- maps ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("hello", (LEADER, RECEIVER, replace(RECEIVER, representations=("sparse",), rank=0)))
def test_a_hello_survives_its_map(hello: Hello) -> None:
    assert parse_hello(travel(to_map(hello))) == hello


BAD_MAPS: list[tuple[str, object, Reason]] = [
    *((name, low - 1, Reason.LIMITS_MISMATCH) for name, (low, _) in hello_module._INTEGERS.items()),
    *((name, high + 1, Reason.LIMITS_MISMATCH) for name, (_, high) in hello_module._INTEGERS.items()),
    *((name, "5", Reason.MALFORMED) for name in hello_module._INTEGERS),
    *((name, True, Reason.MALFORMED) for name in hello_module._INTEGERS),
    *((name, bad, Reason.MALFORMED) for name in hello_module._TEXTS for bad in ("", "x" * 257, "a\x1b[2J", 7, None)),
    ("role", "peer", Reason.MALFORMED),
    ("draft_kind", "distilled", Reason.MALFORMED),
    ("draw_proof", 1, Reason.MALFORMED),
    ("link_nonce", b"short", Reason.MALFORMED),
    ("link_nonce", "n" * 16, Reason.MALFORMED),
    ("id_map_hash", "F" * 64, Reason.MALFORMED),
    ("id_map_hash", "0" * 63, Reason.MALFORMED),
    ("representations", [], Reason.MALFORMED),
    ("representations", "dense", Reason.MALFORMED),
    ("representations", ["sparse", "dense"], Reason.MALFORMED),
    ("representations", ["dense", "dense"], Reason.MALFORMED),
    ("representations", ["fp8"], Reason.MALFORMED),
    ("link_kinds", [], Reason.MALFORMED),
    ("link_kinds", ["tcp"] * 2, Reason.MALFORMED),
    ("link_kinds", [f"k{n}" for n in range(9)], Reason.MALFORMED),
    ("link_kinds", [3], Reason.MALFORMED),
    ("slot_part_bytes", {}, Reason.MALFORMED),
    ("slot_part_bytes", [1], Reason.MALFORMED),
    ("slot_part_bytes", {"tokens": 1.5}, Reason.MALFORMED),
    ("slot_part_bytes", {"tokens": 0}, Reason.LIMITS_MISMATCH),
    ("slot_part_bytes", {"tokens": 1 << 41}, Reason.LIMITS_MISMATCH),
    ("slot_part_bytes", {f"p{n}": 1 for n in range(17)}, Reason.MALFORMED),
    ("max_slots", 7, Reason.LIMITS_MISMATCH),  # 4 requests x 2 batches in flight need 8
    ("support", 129, Reason.LIMITS_MISMATCH),  # of a vocabulary of 128, below
]


@pytest.mark.parametrize(("name", "value", "reason"), BAD_MAPS)
def test_a_map_with_one_bad_value_is_refused_by_its_name(name: str, value: object, reason: Reason) -> None:
    mapping = to_map(RECEIVER)
    if (name, value) == ("support", 129):
        mapping["vocab_size"] = 128
    mapping[name] = value
    with pytest.raises(Refused) as caught:
        parse_hello(mapping)
    assert (caught.value.reason, caught.value.field) == (reason, name)


@pytest.mark.parametrize("name", [item.name for item in fields(Hello)])
def test_a_missing_field_is_refused(name: str) -> None:
    mapping = to_map(RECEIVER)
    del mapping[name]
    with pytest.raises(Refused) as caught:
        parse_hello(mapping)
    assert caught.value.field == name
    assert caught.value.reason is (Reason.BAD_VERSION if name == "wire_version" else Reason.MALFORMED)


def test_an_extra_field_is_refused() -> None:
    with pytest.raises(Refused, match="upgrade"):
        parse_hello(to_map(RECEIVER) | {"upgrade": True})


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.binary(max_size=20) | st.floats(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=300, deadline=None)
@given(st.dictionaries(st.sampled_from([item.name for item in fields(Hello)]), VALUES, max_size=4))
def test_parsing_raises_one_error_whatever_the_values(changes: dict[str, object]) -> None:
    mapping = to_map(RECEIVER) | changes
    try:
        parsed = parse_hello(mapping)
    except PeerFault as fault:
        assert fault.reason in (Reason.MALFORMED, Reason.LIMITS_MISMATCH, Reason.BAD_VERSION)  # noqa: PT017
    else:
        assert to_map(parsed) == mapping


# --- making and adopting ---------------------------------------------------------------------------------------------


def test_make_hello_derives_hash_and_sizes() -> None:
    small = make_hello(Role.LEADER, 5, vocab_size=1000, depth=3, support=8, representations=("sparse",))
    assert small.id_map_hash == identity_map_hash(1000)
    assert small.slot_part_bytes == slot_parts(1000, 3, 8, ("sparse",))


@pytest.mark.parametrize(
    ("options", "text"),
    (
        ({"depth": 0}, "depth must be 1..32, not 0"),
        ({"vocab_size": -1}, "vocab_size must be"),
        ({"vocab_size": "big"}, "wrong type"),
        ({"draft_identity": ""}, "draft_identity"),
        ({"colour": 1}, "no field 'colour'"),
        ({"support": 2000, "vocab_size": 1000}, "support must be <= vocab_size 1000"),
    ),
)
def test_make_hello_names_the_bad_option(options: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_hello(Role.LEADER, 5, **options)


def test_a_boot_nonce_of_zero_is_no_boot_nonce() -> None:
    with pytest.raises(ConfigError, match="boot_nonce"):
        make_hello(Role.LEADER, 0)


def test_a_benchmark_receiver_takes_options_within_its_maxima() -> None:
    sizes = {"vocab_size": 1000, "depth": 3, "support": 8, "batch_requests": 2, "batches_in_flight": 1, "max_slots": 2}
    proposer = replace(make_hello(Role.LEADER, 5, representations=("sparse",), **sizes), link_nonce=b"p" * 16)
    taken = adopt(RECEIVER, proposer)
    check(taken, proposer)
    assert (taken.role, taken.boot_nonce, taken.depth) == (Role.RECEIVER, 22, 3)


@pytest.mark.parametrize("name", hello_module._ADOPTED)
def test_options_above_a_maximum_are_refused(name: str) -> None:
    above = getattr(RECEIVER, name) + 1
    with pytest.raises(Refused) as caught:
        adopt(RECEIVER, replace(LEADER, **{name: above}))
    assert (caught.value.reason, caught.value.field, caught.value.theirs) == (Reason.LIMITS_MISMATCH, name, above)


def test_a_representation_that_is_not_offered_is_refused() -> None:
    with pytest.raises(Refused, match="representations"):
        adopt(replace(RECEIVER, representations=("sparse",)), LEADER)


def test_adopting_does_not_hide_a_wrong_slot_size_or_map() -> None:
    for wrong in ({"slot_part_bytes": {"tokens": 4}}, {"id_map_hash": "0" * 64}, {"draft_identity": "x"}):
        theirs = replace(LEADER, **wrong)
        with pytest.raises(Refused, match=next(iter(wrong))):
            check(adopt(RECEIVER, theirs), theirs)
