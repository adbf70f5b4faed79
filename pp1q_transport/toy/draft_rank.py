"""The loop of a toy draft's rank above 0 beside its daemon: it follows rank 0 token by token, and checks what it is told.

Between `attach_draft_peer` and the hidden command that runs it. Every rank of the toy has the whole model, so that this one knows
the token before it is told, and its range of each row without asking anybody. Moves no frames. SPEC sections 2 (TOKEN), 3 and 5.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from .. import dyadic
from .._native import kernels
from ..client import attach_draft_peer
from ..client.draft_side import draw_u24
from ..errors import PeerFault, ProposalDiscarded, Reason
from .models import ToyDraft

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..client import AttachedDraftPeer, PeerStep
    from .sidecar import Shape


def run_draft_rank(shape: Shape, socket: str, rank: int) -> None:
    """Follows until it is killed or SIGTERM ends it. Raises `PeerFault` for a token that rank 0 can't have drawn."""
    with attach_draft_peer(socket, rank, idle=shape.idle) as peer:
        follower = Follower(peer, ToyDraft(shape.seed, shape.vocab_size))
        for step in peer:
            follower.follow(step)


class Follower:
    """What one rank knows of the requests: the tokens told for each anchor, to be compared with what was committed there."""

    def __init__(self, peer: AttachedDraftPeer, draft: ToyDraft) -> None:
        self.peer = peer
        self.draft = draft
        self.followed = 0
        self.discarded: list[Reason] = []
        self.checked = 0
        self._lengths: dict[tuple[int, int], int] = {}
        self._told: dict[tuple[int, int], tuple[int, list[int]]] = {}
        self._committed: dict[tuple[int, int], list[tuple[int, list[int]]]] = {}
        peer.on_open(self._opened)
        peer.on_commit(self._commit)
        peer.on_close(self._closed)

    def _key(self, request: int) -> tuple[int, int]:
        return self.peer.event_target, request

    def _opened(self, request: int, tokens: list[int]) -> None:
        self._closed(request)
        self._lengths[self._key(request)] = len(tokens)

    def _closed(self, request: int) -> None:
        for table in (self._lengths, self._told, self._committed):
            table.pop(self._key(request), None)

    def _commit(self, request: int, tokens: list[int]) -> None:
        key = self._key(request)
        self._committed.setdefault(key, []).append((self._lengths[key] - 1, tokens))
        self._lengths[key] += len(tokens)
        self._compare(key)

    def _compare(self, key: tuple[int, int]) -> None:
        """All but the last of the tokens committed at an anchor were proposed there. (A commit may be heard of before the tokens
        of its proposal were all looked at.)"""
        anchor, told = self._told.get(key, (-1, []))
        for at, committed in self._committed.get(key, []):
            if at == anchor:
                self.checked += 1
                if committed[:-1] != told[: len(committed) - 1]:
                    raise PeerFault(Reason.CONTEXT_MISMATCH, f"{committed} were committed where {told} were proposed")
        self._committed[key] = [one for one in self._committed.get(key, []) if one[0] > anchor]

    def follow(self, step: PeerStep) -> bool:
        """One STEP, to its last token. False when it was given up before."""
        chain = step.tail(2).tolist()
        told: list[int] = []
        try:
            for position in step.positions:
                ids, counts = self._row(step, chain + told)
                token = step.token(position)
                due = kernels.draw(counts, draw_u24(step, position))
                due = due if ids is None else int(ids[due])
                if token != due:
                    raise PeerFault(Reason.DRAW_MISMATCH, f"token {token} was told for position {position}, where {due} is due")
                told.append(token)
                if self.peer.splits_vocabulary and not self._put(step, position, ids, counts):
                    step.token(position)  # which says why
                    return False
        except ProposalDiscarded as discarded:
            self.discarded.append(discarded.reason)
            return False
        self.followed += 1
        key = (step.target, step.request)
        self._told[key] = (step.anchor, told)
        self._compare(key)
        return True

    def _row(self, step: PeerStep, chain: list[int]) -> tuple[npt.NDArray[np.int32] | None, npt.NDArray[np.uint32]]:
        weights = self.draft.weights(chain, step.temperature)
        if step.support is None:
            counts = np.zeros(self.draft.vocabulary, np.uint32)
            kernels.allocate(weights, counts)
            return None, counts
        return dyadic.allocate_top_k(weights, step.support)

    def _put(
        self, step: PeerStep, position: int, ids: npt.NDArray[np.int32] | None, counts: npt.NDArray[np.uint32]
    ) -> bool:
        first, end = self.peer.first_id, self.peer.end_id
        if ids is not None:
            first, end = (int(edge) for edge in np.searchsorted(ids, (first, end)))
        before = int(counts[:first].sum(dtype=np.uint64))
        own_ids = None if ids is None else np.ascontiguousarray(ids[first:end])
        return step.put(position, counts=np.ascontiguousarray(counts[first:end]), mass_before=before, ids=own_ids)
