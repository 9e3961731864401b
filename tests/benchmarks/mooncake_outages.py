"""Calls of the `mooncake` store in outages: `python -m tests.benchmarks.mooncake_outages [SECONDS]`.

A master and two providers run in a network namespace of this process, which needs root. One thread for
each kind of call makes calls with pauses of 10 ms. After a second of that, a part of the pool is stopped or
killed; or the pool was full from the beginning. The rows show the calls that ended after that: their number,
how many had which answers, the milliseconds of the median, of 99 of 100 and of the slowest, and how many took
longer than the deadline and 50 ms. For a call that had begun before, they count from the outage. One JSON
line a row.
"""

from __future__ import annotations

import json
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import NamedTuple

from tiercache_backends.mooncake.settings import read_settings
from tiercache_backends.mooncake.store import MooncakeBackend

from tests.storage_backends.mooncake.rig import Pool, own_network
from tiercache.core import ObjectMeta
from tiercache.errors import StorageError
from tiercache.pools import HostArena
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.objects import NAMESPACE, key, payload, state_of, to_get, to_set

DEADLINE = 0.5
ALLOWANCE = 0.05
PAUSE = 0.01
SMALL, LARGE = 20_000, 1 << 20
"""Bytes of an object that is copied, and of one that is not."""
FEW, MANY = 4, 48
"""Objects of each size in a batch that one call of Mooncake moves, and in one that takes several."""


class Call(NamedTuple):
    """One call, in seconds of the monotonic clock."""

    kind: str
    began: float
    ended: float
    answers: set[str]


class Callers:
    """Threads that call a store, one for each kind of call."""

    def __init__(self, store: MooncakeBackend, arena: HostArena) -> None:
        self.calls: list[Call] = []
        self._store = store
        self._over = threading.Event()
        self._names = count()
        self._views = [arena.view(int(block)) for block in arena.alloc(2 * (FEW + MANY))]
        for n, view in enumerate(self._views):
            view[:] = payload(n, LARGE)
        store.set(self._sets("there", MANY))
        keys = [key(("there", n)) for n in range(MANY)]
        absent = [key(("absent", n)) for n in range(MANY)]
        self.works: dict[str, Callable[[], Iterable[object]]] = {
            "get": lambda: store.get(self._gets(FEW)),
            "get, several parts": lambda: store.get(self._gets(MANY)),
            "set": lambda: store.set(self._sets(next(self._names), FEW)),
            "set, several parts": lambda: store.set(self._sets(next(self._names), MANY)),
            "exists": lambda: store.exists(keys),
            "describe": lambda: [entry is not None for entry in store.describe(keys)],
            "delete": lambda: store.delete(absent),
        }
        self._threads = [threading.Thread(target=self._work, args=work) for work in self.works.items()]

    @contextmanager
    def running(self) -> Iterator[None]:
        for thread in self._threads:
            thread.start()
        try:
            yield
        finally:
            self._over.set()
            for thread in self._threads:
                thread.join()

    def _work(self, kind: str, work: Callable[[], Iterable[object]]) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            try:
                answers = set(map(str, work()))
            except StorageError as error:
                answers = {type(error).__name__}
            self.calls.append(Call(kind, began, time.monotonic(), answers))
            time.sleep(PAUSE)

    def _gets(self, objects: int) -> list[GetItem]:
        views = self._views[:FEW] if objects == FEW else self._views[2 * FEW : 2 * FEW + MANY]
        found = [GetItem(key(("there", n)), [view], LARGE) for n, view in enumerate(views)]
        return found + [to_get(state_of(("there", n)), SMALL) for n in range(objects)]

    def _sets(self, name: object, objects: int) -> list[SetItem]:
        views = self._views[FEW : 2 * FEW] if objects == FEW else self._views[2 * FEW + MANY :]
        meta = ObjectMeta(NAMESPACE, LARGE, b"")
        found = [SetItem(key((name, n)), [view], meta) for n, view in enumerate(views)]
        states = [state_of((name, n)) for n in range(objects)]
        return found + [to_set(k, bytes(SMALL), parent=k.page_key) for k in states]


def main(seconds: float) -> None:
    for outage, act in OUTAGES.items():
        size = 64 << 20 if outage == "full pool" else 768 << 20
        arena = HostArena(2 * (FEW + MANY) * LARGE, LARGE, huge_pages=False)
        section = {"deadline": f"{DEADLINE}s"}
        with (
            own_network(),
            Pool(segments=(size, size)) as pool,
            MooncakeBackend(read_settings(pool.section("outage", **section))) as store,
        ):
            store.attach(arena)
            callers = Callers(store, arena)
            with callers.running():
                time.sleep(1)
                at = time.monotonic()
                act(pool)
                time.sleep(seconds)
        for kind in callers.works:
            show(outage, kind, [call for call in callers.calls if call.kind == kind and call.ended > at], at)


def show(outage: str, kind: str, calls: list[Call], at: float) -> None:
    taken = sorted(call.ended - max(call.began, at) for call in calls)
    answers = Counter(answer for call in calls for answer in call.answers)
    record: dict[str, object] = {
        "outage": outage,
        "call": kind,
        "calls": len(taken),
        "answers": dict(answers),
    }
    for name, part in (("p50", 0.5), ("p99", 0.99), ("max", 1.0)):
        record[f"{name}_ms"] = round(1e3 * taken[min(len(taken) - 1, int(part * len(taken)))], 1)
    record["late"] = sum(seconds > DEADLINE + ALLOWANCE for seconds in taken)
    print(json.dumps(record), flush=True)


def _kill_master(pool: Pool) -> None:
    assert pool.master is not None
    pool.master.kill()


def _stop_master(pool: Pool) -> None:
    assert pool.master is not None
    pool.master.stop()


def _stop_providers(pool: Pool) -> None:
    for provider in pool.providers:
        provider.stop()


OUTAGES: dict[str, Callable[[Pool], None]] = {
    "a provider stopped": lambda pool: pool.providers[0].stop(),
    "all providers stopped": _stop_providers,
    "a provider killed": lambda pool: pool.providers[0].kill(),
    "master stopped": _stop_master,
    "master killed": _kill_master,
    "full pool": lambda pool: None,
}

if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 8)
