"""bench/compare_verifiers.py: our verifier passes its judgement, wrong ones do not, and theirs too where they are installed."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

ROOT = Path(__file__).parents[2]
REQUIRED = "PP1Q_REQUIRE_VERIFIERS"
sys.path.insert(0, str(ROOT / "bench"))
compare = importlib.import_module("compare_verifiers")
FIRST_CASES = compare.cases()[:3]


def keeps_all(_case: Any, drafts: NDArray[np.int64], _seed: int) -> Any:
    """q's own tokens."""
    bonus = np.zeros((len(drafts), 1), np.int64)
    return compare.Outcomes(np.full(len(drafts), compare.DEPTH), np.concatenate([drafts, bonus], axis=1))


def corrects_from_p(case: Any, drafts: NDArray[np.int64], seed: int) -> Any:
    """Keeps as it should; a correction comes from p whole."""
    out = compare.ours(case, drafts, seed)
    noise = np.random.default_rng(seed)
    for number in np.flatnonzero(out.kept < compare.DEPTH):
        row = case.p[out.kept[number]].astype(np.float64)
        out.tokens[number, out.kept[number]] = noise.choice(len(row), p=row / row.sum())
    return out


def test_ours_is_within_every_bound() -> None:
    lines = compare.run(["ours"], 0.1, 3)
    assert len(lines) == len(compare.cases())
    assert all(line.used < 1 for line in lines)


@pytest.mark.parametrize("wrong", (keeps_all, corrects_from_p))
def test_a_wrong_verifier_is_beyond_its_bound(monkeypatch: pytest.MonkeyPatch, wrong: Any) -> None:
    monkeypatch.setattr(compare, "cases", lambda: FIRST_CASES)
    monkeypatch.setitem(compare.VERIFIERS, "vllm", wrong)
    monkeypatch.setitem(compare.DRAWS, "vllm", 60_000)
    lines = {(line.case, line.who): line for line in compare.run(["ours", "vllm"], 0.1, 3)}
    assert lines["unlike", "vllm"].used > 1
    assert lines["unlike", "ours - vllm"].used > 1
    assert lines["unlike", "ours"].used < 1


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_theirs_agree() -> None:
    room = ROOT / ".venv-verifiers"
    if not (room / ".ready").exists():
        if not os.environ.get(REQUIRED):
            pytest.skip(f"vLLM is not set up: scripts/setup-model.sh verifiers, or {REQUIRED}=1")
        subprocess.run([str(ROOT / "scripts" / "setup-model.sh"), "verifiers"], check=True, timeout=1200)
    command = [str(room / "bin" / "python"), "bench/compare_verifiers.py", "--json", "--scale", "0.1"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert len(told["lines"]) == 6 * len(compare.cases())
