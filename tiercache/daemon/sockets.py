"""The directory of the unix sockets: its permissions, and the removal of sockets that a killed daemon left there."""

from __future__ import annotations

import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Final

from tiercache.errors import ConfigError, StorageError, TierCacheError
from tiercache.wire.methods import ATTACH_SOCKET, GRPC_SOCKET

PLAIN_SOCKET: Final = "plain.sock"
"""Socket on which gRPC itself listens without TLS, for the gate alone."""
TLS_SOCKET: Final = "tls.sock"
"""Socket on which gRPC itself listens with TLS, for the gate alone."""
SOCKETS: Final = (GRPC_SOCKET, ATTACH_SOCKET, PLAIN_SOCKET, TLS_SOCKET)
"""All sockets that a daemon may have in its directory."""


def make_way(directory: Path, sockets: Path) -> None:
    """Let other users pass through `directory` if the directory `sockets` lies in it; the store in it stays closed to them.

    To be called before a store makes the directory. Raises ConfigError if others cannot pass it and it is another user's, or holds more
    than the store and the sockets, which would come within their reach; raises StorageError if it cannot be made or changed.
    """
    if not sockets.is_relative_to(directory):
        return
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
            directory.chmod(0o711)
        found = directory.stat()
        if found.st_mode & 0o001:
            return
        if found.st_uid != os.getuid() or not {entry.name for entry in directory.iterdir()} <= {"store", sockets.name}:
            raise ConfigError(
                f"sockets: other users are principals, and cannot pass {directory} (mode {stat.S_IMODE(found.st_mode):o}); allow it with"
                f" chmod o+x {directory}, or set sockets to a directory such as /run/tiercache"
            )
        directory.chmod(stat.S_IMODE(found.st_mode) | 0o011)
    except OSError as error:
        raise StorageError(f"{directory} cannot be made: {error}") from error


def prepare(directory: Path, *, others: bool) -> None:
    """Make the directory of the sockets or take it over, and remove sockets that a killed daemon left there.

    Other users can pass through it if `others` is true, but not list it. Raises ConfigError if it is another user's or no directory, if
    something else has a socket's name, or if another daemon serves it; raises StorageError for any other OSError.
    """
    mode = 0o711 if others else 0o700
    try:
        directory.mkdir(mode=mode, parents=True, exist_ok=True)
        found = os.lstat(directory)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise ConfigError(f"sockets: {directory} is not a directory of this user's; remove it, or name another one")
        directory.chmod(mode)
        for name in SOCKETS:
            path = directory / name
            with suppress(FileNotFoundError):
                if not stat.S_ISSOCK(os.lstat(path).st_mode):
                    raise ConfigError(f"sockets: {path} is no socket; remove it, or name another directory")
                if _answers(path):
                    raise ConfigError(f"sockets: another daemon serves {directory}; stop it, or give this one a directory of its own")
                path.unlink()
    except OSError as error:
        if isinstance(error, TierCacheError):
            raise
        raise StorageError(f"the sockets in {directory} cannot be made: {error}") from error


def _answers(path: Path) -> bool:
    """Return whether a process listens on the socket at `path`; a socket that a killed process left refuses connections."""
    kind = socket.SOCK_SEQPACKET if path.name == ATTACH_SOCKET else socket.SOCK_STREAM
    with socket.socket(socket.AF_UNIX, kind) as probe:
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            return False
    return True


def remove(directory: Path) -> None:
    """Remove the sockets from `directory`; errors are ignored."""
    for name in SOCKETS:
        with suppress(OSError):
            (directory / name).unlink()
