"""Configurations that `config check` and `serve` refuse in the same words, without writing anything."""

from __future__ import annotations

import os
import socket
import threading
from errno import EIO
from pathlib import Path
from typing import Any

import pytest

from tests.cli.store.test_samples import call
from tiercache.cli import readiness
from tiercache.cli.readiness import warnings_about as check
from tiercache.config.loading import load
from tiercache.errors import ConfigError, StorageError
from tiercache.memory import read_memory
from tiercache.storage import open_backend
from tiercache.testing.objects import key, payload, to_set

DISK = 'disk_bytes = "16MiB"\n'


def tree(directory: Path) -> list[str]:
    return sorted(str(path.relative_to(directory)) for path in directory.rglob("*"))


def both(file: Path, code: int) -> str:
    """The sentence that both say; the directory is as it was."""
    before = tree(file.parent)
    checked = call("config", "check", file, ok=code)
    assert checked.out == ""
    assert checked.err.count("\n") == 1
    sentence = checked.err.removeprefix("tiercache: ").removeprefix(f"{file}: ")
    served = call("serve", "--config", file, ok=code)
    assert served.out == ""
    assert served.err.removeprefix("tiercache: ").removeprefix(f"{file}: ") == sentence
    assert tree(file.parent) == before
    return sentence


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            'storage = "file://{}/s?capacity=64MiB&colour=red"',
            "storage: type 'file' has no setting 'colour'; it has access, capacity",
        ),
        ('storage = "file://{}/s?capacity=1KiB"', "a store cannot work in a capacity of 1024 bytes"),
        ('storage = "file://{}/s?capacity=64MiB&access=read"', "access=read changes nothing"),
        ('storage = "file://{}/s?capacity=64MiB&mac_key={}/none"', "none"),
        ('storage = "memory://?capacity=900TiB"', "cannot be allocated: the memory of this machine"),
        ('storage = "grpc://?timeout=2s"', "needs an address or a directory of sockets"),
        ('storage = "lmbd://{}/s"', "storage: type 'lmbd' is unknown"),
        (
            'storage = ["memory://", "file://{}/s?capacity=64MiB&colour=red&tier_name=disk"]',
            "storage: tier 'disk': storage type 'file' has no setting 'colour'",
        ),
        (
            'storage = ["memory://?capacity=600TiB", "memory://?capacity=600TiB"]',
            "storage: capacity 600TiB and storage: capacity 600TiB cannot be allocated",
        ),
        ('storage = ["memory://", "lmdb://{}/s?capacity=200TiB"]', "storage: capacity 200TiB does not fit"),
        ('directory = "{}/file/x"\n' + DISK, "file is not one; name another path"),
        ('directory = "{}/d"\nsockets = "{}/file/run"\n' + DISK, "sockets: "),
        ('directory = "{}/taken"\n' + DISK, "taken/store is not empty and holds no tiercache store"),
        ('directory = "{}/d"\ndisk_bytes = "900PiB"', "disk_bytes 900PiB does not fit: the disk of "),
        ('directory = "{}/d"\nhost_bytes = "800TiB"\n' + DISK, "host_bytes 800TiB cannot be allocated: "),
        (
            'directory = "{}/d"\nlisten = ["localhost:0"]\n[tls]\ncertificate = "{}/file"\nkey = "{}/secret"',
            "holds no certificate; name a PEM file",
        ),
    ],
)
def test_what_a_setting_says_is_exit_code_2(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "file").write_text("x")
    (tmp_path / "secret").write_text("x")
    (tmp_path / "secret").chmod(0o600)
    (tmp_path / "taken/store").mkdir(parents=True)
    (tmp_path / "taken/store/photo.jpg").write_text("x")
    file = tmp_path / "node.toml"
    file.write_text(text.replace("{}", str(tmp_path)))
    assert sentence in both(file, 2)


@pytest.mark.parametrize("where", ["listen", "http"])
def test_a_port_in_use_is_exit_code_1(tmp_path: Path, where: str) -> None:
    file = tmp_path / "node.toml"
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        lines = {"listen": f'listen = ["{address}"]', "http": f'[http]\nlisten = "{address}"'}
        file.write_text(f'directory = "{tmp_path}/d"\n{DISK}{lines[where]}\n')
        assert f"{address} cannot be served (Address already in use)" in both(file, 1)
        assert call("config", "check", "--no-ports", file).out.startswith(f"{file}: fine")
    assert call("config", "check", file).out.startswith(f"{file}: fine")


def checked(tmp_path: Path, **settings: Any) -> list[str]:
    """The warnings about a daemon of a small store, with more settings."""
    small = {"directory": f"{tmp_path}/d", "disk_bytes": "16MiB"}
    return check(load(None, small | settings))


def test_addresses_that_cannot_be_served(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port = found.getsockname()[1]
    with pytest.raises(StorageError, match="Address already in use"):
        checked(tmp_path, listen=[f"127.0.0.1:{port}", f"localhost:{port}"])
    with pytest.raises(StorageError, match="is the port in use, or the address not of this machine"):
        checked(tmp_path, listen=["192.0.2.1:7070"], insecure_bind=True)
    with pytest.raises(StorageError, match=r"the host nowhere\.invalid is unknown"):
        checked(tmp_path, listen=["nowhere.invalid:7070"], insecure_bind=True)


def test_a_store_of_another_kind(tmp_path: Path) -> None:
    open_backend(f"file://{tmp_path}/s?capacity=16MiB").close()
    with pytest.raises(StorageError, match=r"holds a store of kind tiercache\.file, not tiercache\.lmdb"):
        check(load(None, {"storage": f"lmdb://{tmp_path}/s?capacity=16MiB", "directory": f"{tmp_path}/d"}))


def test_a_directory_of_others(tmp_path: Path) -> None:
    (tmp_path / "closed").mkdir(mode=0o500)
    me = os.geteuid()
    try:
        if me == 0:
            os.seteuid(65534)  # root may write everywhere
        with pytest.raises(ConfigError, match=r"directory: .* cannot be made in .* by this user"):
            checked(tmp_path, directory=f"{tmp_path}/closed/d")
    finally:
        os.seteuid(me)


def test_more_than_is_free_is_a_warning(tmp_path: Path) -> None:
    disk = os.statvfs(tmp_path)
    size, free = disk.f_blocks * disk.f_frsize, disk.f_bavail * disk.f_frsize
    said = checked(tmp_path, disk_bytes=(size + free) // 2)
    assert [line for line in said if "disk_bytes is" in line]
    assert read_memory().available < read_memory().ceiling


@pytest.mark.parametrize("kind", ["file", "lmdb"])
@pytest.mark.parametrize("first", ["900PiB", "200TiB", "90TiB"])
def test_a_directory_opens_after_somebody_wanted_too_much(tmp_path: Path, kind: str, first: str) -> None:
    url = f"{kind}://{tmp_path}/s?capacity="
    try:
        open_backend(url + first).close()
    except ConfigError:
        assert not (tmp_path / "s").exists()
    if kind == "lmdb" and (tmp_path / "s").exists():
        assert first == "90TiB"
    with open_backend(url + "64MiB") as store:
        outcomes = store.set([to_set(key(f"p{n}"), payload(f"p{n}", 4096)) for n in range(20)])
        assert {str(outcome) for outcome in outcomes} == {"stored"}
        assert store.usage().capacity_bytes == 64 << 20
    with open_backend(url + "64MiB") as store:
        assert all(store.exists([key(f"p{n}") for n in range(20)]))


def test_nothing_is_held_after_a_check(tmp_path: Path) -> None:
    threads, descriptors = threading.active_count(), len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        checked(tmp_path, listen=["127.0.0.1:0"], http={"listen": "127.0.0.1:0"})
    assert (threading.active_count(), len(os.listdir("/proc/self/fd"))) == (threads, descriptors)
    assert tree(tmp_path) == []


@pytest.mark.parametrize("sickness", ["hangs", "fails"])
def test_a_disk_that_is_sick_costs_a_chain_its_tier_and_not_the_start(tmp_path, monkeypatch, sickness):
    over, statvfs = threading.Event(), os.statvfs

    def sick(path: str) -> os.statvfs_result:
        if not str(path).startswith(f"{tmp_path}/sick"):
            return statvfs(path)
        if sickness == "hangs":
            over.wait(60)
        raise OSError(EIO, "the disk is gone")

    monkeypatch.setattr(os, "statvfs", sick)
    # private: nobody has to wait for the ten seconds that a real disk gets
    monkeypatch.setattr(readiness, "_TIER_S", 0.2)
    (tmp_path / "sick").mkdir()
    urls = [f"file://{tmp_path}/{name}?capacity=16MiB&tier_name={name}" for name in ("sick", "well")]
    said = check(load(None, {"storage": urls}), ports=False)
    assert [line for line in said if f"{tmp_path}/sick is left out until it answers" in line]
    over.set()
