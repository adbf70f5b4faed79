"""What one target committed, on disk, and the rounds of a target that goes on from there after a kill.

Between `rounds` and the two kinds of target beside a daemon (`beside`). A real engine keeps its requests; the toy keeps a
journal. Moves no frames. SPEC sections 4 and 9.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..client.attached_ticket import RecordTicket
from ..rng import Domain, draw64
from .rounds import PROMPT, Outcome, TargetLoop

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from ..client import AttachedReceiver, Proposal, Ticket
    from ..session.requests import Request
    from .sidecar import Shape

LIFE_GENERATIONS: Final = 1 << 20  # a later life starts so far above what the journal says: no noise is drawn twice
RECONNECT_S: Final = 20.0


class Journal:
    """What one target committed, appended to a file: one JSON line a round."""

    def __init__(self, path: Path) -> None:
        self.tokens: dict[int, list[int]] = {}
        self.generations: dict[int, int] = {}
        self.rounds: dict[int, int] = {}
        self.done = 0
        self.lives = 0
        cut = path.exists() and not self._read(path)
        self._file = path.open("a", encoding="utf-8")
        if cut:
            self._file.write("\n")
        self._write({"life": self.lives})

    def _read(self, path: Path) -> bool:
        """Whether the last line is whole: a kill may have cut it short."""
        text = path.read_text(encoding="utf-8")
        for line in text.splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # one that a kill cut short
            if "life" in entry:
                self.lives = entry["life"] + 1
                continue
            request = entry["request"]
            self.tokens.setdefault(request, list(PROMPT))[entry["at"] :] = entry["tokens"]
            self.generations[request] = entry["generation"]
            self.rounds[request] = entry["round"]
            self.done += entry["rounds"]
        return not text or text.endswith("\n")

    def add(self, request: Request, before: int, outcome: Outcome, issued_ns: int) -> None:
        """Notes what `request` gained in one round, since it had `before` tokens: "drafted" is the generation of the proposal,
        "alone" that of the target's own noise. Times are monotonic, of the whole machine."""
        self._write(
            {
                "request": request.request,
                "at": before,
                "tokens": request.tokens[before:].tolist(),
                "generation": request.generation,
                "round": request.round,
                "rounds": 1,
                "number": outcome.number,
                "drafted": outcome.generation if outcome.ready else None,
                "alone": None if outcome.ready else outcome.generation,
                "issued_ns": issued_ns,
                "done_ns": monotonic_ns(),
            }
        )

    def adopt(self, request: Request, before: int, rounds: int) -> None:
        """Notes tokens of `request` from `before` on, and `rounds`, that this rank took over from others."""
        self._write(
            {
                "request": request.request,
                "at": before,
                "tokens": request.tokens[before:].tolist(),
                "generation": request.generation,
                "round": request.round,
                "rounds": rounds,
                "adopted": True,
            }
        )

    def _write(self, entry: Mapping[str, object]) -> None:
        self._file.write(json.dumps(entry) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


class JournaledLoop(TargetLoop):
    """The rounds of a target that may be killed at any of them."""

    def __init__(self, shape: Shape, receiver: AttachedReceiver, journal: Journal) -> None:
        super().__init__(shape, receiver, reconnect_s=RECONNECT_S)
        self.journal = journal
        self.receiver = receiver
        self.result.rounds = journal.done
        self._think_s = shape.think_us / 1e6
        self._issued_ns: dict[int, int] = {}

    def open(self, index: int) -> Request:
        """The request of that index, from where an earlier life left it."""
        number = index + 1
        journal = self.journal
        tokens = journal.tokens.get(number, list(PROMPT))
        generation = 0
        if journal.lives:
            # Beyond the lives that were too short to note a round, too.
            generation = max(journal.generations.get(number, 0) + LIFE_GENERATIONS, journal.lives * LIFE_GENERATIONS)
        seed = draw64(self.options.seed, Domain.PROPOSAL, 0, 0, index)
        self.result.tokens[number] = tokens[len(PROMPT) :]
        return self.receiver.open_request(number, tokens, seed=seed, generation=generation)

    def after_round(self, request: Request, before: int, outcome: Outcome) -> None:
        """See `TargetLoop.after_round`."""
        self.journal.add(request, before, outcome, self._issued_ns[request.request])

    def _think(self) -> None:
        if self._think_s:
            time.sleep(self._think_s)

    def _verify(self, request: Request, proposal: Proposal) -> None:
        self._think()
        super()._verify(request, proposal)

    def _target_only(self, request: Request, round_number: int) -> None:
        self._think()
        super()._target_only(request, round_number)

    def _issue(self, request: Request) -> tuple[Request, int, Ticket | None]:
        issued = super()._issue(request)
        ticket = issued[2]
        self._issued_ns[request.request] = ticket.enqueued_ns if isinstance(ticket, RecordTicket) else monotonic_ns()
        return issued

    def _note_issue(self, request: Request) -> None:
        self._issued_ns[request.request] = monotonic_ns()
