"""What a store can tell a policy of its objects, which is less than an index knows of its units."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np

from tiercache.policy.base import Column


class StoredColumns(ABC):
    """The columns of `Units` that a store has no knowledge for: why a state was taken, what led to it, and what is below.

    Subclasses have the others, and a length. Thread safety: during one call of the policy.
    """

    @abstractmethod
    def __len__(self) -> int: ...

    @property
    def checkpoint(self) -> Column:
        """Not known."""
        return self._unknown()

    @property
    def lineage(self) -> Column:
        """Not known."""
        return self._unknown()

    @property
    def grown(self) -> Column:
        """Not known."""
        return self._unknown()

    @property
    def digest(self) -> Column:
        """Not known."""
        return self._unknown()

    @property
    def covered(self) -> Column:
        """Nothing is below a store."""
        return self._unknown()

    def _unknown(self) -> Column:
        return np.zeros(len(self), np.int64)
