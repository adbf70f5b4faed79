"""What both attached sides make of their daemon's end, with a daemon that only seems to be there."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import cast

import pytest

from pp1q_transport.client.attached import AttachedSide
from pp1q_transport.errors import Reason
from pp1q_transport.local import messages as m
from pp1q_transport.local.attach import Attachment, Role

pytestmark = pytest.mark.timeout(30)


class Side(AttachedSide):
    """A side that notes what it hears; its daemon is what the test says."""

    role = Role.RECEIVER_TARGET
    hears = m.DAEMON_TO_TARGET

    def __init__(self) -> None:
        self.said: list[tuple[int, memoryview]] = []
        self.speaks_as_it_ends = False
        self.looks = 0
        self.ended = False
        self.heard: list[int] = []
        super().__init__("nowhere", 0, "block", 1)

    @property
    def up(self) -> bool:
        return self.attached

    def _join(self, timeout_s: float = 0.0) -> None:
        channel = SimpleNamespace(receive=lambda: self.said.pop(0) if self.said else None)
        attachment = SimpleNamespace(channel=channel, gone=self._gone, close=lambda: None)
        self._attachment = cast("Attachment", attachment)

    def _gone(self) -> bool:
        self.looks += 1
        if self.speaks_as_it_ends:
            self.said.append((m.DOWN, memoryview(m.pack(m.DOWN, 1, 0))))
        return self.ended

    def _joined(self, attachment: Attachment) -> None: ...

    def _after_join(self) -> None: ...

    def _parted(self) -> None: ...

    def _record(self, kind: int, fields: tuple[int, ...], payload: memoryview) -> None:
        self.heard.append(kind)


def test_who_only_polls_notices_that_its_daemon_is_gone() -> None:
    """A collective that calls nothing but `poll` would wait for ever for a rank that is dead."""
    side = Side()
    side.poll()
    assert side.up
    side.ended = True
    stop = time.monotonic() + 10.0
    while side.up:
        assert time.monotonic() < stop, "never noticed"
        side.poll()
    assert side.counters.of(Reason.PEER_LOST) == 1


def test_what_the_daemon_said_before_it_went_is_heard() -> None:
    """It speaks and ends between the look into the ring and the look at the socket."""
    side = Side()
    side.speaks_as_it_ends = side.ended = True
    assert side.poll() == 1
    assert side.heard == [m.DOWN]
    assert not side.attached


def test_a_poll_costs_no_look_at_the_socket_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now_ns = [5_000_000_000]
    monkeypatch.setattr("pp1q_transport.client.attached.monotonic_ns", lambda: now_ns[0])
    side = Side()
    for _ in range(1000):
        side.poll()
    assert side.looks == 1
    now_ns[0] += 1_000_000
    side.poll()
    assert side.looks == 2
