"""Rank 0 of a group, replayed: its coordinator decides by the votes in the file, beside its link to the leader.

Between `replay` and `group_replay`. What rank 0's own process did shows in what rank 0 said: an epoch that opens, a grant, a void
proposal. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import wire
from ..counters import Counters
from ..errors import Reason
from ..session import slots as st
from ..session.group import Fate, Phase
from ..session.hello import Role
from ..session.hub import HubSession, RankGroup
from ..session.receiver import ReceiverSession
from ..session.requests import RequestTable
from ..session.slots import Slot, SlotTable
from ..wire import Header
from . import group_state, priming
from .group_replay import PEER_LOST, GroupLink, GroupReplay, InGroup, WordFeed, note
from .link_replay import OWN_REASONS, Link, LinkReplay
from .pcapng import CaptureError

if TYPE_CHECKING:
    from ..session.terms import SessionTerms
    from .link_replay import Outcome
    from .reading import Record

class Rank0Replay(GroupReplay):
    """Rank 0: its coordinator decides."""

    def __init__(self, state: priming.State) -> None:
        super().__init__(state)
        assert state.group is not None
        self.group = RankGroup(self.size, Counters(), mode=self.mode)
        self.leader: Rank0Link | None = None
        group_state.prime_rank_0(self.group, state.group)

    def _make(
        self, state: priming.State, terms: SessionTerms, counters: Counters, outcome: Outcome, now_ns: int, taken: int
    ) -> Link:
        assert state.group is not None
        if state.side is Role.RECEIVER:
            table = self.slots(terms, taken)
            session = ReceiverSession(terms, table, self.memory, RequestTable(), counters, group=self.group)
            self.prime(session, state, now_ns)
            self._check_proposals(table)
            self.leader = Rank0Link(state, counters, outcome, session, self)
            return self.leader
        rank = priming.whole(state.group, "rank", 16)
        if not 1 <= rank < self.size or rank != state.agreement.theirs.rank:
            raise CaptureError(f"rank {rank} of {self.size}")
        self.group.counters = counters
        hub = HubSession(terms, self.group, rank, counters)
        if state.group.get("running") is True:
            self.group.hubs[rank] = hub
        else:
            hub.up()
        return HubLink(state, counters, outcome, hub, self)

    def _check_proposals(self, table: SlotTable) -> None:
        for proposal in self.group.coordinator.proposals.values():
            slot = table.slots[proposal.slot] if proposal.slot < table.count else None
            if slot is None or (proposal.fate is Fate.VOTING and slot.generation != proposal.generation):
                raise CaptureError(f"a proposal in slot {proposal.slot} that is not there")
            if slot.generation == proposal.generation:
                slot.epoch = proposal.epoch

    # ---- what the owner asked for, as far as it shows -----------------------------------------------------------

    def announced(self, epoch: int, phase: int) -> None:
        """Rank 0 announced an epoch: by an answer, or the end, of its own process, when nothing that came in explains it."""
        coordinator = self.group.coordinator
        if epoch == coordinator.epoch and phase == Phase.OPEN and coordinator.asking and self._members_answered():
            self.group.agree(*self._an_answer(equal=True))
        elif epoch == coordinator.epoch + 1 and phase == Phase.ASKING:
            if coordinator.asking and self._members_answered():
                self.group.agree(*self._an_answer(equal=False))
                return
            if coordinator.asking:
                self.group.agree(0, 0)  # whatever it was: it left before all had answered
            self.group.leave(PEER_LOST)

    def _members_answered(self) -> bool:
        return len(self.group.coordinator.answers) == self.size - 1

    def _an_answer(self, equal: bool) -> tuple[int, int]:
        """Rank 0's own committed state, which no frame carries: equal to the others', or not."""
        low, high = next(iter(self.group.coordinator.answers.values()))[0]
        return (low, high) if equal else (low ^ 1, high)

    def unasked(self, header: Header, now_ns: int) -> None:
        """A grant for which another rank asks the leader."""
        leader = self.leader
        last = self.group.coordinator.proposals.get(header.slot)
        if leader is None or (last is not None and last.generation >= header.slot_generation):
            return
        leader.take_slot(header, header.seed, header.context, now_ns)
        slot = leader.session.table.slots[header.slot]
        self.group.granted(slot, header, header.owner)
        self.group.unasked(slot, now_ns)

    def decided(self, header: Header) -> None:
        """Rank 0 decided. What no frame explains is its own process's or link's doing."""
        proposal = self.group.coordinator.proposals.get(header.slot)
        if proposal is None or proposal.generation != header.slot_generation or proposal.fate is not Fate.VOTING:
            return
        if 0 < header.status <= len(Reason) and Reason.from_code(header.status) in OWN_REASONS:
            self.give_up(header.slot, header.status)

    def give_up(self, index: int, code: int) -> None:
        """Rank 0 voids a proposal that is not decided."""
        proposal = self.group.coordinator.proposals[index]
        slot = self.leader.session.table.slots[index] if self.leader is not None else None
        if slot is not None and slot.generation == proposal.generation and slot.state in st.LIVE:
            assert self.leader is not None
            self.leader.session.discard(slot, code)


class Rank0Link(InGroup, LinkReplay):
    """Rank 0's session with the leader."""

    group: Rank0Replay

    def __init__(
        self, state: priming.State, counters: Counters, outcome: Outcome, session: ReceiverSession, group: Rank0Replay
    ) -> None:
        super().__init__(state, counters, outcome, session)
        self.group = group

    def grant(self, slot: Slot, header: Header, seed: int, context: int, now_ns: int) -> None:
        """See `LinkReplay.grant`: the group is granted the slot as well."""
        super().grant(slot, header, seed, context, now_ns)
        self.group.group.granted(slot, header)

    def take_slot(self, header: Header, seed: int, context: int, now_ns: int) -> None:
        """A slot that this rank asks no rows for."""
        super().grant(self.slot_of(header), header, seed, context, now_ns)

    def given_up(self, slot: Slot, reason: Reason) -> None:
        """See `LinkReplay.given_up`: with the end of an epoch, which follows, its proposals are void."""
        if reason is not PEER_LOST:
            super().given_up(slot, reason)

    def over(self, reason: Reason, now_ns: int) -> None:
        """See `Link.over`."""
        super().over(reason, now_ns)
        self.group.leader = None
        self.group.settle()
        self.group.part(self)


class HubLink(GroupLink):
    """Rank 0's session with a member."""

    def __init__(self, state: priming.State, counters: Counters, outcome: Outcome, hub: HubSession, group: Rank0Replay) -> None:
        super().__init__(state, counters, outcome, WordFeed(hub), group)
        self.hub = hub
        self.rank_0 = group

    def said(self, header: Header, record: Record) -> None:
        """See `Link.said`."""
        note(self.live, header)
        if header.kind == wire.EPOCH:
            self.rank_0.announced(header.epoch, header.phase)
        elif header.kind == wire.GRANT and header.owner not in (wire.OWNER_ALL, 0):
            self.rank_0.unasked(header, record.began_ns)
        elif header.kind == wire.DECIDE:
            self.rank_0.decided(header)

    def lost(self) -> None:
        """See `GroupLink.lost`."""
        self.hub.lost(PEER_LOST)
