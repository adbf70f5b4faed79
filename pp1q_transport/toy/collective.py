"""The rounds of one rank of a group, and the collective by which the ranks of a toy engine agree on what is committed.

Between an attached receiver of a group and `beside`, which runs it. Every rank runs the same rounds in the same order; when the
epoch ends, all go on from what they agree on. A real engine has an all-reduce for that, the toy has files. SPEC section 4.
"""

from __future__ import annotations

import json
import os
import time
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

from .._native.kernels import monotonic_ns
from ..errors import PeerFault, ProposalDiscarded, Reason
from ..session.shards import REPLICATE, VOCABULARY
from ..sharding import verify_chain_sharded
from ..verify import QRow, target_only
from .journaled import JournaledLoop
from .rounds import PROMPT, Outcome, re_form

if TYPE_CHECKING:
    from array import array
    from collections.abc import Callable, Mapping, Sequence
    from pathlib import Path

    from ..client import AttachedReceiver, Proposal, Ticket
    from ..session.requests import Request
    from ..verify import Verdict
    from .journaled import Journal
    from .sidecar import Shape

AGREE_S: Final = 2.0
AGREE_LOOK_S: Final = 0.002
GATHER_LOOK_S: Final = 0.0002
PARTING_LOOK_S: Final = 0.02


class EpochOver(Exception):
    """The group's epoch ended in the middle of its rounds."""


class FileCollective:
    """One file for each rank and epoch, in a directory that all ranks see."""

    def __init__(self, directory: Path, rank: int, ranks: int) -> None:
        self._directory = directory
        self._rank = rank
        self._ranks = ranks
        self._gathered: Path | None = None
        directory.mkdir(exist_ok=True)

    def agree(self, epoch: int, tokens: Mapping[int, Sequence[int]], done: int) -> tuple[dict[int, list[int]], int]:
        """The longest history of each request, and the highest count of rounds done, among all ranks. Raises `PeerFault`:
        `timeout` when a rank does not take part, `rank_disagree` when histories differ in more than length."""
        own = self._path(epoch, self._rank)
        draft = own.with_suffix(".new")
        said = {"done": done, "tokens": {str(request): list(known) for request, known in tokens.items()}}
        draft.write_text(json.dumps(said), encoding="utf-8")
        os.replace(draft, own)
        deadline = time.monotonic() + AGREE_S
        agreed: dict[int, list[int]] = {}
        for rank in range(self._ranks):
            path = self._path(epoch, rank)
            while not path.exists():
                if time.monotonic() >= deadline:
                    raise PeerFault(Reason.TIMEOUT, f"rank {rank} took no part in epoch {epoch}")
                time.sleep(AGREE_LOOK_S)
            theirs = json.loads(path.read_text(encoding="utf-8"))
            done = max(done, theirs["done"])
            for name, known in theirs["tokens"].items():
                short, long = sorted((agreed.get(int(name), known), known), key=len)
                if long[: len(short)] != short:
                    raise PeerFault(Reason.RANK_DISAGREE, f"request {name}: {len(short)} tokens are no prefix of {len(long)}")
                agreed[int(name)] = long
        return agreed, done

    def gather(self, name: str, part: bytes, look: Callable[[], object]) -> list[bytes]:
        """What every rank gives under `name`, by rank: the toy's all-gather. It waits as long as `look` raises nothing, which is
        called meanwhile. A rank that has all parts of one name has no need of the last one's."""
        own = self._directory / f"{name}-rank-{self._rank}"
        draft = own.with_suffix(".new")
        draft.write_bytes(part)
        os.replace(draft, own)
        parts = []
        for rank in range(self._ranks):
            path = self._directory / f"{name}-rank-{rank}"
            while not path.exists():
                look()
                time.sleep(GATHER_LOOK_S)
            parts.append(path.read_bytes())
        if self._gathered is not None:
            self._gathered.unlink(missing_ok=True)
        self._gathered = own
        return parts

    def finished(self) -> bool:
        """Says that this rank has done all its rounds; whether every rank has."""
        (self._directory / f"done-rank-{self._rank}").touch()
        return all((self._directory / f"done-rank-{rank}").exists() for rank in range(self._ranks))

    def _path(self, epoch: int, rank: int) -> Path:
        return self._directory / f"epoch-{epoch}-rank-{rank}.json"


class GroupLoop(JournaledLoop):
    """The rounds of one rank. Rank 0's tokens are the ones that count; every rank computes them."""

    def __init__(self, shape: Shape, receiver: AttachedReceiver, journal: Journal, collective: FileCollective) -> None:
        super().__init__(shape, receiver, journal)
        self._collective = collective
        self._epoch = 0
        self._known: dict[int, int] = {}  # how many tokens of each request the journal has
        receiver.on_agree(self._agree)

    def _agree(self, epoch: int, committed: dict[int, array[int]]) -> dict[int, list[int]]:
        agreed, self.result.rounds = self._collective.agree(epoch, committed, self.result.rounds)
        return agreed

    def rounds(self) -> list[Request]:
        """See `TargetLoop.rounds`."""
        requests = [self.open(index) for index in range(min(self.options.requests, self.options.rounds))]
        self._known = {request.request: len(request.tokens) for request in requests}
        while self.result.rounds < self.options.rounds:
            try:
                self._one_epoch(requests)
            except EpochOver:
                self.result.epochs_over += 1
        self._see_others_off()
        return requests

    def _see_others_off(self) -> None:
        """Ranks end together: while one has rounds to do, the group needs all."""
        while not self._collective.finished():
            try:
                self.receiver.wait_for_peer(PARTING_LOOK_S)
                self.receiver.serve(monotonic_ns() + int(PARTING_LOOK_S * 1e9))
            except PeerFault as fault:
                self.result.reasons[fault.reason.value] += 1

    def _one_epoch(self, requests: list[Request]) -> None:
        before = self.result.rounds
        re_form(self.receiver, self.reconnect_s)
        self._epoch = self.receiver.epoch
        self._adopt(requests, self.result.rounds - before)
        waiting: deque[tuple[Request, int, Ticket | None]] = deque()
        issued = self.result.rounds
        try:
            while issued < self.options.rounds or waiting:
                while issued < self.options.rounds and len(waiting) < len(requests):
                    waiting.append(self._issue(requests[issued % len(requests)]))
                    issued += 1
                request, round_number, ticket = waiting.popleft()
                known = len(request.tokens)
                outcome = self._finish(request, round_number, ticket)
                self.result.rounds += 1
                self._known[request.request] = len(request.tokens)
                self.after_round(request, known, outcome)
        except EpochOver:
            for _request, _round, ticket in waiting:
                self._drop(ticket)
            raise

    def _drop(self, ticket: Ticket | None) -> None:
        """What was under way when the epoch ended is void; a proposal that was ready gives its slot back."""
        try:
            if ticket is not None:
                ticket.wait().release()
        except ProposalDiscarded as discarded:
            self.result.reasons[discarded.reason.value] += 1

    def _adopt(self, requests: list[Request], rounds: int) -> None:
        """Notes what this rank took over from others by agreement."""
        for request in requests:
            known = self._known[request.request]
            if len(request.tokens) != known or rounds:
                self.result.tokens[request.request] = request.tokens[len(PROMPT) :].tolist()
                self.journal.adopt(request, known, rounds)
                self._known[request.request] = len(request.tokens)
                rounds = 0

    def _issue(self, request: Request) -> tuple[Request, int, Ticket | None]:
        self._note_issue(request)
        try:
            ticket = self.receiver.enqueue(
                request, depth=self.options.depth, support=self.options.support, budget_us=self.options.budget_us
            )
        except ProposalDiscarded as discarded:
            raise EpochOver from discarded
        return request, ticket.round, ticket

    def _finish(self, request: Request, round_number: int, ticket: Ticket | None) -> Outcome:
        assert ticket is not None
        try:
            proposal = ticket.wait()
        except ProposalDiscarded as discarded:
            self.result.reasons[discarded.reason.value] += 1
            return self._alone(request, discarded)
        try:
            with proposal:
                self._verify(request, proposal)
        except ProposalDiscarded as discarded:
            self.result.reasons[discarded.reason.value] += 1
            raise EpochOver from discarded
        return Outcome(proposal.round, proposal.generation, ready=True)

    def _chain(self, request: Request, proposal: Proposal) -> tuple[int, list[int]]:
        """See `TargetLoop._chain`. In mode "vocabulary" each rank has its range of q and of p, and they verify together by what
        their daemons exchange; in "request-owner" the others are told what the owner sampled."""
        mode = self.receiver.group_mode
        if mode == REPLICATE:
            return super()._chain(request, proposal)
        if mode == VOCABULARY:
            verdict = self._verify_sharded(request, proposal)
            return verdict.accepted_drafts, list(verdict.committed_tokens)
        name = f"{mode}-{self._epoch}-{request.request}-{proposal.round}"
        said = b""
        if request.owner == self.receiver.rank:
            said = json.dumps(super()._chain(request, proposal)).encode()
        parts = self._collective.gather(name, said, self._still)
        accepted, tokens = json.loads(parts[request.owner])
        return accepted, tokens

    def _verify_sharded(self, request: Request, proposal: Proposal) -> Verdict:
        shard = self.receiver.shard()
        own = slice(shard.first_id, shard.end_id)
        known, drafted = request.tokens[-2:].tolist(), proposal.tokens.tolist()
        rows = [proposal.q(index) for index in range(proposal.depth)]
        steps = verify_chain_sharded(
            shard,
            drafted,
            [QRow(row.values, row.ids) for row in rows],
            lambda index: self._target.weights(known + drafted[:index])[0][own].astype(np.float64),
            request.seed,
            proposal.generation,
            proposal.round,
            proposal.first_position,
        )
        return self.receiver.run_sharded(steps, request, proposal.round, generation=proposal.generation)

    def _still(self) -> None:
        """Raises `EpochOver` when the epoch is: some rank is dead, and gives nothing any more."""
        self.receiver.poll()
        if not self.receiver.up or self.receiver.epoch != self._epoch:
            raise EpochOver

    def _alone(self, request: Request, discarded: ProposalDiscarded) -> Outcome:
        """Every rank goes on alone by the same noise; unless it is the epoch that is over."""
        if not self.receiver.up or self.receiver.epoch != self._epoch:
            raise EpochOver from discarded
        self._think()
        known = request.tokens[-2:].tolist()
        weights, _ = self._target.weights(known)
        generation = discarded.generation or request.generation
        token = target_only(weights, request.seed, generation, discarded.round, request.anchor + 1)
        try:
            self.receiver.commit_target_only(request, discarded.round, [token])
        except ProposalDiscarded as over:
            raise EpochOver from over
        self._note(request, known, [token])
        return Outcome(discarded.round, generation, ready=False)
