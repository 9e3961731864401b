"""Families of instruments: one for each row of the table of metrics, with one instrument for each label set.

A label set is one combination of values of the row's labels. prometheus_client, which exports the families,
is imported when a registry is wanted; counting works without.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import product
from threading import Lock
from typing import TYPE_CHECKING, Final, NamedTuple

from tiercache.core import PoolName
from tiercache.errors import MissingExtraError
from tiercache.metrics.instruments import Counter, Gauge, Histogram, Instrument
from tiercache.metrics.table import CONTROLLER, PREFIX, Known, Metric

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry
    from prometheus_client.core import Metric as Exposed

ReadAll = Callable[[], Mapping[tuple[str, ...], float | None]]
"""Function that returns the current values of all label sets of a row."""


class Sample(NamedTuple):
    """One number of a metric, for example one bucket of a histogram. `name` has no prefix."""

    name: str
    labels: Mapping[str, str]
    value: float


class Families:
    """Instruments of some rows, one for each label set.

    Every label set exists from the start, with the value 0. So 0 means that an event never happened. If a
    label set is missing, the event is not measured.

    `known`: values of labels whose values are not in the table.

    `counter`, `gauge` and `histogram` return the instrument of one label set, and take the label values in
    the order of the row. Code that runs often should keep the instrument. With `tell`, the values of a row
    come from functions instead of instruments.

    Thread safety: any thread.
    """

    def __init__(
        self, rows: Iterable[Metric], registry: CollectorRegistry | None = None, **known: Iterable[str]
    ) -> None:
        self.rows: Final = {row.name: row for row in rows}
        self._instruments: Final[dict[str, dict[tuple[str, ...], Instrument]]] = {n: {} for n in self.rows}
        self._reads: Final[dict[str, ReadAll]] = {}
        self._fill(self.rows.values(), known)
        self._lock: Final = Lock()
        self._registry: CollectorRegistry | None = None
        if registry is not None:
            self._registry = self._registered(registry)

    @property
    def registry(self) -> CollectorRegistry:
        """Registry of prometheus_client with these families; made at the first use if none was given.

        Raises ConfigError if prometheus_client is not installed.
        """
        with self._lock:
            if self._registry is None:
                self._registry = self._registered(None)
            return self._registry

    def _registered(self, registry: CollectorRegistry | None) -> CollectorRegistry:
        """Export these families through a registry; raises ValueError if it has one of their names."""
        try:
            from prometheus_client import CollectorRegistry
        except ModuleNotFoundError as error:
            raise MissingExtraError("a registry of metrics", "metrics", error) from error
        found = CollectorRegistry() if registry is None else registry
        found.register(_Collector(self))
        return found

    def add(self, **known: str) -> None:
        """Add one value to each of the given labels. The table must not list the values of these labels."""
        self._fill(
            [row for row in self.rows.values() if known.keys() & {*row.label_names}],
            {name: (value,) for name, value in known.items()},
        )

    def tell(self, name: str, read: ReadAll) -> None:
        """Take the label sets and values of a row from a function from now on.

        Every scrape calls the function, in the scraper's thread. A label set whose value is None is left out.
        """
        if name not in self.rows:
            raise KeyError(name)
        self._reads[name] = read

    def counter(self, name: str, *labels: str) -> Counter:
        """Return the counter of one label set; raise KeyError if the row has no such label set."""
        found = self._instruments[name][labels]
        assert isinstance(found, Counter)
        return found

    def gauge(self, name: str, *labels: str) -> Gauge:
        """Return the gauge of one label set; raise KeyError if the row has no such label set."""
        found = self._instruments[name][labels]
        assert isinstance(found, Gauge)
        return found

    def histogram(self, name: str, *labels: str) -> Histogram:
        """Return the histogram of one label set; raise KeyError if the row has no such label set."""
        found = self._instruments[name][labels]
        assert isinstance(found, Histogram)
        return found

    def total(self, name: str, **where: str) -> float:
        """Return the sum of the samples that have this name and the labels in `where`; for status pages."""
        found = (sample for row in self.rows.values() for sample in self.samples(row))
        return sum(s.value for s in found if s.name == name and where.items() <= s.labels.items())

    def samples(self, row: Metric) -> Iterator[Sample]:
        """Yield every number of a row. A histogram has its buckets (label `le`), its count and its sum."""
        for labels, value in self._values(row):
            named = dict(zip(row.label_names, labels, strict=True))
            if not isinstance(value, Histogram):
                yield Sample(row.name, named, value)
                continue
            buckets, total = value.read()
            for end, count in buckets:
                yield Sample(f"{row.name}_bucket", named | {"le": end}, count)
            yield Sample(f"{row.name}_count", named, buckets[-1][1])
            yield Sample(f"{row.name}_sum", named, total)

    def _values(self, row: Metric) -> Iterator[tuple[tuple[str, ...], float | Histogram]]:
        """Yield the label sets of a row, each with its current number or its histogram."""
        if (reads := self._reads.get(row.name)) is not None:
            for labels, value in reads().items():
                if value is not None:
                    yield labels, value
            return
        # Loop over a copy, because `add` may add label sets in another thread at the same time.
        for labels, found in list(self._instruments[row.name].items()):
            yield labels, found if isinstance(found, Histogram) else found.value

    def _fill(self, rows: Iterable[Metric], known: Mapping[str, Iterable[str]]) -> None:
        values = {name: tuple(given) for name, given in known.items()}
        for row in rows:
            for labels in label_sets(row, values):
                self._instruments[row.name].setdefault(labels, row.kind())


def label_sets(row: Metric, known: Mapping[str, Sequence[str]]) -> Iterator[tuple[str, ...]]:
    """Yield all label sets of a row; none if a label has no values yet."""
    # An entry of `row.labels` stands for one label or for several. Its column has a tuple for each of its
    # values, with one item per label.
    columns = []
    for names, values in row.labels.items():
        given = known.get(str(names), ()) if isinstance(values, Known) else values
        columns.append([(value,) if isinstance(value, str) else value for value in given])
    for parts in product(*columns):
        yield tuple(value for part in parts for value in part)


class Metrics(Families):
    """Metrics of one controller, which has the given pools.

    All methods take the label values of a metric in the order in which `metrics.table` lists its labels.

    Thread safety: any thread.
    """

    def __init__(self, pools: Iterable[PoolName], registry: CollectorRegistry | None = None) -> None:
        super().__init__(CONTROLLER, registry, pool=[str(pool) for pool in pools])

    def increment(self, name: str, *labels: str, by: float = 1) -> None:
        """Add `by` to a counter."""
        found = self._instruments[name][labels]
        assert isinstance(found, Counter)
        found.inc(by)

    def set(self, name: str, *labels: str, to: float) -> None:
        """Set a gauge to `to`."""
        self.gauge(name, *labels).set(to)

    def value(self, name: str, *labels: str) -> float:
        """Return the present value of one label set, for tests and status pages."""
        return self.total(name, **dict(zip(self.rows[name].label_names, labels, strict=True)))


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
    from prometheus_client.core import Metric as Exposed

    # In prometheus_client, the family of a counter has no suffix, but the counter's samples end in "_total".
    return Exposed(PREFIX + row.name.removesuffix("_total"), row.help, row.kind.__name__.lower())
