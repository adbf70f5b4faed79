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
from .rounds import PROMPT, TargetLoop

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
        if path.exists():
            self._read(path)
        self._file = path.open("a", encoding="utf-8")
        self._write({"life": self.lives})

    def _read(self, path: Path) -> None:
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                continue  # the line that a kill cut short
            if "life" in entry:
                self.lives = entry["life"] + 1
                continue
            request = entry["request"]
            self.tokens.setdefault(request, list(PROMPT))[entry["at"] :] = entry["tokens"]
            self.generations[request] = entry["generation"]
            self.rounds[request] = entry["round"]
            self.done += entry["rounds"]

    def add(
        self, request: Request, before: int, rounds: int, number: int = 0, drafted: int | None = None, issued_ns: int = 0
    ) -> None:
        """Notes what `request` gained (or, agreed by the group, lost) since it had `before` tokens, in round `number`, whose
        proposal was of generation `drafted`, or None when it went on alone. Times are monotonic, of the whole machine."""
        self._write(
            {
                "request": request.request,
                "at": before,
                "tokens": request.tokens[before:].tolist(),
                "generation": request.generation,
                "round": request.round,
                "rounds": rounds,
                "number": number,
                "drafted": drafted,
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
            generation = journal.generations.get(number, 0) + LIFE_GENERATIONS
        seed = draw64(self.options.seed, Domain.PROPOSAL, 0, 0, index)
        self.result.tokens[number] = tokens[len(PROMPT) :]
        return self.receiver.open_request(number, tokens, seed=seed, generation=generation)

    def after_round(self, request: Request, before: int, round_number: int, drafted: int | None) -> None:
        """See `TargetLoop.after_round`."""
        self.journal.add(request, before, 1, round_number, drafted, self._issued_ns[request.request])

    def _verify(self, request: Request, proposal: Proposal) -> None:
        if self._think_s:
            time.sleep(self._think_s)
        super()._verify(request, proposal)

    def _issue(self, request: Request) -> tuple[Request, int, Ticket | None]:
        issued = super()._issue(request)
        ticket = issued[2]
        self._issued_ns[request.request] = ticket.enqueued_ns if isinstance(ticket, RecordTicket) else monotonic_ns()
        return issued

    def _note_issue(self, request: Request) -> None:
        self._issued_ns[request.request] = monotonic_ns()
