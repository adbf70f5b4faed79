"""Reads the golden vectors and drives them through the real machines, in the state that each vector names.

Between `proto/golden` and the tests beside this file. A bench is one end of a session: it is brought to the state by
the frames of `before` (its own are made by the session itself and must equal the golden bytes, the peer's are fed),
then it is fed bytes and says what came of them.
"""

from __future__ import annotations

import functools
import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pp1q_transport import wire
from pp1q_transport._native.kernels import copy_bytes
from pp1q_transport.control_codec import decode_message, encode_message
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, Reason, Refused
from pp1q_transport.session import slots as st
from pp1q_transport.session.assembler import Assembler
from pp1q_transport.session.draft_peer import DraftPeerSession
from pp1q_transport.session.group import Fate
from pp1q_transport.session.group_member import Member
from pp1q_transport.session.hub import HubSession, RankGroup
from pp1q_transport.session.leader import LeaderSession
from pp1q_transport.session.member import MemberSession
from pp1q_transport.session.negotiate import (
    Agreement,
    Connector,
    Hello,
    Listener,
    Role,
    message_kind,
    parse_hello,
)
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.session.own_link import Joint, OwnMemberSession
from pp1q_transport.session.parts import Part, values_of
from pp1q_transport.session.proof import ProofReader
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.shards import REPLICATE
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

PROTO = Path(__file__).resolve().parents[2] / "proto"
GOLDEN = PROTO / "golden"
START_NS = 1_000_000_000


def number(value: object) -> Any:
    """A JSON number, or the u64 that is written as a hexadecimal text."""
    return int(value, 16) if isinstance(value, str) and value.startswith("0x") else value


@dataclass(frozen=True)
class Golden:
    """One vector: its notes, its bytes as stored, and its frame or message whole."""

    note: dict[str, Any]
    stored: bytes
    data: bytes

    @property
    def name(self) -> str:
        return str(self.note["name"])

    @property
    def kind(self) -> str:
        return str(self.note["kind"])

    @property
    def fields(self) -> dict[str, Any]:
        return {name: number(value) for name, value in self.note["fields"].items()}

    @property
    def by_receiver(self) -> bool:
        """Whether a receiver sends this frame."""
        return bool(self.note["to"] in ("leader", "draft_peer", "listener_port", "coordinator"))


def recipe_payload(recipe: dict[str, int], vocab: int) -> bytes:
    """The dense row that a recipe describes."""
    counts = [v * recipe["factor"] % recipe["modulus"] for v in range(vocab)]
    counts[recipe["rest_to"]] += (1 << 24) - sum(counts)
    return struct.pack(f"<{vocab}f", *(count / (1 << 24) for count in counts))


@functools.cache
def vectors() -> dict[str, Golden]:
    """Every vector by name."""
    found = {}
    for path in sorted(GOLDEN.glob("*.json")):
        if path.name == "sessions.json":
            continue
        note = json.loads(path.read_text())
        stored = path.with_suffix(".bin").read_bytes()
        data = stored
        recipe = note.get("payload", {}).get("recipe")
        if recipe:
            data += recipe_payload(recipe, note["fields"]["entry_count"])
        found[note["name"]] = Golden(note, stored, data)
    return found


def chosen(plane: str, valid: bool) -> list[Golden]:
    """The vectors of one plane."""
    return [g for g in vectors().values() if g.note["plane"] == plane and g.note["valid"] is valid]


@functools.cache
def sessions() -> dict[str, Any]:
    """`sessions.json`."""
    loaded: dict[str, Any] = json.loads((GOLDEN / "sessions.json").read_text())
    return loaded


def terms(name: str) -> SessionTerms:
    """The terms of a golden session."""
    stated = sessions()["sessions"][name].items()
    return SessionTerms(**{key: number(value) for key, value in stated if key != "group_mode"})


def group_mode(name: str) -> str:
    """The mode of the rank group whose link a golden session is."""
    return str(sessions()["sessions"][name].get("group_mode", REPLICATE))


# -- what came of it ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Outcome:
    """`costs`: link, proposal, step, frame, session (control), "" when nothing was refused; `effect`: what was done."""

    costs: str
    reason: str
    effect: str

    @property
    def refused(self) -> bool:
        return self.costs != ""


def _link(code: int) -> Outcome:
    return Outcome("link", Reason.from_code(code).value, "")


def fill(assembler: Assembler, data: bytes, now_ns: int, chunk: int = 1 << 30) -> int:
    """Hands bytes to the assembler as a link does, at most `chunk` at once; the code that ends the link, or 0."""
    at = 0
    while at < len(data):
        assembler.want()
        count = min(assembler.length, len(data) - at, chunk)
        copy_bytes(assembler.memory, assembler.offset, data, at, count)
        at += count
        code = assembler.received(count, now_ns)
        if code:
            return code
    return 0


def drain(outbox: Outbox) -> bytes:
    """Takes everything out of an outbox."""
    sent = bytearray()
    while True:
        piece = outbox.front()
        if piece is None:
            return bytes(sent)
        sent += memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
        sent += memoryview(piece.memory)[piece.offset : piece.offset + piece.length]
        outbox.sent(piece.head_length + piece.length)


class Bench:
    """What both ends share. Subclasses say how their session makes its own frames and what a fed frame changed."""

    session: ReceiverSession | LeaderSession | MemberSession | HubSession
    sends_receiver_frames: bool

    def __init__(self, session_name: str) -> None:
        self.terms = terms(session_name)
        self.counters = Counters()
        self.requests = RequestTable()
        self.memory_bytes = 0

    def prepare(self, before: list[str]) -> None:
        """Goes through the frames of `before`; asserts that ours are what the session sends."""
        expected = bytearray()
        for name in before:
            golden = vectors()[name]
            if golden.by_receiver is self.sends_receiver_frames:
                self.send(golden)
                expected += golden.data
            else:
                assert fill(self.assembler, golden.data, START_NS) == 0, f"{name} was refused"
                self.fence()
        sent = drain(self.session.outbox)
        assert sent == bytes(expected), f"the session sends other bytes than {before}"

    assembler: Assembler

    def send(self, golden: Golden) -> None:
        raise NotImplementedError

    def fence(self) -> None:
        """What an engine does after every batch of bytes."""

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        raise NotImplementedError

    def cut(self) -> str:
        """The link ends here; "" or what should not have happened."""
        raise NotImplementedError


class ReceiverBench(Bench):
    """A receiver session with its slots."""

    sends_receiver_frames = True

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        geometry = self.terms.geometry()
        self.table = SlotTable(geometry)
        self.memory = bytearray(geometry.total_bytes)
        self.session: ReceiverSession = ReceiverSession(
            self.terms, self.table, self.memory, self.requests, self.counters
        )
        self.assembler = Assembler(self.session)
        self.slots: dict[int, Slot] = {}
        self._next_slot = 0

    def send(self, golden: Golden) -> None:
        f = golden.fields
        if golden.kind == "OPEN":
            tokens = golden.note["payload"]["tokens"]
            request = Request(f["request"], f["seed"], tokens, f["max_position"], f["request_generation"])
            self.requests.add(request)
            self.session.open(request)
        elif golden.kind == "STEP":
            self._step(f)
        elif golden.kind == "COMMIT":
            request = self.requests.requests[f["request"]]
            for slot in self.slots.values():
                self.session.release(slot, slot.generation, 0, 0)
            self.session.commit(request, f["round"], f["source"], f["accepted"], golden.note["payload"]["tokens"])
        elif golden.kind == "RESET":
            self.session.discard(self.slots[f["slot"]], f["status"])
        else:
            raise AssertionError(f"no receiver sends {golden.name} in a `before`")
        self.fence()

    def _step(self, f: dict[str, Any]) -> None:
        while self._next_slot != f["slot"]:
            passed = self.table.take()
            assert passed is not None
            assert passed.index == self._next_slot
            passed.move(st.INVALIDATE)
            passed.move(st.FENCED)
            self._next_slot = (self._next_slot + 1) % self.table.count
        self.table.slots[f["slot"]].generation = f["slot_generation"] - 1
        request = self.requests.requests[f["request"]]
        request.round = f["round"]
        slot = self.session.step(
            request, START_NS, f["depth"], f["temperature"], f["support_policy"], f["representation"],
            f["target_context"], f["budget_us"], f["trace_id"],
        )  # fmt: skip
        assert slot is not None
        self.slots[slot.index] = slot
        self._next_slot = (slot.index + 1) % self.table.count

    def fence(self) -> None:
        for index in self.session.fences:
            self.session.fenced(index, self.assembler.landing.abandon(index))
        self.session.fences.clear()

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        session = self.session
        rows, ready, news = session.rows, session.ready, len(session.news)
        session.settled.clear()
        refused = dict(self.counters.reasons)
        code = fill(self.assembler, data, now_ns)
        self.fence()
        assert session.broken == 0
        if code:
            assert session.ready == ready, "a frame that cost the link made a proposal ready"
            return _link(code)
        dead = [slot for slot in session.settled if slot.state != st.READY]
        told = [item for item in session.news[news:] if item[0] == "leader_status"]
        if dead:
            assert session.ready == ready
            reason = Reason.from_code(dead[0].reason).value
            return Outcome("", "", f"discarded:{reason}") if told else Outcome("proposal", reason, "")
        counted = [name for name, count in self.counters.reasons.items() if count > refused.get(name, 0)]
        if counted:
            assert session.ready == ready
            return Outcome("frame", counted[0], "")
        if session.ready > ready:
            return Outcome("", "", "ready")
        if session.rows > rows:
            return Outcome("", "", "row_landed")
        return Outcome("", "", "noted" if told else "")

    def landing_slots(self) -> list[Slot]:
        return [slot for slot in self.table.slots if slot.state in (st.GRANTED, st.LANDING)]

    def cut(self) -> str:
        landing, ready = self.landing_slots(), self.session.ready
        self.session.lost(Reason.PEER_LOST)
        self.fence()
        if self.session.ready != ready:
            return "a proposal became ready"
        odd = [slot.index for slot in landing if slot.reason != Reason.PEER_LOST.code or slot.state != st.FREE]
        return f"slots {odd} are not discarded as peer_lost" if odd else ""


class LeaderBench(Bench):
    """A leader session."""

    sends_receiver_frames = False

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        self.session: LeaderSession = LeaderSession(self.terms, self.requests, self.counters)
        self.assembler = Assembler(self.session)

    def send(self, golden: Golden) -> None:
        f = golden.fields
        if golden.kind == "REPLY":
            grant = self.session.grants[f["slot"]]
            assert self.session.put_row(
                grant, f["slot_generation"], f["position"], f["token"], f["entry_count"], golden.data, 128,
                f["payload_length"],
            )  # fmt: skip
        elif golden.kind != "COMPLETION":  # which follows the last row by itself
            raise AssertionError(f"no leader sends {golden.name} in a `before`")

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        session = self.session
        steps, events, noted = len(session.steps), len(session.events), self.counters.get("peer_status")
        news = len(session.news)
        code = fill(self.assembler, data, now_ns)
        if code:
            assert len(session.steps) == steps
            assert len(session.events) == events
            return _link(code)
        refused = [item[1].value for item in session.news[news:] if item[0] == "step_refused"]
        if refused:
            assert len(session.steps) == steps
            status = wire.Header()
            assert status.decode(drain(session.outbox), 0) == 0
            assert (status.kind, status.subject, status.status) == (wire.STATUS, wire.STEP, Reason(refused[0]).code)
            asked = self.assembler.header
            for name in ("request", "request_generation", "slot", "slot_generation", "round"):
                assert getattr(status, name) == getattr(asked, name), f"the STATUS names another {name}"
            return Outcome("step", refused[0], "")
        if len(session.steps) > steps:
            return Outcome("", "", "granted")
        if len(session.events) > events:
            words = {"open": "opened", "commit": "committed", "close": "closed", "reset": "reset"}
            return Outcome("", "", words[session.events[-1][0]])
        return Outcome("", "", "noted" if self.counters.get("peer_status") > noted else "")

    def cut(self) -> str:
        self.session.lost()
        alive = [grant.slot for grant in self.session.grants if grant.alive(grant.generation)]
        return f"grants {alive} outlive the link" if alive else ""


class DraftPeerBench(LeaderBench):
    """A draft peer, which stands where a leader does: its session's receiver is the draft's leader."""

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        self.session = self.peer = DraftPeerSession(self.terms, self.requests, self.counters)
        self.assembler = Assembler(self.peer)

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        tokens, refused = self._told(), dict(self.counters.reasons)
        outcome = super().feed(data, now_ns)
        if self._told() > tokens:
            assert not outcome.refused
            return Outcome("", "", "told")
        counted = [name for name, count in self.counters.reasons.items() if count > refused.get(name, 0)]
        return Outcome("frame", counted[0], "") if counted and not outcome.refused and not outcome.effect else outcome

    def _told(self) -> int:
        return sum(told.kind == "token" for told in self.peer.stream)


def part_in(data: bytes) -> Part:
    """The part in a golden EXCHANGE, which a rank says by itself."""
    header = wire.Header()
    assert header.decode(data, 0) == 0
    return Part(
        header.shard, header.sequence, header.request, header.request_generation, header.round, header.position, header.purpose,
        header.first_id, header.end_id, values_of(header.purpose, data[128:], header.entry_count),
    )  # fmt: skip


class MemberBench(Bench):
    """Rank 1 of 2, at the group link's other end."""

    sends_receiver_frames = True

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        geometry = self.terms.geometry()
        self.table = SlotTable(geometry, 1)
        self.member = Member(1, 2)
        mode, memory = group_mode(session_name), bytearray(geometry.total_bytes)
        self.session: MemberSession = (
            MemberSession(self.terms, self.member, self.table, memory, self.counters)
            if mode == REPLICATE
            else OwnMemberSession(self.terms, self.member, self.table, memory, self.counters, Joint(mode))
        )
        self.session.up()
        self.assembler = Assembler(self.session)

    def send(self, golden: Golden) -> None:
        f = golden.fields
        if golden.kind == "AGREE":
            for slot in self.table.slots:
                slot.generation = f["floor"]
            assert self.session.agree(f["state_low"], f["state_high"])
        elif golden.kind == "EXCHANGE":
            self.session.exchange(part_in(golden.data))
        elif golden.name == "vote_no":
            self.session.discard(self.table.slots[f["slot"]], f["status"])
        else:
            assert golden.name in ("vote_ready", "vote_rowless"), "which follow the completion, or the GRANT, by themselves"
        self.fence()

    def fence(self) -> None:
        fences, self.session.fences = self.session.fences, []
        for index in fences:
            self.session.fenced(index, self.assembler.landing.abandon(index))

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        session, member = self.session, self.member
        rows, ready, news, refused = session.rows, session.ready, len(session.news), dict(self.counters.reasons)
        before = (member.standing, member.epoch, len(member.papers), self.table.by_state()["VOTED"])
        session.settled.clear()
        session.exchanged.clear()
        code = fill(self.assembler, data, now_ns)
        self.fence()
        assert session.broken == 0
        if code:
            assert session.ready == ready, "a frame that cost the link made a proposal ready"
            return _link(code)
        void = [slot for slot in session.settled if slot.reason]
        if void:
            return Outcome("", "", f"discarded:{Reason.from_code(void[0].reason).value}")
        own = [item[1].value for item in session.news[news:] if item[0] == "refused"]
        if own:
            return Outcome("proposal", own[0], "")
        counted = [name for name, count in self.counters.reasons.items() if count > refused.get(name, 0)]
        if counted:
            return Outcome("frame", counted[0], "")
        if session.ready > ready:
            return Outcome("", "", "ready")
        if session.exchanged:
            return Outcome("", "", "exchanged")
        if self.table.by_state()["VOTED"] > before[3]:
            return Outcome("", "", "voted")
        if session.rows > rows:
            return Outcome("", "", "row_landed")
        if len(member.papers) > before[2]:
            return Outcome("", "", "granted")
        if (member.standing, member.epoch) != before[:2]:
            return Outcome("", "", f"epoch_{member.standing.value}")
        return Outcome("", "", "noted" if len(session.news) > news else "")

    def cut(self) -> str:
        live, ready = [slot for slot in self.table.slots if slot.state in st.LIVE], self.session.ready
        self.session.lost(Reason.PEER_LOST)
        if self.session.ready != ready or self.member.open:
            return "something outlives the link"
        odd = [slot.index for slot in live if slot.reason != Reason.PEER_LOST.code or slot.state != st.FREE]
        return f"slots {odd} are not discarded as peer_lost" if odd else ""


class HubBench(Bench):
    """Rank 0 of 2, at its end of the group link; its session with the leader exists, and is not looked at."""

    sends_receiver_frames = False

    def __init__(self, session_name: str) -> None:
        super().__init__(session_name)
        geometry = self.terms.geometry()
        self.table = SlotTable(geometry)
        self.group = RankGroup(2, self.counters, mode=group_mode(session_name))
        self.receiver = ReceiverSession(
            self.terms, self.table, bytearray(geometry.total_bytes), self.requests, self.counters, group=self.group
        )
        self.session: HubSession = HubSession(self.terms, self.group, 1, self.counters)
        self.session.up()
        self.assembler = Assembler(self.session)

    def send(self, golden: Golden) -> None:
        f = golden.fields
        if golden.kind == "EPOCH" and f["phase"] == 3:
            assert self.group.agree(number(vectors()["agree"].fields["state_low"]), vectors()["agree"].fields["state_high"])
        elif golden.kind == "GRANT":
            tokens = vectors()["open"].note["payload"]["tokens"]
            step = vectors()["step_dense"].fields
            request = Request(f["request"], f["seed"], tokens, generation=f["request_generation"])
            request.round = f["round"]
            request.owner = 0 if f["owner"] == wire.OWNER_ALL else f["owner"]
            self.requests.add(request)
            slot = self.receiver.step(
                request, START_NS, f["depth"], step["temperature"], f["support_policy"], f["representation"],
                f["target_context"], f["budget_us"], f["trace_id"],
            )  # fmt: skip
            assert slot is not None
        else:
            assert golden.name in ("epoch_asking", "epoch_asking_owned", "decide_no"), "which follow by themselves"

    def prepare(self, before: list[str]) -> None:
        if not before:
            drain(self.session.outbox)  # EPOCH, which no `before` names
        super().prepare(before)

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        coordinator, refused, news = self.group.coordinator, dict(self.counters.reasons), len(self.session.news)
        agreed, epoch, said = len(coordinator._digests), coordinator.epoch, self.group.exchanges.said(1)
        fates = {slot: (p.fate, len(p.votes)) for slot, p in coordinator.proposals.items()}
        code = fill(self.assembler, data, now_ns)
        if code:
            return _link(code)
        if coordinator.epoch != epoch:
            return Outcome("", "", "epoch_ended")
        for slot, proposal in coordinator.proposals.items():
            fate, votes = fates[slot]
            if proposal.fate is not fate:
                freed = proposal.fate is Fate.CLOSED
                if freed:
                    return Outcome("", "", "freed")
                if proposal.code and not self.assembler.header.status:  # what a ready vote claims is what decides otherwise
                    return Outcome("proposal", Reason.from_code(proposal.code).value, "")
                return Outcome("", "", f"decided:{Reason.from_code(proposal.code).value if proposal.code else 'ready'}")
            if len(proposal.votes) > votes:
                return Outcome("", "", "voted")
        counted = [name for name, count in self.counters.reasons.items() if count > refused.get(name, 0)]
        if counted:
            return Outcome("frame", counted[0], "")
        if self.group.exchanges.said(1) > said:
            return Outcome("", "", "part_heard")
        if len(coordinator._digests) > agreed:
            return Outcome("", "", "agreed")
        return Outcome("", "", "noted" if len(self.session.news) > news else "")

    def cut(self) -> str:
        live = [slot for slot in self.table.slots if slot.state in st.LIVE]
        self.session.lost(Reason.PEER_LOST)
        if self.group.open:
            return "the epoch outlives the link"
        odd = [slot.index for slot in live if slot.reason != Reason.PEER_LOST.code]
        return f"slots {odd} are not discarded as peer_lost" if odd else ""


class ProofBench(Bench):
    """The data port of the listener, or the link of the connector, before the session begins."""

    def __init__(self, to: str) -> None:
        agreement = agreements()[Role.LEADER if to == "listener_port" else Role.RECEIVER]
        self.reader = ProofReader(lambda session: agreement if session == agreement.session else None)

    def prepare(self, before: list[str]) -> None:
        assert not before

    def feed(self, data: bytes, now_ns: int = START_NS) -> Outcome:
        reason = self.reader.take(data[: self.reader.missing])
        if reason is not None:
            assert self.reader.agreement is None
            return Outcome("link", reason.value, "")
        return Outcome("", "", "proven" if self.reader.agreement is not None else "")

    def cut(self) -> str:
        return "proven by a part" if self.reader.agreement is not None else ""


def bench_for(golden: Golden) -> Bench:
    """A bench in the state that the vector names."""
    to = golden.note["to"]
    bench: Bench
    if to in ("listener_port", "connector_link"):
        bench = ProofBench(to)
    elif to in ("member", "coordinator"):
        bench = MemberBench(golden.note["session"]) if to == "member" else HubBench(golden.note["session"])
    else:
        kinds = {"leader": LeaderBench, "receiver": ReceiverBench, "draft_peer": DraftPeerBench}
        bench = kinds[to](golden.note["session"])
    bench.prepare(golden.note["before"])
    return bench


# -- the control plane -------------------------------------------------------------------------------------------------


class Fixed:
    """An entropy source that hands out what the golden handshake used, by size."""

    def __init__(self, link_nonce: str) -> None:
        link = sessions()["link"]["v64"]
        session = number(sessions()["sessions"]["v64"]["session"])
        self._by_size = {
            16: bytes.fromhex(link[link_nonce]),
            8: session.to_bytes(8, "little"),
            32: bytes.fromhex(link["secret"]),
        }

    def __call__(self, size: int) -> bytes:
        return self._by_size[size]


@functools.cache
def hello_of(role: Role) -> Hello:
    """What that side of session v64 states."""
    name = "hello" if role is Role.RECEIVER else "hello_ack"
    body = decode_message(vectors()[name].data)["hello"]
    assert isinstance(body, dict)
    return parse_hello(body)


def listener() -> Listener:
    """The leader's side, which listens."""
    data = sessions()["link"]["v64"]["data"]
    return Listener(hello_of(Role.LEADER), data, encode_message, Fixed("leader_link_nonce"))


def connector() -> Connector:
    """The receiver's side, which has said HELLO."""
    waiting = Connector(hello_of(Role.RECEIVER), encode_message, Fixed("receiver_link_nonce"))
    message = waiting.start(START_NS)
    assert encode_message(message) == vectors()["hello"].data
    return waiting


@functools.cache
def agreements() -> dict[Role, Agreement]:
    """What each side holds after the golden handshake."""
    _, leader = listener().receive(decode_message(vectors()["hello"].data), START_NS)
    assert isinstance(leader, Agreement)
    return {
        Role.LEADER: leader,
        Role.RECEIVER: connector().receive(decode_message(vectors()["hello_ack"].data), START_NS),
    }


def judge_message(to: str, data: bytes) -> tuple[Outcome, str, Agreement | None]:
    """What the machine that gets a control message makes of it: (outcome, the field a refusal names, agreement)."""
    try:
        message = decode_message(data)
        if to == "listener":
            answer, result = listener().receive(message, START_NS)
            if isinstance(result, PeerFault):
                assert answer["kind"] == "refuse"
                assert answer["reason"] == result.reason.value
                raise result
            return Outcome("", "", "agreed"), "", result
        if to == "connector":
            waiting = connector()
            try:
                return Outcome("", "", "agreed"), "", waiting.receive(message, START_NS)
            finally:
                assert waiting.state.value in ("failed", "agreed", "waiting")
        return Outcome("", "", message_kind(message)), "", None
    except Refused as refusal:
        return Outcome("session", refusal.reason.value, ""), refusal.field, None
    except PeerFault as fault:
        return Outcome("session", fault.reason.value, ""), "", None


def flips(data: bytes, bits: Iterator[int] | range) -> Iterator[tuple[int, bytes]]:
    """(bit index, data with that bit toggled); bit 0 is the lowest of byte 0."""
    work = bytearray(data)
    for bit in bits:
        work[bit >> 3] ^= 1 << (bit & 7)
        yield bit, bytes(work)
        work[bit >> 3] ^= 1 << (bit & 7)
