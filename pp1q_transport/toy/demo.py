"""The demo's two loops: a toy draft behind a leader, a toy target behind a receiver, and the account of what happened.

Between the client API and `pp1q demo`. Moves no bytes and prints nothing; both loops run in processes of their own, and what the
target needs of the draft's account (which faults were injected) comes over the control plane. SPEC sections 6 and 9.
"""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import numpy as np

from ..client import EngineConfig, Leader, Receiver, Role, make_hello, new_boot_nonce, open_leader, open_receiver
from ..errors import PeerFault, ProposalDiscarded, Reason
from ..links.faulty import FaultInjector, FaultKind, FaultRates
from ..rng import Domain, draw64
from ..verify import QRow, target_only, verify_chain
from .models import ToyDraft, ToyTarget
from .pit import MIN_TOKENS, PitTest

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from ..client import Proposal, Ticket
    from ..session.outbox import Outbox
    from ..session.requests import Request
    from ..verify import Verdict

PROMPT: Final = (1, 2)
BUDGET_US: Final = 2_000_000
LATE_BUDGET_US: Final = 150_000
RECONNECT_S: Final = 3.0
PIT_NOISE: Final = 0x9E3779B97F4A7C15
REQUESTS: Final = 4


@dataclass(frozen=True, slots=True)
class DemoOptions:
    """What both processes of a demo must know alike. `support` None is dense q."""

    seed: int = 1
    rounds: int = 400
    depth: int = 5
    vocab_size: int = 129280
    support: int | None = None
    requests: int = REQUESTS
    link: str = "tcp"
    faults: FaultRates = field(default_factory=FaultRates)

    @property
    def budget_us(self) -> int:
        """A late or cut proposal costs its budget, so runs that inject faults have a shorter one."""
        return LATE_BUDGET_US if self.faults.any else BUDGET_US

    @property
    def survives_links(self) -> bool:
        """Corrupt headers cost links, which then re-form; without them a lost link means a lost process."""
        return self.faults.corrupt > 0

    def hello_options(self) -> dict[str, object]:
        """The HELLO of either side, as far as the demo decides it."""
        name = f"toy-{self.seed}-{self.vocab_size}"
        return {
            "vocab_size": self.vocab_size,
            "depth": self.depth,
            "support": min(self.support or 32, self.vocab_size),
            "batch_requests": self.requests,
            "max_slots": 2 * self.requests,
            "draft_identity": name + "-draft",
            "target_identity": name + "-target",
            "link_kinds": (self.link,),
        }


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


# ---- the draft process ----------------------------------------------------------------------------------------------


def run_draft(options: DemoOptions, connect: str) -> None:
    """Drafts until the target says goodbye. Raises `PeerFault(peer_lost)` when it vanishes instead."""
    injector: FaultInjector | None = None
    if options.faults.any:
        injector = FaultInjector(options.faults, options.seed ^ 0x5EED, options.budget_us * 1000 * 5 // 4)

    def wrap(outbox: Outbox) -> FaultInjector:
        assert injector is not None
        return injector.attach(outbox)

    hello = make_hello(Role.LEADER, new_boot_nonce(), **options.hello_options())
    config = EngineConfig(
        hello=hello, connect=connect, wrap_outbox=wrap if injector else None, wait_for_peer=options.survives_links
    )
    draft = ToyDraft(options.seed, options.vocab_size)
    with open_leader(config) as leader:
        leader.wait_for_peer()
        reported = False
        while True:
            if not leader.up:
                if reported or leader.parted:
                    return
                _re_form(leader)
            step = leader.next_step()
            if step is not None:
                chain = step.tail(2).tolist()
                for position in step.positions:
                    token = step.put(position, weights=draft.weights(chain, step.temperature))
                    if token is None:
                        break
                    chain.append(token)
            elif leader.engine.inbox:
                leader.engine.inbox.clear()
                _report_faults(leader, injector)
                reported = True


def _re_form(endpoint: Leader | Receiver) -> None:
    """Waits for the next session; a peer that does not come back is lost."""
    try:
        endpoint.wait_for_peer(RECONNECT_S)
    except PeerFault as fault:
        if fault.reason is not Reason.TIMEOUT:
            raise
        raise PeerFault(Reason.PEER_LOST, f"no new session within {RECONNECT_S:g} s") from fault


def _report_faults(leader: Leader, injector: FaultInjector | None) -> None:
    done = injector.injected if injector is not None else []
    body = {
        "injected": [f"{one.kind.value} {one.session} {one.slot} {one.slot_generation}" for one in done],
    }
    leader.send_message("report", body)


# ---- the target process ---------------------------------------------------------------------------------------------


class DemoTarget:
    """The target's loop. `verifier` is `verify.verify_chain`, or a wrong one in a test."""

    def __init__(
        self,
        options: DemoOptions,
        receiver: Receiver,
        progress: Callable[[DemoResult], None] | None = None,
        verifier: Callable[..., Verdict] = verify_chain,
    ) -> None:
        self.options = options
        self.receiver = receiver
        self.result = DemoResult()
        self._progress = progress or (lambda _result: None)
        self._verifier = verifier
        self._target = ToyTarget(options.seed, options.vocab_size)
        self._pit = PitTest(self._target, options.rounds, options.seed ^ PIT_NOISE) if options.rounds >= MIN_TOKENS else None

    def run(self) -> DemoResult:
        """All rounds, then the draft's account and the verdict on the distribution."""
        receiver, result = self.receiver, self.result
        requests = [self._open(index) for index in range(min(self.options.requests, self.options.rounds))]
        tickets: deque[tuple[Request, int, Ticket | None]] = deque()
        issued = 0
        for request in requests:
            tickets.append(self._issue(request))
            issued += 1
        while tickets:
            request, round_number, ticket = tickets.popleft()
            self._finish(request, round_number, ticket)
            result.rounds += 1
            self._progress(result)
            if issued < self.options.rounds:
                tickets.append(self._issue(request))
                issued += 1
        result.injected = self._injected()
        for request in requests:
            receiver.close_request(request)
        self._account()
        return result

    def _open(self, index: int) -> Request:
        seed = draw64(self.options.seed, Domain.PROPOSAL, 0, 0, index)
        self.result.tokens[index + 1] = []
        return self.receiver.open_request(index + 1, PROMPT, seed=seed)

    def _issue(self, request: Request) -> tuple[Request, int, Ticket | None]:
        """A STEP under way; no ticket when no session can be had: then this round is target-only as well."""
        round_number = request.round
        try:
            if not self.receiver.up:
                _re_form(self.receiver)
            ticket = self.receiver.enqueue(
                request, depth=self.options.depth, support=self.options.support, budget_us=self.options.budget_us
            )
        except ProposalDiscarded:
            request.next_round()
            return request, round_number, None
        return request, round_number, ticket

    def _finish(self, request: Request, round_number: int, ticket: Ticket | None) -> None:
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
            return
        result.outcomes[proposal.key] = "ready"
        with proposal:
            self._verify(request, proposal)

    def _verify(self, request: Request, proposal: Proposal) -> None:
        result = self.result
        drafted = proposal.tokens.tolist()
        known = request.tokens[-2:].tolist()
        rows = [proposal.q(index) for index in range(proposal.depth)]
        verdict = self._verifier(
            drafted,
            [QRow(row.values, row.ids) for row in rows],
            lambda index: self._target.weights(known + drafted[:index]),
            request.seed,
            proposal.generation,
            proposal.round,
            proposal.first_position,
        )
        result.ready += 1
        result.latencies_ns.append(proposal.latency_ns)
        result.accepted += verdict.accepted_drafts
        self._note(request, verdict.committed_tokens)
        proposal.commit(verdict.accepted_drafts, verdict.committed_tokens)

    def _target_only(self, request: Request, round_number: int) -> None:
        """The round goes on from the committed prefix, with noise of the new generation."""
        weights, _ = self._target.weights(request.tokens[-2:].tolist())
        position = request.anchor + 1
        token = target_only(weights, request.seed, request.generation, round_number, position)
        self._note(request, [token])
        self.receiver.commit_target_only(request, round_number, [token])

    def _note(self, request: Request, tokens: Sequence[int]) -> None:
        context = request.tokens[-2:].tolist()
        for token in tokens:
            if self._pit is not None:
                self._pit.add(context, token)
            context = [context[-1], token]
        self.result.committed += len(tokens)
        self.result.tokens[request.request].extend(tokens)

    def _injected(self) -> list[tuple[str, int, int, int]]:
        """Asks the draft which faults it injected; a session must run for that."""
        for _ in range(5):
            try:
                _re_form(self.receiver)
                if self.receiver.engine.link is not None:
                    self.result.link = self.receiver.engine.link.kind
                self.receiver.send_message("options", {"done": True})
                body = self.receiver.wait_for_message("report", RECONNECT_S)
                return _parse_injected(body)
            except PeerFault as fault:
                if fault.reason is not Reason.TIMEOUT:
                    raise
        raise PeerFault(Reason.TIMEOUT, "the draft sent no account of its faults")

    def _account(self) -> None:
        result, totals = self.result, self.receiver.totals()
        result.bytes_ready = totals["bytes_ready"]
        result.slots_not_free = totals["slots_not_free"]
        result.counters = self.receiver.counters.snapshot()
        result.sessions = self.receiver.counters.get("sessions")
        if self._pit is not None:
            verdict = self._pit.result()
            result.p_value = verdict.p_value
            result.pit_tokens = verdict.n


def _parse_injected(body: object) -> list[tuple[str, int, int, int]]:
    injected = []
    assert isinstance(body, dict)
    kinds = {kind.value for kind in FaultKind}
    for line in body.get("injected", []):
        kind, session, slot, generation = str(line).split()
        if kind not in kinds:
            raise PeerFault(Reason.MALFORMED, f"an injected fault of kind {kind!r}")
        injected.append((kind, int(session), int(slot), int(generation)))
    return injected


def open_target(options: DemoOptions, listen: str = "tcp://127.0.0.1:0") -> Receiver:
    """The receiver of a demo, listening."""
    hello = make_hello(Role.RECEIVER, new_boot_nonce(), **options.hello_options())
    return open_receiver(EngineConfig(hello=hello, listen=listen, wait_for_peer=options.survives_links))


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
