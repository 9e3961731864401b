"""The store that a verb's --store option names: a URL, or the directory of a stopped store or of a daemon."""

from __future__ import annotations

import json
import os
import socket
import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from errno import EACCES, EAGAIN, EPROTOTYPE
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, Final

from tiercache.cli.terminal import UnreachableError, clean, say
from tiercache.config import parse_size
from tiercache.config.urls import section_of
from tiercache.core import Outcome
from tiercache.errors import (
    ConfigError,
    RefusedError,
    StorageError,
    StoreFormatError,
    StoreLockedError,
    UnansweredError,
    UnavailableError,
)
from tiercache.storage.base import StorageBackend, TierReport
from tiercache.storage.registry import GROUP, check_backend, open_backend
from tiercache.storage.tiers import PREFIX, free_name, is_read_only

DEFAULT_DIRECTORY: Final = "/var/lib/tiercache"
LIVE: Final = "grpc"
"""Storage type through which the store of a daemon is reached."""
LOCAL: Final = ("file", "lmdb")
"""Storage types of stores that are opened from a directory."""
_KEEP_CAPACITY: Final = "kept"
"""Value of `capacity` with which a store keeps its size when it is opened."""
_STILL: Final = {
    PREFIX + "promote": "never",
    PREFIX + "write": "write_through_selective",
    PREFIX + "write_after": 255,
}
"""Settings with which nothing is copied to a tier, unless an object is read 255 times."""
_LOOKED_AT: Final = "is open for reading"
"""Part of the text of a StoreLockedError if another process has the store open for reading."""
_FORMAT_BYTES: Final = 4096
"""Maximum bytes that are read of the file `format` in a store's directory."""
_CREDENTIALS: Final = struct.Struct("3i")
"""Value of SO_PEERCRED: process id, user id, group id."""


@dataclass(frozen=True, slots=True)
class Target:
    """Store that was found but is not open yet."""

    name: str
    """Name in messages: the directory, or the URL without its query."""
    kind: str
    """Storage type of the store."""
    section: Mapping[str, Any] = field(repr=False)
    """Settings with which the store is opened."""
    directory: str = ""
    """Directory of the store or of the daemon's sockets; empty if there is none."""
    owner: int | None = None
    """Process id of the daemon that serves the store, if it is known."""
    tier: str = ""
    """Name of the store as a tier of a chain; empty if it is none."""
    read_only: bool = False
    """Whether the tier is never changed (`tier_read_only`)."""
    tiers: tuple[Target, ...] = ()
    """Tiers of a chain of stopped stores, the fastest first."""

    @property
    def live(self) -> bool:
        """Whether the store is served by a daemon."""
        return self.kind == LIVE


def resolve(text: str, mac_key: str = "") -> Target:
    """Return the store that `text` names, without opening it; raises ConfigError or StorageError.

    An empty `text` names the default directory.
    """
    if not text:
        if not os.path.isdir(DEFAULT_DIRECTORY):
            raise ConfigError(
                f"no store is named and {DEFAULT_DIRECTORY} does not exist; give --store a directory or a URL"
            )
        text = DEFAULT_DIRECTORY
    return _resolve_url(text, mac_key) if "://" in text else _resolve_directory(text, mac_key)


def resolve_daemon(text: str, why: str) -> Target:
    """Return the daemon that `text` names; raises ConfigError, which says `why` it must be one."""
    target = resolve(text)
    check_daemon(target, why)
    return target


def check_daemon(target: Target, why: str) -> None:
    """Raise ConfigError, which says `why` there must be one, unless a daemon serves the store."""
    if not target.live:
        raise ConfigError(
            f"{target.name} is served by no daemon, and {why}; name a daemon, or start one there with:"
            " tiercache serve"
        )


def resolve_all(names: Sequence[str] | None, mac_key: str = "") -> Target:
    """Return the store that `names` names: one store, or a chain of stopped stores, the fastest first.

    Without names, TIERCACHE_STORE has one, or a JSON list of them. Nothing is opened. Raises ConfigError or
    StorageError.
    """
    names = names or _names_in(os.environ.get("TIERCACHE_STORE", ""))
    if len(names) == 1:
        return resolve(names[0], mac_key)
    tiers: list[Target] = []
    for text in names:
        target = resolve(text, mac_key)
        if target.live:
            raise ConfigError(
                f"{target.name} is served by a daemon, so it is no tier of a stopped chain; name it alone, or"
                " leave it out"
            )
        taken = [tier.tier for tier in tiers]
        name = str(target.section.get(PREFIX + "name") or free_name(target.kind, taken))
        section = {**target.section, PREFIX + "name": name}
        tiers.append(replace(target, section=section, tier=name, read_only=is_read_only(section)))
    check_backend([tier.section for tier in tiers])
    # A tier is also opened without its chain, and its store has no settings of tiers.
    alone = tuple(
        replace(tier, section={k: v for k, v in tier.section.items() if not k.startswith(PREFIX)})
        for tier in tiers
    )
    return Target(", ".join(tier.name for tier in tiers), "chain", {"type": "chain"}, tiers=alone)


def _names_in(text: str) -> list[str]:
    """Return the stores that a variable names: one, or those of a JSON list."""
    if not text.startswith("["):
        return [text]
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"TIERCACHE_STORE is not JSON: {error}; write a list of strings") from error
    return [str(name) for name in found] or [""]


@contextmanager
def opened(target: Target, *, change: bool = False, tells: bool = True) -> Iterator[StorageBackend]:
    """Open the store without changing its size, so that nothing is evicted.

    `change` says whether a stopped store may be changed; a daemon may change its store at any time. Nothing
    is copied between the tiers of a chain. With `tells`, a tier that is out is named on stderr. Raises
    UnreachableError if no daemon answers, RefusedError if the daemon does not serve this caller, and
    StorageError for a chain that is to be changed, but has a tier that is out.
    """
    with _open(target, _access(target, change=change)) as store:
        if change and target.tiers:
            _check_whole(store)
        try:
            yield store
        except UnansweredError:
            raise
        except UnavailableError as error:
            raise UnreachableError(f"{target.name} does not answer: {clean(str(error))}") from error
        for tier in tiers_out(store) if tells else ():
            say(f"tier {tier.name} is out, and its objects are not seen: {tier.why}")


def tiers_out(store: StorageBackend) -> list[TierReport]:
    """Return the tiers of a chain that are out; none if the store does not tell this caller."""
    try:
        return [tier for tier in store.usage().tiers if tier.health == "out"]
    except StorageError:
        return []


def _check_whole(store: StorageBackend) -> None:
    """Raise StorageError if a tier is out: what is deleted from the others would come back with it."""
    if out := [tier for tier in store.usage().tiers if tier.health == "out"]:
        raise StorageError(
            f"tier {out[0].name} is out ({out[0].why}), and would keep the objects; nothing was changed, so"
            " free that tier, or leave it out"
        )


def _access(target: Target, *, change: bool) -> dict[str, Any]:
    """Return the settings with which a store is opened, for change or only for reading."""
    if target.tiers:
        return {"tiers": [_as_tier(tier, change=change) for tier in target.tiers]}
    return {"access": "write"} if change and target.kind in LOCAL and not target.read_only else {}


def _as_tier(tier: Target, *, change: bool) -> dict[str, Any]:
    quiet = _STILL if change and not tier.read_only else {PREFIX + "read_only": True}
    return {**tier.section, **_access(tier, change=change), PREFIX + "name": tier.tier, **quiet}


def check_answered(target: Target, outcomes: Iterable[Outcome]) -> None:
    """Raise UnreachableError or RefusedError if one of these outcomes says that no daemon served the call."""
    found = set(outcomes)
    if Outcome.REFUSED in found:
        raise RefusedError(
            f"{target.name} refuses this; `tiercache ping` shows the verbs that its operator has granted"
        )
    if Outcome.UNAVAILABLE in found:
        raise UnreachableError(f"{target.name} does not answer; check that the daemon runs, and its address")


def check_removable(target: Target, store: StorageBackend) -> None:
    """Raise RefusedError if a daemon would refuse any of the calls that delete objects.

    Call this before the first of them.
    """
    if not target.live:
        return
    # Import here, because the module needs protobuf. This optional package is installed wherever a daemon can
    # be called.
    from tiercache.wire.methods import METHODS

    found = getattr(store, "ping")()  # noqa: B009  only a daemon's store has it
    verbs = [METHODS[name].verb for name in ("Exists", "Delete", "Flush")]
    wanted = {str(verb) for verb in verbs if verb is not None}
    if missing := sorted(wanted - set(found.verbs)):
        raise RefusedError(
            f"{target.name}: to delete needs the verbs {', '.join(sorted(wanted))}, and {found.principal}"
            f" lacks {' and '.join(missing)}; nothing was changed, and the operator can add the verbs"
        )


def _open(target: Target, more: Mapping[str, Any]) -> StorageBackend:
    try:
        return open_backend({**target.section, **more})
    except StoreLockedError as error:
        if _LOOKED_AT in str(error):
            raise
        pid = _owner_of(target.directory)
        # A daemon's directory has the store in `store` and the sockets in `run`.
        above = os.path.dirname(target.directory.rstrip("/"))
        if listener(os.path.join(above, "run"))[0]:
            raise StoreLockedError(
                f"{target.name} is in use by the daemon of process {pid}; give --store {clean(above)} to use"
                " that daemon"
            ) from error
        raise StoreLockedError(
            f"{target.name} is in use by process {pid or 'unknown'}, which does not share it; stop that"
            f" process (kill {pid or 'PID'}), or if it is a daemon, name the daemon's directory or grpc://"
            " address"
        ) from error
    except StoreFormatError as error:
        if "mac_key" in str(error):
            raise ConfigError(
                str(error).replace("as mac_key", "with --mac-key").replace("omit mac_key", "omit --mac-key")
            ) from error
        raise
    except StorageError as error:
        if target.live:
            raise UnreachableError(f"{target.name} does not answer: {clean(str(error))}") from error
        raise


def _resolve_url(url: str, mac_key: str) -> Target:
    section = section_of(url)
    kind = section["type"]
    if kind == "memory":
        raise ConfigError(
            "--store memory:// is empty in every new process; name a directory, or a daemon as"
            " grpc://host:port"
        )
    directory = section.get("path", "")
    if kind in LOCAL:
        if section.get("capacity", _KEEP_CAPACITY) != _KEEP_CAPACITY:
            parse_size(section["capacity"])
        if directory and not os.path.lexists(os.path.join(directory, "format")):
            raise ConfigError(
                f"{clean(directory)} holds no tiercache store; name the directory that has a file named"
                " format"
            )
        # `capacity` and `access` of the URL are ignored: opening the store must not resize it, and `opened`
        # decides whether the verb may change the store.
        section["capacity"] = _KEEP_CAPACITY
        section.pop("access", None)
        if mac_key:
            section["mac_key"] = os.path.abspath(mac_key)
    elif mac_key:
        raise ConfigError(
            "--mac-key is for a stopped store on this machine; omit it, because a daemon has the key itself"
        )
    # Only the part of the URL before the question mark is shown: a token may follow.
    return Target(clean(url.partition("?")[0]), kind, section, directory)


def _resolve_directory(text: str, mac_key: str) -> Target:
    path = os.path.abspath(text)
    if not os.path.isdir(path):
        what = "is not a directory" if os.path.lexists(path) else "does not exist"
        raise ConfigError(
            f"--store {clean(text)} {what}; name the directory of a store or of a daemon, or a URL such as"
            " grpc://host:port"
        )
    if not os.access(path, os.R_OK | os.X_OK):
        raise StorageError(f"{clean(path)} belongs to another user; run this as that user, or as root")
    run = os.path.join(path, "run")
    alive, owner = listener(run)
    if alive:
        if mac_key:
            raise ConfigError(
                f"{clean(path)} is served by a daemon, which has the key itself; omit --mac-key"
            )
        return Target(clean(path), LIVE, {"type": LIVE, "path": run}, run, owner)
    for directory in (path, os.path.join(path, "store")):
        if os.path.lexists(os.path.join(directory, "format")):
            kind = _kind(directory)
            section = {"type": kind, "path": directory, "capacity": _KEEP_CAPACITY}
            return Target(
                clean(directory),
                kind,
                section | ({"mac_key": os.path.abspath(mac_key)} if mac_key else {}),
                directory,
            )
    raise ConfigError(
        f"{clean(path)} holds no tiercache store; name a directory that has a file named format, or a"
        " daemon's directory"
    )


def _kind(directory: str) -> str:
    """Return the storage type of the store in a directory.

    Raises ConfigError, or StorageError if access is denied.
    """
    try:
        with open(os.path.join(directory, "format"), "rb") as file:
            found = json.loads(file.read(_FORMAT_BYTES))
        name = found["kind"].removeprefix("tiercache.")
    except PermissionError as error:
        raise StorageError(
            f"{clean(directory)} belongs to another user ({error.strerror}); use that user, or root"
        ) from error
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"{clean(directory)}/format cannot be read, so the store's kind is not known; name the store as"
            " file://DIR"
        ) from error
    if not any(entry.name == name for entry in entry_points(group=GROUP)):
        raise ConfigError(
            f"{clean(directory)} holds a store of kind {clean(name)}, which this tiercache does not know;"
            " install the package of that store"
        )
    return str(name)


def listener(run: str) -> tuple[bool, int | None]:
    """Return whether a daemon listens on the sockets in a directory, and the daemon's process id if known.

    Raises StorageError if the sockets belong to another user.
    """
    try:
        fd = os.open(run, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return False, None
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as probe:
            probe.settimeout(2)
            # The path of a socket may have at most 107 bytes. The path through the descriptor is short, even
            # if the directory's own path is not.
            probe.connect(f"/proc/self/fd/{fd}/attach.sock")
            pid, _, _ = _CREDENTIALS.unpack(
                probe.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
            )
            return True, pid or None
    except TimeoutError:
        return True, None
    except OSError as error:
        if error.errno == EACCES:
            raise StorageError(
                f"the sockets in {clean(run)} belong to another user; run this as that user, or as root"
            ) from error
        # EAGAIN: the queue of a listening process is full. EPROTOTYPE: a process listens on a socket of
        # another type.
        return error.errno in (EAGAIN, EPROTOTYPE), None
    finally:
        os.close(fd)


def _owner_of(directory: str) -> int | None:
    """Return the process id in the LOCK file of a store; None if the file has no process id."""
    try:
        text = Path(directory, "LOCK").read_bytes()[:32].rstrip(b"\0 \n")
    except OSError:
        return None
    return int(text) if text.isdigit() else None
