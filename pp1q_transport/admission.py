"""Depth admission: who may decide how deep a proposal goes, and what the decision may depend on.

Between a policy and whoever draws. An exact verifier cannot undo a selection of drafts by what they are, so a policy is asked
before position i is drawn and is shown committed history, load measured before the round, prior rounds and x_1..x_(i-1), never
more; a stop is final. Draws and measures nothing. SPEC section 6; docs/verification.md has the counterexample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final, Protocol

from .errors import LocalMisuse

MAX_DEPTH: Final = 1 << 16


@dataclass(frozen=True, slots=True)
class PriorRound:
    """One earlier round of the request: how many drafts were made, and how many accepted; `discarded` if it was void."""

    depth: int
    accepted_drafts: int
    discarded: bool = False


@dataclass(frozen=True, slots=True)
class History:
    """What is fixed before a round's first draw. `load` holds what was measured before it, by name."""

    committed: tuple[int, ...]
    prior_rounds: tuple[PriorRound, ...]
    load: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class View:
    """All that a policy sees when it is asked about the next position: the history, and the tokens drafted so far."""

    history: History
    drafted: tuple[int, ...]

    @property
    def position(self) -> int:
        """Which draft is decided on, from 1."""
        return len(self.drafted) + 1


class DepthPolicy(Protocol):
    """Decides on each position before it is drawn. It must be a function of the view: keep nothing that later draws could
    reach."""

    def admits(self, view: View) -> bool:
        """Whether the next position is drawn and will be verified."""
        ...


@dataclass(frozen=True, slots=True)
class FixedDepth:
    """The depth that was agreed on before sampling; the default, and the only policy the transport itself uses."""

    depth: int

    def __post_init__(self) -> None:
        if not 0 <= self.depth <= MAX_DEPTH:
            raise LocalMisuse(f"a depth is within 0..{MAX_DEPTH}, not {self.depth}")

    def admits(self, view: View) -> bool:
        """Up to the fixed depth."""
        return view.position <= self.depth


class DepthGate:
    """One round under a policy: `admit`, then draw and `drew`, until it says no or `limit` drafts are made.

    It copies what it is given when the round opens, so that no later measurement reaches the policy, and it enforces the order:
    nothing is drawn unasked, nothing is asked twice, a stop is never reopened, and what was admitted is in the proposal.
    """

    def __init__(
        self,
        policy: DepthPolicy,
        limit: int,
        committed: Sequence[int],
        prior_rounds: Sequence[PriorRound] = (),
        load: Mapping[str, float] | None = None,
    ) -> None:
        if not 0 <= limit <= MAX_DEPTH:
            raise LocalMisuse(f"a limit is within 0..{MAX_DEPTH}, not {limit}")
        self._policy = policy
        self._limit = limit
        self._history = History(tuple(committed), tuple(prior_rounds), MappingProxyType(dict(load or {})))
        self._drafted: tuple[int, ...] = ()
        self._awaits_draw = False
        self._stopped = False

    def admit(self) -> bool:
        """Whether the next position may be drawn. Raises `LocalMisuse` before the last one was, or after a stop."""
        if self._awaits_draw:
            raise LocalMisuse("the position that was admitted has not been drawn: admission cannot be taken back")
        if self._stopped:
            raise LocalMisuse("the round has stopped, and a stopped round is never reopened")
        admitted = len(self._drafted) < self._limit and self._policy.admits(View(self._history, self._drafted))
        self._awaits_draw = bool(admitted)
        self._stopped = not admitted
        return self._awaits_draw

    def drew(self, token: int) -> None:
        """The token of the position just admitted. Raises `LocalMisuse` if none was."""
        if not self._awaits_draw:
            raise LocalMisuse("a token was drawn that no policy had admitted")
        self._awaits_draw = False
        self._drafted = (*self._drafted, token)

    def proposal(self) -> tuple[int, ...]:
        """All drafts of the round, to be verified whole. Raises `LocalMisuse` while the round goes on."""
        if not self._stopped:
            raise LocalMisuse("the round has not stopped: ask until the policy says no")
        return self._drafted
