"""What only the `lmdb` store does: several processes on one directory, readers that stand still, room, damage, failing disks."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from random import Random
from typing import Any

import lmdb
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, run_state_machine_as_test
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.lmdb.payload import PART_PAGES, pages_for, piece_sizes
from tiercache_backends.lmdb.queue import PATIENCE
from tiercache_backends.local.lmdb_file import LmdbFile

from tests.storage.backends import copy_tree
from tests.storage.lmdb_hooks import LmdbHooks, data_file, flip, locate
from tests.storage.sharer import size_of
from tiercache.core import ObjectKey, Outcome, PoolName
from tiercache.errors import ClosedError, ConfigError, StorageError, StoreFormatError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.checksum import Seal
from tiercache.storage.env import Env
from tiercache.storage.registry import open_backend
from tiercache.testing.faults import FaultEnv
from tiercache.testing.objects import chain, fetch, key, outcomes, page_key, payload, put, to_get, to_set
from tiercache.testing.stateful import BackendMachine, EvictingMachine

CAPACITY = 16 << 20
HIT, MISS, STORED = Outcome.HIT, Outcome.MISS, Outcome.STORED
CORRUPT, THROTTLED, ERROR = Outcome.CORRUPT, Outcome.THROTTLED, Outcome.ERROR


class TestLmdb(LmdbHooks):
    pass


class LmdbMachine(BackendMachine):
    suite = LmdbHooks


class FullLmdbMachine(EvictingMachine):
    suite = LmdbHooks


@pytest.mark.parametrize(("machine", "examples"), [(LmdbMachine, 12), (FullLmdbMachine, 8)])
def test_random_histories(machine: type[RuleBasedStateMachine], examples: int) -> None:
    quick = settings(deadline=None, stateful_step_count=25, suppress_health_check=list(HealthCheck), max_examples=examples)
    run_state_machine_as_test(machine, settings=quick)


def opened(path: Path, capacity: int = CAPACITY, env: Env | None = None, **settings: str) -> LmdbBackend:
    return LmdbBackend(str(path), capacity, env=env, **settings)


def disk_bytes(path: Path) -> int:
    return sum(p.lstat().st_blocks * 512 for p in [path, *path.rglob("*")])


@contextmanager
def sharer(path: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    child = subprocess.Popen(
        [sys.executable, "-m", "tests.storage.sharer", str(path), str(CAPACITY), *arguments],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    try:
        yield child
    finally:
        child.kill()
        child.communicate()


def say(child: subprocess.Popen[str], word: str) -> None:
    assert child.stdin is not None
    child.stdin.write(word + "\n")
    child.stdin.flush()


def hear(child: subprocess.Popen[str], until: str) -> list[str]:
    """The lines that a process prints, to the first that begins with `until`."""
    lines: list[str] = []
    assert child.stdout is not None
    while not lines or not lines[-1].startswith(until):
        line = child.stdout.readline()
        assert line, f"the process ended after {lines[-3:]}"
        lines.append(line.strip())
    return lines


# --- several processes -----------------------------------------------------------------------------------------------------------------


def test_four_processes_share_a_store_and_one_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with (
        sharer(path, "load", "1") as a,
        sharer(path, "load", "2") as b,
        sharer(path, "load", "3") as c,
        sharer(path, "load", "4") as victim,
    ):
        everybody = [a, b, c, victim]
        for _ in range(4):
            for child in everybody:
                say(child, "go")
        for child in everybody:
            hear(child, "round")
        said = hear(victim, "stored")
        victim.send_signal(signal.SIGKILL)
        said += victim.communicate()[0].split("\n")
        rest = [a, b, c]
        for child in rest:
            for _ in range(8):
                say(child, "go")
            say(child, "")
        totals = [hear(child, "done")[-1].split() for child in rest]
        assert [(wrong, failed) for _, wrong, failed, _ in totals] == [("0", "0")] * 3
        assert sum(int(hits) for *_, hits in totals) > 10
        for child in rest:
            assert child.wait(20) == 0
    with opened(path) as store:
        store.check_integrity()
        usage = store.usage()
        assert usage.details["evicted"] != 0
        assert usage.details["corrupt"] == 0
        assert usage.details["readers"] == 0, "what the dead process was reading holds nothing back"
        assert disk_bytes(path) <= CAPACITY
        last = [int(line.split()[1]) for line in said if line.startswith("stored")]
        assert last
        assert all(fetch(store, key(n), size_of(n)) in (MISS, payload(n, size_of(n))) for n in range(300))
        assert put(store, key("new"), payload("new", 100_000)) is STORED


def test_what_a_killed_process_stored_is_there(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        with sharer(path, "load", "7") as child:
            say(child, "go")
            stored = [int(line.split()[1]) for line in hear(child, "stored") if line.startswith("stored")]
            child.send_signal(signal.SIGKILL)
            child.wait(10)
        assert all(fetch(store, key(n), size_of(n)) == payload(n, size_of(n)) for n in stored)
        store.check_integrity()
        assert put(store, key("new"), payload("new", 5000)) is STORED, "the writer's lock of a dead process is free"


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGCONT])
def test_a_reader_that_stands_still_throttles_writers_and_harms_nothing(tmp_path: Path, end: signal.Signals) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        stored = {n: STORED for n in range(60) if put(store, key(n), payload(n, 150_000)) is STORED}
        with sharer(path, "hold") as child:
            hear(child, "holding")
            child.send_signal(signal.SIGSTOP)
            answers = []
            for n in range(60, 300):
                answers.append(put(store, key(n), payload(n, 150_000)))
                if answers[-1] is STORED:
                    stored[n] = STORED
                assert store.usage().used_bytes <= CAPACITY
            assert outcomes(answers).keys() == {STORED, THROTTLED}
            assert answers[-1] is THROTTLED
            left = [n for n in stored if store.exists([key(n)])[0]]
            assert len(left) * 150_000 > CAPACITY // 2, "nothing is evicted for sets that cannot be"
            assert all(fetch(store, key(n), 150_000) == payload(n, 150_000) for n in left)
            store.check_integrity()
            if end is signal.SIGCONT:
                child.send_signal(signal.SIGCONT)
                child.terminate()
            else:
                child.kill()
            child.wait(10)
            again = [put(store, key(n), payload(n, 150_000)) for n in range(300, 400)]
            assert set(again) == {STORED}, "the store recovers as soon as the reader is gone"
        store.check_integrity()
        assert disk_bytes(path) <= CAPACITY


class HurriedEnv(FaultEnv):
    """Waiting takes no time."""

    waited = 0.0

    def sleep(self, seconds: float) -> None:
        self.waited += max(seconds, 0.1)

    def monotonic(self) -> float:
        return self.waited


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGTERM])
def test_a_writer_that_stands_still_throttles_the_others(tmp_path: Path, end: signal.Signals) -> None:
    env = HurriedEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        with sharer(tmp_path / "s", "stall") as child:
            hear(child, "holding")
            assert put(store, key("b"), payload("b", 5000)) is THROTTLED
            assert env.waited > PATIENCE
            env.waited = 0.0
            assert put(store, key("b"), payload("b", 5000)) is THROTTLED
            assert env.waited < PATIENCE / 2, "the second waits less"
            assert (store.delete([key("a")]), put(store, key("a"), payload("a", 5000))) == ([False], HIT)
            assert fetch(store, key("a"), 5000) == payload("a", 5000)
            child.send_signal(end)
            child.wait(10)
            assert put(store, key("b"), payload("b", 5000)) is STORED
        store.check_integrity()


def test_suffixes_go_first_across_processes(tmp_path: Path) -> None:
    path = tmp_path / "s"
    watched = {k: parent for name in ("shared", "crossed") for k, parent in chain(name, 8)}
    with opened(path) as store, sharer(path, "tail") as child:
        for k, parent in chain("shared", 8)[:4]:
            assert put(store, k, payload(k, 60_000), parent) is STORED
        hear(child, "stored")
        for k, parent in chain("crossed", 8)[4:]:
            assert put(store, k, payload(k, 60_000), parent) is STORED
        n = 0
        kept = set(watched)
        while kept:
            assert put(store, key(n), payload(n, 60_000)) is STORED
            n += 1
            kept = {k for k in watched if store.exists([k])[0]}
            pages = {k.page_key for k in kept}
            assert all(watched[k] is None or watched[k] in pages for k in kept)
        assert n < 2 * CAPACITY // 60_000, "a sequence whose end is gone goes at once, and not a page a round"
        store.check_integrity()


def test_a_second_opener_in_this_process_is_refused(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        (tmp_path / "link").symlink_to(tmp_path / "s")
        for path in (tmp_path / "s", tmp_path / "link"):
            with pytest.raises(StorageError, match="open in this process already; use that store"):
                opened(path)
        assert fetch(store, key("a"), 1) == b"x", "the refused opener did no harm"
    opened(tmp_path / "s").close()


def test_a_forked_child_is_told_to_open_its_own(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        child = os.fork()
        if not child:
            status = 1
            with suppress(BaseException):
                try:
                    store.exists([key("a")])
                except ClosedError:
                    store.close()
                    status = 0
            os._exit(status)
        assert os.waitpid(child, 0)[1] == 0
        assert put(store, key("b"), b"y") is STORED
        assert fetch(store, key("a"), 1) == b"x"


# --- capacity --------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "step", "batch", "batches"), [(30_000, 997, 1, 120), (500, 0, 96, 110), (1_500_000, 0, 1, 12), (2000, 7919, 3, 40)]
)
def test_everything_in_the_directory_counts_at_every_instant(tmp_path: Path, size: int, step: int, batch: int, batches: int) -> None:
    path = tmp_path / "s"
    opened(path, 8 << 20).close()
    (path / "notes").write_bytes(bytes(1 << 20))
    with opened(path, 8 << 20) as store:
        for n in range(batches):
            names = range(n * batch, n * batch + batch)
            assert set(store.set([to_set(key(m), payload(m, size + step * (m % 150))) for m in names])) == {STORED}
            usage = store.usage()
            assert usage.used_bytes <= usage.details["disk_bytes"] == disk_bytes(path) <= 8 << 20
        store.check_integrity()
        assert usage.details["evicted"] != 0
        assert usage.details["full"] == 0, "room is made well before the map is full"
        assert int(usage.details["map_pages_used"]) <= int(usage.details["map_pages_limit"])


@pytest.mark.parametrize(("size", "batch"), [(4096, 32), (24_000, 8), (256 << 10, 1), (700_001, 1)])
def test_nothing_is_evicted_while_a_tenth_is_free(tmp_path: Path, size: int, batch: int) -> None:
    with opened(tmp_path / "s") as store:
        least = 1.0
        room = 0.90 - batch * size / CAPACITY
        before = 0
        for n in range(0, 3 * CAPACITY // size // 2, batch):
            assert set(store.set([to_set(key(m), payload(m % 7, size)) for m in range(n, n + batch)])) == {STORED}
            usage = store.usage()
            if usage.details["evicted"]:
                least = min(least, before / CAPACITY)
            before = usage.used_bytes
        assert room <= least < 1.0
        assert usage.details["full"] == 0
        store.check_integrity()


def test_a_store_that_is_mixed_for_long_keeps_taking_objects(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 8 << 20) as store:
        sizes = [100, 3000, 70_000, 20_000, 300_000, 9000]
        answers = [put(store, key(n), payload(n % 6, sizes[n * 7 % 6] + n % 11)) for n in range(500)]
        assert outcomes(answers).get(STORED, 0) == 500, "scattered free pages are put to use"
        store.check_integrity()


def test_a_store_grows_and_shrinks_only_as_far_as_its_data(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(40):
            put(store, key(n), payload(n, 200_000))
    for capacity in (32 << 20, 12 << 20):
        with opened(path, capacity) as store:
            assert all(fetch(store, key(n), 200_000) == payload(n, 200_000) for n in range(40))
            assert put(store, key(capacity), b"x") is STORED
            store.check_integrity()
    with pytest.raises(ConfigError, match=r"grown to \d+ bytes, .* set capacity to (\d+) or more") as refused:
        opened(path, 6 << 20)
    needed = int(str(refused.value).split("set capacity to ")[1].split()[0])
    with opened(path, needed) as store:
        assert store.usage().objects == 42
        store.check_integrity()


def test_a_shared_store_keeps_its_capacity(tmp_path: Path) -> None:
    with sharer(tmp_path / "s", "hold") as child:
        hear(child, "holding")
        for capacity in (CAPACITY // 2, CAPACITY * 2):
            with pytest.raises(ConfigError, match=f"in use with a capacity of {CAPACITY} bytes and cannot be opened with {capacity}; give"):
                opened(tmp_path / "s", capacity)
        with opened(tmp_path / "s") as store:
            assert put(store, key("a"), b"x") is STORED
    opened(tmp_path / "s", CAPACITY * 2).close()


def test_a_capacity_that_is_too_small_says_what_is_needed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="set capacity to 4194304 or more"):
        opened(tmp_path / "s", 1 << 20)
    with opened(tmp_path / "s", 4 << 20) as store:
        assert put(store, key("a"), payload("a", 100_000)) is STORED


def test_settings(tmp_path: Path) -> None:
    with open_backend(f"lmdb://{tmp_path}/s?capacity=16MiB&durability=power") as store:
        assert put(store, key("a"), b"x") is STORED
        store.flush()
    for url, message in {
        "lmdb://host/s?capacity=16MiB": "write three slashes",
        "lmdb:///s": "needs 'capacity'",
        "lmdb:///s?capacity=16MiB&durability=none": "use 'process' or 'power'",
        "lmdb:///s?capacity=16MiB&color=red": "has no setting 'color'",
    }.items():
        with pytest.raises(ConfigError, match=message):
            open_backend(url)


# --- eviction --------------------------------------------------------------------------------------------------------------------------


def test_recency_survives_a_reopen(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        for n in range(80):
            put(store, key(n), payload(n, 100_000))
        assert fetch(store, key(0), 100_000) == payload(0, 100_000)
    with opened(tmp_path / "s") as store:
        for n in range(80, 160):
            put(store, key(n), payload(n, 100_000))
        there = store.exists([key(n) for n in range(160)])
        assert there[0], "what was read last before the end counts as new"
        assert there[1:] == sorted(there[1:]), "the oldest went first"
        assert not there[1]
        store.check_integrity()


def test_many_reads_write_their_recency_down(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 64 << 20) as store:
        names = range(5000)
        store.set([to_set(key(n), b"x") for n in names])
        for n in range(0, 5000, 500):
            assert set(store.get([to_get(key(m), 1) for m in range(n, n + 500)])) == {HIT}
        assert int(store.usage().details["recency_waiting"]) < 4096
        store.flush()
        assert store.usage().details["recency_waiting"] == 0
        store.check_integrity()


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
        store.check_integrity()


@given(length=st.integers(1, 3_000_000), part_pages=st.sampled_from([4, PART_PAGES]))
def test_pieces_cover_a_payload_and_waste_no_page(length: int, part_pages: int) -> None:
    sizes = piece_sizes(length, 4096, part_pages)
    assert sum(sizes) == length
    assert 0 < min(sizes) <= max(sizes) <= part_pages * 4096 - 16
    assert pages_for(length, 4096, part_pages) <= 2 + length // 4000
    assert all(size % 64 == 0 for size in sizes[:-1])


# --- damage ----------------------------------------------------------------------------------------------------------------------------


def _damage(path: Path, how: str) -> None:
    size = path.stat().st_size
    with path.open("r+b") as file:
        if how == "truncated":
            file.truncate(size // 3)
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
def test_a_damaged_file_costs_the_contents_and_nothing_else(tmp_path: Path, how: str, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(300)])
    _damage(path / "database" / "data.mdb", how)
    with caplog.at_level(logging.ERROR), opened(path) as store:
        left = store.usage().objects
        assert 0 < left < 200 if how == "truncated" else left == 0
        assert all(fetch(store, key(n), 5000) in (payload(n, 5000), MISS) for n in range(300))
        assert set(store.set([to_set(key(n), payload(n, 5000)) for n in range(100)])) <= {STORED, HIT}
        assert disk_bytes(path) <= CAPACITY
        store.check_integrity()
    if how != "empty":
        assert "written anew" in caplog.text
    with opened(path) as store:
        assert fetch(store, key(99), 5000) == payload(99, 5000)


def test_a_zeroed_page_costs_what_lay_on_it(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.register_namespace(NamespaceRecord(b"n" * 32, {"model": "m"}))
        for k, parent in chain("s", 100):
            put(store, k, payload(k, 700), parent)
        store.set([to_set(key(n), payload(n, 9000)) for n in range(100)])
        put(store, key("big"), payload("big", 300_000))
        store.delete([key(n) for n in range(0, 100, 7)])
    data = path / "database" / "data.mdb"
    whole = data.read_bytes()
    file = LmdbFile(Env(), str(data))
    used = [first + i for first, pages in file.pages() for i in range(len(pages))]
    file.close()
    sizes = {key(n): 9000 for n in range(100) if n % 7} | {k: 700 for k, _ in chain("s", 100)}
    for page in [0, 1, *Random(1).sample(used, 25)]:
        spoiled = bytearray(whole)
        spoiled[page * 4096 : (page + 1) * 4096] = bytes(4096)
        data.write_bytes(spoiled)
        before = json.loads((path / "state").read_text())
        (path / "state").write_text(json.dumps(before | {"boot_id": "other", "database": None}))
        with opened(path) as store:
            lost = sum(fetch(store, k, size) != payload(n, size) for k, n, size in _named(sizes))
            # A leaf has some 25 records, or four small payloads.
            assert lost <= 30, page
            assert put(store, key("new"), b"new") is STORED
            store.check_integrity()


def _named(sizes: dict[ObjectKey, int]) -> list[tuple[ObjectKey, object, int]]:
    names = {key(n): n for n in range(100)}
    return [(k, names.get(k, k), size) for k, size in sizes.items()]


def test_a_kill_while_an_opening_repairs_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(100)])
    with (path / "database" / "data.mdb").open("r+b") as file:
        file.write(bytes(4096))
    copies: list[Path] = []

    def copy(real: Callable[..., object], arguments: tuple[object, ...]) -> object:
        copies.append(path.with_name(f"killed{len(copies)}"))
        copy_tree(path, copies[-1])
        return real(*arguments)

    env = FaultEnv()
    for call in ("rename", "unlink", "commit"):
        env.add(call, copy, times=10**6)
    opened(path, env=env).close()
    for left in copies:
        with opened(left) as store:
            assert all(fetch(store, key(n), 5000) == payload(n, 5000) for n in range(100)), left
            store.check_integrity()


def test_looking_writes_nothing_and_lets_others_look(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        store.set([to_set(key(n), payload(n, 5000)) for n in range(20)])
    before = {p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in [path, *path.rglob("*")]}
    with LmdbBackend(str(path), None) as store:
        assert [e.key for e in store.scan_all()]
        assert fetch(store, key(1), 5000) == payload(1, 5000)
        assert put(store, key("new"), b"new") is THROTTLED
        assert put(store, key(1), b"new") is HIT
        assert store.delete([key(1)]) == [False]
        store.flush()
        code = f"from tiercache_backends.lmdb import LmdbBackend as L; print(len(list(L({str(path)!r}, None).scan_all())))"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "20\n"
    assert {p: (p.lstat().st_mtime_ns, p.read_bytes() if p.is_file() else b"") for p in [path, *path.rglob("*")]} == before
    with LmdbBackend(str(path), None, access="write") as store:
        assert store.delete([key(1)]) == [True]


def test_a_file_that_is_cut_or_moved_under_an_open_store(tmp_path: Path) -> None:
    path = tmp_path / "s"
    code = """
import os, sys
from tiercache_backends.lmdb import LmdbBackend
from tiercache.testing.objects import fetch, key, put, payload
store = LmdbBackend(sys.argv[1], 16 << 20)
put(store, key(1), payload(1, 100_000))
os.truncate(sys.argv[1] + "/database/data.mdb", int(sys.argv[2]))
print(put(store, key("new"), b"new"), fetch(store, key(1), 100_000), store.delete([key(1)]))
store.close()
"""
    for size in (0, 4096, 5 * 4096):
        done = subprocess.run([sys.executable, "-c", code, str(path), str(size)], capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (0, "error error [False]\n"), done.stderr
    with opened(path) as store:
        assert put(store, key(2), b"2") is STORED
        path.rename(tmp_path / "moved")
        assert put(store, key(3), b"3") is ERROR
        with pytest.raises(StorageError, match="removed or moved"):
            store.flush()
        (tmp_path / "moved").rename(path)
        assert put(store, key(3), b"3") is STORED


def test_damaged_data_make_way_where_they_take_too_much_room(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        for n in range(120):
            put(store, key(n), payload(n, 100_000))
    _damage(path / "database" / "data.mdb", "zeroed")
    with opened(path) as store:
        for n in range(120):
            assert put(store, key(n), payload(n, 100_000)) is STORED
        assert store.usage().payload_bytes > CAPACITY // 2
        assert disk_bytes(path) <= CAPACITY


def test_no_flipped_bit_of_a_payload_is_served(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        size = 300_000
        for where in range(6):
            put(store, key(where), payload(where, size))
            pieces = locate(store, key(where))
            assert sum(length for _, length in pieces) == size
            offset, length = pieces[where * 7 % len(pieces)]
            flip(data_file(store), offset + where * 1237 % length, 1 << where)
            assert fetch(store, key(where), size) is CORRUPT
            assert fetch(store, key(where), size) is MISS
            assert put(store, key(where), payload(where, size)) is STORED
        assert store.usage().details["corrupt"] == 6
        store.check_integrity()


def test_a_mac_finds_what_a_checksum_would_pass(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    with opened(tmp_path / "s", seal=Seal.from_file(Env(), str(secret))) as store:
        assert put(store, key("a"), payload("a", 200_000)) is STORED
        assert put(store, key("b"), payload("b", 200_000)) is STORED
        environment = store._environment
        place = key("a").digest[32:] + key("a").digest[:32]
        record = environment.read(lambda txn: bytes(txn.get(place, db=environment.objects)))
        forged = record.replace(to_set(key("a"), payload("a", 200_000)).meta.checksum, bytes(16))
        assert fetch(store, key("a"), 200_000) == payload("a", 200_000)
        environment.write(lambda txn: txn.put(place, forged, db=environment.objects))
        assert fetch(store, key("a"), 200_000) is CORRUPT
    with pytest.raises(StoreFormatError, match="made with a MAC key"):
        opened(tmp_path / "s")
    with opened(tmp_path / "s", seal=Seal.from_file(Env(), str(secret))) as store:
        assert fetch(store, key("b"), 200_000) == payload("b", 200_000)


def bad_page(path: Path, kind: str, which: float) -> dict[str, Any] | None:
    """What `bad_page.py` found; None where LMDB ended the process."""
    arguments = [sys.executable, "-m", "tests.storage.bad_page", str(path), kind, str(which)]
    child = subprocess.run(arguments, capture_output=True, cwd=Path(__file__).parents[2], check=False)
    if child.returncode in (-signal.SIGABRT, -signal.SIGSEGV, -signal.SIGBUS):
        return None
    assert child.returncode == 0, child.stderr[-2000:]
    found: dict[str, Any] = json.loads(child.stdout)
    assert found["wrong"] == 0
    return found


@pytest.mark.parametrize(
    ("kind", "lost"),
    [
        ("objects leaf", 30),
        pytest.param("objects branch", 1500, marks=pytest.mark.slow),
        ("parts overflow", 1),
        ("parts leaf", 150),
        ("ages leaf", 0),
    ],
)
def test_one_bad_page_costs_what_lies_on_it(tmp_path: Path, kind: str, lost: int) -> None:
    found = bad_page(tmp_path / "s", kind, 0.5)
    if found is None:
        assert kind == "ages leaf", "where LMDB joins leaves it does not look at the neighbour"
        return
    assert found["old"] - lost <= found["first"]["hit"] == found["there"]
    assert found["together"].get("stored", 0) > 60
    assert found["single"].get("stored", 0) > 60
    assert found["good"] == found["together"]["stored"] + found["single"]["stored"], "what is elsewhere is written and read"
    assert found["back"] >= found["there"]
    assert found["gone"] * 40 > found["old"] - lost - 200
    if kind == "parts overflow":
        assert found["first"] == {"hit": found["old"] - 1, "corrupt": 1}
    if kind.startswith("parts"):
        assert found["back"] == found["old"], "what was on the page can be stored anew"
    if kind.startswith("objects"):
        assert found["dropped"] > 0, "what waited was dropped, and counted"


def test_without_a_list_of_free_pages_nothing_is_stored_and_everything_is_read(tmp_path: Path) -> None:
    found = bad_page(tmp_path / "s", "free leaf", 0.5)
    assert found is not None
    assert found["first"] == {"hit": found["old"]}
    assert found["together"] == found["single"] == {"error": 100}
    assert found["back"] == found["old"]


# --- the directory ---------------------------------------------------------------------------------------------------------------------


def test_modes_are_private(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), b"x")
        for path in [tmp_path / "s", *(tmp_path / "s").rglob("*")]:
            assert path.stat().st_mode & 0o777 == (0o700 if path.is_dir() else 0o600), path


@pytest.mark.parametrize("name", ["LOCK", "OPENING", "format", "database", "database/data.mdb", "database/lock.mdb"])
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


# --- a failing disk --------------------------------------------------------------------------------------------------------------------


class LaterEnv(FaultEnv):
    """Whatever was put off is due."""

    now = 0.0

    def monotonic(self) -> float:
        self.now += 100.0
        return self.now


@pytest.mark.parametrize("error", [errno.ENOSPC, errno.EIO, errno.EROFS])
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
            answers = store.set([to_set(key(n), payload(n, 90_000), parent=page_key(n - 1) if n else None) for n in names])
            env.clear()
            assert set(answers) <= {STORED, expected}
            assert (expected in answers) == bool(rule.fired)
            for n, answer in zip(names, answers, strict=True):
                assert fetch(store, key(n), 90_000) == (payload(n, 90_000) if answer is STORED else MISS)
            assert fetch(store, key("old"), 30_000) == payload("old", 30_000)
            store.check_integrity()
            if not rule.fired:
                break
        assert at > 2, "the batch took several transactions"
        env.fail("commit", times=10**6, error=error)
        assert store.delete([key(0), key(1)]) == [False, False]
        assert store.exists([key(0), key(1)]) == [True, True]
        env.clear()
        assert store.delete([key(0), key(1)]) == [True, True]
        store.check_integrity()


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
            assert (len(kept) - len(left)) * size <= 2 * size + (8 << 20) // 50, "no more went than is to be stored, and a reserve"
            assert all(fetch(store, key(m), size) == payload(m, size) for m in left)
            store.check_integrity()
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
        assert max(size for _, size in locate(store, key("a"))) < 16 << 10 < max(size for _, size in locate(store, key("old")))
        assert fetch(store, key("a"), 200_000) == payload("a", 200_000)
        env.add("commit", full, times=100)
        before = store.usage().objects
        assert store.set([to_set(key(n), payload(n, 200_000)) for n in range(3)]) == [THROTTLED] * 3
        assert store.delete([key("a")]) == [False]
        env.clear()
        assert store.usage().objects == before
        assert put(store, key("b"), payload("b", 200_000)) is STORED
        store.check_integrity()


def test_a_corrupt_object_stays_out_of_sight_when_it_cannot_be_removed(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), payload("a", 5000))
        LmdbHooks().corrupt(store, key("a"))
        env.clear()
        env.fail("commit")
        assert fetch(store, key("a"), 5000) is CORRUPT
        assert (store.exists([key("a")]), fetch(store, key("a"), 5000)) == ([False], MISS)
        assert list(store.scan_all()) == []
        assert put(store, key("a"), payload("a", 5000)) is STORED
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        store.check_integrity()


def test_a_store_opens_on_a_full_disk(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        put(store, key("a"), payload("a", 5000))
    env = FaultEnv()
    env.fail("pwritev", times=10**9, error=errno.ENOSPC)
    with opened(tmp_path / "s", env=env) as store:
        env.fail("commit", times=10**9, error=errno.ENOSPC)
        assert fetch(store, key("a"), 5000) == payload("a", 5000)
        assert put(store, key("b"), b"x") is THROTTLED
    with opened(tmp_path / "s") as store:
        assert fetch(store, key("a"), 5000) == payload("a", 5000)


@contextmanager
def file_limit(size: int) -> Iterator[None]:
    """No file of this process grows beyond `size`: a disk that is full, for LMDB itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


class SmallDiskEnv(LaterEnv):
    """A file system that says how full it is."""

    free = 0

    def statvfs(self, path: str) -> os.statvfs_result:
        return os.statvfs_result((4096, 4096, 1 << 20, self.free // 4096, self.free // 4096, 0, 0, 0, 0, 255))


@pytest.mark.parametrize("size", [12_000, 60_000, 900_000])
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
                assert lost * size <= 2 * batch * size + disk // 10, "what goes is what was replaced, and a reserve"
                if store.usage().details["evicted"]:
                    assert store.usage().payload_bytes > disk * 6 // 10 - 2 * batch * size
            assert store.usage().details["evicted"] != 0
            assert all(fetch(store, keys[n], size) == data[n % 5] for n in left())
            store.check_integrity()
        env.free = 100 << 20
        while store.usage().payload_bytes < disk * 2:
            kept = left()
            assert set(some()) == {STORED}
            assert set(kept) <= set(left()), "with room again nothing has to go"
        assert store.usage().details["disk_is_short"] == 0
        store.check_integrity()


def test_flush_says_when_it_cannot(tmp_path: Path) -> None:
    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        put(store, key("a"), b"x")
        env.clear()
        env.fail("fdatasync")
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()
        store.flush()


def test_threads_read_write_delete_and_scan_at_once(tmp_path: Path) -> None:
    def work(turn: int) -> None:
        for n in range(60):
            name = (turn * 17 + n) % 80
            assert put(store, key(name), payload(name, 120_000)) in (STORED, HIT, THROTTLED)
            assert fetch(store, key((name + 5) % 80), 120_000) in (payload((name + 5) % 80, 120_000), MISS)
            if n % 10 == turn:
                store.delete([key(name)])
                assert len({entry.key for entry in store.scan_all()}) <= 80

    with opened(tmp_path / "s", 8 << 20) as store:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(work, range(4)))
        assert store.usage().details["failures"] == 0
        store.check_integrity()


@pytest.mark.parametrize("durability", ["process", "power"])
def test_a_deletion_is_on_the_medium_when_it_is_answered(tmp_path: Path, durability: str) -> None:
    """With `power` every commit is; else LMDB leaves its last page to the next sync, which a deletion makes itself."""
    env = FaultEnv()
    with LmdbBackend(str(tmp_path / "s"), 8 << 20, durability, env) as store:
        put(store, key("a"), payload("a", 5000))
        env.clear()
        assert store.delete([key("b")]) == [False]
        assert env.calls["fdatasync"] == 0, "nothing was deleted"
        assert store.delete([key("a")]) == [True]
        assert env.calls["fdatasync"] == (durability == "process")
