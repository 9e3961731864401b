"""A process that stores objects in an `s3` store with a capacity when it is told, and tells the outcomes.

python -m tests.storage_backends.s3.filler PATH URL CAPACITY LEASE
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any, Self

from tests.storage_backends.s3.hooks import open_s3
from tiercache.testing.objects import key, payload, to_set

SIZE = 50_000


class Filler:
    """The process, as a test sees it."""

    def __init__(self, path: Path, url: str, capacity: str, lease: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", __name__, str(path), url, capacity, lease],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.ask() == ["ready"]

    def fill(self, name: str, objects: int) -> list[str]:
        """Set so many objects, one by one, and return the outcomes."""
        self.tell(name, objects)
        return self.ask()

    def tell(self, name: str, objects: int) -> None:
        assert self.process.stdin is not None
        print(json.dumps([name, objects]), file=self.process.stdin, flush=True)

    def ask(self) -> list[str]:
        assert self.process.stdout is not None
        found: list[str] = json.loads(self.process.stdout.readline())
        return found

    def is_owner(self) -> bool:
        return self.fill("", 0) == ["owner"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.communicate()


def main(path: str, url: str, capacity: str, lease: str) -> None:
    more: dict[str, Any] = {"capacity": capacity, "lease": lease, "deadline": "0.5s", "refresh": "0.2s"}
    with open_s3(Path(path), url, **more) as store:
        print('["ready"]', flush=True)
        for line in sys.stdin:
            name, objects = json.loads(line)
            outcomes = [
                str(store.set([to_set(key((name, n)), payload((name, n), SIZE))])[0]) for n in range(objects)
            ]
            owner = "owner" if store.usage().details["owner"] else "other"
            print(json.dumps(outcomes or [owner]), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
