"""Configuration of the daemon: one TOML file, variables and flags, loaded into one immutable object.

    load(Path("/etc/tiercache/tiercache.toml"), {"listen": ["127.0.0.1:7070"]})

A flag overrides a variable (`TIERCACHE_LIMITS__IDLE=5s`), a variable overrides the file, and the file
overrides the defaults. Order of reading: `models` (the settings), `fields` (their types), `rules` (which the
settings must obey together), `loading` (from files, variables and flags), `files` (checks of the files that
settings name), `document` (settings as a file).
"""

from tiercache.config.addresses import Address, parse_address
from tiercache.config.files import check_certificates, check_files, read_salt, read_secret, read_token
from tiercache.config.loading import DEFAULT_FILE, Loaded, Origin, find_file, load, printable, resolve
from tiercache.config.models import EventsSettings, HttpSettings, Limits, Principal, Settings, Tenant, Tls
from tiercache.config.rules import warnings
from tiercache.core import Verb

__all__ = [
    "DEFAULT_FILE",
    "Address",
    "EventsSettings",
    "HttpSettings",
    "Limits",
    "Loaded",
    "Origin",
    "Principal",
    "Settings",
    "Tenant",
    "Tls",
    "Verb",
    "check_certificates",
    "check_files",
    "find_file",
    "load",
    "parse_address",
    "printable",
    "read_salt",
    "read_secret",
    "read_token",
    "resolve",
    "warnings",
]
