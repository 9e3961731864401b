"""Settings, the library that may be missing, and a master that cannot be reached: one clear sentence each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from tiercache_backends.mooncake.settings import read_settings

from tests.storage_backends.mooncake.rig import require
from tiercache.config.urls import section_of
from tiercache.errors import ConfigError, UnavailableError
from tiercache.storage import open_backend
from tiercache.storage.base import NamespaceRecord
from tiercache.testing.objects import NAMESPACE, key, payload, put, to_get


def settings(query: str, address: str = "10.0.0.1:50051") -> Any:
    section = section_of(f"mooncake://{address}?{query}")
    del section["type"]
    return read_settings(section)


def test_all_of_them() -> None:
    found = settings(
        "prefix=p&segment=1GiB&replicas=2&state_replicas=3&tenant=t&deadline=500ms&hostname=10.0.0.2"
        "&protocol=rdma&devices=mlx5_0,mlx5_1&metadata=http://10.0.0.1:8080/metadata&http=10.0.0.1:9003"
        "&staging=8MiB&threads=2"
    )
    assert (found.segment, found.replicas, found.state_replicas, found.deadline) == (1 << 30, 2, 3, 0.5)
    assert (found.devices, str(found.http), found.staging) == ("mlx5_0,mlx5_1", "10.0.0.1:9003", 8 << 20)
    assert str(found) == "mooncake://10.0.0.1:50051?prefix=p"


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ("devices=mlx5_0", "are for RDMA; add protocol=rdma"), ("replicas=3", "set state_replicas to 3"),
        ("segment=1GiB&hostname=127.0.0.1", "other hosts cannot reach"), ("prefix=a/b", "is no name"),
        ("prefix=.%2A", "is no name"), ("metadata=nonsense", "P2PHANDSHAKE"),
        ("capacity=1GiB", "has no setting 'capacity'"),
    ],
)  # fmt: skip
def test_a_setting_that_cannot_be(query: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        settings(query)


def test_an_address_is_needed() -> None:
    with pytest.raises(ConfigError, match="needs 'address', as in mooncake:"):
        read_settings({})
    with pytest.raises(ConfigError, match="port 0"):
        settings("", "10.0.0.1:0")
    with pytest.raises(ConfigError, match="write prefix=main instead"):
        settings("", "10.0.0.1:50051/main")


@pytest.mark.parametrize(
    ("source", "says"),
    [
        (
            "raise ModuleNotFoundError(\"No module named 'mooncake'\", name='mooncake')",
            r"pip install .*mooncake",
        ),
        (
            "raise ImportError('libibverbs.so.1: cannot open shared object file')",
            "apt-get install libibverbs1",
        ),
        ("class MooncakeDistributedStore: pass", "install .* 0.3.13.post1 or later"),
    ],
)
def test_a_library_that_is_missing_or_old(source: str, says: str, tmp_path: Path) -> None:
    (tmp_path / "mooncake").mkdir()
    (tmp_path / "mooncake" / "__init__.py").touch()
    (tmp_path / "mooncake" / "store.py").write_text(source)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from tiercache.errors import ConfigError\n"
        "from tiercache_backends.mooncake.library import library\n"
        "try: library()\n"
        "except ConfigError as error: print(error)"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert re.search(says, ran.stdout), ran


def test_a_master_that_is_not_there() -> None:
    """The store opens, says what to do at every call, and keeps what it must register later."""
    require()
    with open_backend("mooncake://127.0.0.1:1?deadline=500ms&staging=1MiB") as store:
        store.register_namespace(NamespaceRecord(NAMESPACE, {"model": "m"}))
        assert [str(outcome) for outcome in store.get([to_get(key("a"), 10)])] == ["unavailable"]
        assert str(put(store, key("a"), payload("a", 10))) == "unavailable"
        for ask in (lambda: store.exists([key("a")]), store.namespaces, lambda: store.describe([key("a")])):
            with pytest.raises(
                UnavailableError, match=r"no master answers at 127\.0\.0\.1:1 .*start mooncake"
            ):
                ask()
