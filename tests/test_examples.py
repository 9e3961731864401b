"""The programs of examples/, run as their docstrings say."""

from __future__ import annotations

import importlib.util
import os
import re
import sqlite3
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance import BackendConformance

EXAMPLES = Path(__file__).parent.parent / "examples"


def run(name: str, *arguments: object, text: str = "") -> str:
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / name), *map(str, arguments)]
    done = subprocess.run(command, input=text, capture_output=True, text=True, timeout=220, env=os.environ)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_an_engine_of_one_s_own_goes_on_in_another_process(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/engine?capacity=64MiB"
    first, second = (run("own_engine.py", store) for _ in range(2))
    assert [int(n) for n in re.findall(r"(\d+) restored", first + second)] == [0, 0, 192, 176]
    assert re.findall(r"token is .*", first) == re.findall(r"token is .*", second)


def test_its_requests_are_tasks_of_which_one_is_cancelled(tmp_path: Path) -> None:
    store = f"file://{tmp_path}/engine?capacity=64MiB"
    first, second = (run("own_engine_async.py", store) for _ in range(2))
    assert [int(n) for n in re.findall(r"(\d+) restored", first + second)] == [0, 0, 192, 176]
    assert re.findall(r"token is .*", first) == re.findall(r"token is .*", second)


@pytest.mark.slow
def test_tenants_share_with_themselves_only(tmp_path: Path) -> None:
    said = run("two_tenants.py", tmp_path / "tenants")
    assert re.findall(r"of (\w+): (\d+) of", said) == [
        ("acme", "0"), ("acme", "192"), ("globex", "0"), ("globex", "192")
    ]  # fmt: skip
    assert len(set(re.findall(r"token is .*", said))) == 1


@pytest.mark.slow
def test_a_chat_goes_on_after_a_restart(tmp_path: Path) -> None:
    (tmp_path / "chat").mkdir()
    prompts = ["hello\nwho are you?", "and what do you remember?"]
    said = [run("chat.py", tmp_path / "chat", text=prompt) for prompt in prompts]
    assert "0 tokens of conversation so far" in said[0]
    assert re.findall(r"(\d+) tokens restored( from \w+)?", said[0]) == [("0", ""), ("48", " from device")]
    assert re.findall(r"(\d+) tokens restored from (\w+)", said[1]) == [("112", "storage")]


@pytest.mark.parametrize(
    ("name", "words", "said"),
    [
        ("own_engine.py", ["--help"], "give the URL of a store"),
        pytest.param("two_tenants.py", ["--help"], "give a directory", marks=pytest.mark.slow),
        pytest.param("chat.py", [], "arguments are required: directory", marks=pytest.mark.slow),
    ],
)
def test_an_example_without_what_it_needs_says_so(name, words, said, tmp_path):
    command = [sys.executable, EXAMPLES / name, *words]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode in (1, 2)
    assert "Traceback" not in done.stderr
    assert said in done.stderr
    assert not list(tmp_path.iterdir())


def _own_store() -> Any:
    spec = importlib.util.spec_from_file_location("own_store", EXAMPLES / "own_store.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.SqliteStore


@pytest.mark.slow
class TestOwnStore(BackendConformance):
    def open_store(self, path: Path, capacity: int | None = None) -> StorageBackend:
        path.mkdir(exist_ok=True)
        return _own_store()(str(path / "kv.db"))

    def corrupt(self, store: Any, k: Any) -> None:
        self._change(store, {k: (found := self._payload(store, k))[:-1] + bytes([found[-1] ^ 1])})

    def swap(self, store: Any, a: Any, b: Any) -> None:
        self._change(store, {a: self._payload(store, b), b: self._payload(store, a)})

    def _payload(self, store: Any, k: Any) -> bytes:
        # private: the suite changes a store's bytes without its knowledge
        with sqlite3.connect(store._path) as db:
            [found] = db.execute("select payload from objects where digest = ?", (k.digest,)).fetchone()
        return found

    def _change(self, store: Any, payloads: dict[Any, bytes]) -> None:
        with sqlite3.connect(store._path) as db:  # private: see above
            for k, payload in payloads.items():
                db.execute("update objects set payload = ? where digest = ?", (payload, k.digest))
