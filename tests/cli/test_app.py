"""The command as a whole: every wrong use gets one sentence and exit code 2."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.serving import COMMAND, GUARD
from tests.cli.store.test_samples import call


def tiercache(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=GUARD)


def test_a_process_ends_with_the_sentence_and_the_code() -> None:
    done = tiercache("serve", "--bogus")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("tiercache: no such option: --bogus")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ([], "--storage grpc://127.0.0.1:9 does not answer"),
        (
            ["--storage", "lmdb:///proc/x?capacity=8MiB"],
            "--storage grpc://127.0.0.1:9 does not answer: no tier can be opened: lmdb: the store in",
        ),
    ],
)
def test_a_demo_without_its_daemon_or_any_tier_says_so(more: list[str], reason: str) -> None:
    done = call("demo", *more, "--storage", "grpc://127.0.0.1:9", ok=3)
    said = done.err.splitlines()[-1]
    assert done.out == ""
    assert reason in said
    assert "start the daemon there" in said


@pytest.mark.parametrize(
    ("arguments", "module", "package"),
    [
        ("config show", "pydantic", "pydantic"),
        ("serve", "grpc_health", "grpcio-health-checking"),
        ("prove http://127.0.0.1:1", "httpx", "httpx"),
    ],
)
def test_a_package_of_an_extra_that_is_missing_gets_one_sentence(arguments, module, package, tmp_path):
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
    done = call(ok=2)
    assert "Usage" in done.out
    assert done.err == ""


def test_what_users_write_is_not_read_as_emoji(tmp_path: Path) -> None:
    (tmp_path / "trace.jsonl").write_text("root:x:0\n")
    assert "root:x:0" in call("replay", tmp_path / "trace.jsonl", ok=2).err
