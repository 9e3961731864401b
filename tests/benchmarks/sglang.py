"""SGLang's own file backend and ours under the same work: `make bench-engines [ARGS="--rounds 7"]`, one JSON
line a row.

Runs in the environment of `make test-engines`, without a GPU. Both stand behind SGLang's real controller
functions and real host pools: 256 pages of 1 MiB KV (batches of 128, as the controller cuts them) and 16
states of 16.5 MiB. `peer` takes pages by the calls that the controller makes, `peer.v2` by those that it
makes for sidecars, which suit that backend better. Rounds alternate; a ratio is that to the faster of the
two, the median of the rounds' own. Every byte that came back is compared. Ours verifies a checksum of every
object, the peer none.

    set        into files that are not there yet; for ours, blocks that were written before (a store in use)
    set.fresh  into a new directory
    again      all of it is stored already
    get.warm   from the page cache        get.cold   after the page cache was dropped
    exists     256 pages with a state each, in one query
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tests.engines.sglang.conftest  # noqa: F401  # isort: skip
import torch
from sglang.srt.mem_cache.device_pool_info import MambaStateBufferInfo
from sglang.srt.mem_cache.hicache_storage import HiCacheStorageExtraInfo, PoolName, PoolTransfer
from sglang.srt.mem_cache.pool_host.mamba import MambaPoolHost

from tests.engines.sglang import rig
from tiercache_lab.bench.machine import drop

PAGES, STATES, TOKENS, LAYERS, HEADS, DIM, BATCH = 256, 16, 64, 8, 4, 128, 128
MIB = 1 << 20
FIRST = HiCacheStorageExtraInfo(prefix_keys=[])
OURS, PEER, PEER_V2 = "tiercache", "peer", "peer.v2"


def mamba_pool() -> Any:
    """Twice 16 states of 16.5 MiB."""
    info = MambaStateBufferInfo(
        temporal=torch.zeros(LAYERS, 1, 32, 128, 128, dtype=torch.float32),
        conv=(torch.zeros(LAYERS, 1, 8192, 4, dtype=torch.bfloat16),),
    )
    return MambaPoolHost(info, 2.0, 0, device_capacity=STATES, pin_memory=False, layout="page_first")


class Contender:
    """One backend, attached to a controller of its own over pools that all share."""

    def __init__(self, name: str, kv: Any, mamba: Any, group: Any, root: Path, storage: str) -> None:
        self.name, self.kv, self.mamba, self.root, self.storage = name, kv, mamba, root, storage
        self.made = rig.controller(kv, mamba, group, LAYERS)
        self.made.page_size = TOKENS
        self.files = root / "nowhere"

    def attach(self) -> None:
        """In a new directory."""
        self.files = Path(tempfile.mkdtemp(dir=self.root))
        entries = self.made.mem_pool_host.entries
        if self.name == OURS:
            extra = rig.extra_config(self.storage.replace("{path}", str(self.files / "store")))
            self.made.attach_storage_backend("dynamic", TOKENS, rig.MODEL, extra, host_pools=entries)
        else:
            self.made.attach_storage_backend(
                "file", TOKENS, rig.MODEL, {"file_storage_path": str(self.files)}, host_pools=entries
            )

    def detach(self) -> None:
        self.made.detach_storage_backend()
        shutil.rmtree(self.files)

    def set_pages(self, keys: list[str]) -> None:
        for start in range(0, PAGES, BATCH):
            part, indices = keys[start : start + BATCH], pages_from(start, BATCH)
            if self.name == PEER_V2:
                assert all(
                    self.made.storage_backend.batch_set_v2([PoolTransfer(PoolName.KV, indices, keys=part)])[
                        PoolName.KV
                    ]
                )
            else:
                before = HiCacheStorageExtraInfo(prefix_keys=keys[:start])
                assert self.made.page_set_func(part, indices, before)

    def get_pages(self, keys: list[str]) -> None:
        running = SimpleNamespace(request_id="r", is_terminated=lambda: False)
        for start in range(0, PAGES, BATCH):
            part, indices = keys[start : start + BATCH], pages_from(PAGES + start, BATCH)
            if self.name == PEER_V2:
                assert all(
                    self.made.storage_backend.batch_get_v2([PoolTransfer(PoolName.KV, indices, keys=part)])[
                        PoolName.KV
                    ]
                )
            else:
                assert self.made.page_get_func(running, part, indices, None) == BATCH

    def set_states(self, keys: list[str]) -> None:
        assert all(self.made.storage_backend.batch_set_v2([states(keys, 0)], FIRST)[PoolName.MAMBA])

    def get_states(self, keys: list[str]) -> None:
        assert all(self.made.storage_backend.batch_get_v2([states(keys, STATES)])[PoolName.MAMBA])

    def exists(self, keys: list[str]) -> None:
        found = self.made.storage_backend.batch_exists_v2(keys, [rig.any_state()])
        assert found.kv_hit_pages == PAGES


def pages_from(first: int, count: int) -> torch.Tensor:
    return torch.arange(first * TOKENS, (first + count) * TOKENS)


def states(keys: list[str], first: int) -> PoolTransfer:
    chosen = keys[PAGES // STATES - 1 :: PAGES // STATES]
    return PoolTransfer(PoolName.MAMBA, torch.arange(first, first + STATES), keys=chosen)


def measure(work: Callable[[], None], times: int = 1) -> float:
    """Seconds of one piece of work: the median."""
    took = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        took.append(time.perf_counter() - start)
    return statistics.median(took)


def a_round(one: Contender, keys: list[str]) -> Iterator[tuple[str, float]]:
    """(what, seconds) of everything, once."""
    one.attach()
    os.sync()
    yield "set.fresh kv", measure(lambda: one.set_pages(keys))
    yield "set.fresh mamba", measure(lambda: one.set_states(keys))
    one.made.clear_storage_backend()
    os.sync()
    yield "set kv", measure(lambda: one.set_pages(keys))
    yield "set mamba", measure(lambda: one.set_states(keys))
    yield "sync", measure(os.sync)
    yield "again kv", measure(lambda: one.set_pages(keys))
    for state in ("cold", "warm"):
        if state == "cold":
            os.sync()
            drop(one.files)
        else:
            one.get_pages(keys)
            one.get_states(keys)
        wipe(one)
        yield f"get.{state} kv", measure(lambda: one.get_pages(keys))
        yield f"get.{state} mamba", measure(lambda: one.get_states(keys))
        compare(one)
    for key in keys:  # a state at every page, so that the query finds everything it looks for
        one.made.storage_backend.batch_set_v2([rig.state_at(key, 0)], FIRST)
    yield "exists", measure(lambda: one.exists(keys), 50)
    one.detach()


def wipe(one: Contender) -> None:
    for tensor, half in _halves(one):
        tensor[half:].zero_()


def compare(one: Contender) -> None:
    for tensor, half in _halves(one):
        assert torch.equal(tensor[:half].view(torch.uint8), tensor[half : 2 * half].view(torch.uint8))


def _halves(one: Contender) -> list[tuple[torch.Tensor, int]]:
    tokens = [one.kv.k_buffer, one.kv.v_buffer]
    if one.kv.layout == "layer_first":
        tokens = [layer for buffer in tokens for layer in buffer]
    return [(t, PAGES * TOKENS) for t in tokens] + [
        (t, STATES) for t in (one.mamba.temporal_buffer, *one.mamba.conv_buffer)
    ]


@contextmanager
def contenders(root: Path, layout: str, storage: str) -> Iterator[list[Contender]]:
    # One half is stored, the other filled.
    kv = rig.kv_pool(layout, layers=LAYERS, pages=2 * PAGES, heads=HEADS, page=TOKENS, dim=DIM)
    mamba = mamba_pool()
    rig.fill(mamba)
    with rig.on_a_cpu(), rig.group_of_one(root) as group:
        yield [Contender(name, kv, mamba, group, root, storage) for name in (PEER, PEER_V2, OURS)]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--layout", default="page_first", choices=["page_first", "layer_first"])
    parser.add_argument(
        "--directory",
        type=Path,
        default=Path.cwd(),
        help="where the stores are made and removed; needs 2 GiB",
    )
    parser.add_argument(
        "--storage", default="file://{path}?capacity=8GiB", help="ours; {path} is a directory of its own"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    keys = rig.keys(*range(PAGES))
    took: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    root = Path(tempfile.mkdtemp(dir=options.directory, prefix=".benchmark-"))
    try:
        with contenders(root, options.layout, options.storage) as sides:
            for turn in range(options.rounds + 1):
                for one in sides if turn % 2 else sides[::-1]:
                    for what, seconds in a_round(one, keys):
                        if turn:  # the first round warms up
                            took[what][one.name].append(seconds)
    finally:
        shutil.rmtree(root)
    for what, seconds_of in took.items():
        nbytes = {"kv": PAGES * MIB, "mamba": STATES * 16.5 * MIB}.get(what.split()[-1])
        row: dict[str, Any] = {
            "benchmark": f"sglang.{what}",
            "layout": options.layout,
            "rounds": options.rounds,
        }
        for name, seconds in seconds_of.items():
            middle = statistics.median(seconds)
            row[name] = f"{nbytes / middle / 1e9:.2f} GB/s" if nbytes else f"{middle * 1e3:.3f} ms"
        ratios = [
            min(peers) / ours
            for *peers, ours in zip(seconds_of[PEER], seconds_of[PEER_V2], seconds_of[OURS], strict=True)
        ]
        row |= {
            "ratio": round(statistics.median(ratios), 2),
            "from": round(min(ratios), 2),
            "to": round(max(ratios), 2),
        }
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
