"""The rdma link's port and dial, on verbs that are played: nothing exists before the proof, and no session before both ends are
joined."""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from played_verbs import PlayedDevice, PlayedDomain

from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.control_codec import encode_message
from pp1q_transport.counters import Counters
from pp1q_transport.errors import ConfigError, PeerFault, Reason
from pp1q_transport.links.rdma_config import ROCE_V1, Gid
from pp1q_transport.links.rdma_connection import JOIN_WITHIN_NS, RdmaConnection
from pp1q_transport.links.rdma_port import RdmaDialer, RdmaPort, landing_for
from pp1q_transport.links.rdma_records import encode_join, encode_ready
from pp1q_transport.links.tcp_port import split_endpoint
from pp1q_transport.session.negotiate import Agreement, Connector, Listener, Role, make_hello
from pp1q_transport.session.proof import PROOF_FRAME_BYTES, proof_frame

pytestmark = pytest.mark.timeout(60)
SMALL: dict[str, Any] = {"vocab_size": 64, "depth": 2, "support": 8, "max_slots": 2, "batch_requests": 1, "link_kinds": ("rdma",)}


class Port:
    """A listening receiver's port with its device, its counters and the agreements that wait for their link."""

    def __init__(self) -> None:
        self.agreements: dict[int, Agreement] = {}
        self.counters = Counters()
        self.device = PlayedDevice()
        self.port = RdmaPort("127.0.0.1", self.agreements.get, self.counters, self.device)  # type: ignore[arg-type]
        self.joined: list[RdmaConnection] = []

    def expect(self) -> Agreement:
        """The connecting leader's agreement; this end's waits for its proof."""
        listener = Listener(make_hello(Role.RECEIVER, 11, **SMALL), self.port.endpoint, encode_message, os.urandom)
        connector = Connector(make_hello(Role.LEADER, 12, **SMALL), encode_message, os.urandom)
        now_ns = monotonic_ns()
        answer, ours = listener.receive(connector.start(now_ns), now_ns)
        assert isinstance(ours, Agreement)
        self.agreements[ours.session] = ours
        return connector.receive(answer, now_ns)

    def dial(self, theirs: Agreement, device: PlayedDevice | None = None) -> RdmaDialer:
        return RdmaDialer(theirs, monotonic_ns(), "127.0.0.1", device or PlayedDevice(), Counters())  # type: ignore[arg-type]

    def prove(self, theirs: Agreement) -> socket.socket:
        """A socket that proved itself and does nothing more by itself."""
        sock = socket.create_connection(split_endpoint(self.port.endpoint, "rdma"))
        sock.sendall(proof_frame(theirs))
        self.until(lambda: self.port.joins(theirs.session))
        assert len(sock.recv(PROOF_FRAME_BYTES, socket.MSG_WAITALL)) == PROOF_FRAME_BYTES
        return sock

    def serve(self, now_ns: int = 0) -> None:
        self.joined += [connection for connection, _ in self.port.poll(now_ns or monotonic_ns())]

    def until(self, condition: Callable[[], object]) -> None:
        stop = time.monotonic() + 20
        while not condition():
            assert time.monotonic() < stop
            self.serve()
            time.sleep(0.0002)


@pytest.fixture
def made() -> Iterator[Port]:
    port = Port()
    yield port
    for connection in port.joined:
        connection.close()
    port.port.close()
    port.device.close()


def test_both_ends_are_joined_before_anybody_hears_of_a_link(made: Port) -> None:
    theirs = made.expect()
    dialer = made.dial(theirs)
    found: list[RdmaConnection] = []

    def both() -> bool:
        connection = dialer.poll(monotonic_ns()) if not found else None
        if connection is not None:
            found.append(connection)
        return bool(found and made.joined)

    made.until(both)
    left, right = found[0], made.joined[0]
    assert left.up
    assert right.up
    assert left.peer is not None
    assert left.peer.shape == right.shape == landing_for(made.agreements[theirs.session])
    assert (left.shape.slots, right.shape.slots, right.shape.rows) == (0, 2, 2)
    assert left.pair.state == right.pair.state == "RTS"
    assert not made.port.joins(theirs.session)
    assert made.counters.get("links_cut_off") == 0
    left.close()


def test_no_verbs_object_exists_before_the_proof(made: Port) -> None:
    theirs = made.expect()
    proof = proof_frame(theirs)
    with socket.create_connection(split_endpoint(made.port.endpoint, "rdma")) as sock:
        sock.sendall(proof[:-1])
        for _ in range(20):
            made.serve()
        assert made.device.domains == []
        sock.sendall(proof[-1:])
        made.until(lambda: made.device.domains)
    made.until(lambda: made.counters.get("links_cut_off"))
    assert made.counters.of(Reason.PEER_LOST) == 1
    assert made.device.domains[0].closed


def test_one_that_proves_itself_and_does_not_join_is_cut_off(made: Port) -> None:
    sock = made.prove(made.expect())
    made.serve()
    assert made.counters.get("links_cut_off") == 0
    made.serve(monotonic_ns() + JOIN_WITHIN_NS)
    assert made.counters.of(Reason.TIMEOUT) == 1
    assert made.device.domains[0].closed
    assert made.joined == []
    sock.close()


def peers_join(made: Port, **changes: Any) -> bytes:
    """A JOIN that our end would take, but for `changes`: its own sent back with another number."""
    ours = made.port._joining[0][0]._ours
    assert ours is not None
    return encode_join(replace(ours, **{"number": ours.number + 1000, **changes}))


@pytest.mark.parametrize(
    ("said", "reason"),
    (
        (lambda _made: b"GET / HTTP/1.1\r\n", Reason.BAD_VERSION),
        (lambda _made: struct.pack("<HHI", 1, 1, 0xFFFFFFFF), Reason.LENGTH_BOUNDS),
        (lambda _made: encode_ready(0), Reason.LINK_ERROR),
        (lambda made: peers_join(made, life=1), Reason.LINK_ERROR),
        (lambda made: peers_join(made, family=6), Reason.LINK_ERROR),
        (lambda made: peers_join(made, roce_version=1), Reason.LINK_ERROR),
        (lambda made: peers_join(made, ethernet=False), Reason.LINK_ERROR),
        (lambda made: peers_join(made, mtu=9), Reason.LENGTH_BOUNDS),
        (lambda made: peers_join(made) + encode_ready(1), Reason.LINK_ERROR),
        (lambda made: peers_join(made) + peers_join(made), Reason.LINK_ERROR),
    ),
    ids=(
        "garbage", "too long", "ready first", "another life", "family", "RoCE version", "link layer", "MTU", "ready of another",
        "two of one life",
    ),
)  # fmt: skip
def test_what_no_honest_end_says_is_cut_off_and_counted(made: Port, said: Callable[[Port], bytes], reason: Reason) -> None:
    sock = made.prove(made.expect())
    sock.sendall(said(made))
    made.until(lambda: made.counters.get("links_cut_off"))
    assert made.counters.of(reason) == 1
    assert made.joined == []
    assert made.device.domains[0].closed
    sock.close()


def test_ends_of_two_address_families_say_what_to_set(made: Port) -> None:
    device = PlayedDevice()
    device.entry = Gid(0, "2001:0db8:0000:0000:0000:0000:0000:0001", ROCE_V1)
    dialer = made.dial(made.expect(), device)
    reasons: list[Reason] = []

    def fails() -> bool:
        try:
            dialer.poll(monotonic_ns())
        except PeerFault as fault:
            reasons.append(fault.reason)
            return True
        return False

    made.until(fails)
    made.until(lambda: made.counters.get("links_cut_off"))
    assert reasons[0] in (Reason.LINK_ERROR, Reason.PEER_LOST)
    assert device.domains[0].closed


def test_a_queue_pair_that_can_not_be_made_leaves_nothing(made: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_arguments: object) -> None:
        raise ConfigError("can't make an rdma queue pair")

    monkeypatch.setattr(PlayedDomain, "queue_pair", refuses)
    theirs = made.expect()
    dialer = made.dial(theirs)
    with pytest.raises(PeerFault, match="queue pair"):  # noqa: PT012 - the port must be served meanwhile
        while True:
            made.serve()
            dialer.poll(monotonic_ns())
    made.until(lambda: made.counters.get("link_memory_failed") == 1)
    assert made.device.domains
    assert all(domain.closed for domain in made.device.domains)


def test_a_device_that_gives_nothing_costs_the_attempt_only(made: Port, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_arguments: object, **_options: object) -> None:
        raise ConfigError("can't register 4096 bytes: raise the memlock limit")

    monkeypatch.setattr(PlayedDomain, "register", refuses)
    theirs = made.expect()
    dialer = made.dial(theirs)
    with pytest.raises(PeerFault, match="memlock"):  # noqa: PT012 - the port must be served meanwhile
        while True:
            made.serve()
            dialer.poll(monotonic_ns())
    made.until(lambda: made.counters.get("link_memory_failed") == 1)
    assert all(domain.closed for domain in made.device.domains)


@pytest.mark.parametrize("endpoint", ("tcp://127.0.0.1:7", "rdma://127.0.0.1", "rdma://127.0.0.1:0", "rdma://127.0.0.1:x", ""))
def test_an_endpoint_of_another_kind_is_malformed(made: Port, endpoint: str) -> None:
    with pytest.raises(PeerFault) as caught:
        made.dial(replace(made.expect(), data=endpoint))
    assert caught.value.reason is Reason.MALFORMED
