"""`tiercache events`, on a daemon in a process of its own that is killed and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.cli.serving import COMMAND, GUARD, serving
from tests.cli.store.test_samples import call, store_sequence
from tiercache.cli.terminal import Exit
from tiercache.config.urls import storage_url
from tiercache.events.base import ResidencyMap
from tiercache.events.subscriber import EventSubscriber
from tiercache.storage import open_backend
from tiercache.storage.base import StorageBackend


def daemon(directory: Path, events: str = "tcp://127.0.0.1:0", replay: str = "tcp://127.0.0.1:0") -> Any:
    file = directory / "node.toml"
    file.write_text(
        f'directory = "{directory}"\ndisk_bytes = "16MiB"\n'
        f'[events]\nendpoint = "{events}"\nreplay = "{replay}"\n'
    )
    return serving("--config", file)


def store_of(directory: Path) -> StorageBackend:
    return open_backend(storage_url("grpc", directory / "run"))


def known(subscriber: EventSubscriber, held: ResidencyMap, enough) -> None:
    for _ in range(200):
        for batch in subscriber.read(0.1):
            held.apply(batch.events)
        if enough(held):
            return
    raise AssertionError(held.places())


def count(held: ResidencyMap) -> int:
    return sum(map(len, held.places().values()))


@pytest.mark.slow
def test_events_of_a_daemon_that_is_killed_and_started_again(tmp_path):
    held = ResidencyMap()
    with daemon(tmp_path) as (_, first):
        where = (first["events"], "--replay", first["replay"])
        subscriber = EventSubscriber(first["events"], first["replay"], idle=0.3)
        with store_of(tmp_path) as store:
            store_sequence(store, list(range(40)))
            stored = store.usage().objects
        known(subscriber, held, lambda held: count(held) == stored > 0)
        table = call("events", *where).out
        assert table.splitlines()[0].split()[2:5] == ["replay", "cleared", "everything"]
        assert "STORAGE/file" in table
        rows = call("events", *where, "-o", "json").document
        assert sum(len(row["keys"]) for row in rows if row["kind"] == "stored") == stored
        lines = call("events", *where, "-o", "jsonl").lines
        assert [line["kind"] for line in lines] == [row["kind"] for row in rows]
        after = rows[-1]["sequence"] + 1
        assert call("events", *where, "--from", after, "-o", "json").document == []
    with closing(subscriber), daemon(tmp_path, first["events"], first["replay"]):
        with store_of(tmp_path) as store:
            store.delete([entry.key for entry in store.scan_all()][:3])
            left = store.usage().objects
        assert left < stored
        known(subscriber, held, lambda held: count(held) == left)


@pytest.mark.slow
def test_a_script_follows_a_daemon(tmp_path):
    with daemon(tmp_path) as (_, node):
        words = ("events", node["events"], "--replay", node["replay"], "--follow", "-o", "jsonl")
        with subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, text=True) as following:
            assert following.stdout is not None
            try:
                assert json.loads(following.stdout.readline())["kind"] == "cleared"
                with store_of(tmp_path) as store:
                    store_sequence(store, list(range(40)))
                row = json.loads(following.stdout.readline())
                assert (row["kind"], row["medium"], row["tier"]) == ("stored", "STORAGE", "file")
            finally:
                following.send_signal(signal.SIGINT)
                assert following.wait(GUARD) == 0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give --replay"), (["--follow", "-o", "json"], "-o jsonl"), (["udp://x:1"], "is no address"),
        (["--replay", "tcp://127.0.0.1"], "is no address"),
    ],
)  # fmt: skip
def test_arguments_that_are_not_possible_are_refused(words, said):
    done = call("events", *words, ok=None)
    assert done.code == Exit.MISUSED
    assert said in done.err
