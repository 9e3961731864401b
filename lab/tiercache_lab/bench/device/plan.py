"""The plan of a run: the models' geometries and the options. They are checked before a device is used."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Final

from tiercache.config import parse_size
from tiercache.core import PoolName
from tiercache.errors import ConfigError
from tiercache.geometry import Geometry, kv_geometry, state_geometry
from tiercache.models.fields import Fields
from tiercache.models.layer_kinds import LayerKind, every_nth
from tiercache.models.profile import CONFIGS
from tiercache.transfer.cuda import Method
from tiercache_lab.bench.rows import MIB

MODELS: Final = ("qwen3-next-80b-a3b", "qwen3.5-9b", "qwen3.5-35b-a3b")
"""Names of models in `tiercache.models.profile`.

These models have attention in every fourth layer, and gated delta nets in all other layers.
"""
PAGE_SIZE: Final = 64
"""Tokens per page."""


@dataclass(frozen=True, slots=True)
class Shapes:
    """Geometries of one model."""

    name: str
    pages: Geometry
    states: Geometry

    @property
    def layers(self) -> int:
        """Number of layers of the whole model."""
        return max(self.pages.layers[-1], self.states.layers[-1]) + 1


def shapes_of(name: str) -> Shapes:
    """Return the geometries of pages and states of one of `MODELS`.

    A page has 64 tokens. For each attention layer it has K and V of shape `[64, heads, dim]` in bfloat16. A
    state has two tensors for each recurrent layer, as in engines. `conv` has the past inputs of the
    convolution over q, k and v, `[channels, kernel - 1]` in bfloat16. `ssm` has the recurrent state,
    `[value heads, key dim, value dim]` in float32.
    """
    config = CONFIGS[name]
    fields = Fields(config.get("text_config", config), name)
    kinds = every_nth(fields)
    full = [n for n, kind in enumerate(kinds) if kind is LayerKind.FULL]
    key_heads, heads, key_dim, dim, kernel = (
        fields.count(f"linear_{part}")
        for part in ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    )
    channels = 2 * key_heads * key_dim + heads * dim
    parts = (("conv", (channels, kernel - 1), "bfloat16"), ("ssm", (heads, key_dim, dim), "float32"))
    states = [(n, *part) for n, kind in enumerate(kinds) if kind is LayerKind.RECURRENT for part in parts]
    return Shapes(
        name,
        kv_geometry(
            full, fields.count("num_key_value_heads"), fields.count("head_dim"), "bfloat16", PAGE_SIZE
        ),
        state_geometry(states, PAGE_SIZE),
    )


CHOICE: Final = "choice"
"""Value of --method that stands for the method that the calibration chooses."""
COUNTS: Final = (1, 4, 16, 64, 256)
"""Numbers of objects in a group."""
QUICK_COUNTS: Final = (1, 16, 256)
"""Numbers of objects in a group with --quick."""
_PER_STATE: Final = 32
"""In a mix, one of this many objects is a state. States are saved more rarely than pages."""
_MIN_REPEATS: Final = 5
"""Minimum value of --repeat."""


class DeviceCase(enum.StrEnum):
    """Cases of `bench device`, in the order in which they run."""

    START = "start"
    """Durations of page-locking and of calibrating, and the results of the calibration."""
    COPY = "copy"
    """Stores and loads, compared with one contiguous copy."""
    OVERLAP = "overlap"
    """A load during a forward pass."""


class TransferKind(enum.StrEnum):
    """Kinds of objects that are copied."""

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
class DevicePlan:
    """Plan of one run of `bench device`."""

    models: tuple[Shapes, ...]
    counts: tuple[int, ...]
    """Numbers of objects in a group."""
    max_bytes: int
    """Maximum payload bytes of a group."""
    methods: tuple[Method, ...] | None
    """Methods to measure, or None for all available methods."""
    choice: bool
    """Whether to measure the calibration's choice of methods, too."""
    repeats: int
    """Number of runs for each median. One more run comes first and is not counted."""
    cases: frozenset[DeviceCase]

    def groups(self, shapes: Shapes) -> Iterator[tuple[TransferKind, Objects]]:
        """Yield the groups of a model's objects: each kind with all counts that fit into `max_bytes`."""
        for kind in TransferKind:
            for count in self.counts:
                objects = _objects(kind, count)
                if objects is not None and objects.nbytes(shapes) <= self.max_bytes:
                    yield kind, objects

    def prompt(self, shapes: Shapes) -> Objects:
        """Return the objects of a long prompt that fit into `max_bytes`: one state, and up to 255 pages.

        There is no state if a state and a page together do not fit.
        """
        pages, state = shapes.pages.nbytes, shapes.states.nbytes
        states = 1 if pages + state <= self.max_bytes else 0
        return Objects(min(max(COUNTS) - 1, (self.max_bytes - states * state) // pages), states)

    @property
    def device_bytes(self) -> int:
        """Bytes that the largest group needs on the device, with one free slot in each pool."""
        return (
            self.max_bytes
            + max(
                s.pages.nbytes + (s.states.nbytes if s.states.nbytes <= self.max_bytes else 0)
                for s in self.models
            )
            + MIB  # for the alignment of tensors
        )


def plan(*, models: str, most: str, methods: str, cases: str, repeats: int, quick: bool) -> DevicePlan:
    """Return the plan that the options describe.

    Raises ConfigError if the plan cannot be carried out.
    """
    names = _named("--model", models, MODELS) or (MODELS[:1] if quick else MODELS)
    wanted = _named("--method", methods, (*Method, CHOICE))
    chosen = tuple(shapes_of(name) for name in names)
    try:
        nbytes = parse_size(most.strip())
    except ConfigError as error:
        raise ConfigError(f"--most: {error}") from error
    for shapes in chosen:
        if nbytes < shapes.pages.nbytes:
            raise ConfigError(
                f"--most {nbytes} does not hold one page of {shapes.name}; give at least"
                f" {shapes.pages.nbytes}"
            )
    if repeats < _MIN_REPEATS:
        raise ConfigError(
            f"--repeat {repeats} is too small; medians of fewer than {_MIN_REPEATS} runs are not reliable"
        )
    return DevicePlan(
        chosen,
        QUICK_COUNTS if quick else COUNTS,
        nbytes,
        tuple(Method(name) for name in wanted if name != CHOICE) if wanted else None,
        choice=not wanted or CHOICE in wanted,
        repeats=repeats,
        cases=frozenset(DeviceCase(name) for name in _named("--case", cases, list(DeviceCase)) or DeviceCase),
    )


def _objects(kind: TransferKind, count: int) -> Objects | None:
    if kind is TransferKind.PAGES:
        return Objects(pages=count)
    if kind is TransferKind.STATES:
        return Objects(states=count)
    states = max(1, count // _PER_STATE)
    return Objects(count - states, states) if count > states else None


def _named(option: str, text: str, known: Iterable[str]) -> tuple[str, ...]:
    """Return the comma-separated names in lower case, without duplicates.

    Raises ConfigError for an unknown name.
    """
    known = list(known)
    names = tuple(dict.fromkeys(name.strip().lower() for name in text.split(","))) if text.strip() else ()
    for name in names:
        if name not in known:
            raise ConfigError(f"{option} {name!r} is not known; use {', '.join(known)}")
    return names
