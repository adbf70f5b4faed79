"""A fault injector in flight: takes a leader's frames and spoils some proposals, by noise that knows nothing of the tokens.

Between a session's outbox and a link's (of any kind). At most one fault a proposal, decided when its first frame passes, from a
seed alone; what it did to which (slot, generation) is recorded, so that each fault can be matched with one outcome.
"""

from __future__ import annotations

import heapq
import random
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Final

from .. import wire
from ..errors import ConfigError
from ..session.outbox import Outbox
from ..wire import Header

if TYPE_CHECKING:
    from ..session.outbox import Piece

HEADER_SHARE: Final = 0.25  # of the corruptions: these cost the link, the others one proposal


class FaultKind(str, Enum):
    """What may befall a proposal on its way."""

    CORRUPT_PAYLOAD = "corrupt_payload"
    CORRUPT_HEADER = "corrupt_header"
    LATE = "late"
    DROP = "drop"


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probability of each kind per proposal; `corrupt` covers payloads and headers."""

    corrupt: float = 0.0
    late: float = 0.0
    drop: float = 0.0

    @classmethod
    def parse(cls, text: str) -> FaultRates:
        """From "corrupt=0.02,late=0.02,drop=0.02"; raises `ConfigError` naming what is wrong."""
        rates: dict[str, float] = {}
        for part in filter(None, text.split(",")):
            name, _, value = part.partition("=")
            if name not in ("corrupt", "late", "drop") or name in rates:
                raise ConfigError(f"faults: {name!r} is none of corrupt, late, drop (each once)")
            try:
                rates[name] = float(value)
            except ValueError:
                raise ConfigError(f"faults: {value!r} is no number") from None
            if not 0.0 <= rates[name] <= 1.0:
                raise ConfigError(f"faults: {name}={value} is outside 0..1")
        if sum(rates.values()) > 1.0:
            raise ConfigError("faults: the rates sum to more than 1")
        return cls(**rates)

    @property
    def any(self) -> bool:
        """Whether any fault can happen."""
        return self.corrupt + self.late + self.drop > 0


@dataclass(frozen=True, slots=True)
class Injected:
    """One fault: what, to which proposal, at which of its frames."""

    kind: FaultKind
    session: int
    slot: int
    slot_generation: int
    frame: int


class _Plan:
    def __init__(self, kind: FaultKind | None, frame: int, place: float) -> None:
        self.kind = kind
        self.frame = frame
        self.place = place
        self.seen = 0


class FaultInjector:
    """Passes frames from `source` to its own `outbox`, spoiling proposals at `rates`. `late_ns` is how long a late one is
    held: longer than its budget, or it is not late. One injector serves all sessions of a process (`attach`)."""

    def __init__(self, rates: FaultRates, seed: int, late_ns: int) -> None:
        self.outbox = Outbox()
        self.injected: list[Injected] = []
        self._rates = rates
        self._random = random.Random(seed)
        self._late_ns = late_ns
        self._source: Outbox | None = None
        self._plans: dict[tuple[int, int, int], _Plan] = {}
        self._held: list[tuple[int, int, bytes]] = []
        self._holding: dict[tuple[int, int, int], int] = {}
        self._order = 0
        self._header = Header()

    def attach(self, source: Outbox) -> FaultInjector:
        """Starts on a new session's outbox; what was held back belonged to a link that is gone."""
        self._source = source
        self.outbox = Outbox()
        self._plans.clear()
        self._held.clear()
        self._holding.clear()
        return self

    def pump(self, now_ns: int) -> int | None:
        """Moves every frame that may move at `now_ns`; returns when the next held one is due (ns), or None."""
        assert self._source is not None
        while (piece := self._source.front()) is not None:
            data = _bytes_of(self._source, piece)
            self._source.sent(len(data))
            at = 0
            while at < len(data):
                self._header.decode(data, at)
                end = at + wire.HEADER_BYTES + self._header.payload_length
                self._frame(data[at:end], now_ns)
                at = end
        while self._held and self._held[0][0] <= now_ns:
            frame = heapq.heappop(self._held)[2]
            self.outbox.raw(frame, 0, len(frame))
        return self._held[0][0] if self._held else None

    def _frame(self, frame: bytes, now_ns: int) -> None:
        header = self._header
        if header.kind not in (wire.REPLY, wire.COMPLETION):
            self.outbox.raw(frame, 0, len(frame))
            return
        key = (header.session, header.slot, header.slot_generation)
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = self._make_plan(header.depth + 1)
            self._plans.pop((header.session, header.slot, header.slot_generation - 1), None)
        index = plan.seen
        plan.seen += 1
        if plan.kind is FaultKind.LATE and index >= plan.frame:
            self._hold(key, frame, index, now_ns)
        elif plan.kind is None or index != plan.frame:
            self.outbox.raw(frame, 0, len(frame))
        else:
            self._spoil(plan.kind, plan.place, key, frame, index)

    def _make_plan(self, frames: int) -> _Plan:
        """Four draws a proposal, whatever comes of them: a row's size follows from its q, so what is drawn may not."""
        u, share, place = (self._random.random() for _ in range(3))
        frame = self._random.randrange(frames)
        rates = self._rates
        if u < rates.corrupt:
            if share < HEADER_SHARE:
                return _Plan(FaultKind.CORRUPT_HEADER, frame, place)
            # Only a REPLY has a payload: the last frame of a proposal is its COMPLETION.
            return _Plan(FaultKind.CORRUPT_PAYLOAD, frame % (frames - 1), place)
        if u < rates.corrupt + rates.late:
            return _Plan(FaultKind.LATE, frame, place)
        if u < rates.corrupt + rates.late + rates.drop:
            return _Plan(FaultKind.DROP, frame, place)
        return _Plan(None, 0, place)

    def _hold(self, key: tuple[int, int, int], frame: bytes, index: int, now_ns: int) -> None:
        """A late proposal keeps its order: all frames from the first held one on wait together."""
        if key not in self._holding:
            self._holding[key] = now_ns + self._late_ns
            self.injected.append(Injected(FaultKind.LATE, *key, index))
        self._order += 1
        heapq.heappush(self._held, (self._holding[key], self._order, frame))

    def _spoil(self, kind: FaultKind, place: float, key: tuple[int, int, int], frame: bytes, index: int) -> None:
        """`place` (0..1) is where in the header or payload the flipped bit lies."""
        self.injected.append(Injected(kind, *key, index))
        if kind is FaultKind.DROP:
            return
        low, high = (0, wire.HEADER_BYTES) if kind is FaultKind.CORRUPT_HEADER else (wire.HEADER_BYTES, len(frame))
        bit = low * 8 + int(place * (high - low) * 8)
        spoiled = bytearray(frame)
        spoiled[bit // 8] ^= 1 << bit % 8
        self.outbox.raw(spoiled, 0, len(spoiled))


def _bytes_of(outbox: Outbox, piece: Piece) -> bytes:
    head = memoryview(outbox.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
    return bytes(head) + bytes(memoryview(piece.memory)[piece.offset : piece.offset + piece.length])
