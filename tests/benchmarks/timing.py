"""Times of answers about objects of other tenants, compared: `python -m tests.benchmarks.timing [PAIRS]`.

A daemon with two tenants, over TCP. In pairs, in random order, the caller asks for one that is nowhere, and

- for one that the other tenant has stored under this very key (`foreign`), or that it had (`removed`);
- as a caller without a tenant, for one under the key that the store itself has, which the caller came to know
  (`leaked`);
- for one of its own, which shows that the test can see a difference at all (`own`).

For each method, one JSON line: in how many of the pairs the present one took longer, how far that is from one
half in standard deviations (`z`), and the median difference in microseconds. Without a difference, |z| is
beyond 3.3 once in a thousand runs, however busy the machine is: what disturbs one of a pair disturbs the
other as often.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

from tiercache.config.models import Settings
from tiercache.core import ObjectKey, Outcome
from tiercache.daemon import StorageServer
from tiercache.storage.base import GetItem, StorageBackend
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, put

SIZE, OBJECTS = 4096, 256


def settings(place: Path, url: str) -> Settings:
    principals = []
    for name, tenant, verbs in (
        ("acme", "acme", ("read", "write")), ("globex", "globex", ("read", "write")),
        ("nobody", "", ("read", "write")), ("operator", "", ("read", "write", "admin")),
    ):  # fmt: skip
        for kind, text in (("token", name * 8), ("salt", name * 16)):
            (place / f"{name}.{kind}").touch(0o600)
            (place / f"{name}.{kind}").write_text(text)
        principals.append(
            {"name": name, "tenant": tenant, "verbs": verbs, "token_file": place / f"{name}.token"}
        )
    tenants = {name: {"salt_file": place / f"{name}.salt"} for name in ("acme", "globex")}
    return Settings(
        directory=place, unix=False, listen=("127.0.0.1:0",), storage=url, principals=principals,
        tenants=tenants,
    ).check()  # fmt: skip


def asks(store: StorageBackend) -> dict[str, Callable[[ObjectKey], object]]:
    buffer = memoryview(bytearray(SIZE))
    return {
        "Exists": lambda k: store.exists([k]),
        "Get": lambda k: store.get([GetItem(k, [buffer], SIZE)]),
        "Describe": lambda k: store.describe([k]),
        "History": lambda k: store.history([k], [k.page_key]),
    }


def compare(ask: Callable[[ObjectKey], object], present: list[ObjectKey], pairs: int) -> dict[str, float]:
    draw = random.Random(0)
    for k in present:
        ask(k)
    longer, differences = 0.0, []
    for number in range(pairs):
        question = [(draw.choice(present), True), (key(("nowhere", number)), False)]
        draw.shuffle(question)
        took = {}
        for k, is_present in question:
            start = time.perf_counter_ns()
            ask(k)
            took[is_present] = time.perf_counter_ns() - start
        differences.append((took[True] - took[False]) / 1e3)
        longer += 1.0 if took[True] > took[False] else 0.5 if took[True] == took[False] else 0.0
    return {
        "pairs": pairs,
        "longer": round(longer / pairs, 4),
        "z": round((longer - pairs / 2) / (pairs / 4) ** 0.5, 2),
        "median_difference_us": round(statistics.median(differences), 2),
    }


def main(pairs: int) -> None:
    for url in ("memory://?capacity=64MiB", "file://{}/store?capacity=64MiB"):
        with ExitStack() as ends:
            place = Path(ends.enter_context(tempfile.TemporaryDirectory()))
            node = ends.enter_context(StorageServer(settings(place, url.format(place))))
            stores = {
                name: ends.enter_context(
                    open_backend(f"grpc://{node.addresses[0]}?token_file={place}/{name}.token&timeout=60s")
                )
                for name in ("acme", "globex", "nobody", "operator")
            }
            keys = {name: [key((name, n)) for n in range(OBJECTS)] for name in ("acme", "globex", "nobody")}
            for name, named in keys.items():
                for k in named:
                    assert put(stores[name], k, payload(k, SIZE)) is Outcome.STORED
            leaked = {entry.key for entry in stores["operator"].scan_all()} - set(keys["nobody"])
            gone = [key(("gone", n)) for n in range(OBJECTS)]
            for k in gone:
                assert put(stores["acme"], k, payload(k, SIZE)) is Outcome.STORED
            hidden = [e.key for e in stores["operator"].scan_all() if e.key not in {*keys["nobody"], *leaked}]
            assert all(stores["operator"].delete(hidden))
            cases = {
                "removed": ("globex", gone),
                "foreign": ("globex", keys["acme"]),
                "leaked": ("nobody", sorted(leaked, key=lambda k: k.digest)),
                "own": ("globex", keys["globex"]),
            }
            for case, (caller, present) in cases.items():
                for method, ask in asks(stores[caller]).items():
                    row = {"store": url.partition(":")[0], "case": case, "method": method}
                    print(json.dumps(row | compare(ask, present, pairs)), flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10_000)
