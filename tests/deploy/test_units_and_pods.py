"""Units, pods and the image, as far as it takes no tool: who may do what, and that their names fit each other."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pp1q_transport.daemon.config import parse
from pp1q_transport.session.terms import SessionTerms

DEPLOY = Path(__file__).resolve().parents[2] / "deploy"
UNITS = sorted((DEPLOY / "systemd").glob("*.service"))
NEEDED = {
    "Type": "notify",
    "WatchdogSec": "10s",
    "Restart": "on-failure",
    "RestartPreventExitStatus": "2",
    "KillSignal": "SIGTERM",
    "LimitMEMLOCK": "infinity",
    "MemorySwapMax": "0",
    "User": "pp1q",
    "Group": "pp1q",
    "NoNewPrivileges": "yes",
    "CapabilityBoundingSet": "",
    "ProtectSystem": "strict",
    "MemoryDenyWriteExecute": "yes",
    "SystemCallArchitectures": "native",
    "RestrictAddressFamilies": "AF_UNIX AF_INET AF_INET6 AF_NETLINK",  # without the last one libzmq aborts when it binds
}
# Each would break the daemon, not harden it: the unit's comments say why.
HARMFUL = ("PrivateUsers", "ProcSubset", "PrivateNetwork", "DynamicUser", "LoadCredential")


def settings(path: Path) -> dict[str, list[str]]:
    """Key -> its values, in order; comments left out."""
    found: dict[str, list[str]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        if line and line[0] not in "#;[":
            key, _, value = line.partition("=")
            found.setdefault(key, []).append(value)
    return found


def documents(*kinds: str) -> list[dict[str, Any]]:
    paths = sorted((DEPLOY / "kubernetes").glob("*.yaml"))
    found = [document for path in paths for document in yaml.safe_load_all(path.read_text(encoding="utf-8"))]
    return [document for document in found if not kinds or document["kind"] in kinds]


WORKLOADS = documents("Deployment", "StatefulSet")


def pod(workload: dict[str, Any]) -> dict[str, Any]:
    spec: dict[str, Any] = workload["spec"]["template"]["spec"]
    return spec


def sidecar(workload: dict[str, Any]) -> dict[str, Any]:
    return next(one for one in pod(workload)["initContainers"] if one["name"] == "pp1q")


@pytest.mark.parametrize("unit", UNITS, ids=lambda path: path.name)
def test_a_unit_has_what_the_daemon_relies_on(unit: Path) -> None:
    found = settings(unit)
    for key, value in NEEDED.items():
        assert found.get(key) == [value], key
    for key in HARMFUL:
        assert key not in found, key
    check, hang_up = found["ExecReload"]
    (start,) = found["ExecStart"]
    assert start in check
    assert "--check" in check
    assert "kill -HUP" in hang_up
    assert not hang_up.startswith("/bin/kill")  # procps may be missing; the shell has its own


def test_a_unit_s_socket_lies_in_its_runtime_directory() -> None:
    for unit, example in (("pp1q-leader.service", "leader"), ("pp1q-receiver@.service", "receiver-rank0")):
        directory = settings(DEPLOY / "systemd" / unit)["RuntimeDirectory"][0].replace("%i", "0")
        text = (DEPLOY / "examples" / f"{example}.toml").read_text(encoding="utf-8")
        assert str(parse(text, f"/etc/pp1q/{example}.toml").daemon.socket.parent) == f"/run/{directory}"


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_the_daemon_is_a_native_sidecar_with_probes(workload: dict[str, Any]) -> None:
    container = sidecar(workload)
    assert container["restartPolicy"] == "Always"
    paths = {kind: container[f"{kind}Probe"]["httpGet"]["path"] for kind in ("startup", "liveness", "readiness")}
    assert paths == {"startup": "/healthz", "liveness": "/healthz", "readiness": "/readyz"}
    metrics = next(port["containerPort"] for port in container["ports"] if port["name"] == "metrics")
    for text in configurations(workload):
        address = parse(text, "/etc/pp1q/any.toml").daemon.metrics
        assert address is not None
        assert address.port == metrics


def configurations(workload: dict[str, Any]) -> list[str]:
    name = next(volume["configMap"]["name"] for volume in pod(workload)["volumes"] if volume["name"] == "config")
    return [text for one in documents("ConfigMap") if one["metadata"]["name"] == name for text in one["data"].values()]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_no_container_of_a_pod_is_root_or_may_become_it(workload: dict[str, Any]) -> None:
    spec = pod(workload)
    assert spec["securityContext"]["runAsNonRoot"] is True
    for container in (*spec["initContainers"], *spec["containers"]):
        context = container["securityContext"]
        assert context["allowPrivilegeEscalation"] is False
        assert context["capabilities"] == {"drop": ["ALL"]}
        assert context["runAsUser"] > 0


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_the_engine_may_attach_and_sees_no_key(workload: dict[str, Any]) -> None:
    (engine,) = pod(workload)["containers"]
    mounted = {mount["name"]: mount["mountPath"] for mount in engine["volumeMounts"]}
    assert not mounted.keys() & {"keys", "keys-in"}
    for text in configurations(workload):
        daemon = parse(text, "/etc/pp1q/any.toml").daemon
        assert engine["securityContext"]["runAsUser"] in daemon.allow_uids
        assert str(daemon.socket.parent) == mounted["run"]


@pytest.mark.parametrize("workload", WORKLOADS, ids=lambda one: one["metadata"]["name"])
def test_memory_limits_leave_room_for_slots(workload: dict[str, Any]) -> None:
    limit = sidecar(workload)["resources"]["limits"]["memory"]
    for text in configurations(workload):
        session = parse(text, "/etc/pp1q/any.toml").session
        terms = SessionTerms(1, 1, 2, session.vocab_size, session.depth, session.support, session.max_slots)
        assert int(limit.removesuffix("Mi")) << 20 >= (128 << 20) + terms.geometry().total_bytes


def test_the_policy_lets_through_what_the_daemons_use_and_no_more() -> None:
    policies = {one["metadata"]["name"]: one for one in documents("NetworkPolicy")}
    assert set(policies) == {one["metadata"]["name"] for one in WORKLOADS}
    receiver = next(one for one in WORKLOADS if one["kind"] == "StatefulSet")
    low, high = (int(number) for number in pod(receiver)["securityContext"]["sysctls"][0]["value"].split())
    ports = [port for rule in policies["pp1q-receiver"]["spec"]["ingress"] for port in rule["ports"]]
    assert {(port["port"], port.get("endPort")) for port in ports} == {(7801, None), (7802, None), (9109, None), (low, high)}


def test_the_image_runs_as_nobody_in_particular_and_without_a_compiler() -> None:
    text = (DEPLOY / "container" / "Containerfile").read_text(encoding="utf-8")
    stages = re.split(r"^FROM .*$", text, flags=re.M)[1:]
    assert len(stages) == 2
    assert "gcc" in stages[0]
    assert "gcc" not in stages[1]
    assert re.findall(r"^USER (.+)$", stages[1], re.M) == ["10001:10001"]
    assert re.search(r"^HEALTHCHECK ", stages[1], re.M)
    for workload in WORKLOADS:
        assert f"--uid {sidecar(workload)['securityContext']['runAsUser']} " in stages[1]
