"""Columns of units that a store cannot fill, because it knows less about its objects than an index does."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tiercache.policy.base import Column


class StoredColumns(ABC):
    """Base for the `Units` of a store, with zeros in the columns that a store does not know.

    A store does not know why a state was taken or which requests led to the state, and there is no tier below
    a store. Subclasses provide the other columns, and `__len__`.

    Thread safety: only the thread that calls the policy uses the columns, and only during the call.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def queue(self) -> int:
        """0: a store has one queue."""
        return 0

    @property
    def population(self) -> int:
        """Number of units."""
        return len(self)

    @property
    def created(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def checkpoint(self) -> Column:
        """Zeros (`CheckpointKind.NONE`): not known to a store."""
        return self._unknown()

    @property
    def lineage(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def grown(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def ending(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def expected(self) -> Column:
        """Zeros: hints do not reach a store."""
        return self._unknown()

    @property
    def digest(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def covered(self) -> Column:
        """Zeros: there is no tier below a store."""
        return self._unknown()

    def _unknown(self) -> Column:
        return np.zeros(len(self), np.int64)
