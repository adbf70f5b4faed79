"""SPEC 6 and 7 between ranks: parts of exchanges over vocabulary shards, believed only when all of them fit. Numbers 7.0xx."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pytest

from pp1q_transport import dyadic, greedy, sharding, wire
from pp1q_transport.errors import InvalidQ, LocalMisuse, PeerFault, Reason
from pp1q_transport.session.exchange_run import Place
from pp1q_transport.session.exchanges import WINDOW
from pp1q_transport.session.parts import PURPOSES, Part, RanksDiffer
from pp1q_transport.sharding import Shard
from pp1q_transport.verify import QRow, verify_chain_fast

from . import exchange_rig as x
from .case import Case
from .frames import Bend, both, claimed, fields, moved, payload_bit, resized
from .group_rig import Act, GroupCase, GroupWorld, MemberRig

R = Reason
WIDE: Final = {"vocab": 200}  # three ranks: 96, 96 and 8 tokens
INF, NAN = float("inf"), float("nan")

# --- the whole way ----------------------------------------------------------------------------------------------------


def _logits(world: GroupWorld, rows: int = 4) -> np.ndarray:
    noise = np.random.default_rng(5)
    found = noise.integers(-2, 3, (rows, world.terms.vocab_size)).astype(np.float32)  # ties everywhere
    found[noise.random(found.shape) < 0.4] = -np.inf
    return found


def _own(whole: np.ndarray, shard: Shard) -> np.ndarray:
    """A rank's own columns, padded with what would win."""
    padded = np.full((len(whole), shard.size + 7), 6e4, whole.dtype)
    padded[:, : shard.size] = whole[:, shard.first_id : shard.end_id]
    return padded


def winners_equal_the_full_path(world: GroupWorld) -> None:
    logits = _logits(world)
    want = [greedy.full_path_token(row) for row in logits]
    got = x.compute(world, lambda shard: sharding.greedy_tokens_sharded(shard, _own(logits, shard)))
    assert got == [want] * world.size
    assert world.group_counts.totals["exchanges"] == 1


def _refused(value: float) -> Act:
    def act(world: GroupWorld) -> None:
        logits = _logits(world)
        logits[2, 40] = value
        with pytest.raises(InvalidQ):
            x.compute(world, lambda shard: sharding.greedy_tokens_sharded(shard, _own(logits, shard)))
        assert world.group is not None
        assert world.group.open, "every rank refused it alike: nothing is wrong with the group"

    return act


def nothing_but_minus_inf(world: GroupWorld) -> None:
    logits = np.full((2, world.terms.vocab_size), -np.inf, np.float16)
    with pytest.raises(InvalidQ):
        x.compute(world, lambda shard: sharding.greedy_tokens_sharded(shard, _own(logits, shard)))


def q_is_built(world: GroupWorld) -> None:
    """Weights, counts, support and draw: those of one process, bit for bit, over frames."""
    noise = np.random.default_rng(3)
    logits = noise.normal(size=world.terms.vocab_size) * 3
    weights = dyadic.weights_from_logits(logits)
    got = x.compute(world, lambda s: sharding.weights_sharded(s, logits[s.first_id : s.end_id]))
    assert np.concatenate(got).tobytes() == weights.tobytes()
    cold = x.compute(world, lambda s: sharding.weights_sharded(s, logits[s.first_id : s.end_id], 0))
    assert np.concatenate(cold).tolist() == dyadic.weights_from_logits(logits, 0).tolist()
    for which in (weights, np.where(np.arange(len(weights)) % 3 == 0, 1.0, 1 / 3), np.ones(len(weights))):
        rows = x.compute(world, lambda s, which=which: sharding.allocate_sharded(s, which[s.first_id : s.end_id].copy()))
        counts = dyadic.allocate(which)
        assert np.concatenate([row.counts for row in rows]).tolist() == counts.tolist()
        for u24 in (0, 1 << 20, dyadic.MASS - 1):
            drawn = x.compute(world, lambda s, rows=rows, u24=u24: sharding.draw_sharded(rows[s.rank], u24))
            assert drawn == [dyadic.draw(counts, u24)] * world.size
    found = x.compute(world, lambda s: sharding.allocate_top_k_sharded(s, weights[s.first_id : s.end_id].copy(), 9))
    ids, counts = dyadic.allocate_top_k(weights, 9)
    assert [int(token) for row in found for token in row.ids] == ids.tolist()
    assert [int(count) for row in found for count in row.counts] == counts.tolist()
    bad = weights.copy()
    bad[3] = -1
    for make in (sharding.allocate_sharded, lambda s, w: sharding.allocate_top_k_sharded(s, w, 9)):
        with pytest.raises(InvalidQ):
            x.compute(world, lambda s, make=make: make(s, bad[s.first_id : s.end_id].copy()))


def large_parts(world: GroupWorld) -> None:
    """Candidates of more than 4,096 bytes, which an outbox does not copy, as many as a part may have."""
    weights = np.random.default_rng(4).random(world.terms.vocab_size)
    k = PURPOSES[16].most
    found = x.compute(world, lambda s: sharding.allocate_top_k_sharded(s, weights[s.first_id : s.end_id].copy(), k))
    ids, counts = dyadic.allocate_top_k(weights, k)
    assert [int(token) for row in found for token in row.ids] == ids.tolist()
    assert [int(count) for row in found for count in row.counts] == counts.tolist()
    with pytest.raises(LocalMisuse, match="candidates"):
        x.compute(world, lambda s: sharding.allocate_top_k_sharded(s, weights[s.first_id : s.end_id].copy(), k + 1))


def chains_equal_the_unsharded_ones(world: GroupWorld) -> None:
    """Acceptance, correction and bonus over frames: the verdicts of one process."""
    seen = set()
    for seed in range(12):
        noise = np.random.default_rng(seed)
        size = world.terms.vocab_size
        p = np.exp(noise.normal(size=(4, size)) * 2).astype(np.float32)
        counts = [dyadic.allocate(row * np.exp(noise.normal(size=size) * 0.3)) for row in p[:3].astype(np.float64)]
        tokens = [dyadic.draw(row, int(noise.integers(dyadic.MASS))) for row in counts]
        q = [dyadic.to_q(row) for row in counts]
        want = verify_chain_fast(tokens, [QRow(row) for row in q], lambda i, p=p: p[i], seed, 0, 0, 2)

        def make(s: Shard, p: np.ndarray = p, q: list[np.ndarray] = q, tokens: list[int] = tokens, seed: int = seed) -> Any:
            own = slice(s.first_id, s.end_id)
            return sharding.verify_chain_sharded(
                s, tokens, [QRow(row[own].copy()) for row in q], lambda i: p[i, own].copy(), seed, 0, 0, 2
            )

        assert x.compute(world, make) == [want] * world.size
        seen.add(want.accepted_drafts)
    assert {0, 3} <= seen or len(seen) > 2


def one_rank_ahead(world: GroupWorld) -> None:
    """A rank may be so far ahead of the others and no more; what it said is complete when they come."""
    for n in range(WINDOW):
        x.say(world, x.winners(world, 1, n))
    for rank in (2, 0):
        for n in range(WINDOW):
            x.say(world, x.winners(world, rank, n))
    for box in x.heard(world):
        assert [parts[0].sequence for parts in box] == list(range(WINDOW))
        assert all([part.rank for part in parts] == [0, 1, 2] for parts in box)


def nothing_before_all(world: GroupWorld) -> None:
    for rank in (2, 0):
        x.say(world, x.winners(world, rank))
        assert x.heard(world) == [[]] * 3
    x.say(world, x.winners(world, 1))
    told = x.heard(world)
    assert [len(box) for box in told] == [1] * 3
    said = [[(p.rank, p.place, p.values.tobytes()) for p in box[0]] for box in told]
    assert said[0] == said[1] == said[2]


def leader_s_link_is_no_rank(world: GroupWorld) -> None:
    x.say(world, x.winners(world, 0))
    world.reconnect()
    x.say(world, x.winners(world, 1))
    x.say(world, x.winners(world, 2))
    assert [len(box) for box in x.heard(world)] == [1] * 3


def epoch_ends_in_the_middle(world: GroupWorld) -> None:
    """What was complete and not taken, and what was under way, is for nobody; the next epoch counts from 0."""
    for rank in range(3):
        x.say(world, x.winners(world, rank))
    x.say(world, x.winners(world, 2, 1))
    rig = world.members[0]
    rig.down("member", R.CANCELLED)
    world.run()
    assert x.heard(world) == [[]] * 3
    with pytest.raises(LocalMisuse):
        world.members[1].session.exchange(x.winners(world, 2, 2))
    rig.join()
    world.run()
    assert world.group is not None
    assert world.group.epoch == 2
    for rank in range(3):
        x.say(world, x.winners(world, rank))
    assert [len(box) for box in x.heard(world)] == [1] * 3


def told_after_leaving(world: GroupWorld) -> None:
    """The other ranks' parts cross our LEAVE: they are for nobody, and the link stands."""
    for rank in (1, 2):
        x.say(world, x.winners(world, rank))
    rig = world.members[0]
    rig.taps["hub"].hold = True
    x.say(world, x.winners(world, 0))
    rig.session.leave(R.PEER_LOST)
    rig.taps["hub"].hold = False
    world.run()
    assert rig.session.exchanged == []
    assert not rig.ended


def said_in_an_epoch_that_is_over(world: GroupWorld) -> None:
    rig = world.members[0]
    rig.taps["member"].hold = True
    rig.session.exchange(x.winners(world, 1))
    world.group.leave(R.PEER_LOST)  # type: ignore[union-attr]
    world.run()
    rig.taps["member"].hold = False
    world.run()
    assert world.group_counts.of(R.GENERATION_STALE) == 1
    assert not rig.ended
    for rank in range(3):
        x.say(world, x.winners(world, rank))
    assert [len(box) for box in x.heard(world)] == [1] * 3


def own_parts_out_of_turn(world: GroupWorld) -> None:
    """A rank's own process: out of turn is misuse, and what the others would refuse is not sent."""
    assert world.group is not None
    for say in (world.group.exchanges.own, world.members[0].session.exchange):
        rank = 0 if say == world.group.exchanges.own else 1
        for wrong in (x.winners(world, rank, 1), x.winners(world, 2)):
            with pytest.raises(LocalMisuse):
                say(wrong)
        with pytest.raises(PeerFault) as caught:
            say(x.part(world, rank, "winners", [(1.0, 63 if rank == 0 else 3)]))
        assert caught.value.reason is R.ID_RANGE
    world.run()
    assert not any(rig.taps["member"].seen and rig.taps["member"].seen[-1].header.kind == x.KIND for rig in world.members)


def rank_0_differs(world: GroupWorld) -> None:
    """Its own part comes last and does not go with the others: any rank may be wrong, so all agree anew and no link is cut."""
    group = world.group
    assert group is not None
    wrong = (
        (x.part(world, 0, "winners", [(1.0, 0)], 0, Place(2, 0, 0, 1)), R.REQUEST_MISMATCH),
        (x.part(world, 0, "winners", [(1.0, 0)], 0, Place(1, 0, 4, 1)), R.ROUND_MISMATCH),
        (x.winners(world, 0, 0, 2), R.LENGTH_BOUNDS),
        (x.part(world, 0, "largest score of each shard", [1.0]), R.SEMANTIC_MISMATCH),
    )
    for part, reason in wrong:
        for rank in (1, 2):
            x.say(world, x.winners(world, rank))
        with pytest.raises(RanksDiffer) as caught:
            group.exchanges.own(part)
        assert caught.value.reason is reason
        group.leave(reason)
        world.run()
        assert x.heard(world) == [[]] * 3
    assert group.epoch == 1 + len(wrong)
    for rank in range(3):
        x.say(world, x.winners(world, rank))
    assert [len(box) for box in x.heard(world)] == [1] * 3


# --- bent parts ---------------------------------------------------------------------------------------------------------


def _says(bend: Bend, make: Callable[[GroupWorld, int], Part] = x.winners) -> Act:
    """Rank 1's part is bent on its way to rank 0: nobody hears of the exchange, whoever comes before or after."""

    def act(world: GroupWorld) -> None:
        x.say(world, make(world, 0))
        world.members[0].bend("member", x.KIND, bend)
        x.say(world, make(world, 1))
        assert x.heard(world) == [[]] * 3, "no rank was told anything"
        assert world.group is not None
        assert not world.group.open
        with pytest.raises(LocalMisuse):
            world.members[1].session.exchange(make(world, 2))

    return act


def _last_says(bend: Bend, make: Callable[[GroupWorld, int], Part] = x.winners) -> Act:
    """The same, when it is the last part that was missing: what only all parts together show."""

    def act(world: GroupWorld) -> None:
        for rank in range(world.size):
            if rank != 1:
                x.say(world, make(world, rank))
        world.members[0].bend("member", x.KIND, bend)
        x.say(world, make(world, 1))
        assert x.heard(world) == [[]] * world.size, "no rank was told anything"

    return act


def _told(bend: Bend, make: Callable[[GroupWorld, int], Part] = x.winners, rank: int | None = None) -> Act:
    """What rank 0 tells rank 1 is bent: rank 1 believes nothing of it, and the epoch is over for all. `rank`: of whose part."""

    def act(world: GroupWorld) -> None:
        rig: MemberRig = world.members[0]
        rig.taps["hub"].hook = lambda frame, inner: (
            bend(frame, inner) if frame.header.kind == x.KIND and rank in (None, frame.header.shard) else None
        )
        for each in (1, 2, 0):
            x.say(world, make(world, each))
        assert rig.session.exchanged == [], "believed"
        assert world.group is not None
        assert not world.group.open

    return act


def unasked(world: GroupWorld) -> None:
    """Rank 0 tells of an exchange that rank 1 has said nothing in."""
    rig = world.members[0]
    told = x.winners(world, 0)
    rig.send("hub", rig.frame("hub", x.KIND, told.values.tobytes(), shard=0, sequence=0, purpose=1, first_id=0, end_id=32,
                              epoch=1, entry_count=1))  # fmt: skip


def too_far_ahead(world: GroupWorld) -> None:
    rig = world.members[0]
    for n in range(WINDOW):
        x.say(world, x.winners(world, 1, n))
    rig.bend("member", x.KIND, fields(sequence=WINDOW))
    rig.session.exchanges._next[1] = WINDOW - 1  # this rank does not stop itself
    rig.session.exchanges._under_way.pop()
    x.say(world, x.winners(world, 1, WINDOW - 1))


def _masses(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "masses", [5])


def _accept(world: GroupWorld, rank: int) -> Part:
    own = [7, 3, 0] if rank == 1 else [0, 0, 0]
    return x.part(world, rank, "masses, noise and the drafted token", [1 << 50, 0 if rank else 9, *own])


def _token(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "token", [3 if rank == 0 else 0])


def _residual(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "noise and residual masses", [0, 0, 4, 0, 9])


def _score(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "largest score", [1.5])


def _nodes(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "tree nodes", [1.0, 2.0])


def _candidates(world: GroupWorld, rank: int) -> Part:
    first = x.shards(world)[rank].first_id
    return x.part(world, rank, "candidates of the support", [(1.0, first), (2.0, first + 1)] if rank < 2 else [])


def _ties(world: GroupWorld, rank: int) -> Part:
    return x.part(world, rank, "ties", [2])


def every_purpose_has_a_case(world: GroupWorld) -> None:
    """The whole ways above meet every purpose."""
    for act in (winners_equal_the_full_path, q_is_built, chains_equal_the_unsharded_ones):
        act(world)
    met = {frame.header.purpose for frame in world.members[0].taps["member"].seen if frame.header.kind == wire.EXCHANGE}
    assert met >= set(PURPOSES) - set(range(8, 14)), "but lower digits of remainders"


def _case(number: str, title: str, reason: Reason | None, act: Act, **more: Any) -> Case:
    ends = more.pop("ends", {})
    return GroupCase(number=number, spec="7", title=title, reason=reason, act=act, ends=ends, **more)


def _at_rank_0(number: str, title: str, reason: Reason, act: Act, **more: Any) -> Case:
    """Rank 0 refuses what rank 1 says, at the cost of its link and of the epoch."""
    return _case(number, title, reason, act, ends={1: {"hub": reason, "member": R.PEER_LOST}}, **more)


def _at_member(number: str, title: str, reason: Reason, act: Act, **more: Any) -> Case:
    """Rank 1 refuses what rank 0 tells."""
    return _case(number, title, reason, act, ends={1: {"member": reason, "hub": R.PEER_LOST}}, **more)


WHOLE: Final = (
    _case("7.001", "winners over frames equal the full path", None, winners_equal_the_full_path),
    _case("7.002", "winners of eight ranks", None, winners_equal_the_full_path, world={"size": 8, "vocab": 500}),
    _case("7.003", "a NaN is refused by every rank", None, _refused(NAN)),
    _case("7.004", "a logit of +inf is refused by every rank", None, _refused(INF)),
    _case("7.005", "no logit at all is refused by every rank", None, nothing_but_minus_inf),
    _case("7.006", "q built over frames", None, q_is_built, world=WIDE),
    _case("7.007", "chains verified over frames", None, chains_equal_the_unsharded_ones, world=WIDE),
    _case("7.008", "every purpose is met", None, every_purpose_has_a_case, world=WIDE),
    _case("7.009", "nobody is told before all have spoken", None, nothing_before_all),
    _case("7.010", "a rank a window ahead", None, one_rank_ahead),
    _case("7.011", "the leader's link is lost in the middle of an exchange", R.LINK_ERROR, leader_s_link_is_no_rank),
    _case("7.012", "the epoch ends in the middle of an exchange", R.CANCELLED, epoch_ends_in_the_middle),
    _case("7.013", "parts that cross a LEAVE", None, told_after_leaving),
    _case("7.014", "a part of an epoch that is over", R.GENERATION_STALE, said_in_an_epoch_that_is_over),
    _case("7.017", "parts as large as they may be", None, large_parts, world={"vocab": 6144}),
    _case("7.016", "rank 0's own part differs", None, rank_0_differs),
    _case("7.015", "a process out of turn, or wrong by itself", None, own_parts_out_of_turn),
)

HEADERS: Final = (
    _at_rank_0("7.021", "a part of another rank", R.RANK_DISAGREE, _says(moved(shard=2))),
    _at_rank_0("7.022", "a purpose there is not", R.SEMANTIC_MISMATCH, _says(fields(purpose=22))),
    _at_rank_0("7.023", "purpose 0", R.SEMANTIC_MISMATCH, _says(fields(purpose=0))),
    _at_rank_0("7.024", "a purpose of other elements", R.LENGTH_BOUNDS, _says(fields(purpose=2))),
    _at_rank_0("7.025", "no winners", R.LENGTH_BOUNDS, _says(x.rows(0))),
    _at_rank_0("7.026", "34 winners", R.LENGTH_BOUNDS, _says(x.rows(34))),
    _at_rank_0("7.027", "a winner and a byte", R.LENGTH_BOUNDS, _says(resized(1))),
    _at_rank_0("7.028", "more winners than bytes", R.LENGTH_BOUNDS, _says(fields(entry_count=2))),
    _at_rank_0("7.029", "winners altered on the way", R.PAYLOAD_DIGEST, _says(payload_bit(3))),
    _at_rank_0("7.030", "winners of another round, in this one's place", R.PAYLOAD_DIGEST, _says(moved(round=1))),
    _at_rank_0("7.031", "winners of another position, in this one's place", R.PAYLOAD_DIGEST, _says(moved(position=2))),
    _at_rank_0("7.032", "a part of a coming epoch", R.RANK_DISAGREE, _says(fields(epoch=2))),
    _at_rank_0("7.033", "a part that leaves one exchange out", R.RANK_DISAGREE, _says(fields(sequence=1))),
    _at_rank_0("7.034", "the same part again", R.GENERATION_DUPLICATE, _says(lambda frame, _world: [frame, frame])),
    _at_rank_0("7.035", "a rank too far ahead", R.OVERLOAD, too_far_ahead),
    _at_rank_0("7.038", "a digest of nothing", R.RESERVED_BITS, _says(fields(payload_digest=5), lambda w, r: x.part(
        w, r, "tree nodes", []))),
    _at_rank_0("7.039", "a part that claims a megabyte", R.LENGTH_BOUNDS, _says(claimed(1 << 20))),
    _at_rank_0("7.036", "another life of the rank, in an exchange", R.BOOT_NONCE, _says(fields(boot_nonce=1))),
    _at_rank_0("7.037", "another session, in an exchange", R.SESSION_MISMATCH, _says(fields(session=1))),
)

PLACES: Final = (
    _at_rank_0("7.051", "ranges that end before the vocabulary", R.ID_RANGE, _last_says(fields(end_id=63)), world={"size": 2}),
    _at_rank_0("7.041", "winners of another request", R.REQUEST_MISMATCH, _says(fields(request=2))),
    _at_rank_0("7.042", "winners of another generation", R.RANK_DISAGREE, _says(fields(request_generation=1))),
    _at_rank_0("7.043", "winners of another round", R.ROUND_MISMATCH, _says(fields(round=1))),
    _at_rank_0("7.044", "winners of another position", R.CONTEXT_MISMATCH, _says(fields(position=2))),
    _at_rank_0("7.045", "another step of the computation", R.SEMANTIC_MISMATCH, _says(fields(purpose=3), _score)),
    _at_rank_0("7.046", "more rows than the others", R.LENGTH_BOUNDS, _last_says(x.rows(2))),
    _at_rank_0("7.047", "a range that ends beyond the vocabulary", R.ID_RANGE, _says(fields(end_id=65))),
    _at_rank_0("7.048", "a range that ends before it begins", R.ID_RANGE, _says(fields(end_id=31))),
    _at_rank_0("7.049", "ranges that overlap", R.ID_RANGE, _last_says(fields(first_id=0))),
    _at_rank_0("7.050", "ranges that leave tokens out", R.ID_RANGE, _last_says(fields(end_id=63))),
)

VALUES: Final = (
    _at_rank_0("7.061", "a winner of another rank's range", R.ID_RANGE, _says(x.entry(0, token=31))),
    _at_rank_0("7.062", "a winner beyond the vocabulary", R.ID_RANGE, _says(x.entry(0, token=64))),
    _at_rank_0("7.063", "a winner without a token", R.ID_RANGE, _says(x.entry(0, token=-1))),
    _at_rank_0("7.064", "a token beside -inf", R.ID_RANGE, _says(x.entry(0, value=-INF))),
    _at_rank_0("7.065", "a NaN in a maximum", R.NONFINITE, _says(x.word(0, NAN), _score)),
    _at_rank_0("7.066", "a NaN among the nodes", R.NONFINITE, _says(x.word(1, NAN), _nodes)),
    _at_rank_0("7.067", "a negative node", R.NEGATIVE, _says(x.word(1, -1.0), _nodes)),
    _at_rank_0("7.068", "a shard of more than all mass", R.MASS, _says(x.word(0, (1 << 24) + 1), _masses)),
    _at_rank_0("7.069", "negative ties", R.NEGATIVE, _says(x.word(0, -1), _ties)),
    _at_rank_0("7.070", "more ties than tickets", R.MASS, _says(x.word(0, 1 << 40), _ties)),
    _at_rank_0("7.071", "target weights beyond any", R.MASS, _says(x.word(0, 1 << 60), _accept)),
    _at_rank_0("7.072", "candidates out of order", R.ID_ORDER,
               _says(both(x.entry(0, token=34), x.entry(1, token=33)), _candidates)),
    _at_rank_0("7.073", "a candidate twice", R.ID_DUPLICATE, _says(x.entry(1, token=32), _candidates)),
    _at_rank_0("7.074", "a candidate of another rank", R.ID_RANGE, _says(x.entry(0, token=3), _candidates)),
    _at_rank_0("7.075", "a candidate without end", R.NONFINITE, _says(x.entry(0, value=INF), _candidates)),
    _at_rank_0("7.076", "a negative candidate", R.NEGATIVE, _says(x.entry(0, value=-1.0), _candidates)),
    _at_rank_0("7.077", "noise that is not rank 0's", R.RANK_DISAGREE, _says(x.word(1, 1), _accept)),
    _at_rank_0("7.078", "a count beyond 2^24", R.MASS, _says(x.word(3, (1 << 24) + 1), _accept)),
    _at_rank_0("7.079", "a reason there is not, in an exchange", R.RESERVED_BITS, _says(x.word(4, 999), _accept)),
    _at_rank_0("7.080", "two ranks that hold one token", R.RANK_DISAGREE,
               _last_says(x.word(2, 5), lambda w, r: x.part(w, r, "masses, noise and the drafted token",
                                                            [9, 0, int(r == 0), int(r == 0), 0]))),
    _at_rank_0("7.081", "a token of another rank's range told", R.ID_RANGE, _says(x.word(0, 3), _token)),
    _at_rank_0("7.082", "two ranks that tell a token", R.RANK_DISAGREE, _last_says(x.word(0, 40), _token)),
    _at_rank_0("7.083", "residual noise that is not rank 0's", R.RANK_DISAGREE, _says(x.word(0, 1), _residual)),
    _at_rank_0("7.084", "residual counts beyond 2^24", R.MASS, _says(x.word(2, (1 << 24) + 1), _residual)),
    _at_rank_0("7.085", "a residual for a reason there is not", R.RESERVED_BITS, _says(x.word(1, 999), _residual)),
)  # fmt: skip

TOLD: Final = (
    _at_member("7.091", "told of an exchange that it has no part in", R.RANK_DISAGREE, unasked),
    _at_member("7.092", "told winners altered on the way", R.PAYLOAD_DIGEST, _told(payload_bit(3), rank=0)),
    _at_member("7.093", "told its own part", R.RANK_DISAGREE, _told(fields(shard=1), rank=2)),
    _at_member("7.094", "told a part of a rank there is not", R.RANK_DISAGREE, _told(fields(shard=3), rank=2)),
    _at_member("7.095", "told one rank's part twice", R.GENERATION_DUPLICATE, _told(fields(shard=0), rank=2)),
    _at_member("7.096", "told of another request", R.REQUEST_MISMATCH, _told(fields(request=2))),
    _at_member("7.097", "told of another round", R.ROUND_MISMATCH, _told(fields(round=1))),
    _at_member("7.098", "told of another position", R.CONTEXT_MISMATCH, _told(fields(position=2))),
    _at_member("7.099", "told of another generation", R.RANK_DISAGREE, _told(fields(request_generation=3))),
    _at_member("7.100", "told of another step", R.SEMANTIC_MISMATCH, _told(fields(purpose=3), _score)),
    _at_member("7.101", "told a winner of another range", R.ID_RANGE, _told(x.entry(0, token=40), rank=0)),
    _at_member("7.102", "told ranges that do not tile", R.ID_RANGE, _told(both(fields(end_id=31), x.entry(0, token=2)), rank=0)),
    _at_member("7.103", "told too few rows", R.LENGTH_BOUNDS,
               _told(x.rows(1), lambda world, rank: x.winners(world, rank, 0, 2), rank=2)),
    _at_member("7.104", "told in a coming epoch", R.RANK_DISAGREE, _told(fields(epoch=2))),
    _at_member("7.105", "told in an epoch that never was", R.GENERATION_STALE, _told(fields(epoch=0))),
    _at_member("7.106", "told a purpose there is not", R.SEMANTIC_MISMATCH, _told(fields(purpose=99))),
    _at_member("7.107", "told more than a part may say", R.LENGTH_BOUNDS, _told(x.rows(34), rank=0)),
    _at_member("7.109", "told a part that claims a megabyte", R.LENGTH_BOUNDS, _told(claimed(1 << 20), rank=0)),
    _at_member("7.108", "told noise that is not rank 0's", R.RANK_DISAGREE, _told(x.word(1, 1), _accept, rank=2)),
)  # fmt: skip

CASES: Final[tuple[Case, ...]] = (*WHOLE, *HEADERS, *PLACES, *VALUES, *TOLD)
