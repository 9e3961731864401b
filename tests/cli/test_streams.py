"""The command among others: readers that go away, closed or full streams, killed parents; its imports."""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from tests.cli.serving import COMMAND, GUARD
from tests.cli.store.test_samples import call
from tests.examples import slow_after
from tests.waiting import until
from tiercache.cli.terminal import MEANINGS, Exit, exit_sentence
from tiercache.cli.verbs import VERBS, other_verbs, verb_of
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import key, payload, to_set

HEAVY = (
    "numpy", "grpc", "google", "lmdb", "torch", "transformers", "pydantic", "blake3", "xxhash", "msgpack",
    "rich", "pygments", "asyncio",
)  # fmt: skip
MODULES = 250
"""Modules that `tiercache --help` may import, those of Python among them; it takes about 160."""
LONG = ["config", "schema", "-o", "jsonl"]
EVERY = VERBS | {name: verb_of(entry) for name, entry in other_verbs().items()}
"""Verbs by name, with those of the lab."""


def imported_by(*arguments: str) -> set[str]:
    code = (
        f"import sys; sys.argv = ['tiercache', *{arguments!r}]\nfrom tiercache.cli.app import main\n"
        "try:\n    main()\nfinally:\n    print(*sys.modules, file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=GUARD)
    return set(done.stderr.splitlines()[-1].split())


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], []])
def test_the_command_itself_imports_no_verb_and_nothing_heavy(arguments: list[str]) -> None:
    found = imported_by(*arguments)
    assert not found & set(HEAVY)
    assert len(found) < MODULES
    assert not {
        name
        for name in found
        if name.startswith("tiercache.cli.") and name.split(".")[2] in {*VERBS, "store"}
    }


def test_the_configuration_is_described_without_a_store() -> None:
    assert not imported_by("config", "--help") & {"numpy", "grpc", "lmdb", "torch"}


@pytest.mark.parametrize("name", EVERY)
def test_each_verb_is_listed_as_it_presents_itself_and_says_its_exit_codes(name: str) -> None:
    said = " ".join(call(name, "--help").out.split())
    module, _, attribute = EVERY[name].where.partition(":")
    found = getattr(importlib.import_module(module), attribute)
    if callable(getattr(found, "registered_callback", found)):
        assert EVERY[name].summary == " ".join((found.__doc__ or "").split("\n\n")[0].split())
        assert f"tiercache {name}" in said, "an example"
        assert "JSON" in said
        assert "--output" in said
    assert exit_sentence() in said
    assert EVERY[name].summary.split(".")[0] in said
    assert f"{name} " in call("--help").out


def test_help_prints_the_table_of_exit_codes() -> None:
    said = " ".join(call("--help").out.split())
    for code, meaning in MEANINGS.items():
        assert f"{code:d} {meaning}" in said


def test_completion_knows_verbs_and_their_options() -> None:
    def completed(words: str) -> list[str]:
        variables = {
            "_TIERCACHE_COMPLETE": "complete_bash",
            "COMP_WORDS": words,
            "COMP_CWORD": str(len(words.split(" ")) - 1),
        }
        command = str(Path(sys.executable).parent / "tiercache")
        return subprocess.run(
            [command], capture_output=True, text=True, timeout=GUARD, env=os.environ | variables
        ).stdout.split()

    assert completed("tiercache config s") == ["show", "schema"]
    assert completed("tiercache ls -o js") == ["json", "jsonl"]


@pytest.mark.parametrize(
    "arguments",
    slow_after(2, [LONG, ["--help"], ["config", "schema"], ["replay", "--list"], ["doctor", "-o", "json"]]),
)
def test_a_reader_that_goes_away_ends_it_quietly(arguments: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)  # so that there is no reader from the first byte on
    try:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=write, stderr=subprocess.PIPE, text=True, timeout=GUARD
        )
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (Exit.UNREAD, "")


def test_a_reader_that_leaves_in_the_middle_of_a_document_is_noticed(tmp_path: Path) -> None:
    """Also with PYTHONUNBUFFERED, with which Python drops the rest of a write that is cut short."""
    with open_backend(f"file://{tmp_path}/s?capacity=64MiB") as store:
        store.set([to_set(key(n), payload(n, 64)) for n in range(1000)])  # 400 KB, a pipe holds 64 KB
    command = [*COMMAND, "ls", "-s", str(tmp_path / "s"), "-o", "json"]
    for more in ({}, {"PYTHONUNBUFFERED": "1"}):
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=os.environ | more
        ) as run:
            assert run.stdout is not None
            assert run.stderr is not None
            assert run.stdout.read(1) == b"["
            run.stdout.close()
            assert (run.wait(GUARD), run.stderr.read()) == (Exit.UNREAD, b"")


@pytest.mark.parametrize("arguments", slow_after(2, [LONG, ["--version"], ["config", "schema"]]))
def test_output_that_cannot_be_written_is_a_failure(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=GUARD
        )
    assert (done.returncode, done.stderr) == (Exit.FAILED, "tiercache: No space left on device\n")


def test_closed_streams_are_no_accident() -> None:
    for closed in (1, 2):
        command = f'exec {closed}>&-; exec "$@"'
        done = subprocess.run(
            ["sh", "-c", command, "sh", *COMMAND, *LONG], capture_output=True, text=True, timeout=GUARD
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_characters_that_the_terminal_does_not_know_are_escaped() -> None:
    variables = {"PYTHONIOENCODING": "ascii", "COLUMNS": "200"}
    done = subprocess.run(
        [*COMMAND, "ls", "-s", "/nowhere/é"], capture_output=True, timeout=GUARD, env=os.environ | variables
    )
    assert done.returncode == Exit.MISUSED
    assert b"/nowhere/\\xe9" in done.stderr


def children_of(pid: int) -> set[int]:
    """All processes below one; a thread or process that ends meanwhile has none."""
    direct: set[int] = set()
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                direct.update(map(int, (task / "children").read_text().split()))
    return direct.union(*map(children_of, direct))


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("arguments", "count"),
    slow_after(
        1, [(["bench", "rpc", "--size", "64KiB", "--batch", "8MiB", "--repeat", "500"], 2), (["demo"], 1)]
    ),
)
def test_what_was_started_ends_with_who_is_killed(tmp_path: Path, arguments: list[str], count: int) -> None:
    with subprocess.Popen(
        [*COMMAND, *arguments, "-d", str(tmp_path)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    ) as run:
        try:
            until(lambda: len(children_of(run.pid)) >= count or run.poll() is not None)
            children = children_of(run.pid)
            assert len(children) >= count
            time.sleep(0.5)  # let them begin with what they are for
        finally:
            run.send_signal(signal.SIGKILL)
    until(lambda: not any(map(is_running, children)))
