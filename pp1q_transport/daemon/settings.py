"""What a daemon's configuration holds once it is checked, and what of it may change while the daemon runs.

Between `config`, which reads and judges the file, and the daemon. Immutable; opens no file but the key files in `keys_for`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields, is_dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import ConfigError
from ..keys import KeyConfig, connector_keys, listener_keys, load_secret
from ..keys import public_key as one_key
from ..links.rdma_config import RdmaConfig
from ..session.hello import Hello, Role, make_hello
from ..session.shards import GROUP_MODES, REPLICATE, VOCABULARY

MAX_PEERS: Final = 16
MAX_RANKS: Final = 8

# What a reload changes while the daemon runs. All else is named as needing a restart.
LIVE: Final = ("daemon.allow_uids", "daemon.drain_s", "daemon.log_level", "breaker.", "watch.")


class IdleStrategy(str, Enum):
    """How the daemon waits: asleep in the kernel, burning its core, or burning it for a while first."""

    BLOCK = "block"
    SPIN = "spin"
    SPIN_THEN_BLOCK = "spin-then-block"

    def __str__(self) -> str:
        return self.value


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricsAddress:
    """Where the metrics port listens."""

    host: str
    port: int  # 0: any


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonSettings:
    """[daemon]: who this process is, and who may attach to it."""

    role: Role
    name: str
    socket: Path
    allow_uids: tuple[int, ...]
    socket_mode: int = 0o600
    idle: IdleStrategy = IdleStrategy.BLOCK
    metrics: MetricsAddress | None = None
    log_level: str = "info"
    drain_s: float = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionSettings:
    """[session]: what HELLO states; names, bounds and defaults are those of `session.hello.Hello`."""

    vocab_size: int
    depth: int
    support: int
    batch_requests: int
    batches_in_flight: int
    max_slots: int
    draft_identity: str
    target_identity: str
    draft_kind: str
    representations: tuple[str, ...]
    draw_proof: bool
    max_context_tokens: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """[keys]: CURVE keys, as files: `own` (.secret), `allow` (an allow-list, or public keys and .public files one by one) for
    what listens, `server` (a public key or .public file) for what connects."""

    own: Path
    allow: Path | tuple[str, ...] | None = None
    server: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupSettings:
    """[group]: the receivers of one target. Rank 0 listens for the others when there are any."""

    size: int = 1
    rank: int = 0
    mode: str = "replicate"
    listen: str | None = None
    connect: str | None = None
    server: str | None = None  # instead of [keys] server


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftSettings:
    """[draft]: the ranks of one tensor-parallel draft. Rank 0 listens for the others when there are any; `targets` names those of
    rank 0's that another rank follows, where it has no link of its own to them."""

    size: int = 1
    rank: int = 0
    listen: str | None = None
    connect: str | None = None
    server: str | None = None  # instead of [keys] server
    targets: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerSettings:
    """One [[peer]]: a daemon of the other role. Exactly one of `listen` and `connect` is its control endpoint."""

    name: str
    listen: str | None = None
    connect: str | None = None
    link: str = "tcp"
    server: str | None = None  # instead of [keys] server
    group_name: str | None = None  # at a leader: the same for all ranks of a group that each have a link of their own to it
    group: GroupSettings = GroupSettings()  # of the receiver at the far end (a leader states it; a receiver's is its own)


@dataclass(frozen=True, slots=True, kw_only=True)
class BreakerSettings:
    """[breaker]: see `session.breaker.Breaker`."""

    enabled: bool = True
    discards: int = 8
    window_s: float = 60.0  # 0: however long it took
    probe_after_s: float = 1.0
    probe_most_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchSettings:
    """[watch]: how long a ready proposal may be held before its slot is quarantined (0: for ever)."""

    release_after_s: float = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CaptureSettings:
    """[capture]: the frames of every link of this daemon, in up to `files` pcapng files."""

    file: Path
    file_mib: int = 256
    files: int = 4
    redact: bool = False  # no tokens, no q


class Changes(NamedTuple):
    """What differs between two configurations, as "table.key": what a reload applies, and what needs a restart."""

    live: tuple[str, ...]
    restart: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """A whole configuration, checked. `source` names its file in errors; paths in it are resolved."""

    source: str
    daemon: DaemonSettings
    session: SessionSettings
    keys: KeySettings | None
    peers: tuple[PeerSettings, ...]
    group: GroupSettings
    breaker: BreakerSettings
    watch: WatchSettings
    draft: DraftSettings = DraftSettings()
    rdma: RdmaConfig | None = None
    capture: CaptureSettings | None = None

    def hello(self, peer: PeerSettings, boot_nonce: int) -> Hello:
        """The HELLO this daemon states to `peer`. Raises `ConfigError`."""
        group = self.group if self.daemon.role is Role.RECEIVER else peer.group
        options: dict[str, object] = {item.name: getattr(self.session, item.name) for item in fields(self.session)}
        options |= {"link_kinds": (peer.link,), "group_size": group.size, "group_mode": group.mode, "rank": group.rank}
        return make_hello(self.daemon.role, boot_nonce, **options)

    def targets(self) -> list[list[PeerSettings]]:
        """The peers by target, in order of their first entry: one each, but for the ranks of a group whose rows are split between
        them, which are one target together, by rank."""
        found: dict[str, list[PeerSettings]] = {}
        for peer in self.peers:
            split = peer.group_name is not None and peer.group.mode == VOCABULARY
            found.setdefault(f"group {peer.group_name}" if split else f"peer {peer.name}", []).append(peer)
        return [sorted(peers, key=lambda peer: peer.group.rank) for peers in found.values()]

    def target_names(self) -> list[str]:
        """What the ranks of a draft call the targets, in this daemon's order: a peer by its name, ranks of a group by its."""
        if self.draft.rank and not self.peers:
            return list(self.draft.targets)
        return [peers[0].group_name if self.is_split(peers) else peers[0].name for peers in self.targets()]  # type: ignore[misc]

    @staticmethod
    def is_split(peers: list[PeerSettings]) -> bool:
        """Whether a target's rows are split between its ranks."""
        return peers[0].group_name is not None and peers[0].group.mode == VOCABULARY

    @property
    def draft_shards(self) -> bool:
        """Whether every rank of the draft sends its own range of each row to the target's rank of the same number."""
        if self.draft.size == 1 or not self.peers:
            return False
        return all(self.is_split(peers) and len(peers) == 1 for peers in self.targets())

    def draft_hello(self, boot_nonce: int, target: str) -> Hello:
        """The HELLO of this daemon's end of a link between ranks of its draft. There is one for each target, which the target's
        identity names."""
        options: dict[str, object] = {item.name: getattr(self.session, item.name) for item in fields(self.session)}
        draft = self.draft
        options["target_identity"] = f"{self.session.target_identity} at {target}"
        options |= {"link_kinds": ("tcp",), "group_size": draft.size, "rank": draft.rank}
        options["group_mode"] = VOCABULARY if self.draft_shards else REPLICATE
        return make_hello(Role.DRAFT_PEER if draft.rank else Role.DRAFT_LEADER, boot_nonce, **options)

    def group_hello(self, boot_nonce: int) -> Hello:
        """The HELLO of this daemon's end of its group's links: the coordinator's at rank 0, a member's elsewhere."""
        options: dict[str, object] = {item.name: getattr(self.session, item.name) for item in fields(self.session)}
        group = self.group
        options |= {"link_kinds": ("tcp",), "group_size": group.size, "group_mode": group.mode, "rank": group.rank}
        return make_hello(Role.MEMBER if group.rank else Role.COORDINATOR, boot_nonce, **options)

    def keys_for(self, end: PeerSettings | GroupSettings | DraftSettings) -> KeyConfig | None:
        """The keys of this daemon's end towards a peer, group or draft, read from their files now. Raises `ConfigError`."""
        if self.keys is None:
            return None
        if end.connect is not None:
            server = end.server or self.keys.server
            assert server is not None  # config has seen to it
            return connector_keys(self.keys.own, server)
        if isinstance(self.keys.allow, Path):
            return listener_keys(self.keys.own, self.keys.allow)
        pair = load_secret(self.keys.own)
        return KeyConfig(pair.public, pair.secret, allow=frozenset(one_key(item) for item in self.keys.allow or ()))

    def check_keys(self) -> None:
        """Reads every key file that this daemon will need. Raises `ConfigError`."""
        ends: list[PeerSettings | GroupSettings | DraftSettings] = [*self.peers]
        ends += [end for end in (self.group, self.draft) if end.listen is not None or end.connect is not None]
        for end in ends:
            try:
                self.keys_for(end)
            except ConfigError as fault:
                raise ConfigError(f"{self.source}: [keys] {fault}") from None

    def reloadable(self, new: DaemonConfig) -> Changes:
        """The keys in which `new` differs: those that `with_live` takes over, and those that need a restart."""
        before, after = _flat(self.describe()), _flat(new.describe())
        changed = [key for key in {**before, **after} if before.get(key, _ABSENT) != after.get(key, _ABSENT)]
        return Changes(tuple(filter(_is_live, changed)), tuple(key for key in changed if not _is_live(key)))

    def with_live(self, new: DaemonConfig) -> DaemonConfig:
        """This configuration with what can change live taken from `new`, and nothing else."""
        parts = {key.split(".")[1]: getattr(new.daemon, key.split(".")[1]) for key in LIVE if key.startswith("daemon.")}
        return replace(self, daemon=replace(self.daemon, **parts), breaker=new.breaker, watch=new.watch)

    def describe(self) -> dict[str, object]:
        """Every setting as plain JSON values, defaults included; peers by name. Holds paths of keys, no keys' contents."""
        tables: dict[str, object] = {
            item.name: _plain(getattr(self, item.name)) for item in fields(self) if item.name not in ("source", "peers")
        }
        tables["peers"] = {peer.name: _plain(peer) for peer in self.peers}
        return tables


_ABSENT: Final = object()


def _is_live(key: str) -> bool:
    return any(key.startswith(live) if live.endswith(".") else key == live for live in LIVE)


def _plain(value: object) -> object:
    if is_dataclass(value) and not isinstance(value, type):
        return {key: _plain(item) for key, item in asdict(value).items()}
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def _flat(tables: dict[str, object], prefix: str = "") -> dict[str, object]:
    flat: dict[str, object] = {}
    for key, value in tables.items():
        if isinstance(value, dict):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


__all__ = [
    "BreakerSettings", "CaptureSettings", "Changes", "DaemonConfig", "DaemonSettings", "DraftSettings", "GROUP_MODES",
    "GroupSettings",
    "IdleStrategy",
    "KeySettings", "LIVE", "MAX_PEERS", "MAX_RANKS", "MetricsAddress", "PeerSettings", "SessionSettings",
    "WatchSettings",
]  # fmt: skip
