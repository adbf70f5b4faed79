"""One rank's side of a computation of `sharding`, from the parts it says to the parts it hears.

Between a generator that yields what its rank contributes (`sharding.Steps`) and whoever sends a part and brings back those of all
ranks. Waits for nothing and judges nothing: what it is given was judged. SPEC sections 6 and 7.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, NamedTuple, TypeVar

from ..errors import LocalMisuse
from .parts import Part, answer_of, purpose_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ..sharding import Steps
    from .parts import Array

T = TypeVar("T")


class Place(NamedTuple):
    """What a computation is about; the same on every rank."""

    request: int
    generation: int
    round: int
    position: int


class ExchangeRun(Generic[T]):
    """`begin`, then `resume` with the parts of all ranks for each part that was returned; None: done, and `result` is there. What
    the generator raises goes through."""

    def __init__(self, steps: Steps[T], rank: int, place: Place, first_id: int, end_id: int) -> None:
        self.done = False
        self._steps = steps
        self._rank = rank
        self._place = place
        self._range = (first_id, end_id)
        self._result: T

    @property
    def result(self) -> T:
        """What the generator returned."""
        if not self.done:
            raise LocalMisuse("this computation is not done")
        return self._result

    def begin(self, sequence: int) -> Part | None:
        """Our first part; `sequence` is the number of our next one."""
        return self._go(None, sequence)

    def resume(self, parts: Sequence[Part], sequence: int) -> Part | None:
        """Our next part, after the parts of all ranks, in order, of the last one."""
        return self._go([array.copy() for array in answer_of(parts)], sequence)

    def _go(self, answer: list[Array] | None, sequence: int) -> Part | None:
        try:
            exchange = next(self._steps) if answer is None else self._steps.send(answer)
        except StopIteration as stop:
            self._result = stop.value
            self.done = True
            return None
        purpose = purpose_of(exchange)
        values = exchange.value.copy()
        return Part(self._rank, sequence, *self._place, purpose.code, *self._range, values)
