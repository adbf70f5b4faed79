"""What the kernel and this process hold of verbs: protection domains, completion queues, queue pairs, memory regions."""

from __future__ import annotations

import json
import subprocess

from pp1q_transport.links.rdma_verbs import alive

KINDS = ("pd", "cq", "qp", "mr", "ctx")


def kernel_counts(*devices: str) -> dict[str, int]:
    """Of these devices together, as `rdma resource` counts them; other tests may be at work on others."""
    said = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True).stdout
    mine = [device for device in json.loads(said) if device["ifname"] in devices]
    assert len(mine) == len(devices), said
    return {kind: sum(device.get(kind, 0) for device in mine) for kind in KINDS}


def own_counts() -> dict[str, int]:
    """This process's own, as the package counts them."""
    return dict(alive)
