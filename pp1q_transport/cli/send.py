"""`pp1q-send`: the leading end of the link benchmark. Proposes the options, sends the rows, prints the receiver's report.

Between a shell and `qualify.leading`; with `--loopback` it runs the receiver as well. SPEC section 9.
"""

from __future__ import annotations

from contextlib import ExitStack
from typing import TYPE_CHECKING

import click

from ._capture import CaptureChoice, capture_options
from ._common import FiniteRange, OneLineCommand, StageLine, check_cpu, command_errors, open_samples, setup_logging, write_samples

if TYPE_CHECKING:
    from ..client import Leader
    from ..keys import KeyConfig
    from ..qualify.plan import Plan


@click.command("pp1q-send", cls=OneLineCommand, context_settings={"show_default": True, "help_option_names": ["-h", "--help"]})
@click.option("--connect", metavar="ENDPOINT", help="Where pp1q-recv listens.  [default: tcp://127.0.0.1:7801]")
@click.option("--loopback", is_flag=True, help="Start the receiver as well, as a second process on this host.")
@click.option("--link", type=click.Choice(["tcp", "shm", "rdma"]), default="tcp", help="What carries q; shm: on one host only.")
@click.option("--rdma", multiple=True, metavar="NAME=VALUE", help="A setting of --link rdma, such as device=rxe0.")
@click.option("--dense", is_flag=True, help="Send all of q: one FP32 a vocabulary entry.  [default]")
@click.option("--sparse", type=click.IntRange(1, 1 << 16), metavar="K", help="Send the top K of q instead.")
@click.option("--requests", type=click.IntRange(1, 512), default=4, help="Proposals a batch; two batches are in flight.")
@click.option("--depth", type=click.IntRange(1, 32), default=5, help="Positions a STEP.")
@click.option("--rounds", type=click.IntRange(1, 100_000), default=500, help="Measured STEPs, batches and floor messages.")
@click.option("--warmup", type=click.IntRange(0, 10_000), default=20, help="Not counted, before each measured block.")
@click.option("--vocab", type=click.IntRange(2, 1 << 24), default=129280, help="Vocabulary size.")
@click.option("--seed", type=click.IntRange(0, (1 << 64) - 1), default=1, help="Rows and draws.")
@click.option("--idle", type=click.Choice(["spin", "block"]), default="spin", help="How both ends wait, floors included.")
@click.option("--no-floors", is_flag=True, help="Leave out memcpy, plain sockets and ZeroMQ.")
@click.option("--cpu", type=click.IntRange(0, 1 << 16), metavar="N", help="Run on this CPU.  [default: one per end on one host]")
@click.option("--own-key", type=click.Path(), metavar="FILE", help="This end's .secret file (with --server-key).")
@click.option("--server-key", metavar="KEY", help="The receiver's public key or its .public file.")
@click.option("--wait", "wait_s", type=FiniteRange(0.1, 1e6), default=10.0, metavar="S", help="Give up without a receiver.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout instead of the table.")
@click.option("--samples", type=click.Path(dir_okay=False), metavar="FILE", help="Write every latency sample (us, one a line).")
@click.option("-v", "--verbose", count=True, help="Log what happens (-vv: all of it).")
@command_errors
@capture_options
def main(
    connect: str | None,
    loopback: bool,
    link: str,
    rdma: tuple[str, ...],
    dense: bool,
    sparse: int | None,
    requests: int,
    depth: int,
    rounds: int,
    warmup: int,
    vocab: int,
    seed: int,
    idle: str,
    no_floors: bool,
    cpu: int | None,
    own_key: str | None,
    server_key: str | None,
    wait_s: float,
    as_json: bool,
    samples: str | None,
    verbose: int,
    capture: CaptureChoice,
) -> None:
    """Measures a link: latency, tail and goodput of validated q, beside what plain sockets and ZeroMQ do in the same run.

    Example: pp1q-send --loopback --sparse 32 --idle spin
    """
    setup_logging(verbose - 1)  # what went wrong is this command's one line; the receiver is the one that serves
    from ..errors import ConfigError
    from ..qualify.plan import Plan

    if dense and sparse is not None:
        raise ConfigError("choose --dense or --sparse K, not both")
    if loopback and (connect is not None or own_key is not None or server_key is not None):
        raise ConfigError("--loopback starts its own receiver: leave --connect and keys out")
    plan = Plan(
        representation="dense" if sparse is None else "sparse", support=min(32, vocab) if sparse is None else sparse,
        requests=requests, depth=depth, rounds=rounds, warmup=warmup, vocab=vocab, seed=seed, idle=idle,
        floors=not no_floors,
    )  # fmt: skip
    _run(plan, (link, rdma), connect, loopback, cpu, _keys(own_key, server_key), wait_s, as_json, samples, capture)


def _keys(own_key: str | None, server_key: str | None) -> KeyConfig | None:
    from ..errors import ConfigError
    from ..keys import connector_keys

    if own_key is None and server_key is None:
        return None
    if own_key is None or server_key is None:
        raise ConfigError("--own-key and --server-key go together: who this end is, and who it must reach")
    return connector_keys(own_key, server_key)


def _run(
    plan: Plan,
    carrier: tuple[str, tuple[str, ...]],
    connect: str | None,
    loopback: bool,
    cpu: int | None,
    keys: KeyConfig | None,
    wait_s: float,
    as_json: bool,
    samples: str | None,
    capture: CaptureChoice,
) -> None:
    from ..client import EngineConfig, Role, make_hello, new_boot_nonce, open_leader
    from ..endpoints import parse_endpoint
    from ..errors import Pp1qError
    from ..links.rdma_config import options_for
    from ..qualify.leading import LeaderRun
    from ..qualify.loopback import LoopbackReceiver
    from ..qualify.stats import render_table

    check_cpu(cpu)
    sink = open_samples(samples)
    link, settings = carrier
    rdma = options_for(link, settings)
    line = StageLine(True)
    with ExitStack() as stack:
        stack.callback(line.clear)
        receiver = None
        endpoint = connect or "tcp://127.0.0.1:7801"
        if loopback:
            line("starting the receiver", 0, 1)
            receiver = stack.enter_context(LoopbackReceiver(plan, link=link, rdma=settings))
            endpoint = receiver.endpoint
        address = parse_endpoint(endpoint)
        hello = make_hello(Role.LEADER, new_boot_nonce(), link_kinds=(link,), **plan.hello_options())
        taken = stack.enter_context(capture.opened())
        config = EngineConfig(hello=hello, connect=endpoint, keys=keys, rdma=rdma, capture=taken)
        leader = stack.enter_context(open_leader(config))
        line(f"connecting to {endpoint}", 0, 1)
        _reach(leader, endpoint, wait_s)
        run = LeaderRun(leader, plan, address.host if address.scheme == "tcp" else "127.0.0.1", cpu, line)
        try:
            report = run.run()
            if sink is not None:
                count = report.latency_us["n"] if report.latency_us is not None else 0
                write_samples(sink, run.samples_ns(count).tolist())
        except Pp1qError:
            if receiver is not None and receiver.process.poll() is not None:
                click.echo(f"pp1q-send: the receiver process ended: {receiver.last_words()}", err=True)
            raise
        leader.close()
        if receiver is not None:
            receiver.wait()
    click.echo(report.to_json() if as_json else render_table(report), nl=as_json)


def _reach(leader: Leader, endpoint: str, wait_s: float) -> None:
    from ..errors import PeerFault, Reason

    try:
        leader.wait_for_peer(wait_s)
    except PeerFault as fault:
        if fault.reason is Reason.TIMEOUT and leader.counters.of(Reason.OVERLOAD):
            raise PeerFault(Reason.OVERLOAD, f"the receiver at {endpoint} is busy with another sender") from None
        if fault.reason is Reason.TIMEOUT:
            raise PeerFault(Reason.TIMEOUT, f"no receiver within {wait_s:g} s at {endpoint}: start pp1q-recv there") from None
        raise


if __name__ == "__main__":
    main(prog_name="pp1q-send")
