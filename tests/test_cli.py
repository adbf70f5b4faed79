"""The commands as a shell meets them: help with an example, one-line errors, exit statuses, JSON that is only JSON."""

from __future__ import annotations

import json
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from pp1q_transport.cli import COMMANDS, main
from pp1q_transport.cli._common import setup_logging

pytestmark = pytest.mark.timeout(60)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp1q_transport.cli", *arguments], capture_output=True, text=True, timeout=50, check=False
    )


def test_help_lists_every_command_but_hidden_ones() -> None:
    shown = CliRunner().invoke(main, ["--help"]).output
    for name in COMMANDS:
        assert (f"\n  {name} " in shown) is (name != "demo-draft")


@pytest.mark.parametrize("name", sorted(set(COMMANDS) - {"demo-draft"}))
def test_every_command_has_help_with_an_example(name: str) -> None:
    done = CliRunner().invoke(main, [name, "--help"])
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
    assert {"python", "kernels", "slot memory", "cores", "descriptors", "socket buffers", "loopback", "curve"} <= set(checks)
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


def test_logs_are_json_when_not_on_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    import structlog

    setup_logging(1)
    structlog.get_logger("pp1q").info("something", reason="timeout", slot=3)
    structlog.get_logger("pp1q").debug("hidden")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    record = json.loads(lines[0])
    assert (record["event"], record["reason"], record["slot"], record["level"]) == ("something", "timeout", 3, "info")


def test_version_is_the_package_s() -> None:
    done = CliRunner().invoke(main, ["--version"])
    assert done.exit_code == 0
    assert isinstance(main, click.Command)
