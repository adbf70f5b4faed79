"""What `pp1q doctor --rdma` reads of a host and says about it, on made-up hosts: every failure has its line and its advice."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from pp1q_transport.cli import _doctor_rdma as checks
from pp1q_transport.errors import ConfigError
from pp1q_transport.links import rdma_host
from pp1q_transport.links.rdma_config import RdmaConfig
from pp1q_transport.links.rdma_host import LockLimit, Port

ROCE = Port("mlx5_0", 1, "ACTIVE", "LINKUP", "Ethernet", "200 Gb/sec (4X HDR)")


def make_host(root: Path, ports: dict[str, tuple[str, ...]]) -> Path:
    """A tree as /sys/class/infiniband has it: {"device/port": (state, phys_state, link_layer, rate)}."""
    for place, texts in ports.items():
        device, number = place.split("/")
        folder = root / device / "ports" / number
        folder.mkdir(parents=True)
        for name, text in zip(("state", "phys_state", "link_layer", "rate"), texts, strict=True):
            (folder / name).write_text(text + "\n", encoding="ascii")
    return root


def test_ports_are_read_in_order(tmp_path: Path) -> None:
    up = ("4: ACTIVE", "5: LinkUp", "Ethernet", "200 Gb/sec (4X HDR)")
    root = make_host(tmp_path, {"mlx5_1/1": up, "mlx5_0/2": ("2: INIT", "5: LinkUp", "InfiniBand", "100"), "mlx5_0/1": up})
    found = rdma_host.ports(root)
    assert [(port.device, port.number) for port in found] == [("mlx5_0", 1), ("mlx5_0", 2), ("mlx5_1", 1)]
    assert found[0] == ROCE
    assert found[0].active
    assert (found[1].state, found[1].active, found[1].layer) == ("INIT", False, "InfiniBand")
    assert rdma_host.ports(tmp_path / "none") == []


@pytest.mark.parametrize(
    ("interface", "carried"),
    ((9000, 4096), (4192, 4096), (4191, 2048), (1500, 1024), (1120, 1024), (1119, 512), (576, 256), (351, 0), (0, 0)),
)
def test_an_interface_carries_the_largest_packet_that_fits(interface: int, carried: int) -> None:
    assert rdma_host.roce_mtu(interface) == carried


def test_an_interface_tells_its_mtu(tmp_path: Path) -> None:
    (tmp_path / "eth0").mkdir()
    (tmp_path / "eth0" / "mtu").write_text("1500\n", encoding="ascii")
    assert rdma_host.interface_mtu("eth0", tmp_path) == 1500
    assert rdma_host.interface_mtu("eth1", tmp_path) == 0
    assert rdma_host.interface_mtu("", tmp_path) == 0


@pytest.mark.parametrize(
    ("names", "mode", "verdict", "said"),
    (
        ((), 0, "FAIL", "load ib_uverbs"),
        (("rdma_cm",), 0o666, "FAIL", "load ib_uverbs"),
        (("uverbs0", "uverbs1", "rdma_cm"), 0o666, "PASS", "2 of 2"),
        (("uverbs0",), 0o000, "FAIL", "deploy/systemd/rdma.conf"),
    ),
)
def test_nodes_must_be_there_and_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, names: tuple[str, ...], mode: int, verdict: str, said: str
) -> None:
    for name in names:
        (tmp_path / name).touch()
        (tmp_path / name).chmod(mode)
    # Root may open anything; the mode is what decides for the daemon's user.
    monkeypatch.setattr(os, "access", lambda path, _wanted: bool(stat.S_IMODE(Path(path).stat().st_mode)))
    found = checks.access(tmp_path)
    assert found.verdict == verdict
    assert said in found.detail


@pytest.mark.parametrize(
    ("limit", "verdict", "said"),
    (
        (LockLimit(None, False), "PASS", "no limit"),
        (LockLimit(1 << 20, False), "PASS", "limit 1.0 MB"),
        (LockLimit((1 << 20) - 1, True), "WARN", "CAP_IPC_LOCK"),
        (LockLimit((1 << 20) - 1, False), "FAIL", "is 1048575 bytes, 1048576 are needed: set LimitMEMLOCK=infinity"),
    ),
)
def test_the_limit_is_held_against_what_is_needed(limit: LockLimit, verdict: str, said: str) -> None:
    found = checks.memory_limit(1 << 20, limit)
    assert found.verdict == verdict
    assert said in found.detail
    assert limit.allows(1 << 20) is (verdict != "FAIL")


def test_the_capability_is_read_from_the_kernels_mask(tmp_path: Path) -> None:
    status = tmp_path / "status"
    for mask, exempt in (("0000000000004000", True), ("0000000000003fff", False), ("000001ffffffffff", True)):
        status.write_text(f"Name:\tx\nCapEff:\t{mask}\n", encoding="ascii")
        assert rdma_host.lock_limit(status).exempt is exempt
    assert rdma_host.lock_limit(tmp_path / "none").exempt is False


OTHER = Port("mlx5_1", 1, "DOWN", "DISABLED", "Ethernet", "")


@pytest.mark.parametrize(
    ("settings", "ports", "said"),
    (
        ({}, [], "no RDMA device"),
        ({}, [ROCE, OTHER], "name one .device = \"mlx5_0\".: mlx5_0, mlx5_1"),
        ({"device": "rxe0"}, [ROCE], "no port 1 of device rxe0: there are mlx5_0/1"),
        ({"port": 2}, [ROCE], "no port 2 of device mlx5_0"),
    ),
)
def test_a_device_that_is_not_clear_is_refused(settings: dict[str, object], ports: list[Port], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        checks.pick_port(RdmaConfig(**settings), ports)  # type: ignore[arg-type]


def test_the_only_device_and_a_named_one_are_taken() -> None:
    assert checks.pick_port(RdmaConfig(), [ROCE]) is ROCE
    assert checks.pick_port(RdmaConfig(device="mlx5_1"), [ROCE, OTHER]) is OTHER


@pytest.mark.parametrize(
    ("port", "verdict", "said"),
    (
        (ROCE, "PASS", "mlx5_0/1 ACTIVE (LINKUP), Ethernet, 200 Gb/sec (4X HDR)"),
        (OTHER, "FAIL", "bring its interface up"),
        (Port("mlx5_0", 1, "INIT", "LINKUP", "InfiniBand", "100"), "FAIL", "opensm"),
        (Port("mlx5_0", 1, "DOWN", "POLLING", "InfiniBand", "100"), "FAIL", "check cable"),
    ),
)
def test_a_port_says_what_keeps_it_down(port: Port, verdict: str, said: str) -> None:
    found = checks.port_state(port)
    assert found.verdict == verdict
    assert said in found.detail
