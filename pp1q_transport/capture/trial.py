"""Trials: a mutated stream before a real receiver session and before the oracle, and whether both let through the same.

Between `situations`, `mutation` and `oracle`, and `pp1q replay --mutate`. The session is the transport's own, behind its
assembler; only its slots are set back between trials. SPEC section 4.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..counters import Counters
from ..errors import Reason
from ..session import slots as st
from . import byspec, mutation, priming
from .link_replay import Feed
from .mutation import Mutator
from .oracle import Oracle

if TYPE_CHECKING:
    from ..session.slots import Slot
    from .oracle import Asked, Proposal
    from .situations import Answered, SessionOf

NOW_NS: Final = 1_000_000_000
BUDGET_NS: Final = 1_000_000_000
EXAMPLES: Final = 8
OTHERS: Final = 64
CHUNKED: Final = 0.0625  # of the trials get their stream in pieces of any size


@dataclass(slots=True)
class Tally:
    """What became of the mutated frames. `accepted` proposals became ready with just the original's rows, `allowed` with others
    that the oracle allows; `undetected` trials let something through that it does not; `stricter` ones refused what it allows."""

    frames: int = 0
    mutated: int = 0
    accepted: int = 0
    allowed: int = 0
    undetected: int = 0
    stricter: int = 0
    by_mutation: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: list[str] = field(default_factory=list)

    @property
    def reasons(self) -> dict[str, int]:
        """Refusals by reason over all mutations."""
        total: dict[str, int] = {}
        for reasons in self.by_mutation.values():
            for name, count in reasons.items():
                total[name] = total.get(name, 0) + count
        return total


class _Bench:
    """One session of the capture: a real receiver, the oracle, and the situations to choose from."""

    def __init__(self, session: SessionOf, others: list[bytes]) -> None:
        self.state = session.state
        self.nonce = session.terms.leader_nonce
        self.oracle = Oracle(session.terms)
        self.groups = session.together()
        self.others = others
        # Nothing of the live slots: only what a trial grants is there.
        self.state.slots = []
        self.session = priming.fresh_receiver(self.state, Counters(), NOW_NS)

    def grant(self, asked: Asked) -> Slot:
        """The slot as the STEP left it."""
        slot = self.session.table.slots[asked.slot]
        slot.state = st.FREE
        slot.generation = asked.generation - 1
        self.session.table.adopt(asked.slot, asked.generation)
        slot.request = asked.request
        slot.request_generation = asked.request_generation
        slot.round = asked.round
        slot.anchor = asked.anchor
        slot.depth = asked.depth
        slot.seed = asked.seed
        slot.representation = asked.representation
        slot.support = asked.support
        slot.context = asked.context
        priming.grant(self.session, slot, NOW_NS + BUDGET_NS)
        return slot

    def clear(self, slots: list[Slot]) -> None:
        """Nothing was ever granted."""
        for slot in slots:
            self.session.watchdog.disarm(slot.index)
            slot.state = st.FREE
            slot.generation = 0
            slot.decided = False
        self.session.broken = 0


class Trials:
    """Trials over the sessions of a capture. The same seed gives the same ones."""

    def __init__(self, sessions: list[SessionOf], kind: str, seed: int, resign: bool) -> None:
        self.tally = Tally()
        self._noise = random.Random(seed)
        self._kinds = mutation.KINDS if kind == "all" else (kind,)
        self._mutator = Mutator(self._noise, resign)
        self._counters = {name: Counters() for name in self._kinds}
        everything = [answered for session in sessions for answered in session.whole]
        others = [frame for answered in self._noise.sample(everything, min(OTHERS, len(everything))) for frame in answered.frames]
        self._benches = [_Bench(session, others) for session in sessions]
        self._weights = [len(bench.groups) for bench in self._benches]

    def run(self, count: int) -> None:
        """`count` mutated frames."""
        for _ in range(count):
            (bench,) = self._noise.choices(self._benches, self._weights)
            self._try(bench, self._noise.choice(bench.groups), self._noise.choice(self._kinds))
        for name, counters in self._counters.items():
            self.tally.by_mutation[name] = dict(counters.reasons)

    def _try(self, bench: _Bench, group: list[Answered], kind: str) -> None:
        tally, session = self.tally, bench.session
        honest = _interleaved(group) if self._noise.random() < 0.5 else [frame for one in group for frame in one.frames]
        mutated = self._mutator.mutate(kind, honest, bench.others, bench.nonce)
        stream = b"".join(mutated.frames)
        counters = session.counters = self._counters[kind]
        slots = [bench.grant(one.asked) for one in group]
        feed = Feed(session)
        code = self._feed(feed, stream)
        if code:
            counters.refuse(Reason.from_code(code))
        allowed = bench.oracle.judge([one.asked for one in group], stream)
        self._compare(bench, group, slots, allowed, f"{kind}, the link {'ended' if code else 'went on'}")
        feed.settle()
        if not code:
            session.tick(NOW_NS + 2 * BUDGET_NS)
            feed.settle()
        bench.clear(slots)
        tally.mutated += 1
        tally.frames += feed.assembler.frames

    def _feed(self, feed: Feed, stream: bytes) -> int:
        if self._noise.random() >= CHUNKED:
            return feed.put(stream, NOW_NS)
        at, largest = 0, self._noise.choice((61, 129, 700))
        while at < len(stream):
            size = self._noise.randint(1, max(largest, len(stream) >> 5))
            code = feed.put(stream[at : at + size], NOW_NS)
            if code:
                return code
            feed.settle()
            at += size
        return 0

    def _compare(self, bench: _Bench, group: list[Answered], slots: list[Slot], allowed: dict[int, Proposal], how: str) -> None:
        tally = self.tally
        wrong = []
        for one, slot in zip(group, slots, strict=True):
            proposal = allowed[slot.index]
            ready = slot.state == st.READY
            if ready and not proposal.ready:
                wrong.append(f"slot {slot.index} is ready")
            elif proposal.dead and slot.state == st.LANDING and how.endswith("went on"):
                wrong.append(f"slot {slot.index} was not given up")
            if slot.state in (st.READY, st.LANDING):
                wrong += _rows_not_allowed(bench, slot, proposal)
            if ready and not wrong:
                same = all(row.payload in _payloads(one) for row in proposal.rows.values())
                tally.accepted += same
                tally.allowed += not same
            tally.stricter += proposal.ready and not ready
        if wrong:
            tally.undetected += 1
            if len(tally.examples) < EXAMPLES:
                tally.examples.append(f"mutated frame {tally.mutated} ({how}): {'; '.join(wrong)}")


def _payloads(one: Answered) -> set[bytes]:
    return {frame[byspec.HEADER :] for frame in one.frames}


def _rows_not_allowed(bench: _Bench, slot: Slot, proposal: Proposal) -> list[str]:
    """Each row that the session took and that is not, to the byte, one that it may have taken."""
    wrong = []
    memory = bench.session.memory
    for row in range(slot.depth):
        if not slot.rows_done >> row & 1:
            continue
        position = slot.anchor + 1 + row
        right = proposal.rows.get(position)
        if right is None:
            wrong.append(f"slot {slot.index} took position {position}")
            continue
        at, size = slot.rows_at + row * slot.row_bytes, len(right.payload)
        meta = slot.meta_at + 4 * row
        token = int.from_bytes(memory[meta : meta + 4], "little")
        entries = int.from_bytes(memory[meta + 4 * slot.depth : meta + 4 * slot.depth + 4], "little")
        if bytes(memory[at : at + size]) != right.payload or (token, entries) != (right.token, right.entries):
            wrong.append(f"slot {slot.index} holds another row at position {position}")
    return wrong


def _interleaved(group: list[Answered]) -> list[bytes]:
    """The frames of several proposals by turns."""
    longest = max(len(one.frames) for one in group)
    return [one.frames[index] for index in range(longest) for one in group if index < len(one.frames)]
