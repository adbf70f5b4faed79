"""Odd use and odd moments: threads, callbacks that fail or call back, peers that die in between. Nothing may wedge or crash."""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
from system_rig import ANYWHERE, PROMPT, SMALL, Rig, draft, eventually

from pp1q_transport.client import Leader, Receiver, Role, Step, configure
from pp1q_transport.control import ControlListener
from pp1q_transport.engine import INBOX_AT_MOST
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.links.tcp_port import TcpDialer
from pp1q_transport.toy.models import ToyModels

pytestmark = pytest.mark.timeout(60)


def cut(rig: Rig) -> None:
    """The receiver's link breaks under both ends."""
    link = rig.receiver.engine.link
    assert link is not None
    link.sock.shutdown(socket.SHUT_RDWR)


def reconnect(rig: Rig) -> None:
    """Both ends notice the loss and form the next session."""
    rig.until(lambda: not rig.receiver.up)
    rig.until(lambda: rig.receiver.up and rig.leader.up)


# ---- threads --------------------------------------------------------------------------------------------------------


def test_closing_waits_for_a_poll_that_another_thread_is_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """ZeroMQ's sockets bear one thread: closed under another one's receive they are used after they were freed."""
    inside, go_on, closed = threading.Event(), threading.Event(), threading.Event()
    receive = ControlListener.receive

    def slow(self: ControlListener) -> Any:
        inside.set()
        go_on.wait(10.0)
        assert not self.closed, "closed in the middle of receive"
        return receive(self)

    with Rig() as rig:
        receiver = rig.receiver
        monkeypatch.setattr(ControlListener, "receive", slow)
        faults: list[BaseException] = []

        def poll() -> None:
            try:
                receiver.poll()
            except BaseException as fault:  # noqa: BLE001 - handed to the test
                faults.append(fault)

        poller = threading.Thread(target=poll)
        poller.start()
        assert inside.wait(10.0)
        closer = threading.Thread(target=lambda: (receiver.close(), closed.set()))
        closer.start()
        assert not closed.wait(0.3)
        go_on.set()
        poller.join(10.0)
        assert closed.wait(10.0)
        closer.join(10.0)
        assert not faults, faults[0]
        assert receiver.engine.closed


# ---- requests that can't be opened ----------------------------------------------------------------------------------


def test_a_request_that_was_refused_leaves_nothing_behind() -> None:
    with Rig().connect() as rig:
        with pytest.raises(LocalMisuse, match="position 2 is beyond"):
            rig.receiver.open_request(5, [1, 2, 3], max_position=1)
        assert not rig.receiver.requests.requests


def test_commits_without_a_session_keep_to_the_limits_of_one() -> None:
    with Rig(max_context_tokens=8).connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        bounded = rig.receiver.open_request(6, [1, 2, 3], max_position=3)
        rig.leader.close()
        rig.until(lambda: not rig.receiver.up)
        rig.receiver.commit_target_only(request, 0, [4] * 5)
        with pytest.raises(LocalMisuse, match="9 tokens exceed max_context_tokens 8"):
            rig.receiver.commit_target_only(request, 0, [4])
        rig.receiver.commit_target_only(bounded, 0, [4])
        with pytest.raises(LocalMisuse, match="position 4 is beyond"):
            rig.receiver.commit_target_only(bounded, 0, [4])


def test_one_request_that_no_longer_fits_does_not_keep_the_others_from_being_opened_again() -> None:
    with Rig(max_context_tokens=8).connect() as rig:
        long = rig.receiver.open_request(5, [1, 2, 3])
        other = rig.receiver.open_request(6, [1, 2, 3])
        rig.until(lambda: rig.leader.requests.get(6) is not None)
        long.extend([4] * 8)
        cut(rig)
        reconnect(rig)
        rig.until(lambda: rig.leader.requests.get(6) is not None)
        assert rig.receiver.counters.get("requests_not_opened") == 1
        rig.round(other).release()


# ---- links that form badly ------------------------------------------------------------------------------------------


def test_a_peer_that_dies_between_its_proof_and_the_session_is_a_lost_link(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slots of a first session are faulted in meanwhile: milliseconds in which a killed peer's reset arrives."""
    dialled: list[socket.socket] = []
    prove, make = TcpDialer._send_proof, Receiver._make_session

    def proven(self: TcpDialer) -> bool:
        done = prove(self)
        dialled.append(self._sock)
        return done

    def killed(self: Receiver, terms: Any) -> Any:
        if self.counters.get("sessions") == 0:
            dialled[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            dialled[-1].close()
        return make(self, terms)

    monkeypatch.setattr(TcpDialer, "_send_proof", proven)
    monkeypatch.setattr(Receiver, "_make_session", killed)
    with Rig() as rig:
        rig.until(lambda: rig.receiver.counters.get("sessions"))
        rig.leader._region = None  # whatever the dead one made of its socket
        rig.receiver.poll()


@pytest.mark.parametrize(
    "data", ("tcp://127.0.0.1:\u00b2", "tcp://no.such.host.invalid:5", "tcp://a..b:5", "tcp://\u3002:1", "tcp://:5")
)
def test_a_data_endpoint_that_means_nothing_fails_the_attempt_alone(data: str) -> None:
    with Rig() as rig:
        good, rig.receiver.engine._forming._listener.data = rig.receiver.engine._forming._listener.data, data
        rig.until(lambda: rig.leader.counters.of(Reason.MALFORMED) + rig.leader.counters.of(Reason.LINK_ERROR))
        rig.receiver.engine._forming._listener.data = good
        rig.connect()


def test_an_answer_to_hello_that_is_malformed_fails_the_attempt_and_the_next_one_comes() -> None:
    with Rig() as rig:
        listener = rig.receiver.engine._forming._listener
        answer = listener.receive

        def broken(*given: Any) -> Any:
            message, result = answer(*given)
            listener.receive = answer  # type: ignore[method-assign]
            return {**message, "secret": b"short"}, result

        listener.receive = broken  # type: ignore[method-assign]
        rig.connect()
        assert rig.leader.counters.of(Reason.MALFORMED) == 1


# ---- callbacks ------------------------------------------------------------------------------------------------------


def test_a_callback_that_raises_costs_none_of_the_events_behind_it() -> None:
    with Rig().connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        rig.until(lambda: rig.leader.requests.get(5) is not None)
        opened: list[int] = []

        def fail(_request: int, _tokens: list[int]) -> None:
            raise RuntimeError("of the user's")

        rig.leader.on_commit(fail)
        rig.leader.on_open(lambda number, _tokens: opened.append(number))
        rig.receiver.commit_target_only(request, 0, [4])
        rig.receiver.open_request(6, [1, 2, 3])
        rig.receiver.poll()
        with pytest.raises(RuntimeError, match="of the user's"):
            rig.until(lambda: opened)
        rig.until(lambda: opened == [6])


@pytest.mark.parametrize("event", ("commit", "reset"))
def test_a_callback_that_raises_when_the_session_ends_does_not_keep_the_next_one_from_forming(event: str) -> None:
    with Rig().connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        rig.until(lambda: rig.leader.requests.get(5) is not None)

        def fail(*_what: object) -> None:
            raise RuntimeError("of the user's")

        callbacks = rig.leader._on_commit if event == "commit" else rig.leader._on_reset
        callbacks.append(fail)
        rig.receiver.commit_target_only(request, 0, [4])
        rig.receiver.poll()
        cut(rig)
        with pytest.raises(RuntimeError, match="of the user's"):
            eventually(lambda: False, rig.leader.engine.poll)  # nothing is collected before the end
        callbacks.clear()
        rig.until(lambda: rig.leader.counters.get("sessions") == 2 and rig.leader.requests.get(5) is not None)
        rig.round(request).release()


def test_serving_from_a_callback_at_the_end_of_a_session_forms_no_session_under_it() -> None:
    with Rig().connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        rig.until(lambda: rig.leader.requests.get(5) is not None)
        seen: list[bool] = []

        def serve(_request: int, _reason: Reason) -> None:
            stop = time.monotonic() + 0.5
            while time.monotonic() < stop:
                rig.serve()
            seen.append(rig.leader.up)

        rig.leader.on_reset(serve)
        cut(rig)
        rig.until(lambda: seen)
        assert seen == [False]
        rig.until(lambda: rig.receiver.up and rig.leader.up and rig.leader.requests.get(5) is not None)
        rig.round(request).release()


# ---- one proposal a request -----------------------------------------------------------------------------------------


def test_a_proposal_of_the_last_session_is_not_committed_under_the_next_one_in_flight() -> None:
    with Rig().connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        old = rig.round(request)
        cut(rig)
        reconnect(rig)
        rig.until(lambda: rig.leader.requests.get(5) is not None)
        ticket = rig.receiver.enqueue(request)
        with pytest.raises(LocalMisuse, match="in flight"):
            old.commit(1, [*old.tokens[:1].tolist(), 7])
        assert request.in_flight
        old.release()
        rig.draft(rig.next_step())
        with rig.finish(ticket) as proposal:
            assert proposal.first_position == request.anchor + 1


# ---- bounds and forks -----------------------------------------------------------------------------------------------


def test_messages_that_nobody_asks_for_are_bounded() -> None:
    with Rig().connect() as rig:
        for _ in range(40):
            for _ in range(20):
                rig.leader.send_message("report", {"x": "y"})
            rig.receiver.engine._forming_ns = 0
            rig.serve()
        rig.until(lambda: rig.receiver.counters.get("control_dropped"))
        assert len(rig.receiver.engine.inbox) == INBOX_AT_MOST
        assert rig.receiver.up


def test_a_forked_child_that_closes_leaves_the_parents_session_alone() -> None:
    with Rig().connect() as rig:
        request = rig.receiver.open_request(5, [1, 2, 3])
        child = os.fork()
        if child == 0:
            rig.close()
            os._exit(0)
        stop = time.monotonic() + 10.0
        while os.waitpid(child, os.WNOHANG) == (0, 0):
            if time.monotonic() > stop:
                os.kill(child, 9)
                os.waitpid(child, 0)
                raise AssertionError("the child hangs in close()")
            time.sleep(0.01)
        rig.round(request).release()
        assert rig.receiver.counters.get("sessions") == 1


# ---- sizes that change between sessions -----------------------------------------------------------------------------


def test_a_session_of_other_sizes_waits_for_the_slots_that_are_still_read() -> None:
    """A proposal is held across a loss; a leader of another depth must not have its memory, nor may it break `poll`."""
    models = ToyModels.of(7, SMALL["vocab_size"])
    config = replace(configure(Role.RECEIVER, listen=ANYWHERE, **SMALL), takes_options=True)
    with Receiver(config) as receiver:
        with Leader(configure(Role.LEADER, connect=receiver.endpoint, **SMALL)) as first:

            def both(leader: Leader = first) -> None:
                leader.poll()
                receiver.poll()

            eventually(lambda: first.up and receiver.up, both)
            request = receiver.open_request(1, PROMPT)
            ticket = receiver.enqueue(request)
            steps: list[Step] = []
            eventually(lambda: steps, lambda: (both(), steps.extend(filter(None, [first.next_step(0)]))))
            draft(models, steps[0])
            eventually(lambda: ticket.settled, both)
            proposal = ticket.wait()
            before = proposal.q(0).values.copy()
        eventually(lambda: not receiver.up, receiver.poll)
        with Leader(configure(Role.LEADER, connect=receiver.endpoint, **(SMALL | {"depth": 2}))) as second:

            def others() -> None:
                second.poll()
                receiver.poll()

            eventually(lambda: receiver.counters.of(Reason.LIMITS_MISMATCH) >= 1, others)
            assert not receiver.up
            assert (proposal.q(0).values == before).all()
            proposal.release()
            eventually(lambda: second.up and receiver.up, others)
