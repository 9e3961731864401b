"""A process that owns a store until it is killed: `python -m tests.storage.owner DIR put`."""

from __future__ import annotations

import sys
import time

from tiercache_backends.file import FileBackend

from tiercache.core import Outcome
from tiercache.testing.objects import key, payload, put

if __name__ == "__main__":
    store = FileBackend(sys.argv[1], 16 << 20)
    assert put(store, key("child"), payload("child", 70_000)) is Outcome.STORED
    print("ready", flush=True)
    time.sleep(60)
