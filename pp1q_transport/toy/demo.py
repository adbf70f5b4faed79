"""The demo's two loops: a toy draft behind a leader, a toy target behind a receiver, and the account of what happened.

Between the client API and `pp1q demo`. Moves no bytes and prints nothing; both loops run in processes of their own, and what the
target needs of the draft's account (which faults were injected) comes over the control plane. SPEC sections 6 and 9.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from ..client import EngineConfig, Leader, Receiver, Role, make_hello, new_boot_nonce, open_leader, open_receiver
from ..errors import PeerFault, Reason
from ..links.faulty import FaultInjector, FaultKind, FaultRates
from ..links.rdma_config import options_for
from ..verify import verify_chain
from .models import ToyDraft
from .rounds import RECONNECT_S, DemoResult, TargetLoop, draft_rows, re_form

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..capture.recorder import Capture
    from ..session.outbox import Outbox
    from ..verify import Verdict

BUDGET_US: Final = 2_000_000
LATE_BUDGET_US: Final = 150_000
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
    rdma: tuple[str, ...] = ()  # settings of that kind, "name=value"
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
        hello=hello,
        connect=connect,
        wrap_outbox=wrap if injector else None,
        wait_for_peer=options.survives_links,
        rdma=options_for(options.link, options.rdma),
    )
    draft = ToyDraft(options.seed, options.vocab_size)
    with open_leader(config) as leader:
        leader.wait_for_peer()
        reported = False
        while True:
            if not leader.up:
                if reported or leader.parted:
                    return
                re_form(leader)
            step = leader.next_step()
            if step is not None:
                draft_rows(step, draft)
            elif leader.engine.inbox:
                leader.engine.inbox.clear()
                _report_faults(leader, injector)
                reported = True


def _report_faults(leader: Leader, injector: FaultInjector | None) -> None:
    done = injector.injected if injector is not None else []
    body = {
        "injected": [f"{one.kind.value} {one.session} {one.slot} {one.slot_generation}" for one in done],
    }
    leader.send_message("report", body)


# ---- the target process ---------------------------------------------------------------------------------------------


class DemoTarget(TargetLoop):
    """The embedded target of a demo: its rounds, then the draft's account of the faults it injected."""

    def __init__(
        self,
        options: DemoOptions,
        receiver: Receiver,
        progress: Callable[[DemoResult], None] | None = None,
        verifier: Callable[..., Verdict] = verify_chain,
    ) -> None:
        super().__init__(options, receiver, progress, verifier)
        self.receiver = receiver

    def run(self) -> DemoResult:
        """All rounds, then the draft's account and the verdict on the distribution."""
        requests = self.rounds()
        self.result.injected = self._injected()
        for request in requests:
            self.receiver.close_request(request)
        self._account()
        return self.result

    def _injected(self) -> list[tuple[str, int, int, int]]:
        """Asks the draft which faults it injected; a session must run for that."""
        for _ in range(5):
            try:
                re_form(self.receiver)
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
        self.verdict()


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


def open_target(options: DemoOptions, listen: str = "tcp://127.0.0.1:0", capture: Capture | None = None) -> Receiver:
    """The receiver of a demo, listening; `capture` takes what it hears and says."""
    hello = make_hello(Role.RECEIVER, new_boot_nonce(), **options.hello_options())
    rdma = options_for(options.link, options.rdma)
    return open_receiver(
        EngineConfig(hello=hello, listen=listen, wait_for_peer=options.survives_links, rdma=rdma, capture=capture)
    )
