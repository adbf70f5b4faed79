"""Pairs of either kind for the tests of this folder; the daemons are started once, when the first test wants them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest
import structlog
from client_rig import KINDS, Pair, daemons, pair

from pp1q_transport.toy.sidecar import Deployment


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of the transport's own log is printed."""
    with structlog.testing.capture_logs():
        yield
    structlog.reset_defaults()


@pytest.fixture(scope="session")
def deployment() -> Iterator[Callable[[], Deployment]]:
    """The daemons, started by the first call."""
    with ExitStack() as stack:
        running: list[Deployment] = []

        def start() -> Deployment:
            if not running:
                running.append(stack.enter_context(daemons()))
            return running[0]

        yield start


@pytest.fixture(params=KINDS)
def sides(request: pytest.FixtureRequest, deployment: Callable[[], Deployment]) -> Iterator[Pair]:
    """A connected pair of each kind."""
    with pair(request.param, deployment) as made:
        yield made


@pytest.fixture
def embedded(deployment: Callable[[], Deployment]) -> Iterator[Pair]:
    """A connected embedded pair."""
    with pair("embedded", deployment) as made:
        yield made


@pytest.fixture
def attached(deployment: Callable[[], Deployment]) -> Iterator[Pair]:
    """A connected pair beside daemons."""
    with pair("attached", deployment) as made:
        yield made
