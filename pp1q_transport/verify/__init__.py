"""Verification by rejection sampling, in three layers of one meaning: rationals, integers, and native code on floats.

Between a proposal with the very q it was drawn from and the target's own p on one side, and the tokens to commit on the other.
`rational` says what must come out, `integer` (and `wide`, without its bounds) draws it from 64-bit noise to within (V+1)/2^64,
`fast` does the same on an engine's FP32 or FP64 weights, and `noise` sees that no key is used twice. No layer does I/O or keeps
state but `noise`. SPEC section 6; docs/verification.md has the proofs' bounds and figures.
"""

from .fast import FastTarget, target_only_fast, verify_chain_fast
from .integer import (
    MAX_TOTAL,
    Draw,
    QRow,
    TargetRow,
    Verdict,
    accept,
    check_weights,
    correct,
    pick,
    residual,
    target_only,
    verify_chain,
)
from .noise import KeyGuard, KeyReuse, NoiseOwners

__all__ = [
    "MAX_TOTAL",
    "Draw",
    "FastTarget",
    "KeyGuard",
    "KeyReuse",
    "NoiseOwners",
    "QRow",
    "TargetRow",
    "Verdict",
    "accept",
    "check_weights",
    "correct",
    "pick",
    "residual",
    "target_only",
    "target_only_fast",
    "verify_chain",
    "verify_chain_fast",
]
