"""The rank group's decision: one answer for each (epoch, slot, slot_generation), whatever the number of ranks.

Between the receiver session of a rank, which votes, and the slot table, which only moves on a decision. This build forms groups
of one rank; the rule, the epoch and the place where other ranks' votes enter are here already. SPEC section 4.
"""

from __future__ import annotations

from ..errors import LocalMisuse


class Group:
    """Collects votes for proposals of one epoch. `size` ranks; rank 0 decides."""

    def __init__(self, size: int = 1, rank: int = 0, epoch: int = 0) -> None:
        if size != 1 or rank != 0:
            raise LocalMisuse("rank groups of more than one receiver are not part of this build")
        self.size = size
        self.rank = rank
        self.epoch = epoch

    def vote_ready(self, slot: int, generation: int) -> bool:
        """This rank's row checks all passed. True when the decision is READY at once (a group of one always decides)."""
        return self.size == 1

    def end_epoch(self) -> int:
        """A rank died or the link was lost: nothing of the running epoch can be decided any more. Returns the new epoch."""
        self.epoch += 1
        return self.epoch
