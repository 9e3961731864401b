"""How the `file` store moves bytes: through the page cache or past it, and syncs that fail."""

from __future__ import annotations

import errno
import os
from collections import Counter
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any

import pytest
from tiercache_backends.file import FileBackend
from tiercache_backends.file.io_engine import TRIAL_BYTES, WritePathSelector

from tests.faults import Call, FaultEnv
from tests.storage.backends import locate
from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import is_log
from tiercache.core import ObjectMeta, Outcome
from tiercache.storage import GetItem, SetItem, open_backend
from tiercache.storage.env import cached_bytes, mincore_bytes
from tiercache.testing.conformance.hooks import CORRUPT, HIT, STORED
from tiercache.testing.objects import NAMESPACE, key, outcomes, payload, put, to_get, to_set

CAPACITY = 24 << 20
ROOMY = 256 << 20
"""Capacity of a store that writes 12 MiB at once: at most a 16th of it."""


class Doors(FaultEnv):
    """Notes through which door bytes came and went: "buffered" or "direct"."""

    def __init__(self) -> None:
        super().__init__()
        self.direct: set[int] = set()
        self.seen: list[tuple[str, str]] = []

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        result = super().perform(name, call, arguments)
        if name == "open" and arguments[1] & os.O_DIRECT:
            self.direct.add(result)
        if name == "close":
            self.direct.discard(arguments[0])
        if name in ("preadv", "pwritev") and not is_log(arguments[0]):
            self.seen.append((name, "direct" if arguments[0] in self.direct else "buffered"))
        return result

    def doors(self, name: str) -> list[str]:
        found = [door for call, door in self.seen if call == name]
        self.seen.clear()
        return found


def aligned(data: bytes) -> memoryview:
    """A page-aligned copy, as the host arena has it."""
    view = memoryview(mmap(-1, -(-len(data) // 4096) * 4096))
    view[: len(data)] = data
    return view


def selector_of(store: FileBackend) -> WritePathSelector:
    """The store's `WritePathSelector`."""
    # private: it goes by the speed of real writes, which no test can choose
    return store._io._write_path


def put_aligned(store: FileBackend, name: object, size: int) -> Outcome:
    meta = ObjectMeta(NAMESPACE, size, b"")
    return store.set([SetItem(key(name), [aligned(payload(name, size))], meta)])[0]


def get_aligned(store: FileBackend, name: object, size: int) -> bytes | Outcome:
    room = aligned(bytes(size))
    [outcome] = store.get([GetItem(key(name), [room], size)])
    return bytes(room[:size]) if outcome is HIT else outcome


def drop_caches(path: Path) -> None:
    for slab in path.glob("slabs/*.slab"):
        fd = os.open(slab, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


@pytest.fixture
def real_disk(tmp_path: Path) -> Path:
    """A directory on a file system that can do O_DIRECT; skips where there is none."""
    with FileBackend(str(tmp_path / "probe"), CAPACITY) as store:
        if store.usage().details["io"] != "direct":
            pytest.skip("the file system of temporary directories cannot do O_DIRECT")
    return tmp_path / "s"


@pytest.mark.parametrize("size", [4096, 300_000, 3 << 20])
def test_the_page_cache_is_used_where_it_helps_and_left_alone_where_it_does_not(real_disk, size):
    env = Doors()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        env.doors("")
        assert put_aligned(store, "a", size) is STORED
        assert set(env.doors("pwritev")) == {"buffered"}
        assert get_aligned(store, "a", size) == payload("a", size)
        assert set(env.doors("preadv")) == {"buffered"}, "what is in the cache is read there"
        store.delete([key("a")])
        put_aligned(store, "b", size)
        drop_caches(real_disk)
        env.doors("")
        assert get_aligned(store, "b", size) == payload("b", size)
        assert set(env.doors("preadv")) == {"direct"}, "what is not comes from the device"
        assert get_aligned(store, "b", size) == payload("b", size)
        assert set(env.doors("preadv")) == {"buffered"}, "what is read again is let into the cache"
        drop_caches(real_disk)
        for direct, seconds in ((False, 10.0), (True, 1.0)):
            selector_of(store).record(direct, 1 << 30, seconds)
        assert put_aligned(store, "c", size) is STORED
        assert set(env.doors("pwritev")) == {"direct"}, "that way was the faster one"
        assert get_aligned(store, "c", size) == payload("c", size)


def test_the_speed_of_both_ways_is_watched() -> None:
    selector = WritePathSelector()
    step = selector.choose()
    assert step[1] > TRIAL_BYTES
    assert not step[0], "the way through the cache is tried first"
    selector.record(False, 1 << 30, 1.0)
    assert selector.choose() == (True, TRIAL_BYTES), "then the other, with the beginning of a batch"
    selector.record(True, 1 << 30, 0.5)
    choices = Counter(selector.choose() for _ in range(64))
    assert choices == {(False, TRIAL_BYTES): 4, (True, step[1]): 60}, "the slower one is tried now and then"
    for _ in range(10):
        selector.record(True, 1 << 30, 100.0)
    selector.record(False, 4096, 1000.0)  # a small write says nothing
    assert Counter(selector.choose() for _ in range(64)) == {(True, TRIAL_BYTES): 4, (False, step[1]): 60}


def test_a_way_that_became_slow_is_left_at_once() -> None:
    selector = WritePathSelector()
    for _ in range(20):
        selector.record(False, 1 << 30, 0.2)
        selector.record(True, 1 << 30, 0.5)
    assert not selector.choose()[0]
    selector.record(False, 1 << 30, 3.0)
    assert selector.choose()[0]


def large(name: str) -> SetItem:
    return SetItem(key(name), [aligned(payload(name, 1 << 20))], ObjectMeta(NAMESPACE, 1 << 20, b""))


def test_a_large_batch_is_written_in_steps(real_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    env = Doors()
    with FileBackend(str(real_disk), ROOMY, env=env) as store:
        env.doors("")
        ways = [(False, 4 << 20), (True, 4 << 20), (False, 4 << 20)]
        monkeypatch.setattr(selector_of(store), "choose", lambda: ways.pop(0))
        names = [f"page-{i}" for i in range(12)]
        assert store.set([large(name) for name in names]) == [STORED] * 12
        assert not ways, "each step asks anew"
        doors = env.doors("pwritev")
        assert (doors[0], doors[-1], doors.count("direct")) == ("buffered", "buffered", 4)
        for name in names:
            assert get_aligned(store, name, 1 << 20) == payload(name, 1 << 20)


def test_the_slower_way_is_tried_with_the_beginning_of_a_batch(real_disk: Path) -> None:
    env = Doors()
    with FileBackend(str(real_disk), ROOMY, env=env) as store:
        env.doors("")
        selector_of(store).record(False, 1 << 40, 0.001)  # no disk is as fast
        names = [f"page-{i}" for i in range(12)]
        assert store.set([large(name) for name in names]) == [STORED] * 12
        doors = env.doors("pwritev")
        assert doors.count("direct") * (1 << 20) == TRIAL_BYTES
        assert doors.count("buffered") == 12 - doors.count("direct")
        for name in names:
            assert get_aligned(store, name, 1 << 20) == payload(name, 1 << 20)


def test_buffers_that_the_device_cannot_take_go_through_the_cache(real_disk: Path) -> None:
    env = Doors()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        env.doors("")
        odd = memoryview(mmap(-1, 16384))[8 : 8 + 8192]
        odd[:] = payload("a", 8192)
        assert store.set([SetItem(key("a"), [odd], ObjectMeta(NAMESPACE, 8192, b""))]) == [STORED]
        assert set(env.doors("pwritev")) == {"buffered"}
        drop_caches(real_disk)
        assert store.get([GetItem(key("a"), [odd], 8192)]) == [HIT]
        assert bytes(odd) == payload("a", 8192)


def test_neighbours_move_in_one_call(tmp_path: Path) -> None:
    env = Doors()
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        put(store, key("first"), b"so that there is a slab")
        env.doors("")
        assert outcomes(store.set([to_set(key(n), payload(n, 5000), pieces=3) for n in range(32)])) == {
            STORED: 32
        }
        assert len(env.doors("pwritev")) == 1
        items = [to_get(key(n), 5000, pieces=2) for n in range(32)]
        assert outcomes(store.get(items)) == {HIT: 32}
        assert len(env.doors("preadv")) == 1
        shuffled = [to_get(key(n), 5000) for n in Random(1).sample(range(32), 32)]
        assert outcomes(store.get(shuffled)) == {HIT: 32}
        assert len(env.doors("preadv")) == 1, "they are neighbours in any order"


def test_a_call_that_ends_early_hurts_one_object_of_a_joined_call(tmp_path: Path) -> None:
    with FileBackend(str(tmp_path / "s"), CAPACITY, io="buffered") as store:
        assert outcomes(store.set([to_set(key(n), payload(n, 5000)) for n in range(32)])) == {STORED: 32}
        path, offset, _ = max(place for n in range(32) for place in locate(store, key(n)))
        os.truncate(path, offset + 4096)
        items = [to_get(key(n), 5000) for n in range(32)]
        assert outcomes(store.get(items)) == {HIT: 31, CORRUPT: 1}
        check_tables(store)


def test_asking_the_page_cache_brings_nothing_into_it(real_disk: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        put_aligned(store, "a", 1 << 20)
        [(path, offset, _)] = locate(store, key("a"))
        drop_caches(real_disk)
        with Path(path).open("r+b") as file:
            for _ in range(3):
                assert not env.cached(file.fileno(), offset, 1 << 20)
            assert (
                cached_bytes(file.fileno(), offset, 1 << 20)
                == mincore_bytes(file.fileno(), offset, 1 << 20)
                == 0
            )
            os.pread(file.fileno(), 1 << 20, offset)
            assert env.cached(file.fileno(), offset, 1 << 20)
            assert mincore_bytes(file.fileno(), offset, 1 << 20) == 1 << 20, "the older question too"


def test_a_bad_block_hurts_one_object_of_a_joined_call(tmp_path: Path) -> None:
    env = FaultEnv()

    def bad(real: Call, arguments: tuple[Any, ...]) -> Any:
        _, buffers, offset, *_ = arguments
        if offset <= 7 * 8192 < offset + sum(b.nbytes for b in buffers):
            raise OSError(errno.EIO, "bad block")
        return real(*arguments)

    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        store.set([to_set(key(n), payload(n, 8192)) for n in range(16)])
        assert [offset for n in range(16) for _, offset, _ in locate(store, key(n))] == [
            8192 * n for n in range(16)
        ]
        env.add("preadv", bad, times=10**6)
        answers = store.get([to_get(key(n), 8192) for n in range(16)])
        assert answers == [HIT] * 7 + [Outcome.ERROR] + [HIT] * 8
        env.clear()
        store.delete([key(n) for n in range(16)])
        env.add("pwritev", bad, times=10**6)
        answers = store.set([to_set(key(n), payload(n, 8192)) for n in range(100, 116)])
        assert answers.count(Outcome.ERROR) <= 1
        assert answers.count(STORED) >= 15
        check_tables(store)


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_usage_says_how_bytes_move(tmp_path: Path, io: str) -> None:
    with open_backend(f"file://{tmp_path}/s?capacity=24MiB&io={io}") as store:
        put(store, key("a"), b"x")
        details = store.usage().details
        assert details["io"] in ({"auto": ("direct", "buffered")}.get(io, ("buffered",)))
        assert int(details["memory_bytes"]) > 0


def test_a_file_system_without_o_direct_is_used_buffered(tmp_path: Path) -> None:
    env = FaultEnv()

    def refuse(real: Call, arguments: tuple[Any, ...]) -> Any:
        if arguments[1] & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no O_DIRECT here")
        return real(*arguments)

    env.add("open", refuse, times=10**6)
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env) as store:
        assert store.usage().details["io"] == "buffered"
        assert put_aligned(store, "a", 70_000) is STORED
        assert get_aligned(store, "a", 70_000) == payload("a", 70_000)
    assert not (tmp_path / "s" / "slabs" / "probe").exists()
