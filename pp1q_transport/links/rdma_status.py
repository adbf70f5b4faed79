"""What verbs say when something went wrong, in words: completion statuses, queue-pair states, asynchronous events.

Between the rdma link, which meets the numbers, and whoever reads a log. Imports no verbs library and does no I/O; the numbers are
those of libibverbs' interface, which never change. The table of docs/rdma.md is this one. SPEC section 4.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from ..errors import Reason


@dataclass(frozen=True, slots=True)
class Problem:
    """`reason`: what the link ends with. `name`: the verbs' own. `happened` and `check`: what that means, and where to look."""

    reason: Reason
    name: str
    happened: str
    check: str

    @property
    def words(self) -> str:
        """One line for logs and errors."""
        return f"{self.name}: {self.happened}; check {self.check}"


@dataclass(frozen=True, slots=True)
class Event:
    """An asynchronous event. `ends`: whether a link that it concerns can't go on; `words`: what it says."""

    name: str
    ends: bool
    words: str


_FAULTY: Final = "the versions of both sides and of the device's firmware: this is a fault in one of them"
_UNUSED: Final = "the versions of both sides: this link never asks for what this status is about"

# SUCCESS (0) is no problem and has no row.
PROBLEMS: Final[dict[int, Problem]] = {
    1: Problem(
        Reason.LENGTH_BOUNDS, "LOC_LEN_ERR",
        "the peer sent a message that carries more than a row's notice, or one beyond the port's limit",
        "the version of the peer: no honest one does this",
    ),
    2: Problem(Reason.LINK_ERROR, "LOC_QP_OP_ERR", "this host's device found a request at odds with its queue pair", _FAULTY),
    3: Problem(Reason.LINK_ERROR, "LOC_EEC_OP_ERR", "a datagram context of this host was inconsistent", _UNUSED),
    4: Problem(
        Reason.LINK_ERROR, "LOC_PROT_ERR", "a request named memory of this host that is not registered, or no longer",
        "that nothing else in this process unmaps or deregisters slot memory, and that it did not fork",
    ),
    5: Problem(
        Reason.LINK_ERROR, "WR_FLUSH_ERR", "the queue pair was in error already, and this request was never carried out",
        "the first error of this link in the log, and the peer's log: the peer may have ended the link",
    ),
    6: Problem(Reason.LINK_ERROR, "MW_BIND_ERR", "a memory window could not be bound", _UNUSED),
    7: Problem(Reason.LINK_ERROR, "BAD_RESP_ERR", "the peer's device answered with a packet that makes no sense", _FAULTY),
    8: Problem(
        Reason.LINK_ERROR, "LOC_ACCESS_ERR", "a write of the peer met memory of this host that it may not write to",
        "the peer's log for `timeout`: a row that comes after its STEP is over meets a revoked key",
    ),
    9: Problem(
        Reason.LINK_ERROR, "REM_INV_REQ_ERR",
        "the peer's device refused a write as malformed or too long for where it was to land",
        "that both sides run one version and state equal sizes",
    ),
    10: Problem(
        Reason.LINK_ERROR, "REM_ACCESS_ERR",
        "the key of the landing memory was revoked before the row arrived, or never covered it",
        "`timeout` and `cancelled` at the receiver: raise `budget_us` or find what is slow; without any, a faulty peer",
    ),
    11: Problem(
        Reason.LINK_ERROR, "REM_OP_ERR", "the peer's device could not carry out a write that it had accepted",
        "the peer's kernel log and its device's health",
    ),
    12: Problem(
        Reason.PEER_LOST, "RETRY_EXC_ERR", "no acknowledgement came, however often this was sent",
        "that the peer's process and host are up, the cable and switch port, both GID indexes (one subnet, one RoCE version and "
        "address family), firewalls on UDP port 4791, equal MTU along the path, and PFC or ECN for loss under load",
    ),
    13: Problem(
        Reason.OVERLOAD, "RNR_RETRY_EXC_ERR", "the peer had no receive posted, however often this was sent",
        "that the peer's process is served (not stopped, not starved of its core), and that both sides state one queue depth",
    ),
    14: Problem(Reason.LINK_ERROR, "LOC_RDD_VIOL_ERR", "a datagram domain of this host did not match", _UNUSED),
    15: Problem(Reason.LINK_ERROR, "REM_INV_RD_REQ_ERR", "the peer refused a datagram request", _UNUSED),
    16: Problem(
        Reason.PEER_LOST, "REM_ABORT_ERR", "the peer gave up an operation that was under way",
        "the peer's log: its process or device went away"
    ),
    17: Problem(Reason.LINK_ERROR, "INV_EECN_ERR", "a datagram context has no such number", _UNUSED),
    18: Problem(Reason.LINK_ERROR, "INV_EEC_STATE_ERR", "a datagram context was in no state for this", _UNUSED),
    19: Problem(
        Reason.LINK_ERROR, "FATAL_ERR", "the device failed for good",
        "the kernel log for the device's driver; it needs a reset, and the link forms anew after it",
    ),
    20: Problem(
        Reason.PEER_LOST, "RESP_TIMEOUT_ERR", "the peer's answer did not come in time",
        "that the peer's host is up, and the cable and switch"
    ),
    21: Problem(
        Reason.LINK_ERROR, "GENERAL_ERR", "the device reports an error that has no other name",
        "the vendor's code in the log, the kernel log and the device's firmware version",
    ),
    22: Problem(Reason.LINK_ERROR, "TM_ERR", "tag matching failed", _UNUSED),
    23: Problem(Reason.LINK_ERROR, "TM_RNDV_INCOMPLETE", "a matched message did not arrive whole", _UNUSED),
}  # fmt: skip


def explain(status: int) -> Problem:
    """The problem that a completion's status stands for; one in general words for a number that libibverbs does not name.

    Raises `ValueError` for SUCCESS (0): asking why something went well is a bug.
    """
    if status == 0:
        raise ValueError("status 0 is SUCCESS")
    known = PROBLEMS.get(status)
    if known is not None:
        return known
    return Problem(Reason.LINK_ERROR, f"STATUS_{status}", "a status this version does not know", "the device's manual")


QP_STATES: Final[dict[int, str]] = {
    0: "RESET",
    1: "INIT",
    2: "RTR",
    3: "RTS",
    4: "SQD",
    5: "SQE",
    6: "ERR",
    7: "UNKNOWN",
}


def state_name(state: int) -> str:
    """A queue pair's state as verbs name it; "STATE_n" for a number that has none."""
    return QP_STATES.get(state, f"STATE_{state}")


EVENTS: Final[dict[int, Event]] = {
    0: Event("CQ_ERR", True, "a completion queue overran: completions are lost"),
    1: Event("QP_FATAL", True, "a queue pair failed in this host's device"),
    2: Event("QP_REQ_ERR", True, "the peer sent a request that this queue pair can't take"),
    3: Event("QP_ACCESS_ERR", True, "the peer wrote to memory that it may not write to"),
    4: Event("COMM_EST", False, "the first packet came before this side was ready to send"),
    5: Event("SQ_DRAINED", False, "a send queue ran empty"),
    6: Event("PATH_MIG", False, "the queue pair moved to its other path"),
    7: Event("PATH_MIG_ERR", False, "the queue pair could not move to its other path"),
    8: Event("DEVICE_FATAL", True, "the device failed for good and needs a reset"),
    9: Event("PORT_ACTIVE", False, "the port came up"),
    10: Event("PORT_ERR", False, "the port went down: check the cable and the switch port"),
    11: Event("LID_CHANGE", False, "the subnet manager gave the port another address"),
    12: Event("PKEY_CHANGE", False, "the port's partition table changed"),
    13: Event("SM_CHANGE", False, "the subnet has another manager"),
    14: Event("SRQ_ERR", True, "a shared receive queue failed"),
    15: Event("SRQ_LIMIT_REACHED", False, "a shared receive queue ran low"),
    16: Event("QP_LAST_WQE_REACHED", False, "the last request of a queue pair in error was given back"),
    17: Event("CLIENT_REREGISTER", False, "the subnet manager asks for registrations anew"),
    18: Event("GID_CHANGE", False, "the port's GID table changed: an address was added or removed"),
    19: Event("WQ_FATAL", True, "a work queue failed"),
}


def event_words(number: int) -> str:
    """One line for the log about an asynchronous event."""
    known = EVENTS.get(number)
    return f"{known.name}: {known.words}" if known is not None else f"event {number}, which this version does not know"
