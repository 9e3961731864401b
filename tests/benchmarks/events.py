"""Cost of KV events on the engine's thread, and how many can be published.

    python -m tests.benchmarks.events

One JSON line per row. "engine": CPU time of the engine's thread for lookup, admit, commit and release of a
prompt of 8k tokens whose last page and state are new (see `engine_thread`); the controllers take turns, and a
ratio is that of the medians to the controller without events. "publisher": events of one key each, for two
seconds; the CPU time is that of the process, for each event. "store": CPU time of the process for each page
that a memory store takes, with and without a publisher. A subscriber that reads is another process; one that
never reads has a receive buffer of one message.
"""

from __future__ import annotations

import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np
import zmq
from tiercache_backends.memory import MemoryBackend

from tests.benchmarks.engine_thread import PAGE, Bench, timed
from tests.events.rig import item, published
from tiercache.core import PoolName
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.base import EventSource
from tiercache.events.publisher import EventPublisher
from tiercache.events.settings import EventSettings

ANY = EventSettings(endpoint="tcp://127.0.0.1:0")
TOKENS = 8192
ROUNDS = 60
SECONDS = 2.0
KINDS = ("off", "no subscriber", "one that reads", "one that never reads")


def read(endpoint: str) -> None:
    """Read all events, in a process of its own."""
    socket = zmq.Context().socket(zmq.SUB)
    socket.setsockopt(zmq.SUBSCRIBE, b"")
    socket.connect(endpoint)
    while True:
        socket.recv_multipart()


@contextmanager
def subscribed(kind: str, endpoint: str) -> Iterator[None]:
    """Run such a subscriber during the block."""
    with ExitStack() as ends:
        if kind == "one that reads":
            reader = multiprocessing.get_context("spawn").Process(target=read, args=(endpoint,), daemon=True)
            reader.start()
            ends.callback(reader.kill)
            time.sleep(1.0)
        elif kind == "one that never reads":
            context = zmq.Context()
            ends.callback(context.destroy, 0)
            stuck = context.socket(zmq.SUB)
            stuck.setsockopt(zmq.RCVHWM, 1)
            stuck.setsockopt(zmq.SUBSCRIBE, b"")
            stuck.connect(endpoint)
        yield


def engine() -> None:
    """Rows of the engine's thread."""
    times: dict[str, list[float]] = {kind: [] for kind in KINDS}
    random = np.random.default_rng(5)
    with ExitStack() as ends:
        benches = {}
        for kind in KINDS:
            bench = benches[kind] = Bench(TOKENS, None if kind == "off" else ANY)
            ends.callback(bench.controller.close)
            if bench.controller.publisher is not None:
                ends.enter_context(subscribed(kind, bench.controller.publisher.endpoint))
        for _ in range(ROUNDS):
            fresh = random.integers(0, 150_000, PAGE, dtype=np.uint64)
            for kind, bench in benches.items():
                controller, prompt = bench.controller, np.concatenate([bench.history, fresh])
                spent: list[float] = []
                with timed(spent):
                    admission = controller.admit(controller.lookup(prompt), states=1)
                assert admission.wait().depth == len(bench.history)
                admission.wait_layer(0)
                admission.wait_layer(1)
                states = {len(prompt): admission.take_states()}
                with timed(spent):
                    controller.commit(admission, prompt, states)
                with timed(spent):
                    controller.release(admission)
                times[kind].append(sum(spent))
                assert controller.flush()
    base = statistics.median(times["off"])
    for kind, seconds in times.items():
        middle = statistics.median(seconds)
        report(f"engine: {kind}", us=round(middle * 1e6, 1), ratio=round(middle / base, 3))


class Endless(EventSource):
    """A source that always has events, until it is over."""

    over = False

    def __init__(self) -> None:
        group = ObjectGroup(PoolName.KV, b"n" * 32, b"l" * 32, PAGE)
        place = Place(Medium.STORAGE, "ssd")
        keys = [number.to_bytes(32, "big") for number in range(64)]
        self._events = [KVEvent(EventKind.STORED, place, group, [key], keys[0], 1) for key in keys]

    def collect(self) -> Sequence[KVEvent]:
        return () if self.over else self._events

    def snapshot(self) -> Iterator[Sequence[KVEvent]]:
        yield from ()

    def follow(self, wake: Callable[[], None]) -> None:
        pass


def publisher() -> None:
    """Rows of the publisher alone."""
    for kind in KINDS[1:]:
        source = Endless()
        made = EventPublisher(ANY, [source])
        with subscribed(kind, made.endpoint):
            began, start, cpu = made.log.events, time.perf_counter(), time.process_time()
            time.sleep(SECONDS)
            count = made.log.events - began
            seconds, used = time.perf_counter() - start, time.process_time() - cpu
        rate, cost = round(count / seconds), round(used / count * 1e6, 2)
        report(f"publisher: {kind}", events_per_second=rate, us=cost)
        source.over = True
        made.close()


def store() -> None:
    """Rows of a memory store whose pages come in batches of 64."""
    times: dict[bool, list[float]] = {False: [], True: []}
    for round_ in range(10):
        for told in (False, True):
            with ExitStack() as ends:
                held = ends.enter_context(MemoryBackend())
                if told:
                    ends.enter_context(published(held, ANY))
                batches = [[item(n, chain) for n in range(1, 65)] for chain in range(100)]
                start = time.process_time()
                for batch in batches:
                    held.set(batch)
                time.sleep(0.1)
                if round_:
                    times[told].append((time.process_time() - start) / 6400)
    off, on = (statistics.median(times[told]) for told in (False, True))
    report("store: off", us=round(off * 1e6, 2), ratio=1.0)
    report("store: no subscriber", us=round(on * 1e6, 2), ratio=round(on / off, 3))


def report(name: str, **figures: float) -> None:
    """One row."""
    print(json.dumps({"name": name, **figures}), flush=True)


if __name__ == "__main__":
    engine()
    store()
    publisher()
