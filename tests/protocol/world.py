"""A small world: leader and receiver sessions over sim links and a virtual clock, with a tap on each direction.

Between a numbered case and the real machinery. It plays the engine (fences, ends of links, counting) as `engine.py` does, and
keeps watch over what must always hold: ready bytes never change, generations only rise.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pp1q_transport import dyadic, rng, wire
from pp1q_transport._native.kernels import xxh3_64
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.links.sim import sim_pair
from pp1q_transport.session import slots as st
from pp1q_transport.session.hub import RankGroup
from pp1q_transport.session.leader import Grant, LeaderSession
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import Request, RequestTable
from pp1q_transport.session.slots import Slot, SlotTable
from pp1q_transport.session.terms import SessionTerms

from .frames import Frame, Tap

LEADER_NONCE = 0x1111_2222_3333_4444
RECEIVER_NONCE = 0x5555_6666_7777_8888
SESSION = 0xABCD_EF01_2345_6789
BUDGET_US = 1000
BUDGET_NS = BUDGET_US * 1000
PROMPT = (5, 6, 7)


@dataclass
class Row:
    """One honest row: payload bytes, entries and the token that the RNG draws from it."""

    payload: bytes
    entries: int
    token: int


@dataclass
class Flight:
    """One STEP under way, as the receiver's client would hold it."""

    slot: Slot
    generation: int
    request: Request
    depth: int
    put: int = 0

    @property
    def landing(self) -> bool:
        """Whether the very generation is still under way."""
        return self.slot.generation == self.generation and self.slot.state in (st.GRANTED, st.LANDING)

    @property
    def ready(self) -> bool:
        """Whether the very generation is ready to be read."""
        return self.slot.generation == self.generation and self.slot.state == st.READY

    @property
    def reason(self) -> Reason | None:
        """Why the generation was discarded."""
        if self.slot.generation != self.generation or not self.slot.reason:
            return None
        return Reason.from_code(self.slot.reason)


class World:
    """Both sessions of one link. `now` is the only clock; `run` delivers until nothing moves."""

    group: RankGroup | None = None  # `group_rig` has one

    def __init__(
        self,
        *,
        vocab: int = 64,
        depth: int = 3,
        support: int = 8,
        slots: int = 4,
        dense: bool = True,
        sparse: bool = True,
        draw_proof: bool = True,
        context_tokens: int = 128,
        quarantine: int = 0,
        seed: int = 0,
        largest: int = 0,
    ) -> None:
        self._negotiated = (vocab, depth, support, slots, dense, sparse, draw_proof, context_tokens)
        self._splits = (seed, largest)
        self._quarantine = quarantine
        self.now = 0
        self.counts = {"leader": Counters(), "receiver": Counters()}
        self.requests = RequestTable()
        self.leader_requests = RequestTable()
        geometry = SessionTerms(SESSION, LEADER_NONCE, RECEIVER_NONCE, *self._negotiated).geometry()
        self.table = SlotTable(geometry)
        self.memory = bytearray(geometry.total_bytes)
        self._join(SESSION)
        self.fencing = True  # False: a link whose fences take their time
        self.unconfirmed: list[int] = []
        self._rows: list[bytes] = []  # what the leader's outbox may still point at
        self._ready: dict[tuple[int, int], bytes] = {}
        self._generations = [0] * slots

    def _join(self, session: int) -> None:
        """New sessions at both ends and a new link between them; slots, memory and requests live on."""
        self.terms = SessionTerms(session, LEADER_NONCE, RECEIVER_NONCE, *self._negotiated)
        self.receiver = ReceiverSession(
            self.terms, self.table, self.memory, self.requests, self.counts["receiver"], self._quarantine, self.group
        )
        self.leader = LeaderSession(self.terms, self.leader_requests, self.counts["leader"])
        self.taps = {"leader": Tap(self.leader.outbox, self), "receiver": Tap(self.receiver.outbox, self)}
        left, right = sim_pair(
            self.leader, self.taps["leader"].outbox, self.receiver, self.taps["receiver"].outbox, *self._splits
        )
        self.links = {"leader": left, "receiver": right}
        self.ended: dict[str, Reason] = {}

    def reconnect(self, discard: bool = True) -> None:
        """The link is lost and a new session formed, as engine and client do it. `discard` raises every generation."""
        self.down("leader", Reason.LINK_ERROR)
        self.run()
        if discard:
            for request in self.requests.requests.values():
                request.discard()
        self._join(self.terms.session + 1)
        for request in self.requests.requests.values():
            self.receiver.open(request)
        self.run()

    # ---- the receiver's client -------------------------------------------------------------------------------------

    def open(self, request: int, tokens: Iterable[int] = PROMPT, generation: int = 0, seed: int | None = None) -> Request:
        """Opens a request at both ends."""
        opened = Request(request, 1000 + request if seed is None else seed, tokens, generation=generation)
        self.requests.add(opened)
        if "receiver" not in self.ended:
            self.receiver.open(opened)
            self.run()
        return opened

    def step(
        self,
        request: Request,
        representation: int = wire.DENSE,
        depth: int | None = None,
        temperature: float = 1.0,
        support: int | None = None,
        budget_us: int = BUDGET_US,
        target_context: int = 0,
    ) -> Flight:
        """Queues a STEP and delivers it."""
        if support is None:
            support = self.terms.support if representation == wire.SPARSE else 0
        depth = depth or self.terms.depth
        slot = self.receiver.step(
            request, self.now, depth, temperature, support, representation, target_context, budget_us, 0
        )
        assert slot is not None, "no free slot"
        flight = Flight(slot, slot.generation, request, depth)
        self.run()
        return flight

    def commit(self, flight: Flight, tokens: Iterable[int]) -> None:
        """Commits what a round gave, verified when it was ready; the slot is released first."""
        flight_was_ready = flight.ready
        source = wire.VERIFIED if flight_was_ready else wire.TARGET_ONLY
        self.release(flight)
        if "receiver" in self.ended:
            return
        committed = list(tokens)
        accepted = len(committed) - 1 if flight_was_ready else 0
        self.receiver.commit(flight.request, flight.slot.round, source, accepted, committed)
        self.run()

    def release(self, flight: Flight) -> bool:
        """The one consumer is done."""
        return self.table.release(flight.slot, flight.generation, 0, 0)

    def tokens(self, flight: Flight) -> list[int]:
        """The tokens of a ready proposal, as its client reads them."""
        return list(struct.unpack_from(f"<{flight.depth}i", self.memory, flight.slot.meta_at))

    # ---- the draft -------------------------------------------------------------------------------------------------

    def grant(self, flight: Flight) -> Grant:
        """The leader's view of a flight."""
        return self.leader.grants[flight.slot.index]

    def row(self, request: Request, slot: Slot, position: int) -> Row:
        """The honest row of a position; zeros, ties and every size of value occur."""
        weights = np.array([(7 * i + 13 * position + i * i) % 11 for i in range(self.terms.vocab_size)], np.float64)
        u24 = rng.draw24(request.seed, rng.Domain.PROPOSAL, slot.request_generation, slot.round, position)
        if slot.representation == wire.DENSE:
            counts = dyadic.allocate(weights)
            payload = dyadic.to_q(counts).tobytes().ljust(self.terms.dense_row_bytes, b"\0")
            return Row(payload, self.terms.vocab_size, dyadic.draw(counts, u24))
        ids, counts = dyadic.allocate_top_k(weights, slot.support)
        payload = dyadic.to_q(counts).tobytes() + ids.tobytes()
        return Row(payload, len(ids), dyadic.draw_sparse(ids, counts, u24))

    def put(self, flight: Flight, rows: int | None = None) -> bool:
        """Puts the next `rows` rows (all that are left when None) and delivers them. False when the grant is dead."""
        grant = self.grant(flight)
        for _ in range(grant.depth - flight.put if rows is None else rows):
            position = flight.slot.anchor + 1 + flight.put
            row = self.row(flight.request, flight.slot, position)
            self._rows.append(row.payload)
            if not self.leader.put_row(
                grant, flight.generation, position, row.token, row.entries, row.payload, 0, len(row.payload)
            ):
                return False
            flight.put += 1
        self.run()
        return True

    def honest_tokens(self, flight: Flight) -> list[int]:
        """What the proposal must hold when it is ready."""
        first = flight.slot.anchor + 1
        return [self.row(flight.request, flight.slot, first + i).token for i in range(flight.depth)]

    # ---- raw frames ------------------------------------------------------------------------------------------------

    def frame(self, side: str, kind: int, payload: bytes = b"", **values: int) -> Frame:
        """A frame made by hand as if `side` had sent it, valid in identity and digests unless the case bends it."""
        header = wire.Header()
        header.clear()
        header.kind = kind
        header.boot_nonce = self.terms.leader_nonce if side == "leader" else self.terms.receiver_nonce
        header.session = self.terms.session
        for name, value in values.items():
            setattr(header, name, value)
        return Frame(header, payload)

    def send(self, side: str, *frames: Frame | bytes) -> None:
        """Puts frames into the stream that `side` sends, and delivers."""
        for frame in frames:
            self.taps[side].send(frame)
        self.run()

    def reply(self, flight: Flight, position: int, **values: int) -> Frame:
        """The honest REPLY of a position, made by hand."""
        slot = flight.slot
        row = self.row(flight.request, slot, position)
        base: dict[str, int] = {
            "request": slot.request, "request_generation": slot.request_generation, "round": slot.round,
            "slot": slot.index, "slot_generation": flight.generation, "depth": slot.depth, "position": position,
            "representation": slot.representation, "entry_count": row.entries, "token": row.token, "draw_counter": 0,
            "context": slot.context, "first_id": 0, "end_id": self.terms.vocab_size, "shard_mass": 1 << 24,
            "mass_before": 0,
        }  # fmt: skip
        return self.frame("leader", wire.REPLY, row.payload, **(base | values))

    def completion(self, flight: Flight, replies: list[Frame], **values: int) -> Frame:
        """The COMPLETION that closes `replies` (each encoded before), made by hand."""
        digests = bytearray(16 * len(replies))
        for index, reply in enumerate(replies):
            reply.encode(self.terms.leader_nonce)
            header = reply.header
            wire.put_digest_entry(digests, index, header.position, header.payload_length, header.payload_digest)
        slot = flight.slot
        base: dict[str, int] = {
            "request": slot.request, "request_generation": slot.request_generation, "round": slot.round,
            "slot": slot.index, "slot_generation": flight.generation, "depth": slot.depth, "position": slot.anchor,
            "context": slot.context, "reply_size": sum(len(reply.payload) for reply in replies),
            "reply_digest": xxh3_64(digests, 0, len(digests), 0), "positions": len(replies), "status": 0,
        }  # fmt: skip
        return self.frame("leader", wire.COMPLETION, **(base | values))

    # ---- time and delivery -----------------------------------------------------------------------------------------

    def at(self, now_ns: int) -> None:
        """Moves the clock and lets the watchdog look, as the engine does after each pass."""
        self.now = now_ns
        if "receiver" not in self.ended:
            self.receiver.tick(now_ns)
            self.settle()
        self.run()

    def run(self) -> None:
        """Delivers everything that is queued or in flight at the current time."""
        for _ in range(400):
            moved = self._pump("receiver") + self._pump("leader")
            self.settle()
            self.watch()
            if not moved:
                return
        raise AssertionError("the world does not come to rest")

    def _pump(self, side: str) -> int:
        if side in self.ended:
            return 0
        session = self.leader if side == "leader" else self.receiver
        try:
            self.taps[side].pump()
            moved = self.links[side].pump(self.now)
        except PeerFault as fault:
            self.down(side, fault.reason)
            return 1
        code = -moved if moved < 0 else session.broken
        if code:
            self.down(side, Reason.from_code(code))
            return 1
        return moved

    def down(self, side: str, reason: Reason) -> None:
        """One end's link ends, in the order the engine and client keep."""
        self.ended[side] = reason
        self.links[side].close()
        self.counts[side].refuse(reason)
        if side == "leader":
            self.leader.lost()
            return
        lost = reason in (Reason.PEER_LOST, Reason.CANCELLED)
        self.receiver.lost(Reason.PEER_LOST if lost else Reason.LINK_ERROR)

    def settle(self) -> None:
        """Fences what was invalidated, so that its slot can be granted again."""
        self.receiver.settled.clear()
        if self.fencing and "receiver" not in self.ended:
            fences, self.receiver.fences = self.receiver.fences, []
            for index in fences:
                self.receiver.fenced(index, self.links["receiver"].fence(index))
        elif not self.fencing:
            self.unconfirmed += self.receiver.fences
            self.receiver.fences.clear()

    def slot_bytes(self, slot: Slot) -> bytes:
        """Rows and metadata of a slot as a sampler may read them."""
        geometry = self.table.geometry
        rows = self.memory[slot.rows_at : slot.rows_at + geometry.slot_bytes]
        return bytes(rows + self.memory[slot.meta_at : slot.meta_at + geometry.meta_bytes])

    def watch(self) -> None:
        """What must hold after every delivery."""
        for slot in self.table.slots:
            assert slot.generation >= self._generations[slot.index], "a slot generation fell"
            self._generations[slot.index] = slot.generation
            place = (slot.index, slot.generation)
            if slot.state == st.READY:
                held = self._ready.setdefault(place, self.slot_bytes(slot))
                assert held == self.slot_bytes(slot), "bytes of a ready proposal changed"
        assert len(self.memory) == self.table.geometry.total_bytes
