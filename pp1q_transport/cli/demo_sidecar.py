"""`pp1q demo-sidecar`: a deployment of daemons and processes on one machine, beside the embedded engine in the same run.

Between a shell and `toy.sidecar`. Starts six processes for two ranks, prints both sets of figures. SPEC section 9.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import click

from ..errors import PeerFault, Reason
from ._capture import CaptureChoice, capture_options
from ._common import command_errors, setup_logging

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..toy.sidecar import Deployment, Shape

MODES: Final = ("replicate", "vocabulary", "request-owner")
P_VALUE_LEAST: Final = 1e-6
LOOK_S: Final = 0.2
END_S: Final = 600.0
FREE_S: Final = 5.0


@click.command("demo-sidecar", context_settings={"show_default": True})
@click.option("--ranks", type=click.IntRange(1, 8), default=2, help="Target processes, each with a receiver daemon.")
@click.option("--sparse", "support", type=click.IntRange(1, 4096), metavar="K", help="Carry the top K of q; all of it otherwise.")
@click.option("--rounds", type=click.IntRange(1, 10_000_000), default=1000, help="STEPs in all.")
@click.option("--depth", type=click.IntRange(1, 32), default=5, help="Drafted tokens a STEP.")
@click.option("--requests", type=click.IntRange(1, 64), default=4, help="Requests that take turns.")
@click.option("--vocab", type=click.IntRange(64, 1 << 20), default=129280, help="Vocabulary size.")
@click.option("--seed", type=click.IntRange(0, (1 << 63) - 1), default=1, help="Models and noise.")
@click.option("--idle", type=click.Choice(["block", "spin", "spin-then-block"]), default="block", help="How everybody waits.")
@click.option("--mode", type=click.Choice(MODES), default="replicate", help="How the ranks share q.")
@click.option("--draft-ranks", type=click.IntRange(1, 8), default=1, help="Draft processes, each with a leader daemon.")
@click.option("--link", type=click.Choice(["tcp", "shm", "rdma"]), default="tcp", help="Between the daemons.")
@click.option("--rdma", multiple=True, metavar="NAME=VALUE", help="A setting of --link rdma, such as device=rxe0.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the report.")
@click.option("-v", "--verbose", count=True, help="Log what happens.")
@command_errors
@capture_options
def demo_sidecar(
    ranks: int,
    support: int | None,
    rounds: int,
    depth: int,
    requests: int,
    vocab: int,
    seed: int,
    idle: str,
    mode: str,
    draft_ranks: int,
    link: str,
    rdma: tuple[str, ...],
    as_json: bool,
    verbose: int,
    capture: CaptureChoice,
) -> None:
    """A draft process, a leader daemon, a receiver daemon for each rank and a target process for each rank, on this machine.

    Exit status 0 means: every proposal was ready on every rank, all ranks committed the same tokens, these are distributed as the
    target (tested from 320 rounds on), every slot is free again and every process ended by itself. With --mode vocabulary each
    rank is sent its own range of q over a link of its own, and the ranks verify together, by what their daemons exchange.

    Example: pp1q demo-sidecar --sparse 32 --rounds 400
    """
    from ..toy.sidecar import Deployment, Shape

    setup_logging(verbose - 1)
    shape = Shape(
        seed, rounds, depth, vocab, support, requests, ranks, idle, link, mode=mode, rdma=rdma, draft_ranks=draft_ranks
    )
    started = time.monotonic()
    embedded = _embedded(shape)
    with Deployment(shape, daemon_words=_captures(capture)) as deployment:
        reports = _run(deployment, live=not as_json and sys.stderr.isatty())
        slots = _slots_not_free(deployment)
        statuses = {name: deployment.status(name) for name in deployment.daemons}
        ends = deployment.stop()
    problems = _problems(shape, reports, slots, ends)
    result = _as_json(shape, embedded, reports, slots, statuses)
    if as_json:
        click.echo(json.dumps(result))
    else:
        click.echo(_report(shape, result, time.monotonic() - started))
    if problems:
        raise PeerFault(Reason.INCOMPLETE, "; ".join(problems))


def _captures(capture: CaptureChoice) -> Callable[[str], list[str]]:
    """The options of each daemon by its name: a file for each, its name behind the stem of the one that was asked for."""

    def words(name: str) -> list[str]:
        if capture.path is None:
            return []
        path = Path(capture.path).absolute()
        return capture.beside(path.with_name(f"{path.stem}-{name}{path.suffix}")).words()

    return words


@click.command(hidden=True)
@click.option("--attach", "socket", required=True)
@click.option("--rank", type=int, required=True)
@click.option("--options", "packed", required=True)
@click.option("-v", "--verbose", count=True)
@command_errors
def demo_target(socket: str, rank: int, packed: str, verbose: int) -> None:
    """The target process of one rank of `pp1q demo-sidecar` (started by it)."""
    from ..toy.beside import report_of, run_target
    from ..toy.sidecar import Shape

    setup_logging(verbose)
    home = Path(socket).parent
    report = report_of(run_target(Shape.unpacked(packed), socket, rank, home))
    (home / f"target{rank}.json").write_text(json.dumps(report), encoding="utf-8")


def _embedded(shape: Shape) -> dict[str, Any]:
    """The same rounds with the engine embedded in both processes, for comparison."""
    import subprocess

    command = [sys.executable, "-m", "pp1q_transport.cli", "demo", "--json", "--rounds", str(shape.rounds)]
    command += ["--depth", str(shape.depth), "--requests", str(shape.requests), "--vocab", str(shape.vocab_size)]
    command += ["--seed", str(shape.seed)]
    if shape.support is not None:
        command += ["--sparse", str(shape.support)]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, check=False, timeout=END_S)
    if done.returncode:
        raise PeerFault(Reason.INCOMPLETE, f"the embedded run ended with status {done.returncode}")
    report: dict[str, Any] = json.loads(done.stdout)
    return report


def _run(deployment: Deployment, live: bool) -> list[dict[str, Any]]:
    """Starts everything, waits for the targets, returns their reports by rank."""
    deployment.start_all()
    ranks = range(deployment.shape.ranks)
    deadline = time.monotonic() + END_S
    while any(deployment.parts[f"target{rank}"].running for rank in ranks):
        for name, part in deployment.parts.items():
            if not part.running and not name.startswith("target"):
                raise PeerFault(Reason.PEER_LOST, f"{name} ended: {deployment.tail(name)}")
        if time.monotonic() >= deadline:
            raise PeerFault(Reason.TIMEOUT, f"the targets did not end within {END_S:g} s")
        if live:
            now = deployment.status("receiver0")
            line = f"ready {now['ready']}/{deployment.shape.rounds}  discarded {now['discarded']}"
            click.echo(f"\r\x1b[K{line}", nl=False, err=True)
        time.sleep(LOOK_S)
    if live:
        click.echo("\r\x1b[K", nl=False, err=True)
    reports: list[dict[str, Any]] = []
    for rank in ranks:
        status = deployment.wait(f"target{rank}", END_S)
        if status:
            raise PeerFault(Reason.INCOMPLETE, f"target{rank} ended with status {status}: {deployment.tail(f'target{rank}')}")
        reports.append(json.loads((deployment.home / f"target{rank}.json").read_text(encoding="utf-8")))
    return reports


def _slots_not_free(deployment: Deployment) -> dict[str, int]:
    """By receiver daemon, once it has noticed that its target is gone."""
    slots = {}
    for rank in range(deployment.shape.ranks):
        name = f"receiver{rank}"
        deadline = time.monotonic() + FREE_S
        while True:
            states = deployment.status(name)["slots"]
            slots[name] = sum(count for state, count in states.items() if state != "FREE")
            if not slots[name] or time.monotonic() >= deadline:
                break
            time.sleep(0.01)
    return slots


def _problems(shape: Shape, reports: list[dict[str, Any]], slots: dict[str, int], ends: dict[str, int]) -> list[str]:
    problems = [f"{count} slots of {name} are not FREE" for name, count in slots.items() if count]
    for rank, report in enumerate(reports):
        if report["ready"] != shape.rounds:
            problems.append(f"rank {rank}: {report['discarded']} of {shape.rounds} proposals were discarded {report['reasons']}")
        if report["p_value"] is not None and report["p_value"] <= P_VALUE_LEAST:
            problems.append(f"rank {rank}: the output is not distributed as the target (p = {report['p_value']:.3g})")
        if report["tokens"] != reports[0]["tokens"]:
            problems.append(f"rank {rank} committed other tokens than rank 0")
    problems += [f"{name} ended with status {status}" for name, status in ends.items() if status not in (0, 143)]
    return problems


def _as_json(
    shape: Shape, embedded: dict[str, Any], reports: list[dict[str, Any]], slots: dict[str, int], statuses: dict[str, Any]
) -> dict[str, Any]:
    first = reports[0]
    return {
        "ranks": shape.ranks,
        "draft_ranks": shape.draft_ranks,
        "rounds": shape.rounds,
        "representation": "dense" if shape.support is None else "sparse",
        "ready": [report["ready"] for report in reports],
        "discarded": [report["discarded"] for report in reports],
        "accepted_per_round": first["accepted"] / first["ready"] if first["ready"] else 0.0,
        "committed": first["committed"],
        "p_value": first["p_value"],
        "mode": shape.mode,
        "exchanges": statuses["receiver0"]["totals"].get("exchanges", 0),
        "ranks_agree": all(report["tokens"] == first["tokens"] for report in reports),
        "slots_not_free": slots,
        "latency_us": [report["latency_us"] for report in reports],
        "embedded": {key: embedded[key] for key in ("ready", "latency_us", "accepted_per_round", "p_value", "committed")},
        "daemons": {name: {"totals": status["totals"], "reasons": status["reasons"]} for name, status in statuses.items()},
    }


def _report(shape: Shape, result: dict[str, Any], seconds: float) -> str:
    what = "dense q" if shape.support is None else f"sparse q, top {shape.support}"
    drafts = f", {shape.draft_ranks} of the draft" if shape.draft_ranks > 1 else ""
    lines = [
        f"pp1q demo-sidecar: {2 * (shape.draft_ranks + shape.ranks)} processes, {shape.ranks} rank(s){drafts}, "
        f"vocabulary {shape.vocab_size}, {what}, "
        f"idle {shape.idle}",
        f"  rounds          {shape.rounds} embedded and {shape.rounds} beside daemons in {seconds:.1f} s",
    ]
    for rank, latency in enumerate(result["latency_us"]):
        lines.append(
            f"  rank {rank}          {result['ready'][rank]} ready, {result['discarded'][rank]} discarded; step latency "
            f"p50 {latency['p50']:.0f} us  p99 {latency['p99']:.0f} us"
        )
    embedded = result["embedded"]
    lines += [
        f"  embedded        {embedded['ready']} ready; step latency p50 {embedded['latency_us']['p50']:.0f} us  "
        f"p99 {embedded['latency_us']['p99']:.0f} us   (drafting included in both)",
        f"  accepted        {result['accepted_per_round']:.2f} of {shape.depth} drafts a round "
        f"(embedded {embedded['accepted_per_round']:.2f}); {result['committed']} tokens committed",
        f"  ranks           {'all committed the same tokens' if result['ranks_agree'] else 'DIFFER'}",
        f"  slots not FREE  {sum(result['slots_not_free'].values())}",
    ]
    if result["exchanges"]:
        lines.append(f"  verified        by the ranks together, each with its range of q and p: {result['exchanges']} exchanges")
    if result["p_value"] is None:
        lines.append("  distribution    not tested: too few rounds (at least 320)")
    else:
        verdict = "as the target" if result["p_value"] > P_VALUE_LEAST else "NOT as the target"
        lines.append(f"  distribution    {verdict}: p = {result['p_value']:.3g}")
    return "\n".join(lines)
