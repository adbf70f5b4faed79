"""The two loops of a sidecar deployment: a toy draft and a toy target, each beside its daemon, which they outlive.

Between `attach_leader` or `attach_receiver` and the hidden commands that run them. A target keeps a journal of what it committed,
as an engine keeps its requests, so that a later life goes on from there. Moves no frames. SPEC sections 4, 6 and 9.
"""

from __future__ import annotations

import json
import os
import time
from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..client import attach_leader, attach_receiver
from ..client.attached_target import RecordTicket
from ..errors import PeerFault, Reason
from ..rng import Domain, draw64
from .demo import draft_rows, latency_us
from .models import ToyDraft
from .rounds import PROMPT, DemoResult, TargetLoop

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from ..client import AttachedReceiver, Proposal, Ticket
    from ..session.requests import Request
    from .sidecar import Shape

LIFE_GENERATIONS: Final = 1 << 20  # a later life starts so far above what the journal says: no noise is drawn twice
RECONNECT_S: Final = 20.0
AGREE_S: Final = 2.0
AGREE_LOOK_S: Final = 0.002


def run_draft(shape: Shape, socket: str) -> None:
    """Drafts until it is killed or SIGTERM ends it."""
    draft = ToyDraft(shape.seed, shape.vocab_size)
    with attach_leader(socket, idle=shape.idle) as leader:
        for step in leader:
            draft_rows(step, draft)


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


class FileCollective:
    """The all-reduce that ranks of a real engine have: files in one directory, one for each rank and epoch."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._ranks = ranks
        directory.mkdir(exist_ok=True)

    def agree(self, epoch: int, tokens: Mapping[int, Sequence[int]]) -> dict[int, list[int]]:
        """The longest history of each request among all ranks. Raises `PeerFault(timeout)` when a rank does not take part, and
        `PeerFault(rank_disagree)` when histories differ in more than length."""
        own = self._path(epoch, self._rank)
        draft = own.with_suffix(".new")
        draft.write_text(json.dumps({str(request): list(known) for request, known in tokens.items()}), encoding="utf-8")
        os.replace(draft, own)
        deadline = time.monotonic() + AGREE_S
        agreed: dict[int, list[int]] = {}
        for rank in range(self._ranks):
            path = self._path(epoch, rank)
            while not path.exists():
                if time.monotonic() >= deadline:
                    raise PeerFault(Reason.TIMEOUT, f"rank {rank} took no part in epoch {epoch}")
                time.sleep(AGREE_LOOK_S)
            for name, known in json.loads(path.read_text(encoding="utf-8")).items():
                longest = agreed.setdefault(int(name), known)
                short, long = sorted((longest, known), key=len)
                if long[: len(short)] != short:
                    raise PeerFault(Reason.RANK_DISAGREE, f"request {name}: {len(short)} tokens are no prefix of {len(long)}")
                agreed[int(name)] = long
        return agreed

    def _path(self, epoch: int, rank: int) -> Path:
        return self._directory / f"epoch-{epoch}-rank-{rank}.json"


def run_target(shape: Shape, socket: str, rank: int, home: Path) -> DemoResult:
    """All rounds of one rank, whatever dies meanwhile."""
    journal = Journal(home / f"target{rank}.journal")
    try:
        with attach_receiver(socket, rank, idle=shape.idle) as receiver:
            loop = JournaledLoop(shape, receiver, journal)
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
        "p_value": result.p_value,
        "pit_tokens": result.pit_tokens,
        "latency_us": latency_us(result.latencies_ns),
        "tokens": {str(request): tokens for request, tokens in result.tokens.items()},
    }
