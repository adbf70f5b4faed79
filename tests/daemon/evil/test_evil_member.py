"""A rank that breaks one rule of its group, against the live daemon of rank 0: its link and the epoch end with the reason,
nothing undecided or decided is committed, and with an honest rank in its place the group goes on."""

from __future__ import annotations

import queue
import struct
import threading
from collections.abc import Iterator
from typing import Any, NamedTuple

import evil_peer as e
import pytest
from daemon_rig import WATCHDOG_S, Bed, Draft, answer, drafting
from protocol.group_rig import MemberRig

from pp1q_transport import wire
from pp1q_transport.client.agreement import state_digest
from pp1q_transport.counters import Counters
from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.membership import MemberRank
from pp1q_transport.engine import EngineConfig, new_boot_nonce
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.toy.sidecar import Shape

pytestmark = [pytest.mark.timeout(120), pytest.mark.slow]

R = Reason
SHAPE = Shape(seed=e.SEED, depth=3, vocab_size=64, support=8, requests=2, ranks=2)


class RankCase(NamedTuple):
    """What the member says by hand, after what; numbers of slot, generation and epoch are added to the true ones."""

    number: str
    title: str
    reason: Reason
    kind: int
    after: str = "landing"
    slot: int = 0
    generation: int = 0
    epoch: int = 0
    fields: dict[str, int] = {}
    payload: bytes = b""


def part(rows: list[tuple[float, int]], **fields: int) -> dict[str, Any]:
    """Winners of rank 1's range, as an honest member says them but for `fields`."""
    place = {"shard": 1, "purpose": 1, "entry_count": len(rows), "first_id": 32, "end_id": 64}
    return {"fields": place | fields, "payload": b"".join(struct.pack("<di", *row) for row in rows)}


CASES = (
    RankCase("4.601", "VOTE on a generation never granted", R.SLOT_STATE, wire.VOTE, generation=1),
    RankCase("4.602", "VOTE on a slot never granted", R.SLOT_STATE, wire.VOTE, slot=1, generation=9),
    RankCase("4.603", "VOTE on a slot past the last", R.SLOT_BOUNDS, wire.VOTE, slot=4),
    RankCase("4.604", "VOTE in a coming epoch", R.RANK_DISAGREE, wire.VOTE, epoch=1),
    RankCase("4.605", "VOTE for a reason there is not", R.RESERVED_BITS, wire.VOTE, fields={"status": 999}),
    RankCase("4.606", "VOTE after the decision, another", R.RANK_DISAGREE, wire.VOTE, "ready", fields={"status": R.MASS.code}),
    RankCase("4.607", "VOTE on a slot that it gave back", R.SLOT_STATE, wire.VOTE, "released"),
    RankCase("4.608", "VOTE with a request", R.RESERVED_BITS, wire.VOTE, fields={"request": 1}),
    RankCase("4.609", "RELEASED before the decision", R.SLOT_STATE, wire.RELEASED),
    RankCase("4.610", "RELEASED of a generation never granted", R.SLOT_STATE, wire.RELEASED, "ready", generation=1),
    RankCase("4.611", "RELEASED with a reason", R.RESERVED_BITS, wire.RELEASED, "ready", fields={"status": R.MASS.code}),
    RankCase("4.612", "AGREE on a coming epoch", R.RANK_DISAGREE, wire.AGREE, epoch=1),
    RankCase("4.613", "AGREE with another state in the open epoch", R.RANK_DISAGREE, wire.AGREE, fields={"state_low": 12}),
    RankCase("4.614", "LEAVE of a coming epoch", R.RANK_DISAGREE, wire.LEAVE, epoch=1, fields={"status": R.PEER_LOST.code}),
    RankCase("4.615", "LEAVE without a reason", R.RESERVED_BITS, wire.LEAVE),
    RankCase("4.616", "GRANT by a member", R.UNEXPECTED_KIND, wire.GRANT),
    RankCase("4.617", "RESET by a member", R.UNEXPECTED_KIND, wire.RESET, fields={"status": 1}),
    RankCase("4.618", "DECIDE by a member", R.UNEXPECTED_KIND, wire.DECIDE),
    RankCase("4.619", "EPOCH by a member", R.UNEXPECTED_KIND, wire.EPOCH, fields={"phase": 3}),
    RankCase("4.620", "a frame of an earlier life", R.BOOT_NONCE, wire.VOTE, fields={"boot_nonce": 1}),
    RankCase("4.621", "a frame of another session", R.SESSION_MISMATCH, wire.VOTE, fields={"session": 1}),
    RankCase("4.622", "EXCHANGE, another rank's part", R.RANK_DISAGREE, wire.EXCHANGE, **part([(1.0, 40)], shard=0)),
    RankCase("4.623", "EXCHANGE in a coming epoch", R.RANK_DISAGREE, wire.EXCHANGE, epoch=1, **part([(1.0, 40)])),
    RankCase("4.624", "EXCHANGE of a purpose there is not", R.SEMANTIC_MISMATCH, wire.EXCHANGE, **part([(1.0, 40)], purpose=22)),
    RankCase("4.625", "EXCHANGE that leaves one out", R.RANK_DISAGREE, wire.EXCHANGE, **part([(1.0, 40)], sequence=1)),
    RankCase("4.626", "EXCHANGE of another rank's winner", R.ID_RANGE, wire.EXCHANGE, **part([(1.0, 31)])),
    RankCase("4.627", "EXCHANGE of a winner that is no token", R.ID_RANGE, wire.EXCHANGE, **part([(1.0, -1)])),
    RankCase("4.628", "EXCHANGE of more rows than depth", R.LENGTH_BOUNDS, wire.EXCHANGE, **part([(1.0, 40)] * 34)),
    RankCase("4.629", "EXCHANGE of a range beyond the vocabulary", R.ID_RANGE, wire.EXCHANGE, **part([(1.0, 40)], end_id=65)),
)


class EvilMember:
    """Rank 1 in a thread of its own, honest but for what `say` puts into its stream."""

    def __init__(self, bed: Bed) -> None:
        config = parse(bed.config("receiver1").read_text(encoding="utf-8"), str(bed.config("receiver1")))
        self.bender = e.Bender()
        connect = config.group.connect
        self.rank = MemberRank(
            EngineConfig(
                hello=config.group_hello(new_boot_nonce()), connect=connect, wrap_outbox=self.bender.attach, stubborn=True
            ),
            Counters(),
        )
        self.bender.terms = lambda: self.rank.session.terms if self.rank.session is not None else None
        self.faults: list[BaseException] = []
        self._todo: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._ending = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._ending.is_set():
                if not self._todo.empty():  # one at a time: what the session sends of it goes first
                    self._todo.get()()
                self.rank.serve()
                self.rank.collect()
                session = self.rank.session
                if session is not None and session.asking:
                    session.agree(*state_digest({}))
                self._ending.wait(0.0005)
        except BaseException as fault:  # noqa: BLE001 - the test sees it at the end
            self.faults.append(fault)

    def say(self, case: RankCase, slot: int, generation: int) -> None:
        """One frame by hand."""

        def act() -> None:
            session = self.rank.session
            assert session is not None
            epoch = self.rank.member.epoch + case.epoch
            values = {"slot": slot + case.slot, "slot_generation": generation + case.generation, "epoch": epoch}
            if case.kind in (wire.AGREE, wire.LEAVE, wire.EPOCH, wire.EXCHANGE):
                values = {"epoch": epoch}
            elif case.kind in (wire.GRANT, wire.RESET):
                values = {}
            named: Any = type("Named", (), {"terms": session.terms})()
            frame = MemberRig.frame(named, "member", case.kind, case.payload, **(values | case.fields))
            raw = frame.encode(session.terms.leader_nonce)
            self.bender.outbox.raw(raw, 0, len(raw))

        self._todo.put(act)

    def release(self, slot: int, generation: int) -> None:
        """Gives a slot back, as its consumer would."""
        self._todo.put(lambda: self.rank.release(self.rank.table.slots[slot], generation))

    def close(self) -> None:
        """Ends it."""
        self._ending.set()
        self._thread.join(WATCHDOG_S)
        self.rank.close()
        assert not self.faults, self.faults


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[Bed, Draft]]:
    with Bed(SHAPE) as bed:
        bed.edit("receiver0", lambda text: text + "\n[breaker]\nenabled = false\n")
        bed.up("leader", "receiver0")
        bed.sessions_up_of("leader")
        with drafting(bed) as draft:
            yield bed, draft


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.number} {case.title}")
def test_an_evil_member(running: tuple[Bed, Draft], case: RankCase) -> None:
    bed, draft = running
    pid = bed.pid("receiver0")
    held = threading.Event()

    def half(models: Any, step: Any) -> None:
        step.put(step.positions[0], weights=models.draft.weights(step.tail(2).tolist(), step.temperature))
        held.set()

    member = EvilMember(bed)
    try:
        with bed.receiver() as target:
            target.on_agree(lambda _epoch, committed: committed)
            target.wait_for_peer()
            before: Any = bed.status("receiver0")
            draft.act = half if case.after == "landing" else answer
            request = target.open_request(next(e.FRESH), e.PROMPT, seed=1)
            ticket = target.enqueue(request, support=8, budget_us=e.LONG_US)
            attack(case, member, ticket, held)
            bed.until(lambda: counted(bed, case.reason) == before["reasons"].get(case.reason.value, 0) + 1, "counted")
            bed.until(lambda: bed.status("receiver0")["group"]["epoch"] > before["group"]["epoch"], "the epoch ends")
            target.close_request(request)
        member.close()
        draft.act = answer
        serves_an_honest_group(bed)
        assert bed.pid("receiver0") == pid
    finally:
        draft.act = answer
        member.close()


def attack(case: RankCase, member: EvilMember, ticket: Any, held: threading.Event) -> None:
    """Says the frame when the proposal is as far as the case wants; the proposal must not be committed."""
    if case.after == "landing":
        assert held.wait(WATCHDOG_S)
        e.until(lambda: granted(member) is not None, lambda: None, "the grant at the member")
        member.say(case, *granted(member))  # type: ignore[misc]
        with pytest.raises(ProposalDiscarded) as discarded:
            ticket.wait()
        assert discarded.value.reason is Reason.PEER_LOST
        return
    with ticket.wait() as proposal:
        e.until(lambda: any(slot.reason == 0 and slot.generation for slot in member.rank.table.slots), lambda: None, "ready")
        e.until(lambda: member.rank.outcomes, lambda: None, "the decision at the member")
        outcome = member.rank.outcomes[-1][1]
        if case.after == "released":
            member.release(outcome.slot, outcome.slot_generation)
        member.say(case, outcome.slot, outcome.slot_generation)
        e.until(lambda: member.rank.session is None, lambda: None, "the evil member's link ends")
        with pytest.raises(ProposalDiscarded):
            proposal.commit(0, [3])


def granted(member: EvilMember) -> tuple[int, int] | None:
    """The slot and generation that lands at the member."""
    return next(((s.index, s.generation) for s in member.rank.table.slots if s.state in (1, 2)), None)


def counted(bed: Bed, reason: Reason) -> int:
    return bed.status("receiver0")["reasons"].get(reason.value, 0)


def serves_an_honest_group(bed: Bed) -> None:
    """A proposal that is ready at both ranks."""
    member = EvilMember(bed)  # that says nothing by hand
    try:
        with bed.receiver() as target:
            target.on_agree(lambda _epoch, committed: committed)
            target.wait_for_peer()
            request = target.open_request(next(e.FRESH), e.PROMPT, seed=1)
            with target.enqueue(request, support=8, budget_us=e.LONG_US).wait() as proposal:
                proposal.commit(0, [3])
            e.until(lambda: member.rank.outcomes, lambda: None, "the outcome at rank 1")
            assert member.rank.outcomes[-1][1].reason is None
            target.close_request(request)
    finally:
        member.close()
