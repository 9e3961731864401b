"""`explain`: what is missing first at each depth of a prompt, and why: daemons, stopped stores, chains."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.store.test_samples import (
    ACME,
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
    state,
    store_sequence,
    written_down,
)
from tests.daemon.hosts import until
from tests.daemon.test_removals import client, server, worker
from tests.storage_backends.grpc.nodes import daemon_settings
from tiercache.cli.terminal import Exit
from tiercache.core import PoolName, as_tokens
from tiercache.daemon import StorageServer
from tiercache.keys import namespace_of, object_key, sequence_extra, sglang_page_keys
from tiercache.storage.base import NamespaceRecord
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import payload, to_set


@pytest.fixture
def prompt(tmp_path: Path) -> str:
    path = tmp_path / "prompt.json"
    path.write_text(json.dumps(PROMPT))
    return str(path)


@pytest.fixture
def node() -> Iterator[StorageServer]:
    """A daemon whose store in memory holds some two of the sequences below, and remembers from the start."""
    with StorageServer(daemon_settings("unix"), open_backend("memory://?capacity=96KiB")) as node:
        with worker(node) as store:
            register(store)
            until(lambda: store.history([], []).tiers[0].since is not None)
        yield node


def register(store: Any, *others: Any, states: bool = False) -> None:
    for one in (identity(), *others):
        store.register_namespace(NamespaceRecord(namespace_of(one), one.public_record(), states))


def url(node: StorageServer) -> str:
    return f"grpc://{node.settings.socket_directory}?timeout=60s"


def explained(prompt: str, *arguments: object, ok: int = 0) -> dict[str, Any]:
    """The first namespace of an explanation, that of a table was printed too."""
    assert call("explain", "--tokens", prompt, *arguments, ok=ok).out.strip()
    found = call("explain", "--tokens", prompt, *arguments, "-o", "json", ok=ok).document
    lines = call("explain", "--tokens", prompt, *arguments, "-o", "jsonl", ok=ok).lines
    assert [line["namespace"] for line in lines] == [one["namespace"] for one in found["namespaces"]]
    return dict(found["namespaces"][0])


def gap_at(found: dict[str, Any], depth: int) -> dict[str, Any]:
    [gap] = [gap for gap in found["gaps"] if gap["first"] <= depth <= gap["last"]]
    return dict(gap)


def test_what_is_whole_needs_no_words(node: StorageServer, prompt: str) -> None:
    with worker(node) as store:
        store_sequence(store, PROMPT, states=(9,))
    found = explained(prompt, "-s", url(node))
    assert found["restorable"] == {"pages": 9, "tokens": 36}
    assert found["limit"] == 9, "one token is left to compute"
    table = call("explain", "--tokens", prompt, "-s", url(node)).out
    assert "██████████" in table
    assert "up to page 9 (36 tokens)" in table
    assert "no state" not in table


def test_a_daemon_says_what_was_deleted_and_what_was_never_written(node: StorageServer, prompt: str) -> None:
    with worker(node) as store:
        pages = store_sequence(store, PROMPT)  # states at 4, 5 and 8
        store.delete([state(pages[4])])
        store.delete([kv(pages[6])])
    found = explained(prompt, "-s", url(node))
    assert (found["restorable"], found["restorable_depths"]) == ({"pages": 4, "tokens": 16}, [[4, 4]])
    assert found["tiers"][0]["layouts"] == [
        {"pool": "kv", "layout": KV.hex(), "present": [[1, 6], [8, 10]]},
        {"pool": "mamba", "layout": MAMBA.hex(), "present": [[4, 4], [8, 8]]},
    ]
    states = gap_at(found, 5)
    assert (states["first"], states["last"], states["missing"], states["pool"]) == (5, 6, "state", "mamba")
    assert [(one["depth"], one["cause"]) for one in states["removed"]] == [(5, "deleted")]
    kept = gap_at(found, 9)
    assert (kept["first"], kept["last"], kept["page"], kept["reason"]) == (7, 9, 7, "deleted")
    assert kept["stored_behind"] == [8, 9]
    assert gap_at(found, 2)["reason"] == "not stored"
    text = call("explain", "--tokens", prompt, "-s", url(node)).out
    assert "kv of page 7 was deleted at" in text
    assert "2 pages behind it (8..9) cannot be used" in text
    assert "the one at 5 was deleted at" in text
    assert "not written since" in text
    assert "pages 1..3" not in text, "it goes deeper than that"


def test_evictions_are_told_with_their_time_also_when_nothing_is_left(node, prompt):
    with worker(node) as store:
        store_sequence(store, PROMPT)
        for number in range(8):
            store_sequence(store, [100 + number] * 40)
    found = explained(prompt, "-s", url(node), ok=Exit.NO)
    assert found["restorable"] == {"pages": 0, "tokens": 0}
    [gap] = found["gaps"]
    assert (gap["first"], gap["last"], gap["page"], gap["reason"]) == (1, 9, 1, "evicted")
    assert found["removals_known_since"] <= gap["removed"][0]["at"]
    assert (
        "kv of page 1 was evicted at" in call("explain", "--tokens", prompt, "-s", url(node), ok=Exit.NO).out
    )
    # Of a namespace of which nothing is stored any more, too.
    with worker(node) as store:
        other = identity(model="gone")
        register(store, other)
        pages = store_sequence(store, PROMPT, states=(), namespace=namespace_of(other))
        store.delete([kv(page) for page in pages])
    found = explained(prompt, "-s", url(node), "--namespace", "gone", ok=Exit.NO)
    assert (found["label"], found["gaps"][0]["reason"]) == ("gone@r1, acme", "deleted")
    assert found["gaps"][0]["layout"] is None


def test_states_that_are_needed_and_nowhere_stored(node: StorageServer, prompt: str) -> None:
    with worker(node) as store:
        register(store, states=True)
        store_sequence(store, PROMPT, states=())
    found = explained(prompt, "-s", url(node), ok=Exit.NO)
    assert found["restorable_depths"] == []
    assert (gap_at(found, 9)["first"], gap_at(found, 9)["pool"]) == (1, "states")
    assert "none is stored anywhere" in call("explain", "--tokens", prompt, "-s", url(node), ok=Exit.NO).out


def test_the_fields_in_which_another_identity_differs(node: StorageServer, prompt: str) -> None:
    from dataclasses import replace

    wide = replace(identity(), page_size=8, weights_dtype="fp8")
    with worker(node) as store:
        register(store, wide)
        store_sequence(store, PROMPT)
    found = call("explain", "--tokens", prompt, "-s", url(node), "--namespace", namespace_of(wide).hex()[:12],
                 "-o", "json", ok=Exit.NO).document  # fmt: skip
    asked, other = found["namespaces"]
    assert (asked["page_size"], asked["differs"], asked["restorable"]["pages"]) == (8, {}, 0)
    assert other["differs"] == {"page_size": [4, 8], "weights_dtype": ["bf16", "fp8"]}
    assert other["restorable"]["pages"] == 8
    text = call(
        "explain", "--tokens", prompt, "-s", url(node), "--namespace", namespace_of(wide).hex()[:12], ok=6
    ).out
    assert "weights_dtype is 'bf16', not 'fp8'" in text
    # The record's FLOPs are no part of an identity.
    with worker(node) as store:
        store.register_namespace(NamespaceRecord(ACME, identity().public_record() | {"flops_per_token": 7}))
        twin = replace(identity(), salt=b"s" * 16)
        register(store, twin)
        store_sequence(store, PROMPT, states=(), namespace=namespace_of(twin))
    found = call("explain", "--tokens", prompt, "-s", url(node), "-o", "json").document["namespaces"]
    assert [one["differs"] for one in found] == [{}, {}]
    assert "a salt or an older version" in call("explain", "--tokens", prompt, "-s", url(node)).out


def test_shards_and_geometries_of_one_namespace_are_shown_apart(node: StorageServer, prompt: str) -> None:
    with worker(node) as store:
        pages = store_sequence(store, PROMPT, states=(), layouts=RANKS)
        store.delete([to_key(RANKS[1], pages[3])])
    found = explained(prompt, "-s", url(node))
    layouts = {one["layout"]: one["present"] for one in found["tiers"][0]["layouts"]}
    assert layouts == {RANKS[0].hex(): [[1, 10]], RANKS[1].hex(): [[1, 3], [5, 10]]}


def to_key(layout: bytes, page: bytes) -> Any:
    return object_key(PoolName.KV, layout, page)


@pytest.mark.parametrize("kind", ["file", "lmdb"])
def test_of_a_stopped_store_only_presence_is_known(kind: str, tmp_path: Path, prompt: str) -> None:
    path = make_store(kind, tmp_path / "s")
    pages = keys_of(PROMPT)
    remove(kind, path, kv(pages[6]))
    before = written_down(path)
    found = explained(prompt, "-s", path)
    assert found["restorable"]["pages"] == 5
    assert found["removals_known_since"] is None
    assert (gap_at(found, 8)["page"], gap_at(found, 8)["reason"]) == (7, "not stored")
    text = call("explain", "--tokens", prompt, "-s", path).out
    assert "kv of page 7 is not there, and removals are not known" in text
    assert "removals are not known here" in text
    assert written_down(path) == before


def test_a_chain_says_what_each_tier_has_and_which_is_out(tmp_path: Path, prompt: str) -> None:
    with open_store("file", tmp_path / "a") as store:
        register(store)
        store_sequence(store, PROMPT[:24], states=(4,))
    with open_store("lmdb", tmp_path / "b") as store:
        register(store)
        store_sequence(store, PROMPT, states=(8,))
    both = ("-s", tmp_path / "a", "-s", tmp_path / "b")
    found = explained(prompt, *both)
    assert found["restorable"]["pages"] == 8
    there = {tier["tier"]: [one["present"] for one in tier["layouts"]] for tier in found["tiers"]}
    assert there == {"file": [[[1, 6]], [[4, 4]]], "lmdb": [[[1, 10]], [[8, 8]]]}
    with open_store("file", tmp_path / "a"):
        found = explained(prompt, *both)
        [out] = [tier for tier in found["tiers"] if tier["tier"] == "file"]
        assert (out["layouts"][0]["present"], bool(out["why"])) == ([], True)
        text = call("explain", "--tokens", prompt, *both).out
        assert "is not asked" in text
        assert "not in the tiers that answer" in text


def test_a_chain_of_a_daemon_says_from_which_tier_something_went(tmp_path: Path, prompt: str) -> None:
    chain = open_backend(
        ["memory://?capacity=24KiB&tier_name=ram", f"file://{tmp_path}/s?capacity=16MiB&tier_name=ssd"]
    )
    with StorageServer(daemon_settings("unix"), chain) as node, worker(node) as store:
        register(store)
        until(lambda: all(tier.since for tier in store.history([], []).tiers))
        for n in range(1, 11):
            store_sequence(store, PROMPT[: 4 * n], states=())
            last = [kv(keys_of(PROMPT)[n - 1])]
            until(lambda: store.history(last, []).tiers[-1].present == [True])  # noqa: B023
        for number in range(6):
            store_sequence(store, [100 + number] * 12, states=())
        store.delete([kv(keys_of(PROMPT)[9])])
        found = explained(prompt, "-s", url(node))
        assert found["restorable"]["pages"] == 9
        tiers = {tier["tier"]: tier["layouts"][0]["present"] for tier in found["tiers"]}
        assert tiers["ssd"] == [[1, 9]]
        assert tiers["ram"] != [[1, 9]]
        long = Path(prompt).with_name("long.json")
        long.write_text(json.dumps([*PROMPT, 1, 2, 3, 4]))
        gap = gap_at(explained(str(long), "-s", url(node)), 10)
        assert {one["tier"] for one in gap["removed"]} >= {"ssd"}
        assert {one["cause"] for one in gap["removed"] if one["tier"] == "ssd"} == {"deleted"}


def test_a_tenant_is_told_of_its_own_namespaces_only(tmp_path: Path, prompt: str) -> None:
    with server(tmp_path, "memory://?capacity=96KiB") as node:
        with client(node, tmp_path, "red") as red:
            register(red)
            until(lambda: red.history([], []).tiers[0].since is not None)
            store_sequence(red, PROMPT)

        def target(name: str) -> str:
            return f"grpc://{node.addresses[0]}?token_file={tmp_path}/{name}.token&timeout=60s"

        assert explained(prompt, "-s", target("red"))["restorable"]["pages"] == 8
        with client(node, tmp_path, "blue") as blue:
            register(blue)
            for number in range(8):
                store_sequence(blue, [100 + number] * 40)
        mine = explained(prompt, "-s", target("red"), ok=Exit.NO)
        assert mine["gaps"][0]["reason"] == "evicted"
        assert [tier["tier"] for tier in mine["tiers"]] == [None]
        other = call("explain", "--tokens", prompt, "-s", target("blue"), "-o", "json", ok=Exit.NO).document
        assert other["namespaces"] == []
        nobody = call("explain", "--tokens", prompt, "-s", target("plain"), "-o", "json", ok=Exit.NO).document
        assert (nobody["namespaces"], nobody["looked_at"], nobody["hidden_namespaces"]) == ([], [], 0)
        chief = call("explain", "--tokens", prompt, "-s", target("chief"), "-o", "json", ok=Exit.NO).document
        assert (chief["namespaces"], chief["hidden_namespaces"]) == ([], 2)
        assert "cannot be searched" in call("explain", "--tokens", prompt, "-s", target("chief"), ok=6).out


def test_what_cannot_be_explained(tmp_path: Path, prompt: str, node: StorageServer) -> None:
    with worker(node) as store:
        store.register_namespace(NamespaceRecord(b"w" * 32, {"model": "sizeless"}))
        done = call("explain", "--tokens", prompt, "--namespace", "sizeless", "-s", url(node), ok=2)
        assert "no page size on record" in done.error
    short = tmp_path / "short.json"
    short.write_text("[1, 2]")
    assert "no namespace has a page" in call("explain", "--tokens", short, "-s", url(node), ok=Exit.NO).out
    gone = f"grpc://{tmp_path}/nowhere"
    assert call("explain", "--tokens", prompt, "-s", gone, ok=Exit.UNREACHABLE).error


def test_escapes_and_nonsense_of_others_do_no_harm(node: StorageServer, prompt: str) -> None:
    """Pages that name each other as parents, wrong depths, and labels with controls."""
    evil = identity(model="\x1b[31m[bold]x")
    with worker(node) as store:
        register(store, evil)
        pages = keys_of(PROMPT, namespace_of(evil))
        for n, page in enumerate(pages):
            meta = {
                "namespace": namespace_of(evil),
                "parent": pages[n - 1] if n else None,
                "depth": 1 if n else 77,
            }
            store.set([to_set(kv(page), payload(page, 50), **meta)])
    done = call("explain", "--tokens", prompt, "-s", url(node), ok=None)
    assert "\x1b[31m" not in done.out
    assert done.code in (Exit.DONE, Exit.NO)


def test_pages_of_sglang_are_found_by_the_tokens_too(node: StorageServer, prompt: str) -> None:
    engine = identity(model="of-sglang")
    pages = sglang_page_keys(namespace_of(engine), as_tokens(PROMPT), 4)
    with worker(node) as store:
        register(store, engine)
        for n, page in enumerate(pages[:6]):
            meta = {"namespace": namespace_of(engine), "parent": pages[n - 1] if n else None, "depth": n + 1}
            store.set([to_set(kv(page), payload(page, 50), **meta)])
        store.delete([kv(pages[5])])
        found = explained(prompt, "-s", url(node))
        assert (found["label"], found["restorable"]["pages"]) == ("of-sglang@r1, acme", 5)
        assert gap_at(found, 6)["reason"] == "deleted"
        store.delete([kv(page) for page in pages[:5]])
    assert gap_at(explained(prompt, "-s", url(node), ok=Exit.NO), 1)["reason"] == "deleted"


def test_a_prompt_is_read_from_every_format_and_from_a_stream(tmp_path: Path) -> None:
    path = make_store("file", tmp_path / "s")
    remove("file", path, kv(keys_of(PROMPT)[5]))
    tokens = [*PROMPT, 1, 2]
    (tmp_path / "tokens.json").write_text(json.dumps(tokens))
    (tmp_path / "tokens.txt").write_text("\n".join(f"{token}," for token in tokens))
    shown = [
        call("explain", "--tokens", tmp_path / f"tokens.{end}", "-s", path, "-o", "json").document
        for end in ("json", "txt")
    ]
    assert shown[0] == shown[1]
    acme, other = shown[0]["namespaces"]
    assert (acme["namespace"], acme["pages"], acme["page_size"]) == (ACME.hex(), 10, PAGE)
    assert (acme["restorable"], acme["restorable_depths"]) == ({"pages": 5, "tokens": 20}, [[4, 5]])
    assert other["restorable_depths"] == [[1, 3]]
    assert acme["page_keys"] == [page.hex() for page in keys_of(PROMPT)]
    text = " ".join(map(str, tokens))
    lines = call(
        "explain", "--tokens", "-", "--namespace", "acme", "-s", path, "-o", "jsonl", text=text
    ).lines
    assert lines[0] == acme


def test_an_adapter_is_another_sequence_and_the_shard_that_reaches_deepest_counts(tmp_path: Path) -> None:
    extra = sequence_extra("lora@1")
    with open_store("file", tmp_path / "s") as store:
        register(store)
        store_sequence(store, PROMPT, layouts=RANKS, extra=extra)
        store_sequence(store, PROMPT[:8], layouts=RANKS[:1], states=(2,))
    remove("file", tmp_path / "s", to_key(RANKS[1], keys_of(PROMPT, extra=extra)[4]))
    (tmp_path / "t").write_text(" ".join(map(str, [*PROMPT, 1])))
    found = explained(str(tmp_path / "t"), "--extra", extra.hex(), "-s", tmp_path / "s")
    present = {one["layout"]: one["present"] for one in found["tiers"][0]["layouts"] if one["pool"] == "kv"}
    assert present == {RANKS[0].hex(): [[1, 10]], RANKS[1].hex(): [[1, 4], [6, 10]]}
    assert found["restorable_depths"] == [[4, 5], [8, 8]]
    assert explained(str(tmp_path / "t"), "-s", tmp_path / "s")["restorable"]["pages"] == 2


def test_a_text_goes_through_its_tokenizer(tmp_path: Path) -> None:
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
        verb = ("explain", *given, "--tokenizer", tmp_path / "model", "--namespace", "acme", "-s", path)
        found = call(*verb, "-o", "json").document
        assert (found["tokens"], found["namespaces"][0]["restorable"]["pages"]) == (41, 8)


def test_a_tokenizer_that_is_not_installed_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    (tmp_path / "tokenizer.json").write_text("{}")
    path = make_store("file", tmp_path / "s")
    said = call("explain", "--text", "x", "--tokenizer", tmp_path, "-s", path, ok=2).error
    assert "pip install tokenizers" in said
