"""The commands as a shell meets them: help with an example, one-line errors, exit statuses, JSON that is only JSON."""

from __future__ import annotations

import io
import json
import os
import re
import resource
import signal
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from pp1q_transport.cli import COMMANDS, main
from pp1q_transport.cli._common import command_errors, setup_logging

pytestmark = pytest.mark.timeout(60)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp1q_transport.cli", *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_help_lists_every_command_but_hidden_ones() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for name in COMMANDS:
        assert (f"\n  {name} " in shown) is (name not in ("demo-draft", "demo-target"))


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"demo-draft", "demo-target"}))
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"])
    assert CliRunner().invoke(main, [name, "-h"]).output == done.output
    assert done.exit_code == 0
    assert "Example" in done.output


def test_help_does_not_load_numpy() -> None:
    code = "import sys, pp1q_transport.cli as c; c.main(['--help'], standalone_mode=False); sys.exit('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=50, check=False)
    assert done.returncode == 0


@pytest.mark.parametrize(
    "arguments",
    (
        ("nothing",),
        ("demo", "--rounds", "0"),
        ("demo", "--depth", "33"),
        ("demo", "--faults", "corrupt=2"),
        ("demo", "--faults", "melt=0.1"),
        ("demo", "--faults", "corrupt"),
        ("doctor", "--slots", "0"),
        ("doctor", "--colour"),
    ),
    ids=" ".join,
)
def test_bad_input_is_named_and_exits_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert done.stderr.strip()
    assert done.stdout == ""


def test_doctor_passes_here() -> None:
    done = run("doctor", "--json", "--listen", "tcp://127.0.0.1:0")
    report = json.loads(done.stdout)
    assert report["fit"] is (done.returncode == 0)
    checks = {finding["check"]: finding["verdict"] for finding in report["findings"]}
    wanted = {"python", "kernels", "slot memory", "memory lock", "cores", "descriptors", "socket buffers", "loopback", "curve"}
    assert wanted <= set(checks)
    assert checks["kernels"] != "FAIL"
    assert checks["listen"] == "PASS"


def test_doctor_says_what_is_too_much() -> None:
    done = run("doctor", "--slots", "4096", "--vocab", "16777216", "--depth", "32")
    assert done.returncode == 1
    assert "FAIL  slot memory" in done.stdout
    assert "lower slots or depth" in done.stdout
    assert "slot memory" in done.stderr


def test_doctor_names_a_taken_port_and_warns_beyond_loopback() -> None:
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        done = run("doctor", "--listen", f"tcp://127.0.0.1:{taken.getsockname()[1]}")
    assert done.returncode == 1
    assert "FAIL  listen" in done.stdout
    assert "WARN  listen" in run("doctor", "--listen", "tcp://0.0.0.0:7801").stdout


@pytest.mark.parametrize(
    ("slots", "verdict", "said"),
    (
        ("3", "PASS", "0.0 MB locked and let go, limit 0.1 MB"),
        ("4", "WARN", "RLIMIT_MEMLOCK is 65536 bytes, 65792 are needed"),
        ("400", "WARN", "LimitMEMLOCK=infinity"),
    ),
)
def test_doctor_really_locks_and_says_what_to_set_when_it_can_not(slots: str, verdict: str, said: str) -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 16, 1 << 16))

    # Root may lock beyond its limit; without that capability it is like anybody.
    plain = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock"] if os.geteuid() == 0 else []
    doctor = [*plain, sys.executable, "-m", "pp1q_transport.cli", "doctor", "--json", "--vocab", "4096", "--depth", "1"]
    done = subprocess.run(
        [*doctor, "--slots", slots], capture_output=True, text=True, timeout=50, check=False, preexec_fn=limited
    )
    report = json.loads(done.stdout)
    lock = next(finding for finding in report["findings"] if finding["check"] == "memory lock")
    assert lock["verdict"] == verdict
    assert said in lock["detail"]
    assert report["fit"] is (done.returncode == 0)


CONFIGURATION = """
[daemon]
role = "leader"
socket = "/run/pp1q/leader.sock"
[session]
vocab_size = 1000
depth = 3
batch_requests = 2
batches_in_flight = 1
representations = ["sparse"]
[[peer]]
name = "a"
connect = "tcp://127.0.0.1:7801"
[[peer]]
name = "b"
connect = "tcp://127.0.0.1:7802"
"""


def test_doctor_takes_its_sizes_from_a_configuration(tmp_path: Path) -> None:
    file = tmp_path / "leader.toml"
    file.write_text(CONFIGURATION.replace("/run/pp1q", str(tmp_path)))
    done = run("doctor", "--config", str(file))
    assert "MB for 4 slots" in done.stdout  # two requests for each of two targets
    assert f"PASS  socket folder    {tmp_path}/leader.sock can be made" in done.stdout
    refused = run("doctor", "--config", str(file), "--slots", "8")
    assert refused.returncode == 2
    assert "leave out --slots" in refused.stderr
    file.write_text(CONFIGURATION.replace("depth = 3", "depth = 300"))
    unfit = run("doctor", "--config", str(file))
    assert unfit.returncode == 2
    assert "[session] depth" in unfit.stderr


def test_a_socket_without_a_folder_is_found_before_the_start(tmp_path: Path) -> None:
    file = tmp_path / "leader.toml"
    file.write_text(CONFIGURATION.replace("/run/pp1q", str(tmp_path / "none")))
    words = f"the socket's folder {tmp_path / 'none'} does not exist"
    unfit = run("doctor", "--config", str(file))
    assert unfit.returncode == 1
    assert f"FAIL  socket folder    {words}" in unfit.stdout
    refused = run("daemon", "--config", str(file), "--check")
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith(f"pp1q: {words}")
    assert refused.stderr.count("\n") == 1


def test_doctor_speaks_of_rdma_only_when_asked() -> None:
    assert "rdma" not in run("doctor", "--vocab", "512").stdout
    asked = run("doctor", "--vocab", "512", "--rdma")
    assert re.search(r"^(PASS|FAIL)  rdma library ", asked.stdout, re.M)
    assert re.search(r"^(PASS|FAIL)  rdma access ", asked.stdout, re.M)
    if "FAIL  rdma" in asked.stdout:  # as on a host without a device
        assert asked.returncode == 1
        assert asked.stderr.startswith("pp1q: not fit: rdma")
    refused = run("doctor", "--rdma", "colour=red")
    assert refused.returncode == 2
    assert "colour" in refused.stderr


def test_doctor_checks_rdma_when_a_configured_link_is(tmp_path: Path) -> None:
    file = tmp_path / "leader.toml"
    text = CONFIGURATION.replace("/run/pp1q", str(tmp_path)).replace('name = "b"', 'name = "b"\nlink = "rdma"')
    file.write_text(text + '[rdma]\ndevice = "none_such"\n')
    done = run("doctor", "--config", str(file))
    assert done.returncode == 1
    assert re.search(r"^FAIL  rdma device .*", done.stdout, re.M)


def test_logs_are_json_when_not_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    setup_logging(1)
    structlog.get_logger("pp1q").info("something", reason="timeout", slot=3)
    structlog.get_logger("pp1q").debug("hidden")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert (record["event"], record["reason"], record["slot"], record["level"]) == ("something", "timeout", 3, "info")


def test_the_level_changes_for_loggers_that_are_bound_already(capsys: pytest.CaptureFixture[str]) -> None:
    from pp1q_transport.logs import logger

    setup_logging(0)
    bound = logger(role="leader")
    for verbose, heard in ((0, "we"), (2, "diwe"), (1, "iwe"), (-1, "e")):
        setup_logging(verbose)
        for level in ("debug", "info", "warning", "error"):
            getattr(bound, level)(level)
        events = [json.loads(line)["event"] for line in capsys.readouterr().err.splitlines()]
        assert "".join(event[0] for event in events) == heard, verbose


def test_version_is_the_package_s() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert isinstance(main, click.Command)


def test_sigterm_in_the_middle_of_a_write_is_no_second_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """It came while a line was written to stderr, which Python lets nobody write to from within: the status was 1, not 143."""
    before = signal.getsignal(signal.SIGTERM)
    written: list[str] = []
    within = False

    class Once(io.StringIO):
        def write(self, text: str) -> int:
            nonlocal within
            assert not within, "a write within a write"
            within = True
            try:
                if "greeting" in text:
                    signal.raise_signal(signal.SIGTERM)
                written.append(text)
                return len(text)
            finally:
                within = False

    monkeypatch.setattr(sys, "stderr", Once())

    @command_errors
    def command() -> None:
        click.echo("greeting", err=True)

    try:
        with pytest.raises(SystemExit) as caught:
            command()
    finally:
        signal.signal(signal.SIGTERM, before)
    assert caught.value.code == 128 + signal.SIGTERM
    assert "".join(written).strip() == "pp1q: terminated"
