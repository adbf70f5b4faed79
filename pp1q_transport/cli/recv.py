"""`pp1q-recv`: the measuring end of the link benchmark. Takes the sender's options, issues STEPs, reports.

Between a shell and `qualify.measuring`. Heavy imports wait until the options are parsed. SPEC section 9.
"""

from __future__ import annotations

import os
import sys
import time
from typing import IO, TYPE_CHECKING, Final

import click

from ._capture import CaptureChoice, capture_options
from ._common import FiniteRange, OneLineCommand, StageLine, check_cpu, command_errors, open_samples, setup_logging, write_samples

if TYPE_CHECKING:
    from ..capture.recorder import Capture
    from ..client import Receiver
    from ..keys import KeyConfig
    from ..qualify.stats import BaselineRss, Report

SLICE_S: Final = 0.5


@click.command("pp1q-recv", cls=OneLineCommand, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--listen", default="tcp://127.0.0.1:7801", metavar="ENDPOINT", help="Where senders find this end.")
@click.option("--link", type=click.Choice(["tcp", "shm", "rdma"]), default="tcp", help="What carries q; shm: on one host only.")
@click.option("--rdma", multiple=True, metavar="NAME=VALUE", help="A setting of --link rdma, such as device=rxe0.")
@click.option("--idle", type=click.Choice(["spin", "block"]), help="Refuse any other idle strategy.  [default: the sender's]")
@click.option("--cpu", type=click.IntRange(0, 1 << 16), metavar="N", help="Run on this CPU.  [default: one per end on one host]")
@click.option("--own-key", type=click.Path(), metavar="FILE", help="This end's .secret file (with --allow).")
@click.option("--allow", type=click.Path(), metavar="FILE", help="Public keys that may connect.")
@click.option("--once", is_flag=True, help="Exit after one complete run.")
@click.option("--on-loss", type=click.Choice(["wait", "exit"]), default="wait", help="When a sender vanishes in a run.")
@click.option("--wait", "wait_s", type=FiniteRange(0, 1e6), default=0.0, metavar="S", help="Give up without a sender; 0: never.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object a run on stdout instead of the table.")
@click.option("--samples", type=click.Path(dir_okay=False), metavar="FILE", help="Write every latency sample (us, one a line).")
@click.option("--max-vocab", type=click.IntRange(2, 1 << 24), default=262144, help="Refuse larger vocabularies.")
@click.option("--max-depth", type=click.IntRange(1, 32), default=16, help="Refuse more positions a STEP.")
@click.option("--max-support", type=click.IntRange(1, 1 << 16), default=4096, help="Refuse larger sparse supports.")
@click.option("--max-slots", type=click.IntRange(2, 1024), default=32, help="Refuse more slots (two batches' requests).")
@click.option("--ready-fd", type=int, hidden=True)
@click.option("-q", "--quiet", is_flag=True, help="No report on stdout.")
@click.option("-v", "--verbose", count=True, help="Log what happens (-vv: all of it).")
@command_errors
@capture_options
def main(
    listen: str,
    link: str,
    rdma: tuple[str, ...],
    idle: str | None,
    cpu: int | None,
    own_key: str | None,
    allow: str | None,
    once: bool,
    on_loss: str,
    wait_s: float,
    as_json: bool,
    samples: str | None,
    max_vocab: int,
    max_depth: int,
    max_support: int,
    max_slots: int,
    ready_fd: int | None,
    quiet: bool,
    verbose: int,
    capture: CaptureChoice,
) -> None:
    """Waits for pp1q-send, measures the link with its options, and prints the report (the sender gets it too).

    Example, in two terminals: pp1q-recv --once, then pp1q-send --dense --rounds 500
    """
    setup_logging(verbose)
    # Everything that a run needs, so that what comes after the baseline is the transport's own.
    from ..qualify import measuring  # noqa: F401
    from ..qualify.stats import BaselineRss

    check_cpu(cpu)
    keys = _keys(own_key, allow)
    sink = open_samples(samples)
    baseline = BaselineRss()
    limits = {"vocab": max_vocab, "depth": max_depth, "support": max_support, "slots": max_slots}
    line = StageLine(not quiet)
    with capture.opened() as taken, _open(listen, link, rdma, keys, limits, taken) as receiver:
        if ready_fd is not None:
            os.write(ready_fd, receiver.endpoint.encode("ascii") + b"\n")
            os.close(ready_fd)
        if not quiet:
            click.echo(f"pp1q-recv: listening on {receiver.endpoint}", err=True)
        while True:
            _await_sender(receiver, wait_s)
            report = _measure(receiver, baseline, (idle, cpu, on_loss), line, sink)
            if report is not None and not quiet:
                _print(report, as_json)
            if report is not None and once:
                return


def _keys(own_key: str | None, allow: str | None) -> KeyConfig | None:
    from ..errors import ConfigError
    from ..keys import listener_keys

    if own_key is None and allow is None:
        return None
    if own_key is None or allow is None:
        raise ConfigError("--own-key and --allow go together: who this end is, and who may connect")
    return listener_keys(own_key, allow)


def _open(
    listen: str, link: str, rdma: tuple[str, ...], keys: KeyConfig | None, limits: dict[str, int], capture: Capture | None
) -> Receiver:
    from ..client import EngineConfig, Role, make_hello, new_boot_nonce, open_receiver
    from ..links.rdma_config import options_for
    from ..qualify.plan import IDENTITIES, MAX_CONTEXT_TOKENS

    hello = make_hello(
        Role.RECEIVER, new_boot_nonce(), vocab_size=limits["vocab"], depth=limits["depth"],
        support=min(limits["support"], limits["vocab"]), max_slots=limits["slots"], batch_requests=limits["slots"] // 2,
        max_context_tokens=MAX_CONTEXT_TOKENS, link_kinds=(link,), **IDENTITIES,
    )  # fmt: skip
    settings = options_for(link, rdma)
    return open_receiver(
        EngineConfig(hello=hello, listen=listen, keys=keys, takes_options=True, rdma=settings, capture=capture)
    )


def _await_sender(receiver: Receiver, wait_s: float) -> None:
    from ..errors import PeerFault, Reason

    deadline = time.monotonic() + wait_s if wait_s else None
    while not receiver.up:
        try:
            receiver.wait_for_peer(SLICE_S)
        except PeerFault as fault:
            if fault.reason is not Reason.TIMEOUT:
                raise
            if deadline is not None and time.monotonic() >= deadline:
                raise PeerFault(Reason.TIMEOUT, f"no sender within {wait_s:g} s at {receiver.endpoint}") from None


def _measure(
    receiver: Receiver,
    baseline: BaselineRss,
    wishes: tuple[str | None, int | None, str],
    line: StageLine,
    sink: IO[str] | None,
) -> Report | None:
    """One run. None when it failed and this end goes on waiting."""
    from ..endpoints import parse_endpoint
    from ..errors import ConfigError, PeerFault
    from ..qualify.measuring import ReceiverRun

    idle, cpu, on_loss = wishes
    address = parse_endpoint(receiver.endpoint)
    run = ReceiverRun(receiver, baseline, address.host if address.scheme == "tcp" else "127.0.0.1", idle, cpu, line)
    try:
        report = run.run()
        line.clear()
        if sink is not None:
            write_samples(sink, run.latency_ns.tolist())
        run.serve_samples()
    except (PeerFault, ConfigError) as fault:
        line.clear()
        if on_loss == "exit":
            raise
        click.echo(f"pp1q-recv: {fault}; waiting for the next sender", err=True)
        report = None
    receiver.engine.end_session()
    receiver.engine.inbox.clear()
    return report


def _print(report: Report, as_json: bool) -> None:
    from ..qualify.stats import render_table

    click.echo(report.to_json() if as_json else render_table(report), nl=as_json)
    sys.stdout.flush()


if __name__ == "__main__":
    main(prog_name="pp1q-recv")
