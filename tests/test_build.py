"""Whether this run tests what it says it tests: the compiled hot modules, or (PP1Q_EXPECT_PURE) the same files as Python."""

import os

import pytest

from pp1q_transport import wire
from pp1q_transport._native import kernels, net, ring
from pp1q_transport.links import shm, stream, tcp
from pp1q_transport.local import channel
from pp1q_transport.session import assembler, leader, machine, outbox, receiver, requests, slots, terms, watchdog

HOT = (wire, shm, stream, tcp, channel, assembler, leader, machine, outbox, receiver, requests, slots, terms, watchdog)


@pytest.mark.parametrize("module", HOT, ids=lambda module: module.__name__)
def test_hot_modules_are_what_this_lane_tests(module: object) -> None:
    pure = os.environ.get("PP1Q_EXPECT_PURE") == "1"
    assert module.__file__.endswith(".py" if pure else ".so")


@pytest.mark.parametrize("module", (kernels, net, ring), ids=lambda module: module.__name__)
def test_kernels_are_native_in_both_lanes(module: object) -> None:
    assert module.__file__.endswith(".so")
