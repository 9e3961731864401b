"""Arguments and answers of storage v2 calls: what a lookup asks and means, and checks of what callers give.

The checks are made before anything is read or written; they raise InputError for an invalid argument.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from math import inf
from typing import Any, Final, NamedTuple

import numpy as np

from tiercache.core import (
    HitPolicy,
    ObjectKey,
    PoolName,
    PoolPresence,
    PoolTransfer,
    PoolTransferResult,
    check_trailing,
    restorable_prefixes,
)
from tiercache.errors import InputError
from tiercache.keys import KEY_BYTES
from tiercache.text import shown

_DEPTHS: Final = 2**32
"""All depths are below this limit, because stores keep a depth in 32 bits."""


ANCHOR: Final = PoolName.KV
"""Pool that limits every restore: no depth beyond its leading run of stored pages can be restored.

See `core.restorable_prefixes`. Where only states are registered, the sequence itself takes its place.
"""


class PoolQuery(NamedTuple):
    """Query for the objects of one pool along a sequence of pages, with the pool's hit policy.

    Example of two queries for pages 1 to 5:

        anchor     known = 2 | k3   k4   k5      the caller already holds pages 1 and 2
        states     k1   k2   k3   k4   k5        known = 0: a restore may also end on page 1 or 2
    """

    keys: Sequence[ObjectKey] | None
    """Objects of the pages after the first `known`, one per page; None if no page has an object."""
    hit_policy: HitPolicy = HitPolicy.ALL_PAGES
    trailing: int = 1
    """Number of last pages that a prefix needs (for TRAILING_PAGES)."""
    known: int = 0
    """Number of pages at the start that count as stored without a lookup."""


def wanted_objects(queries: Mapping[Any, PoolQuery]) -> list[ObjectKey]:
    """Return the objects of all queries, in the order in which `answer` expects the store's answers."""
    return [key for query in queries.values() for key in query.keys or ()]


def answer(
    queries: Mapping[Any, PoolQuery], pages: int, there: Sequence[bool], anchor: Any = ANCHOR
) -> PoolTransferResult:
    """Return the depths at which a sequence of `pages` pages can be restored, and which objects are stored.

    `there` tells for each object of `wanted_objects` whether the store has the object. `anchor` is the pool
    that limits every restore (see `ANCHOR`); None if there are states alone.
    """
    answers = iter(there)
    presence: dict[Any, PoolPresence] = {}
    for name, query in queries.items():
        found = np.zeros(pages, np.bool_)
        if query.keys is not None:
            found[: query.known] = True
            found[query.known :] = [next(answers) for _ in query.keys]
        presence[name] = PoolPresence(query.hit_policy, found, query.trailing)
    present = {name: pool.present for name, pool in presence.items()}
    return replace(restorable_prefixes(presence, anchor), present=present)


def check_transfers(transfers: Any) -> None:
    """Check the arguments of a call as far as that is possible without the pools."""
    if not isinstance(transfers, list | tuple) or not all(isinstance(t, PoolTransfer) for t in transfers):
        raise InputError("a storage call takes a list of PoolTransfer, one or more per pool")
    for transfer in transfers:
        _check_column(transfer.keys, f"keys of pool {transfer.pool}")
        if not isinstance(transfer.hit_policy, HitPolicy):
            raise InputError(
                f"pool {transfer.pool}: hit policy {shown(transfer.hit_policy)} is unknown; give a member of"
                " HitPolicy"
            )
        check_trailing(transfer.trailing, transfer.pool)


def check_keys(keys: Any) -> None:
    """Check that page keys are a list of byte strings of 32 bytes each."""
    _check_column(keys, "page keys")
    for key in _outside(keys, {bytes}, lambda: set(map(len, keys)) <= {KEY_BYTES}):
        if not isinstance(key, bytes) or len(key) != KEY_BYTES:
            raise InputError(
                f"{shown(key)} is no page key; these are {KEY_BYTES} bytes (see tiercache.page_keys)"
            )


def handles_of(transfer: PoolTransfer) -> list[int]:
    """Return the handles as a list of numbers >= 0, one per key."""
    handles: Any = transfer.handles
    is_row = isinstance(handles, np.ndarray) and handles.ndim == 1
    if not is_row or (handles.size and handles.dtype.kind not in "iu"):
        raise InputError(
            f"pool {transfer.pool}: handles come as a one-dimensional array of integers, not as"
            f" {shown(handles)}"
        )
    if len(handles) != len(transfer.keys):
        raise InputError(
            f"pool {transfer.pool}: {len(transfer.keys)} keys and {len(handles)} handles; give one handle"
            " per key"
        )
    if handles.size and handles.min() < 0:
        raise InputError(
            f"pool {transfer.pool}: {handles.min()} is no handle; give those that the pool handed out"
        )
    found: list[int] = handles.tolist()
    return found


def depths_of(transfer: PoolTransfer) -> list[int | None]:
    """Return the depth of each key; all are None if the transfer gives no depths."""
    given: Any = transfer.depths
    column = _per_key(transfer, given.tolist() if isinstance(given, np.ndarray) else given, "depths")
    for depth in _outside(column, {int}, lambda: min(column) >= 0 and max(column) < _DEPTHS):
        if isinstance(depth, bool) or not isinstance(depth, int | np.integer) or not 0 <= depth < _DEPTHS:
            raise _impossible(transfer, depth, "depth", "pages up to the object's end, below 2**32")
    return [int(depth) for depth in column] or [None] * len(transfer.keys)


def parents_of(transfer: PoolTransfer) -> list[bytes | None]:
    """Return the parent of each key: None for a first page; all None if the transfer gives no parents."""
    column = _per_key(transfer, transfer.parents, "parents")
    for parent in _outside(column, {bytes}, lambda: set(map(len, column)) <= {0, KEY_BYTES}):
        if not isinstance(parent, bytes) or len(parent) not in (0, KEY_BYTES):
            raise _impossible(transfer, parent, "parent", f"{KEY_BYTES} bytes, or none for a first page")
    return [parent or None for parent in column] or [None] * len(transfer.keys)


def values_of(transfer: PoolTransfer) -> list[float | None]:
    """Return the value of each key; all are None if the transfer gives no values."""
    column = _per_key(transfer, transfer.values, "values")
    for value in column:
        if value is not None and not (isinstance(value, float) and 0.0 <= value < inf):
            raise _impossible(transfer, value, "value", "a finite float from 0.0, or None")
    return list(column) or [None] * len(transfer.keys)


def _outside(column: Sequence[Any], kinds: set[type], is_within: Callable[[], bool]) -> Sequence[Any]:
    """Return nothing if the whole column is right at a glance, else all of it, to be looked at one by one."""
    return () if not column or (set(map(type, column)) <= kinds and is_within()) else column


def _impossible(transfer: PoolTransfer, value: object, noun: str, wanted: str) -> InputError:
    return InputError(f"pool {transfer.pool}: {shown(value)} is no {noun}; give {wanted}")


def _per_key(transfer: PoolTransfer, column: Any, what: str) -> Sequence[Any]:
    _check_column(column, f"{what} of pool {transfer.pool}")
    found: Sequence[Any] = column
    if len(found) not in (0, len(transfer.keys)):
        raise InputError(
            f"pool {transfer.pool}: {len(transfer.keys)} keys and {len(found)} {what}; give one per key, or"
            " none"
        )
    return found


def _check_column(column: Any, what: str) -> None:
    if isinstance(column, bytes | bytearray | str | memoryview) or not isinstance(column, Sequence):
        raise InputError(f"{what} come as a list, one for each page, not as {shown(column)}")
