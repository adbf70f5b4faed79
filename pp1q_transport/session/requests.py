"""Requests as both sides remember them across sessions: committed tokens, prefix digest, generation, round.

Between the client, which commits, and the sessions, which carry. The receiver's `request_generation` survives reconnects; the
leader's key guard sees to it that no proposal noise is ever drawn twice for one request. SPEC sections 2 and 5.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING, Final

from .._native.kernels import prefix_digest
from ..errors import LocalMisuse, PeerFault, Reason

if TYPE_CHECKING:
    from collections.abc import Iterable

U32_MAX: Final = 0xFFFFFFFF
_U32_MAX: Final = U32_MAX  # a C integer in the compiled build


class Request:
    """One open request. Tokens are int32, positions absolute: the token at index i stands at position i."""

    def __init__(self, request: int, seed: int, tokens: Iterable[int], max_position: int = U32_MAX, generation: int = 0) -> None:
        self.request: int = request
        self.seed: int = seed
        self.tokens: array[int] = array("i")
        self.prefix_low: int = 0
        self.prefix_high: int = 0
        self.max_position: int = max_position
        self.generation: int = generation
        self.round: int = 0
        self.owner: int = 0
        """The rank that samples it and so has its rows, where a group's mode asks for one ("request-owner")."""
        self.in_flight: bool = False
        self.drew: bool = False  # leader: whether a key was ever used
        self.drew_generation: int = 0
        self.drew_round: int = 0
        self.anchor: int = 0
        """Absolute position of the last committed token; the first drafted position is the next one."""
        self.extend(tokens)
        if not self.tokens:
            raise LocalMisuse("a request needs at least one committed token (its prompt)")

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends committed tokens and moves the prefix digest on; the state is unchanged if a token is no int32."""
        try:
            fresh = array("i", tokens)
        except (OverflowError, TypeError) as error:
            raise LocalMisuse(f"committed tokens must be int32: {error}") from error
        if len(self.tokens) + len(fresh) > U32_MAX:
            raise PeerFault(Reason.GENERATION_EXHAUSTED, "position")
        if fresh:
            self.prefix_low, self.prefix_high = prefix_digest(self.prefix_low, self.prefix_high, fresh)
            self.tokens.extend(fresh)
            self.anchor = len(self.tokens) - 1

    def rewrite(self, tokens: Iterable[int]) -> None:
        """Other committed tokens in place of these: what a rank group agreed on (SPEC section 4). The generation rises."""
        before = (self.tokens, self.prefix_low, self.prefix_high, self.anchor)
        self.tokens, self.prefix_low, self.prefix_high, self.anchor = array("i"), 0, 0, 0
        try:
            self.extend(tokens)
        except (LocalMisuse, PeerFault):
            self.tokens, self.prefix_low, self.prefix_high, self.anchor = before
            raise
        self.discard()

    def check_round(self) -> int:
        """0; raises `PeerFault(generation_exhausted)` when `next_round` would."""
        if self.round >= _U32_MAX:
            raise PeerFault(Reason.GENERATION_EXHAUSTED, "round")
        return 0

    def next_round(self) -> int:
        """Takes the next round number; raises `PeerFault(generation_exhausted)` when u32 runs out."""
        self.check_round()
        taken = self.round
        self.round += 1
        return taken

    def discard(self) -> None:
        """A proposal died or the peer reconnected: the generation rises, so old noise can never be drawn again."""
        if self.generation >= U32_MAX:
            raise PeerFault(Reason.GENERATION_EXHAUSTED, "request_generation")
        self.generation += 1
        self.in_flight = False

    def may_draw(self, generation: int, round: int) -> bool:
        """Leader's key guard: whether (generation, round) is beyond every key this request has used."""
        if not self.drew:
            return True
        if generation != self.drew_generation:
            return generation > self.drew_generation
        return round > self.drew_round

    def mark_drawn(self, generation: int, round: int) -> None:
        """Records the key as used before its first draw."""
        self.drew = True
        self.drew_generation = generation
        self.drew_round = round


class RequestTable:
    """Open requests by ID, bounded; and, for the last `remembered` closed ones, which RNG keys are spent.

    A request ID that comes back goes on behind its spent keys: at the receiver with a generation beyond all it had, at the
    leader with the key guard it left behind.
    """

    def __init__(self, limit: int = 4096, remembered: int = 65536) -> None:
        self.limit = limit
        self.remembered = remembered
        self.requests: dict[int, Request] = {}
        self._spent: OrderedDict[int, tuple[int, bool, int, int]] = OrderedDict()

    def full(self) -> bool:
        """Whether no further request may be opened."""
        return len(self.requests) >= self.limit

    def add(self, request: Request) -> None:
        """Opens a request; an open ID or one past the limit is `LocalMisuse`."""
        if request.request in self.requests:
            raise LocalMisuse(f"request {request.request} is open already")
        if self.full():
            raise LocalMisuse(f"{self.limit} requests are open; close some first")
        spent = self._spent.pop(request.request, None)
        if spent is not None:
            request.drew, request.drew_generation, request.drew_round = spent[1:]
        self.requests[request.request] = request

    def fresh_generation(self, request: int) -> int:
        """The first request_generation that no earlier life of this ID has used; 0 for an ID never seen."""
        spent = self._spent.get(request)
        if spent is None:
            return 0
        if spent[0] >= U32_MAX:
            raise PeerFault(Reason.GENERATION_EXHAUSTED, "request_generation")
        return spent[0] + 1

    def get(self, request: int) -> Request | None:
        """The open request of that ID, or None."""
        return self.requests.get(request)

    def remove(self, request: int) -> Request | None:
        """Closes and returns the request, or None when it is not open. Its spent keys are remembered."""
        closed = self.requests.pop(request, None)
        if closed is not None:
            self._spent[request] = (closed.generation, closed.drew, closed.drew_generation, closed.drew_round)
            if len(self._spent) > self.remembered:
                self._spent.popitem(last=False)
        return closed

    def end_session(self) -> None:
        """The leader's side of a lost session: every request is closed, since the receiver opens the live ones anew."""
        for request in list(self.requests):
            self.remove(request)
