"""The command and what all verbs share: exit codes, and errors as one sentence without a traceback."""

from __future__ import annotations

import signal
import sys
from typing import Annotated, Final

import typer
from rich.console import Console

import tiercache
from tiercache.cli.bench import bench
from tiercache.cli.config import config
from tiercache.cli.demo import demo
from tiercache.cli.serve import serve
from tiercache.cli.store import VERBS
from tiercache.cli.store.exits import EXIT_UNREACHABLE
from tiercache.cli.store.output import safe
from tiercache.cli.store.target import UnreachableError
from tiercache.errors import ConfigError, InputError, TierCacheError

EXIT_ERROR: Final = 1
EXIT_USAGE: Final = 2
EXIT_TERMINATED: Final = 128 + signal.SIGTERM

app = typer.Typer(
    name="tiercache",
    help="Keep the KV pages and recurrent states of hybrid language models across requests, on device, host and disk.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
app.command()(demo)
app.command()(serve)
for verb in VERBS:
    app.command()(verb)
app.add_typer(bench, name="bench")
app.add_typer(config, name="config")


def _version(show: bool) -> None:
    if show:
        typer.echo(f"tiercache {tiercache.__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")] = False,
) -> None:
    pass


def main() -> None:
    """The console script."""
    errors = Console(stderr=True, highlight=False)
    # As Ctrl-C does: unwind, so that processes that were started are ended and temporary directories removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        app()
    except (InputError, ConfigError) as error:
        errors.print(f"[red]tiercache:[/] {safe(str(error))}", soft_wrap=True)
        sys.exit(EXIT_USAGE)
    except UnreachableError as error:
        errors.print(f"[red]tiercache:[/] {safe(str(error))}", soft_wrap=True)
        sys.exit(EXIT_UNREACHABLE)
    except (TierCacheError, OSError) as error:
        errors.print(f"[red]tiercache:[/] {safe(str(error))}", soft_wrap=True)
        sys.exit(EXIT_ERROR)
