"""The `s3` store beside bare obstore, over SeaweedFS on loopback: `python -m tests.benchmarks.s3 [ROUNDS]`.

Both move the same random bytes, in turns: a sequence of 128 pages of 256 KiB with two states of 4 MiB. The
store packs and verifies them. Bare obstore moves objects of the size of a pack, all at once, and neither
copies nor checks what it gets. One JSON line a row; `cpu` is processor seconds of this process, without the
service's, a GB.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import obstore
from tiercache_backends.s3 import S3Backend

from tests.storage_backends.s3.hooks import open_s3
from tests.storage_backends.s3.server import bucket
from tiercache.core import ObjectKey, Outcome
from tiercache.storage.base import SetItem
from tiercache.testing.objects import chain, state_of, to_get, to_set

PAGE, PAGES, STATE, SEQUENCES = 256 << 10, 128, 4 << 20, 1
PACK = 16 << 20
THREADS = 4


def sequences(turn: int) -> list[SetItem]:
    """Pages and states of one turn, in the order in which a controller stores them."""
    random = np.random.default_rng(turn)
    items = []
    for sequence in range(SEQUENCES):
        pages = chain((turn, sequence), PAGES)
        for n, (k, parent) in enumerate(pages):
            items.append(to_set(k, random.bytes(PAGE), parent=parent, depth=n + 1))
            if n % (PAGES // 2) == PAGES // 2 - 1:
                state: ObjectKey = state_of(((turn, sequence), n))
                items.append(to_set(state, random.bytes(STATE), parent=state.page_key, depth=n + 1))
    return items


class Bare:
    """The same bytes in objects of the size of a pack."""

    def __init__(self) -> None:
        self._bucket, self._pool = bucket(), ThreadPoolExecutor(THREADS)
        self.requests = 0

    def put(self, turn: int, data: list[bytes]) -> None:
        def one(n: int) -> None:
            obstore.put(self._bucket, f"bare/{turn}-{n}", data[n], mode="create", use_multipart=False)

        list(self._pool.map(one, range(len(data))))

    def get(self, turn: int, data: list[bytes]) -> None:
        def one(n: int) -> int:
            return len(obstore.get_range(self._bucket, f"bare/{turn}-{n}", start=0, end=len(data[n])))

        assert sum(self._pool.map(one, range(len(data)))) == sum(map(len, data))


def main(rounds: int) -> None:
    rows: dict[tuple[str, str], list[tuple[float, float, int]]] = defaultdict(list)
    bare = Bare()
    with open_s3(Path("/benchmark"), compression="none") as store:
        for turn in range(rounds + 1):
            items = sequences(turn)
            payload = b"".join(b"".join(item.buffers) for item in items)
            data = [payload[at : at + PACK] for at in range(0, len(payload), PACK)]
            gets = [to_get(item.key, item.meta.length) for item in items]
            parts: dict[tuple[str, str], Callable[[], object]] = {
                ("put", "bare"): lambda turn=turn, data=data: bare.put(turn, data),
                ("put", "store"): lambda items=items: _all(store.set(items), Outcome.STORED),
                ("get", "bare"): lambda turn=turn, data=data: bare.get(turn, data),
                ("get", "store"): lambda gets=gets: _all(store.get(gets), Outcome.HIT),
            }  # type: ignore[dict-item]
            for name, work in parts.items():
                row = _timed(work, store, len(payload))
                if turn:  # the first turn opens connections
                    rows[name].append(row)
            _remove(store, items, bare, turn, len(data))
    for (call, who), found in rows.items():
        rate, cpu, requests = (statistics.median(column) for column in zip(*found, strict=True))
        record = {"call": call, "who": who, "GB_per_s": round(rate, 3), "cpu": round(cpu, 2)}
        if who == "store":
            ratios = [ours[0] / theirs[0] for ours, theirs in zip(found, rows[call, "bare"], strict=True)]
            record |= {"requests": requests, "of_bare": round(statistics.median(ratios), 2)}
        print(json.dumps(record))


def _timed(work: Callable[[], object], store: S3Backend, nbytes: int) -> tuple[float, float, int]:
    """GB/s, processor seconds a GB, and requests of the store."""
    asked, wall, cpu = store._service.requests, time.perf_counter(), time.process_time()  # private: a counter
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return nbytes / 1e9 / wall, cpu / (nbytes / 1e9), store._service.requests - asked  # private: a counter


def _all(outcomes: list[Outcome], expected: Outcome) -> None:
    assert set(outcomes) == {expected}


def _remove(store: S3Backend, items: list[SetItem], bare: Bare, turn: int, objects: int) -> None:
    assert all(store.delete([item.key for item in items]))
    obstore.delete(bucket(), [f"bare/{turn}-{n}" for n in range(objects)])


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 7)
