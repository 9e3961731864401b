"""The verb `status` against a daemon, once and live, and the same document over HTTP."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call
from tests.daemon.hosts import until
from tests.daemon.test_page import HOSTILE, daemon, usage
from tests.daemon.web import ask
from tiercache.cli.store.status import silence_text, spark
from tiercache.daemon import StorageServer
from tiercache.errors import RefusedError, UnavailableError
from tiercache.storage.base import Usage

MARKUP = "[/bold][red]\x1b[31mred"


def told() -> Usage:
    found = usage(s3="out")
    return replace(found, tiers=[*found.tiers[:2], replace(found.tiers[2], why=MARKUP)])


@pytest.fixture
def node(tmp_path: Path) -> Iterator[StorageServer]:
    with daemon(tmp_path, told, unix=True) as made:
        yield made


def test_one_look(node: StorageServer, tmp_path: Path) -> None:
    text = call("status", "-s", tmp_path).out
    for said in ("degraded", "75.0%", "4.8 TiB of 18.1 TiB", "4.4 TiB (96%)", "62.1 GiB of 64.0 GiB", "▇",
                 "checksum", "sglang-0", "globex", "1,210", "740.0 MiB",
                 "serves a store", HOSTILE[:8], r"[/bold][red]\x1b[31mred"):  # fmt: skip
        assert said in text.replace("█", "▇"), said
    assert "\x1b" not in text
    watched = call("status", "--watch", "-s", tmp_path).out
    assert watched.count("hit rate") == text.count("hit rate"), "no terminal, no end"


def test_all_views_have_one_document(node: StorageServer, tmp_path: Path) -> None:
    # The first sample adds an entry to the journal.
    until(lambda: len(json.loads(ask(node.http_address, "/status.json").text)["journal"]) > 1)
    status = call("status", "-s", tmp_path, "-o", "json").document["status"]
    page = json.loads(ask(node.http_address, "/status.json").text)
    assert {*status} == {*page}
    for name in ("instance", "journal", "whole"):
        assert status[name] == page[name]
    for name in ("store", "tiers"):
        ages = ("age", "last_read")
        assert _without(status[name], ages) == _without(page[name], ages), name
    table = call("status", "-s", tmp_path).out
    assert "75.0%, 48,000 of 64,000 prompt tokens restored" in table
    assert "900.0 s" in table
    assert "degraded" in table


def _without(value: object, names: tuple[str, ...]) -> object:
    if isinstance(value, list):
        return [_without(one, names) for one in value]
    assert isinstance(value, dict)
    return {name: one for name, one in value.items() if name not in names}


def test_a_store_that_no_daemon_serves_has_nothing_to_watch(tmp_path: Path) -> None:
    assert call("status", "-s", _stopped(tmp_path), "-o", "json").document["status"] is None
    assert "tiercache serve" in call("status", "--watch", "-s", _stopped(tmp_path), ok=2).error
    assert "never ends" in call("status", "--watch", "-o", "json", "-s", "grpc://127.0.0.1:1", ok=2).error
    assert call("status", "--watch", "-s", "grpc://127.0.0.1:1", ok=3).error.count("tiercache:") == 1


def _stopped(tmp_path: Path) -> Path:
    from tests.cli.store.test_samples import make_store

    if not (tmp_path / "store").exists():
        make_store("file", tmp_path / "store")
    return tmp_path / "store"


def test_a_line_of_bars_is_short_and_has_gaps() -> None:
    assert spark([0.0, 1.0, None, 0.5], 1.0) == "▁█ ▄"
    assert spark([]) == ""
    assert spark([0.0, 0.0]) == "▁▁"
    assert len(spark([float(n) for n in range(1000)])) <= 30
    assert spark([float(n) for n in range(1000)])[-1] == "█"
    assert spark([5.0, -1.0], 1.0) == "█▁", "a value beyond the scale"


@pytest.mark.slow
def test_a_terminal_follows_the_daemon_and_says_when_it_is_gone(tmp_path: Path) -> None:
    with daemon(tmp_path, told, unix=True):
        here, there = pty.openpty()
        command = [sys.executable, "-m", "tiercache.cli", "status", "--watch", "--every", "0.2"]
        command += ["-s", str(tmp_path)]
        environment = os.environ | {"TERM": "xterm", "COLUMNS": "150", "LINES": "70"}
        process = subprocess.Popen(
            command, stdin=there, stdout=there, stderr=subprocess.PIPE, env=environment, text=True
        )
        os.close(there)
        assert _seen(here, b"75.0%")
    try:
        assert _seen(here, b"does not answer since")
        process.send_signal(signal.SIGINT)
        assert _seen(here, b"\x1b[?1049l"), "the screen of before is back"
        assert process.wait(60) == 0
        assert process.stderr is not None
        assert process.stderr.read() == ""
    finally:
        process.kill()
        process.wait()
        process.stderr.close()  # type: ignore[union-attr]
        os.close(here)


def test_a_daemon_that_refuses_is_not_said_to_be_silent() -> None:
    """A reload may remove the principal that watches."""
    refused = silence_text(RefusedError("no principal is known by this token"), 0.0)
    assert refused.startswith("the daemon refuses this since ")
    assert refused.endswith(": no principal is known by this token")
    assert silence_text(UnavailableError("gone"), 0.0).startswith("the daemon does not answer since ")


def test_lines_are_recorded_until_ctrl_c(node: StorageServer, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tiercache.cli", "status", "--watch", "--every", "0.2", "-o", "jsonl"]
    with subprocess.Popen([*command, "-s", tmp_path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        first, second = (json.loads(process.stdout.readline()) for _ in range(2))
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert first["status"]["instance"] == second["status"]["instance"] == node.instance.hex()
    assert first["status"]["time"] < second["status"]["time"]


def _seen(terminal: int, text: bytes) -> bool:
    """Whether a text appears on the terminal."""
    end, found = time.monotonic() + 60, b""
    while time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            found += os.read(terminal, 1 << 16)
            if text in found:
                return True
    return False
