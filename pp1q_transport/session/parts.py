"""What one rank may say in one exchange of a sharded computation: a closed list of purposes, each with a typed body and bounds.

Between the generators of `sharding`, which yield arrays by the name of their step, and `exchanges`, which puts the parts of all
ranks together. A part is judged by itself (`judge`) and beside the others (`judge_all`) before any rank computes with it. Knows
no frames, epochs or links. SPEC sections 6 and 7.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ..errors import LocalMisuse, PeerFault, Reason
from ..sharding.exchange import ENTRY, Exchange, Op, combine
from ..sharding.verifying import NOISE_OWNER
from ..wire import U32_MAX

PART_BYTES_MOST: Final = 16_384
ROWS_MOST: Final = 33  # depth 32 and the bonus
NODES_MOST: Final = 129  # of the summation tree, behind the largest weight
MASS: Final = 1 << 24
WEIGHT_MOST: Final = 1 << 53  # of a target's row as integers: about 2^51
_F8: Final = np.dtype("<f8")
_I8: Final = np.dtype("<i8")
_U8: Final = np.dtype("<u8")

Array: TypeAlias = NDArray[Any]


class RanksDiffer(PeerFault):
    """The parts of two ranks do not go together. Each may be right by itself, and nobody can say which rank is not."""


@dataclass(frozen=True, slots=True)
class Part:
    """One rank's part of one exchange. `sequence` counts the group's exchanges in an epoch, from 0; [`first_id`, `end_id`) is the
    rank's range of the vocabulary; `values` are what the purpose says."""

    rank: int
    sequence: int
    request: int
    generation: int
    round: int
    position: int
    purpose: int
    first_id: int
    end_id: int
    values: Array

    @property
    def place(self) -> tuple[int, int, int, int]:
        """What the exchange is about: the same on every rank."""
        return self.request, self.generation, self.round, self.position

    def record(self, epoch: int, payload_bytes: int) -> tuple[int, ...]:
        """The fields of the local record that carries it, EXCHANGE or EXCHANGED, beside its values' bytes."""
        return (
            self.request, epoch & U32_MAX, self.sequence, self.generation, self.round, self.position, self.purpose,
            self.first_id, self.end_id, self.rank, payload_bytes // 4,
        )  # fmt: skip


Judge: TypeAlias = Callable[[Part], Reason | None]
JudgeAll: TypeAlias = Callable[[Sequence[Part]], Reason | None]


@dataclass(frozen=True, slots=True)
class Purpose:
    """One kind of body: `least`..`most` elements of `dtype`, combined by `op`; `what` is its name in `sharding`."""

    code: int
    what: str
    op: Op
    dtype: np.dtype[Any]
    least: int
    most: int
    judge: Judge
    judge_all: JudgeAll | None = None


# -- one part by itself ------------------------------------------------------------------------------------------------


def _winners(part: Part) -> Reason | None:
    """(value, token) a row: a token of the rank's own range, or -1 beside -inf. NaN and +inf travel: every rank refuses them."""
    values, tokens = part.values["value"], part.values["token"]
    none = tokens == -1
    inside = (tokens >= part.first_id) & (tokens < part.end_id)
    return None if ((none & (values == -np.inf)) | (inside & (values != -np.inf))).all() else Reason.ID_RANGE


def _candidates(part: Part) -> Reason | None:
    """(weight, token) by ascending token, all of the own range; or one (NaN, -1): the rank's weights are none."""
    values, tokens = part.values["value"], part.values["token"]
    if len(tokens) == 1 and tokens[0] == -1:
        return None if np.isnan(values[0]) else Reason.ID_RANGE
    if not ((tokens >= part.first_id) & (tokens < part.end_id)).all():
        return Reason.ID_RANGE
    if (np.diff(tokens) <= 0).any():
        return Reason.ID_DUPLICATE if (np.diff(tokens) == 0).any() else Reason.ID_ORDER
    return _finite(values)


def _finite(values: Array) -> Reason | None:
    if not np.isfinite(values).all():
        return Reason.NONFINITE
    return Reason.NEGATIVE if (values < 0).any() else None


def _highest(part: Part) -> Reason | None:
    return Reason.NONFINITE if np.isnan(part.values).any() else None  # infinities are refused by every rank alike


def _nodes(part: Part) -> Reason | None:
    """Sums that may be infinite (every rank refuses that alike), never NaN or negative."""
    if np.isnan(part.values).any():
        return Reason.NONFINITE
    return Reason.NEGATIVE if (part.values < 0).any() else None


def _counted(part: Part) -> Reason | None:
    """Counts of the rank's own tokens; the sum of floors is the first of two."""
    values = part.values
    if (values < 0).any():
        return Reason.NEGATIVE
    most = max(MASS, part.end_id - part.first_id)
    return Reason.MASS if (values > most).any() or int(values.sum()) > MASS + part.end_id else None


def _masses(part: Part) -> Reason | None:
    return Reason.MASS if int(part.values[0]) > MASS else None


def _told(part: Part) -> Reason | None:
    token = int(part.values[0])
    return None if token == 0 or part.first_id <= token < part.end_id else Reason.ID_RANGE


def _noise(part: Part, noise: int) -> Reason | None:
    return Reason.RANK_DISAGREE if part.rank != NOISE_OWNER and noise else None


def _facts(part: Part) -> Reason | None:
    """The rank's mass, noise; of the drafted token weight, count, code of a reason."""
    mass, noise, weight, count, code = part.values.tolist()
    if code > len(Reason):
        return Reason.RESERVED_BITS
    return _noise(part, noise) or (Reason.MASS if mass > WEIGHT_MOST or weight > mass or count > MASS else None)


def _residual(part: Part) -> Reason | None:
    """Noise, code of a reason, counts, and the mass in two words."""
    noise, code, counts, high, _ = part.values.tolist()
    if code > len(Reason):
        return Reason.RESERVED_BITS
    return _noise(part, noise) or (Reason.MASS if counts > MASS or high > WEIGHT_MOST else None)


# -- the parts of all ranks --------------------------------------------------------------------------------------------


def _same_count(parts: Sequence[Part]) -> Reason | None:
    return Reason.LENGTH_BOUNDS if len({len(part.values) for part in parts}) > 1 else None


def _one_tells(parts: Sequence[Part]) -> Reason | None:
    """One rank alone knows the token; the others add nothing."""
    return Reason.RANK_DISAGREE if sum(bool(part.values[0]) for part in parts) > 1 else None


def _one_owns(parts: Sequence[Part]) -> Reason | None:
    """Weight and count of a token are said by the rank that holds it."""
    return Reason.RANK_DISAGREE if sum(bool(part.values[2:].any()) for part in parts) > 1 else None


def _purposes() -> dict[int, Purpose]:
    gather, total, highest = Op.GATHER, Op.SUM, Op.MAX
    shifts = range(56, -8, -8)
    table = [
        Purpose(1, "winners", gather, ENTRY, 1, ROWS_MOST, _winners, _same_count),
        Purpose(2, "largest score", highest, _F8, 1, 1, _highest),
        Purpose(3, "largest score of each shard", gather, _F8, 1, 1, _highest),
        Purpose(4, "tree nodes", gather, _F8, 0, NODES_MOST, _nodes),
        Purpose(5, "floors and positive weights", total, _I8, 2, 2, _counted),
        *(Purpose(6 + i, f"remainders, bits {shift} up", total, _I8, 256, 256, _counted) for i, shift in enumerate(shifts)),
        Purpose(14, "ties", gather, _I8, 1, 1, _counted),
        Purpose(15, "masses", gather, _U8, 1, 1, _masses),
        Purpose(16, "candidates of the support", gather, ENTRY, 0, PART_BYTES_MOST // ENTRY.itemsize, _candidates),
        Purpose(17, "token", total, _I8, 1, 1, _told, _one_tells),
        Purpose(18, "masses, noise and the drafted token", gather, _U8, 5, 5, _facts, _one_owns),
        Purpose(19, "noise and residual masses", gather, _U8, 5, 5, _residual),
    ]
    return {purpose.code: purpose for purpose in table}


PURPOSES: Final = _purposes()
BY_WHAT: Final = {purpose.what: purpose for purpose in PURPOSES.values()}


def purpose_of(exchange: Exchange) -> Purpose:
    """The purpose of a step of `sharding`. Raises `LocalMisuse` for a step, type or length that no frame carries."""
    purpose = BY_WHAT.get(exchange.what)
    if purpose is None or purpose.op is not exchange.op:
        raise LocalMisuse(f"no frame carries {exchange.op.value} of {exchange.what!r}")
    value = exchange.value
    if value.ndim != 1 or value.dtype != purpose.dtype or not purpose.least <= len(value) <= purpose.most:
        raise LocalMisuse(f"{exchange.what}: {len(value)} elements of {value.dtype}, not {purpose.least}..{purpose.most}")
    return purpose


def values_of(purpose: int, payload: bytes, entries: int) -> Array:
    """The typed elements of a payload. Raises `PeerFault`: `semantic_mismatch` for a purpose that this version does not know,
    `length_bounds` for what is not `entries` elements of it."""
    known = PURPOSES.get(purpose)
    if known is None:
        raise PeerFault(Reason.SEMANTIC_MISMATCH, f"an exchange of purpose {purpose}")
    if not known.least <= entries <= known.most or len(payload) != entries * known.dtype.itemsize:
        raise PeerFault(Reason.LENGTH_BOUNDS, f"{known.what}: {entries} elements in {len(payload)} bytes")
    return np.frombuffer(payload, known.dtype)


def values_in(purpose: int, payload: bytes) -> Array:
    """`values_of` all elements that the payload has room for: records count bytes, not elements."""
    known = PURPOSES.get(purpose)
    return values_of(purpose, payload, len(payload) // known.dtype.itemsize if known is not None else 0)


def judge(part: Part, vocab_size: int) -> None:
    """What a part says by itself. Raises `PeerFault`."""
    purpose = PURPOSES[part.purpose]
    reason = Reason.ID_RANGE if not part.first_id <= part.end_id <= vocab_size else purpose.judge(part)
    if reason is not None:
        raise PeerFault(reason, f"rank {part.rank} in {purpose.what}")


def judge_all(parts: Sequence[Part], vocab_size: int) -> None:
    """Whether the parts of all ranks, in order, make one exchange: ranges tile the vocabulary, and what the purpose wants.
    Raises `RanksDiffer`."""
    edge = 0
    purpose = PURPOSES[parts[0].purpose]
    for part in parts:
        if part.first_id != edge:
            raise RanksDiffer(Reason.ID_RANGE, f"the range of rank {part.rank} begins at {part.first_id}, not {edge}")
        edge = part.end_id
    if edge != vocab_size:
        raise RanksDiffer(Reason.ID_RANGE, f"the ranges of all ranks end at {edge}, not {vocab_size}")
    reason = purpose.judge_all(parts) if purpose.judge_all is not None else None
    if reason is not None:
        raise RanksDiffer(reason, f"all ranks in {purpose.what}")


def answer_of(parts: Sequence[Part]) -> list[Array]:
    """What the collective gives, from the parts of all ranks in order: the same bits on every rank."""
    purpose = PURPOSES[parts[0].purpose]
    return combine([Exchange(purpose.op, purpose.what, part.values) for part in parts])
