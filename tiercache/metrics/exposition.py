"""Export of tiercache's metrics through prometheus_client."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import Metric as Exposed

from tiercache.metrics.families import Families
from tiercache.metrics.table import PREFIX, Metric

CONTENT_TYPE: Final = "text/plain; version=0.0.4; charset=utf-8"
"""Content type of `render`'s text."""


def register(families: Families, registry: CollectorRegistry | None = None) -> CollectorRegistry:
    """Make a registry of prometheus_client export these metrics, and return the registry.

    If `registry` is None, a new registry is made. `families` has the metrics and their current numbers.

    Raises ValueError if the registry already has one of the names.
    """
    found = CollectorRegistry() if registry is None else registry
    found.register(_Collector(families))
    return found


def render(registry: CollectorRegistry) -> bytes:
    """Return all metrics of a registry in Prometheus's text format."""
    return generate_latest(registry)


class _Collector:
    """Collector of prometheus_client that reads the numbers of `families`.

    A *family* is one metric with all of its label sets.

    Thread safety: any thread.
    """

    def __init__(self, families: Families) -> None:
        self._families: Final = families

    def describe(self) -> Iterator[Exposed]:
        """Yield the families without values, so that the registry reserves their names."""
        return map(_family, self._families.rows.values())

    def collect(self) -> Iterator[Exposed]:
        """Yield the families with their current values. Leave out a family that has no known value."""
        for row in self._families.rows.values():
            family = _family(row)
            for sample in self._families.samples(row):
                family.add_sample(PREFIX + sample.name, dict(sample.labels), sample.value)
            if family.samples:
                yield family


def _family(row: Metric) -> Exposed:
    # In prometheus_client, the family of a counter has no suffix, but the counter's samples end in "_total".
    return Exposed(PREFIX + row.name.removesuffix("_total"), row.help, row.kind.__name__.lower())
