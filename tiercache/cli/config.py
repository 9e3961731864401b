"""`tiercache config`: what the daemon would make of a configuration, before it does."""

from __future__ import annotations

import enum
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tiercache.errors import ConfigError

if TYPE_CHECKING:
    from tiercache.config.loading import Loaded
    from tiercache.config.models import Principal, Settings

EXAMPLE: Final = """\
directory = "/var/lib/tiercache"  # the store, and the unix sockets
disk_bytes = "200GiB"             # of the store
host_bytes = "1GiB"               # for payloads in flight
listen = ["0.0.0.0:7070"]         # TCP; empty serves this machine only

[tls]
certificate = "/etc/tiercache/node.crt"
key = "/etc/tiercache/node.key"           # mode 0600
client_ca = "/etc/tiercache/clients.crt"  # clients show a certificate

[[principals]]
name = "worker-1"
san = "worker-1.example"          # or token_file = "/...", or uid = 1000
tenant = "acme"
verbs = ["read", "write"]

[tenants.acme]
salt_file = "/etc/tiercache/acme.salt"    # 32 random bytes, mode 0600
"""
"""What `--help` shows; a file that loads."""

_WIDE: Final = 160
"""Columns of a table that is not printed to a terminal."""


def _verbatim(text: str) -> str:
    """Paragraphs that help neither refills nor takes for markup."""
    return "\n\n".join(f"\b\n{escape(paragraph)}" for paragraph in text.strip().split("\n\n"))


config = typer.Typer(no_args_is_help=True)


@config.callback(
    help=f"""Check, show and describe the configuration of the daemon.

One TOML file; flags come before variables, variables before the file. A variable is TIERCACHE_ and the name of the setting, with two
underscores in front of a setting of a table: TIERCACHE_HOST_BYTES=1GiB, TIERCACHE_LIMITS__IDLE=5s. An example, every line of it optional:

{_verbatim(EXAMPLE)}
"""
)
def _group() -> None:
    pass


class Output(enum.StrEnum):
    """How settings are printed."""

    TABLE = "table"
    JSON = "json"
    TOML = "toml"


FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Default: TIERCACHE_CONFIG, or /etc/tiercache/tiercache.toml.", show_default=False),
]


@config.command()
def check(
    file: FileArgument = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Look at the secrets and certificates that it names as well.")] = True,
) -> None:
    """Say whether a configuration can be served, and what it would serve to whom.

    Variables count as they would for the daemon. Exit code 0 if all is fine, warnings or not; 2 with one sentence if not.

        tiercache config check node.toml
    """
    # Imported here, so that --help needs none of it.
    from tiercache.config.settings import DEFAULT_FILE, check_certificates, check_files, find_file, printable, resolve, warnings

    found = find_file(file)
    if found is None:
        raise ConfigError(f"there is nothing to check: TIERCACHE_CONFIG is not set and {DEFAULT_FILE} does not exist; name a file")
    settings = resolve(found).settings
    try:
        _check_storage(settings)
        if files:
            check_files(settings)
            check_certificates(settings)
    except ConfigError as error:
        raise ConfigError(f"{printable(found)}: {error}") from error
    typer.echo(f"{printable(found)}: fine")
    for title, text in _summary(settings):
        typer.echo(f"  {title:<9}{text}")
    for warning in warnings(settings):
        typer.echo(f"warning: {warning}")


@config.command()
def show(
    file: FileArgument = None,
    output: Annotated[Output, typer.Option("--output", "-o", help="toml can be loaded again.")] = Output.TABLE,
) -> None:
    """Show every setting that would count, and whether it comes from a default, the file or the environment.

    tiercache config show node.toml

    tiercache config show -o toml > node.toml
    """
    from tiercache.config.document import document, effective, leaves
    from tiercache.config.settings import find_file, resolve
    from tiercache.config.toml import dotted, lines

    loaded = resolve(find_file(file))
    if output is Output.TOML:
        typer.echo("\n".join(lines(document(loaded.settings), loaded.origin)))
    elif output is Output.JSON:
        said = effective(loaded.settings)
        origins = {dotted(key): loaded.origin(key) for key, _ in leaves(said)}
        typer.echo(json.dumps({"file": loaded.file and str(loaded.file), "settings": said, "origins": origins}))
    else:
        console = Console(emoji=False)
        (console if console.is_terminal else Console(width=_WIDE, emoji=False)).print(_table(loaded))


@config.command()
def schema() -> None:
    """Print the JSON Schema of the file, for editors that complete and check TOML.

    tiercache config schema > tiercache.schema.json
    """
    from tiercache.config.document import schema as made

    typer.echo(json.dumps(made(), indent=2))


def _check_storage(settings: Settings) -> None:
    """The part of a storage URL that is no backend's own. Raises ConfigError for a type that is not installed."""
    from importlib.metadata import entry_points

    from tiercache.config.urls import section_of
    from tiercache.storage.registry import GROUP

    kind = section_of(settings.store_url)["type"]
    known = sorted({entry.name for entry in entry_points(group=GROUP)})
    if kind not in known:
        raise ConfigError(f"storage: type {kind!r} is unknown; use one of {', '.join(known)}, or install the package that has it")


def _summary(settings: Settings) -> Iterator[tuple[str, str]]:
    from tiercache.config.quantities import duration_text, size_text

    yield "store", settings.storage or f"{settings.directory / 'store'}, {size_text(settings.disk_bytes)}"
    if settings.unix:
        yield "unix", f"{settings.socket_directory}/grpc.sock and attach.sock"
    for address in settings.addresses:
        yield "tcp", f"{address}, {_protection(settings)}"
    if settings.metrics.listen:
        yield "metrics", settings.metrics.listen
    yield from (("who", text) for text in _callers(settings))
    limits = settings.limits
    yield (
        "memory",
        (
            f"{size_text(settings.host_bytes)} in flight, {size_text(settings.client_bytes)} of one client,"
            f" {size_text(settings.principal_bytes)} of one principal; objects up to {size_text(settings.object_bytes)}"
        ),
    )
    yield (
        "limits",
        (
            f"{limits.clients} clients, {limits.streams} streams, {limits.streams_per_client} of one client;"
            f" cut after {duration_text(limits.idle)} without progress, and after {duration_text(limits.call)}"
        ),
    )


def _protection(settings: Settings) -> str:
    tls = settings.tls
    words = [("TLS with client certificates" if tls.client_ca else "TLS") if tls else "no TLS"]
    if any(principal.token_file for principal in settings.principals):
        words.append("tokens")
    return ", ".join(words)


def _callers(settings: Settings) -> Iterator[str]:
    if settings.unix:
        yield "the daemon's own user on the unix sockets, unless it is named below: everything"
    yield from map(_who, settings.principals)
    if settings.addresses and all(principal.uid is not None for principal in settings.principals):
        yield "whoever can call a TCP address: read, write in all namespaces"


def _who(principal: Principal) -> str:
    from tiercache.config.settings import Verb

    spaces = principal.namespaces
    where = "all namespaces" if "*" in spaces else ", ".join(f"{space[:12]}..." for space in spaces)
    tenant = f" of tenant {principal.tenant}" if principal.tenant else ""
    return f"{principal.name}{tenant} by {principal.credential}: {', '.join(verb for verb in Verb if verb in principal.verbs)} in {where}"


def _table(loaded: Loaded) -> Table:
    from tiercache.config.document import description, effective, leaves
    from tiercache.config.toml import dotted

    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("setting", overflow="fold")
    table.add_column("value", overflow="fold")
    table.add_column("from")
    table.add_column("what it is", style="dim", overflow="fold")
    for key, value in leaves(effective(loaded.settings)):
        origin = loaded.origin(key)
        table.add_row(
            Text(dotted(key)), Text(_cell(value)), Text(origin, style="dim" if origin == "default" else ""), Text(description(key))
        )
    return table


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
