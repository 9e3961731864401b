"""The command as a whole: every wrong use gets one sentence and exit code 2."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest


def tiercache(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "tiercache.cli", *arguments], capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["bogus"], "no such command 'bogus'; see "),
        (["serve", "--bogus"], "no such option: --bogus"),
        (["ls", "--limit", "-1"], "invalid value for '--limit'"),
        (["ls", "-o", "xml"], "'xml' is not one of"),
        (["status", "extra"], "unexpected extra argument"),
        (["ping", "--count"], "'--count' requires an argument"),
        (["bench", "rpc", "--repeat", "x"], "invalid value for '--repeat'"),
        (["bench", "rpc", "--size", "5000"], "--size 5000 is not possible"),
        (["bench", "rpc", "--directory", "/nowhere"], "--directory /nowhere is not a directory"),
        (["demo", "--storage", "memory://"], "is no store that two processes can have open"),
    ],
)
def test_a_wrong_use_gets_one_sentence(arguments: list[str], sentence: str) -> None:
    done = tiercache(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tiercache: ")
    assert done.stderr.count("\n") == 1
    assert sentence in done.stderr


def test_a_demo_without_its_daemon_says_so() -> None:
    done = tiercache("demo", "--storage", "grpc://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert "start the daemon there" in done.stderr


def test_no_arguments_at_all_get_help() -> None:
    done = tiercache()
    assert done.returncode == 2
    assert "Usage" in done.stdout
    assert done.stderr == ""


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_scripts_are_there(shell: str) -> None:
    command = str(Path(sys.executable).parent / "tiercache")
    done = subprocess.run(
        [command], capture_output=True, text=True, timeout=60, env=os.environ | {"_TIERCACHE_COMPLETE": f"source_{shell}"}
    )
    assert "_TIERCACHE_COMPLETE" in done.stdout
    assert done.returncode == 0


def test_what_users_write_is_not_read_as_emoji(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("root:x:0\n")
    found = subprocess.run([sys.executable, "-m", "tiercache.cli", "replay", str(tmp_path / "trace.jsonl")], capture_output=True, text=True)
    assert found.returncode == 2
    assert "root:x:0" in found.stderr
