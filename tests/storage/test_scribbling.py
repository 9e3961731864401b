"""A caller writes to its buffers while a get fills them, as sharers may: no object is given up for it."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from tiercache.core import Outcome
from tiercache.storage.base import GetItem
from tiercache.storage.registry import open_backend
from tiercache.testing.objects import fetch, key, payload, put

LENGTH = 1 << 20
ROUNDS = 150


@pytest.mark.parametrize("url", ["memory://", "file://{}/s?capacity=64MiB", "lmdb://{}/s?capacity=64MiB"])
def test_what_a_caller_writes_into_its_own_buffers_is_no_damage(tmp_path: Path, url: str) -> None:
    room = bytearray(LENGTH)
    target = np.frombuffer(room, np.uint8)
    done = threading.Event()

    def scribble() -> None:
        while not done.is_set():
            target[:] = 255

    with open_backend(url.format(tmp_path)) as store:
        put(store, key("a"), payload("a", LENGTH))
        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            seen = {store.get([GetItem(key("a"), [memoryview(room)], LENGTH)])[0] for _ in range(ROUNDS)}
        finally:
            done.set()
            thread.join()
        assert seen <= {Outcome.HIT, Outcome.ERROR}
        assert store.usage().details["corrupt"] == 0
        assert fetch(store, key("a"), LENGTH) == payload("a", LENGTH)
