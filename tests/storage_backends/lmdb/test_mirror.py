"""Each process's copy of an `lmdb` store's table, compared with the database; deletions on a full disk."""

from __future__ import annotations

import errno
from pathlib import Path
from random import Random

from tiercache_backends.lmdb import LmdbBackend
from tiercache_backends.lmdb.mirror import Mirror

from tests.storage.integrity import check_residents
from tests.storage_backends.lmdb.hooks import LaterEnv, check_integrity, environment_of, file_limit, opened
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.restorable import Worth
from tiercache.testing.conformance.hooks import ERROR, STORED
from tiercache.testing.objects import NAMESPACE, chain, fetch, key, payload, state_of, to_set


def seen_by(mirror: Mirror) -> tuple[set[bytes], Worth]:
    residents = mirror.residents
    check_residents(residents)
    return {residents.digest(row) for row in residents.residents().tolist()}, mirror.residents.pages.worth()


def live(store: LmdbBackend, dice: Random, turns: int) -> None:
    """Conversations with states come and go in a full store; some are read, some deleted."""
    for _ in range(turns):
        name, depth = dice.randrange(30), dice.randrange(1, 9)
        pages = chain(("live", name), depth)
        items = [
            to_set(k, payload(k, 60_000), parent=parent, depth=n + 1) for n, (k, parent) in enumerate(pages)
        ]
        state = state_of((("live", name), depth - 1))
        if dice.random() < 0.6:
            items.append(to_set(state, payload(state, 90_000), parent=state.page_key, depth=depth))
        store.set(items)
        fetch(store, pages[0][0], 60_000)
        if dice.random() < 0.1:
            store.delete([dice.choice(pages)[0]])


def test_a_process_keeps_up_with_what_others_do(tmp_path: Path) -> None:
    """The second mirror stands for another process: it sees nothing but the database."""
    dice = Random(3)
    with opened(tmp_path / "s", 8 << 20) as store:
        other = Mirror(environment_of(store))
        other.read()
        for _ in range(12):
            live(store, dice, 15)
            assert environment_of(store).read(other.keep_up), "the log reaches back far enough"
            fresh = Mirror(environment_of(store))
            fresh.read()
            expected = {entry.key.digest for entry in store.scan_all()}, fresh.residents.pages.worth()
            assert seen_by(other) == seen_by(fresh) == expected
            details = store.usage().details
            assert expected[1] == (details["restorable_bytes"], details["dead_bytes"], details["orphans"])
        assert store.usage().details["evicted"] != 0


def test_a_process_that_falls_behind_reads_everything_again(tmp_path: Path) -> None:
    with opened(tmp_path / "s", 8 << 20) as store:
        kept = key("kept")
        store.set([to_set(kept, b"x"), to_set(key("gone"), b"x")])
        other = Mirror(environment_of(store))
        other.read()
        told: list[tuple[set[bytes], bool]] = []
        other.watch(lambda digests, stored: told.append((set(digests), stored)))
        names = [key(("n", n)) for n in range(256)]
        for _ in range(18):
            assert set(store.set([to_set(k, b"x") for k in names])) == {STORED}
            assert all(store.delete(names))
        store.set([to_set(key("left"), b"x")])
        store.delete([key("gone")])
        assert not environment_of(store).read(other.keep_up), "what it missed is not told any more"
        other.read()
        assert seen_by(other)[0] == {kept.digest, key("left").digest}
        assert told == [({key("gone").digest}, False), ({key("left").digest}, True)]
        store.delete([kept])
        assert environment_of(store).read(other.keep_up)
        assert told[2:] == [({kept.digest}, False)], "what was read again is watched too"


def test_a_mirror_follows_a_transaction_that_fails(tmp_path: Path) -> None:
    env = LaterEnv()
    with opened(tmp_path / "s", 8 << 20, env=env) as store:
        live(store, Random(5), 60)
        for at in range(1, 5):
            env.fail("commit", at=at, times=1, error=errno.EIO)
            live(store, Random(at), 6)
            env.clear()
            store.usage()
            fresh = Mirror(environment_of(store))
            fresh.read()
            assert seen_by(store._mirror) == seen_by(fresh)  # private: the only mirror whose writes fail


def test_a_namespace_is_named_once_it_is_written(tmp_path: Path) -> None:
    """A failed transaction names nothing, and another process learns which namespaces need states."""
    env = LaterEnv()
    with opened(tmp_path / "s", env=env) as store:
        pages = chain("n", 3)
        assert set(store.set([to_set(k, b"x", parent=parent) for k, parent in pages])) == {STORED}
        other = Mirror(environment_of(store))
        other.read()
        env.fail("commit", times=1, error=errno.EIO)
        for answer in (ERROR, STORED):
            assert store.set([to_set(key("a"), b"a", namespace=b"other")]) == [answer]
        assert [entry.key for entry in store.scan_all(b"other")] == [key("a")]
        assert environment_of(store).read(other.keep_up)
        store.register_namespace(NamespaceRecord(NAMESPACE, {}, states=True))
        assert environment_of(store).read(other.keep_up)
        assert seen_by(other)[1].dead_bytes == len(pages)


def test_deletions_work_on_a_disk_that_somebody_else_filled(tmp_path: Path) -> None:
    path = tmp_path / "s"
    keys = [key(n) for n in range(60)]
    with opened(path, 32 << 20) as store:
        assert set(store.set([to_set(k, payload(k, 90_000)) for k in keys])) == {STORED}
        with file_limit((path / "database" / "data.mdb").stat().st_size):
            assert [store.delete([k]) for k in keys] == [[True]] * len(keys)
        check_integrity(store)
