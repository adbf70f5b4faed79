"""Settings of an rdma link: each bound, every wrong value as one line, and which GID "auto" means. No device is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from pp1q_transport.errors import ConfigError
from pp1q_transport.links.rdma_config import (
    AUTO,
    BOUNDS,
    ROCE_V1,
    ROCE_V2,
    Gid,
    RdmaConfig,
    choose_gid,
    config_from,
    gid_table,
    options_for,
    parse_options,
)


@pytest.mark.parametrize("name", sorted(BOUNDS))
def test_every_number_has_both_its_bounds(name: str) -> None:
    least, most = BOUNDS[name]
    for value in (least, most):
        assert getattr(config_from({name: value}), name) == value
    for wrong in (least - 1, most + 1, True, 1.0, "1", None):
        with pytest.raises(ConfigError, match=f"rdma {name} "):
            config_from({name: wrong})


@pytest.mark.parametrize(
    ("settings", "named"),
    (
        ({"device": ""}, "device"),
        ({"device": "../rxe0"}, "device"),
        ({"device": 3}, "device"),
        ({"mtu": 1000}, "mtu"),
        ({"mtu": True}, "mtu"),
        ({"mtu": "most"}, "mtu"),
        ({"gid_index": -1}, "gid_index"),
        ({"gid_index": 256}, "gid_index"),
        ({"gid_index": "first"}, "gid_index"),
        ({"gid_index": False}, "gid_index"),
        ({"retries": 3}, "retries"),
    ),
)
def test_what_is_wrong_is_named(settings: dict[str, object], named: str) -> None:
    with pytest.raises(ConfigError, match=named) as caught:
        config_from(settings)
    assert "\n" not in str(caught.value)


def test_seven_retries_are_refused_because_they_never_end() -> None:
    for name in ("retry_count", "rnr_retry"):
        with pytest.raises(ConfigError):
            config_from({name: 7})


def test_options_of_a_command() -> None:
    config = parse_options(["device=rxe0,gid_index=1", "mtu=1024", "traffic_class=106"])
    assert config == RdmaConfig(device="rxe0", gid_index=1, mtu=1024, traffic_class=106)
    assert parse_options([]) == RdmaConfig()
    assert parse_options(["gid_index=auto"]).gid_index == AUTO
    assert parse_options(["device=5"]).device == "5"


@pytest.mark.parametrize(
    "text", ("", "device", "device=", "=rxe0", "device=a,device=b", "port=1,,mtu=256", "port=-1", "port=99999999999")
)
def test_options_that_are_none(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_options([text])


def test_rdma_settings_go_with_an_rdma_link_only() -> None:
    assert options_for("tcp", ()) is None
    assert options_for("rdma", ()) == RdmaConfig()
    with pytest.raises(ConfigError, match="--link shm"):
        options_for("shm", ["port=1"])


LOCAL = Gid(0, "fe80:0000:0000:0000:5054:00ff:fe00:0001", ROCE_V2, "eth0")
LOCAL_V1 = Gid(1, "fe80:0000:0000:0000:5054:00ff:fe00:0001", ROCE_V1, "eth0")
FOUR_V1 = Gid(2, "0000:0000:0000:0000:0000:ffff:0a00:0001", ROCE_V1, "eth0")
FOUR = Gid(3, "0000:0000:0000:0000:0000:ffff:0a00:0001", ROCE_V2, "eth0")
OTHER = Gid(4, "0000:0000:0000:0000:0000:ffff:0a00:0002", ROCE_V2, "eth0")
SIX = Gid(5, "2001:0db8:0000:0000:0000:0000:0000:0001", ROCE_V2, "eth0")
ALL = [LOCAL, LOCAL_V1, FOUR_V1, FOUR, OTHER, SIX]


@pytest.mark.parametrize(
    ("table", "near", "chosen"),
    (
        (ALL, "10.0.0.1", FOUR),
        (ALL, "10.0.0.2", OTHER),
        (ALL, "10.9.9.9", FOUR),  # nobody's: the first of its family
        (ALL, "::ffff:10.0.0.2", OTHER),
        (ALL, "2001:db8::1", SIX),
        (ALL, "2001:db8::9", SIX),  # routable before link-local
        (ALL, "fe80::5054:ff:fe00:1%eth0", LOCAL),
        (ALL, "", FOUR),
        (ALL, "no address", FOUR),
        ([LOCAL_V1, FOUR_V1, LOCAL], "10.0.0.1", LOCAL),  # RoCE v2 before an equal address
        ([LOCAL_V1, FOUR_V1], "10.0.0.1", FOUR_V1),
        ([LOCAL], "10.0.0.1", LOCAL),
    ),
)  # fmt: skip
def test_auto_chooses_by_roce_version_then_address(table: list[Gid], near: str, chosen: Gid) -> None:
    assert choose_gid(table, AUTO, near) == chosen


def test_a_named_index_is_taken_or_refused() -> None:
    assert choose_gid(ALL, 1, "10.0.0.1") == LOCAL_V1
    with pytest.raises(ConfigError, match="gid_index 7 is empty; there are 0, 1"):
        choose_gid(ALL, 7)
    with pytest.raises(ConfigError, match="no GID"):
        choose_gid([], AUTO)


def test_the_table_is_read_from_sysfs(tmp_path: Path) -> None:
    port = tmp_path / "rxe0" / "ports" / "1"
    for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
        (port / folder).mkdir(parents=True)
    for gid in (LOCAL, FOUR):
        (port / "gids" / str(gid.index)).write_text(gid.gid + "\n")
        (port / "gid_attrs/types" / str(gid.index)).write_text(gid.kind + "\n")
        (port / "gid_attrs/ndevs" / str(gid.index)).write_text(gid.interface + "\n")
    (port / "gids" / "9").write_text("0000:0000:0000:0000:0000:0000:0000:0000\n")  # an empty entry
    (port / "gids" / "11").write_text(SIX.gid + "\n")  # without a type: not usable
    assert gid_table("rxe0", 1, tmp_path) == [LOCAL, FOUR]
    with pytest.raises(ConfigError, match="rxe0 has no port 2"):
        gid_table("rxe0", 2, tmp_path)
    assert LOCAL.raw[:2] == b"\xfe\x80"
    assert str(FOUR.address) == "10.0.0.1"
