"""SmolLM2-135M itself: the forward's bits, its rollback, and a short `make demo-model`. Needs scripts/setup-model.sh model.

Without .venv-model these are skipped, by that name; PP1Q_REQUIRE_SMOLLM2=1 sets it up instead (minutes, over a gigabyte).
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).parents[2]
PYTHON = ROOT / ".venv-model" / "bin" / "python"
REQUIRED = "PP1Q_REQUIRE_SMOLLM2"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]

FORWARD = """
import sys
sys.path.insert(0, "examples/smollm2")
import numpy as np
from model import Cut, Forward, load_model, load_tokenizer

text = "Two processes exchange a distribution, and only then a token is drawn from it. Nothing is rounded"
tokens = load_tokenizer()(text).input_ids
target = load_model()
made = {}
for shape in (5, 5):  # twice: forwards of one shape, grouped otherwise
    forward = Forward(target, (shape,), 64)
    start = 7 + len(made)
    rows = [forward.after(tokens[:start])]
    for at in range(start + 1, len(tokens) + 1):
        # a wrong continuation goes in first, as a draft that is then rejected
        forward.after([*tokens[: at - 1], 5, 6, 7], 4)
        rows.append(forward.after(tokens[:at]))
    made[start] = np.concatenate(rows)
assert made[7][1:].tobytes() == made[8].tobytes(), "rollback, or the row's place in its forward, changes bits"
whole = Forward(target, (5,), 64).after(tokens, len(tokens) - 6)
assert whole.tobytes() == made[7].tobytes(), "decoding in chunks is not decoding one by one"
plain = target(input_ids=__import__("torch").tensor([tokens])).logits[0].detach().numpy()
assert np.abs(plain[6:] - whole).max() < 1e-3, "not the model's own logits"
for text, differs in (("layers=28", True), ("bits=6", True), ("none", False)):
    row = Forward(load_model(Cut.parse(text)), (16, 1), 64).after(tokens)[0]
    assert np.isfinite(row).all()
    assert (np.abs(row - whole[-1]).max() > 1e-2) == differs, text
print("fine")
"""


@pytest.fixture(scope="module")
def python() -> str:
    if not (PYTHON.parent.parent / ".ready").exists():
        if not os.environ.get(REQUIRED):
            pytest.skip(f"SmolLM2 is not set up: scripts/setup-model.sh model, or {REQUIRED}=1")
        subprocess.run([str(ROOT / "scripts" / "setup-model.sh"), "model"], check=True, timeout=1700)
    return str(PYTHON)


def test_a_row_depends_on_its_context_alone(python: str) -> None:
    done = subprocess.run([python, "-c", FORWARD], cwd=ROOT, capture_output=True, text=True, timeout=900, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout == "fine\n"


def test_rows_for_other_tests(python: str, tmp_path: Path) -> None:
    out = tmp_path / "rows.npy"
    subprocess.run([python, "examples/smollm2/rows.py", str(out)], cwd=ROOT, check=True, timeout=600)
    rows = np.load(out)
    assert (rows.shape, rows.dtype) == ((32, 49152), np.float32)
    assert np.isfinite(rows).all()
    assert len(np.unique(rows.argmax(axis=1))) > 10
    assert [path.name for path in tmp_path.iterdir()] == ["rows.npy"]


def test_a_short_demo(python: str) -> None:
    run = [python, "examples/smollm2/run.py", "--json", "--tokens", "12", "--first", "60", "--sparse", "32", "--draft", "bits=5"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=1500, check=False)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["problems"] == []
    assert [(one["via"], one["temperature"]) for one in told["runs"]] == [
        ("tcp", 0), ("tcp", 1), ("sidecars", 0), ("sidecars", 1),
    ]  # fmt: skip
    for one in told["runs"]:
        assert len(one["account"]["tokens"]) == 12
        assert one["bytes_ready"] > 0
        assert one["account"]["accepted"] > 0
        assert 0 < one["shares"]["transport"] < 1
    assert told["runs"][0]["account"]["tokens"] == told["runs"][2]["account"]["tokens"]
    assert set(told["tail_us"]) == {"tcp", "sidecars"}
    assert sum("12 of 12 tokens" in line for line in told["checks"]) == 2


def test_what_is_no_draft_is_refused(python: str) -> None:
    run = [python, "examples/smollm2/run.py", "--draft", "layers=99"]
    done = subprocess.run(run, cwd=ROOT, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 2
    assert "layers are 1..30" in done.stderr
