"""Read-only catalog: the contents of its file in memory, so that nothing of the file is mapped, locked or written."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from errno import EROFS

import numpy as np

from tiercache.storage.base import NamespaceRecord
from tiercache_backends.file.catalog import Catalog, Loaded
from tiercache_backends.file.records import Records
from tiercache_backends.file.salvage import Salvaged
from tiercache_backends.file.space import Extent


class Snapshot(Catalog):
    """The records of a catalog as they were found; changes are refused.

    Thread safety: immutable.
    """

    def __init__(self, salvaged: Salvaged, nbytes: int) -> None:  # no environment is opened, so the parent's does not run
        self._loaded = salvaged.loaded
        self._known = salvaged.names
        self._nbytes = nbytes
        self.is_damaged = False

    def load(self) -> Loaded:
        """Return what was found."""
        return self._loaded

    def apply(
        self,
        records: Records | None = None,
        further: Mapping[int, tuple[Extent, ...]] | None = None,
        removals: Sequence[int] = (),
    ) -> None:
        """Raise OSError (EROFS), because the catalog is read-only."""
        raise OSError(EROFS, os.strerror(EROFS))

    def page(self, cursor: bytes, count: int) -> Iterator[Records]:
        """Yield the records after `cursor`, at most `count`, as one array."""
        numbers = self._loaded.records["number"]
        start = int(np.searchsorted(numbers, int.from_bytes(cursor), side="right")) if cursor else 0
        yield self._loaded.records[start : start + count]

    def find(self, numbers: Sequence[int]) -> Records:
        """Return the records with these numbers that exist."""
        return self._loaded.records[np.isin(self._loaded.records["number"], np.array(numbers, np.uint64))]

    def namespaces(self) -> list[NamespaceRecord]:
        """Return every namespace whose identity is known."""
        return list(self._known.records.values())

    def nbytes(self) -> int:
        """Return the bytes of the catalog's file."""
        return self._nbytes

    def close(self) -> None:
        """Do nothing, because no file is open."""
