"""Captures of real demos for the tests of this folder: a toy draft in a thread, a toy target, and the file they leave.

Between the tests and `toy.demo`. A demo of each shape is run once a test session.
"""

from __future__ import annotations

import io
import threading
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from pp1q_transport.capture.link_replay import Outcome
from pp1q_transport.capture.reading import Record, Recording
from pp1q_transport.capture.recorder import Capture
from pp1q_transport.capture.replay import Replay
from pp1q_transport.links.faulty import FaultRates
from pp1q_transport.toy.demo import DemoOptions, DemoTarget, open_target, run_draft

FAULTS = "corrupt=0.1,late=0.04,drop=0.06"


@dataclass(frozen=True)
class Live:
    """What a live run left: its capture's files, oldest first, and its own account."""

    files: tuple[bytes, ...]
    ready: int
    reasons: dict[str, int]
    discards: dict[str, int]
    seeds: tuple[int, ...]
    secrets: tuple[bytes, ...]
    tokens: dict[int, list[int]]


def run_live(folder: Path, options: DemoOptions, **kept: Any) -> Live:
    """A demo with a capture at its target."""
    path = folder / "demo.pcapng"
    capture = Capture(path, **kept)
    secrets: list[bytes] = []
    with open_target(options, capture=capture) as receiver:
        drafting = threading.Thread(target=run_draft, args=(options, receiver.endpoint), daemon=True)
        drafting.start()
        receiver.wait_for_peer()
        assert receiver.engine.agreement is not None
        secrets.append(receiver.engine.agreement.secret)
        result = DemoTarget(options, receiver).run()
        seeds = tuple(request.seed for request in receiver.requests.requests.values())
    drafting.join(20)
    assert not drafting.is_alive()
    capture.close()
    assert (capture.dropped, capture.failed) == (0, "")
    files = sorted(folder.glob("demo.pcapng*"), key=lambda file: -int(file.suffix[1:]) if file.suffix != ".pcapng" else 1)
    counters = receiver.counters
    return Live(
        tuple(file.read_bytes() for file in files),
        receiver.ready,
        dict(counters.reasons),
        dict(counters.discards),
        seeds,
        tuple(secrets),
        result.tokens,
    )


@cache
def demo(support: int | None = 8, faults: str = "", rounds: int = 60, vocab: int = 256, seed: int = 3) -> Live:
    """A small demo's capture in one file."""
    import tempfile

    options = DemoOptions(seed=seed, rounds=rounds, vocab_size=vocab, support=support, faults=FaultRates.parse(faults))
    with tempfile.TemporaryDirectory() as folder:
        return run_live(Path(folder), options)


def recorded(data: bytes) -> list[Record]:
    return list(Recording(io.BytesIO(data)))


def replayed(data: bytes) -> Outcome:
    recording = Recording(io.BytesIO(data))
    outcome = Replay().run(recording)
    outcome.torn = recording.torn
    return outcome
