"""A process that shares an `lmdb` store with others.

python -m tests.storage_backends.lmdb.sharer DIR CAPACITY ROLE [ARGUMENT]
"""

from __future__ import annotations

import random
import sys
import time
from typing import Any

from tiercache_backends.lmdb import LmdbBackend

from tiercache.core import Outcome
from tiercache.testing.objects import chain, fetch, key, payload, put, to_set

NAMES = 300


def size_of(name: int) -> int:
    """Every name has its own length, from one page to some runs of them."""
    return 500 + name * 577 % 150_000


def load(store: LmdbBackend, seed: str) -> None:
    """Set and get at random until told to stop; name each acknowledged object, and what went wrong."""
    dice = random.Random(seed)
    wrong = failed = hits = 0
    finished = False

    def more() -> bool:
        nonlocal finished
        finished = finished or not sys.stdin.readline().strip()
        return not finished

    while more():
        for _ in range(10):
            names = [dice.randrange(NAMES) for _ in range(3)]
            answers = store.set([to_set(key(n), payload(n, size_of(n))) for n in names])
            failed += sum(
                answer not in (Outcome.STORED, Outcome.HIT, Outcome.THROTTLED) for answer in answers
            )
            for n, answer in zip(names, answers, strict=True):
                if answer is Outcome.STORED:
                    print("stored", n, flush=True)
            n = dice.randrange(NAMES)
            found = fetch(store, key(n), size_of(n))
            hits += found not in (Outcome.MISS, Outcome.THROTTLED)
            wrong += found not in (Outcome.MISS, payload(n, size_of(n)))
            if dice.random() < 0.05:
                store.delete([key(dice.randrange(NAMES))])
        print("round", flush=True)
    print("done", wrong, failed, hits, flush=True)


def stay(store: LmdbBackend, role: str) -> None:
    """Stay inside a read transaction ("hold") or a write transaction ("stall")."""
    environment = store._environment  # private: no call of a store stays in a transaction

    def work(txn: Any) -> None:
        if role == "stall":
            txn.put(b"never", b"stored", db=environment.facts)
        environment.facts_in(txn)
        print("holding", flush=True)
        time.sleep(60)

    (environment.write if role == "stall" else environment.read)(work)


def tail(store: LmdbBackend, _: str) -> None:
    """Store the second half of a sequence that somebody began, and the first half of another."""
    for k, parent in chain("shared", 8)[4:]:
        assert put(store, k, payload(k, 60_000), parent) is Outcome.STORED
    for k, parent in chain("crossed", 8)[:4]:
        assert put(store, k, payload(k, 60_000), parent) is Outcome.STORED
    print("stored", flush=True)
    sys.stdin.readline()


if __name__ == "__main__":
    path, capacity, role, argument = [*sys.argv[1:], ""][:4]
    with LmdbBackend(path, int(capacity)) as shared:
        {"load": load, "tail": tail}.get(role, stay)(shared, argument or role)
