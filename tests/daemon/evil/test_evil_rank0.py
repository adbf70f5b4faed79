"""A rank 0 that breaks one rule, against the live daemon of rank 1 in every group mode; and a member with a link of its own that
does, against that of rank 0. The reason is met and counted, nothing bent becomes ready, and with an honest rank in its place the
same daemon goes on."""

from __future__ import annotations

import dataclasses
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import evil_peer as e
import evil_ranks as r
import pytest
from daemon_rig import WATCHDOG_S, Bed, Draft, answer, drafting
from evil_ranks import RankFrame
from protocol.frames import Frame, fields, moved, payload_bit

from pp1q_transport import wire
from pp1q_transport.capture.group_replay import EXCHANGES
from pp1q_transport.capture.reading import Recording
from pp1q_transport.capture.replay import Replay
from pp1q_transport.client import attach_receiver
from pp1q_transport.errors import Reason
from pp1q_transport.session.shards import Claim
from pp1q_transport.toy.sidecar import Shape

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

R = Reason
SHAPE = Shape(seed=e.SEED, depth=3, vocab_size=64, support=r.SUPPORT, requests=2, ranks=2)
OWNER, VOCABULARY = "request-owner", "vocabulary"


def otherwise(frame: Frame, _world: object) -> list[Frame | bytes]:
    """The frame, and another with another decision."""
    other = Frame.decode(frame.encode(0))
    other.header.status = R.MASS.code
    return [frame, other]


def tokens(change: Any) -> Any:
    """The int32 tokens that a decision carries, changed and signed again."""

    def bend(frame: Frame, _world: object) -> list[Frame]:
        change(frame.payload)
        return [frame]

    return bend


def past_the_vocabulary(payload: bytearray) -> None:
    payload[:4] = (64).to_bytes(4, "little")


def another(payload: bytearray) -> None:
    payload[0] ^= 1


def cut(keep: int) -> Any:
    """Only so many bytes of the payload."""

    def bend(frame: Frame, _world: object) -> list[Frame]:
        del frame.payload[keep:]
        if not keep:
            frame.header.payload_digest = 0
        return [frame]

    return bend


def claiming(change: Any) -> Any:
    """What a vote says of the rows, changed and signed again."""

    def bend(frame: Frame, _world: object) -> list[Frame]:
        claim = Claim.unpack(bytes(frame.payload), len(frame.payload))
        frame.payload[:] = change(claim).pack()
        return [frame]

    return bend


def lighter(claim: Claim) -> Claim:
    token, mass, before = claim.rows[0]
    return Claim(claim.first_id, claim.end_id, ((token, mass - 1, before), *claim.rows[1:]))


def wider(claim: Claim) -> Claim:
    return Claim(claim.first_id - 32, claim.end_id, claim.rows)


def of_another_token(claim: Claim) -> Claim:
    token, mass, before = claim.rows[0]
    return Claim(claim.first_id, claim.end_id, ((token ^ 1, mass, before), *claim.rows[1:]))


def grant(number: str, title: str, reason: Reason, mode: str = "replicate", **values: Any) -> RankFrame:
    return RankFrame(number, f"GRANT {title}", reason, wire.GRANT, fields(**values), mode=mode)


def row(number: str, title: str, reason: Reason, bend: Any, nth: int = 0) -> RankFrame:
    return RankFrame(number, f"row {title}", reason, wire.REPLY, bend, nth, cost="proposal")


GRANTS = (
    grant("4.641", "of a coming epoch", R.RANK_DISAGREE, epoch=lambda h: h.epoch + 1),
    grant("4.642", "of an epoch that never was", R.GENERATION_STALE, epoch=0),
    grant("4.643", "for one owner", R.SEMANTIC_MISMATCH, owner=1),
    grant("4.644", "without a budget", R.LIMITS_MISMATCH, budget_us=0),
    grant("4.645", "of depth 0", R.DEPTH_MISMATCH, depth=0),
    grant("4.646", "deeper than negotiated", R.DEPTH_MISMATCH, depth=4),
    grant("4.647", "of representation 3", R.REPRESENTATION, representation=3),
    grant("4.648", "of sparse rows of no entries", R.SUPPORT_BOUNDS, support_policy=0),
    grant("4.649", "of more support than negotiated", R.SUPPORT_BOUNDS, support_policy=9),
    grant("4.650", "at the end of all positions", R.POSITION_BOUNDS, position=0xFFFFFFFD),
    grant("4.651", "of a slot past the last", R.SLOT_BOUNDS, slot=4),
    grant("4.652", "of slot generation 0", R.GENERATION_STALE, slot_generation=0),
    grant("4.653", "for everyone where requests have owners", R.SEMANTIC_MISMATCH, OWNER, owner=wire.OWNER_ALL),
    grant("4.654", "for a rank that the group does not have", R.SEMANTIC_MISMATCH, OWNER, owner=3),
    grant("4.655", "for one owner of a vocabulary in shards", R.SEMANTIC_MISMATCH, VOCABULARY, owner=1),
)

DECISIONS = (
    RankFrame("4.661", "DECIDE on a generation never granted", R.SLOT_STATE, wire.DECIDE,
              fields(slot_generation=lambda h: h.slot_generation + 1)),
    RankFrame("4.662", "DECIDE in a coming epoch", R.RANK_DISAGREE, wire.DECIDE, fields(epoch=lambda h: h.epoch + 1)),
    RankFrame("4.663", "DECIDE in an epoch that never was", R.GENERATION_STALE, wire.DECIDE, fields(epoch=0)),
    RankFrame("4.664", "DECIDE for a reason there is not", R.RESERVED_BITS, wire.DECIDE, fields(status=999)),
    RankFrame("4.665", "DECIDE on a slot past the last", R.SLOT_BOUNDS, wire.DECIDE, fields(slot=4)),
    RankFrame("4.666", "DECIDE, and then otherwise", R.RANK_DISAGREE, wire.DECIDE, otherwise),
    RankFrame("4.667", "DECIDE ready without this rank's vote", R.RANK_DISAGREE, wire.DECIDE),
    RankFrame("4.668", "DECIDE with tokens where every rank has rows", R.LENGTH_BOUNDS, wire.DECIDE,
              lambda frame, _world: [frame.payload.extend(bytes(12)), frame][1:]),
    RankFrame("4.669", "DECIDE with tokens of a vocabulary in shards", R.LENGTH_BOUNDS, wire.DECIDE,
              lambda frame, _world: [frame.payload.extend(bytes(12)), frame][1:], mode=VOCABULARY),
    RankFrame("4.670", "tokens of a decision altered on the way", R.PAYLOAD_DIGEST, wire.DECIDE, payload_bit(1), mode=OWNER),
    RankFrame("4.671", "ready decision without its tokens", R.LENGTH_BOUNDS, wire.DECIDE, cut(0), mode=OWNER),
    RankFrame("4.672", "ready decision of a token too few", R.LENGTH_BOUNDS, wire.DECIDE, cut(8), mode=OWNER),
    RankFrame("4.673", "decision of a token past the vocabulary", R.ID_RANGE, wire.DECIDE, tokens(past_the_vocabulary),
              mode=OWNER),
    RankFrame("4.674", "decision of other tokens than its owner has", R.RANK_DISAGREE, wire.DECIDE, tokens(another), mode=OWNER,
              owner=1),
)  # fmt: skip

ROWS = (
    row("4.681", "with a flipped payload bit", R.PAYLOAD_DIGEST, payload_bit(3)),
    row("4.682", "of another round", R.ROUND_MISMATCH, fields(round=lambda h: h.round + 1)),
    row("4.683", "of another context", R.CONTEXT_MISMATCH, fields(context=lambda h: h.context ^ 1)),
    row("4.684", "moved to its neighbour's position", R.PAYLOAD_DIGEST, moved(position=lambda h: h.position + 1)),
    row("4.685", "that never comes", R.INCOMPLETE, lambda _frame, _world: [], 1),
    row("4.686", "that comes twice", R.POSITION_DUPLICATE, lambda frame, _world: [frame, frame]),
)

BY_HAND = (
    RankFrame("4.691", "EPOCH of phase 0", R.RESERVED_BITS, wire.EPOCH, fields={"phase": 0}),
    RankFrame("4.692", "EPOCH of phase 4", R.RESERVED_BITS, wire.EPOCH, fields={"phase": 4}),
    RankFrame("4.693", "EPOCH before the present one", R.GENERATION_STALE, wire.EPOCH, epoch=-1, fields={"phase": 2}),
    RankFrame("4.694", "EPOCH that asks again while it is open", R.RANK_DISAGREE, wire.EPOCH, fields={"phase": 2}),
    RankFrame("4.695", "EPOCH that opens unasked", R.RANK_DISAGREE, wire.EPOCH, epoch=1, fields={"phase": 3}),
    RankFrame("4.696", "STEP by rank 0", R.UNEXPECTED_KIND, wire.STEP, fields={"depth": 1, "representation": 1}),
    RankFrame("4.697", "VOTE by rank 0", R.UNEXPECTED_KIND, wire.VOTE),
    RankFrame("4.698", "STATUS without a reason", R.RESERVED_BITS, wire.STATUS),
    RankFrame("4.699", "a frame of an earlier life of rank 0", R.BOOT_NONCE, wire.EPOCH, fields={"phase": 3, "boot_nonce": 1}),
    RankFrame("4.700", "a frame of another group session", R.SESSION_MISMATCH, wire.EPOCH, fields={"phase": 3, "session": 1}),
    RankFrame("4.701", "COMPLETION by rank 0 where a rank has rows of its own", R.UNEXPECTED_KIND, wire.COMPLETION,
              mode=VOCABULARY, fields={"depth": 3, "positions": 3}),
)  # fmt: skip

VOTES = (
    RankFrame("4.711", "vote whose claim was altered", R.PAYLOAD_DIGEST, wire.VOTE, payload_bit(9), mode=VOCABULARY),
    RankFrame("4.712", "ready vote without a claim", R.LENGTH_BOUNDS, wire.VOTE, cut(0), mode=VOCABULARY),
    RankFrame("4.713", "vote cut short", R.LENGTH_BOUNDS, wire.VOTE, cut(10), mode=VOCABULARY),
    RankFrame("4.714", "vote of more positions than there may be", R.LENGTH_BOUNDS, wire.VOTE,
              lambda frame, _world: [frame.payload.extend(bytes(48)), frame][1:], mode=VOCABULARY),
    RankFrame("4.715", "failing vote with a claim", R.LENGTH_BOUNDS, wire.VOTE, fields(status=R.MASS.code), mode=VOCABULARY),
    RankFrame("4.716", "masses that do not chain", R.MASS, wire.VOTE, claiming(lighter), mode=VOCABULARY, cost="proposal"),
    RankFrame("4.717", "a range that is another rank's", R.ID_RANGE, wire.VOTE, claiming(wider), mode=VOCABULARY,
              cost="proposal"),
    RankFrame("4.718", "another token than rank 0 was sent", R.RANK_DISAGREE, wire.VOTE, claiming(of_another_token),
              mode=VOCABULARY, cost="proposal"),
    RankFrame("4.719", "claim of a rank that does not own the request", R.LENGTH_BOUNDS, wire.VOTE,
              lambda frame, _world: [frame.payload.extend(Claim(0, 64, ((1, 1 << 24, 0),) * 3).pack()), frame][1:], mode=OWNER),
    RankFrame("4.720", "an owner's token past the vocabulary", R.ID_RANGE, wire.VOTE,
              claiming(lambda claim: Claim(0, 64, ((64, 1 << 24, 0), *claim.rows[1:]))), mode=OWNER, owner=1, cost="proposal"),
)  # fmt: skip

RANK_0 = (*GRANTS, *DECISIONS, *ROWS, *BY_HAND)


class Beds:
    """A deployment for each mode, with one daemon in use besides the leader's, which writes a capture."""

    def __init__(self, judge: str, folder: Path, stack: ExitStack) -> None:
        self.judge = judge
        self.folder = folder
        self._stack = stack
        self._made: dict[str, tuple[Bed, Draft]] = {}

    def of(self, mode: str) -> tuple[Bed, Draft]:
        if mode not in self._made:
            bed = self._stack.enter_context(Bed(dataclasses.replace(SHAPE, mode=mode)))
            bed.edit("receiver0", lambda text: text + "\n[breaker]\nenabled = false\n")
            table = f"\n[capture]\nfile = {json.dumps(str(self.folder / mode))}\n"
            bed.edit(self.judge, lambda text: text + table)
            bed.up("leader", self.judge)
            self._made[mode] = bed, self._stack.enter_context(drafting(bed))
        return self._made[mode]

    def replay(self) -> None:
        """What was refused live, and for what, is refused again."""
        for mode in self._made:
            with (self.folder / mode).open("rb") as file:
                outcome = Replay().run(Recording(file))
            assert outcome.differs == [], mode
            assert set(outcome.skipped) <= {EXCHANGES}
            assert outcome.compared > 0


@pytest.fixture(scope="module")
def judged_by_rank_1(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beds]:
    with ExitStack() as stack:
        beds = Beds("receiver1", tmp_path_factory.mktemp("rank1"), stack)
        yield beds
    beds.replay()


@pytest.fixture(scope="module")
def judged_by_rank_0(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beds]:
    with ExitStack() as stack:
        beds = Beds("receiver0", tmp_path_factory.mktemp("rank0"), stack)
        yield beds
    beds.replay()


def counted(bed: Bed, name: str, reason: Reason) -> int:
    return bed.status(name)["reasons"].get(reason.value, 0)


@pytest.mark.parametrize("case", RANK_0, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_rank_0(judged_by_rank_1: Beds, case: RankFrame) -> None:
    bed, draft = judged_by_rank_1.of(case.mode)
    pid = bed.pid("receiver1")
    rank_0 = r.EvilRank0(bed)
    try:
        with attach_receiver(bed.socket("receiver1"), 1) as target:
            target.on_agree(lambda _epoch, committed: committed)
            target.wait_for_peer()
            e.until(rank_0.ready_to_step, target.poll, "the epoch opens at rank 0")
            bed.sessions_up_of("receiver1")
            before = counted(bed, "receiver1", case.reason)
            number = next(e.FRESH)
            request = target.open_request(number, e.PROMPT, seed=1)
            request.owner = case.owner
            held = threading.Event()
            if case.bend is None:  # said by hand while a proposal is under way
                draft.act = lambda _models, _step: held.set()
            else:
                rank_0.bender.arm(case, number)
            ticket = target.enqueue(request, support=r.SUPPORT, budget_us=e.LONG_US)
            rank_0.step(number, case.owner)
            if case.bend is None:
                e.until(lambda: held.is_set() and bed.status("receiver1")["slots"].get("FREE") != 4, target.poll, "the grant")
                slot = r.landing(rank_0)
                assert slot is not None
                rank_0.say(case, slot.index, slot.generation)
            bed.until(lambda: counted(bed, "receiver1", case.reason) > before, f"{case.reason} is counted")
            e.until(lambda: ticket.settled, target.poll, "the outcome at rank 1")
            judge(case, r.outcome_of(ticket))
            assert counted(bed, "receiver1", case.reason) == before + 1
        rank_0.close()
        draft.act = answer
        rank_0 = r.EvilRank0(bed)  # that breaks nothing
        whole_at_rank_1(bed, rank_0)
        assert bed.pid("receiver1") == pid
    finally:
        draft.act = answer
        rank_0.close()


def judge(case: RankFrame, outcome: Reason | None) -> None:
    """What became of the proposal at the live rank: never ready, but where it was before the rule was broken."""
    if case.cost == "proposal":
        assert outcome is case.reason
    elif case.bend is otherwise:
        assert outcome in (None, Reason.PEER_LOST), "the first decision may have been told by then"
    else:
        assert outcome is Reason.PEER_LOST


def whole_at_rank_1(bed: Bed, rank_0: r.EvilRank0) -> None:
    """A proposal that is ready at the live daemon of rank 1."""
    with attach_receiver(bed.socket("receiver1"), 1) as target:
        target.on_agree(lambda _epoch, committed: committed)
        target.wait_for_peer()
        e.until(rank_0.ready_to_step, target.poll, "the epoch opens at rank 0")
        bed.sessions_up_of("receiver1")
        number = next(e.FRESH)
        request = target.open_request(number, e.PROMPT, seed=1)
        ticket = target.enqueue(request, support=r.SUPPORT, budget_us=e.LONG_US)
        rank_0.step(number, 0)
        assert r.outcome_of(ticket) is None
        target.close_request(request)


@pytest.mark.parametrize("case", VOTES, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_member_with_a_link_of_its_own(judged_by_rank_0: Beds, case: RankFrame) -> None:
    bed, _draft = judged_by_rank_0.of(case.mode)
    pid = bed.pid("receiver0")
    member = r.EvilOwnMember(bed)
    try:
        before = counted(bed, "receiver0", case.reason)
        assert round_of(bed, member, case) is (case.reason if case.cost == "proposal" else Reason.PEER_LOST)
        bed.until(lambda: counted(bed, "receiver0", case.reason) == before + 1, f"{case.reason} is counted")
        member.close()
        member = r.EvilOwnMember(bed)  # that breaks nothing
        assert round_of(bed, member, None) is None
        assert bed.pid("receiver0") == pid
    finally:
        member.close()


def round_of(bed: Bed, member: r.EvilOwnMember, case: RankFrame | None) -> Reason | None:
    """One proposal beside the live daemon of rank 0, and what became of it there."""
    with bed.receiver() as target:
        target.on_agree(lambda _epoch, committed: committed)
        target.wait_for_peer(WATCHDOG_S)
        bed.sessions_up_of("receiver0")
        e.until(lambda: member.rank.own.session is not None, target.poll, "the member's own link")
        number = next(e.FRESH)
        member.open(number)
        request = target.open_request(number, e.PROMPT, seed=1)
        if case is not None:
            request.owner = case.owner
            member.bender.arm(case, number)
        ticket = target.enqueue(request, support=r.SUPPORT, budget_us=e.LONG_US)
        return r.outcome_of(ticket)
