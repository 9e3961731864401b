"""Checks that a configuration can be served on this machine now: all that `serve` requires before it opens the store.

`config check` prints what these checks find; `serve` runs the same checks and stops at an error, before anything is written.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from contextlib import ExitStack
from errno import EADDRINUSE
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiercache.cli.output import clean
from tiercache.cli.store.target import listener
from tiercache.config.files import check_certificates, check_files
from tiercache.config.machine import memory, place_of
from tiercache.config.quantities import parse_size, size_text
from tiercache.config.rules import SOCKETS, warnings
from tiercache.config.urls import section_of
from tiercache.errors import ConfigError, StorageError
from tiercache.storage.registry import check_backend

if TYPE_CHECKING:
    from tiercache.config.addresses import Address
    from tiercache.config.models import Settings

_LOCAL: Final = ("file", "lmdb")
_BACKLOG: Final = 1


def check(settings: Settings, *, files: bool = True, ports: bool = True) -> list[str]:
    """Return warnings about a configuration that can be served; raise an error for one that cannot.

    Raises ConfigError for a setting that is wrong, and StorageError for a condition of this machine, such as a port in use. `files`: also
    check secrets and certificates. `ports`: also try addresses and sockets, which fails while a daemon serves them. Leaves nothing behind.
    """
    if files:
        check_files(settings)
        check_certificates(settings)
    disk = [*_store(settings)]
    if settings.unix:
        _sockets(settings.socket_directory)
    try:
        check_backend(settings.store_url)
    except (ConfigError, StorageError) as error:
        raise type(error)(f"{'storage' if settings.storage else 'directory'}: {str(error).removeprefix('storage ')}") from error
    said = [*warnings(settings), *_memory(settings), *disk]
    if ports:
        _ports(settings)
    return said


def require_memory(*wanted: tuple[str, int]) -> Iterator[str]:
    """Raise ConfigError if the named byte counts exceed together what this machine can ever have.

    Yields a warning if they exceed the memory that is free at the moment.
    """
    wanted = tuple((name, nbytes) for name, nbytes in wanted if nbytes)
    found, total = memory(), sum(nbytes for _, nbytes in wanted)
    if found.most and total > found.most:
        names = " and ".join(f"{name} {size_text(nbytes)}" for name, nbytes in wanted)
        whose = "the limit of this container" if found.limit is not None and found.limit < found.total else "the memory of this machine"
        raise ConfigError(f"{names} cannot be had: {whose} is {_about(found.most)}; give less")
    if found.available and total > found.available:
        yield f"{_about(total)} of memory are more than the {_about(found.available)} that are free on this machine now"


def require_disk(path: Path, name: str, capacity: int) -> Iterator[str]:
    """Raise ConfigError if a capacity exceeds the size of the store's disk.

    Yields a warning if it exceeds the space that is free at the moment; bytes that the store holds already count as free.
    """
    place = place_of(path)
    size, free = place.disk_bytes()
    disk = f"the disk of {clean(str(place.there))} has"
    if size and capacity > size:
        raise ConfigError(f"{name} {size_text(capacity)} cannot be had: {disk} {_about(size)}; give less, or another disk")
    held = sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file()) if path.is_dir() else 0
    if size and capacity > free + held:
        yield f"{name} is {size_text(capacity)}, and {disk} only {_about(free + held)} for it now"


def _memory(settings: Settings) -> Iterator[str]:
    section = section_of(settings.store_url)
    stored = [("storage: capacity", parse_size(section["capacity"]))] if section["type"] == "memory" and "capacity" in section else []
    return require_memory(("host_bytes", settings.host_bytes), *stored)


def _store(settings: Settings) -> Iterator[str]:
    """Check that the directory of a local store can exist and that its disk has room for the store's capacity; yield warnings."""
    section = section_of(settings.store_url)
    if section["type"] not in _LOCAL or "path" not in section:
        return
    path, of_url = Path(section["path"]), bool(settings.storage)
    require_place(path, "storage" if of_url else "directory")
    try:
        capacity = parse_size(section["capacity"])
    except (KeyError, ConfigError):
        return  # no capacity that can be parsed: it is "kept", or the store reports the mistake
    yield from require_disk(path, "storage: capacity" if of_url else "disk_bytes", capacity)


def _sockets(directory: Path) -> None:
    """Raise ConfigError unless the unix sockets can lie in `directory`.

    It must be possible to create, or be a directory of this user and not a symbolic link, with nothing but sockets under their names.
    """
    require_place(directory, "sockets")
    if os.path.lexists(directory) and (os.path.islink(directory) or directory.stat().st_uid != os.getuid()):
        raise ConfigError(f"sockets: {clean(str(directory))} is not a directory of this user's; remove it, or name another one")
    for name in SOCKETS:
        path = directory / name
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(f"sockets: {clean(str(path))} is no socket; remove it, or name another directory")


def require_place(path: Path, setting: str) -> None:
    """Raise ConfigError if this user cannot have a writable directory at `path`; `setting` names it in the message."""
    place = place_of(path)
    there, shown = clean(str(place.there)), clean(str(path))
    if not place.is_directory:
        raise ConfigError(f"{setting}: {shown} cannot be a directory, because {there} is none; name another path, or move that away")
    if not place.can_be_written:
        what = "cannot be written" if place.there == place.path else f"cannot be made in {there}"
        raise ConfigError(f"{setting}: {shown} {what} by this user; run this as the daemon's user, or give that user the directory")


def _ports(settings: Settings) -> None:
    """Bind every address at the same time and release them; raise StorageError if one is taken or a daemon answers on the sockets."""
    if settings.unix:
        alive, pid = listener(str(settings.socket_directory))
        if alive:
            who = f" (process {pid})" if pid else ""
            raise StorageError(
                f"sockets: another daemon serves {clean(str(settings.socket_directory))}{who};"
                " stop it, or give this one a directory of its own"
            )
    # A check only: another process may still take a port before the daemon binds it.
    with ExitStack() as taken:
        for address in settings.addresses:
            _bind(address, "", taken)
        if settings.metrics.address is not None:
            _bind(settings.metrics.address, "metrics.listen: ", taken)


def _bind(address: Address, setting: str, taken: ExitStack) -> None:
    error: OSError | None = None
    bound = False
    try:
        places = {(family, where) for family, _, _, _, where in socket.getaddrinfo(address.host, address.port, type=socket.SOCK_STREAM)}
    except (OSError, UnicodeError) as unknown:
        raise StorageError(
            f"{setting}{address} cannot be served: nobody knows {address.host}; give an address of this machine"
        ) from unknown
    for family, where in sorted(places):
        try:
            taken.enter_context(socket.create_server(where[:2], family=family, backlog=_BACKLOG))
            bound = True
        except OSError as refused:
            error = refused if error is None or refused.errno == EADDRINUSE else error
    if error is not None and (not bound or error.errno == EADDRINUSE):
        raise StorageError(
            f"{setting}{address} cannot be served ({os.strerror(error.errno or 0)}); is the port in use, or not of this machine?"
        ) from error


def _about(nbytes: int) -> str:
    """Format a byte count that a user did not write, rounded to a tenth of the largest unit that fits."""
    value, unit = float(nbytes), "bytes"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if value >= 1024:
            value, unit = value / 1024, larger
    return f"{value:.1f} {unit}"
