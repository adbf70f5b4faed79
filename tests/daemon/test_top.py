"""`pp1q top`: the lines of a daemon, rates from differences, and the command against fake daemons that come and go."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pp1q_transport.counters import BOUNDS_NS, Histogram
from pp1q_transport.daemon.status import Status, encode_status
from pp1q_transport.daemon.view import Reading, _duration, describe

pytestmark = pytest.mark.timeout(60)


def reading(status: Status | None, at_s: float = 0.0, fault: str = "") -> Reading:
    return Reading("/run/x.sock", at_s, status, fault)


def text(*lines: str) -> str:
    return "\n".join(lines)


def test_a_first_look_has_totals_and_the_quantiles_of_a_life(make_status: Callable[..., Status]) -> None:
    lines = describe(reading(make_status()))
    assert lines[0] == "receiver target@b  pid 1234  up 1h02m  sessions 1/1"
    shown = text(*lines)
    assert "group    rank 0  replicate  2/2 ranks up  epoch 4  breaker closed" in shown
    assert "slots    FREE 6  GRANTED 1  QUARANTINE 1" in shown
    assert "totals   5 rounds  25 rows  2.6 MB" in shown
    assert "discards peer_lost 8  timeout 3" in shown
    assert "latency  p50" in shown
    assert max(map(len, lines)) <= 80


def test_rates_are_differences_over_the_time_between(make_status: Callable[..., Status]) -> None:
    before = make_status()
    late = Histogram()
    late.counts = list(before["latency"]["counts"])
    for _ in range(100):
        late.add(5_000_000)
    after = make_status(ready=205, discarded=13, rows=1025, bytes_ready=2_585_600 + 40_000_000, latency=late.snapshot())
    shown = text(*describe(reading(after, 12.0), reading(before, 10.0)))
    assert "rates    100.0 rounds/s  500.0 rows/s  20.0 MB/s  discarded 0.99 %" in shown
    assert "latency  p50 4.50 ms  p99 4.99 ms  p99.9 5.00 ms" in shown  # of what came since
    assert "tail     p50 -  p99 -" in shown


@pytest.mark.parametrize("changes", ({"pid": 4321}, {"ready": 0}))
def test_a_restart_between_two_looks_gives_no_rates(make_status: Callable[..., Status], changes: dict[str, object]) -> None:
    shown = text(*describe(reading(make_status(**changes), 2.0), reading(make_status(), 1.0)))
    assert "rates" not in shown
    assert "totals" in shown


HEADS = (
    ({"draining": True}, "DRAINING"),
    ({"breakers": [{"peer": "a", "state": "open", "opened": 2}], "group": None}, "1/1  breaker open"),
    ({"breakers": [{"peer": "a", "state": "open", "opened": 2}, {"peer": "b", "state": "closed", "opened": 0}], "group": None},
     "1/1  breaker a open"),
    ({"breakers": [], "group": None}, "sessions 1/1"),
    ({"group": {"size": 1, "rank": 0, "mode": "replicate", "epoch": 9, "open": True, "ranks_up": 1}}, "1/1  breaker closed"),
    ({"sessions": [{"peer": "a", "up": False, "session": 0, "link": "tcp", "endpoint": "e", "since_s": 3.0, "formed": 0,
                    "ended": 0}]}, "sessions 0/1"),
)  # fmt: skip


@pytest.mark.parametrize(("changes", "head"), HEADS, ids=[head for _, head in HEADS])
def test_the_headline_says_what_matters(make_status: Callable[..., Status], changes: dict[str, object], head: str) -> None:
    assert head in describe(reading(make_status(**changes)), columns=200)[0]


@pytest.mark.parametrize(
    ("seconds", "shown"), ((0.4, "up 0s"), (61, "up 1m01s"), (3600, "up 1h00m"), (90000, "up 1d01h"), (1e9, "up 11574d01h"))
)
def test_spans(make_status: Callable[..., Status], seconds: float, shown: str) -> None:
    assert shown in describe(reading(make_status(uptime_s=seconds)))[0]


def test_what_a_daemon_says_moves_no_cursor_and_breaks_no_line(make_status: Callable[..., Status]) -> None:
    status = make_status(name="\x1b[2J\n" * 50, reasons={"\x1b]0;x\x07" * 20: 1}, slots={"\u202eFREE": 1})
    for line in describe(reading(status)) + describe(reading(None, 0.0, "x\n\x1b[31m")):
        assert len(line) <= 80
        assert line.isprintable()


def test_a_leader_shows_refusals_where_a_receiver_shows_discards(make_status: Callable[..., Status]) -> None:
    status = make_status(group=None, slots={})
    del status["discards"]
    shown = text(*describe(reading(status)))
    assert "refusals peer_lost 8  timeout 3  generation_stale 2" in shown
    assert not [name for name in ("latency", "tail", "slots", "group") if f"  {name} " in shown]


def test_80_columns_hold_the_first_lines_of_a_rank_whatever_its_state(make_status: Callable[..., Status]) -> None:
    group = {"size": 8, "rank": 7, "mode": "request-owner", "epoch": 123_456, "open": True, "ranks_up": 8}
    breakers = [{"peer": "target-a", "state": "probing", "opened": 2}]
    wide = make_status(name="target-a-rank7", pid=4_194_304, uptime_s=1e9, draining=True, group=group, breakers=breakers)
    lines = describe(reading(wide))
    assert lines[0] == "receiver target-a-rank7  DRAINING  pid 4194304  up 11574d01h  sessions 1/1"
    assert lines[2] == "  group    rank 7  request-owner  8/8 ranks up  epoch 123456  breaker probing"


@pytest.mark.parametrize(
    ("durations_ns", "shown"),
    (
        ((1, 2, 3), "tail     p50 < {low}  p99 < {low}"),
        ((10**12, 10**12), "tail     p50 > {high}  p99 > {high}"),
        ((), "tail     p50 -  p99 -"),
    ),
)
def test_no_quantile_is_made_up_outside_the_bounds(
    make_status: Callable[..., Status], durations_ns: tuple[int, ...], shown: str
) -> None:
    tail = Histogram()
    for duration_ns in durations_ns:
        tail.add(duration_ns)
    low, high = _duration(BOUNDS_NS[0]), _duration(BOUNDS_NS[-1])
    assert shown.format(low=low, high=high) in text(*describe(reading(make_status(tail=tail.snapshot()))))


@pytest.mark.parametrize(("role", "awaited"), (("leader", "draft"), ("receiver", "target")))
def test_a_process_that_is_missing_is_said_to_be(make_status: Callable[..., Status], role: str, awaited: str) -> None:
    shown = text(*describe(reading(make_status(role=role, clients=[]))))
    assert f"clients  none: no {awaited} is attached" in shown
    assert "none" not in text(*describe(reading(make_status(role=role))))


# ---- the command ----------------------------------------------------------------------------------------------------


@contextmanager
def daemon(path: Path, status: Callable[[], Status]) -> Iterator[None]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen()

        def serve() -> None:
            while True:
                try:
                    link, _ = listener.accept()
                except OSError:
                    return
                with link:
                    link.recv(64)
                    link.send(encode_status(status()))

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield
        finally:
            listener.shutdown(socket.SHUT_RDWR)
            thread.join()
            path.unlink()


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "pp1q_transport.cli", "top", *map(str, arguments)]


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(*arguments), capture_output=True, text=True, timeout=50, check=False)


def test_once(tmp_path: Path, make_status: Callable[..., Status]) -> None:
    with daemon(tmp_path / "a", make_status):
        shown = run(tmp_path / "a", "--once")
        assert (shown.returncode, shown.stderr) == (0, "")
        assert shown.stdout.startswith("receiver target@b  pid 1234")
        assert "\x1b" not in shown.stdout
        gone = run(tmp_path / "a", tmp_path / "b", "--once", "--json")
    assert gone.returncode == 1
    assert gone.stderr.startswith("pp1q: peer_lost: no daemon at")
    assert gone.stderr.count("\n") == 1
    first, second = json.loads(gone.stdout)["daemons"]
    assert first == {"socket": str(tmp_path / "a"), "status": make_status(), "fault": ""}
    assert second["status"] is None


def test_a_pipe_gets_look_after_look_and_sees_a_daemon_return(tmp_path: Path, make_status: Callable[..., Status]) -> None:
    looks = [0]

    def status() -> Status:
        looks[0] += 1
        return make_status(ready=5 + 100 * looks[0])

    def until(process: subprocess.Popen[str], wanted: str) -> None:
        assert process.stdout is not None
        for line in process.stdout:
            if wanted in line:
                return
        raise AssertionError(f"no {wanted!r}")

    pipe, arguments = subprocess.PIPE, command(tmp_path / "a", "--interval", "0.1")
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True) as it:
        until(it, "gone (since ")
        with daemon(tmp_path / "a", status):
            until(it, "rounds/s")
        until(it, "gone (since ")
        it.send_signal(signal.SIGINT)
        _, errors = it.communicate(timeout=30)
    assert it.returncode == 0
    assert errors == ""


def test_a_terminal_is_redrawn_and_cut_to_its_size(tmp_path: Path, make_status: Callable[..., Status]) -> None:
    ours, theirs = pty.openpty()
    environ = os.environ | {"COLUMNS": "50", "LINES": "6", "TERM": "vt100"}
    with daemon(tmp_path / "a", make_status):
        process = subprocess.Popen(command(tmp_path / "a", "--interval", "0.1"), stdout=theirs, stderr=theirs, env=environ)
        os.close(theirs)
        data = b""
        while data.count(b"\x1b[H") < 3:
            assert select.select([ours], [], [], 30)[0]
            data += os.read(ours, 1 << 16)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
    os.close(ours)
    frame = data.decode().split("\x1b[H")[2].split("\x1b[J")[0].replace("\x1b[K", "")
    lines = frame.rstrip("\r\n").split("\r\n")
    assert len(lines) == 5
    assert lines[-1].startswith("... ")
    assert max(map(len, lines)) <= 50


@pytest.mark.parametrize("arguments", ((), ("--interval", "0", "/x"), ("--interval", "nan", "/x")))
def test_bad_arguments_are_named(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
