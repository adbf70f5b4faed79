"""A whole daemon out of its configuration: engines, port, socket, metrics, loop; and what it says of itself.

Between `pp1q daemon` and the parts. Decides nothing about proposals; what changes on a reload is `settings`' to say.
"""

from __future__ import annotations

import os
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..counters import Counters
from ..engine import Engine, EngineConfig, Idle, new_boot_nonce, terms_ahead
from ..errors import ConfigError, PeerFault, Reason
from ..local.attach import AttachServer, Flag, Geometry, Pending
from ..local.attach import Role as ClientRole
from ..logs import logger
from ..session.breaker import Breaker
from ..session.negotiate import Role
from ..session.shards import GROUP_MODES, REPLICATE, VOCABULARY
from . import config as configuration
from .capturing import open_capture
from .discards import DiscardLines
from .drafting import DraftRanks
from .following import FollowedTarget, FollowPort
from .grouping import GroupLinks
from .leading import DraftPort, ServedLeader
from .leading_group import ServedGroup
from .loop import Loop
from .membership import MemberPort, MemberRank
from .notify import Notifier
from .owning import OwnMemberPort, OwnRank
from .receiving import TargetPort
from .served import ServedReceiver
from .sharing import OwnShare
from .status import Status, encode_status

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..links.rdma_config import RdmaConfig
    from ..local.attach import Attached
    from ..session.hello import Hello
    from .clients import ClientPort
    from .settings import BreakerSettings, DaemonConfig, DraftSettings, GroupSettings, PeerSettings
    from .status import BreakerStatus, ClientStatus, GroupStatus, SessionStatus

CLIENT_ROLES: Final = {ClientRole.LEADER_DRAFT: "draft", ClientRole.RECEIVER_TARGET: "target"}
NS: Final = 1_000_000_000
End = ServedLeader | ServedGroup | FollowedTarget | ServedReceiver | MemberRank


class Service:
    """One daemon. Make it, `run` it, `close` it. Raises `ConfigError` for what can't be had (ports, memory, the socket)."""

    def __init__(self, config: DaemonConfig, set_level: Callable[[str], None] | None = None) -> None:
        self.config = config
        self.counters = Counters()
        self.started_ns = monotonic_ns()
        self._set_level = set_level
        self._attached_ns = 0
        self._log = logger(daemon=config.daemon.name)
        self._boot_nonce = new_boot_nonce()
        self._closers: list[Callable[[], None]] = []
        try:
            self._build()
        except BaseException:
            self.close()
            raise

    # ---- building -----------------------------------------------------------------------------------------------

    def _build(self) -> None:
        config = self.config
        self.capture = open_capture(config.capture) if config.capture is not None else None
        if self.capture is not None:
            self._closers.append(self.capture.close)  # the first of them is called last
        self.server = AttachServer(
            str(config.daemon.socket), frozenset(config.daemon.allow_uids), self.counters, mode=config.daemon.socket_mode
        )
        self._closers.append(self.server.close)
        self.ends: list[End] = []
        self.links: GroupLinks | None = None
        self.ranks: DraftRanks | None = None
        self.port: ClientPort
        if config.draft.rank:
            self.port = self._build_followers()
        elif config.daemon.role is Role.LEADER:
            self.port = self._build_leaders()
        elif config.group.rank:
            self.port = self._build_member()
        else:
            self.port = self._build_receiver()
        self.port.release_after_ns = int(config.watch.release_after_s * NS)
        metrics = None
        if config.daemon.metrics is not None:
            from .metrics import MetricsPort  # and with it prometheus_client, which costs a restart some of its time

            metrics = MetricsPort(config.daemon.metrics.host, config.daemon.metrics.port, self.status, self.counters)
            self._closers.append(metrics.close)
        self.metrics = metrics
        notifier = Notifier(counters=self.counters)
        self._closers.append(notifier.close)
        self.loop = Loop(
            self.port,
            self._served(),
            self.server,
            self._welcome,
            config.daemon.idle.value,
            config.daemon.drain_s,
            metrics,
            notifier,
            lone=self.config.group.size == 1 and self.config.draft.size == 1,
        )
        self.loop.on_reload = self.reload
        self._discards = DiscardLines(self._log, lambda: self._sums()[1])
        self.loop.on_rare = self._discards.look
        self._notifier = notifier

    def _engine_config(self, peer: PeerSettings) -> EngineConfig:
        rdma = self.config.rdma if peer.link == "rdma" else None
        return self._engine(self.config.hello(peer, self._boot_nonce), peer, peer.name, rdma)

    def _engine(
        self, hello: Hello, end: PeerSettings | GroupSettings | DraftSettings, name: str, rdma: RdmaConfig | None = None
    ) -> EngineConfig:
        keys = self.config.keys_for(end)
        return EngineConfig(
            hello, end.listen, end.connect, keys, idle=Idle.BLOCK, stubborn=True, name=name, rdma=rdma, capture=self.capture
        )

    def _build_leaders(self) -> DraftPort:
        leaders: list[ServedLeader | ServedGroup] = []
        for peers in self.config.targets():
            configs = [self._engine_config(peer) for peer in peers]
            leader: ServedLeader | ServedGroup
            if self.config.is_split(peers):
                leader = ServedGroup(configs, [peer.name for peer in peers], len(leaders))
            else:
                leader = ServedLeader(configs[0], len(leaders), peers[0].name)
                leader.prepare(terms_ahead(configs[0].hello))
            self._closers.append(leader.close)
            leader.region.seal_size()
            leaders.append(leader)
        self.ends.extend(leaders)
        port = DraftPort(leaders, self.counters)
        if self.config.draft.size > 1:
            configs = [self._draft_config(name) for name in self.config.target_names()]
            self.ranks = port.ranks = DraftRanks(configs, leaders, self.counters, port.lost_rank)
            self._closers.append(self.ranks.close)
        return port

    def _build_followers(self) -> FollowPort:
        targets = []
        for number, name in enumerate(self.config.target_names()):
            peer = self.config.targets()[number][0] if self.config.peers else None
            share = None if peer is None else OwnShare(self._engine_config(peer), peer.name)
            target = FollowedTarget(self._draft_config(name), number, name, share)
            self._closers.append(target.close)
            if target.region is not None:
                target.region.seal_size()
            targets.append(target)
        self.ends.extend(targets)
        return FollowPort(targets, self.counters)

    def _draft_config(self, target: str) -> EngineConfig:
        return self._engine(self.config.draft_hello(self._boot_nonce, target), self.config.draft, "draft0")

    def _build_receiver(self) -> TargetPort:
        engine_config = self._engine_config(self.config.peers[0])
        receiver = ServedReceiver(engine_config)
        self._closers.append(receiver.close)
        receiver.prepare(terms_ahead(engine_config.hello))
        receiver.region.seal_for_readers()
        self.ends.append(receiver)
        if self.config.group.size > 1:
            self.links = GroupLinks(self._group_config(), self.counters)
            self._closers.append(self.links.close)
            receiver.group = self.links.group
        group = self.links.group if self.links is not None else None
        return TargetPort(receiver, self.counters, _breaker_of(self.config.breaker, self._boot_nonce), group)

    def _group_config(self) -> EngineConfig:
        return self._engine(self.config.group_hello(self._boot_nonce), self.config.group, "rank0")

    def _build_member(self) -> MemberPort:
        if self.config.peers:
            own = OwnRank(self._group_config(), self._engine_config(self.config.peers[0]), self.counters)
            return self._member_port(own, OwnMemberPort(own, self.counters))
        rank = MemberRank(self._group_config(), self.counters)
        return self._member_port(rank, MemberPort(rank, self.counters))

    def _member_port(self, rank: MemberRank, port: MemberPort) -> MemberPort:
        self._closers.append(rank.close)
        rank.region.seal_for_readers()
        self.ends.append(rank)
        return port

    def _served(self) -> list[tuple[Engine, Callable[[], int]]]:
        """Every engine with what serves it in a turn. Votes come before the receiver's own frames, and what these leave for the
        other ranks goes out after them. Peers' faults are counted and logged below: the daemon outlives them."""
        served: list[tuple[Engine, Callable[[], int]]] = []
        for end in self.ends:
            if isinstance(end, MemberRank):
                served.append((end.engine, end.serve))
                if isinstance(end, OwnRank):
                    served.append((end.own.engine, _nothing))
            elif isinstance(end, ServedReceiver):
                served.append((end.engine, end.serve_once if self.links is None else self._serve_group))
            elif isinstance(end, FollowedTarget):
                served += [(end.engine, end.serve), *((engine, _nothing) for engine in end.engines[1:])]
            else:
                served.extend((engine, engine.poll) for engine in end.engines)
        if self.ranks is not None:
            served.extend((link.engine, link.serve) for link in self.ranks.links)
        if self.links is not None:
            served.extend((link.engine, _nothing) for link in self.links.links)
        return served

    def _serve_group(self) -> int:
        receiver, links = self.ends[0], self.links
        assert isinstance(receiver, ServedReceiver)
        assert links is not None
        moved = links.serve() + receiver.serve_once()
        links.flush()
        return moved

    # ---- clients ------------------------------------------------------------------------------------------------

    def _welcome(self, pending: Pending, now_ns: int) -> None:
        if pending.role == ClientRole.ADMIN:
            self.server.tell(pending, encode_status(self.status()))
            return
        wanted = ClientRole.LEADER_DRAFT if self.config.daemon.role is Role.LEADER else ClientRole.RECEIVER_TARGET
        if pending.role != wanted:
            self.server.refuse(pending, Reason.SEMANTIC_MISMATCH, f"this is a {self.config.daemon.role}'s daemon")
        elif wanted == ClientRole.LEADER_DRAFT and pending.rank != self.config.draft.rank:
            self.server.refuse(pending, Reason.IDENTITY_MISMATCH, f"this is the daemon of draft rank {self.config.draft.rank}")
        elif wanted == ClientRole.RECEIVER_TARGET and pending.rank != self.config.group.rank:
            self.server.refuse(pending, Reason.IDENTITY_MISMATCH, f"this is the daemon of rank {self.config.group.rank}")
        elif self.port.draining:
            self.server.refuse(pending, Reason.CANCELLED, "this daemon is draining")
        elif self.port.attached is not None and not self.port.attached.gone():
            self.server.refuse(pending, Reason.OVERLOAD, f"process {self.port.attached.pid} is attached already")
        else:
            if self.port.attached is not None:
                self.port.poll(now_ns)
                self.port.detach(Reason.PEER_LOST)
            regions = [(end.region.fd, end.region.size) for end in self.ends if end.region is not None]
            try:
                attached = self.server.accept(pending, self._geometry(), regions)
            except (ConfigError, PeerFault) as fault:  # it left, or this host has no descriptors for it
                self.counters.add("clients_refused")
                self._log.warning("client_not_attached", detail=str(fault), pid=pending.pid)
                return
            self._attached_ns = now_ns
            self.port.attach(attached, now_ns)

    def _geometry(self) -> Geometry:
        first = self.ends[0]
        if isinstance(first, OwnRank):
            hello = first.own.engine.config.hello
        elif isinstance(first, FollowedTarget):
            hello = first.engines[-1].config.hello  # a rank of a draft puts its range of each row, or none
        else:
            hello = first.engine.config.hello
        if isinstance(first, ServedLeader | ServedGroup):
            hello = replace(hello, group_mode=REPLICATE, rank=0)  # a draft puts whole rows
        terms = terms_ahead(hello)
        group: GroupSettings | DraftSettings = self.config.group
        mode = GROUP_MODES.index(self.config.group.mode)
        if self.config.draft.rank:
            group, mode = self.config.draft, GROUP_MODES.index(VOCABULARY if self.config.draft_shards else REPLICATE)
        return Geometry(
            vocab_size=terms.vocab_size,
            depth=terms.depth,
            support=terms.support,
            max_slots=terms.max_slots,
            row_bytes=terms.geometry().row_bytes,
            dense_row_bytes=terms.dense_row_bytes,
            group_size=group.size,
            rank=group.rank,
            group_mode=mode,
            flags=Flag.DENSE * terms.dense | Flag.SPARSE * terms.sparse | Flag.DRAW_PROOF * terms.draw_proof,
            targets=len(self.ends),
            max_context_tokens=terms.max_context_tokens,
            boot_nonce=self._boot_nonce,
        )

    # ---- reload -------------------------------------------------------------------------------------------------

    def reload(self) -> None:
        """SIGHUP: reads the file again; what can change live does, the rest is named. A bad file changes nothing."""
        self._notifier.reloading()
        try:
            fresh = configuration.load(self.config.source)
        except ConfigError as error:
            self.counters.add("reloads_refused")
            self._log.error("reload_refused", detail=str(error))
        else:
            self._apply(fresh)
        self._notifier.ready()

    def _apply(self, fresh: DaemonConfig) -> None:
        changes = self.config.reloadable(fresh)
        if changes.restart:
            self._log.warning("needs_restart", keys=list(changes.restart))
        before, self.config = self.config, self.config.with_live(fresh)
        settings = self.config.daemon
        self.server.allow(frozenset(settings.allow_uids))
        self.loop.drain_s = settings.drain_s
        if self._set_level is not None:
            self._set_level(settings.log_level)
        if isinstance(self.port, TargetPort) and before.breaker != self.config.breaker:
            self.port.breaker = _breaker_of(self.config.breaker, self._boot_nonce)
        self.port.release_after_ns = int(self.config.watch.release_after_s * NS)
        self.counters.add("reloads")
        self._log.warning("reloaded", changed=list(changes.live))  # the answer to a signal: not only at log_level "info"

    # ---- running ------------------------------------------------------------------------------------------------

    def run(self) -> bool:
        """Until SIGTERM; returns whether everything under way ended within `drain_s`."""
        self._log.info("daemon_up", role=self.config.daemon.role.value, socket=str(self.config.daemon.socket), pid=os.getpid())
        drained = self.loop.run()
        # Closed last: the last line, when its sessions have ended.
        self._closers[:0] = [lambda: self._log.info("daemon_down", drained=drained), self._discards.say]
        return drained

    def close(self) -> None:
        """Says goodbye to peers and clients and frees everything. Safe to repeat."""
        port = getattr(self, "port", None)
        if port is not None:
            port.part(monotonic_ns())
        while self._closers:
            self._closers.pop()()

    # ---- what it says of itself ---------------------------------------------------------------------------------

    def status(self) -> Status:
        """The daemon at this moment; the counters of all its parts added up."""
        now_ns = monotonic_ns()
        totals, reasons, discards = self._sums()
        port, first = self.port, self.ends[0]
        sums = [end.totals() for end in self.ends if isinstance(end, ServedReceiver | MemberRank)]
        sums += [
            {"ready": end.share.whole_sent, "bytes_ready": end.share.bytes_sent}
            for end in self.ends
            if isinstance(end, FollowedTarget) and end.share is not None
        ]
        if isinstance(port, DraftPort):
            sums.append({"ready": port.whole_sent, "bytes_ready": port.bytes_sent})
        status: Status = {
            "role": self.config.daemon.role.value,
            "name": self.config.daemon.name,
            "version": _version(),
            "pid": os.getpid(),
            "uptime_s": (now_ns - self.started_ns) / NS,
            "draining": port.draining,
            "sessions": self._sessions(now_ns),
            "slots": first.slots_by_state() if isinstance(first, ServedReceiver | MemberRank) else {},
            "clients": self._clients(now_ns),
            "group": self._group_status(),
            "breakers": self._breakers(),
            "totals": totals,
            "reasons": reasons,
            "ready": sum(total["ready"] for total in sums),
            "discarded": totals.get("discarded", 0),
            "rows": sum(end.rows_done() for end in self.ends),
            "bytes_ready": sum(total["bytes_ready"] for total in sums),
            "latency": port.latency.snapshot(),
            "tail": port.tail.snapshot(),
            "loops": self.loop.turns,
            "last_loop_age_s": max(0, now_ns - self.loop.last_turn_ns) / NS,
        }
        if self.config.daemon.role is Role.RECEIVER:  # a leader discards nothing: it is told
            status["discards"] = discards
        return status

    def _sessions(self, now_ns: int) -> list[SessionStatus]:
        """One for each peer, and, in a group or a draft of several ranks, one for each link between these."""
        engines: list[Engine] = []
        for end in self.ends:
            if isinstance(end, ServedLeader | ServedGroup):
                engines += end.engines
            elif isinstance(end, ServedReceiver):
                engines.append(end.engine)
            elif isinstance(end, OwnRank):
                engines.append(end.own.engine)
            elif isinstance(end, FollowedTarget):
                engines += end.engines[1:]
        peers = [peer for target in self.config.targets() for peer in target]
        ends = [(peer.name, peer.link, engine) for engine, peer in zip(engines, peers, strict=True)]
        if isinstance(self.ends[0], MemberRank):
            ends.append(("rank0", "tcp", self.ends[0].engine))
        if self.links is not None:
            ends += [(f"rank{link.rank}", "tcp", link.engine) for link in self.links.links]
        ends += self._draft_links()
        return [_session_status(name, kind, engine, now_ns) for name, kind, engine in ends]

    def _draft_links(self) -> list[tuple[str, str, Engine]]:
        """(name, kind, engine) of the links between the ranks of the draft: by rank and, where there are several, by target."""
        names = self.config.target_names() if self.config.draft.size > 1 else []
        links = [(0, end.name, end.engine) for end in self.ends if isinstance(end, FollowedTarget)]
        for name, ranks in zip(names, self.ranks.targets if self.ranks is not None else [], strict=False):
            links += [(link.rank, name, link.engine) for link in ranks.links]
        return [(f"draft{rank}" if len(names) == 1 else f"draft{rank}-{name}", "tcp", engine) for rank, name, engine in links]

    def _group_status(self) -> GroupStatus | None:
        settings, first = self.config.group, self.ends[0]
        if settings.size == 1:
            return None
        if self.links is not None:
            epoch, is_open, up = self.links.group.epoch, self.links.group.open, self.links.ranks_up
        else:
            assert isinstance(first, MemberRank)
            epoch, is_open, up = first.member.epoch, first.member.open, 2 if first.up else 1
        return {
            "size": settings.size,
            "rank": settings.rank,
            "mode": settings.mode,
            "epoch": epoch,
            "open": is_open,
            "ranks_up": up,
        }

    def _sums(self) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
        sums: tuple[dict[str, int], dict[str, int], dict[str, int]] = ({}, {}, {})
        own = [end.counters for end in self.ends if end.counters is not self.counters]
        own += [end.share.counters for end in self.ends if isinstance(end, FollowedTarget) and end.share is not None]
        own += [end.own.counters for end in self.ends if isinstance(end, OwnRank)]
        for counters in (self.counters, *own):
            for total, part in zip(sums, (counters.totals, counters.reasons, counters.discards), strict=True):
                for name, amount in part.items():
                    total[name] = total.get(name, 0) + amount
        return sums

    def _clients(self, now_ns: int) -> list[ClientStatus]:
        attached: Attached | None = self.port.attached
        if attached is None:
            return []
        since_s = max(0, now_ns - self._attached_ns) / NS
        return [
            {
                "role": CLIENT_ROLES[attached.role],
                "rank": attached.rank,
                "pid": attached.pid,
                "uid": attached.uid,
                "since_s": since_s,
            }
        ]

    def _breakers(self) -> list[BreakerStatus]:
        breaker = self.port.breaker if isinstance(self.port, TargetPort) else None
        if breaker is None:
            return []
        name = self.config.peers[0].name if self.config.peers else "group"
        return [{"peer": name, "state": breaker.state.value, "opened": breaker.opened}]


def _nothing() -> int:
    """For an engine that another one's turn serves."""
    return 0


def _session_status(name: str, kind: str, engine: Engine, now_ns: int) -> SessionStatus:
    session = engine.session
    return {
        "peer": name,
        "up": session is not None,
        "session": session.terms.session if session is not None else 0,
        "link": kind,
        "endpoint": engine.endpoint,
        "since_s": max(0, now_ns - engine.changed_ns) / NS,
        "formed": engine.formed,
        "ended": engine.ended,
    }


def _breaker_of(settings: BreakerSettings, seed: int) -> Breaker | None:
    if not settings.enabled:
        return None
    return Breaker(
        settings.discards,
        int(settings.probe_after_s * NS),
        int(settings.probe_most_s * NS),
        seed,
        int(settings.window_s * NS),
    )


def _version() -> str:
    try:
        return version("pp1q-transport")
    except PackageNotFoundError:  # run from a source tree that nobody installed
        return "0+source"
