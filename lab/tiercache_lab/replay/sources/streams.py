"""Streams of token ids, and random generators. Both depend only on a name.

A token is a hash (splitmix64) of the stream's key and the token's position in the stream. Streams are not
stored, because the same tokens can be computed again. Two streams have no page in common.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import TokenArray

VOCABULARY: Final = 2**17
"""Number of token ids; all ids are smaller."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
"""Increment of splitmix64: 2**64 divided by the golden ratio."""
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = np.uint64(VOCABULARY - 1)


def key_of(*parts: int | str) -> int:
    """Return the 64-bit key of the stream that `parts` name."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def rng_of(*parts: int | str) -> np.random.Generator:
    """Return a new random generator for the purpose that `parts` name."""
    return np.random.default_rng(key_of(*parts))


def tokens(key: int, length: int) -> TokenArray:
    """Return the first `length` tokens of a stream. The array and all views of it are read-only."""
    made = np.arange(1, length + 1, dtype=np.uint64)
    made *= _GOLDEN
    made += np.uint64(key)
    _mix(made)
    made &= _MASK
    made.flags.writeable = False
    return made


def block_keys(ids: npt.NDArray[np.uint64], salt: int = 0) -> npt.NDArray[np.uint64]:
    """Return the key of each id's stream of tokens, which depends only on the id and on `salt`."""
    keys = ids * _GOLDEN + np.uint64(salt)
    _mix(keys)
    return keys


def expand_keys(keys: npt.NDArray[np.uint64], block: int, length: int) -> TokenArray:
    """Return a read-only array with the first `block` tokens of each stream in turn, cut off at `length`."""
    # The tokens are made as in `tokens`, with a row per key.
    made = (keys[:, None] + np.arange(1, block + 1, dtype=np.uint64) * _GOLDEN).reshape(-1)[:length]
    _mix(made)
    made &= _MASK
    made.flags.writeable = False
    return made


def join(*parts: TokenArray) -> TokenArray:
    """Return the concatenated parts as a read-only array."""
    joined = np.concatenate(parts)
    joined.flags.writeable = False
    return joined


def _mix(z: npt.NDArray[np.uint64]) -> None:
    """Apply the output function of splitmix64 in place."""
    z ^= z >> np.uint64(30)
    z *= _FIRST
    z ^= z >> np.uint64(27)
    z *= _SECOND
    z ^= z >> np.uint64(31)
