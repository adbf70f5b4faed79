"""`pp1q doctor --rdma` on a host that has devices: every check by what is really there, and each thing taken away is named."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from processes import run
from verbs_peer import ONE, A

pytestmark = pytest.mark.timeout(120)
WITHOUT_CAPABILITY = ("setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock")


def findings(
    settings: str, prefix: tuple[str, ...] = (), before: Callable[[], None] | None = None
) -> tuple[int, dict[str, tuple[str, str]]]:
    """Status, and {check: (verdict, detail)} of the checks for rdma."""
    command = ["-m", "pp1q_transport.cli", "doctor", "--json", "--rdma", settings]
    if prefix:
        command = [*prefix, sys.executable, *command]
        done = subprocess.run(command, capture_output=True, text=True, check=False, preexec_fn=before)
    else:
        done = run(command)
    report = json.loads(done.stdout)
    assert report["fit"] is (done.returncode == 0)
    found = {item["check"]: (item["verdict"], item["detail"]) for item in report["findings"]}
    return done.returncode, {check: item for check, item in found.items() if check.startswith("rdma")}


def test_a_fit_host_passes_and_says_what_would_run() -> None:
    status, found = findings(f"device={A}")
    assert status == 0
    assert all(verdict != "FAIL" for verdict, _detail in found.values())
    assert found["rdma gid"] == ("PASS", "index 1 of 2: 10.77.2.1 (RoCE v2, IPv4) on cable_a")
    assert "1024 bytes a packet" in found["rdma mtu"][1]
    assert found["rdma register"][0] == "PASS"
    assert "42.5 MB registered" in found["rdma register"][1]  # slots, landing memory, messages


@pytest.mark.parametrize(
    ("settings", "check", "said"),
    (
        ("device=auto", "rdma device", "name one"),
        ("device=rxe77", "rdma device", "no port 1 of device rxe77"),
        (f"device={ONE},gid_index=9", "rdma gid", "gid_index 9"),
    ),
)
def test_what_is_not_there_is_named(settings: str, check: str, said: str) -> None:
    status, found = findings(settings)
    assert status == 1
    assert found[check][0] == "FAIL"
    assert said in found[check][1]


def test_a_limit_that_is_too_low_fails_by_registering_and_says_what_to_set() -> None:
    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (1 << 20, 1 << 20))

    status, found = findings(f"device={ONE}", WITHOUT_CAPABILITY, limited)
    assert status == 1
    assert found["rdma memlock"][0] == "FAIL"
    assert "RLIMIT_MEMLOCK is 1048576 bytes" in found["rdma memlock"][1]
    assert "LimitMEMLOCK=infinity" in found["rdma memlock"][1]
    assert found["rdma register"][0] == "FAIL"
    assert "can't register" in found["rdma register"][1]


def test_a_port_that_is_down_is_named_and_not_tried() -> None:
    # An end of the cable: other lanes are at work on the device beside it.
    subprocess.run(["ip", "link", "set", "cable_a", "down"], check=True)
    try:
        status, found = findings(f"device={A}")
    finally:
        subprocess.run(["bash", "-ec", ". tests/rdma/vm/devices.sh; wire"], check=True, cwd=Path(__file__).parents[2])
    assert status == 1
    assert found["rdma port"][0] == "FAIL"
    assert "ip link set NAME up" in found["rdma port"][1]
    assert "rdma register" not in found
