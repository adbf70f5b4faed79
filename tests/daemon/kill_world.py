"""kill -9 of every process of a sidecar deployment at seeded points of a round, again and again, in one deployment.

    python tests/daemon/kill_world.py --kills 50 --ranks 1

Between `toy.sidecar.Deployment` and the operating system. After every kill: nobody hangs, every other process is the same and
goes on, nothing leaks, no file is left; in the end all slots are FREE and the committed tokens are what their rounds give without
any transport. Prints how long it took until a proposal asked for after the kill was ready at every rank.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from journal_check import Entry, agree, check_tokens, histories, read_journal, rounds_of, rounds_of_all

from pp1q_transport.daemon.status import Status
from pp1q_transport.errors import PeerFault
from pp1q_transport.toy.sidecar import Deployment, Shape

WATCHDOG_S = 60.0
SETTLE_S = 15.0
LOOK_S = 0.002
RESTART_MOST_S = 0.05
POINT_MOST_ROUNDS = 2.0
STALL_S = 0.5  # a sleep of 2 ms that took so long: the whole machine stood still, and that is not counted as recovery
THINK_US = 3000  # some kills find the target with a proposal in its hands, and no request outgrows its context
EXPECTED = {"peer_lost", "link_error", "cancelled", "timeout", "generation_stale"}  # the last: rows for a target that is gone
KEPT = (".toml", ".log", ".sock", ".journal", ".json")


@dataclass
class Kill:
    """One kill: when it came, and the times (s) from it until the victim was started, was up (a daemon listens, a process is
    attached) and the last rank was served. `cpu_s` is what the victim's start took of a processor, `queued_s` how long it waited
    for one, `stalled_s` how long the whole machine stood still."""

    victim: str
    after_lines: int
    delay_s: float
    restarted_s: float
    up_s: float
    cpu_s: float
    queued_s: float
    recovered_s: float
    stalled_s: float
    reasons: dict[str, int]


class KillWorld:
    """A deployment under steady traffic, and the knife."""

    def __init__(
        self, ranks: int, seed: int, support: int | None, vocab_size: int = 512, depth: int = 3, mode: str = "replicate",
        draft_ranks: int = 1,
    ) -> None:  # fmt: skip
        self.random = random.Random(seed)
        self.shape = Shape(
            seed=seed,
            rounds=200_000,  # more than it will get to
            depth=depth,
            vocab_size=vocab_size,
            support=support,
            requests=4,
            ranks=ranks,
            think_us=THINK_US,
            mode=mode,
            draft_ranks=draft_ranks,
        )
        self.deployment = Deployment(self.shape)
        self.home = self.deployment.home
        self.kills: list[Kill] = []
        self.stalled_s = 0.0
        self._lately: list[Entry] = []
        self._at = dict.fromkeys(range(ranks), 0)
        self._descriptors: dict[str, tuple[int, int]] = {}  # by process: (pid, descriptors) when it was settled first
        self._shared_memory = set(os.listdir("/dev/shm"))

    def __enter__(self) -> KillWorld:
        return self

    def __exit__(self, *exc: object) -> None:
        self.deployment.__exit__(*exc)

    @property
    def victims(self) -> list[str]:
        """Every process of the deployment."""
        return list(self.deployment.parts)

    # ---- watching ----------------------------------------------------------------------------------------------

    def pid(self, name: str) -> int:
        """Of a process that runs; asserts that it does."""
        process = self.deployment.parts[name].process
        assert process is not None
        assert process.poll() is None, f"{name} ended by itself ({process.returncode}): {self.deployment.tail(name, 12)}"
        return process.pid

    def until(self, found: Callable[[], bool], what: str, within_s: float = WATCHDOG_S) -> None:
        """Waits; a hang ends here, with everybody's last words."""
        stop = time.monotonic() + within_s
        while not found():
            if time.monotonic() >= stop:
                words = "\n".join(f"{name}: {self.deployment.tail(name, 6)}" for name in self.deployment.parts)
                raise AssertionError(f"{what}: nothing within {within_s:g} s\n{words}")
            before = time.monotonic()
            time.sleep(LOOK_S)
            late_s = time.monotonic() - before
            if late_s > STALL_S:
                self.stalled_s += late_s

    def fresh(self, rank: int) -> list[Entry]:
        """What the journal of a rank gained since the last look."""
        entries, self._at[rank] = read_journal(self.journal(rank), self._at[rank])
        rounds = [entry for entry in entries if "request" in entry]
        if rank == 0:
            self._lately = (self._lately + [entry for entry in rounds if "done_ns" in entry])[-20:]
        return rounds

    def journal(self, rank: int) -> Path:
        """Where the target of a rank keeps what it committed."""
        return self.home / f"target{rank}.journal"

    def served_since(self, since_ns: int, meanwhile: Callable[[], object] = lambda: None) -> int:
        """Waits until every rank had a ready proposal that was asked for after `since_ns`; the time of the last one's."""
        done: dict[int, int] = {}

        def look() -> bool:
            meanwhile()
            for rank in self._at:
                for entry in self.fresh(rank):
                    if rank not in done and entry.get("drafted") is not None and entry["issued_ns"] >= since_ns:
                        done[rank] = entry["done_ns"]
            return len(done) == len(self._at)

        self.until(look, "a ready proposal at every rank")
        return max(done.values())

    def status(self, name: str) -> Status:
        """Of a daemon that must answer."""
        try:
            return self.deployment.status(name)
        except PeerFault as fault:
            raise AssertionError(f"{name} does not say how it is ({fault}): {self.deployment.tail(name, 6)}") from fault

    def descriptors_settled(self, names: list[str]) -> None:
        """No process holds more descriptors than when it was settled first (libzmq closes in its own time)."""
        for name in names:
            pid = self.pid(name)
            known = self._descriptors.get(name)
            if known is None or known[0] != pid:
                if name in self.deployment.daemons:  # a rank's proposals may be ready while another one's link is not there yet
                    self.until(lambda name=name: all(s["up"] for s in self.status(name)["sessions"]), f"sessions of {name}")
                self._descriptors[name] = (pid, descriptors(pid))
                continue
            most = known[1]
            try:
                self.until(lambda pid=pid, most=most: descriptors(pid) <= most, f"{name} holds more than {most}", SETTLE_S)
            except AssertionError as error:
                raise AssertionError(f"{error}\n{kinds(pid)}") from error

    # ---- the knife ---------------------------------------------------------------------------------------------

    def start(self) -> None:
        """All processes up, and some rounds done."""
        self.deployment.start_all()
        self.served_since(time.monotonic_ns())
        time.sleep(0.1)
        self.descriptors_settled(self.victims)

    def kill(self, victim: str) -> Kill:
        """One kill at a seeded point of a round, the restart, and everything that must hold afterwards."""
        lines, delay_s = self.random.randrange(4), self.random.uniform(0.0, POINT_MOST_ROUNDS) * self.round_s()
        self._after_lines(lines)
        survivors = {name: self.pid(name) for name in self.victims if name != victim}
        before = {name: self.status(name) for name in self.deployment.daemons if name != victim}
        sleep_exactly(delay_s)
        self.deployment.kill(victim)
        killed_ns = time.monotonic_ns()
        stalled_s = self.stalled_s
        time.sleep(self.random.uniform(0.0, RESTART_MOST_S))
        restarted_ns = time.monotonic_ns()
        up = Up(self.home, victim)
        self.deployment.start(victim)
        up.pid = self.pid(victim)
        ready_ns = self.served_since(killed_ns, up.look)
        assert {name: self.pid(name) for name in survivors} == survivors, "somebody else ended with it"
        self.pid(victim)
        reasons = self._account(victim, before)
        self.descriptors_settled(self.victims)
        self._nothing_left_behind()
        stalled_s = self.stalled_s - stalled_s
        recovered_s = max(0.0, (ready_ns - killed_ns) / 1e9 - stalled_s)
        up_s = min(recovered_s, max(0.0, (up.at_ns or ready_ns) - killed_ns) / 1e9)
        done = Kill(
            victim, lines, delay_s, (restarted_ns - killed_ns) / 1e9, up_s, up.cpu_s, up.queued_s, recovered_s, stalled_s, reasons
        )
        self.kills.append(done)
        return done

    def _after_lines(self, lines: int) -> None:
        seen = 0

        def look() -> bool:
            nonlocal seen
            seen += len(self.fresh(0))
            return seen >= lines

        self.until(look, f"{lines} more rounds")

    def round_s(self) -> float:
        """How long a round of rank 0 took lately."""
        spans = [(entry["done_ns"] - entry["issued_ns"]) / 1e9 for entry in self._lately]
        return min(0.05, statistics.median(spans)) if spans else 0.01

    def _account(self, victim: str, before: Mapping[str, Status]) -> dict[str, int]:
        """Every daemon that should have noticed says so in its counters, at the latest when the victim's successor is back
        (rounds may go on before). Returns what rose of the reasons, over all."""
        rose: dict[str, int] = defaultdict(int)
        for name, earlier in before.items():
            for counter in noticed(victim, name):
                known = earlier["totals"].get(counter, 0)
                self.until(
                    lambda name=name, counter=counter, known=known: self.status(name)["totals"].get(counter, 0) > known,
                    f"{name} does not count {counter} after the death of {victim}",
                )
            for reason, count in self.status(name)["reasons"].items():
                if count > earlier["reasons"].get(reason, 0):
                    rose[reason] += count - earlier["reasons"].get(reason, 0)
        assert set(rose) <= EXPECTED, rose
        return dict(rose)

    def _nothing_left_behind(self) -> None:
        left = [path.name for path in self.home.iterdir() if path.suffix not in KEPT and not path.is_dir()]
        assert not left, f"left behind: {left}"
        assert set(os.listdir("/dev/shm")) <= self._shared_memory

    def finish(self) -> int:
        """Ends the traffic: every slot FREE, every daemon's end whole, every token as it must be. Returns how many tokens."""
        ranks = range(self.shape.ranks)
        for rank in ranks:
            self.deployment.kill(f"target{rank}")
        for rank in ranks:
            name = f"receiver{rank}"
            self.until(lambda name=name: all_free(self.status(name)), f"all slots of {name} FREE", SETTLE_S)
        ends = self.deployment.stop()
        assert all(ends[name] == 0 for name in self.deployment.daemons), ends
        sockets = [path.name for path in self.home.glob("*.sock*")]
        assert not sockets, f"left behind: {sockets}"
        journals = [rounds_of(self.journal(rank)) for rank in ranks]
        agree([histories(journal) for journal in journals])
        return check_tokens(self.shape, rounds_of_all(journals))

    def table(self) -> dict[str, dict[str, float]]:
        """Per victim: kills, and the median and largest times in s from the kill to the last rank's ready proposal, and to that
        from the moment the victim was up again."""
        rows = {}
        for victim in self.victims:
            times = [kill.recovered_s for kill in self.kills if kill.victim == victim]
            if times:
                after = [kill.recovered_s - kill.up_s for kill in self.kills if kill.victim == victim]
                queued = [kill.queued_s for kill in self.kills if kill.victim == victim]
                rows[victim] = {
                    "kills": len(times),
                    "median_s": statistics.median(times),
                    "max_s": max(times),
                    "from_up_median_s": statistics.median(after),
                    "from_up_max_s": max(after),
                    "start_cpu_median_s": statistics.median(kill.cpu_s for kill in self.kills if kill.victim == victim),
                    "queued_median_s": statistics.median(queued),
                    "queued_max_s": max(queued),
                }
        return rows


class Up:
    """Watches a log for the moment a victim is up again: its own for a daemon, its daemon's for a process."""

    def __init__(self, home: Path, victim: str) -> None:
        beside = victim.replace("draft", "leader").replace("target", "receiver")
        self._path = home / f"{beside}.log"
        self._sign = b'"daemon_up"' if beside == victim else b'"client attached"'
        self._at = self._path.stat().st_size
        self.at_ns = 0
        self.pid = 0
        self.cpu_s = self.queued_s = 0.0

    def look(self) -> None:
        """Reads what is new."""
        if self.at_ns:
            return
        with self._path.open("rb") as log:
            log.seek(self._at)
            fresh = log.read()
        if self._sign in fresh:
            self.at_ns = time.monotonic_ns()
            with suppress(OSError):  # a kernel without scheduler statistics says nothing
                ran_ns, queued_ns = Path(f"/proc/{self.pid}/schedstat").read_text(encoding="ascii").split()[:2]
                self.cpu_s, self.queued_s = int(ran_ns) / 1e9, int(queued_ns) / 1e9
        self._at += max(0, fresh.rfind(b"\n") + 1)


def noticed(victim: str, daemon: str) -> list[str]:
    """The counters that must rise at `daemon` when `victim` dies."""
    beside = victim.replace("draft", "leader").replace("target", "receiver")
    if victim != beside == daemon:
        return ["clients_gone", "clients_attached"]
    if (victim, daemon) in (("leader", "receiver0"), ("receiver0", "leader"), ("leader", "leader1"), ("leader1", "leader")):
        return ["sessions", "sessions_ended"]
    return []


def descriptors(pid: int) -> int:
    """How many a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd"))


def kinds(pid: int) -> dict[str, int]:
    """What a process's descriptors are, counted."""
    named: Counter[str] = Counter()
    for number in os.listdir(f"/proc/{pid}/fd"):
        with suppress(FileNotFoundError):
            named[os.readlink(f"/proc/{pid}/fd/{number}")] += 1
    return dict(sorted(named.items()))


def all_free(status: Status) -> bool:
    """Whether no slot of a receiver daemon is in use."""
    return bool(status["slots"]) and all(count == 0 for state, count in status["slots"].items() if state != "FREE")


def sleep_exactly(seconds: float) -> None:
    """Sleeps most of it and spins the rest: a kill's point should not depend on the timer's slack."""
    stop = time.monotonic() + seconds
    time.sleep(max(0.0, seconds - 0.001))
    while time.monotonic() < stop:
        pass


def markdown(table: Mapping[str, Mapping[str, float]]) -> str:
    """The table as the documentation shows it."""
    lines = [
        "| killed | kills | median s | max s | once up: median s | max s | start: CPU s | waits for CPU: median s | max s |",
        "|---|---:|---:|---:|---:|---:|---:|---:|---:|",
    ]
    figures = (
        "median_s", "max_s", "from_up_median_s", "from_up_max_s", "start_cpu_median_s", "queued_median_s", "queued_max_s",
    )  # fmt: skip
    for name, row in table.items():
        lines.append(f"| {name} | {row['kills']:.0f} | " + " | ".join(f"{row[figure]:.2f}" for figure in figures) + " |")
    return "\n".join(lines)


def main() -> None:
    """The whole trial, from a shell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=50, help="of every process")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--sparse", type=int, help="sparse q of this support; dense otherwise")
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--mode", choices=("replicate", "vocabulary", "request-owner"), default="replicate", help="of the ranks")
    parser.add_argument("--draft-ranks", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with KillWorld(given.ranks, given.seed, given.sparse, given.vocab, mode=given.mode, draft_ranks=given.draft_ranks) as world:
        world.start()
        order = world.victims * given.kills
        world.random.shuffle(order)
        for number, victim in enumerate(order, 1):
            kill = world.kill(victim)
            if sys.stderr.isatty() or number % 20 == 0:
                print(f"{number}/{len(order)}  {victim}  {kill.recovered_s:.2f} s", file=sys.stderr)
        tokens = world.finish()
        if given.json:
            kills = [asdict(kill) for kill in world.kills]
            print(json.dumps({"ranks": given.ranks, "tokens_checked": tokens, "table": world.table(), "kills": kills}))
        else:
            print(markdown(world.table()))
            print(f"\n{tokens} committed tokens, each as its round gives it without any transport")


if __name__ == "__main__":
    main()
