"""A second process that uses the same store, which it opens through the hooks of the suite."""

from __future__ import annotations

from collections.abc import Sequence
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tiercache.core import Outcome
from tiercache.testing.conformance.hooks import BackendHooks
from tiercache.testing.objects import content, key, payload, to_get, to_set

_CONTEXT = get_context("spawn")  # a fork would have the store of this process open


class Peer:
    """Handle of the second process in its parent.

    Objects are named by text. The name of an object gives its key and its payload (see `testing.objects`).

    Thread safety: one thread at a time.
    """

    def __init__(self, hooks: type[BackendHooks], path: Path) -> None:
        """Start the process, and wait until it has opened the store; raise EOFError if it ends instead."""
        supplier = next(cls for cls in hooks.__mro__ if "open_store" in vars(cls))
        self._pipe, theirs = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(target=_serve, args=(supplier, path, theirs))
        self._process.start()
        theirs.close()
        assert self._pipe.recv() == "ready"

    def exists(self, names: Sequence[str]) -> list[bool]:
        """Return the answers of the store's `exists`."""
        return self._ask("exists", names)

    def get(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `get`.

        The second process ends if it gets a HIT with bytes other than the payload of the name.
        """
        return self._ask("get", names, size)

    def set(self, names: Sequence[str], size: int) -> list[Outcome]:
        """Return the answers of the store's `set`."""
        return self._ask("set", names, size)

    def begin_set(self, names: Sequence[str], size: int) -> None:
        """Start a set without waiting for its answers; only `kill` may follow."""
        self._pipe.send(("set", names, size))

    def delete(self, names: Sequence[str]) -> list[bool]:
        """Return the answers of the store's `delete`."""
        return self._ask("delete", names)

    def objects(self) -> int:
        """Return the number of objects that the process's store counts."""
        return int(self._ask("objects")[0])

    def namespaces(self) -> int:
        """Return the number of namespaces that the process's store remembers."""
        return int(self._ask("namespaces")[0])

    def kill(self) -> None:
        """Kill the process, without a chance to clean up."""
        self._process.kill()
        self._process.join(30)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self._pipe.close()  # the process then closes the store and ends
        self._process.join(60)
        assert self._process.exitcode in (0, -9), f"the other process ended with {self._process.exitcode}"

    def _ask(self, do: str, names: Sequence[str] = (), size: int = 0) -> list[Any]:
        self._pipe.send((do, names, size))
        answers: list[Any] = self._pipe.recv()
        return answers


def _serve(supplier: type[BackendHooks], path: Path, pipe: Connection) -> None:
    """Open the store, and answer orders until the parent closes its end."""
    hooks = supplier()
    with hooks.open_store(path) as store:
        pipe.send("ready")
        while True:
            try:
                do, names, size = pipe.recv()
            except EOFError:
                return
            keys = [key(n) for n in names]
            if do == "set":
                answers: list[Any] = store.set([to_set(key(n), payload(n, size)) for n in names])
            elif do == "get":
                items = [to_get(k, size) for k in keys]
                answers = store.get(items)
                for n, item, answer in zip(names, items, answers, strict=True):
                    assert answer is not Outcome.HIT or content(item) == payload(n, size), (
                        f"wrong bytes of {n}"
                    )
            elif do == "objects":
                answers = [hooks.usage(store).objects]
            elif do == "namespaces":
                answers = [len(store.namespaces())]
            else:
                answers = getattr(store, do)(keys)
            pipe.send(answers)
