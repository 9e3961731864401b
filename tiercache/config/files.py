"""Checks of the files that settings name: existence, permissions and contents.

Error messages name the file and never repeat its contents.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.config.models import Settings

_PUBLIC_LIMIT: Final = 2**20
"""Maximum bytes of a file with certificates."""
_SLACK: Final = 64
"""Maximum bytes of white space around a token."""


def check_files(settings: Settings) -> None:
    """Raise ConfigError if a file cannot be used, or if two files hold the same secret.

    A file cannot be used if it is missing, too small or too large. A file with a secret cannot be used if
    users other than its owner may access it.
    """
    tokens = {
        f"principals[{n}].token_file": read_token(principal.token_file, f"principals[{n}].token_file")
        for n, principal in enumerate(settings.principals)
        if principal.token_file is not None
    }
    _require_distinct(tokens, "tokens", "the daemon could not tell the principals apart")
    salts = {
        f"tenants.{name}.salt_file": read_salt(tenant.salt_file, f"tenants.{name}.salt_file")
        for name, tenant in settings.tenants.items()
    }
    _require_distinct(salts, "salts", "the tenants would share objects")
    if settings.tls is None:
        return
    if settings.tls.key is not None:
        read_secret(settings.tls.key, 1, 2**16, "tls.key")
    for name in ("certificate", "client_ca"):
        if path := getattr(settings.tls, name):
            read_certificates(path, f"tls.{name}")


def read_certificates(path: Path, what: str) -> bytes:
    """Return the contents of a PEM file of certificates.

    `what` is the setting that names the file, for error messages. Raises ConfigError.
    """
    data = _read(path, _PUBLIC_LIMIT, what, private=False)
    if len(data) > _PUBLIC_LIMIT or b"-----BEGIN CERTIFICATE-----" not in data:
        raise ConfigError(f"{what}: {path} holds no certificate; name a PEM file of certificates")
    return data


def read_token(path: Path, what: str) -> bytes:
    """Return the token in a file, without the white space around it.

    `what` is the setting that names the file, for error messages. Raises ConfigError, for example if the
    token is not printable ASCII.
    """
    token = read_secret(path, 16, 4096, what, strip=True)
    if not token.isascii() or not token.decode("ascii").isprintable():
        raise ConfigError(
            f"{what}: {path} holds characters other than printable ASCII, which no call can carry; make a new"
            " token: openssl rand -hex 32"
        )
    return token


def read_salt(path: Path, what: str) -> bytes:
    """Return the salt in a file: all of its bytes.

    `what` is the setting that names the file, for error messages. Raises ConfigError as `read_secret` does.
    """
    return read_secret(path, 32, 4096, what)


def read_secret(path: Path, min_bytes: int, max_bytes: int, what: str, *, strip: bool = False) -> bytes:
    """Return the contents of a regular file that only its owner may access.

    The secret has `min_bytes` to `max_bytes` bytes. With `strip`, white space around the secret is removed
    first. `what` names the file's purpose in error messages. Raises ConfigError for any other file, and for a
    symbolic link.
    """
    limit = max_bytes + _SLACK if strip else max_bytes
    data = _read(path, limit, what, private=True)
    secret = data.strip() if strip else data
    if len(data) > limit or not min_bytes <= len(secret) <= max_bytes:
        found = f"{len(secret)}" if len(data) <= limit else f"more than {max_bytes}"
        raise ConfigError(
            f"{what}: {path} holds {found} bytes, and {min_bytes} to {max_bytes} are needed; make a new file"
        )
    return secret


def _read(path: Path, max_bytes: int, what: str, *, private: bool) -> bytes:
    """Return the bytes of a regular file, or its first `max_bytes` + 1 bytes if it is larger.

    Raises ConfigError.
    """
    # A certificate may be a symbolic link, because tools that renew certificates make links. A file with a
    # secret must not be a link. Without O_NONBLOCK, opening a named pipe would block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if private else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise ConfigError(f"{what}: {path} {_open_error(path, error)}") from error
    try:
        found = os.fstat(descriptor)
        mode = found.st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{what}: {path} is not a regular file; name one")
        if private and stat.S_IMODE(mode) & 0o077 and not _is_credential(path, found):
            raise ConfigError(
                f"{what}: {path} can be read or changed by users other than its owner (mode"
                f" {stat.S_IMODE(mode):04o}); run chmod 600 {path}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(max_bytes + 1)
    except OSError as error:
        raise ConfigError(
            f"{what}: {path} cannot be read ({error.strerror}); repair the disk or name another file"
        ) from error
    finally:
        os.close(descriptor)


def _is_credential(path: Path, found: os.stat_result) -> bool:
    """Return whether a file of mode 0440 is a credential that systemd gave to this service alone.

    From version 254 on, systemd lets the service's user read it by an access control list, whose mask stat(2)
    shows as the rights of the group. The group itself has none, and the directory is closed to others.
    """
    directory = Path(os.environ.get("CREDENTIALS_DIRECTORY", ""))
    return path.parent == directory and (found.st_uid, stat.S_IMODE(found.st_mode)) == (0, 0o440)


def _open_error(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist; create it, or name another file"
    if isinstance(error, PermissionError):
        return "cannot be read by this user; run as the user of the daemon, or give the file to that user"
    if path.is_symlink():
        return "is a symbolic link, which is not allowed for a secret; name the file itself"
    return f"cannot be opened ({error.strerror}); name a regular file"


def _require_distinct(secrets: dict[str, bytes], what: str, so: str) -> None:
    seen: dict[bytes, str] = {}
    for name, secret in secrets.items():
        if secret in seen:
            raise ConfigError(
                f"{seen[secret]} and {name} hold the same {what}, so that {so}; make a new one for one"
                " of them"
            )
        seen[secret] = name
