"""Metrics: counters, gauges and histograms by name and label, and their exposition for Prometheus.

Order of reading:

1. `table` lists all metrics.
2. `instruments` has the counters, gauges and histograms.
3. `families` makes one instrument for each label set of a metric.
4. `document` writes docs/metrics.md, which `python -m tiercache.metrics` prints.
5. `exposition` connects families to prometheus_client. The daemon's HTTP port serves them.

`exposition` needs the extra `metrics`, so this package does not import it. Counting works without.
"""

from tiercache.metrics.controller import Metrics
from tiercache.metrics.families import Families
from tiercache.metrics.table import CONTROLLER, HIT, MISS, NODE, STORE, TABLE, Metric

__all__ = ["CONTROLLER", "HIT", "MISS", "NODE", "STORE", "TABLE", "Families", "Metric", "Metrics"]
