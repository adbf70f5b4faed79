"""What a newcomer and a breaker found in the commands: numbers that are none, rdma settings of a file, a shared capture."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from pp1q_transport.capture import recorder
from pp1q_transport.cli import doctor
from pp1q_transport.cli.recv import main as recv
from pp1q_transport.cli.send import main as send
from pp1q_transport.cli.simulate import simulate
from pp1q_transport.errors import ConfigError
from pp1q_transport.links.rdma_config import RdmaConfig

LEADER = """
[daemon]
role = "leader"
socket = "{socket}"
[[peer]]
name = "target"
listen = "tcp://127.0.0.1:0"
link = "{link}"
{more}
"""


@pytest.mark.parametrize("value", ("nan", "inf", "-inf", "1e300"))
@pytest.mark.parametrize(
    ("command", "arguments"),
    (
        (send, ["--connect", "tcp://127.0.0.1:9", "--wait"]),
        (recv, ["--listen", "tcp://127.0.0.1:0", "--wait"]),
        (simulate, ["--rounds", "1", "--intensity"]),
    ),
    ids=("send", "recv", "simulate"),
)
def test_a_number_that_is_none_is_a_usage_error(command: object, arguments: list[str], value: str) -> None:
    done = CliRunner().invoke(command, [*arguments, value])  # type: ignore[arg-type]
    assert done.exit_code == 2, done.output


@pytest.mark.parametrize(
    ("link", "more", "options", "want"),
    (
        ("tcp", "", None, None),
        ("rdma", "", None, RdmaConfig()),
        ("rdma", "[rdma]\nqueue_depth = 32", None, RdmaConfig(queue_depth=32)),
        ("rdma", "[rdma]\nqueue_depth = 32", doctor.ANY_DEVICE, RdmaConfig(queue_depth=32)),
        ("rdma", "[rdma]\nqueue_depth = 32", "device=rxe9", RdmaConfig(device="rxe9")),
    ),
)
def test_doctor_asks_for_what_the_daemon_would_take(
    tmp_path: Path, link: str, more: str, options: str | None, want: RdmaConfig | None
) -> None:
    path = tmp_path / "pp1q.toml"
    path.write_text(LEADER.format(socket=tmp_path / "s.sock", link=link, more=more), encoding="utf-8")
    assert doctor._rdma_settings(options, str(path)) == want


def test_two_captures_do_not_share_a_file(tmp_path: Path) -> None:
    path = tmp_path / "one.pcapng"
    first = recorder._create(path)
    with pytest.raises(ConfigError, match="another process"):
        recorder._create(path)
    del first
