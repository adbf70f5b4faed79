"""What a daemon logs of discards at level info: one line a second at most, and nothing a proposal."""

from __future__ import annotations

import json

import pytest
from daemon_rig import SMALL, Bed, drafting

from pp1q_transport.daemon.discards import EVERY_NS, DiscardLines
from pp1q_transport.errors import ProposalDiscarded


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
    assert log.lines == [{"event": "discards", "timeout": 100, "peer_lost": 2}]
    reasons["timeout"] += 7
    lines.say()  # at the end nothing is left unsaid
    assert log.lines[1:] == [{"event": "discards", "timeout": 7}]


@pytest.mark.timeout(60)
def test_daemons_at_level_info_log_no_line_a_proposal() -> None:
    with Bed(SMALL, {"receiver0": "[breaker]\nenabled = false\n"}) as bed:
        bed.up()
        with drafting(bed) as draft, bed.receiver() as receiver:
            draft.act = lambda _models, _step: None  # answers nothing
            receiver.wait_for_peer()
            request = receiver.open_request(1, (1, 2), seed=1)
            for _ in range(12):
                with pytest.raises(ProposalDiscarded), receiver.step(request, support=16, budget_us=2000):
                    pass
                receiver.commit_target_only(request, request.round, [3])
            for name in ("receiver0", "leader"):
                bed.says(name, '"discards"')
        for name in ("receiver0", "leader"):
            events = [json.loads(line)["event"] for line in bed.parts[name].log.read_text(encoding="utf-8").splitlines()]
            assert not {"discarded", "reset", "step_failed", "refused", "step_refused"} & set(events)
