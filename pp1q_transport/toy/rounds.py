"""The toy target's rounds: STEP, verify, commit, and target-only after a discard. The same over any receiver.

Between a `TargetSide`, embedded or beside a daemon, and whoever reports the outcome. Prints nothing and starts nothing. Waits for
lost peers no longer than it is told. SPEC sections 6 and 9.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

import numpy as np

from ..errors import PeerFault, ProposalDiscarded, Reason
from ..rng import Domain, draw64
from ..verify import QRow, target_only, verify_chain
from .models import ToyDraft, ToyTarget
from .pit import MIN_TOKENS, PitTest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..client import Proposal, Step, TargetSide, Ticket
    from ..session.requests import Request
    from ..verify import Verdict

PROMPT: Final = (1, 2)
RECONNECT_S: Final = 3.0
PIT_NOISE: Final = 0x9E3779B97F4A7C15


class RoundOptions(Protocol):
    """What the rounds need to know; `DemoOptions` and others have it. `support` None is dense q."""

    @property
    def seed(self) -> int:
        """Of models and noise."""

    @property
    def rounds(self) -> int:
        """STEPs in all."""

    @property
    def depth(self) -> int:
        """Drafted tokens a STEP."""

    @property
    def vocab_size(self) -> int:
        """Of both models."""

    @property
    def support(self) -> int | None:
        """The k of sparse q."""

    @property
    def requests(self) -> int:
        """That take turns."""

    @property
    def budget_us(self) -> int:
        """Of every STEP."""


@dataclass(slots=True)
class DemoResult:
    """The account of one demo, as its report prints it."""

    rounds: int = 0
    ready: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    accepted: int = 0
    committed: int = 0
    residual_free: int = 0
    bytes_ready: int = 0
    latencies_ns: list[int] = field(default_factory=list)
    outcomes: dict[tuple[int, int, int], str] = field(default_factory=dict)
    injected: list[tuple[str, int, int, int]] = field(default_factory=list)
    tokens: dict[int, list[int]] = field(default_factory=dict)
    p_value: float | None = None
    pit_tokens: int = 0
    slots_not_free: int = 0
    sessions: int = 0
    epochs_over: int = 0  # of a rank group, in the middle of its rounds
    link: str = ""  # the kind that ran
    counters: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def fault_outcomes(self) -> dict[str, dict[str, int]]:
        """Per kind of injected fault: how often which outcome. A fault whose proposal became ready would show here."""
        table: dict[str, Counter[str]] = {}
        for kind, session, slot, generation in self.injected:
            outcome = self.outcomes.get((session, slot, generation), "unaccounted")
            table.setdefault(kind, Counter())[outcome] += 1
        return {kind: dict(counts) for kind, counts in table.items()}

    @property
    def faults_that_passed(self) -> int:
        """Injected faults whose proposal was ready all the same, or is not accounted for. Must be 0."""
        return sum(counts.get("ready", 0) + counts.get("unaccounted", 0) for counts in self.fault_outcomes.values())


def latency_us(samples_ns: Sequence[int]) -> Mapping[str, float]:
    """Nearest-rank p50, p99 and p99.9 in microseconds; zeros when there is no sample."""
    if not samples_ns:
        return {"p50": 0.0, "p99": 0.0, "p999": 0.0}
    ordered = np.sort(np.asarray(samples_ns, np.int64)) / 1000
    count = len(ordered)
    return {
        name: float(ordered[min(count - 1, max(0, -(-share * count // 1000) - 1))])
        for name, share in (("p50", 500), ("p99", 990), ("p999", 999))
    }


def draft_rows(step: Step, draft: ToyDraft) -> None:
    """Puts every row of a step, each conditioned on the tokens drawn before it, until it is dead."""
    chain = step.tail(2).tolist()
    for position in step.positions:
        token = step.put(position, weights=draft.weights(chain, step.temperature))
        if token is None:
            return
        chain.append(token)


class Waits(Protocol):
    """The part of a side that waits for its peer."""

    def wait_for_peer(self, timeout_s: float = 30.0) -> None:
        """Raises `PeerFault(timeout)` when there is none in time."""


def re_form(endpoint: Waits, timeout_s: float = RECONNECT_S) -> None:
    """Waits for the next session; a peer that does not come back is lost."""
    try:
        endpoint.wait_for_peer(timeout_s)
    except PeerFault as fault:
        if fault.reason is not Reason.TIMEOUT:
            raise
        raise PeerFault(Reason.PEER_LOST, f"no new session within {timeout_s:g} s") from fault


class Outcome(NamedTuple):
    """What came of a round: its number, and the generation of the noise, the proposal's if it was ready."""

    number: int
    generation: int
    ready: bool


class TargetLoop:
    """All rounds of one target. `verifier` is `verify.verify_chain`, or a wrong one in a test."""

    def __init__(
        self,
        options: RoundOptions,
        receiver: TargetSide,
        progress: Callable[[DemoResult], None] | None = None,
        verifier: Callable[..., Verdict] = verify_chain,
        reconnect_s: float = RECONNECT_S,
    ) -> None:
        self.options = options
        self.side = receiver
        self.result = DemoResult()
        self.reconnect_s = reconnect_s
        self._progress = progress or (lambda _result: None)
        self._verifier = verifier
        self._target = ToyTarget(options.seed, options.vocab_size)
        self._pit = PitTest(self._target, options.rounds, options.seed ^ PIT_NOISE) if options.rounds >= MIN_TOKENS else None

    def rounds(self) -> list[Request]:
        """Opens the requests and runs every round. Returns the requests, still open."""
        result = self.result
        requests = [self.open(index) for index in range(min(self.options.requests, self.options.rounds))]
        tickets: deque[tuple[Request, int, Ticket | None]] = deque()
        issued = result.rounds
        for request in requests:
            tickets.append(self._issue(request))
            issued += 1
        while tickets:
            request, round_number, ticket = tickets.popleft()
            before = len(request.tokens)
            outcome = self._finish(request, round_number, ticket)
            result.rounds += 1
            self.after_round(request, before, outcome)
            self._progress(result)
            if issued < self.options.rounds:
                tickets.append(self._issue(request))
                issued += 1
        return requests

    def after_round(self, request: Request, before: int, outcome: Outcome) -> None:
        """A round of `request` is over, which had `before` tokens then. For who keeps a journal."""

    def verdict(self) -> None:
        """Judges the committed tokens, as far as there are enough."""
        if self._pit is not None:
            judged = self._pit.result()
            self.result.p_value = judged.p_value
            self.result.pit_tokens = judged.n

    def open(self, index: int) -> Request:
        """The request of that index, with a seed of its own."""
        seed = draw64(self.options.seed, Domain.PROPOSAL, 0, 0, index)
        self.result.tokens[index + 1] = []
        return self.side.open_request(index + 1, PROMPT, seed=seed)

    def _issue(self, request: Request) -> tuple[Request, int, Ticket | None]:
        """A STEP under way; no ticket when no session can be had: then this round is target-only as well."""
        round_number = request.round
        try:
            if not self.side.up:
                re_form(self.side, self.reconnect_s)
            ticket = self.side.enqueue(
                request, depth=self.options.depth, support=self.options.support, budget_us=self.options.budget_us
            )
        except ProposalDiscarded:
            request.next_round()
            return request, round_number, None
        return request, round_number, ticket

    def _finish(self, request: Request, round_number: int, ticket: Ticket | None) -> Outcome:
        result = self.result
        try:
            if ticket is None:
                raise ProposalDiscarded(Reason.PEER_LOST, request.request, round_number)  # noqa: TRY301
            proposal = ticket.wait()
        except ProposalDiscarded as discarded:
            result.reasons[discarded.reason.value] += 1
            if ticket is not None:
                result.outcomes[ticket.key] = discarded.reason.value
            self._target_only(request, round_number)
            return Outcome(round_number, request.generation, ready=False)
        result.outcomes[proposal.key] = "ready"
        with proposal:
            self._verify(request, proposal)
        return Outcome(proposal.round, proposal.generation, ready=True)

    def _verify(self, request: Request, proposal: Proposal) -> None:
        result = self.result
        known = request.tokens[-2:].tolist()
        accepted, tokens = self._chain(request, proposal)
        result.ready += 1
        result.latencies_ns.append(proposal.latency_ns)
        result.accepted += accepted
        proposal.commit(accepted, tokens)
        self._note(request, known, tokens)

    def _chain(self, request: Request, proposal: Proposal) -> tuple[int, list[int]]:
        """How many drafts are accepted, and all tokens to commit."""
        rows = [proposal.q(index) for index in range(proposal.depth)]
        return self._verified(request, proposal, [QRow(row.values, row.ids) for row in rows])

    def _verified(self, request: Request, proposal: Proposal, rows: list[QRow]) -> tuple[int, list[int]]:
        drafted = proposal.tokens.tolist()
        known = request.tokens[-2:].tolist()
        verdict = self._verifier(
            drafted,
            rows,
            lambda index: self._target.weights(known + drafted[:index]),
            request.seed,
            proposal.generation,
            proposal.round,
            proposal.first_position,
        )
        return verdict.accepted_drafts, list(verdict.committed_tokens)

    def _target_only(self, request: Request, round_number: int) -> None:
        """The round goes on from the committed prefix, with noise of the new generation."""
        known = request.tokens[-2:].tolist()
        weights, _ = self._target.weights(known)
        position = request.anchor + 1
        token = target_only(weights, request.seed, request.generation, round_number, position)
        self.side.commit_target_only(request, round_number, [token])
        self._note(request, known, [token])

    def _note(self, request: Request, context: list[int], tokens: Sequence[int]) -> None:
        """Counts committed `tokens`; `context` are the two before them."""
        for token in tokens:
            if self._pit is not None:
                self._pit.add(context, token)
            context = [context[-1], token]
        self.result.committed += len(tokens)
        self.result.tokens[request.request].extend(tokens)
