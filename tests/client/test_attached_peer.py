"""A draft's rank above 0 against a daemon that the test plays: what becomes of a STEP whose place is gone."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

from pp1q_transport import wire
from pp1q_transport.client import attached
from pp1q_transport.client.attached_peer import AttachedDraftPeer, PeerStep
from pp1q_transport.errors import LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.local.handshake import Geometry
from pp1q_transport.session.shards import GROUP_MODES, REPLICATE, VOCABULARY
from pp1q_transport.staging import Region

R = Reason
DEPTH = 2
ANCHOR = 1
SESSION = 77


class Daemon:
    """Takes what the rank sends, and says what a test makes it say."""

    def __init__(self, mode: str) -> None:
        self.geometry = Geometry(
            128, DEPTH, 8, 2, 256, 256, 2, 1, GROUP_MODES.index(mode), 0, 1000, 1, 5
        )  # fmt: skip
        self.regions = [Region(self.geometry.slots().total_bytes)] if mode == VOCABULARY else []
        self.said: list[tuple[int, bytes]] = []
        self.heard: list[tuple[int, tuple[int, ...]]] = []
        self.channel = SimpleNamespace(receive=self._receive, send=self._send, flush_bell=lambda: None)

    def _receive(self) -> tuple[int, memoryview] | None:
        if not self.said:
            return None
        kind, body = self.said.pop(0)
        return kind, memoryview(body)

    def _send(self, kind: int, fixed: bytes, _payload: bytes) -> bool:
        self.heard.append((kind, m.TABLE[kind].layout.unpack(fixed)))
        return True

    def gone(self) -> bool:
        return False

    def close(self) -> None:
        """Nothing to close."""

    def say(self, kind: int, *fields: int | float, payload: bytes = b"") -> None:
        self.said.append((kind, m.pack(kind, *fields) + payload))

    def open(self, session: int = SESSION) -> None:
        self.say(m.TARGET_UP, 0, 0, session)
        self.say(m.OPENED, 1, 9, 0, 1000, 0, 2, payload=bytes(8))

    def step(self, generation: int = 1) -> None:
        self.say(m.STEP_FOR_DRAFT, 1, 9, 0, 0, 5, 1.0, 0, 0, generation, 0, generation, ANCHOR, DEPTH, wire.DENSE, 0, 1000)

    def tokens(self, count: int = DEPTH, generation: int = 1) -> None:
        for index in range(count):
            self.say(m.TOKEN, 0, 0, generation, ANCHOR + 1 + index, 3, 0)

    def of(self, kind: int) -> list[tuple[int, ...]]:
        return [fields for heard, fields in self.heard if heard == kind]


def world(monkeypatch: pytest.MonkeyPatch, mode: str = VOCABULARY) -> tuple[AttachedDraftPeer, Daemon, PeerStep]:
    """A rank with one STEP, none of whose tokens was told."""
    daemon = Daemon(mode)
    monkeypatch.setattr(attached, "attach", lambda *_how: daemon)
    peer = AttachedDraftPeer("daemon.sock", 1)
    daemon.open()
    daemon.step()
    peer.poll()
    step = peer.take_step()
    assert step is not None
    return peer, daemon, step


def put(step: PeerStep, index: int) -> bool:
    return step.put(ANCHOR + 1 + index, counts=np.full(64, 1 << 10, np.uint32), mass_before=0)


@pytest.mark.parametrize("how", ("target down", "next step"))
def test_a_step_whose_rows_are_missing_is_over_with_its_place(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    peer, daemon, step = world(monkeypatch)
    daemon.tokens()
    assert put(step, 0)
    if how == "target down":
        daemon.say(m.TARGET_DOWN, 0, R.PEER_LOST.code)
    else:
        daemon.step(generation=2)
    assert [put(step, 1), put(step, 1), step.alive] == [False, False, False]
    with pytest.raises(ProposalDiscarded, match=(R.PEER_LOST if how == "target down" else R.GENERATION_STALE).value):
        step.token(ANCHOR + 2)
    assert len(daemon.of(m.PUT_SHARD)) == 1
    peer.close()


def test_a_step_that_this_rank_is_through_with_stays_one(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, daemon, step = world(monkeypatch)
    daemon.tokens()
    assert [put(step, 0), put(step, 1)] == [True, True]
    daemon.say(m.TARGET_DOWN, 0, R.PEER_LOST.code)
    peer.poll()
    assert (step.alive, step.token(ANCHOR + 2)) == (True, 3)
    assert not put(step, 0), "its place is gone: no question of order"
    peer.close()


def test_rows_out_of_order_of_a_step_that_has_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, daemon, step = world(monkeypatch)
    with pytest.raises(LocalMisuse, match="no token yet"):
        put(step, 0)
    daemon.tokens()
    with pytest.raises(LocalMisuse, match="out of order"):
        put(step, 1)
    peer.close()


def test_where_rows_are_whole_a_step_is_through_with_its_last_token(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, daemon, step = world(monkeypatch, REPLICATE)
    daemon.tokens()
    daemon.say(m.TARGET_DOWN, 0, R.PEER_LOST.code)
    peer.poll()
    assert step.alive
    peer.close()


@pytest.mark.parametrize("noticed", (True, False))
def test_to_give_up_a_step_of_a_former_session_says_nothing_of_the_present_one(
    monkeypatch: pytest.MonkeyPatch, noticed: bool
) -> None:
    peer, daemon, old = world(monkeypatch)
    daemon.tokens()
    peer.poll()
    daemon.say(m.TARGET_DOWN, 0, R.PEER_LOST.code)
    daemon.open(SESSION + 1)
    daemon.step()
    if noticed:
        peer.poll()
    old.fail(R.COPY_FAILED)
    assert daemon.of(m.FAIL) == []
    new = peer.take_step()
    assert new is not None
    assert new.alive
    new.fail(R.COPY_FAILED)
    new.fail(R.COPY_FAILED)
    assert daemon.of(m.FAIL) == [(SESSION + 1, 0, 0, 1, R.COPY_FAILED.code)]
    peer.close()


def test_a_step_of_a_daemon_whose_rows_were_whole_is_none_of_one_that_takes_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    peer, daemon, old = world(monkeypatch, REPLICATE)
    daemon.tokens()
    peer.poll()
    peer._lose(R.PEER_LOST)
    _other, daemon, _step = world(monkeypatch)
    peer._retry_ns = 0
    peer.poll()
    old.fail()
    assert (peer.splits_vocabulary, daemon.of(m.FAIL)) == (True, [])
    peer.close()
