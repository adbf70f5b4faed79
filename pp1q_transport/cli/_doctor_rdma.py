"""`pp1q doctor --rdma`: can this host run the rdma link as it is configured? From the library to a registration really done.

Between `doctor`, which prints, and `links.rdma_host`, `rdma_config` and `rdma_device`, which know. Each check is one line that
says what to do; nothing is changed. SPEC section 9.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from ..errors import ConfigError
from ..links import rdma_host
from ..links.rdma_config import AUTO, ROCE_V2, choose_gid, gid_table
from ..links.rdma_device import Device, Domain
from ..links.rdma_verbs import SharedMemory, load
from ..links.rdma_window import ACKNOWLEDGEMENTS
from ._findings import FAIL, PASS, WARN, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

    from ..links.rdma_config import RdmaConfig
    from ..links.rdma_host import LockLimit, Port


def rdma_findings(config: RdmaConfig, size: int) -> Iterator[Finding]:
    """Every check for a link of this configuration that registers `size` bytes. Ends early where the rest has no meaning."""
    library = _library()
    yield library
    yield access()
    yield memory_limit(size, rdma_host.lock_limit())
    try:
        port = pick_port(config, rdma_host.ports())
    except ConfigError as error:
        yield Finding("rdma device", FAIL, str(error))
        return
    yield port_state(port)
    yield from _addresses(config, port)
    if library.verdict == PASS and port.active:
        yield from _verbs(config, port, size)


def work_bytes(config: RdmaConfig) -> int:
    """Bytes of a link's own messages: a buffer for each that may come, and for each that may be on the way."""
    return (2 * config.queue_depth + ACKNOWLEDGEMENTS) * config.receive_bytes


def _library() -> Finding:
    try:
        library = load()
    except ConfigError as error:
        return Finding("rdma library", FAIL, str(error))
    return Finding("rdma library", PASS, f"pyverbs in {os.path.dirname(library.device.__file__)}")


def access(root: Path = rdma_host.NODES) -> Finding:
    """Whether verbs can be called at all."""
    there, open_to_us = rdma_host.nodes(root)
    if not there:
        detail = f"no uverbs node in {root}: load ib_uverbs, or pass the nodes on (--device {root}, a device plugin)"
        return Finding("rdma access", FAIL, detail)
    if not open_to_us:
        detail = f"{root}/{there[0]} can't be opened: mode 0666 is usual; under systemd use deploy/systemd/rdma.conf"
        return Finding("rdma access", FAIL, detail)
    return Finding("rdma access", PASS, f"{len(open_to_us)} of {len(there)} nodes of {root} can be opened")


def memory_limit(size: int, limit: LockLimit) -> Finding:
    """What is to be registered against what may be locked. Registering it is the real test; this says what to set."""
    need = f"{size / 1e6:.1f} MB to register"
    if limit.bytes is None:
        return Finding("rdma memlock", PASS, f"{need}, no limit")
    if limit.bytes >= size:
        return Finding("rdma memlock", PASS, f"{need}, limit {limit.bytes / 1e6:.1f} MB")
    if limit.exempt:
        detail = f"{need}, limit {limit.bytes} bytes, which this user may exceed (CAP_IPC_LOCK): run this as the daemon's user"
        return Finding("rdma memlock", WARN, detail)
    detail = (
        f"RLIMIT_MEMLOCK is {limit.bytes} bytes, {size} are needed: set LimitMEMLOCK=infinity (systemd), --ulimit memlock=-1:-1 "
        "(containers) or memlock in /etc/security/limits.conf"
    )
    return Finding("rdma memlock", FAIL, detail)


def pick_port(config: RdmaConfig, ports: list[Port]) -> Port:
    """The configured port. Raises `ConfigError` that names what there is."""
    if not ports:
        raise ConfigError(f"no RDMA device in {rdma_host.SYSFS}: load its driver, or pass it on to this container")
    names = list(dict.fromkeys(port.device for port in ports))
    if config.device == AUTO and len(names) > 1:
        raise ConfigError(f"there are {len(names)} devices: name one (device = \"{names[0]}\"): {', '.join(names)}")
    device = names[0] if config.device == AUTO else config.device
    for port in ports:
        if (port.device, port.number) == (device, config.port):
            return port
    raise ConfigError(f"no port {config.port} of device {device}: there are {', '.join(f'{p.device}/{p.number}' for p in ports)}")


def port_state(port: Port) -> Finding:
    """Whether the port can carry anything."""
    detail = f"{port.device}/{port.number} {port.state} ({port.physical}), {port.layer}, {port.rate}"
    if port.active:
        return Finding("rdma port", PASS, detail)
    if port.layer == "InfiniBand" and port.state == "INIT":
        return Finding("rdma port", FAIL, detail + ": no subnet manager has brought it up: run opensm on one host or the switch")
    return Finding("rdma port", FAIL, detail + ": bring its interface up (ip link set NAME up), check cable and switch port")


def _addresses(config: RdmaConfig, port: Port) -> Iterator[Finding]:
    """The GID that a link would take, and what the interface behind it lets through."""
    if port.layer == "InfiniBand":
        yield Finding("rdma gid", PASS, "InfiniBand: addressed by LID, any GID does")
        return
    try:
        table = gid_table(port.device, port.number)
        gid = choose_gid(table, config.gid_index)
    except ConfigError as error:
        yield Finding("rdma gid", FAIL, str(error))
        return
    family = f"IPv{gid.address.version}"
    detail = f"index {gid.index} of {len(table)}: {gid.address} ({gid.kind}, {family}) on {gid.interface or 'no interface'}"
    if gid.kind != ROCE_V2:
        yield Finding("rdma gid", WARN, detail + ": RoCE v1 is not routed and rarely made lossless: use v2 on both ends")
    elif gid.address.is_link_local:
        yield Finding("rdma gid", WARN, detail + ": link-local; give the interface an address, of one family on both ends")
    else:
        yield Finding("rdma gid", PASS, detail)
    carried = rdma_host.interface_mtu(gid.interface)
    if gid.interface and carried:
        fits = rdma_host.roce_mtu(carried)
        said = f"interface MTU {carried} carries {fits} bytes a packet"
        if fits == 4096:
            yield Finding("rdma interface", PASS, said)
        else:
            yield Finding("rdma interface", WARN if fits else FAIL, said + ": 9000 on both ends and every switch port gives 4096")


def _verbs(config: RdmaConfig, port: Port, size: int) -> Iterator[Finding]:
    """What only the device can answer: its active MTU, and whether it takes the memory."""
    try:
        with closing(Device(replace(config, device=port.device))) as device:
            yield _packet(config, device.port.mtu)
            yield _register(device, size)
    except ConfigError as error:
        yield Finding("rdma register", FAIL, str(error))


def _packet(config: RdmaConfig, active: int) -> Finding:
    if config.mtu == AUTO:
        return Finding("rdma mtu", PASS, f"{active} bytes a packet, the port's; the smaller of both ends counts")
    if int(config.mtu) <= active:
        return Finding("rdma mtu", PASS, f"{config.mtu} bytes a packet, of the port's {active}; the smaller of both ends counts")
    return Finding("rdma mtu", WARN, f"mtu = {config.mtu} is not to be had: the port has {active}; raise its interface's MTU")


def _register(device: Device, size: int) -> Finding:
    """Memory as a link takes it, given to the device and taken back. Raises `ConfigError`."""
    memory = SharedMemory(size)
    with closing(Domain(device)) as domain:
        began = time.monotonic()
        domain.register(memory.address, size, memory, writable=True, remote=True)
        took_ms = (time.monotonic() - began) * 1e3
    return Finding("rdma register", PASS, f"{size / 1e6:.1f} MB registered in {took_ms:.1f} ms and let go")
