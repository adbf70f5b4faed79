"""The vocabulary split over ranks: q built, drawn from and verified against without any rank holding a whole row.

Between ranks that each hold the logits or weights of a range of tokens, and the very counts, draws and verdicts of one process
that held them all, bit for bit. Each step is a generator that yields what its rank sends (`Exchange`) and is resumed with what
the collective gave: an engine puts its own collectives there, `emulate` runs all ranks in one process. SPEC sections 3 and 6.
"""

from .build import (
    ShardRow,
    allocate_sharded,
    allocate_top_k_sharded,
    draw_sharded,
    weights_sharded,
)
from .exchange import Exchange, Op, Shard, Steps, Traffic, emulate, shards_of
from .verifying import (
    ShardTarget,
    accept_sharded,
    bonus_sharded,
    correct_sharded,
    greedy_tokens_sharded,
    pick_sharded,
    target_sharded,
    verify_chain_sharded,
    verify_row_sharded,
)

__all__ = [
    "Exchange",
    "Op",
    "Shard",
    "ShardRow",
    "ShardTarget",
    "Steps",
    "Traffic",
    "accept_sharded",
    "allocate_sharded",
    "allocate_top_k_sharded",
    "bonus_sharded",
    "correct_sharded",
    "draw_sharded",
    "emulate",
    "greedy_tokens_sharded",
    "pick_sharded",
    "shards_of",
    "target_sharded",
    "verify_chain_sharded",
    "verify_row_sharded",
    "weights_sharded",
]
