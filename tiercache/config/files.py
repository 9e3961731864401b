"""Checks of the files that settings name: existence, privacy and contents. Errors name the file and never repeat its contents."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from typing import TYPE_CHECKING, Final

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.config.models import Settings

_PUBLIC_LIMIT: Final = 2**20
_SLACK: Final = 64
"""Bytes of white space that may surround a token."""


def check_files(settings: Settings) -> None:
    """Raise ConfigError if a file is unfit or two files hold the same secret.

    A file is unfit if it is missing, too small or too large, or, where it holds a secret, accessible to users other than its owner.
    """
    tokens = {
        f"principals[{n}].token_file": read_token(principal.token_file, f"principals[{n}].token_file")
        for n, principal in enumerate(settings.principals)
        if principal.token_file is not None
    }
    _differ(tokens, "tokens", "the principals could not be told apart")
    salts = {
        f"tenants.{name}.salt_file": read_salt(tenant.salt_file, f"tenants.{name}.salt_file") for name, tenant in settings.tenants.items()
    }
    _differ(salts, "salts", "the tenants would share objects")
    if settings.tls is None:
        return
    if settings.tls.key is not None:
        read_secret(settings.tls.key, 1, 2**16, "tls.key")
    for name in ("certificate", "client_ca"):
        if path := getattr(settings.tls, name):
            data = _read(path, _PUBLIC_LIMIT, f"tls.{name}", private=False)
            if not data or len(data) > _PUBLIC_LIMIT:
                raise ConfigError(f"tls.{name}: {path} is empty or larger than 1MiB, and so no certificate; name another file")


def check_certificates(settings: Settings) -> None:
    """Raise ConfigError if the TLS files do not hold certificates and a key, or if the key belongs to another certificate."""
    tls = settings.tls
    if tls is None or tls.certificate is None:
        return
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # An empty password keeps OpenSSL from asking for one at the terminal.
        context.load_cert_chain(tls.certificate, tls.key, password="")
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"tls.certificate: {tls.certificate} and {tls.key} are not a certificate and its key, unencrypted and in PEM"
            f" ({_reason(error)}); give the two files of one pair"
        ) from error
    try:
        if tls.client_ca:
            context.load_verify_locations(tls.client_ca)
    except (OSError, ValueError) as error:
        raise ConfigError(f"tls.client_ca: {tls.client_ca} holds no certificate in PEM ({_reason(error)}); give the CA's") from error


def read_token(path: Path, what: str) -> bytes:
    """Return the token in a file, without the white space around it.

    `what` is the setting that names the file. Raises ConfigError, also for a token that is not printable ASCII.
    """
    token = read_secret(path, 16, 4096, what, strip=True)
    if not token.isascii() or not token.decode("ascii").isprintable():
        raise ConfigError(f"{what}: {path} holds other than printable ASCII, which no call can carry; write it anew: openssl rand -hex 32")
    return token


def read_salt(path: Path, what: str) -> bytes:
    """Return the salt in a file, all of its bytes; `what` is the setting that names the file. Raises ConfigError."""
    return read_secret(path, 32, 4096, what)


def read_secret(path: Path, least: int, most: int, what: str, *, strip: bool = False) -> bytes:
    """Return the contents, `least` to `most` bytes, of a regular file that only its owner may access; follows no symbolic link.

    `what` names the file's purpose in errors, `strip` removes white space around the secret. Raises ConfigError; no message repeats the
    contents.
    """
    limit = most + _SLACK if strip else most
    data = _read(path, limit, what, private=True)
    secret = data.strip() if strip else data
    if len(data) > limit or not least <= len(secret) <= most:
        found = f"{len(secret)}" if len(data) <= limit else f"more than {most}"
        raise ConfigError(f"{what}: {path} holds {found} bytes where {least} to {most} are needed; write it anew")
    return secret


def _read(path: Path, most: int, what: str, *, private: bool) -> bytes:
    """Return the bytes of a regular file; one byte more than `most` if the file is larger. Raises ConfigError."""
    # A certificate may be a symbolic link, as tools that renew certificates make them; a secret may not.
    # Without O_NONBLOCK, opening a named pipe would block.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | (os.O_NOFOLLOW if private else 0)
    try:
        descriptor = os.open(path, flags)
    except OSError as error:
        raise ConfigError(f"{what}: {path} {_why(path, error)}") from error
    try:
        mode = os.fstat(descriptor).st_mode
        if not stat.S_ISREG(mode):
            raise ConfigError(f"{what}: {path} is not a regular file; name one")
        if private and stat.S_IMODE(mode) & 0o077:
            raise ConfigError(
                f"{what}: {path} can be read or changed by others than its owner (mode {stat.S_IMODE(mode):04o}); run chmod 600 {path}"
            )
        with open(descriptor, "rb", closefd=False) as file:
            return file.read(most + 1)
    except OSError as error:
        raise ConfigError(f"{what}: {path} cannot be read ({error.strerror}); repair the disk or name another file") from error
    finally:
        os.close(descriptor)


def _why(path: Path, error: OSError) -> str:
    if isinstance(error, FileNotFoundError):
        return "does not exist; create it, or name another file"
    if isinstance(error, PermissionError):
        return "cannot be read by this user; run as the user of the daemon, or give the file to that user"
    if path.is_symlink():
        return "is a symbolic link, which is not followed to a secret; name the file itself"
    return f"cannot be opened ({error.strerror}); name a regular file"


def _differ(secrets: dict[str, bytes], what: str, so: str) -> None:
    seen: dict[bytes, str] = {}
    for name, secret in secrets.items():
        if secret in seen:
            raise ConfigError(f"{seen[secret]} and {name} hold the same {what}, so that {so}; make one of them anew")
        seen[secret] = name


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or getattr(error, "strerror", None) or type(error).__name__
