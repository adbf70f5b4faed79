"""What this host has for RDMA, read without a verbs library: devices and their ports, device nodes, limits.

Between /sys, /dev and whoever has to say what is there (`pp1q doctor`, an error at start). Changes nothing; GID tables are
`rdma_config`'s to read, and what only a device can answer is `rdma_verbs`'s to ask.
"""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path
from typing import Final

SYSFS: Final = Path("/sys/class/infiniband")
NODES: Final = Path("/dev/infiniband")
NETWORK: Final = Path("/sys/class/net")

# What the kernel takes off an interface's MTU: IPv6 or GRH, UDP, base header, the longest extended headers, checksum.
_ROCE_BYTES: Final = 40 + 8 + 12 + 4 + 28 + 4
_MTUS: Final = (4096, 2048, 1024, 512, 256)
_CAP_IPC_LOCK: Final = 14


@dataclass(frozen=True, slots=True)
class Port:
    """One port as the kernel shows it. `state` and `physical` are in capitals ("ACTIVE"), `layer` is Ethernet or InfiniBand."""

    device: str
    number: int
    state: str
    physical: str
    layer: str
    rate: str

    @property
    def active(self) -> bool:
        """Whether it can carry anything."""
        return self.state == "ACTIVE"


def ports(root: Path = SYSFS) -> list[Port]:
    """Every port of every device, by name and number; empty where the kernel has none."""
    found = []
    for device in _names(root):
        for number in sorted(int(name) for name in _names(root / device / "ports") if name.isdigit()):
            folder = root / device / "ports" / str(number)
            state, physical = (_text(folder / name).rpartition(":")[2].strip().upper() for name in ("state", "phys_state"))
            found.append(Port(device, number, state, physical, _text(folder / "link_layer"), _text(folder / "rate")))
    return found


def nodes(root: Path = NODES) -> tuple[list[str], list[str]]:
    """(all, those that this user may open) of the device nodes through which verbs are called."""
    names = [name for name in _names(root) if name.startswith("uverbs")]
    return names, [name for name in names if os.access(root / name, os.R_OK | os.W_OK)]


def interface_mtu(interface: str, root: Path = NETWORK) -> int:
    """Bytes of IP packet that a network interface takes, 0 where there is none of that name."""
    text = _text(root / interface / "mtu") if interface else ""
    return int(text) if text.isdigit() else 0


def roce_mtu(interface_bytes: int) -> int:
    """The payload a packet that fits an interface of this MTU; 0 when it is too small for any."""
    return next((mtu for mtu in _MTUS if mtu + _ROCE_BYTES <= interface_bytes), 0)


@dataclass(frozen=True, slots=True)
class LockLimit:
    """What may be locked, and so registered. `bytes`: RLIMIT_MEMLOCK, None without one; `exempt`: CAP_IPC_LOCK overrides it."""

    bytes: int | None
    exempt: bool

    def allows(self, size: int) -> bool:
        """Whether `size` bytes may be registered."""
        return self.exempt or self.bytes is None or size <= self.bytes


def lock_limit(status: Path = Path("/proc/self/status")) -> LockLimit:
    """This process's."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    held = next((line for line in _text(status).splitlines() if line.startswith("CapEff:")), "CapEff: 0")
    exempt = bool(int(held.split()[1], 16) >> _CAP_IPC_LOCK & 1)
    return LockLimit(None if soft == resource.RLIM_INFINITY else soft, exempt)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))
    except OSError:
        return []


def _text(path: Path) -> str:
    """An attribute's text, "" for what can't be read."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""
