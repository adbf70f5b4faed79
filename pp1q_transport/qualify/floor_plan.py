"""What one floor measurement is: its ends, its sizes, its outcome. Between `floors`, which runs it, and the benchmark.

Plain values that check themselves; opens nothing and measures nothing. SPEC section 9 (`floors`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Final, Literal, NamedTuple

from ..errors import ConfigError, LocalMisuse
from .stats import GB, Nanoseconds

Role = Literal["leader", "receiver"]
Idle = Literal["spin", "block"]
_ROLES: Final = ("leader", "receiver")
_IDLES: Final = ("spin", "block")


class FloorTest(IntEnum):
    """The tests; the number is what the two ends compare before each of them."""

    HELLO = 0
    SOCKET_RTT = 1
    SOCKET_GBPS = 2
    ZMQ_RTT = 3
    ZMQ_GBPS = 4


class FloorAddress(NamedTuple):
    """Where a `FloorListener` waits, to be sent to the other side as a list. `token` is hexadecimal."""

    host: str
    tcp_port: int
    zmq_port: int
    token: str


@dataclass(frozen=True, slots=True)
class FloorConfig:
    """One end. Roles are those of the link: the leader sends payload, the receiver asks for it and measures.

    `buffer_bytes` is SO_SNDBUF and SO_RCVBUF of every socket (None: the kernel's autotuning); `timeout_s` bounds every
    wait without progress. Raises `ConfigError`.
    """

    role: Role
    idle: Idle = "spin"
    buffer_bytes: int | None = None
    timeout_s: float = 10.0

    def __post_init__(self) -> None:
        for name, value, allowed in (("role", self.role, _ROLES), ("idle", self.idle, _IDLES)):
            if value not in allowed:
                raise ConfigError(f"floors: {name} must be one of {', '.join(allowed)}, not {value!r}")
        if self.buffer_bytes is not None and not 0 < self.buffer_bytes < 1 << 31:
            raise ConfigError(f"floors: buffer_bytes must be a positive 31-bit number or None, not {self.buffer_bytes}")
        if not 0 < self.timeout_s <= 3600:
            raise ConfigError(f"floors: timeout_s must lie in (0, 3600], not {self.timeout_s}")


@dataclass(frozen=True, slots=True)
class FloorPlan:
    """One test. Both ends must run an equal plan; `slots` areas of `size` bytes are used in turn, as the link's are.

    `request_bytes` is what the receiver sends first in a round-trip test (the link's STEP), `window` how many messages
    may be unacknowledged in a goodput test. Raises `LocalMisuse` for a number below 1.
    """

    test: FloorTest
    size: int
    count: int
    window: int = 1
    request_bytes: int = 8
    slots: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "count", "window", "request_bytes", "slots"):
            if not 1 <= getattr(self, name) < 1 << 31:
                raise LocalMisuse(f"floors: {name} must be a positive 31-bit number, not {getattr(self, name)}")

    def __str__(self) -> str:
        return (
            f"{self.test.name.lower()}(size={self.size}, count={self.count}, window={self.window}, "
            f"request_bytes={self.request_bytes}, slots={self.slots})"
        )


@dataclass(frozen=True, slots=True)
class FloorResult:
    """What one end saw. The receiver's is the one to report.

    `samples_ns` (uint64 [count]) are the round trips, on the receiver of a round-trip test only. `elapsed_ns` is, in a
    goodput test, from the go-ahead to the last byte landed (receiver) or to the last acknowledgement (leader).
    """

    plan: FloorPlan
    elapsed_ns: int
    cpu_s: float
    samples_ns: Nanoseconds | None = None

    @property
    def goodput_GBps(self) -> float:
        """10^9 bytes of payload a second."""
        return self.plan.size * self.plan.count / GB / (self.elapsed_ns / 1e9)

    @property
    def cpu_s_per_GB(self) -> float:
        """CPU seconds of this end for each 10^9 bytes of payload."""
        return self.cpu_s * GB / (self.plan.size * self.plan.count)
