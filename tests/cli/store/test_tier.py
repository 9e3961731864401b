"""`tiercache tier` against a daemon of this process, and where no daemon serves."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.daemon.test_tiers import ALONE, fill, has_all, names, url
from tiercache.config.loading import load
from tiercache.daemon import StorageServer
from tiercache.storage.registry import open_backend


@pytest.fixture
def served(tmp_path: Path):
    """A daemon over the tiers a and b, and the directory of both."""
    storage = [url(tmp_path, "a"), url(tmp_path, "b", more=ALONE)]
    settings = load(None, {"directory": str(tmp_path), "storage": storage, "host_bytes": "32MiB"})
    with StorageServer(settings) as node:
        yield node, tmp_path


def test_every_command(served):
    node, path = served
    store = node.store
    fill(store, 10)

    def tier(*words: str) -> list[str]:
        found = call("tier", *words, "-s", path, "-o", "json").document
        assert found["storage"] == [row["url"] for row in found["tiers"]]
        return [row["name"] for row in found["tiers"]]

    assert tier("list") == ["a", "b"]
    assert tier("add", url(path, "c", more=ALONE), "--at", "0") == ["c", "a", "b"]
    assert tier("order", "a", "b", "c") == ["a", "b", "c"]
    assert tier("set", "c", "capacity=128MiB", "tier_promote=always") == ["a", "b", "c"]
    assert store.usage().tiers[2].capacity_bytes == 128 << 20
    assert store.tiers[2].settings.promote == "always"
    assert tier("replace", "c", url(path, "d"), "--drop") == ["a", "b", "d"]
    assert tier("remove", "d", "--drop") == ["a", "b"]
    assert tier("remove", "a") == ["b"]
    assert has_all(store, 10)
    assert [
        json.loads(row)["name"] for row in call("tier", "list", "-s", path, "-o", "jsonl").out.splitlines()
    ] == ["b"]


def test_the_table_shows_what_makes_a_change_last(served, tmp_path):
    node, path = served
    said = call("tier", "set", "a", "promote=never", "-s", f"grpc://{path}/run").out
    assert "This lasts until the daemon ends. To make it last, set in its configuration:" in said
    storage = tomllib.loads(said[said.index("storage = [") :])["storage"]
    assert storage == [tier.url for tier in node.store.usage().tiers]
    node.stop()
    with open_backend(storage) as again:
        assert names(again) == ["a", "b"]
        assert again.tiers[0].settings.promote == "never"
    assert "This lasts" not in call("config", "--help").out


@pytest.mark.parametrize(
    ("words", "code", "sentence"),
    [
        (["remove", "x"], 2, "no tier is named 'x'; the chain has a, b"),
        (["add", "nothing://x"], 2, "'nothing' is unknown"),
        (["add", "/data"], 2, "is not a URL"),
        (["set", "a", "capacity"], 2, "'capacity' is no setting; write KEY=VALUE, such as capacity=2TiB"),
        (["set", "a", "promote=never", "promote=always"], 2, "'promote' is given twice; keep one"),
        (["set", "a", "speed=9"], 2, "has no setting 'speed'"),
        (["order", "a"], 2, "name each once: a, b"),
        (["cancel"], 5, "no change is under way"),
        (
            ["remove", "b"],
            5,
            "would be lost: the others have room for 0 B; make room, or give the objects up with --drop",
        ),
    ],
)
def test_errors(served, words, code, sentence):
    node, path = served
    node.store.change_tier("a", read_only="yes")
    fill(node.store, 1)
    said = call("tier", *words, "-s", path, ok=code).error
    assert sentence in said
    assert len(said.strip().splitlines()) == 1
    assert names(node.store) == ["a", "b"]


def test_a_store_that_no_daemon_serves(tmp_path):
    open_backend(f"file://{tmp_path}/a?capacity=16MiB").close()
    for words in (["list"], ["remove", "a"], ["add", "memory://"]):
        said = call("tier", *words, "-s", tmp_path / "a", ok=2).error
        assert (
            "is served by no daemon, and the tiers of a stopped store are those of the setting storage"
            in said
        )


def test_a_daemon_of_one_store(tmp_path):
    settings = load(None, {"directory": str(tmp_path), "disk_bytes": "16MiB", "host_bytes": "32MiB"})
    with StorageServer(settings):
        sentence = "serves one store without tiers; start it with chain = true (tiercache serve --chain)"
        assert sentence in call("tier", "add", url(tmp_path, "b"), "-s", tmp_path, ok=2).error
        assert sentence in call("tier", "list", "-s", tmp_path).out
        found = call("tier", "list", "-s", tmp_path, "-o", "json").document
        assert found == {"tiers": [], "storage": []}


def test_verify_says_how_many_copies_it_has_not_read(tmp_path):
    storage = [url(tmp_path, "a"), url(tmp_path, "b")]
    settings = load(None, {"directory": str(tmp_path), "storage": storage, "host_bytes": "32MiB"})
    with StorageServer(settings) as node:
        fill(node.store, 10)
        node.store.flush()
        copies = sum(tier.objects for tier in node.store.usage().tiers)
        done = call("verify", "-s", tmp_path, "-o", "json")
        assert done.document["summary"]["objects"] == 10
        assert done.document["summary"]["unread_copies"] == copies - 10 > 0
        assert f"{copies - 10} other copies are not checked" in done.error
        node.store.remove_tier("a")
        assert call("verify", "-s", tmp_path, "-o", "json").document["summary"]["unread_copies"] == 0
