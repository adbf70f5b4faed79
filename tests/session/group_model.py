"""Every interleaving of a small rank group: two pure machines, FIFO links and a bounded number of faults, searched in full.

Beside `pp1q_transport.simulate`, which plays long lives at random: this one plays all short ones. Ranks are `Coordinator` and
`Member` objects, a slot is a few words, a link two queues. Each state is visited once; one from which nothing can happen must be
one in which the group is open and every slot free.

    PYTHONPATH=.:tests python tests/session/group_model.py --members 2 --grants 2 --cuts 1 --leaves 1 --fails 1 --noes 1
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields

from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.session.group import READY, Action, Announce, Coordinator, Decide, Freed, Lost, Phase, Proposal
from pp1q_transport.session.group_member import Ballot, Member, Paper, Standing

TIMEOUT = Reason.TIMEOUT.code
MASS = Reason.MASS.code
FREE, LIVE, HELD = "free", "live", "held"  # HELD: READY, and its consumer reads

NO_STATE = frozenset({"stale", "size", "rank", "disagreements"})  # attributes of the machines that change no future

Message = tuple[str, *tuple[int, ...]]


class Broken(AssertionError):
    """A state that must not be."""


@dataclass(frozen=True)
class Budget:
    """How often each thing may happen in one life."""

    grants: int = 1
    cuts: int = 1
    leaves: int = 0
    fails: int = 1  # rank 0's own failures (its budget, its rows)
    noes: int = 1  # votes with a reason

    def less(self, name: str) -> Budget:
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        values[name] -= 1
        return Budget(**values)


def copy_of(machine: Coordinator | Member) -> Coordinator | Member:
    """A machine of its own with the same state."""
    twin = object.__new__(type(machine))
    for name, value in vars(machine).items():
        if isinstance(value, dict):
            value = {key: _item(item) for key, item in value.items()}
        elif isinstance(value, set):
            value = set(value)
        setattr(twin, name, value)
    return twin


def _item(item: object) -> object:
    if isinstance(item, Proposal):
        return Proposal(item.epoch, item.slot, item.generation, item.holders, item.fate, item.code, dict(item.votes))
    if isinstance(item, Paper):
        return Paper(item.epoch, item.slot, item.generation, item.ballot, item.code, item.returned)
    return item


def key_of(value: object) -> object:
    if isinstance(value, dict):
        return tuple(sorted((key, key_of(item)) for key, item in value.items()))
    if isinstance(value, set | frozenset):
        return tuple(sorted(value))
    if isinstance(value, Proposal):
        return (value.epoch, value.generation, value.holders, value.fate.value, value.code, key_of(value.votes))
    if isinstance(value, Paper):
        return (value.epoch, value.generation, value.ballot.value, value.code, value.returned)
    return value


@dataclass
class Slot:
    """One rank's only slot. `group`: at rank 0, whether members hold it."""

    state: str = FREE
    generation: int = 0
    epoch: int = 0
    group: bool = False
    committed: bool = False


class State:
    """Everything there is. Rank 0 is `ranks[0]` in slots; member r is `members[r - 1]`."""

    def __init__(self, members: int, budget: Budget, coordinator: Coordinator, made: list[Member]) -> None:
        self.budget = budget
        self.coordinator = coordinator
        self.members = made
        self.slots = [Slot() for _ in range(members + 1)]
        self.down: list[tuple[Message, ...]] = [()] * members  # rank 0 -> member
        self.up: list[tuple[Message, ...]] = [()] * members
        self.cut = [True] * members
        self.hub_knows = [True] * members  # of the cut
        self.member_knows = [True] * members
        self.decisions: dict[tuple[int, int], int] = {}
        self.votes: set[tuple[int, int, int]] = set()
        self.opened = 0

    def clone(self) -> State:
        twin = object.__new__(State)
        twin.budget = self.budget
        twin.coordinator = copy_of(self.coordinator)  # type: ignore[assignment]
        twin.members = [copy_of(member) for member in self.members]  # type: ignore[misc]
        twin.slots = [Slot(s.state, s.generation, s.epoch, s.group, s.committed) for s in self.slots]
        for name in ("down", "up", "cut", "hub_knows", "member_knows"):
            setattr(twin, name, list(getattr(self, name)))
        twin.decisions, twin.votes, twin.opened = dict(self.decisions), set(self.votes), self.opened
        return twin

    def key(self) -> object:
        machines = tuple(
            tuple(key_of(value) for name, value in vars(machine).items() if name not in NO_STATE)
            for machine in (self.coordinator, *self.members)
        )
        slots = tuple((s.state, s.generation, s.epoch, s.group, s.committed) for s in self.slots)
        links = (tuple(self.down), tuple(self.up), tuple(self.cut), tuple(self.hub_knows), tuple(self.member_knows))
        return hash((self.budget, machines, slots, links, key_of(self.decisions), key_of(self.votes), self.opened))

    # ---- what can happen ----------------------------------------------------------------------------------------

    def moves(self) -> Iterator[tuple[str, Callable[[State], None]]]:
        """(name, what it does to a clone) of everything that can happen next."""
        group, mine, budget = self.coordinator, self.slots[0], self.budget
        if group.asking:
            yield "rank 0 agrees", lambda s: s.act(s.coordinator.agreed(0, s.coordinator.epoch, (0, 0), s.slots[0].generation))
        if group.open and mine.state == FREE and not mine.group and budget.grants:
            yield "grant", State.grant
        if mine.state == LIVE:
            if 0 not in group.proposals[0].votes:
                yield "rank 0 votes", State.vote_0
            if budget.fails:
                yield "rank 0 fails", State.fail
        yield from self._held(0)
        if budget.leaves and group.phase is not Phase.GATHERING:
            yield "rank 0 leaves", lambda s: s.spend("leaves").act(s.coordinator.left(0, s.coordinator.epoch))
        for rank in range(1, len(self.slots)):
            yield from self._of_member(rank)
            yield from self._of_link(rank)

    def _held(self, rank: int) -> Iterator[tuple[str, Callable[[State], None]]]:
        slot = self.slots[rank]
        if slot.state == HELD:
            if not slot.committed:
                yield f"{rank} commits", lambda s: s.commit(rank)
            yield f"{rank} releases", lambda s: s.free(rank)

    def _of_member(self, rank: int) -> Iterator[tuple[str, Callable[[State], None]]]:
        member, slot = self.members[rank - 1], self.slots[rank]
        if member.asked and slot.state == FREE:
            yield f"{rank} agrees", lambda s: s.agree(rank)
        if slot.state == LIVE and member.papers[0].ballot is Ballot.GRANTED:
            yield f"{rank} votes", lambda s: s.vote(rank, READY)
            if self.budget.noes:
                yield f"{rank} votes no", lambda s: s.spend("noes").vote(rank, MASS)
        yield from self._held(rank)
        if self.budget.leaves and member.standing in (Standing.OPEN, Standing.AGREED):
            yield f"{rank} leaves", lambda s: s.spend("leaves").leave(rank)

    def _of_link(self, rank: int) -> Iterator[tuple[str, Callable[[State], None]]]:
        at = rank - 1
        if self.down[at] and not (self.cut[at] and self.member_knows[at]):
            yield f"{rank} hears", lambda s: s.deliver_down(rank)
        if self.up[at] and not (self.cut[at] and self.hub_knows[at]):
            yield f"0 hears {rank}", lambda s: s.deliver_up(rank)
        if not self.cut[at] and self.budget.cuts:
            yield f"cut {rank}", lambda s: s.spend("cuts").sever(rank)
        if self.cut[at]:
            if not self.hub_knows[at]:
                yield f"0 loses {rank}", lambda s: s.hub_down(rank)
            if not self.member_knows[at]:
                yield f"{rank} loses 0", lambda s: s.member_down(rank)
            if self.hub_knows[at] and self.member_knows[at]:
                yield f"join {rank}", lambda s: s.join(rank)

    # ---- rank 0 ---------------------------------------------------------------------------------------------------

    def spend(self, name: str) -> State:
        self.budget = self.budget.less(name)
        return self

    def act(self, actions: list[Action]) -> None:
        for action in actions:
            if isinstance(action, Announce):
                if action.phase is Phase.OPEN:
                    self.opened = action.epoch
                self._tell(("epoch", action.epoch, int(action.phase)))
            elif isinstance(action, Decide):
                self._tell(("decide", action.epoch, action.generation, action.code))
                self.decided(0, action.epoch, action.generation, action.code)
                self._settle(self.slots[0], action.code == READY)
            elif isinstance(action, Lost):
                self._settle(self.slots[0], False)
            elif isinstance(action, Freed):
                self.slots[0].group = False
            else:
                raise Broken("the ranks disagree, whose states are equal")

    def _settle(self, slot: Slot, ready: bool) -> None:
        if slot.state == LIVE:
            slot.state = HELD if ready else FREE

    def _tell(self, message: Message) -> None:
        for rank in sorted(self.coordinator.up - {0}):
            if not self.cut[rank - 1]:
                self.down[rank - 1] += (message,)

    def grant(self) -> None:
        self.spend("grants")
        slot = self.slots[0]
        generation = max(slot.generation, self.coordinator.floor) + 1
        self.slots[0] = Slot(LIVE, generation, self.coordinator.epoch, True)
        self.coordinator.granted(0, generation)
        self._tell(("grant", self.coordinator.epoch, generation))

    def fail(self) -> None:
        self.spend("fails").act(self.coordinator.fail(0, self.slots[0].generation, TIMEOUT))

    def vote_0(self) -> None:
        slot = self.slots[0]
        self.act(self.coordinator.vote(0, slot.epoch, 0, slot.generation, READY))

    def hub_down(self, rank: int) -> None:
        self.hub_knows[rank - 1] = True
        self.up[rank - 1] = ()
        self.act(self.coordinator.member_down(rank))

    def deliver_up(self, rank: int) -> None:
        (kind, *rest), *later = self.up[rank - 1]
        self.up[rank - 1] = tuple(later)
        group = self.coordinator
        if kind == "agree":
            self.act(group.agreed(rank, rest[0], (0, 0), rest[1]))
        elif kind == "vote":
            self.act(group.vote(rank, rest[0], 0, rest[1], rest[2]))
        elif kind == "released":
            self.act(group.released(rank, rest[0], 0, rest[1]))
        else:
            self.act(group.left(rank, rest[0]))

    # ---- members ----------------------------------------------------------------------------------------------------

    def _say(self, rank: int, message: Message) -> None:
        if not self.cut[rank - 1]:
            self.up[rank - 1] += (message,)

    def agree(self, rank: int) -> None:
        epoch = self.members[rank - 1].agree()
        self._say(rank, ("agree", epoch, self.slots[rank].generation))

    def vote(self, rank: int, code: int) -> None:
        slot = self.slots[rank]
        epoch = self.members[rank - 1].vote(0, slot.generation, code)
        if epoch:
            if code == READY:
                self.votes.add((epoch, slot.generation, rank))
            self._say(rank, ("vote", epoch, slot.generation, code))

    def leave(self, rank: int) -> None:
        lost = self.members[rank - 1].leave()
        if lost is not None:
            self._say(rank, ("leave", self.members[rank - 1].epoch))
            self._void(rank, lost)

    def _void(self, rank: int, lost: list[Paper]) -> None:
        if lost and self.slots[rank].state == LIVE:
            self.free(rank)

    def free(self, rank: int) -> None:
        slot = self.slots[rank]
        slot.state = FREE
        if rank:
            epoch = self.members[rank - 1].returns(0, slot.generation)
            if epoch:
                self._say(rank, ("released", epoch, slot.generation))

    def deliver_down(self, rank: int) -> None:
        (kind, *rest), *later = self.down[rank - 1]
        self.down[rank - 1] = tuple(later)
        member, slot = self.members[rank - 1], self.slots[rank]
        if kind == "epoch":
            self._void(rank, member.announced(rest[0], rest[1]))
        elif kind == "grant":
            taken = member.granted(rest[0], 0, rest[1])
            if slot.state != FREE or rest[1] <= slot.generation:
                raise Broken(f"rank {rank} is granted generation {rest[1]}, it is {slot}")
            self.slots[rank] = Slot(LIVE, rest[1], rest[0])
            if not taken:
                self.free(rank)
        elif member.decided(rest[0], 0, rest[1], rest[2]):
            self.decided(rank, rest[0], rest[1], rest[2])
            if rest[2] == READY:
                slot.state = HELD
            else:
                self.free(rank)

    def member_down(self, rank: int) -> None:
        self.member_knows[rank - 1] = True
        self.down[rank - 1] = ()
        self._void(rank, self.members[rank - 1].link_down())

    def sever(self, rank: int) -> None:
        at = rank - 1
        self.cut[at], self.hub_knows[at], self.member_knows[at] = True, False, False

    def join(self, rank: int) -> None:
        at = rank - 1
        self.cut[at], self.hub_knows[at], self.member_knows[at] = False, False, False
        self.up[at] = self.down[at] = ()
        self.members[at].link_up(1)
        self.act(self.coordinator.member_up(rank))

    # ---- what must hold -----------------------------------------------------------------------------------------------

    def decided(self, rank: int, epoch: int, generation: int, code: int) -> None:
        known = self.decisions.setdefault((epoch, generation), code)
        if known != code:
            raise Broken(f"rank {rank} holds {code} on {(epoch, generation)}, another one {known}")
        if code == READY:
            missing = [r for r in range(1, len(self.slots)) if (epoch, generation, r) not in self.votes]
            if missing:
                raise Broken(f"READY without the votes of {missing}")

    def commit(self, rank: int) -> None:
        slot = self.slots[rank]
        machine = self.members[rank - 1] if rank else self.coordinator
        slot.committed = True
        if not machine.may_commit(slot.epoch, 0, slot.generation):
            return
        if self.decisions.get((slot.epoch, slot.generation)) != READY:
            raise Broken(f"rank {rank} commits what was not decided READY")
        if slot.epoch != self.opened or not machine.open or machine.epoch != slot.epoch:
            raise Broken(f"rank {rank} commits across the end of epoch {slot.epoch}: {self.opened} is open")

    def check_end(self) -> None:
        """Nothing can happen any more."""
        if not self.coordinator.open or any(not member.open for member in self.members):
            raise Broken("the group does not open again")
        if any(slot.state != FREE for slot in self.slots) or (self.slots[0].group and self.coordinator.proposals[0].holders):
            raise Broken(f"slots stay behind: {self.slots}")


def search(
    members: int, budget: Budget, coordinator: type[Coordinator] = Coordinator, member: type[Member] = Member, most: int = 1 << 30
) -> int:
    """Visits every state within the budget, `most` at most; returns how many. Raises `Broken` with the way to a bad one."""
    size = members + 1
    first = State(members, budget, coordinator(size), [member(rank, size) for rank in range(1, size)])
    seen = {first.key()}
    stack: list[tuple[State, tuple[str, ...]]] = [(first, ())]
    while stack and len(seen) < most:
        state, path = stack.pop()
        ended = True
        for name, move in state.moves():
            ended = False
            after = state.clone()
            way = (*path, name)
            try:
                move(after)
            except (Broken, PeerFault) as fault:
                raise Broken(f"{fault}, after: {', '.join(way)}") from fault
            key = after.key()
            if key not in seen:
                seen.add(key)
                stack.append((after, way))
        if ended:
            try:
                state.check_end()
            except Broken as fault:
                raise Broken(f"{fault}, after: {', '.join(path)}") from fault
    return len(seen)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description="Searches every short life of a rank group.")
    parser.add_argument("--members", type=int, default=2)
    for item in fields(Budget):
        parser.add_argument(f"--{item.name}", type=int, default=item.default)
    options = parser.parse_args()
    began = time.monotonic()
    budget = Budget(**{item.name: getattr(options, item.name) for item in fields(Budget)})
    print(f"{search(options.members, budget)} states, {time.monotonic() - began:.1f} s")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
