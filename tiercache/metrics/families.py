"""From rows of the table to families in a registry."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.core import Metric as Exposed

from tiercache.metrics.table import PREFIX, SECONDS, Known, Metric


class Families:
    """The families of some rows, with every label set at 0 from the start, so that "never happened" and "not measured" look different.

    `known` has the values of labels that the table does not know. `counter`, `gauge` and `histogram` find the child of one label set, the
    values in the order of the row; hot paths keep what they found. What somebody else counts is not counted again: see `tell`.

    Thread safety: any thread; prometheus_client locks for us.
    """

    def __init__(self, rows: Iterable[Metric], registry: CollectorRegistry | None = None, **known: Iterable[str]) -> None:
        self.registry: Final = registry or CollectorRegistry()
        self._rows: Final = {row.name: row for row in rows}
        self._families: Final = {row.name: self._make(row) for row in self._rows.values()}
        self._children: dict[tuple[str, ...], Any] = {}
        self._fill(self._rows.values(), known)

    def add(self, **known: str) -> None:
        """Make the label sets of one more value of labels that the table does not know."""
        self._fill(
            [row for row in self._rows.values() if known.keys() & {*row.label_names}], {name: (value,) for name, value in known.items()}
        )

    def tell(self, name: str, read: Mapping[tuple[str, ...], Callable[[], float | None]]) -> None:
        """From now on these say the values of a row by label set, at every scrape and in its thread; None: it is not there."""
        self.registry.unregister(self._families[name])
        self.registry.register(_Told(self._rows[name], read))

    def counter(self, name: str, *labels: str) -> Counter:
        """One label set of a counter."""
        child = self._children[(name, *labels)]
        assert isinstance(child, Counter)
        return child

    def gauge(self, name: str, *labels: str) -> Gauge:
        """One label set of a gauge."""
        child = self._children[(name, *labels)]
        assert isinstance(child, Gauge)
        return child

    def histogram(self, name: str, *labels: str) -> Histogram:
        """One label set of a histogram."""
        child = self._children[(name, *labels)]
        assert isinstance(child, Histogram)
        return child

    def total(self, name: str, **where: str) -> float:
        """The sum over all samples of this name that agree with `where`, for tests and status pages."""
        samples = (s for family in self.registry.collect() for s in family.samples if s.name == PREFIX + name)
        return sum(s.value for s in samples if where.items() <= s.labels.items())

    def _make(self, row: Metric) -> Counter | Gauge | Histogram:
        more: dict[str, Any] = {"buckets": SECONDS} if row.kind is Histogram else {}
        return row.kind(PREFIX + row.name, row.help, row.label_names, registry=self.registry, **more)

    def _fill(self, rows: Iterable[Metric], known: Mapping[str, Iterable[str]]) -> None:
        values = {name: tuple(given) for name, given in known.items()}
        for row in rows:
            for labels in label_sets(row, values):
                family = self._families[row.name]
                self._children[(row.name, *labels)] = family.labels(*labels) if labels else family


def label_sets(row: Metric, known: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """All label sets of a row; none while a label has no value yet."""
    columns = []
    for names, values in row.labels.items():
        given = known.get(str(names), ()) if isinstance(values, Known) else values
        columns.append([(value,) if isinstance(value, str) else value for value in given])
    for parts in product(*columns):
        yield tuple(value for part in parts for value in part)


class _Told:
    """A row whose values somebody else knows; prometheus_client collects it like a family of its own."""

    def __init__(self, row: Metric, read: Mapping[tuple[str, ...], Callable[[], float | None]]) -> None:
        self._row: Final = row
        self._read: Final = read

    def describe(self) -> list[Exposed]:
        """The name, which no other collector may use; nobody is asked for it."""
        return [self._family()]

    def collect(self) -> Iterator[Exposed]:
        """The present values."""
        family = self._family()
        for labels, read in self._read.items():
            if (value := read()) is not None:
                family.add_metric(labels, value)
        if family.samples:
            yield family

    def _family(self) -> CounterMetricFamily | GaugeMetricFamily:
        kind = CounterMetricFamily if self._row.kind is Counter else GaugeMetricFamily
        return kind(PREFIX + self._row.name, self._row.help, labels=self._row.label_names)
