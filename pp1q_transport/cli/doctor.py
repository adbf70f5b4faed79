"""`pp1q doctor`: is this host fit? Each check is done, not guessed, and says what to do when it fails.

Between a shell and the parts a deployment needs: kernels, slot memory, sockets, CURVE. Changes nothing on
the host. SPEC section 9.
"""

from __future__ import annotations

import json
import os
import platform
import resource
import socket
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import click

from ..errors import ConfigError
from ._common import command_errors

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..keys import KeyConfig

PASS: Final = "PASS"
WARN: Final = "WARN"
FAIL: Final = "FAIL"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report: what was checked, how it went, and what was found or is to be done."""

    check: str
    verdict: str
    detail: str


@click.command(context_settings={"show_default": True})
@click.option("--vocab", type=click.IntRange(1, 1 << 24), default=129280, help="Vocabulary size to plan for.")
@click.option("--depth", type=click.IntRange(1, 32), default=5, help="Drafted tokens a STEP.")
@click.option("--slots", type=click.IntRange(1, 4096), default=8, help="Slots: requests a batch x batches in flight.")
@click.option("--listen", default=None, metavar="ENDPOINT", help="Also try to listen here, e.g. tcp://127.0.0.1:7801.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@command_errors
def doctor(vocab: int, depth: int, slots: int, listen: str | None, as_json: bool) -> None:
    """Checks whether this host can run a leader or receiver of the given size. Exit status 1 when a check fails.

    Example: pp1q doctor --slots 16 --listen tcp://127.0.0.1:7801
    """
    checks: list[Callable[[], Finding]] = [
        _python,
        _kernels,
        lambda: _memory(vocab, depth, slots),
        _cores,
        _descriptors,
        _socket_buffers,
        _loopback,
        _curve,
    ]
    if listen is not None:
        checks.append(lambda: _listen(listen))
    findings = [check() for check in checks]
    failed = [finding for finding in findings if finding.verdict == FAIL]
    if as_json:
        click.echo(json.dumps({"fit": not failed, "findings": [asdict(finding) for finding in findings]}))
    else:
        for finding in findings:
            click.echo(f"{finding.verdict}  {finding.check:<16} {finding.detail}")
    if failed:
        click.echo(f"pp1q: not fit: {', '.join(finding.check for finding in failed)}", err=True)
        sys.exit(1)


def _python() -> Finding:
    fit = sys.version_info >= (3, 11) and sys.byteorder == "little"
    detail = f"CPython {platform.python_version()} on {platform.machine()}, {sys.byteorder}-endian, Linux {platform.release()}"
    return Finding("python", PASS if fit else FAIL, detail if fit else detail + ": needs 3.11 or later, little-endian")


def _kernels() -> Finding:
    from .._native import kernels
    from ..session import receiver

    known = kernels.philox4x32(0, 0, 0, 0, 0, 0) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    compiled = str(receiver.__file__).endswith(".so")
    if not known:
        return Finding("kernels", FAIL, "Philox gives a wrong block: rebuild the package on this host")
    if not compiled:
        return Finding("kernels", WARN, "native kernels work; the session modules run uncompiled (slow): rebuild")
    return Finding("kernels", PASS, f"native ({kernels.level()}), session modules compiled")


def _memory(vocab: int, depth: int, slots: int) -> Finding:
    from ..session.terms import SessionTerms
    from ..staging import Region

    geometry = SessionTerms(1, 1, 2, vocab, depth, min(32, vocab), slots).geometry()
    size = geometry.total_bytes
    try:
        region = Region(size)
    except ConfigError as error:
        return Finding("slot memory", FAIL, str(error))
    region.close()
    return Finding("slot memory", PASS, f"{size / 1e6:.1f} MB for {slots} slots faulted in in {region.prefault_ms:.1f} ms")


def _cores() -> Finding:
    count = len(os.sched_getaffinity(0))
    if count < 2:
        return Finding("cores", WARN, "1 core: use --idle block, spinning would starve the peer process")
    return Finding("cores", PASS, f"{count} cores may be used")


def _descriptors() -> Finding:
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft < 512:
        return Finding("descriptors", FAIL, f"open files are limited to {soft}: raise it to 512 or more (ulimit -n)")
    return Finding("descriptors", PASS, f"{soft} open files allowed")


def _socket_buffers() -> Finding:
    read = Path("/proc/sys/net/ipv4/tcp_rmem").read_text(encoding="ascii").split()
    write = Path("/proc/sys/net/ipv4/tcp_wmem").read_text(encoding="ascii").split()
    most = min(int(read[2]), int(write[2]))
    detail = f"TCP buffers grow to {int(read[2]) >> 10} KiB in, {int(write[2]) >> 10} KiB out"
    if most < 1 << 20:
        return Finding("socket buffers", WARN, detail + ": raise net.ipv4.tcp_rmem and tcp_wmem for dense rows")
    return Finding("socket buffers", PASS, detail)


def _loopback() -> Finding:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        with socket.create_connection(listener.getsockname(), timeout=2):
            return Finding("loopback", PASS, "TCP connects on 127.0.0.1")


def _curve() -> Finding:
    import zmq

    if not zmq.has("curve"):
        return Finding("curve", FAIL, "this libzmq has no CURVE: install pyzmq from its wheel, or libzmq with libsodium")
    return Finding("curve", PASS, f"libzmq {zmq.zmq_version()} with CURVE")


def _throw_away_keys() -> KeyConfig:
    """Keys only to bind an address that refuses to be bound without; nobody is on their allow-list."""
    from ..keys import KeyConfig, new_pair

    pair = new_pair()
    return KeyConfig(pair.public, pair.secret, allow=frozenset())


def _listen(endpoint: str) -> Finding:
    from ..control import ControlListener
    from ..endpoints import parse_endpoint

    try:
        address = parse_endpoint(endpoint)
        keys = None if address.loopback else _throw_away_keys()
        ControlListener(endpoint, keys).close()
        if keys is not None:
            return Finding("listen", WARN, f"{endpoint} is free; other hosts can reach it, so it needs keys (`pp1q keys new`)")
    except ConfigError as error:
        return Finding("listen", FAIL, str(error))
    return Finding("listen", PASS, f"{endpoint} is free")
