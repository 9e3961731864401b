"""A store with one zeroed page, in a process of its own.

    python -m tests.storage_backends.lmdb.bad_page DIR KIND WHICH

Prints one JSON line.

With the kind `again` nothing is damaged: the store that an earlier process left is used on.

Damage can make LMDB end the process, so no test does this in its own.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections import Counter

from tiercache_backends.lmdb import LmdbBackend

from tests.storage_backends.lmdb.hooks import data_file, page_kinds, zero
from tiercache.storage.base import NamespaceRecord
from tiercache.testing.objects import fetch, key, payload, to_get, to_set

CAPACITY = 16 << 20
OLD, SIZE = (6000, 100) if sys.argv[2:3] == ["objects branch"] else (400, 6000)
"""A tree has branches below its root only where there are many objects."""
NEW = 100


def run(path: str, kind: str, which: float) -> dict[str, object]:
    """Fill a store, zero one page of a kind, and use the store on."""
    with LmdbBackend(path, CAPACITY) as store:
        for n in range(0, OLD, 20):
            store.set([to_set(key(m), payload(m, SIZE)) for m in range(n, n + 20)])
        store.delete([key(n) for n in range(0, OLD, 10)])
        store.get([to_get(key(n), SIZE) for n in range(1, 200)])
        store.flush()
        store.get([to_get(key(n), SIZE) for n in range(1, 200)])
        pages = page_kinds(data_file(store))[kind]
        if which < 0:  # the root
            zero(data_file(store), pages[0])
            return {"pages": len(pages)} | use(store)
        # The first is the root, and the last is what every set writes to: without these nothing can be
        # stored.
        pages = pages[1:-1] or pages
        zero(data_file(store), pages[int(which * (len(pages) - 1))])
        return {"pages": len(pages)} | use(store)


def use(store: LmdbBackend) -> dict[str, object]:
    """Use the damaged store through its calls, and count the answers."""
    old = [n for n in range(OLD) if n % 10]
    first: Counter[str] = Counter()
    wrong = 0
    for n in old:
        found = fetch(store, key(n), SIZE)
        wrong += isinstance(found, bytes) and found != payload(n, SIZE)
        first["hit" if isinstance(found, bytes) else str(found.value)] += 1
    store.register_namespace(NamespaceRecord(b"n" * 32, {"model": "m"}))
    there = sum(store.exists([key(n) for n in old]))
    together = Counter(
        str(answer.value)
        for answer in store.set([to_set(key(n), payload(n, SIZE)) for n in range(OLD, OLD + NEW)])
    )
    single = Counter(
        str(answer.value)
        for n in range(OLD + NEW, OLD + 2 * NEW)
        for answer in store.set([to_set(key(n), payload(n, SIZE))])
    )
    good = sum(fetch(store, key(n), SIZE) == payload(n, SIZE) for n in range(OLD, OLD + 2 * NEW))
    again = Counter(
        str(answer.value) for answer in store.set([to_set(key(n), payload(n, SIZE)) for n in old])
    )
    back = sum(fetch(store, key(n), SIZE) == payload(n, SIZE) for n in old)
    # Few: where many go, LMDB joins leaves, and ends the process if the neighbour is the damaged one.
    gone = sum(store.delete([key(n) for n in old[::40]]))
    usage = store.usage()
    store.flush()
    lengths = [entry.meta.length for entry in store.scan_all()]
    return {
        "first": first, "wrong": wrong, "there": there, "together": together, "single": single, "good": good,
        "again": again, "back": back,
        "gone": gone, "old": len(old), "dropped": usage.details["chores_dropped"],
        "failures": usage.details["failures"],
        "counted": (usage.objects, usage.payload_bytes) == (len(lengths), sum(lengths)),
    }  # fmt: skip


def again(path: str) -> dict[str, object]:
    """Open the store that another process left, read all that it held before the damage, and store more."""
    with LmdbBackend(path, CAPACITY) as store:
        old = [n for n in range(OLD) if n % 10]
        found = {n: fetch(store, key(n), SIZE) for n in old}
        wrong = sum(isinstance(data, bytes) and data != payload(n, SIZE) for n, data in found.items())
        hits = sum(isinstance(data, bytes) for data in found.values())
        more = Counter(
            str(answer.value)
            for answer in store.set([to_set(key(n), payload(n, SIZE)) for n in range(OLD, OLD + NEW)])
        )
    return {"old": len(old), "hits": hits, "wrong": wrong, "more": more}


if __name__ == "__main__":
    logging.disable(logging.CRITICAL)
    path, kind, which = sys.argv[1:]
    os.write(1, json.dumps(again(path) if kind == "again" else run(path, kind, float(which))).encode())
