"""What only the `file` store does: ownership, formats, damage, full and failing disks, and a process that dies."""

from __future__ import annotations

import errno
import json
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from random import Random

import pytest
from tiercache_backends.file import FileBackend

from tests.storage import owner
from tests.storage.backends import FileHooks
from tiercache.core import Outcome, PoolName
from tiercache.errors import ConfigError, StorageError, StoreFormatError, StoreLockedError
from tiercache.storage.env import Env
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import chain, content, fetch, key, outcomes, payload, put, to_get, to_set

CAPACITY = 16 << 20
HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR


def opened(path: Path, capacity: int = CAPACITY, env: Env | None = None, durability: str = "process") -> FileBackend:
    return FileBackend(str(path), capacity, durability, env)


def disk_bytes(path: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in [path, *path.rglob("*")])


# --- the directory ---------------------------------------------------------------------------------------------------------------------


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        with pytest.raises(StoreLockedError, match=f"in use by this process \\(pid {os.getpid()}\\); close"):
            opened(tmp_path / "s")
        assert fetch(store, key("a"), 1) == b"x", "the refused opener did no harm"
    opened(tmp_path / "s").close()


def test_a_directory_of_another_process_is_refused_until_that_is_killed(tmp_path: Path) -> None:
    child = _child(tmp_path / "s", "put")
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        with pytest.raises(StoreLockedError, match=f"in use by process {child.pid} "):
            opened(tmp_path / "s")
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait(10)
        child.communicate()
    with opened(tmp_path / "s") as store:
        assert fetch(store, key("child"), 70_000) == payload("child", 70_000), "what was acknowledged survives kill -9"
        store.check_integrity()


def _child(path: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "tests.storage.owner", str(path), *arguments],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )


def test_modes_are_private(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["LOCK", "format", "slabs", "catalog", "catalog/data.mdb", "slabs/000000.slab"])
def test_no_link_is_followed(tmp_path: Path, name: str) -> None:
    store = tmp_path / "s"
    victim = tmp_path / "victim"
    opened(store).close()
    victim.write_bytes(b"precious")
    target = store / name
    if target.is_dir():
        target.rename(tmp_path / "elsewhere")
        target.symlink_to(tmp_path / "elsewhere")
    else:
        target.unlink(missing_ok=True)
        target.symlink_to(victim)
    with pytest.raises(StorageError):
        opened(store)
    assert victim.read_bytes() == b"precious"


def test_a_foreign_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(StorageError, match="not empty"):
        opened(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="not a directory"):
        opened(tmp_path / "file")


def test_a_newer_format_is_refused_untouched(tmp_path: Path) -> None:
    opened(tmp_path / "s").close()
    path = tmp_path / "s" / "format"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 3}))
    with pytest.raises(StoreFormatError, match=r"format 3 .* up to 2; upgrade"):
        opened(tmp_path / "s")
    path.write_text("what")
    with pytest.raises(StoreFormatError, match="cannot be read"):
        opened(tmp_path / "s")


def test_a_capacity_that_is_too_small_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set capacity to 4194304 or more"):
        opened(tmp_path / "s", 1 << 20)
    opened(tmp_path / "s", 4 << 20).close()


# --- capacity --------------------------------------------------------------------------------------------------------------------------


def test_everything_in_the_directory_counts_at_every_instant(tmp_path: Path) -> None:
    path = tmp_path / "s"
    opened(path, 8 << 20).close()
    (path / "notes").write_bytes(bytes(1 << 20))
    with opened(path, 8 << 20) as store:
        for n in range(150):
            assert put(store, key(n), payload(n, 30_000 + 997 * n)) is STORED
            assert disk_bytes(path) <= 8 << 20
        store.check_integrity()
        assert store.usage().details["evicted"] != 0


@pytest.mark.parametrize("capacity", [6 << 20, 40 << 20])
def test_a_store_opens_with_another_capacity(tmp_path: Path, capacity: int) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(150):
            put(store, key(n), payload(n, 100_000))
        before = store.usage().objects
    with opened(path, capacity) as store:
        left = [n for n in range(150) if store.exists([key(n)])[0]]
        assert 0 < len(left) <= before
        assert all(fetch(store, key(n), 100_000) == payload(n, 100_000) for n in left)
        for n in range(200, 400):
            assert put(store, key(n), payload(n, 100_000)) is STORED
            assert disk_bytes(path) <= max(capacity, 0)
        store.check_integrity()


def test_many_tiny_objects_evict_for_the_catalogs_sake(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 24 << 20) as store:
        for batch in range(12):
            names = range(batch * 500, batch * 500 + 500)
            assert outcomes(store.set([to_set(key(n), b"x") for n in names])) == {STORED: 500}
            assert disk_bytes(tmp_path / "s") <= 24 << 20
        assert store.usage().objects < 6000
        store.check_integrity()


def test_objects_fill_a_fragmented_store(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        names = range(2000)
        store.set([to_set(key(n), payload(n, 4096)) for n in names])
        store.delete([key(n) for n in names[::2]])
        while store._holdings.figures()["blocks_free"] > 1200 or store._writer._grow():
            if put(store, key(("fill", store.usage().objects)), bytes(1 << 20)) is not STORED:
                break
        big = payload("big", 3 << 20)
        assert put(store, key("big"), big) is STORED
        assert len(store.locate(key("big"))) > 1
        assert fetch(store, key("big"), len(big)) == big
        store.check_integrity()


# --- damage ----------------------------------------------------------------------------------------------------------------------------


def _damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "truncated":
            file.truncate(4 * 4096)  # far behind that, blocks are only reserved
        elif how == "to a page":
            file.truncate(4096)
        elif how == "zeroed":
            file.write(bytes(size))
        elif how == "garbage":
            file.write(os.urandom(size))
        elif how == "garbage inside":
            file.seek(8192)
            file.write(os.urandom(size - 8192))
        else:
            file.truncate(0)


@pytest.mark.parametrize("how", ["truncated", "to a page", "zeroed", "garbage", "garbage inside", "empty"])
@pytest.mark.parametrize("clean", [True, False])
def test_a_damaged_catalog_costs_the_contents_and_nothing_else(
    tmp_path: Path, how: str, clean: bool, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    if not clean:
        (path / "state").write_text(json.dumps({"boot_id": "another boot", "database": None}))
    _damage(path / "catalog" / "data.mdb", how)
    with caplog.at_level(logging.ERROR), opened(path) as store:
        assert store.usage().objects == 0
        assert put(store, key("new"), payload("new", 5000)) is STORED
        assert disk_bytes(path) <= CAPACITY
        store.check_integrity()
    if how != "empty":
        assert "written anew" in caplog.text
    with opened(path) as store:
        assert fetch(store, key("new"), 5000) == payload("new", 5000)


@pytest.mark.parametrize("seed", range(12))
def test_garbage_in_any_page_of_the_catalog_is_survived(tmp_path: Path, seed: int) -> None:
    """Within the catalog's tree, its free list or its records: the next owner has what can be believed, and a store that works."""
    random = Random(seed)
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, owner.SIZE)) for n in range(owner.COUNT)])
        store.delete([key(n) for n in range(0, owner.COUNT, 3)])
        store.set([to_set(key(n), payload(n, owner.SIZE)) for n in range(0, owner.COUNT, 6)])
    data = path / "catalog" / "data.mdb"
    raw = bytearray(data.read_bytes())
    pages = [p for p in range(8192, len(raw), 4096) if any(raw[p : p + 4096])]
    page = random.choice(pages)
    if seed % 2:
        raw[page : page + 4096] = random.randbytes(4096)
    else:
        for _ in range(20):
            raw[random.choice(pages) + random.randrange(4096)] = random.randrange(256)
    data.write_bytes(raw)
    for _ in range(2):
        child = _child(path, "read")
        assert child.wait(60) == 0
        child.communicate()


def test_after_an_unclean_shutdown_a_sound_catalog_passes_its_check(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        put(store, key("a"), payload("a", 5000))
    (path / "state").write_text(json.dumps({"boot_id": "another boot", "database": None}))
    env = FaultEnv()
    with opened(path, env=env) as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
    assert env.calls["run"] == 1
    with opened(path, env=env):
        pass
    assert env.calls["run"] == 1, "after a clean one it is not checked"


def test_overlapping_and_misplaced_records_are_dropped(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(7):
            put(store, key(n), payload(n, 9000))
        records = store._catalog.load().records.copy()
        records["start"][1] = records["start"][0]
        records["start"][2] = 1 << 40
        records["blocks"][3] = 1
        records["pool"][4] = b"WHAT"
        store._catalog.apply(records[:5], removals=records["number"][:5].tolist())
    with opened(path) as store:
        assert {e.key for e in store.scan_all()} == {key(0), key(5), key(6)}, "of two that name the same blocks the right one stays"
        assert fetch(store, key(0), 9000) == payload(0, 9000)
        assert fetch(store, key(5), 9000) == payload(5, 9000)
        assert [put(store, key(n), payload(n, 9000)) for n in range(1, 5)] == [STORED] * 4
        store.check_integrity()
    with opened(path) as store:
        assert store.usage().objects == 7, "what was dropped is gone from the catalog as well"


def test_a_flipped_bit_anywhere_in_a_catalog_record_costs_that_record(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        put(store, key(0), payload(0, 9000))
        put(store, key(1), payload(1, 9000))
    data = path / "catalog" / "data.mdb"
    whole = data.read_bytes()
    at = whole.index(key(1).digest) - 8
    for bit in range(0, 192 * 8, 53):
        flipped = bytearray(whole)
        flipped[at + bit // 8] ^= 1 << bit % 8
        data.write_bytes(flipped)
        with opened(path) as store:
            assert fetch(store, key(0), 9000) == payload(0, 9000)
            assert fetch(store, key(1), 9000) is MISS
            assert put(store, key(1), payload(1, 9000)) is STORED, "and it can be stored anew"
            assert fetch(store, key(1), 9000) == payload(1, 9000)
            store.check_integrity()


def test_a_slab_that_was_cut_or_removed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(100):
            put(store, key(n), payload(n, 60_000))
        slab = path / "slabs" / "000000.slab"
        os.truncate(slab, 300_000)
        found = [fetch(store, key(n), 60_000) for n in range(100)]
        assert CORRUPT in found
        assert all(f in (CORRUPT, payload(n, 60_000)) for n, f in enumerate(found))
        store.check_integrity()
    slab.unlink()
    with opened(path) as store:
        found = [fetch(store, key(n), 60_000) for n in range(100)]
        assert all(f in (MISS, payload(n, 60_000)) for n, f in enumerate(found))
        for n in range(100):
            assert put(store, key(n), payload(n, 60_000)) in (STORED, HIT)
        store.check_integrity()


# --- a failing disk --------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("durability", ["process", "power"])
@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
def test_a_set_that_fails_at_any_step_loses_nothing(tmp_path: Path, error: int, durability: str) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env, durability=durability) as store:
        put(store, key("old"), payload("old", 30_000))
        batch = [to_set(key(n), payload(n, 400_000)) for n in range(3)]
        env.clear()
        assert store.set(batch) == [STORED] * 3
        calls = {name: count for name, count in env.calls.items() if name not in ("open", "close")}
        assert {"pwritev", "commit", "fallocate"} <= set(calls)
        assert ("fdatasync" in calls) == (durability == "power")
        store.delete([key(n) for n in range(3)])
        for name, count in calls.items():
            for at in range(1, count + 1):
                env.clear()
                env.fail(name, at=at, error=error)
                answers = store.set(batch)
                assert set(answers) <= ({STORED, THROTTLED} if error == errno.ENOSPC else {STORED, ERROR, THROTTLED})
                env.clear()
                for n, answer in enumerate(answers):
                    assert fetch(store, key(n), 400_000) == (payload(n, 400_000) if answer is STORED else MISS)
                assert fetch(store, key("old"), 30_000) == payload("old", 30_000)
                store.check_integrity()
                assert set(store.set(batch)) <= {STORED, HIT}, "and the next set works"
                store.delete([key(n) for n in range(3)])


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
        store.check_integrity()


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
        for call in (1, 2):  # the eviction that makes room, and the set itself with what it evicts ahead of need
            env.clear()
            env.fail("commit", at=call, error=errno.ENOSPC)
            answer = put(store, key(("new", call)), payload("new", 1_000_000))
            assert answer is THROTTLED
            left = [m for m in kept if store.exists([key(m)])[0]]
            assert left == kept if call == 1 else len(left) >= len(kept) - 20
            assert all(fetch(store, key(m), 100_000) == payload(m, 100_000) for m in left)
            store.check_integrity()
        assert put(store, key("new"), payload("new", 1_000_000)) is STORED


def test_a_commit_that_landed_and_reported_a_failure_counts(tmp_path: Path) -> None:
    env = FaultEnv()

    def late(real: Callable[..., None], arguments: tuple[object]) -> None:
        real(*arguments)
        raise OSError(errno.EIO, "after all was done")

    with opened(tmp_path / "s", env=env) as store:
        put(store, key("old"), payload("old", 9000))
        env.add("commit", late, times=3)
        assert put(store, key("a"), payload("a", 9000)) is STORED
        assert store.delete([key("old")]) == [True]
        assert put(store, key("b"), payload("b", 9000)) is STORED
        store.check_integrity()
    with opened(tmp_path / "s") as store:
        assert [fetch(store, key(n), 9000) for n in ("a", "b", "old")] == [payload("a", 9000), payload("b", 9000), MISS]
        store.check_integrity()


def test_a_failed_delete_says_so(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        env.fail("commit")
        assert store.delete([key("a")]) == [False]
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert store.delete([key("a")]) == [True]
        store.check_integrity()


def test_a_block_that_cannot_be_read_is_given_up_and_retired(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        put(store, key("b"), payload("b", 5000))
        env.clear()
        env.fail("preadv", times=2)  # the read, and the proof of its blocks
        assert fetch(store, key("a"), 5000) is ERROR
        assert store.exists([key("a"), key("b")]) == [False, True]
        assert store.usage().details["blocks_retired"] == 2
        store.check_integrity()
        assert put(store, key("a"), payload("a", 5000)) is STORED
        assert fetch(store, key("a"), 5000) == payload("a", 5000)


def test_a_corrupt_object_stays_out_of_sight_when_it_cannot_be_removed(tmp_path: Path) -> None:
    env = FaultEnv()
    store = opened(tmp_path / "s", env=env)
    put(store, key("a"), payload("a", 5000))
    FileHooks().corrupt(store, key("a"))
    env.clear()
    env.fail("commit")
    assert fetch(store, key("a"), 5000) is CORRUPT
    assert (store.exists([key("a")]), fetch(store, key("a"), 5000)) == ([False], MISS)
    assert store.usage().details["blocks_stranded"] == 2
    store.check_integrity()
    assert put(store, key("a"), payload("a", 5000)) is STORED
    store.close()
    with opened(tmp_path / "s") as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        store.check_integrity()


@pytest.mark.parametrize("seed", range(5))
def test_torn_writes_and_flipped_bits_are_never_served(tmp_path: Path, seed: int) -> None:
    env = FaultEnv(seed)
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        env.clear()
        env.tear("pwritev", at=1)
        env.flip("pwritev", at=2)
        assert [put(store, key(n), payload(n, 20_480)) for n in range(3)] == [STORED] * 3
        assert [fetch(store, key(n), 20_480) for n in range(2)] == [CORRUPT] * 2
        env.clear()
        env.flip("preadv")
        assert fetch(store, key(2), 20_480) is ERROR  # a second look finds it sound
        assert [put(store, key(n), payload(n, 20_480)) for n in range(3)] == [STORED, STORED, HIT]
        assert [fetch(store, key(n), 20_480) for n in range(3)] == [payload(n, 20_480) for n in range(3)]
        store.check_integrity()


def test_a_hanging_disk_holds_up_only_those_who_wait_for_it(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store, ThreadPoolExecutor(4) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        write = env.hang("pwritev")
        first = pool.submit(put, store, key("slow"), payload("slow", 5000))
        assert write.reached.wait(10)
        same = pool.submit(put, store, key("slow"), payload("slow", 5000))
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert fetch(store, key("slow"), 5000) is MISS, "not before it is acknowledged"
        assert put(store, key("b"), payload("b", 5000)) is STORED
        assert store.delete([key("b")]) == [True]
        read = env.hang("preadv")
        reader = pool.submit(fetch, store, key("a"), 5000)
        assert read.reached.wait(10)
        assert store.delete([key("a")]) == [True], "its blocks are kept for the reader"
        assert put(store, key("c"), payload("c", 5000)) is STORED
        assert not first.done()
        assert not same.done()
        read.release()
        write.release()
        assert reader.result(10) == payload("a", 5000)
        assert [first.result(10), same.result(10)] == [STORED, HIT]
        store.check_integrity()


def test_an_object_that_is_being_read_is_not_evicted(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", 6 << 20, env=env) as store, ThreadPoolExecutor(1) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        read = env.hang("preadv")
        reader = pool.submit(fetch, store, key("a"), 5000)
        assert read.reached.wait(10)
        for n in range(100):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        assert store.exists([key("a"), key(0)]) == [True, False]
        read.release()
        assert reader.result(10) == payload("a", 5000)
        for n in range(100, 200):
            put(store, key(n), payload(n, 100_000))
        assert store.exists([key("a")]) == [False]
        store.check_integrity()


def test_reads_and_writes_of_threads_run_in_parallel(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store, ThreadPoolExecutor(4) as pool:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        hangs = [env.hang("preadv", at=1), env.hang("preadv", at=2), env.hang("pwritev", at=1), env.hang("pwritev", at=2)]
        tasks = [pool.submit(fetch, store, key("a"), 5000) for _ in range(2)]
        tasks += [pool.submit(put, store, key(n), payload(n, 5000)) for n in range(2)]
        assert all(hang.reached.wait(10) for hang in hangs), "all four are inside the disk at once"
        for hang in hangs:
            hang.release()
        assert [task.result(10) for task in tasks] == [payload("a", 5000)] * 2 + [STORED] * 2


def test_a_store_that_cannot_open_leaves_nothing_open(tmp_path: Path) -> None:
    opened(tmp_path / "s").close()
    before = len(os.listdir("/proc/self/fd"))
    calls = FaultEnv()
    opened(tmp_path / "s", env=calls).close()
    for name in sorted(set(calls.calls) - {"close"}):
        env = FaultEnv()
        env.fail(name)
        with suppress(StorageError):
            opened(tmp_path / "s", env=env).close()
        assert len(os.listdir("/proc/self/fd")) == before, name
    with opened(tmp_path / "s") as store:
        store.check_integrity()


def test_a_store_opens_on_a_full_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), payload("a", 5000))
    env = FaultEnv()
    env.fail("pwritev", times=10**9, error=errno.ENOSPC)
    with opened(tmp_path / "s", env=env) as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert put(store, key("b"), b"x") is THROTTLED
    assert not (tmp_path / "s" / "state").exists()
    with opened(tmp_path / "s", env=(checked := FaultEnv())) as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
    assert checked.calls["run"] == 1, "nobody said how it was closed"


def test_flush_says_when_it_cannot(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), b"x")
        env.clear()
        env.fail("fdatasync")
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()
        store.flush()


def test_orphans_are_counted(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        pages = chain("s", 4)
        for k, parent in pages:
            put(store, k, b"x", parent)
        state = key(("s", 3), PoolName.MAMBA)
        put(store, state, b"x", state.page_key)
        assert store.orphans() == 0
        store.delete([pages[1][0], pages[3][0]])
        assert store.orphans() == 2


def test_recency_survives_a_reopen(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        for n in range(100):
            put(store, key(n), payload(n, 100_000))
    with opened(tmp_path / "s") as store:
        for n in range(100, 180):
            put(store, key(n), payload(n, 100_000))
        there = store.exists([key(n) for n in range(180)])
        assert there == sorted(there), "the oldest went first"
        assert not there[0]
        item = to_get(key(179), 100_000)
        assert store.get([item]) == [HIT]
        assert content(item) == payload(179, 100_000)
