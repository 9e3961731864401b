"""How the `file` store moves bytes: page cache or device, MAC, syncs that fail, fragmented space, settings."""

from __future__ import annotations

import errno
import json
import os
from mmap import mmap
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from tiercache_backends.file import FileBackend, movement
from tiercache_backends.file.pace import TRIAL_BYTES, Pace

from tiercache.core import ObjectMeta, Outcome
from tiercache.errors import ConfigError, StorageError, StoreFormatError
from tiercache.policy import POLICIES, Policy, Units, policy_named
from tiercache.storage import GetItem, SetItem, open_backend
from tiercache.storage.checksum import Seal
from tiercache.storage.pagecache import _resident, cached_bytes
from tiercache.testing.faults import Call, FaultEnv
from tiercache.testing.objects import NAMESPACE, chain, fetch, key, outcomes, payload, put, state_of, to_get, to_set

CAPACITY = 24 << 20
HIT, MISS, STORED, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.CORRUPT


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
        if name in ("preadv", "pwritev"):
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
def test_the_page_cache_is_used_where_it_helps_and_left_alone_where_it_does_not(real_disk: Path, size: int) -> None:
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
            store._mover._pace.note(direct, 1 << 30, seconds)
        assert put_aligned(store, "c", size) is STORED
        assert set(env.doors("pwritev")) == {"direct"}, "that way was the faster one"
        assert get_aligned(store, "c", size) == payload("c", size)


def test_the_pace_of_both_ways_is_watched() -> None:
    pace = Pace()
    assert pace.chooses_direct() == (False, False), "the way through the cache is tried first"
    pace.note(False, 1 << 30, 1.0)
    assert pace.chooses_direct() == (True, False), "then the other, with the beginning of a batch"
    pace.note(True, 1 << 30, 0.5)
    choices = [pace.chooses_direct() for _ in range(64)]
    assert choices.count((False, True)) == 4, "the slower one is tried now and then"
    assert choices.count((True, True)) == 60
    for _ in range(10):
        pace.note(True, 1 << 30, 100.0)
    assert [pace.chooses_direct() for _ in range(64)].count((True, False)) == 4, "the disk became slow"
    pace.note(False, 4096, 1000.0)
    assert [pace.chooses_direct() for _ in range(64)].count((True, False)) == 4, "a small write says nothing"


def test_a_way_that_became_slow_is_left_at_once() -> None:
    pace = Pace()
    for _ in range(20):
        pace.note(False, 1 << 30, 0.2)
        pace.note(True, 1 << 30, 0.5)
    assert pace.chooses_direct() == (False, False)
    pace.note(False, 1 << 30, 3.0)
    assert pace.chooses_direct() == (True, True)


def test_a_large_batch_is_written_in_steps(real_disk: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(movement, "_STEP_BYTES", 4 << 20)
    env = Doors()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        env.doors("")
        ways = [(False, False), (True, True), (False, False)]
        monkeypatch.setattr(store._mover._pace, "chooses_direct", lambda: ways.pop(0))
        names = [f"page-{i}" for i in range(12)]
        sets = [SetItem(key(name), [aligned(payload(name, 1 << 20))], ObjectMeta(NAMESPACE, 1 << 20, b"")) for name in names]
        assert store.set(sets) == [STORED] * 12
        assert not ways, "each step asks anew"
        doors = env.doors("pwritev")
        assert (doors[0], doors[-1], doors.count("direct")) == ("buffered", "buffered", 4)
        for name in names:
            assert get_aligned(store, name, 1 << 20) == payload(name, 1 << 20)


def test_the_first_large_batch_lies_in_two_slabs_and_a_small_one_in_one(real_disk: Path) -> None:
    for count, slabs in ((12, 2), (4, 1)):
        with FileBackend(str(real_disk / str(count)), 1 << 30) as store:
            names = [f"page-{i}" for i in range(count)]
            sets = [SetItem(key(name), [aligned(payload(name, 1 << 20))], ObjectMeta(NAMESPACE, 1 << 20, b"")) for name in names]
            assert store.set(sets) == [STORED] * count
            assert len({path for name in names for path, _, _ in store.locate(key(name))}) == slabs


def test_the_slower_way_is_tried_with_the_beginning_of_a_batch(real_disk: Path) -> None:
    env = Doors()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        env.doors("")
        store._mover._pace.note(False, 1 << 30, 1.0)
        names = [f"page-{i}" for i in range(12)]
        sets = [SetItem(key(name), [aligned(payload(name, 1 << 20))], ObjectMeta(NAMESPACE, 1 << 20, b"")) for name in names]
        assert store.set(sets) == [STORED] * 12
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
        assert outcomes(store.set([to_set(key(n), payload(n, 5000), pieces=3) for n in range(32)])) == {STORED: 32}
        assert len(env.doors("pwritev")) == 1
        items = [to_get(key(n), 5000, pieces=2) for n in range(32)]
        assert outcomes(store.get(items)) == {HIT: 32}
        assert len(env.doors("preadv")) == 1


def test_asking_the_page_cache_brings_nothing_into_it(real_disk: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(real_disk), CAPACITY, env=env) as store:
        put_aligned(store, "a", 1 << 20)
        [(path, offset, _)] = store.locate(key("a"))
        drop_caches(real_disk)
        with Path(path).open("r+b") as file:
            for _ in range(3):
                assert not env.cached(file.fileno(), offset, 1 << 20)
            assert cached_bytes(file.fileno(), offset, 1 << 20) == _resident(file.fileno(), offset, 1 << 20) == 0
            os.pread(file.fileno(), 1 << 20, offset)
            assert env.cached(file.fileno(), offset, 1 << 20)
            assert _resident(file.fileno(), offset, 1 << 20) == 1 << 20, "the older question has the same answer"


def test_a_bad_block_hurts_one_object_of_a_joined_call(tmp_path: Path) -> None:
    env = FaultEnv()

    def bad(real: Call, arguments: tuple[Any, ...]) -> Any:
        _, buffers, offset, *_ = arguments
        if offset <= 7 * 8192 < offset + sum(b.nbytes for b in buffers):
            raise OSError(errno.EIO, "bad block")
        return real(*arguments)

    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        store.set([to_set(key(n), payload(n, 8192)) for n in range(16)])
        assert [offset for n in range(16) for _, offset, _ in store.locate(key(n))] == [8192 * n for n in range(16)]
        env.add("preadv", bad, times=10**6)
        answers = store.get([to_get(key(n), 8192) for n in range(16)])
        assert answers == [HIT] * 7 + [Outcome.ERROR] + [HIT] * 8
        env.clear()
        store.delete([key(n) for n in range(16)])
        env.add("pwritev", bad, times=10**6)
        answers = store.set([to_set(key(n), payload(n, 8192)) for n in range(100, 116)])
        assert answers.count(Outcome.ERROR) <= 1
        assert answers.count(STORED) >= 15
        store.check_integrity()


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


# --- MAC -------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def test_a_mac_finds_what_somebody_forged(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}"
    forged = payload("forged", 9000)
    with open_backend(url) as store:
        put(store, key("a"), payload("a", 9000))
        put(store, key("b"), payload("b", 9000))
    # Somebody who can write the directory replaces the bytes and makes the catalog agree with them.
    with FileBackend(str(tmp_path / "s"), CAPACITY, seal=Seal(secret.read_bytes())) as store:
        [(path, offset, _)] = store.locate(key("a"))
        records = store._catalog.load().records.copy()
        other = to_set(key("a"), forged).meta.checksum
        row = [r.tobytes() for r in records["digest"]].index(key("a").digest)
        records["checksum"][row] = other
        store._catalog.apply(records[row : row + 1], removals=[int(records["number"][row])])
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(forged)
    with open_backend(url) as store:
        assert fetch(store, key("a"), 9000) is CORRUPT
        assert fetch(store, key("b"), 9000) == payload("b", 9000)
        assert put(store, key("a"), payload("a", 9000)) is STORED
        assert fetch(store, key("a"), 9000) == payload("a", 9000)


def test_a_store_belongs_to_its_key(tmp_path: Path, secret: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    with open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}") as store:
        put(store, key("a"), b"x")
    with pytest.raises(StoreFormatError, match="another MAC key; give that one"):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={other}")
    with pytest.raises(StoreFormatError, match="was made with a MAC key; give"):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB")
    open_backend(f"file://{tmp_path}/plain?capacity=24MiB").close()
    with pytest.raises(StoreFormatError, match="without a MAC key; leave"):
        open_backend(f"file://{tmp_path}/plain?capacity=24MiB&mac_key={secret}")
    assert str(secret.read_bytes().hex()) not in (tmp_path / "s" / "format").read_text()
    with open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}") as store:
        assert fetch(store, key("a"), 1) == b"x"


def test_a_key_file_is_private_and_long_enough(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others; make it private with chmod 600"):
        open_backend(url)
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="must be a file of 32 to 4,096 random bytes"):
        open_backend(url)
    secret.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_backend(url)
    assert not (tmp_path / "s").exists()


# --- syncs that fail --------------------------------------------------------------------------------------------------------------------


def test_after_a_failed_flush_the_next_one_looks_at_the_medium(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, env=env, io="buffered") as store:
        put(store, key("before"), payload("before", 9000))
        store.flush()
        put(store, key("kept"), payload("kept", 9000))
        put(store, key("lost"), payload("lost", 9000))
        env.fail("fdatasync")
        with pytest.raises(StorageError, match="cannot be flushed"):
            store.flush()
        # What a failed write-back leaves: the medium has other bytes than the page cache had.
        [(path, offset, _)] = store.locate(key("lost"))
        with Path(path).open("r+b") as file:
            file.seek(offset)
            file.write(b"stale")
        env.clear()
        store.flush()
        assert env.calls["forget"] >= 2
        assert store.exists([key("before"), key("kept"), key("lost")]) == [True, True, False], "a flush promises only what is there"
        env.clear()
        store.flush()
        assert env.calls["forget"] == 0
        store.check_integrity()


def test_with_power_every_set_syncs_files_of_its_own(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), CAPACITY, "power", env) as store:
        put(store, key("a"), payload("a", 9000))
        env.clear()
        assert put(store, key("b"), payload("b", 9000)) is STORED
        assert (env.calls["open"], env.calls["fdatasync"], env.calls["commit"]) == (1, 1, 1)
        env.fail("fdatasync")
        assert put(store, key("c"), payload("c", 9000)) is Outcome.ERROR
        assert fetch(store, key("c"), 9000) is MISS
        assert int(store.usage().details["set_failures"]) == 1


# --- space and eviction ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), [(20_000, 700_000), (700_000, 20_000), (8192, 1 << 20)])
def test_space_stays_usable_when_sizes_change(tmp_path: Path, first: int, second: int) -> None:
    random = Random(5)
    with FileBackend(str(tmp_path / "s"), 32 << 20, io="buffered") as store:
        names = [("first", n) for n in range(20 * (1 << 20) // first)]
        assert outcomes(store.set([to_set(key(n), payload(n, first)) for n in names])) == {STORED: len(names)}
        gone = random.sample(names, len(names) // 2)
        store.delete([key(n) for n in gone])
        room = store.usage()
        free = room.details["blocks_free"]
        assert isinstance(free, int)
        assert store.usage().details["evicted"] == 0
        fitting = int(free * 4096 * 0.95) // (-(-second // 4096) * 4096)
        others = [("second", n) for n in range(fitting)]
        assert outcomes(store.set([to_set(key(n), payload(n, second)) for n in others])) == {STORED: fitting}
        assert int(store.usage().details["evicted"]) <= len(names) // 20, "what was free could be had"
        for n in [*random.sample(others, min(20, fitting)), *[n for n in names if n not in set(gone)][-20:]]:
            size = first if n[0] == "first" else second
            assert fetch(store, key(n), size) == payload(n, size)
        store.check_integrity()


def test_a_set_into_a_full_store_takes_one_transaction(tmp_path: Path) -> None:
    env = FaultEnv()
    with FileBackend(str(tmp_path / "s"), 8 << 20, env=env) as store:
        for n in range(200):
            put(store, key(n), payload(n, 60_000))
        env.clear()
        for n in range(200, 260):
            assert put(store, key(n), payload(n, 60_000)) is STORED
        assert env.calls["commit"] == 60, "what must go goes along with what comes"


class KeepsSmallDepths(Policy):
    """A policy of a caller's own: the deepest goes first."""

    name = "small depths"

    def rank(self, units: Units) -> np.ndarray:
        return -units.depth.astype(float)


def test_a_policy_decides_among_the_leaves(tmp_path: Path) -> None:
    with FileBackend(str(tmp_path / "s"), 8 << 20, policy=KeepsSmallDepths()) as store:
        for depth in (3, 1, 2):
            for n in range(30):
                store.set([to_set(key((depth, n)), payload(n, 60_000), depth=depth)])
        for n in range(70):
            store.set([to_set(key(("new", n)), payload(n, 60_000), depth=1)])
        left = [sum(store.exists([key((depth, n)) for n in range(30)])) for depth in (1, 2, 3)]
        assert left[0] == 30
        assert left[2] == 0
        store.check_integrity()


def test_suffixes_go_first_under_any_policy(tmp_path: Path) -> None:
    with FileBackend(str(tmp_path / "s"), 8 << 20, policy=KeepsSmallDepths()) as store:
        parents: dict[bytes, bytes | None] = {}
        for sequence in range(12):
            for depth, (k, parent) in enumerate(chain(sequence, 20)):
                parents[k.page_key] = parent
                store.set([to_set(k, payload(k, 60_000), parent=parent, depth=20 - depth)])
        kept = {e.key.page_key for e in store.scan_all()}
        assert len(kept) < 240
        assert all(parents[page] is None or parents[page] in kept for page in kept)
        assert store.orphans() == 0


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("io=fast", "'fast' is not possible; use 'auto' or 'buffered'"),
        ("io_threads=0", "'0' is not a number of threads; use 1 to 64"),
        ("io_threads=many", "use 1 to 64"),
        ("policy=best", "there is no eviction policy 'best'; use lru"),
        ("durability=none", "use 'process' or 'power'"),
        ("mac_key=secret", "'secret' is not an absolute path"),
        ("cap=1", "has no setting 'cap'; it has access, capacity, durability, io, io_threads, mac_key, path, policy"),
    ],
)
def test_bad_settings_are_named(tmp_path: Path, setting: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB&{setting}")
    assert not (tmp_path / "s").exists()


def test_a_store_of_an_older_format_starts_empty(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "s"
    with FileBackend(str(path), CAPACITY) as store:
        put(store, key("a"), payload("a", 9000))
    form = json.loads((path / "format").read_text())
    (path / "format").write_text(json.dumps({k: v for k, v in form.items() if k != "mac"} | {"version": 1}))
    with FileBackend(str(path), CAPACITY) as store:
        assert store.usage().objects == 0
        assert put(store, key("a"), payload("a", 9000)) is STORED
    assert "has format 1" in caplog.text
    with FileBackend(str(path), CAPACITY) as store:
        assert fetch(store, key("a"), 9000) == payload("a", 9000)


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_keeps_a_full_store_within_its_cap(tmp_path: Path, policy: str) -> None:
    """Sequences of four pages with a state each, several times what fits: the cap holds and no page outlives what it depends on."""
    cap = 8 << 20
    with FileBackend(str(tmp_path / "s"), cap, policy=policy_named(policy)) as store:
        for sequence in range(60):
            pages = chain(sequence, 4)
            state = state_of((sequence, 3))
            batch = [to_set(page, payload(page, 65536), parent=parent, depth=depth) for depth, (page, parent) in enumerate(pages, 1)]
            batch.append(to_set(state, payload(state, 131072), parent=state.page_key, depth=4))
            assert outcomes(store.set(batch)) == {STORED: 5}
            assert store.usage().used_bytes <= cap
        store.check_integrity()
        assert store.orphans() == 0
        assert 0 < store.usage().objects < 60 * 5
