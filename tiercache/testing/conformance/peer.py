"""A second process that uses the same store.

The process opens the store through the hooks of the suite. Then it reads commands from its standard input
and writes one answer to each. A command or an answer is one line of JSON.

    python -m tiercache.testing.conformance.peer MODULE:CLASS PATH
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any, Self

from tiercache.core import Outcome
from tiercache.storage.base import StorageBackend
from tiercache.testing.conformance.hooks import BackendHooks
from tiercache.testing.objects import content, key, payload, to_get, to_set


class Peer:
    """Handle of the second process in its parent.

    Objects are named by text. The name of an object gives its key and its payload (see `testing.objects`).

    Thread safety: one thread at a time.
    """

    def __init__(self, hooks: type[BackendHooks], path: Path) -> None:
        """Start the process, and wait until it has opened the store; raise AssertionError if that fails."""
        supplier = next(cls for cls in hooks.__mro__ if "open_store" in vars(cls))
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, f"{supplier.__module__}:{supplier.__qualname__}", str(path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(p or os.curdir for p in sys.path)},
        )
        assert self._answer() == "ready"

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return the answers of the store's `exists`."""
        return [bool(there) for there in self._ask("exists", names)]

    def get(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `get`.

        Raises AssertionError if the second process got a HIT with bytes other than the payload of the name.
        """
        return [Outcome(answer) for answer in self._ask("get", names, size)]

    def set(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `set`."""
        return [Outcome(answer) for answer in self._ask("set", names, size)]

    def begin_set(self, names: Sequence[str], size: int) -> None:
        """Start a set without waiting for its answers; only `kill` may follow."""
        self._tell("set", names, size)

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Return the answers of the store's `delete`."""
        return [bool(gone) for gone in self._ask("delete", names)]

    def objects(self) -> int:
        """Return the number of objects that the process's store counts."""
        return int(self._ask("objects")[0])

    def namespaces(self) -> int:
        """Return the number of namespaces that the process's store remembers."""
        return int(self._ask("namespaces")[0])

    def kill(self) -> None:
        """Kill the process, without a chance to clean up."""
        self._process.kill()
        self._process.wait(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        # `communicate` ends the input of the process, which then closes the store and ends.
        self._process.communicate(timeout=60)
        killed = self._process.returncode == -9
        assert killed or self._process.returncode == 0, (
            f"the other process ended with {self._process.returncode}"
        )

    def _ask(self, do: str, names: Sequence[str] = (), size: int = 0) -> list[Any]:
        self._tell(do, names, size)
        answer = self._answer()
        assert isinstance(answer, list)
        return answer

    def _tell(self, do: str, names: Sequence[str], size: int) -> None:
        assert self._process.stdin is not None
        print(
            json.dumps({"do": do, "names": list(names), "size": size}), file=self._process.stdin, flush=True
        )

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the other process ended with {self._process.wait(30)}; its error output is above"
        return json.loads(line)


def perform(hooks: BackendHooks, store: StorageBackend, order: Mapping[str, Any]) -> list[Any]:
    """Execute one command on the store, and return its answers."""
    names, size = order["names"], order["size"]
    if order["do"] == "exists":
        return store.exists([key(n) for n in names])
    if order["do"] == "set":
        return store.set([to_set(key(n), payload(n, size)) for n in names])
    if order["do"] == "delete":
        return store.delete([key(n) for n in names])
    if order["do"] == "objects":
        return [hooks.usage(store).objects]
    if order["do"] == "namespaces":
        return [len(store.namespaces())]
    items = [to_get(key(n), size) for n in names]
    answers = store.get(items)
    for n, item, answer in zip(names, items, answers, strict=True):
        assert answer is not Outcome.HIT or content(item) == payload(n, size), (
            f"a get of {n} returned the bytes of another object"
        )
    return answers


@contextmanager
def opened(hooks: str, path: str) -> Iterator[tuple[BackendHooks, StorageBackend]]:
    """Open the store in `path` through the hooks that `MODULE:CLASS` names, and close it at the end."""
    module, name = hooks.split(":")
    found: Any = import_module(module)
    for part in name.split("."):
        found = getattr(found, part)
    made: BackendHooks = found()
    with made.open_store(Path(path)) as store:
        yield made, store


def main() -> None:
    """Open the store, and answer commands until the standard input ends."""
    with opened(*sys.argv[1:]) as (hooks, store):
        print(json.dumps("ready"), flush=True)  # noqa: T201
        for line in sys.stdin:
            print(json.dumps(perform(hooks, store, json.loads(line))), flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
