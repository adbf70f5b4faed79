"""The demo's models and its test of distribution: a toy draft, a toy target, the loop they need, and the statistic.

Between the demo and tests above and the mathematics below. Does no I/O and carries nothing; real models replace it.
"""

from __future__ import annotations

from .models import DEFAULT_VOCABULARY, ToyDraft, ToyModels, ToyTarget
from .pit import PitResult, PitTest, chi_square_tail
from .reference import Mode, Verifier, propose, run_reference

__all__ = [
    "DEFAULT_VOCABULARY",
    "Mode",
    "PitResult",
    "PitTest",
    "ToyDraft",
    "ToyModels",
    "ToyTarget",
    "Verifier",
    "chi_square_tail",
    "propose",
    "run_reference",
]
