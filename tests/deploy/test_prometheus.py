"""Alerts and dashboards: they name metrics, labels and values that exist, and fire when they should."""

from __future__ import annotations

import json
import re
import runpy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon.hosts import until
from tests.daemon.test_metrics import Scrape, serving
from tests.deploy.base import DEPLOY, run, tool
from tiercache.core import Outcome
from tiercache.metrics import TABLE
from tiercache.metrics.instruments import Histogram
from tiercache.metrics.table import PREFIX, Known
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
from tiercache.testing import objects
from tiercache.testing.objects import NAMESPACE, payload, state_of, to_set

GENERATED = runpy.run_path(str(DEPLOY / "generate.py"))
ALERTS = GENERATED["ALERTS"]
ROWS = {row.name: row for row in TABLE}
RUNBOOK = (DEPLOY / "README.md").read_text()
OF_PROMETHEUS = {"job", "instance", "le"}
DASHBOARDS = [json.loads(path.read_text()) for path in sorted((DEPLOY / "grafana").glob("*.json"))]
PANELS = [panel for page in DASHBOARDS for panel in page["panels"] if panel["type"] != "row"]


def expressions() -> Iterator[str]:
    """Every expression of alerts and dashboards, with Grafana's variables replaced."""
    yield from (alert.expr for alert in ALERTS)
    for panel in PANELS:
        for target in panel["targets"]:
            yield (
                target["expr"]
                .replace("$__rate_interval", "5m")
                .replace("$job", ".+")
                .replace("$instance", ".+")
            )


def allowed(metric: str, label: str) -> set[str] | None:
    """The values that a label of a metric can have; None for values that the table does not know."""
    found: set[str] = set()
    for names, values in ROWS[metric].labels.items():
        joint = (names,) if isinstance(names, str) else names
        if label in joint:
            if isinstance(values, Known):
                return None
            found |= {v if isinstance(v, str) else v[joint.index(label)] for v in values}
    return found


def test_what_is_generated_is_up_to_date() -> None:
    stale = [name for name, text in GENERATED["files"]().items() if (DEPLOY / name).read_text() != text]
    assert stale == [], "run make docs"


@pytest.mark.parametrize("expr", sorted(set(expressions())))
def test_every_metric_label_and_value_exists(expr: str) -> None:
    used = re.findall(rf"\b{PREFIX}(\w+)(?:\{{(.*?)\}})?", expr)
    assert used or 'up{job="tiercache"}' in expr
    labels: set[str] = set()
    for name, matchers in used:
        base = name.removesuffix("_bucket") if name not in ROWS else name
        assert base in ROWS
        assert (name != base) == (ROWS[base].kind is Histogram)
        labels |= {*ROWS[base].label_names}
        for label, value in re.findall(r'(\w+)[=!]~?"(.*?)"', matchers):
            if label not in OF_PROMETHEUS:
                values = allowed(base, label)
                assert label in ROWS[base].label_names
                assert values is None or {*value.split("|")} <= values
    for names in re.findall(r"\b(?:by|on) \((.*?)\)", expr):
        assert {*names.split(", ")} <= labels | OF_PROMETHEUS


def test_every_alert_has_its_place_in_the_runbook_and_in_the_tests() -> None:
    scenarios = (DEPLOY / "prometheus/rules_test.yml").read_text()
    assert re.findall(r"(?m)^### (Tiercache\w+)", RUNBOOK) == [alert.name for alert in ALERTS]
    for alert in ALERTS:
        assert f'alertname="{alert.name}"' in scenarios
        # All series of an alert are in the scenario in which nothing fires, too.
        assert {*re.findall(rf"{PREFIX}\w+", alert.expr)} <= {
            *re.findall(rf"{PREFIX}\w+", scenarios.partition("# Everything is wrong")[0])
        }


def test_promtool_fires_each_alert_for_its_own_reason() -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    run(promtool, "check", "rules", DEPLOY / "prometheus/rules.yml")
    run(promtool, "test", "rules", "rules_test.yml", cwd=DEPLOY / "prometheus")


def test_the_alert_of_what_cannot_be_restored_fires(tmp_path: Path) -> None:
    """Half of the KV is of no use; promtool judges what the daemon says of itself."""
    promtool = tool("promtool", "apt-get install prometheus")
    store = open_backend("memory://?capacity=64MiB")
    useful, useless = (
        [to_set(page, payload(page, 4096), parent=parent) for page, parent in objects.chain(name, 4)]
        for name in ("useful", "useless")
    )
    state = to_set(state_of(("useful", 3)), b"s" * 100, parent=useful[-1].key.page_key)
    store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
    assert set(store.set([*useful, state, *useless])) == {Outcome.STORED}
    names = [f"node_store_{name}_bytes" for name in ("restorable", "dead")]
    with serving(tmp_path / "daemon", store) as (node, _):
        until(lambda: Scrape(node.http_address)("node_store_dead_bytes") > 0)
        scrape = Scrape(node.http_address)
        found = {name: scrape(name) for name in names}
    assert found == {names[0]: 4 * 4096 + 100, names[1]: 4 * 4096}
    series = [
        {"series": f'{PREFIX}{name}{{job="tiercache",instance="a"}}', "values": f"{value}x120"}
        for name, value in found.items()
    ]
    tests = [
        {
            "interval": "1m", "input_series": [*series, {"series": 'up{job="tiercache"}', "values": "1x120"}],
            "promql_expr_test": [{
                "expr": 'count by (alertname) (ALERTS{alertstate="firing"})', "eval_time": "100m",
                "exp_samples": [{"labels": '{alertname="TiercacheRestorableLow"}', "value": 1}],
            }],
        }
    ]  # fmt: skip
    case = {"rule_files": [str(DEPLOY / "prometheus/rules.yml")], "tests": tests}
    (tmp_path / "case.yml").write_text(json.dumps(case))
    run(promtool, "test", "rules", tmp_path / "case.yml")


def test_promtool_understands_every_expression(tmp_path: Path) -> None:
    promtool = tool("promtool", "apt-get install prometheus")
    recorded = [{"record": f"panel:{n}", "expr": expr} for n, expr in enumerate(expressions())]
    (tmp_path / "all.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": recorded}]}))
    run(promtool, "check", "rules", "--lint=none", tmp_path / "all.yml")


@pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page["uid"])
def test_a_dashboard_is_one_that_grafana_can_show(page: dict) -> None:
    panels = page["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert all(x < 24 for x, _ in cells)
        assert not cells & taken
        taken |= cells
    variables = [one["name"] for one in page["templating"]["list"]]
    assert variables == ["datasource", "job", "instance"]
    for panel in PANELS:
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["fieldConfig"]["defaults"]["unit"] in {
            "cps", "binBps", "bytes", "s", "short", "percentunit",
        }  # fmt: skip
        assert panel["description"]
        for target in panel["targets"]:
            assert '{job=~"$job",instance=~"$instance"' in target["expr"]
            assert {*re.findall(r"\{\{(\w+)\}\}", target["legendFormat"])} <= {
                *re.findall(r"\w+", " ".join(re.findall(r"by \((.*?)\)", target["expr"])))
            }


def test_the_dashboards_have_names_of_their_own() -> None:
    assert len({page["uid"] for page in DASHBOARDS}) == len(DASHBOARDS) == 2
    for page in DASHBOARDS:
        for choice in page["templating"]["list"][1:]:
            [name] = re.findall(rf"label_values\({PREFIX}(\w+)", choice["query"])
            assert name in ROWS
