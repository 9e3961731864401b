"""A `file` store on a disk that fails, fills up or hangs."""

from __future__ import annotations

import errno
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from tiercache_backends.file import FileBackend

from tests.faults import FaultEnv
from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import CAPACITY, at_log, fail_log, opened
from tests.storage_backends.local.files import disk_bytes
from tiercache.errors import StorageError
from tiercache.testing.conformance.hooks import ERROR, HIT, MISS, STORED, THROTTLED
from tiercache.testing.objects import fetch, key, payload, put


def test_a_full_disk_throttles_and_keeps_the_cap(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        env.fail("fallocate", times=10**9, error=errno.ENOSPC)
        assert put(store, key("a"), b"x") is THROTTLED
        env.clear()
        assert put(store, key("a"), b"x") is STORED
        env.fail("fallocate", times=10**9, error=errno.ENOSPC)
        answers = [put(store, key(n), payload(n, 200_000)) for n in range(60)]
        assert set(answers) == {STORED}, "it goes on within the slabs that it has"
        check_tables(store)


def test_a_slab_that_fits_only_in_part_is_taken_back(tmp_path: Path) -> None:
    env = FaultEnv()

    def half(real: Callable[..., None], arguments: tuple[int, int, int]) -> None:
        fd, offset, size = arguments
        real(fd, offset, size // 2)
        raise OSError(errno.ENOSPC, "full")

    with opened(tmp_path / "s", env=env) as store:
        env.add("fallocate", half)
        assert put(store, key("a"), b"x") is THROTTLED
        assert disk_bytes(tmp_path / "s" / "slabs") < 100_000
        assert put(store, key("a"), b"x") is STORED


def test_a_failed_eviction_keeps_what_it_wanted_to_evict(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", 6 << 20, env=env) as store:
        n = 0
        while store.usage().details["evicted"] == 0:
            assert put(store, key(n), payload(n, 100_000)) is STORED
            n += 1
        kept = [m for m in range(n) if store.exists([key(m)])[0]]
        # the eviction that makes room, and the set itself with what it evicts ahead of need
        for call in (1, 2):
            env.clear()
            fail_log(env, at=call, error=errno.ENOSPC)
            answer = put(store, key(("new", call)), payload("new", 1_000_000))
            assert answer is THROTTLED
            left = [m for m in kept if store.exists([key(m)])[0]]
            assert left == kept if call == 1 else len(left) >= len(kept) - 20
            assert all(fetch(store, key(m), 100_000) == payload(m, 100_000) for m in left)
            check_tables(store)
        assert put(store, key("new"), payload("new", 1_000_000)) is STORED


def test_a_record_that_landed_and_reported_a_failure_does_not_count(tmp_path: Path) -> None:
    env = FaultEnv()

    def late(real: Callable[..., None], arguments: tuple[object, ...]) -> None:
        real(*arguments)
        raise OSError(errno.EIO, "after all was done")

    with opened(tmp_path / "s", env=env) as store:
        put(store, key("old"), payload("old", 9000))
        for call, answer in (
            (lambda: put(store, key("a"), payload("a", 9000)), ERROR),
            (lambda: store.delete([key("old")]), [False]),
        ):
            env.clear()
            at_log(env, late)
            assert call() == answer
        assert put(store, key("b"), payload("b", 9000)) is STORED
        check_tables(store)
    with opened(tmp_path / "s") as store:
        assert [fetch(store, key(n), 9000) for n in ("a", "b", "old")] == [
            MISS,
            payload("b", 9000),
            payload("old", 9000),
        ]
        check_tables(store)


def test_a_block_that_cannot_be_read_is_given_up(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        put(store, key("b"), payload("b", 5000))
        env.clear()
        env.fail("preadv")
        assert fetch(store, key("a"), 5000) is ERROR
        assert store.exists([key("a"), key("b")]) == [False, True]
        assert store.usage().details["blocks_stranded"] == 2
        check_tables(store)
        assert put(store, key("a"), payload("a", 5000)) is STORED
        assert fetch(store, key("a"), 5000) == payload("a", 5000)


def test_a_hanging_disk_holds_up_only_those_who_wait_for_it(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store, ThreadPoolExecutor(4) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        write = env.hang("pwritev")
        first = pool.submit(put, store, key("slow"), payload("slow", 5000))
        assert write.reached.wait(30)
        same = pool.submit(put, store, key("slow"), payload("slow", 5000))
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert fetch(store, key("slow"), 5000) is MISS, "not before it is acknowledged"
        assert put(store, key("b"), payload("b", 5000)) is STORED
        assert store.delete([key("b")]) == [True]
        read = env.hang("preadv")
        reader = pool.submit(fetch, store, key("a"), 5000)
        assert read.reached.wait(30)
        assert store.delete([key("a")]) == [True], "its blocks are kept for the reader"
        assert put(store, key("c"), payload("c", 5000)) is STORED
        assert not first.done()
        assert not same.done()
        read.release()
        write.release()
        assert reader.result(30) == payload("a", 5000)
        assert [first.result(30), same.result(30)] == [STORED, HIT]
        check_tables(store)


def test_an_object_that_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", 6 << 20, env=env) as store, ThreadPoolExecutor(1) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        read = env.hang("preadv")
        reader = pool.submit(fetch, store, key("a"), 5000)
        assert read.reached.wait(30)
        for n in range(100):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        assert store.exists([key("a"), key(0)]) == [True, False]
        read.release()
        assert reader.result(30) == payload("a", 5000)
        for n in range(100, 200):
            put(store, key(n), payload(n, 100_000))
        assert store.exists([key("a")]) == [False]
        check_tables(store)


def test_reads_and_writes_of_threads_run_in_parallel(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store, ThreadPoolExecutor(4) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        hangs = [env.hang(call, at=at) for call in ("preadv", "pwritev") for at in (1, 2)]
        tasks = [pool.submit(fetch, store, key("a"), 5000) for _ in range(2)]
        tasks += [pool.submit(put, store, key(n), payload(n, 5000)) for n in range(2)]
        assert all(hang.reached.wait(30) for hang in hangs), "all four are inside the disk at once"
        for hang in hangs:
            hang.release()
        assert [task.result(30) for task in tasks] == [payload("a", 5000)] * 2 + [STORED] * 2


def test_after_a_failed_flush_no_other_succeeds_until_the_store_is_opened_again(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("kept"), payload("kept", 9000))
        env.fail("fdatasync")
        for _ in range(2):
            with pytest.raises(StorageError, match="cannot be flushed"):
                store.flush()
            assert fetch(store, key("kept"), 9000) == payload("kept", 9000), "what is there is verified"
    with opened(tmp_path / "s") as store:
        store.flush()


def test_with_power_every_set_syncs_files_of_its_own(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, "power", env) as store:
        put(store, key("a"), payload("a", 9000))
        env.clear()
        assert put(store, key("b"), payload("b", 9000)) is STORED
        assert (env.calls["open"], env.calls["fdatasync"]) == (1, 2), "the slab's and the log's"
        env.fail("fdatasync")
        assert put(store, key("c"), payload("c", 9000)) is ERROR
        assert fetch(store, key("c"), 9000) is MISS
        assert int(store.usage().details["set_failures"]) == 1
