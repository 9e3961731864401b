"""A store on a slow medium: the type `slow`, which takes the settings of `file`."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tiercache_backends.file import FileBackend

from tiercache.core import Outcome
from tiercache.storage.base import GetItem

RATE = 40e6
"""Bytes a second of each read."""


class SlowBackend(FileBackend):
    """A `file` store whose reads take as long as on a medium of RATE bytes a second."""

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        time.sleep(sum(item.length for item in items) / RATE)
        return super().get(items)
