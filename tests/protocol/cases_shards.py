"""SPEC 4 where every rank has a link of its own: vocabulary shards, and rows for the rank that owns a request. Numbers 4.5xx."""

from __future__ import annotations

from typing import Final

import numpy as np

from pp1q_transport import dyadic, rng, wire
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st
from pp1q_transport.session.shards import REQUEST_OWNER, Claim, ranges

from .case import Case
from .frames import Bend, Frame, fields, payload_bit
from .own_rig import OwnCase, OwnFlight, OwnWorld

R = Reason
MASS: Final = 1 << 24


def _ready(world: OwnWorld, request: int = 1, representation: int = wire.DENSE, owner: int = 0) -> OwnFlight:
    world.open(request, owner)
    flight = world.step(request, representation)
    world.put(flight)
    assert world.fates(flight) == [None] * world.size
    for rank in range(world.size):
        assert world.tokens(flight, rank) == world.honest_tokens(flight)
    return flight


def _void(world: OwnWorld, flight: OwnFlight, reason: Reason) -> None:
    assert world.fates(flight) == [reason] * world.size, world.fates(flight)


# --- vocabulary: the whole way ----------------------------------------------------------------------------------------


def shards_make_the_row(world: OwnWorld) -> None:
    flight = _ready(world)
    for row in range(flight.depth):
        position = world.slot(flight, 0).anchor + 1 + row
        q = b"".join(
            world.held(flight, rank, row)[: 4 * (end - first)]
            for rank, (first, end) in enumerate(ranges(world.vocab, world.size))
        )
        assert (dyadic.to_counts(np.frombuffer(q, np.float32)) == world.counts(position)).all()


def sparse_shards(world: OwnWorld) -> None:
    flight = _ready(world, representation=wire.SPARSE)
    for row in range(flight.depth):
        found: list[tuple[int, float]] = []
        for rank in range(world.size):
            slot = world.slot(flight, rank)
            at = slot.meta_at + 4 * (flight.depth + row)
            entries = int(np.frombuffer(world.ranks[rank].memory, np.uint32, 1, at)[0])
            held = world.held(flight, rank, row)
            ids = np.frombuffer(held, np.int32, entries, 4 * entries).tolist()
            found += zip(ids, np.frombuffer(held, np.float32, entries).tolist(), strict=True)
        payload, entries, _token = world.row(flight, world.slot(flight, 0).anchor + 1 + row)
        ids, q = np.frombuffer(payload, np.int32, entries, 4 * entries), np.frombuffer(payload, np.float32, entries)
        assert found == list(zip(ids.tolist(), q.tolist(), strict=True))
    empty = [world.slot(flight, 2).reply_bytes]
    assert empty == [0], "the last shard holds no entry at all"


def many_rounds(world: OwnWorld) -> None:
    world.open()
    for _ in range(8):
        flight = world.step()
        world.put(flight)
        assert world.fates(flight) == [None] * world.size
        world.commit(flight, world.tokens(flight, 1)[:2])
    known = [rank.leader.requests.get(1) for rank in world.ranks]
    assert len({(each.prefix_low, each.prefix_high) for each in known if each is not None}) == 1


def a_slow_process_is_waited_for(world: OwnWorld) -> None:
    world.open()
    world.ranks[2].silent.add(1)
    flight = world.step()
    assert world.joined is not None
    assert not world.joined.steps, "offered before every rank asked"
    world.ranks[2].silent.clear()
    world.run()
    assert len(world.joined.steps) == 1
    world.put(flight)
    assert world.fates(flight) == [None] * world.size


def a_rank_that_never_asks(world: OwnWorld) -> None:
    world.open()
    world.ranks[1].silent.add(1)
    flight = world.step(budget_us=50)
    world.at(60_000)
    _void(world, flight, R.TIMEOUT)
    world.ranks[1].silent.clear()
    after = world.step()
    world.put(after)
    assert world.fates(after) == [None] * world.size


# --- vocabulary: what a shard row may not say ---------------------------------------------------------------------------


def _row_case(number: str, title: str, reason: Reason, bend: Bend, rank: int = 1, sparse: bool = False) -> OwnCase:
    """One row bent on its way to `rank`: void everywhere, and the next proposal is undisturbed."""

    def act(world: OwnWorld) -> None:
        world.open()
        flight = world.step(representation=wire.SPARSE if sparse else wire.DENSE)
        world.ranks[rank].link.bend("up", wire.REPLY, bend)
        world.put(flight)
        _void(world, flight, reason)
        world.ranks[rank].link.taps["up"].hook = None
        after = world.step(representation=wire.SPARSE if sparse else wire.DENSE)
        world.put(after)
        assert world.fates(after) == [None] * world.size

    return OwnCase(number=number, spec="4", title=title, reason=reason, act=act)


def _heavier(frame: Frame, _world: object) -> list[Frame]:
    """A count moved out of the shard: the mass that its header states is not there any more."""
    values = np.frombuffer(frame.payload, np.float32).copy()
    values[np.flatnonzero(values)[0]] -= 2.0**-24
    frame.payload[:] = values.tobytes()
    return [frame]


def _other_draw(frame: Frame, _world: object) -> list[Frame]:
    """The mass before the shard moved so that the draw falls into it when it should not, or the other way round."""
    h = frame.header
    u24 = rng.draw24(1001, rng.Domain.PROPOSAL, h.request_generation, h.round, h.position)
    inside = h.mass_before <= u24 < h.mass_before + h.shard_mass
    h.mass_before = (0 if u24 >= h.shard_mass else MASS - h.shard_mass) if inside else min(u24, MASS - h.shard_mass)
    return [frame]


def _first_row(bend: Bend) -> Bend:
    return lambda frame, world: bend(frame, world) if frame.header.position == 3 else [frame]


def token_moved_elsewhere(world: OwnWorld) -> None:
    """One rank is told another token than the others: its own shard can't show that, for the draw falls elsewhere."""
    world.open()
    flight = world.step()
    drawn = world.honest_tokens(flight)[0]
    bounds = ranges(world.vocab, world.size)
    home = next(rank for rank, (first, end) in enumerate(bounds) if first <= drawn < end)
    victim = next(rank for rank in range(world.size) if rank != home)
    other = next(rank for rank in range(world.size) if rank not in (home, victim))
    world.ranks[victim].link.bend("up", wire.REPLY, _first_row(fields(token=bounds[other][0])))
    world.put(flight)
    _void(world, flight, R.RANK_DISAGREE)


def chain_broken(world: OwnWorld) -> None:
    """A rank's rows are right by themselves, and lighter than they must be: only the whole chain shows it."""

    def lighter(frame: Frame, _world: object) -> list[Frame]:
        claim = Claim.unpack(bytes(frame.payload), len(frame.payload))
        rows = ((claim.rows[0][0], claim.rows[0][1] - 1, claim.rows[0][2]), *claim.rows[1:])
        frame.payload[:] = Claim(claim.first_id, claim.end_id, rows).pack()
        return [frame]

    world.open()
    flight = world.step()
    world.ranks[2].group_link.bend("down", wire.VOTE, lighter)
    world.put(flight)
    _void(world, flight, R.MASS)


def a_vote_of_another_range(world: OwnWorld) -> None:
    """A rank claims a range that is not its own: the ranges do not tile."""

    def widen(frame: Frame, _world: object) -> list[Frame]:
        claim = Claim.unpack(bytes(frame.payload), len(frame.payload))
        frame.payload[:] = Claim(claim.first_id - 32, claim.end_id, claim.rows).pack()
        return [frame]

    world.open()
    flight = world.step()
    world.ranks[2].group_link.bend("down", wire.VOTE, widen)
    world.put(flight)
    _void(world, flight, R.ID_RANGE)


def _vote_case(number: str, title: str, reason: Reason, bend: Bend) -> OwnCase:
    def act(world: OwnWorld) -> None:
        world.open()
        flight = world.step()
        world.ranks[1].group_link.bend("down", wire.VOTE, bend)
        world.put(flight)
        _void(world, flight, R.PEER_LOST)

    return OwnCase(
        number=number, spec="4", title=title, reason=reason, act=act,
        ends={(1, "group"): {"up": reason, "down": R.PEER_LOST}},
    )  # fmt: skip


def _cut(keep: int) -> Bend:
    def bend(frame: Frame, _world: object) -> list[Frame]:
        del frame.payload[keep:]
        if not keep:
            frame.header.payload_digest = 0
        return [frame]

    return bend


def _grown(frame: Frame, _world: object) -> list[Frame]:
    frame.payload += bytes(12 * 4)
    return [frame]


# --- vocabulary: STEPs that do not go together ---------------------------------------------------------------------------


def _asks(number: str, title: str, reason: Reason, **asks: object) -> OwnCase:
    """Rank 1's process asks for something else than rank 0's."""

    def act(world: OwnWorld) -> None:
        world.open()
        world.ranks[1].asks[1] = asks
        flight = world.step()
        _void(world, flight, reason)
        world.ranks[1].asks.clear()
        after = world.step()
        world.put(after)
        assert world.fates(after) == [None] * world.size

    return OwnCase(number=number, spec="4", title=title, reason=reason, act=act)


def other_seeds(world: OwnWorld) -> None:
    world.open(seeds=(1001, 1002, 1001))
    _void(world, world.step(), R.RANK_DISAGREE)


def _step_case(number: str, title: str, reason: Reason, bend: Bend) -> OwnCase:
    """Rank 2's STEP bent on its way: the leader fails it on every rank."""

    def act(world: OwnWorld) -> None:
        world.open()
        world.ranks[2].link.bend("down", wire.STEP, bend)
        flight = world.step()
        _void(world, flight, reason)
        world.ranks[2].link.taps["down"].hook = None
        after = world.step()
        world.put(after)
        assert world.fates(after) == [None] * world.size

    return OwnCase(number=number, spec="4", title=title, reason=reason, act=act)


def one_rank_behind(world: OwnWorld) -> None:
    """Rank 1's process committed other tokens: its prefix is not the group's."""
    world.open()
    rank = world.ranks[1]
    request = rank.requests.get(1)
    assert request is not None
    rank.session.commit(request, 0, wire.TARGET_ONLY, 0, [3])
    world.run()
    _void(world, world.step(), R.CONTEXT_MISMATCH)


# --- vocabulary: links that end -------------------------------------------------------------------------------------------


def a_leader_link_ends(world: OwnWorld) -> None:
    world.open()
    flight = world.step()
    world.put(flight, 1)
    world.ranks[1].link.down("up", R.LINK_ERROR)
    world.run()
    assert R.PEER_LOST in world.fates(flight)
    assert world.group.open, "no rank is dead by this"
    assert world.slot(flight, 0).state == st.FREE
    request = world.ranks[1].requests.get(1)
    assert request is not None
    world.ranks[1].join_leader()
    world.ranks[1].session.open(request)
    world.run()
    after = world.step()
    world.put(after)
    assert world.fates(after) == [None] * world.size
    world.ranks[1].link.ended.clear()


def a_leader_link_ends_after_the_vote(world: OwnWorld) -> None:
    world.open()
    flight = world.step()
    world.ranks[2].link.taps["up"].hold = True
    world.put(flight)
    assert world.slot(flight, 1).state == st.VOTED
    world.ranks[1].link.down("down", R.LINK_ERROR)
    assert world.slot(flight, 1).state == st.VOTED, "it waits for the decision"
    world.ranks[2].link.taps["up"].hold = False
    world.run()


def a_group_link_ends(world: OwnWorld) -> None:
    world.open()
    flight = world.step()
    world.put(flight, 1)
    world.ranks[1].group_link.down("down", R.LINK_ERROR)
    world.run()
    _void(world, flight, R.PEER_LOST)
    assert not world.group.open


def an_epoch_ends_over_a_ready_proposal(world: OwnWorld) -> None:
    """Its process gives it back without a commit; the request goes on in the next epoch."""
    flight = _ready(world)
    world.ranks[1].group_link.down("down", R.LINK_ERROR)
    world.run()
    assert not world.group.may_commit(flight.slot, flight.generation, 1)
    for rank in world.ranks:
        rank.release(rank.table.slots[flight.slot])
    world.ranks[1].join_group()
    world.run()
    assert world.group.open
    after = world.step()
    world.put(after)
    assert world.fates(after) == [None] * world.size


# --- request-owner ---------------------------------------------------------------------------------------------------------


def owners_take_turns(world: OwnWorld) -> None:
    for owner in range(world.size):
        flight = _ready(world, 1 + owner, owner=owner)
        for rank in range(world.size):
            held = world.held(flight, rank, 0)
            assert any(held) is (rank == owner) or world.slot(flight, rank).reply_bytes == 0
            assert (world.slot(flight, rank).reply_bytes > 0) is (rank == owner)
        world.commit(flight, world.tokens(flight, 0)[:2])
        again = world.step(1 + owner)
        world.put(again)
        assert world.fates(again) == [None] * world.size
        world.commit(again, [*world.tokens(again, 2), 4])
        for rank in world.ranks:
            assert (rank.leader.requests.get(1 + owner) is not None) is (rank.rank == owner), "only its owner opens it"


def owner_meets_a_bad_row(world: OwnWorld) -> None:
    world.open(1, owner=2)
    flight = world.step()
    world.ranks[2].link.bend("up", wire.REPLY, payload_bit(3))
    world.put(flight)
    _void(world, flight, R.PAYLOAD_DIGEST)


def owner_has_no_link(world: OwnWorld) -> None:
    world.open(1, owner=1)
    world.ranks[1].link.down("down", R.LINK_ERROR)
    world.run()
    _void(world, world.step(), R.PEER_LOST)


def decided_tokens_altered(world: OwnWorld) -> None:
    world.open(1, owner=1)
    flight = world.step()
    world.ranks[2].group_link.bend("up", wire.DECIDE, payload_bit(1))
    world.put(flight)
    assert world.slot(flight, 2).reason == R.PEER_LOST.code


def decided_tokens_differ(world: OwnWorld) -> None:
    """The owner is told other tokens than it drew."""

    def other(frame: Frame, _world: object) -> list[Frame]:
        frame.payload[0] ^= 1
        return [frame]

    world.open(1, owner=1)
    flight = world.step()
    world.ranks[1].group_link.bend("up", wire.DECIDE, other)
    world.put(flight)
    assert world.slot(flight, 1).reason == R.PEER_LOST.code


def decided_without_tokens(world: OwnWorld) -> None:
    world.open(1, owner=0)
    flight = world.step()
    world.ranks[2].group_link.bend("up", wire.DECIDE, _cut(0))
    world.put(flight)
    assert world.slot(flight, 2).reason == R.PEER_LOST.code


def granted_to_a_rank_that_is_none(world: OwnWorld) -> None:
    world.open(1, owner=1)
    world.ranks[2].group_link.bend("up", wire.GRANT, fields(owner=3))
    _void_or_lost(world, world.step())


def _void_or_lost(world: OwnWorld, flight: OwnFlight) -> None:
    assert world.slot(flight, 0).reason == R.PEER_LOST.code


OWNED: Final = {"mode": REQUEST_OWNER}


def _case(number: str, title: str, reason: Reason | None, act: object, **more: object) -> OwnCase:
    return OwnCase(number=number, spec="4", title=title, reason=reason, act=act, **more)  # type: ignore[arg-type]


def _group_end(rank: int, reason: Reason, side: str) -> dict[tuple[int, str], dict[str, Reason]]:
    other = "up" if side == "down" else "down"
    return {(rank, "group"): {side: reason, other: R.PEER_LOST}}


CASES: tuple[Case, ...] = (
    _case("4.501", "three shards make the whole row, counts and tokens", None, shards_make_the_row),
    _case("4.502", "sparse shards make the whole row, one of them empty", None, sparse_shards),
    _case("4.503", "eight ranks of a vocabulary of 1000", None, shards_make_the_row, world={"size": 8, "vocab": 1000}),
    _case("4.504", "many rounds over shards", None, many_rounds),
    _case("4.505", "shards without a draw proof", None, shards_make_the_row, world={"draw_proof": False}),
    _case("4.506", "a STEP is offered when every rank has asked", None, a_slow_process_is_waited_for),
    _case("4.507", "a rank whose process never asks", R.TIMEOUT, a_rank_that_never_asks),
    _row_case("4.511", "shard row of another shard", R.ID_RANGE, fields(shard=2)),
    _row_case("4.512", "shard row that starts a block early", R.ID_RANGE, fields(first_id=32)),
    _row_case("4.513", "shard row that ends a token late", R.ID_RANGE, fields(end_id=97)),
    _row_case("4.514", "shard row with the whole vocabulary's range", R.ID_RANGE, fields(first_id=0, end_id=100)),
    _row_case("4.515", "shard mass beyond 2^24", R.MASS, fields(shard_mass=MASS + 1)),
    _row_case("4.516", "mass before beyond 2^24", R.MASS, fields(mass_before=MASS + 1)),
    _row_case("4.517", "shard mass and mass before beyond 2^24 together", R.MASS,
              fields(shard_mass=lambda h: MASS - h.mass_before + 1)),
    _row_case("4.518", "shard mass that is not the values' sum", R.MASS, _heavier),
    _row_case("4.519", "dense shard of one entry too few", R.SUPPORT_BOUNDS, fields(entry_count=lambda h: h.entry_count - 1)),
    _row_case("4.520", "dense shard of a whole row's entries", R.SUPPORT_BOUNDS, fields(entry_count=100)),
    _row_case("4.521", "shard row altered on the way", R.PAYLOAD_DIGEST, payload_bit(9)),
    _row_case("4.522", "shard whose mass before claims the draw for itself or gives it away", R.DRAW_MISMATCH, _other_draw),
    _row_case("4.523", "token moved into a shard that was not drawn, or out of the one that was", R.DRAW_MISMATCH,
              fields(token=lambda h: 1 if h.token >= 64 else 70), rank=1),
    _row_case("4.524", "sparse shard with an ID of its neighbour", R.ID_RANGE,
              lambda f, w: _foreign_id(f), rank=0, sparse=True),
    _case("4.531", "one rank is told another token", R.RANK_DISAGREE, token_moved_elsewhere),
    _case("4.532", "masses of shards that do not chain", R.MASS, chain_broken),
    _case("4.533", "ranges of votes that do not tile", R.ID_RANGE, a_vote_of_another_range),
    _vote_case("4.534", "vote whose claim was altered", R.PAYLOAD_DIGEST,
               lambda f, w: _altered(f)),
    _vote_case("4.535", "ready vote without a claim", R.LENGTH_BOUNDS, _cut(0)),
    _vote_case("4.536", "vote cut short", R.LENGTH_BOUNDS, _cut(11)),
    _vote_case("4.537", "vote of more positions than may be", R.LENGTH_BOUNDS, _grown),
    _vote_case("4.538", "failing vote with a claim", R.LENGTH_BOUNDS, fields(status=R.MASS.code)),
    _asks("4.541", "ranks ask for other depths", R.DEPTH_MISMATCH, depth=2),
    _asks("4.542", "ranks ask for other temperatures", R.CONTEXT_MISMATCH, temperature=0.5),
    _asks("4.543", "ranks ask in other target contexts", R.CONTEXT_MISMATCH, target_context=8),
    _asks("4.544", "ranks ask for other representations", R.CONTEXT_MISMATCH, representation=wire.SPARSE, support=8),
    _case("4.545", "ranks open a request with other seeds", R.RANK_DISAGREE, other_seeds),
    _case("4.546", "a rank whose prefix is not the group's", R.CONTEXT_MISMATCH, one_rank_behind),
    _step_case("4.547", "STEP of one rank for another target context", R.CONTEXT_MISMATCH, fields(target_context=1)),
    _step_case("4.548", "STEP of one rank for another depth", R.DEPTH_MISMATCH, fields(depth=2)),
    _step_case("4.549", "STEP of one rank for another round", R.ROUND_MISMATCH, fields(round=lambda h: h.round + 3)),
    _case("4.551", "a rank loses its link to the leader with rows under way", R.PEER_LOST, a_leader_link_ends),
    _case("4.552", "a rank loses its link to the leader after its vote", None, a_leader_link_ends_after_the_vote,
          ends={(1, "leader"): {"down": R.LINK_ERROR, "up": R.PEER_LOST}}),
    _case("4.553", "a rank loses its group link with rows under way", R.PEER_LOST, a_group_link_ends,
          ends={(1, "group"): {"down": R.LINK_ERROR, "up": R.PEER_LOST}}),
    _case("4.554", "an epoch that ends over a ready proposal", None, an_epoch_ends_over_a_ready_proposal),
    _case("4.561", "every rank owns a request in turn", None, owners_take_turns, world=OWNED),
    _case("4.562", "the owner of a request meets a bad row", R.PAYLOAD_DIGEST, owner_meets_a_bad_row, world=OWNED),
    _case("4.563", "the owner of a request has no link to the leader", R.PEER_LOST, owner_has_no_link, world=OWNED,
          ends={(1, "leader"): {"down": R.LINK_ERROR, "up": R.PEER_LOST}}),
    _case("4.564", "tokens of a decision altered on the way", R.PEER_LOST, decided_tokens_altered,
          world=OWNED, ends=_group_end(2, R.PAYLOAD_DIGEST, "down")),
    _case("4.565", "decision with other tokens than its owner's", R.PEER_LOST, decided_tokens_differ,
          world=OWNED, ends=_group_end(1, R.RANK_DISAGREE, "down")),
    _case("4.566", "ready decision without the tokens", R.PEER_LOST, decided_without_tokens,
          world=OWNED, ends=_group_end(2, R.LENGTH_BOUNDS, "down")),
    _case("4.567", "grant for a rank that the group does not have", R.PEER_LOST, granted_to_a_rank_that_is_none,
          world=OWNED, ends=_group_end(2, R.SEMANTIC_MISMATCH, "down")),
)  # fmt: skip


def _foreign_id(frame: Frame) -> list[Frame]:
    entries = frame.header.entry_count
    frame.payload[8 * entries - 4 : 8 * entries] = (95).to_bytes(4, "little")
    return [frame]


def _altered(frame: Frame) -> list[Frame]:
    frame.payload[-1] ^= 1
    frame.sign_payload = False
    return [frame]

