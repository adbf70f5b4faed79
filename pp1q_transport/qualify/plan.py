"""What one run of the link benchmark is: its options, its stages in order, and which row every position gets.

Between the command line (or the peer's "options" message) and the two ends, `leading` and `measuring`, which must walk the
same stages. Plain values that check themselves; opens nothing and measures nothing. SPEC section 9.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from enum import Enum
from pathlib import Path
from typing import Final

from .. import wire
from ..errors import ConfigError
from ..rng import Domain, draw64
from .floor_plan import FloorPlan, FloorTest

REPETITIONS: Final = 5
BATCHES_IN_FLIGHT: Final = 2
PROMPT: Final = (1, 0)
BUDGET_US: Final = 10_000_000
ROW_GAP_NS: Final = 100_000  # SPEC 9: the tail is measured with rows 100 us apart
TAIL_ROUNDS: Final = 2_000  # at most: each takes `depth` gaps
GOODPUT_WARMUP: Final = 10  # batches before each measured block, at most
MAX_BATCH_BYTES: Final = (1 << 31) - 1
MAX_CONTEXT_TOKENS: Final = 1 << 20
REQUEST_NUMBERS: Final = (1 << 20) - 1

_INTEGERS: Final[dict[str, tuple[int, int]]] = {
    "support": (1, 1 << 16),
    "requests": (1, 512),
    "depth": (1, 32),
    "rounds": (1, 100_000),
    "warmup": (0, 10_000),
    "vocab": (2, 1 << 24),
    "seed": (0, (1 << 64) - 1),
}
_CHOICES: Final[dict[str, tuple[str, ...]]] = {"representation": ("dense", "sparse"), "idle": ("spin", "block")}


class StageKind(str, Enum):
    """What happens in a stage. The first three are the transport's own measurements."""

    LATENCY = "latency"
    TAIL = "tail"
    GOODPUT = "goodput"
    OPEN_FLOORS = "open floors"
    SOCKET_RTT = "socket round trip"
    ZMQ_RTT = "ZeroMQ round trip"
    MEMCPY = "memcpy"
    SOCKET_GBPS = "socket goodput"
    ZMQ_GBPS = "ZeroMQ goodput"


FLOOR_TESTS: Final[dict[StageKind, FloorTest]] = {
    StageKind.SOCKET_RTT: FloorTest.SOCKET_RTT,
    StageKind.ZMQ_RTT: FloorTest.ZMQ_RTT,
    StageKind.SOCKET_GBPS: FloorTest.SOCKET_GBPS,
    StageKind.ZMQ_GBPS: FloorTest.ZMQ_GBPS,
}


@dataclass(frozen=True, slots=True)
class Stage:
    """One block of one kind. `warmup` and `count` are STEPs (LATENCY, TAIL), batches (GOODPUT) or messages (floors).

    `number` is the block's own among the transport's: it makes request IDs that no other block uses. A stage that is not
    `measured` only brings both ends to their steady state.
    """

    kind: StageKind
    number: int
    warmup: int
    count: int
    measured: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The options of a run, checked. `support` counts for sparse rows only. Raises `ConfigError` naming the option."""

    representation: str = "dense"
    support: int = 32
    requests: int = 4
    depth: int = 5
    rounds: int = 500
    warmup: int = 20
    vocab: int = 129280
    seed: int = 1
    idle: str = "spin"
    floors: bool = True

    def __post_init__(self) -> None:
        for name, (low, high) in _INTEGERS.items():
            value = getattr(self, name)
            if type(value) is not int or not low <= value <= high:
                raise ConfigError(f"{name} must be an integer within {low}..{high}, not {_quote(value)}")
        for name, allowed in _CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ConfigError(f"{name} must be {' or '.join(allowed)}, not {_quote(getattr(self, name))}")
        if type(self.floors) is not bool:
            raise ConfigError(f"floors must be true or false, not {_quote(self.floors)}")
        if self.support > self.vocab:
            raise ConfigError(f"support must be at most the vocabulary of {self.vocab}, not {self.support}")
        if self.batch_bytes * BATCHES_IN_FLIGHT > MAX_BATCH_BYTES:
            raise ConfigError(f"requests: a batch of {self.batch_bytes} bytes is too large; lower requests, depth or vocab")

    @classmethod
    def from_map(cls, body: object) -> Plan:
        """The plan in a peer's message: exactly our keys, each of its type. Raises `ConfigError` naming the first fault."""
        names = [item.name for item in fields(cls)]
        if not isinstance(body, Mapping):
            raise ConfigError("options must be a map")
        odd = sorted(_quote(name) for name in set(body) ^ set(names))
        if odd:
            raise ConfigError(f"options: {odd[0]} is {'missing' if odd[0] in map(_quote, names) else 'unknown'}")
        return cls(**{name: body[name] for name in names})

    def to_map(self) -> dict[str, object]:
        """As it travels."""
        return {item.name: getattr(self, item.name) for item in fields(self)}

    @property
    def sparse(self) -> bool:
        """Whether rows are sparse."""
        return self.representation == "sparse"

    @property
    def representation_code(self) -> int:
        """The wire's number of the representation."""
        return wire.SPARSE if self.sparse else wire.DENSE

    @property
    def policy(self) -> int:
        """The support policy of every STEP: k, or 0 for the whole vocabulary."""
        return self.support if self.sparse else 0

    @property
    def row_bytes(self) -> int:
        """Payload of a full row."""
        return 8 * self.support if self.sparse else (4 * self.vocab + 63) // 64 * 64

    @property
    def request_bytes(self) -> int:
        """Payload of one proposal whose rows are full."""
        return self.depth * self.row_bytes

    @property
    def batch_bytes(self) -> int:
        """Payload of a batch."""
        return self.requests * self.request_bytes

    @property
    def slots(self) -> int:
        """Slots, and groups of `depth` source rows: two batches' worth."""
        return BATCHES_IN_FLIGHT * self.requests

    def hello_options(self) -> dict[str, object]:
        """What the sizes of HELLO follow from."""
        longest = max(stage.warmup + stage.count for stage in stages(self))
        return {
            "vocab_size": self.vocab,
            "depth": self.depth,
            "support": min(self.support, self.vocab),
            "max_slots": self.slots,
            "batch_requests": self.requests,
            "batches_in_flight": BATCHES_IN_FLIGHT,
            "representations": (self.representation,),
            "max_context_tokens": max(1024, len(PROMPT) + (longest + 1) * (self.depth + 1)),
            **IDENTITIES,
        }


IDENTITIES: Final[dict[str, object]] = {"draft_identity": "pp1q-send", "target_identity": "pp1q-recv"}


def _quote(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 40 and text.isprintable() else f"{text[:37].encode('ascii', 'replace').decode()}..."


def _share(total: int, repetition: int, repetitions: int) -> int:
    return total // repetitions + (repetition < total % repetitions)


def stages(plan: Plan) -> list[Stage]:
    """Every stage of a run in order, the same at both ends: the transport's and the floors' take turns (A B C A B C)."""
    done: list[Stage] = []
    settle = min(plan.warmup, GOODPUT_WARMUP)

    def add(kind: StageKind, warmup: int, count: int, measured: bool = True) -> None:
        done.append(Stage(kind, len(done), warmup, count, measured))

    add(StageKind.GOODPUT, 0, max(2, settle), False)
    add(StageKind.LATENCY, 0, max(1, plan.warmup), False)
    if plan.floors:
        add(StageKind.OPEN_FLOORS, 0, 0, False)
    repetitions = min(REPETITIONS, plan.rounds)
    for repetition in range(repetitions):
        rounds = _share(plan.rounds, repetition, repetitions)
        tails = min(rounds, TAIL_ROUNDS // REPETITIONS)
        add(StageKind.LATENCY, plan.warmup, rounds)
        if plan.floors:
            add(StageKind.SOCKET_RTT, plan.warmup, rounds)
            add(StageKind.ZMQ_RTT, plan.warmup, rounds)
        add(StageKind.TAIL, plan.warmup, tails)
        add(StageKind.GOODPUT, settle, rounds)
        if plan.floors:
            add(StageKind.SOCKET_GBPS, settle, rounds)
            add(StageKind.MEMCPY, 0, 1)
            add(StageKind.ZMQ_GBPS, settle, rounds)
    return done


def transport_stage(stage: Stage) -> bool:
    """Whether STEPs and rows travel in it."""
    return stage.kind in (StageKind.LATENCY, StageKind.TAIL, StageKind.GOODPUT)


def stage_steps(plan: Plan, stage: Stage) -> tuple[int, int]:
    """(warm-up STEPs, all STEPs) of a transport stage."""
    each = plan.requests if stage.kind is StageKind.GOODPUT else 1
    return stage.warmup * each, (stage.warmup + stage.count) * each


def request_base(session: int) -> int:
    """What is added to a local number to make a request ID: no two runs of one receiver may share IDs, whose noise is spent."""
    return session & ~REQUEST_NUMBERS


def stage_requests(plan: Plan, stage: Stage) -> Iterator[tuple[int, int, int, int]]:
    """(index, local number, seed, rounds) of every request that a transport stage opens; batch i uses set i modulo 2."""
    total = stage.warmup + stage.count
    sets = BATCHES_IN_FLIGHT if stage.kind is StageKind.GOODPUT else 1
    each = plan.requests if stage.kind is StageKind.GOODPUT else 1
    for index in range(sets * each):
        number = 1 + stage.number * plan.slots + index
        rounds = total // sets + (index // each < total % sets)
        yield index, number, draw64(plan.seed, Domain.PROPOSAL, 0, 0, number), rounds


def first_row(plan: Plan, index: int, round: int) -> int:
    """The source row of the first position of a request's round; the others follow it. Goes round all source rows."""
    return (index + round) % plan.slots * plan.depth


def floor_plans(plan: Plan, stage: Stage) -> list[FloorPlan]:
    """The floor test of a stage, its warm-up first: the same sizes, window and areas as the transport's."""
    test = FLOOR_TESTS[stage.kind]
    counts = [count for count in (stage.warmup, stage.count) if count]
    if stage.kind in (StageKind.SOCKET_RTT, StageKind.ZMQ_RTT):
        size = plan.request_bytes + (plan.depth + 1) * wire.HEADER_BYTES  # five REPLYs and the COMPLETION
        return [FloorPlan(test, size, n, request_bytes=wire.HEADER_BYTES, slots=plan.slots) for n in counts]
    return [FloorPlan(test, plan.batch_bytes, n, window=BATCHES_IN_FLIGHT, slots=BATCHES_IN_FLIGHT) for n in counts]


def boot_id() -> str:
    """Names this boot of this host (empty where the kernel does not say): equal at both ends, they share a clock."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return ""
