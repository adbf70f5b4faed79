"""The metrics port over real sockets: Prometheus's own parser reads it, and no client can hold, fill or stop it."""

from __future__ import annotations

import contextlib
import os
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator
from typing import cast

import pytest
from prometheus_client.parser import text_string_to_metric_families

from pp1q_transport.daemon.exposition import make_registry, render
from pp1q_transport.daemon.metrics import CONNECTIONS, LIMIT_NS, REQUEST_BYTES, MetricsPort
from pp1q_transport.daemon.status import Status
from pp1q_transport.errors import ConfigError

pytestmark = pytest.mark.timeout(30)
GET = b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n"


class Loop:
    """A port whose status can be changed, and a loop of one descriptor that serves it on a clock of our own."""

    def __init__(self, status: Status) -> None:
        self.status = status
        self.port = MetricsPort("127.0.0.1", 0, lambda: self.status)
        self.now_ns = 0

    def connect(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port.port), timeout=10)

    def turn(self, wait_s: float = 1.0) -> bool:
        """Waits for the descriptor, then polls; whether there was anything."""
        ready = bool(select.select([self.port], [], [], wait_s)[0])
        self.port.poll(self.now_ns)
        return ready

    def ask(self, *pieces: bytes, shut: bool = False) -> tuple[int, dict[str, str], str]:
        with self.connect() as client:
            for piece in pieces:
                client.sendall(piece)
                self.turn()
            if shut:
                client.shutdown(socket.SHUT_WR)
            client.setblocking(False)
            data = b""
            while True:
                self.turn(0.01)
                try:
                    more = client.recv(1 << 16)
                except BlockingIOError:
                    continue
                if not more:
                    break
                data += more
        self.turn(0.05)
        return answer(data)


def answer(data: bytes) -> tuple[int, dict[str, str], str]:
    head, _, body = data.decode().partition("\r\n\r\n")
    first, *lines = head.split("\r\n")
    headers = dict(line.split(": ", 1) for line in lines)
    assert first.startswith("HTTP/1.1 ")
    return int(first.split()[1]), headers, body


@pytest.fixture
def loop(make_status: Callable[..., Status]) -> Iterator[Loop]:
    loop = Loop(make_status())
    yield loop
    loop.port.close()
    loop.port.close()


def samples(text: str) -> dict[tuple[str, ...], float]:
    return {
        (sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_prometheus_reads_every_metric(loop: Loop) -> None:
    code, headers, body = loop.ask(GET)
    assert code == 200
    assert headers["Content-Type"].startswith("text/plain; version=0.0.4")
    assert int(headers["Content-Length"]) == len(body.encode())
    found = samples(body)
    expected = {
        ("pp1q_proposals_total", "outcome=ready"): 5, ("pp1q_proposals_total", "outcome=discarded"): 11,
        ("pp1q_discards_total", "reason=timeout"): 3, ("pp1q_refusals_total", "reason=generation_stale"): 2,
        ("pp1q_slots", "state=FREE"): 6, ("pp1q_sessions_up", "peer=draft-a"): 1, ("pp1q_sessions_total", "peer=draft-a"): 3,
        ("pp1q_rows_total",): 25, ("pp1q_payload_bytes_total",): 2_585_600, ("pp1q_group_epoch",): 4, ("pp1q_ranks_up",): 2,
        ("pp1q_breaker_open", "peer=draft-a"): 0, ("pp1q_clients", "role=receiver"): 1, ("pp1q_quarantined_slots",): 1,
        ("pp1q_build_info", "version=0.1.0"): 1, ("pp1q_step_latency_seconds_count",): 5,
        ("pp1q_step_latency_seconds_sum",): 0.045, ("pp1q_step_latency_seconds_bucket", "le=0.001"): 2,
        ("pp1q_step_latency_seconds_bucket", "le=0.002"): 4, ("pp1q_step_latency_seconds_bucket", "le=+Inf"): 5,
        ("pp1q_tail_after_last_row_seconds_count",): 5,
    }  # fmt: skip
    assert {key: found.get(key) for key in expected} == pytest.approx(expected)
    assert found["pp1q_process_start_time_seconds",] == pytest.approx(time.time() - 3725.5, abs=100)
    assert all(name.startswith("pp1q_") for name, *_ in found)
    assert len(found) < 120


def test_histogram_buckets_rise_and_are_few(loop: Loop) -> None:
    for family in text_string_to_metric_families(render(make_registry(lambda: loop.status)).decode()):
        if family.type == "histogram":
            buckets = [(float(s.labels["le"]), s.value) for s in family.samples if s.name.endswith("_bucket")]
            assert buckets == sorted(buckets)
            assert len(buckets) == 23
            assert [bound for bound, _ in buckets[:4]] == [1e-6, 2e-6, 5e-6, 1e-5]


def test_names_that_need_escaping_are(make_status: Callable[..., Status]) -> None:
    status = make_status(version='a"b\\c\nd')
    found = samples(render(make_registry(lambda: status)).decode())
    assert found["pp1q_build_info", 'version=a"b\\c\nd'] == 1


def test_a_leader_has_no_discards_by_reason_and_no_group(make_status: Callable[..., Status]) -> None:
    status = cast("Status", {key: value for key, value in make_status(group=None).items() if key != "discards"})
    found = samples(render(make_registry(lambda: status)).decode())
    assert not [key for key in found if key[0] in ("pp1q_discards_total", "pp1q_group_epoch")]


@pytest.mark.parametrize(
    ("path", "changes", "code"),
    (
        ("/healthz", {}, 200),
        ("/healthz", {"last_loop_age_s": 60.0}, 503),
        ("/healthz", {"draining": True, "sessions": []}, 200),
        ("/readyz", {}, 200),
        ("/readyz?verbose", {}, 200),
        ("/readyz", {"draining": True}, 503),
        ("/readyz", {"sessions": []}, 503),
    ),
)
def test_health_and_readiness(
    loop: Loop, make_status: Callable[..., Status], path: str, changes: dict[str, object], code: int
) -> None:
    loop.status = make_status(**changes)
    assert loop.ask(f"GET {path} HTTP/1.1\r\n\r\n".encode())[0] == code


@pytest.mark.parametrize(
    ("request_", "code"),
    (
        (b"GET / HTTP/1.1\r\n\r\n", 404),
        (b"GET /metrics/x HTTP/1.1\r\n\r\n", 404),
        (b"POST /metrics HTTP/1.1\r\nContent-Length: 5\r\n\r\nhello", 405),
        (b"GET /metrics HTTP/2.0\r\n\r\n", 400),
        (b"GET /metrics\r\n\r\n", 400),
        (b"GET  /metrics HTTP/1.1\r\n\r\n", 400),
        (b"\x16\x03\x01\x02\x00\n\n", 400),
        (b"\r\n\r\n", 400),
        (b"GET /metrics HTTP/1.1\r\nX: " + b"x" * (2 * REQUEST_BYTES), 400),
        (b"GET /metrics HTTP/1.0\n\n", 200),
    ),
)
def test_anything_else_is_answered_by_its_code(loop: Loop, request_: bytes, code: int) -> None:
    found, headers, _body = loop.ask(request_)
    assert found == code
    assert headers["Connection"] == "close"
    assert ("Allow" in headers) is (code == 405)


def test_head_has_no_body(loop: Loop) -> None:
    code, headers, body = loop.ask(b"HEAD /metrics HTTP/1.1\r\n\r\n")
    assert (code, body) == (200, "")
    assert int(headers["Content-Length"]) > 1000


def test_a_request_in_pieces_is_one(loop: Loop) -> None:
    assert loop.ask(*(GET[i : i + 1] for i in range(len(GET))))[0] == 200


def test_a_client_that_shuts_its_side_still_gets_its_answer(loop: Loop) -> None:
    assert loop.ask(GET, shut=True)[0] == 200


def test_a_client_that_still_sends_loses_no_answer_to_a_reset(loop: Loop) -> None:
    assert loop.ask(GET + b"x" * 50_000)[0] == 200


def test_slow_clients_are_cut_off_and_others_wait_their_turn(loop: Loop) -> None:
    slow = [loop.connect() for _ in range(CONNECTIONS)]
    for client in slow:
        client.sendall(b"GET ")
    while not all(item.request for item in loop.port._connections.values()) or len(loop.port._connections) < CONNECTIONS:
        loop.turn()
    late = loop.connect()
    late.sendall(GET)
    assert not loop.turn(0.05)  # full: the listener does not wake the loop
    assert loop.port.due_ns == LIMIT_NS
    loop.now_ns = LIMIT_NS
    loop.port.poll(loop.now_ns)
    for client in slow:
        assert client.recv(10) == b""
        client.close()
    assert loop.port.counters.get("metrics_connections_timed_out") == CONNECTIONS
    loop.turn()
    loop.turn()
    assert answer(late.recv(1 << 20))[0] == 200
    late.close()
    loop.turn()
    assert loop.port.due_ns is None
    assert not loop.turn(0.01)


def test_a_client_that_never_reads_or_closes_is_cut_off(loop: Loop) -> None:
    with loop.connect() as client:
        client.sendall(GET)
        while not any(item.sent for item in loop.port._connections.values()):
            loop.turn()
        assert not loop.turn(0.01)  # answered, still open: not a busy loop
        loop.now_ns = LIMIT_NS
        loop.port.poll(loop.now_ns)
        assert not loop.port._connections


def test_an_answer_larger_than_the_socket_takes_goes_out_in_turns(loop: Loop, make_status: Callable[..., Status]) -> None:
    loop.status = make_status(slots={f"S{n}": n for n in range(20_000)})
    loop.port._listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    with loop.connect() as client:
        client.sendall(GET)
        while loop.turn(0.05):
            pass
        assert [bool(item.answer) for item in loop.port._connections.values()] == [True]  # asleep until there is room
        client.setblocking(False)
        pieces = [b" "]
        while pieces[-1]:
            loop.turn(0.001)
            with contextlib.suppress(BlockingIOError):
                pieces.append(client.recv(1 << 20))
    assert b"".join(pieces).count(b"pp1q_slots{") == 20_000


def test_a_reset_client_disturbs_nobody(loop: Loop) -> None:
    client = loop.connect()
    client.sendall(b"GET")
    loop.turn()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    client.close()
    while loop.port._connections:
        loop.turn()
    assert loop.port.counters.get("metrics_connections_lost") == 1
    assert loop.ask(GET)[0] == 200


def test_out_of_descriptors_it_waits_and_does_not_spin(loop: Loop) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    with loop.connect() as client:
        client.sendall(GET)
        lowest = os.dup(0)
        os.close(lowest)
        resource.setrlimit(resource.RLIMIT_NOFILE, (lowest, before[1]))
        try:
            loop.port.poll(0)
            assert loop.port.counters.get("metrics_accept_failed") == 1
            assert not select.select([loop.port], [], [], 0.05)[0]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, before)
        due_ns = loop.port.due_ns
        assert due_ns is not None
        loop.now_ns = due_ns
        loop.port.poll(loop.now_ns)
        loop.turn()
        loop.turn()
        assert answer(client.recv(1 << 20))[0] == 200


def test_a_taken_address_is_a_setting_to_mend(loop: Loop) -> None:
    with pytest.raises(ConfigError, match=rf"\[daemon\] metrics: cannot listen on 127.0.0.1 port {loop.port.port}"):
        MetricsPort("127.0.0.1", loop.port.port, lambda: loop.status)


def test_ipv6(make_status: Callable[..., Status]) -> None:
    try:
        port = MetricsPort("::1", 0, make_status)
    except ConfigError as fault:
        pytest.skip(str(fault))
    assert port.host == "::1"
    port.close()
