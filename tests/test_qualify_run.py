"""The link benchmark's parts: plans and their bounds, the stages both ends walk, rows and predrawn tokens, and whole runs."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest

from pp1q_transport import dyadic, rng
from pp1q_transport.client import EngineConfig, Leader, Receiver, Role, make_hello, new_boot_nonce, open_leader, open_receiver
from pp1q_transport.errors import ConfigError, PeerFault, Reason
from pp1q_transport.qualify import messages
from pp1q_transport.qualify.answering import Answerer
from pp1q_transport.qualify.leading import LeaderRun
from pp1q_transport.qualify.measuring import ReceiverRun
from pp1q_transport.qualify.plan import (
    IDENTITIES,
    PROMPT,
    Plan,
    StageKind,
    first_row,
    floor_plans,
    stage_requests,
    stage_steps,
    stages,
    transport_stage,
)  # fmt: skip
from pp1q_transport.qualify.source import Source, make_row, row_digests
from pp1q_transport.qualify.stats import BaselineRss, Report

SMALL = {"vocab": 512, "rounds": 7, "warmup": 2, "requests": 2, "depth": 3, "idle": "block", "floors": False}

pytestmark = pytest.mark.timeout(60)


def small(**changes: Any) -> Plan:
    return Plan(**{**SMALL, **changes})


def quiet(what: str, number: int, total: int) -> None:
    pass


# ---- plans ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value"),
    (
        ("support", 0), ("support", 65537), ("requests", 0), ("requests", 513), ("depth", 0), ("depth", 33), ("rounds", 0),
        ("rounds", 100_001), ("warmup", -1), ("warmup", 10_001), ("vocab", 1), ("vocab", (1 << 24) + 1), ("seed", -1),
        ("seed", 1 << 64), ("rounds", True), ("rounds", 5.0), ("rounds", "5"), ("rounds", None), ("representation", "both"),
        ("representation", 1), ("idle", "sleep"), ("floors", 1), ("floors", "yes"),
    ),
)  # fmt: skip
def test_a_plan_refuses_what_is_out_of_bounds_or_of_another_type(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name} must be"):
        small(**{name: value})


def test_a_plan_refuses_a_support_beyond_the_vocabulary_and_batches_that_no_floor_could_carry() -> None:
    with pytest.raises(ConfigError, match="support must be at most the vocabulary of 16"):
        small(vocab=16, support=17)
    with pytest.raises(ConfigError, match="requests: a batch of"):
        Plan(vocab=1 << 24, requests=8, depth=8)


def test_a_plan_travels_whole_and_a_map_with_other_keys_is_refused() -> None:
    plan = small(representation="sparse", support=9, seed=(1 << 64) - 1)
    assert Plan.from_map(plan.to_map()) == plan
    for body in (None, [], 3):
        with pytest.raises(ConfigError, match="must be a map"):
            Plan.from_map(body)
    with pytest.raises(ConfigError, match="'extra' is unknown"):
        Plan.from_map({**plan.to_map(), "extra": 1})
    with pytest.raises(ConfigError, match="'depth' is missing"):
        Plan.from_map({name: value for name, value in plan.to_map().items() if name != "depth"})


def test_sizes_are_those_of_the_specification() -> None:
    plan = Plan()
    assert (plan.request_bytes, plan.batch_bytes, plan.slots) == (2_585_600, 10_342_400, 8)
    assert Plan(representation="sparse").request_bytes == 1280


# ---- stages ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", (1, 4, 5, 7, 500))
def test_every_measured_kind_gets_all_its_rounds_and_takes_turns(rounds: int) -> None:
    plan = small(rounds=rounds, floors=True)
    measured = [stage for stage in stages(plan) if stage.measured]
    for kind in (StageKind.LATENCY, StageKind.GOODPUT, StageKind.SOCKET_RTT, StageKind.SOCKET_GBPS, StageKind.ZMQ_GBPS):
        assert sum(stage.count for stage in measured if stage.kind is kind) == rounds
    kinds = [stage.kind for stage in measured]
    turn = len(kinds) // min(5, rounds)
    assert kinds == kinds[:turn] * (len(kinds) // turn)


def test_without_floors_only_the_transport_is_measured() -> None:
    assert all(transport_stage(stage) for stage in stages(small()))


def test_request_ids_and_seeds_never_repeat_and_rounds_add_up() -> None:
    plan = small(rounds=23)
    seen: dict[int, int] = {}
    for stage in filter(transport_stage, stages(plan)):
        rounds = 0
        for _, request, seed, count in stage_requests(plan, stage):
            assert request not in seen
            seen[request] = seed
            rounds += count
        each = plan.requests if stage.kind is StageKind.GOODPUT else 1
        assert rounds * 1 == (stage.warmup + stage.count) * each == stage_steps(plan, stage)[1]
    assert len(set(seen.values())) == len(seen)


def test_rows_go_round_all_of_the_source() -> None:
    plan = small()
    assert {first_row(plan, 0, round_) for round_ in range(plan.slots)} == {plan.depth * n for n in range(plan.slots)}
    assert len({first_row(plan, index, 5) for index in range(plan.slots)}) == plan.slots


def test_floors_carry_the_sizes_of_the_transport() -> None:
    plan = Plan()
    for stage in stages(plan):
        if stage.kind is StageKind.SOCKET_GBPS:
            assert {(test.size, test.window) for test in floor_plans(plan, stage)} == {(10_342_400, 2)}
        if stage.kind is StageKind.ZMQ_RTT:
            assert {(test.size, test.request_bytes) for test in floor_plans(plan, stage)} == {(2_585_600 + 6 * 128, 128)}


# ---- rows and tokens ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("representation", ("dense", "sparse"))
def test_source_rows_are_real_q_and_the_predrawn_tokens_are_those_of_the_owned_rng(representation: str) -> None:
    plan = small(representation=representation, support=8)
    source = Source(plan)
    digests = row_digests(plan)
    counts = []
    for index in range(plan.slots * plan.depth):
        row = make_row(plan, index)
        at, length = source.offsets[index], source.lengths[index]
        assert bytes(source.memory[at : at + length]) == row.payload.tobytes()
        assert digests[index][0] == length
        q = row.payload[: 4 * row.entries].view(np.float32)
        counts.append(dyadic.to_counts(q))
        assert counts[-1].sum() == dyadic.MASS
    for stage in filter(transport_stage, stages(plan)):
        for index, number, seed, rounds in stage_requests(plan, stage):
            assert source.indexes[number] == index
            assert source.starts[number + 1] - source.starts[number] == rounds * plan.depth
            for round_ in range(rounds):
                for position in range(plan.depth):
                    row = first_row(plan, index, round_) + position
                    absolute = len(PROMPT) + round_ * (plan.depth + 1) + position
                    u24 = rng.draw24(seed, rng.Domain.PROPOSAL, 0, round_, absolute)
                    at = dyadic.draw(counts[row], u24)
                    ids = make_row(plan, row).ids
                    token = at if ids is None else int(ids[at])
                    assert source.tokens[source.starts[number] + round_ * plan.depth + position] == token
                    assert source.draw_all(row - position, seed, 0, round_, absolute - position)[position] == token


def test_rows_differ_from_one_another_and_with_the_seed() -> None:
    plan = small()
    assert len(set(row_digests(plan))) == plan.slots * plan.depth
    assert not set(row_digests(plan)) & set(row_digests(small(seed=2)))


# ---- messages -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("body", (None, {}, {"begin": 1, "cpu": 0}, {"begin": True}, {"begin": True, "cpu": 0, "more": 1}))
def test_messages_of_another_shape_are_malformed(body: object) -> None:
    with pytest.raises(PeerFault, match="malformed: begin") as caught:
        messages.checked(body, messages.BEGIN, "begin")
    assert caught.value.reason is Reason.MALFORMED


def test_an_error_of_the_other_end_is_quoted_on_one_line() -> None:
    with pytest.raises(PeerFault, match="the other end says: no room"):
        messages.checked({"error": "no room"}, messages.BEGIN, "begin")
    with pytest.raises(PeerFault) as caught:
        messages.checked({"error": "two\nlines\x1b[2J"}, messages.BEGIN, "begin")
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)


@pytest.mark.parametrize(
    "value",
    (None, [1], ["h", 1, 2, 3], ["h", 0, 2, "0" * 32], ["h", 1, 70000, "0" * 32], ["h", 1, 2, "00"], ["h", True, 2, "0" * 32]),
)
def test_a_strange_floor_address_is_malformed(value: object) -> None:
    with pytest.raises(PeerFault, match="malformed"):
        messages.floor_address(value)


# ---- runs -----------------------------------------------------------------------------------------------------------


class Bench:
    """A receiver's run in a thread of its own, and a leader in this one."""

    def __init__(self, plan: Plan, idle: str | None = None) -> None:
        limits = {"vocab_size": 4096, "depth": 8, "support": 64, "max_slots": 16, "max_context_tokens": 1 << 20}
        hello = make_hello(Role.RECEIVER, new_boot_nonce(), **limits, **IDENTITIES)
        self.receiver: Receiver = open_receiver(EngineConfig(hello=hello, listen="tcp://127.0.0.1:0", takes_options=True))
        theirs = make_hello(Role.LEADER, new_boot_nonce(), **plan.hello_options())
        self.leader: Leader = open_leader(EngineConfig(hello=theirs, connect=self.receiver.endpoint))
        self.plan = plan
        self.idle = idle
        self.report: Report | None = None
        self.fault: Exception | None = None
        self.run = ReceiverRun(self.receiver, BaselineRss(), "127.0.0.1", idle, None, quiet)
        self.thread = threading.Thread(target=self._receive, daemon=True)
        self.thread.start()

    def _receive(self) -> None:
        try:
            self.receiver.wait_for_peer(20.0)
            self.report = self.run.run()
            self.run.serve_samples()
        except Exception as fault:  # noqa: BLE001 - handed to the test
            self.fault = fault

    def lead(self) -> LeaderRun:
        self.leader.wait_for_peer(20.0)
        return LeaderRun(self.leader, self.plan, "127.0.0.1", None, quiet)

    def end(self) -> None:
        self.leader.close()
        self.thread.join(20.0)
        assert not self.thread.is_alive()
        self.receiver.close()


@contextmanager
def bench(plan: Plan, idle: str | None = None) -> Iterator[Bench]:
    made = Bench(plan, idle)
    try:
        yield made
    finally:
        made.end()


@pytest.mark.parametrize("idle", ("spin", "block"))
@pytest.mark.parametrize("representation", ("dense", "sparse"))
def test_a_run_reports_what_was_asked_for(representation: str, idle: str) -> None:
    plan = small(representation=representation, support=8, idle=idle)
    affinity = os.sched_getaffinity(0)
    with bench(plan) as made:
        lead = made.lead()
        report = lead.run()
        samples = lead.samples_ns(plan.rounds)
    assert made.fault is None
    assert os.sched_getaffinity(0) == affinity
    assert made.report is not None
    assert report.as_dict() == made.report.as_dict()
    steps = sum(stage_steps(plan, stage)[1] for stage in stages(plan))
    assert (report.ready, report.discarded, report.reasons) == (steps, 0, {})
    assert report.latency_us is not None
    assert report.latency_us["n"] == plan.rounds
    assert samples.tolist() == made.run.latency_ns.tolist()
    assert report.latency_us["max"] == samples.max() / 1000
    assert report.tail_us is not None
    assert report.tail_us["p50"] > 0
    assert report.goodput_GBps > 0
    assert report.extra["rows_compared"]
    assert made.receiver.totals()["slots_not_free"] == 0
    assert not made.receiver.requests.requests


def test_rows_that_are_valid_but_not_those_of_the_plan_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small()
    other = row_digests(small(seed=99))
    monkeypatch.setattr("pp1q_transport.qualify.measuring.row_digests", lambda _plan: other)
    with bench(plan) as made, pytest.raises(PeerFault, match=r"not the row that was sent|the other end left"):
        made.lead().run()
    assert isinstance(made.fault, PeerFault)
    assert made.fault.reason is Reason.PAYLOAD_DIGEST


def test_a_discarded_proposal_is_counted_and_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = small()
    with bench(plan) as made:
        lead = made.lead()
        failed = []

        class Failing(Answerer):
            def answer(self, grant: Any, gap_ns: int) -> int:
                if len(failed) < 2 and grant.round == 3:
                    failed.append(grant.request)
                    self.session.fail(grant, grant.generation, Reason.CANCELLED)
                    self.link.pump(0)
                    return 0
                return super().answer(grant, gap_ns)

        monkeypatch.setattr("pp1q_transport.qualify.leading.Answerer", Failing)
        report = lead.run()
    assert made.fault is None
    assert (report.discarded, report.reasons) == (2, {"cancelled": 2})
    assert made.receiver.totals()["slots_not_free"] == 0


REFUSALS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "another depth than HELLO's": (lambda plan: plan.update(depth=2), "options: they need depth = 2"),
    "another vocabulary": (lambda plan: plan.update(vocab=1024), "options: they need vocab_size = 1024"),
    "an unknown key": (lambda plan: plan.update(rm=1), "'rm' is unknown"),
    "a missing key": (lambda plan: plan.pop("seed"), "'seed' is missing"),
    "a wrong type": (lambda plan: plan.update(rounds="many"), "rounds must be an integer"),
    "a value out of bounds": (lambda plan: plan.update(rounds=10**9), "rounds must be an integer within"),
    "more rounds than the context holds": (lambda plan: plan.update(rounds=100_000), "they need max_context_tokens"),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_the_receiver_refuses_options_and_says_why_to_both_ends(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    change, text = REFUSALS[case]
    plan = small()
    stated: dict[str, Any] = plan.to_map()
    change(stated)
    monkeypatch.setattr(Plan, "to_map", lambda _self: stated)
    with bench(plan) as made, pytest.raises(PeerFault, match="the other end says: ") as caught:
        made.lead().run()
    assert text in str(caught.value)
    assert isinstance(made.fault, ConfigError)
    assert text in str(made.fault)


def test_the_receiver_keeps_its_own_idle_strategy() -> None:
    with bench(small(idle="block"), idle="spin") as made, pytest.raises(PeerFault) as caught:
        made.lead().run()
    assert "idle: this receiver runs 'spin', the leader asks for 'block'" in str(caught.value)


@pytest.mark.parametrize(
    ("options", "field"),
    (({"vocab": 8192}, "vocab_size"), ({"depth": 9}, "depth"), ({"requests": 9}, "max_slots"), ({"support": 65}, "support")),
)
def test_hello_names_the_limit_that_a_plan_exceeds(options: dict[str, int], field: str) -> None:
    made = Bench(small(**options))
    try:
        with pytest.raises(PeerFault, match=f"limits_mismatch: {field}"):
            made.lead()
    finally:
        made.leader.close()
        made.receiver.close()
        made.thread.join(20.0)
        assert not made.thread.is_alive()
