"""Loads that 10, 100 and 1,000 workers put on each tier: `python -m tests.benchmarks.workers TRACE`.

A worker is the replay of a whole trace, at the trace's own times: the real controller, index and policies
without bytes (device 40 GiB, host 200 GiB, store 1 TiB, `hvd` above and `lru` below). Its rates, which are
means over the trace, times a number of workers are set against limits. A limit is measured (a benchmark in
docs/benchmarks.md, or `--units` here), documented by the service, or assumed, and `source` says which. So
this is arithmetic: it shows what is met first, and about where. What it leaves out is in docs/beyond.md.

The output is one JSON line for each way of writing and limit: the load of 10, 100 and 1,000 workers in parts
of the limit, and the number of workers at which it is met. `--units` measures the costs that no other
benchmark has: events, and the indexes of packs.
"""

from __future__ import annotations

import json
import sys
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from statistics import median

from tiercache_backends.s3.directory.directory import BucketDirectory
from tiercache_backends.s3.directory.objects import Pack
from tiercache_backends.s3.pack import NewEntry, make_name, pack_head, read_head

from tiercache.core import ObjectMeta, PoolName
from tiercache.events import EventKind, KVEvent, Medium, ObjectGroup, Place
from tiercache.events.encoding import decode_batch, encode_batch
from tiercache.models.profile import profile_named
from tiercache.testing.objects import key
from tiercache_lab.replay.cache import Setup
from tiercache_lab.replay.drive import Run
from tiercache_lab.replay.machines import ReplayMachine
from tiercache_lab.replay.needs import measure
from tiercache_lab.replay.sources.catalogue import open_source
from tiercache_lab.replay.tiers import StorageTier, Tiers

GiB = 1 << 30
MODEL = "qwen3-next-80b-a3b"
DEVICE, HOST, STORE = 40 * GiB, 200 * GiB, 1024 * GiB
WRITES = {"write_through": 0.0, "write_back": 0.2}
"""Ways in which the host writes to the store, and the least chance of a hit with which it does."""
HOSTED = 8
"""Workers of a host, which share its disk, its daemon and its network card."""
COUNTS = (10, 100, 1000)
NIC = 25e9
"""Bytes a second of a host's network card: 200 Gbit/s."""
HEADS, EVENTS = 35_000, 380_000
"""Indexes of packs, and blocks of events, that one core of a reader takes in each second."""
ASKED, GOT, PUT = 2.1e6, 370e3, 108e3
"""Keys that Mooncake's master is asked for, gets and puts a second of its own processor time: 0.3.13 on
loopback, one client, batches of 512 keys of 2 KiB (2026-11-24, two cores of an Intel Xeon under load)."""
REFRESH, SKEW, PAGE_OF_NAMES = 5.0, 600.0, 1000
"""For `s3`: seconds between two refreshes of a process, seconds of names in one, names of a request."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates of one worker, a second."""

    requests: float
    prompt_tokens: float
    hit_rate: float
    busy: float
    """FLOPs of the prefills that are left, in parts of what the replay's machine does."""
    host_bytes: float
    """Bytes that move between device and host, both ways."""
    host_blocks: float
    """Objects that come to the host or leave it."""
    asks: float
    asked_keys: float
    gets: float
    got_objects: float
    got_bytes: float
    sets: float
    set_objects: float
    set_bytes: float
    store_blocks: float
    """Objects that come to the store or leave it."""


@dataclass(frozen=True, slots=True)
class Limit:
    """One thing that a tier can run out of."""

    tier: str
    what: str
    load: Callable[[int], float]
    """Parts of the limit that so many workers use."""
    source: str


def one_worker(trace: str, write: str, requests: int | None = None) -> Rates:
    """Replay a trace, and return its rates."""
    source = open_source(trace, limit=requests)
    arrivals = [request.arrival for request in source]
    seconds = arrivals[-1] - arrivals[0]
    profile = profile_named(MODEL)
    tiers = Tiers(HOST, DEVICE, (StorageTier("store", STORE),))
    setup = Setup("hvd", profile, tiers, write=write, write_chance=WRITES[write])
    run = Run(source, measure(source), setup)
    run.go()
    [store], uses = run.stores, run.uses()
    host, below, value = uses["host"], uses["store"], run.controller.metrics.value
    prompts = [len(request.prompt) for request in source]
    flops = sum(float(profile.flops(0, prompt)) for prompt in prompts)
    on_host = sum(value("written_objects_total", "host", pool) for pool in (PoolName.KV, PoolName.MAMBA))
    return Rates(
        requests=len(prompts) / seconds,
        prompt_tokens=sum(prompts) / seconds,
        hit_rate=run.tally.token_hit_rate,
        busy=flops * (1 - run.tally.flops_saved) / seconds / ReplayMachine().flops,
        host_bytes=(host.read_bytes + host.written_bytes - below.read_bytes) / seconds,
        host_blocks=(on_host + store.calls["get_items"] + host.evicted) / seconds,
        asks=store.calls["exists"] / seconds,
        asked_keys=store.calls["exists_items"] / seconds,
        gets=store.calls["get"] / seconds,
        got_objects=store.calls["get_items"] / seconds,
        got_bytes=below.read_bytes / seconds,
        sets=store.calls["set"] / seconds,
        set_objects=store.calls["set_items"] / seconds,
        set_bytes=below.written_bytes / seconds,
        store_blocks=(store.calls["set_items"] + below.evicted) / seconds,
    )


def limits(worker: Rates) -> Iterator[Limit]:
    """Yield every limit, by tier."""

    def host(load: float) -> Callable[[int], float]:
        return lambda n: load * min(n, HOSTED)

    def all_of(load: float) -> Callable[[int], float]:
        return lambda n: load * n

    read, written = worker.got_bytes, worker.set_bytes
    calls = worker.asks + worker.gets + worker.sets
    master = worker.asked_keys / ASKED + worker.got_objects / GOT + worker.set_objects / PUT
    packs = worker.set_objects
    blocks = worker.host_blocks + worker.store_blocks
    disk, clients = "bench rpc, in process, 16 MiB", "benchmarks.clients, two cores"
    shared, tcp = "bench rpc, shared, 16 MiB", "bench rpc, tcp, 16 MiB"
    amazon, core = "documented by Amazon, for a prefix", "--units"
    rows: list[tuple[str, str, Callable[[int], float], str]] = [
        ("host", "copies over PCIe, 50 GB/s", lambda _: worker.host_bytes / 50e9, "assumed"),
        ("host", "engine's thread, 1.8 ms", lambda _: worker.requests * 1.8e-3, "benchmarks.engine_thread"),
        ("file", "writes, 1.5 GB/s", host(written / 1.5e9), disk),
        ("file", "reads, 6.8 GB/s", host(read / 6.8e9), disk),
        ("file", "wear, 23 TB a day", host(written * 86_400 / 23e12), "assumed: 7.68 TB, 3 times a day"),
        ("daemon of a host", "writes, 1.5 GB/s", host(written / 1.5e9), shared),
        ("daemon of a host", "calls, 650/s", host(calls / 650), clients),
        ("daemon for all", "its store's writes, 1.5 GB/s", all_of(written / 1.5e9), disk),
        ("daemon for all", "writes, gRPC, 0.71 GB/s", all_of(written / 0.71e9), tcp),
        ("daemon for all", "reads, gRPC, 0.95 GB/s", all_of(read / 0.95e9), tcp),
        ("daemon for all", "calls, 650/s", all_of(calls / 650), clients),
        ("mooncake", "card, 25 GB/s, two hosts a byte", host(2 * (read + written) / NIC), "assumed"),
        ("mooncake", "a core of the master", all_of(master), "measured on loopback"),
        ("s3", "card, 25 GB/s", host((read + written) / NIC), "assumed"),
        ("s3", "puts, 3,500/s", all_of(packs / 3500), amazon),
        ("s3", "gets, 5,500/s", lambda n: n * (worker.got_objects + (n - 1) * packs) / 5500, amazon),
        ("s3", "lists, 5,500/s", lambda n: n * lists(n * packs) / 5500, amazon),
        ("s3", f"indexes, {HEADS:,}/s", lambda n: (n - 1) * packs / HEADS, core),
        ("events", f"a router, {EVENTS:,} blocks/s", all_of(blocks / EVENTS), core),
    ]
    for row in rows:
        yield Limit(*row)


def lists(packs: float) -> float:
    """Requests a second with which a process lists what is new, while `packs` packs are written a second."""
    return max(1.0, packs * SKEW / PAGE_OF_NAMES) / REFRESH


def rate(call: Callable[[], int]) -> float:
    """Units a second of CPU time of this thread, the median of nine rounds; `call` returns its units."""
    found = []
    for _ in range(9):
        start = time.thread_time()
        units = call()
        found.append(units / (time.thread_time() - start))
    return median(found)


def events(blocks: int = 2, batch: int = 32) -> float:
    """Blocks a second that a reader decodes, in batches of `batch` events of runs of `blocks` pages."""
    group = ObjectGroup(PoolName.KV, bytes(8), bytes(32), 512)
    found = [
        KVEvent(EventKind.STORED, Place(Medium.STORAGE), group, [key((n, b)).page_key for b in range(blocks)])
        for n in range(batch)
    ]
    payload = encode_batch(0.0, found)

    def decode() -> int:
        for _ in range(100):
            decode_batch(payload)
        return 100 * blocks * batch

    return rate(decode)


def heads() -> float:
    """Indexes of packs of one object that a process takes in a second, without requests."""
    packs = []
    for number in range(1000):
        meta = ObjectMeta(bytes(32), 1 << 20, bytes(16), key(number - 1).page_key, number)
        head = pack_head([NewEntry(key(number), meta, 0, 1 << 20)])
        packs.append((make_name(number, "0" * 16, number, len(head)), head))

    def take_in() -> int:
        directory = BucketDirectory(10_000, time.monotonic)
        for name, head in packs:
            size = len(head) + (1 << 20)
            index = read_head(head, size)
            assert index is not None
            directory.load(Pack(name, size, 0.0, index))
        return len(packs)

    return rate(take_in)


def met_at(load: Callable[[int], float], most: int = 100_000) -> int | None:
    """Return the least number of workers that use more than the whole limit; None if not even `most` do."""
    if load(most) <= 1:
        return None
    return bisect_left(range(most), True, key=lambda count: load(count) > 1)


def main() -> None:
    if sys.argv[1:] == ["--units"]:
        for name, unit in (("events", events), ("heads", heads)):
            print(json.dumps({"benchmark": f"workers.{name}", "per_second": round(unit())}), flush=True)
        return
    trace, *more = sys.argv[1:]
    for write in WRITES:
        worker = one_worker(trace, write, int(more[0]) if more else None)
        rates = {name: round(value, 4) for name, value in asdict(worker).items()}
        print(json.dumps({"benchmark": "workers.rates", "write": write} | rates), flush=True)
        for limit in limits(worker):
            row: dict[str, object] = {"benchmark": "workers", "write": write}
            row |= {"tier": limit.tier, "limit": limit.what}
            row |= {f"load_{count}": round(limit.load(count), 3) for count in COUNTS}
            row |= {"met_at": met_at(limit.load), "source": limit.source}
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
