"""The `tiercache` command and what all verbs share: how the process ends, and errors printed as one sentence without a traceback."""

from __future__ import annotations

import os
import select
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

import tiercache
from tiercache.cli import exits
from tiercache.cli.exits import Exit
from tiercache.cli.verbs import Verbs
from tiercache.errors import TierCacheError

app = typer.Typer(
    name="tiercache",
    cls=Verbs,
    help="Keep the KV pages and recurrent states of hybrid language models across requests, on device, host and disk.",
    epilog=f"Exit codes of all verbs:\n\n{exits.table()}",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)
_BROKEN: Final = select.POLLERR | select.POLLHUP


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
    """Run the command; the entry point of the console script."""
    outputs = _outputs()
    # Unwind on SIGTERM as on Ctrl-C, so that child processes are ended and temporary directories removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    sys.exit(_run(outputs))


def _run(outputs: list[int]) -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as left:
        # typer and rich turn a BrokenPipeError, from a pipe whose reader went away, into SystemExit.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return _told(left.__context__, outputs) or Exit.FAILED
    except Exception as error:
        if (told := _told(error, outputs)) is None:
            raise
        return told
    return code if isinstance(code, int) else Exit.DONE


def _told(error: Exception, outputs: list[int]) -> int | None:
    """Report an error caused by the user or the environment and return its exit code; return None for a defect of tiercache."""
    if isinstance(error, OSError) and _forsaken(outputs):
        _silence(sys.stdout, sys.stderr)
        return Exit.UNREAD
    if (found := _verdict(error)) is None:
        return None
    code, sentence = found
    if sentence:
        from tiercache.cli.output import complain

        complain(sentence)
    try:
        sys.stdout.flush()
    except OSError:
        _silence(sys.stdout)  # otherwise the interpreter fails once more when it flushes at its end
    return code


def _verdict(error: Exception) -> tuple[Exit, str] | None:
    """Return the exit code and the sentence for an error caused by the user or the environment; None for a defect of tiercache."""
    if isinstance(error, typer.Abort):
        return Exit.NO, "aborted; nothing was changed"
    if (code := exits.code_of(error)) is not None:
        return code, _sentence(error)
    message = getattr(error, "format_message", None)  # an error of the command-line parser; its class depends on typer's version
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help() if context else "")
        return Exit.MISUSED, ""
    said = str(message()).strip().rstrip(".")
    end = "" if said.endswith("?") else ";"
    return Exit.MISUSED, f"{said[:1].lower()}{said[1:]}{end} see {context.command_path if context else 'tiercache'} --help"


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, TierCacheError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _outputs() -> list[int]:
    """Return duplicated descriptors of stdout and stderr, which stay valid whatever happens to the streams.

    Also makes printing safe: characters that the encoding lacks are escaped, and a stream that was closed at start becomes /dev/null.
    """
    descriptors = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
            with suppress(OSError):
                descriptors.append(os.dup(stream.fileno()))
    return descriptors


def _forsaken(outputs: list[int]) -> bool:
    """Return whether the reader of one of the outputs has gone away."""
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, 0)
    return any(events & _BROKEN for _, events in poll.poll(0))


def _silence(*streams: Any) -> None:
    """Redirect the streams to /dev/null, so that later writes are dropped, including the flush when the interpreter ends."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(devnull, stream.fileno())
    os.close(devnull)
