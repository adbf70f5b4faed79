"""What makes a draft out of the target: read from a command line before anything slow is loaded.

Between the command and the model, which does the cutting (`model.load_model`). Knows no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Cut:
    """What makes a draft out of the target: fewer layers (0: all), fewer bits a weight (0: as they are), or neither."""

    layers: int = 0
    bits: int = 0

    @classmethod
    def parse(cls, text: str) -> Cut:
        """Of "layers=N", "bits=N", "layers=N,bits=N" or "none"; raises `ValueError` for anything else."""
        if text == "none":
            return cls()
        parts = [part.partition("=") for part in text.split(",")]
        fields = {name: number for name, _, number in parts}
        if not set(fields) <= {"layers", "bits"} or len(fields) < len(parts) or not all(map(str.isdecimal, fields.values())):
            raise ValueError(f"a draft is none, layers=N, bits=N or both, not {text!r}")
        cut = cls(**{name: int(value) for name, value in fields.items()})
        if not (0 <= cut.layers <= 30 and (cut.bits == 0 or 2 <= cut.bits <= 8)):
            raise ValueError(f"layers are 1..30 and bits 2..8, not {text!r}")
        return cut


NONE: Final = Cut()
