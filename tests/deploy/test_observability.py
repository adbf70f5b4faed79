"""Dashboard, rules and the operators' page name only metrics that the daemon has, and all that it has."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from deploy_metrics import HISTOGRAMS, METRICS

from pp1q_transport.errors import Reason
from pp1q_transport.session.slots import STATE_NAMES

ROOT = Path(__file__).resolve().parents[2]
TARGET_LABELS = frozenset({"job", "instance"})
_NAME = re.compile(r"\bpp1q_\w+")
_SELECTOR = re.compile(r"\b(pp1q_\w+)(?:\{([^}]*)\})?")


def rules() -> list[dict[str, Any]]:
    text = (ROOT / "deploy" / "prometheus" / "pp1q.rules.yml").read_text(encoding="utf-8")
    return [rule for group in yaml.safe_load(text)["groups"] for rule in group["rules"]]


def dashboard() -> dict[str, Any]:
    board: dict[str, Any] = json.loads((ROOT / "deploy" / "grafana" / "pp1q.json").read_text(encoding="utf-8"))
    return board


def dashboard_expressions() -> list[str]:
    return [target["expr"] for panel in dashboard()["panels"] for target in panel.get("targets", [])]


EXPRESSIONS = [*dashboard_expressions(), *(rule["expr"] for rule in rules())]


def base(name: str) -> str:
    """A histogram's name without its suffix."""
    for histogram in HISTOGRAMS:
        if name in (f"{histogram}_bucket", f"{histogram}_sum", f"{histogram}_count"):
            return histogram
    return name


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_names_only_metrics_and_labels_that_exist(expression: str) -> None:
    found = _SELECTOR.findall(expression.replace("pp1q:", "recorded:"))
    for name, selector in found:
        assert base(name) in METRICS, name
        assert name not in HISTOGRAMS, f"{name} is a histogram: its _bucket is meant"
        labels = set(re.findall(r"(\w+)\s*(?:=~|!~|!=|=)", selector))
        assert labels <= METRICS[base(name)] | TARGET_LABELS, f"{name}: {labels}"
        for reasons in re.findall(r'reason(?:=~|!~|!=|=)"([^"]*)"', selector):
            assert set(reasons.split("|")) <= {reason.value for reason in Reason}
        for states in re.findall(r'state(?:=~|=)"([^"]*)"', selector):
            assert set(states.split("|")) <= set(STATE_NAMES)
        for outcomes in re.findall(r'outcome(?:=~|=)"([^"]*)"', selector):
            assert set(outcomes.split("|")) <= {"ready", "discarded"}


def test_the_list_is_the_daemon_s() -> None:
    """The exporter's own names: a metric more or less there is one more or less here."""
    text = (ROOT / "pp1q_transport" / "daemon" / "exposition.py").read_text(encoding="utf-8")
    exported = set(re.findall(r'"(pp1q_\w+)"', text))
    assert {name.removesuffix("_total") for name in METRICS} == {name.removesuffix("_total") for name in exported}


def test_recorded_series_are_used_by_the_name_they_have() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    for rule in rules():
        assert set(re.findall(r"\bpp1q:[\w:]+", rule["expr"])) <= recorded


def test_the_dashboard_shows_every_metric_but_the_loop_s() -> None:
    shown = {base(name) for expression in dashboard_expressions() for name in _NAME.findall(expression)}
    assert set(METRICS) - shown <= {"pp1q_loops_total", "pp1q_draining"}


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    board = dashboard()
    panels = board["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    for panel in panels:
        assert panel["gridPos"]["x"] + panel["gridPos"]["w"] <= 24
        assert panel["type"] in {"row", "stat", "timeseries", "table"}
        if panel["type"] != "row":
            assert panel["targets"]
            assert panel["datasource"]["uid"] == "${datasource}"
    assert {variable["name"] for variable in board["templating"]["list"]} == {"datasource", "job", "instance"}


def test_every_alert_says_how_bad_it_is_and_what_to_do() -> None:
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len({rule["alert"] for rule in alerts}) == len(alerts)
    tested = (ROOT / "deploy" / "prometheus" / "pp1q.rules.test.yml").read_text(encoding="utf-8")
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    for rule in alerts:
        assert rule["labels"]["severity"] in {"critical", "warning", "info"}
        assert rule["annotations"]["summary"]
        assert rule["annotations"]["description"]
        assert rule["alert"] in tested, f"{rule['alert']} is never seen to fire"
        assert f"`{rule['alert']}`" in page, f"{rule['alert']} is not in docs/operations.md"
