"""Priming: a fresh receiver in the state that a capture's record says.

Between `reading` and `replay`. Checks every number before it is used: a capture may come from anybody. Makes no frame and reads
no file. SPEC sections 2 and 4.
"""

from __future__ import annotations

from typing import Any, Final

from ..counters import Counters
from ..errors import LocalMisuse, PeerFault
from ..session.agreed import terms_of
from ..session.hello import Hello, Role, parse_hello
from ..session.landing import LandingSession
from ..session.negotiate import Agreement
from ..session.receiver import ReceiverSession
from ..session.requests import RequestTable
from ..session.shards import range_of
from ..session.slots import LIVE, STATE_NAMES, Slot, SlotTable
from ..session.terms import SessionTerms
from .pcapng import CaptureError
from .snapshot import FORMAT, NUMBERS

MEMORY_MOST: Final = 1 << 31
_U64: Final = (1 << 64) - 1
_BITS: Final = {
    "request": 64, "seed": 64, "context": 64, "generation": 32, "request_generation": 32, "round": 32, "anchor": 32,
    "rows_done": 32, "consumers": 31, "reply_bytes": 62,
}  # fmt: skip


class State:
    """What a state record says, checked. `known` are the seeds of open requests."""

    def __init__(self, body: dict[str, object]) -> None:
        if body.get("format") != FORMAT:
            raise CaptureError(f"a state of format {body.get('format')!r}; this build knows {FORMAT}")
        if body.get("redacted") is not False:
            raise CaptureError("this capture is redacted (no tokens, no q): it can be looked at, not replayed")
        ours, theirs = _hello(body.get("ours")), _hello(body.get("theirs"))
        self.side = ours.role
        self.peer = theirs.role
        self.group_size = ours.group_size
        self.session = whole(body, "session", 64)
        # The link proof is skipped, so its secret and transcript, which no capture holds, are not needed.
        self.agreement = Agreement(
            session=self.session, secret=b"", ours=ours, theirs=theirs, data="", transcript=b"", prove_by_ns=0
        )
        self.known = dict(_requests(body))
        self.slots = _list(body, "slots")
        self.counted = parse_counted(body)
        self.account = whole(body, "account", 31)
        self.group = _group(body)
        """The rank's group as it stood: of its links, and of its link to the leader. None at a leader, and in a group of one."""

    @property
    def replayable(self) -> bool:
        """Whether rows go from a leader to a receiver here."""
        return {self.side, self.peer} == {Role.LEADER, Role.RECEIVER}


def terms_in(state: State) -> SessionTerms:
    """The terms that its HELLOs agree on. Raises `CaptureError`."""
    try:
        return terms_of(state.agreement)
    except LocalMisuse as error:
        raise CaptureError(f"a state whose terms can't be: {error}") from None


def own_terms(terms: SessionTerms, mode: str, size: int, rank: int) -> SessionTerms:
    """The terms of a rank's link to the leader, by those of its link to rank 0: for the sizes of its slots."""
    first_id, end_id = range_of(mode, terms.vocab_size, size, rank)
    return SessionTerms(
        terms.session, 0, 0, terms.vocab_size, terms.depth, terms.support, terms.max_slots, terms.dense, terms.sparse,
        first_id=first_id, end_id=end_id,
    )  # fmt: skip


def fresh_receiver(state: State, counters: Counters, now_ns: int, taken: int = 0) -> ReceiverSession:
    """A receiver session as the live one stood at `now_ns` (capture time). What a leader's capture leaves unknown, the rows of
    proposals that were open when it began, is taken as never granted. `taken`: bytes that the slots of other sessions have.
    Raises `CaptureError`."""
    terms = terms_in(state)
    try:
        geometry = terms.geometry()
    except LocalMisuse as error:
        raise CaptureError(f"a state whose terms can't be: {error}") from None
    if taken + geometry.total_bytes > MEMORY_MOST:
        raise CaptureError(f"slots of {taken + geometry.total_bytes} bytes; a replay takes {MEMORY_MOST} at most")
    table = SlotTable(geometry)
    session = ReceiverSession(terms, table, memoryview(bytearray(geometry.total_bytes)), RequestTable(), counters)
    prime_slots(session, state, now_ns)
    return session


def prime_slots(session: LandingSession, state: State, now_ns: int) -> None:
    """Brings the slots of a session to where the live ones stood. Raises `CaptureError`."""
    for kept in state.slots:
        _prime(session, session.terms, kept, now_ns, seen=state.side is not Role.LEADER)


def _prime(session: LandingSession, terms: SessionTerms, kept: object, now_ns: int, seen: bool) -> None:
    if not isinstance(kept, dict):
        raise CaptureError("a slot that is no JSON object")
    index = whole(kept, "index", 16)
    if index >= terms.max_slots:
        raise CaptureError(f"slot {index} of {terms.max_slots}")
    slot = session.table.slots[index]
    slot.generation = whole(kept, "generation", 32)
    if not seen:
        return
    values = {name: whole(kept, name, _BITS.get(name, 16)) for name in NUMBERS}
    state = values["state"]
    live = state in LIVE
    if state >= len(STATE_NAMES) or (live and not 1 <= values["depth"] <= terms.depth) or values["representation"] > 2:
        raise CaptureError(f"slot {index} in a state that can't be")
    for name in NUMBERS:
        setattr(slot, name, values[name])
    slot.decided, slot.fenced = kept.get("decided") is True, kept.get("fenced") is True
    _fill(slot.digests, kept, "digests")
    _fill(slot.masses, kept, "masses")
    left_ns = kept.get("budget_left_ns")
    if type(left_ns) is not int or abs(left_ns) >= 1 << 62:
        raise CaptureError(f"slot {index} with a budget that can't be")
    slot.deadline_ns = now_ns + left_ns
    if live and "meta" in kept:
        meta = bytearray(8 * slot.depth)
        _fill(meta, kept, "meta")
        memoryview(session.memory)[slot.meta_at : slot.meta_at + len(meta)] = meta
    if live and _has_budget(session):
        session.watchdog.arm(index, slot.deadline_ns)


def _has_budget(session: LandingSession) -> bool:
    """Whether budgets run at this rank: rank 0's alone decide."""
    return session.table.rank == 0


def grant(session: ReceiverSession, slot: Slot, deadline_ns: int) -> None:
    """Arms the budget of a slot that a STEP grants."""
    slot.deadline_ns = deadline_ns
    slot.consumers = 1
    session.watchdog.arm(slot.index, deadline_ns)


def parse_counted(body: dict[str, object]) -> tuple[dict[str, int], dict[str, int], int]:
    """(reasons, discards, ready) that the live run had counted. Raises `CaptureError`."""
    said = body.get("counted")
    if not isinstance(said, dict):
        raise CaptureError("a state without what the live run had counted")
    maps = []
    for name in ("reasons", "discards"):
        found = said.get(name)
        if not isinstance(found, dict) or len(found) > 256:
            raise CaptureError(f"counted {name} that can't be")
        maps.append({key: whole(found, key, 62) for key in found})
    return maps[0], maps[1], whole(said, "ready", 62)


def whole(body: dict[str, Any], name: str, bits: int) -> int:
    """An unsigned integer of so many bits. Raises `CaptureError`."""
    value = body.get(name)
    if type(value) is not int or not 0 <= value < 1 << bits:
        raise CaptureError(f"{name} {str(value)[:40]!r} in a state is no integer of {bits} bits")
    return value


def _hello(said: object) -> Hello:
    if not isinstance(said, dict):
        raise CaptureError("a state without its HELLOs")
    try:
        return parse_hello({**said, "link_nonce": bytes.fromhex(said.get("link_nonce", ""))})
    except (PeerFault, ValueError, TypeError) as error:
        raise CaptureError(f"a state whose HELLO can't be: {str(error)[:200]}") from None


def _group(body: dict[str, object]) -> dict[str, Any] | None:
    found = body.get("group")
    if found is not None and not isinstance(found, dict):
        raise CaptureError("the state of a group that is no JSON object")
    return found


def _list(body: dict[str, object], name: str) -> list[object]:
    found = body.get(name)
    if not isinstance(found, list) or len(found) > 65_536:
        raise CaptureError(f"a state without its {name}")
    return found


def _requests(body: dict[str, object]) -> list[tuple[int, int]]:
    pairs = []
    for entry in _list(body, "requests"):
        if not isinstance(entry, list) or len(entry) != 3 or any(type(x) is not int or not 0 <= x <= _U64 for x in entry):
            raise CaptureError("a request that can't be")
        pairs.append((entry[0], entry[1]))
    return pairs


def _fill(target: Any, kept: dict[str, Any], name: str) -> None:
    try:
        value = bytes.fromhex(kept.get(name, ""))
    except (ValueError, TypeError):
        raise CaptureError(f"{name} that are no hexadecimal bytes") from None
    if len(value) != len(target):
        raise CaptureError(f"{name} of a wrong size")
    memoryview(target)[:] = value
