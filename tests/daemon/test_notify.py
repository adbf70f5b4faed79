"""sd_notify over real datagram sockets: what is sent, how often the watchdog hears, and that failures disturb nothing."""

from __future__ import annotations

import os
import re
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pp1q_transport.daemon.notify import Notifier
from pp1q_transport.errors import ConfigError

pytestmark = pytest.mark.timeout(30)
MS = 1_000_000


@pytest.fixture(params=("path", "abstract"))
def manager(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, str]]:
    name = str(tmp_path / "notify") if request.param == "path" else f"@pp1q-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(name.replace("@", "\0", 1) if request.param == "abstract" else name)
        sock.settimeout(10)
        yield sock, name


def heard(sock: socket.socket) -> list[str]:
    sock.setblocking(False)
    texts = []
    try:
        while True:
            texts.append(sock.recv(4096).decode())
    except BlockingIOError:
        return texts


def test_a_life(manager: tuple[socket.socket, str]) -> None:
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    notifier.ready("serving 1 peer")
    notifier.status("two\nlines\x1b")
    before_us = time.monotonic_ns() // 1000
    notifier.reloading()
    after_us = time.monotonic_ns() // 1000
    notifier.ready()
    notifier.stopping("draining")
    notifier.close()
    notifier.close()
    notifier.ready()
    notifier.beat(0)
    first, status, reload, again, last = heard(sock)
    assert first == "READY=1\nSTATUS=serving 1 peer"
    assert status == "STATUS=two lines "
    told = re.fullmatch(r"RELOADING=1\nMONOTONIC_USEC=(\d+)", reload)
    assert told is not None
    assert before_us <= int(told[1]) <= after_us
    assert again == "READY=1"
    assert last == "STOPPING=1\nSTATUS=draining"


def test_the_watchdog_hears_at_most_twice_an_interval(manager: tuple[socket.socket, str]) -> None:
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name, "WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid())})
    for now_ns in range(0, 100 * MS, MS):
        notifier.beat(now_ns)
    assert heard(sock) == ["WATCHDOG=1"] * 10
    notifier.close()


@pytest.mark.parametrize("environ", ({}, {"WATCHDOG_USEC": "20000", "WATCHDOG_PID": str(os.getpid() + 1)}))
def test_nobody_watches_this_process(manager: tuple[socket.socket, str], environ: dict[str, str]) -> None:
    sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name} | environ)
    for now_ns in range(0, 100 * MS, MS):
        notifier.beat(now_ns)
    assert heard(sock) == []
    notifier.close()


def test_without_a_manager_nothing_happens() -> None:
    notifier = Notifier({"WATCHDOG_USEC": "1000"})
    notifier.ready()
    notifier.beat(0)
    assert notifier.counters.totals == {}


def test_a_manager_that_is_gone_is_counted_logged_once_and_told_again_later(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "notify"
    notifier = Notifier({"NOTIFY_SOCKET": str(path), "WATCHDOG_USEC": "20000"})
    notifier.beat(0)
    notifier.beat(1)
    assert notifier.counters.get("notify_failed") == 2
    assert capsys.readouterr().err.count("can't be told") == 1
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(path))
        notifier.beat(2)  # no half interval has passed, but the last beat was not heard
        assert heard(sock) == ["WATCHDOG=1"]
    notifier.close()


def test_a_manager_that_does_not_read_never_blocks(manager: tuple[socket.socket, str]) -> None:
    _sock, name = manager
    notifier = Notifier({"NOTIFY_SOCKET": name})
    for _ in range(10_000):
        notifier.status("x")
        if notifier.counters.get("notify_failed"):
            break
    assert notifier.counters.get("notify_failed")
    notifier.close()


@pytest.mark.parametrize(
    "environ",
    (
        {"NOTIFY_SOCKET": "run/notify"},
        {"NOTIFY_SOCKET": "vsock:2:1234"},
        {"NOTIFY_SOCKET": "@"},
        {"NOTIFY_SOCKET": "/" + "x" * 107},
        {"WATCHDOG_USEC": "0"},
        {"WATCHDOG_USEC": "-5"},
        {"WATCHDOG_USEC": "1e6"},
        {"WATCHDOG_USEC": "1000", "WATCHDOG_PID": "me"},
    ),
    ids=str,
)
def test_a_broken_environment_is_named(environ: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match=next(reversed(environ))):
        Notifier(environ)
