"""How long a daemon may be silent: only what its process waited counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest

from pp1q_transport.client import attached_ticket
from pp1q_transport.client.attached_ticket import GRACE_NS, LOOK_NS, Patience

if TYPE_CHECKING:
    from pp1q_transport.client.attached_target import AttachedReceiver


class Silent:
    """A receiver whose daemon says nothing; `pause_ns` is how much longer than asked a look takes."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_ns = self.looks = self.pause_ns = 0
        monkeypatch.setattr(attached_ticket, "monotonic_ns", lambda: self.now_ns)

    def serve(self, until_ns: int) -> None:
        self.looks += 1
        self.now_ns = max(self.now_ns, until_ns) + self.pause_ns


def test_a_silent_daemon_is_given_up_after_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent(monkeypatch)
    patience = Patience(cast("AttachedReceiver", silent), GRACE_NS)
    while patience.serve():
        assert silent.now_ns < GRACE_NS
    assert silent.now_ns == GRACE_NS


def test_a_pause_of_the_process_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    silent = Silent(monkeypatch)
    silent.pause_ns = 10 * GRACE_NS
    patience = Patience(cast("AttachedReceiver", silent), GRACE_NS)
    assert patience.serve()
    silent.pause_ns = 0
    while patience.serve():
        pass
    assert silent.looks == GRACE_NS // LOOK_NS


def test_one_look_is_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that was stopped until past the time of its STEP."""
    silent = Silent(monkeypatch)
    patience = Patience(cast("AttachedReceiver", silent), -1)
    assert not patience.serve()
    assert silent.now_ns == LOOK_NS
