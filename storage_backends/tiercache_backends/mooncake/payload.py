"""Sets and gets: an object is stored once, and bytes count only if everything in their header is right.

One thread of this process at a time stores or removes an object. Mooncake does not say which of two puts at
once was the first, and a removal takes whatever is there. Between processes that stays so.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from threading import Condition, Lock
from typing import Final, TypeVar

from tiercache.core import Outcome
from tiercache.errors import UnavailableError
from tiercache.storage.attached import withheld
from tiercache.storage.base import GetItem, SetItem
from tiercache.storage.checksum import checksum
from tiercache.storage.vectors import copy_in, copy_out
from tiercache_backends.mooncake.header import (
    HEADER_BYTES,
    ObjectNames,
    is_state,
    payload_sum,
    read_header,
    write_header,
)
from tiercache_backends.mooncake.library import (
    FULL,
    INVALID,
    LEASE_OVER,
    TRANSFER,
    MooncakeClient,
    outcome_of,
)
from tiercache_backends.mooncake.link import Link, Patience
from tiercache_backends.mooncake.memory import Region
from tiercache_backends.mooncake.settings import MooncakeSettings
from tiercache_backends.mooncake.traffic import Codes, Part, PartMover, PlacedItem, parts

T = TypeVar("T")


class NameClaims:
    """Names that threads of this process are changing.

    Thread safety: any thread. A thread that has claims asks for no others, so none waits for itself.
    """

    def __init__(self) -> None:
        self._changed: Final = Condition()
        self._held: Final[set[str]] = set()

    def each(
        self, names: Sequence[str], patience: Patience, work: Callable[[list[str]], Sequence[T]]
    ) -> dict[str, T]:
        """Call `work` with these names in parts, claimed meanwhile; return its answers by name.

        Names that other threads hold for longer than there is patience have none.
        """
        answers: dict[str, T] = {}
        while left := [name for name in names if name not in answers]:
            with self._changed:
                while self._held.issuperset(left) and patience.left:
                    self._changed.wait(patience.left)
                mine = [name for name in left if name not in self._held]
                self._held.update(mine)
            if not mine:
                break
            try:
                answers.update(zip(mine, work(mine), strict=True))
            finally:
                with self._changed:
                    self._held.difference_update(mine)
                    self._changed.notify_all()
        return answers


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
        kinds: dict[int, list[tuple[int, SetItem, str, Sequence[memoryview], int]]] = {}
        for n, (item, name, code) in enumerate(zip(items, names, known, strict=True)):
            if code > 0:
                outcomes[n] = Outcome.HIT
            elif not code:
                state = is_state(item.key, item.meta.parent)
                replicas = self._settings.state_replicas if state else self._settings.replicas
                kinds.setdefault(replicas, []).append((n, item, name, item.buffers, item.meta.length))
        for replicas, wanted in kinds.items():
            PartMover(
                self._link,
                patience,
                "set",
                prepare=self._prepare,
                work=partial(self._put, replicas),
                finish=partial(self._judge, outcomes),
                outcomes=outcomes,
            ).move(parts(wanted, self._link, outcomes))
        return outcomes

    def _prepare(self, part: Part[SetItem], region: Region) -> None:
        """Write headers, and copy the payloads that are staged."""
        now = time.time_ns()
        for one in part.placed:
            write_header(part.header(one, region), one.name, one.item, now)
            if one.extents is None:
                copy_in(part.staged(one, region), one.item.buffers)

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


class PoolReader:
    """Gets of one store, and what they found.

    Thread safety: any thread.
    """

    def __init__(self, link: Link, names: ObjectNames, claims: NameClaims) -> None:
        self._link: Final = link
        self._claims: Final = claims
        self._names: Final = names
        self._lock: Final = Lock()  # guards the counters
        self.corrupt = 0
        """Number of objects that were dropped because their bytes were wrong."""
        self.second_reads = 0
        """Number of objects that were read again because their bytes were wrong at first."""
        self.leases_over = 0
        """Number of reads that took longer than the lease of their object."""

    def get(self, items: Sequence[GetItem]) -> list[Outcome]:
        """Read well-formed items.

        An item is UNAVAILABLE while an earlier call, which was given up, may still write to its buffers.
        """
        outcomes = [Outcome.UNAVAILABLE] * len(items)
        patience = self._link.patience()
        odd: list[tuple[PlacedItem[GetItem], int]] = []
        held = withheld(items, self._link.attached.memories)
        wanted = [
            (n, item, self._names.of(item.key.digest), item.buffers, item.length)
            for n, item in enumerate(items)
            if not held[n]
        ]
        PartMover(
            self._link,
            patience,
            "get",
            prepare=lambda part, region: None,
            work=lambda client, part, region: client.get(
                part.names, *part.pieces(region, self._link.attached)
            ),
            finish=lambda part, region, codes: self._judge(part, region, codes, outcomes, odd),
            outcomes=outcomes,
        ).move(parts(wanted, self._link, outcomes))
        for placed, code in odd:
            outcomes[placed.index] = self._claimed(patience, placed, code)
        return outcomes

    def _judge(
        self,
        part: Part[GetItem],
        region: Region,
        codes: Codes,
        outcomes: list[Outcome],
        odd: list[tuple[PlacedItem[GetItem], int]],
    ) -> None:
        """Verify what a call has read; add what is not as it should be to `odd`."""
        moved = False
        for one, code in zip(part.placed, codes, strict=True):
            if code == HEADER_BYTES + one.length:
                payload = list(one.item.buffers) if one.extents is not None else [part.staged(one, region)]
                if not self._matches(one, part.header(one, region), payload):
                    odd.append((one, code))
                    continue
                if one.extents is None:
                    copy_out(part.staged(one, region), one.item.buffers)
                outcomes[one.index] = Outcome.HIT
                moved = True
            elif code >= 0 or code in (INVALID, TRANSFER):
                odd.append((one, code))
            else:
                outcomes[one.index] = outcome_of(code)
                if code == LEASE_OVER:
                    with self._lock:
                        self.leases_over += 1
        if moved:
            self._link.guard.succeeded()
        elif Outcome.UNAVAILABLE in {outcomes[one.index] for one in part.placed} and not odd:
            self._link.guard.failed(f"a get failed with code {min(codes)}")

    def _matches(self, one: PlacedItem[GetItem], header: memoryview, payload: Sequence[memoryview]) -> bool:
        found = payload_sum(header, one.name, one.length)
        return found is not None and found == checksum(one.item.key, payload, one.length)

    def _claimed(self, patience: Patience, one: PlacedItem[GetItem], code: int) -> Outcome:
        """Look again at an object that nobody here changes meanwhile."""
        found = self._claims.each([one.name], patience, lambda _: [self._look_again(patience, one, code)])
        return found.get(one.name, Outcome.UNAVAILABLE)

    def _look_again(self, patience: Patience, one: PlacedItem[GetItem], code: int) -> Outcome:
        """Return the outcome of an item whose bytes or whose number of bytes were wrong."""
        try:
            size = self._link.ask(patience, "get", lambda client: client.size(one.name))
            if size < 0:
                return outcome_of(size)
            if size == HEADER_BYTES + one.length:
                if code == size:
                    return self._read_again(patience, one)
                self._link.guard.failed(f"a get failed with code {code}")
                return Outcome.UNAVAILABLE
            if size > HEADER_BYTES:
                [header] = self._link.heads(patience, "get", [one.name])
                if isinstance(header, int):
                    return outcome_of(header)
                found = read_header(memoryview(header), one.name)
                if found is not None and found.meta.length == size - HEADER_BYTES:
                    return Outcome.ERROR
            return self._drop(patience, one)
        except UnavailableError:
            return Outcome.UNAVAILABLE

    def _read_again(self, patience: Patience, one: PlacedItem[GetItem]) -> Outcome:
        """Read an object a second time, into memory that nobody else writes to."""
        size = HEADER_BYTES + one.length
        with self._lock:
            self.second_reads += 1

        def work(client: MooncakeClient, region: Region) -> tuple[int, bytes]:
            code = client.get([one.name], [[region.address]], [[size]])[0]
            payload = region.view[HEADER_BYTES:size]
            sound = code == size and self._matches(one, region.view[:HEADER_BYTES], [payload])
            return code, bytes(payload) if sound else b""

        if size > self._link.staging.nbytes:
            return self._drop(patience, one)  # there is no memory for a second read
        code, payload = self._link.ask_with(patience, "get", size, work)
        if code != size:
            return outcome_of(code) if code < 0 else Outcome.ERROR
        if not payload:
            return self._drop(patience, one)
        if one.extents is not None:
            return Outcome.ERROR  # somebody else writes to the caller's buffers
        copy_out(memoryview(payload), one.item.buffers)
        return Outcome.HIT

    def _drop(self, patience: Patience, one: PlacedItem[GetItem]) -> Outcome:
        """Remove a corrupt object, so that the next set stores it again."""
        code = self._link.ask(patience, "remove", lambda client: client.remove([one.name])[0])
        with self._lock:
            self.corrupt += code == 0
        return Outcome.CORRUPT
