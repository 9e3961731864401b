"""Digests of every prefix of a sequence, computed for whole arrays at once.

They tell the index what it once knew (`ghosts`). They take eight bytes a page, and a microsecond for hundreds of tokens. They are neither a
secret nor a proof: a client that makes two prefixes collide only gets a checkpoint that is of no use. Served objects are found by tokens in
memory and by `keys` in storage.
"""

from __future__ import annotations

from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

Digests: TypeAlias = npt.NDArray[np.uint64]
"""Digests, one per page: that of the sequence from its start to the end of the page."""

_BASE: Final = 0x9E3779B97F4A7C15
_MIX: Final = np.uint64(0xD6E8FEB86659FD93)
_SEED: Final = 0x7469657263616368
_SHIFT: Final = np.uint64(32)


class Prefixes:
    """Polynomial digests modulo 2^64.

    The digest of a page is the sum of its tokens weighted by random odd numbers, then mixed; that of a prefix is a polynomial in those of
    its pages: H(k) = H(k-1) * b + h(k), so that H(k) = b^k * (H(0) + sum of h(i) * b^-i), which is a cumulative sum.
    Thread safety: one owner thread.
    """

    def __init__(self, page_size: int) -> None:
        self._page_size = page_size
        self._weights = np.random.default_rng(_SEED).integers(0, 2**64, page_size, np.uint64) | np.uint64(1)
        self._powers = self._inverses = np.empty(0, np.uint64)

    @staticmethod
    def start(extra: bytes) -> int:
        """Return the digest of the empty prefix, for sequences with this `extra`."""
        return xxhash.xxh64_intdigest(extra, _SEED)

    def of(self, tokens: npt.NDArray[np.uint64], before: int) -> Digests:
        """Return the digests at the end of each whole page of `tokens`, which follow a prefix with the digest `before`."""
        count = len(tokens) // self._page_size
        if count > len(self._powers):
            self._extend(2 * count)
        pages = tokens[: count * self._page_size].reshape(count, self._page_size) @ self._weights
        pages ^= pages >> _SHIFT  # a sum alone would let equal differences cancel out
        pages *= _MIX
        pages *= self._inverses[:count]
        out = np.cumsum(pages, dtype=np.uint64)
        out += np.uint64(before)
        out *= self._powers[:count]
        return out

    def _extend(self, count: int) -> None:
        self._powers = np.cumprod(np.full(count, _BASE, np.uint64), dtype=np.uint64)
        self._inverses = np.cumprod(np.full(count, pow(_BASE, -1, 2**64), np.uint64), dtype=np.uint64)
