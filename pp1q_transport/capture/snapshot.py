"""Where a session stands, as a map that a fresh receiver can be primed from: HELLOs, nonces, open requests, slots, counts.

Between `recorder`, which asks for it at a capture's start, and `priming`, which reads it. Holds no secret: what a link is proven
with is no part of it. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..session import hello as hello_fields
from ..session import slots as st
from ..session.landing import LandingSession
from ..session.leader import DRAFTING, LeaderSession
from .group_state import group_state

if TYPE_CHECKING:
    from ..counters import Counters
    from ..session.hello import Hello
    from ..session.machine import SessionMachine
    from ..session.negotiate import Agreement
    from ..session.slots import Slot

FORMAT = 1
NUMBERS = (
    "index", "state", "generation", "request", "request_generation", "round", "anchor", "depth", "seed", "context",
    "representation", "support", "rows_done", "reply_bytes", "consumers", "reason",
)  # fmt: skip
"""What is kept of a slot as it stands."""


def session_state(agreement: Agreement, session: SessionMachine, now_ns: int, redact: bool) -> dict[str, object]:
    """The state of a session at `now_ns` (its monotonic clock)."""
    return {
        "format": FORMAT,
        "redacted": redact,
        "side": agreement.ours.role.value,
        "session": agreement.session,
        "dissect": {"session": f"{agreement.session:016x}", "leader_nonce": f"{session.terms.leader_nonce:016x}"},
        "ours": _hello(agreement.ours),
        "theirs": _hello(agreement.theirs),
        "requests": [
            [request.request, 0 if redact else request.seed, request.generation] for request in session.requests.requests.values()
        ],
        "slots": _slots(session, now_ns, redact),
        "group": None if redact else group_state(session),
    }


def counted(counters: Counters, ready: int) -> dict[str, object]:
    """What a live run has counted so far."""
    return {"reasons": dict(counters.reasons), "discards": dict(counters.discards), "ready": ready}


def ready_of(session: SessionMachine) -> int:
    """How many proposals became ready in this session, as far as it is one's to say."""
    return session.ready if isinstance(session, LandingSession) else 0


def _hello(hello: Hello) -> dict[str, object]:
    return {name: value.hex() if isinstance(value, bytes) else value for name, value in hello_fields.to_map(hello).items()}


def _slots(session: SessionMachine, now_ns: int, redact: bool) -> list[dict[str, object]]:
    if isinstance(session, LandingSession):
        return [_slot(session, slot, now_ns, redact) for slot in session.table.slots if slot.generation]
    if isinstance(session, LeaderSession):  # it sees no slot: what it may still answer into
        return [
            {"index": grant.slot, "generation": grant.generation, "open": grant.state == DRAFTING}
            for grant in session.grants
            if grant.generation
        ]
    return []


def _slot(session: LandingSession, slot: Slot, now_ns: int, redact: bool) -> dict[str, object]:
    kept: dict[str, object] = {name: getattr(slot, name) for name in NUMBERS}
    kept |= {"decided": slot.decided, "fenced": slot.fenced, "open": slot.state in st.LIVE}
    kept["budget_left_ns"] = slot.deadline_ns - now_ns
    if redact:
        kept |= {"seed": 0, "context": 0}
    else:
        meta = bytes(memoryview(session.memory)[slot.meta_at : slot.meta_at + 8 * slot.depth])
        kept |= {"digests": bytes(slot.digests).hex(), "masses": bytes(slot.masses).hex(), "meta": meta.hex()}
    return kept
