"""Lives of our adapter as LMCache makes it, and one of LMCache's `fs` adapter, inside LMCache's environment.

    python -m tests.servers.lmcache.within PATH URL

URL is that of a daemon.
"""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from lmcache.v1.distributed.api import ObjectKey

from tests.servers import slow_store
from tests.servers.lmcache import plugin
from tests.servers.lmcache.drive import L1, adapter, buffers, key, load, look_up, store
from tests.waiting import until

SIZE = 64 << 10
KEYS = [key(n, salt="a") for n in range(12)]


def same(one: list[Any], other: list[Any], numbers: list[int]) -> bool:
    return all(bytes(one[n].byte_array) == bytes(other[n].byte_array) for n in numbers)


def live(storage: str | list[str]) -> None:
    """Store, look up, load, reopen, list, delete; another salt, rank, group or layout hits nothing."""
    given, everything = buffers(len(KEYS), SIZE), list(range(len(KEYS)))
    l2 = adapter(plugin(storage))
    fds = {l2.get_store_event_fd(), l2.get_lookup_and_lock_event_fd(), l2.get_load_event_fd()}
    assert len(fds) == 3
    assert look_up(l2, KEYS, SIZE) == []
    assert store(l2, KEYS, given).bytes_transferred() == SIZE * len(KEYS)
    assert store(l2, KEYS, given) == 0, "nothing is written twice"
    assert look_up(l2, KEYS, SIZE) == everything
    l2.submit_unlock(KEYS)
    assert l2.get_usage().bytes_by_cache_salt == {"a": SIZE * len(KEYS)}
    assert l2.report_status()["is_healthy"]
    listed, cursor, pages = [], None, 0
    while cursor or not pages:
        page = l2.list_l2_keys("model", 5, cursor)
        listed += [entry.key.to_object_key() for entry in page.entries]
        cursor, pages = page.next_page_token, pages + 1
    assert (sorted(listed, key=lambda one: one.chunk_hash), pages) == (KEYS, 3)
    assert l2.list_l2_keys("other").entries == ()
    l2.close()
    l2 = adapter(plugin(storage))
    assert look_up(l2, KEYS, SIZE) == everything
    places = buffers(len(KEYS), SIZE, 0)
    assert load(l2, KEYS, places) == everything
    assert same(places, given, everything)
    for change in ({"cache_salt": "b"}, {"cache_salt": ""}, {"kv_rank": 5}, {"object_group_id": 1}):
        others = [replace(one, **change) for one in KEYS]
        assert look_up(l2, others, SIZE) == load(l2, others, places) == []
    assert look_up(l2, KEYS, 2 * SIZE) == load(l2, KEYS, buffers(len(KEYS), 2 * SIZE, 0)) == []
    l2.delete(KEYS[:6])
    assert look_up(l2, KEYS, SIZE) == everything[6:]
    until(lambda: l2.get_usage().bytes_by_cache_salt == {"a": SIZE * 6})
    l2.close()
    if not str(storage).startswith("grpc"):
        l2 = adapter(plugin(storage, revision="r2"))
        assert look_up(l2, KEYS, SIZE) == []
        weak = [ObjectKey(bytes(8), "model", 0)]  # as of Python's own hash
        assert not store(l2, weak, given[:1]).is_successful()
        assert look_up(l2, weak, SIZE) == load(l2, weak, places[:1]) == []
        l2.close()


def be_damaged(directory: Path) -> None:
    """Change a byte in each file: ours misses what was hit, and LMCache's own adapter serves it."""
    given, places = buffers(len(KEYS), SIZE), buffers(len(KEYS), SIZE, 0)
    for name, config in (
        ("ours", plugin(f"file://{directory}/ours?capacity=64MiB")),
        ("fs", {"type": "fs", "base_path": f"{directory}/fs"}),
    ):
        l2 = adapter(config)
        assert store(l2, KEYS, given).is_successful()
        files = (directory / "ours" / "slabs").iterdir() if name == "ours" else (directory / "fs").iterdir()
        for path in files:
            with path.open("r+b") as file:
                for place in range(100, path.stat().st_size, SIZE):
                    os.pwrite(file.fileno(), bytes([os.pread(file.fileno(), 1, place)[0] ^ 1]), place)
        found = load(l2, KEYS, places)
        assert same(places, given, found) == (name == "ours")
        assert (len(found) < len(KEYS)) == (name == "ours")
        l2.close()


def be_full(directory: Path) -> None:
    """Store ten times what there is room for: the store stays within it, and LMCache is told what went."""
    capacity = 4 << 20
    l2 = adapter(plugin(f"file://{directory}?capacity={capacity}"))
    keys = [key(n) for n in range(10 * capacity // SIZE)]
    given = buffers(len(keys), SIZE)
    for n in range(0, len(keys), 40):
        store(l2, keys[n : n + 40], given[n : n + 40])
    assert l2.get_usage().total_bytes_used <= capacity == l2.get_usage().total_capacity_bytes
    places = buffers(len(keys), SIZE, 0)
    found = load(l2, keys, places)
    assert 0 < len(found) < len(keys) / 5
    assert same(places, given, found)
    until(lambda: l2.get_usage().bytes_by_cache_salt == {"": SIZE * len(look_up(l2, keys, SIZE))})
    l2.close()


def be_late(directory: Path) -> None:
    """A load that the disk answers too late misses in time; L1 gets its memory back when the call returns."""
    given, places = buffers(len(KEYS), SIZE), buffers(len(KEYS), SIZE, 0)
    l2 = adapter(plugin(f"slow://{directory}?capacity=64MiB&tier_deadline=200ms"))
    assert store(l2, KEYS, given).is_successful()
    slow_store.RATE = len(KEYS) * SIZE / 4
    begun = time.monotonic()
    assert load(l2, KEYS, places) == []
    assert time.monotonic() - begun < 3.5, "it is given up before the disk answers"
    held, _ = L1.get_memory_usage()
    L1.free(list(places))  # as LMCache does after a failure
    assert L1.get_memory_usage()[0] == held
    slow_store.RATE = 1e12
    until(lambda: L1.get_memory_usage()[0] == held - SIZE * len(KEYS))
    places = buffers(len(KEYS), SIZE, 0)
    until(lambda: load(l2, KEYS, places) == list(range(len(KEYS))))
    assert same(places, given, list(range(len(KEYS))))
    l2.close()


def be_faulty(directory: Path) -> None:
    """LMCache's own adversary above ours: loads that it drops, the others right."""
    given, places = buffers(len(KEYS), SIZE), buffers(len(KEYS), SIZE, 0)
    inner = plugin(f"file://{directory}?capacity=64MiB")
    l2 = adapter({"type": "fault_inject", "inner": inner, "rate": 0.3, "gap_indices": [2]})
    assert store(l2, KEYS, given).is_successful()
    assert len(look_up(l2, KEYS, SIZE)) == len(KEYS)
    found = load(l2, KEYS, places)
    assert 2 not in found
    assert same(places, given, found)
    l2.close()


def main(directory: Path, daemon: str) -> None:
    file, other = (f"file://{directory}/{name}?capacity=64MiB" for name in ("file", "first"))
    lmdb = f"lmdb://{directory}/lmdb?capacity=64MiB"
    for storage in (file, lmdb, daemon, [other, f"lmdb://{directory}/last?capacity=64MiB"]):
        live(storage)
    be_damaged(directory)
    be_full(directory / "full")
    be_faulty(directory / "faulty")
    be_late(directory / "late")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
