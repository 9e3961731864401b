"""How objects lie in the bucket: packs, joined reads, tombstones, and names that nobody writes twice."""

from __future__ import annotations

import time
from pathlib import Path

import obstore
import pytest
from tiercache_backends.s3.pack import (
    NewEntry,
    make_name,
    pack_head,
    parse_name,
    read_head,
    read_tombstone,
    tombstone,
)

from tests.storage_backends.s3.hooks import PromptS3, open_s3, place, s3_of
from tests.storage_backends.s3.integrity import check_directory
from tests.storage_backends.s3.proxy import Proxy
from tests.storage_backends.s3.server import bucket, needs_weed
from tests.waiting import until
from tiercache.storage.base import GetItem, SetItem
from tiercache.testing.conformance.figures import StoreFollower
from tiercache.testing.conformance.hooks import HIT, MISS, STORED
from tiercache.testing.objects import chain, content, fetch, key, payload, put, state_of, to_get, to_set

PAGE = 20_000


def run(name: object, pages: int) -> list[SetItem]:
    """A run of pages with a state at its end."""
    found = [
        to_set(k, payload(k, PAGE), parent=parent, depth=n + 1)
        for n, (k, parent) in enumerate(chain(name, pages))
    ]
    state = state_of((name, pages - 1))
    return [*found, to_set(state, payload(state, 3 * PAGE), parent=state.page_key, depth=pages)]


def gets(items: list[SetItem]) -> list[GetItem]:
    return [to_get(item.key, item.meta.length) for item in items]


@needs_weed
def test_a_run_is_one_put_and_few_gets(tmp_path: Path, proxy: Proxy) -> None:
    items = run("s", 64)
    with open_s3(tmp_path, proxy.url) as store:
        assert store.set(items) == [STORED] * 65
        assert (proxy.count("PUT"), proxy.count("GET")) == (1, 0)
        wanted = gets(items)
        assert store.get(wanted) == [HIT] * 65
        assert [content(one) for one in wanted] == [b"".join(item.buffers) for item in items]
        assert proxy.count("GET") == 1
        asked = len(proxy.log)
        assert store.exists([item.key for item in items]) == [True] * 65
        assert store.set(items) == [HIT] * 65
        assert len(proxy.log) == asked, "what is known is answered without a request"
        far = [items[0], items[1], items[40]]
        assert store.get(gets(far)) == [HIT] * 3
        assert proxy.count("GET") == 3, "neighbours are joined, and objects far from each other are not"
        check_directory(s3_of(store))
    proxy.log.clear()
    with open_s3(tmp_path, proxy.url, pack="64KiB") as again:
        assert proxy.count("GET") == 1, "the index of a pack is read with one request"
        assert again.get(gets(items)) == [HIT] * 65
        assert set(again.set(run("t", 8))) == {STORED}
        assert proxy.count("PUT") == 4, "3 pages of 20,000 bytes fit into 64 KiB, and the state is alone"


@needs_weed
def test_what_others_write_and_remove_is_told_without_a_call(tmp_path: Path) -> None:
    with open_s3(tmp_path, refresh="0s") as mine, open_s3(tmp_path, refresh="0s") as other:
        put(other, key("before"), b"x")
        told = StoreFollower(mine)
        other.set(run("s", 8))
        other.delete([key("before"), state_of(("s", 7))])
        put(mine, key("mine"), b"x")
        there, end = {entry.key.digest for entry in other.scan_all()}, time.monotonic() + 30
        while told.held() != there:
            assert time.monotonic() < end
            time.sleep(0.05)
        assert len(there) == 9


@needs_weed
def test_a_name_is_written_once(tmp_path: Path) -> None:
    with open_s3(tmp_path) as store:
        put(store, key("a"), payload("a", PAGE))
        name = s3_of(store)._settings.place(f"packs/{place(store, key('a')).pack.name}")  # private: its name
        with pytest.raises(obstore.exceptions.AlreadyExistsError):
            obstore.put(bucket(), name, b"other", mode="create")
        assert fetch(store, key("a"), PAGE) == payload("a", PAGE)


@needs_weed
def test_what_was_removed_stays_removed_for_everyone(tmp_path: Path) -> None:
    items = run("s", 4)
    with open_s3(tmp_path) as store, open_s3(tmp_path, kind=PromptS3) as other:
        store.set(items)
        assert all(other.exists([item.key for item in items]))
        assert store.delete([items[3].key, items[4].key]) == [True, True]
        names = [entry["path"] for page in obstore.list(bucket(), _folder(store)) for entry in page]
        assert [name[-4:] == "gone" for name in sorted(names)] == [False, True]
        assert other.exists([item.key for item in items]) == [True, True, True, False, False]
        with open_s3(tmp_path) as third:
            assert third.exists([item.key for item in items]) == [True, True, True, False, False]
            assert put(third, items[3].key, payload("anew", PAGE)) is STORED
            assert fetch(other, items[3].key, PAGE) == payload("anew", PAGE)
        assert store.delete([items[n].key for n in (0, 1, 2)]) == [True] * 3
        assert store.delete([items[4].key]) == [False]
        assert other.usage().objects == 1
        assert other.usage().objects == 1
        names = [entry["path"] for page in obstore.list(bucket(), _folder(store)) for entry in page]
        assert len(names) == 1, "a pack without objects goes, and then its tombstone"
        for one in (store, other):
            check_directory(s3_of(one))


@needs_weed
def test_two_writers_of_one_object_leave_one_object(tmp_path: Path) -> None:
    with open_s3(tmp_path) as one, open_s3(tmp_path) as two:
        for store in (one, two):
            assert put(store, key("a"), payload("a", PAGE)) is STORED
    with open_s3(tmp_path, kind=PromptS3) as store:
        usage = store.usage()
        assert (usage.objects, usage.payload_bytes, usage.details["copies"]) == (1, PAGE, 1)
        names = [entry["path"] for page in obstore.list(bucket(), _folder(store)) for entry in page]
        [first] = [name for name in names if name.endswith(place(store, key("a")).pack.name)]
        obstore.delete(bucket(), first)
        until(lambda: fetch(store, key("a"), PAGE) == payload("a", PAGE))  # the copy takes its place
        assert store.delete([key("a")]) == [True]
        assert store.usage().objects == 0
        check_directory(s3_of(store))


@needs_weed
def test_a_pack_that_vanishes_is_a_miss(tmp_path: Path) -> None:
    with open_s3(tmp_path) as store:
        store.set(run("s", 3))
        for page in obstore.list(bucket(), _folder(store)):
            obstore.delete(bucket(), [entry["path"] for entry in page])
        assert store.exists([key(("s", 0))]) == [True], "nobody has asked yet"
        assert store.get(gets(run("s", 3))) == [MISS] * 4
        assert store.usage().objects == 0
        assert set(store.set(run("s", 3))) == {STORED}
        check_directory(s3_of(store))


@needs_weed
def test_what_others_put_under_the_prefix_is_passed_over(tmp_path: Path) -> None:
    with open_s3(tmp_path) as store:
        put(store, key("a"), payload("a", PAGE))
        folder, sound = _folder(store), place(store, key("a")).pack
        whole = bytes(obstore.get(bucket(), f"{folder}/{sound.name}").bytes())
        head = parse_name(sound.name)
        assert head is not None
        for n, data in enumerate((b"", b"x" * 500, whole[:100], whole[:50] + b"x" + whole[51:])):
            obstore.put(bucket(), f"{folder}/{make_name(n, '0' * 16, n, head.head)}", data)
        obstore.put(bucket(), f"{folder}/{make_name(9, '0' * 16, 9, None)}", b"no tombstone")
        obstore.put(bucket(), f"{folder}/README", b"hello")
        obstore.put(bucket(), f"{folder.rpartition('/')[0]}/namespaces/xx.plain", b"\xc1")
    with open_s3(tmp_path) as again:
        assert fetch(again, key("a"), PAGE) == payload("a", PAGE)
        assert again.usage().details["unreadable"] == 5
        assert again.namespaces() == []


def test_every_flipped_bit_of_a_head_is_found() -> None:
    items = run("s", 2)
    head = pack_head([NewEntry(item.key, item.meta, 0, item.meta.length) for item in items])
    size = len(head) + sum(item.meta.length for item in items)
    index = read_head(head, size)
    assert index is not None
    assert [index[n].key for n in range(3)] == [item.key for item in items]
    assert [index[n].meta for n in range(3)] == [item.meta for item in items]
    assert read_head(head, size - 1) is None, "an entry ends behind the pack"
    for bit in range(0, 8 * len(head), 3):
        data = bytearray(head)
        data[bit // 8] ^= 1 << bit % 8
        assert read_head(bytes(data), size) is None, bit
    dead = {make_name(1, "0" * 16, 1, 100): {0, 7}, make_name(2, "f" * 16, 2, 200): {1}}
    assert read_tombstone(tombstone(dead)) == dead
    for at in range(len(tombstone(dead))):
        assert read_tombstone(tombstone(dead)[:at]) is None


def _folder(store: object) -> str:
    return s3_of(store)._settings.place("packs")  # type: ignore[arg-type]  # private: a test looks there
