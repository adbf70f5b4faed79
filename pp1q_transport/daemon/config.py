"""A daemon's configuration file, read and judged: TOML in, a `DaemonConfig` or one line that says what is wrong.

Between the operator's file and the daemon. Strict: no unknown key, no coercion, no value out of range, no combination that
can't work. Opens the file and the key files it names, and no socket. deploy/examples explains every key. SPEC sections 2 and 9.
"""

from __future__ import annotations

import os
import re
import stat
import tomllib
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path
from typing import Final

from ..endpoints import Endpoint, parse_endpoint
from ..errors import ConfigError, LocalMisuse, shown
from ..keys import is_key
from ..links.rdma_config import RdmaConfig, config_from
from ..session.hello import Hello, Role, make_hello
from ..session.shards import VOCABULARY, range_of
from .capturing import capture_settings
from .settings import (
    GROUP_MODES,
    MAX_PEERS,
    MAX_RANKS,
    BreakerSettings,
    Changes,
    DaemonConfig,
    DaemonSettings,
    DraftSettings,
    GroupSettings,
    IdleStrategy,
    KeySettings,
    MetricsAddress,
    PeerSettings,
    SessionSettings,
    WatchSettings,
)
from .tables import Table

__all__ = [
    "BreakerSettings", "Changes", "DaemonConfig", "DaemonSettings", "DraftSettings", "GroupSettings", "IdleStrategy",
    "KeySettings",
    "MetricsAddress", "PeerSettings", "SessionSettings", "WatchSettings", "load", "parse",
]  # fmt: skip

MAX_FILE_BYTES: Final = 1 << 20
MAX_UIDS: Final = 64
SOCKET_PATH_BYTES: Final = 107  # sun_path without its NUL
SOCKET_MODES: Final = (0o600, 0o660)
LINKS: Final = ("tcp", "shm", "rdma")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")
_TABLES: Final = ("daemon", "session", "keys", "peer", "group", "draft", "breaker", "watch", "rdma", "capture")
_NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_LINE_NAMES: Final = re.compile(r"[ \t]*(\[{1,2}[\w.-]{1,64}\]{1,2}|[\w.-]{1,64}(?=[ \t]*=))")
End = PeerSettings | GroupSettings | DraftSettings
_UID_MOST: Final = (1 << 32) - 2  # the last one is "no user"
_HELLO: Final = {item.name: item.default for item in fields(Hello)}


def load(path: str | Path) -> DaemonConfig:
    """The configuration in a file, its key files read once to see that they serve. Raises `ConfigError`."""
    config = parse(_read(path), str(path))
    config.check_keys()
    return config


def _read(path: str | Path) -> str:
    try:
        with os.fdopen(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as file:
            state = os.fstat(file.fileno())
            if not stat.S_ISREG(state.st_mode):
                raise ConfigError(f"{path} is not a regular file")
            if state.st_mode & stat.S_IWOTH:  # it says who may attach and connect
                raise ConfigError(f"{path} can be written by anybody: run `chmod o-w {path}`")
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as fault:
        raise ConfigError(f"cannot read {path}: {fault.strerror}") from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(f"{path} is larger than {MAX_FILE_BYTES} bytes")
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        raise ConfigError(f"{path} is not a text file") from None


def parse(text: str, source: str) -> DaemonConfig:
    """The configuration in a text; `source` is its file in errors, and relative paths are relative to that file. Reads no other
    file. Raises `ConfigError`."""
    try:
        tables = tomllib.loads(text + "\n")  # so that every error is at a line, the last one's too
    except ValueError as fault:  # TOMLDecodeError, or Python's own for a number of thousands of digits
        raise ConfigError(_twice(text, source, str(fault)) or f"{source} is not TOML: {fault}") from None
    except RecursionError:
        raise ConfigError(f"{source} is not TOML: nested too deeply") from None
    for name in tables:
        if name not in _TABLES:
            raise ConfigError(f"{source}: there is no table [{shown(name)[1:-1]}], only {', '.join(_TABLES)}")
    if "daemon" not in tables:
        raise ConfigError(f"{source}: [daemon] is missing")
    base = Path(source).absolute().parent
    daemon = _daemon(Table(source, "[daemon]", tables["daemon"]))
    keys = _keys(Table(source, "[keys]", tables["keys"]), base) if "keys" in tables else None
    if daemon.role is Role.LEADER and "group" in tables:
        raise ConfigError(f"{source}: [group] is for receivers; a leader states group_size in its [[peer]]")
    if daemon.role is Role.RECEIVER and "draft" in tables:
        raise ConfigError(f"{source}: [draft] is for leaders; a receiver's ranks are under [group]")
    config = DaemonConfig(
        source=source,
        daemon=daemon,
        session=_session(Table(source, "[session]", tables.get("session", {})), daemon.role),
        keys=keys,
        peers=_peers(source, tables.get("peer", []), daemon.role, base),
        group=_group(Table(source, "[group]", tables.get("group", {})), base),
        breaker=_breaker(Table(source, "[breaker]", tables.get("breaker", {}))),
        watch=_watch(Table(source, "[watch]", tables.get("watch", {}))),
        draft=_draft(Table(source, "[draft]", tables.get("draft", {})), base),
        rdma=_rdma(source, tables["rdma"]) if "rdma" in tables else None,
        capture=capture_settings(Table(source, "[capture]", tables["capture"]), base) if "capture" in tables else None,
    )
    _judge(config)
    return config


def _twice(text: str, source: str, fault: str) -> str | None:
    """What `fault` of tomllib means when a key or table stands in the file twice."""
    found = re.match(r"(?:Cannot overwrite a value|Cannot declare .* twice|Duplicate inline .*) \(at line (\d+),", fault)
    if found is None:
        return None
    number = int(found[1])
    named = _LINE_NAMES.match(text.split("\n")[number - 1])
    what = named[1] if named is not None and not fault.startswith("Duplicate") else "a key"
    return f"{source}: line {number} gives {what} a second time"


# ---- the tables -----------------------------------------------------------------------------------------------------


def _daemon(table: Table) -> DaemonSettings:
    role = Role(table.choice("role", (Role.LEADER, Role.RECEIVER)))
    path = table.text("socket")
    if not path.startswith("/") or path.endswith("/") or len(path.encode()) > SOCKET_PATH_BYTES:
        table.fail("socket", f"an absolute path of at most {SOCKET_PATH_BYTES} bytes", path)
    name = table.text("name", f"{role}@{Path(path).stem}"[:64])
    if not _NAME.fullmatch(name):
        table.fail("name", "1..64 letters, digits, dots, dashes, underscores or @", name)
    mode = table.integer("socket_mode", None, 0o600)
    if mode not in SOCKET_MODES:
        table.fail("socket_mode", "0o600 or 0o660", mode)
    settings = DaemonSettings(
        role=role,
        name=name,
        socket=Path(path),
        allow_uids=_uids(table),
        socket_mode=mode,
        idle=IdleStrategy(table.choice("idle", tuple(IdleStrategy), "block")),
        metrics=_metrics(table),
        log_level=table.choice("log_level", LOG_LEVELS, "info"),
        drain_s=table.seconds("drain_s", 5.0, 0.001, 3600),
    )
    table.done()
    return settings


def _uids(table: Table) -> tuple[int, ...]:
    uids = []
    for uid in table.items("allow_uids", MAX_UIDS, "user IDs") or [os.geteuid()]:
        if type(uid) is not int or not 0 <= uid <= _UID_MOST:
            table.fail("allow_uids", f"a list of user IDs in 0..{_UID_MOST}", uid)
        uids.append(uid)
    return tuple(uids)


def _metrics(table: Table) -> MetricsAddress | None:
    public = table.boolean("metrics_public", False)
    text = table.maybe("metrics")
    if text is None:
        if public:
            table.fail("metrics_public", "left out without metrics", public)
        return None
    try:
        address = parse_endpoint(f"tcp://{text}")
    except ConfigError:
        table.fail("metrics", '"ADDRESS:PORT", as in "127.0.0.1:9411"', text)
    if not re.fullmatch(r"[0-9.]+", address.host) and ":" not in address.host:
        table.fail("metrics", "an IP address and a port, no name", text)
    if not address.loopback and not public:
        table.fail("metrics", "a loopback address unless metrics_public = true", text)
    return MetricsAddress(host=address.host, port=address.port)


def _session(table: Table, role: Role) -> SessionSettings:
    numbers = ("vocab_size", "depth", "support", "batch_requests", "batches_in_flight", "max_context_tokens")
    values: dict[str, object] = {}
    for key in numbers:
        default = _HELLO[key]
        assert isinstance(default, int)
        values[key] = table.integer(key, None, default)
    slots_given = table.has("max_slots")
    requests, batches = values["batch_requests"], values["batches_in_flight"]
    assert isinstance(requests, int)
    assert isinstance(batches, int)
    values["max_slots"] = table.integer("max_slots", None, requests * batches)
    for key in ("draft_identity", "target_identity", "draft_kind"):
        values[key] = table.text(key, str(_HELLO[key]))
    values["draw_proof"] = table.boolean("draw_proof", bool(_HELLO["draw_proof"]))
    kinds = table.items("representations", 2, "representations")
    values["representations"] = _HELLO["representations"] if kinds is None else tuple(kinds)
    table.done()
    try:
        make_hello(role, 1, **values)
    except ConfigError as fault:
        why = "" if slots_given or not str(fault).startswith("max_slots ") else " (batch_requests x batches_in_flight)"
        raise ConfigError(f"{table.where} {fault}{why}") from None
    return SessionSettings(**values)  # type: ignore[arg-type]  # every value was checked above


def _keys(table: Table, base: Path) -> KeySettings:
    own = table.text("own")
    server = _server(table, base)
    allow: Path | tuple[str, ...] | None = None
    if table.has("allow"):
        value = table.take("allow")
        if isinstance(value, str) and 1 <= len(value) <= 4096 and value.isprintable():
            allow = base / value
        elif isinstance(value, list) and 1 <= len(value) <= 256 and all(isinstance(item, str) and item for item in value):
            allow = tuple(_key_or_path(item, base) for item in value)
        else:
            table.fail("allow", "an allow-list file, or a list of 1..256 public keys or .public files", value)
    table.done()
    return KeySettings(own=base / own, allow=allow, server=server)


def _server(table: Table, base: Path) -> str | None:
    server = table.maybe("server")
    return None if server is None else _key_or_path(server, base)


def _key_or_path(text: str, base: Path) -> str:
    return text if is_key(text) else str(base / text)


def _peers(source: str, value: object, role: Role, base: Path) -> tuple[PeerSettings, ...]:
    if not isinstance(value, list):
        raise ConfigError(f"{source}: write each peer under [[peer]], not [peer]")
    if len(value) > MAX_PEERS:
        raise ConfigError(f"{source}: [[peer]] stands {len(value)} times; at most {MAX_PEERS} are allowed")
    peers: list[PeerSettings] = []
    for number, item in enumerate(value, 1):
        table = Table(source, f"[[peer]] {number}:", item)
        name = table.text("name")
        if not _NAME.fullmatch(name):
            table.fail("name", "1..64 letters, digits, dots, dashes, underscores or @", name)
        if name in [peer.name for peer in peers]:
            table.fail("name", "the only one of its kind", name)
        listen, connect = _ways(table)
        if (listen is None) == (connect is None):
            raise ConfigError(f"{table.where} give exactly one of listen and connect")
        group, group_name = _far_group(table) if role is Role.LEADER else (GroupSettings(), None)
        for key in ("group", "group_size", "group_mode", "group_rank"):
            table.forbid(key, "a receiver's group is under [group]")
        link = table.choice("link", LINKS, "tcp")
        server = _server(table, base)
        peers.append(
            PeerSettings(
                name=name, listen=listen, connect=connect, link=link, server=server, group_name=group_name, group=group
            )
        )
        table.done()
    return tuple(peers)


def _far_group(table: Table) -> tuple[GroupSettings, str | None]:
    """What a leader states of the group at the far end, and the name by which the entries of its ranks belong together."""
    size, mode = table.integer("group_size", (1, MAX_RANKS), 1), table.choice("group_mode", GROUP_MODES, "replicate")
    if size == 1 or mode == "replicate":
        for key in ("group", "group_rank"):
            table.forbid(key, "only the ranks of a group that each have a link of their own to the leader need it")
        return GroupSettings(size=size, mode=mode), None
    rank = table.integer("group_rank", (0, size - 1))
    name = table.text("group")
    if not _NAME.fullmatch(name):
        table.fail("group", "1..64 letters, digits, dots, dashes, underscores or @", name)
    return GroupSettings(size=size, rank=rank, mode=mode), name


def _ways(table: Table) -> tuple[str | None, str | None]:
    """The `listen` and `connect` of a table, as endpoints in their usual form."""
    ways: list[str | None] = []
    for key in ("listen", "connect"):
        text = table.maybe(key)
        try:
            address = parse_endpoint(text) if text is not None else None
        except ConfigError as fault:
            raise ConfigError(f"{table.where} {key}: {fault}") from None
        if address is not None and key == "connect" and _nowhere(address):
            table.fail(key, "an address and port to connect to", text)
        ways.append(None if address is None else str(address))
    return ways[0], ways[1]


def _nowhere(address: Endpoint) -> bool:
    return address.scheme == "tcp" and (address.port == 0 or address.host in ("0.0.0.0", "::"))


def _group(table: Table, base: Path) -> GroupSettings:
    size = table.integer("size", (1, MAX_RANKS), 1)
    rank = table.integer("rank", (0, size - 1), 0)
    mode = table.choice("mode", GROUP_MODES, "replicate")
    listen, connect, server = _between_ranks(table, base, size, rank, "group")
    table.done()
    return GroupSettings(size=size, rank=rank, mode=mode, listen=listen, connect=connect, server=server)


def _draft(table: Table, base: Path) -> DraftSettings:
    size = table.integer("size", (1, MAX_RANKS), 1)
    rank = table.integer("rank", (0, size - 1), None if table.has("connect") else 0)  # only rank 0 needs not say so
    listen, connect, server = _between_ranks(table, base, size, rank, "draft")
    if rank == 0:
        table.forbid("targets", "those of rank 0 are its [[peer]] entries")
    targets = table.items("targets", MAX_PEERS, "names of rank 0's targets") or []
    for name in targets:
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            table.fail("targets", "a list of names, each 1..64 letters, digits, dots, dashes, underscores or @", name)
    table.done()
    names = tuple(str(name) for name in targets)
    return DraftSettings(size=size, rank=rank, listen=listen, connect=connect, server=server, targets=names)


def _between_ranks(table: Table, base: Path, size: int, rank: int, what: str) -> tuple[str | None, str | None, str | None]:
    """How the ranks of a group or draft reach each other: (listen, connect, server) of one of them."""
    if size == 1:
        table.forbid("listen", f"a {what} of one has nobody to reach")
        table.forbid("connect", f"a {what} of one has nobody to reach")
    elif rank == 0:
        table.forbid("connect", "rank 0 listens for the other ranks")
    else:
        table.forbid("listen", "ranks above 0 connect to rank 0")
    listen, connect = _ways(table)
    if size > 1 and listen is None and connect is None:
        raise ConfigError(f"{table.where} {'listen' if rank == 0 else 'connect'} is missing")
    if connect is None:
        table.forbid("server", "only a rank that connects needs it")
    return listen, connect, _server(table, base)


def _breaker(table: Table) -> BreakerSettings:
    settings = BreakerSettings(
        enabled=table.boolean("enabled", True),
        discards=table.integer("discards", (1, 10_000), 8),
        window_s=table.seconds("window_s", 60.0, 0.001, 86400, zero=True),
        probe_after_s=table.seconds("probe_after_s", 1.0, 0.001, 3600),
        probe_most_s=table.seconds("probe_most_s", 30.0, 0.001, 86400),
    )
    if settings.probe_most_s < settings.probe_after_s:
        table.fail("probe_most_s", f"at least probe_after_s ({settings.probe_after_s:g})", settings.probe_most_s)
    table.done()
    return settings


def _rdma(source: str, value: object) -> RdmaConfig:
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: [rdma] must be a table, not {shown(value)}")
    try:
        return config_from(value, "it")
    except ConfigError as fault:
        raise ConfigError(f"{source}: [rdma] {fault}") from None


def _watch(table: Table) -> WatchSettings:
    settings = WatchSettings(release_after_s=table.seconds("release_after_s", 30.0, 0.001, 86400, zero=True))
    table.done()
    return settings


# ---- what the tables must not say together --------------------------------------------------------------------------


def _judge(config: DaemonConfig) -> None:
    source, count = config.source, len(config.peers)
    if config.daemon.role is Role.LEADER:
        _judge_draft(config)
        if count == 0 and not config.draft.rank:
            raise ConfigError(f"{source}: a leader needs 1..{MAX_PEERS} [[peer]], there is none")
    elif config.group.rank > 0 and config.group.mode == "replicate":
        if count:
            raise ConfigError(f"{source}: rank {config.group.rank} of a replicate group has no [[peer]]: rank 0 has the leader")
    elif count != 1:
        raise ConfigError(f"{source}: this receiver needs exactly one [[peer]], its leader; there are {count}")
    _judge_groups(config)
    _judge_endpoints(config)


def _judge_draft(config: DaemonConfig) -> None:
    """Rank 0 of a draft alone faces the targets, or every rank has a link to the target's rank of the same number."""
    source, draft = config.source, config.draft
    if draft.size == 1:
        return
    for peer in config.peers:
        one_each = peer.group_name is not None and peer.group.mode == VOCABULARY
        if draft.rank and not (one_each and peer.group.rank == draft.rank and peer.group.size == draft.size):
            raise ConfigError(
                f'{source}: [[peer]] "{peer.name}" must have group_mode "vocabulary", group_size {draft.size} and group_rank '
                f"{draft.rank} beside [draft] rank {draft.rank}: draft rank 0 alone has other targets"
            )
    if draft.rank and bool(config.peers) == bool(draft.targets):
        how = "is not allowed with [[peer]]" if draft.targets else "is missing: it names the targets of draft rank 0"
        raise ConfigError(f"{source}: [draft] targets {how}")
    alone = [len(peers) == 1 and config.is_split(peers) for peers in config.targets()]
    if any(alone) and not all(alone):
        raise ConfigError(f"{source}: [draft] either every [[peer]] is group_rank 0 of a vocabulary group, or none is alone")
    names = config.target_names()
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f'{source}: [draft] a [[peer]] and a group are both "{name}": its ranks could not tell them apart')
        try:
            config.draft_hello(1, name)
        except ConfigError as fault:
            raise ConfigError(f'{source}: [session] for the draft link of "{name}": {fault}') from None


def _judge_groups(config: DaemonConfig) -> None:
    """The ranks of each group must all have an entry, and say the same of it; a vocabulary must be large enough to be split."""
    members: dict[str, list[PeerSettings]] = {}
    for peer in config.peers:
        if peer.group_name is not None:
            members.setdefault(peer.group_name, []).append(peer)
    for name, peers in members.items():
        size, mode = peers[0].group.size, peers[0].group.mode
        if any((peer.group.size, peer.group.mode) != (size, mode) for peer in peers):
            raise ConfigError(f'{config.source}: the [[peer]] entries of group "{name}" differ in group_size or group_mode')
        shared = mode == VOCABULARY and config.draft.size == size
        if shared and [peer.group.rank for peer in peers] == [config.draft.rank]:
            continue  # each of the others is another draft rank's
        if sorted(peer.group.rank for peer in peers) != list(range(size)):
            ranks = ", ".join(str(peer.group.rank) for peer in peers)
            raise ConfigError(f'{config.source}: group "{name}" needs a [[peer]] for each group_rank 0..{size - 1}, not {ranks}')
    groups = [config.group, *(peer.group for peer in config.peers)]
    for group in groups:
        try:
            range_of(group.mode, config.session.vocab_size, group.size, group.rank)
        except LocalMisuse as error:
            raise ConfigError(f"{config.source}: {error}") from None


def _judge_endpoints(config: DaemonConfig) -> None:
    source = config.source
    ends: list[tuple[str, End]] = [(f'[[peer]] "{peer.name}"', peer) for peer in config.peers]
    between: tuple[tuple[str, End], ...] = (("[group]", config.group), ("[draft]", config.draft))
    ends += [(where, end) for where, end in between if end.listen or end.connect]
    seen: dict[str, str] = {}
    for where, end in ends:
        key = "listen" if end.listen is not None else "connect"
        address = parse_endpoint(end.listen or end.connect or "")
        if str(address) in seen and not (address.scheme == "tcp" and address.port == 0):
            raise ConfigError(f"{source}: {where} and {seen[str(address)]} name one endpoint, {address}")
        seen[str(address)] = where
        if isinstance(end, PeerSettings) and end.link == "shm" and not address.loopback:
            raise ConfigError(f"{source}: {where} link must be \"tcp\" with {key} {address}: shm stays on this host")
        _judge_keys(config, where, end, address)
    if config.rdma is not None and all(peer.link != "rdma" for peer in config.peers):
        raise ConfigError(f"{source}: [rdma] is of no use: no [[peer]] has link = \"rdma\"")
    _judge_use(config, [end for _where, end in ends])


def _judge_keys(config: DaemonConfig, where: str, end: End, address: Endpoint) -> None:
    source, keys = config.source, config.keys
    if end.server is not None and (keys is None or end.connect is None):
        raise ConfigError(f"{source}: {where} server is only for an end that connects, with [keys] own")
    if keys is None:
        if not address.loopback:
            raise ConfigError(
                f"{source}: {where} {address} is not a loopback address and needs [keys]: make them with `pp1q keys new`"
            )
    elif end.listen is not None and keys.allow is None:
        raise ConfigError(f"{source}: [keys] allow is missing: {where} listens, and must know who may connect")
    elif end.connect is not None and (end.server or keys.server) is None:
        raise ConfigError(f"{source}: [keys] server is missing: {where} connects, and must know whom to trust")


def _judge_use(config: DaemonConfig, ends: Iterable[End]) -> None:
    """A key setting that nothing uses is a mistake about who connects to whom."""
    if config.keys is None:
        return
    if config.keys.allow is not None and all(end.listen is None for end in ends):
        raise ConfigError(f"{config.source}: [keys] allow is of no use: nothing listens")
    if config.keys.server is not None and all(end.connect is None or end.server is not None for end in ends):
        raise ConfigError(f"{config.source}: [keys] server is of no use: nothing connects by it")
