"""Two data-parallel replicas: two processes with a scheduler each, over one store or two."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from tests.storage_backends.grpc.daemon import Daemon
from tests.storage_backends.grpc.nodes import scratch

ROOT = Path(__file__).parents[3]


class Replica:
    """The process, as a test sees it."""

    def __init__(self, index: int, storage: str) -> None:
        command = [sys.executable, "-m", "tests.engines.vllm.replica", str(index), storage]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
        )

    def answer(self) -> str:
        """Its next answer; vLLM's log goes the same way."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.startswith("answer: "):
                return line.removeprefix("answer: ").strip()
        raise AssertionError("the replica ended")

    def ask(self, line: str) -> str:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()
        return self.answer()


@contextmanager
def replicas(storage: str) -> Iterator[list[Replica]]:
    with ExitStack() as stack:
        made = [Replica(index, storage) for index in range(2)]
        for each in made:
            stack.enter_context(each.process)
            stack.callback(each.process.kill)
        yield made
        for each in made:
            each.process.communicate(timeout=120)
            assert each.process.returncode == 0


def test_a_store_for_one_process_is_refused_in_one_sentence(tmp_path: Path) -> None:
    with replicas(f"file://{tmp_path}/store?capacity=64MiB") as (one, two):
        said = {one.answer(), two.answer()}
    assert all("\n" not in each for each in said)
    assert any("ConfigError" in each and "lmdb://" in each for each in said)


@pytest.mark.parametrize("kind", ["lmdb", "grpc"])
def test_replicas_share_what_they_store(tmp_path: Path, kind: str) -> None:
    with ExitStack() as stack:
        storage = f"lmdb://{tmp_path}/store?capacity=64MiB"
        if kind == "grpc":
            (scratch() / "replicas").mkdir(exist_ok=True)
            storage = f"grpc://{stack.enter_context(Daemon('unix', scratch() / 'replicas')).where}"
        one, two = stack.enter_context(replicas(storage))
        assert (one.answer(), two.answer()) == ("ready", "ready")
        assert one.ask("store a") == "[True]"
        assert two.ask("found a") == "[True]"
        assert two.ask("store b") == "[True]"
        assert one.ask("found b") == "[True]"


def test_replicas_with_stores_of_their_own_do_not_meet(tmp_path: Path) -> None:
    with replicas(f"file://{tmp_path}/store-{{rank}}?capacity=64MiB") as (one, two):
        assert (one.answer(), two.answer()) == ("ready", "ready")
        assert one.ask("store a") == "[True]"
        assert two.ask("found a") == "[False]"
        assert one.ask("found a") == "[True]"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store-0", "store-1"]
