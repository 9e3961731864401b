"""The `tiercache serve` command: run the daemon in the foreground."""

from __future__ import annotations

import logging
import os
import signal
import sys
from pathlib import Path
from threading import Event
from types import FrameType
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.markup import escape

from tiercache.cli.exits import Exit
from tiercache.cli.output import Output, OutputOption, document, records
from tiercache.errors import StorageError

if TYPE_CHECKING:
    from tiercache.daemon import Node


def serve(
    config: Annotated[
        Path | None,
        typer.Option("--config", "-c", help="The file. Default: $TIERCACHE_CONFIG, or /etc/tiercache/tiercache.toml if it is there."),
    ] = None,
    directory: Annotated[Path | None, typer.Option("--directory", "-d", help="Where the store and the unix sockets lie.")] = None,
    storage: Annotated[str | None, typer.Option(help="URL of another store than the file store in DIRECTORY/store.")] = None,
    disk_bytes: Annotated[str | None, typer.Option(help="Capacity of that file store, such as 200GiB.")] = None,
    host_bytes: Annotated[str | None, typer.Option(help="Memory for what is in flight: all that clients can make the daemon hold.")] = None,
    listen: Annotated[list[str] | None, typer.Option(help="A TCP address, host:port, beside the unix sockets; may be repeated.")] = None,
    metrics: Annotated[str | None, typer.Option(help="Address of the Prometheus endpoint, such as 127.0.0.1:9464.")] = None,
    insecure_bind: Annotated[
        bool | None, typer.Option("--insecure-bind", help="Allow an address that other machines reach, without authentication.")
    ] = None,
    verbose: Annotated[bool, typer.Option("--verbose", "-v", help="Log more.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Serve one store to many workers: on unix sockets for this host, on TCP for others.

    What is not given here comes from TIERCACHE_... variables, then from the file, then from defaults (`tiercache config show`). Stops on
    SIGTERM or Ctrl-C: calls under way may end within `drain`, then the store is closed. The exit code is 1 if they did not. What cannot be
    served is said before anything is written, as by `tiercache config check`.

    A daemon for the workers of this host, and how one of them reaches it:

        tiercache serve --directory /var/lib/tiercache --disk-bytes 200GiB

        tiercache ping --store grpc:///var/lib/tiercache/run

    For other machines, with a certificate and tokens: `tiercache config --help` shows such a file.

        tiercache serve --config /etc/tiercache/tiercache.toml

    JSON, on stdout once it serves: places (transport = unix, tcp or metrics; address, with the port), pid, store. With jsonl a line for
    each of places, and one with summary.
    """
    from tiercache.cli.readiness import check
    from tiercache.config.settings import find_file, load
    from tiercache.daemon import Node

    given: dict[str, Any] = {
        "directory": None if directory is None else str(directory.absolute()), "storage": storage, "disk_bytes": disk_bytes,
        "host_bytes": host_bytes, "listen": listen or None, "insecure_bind": insecure_bind,
        "metrics": None if metrics is None else {"listen": metrics},
    }  # fmt: skip
    settings = load(find_file(config), {name: value for name, value in given.items() if value is not None})
    logging.basicConfig(level=logging.DEBUG if verbose else logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    console = Console(stderr=True, highlight=False, emoji=False)
    for warning in check(settings):
        console.print(f"[yellow]warning:[/] {escape(warning)}", soft_wrap=True)
    stop = Event()

    def told(number: int, _: FrameType | None) -> None:
        if stop.is_set():  # second signal: do not wait for the calls under way
            sys.exit(128 + number)
        stop.set()

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, told)
    signal.signal(signal.SIGHUP, _hung_up)
    node = Node(settings)
    node.start()
    for said in node.describe():
        console.print(escape(said), soft_wrap=True)
    _report(node, output)
    while not stop.wait(1.0):
        if not node.alive:
            raise StorageError("the node ended by itself; its log says why")
    console.print(f"stopping: calls under way have {settings.drain:g} s", soft_wrap=True)
    if not node.stop():
        console.print("[red]tiercache:[/] not everything ended in time; the store will be checked at its next start", soft_wrap=True)
        raise typer.Exit(Exit.FAILED)
    console.print("stopped")


def _report(node: Node, output: Output) -> None:
    """Print as JSON where the node serves, for the process that started it; nothing in table format."""
    settings = node.settings
    places = [("unix", str(settings.socket_directory))] if settings.unix else []
    places += [("tcp", address) for address in node.addresses]
    places += [("metrics", node.metrics_address)] if node.metrics_address else []
    rows = [{"transport": transport, "address": address} for transport, address in places]
    summary = {"pid": os.getpid(), "store": settings.store_url}
    if output is Output.JSON:
        document({"places": rows, **summary})
    elif output is Output.JSONL:
        records([*rows, {"summary": summary}], output)


def _hung_up(number: int, _: FrameType | None) -> None:
    logging.getLogger(__name__).warning("SIGHUP: reloading is not there yet, so nothing was changed; restart the daemon for other settings")
