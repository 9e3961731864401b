"""Mistakes of people who are new here: one sentence each, the exit code of the table, and never a
traceback.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call, make_store
from tiercache.cli.terminal import Exit


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current directory, with what people have lying about."""
    monkeypatch.chdir(tmp_path)
    for name in [name for name in os.environ if name.startswith("TIERCACHE_")]:
        monkeypatch.delenv(name)
    (tmp_path / "file").write_text("x")
    (tmp_path / "empty").mkdir()
    (tmp_path / "directory.toml").mkdir()
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "huge.toml").write_bytes(b"#" * (2 << 20))
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    (tmp_path / "large.toml").write_text("drain = " + "9" * 6000)
    make_store("file", tmp_path / "store")
    (tmp_path / "unreadable").mkdir()
    (tmp_path / "unreadable/format").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("statsu", "no such command 'statsu'. Did you mean 'status'? see "),
        ("bench dsik", "Did you mean 'disk'?"),
        ("ls -s nowhere", "--store nowhere does not exist"),
        ("ls -s file", "--store file is not a directory"),
        ("ls -s empty", "holds no tiercache store"),
        ("verify -s unreadable", "format cannot be read"),
        ("ls -s file:///tmp/a#b?capacity=1GiB", "write %23"),
        ("ls -s file://store", "names a host; write three slashes"),
        ("ls -s nope:///x", "storage type 'nope' is unknown"),
        ("ls -s store --min-size=-1", "'-1' is not a size"),
        ("ls -s store --older=-1d", "'-1d' is not a duration"),
        ("ls -s store --mac-key nowhere", "cannot be read"),
        ("ls -s store --mac-key empty", "must be a file"),
        ("ping -s store", "is served by no daemon"),
        ("ping -s empty", "holds no tiercache store"),
        ("doctor -s nowhere", "--store nowhere is not a directory"),
        ("doctor -s file", "--store file is not a directory"),
        ("doctor -s nope:///tmp", "storage type 'nope' is unknown"),
        ("doctor -s memory://", "--store memory:// has no directory; name the directory to be checked"),
        ("doctor -s lmdb://?capacity=1GiB", "has no directory"),
        ("bench disk -d file", "--directory file is not a directory"),
        ("bench rpc -d nowhere", "--directory nowhere is not a directory"),
        ("bench rpc --batch=-1", "'-1' is not a size"),
        ("bench rpc --batch 900PiB --repeat 1000", "MiB free and the run needs"),
        ("serve -d file", "file is not one; name another path"),
        ("serve -d file/x", "file is not one; name another path"),
        ("serve -d d,e --disk-bytes 16MiB", "sockets: "),
        ("serve -d d --disk-bytes 10XB", "--disk-bytes: '10XB' is not a size"),
        ("serve -d d --disk-bytes=-5GiB", "--disk-bytes: '-5GiB' is not a size"),
        ("serve -d d --host-bytes 10", "use 32MiB to"),
        ("serve -c directory.toml", "directory.toml cannot be read: Is a directory"),
        ("serve -c binary.toml", "it is not UTF-8"),
        ("serve -c huge.toml", "is larger than 1MiB"),
        ("config check nowhere.toml", "does not exist"),
        ("config check directory.toml", "Is a directory"),
        ("config check deep.toml", "deep.toml"),
        ("config check large.toml", "large.toml"),
        ("config show file", "is not TOML"),
        ("replay nowhere.jsonl", "is neither a file nor a generator"),
        ("replay directory.toml", "has no files whose names end in .json"),
        ("replay binary.toml", "not JSON"),
        ("replay agent --limit 0", "at least 1"),
        ("replay agent --host-bytes=-1", "--host-bytes: '-1' is not a size"),
        ("replay agent --capacity 2", "use a fraction"),
        ("explain --tokens directory.toml -s store", "Is a directory"),
        ("prove nowhere", "is not the URL of an engine"),
    ],
)
def test_a_mistake_is_one_sentence_and_exit_code_2(here: Path, arguments: str, sentence: str) -> None:
    before = sorted(os.listdir(here))
    done = call(*arguments.split(), ok=Exit.MISUSED)
    assert done.out == ""
    assert done.err.startswith("tiercache: ")
    assert done.err.count("\n") == 1
    assert sentence in done.error
    assert sorted(os.listdir(here)) == before


def test_sizes_may_have_blanks(here: Path) -> None:
    assert call("ls", "-s", "store", "--min-size", " 10 GB ", "-o", "jsonl").lines == []
