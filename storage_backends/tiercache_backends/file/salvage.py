"""Salvage of a catalog's file, even if LMDB's trees are damaged: each LMDB page in use is searched for records with a valid guard.

A sound catalog is read completely and exactly. Of a damaged one only what lay on the damaged pages is missing. Where LMDB's list of free
pages is damaged, records that were removed before are found too, and the caller must check which of them still have their bytes.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import closing, suppress
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import as_strided

from tiercache.core import PoolName
from tiercache.storage.env import Env
from tiercache_backends.file.catalog import DATA, Loaded
from tiercache_backends.file.names import Names
from tiercache_backends.file.records import RECORD, Records, sound, unpack_extents
from tiercache_backends.file.space import Extent
from tiercache_backends.local.lmdb_file import LmdbFile, Node, Pages
from tiercache_backends.local.names import unpack_name

_POOL_AT: Final = RECORD.fields["pool"][1]  # type: ignore[index]
_POOLS: Final = np.array([np.frombuffer(pool.encode()[:2], np.uint16)[0] for pool in PoolName])
"""First two bytes of each pool's name, as one integer."""
_NUMBER_BYTES: Final = 8
_EXTENT_BYTES: Final = 12
_LONGEST_NAME: Final = 64


class Salvaged(NamedTuple):
    """Result of a salvage; `loaded.damaged`: a record had lost its further extents."""

    loaded: Loaded
    names: Names


def salvage(env: Env, directory: str) -> Salvaged:
    """Read the catalog in `directory`; return an empty one where there is none; raise OSError."""
    records: list[Records] = [np.empty(0, RECORD)]
    names = Names()
    further: dict[int, list[tuple[Extent, ...]]] = {}
    try:
        file = LmdbFile(env, os.path.join(directory, DATA))
    except FileNotFoundError:
        return Salvaged(Loaded(records[0], {}), names)
    with closing(file):
        for first, pages in file.pages():
            for number, page in enumerate(pages, first):
                if not file.is_whole(page, number):
                    records.append(_scattered(page))
                    continue
                records.append(_believed(file.keys(page, RECORD.itemsize)))
                for node in file.nodes(page, number):
                    if len(node.value) == RECORD.itemsize and len(one := _believed(np.frombuffer(node.value, np.uint8)[None])):
                        records.append(one)
                    else:
                        _take(node, names, further)
    # Joined as bytes: concatenating arrays of records would convert all their integers to the native byte order.
    found = np.concatenate([some.view(np.uint8) for some in records]).view(RECORD)
    return Salvaged(_loaded(found, further), names)


def _believed(raw: Pages) -> Records:
    """Return those of the values, of shape (n, 192), that are sound records."""
    found = np.ascontiguousarray(raw).reshape(-1).view(RECORD)
    return found[sound(found)]


def _scattered(page: Pages) -> Records:
    """Return all sound records in a damaged page, at any even offset, because LMDB puts values at even offsets."""
    places = (len(page) - RECORD.itemsize) // 2 + 1
    at = np.flatnonzero(np.isin(page.view(np.uint16)[_POOL_AT // 2 : _POOL_AT // 2 + places], _POOLS))
    return _believed(as_strided(page, (places, RECORD.itemsize), (2, 1))[at])


def _take(node: Node, names: Names, further: dict[int, list[tuple[Extent, ...]]]) -> None:
    """Record what a node says of a namespace, or of an object's further extents."""
    if len(node.key) == _NUMBER_BYTES and node.value and len(node.value) % _EXTENT_BYTES == 0:
        further.setdefault(int.from_bytes(node.key), []).append(unpack_extents(node.value))
    if 0 < len(node.key) <= _LONGEST_NAME:
        with suppress(ValueError):
            names.add(node.key, *unpack_name(node.key, node.value))


def _loaded(found: Records, further: Mapping[int, list[tuple[Extent, ...]]]) -> Loaded:
    """Return the records by age, each once, with their further extents; those that lost theirs are left out."""
    order = np.lexsort((found["stored_at"], found["guard"], found["number"]))
    found = found[order]
    twice = (found["number"][1:] == found["number"][:-1]) & (found["guard"][1:] == found["guard"][:-1])
    found = found[np.concatenate([[True], ~twice])] if len(found) else found
    numbers, more = found["number"].tolist(), found["more"].tolist()
    extents: dict[int, tuple[Extent, ...]] = {}
    whole: npt.NDArray[np.bool_] = found["more"] == 0
    for i in np.flatnonzero(~whole).tolist():
        fitting = [some for some in further.get(numbers[i], ()) if len(some) == more[i]]
        if fitting and numbers[i] not in extents:
            extents[numbers[i]] = fitting[-1]
            whole[i] = True
    return Loaded(found[whole], extents, damaged=not whole.all())
