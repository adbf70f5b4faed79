"""What the fence promises: once a STEP is over, nobody's late write reaches its landing memory, and the writer hears of it.

A hostile leader in a process of its own writes with the keys that it was given, by the verbs library itself. Each test here fails
when the deregistration is taken out (lane "mutant: no fence").
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from pyverbs import enums
from rdma_world import IsolationBroken, World, take_out, world

from pp1q_transport.errors import Reason

pytestmark = pytest.mark.timeout(240)
REFUSED = {enums.IBV_WC_REM_ACCESS_ERR, enums.IBV_WC_RETRY_EXC_ERR}


@pytest.fixture(autouse=True)
def mutant(monkeypatch: pytest.MonkeyPatch) -> None:
    take_out(monkeypatch)


@pytest.fixture
def pair() -> Iterator[World]:
    with world() as made:
        yield made


def write_late(pair: World, slot: int, offset: int, length: int, imm: int | None) -> None:
    """A write with the stolen key. The landing memory must not change, and the writer must be told."""
    before = pair.landing(slot)
    said = pair.hostile.do("write", slot=slot, offset=offset, length=length, fill=0xA5, imm=imm, key="stolen")
    pair.check_landing(slot, before)
    if said["status"] not in REFUSED:
        raise IsolationBroken(f"a late write ended with status {said['status']}")
    assert said["state"] == "ERR"


def goes_on(pair: World) -> None:
    """The queue pair is made anew, and the session or the one after it carries a proposal."""
    pair.served("serve", turns=100)
    pair.honest(pair.request()).release()
    pair.held.clear()


@pytest.mark.parametrize("imm", (0, None), ids=("with immediate data", "plain"))
def test_a_write_after_the_timeout_reaches_nothing(pair: World, imm: int | None) -> None:
    ticket, slot = pair.ask(pair.request())
    pair.time_out(ticket, slot)
    write_late(pair, slot, 0, pair.shape["stride"], imm)
    goes_on(pair)


def test_a_write_after_a_cancel_reaches_nothing(pair: World) -> None:
    request = pair.request()
    ticket, slot = pair.ask(request)
    pair.receiver.close_request(request)
    assert pair.discarded(ticket) is Reason.CANCELLED
    pair.until(lambda: pair.state(slot) == "FREE")
    write_late(pair, slot, 0, pair.shape["stride"], 0)
    goes_on(pair)


def test_a_late_row_does_not_reach_the_next_generation_of_its_slot(pair: World) -> None:
    """The slot is granted again before the late write comes: the new generation's landing is not touched either."""
    ticket, slot = pair.ask(pair.request())
    pair.time_out(ticket, slot)
    again, same = pair.ask(pair.request())
    tickets = [again]
    while same != slot:  # until this very slot is granted anew
        ticket, same = pair.ask(pair.request())
        tickets.append(ticket)
    write_late(pair, slot, 0, pair.shape["stride"], 0)
    for ticket in tickets:
        assert not ticket.known


def test_a_slot_that_was_fenced_before_is_fenced_again(pair: World) -> None:
    """Each fence gives out a new key; that one is as dead after the next fence as the first was."""
    ticket, slot = pair.ask(pair.request())
    pair.time_out(ticket, slot)
    again = -1
    while again != slot:
        ticket, again = pair.ask(pair.request())
        pair.served("steal")
        pair.time_out(ticket, again)
    write_late(pair, slot, 0, pair.shape["stride"], 0)
    goes_on(pair)


def test_a_write_on_its_way_is_cut_off_by_the_fence() -> None:
    """A large write is half there when the STEP is cancelled: not a byte more arrives once the fence is back."""
    with world(vocab_size=129_280, depth=5) as pair:
        length = pair.shape["slot_bytes"]
        cut = 0
        for fill in range(0xA0, 0xA0 + 20):
            request = pair.request()
            ticket, slot = pair.ask(request)
            pair.served("steal")
            pair.hostile.do("post", slot=slot, offset=0, length=length, fill=fill, imm=None, key="stolen")
            view, at = pair.link.connection.landing.view, pair.link.connection.shape.offset(slot, 0)
            while view[at + length // 4] != fill:
                pass
            pair.receiver.close_request(request)
            pair.until(lambda ticket=ticket: ticket.settled)  # type: ignore[misc]
            before = pair.landing(slot)
            said = pair.hostile.do("completion")
            pair.check_landing(slot, before)
            if said["status"] in REFUSED:
                cut += 1
            if cut >= 3:
                break
            goes_on(pair)
        if not cut:
            raise IsolationBroken("no write was ever cut off")
