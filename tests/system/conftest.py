"""Tests of the whole stack: real sockets, real processes. Every one of them has a watchdog."""

from __future__ import annotations

import logging
import resource
from collections.abc import Iterator, MutableMapping
from typing import Any

import pytest
import structlog
from system_live import Live, running
from system_rig import MakeRig, Rig


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """Nothing of the transport's own log is printed: what a test wants to see it captures (`system_rig.captured`)."""

    def drop(_logger: object, _method: str, _event: MutableMapping[str, Any]) -> MutableMapping[str, Any]:
        raise structlog.DropEvent

    structlog.configure(processors=[drop], wrapper_class=structlog.make_filtering_bound_logger(logging.INFO))
    yield
    structlog.reset_defaults()


@pytest.fixture
def rig() -> Iterator[Rig]:
    """A connected pair of small ends; the receiver listens."""
    with Rig() as pair:
        yield pair.connect()


@pytest.fixture
def make_rig() -> Iterator[MakeRig]:
    """Makes pairs that are closed when the test is over."""
    made: list[Rig] = []

    def make(**options: Any) -> Rig:
        made.append(Rig(**options))
        return made[-1]

    yield make
    for pair in made:
        pair.close()


@pytest.fixture
def live() -> Iterator[Live]:
    """A busy session that must not have noticed anything by the end of the test."""
    with running() as busy:
        yield busy


@pytest.fixture
def descriptors() -> Iterator[int]:
    """Room for thousands of sockets, ours and the attacker's."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 4096 if hard == resource.RLIM_INFINITY else min(4096, hard)
    if wanted < 2600:
        pytest.skip(f"RLIMIT_NOFILE allows {hard} descriptors; a thousand connections to each port need 2600")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
