"""Settings of the `s3` backend, as a URL gives them.

Credentials are never settings. They come from the usual environment variables or from a private file, and are
read again when the service has refused them.
"""

from __future__ import annotations

import configparser
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Final
from urllib.parse import urlsplit

from tiercache.config.files import read_secret
from tiercache.config.urls import parse_address, storage_url
from tiercache.errors import ConfigError
from tiercache.settings import FLAG, PATH, Kind, Named, duration, matching, one_of, read_section, size, whole

KIND: Final = "s3"
EXAMPLE: Final = "s3://bucket/prefix?endpoint=https://storage.example:9000&region=us-east-1"
_PREFIX: Final = re.compile(r"[A-Za-z0-9!_.*'()/=-]{0,256}")
_SECRETS: Final = ("access_key_id", "secret_access_key", "session_token", "token")
_VARIABLES: Final = {
    "access_key_id": "AWS_ACCESS_KEY_ID",
    "secret_access_key": "AWS_SECRET_ACCESS_KEY",
    "session_token": "AWS_SESSION_TOKEN",
}


def _prefix(value: Any) -> str:
    text = str(value).strip("/")
    if not _PREFIX.fullmatch(text) or "//" in text or {".", ".."} & set(text.split("/")):
        raise ConfigError(f"{value!r} is no prefix; use letters, digits, - _ = . and single slashes")
    return text


def _endpoint(value: Any) -> str:
    if not value:
        return ""
    try:
        parts = urlsplit(str(value))
        sound = parts.scheme in ("http", "https") and parts.hostname and parts.path in ("", "/")
        sound = sound and not (parts.query or parts.username or parts.password) and parts.port != 0
    except ValueError:
        sound = False
    if not sound:
        raise ConfigError("this is no endpoint; write it like https://storage.example:9000")
    return str(value).rstrip("/")


_BUCKET: Final = matching(
    "[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]", "is no bucket; a name has 3 to 63 of a-z, 0-9, dot, - and _"
)
_REGION: Final = matching("[a-z0-9-]{1,64}", "is no region; write it like us-east-1")


@dataclass(frozen=True, slots=True, kw_only=True)
class S3Settings:
    """Place of the packs, and limits of this process."""

    bucket: Annotated[str, _BUCKET, Named("address")]
    prefix: Annotated[str, Kind(_prefix), Named("path")] = ""
    """Path in the bucket under which everything lies; empty for the whole bucket."""
    endpoint: Annotated[str, Kind(_endpoint)] = field(
        default_factory=lambda: _endpoint(os.environ.get("AWS_ENDPOINT_URL"))
    )
    """URL of the service; if empty, the service is the one of Amazon. Default: AWS_ENDPOINT_URL."""
    region: Annotated[str, _REGION] = field(
        default_factory=lambda: os.environ.get("AWS_REGION") or "us-east-1"
    )
    credentials_file: Annotated[str, PATH] = ""
    """Private file in the form of ~/.aws/credentials; if empty, the environment has the credentials."""
    allow_http: Annotated[bool, FLAG] = False
    """Whether payloads may travel in the clear to another host."""
    virtual_host: Annotated[bool, FLAG] = False
    """Whether the bucket is part of the host's name instead of the path."""
    deadline: Annotated[float, duration(0.05, 3600)] = 5.0
    """Seconds that a call may take, besides a second for every 32 MiB."""
    refresh: Annotated[float, duration(0.0, 3600)] = 5.0
    """Seconds after which a lookup that misses asks again what others have written."""
    pack: Annotated[int, size(1 << 16, 256 << 20)] = 16 << 20
    """Bytes of objects after which a set begins another pack."""
    in_flight: Annotated[int, size(1 << 16, 1 << 36)] = 64 << 20
    """Bytes of packs that this process holds in memory while they travel."""
    objects: Annotated[int, whole(1000, 100_000_000, "objects")] = 1_000_000
    """Number of objects that the directory of this process knows, at some 400 bytes each."""
    compression: Annotated[str, one_of("auto", "smallest", "none")] = "auto"
    """Rule by which objects are compressed: `auto`, `smallest` or `none` (see `CodecChoices`)."""

    def __post_init__(self) -> None:
        if self.endpoint.startswith("http://") and not (self.allow_http or _is_local(self.endpoint)):
            raise ConfigError(
                f"{self}: {self.endpoint} would move payloads in the clear; use https://, or give"
                " allow_http=true if the network is trusted"
            )
        if self.in_flight < self.pack:
            raise ConfigError(
                f"{self}: in_flight is less than a pack of {self.pack} bytes; raise in_flight or lower pack"
            )

    def __str__(self) -> str:
        return storage_url(KIND, f"/{self.prefix}" if self.prefix else "", address=self.bucket)

    def place(self, name: str) -> str:
        """Return the name in the bucket of the store's object `name`."""
        return f"{self.prefix}/{name}" if self.prefix else name

    def credentials(self) -> dict[str, Any]:
        """Return the credentials by the names that obstore has for them; empty if there are none to read.

        Without any, obstore asks Amazon's hosts for a role. Raises ConfigError if the file cannot be used, or
        if half of the credentials are missing.
        """
        if self.credentials_file:
            found = _from_file(Path(self.credentials_file))
        else:
            found = {ours: os.environ[name] for ours, name in _VARIABLES.items() if os.environ.get(name)}
        if ("access_key_id" in found) != ("secret_access_key" in found):
            raise ConfigError(
                f"{self}: only one half of the credentials was found; set AWS_ACCESS_KEY_ID and"
                " AWS_SECRET_ACCESS_KEY, or give credentials_file"
            )
        return found


def read_settings(section: Mapping[str, Any]) -> S3Settings:
    """Return the settings in a section of the configuration.

    Raises ConfigError if a setting, or the file that a setting names, cannot be used.
    """
    settings = parse_settings(section)
    if not settings.credentials() and settings.endpoint:
        raise ConfigError(
            f"{settings}: there are no credentials for {settings.endpoint}; set AWS_ACCESS_KEY_ID and"
            " AWS_SECRET_ACCESS_KEY, or give credentials_file"
        )
    return settings


def parse_settings(section: Mapping[str, Any]) -> S3Settings:
    """Return the settings in a section, without a look at the credentials; raises ConfigError."""
    for name in _SECRETS:
        if name in section:
            raise ConfigError(
                f"storage type {KIND!r}: {name} is a secret, and a URL is shown in logs; set"
                " AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or give credentials_file=/path"
            )
    return read_section(S3Settings, f"storage type {KIND!r}", section, EXAMPLE)


def _from_file(path: Path) -> dict[str, str]:
    text = read_secret(path, 1, 1 << 16, "credentials_file").decode(errors="replace")
    parser = configparser.RawConfigParser()
    try:
        parser.read_string(text)
        profile = parser[os.environ.get("AWS_PROFILE") or "default"]
    except (configparser.Error, KeyError):
        raise ConfigError(
            f"credentials_file {path} has no profile that can be read; write [default], aws_access_key_id ="
            " ... and aws_secret_access_key = ..."
        ) from None  # the cause could quote the file
    return {ours: profile[f"aws_{ours}"] for ours in _VARIABLES if profile.get(f"aws_{ours}")}


def _is_local(endpoint: str) -> bool:
    try:
        return parse_address(urlsplit(endpoint).netloc).loopback
    except ConfigError:  # no port
        return urlsplit(endpoint).hostname in ("localhost", "127.0.0.1", "::1")
