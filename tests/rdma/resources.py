"""What the kernel and this process hold of verbs: protection domains, completion queues, queue pairs, memory regions."""

from __future__ import annotations

import json
import subprocess

from pp1q_transport.links.rdma_verbs import alive

KINDS = ("pd", "cq", "qp", "mr", "ctx")


def kernel_counts() -> dict[str, int]:
    """All devices' together, as `rdma resource` counts them."""
    said = subprocess.run(["rdma", "-j", "resource", "show"], check=True, capture_output=True, text=True).stdout
    return {kind: sum(device.get(kind, 0) for device in json.loads(said)) for kind in KINDS}


def own_counts() -> dict[str, int]:
    """This process's own, as the package counts them."""
    return dict(alive)
