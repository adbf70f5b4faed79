"""What the daemon's tests share: a status as a daemon would give it."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from pp1q_transport.counters import Histogram
from pp1q_transport.daemon.status import Status


def make_status(**changes: object) -> Status:
    """A receiver's status with every part filled in."""
    latency, tail = Histogram(), Histogram()
    for duration_us in (900, 1000, 1100, 2000, 40_000):
        latency.add(duration_us * 1000)
        tail.add(duration_us * 100)
    status: dict[str, object] = {
        "role": "receiver", "name": "target@b", "version": "0.1.0", "pid": 1234, "uptime_s": 3725.5, "draining": False,
        "sessions": [
            {"peer": "draft-a", "up": True, "session": 7, "link": "tcp", "endpoint": "tcp://10.0.0.1:7801", "since_s": 61.0,
             "formed": 3, "ended": 2},
        ],
        "slots": {"FREE": 6, "GRANTED": 1, "READY": 0, "QUARANTINE": 1},
        "clients": [{"role": "receiver", "rank": 0, "pid": 77, "uid": 1000, "since_s": 60.0}],
        "group": {"size": 2, "rank": 0, "mode": "replicate", "epoch": 4, "open": True, "ranks_up": 2},
        "breakers": [{"peer": "draft-a", "state": "closed", "opened": 1}],
        "totals": {"sessions": 3}, "reasons": {"timeout": 3, "peer_lost": 8, "generation_stale": 2},
        "discards": {"timeout": 3, "peer_lost": 8}, "ready": 5, "discarded": 11, "rows": 25, "bytes_ready": 2_585_600,
        "latency": latency.snapshot(), "tail": tail.snapshot(), "loops": 99, "last_loop_age_s": 0.001,
    }  # fmt: skip
    return cast("Status", status | changes)


@pytest.fixture(name="make_status")
def _make_status() -> Callable[..., Status]:
    return make_status
