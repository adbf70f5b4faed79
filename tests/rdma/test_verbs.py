"""The machine itself: its devices move bytes, the cable is really used, and a key that is gone is refused."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
from pyverbs import enums
from verbs_peer import ONE, A, B, Memory, joined

pytestmark = pytest.mark.timeout(60)

CABLE_B = Path("/sys/class/net/cable_b/statistics/rx_packets")


@pytest.mark.parametrize(("near", "far"), ((ONE, ONE), (A, B), (B, A)))
@pytest.mark.parametrize("length", (1, 4096, 1_000_000))
def test_a_write_lands_whole_and_tells(near: str, far: str, length: int) -> None:
    writer, reader = joined(near, far)
    source, target = Memory(writer.pd, length), Memory(reader.pd, length)
    source.map[:length] = random.Random(length).randbytes(length)
    reader.expect()
    writer.post_write(source, length, target.address, target.rkey, imm=77)
    assert writer.completion()[0] == enums.IBV_WC_SUCCESS
    assert reader.completion() == (enums.IBV_WC_SUCCESS, 77)
    assert target.map[:length] == source.map[:length]


def test_the_two_ends_are_joined_by_the_cable() -> None:
    before = int(CABLE_B.read_text(encoding="ascii"))
    test_a_write_lands_whole_and_tells(A, B, 100_000)
    assert int(CABLE_B.read_text(encoding="ascii")) - before >= 100_000 // 1024


def test_a_key_that_is_gone_is_refused() -> None:
    """What the link's fence rests on, and the control without it."""
    writer, reader = joined()
    source, target = Memory(writer.pd, 4096), Memory(reader.pd, 4096)
    reader.expect(2)
    source.map[:] = b"\x11" * 4096
    rkey = target.rkey
    writer.post_write(source, 4096, target.address, rkey)
    assert writer.completion()[0] == enums.IBV_WC_SUCCESS
    assert target.map[:] == source.map[:]
    target.mr.close()
    target.map[:] = b"\x55" * 4096
    writer.post_write(source, 4096, target.address, rkey)
    assert writer.completion()[0] in (enums.IBV_WC_REM_ACCESS_ERR, enums.IBV_WC_RETRY_EXC_ERR)
    assert target.map[:] == b"\x55" * 4096
    assert writer.state() == "ERR"
