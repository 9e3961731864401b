"""Changes of a chain while it serves."""

from __future__ import annotations

import os
import re
import threading
from collections.abc import Collection
from pathlib import Path

import pytest
from tiercache_backends.chain import TierChain, changes
from tiercache_backends.chain.leaving import Leaving

from tests.storage_backends.chain.hooks import chain_of
from tests.waiting import until
from tiercache.core import Outcome
from tiercache.errors import ClosedError, ConfigError, RefusedError, StorageError, UnavailableError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
from tiercache.testing.conformance.threads import run_all
from tiercache.testing.objects import NAMESPACE, fetch, key, payload, put, to_set
from tiercache.testing.objects import chain as pages_of

SIZE = 20_000


def url(path: Path, capacity: str = "64MiB", **own: str) -> str:
    return "&".join([f"file://{path}?capacity={capacity}", *(f"tier_{k}={v}" for k, v in own.items())])


def opened(*urls: str) -> TierChain:
    return chain_of(open_backend(list(urls)))


def fill(store, names) -> None:
    for name in names:
        assert put(store, key(name), payload(name, SIZE)) is Outcome.STORED


def has_all(store, names, length: int = SIZE) -> bool:
    return all(fetch(store, key(name), length) == payload(name, length) for name in names)


def shape(chain: TierChain) -> list[tuple[object, ...]]:
    """Return what a change that fails must leave as it was."""
    chain.flush()
    return [
        (tier.name, id(tier), tier.settings, tier.opened, tier.is_writable, tier.leaving, report.objects)
        for tier, report in zip(chain.tiers, chain.usage().tiers, strict=True)
    ]


def move(chain: TierChain, *specs: object, drop: Collection[str] = ()) -> None:
    """Give the chain another list of tiers, and wait until the tiers that are not in it have left."""
    chain.retier(specs, drop).left.result(60)  # type: ignore[arg-type]


def names_of(chain: TierChain) -> list[str]:
    return [tier.name for tier in chain.tiers]


# -- each change


def test_a_new_tier_gets_what_the_upper_ones_have_and_shows_what_it_has(tmp_path):
    first, second = url(tmp_path / "a"), url(tmp_path / "b", name="b")
    with open_backend(url(tmp_path / "b")) as old:
        fill(old, ["old"])
    with opened(first) as chain:
        chain.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        fill(chain, range(5))
        move(chain, first, second)
        assert names_of(chain) == ["file", "b"]
        assert has_all(chain, ["old"])
        until(lambda: chain.usage().tiers[1].objects == 6)
        [_, b] = chain.tiers
        assert [record.identity for record in b.call("namespaces", lambda store: store.namespaces())] == [
            {"model": "m"}
        ]
        move(chain, f"lmdb://{tmp_path / 'c'}?capacity=16MiB", first, second)
        assert put(chain, key("new"), payload("new", SIZE)) is Outcome.STORED
        assert chain.usage().tiers[0].objects == 1
        assert names_of(chain) == ["lmdb", "file", "b"]


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_what_only_a_leaving_tier_has_is_copied(tmp_path, leaving):
    never = {"write": "write_through_selective", "promote": "never"}
    urls = [url(tmp_path / name, name=name, **never) for name in "abc"]
    for n, one in enumerate(urls):
        with open_backend(one.partition("&")[0]) as store:
            fill(store, range(n * 10, n * 10 + 10))
    with opened(*urls) as chain:
        move(chain, *(one for one in urls if one is not urls[leaving]))
        assert names_of(chain) == [name for name in "abc" if name != "abc"[leaving]]
        # The tier below takes the objects. If there is none, the one above does.
        assert [report.objects for report in chain.usage().tiers] == [[20, 10], [10, 20], [10, 20]][leaving]
        assert has_all(chain, range(30))
    with open_backend(urls[leaving].partition("&")[0]) as store:
        assert has_all(store, range(leaving * 10, leaving * 10 + 10))


@pytest.mark.parametrize("how", ["keep", "drop", "while stopped", "after an outage"])
def test_a_namespace_s_record_survives_the_tier_that_brought_it(tmp_path, how):
    """Only tier b has it, from an earlier life, when the chain begins; then b goes."""
    never = {"write": "write_through_selective", "promote": "never"}
    urls = [url(tmp_path / name, name=name, **never) for name in "ab"]
    record = NamespaceRecord(NAMESPACE, {"model": "m"}, states=True)
    b = open_backend(url(tmp_path / "b"))
    b.register_namespace(record)
    fill(b, range(3))
    if how != "after an outage":
        b.close()
    with opened(*urls) as chain:
        if how == "after an outage":  # the tier's directory is another's
            assert chain.namespaces() == []
            b.close()
        if how in ("keep", "drop"):
            move(chain, urls[0], drop=["b"] if how == "drop" else [])
        else:
            until(lambda: chain.tiers[0].call("namespaces", lambda store: store.namespaces()) == [record])
    with opened(urls[0]) as chain:
        assert chain.namespaces() == [record]


def test_a_tier_gets_the_record_of_a_namespace_with_its_first_object(tmp_path):
    """Store and register behind the chain, as another host does, and let the upper tier get a copy."""
    with opened("memory://?capacity=1MiB&tier_promote=second", url(tmp_path / "b")) as chain:
        other = chain.tiers[1].opened
        assert other is not None
        # private: a record that comes when nothing is looked for any more
        until(lambda: not any(mover._is_behind for mover in chain._lineups.current.movers.values()))
        other.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        fill(other, ["x"])
        upper = chain.tiers[0]

        def is_promoted() -> bool:
            assert fetch(chain, key("x"), SIZE) == payload("x", SIZE)
            return upper.exists([key("x")]) == [True]

        until(is_promoted)
        assert [r.namespace for r in upper.call("namespaces", lambda store: store.namespaces())] == [
            NAMESPACE
        ]


def test_a_new_tier_s_records_go_to_the_others(tmp_path):
    with open_backend(url(tmp_path / "b")) as b:
        b.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
    with opened(url(tmp_path / "a")) as chain:
        move(chain, url(tmp_path / "a"), url(tmp_path / "b", name="b"))
    with open_backend(url(tmp_path / "a")) as a:
        assert [record.namespace for record in a.namespaces()] == [NAMESPACE]


def test_a_persistent_tiers_objects_go_to_a_persistent_tier(tmp_path):
    with opened("memory://?capacity=8MiB", url(tmp_path / "a", name="a")) as chain:
        fill(chain, range(5))
        chain.flush()
        move(chain, "memory://?capacity=8MiB", url(tmp_path / "b", name="b", write="write_through_selective"))
        assert [(tier.name, tier.objects) for tier in chain.usage().tiers] == [("memory", 5), ("b", 5)]


def test_a_tier_without_a_name_keeps_the_one_that_it_has(tmp_path):
    """The second would be named "file" if the chain were opened with it alone."""
    first, second, third = (url(tmp_path / name) for name in "abc")
    with opened(first, second) as chain:
        kept = chain.tiers[1]
        fill(chain, range(5))
        move(chain, second, third)
        assert names_of(chain) == ["file-2", "file-3"]
        assert chain.tiers[0] is kept
        assert has_all(chain, range(5))


def test_the_order_changes(tmp_path):
    urls = {name: url(tmp_path / name, name=name) for name in "abc"}
    with opened(*urls.values()) as chain:
        move(chain, *(urls[name] for name in "cab"))
        fill(chain, range(3))
        chain.flush()
        assert names_of(chain) == ["c", "a", "b"]
        assert [tier.objects for tier in chain.usage().tiers] == [3, 3, 3]


def test_settings_change(tmp_path):
    def change(**own: str) -> None:
        move(chain, "memory://?capacity=8MiB", url(tmp_path / "a", name="a", **own))

    with opened("memory://?capacity=8MiB", url(tmp_path / "a", name="a")) as chain:
        tier = chain.tiers[1]
        change(write="write_through_selective", write_after="2", promote="never")
        fill(chain, [1])
        chain.flush()
        assert chain.usage().tiers[1].objects == 0
        change(write="write_through")
        until(lambda: chain.usage().tiers[1].objects == 1)
        change(read_only="yes")
        fill(chain, [2])
        assert [(tier.health, tier.objects) for tier in chain.usage().tiers] == [
            ("serving", 2),
            ("read-only", 1),
        ]
        change(write_per_day="1TiB")
        until(lambda: chain.usage().tiers[1].objects == 2)
        assert tier.settings.write_per_day == 1 << 40
        change(write_per_day="unlimited")
        assert tier.settings.write_per_day is None
        assert chain.tiers[1] is tier


def test_a_list_without_a_difference_changes_nothing(tmp_path):
    urls = ["memory://?capacity=8MiB", url(tmp_path / "a", name="a")]
    with opened(*urls) as chain:
        # private: another lineup would make every mover compare its tier again
        lineup = chain._lineups.current  # private: see above
        move(chain, *urls)
        assert chain._lineups.current is lineup  # private: see above


def test_a_scan_during_a_change_begins_again(tmp_path):
    urls = [url(tmp_path / name, name=name) for name in "ab"]
    with opened(*urls) as chain:
        fill(chain, range(3))
        page = chain.scan()
        assert page.cursor
        move(chain, *reversed(urls))
        with pytest.raises(StorageError, match="changed during the scan; begin again"):
            chain.scan(None, page.cursor)


# -- lists that are not possible


A = "file://{0}/a?capacity=64MiB&tier_name=a"
B = "file://{0}/b?capacity=64MiB&tier_name=b&tier_write=write_back"
TAKEN = "file://{0}/taken?capacity=64MiB"
C = "file://{0}/c?capacity=64MiB"


@pytest.mark.parametrize(
    ("listed", "drop", "error", "sentence"),
    [
        ([A, B, "/data"], [], ConfigError, "is not a URL"),
        ([A, B, C + "&tier_name=b"], [], ConfigError, "two tiers are named 'b'"),
        ([A, B, C.replace("/c", "/link/b")], [], ConfigError, "are both at .*/b; a directory"),
        ([A, B, "file://{0}/c?capacity=1KiB"], [], ConfigError, "1024"),
        ([A, B, "memory://?capacity=1MiB"], [], ConfigError, "'memory' is not persistent"),
        ([B, A], [], ConfigError, "'b' is the first, so nothing can be written back"),
        ([A, B.replace("file:", "lmdb:")], [], StorageError, "holds a store of kind"),
        ([A.replace("/a?", "/c?"), B], [], ConfigError, "'a' is taken until that tier, which is else"),
        ([A.replace("=a", "=b"), B.replace("=b", "=a", 1)], [], ConfigError, "the name '.' is taken"),
        ([A, B, C.replace("/c", "/a-file/c")], [], ConfigError, "a-file/c cannot be looked into"),
        ([A, B, TAKEN], [], StorageError, "opened, so the chain is as before: .* in use"),
        ([A, B, "lmdb://{0}/c?capacity=16MiB", TAKEN], [], StorageError, "'file' cannot be opened"),
        ([A.replace("64", "96"), B], [], ConfigError, "'a' would have to be opened again with these"),
        ([A + "&tier_deadline=2s", B], [], ConfigError, "'a' would have to be opened again with these"),
        ([A, B], ["x"], ConfigError, "tier 'x' cannot be dropped, because it is not there"),
        ([A, B], ["a"], ConfigError, "tier 'a' cannot be dropped, because it is in the list"),
    ],
)  # fmt: skip
def test_a_list_that_is_not_possible_is_refused_and_nothing_has_changed(
    tmp_path, listed, drop, error, sentence
):
    (tmp_path / "a-file").write_text("")
    (tmp_path / "link").symlink_to(tmp_path)
    with open_backend(url(tmp_path / "taken")), opened(A.format(tmp_path), B.format(tmp_path)) as chain:
        fill(chain, range(3))
        before, threads, files = shape(chain), threading.active_count(), len(os.listdir("/proc/self/fd"))
        with pytest.raises(error, match=sentence) as caught:
            move(chain, *(one.format(tmp_path) if isinstance(one, str) else one for one in listed), drop=drop)
        assert "\n" not in str(caught.value)
        assert shape(chain) == before
        assert has_all(chain, range(3))
        fill(chain, range(3, 6))
        until(lambda: threading.active_count() <= threads)
        assert len(os.listdir("/proc/self/fd")) <= files


# -- tiers that leave


@pytest.mark.parametrize(
    "other", ["memory://?capacity=65536", "file://{}/b?capacity=64MiB&tier_read_only=yes"]
)
def test_a_tier_whose_objects_fit_nowhere_else_says_so_until_it_may_stay_or_is_dropped(tmp_path, other):
    with open_backend(url(tmp_path / "b")):
        pass
    urls = [url(tmp_path / "a", name="a"), other.format(tmp_path)]
    with opened(*urls) as chain:
        fill(chain, range(10))
        first = chain.retier(urls[1:]).left
        until(lambda: "would be lost" in chain.tiers[0].why)
        why = r"^it cannot leave the chain: \d+ objects \(.*\) would be lost: the others have room for .*;"
        assert re.match(why, chain.usage().tiers[0].why)
        assert chain.tiers[0].health == "read-only"
        assert has_all(chain, range(10))
        move(chain, *urls)
        with pytest.raises(
            RefusedError, match="the chain was given another list before all tiers that leave"
        ):
            first.result(0)
        assert chain.tiers[0].is_writable
        fill(chain, [11])
        move(chain, urls[1], drop=["a"])
        assert len(chain.tiers) == 1


def test_room_that_is_made_lets_a_tier_leave(tmp_path, monkeypatch):
    monkeypatch.setattr(changes, "_AGAIN_S", 0.05)  # private: ten seconds
    urls = [url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b", read_only="yes")]
    open_backend(url(tmp_path / "b")).close()
    with opened(*urls) as chain:
        fill(chain, range(10))
        chain.retier(urls[1:])
        until(lambda: "would be lost" in chain.tiers[0].why)
        move(chain, urls[1].replace("=yes", "=no"))
        assert has_all(chain, range(10))


def test_a_tier_that_is_out_must_be_dropped(tmp_path):
    urls = [url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b")]
    with opened(*urls) as chain:
        fill(chain, range(3))
        chain.flush()
        chain.tiers[0].leave_out("its disk is dead")
        with pytest.raises(
            UnavailableError, match=r"'a' is left out \(its disk is dead\), so what only it has"
        ):
            move(chain, urls[1])
        # Another disk at another place may have its name at once.
        move(chain, url(tmp_path / "c", name="a"), urls[1], drop=["a"])
        assert names_of(chain) == ["a", "b"]
        assert has_all(chain, range(3))


class Held:
    """A chain whose copies out of the leaving tier wait until they may go on."""

    def __init__(self, monkeypatch) -> None:
        self.reached, self.opened = threading.Event(), threading.Event()
        copy_page = Leaving._copy_page  # private: a copy has to be held up while it is under way

        def held(leaving, entries):
            self.reached.set()
            # private: the end of the wait, and the method that is held up
            while not self.opened.is_set() and not leaving._is_given_up():
                self.opened.wait(0.01)
            return copy_page(leaving, entries)

        monkeypatch.setattr(Leaving, "_copy_page", held)  # private: see above


def test_another_list_comes_while_a_tier_leaves(tmp_path, monkeypatch):
    """The tier is read and says how much is left; it takes objects again if it is in the list again."""
    held = Held(monkeypatch)
    rarely = {"write": "write_through_selective", "write_after": "9"}  # no read copies anything
    a, b, c = (url(tmp_path / name, name=name, **rarely) for name in "abc")
    with opened(a, b) as chain:
        fill(chain, range(10))
        first = chain.retier([b]).left
        assert held.reached.wait(60)
        assert chain.usage().tiers[0].why == (
            "it is leaving the chain: 10 objects (195.3 KiB) that only it has are left"
        )
        fill(chain, ["meanwhile"])
        assert has_all(chain, [*range(10), "meanwhile"])
        second = chain.retier([b, c]).left  # and a leaves on
        assert names_of(chain) == ["a", "b", "c"]
        with pytest.raises(RefusedError, match="given another list before all tiers that leave"):
            first.result(60)
        third = chain.retier([a, c]).left
        with pytest.raises(RefusedError):
            second.result(0)
        assert chain.tiers[0].is_writable
        held.opened.set()
        third.result(60)
        assert names_of(chain) == ["a", "c"]
        assert has_all(chain, [*range(10), "meanwhile"])


def test_a_close_ends_a_leave(tmp_path, monkeypatch):
    held = Held(monkeypatch)
    urls = [url(tmp_path / name, name=name, write="write_through_selective") for name in "ab"]
    with opened(*urls) as chain:
        fill(chain, range(10))
        gone = chain.retier(urls[1:]).left
        assert held.reached.wait(60)
    with pytest.raises(RefusedError, match="the chain was closed before all tiers that leave"):
        gone.result(0)
    with pytest.raises(ClosedError):
        chain.retier(urls)
    with opened(*urls) as chain:
        assert has_all(chain, range(10))


def test_lists_from_many_threads_wait_for_each_other(tmp_path):
    urls = [url(tmp_path / name, name=name) for name in "abc"]
    with opened(*urls) as chain:
        fill(chain, range(10))
        run_all(*(lambda n=n: chain.retier(urls[n:] + urls[:n]) for n in (0, 1, 2) * 3))
        move(chain, urls[2])
        assert names_of(chain) == ["c"]
        assert has_all(chain, range(10))


@pytest.mark.parametrize("leaves", [False, True])
def test_a_tier_that_lists_pages_in_any_order_is_copied_whole(tmp_path, leaves):
    """A store takes no page without its parent, and an `lmdb` store lists pages by their keys."""
    sequence = pages_of("s", 2500)
    keys = [k for k, _ in sequence]
    with open_backend(f"lmdb://{tmp_path}/a?capacity=64MiB") as store:
        store.set([to_set(k, payload(k, 100), parent=parent) for k, parent in sequence])
    write = "write_through_selective" if leaves else "write_through"
    urls = [f"lmdb://{tmp_path}/a?capacity=64MiB&tier_name=a", url(tmp_path / "b", write=write)]
    with opened(*urls) as chain:
        if leaves:
            move(chain, urls[1])
        else:
            chain.flush()
        assert all(chain.tiers[-1].exists(keys))
