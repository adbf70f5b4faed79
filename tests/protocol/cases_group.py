"""SPEC 4 between ranks: what a group link may carry, and that all ranks hold one decision or none. Numbers 4.3xx and 4.4xx."""

from __future__ import annotations

from typing import Final

import pytest

from pp1q_transport import wire
from pp1q_transport.errors import LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.group import READY, Announce, Phase

from .case import Case
from .frames import Bend, Frame, fields, payload_bit
from .group_rig import Act, GroupCase, GroupWorld, MemberRig
from .world import BUDGET_NS, BUDGET_US, Flight, World

R = Reason
LONG_US: Final = 1_000_000


def _ready(world: GroupWorld, request: int = 1) -> Flight:
    """A proposal that became READY on every rank."""
    flight = world.step(world.open(request), budget_us=LONG_US)
    world.put(flight)
    assert world.fates(flight) == [None] * world.size
    return flight


def _landing(world: GroupWorld, request: int = 1) -> Flight:
    """A proposal of which one row has landed everywhere."""
    flight = world.step(world.open(request), budget_us=LONG_US)
    world.put(flight, 1)
    return flight


def _same_bytes(world: GroupWorld, flight: Flight) -> None:
    """Every rank holds the rows and tokens that rank 0 holds."""
    slot, geometry = flight.slot, world.table.geometry
    for rig in world.members:
        for at, size in ((slot.rows_at, geometry.slot_bytes), (slot.meta_at, 8 * flight.depth)):
            assert rig.memory[at : at + size] == world.memory[at : at + size], f"rank {rig.rank} holds other bytes"


# --- the whole way ----------------------------------------------------------------------------------------------------


def ready_everywhere(world: GroupWorld) -> None:
    flight = _ready(world)
    assert world.tokens(flight) == world.honest_tokens(flight)
    _same_bytes(world, flight)
    for rig in world.members:
        slot = rig.slot(flight)
        assert rig.session.may_commit(slot.index, slot.generation, slot.epoch)
        assert (slot.request, slot.round, slot.anchor, slot.context) == (1, 0, flight.slot.anchor, flight.slot.context)
    assert world.group is not None
    assert world.group.may_commit(flight.slot.index, flight.generation, flight.slot.epoch)
    world.commit(flight, [*world.tokens(flight), 3])
    world.release_everywhere(flight)
    assert [table.not_free() for table in world.tables()] == [0] * world.size


def sparse_everywhere(world: GroupWorld) -> None:
    flight = world.step(world.open(1), wire.SPARSE, budget_us=LONG_US)
    world.put(flight)
    assert world.fates(flight) == [None] * 3
    _same_bytes(world, flight)


def rows_relayed_out_of_order(world: GroupWorld) -> None:
    flight = world.step(world.open(1), budget_us=LONG_US)
    replies = [world.reply(flight, flight.slot.anchor + 1 + i) for i in range(3)]
    done = world.completion(flight, replies)
    world.send("leader", replies[2], replies[0], replies[1], done)
    assert world.fates(flight) == [None] * 3
    _same_bytes(world, flight)


def two_at_once(world: GroupWorld) -> None:
    first, second = _landing(world), _landing(world, 2)
    world.put(second)
    world.put(first)
    assert world.fates(first) == world.fates(second) == [None] * 3


def many_rounds(world: GroupWorld) -> None:
    request = world.open(1)
    for _ in range(12):
        flight = world.step(request, budget_us=LONG_US)
        world.put(flight)
        assert world.fates(flight) == [None] * 3
        world.commit(flight, world.tokens(flight)[:2])
        world.release_everywhere(flight)


def slot_waits_for_every_rank(world: GroupWorld) -> None:
    flight = _ready(world)
    world.commit(flight, [1])
    assert flight.slot.state == st.READY, "members still read theirs"
    world.members[0].release(flight)
    assert not world.members[0].release(flight)
    world.run()
    assert world.receiver.step(flight.request, world.now, 1, 1.0, 0, 1, 0, BUDGET_US, 0) is None, "one slot, and it is held"
    world.members[1].release(flight)
    world.run()
    assert flight.slot.state == st.FREE
    assert not world.release(flight)


def rank_0_releases_last(world: GroupWorld) -> None:
    flight = _ready(world)
    for rig in world.members:
        rig.release(flight)
    world.run()
    assert flight.slot.state == st.READY
    world.commit(flight, [*world.tokens(flight), 3])
    assert flight.slot.state == st.FREE


def overdue_member(world: GroupWorld) -> None:
    flight = _ready(world)
    rig = world.members[0]
    rig.session.overdue(rig.slot(flight))
    world.release(flight)
    world.members[1].release(flight)
    world.run()
    world.receiver.overdue(flight.slot)
    assert flight.slot.state == st.QUARANTINE
    rig.release(flight)
    world.run()
    assert (rig.slot(flight).state, flight.slot.state) == (st.FREE, st.FREE)


# --- failures: one decision for all -------------------------------------------------------------------------------------


def bad_row_at_rank_0(world: GroupWorld) -> None:
    flight = _landing(world)
    world.taps["leader"].hook = lambda frame, inner: payload_bit(3)(frame, inner) if frame.header.kind == wire.REPLY else None
    world.put(flight)
    assert world.fates(flight) == [R.PAYLOAD_DIGEST] * 3


def _bad_relay(reason: Reason, bend: Bend, kind: int = wire.REPLY) -> Act:
    """One member gets something else than rank 0 sent: its vote voids the proposal on every rank."""

    def act(world: GroupWorld) -> None:
        rig = world.members[1]
        rig.bend("hub", kind, bend)
        flight = world.step(world.open(1), budget_us=LONG_US)
        world.put(flight)
        assert world.fates(flight) == [reason] * 3
        assert flight.request.generation == 1, "its noise is spent"
        rig.taps["hub"].hook = None
        again = world.step(flight.request, budget_us=LONG_US)
        world.put(again)
        assert world.fates(again) == [None] * 3

    return act


def _drop(_frame: Frame, _world: World) -> list[Frame]:
    return []


def budget_at_rank_0(world: GroupWorld) -> None:
    flight = world.step(world.open(1))
    world.put(flight, 2)
    world.at(BUDGET_NS)
    assert world.fates(flight) == [R.TIMEOUT] * 3


def silent_member(world: GroupWorld) -> None:
    """All rows are in everywhere; one vote never comes. Time decides, and rank 0's alone."""
    rig = world.members[0]
    rig.taps["member"].hold = True
    flight = world.step(world.open(1))
    world.put(flight)
    assert flight.slot.state == rig.slot(flight).state == st.VOTED
    world.at(BUDGET_NS - 1)
    rig.session.tick(1 << 60)
    assert flight.slot.state == rig.slot(flight).state == st.VOTED, "a member's clock decides nothing"
    world.at(BUDGET_NS)
    rig.taps["member"].hold = False
    world.run()
    assert world.fates(flight) == [R.TIMEOUT] * 3


def last_vote_in_time(world: GroupWorld) -> None:
    rig = world.members[0]
    rig.taps["member"].hold = True
    flight = world.step(world.open(1))
    world.put(flight)
    world.now = BUDGET_NS - 1
    rig.taps["member"].hold = False
    world.run()
    assert world.fates(flight) == [None] * 3
    assert flight.slot.ready_ns == BUDGET_NS - 1


def last_vote_too_late(world: GroupWorld) -> None:
    """No tick comes before the vote: its own arrival must notice that time is up."""
    rig = world.members[0]
    rig.taps["member"].hold = True
    flight = world.step(world.open(1))
    world.put(flight)
    world.now = BUDGET_NS
    rig.taps["member"].hold = False
    world.run()
    assert world.fates(flight) == [R.TIMEOUT] * 3


def leader_resets_while_voting(world: GroupWorld) -> None:
    rig = world.members[0]
    rig.taps["member"].hold = True
    flight = world.step(world.open(1), budget_us=LONG_US)
    world.put(flight)
    slot = flight.slot
    world.send("leader", world.frame(
        "leader", wire.RESET, request=1, request_generation=slot.request_generation, slot=slot.index,
        slot_generation=slot.generation, round=slot.round, subject=wire.STEP, status=R.OVERLOAD.code,
    ))  # fmt: skip
    rig.taps["member"].hold = False
    world.run()
    assert world.fates(flight) == [R.OVERLOAD] * 3


def row_after_our_vote(world: GroupWorld) -> None:
    """Rows that come again while rank 0 waits for votes land nowhere."""
    rig = world.members[0]
    rig.taps["member"].hold = True
    flight = world.step(world.open(1), budget_us=LONG_US)
    world.put(flight)
    world.send("leader", world.reply(flight, flight.slot.anchor + 1))
    assert world.counts["receiver"].of(R.GENERATION_DUPLICATE) == 1
    rig.taps["member"].hold = False
    world.run()
    assert world.fates(flight) == [None] * 3


def close_cancels_everywhere(world: GroupWorld) -> None:
    flight = _landing(world)
    world.receiver.close(flight.request)
    world.run()
    assert world.fates(flight) == [R.CANCELLED] * 3


def leader_lost(world: GroupWorld) -> None:
    """The leader's link is no rank: what is under way is decided as failed, the epoch stays open."""
    flight, held = _landing(world), _ready(world, 2)
    assert world.group is not None
    epoch = world.group.epoch
    world.reconnect()
    assert world.fates(flight) == [R.PEER_LOST] * 3
    assert (world.group.epoch, world.group.open) == (epoch, True)
    assert world.group.may_commit(held.slot.index, held.generation, held.slot.epoch)
    again = world.step(flight.request, budget_us=LONG_US)
    world.put(again)
    assert world.fates(again) == [None] * 3


# --- epochs -------------------------------------------------------------------------------------------------------------


def nothing_is_granted_before(world: GroupWorld) -> None:
    request = world.open(1)
    with pytest.raises(ProposalDiscarded, match="peer_lost"):
        world.step(request)
    assert (request.round, request.in_flight) == (0, False)
    world.rank_0_agrees = True
    world.run()
    world.put(world.step(request, budget_us=LONG_US))
    assert world.receiver.ready == 1


def _end(world: GroupWorld, rig: MemberRig) -> None:
    rig.down("member", R.CANCELLED)
    world.run()


def group_link_lost(world: GroupWorld) -> None:
    landing, held = _landing(world), _ready(world, 2)
    _end(world, world.members[1])
    assert world.fates(landing) == [R.PEER_LOST] * 3
    with pytest.raises(ProposalDiscarded, match="peer_lost"):
        world.receiver.commit(held.request, held.slot.round, wire.VERIFIED, 0, [1])
    assert len(held.request.tokens) == 3
    for rig in world.members:
        assert not rig.session.may_commit(held.slot.index, held.generation, held.slot.epoch)
    with pytest.raises(ProposalDiscarded, match="peer_lost"):
        world.step(landing.request)
    world.receiver.commit(held.request, held.slot.round, wire.TARGET_ONLY, 0, [1])


def group_goes_on_after_a_rank_s_return(world: GroupWorld) -> None:
    held = _ready(world)
    rig = world.members[1]
    _end(world, rig)
    rig.join()
    world.run()
    assert world.group is not None
    assert not world.group.open, "ranks 1 and 2 still read a slot of the old epoch"
    world.release_everywhere(held)
    assert world.group.open
    assert world.group.epoch == 2
    assert not world.group.may_commit(held.slot.index, held.generation, held.slot.epoch)
    flight = _ready(world, 2)
    assert flight.generation == 1 + world.table.floor


def target_process_lost(world: GroupWorld) -> None:
    landing = _landing(world)
    rig = world.members[0]
    rig.session.leave(R.PEER_LOST)
    world.run()
    assert world.fates(landing) == [R.PEER_LOST] * 3
    assert world.group is not None
    assert (world.group.epoch, world.group.open) == (2, True), "asked anew, and agreed"
    assert (world.group_counts.get("epochs_opened"), world.group_counts.get("epochs_ended")) == (2, 1)
    assert world.group.news == [
        ("epoch_asking", None, 1, 3), ("epoch_open", None, 1, 3), ("rank_left", R.PEER_LOST, 1, 1),
        ("epoch_asking", None, 2, 3), ("epoch_open", None, 2, 3),
    ]  # fmt: skip
    _ready(world, 2)


def rank_0_s_target_lost(world: GroupWorld) -> None:
    landing = _landing(world)
    assert world.group is not None
    world.group.leave(R.PEER_LOST)
    world.run()
    assert world.fates(landing) == [R.PEER_LOST] * 3
    assert world.group.epoch == 2
    _ready(world, 2)


def ranks_disagree(world: GroupWorld) -> None:
    """The first answer of rank 2 differs: the epoch does not open, the next one asks anew."""
    landing = _landing(world)
    answers = []

    def once(frame: Frame, _world: World) -> None:
        if frame.header.kind == wire.AGREE:
            answers.append(frame.header.epoch)
            frame.header.state_high += len(answers) == 1

    world.members[1].taps["member"].hook = once
    world.members[0].session.leave(R.PEER_LOST)
    world.run()
    assert world.fates(landing) == [R.PEER_LOST] * 3
    assert world.group is not None
    assert (answers, world.group.epoch, world.group.open) == ([2, 3], 3, True)
    assert world.group.coordinator.disagreements == world.group_counts.of(R.RANK_DISAGREE) == 1
    _ready(world, 2)


def commit_twice(world: GroupWorld) -> None:
    flight = _ready(world)
    world.commit(flight, [*world.tokens(flight), 3])
    with pytest.raises(ProposalDiscarded):
        world.receiver.commit(flight.request, flight.slot.round, wire.VERIFIED, 0, [1])


def member_of_another_table(world: GroupWorld) -> None:
    rig = world.members[0]
    with pytest.raises(LocalMisuse):
        type(rig.session)(rig.terms, rig.member, world.table, world.memory, rig.counts["member"])


# --- what a member refuses ----------------------------------------------------------------------------------------------


def _bent(kind: int, bend: Bend) -> Act:
    """Rank 0's frames to rank 1 are bent: rank 1 ends the link, and so the epoch; rank 2 learns of it."""

    def act(world: GroupWorld) -> None:
        world.members[0].bend("hub", kind, bend)
        flight = world.step(world.open(1), budget_us=LONG_US)
        if flight.landing:
            world.put(flight)
        _void_everywhere(world, flight)

    return act


def _void_everywhere(world: GroupWorld, flight: Flight) -> None:
    """Ranks 0 and 2 voided the proposal when rank 1 went."""
    assert world.group is not None
    assert world.group.epoch == 2
    assert flight.reason is R.PEER_LOST
    assert world.members[1].slot(flight).reason == R.PEER_LOST.code


def _hub_says(kind: int, after: str = "open", **values: int) -> Act:
    """A frame made by hand in rank 0's name, for rank 1: in an open epoch, or behind a proposal in slot 0."""

    def act(world: GroupWorld) -> None:
        rig = world.members[0]
        if after == "landing":
            _landing(world)
        elif after == "voted":
            world.members[1].taps["member"].hold = True
            world.put(world.step(world.open(1), budget_us=LONG_US))
        elif after == "ready":
            _ready(world)
        elif after == "done":
            flight = _ready(world)
            world.release_everywhere(flight)
        rig.send("hub", rig.frame("hub", kind, **values))
        world.members[1].taps["member"].hold = False
        world.run()

    return act


GRANT_1: Final = {
    "request": 9, "slot": 0, "slot_generation": 1, "depth": 3, "representation": 1, "position": 4, "epoch": 1,
    "owner": wire.OWNER_ALL, "budget_us": 1, "support_policy": 0, "seed": 0, "context": 0, "target_context": 0, "trace_id": 0,
}  # fmt: skip


def _grant(after: str = "open", **values: int) -> Act:
    return _hub_says(wire.GRANT, after, **(GRANT_1 | values))


def decided_twice(world: GroupWorld) -> None:
    flight = _ready(world)
    rig = world.members[0]
    rig.send("hub", rig.frame("hub", wire.DECIDE, slot=0, slot_generation=1, epoch=1, status=READY))
    assert world.fates(flight) == [None] * 3


def rank_0_speaks_of_its_end(world: GroupWorld) -> None:
    rig = world.members[0]
    rig.send("hub", rig.frame("hub", wire.STATUS, status=R.OVERLOAD.code))
    assert rig.session.peer_status == R.OVERLOAD.code


# --- what rank 0 refuses ------------------------------------------------------------------------------------------------


def _member_says(kind: int, after: str = "landing", **values: int) -> Act:
    """A frame made by hand in rank 1's name."""

    def act(world: GroupWorld) -> None:
        rig = world.members[0]
        if after == "landing":
            _landing(world)
        elif after == "ready":
            _ready(world)
        elif after == "voted":
            world.members[1].taps["member"].hold = True
            world.put(world.step(world.open(1), budget_us=LONG_US))
        elif after == "released":
            flight = _ready(world)
            rig.release(flight)
            world.run()
        rig.send("member", rig.frame("member", kind, **values))
        world.members[1].taps["member"].hold = False
        world.run()

    return act


def _harmless(act: Act) -> Act:
    def whole(world: GroupWorld) -> None:
        act(world)
        assert world.group is not None
        assert (world.group.epoch, world.group.open) == (1, True)
        assert world.receiver.ready == 1

    return whole


def stale_frames(world: GroupWorld) -> None:
    """What crossed the end of its epoch is dropped and counted."""
    rig = world.members[0]
    world.group_counts.reasons.clear()
    world.group.leave(R.PEER_LOST)  # type: ignore[union-attr]
    world.run()
    for kind in (wire.VOTE, wire.RELEASED):
        rig.send("member", rig.frame("member", kind, slot=0, slot_generation=9, epoch=1))
    rig.send("member", rig.frame("member", wire.AGREE, epoch=1, state_low=5))
    rig.send("member", rig.frame("member", wire.LEAVE, epoch=1, status=R.PEER_LOST.code))
    assert world.group_counts.of(R.GENERATION_STALE) == 4
    _ready(world)


def old_link_speaks(world: GroupWorld) -> None:
    """A rank that came back over another link: the first one is no longer heard."""
    rig = world.members[0]
    hub = rig.hub
    _end(world, rig)
    rig.join()
    world.run()
    header = rig.frame("member", wire.LEAVE, epoch=2, status=R.PEER_LOST.code).header
    assert hub.finish(header, 0) == -R.SESSION_MISMATCH.code
    rig.counts["hub"].refuse(R.SESSION_MISMATCH)
    assert world.group is not None
    assert world.group.open


def member_speaks_of_its_end(world: GroupWorld) -> None:
    rig = world.members[0]
    rig.send("member", rig.frame("member", wire.STATUS, status=R.OVERLOAD.code))
    assert rig.hub.peer_status == R.OVERLOAD.code


def group_frames_elsewhere(world: GroupWorld) -> None:
    world.send("leader", world.frame("leader", wire.GRANT))


def group_frames_to_a_leader(world: GroupWorld) -> None:
    world.send("receiver", world.frame("receiver", wire.VOTE))


def member_does_not_read(world: GroupWorld) -> None:
    """Its outbox at rank 0 fills up: its link ends, and the others go on without it."""
    rig = world.members[0]
    rig.taps["hub"].hold = True
    request = world.open(1)
    while not rig.hub.broken:
        rig.hub.announce(Announce(1, Phase.OPEN))
    world.run()
    with pytest.raises(ProposalDiscarded):
        world.step(request)
    rig.taps["hub"].hold = False


def _case(
    number: str, title: str, reason: Reason | None, act: Act, ends: dict[str, Reason] | None = None, **more: object
) -> Case:
    """`ends`: why the two ends of rank 1's link ended."""
    links = more.pop("links", {1: ends} if ends else {})
    return GroupCase(number=number, spec="4", title=title, reason=reason, act=act, ends=links, **more)  # type: ignore[arg-type]


def _at_member(number: str, title: str, reason: Reason, act: Act, **more: object) -> Case:
    """Rank 1 refuses what it gets, at the cost of its link."""
    return _case(number, title, reason, act, {"member": reason, "hub": R.PEER_LOST}, **more)


def _at_rank_0(number: str, title: str, reason: Reason, act: Act, **more: object) -> Case:
    """Rank 0 refuses what rank 1 says, at the cost of its link."""
    return _case(number, title, reason, act, {"hub": reason, "member": R.PEER_LOST}, **more)


RANK_2_LOST: Final = {2: {"member": R.CANCELLED, "hub": R.PEER_LOST}}

WHOLE: Final = (
    _case("4.301", "ready on every rank, with the same bytes", None, ready_everywhere),
    _case("4.302", "ready on eight ranks", None, ready_everywhere, world={"size": 8}),
    _case("4.303", "sparse rows on every rank", None, sparse_everywhere),
    _case("4.304", "rows relayed out of order", None, rows_relayed_out_of_order),
    _case("4.305", "two proposals of a group at once", None, two_at_once),
    _case("4.306", "a dozen rounds of a group", None, many_rounds, world={"slots": 2}),
    _case("4.307", "a slot waits for every rank's release", None, slot_waits_for_every_rank, world={"slots": 1}),
    _case("4.308", "rank 0 releases last", None, rank_0_releases_last),
    _case("4.309", "a member's consumer is overdue", None, overdue_member),
    _case("4.311", "bad row at rank 0 voids it on every rank", R.PAYLOAD_DIGEST, bad_row_at_rank_0),
    _case("4.312", "bad row at one member voids it on every rank", R.PAYLOAD_DIGEST,
          _bad_relay(R.PAYLOAD_DIGEST, payload_bit(5))),
    _case("4.313", "another token at one member", R.ID_RANGE, _bad_relay(R.ID_RANGE, fields(token=-1))),
    _case("4.314", "another round at one member", R.ROUND_MISMATCH, _bad_relay(R.ROUND_MISMATCH, fields(round=7))),
    _case("4.315", "a draw that a member can't prove", R.DRAW_MISMATCH,
          _bad_relay(R.DRAW_MISMATCH, fields(seed=lambda h: h.seed ^ 1), wire.GRANT)),
    _case("4.316", "a row that never reaches one member", R.INCOMPLETE, _bad_relay(R.INCOMPLETE, _drop)),
    _case("4.317", "a member's completion of another size", R.REPLY_SIZE,
          _bad_relay(R.REPLY_SIZE, fields(reply_size=lambda h: h.reply_size + 1), wire.COMPLETION)),
    _case("4.318", "the budget is spent: every rank times out", R.TIMEOUT, budget_at_rank_0),
    _case("4.319", "a member that never votes", R.TIMEOUT, silent_member),
    _case("4.320", "the last vote one ns before the deadline", None, last_vote_in_time),
    _case("4.321", "the last vote at the deadline", R.TIMEOUT, last_vote_too_late),
    _case("4.322", "the leader resets what is voted on", R.OVERLOAD, leader_resets_while_voting),
    _case("4.323", "a row again while rank 0 waits for votes", R.GENERATION_DUPLICATE, row_after_our_vote),
    _case("4.324", "close of a request cancels on every rank", R.CANCELLED, close_cancels_everywhere),
    _case("4.325", "the leader's link is lost, the epoch goes on", R.PEER_LOST, leader_lost),
    _case("4.331", "no grant before every rank agreed", None, nothing_is_granted_before, world={"agree": False}),
    _case("4.332", "a group link is lost", R.PEER_LOST, group_link_lost, leader_ends={}, links=RANK_2_LOST),
    _case("4.333", "a rank comes back", R.CANCELLED, group_goes_on_after_a_rank_s_return),
    _case("4.334", "a member's target process is lost", R.PEER_LOST, target_process_lost),
    _case("4.335", "rank 0's target process is lost", R.PEER_LOST, rank_0_s_target_lost),
    _case("4.336", "ranks whose committed states differ", R.RANK_DISAGREE, ranks_disagree),
    _case("4.337", "a proposal is committed once", None, commit_twice),
    _case("4.338", "a member session over another rank's slots", None, member_of_another_table),
)  # fmt: skip

GRANTS: Final = (
    _at_member("4.341", "GRANT of a coming epoch", R.RANK_DISAGREE, _bent(wire.GRANT, fields(epoch=2))),
    _at_member("4.342", "GRANT of an epoch that never was", R.GENERATION_STALE, _bent(wire.GRANT, fields(epoch=0))),
    _at_member("4.343", "GRANT for one owner", R.SEMANTIC_MISMATCH, _bent(wire.GRANT, fields(owner=1))),
    _at_member("4.344", "GRANT without a budget", R.LIMITS_MISMATCH, _bent(wire.GRANT, fields(budget_us=0))),
    _at_member("4.345", "GRANT of depth 0", R.DEPTH_MISMATCH, _bent(wire.GRANT, fields(depth=0))),
    _at_member("4.346", "GRANT of depth 4 of 3", R.DEPTH_MISMATCH, _bent(wire.GRANT, fields(depth=4))),
    _at_member("4.347", "GRANT of representation 3", R.REPRESENTATION, _bent(wire.GRANT, fields(representation=3))),
    _at_member("4.348", "GRANT of dense rows that were not negotiated", R.REPRESENTATION, _grant(), world={"dense": False}),
    _at_member("4.349", "GRANT of more support than the vocabulary", R.SUPPORT_BOUNDS,
               _bent(wire.GRANT, fields(support_policy=65))),
    _at_member("4.350", "GRANT of sparse rows of no entries", R.SUPPORT_BOUNDS, _grant(representation=2)),
    _at_member("4.351", "GRANT at the end of all positions", R.POSITION_BOUNDS, _grant(position=0xFFFFFFFF)),
    _at_member("4.352", "GRANT of slot 4 of 4", R.SLOT_BOUNDS, _grant(slot=4)),
    _at_member("4.353", "GRANT of a slot that lands", R.SLOT_STATE, _grant("landing", slot_generation=2)),
    _at_member("4.354", "GRANT of a slot that is read", R.SLOT_STATE, _grant("ready", slot_generation=2)),
    _at_member("4.355", "GRANT of a generation that was", R.GENERATION_STALE, _grant("done", slot_generation=1)),
    _at_member("4.356", "GRANT before an epoch is open", R.SLOT_STATE, _grant(), world={"agree": False}),
)  # fmt: skip


def _decide(after: str, **values: int) -> Act:
    return _hub_says(wire.DECIDE, after, **({"slot": 0, "slot_generation": 1, "epoch": 1} | values))


def _epoch(**values: int) -> Act:
    return _hub_says(wire.EPOCH, **values)


DECISIONS: Final = (
    _case("4.361", "DECIDE again", None, decided_twice),
    _at_member("4.362", "DECIDE otherwise", R.RANK_DISAGREE, _decide("ready", status=R.TIMEOUT.code)),
    _at_member("4.363", "DECIDE ready without a vote", R.RANK_DISAGREE, _decide("landing")),
    _at_member("4.364", "DECIDE on a generation never granted", R.SLOT_STATE, _decide("landing", slot_generation=2)),
    _at_member("4.365", "DECIDE in a coming epoch", R.RANK_DISAGREE, _decide("landing", epoch=2)),
    _at_member("4.366", "DECIDE in an epoch that never was", R.GENERATION_STALE, _decide("landing", epoch=0)),
    _at_member("4.367", "DECIDE for a reason there is not", R.RESERVED_BITS, _decide("landing", status=999)),
    _at_member("4.368", "DECIDE on slot 4 of 4", R.SLOT_BOUNDS, _decide("landing", slot=4)),
    _at_member("4.371", "EPOCH of phase 0", R.RESERVED_BITS, _epoch(epoch=2, phase=0)),
    _at_member("4.372", "EPOCH of phase 4", R.RESERVED_BITS, _epoch(epoch=2, phase=4)),
    _at_member("4.373", "EPOCH before the present one", R.GENERATION_STALE, _epoch(epoch=0, phase=2)),
    _at_member("4.374", "EPOCH that opens unasked", R.RANK_DISAGREE, _epoch(epoch=2, phase=3)),
    _at_member("4.375", "EPOCH that asks again while it is open", R.RANK_DISAGREE, _epoch(epoch=1, phase=2)),
    _at_member("4.376", "a member gets a STEP", R.UNEXPECTED_KIND, _hub_says(wire.STEP, temperature=0)),
    _at_member("4.377", "a member gets a VOTE", R.UNEXPECTED_KIND, _hub_says(wire.VOTE)),
    _at_member("4.378", "STATUS of rank 0 without a reason", R.RESERVED_BITS, _hub_says(wire.STATUS)),
    _case("4.379", "rank 0 says why it ends", None, rank_0_speaks_of_its_end),
    _at_member("4.380", "another life of rank 0", R.BOOT_NONCE, _hub_says(wire.EPOCH, boot_nonce=1)),
    _at_member("4.381", "another group session", R.SESSION_MISMATCH, _hub_says(wire.EPOCH, session=1)),
    _at_member("4.382", "a row for a member's generation never granted", R.SLOT_STATE,
               _hub_says(wire.COMPLETION, "landing", slot=0, slot_generation=2)),
)  # fmt: skip


def _vote(after: str, **values: int) -> Act:
    return _member_says(wire.VOTE, after, **({"slot": 0, "slot_generation": 1, "epoch": 1} | values))


def _released(after: str, **values: int) -> Act:
    return _member_says(wire.RELEASED, after, **({"slot": 0, "slot_generation": 1, "epoch": 1} | values))


VOTES: Final = (
    _at_rank_0("4.401", "VOTE on a generation never granted", R.SLOT_STATE, _vote("landing", slot_generation=2)),
    _at_rank_0("4.402", "VOTE on a slot never granted", R.SLOT_STATE, _vote("landing", slot=3)),
    _at_rank_0("4.403", "VOTE on slot 4 of 4", R.SLOT_BOUNDS, _vote("landing", slot=4)),
    _at_rank_0("4.404", "VOTE in a coming epoch", R.RANK_DISAGREE, _vote("landing", epoch=2)),
    _at_rank_0("4.405", "VOTE for a reason there is not", R.RESERVED_BITS, _vote("landing", status=999)),
    _at_rank_0("4.406", "VOTE that takes the first one back", R.RANK_DISAGREE, _vote("voted", status=R.MASS.code)),
    _case("4.407", "VOTE again", None, _harmless(_vote("voted"))),
    _case("4.408", "VOTE after the decision, as before", None, _harmless(_vote("ready"))),
    _at_rank_0("4.409", "VOTE after the decision, another", R.RANK_DISAGREE, _vote("ready", status=R.MASS.code)),
    _at_rank_0("4.410", "VOTE on a slot that was given back", R.SLOT_STATE, _vote("released")),
    _at_rank_0("4.421", "RELEASED before the decision", R.SLOT_STATE, _released("landing")),
    _at_rank_0("4.422", "RELEASED of a generation never granted", R.SLOT_STATE, _released("ready", slot_generation=2)),
    _at_rank_0("4.423", "RELEASED with a reason", R.RESERVED_BITS, _released("ready", status=R.MASS.code)),
    _at_rank_0("4.424", "RELEASED of slot 4 of 4", R.SLOT_BOUNDS, _released("ready", slot=4)),
    _case("4.425", "RELEASED again", None, _harmless(_released("released"))),
    _at_rank_0("4.431", "AGREE on a coming epoch", R.RANK_DISAGREE, _member_says(wire.AGREE, epoch=2)),
    _at_rank_0("4.432", "AGREE with another state in the open epoch", R.RANK_DISAGREE,
               _member_says(wire.AGREE, epoch=1, state_low=12, state_high=22)),
    _case("4.433", "AGREE again", None,
          _harmless(_member_says(wire.AGREE, "ready", epoch=1, state_low=11, state_high=22))),
    _at_rank_0("4.434", "LEAVE of a coming epoch", R.RANK_DISAGREE, _member_says(wire.LEAVE, epoch=2, status=R.PEER_LOST.code)),
    _at_rank_0("4.435", "LEAVE without a reason", R.RESERVED_BITS, _member_says(wire.LEAVE, epoch=1)),
    _case("4.436", "frames that crossed the end of their epoch", R.GENERATION_STALE, stale_frames),
    _case("4.437", "a link that its rank has left", R.SESSION_MISMATCH, old_link_speaks),
    _at_rank_0("4.441", "a hub gets a GRANT", R.UNEXPECTED_KIND, _member_says(wire.GRANT)),
    _at_rank_0("4.442", "a hub gets a RESET", R.UNEXPECTED_KIND, _member_says(wire.RESET, status=1)),
    _at_rank_0("4.443", "STATUS of a member without a reason", R.RESERVED_BITS, _member_says(wire.STATUS)),
    _case("4.444", "a member says why it ends", None, member_speaks_of_its_end),
    _at_rank_0("4.445", "another life of a member", R.BOOT_NONCE, _member_says(wire.LEAVE, boot_nonce=1)),
    _case("4.446", "a receiver gets a GRANT", R.UNEXPECTED_KIND, group_frames_elsewhere,
          leader_ends={"receiver": R.UNEXPECTED_KIND, "leader": R.PEER_LOST}),
    _case("4.447", "a leader gets a VOTE", R.UNEXPECTED_KIND, group_frames_to_a_leader,
          leader_ends={"leader": R.UNEXPECTED_KIND, "receiver": R.PEER_LOST}),
    _at_rank_0("4.448", "a member that does not read", R.OVERLOAD, member_does_not_read),
)  # fmt: skip

CASES: Final[tuple[Case, ...]] = (*WHOLE, *GRANTS, *DECISIONS, *VOTES)
