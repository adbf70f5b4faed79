"""What a rank makes of its group's agreement: adopted whole, or refused whole with words that say what to do."""

from __future__ import annotations

from collections.abc import Mapping
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from pp1q_transport.client.agreement import adopt, state_digest
from pp1q_transport.client.attached_target import AttachedReceiver
from pp1q_transport.client.attached_ticket import RecordTicket
from pp1q_transport.errors import LocalMisuse, ProposalDiscarded, Reason
from pp1q_transport.local import messages as m
from pp1q_transport.session.requests import Request
from pp1q_transport.session.slots import SlotGeometry
from pp1q_transport.staging import Region, SlotViews

if TYPE_CHECKING:
    from pp1q_transport.local.attach import Attachment


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


class Member(AttachedReceiver):
    """Rank 1 of a group whose daemon only seems to be there."""

    def __init__(self) -> None:
        super().__init__("nowhere", 1, "block", 1)
        self._grouped = self._open = True
        self.sent: list[int] = []

    def _join(self, timeout_s: float = 0.0) -> None:
        geometry = SlotGeometry(1, 3, 4 * 16)
        memory = memoryview(bytearray(geometry.total_bytes))
        self._views = SlotViews(cast("Region", SimpleNamespace(memory=memory)), geometry, 16)
        self._attachment = cast("Attachment", SimpleNamespace(close=lambda: None))

    def send(self, kind: int, *fields: int | float, payload: bytes = b"") -> bool:
        self.sent.append(kind)
        return True

    def ring(self) -> None: ...

    def asks(self, request: Request) -> RecordTicket:
        """A STEP of the request, under way."""
        self._tickets[9] = ticket = RecordTicket(self, request, 9, 0, 1000)
        request.in_flight = True
        return ticket


@pytest.mark.parametrize(("anchor", "round_number"), ((3, 0), (1, 7), (426, 1)))
def test_a_rank_whose_outcome_is_of_another_round_leaves_the_epoch(anchor: int, round_number: int) -> None:
    """The Nth STEP met another outcome than rank 0's Nth: every later one would too. It is the group's to agree anew."""
    receiver = Member()
    request = Request(1, 5, [1, 2, 9], generation=3)
    receiver.requests.add(request)
    ticket = receiver.asks(request)
    receiver._record(m.READY, (1, 9, 0, 2, 5, 3, round_number, anchor, 3, 1, 77), memoryview(b""))
    assert ticket.known
    assert not receiver.up
    assert not receiver.attached, "its daemon tells rank 0 that this rank left"
    assert receiver.counters.of(Reason.RANK_DISAGREE) == 1
    assert request.tokens.tolist() == [1, 2, 9]
    assert not request.in_flight
    with pytest.raises(ProposalDiscarded) as raised:
        ticket.wait()
    assert (raised.value.reason, raised.value.epoch_over) == (Reason.RANK_DISAGREE, True)


def test_rounds_are_rank_0s_where_the_anchor_is_ours() -> None:
    """After an agreement a rank may have counted more or fewer rounds than rank 0."""
    receiver = Member()
    request = Request(1, 5, [1, 2, 9], generation=3)
    receiver.requests.add(request)
    ticket = receiver.asks(request)
    receiver._record(m.READY, (1, 9, 0, 2, 5, 3, 40, 2, 3, 1, 77), memoryview(b""))
    assert receiver.up
    assert ticket.facts is not None
    assert (ticket.facts.round, request.round, request.generation) == (40, 41, 3)
