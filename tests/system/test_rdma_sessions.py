"""Sessions over the rdma link, both ends in one process: on a device where there is one, and on verbs that are played."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from system_rig import ANYWHERE, PROMPT, SMALL, MakeRig, Rig, captured, consume, draft, expected, go_on_alone

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "links"))

from played_verbs import PlayedDevice

from pp1q_transport.client import Role, configure
from pp1q_transport.errors import ConfigError, ProposalDiscarded, Reason
from pp1q_transport.links import kinds
from pp1q_transport.links.rdma import RdmaLink
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_verbs import alive, device_names

pytestmark = pytest.mark.timeout(120)
PATIENT_US = 60_000_000  # the machine with the device is slow


@pytest.fixture(params=("device", "played"))
def options(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What makes a pair of ends use rdma here."""
    if request.param == "played":
        device = replace(kinds.KINDS["rdma"], open_device=lambda config: PlayedDevice())  # type: ignore[arg-type, return-value]
        monkeypatch.setitem(kinds.KINDS, "rdma", device)
        yield {"link": "rdma"}
        return
    try:
        names = device_names()
    except ConfigError as error:
        pytest.skip(f"no rdma here: {error}")
    if not names:
        pytest.skip("no rdma here: no device")
    before = dict(alive)
    yield {"link": "rdma", "rdma": RdmaConfig(device=names[0])}
    assert alive == before, "verbs objects were left behind"


def link(end: Any) -> RdmaLink:
    assert isinstance(end.engine.link, RdmaLink)
    return end.engine.link




@pytest.mark.parametrize("support", (None, 16), ids=("dense", "sparse"))
@pytest.mark.parametrize("listens", ("receiver", "leader"))
def test_rounds_over_rdma_commit_what_they_would_without_any_transport(
    options: dict[str, Any], listens: str, support: int | None
) -> None:
    with Rig(listens=listens, **options) as rig:
        rig.connect()
        for end in (rig.leader, rig.receiver):
            assert link(end).kind == link(end).describe()["link"] == "rdma"
        assert link(rig.receiver).connection.shape.slots == 4
        assert link(rig.leader).connection.shape.slots == 0, "nobody writes to a leader"
        request = rig.receiver.open_request(1, PROMPT, seed=21)
        journal = []
        for number in range(8):
            with rig.round(request, support=support, budget_us=PATIENT_US) as proposal:
                journal.append((number, proposal.generation, True))
                consume(rig.models, rig.receiver, request, proposal)
        assert request.tokens.tolist()[2:] == expected(rig.models, 21, journal, depth=3, support=support)
        assert rig.all_free()
        assert link(rig.leader).connection.life == 0
        assert link(rig.leader).rows_lost == 0


def test_staging_memory_is_registered_with_the_session_and_rows_come_from_there(options: dict[str, Any]) -> None:
    with Rig(vocab_size=8192, **options) as rig:
        rig.connect()
        staged = link(rig.leader).describe()["staged_bytes"]
        assert staged == len(rig.leader.region.memory)
        request = rig.receiver.open_request(1, PROMPT, seed=21)
        with rig.round(request, budget_us=PATIENT_US) as proposal:
            consume(rig.models, rig.receiver, request, proposal)
        assert link(rig.leader).describe()["staged_bytes"] == staged
        assert len(link(rig.leader).connection._staged) == 1


def test_rows_that_come_too_late_cost_a_queue_pair_and_not_the_session(options: dict[str, Any]) -> None:
    """The leader has not heard of the timeout yet: its device is refused; the proposal of another slot goes on."""
    with Rig(**options) as rig:
        rig.connect()
        slow = rig.receiver.open_request(1, PROMPT, seed=21)
        quick = rig.receiver.open_request(2, PROMPT, seed=22)
        ticket = rig.receiver.enqueue(slow, budget_us=200_000)
        step = rig.next_step()
        before = bytes(link(rig.receiver).connection.landing.view)
        while not ticket.settled:
            rig.receiver.poll()
        with pytest.raises(ProposalDiscarded) as caught:
            ticket.wait()
        assert caught.value.reason is Reason.TIMEOUT
        assert rig.all_free()
        draft(rig.models, step)
        rig.leader.engine.flush()
        rig.until(lambda: link(rig.leader).connection.life == 1 and link(rig.leader).connection.up)
        assert bytes(link(rig.receiver).connection.landing.view) == before
        with rig.round(quick, budget_us=PATIENT_US) as proposal:
            consume(rig.models, rig.receiver, quick, proposal)
        go_on_alone(rig.models, rig.receiver, slow, 0)
        assert rig.receiver.engine.formed == rig.leader.engine.formed == 1
        counters = rig.leader.counters
        assert counters.get("queue_pairs_made_anew") == 1
        assert counters.get("rows_lost_with_queue_pair") == link(rig.leader).rows_lost > 0
        assert rig.all_free()


def test_a_live_proposal_whose_rows_go_with_a_queue_pair_is_incomplete(options: dict[str, Any]) -> None:
    """Nothing is sent twice: the rows are gone, their COMPLETION comes and says so."""
    with Rig(**options) as rig:
        rig.connect()
        request = rig.receiver.open_request(1, PROMPT, seed=21)
        ticket = rig.receiver.enqueue(request, budget_us=PATIENT_US)
        step = rig.next_step()
        link(rig.receiver).connection.pair.fail()
        draft(rig.models, step)
        rig.until(lambda: ticket.settled)
        with pytest.raises(ProposalDiscarded) as caught:
            ticket.wait()
        assert caught.value.reason is Reason.INCOMPLETE
        assert rig.receiver.engine.formed == 1
        assert 1 <= rig.leader.counters.get("rows_lost_with_queue_pair") <= 3
        go_on_alone(rig.models, rig.receiver, request, 0)
        with rig.round(request, budget_us=PATIENT_US) as proposal:
            consume(rig.models, rig.receiver, request, proposal)
        assert rig.all_free()


def test_a_session_that_was_lost_forms_anew(options: dict[str, Any]) -> None:
    with Rig(**options) as rig:
        rig.connect()
        request = rig.receiver.open_request(1, PROMPT, seed=21)
        link(rig.leader).connection.sock.close()
        with captured() as log:
            rig.until(lambda: rig.receiver.engine.formed == 2 and rig.leader.up and rig.receiver.up)
        assert any(event["event"] == "session_up" and event["link"] == "rdma" and event["mtu"] for event in log)
        with rig.round(request, budget_us=PATIENT_US) as proposal:
            consume(rig.models, rig.receiver, request, proposal)
        assert rig.all_free()


def test_rdma_settings_without_an_rdma_link_are_refused() -> None:
    with pytest.raises(ConfigError, match="tcp"):
        configure(Role.LEADER, connect=ANYWHERE, **SMALL, rdma=RdmaConfig())


def test_a_host_without_a_device_says_so_in_one_line_and_falls_back_to_nothing(make_rig: MakeRig) -> None:
    with pytest.raises(ConfigError) as caught:
        make_rig(link="rdma", rdma=RdmaConfig(device="nothing0"))
    assert "\n" not in str(caught.value)
    assert "rdma" in str(caught.value).lower()
