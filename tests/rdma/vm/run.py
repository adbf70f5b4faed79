#!/usr/bin/env python3
"""RDMA without RDMA hardware: `run.py` runs the lanes in a machine of its own; `run.py -- COMMAND...` runs anything else there.

Example: python tests/rdma/vm/run.py -- pytest -q tests/links -k rdma

Inside, every path is as it is here, files are read-only (what is written is forgotten), there is no network, and three Soft-RoCE
devices are up (devices.sh). PASS, FAIL or SKIP for each lane; status 1 on any FAIL. PP1Q_REQUIRE_RDMA=1 makes a SKIP a FAIL.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from bytecode import write_bytecode
from lanes import LANES
from machine import CACHE, ENVIRONMENT, REPOSITORY, Machine, Unavailable, prepare
from report import report

LANES_TIMEOUT_S = 3600.0  # of a hang: a machine that is not busy takes a fifth of it


def run_command(command: list[str], timeout_s: float) -> int:
    """One command inside; a single word is taken as shell text."""
    machine = _machine()
    results = Path(tempfile.mkdtemp(prefix="command-", dir=CACHE))
    try:
        text = command[0] if len(command) == 1 else shlex.join(command)
        status = machine.run(text, results, timeout_s)
        if status in (124, 125):
            sys.stderr.write((results / "console.log").read_text(encoding="utf-8", errors="replace")[-4000:])
        return status
    finally:
        shutil.rmtree(results)


def run_lanes(chosen: list[str], results: Path, timeout_s: float) -> int:
    """All lanes, or the chosen ones, in one boot; what came of them is in `results`."""
    shutil.rmtree(results, ignore_errors=True)
    results.mkdir(parents=True)
    required = bool(os.environ.get("PP1Q_REQUIRE_RDMA"))
    try:
        machine = _machine()
    except Unavailable as error:
        return report(chosen, results, required, missing=str(error))
    lanes = shlex.join([sys.executable, "tests/rdma/vm/lanes.py", "--results", str(results), *chosen])
    status = machine.run(lanes, results, timeout_s)
    said = {124: f"the machine was ended after {timeout_s:.0f} s", 125: "the machine failed: see console.log"}.get(status, "")
    return report(chosen, results, required, ended=said)


def _machine() -> Machine:
    """Ready to boot. Raises `Unavailable`."""
    machine = prepare(_environment())
    tests = sorted({text for lane in LANES.values() for text in lane.tests if text.endswith(".py")})
    write_bytecode(REPOSITORY, tests, machine.python_path)
    return machine


def _environment() -> dict[str, str]:
    passed = {name: os.environ[name] for name in os.environ if name in ENVIRONMENT or name.startswith("PP1Q_")}
    passed["PYTHONPATH"] = ":".join(filter(None, [str(REPOSITORY), passed.get("PYTHONPATH", "")]))
    return passed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lane", action="append", default=[], choices=list(LANES), help="run this lane only (may be repeated)")
    parser.add_argument("--results", type=Path, default=CACHE / "results", help="where the lanes' reports and logs go")
    parser.add_argument("--timeout", type=float, default=LANES_TIMEOUT_S, help="seconds after which the machine is ended")
    parser.add_argument("command", nargs="*", help="run this inside instead of the lanes")
    options = parser.parse_args()
    CACHE.mkdir(parents=True, exist_ok=True)
    try:
        if options.command:
            return run_command(options.command, options.timeout)
        return run_lanes(options.lane, options.results.resolve(), options.timeout)
    except Unavailable as error:
        print(f"rdma: {error}", file=sys.stderr)
        return 3


if __name__ == "__main__":
    sys.exit(main())
