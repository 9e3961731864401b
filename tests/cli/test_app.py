"""The command as a whole: every wrong use gets one sentence and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call

GUARD = 120


def tiercache(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tiercache.cli", *arguments], capture_output=True, text=True, timeout=GUARD
    )


def test_a_process_ends_with_the_sentence_and_the_code() -> None:
    done = tiercache("serve", "--bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tiercache: no such option: --bogus")
    assert done.stderr.count("\n") == 1


def test_a_demo_without_its_daemon_says_so() -> None:
    done = tiercache("demo", "--storage", "grpc://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.count("\n") == 1
    assert "start the daemon there" in done.stderr


def test_a_demo_over_a_chain_without_any_tier_says_so() -> None:
    done = tiercache("demo", "--storage", "lmdb:///proc/x?capacity=8MiB", "--storage", "grpc://127.0.0.1:9")
    assert (done.returncode, done.stdout) == (3, "")
    reason = done.stderr.splitlines()[-1]
    assert "--storage grpc://127.0.0.1:9 does not answer: no tier can be opened: lmdb: the store in" in reason
    assert "start the daemon there" in reason


@pytest.mark.parametrize(
    ("arguments", "module", "package"),
    [
        ("bench rpc --size 4KiB", "grpc", "grpcio"),
        ("config show", "pydantic", "pydantic"),
        ("serve", "grpc_health", "grpcio-health-checking"),
        ("prove http://127.0.0.1:1", "httpx", "httpx"),
        ("replay --list", "rich", "rich"),
    ],
)
def test_a_package_of_an_extra_that_is_missing_gets_one_sentence(
    arguments: str, module: str, package: str, tmp_path: Path
) -> None:
    code = (
        f"import sys; sys.modules[{module!r}] = None; sys.argv = ['tiercache', *{arguments.split()!r}];"
        " from tiercache.cli import main; main()"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD, cwd=tmp_path
    )
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert f" needs {package}, which is not installed: pip install 'tiercache-hybrid[" in done.stderr
    assert done.stderr.count("\n") == 1


def test_no_arguments_at_all_get_help() -> None:
    done = tiercache()
    assert done.returncode == 2
    assert "Usage" in done.stdout
    assert done.stderr == ""


def test_what_users_write_is_not_read_as_emoji(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("root:x:0\n")
    assert "root:x:0" in call("replay", tmp_path / "trace.jsonl", ok=2).err
