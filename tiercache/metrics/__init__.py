"""Counters, gauges and histograms, in registries of their own: nothing of tiercache is in prometheus_client's default registry.

Read `table` (every metric there is), `families` (what is made of its rows), `document` (docs/metrics.md, printed by
`python -m tiercache.metrics`), `endpoint` (where Prometheus gets them).
"""

from tiercache.metrics.controller import Metrics
from tiercache.metrics.endpoint import Endpoint
from tiercache.metrics.families import Families
from tiercache.metrics.table import CONTROLLER, HIT, MISS, NODE, STORE, TABLE, Metric

__all__ = ["CONTROLLER", "HIT", "MISS", "NODE", "STORE", "TABLE", "Endpoint", "Families", "Metric", "Metrics"]
