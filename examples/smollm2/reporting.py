"""What a person sees: the text as it comes, drafts that were kept in green, and the report.

Between the loops and a terminal. Plain where stdout is none, or NO_COLOR is set.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from run import Options, Outcome, Run

UNFINISHED = "\ufffd"  # what a tokenizer shows for a character whose last bytes are in the next token


def colours() -> bool:
    """Whether colours belong on stdout (no-color.org: any NO_COLOR that is not empty says no)."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


class Stream:
    """Writes tokens as text as soon as their characters are whole."""

    def __init__(self, tokenizer: Any, quiet: bool = False, coloured: bool | None = None) -> None:
        self._tokenizer = tokenizer
        self._quiet = quiet
        self._coloured = colours() if coloured is None else coloured
        self._tokens: list[int] = []
        self._shown = ""

    def heading(self, what: str, prompt: Sequence[int]) -> None:
        """Says what comes, and shows the prompt."""
        self._tokens = list(prompt)
        self._shown = self._tokenizer.decode(self._tokens)
        key = ", drafts that were kept in green" if self._coloured else ""
        self._write(f"--- {what}{key}\n", bold=True)
        self._write(self._shown, dim=True)

    def add(self, tokens: Sequence[int], accepted: int) -> None:
        """What a round committed; the first `accepted` of it were drafts."""
        for index, token in enumerate(tokens):
            self._tokens.append(token)
            text = self._tokenizer.decode(self._tokens)
            if not text.endswith(UNFINISHED):
                self._write(text[len(self._shown) :], fg="green" if index < accepted else None)
                self._shown = text

    def end(self) -> None:
        """Ends the text's last line."""
        self._write(self._tokenizer.decode(self._tokens)[len(self._shown) :] + "\n")

    def _write(self, text: str, **style: Any) -> None:
        if not self._quiet:
            sys.stdout.write(click.style(text, **style) if self._coloured and text else text)
            sys.stdout.flush()


def _line(run: Run) -> list[str]:
    account = run.account
    shares = account.shares(run.model_ns)
    rounds = max(1, len(account.rounds))
    wire = "" if run.wire_bytes is None else f", {run.wire_bytes / 1e6:.2f} MB on the wire with frames"
    return [
        f"  {run.via}, T={run.temperature:g}",
        f"    accepted        {account.acceptance:.1%} of {account.drafted} drafts; {len(account.tokens)} tokens in "
        f"{len(account.rounds)} rounds ({len(account.tokens) / rounds:.2f} a round)",
        f"    discarded       {sum(account.reasons.values())} {dict(account.reasons) or ''}".rstrip(),
        f"    q carried       {run.bytes_ready / 1e6:.2f} MB{wire}",
        f"    a round         {sum(account.whole_ns) / rounds / 1e6:.0f} ms: draft {shares['draft']:.1%}, target "
        f"{shares['target']:.1%}, transport {shares['transport']:.2%} (median {account.transport_us(run.model_ns):.0f} us)",
    ]


def report(options: Options, outcome: Outcome, seconds: float) -> str:
    """The report, without a newline at its end."""
    what = "dense q" if options.support is None else f"sparse q, top {options.support}"
    shape = f"draft {options.cut}, depth {options.depth}, {what}, seed {options.seed}"
    lines = [f"demo-model: SmolLM2-135M, {shape}; {seconds:.0f} s"]
    for run in outcome.runs:
        lines += _line(run)
    for via, tail_us in outcome.tail_us.items():
        lines.append(f"  tail, {via}: {tail_us:.0f} us from the last row's last byte to q-ready (mean)")
    lines += [f"  check: {text}" for text in outcome.checks]
    return "\n".join(lines)
