"""What every port is: one attached process, its records taken within bounds, its own records kept in order, its end noticed.

Between the loop and the ports for drafts (`leading`), targets that face the leader (`receiving`) and members' targets
(`membership`). A client is not trusted: what breaks a rule is cut off, and `detach` gives back what it held. Knows no record
kinds. SPEC 4 and 9.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, Final

from ..counters import Histogram
from ..errors import PeerFault, Reason
from ..local import messages as m
from ..logs import logger
from .outgoing import Outgoing

if TYPE_CHECKING:
    from ..counters import Counters
    from ..local.attach import Attached
    from ..session.leader import Grant

RECORDS_A_LOOK: Final = 256  # of one client before everybody else is served again
BYTES_A_LOOK: Final = 1 << 20
OVERDUE_LOOK_NS: Final = 100_000_000
# Why a draft's process gives a STEP up: what it can find wrong with a STEP, with its own rows or with itself. Every other reason
# is what a daemon finds in frames, and would have daemons and targets count faults of links that nobody saw.
GIVEN_UP: Final = frozenset(
    (
        Reason.CANCELLED, Reason.TIMEOUT, Reason.OVERLOAD, Reason.PEER_LOST, Reason.COPY_FAILED, Reason.INVALID_WEIGHTS,
        Reason.MASS, Reason.ZERO_ENTRY, Reason.ID_RANGE, Reason.ID_ORDER, Reason.ID_DUPLICATE, Reason.REPRESENTATION,
        Reason.SUPPORT_BOUNDS, Reason.CONTEXT_MISMATCH, Reason.DRAW_MISMATCH, Reason.RANK_DISAGREE,
    )
)  # fmt: skip


def reason_given(code: int) -> Reason:
    """The reason in a process's FAIL; `cancelled` for one that no process has (`GIVEN_UP`) and for codes that are none."""
    reason = Reason.from_code(code) if 1 <= code <= len(Reason) else Reason.CANCELLED
    return reason if reason in GIVEN_UP else Reason.CANCELLED


class ClientPort(ABC):
    """Serves one process at a time. `poll` takes what it asks for, `tell` gives it what happened."""

    hears: int  # whose records: a direction of `messages`

    def __init__(self, role: str, counters: Counters) -> None:
        self.attached: Attached | None = None
        self.draining = False
        self.release_after_ns = 0  # how long a target may hold a ready proposal; 0: for ever
        self._overdue_look_ns = 0
        self.latency = Histogram()
        self.tail = Histogram()
        self.log: Any = logger(role=role)
        self.counters = counters
        self._outgoing: Outgoing | None = None
        self._said_bye = False

    # ---- what a port adds ---------------------------------------------------------------------------------------

    @abstractmethod
    def welcome(self, now_ns: int) -> None:
        """A process has just attached: it hears how things stand."""

    @abstractmethod
    def take(self, kind: int, fields: tuple[Any, ...], payload: memoryview, now_ns: int) -> None:
        """One record of it, shape judged. Raises `PeerFault` for what no honest one sends."""

    @abstractmethod
    def give_back(self) -> None:
        """The process is gone: frees what it held."""

    @abstractmethod
    def after_records(self) -> None:
        """Some records were taken: frames may wait to be flushed."""

    @abstractmethod
    def report(self, now_ns: int) -> None:
        """Queues what happened since the last call."""

    @property
    @abstractmethod
    def busy(self) -> bool:
        """Whether a drain must wait."""

    def late_ns(self, now_ns: int) -> int:
        """Proposals that were ready before this time and are still held are overdue; 0: look another time."""
        if not self.release_after_ns or now_ns < self._overdue_look_ns:
            return 0
        self._overdue_look_ns = now_ns + OVERDUE_LOOK_NS
        return now_ns - self.release_after_ns

    # ---- what they share ----------------------------------------------------------------------------------------

    def attach(self, attached: Attached, now_ns: int) -> None:
        """A process came."""
        self.attached = attached
        self._outgoing = Outgoing(attached)
        self._said_bye = False
        self.welcome(now_ns)
        self._outgoing.owed_most += self._outgoing.owed_bytes  # long histories of many requests: no fault of the process
        self.flush(now_ns)

    def detach(self, reason: Reason) -> None:
        """It is gone or cut off: nothing of it is kept."""
        attached, self.attached, self._outgoing = self.attached, None, None
        if attached is None:
            return
        attached.close()
        self.counters.add("clients_gone")
        if self._said_bye and reason is Reason.PEER_LOST:
            reason = Reason.CANCELLED  # it left in order
        else:
            self.counters.refuse(reason)
        log = self.log.info if reason is Reason.CANCELLED else self.log.warning
        log("client_gone", reason=reason.value, pid=attached.pid)
        self.give_back()

    def poll(self, now_ns: int) -> int:
        """Takes records. Returns how many."""
        attached = self.attached
        if attached is None:
            return 0
        taken = 0
        try:
            channel = attached.channel
            bytes_most = channel.bytes_in + BYTES_A_LOOK
            while taken < RECORDS_A_LOOK and channel.bytes_in < bytes_most and self.attached is attached:
                record = channel.receive()
                if record is None:
                    break
                taken += 1
                fields, payload = m.unpack(record[0], record[1], self.hears)
                if record[0] == m.BYE:
                    self._said_bye = True
                elif record[0] == m.PING:
                    self.send(m.PONG, fields[0])
                else:
                    self.take(record[0], fields, payload, now_ns)
        except PeerFault as fault:
            self.cut_off(fault)
            return taken
        if taken:
            self.after_records()
        return taken

    def cut_off(self, fault: PeerFault) -> None:
        """The process broke a rule."""
        self.counters.add("clients_cut_off")
        self.log.warning("client_cut_off", reason=fault.reason.value, detail=fault.detail)
        self.detach(fault.reason)

    def tell(self, now_ns: int) -> None:
        """Gives the process what happened since the last call, in order, and rings its doorbell once if it sleeps."""
        self.report(now_ns)
        self.flush(now_ns)

    def send(self, kind: int, *fields: int | float, payload: bytes = b"") -> None:
        """One record to the process, if there is one."""
        if self._outgoing is not None:
            self._outgoing.send(kind, *fields, payload=payload)

    def flush(self, now_ns: int) -> None:
        """Sends what waits; a process that takes nothing is cut off."""
        outgoing = self._outgoing
        if outgoing is None:
            return
        try:
            if not outgoing.flush(now_ns):
                self.cut_off(PeerFault(Reason.OVERLOAD, f"it takes nothing and is owed {outgoing.owed_bytes} bytes"))
        except PeerFault as fault:
            self.cut_off(fault)

    def drain(self, deadline_ms: int, now_ns: int) -> None:
        """Nothing new is begun; the process is told."""
        self.draining = True
        self.send(m.DRAINING, deadline_ms, 0)
        self.flush(now_ns)

    def part(self, now_ns: int) -> None:
        """The daemon ends: the process is told."""
        self.send(m.BYE, Reason.CANCELLED.code, 0)
        self.flush(now_ns)
        if self.attached is not None:
            self.attached.close()
            self.attached = self._outgoing = None


def step_fields(grant: Grant, target: int) -> tuple[int | float, ...]:
    """The fields of STEP_FOR_DRAFT."""
    return (
        grant.request,
        grant.seed,
        grant.target_context,
        grant.trace_id,
        grant.received_ns,
        grant.temperature,
        target,
        grant.slot,
        grant.generation,
        grant.request_generation,
        grant.round,
        grant.anchor,
        grant.depth,
        grant.representation,
        grant.support,
        grant.budget_us,
    )
