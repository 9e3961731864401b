"""Unit columns that a store cannot fill: it knows less of its objects than an index knows of its units."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tiercache.policy.base import Column


class StoredColumns(ABC):
    """Base for `Units` of a store: zeros for the columns about why a state was taken, what led to it, and what the tier below holds.

    Subclasses have the other columns, and a length.

    Thread safety: during one call of the policy.
    """

    @abstractmethod
    def __len__(self) -> int: ...

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
    def digest(self) -> Column:
        """Zeros: not known to a store."""
        return self._unknown()

    @property
    def covered(self) -> Column:
        """Zeros: there is no tier below a store."""
        return self._unknown()

    def _unknown(self) -> Column:
        return np.zeros(len(self), np.int64)
