"""What a daemon logs of discards at level info: one line a second at most, and nothing a proposal."""

from __future__ import annotations

import json
import signal

import pytest
from daemon_rig import SMALL, Bed, drafting

from pp1q_transport.client import AttachedReceiver
from pp1q_transport.daemon.discards import EVERY_NS, DiscardLines
from pp1q_transport.errors import ProposalDiscarded
from pp1q_transport.session.requests import Request


class Log:
    """Keeps what is logged at info."""

    def __init__(self) -> None:
        self.lines: list[dict[str, object]] = []

    def info(self, event: str, **counts: object) -> None:
        """As structlog's."""
        self.lines.append({"event": event, **counts})


def test_one_line_a_second_says_what_came_since_the_last() -> None:
    log, reasons = Log(), {"timeout": 0}
    lines = DiscardLines(log, lambda: reasons)
    lines.look(5)
    assert log.lines == []  # nothing came
    for tick in range(100):
        reasons["timeout"] += 1
        lines.look(5 + tick * EVERY_NS // 100)
    assert log.lines == []
    reasons["peer_lost"] = 2
    lines.look(5 + EVERY_NS)
    lines.look(5 + 2 * EVERY_NS)
    assert log.lines == [{"event": "refusals", "timeout": 100, "peer_lost": 2}]
    reasons["timeout"] += 7
    lines.say()  # at the end nothing is left unsaid
    assert log.lines[1:] == [{"event": "refusals", "timeout": 7}]


def discarded(receiver: AttachedReceiver, request: Request, rounds: int) -> None:
    """So many rounds whose proposals come too late."""
    for _ in range(rounds):
        with pytest.raises(ProposalDiscarded), receiver.step(request, support=16, budget_us=2000):
            pass
        receiver.commit_target_only(request, request.round, [3])


@pytest.mark.timeout(60)
def test_daemons_at_level_info_log_no_line_a_proposal() -> None:
    with Bed(SMALL, {"receiver0": "[breaker]\nenabled = false\n"}) as bed:
        bed.up()
        with drafting(bed) as draft, bed.receiver() as receiver:
            draft.act = lambda _models, _step: None  # answers nothing
            receiver.wait_for_peer()
            request = receiver.open_request(1, (1, 2), seed=1)
            discarded(receiver, request, 12)
            for name in ("receiver0", "leader"):
                bed.says(name, '"refusals"')
                events = [json.loads(line)["event"] for line in bed.parts[name].log.read_text(encoding="utf-8").splitlines()]
                assert not {"discarded", "reset", "step_failed", "refused", "step_refused"} & set(events)
                # The level changes in a daemon that runs, with its session up.
                bed.edit(name, lambda text: text.replace("[daemon]", '[daemon]\nlog_level = "debug"'))
                bed.signal(name, signal.SIGHUP)
                bed.says(name, '"reloaded"')
            discarded(receiver, request, 2)
            bed.says("receiver0", '"discarded"', 4)  # one by its slot, one by its request
            bed.says("leader", '"reset"', 2)


@pytest.mark.timeout(60)
def test_what_is_lost_is_named_and_a_daemons_end_is_its_last_line() -> None:
    with Bed(SMALL) as bed:
        bed.up("receiver0")
        with bed.receiver() as receiver:
            request = receiver.open_request(1, (1, 2), seed=1)
            with pytest.raises(ProposalDiscarded, match=r"peer_lost.*no session through the daemon at .*sock") as raised:
                receiver.enqueue(request)
            assert raised.value.detail == receiver.missing
            bed.start("leader")
            receiver.wait_for_peer()
            bed.signal("receiver0", signal.SIGTERM)
            assert bed.wait("receiver0", 30.0) == 0
            bed.until(lambda: (receiver.poll(), not receiver.attached)[-1], "the daemon's end")
            with pytest.raises(ProposalDiscarded, match=r"peer_lost.*no daemon at .*receiver0\.sock"):
                receiver.enqueue(request)
        events = [json.loads(line)["event"] for line in bed.parts["receiver0"].log.read_text(encoding="utf-8").splitlines()]
        assert "session_down" in events
        assert events[-1] == "daemon_down"
