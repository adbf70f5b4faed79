"""The machine of exchanges alone: any order in which ranks speak gives every rank the same parts, and nothing else counts."""

from __future__ import annotations

import inspect
import itertools
import random
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport import sharding
from pp1q_transport.counters import Counters
from pp1q_transport.errors import LocalMisuse, PeerFault, Reason
from pp1q_transport.session.exchange_frames import send_part
from pp1q_transport.session.exchange_run import ExchangeRun, Place
from pp1q_transport.session.exchanges import WINDOW, Exchanges
from pp1q_transport.session.group_exchanges import GroupExchanges
from pp1q_transport.session.parts import (
    BY_WHAT,
    PART_BYTES_MOST,
    PURPOSES,
    Part,
    Purpose,
    answer_of,
    judge,
    purpose_of,
    values_of,
)
from pp1q_transport.sharding import Exchange, Op, build, verifying
from pp1q_transport.sharding.exchange import ENTRY
from pp1q_transport.wire import U32_MAX, Header

VOCAB = 96


def part(rank: int, sequence: int, size: int = 3, value: float = 1.0, purpose: str = "winners") -> Part:
    edges = [VOCAB * r // size // 32 * 32 for r in range(size)] + [VOCAB]
    first, end = edges[rank], edges[rank + 1]
    row = (value, first) if end > first else (-np.inf, -1)
    return Part(rank, sequence, 7, 1, 2, 5, BY_WHAT[purpose].code, first, end, np.array([row], ENTRY))


class Group:
    """Every rank's machine, and what rank 0 tells."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.machines = [Exchanges(size, rank, VOCAB) for rank in range(size)]
        self.complete: list[list[list[Part]]] = [[] for _ in range(size)]
        for machine in self.machines:
            machine.begin()

    def say(self, said: Part) -> None:
        zero = self.machines[0]
        if said.rank == 0:
            whole = zero.own(said)
        else:
            assert self.machines[said.rank].own(said) == []
            whole = zero.heard(said)
        if not whole:
            return
        self.complete[0].append(whole)
        for rank in range(1, self.size):
            for told in whole:
                if told.rank != rank:
                    parts = self.machines[rank].heard(told)
                    if parts:
                        self.complete[rank].append(parts)


@settings(max_examples=150, deadline=None)
@given(st.integers(2, 8), st.integers(1, 20), st.integers(0, 2**32))
def test_any_order_of_speaking_gives_all_ranks_the_same(size: int, rounds: int, seed: int) -> None:
    group, noise = Group(size), random.Random(seed)
    said = [0] * size
    while min(said) < rounds:
        rank = noise.choice([r for r in range(size) if said[r] < rounds and said[r] - min(said) < WINDOW])
        group.say(part(rank, said[rank], size, float(said[rank] + rank)))
        said[rank] += 1
        assert [len(box) for box in group.complete] == [min(said)] * size, "complete exactly when all have spoken"
    for box in group.complete:
        assert [[p.rank for p in parts] for parts in box] == [list(range(size))] * rounds
        assert [[p.sequence for p in parts] for parts in box] == [[n] * size for n in range(rounds)]
    spoken = [[[p.values.tobytes() for p in parts] for parts in box] for box in group.complete]
    assert all(box == spoken[0] for box in spoken)


def _other(said: Part, name: str, noise: random.Random) -> Part:
    changed = {
        "rank": lambda: (said.rank + 1) % 3,
        "sequence": lambda: said.sequence + noise.choice((-1, 1, 3, 1 << 31)),
        "request": lambda: said.request ^ (1 << noise.randrange(64)),
        "generation": lambda: said.generation ^ (1 << noise.randrange(32)),
        "round": lambda: said.round ^ (1 << noise.randrange(32)),
        "position": lambda: said.position ^ (1 << noise.randrange(32)),
        "purpose": lambda: 16,
        "first_id": lambda: said.first_id + 1,
        "end_id": lambda: noise.choice((said.end_id - 1, said.first_id, VOCAB + 1)),
    }
    return replace(said, **{name: changed[name]()})


FIELDS = ("rank", "sequence", "request", "generation", "round", "position", "purpose", "first_id", "end_id")


@settings(max_examples=200, deadline=None)
@given(st.sampled_from(FIELDS), st.integers(0, 2**32), st.permutations(range(3)))
def test_one_wrong_field_and_nothing_is_complete_nor_changed(name: str, seed: int, order: list[int]) -> None:
    """Whoever says it and whenever: it is refused at rank 0, and then the right part does what it would have done."""
    group, noise = Group(3), random.Random(seed)
    *early, last = order
    for rank in early:
        group.say(part(rank, 0))
    zero = group.machines[0]
    if last == 0:
        return  # rank 0's own word is its own
    with pytest.raises(PeerFault):
        zero.heard(_other(part(last, 0), name, noise))
    assert zero.completed == 0
    assert zero.said(last) == 0
    group.say(part(last, 0))
    assert [len(box) for box in group.complete] == [1] * 3


def test_closed_until_an_epoch_is_open_and_anew_with_each() -> None:
    machine = Exchanges(3, 0, VOCAB)
    with pytest.raises(PeerFault) as caught:
        machine.heard(part(1, 0))
    assert caught.value.reason is Reason.SLOT_STATE
    with pytest.raises(LocalMisuse):
        machine.own(part(0, 0))
    for _ in range(2):
        machine.begin()
        for rank in range(1, 3):
            assert machine.heard(part(rank, 0)) == []
        assert [p.rank for p in machine.own(part(0, 0))] == [0, 1, 2]
        assert (machine.completed, machine.said(1)) == (1, 1)
        machine.end()
        assert (machine.completed, machine.said(1), machine.open) == (0, 0, False)


def test_what_is_under_way_is_bounded() -> None:
    machine = Exchanges(2, 0, 64)
    machine.begin()
    said = Part(1, 0, 1, 0, 0, 0, 1, 32, 64, np.array([(1.0, 40)], ENTRY))
    for n in range(WINDOW):
        machine.heard(replace(said, sequence=n))
    with pytest.raises(PeerFault) as caught:
        machine.heard(replace(said, sequence=WINDOW))
    assert caught.value.reason is Reason.OVERLOAD
    own = Part(0, 0, 1, 0, 0, 0, 1, 0, 32, np.array([(1.0, 4)], ENTRY))
    assert len(machine.own(own)) == 2
    machine.heard(replace(said, sequence=WINDOW))


@pytest.mark.parametrize("rank", (0, 1))
def test_an_epoch_has_as_many_exchanges_as_a_frame_can_number(rank: int) -> None:
    machine = Exchanges(2, rank, VOCAB)
    machine.begin()
    machine.completed = U32_MAX
    machine._next = [U32_MAX] * 2
    machine.own(part(rank, U32_MAX, 2))
    assert len(machine.heard(part(1 - rank, U32_MAX, 2))) == 2
    with pytest.raises(PeerFault) as caught:
        machine.own(part(rank, U32_MAX + 1, 2))
    assert caught.value.reason is Reason.GENERATION_EXHAUSTED
    machine.begin()
    assert machine.own(part(rank, 0, 2)) == []


def test_a_member_hears_nothing_of_what_it_has_no_part_in() -> None:
    machine = Exchanges(3, 1, VOCAB)
    machine.begin()
    for rank in (0, 2):
        with pytest.raises(PeerFault, match="without our part"):
            machine.heard(part(rank, 0))
    machine.own(part(1, 0))
    with pytest.raises(PeerFault, match="at rank 1"):
        machine.heard(part(1, 1))
    assert machine.heard(part(2, 0)) == []
    assert [p.rank for p in machine.heard(part(0, 0))] == [0, 1, 2]


# -- bodies ------------------------------------------------------------------------------------------------------------


def test_no_purpose_exceeds_the_bytes_of_a_part_and_codes_are_dense() -> None:
    assert list(PURPOSES) == list(range(1, 20))
    assert len(BY_WHAT) == len(PURPOSES)
    for purpose in PURPOSES.values():
        assert purpose.most * purpose.dtype.itemsize <= PART_BYTES_MOST
        assert purpose.op is not Op.SUM or purpose.dtype.kind in "iu", "no order of additions may matter"
    assert ENTRY.itemsize == 12


def test_every_step_of_sharding_has_a_purpose() -> None:
    """A step that is added or renamed there needs its place on the wire."""
    called = re.compile(r"(?:all_|Exchange\(Op\.)(gather|sum|max)(?:\(|,)\s*f?\"([^\"]+)\"", re.IGNORECASE)
    steps = set()
    for module in (build, verifying):
        for op, what in called.findall(inspect.getsource(module)):
            names = [what.replace("{shift}", str(shift)) for shift in range(56, -8, -8)] if "{shift}" in what else [what]
            steps |= {(Op(op.lower()), name) for name in names}
    assert steps == {(purpose.op, purpose.what) for purpose in PURPOSES.values()}


@pytest.mark.parametrize("known", PURPOSES.values(), ids=lambda p: p.what)
def test_bytes_of_another_length_are_no_body(known: Purpose) -> None:
    size = known.dtype.itemsize
    assert len(values_of(known.code, bytes(known.most * size), known.most)) == known.most
    for entries, length in ((known.most + 1, (known.most + 1) * size), (known.most, known.most * size - 1),
                            (known.least - 1, max(0, known.least - 1) * size)):  # fmt: skip
        with pytest.raises(PeerFault) as caught:
            values_of(known.code, bytes(length), entries)
        assert caught.value.reason is Reason.LENGTH_BOUNDS


@pytest.mark.parametrize(
    "exchange",
    (
        Exchange(Op.GATHER, "something new", np.zeros(1)),
        Exchange(Op.SUM, "winners", np.zeros(1, ENTRY)),
        Exchange(Op.GATHER, "winners", np.zeros(1)),
        Exchange(Op.GATHER, "winners", np.zeros(34, ENTRY)),
        Exchange(Op.GATHER, "masses", np.zeros((1, 1), np.uint64)),
        Exchange(Op.SUM, "masses, noise and the drafted token", np.zeros(5, np.uint64)),
    ),
)
def test_a_step_that_no_frame_carries_is_refused_before_it_is_said(exchange: Exchange) -> None:
    with pytest.raises(LocalMisuse):
        purpose_of(exchange)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(sorted(PURPOSES)), st.binary(min_size=0, max_size=16), st.integers(0, 2**32), st.integers(0, 2))
def test_any_bytes_are_judged_by_reasons_alone(code: int, tail: bytes, seed: int, rank: int) -> None:
    """What a peer may send by way of bits meets a reason or is a value of its purpose; nothing else is raised."""
    purpose, noise = PURPOSES[code], random.Random(seed)
    count = noise.randint(purpose.least, min(purpose.most, 40) if purpose.most != purpose.least else purpose.most)
    bits = noise.choice((1, 8, 24, 64))
    raw = b"".join(noise.getrandbits(bits).to_bytes(8, "little") + tail[:4].ljust(4, b"\0") for _ in range(count))
    payload = raw[: count * purpose.dtype.itemsize]
    said = Part(rank, 0, 1, 0, 0, 0, code, 32 * rank, 32 * rank + 32, values_of(code, payload, count))
    try:
        judge(said, VOCAB)
    except PeerFault:
        return
    answer = answer_of([said])
    assert len(answer) == 1
    assert not answer[0].dtype.isnative or answer[0].dtype == purpose.dtype


# -- one rank's side ---------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(st.integers(2, 8), st.integers(0, 2**32), st.sampled_from((np.float16, np.float32, np.float64)))
def test_runs_over_the_machines_equal_the_emulator(size: int, seed: int, dtype: type) -> None:
    noise = np.random.default_rng(seed)
    split = sharding.shards_of([VOCAB * r // size // 32 * 32 for r in range(size)] + [VOCAB])
    logits = noise.integers(-2, 2, (3, VOCAB)).astype(dtype)
    logits[noise.random(logits.shape) < 0.5] = -np.inf
    logits[:, 0] = -1

    def steps(shard: sharding.Shard) -> sharding.Steps[list[int]]:
        return sharding.greedy_tokens_sharded(shard, logits[:, shard.first_id : shard.end_id])

    want = sharding.emulate([steps(shard) for shard in split])
    group = Group(size)
    runs = [ExchangeRun(steps(s), s.rank, Place(1, 0, 0, 0), s.first_id, s.end_id) for s in split]
    for run in runs:
        with pytest.raises(LocalMisuse):
            assert run.result is None
        first = run.begin(0)
        assert first is not None
        group.say(first)
    for rank, run in enumerate(runs):
        assert run.resume(group.complete[rank][0], 1) is None
    assert [run.result for run in runs] == want
    assert len(list(itertools.chain(*group.complete))) == size


@pytest.mark.parametrize("code", (0, max(PURPOSES) + 1, U32_MAX))
def test_no_bytes_are_a_body_of_no_purpose(code: int) -> None:
    with pytest.raises(PeerFault) as caught:
        values_of(code, b"", 0)
    assert caught.value.reason is Reason.SEMANTIC_MISMATCH


def test_nothing_is_exchanged_before_any_epoch_was_open() -> None:
    link: Any = SimpleNamespace()
    group: Any = SimpleNamespace(counters=Counters(), epoch=0, links={1: link})
    exchanges = GroupExchanges(group, 2)
    with pytest.raises(LocalMisuse, match="before every rank is up"):
        exchanges.own(part(0, 0, 2))
    with pytest.raises(PeerFault) as caught:
        exchanges.heard(1, link, Header(), part(1, 0, 2))
    assert caught.value.reason is Reason.SLOT_STATE
    assert (exchanges.done, exchanges.said(0), exchanges.said(1)) == ([], 0, 0)


def test_a_broken_link_is_sent_nothing_and_keeps_its_reason() -> None:
    def outbox(*_: object) -> None:
        raise PeerFault(Reason.OVERLOAD, "full")

    session: Any = SimpleNamespace(broken=0, terms=SimpleNamespace(leader_nonce=1), blank=lambda _kind: Header(), outbox=None)
    session.outbox = SimpleNamespace(frame=outbox)
    send_part(session, 1, part(1, 0))
    assert session.broken == Reason.OVERLOAD.code
    session.broken = Reason.TIMEOUT.code
    send_part(session, 1, part(1, 1))
    assert session.broken == Reason.TIMEOUT.code
