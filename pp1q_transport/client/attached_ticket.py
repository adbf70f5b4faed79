"""A STEP under way at a daemon, and the waiting for its outcome: ready, on the device if there is one, or discarded.

Between the target's loop and `attached_target`, which fills it in from the daemon's records. SPEC sections 4 and 9.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from .._native.kernels import monotonic_ns
from ..errors import ProposalDiscarded, Reason
from .proposal import Proposal, ProposalFacts

if TYPE_CHECKING:
    from ..session.requests import Request
    from .attached_target import AttachedReceiver
    from .copying import RowsUp

GRACE_NS: Final = 2_000_000_000  # past a STEP's budget the daemon has answered; one that has not by then hangs
LOOK_NS: Final = 50_000_000
_NONE: Final = (0, 0, 0)


class Patience:
    """How long a daemon may be silent. Only what this process waited counts: after a pause of its own (a debugger, a collection,
    a stopped container) the answer may be there already, or the daemon was stopped as well."""

    def __init__(self, receiver: AttachedReceiver, most_ns: int) -> None:
        self._receiver = receiver
        self._left_ns = max(most_ns, LOOK_NS)

    def serve(self) -> bool:
        """One pass of the receiver's. Whether there is patience left."""
        before_ns = monotonic_ns()
        self._receiver.serve(before_ns + min(self._left_ns, LOOK_NS))
        self._left_ns -= min(monotonic_ns() - before_ns, LOOK_NS)
        return self._left_ns > 0


class RecordTicket:
    """A STEP under way at the daemon (see `proposal.Ticket`)."""

    def __init__(self, receiver: AttachedReceiver, request: Request, number: int, trace_id: int, budget_us: int) -> None:
        self._receiver = receiver
        self.request = request
        self.number = number
        self.trace_id = trace_id
        self.round = request.round
        self.enqueued_ns = monotonic_ns()
        self.budget_ns = budget_us * 1000
        self.deadline_ns = self.enqueued_ns + self.budget_ns + GRACE_NS
        self.generation = 0
        self.ready_ns = 0
        self.facts: ProposalFacts | None = None
        self.reason: Reason | None = None
        self.rows_up: RowsUp | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """See `proposal.Ticket.key`."""
        facts = self.facts
        return (facts.session, facts.slot, facts.slot_generation) if facts is not None else _NONE

    @property
    def known(self) -> bool:
        """See `proposal.Ticket.known`."""
        if self.rows_up is not None:
            return self._receiver.copies.settled(self.rows_up)
        return self.facts is not None or self.reason is not None

    @property
    def settled(self) -> bool:
        """See `proposal.Ticket.settled`."""
        if not self.known:
            self._receiver.poll()
        return self.known

    def wait(self) -> Proposal:
        """See `proposal.Ticket.wait`."""
        patience = Patience(self._receiver, self.deadline_ns - monotonic_ns())
        while not self.known:
            if self.rows_up is not None:
                self._receiver.await_copies(self.rows_up)
            elif self._receiver.rank > 0:  # rank 0 alone watches the budget; the others wait for its decision (SPEC section 4)
                self._receiver.serve(monotonic_ns() + GRACE_NS)
            elif not patience.serve() and not self.known:
                self._receiver.give_up_daemon()
        if self.rows_up is not None and not self.rows_up.lost:
            return self.rows_up.result()
        if self.facts is not None and self._receiver.holds(self.facts):
            return Proposal(self._receiver, self.request, self.facts)
        if self.reason is None:
            self.reason = Reason.PEER_LOST  # it was ready, and then its daemon died
        lost = self.reason is Reason.PEER_LOST and not self._receiver.up
        raise ProposalDiscarded(
            self.reason,
            self.request.request,
            self.round,
            self.generation,
            self._receiver.between_epochs,
            self._receiver.missing if lost else "",
        )
