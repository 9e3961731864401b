"""The table of metrics, and what is made of it."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from tiercache.core import PoolName
from tiercache.metrics import TABLE, Families, Metric, Metrics
from tiercache.metrics.families import label_sets
from tiercache.metrics.instruments import Counter, Gauge, Histogram
from tiercache.metrics.table import Known

ROOT = Path(__file__).parent.parent.parent
KINDS = {
    "Counter", "Gauge", "Histogram", "Summary", "Info", "Enum", "CounterMetricFamily", "GaugeMetricFamily",
}  # fmt: skip

ROWS = (
    Metric(
        "things_total",
        Counter,
        "Things.",
        {"colour": ("red", "blue"), ("size", "shape"): (("big", "round"), ("small", "flat"))},
    ),
    Metric("level", Gauge, "A level."),
    Metric("seconds", Histogram, "Times.", {"who": Known("whoever")}),
)


# -- the table


def test_every_row_has_a_name_of_its_own_that_says_what_it_is() -> None:
    assert len({row.name for row in TABLE}) == len(TABLE)
    for row in TABLE:
        assert re.fullmatch("[a-z][a-z_]+", row.name)
        assert row.name.endswith("_total") == (row.kind is Counter), row.name
        assert (row.kind is not Histogram) or row.name.endswith("_seconds")
        assert row.help.endswith(".")
        assert len(set(row.label_names)) == len(row.label_names)
        known = {name: ["one"] for name in row.label_names}
        sets = list(label_sets(row, known))
        assert len(set(sets)) == len(sets) <= 300, "each label set once, and not too many"


def test_no_metric_is_made_outside_the_table() -> None:
    for path in [*(ROOT / "tiercache").rglob("*.py"), *(ROOT / "storage_backends").rglob("*.py")]:
        if path.is_relative_to(ROOT / "tiercache" / "metrics"):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("prometheus_client"):
                assert not KINDS & {alias.name for alias in node.names}, f"{path}:{node.lineno}"
            assert not (
                isinstance(node, ast.Import)
                and any(a.name.startswith("prometheus_client") for a in node.names)
            ), str(path)


def test_the_document_is_made_from_the_table() -> None:
    command = [sys.executable, ROOT / "docs" / "generator" / "metrics.py"]
    made = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT).stdout
    assert (ROOT / "docs" / "metrics.md").read_text() == made, "run `make docs`"
    used = set(re.findall(r"tiercache_(\w+)", "".join(re.findall(r"```promql\n(.*?)```", made, re.DOTALL))))
    assert {name.removesuffix("_bucket") for name in used} <= {row.name for row in TABLE}


# -- families


def test_every_label_set_is_there_at_0_and_joint_labels_only_in_their_combinations() -> None:
    families = Families(ROWS, who=["ann"])
    shown = {(s.name, *s.labels.values()): s.value for f in families.registry.collect() for s in f.samples}
    things = {key[1:]: value for key, value in shown.items() if key[0] == "tiercache_things_total"}
    assert things == {
        (colour, *joint): 0 for colour in ("red", "blue") for joint in (("big", "round"), ("small", "flat"))
    }  # fmt: skip
    assert shown["tiercache_level",] == 0
    assert shown["tiercache_seconds_count", "ann"] == 0
    with pytest.raises(KeyError):
        families.counter("things_total", "red", "big", "flat")
    families.add(who="bob")
    families.histogram("seconds", "bob").observe(1)
    assert families.total("seconds_count") == 1
    families.counter("things_total", "red", "big", "round").inc(3)
    assert families.total("things_total", colour="red") == families.total("things_total") == 3


def test_what_others_count_is_asked_at_each_scrape_and_may_be_missing() -> None:
    families = Families(ROWS)
    values: list[float | None] = [7, None]
    families.tell("level", lambda: {(): values.pop(0)})
    assert families.total("level") == 7
    assert "level" not in generate_latest(families.registry).decode()


def test_metrics_of_a_controller_have_its_pools_only() -> None:
    metrics = Metrics([PoolName.KV])
    metrics.increment("lookups_total", "host", "kv", "hit", "none")
    assert metrics.value("lookups_total", "host", "kv", "hit", "none") == 1
    text = generate_latest(metrics.registry).decode()
    assert 'pool="mamba"' not in text
    assert 'result="hit",tier="host"} 1.0' in text
    assert 'reason="absent",result="hit"' not in text, "a hit has no reason"


def test_the_text_parses_and_has_no_time_stamps_of_creation() -> None:
    families = Families(
        TABLE, pool=["kv"], store=["a"], principal=["b"], version=["1"], tier=["c"], tenant=["d"]
    )
    text = generate_latest(families.registry).decode()
    assert "_created" not in text
    parsed = {family.name: family for family in text_string_to_metric_families(text)}
    assert {f"tiercache_{row.name}".removesuffix("_total") for row in TABLE} == parsed.keys()
    for row in TABLE:
        assert parsed[f"tiercache_{row.name}".removesuffix("_total")].type == row.kind.__name__.lower()
