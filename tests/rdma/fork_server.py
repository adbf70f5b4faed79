"""Starts leaders and receivers that are there to be killed, without paying for the imports each time: forks before any verbs
object exists, and each child makes its own.

Orders come as lines of JSON: {"role", "options", "settings"}; the answer is the child's pid. Children end with the server.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import structlog

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "system"))

from system_rig import PROMPT, draft, one_round

from pp1q_transport.client import Leader, Receiver, Role, configure
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_verbs import alive, load
from pp1q_transport.toy.models import ToyModels

PR_SET_PDEATHSIG = 1


def live(role: str, options: dict[str, Any], settings: dict[str, Any]) -> None:
    """A whole life: until it is killed."""
    models = ToyModels.of(7, options["vocab_size"])
    config = replace(configure(Role(role), link="rdma", **options), rdma=RdmaConfig(**settings))
    if role == "leader":
        with Leader(config) as leader:
            while True:
                step = leader.next_step(100_000_000)
                if step is not None:
                    draft(models, step)
    with Receiver(config) as receiver:
        receiver.wait_for_peer(200)
        request = receiver.open_request(1, PROMPT, seed=5)
        while True:
            one_round(models, receiver, request)


def main() -> None:
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    load()  # once, not in each child
    for line in sys.stdin:
        order = json.loads(line)
        assert not any(alive.values()), "a fork after registration"
        pid = os.fork()
        if pid == 0:
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
            try:
                live(**order)
            finally:
                os._exit(1)
        print(json.dumps(pid), flush=True)


if __name__ == "__main__":
    main()
