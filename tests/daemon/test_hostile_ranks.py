"""Hostile processes beside the daemons of a rank group: neither rank's daemon dies of it, and honest ranks get on afterwards."""

from __future__ import annotations

import dataclasses
import random
import time

import pytest
from daemon_rig import SMALL, WATCHDOG_S, Bed
from hostile import Raw, header_noise, odd_record, scribble
from journal_check import agree, check_tokens, histories, rounds_of, rounds_of_all

from pp1q_transport.local import messages as m
from pp1q_transport.local.handshake import Role

pytestmark = pytest.mark.timeout(180)

MAX = (1 << 32) - 1


def odd_records(raw: Raw, seeded: random.Random) -> None:
    """Records of true shape with values that can't be, for what a rank's daemon knows: requests, slots, epochs, digests."""
    raw.send(m.OPEN, 1 << 50, 9, MAX, 0, 0, 2, payload=b"\x01\0\0\0\x02\0\0\0")
    for number in range(60):
        known: dict[str, tuple[int, ...]] = {
            "request": (1 << 50, 1 << 50, 2), "depth": (1, 3), "support": (0, 16), "budget_us": (1, 10_000),
            "ticket": (number + 1,), "generation": (0, 1, MAX), "round": (0, 1, 2, MAX), "slot": tuple(range(9)),
            "slot_generation": (0, 1, 2, 3), "epoch": (0, 1, 2, 3, MAX),
            "source": (1, 2), "count": (0, 1, 2), "digest_low": (0, 1), "accepted": (0, 1),
        }  # fmt: skip
        raw.body(*odd_record(seeded, known))
        if raw.cut:
            return


@pytest.mark.slow
def test_hostile_processes_of_a_group_hurt_no_rank() -> None:
    seeded = random.Random(51)
    shape = dataclasses.replace(SMALL, ranks=2, rounds=40)
    with Bed(shape) as bed:
        bed.up("leader", "receiver0", "receiver1")
        pids = {name: bed.pid(name) for name in bed.daemons}
        for _ in range(60):
            rank = seeded.randrange(2)
            name = f"receiver{rank}"
            raw = Raw(bed.socket(name), Role.RECEIVER_TARGET, rank)
            try:
                seeded.choice((odd_records, odd_records, scribble, header_noise))(raw, seeded)
                bed.status(name)
                time.sleep(seeded.choice((0.0, 0.02)))
            finally:
                raw.close()
            bed.until(lambda name=name: not bed.status(name)["clients"], f"{name} is rid of it")
            for each, pid in pids.items():
                assert bed.pid(each) == pid
        for name in ("receiver0", "receiver1"):
            assert bed.counters(name)["clients_cut_off"] >= 5
        for name in ("draft", "target0", "target1"):
            bed.start(name)
        for rank in range(2):
            assert bed.wait(f"target{rank}", 2 * WATCHDOG_S) == 0, bed.tail(f"target{rank}")
        for name in ("receiver0", "receiver1"):
            slots = bed.status(name)["slots"]
            assert sum(slots.values()) == slots["FREE"], slots
        journals = [rounds_of(bed.home / f"target{rank}.journal") for rank in range(2)]
    agree([histories(journal) for journal in journals])
    assert check_tokens(shape, rounds_of_all(journals)) >= 40
