"""Restores and write-through of a controller, beside each of their legs alone, a JSON line a row.

    python -m tests.benchmarks.restore [--tokens 2048,8192,32768] [--store file,lmdb,shared,tcp]
        [--rounds 5] [--directory DIRECTORY]

A prompt has the bytes of Qwen3-Next: pages of 64 tokens (1.5 MiB) and one state at its end (73.7 MiB). Device
pools are in CPU memory. `shared` is a daemon on a unix socket, with the memory attached, `tcp` is a daemon
on loopback; each serves a `file` store.

    restore   whole: from `lookup` until every layer is in its device slots
              legs:  `get` (the store's batch_get_v2 in one call), `load` (host to device),
              `both` (a `get` and a `load` of other bytes at the same time: what the cores can do)
    write     whole: from `commit` until storage has acknowledged every object; nothing is synced
              legs:  `copy` (device to host), `set` (the store's batch_set_v2 in one call), `both` as above

The sides of a row take turns on the same memory, and every byte that came back is compared. `ratio` is the
time of the slower leg (of a write: of `set`) in that of the whole, `both_ratio` that of `both`. Figures are
medians.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Self

import numpy as np
from blake3 import blake3

from tests.pools.tensors import STORAGE, ArrayTensor
from tiercache.config.urls import storage_url
from tiercache.controller import ControllerOptions, HybridCacheController
from tiercache.core import (
    CacheTransferUnits,
    HitPolicy,
    Locations,
    Outcome,
    PoolName,
    PoolTransfer,
    Tier,
    TokenArray,
)
from tiercache.geometry import Geometry, kv_geometry, state_geometry
from tiercache.keys import Identity, Shard, layout_digest, object_keys, page_keys
from tiercache.models.profile import profile_named
from tiercache.pools import DevicePool, HostArena
from tiercache.storage.registry import open_backend
from tiercache.storage.vectors import take
from tiercache_lab.bench.baselines import direct_possible
from tiercache_lab.bench.machine import drop, machine, warm
from tiercache_lab.bench.rpc import start_daemon
from tiercache_lab.bench.timing import Side, medians

KV, MAMBA = PoolName.KV, PoolName.MAMBA
PAGE, LAYERS, STATES = 64, 48, 3
PAGES = kv_geometry(range(3, LAYERS, 4), kv_heads=2, head_dim=256, dtype="bfloat16", page_size=PAGE)
STATE = state_geometry(
    [
        tensor
        for layer in range(LAYERS)
        if layer % 4 != 3
        for tensor in ((layer, "conv", (8192, 3), "bfloat16"), (layer, "ssm", (32, 128, 128), "float32"))
    ],
    PAGE,
)
GEOMETRIES = {KV: PAGES, MAMBA: STATE}
STORES = ("file", "lmdb", "shared", "tcp")
TARGETS = {"restore": 0.85, "write": 0.8}
LAPSE_S = 120.0


class Bed:
    """A controller over a store, whose index and memory the legs alone use as well.

    At first, the store has one prompt of `tokens` tokens, and device and host are empty. `deleting` is the
    URL by which objects are deleted, if `url` does not permit it.
    """

    def __init__(self, url: str, tokens: int, deleting: str = "") -> None:
        self._random = np.random.default_rng(3)
        self._pages = tokens // PAGE
        self.nbytes = self._pages * PAGES.nbytes + STATE.nbytes
        slots = {KV: self._pages + 1, MAMBA: STATES}
        self._tensors = {pool: self._filled(geometry, slots[pool]) for pool, geometry in GEOMETRIES.items()}
        self._device = {
            pool: DevicePool.from_tensors(geometry, self._tensors[pool])
            for pool, geometry in GEOMETRIES.items()
        }
        # All fetches together may hold half of the host: a prompt, so that a restore is one wave.
        block = PAGES.padded_nbytes
        blocks = 2 * (self._pages - -STATE.nbytes // block)
        self._arena = HostArena(blocks * block, block)
        self.controller = HybridCacheController(
            Identity("bench", "1", "bfloat16", "bfloat16", "float32", PAGE),
            self._device,
            self._arena,
            open_backend(url),
            options=ControllerOptions(restore_deadline=60.0, in_flight_share=0.5),
        )
        # private: a leg alone is measured with the controller's own store, copies and memory
        self._context = self.controller._context
        assert self._context.storage is not None
        self._storage = self._context.storage
        self._deleter = open_backend(deleting) if deleting else self._storage.backend
        self._stored: list[TokenArray] = []
        self.begin_write(0)
        self.write(0)
        self.end_write(0)
        self.empty()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.controller.close()
        if self._deleter is not self._storage.backend:
            self._deleter.close()

    def _filled(self, geometry: Geometry, slots: int) -> dict[tuple[int, str], ArrayTensor]:
        """Tensors of random bytes, `[slots, *shape]` for each segment."""
        tensors = {}
        for s in geometry.segments:
            array = self._random.integers(0, 1 << 64, slots * s.nbytes // 8, np.uint64).view(STORAGE[s.dtype])
            tensors[s.layer, s.name] = ArrayTensor(array.reshape(slots, *s.shape), s.dtype)
        return tensors

    def empty(self, _: int = 0) -> None:
        """Let everything end that is under way; then empty device and host."""
        while self.controller.tick(0.1):
            pass
        for tier in (Tier.DEVICE, Tier.HOST):
            self.controller.evict(tier)

    def wipe(self, _: int) -> None:
        """Overwrite device and host, so that old bytes cannot be taken for restored ones."""
        self.wipe_host()
        for tensors in self._tensors.values():
            for tensor in tensors.values():
                tensor.array.fill(0)

    def wipe_host(self) -> None:
        """Overwrite the host's memory."""
        np.frombuffer(self._arena.hold(), np.uint8).fill(0)

    # A restore: all of it, and its legs.

    def restore(self, _: int) -> None:
        """Bring the prompt from the store to the device."""
        self._admission = self.controller.admit(self.controller.lookup(self._prompt))
        assert self._admission.wait().depth == self._pages * PAGE
        for layer in range(LAYERS):
            self._admission.wait_layer(layer)

    def end_restore(self, _: int) -> None:
        """Compare what was restored, and end the request."""
        self._check(self._on_device(self._table(self._admission.restored_states)))
        self.controller.release(self._admission)

    def take_host(self, _: int = 0) -> None:
        """Take host objects for a prompt; `give_host` gives them back."""
        host = self._context.host
        self.handles = {KV: host[KV].alloc(self._pages), MAMBA: host[MAMBA].alloc(1)}

    def give_host(self, _: int = 0) -> None:
        """Compare what these host objects hold, and give them back."""
        self._check(self._on_host())
        for pool, handles in self.handles.items():
            self._context.host[pool].free(handles)

    def get(self, _: int) -> None:
        """Read the prompt from the store into host objects."""
        self._expect(self._storage.batch_get_v2(self._transfers()), Outcome.HIT)

    def begin_load(self, _: int) -> None:
        """Fill host objects and take device slots."""
        self.get(0)
        self._slots = {pool: self._device[pool].alloc(len(h)) for pool, h in self.handles.items()}

    def load(self, _: int) -> None:
        """Copy the prompt from host objects to device slots."""
        self._context.engine.load(self._units(self.handles, self._slots)).wait()

    def end_load(self, n: int) -> None:
        """Compare what was loaded, and give everything back."""
        self._check(self._on_device(self._slots))
        for pool, slots in self._slots.items():
            self._device[pool].free(slots)
        self.give_host(n)

    def begin_both(self, _: int) -> None:
        """Put the filled host objects aside, and take another set of them."""
        self._aside = self.handles
        self.take_host()

    def both(self, n: int) -> None:
        """Read the prompt into one set of host objects while another set is copied to device slots."""
        reading = Thread(target=self.get, args=(n,))
        reading.start()
        self._context.engine.load(self._units(self._aside, self._slots)).wait()
        reading.join()

    def end_both(self, n: int) -> None:
        """Compare what was read and loaded, and give everything back."""
        self.give_host()
        self.handles = self._aside
        self.end_load(n)

    # A write: all of it, and its legs.

    def begin_write(self, _: int) -> None:
        """Begin a request whose prompt nobody has, and "compute" it; the store is empty."""
        self.empty()
        for tokens in self._stored:
            keys = page_keys(self._context.namespace, tokens, PAGE)
            for pool, geometry in GEOMETRIES.items():
                layout = layout_digest(pool, geometry.fingerprint, Shard())
                self._deleter.delete(object_keys(pool, layout, keys if pool is KV else keys[-1:]))
        self._stored.clear()
        self._prompt = self._random.integers(0, 150_000, self._pages * PAGE + 1, np.uint64)
        self._keys = page_keys(self._context.namespace, self._prompt, PAGE)
        self._admission = self.controller.admit(self.controller.lookup(self._prompt), states=1)
        assert self._admission.wait().depth == 0
        self._states = self._admission.take_states()
        self._expected = self._on_device(self._table(self._states))

    def write(self, _: int) -> None:
        """Commit the prompt, and wait until storage has taken all of it."""
        end = time.monotonic() + LAPSE_S
        sequence = self._prompt[: self._pages * PAGE]
        self.controller.commit(self._admission, sequence, {len(sequence): self._states})
        while self._context.in_flight.operations:
            self.controller.tick(0.1)
            assert time.monotonic() < end, "storage has not taken everything"

    def end_write(self, n: int) -> None:
        """End the request, and compare what the store has."""
        self._stored.append(self._prompt)
        self.controller.release(self._admission)
        self.empty()
        self.wipe_host()
        self.take_host()
        self.get(n)
        self.give_host(n)
        self._storage.backend.flush()

    def copy(self, _: int) -> None:
        """Copy the prompt from device slots to host objects."""
        self._context.engine.store(self._units(self._table(self._states), self.handles)).wait()

    def set(self, _: int) -> None:
        """Write host objects to the store."""
        self._expect(self._storage.batch_set_v2(self._transfers()), Outcome.STORED)

    def both_writes(self, n: int) -> None:
        """Write one set of host objects to the store while the prompt is copied to another set."""
        units = self._units(self._table(self._states), self.handles)
        self.handles, self._aside = self._aside, self.handles
        setting = Thread(target=self.set, args=(n,))
        setting.start()
        self._context.engine.store(units).wait()
        setting.join()

    def end_both_writes(self, _: int) -> None:
        """Compare what was set, and go on with the host objects that were copied."""
        self.give_host()
        self.handles = self._aside

    def release(self, _: int) -> None:
        """End the request."""
        self.controller.release(self._admission)

    def _transfers(self) -> list[PoolTransfer]:
        last, parent = self._keys[-1], self._keys[-2]
        return [
            PoolTransfer(
                KV, self._keys, self.handles[KV],
                depths=range(1, self._pages + 1),
                parents=[b"", *self._keys[:-1]],
            ),
            PoolTransfer(
                MAMBA, [last], self.handles[MAMBA], hit_policy=HitPolicy.TRAILING_PAGES,
                depths=[self._pages],
                parents=[parent],
            ),
        ]  # fmt: skip

    def _units(
        self, sources: Mapping[PoolName, Locations], destinations: Mapping[PoolName, Locations]
    ) -> list[CacheTransferUnits]:
        return [CacheTransferUnits(pool, at, destinations[pool]) for pool, at in sources.items()]

    def _table(self, states: Mapping[PoolName, int]) -> dict[PoolName, Locations]:
        return {KV: self._admission.pages[KV][: self._pages], MAMBA: np.array([states[MAMBA]])}

    def _on_device(self, table: Mapping[PoolName, Locations]) -> bytes:
        """Digest of the objects in device slots."""
        digest = blake3()
        for pool, slots in table.items():
            for slot in slots.tolist():
                for tensor in self._tensors[pool].values():
                    digest.update(tensor.array[slot].reshape(-1).view(np.uint8).data)
        return digest.digest()

    def _on_host(self) -> bytes:
        """Digest of the host objects that are taken."""
        digest = blake3()
        for pool, handles in self.handles.items():
            for buffers in self._context.host[pool].buffers_of(handles):
                for view in take(buffers, 0, GEOMETRIES[pool].nbytes):
                    digest.update(view)
        return digest.digest()

    def _check(self, digest: bytes) -> None:
        assert digest == self._expected, "other bytes came back than were written"

    def _expect(self, outcomes: Mapping[PoolName, Sequence[Outcome]], wanted: Outcome) -> None:
        assert all(set(each) == {wanted} for each in outcomes.values()), f"not all are {wanted}: {outcomes}"


def each(*steps: Callable[[int], object]) -> Callable[[int], None]:
    """Return a call that makes these one after the other."""

    def all_of_them(n: int) -> None:
        for step in steps:
            step(n)

    return all_of_them


def restores(bed: Bed, files: Path, rounds: int, *, cold: bool) -> dict[str, float]:
    """Compare a restore with its legs; the page cache has the files of the store, or has not if `cold`."""

    def settle(_: int) -> None:
        (drop if cold else warm)(files)

    begin = each(bed.empty, bed.wipe, settle)
    filled = each(begin, bed.take_host, bed.begin_load)
    sides = [
        Side("whole", bed.restore, begin, bed.end_restore),
        Side("both", bed.both, each(filled, bed.begin_both, settle), bed.end_both),
        Side("get", bed.get, each(begin, bed.take_host), bed.give_host),
        Side("load", bed.load, filled, bed.end_load),
    ]
    return medians(sides, rounds)


def writes(bed: Bed, rounds: int) -> dict[str, float]:
    """Compare a write-through with its legs."""
    begin = each(bed.begin_write, bed.take_host)
    filled, compared = each(begin, bed.copy), each(bed.give_host, bed.end_write)
    sides = [
        Side("whole", bed.write, bed.begin_write, bed.end_write),
        Side("both", bed.both_writes, each(filled, bed.begin_both), each(bed.end_both_writes, compared)),
        Side("copy", bed.copy, begin, each(bed.give_host, bed.release)),
        Side("set", bed.set, filled, compared),
    ]
    return medians(sides, rounds)


def urls_of(store: str, directory: Path, capacity: int, stack: ExitStack) -> tuple[str, str]:
    """Return the URLs of a new store (see `Bed`); starts a daemon where there is to be one."""
    if store in ("file", "lmdb"):
        return storage_url(store, directory / "store", capacity=capacity), ""
    # The path of a unix socket may have some 100 bytes only.
    sockets = stack.enter_context(tempfile.TemporaryDirectory(prefix="tiercache-bench-"))
    address, unix = start_daemon(directory, sockets, capacity, stack), storage_url("grpc", sockets)
    return (storage_url("grpc", address=address), unix) if store == "tcp" else (unix, "")


def rows_of(store: str, tokens: int, rounds: int, directory: Path) -> Iterator[dict[str, object]]:
    """Yield the rows of one store and one length of prompt."""
    with ExitStack() as stack:
        need = tokens // PAGE * PAGES.nbytes + STATE.nbytes
        url, deleting = urls_of(store, directory, 3 * need + (256 << 20), stack)
        bed = stack.enter_context(Bed(url, tokens, deleting))
        for cache in ("warm", "cold") if store == "file" else ("warm",):
            times = restores(bed, directory, rounds, cold=cache == "cold")
            yield row_of("restore", store, cache, tokens, bed.nbytes, times)
        yield row_of("write", store, "", tokens, bed.nbytes, writes(bed, rounds))


def row_of(
    what: str, store: str, cache: str, tokens: int, nbytes: int, times: Mapping[str, float]
) -> dict[str, object]:
    """Return a row of the report."""
    limit = max(times["get"], times["load"]) if what == "restore" else times["set"]
    row: dict[str, object] = {
        "benchmark": f"restore.{what}", "store": f"{store} {cache}".strip(), "tokens": tokens,
        "mib": nbytes >> 20,
        "gb_s": round(nbytes / times["whole"] / 1e9, 2),
        "ms": {name: round(seconds * 1e3, 1) for name, seconds in times.items()},
        "ratio": round(limit / times["whole"], 2), "target": TARGETS[what],
    }  # fmt: skip
    return row | {"both_ratio": round(times["both"] / times["whole"], 2)}


def main() -> None:
    """Print all rows."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", default="2048,8192,32768", help="lengths of the prompts")
    parser.add_argument("--store", default=",".join(STORES), help="stores to measure")
    parser.add_argument("--rounds", type=int, default=5, help="rounds that count")
    parser.add_argument("--directory", default=tempfile.gettempdir(), help="where the stores are put")
    asked = parser.parse_args()
    profile = profile_named("qwen3-next-80b-a3b")
    assert (PAGES.nbytes, STATE.nbytes) == (profile.kv_bytes_per_token * PAGE, profile.state_bytes)
    print(machine(Path(asked.directory), direct=direct_possible(Path(asked.directory))), file=sys.stderr)
    for store in asked.store.split(","):
        for tokens in map(int, asked.tokens.split(",")):
            with tempfile.TemporaryDirectory(prefix=".benchmark-", dir=asked.directory) as directory:
                for row in rows_of(store, tokens, asked.rounds, Path(directory).absolute()):
                    print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
