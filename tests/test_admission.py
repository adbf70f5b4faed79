"""Who may decide how deep: laws worked out exactly, for policies that see only what they may, and for some that see more."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pp1q_transport.admission import DepthGate, FixedDepth, History, PriorRound, View
from pp1q_transport.errors import LocalMisuse
from pp1q_transport.verify import rational
from pp1q_transport.verify.rational import Law, Row, RowAt, Tokens

HALF = Fraction(1, 2)


def row_after(prefix: Tokens, salt: str, size: int = 2) -> Row:
    """Some p or q after a prefix, the same at every call."""
    digest = hashlib.sha256(f"{salt}, {prefix}".encode()).digest()
    weights = [1 + byte % 7 for byte in digest[:size]]
    return rational.row_of(weights, sum(weights))


def p_at(prefix: Tokens) -> Row:
    return row_after(prefix, "target")


def q_at(prefix: Tokens) -> Row:
    return row_after(prefix, "draft")


def uniform(prefix: Tokens) -> Row:
    return [HALF, HALF]


def admitted_law(depth_of: Callable[[Tokens], int], limit: int, q: RowAt = q_at, p: RowAt = p_at) -> Law:
    """The law of what is committed when of each would-be proposal of `limit` drafts only the first depth_of(...) are verified."""

    def one(proposal: Tokens, _q: RowAt, _p: RowAt) -> Law:
        return rational.chain_law(proposal[: depth_of(proposal)], q, p)

    return rational.output_law(q, p, 2, limit, one)


def bias(law: Law, length: int, p: RowAt = p_at) -> Fraction:
    """How far the first `length` tokens are from p, in total variation."""
    return rational.distance(rational.continued(law, p, 2, length), rational.target_law(p, 2, length))


def through_gate(policy: object, proposal: Tokens, history: History | None = None) -> int:
    """The depth at which a policy stops when the drafts would be these."""
    given = history or History((1, 2, 3), (), {})
    gate = DepthGate(policy, len(proposal), given.committed, given.prior_rounds, given.load)  # type: ignore[arg-type]
    for token in proposal:
        if not gate.admit():
            return len(gate.proposal())
        gate.drew(token)
    assert not gate.admit()
    return len(gate.proposal())


# -- allowed -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", (0, 1, 2, 3))
def test_a_fixed_depth_is_exact(depth: int) -> None:
    law = admitted_law(lambda proposal: through_gate(FixedDepth(depth), proposal), 3)
    for length in (1, 2, 3, 4):
        assert bias(law, length) == 0


@dataclasses.dataclass
class Arbitrary:
    """Any function of all that a policy may see."""

    salt: int

    def admits(self, view: View) -> bool:
        seen = (self.salt, view.drafted, view.history.committed, view.history.prior_rounds, sorted(view.history.load.items()))
        return hashlib.sha256(repr(seen).encode()).digest()[0] % 3 > 0


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32), st.floats(0, 9), st.lists(st.integers(0, 5), max_size=3))
def test_any_policy_of_what_it_may_see_is_exact(salt: int, load: float, accepted: list[int]) -> None:
    history = History((4, 5), tuple(PriorRound(5, drafts) for drafts in accepted), {"queue": load})
    law = admitted_law(lambda proposal: through_gate(Arbitrary(salt), proposal, history), 3)
    for length in (1, 2, 3, 4):
        assert bias(law, length) == 0


def test_confidence_in_tokens_already_drawn_is_allowed() -> None:
    """Stopping after a draft because of what it was: its own admission was decided before."""

    class AfterToken:
        def admits(self, view: View) -> bool:
            return view.position == 1 or view.drafted[-1] == 0

    law = admitted_law(lambda proposal: through_gate(AfterToken(), proposal), 3)
    assert {through_gate(AfterToken(), proposal) for proposal in ((0, 0, 0), (1, 0, 0), (0, 1, 0))} == {1, 2, 3}
    for length in (1, 2, 3, 4):
        assert bias(law, length) == 0


# -- forbidden ---------------------------------------------------------------------------------------------------------

TARGET_ONLY, FIRST_PREFIX = 1.0, 0.9
TWO_TOKENS = {0: 1.134, 1: 0.7}
"""The published counterexample (DSpark, appendix A): a first prefix whose throughput of 0.9 loses to target-only's 1.0, and a
later confidence, which depends on the first token drawn, that raises the score of two tokens to 1.134 for one of its values."""


def best_depth(proposal: Tokens) -> int:
    """Global best-depth search: the scores of all prefixes at once, with all tokens known."""
    scores = (TARGET_ONLY, FIRST_PREFIX, TWO_TOKENS[proposal[0]])
    return scores.index(max(scores))


def sequential(proposal: Tokens) -> int:
    """The same scores by a sequential rule: at each position only what is known before it is drawn."""

    class Rule:
        def admits(self, view: View) -> bool:
            if view.position == 1:  # the two-token score is not known yet; its mean is
                return max(FIRST_PREFIX, sum(TWO_TOKENS.values()) / 2) > TARGET_ONLY
            return TWO_TOKENS[view.drafted[0]] > FIRST_PREFIX

    return through_gate(Rule(), proposal)


def test_the_published_counterexample() -> None:
    assert [best_depth((first, 0)) for first in (0, 1)] == [2, 0]
    law = admitted_law(best_depth, 2, uniform, uniform)
    assert rational.continued(law, uniform, 2, 1) == {(0,): Fraction(3, 4), (1,): Fraction(1, 4)}
    assert bias(law, 1, uniform) == Fraction(1, 4)
    assert bias(admitted_law(best_depth, 2), 1) > 0  # and with a p and q that differ
    assert {sequential((first, 0)) for first in (0, 1)} == {0}
    for length in (1, 2, 3):
        assert bias(admitted_law(sequential, 2), length) == 0


def test_the_toy_bias() -> None:
    """q = p uniform; the first draft is verified only if it is token 0, else the target goes on alone: 3/4 instead of 1/2."""
    law = admitted_law(lambda proposal: int(proposal[0] == 0), 1, uniform, uniform)
    assert rational.continued(law, uniform, 2, 1) == {(0,): Fraction(3, 4), (1,): Fraction(1, 4)}
    fixed = admitted_law(lambda proposal: 1, 1, uniform, uniform)
    assert rational.continued(fixed, uniform, 2, 1) == {(0,): HALF, (1,): HALF}


@pytest.mark.parametrize(
    ("name", "depth_of"),
    (
        ("margin masking", lambda x: 1 if q_at(x[:1])[x[1]] < HALF else 2),
        ("a retrospective cut", lambda x: x.index(1) if 1 in x else len(x)),
        ("longest run", lambda x: 2 if x[0] == x[1] else 0),
    ),
)
def test_other_forbidden_policies_are_biased(name: str, depth_of: Callable[[Tokens], int]) -> None:
    assert max(bias(admitted_law(depth_of, 2), length) for length in (1, 2, 3)) > 0, name


# -- the interface gives nothing else ----------------------------------------------------------------------------------


class Watching:
    """Admits a few positions and keeps every view it was shown."""

    def __init__(self, stop_at: int) -> None:
        self.stop_at = stop_at
        self.views: list[View] = []

    def admits(self, view: View) -> bool:
        self.views.append(view)
        return view.position < self.stop_at


def test_a_view_holds_the_allowed_and_nothing_else() -> None:
    policy = Watching(3)
    load = {"queue": 2.0}
    prior = [PriorRound(4, 2)]
    committed = [7, 8]
    gate = DepthGate(policy, 9, committed, prior, load)
    load["queue"], load["later"] = 99.0, 1.0  # measured after the round opened
    prior.append(PriorRound(4, 0, discarded=True))
    committed.append(9)
    assert gate.admit()
    gate.drew(5)
    assert gate.admit()
    gate.drew(6)
    assert not gate.admit()
    assert [view.drafted for view in policy.views] == [(), (5,), (5, 6)]
    assert [view.position for view in policy.views] == [1, 2, 3]
    assert {field.name for field in dataclasses.fields(View)} == {"history", "drafted"}
    assert {field.name for field in dataclasses.fields(History)} == {"committed", "prior_rounds", "load"}
    for view in policy.views:
        assert dict(view.history.load) == {"queue": 2.0}
        assert view.history.prior_rounds == (PriorRound(4, 2),)
        assert view.history.committed == (7, 8)
        with pytest.raises(TypeError):
            view.history.load["queue"] = 1.0  # type: ignore[index]
        with pytest.raises(dataclasses.FrozenInstanceError):
            view.drafted = ()  # type: ignore[misc]
        with pytest.raises(AttributeError):
            view.confidences  # type: ignore[attr-defined]  # noqa: B018
    assert gate.proposal() == (5, 6)


def opened(stop_at: int, limit: int = 9) -> DepthGate:
    return DepthGate(Watching(stop_at), limit, [1])


@pytest.mark.parametrize(
    ("acts", "text"),
    (
        (("drew",), "no policy had admitted"),
        (("admit", "admit"), "cannot be taken back"),
        (("admit", "proposal"), "has not stopped"),
        (("admit", "drew", "drew"), "no policy had admitted"),
        (("admit", "drew", "admit", "admit"), "never reopened"),
        (("admit", "drew", "admit", "drew"), "no policy had admitted"),
        (("proposal",), "has not stopped"),
    ),
)
def test_the_gate_keeps_the_order(acts: tuple[str, ...], text: str) -> None:
    gate = opened(2)
    calls = {"admit": gate.admit, "drew": lambda: gate.drew(1), "proposal": gate.proposal}
    for act in acts[:-1]:
        calls[act]()
    with pytest.raises(LocalMisuse, match=text):
        calls[acts[-1]]()


def test_the_limit_ends_a_round_without_asking() -> None:
    gate = opened(99, limit=1)
    assert gate.admit()
    gate.drew(3)
    assert not gate.admit()
    assert gate.proposal() == (3,)
    assert not opened(99, limit=0).admit()


@pytest.mark.parametrize(
    "call", (lambda: FixedDepth(-1), lambda: FixedDepth(1 << 17), lambda: opened(1, -1), lambda: opened(1, 1 << 17))
)
def test_impossible_depths_are_refused(call: Callable[[], object]) -> None:
    with pytest.raises(LocalMisuse):
        call()


# -- discards that depend on what was drawn ----------------------------------------------------------------------------


def discarding_law(chance_of: Callable[[Tokens], Fraction], depth: int) -> tuple[Law, Fraction]:
    """The law when a proposal is void with a chance that depends on its tokens (a larger row on a slow link), and the discard
    rate."""
    rate = Fraction(0)
    for proposal, chance in rational.target_law(q_at, 2, depth).items():
        rate += chance * chance_of(proposal)

    def one(proposal: Tokens, q: RowAt, p: RowAt) -> Law:
        late = chance_of(proposal)
        law = {out: (1 - late) * chance for out, chance in rational.chain_law(proposal, q, p).items()}
        for out, chance in rational.chain_law((), q, p).items():
            law[out] = law.get(out, Fraction(0)) + late * chance
        return law

    return rational.output_law(q_at, p_at, 2, depth, one), rate


@settings(max_examples=80, deadline=None)
@given(st.lists(st.integers(0, 16), min_size=8, max_size=8), st.integers(1, 3))
def test_the_bias_of_token_dependent_delay_is_within_the_discard_rate(sixteenths: list[int], depth: int) -> None:
    def late(proposal: Tokens) -> Fraction:
        return Fraction(sixteenths[int("".join(map(str, proposal)), 2)], 16)

    law, rate = discarding_law(late, depth)
    for length in range(1, depth + 2):
        assert bias(law, length) <= rate
    if len(set(sixteenths[: 2**depth])) == 1:  # the same for all tokens: no bias at all
        assert all(bias(law, length) == 0 for length in range(1, depth + 2))


def test_there_is_a_bias_to_bound() -> None:
    law, rate = discarding_law(lambda proposal: Fraction(proposal[0], 4), 1)
    assert 0 < bias(law, 1) <= rate < Fraction(1, 4)
