"""What a configuration means, in a few lines for people: `pp1q daemon --check` without --json.

Between `settings` and the command. Pure functions of a checked configuration; every setting is in `describe`, not here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from ..engine import terms_ahead
from ..session.negotiate import Role
from ..session.shards import REPLICATE

if TYPE_CHECKING:
    from .settings import DaemonConfig, DraftSettings, GroupSettings, PeerSettings

_LABEL: Final = 9
_BOOT_NONCE: Final = 1  # no size depends on it


def meaning(config: DaemonConfig) -> list[str]:
    """One line for each of: role, socket, slots, every peer, group, rdma, metrics, breaker. `check_keys` has been called."""
    daemon = config.daemon
    uids = ", ".join(map(str, daemon.allow_uids))
    metrics = "off" if daemon.metrics is None else f"http://{_host(daemon.metrics.host)}:{daemon.metrics.port}/metrics"
    lines = [
        ("role", f"{daemon.role} {daemon.name}, idle {daemon.idle}, log level {daemon.log_level}"),
        ("socket", f"{daemon.socket}, mode 0o{daemon.socket_mode:o}, for uid {uids}"),
        ("slots", _slots(config)),
        *(("peer", _peer(config, peer)) for peer in config.peers),
    ]
    if config.group.size > 1:
        group = config.group
        lines.append(("group", f"rank {group.rank} of {group.size}, {group.mode}, {_way(config, group)}"))
    if config.draft.size > 1:
        lines.append(("draft", _draft(config)))
    if config.rdma is not None:
        lines.append(("rdma", ", ".join(f"{name} {value}" for name, value in config.rdma.describe().items())))
    lines.append(("metrics", metrics))
    if daemon.role is Role.RECEIVER and not config.group.rank:  # who decides whether a STEP is sent
        lines.append(("breaker", _breaker(config)))
    if config.capture is not None:
        kept = config.capture
        what = "without tokens and q" if kept.redact else "with all tokens and q"
        lines.append(("capture", f"{kept.file}, {kept.files} files of {kept.file_mib} MiB, {what}"))
    return [f"  {label:<{_LABEL}}{text}" for label, text in lines]


def slot_bytes(config: DaemonConfig) -> int:
    """Bytes of slot memory of this daemon, for all of its targets."""
    if config.draft.rank:  # its own range of each row, or no row at all
        hellos = [config.hello(peer, _BOOT_NONCE) for peer in config.peers]
    elif config.daemon.role is Role.LEADER:  # a draft puts whole rows, whoever gets which part
        hellos = [replace(config.hello(peers[0], _BOOT_NONCE), group_mode=REPLICATE, rank=0) for peers in config.targets()]
    elif config.peers:
        hellos = [config.hello(config.peers[0], _BOOT_NONCE)]
    else:
        hellos = [config.group_hello(_BOOT_NONCE)]
    return sum(terms_ahead(hello).geometry().total_bytes for hello in hellos)


def _slots(config: DaemonConfig) -> str:
    session = config.session
    if config.draft.rank and not config.peers:
        return "none: draft rank 0 alone sends rows"
    targets = f" for each of {len(config.targets())} targets" if len(config.targets()) > 1 else ""
    shape = f"depth {session.depth}, vocabulary {session.vocab_size}, {' and '.join(session.representations)}"
    return f"{session.max_slots} slots{targets} take {slot_bytes(config) / 1e6:.1f} MB: {shape}"


def _peer(config: DaemonConfig, peer: PeerSettings) -> str:
    ranks = f", {peer.group.mode} group of {peer.group.size}" if peer.group.size > 1 else ""
    split = f", rank {peer.group.rank}" if peer.group_name is not None else ""
    return f"{peer.name}: {_way(config, peer)}, {peer.link} link{ranks}{split}"


def _draft(config: DaemonConfig) -> str:
    draft = config.draft
    names = ", ".join(config.target_names())
    rows = "sends its own range to" if config.draft_shards else "follows" if draft.rank else "draws for"
    return f"rank {draft.rank} of {draft.size}, {rows} {names}, {_way(config, draft)}"


def _way(config: DaemonConfig, end: PeerSettings | GroupSettings | DraftSettings) -> str:
    way = f"listens on {end.listen}" if end.listen is not None else f"connects to {end.connect}"
    return f"{way} {'without keys' if config.keys is None else 'with keys'}"


def _breaker(config: DaemonConfig) -> str:
    breaker = config.breaker
    if not breaker.enabled:
        return "off"
    within = f" within {breaker.window_s:g} s" if breaker.window_s else ""
    return f"opens after {breaker.discards} discards in a row{within}, probes after {breaker.probe_after_s:g} s"


def _host(host: str) -> str:
    return f"[{host}]" if ":" in host else host
