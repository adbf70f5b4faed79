"""A leader or a receiver in a process of its own, for tests that stop, kill or restart it. Started by exec, never by fork.

`lead`: drafts whatever it is asked, until the target says goodbye. `receive`: drives two requests for so many rounds, and says
after each one, in a line of JSON, what a target would keep on disk: `--resume` goes on from such a line.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
from typing import Any

import structlog
from system_rig import PROMPT, SMALL, draft, one_round

from pp1q_transport.client import Leader, Receiver, Role, configure
from pp1q_transport.toy.models import ToyModels


def lead(where: dict[str, Any], wait: bool) -> None:
    models = ToyModels.of(7, SMALL["vocab_size"])
    with Leader(configure(Role.LEADER, **where, wait_for_peer=wait, **SMALL)) as leader:
        for step in leader:
            draft(models, step)


def receive(where: dict[str, Any], generation: int, rounds: int, support: int | None, resume: str | None) -> None:
    """Drives two requests of `generation` on, turn by turn; prints each one's journal and tokens at the end."""
    models = ToyModels.of(7, SMALL["vocab_size"])
    kept: dict[str, tuple[int, list[int]]] = json.loads(resume) if resume else {}
    with Receiver(configure(Role.RECEIVER, **where, **SMALL)) as receiver:
        receiver.wait_for_peer(30)
        requests = []
        for i in (1, 2):
            before, tokens = kept.get(str(i), (generation - 1, list(PROMPT)))
            requests.append(receiver.open_request(i, tokens, seed=100 + i, generation=before + 1))
        journals: list[list[tuple[int, int, bool]]] = [[], []]
        for turn in range(rounds * 2):
            request = requests[turn % 2]
            entry = one_round(models, receiver, request, support=support)[:3]
            journals[turn % 2].append(entry)
            state = {"kept": {request.request: [request.generation, request.tokens.tolist()]}, "entry": entry}
            if resume is not None:
                print(json.dumps(state), flush=True)
        done = {request.request: [journal, request.tokens.tolist()] for request, journal in zip(requests, journals, strict=True)}
        print(json.dumps(done), flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("lead", "receive"))
    parser.add_argument("--connect")
    parser.add_argument("--listen")
    parser.add_argument("--link", default="tcp")
    parser.add_argument("--wait", action="store_true")
    parser.add_argument("--generation", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--support", type=int)
    parser.add_argument("--resume", help='JSON {request: [generation, tokens]}, "{}" to begin with')
    given = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    where = {"connect": given.connect, "listen": given.listen, "link": given.link}
    if given.role == "lead":
        lead(where, given.wait)
    else:
        receive(where, given.generation, given.rounds, given.support, given.resume)


if __name__ == "__main__":
    main()
