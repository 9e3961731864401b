"""Checks, before the store is opened, that a configuration can be served on this machine now.

Each check yields warnings, and raises ConfigError for a wrong setting, or StorageError for a condition of
this machine, such as a port in use. Nothing is written.
"""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import replace
from errno import EADDRINUSE
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiercache.cli.store.target import LOCAL, listener
from tiercache.cli.terminal import clean
from tiercache.config.document import every_setting
from tiercache.config.files import check_files
from tiercache.config.rules import warnings
from tiercache.config.urls import SOCKETS, section_of
from tiercache.daemon.certificates import check_certificates
from tiercache.errors import ConfigError, StorageError
from tiercache.memory import read_memory
from tiercache.storage.guard import Guard
from tiercache.storage.registry import capabilities_of, check_backend, check_shares
from tiercache.storage.shares import Shares, limits_of
from tiercache.storage.tiers import is_read_only
from tiercache.text import exact_size, parse_size, readable_size

if TYPE_CHECKING:
    from tiercache.config.models import Settings
    from tiercache.config.urls import Address

_TIER_S: Final = 10.0
"""Seconds within which the directory of a chain's tier must answer."""
_BACKLOG: Final = 1
"""Maximum number of waiting connections at a port that is bound only for the check."""


def warnings_about(settings: Settings, *, files: bool = True, ports: bool = True) -> list[str]:
    """Check that a configuration can be served here now, for `config check` and `serve`; return warnings.

    `files`, `ports`: also check files with secrets and certificates, and that addresses and sockets are free.
    """
    checks: list[Callable[[Settings], Iterable[str] | None]] = [
        *([check_files, check_certificates] if files else []),
        check_directories, check_sockets, check_store, warnings, check_variables, check_memory, check_quotas,
        *([check_ports] if ports else []),
    ]  # fmt: skip
    return [warning for check in checks for warning in check(settings) or ()]


def require_disk(path: Path, name: str, capacity: int) -> Iterator[str]:
    """Raise ConfigError if a capacity exceeds the size of the store's disk.

    Yields a warning if the capacity exceeds the space that is free now. Bytes that the store already occupies
    count as free.
    """
    there = _existing(path)
    found = os.statvfs(there)
    size, free = found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize
    disk = f"the disk of {clean(str(there))} has"
    if size and capacity > size:
        raise ConfigError(
            f"{name} {exact_size(capacity)} does not fit: {disk} {readable_size(size)}; give less, or use"
            " another disk"
        )
    held = 0
    for root, _, names in os.walk(path):
        for name in names:
            with suppress(OSError):  # a store in use makes and removes files
                # stat(2): st_blocks counts units of 512 bytes.
                held += os.lstat(os.path.join(root, name)).st_blocks * 512
    if size and capacity > free + held:
        yield f"{name} is {exact_size(capacity)}, and {disk} only {readable_size(free + held)} for it now"


def check_variables(_: Settings) -> Iterator[str]:
    """Yield a warning for each variable that is named like a setting, because none is read."""
    for name, _default, _description in every_setting():
        variable = f"TIERCACHE_{name.upper().replace('.', '_')}"
        if variable in os.environ:
            yield f"{variable} is not read; set {name} in the file, or by a flag of `tiercache serve`"


def check_memory(settings: Settings) -> Iterator[str]:
    """Yield a warning if the memory that is free now does not hold what the settings ask for.

    Raises ConfigError if the memory of this machine never will.
    """
    sections = map(section_of, settings.store_urls)
    capacities = [section.get("capacity") for section in sections if section["type"] == "memory"]
    stored = [("storage: capacity", parse_size(capacity)) for capacity in capacities if capacity]
    wanted = [("host_bytes", settings.host_bytes), *stored]
    found, total = read_memory(), sum(nbytes for _, nbytes in wanted)
    if found.ceiling is not None and total > found.ceiling:
        names = " and ".join(f"{name} {exact_size(nbytes)}" for name, nbytes in wanted if nbytes)
        whose = (
            "the limit of this container" if found.ceiling == found.tightest else "the memory of this machine"
        )
        raise ConfigError(
            f"{names} cannot be allocated: {whose} is {readable_size(found.ceiling)}; give less"
        )
    if found.available and total > found.available:
        yield (
            f"{readable_size(total)} of memory are needed, and {readable_size(found.available)} are free on"
            " this machine now"
        )


def check_directories(settings: Settings) -> Iterator[str]:
    """Yield warnings about the directories of local stores, and about the room on their disks.

    Raises ConfigError if a directory cannot be made, or a disk is smaller than its store's capacity.
    """
    setting = "storage" if settings.storage else "directory"
    sections = [section_of(url) for url in settings.store_urls]
    for section in sections:
        if section["type"] in LOCAL and "path" in section:
            check = partial(_directory, section, setting)
            yield from check() if len(sections) == 1 else _tier(check, section["path"])


def check_store(settings: Settings) -> None:
    """Check the options of the storage URL, and what each type of store checks by itself."""
    try:
        check_backend(settings.store_url)
    except (ConfigError, StorageError) as error:
        setting = "storage" if settings.storage else "directory"
        error.args = (f"{setting}: {str(error).removeprefix('storage ')}",)
        raise


def check_quotas(settings: Settings) -> Iterator[str]:
    """Yield a warning for each tier in which the quotas of tenants do not count.

    Raises ConfigError if the store cannot keep the quotas and guarantees.
    """
    shares = Shares(lambda _: "", limits_of(settings.tenants))
    check_shares(settings.store_url, shares)
    for section in map(section_of, settings.store_urls if shares.is_limiting else ()):
        if not capabilities_of(section).shares:
            yield (
                f"quotas and guarantees of tenants do not count what a tier of type {section['type']} holds;"
                " leave that tier out if they must"
            )


def _directory(section: Mapping[str, str], setting: str) -> list[str]:
    """Return warnings about the directory of a local store, and about the room on its disk."""
    path = Path(section["path"])
    if not is_read_only(section):
        require_place(path, setting)
    try:
        capacity = parse_size(section["capacity"])
    except (KeyError, ConfigError):
        # There is no capacity, or it is "kept" (the capacity that the store already has), or it is malformed.
        # `check_backend` reports a malformed capacity.
        return []
    return list(require_disk(path, "disk_bytes" if setting == "directory" else "storage: capacity", capacity))


def _tier(check: Callable[[], list[str]], path: str) -> list[str]:
    """Return the warnings of a tier's check; a disk that fails or hangs is one, as the chain serves on."""
    guard = Guard("readiness", 1, _TIER_S)
    try:
        return guard.begin("a look at its disk", check).result()
    except OSError as error:
        return [f"storage: {clean(path)} is left out until it answers ({error})"]
    finally:
        guard.close()


def check_sockets(settings: Settings) -> None:
    """Raise ConfigError unless the unix sockets can be in their directory.

    If the directory does not exist, this user must be able to create it. If it exists, it must belong to this
    user and must not be a symbolic link. A file in it that has the name of a socket must be a socket.
    """
    if not settings.unix:
        return
    directory = settings.socket_directory
    require_place(directory, "sockets")
    if os.path.lexists(directory) and (os.path.islink(directory) or directory.stat().st_uid != os.getuid()):
        raise ConfigError(
            f"sockets: {clean(str(directory))} is not a directory of this user's; remove it, or name"
            " another one"
        )
    for name in SOCKETS:
        path = directory / name
        if os.path.lexists(path) and not stat.S_ISSOCK(os.lstat(path).st_mode):
            raise ConfigError(
                f"sockets: {clean(str(path))} is no socket; remove it, or name another directory"
            )


def require_place(path: Path, setting: str) -> None:
    """Raise ConfigError unless `path` is, or can become, a directory to which this user can write.

    `setting` is the setting's name in the message.
    """
    existing = _existing(path)
    there, shown = clean(str(existing)), clean(str(path))
    if not existing.is_dir():
        raise ConfigError(
            f"{setting}: {shown} cannot be a directory, because {there} is not one; name another path, or"
            " move that file away"
        )
    if not os.access(existing, os.W_OK | os.X_OK, effective_ids=True):
        what = "cannot be written" if os.path.lexists(path) else f"cannot be made in {there}"
        raise ConfigError(
            f"{setting}: {shown} {what} by this user; run this as the daemon's user, or give that user the"
            " directory"
        )


def check_ports(settings: Settings) -> None:
    """Raise StorageError if an address is in use, or if a daemon answers on the sockets.

    All addresses are bound together and then released together. So a collision of two addresses is found too.
    """
    if settings.unix:
        alive, pid = listener(str(settings.socket_directory))
        if alive:
            who = f" (process {pid})" if pid else ""
            raise StorageError(
                f"sockets: another daemon serves {clean(str(settings.socket_directory))}{who};"
                " stop it, or give this one a directory of its own"
            )
    # After this check, another process may still take a port before the daemon binds it.
    with ExitStack() as taken:
        for address in settings.addresses:
            _bind(address, "", taken)
        if settings.data_port:
            for address in {address.host: address for address in settings.addresses}.values():
                _bind(replace(address, port=settings.data_port), "data_port: ", taken)
        if settings.http.address is not None:
            _bind(settings.http.address, "http.listen: ", taken)


def _bind(address: Address, setting: str, taken: ExitStack) -> None:
    """Bind an address on every family (IPv4, IPv6) of its host, until `taken` is closed.

    Raises StorageError if the port is in use in any family, or if no family can be bound.
    """
    error: OSError | None = None
    bound = False
    try:
        places = {
            (family, where)
            for family, _, _, _, where in socket.getaddrinfo(
                address.host, address.port, type=socket.SOCK_STREAM
            )
        }
    except (OSError, UnicodeError) as unknown:
        raise StorageError(
            f"{setting}{address} cannot be served: the host {address.host} is unknown; give an address"
            " of this machine"
        ) from unknown
    for family, where in sorted(places):
        try:
            taken.enter_context(socket.create_server(where[:2], family=family, backlog=_BACKLOG))
            bound = True
        except OSError as refused:
            error = refused if error is None or refused.errno == EADDRINUSE else error
    if error is not None and (not bound or error.errno == EADDRINUSE):
        raise StorageError(
            f"{setting}{address} cannot be served ({os.strerror(error.errno or 0)}); is the port in use, or"
            " the address not of this machine?"
        ) from error


def _existing(path: Path) -> Path:
    """Return the path itself if it exists, else its nearest parent that exists."""
    path = Path(os.path.abspath(path))
    return next(above for above in (path, *path.parents) if os.path.lexists(above))
