"""The `tiercache` command, which calls a verb, prints an error as one sentence, and chooses the exit code.

Only a defect of tiercache ends with a traceback.
"""

from __future__ import annotations

import io
import os
import select
import signal
import sys
from contextlib import suppress
from typing import Annotated, Any, Final

import typer

import tiercache
from tiercache.cli.terminal import MEANINGS, Exit, code_of, complain, exit_table
from tiercache.cli.verbs import Verbs
from tiercache.errors import MissingExtraError, TierCacheError
from tiercache_distribution import foreign_sentence

app = typer.Typer(
    name="tiercache",
    cls=Verbs,
    help=(
        "Keep the KV pages and recurrent states of hybrid language models across requests, on device, host"
        " and disk."
    ),
    epilog=f"Exit codes of all verbs:\n\n\b\n{exit_table()}",
    no_args_is_help=True,
    rich_markup_mode=None,  # plain help, because importing rich takes longer than the rest of --help
    pretty_exceptions_enable=False,
    add_completion=True,
)
_READER_GONE: Final = select.POLLERR | select.POLLHUP
"""Events that poll(2) reports for a pipe if its reader has closed the pipe."""


def _version(show: bool) -> None:
    if show:
        typer.echo(f"tiercache {tiercache.__version__}")
        if sentence := foreign_sentence():
            complain(sentence)
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    pass


def main() -> None:
    """Run the command; the entry point of the console script."""
    outputs = _outputs()
    # gRPC reads this when it is first imported; it would print lines of its own beside our sentences.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    # SIGTERM unwinds the stack as Ctrl-C does, so that child processes are ended and temporary directories
    # removed.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(Exit.TERMINATED))
    sys.exit(_run(outputs))


def _run(outputs: list[int]) -> int:
    try:
        code = app(standalone_mode=False)
        sys.stdout.flush()
    except SystemExit as left:
        # If the output is a pipe that its reader has closed, a write raises BrokenPipeError. Typer and rich
        # turn this error into SystemExit.
        if not isinstance(left.__context__, BrokenPipeError):
            raise
        return _report(left.__context__, outputs) or Exit.FAILED
    except Exception as error:
        if (code := _report(error, outputs)) is None:
            raise
        return code
    if code == Exit.INTERRUPTED:
        complain(MEANINGS[Exit.INTERRUPTED])
    return code if isinstance(code, int) else Exit.DONE


def _report(error: Exception, outputs: list[int]) -> int | None:
    """Print an error caused by the user or the environment, and return its exit code.

    Returns None for a defect of tiercache.
    """
    if isinstance(error, OSError) and _reader_gone(outputs):
        _discard(sys.stdout, sys.stderr)
        return Exit.UNREAD
    if (found := _classify(error)) is None:
        return None
    code, sentence = found
    if sentence:
        complain(sentence)
    try:
        sys.stdout.flush()
    except OSError:
        _discard(sys.stdout)  # otherwise the interpreter fails again when it flushes stdout at its end
    return code


def _classify(error: Exception) -> tuple[Exit, str] | None:
    """Return the exit code and the sentence to print for an error.

    Returns None for a defect of tiercache, which is an error that neither the user nor the environment
    caused.
    """
    if isinstance(error, typer.Abort):
        return Exit.NO, "aborted; nothing was changed"
    if isinstance(error, ModuleNotFoundError) and not (error.name or "").startswith("tiercache"):
        # A verb imports most of its packages while it runs.
        error = MissingExtraError("this verb", "all", error)
    if (code := code_of(error)) is not None:
        return code, _sentence(error)
    # Errors of the command-line parser have this method. Their class depends on the version of typer.
    message = getattr(error, "format_message", None)
    if message is None:
        return None
    context = getattr(error, "ctx", None)
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(context.get_help() if context else "")
        return Exit.MISUSED, ""
    said = str(message()).strip().rstrip(".")
    end = "" if said.endswith("?") else ";"
    return (
        Exit.MISUSED,
        f"{said[:1].lower()}{said[1:]}{end} see {context.command_path if context else 'tiercache'} --help",
    )


def _sentence(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror and not isinstance(error, TierCacheError):
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error)


def _outputs() -> list[int]:
    """Prepare stdout and stderr for printing, and return duplicates of their descriptors.

    The duplicates stay valid even if the streams are closed. After this call, the streams escape characters
    that their encoding lacks. A stream that was closed at the start becomes /dev/null.
    """
    descriptors = []
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            if isinstance(stream.buffer, io.RawIOBase):
                # PYTHONUNBUFFERED: Python drops the rest of a write that a leaving reader cuts short.
                stream = open(stream.fileno(), "w", 1, stream.encoding, closefd=False)  # noqa: SIM115
                setattr(sys, name, stream)
            stream.reconfigure(errors="backslashreplace")
            with suppress(OSError):
                descriptors.append(os.dup(stream.fileno()))
    return descriptors


def _reader_gone(outputs: list[int]) -> bool:
    """Return whether the reader of one of these descriptors has closed its end."""
    poll = select.poll()
    for descriptor in outputs:
        poll.register(descriptor, 0)
    return any(events & _READER_GONE for _, events in poll.poll(0))


def _discard(*streams: Any) -> None:
    """Redirect the streams to /dev/null.

    Later writes are dropped, including those of the interpreter when it ends.
    """
    devnull = os.open(os.devnull, os.O_WRONLY)
    for stream in streams:
        with suppress(OSError, ValueError):
            os.dup2(devnull, stream.fileno())
    os.close(devnull)
