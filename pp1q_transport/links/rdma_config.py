"""How an rdma link is to run: device, port, GID, MTU, depths and times, checked one by one, and which GID "auto" means.

Between whoever configures a link (an engine's caller, a daemon's [rdma] table, a command's --rdma) and `rdma_verbs`, which asks
the device. Opens nothing; the GID table is read from /sys by `gid_table` and judged by `choose_gid`, a function of its arguments.
"""

from __future__ import annotations

import ipaddress
import os
import re
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Final

from ..errors import ConfigError, shown

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

AUTO: Final = "auto"
MTUS: Final = (256, 512, 1024, 2048, 4096)  # bytes; the n-th is IBV_MTU n + 1
ROCE_V2: Final = "RoCE v2"
ROCE_V1: Final = "IB/RoCE v1"
SYSFS: Final = Path("/sys/class/infiniband")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_NO_GID: Final = "0000:0000:0000:0000:0000:0000:0000:0000"

# Smallest and largest of every number.
BOUNDS: Final[dict[str, tuple[int, int]]] = {
    "port": (1, 255),
    "queue_depth": (8, 4096),
    "receive_bytes": (4608, 65536),  # the largest frame that an outbox copies, and a head with all its keys
    "inline_bytes": (0, 1024),
    "timeout": (1, 31),  # 4.096 us * 2^timeout; 0 would wait for ever
    "retry_count": (0, 6),  # 7 retries for ever on Soft-RoCE, and a peer that is gone must be noticed
    "rnr_retry": (0, 6),  # 7 is for ever
    "traffic_class": (0, 255),
    "service_level": (0, 15),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class RdmaConfig:
    """Settings of one end. `mtu` in bytes and `gid_index` may be "auto", `device` too where there is only one. `queue_depth`: how
    many messages a peer may have on the way to us; `receive_bytes`: how large each may be that does not go into a landing row."""

    device: str = AUTO
    port: int = 1
    gid_index: int | str = AUTO
    mtu: int | str = AUTO
    queue_depth: int = 64
    receive_bytes: int = 8192
    inline_bytes: int = 256
    timeout: int = 14
    retry_count: int = 5
    rnr_retry: int = 6
    traffic_class: int = 0
    service_level: int = 0

    def __post_init__(self) -> None:
        for name, (least, most) in BOUNDS.items():
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise ConfigError(f"rdma {name} {shown(value)} is not a whole number from {least} to {most}")
        if not isinstance(self.device, str) or not _NAME.fullmatch(self.device):
            raise ConfigError(f"rdma device {shown(self.device)} is no device name: `rdma link` lists them")
        if self.mtu != AUTO and (type(self.mtu) is not int or self.mtu not in MTUS):
            raise ConfigError(f"rdma mtu {shown(self.mtu)} is none of auto, {', '.join(map(str, MTUS))}")
        index = self.gid_index
        if index != AUTO and (isinstance(index, bool) or not isinstance(index, int) or not 0 <= index <= 255):
            raise ConfigError(f"rdma gid_index {shown(index)} is neither auto nor a whole number from 0 to 255")

    def describe(self) -> dict[str, object]:
        """The settings as a report prints them."""
        return asdict(self)


def config_from(settings: Mapping[str, object], where: str = "rdma") -> RdmaConfig:
    """A configuration from named values (a TOML table's); unknown names and wrong values are `ConfigError`."""
    known = {item.name for item in fields(RdmaConfig)}
    for name in settings:
        if name not in known:
            raise ConfigError(f"{where} has no setting {shown(name)}; there are {', '.join(sorted(known))}")
    return RdmaConfig(**settings)  # type: ignore[arg-type]  # judged by __post_init__


def parse_options(texts: Sequence[str]) -> RdmaConfig:
    """A configuration from "name=value" texts (a command's --rdma, commas between several). Raises `ConfigError`."""
    values: dict[str, object] = {}
    for item in [part for text in texts for part in text.split(",")]:
        name, equals, value = item.partition("=")
        if not equals or not name or not value:
            raise ConfigError(f"--rdma {item!r} is no name=value, such as device=rxe0 or gid_index=1")
        if name in values:
            raise ConfigError(f"--rdma {name} is given twice")
        number = name != "device" and value.isascii() and value.isdigit() and len(value) < 10
        values[name] = int(value) if number else value
    return config_from(values, "--rdma")


def options_for(link: str, texts: Sequence[str]) -> RdmaConfig | None:
    """What a command's --link and --rdma mean together. Raises `ConfigError`."""
    if link == "rdma":
        return parse_options(texts)
    if texts:
        raise ConfigError(f"--rdma {texts[0]} is of no use with --link {link}")
    return None


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table: `kind` as the kernel names it, `interface` the network device, "" for none."""

    index: int
    gid: str
    kind: str
    interface: str = ""

    @property
    def address(self) -> ipaddress.IPv4Address | ipaddress.IPv6Address:
        """The IP address that a RoCE GID stands for."""
        address = ipaddress.IPv6Address(self.gid)
        return address.ipv4_mapped or address

    @property
    def raw(self) -> bytes:
        """Its 16 bytes."""
        return ipaddress.IPv6Address(self.gid).packed


def gid_table(device: str, port: int, root: Path = SYSFS) -> list[Gid]:
    """The usable entries of a port's GID table, in order. Raises `ConfigError` where there is no such device or port."""
    folder = root / device / "ports" / str(port)
    try:
        indexes = sorted(int(name) for name in os.listdir(folder / "gids"))
    except OSError as error:
        raise ConfigError(f"rdma device {device} has no port {port} to read GIDs of: {error.strerror}") from None
    found = []
    for index in indexes:
        gid = _read(folder / "gids" / str(index))
        if not gid or gid == _NO_GID:
            continue
        kind = _read(folder / "gid_attrs" / "types" / str(index))
        if kind:
            found.append(Gid(index, gid, kind, _read(folder / "gid_attrs" / "ndevs" / str(index))))
    return found


def _read(path: Path) -> str:
    """An attribute's text; "" for one that this entry does not have (the kernel answers EINVAL)."""
    try:
        return path.read_text(encoding="ascii").strip()
    except OSError:
        return ""


def choose_gid(table: Sequence[Gid], wanted: int | str, near: str = "") -> Gid:
    """The entry to use. "auto": RoCE v2 before anything else; then the one whose address is `near` (our end of the data
    connection), then one of its address family, then a routable one, then the first. Raises `ConfigError`."""
    if wanted != AUTO:
        for entry in table:
            if entry.index == wanted:
                return entry
        raise ConfigError(f"rdma gid_index {wanted} is empty; there are {', '.join(str(e.index) for e in table) or 'none'}")
    if not table:
        raise ConfigError("the rdma port has no GID: give its network interface an address and bring it up")
    here = _address(near)

    def rank(entry: Gid) -> tuple[bool, bool, bool, bool, int]:
        same_family = here is None or entry.address.version == here.version
        return entry.kind != ROCE_V2, entry.address != here, not same_family, entry.address.is_link_local, entry.index

    return min(table, key=rank)


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        address = ipaddress.ip_address(text.partition("%")[0])
    except ValueError:
        return None
    return (address.ipv4_mapped or address) if isinstance(address, ipaddress.IPv6Address) else address
