"""A leader or a receiver in a process of its own, for tests that stop, kill or restart it. Started by exec, never by fork.

`lead`: drafts whatever it is asked, until the target says goodbye. `receive`: drives two requests for so many rounds.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys

import structlog
from system_rig import PROMPT, SMALL, draft, one_round

from pp1q_transport.client import Leader, Receiver, Role, configure
from pp1q_transport.toy.models import ToyModels


def lead(connect: str, wait: bool) -> None:
    models = ToyModels.of(7, SMALL["vocab_size"])
    with Leader(configure(Role.LEADER, connect=connect, wait_for_peer=wait, **SMALL)) as leader:
        for step in leader:
            draft(models, step)


def receive(connect: str, generation: int, rounds: int, support: int | None) -> None:
    """Drives two requests of `generation` on, turn by turn; prints each one's journal and tokens at the end."""
    models = ToyModels.of(7, SMALL["vocab_size"])
    with Receiver(configure(Role.RECEIVER, connect=connect, **SMALL)) as receiver:
        receiver.wait_for_peer(30)
        requests = [receiver.open_request(i, PROMPT, seed=100 + i, generation=generation) for i in (1, 2)]
        journals: list[list[tuple[int, int, bool]]] = [[], []]
        for turn in range(rounds * 2):
            request = requests[turn % 2]
            journals[turn % 2].append(one_round(models, receiver, request, support=support)[:3])
        done = {request.request: [journal, request.tokens.tolist()] for request, journal in zip(requests, journals, strict=True)}
        print(json.dumps(done), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("lead", "receive"))
    parser.add_argument("--connect", required=True)
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--support", type=int)
    given = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    if given.role == "lead":
        lead(given.connect, given.wait)
    else:
        receive(given.connect, given.generation, given.rounds, given.support)


if __name__ == "__main__":
    main()
