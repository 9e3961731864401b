"""Checksums and MACs that prove that stored bytes are the right ones.

The checksum that every object carries is xxh3-128 over the payload, then the object key. With the key mixed in, an object that is read from
another object's place fails as well. The key comes last, so that the payload goes through the hash in aligned strides. Measured at 18 GB/s
beside 7 GB/s of `preadv`. The checksum guards against accidents. Against an attacker who can write the medium, a `Seal` with a key adds a
MAC.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterable, Sequence
from typing import Any, Final, NamedTuple

from blake3 import blake3
from xxhash import xxh3_128

from tiercache.core import ObjectKey
from tiercache.errors import ConfigError, StoreFormatError
from tiercache.storage.env import Env, let_go
from tiercache.storage.vectors import read_all, take

CHECKSUM_BYTES: Final = 16
MAC_BYTES: Final = 16
NO_MAC: Final = bytes(MAC_BYTES)

_MAC_CONTEXT: Final = "tiercache 2026-11-20 object mac"
_FINGERPRINT_CONTEXT: Final = "tiercache 2026-11-20 mac key fingerprint"
_LENGTH: Final = struct.Struct("<Q")
_KEY_FILE_BYTES: Final = (32, 4096)


class Checksum:
    """The checksum of one object whose payload comes piece by piece.

    Thread safety: one thread.
    """

    __slots__ = ("_hasher",)

    def __init__(self) -> None:
        self._hasher = xxh3_128()

    def add(self, views: Iterable[memoryview]) -> None:
        """Add the next bytes of the payload."""
        for view in views:
            self._hasher.update(view)

    def seal(self, key: ObjectKey) -> bytes:
        """Return the 16 bytes for what was added, under `key`; nothing can be added after that."""
        self._hasher.update(key.digest)
        return self._hasher.digest()


def checksum(key: ObjectKey, buffers: Sequence[memoryview], length: int) -> bytes:
    """Return the 16-byte checksum of the first `length` bytes of `buffers` under `key`."""
    whole = Checksum()
    whole.add(take(buffers, 0, length))
    return whole.seal(key)


class Sealed(NamedTuple):
    """Checksum and MAC that a store keeps of an object, to know its bytes again."""

    checksum: bytes
    mac: bytes


class Proof:
    """Running checksum and MAC of an object whose payload comes piece by piece: sealed after a write, compared after a read.

    Thread safety: one thread at a time.
    """

    __slots__ = ("_key", "_mac", "_sum")

    def __init__(self, key: ObjectKey, mac: blake3 | None = None) -> None:
        self._key = key
        self._sum = Checksum()
        self._mac = mac

    def add(self, views: Sequence[memoryview]) -> None:
        """Add the next bytes of the payload."""
        self._sum.add(views)
        if self._mac is not None:
            for view in views:
                self._mac.update(view)

    def seal(self) -> Sealed:
        """Return the seal of the bytes that were added. Nothing can be added after that."""
        return Sealed(self._sum.seal(self._key), NO_MAC if self._mac is None else self._mac.digest(MAC_BYTES))

    def holds(self, sealed: Sealed) -> bool:
        """Return whether the bytes that were added are those of `sealed`. Nothing can be added after that.

        Without a MAC key of its own the proof ignores the MAC.
        """
        found = self.seal()
        return found.checksum == sealed.checksum and (self._mac is None or found.mac == sealed.mac)


class Seal:
    """Maker of keyed BLAKE3 MACs over key, length and payload, with which objects are stamped and checked at every read.

    Without a key it makes no MACs and checks none. The MAC is a second pass over the payload, at some 3 to 6 GB/s.

    Thread safety: immutable; share it freely.
    """

    def __init__(self, secret: bytes | None = None) -> None:
        self._key = None if secret is None else blake3(secret, derive_key_context=_MAC_CONTEXT).digest()
        self.fingerprint: Final = None if secret is None else blake3(secret, derive_key_context=_FINGERPRINT_CONTEXT).hexdigest(8)
        """Hexadecimal name of the key that does not tell the key; None without a key."""

    @classmethod
    def from_file(cls, env: Env, path: str) -> Seal:
        """Make a seal with the key in a file of 32 to 4,096 bytes that only its owner can read. Raises ConfigError if it cannot."""
        try:
            return cls(_secret(env, path))
        except OSError as error:
            raise ConfigError(f"the MAC key in {path} cannot be read: {error.strerror}") from error

    def stamp(self, key: ObjectKey, buffers: Sequence[memoryview], length: int) -> bytes:
        """Return the 16 bytes to store beside an object; zeros without a key."""
        hasher = self._hasher(key, length)
        if hasher is None:
            return NO_MAC
        for view in take(buffers, 0, length):
            hasher.update(view)
        return hasher.digest(MAC_BYTES)

    def proof(self, key: ObjectKey, length: int) -> Proof:
        """Return a proof for an object of this length, to which its bytes are added as they pass."""
        return Proof(key, self._hasher(key, length))

    def match(self, settled: Any, path: str) -> None:
        """Raise StoreFormatError unless the store in `path`, whose format names the fingerprint `settled`, was made with this key."""
        if settled == self.fingerprint:
            return
        if settled is None:
            raise StoreFormatError(f"the store in {path} was made without a MAC key; leave mac_key away, or use another directory")
        if self.fingerprint is None:
            raise StoreFormatError(f"the store in {path} was made with a MAC key; give that key as mac_key, or use another directory")
        raise StoreFormatError(f"the store in {path} was made with another MAC key; give that one as mac_key, or use another directory")

    def _hasher(self, key: ObjectKey, length: int) -> blake3 | None:
        if self._key is None:
            return None
        hasher = blake3(key=self._key)
        hasher.update(key.digest + _LENGTH.pack(length))
        return hasher


def _secret(env: Env, path: str) -> bytes:
    fd = env.open(path, os.O_RDONLY)
    try:
        found = env.fstat(fd)
        least, most = _KEY_FILE_BYTES
        if not stat.S_ISREG(found.st_mode) or not least <= found.st_size <= most:
            raise ConfigError(f"the MAC key in {path} must be a file of {least} to {most:,} random bytes")
        if found.st_mode & 0o077:
            raise ConfigError(f"the MAC key in {path} can be read by others; make it private with chmod 600")
        raw = bytearray(found.st_size)
        read_all(env, fd, [memoryview(raw)], 0)
        return bytes(raw)
    finally:
        let_go(env, fd)
