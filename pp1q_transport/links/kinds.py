"""The kinds of link that an engine can be given, each with its port, its dial, and the link itself.

Between `engine` and `forming`, which look a kind up and otherwise know none, and the modules of each kind. What `rdma` needs of
the host is opened only when that kind is asked for. SPEC section 2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .shm import ShmLink
from .shm_port import ShmDialer, ShmPort
from .tcp import TcpLink
from .tcp_port import TcpDialer, TcpPort

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.assembler import FrameSink
    from ..session.negotiate import Agreement
    from ..session.outbox import Outbox
    from .proving import ProvingDialer, ProvingPort
    from .rdma_config import RdmaConfig
    from .rdma_device import Device
    from .stream import StreamLink

    Find = Callable[[int], Agreement | None]


@dataclass(frozen=True, slots=True)
class Means:
    """What links are made with, for as long as their owner lives: where they count, and the open device of a kind that has
    one."""

    counters: Counters
    device: Device | None = None

    def close(self) -> None:
        """Closes the device. Safe to repeat."""
        if self.device is not None:
            self.device.close()


@dataclass(frozen=True, slots=True)
class LinkKind:
    """`open_device(rdma)`: what the kind needs of this host, or `ConfigError`. `open_port(host, find, means)`: where proven links
    come in. `dial(agreement, now_ns, host, means)`: the other way, `host` being where the control plane reached the peer.
    `link(joined, sink, outbox)`: over what either of them handed over."""

    open_device: Callable[[RdmaConfig | None], Device | None]
    open_port: Callable[[str, Find, Means], ProvingPort[Any]]
    dial: Callable[[Agreement, int, str, Means], ProvingDialer[Any]]
    link: Callable[[Any, FrameSink, Outbox], StreamLink]


def _no_device(_config: RdmaConfig | None) -> None:
    return None


def _rdma_device(config: RdmaConfig | None) -> Device:
    # All that the kind needs is imported here: later, a proof's second is running.
    from . import rdma, rdma_port  # noqa: F401
    from .rdma_config import RdmaConfig
    from .rdma_device import Device

    return Device(config or RdmaConfig())


def _rdma_port(host: str, find: Find, means: Means) -> ProvingPort[Any]:
    from .rdma_port import RdmaPort

    assert means.device is not None
    return RdmaPort(host, find, means.counters, means.device)


def _rdma_dial(agreement: Agreement, now_ns: int, host: str, means: Means) -> ProvingDialer[Any]:
    from .rdma_port import RdmaDialer

    assert means.device is not None
    return RdmaDialer(agreement, now_ns, host, means.device, means.counters)


def _rdma_link(joined: Any, sink: FrameSink, outbox: Outbox) -> StreamLink:
    from .rdma import RdmaLink

    return RdmaLink(joined, sink, outbox)


KINDS: Final[dict[str, LinkKind]] = {
    "tcp": LinkKind(
        open_device=_no_device,
        open_port=lambda host, find, means: TcpPort(host, 0, find, means.counters),
        dial=lambda agreement, now_ns, host, _means: TcpDialer(agreement, now_ns, host),
        link=TcpLink,
    ),
    "shm": LinkKind(
        open_device=_no_device,
        open_port=lambda _host, find, means: ShmPort(find, means.counters),
        dial=lambda agreement, now_ns, _host, _means: ShmDialer(agreement, now_ns),
        link=ShmLink,
    ),
    "rdma": LinkKind(open_device=_rdma_device, open_port=_rdma_port, dial=_rdma_dial, link=_rdma_link),
}
