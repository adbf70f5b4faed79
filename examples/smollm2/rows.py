"""Real next-token logits for tests: float32 [32, 49152] of SmolLM2-135M at 32 positions of an English technical text, as a .npy.

Between the model and `tests/verify/test_real_logits.py`, which finds the file at its usual place. Run: rows.py [FILE]
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import numpy as np

USUAL: Final = Path(__file__).resolve().parents[2] / ".cache" / "smollm2_logits_f32.npy"
ROWS: Final = 32
TEXT: Final = """\
Rejection sampling draws from one distribution with the help of another. A draft model proposes a token together with the
probability it gave to that token, and the target model keeps it with a probability that is the ratio of the two, or one if the
ratio is larger. When a token is rejected, a replacement is drawn from the part of the target's distribution that the draft did
not cover, normalised so that it sums to one. The tokens that come out have exactly the distribution of the target, however poor
the draft may be; a poor draft only makes it slower. For this to hold, the verifier has to know the very probabilities that the
draft used, not an approximation of them: a value that was rounded after sampling is the value of another distribution. Network
protocols usually guard against lost and corrupted packets with sequence numbers and checksums."""


def main() -> None:
    """Writes the file."""
    from model import Forward, load_model, load_tokenizer

    out = Path(sys.argv[1]) if len(sys.argv) > 1 else USUAL
    tokens = load_tokenizer()(TEXT).input_ids
    whole = Forward(load_model(), (16,), 256).after(tokens, len(tokens))
    at = np.linspace(1, len(tokens) - 1, ROWS).astype(int)
    out.parent.mkdir(exist_ok=True)
    new = out.with_suffix(f".{os.getpid()}.npy")
    np.save(new, whole[at])
    os.replace(new, out)


if __name__ == "__main__":
    main()
