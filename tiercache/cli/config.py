"""The `tiercache config` commands: check, show and describe the configuration of the daemon without starting it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from tiercache.cli.output import Output, OutputOption, document, line, records
from tiercache.errors import ConfigError, StorageError

if TYPE_CHECKING:
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
"""Configuration file that `tiercache config --help` shows; it can be loaded as it is."""

_WIDE: Final = 160
"""Width, in columns, of a table that is not printed to a terminal."""


def _verbatim(text: str) -> str:
    """Return `text` marked so that typer's help neither rewraps its paragraphs nor reads markup in them."""
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


FileArgument = Annotated[
    Path | None,
    typer.Argument(metavar="FILE", help="Default: TIERCACHE_CONFIG, or /etc/tiercache/tiercache.toml.", show_default=False),
]


@config.command()
def check(
    file: FileArgument = None,
    files: Annotated[bool, typer.Option("--files/--no-files", help="Look at the secrets and certificates that it names as well.")] = True,
    ports: Annotated[
        bool,
        typer.Option("--ports/--no-ports", help="Try the addresses and sockets as well; not while this configuration is served."),
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Say whether a configuration can be served on this machine, and what it would serve to whom.

    These are the checks that `tiercache serve` makes before it opens the store: settings, files, the options of a storage URL, directories,
    memory, disk and ports. Nothing is written. Variables count as they would for the daemon. Exit code 0 if all is fine, warnings or not;
    if not, 2 for what a setting says and 1 for what others have, such as a port, each with one sentence.

        tiercache config check node.toml

    JSON fields: file, serves (what, how), warnings. With jsonl a line for each of serves and of warnings (warning), and a last line with
    summary.
    """
    # Imported here to keep --help fast: it needs none of these modules.
    from tiercache.cli.readiness import check as check_readiness
    from tiercache.config.settings import DEFAULT_FILE, find_file, printable, resolve

    found = find_file(file)
    if found is None:
        raise ConfigError(f"there is nothing to check: TIERCACHE_CONFIG is not set and {DEFAULT_FILE} does not exist; name a file")
    settings = resolve(found).settings
    try:
        warned = check_readiness(settings, files=files, ports=ports)
    except (ConfigError, StorageError) as error:
        raise type(error)(f"{printable(found)}: {error}") from error
    serves = [{"what": title, "how": text} for title, text in _summary(settings)]
    if output is Output.JSON:
        document({"file": str(found), "serves": serves, "warnings": warned})
    elif output is Output.JSONL:
        records([*serves, *({"warning": warning} for warning in warned), {"summary": {"file": str(found)}}], output)
    else:
        typer.echo(f"{printable(found)}: fine")
        for one in serves:
            typer.echo(f"  {one['what']:<9}{one['how']}")
        for warning in warned:
            typer.echo(f"warning: {warning}")


@config.command()
def show(
    file: FileArgument = None,
    toml: Annotated[bool, typer.Option("--toml", help="As a file that can be loaded again, instead of --output.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show every setting that would count, and whether it comes from a default, the file or the environment.

        tiercache config show node.toml

        tiercache config show --toml > node.toml

    JSON fields: file, settings (as a file has them), origins (default, file or environment, by setting). With jsonl a line for each
    setting: setting, value, origin, description.
    """
    from tiercache.config.document import description, effective, leaves
    from tiercache.config.document import document as as_file
    from tiercache.config.settings import find_file, resolve
    from tiercache.config.toml import dotted, lines

    loaded = resolve(find_file(file))
    said = effective(loaded.settings)
    found = [(key, value, loaded.origin(key)) for key, value in leaves(said)]
    if toml:
        typer.echo("\n".join(lines(as_file(loaded.settings), loaded.origin)))
    elif output is Output.JSON:
        origins = {dotted(key): origin for key, _, origin in found}
        document({"file": loaded.file and str(loaded.file), "settings": said, "origins": origins})
    elif output is Output.JSONL:
        for key, value, origin in found:
            line({"setting": dotted(key), "value": value, "origin": origin, "description": description(key)})
    else:
        cells = ((dotted(key), _cell(value), origin, description(key)) for key, value, origin in found)
        _print(("setting", "value", "from", "what it is"), cells)


@config.command()
def schema(output: OutputOption = Output.JSON) -> None:
    """Print the JSON Schema of the file, for editors that complete and check TOML.

        tiercache config schema > tiercache.schema.json

    As a table, or with jsonl, every setting that there is: setting, default (null where it must be given or follows from others),
    description.
    """
    from tiercache.config.document import every_setting
    from tiercache.config.document import schema as made

    if output is Output.JSON:
        document(made())
    elif output is Output.JSONL:
        records(({"setting": name, "default": default, "description": said} for name, default, said in every_setting()), output)
    else:
        rows = ((name, "" if default is None else _cell(default), said) for name, default, said in every_setting())
        _print(("setting", "default", "what it is"), rows)


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


def _print(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    table = Table(box=SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    for name in columns:
        table.add_column(name, overflow="fold", style="dim" if name == "what it is" else "")
    for row in rows:
        table.add_row(*(Text(cell, style="dim" if cell == "default" else "") for cell in row))
    console = Console(emoji=False)
    (console if console.is_terminal else Console(width=_WIDE, emoji=False)).print(table)


def _cell(value: Any) -> str:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
