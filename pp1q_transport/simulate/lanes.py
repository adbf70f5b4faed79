"""The wire of a run: what an end's session queued goes over to its peer, late, in pieces, spoiled, or not at all.

Between the sessions' outboxes and assemblers (by `links.sim`) and the world's clock. A link is a stream, or one-sided: then rows
are written into landing memory under a key, and read from there when the word of them is taken. Decides nothing about proposals.
"""

from __future__ import annotations

from collections import deque
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from .. import wire
from ..errors import PeerFault, Reason
from ..links.sim import SimLink, SimStream
from .checks import CHECKED, HONEST
from .faults import MS, PICKS, US, FaultKind
from .journal import HARMLESS, SUPERSEDED, Violation

if TYPE_CHECKING:
    from ..wire import Header
    from .journal import Injection
    from .parties import Process
    from .world import World

PATIENCE_NS: Final = (8 * MS, 20 * MS)  # how long a stream that lost something is taken for whole
_LATEST_DELAY_NS: Final = 8 * MS
_REMEMBERED: Final = 64
_GAP_NS: Final = 60 * US  # at most, between a row's bytes in landing memory and the word of them


class Item:
    """One frame on its way, or a part of one. `place`: (slot, row, key) of a row that is written one-sided."""

    __slots__ = ("data", "flipped", "generation", "injection", "kind", "landed", "place", "request", "slot")

    def __init__(self, data: bytes, header: Header) -> None:
        self.data = data
        self.kind = header.kind
        self.request = header.request
        self.slot = header.slot
        self.generation = header.slot_generation
        self.injection: Injection | None = None
        self.flipped = False
        self.place: tuple[int, int, int] | None = None
        self.landed = False

    def part(self, data: bytes) -> Item:
        """The same frame's other bytes."""
        twin = Item.__new__(Item)
        for name in Item.__slots__:
            setattr(twin, name, getattr(self, name))
        twin.data = data
        return twin


class LandingMemory:
    """Rows that a peer writes and we copy out, with a key for each slot. `told` are the keys that the peer knows of."""

    def __init__(self, slots: int) -> None:
        self.keys = [1] * slots
        self.told = [1] * slots
        self.rows: dict[tuple[int, int], bytes] = {}
        self.spoiled: dict[tuple[int, int], Injection] = {}
        self.ambushes: list[Injection] = []  # late writes that wait for a row to land

    def spoil(self, at: tuple[int, int], injection: Injection) -> None:
        """One byte of a row there is another."""
        fault, row = injection.fault, bytearray(self.rows[at])
        row[fault.place % len(row)] ^= 1 + fault.pick % 255
        self.rows[at] = bytes(row)
        self.spoiled[at] = injection

    def write(self, slot: int, row: int, key: int, data: bytes) -> bool:
        """Whether the key was good: else nothing is written."""
        if self.keys[slot] != key:
            return False
        self.rows[slot, row] = data
        return True


class PlayedLink(SimLink):
    """A `SimLink` that counts its fences by slot, with landing memory when it is one-sided."""

    def __init__(self, session: Any, seed: int, largest: int, landing: LandingMemory | None, slots: int) -> None:
        self.incoming = SimStream()
        self.outgoing = SimStream()
        super().__init__(session, session.outbox, self.incoming, self.outgoing, seed, largest)
        self.landing = landing
        self.fences = [0] * slots

    def take_sent(self) -> bytes:
        """Everything that the session has queued and that was sent since the last call."""
        if not self.broken:
            self._send()
        data = bytes(self.outgoing.data)
        self.outgoing.data.clear()
        return data

    def fence(self, slot: int) -> bool:
        """See `Link.fence`: the key of a one-sided slot is another from here on."""
        self.fences[slot] += 1
        if self.landing is not None:
            self.landing.keys[slot] += 1
        return super().fence(slot)


class Wire:
    """One link between two processes, from its forming to its end. `excused`: a fault touched its bytes, so it may be refused."""

    def __init__(self, number: int, name: str) -> None:
        self.number = number
        self.name = name
        self.excused = False
        self.over = False


class End:
    """One end of a link: a session, its link, and whether it lives."""

    def __init__(self, owner: Process, session: Any, link: PlayedLink, wire_: Wire) -> None:
        self.owner = owner
        self.session = session
        self.link = link
        self.wire = wire_
        self.name = wire_.name
        self.alive = True
        self.short = False  # bytes are missing in what comes: a frame may wait for those of the next ones
        self.cut = False  # what is sent from here on gets nowhere
        self.peer: End
        self.last_due = 0
        self.armed: list[list[Any]] = []  # [frames to let pass first, injection]
        self.held: Item | None = None  # waits for the next frame to go before it


def frames_of(data: bytes) -> list[bytes]:
    """Whole frames, as a session queues them."""
    found = []
    at = 0
    while at < len(data):
        end = at + wire.HEADER_BYTES + int.from_bytes(data[at + 56 : at + 60], "little")
        found.append(data[at:end])
        at = end
    return found


class Lanes:
    """Sends and delivers for a world."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.header = wire.Header()
        self.sent: dict[tuple[str, str], deque[bytes]] = {}  # by (process, end): its last frames, over all sessions

    # ---- sending ------------------------------------------------------------------------------------------------

    def send(self, end: End) -> None:
        """Everything that `end`'s session has queued goes on its way."""
        data = end.link.take_sent()
        if not data:
            return
        batch: list[Item] = []
        for frame in frames_of(data):
            self.header.decode(frame, 0)
            item = Item(frame, self.header)
            self.world.saw_sent(end, self.header)
            if end.cut or not end.peer.alive:
                continue
            if self.header.kind == wire.REPLY and end.peer.link.landing is not None:
                item.place = (item.slot, self.header.position % self.header.depth, end.peer.link.landing.told[item.slot])
            hit = self._hit(end)
            past = self.sent.get((end.owner.name, end.name))
            if past is None:
                past = self.sent[end.owner.name, end.name] = deque(maxlen=_REMEMBERED)
            past.append(frame)
            if hit is None:
                batch.append(item)
                self._append_held(end, batch)
            else:
                batch = self._meddle(end, item, batch, hit)
        if batch:
            self._schedule(end, batch)

    def _hit(self, end: End) -> Injection | None:
        for entry in end.armed:
            if entry[0] == 0:
                end.armed.remove(entry)
                injection: Injection = entry[1]
                return injection
            entry[0] -= 1
        return None

    def _meddle(self, end: End, item: Item, batch: list[Item], injection: Injection) -> list[Item]:
        """Does to one frame what the fault says; returns what goes on together with it."""
        fault, outcomes = injection.fault, self.world.outcomes
        outcomes.begin(injection)
        end.wire.excused = True
        if fault.kind is FaultKind.DROP:
            self.watch(end, item, injection)
            self._damage(end)
            return batch
        if fault.kind is FaultKind.STALE:
            batch += [self._old_frame(end, injection), item]
            return batch
        item.injection = injection
        if fault.kind is FaultKind.FLIP:
            item.data = flipped(item.data, fault.place)
            item.flipped = True
        elif fault.kind is FaultKind.DUPLICATE:
            batch.append(item.part(item.data))
            batch[-1].injection = None
        elif fault.kind is FaultKind.TRUNCATE:
            item.data = item.data[: 1 + fault.place * (len(item.data) - 1) // PICKS]
            item.place = None
            end.peer.short = True
            self._damage(end)
        elif fault.kind is FaultKind.DELAY:
            if batch:
                self._schedule(end, batch)
            end.last_due = max(end.last_due, self.world.now) + fault.place * _LATEST_DELAY_NS // PICKS
            batch = []
        elif end.held is None:  # reorder
            end.held = item
            self.world.after(MS, partial(self._release_held, end))
            return batch
        batch.append(item)
        return batch

    def _old_frame(self, end: End, injection: Injection) -> Item:
        """One of the last frames that went this way, whatever session it was of."""
        past = self.sent[end.owner.name, end.name]
        frame = past[injection.fault.place % len(past)]
        self.header.decode(frame, 0)
        old = Item(frame, self.header)
        old.injection = injection
        return old

    def _append_held(self, end: End, batch: list[Item]) -> None:
        if end.held is not None:
            batch[-1].injection = end.held.injection
            batch.append(end.held)
            end.held = None

    def _release_held(self, end: End) -> None:
        if end.held is not None:
            held, end.held = end.held, None
            if end.cut or not end.alive or not end.peer.alive:
                self.lost(held)
            else:
                self._schedule(end, [held])

    def _damage(self, end: End) -> None:
        """A stream that lost bytes: whoever owns it gives it up after a while, as a transport with retransmission does."""
        self.world.after(self.world.random.randint(*PATIENCE_NS), partial(self._give_up, end))

    def _give_up(self, end: End) -> None:
        if not end.wire.over:
            self.world.journal.note(f"{self.world.now} {end.wire.name} is given up")
            self.world.cut(end, Reason.PEER_LOST.value)

    def _schedule(self, end: End, batch: list[Item]) -> None:
        world, random = self.world, self.world.random
        delay = random.randint(10 * US, 150 * US)
        if random.random() < world.slow:
            delay += random.randint(0, 5 * MS)
        before = end.last_due
        due = end.last_due = max(before, world.now + delay)
        peer = end.peer
        if peer.link.landing is not None:
            if any(item.place is not None for item in batch):
                lands = max(before, due - random.randint(0, _GAP_NS), world.now)
                world.after(lands - world.now, partial(self._land, peer, batch))
        elif random.random() < world.halves and batch[-1].injection is None:
            last = batch.pop()
            if batch:
                world.after(due - world.now, partial(self.deliver, peer, batch))
            batch = [last.part(last.data)]
            middle = random.randint(1, len(last.data)) - 1
            if middle:
                first = last.part(last.data[:middle])
                first.injection = None
                first.flipped = False
                world.after(due - world.now, partial(self.deliver, peer, [first]))
                batch[0].data = last.data[middle:]
                gap = 2 * MS if random.random() < 10 * world.slow else 100 * US
                due = end.last_due = due + random.randint(0, gap)
        world.after(due - world.now, partial(self.deliver, peer, batch))

    # ---- arriving -----------------------------------------------------------------------------------------------

    def _land(self, end: End, items: list[Item]) -> None:
        """One-sided rows reach landing memory; the word of them comes a little later."""
        landing = end.link.landing
        assert landing is not None
        if not end.alive:
            return
        for item in items:
            if item.place is not None:
                slot, row, key = item.place
                item.landed = landing.write(slot, row, key, item.data)
                spoiler = landing.spoiled.pop((slot, row), None) if item.landed else None
                if spoiler is not None and spoiler.outcome is None:
                    self.world.outcomes.end(spoiler, HARMLESS)
                if item.landed and landing.ambushes:
                    self._ambush(end, landing, (slot, row))

    def _ambush(self, end: End, landing: LandingMemory, at: tuple[int, int]) -> None:
        """The peer writes again before we have copied the row out."""
        injection = landing.ambushes.pop()
        self.world.outcomes.begin(injection)
        self.world.outcomes.watch(("link", end.wire.number), injection)
        end.wire.excused = True
        landing.spoil(at, injection)

    def deliver(self, end: End, items: list[Item]) -> None:
        """Items reach `end`, one by one; after each its owner and the checks have a look."""
        owner = end.owner
        for index, item in enumerate(items):
            if not end.alive or not owner.alive:
                for rest in items[index:]:
                    self.lost(rest)
                return
            self._take(end, item)
            owner.settle()
            self.world.check(owner)
        owner.flush()

    def _take(self, end: End, item: Item) -> None:
        data, injection, changed = item.data, item.injection, item.flipped
        if item.place is not None:
            landing = end.link.landing
            assert landing is not None
            if not item.landed:
                self.lost(item)  # the fence refused the write: there is no word of it either
                return
            at = item.place[:2]
            changed = landing.rows[at] != data or changed
            data = landing.rows[at]
            spoiler = landing.spoiled.pop(at, None)
            if spoiler is not None:
                self.lost(item)  # what befell it before: the late write is what will be noticed
                injection = spoiler
        owner = end.owner
        name = wire.KIND_NAMES[item.kind]
        self.world.journal.note(f"{self.world.now} {owner.name} gets {name} slot {item.slot}.{item.generation} by {end.name}")
        before = dict(owner.counters.reasons) if injection is not None else {}
        end.link.incoming.data += data
        code = self._pump(end)
        if code:
            self.refused(end, Reason.from_code(code))
        if injection is not None and injection.outcome is None:
            self._judge(end, item, injection, changed, code, before)

    def _pump(self, end: End) -> int:
        try:
            moved = end.link.pump(end.owner.clock())
        except PeerFault as fault:
            return fault.reason.code
        return -moved if moved < 0 else int(end.session.broken)

    def _judge(self, end: End, item: Item, injection: Injection, changed: bool, code: int, before: dict[str, int]) -> None:
        """What came of a frame that a fault has touched: `code` if it ended the link, else what was counted."""
        after = end.owner.counters.reasons
        reason = next((name for name, count in after.items() if count > before.get(name, 0)), None)
        if code:
            self.world.outcomes.end(injection, Reason.from_code(code).value)
        elif reason is not None:
            self.world.outcomes.end(injection, reason)
        elif changed and not end.short:
            name = wire.KIND_NAMES[item.kind]
            raise Violation(CHECKED, f"{end.owner.name} takes a {name} that {injection.fault} has changed")
        elif injection.fault.kind in (FaultKind.DUPLICATE, FaultKind.STALE):
            self.world.outcomes.end(injection, HARMLESS)
        else:
            self.watch(end, item, injection)

    def watch(self, end: End, item: Item, injection: Injection) -> None:
        """What ends the frame's proposal, or its request's next one, or its link, ends the fault."""
        target = end.owner.target or end.peer.owner.target
        assert target is not None
        if item.generation:
            self.world.outcomes.watch(("proposal", target.number, target.zero.nonce, item.slot, item.generation), injection)
        elif item.request:
            self.world.outcomes.watch(("request", target.number, item.request), injection)
        self.world.outcomes.watch(("link", end.wire.number), injection)

    def refused(self, end: End, reason: Reason) -> None:
        """`end` can't go on with its link. Only a fault on this very link, or an overload, may be the cause."""
        self.world.journal.note(f"{self.world.now} {end.owner.name} ends {end.name}: {reason.value}")
        end.owner.counters.refuse(reason)
        if not end.wire.excused and reason is not Reason.OVERLOAD:
            raise Violation(HONEST, f"{end.owner.name} ends {end.name} of an honest peer: {reason.value}")
        self.world.link_over(end.wire, reason.value)
        end.owner.down(end, Reason.LINK_ERROR)
        end.link.close()
        self.world.cut(end.peer, reason.value, and_peer=False)

    def lost(self, item: Item) -> None:
        """It never arrives: something else was faster."""
        injection = item.injection
        if injection is not None and injection.outcome is None:
            self.world.outcomes.end(injection, SUPERSEDED)


def flipped(data: bytes, place: int) -> bytes:
    """One bit of `data` inverted: in the header or, half the time, in the payload."""
    low, high = 0, wire.HEADER_BYTES
    if place & 1 and len(data) > wire.HEADER_BYTES:
        low, high = wire.HEADER_BYTES, len(data)
    bit = low * 8 + place * (high - low) * 8 // PICKS
    spoiled = bytearray(data)
    spoiled[bit // 8] ^= 1 << bit % 8
    return bytes(spoiled)
