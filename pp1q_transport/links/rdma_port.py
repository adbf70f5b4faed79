"""The rdma link's data port and the dial to it: a tcp connection that proves itself, and then the queue pairs of both ends.

Between `proving`, which cuts off whatever does not prove itself, and `rdma_connection`: no verbs object of a peer exists before
its proof, and no session runs before the queue pairs are joined. The connection stays, as the link's word that the peer lives.
SPEC section 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import ConfigError, PeerFault, Reason
from ..logs import logger
from ..session.agreed import terms_of
from ..session.hello import Role
from .proving import ProvingDialer, ProvingPort
from .rdma_connection import NO_LANDING, RdmaConnection, open_connection
from .rdma_window import LandingShape, shape_for
from .tcp_port import dial_tcp, listen_tcp, prepare, say_proof

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.negotiate import Agreement
    from .rdma_device import Device

SCHEME = "rdma"


def landing_for(agreement: Agreement) -> LandingShape:
    """The landing memory that our role offers: what takes rows has a row for every row of every slot, others none."""
    if agreement.ours.role not in (Role.RECEIVER, Role.MEMBER):
        return NO_LANDING
    geometry = terms_of(agreement).geometry()
    return shape_for(geometry.max_slots, geometry.depth, geometry.row_bytes)


class RdmaPort(ProvingPort[RdmaConnection]):
    """A listening data port on `host`, for queue pairs on `device`."""

    def __init__(self, host: str, find: Callable[[int], Agreement | None], counters: Counters, device: Device) -> None:
        sock, where = listen_tcp(host, 0)
        super().__init__(sock, f"{SCHEME}://{where}", find, counters)
        self._device = device
        self._joining: list[tuple[RdmaConnection, Agreement]] = []
        self._log = logger(link="rdma")

    def _admit(self, sock: socket.socket) -> Reason | None:
        prepare(sock)
        return None

    def _join(self, sock: socket.socket, agreement: Agreement) -> RdmaConnection | None:
        if not say_proof(sock, agreement):
            return None
        try:
            return open_connection(sock, self._device, landing_for(agreement), self._counters)
        except (ConfigError, OSError) as error:
            self._counters.add("link_memory_failed")
            self._log.error("no_rdma_link", reason=Reason.LINK_ERROR.value, detail=str(error))
            return None

    def poll(self, now_ns: int) -> list[tuple[RdmaConnection, Agreement]]:
        """See `ProvingPort.poll`: those whose queue pairs are joined as well."""
        self._joining += super().poll(now_ns)
        joined: list[tuple[RdmaConnection, Agreement]] = []
        kept: list[tuple[RdmaConnection, Agreement]] = []
        for connection, agreement in self._joining:
            try:
                connection.poll(now_ns)
            except PeerFault as fault:
                self._counters.add("links_cut_off")
                self._counters.refuse(fault.reason)
                self._log.warning("no_queue_pair", reason=fault.reason.value, detail=fault.detail)
                connection.close()
                continue
            (joined if connection.up else kept).append((connection, agreement))
        self._joining = kept
        return joined

    def joins(self, session: int) -> bool:
        """See `ProvingPort.joins`."""
        return any(agreement.session == session for _connection, agreement in self._joining)

    def close(self) -> None:
        """See `ProvingPort.close`."""
        for connection, _agreement in self._joining:
            connection.close()
        self._joining.clear()
        super().close()


class RdmaDialer(ProvingDialer[RdmaConnection]):
    """Connects to a data port, proves itself, takes the peer's proof, joins queue pairs. `poll` until it returns the
    connection."""

    def __init__(self, agreement: Agreement, now_ns: int, reached: str, device: Device, counters: Counters) -> None:
        sock, address = dial_tcp(agreement.data, SCHEME, reached)
        super().__init__(agreement, now_ns, sock)
        self._device = device
        self._counters = counters
        self._joining: RdmaConnection | None = None
        self._connect(address)

    def _join(self) -> RdmaConnection:
        try:
            return open_connection(self._sock, self._device, landing_for(self._agreement), self._counters)
        except (ConfigError, OSError) as error:
            self._fail(Reason.LINK_ERROR, str(error))

    def poll(self, now_ns: int) -> RdmaConnection | None:
        """See `ProvingDialer.poll`."""
        if self._joining is None:
            self._joining = super().poll(now_ns)
        connection = self._joining
        if connection is None:
            return None
        try:
            connection.poll(now_ns)
        except PeerFault as fault:
            self._fail(fault.reason, fault.detail)
        if not connection.up:
            return None
        self._joining = None
        return connection

    def close(self) -> None:
        """See `ProvingDialer.close`."""
        if self._joining is not None:
            self._joining.close()
            self._joining = None
        super().close()
