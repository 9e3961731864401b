"""A process that owns a store: `python -m tests.storage.owner DIR put` until it is killed, or `...

DIR read` to look at what was left.
"""

from __future__ import annotations

import sys
import time

from tiercache_backends.file import FileBackend

from tests.storage.integrity import check_tables
from tiercache.core import Outcome
from tiercache.testing.objects import fetch, key, payload, put

COUNT, SIZE = 300, 3000


def read(store: FileBackend) -> None:
    found = [fetch(store, key(n), SIZE) for n in range(COUNT)]
    assert all(isinstance(f, Outcome) or f == payload(n, SIZE) for n, f in enumerate(found)), "wrong bytes"
    assert put(store, key("new"), payload("new", SIZE)) is Outcome.STORED, "it can be written"
    assert fetch(store, key("new"), SIZE) == payload("new", SIZE)
    assert store.delete([key("new")]) == [True]
    list(store.scan_all())
    check_tables(store)
    store.close()


if __name__ == "__main__":
    store = FileBackend(sys.argv[1], 16 << 20)
    if sys.argv[2] == "read":
        read(store)
        sys.exit()
    assert put(store, key("child"), payload("child", 70_000)) is Outcome.STORED
    print("ready", flush=True)
    time.sleep(60)
