"""The [capture] table and the capture options of the commands: what they mean, and the one line that says what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.meaning import meaning
from pp1q_transport.daemon.settings import CaptureSettings
from pp1q_transport.errors import ConfigError

pytestmark = pytest.mark.timeout(120)
DEPLOY = Path(__file__).resolve().parents[2] / "deploy" / "examples"
BASE = (DEPLOY / "local-receiver.toml").read_text(encoding="utf-8")


def test_its_keys_and_their_defaults() -> None:
    config = parse(BASE + '[capture]\nfile = "frames.pcapng"\n', "/etc/pp1q/x.toml")
    assert config.capture == CaptureSettings(file=Path("/etc/pp1q/frames.pcapng"), file_mib=256, files=4, redact=False)
    assert "  capture  /etc/pp1q/frames.pcapng, 4 files of 256 MiB, with all tokens and q" in meaning(config)
    assert parse(BASE, "/etc/pp1q/x.toml").capture is None
    redacted = parse(BASE + '[capture]\nfile = "/x"\nredact = true\n', "/etc/pp1q/x.toml")
    assert "without tokens and q" in meaning(redacted)[-1]
    assert config.reloadable(redacted).restart


@pytest.mark.parametrize(
    ("table", "error"),
    (
        ("", "[capture] file is missing"),
        ('file = "x"\nfile_mib = 0', "[capture] file_mib must be an integer in 1..1048576, not 0"),
        ('file = "x"\nfiles = 0', "[capture] files must be an integer in 1..1000, not 0"),
        ('file = "x"\nredact = 1', "[capture] redact must be true or false, not 1"),
        ('file = "x"\nredacted = true', "did you mean `redact`?"),
    ),
)
def test_what_is_wrong_is_named(table: str, error: str) -> None:
    with pytest.raises(ConfigError) as told:
        parse(f"{BASE}[capture]\n{table}\n", "/etc/pp1q/x.toml")
    assert error in str(told.value)


def test_the_table_that_is_commented_out_shows_every_key_as_it_is_by_default() -> None:
    text = (DEPLOY / "receiver-rank0.toml").read_text(encoding="utf-8")
    lines = text.partition("# [capture]\n")[2].splitlines()
    table = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))
    assert set(table) == set(CaptureSettings.__slots__)  # type: ignore[attr-defined]
    assert table | {"file": "x"} == {"file": "x", "file_mib": 256, "files": 4, "redact": False}


def pp1q(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pp1q_transport.cli", *words], capture_output=True, text=True, timeout=100, check=False
    )


def test_redact_alone_is_refused() -> None:
    done = pp1q("demo", "--redact")
    assert (done.returncode, done.stderr) == (2, "pp1q: --redact is for a capture: give --capture FILE as well\n")


def test_a_capture_that_can_not_be_is_one_line() -> None:
    done = pp1q("demo", "--rounds", "1", "--capture", "/nowhere/x.pcapng")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "/nowhere/x.pcapng: No such file or directory" in done.stderr


def test_a_daemon_takes_the_options_over_its_file(tmp_path: Path) -> None:
    place = tmp_path / "x.pcapng"
    source = str(DEPLOY / "local-receiver.toml")
    done = pp1q("daemon", "--config", source, "--check", "--json", "--capture", str(place), "--redact")
    settings = json.loads(done.stdout)["settings"]["capture"]
    assert settings == {"file": str(place), "file_mib": 256, "files": 4, "redact": True}
    assert not place.exists()


@pytest.mark.slow
def test_every_daemon_of_a_deployment_writes_its_own_and_each_replays(tmp_path: Path) -> None:
    small = ("--ranks", "2", "--rounds", "40", "--vocab", "256", "--sparse", "8")
    done = pp1q("demo-sidecar", *small, "--capture", str(tmp_path / "x.pcapng"))
    assert done.returncode == 0, done.stderr
    assert sorted(path.name for path in tmp_path.iterdir()) == ["x-leader.pcapng", "x-receiver0.pcapng", "x-receiver1.pcapng"]
    told = {}
    for path in sorted(tmp_path.iterdir()):
        replayed = pp1q("replay", str(path), "--json")
        assert replayed.returncode == 0, replayed.stdout
        told[path.stem] = json.loads(replayed.stdout)
    assert [told[name]["ready"] for name in ("x-leader", "x-receiver0", "x-receiver1")] == [40, 40, 40]
    assert not any(outcome["skipped"] or outcome["differs"] for outcome in told.values())


def test_the_benchmarks_ends_write_theirs(tmp_path: Path) -> None:
    place = tmp_path / "send.pcapng"
    small = ("--rounds", "5", "--warmup", "1", "--vocab", "256", "--no-floors", "--idle", "block")
    done = pp1q("send", "--loopback", "--sparse", "8", *small, "--capture", str(place))
    assert done.returncode == 0, done.stderr
    replayed = json.loads(pp1q("replay", str(place), "--json").stdout)
    assert replayed["ready"] > 5
    assert (replayed["discarded"], replayed["differs"]) == (0, [])
