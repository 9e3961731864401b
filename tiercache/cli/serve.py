"""The `tiercache serve` command: run the daemon in the foreground, with its log on standard error."""

from __future__ import annotations

import logging
import os
import signal
import sys
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any, TextIO

import typer
from rich.console import Console
from rich.markup import escape

from tiercache.cli.terminal import Exit, Output, OutputOption, records
from tiercache.errors import StorageError, TierCacheError

if TYPE_CHECKING:
    from structlog.typing import EventDict

    from tiercache.daemon import StorageServer
    from tiercache.daemon.reload import Reloaded

_log = logging.getLogger(__name__)


def serve(
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            "-c",
            help="Configuration file. Default: $TIERCACHE_CONFIG, or /etc/tiercache/tiercache.toml if"
            " it exists.",
        ),
    ] = None,
    directory: Annotated[
        Path | None, typer.Option("--directory", "-d", help="Directory of the store and of the unix sockets.")
    ] = None,
    storage: Annotated[
        list[str] | None,
        typer.Option(
            help="URL of a store to serve instead of the file store in DIRECTORY/store; repeated: the URLs of"
            " the tiers of a chain, the fastest first."
        ),
    ] = None,
    disk_bytes: Annotated[
        str | None, typer.Option(help="Capacity of the file store in DIRECTORY/store, such as 200GiB.")
    ] = None,
    host_bytes: Annotated[
        str | None, typer.Option(help="Limit of the memory that clients can make the daemon hold.")
    ] = None,
    listen: Annotated[
        list[str] | None,
        typer.Option(help="TCP address, host:port, in addition to the unix sockets; may be repeated."),
    ] = None,
    http: Annotated[
        str | None,
        typer.Option(help="Address of the HTTP port with metrics and status, such as 127.0.0.1:9464."),
    ] = None,
    insecure_bind: Annotated[
        bool | None,
        typer.Option(
            "--insecure-bind", help="Allow an address that other machines can reach, without authentication."
        ),
    ] = None,
    log_level: Annotated[
        str | None, typer.Option(help="Least level of the log: debug, info (default), warning or error.")
    ] = None,
    log_format: Annotated[
        str | None, typer.Option(help="Lines of the log for people (text) or one JSON object a line (json).")
    ] = None,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serve one store to many workers: on unix sockets for this host, on TCP for others.

    A setting that is not given as an option comes from the file, else from its default (`tiercache config
    show`). A configuration that cannot be served is rejected before anything is written; `tiercache config
    check` makes the same checks. On SIGTERM or Ctrl-C, calls under way have `drain` seconds to end; then the
    store is closed. The exit code is 1 if a call did not end in time.

    Start a daemon for the workers of this host, and call it as a worker does:

        tiercache serve --directory /var/lib/tiercache --disk-bytes 200GiB

        tiercache ping --store grpc:///var/lib/tiercache/run

    Start a daemon for other machines. Its configuration file names, for example, a certificate and tokens
    (`tiercache config --help` shows such a file):

        tiercache serve --config /etc/tiercache/tiercache.toml

    Serve memory above a disk as one store, a chain of tiers:

        tiercache serve --storage 'memory://?capacity=8GiB' --storage 'file:///data/kv?capacity=2TiB'

    Tiers that are a list in the file (storage = [...]) can change meanwhile: `tiercache config apply`.

    JSON fields, printed on stdout once clients can connect: places (transport = unix, tcp, http, events
    or replay; address, with the port), pid, store (its URL, or a list of the URLs of its tiers).
    With jsonl one line for each place, and a last line with summary.
    """
    # The first import, because its error names the extra that is missing.
    from tiercache.daemon import StorageServer

    # isort: split
    from tiercache.cli.readiness import warnings_about
    from tiercache.config.loading import find_file, load
    from tiercache.daemon.process import Notifier

    flags: dict[str, Any] = {
        "directory": None if directory is None else str(directory.absolute()),
        "storage": storage[0] if storage and len(storage) == 1 else storage or None,
        "disk_bytes": disk_bytes,
        "host_bytes": host_bytes, "listen": listen or None, "insecure_bind": insecure_bind,
        "http": {"listen": http}, "log": {"level": log_level, "format": log_format},
    }  # fmt: skip
    settings = load(find_file(config), flags)
    if settings.http.address:
        # A missing extra is named before the store is opened.
        import tiercache.daemon.http  # noqa: F401
    start_logging(settings.log.level, settings.log.format)
    console = Console(stderr=True, highlight=False, emoji=False)

    def say(text: str, level: int = logging.INFO) -> None:
        """Tell people; tell the log if programs read it."""
        if settings.log.format == "json":
            _log.log(level, "%s", text)
        else:
            heading = {logging.WARNING: "[yellow]warning:[/] ", logging.ERROR: "[red]tiercache:[/] "}
            console.print(heading.get(level, "") + escape(text), soft_wrap=True)

    for warning in warnings_about(settings):
        say(warning, logging.WARNING)

    turn = Lock()

    def reload(drop: Collection[str] = ()) -> Reloaded:
        """Take over what can change while the daemon serves; raises an error if nothing was changed."""
        with turn:
            notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
            try:
                now = load(find_file(config), flags)
                reloaded = node.reload(now, drop)
            except TierCacheError as error:
                say(f"configuration: nothing was changed: {error}", logging.WARNING)
                node.note_refused_reload(error)
                raise
            finally:
                notifier.send("READY=1")
            start_logging(now.log.level, now.log.format)
            say(
                "configuration: tiers, quotas, principals, certificates and log are those of the settings now"
            )
            if reloaded.changed:
                say(f"configuration: {', '.join(reloaded.changed)}")
            if waiting := ", ".join(reloaded.at_next_start):
                say(f"configuration: {waiting}: changed, but only from the next start on", logging.WARNING)
            return reloaded

    def reload_at_hangup() -> None:
        with suppress(TierCacheError):  # the log has it
            reload()

    # A handler may interrupt the loop below anywhere, also inside a lock of `threading.Event`, which it would
    # then wait for without end; `SimpleQueue.put` holds none.
    signals: SimpleQueue[int] = SimpleQueue()
    ends = 0

    def handle_end(number: int, _: FrameType | None) -> None:
        nonlocal ends
        ends += 1
        if ends > 1:  # at the second signal, do not wait for the calls under way
            sys.exit(128 + number)
        signals.put(number)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, handle_end)
    signal.signal(signal.SIGHUP, lambda number, _: signals.put(number))
    notifier = Notifier()
    node = StorageServer(settings, notifier=notifier, reload=reload)
    node.start()
    for line in node.describe():
        say(line)
    if output is not Output.TABLE:
        _report(node, output)
    reloading, is_outdated = Thread(), False
    while not ends:
        with suppress(Empty):
            is_outdated |= signals.get(timeout=0.5) == signal.SIGHUP
        if not node.alive:
            raise StorageError("the storage server ended by itself; its log says why")
        # On a thread of its own: files that cannot be read must not keep the daemon from its end.
        if is_outdated and not reloading.is_alive():
            is_outdated = False
            reloading = Thread(target=reload_at_hangup, name="tiercache-reload", daemon=True)
            reloading.start()
    say(f"stopping: calls under way have {settings.drain:g} s")
    if not node.stop():
        say("calls under way did not end in time; the store will be checked at its next start", logging.ERROR)
        raise typer.Exit(Exit.FAILED)
    say("stopped")


def _report(node: StorageServer, output: Output) -> None:
    """Print the addresses of the server as JSON, for the process that started it."""
    settings = node.settings
    places = [("unix", str(settings.socket_directory))] if settings.unix else []
    places += [("tcp", address) for address in node.addresses]
    places += [("http", node.http_address)] if node.http_address else []
    if node.publisher is not None:
        addresses = (("events", node.publisher.endpoint), ("replay", node.publisher.replay_endpoint))
        places += [place for place in addresses if place[1]]
    rows = [{"transport": transport, "address": address} for transport, address in places]
    summary = {"pid": os.getpid(), "store": settings.store_url}
    records([*rows, {"summary": summary}], output, {"places": rows, **summary})


def start_logging(level: str, style: str, stream: TextIO | None = None) -> None:
    """Write the lines of all loggers from `level` on, in the format `style` (`text` or `json`), to `stream`.

    A line that comes while a call is served names the call. A second call takes the place of the first.
    """
    import structlog
    from structlog.stdlib import ExtraAdder, ProcessorFormatter

    stream = stream or sys.stderr
    renderer: Any
    if style == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        # 0: no padding behind the event; the parameter's name has changed between versions.
        renderer = structlog.dev.ConsoleRenderer(
            0, colors=stream.isatty(), exception_formatter=structlog.dev.plain_traceback
        )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_log_level,
                structlog.stdlib.add_logger_name,
                ExtraAdder(),
                structlog.processors.TimeStamper(fmt="iso", utc=True),
            ],
            processors=[
                ProcessorFormatter.remove_processors_meta,
                _add_call,
                structlog.processors.format_exc_info if style == "json" else _escape,
                renderer,
            ],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # gRPC for Python tells of each client that goes away as of an error.
    logging.getLogger("grpc").setLevel(max(logging.CRITICAL, root.level))


def _add_call(_: Any, __: str, line: EventDict) -> EventDict:
    from tiercache.daemon.call_log import CURRENT

    call = CURRENT.get()
    return line if call is None else call.fields() | dict(line)


def _escape(_: Any, __: str, line: EventDict) -> EventDict:
    """Escape what a client may have put into a text to begin a line of its own, or to move the cursor."""
    for name, value in line.items():
        if isinstance(value, str) and name != "exception" and not value.isprintable():
            line[name] = value.encode("unicode_escape").decode()
    return line
