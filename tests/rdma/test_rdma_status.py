"""Every number that verbs can say has a name, words and a reason; compared with the installed pyverbs where there is one."""

from __future__ import annotations

import enum
import importlib.util
import re
from dataclasses import fields
from pathlib import Path

import pytest

from pp1q_transport.errors import Reason
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_status import EVENTS, PROBLEMS, QP_STATES, event_words, explain, state_name


def words(text: str) -> list[str]:
    return text.split()


# libibverbs' enum ibv_wc_status, in order.
STATUSES = words(
    "SUCCESS LOC_LEN_ERR LOC_QP_OP_ERR LOC_EEC_OP_ERR LOC_PROT_ERR WR_FLUSH_ERR MW_BIND_ERR BAD_RESP_ERR LOC_ACCESS_ERR "
    "REM_INV_REQ_ERR REM_ACCESS_ERR REM_OP_ERR RETRY_EXC_ERR RNR_RETRY_EXC_ERR LOC_RDD_VIOL_ERR REM_INV_RD_REQ_ERR REM_ABORT_ERR "
    "INV_EECN_ERR INV_EEC_STATE_ERR FATAL_ERR RESP_TIMEOUT_ERR GENERAL_ERR TM_ERR TM_RNDV_INCOMPLETE"
)
STATES = words("RESET INIT RTR RTS SQD SQE ERR UNKNOWN")
EVENT_NAMES = words(
    "CQ_ERR QP_FATAL QP_REQ_ERR QP_ACCESS_ERR COMM_EST SQ_DRAINED PATH_MIG PATH_MIG_ERR DEVICE_FATAL PORT_ACTIVE PORT_ERR "
    "LID_CHANGE PKEY_CHANGE SM_CHANGE SRQ_ERR SRQ_LIMIT_REACHED QP_LAST_WQE_REACHED CLIENT_REREGISTER GID_CHANGE WQ_FATAL"
)
DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "rdma.md"


def installed(kind: str, prefix: str) -> dict[int, str]:
    """An enum of the installed pyverbs."""
    from pyverbs import enums

    found: type[enum.IntEnum] = getattr(enums, kind)
    return {int(member): member.name.removeprefix(prefix) for member in found}


needs_pyverbs = pytest.mark.skipif(
    importlib.util.find_spec("pyverbs") is None, reason="no pyverbs here: the machine of make test-rdma has it"
)


def test_every_status_has_its_row() -> None:
    assert {number: problem.name for number, problem in PROBLEMS.items()} == dict(list(enumerate(STATUSES))[1:])
    assert dict(enumerate(STATES)) == QP_STATES
    assert {number: event.name for number, event in EVENTS.items()} == dict(enumerate(EVENT_NAMES))


@needs_pyverbs
def test_the_installed_verbs_have_no_other_numbers() -> None:
    assert installed("ibv_wc_status", "IBV_WC_") == dict(enumerate(STATUSES))
    assert installed("ibv_qp_state", "IBV_QPS_") == dict(enumerate(STATES))
    assert installed("ibv_event_type", "IBV_EVENT_") == dict(enumerate(EVENT_NAMES))


@pytest.mark.parametrize("status", range(1, len(STATUSES)), ids=STATUSES[1:])
def test_a_status_says_what_happened_and_what_to_check(status: int) -> None:
    problem = explain(status)
    assert problem is PROBLEMS[status]
    assert problem.reason in {Reason.LINK_ERROR, Reason.PEER_LOST, Reason.OVERLOAD, Reason.LENGTH_BOUNDS}
    assert problem.words == f"{problem.name}: {problem.happened}; check {problem.check}"
    assert "\n" not in problem.words
    assert len(problem.check) > 20


def test_what_operators_meet_names_where_to_look() -> None:
    lost = explain(12)
    assert lost.reason is Reason.PEER_LOST
    for word in ("cable", "switch", "GID", "RoCE version", "firewall", "4791", "MTU", "PFC"):
        assert word in lost.check
    assert explain(13).reason is Reason.OVERLOAD
    assert "budget_us" in explain(10).check


def test_a_number_beyond_the_table_is_still_told() -> None:
    assert explain(99).reason is Reason.LINK_ERROR
    assert "STATUS_99" in explain(99).words
    assert state_name(3) == "RTS"
    assert state_name(42) == "STATE_42"
    assert event_words(10) == "PORT_ERR: the port went down: check the cable and the switch port"
    assert "event 77" in event_words(77)


def test_success_is_no_problem() -> None:
    with pytest.raises(ValueError, match="SUCCESS"):
        explain(0)


def test_the_document_has_this_table() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| `(\w+)` \| `(\w+)` \| (.+?) \| (.+?) \|$", text, re.MULTILINE)
    told = {number: (problem.name, problem.reason.value, problem.happened, problem.check) for number, problem in PROBLEMS.items()}
    assert {int(row[0]): row[1:] for row in rows} == told
    events = re.findall(r"^\| `(\w+)` \| (yes|no) \| (.+?) \|$", text, re.MULTILINE)
    assert events == [(event.name, "yes" if event.ends else "no", event.words) for event in EVENTS.values()]


def test_the_document_has_every_setting_and_its_default() -> None:
    text = DOCUMENT.read_text(encoding="utf-8")
    rows = re.findall(r'^\| `(\w+)` \| (`"\w+"`|\d+) \| .+ \|$', text, re.MULTILINE)
    defaults = {item.name: item.default for item in fields(RdmaConfig)}
    told = {name: f'`"{value}"`' if isinstance(value, str) else str(value) for name, value in defaults.items()}
    assert dict(rows) == told
