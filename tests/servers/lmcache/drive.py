"""LMCache's own `fs` adapter beside ours, in one process, by turns: speed of stores and loads.

    python -m tests.servers.lmcache.drive DIRECTORY [ROUNDS]

runs in LMCache's environment. One JSON line for each size of objects: gigabytes a second of sets, and of
gets from the disk and from the page cache (medians over rounds), and the medians of the ratios of each round.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from operator import truediv
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.config import L1MemoryManagerConfig
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.distributed.memory_manager.l1_memory_manager import L1MemoryManager
from lmcache.v1.memory_management import MemoryObj
from lmcache.v1.platform import consume_fd

from tests.servers.lmcache import plugin

L1 = L1MemoryManager(L1MemoryManagerConfig(1 << 30, use_lazy=False, shm_name=""))


def adapter(config: dict[str, Any]) -> Any:
    """Return an adapter as LMCache's server makes it."""
    found = parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(config)]))
    return create_l2_adapter(found.adapters[0], L1.get_l1_memory_desc())


def key(name: int, model: str = "model", salt: str = "") -> ObjectKey:
    return ObjectKey(name.to_bytes(32, "big"), model, 0x01000100, 0, salt)


def buffers(count: int, nbytes: int, fill: int | None = None) -> list[MemoryObj]:
    """Return objects of so many bytes in L1, random ones without `fill`."""
    _, made = L1.allocate(layouts(nbytes)[0], count)
    for one in made:
        raw = one.raw_tensor[:nbytes]
        raw.random_(0, 256) if fill is None else raw.fill_(fill)
    return made


def layouts(nbytes: int) -> dict[int, MemoryLayoutDesc]:
    return {0: MemoryLayoutDesc([torch.Size([nbytes // 2])], [torch.bfloat16])}


def ended(fd: int, fetch: Callable[[], Any], seconds: float = 60) -> Any:
    """Wait for the signal of a task, and return what it has come to."""
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    until = time.monotonic() + seconds
    while not (found := fetch()):
        assert time.monotonic() < until
        poller.poll(1000)
        consume_fd(fd)
    return found


def store(l2: Any, keys: list[ObjectKey], objects: list[Any]) -> Any:
    number = l2.submit_store_task(keys, objects)
    return ended(l2.get_store_event_fd(), l2.pop_completed_store_tasks)[number]


def look_up(l2: Any, keys: list[ObjectKey], nbytes: int) -> list[int]:
    number = l2.submit_lookup_and_lock_task(keys, layouts(nbytes))
    fd = l2.get_lookup_and_lock_event_fd()
    found: list[int] = ended(fd, lambda: l2.query_lookup_and_lock_result(number)).get_indices_list()
    return found


def load(l2: Any, keys: list[ObjectKey], objects: list[Any]) -> list[int]:
    number = l2.submit_load_task(keys, objects)
    found: list[int] = ended(l2.get_load_event_fd(), lambda: l2.query_load_result(number)).get_indices_list()
    return found


def forget(directory: Path) -> None:
    """Drop the files of a directory from the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb") as file:
                os.fdatasync(file.fileno())
                os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def main(directory: Path, rounds: int = 7) -> None:
    pair = {
        "fs": adapter({"type": "fs", "base_path": str(directory / "fs")}),
        "ours": adapter(plugin(f"file://{directory}/ours?capacity=8GiB")),
    }
    for nbytes, count in ((256 << 10, 128), (1 << 20, 64), (8 << 20, 16)):
        given, places = buffers(count, nbytes), buffers(count, nbytes, 0)
        took: dict[str, list[float]] = {}
        for turn in range(rounds):
            keys = [key(nbytes * 1000 + turn * count + n) for n in range(count)]
            for name, l2 in list(pair.items())[:: 1 if turn % 2 else -1]:
                for what in ("set", "cold", "into the cache", "warm"):
                    if what == "cold":
                        forget(directory / name)
                    begun = time.perf_counter()
                    ok = (
                        store(l2, keys, given) >= 0 if what == "set" else len(load(l2, keys, places)) == count
                    )
                    assert ok
                    took.setdefault(f"{what} {name}", []).append(time.perf_counter() - begun)
        row = {name: round(count * nbytes / median(seconds) / 1e9, 2) for name, seconds in took.items()}
        for what in ("set", "cold", "warm"):
            row[what] = round(median(map(truediv, took[f"{what} fs"], took[f"{what} ours"])), 2)
        print(json.dumps({"bytes": nbytes, **row}), flush=True)
    for l2 in pair.values():
        l2.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
