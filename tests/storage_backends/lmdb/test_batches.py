"""Batches of small objects in the `lmdb` store, which are read and written with few calls of LMDB."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import lmdb
import pytest
from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.lmdb.records import part_key

from tests.faults import FaultEnv
from tests.storage_backends.lmdb.hooks import CAPACITY, check_integrity, environment_of, locate, opened
from tiercache.core import ObjectKey, PoolName
from tiercache.storage.base import GetItem
from tiercache.storage.checksum import MacKey
from tiercache.testing.conformance.hooks import ERROR, HIT, MISS, STORED
from tiercache.testing.objects import content, fetch, key, page_key, payload, to_get, to_set


@pytest.mark.parametrize("secret", [None, b"secret"])
def test_every_item_of_a_batch_gets_its_own_answer(tmp_path: Path, secret: bytes | None) -> None:
    sizes = [100, 5000, 16_384, 40_000, 65_536, 65_537, 70_000, 300_000]
    with LmdbBackend(str(tmp_path / "s"), CAPACITY, mac_key=MacKey(secret)) as store:
        names = [(n, size) for n in range(12) for size in sizes]
        items = [to_set(key(name), payload(name, name[1]), pieces=1 + name[0] % 3) for name in names]
        assert set(store.set(items)) == {STORED}
        assert store.set(items) == [HIT] * len(items)
        check_integrity(store)
        wanted = [
            to_get(key(name), name[1], slack=name[0] % 2, pieces=1 + name[0] % 4 // 3) for name in names
        ]
        answers = [HIT] * len(wanted)
        for at, odd, answer in (
            (3, to_get(key("absent"), 5000), MISS),
            (1, to_get(key(names[1]), names[1][1] + 1), ERROR),
            (9, GetItem(key(names[9]), [memoryview(bytes(names[9][1]))], names[9][1]), ERROR),
            (17, to_get(key(names[16]), names[16][1]), HIT),  # asked for twice
            (18, to_get(key("absent too"), 5000), MISS),
            (24, to_get(ObjectKey(PoolName.KV, b""), 4), MISS),
            (40, to_get(ObjectKey(PoolName.KV, page_key("parent")), 4), MISS),
        ):
            wanted[at], answers[at] = odd, answer
        child = to_set(key("child"), b"child", parent=page_key("parent"), depth=2)
        assert store.set([to_set(key("parent"), b"parent", depth=1), child]) == [STORED] * 2
        assert store.get(wanted) == answers
        untouched = {at: set(wanted[at].buffers[0]) for at in (1, 3, 9, 18, 24, 40)}
        assert untouched == {1: {0xAA}, 3: {0xAA}, 9: {0}, 18: {0xAA}, 24: {0xAA}, 40: {0xAA}}
        assert not environment_of(store).is_damaged
        for item, answer, name in zip(wanted, answers, names, strict=True):
            if answer is HIT:
                name = names[16] if item is wanted[17] else name
                assert content(item) == payload(name, name[1])


def test_objects_in_short_pieces_are_read_with_others(tmp_path: Path) -> None:
    def full(*_: object) -> None:
        raise lmdb.MapFullError("no pages")

    env = FaultEnv()
    with opened(tmp_path / "s", env=env) as store:
        store.set([to_set(key(n), payload(n, 30_000)) for n in range(20, 25)])
        for at in (1, 3):
            env.add("commit", full, at=at)
        store.set([to_set(key(n), payload(n, 30_000), pieces=1 + n % 2) for n in range(20)])
        assert max(size for _, size in locate(store, key(1))) < 4096
        wanted = [to_get(key(n), 30_000) for n in range(25)]
        assert store.get(wanted) == [HIT] * 25
        assert [content(item) for item in wanted] == [payload(n, 30_000) for n in range(25)]
        check_integrity(store)


def test_a_piece_that_should_not_be_there_is_not_overwritten(tmp_path: Path) -> None:
    with opened(tmp_path / "s") as store:
        store.set([to_set(key("old"), payload("old", 3000))])
        environment = environment_of(store)
        environment.write(lambda txn: txn.put(part_key(10**6, 0), b"stray", db=environment.parts))
        assert store.set([to_set(key(n), payload(n, 3000)) for n in range(3)]) == [ERROR] * 3
        assert fetch(store, key("old"), 3000) is ERROR, "the environment is to be put aside"


def test_repeated_sets_meet_few_page_faults(tmp_path: Path) -> None:
    program = f"""
import resource
from tiercache_backends.lmdb import LmdbBackend
from tiercache.testing.objects import key, payload, to_set
faults = lambda: resource.getrusage(resource.RUSAGE_SELF).ru_minflt
with LmdbBackend({str(tmp_path / "s")!r}, 256 << 20) as store:
    counts = []
    for turn in range(6):
        items = [to_set(key((turn, n)), payload(n, 256 << 10)) for n in range(32)]
        before = faults()
        assert len(store.set(items)) == 32
        counts.append(faults() - before)
        del items
print(min(counts[2:]))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    # The batches have 2,048 LMDB pages each.
    assert int(done.stdout) < 500
