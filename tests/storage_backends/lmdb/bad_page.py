"""Use of an `lmdb` store that is or becomes damaged, in a process of its own.

    python -m tests.storage_backends.lmdb.bad_page DIR use
    python -m tests.storage_backends.lmdb.bad_page DIR fill
    python -m tests.storage_backends.lmdb.bad_page DIR spoil KIND

`fill` fills a store before it is used; `spoil` also overwrites a page of a kind with zeros while the store is
open. Prints one JSON line. Damage can make LMDB end the process, so no test does this in its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys

from tiercache_backends.lmdb import LmdbBackend

from tests.storage_backends.lmdb.hooks import data_file, page_kinds, zero
from tiercache.core import Outcome
from tiercache.errors import StorageError
from tiercache.storage.base import NamespaceRecord
from tiercache.testing.objects import fetch, key, payload, to_get, to_set

CAPACITY = 16 << 20
OLD, SIZE = (6000, 100) if sys.argv[-1] in ("objects branch", "parts branch") else (400, 6000)
"""A tree has branches below its root only where there are many objects."""
NEW = 100


def fill(store: LmdbBackend) -> None:
    """Store, remove and read objects."""
    store.register_namespace(NamespaceRecord(b"n" * 32, {"model": "m"}))
    for n in range(0, OLD, 20):
        store.set([to_set(key(m), payload(m, SIZE)) for m in range(n, n + 20)])
    store.delete([key(n) for n in range(0, OLD, 10)])
    store.get([to_get(key(n), SIZE) for n in range(1, 200)])
    store.flush()


def use(store: LmdbBackend) -> dict[str, object]:
    """Use a store through its calls, and count the answers."""
    old = [n for n in range(OLD) if n % 10]
    found = {n: fetch(store, key(n), SIZE) for n in old}
    wrong = sum(isinstance(data, bytes) and data != payload(n, SIZE) for n, data in found.items())
    answers = [store.set([to_set(key(n), payload(n, SIZE))])[0] for n in range(OLD, OLD + NEW)]
    wrong += sum(
        fetch(store, key(n), SIZE) != payload(n, SIZE)
        for n, answer in zip(range(OLD, OLD + NEW), answers, strict=True)
        if answer is Outcome.STORED and Outcome.ERROR not in answers
    )
    store.delete([key(n) for n in old[::40]])
    try:
        lengths = [entry.meta.length for entry in store.scan_all()]
        usage = store.usage()
        counted = (usage.objects, usage.payload_bytes) == (len(lengths), sum(lengths))
    except StorageError:
        counted = False
    return {
        "wrong": wrong, "old": len(old), "hits": sum(isinstance(data, bytes) for data in found.values()),
        "stored": answers.count(Outcome.STORED), "there": answers.count(Outcome.HIT),
        "counted": counted,
    }  # fmt: skip


def main(path: str, how: str, kind: str = "") -> dict[str, object]:
    """Do as the module says."""
    with LmdbBackend(path, CAPACITY) as store:
        if how != "use":
            fill(store)
        if kind:
            pages = page_kinds(data_file(store))[kind]
            # The first may be the root, and the last is what every set writes to.
            pages = pages[1:-1] or pages
            zero(data_file(store), pages[len(pages) // 2])
        return use(store)


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    os.write(1, json.dumps(main(*sys.argv[1:])).encode())
