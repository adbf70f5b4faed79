"""`pp1q demo`: the main job in one command. A toy draft and a toy target, two processes, real q over a real socket.

Between a shell and `toy.demo`. Starts the draft process (exec, never fork), shows a live line, prints the report. SPEC section 9.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Final

import click

from ..errors import ConfigError, PeerFault, Reason
from ._capture import CaptureChoice, capture_options
from ._common import command_errors, setup_logging

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..client import Receiver
    from ..toy.demo import DemoOptions
    from ..toy.rounds import DemoResult

LIVE_EVERY_S: Final = 0.2
START_S: Final = 60.0
P_VALUE_LEAST: Final = 1e-6


@click.command(context_settings={"show_default": True})
@click.option("--dense", is_flag=True, help="Carry all of q: one FP32 a vocabulary entry.  [default]")
@click.option("--sparse", "support", type=click.IntRange(1, 4096), metavar="K", help="Carry the top K of q instead.")
@click.option("--rounds", type=click.IntRange(1, 10_000_000), default=1000, help="STEPs in all.")
@click.option("--depth", type=click.IntRange(1, 32), default=5, help="Drafted tokens a STEP.")
@click.option("--requests", type=click.IntRange(1, 64), default=4, help="Requests that take turns.")
@click.option("--vocab", type=click.IntRange(64, 1 << 20), default=129280, help="Vocabulary size.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=1, help="Models and noise; same seed, same tokens.")
@click.option("--link", type=click.Choice(["tcp", "shm", "rdma"]), default="tcp", help="What carries q between the processes.")
@click.option("--rdma", multiple=True, metavar="NAME=VALUE", help="A setting of --link rdma, such as device=rxe0.")
@click.option("--faults", default="", metavar="RATES", help="Inject in flight, e.g. corrupt=0.02,late=0.02,drop=0.02.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the report.")
@click.option("--tokens", "with_tokens", is_flag=True, help="Put the committed tokens of each request into the JSON.")
@click.option("-v", "--verbose", count=True, help="Log what happens (-vv: all of it).")
@command_errors
@capture_options
def demo(
    dense: bool,
    support: int | None,
    rounds: int,
    depth: int,
    requests: int,
    vocab: int,
    seed: int,
    link: str,
    rdma: tuple[str, ...],
    faults: str,
    as_json: bool,
    with_tokens: bool,
    verbose: int,
    capture: CaptureChoice,
) -> None:
    """Speculative decoding between two processes, q over loopback TCP, shared memory or RDMA, checked to be distributed as the
    target.

    Exit status 0 means: every slot is free again, no injected fault passed, the distribution holds (tested from 320 rounds
    on), and (without --faults) every proposal was ready.

    Example: pp1q demo --sparse 32 --rounds 2000 --faults corrupt=0.02,late=0.02,drop=0.02
    """
    setup_logging(verbose - 1)
    if dense and support is not None:
        raise ConfigError("choose --dense or --sparse K, not both")
    if support is not None and support > vocab:
        raise ConfigError(f"--sparse {support}: a vocabulary of {vocab} has no more than that to choose from")
    options = _options(support, rounds, depth, requests, vocab, seed, link, rdma, faults)
    started = time.monotonic()
    result = _run(options, faults, capture, live=not as_json and sys.stderr.isatty())
    problems = _problems(options, result)
    if as_json:
        click.echo(json.dumps(_as_json(options, result, with_tokens)))
    else:
        click.echo(_report(options, result, time.monotonic() - started))
    if problems:
        raise PeerFault(Reason.INCOMPLETE, "; ".join(problems))


@click.command(hidden=True)
@click.option("--connect", default="")
@click.option("--attach", "socket", default="")
@click.option("--rank", type=int, default=0)
@click.option("--options", "packed", required=True)
@click.option("-v", "--verbose", count=True)
@command_errors
def demo_draft(connect: str, socket: str, rank: int, packed: str, verbose: int) -> None:
    """The draft process of `pp1q demo` (embedded) or `pp1q demo-sidecar` (beside its daemon); started by them."""
    if socket:
        from ..toy import beside
        from ..toy.sidecar import Shape

        setup_logging(verbose)
        if rank:
            from ..toy.draft_rank import run_draft_rank

            run_draft_rank(Shape.unpacked(packed), socket, rank)
        else:
            beside.run_draft(Shape.unpacked(packed), socket)
        return
    from ..toy.demo import run_draft

    setup_logging(verbose - 1)
    fields = json.loads(packed)
    run_draft(_options(**fields), connect)


def _options(
    support: int | None,
    rounds: int,
    depth: int,
    requests: int,
    vocab: int,
    seed: int,
    link: str,
    rdma: Sequence[str],
    faults: str,
) -> DemoOptions:
    from ..links.faulty import FaultRates
    from ..toy.demo import DemoOptions

    return DemoOptions(
        seed=seed,
        rounds=rounds,
        depth=depth,
        vocab_size=vocab,
        support=support,
        requests=requests,
        link=link,
        rdma=tuple(rdma),
        faults=FaultRates.parse(faults),
    )


def _run(options: DemoOptions, faults: str, capture: CaptureChoice, live: bool) -> DemoResult:
    from ..toy.demo import DemoTarget, open_target

    packed = json.dumps(
        {
            "support": options.support,
            "rounds": options.rounds,
            "depth": options.depth,
            "requests": options.requests,
            "vocab": options.vocab_size,
            "seed": options.seed,
            "link": options.link,
            "rdma": options.rdma,
            "faults": faults,
        }
    )
    with capture.opened() as taken, open_target(options, capture=taken) as receiver:
        command = [sys.executable, "-m", "pp1q_transport.cli", "demo-draft", "--connect", receiver.endpoint]
        draft = subprocess.Popen([*command, "--options", packed], stdin=subprocess.DEVNULL)
        try:
            wait_for_draft(receiver, draft)
            result = DemoTarget(options, receiver, _live_line(options) if live else None).run()
        finally:
            receiver.close()
            end_draft(draft)
            if live:
                click.echo("\r\x1b[K", nl=False, err=True)
    return result


def wait_for_draft(receiver: Receiver, draft: subprocess.Popen[bytes], timeout_s: float = START_S) -> None:
    """A session, or `PeerFault`: at once when the draft process has ended, else after `timeout_s`."""
    deadline = time.monotonic() + timeout_s
    while not receiver.up:
        if draft.poll() is not None:
            raise PeerFault(Reason.PEER_LOST, f"the draft process ended with status {draft.returncode} before a session formed")
        try:
            receiver.wait_for_peer(LIVE_EVERY_S)
        except PeerFault as fault:
            if fault.reason is not Reason.TIMEOUT or time.monotonic() >= deadline:
                raise


def end_draft(draft: subprocess.Popen[bytes]) -> None:
    """The draft ends by itself after the goodbye; one that does not is stopped."""
    try:
        draft.wait(5)
    except subprocess.TimeoutExpired:
        draft.kill()
        draft.wait()


class _live_line:
    """Rewrites one line on stderr at most five times a second."""

    def __init__(self, options: DemoOptions) -> None:
        self._options = options
        self._next = 0.0

    def __call__(self, result: DemoResult) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + LIVE_EVERY_S
        mean = result.accepted / result.ready if result.ready else 0.0
        discarded = sum(result.reasons.values())
        line = f"round {result.rounds}/{self._options.rounds}  ready {result.ready}  discarded {discarded}"
        click.echo(f"\r\x1b[K{line}  accepted {mean:.2f} a round  tokens {result.committed}", nl=False, err=True)


def _problems(options: DemoOptions, result: DemoResult) -> list[str]:
    problems = []
    if result.slots_not_free:
        problems.append(f"{result.slots_not_free} slots are not FREE")
    if result.faults_that_passed:
        problems.append(f"{result.faults_that_passed} injected faults passed or have no outcome")
    if result.p_value is not None and result.p_value <= P_VALUE_LEAST:
        problems.append(f"the output is not distributed as the target (p = {result.p_value:.3g})")
    if not options.faults.any and result.ready != result.rounds:
        problems.append(f"{result.rounds - result.ready} of {result.rounds} proposals were discarded")
    return problems


def _as_json(options: DemoOptions, result: DemoResult, with_tokens: bool) -> dict[str, object]:
    from ..toy.rounds import latency_us

    report: dict[str, object] = {
        "rounds": result.rounds,
        "ready": result.ready,
        "discarded": sum(result.reasons.values()),
        "reasons": dict(result.reasons),
        "faults_injected": {kind: sum(counts.values()) for kind, counts in result.fault_outcomes.items()},
        "accepted_per_round": result.accepted / result.ready if result.ready else 0.0,
        "p_value": result.p_value,
        "slots_not_free": result.slots_not_free,
        "latency_us": latency_us(result.latencies_ns),
        "link": result.link,
        "representation": "dense" if options.support is None else "sparse",
        "seed": options.seed,
        "committed": result.committed,
        "bytes_ready": result.bytes_ready,
        "sessions": result.sessions,
        "pit_tokens": result.pit_tokens,
        "fault_outcomes": result.fault_outcomes,
        "faults_that_passed": result.faults_that_passed,
        "counters": result.counters,
    }
    if with_tokens:
        report["tokens"] = {str(request): tokens for request, tokens in result.tokens.items()}
    return report


def _report(options: DemoOptions, result: DemoResult, seconds: float) -> str:
    from ..toy.rounds import latency_us

    what = "dense q" if options.support is None else f"sparse q, top {options.support}"
    latency = latency_us(result.latencies_ns)
    discarded = sum(result.reasons.values())
    mean = result.accepted / result.ready if result.ready else 0.0
    lines = [
        f"pp1q demo: toy draft and target in two processes, vocabulary {options.vocab_size}, {what}, seed {options.seed}",
        f"  rounds          {result.rounds} in {seconds:.1f} s over {result.sessions} session(s), {options.requests} requests",
        f"  proposals       {result.ready} ready, {discarded} discarded{_by_reason(result.reasons)}",
        f"  accepted        {mean:.2f} of {options.depth} drafts a round; {result.committed} tokens committed",
        f"  step latency    p50 {latency['p50']:.0f} us   p99 {latency['p99']:.0f} us   p99.9 {latency['p999']:.0f} us"
        "   (drafting included)",
        f"  q carried       {result.bytes_ready / 1e6:.1f} MB over {result.link}, every value validated, every draw proven",
    ]
    for kind, outcomes in result.fault_outcomes.items():
        ends = ", ".join(f"{name} {count}" for name, count in sorted(outcomes.items()))
        lines.append(f"  fault           {sum(outcomes.values())} {kind}: {ends}")
    lines.append(f"  slots not FREE  {result.slots_not_free}")
    if result.p_value is None:
        lines.append("  distribution    not tested: too few rounds (at least 320)")
    else:
        verdict = "as the target" if result.p_value > P_VALUE_LEAST else "NOT as the target"
        lines.append(
            f"  distribution    {verdict}: p = {result.p_value:.3g} (PIT of the first {result.pit_tokens} tokens, 64 bins)"
        )
    return "\n".join(lines)


def _by_reason(reasons: dict[str, int]) -> str:
    if not reasons:
        return ""
    return " (" + ", ".join(f"{reason} {count}" for reason, count in sorted(reasons.items())) + ")"
