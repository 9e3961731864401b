"""The operations of a store whose every step is made to fail, and what must hold after each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tests.faults import FaultEnv
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import CORRUPT, ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import content, fetch, key, payload, to_get, to_set

OLD = {("old", n): payload(n, 9000 + 7000 * n) for n in range(5)}
NEW = {("new", n): payload(n, 60_000 * (n + 1)) for n in range(3)}

Look = Callable[[StorageBackend], None]
"""Compares a store, once the faults are over, with what an operation answered."""


class QuickEnv(FaultEnv):
    """Syncs, and the check of the catalog in a child process, may fail, and else succeed at no cost."""

    def run(self, arguments: Sequence[str], timeout: float) -> int:
        return int(self.perform("run", lambda *_: 0, (arguments, timeout)))

    def fsync(self, fd: int) -> None:
        self.perform("fsync", lambda *_: None, (fd,))

    def fdatasync(self, fd: int) -> None:
        self.perform("fdatasync", lambda *_: None, (fd,))


@dataclass(frozen=True)
class Operation:
    """`template`: which store it starts from. `act` makes the call; None is the opening itself.

    `may_cost`: how many of the old objects may be gone after it.
    """

    template: str
    act: Callable[[StorageBackend], Look] | None = None
    may_cost: int = 0


def do_set(store: StorageBackend) -> Look:
    answers = store.set([to_set(key(name), data) for name, data in NEW.items()])

    def look(store: StorageBackend) -> None:
        for (name, data), answer in zip(NEW.items(), answers, strict=True):
            assert answer in (STORED, HIT, THROTTLED, ERROR)
            assert fetch(store, key(name), len(data)) == (data if answer in (STORED, HIT) else MISS), (
                name,
                answer,
            )

    return look


def do_set_torn(store: StorageBackend) -> Look:
    answers = store.set([to_set(key(name), data) for name, data in NEW.items()])
    assert set(answers) <= {STORED, HIT}

    def look(store: StorageBackend) -> None:
        for name, data in NEW.items():
            assert fetch(store, key(name), len(data)) in (data, CORRUPT)
            assert fetch(store, key(name), len(data)) in (data, MISS)

    return look


def do_get(store: StorageBackend) -> Look:
    items = [to_get(key(name), len(data)) for name, data in OLD.items()]
    for data, item, answer in zip(OLD.values(), items, store.get(items), strict=True):
        assert answer in (HIT, MISS, CORRUPT, ERROR, THROTTLED)
        assert answer is not HIT or content(item) == data
    return nothing_more


def do_delete(store: StorageBackend) -> Look:
    names = [*OLD, "never"][-3:]
    there = store.exists([key(name) for name in names])
    gone = store.delete([key(name) for name in names])

    def look(store: StorageBackend) -> None:
        assert store.exists([key(name) for name in names]) == [
            was and not now for was, now in zip(there, gone, strict=True)
        ]

    return look


def do_flush(store: StorageBackend) -> Look:
    store.flush()
    return nothing_more


def do_close(store: StorageBackend) -> Look:
    store.close()
    return nothing_more


def nothing_more(_store: StorageBackend) -> None:
    pass


OPERATIONS = {
    "create": Operation("nothing"), "open": Operation("closed"), "recover": Operation("killed"),
    "set": Operation("closed", do_set), "get": Operation("closed", do_get, may_cost=1),
    "evict": Operation("full", do_set, may_cost=10**9),
    "delete": Operation("closed", do_delete, may_cost=2), "flush": Operation("closed", do_flush),
    "close": Operation("closed", do_close),
}  # fmt: skip
