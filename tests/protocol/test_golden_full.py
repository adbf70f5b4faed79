"""The full-vocabulary golden row, bit by bit and byte by byte: what `test_golden` samples for time is exhausted here.

517,120 payload bytes: every one of their 4,136,960 single-bit flips is refused as `payload_digest` by the cursor with which the
receiver lands dense rows, and at no cut of the frame is anything taken.
"""

from __future__ import annotations

import pytest

from pp1q_transport import wire
from pp1q_transport._native.kernels import DenseCursor, copy_bytes
from pp1q_transport.errors import Reason
from pp1q_transport.session import slots as st

from .golden import START_NS, Golden, ReceiverBench, vectors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

PARTS = 8


@pytest.fixture
def full() -> Golden:
    return vectors()["reply_full"]


def prepared(full: Golden) -> ReceiverBench:
    bench = ReceiverBench(full.note["session"])
    bench.prepare(full.note["before"])
    return bench


@pytest.mark.parametrize("part", range(PARTS))
def test_every_flipped_payload_bit_is_a_payload_digest(full: Golden, part: int) -> None:
    header = wire.Header()
    assert header.decode(full.data, 0) == 0
    seed = header.payload_seed(prepared(full).terms.leader_nonce)
    memory = bytearray(full.data[wire.HEADER_BYTES :])
    length, entries, digest, token = len(memory), header.entry_count, header.payload_digest, header.token
    u24 = full.note["payload"]["u24"]
    cursor = DenseCursor()

    def judge() -> int:
        cursor.begin(memory, 0, entries, length, seed)
        cursor.advance(length)
        return cursor.finish(digest, 1 << 24, token, u24)

    assert judge() == 0
    refused = Reason.PAYLOAD_DIGEST.code
    for at in range(length * part // PARTS, length * (part + 1) // PARTS):
        for bit in range(8):
            memory[at] ^= 1 << bit
            assert judge() == refused, (at, bit)
            memory[at] ^= 1 << bit
    assert judge() == 0


def test_at_no_cut_anything_is_taken(full: Golden) -> None:
    bench = prepared(full)
    assembler, session = bench.assembler, bench.session
    slot = bench.table.slots[full.fields["slot"]]
    rows = session.rows
    for at in range(len(full.data)):
        assert session.rows == rows, f"a row was taken after {at} of {len(full.data)} bytes"
        assert slot.state in (st.GRANTED, st.LANDING)
        assembler.want()
        copy_bytes(assembler.memory, assembler.offset, full.data, at, 1)
        assert assembler.received(1, START_NS) == 0
    assert session.rows == rows + 1
    assert slot.state == st.LANDING, "a row alone makes no proposal"


@pytest.mark.parametrize("part", range(17))
def test_a_cut_full_row_is_lost_with_its_peer(full: Golden, part: int) -> None:
    bench = prepared(full)
    bench.feed(full.data[: len(full.data) * part // 17])
    assert bench.cut() == ""
