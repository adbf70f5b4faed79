"""The commands over rdma, between processes: the demo on one device, sender and receiver on the two ends of a cable."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from processes import run, start
from verbs_peer import ONE, A, B

pytestmark = pytest.mark.timeout(280)
CLI = ("-m", "pp1q_transport.cli")
SEND = ("-m", "pp1q_transport.cli.send")
RECEIVE = ("-m", "pp1q_transport.cli.recv")
ENDPOINT = "tcp://10.77.2.2:7801"
CABLE_B = Path("/sys/class/net/cable_b/statistics/rx_bytes")


def test_the_demo_runs_between_two_processes() -> None:
    options = ["--link", "rdma", "--rdma", f"device={ONE}", "--rounds", "60", "--vocab", "4096", "--json"]
    command = [sys.executable, *CLI, "demo", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["ready"] > 0
    assert report["slots_not_free"] == 0
    assert not report["reasons"]


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    for name in ("leader", "receiver"):
        run([*CLI, "keys", "new", name, "--dir", str(tmp_path)], check=True)
    public = str(tmp_path / "leader.public")
    run([*CLI, "keys", "allow", str(tmp_path / "allowed"), public], check=True)
    return tmp_path


@pytest.mark.parametrize("form", (("--dense", "--vocab", "16384"), ("--sparse", "32")), ids=("dense", "sparse"))
def test_sender_and_receiver_across_the_cable(keys: Path, form: tuple[str, ...]) -> None:
    receive = [
        *RECEIVE, "--listen", ENDPOINT, "--own-key", str(keys / "receiver.secret"), "--allow", str(keys / "allowed"),
        "--link", "rdma", "--rdma", f"device={B}", "--once", "--json",
    ]  # fmt: skip
    send = [
        *SEND, "--connect", ENDPOINT, "--own-key", str(keys / "leader.secret"), "--server-key", str(keys / "receiver.public"),
        "--link", "rdma", "--rdma", f"device={A}", "--idle", "block", "--no-floors", "--rounds", "20", "--warmup", "2",
        "--requests", "2", "--depth", "3", "--wait", "120", "--json", *form,
    ]  # fmt: skip
    before = int(CABLE_B.read_text(encoding="ascii"))
    with (keys / "theirs").open("wb") as theirs, (keys / "said").open("wb") as said:
        receiver = start(receive, stdout=theirs.fileno(), stderr=said.fileno())
    try:
        sent = run(send)
        assert sent.returncode == 0, sent.stderr
        status = receiver.wait()
    finally:
        receiver.kill()
    assert status == 0, (keys / "said").read_text(encoding="utf-8")
    for report in (json.loads(sent.stdout), json.loads((keys / "theirs").read_text(encoding="utf-8"))):
        assert report["link"] == "rdma"
        assert report["ready"] > 0
        assert report["discarded"] == 0, report["reasons"]
    if form[0] == "--dense":  # q went by the cable, not by this host's loopback
        assert int(CABLE_B.read_text(encoding="ascii")) - before > report["ready"] * 3 * 4 * 16384
