"""What a rank makes of its group's agreement: adopted whole, or refused whole with words that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from pp1q_transport.client.agreement import adopt, state_digest
from pp1q_transport.client.attached_target import AttachedReceiver
from pp1q_transport.errors import LocalMisuse
from pp1q_transport.session.requests import Request


def two() -> dict[int, Request]:
    return {1: Request(1, 5, [1, 2], generation=3), 2: Request(2, 6, [1, 2, 9], generation=4)}


def test_only_what_differs_changes_and_its_generation_rises() -> None:
    requests = two()
    changed = adopt(requests, {1: [1, 2, 7], 2: [1, 2, 9]}, 16)
    assert [request.request for request in changed] == [1]
    assert requests[1].tokens.tolist() == [1, 2, 7]
    assert (requests[1].anchor, requests[1].generation, requests[2].generation) == (2, 4, 4)
    assert state_digest(requests) == state_digest({2: Request(2, 6, [1, 2, 9]), 1: Request(1, 5, [1, 2, 7])})
    assert state_digest(requests) != state_digest(two())


@pytest.mark.parametrize(
    ("agreed", "words"),
    (
        ({1: [1, 2, 7], 2: [1, 2, 9], 3: [1]}, "request 3, which is not open here: open it before wait_for_peer"),
        ({1: [1, 2, 7]}, "leaves request 2 out"),
        ({1: [1, 2, 7], 2: []}, "request 2 is empty"),
        ({1: [1, 2, 7], 2: [16]}, "outside the vocabulary of 16"),
        ({1: [1, 2, 7], 2: [-1]}, "outside the vocabulary"),
        ({1: [1, 2, 7], 2: [1 << 40]}, "must be int32"),
    ),
)
def test_an_agreement_that_can_not_be_changes_nothing(agreed: Mapping[int, Any], words: str) -> None:
    requests = two()
    with pytest.raises(LocalMisuse, match=words):
        adopt(requests, agreed, 16)
    assert requests[1].tokens.tolist() == [1, 2]
    assert (requests[1].generation, requests[2].generation) == (3, 4)


def test_ranks_of_a_group_must_name_their_seeds() -> None:
    """Each drawing its own they would verify with different noise."""
    receiver = AttachedReceiver.__new__(AttachedReceiver)
    receiver._grouped = True
    with pytest.raises(LocalMisuse, match="the same on every rank"):
        receiver.fresh_seed()
    receiver._grouped = False
    assert 0 <= receiver.fresh_seed() < 1 << 64


@pytest.mark.parametrize(("grouped", "opened", "over"), ((True, False, True), (True, True, False), (False, False, False)))
def test_only_a_group_is_between_epochs(grouped: bool, opened: bool, over: bool) -> None:
    receiver = AttachedReceiver.__new__(AttachedReceiver)
    receiver._grouped, receiver._open = grouped, opened
    assert receiver.between_epochs is over
