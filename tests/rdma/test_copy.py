"""What copying out promises: a slot that a sampler may read never changes, whatever a peer writes into landing memory, and when.

A hostile leader in a process of its own writes there with keys that are good, which nothing can forbid. At worst the generation
that is landing is discarded by its digest. Every test here fails when rows are used in place (lane "mutant: in place").
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from rdma_world import HEADER, IsolationBroken, World, take_out, world

from pp1q_transport.client import Proposal
from pp1q_transport.errors import ProposalDiscarded, Reason
from pp1q_transport.links import rdma

pytestmark = pytest.mark.timeout(240)
# What bytes that are no row fail of, whichever check sees them first.
TORN = {Reason.PAYLOAD_DIGEST, Reason.MASS, Reason.NEGATIVE, Reason.NONDYADIC, Reason.NONFINITE, Reason.ZERO_Q_TOKEN}


@pytest.fixture(autouse=True)
def mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(monkeypatch)


@pytest.fixture
def pair() -> Iterator[World]:
    with world() as made:
        yield made


def check_rows(proposal: Proposal, digests: list[str]) -> None:
    """What the sampler is given is what the leader drew from."""
    if World.digests_of(proposal) != digests:
        raise IsolationBroken(f"a ready proposal is not what was drawn from (slot {proposal.slot})")


def test_a_ready_slot_never_changes(pair: World) -> None:
    """After q-ready, while it is held: every byte of its landing memory is written over, again and again."""
    pair.honest(pair.request())
    pair.honest(pair.request())
    for _ in range(3):
        pair.scribble()
        pair.serve()
    pair.honest(pair.request())
    pair.scribble()


def test_a_slot_that_is_used_again_is_what_its_own_generation_brought(pair: World) -> None:
    """Landing memory that was written over between two generations, and during the second: its own rows or none."""
    first = pair.honest(pair.request())
    pair.scribble()
    slot = first.slot
    pair.held.clear()
    first.release()
    while True:  # until this very slot is granted anew
        ticket, granted = pair.ask(pair.request())
        said = pair.served("draft")
        proposal = pair.ready(ticket)
        check_rows(proposal, said["digests"])
        if granted == slot:
            break
    pair.scribble()
    check_rows(proposal, said["digests"])


def test_a_row_exchanged_before_it_is_copied_is_discarded_by_its_digest(pair: World) -> None:
    """Valid in itself, and for the right token: only the digest can tell."""
    pair.honest(pair.request())
    ticket, slot = pair.ask(pair.request())
    said = pair.hostile.do("draft")  # all of it has arrived; nothing was taken yet
    assert pair.hostile.do("write_one_hot", slot=slot, row=1, token=said["tokens"][1])["status"] == 0
    assert pair.discarded(ticket) is Reason.PAYLOAD_DIGEST
    pair.scribble()
    pair.honest(pair.request())
    pair.scribble()


class CutIn:
    """Stops the copying of landing rows after so many pieces, once, and does something there."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left = -1
        self.action: Any = None
        plain = rdma.copy_bytes

        def copying(target: Any, at: int, source: Any, offset: int, length: int) -> None:
            plain(target, at, source, offset, length)
            if self.left > 0 and length > HEADER:
                self.left -= 1
                if self.left == 0:
                    self.action()

        monkeypatch.setattr(rdma, "copy_bytes", copying)

    def after(self, pieces: int, action: Any) -> None:
        self.left, self.action = pieces, action


def test_a_write_in_the_middle_of_a_row_that_is_being_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """After each piece in turn: torn rows are discarded; written after the last piece, the row is what was drawn from."""
    cut_in = CutIn(monkeypatch)
    with world(vocab_size=129_280, depth=1) as pair:
        pieces = -(-4 * 129_280 // rdma.COPY_AT_MOST)
        assert pieces >= 3
        for piece in range(1, pieces + 1):
            ticket, slot = pair.ask(pair.request())
            said = pair.hostile.do("draft")
            length = 4 * 129_280

            def write(slot: int = slot, length: int = length) -> None:
                done = pair.hostile.do("write", slot=slot, offset=HEADER, length=length, fill=0xA5, imm=None, key="present")
                assert done["status"] == 0

            cut_in.after(piece, write)
            pair.until(lambda ticket=ticket: ticket.settled)  # type: ignore[misc]
            assert cut_in.left == 0, "nothing was cut in on"
            if piece < pieces:
                assert pair.discarded(ticket) in TORN
            else:
                check_rows(pair.ready(ticket), said["digests"])
        pair.scribble()


def test_a_peer_that_writes_all_the_time_gets_its_own_rows_or_none(pair: World) -> None:
    """Both processes at once, no order between them."""
    pair.honest(pair.request())
    for _ in range(8):
        ticket, _slot = pair.ask(pair.request())
        said = pair.served("hammer", times=6)
        pair.until(lambda ticket=ticket: ticket.settled)  # type: ignore[misc]
        reason = None
        try:
            with ticket.wait() as proposal:
                check_rows(proposal, said["digests"])
        except ProposalDiscarded as discarded:
            reason = discarded.reason
        assert reason is None or reason in TORN
        pair.served("recover")  # discarded is fenced, and the hammer may have met the fence
    pair.scribble()
