"""Wrong uses of every verb: one sentence each, exit code 2, never a traceback, and nothing is left behind."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call, make_store
from tiercache.cli.terminal import Exit


@pytest.fixture(scope="module")
def here(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The current directory, with what people have lying about; the environment names no store."""
    path = tmp_path_factory.mktemp("here")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(path)
        for name in [name for name in os.environ if name.startswith("TIERCACHE_")]:
            patch.delenv(name)
        make_store("file", path / "store")
        for name in ("empty", "directory.toml", "unreadable/format", "odd", "broken"):
            (path / name).mkdir(parents=True)
        (path / "odd/format").write_text(json.dumps({"kind": "tiercache.tape", "version": 1}))
        (path / "broken/format").write_text("{")
        (path / "binary.toml").write_bytes(b"\xff\xfe\x00")
        for name, text in {
            "file": "x",
            "tokens": "1 2",
            "words": "a b",
            "floats": "[1, 2.5]",
            "object": "{}",
        }.items():
            (path / name).write_text(text)
        yield path


MISTAKES = [
    ("bogus", "no such command 'bogus'; see "),
    ("statsu", "no such command 'statsu'. Did you mean 'status'? see "),
    ("status extra", "unexpected extra argument"),
    # The store
    ("ls -s nowhere", "--store nowhere does not exist; name the directory"),
    ("ls -s file", "--store file is not a directory; name the directory"),
    ("ls -s empty", "holds no tiercache store; name a directory that has a file named format"),
    ("ls -s odd", "holds a store of kind tape, which this tiercache does not know"),
    ("ls -s broken", "/format cannot be read"),
    ("verify -s unreadable", "format cannot be read"),
    ("ls -s grcp://host:1", "storage type 'grcp' is unknown; use one of"),
    ("ls -s file://{}/nowhere", "holds no tiercache store"),
    ("ls -s grpc://[::1", "is not an address"),
    ("ls -s memory://", "is empty in every new process"),
    ("ls -s store --mac-key empty", "must be a file"),
    ("ping -s store", "is served by no daemon"),
    ("doctor -s nowhere", "--store nowhere is not a directory"),
    ("doctor -s nope:///tmp", "storage type 'nope' is unknown"),
    ("doctor -s memory://", "--store memory:// has no directory; name the one to be checked"),
    # What is looked for in it
    ("ls -s store --namespace llama", "matches no namespace here; there are"),
    ("ls -s store --pool kvv", "--pool 'kvv' is not a pool; use one of kv, mamba"),
    ("ls -s store --older yesterday", "--older: 'yesterday' is not a duration"),
    ("ls -s store --older=-1d", "'-1d' is not a duration"),
    ("ls -s store --older 2h --newer 1h", "--newer must be the longer time"),
    ("ls -s store --sort colour", "--sort"),
    ("ls -s store -o xml", "'xml' is not one of"),
    ("ls --limit -1", "invalid value for '--limit'"),
    ("ping --count 0", "--count"),
    ("ping --count", "'--count' requires an argument"),
    ("inspect -s store", "missing argument 'KEY'"),
    ("inspect xyz -s store", "KEY 'xyz' is not hex"),
    (f"inspect {'0' * 64} -s store", "matches no stored page"),
    (f"inspect {'0' * 70} -s store", "and an object's key"),
    (f"inspect {'0' * 130} -s store", "has 130 digits"),
    # A prompt
    ("explain -s store", "needs a prompt"),
    ("explain --tokens tokens --namespace zz -s store", "matches no namespace"),
    ("explain --tokens tokens --text x -s store", "--tokens and --text are 2 prompts"),
    ("explain --tokens nowhere -s store", "cannot be read: No such file"),
    ("explain --tokens directory.toml -s store", "Is a directory"),
    ("explain --tokens words -s store", "neither a JSON list of integers"),
    ("explain --tokens floats -s store", "token ids must be integers, not 2.5"),
    ("explain --tokens object -s store", "neither a JSON list"),
    ("explain --tokens binary.toml -s store", "neither a JSON list"),
    ("explain --tokens tokens --tokenizer . -s store", "--tokens are numbers already"),
    ("explain --tokens tokens --extra 'no hex' -s store", "--extra 'no hex' is not hex"),
    ("explain --text hello -s store", "--text needs --tokenizer"),
    ("explain --text hello --tokenizer empty -s store", "has no tokenizer.json"),
    ("explain --text hello --tokenizer words -s store", "is it a tokenizer.json?"),
    ("explain --text-file binary.toml --tokenizer words -s store", "is not UTF-8 text"),
    # What is deleted
    ("flush -s store --yes", "would delete everything; give --all if you want that"),
    ("flush -s store --all", "there is no terminal to ask on; give --yes"),
    ("flush -s store --all --pool kv --yes", "--all cannot be combined with other filters"),
    ("flush -s store --namespace qwen3 --yes", "matches 2 namespaces"),
    ("flush -s store --tenant acm --yes", "its tenants: acme, other"),
    ("flush -s store --prefix zz --yes", "--prefix 'zz' is not hex"),
    (f"flush -s store --prefix {'0' * 64} --yes", "matches no stored page"),
    ("flush -s store --older old --yes", "--older: 'old' is not a duration"),
    # A daemon and its configuration
    ("serve --bogus", "no such option: --bogus"),
    ("serve -d file", "file is not one; name another path"),
    ("serve -d d,e --disk-bytes 16MiB", "sockets: "),
    ("serve -d d --disk-bytes 10XB", "--disk-bytes: '10XB' is not a size"),
    ("serve -d d --disk-bytes=-5GiB", "--disk-bytes: '-5GiB' is not a size"),
    ("serve -d d --host-bytes 10", "use 32MiB to"),
    ("serve -d d --listen 0.0.0.0:0", "insecure_bind"),
    ("serve -d d --listen nonsense", "host:port"),
    ("serve -d d --storage nothing://x", "unknown"),
    ("serve -d d --storage file://{}?capacity=64MiB", "holds no tiercache store"),
    ("serve -c nowhere.toml", "nowhere.toml"),
    ("serve -c directory.toml", "directory.toml cannot be read: Is a directory"),
    ("config check nowhere.toml", "does not exist"),
    ("config show file", "is not TOML"),
    # The lab
    ("bench dsik", "Did you mean 'disk'?"),
    ("bench rpc -d nowhere", "--directory nowhere is not a directory"),
    ("bench rpc --batch=-1", "'-1' is not a size"),
    ("bench rpc --batch 900PiB --repeat 1000", "MiB free and the run needs"),
    ("demo --storage memory://", "the store --storage memory:// ends with the process that opened it"),
    ("replay directory.toml", "has no files whose names end in .json"),
    ("replay binary.toml", "not JSON"),
]


@pytest.mark.parametrize(("arguments", "sentence"), MISTAKES)
def test_a_mistake_is_one_sentence_and_exit_code_2(here: Path, arguments: str, sentence: str) -> None:
    before = sorted(here.rglob("*"))
    done = call(*shlex.split(arguments.replace("{}", str(here))), ok=Exit.MISUSED)
    assert done.out == ""
    assert done.err.startswith("tiercache: ")
    assert done.err.count("\n") == 1
    assert sentence in done.error
    assert sorted(here.rglob("*")) == before
