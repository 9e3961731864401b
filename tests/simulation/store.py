"""A store in virtual time, which is slow, fails, hangs, loses and is away as its seed draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tiercache_backends.memory import MemoryBackend

from tests.simulation.world import World
from tiercache.core import Outcome
from tiercache.storage.wrappers import Wrapper


@dataclass
class StoreFaults:
    """Chances of what goes wrong with one call, from 0 to 1, and how slow calls are."""

    fails: float = 0.0
    """All items have an error."""
    partly: float = 0.0
    """Some items have an error, are missing or corrupt."""
    breaks: float = 0.0
    """The call raises what the contract does not allow."""
    hangs: float = 0.0
    """The call takes up to a minute."""
    per_call: float = 0.001
    """Mean seconds of a call."""


class SimulatedStore(Wrapper):
    """A process's view of the one medium; a get that fails scribbles over the buffers. For one thread."""

    def __init__(self, world: World, medium: MemoryBackend, faults: StoreFaults) -> None:
        super().__init__(medium)
        self._world, self.medium, self.faults = world, medium, faults
        self.away_until = 0.0

    def get(self, items):
        """Read; the bytes arrive before and after a part of the call's time."""
        half = len(items) // 2

        def read() -> list[Outcome]:
            first = self.medium.get(items[:half]) if half else []
            self._take_time()
            return [*first, *self.medium.get(items[half:])]

        outcomes = self._call("get", len(items), read, Outcome.MISS, Outcome.CORRUPT, Outcome.ERROR)
        for item, outcome in zip(items, outcomes, strict=True):
            if outcome is not Outcome.HIT:
                for buffer in item.buffers:
                    buffer[:] = b"\xee" * len(buffer)
            if outcome in (Outcome.MISS, Outcome.CORRUPT):  # it says that the store does not have the object
                self.medium.delete([item.key])
        return outcomes

    def set(self, items):
        """Write; some of the items may be refused."""
        return self._call("set", len(items), lambda: self.medium.set(items), Outcome.THROTTLED, Outcome.ERROR)

    def exists(self, keys):
        """Answer for all keys, or for none."""
        self._take_time()
        self._meet("exists")
        if self._world.now < self.away_until:
            raise OSError("the store is away")
        return self.medium.exists(keys)

    def delete(self, keys):
        """Delete at once."""
        self._take_time()
        return self.medium.delete(keys)

    def flush(self):
        """Do nothing."""

    def close(self):
        """Do nothing: the medium outlives the process."""

    def _call(
        self, what: str, count: int, call: Callable[[], Sequence[Any]], *faults: Outcome
    ) -> list[Outcome]:
        self._take_time()
        self._meet(what)
        if self._world.now < self.away_until or self._world.chance(self.faults.fails):
            return [Outcome.UNAVAILABLE] * count
        outcomes = list(call())
        if self._world.chance(self.faults.partly):
            bad = self._world.random.choice(faults)
            outcomes = [bad if self._world.chance(0.5) else outcome for outcome in outcomes]
        self._take_time()
        return outcomes

    def _meet(self, what: str) -> None:
        if self._world.chance(self.faults.hangs):
            self._world.note("hang", what)
            self._world.sleep(self._world.random.uniform(1.0, 60.0))
        if self._world.chance(self.faults.breaks):
            raise RuntimeError("this store breaks its contract")

    def _take_time(self) -> None:
        self._world.sleep(self._world.random.expovariate(1 / self.faults.per_call))
