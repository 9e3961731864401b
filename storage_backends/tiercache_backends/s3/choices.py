"""Forms in which objects lie in packs, by a codec for each pool.

A codec is chosen by a measurement of the pool's first 64 objects, and of 64 more from time to time.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from tiercache.core import ObjectKey
from tiercache.storage.vectors import take
from tiercache_backends.s3.compression import Codec, decode, encode

TRIAL: Final = 64
"""Objects of a pool that are measured for a choice. They are stored as the choice before says, first RAW."""
REVIEW: Final = 1 << 14
"""Objects after which a pool is measured again."""
_WIRE: Final = 0.25e9
"""Bytes a second between a host and its service that `auto` assumes: 2 Gbit/s."""
_MIN_GAIN: Final = 0.05
"""Part of the time (`auto`) or of the bytes (`smallest`) that a codec must save to be chosen."""
_SLICE: Final = 64 << 10
_SLICES: Final = 4
"""An object is measured on at most so many slices of so many bytes: a trial takes some 0.3 s in all."""
_MAX_POOLS: Final = 256
_PAGE: Final = 4096


@dataclass(slots=True)
class _Pool:
    name: str
    codec: Codec = Codec.RAW
    since: int = 0
    """Objects since the last trial began."""
    measured: int = 0
    """Objects of that trial that were measured."""
    costs: Counter[Codec] = field(default_factory=Counter)
    """Cost of what was measured, by codec: stored bytes (`smallest`) or nanoseconds (`auto`)."""
    plain: int = 0
    stored: int = 0


class Encoded(NamedTuple):
    """Bytes of one object as they are stored."""

    codec: Codec
    pieces: Sequence[memoryview]


class CodecChoices:
    """Encodes objects as their pools' choices say.

    `mode`: `auto` compresses where a write and a read together get faster, `smallest` wherever bytes are
    saved, and `none` nowhere. A choice is made for each pool name and layout, kept in memory, and made anew
    by the next process. With `auto`, a codec that shrinks bytes by `r`, encodes `e` and decodes `d` bytes a
    second costs, for each byte that is written once and read once over a wire of `w` (_WIRE) bytes a second,

        2 / (r w) + 1 / e + 1 / d        where it is 2 / w without a codec,

    and the codec of the least cost is chosen. `e` and `d` are those of one core (in CPU time, so that a busy
    machine does not change the choice) times the cores that the store may use, which are half of those that
    the process may run on, and not more than the store's threads.

    Thread safety: any thread. No lock is held while bytes are encoded.
    """

    def __init__(self, mode: str, threads: int = 1, clock: Callable[[], float] = time.thread_time) -> None:
        self._mode = mode
        self._cores = max(1, min(threads, len(os.sched_getaffinity(0)) // 2))
        self._clock = clock
        self._lock = threading.Lock()
        self._pools: OrderedDict[tuple[str, bytes], _Pool] = OrderedDict()

    def encode(self, key: ObjectKey, buffers: Sequence[memoryview], length: int) -> Encoded:
        """Return the stored form of an object, by the codec of its pool."""
        raw = Encoded(Codec.RAW, take(buffers, 0, length))
        if self._mode == "none":
            return raw
        pool, measure = self._noted(key)
        codec = pool.codec
        if measure:
            self._measure(pool, buffers, length)
        pieces = encode(codec, buffers, length)
        with self._lock:
            pool.plain += length
            pool.stored += length if pieces is None else sum(map(len, pieces))
        return raw if pieces is None else Encoded(codec, [memoryview(piece) for piece in pieces])

    def report(self) -> Mapping[str, str]:
        """Return each pool's codec, and by what factor its objects have shrunk since the store was opened."""
        with self._lock:
            return {
                pool.name: f"{pool.codec.name.lower()} {pool.plain / max(pool.stored, 1):.2f}"
                for pool in self._pools.values()
            }

    def _noted(self, key: ObjectKey) -> tuple[_Pool, bool]:
        """Count an object of a pool; return the pool and whether the object is to be measured."""
        place = (key.pool, key.layout)
        with self._lock:
            pool = self._pools.get(place)
            if pool is None:
                pool = self._pools[place] = _Pool(key.pool)
                if len(self._pools) > _MAX_POOLS:
                    self._pools.popitem(last=False)
            self._pools.move_to_end(place)
            if pool.since >= REVIEW:
                pool.since = pool.measured = 0
                pool.costs.clear()
            pool.since += 1
            return pool, pool.since <= TRIAL

    def _measure(self, pool: _Pool, buffers: Sequence[memoryview], length: int) -> None:
        sample = _sample(buffers, length)
        costs = {codec: self._cost(*self._tried(codec, sample)) for codec in Codec}
        with self._lock:
            pool.measured += 1
            pool.costs.update(costs)
            if pool.measured >= TRIAL:
                best = min(pool.costs, key=pool.costs.__getitem__)
                is_worth = pool.costs[best] <= (1 - _MIN_GAIN) * pool.costs[Codec.RAW]
                pool.codec = best if is_worth else Codec.RAW
                pool.costs.clear()

    def _tried(self, codec: Codec, sample: bytearray) -> tuple[int, float]:
        """Return the stored bytes of a sample, and the seconds of its encoding and decoding."""
        start = self._clock()
        pieces = encode(codec, [memoryview(sample)], len(sample))
        if pieces is None:
            return len(sample), 0.0 if codec is Codec.RAW else self._clock() - start
        encoded = self._clock() - start
        whole = b"".join(pieces)
        start = self._clock()
        decode(codec, memoryview(whole), len(sample))
        return len(whole), encoded + self._clock() - start

    def _cost(self, stored: int, seconds: float) -> int:
        """Return the cost of an object of `stored` bytes that a core encodes and decodes in `seconds`."""
        if self._mode == "smallest":
            return stored
        return round(1e9 * (2 * stored / _WIRE + seconds / self._cores))


def _sample(buffers: Sequence[memoryview], length: int) -> bytearray:
    """Return some slices of an object, evenly spread, or all of a small one."""
    if length <= _SLICE * _SLICES:
        return bytearray(b"".join(take(buffers, 0, length)))
    sample = bytearray()
    for number in range(_SLICES):
        start = (length - _SLICE) * number // (_SLICES - 1) // _PAGE * _PAGE
        for view in take(buffers, start, start + _SLICE):
            sample += view
    return sample
