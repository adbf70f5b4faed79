"""The reason in a draft process's FAIL, at rank 0's daemon and at a rank above it."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from pp1q_transport.counters import Counters
from pp1q_transport.daemon.following import FollowPort
from pp1q_transport.daemon.leading import DraftPort
from pp1q_transport.errors import Reason
from pp1q_transport.local import messages as m
from pp1q_transport.session.leader import DRAFTING, Grant

R = Reason
HONEST = {
    R.CANCELLED, R.TIMEOUT, R.OVERLOAD, R.PEER_LOST, R.COPY_FAILED, R.INVALID_WEIGHTS, R.MASS, R.ZERO_ENTRY, R.ID_RANGE,
    R.ID_ORDER, R.ID_DUPLICATE, R.REPRESENTATION, R.SUPPORT_BOUNDS, R.CONTEXT_MISMATCH, R.DRAW_MISMATCH, R.RANK_DISAGREE,
}  # fmt: skip
CODES = [(reason.code, reason if reason in HONEST else R.CANCELLED) for reason in R]


def nothing(*_anything: object) -> None:
    """A part that this test does not look at."""


@pytest.mark.parametrize("rank", (0, 1))
@pytest.mark.parametrize(("code", "told"), (*CODES, (0, R.CANCELLED), (len(R) + 1, R.CANCELLED), (0xFFFFFFFF, R.CANCELLED)))
def test_a_process_gives_up_for_reasons_that_a_process_has(rank: int, code: int, told: Reason) -> None:
    failed: list[Reason] = []
    grant = Grant(0, 3)
    grant.state, grant.generation = DRAFTING, 1
    served = SimpleNamespace(
        target=0, session=SimpleNamespace(grants=[grant], terms=SimpleNamespace(session=9)), share=None,
        fail=lambda _grant, _generation, reason: failed.append(reason),
        on_open=nothing, on_commit=nothing, on_reset=nothing, on_close=nothing,
    )  # fmt: skip
    port = (FollowPort if rank else DraftPort)([served], Counters())  # type: ignore[list-item]
    port.take(m.FAIL, (9, 0, 0, 1, code), memoryview(b""), 0)
    assert failed == [told]
