"""The engine over the real transport: refusals, losses, reconnects, budgets. Nothing here may end a process by surprise."""

from __future__ import annotations

import gc
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from system_rig import (
    ANYWHERE,
    PROMPT,
    SMALL,
    MakeRig,
    Rig,
    captured,
    child_environment,
    consume,
    eventually,
    expected,
    go_on_alone,
    open_descriptors,
)

from pp1q_transport import engine, wire
from pp1q_transport.client import EngineConfig, Leader, Receiver, Role, configure, make_hello, new_boot_nonce
from pp1q_transport.engine import Phase
from pp1q_transport.errors import ConfigError, PeerFault, ProposalDiscarded, Reason, Refused
from pp1q_transport.session.negotiate import Message

pytestmark = pytest.mark.timeout(60)
CHILD = Path(__file__).with_name("system_child.py")

# ---- refusals ---------------------------------------------------------------------------------------------------------

DIFFERENCES: list[tuple[str, Any, Any, Reason]] = [
    ("vocab_size", 128, 192, Reason.LIMITS_MISMATCH),
    ("depth", 3, 2, Reason.LIMITS_MISMATCH),
    ("support", 16, 17, Reason.LIMITS_MISMATCH),
    ("max_slots", 4, 8, Reason.LIMITS_MISMATCH),
    ("batch_requests", 2, 1, Reason.LIMITS_MISMATCH),
    ("batches_in_flight", 2, 1, Reason.LIMITS_MISMATCH),
    ("max_context_tokens", 1000, 1001, Reason.LIMITS_MISMATCH),
    ("representations", ("dense", "sparse"), ("dense",), Reason.SEMANTIC_MISMATCH),
    ("draw_proof", True, False, Reason.SEMANTIC_MISMATCH),
    ("digest", "xxh3-64", "blake2b-keyed", Reason.SEMANTIC_MISMATCH),
    ("semantic_id", "dyadic24-standard-v1", "dyadic16", Reason.SEMANTIC_MISMATCH),
    ("verifier_id", "standard-rejection-v1", "typical", Reason.SEMANTIC_MISMATCH),
    ("rng_abi", "philox4x32-10-pp1q-1", "mt19937", Reason.SEMANTIC_MISMATCH),
    ("precision", "fp32-le", "bf16", Reason.SEMANTIC_MISMATCH),
    ("group_mode", "replicate", "vocabulary", Reason.SEMANTIC_MISMATCH),
    ("draft_identity", "llama-68m", "llama-160m", Reason.IDENTITY_MISMATCH),
    ("draft_kind", "native", "adapted", Reason.IDENTITY_MISMATCH),
    ("target_identity", "llama-70b", "llama-8b", Reason.IDENTITY_MISMATCH),
    ("id_map_hash", "0" * 64, "1" * 64, Reason.IDENTITY_MISMATCH),
]


@pytest.mark.parametrize("listens", ("receiver", "leader"))
@pytest.mark.parametrize(("field", "receives", "leads", "reason"), DIFFERENCES, ids=[row[0] for row in DIFFERENCES])
def test_a_refused_hello_names_field_and_both_values_on_both_sides(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, listens: str, field: str, receives: Any, leads: Any, reason: Reason
) -> None:
    """The connecting side raises; the listening side logs, counts and goes on listening: a stranger must not end it."""
    monkeypatch.setattr(engine, "IMPLEMENTED", {})  # what other builds may have
    rig = make_rig(listens=listens, receiver={field: receives}, leader={field: leads})
    listener, connector = (rig.receiver, rig.leader) if listens == "receiver" else (rig.leader, rig.receiver)
    ours, theirs = (leads, receives) if listens == "receiver" else (receives, leads)
    with captured() as log, pytest.raises(Refused) as caught:
        rig.connect()
    refusal = caught.value
    assert (refusal.reason, refusal.field) == (reason, field)
    assert _same(refusal.ours, ours)
    assert _same(refusal.theirs, theirs)
    said = next(entry for entry in log if entry["event"] == "hello_refused")
    assert said["reason"] == reason.value
    assert said["detail"].startswith(f"{field}: ")
    assert listener.counters.of(reason) == 1
    assert connector.counters.of(reason) == 1
    assert listener.engine.phase is Phase.DOWN
    assert rig.states() == [], "no slot was allocated"


def _same(shown: object, value: object) -> bool:
    """A REFUSE quotes values as short texts."""
    return str(shown).replace("[", "(").replace("]", ")") == str(value).replace("[", "(").replace("]", ")")


def test_a_listener_that_refused_one_peer_takes_the_next(make_rig: MakeRig) -> None:
    rig = make_rig(leader={"vocab_size": 192})
    with pytest.raises(Refused):
        rig.connect()
    rig.leader.close()
    right = Leader(configure(Role.LEADER, connect=rig.receiver.endpoint, **SMALL))
    rig._ends.append(right)
    rig.leader = right
    rig.connect()
    rig.round(rig.receiver.open_request(1, PROMPT)).release()


def test_a_session_keeps_the_name_it_was_proven_with(rig: Rig) -> None:
    for end in (rig.leader, rig.receiver):
        assert end.engine.agreement is not None
        assert end.session is not None
        assert end.engine.agreement.session == end.session.terms.session
        assert end.session.terms.leader_nonce == rig.leader.engine.config.hello.boot_nonce
        assert end.session.terms.receiver_nonce == rig.receiver.engine.config.hello.boot_nonce


def test_a_config_names_one_endpoint() -> None:
    hello = make_hello(Role.LEADER, new_boot_nonce(), **SMALL)
    for listen, connect in ((None, None), (ANYWHERE, ANYWHERE)):
        with pytest.raises(ConfigError, match="exactly one"):
            Leader(EngineConfig(hello=hello, listen=listen, connect=connect))


def test_a_second_hello_is_refused_and_disturbs_nothing(rig: Rig) -> None:
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request)
    step = rig.next_step()
    rig.draft(step, 1)
    session = rig.receiver.session
    late = Leader(configure(Role.LEADER, connect=rig.receiver.endpoint, wait_for_peer=False, **SMALL))
    try:
        with pytest.raises(Refused) as caught:
            eventually(lambda: False, lambda: (rig.serve(), late.poll()))
        assert (caught.value.reason, caught.value.field) == (Reason.OVERLOAD, "session")
    finally:
        late.close()
    assert rig.receiver.session is session
    chain = [0, rig.receiver.requests.requests[1].tokens[-1]]
    for position in (3, 4):
        step.put(position, weights=rig.models.draft.weights(chain))
    rig.finish(ticket).release()


def test_one_who_waits_takes_over_when_the_place_is_free(rig: Rig) -> None:
    waiting = Leader(configure(Role.LEADER, connect=rig.receiver.endpoint, **SMALL))
    rig._ends.append(waiting)
    eventually(lambda: waiting.counters.of(Reason.OVERLOAD), lambda: (rig.serve(), waiting.poll()))
    assert not waiting.up
    rig.leader.close()
    eventually(lambda: waiting.up and rig.receiver.up, lambda: (rig.receiver.poll(), waiting.poll()))
    rig.leader = waiting
    rig.round(rig.receiver.open_request(1, PROMPT)).release()


# ---- losses and reconnects --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("listens", ("receiver", "leader"))
def test_a_corrupt_header_costs_the_link_and_a_new_session_forms(make_rig: MakeRig, listens: str) -> None:
    rig = make_rig(listens=listens).connect()
    request = rig.receiver.open_request(1, PROMPT, seed=8)
    with rig.round(request) as proposal:
        consume(rig.models, rig.receiver, request, proposal)
    ticket = rig.receiver.enqueue(request, budget_us=30_000_000)
    first = ticket.key[0]
    link = rig.leader.engine.link
    assert link is not None
    link.sock.send(wire.MAGIC + b"\x02" + bytes(123))
    with pytest.raises(ProposalDiscarded) as caught:
        rig.finish(ticket)
    assert caught.value.reason is Reason.LINK_ERROR
    assert rig.all_free()
    assert rig.receiver.counters.reasons.keys() & {"header_digest", "unknown_kind"}
    go_on_alone(rig.models, rig.receiver, request, ticket.round)
    rig.until(lambda: not rig.leader.up)
    rig.connect()
    with rig.round(request) as proposal:
        assert proposal.key[0] != first
        assert proposal.generation > 0
        generation = proposal.generation
        consume(rig.models, rig.receiver, request, proposal)
    journal = [(0, 0, True), (1, generation, False), (2, generation, True)]
    assert request.tokens.tolist()[2:] == expected(rig.models, 8, journal, depth=3, support=None)
    assert rig.receiver.counters.get("sessions") == 2


@pytest.mark.parametrize("listens", ("receiver", "leader"))
def test_twenty_losses_leave_twenty_one_sessions_and_nothing_else(make_rig: MakeRig, listens: str) -> None:
    rig = make_rig(listens=listens).connect()
    request = rig.receiver.open_request(1, PROMPT, seed=8)
    rig.round(request).release()
    gc.collect()
    before = open_descriptors()
    generations = [request.generation]
    for number in range(20):
        end = (rig.leader, rig.receiver)[number % 2]
        assert end.engine.link is not None
        end.engine.link.sock.shutdown(socket.SHUT_RDWR)
        rig.until(lambda: not rig.leader.up and not rig.receiver.up)
        rig.connect()
        rig.receiver.commit_target_only(request, request.round, [5])
        rig.round(request).release()
        generations.append(request.generation)
    gc.collect()
    assert generations == sorted(set(generations)), "every session has generations of its own"
    assert rig.receiver.counters.get("sessions") == rig.leader.counters.get("sessions") == 21
    rig.until(lambda: open_descriptors() <= before)  # libzmq closes in its own time
    assert rig.all_free()


def test_the_backoff_grows_jitters_and_is_bounded(make_rig: MakeRig) -> None:
    rig = make_rig(change_leader=lambda config: replace(config, backoff_seed=1))
    forming = rig.leader.engine._forming
    waits = []
    for _ in range(12):
        forming.back_off(0)
        waits.append(forming._retry_ns)
    assert all(10_000_000 <= wait <= 1_500_000_000 for wait in waits)
    assert waits[0] <= 30_000_000 < waits[4]
    assert len(set(waits)) == 12
    forming._retry_ns = 0
    rig.connect()
    assert forming._backoff_ns == 20_000_000, "a session resets it"


def test_a_connector_waits_for_a_listener_that_comes_later() -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    endpoint = f"tcp://127.0.0.1:{port}"
    leader = Leader(configure(Role.LEADER, connect=endpoint, **SMALL))
    stop = time.monotonic() + 0.1
    while time.monotonic() < stop:
        leader.serve(1_000_000)
    receiver = Receiver(configure(Role.RECEIVER, listen=endpoint, **SMALL))
    try:
        eventually(lambda: leader.up and receiver.up, lambda: (leader.poll(), receiver.poll()))
    finally:
        leader.close()
        receiver.close()


@pytest.mark.parametrize("lost", ("receiver", "leader"))
@pytest.mark.parametrize("listens", ("receiver", "leader"))
def test_without_waiting_a_loss_is_raised_and_close_still_works(make_rig: MakeRig, listens: str, lost: str) -> None:
    rig = make_rig(listens=listens, wait_for_peer=False).connect()
    request = rig.receiver.open_request(1, PROMPT)
    rig.receiver.enqueue(request, budget_us=30_000_000)
    dying, survivor = (rig.receiver, rig.leader) if lost == "receiver" else (rig.leader, rig.receiver)
    assert dying.engine.link is not None
    dying.engine.link.sock.close()
    with pytest.raises(PeerFault) as caught:
        eventually(lambda: False, survivor.poll)
    assert caught.value.reason is Reason.PEER_LOST
    assert not survivor.up
    assert lost == "receiver" or rig.all_free()
    survivor.close()
    assert survivor.engine.closed


def test_close_ends_everything_even_if_the_peer_is_lost_right_then(make_rig: MakeRig) -> None:
    """What waits to be sent shows the loss only inside `close`."""
    rig = make_rig(wait_for_peer=False).connect()
    session, link = rig.receiver.session, rig.leader.engine.link
    assert session is not None
    assert link is not None
    rig.receiver.open_request(1, PROMPT)
    session.open(rig.receiver.requests.requests[1])
    link.sock.close()
    rig.receiver.close()
    assert rig.receiver.engine.closed
    rig.receiver.close()


@pytest.mark.parametrize("wait", (True, False))
def test_a_control_plane_that_ends_first_settles_the_slots_too(
    make_rig: MakeRig, monkeypatch: pytest.MonkeyPatch, wait: bool
) -> None:
    """A killed peer's two connections end in either order; whoever hears of it finds every slot free."""
    rig = make_rig(listens="leader", wait_for_peer=wait).connect()
    request = rig.receiver.open_request(1, PROMPT)
    ticket = rig.receiver.enqueue(request, budget_us=30_000_000)

    def over() -> list[tuple[bytes, Message]]:
        raise PeerFault(Reason.PEER_LOST, "the control connection closed")

    rig.receiver.engine._forming._control.receive = over  # type: ignore[method-assign]
    if wait:
        eventually(lambda: not rig.receiver.up, rig.receiver.poll)
    else:
        with pytest.raises(PeerFault, match="peer_lost"):
            eventually(lambda: False, rig.receiver.poll)
    assert rig.all_free()
    with pytest.raises(ProposalDiscarded) as caught:
        ticket.wait()
    assert caught.value.reason is Reason.PEER_LOST


def test_a_goodbye_is_no_loss(make_rig: MakeRig) -> None:
    rig = make_rig(wait_for_peer=False).connect()
    request = rig.receiver.open_request(1, PROMPT)
    rig.round(request)
    with captured() as log:
        rig.receiver.close()
        rig.until(lambda: rig.leader.engine.closed)
    down = [entry for entry in log if entry["event"] == "session_down" and entry["role"] == "leader"]
    assert [(entry["goodbye"], entry["log_level"]) for entry in down] == [(True, "info")]


def test_an_outbox_that_overflows_on_opening_ends_the_link_not_the_process(make_rig: MakeRig) -> None:
    rig = make_rig()
    called: list[int] = []

    def overflow() -> None:
        called.append(1)
        if len(called) == 1:
            raise PeerFault(Reason.OVERLOAD, "outbox full")

    rig.receiver.engine._on_up = overflow
    rig.until(lambda: len(called) == 2)
    rig.connect()
    assert rig.receiver.counters.of(Reason.OVERLOAD) == 1
    assert rig.receiver.counters.get("sessions") == 2


def test_a_gone_control_connection_ends_only_its_own_session(make_rig: MakeRig) -> None:
    """The loss of an earlier peer, noticed late because others keep talking, must not end the next session."""
    rig = make_rig().connect()
    forming = rig.receiver.engine._forming
    old = forming._peers[0]
    rig.leader.close()
    receive = forming._control.receive
    noise: list[tuple[bytes, Message]] = [(b"someone", {"kind": "keepalive"})]

    def noisy() -> list[tuple[bytes, Message]]:
        return receive() + noise

    forming._control.receive = noisy  # type: ignore[method-assign]
    second = Leader(configure(Role.LEADER, connect=rig.receiver.endpoint, **SMALL))
    rig._ends.append(second)
    eventually(lambda: second.up and rig.receiver.up, lambda: (rig.receiver.poll(), second.poll()))
    assert forming._peers[0] != old
    del forming._control.receive
    rig.leader = second
    for _ in range(3):
        rig.receiver.engine._forming_ns = 0
        rig.serve()
    assert rig.receiver.up
    rig.round(rig.receiver.open_request(1, PROMPT)).release()


def test_sessions_of_equal_size_and_other_shape_get_their_own_slots() -> None:
    """A benchmark's receiver adopts sizes: 4 slots of 2 long rows and 4 of 4 short ones need the same memory."""
    most = {**SMALL, "vocab_size": 256, "depth": 4, "support": 16}
    base = configure(Role.RECEIVER, listen=ANYWHERE, **most)
    receiver = Receiver(replace(base, takes_options=True))
    rig = Rig.__new__(Rig)
    try:
        for vocab_size, depth in ((256, 2), (128, 4), (256, 2)):
            sizes = {**most, "vocab_size": vocab_size, "depth": depth}
            leader = Leader(configure(Role.LEADER, connect=receiver.endpoint, **sizes))
            rig.receiver, rig.leader = receiver, leader
            try:
                eventually(lambda: receiver.up and rig.leader.up, rig.serve)
                assert receiver._table is not None
                assert receiver.session is not None
                assert receiver._table.geometry.row_bytes == 4 * vocab_size
                assert receiver._table.geometry.depth == depth
                assert len(receiver.session.memory) == receiver._table.geometry.total_bytes
            finally:
                leader.close()
            eventually(lambda: not receiver.up, receiver.poll)
    finally:
        receiver.close()


DROPPED = """
import gc, sys
from pp1q_transport import open_leader, open_receiver
receiver = open_receiver(listen="tcp://127.0.0.1:0", vocab_size=128)
leader = open_leader(connect=receiver.endpoint, vocab_size=128)
while not (receiver.up and leader.up):
    receiver.poll(), leader.poll()
if sys.argv[1] == "dropped":
    del receiver, leader
    gc.collect()
sys.exit(3)
"""


@pytest.mark.parametrize("how", ("dropped", "left open"))
def test_ends_that_nobody_closed_hang_no_process(how: str) -> None:
    """Neither the garbage collector nor the interpreter's end may wait for a ZeroMQ context that nobody ends."""
    command = [sys.executable, "-c", DROPPED, how]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, timeout=30, env=child_environment())
    assert done.returncode == 3
    assert b"Traceback" not in done.stderr
    assert b"ignored" not in done.stderr


def test_nobody_sleeps_before_what_a_flush_took_in_was_looked_at(make_rig: MakeRig) -> None:
    """A flush receives too. What it took in rings no bell any more: an owner that slept on it would hear of it with the next
    frame, if there is one."""
    rig = make_rig().connect()
    link = rig.leader.engine.link
    assert link is not None
    before = link.bytes_in
    rig.receiver.open_request(1, PROMPT)
    rig.receiver.poll()
    eventually(lambda: link.bytes_in > before, rig.leader.engine.flush)
    assert rig.leader.before_sleep() is None
    rig.leader.poll()
    assert rig.leader.before_sleep() is not None
    rig.leader.after_sleep(set())
