"""Resolution of a verb's --store option: a URL, the directory of a stopped store, or the directory of a running daemon."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from errno import EACCES, EAGAIN, EPROTOTYPE
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from tiercache.cli.exits import UnreachableError
from tiercache.cli.output import clean
from tiercache.config import parse_size
from tiercache.config.urls import section_of
from tiercache.core import Reason
from tiercache.errors import ConfigError, RefusedError, StorageError, StoreFormatError, StoreLockedError
from tiercache.storage.base import StorageBackend
from tiercache.storage.registry import GROUP, open_backend
from tiercache.wire.methods import METHODS

DEFAULT_DIRECTORY: Final = "/var/lib/tiercache"
LIVE: Final = "grpc"
_LOCAL: Final = ("file", "lmdb")
_KEPT: Final = "kept"
"""The capacity with which a store is opened without changing its size."""
_LOOKED_AT: Final = "is being looked at"
"""A part of the StoreLockedError of a store that another process has open for reading."""
_FORMAT_BYTES: Final = 4096
"""Bytes of a file named format that are read at most."""
_CREDENTIALS: Final = struct.Struct("3i")
"""The value of SO_PEERCRED: ids of process, user and group."""


@dataclass(frozen=True, slots=True)
class Target:
    """A store that was found but is not open yet. `directory`: that of the store or of the daemon's sockets; empty if there is none."""

    name: str
    kind: str
    section: Mapping[str, Any] = field(repr=False)
    directory: str = ""
    owner: int | None = None
    """Id of the process that serves it, if its sockets report it."""

    @property
    def live(self) -> bool:
        """Whether the store is served by a daemon."""
        return self.kind == LIVE


def resolve(text: str, mac_key: str = "") -> Target:
    """Return the store that `text` names (empty: the default directory), unopened; raises ConfigError or StorageError."""
    if not text:
        if not os.path.isdir(DEFAULT_DIRECTORY):
            raise ConfigError(f"no store is named and {DEFAULT_DIRECTORY} does not exist; give --store a directory or a URL")
        text = DEFAULT_DIRECTORY
    return _of_url(text, mac_key) if "://" in text else _of_directory(text, mac_key)


@contextmanager
def opened(target: Target, *, change: bool = False) -> Iterator[StorageBackend]:
    """Open the store at its present size, without evicting anything; without `change`, nothing in it is written.

    This does not bind a daemon, which may write at any time. Raises UnreachableError if no daemon answers, RefusedError if the daemon does
    not serve this caller.
    """
    with _open(target, {"access": "write"} if change and target.kind in _LOCAL else {}) as store:
        try:
            yield store
        except RefusedError:
            raise
        except StorageError as error:
            check_reached(target, store, error)
            raise


def check_reached(target: Target, store: StorageBackend, cause: BaseException | None = None) -> None:
    """Raise UnreachableError if a daemon did not answer, RefusedError if it refused; many calls return empty results in these cases."""
    outage = store.outage() if target.live else Reason.NONE
    if outage is Reason.REFUSED:
        raise RefusedError(f"{target.name} refuses this; see which verbs its operator gave this principal: tiercache ping") from cause
    if outage is Reason.UNAVAILABLE:
        why = f": {clean(str(cause))}" if cause is not None else "; see whether the daemon runs, and under which address"
        raise UnreachableError(f"{target.name} does not answer{why}") from cause


def check_allowed(target: Target, store: StorageBackend, what: str, calls: Sequence[str]) -> None:
    """Raise RefusedError if the caller lacks a verb that one of these wire calls needs; to be called before the first of them."""
    ask = getattr(store, "ping", None) if target.live else None
    if not callable(ask):
        return
    found = ask()
    wanted = {str(verb) for name in calls if (verb := METHODS[name].verb) is not None}
    if missing := sorted(wanted - set(found.verbs)):
        raise RefusedError(
            f"{target.name}: {what} takes the verbs {', '.join(sorted(wanted))}, and {found.principal} lacks {' and '.join(missing)};"
            " nothing was changed, and the operator can add them"
        )


def _open(target: Target, more: Mapping[str, str]) -> StorageBackend:
    try:
        return open_backend({**target.section, **more})
    except StoreLockedError as error:
        if _LOOKED_AT in str(error):
            raise
        pid = _owner_of(target.directory)
        above = os.path.dirname(target.directory.rstrip("/"))
        if listener(os.path.join(above, "run"))[0]:
            raise StoreLockedError(
                f"{target.name} is in use by the daemon of process {pid}; give --store {clean(above)} to ask that"
            ) from error
        raise StoreLockedError(
            f"{target.name} is in use by process {pid or 'unknown'}, which does not share it; stop that one (kill {pid or 'PID'}), or if it"
            " is a daemon name its own directory or its grpc:// address"
        ) from error
    except StoreFormatError as error:
        if "mac_key" in str(error):
            raise ConfigError(str(error).replace("as mac_key", "with --mac-key").replace("leave mac_key", "leave --mac-key")) from error
        raise
    except StorageError as error:
        if target.live:
            raise UnreachableError(f"{target.name} does not answer: {clean(str(error))}") from error
        raise


def _of_url(url: str, mac_key: str) -> Target:
    section = section_of(url)
    kind = section["type"]
    if kind == "memory":
        raise ConfigError("--store memory:// is empty in every new process; name a directory, or a daemon as grpc://host:port")
    directory = section.get("path", "")
    if kind in _LOCAL:
        if "capacity" in section:
            parse_size(section["capacity"])
        if directory and not os.path.lexists(os.path.join(directory, "format")):
            raise ConfigError(f"{clean(directory)} holds no tiercache store; look for the directory that has a file named format")
        # These override the URL: opening a store must not resize it, and only some verbs may change it.
        section["capacity"] = _KEPT
        section.pop("access", None)
        if mac_key:
            section["mac_key"] = os.path.abspath(mac_key)
    elif mac_key:
        raise ConfigError("--mac-key belongs to a stopped store on this disk; a daemon has its own, so leave it away")
    # The part of the URL after the question mark may hold a token, so it is not shown.
    return Target(clean(url.partition("?")[0]), kind, section, directory)


def _of_directory(text: str, mac_key: str) -> Target:
    path = os.path.abspath(text)
    if not os.path.isdir(path):
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise ConfigError(f"--store {clean(text)} {what}; name the directory of a store or of a daemon, or a URL such as grpc://host:port")
    if not os.access(path, os.R_OK | os.X_OK):
        raise StorageError(f"{clean(path)} belongs to another user; run this as that user, or as root")
    run = os.path.join(path, "run")
    alive, owner = listener(run)
    if alive:
        if mac_key:
            raise ConfigError(f"{clean(path)} is served by a daemon, which has the key itself; leave --mac-key away")
        return Target(clean(path), LIVE, {"type": LIVE, "path": run}, run, owner)
    for directory in (path, os.path.join(path, "store")):
        if os.path.lexists(os.path.join(directory, "format")):
            kind = _kind(directory)
            section = {"type": kind, "path": directory, "capacity": _KEPT}
            return Target(clean(directory), kind, section | ({"mac_key": os.path.abspath(mac_key)} if mac_key else {}), directory)
    raise ConfigError(f"{clean(path)} holds no tiercache store; name a directory that has a file named format, or a daemon's directory")


def _kind(directory: str) -> str:
    """Return the storage type of the store in a directory; raises ConfigError, or StorageError if access is denied."""
    try:
        with open(os.path.join(directory, "format"), "rb") as file:
            found = json.loads(file.read(_FORMAT_BYTES))
        name = found["kind"].removeprefix("tiercache.")
    except PermissionError as error:
        raise StorageError(f"{clean(directory)} belongs to another user ({error.strerror}); use that user, or root") from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{clean(directory)}/format cannot be read, so the store's kind is not known; name it as file://DIR") from error
    if not any(entry.name == name for entry in entry_points(group=GROUP)):
        raise ConfigError(
            f"{clean(directory)} holds a store of kind {clean(name)}, which this tiercache does not know; install what made it"
        )
    return str(name)


def listener(run: str) -> tuple[bool, int | None]:
    """Return whether a daemon listens on the sockets in a directory, and its process id if known.

    Raises StorageError if the sockets belong to another user.
    """
    try:
        fd = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(2)
            # Through the descriptor: the path of a socket may have 107 bytes at most, and a directory may be longer.
            probe.connect(f"/proc/self/fd/{fd}/attach.sock")
            pid, _, _ = _CREDENTIALS.unpack(probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
            return True, pid or None
    except TimeoutError:
        return True, None
    except OSError as error:
        if error.errno == EACCES:
            raise StorageError(f"the sockets in {clean(run)} belong to another user; run this as that user, or as root") from error
        # EAGAIN: the queue of a listening process is full. EPROTOTYPE: a process listens on a socket of another type.
        return error.errno in (EAGAIN, EPROTOTYPE), None
    finally:
        os.close(fd)


def _owner_of(directory: str) -> int | None:
    try:
        text = Path(directory, "LOCK").read_bytes()[:32].rstrip(b"\0 \n")
    except OSError:
        return None
    return int(text) if text.isdigit() else None
