"""The command and what all verbs share: exit codes, and errors as one sentence without a traceback."""

from __future__ import annotations

import logging
import signal
import sys
from typing import Annotated, Final

import typer
from rich.console import Console

import tiercache
from tiercache.cli.bench import bench
from tiercache.cli.config import config
from tiercache.cli.demo import demo
from tiercache.cli.prove import prove
from tiercache.cli.replay import ReplayCommand, replay
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
app.command(cls=ReplayCommand)(replay)
app.command()(serve)
app.command()(prove)
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
    errors = Console(stderr=True, highlight=False, emoji=False)
    # As Ctrl-C does: unwind, so that processes that were started are ended and temporary directories removed.
    logging.getLogger("tiercache_backends.grpc").addHandler(logging.NullHandler())  # what it logs, the verbs say themselves
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(EXIT_TERMINATED))
    try:
        code = app(standalone_mode=False)
    except Exception as error:
        if (found := _verdict(error)) is None:
            raise
        code, sentence = found
        errors.print(f"[red]tiercache:[/] {safe(sentence)}" if sentence else "", soft_wrap=True, end="\n" if sentence else "")
    sys.exit(code if isinstance(code, int) else 0)


def _verdict(error: Exception) -> tuple[int, str] | None:
    """The exit code and the sentence for an error of the user's or the world's; None for one of ours."""
    if isinstance(error, UnreachableError):
        return EXIT_UNREACHABLE, str(error)
    if isinstance(error, InputError | ConfigError):
        return EXIT_USAGE, str(error)
    if isinstance(error, TierCacheError | OSError):
        return EXIT_ERROR, str(error)
    if isinstance(error, typer.Abort):
        return EXIT_ERROR, "aborted; nothing was changed"
    message = getattr(error, "format_message", None)  # of the command line's parser, whichever typer brings along
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help() if context else "")
        return EXIT_USAGE, ""
    said = str(message()).strip().rstrip(".")
    return EXIT_USAGE, f"{said[:1].lower()}{said[1:]}; see {context.command_path if context else 'tiercache'} --help"
