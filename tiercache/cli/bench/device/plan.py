"""The plan of a run: its options, checked before a device is used."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tiercache.cli.bench.device.shapes import MODELS, Shapes, shapes_of
from tiercache.cli.bench.rows import MIB
from tiercache.config import parse_size
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.transfer.cuda import Method

CHOICE: Final = "choice"
"""The value of --method for the calibration's choice."""
COUNTS: Final = (1, 4, 16, 64, 256)
"""Objects of a group."""
QUICK_COUNTS: Final = (1, 16, 256)
"""Objects of a group with --quick."""
_PER_STATE: Final = 32
"""Objects of a mix per state among them: a state is saved where a prompt may continue, not after every page."""
_FEWEST: Final = 5
"""Least value of --repeat."""


class Case(enum.StrEnum):
    """The cases of `bench device`, in the order in which they run."""

    START = "start"
    """Page-locking and calibrating: their times, and the results of the calibration."""
    COPY = "copy"
    """Stores and loads beside one contiguous copy."""
    OVERLAP = "overlap"
    """A load during a forward pass."""
    MATMUL = "matmul"
    """Matrix products with copies beside them."""


class Kind(enum.StrEnum):
    """The kind of objects that are copied."""

    PAGES = "pages"
    STATES = "states"
    MIX = "mix"


@dataclass(frozen=True, slots=True)
class Objects:
    """Numbers of pages and states."""

    pages: int = 0
    states: int = 0

    @property
    def count(self) -> int:
        """Number of pages and states together."""
        return self.pages + self.states

    def nbytes(self, shapes: Shapes) -> int:
        """Return the payload bytes of these objects for a model."""
        return self.pages * shapes.pages.nbytes + self.states * shapes.states.nbytes

    def of(self, pool: PoolName) -> int:
        """Return the number of objects in one pool, KV or MAMBA."""
        return {PoolName.KV: self.pages, PoolName.MAMBA: self.states}[pool]

    def times(self, factor: int) -> Objects:
        """Return both numbers multiplied by `factor`."""
        return Objects(self.pages * factor, self.states * factor)


@dataclass(frozen=True, slots=True)
class Plan:
    """One run of `bench device`.

    `counts`: objects of a group. `most`: payload bytes of the largest group. `methods`: methods to measure, None for all available ones.
    `choice`: whether the calibration's choice is measured too. `compute_seconds`: duration of the matrix products of one measurement.
    """

    models: tuple[Shapes, ...]
    counts: tuple[int, ...]
    most: int
    methods: tuple[Method, ...] | None
    choice: bool
    repeats: int
    cases: frozenset[Case]
    compute_seconds: float = 0.1

    def groups(self, shapes: Shapes) -> Iterator[tuple[Kind, Objects]]:
        """Yield the groups of a model's objects to copy: for each kind, all counts whose payload fits into `most` bytes."""
        for kind in Kind:
            for count in self.counts:
                objects = _objects(kind, count)
                if objects is not None and objects.nbytes(shapes) <= self.most:
                    yield kind, objects

    def prompt(self, shapes: Shapes) -> Objects:
        """Return the objects of a long prompt: up to 255 pages, and one state if it fits together with a page."""
        pages, state = shapes.pages.nbytes, shapes.states.nbytes
        states = 1 if pages + state <= self.most else 0
        return Objects(min(max(COUNTS) - 1, (self.most - states * state) // pages), states)

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest group needs on the device, with one free slot for each kind of object."""
        return self.most + max(s.pages.nbytes + (s.states.nbytes if s.states.nbytes <= self.most else 0) for s in self.models) + MIB


def plan(*, models: str, most: str, methods: str, cases: str, repeats: int, quick: bool) -> Plan:
    """Return the plan that the options describe; raises ConfigError if it cannot be carried out."""
    names = _named("--model", models, MODELS) or (MODELS[:1] if quick else MODELS)
    wanted = _named("--method", methods, (*Method, CHOICE))
    chosen = tuple(shapes_of(name) for name in names)
    try:
        nbytes = parse_size(most.strip())
    except ConfigError as error:
        raise ConfigError(f"--most: {error}") from error
    for shapes in chosen:
        if nbytes < shapes.pages.nbytes:
            raise ConfigError(f"--most {nbytes} does not hold one page of {shapes.name}; give at least {shapes.pages.nbytes}")
    if repeats < _FEWEST:
        raise ConfigError(f"--repeat {repeats} is not possible; medians of fewer than {_FEWEST} runs say little")
    return Plan(
        chosen,
        QUICK_COUNTS if quick else COUNTS,
        nbytes,
        tuple(Method(name) for name in wanted if name != CHOICE) if wanted else None,
        choice=not wanted or CHOICE in wanted,
        repeats=repeats,
        cases=frozenset(Case(name) for name in _named("--case", cases, list(Case)) or Case),
        compute_seconds=0.03 if quick else 0.1,
    )


def _objects(kind: Kind, count: int) -> Objects | None:
    if kind is Kind.PAGES:
        return Objects(pages=count)
    if kind is Kind.STATES:
        return Objects(states=count)
    states = max(1, count // _PER_STATE)
    return Objects(count - states, states) if count > states else None


def _named(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the comma-separated names in lower case, each once; raises ConfigError for an unknown one."""
    known = list(known)
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(","))) if text.strip() else ()
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name!r} is not known; use {', '.join(known)}")
    return names
