"""Draft rank 0's links to the other ranks of a tensor-parallel draft: one engine for each and for each target, at one endpoint.

Between `leading.DraftPort`, which says what the targets ask and what the draft drew, and `session.draft_peer`. The ranks hear of
all of that in its order. A STEP goes out only while every rank can follow it; one that can't, or is lost, ends what is under way
on all of them. Serves no client and sends no rows. SPEC section 2 (TOKEN).
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from ..client.target import OPENS_QUEUED_BYTES
from ..engine import Engine, EngineConfig
from ..errors import PeerFault, Reason
from ..forming import Forming
from ..logs import logger
from ..seating import Seats
from ..session.draft_peer import DraftLeaderSession, copy_of
from ..session.leader import DEAD, SENT
from ..session.requests import Request, RequestTable

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable

    from ..counters import Counters
    from ..session.leader import Grant
    from ..session.terms import SessionTerms
    from .leading import ServedLeader
    from .leading_group import ServedGroup

READY: Final = "ready"
"""In a rank's report over the control plane: whether it can follow STEPs (its process is attached)."""
DRAINING: Final = "draining"
"""The one key of rank 0's report: it ends soon. The latest STEPs it told the rank of, as [slot, slot_generation] each."""
BUSY: Final = "busy"
"""In a rank's reports after that: whether it has not heard of all of these yet, or is not through with all it heard of."""
TOLD_AT_MOST: Final = 512
"""STEPs in one such report, the latest ones."""


class RankLink:
    """The link to one other rank, for one target."""

    def __init__(self, config: EngineConfig, seats: Seats, seat: int, rank: int, ranks: TargetRanks) -> None:
        self.rank = rank
        self.session: DraftLeaderSession | None = None
        self._ranks = ranks
        self._says_ready = False
        self._says_busy = False
        self._unopened: dict[int, None] = {}  # requests whose OPEN waits until the rank takes more
        counters = ranks.counters
        named = replace(config, name=f"draft{rank}")
        self.engine = Engine(named, self._make_session, self._on_up, self._on_down, counters, forming=seats.seat(seat))

    @property
    def ready(self) -> bool:
        """Whether it can follow a STEP."""
        return self.session is not None and self._says_ready

    @property
    def busy(self) -> bool:
        """Whether a drain must wait: the rank was asked and has not said yet that it is through."""
        return self.session is not None and self._says_busy

    def drain(self, told: list[Grant]) -> None:
        """Asks the rank to say when it is through with these STEPs and all others."""
        if self.session is not None:
            self._says_busy = True
            self.engine.send_control("report", {DRAINING: [[grant.slot, grant.generation] for grant in told[-TOLD_AT_MOST:]]})

    def knows(self, request: int) -> bool:
        """Whether the rank was told of the request."""
        return request not in self._unopened

    def _make_session(self, terms: SessionTerms) -> DraftLeaderSession:
        self.session = DraftLeaderSession(terms, self._ranks.requests, self._ranks.counters)
        return self.session

    def _on_up(self) -> None:
        self._says_ready = self._says_busy = False
        self._unopened = dict.fromkeys(self._ranks.requests.requests)

    def _on_down(self, _reason: Reason) -> None:
        self.session = None
        self._says_ready = False
        self._unopened.clear()
        self._ranks.give_up(Reason.PEER_LOST)

    def serve(self) -> int:
        """One pass of the engine: what the rank says of itself and of STEPs that it can't follow. Returns the bytes moved."""
        moved = self.engine.poll()
        if self.engine.inbox:
            said = self.engine.inbox[:]
            self.engine.inbox.clear()
            for kind, body in said:
                self._hear(kind, body)
        session = self.session
        if session is not None and session.refused:
            refused = session.refused[:]
            session.refused.clear()
            for slot, generation, reason in refused:
                self._ranks.refused(slot, generation, reason)
        self.open_more()
        return moved

    def _hear(self, kind: str, body: object) -> None:
        known = kind == "report" and isinstance(body, dict) and set(body) in ({READY}, {READY, BUSY})
        if not known or not isinstance(body, dict) or any(type(said) is not bool for said in body.values()):
            self.engine.fail(Reason.MALFORMED)
            return
        self._says_ready = body[READY]
        self._says_busy = body.get(BUSY, self._says_busy)
        if not self._says_ready:
            self._ranks.give_up(Reason.PEER_LOST)

    def open_more(self) -> None:
        """OPENs that wait, as many as the rank takes now."""
        while self._unopened and self.session is not None and self.session.outbox.bytes_queued <= OPENS_QUEUED_BYTES:
            number = next(iter(self._unopened))
            del self._unopened[number]
            request = self._ranks.requests.get(number)
            if request is not None:
                self.say(lambda session, request=request: session.open(request))  # type: ignore[misc]
                self.engine.flush()

    def open_later(self, request: int) -> None:
        """OPEN of a request, as soon as the rank takes it, with the tokens it has by then."""
        if self.session is not None:
            self._unopened[request] = None

    def forget(self, request: int) -> bool:
        """Whether the rank was not told of the request yet, and will not be."""
        return self._unopened.pop(request, self) is None

    def say(self, what: Callable[[DraftLeaderSession], None]) -> None:
        """Queues frames. A rank that does not read loses its link."""
        if self.session is None:
            return
        try:
            what(self.session)
        except PeerFault as fault:
            self.engine.fail(fault.reason)

    def flush(self) -> None:
        """Sends what is queued."""
        if self.session is not None and not self.session.outbox.empty():
            self.engine.flush()


class TargetRanks:
    """All other ranks as the followers of one target. `requests` is what they know of its requests; `on_lost(grant, reason)` is
    called for each proposal that ends because a rank does not follow."""

    def __init__(self, leader: ServedLeader | ServedGroup, counters: Counters, on_lost: Callable[[Grant, Reason], None]) -> None:
        self.counters = counters
        self.requests = RequestTable()
        self.links: list[RankLink] = []
        self._leader = leader
        self._on_lost = on_lost
        self._told: dict[int, Grant] = {}  # by slot: the STEP that the ranks were told of last

    # ---- what the target does -----------------------------------------------------------------------------------

    def opened(self, number: int, tokens: array[int]) -> None:
        """OPEN, with the tokens that it came with."""
        theirs = self._leader.requests.get(number)
        if theirs is None or self.requests.get(number) is not None:
            return  # closed again in the same breath
        self.requests.add(Request(number, theirs.seed, tokens, theirs.max_position, theirs.generation))
        for link in self.links:
            link.open_later(number)
            link.open_more()

    def committed(self, number: int, tokens: array[int]) -> None:
        """COMMIT."""
        request = self.requests.get(number)
        if request is None:
            return
        request.extend(tokens)
        for link in self.links:
            if link.knows(number):
                link.say(lambda session: session.commit(request, tokens))

    def closed(self, number: int) -> None:
        """CLOSE."""
        if self.requests.remove(number) is None:
            return
        for slot, told in list(self._told.items()):
            if told.request == number:
                del self._told[slot]
        for link in self.links:
            if not link.forget(number):
                link.say(lambda session: session.close(number))

    def dead(self, request: int, reason: Reason) -> None:
        """RESET: what the ranks were told of the request and its target gave up."""
        for told in list(self._told.values()):
            if told.request == request and not self._stands(told):
                self._reset(told, reason)

    def ended(self) -> None:
        """The target's session is over, and with it those of the links: the target's next life may count slots from 1 again."""
        self._told.clear()
        self.requests.end_session()
        for link in self.links:
            link.engine.end_session()

    # ---- what is drafted ----------------------------------------------------------------------------------------

    def may_step(self, grant: Grant) -> Reason | None:
        """None, or why the ranks can't follow this STEP."""
        if not all(link.ready for link in self.links):
            return Reason.PEER_LOST
        return None if all(link.knows(grant.request) for link in self.links) else Reason.OVERLOAD

    def step(self, grant: Grant) -> bool:
        """A STEP that goes to the draft goes to every rank. False when its request is gone."""
        if self.requests.get(grant.request) is None:
            return False
        self._told.pop(grant.slot, None)  # the latest STEP stands last
        told = self._told[grant.slot] = copy_of(grant)
        for link in self.links:
            link.say(lambda session: session.step(told))
        return True

    def token(self, grant: Grant, position: int, token: int) -> None:
        """A token was drawn: every rank hears of it before the row goes anywhere."""
        told = self._told.get(grant.slot)
        if told is not None and told.generation == grant.generation:
            for link in self.links:
                link.say(lambda session: session.token(told, position, token))
            told.rows += 1
            if told.rows == told.depth:
                told.state = SENT

    def drain(self) -> None:
        """This daemon ends soon: every rank is asked to say when it is through with what it was told of."""
        for link in self.links:
            link.flush()
            link.drain(list(self._told.values()))

    def sweep(self, reason: Reason) -> None:
        """Proposals that this daemon gave up: the ranks are told for this reason."""
        for told in list(self._told.values()):
            if not self._stands(told):
                self._reset(told, reason)

    def refused(self, slot: int, generation: int, reason: Reason) -> None:
        """A rank can't follow a STEP."""
        told = self._told.get(slot)
        if told is not None and told.generation == generation:
            self._lose(told, reason)

    def give_up(self, reason: Reason) -> None:
        """A rank is lost: so is everything under way."""
        for told in list(self._told.values()):
            self._lose(told, reason)

    def _lose(self, told: Grant, reason: Reason) -> None:
        grant = self._grant_of(told)
        if grant is not None and grant.alive(told.generation):
            self._reset(told, reason)
            self._on_lost(grant, reason)

    def _grant_of(self, told: Grant) -> Grant | None:
        session = self._leader.session
        return None if session is None else session.grants[told.slot]

    def _stands(self, told: Grant) -> bool:
        grant = self._grant_of(told)
        if grant is None or grant.generation == told.generation:
            return grant is not None and grant.state != DEAD
        return told.state == SENT  # it was whole, and its slot has moved on

    def _reset(self, told: Grant, reason: Reason) -> None:
        if self._told.get(told.slot) is told:
            del self._told[told.slot]
        for link in self.links:
            link.say(lambda session: session.reset(told, reason))


class DraftRanks:
    """All links of draft rank 0 to the others. `configs` has one for each target, alike but for its identity."""

    def __init__(
        self,
        configs: list[EngineConfig],
        leaders: list[ServedLeader | ServedGroup],
        counters: Counters,
        on_lost: Callable[[int, Grant, Reason], None],
    ) -> None:
        first, hellos = configs[0], [config.hello for config in configs]
        size = first.hello.group_size
        self._log: Any = logger(part="draft")
        forming = Forming(
            first.hello, first.listen, None, first.keys, counters, False, True, None, stubborn=True, others=hellos[1:]
        )
        seats = range(len(configs) * size)
        self._seats = Seats(forming, [seat for seat in seats if seat % size])
        self.targets: list[TargetRanks] = []
        for number, (config, leader) in enumerate(zip(configs, leaders, strict=True)):
            ranks = TargetRanks(leader, counters, lambda grant, reason, number=number: on_lost(number, grant, reason))  # type: ignore[misc]
            ranks.links = [RankLink(config, self._seats, number * size + rank, rank, ranks) for rank in range(1, size)]
            self.targets.append(ranks)

    @property
    def endpoint(self) -> str:
        """Where the other ranks connect to."""
        return self._seats.forming.endpoint

    @property
    def links(self) -> list[RankLink]:
        """Of all targets, in order."""
        return [link for ranks in self.targets for link in ranks.links]

    @property
    def busy(self) -> bool:
        """Whether a rank that was asked to is not through yet."""
        return any(link.busy for link in self.links)

    def drain(self) -> None:
        """This daemon ends soon; see `TargetRanks.drain`."""
        for ranks in self.targets:
            ranks.drain()

    def flush(self) -> None:
        """Sends what waits on every link."""
        for ranks in self.targets:
            for link in ranks.links:
                link.flush()

    def close(self) -> None:
        """Says goodbye to every rank and closes the endpoint."""
        for link in self.links:
            link.engine.close()
        self._seats.close()
