"""Compiled modules under wrong arguments: an exception, never a read or write where nothing is. Each in a process of its own."""

from __future__ import annotations

import subprocess
import sys

import pytest

PREPARE = """
from pp1q_transport import wire
from pp1q_transport.counters import Counters
from pp1q_transport.links.shm import ShmLink
from pp1q_transport.links.tcp import TcpLink
from pp1q_transport.session.assembler import Assembler
from pp1q_transport.session.leader import LeaderSession
from pp1q_transport.session.outbox import Outbox
from pp1q_transport.session.receiver import ReceiverSession
from pp1q_transport.session.requests import RequestTable
from pp1q_transport.session.slots import SlotTable
from pp1q_transport.session.terms import SessionTerms
from pp1q_transport.session.watchdog import Watchdog
terms = SessionTerms(1, 2, 3, 64, 2, 4, 2)
table = SlotTable(terms.geometry())
memory = memoryview(bytearray(terms.geometry().total_bytes))
receiver = ReceiverSession(terms, table, memory, RequestTable(), Counters())
leader = LeaderSession(terms, RequestTable(), Counters())
"""
CALLS = (
    "wire.Header().decode(None, 0)", "wire.Header().decode(bytes(128), 1)", "wire.Header().decode(bytes(256), -1)",
    "wire.Header().encode(bytearray(127), 0)", "wire.Header().encode(bytearray(128), 10**12)",
    "wire.put_digest_entry(bytearray(16), 1, 0, 0, 0)", "Outbox().sent(1)", "Outbox().frame(None, None, 0, 0, -1)",
    "Watchdog(2).arm(10**9, 5)", "Watchdog(2).arm(-1, 5)", "receiver.discard(None, 1)", "receiver.accept(None, None, 0)",
    "receiver.finish(None, 0)", "receiver.release(None, 0, 0, 0)", "table.release(None, 0, 0, 0)",
    "leader.put_row(None, 1, 1, 1, 1, b'', 0, 0)", "TcpLink.__new__(TcpLink).pump(0)",
    "ShmLink.__new__(ShmLink).pump(0)", "ShmLink.__new__(ShmLink).wait(0, -1)", "ShmLink.__new__(ShmLink).say_last(b'')",
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS)
def test_a_wrong_argument_raises(call: str) -> None:
    code = f"{PREPARE}\ntry:\n    {call}\nexcept Exception as error:\n    print('raised', type(error).__name__)\n"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.startswith("raised"), (done.returncode, done.stdout, done.stderr[-300:])
