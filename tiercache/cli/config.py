"""The `tiercache config` commands, which check, show, describe and apply the daemon's configuration."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.text import Text

from tiercache.cli.terminal import Output, OutputOption, clean, console, records, say, table
from tiercache.errors import ConfigError, RefusedError, StorageError

if TYPE_CHECKING:
    from tiercache.config.models import Principal, Settings
    from tiercache.storage.base import StorageBackend

_LOOK_S: Final = 0.5
"""Seconds from one look at tiers that leave to the next."""
_NEWS_S: Final = 5.0
"""Minimum seconds from one line about them to the next."""
EXAMPLE: Final = """\
directory = "/var/lib/tiercache"  # the store, and the unix sockets
disk_bytes = "200GiB"             # of the store
host_bytes = "1GiB"               # for payloads in flight
listen = ["0.0.0.0:7070"]         # TCP; if empty, only this machine is served

[tls]
certificate = "/etc/tiercache/node.crt"
key = "/etc/tiercache/node.key"           # mode 0600
client_ca = "/etc/tiercache/clients.crt"  # clients must show a certificate

[[principals]]
name = "worker-1"
san = "worker-1.example"          # or token_file = "/...", or uid = 1000
tenant = "acme"
verbs = ["read", "write"]

[tenants.acme]
salt_file = "/etc/tiercache/acme.salt"    # 32 random bytes, mode 0600
"""
"""Configuration file that `tiercache config --help` shows; it can be loaded unchanged."""


def _verbatim(text: str) -> str:
    r"""Return `text` with the mark \b before each paragraph, so that typer does not rewrap the paragraphs."""
    return "\n\n".join(f"\b\n{paragraph}" for paragraph in text.strip().split("\n\n"))


config = typer.Typer(no_args_is_help=True)


@config.callback(
    help=f"""Check, show, describe and apply the configuration of the daemon.

Settings come from one TOML file; flags of `tiercache serve` override it. This is an example of the file;
every line is optional:

{_verbatim(EXAMPLE)}
"""
)
def _group() -> None:
    pass


FileArgument = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE",
        help="Default: TIERCACHE_CONFIG, or /etc/tiercache/tiercache.toml.",
        show_default=False,
    ),
]


@config.command()
def check(
    file: FileArgument = None,
    files: Annotated[
        bool,
        typer.Option("--files/--no-files", help="Check the files with secrets and certificates as well."),
    ] = True,
    ports: Annotated[
        bool,
        typer.Option(
            "--ports/--no-ports",
            help="Check also that addresses and sockets are free; this check fails while a daemon serves"
            " them.",
        ),
    ] = True,
    output: OutputOption = Output.TABLE,
) -> None:
    """Check whether a configuration can be served on this machine, and show what is served to whom.

    `tiercache serve` makes the same checks before it opens the store: settings, files, the options of a
    storage URL, directories, memory, disk and ports. Nothing is written. Exit code 0: the configuration can
    be served, perhaps with warnings. Exit code 2: a setting is wrong. Exit code 1: the machine is not ready,
    for example because a port is in use. An error is one sentence.

        tiercache config check node.toml

    JSON fields: file, serves (what, how), warnings. With jsonl one line for each element of serves and each
    warning (field warning), and a last line with summary.
    """
    # Imported here to keep --help fast, because --help needs none of these modules.
    from tiercache.cli.readiness import warnings_about
    from tiercache.config.loading import DEFAULT_FILE, find_file, printable, resolve

    found = find_file(file)
    if found is None:
        raise ConfigError(
            f"no file is named, TIERCACHE_CONFIG is not set, and {DEFAULT_FILE} does not exist; name a file"
        )
    settings = resolve(found).settings
    try:
        warned = warnings_about(settings, files=files, ports=ports)
    except (ConfigError, StorageError) as error:
        error.args = (f"{printable(found)}: {error}",)
        raise
    serves = [{"what": title, "how": text} for title, text in _summary(settings)]
    if output is Output.TABLE:
        typer.echo(f"{printable(found)}: fine")
        for one in serves:
            typer.echo(f"  {one['what']:<9}{one['how']}")
        for warning in warned:
            typer.echo(f"warning: {warning}")
        return
    summary = {"summary": {"file": str(found)}}
    whole = {"file": str(found), "serves": serves, "warnings": warned}
    records([*serves, *({"warning": warning} for warning in warned), summary], output, whole)


@config.command()
def show(
    file: FileArgument = None,
    toml: Annotated[
        bool, typer.Option("--toml", help="Print a file that can be loaded again; ignores --output.")
    ] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Show the value of every setting, and whether it comes from a default or the file.

        tiercache config show node.toml

        tiercache config show --toml > node.toml

    JSON fields: file, settings (as in a file), origins (default or file, by setting). With jsonl
    one line for each setting: setting, value, origin, description.
    """
    from tiercache.config.document import description, dotted, effective, leaves
    from tiercache.config.document import document as as_file
    from tiercache.config.loading import find_file, resolve

    loaded = resolve(find_file(file))
    said = effective(loaded.settings)
    found = [(key, value, loaded.origin(key)) for key, value in leaves(said)]
    if toml:
        import tomli_w

        typer.echo(tomli_w.dumps(as_file(loaded.settings)))
        return
    rows = [
        {"setting": dotted(key), "value": value, "origin": origin, "description": description(key)}
        for key, value, origin in found
    ]
    if output is Output.TABLE:
        _print(("setting", "value", "from", "what it is"), rows)
        return
    origins = {dotted(key): origin for key, _, origin in found}
    file_name = loaded.file and str(loaded.file)
    records(rows, output, {"file": file_name, "settings": said, "origins": origins})


@config.command()
def schema(output: OutputOption = Output.TABLE) -> None:
    """List every setting of the file, with its default and its description.

        tiercache config schema

    JSON fields: settings (setting, default, description). With jsonl one line for each. The default is null
    if the setting has none, or if the default follows from other settings.
    """
    from tiercache.config.document import every_setting

    rows = [
        {"setting": name, "default": default, "description": said} for name, default, said in every_setting()
    ]
    if output is Output.TABLE:
        _print(("setting", "default", "what it is"), rows)
    else:
        records(rows, output, {"settings": rows})


@config.command()
def apply(
    file: FileArgument = None,
    drop: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="Tier to be left out at once, with what only it has, such as one on a dead disk; may be"
            " repeated. Its files stay.",
        ),
    ] = None,
    store: Annotated[
        str,
        typer.Option(
            "--store",
            "-s",
            metavar="TARGET",
            help="Directory or grpc:// URL of the daemon. Default: the unix sockets of the file.",
        ),
    ] = "",
    output: OutputOption = Output.TABLE,
) -> None:
    """Let the daemon that serves take over its file: tiers, quotas, principals and certificates.

    The file is checked as by `config check`. Then the daemon reads it again, as after SIGHUP, and takes over
    all that can change while it serves, or nothing. The command waits until tiers that are no longer in
    `storage` have left: what only they have is copied to the others. They answer meanwhile, and `tiercache
    status` shows how much is left. If this command is interrupted, the daemon goes on. To give the change up,
    write the old list back, and apply that. This needs the verb admin without a tenant or namespaces.

        tiercache config apply /etc/tiercache/tiercache.toml

    A tier that is out, or whose objects fit nowhere else, goes without a copy:

        tiercache config apply --drop ssd

    JSON fields: changed (tiers and quotas, in words), at_next_start (settings that need a restart). With
    jsonl one line for each.
    """
    from tiercache.cli.readiness import warnings_about
    from tiercache.cli.store.target import opened, resolve_daemon
    from tiercache.config.loading import find_file, resolve
    from tiercache.config.urls import storage_url

    settings = resolve(find_file(file)).settings
    for warning in warnings_about(settings, ports=False):
        say(f"warning: {warning}")
    if not store and not settings.unix:
        raise ConfigError("the daemon of this file has no unix sockets; name it with --store")
    target = resolve_daemon(
        store or storage_url("grpc", settings.socket_directory), "only a daemon has settings"
    )
    with opened(target, tells=False) as daemon:
        changed, waiting = getattr(daemon, "reload")(drop or ())  # noqa: B009  not of the contract
        _wait_for_leaving(daemon)
    if output is not Output.TABLE:
        rows = [*({"changed": one} for one in changed), *({"at_next_start": one} for one in waiting)]
        records(rows, output, {"changed": changed, "at_next_start": waiting})
        return
    typer.echo(f"applied: {clean(', '.join(changed)) or 'no tier and no quota has changed'}")
    if waiting:
        say(f"changed, but only from the next start on: {clean(', '.join(waiting))}")


def _wait_for_leaving(store: StorageBackend) -> None:
    """Wait until no tier of a daemon leaves any more; raises RefusedError if one cannot."""
    from tiercache.storage.tiers import LEAVING, STUCK

    said, at = "", 0.0
    while leaving := [tier for tier in store.usage().tiers if tier.why.startswith((LEAVING, STUCK))]:
        for tier in leaving:
            if tier.why.startswith(STUCK):
                raise RefusedError(
                    f"tier {tier.name!r}: {clean(tier.why)}; the daemon tries again, --drop {tier.name}"
                    " leaves it out at once, and its old place in storage keeps it"
                )
        news = "; ".join(f"tier {tier.name}: {clean(tier.why)}" for tier in leaving)
        if news != said and time.monotonic() - at >= _NEWS_S:
            said, at = news, time.monotonic()
            say(said)
        time.sleep(_LOOK_S)


def _summary(settings: Settings) -> Iterator[tuple[str, str]]:
    from tiercache.text import exact_duration, exact_size

    if not settings.storage:
        yield "store", f"{settings.directory / 'store'}, {exact_size(settings.disk_bytes)}"
    elif isinstance(settings.storage, str):
        yield "store", settings.storage
    else:
        yield from (("tier", url) for url in settings.storage)
    if settings.unix:
        yield "unix", f"{settings.socket_directory}/grpc.sock, attach.sock, data.sock"
    for address in settings.addresses:
        yield "tcp", f"{address}, {_protection(settings)}"
    if settings.http.listen:
        yield "http", settings.http.listen
    yield from (("who", text) for text in _callers(settings))
    limits = settings.limits
    yield (
        "memory",
        (
            f"{exact_size(settings.host_bytes)} in flight, {exact_size(settings.client_bytes)} of one client,"
            f" {exact_size(settings.principal_bytes)} of one principal; objects up to"
            f" {exact_size(settings.object_bytes)}"
        ),
    )
    yield (
        "limits",
        (
            f"{limits.clients} clients, {limits.streams} streams, {limits.streams_per_client} of one client;"
            f" cut after {exact_duration(limits.idle)} without progress, and after"
            f" {exact_duration(limits.call)}"
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
    yield from map(_principal_text, settings.principals)
    if settings.addresses and all(principal.uid is not None for principal in settings.principals):
        yield "every client that can reach a TCP address: read, write in all namespaces"


def _principal_text(principal: Principal) -> str:
    from tiercache.core import Verb

    spaces = principal.namespaces
    where = "all namespaces" if "*" in spaces else ", ".join(f"{space[:12]}..." for space in spaces)
    tenant = f" of tenant {principal.tenant}" if principal.tenant else ""
    return (
        f"{principal.name}{tenant} by {principal.credential}:"
        f" {', '.join(verb for verb in Verb if verb in principal.verbs)} in {where}"
    )


def _print(columns: Sequence[str], rows: Iterable[Mapping[str, Any]]) -> None:
    shown = table(columns, left=columns)
    for row in rows:
        *cells, description = map(_cell, row.values())
        shown.add_row(
            *(Text(cell, "dim" if cell == "default" else "") for cell in cells), Text(description, "dim")
        )
    console().print(shown)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return str(value).lower() if isinstance(value, bool) else str(value)
