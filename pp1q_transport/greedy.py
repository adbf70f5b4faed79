"""The greedy lane: a temperature-zero request verified from (value, global ID) winners, with no logits gathered and no q.

Between ranks that each hold the logits of a range of the vocabulary, and the accepted prefix plus bonus. Says which requests
may take it (off unless asked for, and closed to whatever it does not know), who wins, and what to commit; moves nothing between
ranks. What is not eligible takes the full path, with the reason counted. SPEC section 7.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from ._native import kernels
from .counters import Counters
from .dyadic import weights_from_logits
from .errors import InvalidQ, LocalMisuse, Reason


class Ineligible(str, Enum):
    """Why a request takes the full path. Closed: one of these is counted for every request that is not greedy's."""

    OFF = "off"  # nobody asked for the lane
    TEMPERATURE = "temperature"  # not 0, or not stated
    GRAMMAR = "grammar"  # a grammar or other structured output restricts the next token
    LOGPROBS = "logprobs"  # logprobs need the whole row
    PENALTIES = "penalties"  # repetition, presence or frequency: history changes logits
    BIAS = "bias"  # a logit bias, or a list of allowed tokens
    BAD_WORDS = "bad_words"
    SYNTHETIC_REJECTION = "synthetic_rejection"  # acceptance by a configured rate instead of the target's word
    DRAFT_LOGITS = "draft_logits"  # somebody wants the rows that this lane never makes
    MIN_TOKENS = "min_tokens"  # stop tokens are masked until enough was generated
    PROCESSORS = "processors"  # logits processors of the engine or of the user
    UNKNOWN = "unknown"  # an option that this version does not know
    MALFORMED = "malformed"  # an option of a type that it cannot have

    def __str__(self) -> str:
        return self.value


# Options by name: the reason they stand for, and the values that leave the largest logit alone.
_NEUTRAL: Final[Mapping[str, tuple[Ineligible, tuple[Any, ...]]]] = {
    "grammar": (Ineligible.GRAMMAR, (None, False)),
    "structured_outputs": (Ineligible.GRAMMAR, (None, False)),
    "guided_decoding": (Ineligible.GRAMMAR, (None, False)),
    "logprobs": (Ineligible.LOGPROBS, (None, False)),
    "prompt_logprobs": (Ineligible.LOGPROBS, (None, False)),
    "repetition_penalty": (Ineligible.PENALTIES, (None, 1)),
    "presence_penalty": (Ineligible.PENALTIES, (None, 0)),
    "frequency_penalty": (Ineligible.PENALTIES, (None, 0)),
    "logit_bias": (Ineligible.BIAS, (None, {}, [])),
    "allowed_token_ids": (Ineligible.BIAS, (None,)),
    "bad_words": (Ineligible.BAD_WORDS, (None, [], ())),
    "synthetic_rejection": (Ineligible.SYNTHETIC_REJECTION, (None, False)),
    "draft_logits": (Ineligible.DRAFT_LOGITS, (None, False)),
    "min_tokens": (Ineligible.MIN_TOKENS, (None, 0)),
    "logits_processors": (Ineligible.PROCESSORS, (None, [], ())),
}
# What cannot change which token is largest, whatever its value.
_HARMLESS: Final = frozenset({"seed", "top_p", "top_k", "min_p", "max_tokens", "stop", "stop_token_ids", "ignore_eos", "n"})


def why_not(options: Mapping[str, object]) -> Ineligible | None:
    """None if a request with these sampling options may take the lane, else the first reason against it.

    Fails closed: the temperature must be stated and be 0, every option must be known, and each must be at its neutral value
    (`True` is not 1 here, and a NaN is nothing).
    """
    temperature = options.get("temperature")
    if isinstance(temperature, bool) or not isinstance(temperature, int | float | np.floating | np.integer):
        return Ineligible.TEMPERATURE if temperature is None else Ineligible.MALFORMED
    if temperature != 0:
        return Ineligible.TEMPERATURE
    for name, value in options.items():
        if name == "temperature" or name in _HARMLESS:
            continue
        if name not in _NEUTRAL:
            return Ineligible.UNKNOWN
        reason, neutral = _NEUTRAL[name]
        if not any(_same(value, allowed) for allowed in neutral):
            return reason
    return None


def _same(value: object, neutral: object) -> bool:
    """Equal and of the same nature: 0 and 0.0 are, False and 0 are not, arrays never are."""
    if isinstance(value, bool) or isinstance(neutral, bool) or neutral is None:
        return value is neutral
    if isinstance(neutral, int):
        return isinstance(value, int | float | np.floating | np.integer) and bool(value == neutral)
    return type(value) is type(neutral) and bool(value == neutral)


class GreedyLane:
    """Whether the lane is on, and how often which reason kept a request out of it. One a target; no thread but the caller's."""

    def __init__(self, enabled: bool = False) -> None:
        self.enabled = enabled
        self.counters = Counters()

    def admits(self, options: Mapping[str, object]) -> bool:
        """Whether a request may take the lane; counts `greedy_eligible`, or `greedy_full_path` and `greedy_<reason>`."""
        reason = why_not(options) if self.enabled else Ineligible.OFF
        if reason is None:
            self.counters.add("greedy_eligible")
            return True
        self.counters.add("greedy_full_path")
        self.counters.add(f"greedy_{reason.value}")
        return False


# -- winners -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Winner:
    """The largest logit of a shard and its global ID: all that this rank sends. -inf with ID -1: the shard has none.

    A NaN or +inf is sent as it is, so that every rank refuses the row as the full path would.
    """

    value: float
    token: int


NO_WINNER: Final = Winner(-np.inf, -1)
Logits: TypeAlias = NDArray[np.float16] | NDArray[np.float32] | NDArray[np.float64]


def shard_winner(logits: Logits, first_id: int, valid: int | None = None) -> Winner:
    """The winner of one row of this rank's logits [n], whose first has global ID `first_id`; ties go to the lowest ID.

    Only the first `valid` logits exist (all by default): what pads a shard to its shape never wins, whatever lies there. float16,
    float32 or float64, compared as they are (every float16 and float32 is a float64). Raises `LocalMisuse` for what is no such
    row.
    """
    if not isinstance(logits, np.ndarray):
        raise LocalMisuse(f"logits must be a NumPy array, not {type(logits).__name__}")
    if logits.ndim != 1 or logits.dtype not in (np.float16, np.float32, np.float64):
        raise LocalMisuse(f"logits must be one-dimensional floats, not {logits.dtype} of shape {logits.shape}")
    count = len(logits) if valid is None else valid
    if not 0 <= count <= len(logits) or first_id < 0:
        raise LocalMisuse(f"{count} valid logits of {len(logits)} from ID {first_id} make no shard")
    if count == 0:
        return NO_WINNER
    index = int(logits[:count].argmax())  # the first of equals, and the first NaN if there is any
    value = float(logits[index])
    return NO_WINNER if value == -np.inf else Winner(value, first_id + index)


def merge(winners: Sequence[Winner]) -> int:
    """The token of one row, from the winners of all shards: the largest value, ties to the lowest global ID.

    Raises `InvalidQ(invalid_weights)` for a NaN, +inf or no logit above -inf, as `weights_from_logits` does for the whole row.
    """
    values = [winner.value for winner in winners]
    if not winners or any(not value < np.inf for value in values):
        raise InvalidQ(Reason.INVALID_WEIGHTS, "a logit is NaN or infinite, or there is no shard")
    highest = max(values)
    if highest == -np.inf:
        raise InvalidQ(Reason.INVALID_WEIGHTS, "the largest logit is -inf")
    return min(winner.token for winner in winners if winner.value == highest)


def full_path_token(logits: Logits) -> int:
    """What the lane must equal: the token that the full path gives at temperature 0 for a whole row [V]."""
    return int(weights_from_logits(logits, 0).argmax())


# -- the commit --------------------------------------------------------------------------------------------------------

Tokens: TypeAlias = NDArray[np.int32] | NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Committed:
    """`accepted` int32 [requests]: drafts accepted. `tokens` int64 [requests, depth + 1]: those drafts and the bonus, then -1."""

    accepted: NDArray[np.int32]
    tokens: NDArray[np.int64]

    def of(self, request: int) -> list[int]:
        """The tokens to commit for one request."""
        return [int(token) for token in self.tokens[request, : int(self.accepted[request]) + 1]]


def commit(drafts: Tokens, winners: Tokens, vocab_size: int, depths: NDArray[np.int32] | None = None) -> Committed:
    """Accepted prefix and bonus of every request of a batch, natively.

    `drafts` [requests, depth] are the proposed tokens, `winners` [requests, depth + 1] the target's own after the committed
    prefix and each draft; both int32 or int64, not necessarily the same. `depths` int32 [requests] says how many drafts count
    where that differs. Raises `LocalMisuse` for other shapes or types, and for a depth, draft or winner out of range (a -1 is
    never accepted).
    """
    for array in (drafts, winners, *(() if depths is None else (depths,))):
        if not isinstance(array, np.ndarray):
            raise LocalMisuse(f"drafts, winners and depths must be NumPy arrays, not {type(array).__name__}")
    if drafts.ndim != 2 or winners.shape != (drafts.shape[0], drafts.shape[1] + 1):
        raise LocalMisuse(f"drafts {list(drafts.shape)} and winners {list(winners.shape)}, not [n, depth] and [n, depth + 1]")
    if any(array.dtype not in (np.int32, np.int64) for array in (drafts, winners)):
        raise LocalMisuse(f"drafts and winners must be int32 or int64, not {drafts.dtype} and {winners.dtype}")
    requests, depth = drafts.shape
    if depths is not None and (depths.dtype != np.int32 or depths.shape != (requests,)):
        raise LocalMisuse(f"depths must be int32 [{requests}], not {depths.dtype} {list(depths.shape)}")
    made = Committed(np.empty(requests, np.int32), np.empty((requests, depth + 1), np.int64))
    own = None if depths is None else np.ascontiguousarray(depths)
    bad = kernels.greedy_commit(
        np.ascontiguousarray(drafts), np.ascontiguousarray(winners), own, depth, vocab_size, made.tokens.reshape(-1),
        made.accepted
    )
    if bad:
        raise LocalMisuse(f"request {bad - 1} of the batch has a depth, draft or winner out of range")
    return made
