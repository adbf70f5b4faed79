"""What the RDMA lanes make of a test report, on any machine: a lane can't pass by not running, and a mutant not by breaking."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent / "vm"))

import lanes
from lanes import LANES, OUTCOMES, Lane, Outcomes, judge_tests, read_junit
from report import report

PLAIN = Lane("it works", tests=("t",))
MUTANT = Lane("a fence that is none", tests=("t",), mutant="no-fence")
NOTICED = "IsolationBroken: the slot changed"


@pytest.mark.parametrize(
    ("lane", "tests", "verdict", "detail"),
    (
        (PLAIN, Outcomes(["a", "b"], {}, {}, {}), "PASS", "2 tests"),
        (PLAIN, Outcomes([], {}, {}, {}), "SKIP", "no test was collected"),
        (PLAIN, Outcomes(["a"], {"b": "no device"}, {}, {}), "SKIP", "b: no device"),
        (PLAIN, Outcomes(["a"], {}, {"b": "assert 1 == 2"}, {}), "FAIL", "b: assert 1 == 2"),
        (PLAIN, Outcomes(["a"], {}, {}, {"b": "fixture"}), "FAIL", "b: fixture"),
        (PLAIN, Outcomes(["a"], {"c": "no device"}, {"b": "assert"}, {}), "FAIL", "b: assert"),
        (MUTANT, Outcomes([], {}, {"a": NOTICED, "b": NOTICED}, {}), "PASS", "2 of 2 tests notice"),
        (MUTANT, Outcomes(["b"], {}, {"a": NOTICED}, {}), "FAIL", "not noticed by b"),
        (MUTANT, Outcomes([], {}, {"a": NOTICED, "b": "TypeError"}, {}), "FAIL", "b failed of something else: TypeError"),
        (MUTANT, Outcomes([], {}, {"a": NOTICED}, {"b": "fixture"}), "FAIL", "b: fixture"),
        (MUTANT, Outcomes([], {"b": "no device"}, {"a": NOTICED}, {}), "SKIP", "b: no device"),
        (MUTANT, Outcomes([], {}, {}, {}), "SKIP", "no test was collected"),
    ),
)
def test_a_lane_passes_only_by_what_ran(lane: Lane, tests: Outcomes, verdict: str, detail: str) -> None:
    judged = judge_tests(lane, tests)
    assert judged[0] == verdict
    assert detail in judged[1]


def test_a_report_is_read_by_what_became_of_each_test(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    path.write_text(
        '<testsuites><testsuite><testcase classname="tests.x" name="fine"/>'
        '<testcase classname="tests.x" name="left"><skipped message="no device"/></testcase>'
        '<testcase classname="tests.x" name="wrong"><failure message="first&#10;second"/></testcase>'
        '<testcase classname="tests.x" name="broken"><error/></testcase></testsuite></testsuites>',
        encoding="utf-8",
    )
    tests = read_junit(path)
    assert tests == Outcomes(["x::fine"], {"x::left": "no device"}, {"x::wrong": "first"}, {"x::broken": "error"})


@pytest.mark.parametrize(
    ("required", "missing", "ended", "verdict", "status"),
    (
        (False, "no qemu", "", "SKIP", 0),
        (True, "no qemu", "", "FAIL", 1),
        (False, "", "the machine failed", "FAIL", 1),
        (False, "", "", "FAIL", 1),
    ),
)
def test_a_lane_without_an_outcome_never_passes(
    tmp_path: Path, required: bool, missing: str, ended: str, verdict: str, status: int
) -> None:
    first, *rest = LANES
    (tmp_path / OUTCOMES).write_text(json.dumps({first: {"verdict": "PASS", "detail": ""}}), encoding="utf-8")
    assert report([], tmp_path, required, missing, ended) == (status if rest else 0)
    outcomes = json.loads((tmp_path / OUTCOMES).read_text(encoding="utf-8"))
    assert {name: outcome["verdict"] for name, outcome in outcomes.items()} == {first: "PASS", **dict.fromkeys(rest, verdict)}


def test_every_lane_is_in_one_track() -> None:
    assert sorted(name for track in lanes.TRACKS for name in track) == sorted(LANES)


def test_lanes_of_both_tracks_run_and_tell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(lanes, "TRACKS", (("a", "b"), ("c", "d")))
    monkeypatch.setattr(lanes, "LANES", {name: Lane(f"{name} works", command=f"exit {int(name == 'd')}") for name in "abcd"})
    monkeypatch.setattr("sys.argv", ["lanes.py", "--results", str(tmp_path), "a", "c", "d"])
    assert lanes.main() == 1
    outcomes = json.loads((tmp_path / OUTCOMES).read_text(encoding="utf-8"))
    assert {name: outcome["verdict"] for name, outcome in outcomes.items()} == {"a": "PASS", "c": "PASS", "d": "FAIL"}
    assert sorted(text.split()[1] for text in capsys.readouterr().out.splitlines()) == ["a", "c", "d"]


def test_a_chosen_lane_is_missed_too(tmp_path: Path) -> None:
    chosen = next(iter(LANES))
    assert report([chosen], tmp_path, required=False) == 1


@pytest.mark.parametrize(
    ("command", "verdict"),
    (("echo all well", "PASS"), ("echo a cause; exit 3", "FAIL"), ("kill -9 $$", "FAIL"), ("sleep 60", "FAIL")),
)
def test_a_command_lane_is_its_status(tmp_path: Path, command: str, verdict: str) -> None:
    judged = lanes.run_lane("it", Lane("it works", command=command, timeout_s=2.0), tmp_path)
    assert judged[0] == verdict
    if "cause" in command:
        assert judged[1] == "status 3: a cause"


def test_a_test_lane_without_a_report_fails(tmp_path: Path) -> None:
    judged = lanes.run_lane("it", Lane("it works", tests=("--no-such-option",)), tmp_path)
    assert judged[0] == "FAIL"
    assert "no report" in judged[1]
