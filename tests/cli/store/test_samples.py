"""Stores for the tests of the operator's verbs, a way to call them as `main` does, and what they leave."""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

import pytest

from tests.examples import slow_after
from tests.storage.backends import locate
from tiercache.cli.app import main
from tiercache.core import ObjectKey, Outcome, PoolName, as_tokens
from tiercache.errors import ConfigError
from tiercache.keys import Identity, Shard, layout_digest, namespace_of, object_key, page_keys
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord, StorageBackend
from tiercache.testing.objects import payload, to_get, to_set

KINDS = ("file", "lmdb")
PAGE = 4
PROMPT = list(range(40))
FORK = [*range(20), *[7] * 24]
STATES = (4, 5, 8)
KV = layout_digest(PoolName.KV, b"g" * 32, Shard())
MAMBA = layout_digest(PoolName.MAMBA, b"m" * 32, Shard())
RANKS = [layout_digest(PoolName.KV, b"g" * 32, Shard(rank, 2)) for rank in range(2)]


def identity(tenant: str = "acme", model: str = "qwen3-next") -> Identity:
    return Identity(model, "r1", "bf16", "bf16", "bf16", PAGE, tenant=tenant)


ACME = namespace_of(identity())


@dataclass
class Done:
    code: int
    out: str
    err: str
    error: str = field(init=False)

    def __post_init__(self) -> None:
        assert "Traceback" not in self.err, self.err
        self.error = " ".join(self.err.split())

    @property
    def lines(self):
        return [json.loads(line) for line in self.out.splitlines()]

    @property
    def document(self):
        return json.loads(self.out)


def call(*arguments: object, ok: int | None = 0, text: str = "", terminal: bool = False) -> Done:
    """Run the command in this process, with a text as its standard input, which may pass for a terminal."""
    out, err, given = io.StringIO(), io.StringIO(), io.TextIOWrapper(io.BytesIO(text.encode()))
    terminated = signal.getsignal(signal.SIGTERM)
    code = 0
    try:
        with (
            redirect_stdout(out),
            redirect_stderr(err),
            patch.object(sys, "argv", ["tiercache", *map(str, arguments)]),
            patch.object(given, "isatty", lambda: terminal),
            patch.object(sys, "stdin", given),
        ):
            main()
    except SystemExit as left:
        code = int(left.code or 0)
    finally:
        signal.signal(signal.SIGTERM, terminated)
    done = Done(code, out.getvalue(), err.getvalue())
    assert ok is None or code == ok, (code, done.out, done.err)
    return done


def keys_of(tokens, namespace: bytes = ACME, extra: bytes = b"") -> list[bytes]:
    return page_keys(namespace, as_tokens(tokens), PAGE, extra=extra)


def store_sequence(
    store: StorageBackend, tokens, states=STATES, namespace=ACME, layouts=(KV,), extra=b"", size=1500
) -> list[bytes]:
    """The pages of a sequence, and states at some depths."""
    pages = keys_of(tokens, namespace, extra)
    items = []
    for n, page in enumerate(pages):
        where = {"namespace": namespace, "depth": n + 1}
        for layout in layouts:
            key = object_key(PoolName.KV, layout, page)
            items.append(
                to_set(key, payload((layout, page), size), parent=pages[n - 1] if n else None, **where)
            )
        if n + 1 in states:
            items.append(
                to_set(object_key(PoolName.MAMBA, MAMBA, page), payload(page, 9000), parent=page, **where)
            )
    assert set(store.set(items)) <= {Outcome.STORED, Outcome.HIT}
    return pages


def open_store(kind: str, path: Path, **settings: object) -> StorageBackend:
    return open_backend({"type": kind, "path": str(path), "capacity": "16MiB", **settings})


def make_store(kind: str, path: Path, **settings: object) -> Path:
    """Two sequences of one namespace that part after page 5, and one of another tenant."""
    with open_store(kind, path, **settings) as store:
        for tenant in ("acme", "other"):
            store.register_namespace(
                NamespaceRecord(namespace_of(identity(tenant)), identity(tenant).public_record())
            )
        store_sequence(store, PROMPT)
        store_sequence(store, FORK)
        store_sequence(store, PROMPT[:12], states=(), namespace=namespace_of(identity("other")))
    return path


def content_of(kind: str, path: Path) -> dict[bytes, tuple[object, bytes]]:
    """Every object, with its meta and its bytes."""
    found = {}
    with open_store(kind, path) as store:
        for entry in list(store.scan_all()):
            item = to_get(entry.key, entry.meta.length)
            assert store.get([item]) == [Outcome.HIT]
            found[entry.key.digest] = (
                entry,
                b"".join(bytes(view) for view in item.buffers)[: entry.meta.length],
            )
    return found


def spoil(path: Path, key: ObjectKey) -> None:
    """Overwrite an object of a `file` store behind its back."""
    with open_store("file", path) as store:
        [(name, offset, _), *_] = locate(store, key)
    with open(name, "r+b") as file:
        file.seek(offset)
        file.write(b"\x5a" * 64)


def kv(page: bytes) -> ObjectKey:
    return object_key(PoolName.KV, KV, page)


def state(page: bytes) -> ObjectKey:
    return object_key(PoolName.MAMBA, MAMBA, page)


def remove(kind: str, path: Path, *keys: ObjectKey) -> None:
    with open_store(kind, path) as store:
        assert all(store.delete(list(keys)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_look_neither_grows_nor_shrinks_nor_evicts(kind, tmp_path):
    path = tmp_path / "s"
    with open_store(kind, path, capacity="16MiB") as store:
        store_sequence(store, range(4 * 90), states=(), size=100_000)
        held = store.usage()
    looked = call("status", "-s", path, "-o", "json").document
    assert (looked["objects"], looked["capacity_bytes"]) == (held.objects, 16 << 20)
    # A URL from somebody's configuration does not resize it either.
    looked = call("status", "-s", f"{kind}://{path}?capacity=8MiB", "-o", "json").document
    assert (looked["objects"], looked["capacity_bytes"]) == (held.objects, 16 << 20)
    with open_store(kind, path) as store:
        assert store.usage().objects == held.objects


def test_a_file_store_of_which_no_capacity_is_known_keeps_everything(tmp_path):
    path = tmp_path / "s"
    with open_store("file", path) as store:
        store_sequence(store, range(4 * 90), states=(), size=100_000)
    found = json.loads((path / "state").read_text())
    del found["capacity"]
    (path / "state").write_text(json.dumps(found))
    looked = call("status", "-s", path, "-o", "json").document
    assert looked["objects"] == 90
    assert 9_000_000 < looked["used_bytes"] <= looked["capacity_bytes"] <= 17 << 20
    call("verify", "-s", path)


def written_down(path):
    """Everything about a directory: names, sizes, contents, times and modes."""
    found = {}
    for where in [path, *sorted(path.rglob("*"))]:
        about = where.lstat()
        content = where.read_bytes() if where.is_file() else b""
        found[str(where)] = (about.st_size, about.st_mtime_ns, about.st_ctime_ns, about.st_mode, content)
    return found


def _overwrite(path, size=20_000):
    with open(path, "r+b") as file:
        file.write(b"\xff" * size)


DAMAGES = {
    "none": lambda path, data: None,
    "suspect": lambda path, data: (path / "state").write_text('{"suspect": true}'),
    "head": lambda path, data: _overwrite(data, 4096),
    "no slab": lambda path, data: shutil.rmtree(path / "slabs", ignore_errors=True),
    "half": lambda path, data: os.truncate(data, data.stat().st_size // 2 // 4096 * 4096),
    "garbage": lambda path, data: _overwrite(data),
    "killed": lambda path, data: (path / "state").write_text("{}"),
    "no data": lambda path, data: data.unlink(),
}


@pytest.mark.parametrize("damage", slow_after(4, DAMAGES))
@pytest.mark.parametrize("kind", KINDS)
def test_no_reading_verb_writes_a_byte_whatever_it_finds(kind, tmp_path, damage):
    path = make_store(kind, tmp_path / "s")
    prompt = tmp_path / "prompt"
    prompt.write_text(json.dumps(PROMPT))
    page = keys_of(PROMPT)[3].hex()
    DAMAGES[damage](path, path / {"file": "catalog/000001.log", "lmdb": "database/data.mdb"}[kind])
    for mode in (0o500, 0o700):
        path.chmod(mode)
        before = written_down(path)
        for verb in (
            ["status"], ["ls"], ["ls", "--namespaces"], ["inspect", page],
            ["explain", "--tokens", prompt],
            ["verify"], ["flush", "--all", "--dry-run"], ["doctor"],
        ):  # fmt: skip
            call(*verb, "-s", path, ok=None)
        assert written_down(path) == before, damage


def test_an_opener_that_is_refused_does_not_change_what_is_remembered(tmp_path):
    path = make_store("file", tmp_path / "s")
    with pytest.raises(ConfigError):
        open_store("file", path, capacity="1MiB")
    assert call("status", "-s", path, "-o", "json").document["capacity_bytes"] == 16 << 20
    with open_store("file", path, capacity="32MiB"):
        pass
    assert call("status", "-s", path, "-o", "json").document["capacity_bytes"] == 32 << 20
