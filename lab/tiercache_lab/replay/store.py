"""The null store: the `memory` store without payloads, whose clock is that of the replay."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

from tiercache_backends.memory import MemoryBackend, StoredObject

from tiercache.core import Outcome
from tiercache.errors import ConfigError
from tiercache.storage import StoreContext
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.env import Env
from tiercache.storage.shares import Footprint


class ReplayClock(Env):
    """Environment whose time is that of the replay, in seconds."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock

    def monotonic(self) -> float:
        """Return the seconds of the replay."""
        return self._clock()

    def time_ns(self) -> int:
        """Return the same in nanoseconds."""
        return int(self._clock() * 1e9)


class NullStore(MemoryBackend):
    """Store that counts up to `capacity` payload bytes and keeps none of them.

    Values age by the seconds of `clock` (default: they do not age). A get of a stored key is always a hit,
    because there are no bytes to verify.

    Thread safety: one thread, unlike other stores.
    """

    footprint = Footprint()
    is_sound = staticmethod(lambda item: True)  # copies between tiers come without payload

    def __init__(self, capacity: int, clock: Callable[[], float] = lambda: 0.0) -> None:
        super().__init__(capacity, ReplayClock(clock))
        self.peak = self.read_bytes = self.written_bytes = 0

    @classmethod
    def from_config(cls, section: Mapping[str, Any], context: StoreContext) -> Self:
        """Raise ConfigError, because only a replay makes null stores."""
        raise ConfigError("a null store can only be made by a replay")

    @property
    def evicted(self) -> int:
        """Number of evicted objects."""
        return self._evicted

    def _get(self, item: GetItem, *, is_use: bool = True) -> Outcome:
        found = self._objects.get(item.key.digest)
        if found is None:
            return Outcome.MISS
        if is_use:
            self._residents.touch(found.row)
            self._residents.hits[found.row] += 1
            self.read_bytes += found.meta.length
        return Outcome.HIT

    def _set(self, item: SetItem, *, refused: bool) -> Outcome:
        outcome = self._refuse(item, refused=refused)
        if outcome is None:
            outcome = self._add(StoredObject(item.key, item.meta, b"", self._env.time_ns() / 1e9))
        if outcome is Outcome.STORED:
            self.written_bytes += item.meta.length
            self.peak = max(self.peak, self._used)
        return outcome
