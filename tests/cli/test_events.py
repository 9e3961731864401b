"""`tiercache events`, on a daemon in a process of its own that is killed and comes back."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

import pytest

from tests.cli.store.test_samples import call, store_sequence
from tests.cli.test_streams import GUARD
from tiercache.cli.terminal import Exit
from tiercache.config.urls import storage_url
from tiercache.events.base import ResidencyMap
from tiercache.events.subscriber import EventSubscriber
from tiercache.storage import open_backend
from tiercache_lab.children import command


class Daemon:
    """The process, and the addresses of its events."""

    def __init__(self, directory: Path, events: str = "tcp://127.0.0.1:0", replay: str = "tcp://127.0.0.1:0"):
        self.directory = directory
        file = directory / "node.toml"
        file.write_text(
            f'directory = "{directory}"\ndisk_bytes = "16MiB"\n'
            f'[events]\nendpoint = "{events}"\nreplay = "{replay}"\n'
        )
        self.process = subprocess.Popen(
            command("tiercache.cli", "serve", "--config", str(file), "-o", "jsonl"),
            stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        )  # fmt: skip
        places = {}
        for row in map(json.loads, self.process.stdout or ()):
            if "summary" in row:
                break
            places[row["transport"]] = row["address"]
        self.events, self.replay = places["events"], places["replay"]

    def store(self):
        return open_backend(storage_url("grpc", self.directory / "run"))

    def end(self, number: int = signal.SIGTERM) -> None:
        self.process.send_signal(number)
        self.process.communicate(timeout=GUARD)

    def __enter__(self) -> Daemon:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.end(signal.SIGKILL)


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
    with Daemon(tmp_path) as first:
        subscriber = EventSubscriber(first.events, first.replay, idle=0.3)
        try:
            with first.store() as store:
                store_sequence(store, list(range(40)))
                stored = store.usage().objects
            known(subscriber, held, lambda held: count(held) == stored > 0)
            table = call("events", first.events, "--replay", first.replay).out
            assert table.splitlines()[0].split()[2:5] == ["replay", "cleared", "everything"]
            assert "STORAGE/file" in table
            rows = json.loads(call("events", first.events, "--replay", first.replay, "-o", "json").out)
            assert sum(len(row["keys"]) for row in rows if row["kind"] == "stored") == stored
            lines = call("events", first.events, "--replay", first.replay, "-o", "jsonl").out.splitlines()
            assert [json.loads(line)["kind"] for line in lines] == [row["kind"] for row in rows]
            after = rows[-1]["sequence"] + 1
            beyond = ["--from", str(after), "-o", "json"]
            assert json.loads(call("events", first.events, "--replay", first.replay, *beyond).out) == []
            first.end(signal.SIGKILL)
            with Daemon(tmp_path, first.events, first.replay) as second:
                with second.store() as store:
                    store.delete([entry.key for entry in store.scan_all()][:3])
                    left = store.usage().objects
                assert left < stored
                known(subscriber, held, lambda held: count(held) == left)
                second.end()
        finally:
            subscriber.close()


@pytest.mark.slow
def test_a_script_follows_a_daemon(tmp_path):
    with Daemon(tmp_path) as node:
        words = ("events", node.events, "--replay", node.replay, "--follow", "-o", "jsonl")
        with subprocess.Popen(
            command("tiercache.cli", *words), stdout=subprocess.PIPE, text=True
        ) as following:
            assert following.stdout is not None
            try:
                assert json.loads(following.stdout.readline())["kind"] == "cleared"
                with node.store() as store:
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
