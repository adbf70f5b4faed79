"""`pp1q-send` and `pp1q-recv` as processes: the report's keys, refusals, keys, a peer killed in the middle, Ctrl-C, bad input."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

from pp1q_transport.cli import recv, send

SEND = [sys.executable, "-m", "pp1q_transport.cli.send"]
RECV = [sys.executable, "-m", "pp1q_transport.cli.recv"]
SMALL = ["--vocab", "2048", "--rounds", "10", "--warmup", "2"]
LONG = ["--vocab", "2048", "--rounds", "100000", "--warmup", "2", "--no-floors"]
LIMIT_S = 40

KEYS = {
    "link", "representation", "requests", "depth", "rounds", "ready", "discarded", "reasons", "latency_us", "tail_us",
    "goodput_GBps", "rows_per_s", "cpu_s_per_GB", "rss_MiB", "floors", "extra",
}  # fmt: skip
FLOOR_KEYS = {"memcpy_GBps", "socket_GBps", "socket_rtt_us", "zmq_rtt_us", "zmq_GBps"}

pytestmark = pytest.mark.timeout(90)


def run(command: list[str], *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*command, *options], capture_output=True, text=True, timeout=LIMIT_S, check=False)


def one_line(text: str) -> str:
    lines = text.strip().splitlines()
    assert len(lines) == 1, text
    assert "Traceback" not in text
    return lines[0]


class Process:
    """A command in the background; what it writes goes to files, so that it can be read while it runs."""

    def __init__(self, folder: Path, command: list[str], *options: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.out = folder / f"{time.monotonic_ns()}.out"
        self.err = self.out.with_suffix(".err")
        with self.out.open("wb") as out, self.err.open("wb") as err:
            self.process = subprocess.Popen(
                [*command, *options], stdout=out, stderr=err, stdin=subprocess.DEVNULL, pass_fds=pass_fds
            )

    def end(self) -> tuple[int, str, str]:
        status = self.process.wait(LIMIT_S)
        return status, self.out.read_text(), self.err.read_text()

    def send(self, number: int) -> None:
        self.process.send_signal(number)


class Processes:
    """Starts commands, and ends every one of them with the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[Process] = []

    def start(self, command: list[str], *options: str, pass_fds: tuple[int, ...] = ()) -> Process:
        self.started.append(Process(self.folder, command, *options, pass_fds=pass_fds))
        return self.started[-1]

    def receiver(self, *options: str) -> tuple[Process, str]:
        """A listening receiver on a port of its own, and its endpoint."""
        read_end, write_end = os.pipe()
        fixed = ("--listen", "tcp://127.0.0.1:0", "--wait", "30", "--ready-fd", str(write_end))
        process = self.start(RECV, *fixed, *options, pass_fds=(write_end,))
        os.close(write_end)
        readable, _, _ = select.select([read_end], [], [], LIMIT_S)
        assert readable
        endpoint = os.read(read_end, 256).decode().strip()
        os.close(read_end)
        return process, endpoint

    def pair(self, receiver_options: list[str], *options: str) -> tuple[Process, Process, str]:
        """A receiver (it logs its session) and a sender that are in the middle of a long run, and the endpoint."""
        receiver, endpoint = self.receiver("-v", *receiver_options)
        sender = self.start(SEND, "--connect", endpoint, *LONG, *options)
        deadline = time.monotonic() + LIMIT_S
        while "session_up" not in receiver.err.read_text():
            assert time.monotonic() < deadline
            time.sleep(0.05)
        time.sleep(1.0)  # past the preparation, most likely; the end must be the same if not
        assert sender.process.poll() is None
        return receiver, sender, endpoint


@pytest.fixture
def processes(tmp_path: Path) -> Iterator[Processes]:
    made = Processes(tmp_path)
    yield made
    for process in made.started:
        if process.process.poll() is None:
            process.process.kill()
        process.process.wait(LIMIT_S)


# ---- reports --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "representation"), ((["--dense", "--idle", "spin"], "dense"), (["--sparse", "8", "--idle", "block"], "sparse"))
)
def test_loopback_prints_the_reports_keys_as_json_and_nothing_else(
    options: list[str], representation: str, tmp_path: Path
) -> None:
    samples = tmp_path / "samples"
    done = run(SEND, "--loopback", "--json", "--samples", str(samples), *SMALL, *options)
    assert (done.returncode, done.stderr) == (0, "")
    report = json.loads(done.stdout)
    assert report.keys() == KEYS
    assert report["latency_us"].keys() == {"min", "p50", "p99", "p999", "max"}
    assert report["tail_us"].keys() == {"p50", "p99"}
    assert report["floors"].keys() == FLOOR_KEYS
    assert all(value > 0 for value in report["floors"].values())
    assert (report["link"], report["representation"], report["rounds"]) == ("tcp", representation, 10)
    assert (report["discarded"], report["reasons"]) == (0, {})
    assert report["extra"]["memory"]["over_MiB"] < report["extra"]["memory"]["limit_MiB"] == 64
    kept = [float(line) for line in samples.read_text().splitlines()]
    assert len(kept) == 10
    assert max(kept) == report["latency_us"]["max"]


def test_two_commands_give_both_ends_the_same_report_and_once_ends(processes: Processes, tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    waiting, endpoint = processes.receiver("--once", "--json", "--samples", str(kept))
    done = run(SEND, "--connect", endpoint, "--json", "--no-floors", *SMALL)
    assert (done.returncode, done.stderr) == (0, "")
    status, out, _ = waiting.end()
    assert status == 0
    assert json.loads(out) == json.loads(done.stdout)
    assert set(json.loads(out)["floors"].values()) == {None}
    assert len(kept.read_text().splitlines()) == 10


def test_the_table_is_at_most_eighty_wide() -> None:
    done = run(SEND, "--loopback", "--no-floors", *SMALL)
    assert done.returncode == 0
    assert "PP1Q link benchmark" in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80


# ---- refusals -------------------------------------------------------------------------------------------------------


def test_a_receiver_refuses_what_exceeds_its_limits_and_serves_the_next_sender(processes: Processes) -> None:
    waiting, endpoint = processes.receiver("--once", "--max-vocab", "2048", "--idle", "block", "--json")
    refused = run(SEND, "--connect", endpoint, "--vocab", "4096")
    assert refused.returncode == 1
    assert "vocab_size" in one_line(refused.stderr)
    assert "2048" in refused.stderr
    refused = run(SEND, "--connect", endpoint, "--idle", "spin", *SMALL)
    assert refused.returncode == 1
    assert "idle: this receiver runs 'block'" in one_line(refused.stderr)
    assert run(SEND, "--connect", endpoint, "--idle", "block", "--no-floors", *SMALL).returncode == 0
    status, _, err = waiting.end()
    assert status == 0
    assert "idle: this receiver runs 'block', the leader asks for 'spin'; waiting for the next sender" in err
    assert "vocab_size" in err
    assert "Traceback" not in err


def test_only_the_keys_on_the_allow_list_get_in(processes: Processes, tmp_path: Path) -> None:
    from pp1q_transport import keys

    names = {name: keys.generate(tmp_path, name) for name in ("receiver", "leader", "stranger")}
    allowed = tmp_path / "allowed"
    keys.allow(allowed, names["leader"][0].public)
    waiting, endpoint = processes.receiver("--once", "--own-key", str(names["receiver"][1]), "--allow", str(allowed))
    server = ["--server-key", names["receiver"][0].public, "--connect", endpoint, "--no-floors", *SMALL]
    refused = run(SEND, *server, "--own-key", str(names["stranger"][1]))
    assert refused.returncode == 1
    assert "auth_failed" in one_line(refused.stderr)
    assert run(SEND, "--connect", endpoint, "--wait", "5", *SMALL).returncode == 1
    assert run(SEND, *server, "--own-key", str(names["leader"][1])).returncode == 0
    assert waiting.end()[0] == 0


BAD: dict[str, tuple[list[str], str]] = {
    "rounds": (["send", "--rounds", "0"], "--rounds"),
    "unknown option": (["send", "--bogus"], "--bogus"),
    "both representations": (["send", "--dense", "--sparse", "3"], "not both"),
    "loopback and connect": (["send", "--loopback", "--connect", "tcp://127.0.0.1:1"], "--loopback"),
    "support beyond vocabulary": (["send", "--loopback", "--vocab", "16", "--sparse", "32"], "support"),
    "endpoint": (["send", "--connect", "somewhere"], "endpoint 'somewhere'"),
    "cpu": (["send", "--loopback", "--cpu", "60000"], "cannot pin to CPU 60000"),
    "samples": (["send", "--loopback", "--samples", "/nonexistent/file"], "/nonexistent/file"),
    "half the keys": (["send", "--own-key", "/nonexistent"], "--server-key"),
    "a missing key file": (["send", "--own-key", "/nonexistent", "--server-key", "x"], "/nonexistent"),
    "remote without keys": (["send", "--connect", "tcp://192.0.2.1:7801"], "needs keys"),
    "listen": (["recv", "--listen", "nowhere"], "endpoint 'nowhere'"),
    "listen for all without keys": (["recv", "--listen", "tcp://0.0.0.0:0"], "needs keys"),
    "slots": (["recv", "--max-slots", "1"], "--max-slots"),
    "half the receiver's keys": (["recv", "--allow", "/nonexistent"], "--own-key"),
    "recv cpu": (["recv", "--cpu", "60000"], "cannot pin to CPU 60000"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_input_is_one_line_and_exit_status_two(
    case: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (name, *options), text = BAD[case]
    module = {"send": send, "recv": recv}[name]
    monkeypatch.setattr(module, "setup_logging", lambda _verbose: None)  # it would keep this test's stderr
    with pytest.raises(SystemExit) as ended:
        module.main(options)
    out, err = capsys.readouterr()
    assert ended.value.code == 2
    assert text in one_line(err)
    assert out == ""


def without_greeting(errors: str) -> str:
    """What a receiver said after where it listens."""
    return "".join(line for line in errors.splitlines(keepends=True) if not line.startswith("pp1q-recv: listening on "))


def test_nobody_there_is_one_line_and_exit_status_one() -> None:
    done = run(SEND, "--connect", "tcp://127.0.0.1:9", "--wait", "0.5")
    assert done.returncode == 1
    assert "no receiver within 0.5 s" in one_line(done.stderr)
    done = run(RECV, "--listen", "tcp://127.0.0.1:0", "--wait", "0.5")
    assert done.returncode == 1
    assert "no sender within 0.5 s" in one_line(without_greeting(done.stderr))


@pytest.mark.parametrize("module", (send, recv))
def test_help_has_an_example(module: ModuleType, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        module.main(["--help"])
    assert ended.value.code == 0
    assert "Example" in capsys.readouterr().out


# ---- ends in the middle ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("idle", ("spin", "block"))
def test_a_killed_receiver_is_a_lost_peer(processes: Processes, idle: str) -> None:
    receiver, sender, _ = processes.pair([], "--idle", idle)
    receiver.send(signal.SIGKILL)
    status, out, err = sender.end()
    assert (status, out) == (1, "")
    assert "pp1q: peer_lost" in one_line(err)


@pytest.mark.parametrize("idle", ("spin", "block"))
def test_a_killed_sender_leaves_a_receiver_that_is_ready_for_the_next(processes: Processes, idle: str) -> None:
    receiver, sender, endpoint = processes.pair(["--once", "--json"], "--idle", idle)
    sender.send(signal.SIGKILL)
    sender.end()
    assert run(SEND, "--connect", endpoint, "--no-floors", *SMALL).returncode == 0
    status, out, err = receiver.end()
    assert status == 0
    assert json.loads(out)["rounds"] == 10
    assert re.search(r"pp1q-recv: peer_lost: .*; waiting for the next sender", err)


def test_a_killed_sender_ends_a_receiver_that_was_told_so(processes: Processes) -> None:
    receiver, sender, _ = processes.pair(["--on-loss", "exit"])
    sender.send(signal.SIGKILL)
    sender.end()
    status, out, err = receiver.end()
    assert (status, out) == (1, "")
    assert "pp1q: peer_lost" in err
    assert "Traceback" not in err


def test_a_second_sender_hears_that_the_receiver_is_busy(processes: Processes) -> None:
    _, _, endpoint = processes.pair([])
    done = run(SEND, "--connect", endpoint, "--wait", "1", *SMALL)
    assert done.returncode == 1
    assert "busy with another sender" in one_line(done.stderr)


def _child_of(pid: int) -> int | None:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(children[0]) if children else None


def _gone(pid: int) -> bool:
    try:
        return "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return True


@pytest.mark.parametrize("victim", ("sender", "receiver"))
def test_a_loopback_run_ends_with_either_process(processes: Processes, victim: str) -> None:
    sender = processes.start(SEND, "--loopback", *LONG)
    deadline = time.monotonic() + LIMIT_S
    child = None
    while child is None and time.monotonic() < deadline:
        child = _child_of(sender.process.pid)
        time.sleep(0.05)
    assert child is not None
    time.sleep(1.5)  # most likely in the run by now; the end must be the same if it is not
    if victim == "sender":
        sender.send(signal.SIGINT)
    else:
        os.kill(child, signal.SIGKILL)
    status, out, err = sender.end()
    assert out == ""
    assert "Traceback" not in err
    if victim == "sender":
        assert status == 130
        assert one_line(err) == "pp1q: interrupted"
    else:
        assert status == 1
        assert "pp1q: " in err
    while not _gone(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_ctrl_c_ends_a_waiting_receiver_cleanly(processes: Processes) -> None:
    waiting, _ = processes.receiver()
    waiting.send(signal.SIGINT)
    status, out, err = waiting.end()
    assert (status, out) == (130, "")
    assert one_line(without_greeting(err)) == "pp1q: interrupted"


def test_sigterm_ends_a_waiting_receiver_cleanly(processes: Processes) -> None:
    waiting, _ = processes.receiver()
    waiting.send(signal.SIGTERM)
    status, out, err = waiting.end()
    assert (status, out) == (128 + signal.SIGTERM, "")
    assert one_line(without_greeting(err)) == "pp1q: terminated"
