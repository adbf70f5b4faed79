"""Runs a test once per instruction-set level of this CPU: levels may differ in speed, never in a bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from pp1q_transport._native import kernels


@pytest.fixture(params=kernels.levels())
def level(request: pytest.FixtureRequest) -> Iterator[str]:
    before = kernels.level()
    kernels.select_level(request.param)
    yield request.param
    kernels.select_level(before)


@pytest.fixture
def each_level() -> Iterator[list[str]]:
    """All levels at once, for property tests: the test itself calls `kernels.select_level`."""
    before = kernels.level()
    yield list(kernels.levels())
    kernels.select_level(before)
