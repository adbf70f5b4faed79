"""Links on their way into a session and generations that run out of budget: proofs, trickles, stalls, late rows."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from system_rig import (
    ANYWHERE,
    PROMPT,
    SMALL,
    MakeRig,
    Rig,
    child_environment,
    draft,
    eventually,
    expected,
    go_on_alone,
    one_round,
)

from pp1q_transport import wire
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.client import Leader, Receiver, Role, configure, make_hello
from pp1q_transport.control import ControlConnector, ControlListener
from pp1q_transport.control_codec import encode_message
from pp1q_transport.counters import Counters
from pp1q_transport.errors import PeerFault, ProposalDiscarded, Reason
from pp1q_transport.links.tcp_port import TcpDialer, TcpPort
from pp1q_transport.session.negotiate import Agreement, Connector, Listener
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, proof_frame
from pp1q_transport.toy.models import ToyModels

pytestmark = pytest.mark.timeout(60)
CHILD = Path(__file__).with_name("system_child.py")

# ---- proofs and the data port -----------------------------------------------------------------------------------------


def handshake(port: TcpPort | None = None, data: str = "tcp://127.0.0.1:9") -> tuple[Agreement, Agreement]:
    """The two agreements of a finished handshake: the listening receiver's, the connecting leader's."""
    listener = Listener(
        make_hello(Role.RECEIVER, 11, **SMALL), port.endpoint if port else data, encode_message, os.urandom
    )
    connector = Connector(make_hello(Role.LEADER, 12, **SMALL), encode_message, os.urandom)
    now_ns = monotonic_ns()
    answer, theirs = listener.receive(connector.start(now_ns), now_ns)
    assert isinstance(theirs, Agreement)
    return theirs, connector.receive(answer, now_ns)


@pytest.fixture
def port() -> Any:
    agreements: dict[int, Agreement] = {}
    made = TcpPort("127.0.0.1", 0, agreements.get, Counters())
    made.agreements = agreements  # type: ignore[attr-defined]
    yield made
    made.close()


def dial(port: Any) -> socket.socket:
    host, _, number = port.endpoint.removeprefix("tcp://").rpartition(":")
    return socket.create_connection((host, int(number)))


def test_a_trickle_does_not_extend_the_second(port: Any) -> None:
    """A peer that keeps sending is cut off at the deadline all the same."""
    with dial(port) as trickle:
        now_ns = monotonic_ns()
        eventually(lambda: port.half_open, lambda: port.poll(now_ns))
        trickle.send(wire.MAGIC)
        time.sleep(0.01)
        port.poll(now_ns + 999_999_999)
        assert port.half_open == 1
        trickle.send(b"\x02")
        time.sleep(0.01)
        port.poll(now_ns + 1_000_000_000)
        assert port.half_open == 0
    assert port._counters.of(Reason.TIMEOUT) == 1


def test_a_proof_that_came_while_we_computed_still_counts(port: Any) -> None:
    """The second runs from our accept: what lies in the kernel by then was in time."""
    ours, theirs = handshake(port)
    port.agreements[ours.session] = ours
    with dial(port) as peer:
        peer.send(proof_frame(theirs))
        time.sleep(0.01)
        proven: list[Any] = []
        eventually(lambda: proven, lambda: proven.extend(port.poll(10**18)))
        assert proven[0][1] is ours
        proven[0][0].close()
        assert len(peer.recv(PROOF_FRAME_BYTES)) == PROOF_FRAME_BYTES


def test_one_proof_joins_one_link(make_rig: MakeRig) -> None:
    """The same proof on two connections, found in one look at the port: the second is cut off."""
    rig = make_rig()
    forming = rig.receiver.engine._forming
    assert forming._port is not None
    ours, theirs = handshake(forming._port)
    forming._pending[ours.session] = (b"peer", ours)
    copies = [dial(forming._port) for _ in range(2)]
    for copy in copies:
        copy.send(proof_frame(theirs))
    eventually(lambda: rig.receiver.up, rig.receiver.poll)
    eventually(lambda: rig.receiver.counters.get("links_cut_off"), rig.receiver.poll)
    assert rig.receiver.up
    assert rig.receiver.counters.get("sessions") == 1
    assert rig.receiver.counters.of(Reason.SESSION_MISMATCH) == 1
    for copy in copies:
        copy.close()


def test_a_dialer_that_is_hung_up_on_has_lost_its_peer() -> None:
    """A port that closes (it ended, or gave the place to others) accused nobody: the dialer may try again."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        _, agreement = handshake(data=f"tcp://127.0.0.1:{server.getsockname()[1]}")
        dialer = TcpDialer(agreement, monotonic_ns())
        accepted, _ = server.accept()
        accepted.close()
        with pytest.raises(PeerFault) as caught:
            eventually(lambda: False, lambda: dialer.poll(monotonic_ns()))
    assert caught.value.reason is Reason.PEER_LOST


def test_a_listener_on_every_address_is_dialed_where_its_control_end_is() -> None:
    """Dialing 0.0.0.0 would reach 127.0.0.1 on Linux, which is not where this server is."""
    with socket.create_server(("127.0.0.2", 0)) as server:
        server.settimeout(5.0)
        _, agreement = handshake(data=f"tcp://0.0.0.0:{server.getsockname()[1]}")
        dialer = TcpDialer(agreement, monotonic_ns(), reached="127.0.0.2")
        server.accept()[0].close()
        dialer.close()


def test_a_dialer_is_not_fooled_and_does_not_wait_for_ever() -> None:
    cases: list[tuple[bytes, Reason]] = [
        (b"HTTP/1.1 400 Bad Request\r\n\r\n", Reason.BAD_MAGIC),
        (wire.MAGIC + bytes(156), Reason.BAD_VERSION),
        (b"", Reason.TIMEOUT),
        (b"reflection", Reason.AUTH_FAILED),
    ]
    for answer, reason in cases:
        with socket.create_server(("127.0.0.1", 0)) as server:
            _, agreement = handshake(data=f"tcp://127.0.0.1:{server.getsockname()[1]}")
            begin_ns = monotonic_ns()
            dialer = TcpDialer(agreement, begin_ns)
            accepted, _ = server.accept()
            with accepted:
                eventually(lambda: dialer._sent, lambda: dialer.poll(begin_ns))  # noqa: B023
                mine = accepted.recv(PROOF_FRAME_BYTES)
                accepted.send(_reflect(mine, agreement) if answer == b"reflection" else answer or b"P")
                late_ns = begin_ns + (2_000_000_000 if not answer else 0)
                time.sleep(0.01)
                with pytest.raises(PeerFault) as caught:
                    eventually(lambda: False, lambda: dialer.poll(late_ns))  # noqa: B023
        assert caught.value.reason in (reason, Reason.BOOT_NONCE) if reason is Reason.AUTH_FAILED else reason


def _reflect(frame: bytes, agreement: Agreement) -> bytes:
    assert frame == proof_frame(agreement)
    return frame


def test_a_listener_that_dies_before_its_proof_is_tried_again(make_rig: MakeRig) -> None:
    """A connector that waits for its peer may not give up because a half-formed link ended."""
    control = ControlListener(ANYWHERE)
    silent = socket.create_server(("127.0.0.1", 0))
    number = silent.getsockname()[1]
    listener = Listener(
        make_hello(Role.RECEIVER, 11, **SMALL), f"tcp://127.0.0.1:{number}", encode_message, os.urandom
    )
    leader = Leader(configure(Role.LEADER, connect=control.endpoint, **SMALL))
    try:
        hellos = 0
        half: socket.socket | None = None
        stop = time.monotonic() + 15
        silent.setblocking(False)
        while hellos < 3:
            assert time.monotonic() < stop
            leader.poll()
            for peer, message in control.receive():
                hellos += 1
                control.send(peer, listener.receive(message, monotonic_ns())[0])
            time.sleep(0.001)
            with suppress(BlockingIOError):
                half = silent.accept()[0]
                half.setblocking(False)
            with suppress(BlockingIOError):
                if half is not None and half.recv(PROOF_FRAME_BYTES):
                    half.close()
                    half = None
        assert not leader.up
        assert leader.counters.of(Reason.PEER_LOST) >= 2
    finally:
        leader.close()
        control.close()
        silent.close()


def test_an_endpoint_that_vanishes_before_its_ack_is_waited_for(make_rig: MakeRig) -> None:
    """The control connection ends between HELLO and HELLO-ACK."""
    rig = make_rig()
    assert isinstance(rig.leader.engine._forming._control, ControlConnector)
    eventually(lambda: rig.leader.engine._forming._connector is not None, rig.leader.poll)
    endpoint = rig.receiver.endpoint
    rig.receiver.close()
    again = Receiver(configure(Role.RECEIVER, listen=endpoint, **SMALL))
    rig._ends.append(again)
    rig.receiver = again
    rig.connect()
    rig.round(again.open_request(1, PROMPT)).release()


# ---- budgets ----------------------------------------------------------------------------------------------------------


class Child:
    """A leader in a process of its own (`system_child.py`), that drafts whatever it is asked."""

    def __init__(self, endpoint: str) -> None:
        command = [sys.executable, str(CHILD), "lead", "--connect", endpoint]
        self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, env=child_environment())

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *exc: object) -> None:
        self.process.kill()
        self.process.wait(10)


@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
def test_a_stalled_leader_costs_a_proposal_each_and_its_late_rows_disturb_nobody(support: int | None) -> None:
    receiver = Receiver(configure(Role.RECEIVER, listen=ANYWHERE, **SMALL))
    rig = Rig.__new__(Rig)
    rig.receiver = receiver
    toy = ToyModels.of(7, SMALL["vocab_size"])
    with Child(receiver.endpoint) as child:
        receiver.wait_for_peer(30)
        request = receiver.open_request(1, PROMPT, seed=21)
        journal = [one_round(toy, receiver, request, support=support)[:3] for _ in range(5)]
        session = receiver.session
        child.signal(signal.SIGSTOP)
        stalled = []
        for _ in range(6):
            number, generation, ready, reason = one_round(toy, receiver, request, support=support, budget_us=20_000)
            stalled.append((ready, reason))
            journal.append((number, generation, ready))
            assert rig.all_free()
        assert stalled == [(False, Reason.TIMEOUT)] * 6
        child.signal(signal.SIGCONT)
        journal += [one_round(toy, receiver, request, support=support)[:3] for _ in range(10)]
        assert [ready for _, _, ready in journal[-10:]] == [True] * 10
        assert receiver.session is session
        assert receiver.counters.of(Reason.TIMEOUT) == 6
        want = expected(toy, 21, journal, depth=3, support=support)
        assert request.tokens.tolist()[2:] == want
        assert rig.all_free()
        receiver.close()
        assert child.process.wait(20) == 0


def test_late_rows_drain_and_are_counted_stale(rig: Rig) -> None:
    """The rows of a generation that timed out arrive after all: to scratch, counted, and the slot's next owner is whole."""
    request = rig.receiver.open_request(1, PROMPT, seed=2)
    ticket = rig.receiver.enqueue(request, budget_us=50_000)
    step = rig.next_step()
    rig.draft(step, 1)
    # The leader drafts on without looking at the link: it can't know yet.
    eventually(lambda: ticket.settled, rig.receiver.poll)
    session, region = rig.receiver.session, rig.receiver._region
    assert session is not None
    assert region is not None
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.TIMEOUT
    assert rig.all_free()
    before = region.array.copy()
    lead = rig.leader.session
    assert lead is not None
    grant = lead.grants[step.slot]
    staged = rig.leader._region
    assert staged is not None
    for position in (3, 4):
        at = lead.terms.geometry().row_offset(step.slot, position - 2)
        lead.put_row(grant, step.slot_generation, position, 0, 128, staged.memory, at, 512)
    rig.leader.engine.flush()
    eventually(lambda: rig.receiver.counters.of(Reason.GENERATION_STALE) == 3, rig.receiver.poll)  # 2 rows, COMPLETION
    assert (region.array == before).all()
    assert rig.receiver.session is session
    go_on_alone(rig.models, rig.receiver, request, ticket.round)
    rig.round(request).release()


def test_a_budget_ends_in_the_middle_of_a_row(make_rig: MakeRig) -> None:
    """A large row is cut by the watchdog while it lands: the rest goes to scratch, and the slot is free at once."""
    rig = make_rig(vocab_size=131072, depth=1, max_slots=1, batch_requests=1, batches_in_flight=1).connect()
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request, budget_us=100_000)
    step = rig.next_step()
    link = rig.leader.engine.link
    assert link is not None
    link.sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    step.put(2, weights=rig.models.draft.weights([1, 2]))
    for _ in range(3):
        rig.receiver.poll()
    eventually(lambda: ticket.settled, rig.receiver.poll)
    with pytest.raises(ProposalDiscarded, match="timeout"):
        ticket.wait()
    assert rig.all_free()
    go_on_alone(rig.models, rig.receiver, request, ticket.round)
    later = rig.receiver.enqueue(request)
    assert later.slot == ticket.slot
    draft(rig.models, rig.next_step())
    with rig.finish(later) as proposal:
        assert float(proposal.q(0).values.sum(dtype="f8")) == 1.0
    assert rig.receiver.counters.of(Reason.GENERATION_STALE) >= 1
    assert rig.receiver.counters.get("sessions") == 1
