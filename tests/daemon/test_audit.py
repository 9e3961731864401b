"""The audit log: who changed what and who was refused, on disks that are full, forbidden or do not answer."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import grpc
import pytest

from tests.daemon.hosts import TOKENS, Client, key, secret, serving, until
from tiercache.daemon.audit import AuditLog
from tiercache.daemon.budget import Budget
from tiercache.daemon.call_log import CallLog
from tiercache.daemon.store_threads import Threads
from tiercache.wire import messages
from tiercache.wire.v1 import storage_pb2 as pb

SMALL = 1 << 10


@pytest.fixture
def opened(tmp_path: Path) -> Iterator[Callable[..., AuditLog]]:
    logs: list[AuditLog] = []

    def open_log(*, required: bool = False, lost: list[None] | None = None) -> AuditLog:
        counted = [] if lost is None else lost
        log = AuditLog(
            tmp_path / "audit.jsonl",
            max_bytes=SMALL,
            kept=3,
            required=required,
            count_lost=lambda: counted.append(None),
        )
        logs.append(log)
        return log

    yield open_log
    for log in logs:
        log.close()


def records(*files: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_records_are_kept_in_order_within_a_bound(tmp_path: Path, opened: Callable[..., AuditLog]) -> None:
    log = opened()
    assert min([future.result(30) for future in [log.record("e", {"n": n}) for n in range(100)]])
    files = sorted(tmp_path.iterdir(), reverse=True)
    assert [file.name for file in files] == ["audit.jsonl.3", "audit.jsonl.2", "audit.jsonl.1", "audit.jsonl"]
    assert all(file.stat().st_size <= SMALL for file in files)
    assert all(stat.S_IMODE(file.stat().st_mode) == 0o600 for file in files)
    kept = [record["n"] for record in records(*files)]
    assert kept == list(range(100 - len(kept), 100))
    assert len(kept) > 40


@contextmanager
def blocked(path: Path) -> Iterator[None]:
    """A lease on the file makes every open of it wait, as behind a disk that hangs."""
    path.touch()
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    holder = os.open(path, os.O_RDWR)
    fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_WRLCK)
    try:
        yield
    finally:
        fcntl.fcntl(holder, fcntl.F_SETLEASE, fcntl.F_UNLCK)
        os.close(holder)
        signal.signal(signal.SIGIO, signal.SIG_DFL)


def test_changes_wait_for_their_record_only_where_it_is_required(tmp_path, opened):
    path, lost = tmp_path / "audit.jsonl", list[None]()
    with blocked(path):
        assert asyncio.run(opened(lost=lost).require("e", {}))
        assert not lost
        assert not asyncio.run(opened(required=True, lost=lost).require("late", {}))
        assert len(lost) == 1
    until(lambda: len(records(path)) == 2)


def test_more_records_than_may_wait_are_counted(tmp_path: Path, opened: Callable[..., AuditLog]) -> None:
    lost: list[None] = []
    log = opened(lost=lost)
    with blocked(tmp_path / "audit.jsonl"):
        told = [log.record("e", {}) for _ in range(2000)]
    written = sum(future.result(60) for future in told)
    assert 1024 <= written <= 1026
    assert written + len(lost) == 2000


def daemon(tmp_path: Path, more: str = "") -> str:
    names = "\n".join(
        f"""
[[principals]]
name = "{name}"
token_file = "{secret(tmp_path / name, token)}"
verbs = ["read", "write", "admin"]"""
        for name, token in TOKENS.items()
    )
    return f"""
directory = "{tmp_path / "d"}"
disk_bytes = "64MiB"
host_bytes = "48MiB"
listen = ["127.0.0.1:0"]
{more}
[log]
format = "json"
slow_call = "1us"
{names}
"""


def caller(port: int, name: str) -> Client:
    return Client(f"127.0.0.1:{port}", [("authorization", f"Bearer {TOKENS[name]}")])


def test_a_daemon_tells_who_changed_what_and_who_was_refused(tmp_path: Path) -> None:
    keys = [key(n) for n in range(8)]
    with serving(tmp_path, daemon(tmp_path)) as node:
        with caller(node.ports[0], "trent") as trent:
            trent.set(dict.fromkeys(keys[:5], b"x" * 1000))
            trent.delete(keys)
        with Client(
            f"127.0.0.1:{node.ports[0]}", [("authorization", "Bearer wrong-" + "w" * 24)]
        ) as stranger:
            for _ in range(300):
                assert stranger.refused("Exists") is grpc.StatusCode.UNAUTHENTICATED
    lines = [json.loads(line) for line in node.log.read_text().splitlines()]
    told = records(tmp_path / "d/audit.jsonl")
    asked, done = (record for record in told if record["event"] == "delete")
    assert (asked["principal"], asked["objects"], asked["outcome"]) == ("trent", 8, "asked")
    assert (done["outcome"], done["deleted"]) == ("done", 5)
    assert asked["request"] == done["request"]
    assert asked["peer"].startswith("127.0.0.1:")
    refused = [record for record in told if record["event"] == "refused"]
    assert 5 <= len(refused) <= 20, "a flood of refusals does not push out what came before"
    assert {(record["reason"], record["method"]) for record in refused} == {("unauthenticated", "Exists")}
    slow = [line for line in lines if "took" in line["event"]]
    assert {line["method"] for line in slow} >= {"Set", "Delete", "Exists"}
    assert all(line["request"] for line in slow)
    everything = node.log.read_text() + (tmp_path / "d/audit.jsonl").read_text()
    assert not any(token in everything for token in (*TOKENS.values(), "wrong-"))


@pytest.mark.slow
def test_without_a_record_nothing_is_changed_if_records_are_required(tmp_path: Path) -> None:
    """The file cannot be made, because its directory is a file."""
    (tmp_path / "blocked").touch()
    body = daemon(tmp_path, f'[audit]\nfile = "{tmp_path}/blocked/audit.jsonl"\nrequired = true\n')
    with serving(tmp_path, body) as node, caller(node.ports[0], "trent") as trent:
        trent.set({key(0): b"x" * 1000})
        request = pb.DeleteRequest(keys=messages.keys([key(0)]))
        assert trent.refused("Delete", request) is grpc.StatusCode.UNAVAILABLE
        assert trent.exists([key(0)]) == [True]
    assert "cannot be written" in node.log.read_text()


def test_a_change_whose_client_left_before_it_began_is_not_told_as_going_on(opened):
    """The one store thread is busy when the client leaves, so the change is never made."""
    log = opened()
    made = Event()

    async def leave() -> None:
        threads, workers, may_end = Threads(1), Budget(1), Event()
        busy = threads.start(workers, may_end.wait, 60)
        change = asyncio.create_task(
            CallLog(audit=log).change("delete", partial(threads.start, workers), made.set)
        )
        while not log.path.exists():
            await asyncio.sleep(0.01)
        await asyncio.sleep(0.1)  # the change waits for the thread
        change.cancel()
        with pytest.raises(asyncio.CancelledError):
            await change
        may_end.set()
        await busy
        assert await threads.close(60)

    asyncio.run(leave())
    log.close()
    assert not made.is_set()
    assert [one["outcome"] for one in records(log.path)] == ["asked", "not begun; the client left"]
