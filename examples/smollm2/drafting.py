"""The draft process: SmolLM2 cut down, behind a leader. Rows go out as they are drawn; nothing else leaves this process.

Between the model and `pp1q_transport`, embedded (`--connect`) or beside a daemon (`--attach`); started by `run.py`. What the
model took in each STEP goes to a file, for the report: model and transport are told apart by it.
"""

from __future__ import annotations

import argparse
import json
from typing import TYPE_CHECKING, Any, TextIO

from cut import Cut
from logits import Logits, Remembered

from pp1q_transport import attach_leader, dyadic, open_leader
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.cli._common import setup_logging

if TYPE_CHECKING:
    from pp1q_transport import DraftSide, Step

SHAPES = (16, 1)  # a prompt goes in by sixteen; drafting is a token at a time


class Drafter:
    """Answers STEPs, each row conditioned on the tokens drawn before it. `temperature` None drafts at the STEP's own."""

    def __init__(self, model: Logits, temperature: float | None, account: TextIO) -> None:
        self._model = model
        self._temperature = temperature
        self._account = account

    def draft(self, step: Step) -> None:
        """All rows of a STEP, until the target gives it up. A target at temperature 0 gets the likeliest token: one-hot q."""
        temperature = step.temperature
        if self._temperature is not None and temperature > 0:
            temperature = self._temperature
        context = step.tokens.tolist()
        model_ns = 0
        for position in step.positions:
            began_ns = monotonic_ns()
            weights = dyadic.weights_from_logits(self._model.after(context)[0], temperature)
            model_ns += monotonic_ns() - began_ns
            token = step.put(position, weights=weights)
            if token is None:
                break
            context.append(token)
        self._account.write(json.dumps({"request": step.request, "round": step.round, "model_ns": model_ns}) + "\n")
        self._account.flush()


def serve(leader: DraftSide, drafter: Drafter) -> None:
    """Drafts until the leader is closed, or the process ended, over lost links."""
    for step in leader:
        drafter.draft(step)


def main() -> None:
    """The process that `run.py` starts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--connect")
    parser.add_argument("--attach")
    parser.add_argument("--hello", type=json.loads, default={})
    parser.add_argument("--cut", required=True)
    parser.add_argument("--temperature", type=float)
    parser.add_argument("--capacity", type=int, required=True)
    parser.add_argument("--account", required=True)
    given = parser.parse_args()
    setup_logging(-1)  # that its target ends is no news here, and what goes wrong before, the target counts by its reason
    from model import Forward, load_model

    model = Remembered(Forward(load_model(Cut.parse(given.cut)), SHAPES, given.capacity))
    side: Any = attach_leader(given.attach) if given.attach else None
    with open(given.account, "a", encoding="utf-8") as account:
        drafter = Drafter(model, given.temperature, account)
        with side or open_leader(connect=given.connect, **given.hello) as leader:
            leader.wait_for_peer(600.0)
            serve(leader, drafter)


if __name__ == "__main__":
    main()
