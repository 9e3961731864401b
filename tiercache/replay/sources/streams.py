"""Token ids and random generators as pure functions of their purpose.

A token is a hash (splitmix64) of a stream's key and the token's position in it, so that any slice of any stream can be made again without
keeping it, and two streams have no page in common.
"""

from __future__ import annotations

from hashlib import blake2b
from typing import Final

import numpy as np
import numpy.typing as npt

from tiercache.core import TokenArray

VOCABULARY: Final = 2**17
"""Number of token ids: every id is below this."""

_GOLDEN: Final = np.uint64(0x9E3779B97F4A7C15)
_FIRST: Final = np.uint64(0xBF58476D1CE4E5B9)
_SECOND: Final = np.uint64(0x94D049BB133111EB)
_MASK: Final = np.uint64(VOCABULARY - 1)


def key_of(*parts: int | str) -> int:
    """Return the 64-bit key of the stream that `parts` name."""
    return int.from_bytes(blake2b(repr(parts).encode(), digest_size=8).digest(), "little")


def rng_of(*parts: int | str) -> np.random.Generator:
    """Return a fresh random generator for the purpose that `parts` name."""
    return np.random.default_rng(key_of(*parts))


def tokens(key: int, length: int) -> TokenArray:
    """Return the first `length` tokens of a stream; the array and all views of it are read-only."""
    made = np.arange(1, length + 1, dtype=np.uint64)
    made *= _GOLDEN
    made += np.uint64(key)
    _mix(made)
    made &= _MASK
    made.flags.writeable = False
    return made


def expand(ids: npt.NDArray[np.uint64], block: int, length: int, salt: int = 0) -> TokenArray:
    """Return `block` tokens for each id, one id after the other, cut to `length`; read-only.

    The tokens depend on the id and on `salt` alone.
    """
    keys = ids * _GOLDEN + np.uint64(salt)
    _mix(keys)
    made = (keys[:, None] + np.arange(1, block + 1, dtype=np.uint64) * _GOLDEN).reshape(-1)[:length]
    _mix(made)
    made &= _MASK
    made.flags.writeable = False
    return made


def join(*parts: TokenArray) -> TokenArray:
    """Concatenate the parts; the result is read-only."""
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
