"""`pp1q simulate` as a shell meets it: a table and a digest, JSON, and exit status 1 with a shrunk event log."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pp1q_transport.cli import main


def simulate(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", *arguments])


def test_the_table_and_the_digest() -> None:
    first, second = (simulate("--seed", "5", "--rounds", "500") for _ in range(2))
    assert first.exit_code == second.exit_code == 0, first.output
    digest = first.output.splitlines()[-1]
    assert digest.startswith("digest of the event logs ")
    assert digest == second.output.splitlines()[-1]
    assert "committed" in first.output
    assert "faults injected" in first.output
    for kind in ("flip", "cut", "late-write"):
        assert f"  {kind} " in first.output


def test_json() -> None:
    done = simulate("--rounds", "300", "--ranks", "2", "--json")
    assert done.exit_code == 0
    report = json.loads(done.stdout)
    assert report["rounds"] >= 300
    assert report["committed"] + sum(report["discarded"].values()) == report["rounds"]
    assert report["violation"] is None


def test_a_violation_exits_1_with_a_run_that_repeats_it(tmp_path: Path) -> None:
    log = tmp_path / "events"
    done = simulate("--rounds", "500", "--ranks", "3", "--plant", "no-fence", "--log", str(log))
    assert done.exit_code == 1
    assert "VIOLATION of: no reuse before fence" in done.output
    assert "was never fenced" in done.output
    repeat = next(line for line in done.output.splitlines() if line.startswith("repeat it: ")).removeprefix("repeat it: ")
    assert "--only" in repeat
    again = simulate(*shlex.split(repeat)[2:], "--json")
    assert again.exit_code == 1
    violation = json.loads(again.stdout)["violation"]
    assert violation["rule"] == "no reuse before fence"
    assert len(violation["faults"]) == 1
    events = log.read_text(encoding="ascii").splitlines()
    assert "VIOLATION" in events[-1]
    assert events == violation["events"]


@pytest.mark.parametrize(
    "arguments",
    (("--faults", "rain"), ("--ranks", "9"), ("--ranks", "two"), ("--plant", "roses"), ("--only", "x"), ("--rounds", "0")),
    ids=" ".join,
)
def test_misuse_is_one_line(arguments: tuple[str, ...]) -> None:
    done = simulate(*arguments)
    assert done.exit_code == 2
    assert "Traceback" not in done.output


def test_a_plant_that_was_not_noticed_is_said_to_be() -> None:
    done = simulate("--rounds", "20", "--ranks", "1", "--plant", "no-fence", "--faults", "none")
    assert done.exit_code == 0, done.output
    assert "plant no-fence: not noticed" in done.output
