"""The loops of examples/smollm2 with a made-up model in place of SmolLM2: what they commit, how that is judged, what is shown.

The model itself needs torch: `test_demo_model.py`.
"""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from client_rig import KINDS, SMALL, VOCAB, daemons
from numpy.typing import NDArray

from pp1q_transport import attach_leader, attach_receiver, open_leader, open_receiver

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "smollm2"))

from drafting import Drafter
from generating import Account, Task, alone, generate, seeds
from judging import first_tokens, judge_first, judge_texts, replayed
from logits import Remembered
from reporting import Stream

pytestmark = pytest.mark.timeout(120)
PROMPT = [1, 2, 3]
IDENTITIES = {"draft_identity": "made-up-draft", "target_identity": "made-up-target"}


class MadeUp:
    """Logits that depend on the last two tokens; `off` moves them, as a draft's are off."""

    def __init__(self, off: float = 0.0) -> None:
        self.off = off
        self.asked: list[int] = []

    def after(self, context: Sequence[int], last: int = 1) -> NDArray[np.float32]:
        self.asked.append(len(context))
        return np.stack([self._row(context[: len(context) - back]) for back in reversed(range(last))])

    def _row(self, context: Sequence[int]) -> NDArray[np.float32]:
        tail = [int(token) for token in context[-2:]]
        noise = np.random.default_rng([7, *tail])
        row = noise.normal(size=VOCAB) * 2
        return (row + self.off * np.random.default_rng([8, *tail]).normal(size=VOCAB)).astype(np.float32)


@contextmanager
def both(kind: str, model: Any, account: Any, temperature: float | None = None) -> Iterator[Any]:
    """A receiver for the test, and a drafter behind a leader in a thread of its own."""
    with side_of(kind) as (receiver, leader):
        over = threading.Event()

        def drafting() -> None:
            drafter = Drafter(model, temperature, account)
            while not over.is_set():
                step = leader.next_step(10_000_000)
                if step is not None:
                    drafter.draft(step)

        thread = threading.Thread(target=drafting)
        thread.start()
        try:
            receiver.wait_for_peer()
            yield receiver
        finally:
            over.set()
            thread.join()


@contextmanager
def side_of(kind: str) -> Iterator[tuple[Any, Any]]:
    if kind == "embedded":
        with (
            open_receiver(listen="tcp://127.0.0.1:0", **SMALL, **IDENTITIES) as receiver,
            open_leader(connect=receiver.endpoint, **SMALL, **IDENTITIES) as leader,
        ):
            yield receiver, leader
        return
    with (
        daemons() as deployment,
        attach_receiver(deployment.socket("receiver0")) as receiver,
        attach_leader(deployment.socket("leader")) as leader,
    ):
        yield receiver, leader


def nowhere(_tokens: Sequence[int], _accepted: int) -> None:
    pass


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("support", (None, 8))
def test_at_temperature_0_the_text_is_the_targets(kind: str, support: int | None) -> None:
    target, notes = MadeUp(), io.StringIO()
    task = Task(PROMPT, 60, 3, 0.0, support)
    shown: list[int] = []
    with both(kind, MadeUp(1.0), notes) as receiver:
        account = generate(receiver, target, task, lambda tokens, _accepted: shown.extend(tokens))
    assert account.tokens == alone(MadeUp(), task) == shown
    assert not account.reasons
    assert 0 < account.accepted < account.drafted
    assert len(account.rounds) == len(account.whole_ns) == len(account.latency_ns)
    told = [json.loads(line) for line in notes.getvalue().splitlines()]
    assert [line["round"] for line in told] == account.rounds
    shares = account.shares({line["round"]: line["model_ns"] for line in told})
    assert all(share > 0 for share in shares.values())
    assert sum(shares.values()) <= 1


@pytest.mark.parametrize("draft_temperature", (None, 0.5))
def test_at_temperature_1_the_text_is_distributed_as_the_targets(draft_temperature: float | None) -> None:
    model = MadeUp()
    texts = []
    with both("embedded", MadeUp(1.0), io.StringIO(), draft_temperature) as receiver:
        for number, seed in enumerate(seeds(3, 2), 1):
            task = Task(PROMPT, 300, 3, 1.0, None, seed, number)
            texts.append((PROMPT, generate(receiver, model, task, nowhere).tokens))
    assert judge_texts(model, texts, 1.0, 4) > 1e-6


def test_a_text_of_another_law_is_not_taken_for_the_targets() -> None:
    warm = alone(MadeUp(), Task(PROMPT, 600, 1, 2.0))
    own = alone(MadeUp(), Task(PROMPT, 600, 1, 1.0))
    model = MadeUp()
    assert judge_texts(model, [(PROMPT, own)], 1.0, 4) > 1e-6
    assert judge_texts(model, [(PROMPT, warm)], 1.0, 4) < 1e-6


def test_first_tokens_of_many_seeds() -> None:
    model = MadeUp()
    with both("embedded", Remembered(MadeUp(1.0)), io.StringIO()) as receiver:
        counted = first_tokens(receiver, Remembered(model), Task(PROMPT, 1, 1, 1.0), seeds(5, 800))
    assert counted.total() == 800
    row = model.after(PROMPT)[0]
    p_value, cells = judge_first(row, counted, 1.0)
    assert cells > 5
    assert p_value > 1e-6
    assert judge_first(row, counted, 2.0)[0] < 1e-6
    drafts = Counter(alone(MadeUp(1.0), Task(PROMPT, 1, 1, 1.0, None, seed))[0] for seed in seeds(5, 800))
    assert judge_first(row, drafts, 1.0)[0] < 1e-6


def test_a_single_likely_token_proves_nothing() -> None:
    row = np.full(VOCAB, -50.0, np.float32)
    row[3] = 0
    assert judge_first(row, Counter({3: 100}), 1.0) == (1.0, 1)


def test_rows_are_those_of_every_prefix() -> None:
    model = MadeUp()
    tokens = list(range(10, 21))
    rows = list(replayed(model, PROMPT, tokens, 4))
    assert len(rows) == len(tokens)
    for at, row in enumerate(rows):
        assert np.array_equal(row, model.after([*PROMPT, *tokens[:at]])[0])


def test_what_is_remembered_is_not_asked_again() -> None:
    model = MadeUp()
    remembered = Remembered(model, most=3)
    first = remembered.after([1, 2, 3], 2)
    assert np.array_equal(remembered.after([1, 2, 3], 2), first)
    assert np.array_equal(remembered.after([1, 2], 1), first[:1])
    assert model.asked == [3]
    remembered.after([5, 6], 2)
    remembered.after([1, 2], 1)
    assert model.asked == [3, 2]
    remembered.after([1, 2, 3], 1)  # longest unasked of four, where three are kept
    assert model.asked == [3, 2, 3]


def test_shares_of_nothing() -> None:
    account = Account()
    assert account.acceptance == 0
    assert account.shares({}) == {"draft": 0, "target": 0, "transport": 0}
    assert account.transport_us({}) == 0


class Letters:
    """A tokenizer of bytes: a character may need several tokens."""

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_kept_drafts_are_green(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(Letters(), coloured=True)
    stream.add([*b"ab"], 1)
    stream.add([*"é".encode()], 2)
    stream.end()
    assert capsys.readouterr().out == "\x1b[32ma\x1b[0mb\x1b[0m\x1b[32mé\x1b[0m\n\x1b[0m"


def test_no_colour_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    stream = Stream(Letters())
    stream.heading("a text", [*b"so "])
    stream.add([*b"be it"], 3)
    stream.end()
    assert capsys.readouterr().out == "--- a text\nso be it\n"


def test_no_colour_where_it_is_not_wanted(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    monkeypatch.setenv("NO_COLOR", "1")
    Stream(Letters()).add([*b"a"], 1)
    monkeypatch.delenv("NO_COLOR")
    Stream(Letters()).add([*b"a"], 1)
    assert capsys.readouterr().out == "a\x1b[32ma\x1b[0m"


RUN = Path(__file__).parents[2] / "examples" / "smollm2" / "run.py"


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("arguments", "text"),
    (
        (("--draft", "layers=99"), "layers are 1..30"),
        (("--draft", "halved"), "a draft is none"),
        (("--draft", "bits=x"), "a draft is none"),
        (("--draft", "bits=5,bits=6"), "a draft is none"),
        (("--tokens", "0"), "Invalid value"),
        (("--via", "pigeon"), "Invalid value"),
    ),
)
def test_a_wrong_option_is_one_line_before_anything_is_loaded(arguments: tuple[str, ...], text: str) -> None:
    done = subprocess.run([sys.executable, str(RUN), *arguments], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
    assert done.stdout == ""


@pytest.mark.timeout(120)
@pytest.mark.skipif(importlib.util.find_spec("torch") is not None, reason="torch is installed here: nothing is missing")
def test_without_torch_it_says_what_to_do() -> None:
    done = subprocess.run([sys.executable, str(RUN)], capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("pp1q: there is no torch here: scripts/setup-model.sh model")
    assert done.stderr.count("\n") == 1
