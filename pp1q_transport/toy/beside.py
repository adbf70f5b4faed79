"""The two loops of a sidecar deployment: a toy draft and a toy target, each beside its daemon, which they outlive.

Between `attach_leader` or `attach_receiver` and the hidden commands that run them. A target keeps a journal of what it committed,
as an engine keeps its requests, so that a later life goes on from there. Moves no frames. SPEC sections 4, 6 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..client import attach_leader, attach_receiver
from .collective import FileCollective, GroupLoop
from .journaled import Journal, JournaledLoop
from .models import ToyDraft
from .rounds import DemoResult, draft_rows, latency_us

if TYPE_CHECKING:
    from pathlib import Path

    from .sidecar import Shape



def run_draft(shape: Shape, socket: str) -> None:
    """Drafts until it is killed or SIGTERM ends it."""
    draft = ToyDraft(shape.seed, shape.vocab_size)
    with attach_leader(socket, idle=shape.idle) as leader:
        for step in leader:
            draft_rows(step, draft)


def run_target(shape: Shape, socket: str, rank: int, home: Path) -> DemoResult:
    """All rounds of one rank, whatever dies meanwhile."""
    journal = Journal(home / f"target{rank}.journal")
    try:
        with attach_receiver(socket, rank, idle=shape.idle) as receiver:
            loop: JournaledLoop = JournaledLoop(shape, receiver, journal)
            if shape.ranks > 1:
                loop = GroupLoop(shape, receiver, journal, FileCollective(home / "collective", rank, shape.ranks))
            requests = loop.rounds()
            for request in requests:
                receiver.close_request(request)
            loop.verdict()
            return loop.result
    finally:
        journal.close()


def report_of(result: DemoResult) -> dict[str, object]:
    """What a target's process prints: one JSON object."""
    return {
        "rounds": result.rounds,
        "ready": result.ready,
        "discarded": sum(result.reasons.values()),
        "reasons": dict(result.reasons),
        "accepted": result.accepted,
        "committed": result.committed,
        "epochs_over": result.epochs_over,
        "p_value": result.p_value,
        "pit_tokens": result.pit_tokens,
        "latency_us": latency_us(result.latencies_ns),
        "tokens": {str(request): tokens for request, tokens in result.tokens.items()},
    }
