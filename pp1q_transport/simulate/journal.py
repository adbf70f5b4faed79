"""The account of a run: every event into one digest, every fault to exactly one outcome, every round to one end.

Between the world, which tells what happens, and whoever asks afterwards. Decides nothing; a broken rule is a `Violation`.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import TYPE_CHECKING, Final

from .faults import NEVER_HARMLESS

if TYPE_CHECKING:
    from collections.abc import Hashable

    from .faults import Fault, FaultKind

HARMLESS: Final = "harmless"
SUPERSEDED: Final = "superseded"
NOT_REACHED: Final = "not reached"
ONE_OUTCOME: Final = "every fault ends in exactly one outcome"
_LINES_A_HASH: Final = 512


class Violation(AssertionError):
    """Something that must always hold did not. `rule` names it."""

    def __init__(self, rule: str, what: str) -> None:
        super().__init__(f"{rule}: {what}")
        self.rule = rule


def require(holds: object, rule: str, what: str) -> None:
    """Raises `Violation` unless `holds`. Where the text costs something, test first."""
    if not holds:
        raise Violation(rule, what)


class Journal:
    """The event log. Its digest is one run's identity; the lines themselves are kept only on request."""

    def __init__(self, keep: bool = False) -> None:
        self.kept: list[str] | None = [] if keep else None
        self.count = 0
        self._hash = hashlib.blake2b(digest_size=16)
        self._fresh: list[str] = []

    def note(self, line: str) -> None:
        """One event."""
        self._fresh.append(line)
        if len(self._fresh) >= _LINES_A_HASH:
            self._fold()

    def _fold(self) -> None:
        self._hash.update("\n".join(self._fresh).encode())
        self._hash.update(b"\n")
        self.count += len(self._fresh)
        if self.kept is not None:
            self.kept += self._fresh
        self._fresh.clear()

    def digest(self) -> str:
        """BLAKE2b-128 over all events so far, in hex."""
        if self._fresh:
            self._fold()
        return self._hash.hexdigest()


class Injection:
    """One fault that happened: what it touched, and how it ended."""

    __slots__ = ("begun", "fault", "outcome")

    def __init__(self, fault: Fault) -> None:
        self.fault = fault
        self.begun = False
        self.outcome: str | None = None


class Outcomes:
    """Every fault of a run, and the keys (a proposal, a request, a link) whose end is a fault's outcome."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.all: list[Injection] = []
        self._watched: dict[Hashable, list[Injection]] = {}

    def arm(self, fault: Fault) -> Injection:
        """It is about to happen: when the frame, fence or answer comes that it waits for."""
        injection = Injection(fault)
        self.all.append(injection)
        return injection

    def begin(self, injection: Injection) -> None:
        """It happens now."""
        require(not injection.begun, ONE_OUTCOME, f"{injection.fault} happens twice")
        injection.begun = True
        self.journal.note(f"injected {injection.fault}")

    def end(self, injection: Injection, outcome: str) -> None:
        """Its one outcome: a reason, superseded or harmless."""
        if injection.outcome is not None:
            raise Violation(ONE_OUTCOME, f"{injection.fault} ends as {injection.outcome} and as {outcome}")
        if not injection.begun:
            self.begin(injection)
        injection.outcome = outcome
        self.journal.note(f"fault {injection.fault.number} ends: {outcome}")

    def watch(self, key: Hashable, injection: Injection) -> None:
        """Whatever ends `key` first ends the fault."""
        self._watched.setdefault(key, []).append(injection)

    def over(self, key: Hashable, outcome: str, causes: frozenset[FaultKind] | None = None) -> None:
        """`key` has ended. `causes`: the kinds that this can be the doing of; other faults are superseded by it."""
        for injection in self._watched.pop(key, ()):
            if injection.outcome is None:
                self.end(injection, outcome if causes is None or injection.fault.kind in causes else SUPERSEDED)

    def close(self) -> Counter[tuple[str, str]]:
        """The run is over and at rest: what nothing has come of was harmless, if it can be. Returns counts by (kind, outcome)."""
        totals: Counter[tuple[str, str]] = Counter()
        for injection in self.all:
            if injection.begun and injection.outcome is None:
                kind = injection.fault.kind
                require(kind not in NEVER_HARMLESS, ONE_OUTCOME, f"nothing has come of {injection.fault}")
                self.end(injection, HARMLESS)
            totals[injection.fault.kind.value, injection.outcome or NOT_REACHED] += 1
        return totals
