"""Every verb with its defaults and in each format, in a directory whose name is hard on URLs and shells."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli.serving import COMMAND, GUARD, serving
from tests.cli.store.test_samples import ACME, call, identity, make_store, store_sequence
from tests.cli.test_streams import EVERY
from tests.examples import slow_after
from tiercache.cli.terminal import Exit
from tiercache.config.urls import storage_url
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord

NAME = "é #1 50%?"
FORMATS = ("table", "json", "jsonl")
LOOKS = (
    ["status"], ["ls"], ["ls", "--namespaces"], ["verify"], ["flush", "--all", "--dry-run"],
    ["inspect", "KEY"], ["explain", "--tokens", "prompt.json"],
)  # fmt: skip
"""Arguments of commands that work on a stopped store and on a daemon alike."""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with a `file` and an `lmdb` store, a configuration and a prompt."""
    where = tmp_path / NAME
    where.mkdir()
    monkeypatch.chdir(where)
    for name in [name for name in os.environ if name.startswith("TIERCACHE_")]:
        monkeypatch.delenv(name)
    for kind in ("file", "lmdb"):
        make_store(kind, where / f"{kind} store")
    Path("prompt.json").write_text(json.dumps(list(range(40))))
    Path("node.toml").write_text(f'directory = "{where}/node"\ndisk_bytes = "16MiB"\n')
    return where


def read(out: str, output: str) -> list[Any]:
    """Parse output in the requested format: one JSON document, or one a line; a table must not be empty."""
    if output == "table":
        assert out.strip()
        return []
    if output == "json":
        return [json.loads(out)]
    return [json.loads(row) for row in out.splitlines()]


def looks_at(store: str) -> Iterator[list[str]]:
    """The verbs, with a key that the store has."""
    page = json.loads(call("ls", "-s", store, "-o", "json").out)[0]
    for verb in LOOKS:
        yield [page["page_key"] if word == "KEY" else word for word in verb]


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("output", FORMATS)
def test_a_stopped_store(here: Path, kind: str, output: str) -> None:
    name = f"{kind} store"
    for store in (name, storage_url(kind, name)):
        for verb in looks_at(store):
            found = call(*verb, "-s", store, "-o", output).out
            assert all(isinstance(row, dict | list) for row in read(found, output))
            assert read(found, output) or output == "table"
    read(call("flush", "--all", "--yes", "-s", name, "-o", output).out, output)
    assert json.loads(call("ls", "-s", name, "-o", "json").out) == []
    assert sorted(os.listdir(here)) == ["file store", "lmdb store", "node.toml", "prompt.json"]


@pytest.mark.slow
def test_a_daemon(here: Path) -> None:
    addresses = ("--listen", "127.0.0.1:0", "--http", "127.0.0.1:0")
    with serving("-d", "node", "--disk-bytes", "16MiB", *addresses) as (process, said):
        assert (said["unix"], said["store"]) == (
            f"{here}/node/run",
            storage_url("file", "node/store", capacity=16 << 20),
        )
        assert (here / "node/store/format").is_file()
        with open_backend(storage_url("grpc", "node/run")) as store:
            store.register_namespace(NamespaceRecord(ACME, identity().public_record()))
            store_sequence(store, list(range(40)))
        for target in ("node", storage_url("grpc", "node/run"), storage_url("grpc", address=said["tcp"])):
            for output in FORMATS if target == "node" else ("json",):
                for verb in (*looks_at(target), ["ping"], ["report"]):
                    read(call(*verb, "-s", target, "-o", output).out, output)
        assert f"grpc://{said['tcp']}" in call("status", "-s", storage_url("grpc", address=said["tcp"])).out
        process.terminate()
        assert process.wait(GUARD) == 0
    assert json.loads(call("ls", "-s", "node", "-o", "json").out)


@pytest.mark.parametrize("output", slow_after(2, FORMATS))
def test_no_store(here: Path, output: str) -> None:
    assert call("doctor", "-o", output, ok=None).code in (Exit.DONE, Exit.NO)
    for verb in (
        ["replay", "--list"],
        ["config", "check", "node.toml"],
        ["config", "show", "node.toml"],
        ["config", "schema"],
    ):
        read(call(*verb, "-o", output).out, output)
    read(
        call("replay", "agent?sessions=3&live=2", "--limit", "12", "--policy", "lru", "-o", output).out,
        output,
    )
    assert sorted(os.listdir(here)) == ["file store", "lmdb store", "node.toml", "prompt.json"]


@pytest.mark.parametrize(
    ("bench", "output"),
    [
        ("disk", "table"),
        ("rpc", "jsonl"),
        *(
            pytest.param(*pair, marks=pytest.mark.slow)
            for pair in [("disk", "json"), ("rpc", "json"), ("disk", "jsonl"), ("rpc", "table")]
        ),
    ],
)
def test_benches(here: Path, bench: str, output: str) -> None:
    small = {"disk": ["--bytes", "1MiB", "--case", "get-warm,exists"], "rpc": ["--batch", "1MiB"]}[bench]
    words = ("bench", bench, "--size", "64KiB", "--repeat", "1", *small, "-o", output)
    rows = read(call(*words).out, output)
    assert all("name" in row for row in (rows[0] if output == "json" else rows))
    assert sorted(os.listdir(here)) == ["file store", "lmdb store", "node.toml", "prompt.json"]


@pytest.mark.stress
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("verb", [["demo"], ["replay", "agent"], ["bench", "disk"], ["bench", "rpc"]])
def test_all_defaults(here: Path, verb: list[str]) -> None:
    done = subprocess.run([*COMMAND, *verb], capture_output=True, text=True, timeout=2900)
    assert done.returncode == 0, (done.stdout, done.stderr)
    assert sorted(os.listdir(here)) == ["file store", "lmdb store", "node.toml", "prompt.json"]


def test_no_verb_is_forgotten() -> None:
    """All but "events" and "serve", which need daemons of their own, and "prove": see their tests."""
    source = Path(__file__).read_text()
    assert [name for name in EVERY if f'"{name}"' not in source] == []
