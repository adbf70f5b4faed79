"""Numbers that a caller can get wrong: told by name, on both kinds of side, and nothing has changed."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from client_rig import LONG_US, PROMPT, Pair, draft, new_id

from pp1q_transport.errors import LocalMisuse, ProposalDiscarded

U64 = 1 << 64
STEPS: tuple[tuple[dict[str, Any], str], ...] = (
    ({"budget_us": 1.5}, "budget_us must be an integer, not 1.5"),
    ({"budget_us": "20"}, "budget_us must be an integer"),
    ({"budget_us": 0}, "budget_us 0 is outside"),
    ({"support": 3.0}, "support must be an integer"),
    ({"support": "3"}, "support must be an integer"),
    ({"depth": 1.0}, "depth must be an integer"),
    ({"depth": 9}, "depth 9 is outside 1..3"),
    ({"temperature": "hot"}, "temperature 'hot'"),
    ({"temperature": float("nan")}, "temperature nan"),
    ({"trace_id": -1}, "trace_id -1 is outside"),
    ({"target_context": U64}, "target_context .* is outside"),
)
REQUESTS: tuple[tuple[tuple[Any, ...], dict[str, Any], str], ...] = (
    (("10", [1]), {}, "request must be an integer, not '10'"),
    ((U64, [1]), {}, "request .* is outside"),
    ((7, [1]), {"seed": "a"}, "seed must be an integer"),
    ((7, [1]), {"max_position": 1.5}, "max_position must be an integer"),
    ((7, [1]), {"generation": -1}, "generation -1 is outside"),
    ((7, [1]), {"owner": 1}, "owner 1 is outside 0..0"),
    ((7, [1.5]), {}, "tokens must be int32"),
)


@pytest.mark.parametrize(("options", "words"), STEPS, ids=[str(options) for options, _ in STEPS])
def test_a_step_that_can_not_be_is_refused_and_the_next_one_goes(sides: Pair, options: dict[str, Any], words: str) -> None:
    request = sides.receiver.open_request(new_id(), PROMPT)
    with pytest.raises(LocalMisuse, match=words):
        sides.receiver.enqueue(request, **{"budget_us": LONG_US, **options})
    assert request.round == 0
    with sides.ready(request, support=16).wait() as proposal:
        proposal.commit(0, [3])
    sides.receiver.close_request(request)


@pytest.mark.parametrize(("values", "options", "words"), REQUESTS, ids=[str((v, o)) for v, o, _ in REQUESTS])
def test_a_request_that_can_not_be_is_not_opened(
    sides: Pair, values: tuple[Any, ...], options: dict[str, Any], words: str
) -> None:
    with pytest.raises(LocalMisuse, match=words):
        sides.receiver.open_request(*values, **options)
    assert not sides.receiver.requests.requests


@pytest.mark.parametrize("round_number", (-1, 1, 7, 1.0, "0"))
def test_a_round_that_never_was_commits_nothing(sides: Pair, round_number: Any) -> None:
    request = sides.receiver.open_request(new_id(), PROMPT)
    with pytest.raises(LocalMisuse, match=r"round (\S+ is outside 0\.\.0|must be an integer)"):
        sides.receiver.commit_target_only(request, round_number, [3])
    assert request.tokens.tolist() == list(PROMPT)
    with sides.ready(request, support=16).wait() as proposal:
        assert proposal.first_position == len(PROMPT)
        proposal.commit(0, [3])
    sides.receiver.close_request(request)


def test_integers_of_numpy_are_integers(sides: Pair) -> None:
    request = sides.receiver.open_request(np.int64(new_id()), np.array(PROMPT), seed=np.uint64(5))  # type: ignore[arg-type]
    options = {"budget_us": np.int64(LONG_US), "depth": np.int32(2), "support": np.int16(8), "temperature": np.float32(0.5)}
    with sides.ready(request, **options).wait() as proposal:
        proposal.commit(0, np.array([3]))
    sides.receiver.close_request(request)


def test_a_proposal_that_was_let_go_uncommitted_is_named_as_that(sides: Pair) -> None:
    request = sides.receiver.open_request(new_id(), PROMPT)
    sides.ready(request, support=16).wait().release()
    with pytest.raises(LocalMisuse, match=r"round 0 of request \d+ is not committed.*commit_target_only\(request, 0, tokens\)"):
        sides.receiver.enqueue(request, support=16, budget_us=LONG_US)
    sides.receiver.commit_target_only(request, 0, [3])
    ticket = sides.receiver.enqueue(request, support=16, budget_us=LONG_US)
    with pytest.raises(LocalMisuse, match="has a proposal in flight"):
        sides.receiver.enqueue(request, support=16, budget_us=LONG_US)
    draft(sides.next_step())
    sides.until(lambda: ticket.known)
    ticket.wait().release()
    sides.receiver.close_request(request)


def test_a_step_that_the_draft_gives_up_counts_once_at_the_leader(embedded: Pair) -> None:
    request = embedded.receiver.open_request(new_id(), PROMPT)
    ticket = embedded.receiver.enqueue(request, support=16, budget_us=LONG_US)
    embedded.next_step().fail()
    embedded.until(lambda: ticket.known)
    with pytest.raises(ProposalDiscarded) as discarded:
        ticket.wait()
    embedded.until(lambda: embedded.leader.counters.get("reset"))  # type: ignore[union-attr]
    assert embedded.leader.counters.of(discarded.value.reason) == 1  # type: ignore[union-attr]
