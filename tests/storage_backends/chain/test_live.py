"""Changes of a chain while it serves."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import pytest
from tiercache_backends.chain import TierChain

from tests.storage_backends.chain.hooks import chain_of, store_of
from tiercache.core import Outcome
from tiercache.errors import ClosedError, ConfigError, RefusedError, StorageError
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
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
        (tier.name, id(tier), tier.settings, tier.is_open, tier.is_writable, tier.is_leaving, report.objects)
        for tier, report in zip(chain.tiers, chain.usage().tiers, strict=True)
    ]


def names_of(chain: TierChain) -> list[str]:
    return [tier.name for tier in chain.tiers]


# --- each change
# ------------------------------------------------------------------------------------------------------------


def test_a_new_tier_gets_what_the_upper_ones_have_and_shows_what_it_has(tmp_path):
    with open_backend(url(tmp_path / "b")) as old:
        fill(old, ["old"])
    with opened(url(tmp_path / "a")) as chain:
        chain.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        fill(chain, range(5))
        chain.add_tier(url(tmp_path / "b", name="b"))
        assert names_of(chain) == ["file", "b"]
        assert has_all(chain, ["old"])
        wait_for(lambda: chain.usage().tiers[1].objects == 6)
        [_, b] = chain.tiers
        assert [record.identity for record in b.call("namespaces", lambda store: store.namespaces())] == [
            {"model": "m"}
        ]
        chain.add_tier(f"lmdb://{tmp_path / 'c'}?capacity=16MiB", 0)
        assert put(chain, key("new"), payload("new", SIZE)) is Outcome.STORED
        assert chain.usage().tiers[0].objects == 1
        assert names_of(chain) == ["lmdb", "file", "b"]


def wait_for(condition, seconds: float = 30.0) -> None:
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


@pytest.mark.parametrize("leaving", [0, 1, 2])
def test_what_only_a_leaving_tier_has_is_copied(tmp_path, leaving):
    never = {"write": "write_through_selective", "promote": "never"}
    urls = [url(tmp_path / name, name=name, **never) for name in "abc"]
    for n, one in enumerate(urls):
        with open_backend(one.partition("&")[0]) as store:
            fill(store, range(n * 10, n * 10 + 10))
    told = []
    with opened(*urls) as chain:
        chain.remove_tier("abc"[leaving], progress=told.append)
        assert names_of(chain) == [name for name in "abc" if name != "abc"[leaving]]
        # The tier below takes the objects. If there is none, the one above does.
        assert [report.objects for report in chain.usage().tiers] == [[20, 10], [10, 20], [10, 20]][leaving]
        assert has_all(chain, range(30))
    assert (told[-1].copied_objects, told[-1].copied_bytes) == (10, 10 * SIZE)
    assert (told[-1].objects, told[-1].nbytes) == (10, 10 * SIZE)
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
            chain.remove_tier("b", keep_contents=how == "keep")
        else:
            wait_for(
                lambda: chain.tiers[0].call("namespaces", lambda store: store.namespaces()) == [record], 60
            )
    with opened(urls[0]) as chain:
        assert chain.namespaces() == [record]


def test_a_tier_gets_the_record_of_a_namespace_with_its_first_object(tmp_path):
    """Store and register behind the chain, as another host does, and let the upper tier get a copy."""
    with opened("memory://?capacity=1MiB&tier_promote=second", url(tmp_path / "b")) as chain:
        other = chain.tiers[1].opened
        assert other is not None
        # private: a record that comes when nothing is looked for any more
        wait_for(lambda: not any(mover._is_behind for mover in chain._lineups.current.movers.values()))
        other.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        fill(other, ["x"])
        upper = chain.tiers[0]

        def is_promoted() -> bool:
            assert fetch(chain, key("x"), SIZE) == payload("x", SIZE)
            return upper.exists([key("x")]) == [True]

        wait_for(is_promoted)
        assert [r.namespace for r in upper.call("namespaces", lambda store: store.namespaces())] == [
            NAMESPACE
        ]


def test_a_new_tier_s_records_go_to_the_others(tmp_path):
    with open_backend(url(tmp_path / "b")) as b:
        b.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
    with opened(url(tmp_path / "a")) as chain:
        chain.add_tier(url(tmp_path / "b", name="b"))
    with open_backend(url(tmp_path / "a")) as a:
        assert [record.namespace for record in a.namespaces()] == [NAMESPACE]


def test_contents_may_be_given_up(tmp_path):
    with opened("memory://?capacity=1MiB", url(tmp_path / "a", write="write_through_selective")) as chain:
        fill(chain, range(3))
        chain.remove_tier("memory", keep_contents=False)
        assert names_of(chain) == ["file"]
        assert list(chain.scan_all()) == []


def test_a_persistent_tiers_objects_go_to_a_persistent_tier(tmp_path):
    with opened("memory://?capacity=8MiB", url(tmp_path / "a", name="a")) as chain:
        fill(chain, range(5))
        chain.flush()
        chain.add_tier(url(tmp_path / "b", name="b", write="write_through_selective"))
        chain.remove_tier("a")
        assert [(tier.name, tier.objects) for tier in chain.usage().tiers] == [("memory", 5), ("b", 5)]


def test_the_same_directory_is_opened_again_with_another_capacity(tmp_path):
    with opened(url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b", read_only="yes")) as chain:
        fill(chain, range(5))
        before = chain.usage().tiers[0]
        chain.replace_tier("a", url(tmp_path / "a", "128MiB", promote="always"))
        after = chain.usage().tiers[0]
        assert (after.name, after.objects, after.health) == ("a", 5, "serving")
        assert after.capacity_bytes > before.capacity_bytes
        assert chain.tiers[0].settings.promote == "always"
        assert has_all(chain, range(5))
        fill(chain, ["more"])


def test_another_directory_takes_the_place_of_a_tier(tmp_path):
    with opened("memory://?capacity=1MiB", url(tmp_path / "a", name="a")) as chain:
        fill(chain, range(5))
        chain.flush()
        chain.replace_tier("a", f"lmdb://{tmp_path / 'b'}?capacity=16MiB")
        assert names_of(chain) == ["memory", "lmdb"]
        assert chain.usage().tiers[1].objects == 5
        assert has_all(chain, range(5))


def test_the_order_changes(tmp_path):
    with opened(*(url(tmp_path / name, name=name) for name in "abc")) as chain:
        chain.reorder(["c", "a", "b"])
        fill(chain, range(3))
        chain.flush()
        assert names_of(chain) == ["c", "a", "b"]
        assert [tier.objects for tier in chain.usage().tiers] == [3, 3, 3]


def test_settings_change(tmp_path):
    with opened("memory://?capacity=8MiB", url(tmp_path / "a", name="a")) as chain:
        chain.change_tier("a", write="write_through_selective", write_after=2, promote="never")
        fill(chain, [1])
        chain.flush()
        assert chain.usage().tiers[1].objects == 0
        chain.change_tier("a", write="write_through")
        wait_for(lambda: chain.usage().tiers[1].objects == 1)
        chain.change_tier("a", read_only="yes")
        fill(chain, [2])
        assert [(tier.health, tier.objects) for tier in chain.usage().tiers] == [
            ("serving", 2),
            ("read-only", 1),
        ]
        chain.change_tier("a", read_only="no", write_per_day="1TiB")
        wait_for(lambda: chain.usage().tiers[1].objects == 2)
        assert chain.tiers[1].settings.write_per_day == 1 << 40
        chain.change_tier("a", write_per_day="unlimited")
        assert chain.tiers[1].settings.write_per_day is None


def test_settings_of_its_store_change(tmp_path):
    with opened(url(tmp_path / "a", name="a", promote="always"), url(tmp_path / "b", name="b")) as chain:
        fill(chain, range(3))
        before = chain.usage().tiers[0].capacity_bytes
        chain.change_tier("a", capacity="128MiB", deadline="2s", promote="never")
        after = chain.usage().tiers[0]
        assert (after.objects, after.capacity_bytes) == (3, 2 * before)
        assert chain.tiers[0].settings.deadline == 2.0
        assert (
            after.url
            == f"file://{tmp_path / 'a'}?capacity=128MiB&tier_name=a&tier_promote=never&tier_deadline=2s"
        )
        assert has_all(chain, range(3))


def test_a_tier_shrinks(tmp_path):
    with opened(url(tmp_path / "a", "64MiB", name="a")) as chain:
        fill(chain, range(500))
        chain.change_tier("a", capacity="6MiB")
        [a] = chain.usage().tiers
        assert 0 < a.objects < 500
        assert a.used_bytes <= a.capacity_bytes == 6 << 20
        left = [entry.key for entry in chain.scan_all()]
        assert len(left) == a.objects
        fill(chain, ["more"])


def test_a_tier_in_memory_is_not_opened_again(tmp_path):
    with opened("memory://?capacity=8MiB", url(tmp_path / "a", name="a")) as chain:
        fill(chain, range(3))
        with pytest.raises(
            ConfigError, match="'memory' would have to be opened again, and its contents would"
        ):
            chain.change_tier("memory", capacity="16MiB")
        chain.change_tier("memory", promote="never")
        assert has_all(chain, range(3))


def test_a_scan_during_a_change_begins_again(tmp_path):
    with opened(*(url(tmp_path / name, name=name) for name in "ab")) as chain:
        fill(chain, range(3))
        page = chain.scan()
        assert page.cursor
        chain.reorder(["b", "a"])
        with pytest.raises(StorageError, match="changed during the scan; begin again"):
            chain.scan(None, page.cursor)


def test_deletions_while_a_tier_is_opened_again_are_made_up_for(tmp_path):
    with opened(url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b")) as chain:
        fill(chain, range(100))
        chain.flush()
        gone = []

        def delete():
            for n in range(100):
                chain.delete([key(n)])
                gone.append(n)

        thread = threading.Thread(target=delete)
        thread.start()
        wait_for(lambda: gone)
        chain.replace_tier("a", url(tmp_path / "a", "128MiB"))
        thread.join()
        wait_for(lambda: all(tier.health == "serving" for tier in chain.usage().tiers))
        assert list(chain.scan_all()) == []


# --- refusals
# ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        (lambda c, p: c.add_tier(url(p / "c", name="b")), ConfigError, "two tiers are named 'b'"),
        (lambda c, p: c.add_tier(url(p / "b")), ConfigError, "are both at .*/b; a directory"),
        (
            lambda c, p: c.add_tier(url(p / "c"), 3),
            ConfigError,
            r"position 3 is not possible; use 0 \(first\) to 2",
        ),
        (lambda c, p: c.add_tier(url(p / "c"), -1), ConfigError, "position -1 is not possible"),
        (lambda c, p: c.add_tier(url(p / "c", "1KiB")), ConfigError, "1024"),
        (lambda c, p: c.add_tier("nothing://x"), ConfigError, "'nothing' is unknown"),
        (lambda c, p: c.add_tier("memory://?capacity=1MiB"), ConfigError, "'memory' is not persistent"),
        (
            lambda c, p: c.add_tier(url(p / "c", write="write_back"), 0),
            ConfigError,
            "nothing can be written back",
        ),
        (lambda c, p: c.add_tier(url(p / "a-file" / "c")), ConfigError, "a-file/c cannot be looked into"),
        (
            lambda c, p: c.add_tier(url(p / "taken")),
            StorageError,
            "'file' cannot be opened, so the chain is as before: .* is in use",
        ),
        (lambda c, p: c.remove_tier("c"), ConfigError, "no tier is named 'c'; the chain has a, b"),
        (lambda c, p: c.reorder(["a"]), ConfigError, "a is no order of the tiers; name each once: a, b"),
        (lambda c, p: c.reorder(["a", "a", "b"]), ConfigError, "name each once"),
        (lambda c, p: c.reorder(["b", "a"]), ConfigError, "'b' is the first, so nothing can be written back"),
        (lambda c, p: c.remove_tier("a"), ConfigError, "'b' is the first, so nothing can be written back"),
        (lambda c, p: c.change_tier("a", write="write_back"), ConfigError, "'a' is the first"),
        (lambda c, p: c.change_tier("a", path="/b"), ConfigError, "path of tier 'a' cannot change"),
        (lambda c, p: c.change_tier("a", name="c"), ConfigError, "name of tier 'a' cannot change"),
        (lambda c, p: c.change_tier("a", colour="red"), ConfigError, "'file' has no setting 'colour'"),
        (lambda c, p: c.change_tier("a", capacity="1KiB"), ConfigError, "1024"),
        (lambda c, p: c.change_tier("a", deadline="never"), ConfigError, "'tier_deadline': 'never'"),
        (lambda c, p: c.change_tier("a", write_per_day="0"), ConfigError, "a budget of 0 bytes a day"),
        (
            lambda c, p: c.change_tier("a", promote="now"),
            ConfigError,
            "tier 'a', setting 'tier_promote': 'now'",
        ),
        (
            lambda c, p: c.change_tier("b", read_only="yes", write="write_back"),
            ConfigError,
            "'b' is read-only",
        ),
        (lambda c, p: c.replace_tier("a", url(p / "b")), ConfigError, "both at .*/b"),
        (lambda c, p: c.replace_tier("a", url(p / "c", name="a")), ConfigError, "'a' is taken until"),
        (
            lambda c, p: c.replace_tier("a", "memory://?capacity=1MiB"),
            ConfigError,
            "'memory' is not persistent",
        ),
        (
            lambda c, p: c.replace_tier("b", f"lmdb://{p / 'b'}?capacity=64MiB"),
            StorageError,
            "holds a store of kind",
        ),
    ],
)
def test_a_bad_change_is_refused_and_nothing_is_half_attached(tmp_path, change, error, sentence):
    (tmp_path / "a-file").write_text("")
    with (
        open_backend(url(tmp_path / "taken")),
        opened(url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b", write="write_back")) as chain,
    ):
        fill(chain, range(3))
        before, threads, files = shape(chain), threading.active_count(), len(os.listdir("/proc/self/fd"))
        with pytest.raises(error, match=sentence) as caught:
            change(chain, tmp_path)
        assert "\n" not in str(caught.value)
        assert shape(chain) == before
        assert has_all(chain, range(3))
        fill(chain, range(3, 6))
        wait_for(lambda: threading.active_count() <= threads)
        assert len(os.listdir("/proc/self/fd")) <= files


def test_a_tier_that_cannot_be_opened_with_other_settings_is_opened_with_the_old_ones(tmp_path):
    with opened(f"lmdb://{tmp_path / 'a'}?capacity=32MiB", url(tmp_path / "b", read_only="yes")) as chain:
        fill(chain, range(300))
        before = shape(chain)
        with pytest.raises(ConfigError, match=r"has grown to .* set capacity to"):
            chain.replace_tier("lmdb", f"lmdb://{tmp_path / 'a'}?capacity=4MiB")
        assert shape(chain) == before
        assert has_all(chain, range(300))
        fill(chain, ["more"])


def test_the_last_tier_stays(tmp_path):
    with opened(url(tmp_path / "a", name="a")) as chain:
        with pytest.raises(ConfigError, match="'a' is the last of the chain; add another tier first"):
            chain.remove_tier("a")
        fill(chain, [1])


@pytest.mark.parametrize(
    ("other", "why"),
    [
        ("memory://?capacity=65536", "the others have room for"),
        ("file://{}/b?capacity=64MiB&tier_read_only=yes", "the others have room for 0"),
    ],
)
def test_a_tier_whose_objects_fit_nowhere_else_stays(tmp_path, other, why):
    with open_backend(url(tmp_path / "b")):
        pass
    with opened(url(tmp_path / "a", name="a"), other.format(tmp_path)) as chain:
        fill(chain, range(10))
        before = shape(chain)
        with pytest.raises(
            RefusedError, match=f"'a' stays in the chain, because .* would be lost: {why}"
        ) as caught:
            chain.remove_tier("a")
        assert "\n" not in str(caught.value)
        assert shape(chain) == before
        assert has_all(chain, range(10))
        fill(chain, [11])


def test_an_exception_of_progress_ends_a_removal(tmp_path):
    with opened(url(tmp_path / "a", name="a"), url(tmp_path / "b", write="write_through_selective")) as chain:
        fill(chain, range(10))

        def enough(_):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            chain.remove_tier("a", progress=enough)
        assert names_of(chain) == ["a", "file"]
        assert chain.tiers[0].is_writable
        fill(chain, [11])


def test_a_close_ends_a_removal(tmp_path):
    urls = [url(tmp_path / "a", name="a"), url(tmp_path / "b", name="b", write="write_through_selective")]
    chain = opened(*urls)
    fill(chain, range(10))
    closing = threading.Thread(target=chain.close)

    def is_closing() -> bool:
        try:
            chain.reorder(["b", "a"])
        except ClosedError:
            return True
        except RefusedError:
            return False

    def close(_):
        closing.start()
        wait_for(is_closing)

    with pytest.raises(ClosedError, match="is being closed; open it again and repeat the change"):
        chain.remove_tier("a", progress=close)
    closing.join()
    with opened(*urls) as chain:
        assert has_all(chain, range(10))


def test_a_second_change_is_refused_during_a_change(tmp_path):
    with opened(url(tmp_path / "a", name="a"), url(tmp_path / "b", write="write_through_selective")) as chain:
        fill(chain, range(10))
        sentences = []

        def again(_):
            fill(chain, ["meanwhile"] if not sentences else [])
            with pytest.raises(RefusedError) as caught:
                chain.reorder(["file", "a"])
            sentences.append(str(caught.value))

        chain.remove_tier("a", progress=again)
        assert set(sentences) == {"tier 'a' is being removed; change the chain again when that is over"}
        assert has_all(chain, [*range(10), "meanwhile"])
        assert store_of(chain.tiers[0]) is not None


@pytest.mark.parametrize("leaves", [False, True])
def test_a_tier_that_lists_pages_in_any_order_is_copied_whole(tmp_path, leaves):
    """A store takes no page without its parent, and an `lmdb` store lists pages by their keys."""
    sequence = pages_of("s", 2500)
    keys = [k for k, _ in sequence]
    with open_backend(f"lmdb://{tmp_path}/a?capacity=64MiB") as store:
        store.set([to_set(k, payload(k, 100), parent=parent) for k, parent in sequence])
    write = "write_through_selective" if leaves else "write_through"
    with opened(f"lmdb://{tmp_path}/a?capacity=64MiB&tier_name=a", url(tmp_path / "b", write=write)) as chain:
        if leaves:
            chain.remove_tier("a")
        else:
            chain.flush()
        assert all(chain.tiers[-1].exists(keys))
