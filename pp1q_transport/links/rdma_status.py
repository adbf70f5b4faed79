"""Stand-in until the table of completion statuses is merged: every status is a `link_error`."""

from __future__ import annotations

from typing import NamedTuple

from ..errors import Reason


class Problem(NamedTuple):
    """A reason and words that say what to check."""

    reason: Reason
    words: str


def explain(status: int) -> Problem:
    """What a completion status means."""
    return Problem(Reason.LINK_ERROR, f"work completion status {status}")
