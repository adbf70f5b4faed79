"""The golden frames over every kind of link: what a frame means does not depend on what carried it.

The benches of tests/protocol take each frame in the state that its notes name; here its bytes come to them through a real link.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_conformance import FACTORIES, Pair

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from protocol import golden
from protocol.golden import Golden, Outcome, bench_for, vectors

from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.session.assembler import FrameSink

pytestmark = pytest.mark.timeout(400)

# A link stamps bytes with the time of their arrival: not for it are vectors that come at a time of their own, nor proofs.
OVER_LINKS = [
    vector for vector in vectors().values()
    if "before" in vector.note and not vector.note.get("now_us") and vector.kind != "TOKEN"
    and vector.note["to"] not in ("listener_port", "connector_link")
]  # fmt: skip


class OverLink:
    """Stands where a bench has its assembler: what is filled in goes in at one end of a link, and out into the session."""

    def __init__(self, kind: str, sink: FrameSink, made: list[Pair]) -> None:
        self.pair = FACTORIES[kind](sink)
        made.append(self.pair)
        self.assembler = self.pair.right.link.assembler  # type: ignore[attr-defined]
        self.landing = self.assembler.landing
        self.arrived = 0

    @property
    def header(self) -> Any:
        return self.assembler.header

    def fill(self, data: bytes) -> int:
        """Until all of it has arrived; the code that ends the link, or 0."""
        self.pair.left.raw(data)
        self.arrived += len(data)
        while self.pair.right.link.bytes_in < self.arrived:
            moved = self.pair.left.link.pump(0)
            assert moved >= 0
            taken = self.pair.right.link.pump(0)
            if taken < 0:
                return -taken
            if not moved and not taken:
                time.sleep(0.0002)
        return 0


@pytest.fixture(params=tuple(FACTORIES))
def links(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Pair]]:
    """Benches that are made while this is set have a link of this kind; the links made so far."""
    made: list[Pair] = []
    name: str = request.param

    def assembler(sink: FrameSink) -> OverLink:
        return OverLink(name, sink, made)

    def fill(over: OverLink, data: bytes, _now_ns: int, _chunk: int = 1 << 30) -> int:
        return over.fill(data)

    monkeypatch.setattr(golden, "Assembler", assembler)
    monkeypatch.setattr(golden, "fill", fill)
    monkeypatch.setattr(golden, "START_NS", monotonic_ns() + 3600 * 10**9)  # no budget ends meanwhile
    yield made
    hang_up(made)


def hang_up(made: list[Pair]) -> None:
    """Closes all that were made so far: each of a hundred links on rdma looks through what the others hold open."""
    while made:
        pair = made.pop()
        for link in (pair.left.link, pair.right.link):
            link.close()
        if isinstance(link, RdmaLink):
            link.connection.device.close()


def meets(vector: Golden) -> Outcome:
    """What its notes say must come of it."""
    if vector.note.get("expected_reason"):
        return Outcome(vector.note["costs"], vector.note["expected_reason"], "")
    return Outcome("", "", vector.note["effect"])


@pytest.mark.parametrize("name", sorted({vector.note["to"] for vector in OVER_LINKS}))
def test_golden_frames_mean_the_same_over_every_link(links: list[Pair], name: str) -> None:
    """All vectors for one receiver of them."""
    wrong = {}
    for vector in OVER_LINKS:
        if vector.note["to"] == name:
            outcome = bench_for(vector).feed(vector.data)
            if outcome != meets(vector):
                wrong[vector.name] = (outcome, meets(vector))
            hang_up(links)
    assert not wrong
