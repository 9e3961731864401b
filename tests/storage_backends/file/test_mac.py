"""MACs of a `file` store, and the files of their keys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from tiercache_backends.file import FileBackend

from tests.storage.backends import locate
from tests.storage_backends.file.store import catalog_of
from tiercache.errors import ConfigError, StoreFormatError
from tiercache.storage import open_backend
from tiercache.storage.checksum import MacKey
from tiercache.testing.conformance.hooks import CORRUPT, STORED
from tiercache.testing.objects import fetch, key, payload, put, to_set

CAPACITY = 24 << 20


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(os.urandom(32))
    path.chmod(0o600)
    return path


def test_a_mac_finds_what_somebody_forged(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}"
    forged = payload("forged", 9000)
    with open_backend(url) as store:
        put(store, key("a"), payload("a", 9000))
        put(store, key("b"), payload("b", 9000))
    # Somebody who can write the directory replaces the bytes and makes the catalog agree with them.
    with FileBackend(str(tmp_path / "s"), CAPACITY, mac_key=MacKey(secret.read_bytes())) as store:
        [(path, offset, _)] = locate(store, key("a"))
        records = catalog_of(store).page(b"", 1 << 20)
        other = to_set(key("a"), forged).meta.checksum
        row = [r.tobytes() for r in records["digest"]].index(key("a").digest)
        records["checksum"][row] = other
        catalog_of(store).apply(records[row : row + 1], removals=[int(records["number"][row])])
    with Path(path).open("r+b") as file:
        file.seek(offset)
        file.write(forged)
    with open_backend(url) as store:
        assert fetch(store, key("a"), 9000) is CORRUPT
        assert fetch(store, key("b"), 9000) == payload("b", 9000)
        assert put(store, key("a"), payload("a", 9000)) is STORED
        assert fetch(store, key("a"), 9000) == payload("a", 9000)


def test_a_store_belongs_to_its_key(tmp_path: Path, secret: Path) -> None:
    other = tmp_path / "other"
    other.write_bytes(bytes(32))
    other.chmod(0o600)
    with open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}") as store:
        put(store, key("a"), b"x")
    with pytest.raises(StoreFormatError, match="another MAC key; give that one"):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={other}")
    with pytest.raises(StoreFormatError, match="was made with a MAC key; give"):
        open_backend(f"file://{tmp_path}/s?capacity=24MiB")
    open_backend(f"file://{tmp_path}/plain?capacity=24MiB").close()
    with pytest.raises(StoreFormatError, match="without a MAC key; omit"):
        open_backend(f"file://{tmp_path}/plain?capacity=24MiB&mac_key={secret}")
    assert str(secret.read_bytes().hex()) not in (tmp_path / "s" / "format").read_text()
    with open_backend(f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}") as store:
        assert fetch(store, key("a"), 1) == b"x"


def test_a_key_file_is_private_and_long_enough(tmp_path: Path, secret: Path) -> None:
    url = f"file://{tmp_path}/s?capacity=24MiB&mac_key={secret}"
    secret.chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others; make it private with chmod 600"):
        open_backend(url)
    secret.chmod(0o600)
    secret.write_bytes(b"short")
    with pytest.raises(ConfigError, match="must be a file of 32 to 4,096 random bytes"):
        open_backend(url)
    secret.unlink()
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        open_backend(url)
    assert not (tmp_path / "s").exists()
