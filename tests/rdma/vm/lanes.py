"""The RDMA lanes, and inside the machine the program that runs them: two at a time, each with a log, a report and a verdict.

Between `run.py`, which boots the machine for it, and the tests. PASS, FAIL or SKIP with its cause; a lane without a single test
that ran, or with one that was skipped, is a SKIP. With PP1Q_REQUIRE_RDMA set a SKIP is a FAIL.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from processes import SERVER, start

OUTCOMES = "lanes.json"
# Plugins are named, not looked for in the metadata of all that is installed.
PYTEST = ("-m", "pytest", "-v", "--durations=10", "-p", "pytest_timeout", "-p", "no:cacheprovider", "--color=no")
PLUGINS = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}


@dataclass(frozen=True)
class Lane:
    """`command` is a shell line, `tests` are arguments of pytest. `mutant`: a rule that is taken out: every test must fail."""

    says: str
    tests: tuple[str, ...] = ()
    command: str = ""
    mutant: str = ""
    timeout_s: float = 1200.0  # of a hang: a quiet machine takes a tenth of it
    conftest: bool = False  # tests/conftest.py imports what none of these tests needs, and imports are slow in there


LANES: dict[str, Lane] = {
    "verbs": Lane(
        "the machine's devices move bytes, and doctor says what they are",
        ("tests/rdma/test_verbs.py", "tests/rdma/test_rdma_status.py", "tests/rdma/test_doctor.py"),
    ),
    "links": Lane(
        "the conformance suite and the golden frames over rdma, and what only an rdma link does",
        ("tests/links/test_conformance.py", "tests/links/test_golden_links.py", "tests/links/test_rdma_link.py",
         "-k", "rdma and not played"),
    ),
    "sessions": Lane(
        "whole sessions: rounds, late rows, lost rows, sessions formed anew",
        ("tests/system/test_rdma_sessions.py", "--confcutdir=tests/system", "-k", "not falls_back"),
        conftest=True,
    ),
    "isolation": Lane(
        "late, stray and mid-message writes change nothing that is fenced or ready",
        ("tests/rdma/test_fence.py", "tests/rdma/test_copy.py"),
    ),
    "mutant: no fence": Lane("without deregistration", ("tests/rdma/test_fence.py",), mutant="no-fence"),
    "mutant: in place": Lane("without the copy", ("tests/rdma/test_copy.py",), mutant="in-place"),
    "faults": Lane("100 faults over a cable leak nothing", ("tests/rdma/test_faults.py",), timeout_s=1800.0),
    "commands": Lane("demo, sender and receiver over rdma, between processes", ("tests/rdma/test_commands.py",)),
}

# Two lanes at a time, one for each of the machine's cores: those that use its cable, and those that use the device beside it.
TRACKS = (
    ("faults", "commands", "verbs"),
    ("links", "sessions", "isolation", "mutant: no fence", "mutant: in place"),
)


def line(verdict: str, name: str, detail: str) -> str:
    """As every lane of this project prints itself."""
    return f"{verdict:<5} {name:<22} {detail}"


@dataclass(frozen=True)
class Outcomes:
    """What a JUnit report says: each test's name with what was wrong, '' for one that passed."""

    passed: list[str]
    skipped: dict[str, str]
    failed: dict[str, str]
    broken: dict[str, str]  # errors outside of the test itself


def read_junit(path: Path) -> Outcomes:
    """Raises `ElementTree.ParseError` or `OSError` when there is no whole report."""
    tests = Outcomes([], {}, {}, {})
    for case in ElementTree.parse(path).getroot().iter("testcase"):
        name = f"{case.get('classname', '').rpartition('.')[2]}::{case.get('name')}"
        for kind, found in (("skipped", tests.skipped), ("error", tests.broken), ("failure", tests.failed)):
            element = case.find(kind)
            if element is not None:
                found[name] = element.get("message", "").splitlines()[0] if element.get("message") else kind
                break
        else:
            tests.passed.append(name)
    return tests


def judge_tests(lane: Lane, tests: Outcomes) -> tuple[str, str]:
    """Verdict and detail of a lane whose tests ran."""
    bad = {**tests.broken, **({} if lane.mutant else tests.failed)}
    if bad:
        name, cause = next(iter(bad.items()))
        return "FAIL", f"{len(bad)} failed: {name}: {cause}"
    if tests.skipped:
        name, cause = next(iter(tests.skipped.items()))
        return "SKIP", f"{len(tests.skipped)} skipped: {name}: {cause}"
    if lane.mutant:
        return _judge_mutant(lane, tests)
    if not tests.passed:
        return "SKIP", "no test was collected"
    return "PASS", f"{len(tests.passed)} tests: {lane.says}"


def _judge_mutant(lane: Lane, tests: Outcomes) -> tuple[str, str]:
    """A mutant passes when every test fails, and by what it is there to find."""
    if tests.passed:
        return "FAIL", f"{lane.mutant}: not noticed by {', '.join(tests.passed)}"
    other = [name for name, cause in tests.failed.items() if "IsolationBroken" not in cause]
    if other:
        return "FAIL", f"{lane.mutant}: {other[0]} failed of something else: {tests.failed[other[0]]}"
    if not tests.failed:
        return "SKIP", "no test was collected"
    return "PASS", f"{len(tests.failed)} of {len(tests.failed)} tests notice: {lane.says}"


def log_of(results: Path, name: str) -> Path:
    """A lane's log; its report lies beside it as .xml."""
    return results / f"{re.sub('[^a-z0-9]+', '-', name)}.log"


def run_lane(name: str, lane: Lane, results: Path) -> tuple[str, str]:
    """Runs one lane in a process group of its own, which is ended with it."""
    log, junit = log_of(results, name), log_of(results, name).with_suffix(".xml")
    pytest = [*PYTEST, *(() if lane.conftest else ("--noconftest",)), f"--junit-xml={junit}", *lane.tests]
    environment = {**os.environ, **PLUGINS, "PP1Q_RDMA_MUTANT": lane.mutant}
    with log.open("wb") as output:
        files = {"stdout": output.fileno(), "stderr": subprocess.STDOUT}
        if lane.tests:
            child = start(pytest, **files, env=environment, new_session=True)
        else:
            shell = ["/bin/bash", "-c", lane.command]
            child = subprocess.Popen(shell, **files, env=environment, start_new_session=True)
        try:
            status = child.wait(lane.timeout_s)
        except subprocess.TimeoutExpired:
            return "FAIL", f"not over after {lane.timeout_s:.0f} s"
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()
    if lane.tests:
        try:
            return judge_tests(lane, read_junit(junit))
        except (OSError, ElementTree.ParseError) as error:
            return "FAIL", f"no report, status {status}: {error}"
    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() or [""]
    return ("PASS", lane.says) if status == 0 else ("FAIL", f"status {status}: {said[-1]}")


@contextlib.contextmanager
def fork_server() -> Iterator[None]:
    """All Python within is forked from one process that has its imports behind it."""
    with tempfile.TemporaryDirectory(prefix="lanes-") as folder:
        address = f"{folder}/fork-server"
        command = [sys.executable, str(Path(__file__).with_name("warm.py")), address]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
            assert server.stdout is not None
            if not server.stdout.readline():
                raise RuntimeError(f"the fork server ended with status {server.wait()}")
            os.environ[SERVER] = address
            try:
                yield
            finally:
                del os.environ[SERVER]
                server.kill()


def tell(name: str, outcomes: dict[str, dict[str, object]], results: Path) -> None:
    """Prints what came of a lane, with the end of its log where it failed, and keeps all outcomes so far."""
    if outcomes[name]["verdict"] == "SKIP" and os.environ.get("PP1Q_REQUIRE_RDMA"):
        outcomes[name] |= {"verdict": "FAIL", "detail": f"{outcomes[name]['detail']} (PP1Q_REQUIRE_RDMA)"}
    print(line(str(outcomes[name]["verdict"]), name, str(outcomes[name]["detail"])), flush=True)
    if outcomes[name]["verdict"] == "FAIL":
        for text in log_of(results, name).read_text(encoding="utf-8", errors="replace").splitlines()[-60:]:
            print(f"      | {text}", flush=True)
    (results / OUTCOMES).write_text(json.dumps(outcomes, indent=1) + "\n", encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--results", type=Path, required=True)
    parser.add_argument("lanes", nargs="*", metavar="LANE")
    options = parser.parse_args()
    chosen = options.lanes or list(LANES)
    outcomes: dict[str, dict[str, object]] = {}
    turn = threading.Lock()

    def run_track(names: Sequence[str]) -> None:
        for name in names:
            began = time.monotonic()
            verdict, detail = run_lane(name, LANES[name], options.results)
            with turn:
                outcomes[name] = {"verdict": verdict, "detail": detail, "seconds": round(time.monotonic() - began, 1)}
                tell(name, outcomes, options.results)

    tracks = [threading.Thread(target=run_track, args=([name for name in names if name in chosen],)) for names in TRACKS]
    with fork_server() if any(LANES[name].tests for name in chosen) else contextlib.nullcontext():
        for track in tracks:
            track.start()
        for track in tracks:
            track.join()
    return 1 if any(outcome["verdict"] == "FAIL" for outcome in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
