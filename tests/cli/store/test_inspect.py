"""`inspect`: pages, namespaces and prompts, with what is missing and what nothing can reach."""

from __future__ import annotations

import json
import sys

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
    RANKS,
    call,
    identity,
    keys_of,
    kv,
    make_store,
    open_store,
    remove,
    spoil,
    state,
    store_sequence,
)
from tests.examples import slow_after
from tiercache.cli.store.forest import Forest
from tiercache.cli.store.trees import add_runs, draw, follow, runs_of
from tiercache.cli.terminal import console
from tiercache.core import ObjectKey, ObjectMeta, PoolName, as_tokens
from tiercache.keys import namespace_of, page_keys, sequence_extra
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
    found = call("inspect", pages[4].hex()[:20], "-s", path, "-o", "json", "--verify").document
    assert (found["page_key"], found["depth"], found["label"]) == (pages[4].hex(), 5, "qwen3-next@r1, acme")
    assert [(o["pool"], o["verified"]) for o in found["objects"]] == [("kv", "hit"), ("mamba", "hit")]
    assert found["chain"] == [page.hex() for page in pages[3::-1]]
    assert (found["chain_ends"], found["missing"]) == ("root", None)
    assert sorted(found["children"]) == sorted([pages[5].hex(), keys_of(FORK)[5].hex()])
    assert found["pages_below"] == 5 + 6
    [state_alone] = call("inspect", state(pages[4]).digest.hex(), "-s", path, "-o", "jsonl").lines[0][
        "objects"
    ]
    assert (state_alone["pool"], state_alone["verified"]) == ("mamba", None)
    table = call("inspect", pages[4].hex(), "-s", path, "--verify").out
    assert "above: 4 pages up to the root" in table
    assert table.count("verified") == 2


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


def test_a_corrupt_object_is_exit_code_4(tmp_path):
    path = make_store("file", tmp_path / "s")
    page = keys_of(PROMPT)[1]
    spoil(path, kv(page))
    found = call("inspect", page.hex(), "--verify", "-s", path, "-o", "json", ok=4).document
    assert [o["verified"] for o in found["objects"]] == ["corrupt"]
    assert "CORRUPT" in call("inspect", page.hex(), "--verify", "-s", path, ok=4).out, "and it says so again"


def test_the_tree_of_a_namespace_draws_runs_together(tmp_path):
    path = make_store("file", tmp_path / "s")
    found = call("inspect", "--namespace", "acme", "-s", path, "-o", "json").document
    assert [(run["first_depth"], run["last_depth"], run["parent_run"]) for run in found["runs"]] == [
        (1, 5, None),
        (6, 10, 0),
        (6, 11, 0),
    ]
    assert [run["states"][0]["depths"] for run in found["runs"]] == [[4, 5], [8], [8]]
    assert found["runs"] == call("inspect", "--namespace", "acme", "-s", path, "-o", "jsonl").lines
    drawn = call("inspect", "--namespace", "acme", "-s", path).out
    assert "pages 1..5 kv; mamba at 4..5" in drawn
    assert "branch, pages 6..10 kv" in drawn
    assert "and 2 more" in call("inspect", "--namespace", "acme", "-s", path, "--limit", 1).out
    remove("file", path, kv(keys_of(PROMPT)[6]))
    assert "ORPHAN" in call("inspect", "--namespace", "acme", "-s", path).out


@pytest.mark.parametrize("kind", KINDS)
def test_a_prompt_shows_what_could_be_restored(kind, tmp_path):
    path = make_store(kind, tmp_path / "s")
    remove(kind, path, kv(keys_of(PROMPT)[5]))
    (tmp_path / "tokens.json").write_text(json.dumps([*PROMPT, 1, 2]))
    (tmp_path / "tokens.txt").write_text("\n".join(f"{t}," for t in [*PROMPT, 1, 2]))
    np.save(tmp_path / "tokens.npy", np.array([*PROMPT, 1, 2], np.int32))
    shown = [
        call("inspect", "--tokens", tmp_path / f"tokens.{end}", "-s", path, "-o", "json").document
        for end in ("json", "txt", "npy")
    ]
    assert shown[0] == shown[1] == shown[2]
    [acme] = [found for found in shown[0] if found["namespace"] == ACME.hex()]
    [other] = [found for found in shown[0] if found["namespace"] != ACME.hex()]
    assert (other["matched_pages"], other["restorable"][0]["pages"]) == (3, [1, 2, 3])
    assert (acme["tokens"], acme["pages"], acme["matched_pages"], acme["page_size"]) == (42, 10, 9, PAGE)
    layouts = {found["pool"]: (found["policy"], found["present"]) for found in acme["layouts"]}
    assert layouts == {"kv": ("all_pages", [[1, 5], [7, 10]]), "mamba": ("trailing_pages", [[4, 5], [8, 8]])}
    assert [found["pages"] for found in acme["restorable"]] == [[4, 5]]
    assert [found["tokens"] for found in acme["restorable"]] == [[16, 20]]
    assert (acme["orphans"], acme["branches"]) == ([[7, 10]], [{"depth": 5, "pages": 6}])
    drawn = call("inspect", "--tokens", tmp_path / "tokens.json", "-s", path).out
    for text in (
        "pages 1..5 kv",
        "mamba at 4..5",
        "page 6 missing",
        "pages 7..10 kv ORPHAN",
        "restorable at pages 4..5, the deepest 20 tokens",
    ):
        assert text in drawn
    [line] = call(
        "inspect",
        "--tokens",
        "-",
        "--namespace",
        "acme",
        "-s",
        path,
        "-o",
        "jsonl",
        text=" ".join(map(str, [*PROMPT, 1, 2])),
    ).lines
    assert line == acme


def test_a_prompt_that_ends_with_its_page_leaves_a_token_to_compute(tmp_path):
    path = make_store("file", tmp_path / "s")
    (tmp_path / "t").write_text(" ".join(map(str, PROMPT[:20])))
    [found] = call(
        "inspect", "--tokens", tmp_path / "t", "--namespace", "acme", "-s", path, "-o", "json"
    ).document
    assert found["restorable"][0]["pages"] == [4]


def test_a_prompt_nobody_stored_matches_nothing(tmp_path):
    path = make_store("file", tmp_path / "s")
    (tmp_path / "t").write_text("9 9 9 9 9")
    assert call("inspect", "--tokens", tmp_path / "t", "-s", path, "-o", "json").document == []
    assert (
        "no namespace has a page of this prompt"
        in call("inspect", "--tokens", tmp_path / "t", "-s", path).out
    )
    [found] = call(
        "inspect", "--tokens", tmp_path / "t", "--namespace", "acme", "-s", path, "-o", "json"
    ).document
    assert found["matched_pages"] == 0


def test_ranks_are_shown_apart_and_an_adapter_is_another_sequence(tmp_path):
    extra = sequence_extra("lora@1")
    with open_store("file", tmp_path / "s") as store:
        store.register_namespace(NamespaceRecord(ACME, identity().public_record()))
        store_sequence(store, PROMPT, layouts=RANKS, extra=extra)
        store_sequence(store, PROMPT[:8], layouts=RANKS[:1])
    remove("file", tmp_path / "s", ObjectKey(PoolName.KV, RANKS[1] + keys_of(PROMPT, extra=extra)[4]))
    (tmp_path / "t").write_text(" ".join(map(str, [*PROMPT, 1])))
    [found] = call(
        "inspect", "--tokens", tmp_path / "t", "--extra", extra.hex(), "-s", tmp_path / "s", "-o", "json"
    ).document
    present = {layout["layout"]: layout["present"] for layout in found["layouts"] if layout["pool"] == "kv"}
    assert present == {RANKS[0].hex(): [[1, 10]], RANKS[1].hex(): [[1, 4], [6, 10]]}
    assert {choice["layouts"]["kv"]: choice["pages"] for choice in found["restorable"]} == {
        RANKS[0].hex(): [4, 5, 8],
        RANKS[1].hex(): [4],
    }
    [plain] = call("inspect", "--tokens", tmp_path / "t", "-s", tmp_path / "s", "-o", "json").document
    assert plain["matched_pages"] == 2
    assert (
        f"kv:{RANKS[0].hex()[:8]}"
        in call("inspect", "--tokens", tmp_path / "t", "--extra", extra.hex(), "-s", tmp_path / "s").out
    )


def test_a_text_goes_through_its_tokenizer(tmp_path):
    tokenizers = pytest.importorskip("tokenizers")
    words = {f"w{n}": n for n in range(64)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    (tmp_path / "model").mkdir()
    made.save(str(tmp_path / "model" / "tokenizer.json"))
    path = make_store("file", tmp_path / "s")
    text = " ".join(f"w{n}" for n in [*PROMPT, 5])
    (tmp_path / "prompt.txt").write_text(text)
    for given in (["--text", text], ["--text-file", tmp_path / "prompt.txt"]):
        [found] = call(
            "inspect",
            *given,
            "--tokenizer",
            tmp_path / "model",
            "--namespace",
            "acme",
            "-s",
            path,
            "-o",
            "json",
        ).document
        assert (found["tokens"], found["matched_pages"]) == (41, 10)


def test_a_tokenizer_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    path = make_store("file", tmp_path / "s")
    assert (
        "pip install tokenizers"
        in call("inspect", "--text", "x", "--tokenizer", tmp_path, "-s", path, ok=2).error
    )


@pytest.mark.parametrize("count", slow_after(1, [10_000, 100_000]))
def test_thousands_of_pages_need_no_recursion(count):
    tokens = as_tokens(np.arange(count * PAGE, dtype=np.uint64))
    pages = page_keys(ACME, tokens, PAGE)
    entries = [page_entry(page, pages[n - 1] if n else None) for n, page in enumerate(pages)]
    entries += [state_entry(page) for page in pages[::7]]
    # Every tenth page has a branch of its own.
    entries += [page_entry(bytes([page[0] ^ 1]) + page[1:], page) for page in pages[::10]]
    forest = Forest(entries)
    assert forest.orphans() == []
    assert len(forest.chain(pages[-1])) == len(pages) - 1
    runs = runs_of(forest, forest.roots)
    assert len(runs) == 2 * len(pages[::10]) + 1
    assert [run.start for run in runs if run.last.key == pages[-1]] == [count - 8]
    path = follow(forest, ACME, tokens, PAGE, b"")
    assert path.restorable()[0][1][-1] == (count - 1) // 7 * 7 + 1
    for tree in (draw(path, "x", 500), draw(path, "x", 2)):
        with console().capture():
            console().print(tree)
    add_runs(tree, runs, 500)
    with console().capture():
        console().print(tree)
    assert len(forest.removal_order(entries)) == len(entries)
    # A gap near the root cuts everything behind it off.
    lost = Forest([entry for entry in entries if entry.key != entries[50].key])
    assert len(lost.orphans()) == sum(n >= 50 for n in range(0, count, 7)) + (count - 51) + sum(
        n >= 50 for n in range(0, count, 10)
    )
    assert {lost.missing_ancestor(entry) for entry in lost.orphans()} == {pages[50]}


def test_what_depends_on_a_page_goes_with_it_in_every_layout():
    a, b = (bytes([n]) * 32 for n in (1, 2))
    parent, child = page_entry(a, None), page_entry(b, a)
    other = ScanEntry(ObjectKey(PoolName.KV, bytes([9]) * 32 + b), child.meta)
    forest = Forest([parent, child, other])
    assert forest.dependents([parent, child]) == [other]
    assert forest.dependents([child]) == []


def test_pages_that_go_round_in_a_circle_do_not_hang_anybody():
    a, b, c = (bytes([n]) * 32 for n in (1, 2, 3))
    forest = Forest([page_entry(a, b), page_entry(b, a), page_entry(c, b), state_entry(c)])
    assert set(forest.order) == {a, b, c}
    assert len(forest.orphans()) == 4
    assert set(forest.below([a])) == {a, b, c}
    assert forest.end_of(c)[0] == "missing"
    assert len(forest.removal_order([*forest.orphans()])) == 4
    assert runs_of(forest, forest.roots) == []


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
    [found] = call(
        "inspect", "--namespace", "alone", "-s", path, "--tokens", tmp_path / "tokens", "-o", "json"
    ).document
    assert (found["matched_pages"], found["orphans"]) == (3, [])
    assert [layout["policy"] for layout in found["layouts"]] == ["trailing_pages"]
    assert [one["pages"] for one in found["restorable"]] == [[3, 7]], "one token is left to compute"
    drawn = call("inspect", "--namespace", "alone", "-s", path, "--tokens", tmp_path / "tokens").out
    assert "restorable at pages 3, 7" in drawn
    assert "missing" not in drawn
    tree = call("inspect", "--namespace", "alone", "-s", path)
    assert "0 pages, 3 states" in tree.out
    assert "page 7 no pages are kept; mamba at 7" in tree.out
    assert not any(word in tree.out for word in ("ORPHAN", "not stored"))
    page = call("inspect", keys[6].hex(), "-s", path, "--verify")
    assert "above: 0 pages up to the root" in page.out
    assert page.out.count("verified") == 1
    assert call("ls", "--namespace", "alone", "-s", path, "-o", "jsonl").lines[0]["parent"] is None
    assert call("verify", "-s", path).code == 0
    held = call("status", "-s", path, "-o", "json").out
    assert "orphans" not in held or '"orphans": 0' in held
