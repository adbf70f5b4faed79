"""A leader or a receiver in a process of its own, for tests that stop, kill or restart it. Started by exec, never by fork.

`lead`: drafts whatever it is asked, until the target says goodbye. `receive`: drives requests by a list of rounds on stdin.
"""

from __future__ import annotations

import argparse
import logging
import sys

import structlog
from system_rig import SMALL, draft

from pp1q_transport.client import Leader, Role, configure
from pp1q_transport.toy.models import ToyModels


def lead(connect: str, wait: bool) -> None:
    models = ToyModels.of(7, SMALL["vocab_size"])
    with Leader(configure(Role.LEADER, connect=connect, wait_for_peer=wait, **SMALL)) as leader:
        for step in leader:
            draft(models, step)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=("lead",))
    parser.add_argument("--connect", required=True)
    parser.add_argument("--wait", action="store_true")
    given = parser.parse_args()
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    lead(given.connect, given.wait)


if __name__ == "__main__":
    main()
