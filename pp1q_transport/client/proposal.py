"""A ready proposal as its holder sees it: tokens and the q of each, read-only views of the slot, until it is released.

Between the target's loop and whichever receiver made it: embedded (`target`) or beside a daemon (`attached_target`). Moves
nothing itself. SPEC sections 4 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np

from .. import wire
from ..errors import LocalMisuse
from .tensors import as_tensors

if TYPE_CHECKING:
    from array import array
    from collections.abc import Iterable

    import numpy.typing as npt

    from ..session.requests import Request
    from ..staging import SlotViews
    from .copying import DeviceRow


@dataclass(frozen=True, slots=True)
class Q:
    """The q one token was drawn from, as read-only views of the slot (no copy; valid until the proposal is released).

    Dense: `values` float32 [V], `ids` None. Sparse: `ids` int32 [n] ascending, `values` float32 [n]; q is 0 elsewhere.

    In a rank group of mode "vocabulary" it is this rank's range of the vocabulary alone: dense `values` float32
    [end_id - first_id], the first that of global ID `first_id`; sparse the entries within [first_id, end_id), IDs global,
    perhaps none. Its sum is the rank's share of 1 (SPEC section 4). Elsewhere the range is the whole vocabulary.
    """

    values: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32] | None
    first_id: int = 0
    end_id: int = 1 << 31

    def of(self, token: int) -> float:
        """q(token), of a global ID. Raises `LocalMisuse` for one outside [first_id, end_id)."""
        if not self.first_id <= token < self.end_id:
            raise LocalMisuse(f"token {token} is outside this rank's range [{self.first_id}, {self.end_id})")
        if self.ids is None:
            return float(self.values[token - self.first_id])
        at = int(np.searchsorted(self.ids, token))
        return float(self.values[at]) if at < len(self.ids) and self.ids[at] == token else 0.0

    def torch(self) -> tuple[Any, Any]:
        """(values, ids) as torch tensors over the same memory, without a copy; ids None for a dense q. Imports torch.

        Never write into them: undefined, and beside a daemon, whose slots are mapped read-only, the end of this process. Raises
        `ConfigError` when torch is not installed. See `tensors.as_tensor`.
        """
        return as_tensors(self.values, self.ids)


class ProposalFacts(NamedTuple):
    """What a proposal is: its slot and generation, its request's generation and round, the position before its first token,
    its size and form, how long it took (STEP enqueued to q-ready, ns), and the group's epoch it was decided in."""

    session: int
    slot: int
    slot_generation: int
    request_generation: int
    round: int
    anchor: int
    depth: int
    representation: int
    latency_ns: int
    epoch: int = 0
    trace_id: int = 0
    life: int = 0  # of the daemon it came from, as its process counts them
    owner: int = 0  # the rank that has its rows, where `representation` is 0: none are here


class ProposalHolder(Protocol):
    """The receiver behind a proposal."""

    @property
    def views(self) -> SlotViews:
        """Views of the slot memory."""

    def check_held(self, facts: ProposalFacts) -> None:
        """Raises `LocalMisuse` when the proposal is released, `ProposalDiscarded(peer_lost)` when its daemon or epoch is over."""

    def let_go(self, facts: ProposalFacts) -> None:
        """Gives the slot back; stale or repeated calls change nothing."""

    def check_tokens(self, request: Request, tokens: Iterable[int]) -> array[int]:
        """The tokens of a commit as int32, or `LocalMisuse`."""

    def check_idle(self, request: Request) -> None:
        """Raises `LocalMisuse` while another proposal of the request lands."""

    def commit_verified(self, request: Request, facts: ProposalFacts, accepted: int, tokens: array[int]) -> None:
        """Commits what verification gave."""


class Ticket(Protocol):
    """A STEP under way. `wait` gives the proposal or raises `ProposalDiscarded`."""

    round: int

    @property
    def key(self) -> tuple[int, int, int]:
        """(session, slot, slot_generation): one proposal among all; zeros while a daemon has not said."""

    @property
    def known(self) -> bool:
        """Whether the outcome is here, so that `wait` returns at once. Serves nothing: somebody else must poll."""

    @property
    def settled(self) -> bool:
        """`known`, after a look at what came."""

    def wait(self) -> Proposal:
        """Serves whatever moves the frames until the proposal is ready. The budget of the STEP bounds the wait."""


class Proposal:
    """A ready proposal: tokens and the q of each, read-only views of the slot. Release it (or leave its `with` block)."""

    def __init__(self, holder: ProposalHolder, request: Request, facts: ProposalFacts) -> None:
        self._holder = holder
        self._request = request
        self.facts = facts
        self.key = (facts.session, facts.slot, facts.slot_generation)
        self.slot = facts.slot
        self.slot_generation = facts.slot_generation
        self.generation = facts.request_generation
        self.round = facts.round
        self.first_position = facts.anchor + 1
        self.depth = facts.depth
        self.sparse = facts.representation == wire.SPARSE
        self.latency_ns = facts.latency_ns
        self.trace_id = facts.trace_id
        self.tokens: npt.NDArray[np.int32] = holder.views.tokens(facts.slot, facts.depth)
        self.device_rows: list[DeviceRow] | None = None
        """What the receiver's copy stage made of each row; None without one."""
        self._entries = holder.views.entries(facts.slot, facts.depth)

    def q(self, index: int) -> Q:
        """The q of the proposal's token `index` (0 is the first drafted); in group mode "vocabulary" this rank's range of it.

        Raises `LocalMisuse`, naming the rank, where another one owns the request and has its rows (mode "request-owner");
        the tokens are known on all.
        """
        self._check_held()
        if not self.facts.representation:
            raise LocalMisuse(f"the rows of this proposal are at rank {self.facts.owner}, which owns its request")
        if not 0 <= index < self.depth:
            raise LocalMisuse(f"index {index} is outside 0..{self.depth - 1}")
        views = self._holder.views
        if self.sparse:
            ids, values = views.sparse(self.slot, index, int(self._entries[index]))
            return Q(values, ids, views.first_id, views.first_id + views.vocab_size)
        return Q(views.dense(self.slot, index), None, views.first_id, views.first_id + views.vocab_size)

    def _check_held(self) -> None:
        self._holder.check_held(self.facts)

    def commit(self, accepted: int, tokens: Iterable[int]) -> None:
        """Commits what verification gave: `accepted` drafts, and all tokens (the drafts, then the correction or bonus
        unless the text ended before it). Releases.

        Raises `LocalMisuse`, and commits nothing, when that can't be: wrong tokens, or a proposal that is released or
        whose request was closed, went on without it or has the next one in flight (after a reconnect); `ProposalDiscarded`
        when its group's epoch is over (SPEC section 4).
        """
        self._check_held()
        committed = self._holder.check_tokens(self._request, tokens)
        self._holder.check_idle(self._request)
        if self._request.anchor + 1 != self.first_position:
            raise LocalMisuse(f"this proposal starts at position {self.first_position}, its request went on meanwhile")
        if not 0 <= accepted <= self.depth or not max(1, accepted) <= len(committed) <= accepted + 1:
            raise LocalMisuse(f"{accepted} accepted drafts commit themselves and at most one more, not {len(committed)} tokens")
        if committed[:accepted].tolist() != self.tokens[:accepted].tolist():
            raise LocalMisuse("the accepted drafts are not the proposal's tokens")
        self._holder.commit_verified(self._request, self.facts, accepted, committed)

    def release(self) -> None:
        """Gives the slot back. Idempotent."""
        self._holder.let_go(self.facts)

    def __enter__(self) -> Proposal:
        return self

    def __exit__(self, *exc: object) -> None:
        self.release()
