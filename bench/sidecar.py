"""What the sidecar costs over the embedded engine: step latency of both in one run, and a cross-process wake-up as the unit.

Every process is pinned so that each hop crosses cores, as the wake-up that is the unit does: target and leader daemon on one,
receiver daemon and draft on the other (embedded: target on one, draft on the other); `--placement` has other ways. Sparse k = 32,
depth 5, rows ready-made (counts and IDs), everybody blocking. Blocks of both kinds take turns, so that the machine's mood hits
both. Also counts what crosses the channels: control records, never a payload byte. Needs no network; run it on a quiet machine:
`python bench/sidecar.py [--json]`.
"""

from __future__ import annotations

import argparse
import json
import mmap
import multiprocessing
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

from pp1q_transport import attach_leader, attach_receiver, open_leader, open_receiver
from pp1q_transport._native.kernels import monotonic_ns
from pp1q_transport.client import AttachedReceiver
from pp1q_transport.local.channel import CLIENT, DAEMON, Channel, channel_bytes
from pp1q_transport.toy.sidecar import Deployment, Shape

DEPTH, SUPPORT, VOCAB = 5, 32, 129280
ALLOWED_OVER_US = 15.0
WAKE_UPS = 4
PAUSE_S = 0.0003
CORES = (sorted(os.sched_getaffinity(0)) * 2)[:2]


def ready_made() -> tuple[np.ndarray, np.ndarray]:
    """IDs and counts of one row: 32 entries of equal mass."""
    return np.arange(0, SUPPORT * 100, 100, dtype=np.int32), np.full(SUPPORT, (1 << 24) // SUPPORT, np.uint32)


def hello() -> dict[str, object]:
    """What both embedded sides state."""
    return {"vocab_size": VOCAB, "depth": DEPTH, "support": SUPPORT, "draft_identity": "bench", "target_identity": "bench"}


def draft(attach: str, connect: str, idle: str) -> None:
    """The draft process: answers every STEP with ready-made rows."""
    ids, counts = ready_made()
    leader = attach_leader(attach, idle=idle) if attach else open_leader(connect=connect, idle=idle, **hello())
    with leader:
        for step in leader:
            for position in step.positions:
                if step.put(position, counts=counts, ids=ids) is None:
                    break
            if not attach and leader.parted:
                return


def rounds(receiver, request, count: int) -> np.ndarray:
    """Step latencies in ns, uint64 [count]: enqueued to proposal in hand; every proposal committed target-only style."""
    taken = np.zeros(count, np.uint64)
    for index in range(count):
        time.sleep(PAUSE_S)  # the target's own work: what the last COMMIT caused is over
        start = monotonic_ns()
        proposal = receiver.step(request, support=SUPPORT)
        taken[index] = monotonic_ns() - start
        proposal.commit(0, [int(proposal.tokens[0])])
    return taken


def bare_wake_up_us(count: int) -> float:
    """Half a round trip of one record between two bare processes that sleep on a channel, us (median): the machine's floor."""
    fd = os.memfd_create("bench")
    os.ftruncate(fd, channel_bytes())
    ours, theirs = (os.eventfd(0, os.EFD_NONBLOCK) for _ in range(2))
    child = multiprocessing.get_context("fork").Process(target=_echo, args=(fd, theirs, ours, count))
    child.start()
    assert child.pid is not None
    os.sched_setaffinity(child.pid, {CORES[1]})
    channel = Channel(_mapped(fd), CLIENT, ours, theirs)
    samples = []
    for _ in range(count):
        time.sleep(PAUSE_S)
        start = monotonic_ns()
        channel.send(1, b"12345678")
        channel.flush_bell()
        while channel.receive() is None:
            channel.wait("block", 1_000_000_000)
        samples.append(monotonic_ns() - start)
    child.join()
    return float(np.median(samples)) / 2000


def _mapped(fd: int) -> memoryview:
    return memoryview(mmap.mmap(fd, channel_bytes()))


def _echo(fd: int, bell: int, peer: int, count: int) -> None:
    channel = Channel(_mapped(fd), DAEMON, bell, peer)
    for _ in range(count):
        while channel.receive() is None:
            channel.wait("block", 1_000_000_000)
        channel.send(1, b"12345678")
        channel.flush_bell()


def wake_up_us(receiver: AttachedReceiver, count: int) -> float:
    """Half the time of an empty record to the daemon and back, both asleep before it, us (median): one wake-up across processes
    as these processes have them, cold caches and idle cores included."""
    samples = []
    for _ in range(count):
        time.sleep(PAUSE_S)
        samples.append(receiver.ping())
    return float(np.median(samples)) / 2000


def cpu_ns(pid: int) -> int:
    """CPU time of a process's main thread so far, in ns."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0])


PLACEMENTS = {"crossing": ("target", "leader"), "paired": ("target", "receiver0"), "apart": ("target", "draft")}


def place(pids: dict[str, int], placement: str) -> None:
    """Pins every process to its core; "free" leaves that to the kernel."""
    if placement == "free":
        return
    for name, pid in pids.items():
        os.sched_setaffinity(pid, {CORES[0 if name in PLACEMENTS[placement] else 1]})


def measure(blocks: int, count: int, idle: str, placement: str) -> dict[str, object]:
    """Both kinds in turns."""
    shape = Shape(vocab_size=VOCAB, depth=DEPTH, support=SUPPORT, ranks=1, idle=idle)
    embedded, sidecar, wakes, bare = [], [], [], []
    children = []
    script = [sys.executable, str(Path(__file__).resolve()), "--idle", idle]
    with Deployment(shape) as deployment, open_receiver(listen="tcp://127.0.0.1:0", idle=idle, **hello()) as plain:
        try:
            for name in deployment.daemons:
                deployment.start(name)
            for name in deployment.daemons:
                deployment.wait_for_daemon(name)
            children.append(subprocess.Popen([*script, "--attach", deployment.socket("leader")]))
            children.append(subprocess.Popen([*script, "--connect", plain.endpoint]))
            deployment.wait_for_client("leader")
            with attach_receiver(deployment.socket("receiver0"), idle=idle) as beside:
                for receiver in (plain, beside):
                    receiver.wait_for_peer()
                requests = [receiver.open_request(1, [1, 2, 3]) for receiver in (plain, beside)]
                rounds(plain, requests[0], 200)
                rounds(beside, requests[1], 200)
                channel = beside._attachment.channel
                before = (channel.bytes_in, channel.bytes_out)
                pids = {
                    "target": os.getpid(),
                    "receiver0": deployment.status("receiver0")["pid"],
                    "leader": deployment.status("leader")["pid"],
                    "draft": children[0].pid,
                    "embedded draft": children[1].pid,
                }
                place(pids, placement)  # they start unpinned: what they load is slow enough
                rounds(plain, requests[0], 100)
                rounds(beside, requests[1], 100)
                used = dict.fromkeys(pids, 0) | {"embedded target": 0}
                for _ in range(blocks):
                    bare.append(bare_wake_up_us(count // 4))
                    wakes.append(wake_up_us(beside, count // 2))
                    start = {name: cpu_ns(pid) for name, pid in pids.items()}
                    embedded.append(rounds(plain, requests[0], count))
                    used["embedded target"] += cpu_ns(os.getpid()) - start["target"]
                    start["target"] = cpu_ns(os.getpid())
                    sidecar.append(rounds(beside, requests[1], count))
                    for name, pid in pids.items():
                        used[name] += cpu_ns(pid) - start[name]
                crossed = (channel.bytes_in - before[0], channel.bytes_out - before[1])
        finally:
            for child in children:
                child.kill()
                child.wait()
    total = blocks * count
    both = {name: np.concatenate(samples) / 1000 for name, samples in (("embedded", embedded), ("sidecar", sidecar))}
    wake = float(np.median(wakes))
    cost = float(np.median(both["sidecar"]) - np.median(both["embedded"]))
    return {
        "idle": idle,
        "rounds": total,
        "wake_up_us": wake,
        "bare_wake_up_us": float(np.median(bare)),
        "embedded_us": {"p50": float(np.median(both["embedded"])), "p99": float(np.quantile(both["embedded"], 0.99))},
        "sidecar_us": {"p50": float(np.median(both["sidecar"])), "p99": float(np.quantile(both["sidecar"], 0.99))},
        "cost_us": cost,
        "allowed_us": WAKE_UPS * wake + ALLOWED_OVER_US,
        "cpu_us_a_round": {name: amount / total / 1000 for name, amount in used.items()},
        "channel_bytes_a_round": {"to_target": crossed[0] / total, "from_target": crossed[1] / total},
        "payload_bytes_a_round": DEPTH * SUPPORT * 8,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--idle", default="block")
    parser.add_argument("--placement", default="crossing", choices=["free", *PLACEMENTS], help="which cores")
    parser.add_argument("--attach", default="", help=argparse.SUPPRESS)
    parser.add_argument("--connect", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.attach or options.connect:
        draft(options.attach, options.connect, options.idle)
        return
    result = measure(options.blocks, options.count, options.idle, options.placement)
    if options.json:
        print(json.dumps(result))
        return
    for name, value in result.items():
        print(f"{name:24} {value}")


if __name__ == "__main__":
    main()
