"""The daemon's socket file: replaced when dead, never when alive, and gone after a clean end."""

from __future__ import annotations

import fcntl
import os
import signal
import socket
import stat
from pathlib import Path

import pytest
from local_rig import Child

from pp1q_transport.counters import Counters
from pp1q_transport.errors import ConfigError
from pp1q_transport.local import unix_socket
from pp1q_transport.local.attach import AttachServer

pytestmark = pytest.mark.timeout(60)


def test_the_door_is_opened_with_the_mode_that_was_asked_for(folder: Path) -> None:
    umask = os.umask(0o022)
    try:
        for mode in (0o600, 0o660):
            path = folder / f"{mode:o}.sock"
            server = AttachServer(str(path), frozenset(), Counters(), mode)
            assert stat.S_IMODE(path.stat().st_mode) == mode
            server.close()
            server.close()
            assert not path.exists()
        with pytest.raises(ConfigError, match="socket mode 666"):
            AttachServer(str(folder / "x"), frozenset(), Counters(), 0o666)
    finally:
        os.umask(umask)
    assert list(folder.iterdir()) == []


def test_a_door_that_a_kill_left_is_replaced_and_a_live_one_is_not(folder: Path) -> None:
    path = str(folder / "daemon.sock")
    (folder / "daemon.sock.new").touch()
    daemon = Child("serve", path)
    assert daemon.line() == "ok listening"
    with pytest.raises(ConfigError, match=rf"another daemon \(pid {daemon.process.pid}\) listens at"):
        AttachServer(path, frozenset(), Counters())
    os.kill(daemon.process.pid, signal.SIGSTOP)
    with pytest.raises(ConfigError, match="another daemon"):
        AttachServer(path, frozenset(), Counters())
    daemon.kill()
    assert os.path.exists(path)
    server = AttachServer(path, frozenset(), Counters())
    assert sorted(os.listdir(folder)) == ["daemon.sock"]
    daemon.end()
    server.close()
    assert os.listdir(folder) == []


def test_of_daemons_that_start_at_once_one_wins(folder: Path) -> None:
    path = str(folder / "daemon.sock")
    dead = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    dead.bind(path)
    dead.close()
    daemons = [Child("serve", path) for _ in range(6)]
    lines = [daemon.line() for daemon in daemons]
    try:
        assert lines.count("ok listening") == 1, lines
        assert sum(line.startswith("ConfigError: another daemon (pid ") for line in lines) == 5, lines
        winner = daemons[lines.index("ok listening")]
        assert all(f"(pid {winner.process.pid})" in line for line in lines if line != "ok listening")
    finally:
        for daemon in daemons:
            daemon.end()


def test_the_folder_is_locked_while_the_old_socket_is_judged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else two daemons could both find it dead, and the second would bury the first one's live socket."""
    monkeypatch.setattr(unix_socket, "LOCK_S", 0.05)
    server = AttachServer(str(folder / "first.sock"), frozenset(), Counters())
    held = os.open(folder, os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    with pytest.raises(ConfigError, match="stays locked: another program holds a flock on it"):
        AttachServer(str(folder / "second.sock"), frozenset(), Counters())
    server.close()
    assert os.listdir(folder) == ["first.sock"], "and is left alone while that can't be judged"
    os.close(held)
    AttachServer(str(folder / "first.sock"), frozenset(), Counters()).close()
    assert os.listdir(folder) == []


def test_closing_leaves_another_daemons_door_alone(folder: Path) -> None:
    path = str(folder / "daemon.sock")
    first = AttachServer(path, frozenset(), Counters())
    os.unlink(path)  # somebody tidied up
    second = AttachServer(path, frozenset(), Counters())
    first.close()
    assert os.path.exists(path)
    second.close()
    assert not os.path.exists(path)


def test_a_path_that_can_not_be_used_is_refused_in_one_line(folder: Path) -> None:
    (folder / "file").touch()
    stream = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    stream.bind(str(folder / "stream"))
    stream.listen()
    for name, words in (
        ("file", "is no socket"), ("stream", "another program"), ("no/such", "can't use folder"), ("", "must have 1 to"),
        ("x" * 120, "choose a shorter one"),
    ):
        with pytest.raises(ConfigError, match=words) as raised:
            AttachServer(str(folder / name) if name else "", frozenset(), Counters())
        assert "\n" not in str(raised.value)
    stream.close()
    assert sorted(os.listdir(folder)) == ["file", "stream"]


def test_a_folder_that_is_not_there_or_not_ours_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unix_socket.check_folder(str(tmp_path / "a.sock"))
    with pytest.raises(ConfigError, match="none does not exist"):
        unix_socket.check_folder(str(tmp_path / "none" / "a.sock"))
    monkeypatch.setattr(os, "access", lambda _folder, _how: False)  # root may write anywhere
    with pytest.raises(ConfigError, match="may not write"):
        unix_socket.check_folder(str(tmp_path / "a.sock"))
