"""One owner a domain, and no key drawn twice."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from pp1q_transport.dyadic import MASS, to_q
from pp1q_transport.errors import LocalMisuse, Reason
from pp1q_transport.rng import Domain, draw24, draw64
from pp1q_transport.verify import KeyGuard, KeyReuse, NoiseOwners, QRow, target_only, verify_chain, verify_chain_fast

RANK0 = (Domain.ACCEPT, Domain.CORRECTION)


def test_a_guard_draws_what_rng_draws() -> None:
    guard = KeyGuard(7, Domain)
    assert guard.draw64(7, Domain.ACCEPT, 1, 2, 3) == draw64(7, Domain.ACCEPT, 1, 2, 3)
    assert guard.draw24(7, Domain.PROPOSAL, 1, 2, 3) == draw24(7, Domain.PROPOSAL, 1, 2, 3)
    assert guard.domains == set(Domain)


@pytest.mark.parametrize("key", ((1, 2, 3), (1, 2, 2), (1, 1, 9), (0, 9, 9)))
def test_a_key_at_or_before_the_last_is_refused(key: tuple[int, int, int]) -> None:
    guard = KeyGuard(7, RANK0)
    guard.draw64(7, Domain.ACCEPT, 1, 2, 3)
    with pytest.raises(KeyReuse) as caught:
        guard.draw64(7, Domain.ACCEPT, *key)
    assert caught.value.reason is Reason.KEY_REUSE
    guard.draw64(7, Domain.CORRECTION, *key)  # another domain's keys are its own


@pytest.mark.parametrize("key", ((1, 2, 4), (1, 3, 0), (2, 0, 0)))
def test_rising_keys_go_on(key: tuple[int, int, int]) -> None:
    guard = KeyGuard(7, RANK0, after=(1, 2, 3))
    assert guard.draw64(7, Domain.ACCEPT, *key) == draw64(7, Domain.ACCEPT, *key)


def test_a_draw_that_is_refused_spends_no_key() -> None:
    guard = KeyGuard(7, RANK0)
    with pytest.raises(LocalMisuse):
        guard.draw64(7, Domain.ACCEPT, 1, 2, 1 << 32)
    guard.draw64(7, Domain.ACCEPT, 1, 2, 3)


@pytest.mark.parametrize(
    ("call", "text"),
    (
        (lambda g: g.draw64(7, Domain.PROPOSAL, 1, 1, 1), "another owner"),
        (lambda g: g.draw24(7, Domain.PROPOSAL, 1, 1, 1), "another owner"),
        (lambda g: g.draw64(8, Domain.ACCEPT, 1, 1, 1), "seeds differ"),
        (lambda g: g.draw64(7, 9, 1, 1, 1), "domain"),
    ),
)
def test_what_a_guard_does_not_own_is_refused(call: Callable[[KeyGuard], object], text: str) -> None:
    with pytest.raises(LocalMisuse, match=text):
        call(KeyGuard(7, RANK0))


def test_a_domain_has_one_owner() -> None:
    owners = NoiseOwners()
    owners.claim(1, 7, RANK0)
    with pytest.raises(LocalMisuse, match="ACCEPT"):
        owners.claim(1, 7, [Domain.PROPOSAL, Domain.ACCEPT])
    owners.claim(1, 7, [Domain.PROPOSAL])  # nothing of the refused claim was taken
    owners.claim(2, 7, RANK0)
    with pytest.raises(LocalMisuse, match="no domain"):
        owners.claim(3, 7, [])
    owners.end(1)
    owners.claim(1, 8, Domain)


@pytest.mark.parametrize("fast", (False, True))
def test_a_verifier_under_guard_cannot_verify_a_round_twice(fast: bool) -> None:
    q = QRow(to_q(np.array([MASS // 2, MASS // 2], np.uint32)))
    guard = KeyGuard(5, RANK0)

    def once(round_number: int, generation: int = 1) -> object:
        if fast:
            rows = np.array([1, 3], np.float32)
            return verify_chain_fast([1], [q], lambda i: rows, 5, generation, round_number, 4, draw=guard.draw64)
        weights = np.array([1, 3], np.uint64)
        return verify_chain([1], [q], lambda i: (weights, 4), 5, generation, round_number, 4, draw=guard.draw64)

    once(1)
    with pytest.raises(KeyReuse):
        once(1)
    once(2)
    once(1, generation=2)  # after a discard
    with pytest.raises(KeyReuse):
        target_only(np.array([1, 1], np.uint64), 5, 1, 9, 9, draw=guard.draw64)
