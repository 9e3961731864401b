"""Identities, namespaces, page keys and object keys, which bind cached bytes to their meaning.

    namespace     = BLAKE3(canonical msgpack(identity))
    page key d[i] = BLAKE3(key = namespace, d[i-1] || tokens of page i as little-endian u64 || extra)
    layout        = BLAKE3(canonical msgpack([pool, geometry fingerprint, shard]))
    object key    = layout || page key
    parked key[i] = BLAKE3(key = BLAKE3(key = namespace, canonical msgpack([scheme, id, extra]) || tokens), i)

`||` joins bytes, and d[-1] is 32 zero bytes. Page keys are 32 bytes and never truncated. All ranks have the
same namespace and therefore the same page keys; a rank's shard is part of the layout.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields
from functools import partial
from hashlib import sha256
from itertools import repeat
from typing import Final

import msgpack
import numpy as np
from blake3 import blake3

from tiercache.core import ObjectKey, PoolName, TokenArray, as_tokens
from tiercache.errors import InputError

KEY_BYTES: Final = 32
KEY_SCHEME: Final = 1
"""Version of everything in this module.

Every namespace and every layout contains the version, so that a changed scheme never reads what an older one
wrote.
"""

_ROOT: Final = bytes(KEY_BYTES)
"""Digest that takes the place of a parent's key for the first page of a sequence."""


@dataclass(frozen=True, slots=True)
class Identity:
    """Everything on which a cached byte depends, apart from the tokens and the pool's geometry."""

    model: str
    revision: str
    weights_dtype: str
    kv_dtype: str
    state_dtype: str
    page_size: int
    """Tokens per page."""
    quantization: str = ""
    tenant: str = ""
    """Label that operators see for the tenant."""
    salt: bytes = b""
    """Secret that separates tenants. It never leaves the process."""

    def __post_init__(self) -> None:
        if self.page_size < 1:
            raise InputError(
                f"page size {self.page_size} is not possible; use a positive number of tokens, such as 64"
            )

    def public_record(self) -> dict[str, str | int]:
        """Return everything but the salt, for a store's catalog and for `inspect`."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "salt"} | {
            "key_scheme": KEY_SCHEME
        }


def _canonical(value: object) -> bytes:
    packed: bytes = msgpack.packb(value, use_bin_type=True)
    return packed


def namespace_of(identity: Identity) -> bytes:
    """Return the 32-byte namespace of an identity. Only identities with equal fields share a namespace."""
    pairs = sorted((f.name, getattr(identity, f.name)) for f in fields(identity))
    return blake3(_canonical(["tiercache.namespace", KEY_SCHEME, pairs])).digest()


def sequence_extra(adapter: str = "", images: tuple[bytes, ...] = ()) -> bytes:
    """Return the `extra` bytes of a sequence, which stand for its adapter and its images.

    `adapter` has the name and revision of the adapter, `images` the digests of the images in order.

    The bytes are empty for a sequence without adapter and images. Each part is encoded with its length, so
    that different arguments have different bytes.
    """
    if not adapter and not images:
        return b""
    return _canonical([adapter, list(images)])


def page_keys(
    namespace: bytes, tokens: TokenArray, page_size: int, parent: bytes = b"", extra: bytes = b""
) -> list[bytes]:
    """Return the chained keys of all whole pages of `tokens`.

    The tokens follow the page with the key `parent`. If `parent` is empty, the tokens begin the sequence.

    `extra` comes from `sequence_extra` and must be the same for the whole sequence. The call takes about 1 us
    a page. Tokens that are no `TokenArray` are made one (`as_tokens`).
    """
    # Input of one page's hash, keyed with the namespace:
    #   | parent's digest | tokens of the page | length of extra | extra |       the last two only with extra
    #   | 32 bytes        | 8 bytes each       | 4 bytes         |       |
    tail = len(extra).to_bytes(4, "little") + extra if extra else b""
    tokens = as_tokens(tokens)
    data = tokens.view(np.uint8).data
    step = page_size * 8
    fresh = blake3(key=namespace).copy  # a copy takes 0.2 us, a new keyed hasher 0.4 us
    keys: list[bytes] = []
    digest = parent or _ROOT
    for start in range(0, len(tokens) // page_size * step, step):
        hasher = fresh()
        hasher.update(digest)
        hasher.update(data[start : start + step])
        if tail:
            hasher.update(tail)
        digest = hasher.digest()
        keys.append(digest)
    return keys


def sglang_mask(namespace: bytes) -> bytes:
    """Return the 32 bytes that turn SGLang's hash of a prefix into a page key of the namespace, by XOR."""
    return blake3(b"tiercache.sglang.mask" + namespace).digest()


def sglang_page_keys(namespace: bytes, tokens: TokenArray, page_size: int) -> list[bytes]:
    """Return the keys of all whole pages of `tokens` as the plug-in for SGLang makes them.

    SGLang's hash of a page is the SHA-256 of the hash before it and of the tokens as little-endian u32.
    Tokens that are longer have no such keys.
    """
    if len(tokens) and int(tokens.max()) >= 2**32:
        return []
    data, step = tokens.astype("<u4").tobytes(), 4 * page_size
    mask, digest, keys = int.from_bytes(sglang_mask(namespace)), b"", []
    for start in range(0, len(tokens) // page_size * step, step):
        digest = sha256(digest + data[start : start + step]).digest()
        keys.append((int.from_bytes(digest) ^ mask).to_bytes(KEY_BYTES))
    return keys


def parked_keys(namespace: bytes, ticket: bytes, tokens: TokenArray, extra: bytes, pages: int) -> list[bytes]:
    """Return the keys of the pages of one parked request, the last page included if it is not full.

    `ticket` are the random bytes that name the request. Without them, nobody can compute these keys from the
    tokens, so no prompt finds the pages. With other tokens or another namespace the keys are others, too.
    """
    root = blake3(_canonical(["tiercache.parked", KEY_SCHEME, ticket, extra]), key=namespace)
    root.update(tokens.view(np.uint8).data)
    key = root.digest()
    return [blake3(i.to_bytes(8, "little"), key=key).digest() for i in range(pages)]


@dataclass(frozen=True, slots=True)
class Shard:
    """Part of an object that a rank holds.

    `Shard()` stands for the whole object: there is a single rank, or all ranks hold the same bytes.
    """

    rank: int = 0
    size: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.size:
            raise InputError(f"rank {self.rank} of {self.size} is not possible; ranks go from 0 to size - 1")

    def __str__(self) -> str:
        return f"{self.rank}/{self.size}" if self.size > 1 else "replicated"


def layout_digest(pool: PoolName, fingerprint: bytes, shard: Shard) -> bytes:
    """Return the 32 bytes that stand for pool, geometry and shard in an object key.

    `fingerprint` is that of the geometry.
    """
    return blake3(_canonical(["tiercache.layout", KEY_SCHEME, str(pool), fingerprint, str(shard)])).digest()


def object_key(pool: PoolName, layout: bytes, page_key: bytes) -> ObjectKey:
    """Return the key under which a store keeps the object of `pool` that ends on the page with `page_key`."""
    return ObjectKey(pool, layout + page_key)


def object_keys(pool: PoolName, layout: bytes, page_keys: Iterable[bytes]) -> list[ObjectKey]:
    """Return `object_key` of each page key.

    This takes a third less time than one call of `object_key` per page. Large queries spend most of their
    time here.
    """
    return list(map(_new_key, zip(repeat(pool), [layout + key for key in page_keys], strict=False)))


_new_key: Final[Callable[[tuple[PoolName, bytes]], ObjectKey]] = partial(tuple.__new__, ObjectKey)
"""Makes an ObjectKey of a (pool, digest) pair, without a call of a Python function."""
