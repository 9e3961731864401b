"""The commands of `tiercache bench`: they turn options into a plan, run it and print its rows."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from tiercache.cli.output import Output, OutputOption

bench = typer.Typer(no_args_is_help=True, help="Measure this machine, each figure beside the raw limit of the same run.")


@bench.callback()
def _group() -> None:
    """Measure this machine, each figure beside the raw limit of the same run."""


@bench.command()
def disk(
    backend: Annotated[str, typer.Option(help="The store to measure: file or lmdb.")] = "file",
    size: Annotated[str, typer.Option(help="Sizes of an object, multiples of 4KiB, separated by commas.")] = "16KiB,256KiB,1MiB,16MiB",
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="On the disk to measure; what is written there is removed at the end.")
    ] = Path(),
    threads: Annotated[int, typer.Option(min=1, max=256, help="Threads that call the store at once, each with its part of a batch.")] = 1,
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Runs of which the median counts; one more comes first.")] = 5,
    total: Annotated[
        str, typer.Option("--bytes", help="What one size may store; more runs, or less of it, make the batches smaller.")
    ] = "2GiB",
    durability: Annotated[str, typer.Option(help="process or power; with power the limits sync each batch as well.")] = "process",
    case: Annotated[
        str, typer.Option(help="Only these, separated by commas: set-cached, set-uncached, set-fresh, get-warm, get-cold, exists, open.")
    ] = "",
    objects: Annotated[int, typer.Option(min=0, help="Fill one more store with so many tiny objects; exists and open on it.")] = 0,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a store on disk beside the raw calls that bound it, and beside one file per page.

    Batches of 128 objects (fewer where they would exceed 256 MiB); all sides take turns and use the same buffers. A set includes the
    checksums, a get their verification.

    What a disk gives a cache of 1 MiB pages, and how soon a store of a million objects answers:

        tiercache bench disk --directory /var/lib --size 1MiB

        tiercache bench disk --size 4KiB --case open --objects 1000000
    """
    # Imported here, so that --help does not load it.
    from tempfile import TemporaryDirectory

    from tiercache.cli.bench import show
    from tiercache.cli.bench.machine import machine
    from tiercache.cli.bench.plan import plan
    from tiercache.cli.bench.raw import direct_possible
    from tiercache.cli.bench.run import run

    made = plan(
        backend=backend, sizes=size, path=directory, threads=threads, repeats=repeat, total=total, durability=durability, cases=case,
        objects=objects,
    )  # fmt: skip
    with TemporaryDirectory(prefix=".benchmark-", dir=made.directory) as temporary:
        root = Path(temporary)
        here = machine(root, direct=direct_possible(root))
        # closing(): a run that stops between two rows, because the reader of the output went away, still has its store open.
        with _progress(output) as say, closing(run(made, root, here, say)) as found:
            rows, notes = show.collect(found, output)
    said = show.footer(made, here, notes)
    if output is Output.TABLE:
        show.table(rows, f"{made.backend} store", said)
    else:
        show.aside(said)


@bench.command()
def rpc(
    size: Annotated[str, typer.Option(help="Sizes of an object, multiples of 4KiB, separated by commas.")] = "16KiB,1MiB,16MiB",
    directory: Annotated[
        Path, typer.Option("--directory", "-d", help="For the daemon's store; what is written there is removed at the end.")
    ] = Path(),
    repeat: Annotated[int, typer.Option(min=1, max=1000, help="Runs of which the median counts; one more comes first.")] = 5,
    batch: Annotated[str, typer.Option(help="What a batch moves, if 128 objects are not less.")] = "128MiB",
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure a daemon on this machine: by TCP beside a bare gRPC stream, by shared memory beside the store in this process.

    Starts a daemon of its own, with a file store, and a server that does nothing but stream the same messages. All sides take turns and use
    the same buffers. A get includes the check of every byte.

        tiercache bench rpc --directory /var/lib --size 1MiB
    """
    from tempfile import TemporaryDirectory

    from tiercache.cli.bench import rpc as cases
    from tiercache.cli.bench import show
    from tiercache.cli.bench.machine import machine
    from tiercache.cli.bench.plan import directory_of, sizes_of
    from tiercache.cli.bench.raw import direct_possible
    from tiercache.config import parse_size

    sizes, batch_bytes = sizes_of(size), parse_size(batch)
    with TemporaryDirectory(prefix=".benchmark-", dir=directory_of(directory)) as temporary:
        root = Path(temporary)
        here = machine(root, direct=direct_possible(root))
        with _progress(output) as say, closing(cases.run(root, sizes, batch_bytes, repeat, say)) as found:
            rows, notes = show.collect(found, output)
    said = [f"{here}. Medians of {repeat} interleaved runs over the same buffers.", *(note.text for note in notes)]
    if output is Output.TABLE:
        show.table(rows, "daemon", said)
    else:
        show.aside(said)


@bench.command()
def device(
    number: Annotated[int, typer.Option("--device", min=0, max=127, help="The CUDA device, as this process counts them.")] = 0,
    most: Annotated[str, typer.Option(help="Bytes of the largest group; the host page-locks three times as many.")] = "1GiB",
    model: Annotated[str, typer.Option(help="Only these, separated by commas: qwen3-next-80b-a3b, qwen3.5-9b, qwen3.5-35b-a3b.")] = "",
    method: Annotated[
        str, typer.Option(help="Only these, separated by commas: batch, memcpy, kernel, choice (what the calibration takes).")
    ] = "",
    case: Annotated[str, typer.Option(help="Only these, separated by commas: start, copy, overlap, matmul.")] = "",
    repeat: Annotated[int, typer.Option(min=5, max=1000, help="Runs of which the median counts; one more comes first.")] = 5,
    quick: Annotated[bool, typer.Option("--quick", help="Qwen3-Next only, fewer counts of objects, shorter computing.")] = False,
    output: OutputOption = Output.TABLE,
) -> None:
    """Measure copies between a CUDA device and page-locked host memory, beside one contiguous copy of as many bytes.

    Stores and loads of 1 to 256 objects of hybrid models: pages of 64 tokens,
    states, and both. By each method (batch: the driver's batched copies; memcpy:
    one call a copy; kernel: ours), by the calibration's choice, and through the
    transfer engine. All bytes are compared before anything is timed. Further
    cases: what a start costs, a load beneath a model that computes, and matrix
    products beside copies; the last two need torch.

        tiercache bench device

        tiercache bench device --quick --case copy --method kernel,choice -o json
    """
    from tiercache.cli.bench import show
    from tiercache.cli.bench.device import show as shown
    from tiercache.cli.bench.device.plan import plan
    from tiercache.cli.bench.device.products import TorchProducts
    from tiercache.cli.bench.device.run import run
    from tiercache.transfer import cuda

    made = plan(models=model, most=most, methods=method, cases=case, repeats=repeat, quick=quick)
    card = cuda.CupyDevice(number)
    with _progress(output) as say, closing(run(made, card, TorchProducts, say)) as found:
        rows, notes = show.collect(found, output)
    said = shown.footer(made, card, notes)
    if output is Output.TABLE:
        shown.tables(rows, said)
    else:
        show.aside(said)


@contextmanager
def _progress(output: Output) -> Iterator[Callable[[str], None]]:
    """Show the current step on a line of stderr; show nothing if stderr is no terminal or the line would appear between rows."""
    console = Console(stderr=True, emoji=False)
    if (output is Output.JSONL and sys.stdout.isatty()) or not console.is_terminal:
        yield lambda _: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    # Without redirect_stdout=False, rich would send stdout, and with it the rows, through this console too.
    with Progress(*columns, console=console, transient=True, redirect_stdout=False, refresh_per_second=2) as progress:
        task = progress.add_task("starting")
        yield lambda doing: progress.update(task, description=doing)
