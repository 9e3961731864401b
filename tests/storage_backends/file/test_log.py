"""The log of a `file` store: damage at every place of it, and kills, power cuts and failures at every call.

Wrong bytes are never served, and nothing acknowledged is lost, but what lay on a damaged record.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiercache_backends.file import FileBackend
from tiercache_backends.file.catalog import Catalog
from tiercache_backends.file.opening import FoundLog, find_log
from tiercache_backends.file.records import (
    RECORD,
    RECORD_BYTES,
    Extent,
    Places,
    RecordKind,
    guards,
    keys_of,
    pack,
    pack_value,
)
from tiercache_backends.local.directory import StoreDirectory

from tests.crash import CrashEnv
from tests.faults import Call, FaultEnv
from tests.storage.backends import copy_tree
from tests.storage.integrity import check_tables
from tests.storage_backends.file.store import catalog_of, is_log
from tiercache.core import Outcome
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.env import Env
from tiercache.testing.conformance.hooks import STORED
from tiercache.testing.objects import fetch, key, payload, put, to_set

CAPACITY = 4 << 20
SIZE = 60_000
CHANGES = ("open", "pwritev", "fallocate", "ftruncate", "fdatasync", "fsync", "rename", "unlink")
"""Calls that change the disk, or what of it survives."""
ID = bytes(range(16))
BLOCK = 4096


# -- a catalog alone: damage at every place


class Small:
    """A catalog of a few objects, of which some were removed and some have many extents."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.directory = StoreDirectory(Env(), str(path), kind="k", version=1, database="catalog")
        self.directory.make_part(self.directory.database)
        self.log = path / "catalog" / "000001.log"

    def found(self, store: bytes = ID) -> FoundLog:
        found = find_log(Env(), self.directory, store, read_only=True)
        found.close(Env())
        return found

    def open(self) -> Catalog:
        return Catalog(Env(), self.directory, find_log(Env(), self.directory, ID, read_only=False), 1 << 20)

    def fill(self) -> None:
        catalog = self.open()
        catalog.register(NamespaceRecord(b"n" * 32, {"model": "m" * 300}, states=True))
        for batch in range(3):
            items = [to_set(key((batch, n)), b"x" * (4096 * (1 + 20 * (n == 1)))) for n in range(3)]
            extents = [
                tuple(Extent(100 * batch + 30 * n + 2 * i, 1) for i in range(1 + 20 * (n == 1)))
                for n in range(3)
            ]
            further = {n: each[1:] for n, each in enumerate(extents) if len(each) > 1}
            checksums = [bytes([batch, n]) * 8 for n in range(3)]
            ids = [catalog.id_of(item.meta.namespace) for item in items]
            records = pack(items, Places.of(extents), checksums, [bytes(16)] * 3, ids, 7)
            catalog.apply(records, further, removals=[3 * batch - 1, 3 * batch - 2][: 2 * (batch > 0)])
        catalog.close()
        os.truncate(self.log, len(self.found().numbers) * RECORD_BYTES)  # without what is reserved

    def objects(self) -> dict[int, tuple[Any, ...]]:
        """Objects that are found in the log, by number."""
        contents = self.found().contents
        return {
            int(record["number"]): (record.tobytes(), contents.extents.get(int(record["number"])))
            for record in contents.records
        }


@pytest.fixture
def small(tmp_path: Path) -> Small:
    catalog = Small(tmp_path / "small")
    catalog.fill()
    return catalog


def records_of(small: Small) -> np.ndarray:
    raw = small.log.read_bytes()
    return np.frombuffer(raw[: len(raw) // RECORD_BYTES * RECORD_BYTES], RECORD)


def check(small: Small, whole: dict[int, Any], positions: Sequence[int], records: np.ndarray) -> None:
    """With damage to the records at these positions, all others say what they said."""
    mine = [p for p in positions if p < len(records)]
    costs = {
        int(records["number"][p])
        for p in mine
        if records["kind"][p] in (RecordKind.STORED, RecordKind.EXTENTS)
    }
    found = small.objects()
    back = found.keys() - whole.keys()
    assert whole.keys() - found.keys() <= costs, positions
    assert all(found[number] == whole[number] for number in whole.keys() & found.keys())
    if not any(records["kind"][p] == RecordKind.GONE for p in mine):
        assert not back, "only a lost removal brings something back"
    assert back <= set(records["number"][records["kind"] == RecordKind.STORED].tolist())


def test_what_is_no_log_beside_the_log_does_not_matter(small: Small) -> None:
    whole = small.objects()
    for name in ("1.log", f"{'9' * 30}.log", "\u0663" * 6 + ".log", "000002.log.damaged", "log"):
        (small.log.parent / name).write_bytes(small.log.read_bytes())
    assert small.objects() == whole


def test_a_forged_name_of_no_bytes_is_ignored(small: Small) -> None:
    """Whoever can write to the disk can make guards, for they detect damage only."""
    whole, end = small.objects(), len(records_of(small))
    forged = pack_value(RecordKind.NAME, b"")
    forged["number"] = 2**62
    forged["guard"] = guards(forged, end, keys_of(ID, 1))
    with small.log.open("ab") as file:
        file.write(forged.tobytes())
    assert small.objects() == whole


def test_a_flipped_byte_anywhere_costs_its_record(small: Small) -> None:
    whole, records, raw = small.objects(), records_of(small).copy(), small.log.read_bytes()
    end = int(records["kind"].nonzero()[0][-1]) + 1
    assert {*records["kind"][:end].tolist()} == set(RecordKind), "every kind is damaged"
    file = os.open(small.log, os.O_RDWR)
    for at in range(end * RECORD_BYTES):
        os.pwrite(file, bytes([raw[at] ^ 1 << at % 8]), at)
        check(small, whole, [at // RECORD_BYTES], records)
        os.pwrite(file, raw[at : at + 1], at)
    os.close(file)
    assert small.objects() == whole


def test_a_zeroed_block_anywhere_costs_its_records(small: Small) -> None:
    whole, records, raw = small.objects(), records_of(small).copy(), small.log.read_bytes()
    end = (int(records["kind"].nonzero()[0][-1]) + 1) * RECORD_BYTES
    for start in range(-BLOCK + 64, end, 64):
        low, high = max(0, start), min(end, start + BLOCK)
        if (low, high) == (0, end):
            continue
        damaged = bytearray(raw)
        damaged[low:high] = bytes(high - low)
        small.log.write_bytes(damaged)
        check(small, whole, range(low // RECORD_BYTES, -(-high // RECORD_BYTES)), records)


def test_a_log_that_was_cut_or_extended_ends_behind_its_last_right_record(small: Small) -> None:
    whole, records, raw = small.objects(), records_of(small).copy(), small.log.read_bytes()
    end = int(records["kind"].nonzero()[0][-1]) + 1
    for size in range(RECORD_BYTES, end * RECORD_BYTES, 32):
        small.log.write_bytes(raw[:size])
        check(small, whole, range(size // RECORD_BYTES, end), records)
        assert len(small.found().numbers) <= size // RECORD_BYTES
    for tail in (bytes(5000), os.urandom(5000), raw[: 20 * RECORD_BYTES], raw[7 : 4 * RECORD_BYTES]):
        small.log.write_bytes(raw[: end * RECORD_BYTES] + tail)
        assert small.objects() == whole, "records of another position are not believed"
        assert len(small.found().numbers) == end
    catalog = small.open()
    catalog.apply(removals=[min(whole)])
    catalog.close()
    assert small.objects().keys() == whole.keys() - {min(whole)}, "and it is written on from there"


def test_a_rewritten_log_says_the_same(small: Small) -> None:
    whole, raw = small.objects(), bytearray(small.log.read_bytes())
    raw[5] ^= 1  # of the head
    small.log.write_bytes(raw)
    assert small.found().damaged
    catalog = small.open()
    assert [os.path.basename(path) for path in os.listdir(small.log.parent)] == ["000002.log"]
    items = catalog.find(list(whole))
    assert sorted(items["number"].tolist()) == sorted(whole)
    assert [record["number"] for record in catalog.page(b"", 100)] == sorted(whole)
    assert catalog.namespaces() == [NamespaceRecord(b"n" * 32, {"model": "m" * 300}, states=True)]
    catalog.close()
    assert not small.found().damaged
    found = small.found().contents
    for record in found.records:
        raw_record, extents = whole[int(record["number"])]
        assert record.tobytes()[:-8] == raw_record[:-8], "all but the guard"
        assert found.extents.get(int(record["number"])) == extents


def test_the_log_of_another_store_is_not_believed(small: Small) -> None:
    other = find_log(Env(), small.directory, bytes(16), read_only=True)
    assert (len(other.contents.records), other.damaged) == (0, True)
    whole = small.objects()
    foreign = small.log.with_name("000009.log")
    foreign.write_bytes(small.log.read_bytes())  # of generation 1, under the name of another
    assert small.objects() == whole
    small.open().close()
    assert foreign.with_name("000009.log.damaged").exists()
    assert small.objects().keys() == whole.keys()


def test_of_two_logs_the_newer_one_counts_as_long_as_anything_in_it_is_right(small: Small) -> None:
    whole, old = small.objects(), small.log.read_bytes()
    raw = bytearray(old)
    raw[5] ^= 1
    small.log.write_bytes(raw)
    catalog = small.open()  # writes it anew
    catalog.apply(removals=list(whole))
    catalog.close()
    small.log.write_bytes(old)  # as if the old one had not been removed yet
    assert small.objects() == {}, "what was removed stays removed"
    newer = small.log.with_name("000002.log")
    newer.write_bytes(bytes(newer.stat().st_size))
    assert small.objects() == whole


# -- a store whose log is about to be rewritten


def opened(path: Path, durability: str = "process", env: Env | None = None) -> FileBackend:
    return FileBackend(str(path), CAPACITY, durability, env, io="buffered")


def left(store: FileBackend) -> int:
    """How many records may be appended before the log is rewritten."""
    log = catalog_of(store)
    used = log._end + log._live + log._named  # private: as `_make_room` adds them up
    return log._limit - log._reserve - used  # private: as above


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A full store whose next sets evict, and rewrite the log because of its budget."""
    path = tmp_path_factory.mktemp("full") / "s"
    with opened(path) as store:
        for turn in range(60):
            if left(store) < 500:
                break
            names = [("filler", turn, n) for n in range(100)]
            assert set(store.set([to_set(key(n), payload(n, 100)) for n in names])) == {STORED}
            assert all(store.delete([key(n) for n in names]))
        n = 0
        while not store.usage().details["evicted"]:
            assert put(store, key(("old", n)), payload(("old", n), SIZE)) is STORED
            n += 1
        while left(store) > 8:
            assert put(store, key("filler"), b"x") is STORED
            assert store.delete([key("filler")]) == [True]
        assert os.listdir(path / "catalog") == ["000001.log"], "it is not rewritten yet"
        store.flush()
    return path


Act = Callable[[FileBackend], object]


def acts() -> Iterator[tuple[list[object], Act]]:
    """Sets of one to three objects and deletions, each with the names that it stores."""
    for turn in range(4):
        names: list[object] = [("new", turn, n) for n in range(1 + turn % 3)]
        yield names, lambda store, names=names: store.set([to_set(key(n), payload(n, SIZE)) for n in names])
        if turn == 1:
            yield [], lambda store, names=names: store.delete([key(names[0])])


def present(store: FileBackend, names: Sequence[object]) -> set[object]:
    there = store.exists([key(n) for n in names])
    return {name for name, is_there in zip(names, there, strict=True) if is_there}


def old_names() -> list[object]:
    return [("old", n) for n in range(60)]


def look(path: Path, must: set[object], may: set[object], names: Sequence[object], why: object) -> None:
    """Open what was left: what must be there is, nothing else but what may be, and no byte is wrong."""
    with opened(path) as store:
        found = {name: fetch(store, key(name), SIZE) for name in names}
        assert all(isinstance(got, Outcome) or got == payload(n, SIZE) for n, got in found.items()), why
        hits = {name for name, got in found.items() if not isinstance(got, Outcome)}
        assert must <= hits, (why, must - hits)
        assert hits <= may, (why, hits - may)
        check_tables(store)
        assert put(store, key("after"), payload("after", SIZE)) is STORED
    shutil.rmtree(path)


class Copies(CrashEnv):
    """Copies the store's directory before each call that changes the disk, or in the middle of it."""

    def __init__(self, path: Path, kind: str) -> None:
        super().__init__()
        self.path, self.kind = path, kind
        self.made: list[tuple[Path, str]] = []
        self.on = False

    def perform(self, name: str, call: Call, arguments: tuple[Any, ...]) -> Any:
        if self.on and name in CHANGES and not (name == "open" and not arguments[1] & os.O_CREAT):
            for n in range(2 if self.kind == "power" else 1):
                self.take(name, n)
            if self.kind == "kill" and name == "pwritev" and is_log(arguments[0]):
                fd, buffers, offset = arguments
                whole = b"".join(bytes(buffer) for buffer in buffers)
                for size in {100, len(whole) // 2, len(whole) - 100}:
                    os.pwrite(fd, whole[:size], offset)  # as far as the kernel got before it saw the signal
                    self.take(f"{name} of {size}", 0)
        return super().perform(name, call, arguments)

    def take(self, name: str, seed: int) -> None:
        target = self.path.with_name(f"copy{len(self.made)}")
        if self.kind == "power":
            self.clone(self.path, target, 100 * len(self.made) + seed)
        else:
            copy_tree(self.path, target)
        self.made.append((target, name))


@pytest.mark.parametrize(
    ("kind", "durability"), [("kill", "process"), ("power", "power"), ("power", "process")]
)
def test_every_step_can_be_the_last(full: Path, tmp_path: Path, kind: str, durability: str) -> None:
    path = tmp_path / "s"
    copy_tree(full, path)
    env = Copies(path, kind)
    names: list[object] = old_names()
    with opened(path, durability, env) as store:
        flushed = present(store, names)
        gone: set[object] = set()
        deleted: set[object] = set()
        for new, act in acts():
            before = present(store, names)
            names += new
            env.on = True
            act(store)
            env.on = False
            after = present(store, names)
            # What the act removes may be there or not, what it stores too. What was evicted may come back
            # after a power cut, what was deleted may not.
            must = before & after if (kind, durability) != ("power", "process") else flushed & after
            may = set(names) - (gone if kind == "kill" else deleted)
            for copy, name in env.made:
                look(copy, must, may, names, (name, copy.name))
            env.made.clear()
            gone |= before - after
            deleted |= set() if new else before - after
        assert os.listdir(path / "catalog") == ["000002.log"], "the log was rewritten meanwhile"
        assert gone - deleted, "something was evicted"
        assert deleted


@pytest.mark.parametrize("durability", [pytest.param("process", marks=pytest.mark.slow), "power"])
@pytest.mark.parametrize("error", [errno.EIO, errno.ENOSPC])
def test_every_call_may_fail(full: Path, tmp_path: Path, error: int, durability: str) -> None:
    path = tmp_path / "s"
    copy_tree(full, path)
    env = FaultEnv()
    with opened(path, durability, env) as store:
        env.clear()
        for _, act in acts():
            act(store)
    shutil.rmtree(path)
    counts = {name: env.calls[name] for name in (*CHANGES, "fstat", "preadv") if env.calls[name]}
    assert {"rename", "unlink", "fallocate"} <= counts.keys(), "the log is rewritten"
    names: list[object] = [*old_names(), *(name for new, _ in acts() for name in new)]
    for call, count in counts.items():
        for at in range(1, count + 1) if count < 12 else range(1, count + 1, count // 8):
            copy_tree(full, path)
            env = FaultEnv()
            with opened(path, durability, env) as store:
                env.clear()
                env.fail(call, at=at, error=error)
                for _, act in acts():
                    act(store)
                env.clear()
                there = present(store, names)
                check_tables(store)
            look(path, there, there, names, (call, at))


def test_a_lost_format_is_made_again_from_the_log(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with opened(path) as store:
        put(store, key("a"), payload("a", SIZE))
    (path / "format").unlink()
    with opened(path) as store:
        assert fetch(store, key("a"), SIZE) == payload("a", SIZE)
