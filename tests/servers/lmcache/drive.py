"""LMCache's own `fs` adapter beside ours, in one process, by turns: speed of stores and loads, bytes on disk.

    python -m tests.servers.lmcache.drive DIRECTORY [ROUNDS]

runs in LMCache's environment. One JSON line for each size of objects: gigabytes a second of each adapter
(median over rounds), and the median of the ratios of each round.
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from operator import truediv
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import torch
from lmcache.v1.distributed.api import MemoryLayoutDesc, ObjectKey
from lmcache.v1.distributed.l2_adapters import create_l2_adapter
from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config
from lmcache.v1.memory_management import MemoryFormat, MemoryObjMetadata, TensorMemoryObj
from lmcache.v1.platform import consume_fd

from tests.servers.lmcache import plugin


def adapter(config: dict[str, Any]) -> Any:
    """Return an adapter as LMCache's server makes it."""
    found = parse_args_to_l2_adapters_config(SimpleNamespace(l2_adapter=[json.dumps(config)]))
    return create_l2_adapter(found.adapters[0])


def key(name: int, model: str = "model", salt: str = "") -> ObjectKey:
    return ObjectKey(name.to_bytes(32, "big"), model, 0x01000100, 0, salt)


def buffers(count: int, nbytes: int, fill: int | None = None) -> list[TensorMemoryObj]:
    """Return objects of so many bytes, random ones without `fill`."""
    data = torch.randint(0, 256, (count, nbytes), dtype=torch.uint8) if fill is None else None
    made = []
    for n in range(count):
        raw = torch.full((nbytes,), fill, dtype=torch.uint8) if data is None else data[n]
        shape, dtype = torch.Size([nbytes // 2]), torch.bfloat16
        meta = MemoryObjMetadata(
            shape, dtype, 0, nbytes, MemoryFormat.KV_2LTD, 1, shapes=[shape], dtypes=[dtype]
        )
        made.append(TensorMemoryObj(raw_data=raw, metadata=meta, parent_allocator=None))
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


def used(directory: Path) -> int:
    return sum(os.stat(path).st_blocks * 512 for path in directory.rglob("*") if path.is_file())


def main(directory: Path, rounds: int = 7) -> None:
    pair = {
        "fs": adapter({"type": "fs", "base_path": str(directory / "fs")}),
        "ours": adapter(plugin(f"file://{directory}/ours?capacity=8GiB")),
    }
    payload = 0
    for nbytes, count in ((256 << 10, 128), (1 << 20, 64), (8 << 20, 16)):
        given, places = buffers(count, nbytes), buffers(count, nbytes, 0)
        speeds: dict[str, list[float]] = {f"{what} {name}": [] for what in ("set", "get") for name in pair}
        for turn in range(rounds):
            keys = [key(nbytes * 1000 + turn * count + n) for n in range(count)]
            payload += count * nbytes
            for name, l2 in list(pair.items())[:: 1 if turn % 2 else -1]:
                times = [time.perf_counter()]
                assert store(l2, keys, given).is_successful()
                times.append(time.perf_counter())
                assert len(load(l2, keys, places)) == count
                times.append(time.perf_counter())
                for what, (begun, over) in zip(("set", "get"), pairwise(times), strict=True):
                    speeds[f"{what} {name}"].append(count * nbytes / (over - begun) / 1e9)
        row = {"bytes": nbytes, **{name: round(median(found), 2) for name, found in speeds.items()}}
        for what in ("set", "get"):
            ratios = map(truediv, speeds[f"{what} ours"], speeds[f"{what} fs"])
            row[f"{what} ratio"] = round(median(ratios), 2)
        print(json.dumps(row), flush=True)
    print(json.dumps({f"disk {name}": round(used(directory / name) / payload, 3) for name in pair}))
    for l2 in pair.values():
        l2.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:]))
