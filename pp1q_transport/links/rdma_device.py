"""An RDMA device, a session's protection domain in it, and a queue pair: what a link needs of verbs, and nothing more.

Between `rdma_connection`, which decides what they are for, and `rdma_verbs`, through which alone verbs are reached. Frees
everything in the order in which it can be freed. Knows no frames, no credit and no peer beyond the numbers it connects to.
"""

from __future__ import annotations

import os
import secrets
import socket
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from .._native.net import POLLIN, wait_io
from ..errors import ConfigError, LocalMisuse, PeerFault, Reason
from .rdma_config import AUTO, MTUS, ROCE_V1, ROCE_V2, Gid, RdmaConfig, choose_gid
from .rdma_status import state_name
from .rdma_verbs import EVENT_FILE, INSTALL, Holder, device_names, load

if TYPE_CHECKING:
    from .rdma_records import Join

PORT_ACTIVE: Final = 4
GIDS_AT_MOST: Final = 1024
_channels = threading.Lock()  # one at a time: a new one is known by its descriptor
_KINDS: Final = {0: ROCE_V1, 1: ROCE_V1, 2: ROCE_V2}  # IBV_GID_TYPE_* as /sys names them
MIN_RNR_TIMER: Final = 12  # 0.64 ms; a receive queue never runs dry, so this is for a peer that breaks the rules


@dataclass(frozen=True, slots=True)
class PortFacts:
    """What the device says of the port: MTU in bytes, whether it is Ethernet, and its LID on InfiniBand."""

    mtu: int
    ethernet: bool
    lid: int


class Device(Holder):
    """An open device with a port that is up. Raises `ConfigError` naming what is absent, down or forbidden."""

    def __init__(self, config: RdmaConfig) -> None:
        super().__init__()
        self.config = config
        self._library = load()
        self.name = _device_of(config)
        try:
            with _channels:
                before = _event_files()
                self.context = self._own("context", self._library.device.Context(name=self.name))
                self._events_fd = next(iter(_event_files() - before), -1)
        except self._library.Error as error:
            raise ConfigError(
                f"can't open rdma device {self.name}: {_words(error)}; may this user open /dev/infiniband/uverbs*?"
            ) from None
        try:
            self.port = self._look_at_port()
            self.gid("")  # that there is one
        except ConfigError:
            self.close()
            raise

    def _look_at_port(self) -> PortFacts:
        name, number = self.name, self.config.port
        try:
            port = self.context.query_port(number)
        except self._library.Error as error:
            raise ConfigError(f"rdma device {name} has no port {number}: {_words(error)}") from None
        if port.state != PORT_ACTIVE:
            raise ConfigError(f"rdma device {name} port {number} is not active: bring its interface up and see `rdma link`")
        return PortFacts(MTUS[port.active_mtu - 1], port.link_layer == self._library.enums.IBV_LINK_LAYER_ETHERNET, port.lid)

    def gid(self, near: str) -> Gid:
        """Our GID for a peer that is reached from our address `near`. Raises `ConfigError`."""
        return choose_gid(self.gids(), self.config.gid_index, near)

    def gids(self) -> list[Gid]:
        """The port's GID table by one call of the kernel; /sys has a thousand files for it. Raises `ConfigError`."""
        self.check()
        try:
            table = self.context.query_gid_table(GIDS_AT_MOST)
        except self._library.Error as error:
            raise ConfigError(f"can't read the GIDs of rdma device {self.name}: {_words(error)}") from None
        return [
            Gid(entry.gid_index, _one_word(entry.gid_str), _KINDS[entry.gid_type], _interface(entry.ndev_ifindex))
            for entry in table
            if entry.port_num == self.config.port and entry.gid_type in _KINDS
        ]

    @property
    def mtu(self) -> int:
        """The most bytes a packet that we offer: the port's, or less by configuration."""
        return self.port.mtu if self.config.mtu == AUTO else min(int(self.config.mtu), self.port.mtu)

    def events(self) -> list[int]:
        """The asynchronous events (IBV_EVENT_*) that came since the last call: a refused write, a port that went down."""
        self.check()
        found: list[int] = []
        while self._events_fd >= 0 and wait_io(self._events_fd, POLLIN, -1, 0, 0) & 1:
            try:
                event = self.context.get_async_event()
            except self._library.Error:  # another end of this device was faster
                break
            found.append(int(event.event_type))
            event.ack()  # or what it is about could never be destroyed
        return found

    def domain(self) -> Domain:
        """A protection domain, for one session. Raises `ConfigError`."""
        return self._part(Domain(self))

    def describe(self) -> dict[str, object]:
        """Device, port and what its port is, as logs and `doctor` print it."""
        layer = "Ethernet" if self.port.ethernet else "InfiniBand"
        return {"device": self.name, "port": self.config.port, "link_layer": layer, "port_mtu": self.port.mtu}


def _one_word(text: object) -> str:
    """What is an attribute in some versions of pyverbs and a method in others."""
    return str(text() if callable(text) else text)


def _interface(index: int) -> str:
    """The name of a network interface; "" for none, or one that is gone."""
    try:
        return socket.if_indextoname(index) if index else ""
    except OSError:
        return ""


def _device_of(config: RdmaConfig) -> str:
    names = device_names()
    if not names:
        raise ConfigError(f"no RDMA device here (`rdma link` lists none): load its driver, or rdma_rxe for Soft-RoCE; {INSTALL}")
    if config.device == AUTO:
        if len(names) > 1:
            raise ConfigError(f"rdma device is not set, and there are {', '.join(names)}: choose one")
        return names[0]
    if config.device not in names:
        raise ConfigError(f"no rdma device {config.device}; there are {', '.join(names)}")
    return config.device


def roce_of(gid: Gid, ethernet: bool) -> tuple[int, int]:
    """(RoCE version, address family) of a GID: (0, 0) on InfiniBand."""
    if not ethernet:
        return 0, 0
    return {ROCE_V2: 2, ROCE_V1: 1}.get(gid.kind, 0), gid.address.version


class MemoryRegion:
    """Registered memory: its keys, until it is dropped."""

    __slots__ = ("address", "length", "lkey", "rkey", "thing")

    def __init__(self, thing: Any, address: int, length: int) -> None:
        self.thing = thing
        self.address = address
        self.length = length
        self.lkey: int = thing.lkey
        self.rkey: int = thing.rkey


class Domain(Holder):
    """The protection domain of one session, its completion channel, and the memory registered in it."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        device.check()
        self.device = device
        self._kept: dict[int, object] = {}
        self._library = library = load()
        try:
            self.pd = self._own("pd", library.pd.PD(device.context))
            with _channels:
                before = _event_files()
                self.channel = self._own("channel", library.cq.CompChannel(device.context))
                self.fd = _new_one(before, _event_files())
            os.set_blocking(self.fd, False)
        except (library.Error, ConfigError) as error:
            self.close()
            raise ConfigError(f"can't use rdma device {device.name}: {_words(error)}") from None

    def register(self, address: int, length: int, keep: object, writable: bool = False, remote: bool = False) -> MemoryRegion:
        """Registers `length` bytes at `address`, which lie in `keep`: it lives as long as the device may reach them. `writable`:
        by this host's device; `remote`: by the peer. Raises `ConfigError`."""
        self.check()
        access = self._library.remote_write if remote else self._library.local_write if writable else 0
        try:
            thing = self._library.mr.MR(self.pd, length, access, address=address)
        except self._library.Error as error:
            raise ConfigError(
                f"can't register {length} bytes with rdma device {self.device.name}: {_words(error)}; "
                "raise the memlock limit (ulimit -l, LimitMEMLOCK=)"
            ) from None
        self._kept[id(thing)] = keep
        return MemoryRegion(self._own("mr", thing), address, length)

    def queue_pair(self, receives: int, sends: int, remote_write: bool) -> QueuePair:
        """A queue pair of this domain. Raises `ConfigError`."""
        return self._part(QueuePair(self, receives, sends, remote_write))

    def close(self) -> None:
        """See `Holder.close`. Memory of a region that the kernel would not let go of is kept with it."""
        super().close()
        if not self.refused:
            self._kept.clear()

    def revoke(self, region: MemoryRegion) -> None:
        """Deregisters: after this no key of the region reaches any memory. Raises `PeerFault` (`link_error`) when the kernel
        refuses: then the memory may still be written."""
        self.check()
        try:
            self._drop("mr", region.thing)
        except self._library.Error as error:
            raise PeerFault(Reason.LINK_ERROR, f"can't revoke a memory key: {_words(error)}") from None
        self._kept.pop(id(region.thing), None)


def _new_one(before: set[int], after: set[int]) -> int:
    """The descriptor of a completion channel: the one that came with it, since pyverbs does not say. Raises `ConfigError`."""
    fresh = after - before
    if len(fresh) != 1:
        raise ConfigError(f"{len(fresh)} descriptors appeared with a completion channel, not one")
    return fresh.pop()


def _event_files() -> set[int]:
    """The descriptors of this process that are verbs event channels."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}") == EVENT_FILE:
                found.add(int(name))
        except OSError:  # closed since it was listed, such as the listing's own
            continue
    return found


def _words(error: Exception) -> str:
    """A pyverbs error in one line."""
    code = getattr(error, "error_code", None)
    if isinstance(code, int) and code > 0:
        return os.strerror(code)
    return " ".join(str(error).split()).rstrip(".")


class QueuePair(Holder):
    """One reliable-connected queue pair with its two completion queues, from INIT to its end. `receives`: how many receives it
    holds; `sends`: how many sends may be unfinished."""

    def __init__(self, domain: Domain, receives: int, sends: int, remote_write: bool) -> None:
        super().__init__()
        domain.check()
        self.domain = domain
        self._library = library = load()
        config = domain.device.config
        self._access = library.remote_write if remote_write else library.local_write
        context = domain.device.context
        try:
            self._receive_queue = self._own("cq", library.cq.CQ(context, receives + 1, None, domain.channel))
            self._send_queue = self._own("cq", library.cq.CQ(context, sends + 1))
            self.inline_bytes, self._pair = self._make(config.inline_bytes, receives, sends)
            attributes = library.qp.QPAttr(port_num=config.port)
            attributes.qp_access_flags = self._access
            self._pair.to_init(attributes)
        except library.Error as error:
            self.close()
            where = domain.device.name
            raise ConfigError(f"can't make an rdma queue pair on {where}: {_words(error)}; lower queue_depth") from None
        self.number: int = self._pair.qp_num
        self.sends = sends
        self.row_received = library.row_received
        self.psn = secrets.randbelow(1 << 24)
        self._posted: dict[int, Any] = {}
        self._unfinished = 0

    def _make(self, inline: int, receives: int, sends: int) -> tuple[int, Any]:
        """A queue pair with as much inline room as is asked for, or with none where the device has less; what it is, is
        printed."""
        library = self._library
        for room in dict.fromkeys((inline, 0)):
            cap = library.qp.QPCap(max_send_wr=sends, max_recv_wr=receives, max_send_sge=2, max_recv_sge=1, max_inline_data=room)
            init = library.qp.QPInitAttr(
                qp_type=library.enums.IBV_QPT_RC, scq=self._send_queue, rcq=self._receive_queue, cap=cap, sq_sig_all=1
            )
            try:
                return room, self._own("qp", library.qp.QP(self.domain.pd, init))
            except library.Error:
                if room == 0:
                    raise
        raise AssertionError

    def connect(self, ours: Join, theirs: Join, gid_index: int) -> None:
        """To RTS, joined with the peer's queue pair. Raises `PeerFault` (`link_error`) when the device refuses what the peer
        said."""
        self.check()
        library, config = self._library, self.domain.device.config
        try:
            a = library.qp.QPAttr(port_num=config.port)
            a.qp_access_flags = self._access
            a.dest_qp_num = theirs.number
            a.path_mtu = min(ours.mtu, theirs.mtu)
            a.rq_psn, a.sq_psn = theirs.psn, ours.psn
            a.timeout, a.retry_cnt, a.rnr_retry = config.timeout, config.retry_count, config.rnr_retry
            a.min_rnr_timer = MIN_RNR_TIMER
            a.max_rd_atomic = a.max_dest_rd_atomic = 1
            remote = library.addr.GID(_gid_text(theirs.gid))
            route = library.addr.GlobalRoute(
                dgid=remote, sgid_index=gid_index, hop_limit=64, traffic_class=config.traffic_class
            )
            # InfiniBand within one subnet goes by LID alone; RoCE and anything routed needs the global route.
            is_global = ours.ethernet or ours.gid[:8] != theirs.gid[:8]
            a.ah_attr = library.addr.AHAttr(
                port_num=config.port, is_global=int(is_global), gr=route, dlid=theirs.lid, sl=config.service_level
            )
            self._pair.to_rts(a)
        except library.Error as error:
            peer = _gid_text(theirs.gid)
            raise PeerFault(Reason.LINK_ERROR, f"can't connect the queue pair to {peer}: {_words(error)}") from None

    # ---- work ---------------------------------------------------------------------------------------------------

    def post_receive(self, number: int, address: int, length: int, lkey: int) -> None:
        """Posts receive buffer `number`, the same one each time it is named."""
        request = self._posted.get(number)
        if request is None:
            wr = self._library.wr
            request = self._posted[number] = wr.RecvWR(number, 1, [wr.SGE(address, length, lkey)])
        self._guarded(self._pair.post_recv, request)

    def post_send(self, pieces: list[tuple[int, int, int]]) -> None:
        """A SEND of (address, length, lkey) pieces."""
        self._post(self._library.enums.IBV_WR_SEND, pieces, None)

    def post_row(self, pieces: list[tuple[int, int, int]], address: int, rkey: int, immediate: int) -> None:
        """A WRITE_WITH_IMM of (address, length, lkey) pieces to `address` at the peer."""
        self._post(self._library.enums.IBV_WR_RDMA_WRITE_WITH_IMM, pieces, (address, rkey, immediate))

    def _post(self, opcode: int, pieces: list[tuple[int, int, int]], remote: tuple[int, int, int] | None) -> None:
        wr = self._library.wr
        flags = self._library.enums.IBV_SEND_INLINE if sum(piece[1] for piece in pieces) <= self.inline_bytes else 0
        request = wr.SendWR(opcode=opcode, num_sge=len(pieces), sg=[wr.SGE(*piece) for piece in pieces], send_flags=flags)
        if remote is not None:
            request.set_wr_rdma(remote[1], remote[0])
            request.imm_data = remote[2]
        self._guarded(self._pair.post_send, request)
        self._unfinished += 1

    def _guarded(self, post: Any, request: Any) -> None:
        self.check()
        try:
            post(request)
        except self._library.Error as error:
            raise PeerFault(Reason.LINK_ERROR, f"the queue pair took no work: {_words(error)}") from None

    def received(self, most: int) -> list[Any]:
        """Up to `most` completions of receives, in order: status, opcode, wr_id, byte_len, imm_data, vendor_err of each."""
        self.check()
        done: list[Any] = self._receive_queue.poll(most)[1]
        return done

    def finished(self, most: int) -> list[Any]:
        """Up to `most` completions of sends, in order."""
        self.check()
        done: list[Any] = self._send_queue.poll(most)[1]
        self._unfinished -= len(done)
        return done

    @property
    def unfinished(self) -> int:
        """Sends whose completion was not seen yet."""
        return self._unfinished

    # ---- sleeping -----------------------------------------------------------------------------------------------

    def arm(self) -> None:
        """The next completion of a receive makes the channel readable. Look once more before sleeping."""
        self.check()
        self._receive_queue.req_notify()

    def take_event(self) -> None:
        """Takes what made the channel readable, if anything did."""
        self.check()
        while wait_io(self.domain.fd, POLLIN, -1, 0, 0) & 1:
            try:
                self.domain.channel.get_cq_event(self._receive_queue)
            except self._library.Error:  # somebody else's word for it: nothing there after all
                return
            self._receive_queue.ack_events(1)

    # ---- the end ------------------------------------------------------------------------------------------------

    def fail(self) -> None:
        """To ERR: nothing lands through it any more, and what is posted comes back flushed."""
        self.check()
        try:
            attributes = self._library.qp.QPAttr(qp_state=self._library.enums.IBV_QPS_ERR)
            self._pair.modify(attributes, self._library.enums.IBV_QP_STATE)
        except self._library.Error as error:
            raise PeerFault(Reason.LINK_ERROR, f"the queue pair can't be stopped: {_words(error)}") from None

    @property
    def state(self) -> str:
        """"RTS", "ERR" and so on, as the device says."""
        if self.closed:
            return "CLOSED"
        self.check()
        state: int = self._pair.query(self._library.enums.IBV_QP_STATE)[0].qp_state
        return state_name(state)


def _gid_text(raw: bytes) -> str:
    """Sixteen bytes as pyverbs reads a GID."""
    text = raw.hex()
    return ":".join(text[at : at + 4] for at in range(0, 32, 4))


__all__ = ["Device", "Domain", "LocalMisuse", "MemoryRegion", "PortFacts", "QueuePair", "roce_of"]
