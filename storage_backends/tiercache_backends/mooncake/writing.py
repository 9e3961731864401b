"""Sets: an object is stored once, and counts as stored when Mooncake says that it is there."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.base import SetItem
from tiercache_backends.mooncake.header import HEADER_BYTES, is_state, write_header
from tiercache_backends.mooncake.library import FULL, INVALID, MooncakeClient
from tiercache_backends.mooncake.link import Link
from tiercache_backends.mooncake.memory import Region, copy_in
from tiercache_backends.mooncake.parts import Part, parts
from tiercache_backends.mooncake.patience import Patience
from tiercache_backends.mooncake.settings import MooncakeSettings
from tiercache_backends.mooncake.traffic import Codes, move

_THERE, _ANOTHER_S = 1, 2
"""Codes of a part's item that is there after its put: by this put, or by another client's."""
_POLLS: Final = 20
_POLL_S: Final = 0.01
"""How often, and after how many seconds each, an object is looked for that another client is putting."""


class PoolWriter:
    """Sets of one store.

    Thread safety: any thread.
    """

    def __init__(
        self, link: Link, settings: MooncakeSettings, exist: Callable[[Patience, Sequence[str]], list[int]]
    ) -> None:
        """Make the writer; `exist` returns 1, 0 or a negative code for each name."""
        self._link: Final = link
        self._settings: Final = settings
        self._exist: Final = exist

    def set(self, patience: Patience, names: Sequence[str], items: Sequence[SetItem]) -> list[Outcome]:
        """Store well-formed items of different names, which the caller has claimed."""
        outcomes = [Outcome.UNAVAILABLE] * len(items)
        try:
            known = self._exist(patience, names)
        except UnavailableError:
            return outcomes
        if min(known, default=0) < 0:
            self._link.guard.failed(f"the master does not answer (code {min(known)})")
        fits = self._link.staging.nbytes - HEADER_BYTES
        kinds: dict[int, list[tuple[int, SetItem, str, Sequence[memoryview], int]]] = {}
        for n, (item, name, code) in enumerate(zip(items, names, known, strict=True)):
            length = item.meta.length
            if code > 0:
                outcomes[n] = Outcome.HIT
            elif not code and length > fits and self._link.attached.locate(item.buffers, length) is None:
                outcomes[n] = Outcome.ERROR
            elif not code:
                state = is_state(item.key, item.meta.parent)
                replicas = self._settings.state_replicas if state else self._settings.replicas
                kinds.setdefault(replicas, []).append((n, item, name, item.buffers, length))
        for replicas, wanted in kinds.items():
            move(
                self._link,
                patience,
                "set",
                parts(wanted, self._link.attached, self._link.staging, self._link.pieces),
                partial(self._put, replicas),
                self._prepare,
                partial(self._judge, outcomes),
                outcomes,
            )
        return outcomes

    def _prepare(self, part: Part[SetItem], region: Region) -> None:
        """Write headers, and copy the payloads that are staged."""
        now = time.time_ns()
        for one in part.placed:
            write_header(part.header(one, region), one.name, one.item, now)
            if one.extents is None:
                copy_in(part.staged(one, region), one.item.buffers, one.length)

    def _put(self, replicas: int, client: MooncakeClient, part: Part[SetItem], region: Region) -> Codes:
        """Put a part; return _THERE or _ANOTHER_S for what is there then, else 0 or a negative code.

        A put succeeds, and does nothing, while another client has begun to put the same object. That client
        may have died.
        """
        codes = client.put(part.names, *part.pieces(region, self._link.attached), replicas)
        there = client.exist(part.names)
        found = [code or there for code, there in zip(codes, there, strict=True)]
        for _ in range(_POLLS):
            missing = [n for n, code in enumerate(found) if not code]
            if not missing:
                break
            time.sleep(_POLL_S)
            again = client.exist([part.placed[n].name for n in missing])
            for n, code in zip(missing, again, strict=True):
                found[n] = _ANOTHER_S if code > 0 else code
        return found

    def _judge(self, outcomes: list[Outcome], part: Part[SetItem], region: Region, codes: Codes) -> None:
        for one, code in zip(part.placed, codes, strict=True):
            outcomes[one.index] = {
                _THERE: Outcome.STORED,
                _ANOTHER_S: Outcome.HIT,
                0: Outcome.THROTTLED,
                FULL: Outcome.THROTTLED,
                INVALID: Outcome.ERROR,
            }.get(code, Outcome.UNAVAILABLE)
        if Outcome.UNAVAILABLE in {outcomes[one.index] for one in part.placed}:
            self._link.guard.failed(f"a set failed with code {min(codes)}")
        else:
            self._link.guard.succeeded()
