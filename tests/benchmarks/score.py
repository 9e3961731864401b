"""Time of POST /score: 32k tokens, 64 workers. `python -m tests.benchmarks.score`: one JSON line a page size.

The workers' publishers, the daemon and the client are processes of their own.
"""

from __future__ import annotations

import json
import random
import tempfile
import time
from multiprocessing import get_context
from pathlib import Path

import numpy as np

from tests.daemon.test_http import serving
from tests.daemon.web import ask
from tests.events.rig import ANY
from tests.waiting import until
from tiercache.core import PoolName, as_tokens
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.base import EventSource
from tiercache.events.publisher import EventPublisher
from tiercache.keys import page_keys

NAMESPACE, WORKERS, TIMES = b"n" * 32, 64, 500
PROMPT = as_tokens(np.random.default_rng(0).integers(0, 150_000, 32_768))


class Held(EventSource):
    """Objects of a worker: a third to all of the prompt's pages on each tier, and eight states."""

    def __init__(self, draw, page_size):
        keys = page_keys(NAMESPACE, PROMPT, page_size)
        self.events = []
        for place in (Place(Medium.GPU), Place(Medium.CPU), Place(Medium.STORAGE, "disk")):
            pages = keys[: draw.randint(len(keys) // 3, len(keys))]
            for pool, held in ((PoolName.KV, pages), (PoolName.MAMBA, draw.sample(pages, 8))):
                group = ObjectGroup(pool, NAMESPACE, str(pool).encode() * 8, page_size)
                self.events.append(KVEvent(EventKind.STORED, place, group, held))

    def collect(self):
        return ()

    def snapshot(self):
        yield self.events

    def follow(self, wake):
        pass


def publish(page_size, end):
    publishers = [EventPublisher(ANY, [Held(random.Random(n), page_size)]) for n in range(WORKERS)]
    end.send([(one.endpoint, one.replay_endpoint) for one in publishers])
    end.recv()


def serve(addresses, end):
    workers = {f"w{n}": [{"endpoint": a, "replay": b}] for n, (a, b) in enumerate(addresses)}
    with tempfile.TemporaryDirectory() as path, serving(Path(path), score={"workers": workers}) as node:
        end.send(node.http_address)
        end.recv()


def main():
    processes, body = get_context("spawn"), PROMPT.astype("<u4").tobytes()
    for page_size in (64, 16):
        ends, given = [], page_size
        for work in (publish, serve):
            mine, other = processes.Pipe()
            processes.Process(target=work, args=(given, other), daemon=True).start()
            ends.append(mine)
            given = mine.recv()
        asked = (given, f"/score?namespace={NAMESPACE.hex()}", "POST")
        until(lambda: '"STORAGE": 0' not in ask(*asked, body=body).text)  # noqa: B023
        row = {"name": "score", "page_size": page_size}
        for name, call in (("score_ms", asked), ("healthz_ms", (given, "/healthz"))):
            times = []
            for _ in range(TIMES):
                began = time.perf_counter()
                ask(*call, body=body if call is asked else None)
                times.append((time.perf_counter() - began) * 1e3)
            row[name] = dict(zip(("p50", "p99"), np.percentile(times, (50, 99)).round(2), strict=True))
        print(json.dumps(row))
        for end in ends:
            end.send(None)


if __name__ == "__main__":
    main()
