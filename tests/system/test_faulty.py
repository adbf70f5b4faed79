"""The fault injector: what it does to frames, and that each fault, at each frame of a proposal, has its one outcome."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as hs
from system_rig import PROMPT, MakeRig, Rig, consume, expected, go_on_alone

from pp1q_transport import wire
from pp1q_transport.client import EngineConfig
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.links.faulty import FaultInjector, FaultKind, FaultRates
from pp1q_transport.session.outbox import NO_KEY, Outbox
from pp1q_transport.wire import Header

pytestmark = pytest.mark.timeout(60)

DEPTH = 3
LATE_NS = 1_000
BUDGET_US = 40_000


# ---- frames in, frames out --------------------------------------------------------------------------------------------


def header_of(kind: int, **fields: int) -> Header:
    header = Header()
    header.clear()
    header.kind = kind
    header.session = 5
    for name, value in fields.items():
        setattr(header, name, value)
    return header


def feed(outbox: Outbox, slot: int, generation: int, fill: int = 0, row_bytes: int = 64) -> list[bytes]:
    """One proposal as a leader queues it; its frames as they would travel."""
    place = {"slot": slot, "slot_generation": generation, "depth": DEPTH}
    frames = []
    for row in range(DEPTH):
        payload = bytes([fill]) * row_bytes
        header = header_of(wire.REPLY, position=row, payload_length=row_bytes, entry_count=1, **place)
        frames.append(encoded(header) + payload)
        outbox.frame(header, payload, 0, row_bytes, slot)
    header = header_of(wire.COMPLETION, **place)
    frames.append(encoded(header))
    outbox.frame(header, None, 0, 0, NO_KEY)
    return frames


def encoded(header: Header) -> bytes:
    frame = bytearray(wire.HEADER_BYTES)
    header.encode(frame, 0)
    return bytes(frame)


def drain(outbox: Outbox) -> bytes:
    """Everything queued, as a link would send it."""
    sent = b""
    while (piece := outbox.front()) is not None:
        head = bytes(memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length])
        sent += head + bytes(memoryview(piece.memory)[piece.offset : piece.offset + piece.length])
        outbox.sent(piece.head_length + piece.length)
    return sent


def injector_of(rates: FaultRates, seed: int = 1) -> tuple[FaultInjector, Outbox]:
    source = Outbox()
    return FaultInjector(rates, seed, LATE_NS).attach(source), source


def bits(one: bytes, other: bytes) -> list[int]:
    """Where two byte strings of one length differ, in bits."""
    changed = [(at, a ^ b) for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return [8 * at + bit for at, byte in changed for bit in range(8) if byte >> bit & 1]


@pytest.mark.parametrize("row_bytes", (64, 8192), ids=("copied", "in place"))
def test_each_fault_changes_one_frame_and_is_recorded(row_bytes: int) -> None:
    for seed in range(60):
        injector, source = injector_of(FaultRates(corrupt=1.0), seed)
        frames = feed(source, 2, 7, row_bytes=row_bytes)
        assert injector.pump(0) is None
        (fault,) = injector.injected
        assert (fault.session, fault.slot, fault.slot_generation) == (5, 2, 7)
        start = sum(map(len, frames[: fault.frame]))
        sent, whole = drain(injector.outbox), b"".join(frames)
        (bit,) = bits(sent, whole)
        header_ends = start + wire.HEADER_BYTES
        if fault.kind is FaultKind.CORRUPT_HEADER:
            assert start <= bit // 8 < header_ends
        else:
            assert fault.kind is FaultKind.CORRUPT_PAYLOAD
            assert header_ends <= bit // 8 < start + len(frames[fault.frame])


def test_a_drop_removes_one_frame() -> None:
    for seed in range(20):
        injector, source = injector_of(FaultRates(drop=1.0), seed)
        frames = feed(source, 0, 1)
        injector.pump(0)
        (fault,) = injector.injected
        assert fault.kind is FaultKind.DROP
        del frames[fault.frame]
        assert drain(injector.outbox) == b"".join(frames)


def test_a_late_proposal_keeps_its_order_and_holds_up_nobody() -> None:
    for seed in range(20):
        injector, source = injector_of(FaultRates(late=1.0), seed)
        frames = feed(source, 0, 1)
        status = header_of(wire.STATUS, status=3, subject=0)
        source.frame(status, None, 0, 0, NO_KEY)
        assert injector.pump(100) == 100 + LATE_NS
        (fault,) = injector.injected
        assert fault.kind is FaultKind.LATE
        assert drain(injector.outbox) == b"".join(frames[: fault.frame]) + encoded(status)
        assert injector.pump(100 + LATE_NS - 1) == 100 + LATE_NS
        assert drain(injector.outbox) == b""
        assert injector.pump(100 + LATE_NS) is None
        assert drain(injector.outbox) == b"".join(frames[fault.frame :])


def test_a_proposal_that_trickles_in_late_stays_in_order() -> None:
    """Rows are put one by one: those that follow a held one wait no longer than it."""
    injector, source = injector_of(FaultRates(late=1.0), 3)
    whole = Outbox()
    frames = feed(whole, 0, 1)
    feed(source, 0, 1)
    pieces = [source.pieces.pop(0) for _ in range(len(source.pieces))]
    for now_ns, piece in enumerate(pieces):
        source.pieces.append(piece)
        injector.pump(now_ns * 10)
    injector.pump(10**9)
    assert drain(injector.outbox) == b"".join(frames)


@settings(max_examples=40, deadline=None)
@given(seed=hs.integers(0, 1 << 64), fills=hs.lists(hs.integers(0, 255), min_size=30, max_size=30))
def test_the_plan_is_a_function_of_the_seed_alone(seed: int, fills: list[int]) -> None:
    """Other tokens, other q, other row sizes: the same faults at the same frames, down to which frame and kind."""
    rates = FaultRates(corrupt=0.3, late=0.3, drop=0.3)
    plans = []
    for payloads, row_bytes in ((fills, 64), ([0] * 30, 64), ([0] * 30, 8 * 13)):
        injector, source = injector_of(rates, seed)
        for generation, fill in enumerate(payloads, 1):
            feed(source, 0, generation, fill, row_bytes)
            injector.pump(generation)
            drain(injector.outbox)
        plans.append(injector.injected)
    assert plans[0] == plans[1] == plans[2]


def test_rates_are_what_they_say() -> None:
    rates = FaultRates(corrupt=0.2, late=0.1, drop=0.05)
    injector, source = injector_of(rates, 9)
    for generation in range(1, 4001):
        feed(source, 0, generation)
        injector.pump(0)
        drain(injector.outbox)
    met = Counter(fault.kind for fault in injector.injected)
    corrupt = met[FaultKind.CORRUPT_HEADER] + met[FaultKind.CORRUPT_PAYLOAD]
    for count, rate in ((corrupt, 0.2), (met[FaultKind.LATE], 0.1), (met[FaultKind.DROP], 0.05)):
        assert abs(count - 4000 * rate) < 6 * (4000 * rate * (1 - rate)) ** 0.5
    assert met[FaultKind.CORRUPT_HEADER] > 100
    assert len({fault.slot_generation for fault in injector.injected}) == len(injector.injected), "one a proposal"
    frames = {fault.frame for fault in injector.injected if fault.kind is FaultKind.DROP}
    assert frames == set(range(DEPTH + 1)), "every frame is in danger"


def test_a_new_session_starts_with_nothing_held() -> None:
    """What was late for a link that is gone must not reach the next one."""
    injector, source = injector_of(FaultRates(late=1.0))
    feed(source, 0, 1)
    injector.pump(0)
    drain(injector.outbox)
    fresh = Outbox()
    injector.attach(fresh)
    assert injector.pump(10**12) is None
    assert drain(injector.outbox) == b""
    assert len(injector.injected) == 1, "the account goes on"


# ---- every fault at every frame, over the real transport --------------------------------------------------------------


class Scripted(FaultInjector):
    """One fault in every second proposal, of one kind at one frame."""

    def __init__(self, kind: FaultKind, frame: int) -> None:
        super().__init__(FaultRates(), 1, BUDGET_US * 2_000)
        self._script = itertools.cycle(((kind, frame), (None, 0)))

    def _make_plan(self, frames: int) -> Any:
        plan = super()._make_plan(frames)
        plan.kind, plan.frame = next(self._script)
        return plan


OUTCOMES: dict[FaultKind, Callable[[int], set[Reason]]] = {
    FaultKind.CORRUPT_PAYLOAD: lambda _frame: {Reason.PAYLOAD_DIGEST},
    FaultKind.CORRUPT_HEADER: lambda _frame: {Reason.LINK_ERROR},
    FaultKind.LATE: lambda _frame: {Reason.TIMEOUT},
    # Without its COMPLETION nothing says that a proposal is over; without a row the COMPLETION says so.
    FaultKind.DROP: lambda frame: {Reason.TIMEOUT} if frame == DEPTH else {Reason.INCOMPLETE},
}
CASES = [(kind, frame) for kind in FaultKind for frame in range(DEPTH + 1) if (kind, frame) != (FaultKind.CORRUPT_PAYLOAD, DEPTH)]


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
@pytest.mark.parametrize(("kind", "frame"), CASES, ids=[f"{kind.value}-{frame}" for kind, frame in CASES])
def test_every_fault_costs_what_it_must_and_the_next_proposal_is_ready(
    make_rig: MakeRig, kind: FaultKind, frame: int, support: int | None
) -> None:
    injector = Scripted(kind, frame)

    def faulty(config: EngineConfig) -> EngineConfig:
        return replace(config, wrap_outbox=injector.attach)

    rig = make_rig(change_leader=faulty, depth=DEPTH).connect()
    request = rig.receiver.open_request(1, PROMPT, seed=31)
    journal: list[tuple[int, int, bool]] = []
    outcomes: dict[tuple[int, int, int], Reason | None] = {}
    for _ in range(4):
        rig.connect()
        ticket = rig.receiver.enqueue(request, support=support, budget_us=BUDGET_US)
        reason = settle(rig, ticket, journal)
        outcomes[ticket.key] = reason
        rig.until(lambda: rig.leader.up == rig.receiver.up)
    faults = {(one.session, one.slot, one.slot_generation) for one in injector.injected}
    assert {key for key, reason in outcomes.items() if reason is not None} == faults
    assert len(faults) == 2
    assert {outcomes[key] for key in faults} <= OUTCOMES[kind](frame)
    assert request.tokens.tolist()[2:] == expected(rig.models, 31, journal, depth=DEPTH, support=support)
    assert rig.receiver.counters.get("discarded") == 2
    lost_links = 2 if kind is FaultKind.CORRUPT_HEADER else 0
    rig.until(lambda: rig.receiver.counters.get("sessions") == lost_links + 1)
    assert rig.all_free()
    if kind is FaultKind.LATE:
        late_frames = 2 * (DEPTH + 1 - frame)
        rig.until(lambda: rig.receiver.counters.of(Reason.GENERATION_STALE) >= late_frames)


def settle(rig: Rig, ticket: Any, journal: list[tuple[int, int, bool]]) -> Reason | None:
    """One round to its end with the leader drafting; the reason of a discard."""
    request = rig.receiver.requests.requests[1]
    done = False
    while not ticket.settled:
        if not done:
            step = rig.leader.next_step(0)
            if step is not None:
                rig.draft(step)
                done = True
        rig.serve()
    try:
        proposal = ticket.wait()
    except ProposalDiscarded as discarded:
        go_on_alone(rig.models, rig.receiver, request, ticket.round)
        journal.append((ticket.round, request.generation, False))
        return discarded.reason
    with proposal:
        assert np.isclose(proposal.q(0).values.sum(), 1.0)
        journal.append((proposal.round, proposal.generation, True))
        consume(rig.models, rig.receiver, request, proposal)
    return None
