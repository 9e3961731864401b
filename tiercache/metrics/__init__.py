"""Metrics: counters, gauges and histograms by name and label, and their export to Prometheus.

Principles:

1. A metric exists where the table has its row; names, help and labels are nowhere else.
2. Labels have few values; no tokens, keys or names of prompts are among them.
3. Counting takes no I/O and no package beyond the library's own.

Order of reading:

1. `table` lists all metrics.
2. `instruments` has the counters, gauges and histograms.
3. `families` makes one instrument for each label set of a metric, and exports them through prometheus_client.

`docs/generator/metrics.py` writes docs/metrics.md.
"""

from tiercache.metrics.families import Families, Metrics
from tiercache.metrics.table import CONTROLLER, HIT, MISS, NODE, STORE, TABLE, Metric

__all__ = ["CONTROLLER", "HIT", "MISS", "NODE", "STORE", "TABLE", "Families", "Metric", "Metrics"]
