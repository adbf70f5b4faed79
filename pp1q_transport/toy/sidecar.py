"""A whole deployment on one machine: draft process, leader daemon, a receiver daemon for each rank, a target process for each
rank.

Between `pp1q demo --sidecar` (and tests that kill parts of it) and the operating system. Starts processes by exec, watches them,
ends them; moves no frames. Everything it makes lies in one temporary directory that goes with it. SPEC sections 2 and 9.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Self

from ..daemon.status import Status, fetch_status
from ..errors import ConfigError, PeerFault, Reason
from ..links.rdma_config import options_for

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

PORTS: Final = range(16_384, 32_768)
START_S: Final = 60.0
END_S: Final = 10.0
LOOK_S: Final = 0.02
ENDED_BY: Final = (0, -9, -15)


@dataclass(frozen=True, slots=True)
class Shape:
    """What every process of a deployment must know alike. `support` None is dense q."""

    seed: int = 1
    rounds: int = 400
    depth: int = 5
    vocab_size: int = 129280
    support: int | None = None
    requests: int = 4
    ranks: int = 2
    idle: str = "block"
    link: str = "tcp"
    rdma: tuple[str, ...] = ()  # settings of that kind, "name=value"
    budget_us: int = 2_000_000
    think_us: int = 0  # the target's own time for each proposal, which it holds meanwhile
    mode: str = "replicate"  # how the ranks share the rows
    draft_ranks: int = 1
    models: str = ""  # names the models in both identities, where they are not the toy's

    @property
    def own_links(self) -> bool:
        """Whether every rank has a link of its own to the leader."""
        return self.ranks > 1 and self.mode != "replicate"

    @property
    def draft_shards(self) -> bool:
        """Whether every rank of the draft sends its own range of each row."""
        return self.own_links and self.mode == "vocabulary" and self.draft_ranks == self.ranks

    def packed(self) -> str:
        """As one command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def unpacked(cls, text: str) -> Shape:
        """Of such an argument."""
        return cls(**json.loads(text))


@dataclass(slots=True)
class Part:
    """One process: its command, the process that runs now, and how often it was started."""

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    starts: int = 0
    log: Path = field(default_factory=Path)

    @property
    def running(self) -> bool:
        """Whether it runs now."""
        return self.process is not None and self.process.poll() is None


class Deployment:
    """The processes of one deployment by name: "leader", "receiver0".., "draft", "target0"..., and "leader1".. and "draft1".. for
    more ranks of the draft. A context manager."""

    def __init__(
        self,
        shape: Shape,
        target_command: Mapping[int, list[str]] | None = None,
        daemon_words: Callable[[str], list[str]] = lambda _name: [],
    ) -> None:
        self.shape = shape
        self._home = tempfile.TemporaryDirectory(prefix="pp1q-")
        self.home = Path(self._home.name)
        self.parts: dict[str, Part] = {}
        ports = [f"tcp://127.0.0.1:{port}" for port in free_ports(2 + (shape.ranks if shape.own_links else 1))]
        self._write_configs(ports[2:], ports[0], ports[1])
        module = [sys.executable, "-m", "pp1q_transport.cli"]
        for name in (*self._drafts("leader"), *(f"receiver{rank}" for rank in range(shape.ranks))):
            self._add(name, [*module, "daemon", "--config", str(self.home / f"{name}.toml"), *daemon_words(name)])
        packed = shape.packed()
        for rank, (name, daemon) in enumerate(zip(self._drafts("draft"), self._drafts("leader"), strict=True)):
            place = ["--attach", self.socket(daemon), "--rank", str(rank)]
            self._add(name, [*module, "demo-draft", *place, "--options", packed])
        for rank in range(shape.ranks):
            plain = [*module, "demo-target", "--attach", self.socket(f"receiver{rank}"), "--rank", str(rank), "--options", packed]
            self._add(f"target{rank}", (target_command or {}).get(rank, plain))

    def _add(self, name: str, command: list[str]) -> None:
        self.parts[name] = Part(name, command, log=self.home / f"{name}.log")

    def _drafts(self, name: str) -> list[str]:
        """The daemons ("leader") or processes ("draft") of the draft, by rank."""
        return [f"{name}{rank or ''}" for rank in range(self.shape.draft_ranks)]

    def socket(self, name: str) -> str:
        """The Unix socket of a daemon."""
        return str(self.home / f"{name}.sock")

    @property
    def daemons(self) -> list[str]:
        """The names of the daemons."""
        return [name for name in self.parts if name.startswith(("leader", "receiver"))]

    # ---- configurations -----------------------------------------------------------------------------------------

    def _write_configs(self, links: list[str], group: str, draft: str) -> None:
        """`links` are the leader's endpoints, one for each rank that has a link to it; at `draft` the ranks of the draft meet."""
        shape = self.shape
        size = {"size": shape.ranks, "mode": shape.mode}
        targets: list[dict[str, object]] = []
        for rank, link in enumerate(links):
            far: dict[str, object] = {"group_size": shape.ranks} if shape.ranks > 1 else {}
            if shape.own_links:
                far |= {"group": "group-a", "group_mode": shape.mode, "group_rank": rank}
            targets.append({"name": f"group-a{rank or ''}", "listen": link, "link": shape.link, **far})
        self._write_drafts(targets, draft)
        for rank in range(shape.ranks):
            tables: dict[str, dict[str, object]] = {"daemon": self._daemon(f"receiver{rank}", role="receiver")}
            if shape.ranks > 1:
                tables["group"] = {**size, "rank": rank, ("listen" if rank == 0 else "connect"): group}
            peers = [{"name": "leader", "connect": links[rank], "link": shape.link}] if rank < len(links) else []
            self._write(f"receiver{rank}", tables, peers)

    def _write_drafts(self, targets: list[dict[str, object]], draft: str) -> None:
        shape = self.shape
        for rank, name in enumerate(self._drafts("leader")):
            tables: dict[str, dict[str, object]] = {"daemon": self._daemon(name)}
            peers = targets if not shape.draft_shards else [targets[rank]]
            if shape.draft_ranks > 1:
                tables["draft"] = {"size": shape.draft_ranks, "rank": rank, ("connect" if rank else "listen"): draft}
            if rank and not shape.draft_shards:
                named = ["group-a"] if shape.mode == "vocabulary" else [peer["name"] for peer in targets]
                tables["draft"]["targets"], peers = named, []
            self._write(name, tables, peers)

    def _daemon(self, name: str, role: str = "leader") -> dict[str, object]:
        return {"role": role, "name": name, "socket": self.socket(name), "idle": self.shape.idle, "drain_s": 2.0}

    def _write(self, name: str, tables: dict[str, dict[str, object]], peers: list[dict[str, Any]]) -> None:
        shape = self.shape
        models = shape.models or f"toy-{shape.seed}-{shape.vocab_size}"
        tables["session"] = {
            "vocab_size": shape.vocab_size,
            "depth": shape.depth,
            "support": min(shape.support or 32, shape.vocab_size),
            "batch_requests": shape.requests,
            "draft_identity": models + "-draft",
            "target_identity": models + "-target",
        }
        settings = options_for(shape.link, shape.rdma) if any(peer.get("link") == "rdma" for peer in peers) else None
        if settings is not None:
            tables["rdma"] = settings.describe()
        lines = []
        for table, keys in tables.items():
            lines += [f"[{table}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items()), ""]
        for peer in peers:
            lines += ["[[peer]]", *(f"{key} = {_toml(value)}" for key, value in peer.items()), ""]
        path = self.home / f"{name}.toml"
        path.write_text("\n".join(lines), encoding="utf-8")
        path.chmod(0o600)

    # ---- processes ----------------------------------------------------------------------------------------------

    def start(self, name: str) -> None:
        """Starts one process (again), its output appended to its log."""
        part = self.parts[name]
        part.starts += 1
        with part.log.open("ab") as log:
            part.process = subprocess.Popen(
                part.command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.home, env={**os.environ}
            )

    def start_all(self) -> None:
        """Daemons first, then, once their sockets are there, the processes beside them."""
        for name in self.daemons:
            self.start(name)
        for name in self.daemons:
            self.wait_for_daemon(name)
        for name, daemon in zip(self._drafts("draft"), self._drafts("leader"), strict=True):
            self.start(name)
            self.wait_for_client(daemon)
        for rank in range(self.shape.ranks):
            self.start(f"target{rank}")

    def wait_for_daemon(self, name: str, timeout_s: float = START_S) -> Status:
        """Until a daemon answers on its socket; its status. Raises `PeerFault` with the end of its log when it does not."""
        deadline = time.monotonic() + timeout_s
        while True:
            if not self.parts[name].running:
                raise PeerFault(Reason.PEER_LOST, f"{name} ended: {self.tail(name)}")
            try:
                return fetch_status(self.socket(name))
            except PeerFault:
                if time.monotonic() >= deadline:
                    raise PeerFault(Reason.TIMEOUT, f"{name} did not answer within {timeout_s:g} s: {self.tail(name)}") from None
            time.sleep(LOOK_S)

    def wait_for_client(self, name: str, timeout_s: float = START_S) -> None:
        """Until the process beside a daemon has attached."""
        deadline = time.monotonic() + timeout_s
        while not self.wait_for_daemon(name)["clients"]:
            if time.monotonic() >= deadline:
                raise PeerFault(Reason.TIMEOUT, f"nobody attached to {name} within {timeout_s:g} s: {self.tail('draft')}")
            time.sleep(LOOK_S)

    def status(self, name: str) -> Status:
        """What a daemon says of itself now."""
        return fetch_status(self.socket(name))

    def tail(self, name: str, lines: int = 3) -> str:
        """The last lines of a process's log."""
        log = self.parts[name].log
        text = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        return " | ".join(text.strip().splitlines()[-lines:]) or "its log is empty"

    def kill(self, name: str) -> None:
        """kill -9, and waits for the end."""
        process = self.parts[name].process
        if process is not None:
            process.kill()
            process.wait()

    def wait(self, name: str, timeout_s: float) -> int:
        """The exit status of a process that ends by itself; `PeerFault(timeout)` when it does not in time."""
        process = self.parts[name].process
        if process is None:
            raise ConfigError(f"{name} was never started")
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise PeerFault(Reason.TIMEOUT, f"{name} did not end within {timeout_s:g} s: {self.tail(name)}") from None

    def stop(self) -> dict[str, int]:
        """Ends everything, orderly first: SIGTERM to whatever runs, SIGKILL to what stays. Exit statuses by name."""
        running = [part for part in self.parts.values() if part.process is not None]
        for part in running:
            if part.running and part.process is not None:
                part.process.terminate()
        statuses = {}
        for part in running:
            assert part.process is not None
            try:
                statuses[part.name] = part.process.wait(END_S)
            except subprocess.TimeoutExpired:
                part.process.kill()
                statuses[part.name] = part.process.wait()
        return statuses

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()
        self._home.cleanup()


def _toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def free_ports(count: int) -> list[int]:
    """Loopback ports that nobody has. From below the range that systems give to outgoing connections, one of which could take
    a port before its daemon does. Raises `PeerFault(overload)` when there are not so many."""
    import random
    import socket

    ports: list[int] = []
    for port in random.SystemRandom().sample(PORTS, 64 * count):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        ports.append(port)
        if len(ports) == count:
            return ports
    raise PeerFault(Reason.OVERLOAD, f"no {count} free ports in {PORTS[0]}..{PORTS[-1]}")
