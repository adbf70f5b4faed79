"""`pp1q demo` as a user runs it: two processes, its report and JSON, its promises under faults, and a verifier that cheats."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
from system_rig import child_environment, expected

from pp1q_transport.errors import ConfigError, PeerFault
from pp1q_transport.links.faulty import FaultInjector, FaultRates
from pp1q_transport.rng import Domain, draw64
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.toy.demo import DemoOptions, DemoTarget, open_target, run_draft
from pp1q_transport.toy.models import ToyModels
from pp1q_transport.toy.reference import Mode, run_reference
from pp1q_transport.verify import Verdict, verify_chain
from pp1q_transport.wire import COMPLETION, REPLY, Header

pytestmark = pytest.mark.timeout(120)

KEYS = {
    "rounds", "ready", "discarded", "reasons", "faults_injected", "accepted_per_round", "p_value", "slots_not_free", "latency_us",
}  # fmt: skip
# What may become of a fault: its own reason, or the end of the link that another fault brought about first.
OUTCOMES = {
    "corrupt_payload": {"payload_digest", "link_error"},
    "corrupt_header": {"link_error"},
    "late": {"timeout", "link_error"},
    "drop": {"incomplete", "timeout", "link_error"},
}


def demo(*arguments: str, timeout_s: float = 100) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", *arguments],
        env=child_environment(),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )


def report(*arguments: str, **more: Any) -> dict[str, Any]:
    done = demo("--json", *arguments, **more)
    assert done.returncode == 0, done.stderr
    assert done.stderr == "", "nothing but the JSON, and that on stdout"
    parsed: dict[str, Any] = json.loads(done.stdout)
    return parsed


@pytest.mark.parametrize("q", (("--dense",), ("--sparse", "16")), ids=("dense", "sparse"))
def test_the_committed_tokens_are_those_of_a_run_without_transport(q: tuple[str, ...]) -> None:
    got = report("--vocab", "2048", "--rounds", "60", "--seed", "5", "--requests", "3", "--tokens", *q)
    assert set(got) >= KEYS
    assert set(got["latency_us"]) == {"p50", "p99", "p999"}
    assert (got["rounds"], got["ready"], got["discarded"], got["slots_not_free"]) == (60, 60, 0, 0)
    models = ToyModels.of(5, 2048)
    mode = Mode.DENSE if q == ("--dense",) else Mode.SPARSE
    for index in range(3):
        seed = draw64(5, Domain.PROPOSAL, 0, 0, index)
        assert got["tokens"][str(index + 1)] == run_reference(models, seed, 20, 5, mode, support=16)


def test_another_seed_gives_other_tokens() -> None:
    first, second = (report("--vocab", "512", "--rounds", "8", "--seed", seed, "--tokens") for seed in ("1", "2"))
    assert first["tokens"] != second["tokens"]


def test_the_report_at_full_size_says_what_was_promised() -> None:
    done = demo("--rounds", "320")
    assert done.returncode == 0, done.stderr
    for line in ("rounds ", "proposals ", "accepted ", "step latency", "p99.9", "q carried", "not FREE  0", "as the target"):
        assert line in done.stdout
    assert "320 ready, 0 discarded" in done.stdout
    assert "\r" not in done.stderr, "no live line where nobody looks"


@pytest.mark.slow
def test_every_fault_ends_in_one_counted_outcome_and_none_passes() -> None:
    got = report("--sparse", "32", "--rounds", "2000", "--faults", "corrupt=0.05,late=0.05,drop=0.05")
    assert got["rounds"] == 2000
    assert got["ready"] + got["discarded"] == 2000
    assert sum(got["reasons"].values()) == got["discarded"]
    assert got["p_value"] > 1e-6
    assert got["slots_not_free"] == 0
    assert got["faults_that_passed"] == 0
    injected = got["faults_injected"]
    assert set(injected) == set(OUTCOMES), "every kind was met"
    for kind, outcomes in got["fault_outcomes"].items():
        assert sum(outcomes.values()) == injected[kind]
        assert set(outcomes) <= OUTCOMES[kind]
    assert sum(injected.values()) <= got["discarded"]
    assert got["sessions"] > 1, "header faults cost the link, which formed again"
    counted = got["counters"]
    assert counted["totals"]["discarded"] == got["discarded"]
    assert counted["reasons"]["generation_stale"] > 0, "late bytes drained and were counted"


def frames(count: int, payload: bytes) -> Outbox:
    """A leader's outbox with `count` proposals of one row, whose payloads hold whatever was drawn."""
    outbox, header = Outbox(), Header()
    for generation in range(1, count + 1):
        for kind, size in ((REPLY, len(payload)), (COMPLETION, 0)):
            header.clear()
            header.kind, header.session, header.slot_generation, header.depth = kind, 7, generation, 1
            header.payload_length, header.token = size, payload[0]
            outbox.frame(header, payload if size else None, 0, size, -1)
    return outbox


def test_the_noise_of_faults_knows_nothing_of_the_tokens() -> None:
    plans = []
    for payload in (bytes(range(64)), bytes(64)):
        injector = FaultInjector(FaultRates.parse("corrupt=0.2,late=0.2,drop=0.2"), 5, 1000)
        injector.attach(frames(300, payload))
        injector.pump(0)
        plans.append(injector.injected)
    assert plans[0] == plans[1]
    assert 100 < len(plans[0]) < 260


def test_without_rates_nothing_is_touched() -> None:
    injector = FaultInjector(FaultRates(), 5, 1000)
    source, copy = frames(20, bytes(32)), frames(20, bytes(32))
    injector.attach(source)
    assert injector.pump(0) is None
    assert injector.injected == []
    assert injector.outbox.bytes_queued == copy.bytes_queued


@pytest.mark.parametrize(
    "text", ("corrupt=-1", "late=nan", "drop=1.5", "corrupt=0.5,late=0.6", "drop=0.1,drop=0.1", "x=0", "late")
)
def test_bad_rates_are_named(text: str) -> None:
    with pytest.raises(ConfigError, match="faults"):
        FaultRates.parse(text)


def always_accept(tokens: Any, qs: Any, target_weights_at: Any, seed: int, generation: int, round: int, first: int) -> Verdict:
    """The verifier that believes the draft: fast, and wrong."""
    honest = verify_chain(tokens, qs, target_weights_at, seed, generation, round, first)
    return Verdict(len(tokens), [*tokens, honest.committed_tokens[-1]])


@pytest.mark.parametrize("support", (None, 32), ids=("dense", "sparse"))
def test_a_verifier_that_always_accepts_fails_at_the_same_n(support: int | None) -> None:
    options = DemoOptions(seed=1, rounds=1000, support=support, vocab_size=4096)
    p_values = []
    for verifier in (verify_chain, always_accept):
        with open_target(options) as receiver:
            drafting = threading.Thread(target=run_draft, args=(options, receiver.endpoint), daemon=True)
            drafting.start()
            receiver.wait_for_peer()
            result = DemoTarget(options, receiver, verifier=verifier).run()
            assert result.pit_tokens == options.rounds
            p_values.append(result.p_value)
        drafting.join(20)
        assert not drafting.is_alive()
    right, wrong = p_values
    assert right is not None
    assert wrong is not None
    assert right > 1e-6 > wrong


@pytest.mark.parametrize("after_s", (0.0, 0.2, 1.0))
def test_a_draft_that_is_killed_ends_the_demo_with_peer_lost(after_s: float) -> None:
    """Also one that dies before it ever spoke."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", "--rounds", "1000000", "--vocab", "1024"],
        env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = wait_for_child(process.pid)
    time.sleep(after_s)
    os.kill(child, signal.SIGKILL)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 1
    assert "peer_lost" in errors
    assert "Traceback" not in errors


def test_ctrl_c_ends_both_processes_without_a_traceback() -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", "--rounds", "1000000", "--vocab", "1024"],
        env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    child = wait_for_child(process.pid)
    time.sleep(0.5)
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in errors
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


@pytest.mark.parametrize("faults", ((), ("--faults", "corrupt=0.05")), ids=("plain", "faults"))
def test_an_interrupt_of_the_command_alone_takes_the_draft_along(faults: tuple[str, ...]) -> None:
    """As a supervisor sends it: the draft gets no signal, only its peer's goodbye."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", "--rounds", "1000000", "--vocab", "1024", *faults],
        env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    child = wait_for_child(process.pid)
    time.sleep(1.0)
    process.send_signal(signal.SIGINT)
    output, errors = process.communicate(timeout=30)
    assert process.returncode == 130
    assert output == ""
    *others, last = errors.splitlines()
    assert last == "pp1q: interrupted"
    # The draft has nothing to complain of, unless the interrupt fell between two sessions: then nobody said goodbye.
    assert others == [] or (faults and others == ["pp1q: peer_lost: no new session within 3 s"])
    with pytest.raises(ProcessLookupError):
        os.kill(child, 0)


def test_a_draft_that_is_killed_while_links_may_re_form_is_given_up() -> None:
    """With corrupt headers a lost link is no lost process: the demo waits for another, but not for ever."""
    process = subprocess.Popen(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", "--rounds", "1000000", "--vocab", "64", "--faults", "corrupt=0.01"],
        env=child_environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    child = wait_for_child(process.pid)
    time.sleep(1.0)
    os.kill(child, signal.SIGKILL)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert "peer_lost" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize(
    "arguments",
    (
        ("--faults", "late=2"),
        ("--faults", "lost=0.1"),
        ("--rounds", "0"),
        ("--depth", "33"),
        ("--sparse", "0"),
        ("--sparse", "x"),
        ("--vocab", "10"),
        ("--vocab", "512", "--sparse", "600"),
        ("--requests", "0"),
        ("--seed", "-1"),
        ("--colour",),
        ("more",),
        ("--dense", "--sparse", "8"),
    ),
    ids=" ".join,
)
def test_bad_options_give_one_line_and_exit_2(arguments: tuple[str, ...]) -> None:
    done = demo(*arguments)
    assert done.returncode == 2
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    said = [line for line in done.stderr.splitlines() if not line.startswith(("Usage:", "Try ")) and line]
    assert len(said) == 1, done.stderr


def test_a_terminal_gets_a_live_line_and_a_clean_report() -> None:
    mine, its = os.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pp1q_transport.cli", "demo", "--rounds", "2000", "--vocab", "512"],
        env=child_environment(), stdout=subprocess.PIPE, stderr=its, text=True,
    )  # fmt: skip
    os.close(its)
    shown = b""
    while True:
        try:
            more = os.read(mine, 4096)
        except OSError:  # the terminal's other end is closed
            break
        if not more:
            break
        shown += more
    os.close(mine)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 0
    assert shown.startswith(b"\r\x1b[K")
    assert b"round 1/2000" in shown
    assert shown.endswith(b"\r\x1b[K"), "the line is wiped before the report"
    assert "\x1b" not in output


@pytest.mark.parametrize("support", (None, 32), ids=("dense", "sparse"))
def test_faults_leave_the_tokens_those_of_the_same_rounds_without_transport(support: int | None) -> None:
    """Ready rounds and target-only rounds interleave as the faults will have it; every token follows from which is which."""
    options = DemoOptions(
        seed=3, rounds=150, requests=1, support=support, vocab_size=512, faults=FaultRates(corrupt=0.1, late=0.05, drop=0.1)
    )
    with open_target(options) as receiver:
        drafting = threading.Thread(target=run_draft, args=(options, receiver.endpoint), daemon=True)
        drafting.start()
        receiver.wait_for_peer()
        journal: list[tuple[int, int, bool]] = []
        target = Journalled(options, receiver, journal)
        result = target.run()
    drafting.join(20)
    assert not drafting.is_alive()
    assert result.faults_that_passed == 0
    assert result.ready + sum(result.reasons.values()) == 150
    assert 10 < len(result.injected) < 90
    seed = draw64(3, Domain.PROPOSAL, 0, 0, 0)
    assert result.tokens[1] == expected(ToyModels.of(3, 512), seed, journal, depth=5, support=support)


class Journalled(DemoTarget):
    """Notes under which generation each round was committed."""

    def __init__(self, options: DemoOptions, receiver: Any, journal: list[tuple[int, int, bool]]) -> None:
        super().__init__(options, receiver)
        self._journal = journal

    def _verify(self, request: Any, proposal: Any) -> None:
        self._journal.append((proposal.round, proposal.generation, True))
        super()._verify(request, proposal)

    def _target_only(self, request: Any, round_number: int) -> None:
        self._journal.append((round_number, request.generation, False))
        super()._target_only(request, round_number)


def wait_for_child(parent: int) -> int:
    """The PID of the draft process that the demo starts."""
    for _ in range(500):
        with open(f"/proc/{parent}/task/{parent}/children", encoding="ascii") as children:
            found = children.read().split()
        if found:
            return int(found[0])
        time.sleep(0.02)
    raise PeerFault  # pragma: no cover - the watchdog of the test speaks first
