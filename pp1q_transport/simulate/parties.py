"""Processes that can crash, and the leader: a daemon with its draft, which serves every target of a run.

Between the world and the leader's sessions. Draws as an honest draft does, from `models`, unless a fault says otherwise.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import TYPE_CHECKING, Final

from .._native.kernels import draw_u24
from ..counters import Counters
from ..errors import Reason
from ..session.requests import RequestTable
from .checks import HONEST
from .faults import MS, US
from .journal import Violation
from .models import VOCABULARY

if TYPE_CHECKING:
    from ..session.leader import Grant, LeaderSession
    from .journal import Injection
    from .lanes import End
    from .models import Row
    from .ranks import Target
    from .world import World

_BAD_KINDS: Final = 4


class Process:
    """Something that can crash: the leader's daemon or a rank's. `offset_ns` is how far its clock is from the world's."""

    target: Target | None = None

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.alive = True
        self.nonce = 0
        self.offset_ns = 0
        self.ends: dict[str, End] = {}
        self.start()

    def start(self) -> None:
        """A new life."""
        self.nonce = self.world.random.getrandbits(63) | 1
        self.counters = Counters()
        self.alive = True

    def clock(self) -> int:
        """Its own monotonic clock, in ns."""
        return max(0, self.world.now + self.offset_ns)

    def crash(self, injection: Injection | None = None) -> None:
        """It dies at once; its peers hear of it, and after a while there is a new life."""
        if not self.alive:
            return
        for end in list(self.ends.values()):
            end.alive = False
            if injection is not None:
                self.world.outcomes.watch(("link", end.wire.number), injection)
            self.world.cut(end.peer, Reason.PEER_LOST.value, and_peer=False)
        self.ends.clear()
        self.alive = False
        self.world.after(self.world.random.randint(200 * US, 4 * MS), self.restart)

    def restart(self) -> None:
        """The supervisor starts it again."""
        if not self.alive:
            self.start()
            self.world.journal.note(f"{self.world.now} {self.name} starts again")

    def down(self, end: End, reason: Reason) -> None:
        """The link has ended for us."""
        end.alive = False
        if self.ends.get(end.name) is end:
            del self.ends[end.name]
        self.lose(end, reason)

    def lose(self, end: End, reason: Reason) -> None:
        """What its session is told."""
        end.session.lost(reason)

    def settle(self) -> None:
        """What an owner does after every frame."""

    def poll(self) -> None:
        """What an owner does from time to time."""

    def flush(self) -> None:
        """Everything queued goes on its way."""
        for end in list(self.ends.values()):
            if end.link.outgoing.data or not end.session.outbox.empty():
                self.world.lanes.send(end)


class LeaderParty(Process):
    """Drafts: `depth` rows a STEP, each after a while. `drawn` remembers every RNG key of its draws."""

    def start(self) -> None:
        """See `Process.start`."""
        super().start()
        self.tables: dict[int, RequestTable] = {}
        self.chains: dict[tuple[int, int], list[int]] = {}

    def table(self, target: int) -> RequestTable:
        """The requests of one target, kept as long as the process lives."""
        return self.tables.setdefault(target, RequestTable())

    def lose(self, end: End, reason: Reason) -> None:
        """See `Process.lose`."""
        end.session.lost()

    def settle(self) -> None:
        """See `Process.settle`: new STEPs are drafted for."""
        for end in list(self.ends.values()):
            session: LeaderSession = end.session
            if session.steps:
                for grant in session.steps:
                    self._begin(end, grant)
                session.steps.clear()
            session.events.clear()
            session.news.clear()

    def _begin(self, end: End, grant: Grant) -> None:
        world, target = self.world, self.world.target_of(end)
        stall = target.stalls.pop((end.session.terms.receiver_nonce, grant.slot, grant.generation), None)
        if stall is not None:
            if stall.outcome is None:
                world.outcomes.begin(stall)
            return
        self.chains[target.number, grant.slot] = list(end.session.requests.get(grant.request).tokens[-2:])
        delay = world.random.randint(5 * US, 300 * US)
        world.after(delay, partial(self._row, end, grant, grant.generation, 0))

    def _row(self, end: End, grant: Grant, generation: int, index: int) -> None:
        if not end.alive or not grant.alive(generation):
            return
        world, target = self.world, self.world.target_of(end)
        position = grant.anchor + 1 + index
        world.watcher.drew(target.number, grant, position)
        u24 = draw_u24(grant.seed, 1, grant.request_generation, grant.round, position)
        chain = self.chains[target.number, grant.slot]
        row = world.models.row(chain, grant.representation)
        token = world.models.token(row, u24)
        chain.append(token)
        bad = target.bad_rows.get((end.session.terms.receiver_nonce, grant.slot, generation))
        if bad is not None and bad.fault.pick % grant.depth == index and bad.outcome is None:
            world.outcomes.begin(bad)
            row, token, payload = self._spoil(bad, row, token)
            world.watcher.sent_row(target.number, grant, position, None)
        else:
            payload = row.payload
            world.watcher.sent_row(target.number, grant, position, (token, payload))
        if not end.session.put_row(grant, generation, position, token, row.entries, payload, 0, len(payload)):
            raise Violation(HONEST, f"slot {grant.slot} takes no row though its grant is alive")
        if index + 1 < grant.depth:
            world.after(world.random.randint(0, 200 * US), partial(self._row, end, grant, generation, index + 1))
        self.flush()

    def _spoil(self, bad: Injection, row: Row, token: int) -> tuple[Row, int, bytes]:
        """A row that is no q, or not the q of its token: what a broken draft might send, with good digests."""
        way = bad.fault.place % _BAD_KINDS
        if way == 0:
            return row, (token + 1) % VOCABULARY, row.payload
        first = struct.unpack_from("<f", row.payload)[0]
        wrong = (first + 2.0**-24, float("nan"), -0.5)[way - 1]
        return row, token, struct.pack("<f", wrong) + row.payload[4:]
