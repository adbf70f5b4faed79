"""`pp1q doctor`: is this host fit? Each check is done, not guessed, and says what to do when it fails.

Between a shell and the parts a deployment needs: kernels, slot memory, sockets, CURVE. Changes nothing on
the host. SPEC section 9.
"""

from __future__ import annotations

import ctypes
import errno
import json
import mmap
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
from ._findings import FAIL, PASS, WARN, Finding

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..keys import KeyConfig
    from ..links.rdma_config import RdmaConfig
    from ..session.slots import SlotGeometry

SIZES: Final = ("vocab", "depth", "slots")
ANY_DEVICE: Final = "device=auto"  # what --rdma alone means, where no configuration says more


@dataclass(frozen=True, slots=True)
class Need:
    """What is planned for: slots of this shape for so many sessions."""

    vocab: int
    depth: int
    slots: int
    support: int = 32
    dense: bool = True
    sparse: bool = True
    sessions: int = 1

    def slot_bytes(self) -> int:
        """Bytes of slot memory of all sessions (SPEC section 2's sizes, and their metadata)."""
        return self.sessions * self._geometry().total_bytes

    def landing_bytes(self) -> int:
        """Bytes of the memory that the peers of an rdma link write to: as many rows again, each with its header."""
        from ..links.rdma_window import shape_for

        return self.sessions * shape_for(self.slots, self.depth, self._geometry().row_bytes).total_bytes

    def _geometry(self) -> SlotGeometry:
        from ..session.terms import SessionTerms

        support = min(self.support, self.vocab)
        return SessionTerms(1, 1, 2, self.vocab, self.depth, support, self.slots, self.dense, self.sparse).geometry()


@click.command(context_settings={"show_default": True})
@click.option("--vocab", type=click.IntRange(1, 1 << 24), default=129280, help="Vocabulary size to plan for.")
@click.option("--depth", type=click.IntRange(1, 32), default=5, help="Drafted tokens a STEP.")
@click.option("--slots", type=click.IntRange(1, 4096), default=8, help="Slots: requests a batch x batches in flight.")
@click.option("--config", "config_path", default=None, metavar="FILE", help="Take the sizes from a daemon's configuration.")
@click.option("--listen", default=None, metavar="ENDPOINT", help="Also try to listen here, e.g. tcp://127.0.0.1:7801.")
@click.option(
    "--rdma", default=None, is_flag=False, flag_value=ANY_DEVICE, metavar="[NAME=VALUE,...]",
    help="Also check for the rdma link, with these settings of it (as in [rdma] of a configuration).",
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
@command_errors
def doctor(
    vocab: int, depth: int, slots: int, config_path: str | None, listen: str | None, rdma: str | None, as_json: bool
) -> None:
    """Checks whether this host can run a leader or receiver of the given size. Exit status 1 when a check fails.

    Run it as the user that the daemon will be: limits and keys are that user's.

    Example: pp1q doctor --slots 16 --listen tcp://127.0.0.1:7801
    """
    need = Need(vocab, depth, slots) if config_path is None else _configured(config_path)
    checks: list[Callable[[], Iterable[Finding]]] = [
        lambda: [_python(), _kernels()],
        lambda: _memory(need.slot_bytes(), need.slots * need.sessions),
        lambda: [_cores(), _descriptors(), _socket_buffers(), _loopback(), _curve()],
    ]
    if config_path is not None:
        checks.append(lambda: [_socket_folder(config_path)])
    if listen is not None:
        checks.append(lambda: [_listen(listen)])
    settings = _rdma_settings(rdma, config_path)
    if settings is not None:
        from ._doctor_rdma import rdma_findings, work_bytes

        size = need.slot_bytes() + need.landing_bytes() + need.sessions * work_bytes(settings)
        checks.append(lambda: rdma_findings(settings, size))
    findings = [finding for check in checks for finding in check()]
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


def _configured(path: str) -> Need:
    """What a daemon of this configuration will take. Raises `ConfigError`."""
    context = click.get_current_context()
    given = [name for name in SIZES if context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE]
    if given:
        raise ConfigError(f"--config has the sizes: leave out {', '.join('--' + name for name in given)}")
    from ..daemon.config import load

    config = load(path)
    session = config.session
    return Need(
        session.vocab_size,
        session.depth,
        session.max_slots,
        session.support,
        "dense" in session.representations,
        "sparse" in session.representations,
        max(1, len(config.peers)),  # a leader has slots for each of its targets
    )


def _rdma_settings(options: str | None, path: str | None) -> RdmaConfig | None:
    """The rdma link's settings to check: the command line's, or the configuration's where a link is rdma. None: not asked for."""
    from ..links.rdma_config import RdmaConfig, parse_options

    configured = None
    if path is not None:
        from ..daemon.config import load

        config = load(path)
        if any(peer.link == "rdma" for peer in config.peers):
            configured = config.rdma or RdmaConfig()  # without [rdma] all of it has its default
    if options is None or (options == ANY_DEVICE and configured is not None):
        return configured
    return parse_options([options])


def _socket_folder(path: str) -> Finding:
    from ..daemon.config import load
    from ..local.unix_socket import check_folder

    socket_path = str(load(path).daemon.socket)
    try:
        check_folder(socket_path)
    except ConfigError as error:
        return Finding("socket folder", FAIL, str(error))
    return Finding("socket folder", PASS, f"{socket_path} can be made")


def _memory(size: int, slots: int) -> list[Finding]:
    """Slot memory as a daemon takes it, faulted in and then locked."""
    from ..staging import Region

    try:
        region = Region(size)
    except ConfigError as error:
        return [Finding("slot memory", FAIL, str(error))]
    detail = f"{size / 1e6:.1f} MB for {slots} slots faulted in in {region.prefault_ms:.1f} ms"
    locked = _lock(region.map, size)
    region.close()
    return [Finding("slot memory", PASS, detail), locked]


def _lock(memory: mmap.mmap, size: int) -> Finding:
    """Locks the memory, and lets it go again. Not fatal where it fails: no link of this build must have it."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    limited = soft != resource.RLIM_INFINITY
    libc = ctypes.CDLL(None, use_errno=True)
    start = ctypes.c_char.from_buffer(memory)
    address, length = ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size)
    fault = ctypes.get_errno() if libc.mlock(address, length) else 0
    libc.munlock(address, length)
    allowed = f"limit {soft / 1e6:.1f} MB" if limited else "no limit"
    if fault in (errno.ENOMEM, errno.EPERM) and limited:
        detail = (
            f"can't lock {size / 1e6:.1f} MB: RLIMIT_MEMLOCK is {soft} bytes, {size} are needed, or slots may be swapped: set "
            "LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1:-1 (containers) or memlock in /etc/security/limits.conf"
        )
        return Finding("memory lock", WARN, detail)
    if fault:
        return Finding("memory lock", WARN, f"can't lock {size / 1e6:.1f} MB ({allowed}): {os.strerror(fault)}")
    if limited and soft < size:
        allowed += ", which this user may exceed (CAP_IPC_LOCK): run this as the daemon's user"
    return Finding("memory lock", PASS, f"{size / 1e6:.1f} MB locked and let go, {allowed}")


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
