"""Memory of an object in each store, and of a node of the index: `python -m tests.benchmarks.footprint`.

Every row runs twice, each time in a process of its own: `allocated` is what `tracemalloc` counts, `resident`
is by how much the anonymous memory of the process grows (RssAnon). Mapped files count in neither. Objects
are pages of sequences of 128 pages. Payloads lie in files; those of `memory` are subtracted. The directory of
a store is made in TMPDIR and removed at the end.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import tempfile
import tracemalloc
from collections.abc import Callable
from typing import Any

from tests.benchmarks.index import MAMBA, PAGE, Bench
from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, to_get, to_set

OBJECTS = 102_400
SEQUENCE = 128
"""Pages of a sequence, which are stored in one call."""
SIZE = 512
"""Bytes of a payload; in `file` it takes a block of 4 KiB."""
PAGES, BRANCHES = 1000, 100


def sequence(number: int) -> list[ObjectKey]:
    return [key((number, depth)) for depth in range(SEQUENCE)]


def fill(store: StorageBackend) -> None:
    """Store OBJECTS objects."""
    for number in range(OBJECTS // SEQUENCE):
        keys = sequence(number)
        parents = [None, *(before.page_key for before in keys[:-1])]
        items = [
            to_set(k, bytes(SIZE), parent=parent, depth=depth)
            for depth, (k, parent) in enumerate(zip(keys, parents, strict=True), 1)
        ]
        assert set(store.set(items)) == {Outcome.STORED}


def of_store(url: str, held: Callable[[], int], directory: str) -> dict[str, Any]:
    """Memory that the objects take, and for `lmdb` also the mirror, which the first set reads."""
    with open_backend(url.format(directory=directory)) as store:
        store.set([to_set(key("warm"), bytes(SIZE))])
        store.get([to_get(key("warm"), SIZE)])
        before = held()
        fill(store)
        row = {"objects": OBJECTS, "bytes": (held() - before) / OBJECTS}
        usage = store.usage()
        if url.startswith("memory"):
            row["bytes"] -= SIZE
        if url.startswith("lmdb"):
            row["bytes_with_mirror"] = (held() - before) / OBJECTS
        if "memory_bytes" in usage.details:
            row["bytes_by_usage"] = int(usage.details["memory_bytes"]) / OBJECTS
        return row


def of_index(pages: int, states: tuple[PoolName, ...], held: Callable[[], int]) -> dict[str, Any]:
    """Memory of a tree of shared prefixes, PAGES pages in all, each with BRANCHES branches as long."""
    bench = Bench(*states)
    before = held()
    bench.fill(groups=PAGES // pages, branches=BRANCHES, pages=pages)
    nodes = PAGES // pages * (BRANCHES + 1)
    taken = held() - before
    return {"nodes": nodes, "pages": nodes * pages, "tokens_of_a_page": PAGE, "bytes": taken / nodes}


ROWS: dict[str, Callable[[Callable[[], int], str], dict[str, Any]]] = {
    "file": lambda held, directory: of_store("file://{directory}/s?capacity=2GiB", held, directory),
    "lmdb": lambda held, directory: of_store("lmdb://{directory}/s?capacity=2GiB", held, directory),
    "memory": lambda held, directory: of_store("memory://?capacity=2GiB", held, directory),
    "index, nodes of 1 page": lambda held, _: of_index(1, (), held),
    "index, nodes of 1 page with a state": lambda held, _: of_index(1, (MAMBA,), held),
    "index, nodes of 20 pages": lambda held, _: of_index(20, (), held),
    "index, nodes of 20 pages with a state": lambda held, _: of_index(20, (MAMBA,), held),
}


def allocated() -> int:
    gc.collect()
    return tracemalloc.get_traced_memory()[0]


def resident() -> int:
    gc.collect()
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("RssAnon")) << 10


def measure(name: str, how: str) -> None:
    """Print one row as JSON."""
    if how == "allocated":
        tracemalloc.start()
    with tempfile.TemporaryDirectory(dir=os.environ.get("TMPDIR")) as directory:
        print(json.dumps(ROWS[name](allocated if how == "allocated" else resident, directory)))


def main() -> None:
    for name in ROWS:
        row: dict[str, Any] = {"benchmark": f"footprint.{name}"}
        for how in ("allocated", "resident"):
            command = [sys.executable, "-m", "tests.benchmarks.footprint", name, how]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            for what, value in found.items():
                row[f"{how}_{what}" if what.startswith("bytes") else what] = round(value)
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    if len(sys.argv) > 2:
        measure(*sys.argv[1:3])
    else:
        main()
