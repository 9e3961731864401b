"""The command and what all verbs share: how it ends, and errors as one sentence without a traceback."""

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
    """The console script."""
    outputs = _outputs()
    # As Ctrl-C does: unwind, so that processes that were started are ended and temporary directories removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    sys.exit(_run(outputs))


def _run(outputs: list[int]) -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as left:
        # What typer and rich make of a pipe whose reader went away.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return _told(left.__context__, outputs) or Exit.FAILED
    except Exception as error:
        if (told := _told(error, outputs)) is None:
            raise
        return told
    return code if isinstance(code, int) else Exit.DONE


def _told(error: Exception, outputs: list[int]) -> int | None:
    """Say what an error of the user's or the world's is; the exit code, or None for an error of ours."""
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
        _silence(sys.stdout)  # or the interpreter fails once more when it ends
    return code


def _verdict(error: Exception) -> tuple[Exit, str] | None:
    """The exit code and the sentence for an error of the user's or the world's; None for one of ours."""
    if isinstance(error, typer.Abort):
        return Exit.NO, "aborted; nothing was changed"
    if (code := exits.code_of(error)) is not None:
        return code, _sentence(error)
    message = getattr(error, "format_message", None)  # of the command line's parser, whichever typer brings along
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
    """Descriptors of what is printed to, which stay what they are whatever becomes of the streams.

    What is printed never fails for its characters, nor for a stream that was closed by whoever started this.
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
    """Did whoever read the output go away?"""
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, 0)
    return any(events & _BROKEN for _, events in poll.poll(0))


def _silence(*streams: Any) -> None:
    """Nothing more is written to these, at the end of the interpreter neither."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(devnull, stream.fileno())
    os.close(devnull)
