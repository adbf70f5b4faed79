"""The configurations that operators start from: every example and every ConfigMap is one that the daemon takes, and they pair."""

from __future__ import annotations

import os
import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest
import yaml

from pp1q_transport.daemon.config import parse
from pp1q_transport.daemon.settings import DaemonConfig
from pp1q_transport.links.rdma_config import RdmaConfig, config_from
from pp1q_transport.session.breaker import LINK_LOST, NOBODYS_FAULT
from pp1q_transport.session.hello import Role

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"


def examples() -> dict[str, str]:
    """Name -> text of every example file and every ConfigMap entry."""
    found = {path.name: path.read_text(encoding="utf-8") for path in sorted((DEPLOY / "examples").glob("*.toml"))}
    for path in sorted((DEPLOY / "kubernetes").glob("*.yaml")):
        for document in yaml.safe_load_all(path.read_text(encoding="utf-8")):
            if document["kind"] == "ConfigMap":
                found |= {f"kubernetes/{name}": text for name, text in document["data"].items()}
    return found


EXAMPLES = examples()
LOCAL = ("local-leader.toml", "local-receiver.toml")


def config(name: str) -> DaemonConfig:
    return parse(EXAMPLES[name], f"/etc/pp1q/{name}")


def test_there_is_a_file_for_each_role() -> None:
    assert {"leader.toml", "receiver-rank0.toml", "receiver-rank1.toml"} <= set(EXAMPLES)
    assert {"kubernetes/leader.toml", "kubernetes/pp1q-receiver-0.toml", "kubernetes/pp1q-receiver-1.toml"} <= set(EXAMPLES)


@pytest.mark.parametrize("name", sorted(set(EXAMPLES) - set(LOCAL)))
def test_the_daemon_takes_it(name: str) -> None:
    taken = config(name)
    assert taken.daemon.role is (Role.LEADER if "leader" in name else Role.RECEIVER)
    assert taken.daemon.socket_mode == 0o660
    assert taken.keys is not None
    assert taken.daemon.metrics is not None


@pytest.mark.parametrize(
    "names",
    (
        ("leader.toml", "receiver-rank0.toml", "receiver-rank1.toml"),
        ("kubernetes/leader.toml", "kubernetes/pp1q-receiver-0.toml", "kubernetes/pp1q-receiver-1.toml"),
    ),
    ids=("hosts", "pods"),
)
def test_the_three_pair(names: tuple[str, str, str]) -> None:
    leader, first, second = (config(name) for name in names)
    assert leader.session == first.session == second.session
    assert leader.peers[0].group.size == first.group.size == second.group.size
    assert (first.group.rank, second.group.rank) == (0, 1)
    assert (leader.peers[0].connect or "").rpartition(":")[2] == (first.peers[0].listen or "").rpartition(":")[2]
    assert (second.group.connect or "").rpartition(":")[2] == (first.group.listen or "").rpartition(":")[2]
    sockets = {str(one.daemon.socket) for one in (first, second)}
    assert len(sockets) == (1 if "kubernetes" in names[0] else 2)  # pods do not share a /run


def test_the_two_for_one_machine_pair_and_need_nothing_of_it() -> None:
    leader, receiver = (config(name) for name in LOCAL)
    assert (leader.daemon.role, receiver.daemon.role) == (Role.LEADER, Role.RECEIVER)
    assert leader.session == receiver.session
    assert leader.peers[0].connect == receiver.peers[0].listen == "tcp://127.0.0.1:7801"
    assert leader.daemon.socket != receiver.daemon.socket
    readme = (DEPLOY.parent / "README.md").read_text(encoding="utf-8")
    for name, one in zip(LOCAL, (leader, receiver), strict=True):
        assert one.keys is None
        assert one.daemon.metrics is None
        assert one.daemon.socket.parent == Path("/tmp")
        assert one.daemon.allow_uids == (os.geteuid(),)
        assert f".venv/bin/pp1q daemon --config deploy/examples/{name}" in readme
        assert str(one.daemon.socket) in readme


def test_the_example_names_every_reason_that_the_breaker_does_not_count() -> None:
    comment = EXAMPLES["leader.toml"].partition("# Not counted:")[2].partition("\n")[0]
    assert set(re.findall(r"[a-z]+_[a-z]+|cancelled", comment)) == {str(reason) for reason in NOBODYS_FAULT | LINK_LOST}


def test_sockets_have_the_same_paths_wherever_they_are_named() -> None:
    """Pods have their own, which are in deploy/kubernetes alone."""
    known = {str(config(name).daemon.socket) for name in EXAMPLES if "kubernetes" not in name}
    root = DEPLOY.parent
    pages = [root / "README.md", *(root / "docs").glob("*.md"), *(root / "pp1q_transport").rglob("*.py")]
    pages += [*(root / "examples").rglob("*.c"), *(root / "include").glob("*.h"), *(DEPLOY / "systemd").iterdir()]
    for page in pages:
        named = re.findall(r"/(?:run|tmp)/[\w./-]+\.sock\b", page.read_text(encoding="utf-8"))
        assert {name.replace("-RANK", "-0") for name in named} <= known, page


def test_the_readme_calls_the_program_as_a_clone_has_it() -> None:
    text = (DEPLOY.parent / "README.md").read_text(encoding="utf-8")
    commands = re.findall(r"^ *((?:\.venv/bin/)?pp1q(?:-\w+)? .*)$", text, re.M)
    assert len(commands) >= 10
    assert [line for line in commands if line.startswith("pp1q")] == []


@pytest.mark.parametrize("name", ("leader.toml", "receiver-rank0.toml"))
def test_an_annotated_example_shows_every_key(name: str) -> None:
    shown = EXAMPLES[name]
    described = config(name).describe()
    for table in ("daemon", "session", "breaker", "watch"):
        keys = described[table]
        assert isinstance(keys, dict)
        for key in keys:
            assert f"{key} = " in shown, f"[{table}] {key} is not shown"


def test_the_rdma_table_that_is_commented_out_is_the_usual_one() -> None:
    lines = EXAMPLES["leader.toml"].partition("# [rdma]\n")[2].partition("\n\n")[0].splitlines()
    table = tomllib.loads("\n".join(line.removeprefix("# ") for line in lines))
    assert set(table) == {item.name for item in fields(RdmaConfig)}
    assert config_from(table) == RdmaConfig()


def test_a_drain_fits_into_the_time_to_stop() -> None:
    longest = max(config(name).daemon.drain_s for name in EXAMPLES)
    for path in (DEPLOY / "systemd").glob("*.service"):
        line = next(line for line in path.read_text(encoding="utf-8").splitlines() if line.startswith("TimeoutStopSec="))
        assert int(line.removeprefix("TimeoutStopSec=").removesuffix("s")) > longest
    for name in ("leader", "receiver"):
        for document in yaml.safe_load_all((DEPLOY / "kubernetes" / f"{name}.yaml").read_text(encoding="utf-8")):
            if document["kind"] in ("Deployment", "StatefulSet"):
                assert document["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] > longest


def test_the_examples_are_toml_that_says_nothing_twice() -> None:
    for name, text in EXAMPLES.items():
        assert tomllib.loads(text)["daemon"]["role"] in ("leader", "receiver"), name
