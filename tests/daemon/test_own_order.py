"""A rank with a link of its own: which round's grant meets a STEP of its process, in the orders in which frames can come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, cast

from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.daemon.membership import MemberRank
from pp1q_transport.daemon.owning import OwnLinkReceiver, OwnMemberPort, OwnRank
from pp1q_transport.errors import Reason
from pp1q_transport.local import messages as m
from pp1q_transport.session import slots as st
from pp1q_transport.session.group import Phase
from pp1q_transport.session.group_member import Member
from pp1q_transport.session.own_link import Joint, OwnLinkSession, OwnMemberSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.shards import VOCABULARY
from pp1q_transport.session.slots import SlotTable
from pp1q_transport.session.terms import SessionTerms
from pp1q_transport.wire import Header

if TYPE_CHECKING:
    from pp1q_transport.local.attach import Attached

LEADER, RANK_0, RANK_1 = 0x11, 0x22, 0x33
SEED, DEPTH, SUPPORT = 9, 3, 8
PROMPT = (5, 6, 7)
NUMBERS = (128, DEPTH, SUPPORT, 4)


class Engine:
    """A link's engine without a link. Frames of rank 0 that a test puts into `coming` are taken in by whatever sends or receives
    next: a flush does both."""

    def __init__(self) -> None:
        self.link = SimpleNamespace(fence=lambda _index: False)
        self.session: OwnMemberSession | OwnLinkSession | None = None
        self.coming: list[Header] = []

    def poll(self) -> int:
        coming, self.coming = self.coming, []
        for header in coming:
            assert self.session is not None
            assert self.session.finish(header, 0) == 0
        return len(coming)

    def flush(self) -> None:
        self.poll()

    def close(self) -> None:
        pass


class Rank(OwnRank):
    """Rank 1 of two, both links up, without the networks."""

    def __init__(self) -> None:
        self.joint = Joint(VOCABULARY)
        self.counters = Counters()
        terms = SessionTerms(100, LEADER, RANK_1, *NUMBERS, shard=1, first_id=64, end_id=128)
        self.member = Member(1, 2)
        self.table = SlotTable(terms.geometry(), 1)
        memory = bytearray(terms.geometry().total_bytes)
        self.outcomes = []
        self.session = OwnMemberSession(
            SessionTerms(200, RANK_0, RANK_1, *NUMBERS), self.member, self.table, memory, self.counters, self.joint
        )
        self.engine = Engine()  # type: ignore[assignment]
        self.engine.session = self.session
        self.own = OwnLinkReceiver.__new__(OwnLinkReceiver)
        self.own.requests, self.own._unopened = RequestTable(), {}
        self.own.engine = Engine()  # type: ignore[assignment]
        self.own.session = OwnLinkSession(terms, self.table, memory, self.own.requests, Counters(), self.joint)
        self.own.nudge = lambda: None

    def serve(self) -> int:
        """Only the group link: nothing comes from the leader."""
        return MemberRank.serve(self)


class Port(OwnMemberPort):
    """Its port, whose process is a list of what it was told. The first epoch is open."""

    def __init__(self) -> None:
        super().__init__(Rank(), Counters())
        self.told: list[tuple[object, ...]] = []
        self.attached = cast("Attached", object())
        self.known: dict[int, Request] = {}
        member = self.own_rank.member
        member.link_up(RANK_0)
        for phase in (Phase.GATHERING, Phase.ASKING):
            member.announced(1, phase)
            self.report(0)
        member.agree()
        member.announced(1, Phase.OPEN)
        self.turn()

    def send(self, kind: int, *fields: object, payload: bytes = b"") -> None:
        self.told.append((kind, *fields))

    def turn(self, *coming: Header) -> list[tuple[object, ...]]:
        """One turn of the daemon; `coming` is there before it. Returns what its process was told."""
        self.coming(*coming)
        self.own_rank.serve()
        self.report(0)
        told, self.told = self.told, []
        return told

    def coming(self, *headers: Header) -> None:
        """Frames of rank 0 that wait to be taken in."""
        cast("Engine", self.own_rank.engine).coming += headers

    # ---- what its process asks for ------------------------------------------------------------------------------

    def open(self, number: int) -> None:
        """OPEN; both ranks know the request."""
        request = self.known[number] = Request(number, SEED, PROMPT)
        self.take(m.OPEN, (number, SEED, request.max_position, 0, 0, len(PROMPT)), memoryview(request.tokens.tobytes()), 0)

    def step(self, number: int, ticket: int, round_number: int) -> None:
        """STEP."""
        fields = (number, ticket, 0, 0, 1.0, 0, round_number, DEPTH, SUPPORT, 1_000_000, 0)
        self.take(m.STEP, fields, memoryview(b""), 0)

    def alone(self, number: int, round_number: int, token: int) -> None:
        """A token without a proposal, as after every round that is void."""
        payload = Request(number, 0, (token,)).tokens.tobytes()
        fields = (number, 0, 0, round_number, wire.TARGET_ONLY, 0, 1, 1, 0)
        self.take(m.COMMIT, fields, memoryview(payload), 0)

    # ---- what rank 0 says ---------------------------------------------------------------------------------------

    def grant(self, number: int, slot: int, slot_generation: int, round_number: int) -> Header:
        """GRANT of a STEP behind the tokens that rank 0 committed so far (`known`)."""
        request = self.known[number]
        h = Header()
        h.clear()
        h.kind, h.epoch, h.slot, h.slot_generation = wire.GRANT, 1, slot, slot_generation
        h.request, h.round, h.position, h.seed = number, round_number, request.anchor, SEED
        h.depth, h.representation, h.support_policy, h.temperature = DEPTH, wire.SPARSE, SUPPORT, 1.0
        h.prefix_low, h.prefix_high = request.prefix_low, request.prefix_high
        h.context = h.step_context()
        h.budget_us, h.owner = 1_000_000, wire.OWNER_ALL
        return h

    def void(self, slot: int, slot_generation: int) -> Header:
        """DECIDE: the leader answered `peer_lost`."""
        h = Header()
        h.clear()
        h.kind, h.epoch, h.slot, h.slot_generation, h.status = wire.DECIDE, 1, slot, slot_generation, Reason.PEER_LOST.code
        return h

    def refused(self, number: int, round_number: int) -> Header:
        """STATUS: rank 0 sends no STEP for this round."""
        h = Header()
        h.clear()
        h.kind, h.subject, h.request, h.round, h.status = wire.STATUS, wire.STEP, number, round_number, Reason.CANCELLED.code
        return h


def test_a_step_that_waits_for_a_rounds_end_meets_no_later_rounds_grant() -> None:
    """Rank 0 goes on as soon as a round is void, so that its end and the next round's grant may come together; and they may be
    taken in by something that is sent, after the daemon looked at the link and before it tells its process. Seen as a
    `context_mismatch` while a draft's rank came back: the STEP of one round asked for the tokens behind the next."""
    port = Port()
    port.open(1)
    port.step(1, 31, 0)
    port.turn(port.grant(1, 0, 1, 0))
    slots = port.own_rank.table.slots
    assert slots[0].state == st.GRANTED
    port.own_rank.serve()
    port.known[1].extend([9])
    port.coming(port.void(0, 1), port.grant(1, 1, 2, 1))
    port.own_rank.flush()
    port.report(0)
    assert slots[1].state == st.GRANTED, Reason.from_code(slots[1].reason)
    assert port.told == [(m.DISCARDED, 1, 31, Reason.PEER_LOST.code, 0, 1, 0)]
    port.alone(1, 0, 9)
    port.step(1, 32, 1)
    port.turn()
    assert slots[1].state == st.GRANTED, Reason.from_code(slots[1].reason)
    session = port.own_rank.own.session
    assert isinstance(session, OwnLinkSession)
    assert session._asked[1] == 2, "the STEP went out for the grant of its own round"


def test_what_is_taken_in_while_a_step_is_sent_is_told_before_the_next_one_is() -> None:
    """The daemon may sleep after its report: nothing that came in may wait for another frame."""
    port = Port()
    port.open(1)
    port.step(1, 31, 0)
    port.own_rank.serve()
    port.coming(port.grant(1, 0, 1, 0))
    port.own_rank.engine.poll()
    port.coming(port.void(0, 1))
    port.report(0)  # asks the leader, and its flush takes the round's end in
    assert port.told == [(m.DISCARDED, 1, 31, Reason.PEER_LOST.code, 0, 1, 0)]


def test_what_became_of_a_round_is_kept_when_its_slot_is_granted_again() -> None:
    """Rank 0 may grant a slot anew as soon as this rank gave it back, which takes no look of the daemon's."""
    port = Port()
    port.open(1)
    port.open(2)
    port.own_rank.joint.leader = port.own_rank.own.session = None  # the leader is away: every grant is voted void
    port.step(1, 31, 0)
    port.turn(port.grant(1, 0, 1, 0))
    port.own_rank.serve()  # the fence
    port.coming(port.void(0, 1))
    port.own_rank.flush()
    port.coming(port.grant(2, 0, 2, 0))
    port.own_rank.flush()
    port.report(0)
    assert port.told == [(m.DISCARDED, 1, 31, Reason.PEER_LOST.code, 0, 1, 0)]


def test_rounds_end_in_rank_0s_order_whether_they_were_granted_or_refused() -> None:
    """The leader was away for a round and is back: a member that was slow finds both in one look."""
    port = Port()
    port.open(1)
    port.own_rank.joint.leader = port.own_rank.own.session = None
    port.coming(port.refused(1, 0), port.grant(1, 0, 1, 1), port.void(0, 1), port.refused(1, 2))
    assert port.turn() == []
    reasons = (Reason.CANCELLED, Reason.PEER_LOST, Reason.CANCELLED)
    for number in range(3):
        port.step(1, 31 + number, number)
    assert port.told == [
        (m.DISCARDED, 1, 31 + number, reason.code, number, int(number == 1), 0) for number, reason in enumerate(reasons)
    ]


def test_a_rank_whose_tokens_are_others_than_rank_0s_leaves_the_epoch() -> None:
    """It can't follow this round nor any later one: all ranks must agree anew."""
    port = Port()
    for number in (1, 2):
        port.open(number)
        port.step(number, 30 + number, 0)
    port.known[1].extend([9])  # rank 0 committed one more
    told = port.turn(port.grant(1, 0, 1, 0), port.grant(2, 1, 2, 0))
    assert not port.own_rank.member.open
    assert port.counters.of(Reason.RANK_DISAGREE) == 1
    port.turn()
    slots = port.own_rank.table.slots
    assert [Reason.from_code(slot.reason) for slot in slots[:2]] == [Reason.PEER_LOST] * 2
    assert {each[2] for each in told if each[0] == m.DISCARDED} == {31, 32}
