"""A rank above 0, replayed: a member with its link to rank 0 and, where its rows come over one of its own, to the leader.

Between `replay` and `group_replay`. SPEC section 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import wire
from ..counters import Counters
from ..errors import Reason
from ..session import slots as st
from ..session.group import READY
from ..session.group_member import Ballot, Member
from ..session.hello import Role
from ..session.member import MemberSession
from ..session.own_link import Joint, OwnLinkSession, OwnMemberSession
from ..session.requests import RequestTable
from ..session.shards import REPLICATE
from ..session.slots import GROUP_CONSUMER, Slot
from ..wire import Header
from . import group_state, priming
from .group_replay import PEER_LOST, SHARED, GroupLink, GroupReplay, InGroup, WordFeed, note
from .link_replay import Link, LinkReplay
from .pcapng import CaptureError

if TYPE_CHECKING:
    from ..session.terms import SessionTerms
    from .link_replay import Outcome
    from .reading import Record

class MemberReplay(GroupReplay):
    """A rank above 0: it votes, and is told."""

    def __init__(self, state: priming.State) -> None:
        super().__init__(state)
        self.rank = state.agreement.ours.rank
        if not 1 <= self.rank < self.size:
            raise CaptureError(f"rank {self.rank} of {self.size}")
        self.member = Member(self.rank, self.size)
        self.joint = Joint(self.mode)

    def _make(
        self, state: priming.State, terms: SessionTerms, counters: Counters, outcome: Outcome, now_ns: int, taken: int
    ) -> Link:
        said = state.group
        assert said is not None
        if state.side is Role.RECEIVER:
            table = self.slots(terms, taken)
            own = OwnLinkSession(terms, table, self.memory, RequestTable(), counters, self.joint)
            self.prime(own, state, now_ns)
            group_state.prime_pairs(own.asked, said, "asked")
            return OwnLink(state, counters, outcome, own, self)
        group_state.prime_member(self.member, said.get("member"))
        if self.mode == REPLICATE:
            session = MemberSession(terms, self.member, self.slots(terms, taken), self.memory, counters)
        else:
            session = self._joined(terms, counters, said, taken)
        self.prime(session, state, now_ns)
        if said.get("running") is True:
            self.member.up = True
        else:
            self.member.up = False
            session.up()
        if isinstance(session, OwnMemberSession):
            self._wait_again(session)
        return MemberLink(state, counters, outcome, session, self)

    def _joined(self, terms: SessionTerms, counters: Counters, said: dict[str, object], taken: int) -> OwnMemberSession:
        """The group link of a rank whose rows come over a link of its own: its slots are laid out by that link's terms."""
        table = self.table
        if table is None:
            table = self.slots(priming.own_terms(terms, self.mode, self.size, self.rank), taken)
        session = OwnMemberSession(terms, self.member, table, self.memory, counters, self.joint)
        group_state.prime_pairs(session.owners, said, "owners")
        return session

    def _wait_again(self, session: OwnMemberSession) -> None:
        """Grants whose rows the leader was not asked for yet."""
        assert self.table is not None
        asked = self.joint.leader.asked if self.joint.leader is not None else {}
        for slot in self.table.slots:
            if slot.state == st.GRANTED and asked.get(slot.index) != slot.generation:
                session.pending[slot.request] = slot


class MemberLink(GroupLink):
    """A member's session with rank 0."""

    def __init__(
        self, state: priming.State, counters: Counters, outcome: Outcome, session: MemberSession, group: MemberReplay
    ) -> None:
        super().__init__(state, counters, outcome, WordFeed(session), group)
        self.session = session

    def said(self, header: Header, record: Record) -> None:
        """See `Link.said`."""
        note(self.live, header)
        if header.kind in (wire.LEAVE, wire.VOTE) and not (header.kind == wire.LEAVE) <= header.status <= len(Reason):
            raise CaptureError("a vote or leave that no rank sends")
        session, table = self.session, self.session.table
        if header.kind == wire.AGREE:
            self._free_all()
            if not session.agree(header.state_low, header.state_high):
                self._outcome.differs.append(f"agreed live to epoch {header.epoch}, which the replay was not asked for")
        elif header.kind == wire.LEAVE:
            session.leave(Reason.from_code(header.status))
        elif header.kind in (wire.RELEASED, wire.VOTE) and header.slot < table.count:
            slot = table.slots[header.slot]
            if slot.generation != header.slot_generation:
                return
            if header.kind == wire.RELEASED:
                session.release(slot, slot.generation, table.rank, 0)
            elif header.status != READY:
                self._voted_no(slot, header.status)

    def _voted_no(self, slot: Slot, code: int) -> None:
        """The live rank had something against a proposal: a fault that we have met as well, or its own process's doing."""
        paper = self.session.member.papers.get(slot.index)
        if paper is None or paper.generation != slot.generation or paper.ballot is not Ballot.GRANTED:
            return
        session = self.session
        if isinstance(session, OwnMemberSession) and session.pending.get(slot.request) is slot:
            session.refuse_granted(slot, Reason.from_code(code))
        elif Reason.from_code(code) in SHARED:
            if isinstance(session, OwnMemberSession) and session.joint.leader is not None:
                session.joint.leader.discard(slot, code)
            else:
                MemberSession.discard(session, slot, code)

    def _free_all(self) -> None:
        """A rank agrees when nothing is held any more; what its process gave back while no link ran no frame tells."""
        table = self.session.table
        for slot in table.slots:
            table.release(slot, slot.generation, table.rank, 0)
            if slot.state in (st.READY, st.QUARANTINE):
                table.release(slot, slot.generation, table.rank, GROUP_CONSUMER)
                slot.state = st.FREE

    def lost(self) -> None:
        """See `GroupLink.lost`."""
        self.session.lost(PEER_LOST)


class OwnLink(InGroup, LinkReplay):
    """A session with the leader, of a rank above 0: rank 0 grants what it asks for."""

    def __init__(
        self, state: priming.State, counters: Counters, outcome: Outcome, session: OwnLinkSession, group: MemberReplay
    ) -> None:
        super().__init__(state, counters, outcome, session)
        self.own = session
        self.group = group

    def stepped(self, header: Header, now_ns: int) -> None:
        """See `LinkReplay.stepped`: the slot was granted by rank 0."""
        slot = self.slot_of(header)
        if slot.generation != header.slot_generation or slot.state != st.GRANTED or header.step_context() != slot.context:
            self._outcome.differs.append(
                f"slot {slot.index} generation {header.slot_generation}: asked for live, not granted in the replay"
            )
            return
        self.own.asked[slot.index] = slot.generation
        if self.own.joint.group is not None:
            self.own.joint.group.forget(slot)

    def given_up(self, slot: Slot, reason: Reason) -> None:
        """See `LinkReplay.given_up`: with the end of an epoch, which follows, its proposals are void."""
        if reason is not PEER_LOST:
            super().given_up(slot, reason)

    def over(self, reason: Reason, now_ns: int) -> None:
        """See `Link.over`."""
        super().over(reason, now_ns)
        self.group.settle()
        self.group.part(self)
