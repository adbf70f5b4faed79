"""What a daemon says of an exchange is taken in its turn only: by the number of the exchange, rank by rank, about one thing."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from pp1q_transport.client.exchanging import Exchanging
from pp1q_transport.errors import PeerFault, Reason
from pp1q_transport.session.parts import Part

EPOCH = 7
LARGEST = 3  # the purpose: one float64 of each shard


def part(rank: int, sequence: int = 4, request: int = 1) -> Part:
    return Part(rank, sequence, request, 0, 2, 0, LARGEST, 32 * rank, 32 * rank + 32, np.array([1.5]))


def told(side: Any, said: Part, epoch: int = EPOCH) -> None:
    payload = said.values.tobytes()
    Exchanging.exchanged(side, said.record(epoch, len(payload)), memoryview(payload))


@pytest.fixture
def side() -> Any:
    """One that has said five parts in its epoch, and heard of four exchanges."""
    return SimpleNamespace(epoch=EPOCH, between_epochs=False, _said=5, _heard=[])


def test_the_parts_of_all_ranks_come_in_order(side: Any) -> None:
    for rank in range(3):
        told(side, part(rank))
    assert [heard.rank for heard in side._heard] == [0, 1, 2]
    assert [heard.values.tolist() for heard in side._heard] == [[1.5]] * 3


@pytest.mark.parametrize(
    ("first", "said", "reason"),
    (
        ([], part(0, sequence=3), Reason.RANK_DISAGREE),  # over already
        ([], part(0, sequence=5), Reason.RANK_DISAGREE),  # we said nothing in it yet
        ([], part(1), Reason.RANK_DISAGREE),  # rank 0 was next
        ([part(0)], part(0), Reason.RANK_DISAGREE),  # a second time
        ([part(0)], part(1, request=2), Reason.REQUEST_MISMATCH),
    ),
    ids=("an earlier exchange", "a later exchange", "a rank left out", "a rank twice", "another request"),
)
def test_what_does_not_follow_is_not_taken(side: Any, first: list[Part], said: Part, reason: Reason) -> None:
    for each in first:
        told(side, each)
    with pytest.raises(PeerFault) as caught:
        told(side, said)
    assert caught.value.reason is reason
    assert len(side._heard) == len(first)


def test_what_an_earlier_epoch_said_is_dropped(side: Any) -> None:
    told(side, part(0), EPOCH - 1)
    side.between_epochs = True
    told(side, part(0))
    assert side._heard == []
