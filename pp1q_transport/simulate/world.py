"""One run: a leader, its targets and their ranks on one virtual clock, `rounds` STEPs under given faults, then peace.

Between the real sessions and whoever asks for a run. Every event is noted, and followed by the checks. In the end all must come
to rest: every slot FREE, every link up, every rank with the same tokens, which are those of a run without any transport.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from .. import wire
from ..errors import Pp1qError, Reason
from ..session import slots as st
from ..session.group import Coordinator
from ..session.group_member import Member
from ..session.hub import HubSession, RankGroup
from ..session.leader import LeaderSession
from ..session.member import MemberSession
from ..session.receiver import ReceiverSession
from ..session.terms import SessionTerms
from .checks import FREE, NO_ERROR, ONE_END, UNAFFECTED, Watcher
from .faults import MS, US, FaultKind
from .injecting import inject
from .journal import Journal, Outcomes, Violation, require
from .lanes import End, LandingMemory, Lanes, PlayedLink, Wire
from .members import RankN
from .models import SUPPORT, VOCABULARY, Models
from .parties import LeaderParty, Process
from .ranks import Target
from .zero import CONTEXT_TOKENS, DEPTH, RankZero

if TYPE_CHECKING:
    from collections.abc import Iterable

    from ..session.slots import Slot
    from ..wire import Header
    from .faults import Fault
    from .journal import Injection
    from .ranks import Rank

SLOTS: Final = 4
POLL_NS: Final = 400 * US
ROUNDS_IN_PEACE: Final = 4
_STANDSTILL_NS: Final = 500 * MS
_PIECES: Final = (0, 0, 0, 97)  # the most that a link takes at once; 0: all there is


@dataclass(frozen=True)
class Machines:
    """What a world is built of; a plant puts something weaker in one place."""

    coordinator: type[Coordinator] = Coordinator
    group: type[RankGroup] = RankGroup
    member: type[Member] = Member
    member_session: type[MemberSession] = MemberSession
    receiver_session: type[ReceiverSession] = ReceiverSession
    leader: type[LeaderParty] = LeaderParty
    zero: type[RankZero] = RankZero
    rank: type[RankN] = RankN
    draw_proof: bool = True
    remembers: bool = True  # whether a scheduler keeps tokens and generations for a target process that starts again


@dataclass(frozen=True)
class Setup:
    """What makes a run, besides its faults: equal setups and equal faults are equal runs, event by event. `slow`: how often what
    is sent takes milliseconds, until there is peace."""

    seed: int
    rounds: int = 250
    ranks: int = 2
    targets: int = 2
    slow: float = 0.01


@dataclass
class Report:
    """What one run came to. `ends`: rounds by how they ended; `faults`: counts by (kind, outcome)."""

    rounds: int = 0
    commits: int = 0
    alone: int = 0
    epochs: int = 0
    disagreements: int = 0
    sessions: int = 0
    events: int = 0
    digest: str = ""
    ends: Counter[str] = field(default_factory=Counter)
    faults: Counter[tuple[str, str]] = field(default_factory=Counter)


# Which faults may be what a link ended of: so lost, for overload, by a refusal.
_KILLS: Final = frozenset({FaultKind.DROP, FaultKind.TRUNCATE, FaultKind.CUT, FaultKind.CRASH_LEADER, FaultKind.CRASH_RANK})
_QUARANTINES: Final = frozenset({FaultKind.LATE_FENCE, FaultKind.OVERDUE})
_DAMAGES: Final = frozenset({FaultKind.DROP, FaultKind.TRUNCATE, FaultKind.REORDER, FaultKind.DUPLICATE, FaultKind.STALE})
_MODELS: Final = Models()


class World:
    """One run, played by `play`. `halves`: how often a chunk comes in two parts."""

    def __init__(self, setup: Setup, faults: Iterable[Fault] = (), machines: Machines | None = None, keep: bool = False) -> None:
        self.setup = setup
        self.machines = machines or Machines()
        self.random = random.Random(f"{setup.seed} world")
        self.journal = Journal(keep)
        self.outcomes = Outcomes(self.journal)
        self.watcher = Watcher(self)
        self.lanes = Lanes(self)
        self.models = _MODELS
        self.report = Report()
        self.now = 1_000 * MS
        self.slow = setup.slow
        self.halves = 0.1
        self._heap: list[tuple[int, int, Callable[[], None]]] = []
        self._serial = 0
        self._left = 0
        self._request = 0
        self._links = 0
        self._retry: dict[str, int] = {}
        self._faults: dict[int, list[Fault]] = {}
        for fault in faults:
            self._faults.setdefault(fault.round, []).append(fault)
        self.leader = self.machines.leader(self, "leader")
        self.targets = [self._target(number) for number in range(setup.targets)]
        self.processes: list[Process] = [self.leader, *(rank for target in self.targets for rank in target.ranks)]

    def _target(self, number: int) -> Target:
        target = Target(self, number, self.setup.ranks, self._terms(1, 1).geometry(), self.random.random() < 0.5)
        target.zero = self.machines.zero(self, target)
        target.members = [self.machines.rank(self, target, rank) for rank in range(1, target.size)]
        return target

    def _terms(self, sender: int, taker: int) -> SessionTerms:
        self._links += 1
        return SessionTerms(
            self._links, sender, taker, VOCABULARY, DEPTH, SUPPORT, SLOTS,
            draw_proof=self.machines.draw_proof, max_context_tokens=CONTEXT_TOKENS,
        )  # fmt: skip

    # ---- time -------------------------------------------------------------------------------------------------------

    def after(self, delay_ns: int, call: Callable[[], None]) -> None:
        """Calls `call` once the clock stands `delay_ns` later."""
        self._serial += 1
        heapq.heappush(self._heap, (self.now + delay_ns, self._serial, call))

    def _run(self, until_ns: int, done: Callable[[], bool]) -> bool:
        while self._heap and self._heap[0][0] <= until_ns:
            if done():
                return True
            self.now, _, call = heapq.heappop(self._heap)
            self.report.events += 1
            call()
        self.now = max(self.now, until_ns)
        return done()

    def _tick(self) -> None:
        """Every owner's poll, and the forming of what is down."""
        self._form()
        for process in self.processes:
            if process.alive:
                process.poll()
                self.check(process)
        self.after(POLL_NS, self._tick)

    def check(self, process: Process) -> None:
        """After every event: the rules at the process that it happened to; and a session that is broken from within ends."""
        self.watcher.look(process)
        for end in list(process.ends.values()):
            if end.session.broken and end.alive:
                self.lanes.refused(end, Reason.from_code(end.session.broken))
                process.settle()

    # ---- rounds -----------------------------------------------------------------------------------------------------

    def more(self) -> bool:
        """Whether another STEP is wanted."""
        return self._left > 0

    def next_request(self) -> int:
        """A request ID that was never used."""
        self._request += 1
        return self._request

    def stepped(self, target: Target, slot: Slot) -> None:
        """A STEP was granted: a round, with its faults."""
        number = self.report.rounds
        self._left -= 1
        self.report.rounds += 1
        self.journal.note(
            f"{self.now} step {number} of target {target.number}: request {slot.request} generation {slot.request_generation} "
            f"round {slot.round} depth {slot.depth} in slot {slot.index}.{slot.generation}"
        )
        for fault in self._faults.get(number, ()):
            inject(self, fault, target, slot)

    # ---- links ------------------------------------------------------------------------------------------------------

    def cut(self, end: End, outcome: str, and_peer: bool = True, by: Injection | None = None) -> None:
        """The link is lost: nothing more gets through, and each end learns of it after a while."""
        for side in (end, end.peer) if and_peer else (end,):
            side.cut = True
            side.peer.cut = True
            self.after(self.random.randint(0, 600 * US), partial(self._ended, side, outcome))

    def _ended(self, end: End, outcome: str) -> None:
        self.link_over(end.wire, outcome)
        if end.alive:
            self.journal.note(f"{self.now} {end.owner.name} loses {end.name}")
            end.link.close()
            end.owner.down(end, Reason.PEER_LOST)
            end.owner.settle()
            self.check(end.owner)
            end.owner.flush()

    def link_over(self, wire_: Wire, outcome: str) -> None:
        """The first word of a link's end."""
        if wire_.over:
            return
        wire_.over = True
        causes = _KILLS if outcome == Reason.PEER_LOST.value else _QUARANTINES if outcome == Reason.OVERLOAD.value else _DAMAGES
        self.outcomes.over(("link", wire_.number), outcome, causes)

    def target_of(self, end: End) -> Target:
        """The target that a link of the leader's leads to."""
        target = end.peer.owner.target
        assert target is not None
        return target

    def _form(self) -> None:
        """Joins again what is down at both ends, each link after a delay of its own."""
        for target in self.targets:
            self._try_join(target, f"lead{target.number}", self.leader, target.zero)
            for member in target.members:
                self._try_join(target, f"rank{member.rank}", target.zero, member)

    def _try_join(self, target: Target, name: str, left: Process, right: Rank) -> None:
        there = name if left is not self.leader else "lead"
        key = f"{target.number} {name}"
        if not (left.alive and right.alive) or name in left.ends or there in right.ends:
            self._retry[key] = self.now + self.random.randint(0, 2 * MS)
        elif self.now >= self._retry.get(key, 0):
            self._join(target, name, there, left, right)

    def _join(self, target: Target, name: str, there: str, left: Any, right: Any) -> None:
        terms = self._terms(left.nonce, right.nonce)
        wire_ = Wire(self._links, f"{there} of target {target.number}")
        if left is self.leader:
            one: Any = LeaderSession(terms, left.table(target.number), left.counters)
            requests, counters = right.requests, right.counters
            two: Any = self.machines.receiver_session(terms, right.table, right.memory, requests, counters, 0, right.group)
        else:
            one = HubSession(terms, left.group, right.rank, left.counters)
            two = self.machines.member_session(terms, right.member, right.table, right.memory, right.counters)
        pieces = self.random.choice(_PIECES)
        landing = LandingMemory(SLOTS) if target.one_sided else None
        near = End(left, one, PlayedLink(one, self._links, pieces, None, SLOTS), wire_)
        far = End(right, two, PlayedLink(two, self._links + 1, pieces, landing, SLOTS), wire_)
        near.name, far.name = name, there
        near.peer, far.peer = far, near
        left.ends[name], right.ends[there] = near, far
        self.report.sessions += 1
        self.journal.note(f"{self.now} {wire_.name} is up: link {wire_.number}")
        if left is self.leader:
            for request in right.requests.requests.values():
                two.open(request)
        else:
            two.up()
            one.up()
        left.flush()
        right.flush()

    def saw_sent(self, end: End, header: Header) -> None:
        """A frame leaves a session."""
        owner = end.owner
        if header.kind == wire.VOTE and header.status == 0 and isinstance(owner, RankN):
            key = (owner.member.coordinator, header.epoch, header.slot, header.slot_generation, owner.target.number)
            self.watcher.voted(key, owner.rank)

    # ---- the play ---------------------------------------------------------------------------------------------------

    def play(self) -> Report:
        """All of it. Raises `Violation`."""
        try:
            self._play(self.setup.rounds)
        except Violation:
            raise
        except (Pp1qError, AssertionError, LookupError, ValueError, TypeError, AttributeError, ArithmeticError) as error:
            raise Violation(NO_ERROR, f"{type(error).__name__}: {error}") from error
        return self.report

    def _play(self, rounds: int) -> None:
        self._left = rounds
        self._tick()
        while self._left > 0:
            left = self._left
            moved = self._run(self.now + _STANDSTILL_NS, partial(self._fewer_than, left))
            require(moved, FREE, f"a standstill: {left} of {rounds} rounds are left, {self._unrest()}")
        self._faults.clear()
        self.slow = 0.0
        self._run(self.now + 40 * MS, lambda: False)  # faults that are on their way still come
        for target in self.targets:
            for end in [each for rank in target.ranks for each in rank.ends.values()]:
                for side in (end, end.peer):
                    side.armed.clear()
                    if side.link.landing is not None:
                        side.link.landing.ambushes.clear()
        require(self._run(self.now + _STANDSTILL_NS, self._at_rest), FREE, f"no rest: {self._unrest()}")
        self._left = ROUNDS_IN_PEACE
        before = self.report.ends["committed"]
        require(self._run(self.now + _STANDSTILL_NS, lambda: self._left <= 0), FREE, "a target does not open again")
        require(self._run(self.now + _STANDSTILL_NS, self._at_rest), FREE, f"no rest in the end: {self._unrest()}")
        fresh = self.report.ends["committed"] - before
        require(fresh == ROUNDS_IN_PEACE, FREE, f"{fresh} of {ROUNDS_IN_PEACE} rounds in peace were committed")
        self._close()

    def _fewer_than(self, left: int) -> bool:
        return self._left < left

    def _close(self) -> None:
        for target in self.targets:
            for rank in target.ranks:
                assert rank.book is not None
                for number in rank.book:
                    self.check_book(rank, number)
            require(len({rank.state() for rank in target.ranks}) == 1, UNAFFECTED, f"ranks of target {target.number} differ")
            require(not target.zero.open_rounds, ONE_END, f"rounds without an end: {target.zero.open_rounds}")
        require(self.report.ends.total() == self.report.rounds, ONE_END, f"{self.report.ends} of {self.report.rounds} rounds")
        self.report.faults = self.outcomes.close()
        self.report.digest = self.journal.digest()

    def check_book(self, rank: Rank, number: int) -> None:
        """A rank's tokens of a request are those that its rounds give without any transport."""
        assert rank.book is not None
        book = rank.book[number]
        require(self.models.replay(book) == book.tokens, UNAFFECTED, f"{rank.name} request {number} differs from its replay")

    def _at_rest(self) -> bool:
        return not self._unrest()

    def _unrest(self) -> dict[str, object]:
        """What is not as in peace."""
        busy: dict[str, object] = {"leader down": not self.leader.alive}
        for target in self.targets:
            zero = target.zero
            busy[f"{zero.name} has no leader"] = zero.receiver is None
            busy[f"{zero.name} has no epoch"] = zero.group is not None and not zero.group.open
            for rank in target.ranks:
                busy[f"{rank.name} down"] = not rank.alive or not rank.target_alive or rank.book is None
                busy[rank.name] = {i: st.STATE_NAMES[s.state] for i, s in enumerate(rank.table.slots) if s.state}
            for member in target.members:
                busy[f"{member.name} closed"] = not member.member.open
        return {name: value for name, value in busy.items() if value}
