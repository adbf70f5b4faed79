"""The kinds of link that an engine can be given, each with its port, its dial, and the link itself.

Between `engine` and `forming`, which look a kind up and otherwise know none, and the modules of each kind. SPEC section 2.
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
    from .stream import StreamLink

    Find = Callable[[int], Agreement | None]


@dataclass(frozen=True, slots=True)
class LinkKind:
    """`open_port(host, find, counters)`: where proven links come in. `dial(agreement, now_ns, host)`: the other way, `host` being
    where the control plane reached the peer. `link(joined, sink, outbox)`: over what either of them handed over."""

    open_port: Callable[[str, Find, Counters], ProvingPort[Any]]
    dial: Callable[[Agreement, int, str], ProvingDialer[Any]]
    link: Callable[[Any, FrameSink, Outbox], StreamLink]


KINDS: Final[dict[str, LinkKind]] = {
    "tcp": LinkKind(
        open_port=lambda host, find, counters: TcpPort(host, 0, find, counters),
        dial=TcpDialer,
        link=TcpLink,
    ),
    "shm": LinkKind(
        open_port=lambda _host, find, counters: ShmPort(find, counters),
        dial=lambda agreement, now_ns, _host: ShmDialer(agreement, now_ns),
        link=ShmLink,
    ),
}
