"""Rank 0 of a target: faces the leader, holds the group, decides what is asked for next.

Between the world and `ReceiverSession`, `RankGroup` and its hubs. Its target keeps every request busy, one proposal at a time,
and goes on with all ranks in step. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import ProposalDiscarded, Reason
from ..session import slots as st
from ..session.group import Phase
from ..session.requests import Request, RequestTable
from .checks import EPOCHS, ONE_END
from .journal import HARMLESS, SUPERSEDED, Violation, require
from .models import PROMPT, Book
from .ranks import Rank

if TYPE_CHECKING:
    from ..session.hub import RankGroup
    from ..session.receiver import ReceiverSession
    from ..session.slots import Slot
    from .lanes import End
    from .ranks import Key, Target
    from .world import World

REQUESTS: Final = 2
DEPTH: Final = 3
BUDGET_US: Final = 4_000
CONTEXT_TOKENS: Final = 64
COMMITTED: Final = "committed"
_LINK_ENDS: Final = frozenset({Reason.PEER_LOST.value, Reason.LINK_ERROR.value, Reason.CANCELLED.value})


class RankZero(Rank):
    """Rank 0. `requests` are the target process's: they outlive the daemon. `open_rounds`: rounds that have not ended."""

    group: RankGroup | None

    def __init__(self, world: World, target: Target) -> None:
        self.requests = RequestTable()
        self.generations: dict[int, int] = {}  # the scheduler's: the highest each request has had
        self.waiting: dict[int, tuple[Slot, int]] = {}  # request -> its proposal under way
        self.alone: dict[int, int] = {}  # request -> its round that the target must do alone
        self.open_rounds: dict[tuple[int, int], int] = {}  # (request, round) -> request_generation
        super().__init__(world, target, 0)

    def start(self) -> None:
        """See `Process.start`."""
        super().start()
        machines, size = self.world.machines, self.target.size
        self.group = None
        if size > 1:
            self.group = machines.group(size, self.counters, machines.coordinator(size))
        self._disagreed = 0

    def key(self, slot: Slot) -> Key:
        """See `Rank.key`."""
        return (self.nonce, slot.epoch, slot.index, slot.generation, self.target.number)

    @property
    def receiver(self) -> ReceiverSession | None:
        """The session with the leader."""
        end = self.ends.get("lead")
        return None if end is None else end.session

    # ---- the ends of rounds -------------------------------------------------------------------------------------

    def round_over(self, request: int, round_number: int, how: str) -> None:
        """A STEP has come to its one end: committed, or a reason."""
        generation = self.open_rounds.pop((request, round_number), None)
        require(generation is not None, ONE_END, f"{self.name} request {request} round {round_number} ends again: {how}")
        self.world.report.ends[how] += 1
        self.world.outcomes.over(("request", self.target.number, request), HARMLESS if how == COMMITTED else self._blame(how))

    def _blame(self, reason: str) -> str:
        """What a proposal's end says of a fault that touched it: the end of a link is another fault's doing."""
        return SUPERSEDED if reason in _LINK_ENDS else reason

    def saw_ready(self, slot: Slot) -> None:
        """See `Rank.saw_ready`."""
        self.world.outcomes.over(("proposal", self.target.number, self.nonce, slot.index, slot.generation), HARMLESS)

    def saw_void(self, slot: Slot) -> None:
        """See `Rank.saw_void`: by decision, unless its epoch is over."""
        reason = Reason.from_code(slot.reason).value
        key = ("proposal", self.target.number, self.nonce, slot.index, slot.generation)
        self.world.outcomes.over(key, self._blame(reason))
        if self.group is None or self.group.epoch == slot.epoch:
            self.world.watcher.decided(self, self.key(slot), slot.reason)
        if (slot.request, slot.round) in self.open_rounds:
            self.round_over(slot.request, slot.round, reason)
        if slot.request in self.requests.requests:
            self.alone[slot.request] = slot.round

    def crash(self, injection: object = None) -> None:
        """See `Process.crash`: what was under way is lost, the target's requests are not."""
        if not self.alive:
            return
        super().crash(injection)  # type: ignore[arg-type]
        self._abandon_rounds()
        for number in list(self.requests.requests):
            self._raise_generation(self.requests.requests[number])
        self.world.outcomes.over(("agreement", self.target.number), SUPERSEDED)

    def _abandon_rounds(self) -> None:
        for slot, generation in self.waiting.values():
            self.world.outcomes.over(("proposal", self.target.number, self.nonce, slot.index, generation), SUPERSEDED)
        self.waiting.clear()
        for request, round_number in list(self.open_rounds):
            self.round_over(request, round_number, Reason.PEER_LOST.value)

    def _raise_generation(self, request: Request) -> None:
        request.discard()
        self.generations[request.request] = request.generation

    # ---- the target process -------------------------------------------------------------------------------------

    def may_commit(self, slot: Slot, generation: int) -> bool:
        """See `Rank.may_commit`."""
        return self.group is None or self.group.may_commit(slot.index, generation, slot.epoch)

    def holds_back(self) -> bool:
        """See `Rank.holds_back`: from our own answer until the epoch is open."""
        return self.group is not None and self.group.coordinator.phase is Phase.ASKING and not self.group.asking

    def committed(self, slot: Slot, tokens: list[int]) -> None:
        """See `Rank.committed`."""
        request = self.requests.requests[slot.request]
        self.world.watcher.sampled(self.target.number, slot.request, slot.request_generation, slot.round, slot.anchor + 1)
        if self.receiver is None:
            if self.group is not None:
                self.group.check_commit(request.request, slot.round)
            request.extend(tokens)
            request.in_flight = False
        else:
            self.receiver.commit(request, slot.round, wire.VERIFIED, len(tokens) - 1, tokens)
        self.world.report.commits += 1
        self.round_over(slot.request, slot.round, COMMITTED)

    def too_late(self, slot: Slot) -> None:
        """A commit of what is void must fail and change nothing; the target does the round alone."""
        request = self.requests.requests.get(slot.request)
        self.round_over(slot.request, slot.round, Reason.PEER_LOST.value)
        if request is None:
            return
        if self.receiver is not None and self.group is not None and not self.group.open:
            before = len(request.tokens)
            try:
                self.receiver.commit(request, slot.round, wire.VERIFIED, slot.depth, [0] * (slot.depth + 1))
            except ProposalDiscarded as discarded:
                require(discarded.reason is Reason.PEER_LOST, EPOCHS, f"a late commit fails as {discarded.reason.value}")
            else:
                raise Violation(EPOCHS, "rank 0's session commits across the end of an epoch")
            require(len(request.tokens) == before, EPOCHS, "a commit that failed left tokens behind")
        self._raise_generation(request)
        self.alone[request.request] = slot.round

    def release(self, slot: Slot, generation: int) -> None:
        """See `Rank.release`."""
        self.table.release(slot, generation, 0, 0)

    def before_death(self) -> None:
        """See `Rank.before_death`: its requests are closed; the scheduler remembers what the user has seen, and generations."""
        assert self.book is not None
        self.target.archive = {number: book.copy() for number, book in self.book.items()}
        receiver = self.receiver
        for number, request in list(self.requests.requests.items()):
            self.generations[number] = max(request.generation, self.generations.get(number, 0))
            if receiver is not None:
                receiver.close(request)
            self.generations[number] = max(request.generation, self.generations[number])
            self.requests.remove(number)
        if not self.world.machines.remembers:
            self.generations.clear()
            self.target.archive = {number: Book(book.seed, book.representation) for number, book in self.book.items()}
        if receiver is not None:
            self.got(receiver)
        if self.group is not None:
            self.group.leave(Reason.PEER_LOST)
        self.alone.clear()

    def returns(self) -> None:
        """See `Rank.returns`: alone, it has nobody to agree with."""
        super().returns()
        if self.group is None:
            self.agreed_state()

    def agreed_state(self) -> tuple[int, int]:
        """See `Rank.agreed_state`; a new target opens the requests that it is told of, beyond their old generations."""
        answer = super().agreed_state()
        assert self.book is not None
        for number, book in self.book.items():
            if number in self.requests.requests:
                continue
            self._open(Request(number, book.seed, book.tokens, generation=self.generations.get(number, -1) + 1))
        return answer

    def _open(self, request: Request) -> None:
        self.generations[request.request] = request.generation
        self.requests.add(request)
        if self.receiver is not None:
            self.receiver.open(request)

    # ---- the daemon ---------------------------------------------------------------------------------------------

    def settle(self) -> None:
        """See `Process.settle`."""
        end = self.ends.get("lead")
        if end is not None:
            self.got(end.session)
            self.fence(end)
            end.session.news.clear()
        if self.group is not None:
            self.group.news.clear()
            for hub in self.group.hubs.values():
                hub.news.clear()
            self._watch_epoch(self.group)

    def _watch_epoch(self, group: RankGroup) -> None:
        coordinator, target = group.coordinator, self.target
        if coordinator.disagreements != self._disagreed:
            self._disagreed = coordinator.disagreements
            self.world.report.disagreements += 1
            self.world.outcomes.over(("agreement", target.number), Reason.RANK_DISAGREE.value)
        if coordinator.open and target.current != (self.nonce, coordinator.epoch):
            target.current = (self.nonce, coordinator.epoch)
            self.world.report.epochs += 1
            self.world.journal.note(f"{self.world.now} {self.name} epoch {coordinator.epoch} opens")
            self.world.outcomes.over(("agreement", target.number), HARMLESS)
            self.world.watcher.opened(target)

    def lose(self, end: End, reason: Reason) -> None:
        """See `Process.lose`: with the leader goes every generation."""
        super().lose(end, reason)
        if end.name == "lead":
            self.got(end.session)
            for request in self.requests.requests.values():
                self._raise_generation(request)

    def poll(self) -> None:
        """See `Process.poll`."""
        receiver = self.receiver
        if receiver is not None:
            receiver.tick(self.clock())
            self.settle()
        if self.group is not None and self.group.asking and self.target_alive:
            self.group.agree(*self.agreed_state())
        if receiver is not None and self.receiver is receiver and self.target_alive and not receiver.broken:
            self._rounds(receiver)
        self.settle()
        self.flush()

    # ---- what is asked for next ---------------------------------------------------------------------------------

    def _busy(self, request: int) -> bool:
        """Whether some rank still has the request's last proposal under way, or reads it."""
        slot, generation = self.waiting.get(request, (None, 0))
        if slot is None:
            return False
        return any(_has(rank, slot.index, generation) for rank in self.target.ranks)

    def _rounds(self, receiver: ReceiverSession) -> None:
        """Keeps every request busy: one STEP as soon as its last proposal is decided and given back by all."""
        if self.group is not None and not self.group.open:
            self._refused_outside_an_epoch(receiver)
            return
        assert self.book is not None
        for request in list(self.requests.requests.values()):
            if self._busy(request.request):
                continue
            if request.request in self.alone:
                self._go_alone(receiver, request)
            if len(request.tokens) + DEPTH + 1 > CONTEXT_TOKENS:
                self._end_request(receiver, request)
            elif self.world.more():
                self._step(receiver, request)
        while len(self.requests.requests) < REQUESTS:
            number = self.world.next_request()
            book = Book(number * 77, wire.DENSE if number & 1 else wire.SPARSE)
            for rank in self.target.ranks:
                if rank.book is not None:
                    rank.book[number] = book.copy()
            self._open(Request(number, book.seed, PROMPT))

    def _refused_outside_an_epoch(self, receiver: ReceiverSession) -> None:
        request = next((r for r in self.requests.requests.values() if not r.in_flight), None)
        if request is not None:
            try:
                receiver.step(request, self.clock(), 1, 1.0, 8, wire.SPARSE, 0, BUDGET_US, 0)
            except ProposalDiscarded:
                return
            raise Violation(EPOCHS, f"{self.name} sends a STEP outside an epoch")

    def _go_alone(self, receiver: ReceiverSession, request: Request) -> None:
        """One token of the target's own, on every rank."""
        round_number, number = self.alone.pop(request.request), request.request
        assert self.book is not None
        book, first = self.book[number], len(self.book[number].tokens)
        token = self.world.models.alone(book, request.generation, round_number)
        self.world.watcher.sampled(self.target.number, number, request.generation, round_number, first)
        receiver.commit(request, round_number, wire.TARGET_ONLY, 0, [token])
        self.world.report.alone += 1
        for rank in self.target.ranks:
            if rank.book is not None and len(rank.book[number].tokens) == first:
                rank.book[number].add(wire.TARGET_ONLY, request.generation, round_number, 0, [token])

    def _end_request(self, receiver: ReceiverSession, request: Request) -> None:
        assert self.book is not None
        self.world.check_book(self, request.request)
        receiver.close(request)
        self.requests.remove(request.request)
        self.waiting.pop(request.request, None)
        self.world.watcher.forget_request(self.target.number, request.request)
        for rank in self.target.ranks:
            if rank.book is not None:
                rank.book.pop(request.request, None)

    def _step(self, receiver: ReceiverSession, request: Request) -> None:
        assert self.book is not None
        representation = self.book[request.request].representation
        depth = 1 + self.world.random.randrange(DEPTH)
        support = 8 if representation == wire.SPARSE else 0
        granted = receiver.step(request, self.clock(), depth, 1.0, support, representation, 0, BUDGET_US, 0)
        if granted is None:
            return
        self.waiting[request.request] = (granted, granted.generation)
        self.open_rounds[request.request, granted.round] = request.generation
        self.generations[request.request] = request.generation
        self.world.watcher.granted(self, granted, self.key(granted))
        self.world.stepped(self.target, granted)


def _has(rank: Rank, index: int, generation: int) -> bool:
    if not rank.alive:
        return False
    slot = rank.table.slots[index]
    return slot.generation == generation and (slot.state in st.LIVE or rank.held.get(index) == generation)
