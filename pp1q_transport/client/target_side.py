"""What every target side does before anything moves: requests and their tokens, judged and kept; the words for misuse.

Between the target's loop and the two receivers that share it: embedded (`target`) and beside a daemon (`attached_target`).
Does no I/O. SPEC sections 2, 4 and 9.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from array import array
from operator import index
from typing import TYPE_CHECKING, Any, Final, NoReturn

from .. import wire
from .._native.kernels import monotonic_ns
from ..errors import LocalMisuse
from ..session.requests import Request, RequestTable
from .copying import LOOK_NS, CopiesUp
from .mapped import Mapped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from ..counters import Counters
    from ..errors import Reason
    from .copying import CopyStage, RowsUp
    from .proposal import Proposal, ProposalFacts, Ticket

DEFAULT_BUDGET_US: Final = 1_000_000
TEMPERATURE_MOST: Final = 1e6
_U64_MAX: Final = (1 << 64) - 1


class TargetSide(Mapped, ABC):
    """Requests of one target process. `requests` outlives sessions and daemons: it is the truth about committed tokens."""

    counters: Counters
    log: Any

    def __init__(self) -> None:
        Mapped.__init__(self)
        self.requests = RequestTable()
        self.copies = CopiesUp(self)
        self.nudge: Callable[[], None] = _nobody
        """Called when something was queued or a slot came back outside of `poll`: for who polls from elsewhere (`pump`)."""

    # ---- what a receiver adds -----------------------------------------------------------------------------------

    @property
    @abstractmethod
    def up(self) -> bool:
        """Whether proposals can flow."""

    @property
    @abstractmethod
    def free_slots(self) -> int:
        """How many further STEPs `enqueue` has a slot for."""

    @abstractmethod
    def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Waits until proposals can flow; raises `PeerFault(timeout)` when they can't in time."""

    @abstractmethod
    def limit(self, name: str) -> int:
        """A number that was negotiated, or is configured while nothing is: "vocab_size", "max_context_tokens"..."""

    @abstractmethod
    def enqueue(
        self,
        request: Request,
        *,
        depth: int | None = None,
        temperature: float = 1.0,
        support: int | None = None,
        budget_us: int = DEFAULT_BUDGET_US,
        target_context: int = 0,
        trace_id: int = 0,
    ) -> Ticket:
        """Queues a STEP and returns at once. `support` None asks for dense q, k for the top-k."""

    @abstractmethod
    def poll(self) -> int:
        """Serves what moves the frames once, without waiting. Returns how much that moved."""

    @abstractmethod
    def check_held(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.check_held`."""

    @abstractmethod
    def let_go(self, facts: ProposalFacts) -> None:
        """See `ProposalHolder.let_go`."""

    @abstractmethod
    def tell_void(self, facts: ProposalFacts, reason: Reason) -> None:
        """Tells the other side that a proposal, ready though it was, could not be used here."""

    def fresh_seed(self) -> int:
        """The seed of a request whose owner names none: 64 bits of the operating system's."""
        return int.from_bytes(os.urandom(8), "little")

    @abstractmethod
    def check_idle(self, request: Request) -> None:
        """Raises `LocalMisuse` while a proposal of the request lands: it would become ready for a prefix that is no longer."""

    @abstractmethod
    def announce(self, request: Request) -> None:
        """Tells the other side of a request that was just opened, as far as there is one."""

    @abstractmethod
    def retire(self, request: Request) -> None:
        """Cancels what the request has under way and tells the other side that it ended."""

    @abstractmethod
    def commit(self, request: Request, round: int, source: int, accepted: int, tokens: Iterable[int]) -> None:
        """Commits tokens that were judged; without a session they are kept and travel with the next OPEN."""

    # ---- what they share ----------------------------------------------------------------------------------------

    def open_request(
        self,
        request: int,
        tokens: Iterable[int],
        seed: int | None = None,
        max_position: int = wire.U32_MAX,
        generation: int = 0,
        owner: int | None = None,
    ) -> Request:
        """Opens a request with its committed tokens (prompt included). `seed`: u64, from the OS when None.

        `generation` continues a request of an earlier life of this process: more than any it had, so that no proposal
        noise can be drawn twice (SPEC sections 2 and 5). `owner`: in a rank group of mode "request-owner" the rank that samples
        the request and so has its rows, the same on every rank; by default its ID modulo the group's size.
        """
        if seed is None:
            seed = self.fresh_seed()
        whole("request", request, 0, _U64_MAX)
        whole("seed", seed, 0, _U64_MAX)
        whole("max_position", max_position, 0, wire.U32_MAX)
        whole("generation", generation, 0, wire.U32_MAX)
        generation = max(generation, self.requests.fresh_generation(request))
        size = self.limit("group_size")
        if owner is not None:
            whole("owner", owner, 0, size - 1)
        opened = Request(request, seed, self._int32(tokens), max_position, generation)
        opened.owner = request % size if owner is None else owner
        self._check_room(opened, 0)
        self.requests.add(opened)
        self.announce(opened)
        return opened

    def _int32(self, tokens: Iterable[int]) -> array[int]:
        try:
            fresh = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise LocalMisuse(f"tokens must be int32: {error}") from error
        vocab_size = self.limit("vocab_size")
        if fresh and not 0 <= min(fresh) <= max(fresh) < vocab_size:
            raise LocalMisuse(f"tokens must be within the vocabulary of {vocab_size}")
        return fresh

    def check_tokens(self, request: Request, tokens: Iterable[int]) -> array[int]:
        """The tokens of a commit as int32, if they can be committed: raises `LocalMisuse` otherwise."""
        self._check_open(request)
        fresh = self._int32(tokens)
        if not fresh:
            raise LocalMisuse("a commit needs at least one token")
        self._check_room(request, len(fresh))
        return fresh

    def _check_room(self, request: Request, more: int) -> None:
        """Raises `LocalMisuse` when `more` tokens would not fit: with a session or without, since the next OPEN carries them."""
        total, most = len(request.tokens) + more, self.limit("max_context_tokens")
        if total > most:
            raise LocalMisuse(f"{total} tokens exceed max_context_tokens {most}")
        if total - 1 > request.max_position:
            raise LocalMisuse(f"position {total - 1} is beyond the request's last, {request.max_position}")

    def _check_open(self, request: Request) -> None:
        if self.requests.get(request.request) is not request:
            raise LocalMisuse(f"request {request.request} is not open")

    def close_request(self, request: Request) -> None:
        """Ends a request; a proposal under way is cancelled. Safe to repeat."""
        if self.requests.get(request.request) is not request:
            return
        self.retire(request)
        self.requests.remove(request.request)

    # ---- copies to a device (`copying`) -------------------------------------------------------------------------

    def use_copy_stage(self, stage: CopyStage | None) -> None:
        """From the next proposal on, a proposal is ready only once `stage` has brought every row to the device, within the
        budget of its STEP: `Proposal.device_rows` has what it made (SPEC section 2).

        A copy that fails, or is not over in time, discards the proposal (`copy_failed`, `timeout`); its slot is not granted
        again before the device reads it no more.
        """
        self.copies.stage = stage

    def await_copies(self, rows: RowsUp) -> None:
        """Serves the peer and idles for a moment while copies run."""
        self.poll()
        if not rows.over:
            rows.idle(min(LOOK_NS, rows.deadline_ns - monotonic_ns()))

    def void(self, request: Request, facts: ProposalFacts, reason: Reason, detail: str) -> None:
        """A ready proposal could not be brought to the device: it is discarded as any other. Its slot is held all the same."""
        self.counters.discard(reason)
        self.log.warning(
            "copy_given_up", reason=reason.value, detail=detail, request=request.request, slot=facts.slot, round=facts.round
        )
        if self.requests.get(request.request) is request and request.generation == facts.request_generation:
            request.discard()
        self.tell_void(facts, reason)

    def _close_copies(self) -> None:
        left = self.copies.close()
        if left:
            self.counters.add("copies_left_running", left)
            self.log.warning("copies_left_running", proposals=left)
        self._unmap(touched=left > 0)

    def step(self, request: Request, **options: Any) -> Proposal:
        """`enqueue` and `wait` in one; the same options."""
        return self.enqueue(request, **options).wait()

    def commit_target_only(self, request: Request, round: int, tokens: Iterable[int]) -> None:
        """Commits what the target sampled by itself after a discard. `round`: the one that `ProposalDiscarded` names; what was
        never begun is `LocalMisuse`, as is a proposal still in flight: it would be verified against a prefix it was not drafted
        for. Where that raises, nothing is committed."""
        whole("round", round, 0, request.round)
        fresh = self.check_tokens(request, tokens)
        self.check_idle(request)
        self.commit(request, round, wire.TARGET_ONLY, 0, fresh)


def _nobody() -> None:
    """Nobody polls from elsewhere."""


def check_step(
    depth_most: int, support_most: int, dense: bool, sparse: bool, depth: int | None, temperature: float, support: int | None
) -> None:
    """Raises `LocalMisuse` for what the leader would have to refuse."""
    if depth is not None:
        whole("depth", depth, 1, depth_most)
    try:
        fits = 0.0 <= temperature <= TEMPERATURE_MOST
    except TypeError:
        fits = False
    if not fits:
        raise LocalMisuse(f"temperature {temperature!r} is outside 0..{TEMPERATURE_MOST:g}")
    if not (dense if support is None else sparse):
        raise LocalMisuse(f"{'dense' if support is None else 'sparse'} q was not negotiated")
    if support is not None:
        whole("support", support, 1, support_most)


def check_numbers(budget_us: int, target_context: int, trace_id: int) -> None:
    """Raises `LocalMisuse` for numbers of a STEP that its frame can't hold."""
    whole("budget_us", budget_us, 1, wire.U32_MAX)
    whole("target_context", target_context, 0, _U64_MAX)
    whole("trace_id", trace_id, 0, _U64_MAX)


def refuse_unsettled(request: Request, under_way: bool) -> NoReturn:
    """Raises the `LocalMisuse` of a STEP for a request whose last round is neither committed nor discarded."""
    if under_way:
        raise LocalMisuse(f"request {request.request} has a proposal in flight")
    last = max(0, request.round - 1)
    raise LocalMisuse(
        f"round {last} of request {request.request} is not committed: commit its proposal, or what the target sampled by itself "
        f"(`commit_target_only(request, {last}, tokens)`)"
    )


def whole(name: str, value: int, least: int, most: int) -> None:
    """Raises `LocalMisuse` for a number that is no integer (numpy's are) in `least`..`most`."""
    if type(value) is int and least <= value <= most:  # most often
        return
    try:
        number = index(value)
    except TypeError:
        raise LocalMisuse(f"{name} must be an integer, not {value!r}") from None
    if not least <= number <= most:
        raise LocalMisuse(f"{name} {value} is outside {least}..{most}")
