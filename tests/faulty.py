"""Stores that misbehave on purpose: wrappers that compose.

Faulty     often fails, but never returns wrong data; a seed chooses the items that fail
Outage     cannot be reached for a while
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, fields
from random import Random
from threading import Event, Lock
from typing import Final, ParamSpec, TypeVar

from tiercache.core import ObjectKey, Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import GetItem, NamespaceRecord, SetItem, StorageBackend, storable
from tiercache.storage.vectors import take, usable
from tiercache.storage.wrappers import Wrapper, decide

P = ParamSpec("P")
A = TypeVar("A")
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Rates:
    """Probability of each outcome for one item of a call; ValueError unless they are some of 1."""

    error: float = 0.0
    throttled: float = 0.0
    corrupt: float = 0.0
    miss: float = 0.0

    def __post_init__(self) -> None:
        rates = [getattr(self, f.name) for f in fields(self)]
        if min(rates) < 0 or sum(rates) > 1:
            raise ValueError(f"rates {rates} are not possible; give rates from 0 to 1 that come to 1 or less")

    @property
    def outcomes(self) -> AbstractSet[Outcome]:
        """Outcomes whose rate is above 0."""
        return {Outcome(f.name) for f in fields(self) if getattr(self, f.name)}


class Faulty(Wrapper):
    """A wrapper of `inner` whose items fail at the given `rates`.

    - get fails with all four outcomes. ERROR and CORRUPT leave garbage in the buffers, as an interrupted read
      does. CORRUPT drops the object, and is answered only for a stored object. THROTTLED and MISS leave the
      buffers and the object unchanged, so that the next get may find the object.
    - set fails with ERROR and THROTTLED, and then stores nothing.
    - exists answers False at the rate `miss`. delete answers False, and removes nothing, at the rate `error`.
    - An answer of HIT, STORED or True is always right. All other operations, and malformed items, are
      passed to `inner`.

    Each item takes the next number from a random generator that starts with `seed`. Two runs that make the
    same calls in the same order with the same seed get the same faults.

    Thread safety: as `Wrapper`. The order in which several threads call decides which call gets which fault.
    """

    def __init__(self, inner: StorageBackend, rates: Rates, seed: int = 0) -> None:
        super().__init__(inner)
        self.rates: Final = rates
        self._random = Random(seed)
        self._mutex = Lock()

    def exists(self, keys: Sequence[ObjectKey]) -> list[bool]:
        hidden = [self._drawn() is Outcome.MISS for _ in keys]
        return [there and not hide for there, hide in zip(super().exists(keys), hidden, strict=True)]

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return self._perform("get", lambda: decide(items, self._get_fault, self.inner.get))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return self._perform("set", lambda: decide(items, self._set_fault, self.inner.set))

    def delete(self, keys: Sequence[ObjectKey]) -> list[bool]:
        kept = [self._drawn() is Outcome.ERROR for _ in keys]
        answers = iter(super().delete([key for key, keep in zip(keys, kept, strict=True) if not keep]))
        return [not keep and next(answers) for keep in kept]

    def _get_fault(self, item: GetItem) -> Outcome | None:
        fault = self._drawn()
        if fault is None or not usable(item.buffers, item.length, writable=True):
            return None
        if fault is Outcome.CORRUPT and not self.inner.delete([item.key])[0]:
            return Outcome.MISS
        if fault in (Outcome.CORRUPT, Outcome.ERROR):
            for view in take(item.buffers, 0, item.length):
                view[:] = b"\xdb" * view.nbytes
        return fault

    def _set_fault(self, item: SetItem) -> Outcome | None:
        fault = self._drawn()
        return fault if fault in (Outcome.ERROR, Outcome.THROTTLED) and storable(item) else None

    def _drawn(self) -> Outcome | None:
        """Draw the fault of the next item; None for no fault."""
        with self._mutex:
            at = self._random.random()
        for f in fields(self.rates):
            at -= getattr(self.rates, f.name)
            if at < 0:
                return Outcome(f.name)
        return None


class Outage(Wrapper):
    """A wrapper of `inner` that lets no call reach `inner` between `begin` and `end`.

    - get, peek and set answer UNAVAILABLE, and leave the buffers unchanged.
    - advise does nothing.
    - register_namespace remembers the record; `end` passes it to `inner`.
    - Every other call raises UnavailableError.

    Thread safety: as `Wrapper`; `begin` and `end` may be called from any thread.
    """

    def __init__(self, inner: StorageBackend) -> None:
        super().__init__(inner)
        self._down = Event()
        self._registered: dict[bytes, NamespaceRecord] = {}

    def begin(self) -> None:
        """Begin the outage: no call reaches the store from now on."""
        self._down.set()

    def end(self) -> None:
        """End the outage: calls reach the store again, and the store gets the remembered records."""
        self._down.clear()
        for record in list(self._registered.values()):
            self.inner.register_namespace(record)

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        return _either(super().get, items, [Outcome.UNAVAILABLE] * len(items))

    def peek(self, items: Sequence[GetItem]) -> list[Outcome]:
        return _either(super().peek, items, [Outcome.UNAVAILABLE] * len(items))

    def set(self, items: Sequence[SetItem]) -> list[Outcome]:
        return _either(super().set, items, [Outcome.UNAVAILABLE] * len(items))

    def register_namespace(self, record: NamespaceRecord) -> None:
        record = record.over(self._registered.get(record.namespace))
        # Remember the record before the call. Otherwise it could be lost:
        #   1. the call meets the outage   2. `end` registers all records that are remembered
        #   3. the record is remembered, too late for `end`
        self._registered[record.namespace] = record
        _either(super().register_namespace, record, None)

    def advise(self, keys: Sequence[ObjectKey], values: Sequence[float], worker: int = 0) -> None:
        _either(lambda keys: super(Outage, self).advise(keys, values, worker), keys, None)

    def _perform(self, operation: str, call: Callable[P, T], *arguments: P.args, **named: P.kwargs) -> T:
        def reached() -> T:
            if self._down.is_set():
                raise UnavailableError(f"{operation}: the store is out of reach; try again when it is back")
            return call(*arguments, **named)

        return super()._perform(operation, reached)


def _either(call: Callable[[A], T], argument: A, otherwise: T) -> T:
    """Return the call's answer, or `otherwise` if the call met the outage."""
    try:
        return call(argument)
    except UnavailableError:
        return otherwise
