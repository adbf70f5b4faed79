"""docs/engines.md is kept true: its Python is run as it stands, target and draft against each other."""

from __future__ import annotations

import asyncio
import importlib.util
import re
import socket
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pp1q_transport import open_leader, open_receiver

TEXT = (Path(__file__).resolve().parents[2] / "docs" / "engines.md").read_text(encoding="utf-8")
VOCAB = 129280

pytestmark = pytest.mark.timeout(60)


def blocks(section: str) -> list[str]:
    """The Python of one section, by its heading's beginning."""
    text = next(part for part in re.split(r"^## ", TEXT, flags=re.M)[1:] if part.startswith(section))
    found = re.findall(r"```python\n(.*?)```", text, re.S)
    assert found, section
    return found


def stubs() -> dict[str, Any]:
    """What the page leaves to the engine."""
    row = np.random.default_rng(0).random(VOCAB) ** 8
    return {
        "asyncio": asyncio,
        "np": np,
        "prompts": [[1, 2, 3], [4, 5], [6, 7, 8, 9], [1], [2], [3], [4], [5], [6], [7]],
        "my_draft_weights": lambda context: row,
        "my_verifier": lambda tokens, qs: (len(tokens), [*tokens.tolist(), 7]),
        "my_target_sample": lambda tokens: 5,
        "finished": lambda tokens: len(tokens) > 15,
    }


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port: int = sock.getsockname()[1]
        return port


def run_blocks(section: str) -> dict[str, Any]:
    """The names that the section's code makes."""
    port = f":{free_port()}"
    names = stubs()
    for block in blocks(section):
        exec(block.replace(":7801", port), names)
    return names


async def answered(target: Any, draft: Any) -> Any:
    """What the target gives while the draft drafts."""
    drafting = asyncio.create_task(draft())
    async with asyncio.timeout(30):
        result = await target()
    drafting.cancel()
    await asyncio.gather(drafting, return_exceptions=True)
    return result


def test_asyncio() -> None:
    names = run_blocks("asyncio")
    tokens = asyncio.run(answered(names["target"], names["draft"]))
    assert len(tokens) == len(names["prompts"])
    assert all(len(each) > 15 for each in tokens)


def test_copy_stages() -> None:
    names = run_blocks("Copy stages")
    options: dict[str, Any] = {"draft_identity": "a", "target_identity": "b"}
    ended = threading.Event()
    with open_receiver(listen="tcp://127.0.0.1:0", **options) as receiver:

        def drafting() -> None:
            with open_leader(connect=receiver.endpoint, wait_for_peer=False, **options) as leader:
                names["draft"](leader)
            ended.set()

        threading.Thread(target=drafting, daemon=True).start()
        receiver.wait_for_peer()
        rows = names["target"](receiver, [1, 2, 3])
    assert len(rows) == 5
    assert all(abs(float(row.sum()) - 1.0) < 1e-6 for row in rows)
    assert ended.wait(30)


def test_tensors_and_pinned_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Everything but `acceptance`, which needs torch."""
    names = run_blocks("Tensors")
    with open_receiver(listen="tcp://127.0.0.1:0") as receiver, open_leader(connect=receiver.endpoint) as leader:
        names["report"](receiver)
        while not (receiver.up and leader.up):
            leader.poll()
            receiver.poll()
        ticket = receiver.enqueue(receiver.open_request(1, [1, 2, 3]), support=4, depth=2, budget_us=20_000_000)
        while (step := leader.next_step()) is None:
            receiver.poll()
        for position in step.positions:
            assert step.put(position, weights=np.ones(VOCAB)) is not None
        while not ticket.settled:
            leader.poll()
            receiver.poll()
        with ticket.wait() as proposal:
            if importlib.util.find_spec("torch") is not None:
                assert names["acceptance"](proposal, np.full((2, VOCAB), 1 / VOCAB)) == [4 / VOCAB, 4 / VOCAB]
    told = capsys.readouterr().out
    assert "not pinned: " in told or "registered" in told
