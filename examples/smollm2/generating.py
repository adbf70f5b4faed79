"""The target's loop: a STEP, the drafts in one forward, verification by rejection sampling, a commit; and the account of it all.

Between the model and a receiver of `pp1q_transport`, embedded or beside a daemon: the loop is the same. Also decodes without any
draft (`alone`), through the same forward, for comparison. Prints nothing.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from pp1q_transport import ProposalDiscarded, dyadic
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.rng import Domain, draw64
from pp1q_transport.verify import QRow, target_only_fast, verify_chain_fast

if TYPE_CHECKING:
    from logits import Logits

    from pp1q_transport import Proposal, TargetSide

BUDGET_US = 300_000_000  # a model on a busy machine, not a network: what is waited for here is the drafting
Emit = Callable[[Sequence[int], int], None]


@dataclass(frozen=True)
class Task:
    """One text: what it begins with, how many tokens to add, and how."""

    prompt: list[int]
    tokens: int
    depth: int
    temperature: float
    support: int | None = None
    seed: int = 1
    request: int = 1


@dataclass
class Account:
    """What one text cost. Times in ns, one entry a ready round; `rounds` are the numbers of those rounds."""

    tokens: list[int] = field(default_factory=list)
    rounds: list[int] = field(default_factory=list)
    accepted: int = 0
    drafted: int = 0
    reasons: Counter[str] = field(default_factory=Counter)
    whole_ns: list[int] = field(default_factory=list)
    latency_ns: list[int] = field(default_factory=list)
    forward_ns: list[int] = field(default_factory=list)
    tail_ns: list[int] = field(default_factory=list)

    @property
    def acceptance(self) -> float:
        """The share of drafts that were kept."""
        return self.accepted / self.drafted if self.drafted else 0.0

    def shares(self, model_ns: dict[int, int]) -> dict[str, float]:
        """How the time of all ready rounds divides: the draft's model (by round), the target's forward and verification, and the
        transport, which is all of the wait for a proposal that was not drafting."""
        drafting = sum(model_ns.get(number, 0) for number in self.rounds)
        whole = sum(self.whole_ns) or 1
        return {
            "draft": drafting / whole,
            "target": sum(self.forward_ns) / whole,
            "transport": (sum(self.latency_ns) - drafting) / whole,
        }

    def transport_us(self, model_ns: dict[int, int]) -> float:
        """The median of what a round waited beyond the drafting."""
        waits = [waited - model_ns.get(number, 0) for number, waited in zip(self.rounds, self.latency_ns, strict=True)]
        return statistics.median(waits) / 1e3 if waits else 0.0


def generate(receiver: TargetSide, model: Logits, task: Task, emit: Emit) -> Account:
    """Adds `task.tokens` tokens to the prompt. `emit` gets what each round committed, and how many of these were drafts."""
    account = Account()
    request = receiver.open_request(task.request, task.prompt, seed=task.seed)
    while len(account.tokens) < task.tokens:
        began_ns = monotonic_ns()
        context = request.tokens.tolist()
        try:
            ticket: Any = receiver.enqueue(
                request, depth=task.depth, temperature=task.temperature, support=task.support, budget_us=BUDGET_US
            )
            proposal = ticket.wait()
        except ProposalDiscarded as discarded:
            account.reasons[discarded.reason.value] += 1
            weights = dyadic.weights_from_logits(model.after(context)[0], task.temperature)
            token = target_only_fast(weights, task.seed, request.generation, discarded.round, len(context))
            receiver.commit_target_only(request, discarded.round, [token])
            accepted, fresh = 0, [token]
        else:
            if hasattr(ticket, "tail_ns"):
                account.tail_ns.append(ticket.tail_ns())
            with proposal:
                accepted, fresh = _verify(proposal, model, context, task.temperature, task.seed, account)
                proposal.commit(accepted, fresh)
            account.whole_ns.append(monotonic_ns() - began_ns)
        fresh = fresh[: task.tokens - len(account.tokens)]
        account.tokens += fresh
        emit(fresh, accepted)
    receiver.close_request(request)
    return account


def _verify(
    proposal: Proposal, model: Logits, context: list[int], temperature: float, seed: int, account: Account
) -> tuple[int, list[int]]:
    """One forward for all drafts, and the verdict on them: how many are kept, and all tokens to commit."""
    began_ns = monotonic_ns()
    drafts = proposal.tokens.tolist()
    logits = model.after(context + drafts, len(drafts) + 1)
    rows = [proposal.q(index) for index in range(len(drafts))]
    verdict = verify_chain_fast(
        drafts,
        [QRow(row.values, row.ids) for row in rows],
        lambda index: dyadic.weights_from_logits(logits[index], temperature),
        seed,
        proposal.generation,
        proposal.round,
        proposal.first_position,
    )
    account.forward_ns.append(monotonic_ns() - began_ns)
    account.latency_ns.append(proposal.latency_ns)
    account.rounds.append(proposal.round)
    account.drafted += len(drafts)
    account.accepted += verdict.accepted_drafts
    return verdict.accepted_drafts, list(verdict.committed_tokens)


def alone(model: Logits, task: Task) -> list[int]:
    """The same text by the target alone, a token at a time through the same forward."""
    tokens: list[int] = []
    for number in range(task.tokens):
        context = task.prompt + tokens
        weights = dyadic.weights_from_logits(model.after(context)[0], task.temperature)
        tokens.append(target_only_fast(weights, task.seed, 0, number, len(context)))
    return tokens


def seeds(seed: int, count: int) -> list[int]:
    """Seeds of further requests, out of one."""
    return [draw64(seed, Domain.PROPOSAL, 0, 0, index) for index in range(count)]
