"""A peer that speaks the protocol and breaks one rule: an honest engine, one frame of which is bent on its way to a live daemon.

Between the numbered cases of `tests/protocol` (`Life`: which frame, how it is bent, which reason, what it costs) and the daemons
of `daemon_rig`. Session, link and proof are the package's own, so that nothing but the one rule is broken.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import numpy as np
from daemon_rig import WATCHDOG_S, Bed, free_port
from protocol.case import Life
from protocol.frames import Frame, Sent
from protocol.world import PROMPT, World

from pp1q_transport import wire
from pp1q_transport.client import Leader, Receiver, Role, Step, configure
from pp1q_transport.errors import Reason
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.session.terms import SessionTerms
from pp1q_transport.toy.sidecar import Shape
from pp1q_transport.wire import Header

SEED = 7
FRESH = itertools.count(1 << 20)
SHORT_US, LONG_US = 500_000, 20_000_000
# As the worlds of `tests/protocol` are by default, for what the cases' numbers mean.
WORLD = {"vocab": 64, "depth": 3, "support": 8, "slots": 4, "dense": True, "sparse": True, "draw_proof": True}


class Bender:
    """Stands between a session's outbox and the link (`engine.OutboxFilter`); bends one frame of the victim, once."""

    def __init__(self) -> None:
        self.outbox = Outbox()
        self.case: Life | None = None
        self.victim = 0
        self.seen = 0
        self.bent = False
        self.terms: Callable[[], SessionTerms | None] = lambda: None
        self._source: Outbox | None = None

    def attach(self, source: Outbox) -> Bender:
        """A new session's outbox."""
        self._source, self.outbox = source, Outbox()
        return self

    def arm(self, case: Life, victim: int) -> None:
        """From now on."""
        self.case, self.victim, self.seen, self.bent = case, victim, 0, False

    def pump(self, _now_ns: int) -> None:
        """Moves every whole frame on, as `protocol.frames.Tap` does between two sessions."""
        assert self._source is not None
        taken = bytearray()
        while (piece := self._source.front()) is not None:
            taken += memoryview(self._source.buffer)[piece.head_offset : piece.head_offset + piece.head_length]
            taken += memoryview(piece.memory)[piece.offset : piece.offset + piece.length]
            self._source.sent(piece.head_length + piece.length)
        at, header = 0, Header()
        while at < len(taken):
            assert header.decode(taken, at) == 0
            end = at + wire.HEADER_BYTES + header.payload_length
            for raw in self._passed(bytes(taken[at:end]), header):
                self.outbox.raw(raw, 0, len(raw))
            at = end

    def _passed(self, raw: bytes, header: Header) -> Sequence[bytes]:
        case = self.case
        if case is None or self.bent or (header.kind, header.request) != (case.on, self.victim):
            return [raw]
        self.seen += 1
        if self.seen != case.nth + 1:
            return [raw]
        self.bent = True
        terms = self.terms()
        assert terms is not None
        frame = Frame.decode(raw)
        world: Any = SimpleNamespace(terms=terms)
        world.frame = lambda side, kind, payload=b"", **values: World.frame(world, side, kind, payload, **values)
        out: Sequence[Sent] | None = case.bend(frame, world)
        sent = [frame] if out is None else list(out)
        return [one if isinstance(one, bytes) else one.encode(terms.leader_nonce) for one in sent]


def world_of(case: Life) -> dict[str, object]:
    """The sizes that a case wants."""
    return WORLD | dict(case.world)


def shape_of(world: Mapping[str, Any]) -> Shape:
    """The deployment for a world."""
    sizes = {"vocab_size": world["vocab"], "depth": world["depth"], "support": world["support"]}
    return Shape(seed=SEED, requests=world["slots"] // 2, ranks=1, **sizes)


def bed_for(world: Mapping[str, Any], judge: str) -> Bed:
    """A deployment of that world with one daemon in use, the judge, which listens; not started."""
    bed = Bed(shape_of(world))
    kinds = [name for name in ("dense", "sparse") if world[name]]
    for name in bed.daemons:
        more = f"max_slots = {world['slots']}\nmax_context_tokens = 128\nrepresentations = {json.dumps(kinds)}\n"
        more += f"draw_proof = {json.dumps(world['draw_proof'])}\n"
        bed.edit(name, lambda text, more=more: text.replace("[session]\n", "[session]\n" + more))
    bed.edit("receiver0", lambda text: text + "\n[breaker]\nenabled = false\n")
    if judge == "receiver":
        here = f'listen = "tcp://127.0.0.1:{free_port()}"'
        bed.edit("receiver0", lambda text: "\n".join(here if line.startswith("connect") else line for line in text.splitlines()))
    return bed


def endpoint_of(bed: Bed, name: str) -> str:
    """Where a daemon listens for its peer."""
    lines = bed.config(name).read_text(encoding="utf-8").splitlines()
    return next(json.loads(line.partition("=")[2]) for line in lines if line.startswith("listen"))


def options_of(bed: Bed, world: Mapping[str, Any]) -> dict[str, Any]:
    """What the daemon's HELLO says, for a peer that agrees with it."""
    models = f"toy-{SEED}-{bed.shape.vocab_size}"
    kinds = tuple(name for name in ("dense", "sparse") if world[name])
    return {
        "vocab_size": world["vocab"], "depth": world["depth"], "support": world["support"], "max_slots": world["slots"],
        "batch_requests": bed.shape.requests, "batches_in_flight": 2, "max_context_tokens": 128, "representations": kinds,
        "draw_proof": world["draw_proof"], "draft_identity": models + "-draft", "target_identity": models + "-target",
    }  # fmt: skip


def evil(bed: Bed, world: Mapping[str, Any], role: Role) -> tuple[Leader | Receiver, Bender]:
    """An end that connects to the bed's judge, and its bender."""
    bender = Bender()
    judge = "leader" if role is Role.RECEIVER else "receiver0"
    config = configure(role, connect=endpoint_of(bed, judge), **options_of(bed, world))
    config = replace(config, wrap_outbox=bender.attach)
    end: Leader | Receiver = Leader(config) if role is Role.LEADER else Receiver(config)
    bender.terms = lambda: end.engine.session.terms if end.engine.session is not None else None
    return end, bender


@dataclass
class Before:
    """What a daemon had counted before a case."""

    status: dict[str, Any]

    def reasons(self, now: dict[str, Any], reason: Reason) -> int:
        """How often more."""
        return now["reasons"].get(reason.value, 0) - self.status["reasons"].get(reason.value, 0)

    def ended(self, now: dict[str, Any]) -> int:
        """Sessions that ended since."""
        return now["sessions"][0]["ended"] - self.status["sessions"][0]["ended"]


def until(found: Callable[[], object], serve: Callable[[], object], what: str) -> None:
    """Serves until it is found: a watchdog."""
    stop = time.monotonic() + WATCHDOG_S
    while not found():
        assert time.monotonic() < stop, what
        serve()
        time.sleep(0.0005)


def put_rows(step: Step, vocab: int, positions: Iterable[int] | None = None) -> None:
    """Puts rows as `World.row` does (of `positions`, or all), with zeros and ties in them, as long as anybody wants them."""
    for position in step.positions if positions is None else positions:
        weights = np.array([(7 * i + 13 * position + i * i) % 11 for i in range(vocab)], np.float64)
        if step.put(position, weights=weights) is None:
            return


def budget_of(case: Life) -> int:
    """Long, unless the case is decided by its end."""
    return SHORT_US if Reason.TIMEOUT in (case.reason, case.outcome) else LONG_US


def step_options(case: Life, world: Mapping[str, Any]) -> dict[str, Any]:
    """Of `enqueue`, from those of `World.step`."""
    sparse = case.step.get("representation") == wire.SPARSE or not world["dense"]
    return {"support": case.step.get("support", world["support"]) if sparse else None, "budget_us": budget_of(case)}


__all__ = ["PROMPT"]
