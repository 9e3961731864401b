"""`inspect`: pages, with what is missing and what nothing can reach."""

from __future__ import annotations

import json

import numpy as np
import pytest

from tests.cli.store.test_samples import (
    ACME,
    FORK,
    KINDS,
    KV,
    MAMBA,
    PAGE,
    PROMPT,
    call,
    identity,
    keys_of,
    kv,
    make_store,
    open_store,
    remove,
    state,
)
from tests.examples import slow_after
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.reasons import follow
from tiercache.core import ObjectKey, ObjectMeta, PoolName, as_tokens
from tiercache.keys import namespace_of, page_keys
from tiercache.storage.base import NamespaceRecord, ScanEntry
from tiercache.testing.objects import payload, to_set


def page_entry(page: bytes, parent: bytes | None, depth: int | None = None) -> ScanEntry:
    return ScanEntry(ObjectKey(PoolName.KV, KV + page), ObjectMeta(ACME, 100, b"", parent, depth))


def state_entry(page: bytes) -> ScanEntry:
    return ScanEntry(ObjectKey(PoolName.MAMBA, MAMBA + page), ObjectMeta(ACME, 100, b"", page))


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_shows_all_that_belongs_to_it(kind, tmp_path):
    path = make_store(kind, tmp_path / "s")
    pages = keys_of(PROMPT)
    found = call("inspect", pages[4].hex()[:20], "-s", path, "-o", "json").document
    assert (found["page_key"], found["depth"], found["label"]) == (pages[4].hex(), 5, "qwen3-next@r1, acme")
    assert [o["pool"] for o in found["objects"]] == ["kv", "mamba"]
    assert found["chain"] == [page.hex() for page in pages[3::-1]]
    assert (found["chain_ends"], found["missing"]) == ("root", None)
    assert sorted(found["children"]) == sorted([pages[5].hex(), keys_of(FORK)[5].hex()])
    assert found["pages_below"] == 5 + 6
    [state_alone] = call("inspect", state(pages[4]).digest.hex(), "-s", path, "-o", "jsonl").lines[0][
        "objects"
    ]
    assert state_alone["pool"] == "mamba"
    table = call("inspect", pages[4].hex(), "-s", path).out
    assert "above: 4 pages up to the root" in table


def test_a_page_behind_a_gap_names_what_is_missing(tmp_path):
    path = make_store("file", tmp_path / "s")
    pages = keys_of(PROMPT)
    remove("file", path, kv(pages[6]))
    found = call("inspect", pages[8].hex(), "-s", path, "-o", "json").document
    assert (found["chain_ends"], found["missing"], found["chain"]) == (
        "missing",
        pages[6].hex(),
        [pages[7].hex()],
    )
    assert (
        f"page {pages[6].hex()[:12]}, which is missing: an ORPHAN"
        in call("inspect", pages[8].hex(), "-s", path).out
    )
    remove("file", path, kv(pages[7]))
    lone = call("inspect", pages[7].hex(), "-s", path, "-o", "json").document
    assert (lone["missing"], [o["pool"] for o in lone["objects"]]) == (pages[7].hex(), ["mamba"])


@pytest.mark.parametrize("count", slow_after(1, [10_000, 100_000]))
def test_thousands_of_pages_need_no_recursion(count):
    tokens = as_tokens(np.arange(count * PAGE, dtype=np.uint64))
    pages = page_keys(ACME, tokens, PAGE)
    entries = [page_entry(page, pages[n - 1] if n else None) for n, page in enumerate(pages)]
    entries += [state_entry(page) for page in pages[::7]]
    # Every tenth page has a branch of its own.
    entries += [page_entry(bytes([page[0] ^ 1]) + page[1:], page) for page in pages[::10]]
    forest = Forest(entries)
    assert forest.end_of(pages[-1]) == ("root", None)
    assert len(forest.chain(pages[-1])) == len(pages) - 1
    assert follow(forest, ACME, tokens, PAGE, pages).restorable()[1][-1] == (count - 1) // 7 * 7 + 1
    assert len(forest.removal_order(entries)) == len(entries)
    # A gap near the root cuts everything behind it off.
    lost = Forest([entry for entry in entries if entry.key != entries[50].key])
    assert lost.end_of(pages[-1]) == ("missing", pages[50])


def test_pages_that_go_round_in_a_circle_do_not_hang_anybody():
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    forest = Forest([page_entry(a, b), page_entry(b, a), page_entry(c, b), state_entry(c)])
    assert set(forest.order) == {a, b, c}
    assert set(forest.below([a])) == {a, b, c}
    assert forest.end_of(c)[0] == "missing"
    entries = [entry for page in forest.pages.values() for entry in page.entries]
    assert len(forest.removal_order(entries)) == 4


@pytest.mark.parametrize("kind", KINDS)
def test_states_without_pages_are_no_orphans(kind, tmp_path):
    path = make_store(kind, tmp_path / "s")
    alone = identity("alone")
    store = open_store(kind, path)
    store.register_namespace(NamespaceRecord(namespace_of(alone), alone.public_record()))
    keys = page_keys(namespace_of(alone), as_tokens(PROMPT), PAGE)
    items = [
        to_set(state(keys[depth - 1]), payload(depth, 50), namespace=namespace_of(alone), depth=depth)
        for depth in (3, 7, 10)
    ]
    assert {str(outcome) for outcome in store.set(items)} == {"stored"}
    store.close()
    (tmp_path / "tokens").write_text(json.dumps(PROMPT))
    explain = ("explain", "--namespace", "alone", "-s", path, "--tokens", tmp_path / "tokens")
    found = call(*explain, "-o", "json").document["namespaces"][0]
    assert found["restorable_depths"] == [[3, 3], [7, 7]], "one token is left to compute"
    assert [layout["present"] for layout in found["tiers"][0]["layouts"]] == [[[3, 3], [7, 7], [10, 10]]]
    assert "up to page 7 (28 tokens)" in call(*explain).out
    page = call("inspect", keys[6].hex(), "-s", path)
    assert "above: 0 pages up to the root" in page.out
    assert call("ls", "--namespace", "alone", "-s", path, "-o", "jsonl").lines[0]["parent"] is None
    assert call("verify", "-s", path).code == 0
    held = call("status", "-s", path, "-o", "json").out
    assert "orphans" not in held or '"orphans": 0' in held
