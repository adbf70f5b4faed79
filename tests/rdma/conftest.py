"""The RDMA tests need devices and pyverbs, which tests/rdma/vm/run.py brings along; elsewhere none of them is collected."""

from __future__ import annotations

import importlib.util
from pathlib import Path

INFINIBAND = Path("/sys/class/infiniband")
HERE = Path(__file__).parent
PLAIN = {"test_lanes.py", "test_machine_parts.py", "test_rdma_status.py", "test_rdma_host.py"}  # what runs anywhere

if not (importlib.util.find_spec("pyverbs") and INFINIBAND.is_dir() and any(INFINIBAND.iterdir())):
    collect_ignore = [path.name for path in HERE.glob("test_*.py") if path.name not in PLAIN]
