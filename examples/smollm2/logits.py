"""What the loops of this example need of a model, and a memory of rows for runs that come back to the same contexts.

Between `model.Forward` (or a made-up model in a test) and the loops. Knows neither torch nor the transport.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class Logits(Protocol):
    """A model; `model.Forward` is one."""

    def after(self, context: Sequence[int], last: int = 1) -> NDArray[np.float32]:
        """float32 [last, V]: the logits after the last `last` prefixes of `context`, the longest last."""


class Remembered:
    """A model that keeps the `most` rows asked for last. Rows must depend on their context alone."""

    def __init__(self, model: Logits, most: int = 512) -> None:
        self._model = model
        self._most = most
        self._rows: OrderedDict[tuple[int, ...], NDArray[np.float32]] = OrderedDict()

    def after(self, context: Sequence[int], last: int = 1) -> NDArray[np.float32]:
        """See `Logits.after`."""
        keys = [tuple(context[: len(context) - back]) for back in reversed(range(last))]
        if all(key in self._rows for key in keys):
            for key in keys:
                self._rows.move_to_end(key)
            return np.stack([self._rows[key] for key in keys])
        rows = self._model.after(context, last)
        for key, row in zip(keys, rows, strict=True):
            self._rows[key] = row.copy()
            self._rows.move_to_end(key)
        while len(self._rows) > self._most:
            self._rows.popitem(last=False)
        return rows
