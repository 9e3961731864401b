"""The `lmdb` store on a disk that fails or fills, and under threads."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import lmdb
import pytest
from tiercache_backends.lmdb import LmdbBackend

from tests.faults import FaultEnv
from tests.storage_backends.lmdb.hooks import LaterEnv, check_integrity, file_limit, locate, opened
from tiercache.core import ObjectKey, Outcome
from tiercache.testing.conformance.hooks import ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import fetch, key, page_key, payload, put, to_set


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO])
def test_commits_that_fail_lose_nothing(tmp_path: Path, error: int) -> None:
    env = LaterEnv()
    expected = THROTTLED if error == errno.ENOSPC else ERROR
    names = range(48)
    with opened(tmp_path / "s", 8 << 20, env=env) as store:
        put(store, key("old"), payload("old", 30_000))
        at = 0
        while True:
            at += 1
            store.delete([key(n) for n in names])
            env.clear()
            rule = env.fail("commit", at=at, times=10**6, error=error)
            answers = store.set(
                [to_set(key(n), payload(n, 90_000), parent=page_key(n - 1) if n else None) for n in names]
            )
            env.clear()
            assert set(answers) <= {STORED, expected}
            assert (expected in answers) == bool(rule.fired)
            for n, answer in zip(names, answers, strict=True):
                assert fetch(store, key(n), 90_000) == (payload(n, 90_000) if answer is STORED else MISS)
            assert fetch(store, key("old"), 30_000) == payload("old", 30_000)
            check_integrity(store)
            if not rule.fired:
                break
        assert at > 2, "the batch took several transactions"
        env.fail("commit", times=10**6, error=error)
        assert store.delete([key(0), key(1)]) == [False, False]
        assert store.exists([key(0), key(1)]) == [True, True]
        env.clear()
        assert store.delete([key(0), key(1)]) == [True, True]
        check_integrity(store)


@pytest.mark.parametrize("size", [60_000, 900_000])
def test_an_eviction_that_fails_keeps_everything(tmp_path: Path, size: int) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", 8 << 20, env=env) as store:
        n = 0
        while store.usage().details["evicted"] == 0:
            assert put(store, key(n), payload(n, size)) is STORED
            n += 1
        for at in range(1, 5):
            kept = [m for m in range(n) if store.exists([key(m)])[0]]
            env.clear()
            rule = env.fail("commit", at=at, times=10**6, error=errno.ENOSPC)
            answer = put(store, key(n), payload(n, size))
            assert answer is (THROTTLED if rule.fired else STORED)
            left = [m for m in range(n) if store.exists([key(m)])[0]]
            assert (len(kept) - len(left)) * size <= 2 * size + (8 << 20) // 50, "room for what comes"
            assert all(fetch(store, key(m), size) == payload(m, size) for m in left)
            check_integrity(store)
            env.clear()
            assert put(store, key(n), payload(n, size)) in (STORED, HIT)
            n += 1


def test_a_map_without_long_runs_is_filled_with_short_ones(tmp_path: Path) -> None:
    def full(_call: object, _arguments: object) -> None:
        raise lmdb.MapFullError("no pages")

    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("old"), payload("old", 200_000))
        for at in (1, 3):
            env.add("commit", full, at=at)
        assert put(store, key("a"), payload("a", 200_000)) is STORED
        assert (
            max(size for _, size in locate(store, key("a")))
            < 16 << 10
            < max(size for _, size in locate(store, key("old")))
        )
        assert fetch(store, key("a"), 200_000) == payload("a", 200_000)
        env.add("commit", full, times=100)
        before = store.usage().objects
        assert store.set([to_set(key(n), payload(n, 200_000)) for n in range(3)]) == [THROTTLED] * 3
        assert store.delete([key("a")]) == [False]
        env.clear()
        assert store.usage().objects == before
        assert put(store, key("b"), payload("b", 200_000)) is STORED
        check_integrity(store)


class SmallDiskEnv(LaterEnv):
    """A file system that says how full it is."""

    free = 0

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1 << 20, self.free // 4096, self.free // 4096, 0, 0, 0, 0, 255))


@pytest.mark.parametrize("size", [12_000, 900_000])
def test_a_disk_that_is_smaller_than_the_capacity_replaces(tmp_path: Path, size: int) -> None:
    disk = 8 << 20
    env = SmallDiskEnv()
    batch = max(1, 100_000 // size)
    keys: list[ObjectKey] = []
    data = [payload(n, size) for n in range(5)]

    def some() -> list[Outcome]:
        begin = len(keys)
        keys.extend(key(n) for n in range(begin, begin + batch))
        return store.set([to_set(keys[n], data[n % 5]) for n in range(begin, begin + batch)])

    def left() -> list[int]:
        return [n for n, there in enumerate(store.exists(keys)) if there]

    with opened(tmp_path / "s", 32 << 20, env=env) as store:
        with file_limit(disk):
            while store.usage().payload_bytes < disk * 6 // 10:
                assert set(some()) == {STORED}
            for _ in range(60):
                kept = left()
                assert set(some()) == {STORED}
                lost = len(set(kept) - set(left()))
                assert lost * size <= 2 * batch * size + disk // 10, "replaced, and a reserve"
                if store.usage().details["evicted"]:
                    assert store.usage().payload_bytes > disk * 6 // 10 - 2 * batch * size
            assert store.usage().details["evicted"] != 0
            assert all(fetch(store, keys[n], size) == data[n % 5] for n in left())
            check_integrity(store)
        env.free = 100 << 20
        while store.usage().payload_bytes < disk * 2:
            kept = left()
            assert set(some()) == {STORED}
            assert set(kept) <= set(left()), "with room again nothing has to go"
        assert store.usage().details["disk_is_short"] == 0
        check_integrity(store)


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_deletion_is_on_the_medium_when_it_is_answered(tmp_path: Path, durability: str) -> None:
    """With `power` every commit is; else LMDB leaves its last page to a sync, which a deletion makes."""
    env = FaultEnv()
    with LmdbBackend(str(tmp_path / "s"), 8 << 20, durability, env) as store:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        assert store.delete([key("b")]) == [False]
        assert env.calls["fdatasync"] == 0, "nothing was deleted"
        assert store.delete([key("a")]) == [True]
        assert env.calls["fdatasync"] == (durability == "process")
